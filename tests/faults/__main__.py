"""The fault programme: every fault of runs, a real sshd, and 100 random kills; `N passed, N failed` is its last line.

python -m tests.faults
"""

import sys
import time

import pytest

BUDGET_S = 25 * 60.0
SPARE_S = 60.0


class Counter:
    """Counts tests by how they ended; one that there is no time left for has failed."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.passed, self.failed, self.skipped = set[str](), set[str](), set[str]()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() - self.begin > BUDGET_S - SPARE_S:
            pytest.fail(f"not run: the {BUDGET_S / 60:.0f} minutes of the fault programme are over", pytrace=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)


def main() -> int:
    counter = Counter()
    places = ["tests/faults/test_verdicts.py", "tests/runs", "tests/faults/test_random_kills.py"]
    code = pytest.main(["-v", "-m", "", "-o", "faulthandler_timeout=1500", *places], plugins=[counter])
    for name in sorted(counter.skipped):
        print(f"skipped: {name}")
    broken = [] if code in (0, 1) else [f"pytest itself ended with {code!s}"]
    print("\n".join(broken), end="\n" if broken else "")
    print(f"{len(counter.passed - counter.failed)} passed, {len(counter.failed) + len(broken)} failed")
    return 1 if counter.failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the supervisor finds out by itself: commit, GPUs, locks, and how long a stop may take; and the file alone on a bare system."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import RunError
from draftsmith.runs import shim
from draftsmith.runs.launch import look_closely, stop
from draftsmith.runs.transport import Host, ask
from draftsmith.runs.verdict import judge
from tests.conftest import until

HERE = Host()
pytestmark = pytest.mark.process
# The four calls of the driver's library that the supervisor makes, by the signatures of nvml.h; figures come from a file.
NVML = """
#include <stdio.h>
#include <stdlib.h>
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static unsigned int use; static unsigned long long used;
int nvmlInit_v2(void) {
    FILE *file = fopen(getenv("DRAFTSMITH_TEST_GPU"), "r");
    if (!file || fscanf(file, "%u %llu", &use, &used) != 2) return 9;
    fclose(file);
    return 0;
}
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, nvmlUtilization_t *rates) {
    rates->gpu = use; rates->memory = 1;
    return device == (void *)2 ? 3 : 0;  /* as on a device cut into instances */
}
int nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory) {
    memory->total = 80ull << 30; memory->used = used << 20; memory->free = memory->total - memory->used;
    return 0;
}
"""


def seen_of(run: Path) -> Mapping[str, Any]:
    return look_closely(HERE, str(run))[1]


def start(run: Path, code: str, **spec: Any) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    ask(HERE, ["start"], {"run": str(run), "argv": argv, "beat_s": 0.2, "grace_s": 5, **spec})


def end(run: Path) -> None:
    stop(HERE, str(run), wait_s=20, say=lambda _line: None)


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no system Python")
def test_the_file_alone_starts_sleep_and_reports_it(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(shim.__file__, alone)
    shutil.copy("/bin/sleep", tmp_path / "my sleep")

    def verb(*words: str, spec: object = None) -> dict[str, Any]:
        # -I: neither this environment's packages nor ours can be found.
        command = ["/usr/bin/python3", "-I", "shim.py", *words]
        done = subprocess.run(
            command, cwd=alone, input=json.dumps(spec), capture_output=True, text=True, timeout=30, check=True
        )
        assert done.stdout.startswith(shim.SENTINEL)
        return json.loads(done.stdout.removeprefix(shim.SENTINEL))

    assert verb("start", spec={"run": "run", "argv": [str(tmp_path / "my sleep"), "600"], "beat_s": 0.2})["ok"]
    seen = verb("probe", "run")
    assert shim.stat_of(seen["record"]["child"]["pid"])
    assert judge(seen).alive
    verb("stop", "run")
    ended = until(lambda: verb("probe", "run")["exit"], "the end")
    assert ended["signal"] == 15
    assert ended["stop"]["by"] == "draftsmith stop"
    usage = subprocess.run(["/usr/bin/python3", "-I", "shim.py", "strat"], cwd=alone, capture_output=True, text=True)
    assert usage.returncode == 2
    assert "shim.py start < spec.json" in usage.stderr


def test_the_record_keeps_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(code)]
    (code / "file").write_text("one")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    start(tmp_path / "clean", "pass", cwd=str(code))
    assert seen_of(tmp_path / "clean")["record"]["commit"] == commit
    (code / "file").write_text("two")
    start(tmp_path / "changed", "pass", cwd=str(code))
    assert seen_of(tmp_path / "changed")["record"]["commit"] == f"{commit}-dirty"
    start(tmp_path / "elsewhere", "pass", cwd="/")
    assert "commit" not in seen_of(tmp_path / "elsewhere")["record"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler for a stand-in of the driver's library")
def test_gpu_use_is_seen_and_memory_that_was_not_returned_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "nvml.c")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("DRAFTSMITH_TEST_GPU", str(tmp_path / "gpu"))
    (tmp_path / "gpu").write_text("0 100")
    run = tmp_path / "run"
    start(run, "import time; print('up'); time.sleep(600)")
    (tmp_path / "gpu").write_text("97 70000")

    def busy() -> bool:
        return any(line == "GPU 0 97 % busy, 70000 MiB, GPU 1 70000 MiB" for line in judge(seen_of(run)).evidence)

    until(busy, "GPU use in the evidence")
    end(run)
    assert "GPU 0 still holds 70000 MiB, 100 MiB before the start" in judge(seen_of(run)).evidence
    start(run, "import time; print('up'); time.sleep(600)")
    (tmp_path / "gpu").write_text("0 70000")
    end(run)
    assert not any("still holds" in line for line in judge(seen_of(run)).evidence), "it was like that before"


def test_a_build_lock_that_nobody_holds_is_told_while_something_may_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    locks = [tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / name / "lock" for name in ("dead", "held")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    waits = """
        import time
        from draftsmith.runs.reporter import RunReporter
        RunReporter.from_environment().phase("imports")
        time.sleep(600)
        """
    with locks[1].open():
        start(tmp_path / "run", waits)
    until(lambda: seen_of(tmp_path / "run")["phase"], "a phase")
    told = [line for line in judge(seen_of(tmp_path / "run")).evidence if "may wait for" in line]
    assert told == [f"a build may wait for {locks[0]}, which nobody holds: remove it"]
    assert all(lock.exists() for lock in locks)
    end(tmp_path / "run")


def test_a_stop_allows_what_the_trainer_says_a_step_and_a_save_need(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    start(
        tmp_path / "run",
        f"""
        import json, os, pathlib, signal, sys, time
        def save(*_):
            time.sleep(3)
            pathlib.Path({str(saved)!r}).touch()
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path(os.environ["DRAFTSMITH_ATTEMPT"], "phase.json").write_text(json.dumps({{"name": "training", "boot": 0.0, "stop_s": 60.0}}))
        print("up")
        time.sleep(600)
        """,
        grace_s=1,
    )
    until(lambda: "up" in seen_of(tmp_path / "run")["log"]["tail"], "the trainer")
    end(tmp_path / "run")
    assert saved.exists()


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"port {port} cannot be used \(Address already in use.*\); choose another"):
            start(tmp_path / "run", "pass", port=port)
    start(tmp_path / "run", "pass", port=port)


def test_beats_come_more_slowly_where_one_costs_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict allows for it."""
    start(tmp_path / "run", "import time; print('up'); time.sleep(600)")
    seen = until(lambda: (found := seen_of(tmp_path / "run")).get("heartbeat") and found, "a heartbeat")
    end(tmp_path / "run")
    late = {**seen, "now": {**seen["now"], "boot": seen["heartbeat"]["boot"] + 30}}
    assert judge(late).name == "supervisor stalled"
    slow = {**late, "heartbeat": {**seen["heartbeat"], "seconds": 20.0}}
    assert judge(slow).name != "supervisor stalled"


def test_everything_below_a_process_is_found(tmp_path: Path) -> None:
    """The reference: ask each process for its chain of parents."""
    nested = subprocess.Popen(["sh", "-c", "sh -c 'sleep 60; true' & sh -c 'sh -c \"sleep 60; true\"; true'; true"])
    try:
        until(lambda: len(shim.descendants(nested.pid)) >= 5, "five processes")
        found = shim.descendants(nested.pid)

        def is_below(pid: int) -> bool:
            while pid > 1:
                pid = shim.stat_of(pid).get("ppid", 0)
                if pid == nested.pid:
                    return True
            return False

        everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        assert {pid for pid in everyone if is_below(pid)} == set(found)
        assert {os.getpid(), nested.pid} <= set(shim.descendants(0))
    finally:
        shim.send(shim.descendants(nested.pid).values(), 9)
        nested.kill()
        nested.wait()

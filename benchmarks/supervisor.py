"""What the supervisor costs: its share of one core and its memory, the file alone under a chosen Python.

python benchmarks/supervisor.py --json --seconds 60 --python /usr/bin/python3
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftsmith.runs import shim


def ask(python: str, file: Path, words: list[str], spec: object = None) -> dict:
    done = subprocess.run([python, str(file), *words], input=json.dumps(spec), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.removeprefix(shim.SENTINEL))


def measure(python: str, seconds: float) -> dict:
    folder = Path(tempfile.mkdtemp())
    file, run = folder / "shim.py", str(folder / "run")
    shutil.copy(shim.__file__, file)
    pid = ask(python, file, ["start"], {"run": run, "argv": ["sleep", str(seconds + 60)]})["shim"]
    try:
        first, begin = shim.stat_of(pid), time.monotonic()
        time.sleep(seconds)
        last, passed = shim.stat_of(pid), time.monotonic() - begin
    finally:
        ask(python, file, ["stop", run])
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "name": "supervisor",
        "seconds": round(passed, 1),
        "cpu_share_of_a_core": round((last["ticks"] - first["ticks"]) / 100 / passed, 5),
        "rss_mb": round(last["rss"] / 1e6, 1),
        "processes_on_the_machine": len(shim.descendants(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    figures = measure(options.python, options.seconds)
    if options.json:
        print(json.dumps(figures))
    else:
        print(f"{figures['cpu_share_of_a_core']:.2%} of one core, {figures['rss_mb']} MB, over {figures['seconds']} s")


if __name__ == "__main__":
    main()

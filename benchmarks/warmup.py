"""What warm-up costs: the second worker against the first, and a second start against the first.

    python benchmarks/warmup.py --json

Each start is a process of its own with one target thread and three drafter threads on CPU devices and two context lengths;
the cache is empty for the first start and kept for the second. Seconds to the first step count from the start of the
process, imports included (they are the same in both starts and given apart).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


def start(cache: Path, begin: float) -> dict[str, object]:
    """One start in this process: seconds per worker's warm-up, and seconds since `begin` to the end of the first step."""
    import torch

    from benchmarks.parts import random_packs, random_target, run_job
    from draftsmith.compiling.cache import use_cache
    from draftsmith.compiling.compiler import Compiler

    imports = time.time() - begin
    torch.set_num_threads(1)
    packs = random_packs(256, 4) + random_packs(512, 4)
    with use_cache(cache), Compiler(enabled=True, graphs=2, unplanned="error") as compiler:
        _, events = run_job(random_target(), packs, compiler, steps=1, replicas=3)
        first_step = time.time() - begin
    workers: dict[str, float] = {}
    for event in events:
        if "worker" in event:
            workers[event["worker"]] = workers.get(event["worker"], 0.0) + event["seconds"]
    seconds = [round(s, 3) for s in workers.values()]
    return {"imports_s": round(imports, 2), "worker_seconds": seconds, "first_step_s": round(first_step, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cache:
        print(json.dumps(start(arguments.cache, float(sys.stdin.readline()))))
        return
    from benchmarks.pairs import show
    from benchmarks.parts import scratch

    starts = []
    with scratch() as folder:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.warmup", "--cache", str(folder)],
                input=f"{time.time()}\n",
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[1],
            )
            starts.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = starts
    first, *later = cold["worker_seconds"]
    row = {
        "name": "warmup",
        "cold": cold,
        "warm": warm,
        "later_over_first_worker": round(max(later) / first, 4),
        "warm_over_cold_first_step": round(warm["first_step_s"] / cold["first_step_s"], 3),
    }
    show(row, as_json=arguments.json)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()

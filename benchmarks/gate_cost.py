"""What the gate costs when nothing compiles: the same compiled run with it and without it, interleaved.

    python benchmarks/gate_cost.py --json

Both sides warm up before anything is timed; each counted run trains the same number of steps with one target thread and two
drafter threads. `ratio` is the median over pairs of steps per second with the gate over without.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch

    from benchmarks.pairs import show
    from benchmarks.parts import random_packs, random_target, run_job, scratch
    from draftsmith.compiling.cache import use_cache
    from draftsmith.compiling.compiler import Compiler
    from draftsmith.compiling.gate import Gate

    class OpenGate(Gate):
        """Lets everybody through at once."""

        @contextmanager
        def shared(self) -> Iterator[None]:
            yield

    torch.set_num_threads(1)
    target, packs = random_target(), random_packs(512, 24)

    ratios, rates = [], {"gate": [], "open": []}
    with scratch() as folder, use_cache(folder), Compiler(enabled=True, unplanned="error") as compiler:
        run_job(target, packs, compiler, steps=2)
        for _ in range(arguments.pairs):
            pair = {}
            for name, gate in (("gate", Gate()), ("open", OpenGate())):
                compiler.gate = gate
                begin = time.perf_counter()
                run_job(target, packs, compiler, steps=arguments.steps)
                pair[name] = arguments.steps / (time.perf_counter() - begin)
                rates[name].append(pair[name])
            ratios.append(pair["gate"] / pair["open"])
    row = {
        "name": "gate_cost",
        "shape": "context 512, 64 anchors x 8, width 128, 3 layers, 1 target + 2 drafter threads",
        "dtype": "fp32",
        "pairs": arguments.pairs,
        "ratio": round(median(ratios), 4),
        "ratios": [round(r, 3) for r in ratios],
        "steps_per_s": {name: round(median(values), 2) for name, values in rates.items()},
        "unplanned_compiles": compiler.metrics.unplanned,
    }
    show(row, as_json=arguments.json)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()

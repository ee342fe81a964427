"""How a training step grows with context, anchors, layers and vocabulary: seconds and peak memory, and the exponents that fit them.

    python -m benchmarks.scaling --json [--axes context,anchors,layers,vocab] [--steps 7]

SmolLM2's width, fp32, 3 layers, 64 anchors x 8, context 2,048, vocabulary 4,096; one of these is varied at a time. Each point is a process
of its own: the product's compiled step, the median of several, and the most it grew over its imports while they ran. An
exponent is the slope of the least-squares line through the logarithms: 1 is linear; what does not grow makes it less, so
`last_doubling` says how many times more the largest point takes than the one of half its size, 2 being linear.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import linear_regression, median

import torch

from benchmarks.pairs import forget_peak, memory, show
from benchmarks.step_vs_speculators import Shape, make_work, our_step
from draftsmith.compiling.cache import use_cache

BASE = Shape(vocab=4096, context=2048, anchors=64, block=8)
AXES = {
    "context": (512, 1024, 2048, 4096, 8192),
    "anchors": (32, 64, 128, 256),
    "layers": (1, 2, 4, 8),
    "vocab": (4096, 16384, 65536, 131072),
}


def measure(shape: Shape, steps: int) -> dict[str, float]:
    """Seconds of a step, and bytes over the imports, in this process."""
    before = memory("VmRSS")
    spent = []
    with use_cache(Path("runs/bench-cache/scaling")), our_step(make_work(shape, torch.float32), torch.float32) as one:
        for _ in range(2):
            one()
        # Compiling is not a step.
        forget_peak()
        for _ in range(steps):
            begin = time.perf_counter()
            one()
            spent.append(time.perf_counter() - begin)
    return {"seconds": median(spent), "bytes": memory("VmHWM") - before}


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """The power of the size that the values follow."""
    return round(linear_regression([math.log(s) for s in sizes], [math.log(v) for v in values]).slope, 3)


def along(axis: str, steps: int) -> dict[str, object]:
    """One line of results."""
    sizes, points = AXES[axis], []
    for size in sizes:
        words = [sys.executable, "-m", "benchmarks.scaling", "--steps", str(steps), "--point", json.dumps({axis: size})]
        points.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
    seconds, held = [p["seconds"] for p in points], [p["bytes"] for p in points]
    return {
        "name": "scaling",
        "shape": {**asdict(BASE), axis: list(sizes)},
        "dtype": "fp32",
        "axis": axis,
        "exponent": exponent(sizes, seconds),
        "memory_exponent": exponent(sizes, held),
        "last_doubling": round((seconds[-1] / seconds[-2]) ** (1 / math.log2(sizes[-1] / sizes[-2])), 2),
        "seconds": [round(s, 3) for s in seconds],
        "peak_mb": [round(b / 1e6) for b in held],
    }


def main() -> None:
    """Print one JSON object a line, or the same for people."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--point", help="measure one shape and print its figures, as the parent does", type=json.loads)
    told = parser.parse_args()
    if told.point is not None:
        print(json.dumps(measure(replace(BASE, **told.point), told.steps)))
        return
    for axis in told.axes.split(","):
        show(along(axis, told.steps), as_json=told.json)


if __name__ == "__main__":
    main()

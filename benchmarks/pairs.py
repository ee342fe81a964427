"""Two ways to do the same work, timed in turns on one machine: A B A B …; what counts is the ratio within each pair."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch


def interleave(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of each side in each pair; both have run before, so that nothing is made for the first time here."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for side, spent in zip((ours, theirs), seconds, strict=True):
            begin = time.perf_counter()
            side()
            spent.append(time.perf_counter() - begin)
    return seconds


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """How many times faster ours was, pair by pair."""
    return [b / a for a, b in zip(ours, theirs, strict=True)]


def matmul_rate(dtype: torch.dtype, size: int = 2048, tries: int = 9) -> float:
    """FLOP/s of the machine's square matrix product, the best of several: what no step can pass."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def middle(values: list[float], digits: int = 3) -> float:
    """The median, rounded for people."""
    return round(median(values), digits)


def memory(field: str) -> int:
    """Bytes of this process as the kernel counts them: VmRSS, what it holds now; VmHWM, the most it held since `forget_peak`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """From here on the high-water mark counts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_elsewhere(benchmark: str, *words: str) -> int:
    """What `python -m benchmark ... ` prints last, a number of bytes: each side is measured in a process of its own."""
    told = subprocess.run([sys.executable, "-m", benchmark, *words], check=True, capture_output=True, text=True)
    return int(told.stdout.split()[-1])


def show(row: Mapping[str, object], *, as_json: bool) -> None:
    """A benchmark's result: one JSON object on a line, or a line a figure for people."""
    print(json.dumps(row) if as_json else "\n".join(f"{key}: {value}" for key, value in row.items()), flush=True)

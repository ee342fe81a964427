"""Two ways to do the same work, timed in turns on one machine: A B A B …; what counts is the ratio within each pair."""

import time
from collections.abc import Callable
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

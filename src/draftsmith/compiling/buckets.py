"""Buckets: the finite set of context lengths, and so of graphs, chosen from the data before training."""

from collections.abc import Callable, Sequence

LIMIT = 4


def choose_buckets(longest: int, waste_of: Callable[[Sequence[int]], float], *, enough: float = 0.03) -> list[int]:
    """The fewest buckets, halving from `longest`, whose padding share is at most `enough`; else the best of up to four.

    waste_of: packs the data into the given buckets and gives the share of positions that are padding.
    """
    candidates = []
    buckets = [longest]
    for _ in range(LIMIT):
        waste = waste_of(buckets)
        candidates.append((waste, list(buckets)))
        if waste <= enough or buckets[0] % 2 or buckets[0] <= 128:
            break
        buckets.insert(0, buckets[0] // 2)
    best = min(waste for waste, _ in candidates)
    return next(chosen for waste, chosen in candidates if waste <= max(best, enough))

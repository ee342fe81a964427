"""The acceptance rule of greedy speculative decoding."""

from torch import Tensor


def accept_greedy(drafted: Tensor, choices: Tensor) -> tuple[int, int]:
    """How many drafted tokens the target agrees with, and the token it adds after them.

    drafted: int64 [m], proposals for the next m positions; choices: int64 [m+1], the target's greedy choice at the slot
    before each proposal and after the last. The kept tokens are always a prefix of plain greedy decoding.
    """
    agreed = int((drafted == choices[:-1]).long().cumprod(dim=0).sum())
    return agreed, int(choices[agreed])

"""Which pack goes where, and when: a pure function of the seed, so that resume is exact and any number of workers agrees.

Positions number an endless stream of packs. Position p is the (p mod n)-th pack of epoch p // n in that epoch's order.
Optimizer step t takes positions t*G .. (t+1)*G - 1 (G packs a step); replica r takes every R-th of them.
"""

import hashlib
import math
import random
from dataclasses import dataclass
from functools import lru_cache

import torch


@lru_cache(maxsize=4)
def epoch_order(packs: int, seed: int, epoch: int) -> list[int]:
    """The order of pack indices in one epoch."""
    order = list(range(packs))
    random.Random(f"order/{seed}/{epoch}").shuffle(order)
    return order


@dataclass(frozen=True)
class Plan:
    """packs: packs in an epoch; per_step: G, over all replicas; steps: where the run ends; targets: target workers."""

    packs: int
    per_step: int
    steps: int
    replicas: int
    targets: int
    seed: int

    def pack_at(self, position: int) -> int:
        """Index of the pack at a stream position."""
        return epoch_order(self.packs, self.seed, position // self.packs)[position % self.packs]

    @property
    def share(self) -> int:
        """Packs per replica and step."""
        return self.per_step // self.replicas

    def route(self, position: int, start_step: int) -> tuple[int, int]:
        """Replica that trains on a position, and the position's number in that replica's channel of this attempt."""
        step, offset = divmod(position, self.per_step)
        # In turn, so that with a share larger than a channel no replica waits while another's packs are captured.
        place, replica = divmod(offset, self.replicas)
        return replica, (step - start_step) * self.share + place

    def target_positions(self, target: int, start_step: int) -> range:
        """Positions that one target worker captures, in order."""
        first = start_step * self.per_step
        return range(first + (target - first) % self.targets, self.steps * self.per_step, self.targets)


def total_steps(packs: int, per_step: int, epochs: float, max_steps: int | None) -> int:
    """Steps of a run: whole passes over the packs, rounded up to full steps, capped by `max_steps`."""
    steps = max(1, math.ceil(packs * epochs / per_step))
    return min(steps, max_steps) if max_steps is not None else steps


def generator_for(seed: int, purpose: str, number: int) -> torch.Generator:
    """A CPU generator that depends on its three arguments alone: no random state is carried from step to step."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def learning_rate(step: int, *, peak: float, steps: int, warmup: float) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up over `warmup` of the steps, then cosine to zero."""
    rising = round(steps * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

"""The frozen hand-offs: what flows from room to room, and nothing else does.

Shape letters: S context positions of one pack, A anchors, K block size, D hidden size, n captured target layers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One tokenised sample.

    ids: int64 [T]; loss_mask: bool [T], true where the target wrote the token; name: `file:line` of its source.
    """

    name: str
    ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Tokens:
    """One pack: documents laid one after another in a sequence of bucket length S, the rest padding.

    ids: int64 [S]; loss_mask: bool [S]; document_ids: int64 [S], -1 on padding; position_ids: int64 [S], from 0 in each
    document; lengths: documents' lengths in order; names: their sources.
    """

    ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def filled(self) -> int:
        """Positions that hold a document's token, not padding."""
        return sum(self.lengths)

    @property
    def bucket(self) -> int:
        """Context length S of this pack."""
        return self.ids.numel()


@dataclass(frozen=True)
class HiddenStates:
    """Captured target features of one pack: [S, n*D] in the target's dtype, zero on padding.

    ready: recorded on the producer's CUDA stream after the last write; the consumer's stream waits for it. None on CPU. final: what
    the target's head is given, [S, D], where the loss asks for the target's own distribution.
    """

    features: Tensor
    ready: torch.cuda.Event | None = None
    final: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """What one drafter forward and backward consumes: a pack, its features, and where it was drawn from.

    position: index in the endless stream of packs, from which every random choice about this pack is derived.
    """

    position: int
    tokens: Tokens
    hidden: HiddenStates


class StepResult(NamedTuple):
    """Sums over one or more packs; add them up and divide to get a mean.

    loss_sum: weighted losses in nats; weight_sum: sum of the weights; correct and counted: per predicted slot 1..K-1;
    accepted_sum: accepted tokens over `blocks` drafted blocks; tokens: real context tokens seen.
    """

    loss_sum: float
    weight_sum: float
    correct: list[int]
    counted: list[int]
    accepted_sum: int
    blocks: int
    tokens: int

    def __add__(self, other: object) -> "StepResult":
        if not isinstance(other, StepResult):
            return NotImplemented
        return StepResult(
            self.loss_sum + other.loss_sum,
            self.weight_sum + other.weight_sum,
            [a + b for a, b in zip(self.correct, other.correct, strict=True)],
            [a + b for a, b in zip(self.counted, other.counted, strict=True)],
            self.accepted_sum + other.accepted_sum,
            self.blocks + other.blocks,
            self.tokens + other.tokens,
        )

    @property
    def loss(self) -> float:
        """Weighted mean loss in nats; 0.0 where nothing was supervised."""
        return self.loss_sum / self.weight_sum if self.weight_sum else 0.0

    @property
    def tau(self) -> float:
        """Estimate of the acceptance length from teacher-forced blocks: accepted prefix plus the token the target adds."""
        return 1.0 + (self.accepted_sum / self.blocks if self.blocks else 0.0)

    @property
    def slot_accuracy(self) -> list[float]:
        """Share of right guesses per slot 1..K-1."""
        return [c / n if n else 0.0 for c, n in zip(self.correct, self.counted, strict=True)]

"""The two ends of a drafter that are the target's own: how tokens become vectors, and vectors logits. Frozen, never saved with it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.draft.packed import packed_product


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Logits softly kept within ±cap, as Gemma 2 does; as they are without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class FrozenEnds:
    """The target's embedding and head, [V, D] each, on a drafter's device, and what its family does around them.

    scale: what embedded tokens are multiplied with (Gemma); cap: limit of the logits; packed: the head once more, for decoding on a CPU.
    """

    embedding: Tensor
    head: Tensor
    scale: float = 1.0
    cap: float | None = None
    packed: Tensor | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Vectors [..., D] of token ids, as the target's first layer gets them."""
        rows = F.embedding(ids, self.embedding)
        # Rounded to the type of the weights first, as the library does.
        return rows if self.scale == 1.0 else rows * float(torch.tensor(self.scale, dtype=rows.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        product = hidden @ self.head.T if self.packed is None else packed_product(hidden, self.packed)
        return cap_logits(product, self.cap)

    def to(self, device: torch.device) -> "FrozenEnds":
        """The same on another device; tied ends stay one tensor."""
        embedding = self.embedding.to(device)
        tied = self.head.data_ptr() == self.embedding.data_ptr()
        return FrozenEnds(embedding, embedding if tied else self.head.to(device), self.scale, self.cap)

"""The two ends of a drafter that are the target's own: how tokens become vectors, and vectors logits. Frozen, never saved with it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Logits softly kept within ±cap, as Gemma 2 does; as they are without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class FrozenEnds:
    """The target's embedding and head, [V, D] each, on a drafter's device, and what its family does around them.

    scale: what embedded tokens are multiplied with (Gemma); cap: limit of the logits.
    """

    embedding: Tensor
    head: Tensor
    scale: float = 1.0
    cap: float | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Vectors [..., D] of token ids, as the target's first layer gets them."""
        rows = F.embedding(ids, self.embedding)
        # Rounded to the type of the weights first, as the library does.
        return rows if self.scale == 1.0 else rows * float(torch.tensor(self.scale, dtype=rows.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        return cap_logits(hidden @ self.head.T, self.cap)

    def to(self, device: torch.device) -> "FrozenEnds":
        """The same on another device; tied ends stay one tensor."""
        embedding = self.embedding.to(device)
        tied = self.head.data_ptr() == self.embedding.data_ptr()
        return FrozenEnds(embedding, embedding if tied else self.head.to(device), self.scale, self.cap)

"""How the next tokens are chosen: greedily, or by exact rejection sampling. Either way the output is as if the target wrote alone."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.errors import UsageError


def accept_greedy(drafted: Tensor, choices: Tensor) -> tuple[int, int]:
    """How many drafted tokens the target agrees with, and the token it adds after them.

    drafted: int64 [m], proposals for the next m positions; choices: int64 [m+1], the target's greedy choice at the slot
    before each proposal and after the last. The kept tokens are always a prefix of plain greedy decoding.
    """
    agreed = int((drafted == choices[:-1]).long().cumprod(dim=0).sum())
    return agreed, int(choices[agreed])


def accept_sampled(drafted: Tensor, proposed: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """The same by rejection sampling (Leviathan et al., arXiv 2211.17192, appendix A.1): kept tokens are distributed as `wanted`.

    drafted: int64 [m], each drawn from its row of proposed; proposed: float [m, V], the drafter's distributions; wanted: float
    [m+1, V], the target's. A drafted token x is kept with probability min(1, wanted(x) / proposed(x)); at the first that is not, a
    token is drawn from what `wanted` has beyond `proposed`.
    """
    rows = torch.arange(drafted.numel(), device=drafted.device)
    ratio = wanted[rows, drafted] / proposed[rows, drafted]
    kept = torch.rand(drafted.numel(), generator=generator, device=drafted.device) < ratio
    agreed = int(kept.long().cumprod(dim=0).sum())
    if agreed == drafted.numel():
        return agreed, draw(wanted[agreed], generator)
    beyond = (wanted[agreed] - proposed[agreed]).clamp_(min=0)
    # Rounding may leave nothing where both are equal; then either distribution is right.
    return agreed, draw(beyond if bool(beyond.sum() > 0) else wanted[agreed], generator)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """One index, with probability proportional to its weight."""
    return int(torch.multinomial(weights, 1, generator=generator))


@dataclass(frozen=True)
class Sampling:
    """temperature divides the logits; then the `top_k` most likely tokens stay (0: all), and of those the fewest whose
    probabilities reach `top_p`; the order of Hugging Face's generate. Raises UsageError for values outside their ranges."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise UsageError(
                f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}: expected a temperature above 0 (leave it out for "
                "greedy decoding), top_p in (0, 1] and top_k of 0 or more"
            )

    def distribution(self, logits: Tensor) -> Tensor:
        """Probabilities float32 [..., V] that tokens are drawn with."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, places = probabilities.sort(dim=-1, descending=True)
            # A token stays if those before it do not reach top_p yet, so that the first always does.
            ordered[ordered.cumsum(dim=-1) - ordered >= self.top_p] = 0
            probabilities = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
            probabilities /= probabilities.sum(dim=-1, keepdim=True)
        return probabilities


class Policy(Protocol):
    """Chooses tokens from logits."""

    def first(self, logits: Tensor) -> int:
        """The token after a prompt. logits: [V] of the target."""

    def propose(self, logits: Tensor) -> Tensor:
        """Drafted tokens int64 [m]. logits: [m, V] of the drafter."""

    def accept(self, logits: Tensor) -> tuple[int, int]:
        """How many of the tokens proposed last are kept, and the one that follows. logits: [m+1, V] of the target."""


class Greedy:
    """The most likely token, always."""

    def __init__(self) -> None:
        self._drafted = torch.empty(0)

    def first(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def propose(self, logits: Tensor) -> Tensor:
        self._drafted = logits.argmax(dim=-1)
        return self._drafted

    def accept(self, logits: Tensor) -> tuple[int, int]:
        return accept_greedy(self._drafted, logits.argmax(dim=-1))


class Sampled:
    """Draws by a Sampling. The drafter draws with the same temperature and limits, so that it proposes what the target might say."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device).manual_seed(sampling.seed)
        self._drafted = self._proposed = torch.empty(0)

    def first(self, logits: Tensor) -> int:
        return draw(self._sampling.distribution(logits), self._generator)

    def propose(self, logits: Tensor) -> Tensor:
        self._proposed = self._sampling.distribution(logits)
        if not logits.shape[0]:
            self._drafted = torch.empty(0, dtype=torch.long, device=logits.device)
        else:
            self._drafted = torch.multinomial(self._proposed, 1, generator=self._generator).squeeze(-1)
        return self._drafted

    def accept(self, logits: Tensor) -> tuple[int, int]:
        return accept_sampled(self._drafted, self._proposed, self._sampling.distribution(logits), self._generator)

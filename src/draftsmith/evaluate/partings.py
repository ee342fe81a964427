"""Where speculative and plain outputs part in low precision, and whether rounding alone explains it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.data.chat import common_prefix
from draftsmith.evaluate.suite import PromptResult
from draftsmith.target.load import Target

LIKELIEST = 100


class Parting(NamedTuple):
    """at: index of the first token that differs; gap: fp32 logits between the two tokens there; error: how far the rounded target's
    logits of the likeliest tokens are from fp32 at that place."""

    at: int
    gap: float
    error: float

    @property
    def is_near_tie(self) -> bool:
        """Whether two passes, each off by no more than the error, may choose differently."""
        return self.gap <= 2 * self.error


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, or None if they are equal."""
    place = common_prefix(one, other)
    return None if place == len(one) == len(other) else place


@torch.inference_mode()
def _last_logits(target: Target, ids: Sequence[int]) -> Tensor:
    tokens = torch.tensor([list(ids)], device=target.device)
    return target.model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()


def rescore(exact: Target, rounded: Target, prompt: Sequence[int], result: PromptResult) -> Parting | None:
    """Both tokens of the place where the outputs part, scored by the same target in fp32; None if they do not part.

    exact, rounded: the target in fp32 and in the type that the outputs were decoded in.
    """
    plain, speculative = result.plain.ids, result.speculative.ids
    at = first_difference(plain, speculative)
    if at is None:
        return None
    if at >= min(len(plain), len(speculative)):
        # One of them ended for no reason of its tokens.
        return Parting(at, float("inf"), 0.0)
    before = [*prompt, *plain[:at]]
    right, near = _last_logits(exact, before), _last_logits(rounded, before)
    likeliest = right.topk(min(LIKELIEST, right.numel())).indices
    return Parting(at, abs(float(right[plain[at]] - right[speculative[at]])), float((right - near)[likeliest].abs().max()))

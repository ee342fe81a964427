"""Losses of the block slots through the target's frozen head, a chunk of rows at a time, and the weights of the slots.

The head is frozen, so only the gradient with respect to the drafter's hidden states is needed. It is formed chunk by chunk
in the forward pass; what stays for backward is [N, D], never anything with N x V elements (N slots, V vocabulary).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.draft.ends import cap_logits

CHUNK_ELEMENTS = 2**24


class SlotLoss(NamedTuple):
    """losses: float32 [N] in nats, differentiable; guesses: int64 [N], most likely tokens."""

    losses: Tensor
    guesses: Tensor


def default_gamma(block_size: int) -> float:
    """Decay length of the slot weights: 4, 5 and 7 for block sizes 8, 10 and 16 (paper), linear between, K/2 outside below
    8 and 7K/16 above 16."""
    if block_size <= 10:
        return block_size / 2
    if block_size <= 16:
        return 5 + (block_size - 10) / 3
    return 7 * block_size / 16


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """w_k = exp(-(k-1)/gamma) for the predicted slots k = 1..K-1: float32 [K-1]."""
    return torch.tensor([math.exp(-(k - 1) / gamma) for k in range(1, block_size)], dtype=torch.float32)


def dpace_weights(losses: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): what each slot adds to the expected accepted length, float32 [A, K-1], 0 where unsupervised.

    losses: cross-entropy of each slot, [A, K-1], taken as constants; supervised: bool [A, K-1]; alpha in (0, 1] smooths the
    confidences exp(-loss), so that a slot behind an unsure one is never quite forgotten. A slot weighs the sum, over itself and
    all slots after it, of the product of the confidences up to there.
    """
    confidence = (1.0 - alpha) * (-losses.detach().float()).exp() + alpha
    reached = confidence.where(supervised, 1.0).cumprod(dim=1) * supervised
    return reached.flip(1).cumsum(dim=1).flip(1) * supervised


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor | None, rows: int, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        wants_grad = ctx.needs_input_grad[0]
        grad = torch.empty_like(hidden) if wants_grad else None
        losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        guesses = torch.empty_like(labels)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            raw = (hidden[part] @ head.T).float()
            # Before the cap, which keeps their order but may round the largest to the same value.
            guesses[part] = raw.argmax(dim=-1)
            logits = cap_logits(raw, cap)
            # How much a capped logit still moves with the one before it.
            slope = 1.0 if cap is None else 1.0 - (logits / cap).square()
            logits -= logits.logsumexp(dim=-1, keepdim=True)
            if teacher is None:
                losses[part] = -logits.gather(-1, labels[part, None]).squeeze(-1)
                d_logits = logits.exp_()
                d_logits[torch.arange(d_logits.shape[0], device=hidden.device), labels[part]] -= 1.0
            else:
                wanted = cap_logits((teacher[part] @ head.T).float(), cap).log_softmax(dim=-1)
                share = wanted.exp()
                losses[part] = (share * (wanted - logits)).sum(dim=-1)
                d_logits = logits.exp_().sub_(share)
            if grad is not None:
                grad[part] = (d_logits * slope).to(head.dtype) @ head
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(guesses)
        return losses, guesses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0][:, None]).to(grad.dtype), None, None, None, None, None


def chunked_head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    teacher: Tensor | None = None,
    cap: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> SlotLoss:
    """Cross-entropy of `hidden @ head.T` against `labels`, row by row; with a teacher, the divergence from its distribution,
    KL(teacher || drafter), instead.

    hidden: [N, D]; head: [V, D], frozen; labels: int64 [N]; teacher: the target's own final hidden states [N, D] where it chose the
    labels; cap: limit of the logits, where the target has one. At most `chunk_elements` logits of each exist at once (at least one row).
    """
    rows = max(1, chunk_elements // head.shape[0])
    losses, guesses = _ChunkedHeadLoss.apply(hidden, head, labels, teacher, rows, cap)
    return SlotLoss(losses, guesses)


def accepted_lengths(right: Tensor, counted: Tensor) -> Tensor:
    """Length of the unbroken run of right guesses from slot 1 in each block: int64 [A].

    right and counted: bool [A, K-1]; a slot that does not count ends the run.
    """
    return (right & counted).long().cumprod(dim=1).sum(dim=1)

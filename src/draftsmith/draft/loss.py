"""Weighted cross-entropy of the block slots through the target's frozen head, a chunk of rows at a time.

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
    """loss_sum: scalar, sum of weight x cross-entropy in nats, differentiable; guesses: int64 [N], most likely tokens."""

    loss_sum: Tensor
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


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, rows: int, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        wants_grad = ctx.needs_input_grad[0]
        grad = torch.empty_like(hidden) if wants_grad else None
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        guesses = torch.empty_like(labels)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            raw = (hidden[part] @ head.T).float()
            # Before the cap, which keeps their order but may round the largest to the same value.
            guesses[part] = raw.argmax(dim=-1)
            logits = cap_logits(raw, cap)
            # How much a capped logit still moves with the one before it.
            slope = 1.0 if cap is None else 1.0 - (logits / cap).square()
            log_z = logits.logsumexp(dim=-1)
            right = logits.gather(-1, labels[part, None]).squeeze(-1)
            loss_sum += (weights[part] * (log_z - right)).sum()
            if grad is not None:
                d_logits = logits.sub_(log_z[:, None]).exp_()
                d_logits[torch.arange(d_logits.shape[0], device=hidden.device), labels[part]] -= 1.0
                d_logits *= weights[part, None] * slope
                grad[part] = d_logits.to(head.dtype) @ head
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(guesses)
        return loss_sum, guesses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0], None, None, None, None, None


def chunked_head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    cap: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> SlotLoss:
    """Sum of weights x cross-entropy of `hidden @ head.T`, capped where the target caps, against `labels`.

    hidden: [N, D]; head: [V, D], frozen; labels: int64 [N]; weights: float32 [N]; cap: limit of the logits. At most `chunk_elements` logits exist at
    once (at least one row).
    """
    rows = max(1, chunk_elements // head.shape[0])
    loss_sum, guesses = _ChunkedHeadLoss.apply(hidden, head, labels, weights, rows, cap)
    return SlotLoss(loss_sum, guesses)


def accepted_lengths(right: Tensor, counted: Tensor) -> Tensor:
    """Length of the unbroken run of right guesses from slot 1 in each block: int64 [A].

    right and counted: bool [A, K-1]; a slot that does not count ends the run.
    """
    return (right & counted).long().cumprod(dim=1).sum(dim=1)

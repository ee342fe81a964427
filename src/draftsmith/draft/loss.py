"""Losses of the block slots through the target's frozen head, a part of the vocabulary at a time, and the weights of the slots.

The head is frozen, so only the gradient with respect to the drafter's hidden states is needed. It is formed chunk by chunk
in the forward pass; what stays for backward is [N, D], never anything with N x V elements (N slots, V vocabulary).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.draft.ends import cap_logits

# Tokens of a row that are searched at once for the largest logit.
SEARCHED = 128


def suitable_chunk(device: torch.device) -> int:
    """How many logits to hold at once: what stays in a CPU's cache between the products, enough to fill a GPU elsewhere."""
    return 2**21 if device.type == "cpu" else 2**25


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


def _chunks(head: Tensor, rows: int, elements: int) -> Iterator[tuple[int, Tensor]]:
    """The head by parts of the vocabulary whose logits for all rows are at most `elements`: first token and [C, D]."""
    columns = max(1, elements // max(1, rows))
    for first in range(0, head.shape[0], columns):
        yield first, head[first : first + columns]


def _logits(hidden: Tensor, part: Tensor) -> Tensor:
    """Logits of a part of the vocabulary, float32 [C, N]: a row a token, which CPUs multiply half as fast again as a row a slot."""
    return (part @ hidden.T).float()


def _update_guesses(guesses: Tensor, best: Tensor, logits: Tensor, first: int) -> Tensor:
    """The largest logit of each slot so far, having put the tokens of those that grew into `guesses`. logits: [C, N]."""
    tops = torch.stack([rows.amax(dim=0) for rows in logits.split(SEARCHED)])
    top = tops.amax(dim=0)
    # Only slots that grew are searched, and only where their largest is: a search over all takes longer than the softmax.
    grown = (top > best).nonzero()
    near = tops[:, grown[:, 0]].argmax(dim=0)[:, None] * SEARCHED + torch.arange(SEARCHED, device=logits.device)
    near.clamp_(max=logits.shape[0] - 1)
    guesses[grown] = first + near.gather(1, logits[near, grown].argmax(dim=1, keepdim=True))
    return torch.maximum(best, top)


def _cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, elements: int, cap: float | None, grad: Tensor | None
) -> SlotLoss:
    """One pass over the vocabulary, as flash attention goes over keys: what was summed so far shrinks whenever a larger logit appears."""
    count = hidden.shape[0]
    best, at_label = hidden.new_full((count,), -math.inf, dtype=torch.float32), hidden.new_zeros(count, dtype=torch.float32)
    others, guesses = torch.zeros_like(at_label), torch.zeros_like(labels)
    summed = None if grad is None else torch.zeros_like(hidden, dtype=torch.float32)
    for first, part in _chunks(head, count, elements):
        logits = _logits(hidden, part)
        # Before the cap, which keeps their order but may round the largest to the same value.
        before, best = best, _update_guesses(guesses, best, logits, first)
        largest = cap_logits(best, cap)
        shrink = (cap_logits(before, cap) - largest).exp()
        logits = cap_logits(logits, cap)
        here = ((labels >= first) & (labels < first + part.shape[0])).nonzero().squeeze(1)
        own = labels[here] - first
        at_label[here] = logits[own, here]
        # The label's own part stands apart, in fp32: near 1, it would be lost in what a short type rounds.
        shares = (logits.sub_(largest) if cap is None else logits - largest).exp_()
        shares[own, here] = 0.0
        others = others * shrink + shares.sum(dim=0)
        if summed is not None:
            summed.mul_(shrink[:, None]).add_(_through_cap(shares, logits, cap).to(head.dtype).T @ part)
    largest = cap_logits(best, cap)
    total = others + (at_label - largest).exp()
    losses = largest + total.log() - at_label
    if grad is not None and summed is not None:
        missing = _through_cap(-others, at_label, cap)
        grad.copy_((summed + missing[:, None] * head[labels]) / total[:, None])
    return SlotLoss(losses, guesses)


def _normaliser(states: Tensor, head: Tensor, elements: int, cap: float | None, guesses: Tensor | None = None) -> Tensor:
    """Logarithm of the sum over all exponentiated logits, float32 [N]; the largest logits' tokens go into `guesses`."""
    sums, best = [], states.new_full(states.shape[:1], -math.inf, dtype=torch.float32)
    for first, part in _chunks(head, states.shape[0], elements):
        logits = _logits(states, part)
        if guesses is not None:
            best = _update_guesses(guesses, best, logits, first)
        sums.append(cap_logits(logits, cap).logsumexp(dim=0))
    return torch.stack(sums).logsumexp(dim=0)


def _divergence(
    hidden: Tensor, head: Tensor, teacher: Tensor, elements: int, cap: float | None, grad: Tensor | None
) -> SlotLoss:
    """Two passes, since the gradient is a difference of two distributions that must be whole before it is rounded."""
    guesses = torch.zeros(hidden.shape[0], dtype=torch.long, device=hidden.device)
    mine, theirs = _normaliser(hidden, head, elements, cap, guesses), _normaliser(teacher, head, elements, cap)
    losses = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    summed = None if grad is None else torch.zeros_like(hidden, dtype=torch.float32)
    for _, part in _chunks(head, hidden.shape[0], elements):
        logits = cap_logits(_logits(hidden, part), cap)
        wanted = cap_logits(_logits(teacher, part), cap) - theirs
        share = wanted.exp()
        losses += (share * (wanted - logits + mine)).sum(dim=0)
        if summed is not None:
            summed += _through_cap((logits - mine).exp_().sub_(share), logits, cap).to(head.dtype).T @ part
    if grad is not None and summed is not None:
        grad.copy_(summed)
    return SlotLoss(losses, guesses)


def _through_cap(gradient: Tensor, logits: Tensor, cap: float | None) -> Tensor:
    """The gradient of what was before the cap, from that of the capped logits; may be done in place."""
    return gradient if cap is None else gradient.mul_(1.0 - (logits / cap).square())


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor | None, elements: int, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        if teacher is None:
            losses, guesses = _cross_entropy(hidden, head, labels, elements, cap, grad)
        else:
            losses, guesses = _divergence(hidden, head, teacher, elements, cap, grad)
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
    chunk_elements: int | None = None,
) -> SlotLoss:
    """Cross-entropy of `hidden @ head.T` against `labels`, row by row; with a teacher, the divergence from its distribution,
    KL(teacher || drafter), instead.

    hidden: [N, D]; head: [V, D], frozen; labels: int64 [N]; teacher: the target's own final hidden states [N, D] where it chose the
    labels; cap: limit of the logits, where the target has one. At most `chunk_elements` logits of each exist at once (at least one
    token's); as many as suit the device without it.
    """
    elements = chunk_elements or suitable_chunk(hidden.device)
    losses, guesses = _ChunkedHeadLoss.apply(hidden, head, labels, teacher, elements, cap)
    return SlotLoss(losses, guesses)


def accepted_lengths(right: Tensor, counted: Tensor) -> Tensor:
    """Length of the unbroken run of right guesses from slot 1 in each block: int64 [A].

    right and counted: bool [A, K-1]; a slot that does not count ends the run.
    """
    return (right & counted).long().cumprod(dim=1).sum(dim=1)

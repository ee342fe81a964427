"""Batch to loss to gradients: forward and backward of one pack on one replica."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.draft.anchors import Anchors, SlotTargets, block_inputs, choose_anchors, slot_positions, slot_targets
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.loss import accepted_lengths, chunked_head_loss, dpace_weights, slot_weights
from draftsmith.draft.mask import Mask, build_mask
from draftsmith.draft.model import SLIDING, Drafter
from draftsmith.pipeline.plan import generator_for
from draftsmith.spans import span
from draftsmith.types import Batch, HiddenStates, StepResult, Tokens

Loss = Literal["ce", "dpace", "kl"]


@dataclass(frozen=True)
class StepSettings:
    """anchors: blocks per pack; gamma: decay of slot weights; dtype: compute dtype; seed: of the run; loss: cross-entropy with
    decaying weights (`ce`) or D-PACE's (`dpace`, smoothed by dpace_alpha), or divergence from the target's distribution (`kl`)."""

    anchors: int
    gamma: float
    dtype: torch.dtype
    seed: int
    loss: Loss = "ce"
    dpace_alpha: float = 0.5


def anchors_for(batch: Batch, settings: StepSettings, block_size: int) -> Anchors:
    """The anchors of a pack at its stream position; the same on every replica and after every resume."""
    generator = generator_for(settings.seed, "anchors", batch.position)
    tokens = batch.tokens
    return choose_anchors(
        tokens.loss_mask, tokens.document_ids, count=settings.anchors, block_size=block_size, generator=generator
    )


def layer_masks(drafter: Drafter, document_ids: Tensor, anchors: Anchors) -> dict[str, Mask]:
    """One mask per layer type in use. Sliding layers are causal inside the block, as serving engines read them."""
    config = drafter.config
    return {
        kind: build_mask(
            drafter.backend,
            document_ids,
            anchors,
            config.block_size,
            window=config.sliding_window if kind == SLIDING else None,
            causal=kind == SLIDING,
        )
        for kind in sorted(set(config.layer_types))
    }


Core = Callable[[Drafter, Tensor, Tensor, Tensor, Tensor, Tensor, Anchors], Tensor]


def drafter_core(
    drafter: Drafter,
    features: Tensor,
    context_positions: Tensor,
    slots: Tensor,
    positions: Tensor,
    document_ids: Tensor,
    anchors: Anchors,
) -> Tensor:
    """The part of a step that is worth compiling: context and slots to hidden states, [1, A*K, D].

    Shapes depend on the bucket alone; anchors and documents are data, so fresh ones each step need no new graph. Masks are
    made here, so that a compiled step never holds all pairs of queries and keys for flex, and compiles nothing of its own.
    """
    context = drafter.encode_context(features, context_positions)
    return drafter(slots, positions, context, layer_masks(drafter, document_ids, anchors))


def drafted_hidden(
    drafter: Drafter, ends: FrozenEnds, batch: Batch, anchors: Anchors, dtype: torch.dtype, core: Core = drafter_core
) -> Tensor:
    """Drafter outputs of all slots of a pack, [A, K, D]. Anchors and everything else live on the drafter's device."""
    device, config, tokens = ends.head.device, drafter.config, batch.tokens
    with span("copy"):
        if batch.hidden.ready is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(batch.hidden.ready)
        # Towards the CPU a copy that does not block would be read before it ends.
        features = batch.hidden.features.to(device=device, dtype=dtype, non_blocking=device.type == "cuda")
    document_ids, position_ids = tokens.document_ids.to(device), tokens.position_ids.to(device)
    slots = block_inputs(tokens.ids.to(device), anchors, config.block_size, config.mask_token_id)
    positions = slot_positions(position_ids, anchors, config.block_size)
    embedded = ends.embed(slots.flatten()).to(dtype)
    context = (features[None], position_ids[None])
    hidden = core(drafter, *context, embedded[None], positions.flatten()[None], document_ids, anchors)
    return hidden[0].unflatten(0, (anchors.positions.numel(), config.block_size))


def _teacher(batch: Batch, anchors: Anchors, block_size: int, device: torch.device) -> Tensor:
    """The target's final hidden state from which it chose each slot's token, [A*(K-1), D]: that of the position before."""
    final = batch.hidden.final
    assert final is not None, "the loss needs the target's final states"
    before = anchors.positions[:, None] + torch.arange(block_size - 1, device=device)
    return final.to(device)[before.clamp(max=final.shape[0] - 1).flatten()]


@dataclass(frozen=True)
class _Losses:
    """rows: the slots that carry loss, of the A*(K-1) that are predicted; weights and guesses: theirs; loss_sum: differentiable."""

    targets: SlotTargets
    rows: Tensor
    weights: Tensor
    guesses: Tensor
    loss_sum: Tensor


def _forward(drafter: Drafter, ends: FrozenEnds, batch: Batch, settings: StepSettings, core: Core) -> _Losses:
    device, block_size, tokens = ends.head.device, drafter.config.block_size, batch.tokens
    on_host = anchors_for(batch, settings, block_size)
    anchors = Anchors(on_host.positions.to(device), on_host.valid.to(device))
    hidden = drafted_hidden(drafter, ends, batch, anchors, settings.dtype, core)
    ids, loss_mask = tokens.ids.to(device), tokens.loss_mask.to(device)
    targets = slot_targets(ids, loss_mask, tokens.document_ids.to(device), anchors, block_size)
    # The head, the most expensive product, runs only for slots that carry loss; slot 0 never does.
    rows = targets.supervised.flatten().nonzero().squeeze(1)
    loss = chunked_head_loss(
        hidden[:, 1:].flatten(0, 1)[rows],
        ends.head.to(settings.dtype),
        targets.labels.flatten()[rows],
        teacher=_teacher(batch, anchors, block_size, device)[rows].to(settings.dtype) if settings.loss == "kl" else None,
        cap=ends.cap,
    )
    weights = slot_weights(block_size, settings.gamma).to(device).expand_as(targets.labels)
    if settings.loss == "dpace":
        losses = torch.zeros(targets.labels.numel(), device=device)
        losses[rows] = loss.losses.detach()
        weights = dpace_weights(losses.view_as(targets.labels), targets.supervised, settings.dpace_alpha)
    used = weights.flatten()[rows]
    return _Losses(targets, rows, used, loss.guesses, (used * loss.losses).sum())


def run_pack(drafter: Drafter, ends: FrozenEnds, batch: Batch, settings: StepSettings, core: Core = drafter_core) -> StepResult:
    """Forward and, where gradients are enabled, backward of the *sum* of the weighted losses; divide by all weights later.

    Gradients add up in the parameters' `.grad`. A pack without supervised slots gives zeros, never NaN.
    """
    with span("forward"):
        losses = _forward(drafter, ends, batch, settings, core)
    with span("backward"):
        if torch.is_grad_enabled():
            losses.loss_sum.backward()
        # Reading a number waits for the device.
        loss_sum = float(losses.loss_sum.detach())
    targets = losses.targets
    right = torch.zeros(targets.labels.numel(), dtype=torch.bool, device=losses.rows.device)
    right[losses.rows] = losses.guesses == targets.labels.flatten()[losses.rows]
    right = right.view_as(targets.supervised)
    measured = targets.supervised[:, 0]
    return StepResult(
        loss_sum=loss_sum,
        weight_sum=float(losses.weights.sum()),
        correct=(right & targets.supervised).sum(dim=0).tolist(),
        counted=targets.supervised.sum(dim=0).tolist(),
        accepted_sum=int(accepted_lengths(right, targets.supervised)[measured].sum()),
        blocks=int(measured.sum()),
        tokens=batch.tokens.filled,
    )


def blank_batch(bucket: int, drafter: Drafter, dtype: torch.dtype, device: torch.device) -> Batch:
    """A pack of the given bucket for warming up: one document, all supervised, features zero in the target's dtype."""
    hidden = drafter.config.hidden_size
    width = len(drafter.config.target_layer_ids) * hidden
    zeros = torch.zeros(bucket, dtype=torch.long)

    def states(columns: int) -> Tensor:
        return torch.zeros(bucket, columns, dtype=dtype, device=device)

    tokens = Tokens(zeros, torch.ones(bucket, dtype=torch.bool), zeros, torch.arange(bucket), (bucket,), ("blank",))
    return Batch(0, tokens, HiddenStates(states(width), final=states(hidden)))

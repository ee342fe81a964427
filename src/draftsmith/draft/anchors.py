"""Where blocks open, and what each of their slots should predict (DFlash, arXiv 2602.06036, section on training)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Anchors(NamedTuple):
    """positions: int64 [A], sorted among the valid ones, 0 where padded; valid: bool [A], false on padding blocks."""

    positions: Tensor
    valid: Tensor


class SlotTargets(NamedTuple):
    """labels: int64 [A, K-1], token of slot k = 1..K-1; supervised: bool [A, K-1], false where a slot carries no loss."""

    labels: Tensor
    supervised: Tensor


def _slots(anchor_positions: Tensor, document_ids: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Indices [A, K-1] that slots 1..K-1 predict, clamped to the sequence, and whether they lie in the anchor's document."""
    length = document_ids.numel()
    index_AK = anchor_positions[:, None] + torch.arange(1, block_size, device=document_ids.device)
    clamped_AK = index_AK.clamp(max=length - 1)
    document_A = document_ids[anchor_positions]
    inside_AK = (index_AK < length) & (document_ids[clamped_AK] == document_A[:, None]) & (document_A >= 0)[:, None]
    return clamped_AK, inside_AK


def anchor_candidates(loss_mask: Tensor, document_ids: Tensor, block_size: int) -> Tensor:
    """Positions whose block holds at least one supervised token of the same document: bool [S]."""
    every = torch.arange(loss_mask.numel(), device=loss_mask.device)
    index, inside = _slots(every, document_ids, block_size)
    return (inside & loss_mask[index]).any(dim=1)


def _shuffled(values: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(values.numel(), generator=generator, device=generator.device)
    return values[order.to(values.device)]


def _first_of_each(values: Tensor) -> Tensor:
    """True where a value [N] occurs for the first time."""
    grouped, places = values.sort(stable=True)
    first = torch.ones_like(values, dtype=torch.bool)
    first[places[1:]] = grouped[1:] != grouped[:-1]
    return first


def choose_anchors(
    loss_mask: Tensor, document_ids: Tensor, *, count: int, block_size: int, generator: torch.Generator
) -> Anchors:
    """Draw `count` anchors without replacement from the candidates, sorted; short of candidates, pad with invalid blocks.

    Every document gets one before any gets a second, so that a short one beside a long one is learnt from at each step; the others
    fall on all remaining candidates alike. loss_mask: bool [S]; document_ids: int64 [S]. The draw uses `generator` alone.
    """
    drawn = _shuffled(anchor_candidates(loss_mask, document_ids, block_size).nonzero().flatten(), generator)
    first = _first_of_each(document_ids[drawn])
    # Shuffled again: the first of a long document tends to come early.
    taken = torch.cat([_shuffled(drawn[first], generator), drawn[~first]])[:count].sort().values
    positions = torch.zeros(count, dtype=torch.long, device=loss_mask.device)
    positions[: taken.numel()] = taken
    return Anchors(positions, torch.arange(count, device=loss_mask.device) < taken.numel())


def slot_targets(ids: Tensor, loss_mask: Tensor, document_ids: Tensor, anchors: Anchors, block_size: int) -> SlotTargets:
    """Slot k of the block at anchor a predicts token x[a+k], and counts where that token is supervised and in a's document."""
    index, inside = _slots(anchors.positions, document_ids, block_size)
    return SlotTargets(ids[index], inside & loss_mask[index] & anchors.valid[:, None])


def block_inputs(ids: Tensor, anchors: Anchors, block_size: int, mask_token_id: int) -> Tensor:
    """Input ids of all slots, [A, K]: the real token x[a] in slot 0, the mask token in slots 1..K-1."""
    inputs = torch.full((anchors.positions.numel(), block_size), mask_token_id, dtype=torch.long, device=ids.device)
    inputs[:, 0] = ids[anchors.positions]
    return inputs


def slot_positions(position_ids: Tensor, anchors: Anchors, block_size: int) -> Tensor:
    """Position ids of all slots, [A, K]: slot k of anchor a has the anchor's position in its document plus k."""
    return position_ids[anchors.positions][:, None] + torch.arange(block_size, device=position_ids.device)

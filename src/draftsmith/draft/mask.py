"""What a slot may see. One rule, written once, read by every attention backend.

Keys are `[context S | slots A*K]`. Slot (a, k) sees context positions strictly before a in a's document, and the slots of
its own block; nothing else. Sliding layers see only the last W of those context positions and are causal inside the
block, because serving engines read them so.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from draftsmith.draft.anchors import Anchors
from draftsmith.draft.blocks import PartMask

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Backend = Literal["sdpa", "blocks", "flex"]


Mask = Tensor | BlockMask | PartMask


def visibility(
    document_ids: Tensor, anchors: Anchors, block_size: int, *, window: int | None = None, causal: bool = False
) -> MaskRule:
    """The rule as a flex-attention `mask_mod(batch, head, query, key) -> bool` over one pack.

    document_ids: int64 [S]; window: W of a sliding layer, None for full attention; causal: order inside the block.
    """
    context = document_ids.numel()
    last_context = context - 1

    def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        anchor = anchors.positions[block]
        position = key.clamp(max=last_context)
        # Strictly before the anchor: the target's state at the anchor does not exist yet when the block is drafted.
        seen = (key < context) & (position < anchor) & (document_ids[position] == document_ids[anchor])
        if window is not None:
            seen = seen & (position >= anchor - window)
        slot = key - context
        # A padding block stands at position 0, so it sees no context, but it sees itself: a row that sees nothing would turn softmax into NaN.
        own = (key >= context) & (slot // block_size == block)
        if causal:
            own = own & (slot <= query)
        return seen | own

    return rule


def dense_mask(rule: MaskRule, queries: Tensor, keys: Tensor) -> Tensor:
    """The rule on every pair of the given places, int64 [Q] and [T]: bool [Q, T], true where visible."""
    zero = torch.zeros((), dtype=torch.long, device=queries.device)
    return rule(zero, zero, queries[:, None], keys[None, :])


def build_mask(
    backend: Backend,
    document_ids: Tensor,
    anchors: Anchors,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Mask:
    """The mask in the form `backend` reads: bool [1, 1, A*K, S + A*K] for sdpa, its parts for blocks, a BlockMask for flex."""
    rule = visibility(document_ids, anchors, block_size, window=window, causal=causal)
    context, queries = document_ids.numel(), anchors.positions.numel() * block_size
    device = document_ids.device
    if backend == "flex":
        return create_block_mask(rule, B=None, H=None, Q_LEN=queries, KV_LEN=context + queries, device=device)
    if backend == "sdpa":
        return dense_mask(rule, torch.arange(queries, device=device), torch.arange(context + queries, device=device))[
            None, None
        ]
    firsts, block = torch.arange(0, queries, block_size, device=device), torch.arange(block_size, device=device)
    return PartMask(dense_mask(rule, firsts, torch.arange(context, device=device)), dense_mask(rule, block, context + block))

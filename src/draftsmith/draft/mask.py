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

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Backend = Literal["sdpa", "eager", "flex"]


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


def dense_mask(rule: MaskRule, queries: int, keys: int, device: torch.device | str) -> Tensor:
    """The rule on every pair: bool [queries, keys], true where visible."""
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    return rule(zero, zero, query, key)


def build_mask(
    backend: Backend,
    document_ids: Tensor,
    anchors: Anchors,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Tensor | BlockMask:
    """The mask in the form `backend` reads: bool [1, 1, A*K, S + A*K] for sdpa and eager, a BlockMask for flex."""
    rule = visibility(document_ids, anchors, block_size, window=window, causal=causal)
    queries = anchors.positions.numel() * block_size
    keys = document_ids.numel() + queries
    if backend == "flex":
        return create_block_mask(rule, B=None, H=None, Q_LEN=queries, KV_LEN=keys, device=document_ids.device)
    return dense_mask(rule, queries, keys, document_ids.device)[None, None]

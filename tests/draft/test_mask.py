"""The visibility rule against three plain loops, in every form a backend reads."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from draftsmith.draft.anchors import Anchors, choose_anchors
from draftsmith.draft.blocks import PartMask
from draftsmith.draft.mask import build_mask, dense_mask, visibility
from draftsmith.types import Tokens
from tests.draft.test_anchors import packs


def slow_mask(tokens: Tokens, anchors: Anchors, block_size: int, window: int | None, causal: bool) -> list[list[bool]]:
    context, blocks = tokens.bucket, len(anchors.positions)
    rows = []
    for block in range(blocks):
        a = int(anchors.positions[block])
        for k in range(block_size):
            row = []
            for p in range(context):
                seen = bool(anchors.valid[block]) and p < a and bool(tokens.document_ids[p] == tokens.document_ids[a])
                if window is not None and p not in range(a - window, a):
                    seen = False
                row.append(seen)
            for other in range(blocks):
                for slot in range(block_size):
                    row.append(other == block and (slot <= k or not causal))
            rows.append(row)
    return rows


@settings(deadline=None, max_examples=150)
@given(
    packs(), st.integers(2, 5), st.integers(1, 5), st.integers(0, 2**31), st.one_of(st.none(), st.integers(1, 4)), st.booleans()
)
def test_rule_equals_loops(tokens: Tokens, block_size: int, count: int, seed: int, window: int | None, causal: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = choose_anchors(tokens.loss_mask, tokens.document_ids, count=count, block_size=block_size, generator=generator)
    rule = visibility(tokens.document_ids, anchors, block_size, window=window, causal=causal)
    queries = count * block_size
    expected = slow_mask(tokens, anchors, block_size, window, causal)
    assert dense_mask(rule, torch.arange(queries), torch.arange(tokens.bucket + queries)).tolist() == expected
    parts = build_mask("blocks", tokens.document_ids, anchors, block_size, window=window, causal=causal)
    assert isinstance(parts, PartMask)
    for row, seen in enumerate(expected):
        block, slot = divmod(row, block_size)
        own = tokens.bucket + block * block_size
        assert seen[: tokens.bucket] == parts.context[block].tolist()
        assert seen[own : own + block_size] == parts.own[slot].tolist()
    # The same rule read element by element, as flex attention does.
    assert create_mask(rule, None, None, queries, tokens.bucket + queries, device="cpu")[0, 0].tolist() == expected


def test_no_row_is_fully_masked() -> None:
    document_ids = torch.tensor([0, 0, 0, -1, -1])
    anchors = Anchors(torch.tensor([1, 0, 0]), torch.tensor([True, False, False]))
    mask = build_mask("sdpa", document_ids, anchors, 2)
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (1, 1, 6, 11)
    assert mask.any(dim=-1).all()
    # A padding block sees its own slots and no context.
    assert not mask[0, 0, 2:, :5].any()

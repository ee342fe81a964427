"""Attention in parts against one plain softmax over everything, for outputs and gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.draft import blocks
from draftsmith.draft.anchors import choose_anchors
from draftsmith.draft.mask import build_mask
from draftsmith.types import Tokens
from tests.draft.test_anchors import packs

HEADS, GROUPS, DIM = 4, 2, 8


def plainly(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """query [1, H, Q, d], keys and values [1, G, T, d], mask [1, 1, Q, T]: the formula as it stands, in fp64."""
    keys, values = (x.double().repeat_interleave(HEADS // GROUPS, dim=1) for x in (keys, values))
    scores = (query.double() @ keys.transpose(-1, -2)) / math.sqrt(DIM)
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1) @ values


def operands(context: int, slots: int, seed: int, size: float = 2.0) -> list[Tensor]:
    """Queries, then keys and values of the context and of the slots."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, slots), *[(GROUPS, context)] * 2, *[(GROUPS, slots)] * 2]
    return [(size * torch.randn(1, *shape, DIM, generator=generator)).requires_grad_() for shape in shapes]


@settings(deadline=None, max_examples=100)
@given(
    packs(),
    st.integers(2, 5),
    st.integers(1, 8),
    st.integers(0, 2**31),
    st.one_of(st.none(), st.integers(1, 4)),
    st.booleans(),
    st.sampled_from([1, 100, 500, 2**20]),
)
def test_outputs_and_gradients_equal_a_plain_softmax_however_the_blocks_are_parted(
    tokens: Tokens, block_size: int, count: int, seed: int, window: int | None, causal: bool, limit: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = choose_anchors(tokens.loss_mask, tokens.document_ids, count=count, block_size=block_size, generator=generator)
    given_mask = (tokens.document_ids, anchors, block_size)
    parts = build_mask("blocks", *given_mask, window=window, causal=causal)
    dense = build_mask("sdpa", *given_mask, window=window, causal=causal)
    assert isinstance(parts, blocks.PartMask)
    assert isinstance(dense, Tensor)
    query, context_key, context_value, own_key, own_value = told = operands(tokens.bucket, count * block_size, seed)
    keys, values = torch.cat([context_key, own_key], dim=2), torch.cat([context_value, own_value], dim=2)
    expected = plainly(query, keys, values, dense)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SCORES", limit)
        out = blocks.attend_blocks(*told, *parts)
        back = torch.randn(out.shape, generator=generator)
        found = torch.autograd.grad(out, told, back)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    # Context that nobody sees still has a gradient: zero.
    for mine, theirs in zip(found, torch.autograd.grad(expected, told, back.double()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_parts_hold_each_block_once_and_no_more_scores_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SCORES", 2000)
    seen = torch.arange(100)[None] < torch.tensor([0, 3, 50, 60, 0, 99, 99, 100])[:, None]
    seen[3, :40] = False
    parts = list(blocks._parts(seen, 10))
    assert [block for part in parts for block in range(part.first, part.last)] == list(range(8))
    assert len(parts) > 2
    for part in parts:
        mine = seen[part.first : part.last]
        assert not mine[:, : part.start].any()
        assert not mine[:, part.stop :].any()
        assert mine[:, part.common_start : max(part.common_start, part.common_stop)].all()
        assert part.last - part.first == 1 or 10 * mine.numel() / 100 * (part.stop - part.start) <= 2000


def test_a_short_type_errs_no_more_than_the_fused_kernel() -> None:
    count, block_size, context = 12, 4, 96
    document_ids = torch.zeros(context, dtype=torch.long)
    anchors = choose_anchors(
        torch.ones(context, dtype=torch.bool),
        document_ids,
        count=count,
        block_size=block_size,
        generator=torch.Generator().manual_seed(0),
    )
    parts, dense = (build_mask(kind, document_ids, anchors, block_size) for kind in ("blocks", "sdpa"))  # type: ignore[arg-type]
    assert isinstance(parts, blocks.PartMask)
    assert isinstance(dense, Tensor)
    short = [x.detach().bfloat16() for x in operands(context, count * block_size, 0, size=1.0)]
    query, context_key, context_value, own_key, own_value = short
    keys, values = torch.cat([context_key, own_key], dim=2), torch.cat([context_value, own_value], dim=2)
    truth = plainly(query, keys, values, dense)
    fused = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=dense, enable_gqa=True)
    mine = (blocks.attend_blocks(*short, *parts) - truth).abs().mean()
    assert float(mine) < 3 * float((fused - truth).abs().mean())


def test_the_operation_keeps_its_word_to_compilers() -> None:
    # In the layout that the drafter's projections have, heads inside.
    told = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in operands(20, 8, 0)]
    document_ids = torch.zeros(20, dtype=torch.long)
    anchors = choose_anchors(
        torch.ones(20, dtype=torch.bool), document_ids, count=2, block_size=4, generator=torch.Generator().manual_seed(0)
    )
    parts = build_mask("blocks", document_ids, anchors, 4)
    assert isinstance(parts, blocks.PartMask)
    torch.library.opcheck(blocks.attend_blocks, (*told, *parts))

"""Anchors, labels and positions against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.draft.anchors import Anchors, anchor_candidates, block_inputs, choose_anchors, slot_positions, slot_targets
from draftsmith.types import Tokens


@st.composite
def packs(draw: st.DrawFn) -> Tokens:
    """A pack of a few documents with random supervision, and padding at the end."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    padding = draw(st.integers(0, 5))
    bucket = sum(lengths) + padding
    document_ids, position_ids = [], []
    for number, length in enumerate(lengths):
        document_ids += [number] * length
        position_ids += list(range(length))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    ids = draw(st.lists(st.integers(0, 99), min_size=bucket, max_size=bucket))
    return Tokens(
        torch.tensor(ids),
        torch.tensor(mask + [False] * padding),
        torch.tensor(document_ids + [-1] * padding),
        torch.tensor(position_ids + [0] * padding),
        tuple(lengths),
        tuple("abcd"[: len(lengths)]),
    )


def slow_candidates(tokens: Tokens, block_size: int) -> list[int]:
    found = []
    for a in range(tokens.bucket):
        for k in range(1, block_size):
            p = a + k
            inside = p < tokens.bucket and tokens.document_ids[a] >= 0 and tokens.document_ids[p] == tokens.document_ids[a]
            if inside and tokens.loss_mask[p]:
                found.append(a)
                break
    return found


@settings(deadline=None, max_examples=200)
@given(packs(), st.integers(2, 6))
def test_candidates_are_positions_whose_block_holds_a_supervised_token(tokens: Tokens, block_size: int) -> None:
    got = anchor_candidates(tokens.loss_mask, tokens.document_ids, block_size)
    assert got.nonzero().flatten().tolist() == slow_candidates(tokens, block_size)


@settings(deadline=None, max_examples=200)
@given(packs(), st.integers(2, 6), st.integers(1, 12), st.integers(0, 2**31))
def test_choice_is_without_replacement_sorted_and_padded(tokens: Tokens, block_size: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = choose_anchors(tokens.loss_mask, tokens.document_ids, count=count, block_size=block_size, generator=generator)
    candidates = slow_candidates(tokens, block_size)
    taken = anchors.positions[anchors.valid].tolist()
    assert len(anchors.positions) == count
    assert len(taken) == min(count, len(candidates))
    assert taken == sorted(set(taken))
    assert set(taken) <= set(candidates)
    assert anchors.valid.tolist() == [True] * len(taken) + [False] * (count - len(taken))


def test_every_candidate_is_drawn_equally_often() -> None:
    mask = torch.tensor([False] * 3 + [True] * 7)
    documents = torch.zeros(10, dtype=torch.long)
    counts = torch.zeros(10)
    for seed in range(3000):
        generator = torch.Generator().manual_seed(seed)
        drawn = choose_anchors(mask, documents, count=2, block_size=3, generator=generator)
        counts[drawn.positions] += 1
    candidates = slow_candidates(Tokens(mask.long(), mask, documents, documents, (10,), ("a",)), 3)
    share = counts[candidates] / counts.sum()
    assert candidates == [1, 2, 3, 4, 5, 6, 7, 8]
    assert counts.sum() == 6000
    torch.testing.assert_close(share, torch.full_like(share, 1 / 8), atol=0.02, rtol=0)


@settings(deadline=None, max_examples=200)
@given(packs(), st.integers(2, 6), st.integers(1, 12), st.integers(0, 2**31))
def test_no_document_gets_a_second_anchor_before_each_has_one(tokens: Tokens, block_size: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = choose_anchors(tokens.loss_mask, tokens.document_ids, count=count, block_size=block_size, generator=generator)
    of = tokens.document_ids.tolist()
    taken = [of[a] for a in anchors.positions[anchors.valid].tolist()]
    waiting = {of[a] for a in slow_candidates(tokens, block_size)} - set(taken)
    assert not waiting or len(taken) == len(set(taken)) == count


def test_with_too_few_anchors_a_short_document_is_chosen_as_often_as_a_long_one() -> None:
    documents = torch.tensor([0] * 40 + [1] * 4)
    mask = torch.ones(44, dtype=torch.bool)
    short = 0
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        drawn = choose_anchors(mask, documents, count=1, block_size=3, generator=generator)
        short += int(drawn.positions[0]) >= 40
    assert 430 < short < 570


@settings(deadline=None, max_examples=200)
@given(packs(), st.integers(2, 6), st.integers(1, 8), st.integers(0, 2**31))
def test_slot_k_predicts_the_token_k_after_the_anchor(tokens: Tokens, block_size: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = choose_anchors(tokens.loss_mask, tokens.document_ids, count=count, block_size=block_size, generator=generator)
    got = slot_targets(tokens.ids, tokens.loss_mask, tokens.document_ids, anchors, block_size)
    positions = slot_positions(tokens.position_ids, anchors, block_size)
    inputs = block_inputs(tokens.ids, anchors, block_size, mask_token_id=777)
    assert got.labels.shape == (count, block_size - 1)
    for row, (a, valid) in enumerate(zip(anchors.positions.tolist(), anchors.valid.tolist(), strict=True)):
        assert inputs[row].tolist() == [int(tokens.ids[a])] + [777] * (block_size - 1)
        for k in range(block_size):
            assert positions[row, k] == tokens.position_ids[a] + k
        for k in range(1, block_size):
            p = a + k
            supervised = (
                valid
                and p < tokens.bucket
                and bool(tokens.document_ids[p] == tokens.document_ids[a])
                and bool(tokens.loss_mask[p])
            )
            assert bool(got.supervised[row, k - 1]) == supervised
            if supervised:
                assert got.labels[row, k - 1] == tokens.ids[p]


def test_a_padding_block_carries_no_loss_even_where_position_zero_is_a_candidate() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    anchors = Anchors(torch.tensor([2, 0]), torch.tensor([True, False]))
    targets = slot_targets(torch.arange(4), mask, torch.zeros(4, dtype=torch.long), anchors, 3)
    assert targets.supervised.tolist() == [[True, False], [False, False]]

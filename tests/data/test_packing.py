"""Packs hold every document once, whole, at its own positions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.packing import pack
from draftsmith.types import Document


def document(number: int, length: int) -> Document:
    ids = torch.arange(length) + 1000 * number
    return Document(f"d{number}", ids, ids % 3 == 0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=120), st.integers(0, 3))
def test_packing_is_exact(lengths: list[int], seed: int) -> None:
    documents = [document(n, length) for n, length in enumerate(lengths)]
    packs, report = pack(documents, [20, 40], seed)
    found = {}
    for tokens in packs:
        assert tokens.bucket in (20, 40)
        assert sum(tokens.lengths) > 20 or tokens.bucket == 20
        start = 0
        for number, (length, name) in enumerate(zip(tokens.lengths, tokens.names, strict=True)):
            place = slice(start, start + length)
            assert tokens.document_ids[place].tolist() == [number] * length
            assert tokens.position_ids[place].tolist() == list(range(length))
            found[name] = (tokens.ids[place].tolist(), tokens.loss_mask[place].tolist())
            start += length
        assert (tokens.document_ids[start:] == -1).all()
        assert not tokens.loss_mask[start:].any()
    assert found == {d.name: (d.ids.tolist(), d.loss_mask.tolist()) for d in documents}
    assert report.packs == len(packs) == sum(report.per_bucket.values())
    assert report.tokens == sum(lengths)
    assert report.padding == sum(p.bucket for p in packs) - sum(lengths)
    again, _ = pack(documents, [20, 40], seed)
    assert [p.names for p in again] == [p.names for p in packs]


def test_first_fit_wastes_little() -> None:
    documents = [document(n, 5 + n % 30) for n in range(400)]
    _, report = pack(documents, [128], 0)
    assert report.waste < 0.06
    assert "padding" in report.line()

"""Weights and the chunked loss against plain formulas, and what stays in memory for backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.draft.loss import accepted_lengths, chunked_head_loss, default_gamma, slot_weights


def test_weights_decay_from_the_first_drafted_slot() -> None:
    weights = slot_weights(16, 7.0)
    assert weights.shape == (15,)
    assert weights[0] == 1.0
    for k in range(1, 16):
        assert weights[k - 1] == pytest.approx(math.exp(-(k - 1) / 7.0))


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_gamma_of_the_papers_block_sizes(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == gamma


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 20), st.integers(2, 30), st.integers(1, 100), st.integers(0, 2**31), st.sampled_from([None, 0.5, 3.0, 30.0])
)
def test_chunked_loss_equals_cross_entropy(rows: int, vocabulary: int, chunk: int, seed: int, cap: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(vocabulary, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    got = chunked_head_loss(hidden, head, labels, weights, cap=cap, chunk_elements=chunk)
    got.loss_sum.backward()
    other = hidden.detach().clone().requires_grad_()
    logits = other @ head.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    expected = (weights * F.cross_entropy(logits, labels, reduction="none")).sum()
    expected.backward()
    torch.testing.assert_close(got.loss_sum, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert got.guesses.tolist() == (other @ head.T).argmax(dim=-1).tolist()


def test_no_row_gives_zero_loss_and_gradient() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    loss = chunked_head_loss(hidden, torch.randn(9, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    loss.loss_sum.backward()
    assert loss.loss_sum == 0.0


def test_nothing_of_logit_size_is_saved_for_backward() -> None:
    rows, vocabulary = 64, 500
    sizes: list[int] = []
    hidden = torch.randn(rows, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        chunked_head_loss(hidden, torch.randn(vocabulary, 8), torch.zeros(rows, dtype=torch.long), torch.ones(rows))
    assert sizes, "the hook saw nothing, so this test proves nothing"
    assert max(sizes) < rows * vocabulary


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=3), min_size=1, max_size=5))
def test_accepted_length_is_the_unbroken_run(blocks: list[list[tuple[bool, bool]]]) -> None:
    right = torch.tensor([[r for r, _ in block] for block in blocks])
    counted = torch.tensor([[c for _, c in block] for block in blocks])
    expected = []
    for block in blocks:
        run = 0
        for r, c in block:
            if not (r and c):
                break
            run += 1
        expected.append(run)
    assert accepted_lengths(right, counted).tolist() == expected

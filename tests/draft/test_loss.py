"""Weights and the chunked loss against plain formulas, and what stays in memory for backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.draft.loss import accepted_lengths, chunked_head_loss, default_gamma, dpace_weights, slot_weights


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
    got = chunked_head_loss(hidden, head, labels, cap=cap, chunk_elements=chunk)
    (weights * got.losses).sum().backward()
    other = hidden.detach().clone().requires_grad_()
    logits = other @ head.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits, labels, reduction="none")
    (weights * expected).sum().backward()
    torch.testing.assert_close(got.losses, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert got.guesses.tolist() == (other @ head.T).argmax(dim=-1).tolist()


def test_a_slot_that_is_nearly_sure_keeps_its_small_gradient_in_bf16() -> None:
    """Its gradient is the little that is missing to 1, which bf16 cannot hold beside a 1."""
    generator = torch.Generator().manual_seed(0)
    head = (torch.randn(300, 64, generator=generator) * 0.25).bfloat16()
    labels = torch.arange(20)
    hidden = (head[:20].float() * 5).bfloat16()
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = hidden.detach().to(dtype).requires_grad_()
        loss = chunked_head_loss(leaf, head.to(dtype), labels, chunk_elements=20 * 64)
        assert float(loss.losses.detach().max()) < 0.05
        loss.losses.sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.double())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 0.03


def test_no_row_gives_zero_loss_and_gradient() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    loss = chunked_head_loss(hidden, torch.randn(9, 4), torch.zeros(0, dtype=torch.long)).losses.sum()
    loss.backward()
    assert loss == 0.0


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 20), st.integers(2, 30), st.integers(1, 100), st.integers(0, 2**31), st.sampled_from([None, 3.0]))
def test_divergence_from_the_teacher_equals_the_plain_formula(
    rows: int, vocabulary: int, chunk: int, seed: int, cap: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(vocabulary, 6, generator=generator, dtype=torch.float64)
    weights = torch.rand(rows, generator=generator)
    labels = torch.zeros(rows, dtype=torch.long)
    got = chunked_head_loss(hidden, head, labels, teacher=teacher, cap=cap, chunk_elements=chunk)
    (weights * got.losses).sum().backward()
    other = hidden.detach().clone().requires_grad_()
    logits, wanted = other @ head.T, teacher @ head.T
    if cap is not None:
        logits, wanted = cap * torch.tanh(logits / cap), cap * torch.tanh(wanted / cap)
    expected = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    (weights * expected).sum().backward()
    torch.testing.assert_close(got.losses, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_dpace_weighs_what_a_slot_adds_to_the_accepted_length(blocks: int, slots: int, alpha: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(blocks, slots, generator=generator) * 5
    supervised = torch.rand(blocks, slots, generator=generator) < 0.7
    weights = dpace_weights(losses, supervised, alpha)
    for block in range(blocks):
        for slot in range(slots):
            expected = 0.0
            for last in range(slot, slots):
                if supervised[block, last]:
                    product = 1.0
                    for before in range(last + 1):
                        if supervised[block, before]:
                            product *= (1 - alpha) * math.exp(-float(losses[block, before])) + alpha
                    expected += product
            assert float(weights[block, slot]) == pytest.approx(expected if supervised[block, slot] else 0.0, rel=1e-5)


def test_dpace_without_smoothing_is_the_gradient_of_the_expected_accepted_length() -> None:
    losses = torch.tensor([[0.1, 0.7, 0.3, 2.0]], dtype=torch.float64, requires_grad=True)
    (-losses).exp().cumprod(dim=1).sum().backward()
    assert losses.grad is not None
    weights = dpace_weights(losses, torch.ones(1, 4, dtype=torch.bool), alpha=1e-9)
    torch.testing.assert_close(weights, -losses.grad.float(), rtol=1e-5, atol=1e-6)


def test_nothing_of_logit_size_is_saved_for_backward() -> None:
    rows, vocabulary = 64, 500
    sizes: list[int] = []
    hidden = torch.randn(rows, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        chunked_head_loss(hidden, torch.randn(vocabulary, 8), torch.zeros(rows, dtype=torch.long), teacher=torch.randn(rows, 8))
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

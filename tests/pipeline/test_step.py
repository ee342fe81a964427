"""One pack's loss and gradients against a slow reference written with loops and whole logits."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from draftsmith.draft.anchors import slot_targets
from draftsmith.draft.ends import FrozenEnds
from draftsmith.pipeline.step import Loss, StepSettings, anchors_for, drafted_hidden, drafter_core, run_pack
from draftsmith.types import Batch, HiddenStates, StepResult, Tokens
from tests.conftest import tiny_drafter
from tests.draft.test_model import two_documents

SETTINGS = StepSettings(anchors=6, gamma=1.7, dtype=torch.float32, seed=5)


def partly_supervised() -> tuple[Batch, FrozenEnds]:
    batch, ends = two_documents((12, 15), seed=2)
    mask = batch.tokens.loss_mask.clone()
    mask[:4] = mask[12:17] = mask[9] = False
    tokens = Tokens(
        batch.tokens.ids, mask, batch.tokens.document_ids, batch.tokens.position_ids, batch.tokens.lengths, batch.tokens.names
    )
    return Batch(7, tokens, batch.hidden), ends


def test_loss_gradient_and_counts_equal_the_slow_reference() -> None:
    batch, ends = partly_supervised()
    tokens, drafter, other = batch.tokens, tiny_drafter(), tiny_drafter()
    block = drafter.config.block_size
    result = run_pack(drafter, ends, batch, SETTINGS)

    anchors = anchors_for(batch, SETTINGS, block)
    logits = drafted_hidden(other, ends, batch, anchors, torch.float32) @ ends.head.T
    total, weight_sum = torch.zeros(()), 0.0
    correct, counted, accepted, blocks = [0] * (block - 1), [0] * (block - 1), 0, 0
    for row, (a, valid) in enumerate(zip(anchors.positions.tolist(), anchors.valid.tolist(), strict=True)):
        run, broken = 0, False
        for k in range(1, block):
            p = a + k
            same = p < tokens.bucket and tokens.document_ids[p] == tokens.document_ids[a] and tokens.document_ids[a] >= 0
            if not (valid and same and tokens.loss_mask[p]):
                broken = True
                continue
            weight = math.exp(-(k - 1) / SETTINGS.gamma)
            total = total + weight * F.cross_entropy(logits[row, k], tokens.ids[p])
            weight_sum += weight
            right = bool(logits[row, k].argmax() == tokens.ids[p])
            correct[k - 1] += right
            counted[k - 1] += 1
            broken = broken or not right
            run += not broken
        first = a + 1
        if valid and first < tokens.bucket and tokens.document_ids[first] == tokens.document_ids[a] and tokens.loss_mask[first]:
            accepted += run
            blocks += 1
    total.backward()

    assert result.loss_sum == pytest.approx(float(total.detach()), rel=1e-5)
    assert result.weight_sum == pytest.approx(weight_sum, rel=1e-6)
    assert (result.correct, result.counted) == (correct, counted)
    assert (result.accepted_sum, result.blocks, result.tokens) == (accepted, blocks, 27)
    for (name, mine), (_, theirs) in zip(drafter.named_parameters(), other.named_parameters(), strict=True):
        # The largest gradients are about 10, and both sides round in fp32.
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("loss", ["dpace", "kl"])
def test_other_losses_equal_the_slow_reference(loss: Loss) -> None:
    batch, ends = partly_supervised()
    final = torch.randn(batch.tokens.bucket, 32, generator=torch.Generator().manual_seed(3))
    batch = Batch(7, batch.tokens, HiddenStates(batch.hidden.features, None, final))
    told = dataclasses.replace(SETTINGS, loss=loss, dpace_alpha=0.3)
    tokens, drafter, other = batch.tokens, tiny_drafter(), tiny_drafter()
    block = drafter.config.block_size
    result = run_pack(drafter, ends, batch, told)

    anchors = anchors_for(batch, told, block)
    logits = drafted_hidden(other, ends, batch, anchors, torch.float32) @ ends.head.T
    supervised = slot_targets(tokens.ids, tokens.loss_mask, tokens.document_ids, anchors, block).supervised
    total, weight_sum = torch.zeros(()), 0.0
    for row, a in enumerate(anchors.positions.tolist()):
        for k in range(1, block):
            if not supervised[row, k - 1]:
                continue
            if loss == "kl":
                # What the target would say at x[a+k] it says at the position before.
                wanted = (final[a + k - 1] @ ends.head.T).softmax(-1)
                own = (wanted * (wanted.log() - logits[row, k].log_softmax(-1))).sum()
                weight = math.exp(-(k - 1) / told.gamma)
            else:
                own, weight = F.cross_entropy(logits[row, k], tokens.ids[a + k]), 0.0
                for last in range(k, block):
                    if supervised[row, last - 1]:
                        product = 1.0
                        for j in range(1, last + 1):
                            if supervised[row, j - 1]:
                                q = float(logits[row, j].detach().softmax(-1)[tokens.ids[a + j]])
                                product *= 0.7 * q + 0.3
                        weight += product
            total = total + weight * own
            weight_sum += weight
    total.backward()
    assert result.loss_sum == pytest.approx(float(total.detach()), rel=1e-4)
    assert result.weight_sum == pytest.approx(weight_sum, rel=1e-5)
    for (name, mine), (_, theirs) in zip(drafter.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_report_b_nothing_of_full_vocabulary_size_is_saved_for_backward() -> None:
    batch, _ = partly_supervised()
    drafter = tiny_drafter()
    vocabulary = 20000
    big = FrozenEnds(torch.randn(vocabulary, 32), torch.randn(vocabulary, 32))
    sizes: list[int] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        # The frozen head itself is no activation: it exists once, whatever the batch.
        if t.shape != big.head.shape and t.shape != big.head.T.shape:
            sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = run_pack(drafter, big, batch, SETTINGS)
    assert len(sizes) > 20
    assert max(sizes) < sum(result.counted) * vocabulary
    assert max(sizes) < SETTINGS.anchors * drafter.config.block_size * vocabulary / 10


@pytest.mark.parametrize(("backend", "compiled"), [("sdpa", False), ("blocks", False), ("blocks", True)])
def test_activation_checkpointing_gives_the_same_gradients_and_keeps_less(backend: str, compiled: bool) -> None:
    batch, ends = partly_supervised()
    settings = dataclasses.replace(SETTINGS, anchors=40)
    core = torch.compile(drafter_core, backend="aot_eager", dynamic=False) if compiled else drafter_core
    results, kept = [], []
    for recompute in (False, True):
        drafter = tiny_drafter(backend=backend, layer_types=("full_attention", "sliding_attention"), sliding_window=4)
        drafter.recompute = recompute
        bytes_kept: dict[int, int] = {}

        def note(t: torch.Tensor, found: dict[int, int] = bytes_kept) -> torch.Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        # Compiled once without the hooks, which would be part of the graph.
        run_pack(drafter, ends, batch, settings, core)
        drafter.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            result = run_pack(drafter, ends, batch, settings, core)
        results.append((result.loss_sum, drafter))
        kept.append(sum(bytes_kept.values()))
    assert kept[1] < 0.75 * kept[0]
    (loss, plain), (again, saving) = results
    assert again == pytest.approx(loss, rel=1e-6)
    for (name, mine), theirs in zip(saving.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_pack_with_nothing_supervised_gives_zeros() -> None:
    batch, ends = two_documents((6,))
    empty = Tokens(
        batch.tokens.ids,
        torch.zeros_like(batch.tokens.loss_mask),
        batch.tokens.document_ids,
        batch.tokens.position_ids,
        batch.tokens.lengths,
        batch.tokens.names,
    )
    drafter = tiny_drafter()
    result = run_pack(drafter, ends, Batch(0, empty, batch.hidden), SETTINGS)
    assert (result.loss_sum, result.weight_sum, result.loss, result.tau) == (0.0, 0.0, 0.0, 1.0)
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())


def test_anchors_depend_on_seed_and_position_alone() -> None:
    batch, _ = partly_supervised()
    torch.manual_seed(1)
    first = anchors_for(batch, SETTINGS, 4)
    torch.manual_seed(2)
    assert torch.equal(first.positions, anchors_for(batch, SETTINGS, 4).positions)
    elsewhere = Batch(8, batch.tokens, HiddenStates(batch.hidden.features))
    assert not torch.equal(first.positions, anchors_for(elsewhere, SETTINGS, 4).positions)


def test_results_add_up() -> None:
    one, two = StepResult(1.0, 2.0, [1], [2], 3, 4, 5), StepResult(2.0, 4.0, [0], [2], 1, 4, 6)
    assert one + two == StepResult(3.0, 6.0, [1], [4], 4, 8, 11)
    assert (one + two).loss == 0.5
    assert (one + two).tau == 1.5
    assert (one + two).slot_accuracy == [0.25]

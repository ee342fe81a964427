"""`speculators` 0.9.0 from PyPI as judge: it loads our export and agrees on the same blocks, labels and loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoint.export import export_drafter
from draftsmith.draft.anchors import Anchors, slot_targets
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.loss import chunked_head_loss, dpace_weights, slot_weights
from draftsmith.draft.model import Drafter
from draftsmith.pipeline.step import StepSettings, drafted_hidden, run_pack
from draftsmith.target.load import Target
from draftsmith.types import Batch, HiddenStates
from tests.conftest import load_fp32, tiny_drafter
from tests.draft.test_model import two_documents

pytest.importorskip("speculators", reason="install requirements/peers.txt (make test does)")
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash import core as speculators_core


def exported(tmp_path: Path, target: Target, **changes: object) -> tuple[Drafter, Any]:
    """Our drafter and what speculators makes of its export."""
    drafter = tiny_drafter(**changes)
    export_drafter(
        tmp_path / "drafter",
        drafter,
        format="speculators",
        dtype="fp32",
        target=target.name,
        target_architectures=[type(target.model).__name__],
        embedding=target.embedding,
    )
    model = DFlashDraftModel.from_pretrained(str(tmp_path / "drafter"))
    model._attn_impl = "sdpa"
    model.config.transformer_layer_config._attn_implementation = "sdpa"
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "sdpa"
    model._create_mask_fn = speculators_core.create_mask
    return drafter, model.eval()


ANCHORS = Anchors(torch.tensor([1, 4, 11, 13, 30, 0]), torch.tensor([True] * 5 + [False]))


def their_hidden(model: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, logits and aligned loss mask of their forward, on our anchors."""
    monkeypatch.setattr(speculators_core, "select_anchors", lambda *_: (ANCHORS.positions, ANCHORS.valid))
    tokens = batch.tokens
    with torch.no_grad():
        hidden, logits, _, mask, _ = model._backbone_forward(
            batch.hidden.features[None],
            tokens.ids[None],
            tokens.loss_mask[None].float(),
            torch.zeros(1, tokens.bucket, 32),
            tokens.document_ids[None],
            tokens.position_ids[None],
            max_anchors=ANCHORS.positions.numel(),
        )
    return hidden[0], logits[0], mask[0]


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("family", ["target_folder", "untied_folder"])
def test_forward_agrees_on_the_same_blocks(
    tmp_path: Path, family: str, sliding: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_fp32(request.getfixturevalue(family))
    changes: dict[str, object] = (
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5} if sliding else {}
    )
    ours, theirs = exported(tmp_path, target, **changes)
    # Padding long enough that no block of theirs runs past the end, where they would index out of range.
    batch, _ = two_documents((12, 25), padding=10, seed=1)
    ends = FrozenEnds(target.embedding, target.head)
    with torch.no_grad():
        mine = drafted_hidden(ours, ends, batch, ANCHORS, torch.float32)
    hidden, logits, _ = their_hidden(theirs, batch, monkeypatch)
    valid = slice(0, 5 * 4)
    torch.testing.assert_close(mine.flatten(0, 1)[valid], hidden[valid], rtol=0, atol=1e-5)
    torch.testing.assert_close((mine.flatten(0, 1) @ target.head.T)[valid], logits[valid], rtol=1e-4, atol=1e-4)


def test_supervision_and_loss_agree(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same slots, same labels, same decay; their loss divides by the number of slots, ours by the sum of the weights."""
    ours, theirs = exported(tmp_path, target)
    # One document, since theirs also counts slots that run into the next one.
    batch, _ = two_documents((37,), padding=10, seed=1)
    ends = FrozenEnds(target.embedding, target.head)
    _, logits, mask = their_hidden(theirs, batch, monkeypatch)
    tokens = batch.tokens
    targets = slot_targets(tokens.ids, tokens.loss_mask, tokens.document_ids, ANCHORS, 4)
    assert mask.view(6, 4)[:, 1:].bool().tolist() == targets.supervised.tolist()
    assert not mask.view(6, 4)[:, 0].any()

    from draftsmith.pipeline import step

    monkeypatch.setattr(step, "anchors_for", lambda *_: ANCHORS)
    settings = StepSettings(anchors=6, gamma=4.0, dtype=torch.float32, seed=0)
    result = run_pack(ours, ends, Batch(0, tokens, HiddenStates(batch.hidden.features)), settings)
    from speculators.losses import dflash_loss_decay

    slots = torch.arange(24)[None] % 4
    decay = dflash_loss_decay(slots, gamma=4.0, sample_from_anchor=False)[0].view(6, 4)
    torch.testing.assert_close(decay[0, 1:], slot_weights(4, 4.0))
    labels = torch.nn.functional.one_hot(targets.labels, 264).float()
    entropy = -(labels * logits.view(6, 4, -1)[:, 1:].log_softmax(-1)).sum(-1)
    expected = (entropy * decay[:, 1:] * targets.supervised).sum()
    assert result.loss_sum == pytest.approx(float(expected), rel=1e-4)


def test_dpace_weights_agree() -> None:
    from speculators.losses import dpace_loss_decay

    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(5, 8, generator=generator) * 4
    mask = torch.rand(5, 8, generator=generator) < 0.7
    mask[:, 0] = False  # their slot 0 is the anchor
    theirs = dpace_loss_decay(
        torch.arange(40)[None], loss_mask=mask.view(1, -1), block_size=8, dpace_alpha=0.5, elementwise_loss=losses.view(1, -1)
    )
    torch.testing.assert_close(dpace_weights(losses[:, 1:], mask[:, 1:], 0.5), theirs.view(5, 8)[:, 1:])


def test_divergence_agrees() -> None:
    from speculators.losses.eager import kl_div_loss

    generator = torch.Generator().manual_seed(0)
    hidden, teacher = torch.randn(9, 6, generator=generator), torch.randn(9, 6, generator=generator)
    head = torch.randn(40, 6, generator=generator)
    theirs = kl_div_loss((hidden @ head.T)[None], (teacher @ head.T)[None])
    mine = chunked_head_loss(hidden, head, torch.zeros(9, dtype=torch.long), teacher=teacher).losses
    torch.testing.assert_close(mine, theirs[0], rtol=1e-4, atol=1e-5)


def test_report_19_seven_tokens_are_speculated_from_a_block_of_eight(tmp_path: Path, target: Target) -> None:
    _, theirs = exported(tmp_path, target, block_size=8)
    (method,) = theirs.config.speculators_config.proposal_methods
    assert (theirs.block_size, method.speculative_tokens) == (8, 7)
    assert theirs.target_layer_ids == [2, 3, 4]
    assert torch.equal(theirs.embed_tokens.weight, target.embedding)

"""`dflash` 0.1.0 from PyPI as judge: it loads our export, computes what we compute, and decodes what we decode."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from draftsmith.checkpoint.export import export_drafter, load_drafter
from draftsmith.decode.speculate import Speculator
from draftsmith.draft.anchors import Anchors, block_inputs, slot_positions
from draftsmith.draft.model import Drafter
from draftsmith.pipeline.step import drafted_hidden
from draftsmith.target.load import Target
from tests.conftest import load_fp32, tiny_drafter
from tests.decode.test_speculate import Oracle, decode_plain, prompts
from tests.draft.test_model import two_documents

dflash_model = pytest.importorskip("dflash.model", reason="install requirements/peers.txt (make test does)")


def their_model(folder: Path) -> tuple[Any, dict[str, Any]]:
    model, info = dflash_model.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), info


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Drafter, Any]:
    drafter = tiny_drafter(block_size=8)
    export_drafter(tmp_path / "drafter", drafter, format="dflash", dtype="fp32")
    model, info = their_model(tmp_path / "drafter")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return load_drafter(tmp_path / "drafter"), model


def test_config_is_read_as_we_mean_it(pair: tuple[Drafter, Any]) -> None:
    ours, theirs = pair
    assert theirs.block_size == 8
    assert theirs.mask_token_id == ours.config.mask_token_id
    assert tuple(theirs.target_layer_ids) == ours.config.target_layer_ids
    assert theirs.rotary_emb.inv_freq[1] == pytest.approx(10000.0 ** (-2 / 8))


def test_forward_of_one_block_is_equal(pair: tuple[Drafter, Any]) -> None:
    ours, theirs = pair
    generator = torch.Generator().manual_seed(0)
    for length in (1, 7, 40):
        features = torch.randn(1, length, 96, generator=generator)
        slots = torch.randn(1, 8, 32, generator=generator)
        with torch.no_grad():
            expected = theirs(position_ids=torch.arange(length + 8)[None], noise_embedding=slots, target_hidden=features)
            context = ours.encode_context(features, torch.arange(length)[None])
            got = ours(slots, torch.arange(length, length + 8)[None], context)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_training_forward_equals_their_forward_of_each_block(pair: tuple[Drafter, Any]) -> None:
    """Visibility, positions and block inputs of training, judged by the reference's decoding pass."""
    ours, theirs = pair
    batch, ends = two_documents((12, 25), seed=1)
    anchors = Anchors(torch.tensor([1, 5, 11, 13, 30]), torch.tensor([True] * 5))
    with torch.no_grad():
        together = drafted_hidden(ours, ends, batch, anchors, torch.float32)
    inputs = block_inputs(batch.tokens.ids, anchors, 8, ours.config.mask_token_id)
    positions = slot_positions(batch.tokens.position_ids, anchors, 8)
    for row, a in enumerate(anchors.positions.tolist()):
        start = 0 if a < 12 else 12
        with torch.no_grad():
            expected = theirs(
                position_ids=torch.cat([torch.arange(a - start), positions[row]])[None],
                noise_embedding=F.embedding(inputs[row], ends.embedding)[None],
                target_hidden=batch.hidden.features[None, start:a],
            )
        torch.testing.assert_close(together[row], expected[0], rtol=0, atol=1e-5)


class _Lengths:
    """Reads the accepted lengths of their generate from how far it crops its draft cache, since its statistics
    synchronise a CUDA device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crops: list[int] = []
        original = dflash_model._crop_to

        def crop(cache: Any, length: int) -> None:
            self.crops.append(length)
            original(cache, length)

        monkeypatch.setattr(dflash_model, "_crop_to", crop)

    def kept(self, prompt: int) -> list[int]:
        """Differences of the target cache's successive lengths: the first crop is the prompt's."""
        lengths = sorted(set(self.crops))
        assert lengths[0] == prompt
        return [b - a for a, b in pairwise(lengths)]


@pytest.mark.parametrize("family", ["target_folder", "untied_folder", "llama_folder"])
def test_their_generate_gives_the_same_tokens_and_lengths(
    family: str, pair: tuple[Drafter, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    target = load_fp32(request.getfixturevalue(family))
    speculator = Speculator(target, ours)
    for prompt in prompts():
        for count in (1, 2, 9, 30):
            mine = speculator.decode(prompt, count)
            lengths = _Lengths(monkeypatch)
            out = dflash_model.dflash_generate(
                theirs, target.model, torch.tensor([prompt]), max_new_tokens=count, stop_token_ids=sorted(target.end_ids)
            )
            assert out[0, len(prompt) :].tolist() == mine.ids
            assert lengths.kept(len(prompt)) == mine.kept


def test_lengths_agree_when_drafts_are_mostly_accepted(
    target: Target, pair: tuple[Drafter, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides get the same good drafts, so that long acceptances are compared too."""
    ours, theirs = pair
    for prompt in prompts()[:4]:
        plain = decode_plain(target, prompt, 40).ids
        oracle = Oracle(target, ours, {5})
        oracle.prompt, oracle.plain = prompt, plain
        mine = oracle.decode(prompt, 40)

        lengths = _Lengths(monkeypatch)

        def good(
            hidden: torch.Tensor, _head: Any, prompt: list[int] = prompt, plain: list[int] = plain, lengths: _Lengths = lengths
        ) -> torch.Tensor:
            start = lengths.crops[-1] - len(prompt) + 1
            logits = torch.zeros(1, hidden.shape[1], 264)
            for k in range(hidden.shape[1]):
                token = plain[start + k] if start + k < len(plain) else 0
                logits[0, k, (token + 1) % 250 if k + 1 == 5 else token] = 1.0
            return logits

        monkeypatch.setattr(theirs, "compute_logits", good)
        out = dflash_model.dflash_generate(
            theirs, target.model, torch.tensor([prompt]), max_new_tokens=40, stop_token_ids=sorted(target.end_ids)
        )
        assert out[0, len(prompt) :].tolist() == mine.ids == plain
        assert lengths.kept(len(prompt)) == mine.kept
        if len(plain) == 40:
            assert max(mine.kept) == 5


def test_loading_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export_drafter(tmp_path / "drafter", tiny_drafter(), format="dflash", dtype="bf16")
    with caplog.at_level(logging.WARNING):
        their_model(tmp_path / "drafter")
    assert not [r for r in caplog.records if "newly initialized" in r.message or "not used" in r.message]

"""Captured states equal the library's own to the bit, measured single-threaded."""

import threading
from pathlib import Path

import pytest
import torch

from draftsmith.config import TargetSection
from draftsmith.errors import CaptureError
from draftsmith.target.capture import Capture, Recorder, _groups
from draftsmith.target.load import Target, load_target, share_weights
from draftsmith.types import Tokens
from tests.conftest import load_fp32


def pack_of(*lengths: int, padding: int = 0, seed: int = 0) -> Tokens:
    total = sum(lengths)
    ids = torch.randint(0, 250, (total + padding,), generator=torch.Generator().manual_seed(seed))
    documents = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * padding)
    positions = torch.tensor([p for length in lengths for p in range(length)] + [0] * padding)
    return Tokens(ids, documents >= 0, documents, positions, lengths, ("x",) * len(lengths))


def library_states(target: Target, ids: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[j + 1] for j in layer_ids], dim=-1)


@pytest.mark.parametrize("family", ["target_folder", "untied_folder", "llama_folder"])
def test_one_document_is_bit_equal_to_the_librarys_states(family: str, request: pytest.FixtureRequest) -> None:
    target = load_fp32(request.getfixturevalue(family))
    tokens = pack_of(37)
    got = Capture(target, (0, 2, 4))(tokens).features
    assert torch.equal(got, library_states(target, tokens.ids[None], (0, 2, 4))[0])


def test_packed_documents_of_equal_length_are_bit_equal_as_a_batch(target: Target) -> None:
    tokens = pack_of(9, 9, 9, padding=5)
    got = Capture(target, (1, 2, 3))(tokens).features
    expected = library_states(target, tokens.ids[:27].view(3, 9), (1, 2, 3))
    assert torch.equal(got[:27], expected.flatten(0, 1))
    assert not got[27:].any()


def test_documents_in_a_pack_have_the_states_they_have_alone(target: Target) -> None:
    tokens = pack_of(5, 40, 13, 2, 21, padding=3)
    got = Capture(target, (1, 2, 3))(tokens).features
    start = 0
    for length in tokens.lengths:
        alone = library_states(target, tokens.ids[None, start : start + length], (1, 2, 3))[0]
        torch.testing.assert_close(got[start : start + length], alone, rtol=1e-4, atol=1e-5)
        start += length


def test_capture_stops_at_the_last_layer_needed_and_leaves_the_target_alone(target: Target) -> None:
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = target.model(ids).logits
    capture = Capture(target, (1, 2))
    ran = []
    capture._decoder.layers[-1].register_forward_hook(lambda *_: ran.append("last"))
    capture(pack_of(10))
    with torch.no_grad():
        after = target.model(ids).logits
    assert len(capture._decoder.layers) == 3
    assert len(target.blocks) == 6
    assert ran == ["last"], "the target's own pass must not trigger the capture's hooks"
    assert torch.equal(before, after)
    assert capture._decoder.layers[0].mlp.up_proj.weight.data_ptr() == target.blocks[0].mlp.up_proj.weight.data_ptr()


def test_replicas_on_threads_give_the_single_threaded_states(target_folder: Path) -> None:
    section = TargetSection(model=str(target_folder), dtype="fp32", devices=["cpu"])
    replicas = load_target(section, [torch.device("cpu")] * 3)
    packs = [pack_of(11 + i, 7, seed=i) for i in range(12)]
    expected = [Capture(replicas[0], (1, 3))(p).features for p in packs]
    wrong: list[int] = []

    def work(rank: int) -> None:
        capture = Capture(replicas[rank], (1, 3))
        for _ in range(5):
            for number, tokens in enumerate(packs):
                if not torch.equal(capture(tokens).features, expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_features_can_be_saved_for_backward(target: Target) -> None:
    features = Capture(target, (1, 2, 3))(pack_of(8)).features
    assert not features.is_inference()
    weight = torch.randn(96, 4, requires_grad=True)
    (features @ weight).sum().backward()
    assert weight.grad is not None


def test_groups_cover_all_documents_and_bound_padding() -> None:
    lengths = (100, 3, 51, 49, 1, 26, 2)
    groups = _groups(lengths)
    assert sorted(n for group in groups for n in group) == list(range(7))
    for group in groups:
        assert min(lengths[n] for n in group) * 2 >= max(lengths[n] for n in group)


def test_a_silent_block_is_an_error_that_names_it(target: Target) -> None:
    model = share_weights(target.model)
    recorder = Recorder(model.get_decoder().layers, (1, 4))  # type: ignore[operator]
    with pytest.raises(CaptureError, match="target block 1 gave nothing"):
        recorder.take(32)

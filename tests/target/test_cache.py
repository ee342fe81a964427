"""Hidden states on disk: the very bits come back, and whatever is wrong with a folder is named, with its cure."""

import errno
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.packing import pack
from draftsmith.errors import CaptureError, UsageError
from draftsmith.target import cache as caching
from draftsmith.target.cache import DamagedShardError, StateCache, documents_digest
from draftsmith.target.cache_index import CacheHeader
from draftsmith.target.capture import Capture
from draftsmith.target.load import Target
from draftsmith.target.sources import CachedStates
from draftsmith.types import Document, HiddenStates, Tokens
from tests.conftest import load_fp32

LAYERS = (1, 2, 3)


def some_documents(count: int = 12, seed: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for number in range(count):
        length = int(torch.randint(3, 60, (), generator=generator))
        ids = torch.randint(0, 250, (length,), generator=generator)
        documents.append(Document(f"chats.jsonl:{number + 1}", ids, torch.rand(length, generator=generator) < 0.6))
    # The same words twice, as real data has them.
    return [*documents, Document("chats.jsonl:99", documents[0].ids.clone(), documents[0].loss_mask.clone())]


def header_for(target: Target, documents: list[Document], *, final: bool = False) -> CacheHeader:
    return CacheHeader(target.digest, LAYERS, 32, "float32", final, documents_digest(documents), {"train": ["chats.jsonl"]})


def make(folder: Path, target: Target, *, final: bool = False) -> tuple[StateCache, list[Tokens]]:
    documents = some_documents()
    cache = StateCache.create(folder, header_for(target, documents, final=final), target, documents)
    return cache, pack(documents, [128], seed=0)[0]


def fill(cache: StateCache, capture: Capture, packs: list[Tokens]) -> list[HiddenStates]:
    states = [capture(tokens) for tokens in packs]
    for tokens, hidden in zip(packs, states, strict=True):
        cache.put(tokens, hidden)
        cache.flush()
    return states


@pytest.fixture
def filled(tmp_path: Path, target: Target) -> tuple[Path, list[Tokens], list[HiddenStates]]:
    cache, packs = make(tmp_path / "cache", target)
    assert len(packs) > 2
    return tmp_path / "cache", packs, fill(cache, Capture(target, LAYERS), packs)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("shard_bytes", [1, 20000, 2**28])
def test_states_come_back_to_the_bit(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, final: bool, shard_bytes: int
) -> None:
    monkeypatch.setattr(caching, "SHARD_BYTES", shard_bytes)
    cache, packs = make(tmp_path / "cache", target, final=final)
    live = fill(cache, Capture(target, LAYERS, final=final), packs)
    again = StateCache.open(tmp_path / "cache")
    again.check_complete(packs)
    for tokens, hidden in zip(packs, live, strict=True):
        assert again.has(tokens)
        found = again.get(tokens)
        assert found is not None
        assert torch.equal(found.features, hidden.features)
        assert (found.final is None) is not final
        assert found.final is None or (hidden.final is not None and torch.equal(found.final, hidden.final))


def test_final_states_are_what_the_head_is_given(target: Target) -> None:
    documents = some_documents(3)
    (tokens,) = pack(documents[:1], [64], seed=0)[0]
    hidden = Capture(target, LAYERS, final=True)(tokens)
    assert hidden.final is not None
    length = tokens.lengths[0]
    with torch.no_grad():
        logits = target.model(tokens.ids[None, :length]).logits[0]
    torch.testing.assert_close(target.ends.logits(hidden.final[:length]), logits)


def test_a_document_packed_otherwise_has_its_states_up_to_rounding(
    filled: tuple[Path, list[Tokens], list[HiddenStates]], target: Target
) -> None:
    cache = StateCache.open(filled[0])
    for tokens in pack(some_documents(), [64, 256], seed=5)[0]:
        found = cache.get(tokens)
        assert found is not None
        torch.testing.assert_close(found.features, Capture(target, LAYERS)(tokens).features, rtol=1e-4, atol=1e-5)


def test_facts_and_documents_come_back_whole(filled: tuple[Path, list[Tokens], list[HiddenStates]], target: Target) -> None:
    cache = StateCache.open(filled[0])
    facts = cache.facts(torch.device("cpu"))
    assert torch.equal(facts.embedding, target.embedding)
    assert facts.head is facts.embedding, "tied ends stay one tensor"
    assert (facts.end_ids, facts.num_layers, facts.digest) == (target.end_ids, target.num_layers, target.digest)
    assert facts.text_config().num_attention_heads == target.text_config().num_attention_heads
    assert facts.tokenizer("hello")["input_ids"] == target.tokenizer("hello")["input_ids"]
    for kept, given_ in zip(cache.documents(), some_documents(), strict=True):
        assert kept.name == given_.name
        assert torch.equal(kept.ids, given_.ids)
        assert torch.equal(kept.loss_mask, given_.loss_mask)


def test_untied_ends_come_back_as_two(tmp_path: Path, untied_folder: Path) -> None:
    target = load_fp32(untied_folder)
    make(tmp_path / "cache", target)
    facts = StateCache.open(tmp_path / "cache").facts(torch.device("cpu"))
    assert torch.equal(facts.head, target.head)
    assert not torch.equal(facts.head, facts.embedding)


def release(cache: StateCache) -> None:
    """Give up a writer's claim, as the end of its process does."""
    cache._index.release()


def damage(path: Path, at: float = 0.7) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 1
    path.write_bytes(raw)


@settings(deadline=None, max_examples=15)
@given(st.floats(0.0, 0.999), st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, target_folder: Path, at: float, bit: int
) -> None:
    target = load_fp32(target_folder)
    folder = tmp_path_factory.mktemp("flip") / "cache"
    cache, packs = make(folder, target)
    fill(cache, Capture(target, LAYERS), packs)
    path = folder / "states-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 1 << bit
    path.write_bytes(raw)
    reader = StateCache.open(folder)
    with pytest.raises(DamagedShardError, match=r"states-00001.*damaged.*draftsmith cache"):
        [reader.get(tokens) for tokens in packs]
    release(cache)
    assert StateCache.open(folder).repair() == ["states-00001.safetensors"]


def test_a_damaged_shard_is_made_anew_alone(filled: tuple[Path, list[Tokens], list[HiddenStates]], target: Target) -> None:
    folder, packs, live = filled
    damage(folder / "states-00001.safetensors")
    said: list[str] = []
    captured: list[int] = []
    capture = Capture(target, LAYERS)

    def counting(tokens: Tokens) -> HiddenStates:
        captured.append(1)
        return capture(tokens)

    cache = StateCache.open(folder)
    source = CachedStates(cache, lambda: counting, said.append)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        for tokens, hidden in zip(packs, live, strict=True):
            assert torch.equal(source(tokens).features, hidden.features)
        cache.flush()
    assert captured == [1], "only the damaged pack, and only once"
    (line,) = said
    assert "states-00001.safetensors" in line
    release(cache)
    again = StateCache.open(folder)
    again.check_complete(packs)
    assert all(torch.equal(again.get(t).features, h.features) for t, h in zip(packs, live, strict=True))  # type: ignore[union-attr]


def test_a_missing_shard_is_named_with_the_cure(filled: tuple[Path, list[Tokens], list[HiddenStates]]) -> None:
    folder, packs, _ = filled
    (folder / "states-00002.safetensors").unlink()
    cache = StateCache.open(folder)
    assert cache.missing() == ["states-00002.safetensors"]
    with pytest.raises(CaptureError, match=r"states-00002\.safetensors' is missing \(1 of .*run `draftsmith cache`"):
        cache.check_complete(packs)


def test_documents_without_states_are_named(tmp_path: Path, target: Target) -> None:
    cache, packs = make(tmp_path / "cache", target)
    fill(cache, Capture(target, LAYERS), packs[:1])
    with pytest.raises(CaptureError, match=r"lacks \d+ documents, the first of them chats.jsonl:\d+; run `draftsmith cache`"):
        cache.check_complete(packs)


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_an_index_cut_in_its_last_line_loses_that_shard_alone(
    filled: tuple[Path, list[Tokens], list[HiddenStates]], target: Target, cut: int
) -> None:
    folder, packs, live = filled
    index = folder / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-cut])
    cache = StateCache.open(folder)
    lacking = [tokens for tokens in packs if not cache.has(tokens)]
    assert len(lacking) == (1 if cut > 1 else 0)
    fill(cache, Capture(target, LAYERS), lacking)
    release(cache)
    again = StateCache.open(folder)
    assert all(torch.equal(again.get(t).features, h.features) for t, h in zip(packs, live, strict=True))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "line 2 of index.jsonl is damaged"),
        ('{"shard": "../../etc/passwd", "sha256": "", "documents": []}', "no name"),
    ],
)
def test_a_damaged_index_is_refused(filled: tuple[Path, list[Tokens], list[HiddenStates]], line: str, words: str) -> None:
    index = filled[0] / "index.jsonl"
    lines = index.read_text().splitlines()
    index.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with pytest.raises(CaptureError, match=words):
        StateCache.open(filled[0])


def test_damaged_documents_are_refused(filled: tuple[Path, list[Tokens], list[HiddenStates]]) -> None:
    damage(filled[0] / "documents.safetensors", at=0.9)
    with pytest.raises(CaptureError, match=r"documents.safetensors (is damaged|cannot be read).*another folder"):
        StateCache.open(filled[0]).documents()


def test_no_cache_is_told(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"is no cache of hidden states.*draftsmith cache"):
        StateCache.open(tmp_path)


def test_another_target_and_other_data_are_refused(tmp_path: Path, target: Target, untied_folder: Path) -> None:
    cache, _ = make(tmp_path / "cache", target)
    release(cache)
    other, documents = load_fp32(untied_folder), some_documents(seed=1)
    with pytest.raises(UsageError, match="the target is another model; the training data differ"):
        StateCache.create(tmp_path / "cache", header_for(other, documents), other, documents)


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path, target: Target) -> None:
    first, _ = make(tmp_path / "cache", target)
    with pytest.raises(UsageError, match="being written by another process"):
        make(tmp_path / "cache", target)
    release(first)
    make(tmp_path / "cache", target)
    StateCache.open(tmp_path / "cache").documents()


def test_too_little_space_is_told_before_anything_is_captured(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = make(tmp_path / "cache", target)
    usage = caching.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(caching.shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    assert cache.bytes_of(1000) == 1000 * 3 * 32 * 4
    with pytest.raises(CaptureError, match=r"0\.00 GB free, but the hidden states of 100000 tokens need 0\.04 GB.*source=live"):
        cache.require_space(100000)


def test_a_full_disk_keeps_what_was_written(
    filled: tuple[Path, list[Tokens], list[HiddenStates]], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, packs, _ = filled
    cache = StateCache.open(folder)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching, "save_file", full)
    cache.put(packs[0], Capture(target, LAYERS)(packs[0]))
    with pytest.raises(CaptureError, match=r"cannot be written \(.*No space left"):
        cache.flush()
    assert not list(folder.glob(".*.tmp"))
    again = StateCache.open(folder)
    again.check_complete(packs)
    assert again.repair() == []


def test_a_writer_that_looked_before_another_wrote_overwrites_nothing(tmp_path: Path, target: Target) -> None:
    cache, packs = make(tmp_path / "cache", target)
    capture = Capture(target, LAYERS)
    live = fill(cache, capture, packs[:1])
    late = StateCache.open(tmp_path / "cache")
    live += fill(cache, capture, packs[1:2])
    release(cache)
    live += fill(late, capture, packs[2:])
    release(late)
    again = StateCache.open(tmp_path / "cache")
    assert again.repair() == []
    release(again)
    for tokens, hidden in zip(packs, live, strict=True):
        found = again.get(tokens)
        assert found is not None
        assert torch.equal(found.features, hidden.features)


def test_a_shard_that_is_entered_twice_has_the_rows_of_the_last(tmp_path: Path, target: Target) -> None:
    cache, packs = make(tmp_path / "cache", target)
    fill(cache, Capture(target, LAYERS), packs)
    release(cache)
    index = tmp_path / "cache/index.jsonl"
    lines = index.read_text().splitlines()
    first, second = json.loads(lines[1]), json.loads(lines[2])
    second["shard"] = first["shard"]
    index.write_text("\n".join([lines[0], lines[1], json.dumps(second)]) + "\n")
    again = StateCache.open(tmp_path / "cache")
    assert not again.has(packs[0])
    assert again.get(packs[0]) is None


def test_the_second_of_two_that_begin_a_cache_touches_nothing(tmp_path: Path, target: Target) -> None:
    first, _ = make(tmp_path / "cache", target)
    before = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    other = some_documents(seed=5)
    with pytest.raises(UsageError, match="being written by another process"):
        StateCache.create(tmp_path / "cache", header_for(target, other), target, other)
    assert before == {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    release(first)


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path, target: Target) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("precious")
    with pytest.raises(UsageError, match=r"holds other files \(target\); name a folder of its own"):
        make(tmp_path, target)
    assert (tmp_path / "target" / "config.json").read_text() == "precious"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        make(tmp_path / "file" / "cache", target)


def test_a_cache_that_was_cut_off_while_it_was_begun_can_be_begun_again(tmp_path: Path, target: Target) -> None:
    cache, _ = make(tmp_path / "cache", target)
    release(cache)
    (tmp_path / "cache/index.jsonl").unlink()
    cache, packs = make(tmp_path / "cache", target)
    fill(cache, Capture(target, LAYERS), packs)
    cache.check_complete(packs)


def test_states_of_another_width_are_not_kept(tmp_path: Path, target: Target) -> None:
    cache, packs = make(tmp_path / "cache", target, final=True)
    with pytest.raises(CaptureError, match="holds 128 values a token, but 96 were captured"):
        cache.put(packs[0], Capture(target, LAYERS)(packs[0]))


@pytest.mark.parametrize("change", ["mlp", "rope"])
def test_a_target_is_known_by_all_its_weights_and_by_its_configuration(
    tmp_path: Path, target_folder: Path, change: str
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "other"
    shutil.copytree(target_folder, folder)
    assert load_fp32(folder).digest == load_fp32(target_folder).digest
    if change == "mlp":
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.3.mlp.down_proj.weight"] = weights["model.layers.3.mlp.down_proj.weight"] * 1.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = {
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": config["rope_parameters"]["rope_theta"],
        }
        (folder / "config.json").write_text(json.dumps(config))
    assert load_fp32(folder).digest != load_fp32(target_folder).digest


def test_a_cache_of_another_version_is_refused(tmp_path: Path, target: Target) -> None:
    make(tmp_path / "cache", target)
    index = tmp_path / "cache/index.jsonl"
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": 99}) + "\n")
    with pytest.raises(CaptureError, match="another version"):
        StateCache.open(tmp_path / "cache")

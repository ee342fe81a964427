"""Training from cached hidden states against live training: the same losses and weights, to the bit."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from draftsmith.build import fill_cache
from draftsmith.build import run as build
from draftsmith.cli import main
from draftsmith.config import Config, parse_config
from draftsmith.errors import CaptureError, ConfigError, PipelineError
from draftsmith.target import cache as caching
from draftsmith.target.capture import Capture
from draftsmith.types import HiddenStates, Tokens
from tests.conftest import save_target, small_tree, write_chats
from tests.pipeline.test_run import final_digest, metrics, quiet


def with_states(config: Config, source: str, folder: Path, run_dir: Path, **train: object) -> Config:
    tree = config.model_dump()
    tree["hidden_states"] = {"source": source, "folder": str(folder)}
    tree["train"] |= train
    tree["run"]["dir"] = str(run_dir)
    return parse_config(tree, "test")


def losses(config: Config) -> list[float]:
    return [row["loss"] for row in metrics(config)]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config whose target may be taken away, with shards small enough to be several."""
    monkeypatch.setattr(caching, "SHARD_BYTES", 100_000)
    folder = save_target(tmp_path / "target")
    data = write_chats(tmp_path / "chats.jsonl")
    return parse_config(small_tree(folder, data, tmp_path / "live"), "test")


@pytest.mark.parametrize("loss", ["ce", "dpace", "kl"])
def test_training_from_a_cache_equals_live_training_and_needs_neither_target_nor_text(
    own: Config, tmp_path: Path, loss: str
) -> None:
    live = with_states(own, "live", tmp_path / "cache", tmp_path / "live", loss=loss, max_steps=24)
    build.train(live, resume=None, say=quiet)
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached", loss=loss, max_steps=24)
    assert fill_cache(cached, dry_run=False, say=quiet) is None
    assert len(list((tmp_path / "cache").glob("states-*"))) > 1
    (tmp_path / "target").rename(tmp_path / "elsewhere")
    (tmp_path / "chats.jsonl").unlink()
    build.train(cached, resume=None, say=quiet)
    assert losses(cached) == losses(live)
    assert final_digest(cached) == final_digest(live)
    assert len(set(losses(live))) > 20, "a loss that never changes would prove nothing"


def test_the_three_losses_are_three(own: Config, tmp_path: Path) -> None:
    ends = []
    for loss in ("ce", "dpace", "kl"):
        config = with_states(own, "live", tmp_path, tmp_path / loss, loss=loss, max_steps=30, lr=1e-2)
        build.train(config, resume=None, say=quiet)
        assert sum(losses(config)[-5:]) < sum(losses(config)[:5]), loss
        ends.append(final_digest(config))
    assert len(set(ends)) == 3


def test_a_hybrid_run_equals_a_live_one_and_runs_the_target_for_one_epoch(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.train(live := with_states(own, "live", tmp_path, tmp_path / "live", max_steps=24), resume=None, say=quiet)
    captured: list[int] = []
    original = Capture.__call__
    monkeypatch.setattr(Capture, "__call__", lambda self, tokens: captured.append(1) or original(self, tokens))
    hybrid = with_states(own, "hybrid", tmp_path / "cache", tmp_path / "hybrid", max_steps=24)
    build.train(hybrid, resume=None, say=quiet)
    assert losses(hybrid) == losses(live)
    assert final_digest(hybrid) == final_digest(live)
    epoch = json.loads((tmp_path / "hybrid/checkpoint-24/trainer_state.json").read_text())["epoch"]
    assert epoch > 2
    assert len(captured) == round(24 * 2 / epoch), "each pack was captured once"
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached", max_steps=24)
    build.train(cached, resume=None, say=quiet)
    assert final_digest(cached) == final_digest(live)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)


def test_a_damaged_shard_is_named_and_made_anew_in_the_middle_of_training(own: Config, tmp_path: Path) -> None:
    build.train(live := with_states(own, "live", tmp_path, tmp_path / "live", max_steps=24), resume=None, say=quiet)
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached", max_steps=24)
    fill_cache(cached, dry_run=False, say=quiet)
    flip(tmp_path / "cache/states-00001.safetensors")
    said: list[str] = []
    build.train(cached, resume=None, say=said.append)
    assert any("states-00001.safetensors' is damaged" in line for line in said)
    assert final_digest(cached) == final_digest(live)
    said.clear()
    build.train(with_states(own, "cached", tmp_path / "cache", tmp_path / "again", max_steps=24), resume=None, say=said.append)
    assert [line for line in said if "is damaged" in line] == []


def test_a_damaged_shard_without_the_target_stops_with_the_cure(own: Config, tmp_path: Path) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached")
    fill_cache(cached, dry_run=False, say=quiet)
    for shard in (tmp_path / "cache").glob("states-*"):
        flip(shard)
    (tmp_path / "target").rename(tmp_path / "elsewhere")
    with pytest.raises(PipelineError, match=r"states-\d+.safetensors' is damaged.*draftsmith cache.*target' .*"):
        build.train(cached, resume=None, say=quiet)


def test_a_missing_shard_stops_before_the_first_step_and_cache_makes_it(own: Config, tmp_path: Path) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached")
    fill_cache(cached, dry_run=False, say=quiet)
    (tmp_path / "cache/states-00000.safetensors").unlink()
    with pytest.raises(CaptureError, match=r"states-00000.safetensors' is missing.*draftsmith cache"):
        build.train(cached, resume=None, say=quiet)
    said: list[str] = []
    fill_cache(cached, dry_run=False, say=said.append)
    assert any("states-00000.safetensors is missing or damaged" in line for line in said)
    build.train(cached, resume=None, say=quiet)


def test_a_cache_made_otherwise_is_refused(own: Config, tmp_path: Path) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached")
    fill_cache(cached, dry_run=False, say=quiet)
    with pytest.raises(ConfigError, match="it has no final states, which train.loss=kl needs"):
        build.resolve(with_states(own, "cached", tmp_path / "cache", tmp_path / "kl", loss="kl"))
    tree = cached.model_dump()
    tree["draft"]["target_layer_ids"] = [0, 1, 2]
    tree["data"]["train"] = ["other.jsonl"]
    with pytest.raises(
        ConfigError, match=r"target layers was \(1, 2, 3\).* is now \(0, 1, 2\); data.train was .* is now \['other"
    ):
        build.resolve(parse_config(tree, "test"))


def test_a_source_without_a_folder_is_refused(own: Config) -> None:
    tree = own.model_dump()
    tree["hidden_states"]["source"] = "hybrid"
    with pytest.raises(ConfigError, match="hidden_states.source is 'hybrid' but hidden_states.folder is not set"):
        parse_config(tree, "test")
    with pytest.raises(ConfigError, match="hidden_states.folder is not set"):
        fill_cache(own, dry_run=False, say=quiet)


def test_the_command_line_caches_and_trains(own: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(own.model_dump(mode="json")))

    def draftsmith(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([words[0], "--config", str(path), *words[1:]])
        assert ended.value.code == 0
        return capsys.readouterr().out

    states = f"hidden_states.folder={tmp_path}/cache"
    assert "GB" in draftsmith("cache", "--dry-run", states)
    assert not (tmp_path / "cache").exists()
    assert "done:" in draftsmith("cache", states)
    assert "packs are there already" in draftsmith("cache", states)
    assert "read from" in draftsmith("train", states, "hidden_states.source=cached", "train.max_steps=2")


def test_a_stop_keeps_what_was_captured_and_the_next_call_goes_on(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "run")
    original, calls = Capture.__call__, [0]

    def stopping(self: Capture, tokens: Tokens) -> HiddenStates:
        calls[0] += 1
        if calls[0] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, tokens)

    monkeypatch.setattr(Capture, "__call__", stopping)
    said: list[str] = []
    assert fill_cache(cached, dry_run=False, say=said.append) == signal.SIGTERM
    assert "the same command goes on from there" in said[-1]
    first = calls[0]
    assert fill_cache(cached, dry_run=False, say=quiet) is None
    packs = len(build.resolve(cached).packs)
    assert first < packs
    # A few may have been under way when the stop came.
    assert packs <= calls[0] <= packs + 4


def test_a_failing_capture_is_named_and_what_was_written_stays(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "run")
    original, calls = Capture.__call__, [0]

    def failing(self: Capture, tokens: Tokens) -> HiddenStates:
        calls[0] += 1
        if calls[0] == 5:
            raise ValueError("on purpose")
        return original(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "__call__", failing)
        with pytest.raises(PipelineError, match="target-0 failed: ValueError: on purpose"):
            fill_cache(cached, dry_run=False, say=quiet)
    kept = len(list((tmp_path / "cache").glob("states-*")))
    assert kept
    fill_cache(cached, dry_run=False, say=quiet)
    build.train(cached, resume=None, say=quiet)


def test_two_targets_fill_one_cache(own: Config, tmp_path: Path) -> None:
    tree = own.model_dump()
    tree["target"]["devices"] = ["cpu", "cpu"]
    two = with_states(parse_config(tree, "test"), "cached", tmp_path / "cache", tmp_path / "cached")
    fill_cache(two, dry_run=False, say=quiet)
    build.train(two, resume=None, say=quiet)
    build.train(live := with_states(own, "live", tmp_path, tmp_path / "live"), resume=None, say=quiet)
    assert final_digest(two) == final_digest(live)

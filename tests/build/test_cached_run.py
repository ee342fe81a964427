"""Training from cached hidden states against live training: the same losses and weights, to the bit."""

import json
import os
import signal
import threading
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import yaml

from draftsmith.build import fill_cache
from draftsmith.build import plan as plan_of_run
from draftsmith.build import run as build
from draftsmith.cli import main
from draftsmith.config import Config, parse_config
from draftsmith.errors import CaptureError, ConfigError, PipelineError, TargetError
from draftsmith.pipeline import harvest, workers
from draftsmith.target import cache as caching
from draftsmith.target.capture import Capture
from draftsmith.types import HiddenStates, Tokens
from tests.conftest import MARKED_TEMPLATE, byte_tokenizer, save_target, small_tree, write_chats
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
    assert fill_cache(cached, dry_run=False, say=quiet).signal_number is None
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


def at_call(number: int, act: Callable[[], None]) -> tuple[Callable[[Capture, Tokens], HiddenStates], list[int]]:
    """A capture that does something at one of its calls, and how many there were."""
    original, calls = Capture.__call__, [0]

    def counted(self: Capture, tokens: Tokens) -> HiddenStates:
        calls[0] += 1
        if calls[0] == number:
            act()
        return original(self, tokens)

    return counted, calls


def test_a_stop_keeps_what_was_captured_and_the_next_call_goes_on(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "run")
    stopping, calls = at_call(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(Capture, "__call__", stopping)
    said: list[str] = []
    assert fill_cache(cached, dry_run=False, say=said.append).signal_number == signal.SIGTERM
    assert "the same command goes on from there" in said[-1]
    first = calls[0]
    assert fill_cache(cached, dry_run=False, say=quiet).signal_number is None
    packs = len(build.resolve(cached).packs)
    assert first < packs
    # A few may have been under way when the stop came.
    assert packs <= calls[0] <= packs + 4


def test_a_failing_capture_is_named_and_what_was_written_stays(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "run")

    def fail() -> None:
        raise ValueError("on purpose")

    failing, _ = at_call(5, fail)
    with monkeypatch.context() as patch:
        patch.setattr(Capture, "__call__", failing)
        with pytest.raises(PipelineError, match="target-0 failed: ValueError: on purpose"):
            fill_cache(cached, dry_run=False, say=quiet)
    kept = len(list((tmp_path / "cache").glob("states-*")))
    assert kept
    fill_cache(cached, dry_run=False, say=quiet)
    build.train(cached, resume=None, say=quiet)


def test_a_worker_that_cannot_even_begin_is_told(own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise ValueError("no such device")

    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "run")
    monkeypatch.setattr(workers.torch, "set_num_threads", broken)
    with pytest.raises(PipelineError, match="target-0 failed: ValueError: no such device"):
        fill_cache(cached, dry_run=False, say=quiet)


def test_a_capture_that_hangs_does_not_hold_a_stop(own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached, release = with_states(own, "cached", tmp_path / "cache", tmp_path / "run"), threading.Event()

    def hanging(_self: Capture, _tokens: Tokens) -> HiddenStates:
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait(60)
        raise ValueError("released")

    monkeypatch.setattr(Capture, "__call__", hanging)
    monkeypatch.setattr(harvest, "STOP_SECONDS", 0.2)
    outcome = fill_cache(cached, dry_run=False, say=quiet)
    release.set()
    assert (outcome.step, outcome.signal_number, outcome.stuck) == (0, signal.SIGTERM, ("target-0",))


def test_another_target_never_mends_a_cache(own: Config, tmp_path: Path) -> None:
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached")
    fill_cache(cached, dry_run=False, say=quiet)
    save_target(tmp_path / "target", seed=9)
    flip(tmp_path / "cache/states-00001.safetensors")
    with pytest.raises(PipelineError, match=r"is damaged.*Here that failed: target.model .* is another model"):
        build.train(cached, resume=None, say=quiet)
    assert (tmp_path / "cache/states-00001.safetensors").exists(), "what cannot be made again is not thrown away"
    tree = cached.model_dump()
    tree["evaluate"]["prompts"] = own.data.train[0]
    with pytest.raises(TargetError, match="is another model"):
        build.train(parse_config(tree, "test"), resume=None, say=quiet)


def test_a_cache_with_final_states_is_mended_with_them(own: Config, tmp_path: Path) -> None:
    fill_cache(with_states(own, "cached", tmp_path / "cache", tmp_path / "x", loss="kl"), dry_run=False, say=quiet)
    flip(tmp_path / "cache/states-00001.safetensors")
    build.train(with_states(own, "cached", tmp_path / "cache", tmp_path / "ce"), resume=None, say=quiet)
    build.train(with_states(own, "cached", tmp_path / "cache", tmp_path / "kl", loss="kl"), resume=None, say=quiet)


def test_a_cache_that_others_write_is_read_all_the_same(own: Config, tmp_path: Path) -> None:
    build.train(live := with_states(own, "live", tmp_path, tmp_path / "live"), resume=None, say=quiet)
    cached = with_states(own, "cached", tmp_path / "cache", tmp_path / "cached")
    fill_cache(cached, dry_run=False, say=quiet)
    flip(tmp_path / "cache/states-00001.safetensors")
    holder = caching.StateCache.open(tmp_path / "cache")
    holder._index.claim()
    said: list[str] = []
    build.train(cached, resume=None, say=said.append)
    assert any("cannot be written here" in line for line in said)
    assert final_digest(cached) == final_digest(live)


def test_a_template_that_prints_the_date_sees_the_day_on_which_the_cache_was_begun(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}" + MARKED_TEMPLATE
    byte_tokenizer(template).save_pretrained(tmp_path / "target")
    hybrid = with_states(own, "hybrid", tmp_path / "cache", tmp_path / "one")
    fill_cache(hybrid, dry_run=False, say=quiet)

    class Tomorrow(date):
        @classmethod
        def today(cls) -> "Tomorrow":
            return cls(2099, 1, 2)

    monkeypatch.setattr(plan_of_run, "date", Tomorrow)
    said: list[str] = []
    fill_cache(hybrid, dry_run=False, say=said.append)
    assert any(f"{len(build.resolve(hybrid).packs)} of" in line and "are there already" in line for line in said)
    build.train(hybrid, resume=None, say=quiet)


def test_two_targets_fill_one_cache(own: Config, tmp_path: Path) -> None:
    tree = own.model_dump()
    tree["target"]["devices"] = ["cpu", "cpu"]
    two = with_states(parse_config(tree, "test"), "cached", tmp_path / "cache", tmp_path / "cached")
    fill_cache(two, dry_run=False, say=quiet)
    build.train(two, resume=None, say=quiet)
    build.train(live := with_states(own, "live", tmp_path, tmp_path / "live"), resume=None, say=quiet)
    assert final_digest(two) == final_digest(live)

"""Whole runs on threads: equality, resume, worker counts, failure and stopping."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.build import jobs, resume
from draftsmith.build import run as build
from draftsmith.checkpoint import save as checkpoints
from draftsmith.checkpoint.export import load_drafter
from draftsmith.compiling.compiler import Compiler
from draftsmith.config import Config, parse_config
from draftsmith.errors import CheckpointError, ConfigError, DataError, PipelineError, ReplicaError, UsageError
from draftsmith.pipeline import coordinator as coordinating
from draftsmith.pipeline import plan as plan_module
from draftsmith.pipeline.workers import DrafterWorker
from draftsmith.target.capture import Capture
from tests.conftest import save_target, small_tree, write_chats


def quiet(_line: str) -> None:
    pass


def metrics(config: Config, kind: str = "step") -> list[dict]:
    path = Path(config.run.dir) / "metrics.jsonl"
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == kind]


def variant(config: Config, run_dir: Path, **train: object) -> Config:
    tree = config.model_dump()
    tree["train"] |= train
    tree["run"]["dir"] = str(run_dir)
    return parse_config(tree, "test")


def final_digest(config: Config) -> str:
    return metrics(config, "checkpoint")[-1]["weights_sha256"]


def test_two_runs_are_equal_to_the_bit(small_config: Config, tmp_path: Path) -> None:
    again = variant(small_config, tmp_path / "again")
    other = variant(small_config, tmp_path / "other", seed=1)
    for config in (small_config, again, other):
        assert build.train(config, resume=None, say=quiet).step == 8
    assert final_digest(small_config) == final_digest(again) != final_digest(other)
    assert [r["loss"] for r in metrics(small_config)] == [r["loss"] for r in metrics(again)]


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (3, 4), (1, 4)])
def test_any_number_of_workers_trains_the_same(small_config: Config, tmp_path: Path, targets: int, drafters: int) -> None:
    losses = []
    for name, t, d in (("reference", 1, 2), ("varied", targets, drafters)):
        tree = variant(small_config, tmp_path / name, packs_per_step=4, devices=["cpu"] * d).model_dump()
        tree["target"]["devices"] = ["cpu"] * t
        config = parse_config(tree, "test")
        build.train(config, resume=None, say=quiet)
        losses.append([r["loss"] for r in metrics(config)])
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_loss_falls(small_config: Config, tmp_path: Path) -> None:
    config = variant(small_config, tmp_path / "long", max_steps=60, lr=1e-2)
    build.train(config, resume=None, say=quiet)
    losses = [r["loss"] for r in metrics(config)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_report_21_resume_continues_data_order_losses_and_weights_exactly(
    small_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight against stopped in the first and in the second epoch: the same samples, losses and weights."""
    seen: list[int] = []
    original = plan_module.Plan.pack_at

    def noted(plan: plan_module.Plan, position: int) -> int:
        pack = original(plan, position)
        seen.append(position)
        return pack

    monkeypatch.setattr(plan_module.Plan, "pack_at", noted)
    straight = variant(small_config, tmp_path / "straight", max_steps=24)
    build.train(straight, resume=None, say=quiet)
    whole, seen[:] = sorted(seen), []
    packs = json.loads((tmp_path / "straight" / "checkpoint-24" / "trainer_state.json").read_text())["epoch"]
    assert packs > 2, "the run must reach a third epoch for this test to mean something"

    class StopAt(build.RunEvents):
        at = 0

        def emit(self, kind: str, fields: dict) -> None:  # type: ignore[override]
            super().emit(kind, fields)
            if kind == "step" and fields["step"] == StopAt.at:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(build, "RunEvents", StopAt)
    stopped = variant(small_config, tmp_path / "stopped", max_steps=24)
    for at in (3, 13):
        StopAt.at = at
        outcome = build.train(stopped, resume="latest", say=quiet)
        assert (outcome.step, outcome.signal_number) == (at, signal.SIGTERM)
    StopAt.at = 0
    build.train(stopped, resume="latest", say=quiet)
    assert set(whole) == set(seen)
    assert [r["step"] for r in metrics(stopped)] == list(range(1, 25))
    for field in ("loss", "lr", "grad_norm", "slot_accuracy"):
        assert [r[field] for r in metrics(stopped)] == [r[field] for r in metrics(straight)], field
    assert final_digest(stopped) == final_digest(straight)


def test_a_stop_before_the_first_step_saves_nothing_and_loses_nothing(
    small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = build.Coordinator
    before = signal.getsignal(signal.SIGINT)

    def interrupted(*args: object, **kwargs: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "Coordinator", interrupted)
    outcome = build.train(small_config, resume=None, say=quiet)
    assert (outcome.step, outcome.signal_number) == (0, signal.SIGINT)
    assert not list(Path(small_config.run.dir).glob("checkpoint-*"))
    assert signal.getsignal(signal.SIGINT) is before


class Broken(Exception):
    pass


def broken_after(count: int) -> object:
    calls = [0]

    def fail(*_args: object, **_kwargs: object) -> None:
        calls[0] += 1
        if calls[0] > count:
            raise Broken("on purpose")

    return fail


@pytest.mark.parametrize("where", ["target", "drafter", "one drafter in the exchange", "save", "evaluate"])
def test_the_first_failure_anywhere_stops_everything_with_its_cause(
    small_config: Config, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    config = small_config
    if where == "target":
        original = Capture.__call__
        fail = broken_after(3)
        monkeypatch.setattr(Capture, "__call__", lambda self, tokens: (fail(), original(self, tokens))[1])  # type: ignore[operator]
    elif where == "drafter":
        from draftsmith.pipeline import workers

        run = workers.run_pack
        fail = broken_after(3)
        monkeypatch.setattr(workers, "run_pack", lambda *args: (fail(), run(*args))[1])  # type: ignore[operator]
    elif where == "one drafter in the exchange":
        update = build.Replica.update

        def fail_one(self: build.Replica, *args: object) -> float:
            if self.rank == 1 and args[2] != 0 and self.optimizer.state:
                raise Broken("on purpose")
            return update(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(build.Replica, "update", fail_one)
    elif where == "save":
        monkeypatch.setattr(build.checkpoints, "save_checkpoint", broken_after(0))
    else:
        monkeypatch.setattr(build, "measure_tau", broken_after(0))
        tree = config.model_dump()
        tree["evaluate"]["prompts"] = config.data.train[0]
        config = parse_config(tree, "test")
    before, handler = set(threading.enumerate()), signal.getsignal(signal.SIGTERM)
    begin = time.monotonic()
    with pytest.raises(PipelineError if where != "save" else Broken) as caught:
        build.train(config, resume=None, say=quiet)
    assert time.monotonic() - begin < 60
    cause = caught.value if isinstance(caught.value, Broken) else caught.value.__cause__
    assert isinstance(cause, Broken)
    assert set(threading.enumerate()) <= before, "a worker outlived the run"
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.long
def test_a_stuck_worker_cannot_hold_the_run(small_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original = Capture.__call__
    calls = [0]

    def stick(self: Capture, tokens: object) -> object:
        calls[0] += 1
        if calls[0] == 4:
            release.wait()
        return original(self, tokens)  # type: ignore[arg-type]

    def fail(self: DrafterWorker, _step: int) -> None:
        while calls[0] < 4:
            pass
        raise Broken("on purpose")

    monkeypatch.setattr(Capture, "__call__", stick)
    monkeypatch.setattr(DrafterWorker, "_step", fail)
    monkeypatch.setattr(coordinating, "STOP_SECONDS", 0.2)
    with pytest.raises(PipelineError) as caught:
        build.train(small_config, resume=None, say=quiet)
    release.set()
    assert isinstance(caught.value.__cause__, Broken)
    assert any("target-0" in note for note in caught.value.__notes__)


def test_replicas_that_drift_apart_are_caught_before_anything_is_saved(
    small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = build.Replica.update

    def drift(self: build.Replica, *args: object) -> float:
        norm = update(self, *args)  # type: ignore[arg-type]
        if self.rank == 1:
            with torch.no_grad():
                self.flat[0] += 1e-6
        return norm

    monkeypatch.setattr(build.Replica, "update", drift)
    with pytest.raises(ReplicaError, match="differ at step 4"):
        build.train(small_config, resume=None, say=quiet)
    assert not list(Path(small_config.run.dir).glob("checkpoint-*"))


@pytest.mark.parametrize("tied", [True, False])
def test_report_17_tied_targets_save_load_and_continue(tmp_path: Path, tied: bool) -> None:
    folder = save_target(tmp_path / "target", tied=tied)
    tree = small_tree(folder, write_chats(tmp_path / "chats.jsonl"), tmp_path / "run")
    config = parse_config(tree, "test")
    tree["train"]["max_steps"] = 4
    short = parse_config(tree, "test")
    build.train(short, resume=None, say=quiet)
    build.train(config, resume="latest", say=quiet)
    loaded = load_drafter(tmp_path / "run" / "checkpoint-8")
    assert not any("embed" in name or "head" in name for name in loaded.state_dict())
    assert json.loads((tmp_path / "run" / "checkpoint-8" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_finished_folder_is_not_overwritten_by_accident(small_config: Config) -> None:
    build.train(small_config, resume=None, say=quiet)
    with pytest.raises(UsageError, match="--resume latest"):
        build.train(small_config, resume=None, say=quiet)
    digest = final_digest(small_config)
    assert build.train(small_config, resume="latest", say=quiet).step == 8
    assert final_digest(small_config) == digest


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("train", "seed", 3, "train.seed was 0, is now 3"),
        ("train", "anchors", 5, "train.anchors was 16, is now 5"),
        ("draft", "layers", 3, "num_hidden_layers was 2, is now 3"),
        ("data", "buckets", [256], "the training data changed"),
    ],
)
def test_resuming_another_run_is_refused(small_config: Config, section: str, key: str, value: object, words: str) -> None:
    build.train(small_config, resume=None, say=quiet)
    tree = small_config.model_dump()
    tree[section][key] = value
    with pytest.raises(CheckpointError, match=words):
        build.train(parse_config(tree, "test"), resume="latest", say=quiet)


def test_a_checkpoint_of_another_width_is_refused(small_config: Config, tmp_path: Path) -> None:
    build.train(small_config, resume=None, say=quiet)
    tree = small_config.model_dump()
    tree["target"]["model"] = str(save_target(tmp_path / "wide", hidden=64))
    with pytest.raises(CheckpointError, match="hidden_size was 32, is now 64"):
        build.train(parse_config(tree, "test"), resume="latest", say=quiet)


def test_report_e_acceptance_is_measured_by_decoding_during_training(small_config: Config) -> None:
    tree = small_config.model_dump()
    tree["evaluate"] |= {"prompts": small_config.data.train[0], "count": 3, "max_new_tokens": 12}
    config = parse_config(tree, "test")
    build.train(config, resume=None, say=quiet)
    rows = metrics(config, "evaluation")
    assert [row["step"] for row in rows] == [4, 8]
    target, speculator = jobs.load_pair(config.target.model, Path(config.run.dir) / "checkpoint-8", dtype="fp32")
    prompts = build.load_prompts(target, Path(config.data.train[0]), 3)
    kept = [k for p in prompts for k in speculator.decode(p.ids, 12).kept]
    assert rows[-1]["tau"] == pytest.approx(sum(kept) / len(kept))


def test_a_run_folder_in_use_is_refused(small_config: Config) -> None:
    with resume.run_lock(Path(small_config.run.dir)), pytest.raises(UsageError, match="in use by another process"):
        build.train(small_config, resume=None, say=quiet)


def test_bf16_trains_with_fp32_masters(small_config: Config, tmp_path: Path) -> None:
    tree = variant(small_config, tmp_path / "bf16", precision="bf16", max_steps=30, lr=1e-2).model_dump()
    tree["target"]["dtype"] = "bf16"
    config = parse_config(tree, "test")
    build.train(config, resume=None, say=quiet)
    losses = [r["loss"] for r in metrics(config)]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    weights = build.checkpoints.load_checkpoint(tmp_path / "bf16" / "checkpoint-30").weights
    assert {w.dtype for w in weights.values()} == {torch.float32}


def test_going_back_sets_the_later_branch_aside(small_config: Config, tmp_path: Path) -> None:
    build.train(small_config, resume=None, say=quiet)
    run_dir, said = Path(small_config.run.dir), []
    slower = variant(small_config, run_dir, lr=1e-4, max_steps=12)
    build.train(slower, resume=str(run_dir / "checkpoint-4"), say=said.append)
    assert any("checkpoint-8 is now left-0-checkpoint-8" in line for line in said)
    assert any("train.lr was 0.002 up to step 4 and is 0.0001 from here" in line for line in said)
    assert [r["step"] for r in metrics(slower)] == list(range(1, 13))
    assert checkpoints.find_latest(run_dir)[0] == run_dir / "checkpoint-12"
    assert (run_dir / "left-0-checkpoint-8" / "model.safetensors").is_file()


def test_another_target_of_the_same_shape_is_refused(small_config: Config, tmp_path: Path) -> None:
    build.train(small_config, resume=None, say=quiet)
    tree = small_config.model_dump()
    tree["target"]["model"] = str(save_target(tmp_path / "other", seed=9))
    with pytest.raises(CheckpointError, match="the target is another model"):
        build.train(parse_config(tree, "test"), resume="latest", say=quiet)
    tree = small_config.model_dump()
    tree["target"]["dtype"] = "bf16"
    with pytest.raises(CheckpointError, match="target.dtype was fp32, is now bf16"):
        build.train(parse_config(tree, "test"), resume="latest", say=quiet)


def test_a_stop_does_not_wait_for_a_slow_capture(small_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    release, original, calls = threading.Event(), Capture.__call__, [0]

    def slow(self: Capture, tokens: object) -> object:
        calls[0] += 1
        if calls[0] == 8:
            os.kill(os.getpid(), signal.SIGTERM)
            release.wait(30)
        return original(self, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(Capture, "__call__", slow)
    monkeypatch.setattr(coordinating, "STOP_SECONDS", 0.2)
    outcome = build.train(variant(small_config, Path(small_config.run.dir), max_steps=50), resume=None, say=quiet)
    release.set()
    assert outcome.signal_number == signal.SIGTERM
    assert outcome.stuck == ("target-0",)
    assert checkpoints.find_latest(Path(small_config.run.dir))[0] is not None or outcome.step == 0


def test_a_failure_during_an_evaluation_is_noticed_in_the_middle_of_it(
    small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, original, calls = threading.Event(), Capture.__call__, [0]

    def fail_while_evaluating(self: Capture, tokens: object) -> object:
        calls[0] += 1
        if calls[0] > 9:
            evaluating.wait(20)
            failed.set()
            raise Broken("on purpose")
        return original(self, tokens)  # type: ignore[arg-type]

    evaluating, asked = threading.Event(), [0]

    def endless(_speculator: object, _prompts: object, _count: int, *, guard: object, interrupted: object) -> None:
        evaluating.set()
        assert failed.wait(20)
        # Only its own end is left to the evaluation: it asks between prompts.
        while not interrupted():  # type: ignore[operator]
            asked[0] += 1
            assert asked[0] < 10**7

    monkeypatch.setattr(Capture, "__call__", fail_while_evaluating)
    monkeypatch.setattr(build, "measure_tau", endless)
    tree = small_config.model_dump()
    tree["evaluate"]["prompts"] = small_config.data.train[0]
    tree["train"]["max_steps"] = 50
    with pytest.raises(PipelineError) as caught:
        build.train(parse_config(tree, "test"), resume=None, say=quiet)
    assert isinstance(caught.value.__cause__, Broken)


def evaluating_config(config: Config, steps: int, every: int) -> Config:
    tree = config.model_dump()
    tree["evaluate"]["prompts"] = config.data.train[0]
    tree["train"]["max_steps"] = steps
    tree["checkpoint"] = {"every": every, "keep": 1}
    return parse_config(tree, "test")


def setting_at(step: int, saved: threading.Event) -> type[build.RunEvents]:
    """Events of a run that set `saved` once the checkpoint of a step is on the disk."""

    class Watch(build.RunEvents):
        def emit(self, kind: str, fields: dict) -> None:  # type: ignore[override]
            super().emit(kind, fields)
            if kind == "checkpoint" and fields["step"] == step:
                saved.set()

    return Watch


def test_training_goes_on_while_a_copy_is_measured(small_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation is held until training has done all its steps; those asked for meanwhile give way to the last."""
    config, last = evaluating_config(small_config, 12, 2), threading.Event()
    measured: list[torch.Tensor] = []

    def held(speculator: object, *_: object, **__: object) -> float:
        if not measured:
            assert last.wait(30), "training waited for the evaluation"
        measured.append(next(speculator.drafter.parameters()).clone())  # type: ignore[attr-defined]
        return 1.0 + len(measured)

    monkeypatch.setattr(build, "measure_tau", held)
    monkeypatch.setattr(build, "RunEvents", setting_at(12, last))
    build.train(config, resume=None, say=quiet)
    assert [row["step"] for row in metrics(config, "evaluation")] == [2, 12]
    assert [row["step"] for row in metrics(config, "evaluation_skipped")] == [4, 6, 8, 10]
    assert not torch.equal(*measured), "the copy is of its own step"
    root = Path(config.run.dir)
    assert sorted(p.name for p in root.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-2", "checkpoint-best"]
    assert (root / "checkpoint-best").readlink() == Path("checkpoint-12")


def test_a_checkpoint_that_is_being_measured_can_still_become_the_best(
    small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, last = evaluating_config(small_config, 8, 2), threading.Event()
    taus = iter([5.0, 2.0])

    def held(*_: object, **__: object) -> float:
        assert last.wait(30)
        return next(taus)

    monkeypatch.setattr(build, "measure_tau", held)
    monkeypatch.setattr(build, "RunEvents", setting_at(8, last))
    build.train(config, resume=None, say=quiet)
    best = Path(config.run.dir) / "checkpoint-best"
    assert best.readlink() == Path("checkpoint-2")
    assert checkpoints.fault_of(best.resolve()) is None


def test_a_stop_does_not_wait_for_an_evaluation(small_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def patient(*_: object, guard: object, interrupted: Callable[[], bool]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not interrupted():
            assert time.monotonic() < deadline, "nobody told the evaluation to end"
            time.sleep(0.01)

    monkeypatch.setattr(build, "measure_tau", patient)
    outcome = build.train(evaluating_config(small_config, 5000, 2), resume=None, say=quiet)
    assert outcome.signal_number == signal.SIGTERM
    assert outcome.stuck == ()


def test_measuring_beside_training_changes_nothing_of_it(small_config: Config, tmp_path: Path) -> None:
    build.train(small_config, resume=None, say=quiet)
    tree = small_config.model_dump()
    tree["evaluate"] |= {"prompts": small_config.data.train[0], "count": 3, "max_new_tokens": 12}
    tree["run"]["dir"] = str(tmp_path / "measured")
    measured = parse_config(tree, "test")
    build.train(measured, resume=None, say=quiet)
    assert final_digest(measured) == final_digest(small_config)
    assert [r["loss"] for r in metrics(measured)] == [r["loss"] for r in metrics(small_config)]


def test_bad_prompts_are_refused_before_the_first_step(small_config: Config, tmp_path: Path) -> None:
    tree = small_config.model_dump()
    tree["evaluate"]["prompts"] = str(tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match="evaluate.prompts names"):
        build.train(parse_config(tree, "test"), resume=None, say=quiet)
    (tmp_path / "prompts.jsonl").write_text('{"text": "fine"}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: the prompt has no tokens"):
        build.train(parse_config(tree, "test"), resume=None, say=quiet)
    assert not (Path(small_config.run.dir) / "metrics.jsonl").exists()


def test_metrics_that_cannot_be_written_do_not_stop_the_run(
    small_config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = build.RunEvents.__enter__

    class Full:
        def write(self, _text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    def enter(self: build.RunEvents) -> build.RunEvents:
        self._file.close()
        self._file = Full()  # type: ignore[assignment]
        return original(self)

    monkeypatch.setattr(build.RunEvents, "__enter__", enter)
    assert build.train(small_config, resume=None, say=quiet).step == 8
    assert capsys.readouterr().out.count("cannot be written (No space left on device)") == 1


def test_a_run_that_compiles_in_its_middle_says_so(small_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor would else find a step that takes too long."""
    original, calls, phases = Compiler.run, [0], []

    def run(self: Compiler, work: Callable[[], object], unforeseen: Callable[[], None]) -> object:
        calls[0] += 1
        if calls[0] == 5:
            unforeseen()
        return original(self, work)

    class Noted(build.RunEvents):
        def emit(self, kind: str, fields: dict) -> None:  # type: ignore[override]
            super().emit(kind, fields)
            phases.extend([fields] if kind == "phase" else [])

    monkeypatch.setattr(Compiler, "run", run)
    monkeypatch.setattr(build, "RunEvents", Noted)
    build.train(small_config, resume=None, say=quiet)
    assert [p["name"] for p in phases].count("compiling") == 1
    assert next(p["step"] for p in phases if p["name"] == "compiling") in (1, 2)


@pytest.mark.compiled
def test_compiled_training_equals_eager_training(small_config: Config, tmp_path: Path) -> None:
    losses = {}
    for enabled in (False, True):
        tree = variant(small_config, tmp_path / str(enabled)).model_dump()
        tree["compile"] = {"enabled": enabled, "unplanned": "error", "cache": str(tmp_path / "cache")}
        tree["draft"]["layers"] = 1  # a second one would only compile longer
        config = parse_config(tree, "test")
        build.train(config, resume=None, say=quiet)
        losses[enabled] = [r["loss"] for r in metrics(config)]
        last = metrics(config)[-1]
        assert last["unplanned_compiles"] == 0
        if enabled:
            warmed = metrics(config, "warmup")
            # Who comes first to the gate is open.
            assert sorted(w["worker"] for w in warmed[1:]) == ["drafter-0", "drafter-1"]
            assert [w["done"] for w in warmed] == [0, 1, 2]
            assert warmed[0]["left_s"] > 0
            assert warmed[-1]["left_s"] == 0
            (account,) = metrics(config, "compile")
            assert (account["planned"], account["unplanned"], account["escaped"]) == (1, 0, 0)
            assert account["gate_longest_s"] > 0
            assert {"drafter-0", "drafter-1", "target-0"} <= set(account["gate_wait_s"])
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    # A checkpoint remembers how it was trained, and auto keeps to it.
    tree["train"]["max_steps"], tree["compile"]["enabled"], said = 10, "auto", []
    build.train(parse_config(tree, "test"), resume="latest", say=said.append)
    assert not any("auto chose" in line for line in said)
    assert len(metrics(config, "warmup")) >= 2

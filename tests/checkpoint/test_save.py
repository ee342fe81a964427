"""Checkpoints survive kills at every write, full disks and rotation; whatever is broken is skipped and named."""

import errno
import json
import os
import resource
import signal
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.checkpoint import contract, save
from draftsmith.checkpoint.export import load_drafter
from draftsmith.checkpoint.save import Checkpoint, find_latest, load_checkpoint, save_checkpoint
from draftsmith.errors import CheckpointError
from tests.conftest import tiny_drafter


def checkpoint(step: int, fill: float = 0.0) -> Checkpoint:
    drafter = tiny_drafter()
    weights = {n: p.detach().clone() + fill for n, p in drafter.named_parameters()}
    optimizer = {f"exp_avg.{n}": torch.zeros_like(w) for n, w in weights.items()} | {"step": torch.tensor(float(step))}
    return Checkpoint(step, drafter.config, weights, optimizer, {"name": "cosine"}, {"seed": 0}, {"epoch": 0.5})


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if not p.name.startswith("."))


def test_round_trip(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(7), keep=3)
    assert path.name == "checkpoint-7"
    loaded = load_checkpoint(path)
    assert loaded.step == 7
    assert loaded.config == tiny_drafter().config
    assert all(torch.equal(w, loaded.weights[n]) for n, w in checkpoint(7).weights.items())
    assert loaded.optimizer["step"] == 7
    assert loaded.state["epoch"] == 0.5
    assert names(path) == sorted(
        [
            "config.json",
            "model.safetensors",
            "optimizer.safetensors",
            "scheduler.json",
            "rng_state.json",
            "trainer_state.json",
            "manifest.json",
        ]
    )
    facts = json.loads((path / "manifest.json").read_text())["files"]["model.safetensors"]
    assert facts["bytes"] == (path / "model.safetensors").stat().st_size


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def kill_at(event: str, number: int) -> Callable[[], None]:
    """Arrange SIGKILL at the n-th file-system event of a kind."""
    count = [0]

    def hook(name: str, args: tuple[object, ...]) -> None:
        if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


def test_report_29_a_kill_at_any_file_operation_leaves_a_whole_latest_checkpoint(tmp_path: Path) -> None:
    killed = 0
    for number in range(1, 80):
        root = tmp_path / str(number)
        save_checkpoint(root, checkpoint(1, fill=1.0), keep=1)

        def work(root: Path = root, number: int = number) -> None:
            arm = kill_at("any", number)
            arm()
            save_checkpoint(root, checkpoint(2, fill=2.0), keep=1)

        status = in_child(work)
        latest, _ = find_latest(root)
        assert latest is not None, f"nothing whole is left after a kill at operation {number}"
        loaded = load_checkpoint(latest)
        assert torch.equal(loaded.weights["norm.weight"], torch.full((32,), 1.0 + loaded.step))
        # The next save works over whatever the kill left behind.
        save_checkpoint(root, checkpoint(3, fill=3.0), keep=1)
        assert find_latest(root)[0] == root / "checkpoint-3"
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    else:
        pytest.fail("the save never ran to its end")
    assert killed >= 15, "too few operations were hit for this test to mean something"


@pytest.mark.parametrize("failing", ["config.json", "model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_cut_file_is_skipped_and_named(tmp_path: Path, failing: str) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=5)
    newer = save_checkpoint(tmp_path, checkpoint(2), keep=5)
    file = newer / failing
    file.write_bytes(file.read_bytes()[:-5])
    latest, skipped = find_latest(tmp_path)
    assert latest == tmp_path / "checkpoint-1"
    assert len(skipped) == 1
    assert "checkpoint-2" in skipped[0]
    assert failing in skipped[0] or "manifest" in skipped[0]
    with pytest.raises(CheckpointError, match="not complete"):
        load_checkpoint(newer)


def test_flipped_bits_and_strange_folders_are_skipped(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=5)
    flipped = save_checkpoint(tmp_path, checkpoint(3), keep=5) / "model.safetensors"
    payload = bytearray(flipped.read_bytes())
    payload[-1] ^= 1
    flipped.write_bytes(payload)
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "manifest.json").write_text("[]")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    latest, skipped = find_latest(tmp_path)
    assert latest == tmp_path / "checkpoint-1"
    assert [line.split(":")[0].rpartition("-")[2] for line in skipped] == ["10", "9", "3"]
    assert "SHA-256" in skipped[2]


def test_rotation_keeps_the_newest_and_never_the_one_just_written(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    # Gone back to an earlier step: the one just written stays although it has the lowest number.
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    assert names(tmp_path) == ["checkpoint-1"]


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1, fill=1.0), keep=1)
    save_checkpoint(tmp_path, checkpoint(1, fill=2.0), keep=1)
    assert load_checkpoint(tmp_path / "checkpoint-1").weights["norm.weight"][0] == 3.0


def test_a_disk_without_room_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(save.shutil, "disk_usage", lambda _path: usage(100, 99, 1))
    with pytest.raises(CheckpointError, match="0 MB free, but a checkpoint needs"):
        save_checkpoint(tmp_path, checkpoint(2), keep=1)
    assert find_latest(tmp_path)[0] == tmp_path / "checkpoint-1"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_disk_that_fills_while_writing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: int
) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    calls = [0]
    original = os.fsync

    def full(handle: int) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(number, os.strerror(number))
        original(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="free some space"):
        save_checkpoint(tmp_path, checkpoint(2), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert find_latest(tmp_path) == (tmp_path / "checkpoint-1", [])


def test_a_file_size_limit_counts_as_full(tmp_path: Path) -> None:
    """A real refusal by the kernel: EFBIG instead of ENOSPC."""
    save_checkpoint(tmp_path, checkpoint(1), keep=1)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            save_checkpoint(tmp_path, checkpoint(2), keep=1)
        except CheckpointError as error:
            os._exit(42 if "free some space" in str(error) else 43)

    assert os.waitstatus_to_exitcode(in_child(work)) == 42
    assert find_latest(tmp_path) == (tmp_path / "checkpoint-1", [])


def test_config_contract() -> None:
    config = tiny_drafter(block_size=8, layer_types=("sliding_attention", "full_attention"), sliding_window=5).config
    tree = contract.to_json(config, "float32")
    assert tree["architectures"] == ["DFlashDraftModel"]
    assert tree["model_type"] == "qwen3"
    assert tree["block_size"] == tree["dflash_config"]["block_size"] == 8
    assert tree["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    assert contract.from_json(tree, Path("x")) == config
    for place in ("top", "nested"):
        one = json.loads(json.dumps(tree))
        del (one if place == "top" else one["dflash_config"])["block_size"]
        assert contract.from_json(one, Path("x")) == config


def test_contradicting_or_missing_block_sizes_are_refused() -> None:
    tree = contract.to_json(tiny_drafter().config, "float32")
    tree["block_size"] = 9
    with pytest.raises(CheckpointError, match=r"block_size is \[4, 9\]"):
        contract.from_json(tree, Path("x"))
    del tree["block_size"], tree["dflash_config"]["block_size"]
    with pytest.raises(CheckpointError, match="block_size is none"):
        contract.from_json(tree, Path("x"))
    with pytest.raises(CheckpointError, match="not a DFlash drafter config"):
        contract.from_json({"block_size": 4}, Path("x"))


def test_leftovers_of_killed_saves_are_swept(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    for name in (".checkpoint-9.partial", ".checkpoint-3.trash"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    save.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_manifest_that_lists_nothing_proves_nothing(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    (path / "manifest.json").write_text('{"files": {}}')
    assert "does not list" in str(save.fault_of(path))


@pytest.mark.parametrize("tree", [[], {"dflash_config": 5}, {"block_size": "4"}, {"rope_parameters": "x", "block_size": 4}])
def test_configs_that_are_not_configs(tree: object) -> None:
    with pytest.raises(CheckpointError):
        contract.from_json(tree, Path("x"))


def test_other_rotary_positions_are_refused_rather_than_computed_wrongly() -> None:
    tree = contract.to_json(tiny_drafter().config, "float32")
    tree["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(CheckpointError, match="'yarn' are not supported"):
        contract.from_json(tree, Path("x"))


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    assert load_drafter(path).config == tiny_drafter().config
    payload = bytearray((path / "model.safetensors").read_bytes())
    payload[-1] ^= 1
    (path / "model.safetensors").write_bytes(payload)
    with pytest.raises(CheckpointError, match="damaged checkpoint"):
        load_drafter(path)


def test_the_best_checkpoint_is_a_link_that_rotation_spares(tmp_path: Path) -> None:
    taus = {1: 1.5, 2: 2.5, 3: 2.0, 4: 2.5, 5: 1.0}
    for step, tau in taus.items():
        save.save_checkpoint(tmp_path, checkpoint(step), keep=2)
        assert save.mark_best(tmp_path, step, tau) == (step in (1, 2)), "equal is not better"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 4, 5)] + [
        "checkpoint-best"
    ]
    assert save.best_step(tmp_path) == 2
    assert save.load_checkpoint(tmp_path / "checkpoint-best").step == 2
    assert save.find_latest(tmp_path)[0] == tmp_path / "checkpoint-5", "best is not latest"
    (tmp_path / "best.json").write_text("{")
    assert save.mark_best(tmp_path, 5, 0.5), "a note that cannot be read knows no better"
    save.set_aside_after(tmp_path, 4)
    assert save.best_step(tmp_path) is None
    assert not (tmp_path / "best.json").exists()
    save.mark_best(tmp_path, 4, 0.1)
    save.set_aside_after(tmp_path, 4)
    assert save.best_step(tmp_path) == 4

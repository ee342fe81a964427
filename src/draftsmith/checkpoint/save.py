"""Atomic checkpoints and exact resume.

A checkpoint is written aside, every file fsynced, listed with size and SHA-256 in a manifest, and only then renamed to
`checkpoint-N` (N optimizer steps). A folder without a matching manifest is not a checkpoint. No file holds a pickle.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from draftsmith.checkpoint import contract
from draftsmith.draft.model import DrafterConfig
from draftsmith.errors import CheckpointError

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
BEST, BEST_NOTE = f"{PREFIX}best", "best.json"
FILES = frozenset(
    ["config.json", "model.safetensors", "optimizer.safetensors", "scheduler.json", "rng_state.json", "trainer_state.json"]
)


@dataclass(frozen=True)
class Checkpoint:
    """Everything that continues a run.

    weights: fp32 masters by contract name; optimizer: AdamW moments by name and `step`; state: plain JSON values (step,
    seed, fingerprint of data and recipe). Random state needs no more: every draw depends on seed and position alone.
    """

    step: int
    config: DrafterConfig
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    state: dict[str, Any]


def _write(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _json(tree: object) -> bytes:
    return (json.dumps(tree, indent=2, sort_keys=True) + "\n").encode()


def require_space(root: Path, needed: int) -> None:
    """Raise CheckpointError unless `needed` bytes are free where `root` lives."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"{root}: {free / 1e6:.0f} MB free, but a checkpoint needs {needed / 1e6:.0f} MB; free some space or set run.dir elsewhere. "
            "Nothing already saved was touched"
        )


def checkpoint_bytes(weights: dict[str, Tensor]) -> int:
    """Size of a checkpoint: masters and two moments in fp32, and a little for the rest."""
    return 3 * 4 * sum(t.numel() for t in weights.values()) + 2**20


def save_checkpoint(root: Path, checkpoint: Checkpoint, keep: int, spared: Set[int] = frozenset()) -> Path:
    """Write `root/checkpoint-N` and rotate older ones, but for those of the spared steps, down to `keep`; returns its path.

    Raises CheckpointError when the disk is full; whatever was saved before stays valid, the partial one is removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    require_space(root, checkpoint_bytes(checkpoint.weights))
    final = root / f"{PREFIX}{checkpoint.step}"
    aside = root / f".{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    # Made one at a time: the optimizer's bytes alone can be large.
    files: dict[str, Callable[[], bytes]] = {
        "config.json": lambda: _json(contract.to_json(checkpoint.config, "float32")),
        "model.safetensors": lambda: save(checkpoint.weights, metadata={"format": "pt"}),
        "optimizer.safetensors": lambda: save(checkpoint.optimizer, metadata={"format": "pt"}),
        "scheduler.json": lambda: _json(checkpoint.scheduler),
        "rng_state.json": lambda: _json(checkpoint.rng),
        "trainer_state.json": lambda: _json({**checkpoint.state, "global_step": checkpoint.step}),
    }
    try:
        aside.mkdir()
        listing = {}
        for name, make in files.items():
            payload = make()
            _write(aside / name, payload)
            listing[name] = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        _write(aside / MANIFEST, _json({"step": checkpoint.step, "files": listing}))
        _sync_folder(aside)
        if final.exists():
            _discard(final)
        aside.rename(final)
        _sync_folder(root)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        # RLIMIT_FSIZE and some quotas say EFBIG or EDQUOT where a full disk says ENOSPC.
        full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        cure = "free some space or set run.dir elsewhere" if full else "check the folder"
        raise CheckpointError(
            f"{final} could not be written ({error.strerror}); {cure}, then use --resume latest. Nothing saved before was lost"
        ) from error
    _rotate(root, final, keep, spared)
    return final


def _discard(folder: Path) -> None:
    """Remove a checkpoint so that no half-removed one ever stands under its name."""
    trash = folder.with_name(f".{folder.name}.trash")
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what killed saves left behind. Call it while holding the run folder."""
    for pattern in (f".{PREFIX}*.partial", f".{PREFIX}*.trash"):
        for leftover in root.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def set_aside_after(root: Path, step: int) -> list[str]:
    """Rename checkpoints later than `step`, which belong to a branch that is being left; a line for each."""
    told = []
    for number, path in _numbered(root):
        if number > step:
            free = next(n for n in itertools.count() if not (root / f"left-{n}-{path.name}").exists())
            path.rename(root / f"left-{free}-{path.name}")
            told.append(f"going back to step {step}: {path.name} is now left-{free}-{path.name}")
    if (best_step(root) or 0) > step:
        (root / BEST).unlink()
        (root / BEST_NOTE).unlink(missing_ok=True)
    return told


def best_step(root: Path) -> int | None:
    """The step that `checkpoint-best` stands for, if there is one."""
    try:
        return int(os.readlink(root / BEST).removeprefix(PREFIX))
    except (OSError, ValueError):
        return None


def mark_best(root: Path, step: int, tau: float) -> bool:
    """Let `root/checkpoint-best` be a link to `checkpoint-N` if its tau is higher than any before; whether it is.

    Rotation spares what it points to.
    """
    note = root / BEST_NOTE
    try:
        known = float(json.loads(note.read_bytes())["tau"])
    except (OSError, ValueError, KeyError, TypeError):
        known = -math.inf
    if best_step(root) is not None and known >= tau:
        return False
    link, aside = root / f".{BEST}.tmp", root / f".{BEST_NOTE}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(f"{PREFIX}{step}")
    link.replace(root / BEST)
    _write(aside, _json({"step": step, "tau": tau}))
    aside.replace(note)
    return True


def _numbered(root: Path) -> list[tuple[int, Path]]:
    found = []
    for path in root.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if number.isdecimal() and path.is_dir():
            found.append((int(number), path))
    return sorted(found)


def _rotate(root: Path, newest: Path, keep: int, spared: Set[int]) -> None:
    # The one just written is known to be whole and is never a candidate, so a valid one always remains.
    best = best_step(root)
    others = [path for number, path in _numbered(root) if path != newest and number != best and number not in spared]
    for path in others[: max(0, len(others) + 1 - keep)]:
        _discard(path)


def fault_of(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint, or None if it is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        unlisted = FILES - manifest["files"].keys()
        if unlisted:
            return f"its manifest does not list {', '.join(sorted(unlisted))}"
        for name, facts in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, the manifest says {facts['bytes']}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                    return f"{name} does not match its SHA-256"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({type(error).__name__})"
    return None


def find_latest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint under `root`, and a line for each newer one that was skipped, with the reason."""
    skipped: list[str] = []
    for _, path in reversed(_numbered(root)):
        fault = fault_of(path)
        if fault is None:
            return path, skipped
        skipped.append(f"skipped {path}: {fault}")
    return None, skipped


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a complete checkpoint; raises CheckpointError naming what is wrong with it."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint '{folder}' does not exist; give a checkpoint-N folder, or 'latest'")
    fault = fault_of(folder)
    if fault is not None:
        raise CheckpointError(
            f"checkpoint '{folder}' is not complete: {fault}; use --resume latest to take the newest whole one"
        )
    trees = {n: json.loads((folder / f"{n}.json").read_bytes()) for n in ("config", "scheduler", "rng_state", "trainer_state")}
    return Checkpoint(
        step=trees["trainer_state"]["global_step"],
        config=contract.from_json(trees["config"], folder / "config.json"),
        weights=load((folder / "model.safetensors").read_bytes()),
        optimizer=load((folder / "optimizer.safetensors").read_bytes()),
        scheduler=trees["scheduler"],
        rng=trees["rng_state"],
        state=trees["trainer_state"],
    )

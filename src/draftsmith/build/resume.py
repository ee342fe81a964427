"""Which checkpoint a run continues from, whether it fits, and that nobody else writes to the run folder."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.build.plan import Resolved
from draftsmith.checkpoint import save as checkpoints
from draftsmith.errors import CheckpointError, UsageError

Say = Callable[[str], None]


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process; raises UsageError if another holds it. The lock goes with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "run.lock").open("a+")
    except OSError as error:
        raise UsageError(f"run.dir '{folder}' cannot be a run folder ({error.strerror}); choose another") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"run folder '{folder}' is in use by another process; stop it or choose another run.dir") from None
        checkpoints.sweep(folder)
        yield


def find_resume(root: Path, resume: str | None, say: Say) -> checkpoints.Checkpoint | None:
    """The checkpoint to continue from; says what was skipped. Without `resume`, refuses a folder that already has some.

    Going back to an earlier checkpoint of the same folder sets the later ones aside, so that `latest` never means a branch
    that was left.
    """
    latest, skipped = checkpoints.find_latest(root)
    if resume is None:
        if latest is not None:
            raise UsageError(
                f"run folder '{root}' already has {latest.name}; continue it with --resume latest or choose another run.dir"
            )
        return None
    if resume != "latest":
        checkpoint = checkpoints.load_checkpoint(Path(resume))
        if Path(resume).resolve().parent == root.resolve():
            for line in checkpoints.set_aside_after(root, checkpoint.step):
                say(line)
        return checkpoint
    for line in skipped:
        say(line)
    if latest is None:
        say(f"nothing to resume in {root}: starting at step 0")
        return None
    return checkpoints.load_checkpoint(latest)


def check_fit(run: Resolved, checkpoint: checkpoints.Checkpoint, say: Say) -> None:
    """Raise CheckpointError unless the checkpoint continues exactly this run; say what of the recipe changes from here."""
    now, then = run.fingerprint(), checkpoint.state.get("fingerprint", {})
    told = {"data": "the training data changed", "target": "the target is another model"}
    differences = []
    for key, value in now.items():
        if key == "drafter":
            old = then.get("drafter", {})
            differences += [f"{k} was {old.get(k)}, is now {v}" for k, v in value.items() if old.get(k) != v]
        elif then.get(key) != value:
            differences.append(told.get(key, f"{key} was {then.get(key)}, is now {value}"))
    if differences:
        raise CheckpointError(
            f"checkpoint at step {checkpoint.step} does not continue this run: {'; '.join(differences)}. "
            "Restore these values, or train anew in another run.dir"
        )
    before = checkpoint.state.get("recipe", {})
    for key, value in run.recipe().items():
        if before.get(key, value) != value:
            say(f"changed    {key} was {before.get(key)} up to step {checkpoint.step} and is {value} from here")

"""Remove what a dead run left behind, and only what is proven to be its own. Standard library only; sent beside shim.py.

    python3 clean.py < {"run": folder, "remove": false}

Answers one line, as the shim does: {"ok": true, "processes": [...], "files": [{"path", "bytes"}], "removed": bool}. Proven are:
processes that carry one of the run's attempts in the environment they were started with, and files inside the run's folder whose
names mark them as half-written. Attempts, logs, checkpoints that are whole, and everything else stay.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import signal
import sys
import time

if __package__:
    from draftsmith.runs import shim
else:  # sent to a host that has nothing else of ours
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import shim  # type: ignore[import-not-found, no-redef]

PARTIAL = re.compile(r"\.checkpoint-\d+\.partial|\..*\.tmp")
RECORDS = re.compile(r".*\.json\.tmp")
GRACE_S = 5.0


def half_written(run: str) -> list[dict]:
    """Files and folders in the run's own tree that a write left unfinished, with their sizes.

    Links are never followed, and what belongs to a run of its own, or is held by a trainer, is not looked into.
    """
    found = []
    for folder, folders, files in os.walk(run):
        marks = RECORDS if os.path.dirname(folder) == os.path.join(run, "attempts") else PARTIAL
        paths = [os.path.join(folder, name) for name in sorted([*folders, *files]) if marks.fullmatch(name)]
        found += [path for path in paths if not os.path.islink(path)]
        folders[:] = [name for name in folders if not marks.fullmatch(name) and not is_anothers(os.path.join(folder, name))]
    return [{"path": path, "bytes": size_of(path)} for path in found]


def is_anothers(folder: str) -> bool:
    """Whether a folder is a run with attempts of its own, or a trainer works in it."""
    return os.path.isdir(os.path.join(folder, "attempts")) or is_held(folder)


def is_held(folder: str) -> bool:
    """Whether a trainer holds the folder's lock."""
    try:
        with open(os.path.join(folder, "run.lock"), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def size_of(path: str) -> int:
    """Bytes of a file, or of all files below a folder."""
    inner = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(os.lstat(name).st_size for name in ([path] if os.path.isfile(path) else inner))


def end(processes: list[dict]) -> list[int]:
    """Ask them to end, then make them; the pids of those that still live."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        shim.send(processes, number)
        deadline = time.monotonic() + GRACE_S
        while any(map(shim.is_same, processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return [process["pid"] for process in processes if shim.is_same(process)]


def clean(run: str, remove: bool) -> dict:
    """What could be removed, and with `remove` do so; refuses a run that has a supervisor or belongs to another place."""
    latest = max(glob.glob(glob.escape(run) + shim.ATTEMPTS), default=None)
    record = shim.read_json(f"{latest}/record.json")
    if not record:
        return {"ok": False, "error": f"no record in {run} proves that anything there belongs to a run; nothing was touched"}
    then, now = record.get("place") or {}, shim.place()
    if then.get("boot_id") != now["boot_id"] and then.get("host") != now["host"]:
        return {"ok": False, "error": f"{run} was started on {then.get('host')}; ask there"}
    if then.get("pid_ns") != now["pid_ns"] and then.get("boot_id") == now["boot_id"]:
        return {"ok": False, "error": f"{run} was started in another container; ask from inside it"}
    lock = os.open(f"{run}/attempts/lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Held to the end, so that no attempt can begin meanwhile.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return {"ok": False, "error": f"the run in {run} has a supervisor, so it is not dead; stop it first"}
    if is_held(run):
        return {"ok": False, "error": f"a trainer works in {run} without a supervisor; stop it first"}
    processes, files = shim.members(os.path.join(run, "attempts", "")), half_written(run)
    if remove:
        alive = end(processes)
        if alive:
            return {"ok": False, "error": f"processes {alive} cannot be ended; no file was touched"}
        for file in files:
            shutil.rmtree(file["path"]) if os.path.isdir(file["path"]) else os.unlink(file["path"])
    return {"ok": True, "processes": processes, "files": files, "removed": remove}


if __name__ == "__main__":
    told = json.load(sys.stdin)
    try:
        answer = clean(os.path.abspath(os.path.expanduser(told["run"])), bool(told["remove"]))
    except OSError as error:
        answer = {"ok": False, "error": f"{error.filename}: {error.strerror}"}
    print(shim.SENTINEL + json.dumps(answer), flush=True)

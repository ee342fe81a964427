"""Whether a host is fit for runs. Standard library only: it is sent there beside shim.py and run by the host's own Python.

    python3 doctor.py < {"folder": where runs will live, "wall": the asker's clock}

Answers one line, as the shim does: {"ok": true, "rows": [{"name", "level": "good" | "warn" | "bad", "told", "cure"}]}.
"""

from __future__ import annotations

import glob
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

if __package__:
    from draftsmith.runs import shim
else:  # sent to a host that has nothing else of ours
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import shim  # type: ignore[import-not-found, no-redef]

Row = dict  # of name, level, told and cure
GIB = 2**30
TORCH_LOW, TORCH_HIGH, NEWEST_PYTHON = (2, 11), (2, 14), (3, 11)
SEES_GPUS = "import torch; print([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], torch.version.cuda)"


def row(name: str, told: str, level: str = "good", cure: str = "") -> Row:
    """One finding."""
    return {"name": name, "level": level, "told": told, "cure": cure}


def said(*words: str, timeout: float = 10) -> str:
    """What a command printed; empty if it failed, hung or does not exist."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout, check=True)
        return done.stdout.decode("utf-8", "replace").strip()
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def pythons() -> Iterator[Row]:
    """The interpreter, draftsmith and torch in it."""
    version = ".".join(map(str, sys.version_info[:3]))
    told = f"{version} in {sys.executable}"
    if sys.version_info < NEWEST_PYTHON:
        yield row("python", told, "bad", "draftsmith needs 3.11 or newer; name such a python in the hosts file")
    else:
        yield row("python", told)
    for name in ("draftsmith", "torch"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield row(
                name, f"not installed in {sys.executable}", "bad", "install it there, or name another python in the hosts file"
            )
            continue
        if name == "torch" and not TORCH_LOW <= numbers(found) <= TORCH_HIGH:
            yield row(name, found, "bad", "install a torch from 2.11 to 2.14")
        else:
            yield row(name, found)


def gpus() -> Iterator[Row]:
    """Devices as the driver and as torch see them, and who holds them."""
    devices = shim.gpus()
    for index, gpu in devices.items():
        use = "" if gpu["use"] is None else f", {gpu['use']} % busy"
        yield row(f"gpu {index}", f"{gpu['memory']} MiB in use{use}")
    seen = said(sys.executable, "-c", SEES_GPUS, timeout=180)
    if not devices:
        yield row(
            "gpu",
            "no NVIDIA driver here; drafters would train on the CPU",
            "warn",
            "in a container, start it with access to the GPUs",
        )
    elif not seen or seen.startswith("[]"):
        yield row(
            "torch's gpus", seen or "torch could not be asked", "bad", "install a torch built for CUDA, or check the driver"
        )
    else:
        yield row("torch's gpus", seen)
    owners = sorted({pid for pids in holders(glob.glob("/dev/nvidia[0-9]*")).values() for pid in pids} - {os.getpid()})
    for pid in owners:
        yield row(f"holder {pid}", f"{of_whom(pid)} holds a GPU open", "warn", "end it if it is a leftover of yours")


def holders(paths: list[str]) -> dict[str, list[int]]:
    """Which processes hold each of these files open, as far as we may look."""
    found: dict[str, list[int]] = {os.path.realpath(path): [] for path in paths}
    for link in glob.glob("/proc/[0-9]*/fd/*") if found else []:
        with suppress(OSError, KeyError):
            found[os.readlink(link)].append(int(link.split("/")[2]))
    return found


def of_whom(pid: int) -> str:
    """A process in words: command, user, and the attempt that it belongs to."""
    command = shim.redact(shim.read_text(f"/proc/{pid}/cmdline")).replace("\0", " ")[:80].strip()
    mark = re.search(rf"{shim.ATTEMPT}=([^\0]*)", shim.read_text(f"/proc/{pid}/environ"))
    user = os.stat(f"/proc/{pid}").st_uid if os.path.exists(f"/proc/{pid}") else "?"
    return f"'{command}' of user {user}" + (f", part of {mark.group(1)}," if mark else "")


def room(folder: str) -> Iterator[Row]:
    """Disk, shared memory, memory and its limit."""
    home = os.path.expanduser("~")
    for name, wanted, low, least in (("disk", folder, 20, 1), ("home", home, 5, 0.5), ("shm", "/dev/shm", 1, 0.05)):
        path = wanted
        while not os.path.exists(path):
            path = os.path.dirname(path) or "."
        free = shutil.disk_usage(path).free / GIB
        level = "bad" if free < least else "warn" if free < low else "good"
        cure = "in docker, start it with --shm-size=8g" if name == "shm" else "free some space"
        yield row(name, f"{free:.1f} GiB free in {path}", level, "" if level == "good" else cure)
    available = re.search(r"MemAvailable:\s+(\d+)", shim.read_text("/proc/meminfo"))
    limits = [shim.read_text(f"/sys/fs/cgroup/{name}").strip() for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limit = [f", limited to {int(text) / GIB:.1f} GiB" for text in limits if text.isdigit() and int(text) < 2**60]
    if available:
        yield row("memory", f"{int(available.group(1)) / 2**20:.1f} GiB available" + "".join(limit))


def limits() -> Iterator[Row]:
    """What one process may use."""
    for name, number, low in (("open files", resource.RLIMIT_NOFILE, 1024), ("processes", resource.RLIMIT_NPROC, 4096)):
        soft, hard = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY and soft < low:
            most = "" if hard == resource.RLIM_INFINITY else f" (at most {hard} here)"
            yield row(name, f"limited to {soft}", "warn", f"raise it with ulimit{most}")
        else:
            yield row(name, "unlimited" if soft == resource.RLIM_INFINITY else f"up to {soft}")


def session() -> Iterator[Row]:
    """Whether the system ends a user's processes at logout."""
    files = ["/etc/systemd/logind.conf", *sorted(glob.glob("/etc/systemd/logind.conf.d/*.conf"))]
    kills = re.findall(r"^\s*KillUserProcesses\s*=\s*(\w+)", "\n".join(map(shim.read_text, files)), re.MULTILINE)
    if not kills or kills[-1].lower() not in ("yes", "true", "on", "1"):
        yield row("logout", "leaves processes alone")
    elif said("loginctl", "show-user", str(os.getuid()), "--property=Linger", "--value") == "yes":
        yield row("logout", "ends processes, but not of users who linger, as you do")
    else:
        yield row("logout", "ends every process of the user, runs too", "bad", "loginctl enable-linger, as that user")


def leftovers() -> Iterator[Row]:
    """Build locks that nobody holds, and trainers without a supervisor."""
    locks = [path for pattern in shim.LOCKS for path in glob.glob(os.path.expanduser(pattern))]
    for path, owners in holders(locks).items():
        if not owners:
            yield row("build lock", f"{path} is held by nobody, and every build waits for it", "bad", f"remove {path}")
    attempts: dict[str, list[int]] = {}
    for process in shim.members(""):
        found = re.search(rf"{shim.ATTEMPT}=([^\0]*)", shim.read_text(f"/proc/{process['pid']}/environ"))
        if found:
            attempts.setdefault(found.group(1), []).append(process["pid"])
    for attempt, pids in sorted(attempts.items()):
        record = shim.read_json(f"{attempt}/record.json")
        if not record:
            yield row("run", f"{attempt}, of processes {pids}, cannot be seen from here: another container's or user's")
        elif shim.is_same(record.get("shim")):
            yield row("run", f"{attempt} is alive")
        else:
            told = f"{attempt} has no supervisor, and {pids} go on"
            yield row("run", told, "warn", f"draftsmith stop {os.path.dirname(os.path.dirname(attempt))}")


def tools() -> Iterator[Row]:
    """Programs that compiled steps and code copies need."""
    for name, why in (
        ("g++", "torch.compile needs it for steps on a CPU"),
        ("gcc", "Triton needs it on a GPU"),
        ("git", "launch --sync needs it"),
    ):
        path = shutil.which(name)
        yield row(name, path, "good") if path else row(name, "not found", "warn", why)


def clock(apart: float) -> Iterator[Row]:
    """This clock against the asker's, from which it is `apart` seconds."""
    synced = said("timedatectl", "show", "--property=NTPSynchronized", "--value")
    told = f"{apart:.0f} s from the asker's" + {"yes": ", synchronised", "no": ", not synchronised"}.get(synced, "")
    yield row("clock", told, "warn" if apart > 60 else "good", "synchronise both clocks" if apart > 60 else "")


def examine(folder: str, apart: float) -> list[Row]:
    """Every finding, in the order people read them. apart: seconds between this clock and the asker's."""
    checks = [pythons(), gpus(), room(folder), limits(), session(), leftovers(), tools(), clock(apart)]
    return [found for check in checks for found in check]


if __name__ == "__main__":
    told = json.load(sys.stdin)
    apart = abs(time.time() - told["wall"])
    rows = examine(os.path.abspath(os.path.expanduser(told["folder"])), apart)
    print(shim.SENTINEL + json.dumps({"ok": True, "rows": rows}), flush=True)

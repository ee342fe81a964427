"""Start a run, wait until it has come as far as asked, look at it, read its log, end it, start it again."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from draftsmith.errors import RunError
from draftsmith.runs.transport import Host, Unreachable, ask
from draftsmith.runs.verdict import Verdict, judge, unreachable

Level = Literal["start", "imports", "model", "step"]
# Phases in the order a trainer goes through them; being in a later one proves the earlier.
ORDER = ("interpreter", "imports", "preparing", "model", "compiling", "training", "saving", "evaluating")
REACHED: Mapping[Level, str] = {"imports": "imports", "model": "model", "step": "training"}
# A driver that wakes its GPUs, or a repository on a slow disk, takes its time.
POLL_S, RETRY_S, START_S = 0.2, 5.0, 120.0


def find_runs(folder: Path) -> list[Path]:
    """Launched runs: the folder itself, those in it and one level further down."""
    found = {path.parent.parent for pattern in ("", "*/", "*/*/") for path in folder.glob(pattern + "attempts/[0-9]*")}
    return sorted(found)


def look(host: Host, run: str) -> Verdict:
    """The verdict on a run, now."""
    return look_closely(host, run)[0]


def look_closely(host: Host, run: str) -> tuple[Verdict, dict[str, Any]]:
    """The verdict on a run with everything it rests on; empty if the host did not answer."""
    try:
        seen = ask(host, ["probe", run])
    except Unreachable as error:
        return unreachable(host.name, str(error)), {}
    return judge(seen), seen


def has_reached(phase: Mapping[str, Any], level: Level) -> bool:
    """Whether a trainer that says `phase` has come as far as `level`."""
    if level == "start":
        return True
    name = phase.get("name")
    return name in ORDER and ORDER.index(name) >= ORDER.index(REACHED[level]) and (level != "step" or "step" in phase)


def launch(
    host: Host,
    run: str,
    argv: Sequence[str],
    *,
    until: Level,
    wait_s: float,
    say: Callable[[str], None],
    **spec: Any,
) -> Verdict:
    """Start `argv` under a supervisor and wait until the trainer has come as far as `until`.

    Returns the verdict: alive, or done with exit code 0. Raises RunError with the verdict in its text where the level was not
    reached, the run left as it is.
    """
    try:
        started = ask(host, ["start"], {"run": run, "argv": list(argv), **spec}, timeout=START_S)
    except Unreachable as error:
        raise RunError(
            f"{host.name} cannot be reached: {error}; whether it began can be seen with `draftsmith status`"
        ) from error
    say(f"started {started['attempt']} on {host.name}, supervisor pid {started['shim']}; it goes on without this terminal")
    deadline, told = time.monotonic() + wait_s, ""
    while True:
        verdict, seen = look_closely(host, run)
        phase = seen.get("phase", {})
        if phase.get("name", told) != told:
            told = phase["name"]
            say(f"phase {told}")
        if (verdict.alive and has_reached(phase, until)) or verdict.code == 0:
            return verdict
        if verdict.name != "unreachable" and not verdict.alive:
            raise RunError(
                f"{run} did not reach '{until}': {verdict.line()}. {'; '.join(verdict.evidence)}. Next: {verdict.advice}"
            )
        if time.monotonic() > deadline:
            raise RunError(
                f"{run} did not reach '{until}' within {wait_s:.0f} s and goes on: {verdict.line()}; look with `draftsmith why`"
            )
        time.sleep(POLL_S)


def log_chunks(host: Host, run: str, *, follow: bool, poll_s: float = 0.5) -> Iterator[bytes]:
    """The log from its start, in pieces; with `follow`, on until the attempt has ended."""
    offset, end = 0, None
    while True:
        try:
            seen = ask(host, ["probe", run, str(offset)])
        except Unreachable as error:
            if not follow:
                raise RunError(f"{host.name} cannot be reached: {error}") from error
            # The run may be fine, and then so is its log: go on where it was.
            time.sleep(RETRY_S)
            continue
        if not seen.get("attempt"):
            raise RunError(f"{run} has no attempt on {host.name}; launch it first")
        if (seen["log"]["size"] or 0) < offset:
            # It was cut, and what was asked for lies past its end: ask again, even if the run is over by now.
            offset = 0
            continue
        # A log that grows faster than it is read would never end.
        end = end or seen["log"]["size"] or 0
        piece = seen.get("chunk", "").encode("latin-1")
        offset += len(piece)
        yield piece
        if not follow and (offset >= end or not piece):
            return
        if not piece:
            if not judge(seen).alive:
                return
            time.sleep(poll_s)


def stop(host: Host, run: str, *, wait_s: float, say: Callable[[str], None]) -> Verdict:
    """End the run and wait until nothing of it lives; returns the last verdict. Raises RunError if it goes on.

    The supervisor does it; where it was killed, the processes that carry the attempt in their environment are signalled.
    """
    verdict, seen = look_closely(host, run)
    if verdict.name in ("unreachable", "container restarted"):
        raise RunError(f"{run} cannot be stopped from here: {verdict.line()}; {verdict.evidence[0]}. {verdict.advice}")
    if not verdict.alive:
        return verdict
    # The supervisor, too, gives what the trainer says that a step and a save need, if that is longer.
    told_s = seen["phase"].get("stop_s")
    grace = max(float(seen["record"].get("grace_s", 120)), told_s if isinstance(told_s, float) and isfinite(told_s) else 0.0)
    say(f"asked it to stop; the trainer has {grace:.0f} s to finish its step and save")
    begin, asked, told = time.monotonic(), False, False
    while verdict.alive:
        waited = time.monotonic() - begin
        if waited > wait_s + grace:
            raise RunError(f"{run} still lives {wait_s + grace:.0f} s after the stop: {verdict.line()}")
        try:
            # Its supervisor may be killed at any moment, after it took the request too; then the trainer is told directly.
            orphaned = not seen["shim"]["same"]
            if not asked or (orphaned and not told):
                ask(host, ["stop", run])
                asked, told = True, orphaned
            elif orphaned and waited > grace:
                ask(host, ["stop", run, str(int(signal.SIGKILL))])
        except Unreachable as error:
            raise RunError(f"{host.name} stopped answering ({error}); ask again when it does") from error
        time.sleep(POLL_S)
        verdict, seen = look_closely(host, run)
        if verdict.name == "unreachable":
            raise RunError(f"{host.name} stopped answering ({verdict.evidence[0]}); the stop was asked for")
    return verdict

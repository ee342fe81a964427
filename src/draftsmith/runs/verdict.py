"""From a run's records and probes to one verdict with its evidence and the next thing to do. Pure: no clock, no files.

The first that matches wins: unreachable, never launched, exited (an exit record outlives reboots), host rebooted, container restarted,
supervisor killed, supervisor stalled, log missing, record damaged, then by what the trainer itself last said: silent, hung, compiling, running.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Name = Literal[
    "unreachable",
    "never launched",
    "exited",
    "host rebooted",
    "container restarted",
    "supervisor killed",
    "supervisor stalled",
    "log missing",
    "record damaged",
    "silent",
    "hung",
    "compiling",
    "running",
]
SILENT_AFTER_S, STARTING_S = 60.0, 5.0
FULL_BYTES, GPU_SLACK_MB = 2**20, 512
# What records with odd values raise in whoever reads them.
DAMAGE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
RAISED = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Closed))\b:?(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """name: what kind of state the run is in; cause: one phrase for people; evidence: what was seen; advice: what to do next;
    alive: whether something of the run still works; code: the trainer's exit code, where it has one."""

    name: Name
    cause: str
    evidence: tuple[str, ...]
    advice: str
    alive: bool = False
    code: int | None = None

    def line(self) -> str:
        """One line for people."""
        return f"{self.name}: {self.cause}" if self.cause else self.name


def unreachable(host: str, reason: str) -> Verdict:
    """The verdict when nothing could be asked: it says nothing about the run."""
    return Verdict(
        "unreachable",
        f"{host} did not answer",
        (reason,),
        "the run itself may be fine; check the connection and ask again",
    )


def judge(seen: Mapping[str, Any]) -> Verdict:
    """The verdict on what `shim.py probe` answered."""
    try:
        for look in (_never, _exited, _elsewhere, _unsupervised, _log_lost):
            verdict = look(seen)
            if verdict is not None:
                return verdict
        return _by_phase(seen)
    except DAMAGE as error:
        evidence = (f"a record in {seen.get('attempt')} lacks or garbles {error}",)
        alive = bool(seen.get("left") or seen.get("shim", {}).get("same"))
        return Verdict("record damaged", "what it says cannot be trusted", evidence, "look at the attempt's files", alive=alive)


def _never(seen: Mapping[str, Any]) -> Verdict | None:
    if not seen.get("attempt") and seen["exists"] and not seen.get("readable", True):
        told = (f"{seen['run']} is there, but this user may not look into it",)
        return Verdict("unreachable", "the run's folder is closed to this user", told, "ask as the user who launched it")
    if not seen.get("attempt"):
        where = "exists and holds no attempt" if seen["exists"] else "does not exist"
        return Verdict("never launched", "nothing was ever started here", (f"{seen['run']} {where}",), "launch it")
    if seen["record"]:
        return None
    if seen["age"] < STARTING_S:
        return Verdict("silent", "the supervisor is just starting", (f"{seen['attempt']} was just made",), "wait", alive=True)
    evidence = (f"{seen['attempt']} has no record", *_lines(seen["shim_log"], 3))
    return Verdict("never launched", "the supervisor died before it could write a record", evidence, "launch it again")


def _lines(text: str, count: int) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-count:]


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _who(stop: Mapping[str, Any]) -> str:
    return f"{stop.get('by') or 'a process'} (pid {stop.get('by_pid')}, user {stop.get('by_uid')})"


def _raised(tail: str) -> tuple[str, str] | None:
    """Type and message of the last exception that the log shows uncaught."""
    if "Traceback (most recent call last)" not in tail and "SyntaxError" not in tail:
        return None
    found = RAISED.findall(tail)
    return (found[-1][0], found[-1][1].strip()) if found else None


def _held(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """GPU memory that the driver had not taken back when the supervisor ended."""
    held = ((i, before.get(i, now)["memory"], now["memory"]) for i, now in after.items())
    return [f"GPU {i} still holds {now} MiB, {was} MiB before the start" for i, was, now in held if now > was + GPU_SLACK_MB]


def _exited(seen: Mapping[str, Any]) -> Verdict | None:
    end = seen["exit"]
    if not end:
        return None
    phase = end.get("phase") or {}
    evidence = [f"ran {end['seconds']:.0f} s" + (f", last phase: {_phase(phase)}" if phase else ", no phase was reported")]
    if end.get("left_behind"):
        evidence.append(f"{end['left_behind']} processes were left behind and ended")
    if end.get("unkillable"):
        evidence.append(f"still there, could not be killed: {end['unkillable']}")
    evidence += _held(seen["record"].get("gpus") or {}, end.get("gpus") or {})
    stop, tail = end.get("stop"), end.get("tail", "")
    if stop:
        evidence.append(f"a stop was asked for by {_who(stop)}")

    def verdict(cause: str, advice: str, *more: str) -> Verdict:
        return Verdict("exited", cause, (*evidence, *more), advice, code=end.get("code"))

    if "not_started" in end:
        return verdict(f"the trainer could not be started: {end['not_started']}", "check the command and the folder it runs in")
    code, number = end["code"], end["signal"]
    if number is not None:
        return _killed(end, number, _sender(seen), verdict)
    if code == 0 and not stop:
        return verdict("finished", "nothing to do")
    if stop and code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        return verdict(f"stopped on request (exit code {code})", "resume it when you like")
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        cause = f"stopped by {_name(code - 128)} from outside, sent by {_sender(seen)}"
        return verdict(cause, "resume it; find out who stops it", *_lines(tail, 3))
    raised = _raised(tail)
    if raised is not None:
        return _exception(raised, code, verdict, tail)
    said = _lines(tail, 5)
    if end["disk_free"] < FULL_BYTES:
        told = f"{end['disk_free']} bytes free"
        return verdict(f"disk full: {told}, exit code {code}", "free some space, then resume", *said)
    if not said:
        return verdict(f"exit code {code} without a word", "run it in the foreground to see more", "the log is empty")
    errors = [line for line in said if line.startswith("error: ")]
    what = "usage error" if code == 2 else "failed"
    told = errors[-1].removeprefix("error: ") if errors else said[-1]
    return verdict(f"{what} (exit code {code}): {told}", "see the log", *said)


def _sender(seen: Mapping[str, Any]) -> str:
    told = seen.get("signal")
    return _who(told) if told else "an unknown process"


def _killed(end: Mapping[str, Any], number: int, sender: str, verdict: Any) -> Verdict:
    kills, tail = end.get("memory_kills", {}), _lines(end.get("tail", ""), 6)
    if number == signal.SIGKILL and end.get("killed"):
        return verdict(
            "killed: it did not end in its grace after a stop was asked for",
            "look at its stacks; raise the grace if a save takes that long",
            *tail,
        )
    # The cgroup's count says more: what was killed for memory elsewhere on the machine was not ours.
    if number == signal.SIGKILL and kills.get("cgroup", kills.get("machine", 0)):
        sure, where = ("", "its memory limit (cgroup)") if kills.get("cgroup") else ("probably ", "the limit of some memory")
        return verdict(
            f"{sure}out of memory: the kernel killed it at {where}",
            "lower train.anchors, data.buckets or train.channel_capacity, or raise the limit",
            f"oom_kill counts rose by {kills}",
            *tail,
        )
    if number in CRASHES:
        return verdict(f"crashed in native code ({_name(number)})", "see the stacks in the log and report them", *tail)
    if end.get("stop") and number != signal.SIGKILL:
        return verdict(
            f"stopped on request, by {_name(number)} before it could save", "resume it from its last checkpoint", *tail
        )
    if number == signal.SIGKILL:
        tail.insert(0, "no process was killed for memory meanwhile")
        when = " while it was stopping" if end.get("stop") else ""
        return verdict(f"killed from outside (SIGKILL){when}", "resume it; find out who kills it", *tail)
    return verdict(f"killed from outside ({_name(number)}), sent by {sender}", "resume it; find out who kills it", *tail)


def _exception(raised: tuple[str, str], code: int, verdict: Any, tail: str) -> Verdict:
    kind, message = raised
    said = f"{kind}: {message}" if message else kind
    shown = _lines(tail, 6)
    if kind in ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"):
        return verdict(f"import error: {said}", "mend the code or the environment it runs in", *shown)
    if "OutOfMemory" in kind or (kind == "RuntimeError" and "out of memory" in message):
        return verdict(f"out of GPU memory: {said}", "lower train.anchors or data.buckets", *shown)
    if kind == "MemoryError":
        return verdict(f"out of memory: {said}", "lower the memory it needs or raise its limit", *shown)
    if "No space left" in message or "Disk quota" in message:
        return verdict(f"disk full: {said}", "free some space, then resume", *shown)
    return verdict(f"exception (exit code {code}): {said}", "see the traceback in the log", *shown)


def _elsewhere(seen: Mapping[str, Any]) -> Verdict | None:
    then, now = seen["record"]["place"], seen["now"]
    last = seen["heartbeat"].get("wall")
    beat = f"last heartbeat {now['wall'] - last:.0f} s ago by the wall clock" if last else "no heartbeat was written"
    # What may not be seen, as pid 1 of a machine that hides processes of others, says nothing.
    changed = [
        name for name in ("boot_id", "pid_ns", "init_start") if None not in (then[name], now[name]) and then[name] != now[name]
    ]
    if changed and then["host"] != now["host"]:
        changed.append("host")
    evidence = (*(f"{name} was {then[name]}, is {now[name]}" for name in changed), beat)
    if "boot_id" in changed and "host" not in changed:
        return Verdict("host rebooted", "the machine started anew under the run", evidence, "resume it")
    if changed:
        advice = "if you ask from inside the same container, resume it; otherwise ask from where it was launched"
        return Verdict("container restarted", "its process namespace is not the one asked", evidence, advice)
    return None


def _unsupervised(seen: Mapping[str, Any]) -> Verdict | None:
    record, shim = seen["record"], seen["shim"]
    # A supervisor on a crowded machine beats more slowly, so that it costs little.
    beat = seen["heartbeat"]
    limit = 5 * max(record["beat_s"], beat.get("seconds", 0)) + 5
    age = seen["now"]["boot"] - beat.get("boot", record["boot"])
    if shim["same"]:
        if age <= limit:
            return None
        stalled = (f"pid {record['shim']['pid']} is in state {shim['now'].get('state')}", f"last heartbeat {age:.0f} s ago")
        return Verdict("supervisor stalled", "it lives and does not beat", stalled, "continue it if it was stopped", alive=True)
    number = record["shim"]["pid"]
    gone = f"supervisor pid {number} is gone"
    if shim["now"]:
        zombie = shim["now"]["state"] in "ZX" and shim["now"]["start"] == record["shim"]["start"]
        gone = f"pid {number} is a corpse nobody collected" if zombie else f"pid {number} belongs to a stranger now"
    last_words = (*_lines(seen["log"]["tail"], 3), *_lines(seen["shim_log"], 3))
    evidence: tuple[str, ...] = (gone, f"last heartbeat {age:.0f} s ago", *last_words)
    kills = {n: c for n, c in seen["now"].get("memory_kills", {}).items() if c}
    if kills:
        evidence = (*evidence, f"processes killed for memory since boot: {kills}")
    if seen["left"]:
        pids = ", ".join(str(process["pid"]) for process in seen["left"])
        cause = f"the trainer goes on without it (pid {pids})"
        return Verdict("supervisor killed", cause, evidence, "let it end, or stop it; then resume", alive=True)
    code = seen["phase"].get("ended")
    if code is not None:
        cause = f"the trainer went on and ended by itself (exit code {code})"
        return Verdict("supervisor killed", cause, evidence, "nothing to do" if code == 0 else "see the log", code=code)
    return Verdict("supervisor killed", "and the trainer with it", evidence, "resume it; find out who kills it")


def _log_lost(seen: Mapping[str, Any]) -> Verdict | None:
    log, first = seen["log"], seen["record"]["log"]["inode"]
    if log["inode"] == first:
        return None
    how = "was deleted" if log["inode"] is None else "was replaced by another file"
    pid = seen["record"]["shim"]["pid"]
    evidence = (
        f"{seen['attempt']}/log {how}",
        f"the trainer still writes to the old one, {seen['heartbeat'].get('log', {}).get('written')} bytes",
    )
    return Verdict(
        "log missing",
        f"the log {how}",
        evidence,
        f"the run goes on; the old log can be read through /proc/{pid}/fd",
        alive=True,
    )


def _phase(phase: Mapping[str, Any]) -> str:
    if not phase:
        return "none yet"
    step = f" {phase['step']}/{phase.get('steps', '?')}" if phase.get("step") is not None else ""
    return f"{phase.get('name', 'unknown')}{step}"


def _cpu(beat: Mapping[str, Any]) -> float:
    """Share of one core that the trainer's processes used during the last beat; kernels count 100 ticks a second."""
    return float(beat.get("busy_ticks", 0) / 100 / max(beat.get("seconds", 0), 0.01))


def _use(gpu: Mapping[str, Any]) -> str:
    return "" if gpu["use"] is None else f"{gpu['use']} % busy, "


def _by_phase(seen: Mapping[str, Any]) -> Verdict:
    phase, beat, now = seen["phase"], seen["heartbeat"], seen["now"]["boot"]
    begun = seen["record"]["boot"]
    quiet = now - beat.get("log_grew", begun)
    busy = "idle" if beat.get("idle") else f"computing ({_cpu(beat):.0%} of one core)"
    since = now - phase["boot"] if phase else now - begun
    evidence: tuple[str, ...] = (
        f"phase: {_phase(phase)}, for {since:.0f} s",
        f"processes: {beat.get('processes', '?')}, {beat.get('rss', 0) / 2**20:.0f} MiB, {busy}",
        f"log last grew {quiet:.0f} s ago",
    )
    if beat.get("gpus"):
        told = (f"GPU {i} {_use(gpu)}{gpu['memory']} MiB" for i, gpu in sorted(beat["gpus"].items()))
        evidence = (*evidence, ", ".join(told))
    if seen["record"].get("stale_locks") and phase.get("name") in ("imports", "model", "compiling"):
        evidence = (
            *evidence,
            *(f"a build may wait for {lock}, which nobody holds: remove it" for lock in seen["record"]["stale_locks"]),
        )
    if beat.get("disk_free", FULL_BYTES) < FULL_BYTES:
        evidence = (*evidence, f"the disk is full: {beat['disk_free']} bytes free")
    # A beat from before the deadline says nothing about the time after it: the next one decides.
    late = phase and beat.get("boot", begun) > phase.get("deadline", float("inf"))
    if late and beat.get("idle"):
        stacks = tuple(_lines(seen["stacks"], 12)) or ("no stacks could be had",)
        cause = f"nothing moves in phase {_phase(phase)}"
        return Verdict("hung", cause, (*evidence, *stacks), "read the stacks; stop it and resume", alive=True)
    if late:
        cause = f"past its deadline in phase {_phase(phase)}, computing without a word"
        return Verdict("silent", cause, evidence, "wait, or stop it and look at its stacks", alive=True)
    silent = quiet > SILENT_AFTER_S or not beat.get("log", {}).get("written")
    if not phase:
        if silent:
            cause = f"started and silent for {quiet:.0f} s, {busy}"
            return Verdict("silent", cause, evidence, "wait, or look at its stacks", alive=True)
        return Verdict("running", "a command that reports no phases", evidence, "", alive=True)
    if phase.get("name") == "compiling":
        return Verdict("compiling", f"within its deadline, {phase['deadline'] - now:.0f} s left", evidence, "wait", alive=True)
    if phase.get("step") is None:
        # Whoever prints as it goes is not silent, though it has no step to show yet.
        name: Name = "silent" if silent else "running"
        return Verdict(name, f"starting up, in phase {_phase(phase)}", evidence, "wait", alive=True)
    return Verdict("running", _phase(phase), evidence, "", alive=True)

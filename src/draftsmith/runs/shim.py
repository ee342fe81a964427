"""The supervisor of a run: standard library only, Python 3.8 or newer, one file that works alone on any Linux host.

    python3 shim.py start < spec.json    begin an attempt, detached from whoever calls
    python3 shim.py probe RUN [OFFSET]   everything that a verdict needs, read and measured now; and the log from a byte on
    python3 shim.py stop RUN [SIGNAL]    ask the supervisor to end the attempt; without one, signal what it left

Each answers at once with one line, `draftsmith-shim: {json}`: what a shell or a wrapper prints around it cannot be taken for it.
spec: {"run": folder, "argv": [...], "cwd": folder, "env": {name: value}, "grace_s": 120, "beat_s": 2,
"needs": {"disk_mb": 100, "port": 8000, "locks": [path, ...]}}; only run and argv are required.

An attempt is a folder `RUN/attempts/NNNN`: record.json (who, where, what), log (all that the trainer prints), heartbeat.json,
phase.json (the trainer's own word), stop.json (a request to end), exit.json (how it ended). Ages are seconds of the boot clock,
which nobody sets; wall time stands beside it for people.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

SENTINEL, ATTEMPT = "draftsmith-shim: ", "DRAFTSMITH_ATTEMPT"
TAIL_BYTES, CHUNK_BYTES, RESERVE_BYTES, ORPHAN_GRACE_S = 8192, 262144, 65536, 5.0
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
SHOWN_ENV = re.compile("PATH|HOME|USER|LANG|LC_|VIRTUAL_ENV|PYTHON|CUDA_|NVIDIA_|OMP_|MKL_|TORCH|NCCL_|DRAFTSMITH_|HF_HOME|TMP")
SECRET_NAME = r"[\w-]*(?:token(?!s|izer)|secret|passw(?:or)?d|api[_-]?key|authorization)[\w-]*"
SECRETS = [
    (re.compile(r"(\w+://)[^\s@]+@"), r"\1***@"),
    (re.compile(r"\b(hf_|sk-|ghp_|glpat-|nvapi-|Bearer )[\w.-]{3,}"), r"\1***"),
    (re.compile(rf"(?i)({SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)(?!Bearer)[^\s\"'&,]+"), r"\1***"),
]
Json = dict  # of records, str to anything


def redact(text: str) -> str:
    """`text` without what looks like a credential."""
    for pattern, shown in SECRETS:
        text = pattern.sub(shown, text)
    return text


def redact_words(words: list[str]) -> list[str]:
    """The same for a command, where a secret may be the word after its name."""
    names = re.compile(rf"(?i)--?{SECRET_NAME}$")
    return ["***" if i and names.match(words[i - 1]) else redact(word) for i, word in enumerate(words)]


def read_text(path: str) -> str:
    """The file's text, empty where there is no such file."""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def read_json(path: str) -> Json:
    """The record at `path`; empty where there is none or it is not one."""
    with suppress(ValueError, TypeError):
        return dict(json.loads(read_text(path)))
    return {}


def write_json(path: str, value: Json) -> None:
    """A reader sees the old record or the new one, each whole."""
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def clock() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def stat_of(pid: int) -> Json:
    """State, parent, start (clock ticks since boot), CPU ticks used and resident bytes of a process; empty if there is none."""
    name, _, rest = read_text(f"/proc/{pid}/stat").rpartition(") ")
    if not name:
        return {}
    fields = rest.split()
    ticks, resident = int(fields[11]) + int(fields[12]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return {"pid": pid, "state": fields[0], "ppid": int(fields[1]), "start": int(fields[19]), "ticks": ticks, "rss": resident}


def is_same(process: Json | None) -> bool:
    """Whether a recorded process still lives: the same number and start time, and not a corpse that nobody collected."""
    now = stat_of(process["pid"]) if process else {}
    return bool(process and now and now["start"] == process["start"] and now["state"] not in "ZX")


def place() -> Json:
    """Where this process runs: two reads that differ mean another machine, another boot or another container."""
    boot_id, init = read_text("/proc/sys/kernel/random/boot_id").strip(), stat_of(1).get("start")
    return {"host": os.uname().nodename, "boot_id": boot_id, "pid_ns": os.readlink("/proc/self/ns/pid"), "init_start": init}


def members(where: str) -> list[Json]:
    """Living processes that carry the attempt, or one of the run's attempts, in the environment they were started with."""
    mark = f"{ATTEMPT}={where}"
    found = [
        stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit() and mark in read_text(f"/proc/{name}/environ")
    ]
    return [process for process in found if is_same(process)]


def send(process: Json, number: int) -> None:
    """Signal this very process. A descriptor (Python 3.9, Linux 5.3) stands for it for good, so no later owner of the number is hit."""
    handle = None
    with suppress(OSError, AttributeError):
        handle = os.pidfd_open(process["pid"])
    with suppress(OSError):
        if is_same(process):
            signal.pidfd_send_signal(handle, number) if handle is not None else os.kill(process["pid"], number)
    if handle is not None:
        os.close(handle)


def descendants(root: int) -> dict[int, Json]:
    """Every living process below `root`."""
    children: dict[int, list[Json]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := stat_of(int(name))):
            children.setdefault(found["ppid"], []).append(found)
    below, queue = {}, list(children.get(root, []))
    while queue:
        found = queue.pop()
        queue += children.get(found["pid"], [])
        if found["state"] not in "ZX":
            below[found["pid"]] = found
    return below


def memory_kills() -> dict[str, int]:
    """How many processes were killed for memory: in our cgroup (v2, else v1), and on the whole machine."""
    files = {"machine": "/proc/vmstat"}
    for line in read_text("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            files["cgroup"] = f"/sys/fs/cgroup/memory{path.rstrip('/')}/memory.oom_control"
        elif number == "0":
            files.setdefault("cgroup", f"/sys/fs/cgroup{path.rstrip('/')}/memory.events")
    rows = {name: re.search(r"^oom_kill (\d+)$", read_text(file), re.MULTILINE) for name, file in files.items()}
    return {name: int(found.group(1)) for name, found in rows.items() if found}


def log_state(path: str, descriptor: int | None = None) -> Json:
    """Size and inode of the log as its path shows it now, and the size of the file that was opened first."""
    found: Json = {"size": None, "inode": None}
    with suppress(OSError):
        found = {"size": os.stat(path).st_size, "inode": os.stat(path).st_ino}
    return found if descriptor is None else {**found, "written": os.fstat(descriptor).st_size}


def tail_of(descriptor: int) -> str:
    """The last lines of an open log, without credentials."""
    size = os.fstat(descriptor).st_size
    return redact(os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode("utf-8", "replace"))


def attempts_of(run: str) -> list[str]:
    """The attempts' folders, oldest first."""
    folder = os.path.join(run, "attempts")
    names = sorted(name for name in os.listdir(folder) if name.isdigit()) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names]


def preflight(run: str, needs: Json) -> tuple[list[str], list[str]]:
    """Why an attempt cannot start, in words; and lock files that nobody holds, left by compilers that died."""
    faults, stale, wanted = [], [], needs.get("disk_mb", 100)
    free = shutil.disk_usage(run).free // 2**20
    if free < wanted:
        faults.append(f"only {free} MiB free in {run}, expected {wanted}; free some space")
    if needs.get("port"):
        try:
            socket.create_server(("", needs["port"])).close()
        except OSError as error:
            faults.append(f"port {needs['port']} cannot be used ({error.strerror}); choose another")
    alive = [str(process["pid"]) for process in members(os.path.join(run, "attempts", ""))]
    if alive:
        faults.append(f"processes of an earlier attempt still live: {', '.join(alive)}; stop the run first")
    for path in needs.get("locks", []):
        with suppress(OSError), open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stale.append(path)
    return faults, stale


class Supervisor:
    """One attempt, from the trainer's start to its exit record. Alone in its process, and without threads."""

    def __init__(self, spec: Json, attempt: str, log: int) -> None:
        self.spec, self.attempt, self.log, self.begin = spec, attempt, log, clock()
        self.grace, self.beat, self.stale = float(spec.get("grace_s", 120)), float(spec.get("beat_s", 2)), spec["stale_locks"]
        self.child: Any = None
        self.status: int | None = None
        self.stop: Json | None = None
        self.killed = self.stacks_asked = False
        self.ticks, self.grew, self.kills, self.recorded = 0, (0, self.begin), [memory_kills()] * 2, False
        self.record: Json = {}

    def start(self) -> None:
        """Start the trainer and write the record; raises OSError if it cannot be started."""
        for number in WATCHED:
            signal.signal(number, signal.SIG_DFL)  # whatever our caller ignored, the trainer would too
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        # Orphans of the trainer come to us (PR_SET_CHILD_SUBREAPER), so that none is lost from sight.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        with open("reserve", "wb") as reserve:
            reserve.write(bytes(RESERVE_BYTES))
        own = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", ATTEMPT: self.attempt}
        env, cwd, argv = {**os.environ, **self.spec.get("env", {}), **own}, self.spec["cwd"], self.spec["argv"]
        shown = {k: redact(f"{k}={v}")[len(k) + 1 :] for k, v in sorted(env.items()) if SHOWN_ENV.match(k)}
        self.record = {"argv": redact_words(argv), "cwd": cwd, "env": shown}
        self.record.update(place=place(), user=os.getuid(), wall=time.time(), boot=self.begin, log=log_state("log"))
        self.record.update(grace_s=self.grace, beat_s=self.beat, shim=stat_of(os.getpid()), stale_locks=self.stale)
        write_json("record.json", self.record)
        streams: Json = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log}
        streams["preexec_fn"] = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, [])  # or it would inherit ours
        try:
            self.child = subprocess.Popen(argv, cwd=cwd, env=env, start_new_session=True, **streams)
        except OSError as error:
            self.finish({"not_started": f"{error.strerror}: {error.filename or argv[0]}"})
            raise
        self.record["child"] = stat_of(self.child.pid)
        self.heartbeat()

    def watch(self) -> None:
        """Until the trainer has ended: collect the dead, beat, obey a request to stop; then write how it ended."""
        due = clock() + self.beat
        while self.status is None:
            if clock() >= due:
                due = clock() + self.beat
                if os.path.exists("stop.json"):
                    self.begin_stop(read_json("stop.json"))
                self.heartbeat()
            if self.stop and not self.killed and clock() >= self.stop["boot"] + self.grace:
                self.killed = True
                self.signal_tree(signal.SIGKILL)
            came = signal.sigtimedwait(WATCHED, max(0.0, due - clock()))
            if came is not None and came.si_signo in (signal.SIGTERM, signal.SIGINT):
                sender = read_text(f"/proc/{came.si_pid}/comm").strip()
                self.begin_stop({"by_pid": came.si_pid, "by_uid": came.si_uid, "by": sender})
            self.reap()
        status, left_behind = self.status, len(descendants(os.getpid()))
        self.end_tree()
        code, number = (os.WEXITSTATUS(status), None) if os.WIFEXITED(status) else (None, os.WTERMSIG(status))
        unkillable = sorted(descendants(os.getpid()))
        self.finish({"code": code, "signal": number, "left_behind": left_behind, "unkillable": unkillable})

    def reap(self) -> None:
        """Collect every child that has ended, adopted ones too."""
        with suppress(ChildProcessError):
            for pid, status in iter(lambda: os.waitpid(-1, os.WNOHANG), (0, 0)):
                if pid == self.child.pid:
                    self.status = self.child.returncode = status

    def signal_tree(self, number: int) -> None:
        """Signal everything below us: by descent at this very moment, all of it is ours."""
        for process in descendants(os.getpid()).values():
            send(process, number)

    def end_tree(self) -> None:
        """End what the trainer left behind: a wrapper may die of the signal that its own child needs longer for."""
        promised = self.stop["boot"] + self.grace if self.stop and not self.killed else 0.0
        patience = max(clock() + ORPHAN_GRACE_S, promised)
        self.signal_tree(signal.SIGTERM)
        while descendants(os.getpid()) and clock() < patience + ORPHAN_GRACE_S:
            if clock() >= patience:
                self.signal_tree(signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.1)
            self.reap()

    def begin_stop(self, asked: Json) -> None:
        """Pass the first request on; the trainer has its grace from now on."""
        if self.stop is None:
            self.stop = {**asked, "boot": clock(), "wall": time.time()}
            os.kill(self.child.pid, signal.SIGTERM)

    def heartbeat(self) -> None:
        """Measure the tree and the log; ask an idle trainer that is past its deadline for its stacks, once."""
        tree, log = descendants(os.getpid()), log_state("log", self.log)
        ticks = sum(process["ticks"] for process in tree.values())
        idle = ticks - self.ticks <= 0.05 * self.beat * os.sysconf("SC_CLK_TCK")
        self.grew = self.grew if log["written"] == self.grew[0] else (log["written"], clock())
        phase = read_json("phase.json")
        late = isinstance(phase.get("deadline"), float) and clock() > phase["deadline"]
        if (
            late
            and idle
            and not self.stacks_asked
            and phase.get("stacks_signal") == signal.SIGUSR1
            and phase.get("pid") in tree
        ):
            self.stacks_asked = True
            send(tree[phase["pid"]], signal.SIGUSR1)
        if not (os.path.exists(self.attempt) and os.path.samestat(os.stat(self.attempt), os.stat("."))):
            self.begin_stop({"by": "the supervisor, because the run's folder is gone"})
        beat = {"boot": clock(), "wall": time.time(), "log": log, "log_grew": self.grew[1], "late": late, "idle": idle}
        beat.update(processes=len(tree), rss=sum(p["rss"] for p in tree.values()), ticks=ticks, busy_ticks=ticks - self.ticks)
        beat["disk_free"] = shutil.disk_usage(".").free
        self.ticks, self.kills = ticks, [self.kills[1], memory_kills()]
        try:
            write_json("heartbeat.json", beat)
            if not self.recorded:
                write_json("record.json", self.record)
            self.recorded = True
        except OSError:  # a full disk: in place there is room
            with suppress(OSError), open("heartbeat.json", "r+") as file:
                file.write(json.dumps(beat))
                file.truncate()

    def finish(self, how: Json) -> None:
        """The last word."""
        kills = {name: count - self.kills[0].get(name, 0) for name, count in memory_kills().items()}
        how.update(phase=read_json("phase.json"), log=log_state("log", self.log), tail=tail_of(self.log), memory_kills=kills)
        how.update(wall=time.time(), boot=clock(), seconds=clock() - self.begin, stop=self.stop, killed=self.killed)
        how["disk_free"] = shutil.disk_usage(".").free
        # Room that was set aside at the start, so that this can be written on a full disk.
        with suppress(OSError):
            os.unlink("reserve")
        for _ in range(60):
            with suppress(OSError):
                return write_json("exit.json", how)
            time.sleep(1)


def start(spec: Json) -> Json:
    """Make the attempt and its supervisor, in a session of its own and without any descriptor of the caller."""
    run, _ = os.path.abspath(spec["run"]), spec["argv"]
    os.makedirs(os.path.join(run, "attempts"), exist_ok=True)
    lock = os.open(os.path.join(run, "attempts", "lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return {"ok": False, "error": f"the run in {run} already has a supervisor; stop it first"}
    faults, stale = preflight(run, spec.get("needs", {}))
    if faults:
        return {"ok": False, "error": "; ".join(faults)}
    number = 1 + max([int(os.path.basename(attempt)) for attempt in attempts_of(run)], default=0)
    attempt = os.path.join(run, "attempts", f"{number:04d}")
    os.mkdir(attempt)
    # Its parent, this process, ends at once; the lock lives as long as the supervisor, and no longer.
    with open(os.path.join(attempt, "shim.log"), "ab") as own:
        streams: Json = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": own, "pass_fds": [lock]}
        command = [sys.executable, os.path.abspath(__file__), "supervise", attempt, str(lock)]
        supervisor: Any = subprocess.Popen(command, cwd="/", start_new_session=True, **streams)
    with supervisor.stdin as told:
        told.write(json.dumps({"cwd": os.getcwd(), **spec, "stale_locks": stale}).encode())
    return json.loads(supervisor.stdout.read() or '{"ok": false, "error": "the supervisor died at once; see shim.log"}')


def supervise(attempt: str, lock: int) -> int:
    """Be the supervisor: start the trainer, say so on standard output and close it, watch to the end."""
    os.chdir(attempt)
    os.set_inheritable(lock, False)
    log = os.open("log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    supervisor = Supervisor(json.load(sys.stdin), attempt, log)
    answer = {"ok": True, "attempt": attempt, "shim": os.getpid()}
    try:
        supervisor.start()
    except OSError as error:
        answer.update(ok=False, error=f"{error.strerror}: {error.filename}")
    with suppress(OSError):  # whoever asked may be gone
        print(json.dumps(answer), flush=True)
    for standard in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    if answer["ok"]:
        supervisor.watch()
    return 0


def probe(run: str, offset: int | None = None) -> Json:
    """The latest attempt's records, what its processes and files look like now, and the log's bytes from `offset` on."""
    now = {**place(), "wall": time.time(), "boot": clock(), "memory_kills": memory_kills()}
    found: Json = {"ok": True, "run": os.path.abspath(run), "exists": os.path.isdir(run), "now": now, "attempt": None}
    attempts = attempts_of(os.path.abspath(run))
    if not attempts:
        return found
    found["attempt"] = attempts[-1]
    path = {name: os.path.join(attempts[-1], name) for name in ("log", "stacks", "shim.log")}
    for name in ("record", "heartbeat", "phase"):
        found[name] = read_json(os.path.join(attempts[-1], name + ".json"))
    process = found["record"].get("shim") or {}
    found["shim"] = {"now": stat_of(process.get("pid", 0)), "same": is_same(process)}
    found["left"] = [] if found["shim"]["same"] else members(attempts[-1])
    # After the processes, since it is written before the supervisor goes.
    found["exit"] = read_json(os.path.join(attempts[-1], "exit.json"))
    found["age"] = time.time() - os.stat(attempts[-1]).st_ctime
    found.update(stacks=redact(read_text(path["stacks"])), shim_log=redact(read_text(path["shim.log"]))[-TAIL_BYTES:])
    found.update(log=log_state(path["log"]), tail="")
    with suppress(OSError), open(path["log"], "rb") as file:
        found["tail"] = tail_of(file.fileno())
        if offset is not None:
            found["chunk"] = base64.b64encode(os.pread(file.fileno(), CHUNK_BYTES, offset)).decode()
    return found


def stop(run: str, number: int = signal.SIGTERM) -> Json:
    """Leave the request where the supervisor looks at every beat; where there is none, signal what it left."""
    found = probe(run)
    if not found["attempt"] or found["exit"]:
        return found
    for process in found["left"]:
        send(process, number)
    request = os.path.join(found["attempt"], "stop.json")
    try:
        write_json(request, {"by_pid": os.getppid(), "by_uid": os.getuid(), "by": "draftsmith stop"})
    except OSError:  # a full disk: that there is one says enough
        open(request, "w").close()
    return found


def reply(answer: Json) -> None:
    """The one line that is ours."""
    print(SENTINEL + json.dumps(answer), flush=True)


def main(words: list[str]) -> int:
    """Obey one verb."""
    if words[:1] == ["supervise"]:
        return supervise(words[1], int(words[2]))
    try:
        if words == ["start"]:
            reply(start(json.load(sys.stdin)))
        elif words[:1] == ["probe"] and len(words) in (2, 3):
            reply(probe(words[1], *map(int, words[2:])))
        elif words[:1] == ["stop"] and len(words) in (2, 3):
            reply(stop(words[1], *map(int, words[2:])))
        else:
            sys.stderr.write(str(__doc__))
            return 2
    except (OSError, ValueError, KeyError) as error:
        reply({"ok": False, "error": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

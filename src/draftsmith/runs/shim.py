"""The supervisor of a run: standard library only, Python 3.8 or newer, one file that works alone on any Linux host.

    python3 shim.py start < spec.json    begin a detached attempt; spec: run, argv, if wanted cwd, env, grace_s, beat_s, disk_mb, port
    python3 shim.py probe RUN [OFFSET]   everything that a verdict needs, read and measured now; and the log from a byte on
    python3 shim.py stop RUN [SIGNAL]    ask the supervisor to end the attempt; without one, signal what it left
Each answers with one line, `draftsmith-shim: {json}`. A folder RUN/attempts/NNNN holds the log and what is known, as JSON.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

SENTINEL, ATTEMPT, ATTEMPTS = "draftsmith-shim: ", "DRAFTSMITH_ATTEMPT", "/attempts/[0-9][0-9][0-9][0-9]"
TAIL_BYTES, CHUNK_BYTES, RESERVE_BYTES, ORPHAN_GRACE_S, GPU_SLACK_MB = 8192, 262144, 65536, 5.0, 512
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
LOCKS = ("~/.cache/torch_extensions/*/lock", "~/.cache/torch_extensions/*/*/lock")  # batons: every later build waits for them
SHOWN_ENV = re.compile("PATH|HOME|USER|LANG|LC_|VIRTUAL_ENV|PYTHON|CUDA_|NVIDIA_|OMP_|MKL_|TORCH|NCCL_|DRAFTSMITH_|HF_HOME|TMP")
# Every repetition is bounded: what a trainer prints must not keep its supervisor busy.
SECRET_NAME = r"(?:token(?!s|izer)|secret|passw(?:or)?d|passphrase|_pass|api[_-]?key|authorization)[\w-]{0,40}"
VALUE = r"(?:\"[^\"\0]+|'[^'\0]+|[^\s\"'&,\0]+)"
SECRETS = [
    re.compile(r"(://)(?:[^\s/\0]{0,200}:[^\s\0]{1,400}|[^\s/:\0]{1,400})(?=@)"),
    re.compile(r"(\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|nvapi-|AKIA)(?=[\w-]{8})|[Bb]earer |: [Bb]asic )[\w.~+/=-]+"),
    re.compile(rf"(?i)({SECRET_NAME}[\"']?\s{{0,9}}[=:]\s{{0,9}})(?!bearer |basic ){VALUE}"),
    re.compile(rf"(?i)((?<![\w-])--?[\w-]{{0,40}}?{SECRET_NAME}\0)[^\0]+"),
]
Json = dict  # of records, str to anything


def redact(text: str) -> str:
    """`text` without what looks like a credential; the words of a command are joined by NUL."""
    for pattern in SECRETS:
        text = pattern.sub(r"\1***", text)
    return text


def read_text(path: str) -> str:
    """The file's text, empty where there is no such file."""
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def read_json(path: str) -> Json:
    """The record at `path`; empty where there is none or it is not one."""
    with suppress(ValueError, TypeError, RecursionError):
        return dict(json.loads(read_text(path)))
    return {}


def write_json(path: str, value: Json) -> None:
    """A reader sees the old record or the new one, each whole; on a full disk the old one is overwritten, where there is room."""
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    except OSError:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8") as file:
            file.write(json.dumps(value))
            file.truncate()


def clock() -> float:
    """Seconds since boot, suspended time included: nobody sets this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def stat_of(pid: int) -> Json:
    """State, parent, start (ticks since boot), CPU ticks, with those of collected children, and bytes of a process; or empty."""
    name, _, rest = read_text(f"/proc/{pid}/stat").rpartition(") ")
    if not name:
        return {}
    fields = rest.split()
    ticks, resident = sum(map(int, fields[11:15])), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return {"pid": pid, "state": fields[0], "ppid": int(fields[1]), "start": int(fields[19]), "ticks": ticks, "rss": resident}


def is_same(process: Json | None) -> bool:
    """Whether a recorded process still lives: the same number and start time, and not a corpse that nobody collected."""
    now = stat_of(process["pid"]) if process else {}
    return bool(process and now and now["start"] == process["start"] and now["state"] not in "ZX")


def place() -> Json:
    """Where this process runs: two reads that differ mean another machine, another boot or another container."""
    boot_id, init = read_text("/proc/sys/kernel/random/boot_id").strip(), stat_of(1).get("start")
    return {"host": os.uname().nodename, "boot_id": boot_id, "pid_ns": os.readlink("/proc/self/ns/pid"), "init_start": init}


def descendants(root: int) -> dict[int, Json]:
    """Every living process below `root`; 0 is above all, also those whose parent ends while this looks."""
    below: dict[int, Json] = {}
    everyone = [stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    waiting = [process for process in everyone if process and process["state"] not in "ZX"]
    while found := [process for process in waiting if not root or process["ppid"] == root or process["ppid"] in below]:
        below.update((process["pid"], process) for process in found)
        waiting = [process for process in waiting if process["pid"] not in below]
    return below


def members(where: str) -> list[Json]:
    """Living processes that carry the attempt, or one of the run's attempts, in the environment they were started with."""
    return [p for pid, p in descendants(0).items() if f"\0{ATTEMPT}={where}" in "\0" + read_text(f"/proc/{pid}/environ")]


def send(processes: Iterable[Json], number: int) -> None:
    """Signal these very processes. A descriptor (Python 3.9, Linux 5.3) stands for one for good, whoever gets its number later."""
    for process in processes:
        handle = None
        with suppress(OSError, AttributeError):
            handle = os.pidfd_open(process["pid"])
        with suppress(OSError):
            if is_same(process):
                signal.pidfd_send_signal(handle, number) if handle is not None else os.kill(process["pid"], number)
        if handle is not None:
            os.close(handle)


def memory_kills() -> dict[str, int]:
    """How many processes were killed for memory: in our cgroup (v1, else v2), and on the whole machine."""
    files = {"machine": "/proc/vmstat"}
    for line in read_text("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or number == "0":
            file = "memory{}/memory.oom_control" if controllers else "{}/memory.events"
            files.setdefault("cgroup", "/sys/fs/cgroup/" + file.format(path.rstrip("/")))
    rows = {name: re.search(r"^oom_kill (\d+)$", read_text(file), re.MULTILINE) for name, file in files.items()}
    return {name: int(found.group(1)) for name, found in rows.items() if found}


def gpus() -> Json:
    """Use in percent and used memory in MiB of each NVIDIA device, from the driver's own library; empty where there is none."""
    found: Json = {}
    with suppress(OSError, AttributeError):
        nvml, count, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(), ctypes.c_void_p()
        use, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()  # GPU and memory percent; total, free and used bytes
        failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(0 if failed else count.value):
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            unknown = nvml.nvmlDeviceGetUtilizationRates(device, use)  # as on a device cut into instances
            if nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0:
                found[str(index)] = {"use": None if unknown else use[0], "memory": memory[2] >> 20}
        nvml.nvmlShutdown()
    return found


def log_state(path: str) -> Json:
    """Size, inode and last lines of a log, cut only after they are redacted: half a credential would not be known for one."""
    with suppress(OSError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        tail = os.pread(file.fileno(), 2 * TAIL_BYTES, max(0, size - 2 * TAIL_BYTES)).decode("utf-8", "replace")
        return {"size": size, "inode": os.fstat(file.fileno()).st_ino, "tail": redact(tail)[-TAIL_BYTES:]}
    return {"size": None, "inode": None, "tail": ""}


class Supervisor:
    """One attempt, from the trainer's start to its exit record. Alone in its process, and without threads."""

    def __init__(self, spec: Json, attempt: str) -> None:
        self.attempt, self.begin, self.gpus, self.kills = attempt, clock(), spec["seen"].get("gpus", {}), memory_kills()
        self.log = os.open("log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.grace, self.pace = float(spec.get("grace_s", 120)), float(spec.get("beat_s", 2))
        self.stop, self.fault, self.killed, self.stacks_asked = Json(), "", False, False  # type: ignore[var-annotated]
        self.ticks, self.grew, self.beaten = 0, (0, self.begin), self.begin
        for number in WATCHED:
            signal.signal(number, signal.SIG_DFL)  # whatever our caller ignored, the trainer would too
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        # Orphans of the trainer come to us (PR_SET_CHILD_SUBREAPER), so that none is lost from sight.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        with open("exit.json", "wb") as room:  # no record yet, but what the last word needs on a full disk
            room.write(bytes(RESERVE_BYTES))
        own = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", ATTEMPT: attempt}
        env, cwd, argv = {**os.environ, **spec.get("env", {}), **own}, os.path.expanduser(spec["cwd"]), spec["argv"]
        shown = {k: redact(f"{k}={v}")[len(k) + 1 :] for k, v in sorted(env.items()) if SHOWN_ENV.match(k)}
        record: Json = {"argv": redact("\0".join(argv)).split("\0"), "cwd": cwd, "env": shown, **spec["seen"]}
        record.update(place=place(), user=os.getuid(), wall=time.time(), boot=self.begin, log=log_state("log"))
        record.update(grace_s=self.grace, beat_s=self.pace, shim=stat_of(os.getpid()))
        write_json("record.json", record)
        streams: Json = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log}
        streams["preexec_fn"] = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, [])  # or it would inherit ours
        try:
            self.child = subprocess.Popen(argv, cwd=cwd, env=env, start_new_session=True, **streams)
            with suppress(OSError):
                write_json("record.json", {**record, "child": stat_of(self.child.pid)})
        except OSError as error:
            self.fault = f"{error.strerror}: {error.filename or argv[0]}"
            self.finish({"not_started": self.fault})

    def watch(self) -> None:
        """Until the trainer has ended: collect the dead, beat, obey a request to stop; then write how it ended."""
        due = 0.0
        while self.child.returncode is None:
            if not self.stop and os.path.exists("stop.json"):
                self.begin_stop(read_json("stop.json"))
            if clock() >= due:
                spent = time.process_time()
                self.heartbeat()
                due = clock() + max(self.pace, 200 * (time.process_time() - spent))  # half a percent of one core at most
            if self.stop and not self.killed and clock() >= self.stop["boot"] + self.grace:
                self.killed = True
                send(descendants(os.getpid()).values(), signal.SIGKILL)
            came = signal.sigtimedwait(WATCHED, min(1.0, max(0.0, due - clock())))
            if came is not None and came.si_signo in (signal.SIGTERM, signal.SIGINT):
                self.begin_stop({"by_pid": came.si_pid, "by_uid": came.si_uid})
            self.reap()
        status, left_behind = self.child.returncode, len(descendants(os.getpid()))
        self.end_tree()
        code, number = (os.WEXITSTATUS(status), None) if os.WIFEXITED(status) else (None, os.WTERMSIG(status))
        unkillable = sorted(descendants(os.getpid()))
        self.finish({"code": code, "signal": number, "left_behind": left_behind, "unkillable": unkillable})

    def reap(self) -> None:
        with suppress(ChildProcessError):
            for pid, status in iter(lambda: os.waitpid(-1, os.WNOHANG), (0, 0)):
                if pid == self.child.pid:
                    self.child.returncode = status

    def end_tree(self) -> None:
        """End what the trainer left behind: a wrapper may die of the signal that its own child needs longer for."""
        patience = max(clock() + ORPHAN_GRACE_S, self.stop["boot"] + self.grace if self.stop and not self.killed else 0.0)
        send(descendants(os.getpid()).values(), signal.SIGTERM)
        while descendants(os.getpid()) and clock() < patience + ORPHAN_GRACE_S:
            if clock() >= patience:
                send(descendants(os.getpid()).values(), signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.1)
            self.reap()
            if clock() >= self.beaten + self.pace:
                self.heartbeat()

    def begin_stop(self, asked: Json) -> None:
        """Pass the first request on; the trainer has its grace from now on, longer if it says that a step and a save need that."""
        if not self.stop and self.child.returncode is None:
            told = read_json("phase.json").get("stop_s")
            self.grace = max(self.grace, told) if isinstance(told, float) else self.grace
            self.stop = {"by": read_text(f"/proc/{asked.get('by_pid')}/comm").strip(), **asked, "boot": clock()}
            os.kill(self.child.pid, signal.SIGTERM)

    def heartbeat(self) -> None:
        """Measure the tree and the log; ask an idle trainer that is past its deadline for its stacks, once."""
        now, tree, log, phase = clock(), descendants(os.getpid()), log_state("log"), read_json("phase.json")
        log.update(written=os.fstat(self.log).st_size)
        ticks = sum(process["ticks"] for process in tree.values())
        idle = 0 <= ticks - self.ticks <= 0.05 * (now - self.beaten) * os.sysconf("SC_CLK_TCK")
        self.grew = self.grew if log["written"] == self.grew[0] else (log["written"], now)
        late = isinstance(phase.get("deadline"), float) and now > phase["deadline"]
        willing = [p for p in tree.values() if p["pid"] == phase.get("pid") and phase.get("stacks_signal") == signal.SIGUSR1]
        if late and idle and willing and not self.stacks_asked:
            self.stacks_asked = True
            send(willing, signal.SIGUSR1)
        if not (os.path.exists(self.attempt) and os.path.samestat(os.stat(self.attempt), os.stat("."))):
            self.begin_stop({"by": "the supervisor, because the run's folder is gone"})
        beat = {"boot": now, "wall": time.time(), "log": log, "log_grew": self.grew[1], "idle": idle}
        beat.update(processes=len(tree), rss=sum(p["rss"] for p in tree.values()), ticks=ticks, busy_ticks=ticks - self.ticks)
        beat.update(seconds=now - self.beaten, gpus=gpus())
        self.ticks, self.beaten = ticks, now
        with suppress(OSError):
            write_json("heartbeat.json", {**beat, "disk_free": shutil.disk_usage(".").free})

    def finish(self, how: Json) -> None:
        """The last word."""
        for _ in range(20):  # the driver takes memory back a little later
            how["gpus"] = gpus()
            if all(now["memory"] <= self.gpus.get(i, now)["memory"] + GPU_SLACK_MB for i, now in how["gpus"].items()):
                break
            time.sleep(0.5)
        kills = {name: count - self.kills.get(name, 0) for name, count in memory_kills().items()}
        how.update(phase=read_json("phase.json"), tail=log_state(f"/proc/self/fd/{self.log}")["tail"], memory_kills=kills)
        how.update(wall=time.time(), boot=clock(), seconds=clock() - self.begin, stop=self.stop, killed=self.killed)
        for _ in range(60):
            with suppress(OSError):
                return write_json("exit.json", {**how, "disk_free": shutil.disk_usage(".").free})
            time.sleep(1)


def start(spec: Json) -> Json:
    """Make the attempt and its supervisor, in a session of its own and without any descriptor of the caller."""
    run, _ = os.path.abspath(os.path.expanduser(spec["run"])), spec["argv"]
    os.makedirs(os.path.join(run, "attempts"), exist_ok=True)
    lock = os.open(os.path.join(run, "attempts", "lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return {"ok": False, "error": f"the run in {run} already has a supervisor; stop it first"}
    faults, free, wanted = [], shutil.disk_usage(run).free // 2**20, spec.get("disk_mb", 100)
    if free < wanted:
        faults.append(f"only {free} MiB free in {run}, expected {wanted}; free some space")
    if spec.get("port"):
        try:
            socket.create_server(("", spec["port"])).close()
        except OSError as error:
            faults.append(f"port {spec['port']} cannot be used ({error.strerror}); choose another")
    if ATTEMPT in os.environ:
        faults.append("a run launched from inside another would end with it; launch it from elsewhere")
    if alive := [str(process["pid"]) for process in members(f"{run}/attempts/") or probe(run).get("left", [])]:
        faults.append(f"processes of an earlier attempt still live: {', '.join(alive)}; stop the run first")
    if faults:
        return {"ok": False, "error": "; ".join(faults)}
    locks = [os.path.realpath(path) for pattern in LOCKS for path in glob.glob(os.path.expanduser(pattern))]
    held = set()
    for link in glob.glob("/proc/[0-9]*/fd/*") if locks else []:
        with suppress(OSError):
            held.add(os.readlink(link))
    spec = {"cwd": os.getcwd(), **spec, "seen": {"stale_locks": [path for path in locks if path not in held], "gpus": gpus()}}
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", os.path.expanduser(spec["cwd"]), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        spec["seen"]["commit"] = subprocess.run(git, capture_output=True, check=True, timeout=20).stdout.decode().strip()
    # Its parent, this process, ends at once; the lock lives as long as the supervisor, and no longer.
    with open(os.path.join(run, "attempts", "shim.log"), "wb") as own:
        streams: Json = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": own, "pass_fds": [lock]}
        command = [sys.executable, os.path.abspath(__file__), "supervise", run]
        supervisor: Any = subprocess.Popen(command, cwd="/", start_new_session=True, **streams)
    with supervisor.stdin as told:
        told.write(json.dumps(spec).encode())
    return json.loads(supervisor.stdout.read() or '{"ok": false, "error": "the supervisor died; see attempts/shim.log"}')


def supervise(run: str) -> None:
    """Be the supervisor: start the trainer, say so on standard output and close it, watch to the end."""
    latest = max(glob.glob(glob.escape(run) + ATTEMPTS), default="0000")
    attempt = f"{run}/attempts/{int(latest[-4:]) + 1:04d}"
    os.mkdir(attempt)
    os.chdir(attempt)
    supervisor = Supervisor(json.load(sys.stdin), attempt)
    answer = {"ok": not supervisor.fault, "error": supervisor.fault, "attempt": attempt, "shim": os.getpid()}
    with suppress(OSError):  # whoever asked may be gone
        print(json.dumps(answer), flush=True)
    for standard in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    if not supervisor.fault:
        supervisor.watch()


def probe(run: str, offset: int | None = None) -> Json:
    """The latest attempt's records, what its processes and files look like now, and the log's bytes from `offset` on."""
    now = {**place(), "wall": time.time(), "boot": clock(), "memory_kills": memory_kills()}
    run = os.path.abspath(os.path.expanduser(run))
    found: Json = {"ok": True, "run": run, "exists": os.path.isdir(run), "now": now}
    found["readable"] = os.access(run, os.R_OK | os.X_OK)
    attempt = found["attempt"] = max(glob.glob(glob.escape(run) + ATTEMPTS), default=None)
    if attempt is None:
        return found
    found.update({name: read_json(f"{attempt}/{name}.json") for name in ("record", "heartbeat", "phase", "signal")})
    process = found["record"].get("shim") or {}
    found["shim"] = {"now": stat_of(process.get("pid", 0)), "same": is_same(process)}
    found["left"] = [] if found["shim"]["same"] else members(attempt) or [*filter(is_same, [found["record"].get("child")])]
    found["exit"] = read_json(f"{attempt}/exit.json")  # after the processes, since it is written before the supervisor goes
    found["shim_log"] = redact(read_text(f"{attempt}/../shim.log"))[-TAIL_BYTES:]
    found.update(stacks=redact(read_text(f"{attempt}/stacks")), age=time.time() - os.stat(attempt).st_ctime)
    found.update(log=log_state(f"{attempt}/log"))
    if offset is not None:
        with suppress(OSError), open(f"{attempt}/log", "rb") as file:
            found["chunk"] = os.pread(file.fileno(), CHUNK_BYTES, offset).decode("latin-1")
    return found


def stop(run: str, number: int = signal.SIGTERM) -> Json:
    """Leave the request where the supervisor looks every second; where there is none, signal what it left."""
    found = probe(run)
    if found["attempt"] and not found["exit"]:
        send(found["left"], number)
        asked = {"by_pid": os.getppid(), "by_uid": os.getuid(), "by": "draftsmith stop"}
        with suppress(OSError):  # on a full disk an empty file says enough
            write_json(f"{found['attempt']}/stop.json", asked)
    return found


def main(words: list[str]) -> int:
    """Obey one verb; the answer is the one line that is ours."""
    verb: Any = {"start": start, "probe": probe, "stop": stop, "supervise": supervise}.get("".join(words[:1]))
    if verb is None or len(words) not in ((1,) if verb is start else (2, 3)):
        sys.stderr.write(str(__doc__))
        return 2
    caught = () if verb is supervise else (OSError, ValueError, KeyError)  # what ends a supervisor stands in shim.log
    try:
        answer = verb(json.load(sys.stdin)) if verb is start else verb(words[1], *map(int, words[2:]))
    except caught as error:
        answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(SENTINEL + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Real faults, small trainers: the verdict names the cause within seconds, and never says "running" of what is not."""

import ast
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import RunError
from draftsmith.runs import shim
from draftsmith.runs.launch import launch, look, look_closely, stop
from draftsmith.runs.transport import Host, ask
from draftsmith.runs.verdict import SILENT_AFTER_S, Verdict, judge
from tests.conftest import end_all, until

HERE = Host()
BEAT_S = 0.2
# So soon the verdict names the cause.
WITHIN_S = 10.0
pytestmark = pytest.mark.process


class Run:
    """One supervised trainer: a few lines of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, code: str, **spec: Any) -> None:
        self.start_argv([sys.executable, "-c", textwrap.dedent(code)], **spec)

    def start_argv(self, argv: list[str], **spec: Any) -> None:
        ask(HERE, ["start"], {"run": str(self.folder), "argv": argv, "beat_s": BEAT_S, "grace_s": 5, **spec})

    @property
    def seen(self) -> Mapping[str, Any]:
        return look_closely(HERE, str(self.folder))[1]

    def pid(self, who: str) -> int:
        return self.seen["record"][who]["pid"]

    def verdict(self) -> Verdict:
        return look(HERE, str(self.folder))

    def becomes(self, name: str, cause: str = "") -> Verdict:
        def found() -> Verdict | None:
            verdict = self.verdict()
            return verdict if verdict.name == name and cause in verdict.cause else None

        try:
            return until(found, f"{name}: {cause}", seconds=WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.verdict()}") from None

    def prints(self, word: str) -> None:
        until(lambda: word in self.seen["log"]["tail"], word)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    yield made
    end_all(made.folder)


WAIT = "import time; print('up'); time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        ("def (", "import error: SyntaxError", "invalid syntax"),
        ("import nowhere_at_all", "import error: ModuleNotFoundError: No module named 'nowhere_at_all'", ""),
        ("raise ValueError('width 3, expected 4')", "exception (exit code 1): ValueError: width 3, expected 4", "Traceback"),
        ("import os; os._exit(3)", "exit code 3 without a word", "the log is empty"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed in native code (SIGSEGV)", "Segmentation fault"),
        ("import os; os.abort()", "crashed in native code (SIGABRT)", ""),
        ("import sys; sys.stderr.write('error: no such file\\n'); sys.exit(2)", "usage error (exit code 2): no such file", ""),
        ("bytearray(1 << 46)", "out of memory: MemoryError", ""),
        ("raise OSError(28, 'No space left on device')", "disk full: OSError: [Errno 28] No space left on device", ""),
        ("print('done')", "finished", ""),
    ],
)
def test_a_trainer_that_ends_by_itself(run: Run, code: str, cause: str, words: str) -> None:
    run.start(code)
    verdict = run.becomes("exited")
    assert verdict.cause.startswith(cause)
    assert any(words in line for line in verdict.evidence)
    assert not verdict.alive


def test_a_trainer_that_is_not_there(run: Run) -> None:
    with pytest.raises(RunError, match="No such file or directory: /nowhere/trainer"):
        run.start_argv(["/nowhere/trainer"])
    assert run.becomes("exited").cause.startswith("the trainer could not be started: No such file or directory")


def test_nothing_was_ever_launched(run: Run) -> None:
    assert run.verdict().name == "never launched"
    assert "does not exist" in run.verdict().evidence[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_from_outside(run: Run, number: signal.Signals) -> None:
    run.start(WAIT)
    run.prints("up")
    os.kill(run.pid("child"), number)
    assert run.becomes("exited").cause.startswith(f"killed from outside ({number.name})")


def test_a_sigterm_that_the_trainer_obeys_without_being_asked(run: Run) -> None:
    run.start("import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('up'); time.sleep(600)")
    run.prints("up")
    os.kill(run.pid("child"), signal.SIGTERM)
    assert "stopped by SIGTERM from outside" in run.becomes("exited").cause


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of this test's own, of 100 MB; v1 or v2."""
    found = shim.read_text("/proc/self/cgroup")
    lines = dict(line.split(":", 2)[1:] for line in found.splitlines())
    v1 = "memory" in lines
    parent = Path("/sys/fs/cgroup/memory" if v1 else "/sys/fs/cgroup") / lines["memory" if v1 else ""].lstrip("/")
    folder = parent / f"draftsmith-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(100 * 2**20))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text(), "the cgroup to empty")
    folder.rmdir()


def test_a_memory_limit_that_is_exceeded(run: Run, cgroup: Path) -> None:
    begin = f"import os; open({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    spec = {
        "run": str(run.folder),
        "argv": [sys.executable, "-c", "x = [bytearray(1 << 24) for _ in range(50)]"],
        "beat_s": BEAT_S,
    }
    # The caller enters the cgroup, so that supervisor and trainer are born in it, as in a container.
    code = begin + f"from draftsmith.runs.transport import Host, ask; ask(Host(), ['start'], {spec!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    verdict = run.becomes("exited")
    assert verdict.cause == "out of memory: the kernel killed it at its memory limit (cgroup)"
    assert any("oom_kill counts rose" in line for line in verdict.evidence)


def test_the_supervisor_is_killed(run: Run) -> None:
    run.start(WAIT)
    run.prints("up")
    child = run.pid("child")
    os.kill(run.pid("shim"), signal.SIGKILL)
    verdict = run.becomes("supervisor killed", f"the trainer goes on without it (pid {child})")
    assert verdict.alive
    with pytest.raises(RunError, match=f"processes of an earlier attempt still live: {child}"):
        run.start(WAIT)
    assert stop(HERE, str(run.folder), wait_s=5, say=lambda _line: None).line() == "supervisor killed: and the trainer with it"
    assert not shim.is_same(run.seen["record"]["child"])


def test_the_supervisor_and_the_trainer_are_killed_and_a_deaf_helper_lives(run: Run) -> None:
    run.start(
        """
        import signal, subprocess, sys, time
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('helper up'); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        time.sleep(600)
        """,
        grace_s=1,
    )
    run.prints("helper up")
    below = shim.descendants(run.pid("shim"))
    for who in ("shim", "child"):
        os.kill(run.pid(who), signal.SIGKILL)
    assert run.becomes("supervisor killed", "the trainer goes on without it").alive
    assert not stop(HERE, str(run.folder), wait_s=10, say=lambda _line: None).alive
    assert not any(shim.is_same(process) for process in below.values())


def test_the_supervisor_is_stopped(run: Run) -> None:
    run.start(WAIT)
    run.prints("up")
    os.kill(run.pid("shim"), signal.SIGSTOP)
    assert run.becomes("supervisor stalled").evidence[0].endswith("in state T")
    os.kill(run.pid("shim"), signal.SIGCONT)
    until(lambda: run.verdict().name != "supervisor stalled", "the supervisor to beat again")


@pytest.mark.parametrize("replaced", [False, True])
def test_the_log_is_deleted_or_replaced(run: Run, replaced: bool) -> None:
    run.start("import time; print('up'); time.sleep(600)")
    run.prints("up")
    log = Path(run.seen["attempt"]) / "log"
    log.unlink()
    if replaced:
        log.with_name("other").write_text("other")
        log.with_name("other").rename(log)
    verdict = run.becomes("log missing", "replaced" if replaced else "deleted")
    assert verdict.alive
    os.kill(run.pid("child"), signal.SIGKILL)
    run.becomes("exited")
    assert run.seen["exit"]["tail"] == "up\n", "the supervisor still holds the log that was lost"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB of this test's own."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "draftsmith-test", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_the_disk_is_full(small_disk: Path) -> None:
    run = Run(small_disk / "run")
    with pytest.raises(RunError, match="MiB free in .*, expected 100; free some space"):
        run.start(WAIT)
    code = f"open({str(small_disk / 'fill')!r}, 'w').write('x' * (1 << 22))"
    run.start(code, disk_mb=0)
    assert run.becomes("exited", "disk full: ").code == 1, "though not even the traceback found room in the log"


@pytest.mark.parametrize("where", ["lock", "queue"])
def test_a_hang_shows_its_stacks(run: Run, where: str) -> None:
    hang = {"lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()", "queue": "queue.Queue().get()"}[where]
    run.start(
        f"""
        import queue, threading
        from draftsmith.runs.reporter import RunReporter
        def stuck_here():
            {hang}
        RunReporter.from_environment().phase("model", deadline_s=1)
        stuck_here()
        """
    )
    verdict = run.becomes("hung", "nothing moves in phase model")
    until(lambda: "stuck_here" in run.seen["stacks"], "stacks")
    assert any("stuck_here" in line for line in run.verdict().evidence)
    assert verdict.alive


def test_silent_but_computing(run: Run) -> None:
    run.start(
        """
        from draftsmith.runs.reporter import RunReporter
        RunReporter.from_environment().phase("model", deadline_s=1)
        while True:
            pass
        """
    )
    verdict = run.becomes("silent", "past its deadline in phase model, computing without a word")
    assert any("computing (" in line for line in verdict.evidence)
    seen = run.seen
    before = altered(altered(seen, "heartbeat.boot", seen["phase"]["deadline"] - 0.1), "heartbeat.idle", True)
    assert "deadline" not in judge(before).cause, "a beat from before the deadline says nothing about the time after it"


def test_a_slow_compile_within_its_deadline(run: Run) -> None:
    run.start(
        """
        from draftsmith.runs.reporter import RunReporter
        RunReporter.from_environment().phase("compiling", deadline_s=900)
        while True:
            pass
        """
    )
    assert "within its deadline" in run.becomes("compiling").cause


def test_a_second_launch_changes_nothing(run: Run) -> None:
    run.start(WAIT)
    run.prints("up")
    before = run.pid("child")
    with pytest.raises(RunError, match="already has a supervisor; stop it first"):
        run.start(WAIT)
    assert run.pid("child") == before
    assert run.verdict().alive


def altered(seen: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The probe with one value changed, at a path with dots."""
    head, _, rest = path.partition(".")
    return {**seen, head: altered(seen[head], rest, value) if rest else value}


def test_another_boot_another_container_and_a_stepped_clock(run: Run) -> None:
    run.start(WAIT)
    run.prints("up")
    until(lambda: run.seen["heartbeat"], "a heartbeat")
    seen = run.seen
    assert judge(altered(seen, "now.boot_id", "another")).name == "host rebooted"
    for name in ("pid_ns", "init_start"):
        assert judge(altered(seen, f"now.{name}", "another")).name == "container restarted"
    assert judge(altered(seen, "now.host", "renamed")) == judge(seen)
    for step in (-1e9, 1e9):
        assert judge(altered(seen, "now.wall", seen["now"]["wall"] + step)).line() == judge(seen).line()
    os.kill(run.pid("child"), signal.SIGKILL)
    run.becomes("exited")
    assert judge(altered(run.seen, "now.boot_id", "another")).name == "exited", "how a run ended outlives a reboot"


def test_report_27_a_recycled_pid_is_a_stranger_and_left_alone(run: Run) -> None:
    run.start("pass")
    run.becomes("exited")
    attempt = Path(run.seen["attempt"])
    (attempt / "exit.json").unlink()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        record = shim.read_json(str(attempt / "record.json"))
        for who in ("shim", "child"):
            record[who]["pid"] = stranger.pid
        shim.write_json(str(attempt / "record.json"), record)
        verdict = run.becomes("supervisor killed", "and the trainer with it")
        assert verdict.evidence[0] == f"pid {stranger.pid} belongs to a stranger now"
        assert not stop(HERE, str(run.folder), wait_s=1, say=lambda _line: None).alive
        run.start("pass")
        run.becomes("exited", "finished")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_corpse_is_not_alive(run: Run) -> None:
    run.start("pass")
    run.becomes("exited")
    attempt = Path(run.seen["attempt"])
    (attempt / "exit.json").unlink()
    corpse = subprocess.Popen(["true"])
    until(lambda: shim.stat_of(corpse.pid)["state"] == "Z", "a zombie")
    record = shim.read_json(str(attempt / "record.json"))
    record["shim"] = record["child"] = shim.stat_of(corpse.pid)
    shim.write_json(str(attempt / "record.json"), record)
    verdict = run.verdict()
    assert (verdict.name, verdict.alive) == ("supervisor killed", False)
    assert "corpse nobody collected" in verdict.evidence[0]
    corpse.wait()


def test_a_host_that_does_not_answer() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    verdict = look(Host("far", ssh=f"ssh://127.0.0.1:{port}"), "/runs/x")
    assert verdict.name == "unreachable"
    assert "Connection refused" in verdict.evidence[0]


def test_report_33_what_was_printed_is_on_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    run.start("import time; print('only once'); time.sleep(600)")
    run.prints("only once")
    os.kill(run.pid("child"), signal.SIGKILL)
    run.becomes("exited", "killed from outside (SIGKILL)")
    assert run.seen["log"]["tail"] == "only once\n"


def test_started_and_silent_is_told_from_quiet(run: Run) -> None:
    run.start("import time; time.sleep(600)")
    assert "started and silent" in run.becomes("silent").cause
    # The first beat may still see the interpreter start.
    until(lambda: any("idle" in line for line in run.verdict().evidence), "evidence of idleness")
    spoken = altered(altered(run.seen, "heartbeat.log.written", 9), "heartbeat.log_grew", run.seen["now"]["boot"])
    assert judge(spoken).name == "running"
    assert judge(altered(spoken, "now.boot", spoken["now"]["boot"] + SILENT_AFTER_S + 1)).name != "running"


def test_a_start_that_prints_as_it_goes_is_not_called_silent(run: Run) -> None:
    run.start(
        """
        import time
        from draftsmith.runs.reporter import RunReporter
        RunReporter.from_environment().phase("preparing")
        print("up")
        time.sleep(600)
        """
    )
    verdict = run.becomes("running", "starting up, in phase preparing")
    assert verdict.alive
    later = run.seen["now"]["boot"] + SILENT_AFTER_S + 10
    seen = altered(altered(run.seen, "now.boot", later), "heartbeat.boot", later)
    assert judge(seen).line() == "silent: starting up, in phase preparing"


def test_report_23_a_launch_through_captured_pipes_returns_at_once(run: Run) -> None:
    words = [sys.executable, shim.__file__, "start"]
    spec = f'{{"run": "{run.folder}", "argv": ["sleep", "600"], "beat_s": {BEAT_S}}}'
    done = subprocess.run(words, input=spec, capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout.startswith(shim.SENTINEL)
    assert shim.is_same(run.seen["record"]["child"])


def test_report_25_a_wrapper_that_dies_of_the_signal_takes_nothing_with_it(run: Run, tmp_path: Path) -> None:
    """The inner process gets the signal too and has the grace to save."""
    inner = tmp_path / "inner.py"
    inner.write_text(
        f"""
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path({str(tmp_path / "saved")!r}).write_text('saved')
    sys.exit(0)
signal.signal(15, save)
print('inner up')
time.sleep(600)
"""
    )
    run.start_argv(["sh", "-c", f"setsid {sys.executable} {inner} & wait"])
    run.prints("inner up")
    verdict = stop(HERE, str(run.folder), wait_s=20, say=lambda _line: None)
    assert verdict.cause.startswith("stopped on request")
    assert (tmp_path / "saved").read_text() == "saved"
    assert run.seen["exit"]["left_behind"] == 1
    assert run.seen["exit"]["unkillable"] == []


def test_a_trainer_that_will_not_stop_is_killed_after_its_grace_with_all_its_children(run: Run) -> None:
    run.start(
        """
        import signal, subprocess, sys, time
        signal.signal(15, signal.SIG_IGN)
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('child up'); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        time.sleep(600)
        """,
        grace_s=1,
    )
    run.prints("child up")
    below = list(shim.descendants(run.pid("shim")).values())
    assert len(below) == 2
    verdict = stop(HERE, str(run.folder), wait_s=20, say=lambda _line: None)
    assert verdict.cause.startswith("killed: it did not end in its grace")
    assert not any(shim.is_same(process) for process in below)


def test_what_a_finished_trainer_leaves_behind_is_ended_even_if_deaf(run: Run) -> None:
    run.start(
        """
        import subprocess, sys
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('child up'); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-u", "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
        child.stdout.readline()
        print(child.pid)
        """
    )
    run.prints("\n")
    left = shim.stat_of(int(run.seen["log"]["tail"]))
    assert run.becomes("exited", "finished").evidence[1] == "1 processes were left behind and ended"
    assert run.seen["exit"]["unkillable"] == []
    assert not shim.is_same(left)


def test_report_31_a_stop_lets_the_trainer_save(run: Run, tmp_path: Path) -> None:
    run.start(
        f"""
        import pathlib, signal, sys, time
        def save(*_):
            pathlib.Path({str(tmp_path / "saved")!r}).write_text("saved")
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        print("up")
        time.sleep(600)
        """
    )
    run.prints("up")
    verdict = stop(HERE, str(run.folder), wait_s=20, say=lambda _line: None)
    assert verdict.cause == "stopped on request (exit code 143)"
    assert (tmp_path / "saved").exists()
    assert any(f"pid {os.getpid()}" in line for line in verdict.evidence), "who asked is on record"


def test_launch_returns_at_the_level_asked_for_or_says_why_not(run: Run) -> None:
    code = """
        import time
        from draftsmith.runs.reporter import RunReporter
        reporter = RunReporter.from_environment()
        for name in ("interpreter", "imports", "model"):
            reporter.phase(name)
            time.sleep(0.3)
        reporter.step(1, 9)
        time.sleep(600)
        """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    said: list[str] = []
    verdict = launch(HERE, str(run.folder), argv, until="step", wait_s=20, say=said.append, beat_s=BEAT_S)
    assert verdict.line() == "running: training 1/9"
    assert said[-1] == "phase training"
    stop(HERE, str(run.folder), wait_s=20, say=said.append)
    with pytest.raises(RunError, match=r"did not reach 'imports': exited: exit code 7 without a word\. .*the log is empty"):
        launch(
            HERE, str(run.folder), [sys.executable, "-c", "raise SystemExit(7)"], until="imports", wait_s=20, say=said.append
        )
    with pytest.raises(RunError, match="did not reach 'model' within 1 s and goes on: silent"):
        launch(
            HERE,
            str(run.folder),
            [sys.executable, "-c", "import time; time.sleep(60)"],
            until="model",
            wait_s=1,
            say=said.append,
        )


def test_secrets_reach_no_record(run: Run) -> None:
    secrets = {"HF_TOKEN": "hf_abcdefghijklmnop", "CUDA_PROXY": "http://user:hun/ter2@proxy", "NVIDIA_API_KEY": "plain3"}
    code = "import os, sys; print('token=' + os.environ['HF_TOKEN']); sys.exit(1)"
    words = [
        "--token",
        "plain1",
        "token=plain2",
        '{"secret": "plain4"}',
        "Authorization: Bearer plain5",
        "data.tokenizer=/t",
        "max_tokens=9",
    ]
    run.start_argv([sys.executable, "-c", code, *words], env=secrets)
    run.becomes("exited")
    shown = "".join(p.read_text() for p in Path(run.seen["attempt"]).glob("*.json")) + str(run.seen)
    for secret in ("abcdefghijklmnop", "ter2", "plain1", "plain2", "plain3", "plain4", "plain5"):
        assert secret not in shown
    for kept in ("http://***@proxy", "data.tokenizer=/t", "max_tokens=9"):
        assert kept in shown


def test_a_caller_that_is_gone_changes_nothing(run: Run) -> None:
    (run.folder / "attempts").mkdir(parents=True)
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, shim.__file__, "supervise", str(run.folder)]
    told = {"argv": ["sleep", "1"], "cwd": "/", "beat_s": BEAT_S, "seen": {}}
    subprocess.run(words, input=json.dumps(told).encode(), stdout=writer, check=True, timeout=30)
    os.close(writer)
    assert run.verdict().cause == "finished"


def test_a_caller_that_ignores_signals_passes_none_of_it_on(run: Run) -> None:
    def deaf() -> None:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    spec = {"run": str(run.folder), "argv": ["sleep", "600"], "beat_s": BEAT_S, "grace_s": 60}
    words = [sys.executable, shim.__file__, "start"]
    subprocess.run(words, input=json.dumps(spec).encode(), capture_output=True, preexec_fn=deaf, check=True)
    stop(HERE, str(run.folder), wait_s=10, say=lambda _line: None)
    assert run.seen["exit"]["signal"] == signal.SIGTERM, "the trainer did not inherit deafness, and its end was noticed"


def test_signals_reach_also_where_the_kernel_has_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = subprocess.Popen(["sleep", "60"])
    shim.send([{**shim.stat_of(process.pid), "start": 1}], signal.SIGKILL)
    assert process.poll() is None, "another process with this number is left alone"
    shim.send([shim.stat_of(process.pid)], signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


def test_a_run_whose_folder_is_removed_ends(run: Run) -> None:
    run.start(WAIT)
    run.prints("up")
    child = run.seen["record"]["child"]
    shutil.rmtree(run.folder)
    until(lambda: not shim.is_same(child), "the end of the trainer")


def test_a_step_reported_before_death_is_not_success(run: Run) -> None:
    code = (
        "from draftsmith.runs.reporter import RunReporter; RunReporter.from_environment().step(1, 9); raise ValueError('early')"
    )
    with pytest.raises(RunError, match=r"did not reach 'step': exited: exception \(exit code 1\): ValueError: early"):
        launch(HERE, str(run.folder), [sys.executable, "-c", code], until="step", wait_s=20, say=lambda _line: None)


def test_a_disk_that_fills_up_later_neither_hides_the_run_nor_keeps_it_from_stopping(small_disk: Path) -> None:
    run = Run(small_disk / "run")
    run.start(WAIT, disk_mb=0)
    run.prints("up")
    until(lambda: run.seen["heartbeat"], "a heartbeat")
    with suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    last = run.seen["heartbeat"]["boot"]
    until(lambda: run.seen["heartbeat"].get("boot", 0) > last + 7, "heartbeats on a full disk")
    verdict = run.verdict()
    assert (verdict.name, verdict.alive) == ("running", True)
    assert any("the disk is full" in line for line in verdict.evidence)
    assert stop(HERE, str(run.folder), wait_s=10, say=lambda _line: None).name == "exited"


def test_what_the_trainer_says_cannot_kill_its_supervisor(run: Run) -> None:
    run.start(
        """
        import os, time
        open(os.environ["DRAFTSMITH_ATTEMPT"] + "/phase.json", "w").write('{"deadline": null, "name": 7, "pid": "x"}')
        print("up")
        time.sleep(600)
        """
    )
    run.prints("up")
    last = until(lambda: run.seen["heartbeat"], "a heartbeat")["boot"]
    until(lambda: run.seen["heartbeat"]["boot"] > last + 1, "later heartbeats")
    assert run.verdict().alive


def test_the_stacks_of_a_trainer_in_a_wrapper(run: Run, tmp_path: Path) -> None:
    code = "from draftsmith.runs.reporter import RunReporter; RunReporter.from_environment().phase('model', deadline_s=1); input_never = __import__('threading').Event(); input_never.wait()"
    (tmp_path / "t.py").write_text(code)
    run.start_argv(["sh", "-c", f"{sys.executable} {tmp_path}/t.py; true"])
    run.becomes("hung", "nothing moves in phase model")
    until(lambda: "threading.py" in run.seen["stacks"], "stacks")
    assert run.verdict().alive, "the wrapper did not get the signal"


def test_damaged_and_missing_records(run: Run) -> None:
    run.start("pass")
    run.becomes("exited")
    attempt = Path(run.seen["attempt"])
    (attempt / "exit.json").write_text('{"code": 0}')
    assert run.verdict().name == "record damaged"
    assert "exit.json" not in run.verdict().advice
    (attempt / "exit.json").write_text("{")
    assert run.becomes("supervisor killed").alive is False
    (attempt / "record.json").unlink()
    assert judge(altered(run.seen, "age", 1.0)).cause == "the supervisor is just starting"
    assert judge(altered(run.seen, "age", 60.0)).cause == "the supervisor died before it could write a record"


def test_the_shim_needs_the_standard_library_alone_and_old_python_can_read_it() -> None:
    source = Path(shim.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} | {
        alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
    }
    assert {str(name).partition(".")[0] for name in names} <= set(sys.stdlib_module_names)
    assert errno.ENOSPC == 28

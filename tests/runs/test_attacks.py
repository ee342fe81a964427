"""What hostile eyes found in the supervisor and around it; each was a fault once."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import RunError
from draftsmith.runs import doctor, shim, transport
from draftsmith.runs.dashboard import make_app
from draftsmith.runs.launch import find_runs, log_chunks, look, look_closely, stop
from draftsmith.runs.transport import Host, ask
from draftsmith.runs.verdict import judge
from tests.conftest import end_all, until

HERE = Host()
pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    end_all(tmp_path / "run")


def start(run: Path, code: str, **spec: Any) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    ask(HERE, ["start"], {"run": str(run), "argv": argv, "beat_s": 0.2, "grace_s": 5, **spec})


def seen(run: Path) -> dict[str, Any]:
    return look_closely(HERE, str(run))[1]


def up(run: Path) -> dict[str, Any]:
    until(lambda: "up" in seen(run)["log"]["tail"] and seen(run)["heartbeat"], "the trainer")
    return seen(run)


def quiet_stop(run: Path) -> None:
    stop(HERE, str(run), wait_s=10, say=lambda _line: None)


WAIT = "import time; print('up'); time.sleep(600)"

# --- redaction


@pytest.mark.parametrize(
    "word", ["token", "-", "a", "--token", "://", "a:b@", "password ", "'", 'secret="', "Bearer ", "_", "\0"]
)
def test_nothing_that_is_printed_keeps_the_supervisor_busy(word: str) -> None:
    code = "import sys; from draftsmith.runs.shim import redact; redact(sys.stdin.read())"
    # Far more than it takes, far less than the minutes that it took once.
    text = word * (16384 // len(word) or 1)
    subprocess.run([sys.executable, "-c", code], input=text, text=True, check=True, timeout=20)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("authorization: bearer abcdefgh", "abcdefgh"),
        ("Bearer abc/def+ghi==", "ghi"),
        ("postgres://user:p@ss@host/db", "ss@"),
        ("http://user:hun/ter2@proxy", "ter2"),
        ("https://sometoken@github.com/x", "sometoken"),
        ("github_pat_11ABCDEFG", "11ABCDEFG"),
        ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7EXAMPLE"),
        ("{'token': 'abc def'}", "def"),
        ('password="correct horse"', "horse"),
        ("DB_PASS=hunter2", "hunter2"),
        ("MY_API_KEY: k3y", "k3y"),
        ("--hf-token\0s3cret", "s3cret"),
    ],
)
def test_credentials_are_not_shown(text: str, secret: str) -> None:
    assert secret not in shim.redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "HF_HOME=/x/hf_home",
        "data.tokenizer=/t",
        "max_tokens=9",
        "tokens: 12",
        "git+https://github.com/org/repo@main",
        "step 3: loss 1.2",
        "--tokenizer\0/t",
    ],
)
def test_what_is_no_credential_is_shown(text: str) -> None:
    assert shim.redact(text) == text


def test_a_credential_across_the_cut_of_the_tail_is_not_shown(run: Path) -> None:
    secret = "verysecretvalue123"
    start(run, f"print('HF_TOKEN={secret}' + ' ' + 'x' * ({shim.TAIL_BYTES} - 12)); raise SystemExit(1)")
    until(lambda: seen(run)["exit"], "the end")
    shown = json.dumps(seen(run)) + "".join(path.read_text() for path in (run / "attempts/0001").glob("*.json"))
    assert "secretvalue" not in shown


# --- who is ours


def test_a_trainer_that_hides_its_environment_is_still_seen(run: Path) -> None:
    start(
        run,
        """
        import ctypes, time
        fields = open("/proc/self/stat").read().rpartition(") ")[2].split()
        ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
        print("up")
        time.sleep(600)
        """,
    )
    record = up(run)["record"]
    assert shim.ATTEMPT not in shim.read_text(f"/proc/{record['child']['pid']}/environ")
    os.kill(record["shim"]["pid"], signal.SIGKILL)
    verdict = until(lambda: (found := look(HERE, str(run))).name == "supervisor killed" and found, "the verdict")
    assert verdict.alive
    with pytest.raises(RunError, match="processes of an earlier attempt still live"):
        start(run, WAIT)
    quiet_stop(run)
    assert not shim.is_same(record["child"])


def test_a_stranger_that_speaks_of_a_run_is_left_alone(run: Path) -> None:
    start(run, WAIT)
    record = up(run)["record"]
    mark = f"{shim.ATTEMPT}={seen(run)['attempt']}"
    spoken = [{"NOTE": f"see {mark} for details"}, {"OLD_" + mark.partition("=")[0]: mark.partition("=")[2]}]
    strangers = [subprocess.Popen(["sleep", "600"], env={**os.environ, **more}) for more in spoken]
    try:
        os.kill(record["shim"]["pid"], signal.SIGKILL)
        until(lambda: not shim.is_same(record["shim"]), "the supervisor's end")
        assert [process["pid"] for process in seen(run)["left"]] == [record["child"]["pid"]]
        ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")
        assert all(stranger.poll() is None for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_a_run_inside_a_run_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shim.ATTEMPT, "/some/run/attempts/0001")
    with pytest.raises(RunError, match="a run launched from inside another would end with it"):
        start(run, WAIT)


# --- clean


def test_clean_leaves_what_belongs_to_others(run: Path, tmp_path: Path) -> None:
    start(run, "pass")
    until(lambda: seen(run)["exit"], "the end")
    elsewhere = tmp_path / "elsewhere"
    paths = [
        elsewhere / ".checkpoint-1.partial",
        run / "inner" / ".checkpoint-2.partial",
        run / "held" / ".checkpoint-3.partial",
    ]
    for path in paths:
        path.mkdir(parents=True)
    (run / "link").symlink_to(elsewhere)
    (run / "inner" / "attempts").mkdir()
    holder = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", holder, str(run / "held" / "run.lock")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")["files"] == []
        assert all(path.is_dir() for path in paths)
        (run / "run.lock").hardlink_to(run / "held" / "run.lock")
        with pytest.raises(RunError, match="a trainer works in .* without a supervisor; stop it first"):
            ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")
    finally:
        process.kill()
        process.wait()


def test_clean_refuses_a_run_of_another_host(run: Path) -> None:
    start(run, "pass")
    until(lambda: seen(run)["exit"], "the end")
    path = run / "attempts/0001/record.json"
    record = json.loads(path.read_text())
    record["place"] |= {"host": "other", "boot_id": "another"}
    path.write_text(json.dumps(record))
    with pytest.raises(RunError, match="was started on other; ask there"):
        ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")


# --- odd records

ODD = {
    "nested": "[" * 100_000,
    "stop_s": '{"name": "training", "boot": 1.0, "deadline": 9e9, "stop_s": "abc"}',
    "left_s": '{"name": "training", "boot": 1.0, "deadline": 9e9, "step": 3, "left_s": NaN}',
    "name": '{"name": "\\ud800", "boot": 1.0, "deadline": 9e9}',
    "pid": '{"name": "model", "boot": 1.0, "deadline": 1.0, "stacks_signal": 10, "pid": []}',
    "types": '{"name": [1], "boot": "x", "deadline": {}, "step": "3", "pid": [], "loss": "high", "stop_s": NaN}',
    "huge": '{"name": "training", "boot": 1e400, "deadline": 9e9, "step": 3, "steps": 0, "tokens_per_s": Infinity, "left_s": 1e308}',
}


@pytest.mark.parametrize("case", list(ODD))
def test_what_a_trainer_says_takes_nothing_down(run: Path, case: str) -> None:
    start(run, WAIT)
    record = up(run)["record"]
    (run / "attempts/0001/phase.json").write_text(ODD[case])
    beat = seen(run)["heartbeat"]["boot"]
    until(lambda: seen(run)["heartbeat"]["boot"] > beat + 0.5, "later heartbeats")
    assert shim.is_same(record["shim"])
    for words in (["status", str(run)], ["why", str(run)], ["list", str(run.parent)]):
        done = subprocess.run([sys.executable, "-m", "draftsmith", *words], capture_output=True, text=True, timeout=60)
        assert "not foreseen" not in done.stderr + done.stdout, words
        assert done.stdout
    page = make_app(run.parent).test_client()
    assert page.get("/").status_code == 200
    assert page.get("/run/run").status_code == 200
    quiet_stop(run)
    assert not shim.is_same(record["child"])


def test_a_pipe_in_a_records_place_keeps_nobody_waiting(run: Path) -> None:
    start(run, WAIT)
    up(run)
    phase = run / "attempts/0001/phase.json"
    phase.unlink(missing_ok=True)
    os.mkfifo(phase)
    beat = seen(run)["heartbeat"]["boot"]
    until(lambda: seen(run)["heartbeat"]["boot"] > beat + 0.5, "later heartbeats")


def test_odd_metrics_names_and_exit_records_break_no_page(run: Path) -> None:
    start(run, "pass")
    until(lambda: seen(run)["exit"], "the end")
    rows = [
        '{"step": NaN, "loss": 1}',
        '{"step": 1, "loss": 1e308}',
        '{"step": 2, "loss": -1e308}',
        '{"step": 3, "loss": %s}' % ("9" * 400),
    ]
    (run / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 4, "loss": 2.5}', '{"step": 1e20, "loss": 2}']) + "\n")
    odd = Path(os.fsdecode(os.fsencode(run.parent) + b"/\xff\xfe run"))
    run.rename(odd)
    end = odd / "attempts/0001/exit.json"
    for seconds in ("3", None, [], float("nan")):
        end.write_text(json.dumps({**json.loads(end.read_text()), "seconds": seconds}))
        assert make_app(odd.parent).test_client().get("/").status_code == 200
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", "list", str(odd.parent)], capture_output=True, timeout=60, check=True
        )
        assert b"run: " in done.stdout


# --- the supervisor itself


def test_a_supervisor_that_waits_for_a_save_goes_on_beating(run: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(9), sys.exit(0)))\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    argv = ["sh", "-c", f"setsid {sys.executable} {inner} & wait"]
    ask(HERE, ["start"], {"run": str(run), "argv": argv, "beat_s": 0.2, "grace_s": 30})
    up(run)
    ask(HERE, ["stop", str(run)])
    names = set()
    until(lambda: names.add(look(HERE, str(run)).name) or "exited" in names, "the end", seconds=30)
    assert "supervisor stalled" not in names


def test_a_supervisor_that_dies_says_why(run: Path) -> None:
    start(run, WAIT)
    record = up(run)["record"]
    resource.prlimit(record["shim"]["pid"], resource.RLIMIT_NOFILE, (4, 4))
    verdict = until(lambda: (found := look(HERE, str(run))).name == "supervisor killed" and found, "its end")
    assert any("Too many open files" in line for line in verdict.evidence)
    assert verdict.alive, "the trainer goes on"


def test_a_copy_of_an_attempt_is_no_attempt(run: Path) -> None:
    start(run, "pass")
    until(lambda: seen(run)["exit"], "the end")
    (run / "attempts" / "0001.bak").mkdir()
    (run / "attempts" / "99").mkdir()
    assert look(HERE, str(run)).cause == "finished"
    start(run, "pass")
    assert Path(seen(run)["attempt"]).name == "0002"


def test_work_in_short_lived_children_is_no_hang(run: Path) -> None:
    """Their ticks go with them, so that the sum falls."""
    start(
        run,
        """
        import subprocess, sys
        from draftsmith.runs.reporter import RunReporter
        RunReporter.from_environment().phase("model", deadline_s=0.1)
        print("up")
        while True:
            subprocess.run([sys.executable, "-c", "for _ in range(10**7): pass"])
        """,
    )
    until(lambda: look(HERE, str(run)).name == "silent", "the first child")
    names = set()
    beat = seen(run)["heartbeat"]["boot"]
    until(lambda: names.add(look(HERE, str(run)).name) or seen(run)["heartbeat"]["boot"] > beat + 5, "five seconds of beats")
    assert names == {"silent"}


def test_a_kill_for_memory_elsewhere_on_the_machine_is_not_ours(run: Path) -> None:
    start(run, WAIT)
    os.kill(up(run)["record"]["child"]["pid"], signal.SIGKILL)
    until(lambda: seen(run)["exit"], "the end")
    found = seen(run)
    for kills, cause in (
        ({"cgroup": 0, "machine": 1}, "killed from outside (SIGKILL)"),
        ({"cgroup": 1, "machine": 1}, "out of memory"),
        ({"machine": 1}, "probably out of memory"),
    ):
        assert judge({**found, "exit": {**found["exit"], "memory_kills": kills}}).cause.startswith(cause)


# --- who asks, and from where


def test_what_may_not_be_seen_says_nothing(run: Path) -> None:
    start(run, WAIT)
    found = up(run)
    hidden = {**found, "now": {**found["now"], "init_start": None}}
    assert judge(hidden) == judge(found)
    closed = judge({"run": "/r", "exists": True, "readable": False, "attempt": None, "now": found["now"]})
    assert (closed.name, closed.cause) == ("unreachable", "the run's folder is closed to this user")


def test_the_doctor_knows_that_a_run_may_be_another_containers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {**os.environ, shim.ATTEMPT: str(tmp_path / "not-here/attempts/0001")}
    process = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        found = [row for row in doctor.leftovers() if str(tmp_path) in row["told"]]
        assert [row["level"] for row in found] == ["good"]
        assert "cannot be seen from here: another container's or user's" in found[0]["told"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("place", ["with space", "with%b", "x" * 60])
def test_a_connection_is_shared_only_where_ssh_can(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.tempfile, "gettempdir", lambda: f"/tmp/{place}")
    assert transport._shared_connection() == []


def test_a_host_whose_disk_is_full_here_can_still_be_asked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(transport.tempfile, "gettempdir", none)
    assert transport._shared_connection() == []
    assert look(Host("w", wrapper=("env",), python=sys.executable), str(run)).name == "never launched"


def test_a_tilde_is_the_hosts_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    host = Host("w", wrapper=("env",), python=sys.executable)
    ask(host, ["start"], {"run": "~/work/run", "cwd": "~/work", "argv": ["pwd"], "beat_s": 0.2})
    until(lambda: look(host, "~/work/run").name == "exited", "the end")
    assert (tmp_path / "work/run/attempts/0001/log").read_text().strip() == str(tmp_path / "work")


def test_a_run_whose_first_attempt_was_removed_is_listed(run: Path) -> None:
    (run / "attempts" / "0007").mkdir(parents=True)
    assert find_runs(run.parent) == [run]


def test_a_log_that_is_cut_is_followed_from_its_start(run: Path) -> None:
    start(
        run,
        """
        import os, sys, time
        print("before" * 20)
        while not os.path.exists(os.environ["DRAFTSMITH_ATTEMPT"] + "/go"):
            time.sleep(0.05)
        os.ftruncate(1, 0)
        print("after")
        """,
    )
    pieces, read = log_chunks(HERE, str(run), follow=True, poll_s=0.05), b""
    while b"before" not in read:
        read += next(pieces)
    (run / "attempts/0001/go").touch()
    assert b"after" in read + b"".join(pieces)

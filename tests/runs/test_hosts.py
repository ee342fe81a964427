"""A host is examined, cleaned and brought code, and nothing that is not ours is touched."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import RunError, UsageError
from draftsmith.runs import clean, deploy, doctor, shim
from draftsmith.runs.launch import look, look_closely, stop
from draftsmith.runs.sync import sync
from draftsmith.runs.transport import Host, ask
from tests.conftest import end_all, until

HERE = Host()
pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    end_all(tmp_path / "run")


def start(run: Path, code: str, **spec: Any) -> None:
    ask(HERE, ["start"], {"run": str(run), "argv": [sys.executable, "-c", code], "beat_s": 0.2, "grace_s": 5, **spec})


def rows_of(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in found if row["name"] == name]


# --- doctor


def test_the_doctor_knows_this_host(tmp_path: Path) -> None:
    found = ask(HERE, [], {"folder": str(tmp_path / "not" / "yet"), "wall": time.time()}, timeout=300, tool="doctor.py")["rows"]
    import torch

    assert rows_of(found, "torch")[0]["told"] == torch.__version__
    assert sys.executable in rows_of(found, "python")[0]["told"]
    free = shutil.disk_usage(tmp_path).free / 2**30
    assert abs(float(rows_of(found, "disk")[0]["told"].split()[0]) - free) < 1
    assert rows_of(found, "clock")[0]["level"] == "good"
    assert {row["level"] for row in found} <= {"good", "warn", "bad"}
    assert all(row["cure"] for row in found if row["level"] != "good"), "whatever is not good has a cure"


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no system Python")
def test_the_doctor_runs_alone_under_a_bare_python(tmp_path: Path) -> None:
    for tool in (doctor, shim):
        shutil.copy(tool.__file__, tmp_path)
    told = json.dumps({"folder": str(tmp_path), "wall": time.time() - 3600})
    words = [
        "/usr/bin/python3",
        "-I",
        "-c",
        "import runpy, sys; sys.path.insert(0, '.'); runpy.run_path('doctor.py', run_name='__main__')",
    ]
    done = subprocess.run(words, cwd=tmp_path, input=told, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.removeprefix(shim.SENTINEL))["rows"]
    assert rows_of(found, "draftsmith")[0]["level"] == "bad"
    assert (
        rows_of(found, "clock")[0]["told"].startswith("3600 s from the asker's")
        or "3601 s" in rows_of(found, "clock")[0]["told"]
    )
    assert rows_of(found, "clock")[0]["level"] == "warn"


def test_the_doctor_finds_a_trainer_without_a_supervisor_and_a_dead_lock(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lock = tmp_path / ".cache" / "torch_extensions" / "x" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    start(run, "import time; print('up'); time.sleep(600)")
    seen = look_closely(HERE, str(run))[1]
    assert any(f"{seen['attempt']} is alive" == row["told"] for row in doctor.leftovers())
    os.kill(seen["record"]["shim"]["pid"], signal.SIGKILL)
    until(lambda: not shim.is_same(seen["record"]["shim"]), "the supervisor's end")
    told = {row["name"]: row for row in doctor.leftovers() if str(tmp_path) in row["told"]}
    assert told["run"]["cure"] == f"draftsmith stop {run}"
    assert told["build lock"]["cure"] == f"remove {lock}"
    with lock.open():
        assert not [row for row in doctor.leftovers() if str(lock) in row["told"]], "somebody builds"


@pytest.mark.parametrize(("text", "level"), [("", "good"), ("KillUserProcesses=no", "good"), ("KillUserProcesses=yes", "bad")])
def test_the_doctor_reads_whether_logout_kills(monkeypatch: pytest.MonkeyPatch, text: str, level: str) -> None:
    monkeypatch.setattr(shim, "read_text", lambda path: f"[Login]\n#KillUserProcesses=yes\n{text}\n")
    monkeypatch.setattr(doctor, "said", lambda *words, **about: "")
    assert next(doctor.session())["level"] == level
    monkeypatch.setattr(doctor, "said", lambda *words, **about: "yes")
    assert next(doctor.session())["level"] == "good", "a user who lingers is left alone"


def test_a_host_that_is_not_fit_fails_with_words(tmp_path: Path) -> None:
    (tmp_path / ".config/draftsmith").mkdir(parents=True)
    (tmp_path / ".config/draftsmith/hosts.yaml").write_text("bare:\n  wrapper: [env]\n  python: /usr/bin/python3\n")
    command = [sys.executable, "-m", "draftsmith", "doctor", "bare"]
    done = subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "NO draftsmith    not installed in /usr/bin/python3" in done.stdout
    assert "error: bare is not fit yet: " in done.stderr


# --- clean


def leave_behind(run: Path) -> tuple[Path, Path]:
    """A half-written checkpoint and the start of a record, and beside them things that must stay."""
    partial = run / "train" / ".checkpoint-8.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(bytes(1000))
    begun = run / "attempts" / "0001" / "heartbeat.json.tmp"
    begun.write_text("{")
    for kept in (run / "train" / "checkpoint-4", run / "train" / "notes.partial", run / "my.tmp.txt"):
        kept.mkdir(parents=True)
        (kept / "model.safetensors").write_bytes(bytes(10))
    return partial, begun


def test_clean_shows_first_and_removes_only_what_is_half_written(run: Path) -> None:
    start(run, "pass")
    until(lambda: look(HERE, str(run)).name == "exited", "the end")
    partial, begun = leave_behind(run)
    (run / ".x.tmp").symlink_to(run / "train" / "checkpoint-4")
    before = set(run.rglob("*"))
    shown = ask(HERE, [], {"run": str(run), "remove": False}, tool="clean.py")
    assert {file["path"]: file["bytes"] for file in shown["files"]} == {str(partial): 1000, str(begun): 1}
    assert set(run.rglob("*")) == before, "shown, not touched"
    ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")
    assert before - set(run.rglob("*")) == {partial, partial / "model.safetensors", begun}


def test_clean_ends_what_an_attempt_left_and_leaves_strangers(run: Path, tmp_path: Path) -> None:
    start(run, "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)")
    until(lambda: "up" in look_closely(HERE, str(run))[1]["log"]["tail"], "the trainer")
    record = look_closely(HERE, str(run))[1]["record"]
    with pytest.raises(RunError, match="has a supervisor, so it is not dead; stop it first"):
        ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")
    os.kill(record["shim"]["pid"], signal.SIGKILL)
    until(lambda: not shim.is_same(record["shim"]), "the supervisor's end")
    # Another run whose path begins alike, and a process that only mentions the path.
    other = {**os.environ, shim.ATTEMPT: f"{run}-other/attempts/0001"}
    strangers = [subprocess.Popen(["sleep", "600"], env=other), subprocess.Popen(["sh", "-c", f"sleep 600; : {run}/attempts/"])]
    try:
        shown = ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")
        assert [process["pid"] for process in shown["processes"]] == [record["child"]["pid"]]
        assert not shim.is_same(record["child"])
        assert all(stranger.poll() is None for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_clean_touches_nothing_without_proof(run: Path) -> None:
    run.mkdir()
    (run / ".x.tmp").touch()
    with pytest.raises(RunError, match=r"no record in .* proves that anything there belongs to a run; nothing was touched"):
        ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")
    start(run, "pass")
    until(lambda: look(HERE, str(run)).name == "exited", "the end")
    path = Path(look_closely(HERE, str(run))[1]["attempt"]) / "record.json"
    record = json.loads(path.read_text())
    record["place"]["pid_ns"] = "pid:[1]"
    path.write_text(json.dumps(record))
    assert clean.clean(str(run), True) == {"ok": False, "error": f"{run} was started in another container; ask from inside it"}
    assert (run / ".x.tmp").exists()


def test_no_attempt_begins_while_its_run_is_being_cleaned(run: Path) -> None:
    start(run, "pass")
    until(lambda: look(HERE, str(run)).name == "exited", "the end")
    with (run / "attempts" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="already has a supervisor"):
            start(run, "pass")
        with pytest.raises(RunError, match="not dead"):
            ask(HERE, [], {"run": str(run), "remove": True}, tool="clean.py")


def test_the_commands_of_clean(run: Path) -> None:
    start(run, "pass")
    until(lambda: look(HERE, str(run)).name == "exited", "the end")
    partial, _ = leave_behind(run)

    def draftsmith(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", *words], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    assert f"{partial} (1,000 bytes)\n" in draftsmith("clean", str(run))
    assert partial.exists()
    assert draftsmith("clean", str(run), "--yes").endswith("ended and removed\n")
    assert draftsmith("clean", str(run)).endswith("nothing was left behind\n")


# --- sync


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code here"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.py").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Host("box", wrapper=("env",), python=sys.executable, folder=str(tmp_path / "code $(there)"))


def test_a_commit_is_brought_and_only_what_is_new_travels(code: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path(str(host.folder))
    first = sync(host, code)
    assert first == git(code, "rev-parse", "HEAD") == git(there, "rev-parse", "HEAD")
    (code / "a.py").write_text("2")
    with pytest.raises(RunError, match=r"a\.py: changed since the last commit, so no commit would say what runs there"):
        sync(host, code)
    git(code, "commit", "-qam", "second")
    sizes = []
    monkeypatch.setattr("draftsmith.runs.sync.ask", lambda *a, **k: sizes.append(len(a[2].get("bundle", ""))) or ask(*a, **k))
    second = sync(host, code)
    assert (there / "a.py").read_text() == "2"
    assert sync(host, code) == second
    assert [size > 0 for size in sizes] == [False, True, False], "asked, brought; asked again, there already"
    git(code, "checkout", "-q", first)
    assert sync(host, code) == first
    assert (there / "a.py").read_text() == "1"


def test_code_from_an_unrelated_repository_travels_whole(code: Path, host: Host, tmp_path: Path) -> None:
    sync(host, code)
    other = tmp_path / "other"
    shutil.copytree(code, other)
    (other / "a.py").write_text("3")
    git(other, "commit", "-qam", "elsewhere", "--amend")
    assert sync(host, other) == git(Path(str(host.folder)), "rev-parse", "HEAD")


def test_nothing_of_the_hosts_own_is_overwritten(code: Path, host: Host, run: Path) -> None:
    there = Path(str(host.folder))
    there.mkdir()
    (there / "theirs").touch()
    with pytest.raises(RunError, match="holds files and is no repository; give the host another folder"):
        sync(host, code)
    (there / "theirs").unlink()
    sync(host, code)
    (there / "a.py").write_text("changed there")
    git(code, "commit", "-q", "--allow-empty", "-m", "next")
    with pytest.raises(RunError, match=r"has changes that no commit holds: a\.py; commit or drop them there"):
        sync(host, code)
    git(there, "checkout", "-q", "a.py")
    start(run, "import time; time.sleep(600)", cwd=str(there))
    with pytest.raises(RunError, match=r"run/attempts/0001 runs from .*; stop it first"):
        sync(host, code)
    stop(HERE, str(run), wait_s=10, say=lambda _line: None)
    assert sync(host, code) == git(code, "rev-parse", "HEAD")
    (there / "new.py").write_text("theirs, in no commit")
    (code / "new.py").write_text("ours")
    git(code, "add", ".")
    git(code, "commit", "-qm", "collides")
    with pytest.raises(RunError, match=r"git checkout in .*new\.py"):
        sync(host, code)
    assert (there / "new.py").read_text() == "theirs, in no commit"


def test_sync_needs_a_place_and_a_repository(code: Path, host: Host, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="host 'local' has no folder to bring code to"):
        sync(HERE, code)
    (tmp_path / "none").mkdir()
    with pytest.raises(RunError, match="git status in .*not a git repository"):
        sync(host, tmp_path / "none")


def test_a_git_environment_does_not_mislead(code: Path, host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "nowhere"))
    assert len(sync(host, code)) == 40
    assert deploy.asked(str(host.folder), "rev-parse", "HEAD") == sync(host, code)

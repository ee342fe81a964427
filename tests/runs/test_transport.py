"""Paths and words survive every shell on the way; only the shim's own line is an answer."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.errors import RunError, UsageError
from draftsmith.runs import shim
from draftsmith.runs.hosts import find_host
from draftsmith.runs.launch import log_chunks, look, stop
from draftsmith.runs.transport import Host, Unreachable, ask

HOSTILE = "a b'c\"d$(touch pwned)`touch pwned`\n;&|<>*?~#\\ü–雪"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a folder of this test's own, and an `ssh` that hands its last argument to a shell, as sshd does."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor last; do :; done\necho "Welcome to the machine"\nexec sh -c "$last"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    return tmp_path


PYTHON = sys.executable
PLACES = {
    "wrapper": Host("w", wrapper=("env", "A=1"), python=PYTHON),
    "shell in a wrapper": Host("s", wrapper=("sh", "-c", "{}"), python=PYTHON),
    "ssh": Host("h", ssh="somewhere", python=PYTHON),
    "wrapper over ssh": Host("hw", ssh="somewhere", wrapper=("env", "A=b c"), python=PYTHON),
    "shell over ssh": Host("hs", ssh="somewhere", wrapper=("sh", "-c", "{}"), python=PYTHON),
}


@pytest.mark.process
@pytest.mark.parametrize("place", list(PLACES))
def test_hostile_paths_and_words_arrive_as_they_are(home: Path, place: str) -> None:
    host, run = PLACES[place], str(home / HOSTILE)
    code = "import sys, time; print(sys.argv[1:]); time.sleep(600)"
    ask(host, ["start"], {"run": run, "argv": [PYTHON, "-c", code, HOSTILE, ""], "beat_s": 0.2})
    try:
        printed = b""
        while not printed:
            printed = b"".join(log_chunks(host, run, follow=False))
        assert printed.decode() == f"{[HOSTILE, '']}\n"
        assert not list(home.rglob("pwned"))
    finally:
        assert stop(host, run, wait_s=10, say=lambda _line: None).cause.startswith("stopped on request")
    assert next(home.glob(".cache/draftsmith/tools-*/shim.py")).read_text() == Path(shim.__file__).read_text()


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        (("true",), "ended with 0"),
        (("sh", "-c", "echo lost connection >&2; exit 3", "sh"), "ended with 3: lost connection"),
        (("sh", "-c", 'exec "$@" < /dev/null', "sh"), "standard input did not arrive whole: a wrapper must pass it on"),
        (("no-such-wrapper",), "'no-such-wrapper' is not a command on this machine"),
        (("sh", "-c", "echo draftsmith: ok; echo '{\"ok\": true}'", "sh"), "no answer from the shim"),
    ],
)
def test_silence_noise_and_exit_codes_prove_nothing(home: Path, wrapper: tuple[str, ...], words: str) -> None:
    host = Host("box", wrapper=wrapper, python=PYTHON)
    with pytest.raises(Unreachable, match=words):
        ask(host, ["probe", "/runs/x"])
    verdict = look(host, "/runs/x")
    assert verdict.name == "unreachable"
    assert "may be fine" in verdict.advice


def test_an_answer_that_comes_too_late(home: Path) -> None:
    with pytest.raises(Unreachable, match="no answer within 1 s"):
        ask(Host("box", wrapper=("sh", "-c", "exec sleep 60", "sh")), ["probe", "x"], timeout=1)


def test_the_shims_refusals_name_the_host(home: Path) -> None:
    with pytest.raises(RunError, match="box: KeyError: 'argv'"):
        ask(Host("box", wrapper=("env",), python=PYTHON), ["start"], {"run": str(home / "r")})


def test_hosts_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    with pytest.raises(UsageError, match=r"host 'gpu' is not known: there is no .*hosts\.yaml; write one"):
        find_host("gpu", file)
    file.write_text(
        "gpu:\n  ssh: me@gpu\n  wrapper: [docker, exec, -i, box]\n  python: /venv/bin/python\nbad:\n  shh: x\nopt:\n  ssh: -oProxyCommand=x\n"
    )
    assert find_host("gpu", file) == Host("gpu", "me@gpu", ("docker", "exec", "-i", "box"), "/venv/bin/python")
    assert find_host("local", file) == Host()
    with pytest.raises(UsageError, match="host 'gqu' is not in .*, which knows: bad, gpu, opt"):
        find_host("gqu", file)
    with pytest.raises(UsageError, match=r"bad\.shh: Extra inputs"):
        find_host("bad", file)
    with pytest.raises(UsageError, match="would take for an option"):
        find_host("opt", file)
    file.write_text("[")
    with pytest.raises(UsageError, match="cannot be read as YAML"):
        find_host("gpu", file)


def test_the_command_for_ssh_asks_nothing_and_notices_a_dead_connection() -> None:
    argv = Host("h", ssh="gpu").argv(["python3", "-c", "print(1)"])
    assert argv[0] == "ssh"
    assert argv[-2:] == ["gpu", "python3 -c 'print(1)'"]
    for option in ("BatchMode=yes", "ServerAliveInterval=5", "ConnectTimeout=15"):
        assert option in argv


@pytest.mark.process
def test_the_command_line_of_runs(home: Path) -> None:
    def draftsmith(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PYTHON, "-m", "draftsmith", *words], capture_output=True, text=True, timeout=60)

    assert draftsmith("status", "runs/x").stdout == "runs/x: never launched: nothing was ever started here\n"
    assert draftsmith("launch", "--run", "runs/x").returncode == 2
    failed = draftsmith("launch", "--run", "runs/x", "--", "train", "--config", "none.yaml")
    assert failed.returncode == 1
    assert "did not reach 'step': exited: usage error (exit code 2): " in failed.stderr
    assert "none.yaml" in failed.stderr
    told = draftsmith("why", "runs/x")
    assert told.returncode == 1
    assert "last phase: interpreter" in told.stdout
    assert "next: see the log" in told.stdout
    assert "none.yaml" in draftsmith("logs", "runs/x").stdout
    assert draftsmith("list").stdout.startswith("runs/x: exited: usage error")
    assert draftsmith("stop", "runs/x").stdout.startswith("runs/x: exited")
    assert "did not reach" in draftsmith("resume", "runs/x").stderr
    assert len(list((home / "runs/x/attempts").glob("0*"))) == 2

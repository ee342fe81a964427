"""Who sent a signal straight to the trainer is on record, and the signal still does what it would have done."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from draftsmith.runs.launch import look_closely
from draftsmith.runs.transport import Host, ask
from draftsmith.runs.verdict import Verdict
from tests.conftest import until

HERE = Host()
pytestmark = pytest.mark.process
BEGIN = """
import os, queue, signal, subprocess, sys, threading, time
from draftsmith.pipeline.signals import record_senders, stop_on_signals, StopRequest
from draftsmith.runs.reporter import RunReporter
reporter = RunReporter.from_environment()
reporter.phase("model")
record_senders(reporter.signalled)
"""


def start(run: Path, code: str) -> dict[str, Any]:
    argv = [sys.executable, "-c", BEGIN + textwrap.dedent(code)]
    ask(HERE, ["start"], {"run": str(run), "argv": argv, "beat_s": 0.2, "grace_s": 5})
    until(lambda: "up" in look_closely(HERE, str(run))[1]["log"]["tail"], "the trainer")
    return look_closely(HERE, str(run))[1]["record"]["child"]


def end_of(run: Path) -> Verdict:
    return until(lambda: (verdict := look_closely(HERE, str(run))[0]).name == "exited" and verdict, "the end")


# What a process did before it was watched, and how that shows.
WAYS = {
    "default": ("print('up'); time.sleep(600)", "killed from outside (SIGTERM), sent by "),
    "handler while sleeping": (
        "signal.signal(15, lambda *_: sys.exit(143)); print('up'); time.sleep(600)",
        "stopped by SIGTERM from outside, sent by ",
    ),
    "handler while waiting for a lock": (
        "signal.signal(15, lambda *_: sys.exit(143)); print('up'); threading.Lock().acquire() and queue.SimpleQueue().get()",
        "stopped by SIGTERM from outside, sent by ",
    ),
    "with the resource tracker of multiprocessing": (
        "from multiprocessing import resource_tracker; resource_tracker.ensure_running(); print('up'); time.sleep(600)",
        "killed from outside (SIGTERM), sent by ",
    ),
    "with other threads": (
        "signal.signal(15, lambda *_: os._exit(143)); [threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(4)]\n"
        "print('up'); threading.Event().wait()",
        "stopped by SIGTERM from outside, sent by ",
    ),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_the_sender_is_named_and_the_signal_acts(tmp_path: Path, way: str) -> None:
    code, cause = WAYS[way]
    child = start(tmp_path / "run", code)
    # A process of its own that stays, so that its name can be read.
    sender = subprocess.Popen([sys.executable, "-c", f"import os, time; os.kill({child['pid']}, 15); time.sleep(600)"])
    try:
        verdict = end_of(tmp_path / "run")
        name = Path(f"/proc/{sender.pid}/comm").read_text().strip()
        assert verdict.cause.startswith(cause + f"{name} (pid {sender.pid}, user {os.getuid()})")
    finally:
        sender.kill()
        sender.wait()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root to become another user")
def test_sigterm_by_another_users_process() -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    child = start(
        folder / "run", "os.chmod(os.environ['DRAFTSMITH_ATTEMPT'], 0o777); os.setuid(65534); print('up'); time.sleep(600)"
    )
    words = ["setpriv", "--reuid", "65534", "--clear-groups", "sh", "-c", f"kill -TERM {child['pid']}; sleep 600"]
    sender = subprocess.Popen(words)
    try:
        assert f"(pid {sender.pid}, user 65534)" in end_of(folder / "run").cause
    finally:
        sender.kill()
        sender.wait()
        shutil.rmtree(folder)


def test_a_second_signal_acts_as_if_nobody_watched(tmp_path: Path) -> None:
    code = """
        with stop_on_signals(StopRequest(wake=lambda: print("asked"))):
            print("up")
            while True:
                time.sleep(600)
        """
    child = start(tmp_path / "run", code)
    os.kill(child["pid"], signal.SIGTERM)
    until(lambda: "asked" in look_closely(HERE, str(tmp_path / "run"))[1]["log"]["tail"], "the request")
    os.kill(child["pid"], signal.SIGTERM)
    assert end_of(tmp_path / "run").cause.startswith("killed from outside (SIGTERM), sent by ")


def test_forked_children_are_not_deaf(tmp_path: Path) -> None:
    code = """
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        os.kill(pid, 15)
        print("up", os.waitpid(pid, 0)[1])
        """
    start(tmp_path / "run", code)
    assert "up 15" in look_closely(HERE, str(tmp_path / "run"))[1]["log"]["tail"]

"""A real training run below its supervisor, through the command line, as a user has it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from draftsmith.runs.launch import look_closely
from draftsmith.runs.transport import Host
from tests.conftest import end_all, small_tree, until

HERE = Host()
pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    end_all(tmp_path / "run")


def draftsmith(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "draftsmith", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def newest(run: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*"))


def test_report_31_a_stop_saves_and_a_signal_from_elsewhere_is_named(
    run: Path, target_folder: Path, chats: Path, tmp_path: Path
) -> None:
    tree = small_tree(target_folder, chats, run)
    tree["train"] |= {"max_steps": 5000, "epochs": 10**6}
    tree["checkpoint"] = {"every": 10**6}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))

    said = draftsmith("launch", "--run", str(run), "--", "train", "--config", str(config))
    assert "phase imports" in said
    assert "phase training" in said
    until(lambda: (look_closely(HERE, str(run))[1]["phase"].get("step") or 0) > 3, "a few steps")
    status = draftsmith("status", str(run))
    for name in (
        "phase     training",
        "step      ",
        " of 5000",
        "loss      ",
        "tau       ",
        "tokens/s  ",
        "time left ",
        "heartbeat ",
        "log       ",
    ):
        assert name in status
    assert json.loads(draftsmith("status", "--json", str(run)))["name"] == "running"
    assert "exited: stopped on request (exit code 143)" in draftsmith("stop", str(run))
    step = newest(run)
    assert step > 3, "saved where it stood, though no checkpoint was due"

    said = draftsmith("resume", str(run))
    assert "phase training" in said
    child = look_closely(HERE, str(run))[1]["record"]["child"]["pid"]
    os.kill(child, signal.SIGTERM)
    verdict = until(lambda: (found := look_closely(HERE, str(run))[0]).name == "exited" and found, "the end")
    me = Path("/proc/self/comm").read_text().strip()
    assert verdict.cause == f"stopped by SIGTERM from outside, sent by {me} (pid {os.getpid()}, user {os.getuid()})"
    assert newest(run) > step
    assert f"resuming at step {step}" in (run / "attempts/0002/log").read_text()

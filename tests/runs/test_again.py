"""Starting again after failures: only while it comes further, never against a wish, and with the cause kept."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.runs import again
from draftsmith.runs.launch import look_closely, stop
from draftsmith.runs.transport import Host, ask
from draftsmith.runs.verdict import Verdict
from tests.conftest import end_all, until

HERE = Host()
TRAIN = ["python", "-m", "draftsmith", "train", "--config", "c.yaml"]


def test_only_training_resumes_and_only_if_not_told_how() -> None:
    resumed = [*TRAIN[:4], "--resume", "latest", *TRAIN[4:]]
    assert again.resuming(TRAIN) == resumed
    with_flag = [*TRAIN[:3], "--traceback", *TRAIN[3:]]
    assert again.resuming(with_flag) == [*resumed[:3], "--traceback", *resumed[3:]]
    for told in ([*TRAIN, "--resume", "checkpoint-4"], [*TRAIN, "--resume=latest"], ["python", "-m", "draftsmith", "demo"]):
        assert again.resuming(told) == told


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    end_all(tmp_path / "run")


def launch(run: Path, body: str, restarts: int = 3) -> None:
    """A trainer whose n-th start runs `body` with `n`; it counts its starts in a file."""
    trainer = run.parent / "trainer.py"
    trainer.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, signal, sys, time
            from draftsmith.runs.reporter import RunReporter
            starts = pathlib.Path({str(run.parent / "starts")!r})
            n = 1 + len(starts.read_text()) if starts.exists() else 1
            starts.write_text("x" * n)
            reporter = RunReporter.from_environment()
            """
        )
        + textwrap.dedent(body)
    )
    argv = [sys.executable, "-m", "draftsmith.runs.again", str(restarts), "--", sys.executable, str(trainer)]
    ask(HERE, ["start"], {"run": str(run), "argv": argv, "beat_s": 0.2, "grace_s": 5})


def ended(run: Path) -> tuple[Verdict, str]:
    verdict = until(lambda: (found := look_closely(HERE, str(run))[0]).name == "exited" and found, "the end")
    return verdict, (Path(look_closely(HERE, str(run))[1]["attempt"]) / "log").read_text()


def starts(run: Path) -> int:
    return len((run.parent / "starts").read_text())


@pytest.mark.process
def test_it_goes_on_while_each_start_comes_further(run: Path) -> None:
    launch(run, "reporter.step(n, 9)\nif n < 3: os._exit(1)")
    verdict, log = ended(run)
    assert verdict.cause == "finished"
    assert log.splitlines() == [
        "again: it ended with exit code 1 at step 1; restart 1 of 3",
        "again: it ended with exit code 1 at step 2; restart 2 of 3",
    ]


@pytest.mark.process
def test_it_stops_when_a_start_comes_no_further(run: Path) -> None:
    launch(run, "reporter.step(5, 9)\nraise ValueError('always here')")
    verdict, log = ended(run)
    assert verdict.cause == "exception (exit code 1): ValueError: always here"
    assert starts(run) == 2
    assert log.endswith("again: it ended with exit code 1 at step 5, no further than before; not started again\n")


@pytest.mark.process
def test_it_does_not_start_again_what_never_reached_a_step(run: Path) -> None:
    launch(run, "import nowhere_at_all")
    assert ended(run)[0].cause.startswith("import error")
    assert starts(run) == 1


@pytest.mark.process
def test_it_stops_after_its_restarts(run: Path) -> None:
    launch(run, "reporter.step(n, 9)\nos._exit(7)", restarts=2)
    verdict, log = ended(run)
    assert starts(run) == 3
    assert verdict.code == 7
    assert "that was the last of 2 restarts" in log


@pytest.mark.process
@pytest.mark.parametrize("code", [2, 130, 143])
def test_a_wrong_command_and_a_wish_to_end_are_final(run: Path, code: int) -> None:
    launch(run, f"reporter.step(n, 9)\nsys.exit({code})")
    assert ended(run)[0].code == code
    assert starts(run) == 1


@pytest.mark.process
def test_the_signal_that_killed_the_last_start_is_the_verdict(run: Path) -> None:
    launch(run, "reporter.step(3, 9)\nos.kill(os.getpid(), signal.SIGKILL if n == 1 else signal.SIGSEGV)")
    verdict, log = ended(run)
    assert verdict.cause == "crashed in native code (SIGSEGV)"
    assert "it ended with SIGKILL at step 3; restart 1 of 3" in log


@pytest.mark.process
def test_a_stop_saves_and_starts_nothing(run: Path) -> None:
    body = """
        def save(*_):
            pathlib.Path(starts.parent, "saved").touch()
            sys.exit(1)
        signal.signal(15, save)
        reporter.step(n, 9)
        print("up")
        time.sleep(600)
        """
    launch(run, body)
    until(lambda: "up" in look_closely(HERE, str(run))[1]["log"]["tail"], "the trainer")
    stop(HERE, str(run), wait_s=20, say=lambda _line: None)
    assert (run.parent / "saved").exists()
    assert starts(run) == 1


@pytest.mark.process
def test_the_command_line_wraps_and_resumes_alike(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftsmith"]
    launched = [
        *command,
        "launch",
        "--run",
        str(run),
        "--restart",
        "on-failure",
        "--max",
        "2",
        "--",
        "train",
        "--config",
        "none.yaml",
    ]
    done = subprocess.run(launched, capture_output=True, text=True, timeout=60)
    assert "usage error (exit code 2)" in done.stderr
    subprocess.run([*command, "resume", str(run)], capture_output=True, text=True, timeout=60)
    kept = [json.loads((run / "attempts" / name / "record.json").read_text())["argv"] for name in ("0001", "0002")]
    prefix = [sys.executable, "-m", "draftsmith.runs.again", "2", "--", *command]
    assert kept == [
        [*prefix, "train", "--config", "none.yaml"],
        [*prefix, "train", "--resume", "latest", "--config", "none.yaml"],
    ]


def test_a_request_between_two_starts_ends_it_and_one_during_a_start_reaches_the_child_once(tmp_path: Path) -> None:
    """In a process of its own, since it takes over the signals."""
    code = """
        import os, pathlib, signal, subprocess, sys
        from draftsmith.runs import again
        print(again.keep_going(["false"], 3, lambda: os.kill(os.getpid(), 15) or 1, print))
        heard = pathlib.Path(sys.argv[1])
        child = f"import signal, sys, time; signal.signal(15, lambda *_: (open({str(heard)!r}, 'a').write('x'), time.sleep(1), sys.exit(143)));" \
            f"import os; os.mknod({str(heard) + '-up'!r}); time.sleep(60)"
        class Slow(subprocess.Popen):
            def __init__(self, *words):
                super().__init__(*words)
                while not os.path.exists(str(heard) + "-up"):
                    pass
                os.kill(os.getpid(), 15)
        subprocess.Popen = Slow
        print(again.keep_going([sys.executable, "-c", child], 0, lambda: 1, print), heard.read_text())
        """
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "heard")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["1", "143 x"], "no restart was begun; the child heard it once"

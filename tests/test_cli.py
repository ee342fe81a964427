"""The command as a user runs it: exit codes, one-line errors, signals, and the whole way from training to decoding."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from draftsmith.cli import main
from tests.conftest import save_target, small_tree

pytestmark = pytest.mark.process


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draftsmith", *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )  # type: ignore[call-overload]


def here(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The command in this process: quicker, the same code path from `main` on."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


@pytest.fixture
def config(target_folder: Path, chats: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_tree(target_folder, chats, tmp_path / "run")))
    return path


@pytest.mark.parametrize("verb", ["demo", "train", "evaluate", "generate", "export"])
def test_every_help_shows_an_example(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, _ = here(capsys, verb, "--help")
    assert code == 0
    assert f"draftsmith {verb}" in out
    assert "Example" in out


def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert here(capsys, "train")[0] == 2
    assert here(capsys, "no-such-verb")[0] == 2
    assert here(capsys, "export", "a", "b", "--format", "gguf")[0] == 2


def test_dry_run_prints_the_plan_and_starts_nothing(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    code, out, _ = here(capsys, "train", "--config", config, "--dry-run", "train.max_steps=5")
    assert code == 0
    for word in ("devices", "buckets", "steps      5 of 2 packs", "memory", "MiB", "mask token 257", "padding"):
        assert word in out
    assert not (tmp_path / "run").exists()


def test_train_export_evaluate_generate(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path, target_folder: Path, chats: Path
) -> None:
    code, out, _ = here(capsys, "train", "--config", config)
    assert code == 0, out
    assert "step 8/8" in out
    assert "done: 8 steps" in out
    drafter = tmp_path / "drafter"
    assert here(capsys, "export", tmp_path / "run", drafter, "--dtype", "fp32")[0] == 0
    assert (
        here(
            capsys,
            "export",
            tmp_path / "run" / "checkpoint-4",
            tmp_path / "s",
            "--format",
            "speculators",
            "--target",
            target_folder,
        )[0]
        == 0
    )
    figures = tmp_path / "figures"
    code, out, _ = here(
        capsys,
        "evaluate",
        "--target",
        target_folder,
        "--drafter",
        drafter,
        "--prompts",
        chats,
        "--count",
        3,
        "--max-new-tokens",
        9,
        "--out",
        figures,
        "--run",
        tmp_path / "run",
    )
    assert code == 0
    assert json.loads(out) == json.loads((figures / "report.json").read_text())
    assert json.loads(out)["identical_prompts"] == 3
    assert (figures / "report.html").read_text().count("<svg") == 5
    code, out, err = here(capsys, "generate", "--target", target_folder, "--drafter", drafter, "--max-new-tokens", 6, "hi")
    assert code == 0
    assert out
    assert "target passes, tau" in err
    words = ["generate", "--target", target_folder, "--drafter", drafter, "--max-new-tokens", 40, "hi"]
    whole = here(capsys, *words)[1]
    drawn = [here(capsys, *words, "--temperature", 3, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert len({whole, drawn[1], drawn[2]}) == 3
    stop = whole[len(whole) // 2 :][:2]
    assert here(capsys, *words, "--stop", stop)[1] == whole[: whole.index(stop)] + "\n"
    _, both, told = here(capsys, *words, "and you?", "--stop", stop)
    assert both.startswith(f"> hi\n{whole[: whole.index(stop)]}\n\n> and you?\n")
    assert told.count("target passes, tau") == 2


BAD = {
    "missing config": (["train", "--config", "none.yaml"], 2, "'none.yaml' does not exist"),
    "unknown key": (["train", "--config", "{config}", "train.anchor=3"], 2, "did you mean 'train.anchors'"),
    "missing data": (["train", "--config", "{config}", "data.train=[none.jsonl]"], 2, "'none.jsonl'"),
    "missing target": (["train", "--config", "{config}", "target.model=./none"], 1, "'./none' does not exist"),
    "block larger than bucket": (
        ["train", "--config", "{config}", "draft.block_size=200"],
        2,
        "larger than the smallest of data.buckets",
    ),
    "nothing to learn": (["train", "--config", "{config}", "data.train=['{tmp}/empty.jsonl']"], 1, "has a supervised token"),
    "no such device": (["train", "--config", "{config}", "target.devices=['cuda:7']"], 2, "not on this machine"),
    "not a device": (["train", "--config", "{config}", "target.devices=[tpu9x]"], 2, "is not a device"),
    "missing checkpoint": (["train", "--config", "{config}", "--resume", "nowhere"], 1, "'nowhere' does not exist"),
    "missing drafter": (["generate", "--target", "{target}", "--drafter", "nowhere", "hi"], 1, "config.json is missing"),
    "another width": (["generate", "--target", "{wide}", "--drafter", "{drafter}", "hi"], 2, "width 32, 6 layers"),
    "top_p": (
        ["generate", "--target", "x", "--drafter", "y", "--temperature", "1", "--top-p", "2", "hi"],
        2,
        "top_p in (0, 1]",
    ),
    "nothing to export": (["export", "{tmp}", "{tmp}/out"], 2, "holds no checkpoint"),
    "run.dir is a file": (["train", "--config", "{config}", "run.dir={config}"], 2, "cannot be a run folder"),
    "odd date in yaml": (["train", "--config", "{config}", "train.seed=2024-13-45"], 2, "the value is not YAML"),
    "endless epochs": (["train", "--config", "{config}", "train.epochs=.inf"], 2, "finite"),
    "odd heads": (["train", "--config", "{config}", "draft.head_dim=7"], 2, "multiple of 2"),
    "device of another kind": (
        ["train", "--config", "{config}", "train.devices=[meta]", "train.packs_per_step=1"],
        2,
        "not supported",
    ),
    "speculators of another width": (
        ["export", "{drafter}", "{tmp}/out", "--format", "speculators", "--target", "{wide}"],
        2,
        "use the target it was trained for",
    ),
    "no such run": (
        ["evaluate", "--target", "{target}", "--drafter", "{drafter}", "--prompts", "{chats}", "--run", "{tmp}/none"],
        2,
        "has no metrics.jsonl",
    ),
    "out is a file": (
        ["evaluate", "--target", "{target}", "--drafter", "{drafter}", "--prompts", "{chats}", "--out", "{config}"],
        2,
        "cannot be a folder",
    ),
    "empty prompts": (
        ["evaluate", "--target", "{target}", "--drafter", "{drafter}", "--prompts", "{tmp}/nothing.jsonl"],
        1,
        "no prompts in it",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
    case: str,
    config: Path,
    tmp_path: Path,
    target_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from draftsmith.checkpoint.export import export_drafter
    from tests.conftest import tiny_drafter

    arguments, code, words = BAD[case]
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "nothing.jsonl").write_text("\n")
    export_drafter(tmp_path / "drafter", tiny_drafter(), format="dflash", dtype="fp32")
    wide = save_target(tmp_path / "wide", hidden=64) if "{wide}" in arguments else tmp_path
    values = {
        "chats": tmp_path / "chats.jsonl",
        "config": config,
        "tmp": tmp_path,
        "target": target_folder,
        "drafter": tmp_path / "drafter",
        "wide": wide,
    }
    got, _, err = here(capsys, *[a.format(**values) for a in arguments])
    assert got == code, err
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_no_free_disk_is_told_before_training(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from draftsmith.checkpoint import save

    monkeypatch.setattr(save.shutil, "disk_usage", lambda _path: os.statvfs_result and type("usage", (), {"free": 10})())
    code, _, err = here(capsys, "train", "--config", config)
    assert code == 1
    assert "0 MB free, but a checkpoint needs" in err
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_worker_failure_exits_1_with_its_cause_in_one_line(config: Path, tmp_path: Path) -> None:
    """In a process of its own: the failing worker ends the run, the exit code says so."""
    script = (
        "import draftsmith.pipeline.workers as w, draftsmith.cli as c, sys\n"
        "def broken(*a): raise ValueError('on purpose')\n"
        "w.run_pack = broken\n"
        f"c.main(['train', '--config', {str(config)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "error: drafter-" in done.stderr
    assert "ValueError: on purpose" in done.stderr
    assert "Traceback" not in done.stderr


class Trainer:
    """A training process whose lines are read as they come."""

    def __init__(self, config: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "draftsmith", "train", "--config", str(config), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def read_until(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if word in line:
                return
        raise AssertionError(f"the trainer ended before it said {word!r}: {''.join(self.lines)}")

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait(60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_report_31_a_signal_finishes_the_step_saves_and_exits_in_time(
    config: Path, tmp_path: Path, number: int, code: int
) -> None:
    trainer = Trainer(config, "train.max_steps=100000", "train.epochs=1000000", "checkpoint.every=100000")
    trainer.read_until("step 3/")
    begin = time.monotonic()
    trainer.process.send_signal(number)
    assert trainer.end() == code, trainer.lines
    assert time.monotonic() - begin < 15
    assert "stopped on request at step" in trainer.lines[-1]
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(saved.name.rpartition("-")[2])
    assert step >= 3
    assert f"at step {step};" in trainer.lines[-1]
    if number == signal.SIGINT:
        return  # what was saved is the same for both
    resumed = Trainer(config, f"train.max_steps={step + 2}", "train.epochs=1000000", "--resume", "latest")
    assert resumed.end() == 0
    assert any(f"resuming at step {step}" in line for line in resumed.lines)


def test_ctrl_c_while_loading_is_not_a_traceback(config: Path) -> None:
    script = (
        "import os, signal, draftsmith.cli as c\n"
        "from draftsmith import build\n"
        "def load(*a, **k): os.kill(os.getpid(), signal.SIGINT); raise KeyboardInterrupt\n"
        "build.load_pair = load\n"
        "c.main(['generate', '--target', 'x', '--drafter', 'y', 'hi'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_version_and_module_entry() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.strip()


def test_a_reader_that_goes_away_does_not_stop_training(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftsmith", "train", "--config", str(config), "train.max_steps=40"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(120) == 0, errors
    assert (tmp_path / "run" / "checkpoint-40").is_dir()

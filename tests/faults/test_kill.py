"""Kill -9 at random moments: what is resumed ends in exactly the weights of a run that was never disturbed."""

import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tests.conftest import small_tree

pytestmark = pytest.mark.process


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "draftsmith", "train", "--config", str(config), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(config: Path, *arguments: str) -> str:
    process = start(config, *arguments)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def steps_of(run: Path) -> list[dict]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == "step"]


def kill_and_resume(target_folder: Path, chats: Path, tmp_path: Path, *, kills: int, steps: int, seed: int) -> None:
    rng = random.Random(seed)
    trees = {}
    for name in ("straight", "killed"):
        tree = small_tree(target_folder, chats, tmp_path / name)
        tree["train"] |= {"max_steps": steps, "epochs": 10**6}
        tree["checkpoint"] = {"every": 5, "keep": 2}
        trees[name] = tmp_path / f"{name}.yaml"
        trees[name].write_text(yaml.safe_dump(tree))
    finish(trees["straight"])
    hit_in_steps = 0
    for attempt in range(kills):
        process = start(trees["killed"], "--resume", "latest")
        assert process.stdout is not None
        # Most kills fall between the first step and about two seconds later, some into start-up.
        if attempt % 5:
            for line in process.stdout:
                if line.startswith("step "):
                    hit_in_steps += 1
                    break
            delay = rng.uniform(0, 2)
        else:
            delay = rng.uniform(0, 5)
        timer = threading.Timer(delay, process.send_signal, [signal.SIGKILL])
        timer.start()
        out, _ = process.communicate(timeout=120)
        timer.join()
        assert process.returncode == -signal.SIGKILL, f"the run ended by itself; give it more steps: {out[-500:]}"
    out = finish(trees["killed"], "--resume", "latest")
    assert hit_in_steps >= kills // 2
    final = [tmp_path / name / f"checkpoint-{steps}" for name in trees]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert final[0].joinpath(file).read_bytes() == final[1].joinpath(file).read_bytes(), file
    straight, killed = (steps_of(tmp_path / name) for name in trees)
    assert [row["step"] for row in killed] == list(range(1, steps + 1))
    assert [row["loss"] for row in killed] == [row["loss"] for row in straight]
    leftovers = [p.name for p in (tmp_path / "killed").iterdir() if p.name.startswith(".checkpoint")]
    assert len(leftovers) <= 1, leftovers


def test_three_kills(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    kill_and_resume(target_folder, chats, tmp_path, kills=3, steps=500, seed=0)


@pytest.mark.slow
def test_twenty_kills(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    kill_and_resume(target_folder, chats, tmp_path, kills=20, steps=2500, seed=1)

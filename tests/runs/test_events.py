"""What a run tells: metrics that survive resume, and a line for people."""

import io
import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.runs.events import RunEvents

STEP = {"loss": 1.5, "tau_estimate": 2.25, "tokens": 100, "data_wait": 0.25, "lr": 0.1, "grad_norm": 1.0}


def record(folder: Path, first: int, last: int, log_every: int = 2) -> str:
    stream = io.StringIO()
    with RunEvents(folder, steps=10, start_step=first - 1, log_every=log_every, stream=stream) as events:
        for step in range(first, last + 1):
            events.emit("step", {"step": step, **STEP})
        events.emit("evaluation", {"step": last, "tau": 3.0, "prompts": 5})
        events.emit("checkpoint", {"step": last, "path": "there"})
    return stream.getvalue()


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    out = record(tmp_path, 1, 4)
    lines = out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ") and "/" in line] == ["2/10", "4/10"]
    assert "loss 1.500" in out
    assert "tau~2.25" in out
    assert "data-wait 25%" in out
    assert "ETA" in out
    assert "tokens/s" in out
    assert "tau 3.00 measured by decoding 5 held-out prompts" in out
    assert "saved there" in out
    assert "\x1b" not in out


def test_resume_drops_what_the_checkpoint_does_not_cover_and_cut_lines(tmp_path: Path) -> None:
    record(tmp_path, 1, 6)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    record(tmp_path, 5, 8)
    assert [row["step"] for row in rows(tmp_path) if row["kind"] == "step"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    with RunEvents(tmp_path, steps=3, start_step=0, log_every=1, stream=io.StringIO()) as events:
        events.emit("step", {"step": 1, **STEP})
        assert rows(tmp_path)[0]["loss"] == 1.5


def test_tensorboard_has_the_scalars(tmp_path: Path) -> None:
    record(tmp_path, 1, 3)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"loss", "tau_estimate", "tau", "lr", "tokens_per_s"} <= set(board.Tags()["scalars"])
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3]

"""The whole demo at toy size: every stage real, kept and reused."""

import json
import signal
from pathlib import Path

import pytest

from draftsmith.build import run as build
from draftsmith.decode.respond import Written
from draftsmith.demo.job import DemoRecipe, run_demo
from draftsmith.demo.target import TargetRecipe

TOY = DemoRecipe(
    target=TargetRecipe(
        vocab_size=300, hidden_size=32, intermediate_size=64, heads=2, kv_heads=1, head_dim=16, steps=30, batch_size=4
    ),
    chats=24,
    prompts=10,
    max_new_tokens=24,
    epochs=1.0,
    anchors=16,
    bucket=256,
)
KEYS = {
    "tau",
    "block_size",
    "prompts",
    "identical_prompts",
    "plain_tokens_per_s",
    "speculative_tokens_per_s",
    "target_threads",
    "drafter_threads",
    "seconds",
    "repeated_4gram_share",
}


@pytest.mark.long
def test_the_demo_runs_resumes_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An untrained toy target seldom ends its answers; let every answer count.
    from draftsmith.demo import job

    def answers(_target: object, prompts: list[list[int]], **_options: object) -> list[tuple[int, Written]]:
        return [(number, Written(f"answer {number}", True, 3)) for number in range(len(prompts))]

    monkeypatch.setattr(job, "write_responses", answers)
    said: list[str] = []
    original = build.RunEvents.emit

    def stop_once(self: build.RunEvents, kind: str, fields: dict) -> None:
        original(self, kind, fields)
        if kind == "step" and fields["step"] == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(build.RunEvents, "emit", stop_once)
    assert run_demo(tmp_path / "demo", said.append, TOY) == signal.SIGTERM
    assert not (tmp_path / "demo" / "report.json").exists()
    monkeypatch.setattr(build.RunEvents, "emit", original)
    assert run_demo(tmp_path / "demo", said.append, TOY) is None
    assert any("resuming at step 2" in line for line in said)
    assert any("cached in" in line for line in said)
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report.keys() >= KEYS
    assert (report["target_threads"], report["drafter_threads"], report["prompts"]) == (1, 2, 10)
    assert report["identical_prompts"] == 10
    assert report["control_tau"].keys() == {"untrained_drafter", "zero_features"}
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "src=" not in page
    assert "<link" not in page
    for folder in ("drafter", "drafter-speculators"):
        assert (tmp_path / "demo" / folder / "model.safetensors").is_file()
    first = (tmp_path / "demo" / "drafter" / "model.safetensors").read_bytes()
    # A finished demo starts training again from the same target and data, and ends in the same drafter.
    assert run_demo(tmp_path / "demo", said.append, TOY) is None
    assert (tmp_path / "demo" / "drafter" / "model.safetensors").read_bytes() == first

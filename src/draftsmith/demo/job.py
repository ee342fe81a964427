"""The demo's job: target, responses, training, evaluation with controls, export, report. Each stage is kept and reused."""

import itertools
import json
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith import build
from draftsmith.checkpoint.export import load_drafter
from draftsmith.config import Config, TargetSection, parse_config
from draftsmith.data.chat import ChatFormat
from draftsmith.data.files import read_records, write_records
from draftsmith.decode.respond import write_responses
from draftsmith.decode.speculate import FeatureFilter, Speculator
from draftsmith.demo import tasks
from draftsmith.demo.target import TargetRecipe, build_target
from draftsmith.draft.model import Drafter
from draftsmith.evaluate.report import read_metrics, write_report
from draftsmith.evaluate.suite import PromptResult, decode_both_ways, load_prompts, summarise
from draftsmith.pipeline.plan import generator_for
from draftsmith.runs.reporter import RunReporter
from draftsmith.target.load import Target, load_target

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoRecipe:
    """How large the demo is. Tests make it tiny; the defaults are the real one."""

    target: TargetRecipe = field(default_factory=TargetRecipe)
    chats: int = 4000
    prompts: int = 60
    max_new_tokens: int = 160
    epochs: float = 4.0
    block_size: int = 8
    anchors: int = 64
    bucket: int = 512


def demo_config(folder: Path, recipe: DemoRecipe) -> Config:
    """The training configuration of the demo: one target thread, two drafter threads, all on CPU devices."""
    return parse_config(
        {
            "target": {"model": str(folder / "target"), "dtype": "fp32", "devices": ["cpu"]},
            "data": {"train": [str(folder / "train.jsonl")], "buckets": [recipe.bucket]},
            "draft": {"layers": 3, "block_size": recipe.block_size, "target_layers": 3},
            "train": {
                "devices": ["cpu", "cpu"],
                "epochs": recipe.epochs,
                "packs_per_step": 4,
                "anchors": recipe.anchors,
                "lr": 2e-3,
                "precision": "fp32",
            },
            "checkpoint": {"every": 250, "keep": 2},
            "evaluate": {"prompts": str(folder / "watch.jsonl"), "count": 10, "max_new_tokens": recipe.max_new_tokens},
            "run": {"dir": str(folder / "train"), "log_every": 50},
        },
        "the demo's embedded configuration",
    )


def _write_data(folder: Path, target: Target, recipe: DemoRecipe, say: Say) -> None:
    """Training chats with the target's own answers; prompts held out from both trainings; a few to watch by."""
    files = [folder / name for name in ("train.jsonl", "watch.jsonl", "held-out.jsonl")]
    if all(path.is_file() for path in files):
        say("responses: cached")
        return
    train = list(itertools.islice(tasks.stream(recipe.target.seed + 2), recipe.chats))
    # Both trainings' streams: the target's own is replayed as far as it was read.
    read = itertools.islice(tasks.stream(recipe.target.seed + 1), (recipe.target.steps + 4) * recipe.target.batch_size)
    seen = {task.prompt for task in itertools.chain(read, train)}
    held_out = tasks.held_out(recipe.target.seed + 3, recipe.prompts + 10, seen)
    begin = time.perf_counter()

    chats = [task.messages() for task in train]
    prompts = [ChatFormat(target.tokenizer).prompt(chat[:-1]) for chat in chats]
    answered: dict[int, list[dict[str, Any]]] = {}
    for done, (number, written) in enumerate(write_responses(target, prompts, max_new_tokens=recipe.max_new_tokens), start=1):
        if written.finished:
            # An answer that did not end in time teaches the drafter to loop; it is left out.
            answered[number] = [*chats[number][:-1], {"role": "assistant", "content": written.text}]
        if done == len(prompts) or done % 640 == 0:
            say(f"responses: {done}/{len(prompts)} written by the target, {time.perf_counter() - begin:.0f} s")
    write_records(files[1], [t.messages() for t in held_out[recipe.prompts :]])
    write_records(files[2], [t.messages() for t in held_out[: recipe.prompts]])
    write_records(files[0], [answered[number] for number in sorted(answered)])


def _figures(
    target: Target, drafter: Drafter, path: Path, recipe: DemoRecipe, features: FeatureFilter | None = None
) -> list[PromptResult]:
    speculator = Speculator(target, drafter, features)
    return list(decode_both_ways(target, speculator, load_prompts(target, path, recipe.prompts), recipe.max_new_tokens))


def run_demo(folder: Path, say: Say, recipe: DemoRecipe = DemoRecipe()) -> int | None:
    """Run every stage that is not done yet; returns the number of the signal that stopped training, if one did."""
    begin = time.perf_counter()
    seconds: dict[str, float] = {}

    def lap(stage: str) -> None:
        seconds[stage] = round(time.perf_counter() - begin - sum(seconds.values()), 1)

    reporter = RunReporter.from_environment()
    reporter.phase("preparing")
    folder.mkdir(parents=True, exist_ok=True)
    made = build_target(folder / "target", recipe.target, say)
    done = folder / "report.json"
    if made or done.exists():
        # A new target, or a demo that was finished before: what follows is made again.
        shutil.rmtree(folder / "train", ignore_errors=True)
        done.unlink(missing_ok=True)
    if made:
        for name in ("train.jsonl", "watch.jsonl", "held-out.jsonl"):
            (folder / name).unlink(missing_ok=True)
    lap("target")
    target = load_target(TargetSection(model=str(folder / "target"), dtype="fp32"), [torch.device("cpu")])[0]
    _write_data(folder, target, recipe, say)
    lap("responses")
    config = demo_config(folder, recipe)
    outcome = build.train(config, resume="latest", say=say)
    if outcome.signal_number is not None:
        say(f"stopped on request at step {outcome.step}; run the demo again to go on")
        return outcome.signal_number
    lap("training")
    reporter.phase("evaluating", step=outcome.step, steps=outcome.step)

    checkpoint = folder / "train" / f"checkpoint-{outcome.step}"
    for kind in ("dflash", "speculators"):
        out = folder / ("drafter" if kind == "dflash" else "drafter-speculators")
        shutil.rmtree(out, ignore_errors=True)
        build.export(checkpoint, out, format=kind, dtype="fp32", target=str(folder / "target"))
    lap("export")
    torch.set_num_threads(1)
    drafter = load_drafter(folder / "drafter")
    untrained = Drafter(drafter.config).initialise(generator_for(config.train.seed, "weights", 0))
    held_out = folder / "held-out.jsonl"
    results = _figures(target, drafter, held_out, recipe)
    summary = summarise(results, drafter.config.block_size)
    say(f"evaluation: tau {summary['tau']} on {summary['sound_prompts']} sound of {summary['prompts']} held-out prompts")
    controls = {
        "untrained_drafter": _figures(target, untrained, held_out, recipe),
        "zero_features": _figures(target, drafter, held_out, recipe, torch.zeros_like),
    }
    lap("evaluation")
    report: dict[str, Any] = {
        **summary,
        "target_threads": len(config.target.devices),
        "drafter_threads": len(config.train.devices),
        "seconds": round(time.perf_counter() - begin, 1),
        "seconds_by_stage": seconds,
        "control_tau": {name: summarise(r, recipe.block_size)["tau"] for name, r in controls.items()},
        "training_chats": sum(1 for _ in read_records(folder / "train.jsonl")),
        "steps": outcome.step,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "decode_intraop_threads": torch.get_num_threads(),
        "recipe": asdict(recipe),
    }
    write_report(folder / "report.html", report, read_metrics(folder / "train"), results)
    aside = folder / ".report.json.tmp"
    aside.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    aside.replace(done)
    faster = "faster" if float(str(report["speed_up"])) > 1 else "slower"
    say(
        f"tau {report['tau']} at block size {report['block_size']} (untrained {report['control_tau']['untrained_drafter']}, "
        f"without hidden states {report['control_tau']['zero_features']}); "
        f"{report['identical_prompts']} of {report['prompts']} outputs identical to plain greedy decoding; "
        f"{report['right_answers']} right answers"
    )
    say(
        f"speculative decoding was {faster} on this tiny target: {report['speculative_tokens_per_s']} against "
        f"{report['plain_tokens_per_s']} tokens/s (a pass costs it little more than a draft; large targets gain by tau)"
    )
    say(f"report: {folder / 'report.html'} and {done}   drafter: {folder / 'drafter'}   {report['seconds']} s")
    return None

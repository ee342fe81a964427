"""What the programme found, as figures and pictures."""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import torch

from draftsmith.evaluate.report import ACCENT, QUIET, new_plot

SECOND = "#c2571a"


def _growth(metrics: list[dict[str, Any]], path: Path) -> None:
    figure, axes = new_plot("tau grows with training", "optimizer step", "tokens kept per check")
    steps = [row for row in metrics if row["kind"] == "step"]
    every = max(1, len(steps) // 150)
    means = [steps[i : i + every] for i in range(0, len(steps), every)]
    axes.plot(
        [part[-1]["step"] for part in means],
        [sum(row["tau_estimate"] for row in part) / len(part) for part in means],
        color=QUIET,
        label="teacher-forced estimate",
    )
    measured = [row for row in metrics if row["kind"] == "evaluation"]
    axes.plot([r["step"] for r in measured], [r["tau"] for r in measured], "o-", color=ACCENT, label="decoding watched prompts")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def _categories(report: dict[str, Any], path: Path) -> None:
    figure, axes = new_plot("By category, bf16", "", "")
    names = list(report["by_category"])
    places = range(len(names))
    taus = [report["by_category"][name]["tau_all"] for name in names]
    speeds = [report["by_category"][name]["speed_up"] for name in names]
    axes.bar_label(axes.bar([p - 0.2 for p in places], taus, 0.38, color=ACCENT, label="tau"), fmt="%.2f", fontsize=9)
    axes.bar_label(axes.bar([p + 0.2 for p in places], speeds, 0.38, color=SECOND, label="speed-up"), fmt="%.2f", fontsize=9)
    axes.set_xticks(list(places), names)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def write_results(folder: Path, out: Path, seconds: dict[str, float]) -> None:
    """results.json, two plots and the report page in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    fp32, bf16 = (json.loads((folder / dtype / "report.json").read_text()) for dtype in ("fp32", "bf16"))
    metrics = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in metrics if row["kind"] == "evaluation"]
    steps = [row for row in metrics if row["kind"] == "step"]
    chats = sum(1 for _ in (folder / "train.jsonl").open())
    results = {
        "tau": bf16["tau"],
        "tau_all": bf16["tau_all"],
        "tau_fp32": fp32["tau"],
        "speedup": bf16["speed_up"],
        "speedup_fp32": fp32["speed_up"],
        "identical": fp32["identical_prompts"],
        "prompts": fp32["prompts"],
        "bf16_identical": bf16["identical_prompts"],
        "bf16_near_ties": bf16["partings"]["near_ties"],
        "bf16_other_partings": bf16["partings"]["others"],
        "bf16_largest_gap": bf16["partings"]["largest_gap"],
        "by_category": {
            name: {"tau": own["tau"], "tau_all": own["tau_all"], "speedup": own["speed_up"], "prompts": own["prompts"]}
            for name, own in bf16["by_category"].items()
        },
        "slot_acceptance": bf16["slot_acceptance"],
        "repeated_4gram_share": bf16["repeated_4gram_share"],
        "dflash": json.loads((folder / "dflash.json").read_text()),
        "tau_by_step": [[row["step"], round(row["tau"], 3)] for row in evaluations],
        "steps": steps[-1]["step"],
        "training_chats": chats,
        "minutes": round(sum(seconds.values()) / 60, 1),
        "minutes_by_stage": {name: round(spent / 60, 1) for name, spent in seconds.items()},
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} cores",
    }
    _growth(metrics, out / "tau.png")
    _categories(bf16, out / "categories.png")
    shutil.copyfile(folder / "bf16" / "report.html", out / "report.html")
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (folder / "results-written").touch()
    print(json.dumps(results, indent=2))

"""One self-contained page for people: key figures, training curves, per-slot accuracy, kept-token histogram, examples."""

import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.errors import UsageError
from draftsmith.evaluate.suite import PromptResult

INK, ACCENT, QUIET = "#1d2733", "#0b6e99", "#b8c4ce"
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1d2733;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:0}h2{margin-top:2.2rem;border-bottom:1px solid #dde3e8;padding-bottom:.2rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.8rem;margin:1.4rem 0}
.figures div{background:#f3f6f8;border-radius:.5rem;padding:.7rem .9rem}.figures b{display:block;font-size:1.6rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem}svg{width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem}td,th{text-align:left;padding:.35rem .6rem;border-bottom:1px solid #dde3e8;
vertical-align:top}pre{margin:0;white-space:pre-wrap;font-size:.82rem}.quiet{color:#5b6b79}
"""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of a run folder's metrics.jsonl. Raises UsageError if it has none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(f"run folder '{run}' has no metrics.jsonl; give the folder named by run.dir")
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a line cut by a crash
    return [row for row in rows if isinstance(row, dict) and "kind" in row]


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential average, corrected at the start."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def new_plot(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with empty axes, as all plots of this project look."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6ebef")
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _curve(steps: list[int], values: list[float], title: str, y_label: str) -> tuple[Figure, Axes]:
    figure, axes = new_plot(title, "optimizer step", y_label)
    axes.plot(steps, values, color=QUIET, linewidth=0.8)
    axes.plot(steps, _smooth(values), color=ACCENT, linewidth=2)
    return figure, axes


def _bars(values: Sequence[float], first: int, title: str, x_label: str, y_label: str, form: str) -> Figure:
    figure, axes = new_plot(title, x_label, y_label)
    places = list(range(first, first + len(values)))
    bars = axes.bar(places, values, color=ACCENT)
    axes.bar_label(bars, labels=[format(v, form) for v in values], fontsize=9, color=INK)
    axes.set_xticks(places)
    return figure


def _plots(report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [m for m in metrics if m["kind"] == "step"]
    measured = [m for m in metrics if m["kind"] == "evaluation"]
    drawn = []
    if rows:
        steps = [row["step"] for row in rows]
        figure, axes = _curve(steps, [row["loss"] for row in rows], "Training loss", "weighted cross-entropy, nats")
        axes.set_yscale("log")
        drawn.append(_svg(figure))
        figure, axes = _curve(steps, [row["tau_estimate"] for row in rows], "Acceptance length", "tokens kept per check")
        if measured:
            axes.plot(
                [m["step"] for m in measured], [m["tau"] for m in measured], "o-", color="#c2571a", label="measured by decoding"
            )
            axes.legend(frameon=False, loc="lower right")
        drawn.append(_svg(figure))
        last = rows[-min(50, len(rows)) :]
        slots = range(len(last[0]["slot_accuracy"]))
        accuracy = [sum(row["slot_accuracy"][k] for row in last) / len(last) for k in slots]
        drawn.append(
            _svg(_bars(accuracy, 1, "Accuracy per slot, last steps of training", "slot in the block", "share right", ".2f"))
        )
    histogram = report.get("kept_histogram")
    if histogram:
        drawn.append(_svg(_bars(histogram, 1, "Tokens kept per check, held-out prompts", "tokens kept", "checks", "d")))
    accepted = report.get("slot_acceptance")
    if accepted:
        title = "Checks that keep at least so many drafted tokens"
        drawn.append(_svg(_bars(accepted, 1, title, "drafted tokens", "share of checks", ".2f")))
    return drawn


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _cards(report: Mapping[str, Any]) -> str:
    cards = [
        (f"tau at block size {report['block_size']}", _number(report["tau"])),
        ("outputs identical to plain greedy", f"{report['identical_prompts']} / {report['prompts']}"),
        ("tokens per s, speculative / plain", f"{report['speculative_tokens_per_s']:.0f} / {report['plain_tokens_per_s']:.0f}"),
        ("target passes, speculative / plain", f"{report['target_passes_speculative']} / {report['target_passes_plain']}"),
        ("right answers by the target", f"{report['right_answers']} / {report['judged_answers']}"),
        ("repeated 4-grams", f"{report['repeated_4gram_share']:.1%}"),
    ]
    return "".join(f"<div><b>{html.escape(str(value))}</b>{html.escape(name)}</div>" for name, value in cards)


def _controls(report: Mapping[str, Any]) -> str:
    """A table of what tau is without a trained drafter or without hidden states, where that was measured."""
    if "control_tau" not in report:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{_number(value)}</td></tr>"
        for name, value in {"trained drafter": report["tau"], **report["control_tau"]}.items()
    )
    return f"<h2>Is it the drafter's work?</h2><table><tr><th>drafter</th><th>tau on the same prompts</th></tr>{rows}</table>"


def _categories(report: Mapping[str, Any]) -> str:
    """A table of the figures by kind of prompt, where prompts have one."""
    if "by_category" not in report:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{own['prompts']}</td><td>{_number(own['tau'])}</td><td>{own['speed_up']:.2f}</td>"
        f"<td>{own['identical_prompts']}</td></tr>"
        for name, own in report["by_category"].items()
    )
    heads = "".join(f"<th>{name}</th>" for name in ("category", "prompts", "tau", "speed-up", "identical"))
    return f"<h2>By category</h2><table><tr>{heads}</tr>{rows}</table>"


def _partings(report: Mapping[str, Any]) -> str:
    """What became of the outputs that part from plain decoding, where they were scored again in fp32."""
    if "partings" not in report:
        return ""
    told = report["partings"]
    return (
        f'<p class="quiet">{told["near_ties"] + told["others"]} outputs part from plain decoding: {told["near_ties"]} at near-ties, where '
        f"the two tokens lie closer in fp32 than rounding moves them (largest gap {told['largest_gap']:.3f}), {told['others']} elsewhere.</p>"
    )


def _examples(results: Sequence[PromptResult]) -> str:
    rows = []
    for result in results[:12]:
        mark = {True: "right", False: "wrong", None: "not judged"}[result.right]
        rows.append(
            f"<tr><td><pre>{html.escape(result.prompt)}</pre></td><td><pre>{html.escape(result.text)}</pre></td><td>{result.speculative.tau:.2f}</td>"
            f"<td>{'yes' if result.identical else 'no'}</td><td>{mark}</td></tr>"
        )
    return "".join(rows)


def write_outputs(path: Path, results: Sequence[PromptResult]) -> None:
    """Every prompt with what was written for it, a JSON object a line."""
    lines = []
    for result in results:
        row: dict[str, object] = {
            "prompt": result.prompt,
            "text": result.text,
            "category": result.category,
            "identical": result.identical,
        }
        row |= {"ids": result.speculative.ids, "plain_ids": result.plain.ids, "kept": result.speculative.kept}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def write_report(
    path: Path, report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], results: Sequence[PromptResult]
) -> None:
    """Write the page; it refers to nothing outside itself."""
    facts = {
        key: report[key] for key in ("target_threads", "drafter_threads", "steps", "training_chats", "seconds") if key in report
    }
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Draftsmith report</title><style>{STYLE}</style></head><body>
<h1>Draftsmith report</h1>
<p class="quiet">{html.escape(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))}</p>
<div class="figures">{_cards(report)}</div>
<p class="quiet">tau counts the {report["sound_prompts"]} outputs of which under 30 % of the 4-grams repeat; over all outputs it is
{_number(report["tau_all"])}. Speeds include each prompt's own pass.</p>
{_partings(report)}
<h2>Curves</h2><div class="plots">{"".join(_plots(report, metrics))}</div>
{_categories(report)}
{_controls(report)}
<h2>Examples</h2><table><tr><th>prompt</th><th>output</th><th>tau</th><th>identical</th><th>answer</th></tr>{_examples(results)}</table>
</body></html>
"""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(page, encoding="utf-8")
    aside.replace(path)

"""A run on one screen: the verdict in words, and the figures that people ask for. Pure: from a probe to lines."""

from collections.abc import Mapping
from typing import Any

from draftsmith.runs.verdict import DAMAGE, Verdict

COLOURS = {"running": "green", "compiling": "cyan", "silent": "yellow", "hung": "red", "unreachable": "magenta"}


def colour(verdict: Verdict) -> str:
    """Green for what is well, yellow for what may be, red for what is not."""
    if verdict.name == "exited":
        return "green" if verdict.code == 0 else "yellow" if verdict.cause.startswith("stopped on request") else "red"
    return COLOURS.get(verdict.name, "yellow" if verdict.alive else "red")


def shown(text: object) -> str:
    """Text that every terminal and page can take: file names and records may hold bytes that are no characters."""
    return str(text).encode("utf-8", "replace").decode()


def span(seconds: float) -> str:
    """A length of time, as short as people say it."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def figures(seen: Mapping[str, Any]) -> dict[str, str]:
    """What there is to tell about a run, by name, in reading order; only what is known."""
    try:
        return {name: shown(told) for name, told in _figures(seen).items()} if seen.get("attempt") else {}
    except DAMAGE as error:
        return {"record": f"damaged: {error}", "log": f"{seen['attempt']}/log"}


def _figures(seen: Mapping[str, Any]) -> dict[str, str]:
    phase, beat, record = seen.get("phase") or {}, seen.get("heartbeat") or {}, seen.get("record") or {}
    end, now = seen.get("exit") or {}, seen["now"]["boot"]
    rows: dict[str, str] = {}
    if phase.get("name"):
        rows["phase"] = str(phase["name"])
    if isinstance(phase.get("step"), int):
        rows["step"] = f"{phase['step']} of {phase.get('steps', '?')}"
    if isinstance(phase.get("loss"), float):
        rows["loss"] = f"{phase['loss']:.3f}"
    if isinstance(phase.get("tau"), float):
        rows["tau"] = f"{phase['tau']:.2f} by decoding"
    elif isinstance(phase.get("tau_estimate"), float):
        rows["tau"] = f"{phase['tau_estimate']:.2f} estimated in training"
    if isinstance(phase.get("tokens_per_s"), float):
        rows["tokens/s"] = f"{phase['tokens_per_s']:,.0f}"
    if isinstance(phase.get("left_s"), float) and not end:
        rows["time left"] = span(phase["left_s"])
    for index, gpu in sorted((beat.get("gpus") or {}).items()):
        use = "use unknown" if gpu["use"] is None else f"{gpu['use']} %"
        rows[f"gpu {index}"] = f"{use}, {gpu['memory']:,} MiB"
    if end:
        rows["ran"] = span(end.get("seconds", 0))
    elif beat.get("boot"):
        rows["heartbeat"] = f"{span(now - beat['boot'])} ago, {beat.get('rss', 0) / 2**20:,.0f} MiB"
    if record.get("commit"):
        commit, _, changed = str(record["commit"]).partition("-")
        rows["commit"] = commit[:12] + (" and changes" if changed else "")
    rows["log"] = f"{seen['attempt']}/log"
    return rows

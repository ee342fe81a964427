"""Training curves of a live run: metrics.jsonl read as it grows, thinned to what a screen can show, and drawn as SVG paths."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 200, 52, 22, 8
POINTS = 300
# Larger values, infinite ones and those that are no number are not drawn.
LARGEST = 1e15
CURVES = {
    "loss": "loss",
    "tau_estimate": "tau, estimated in training",
    "tau": "tau, measured by decoding",
    "tokens_per_s": "tokens/s",
}
Point = tuple[float, float]


@dataclass
class Metrics:
    """One file, read on from where it was; starts anew when it was rewritten, as a resumed run does."""

    path: Path
    offset: int = 0
    inode: int = 0
    points: dict[str, list[Point]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def read(self) -> Mapping[str, Sequence[Point]]:
        """Points (step, value) by curve; empty where there is no file yet. A line that is still being written waits."""
        with self.lock:
            try:
                with self.path.open("rb") as file:
                    found = self.path.stat()
                    if found.st_ino != self.inode or found.st_size < self.offset:
                        self.offset, self.inode, self.points = 0, found.st_ino, {}
                    file.seek(self.offset)
                    fresh = file.read()
            except OSError:
                return {}
            whole = fresh[: fresh.rfind(b"\n") + 1]
            self.offset += len(whole)
            for line in whole.splitlines():
                self._take(line)
            return {name: list(points) for name, points in self.points.items()}

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step, values = (
                float(row["step"]),
                {name: float(row[name]) for name in CURVES if isinstance(row.get(name), int | float)},
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return
        for name, value in values.items():
            if abs(step) < LARGEST and abs(value) < LARGEST:
                self.points.setdefault(name, []).append((step, value))


def thin(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """At most `most` points: means of equal runs of neighbours, the last point kept as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    body = points[:-1]
    groups = [body[i : i + size] for i in range(0, len(body), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups] + [points[-1]]


def ticks(low: float, high: float) -> list[float]:
    """Three to six round values between the two."""
    if high <= low:
        return [low]
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A number as an axis shows it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"


def drawing(points: Sequence[Point]) -> dict[str, Any]:
    """What a template needs to draw a curve: path, the last point, and both axes' ticks, in the units of the picture."""
    shown = thin(points)
    xs, ys = [x for x, _ in shown], [y for _, y in shown]
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    # A flat curve lies in the middle of its picture.
    pad = (y_high - y_low) * 0.05 or abs(y_high) * 0.05 or 1.0
    y_low, y_high = y_low - pad, y_high + pad
    x_span = (x_high - x_low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / x_span * (WIDTH - LEFT - 8)
        return round(across, 1), round(TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    spots = [place(x, y) for x, y in shown]
    return {
        "path": "M" + " L".join(f"{x} {y}" for x, y in spots),
        "last": spots[-1],
        "value": label(round(points[-1][1], 3)),
        "rows": [(place(x_low, y)[1], label(y)) for y in ticks(y_low, y_high)],
        "columns": [(place(x, y_low)[0], label(x)) for x in ticks(x_low, x_high)],
    }

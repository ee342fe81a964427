"""A profile of some steps: every thread's spans in a file that Chrome's tracing, Perfetto and others open, and a table."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from draftsmith.spans import Kept, Spans

# In the order of a pack's way; the table shows those that took time, and others after them.
NAMES = ("capture", "copy", "forward", "backward", "reduce", "step", "save", "evaluate", "wait", "gate")


class Profile:
    """Keeps the spans of `steps` steps, from the second step of the run on: in the first, the pipeline still fills."""

    def __init__(self, steps: int, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._steps, self._say = steps, say
        self._marks: list[float] = []
        self._first: int | None = None
        self._threads: Sequence[Spans] = ()
        self._done = False

    def at(self, step: int, threads: Sequence[Spans]) -> None:
        """To be called before each step, `step` of them being done, and after the last."""
        if self._done:
            return
        if self._first is None:
            self._first = step + 1
        # A step that a stop gave up is no step: the same one is told again.
        if step != self._first + len(self._marks):
            return
        self._marks.append(time.perf_counter())
        if step == self._first:
            self._threads = threads
            for thread in threads:
                thread.keep()
        elif step == self._first + self._steps:
            self.close()

    def close(self) -> None:
        """Write what was kept and print the table; also when the run ended before all steps were done."""
        if self._done:
            return
        self._done = True
        taken = [(thread.thread, thread.take()) for thread in self._threads]
        if self._first is None or len(self._marks) < 2:
            self._say("profile    nothing kept: the run ended before its second step did")
            return
        begin, end = self._marks[0], self._marks[-1]
        lanes = [(thread, [s for s in kept if s.end > begin and s.begin < end]) for thread, kept in taken]
        steps = len(self._marks) - 1
        self._say(f"profile    steps {self._first + 1} to {self._first + steps}, {1000 * (end - begin) / steps:.1f} ms each")
        try:
            self.path.write_text(json.dumps(self._trace(lanes)), encoding="utf-8")
            self._say(f"           open {self.path} in chrome://tracing or ui.perfetto.dev; milliseconds a step, by thread:")
        except OSError as error:
            self._say(f"           {self.path} cannot be written ({error.strerror}); milliseconds a step, by thread:")
        for line in table([(name, _own_seconds(kept, begin, end)) for name, kept in lanes], end - begin, steps):
            self._say(f"           {line}")

    def _trace(self, lanes: list[tuple[str, list[Kept]]]) -> dict[str, object]:
        assert self._first is not None
        marks = [Kept(f"step {self._first + 1 + n}", first, last) for n, (first, last) in enumerate(pairwise(self._marks))]
        events: list[dict[str, object]] = []
        for number, (thread, kept) in enumerate([("steps", marks), *lanes]):
            events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": thread}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number, "args": {"sort_index": number}})
            for name, begin, end in kept:
                place = {"ts": round(1e6 * (begin - self._marks[0]), 1), "dur": round(1e6 * (end - begin), 1)}
                events.append({"ph": "X", "name": name, "cat": "draftsmith", "pid": 1, "tid": number, **place})
        return {"displayTimeUnit": "ms", "traceEvents": events}


def _own_seconds(kept: list[Kept], begin: float, end: float) -> dict[str, float]:
    """Seconds by name between begin and end, each span without those inside it."""
    own: dict[str, float] = {}
    around: list[Kept] = []
    # Outer spans first: they begin no later, and end no earlier.
    for one in sorted(kept, key=lambda s: (s.begin, -s.end)):
        while around and around[-1].end <= one.begin:
            around.pop()
        seconds = min(one.end, end) - max(one.begin, begin)
        own[one.name] = own.get(one.name, 0.0) + seconds
        if around:
            own[around[-1].name] -= seconds
        around.append(one)
    return own


def table(lanes: Sequence[tuple[str, dict[str, float]]], wall_s: float, steps: int) -> list[str]:
    """Lines for people: milliseconds a step by thread and name; `other` is what no span covers."""
    found = {name for _, seconds in lanes for name in seconds}
    names = [name for name in NAMES if name in found] + sorted(found - set(NAMES))
    rows = [["thread", *names, "other"]]
    for thread, seconds in lanes:
        each = [seconds.get(name, 0.0) for name in names] + [max(0.0, wall_s - sum(seconds.values()))]
        rows.append([thread, *(f"{1000 * s / steps:.1f}" if s else "-" for s in each)])
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(wide[0]), *(cell.rjust(width) for cell, width in zip(row[1:], wide[1:], strict=True))])
        for row in rows
    ]

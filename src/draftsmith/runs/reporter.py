"""The trainer's own word on where it is: a small file that its supervisor and `status` read. Standard library only.

Without a supervisor (no DRAFTSMITH_ATTEMPT in the environment) it writes nothing.
"""

import faulthandler
import json
import os
import signal
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from draftsmith.runs.shim import ATTEMPT, clock

# Seconds a phase may take before a reader calls it late; steps have 10 times their own median.
DEADLINES = {
    "interpreter": 60.0,
    "imports": 300.0,
    "preparing": 3600.0,
    "model": 1800.0,
    "compiling": 1800.0,
    "saving": 900.0,
    "evaluating": 3600.0,
}
SLOWEST_STEP_S, STEP_FACTOR = 30.0, 10.0
WRITE_EVERY_S = 0.5


class RunReporter:
    """Writes phase.json of one attempt, and lets SIGUSR1 save every thread's stack in `stacks`.

    A full disk must not stop training: what cannot be written is left out.
    """

    def __init__(self, attempt: Path | None) -> None:
        self._attempt = attempt
        self._lengths: deque[float] = deque(maxlen=50)
        self._last_step = self._written = 0.0
        self._phase: dict[str, Any] = {}
        self._stacks: TextIO | None = None

    @classmethod
    def from_environment(cls) -> "RunReporter":
        """The reporter of the attempt that this process was started for."""
        value = os.environ.get(ATTEMPT)
        reporter = cls(Path(value) if value else None)
        reporter._catch_stacks()
        return reporter

    def _catch_stacks(self) -> None:
        if self._attempt is None:
            return
        with suppress(OSError):
            self._stacks = (self._attempt / "stacks").open("a")
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def phase(self, name: str, *, deadline_s: float | None = None, **about: Any) -> None:
        """Enter a phase. deadline_s: seconds it may take; None takes the usual one."""
        now = clock()
        limit = DEADLINES[name] if deadline_s is None else deadline_s
        self._phase = {"name": name, "boot": now, "deadline": now + limit, **about}
        self._last_step = 0.0
        self._write()

    def step(self, step: int, steps: int) -> None:
        """A step was done; the next one may take ten times the median of the last fifty."""
        now = clock()
        if self._last_step:
            self._lengths.append(now - self._last_step)
        self._last_step = now
        limit = max(SLOWEST_STEP_S, STEP_FACTOR * median(self._lengths)) if self._lengths else DEADLINES["compiling"]
        first = self._phase.get("name") != "training"
        self._phase = {"name": "training", "boot": now, "deadline": now + limit, "step": step, "steps": steps}
        if first or now - self._written >= WRITE_EVERY_S or step == steps:
            self._write()

    def _write(self) -> None:
        if self._attempt is None:
            return
        if self._stacks is not None:
            self._phase["stacks_signal"] = int(signal.SIGUSR1)
        aside = self._attempt / ".phase.json.tmp"
        with suppress(OSError):
            aside.write_text(json.dumps({**self._phase, "pid": os.getpid()}), encoding="utf-8")
            os.replace(aside, self._attempt / "phase.json")
        self._written = clock()

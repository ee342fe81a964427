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

from draftsmith.runs.shim import ATTEMPT, clock, read_json, read_text, write_json

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
STOP_SPARE_S = 30.0
WRITE_EVERY_S = 0.5


class RunReporter:
    """Writes phase.json of one attempt, and lets SIGUSR1 save every thread's stack in `stacks`.

    A full disk must not stop training: what cannot be written is left out.
    """

    def __init__(self, attempt: Path | None) -> None:
        self._attempt = attempt
        self._lengths: deque[float] = deque(maxlen=50)
        self._last_step = self._written = self._save_s = 0.0
        self._phase: dict[str, Any] = {}
        self._figures: dict[str, object] = {}
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

    @property
    def supervised(self) -> bool:
        """Whether there is an attempt to report to."""
        return self._attempt is not None

    def signalled(self, number: int, pid: int, uid: int) -> None:
        """A signal came: keep who sent it, before it does what it does."""
        if self._attempt is not None:
            sender = read_text(f"/proc/{pid}/comm").strip()
            with suppress(OSError):
                write_json(str(self._attempt / "signal.json"), {"number": number, "by_pid": pid, "by_uid": uid, "by": sender})

    def phase(self, name: str, *, deadline_s: float | None = None, **about: Any) -> None:
        """Enter a phase. deadline_s: seconds it may take; None takes the usual one."""
        now = clock()
        self._leave(now)
        limit = DEADLINES[name] if deadline_s is None else deadline_s
        self._phase = {"name": name, "boot": now, "deadline": now + limit, **about}
        self._last_step = 0.0
        self._write()

    def _leave(self, now: float) -> None:
        if self._phase.get("name") == "saving":
            self._save_s = max(self._save_s, now - self._phase["boot"])

    def step(self, step: int, steps: int, **figures: object) -> None:
        """A step was done; the next one may take ten times the median of the last fifty. figures: what `status` shows of it."""
        now = clock()
        self._leave(now)
        if self._last_step:
            self._lengths.append(now - self._last_step)
        self._last_step = now
        limit = max(SLOWEST_STEP_S, STEP_FACTOR * median(self._lengths)) if self._lengths else DEADLINES["compiling"]
        first = self._phase.get("name") != "training"
        self._phase = {"name": "training", "boot": now, "deadline": now + limit, "step": step, "steps": steps}
        self._figures = figures
        if first or now - self._written >= WRITE_EVERY_S or step == steps:
            self._write()

    def ended(self, code: int) -> None:
        """The last word: the exit code, beside whatever phase the process was in, for a reader whose supervisor was killed."""
        if self._attempt is not None:
            file = str(self._attempt / "phase.json")
            with suppress(OSError):
                write_json(file, {**read_json(file), "ended": code})

    def _write(self) -> None:
        if self._attempt is None:
            return
        if self._stacks is not None:
            self._phase["stacks_signal"] = int(signal.SIGUSR1)
        # What a stop must allow: the step that is under way and a save, each twice as long as the longest seen, and something more.
        self._phase["stop_s"] = STOP_SPARE_S + 2 * (max(self._lengths, default=0.0) + self._save_s)
        aside = self._attempt / ".phase.json.tmp"
        with suppress(OSError):
            aside.write_text(json.dumps({**self._figures, **self._phase, "pid": os.getpid()}), encoding="utf-8")
            os.replace(aside, self._attempt / "phase.json")
        self._written = clock()

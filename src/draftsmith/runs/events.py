"""Where a run's events go: `metrics.jsonl`, TensorBoard, and a progress line for people."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter

from draftsmith.runs.reporter import RunReporter

SCALARS = ("loss", "tau_estimate", "tau", "lr", "grad_norm", "data_wait", "tokens_per_s")
SHOWN = ("loss", "tau_estimate", "data_wait", "tokens_per_s", "left_s")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RunEvents:
    """Receives `emit(kind, fields)` from the coordinator. A live line on a terminal, plain lines elsewhere.

    On resume, metrics of steps past the checkpoint are dropped first, so that each step stands once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        start_step: int,
        log_every: int,
        stream: TextIO | None = None,
        reporter: RunReporter | None = None,
    ) -> None:
        self._reporter = reporter or RunReporter(None)
        self._steps, self._start_step, self._log_every = steps, start_step, log_every
        self._path = folder / "metrics.jsonl"
        self._keep_until(start_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._begin: float | None = None
        self._steps_begin = 0.0
        self._tokens = 0
        self._tau: float | None = None
        self._mute = self._failed = False

    def _keep_until(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if int(json.loads(line).get("step", -1)) <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # a line cut by a crash
        aside = self._path.with_suffix(".tmp")
        aside.write_text("".join(kept), encoding="utf-8")
        aside.replace(self._path)

    def __enter__(self) -> "RunEvents":
        if self._live is not None:
            self._live.start()
        self._begin = self._steps_begin = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._show(self._live.stop)
        # Whatever could not be flushed was told already; it must not hide how the run ended.
        for end in (self._file.close, self._board.close):
            with suppress(OSError):
                end()

    def say(self, line: str) -> None:
        """A line for people that stays."""
        self._show(lambda: self._console.print(Text(line), soft_wrap=True))

    def _show(self, draw: Callable[[], object]) -> None:
        """Draw unless nobody reads any more: a closed terminal or a full disk must not stop a run that can be saved."""
        if self._mute:
            return
        try:
            draw()
        except (OSError, SystemExit):
            self._mute = True

    def _keep(self, record: Mapping[str, object], step: int) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            for name in SCALARS:
                if name in record:
                    self._board.add_scalar(name, float(str(record[name])), step)
        except OSError as error:
            if not self._failed:
                self.say(f"metrics of step {step} on cannot be written ({error.strerror}); training goes on without them")
            self._failed = True

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Record an event. `step` events also move the progress line; `checkpoint` and `evaluation` print a line.

        `phase` events go to the supervisor alone.
        """
        assert self._begin is not None
        if kind == "phase":
            self._reporter.phase(str(fields["name"]), step=fields["step"], steps=self._steps)
            return
        elapsed = time.perf_counter() - self._begin
        record: dict[str, object] = {"kind": kind, "seconds": round(elapsed, 3), **fields}
        step = int(str(fields.get("step", self._start_step)))
        if kind == "warmup":
            self._steps_begin = time.perf_counter()
            self._reporter.phase("compiling", deadline_s=max(600.0, 10 * float(str(fields["left_s"]))))
            left = f"about {_clock(float(str(fields['left_s'])))}"
            if "worker" in fields:
                told = f"{fields['worker']} ran {fields['shape']} in {fields['seconds']:.1f} s, {left} left"
            else:
                told = f"compiling, {left} unless the cache has it"
            self.say(f"warm-up {fields['done']}/{fields['of']}: {told}")
        elif kind == "compile":
            self.say(
                f"compiled {fields['planned']} planned and {fields['unplanned']} unplanned graphs, {fields['compile_s']:.1f} s alone"
            )
        elif kind == "step":
            self._tokens += int(str(fields["tokens"]))
            stepping = time.perf_counter() - self._steps_begin
            record["tokens_per_s"] = round(self._tokens / stepping, 1)
            record["left_s"] = round(stepping / (step - self._start_step) * (self._steps - step), 1)
            self._reporter.step(step, self._steps, tau=self._tau, **{name: record[name] for name in SHOWN})
            self._progress(step, record)
        elif kind == "checkpoint":
            self.say(f"step {step}: saved {fields['path']}")
        elif kind == "evaluation":
            self._tau = float(str(fields["tau"]))
            best = ", the best so far: checkpoint-best" if fields.get("best") else ""
            self.say(f"step {step}: tau {self._tau:.2f} measured by decoding {fields['prompts']} held-out prompts{best}")
        self._keep(record, step)

    def _progress(self, step: int, record: Mapping[str, Any]) -> None:
        measured = f" (measured {self._tau:.2f})" if self._tau is not None else ""
        line = (
            f"step {step}/{self._steps}  loss {record['loss']:.3f}  tau~{record['tau_estimate']:.2f}{measured}  "
            f"{record['tokens_per_s']:.0f} tokens/s  data-wait {record['data_wait']:.0%}  ETA {_clock(record['left_s'])}"
        )
        if self._live is not None:
            live = self._live
            self._show(lambda: live.update(Text(line)))
        elif step % self._log_every == 0 or step == self._steps:
            self.say(line)

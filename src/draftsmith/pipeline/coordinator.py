"""The main thread: owns plan, workers, signals and checkpoints, and is the only one that decides.

Every optimizer step is released by the coordinator, so between steps all drafters stand still: that is when weights are
hashed, saved and evaluated. The first failure anywhere stops everything within `STOP_SECONDS`.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from draftsmith.errors import PipelineError, ReplicaError
from draftsmith.pipeline.channel import Channel, ChannelClosed
from draftsmith.pipeline.plan import Plan
from draftsmith.pipeline.replicas import GradientExchange, Replica
from draftsmith.pipeline.step import StepSettings
from draftsmith.pipeline.workers import DrafterWorker, Event, Failed, StepDone, TargetWorker, Wake, Worker
from draftsmith.target.capture import Capture
from draftsmith.types import Batch, Tokens

STOP_SECONDS = 4.0
Emit = Callable[[str, Mapping[str, object]], None]


@dataclass
class StopRequest:
    """Set once from a signal handler, read by whoever can stop at a good moment."""

    signal_number: int | None = None
    wake: Callable[[], None] | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT into a request; a second one acts as if we were not here."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.signal_number = number
        for name in previous:
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
        if stop.wake is not None:
            stop.wake()

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in previous:
            signal.signal(number, ask)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Job:
    """Everything a run needs, already built: replicas, captures, packs and the plan."""

    replicas: Sequence[Replica]
    captures: Sequence[Capture]
    packs: Sequence[Tokens]
    plan: Plan
    settings: StepSettings
    peak_lr: float
    warmup: float
    channel_capacity: int
    cpu_threads: int
    checkpoint_every: int


@dataclass(frozen=True)
class Outcome:
    """step: optimizer steps done; signal_number: the signal that ended the run early, if one did."""

    step: int
    signal_number: int | None


class Coordinator:
    """Runs a job from `start_step`. `save(step, replica)` persists, `evaluate(step, replica)` measures, `emit` reports."""

    def __init__(
        self,
        job: Job,
        *,
        save: Callable[[int, Replica], None],
        evaluate: Callable[[int, Replica], None],
        emit: Emit,
        stop: StopRequest,
    ) -> None:
        self.job, self.stop = job, stop
        self._save, self._evaluate, self._emit = save, evaluate, emit
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._exchange = GradientExchange(len(job.replicas))
        self._channels: list[Channel[Batch]] = [Channel(job.channel_capacity) for _ in job.replicas]
        self._drafters: list[DrafterWorker] = []
        self._workers: list[Worker] = []

    def run(self, start_step: int) -> Outcome:
        """Train until the plan ends or a stop is asked for; raises PipelineError with a worker's exception as its cause."""
        self._start(start_step)
        self.stop.wake = lambda: self._events.put(Wake())
        try:
            outcome = self._drive(start_step)
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self.stop.wake = None
        self._end(None)
        return outcome

    def _start(self, start_step: int) -> None:
        job = self.job
        self._drafters = [
            DrafterWorker(
                replica,
                self._exchange,
                channel,
                job.plan,
                job.settings,
                (job.peak_lr, job.warmup),
                self._events,
                job.cpu_threads,
            )
            for replica, channel in zip(job.replicas, self._channels, strict=True)
        ]
        targets = [
            TargetWorker(rank, capture, job.packs, job.plan, start_step, self._channels, self._events, job.cpu_threads)
            for rank, capture in enumerate(job.captures)
        ]
        self._workers = [*targets, *self._drafters]
        for worker in self._workers:
            worker.start()

    def _drive(self, start_step: int) -> Outcome:
        step, saved = start_step, start_step
        while step < self.job.plan.steps and not self.stop:
            self._release(step)
            done = self._await_step(step)
            step += 1
            self._report(step, done)
            if step % self.job.checkpoint_every == 0 or step == self.job.plan.steps:
                self._checkpoint(step)
                saved = step
                if not self.stop:
                    self._evaluate(step, self.job.replicas[0])
        if saved != step:
            self._checkpoint(step)
        return Outcome(step, self.stop.signal_number)

    def _release(self, step: int) -> None:
        for drafter in self._drafters:
            drafter.commands.put(step)

    def _await_step(self, step: int) -> list[StepDone]:
        done: list[StepDone] = []
        while len(done) < len(self._drafters):
            event = self._events.get()
            if isinstance(event, Failed):
                raise self._blame(event)
            if isinstance(event, StepDone):
                assert event.step == step, f"replica {event.rank} reported step {event.step} during {step}"
                done.append(event)
        return sorted(done, key=lambda d: d.rank)

    def _blame(self, first: Failed) -> PipelineError:
        error = PipelineError(f"{first.worker} failed: {type(first.error).__name__}: {first.error}")
        error.__cause__ = first.error
        return error

    def _report(self, step: int, done: list[StepDone]) -> None:
        result = sum((d.result for d in done[1:]), start=done[0].result)
        busy, wait = sum(d.busy_s for d in done), sum(d.wait_s for d in done)
        self._emit(
            "step",
            {
                "step": step,
                "loss": result.loss,
                "tau_estimate": result.tau,
                "slot_accuracy": result.slot_accuracy,
                "lr": done[0].lr,
                "grad_norm": done[0].grad_norm,
                "tokens": result.tokens,
                "data_wait": wait / (busy + wait) if busy + wait else 0.0,
                "target_blocked_s": sum(c.put_wait_s for c in self._channels),
                "drafter_blocked_s": sum(c.get_wait_s for c in self._channels),
            },
        )

    def _checkpoint(self, step: int) -> None:
        digests = [replica.digest() for replica in self.job.replicas]
        if len(set(digests)) != 1:
            told = ", ".join(f"replica {r}: {d[:12]}" for r, d in enumerate(digests))
            raise ReplicaError(
                f"drafter replicas differ at step {step} ({told}); nothing was saved. Resume from the last checkpoint and report this"
            )
        self._save(step, self.job.replicas[0])

    def _end(self, error: BaseException | None) -> None:
        """Wake and join every worker; raises PipelineError if one does not end in time and nothing worse is under way."""
        for channel in self._channels:
            channel.close(error or ChannelClosed("the run has ended"))
        if error is not None:
            self._exchange.abort()
        for drafter in self._drafters:
            drafter.commands.put(None)
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        stuck = [worker.name for worker in self._workers if worker.is_alive()]
        if stuck and error is None:
            raise PipelineError(f"{', '.join(stuck)} did not end within {STOP_SECONDS:.0f} s of the last step")
        if stuck and error is not None:
            error.add_note(f"still busy when the run stopped: {', '.join(stuck)}")

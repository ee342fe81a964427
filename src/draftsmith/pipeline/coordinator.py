"""The main thread: owns plan, workers, signals and checkpoints, and is the only one that decides.

Every optimizer step is released by the coordinator, so between steps all drafters stand still: that is when weights are
hashed, saved, and copied for an evaluation that goes on beside the next steps. The first failure anywhere stops everything within `STOP_SECONDS`.
"""

import copy
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from draftsmith.compiling.warmup import COMPILE_SECONDS, Warmed, seconds_left
from draftsmith.draft.model import Drafter
from draftsmith.errors import PipelineError, ReplicaError
from draftsmith.pipeline.channel import Channel, ChannelClosed
from draftsmith.pipeline.profile import Profile
from draftsmith.pipeline.replicas import GradientExchange, Replica
from draftsmith.pipeline.signals import StopRequest
from draftsmith.pipeline.workers import (
    Compiling,
    DrafterWorker,
    Evaluate,
    Evaluated,
    EvaluationWorker,
    Event,
    Failed,
    Job,
    Ready,
    StepDone,
    TargetWorker,
    Wake,
    Worker,
)
from draftsmith.spans import Spans, span
from draftsmith.types import Batch

STOP_SECONDS = 4.0
# How long drafters may starve after a stop was asked for, before their step is given up; and how often that is looked at.
STARVED_S, POLL_S = 10.0, 0.2
Emit = Callable[[str, Mapping[str, object]], None]
Save = Callable[[int, Sequence[Replica], str, frozenset[int]], None]
Judge = Callable[[int, Mapping[str, object]], None]


@dataclass(frozen=True)
class Outcome:
    """step: optimizer steps done; signal_number: the signal that ended the run early, if one did; stuck: workers that were
    still inside a piece of work when the run ended, so that the process must not wait for them."""

    step: int
    signal_number: int | None
    stuck: tuple[str, ...] = ()


class Coordinator:
    """Runs a job from `start_step`. `save(step, replicas, digest, spared)` persists, and keeps the spared steps' checkpoints;
    `evaluate(drafter, guard, interrupted)` measures a copy on a thread of its own, and `judge(step, figures)` is told what it found;
    `emit` reports; `profile` keeps the spans of some steps."""

    def __init__(
        self,
        job: Job,
        *,
        save: Save,
        evaluate: Evaluate | None,
        judge: Judge,
        emit: Emit,
        stop: StopRequest,
        profile: Profile | None = None,
    ) -> None:
        self.job, self.stop = job, stop
        self.spans, self._profile = Spans("coordinator"), profile
        self._save, self._judge, self._emit = save, judge, emit
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._evaluator = EvaluationWorker(job, evaluate, self._events) if evaluate is not None else None
        # The step whose copy is being measured, and the copy that waits for its turn.
        self._measured: int | None = None
        self._next: tuple[int, Drafter] | None = None
        self._exchange = GradientExchange(len(job.replicas), job.compiler.gate)
        self._channels: list[Channel[Batch]] = [Channel(job.channel_capacity) for _ in job.replicas]
        self._drafters: list[DrafterWorker] = []
        self._workers: list[Worker] = []

    def run(self, start_step: int) -> Outcome:
        """Train until the plan ends or a stop is asked for; raises PipelineError with a worker's exception as its cause."""
        self.stop.wake = lambda: self._events.put(Wake())
        try:
            with self.spans.attached():
                self._start(start_step)
                outcome = self._drive(start_step)
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self.stop.wake = None
        return replace(outcome, stuck=tuple(self._end(None)))

    def _start(self, start_step: int) -> None:
        """Start the drafters, let them warm up, and only then the targets: nothing else may run while they compile."""
        self._drafters = [
            DrafterWorker(rank, self.job, self._exchange, channel, self._events) for rank, channel in enumerate(self._channels)
        ]
        self._launch(self._drafters)
        self._await_warm()
        if self.stop:
            return
        self.job.compiler.seal()
        if self._evaluator is not None:
            self._launch([self._evaluator])
        targets = range(len(self.job.sources))
        self._launch([TargetWorker(rank, self.job, start_step, self._channels, self._events) for rank in targets])

    def _launch(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._workers.append(worker)
            worker.start()

    def _await_warm(self) -> None:
        """Wait until every drafter has run every bucket, reporting each with what is left to do."""
        waiting, shapes, warmed = len(self._drafters), len(self.job.buckets), list[Warmed]()
        guess = COMPILE_SECONDS[self.job.replicas[0].flat.device.type]

        def tell(**about: object) -> None:
            left = seconds_left(warmed, shapes=shapes, workers=len(self._drafters), guess=guess)
            progress = {"done": len(warmed), "of": shapes * len(self._drafters), "left_s": round(left, 1)}
            self._emit("warmup", {**progress, **about})

        if self.job.compiler.enabled:
            tell()
        while waiting and not self.stop:
            event = self._events.get()
            if isinstance(event, Failed):
                raise self._blame(event)
            if isinstance(event, Warmed):
                warmed.append(event)
                tell(worker=event.worker, shape=event.shape, seconds=event.seconds)
            waiting -= isinstance(event, Ready)

    def _drive(self, start_step: int) -> Outcome:
        step, saved = start_step, start_step
        while step < self.job.plan.steps and not self.stop:
            self._mark(step)
            self._release(step)
            done = self._await_step(step)
            if not done:
                break
            step += 1
            self._report(step, done)
            if step % self.job.checkpoint_every == 0 or step == self.job.plan.steps:
                self._checkpoint(step)
                saved = step
                self._measure(step)
        self._mark(step)
        if not self.stop:
            self._await_evaluations(step)
        if saved != step:
            self._checkpoint(step)
        # Asked to stop when everything was done and saved: then it is done.
        return Outcome(step, None if step == self.job.plan.steps else self.stop.signal_number)

    def _mark(self, step: int) -> None:
        if self._profile is not None:
            self._profile.at(step, [self.spans, *(worker.spans for worker in self._workers)])

    def _release(self, step: int) -> None:
        for drafter in self._drafters:
            drafter.commands.put(step)

    def _await_step(self, step: int) -> list[StepDone]:
        """What each drafter reports of the step; nothing if a stop was asked for while they starve for states, and it was given up."""
        done: list[StepDone] = []
        while len(done) < len(self._drafters):
            event = self._take(POLL_S if self.stop else None)
            if event is None:
                if max(channel.starved_s() for channel in self._channels) > STARVED_S:
                    self._give_up()
                    return []
                continue
            if isinstance(event, Compiling):
                self._emit("phase", {"name": "compiling", "step": step})
            if isinstance(event, StepDone):
                assert event.step == step, f"replica {event.rank} reported step {event.step} during {step}"
                done.append(event)
        return sorted(done, key=lambda d: d.rank)

    def _give_up(self) -> None:
        """End a step that no drafter can finish, since each step needs every pack: their weights are those of the step before. Raises
        PipelineError if one of them does not come to stand still."""
        for channel in self._channels:
            channel.close(ChannelClosed("the run was stopped while it waited for hidden states"))
        self._exchange.abort()
        for drafter in self._drafters:
            drafter.join(STOP_SECONDS)
        if any(drafter.is_alive() for drafter in self._drafters):
            raise PipelineError(
                "a stop was asked for, but a drafter is stuck in the middle of a step; the last checkpoint stands"
            )

    def _take(self, wait_s: float | None = None) -> Event | None:
        """The next event of a run that has begun, or None if none comes in time; failures are raised, and evaluations seen to, whenever
        they come."""
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(event, Failed):
            raise self._blame(event)
        if isinstance(event, Evaluated):
            if event.figures is not None:
                self._judge(event.step, event.figures)
            self._measured = None
            self._start_measuring()
        return event

    def _measure(self, step: int) -> None:
        """Have the drafter as it stands measured, once the one before is done."""
        if self._evaluator is None or self.stop:
            return
        self._next = step, copy.deepcopy(self.job.replicas[0].drafter)
        self._start_measuring()

    def _start_measuring(self) -> None:
        if self._evaluator is not None and self._measured is None and self._next is not None:
            self._measured = self._next[0]
            self._evaluator.commands.put(self._next)
            self._next = None

    def _await_evaluations(self, step: int) -> None:
        """After the last step: what is under way is worth waiting for."""
        while self._measured is not None and not self.stop:
            self._emit("phase", {"name": "evaluating", "step": step})
            self._take()

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
                "gate_wait_s": self.job.compiler.gate.metrics.total_wait_s,
                "unplanned_compiles": self.job.compiler.metrics.unplanned,
                # Since the run began, by thread; their differences say where the time between two steps went.
                "spans_s": {w.name: {name: round(s, 4) for name, s in w.spans.seconds.copy().items()} for w in self._workers},
            },
        )

    def _checkpoint(self, step: int) -> None:
        if self._next is not None:
            # What waits to be measured gives way to what is saved now.
            self._emit(
                "evaluation_skipped", {"step": self._next[0], "because": f"step {self._measured} was still being measured"}
            )
            self._next = None
        self._emit("phase", {"name": "saving", "step": step})
        with span("save"), self.job.compiler.gate.shared():
            digests = [replica.digest() for replica in self.job.replicas]
        if len(set(digests)) != 1:
            told = ", ".join(f"replica {r}: {d[:12]}" for r, d in enumerate(digests))
            raise ReplicaError(
                f"drafter replicas differ at step {step} ({told}); nothing was saved. Resume from the last checkpoint and report this"
            )
        with span("save"), self.job.compiler.gate.shared():
            # Until it is known how good it is, a checkpoint may become the best.
            spared = frozenset() if self._measured is None else frozenset([self._measured])
            self._save(step, self.job.replicas, digests[0], spared)

    def _end(self, error: BaseException | None) -> list[str]:
        """Wake and join every worker; the names of those that are still busy when their time is up."""
        for channel in self._channels:
            channel.close(error or ChannelClosed("the run has ended"))
        if error is not None:
            self._exchange.abort()
        for drafter in self._drafters:
            drafter.commands.put(None)
        if self._evaluator is not None:
            self._evaluator.ending.set()
            self._evaluator.commands.put(None)
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        stuck = [worker.name for worker in self._workers if worker.is_alive()]
        if stuck and error is not None:
            error.add_note(f"still busy when the run stopped: {', '.join(stuck)}")
        return stuck

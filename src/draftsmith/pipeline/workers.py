"""What each thread does. Workers report events and obey commands; they decide nothing."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from draftsmith.compiling.compiler import Compiler
from draftsmith.compiling.warmup import Warmed, warm_up
from draftsmith.draft.model import Drafter
from draftsmith.pipeline.channel import Channel
from draftsmith.pipeline.plan import Plan, learning_rate
from draftsmith.pipeline.replicas import GradientExchange, Replica
from draftsmith.pipeline.step import Core, StepSettings, blank_batch, run_pack
from draftsmith.spans import Spans, span
from draftsmith.target.sources import StateSource
from draftsmith.types import Batch, StepResult, Tokens


@dataclass(frozen=True)
class Job:
    """Everything a run needs, already built: replicas, sources of hidden states, packs and the plan."""

    replicas: Sequence[Replica]
    sources: Sequence[StateSource]
    packs: Sequence[Tokens]
    plan: Plan
    settings: StepSettings
    peak_lr: float
    warmup: float
    channel_capacity: int
    cpu_threads: int
    checkpoint_every: int
    compiler: Compiler
    core: Core

    @property
    def buckets(self) -> list[int]:
        """Context lengths that the packs have."""
        return sorted({tokens.bucket for tokens in self.packs})


@dataclass(frozen=True)
class StepDone:
    """A replica finished an optimizer step. busy_s and wait_s: seconds computing and waiting for data in it."""

    rank: int
    step: int
    result: StepResult
    lr: float
    grad_norm: float
    busy_s: float
    wait_s: float


@dataclass(frozen=True)
class Failed:
    """A worker ended with an exception."""

    worker: str
    error: BaseException


@dataclass(frozen=True)
class Ready:
    """A drafter worker has run all its shapes and waits for its first step."""

    rank: int


@dataclass(frozen=True)
class Wake:
    """Nothing but a reason for the coordinator to look up: a stop was asked for."""


@dataclass(frozen=True)
class Compiling:
    """A worker needs a graph that no warm-up foresaw; its step takes as long as compiling does."""

    worker: str


@dataclass(frozen=True)
class Evaluated:
    """An evaluation ended. figures: what it found; None if it was interrupted or found nothing."""

    step: int
    figures: Mapping[str, object] | None


Event = StepDone | Warmed | Ready | Failed | Wake | Compiling | Evaluated


class Worker(threading.Thread):
    """A thread whose only way to end badly is a `Failed` event."""

    def __init__(self, name: str, events: "queue.SimpleQueue[Event]", device: torch.device, cpu_threads: int) -> None:
        # Daemonic so that one stuck in foreign code cannot hold the process; its errors still arrive as events.
        super().__init__(name=name, daemon=True)
        self._events, self._device, self._cpu_threads = events, device, cpu_threads
        self.spans = Spans(name, partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)

    def run(self) -> None:
        try:
            torch.set_num_threads(self._cpu_threads)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with self.spans.attached():
                self.work()
        except BaseException as error:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Tell whoever waits for this worker how it ended."""
        self._events.put(Failed(self.name, error))

    def work(self) -> None:
        """The thread's whole job; returns when it is done."""
        raise NotImplementedError


Guard = Callable[[], AbstractContextManager[object]]
Evaluate = Callable[[Drafter, Guard, Callable[[], bool]], Mapping[str, object] | None]


class EvaluationWorker(Worker):
    """Measures copies of the drafter while training goes on. `ending` is set to have it leave off; None as the command ends it."""

    def __init__(self, job: Job, evaluate: Evaluate, events: "queue.SimpleQueue[Event]") -> None:
        super().__init__("evaluation", events, job.replicas[0].flat.device, job.cpu_threads)
        self.commands: queue.SimpleQueue[tuple[int, Drafter] | None] = queue.SimpleQueue()
        self.ending = threading.Event()
        self._evaluate, self._gate = evaluate, job.compiler.gate

    def work(self) -> None:
        while (command := self.commands.get()) is not None:
            step, drafter = command
            # The target decodes eagerly, as capture does: one prompt at a time is let in, so that nobody waits for all of them.
            with span("evaluate"):
                figures = self._evaluate(drafter, self._gate.shared, self.ending.is_set)
            self._events.put(Evaluated(step, figures))


class TargetWorker(Worker):
    """Captures its share of the stream, or reads it, and hands each pack to the channel of the replica that trains on it."""

    def __init__(
        self, rank: int, job: Job, start_step: int, channels: Sequence[Channel[Batch]], events: "queue.SimpleQueue[Event]"
    ) -> None:
        self._source = job.sources[rank]
        super().__init__(f"target-{rank}", events, self._source.device, job.cpu_threads)
        self._rank, self._job, self._start_step, self._channels = rank, job, start_step, channels

    def work(self) -> None:
        plan = self._job.plan
        for position in plan.target_positions(self._rank, self._start_step):
            tokens = self._job.packs[plan.pack_at(position)]
            # Eager, but model code asks whether something compiles: never while another thread does.
            with span("capture"), self._job.compiler.gate.shared():
                batch = Batch(position, tokens, self._source(tokens))
            replica, number = plan.route(position, self._start_step)
            self._channels[replica].put(number, batch)


class DrafterWorker(Worker):
    """Takes one optimizer step each time the coordinator says so; None as the command ends it."""

    def __init__(
        self, rank: int, job: Job, exchange: GradientExchange, channel: Channel[Batch], events: "queue.SimpleQueue[Event]"
    ) -> None:
        self._replica = job.replicas[rank]
        super().__init__(f"drafter-{rank}", events, self._replica.flat.device, job.cpu_threads)
        self.commands: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._job, self._exchange, self._channel = job, exchange, channel

    def _run(self, batch: Batch) -> StepResult:
        return run_pack(self._replica.drafter, self._replica.ends, batch, self._job.settings, self._job.core)

    def _warm_up(self) -> None:
        drafter, dtype = self._replica.drafter, self._job.sources[0].dtype
        blanks = [(f"context {bucket}", blank_batch(bucket, drafter, dtype, self._device)) for bucket in self._job.buckets]
        warm_up(self._job.compiler, self.name, [(name, partial(self._run, blank)) for name, blank in blanks], self._events.put)
        self._replica.gradient.zero_()

    def work(self) -> None:
        if self._job.compiler.enabled:
            self._warm_up()
        self._events.put(Ready(self._replica.rank))
        while (step := self.commands.get()) is not None:
            self._events.put(self._step(step))

    def _step(self, step: int) -> StepDone:
        plan, channel = self._job.plan, self._channel
        begin, waited = time.perf_counter(), channel.get_wait_s
        # The channel is waited for outside the gate, and each pack is let in by itself.
        compiler, told = self._job.compiler, partial(self._events.put, Compiling(self.name))
        results = [compiler.run(partial(self._run, channel.get()), told) for _ in range(plan.share)]
        result = sum(results[1:], start=results[0])
        lr = learning_rate(step, peak=self._job.peak_lr, steps=plan.steps, warmup=self._job.warmup)
        norm = self._replica.update(self._exchange, result.weight_sum, lr)
        wait = channel.get_wait_s - waited
        busy = time.perf_counter() - begin - wait
        return StepDone(self._replica.rank, step, result, lr, norm, busy, wait)

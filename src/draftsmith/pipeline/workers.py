"""What each thread does. Workers report events and obey commands; they decide nothing."""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.pipeline.channel import Channel
from draftsmith.pipeline.plan import Plan, learning_rate
from draftsmith.pipeline.replicas import GradientExchange, Replica
from draftsmith.pipeline.step import StepSettings, run_pack
from draftsmith.target.capture import Capture
from draftsmith.types import Batch, StepResult, Tokens


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
class Wake:
    """Nothing but a reason for the coordinator to look up: a stop was asked for."""


Event = StepDone | Failed | Wake


class Worker(threading.Thread):
    """A thread whose only way to end badly is a `Failed` event."""

    def __init__(self, name: str, events: "queue.SimpleQueue[Event]", device: torch.device, cpu_threads: int) -> None:
        # Daemonic so that one stuck in foreign code cannot hold the process; its errors still arrive as events.
        super().__init__(name=name, daemon=True)
        self._events, self._device, self._cpu_threads = events, device, cpu_threads

    def run(self) -> None:
        try:
            torch.set_num_threads(self._cpu_threads)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self.work()
        except BaseException as error:
            self._events.put(Failed(self.name, error))

    def work(self) -> None:
        """The thread's whole job; returns when it is done."""
        raise NotImplementedError


class TargetWorker(Worker):
    """Captures its share of the stream and hands each pack to the channel of the replica that trains on it."""

    def __init__(
        self,
        rank: int,
        capture: Capture,
        packs: Sequence[Tokens],
        plan: Plan,
        start_step: int,
        channels: Sequence[Channel[Batch]],
        events: "queue.SimpleQueue[Event]",
        cpu_threads: int,
    ) -> None:
        super().__init__(f"target-{rank}", events, capture.device, cpu_threads)
        self._rank, self._capture, self._packs = rank, capture, packs
        self._plan, self._start_step, self._channels = plan, start_step, channels

    def work(self) -> None:
        for position in self._plan.target_positions(self._rank, self._start_step):
            tokens = self._packs[self._plan.pack_at(position)]
            batch = Batch(position, tokens, self._capture(tokens))
            replica, number = self._plan.route(position, self._start_step)
            self._channels[replica].put(number, batch)


class DrafterWorker(Worker):
    """Takes one optimizer step each time the coordinator says so; None as the command ends it."""

    def __init__(
        self,
        replica: Replica,
        exchange: GradientExchange,
        channel: Channel[Batch],
        plan: Plan,
        settings: StepSettings,
        schedule: tuple[float, float],
        events: "queue.SimpleQueue[Event]",
        cpu_threads: int,
    ) -> None:
        super().__init__(f"drafter-{replica.rank}", events, replica.flat.device, cpu_threads)
        self.commands: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._replica, self._exchange, self._channel = replica, exchange, channel
        self._plan, self._settings, self._schedule = plan, settings, schedule

    def work(self) -> None:
        peak, warmup = self._schedule
        while (step := self.commands.get()) is not None:
            begin, waited = time.perf_counter(), self._channel.get_wait_s
            results = [
                run_pack(self._replica.drafter, self._replica.ends, self._channel.get(), self._settings)
                for _ in range(self._plan.share)
            ]
            result = sum(results[1:], start=results[0])
            lr = learning_rate(step, peak=peak, steps=self._plan.steps, warmup=warmup)
            norm = self._replica.update(self._exchange, result.weight_sum, lr)
            wait = self._channel.get_wait_s - waited
            busy = time.perf_counter() - begin - wait
            self._events.put(StepDone(self._replica.rank, step, result, lr, norm, busy, wait))

"""Every source of hidden states at work on a list of packs, with no drafter behind it."""

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from draftsmith.errors import PipelineError
from draftsmith.pipeline.channel import Channel, ChannelClosed
from draftsmith.pipeline.coordinator import STOP_SECONDS, Outcome
from draftsmith.pipeline.signals import StopRequest
from draftsmith.pipeline.workers import Worker
from draftsmith.target.sources import StateSource
from draftsmith.types import HiddenStates, Tokens


class Stopped(Exception):
    """The work was ended on request."""


class _Harvester(Worker):
    """Works on every n-th pack."""

    def __init__(
        self,
        rank: int,
        sources: Sequence[StateSource],
        packs: Sequence[Tokens],
        channel: Channel[HiddenStates],
        cpu_threads: int,
    ) -> None:
        super().__init__(f"target-{rank}", queue.SimpleQueue(), sources[rank].device, cpu_threads)
        self._source, self._packs, self._channel = sources[rank], packs, channel
        self._mine = range(rank, len(packs), len(sources))

    def failed(self, error: BaseException) -> None:
        error.add_note(self.name)
        self._channel.close(error)

    def work(self) -> None:
        with suppress(ChannelClosed):
            for number in self._mine:
                self._channel.put(number, self._source(self._packs[number]))


def harvest(
    sources: Sequence[StateSource],
    packs: Sequence[Tokens],
    consume: Callable[[int, HiddenStates], None],
    *,
    cpu_threads: int,
    stop: StopRequest,
) -> Outcome:
    """Give the states of each pack to `consume`, in order and in the calling thread, until all are done or a stop is asked for. Raises
    PipelineError with a worker's exception as its cause."""
    channel = Channel[HiddenStates](2 * len(sources))
    workers = [_Harvester(rank, sources, packs, channel, cpu_threads) for rank in range(len(sources))]
    for worker in workers:
        worker.start()
    # A source that hangs must not hold a stop.
    stop.wake = lambda: channel.close(Stopped())
    done = 0
    try:
        while done < len(packs) and not stop:
            consume(done, channel.get())
            done += 1
    except ChannelClosed as closed:
        cause = closed.__cause__
        if not isinstance(cause, Stopped):
            name = getattr(cause, "__notes__", ["a worker"])[-1]
            raise PipelineError(f"{name} failed: {type(cause).__name__}: {cause}") from cause
    finally:
        stop.wake = None
        channel.close(Stopped())
        deadline = time.monotonic() + STOP_SECONDS
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
    return Outcome(done, stop.signal_number, tuple(worker.name for worker in workers if worker.is_alive()))

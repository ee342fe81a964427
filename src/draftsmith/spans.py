"""What each thread spends its time on: seconds by name, counted always; and each span by itself while a profile is taken.

`with span("forward"):` counts for the thread it runs on, if that thread has `Spans`; elsewhere it does nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

_here = threading.local()


class Kept(NamedTuple):
    """One span. begin and end: of `time.perf_counter`, in seconds."""

    name: str
    begin: float
    end: float


@dataclass
class _Open:
    name: str
    begin: float
    inner_s: float = 0.0


class Spans:
    """One thread's counters, which others may read at any time.

    seconds: by name, each without the spans inside it, so that they add up to at most the wall. settle: waits for what the device
    still has to do; called at the ends of spans while a profile is taken, since CUDA kernels end after the call that launched them.
    """

    def __init__(self, thread: str, settle: Callable[[], None] | None = None) -> None:
        self.thread = thread
        self.seconds: dict[str, float] = {}
        self._settle = settle
        self._open: list[_Open] = []
        self._kept: list[Kept] | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, this thread's spans count here."""
        _here.spans = self
        try:
            yield
        finally:
            _here.spans = None

    def keep(self) -> None:
        """From now on keep every span by itself. Any thread may call this and `take`."""
        self._kept = []

    def take(self) -> list[Kept]:
        """The spans that ended since `keep`, and those under way as if they ended now; nothing is kept from here on."""
        kept, self._kept = self._kept or [], None
        now = time.perf_counter()
        return [*kept, *(Kept(one.name, one.begin, now) for one in [*self._open])]

    def enter(self, name: str) -> None:
        """Begin a span inside the one under way."""
        self._open.append(_Open(name, time.perf_counter()))

    def leave(self) -> None:
        """End the span that began last."""
        kept = self._kept  # another thread may take it meanwhile
        if kept is not None and self._settle is not None:
            self._settle()
        one, end = self._open.pop(), time.perf_counter()
        took = end - one.begin
        if kept is not None:
            kept.append(Kept(one.name, one.begin, end))
        self.seconds[one.name] = self.seconds.get(one.name, 0.0) + took - one.inner_s
        if self._open:
            self._open[-1].inner_s += took


@contextmanager
def span(name: str) -> Iterator[None]:
    """Count what runs inside under a name."""
    spans: Spans | None = getattr(_here, "spans", None)
    if spans is None:
        yield
        return
    spans.enter(name)
    try:
        yield
    finally:
        spans.leave()

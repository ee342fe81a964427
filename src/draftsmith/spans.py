"""What each thread spends its time on: seconds by name, counted always; and each span by itself while a profile is taken.

`with span("forward"):` counts for the thread it runs on, if that thread has `Spans`; elsewhere it does nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_here = threading.local()


class Kept(NamedTuple):
    """One span. begin and end: of `time.perf_counter`, in seconds."""

    name: str
    begin: float
    end: float


class Spans:
    """One thread's counters, which others may read at any time.

    seconds: by name, each without the spans inside it, so that they add up to at most the wall. kept: the spans of a profile, as they
    end; None while none is taken. settle: waits for what the device still has to do; called at the ends of spans while a profile is
    taken, since CUDA kernels end after the call that launched them.
    """

    def __init__(self, thread: str, settle: Callable[[], None] | None = None) -> None:
        self.thread = thread
        self.seconds: dict[str, float] = {}
        self.kept: list[Kept] | None = None
        self._settle = settle
        self._inner = 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, this thread's spans count here."""
        _here.spans = self
        try:
            yield
        finally:
            _here.spans = None

    def enter(self) -> float:
        """Begin a span; give back what this returns to `leave`."""
        outside, self._inner = self._inner, 0.0
        return outside

    def leave(self, name: str, begin: float, outside: float) -> None:
        """End the span that began at `begin`."""
        if self.kept is not None and self._settle is not None:
            self._settle()
        end = time.perf_counter()
        if self.kept is not None:
            self.kept.append(Kept(name, begin, end))
        self.seconds[name] = self.seconds.get(name, 0.0) + (end - begin) - self._inner
        self._inner = outside + (end - begin)


class span:
    """Counts what runs inside under a name."""

    __slots__ = ("_begin", "_name", "_outside", "_spans")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._spans: Spans | None = getattr(_here, "spans", None)
        if self._spans is not None:
            self._outside, self._begin = self._spans.enter(), time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        if self._spans is not None:
            self._spans.leave(self._name, self._begin, self._outside)

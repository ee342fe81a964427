"""The gate: threads work on torch together, or one compiles while all others stand outside.

A fair reader/writer protocol. Arrivals queue in order: a thread that wants to compile waits for those inside and holds up
those who come later, so neither side starves. Nobody may wait for another thread while inside (channels and barriers
are outside), so whoever waits here waits at most for one piece of work of each thread inside. The entry of a thread
that died is taken back by whoever waits for it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from draftsmith.spans import span

CHECK_SECONDS = 0.5


@dataclass
class GateMetrics:
    """exclusive_holds and exclusive_s: how often and how long one thread was alone; wait_s: seconds waited, by thread name;
    died_inside: holders that were found dead; longest_s: the longest exclusive hold."""

    exclusive_holds: int = 0
    exclusive_s: float = 0.0
    longest_s: float = 0.0
    died_inside: int = 0
    wait_s: dict[str, float] = field(default_factory=dict)

    @property
    def total_wait_s(self) -> float:
        """Seconds that all threads together waited to enter."""
        return sum(self.wait_s.values())


@dataclass
class _Hold:
    thread: threading.Thread
    depth: int = 1


class Gate:
    """Many threads in `shared()`, or one in `exclusive()`. Re-entrant per thread, but shared never becomes exclusive."""

    def __init__(self) -> None:
        self.metrics = GateMetrics()
        self._change = threading.Condition()
        self._queue: list[tuple[int, bool]] = []
        self._next_ticket = 0
        # By thread object: the number of a thread that died is soon given to another.
        self._inside: dict[threading.Thread, _Hold] = {}
        self._owner: _Hold | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside together with any number of others; never while someone is in `exclusive()`."""
        me = threading.current_thread()
        with self._change:
            if self._owner is not None and self._owner.thread is me:
                self._owner.depth += 1
                held = self._owner
            elif me in self._inside:
                held = self._inside[me]
                held.depth += 1
            else:
                self._wait_turn(me, exclusive=False)
                held = self._inside[me] = _Hold(me)
        try:
            yield
        finally:
            self._leave(held)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside alone. Raises RuntimeError when the thread is in `shared()`: it would wait for itself."""
        me = threading.current_thread()
        with self._change:
            if me in self._inside:
                raise RuntimeError(f"{me.name} asked to be alone while inside with others; leave shared() first")
            if self._owner is not None and self._owner.thread is me:
                self._owner.depth += 1
            else:
                self._wait_turn(me, exclusive=True)
                self._owner = _Hold(me)
                self.metrics.exclusive_holds += 1
            held = self._owner
        begin = time.perf_counter()
        try:
            yield
        finally:
            if held.depth == 1:
                seconds = time.perf_counter() - begin
                self.metrics.exclusive_s += seconds
                self.metrics.longest_s = max(self.metrics.longest_s, seconds)
            self._leave(held)

    def holders(self) -> list[str]:
        """Names of the threads inside, for people who wonder why one waits."""
        with self._change:
            return [hold.thread.name for hold in self._all_inside()]

    def _all_inside(self) -> list[_Hold]:
        return [*self._inside.values(), *([self._owner] if self._owner is not None else [])]

    def _may_enter(self, ticket: int, exclusive: bool) -> bool:
        if self._owner is not None:
            return False
        if exclusive:
            return not self._inside and self._queue[0][0] == ticket
        # First come, first served: a reader passes earlier readers, never an earlier compile.
        return not any(alone for number, alone in self._queue if number < ticket)

    def _wait_turn(self, me: threading.Thread, *, exclusive: bool) -> None:
        ticket = self._next_ticket
        self._next_ticket += 1
        place = (ticket, exclusive)
        self._queue.append(place)
        begin = time.perf_counter()
        try:
            if not self._may_enter(ticket, exclusive):
                with span("gate"):
                    self._wait_until_let_in(ticket, exclusive)
        finally:
            self._queue.remove(place)
            # Whoever comes next in the queue may be free to go now, also when this one gave up.
            self._change.notify_all()
        waited = time.perf_counter() - begin
        self.metrics.wait_s[me.name] = self.metrics.wait_s.get(me.name, 0.0) + waited

    def _wait_until_let_in(self, ticket: int, exclusive: bool) -> None:
        while not self._may_enter(ticket, exclusive):
            self._change.wait(CHECK_SECONDS)
            self._bury_the_dead()

    def _bury_the_dead(self) -> None:
        for thread in [t for t in self._inside if not t.is_alive()]:
            del self._inside[thread]
            self.metrics.died_inside += 1
        if self._owner is not None and not self._owner.thread.is_alive():
            self._owner = None
            self.metrics.died_inside += 1

    def _leave(self, held: _Hold) -> None:
        with self._change:
            held.depth -= 1
            if held.depth == 0:
                if self._owner is held:
                    self._owner = None
                else:
                    self._inside.pop(held.thread, None)
                self._change.notify_all()

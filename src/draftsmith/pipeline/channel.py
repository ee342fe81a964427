"""A bounded, closable channel that delivers items in order.

Producers put numbered items in any order; the consumer gets 0, 1, 2, … An item may wait inside at most `capacity` numbers
ahead of the consumer, so a fast producer is held back and order never deadlocks. Closing wakes everyone.
"""

import threading
import time
from typing import Generic, TypeVar

from draftsmith.spans import span

T = TypeVar("T")


class ChannelClosed(Exception):
    """The channel was closed while someone waited; the cause, if any, is chained."""


class Channel(Generic[T]):
    """One consumer, any number of producers. `put_wait_s` and `get_wait_s` count seconds spent blocked on each side."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.put_wait_s = 0.0
        self.get_wait_s = 0.0
        self._items: dict[int, T] = {}
        self._next = 0
        self._closed = False
        self._waiting_since: float | None = None
        self._error: BaseException | None = None
        self._change = threading.Condition()

    def put(self, number: int, item: T) -> None:
        """Hand over item `number`, waiting while it is `capacity` or more ahead of the consumer; raises ChannelClosed."""
        with self._change:
            start = time.perf_counter()
            with span("wait"):
                self._change.wait_for(lambda: self._closed or number < self._next + self.capacity)
            self.put_wait_s += time.perf_counter() - start
            self._raise_if_closed()
            self._items[number] = item
            self._change.notify_all()

    def get(self) -> T:
        """The next item in order, waiting for it; raises ChannelClosed, at once if the channel was closed with an error."""
        with self._change:
            self._waiting_since = start = time.perf_counter()
            with span("wait"):
                self._change.wait_for(lambda: self._closed or self._next in self._items)
            self._waiting_since = None
            self.get_wait_s += time.perf_counter() - start
            if self._error is not None or self._next not in self._items:
                self._raise_if_closed()
            item = self._items.pop(self._next)
            self._next += 1
            self._change.notify_all()
            return item

    def starved_s(self) -> float:
        """Seconds that the consumer has been waiting by now; 0 if it is not."""
        since = self._waiting_since
        return 0.0 if since is None else time.perf_counter() - since

    def close(self, error: BaseException | None = None) -> None:
        """End the channel and wake every waiter. Without an error, items already inside can still be read."""
        with self._change:
            if not self._closed:
                self._closed, self._error = True, error
            self._change.notify_all()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ChannelClosed("the channel is closed") from self._error

"""Who asks for an end: signals as requests that can be read at a good moment, and the process that sent them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT)


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

    previous = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number in previous:
            signal.signal(number, ask)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def record_senders(record: Callable[[int, int, int], None]) -> None:
    """From here on each SIGTERM and SIGINT first reaches `record(number, pid, uid)`, and then does what it would have done.

    Call it in the main thread before any other exists: a handler is not told who sent a signal, but a thread that waits for one is,
    and it gets every one only if all threads block them, which they inherit. Forked children are freed of that; a program they
    start in our place is not, and ends when its pipe closes or with SIGKILL.
    """

    def wait() -> None:
        while True:
            came = signal.sigwaitinfo(ENDING)
            record(came.si_signo, came.si_pid, came.si_uid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            signal.raise_signal(came.si_signo)
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            # Python runs handlers in the main thread, which may be waiting in a call that only a signal of its own interrupts.
            signal.pthread_kill(main, signal.SIGURG)

    # Python's resource tracker, which progress bars and shared memory start, unblocks both signals in whichever thread starts it.
    resource_tracker.ensure_running()
    main = threading.get_ident()
    signal.signal(signal.SIGURG, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING))
    threading.Thread(target=wait, name="signals", daemon=True).start()

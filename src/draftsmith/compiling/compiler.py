"""The only caller of `torch.compile`: compiled functions that never compile while another thread is inside torch.

After warm-up the process is *sealed*: a call that would need a new graph raises before it traces anything. The caller then
steps out, waits until it is alone, compiles, and lets the others in again. So tracing and compiling flags, which are
global to the process, never leak into another thread's work, whatever the release of torch.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import torch
from torch._dynamo.callback import callback_handler

from draftsmith.compiling.gate import Gate
from draftsmith.compiling.settings import apply_settings
from draftsmith.errors import CompileError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
SEALED = "fail_on_recompile"
REFUSED = "Detected recompile when torch.compile stance is"
log = logging.getLogger(__name__)


@dataclass
class CompileMetrics:
    """planned and unplanned: pieces of work that compiled graphs; escaped: compilations that began while their
    thread was not alone (must stay 0); seconds: time spent alone for compiling."""

    planned: int = 0
    unplanned: int = 0
    escaped: int = 0
    seconds: float = 0.0


class Compiler:
    """One per run. `enabled=False` leaves functions as they are and the gate without anyone who wants to be alone."""

    def __init__(self, *, enabled: bool, graphs: int = 1, unplanned: Literal["error", "warn"] = "warn") -> None:
        self.enabled, self.gate, self.metrics = enabled, Gate(), CompileMetrics()
        self._unplanned = unplanned
        self._alone = self._began = False
        if enabled:
            apply_settings(graphs)

    def __enter__(self) -> "Compiler":
        if self.enabled:
            callback_handler.register_start_callback(self._compilation_began)
        return self

    def __exit__(self, *_details: object) -> None:
        if self.enabled:
            callback_handler.remove_start_callback(self._compilation_began)
            torch.compiler.set_stance("default")

    def compiled(self, function: F) -> F:
        """`function` compiled for fixed shapes, one graph each; shared by all replicas that call it."""
        return cast(F, torch.compile(function, dynamic=False)) if self.enabled else function

    def seal(self) -> None:
        """From now on a call that needs a new graph is unplanned. Call it once every worker is warm."""
        if self.enabled:
            torch.compiler.set_stance(SEALED)

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Alone, with compilation allowed: for warm-up."""
        with self._compiling():
            yield
            self.metrics.planned += self._began

    def run(self, work: Callable[[], T], unforeseen: Callable[[], None] = lambda: None) -> T:
        """Do `work` together with the other threads; if it needs a new graph, once more from its start, alone.

        `work` must leave no trace when its first compiled call raises; `unforeseen` is called before it is tried again, which may take
        minutes. Raises CompileError for an unplanned graph where the
        run was told to stop at one.
        """
        if not self.enabled:
            with self.gate.shared():
                return work()
        try:
            with self.gate.shared():
                return work()
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            reason = " ".join(str(error).partition("guard failure(s):")[2].split()) or "no graph for this call yet"
        if self._unplanned == "error":
            raise CompileError(
                f"{threading.current_thread().name} needs a graph that was not planned ({reason}); "
                "add its shape to data.buckets, or set compile.unplanned=warn"
            )
        unforeseen()
        with self._compiling():
            result = work()
            # Another thread may have compiled the same graph while this one waited for its turn.
            if self._began:
                self.metrics.unplanned += 1
                log.warning("unplanned compilation on %s: %s", threading.current_thread().name, reason)
            return result

    def account(self) -> dict[str, object]:
        """What compiled, how long one thread was alone, and who waited for it; seconds."""
        gate = self.gate.metrics
        return {
            "planned": self.metrics.planned,
            "unplanned": self.metrics.unplanned,
            "escaped": self.metrics.escaped,
            "compile_s": round(self.metrics.seconds, 3),
            "gate_holds": gate.exclusive_holds,
            "gate_longest_s": round(gate.longest_s, 3),
            "gate_wait_s": {name: round(waited, 3) for name, waited in sorted(gate.wait_s.items())},
        }

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        with self.gate.exclusive():
            begin = time.perf_counter()
            before = _stance()
            self._alone, self._began = True, False
            if self.enabled:
                torch.compiler.set_stance("default")
            try:
                yield
            finally:
                if self.enabled:
                    torch.compiler.set_stance(before)
                self._alone = False
                self.metrics.seconds += time.perf_counter() - begin

    def _compilation_began(self, *_details: object) -> None:
        # A CUDA backward compiles in autograd's own thread, while the one that waits for it is alone in the gate.
        self._began = True
        if not self._alone:
            self.metrics.escaped += 1
            log.error(
                "%s compiles outside the gate: other threads may have computed wrong numbers meanwhile; report this",
                threading.current_thread().name,
            )


def _stance() -> str:
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance

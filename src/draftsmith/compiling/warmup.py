"""Warm-up: every worker runs each of its shapes once before the pipeline moves, one worker at a time."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from draftsmith.compiling.compiler import Compiler


@dataclass(frozen=True)
class Warmed:
    """One worker ran one shape for the first time. seconds: including compilation, excluding the wait for its turn."""

    worker: str
    shape: str
    seconds: float


def warm_up(
    compiler: Compiler, worker: str, shapes: Iterable[tuple[str, Callable[[], object]]], report: Callable[[Warmed], None]
) -> None:
    """Run each named piece of work alone, forward and backward, and report how long it took.

    The first worker pays for compiling; later ones on the same kind of device find its graphs. The optimizer is not compiled,
    so it has nothing to warm.
    """
    for shape, work in shapes:
        with compiler.planned():
            begin = time.perf_counter()
            work()
            seconds = time.perf_counter() - begin
        report(Warmed(worker, shape, seconds))


def seconds_left(warmed: Sequence[Warmed], *, shapes: int, workers: int, guess: float) -> float:
    """Estimated seconds until every worker has run every shape.

    guess: seconds to compile one shape, used until one has been measured. Who meets a shape first pays for compiling it.
    """
    first = {w.shape: w.seconds for w in reversed(warmed)}
    again = sum(w.seconds for w in warmed) - sum(first.values())
    repeats = len(warmed) - len(first)
    cold = sum(first.values()) / len(first) if first else guess
    warm = again / repeats if repeats else 0.0
    unmet = shapes - len(first)
    return unmet * cold + (shapes * workers - len(warmed) - unmet) * warm


COMPILE_SECONDS = {"cpu": 25.0, "cuda": 90.0}
SPEED_UP = {"cpu": 1.25, "cuda": 1.6}


def worth_compiling(*, steps: int, step_seconds: float, graphs: int, device: str) -> tuple[bool, str]:
    """Whether compiling pays for itself twice over, and the reckoning for people.

    step_seconds: one eager step, measured. Compile time and gain are rough figures per kind of device (docs/compile-safety.md).
    """
    cost = graphs * COMPILE_SECONDS[device]
    gain = steps * step_seconds * (1 - 1 / SPEED_UP[device])
    told = f"warm-up about {cost:.0f} s for {graphs} graph(s), expected saving {gain:.0f} s over {steps} steps of {step_seconds:.3f} s"
    return gain > 2 * cost, told

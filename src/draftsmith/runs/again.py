"""Start a trainer again after it failed, as long as each start comes further than the one before. Runs below the supervisor.

python -m draftsmith.runs.again 3 -- python -m draftsmith train --config run.yaml
"""

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from draftsmith.runs.shim import ATTEMPT, read_json

# Done, a wrong command, and ends that somebody asked for: starting again would change nothing, or act against a wish.
FINAL = (0, 2, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)
WAIT_S = 0.3


def resuming(argv: Sequence[str]) -> list[str]:
    """The same draftsmith command, going on from its newest whole checkpoint."""
    verb = next((place for place in range(3, len(argv)) if not argv[place].startswith("-")), len(argv))
    trains = argv[verb : verb + 1] == ["train"] and not any(word.split("=")[0] == "--resume" for word in argv)
    # Right behind the verb: later words may stand behind a `--`.
    return [*argv[: verb + 1], "--resume", "latest", *argv[verb + 1 :]] if trains else list(argv)


def _wait(child: "subprocess.Popen[bytes]", asked: Callable[[], int]) -> int:
    """How it ended. A request is passed on once, whenever it came: a second one would make the trainer end without saving."""
    told = False
    while True:
        if asked() and not told:
            told = True
            child.send_signal(asked())
        with suppress(subprocess.TimeoutExpired):
            return child.wait(WAIT_S)


def keep_going(argv: Sequence[str], restarts: int, step_reached: Callable[[], int], say: Callable[[str], None]) -> int:
    """Run `argv` up to 1 + `restarts` times; returns how it ended last, negative for a signal.

    After a failure it starts again only if `step_reached()`, the trainer's own word, is larger than after any start before.
    """
    words, furthest, stopping = list(argv), 0, 0

    def ask(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = stopping or number

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    for left in range(restarts, -1, -1):
        if stopping:
            return 128 + stopping
        ended, step = _wait(subprocess.Popen(words), lambda: stopping), step_reached()
        if stopping or ended in FINAL:
            return ended
        told = f"exit code {ended}" if ended >= 0 else signal.Signals(-ended).name
        if step <= furthest:
            say(f"again: it ended with {told} at step {step}, no further than before; not started again")
            return ended
        if not left:
            say(f"again: it ended with {told} at step {step}; that was the last of {restarts} restarts")
            return ended
        say(f"again: it ended with {told} at step {step}; restart {restarts - left + 1} of {restarts}")
        words, furthest = resuming(argv), step
    raise AssertionError("the last round returns")


def main(words: Sequence[str]) -> int:
    """The command named above. Ends as the trainer did, by its signal too, so that the supervisor sees the cause."""

    def step_reached() -> int:
        step = read_json(str(Path(os.environ.get(ATTEMPT, ".")) / "phase.json")).get("step")
        return step if isinstance(step, int) else 0

    def say(line: str) -> None:
        print(line, flush=True)

    ended = keep_going(words[2:], int(words[0]), step_reached, say)
    if ended < 0:
        faulthandler.disable()
        signal.signal(-ended, signal.SIG_DFL) if -ended not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -ended)
    return ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

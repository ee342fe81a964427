"""The command line's verbs for runs: launch, status, why, logs, stop, resume, list. Each calls one function and prints.

A run is named by its folder, `runs/first`, or `HOST:folder` for a host of the hosts file.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.errors import RunError, UsageError
from draftsmith.runs import launch as launching
from draftsmith.runs.hosts import find_host
from draftsmith.runs.transport import Host
from draftsmith.runs.verdict import Verdict

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or HOST:folder.")]
UntilOption = Annotated[launching.Level, typer.Option(help="Return once the trainer has come this far.")]
GraceOption = Annotated[float, typer.Option(help="Seconds the trainer has after a stop, for a step and a save.")]
WaitOption = Annotated[float, typer.Option(help="Seconds to wait at most.")]
MODULE = ("-m", "draftsmith")


def _say(line: str) -> None:
    print(line, flush=True)


def _where(run: str) -> tuple[Host, str]:
    name, colon, folder = run.partition(":")
    if colon and "/" not in name:
        host = find_host(name)
        # Relative to where its commands start, so that `run.dir=runs/first` and `HOST:runs/first` are the same folder.
        return host, os.path.join(host.folder, folder) if host.folder else folder
    return Host(), os.path.abspath(run)


def _exit(verdict: Verdict) -> typer.Exit:
    return typer.Exit(0 if verdict.alive or verdict.code == 0 else 1)


def _show(run: str, verdict: Verdict, seen: dict[str, Any]) -> None:
    _say(f"{run}: {verdict.line()}")
    for line in verdict.evidence:
        _say(f"    {line}")
    if seen.get("attempt"):
        _say(f"    attempt {seen['attempt']}")
    if verdict.advice:
        _say(f"next: {verdict.advice}")


def launch(
    context: typer.Context,
    run: Annotated[str, typer.Option(help="Run folder, or HOST:folder.")],
    until: UntilOption = "step",
    wait: WaitOption = 3600.0,
    grace: GraceOption = 120.0,
) -> None:
    """Start a draftsmith command under a supervisor that outlives this terminal, and wait until it trains.

    Example: `draftsmith launch --run runs/first -- train --config examples/qwen3-8b.yaml run.dir=runs/first`
    """
    host, folder = _where(run)
    if not context.args:
        raise UsageError("nothing to launch; put a draftsmith command after --, for example: -- train --config run.yaml")
    cwd = {"cwd": os.getcwd()} if host.is_here else {"cwd": host.folder} if host.folder else {}
    argv = [sys.executable if host.is_here else host.python, *MODULE, *context.args]
    verdict = launching.launch(host, folder, argv, until=until, wait_s=wait, say=_say, grace_s=grace, **cwd)
    if until != "start":
        _say(verdict.line())


def status(
    run: RunArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until the run has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Say in one line what a run does. Exit code 0 if it lives or finished, else 1.

    Example: `draftsmith status runs/first --watch`
    """
    host, folder = _where(run)
    while True:
        verdict, seen = launching.look_closely(host, folder)
        if as_json:
            _say(json.dumps({**asdict(verdict), "run": run, "phase": seen.get("phase", {}), "attempt": seen.get("attempt")}))
        else:
            _say(f"{run}: {verdict.line()}")
        if not watch or not (verdict.alive or verdict.name == "unreachable"):
            break
        time.sleep(2)
    raise _exit(verdict)


def why(run: RunArgument) -> None:
    """Tell the verdict on a run with its evidence and what to try next.

    Example: `draftsmith why runs/first`
    """
    host, folder = _where(run)
    verdict, seen = launching.look_closely(host, folder)
    _show(run, verdict, seen)
    raise _exit(verdict)


def logs(run: RunArgument, follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends.")] = False) -> None:
    """Print the log of a run's latest attempt.

    Example: `draftsmith logs -f runs/first`
    """
    host, folder = _where(run)
    for piece in launching.log_chunks(host, folder, follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def stop(run: RunArgument, wait: Annotated[float, typer.Option(help="Seconds to wait beyond the grace.")] = 30.0) -> None:
    """End a run after it has saved; kills it when its grace is over, and confirms that nothing of it is left.

    Example: `draftsmith stop runs/first`
    """
    host, folder = _where(run)
    verdict = launching.stop(host, folder, wait_s=wait, say=_say)
    _say(f"{run}: {verdict.line()}")


def resume(run: RunArgument, until: UntilOption = "step", wait: WaitOption = 3600.0) -> None:
    """Start a run again as it was launched, from the same folder and with the same grace, from its newest whole checkpoint.

    Example: `draftsmith resume runs/first`
    """
    host, folder = _where(run)
    verdict, seen = launching.look_closely(host, folder)
    if verdict.alive or not seen:
        raise RunError(f"{run} cannot be resumed: {verdict.line()}. {verdict.advice}")
    record = seen.get("record", {})
    argv = list(record.get("argv", []))
    if argv[1:3] != list(MODULE):
        raise RunError(f"{run} was not launched by `draftsmith launch`, so there is nothing to start again")
    if any("***" in word for word in argv):
        raise RunError(f"{run} was launched with a secret among its words, which no record keeps; launch it again yourself")
    if argv[3] == "train" and not any(word.split("=")[0] == "--resume" for word in argv):
        argv += ["--resume", "latest"]
    kept = {"cwd": record["cwd"], "grace_s": record["grace_s"]}
    _say(launching.launch(host, folder, argv, until=until, wait_s=wait, say=_say, **kept).line())


def list_runs(folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs")) -> None:
    """One line for each launched run below a folder.

    Example: `draftsmith list runs`
    """
    found = sorted({path.parent.parent for path in folder.glob("**/attempts/0001")})
    for run in found:
        _say(f"{run}: {launching.look(Host(), str(run.resolve())).line()}")
    if not found:
        _say(f"no launched run below {folder}")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(launch)
    for verb in (status, why, logs, stop, resume):
        app.command()(verb)
    app.command("list")(list_runs)

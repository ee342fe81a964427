"""The command line's verbs for runs and the hosts they live on. Each calls one function and prints.

A run is named by its folder, `runs/first`, or `HOST:folder` for a host of the hosts file.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from draftsmith.errors import RunError, UsageError
from draftsmith.runs import again
from draftsmith.runs import launch as launching
from draftsmith.runs.hosts import find_host
from draftsmith.runs.show import colour, figures, shown
from draftsmith.runs.sync import sync
from draftsmith.runs.transport import Host, Unreachable, ask
from draftsmith.runs.verdict import Verdict

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or HOST:folder.")]
UntilOption = Annotated[launching.Level, typer.Option(help="Return once the trainer has come this far.")]
GraceOption = Annotated[float, typer.Option(help="Seconds the trainer has after a stop, for a step and a save.")]
WaitOption = Annotated[float, typer.Option(help="Seconds to wait at most.")]
MODULE, AGAIN = ["-m", "draftsmith"], ["-m", again.__name__]
DOCTOR_S = 300.0
MARKS = {"good": ("ok", "green"), "warn": ("!!", "yellow"), "bad": ("NO", "red")}


def _say(line: str) -> None:
    print(shown(line), flush=True)


def _where(run: str) -> tuple[Host, str]:
    name, colon, folder = run.partition(":")
    if colon and "/" not in name:
        host = find_host(name)
        # Relative to where its commands start, so that `run.dir=runs/first` and `HOST:runs/first` are the same folder.
        return host, os.path.join(host.folder, folder) if host.folder else folder
    return Host(), os.path.abspath(run)


def _exit(verdict: Verdict) -> typer.Exit:
    return typer.Exit(0 if verdict.alive or verdict.code == 0 else 1)


def _title(run: str, verdict: Verdict) -> Text:
    line = shown(verdict.line())
    return Text(f"{run}: ").append(verdict.name, style=f"bold {colour(verdict)}").append(line[len(verdict.name) :])


def _screen(run: str, verdict: Verdict, seen: dict[str, Any]) -> Text:
    rows = [f"\n    {name:<10}{told}" for name, told in figures(seen).items()]
    return _title(run, verdict).append("".join(rows))


def _print(text: Text) -> None:
    # Long paths stay whole, so that they can be copied.
    Console(highlight=False, soft_wrap=True).print(text)


def _show(run: str, verdict: Verdict, seen: dict[str, Any]) -> None:
    _print(_title(run, verdict))
    for line in verdict.evidence:
        _say(f"    {line}")
    if seen.get("attempt"):
        _say(f"    attempt {seen['attempt']}")
    if verdict.advice:
        _say(f"next: {verdict.advice}")


def _command(argv: list[str], restarts: int) -> list[str]:
    """The trainer's command, below the one that starts it again if asked to."""
    return [argv[0], *AGAIN, str(restarts), "--", *argv] if restarts else argv


def _bare(argv: list[str]) -> tuple[list[str], int]:
    """The other way round: the trainer's own command, and how often it may be started again."""
    if argv[1:3] == AGAIN:
        return argv[5:], int(argv[3])
    return argv, 0


def launch(
    context: typer.Context,
    run: Annotated[str, typer.Option(help="Run folder, or HOST:folder.")],
    until: UntilOption = "step",
    wait: WaitOption = 3600.0,
    grace: GraceOption = 120.0,
    restart: Annotated[
        Literal["never", "on-failure"], typer.Option(help="Start it again after a failure, while each start comes further.")
    ] = "never",
    most: Annotated[int, typer.Option("--max", min=1, help="Restarts at most.")] = 3,
    bring: Annotated[
        bool, typer.Option("--sync", help="First bring the commit that stands here to the host's folder.")
    ] = False,
) -> None:
    """Start a draftsmith command under a supervisor that outlives this terminal, and wait until it trains.

    Example: `draftsmith launch --run runs/first -- train --config examples/qwen3-8b.yaml run.dir=runs/first`
    """
    host, folder = _where(run)
    if not context.args:
        raise UsageError("nothing to launch; put a draftsmith command after --, for example: -- train --config run.yaml")
    cwd = {"cwd": os.getcwd()} if host.is_here else {"cwd": host.folder} if host.folder else {}
    argv = [sys.executable if host.is_here else host.python, *MODULE, *context.args]
    if bring:
        _say(f"{host.folder} on {host.name} stands at commit {sync(host, Path.cwd())}")
    argv = _command(argv, most if restart == "on-failure" else 0)
    verdict = launching.launch(host, folder, argv, until=until, wait_s=wait, say=_say, grace_s=grace, **cwd)
    if until != "start":
        _say(verdict.line())


def status(
    run: RunArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until the run has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Say on one screen what a run does. Exit code 0 if it lives or finished, else 1.

    Example: `draftsmith status runs/first --watch`
    """
    host, folder = _where(run)
    console = Console(highlight=False)
    # On a terminal the screen is drawn over; elsewhere each look stands below the last.
    live = Live(console=console, auto_refresh=False) if watch and not as_json and console.is_terminal else None
    with live or nullcontext():
        while True:
            verdict, seen = launching.look_closely(host, folder)
            if as_json:
                _say(
                    json.dumps({**asdict(verdict), "run": run, "phase": seen.get("phase", {}), "attempt": seen.get("attempt")})
                )
            elif live is not None:
                live.update(_screen(run, verdict, seen), refresh=True)
            else:
                _print(_screen(run, verdict, seen))
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
    argv, restarts = _bare(list(record.get("argv", [])))
    if argv[1:3] != MODULE:
        raise RunError(f"{run} was not launched by `draftsmith launch`, so there is nothing to start again")
    if any("***" in word for word in argv):
        raise RunError(f"{run} was launched with a secret among its words, which no record keeps; launch it again yourself")
    argv = _command(again.resuming(argv), restarts)
    kept = {"cwd": record["cwd"], "grace_s": record["grace_s"]}
    _say(launching.launch(host, folder, argv, until=until, wait_s=wait, say=_say, **kept).line())


def list_runs(folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs")) -> None:
    """One line for each launched run below a folder.

    Example: `draftsmith list runs`
    """
    found = launching.find_runs(folder)
    for run in found:
        _print(_title(shown(run), launching.look(Host(), str(run.resolve()))))
    if not found:
        _say(f"no launched run below {folder}")


def doctor(
    host: Annotated[
        str, typer.Argument(metavar="[HOST]", help="A host of the hosts file; this machine if left out.")
    ] = "local",
    folder: Annotated[str, typer.Option(help="Where runs will live there.")] = ".",
) -> None:
    """Check whether a host is fit for runs: python, torch, GPUs, disk, limits, leftovers, clock. Exit code 1 if something is bad.

    Example: `draftsmith doctor gpu`
    """
    place = find_host(host)
    where = os.path.join(place.folder, folder) if place.folder else folder
    try:
        rows = ask(place, [], {"folder": where, "wall": time.time()}, timeout=DOCTOR_S, tool="doctor.py")["rows"]
    except Unreachable as error:
        raise RunError(f"{place.name} cannot be examined: {error}") from error
    for row in rows:
        mark, style = MARKS[row["level"]]
        _print(Text(f"{mark} ", style=style).append(f"{row['name']:<14}{row['told']}", style="default"))
        if row["cure"]:
            _say(f"   {'':<14}-> {row['cure']}")
    bad = sum(row["level"] == "bad" for row in rows)
    if bad:
        raise RunError(f"{place.name} is not fit yet: {bad} of {len(rows)} findings are bad")


def clean(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what was shown.")] = False,
) -> None:
    """Show what a dead run left behind and is proven to be its own: processes and half-written files. Removes it with --yes.

    Example: `draftsmith clean runs/first --yes`
    """
    host, folder = _where(run)
    try:
        found = ask(host, [], {"run": folder, "remove": yes}, tool="clean.py")
    except Unreachable as error:
        raise RunError(f"{host.name} cannot be reached: {error}") from error
    for process in found["processes"]:
        _say(f"process {process['pid']}")
    for file in found["files"]:
        _say(f"{file['path']} ({file['bytes']:,} bytes)")
    if not found["processes"] and not found["files"]:
        _say(f"{run}: nothing was left behind")
    elif found["removed"]:
        _say("ended and removed")
    else:
        _say("nothing was touched; add --yes to end and remove these")


def dashboard(
    folder: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8123,
) -> None:
    """Show the runs below a folder, live, on a page for this machine's browsers. Read-only.

    Example: `draftsmith dashboard runs`, and from elsewhere `ssh -L 8123:localhost:8123 gpu-box`
    """
    from draftsmith.runs.dashboard import serve

    serve(folder, port, lambda url: _say(f"{url} shows the runs below {folder}; Ctrl-C ends it"))


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(launch)
    for verb in (status, why, logs, stop, resume, doctor, clean, dashboard):
        app.command()(verb)
    app.command("list")(list_runs)

"""The command line: verbs that parse, call one library function, and turn errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 usage, 130/143 stopped on request after saving.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftsmith import __version__
from draftsmith.errors import DraftsmithError, PipelineError
from draftsmith.pipeline.signals import record_senders
from draftsmith.runs import verbs
from draftsmith.runs.reporter import RunReporter

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train, check and export draft models for speculative decoding, in one process.",
)

TargetOption = Annotated[str, typer.Option(help="Hugging Face folder or id, or a .gguf file.")]
DrafterOption = Annotated[Path, typer.Option(help="Exported drafter or checkpoint folder.")]
DtypeOption = Annotated[Literal["fp32", "bf16"], typer.Option(help="Compute type of target and drafter.")]


def _say(line: str) -> None:
    # A reader that went away must not stop a run.
    with suppress(OSError):
        print(line, flush=True)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the whole traceback of an error.")] = False,
) -> None:
    if version:
        _say(__version__)
        raise typer.Exit
    global _show_traceback  # noqa: PLW0603 - read once, when the process ends
    _show_traceback = traceback


_show_traceback = False


class _Stuck(Exception):
    """The work is done and saved, but a worker's thread will not end."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where everything goes; an interrupted demo goes on from there.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Build a small target, train a drafter for it, check it, export it. Needs nothing but this machine.

    Example: `draftsmith demo`
    """
    from draftsmith.demo.job import run_demo

    raise typer.Exit(_exit_code(run_demo(folder, _say)))


@app.command()
def train(
    config: Annotated[Path, typer.Option("--config", help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Override single keys.")] = None,
    resume: Annotated[str | None, typer.Option(help="`latest`, or a checkpoint-N folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop.")] = False,
) -> None:
    """Train a drafter.

    Example: `draftsmith train --config examples/qwen3-8b.yaml train.lr=3e-4 run.dir=runs/first`
    """
    from draftsmith import build
    from draftsmith.config import load_config

    settings = load_config(config, overrides)
    if dry_run:
        for line in build.resolve(settings).describe():
            _say(line)
        return
    outcome = build.train(settings, resume=resume, say=_say)
    if outcome.signal_number is not None:
        _say(f"stopped on request at step {outcome.step}; saved in {settings.run.dir}. Go on with --resume latest")
    else:
        _say(f"done: {outcome.step} steps, drafter in {settings.run.dir}/checkpoint-{outcome.step}")
    code = _exit_code(outcome.signal_number)
    if outcome.stuck:
        raise _Stuck(code)
    raise typer.Exit(code)


@app.command()
def evaluate(
    target: TargetOption,
    drafter: DrafterOption,
    prompts: Annotated[Path, typer.Option(help="JSONL with `messages` or `text`.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts to decode.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    dtype: DtypeOption = "fp32",
    device: Annotated[str, typer.Option(help="`auto`, `cpu` or `cuda:N`.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder whose training curves go into the report.")] = None,
) -> None:
    """Measure tau, identity with plain greedy decoding, and both speeds.

    Example: `draftsmith evaluate --target runs/demo/target --drafter runs/demo/drafter --prompts runs/demo/held-out.jsonl`
    """
    import json

    from draftsmith import build

    pair = build.load_pair(target, drafter, dtype=dtype, device=device)
    report = build.evaluate(*pair, prompts, count=count, max_new_tokens=max_new_tokens, out=out, run=run)
    _say(json.dumps(report, indent=2))


@app.command()
def generate(
    target: TargetOption,
    drafter: DrafterOption,
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, the fewest that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Only so many of the likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the drawn tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given more than once.")] = None,
    dtype: DtypeOption = "fp32",
    device: Annotated[str, typer.Option(help="`auto`, `cpu` or `cuda:N`.")] = "auto",
) -> None:
    """Answer one prompt by speculative decoding, as it comes: what the target alone would say, in fewer passes.

    Example: `draftsmith generate --target runs/demo/target --drafter runs/demo/drafter "Reverse this list: cat, dog, owl, bee"`
    """
    from draftsmith import build
    from draftsmith.decode.acceptance import Sampling

    sampling = Sampling(temperature, top_p, top_k, seed) if temperature > 0 else None
    _, speculator = build.load_pair(target, drafter, dtype=dtype, device=device)

    def show(text: str) -> None:
        print(text, end="", flush=True)

    _, decoded = build.generate(speculator, prompt, max_new_tokens, sampling=sampling, stops=stop or (), show=show)
    _say("")
    print(f"[{len(decoded.ids)} tokens in {decoded.target_passes} target passes, tau {decoded.tau:.2f}]", file=sys.stderr)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint-N folder, or a run folder (its newest whole checkpoint).")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    format: Annotated[
        Literal["dflash", "speculators"], typer.Option(help="dflash (also vLLM, SGLang) or speculators.")
    ] = "dflash",
    dtype: DtypeOption = "bf16",
    target: Annotated[str | None, typer.Option(help="The target; needed for speculators.")] = None,
) -> None:
    """Write a trained drafter in a public format.

    Example: `draftsmith export runs/demo/train runs/demo/drafter --format dflash`
    """
    from draftsmith import build

    build.export(checkpoint, out, format=format, dtype=dtype, target=target)
    _say(f"exported to {out}")


data_app = typer.Typer(no_args_is_help=True, help="Look at training data.")


@data_app.command("inspect")
def inspect_data(
    source: Annotated[str, typer.Argument(help="A .jsonl, .json or .parquet file, a saved dataset, or hf:NAME:SPLIT.")],
    target: TargetOption,
    longest: Annotated[int, typer.Option(min=2, help="Tokens kept of a sample; the largest bucket.")] = 3072,
    show: Annotated[int, typer.Option(min=0, help="Samples shown whole, and reasons of dropped rows.")] = 3,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows read at most.")] = None,
    thinking: Annotated[bool | None, typer.Option(help="What the template is told as enable_thinking.")] = None,
) -> None:
    """Show what a training file teaches: lengths, what is dropped and why, and chats with the supervised tokens marked.

    Example: `draftsmith data inspect chats.jsonl --target Qwen/Qwen3-8B`
    """
    from rich.console import Console
    from rich.text import Text

    from draftsmith import build
    from draftsmith.data.inspect import histogram

    options = {} if thinking is None else {"enable_thinking": thinking}
    look = build.look_at_data(target, source, longest=longest, show=show, limit=limit, options=options)
    console = Console(highlight=False, soft_wrap=True)
    for name, pieces in look.shown:
        console.print(Text(name, style="bold"))
        text = Text()
        for piece in pieces:
            # Brackets too, so that a file or a person without colours sees the same.
            text.append(f"⟦{piece.text}⟧" if piece.supervised else piece.text, style="green" if piece.supervised else "dim")
        console.print(text, end="\n\n")
    for name, reason in look.dropped:
        _say(f"dropped {name}: {reason}")
    for title, values in (("tokens", look.tokens), ("supervised tokens", look.supervised)):
        _say(f"{title} of {len(values)} samples")
        for line in histogram(values):
            _say(f"  {line}")
    _say(look.counts.line())


app.add_typer(data_app, name="data")
verbs.register(app)


def _exit_code(signal_number: int | None) -> int:
    return 0 if signal_number is None else 128 + signal_number


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with the codes named above."""
    reporter = RunReporter.from_environment()
    reporter.phase("interpreter")
    if reporter.supervised:
        record_senders(reporter.signalled)
    code, stuck = _run(arguments)
    reporter.ended(code)
    if stuck:
        # Even if a worker is stuck in foreign code; everything worth keeping is already on disk.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str] | None) -> tuple[int, bool]:
    """The exit code, and whether a thread may be left that does not end."""
    try:
        code: Any = app(args=arguments, standalone_mode=False)
    except _Stuck as ended:
        return ended.code, True
    except DraftsmithError as error:
        if _show_traceback:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        print(f"error: {error}{notes}", file=sys.stderr)
        if isinstance(error, PipelineError):
            print("run again as `draftsmith --traceback …` to see where", file=sys.stderr)
        return error.exit_code, isinstance(error, PipelineError)
    except KeyboardInterrupt:
        print("interrupted; nothing was left half-written", file=sys.stderr)
        return 130, False
    except Exception as error:
        show = getattr(error, "show", None)
        if show is not None:  # typer's usage errors know how to show themselves
            show()
            return 2, False
        if _show_traceback:
            raise
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        print("this was not foreseen; run again as `draftsmith --traceback …` to see where", file=sys.stderr)
        return 1, False
    return (code if isinstance(code, int) else 0), False

"""The command line: verbs that parse, call one library function, and turn errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 usage, 130/143 stopped on request after saving.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftsmith import __version__, making
from draftsmith.errors import DraftsmithError, PipelineError
from draftsmith.making import DtypeOption, Stuck, TargetOption, exit_code, say
from draftsmith.pipeline.signals import record_senders
from draftsmith.runs import verbs
from draftsmith.runs.reporter import RunReporter

if TYPE_CHECKING:
    from draftsmith.decode.speculate import Decoded

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train, check and export draft models for speculative decoding, in one process.",
)

DrafterOption = Annotated[Path, typer.Option(help="Exported drafter or checkpoint folder.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the whole traceback of an error.")] = False,
) -> None:
    if version:
        say(__version__)
        raise typer.Exit
    global _show_traceback  # noqa: PLW0603 - read once, when the process ends
    _show_traceback = traceback


_show_traceback = False


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

    raise typer.Exit(exit_code(run_demo(folder, say)))


@app.command()
def train(
    config: Annotated[Path, typer.Option("--config", help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Override single keys.")] = None,
    resume: Annotated[str | None, typer.Option(help="`latest`, or a checkpoint-N folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop.")] = False,
    profile: Annotated[
        int, typer.Option(min=0, metavar="N", help="Profile N steps: a table, and a Chrome trace in the run's folder.")
    ] = 0,
) -> None:
    """Train a drafter.

    Example: `draftsmith train --config examples/qwen3-8b.yaml train.lr=3e-4 run.dir=runs/first`
    """
    from draftsmith import build
    from draftsmith.config import load_config

    settings = load_config(config, overrides)
    if dry_run:
        for line in build.resolve(settings).describe():
            say(line)
        return
    outcome = build.train(settings, resume=resume, say=say, profile_steps=profile)
    if outcome.signal_number is not None:
        say(f"stopped on request at step {outcome.step}; saved in {settings.run.dir}. Go on with --resume latest")
    else:
        say(f"done: {outcome.step} steps, drafter in {settings.run.dir}/checkpoint-{outcome.step}")
    code = exit_code(outcome.signal_number)
    if outcome.stuck:
        raise Stuck(code)
    raise typer.Exit(code)


@app.command()
def evaluate(
    target: TargetOption,
    drafter: DrafterOption,
    prompts: Annotated[
        list[str],
        typer.Option(
            help="A file or dataset with `messages` or `text`, or one of gsm8k, math500, humaneval, mbpp, mt-bench from the hub; may be "
            "given more than once."
        ),
    ],
    count: Annotated[int, typer.Option(min=1, help="Prompts to decode, of each source.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    dtype: DtypeOption = "fp32",
    device: Annotated[str, typer.Option(help="`auto`, `cpu` or `cuda:N`.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder whose training curves go into the report.")] = None,
    rescore: Annotated[
        bool,
        typer.Option("--rescore", help="Load the target in fp32 too, and tell whether outputs that part do so at near-ties."),
    ] = False,
) -> None:
    """Measure tau, identity with plain greedy decoding, and both speeds, in all and by the rows' `category`.

    Example: `draftsmith evaluate --target runs/demo/target --drafter runs/demo/drafter --prompts runs/demo/held-out.jsonl`
    """
    import json

    from draftsmith import build

    pair = build.load_pair(target, drafter, dtype=dtype, device=device)
    exact = build.load_one(target, dtype="fp32", device=device) if rescore else None
    report = build.evaluate(*pair, prompts, count=count, max_new_tokens=max_new_tokens, out=out, run=run, exact=exact)
    say(json.dumps(report, indent=2))


@app.command()
def generate(
    target: TargetOption,
    drafter: DrafterOption,
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="What the user says. Several are answered in one batch.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, the fewest that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Only so many of the likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the drawn tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given more than once.")] = None,
    dtype: DtypeOption = "fp32",
    device: Annotated[str, typer.Option(help="`auto`, `cpu` or `cuda:N`.")] = "auto",
) -> None:
    """Answer by speculative decoding, a single prompt as it comes: what the target alone would say, in fewer passes.

    Example: `draftsmith generate --target runs/demo/target --drafter runs/demo/drafter "Reverse this list: cat, dog, owl, bee"`
    """
    from draftsmith import build
    from draftsmith.decode.acceptance import Sampling

    sampling = Sampling(temperature, top_p, top_k, seed) if temperature > 0 else None
    _, speculator = build.load_pair(target, drafter, dtype=dtype, device=device)

    if len(prompts) > 1:
        answers = build.generate_together(speculator, prompts, max_new_tokens, sampling=sampling, stops=stop or ())
        for prompt, (text, decoded) in zip(prompts, answers, strict=True):
            say(f"> {prompt}\n{text}\n")
            print(_passes(decoded), file=sys.stderr)
        return

    def show(text: str) -> None:
        print(text, end="", flush=True)

    _, decoded = build.generate(speculator, prompts[0], max_new_tokens, sampling=sampling, stops=stop or (), show=show)
    say("")
    print(_passes(decoded), file=sys.stderr)


def _passes(decoded: "Decoded") -> str:
    return f"[{len(decoded.ids)} tokens in {decoded.target_passes} target passes, tau {decoded.tau:.2f}]"


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
    say(f"exported to {out}")


making.register(app)
verbs.register(app)


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
    except Stuck as ended:
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

"""The verbs that make what training needs: responses, hidden states, and a look at the data; and what all verbs share."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftsmith.errors import UsageError

TargetOption = Annotated[str, typer.Option(help="Hugging Face folder or id, or a .gguf file.")]
DtypeOption = Annotated[Literal["fp32", "bf16"], typer.Option(help="Compute type of target and drafter.")]


def say(line: str) -> None:
    """Print a line at once."""
    # A reader that went away must not stop a run.
    with suppress(OSError):
        print(line, flush=True)


def exit_code(signal_number: int | None) -> int:
    """0, or what a process that a signal stopped exits with."""
    return 0 if signal_number is None else 128 + signal_number


class Stuck(Exception):
    """The work is done and saved, but a worker's thread will not end."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def regenerate(
    source: Annotated[
        str, typer.Argument(help="Prompts: a .jsonl, .json or .parquet file, a saved dataset, or hf:NAME:SPLIT.")
    ],
    out: Annotated[Path, typer.Argument(help="JSONL file for the responses; an interrupted call goes on from there.")],
    target: Annotated[str | None, typer.Option(help="Let this model write, loaded here.")] = None,
    server: Annotated[
        str | None, typer.Option(help="Let an OpenAI-compatible server write, for example http://127.0.0.1:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name on the server.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File that holds the server's key.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations in a batch, or at once with a server.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, the fewest that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Only so many of the likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the drawn tokens.")] = 0,
    thinking: Annotated[bool | None, typer.Option(help="What the template is told as enable_thinking.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows read at most.")] = None,
    dtype: DtypeOption = "bf16",
    device: Annotated[str, typer.Option(help="`auto`, `cpu` or `cuda:N`.")] = "auto",
) -> None:
    """Let the target write the responses to train on: each assistant turn of each chat anew, with the user's turns as they are.

    Example: `draftsmith regenerate chats.jsonl train.jsonl --target Qwen/Qwen3-8B --max-new-tokens 1024`
    """
    from draftsmith import build
    from draftsmith.decode.acceptance import Sampling

    sampling = Sampling(temperature, top_p, top_k, seed) if temperature > 0 else None
    options = {} if thinking is None else {"enable_thinking": thinking}
    writing = build.Writing(max_new_tokens, sampling, options, limit)
    if (target is None) == (server is None) or (server is None) != (model is None):
        raise UsageError("give either --target, or --server with the --model it serves")
    if server is not None and model is not None:
        key = build.read_key(key_file)
        done = build.regenerate_by_server(source, out, server, model, writing, key=key, at_once=batch_size, say=say)
    else:
        assert target is not None
        loaded = build.load_one(target, dtype=dtype, device=device)
        done = build.regenerate_here(source, out, loaded, writing, batch_size=batch_size, say=say)
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(done.skipped.items())) or "none"
    say(f"{done.rows} rows in {out}; {done.unfinished} cut off at {max_new_tokens} tokens; skipped: {skipped}")
    if done.signal_number is not None:
        say("stopped on request; the same command goes on from there")
    raise typer.Exit(exit_code(done.signal_number))


def cache(
    config: Annotated[Path, typer.Option("--config", help="The YAML file that training will use.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Override single keys.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how large it will be.")] = False,
) -> None:
    """Write the target's hidden states to hidden_states.folder, to train from with hidden_states.source=cached.

    What is there already is checked and kept, what is missing or damaged is made.

    Example: `draftsmith cache --config examples/qwen3-8b.yaml hidden_states.folder=cache/qwen3-8b`
    """
    from draftsmith import build
    from draftsmith.config import load_config

    outcome = build.fill_cache(load_config(config, overrides), dry_run=dry_run, say=say)
    code = exit_code(outcome.signal_number)
    raise Stuck(code) if outcome.stuck else typer.Exit(code)


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
        say(f"dropped {name}: {reason}")
    for title, values in (("tokens", look.tokens), ("supervised tokens", look.supervised)):
        say(f"{title} of {len(values)} samples")
        for line in histogram(values):
            say(f"  {line}")
    say(look.counts.line())


def register(app: typer.Typer) -> None:
    """Add these verbs to the command line."""
    app.command()(regenerate)
    app.command()(cache)
    data = typer.Typer(no_args_is_help=True, help="Look at training data.")
    data.command("inspect")(inspect_data)
    app.add_typer(data, name="data")

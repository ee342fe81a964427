"""The jobs around a trained drafter: decode with it, measure it, export it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.build.inputs import resolve_devices
from draftsmith.checkpoint import save as checkpoints
from draftsmith.checkpoint.export import Format, Precision, export_drafter, load_drafter
from draftsmith.config import TargetSection
from draftsmith.data.chat import ChatFormat
from draftsmith.data.inspect import Look, look_at
from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.speculate import Decoded, Speculator, check_pair
from draftsmith.decode.stream import TextStream
from draftsmith.decode.together import decode_together
from draftsmith.draft.packed import pack_linears
from draftsmith.errors import UsageError
from draftsmith.evaluate.partings import rescore
from draftsmith.evaluate.report import read_metrics, write_outputs, write_report
from draftsmith.evaluate.suite import decode_both_ways, load_prompts, summarise
from draftsmith.target.load import DTYPES, Target, load_target, load_tokenizer, packed_for_decoding


def load_one(target: str, *, dtype: Precision = "bf16", device: str = "auto") -> Target:
    """A target on one device. Raises DraftsmithError."""
    where = resolve_devices([device], for_target=True)
    return load_target(TargetSection(model=target, dtype=dtype, devices=[device]), where)[0]


def load_pair(target: str, drafter: Path, *, dtype: Precision = "bf16", device: str = "auto") -> tuple[Target, Speculator]:
    """A target and an exported drafter (or checkpoint) for decoding alone on one device. Raises DraftsmithError.

    On a CPU their linear layers are packed for it, where they can be.
    """
    where = resolve_devices([device], for_target=True)
    # The drafter first: it is the smaller one, so its errors come sooner. Cast once, not at every pass.
    loaded_drafter = load_drafter(drafter, device=where[0]).to(DTYPES[dtype])
    loaded = packed_for_decoding(load_one(target, dtype=dtype, device=device))
    pack_linears(loaded_drafter)
    return loaded, Speculator(loaded, loaded_drafter)


def look_at_data(target: str, source: str, *, longest: int, show: int, limit: int | None, options: dict[str, Any]) -> Look:
    """What training on a source would learn, without loading the target's weights. Raises DraftsmithError."""
    tokenizer, ends = load_tokenizer(target)
    return look_at(ChatFormat(tokenizer, ends, None, options), source, longest=longest, show=show, limit=limit)


def generate(
    speculator: Speculator,
    prompt: str,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stops: Sequence[str] = (),
    show: Callable[[str], None] = lambda _text: None,
) -> tuple[str, Decoded]:
    """The target's answer to one user message, and how it was decoded. `show` is given the text as it comes, in pieces.

    It ends before the first of the `stops`, strings that are not shown.
    """
    tokenizer = speculator.target.tokenizer
    stream, checks, pieces = TextStream(tokenizer, stops), list[list[int]](), list[str]()
    for fresh in speculator.stream(
        ChatFormat(tokenizer).prompt([{"role": "user", "content": prompt}]), max_new_tokens, sampling
    ):
        checks.append(fresh)
        pieces.append(stream.push(fresh))
        show(pieces[-1])
        if stream.stopped:
            break
    pieces.append(stream.end())
    show(pieces[-1])
    ids = [token for fresh in checks for token in fresh]
    return "".join(pieces), Decoded(ids, [len(fresh) for fresh in checks[1:]], len(checks))


def generate_together(
    speculator: Speculator,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stops: Sequence[str] = (),
) -> list[tuple[str, Decoded]]:
    """The target's answers to several user messages, decoded in one batch; each ends before the first of the `stops`."""
    chat = ChatFormat(speculator.target.tokenizer)
    asked = [chat.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    answers = []
    for decoded in decode_together(speculator, asked, max_new_tokens, sampling):
        stream = TextStream(chat.tokenizer, stops)
        answers.append((stream.push(decoded.ids) + stream.end(), decoded))
    return answers


def evaluate(
    target: Target,
    speculator: Speculator,
    prompts: Sequence[str],
    *,
    count: int,
    max_new_tokens: int,
    out: Path | None,
    run: Path | None,
    exact: Target | None = None,
) -> dict[str, Any]:
    """Figures of a drafter on up to `count` prompts of each source; with `out`, also report.json, outputs.jsonl and report.html there, with
    the curves of `run`. exact: the target in fp32, to judge each output that parts from plain decoding."""
    metrics = read_metrics(run) if run is not None else []
    chosen = [prompt for source in prompts for prompt in load_prompts(target, source, count)]
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out '{out}' cannot be a folder ({error.strerror}); give another") from error
    results = list(decode_both_ways(target, speculator, chosen, max_new_tokens))
    report = {**summarise(results, speculator.config.block_size), "max_new_tokens": max_new_tokens}
    if exact is not None:
        found = [rescore(exact, target, prompt.ids, result) for prompt, result in zip(chosen, results, strict=True)]
        partings = [parting for parting in found if parting is not None]
        report["partings"] = {
            "near_ties": sum(parting.is_near_tie for parting in partings),
            "others": sum(not parting.is_near_tie for parting in partings),
            "largest_gap": max((parting.gap for parting in partings), default=0.0),
            "gaps": [round(parting.gap, 5) for parting in partings],
            "rounding": [round(parting.error, 5) for parting in partings],
        }
    if out is not None:
        (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write_outputs(out / "outputs.jsonl", results)
        write_report(out / "report.html", report, metrics, results)
    return report


def export(checkpoint: Path, out: Path, *, format: Format, dtype: Precision, target: str | None) -> None:
    """Export a checkpoint, or the newest whole checkpoint of a run folder. Raises DraftsmithError."""
    if not (checkpoint / "config.json").is_file():
        latest, _ = checkpoints.find_latest(checkpoint)
        if latest is None:
            raise UsageError(f"'{checkpoint}' holds no checkpoint; give a checkpoint-N folder or a run folder")
        checkpoint = latest
    drafter = load_drafter(checkpoint)
    if target is None:
        export_drafter(out, drafter, format=format, dtype=dtype)
        return
    loaded = load_target(TargetSection(model=target, dtype="fp32"), [torch.device("cpu")])[0]
    check_pair(drafter.config, loaded)
    export_drafter(
        out,
        drafter,
        format=format,
        dtype=dtype,
        target=target,
        target_architectures=[type(loaded.model).__name__],
        embedding=loaded.embedding,
    )

"""Greedy decoding of one target with one drafter: ours, `dflash` 0.1.0's, and the library's plain generate, prompt by prompt in turns.

    python -m benchmarks.decode_vs_dflash --json [--target DIR] [--drafter DIR] [--prompts 9] [--tokens 64] [--dtype fp32]

The target is what `python -m benchmarks.smollm2 --only target` fetches (SmolLM2-135M-Instruct). Without --drafter one of random weights is
made: both sides then keep one token a pass, and what is compared is the cost of a pass. `ratio` is the median over the prompts of our
tokens per second over dflash's; `over_plain` the same over generate. Peak memory is the growth of a process of its own over its imports.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.pairs import forget_peak, memory, middle, peak_elsewhere, ratios, show
from benchmarks.smollm2 import prompts as made_prompts
from draftsmith.build import load_one, load_pair
from draftsmith.checkpoint.export import export_drafter
from draftsmith.draft.model import Drafter, DrafterConfig, default_target_layer_ids
from draftsmith.evaluate.suite import load_prompts
from draftsmith.pipeline.plan import generator_for
from draftsmith.target.facts import TargetFacts

Decode = Callable[[list[int]], list[int]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK = 8


def write_random_drafter(folder: Path, target: TargetFacts) -> None:
    """A drafter of the shape that `benchmarks.smollm2` trains, without training."""
    text = target.text_config()
    config = DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=3,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=target.hidden_size // text.num_attention_heads,
        block_size=BLOCK,
        mask_token_id=4,
        num_target_layers=target.num_layers,
        target_layer_ids=default_target_layer_ids(target.num_layers, 3),
        layer_types=("full_attention",) * 3,
    )
    drafter = Drafter(config).initialise(generator_for(0, "weights", 0))
    export_drafter(folder, drafter, format="dflash", dtype="fp32")


def ours(target: str, drafter: Path, dtype: str, tokens: int) -> Decode:
    """The product's decoding, as `draftsmith generate` does it."""
    _, speculator = load_pair(target, drafter, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    return lambda ids: speculator.decode(ids, tokens).ids


def dflash(target: str, drafter: Path, dtype: str, tokens: int) -> Decode:
    """The reference's decoding."""
    from dflash.model import DFlashDraftModel, dflash_generate

    loaded = load_one(target, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    model = DFlashDraftModel.from_pretrained(drafter, dtype=DTYPES[dtype]).eval()
    ends = sorted(loaded.end_ids)

    def decode(ids: list[int]) -> list[int]:
        out = dflash_generate(model, loaded.model, torch.tensor([ids]), max_new_tokens=tokens, stop_token_ids=ends)
        return list(out[0, len(ids) :].tolist())

    return decode


def generate(target: str, _drafter: Path, dtype: str, tokens: int) -> Decode:
    """The library's plain greedy decoding."""
    loaded = load_one(target, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    ends = sorted(loaded.end_ids)

    def decode(ids: list[int]) -> list[int]:
        given = torch.tensor([ids])
        out = loaded.model.generate(  # type: ignore[operator]
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        return list(out[0, len(ids) :].tolist())

    return decode


SIDES = {"ours": ours, "dflash": dflash, "generate": generate}


def ids_of_prompts(target: str, count: int) -> list[list[int]]:
    """Prompts of all kinds that the SmolLM2 programme makes."""
    with TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        path = Path(folder) / "prompts.jsonl"
        stream = made_prompts.prompts()
        made_prompts.write(path, [next(stream) for _ in range(count)])
        return [prompt.ids for prompt in load_prompts(load_one(target, dtype="fp32", device="cpu"), path, count)]


def measure_peak(side: str, target: str, drafter: Path, dtype: str, tokens: int) -> int:
    """Bytes that this process grows to over its imports while it decodes."""
    import dflash.model  # noqa: F401 - all sides start from the same imports

    before = memory("VmRSS")
    decode = SIDES[side](target, drafter, dtype, tokens)
    forget_peak()
    decode(list(range(100, 200)))
    return memory("VmHWM") - before


def compare(target: str, drafter: Path, told: argparse.Namespace) -> dict[str, object]:
    """The line of results."""
    decoders = {side: make(target, drafter, told.dtype, told.tokens) for side, make in SIDES.items()}
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    same = {"dflash": 0, "generate": 0}
    prompts = ids_of_prompts(target, told.prompts)
    for decode in decoders.values():
        decode(prompts[0])
    for prompt in prompts:
        outputs = {}
        for side, decode in decoders.items():
            begin = time.perf_counter()
            outputs[side] = decode(prompt)
            rates[side].append(len(outputs[side]) / (time.perf_counter() - begin))
        for other in same:
            same[other] += outputs["ours"] == outputs[other]
    words = ("--target", target, "--drafter", str(drafter), "--dtype", told.dtype, "--tokens", str(told.tokens))
    peaks = {side: peak_elsewhere("benchmarks.decode_vs_dflash", "--peak", side, *words) for side in SIDES}
    return {
        "name": "decode_vs_dflash",
        "shape": "smollm2-135m",
        "dtype": told.dtype,
        "pairs": len(prompts),
        "ratio": middle(ratios(rates["dflash"], rates["ours"])),
        "over_plain": middle(ratios(rates["generate"], rates["ours"])),
        "memory_ratio": round(peaks["ours"] / peaks["dflash"], 3),
        "same_tokens": same,
        "tokens_per_s": {side: middle(values, 1) for side, values in rates.items()},
        "peak_mb": {side: round(peak / 1e6) for side, peak in peaks.items()},
        "drafter": "random" if told.drafter is None else str(told.drafter),
    }


def main() -> None:
    """Print one JSON object, or the same for people."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_vs_dflash",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="runs/smollm2/target")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=[*DTYPES], default="fp32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak", choices=[*SIDES], help="print the peak memory of one side, in bytes, and nothing else")
    told = parser.parse_args()
    if told.peak is not None:
        print(measure_peak(told.peak, told.target, told.drafter, told.dtype, told.tokens))
        return
    with TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        drafter = told.drafter or Path(folder) / "drafter"
        if told.drafter is None:
            write_random_drafter(drafter, load_one(told.target, dtype="fp32", device="cpu"))
        row = compare(told.target, drafter, told)
    show(row, as_json=told.json)


if __name__ == "__main__":
    main()

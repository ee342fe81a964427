"""One training step (forward, backward, clipping, AdamW) of our drafter and of `speculators` 0.9.0's, on the same weights and data.

    python -m benchmarks.step_vs_speculators --json [--shapes A,B] [--dtypes bf16,fp32] [--pairs 9]

Theirs is trained as its own trainer does on a CPU: autocast for bf16, `sdpa` attention, `ce` loss in its `eager` form with decay,
torch's AdamW, clipping at 1. Ours is the product's step, compiled. Both take the same anchors, and the targets' states are
made so that theirs takes the labels that stand in the text. `ratio` is the median over interleaved pairs of their time over ours.
`matmul_fraction` is the step's useful FLOPs over its time and over the rate of a square matrix product. Peak memory is the
growth of the process over its imports, in steady state, each side in a process of its own.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from benchmarks.pairs import forget_peak, interleave, matmul_rate, memory, middle, peak_elsewhere, ratios, show
from benchmarks.parts import useful_flops
from draftsmith.checkpoint.export import export_drafter
from draftsmith.compiling.cache import use_cache
from draftsmith.compiling.compiler import Compiler
from draftsmith.config import TrainSection
from draftsmith.draft.anchors import Anchors
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.model import Drafter, DrafterConfig
from draftsmith.pipeline import step
from draftsmith.pipeline.replicas import GradientExchange, Replica
from draftsmith.types import Batch, HiddenStates, Tokens

DIM, MLP, HEADS, KV_HEADS, HEAD_DIM, TAPS = 576, 1536, 9, 3, 64, 3
GAMMA, LR = 4.0, 1e-4


@dataclass(frozen=True)
class Shape:
    """Vocabulary, context, anchors, block size and layers; everything else is SmolLM2's width."""

    vocab: int
    context: int
    anchors: int
    block: int
    layers: int = 3


SHAPES = {"A": Shape(49152, 512, 64, 8), "B": Shape(4096, 2048, 256, 16)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Work:
    """The same for both sides."""

    shape: Shape
    drafter: Drafter
    head: torch.Tensor
    batch: Batch
    anchors: Anchors


def make_work(shape: Shape, dtype: torch.dtype) -> Work:
    """Random weights, one document, all of it supervised, and anchors all over it."""
    generator = torch.Generator().manual_seed(0)
    config = DrafterConfig(
        vocab_size=shape.vocab,
        hidden_size=DIM,
        intermediate_size=MLP,
        num_hidden_layers=shape.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=shape.block,
        mask_token_id=shape.vocab - 1,
        num_target_layers=30,
        target_layer_ids=(1, 14, 27),
        layer_types=("full_attention",) * shape.layers,
    )
    drafter = Drafter(config, "blocks").initialise(generator)
    head = torch.randn(shape.vocab, DIM, generator=generator) * 0.04
    ids = torch.randint(0, shape.vocab - 1, (shape.context,), generator=generator)
    features = torch.randn(shape.context, TAPS * DIM, generator=generator).to(dtype)
    # What the head turns into the text's own next token: theirs takes its labels from there.
    final = head[ids.roll(-1)].to(dtype)
    last = shape.context - shape.block
    positions = torch.randperm(last - 1, generator=generator)[: shape.anchors].sort().values + 1
    tokens = Tokens(
        ids,
        torch.ones(shape.context, dtype=torch.bool),
        torch.zeros(shape.context, dtype=torch.long),
        torch.arange(shape.context),
        (shape.context,),
        ("text",),
    )
    anchors = Anchors(positions, torch.ones(shape.anchors, dtype=torch.bool))
    return Work(shape, drafter, head, Batch(0, tokens, HiddenStates(features, final=final)), anchors)


@contextmanager
def our_step(work: Work, dtype: torch.dtype) -> Iterator[Callable[[], float]]:
    """A step of the product; it returns the sum of the weighted losses over the number of slots."""
    settings = step.StepSettings(anchors=work.shape.anchors, gamma=GAMMA, dtype=dtype, seed=0)
    ends = FrozenEnds(work.head.to(dtype), work.head.to(dtype))
    replica, exchange = Replica(0, work.drafter, ends, TrainSection()), GradientExchange(1)
    with Compiler(enabled=True) as compiler:
        core = compiler.compiled(step.drafter_core)

        def one() -> float:
            result = compiler.run(partial(step.run_pack, replica.drafter, replica.ends, work.batch, settings, core))
            replica.update(exchange, result.weight_sum, LR)
            return result.loss_sum / sum(result.counted)

        with patch.object(step, "anchors_for", lambda *_: work.anchors):
            with compiler.planned():
                step.run_pack(replica.drafter, replica.ends, work.batch, settings, core)
            replica.gradient.zero_()
            yield one


@contextmanager
def their_step(work: Work, dtype: torch.dtype) -> Iterator[Callable[[], float]]:
    """The same step of speculators."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, core

    with TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        target = Path(folder) / "target"
        target.mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": work.shape.vocab,
            "hidden_size": DIM,
        }
        (target / "config.json").write_text(json.dumps(config))
        ends = {
            "model.embed_tokens.weight": work.head,
            "lm_head.weight": work.head.clone(),
            "model.norm.weight": torch.ones(DIM),
        }
        save_file(ends, target / "model.safetensors")
        export_drafter(
            Path(folder) / "drafter",
            work.drafter,
            format="speculators",
            dtype="fp32",
            target=str(target),
            target_architectures=["LlamaForCausalLM"],
            embedding=work.head,
        )
        model = DFlashDraftModel.from_pretrained(str(Path(folder) / "drafter"))
    model._attn_impl = model.config.transformer_layer_config._attn_implementation = "sdpa"
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "sdpa"
    model._create_mask_fn = core.create_mask
    with torch.no_grad():
        for end in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            end.weight.copy_(work.head)
            end.weight.requires_grad_(False)
    model.train()
    recipe = TrainSection()
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(used, lr=LR, weight_decay=recipe.weight_decay)
    tokens, loss_config = work.batch.tokens, resolve_loss_config("ce", "eager")
    final = work.batch.hidden.final
    assert final is not None

    def one() -> float:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            _, loss, _ = model(
                work.batch.hidden.features[None],
                tokens.ids[None],
                tokens.loss_mask[None].float(),
                final[None],
                tokens.document_ids[None],
                tokens.position_ids[None],
                loss_config=loss_config,
                gamma=GAMMA,
                max_anchors=work.shape.anchors,
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(used, 1.0)
        optimizer.step()
        return float(loss.detach())

    with patch.object(core, "select_anchors", lambda *_: (work.anchors.positions, work.anchors.valid)):
        yield one


SIDES = {"ours": our_step, "theirs": their_step}


def measure_peak(side: str, shape: str, dtype: str) -> int:
    """Bytes that this process grows to over its imports, in steady state."""
    import speculators.models.dflash  # noqa: F401 - both sides start from the same imports

    before = memory("VmRSS")
    with (
        use_cache(Path(f"runs/bench-cache/{shape}-{dtype}")),
        SIDES[side](make_work(SHAPES[shape], DTYPES[dtype]), DTYPES[dtype]) as one,
    ):
        for _ in range(2):
            one()
        # Compiling is not a step.
        forget_peak()
        for _ in range(3):
            one()
        return memory("VmHWM") - before


def compare(shape: str, dtype: str, pairs: int) -> dict[str, object]:
    """One line of results."""
    kind, size = DTYPES[dtype], SHAPES[shape]
    ours_work, theirs_work = make_work(size, kind), make_work(size, kind)
    with (
        use_cache(Path(f"runs/bench-cache/{shape}-{dtype}")),
        our_step(ours_work, kind) as ours,
        their_step(theirs_work, kind) as theirs,
    ):
        losses = ours(), theirs()
        ours(), theirs()
        spent = interleave(ours, theirs, pairs)
    words = ("--shapes", shape, "--dtypes", dtype)
    peaks = {side: peak_elsewhere("benchmarks.step_vs_speculators", "--peak", side, *words) for side in SIDES}
    flops, rate, seconds = (
        useful_flops(ours_work.drafter.config, size.context, ours_work.anchors.positions),
        matmul_rate(kind),
        middle(spent[0], 4),
    )
    return {
        "name": "step_vs_speculators",
        "shape": shape,
        **asdict(size),
        "dtype": dtype,
        "pairs": pairs,
        "ratio": middle(ratios(*spent)),
        "memory_ratio": round(peaks["ours"] / peaks["theirs"], 3),
        "matmul_fraction": round(flops / seconds / rate, 3),
        "seconds": {"ours": seconds, "theirs": middle(spent[1], 4)},
        "peak_mb": {side: round(peak / 1e6) for side, peak in peaks.items()},
        "gflop": round(flops / 1e9, 1),
        "matmul_gflops": round(rate / 1e9),
        "first_losses": [round(loss, 5) for loss in losses],
    }


def main() -> None:
    """Print one JSON object a line, or the same for people."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_vs_speculators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--shapes", default="A,B")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak", choices=[*SIDES], help="print the peak memory of one side, in bytes, and nothing else")
    told = parser.parse_args()
    for shape in told.shapes.split(","):
        for dtype in told.dtypes.split(","):
            if told.peak is not None:
                print(measure_peak(told.peak, shape, dtype))
                continue
            row = compare(shape, dtype, told.pairs)
            show(row, as_json=told.json)


if __name__ == "__main__":
    main()

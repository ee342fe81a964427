"""A training step on one CUDA device, at the shape of a drafter for Qwen3-8B; under eight minutes, compiling included.

    python -m benchmarks.gpu --json

5 layers, hidden 4,096, vocabulary 151,936, context 3,072, 512 anchors x 16, bf16 over fp32 master weights. A row for each way to
attend (flex, sdpa), with and without activation checkpointing: seconds of a step (forward, backward, AdamW), model FLOP utilisation
(useful FLOPs, see `parts.useful_flops`, over what a square product reaches on this device: `matmul_fraction`), peak memory beside
`train --dry-run`'s estimate. A last row for the hand-off: how fast features go from the stream that made them to
another that waits for their event, on the device and from pinned memory. Exit code 2 where there is no CUDA device.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.pairs import middle, show
from benchmarks.parts import RECIPE, Widths, drafter_shape, useful_flops
from draftsmith.compiling.cache import use_cache
from draftsmith.compiling.compiler import Compiler
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.mask import Backend
from draftsmith.draft.model import Drafter, DrafterConfig
from draftsmith.pipeline.replicas import GradientExchange, Replica
from draftsmith.pipeline.step import StepSettings, anchors_for, drafter_core, run_pack
from draftsmith.types import Batch, HiddenStates, Tokens

QWEN3_8B = Widths(vocab=151_936, dim=4096, mlp=12_288, heads=32, kv_heads=8, head_dim=128, layers=36)
CONTEXT, LAYERS, BLOCK, STEPS = 3072, 5, 16, 7
SETTINGS = StepSettings(anchors=512, gamma=7.0, dtype=torch.bfloat16, seed=0)
CASES: tuple[tuple[Backend, bool], ...] = (("flex", False), ("sdpa", False), ("flex", True), ("sdpa", True))


def seconds_of(work: Callable[[], object], device: torch.device, times: int) -> float:
    """The median over several, each until the device stands still."""
    spent = []
    for _ in range(times):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - begin)
    return middle(spent, 6)


def product_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of a square matrix product, which no step can pass."""
    a, b = (torch.randn(size, size, device=device, dtype=SETTINGS.dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, device, 20)


def random_batch(config: DrafterConfig, device: torch.device) -> Batch:
    """One document that fills the context, supervised in its second half."""
    ids = torch.randint(0, config.vocab_size - 1, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    places = torch.arange(CONTEXT)
    tokens = Tokens(ids, places >= CONTEXT // 2, torch.zeros_like(ids), places, (CONTEXT,), ("text",))
    width = len(config.target_layer_ids) * config.hidden_size
    return Batch(0, tokens, HiddenStates(torch.randn(CONTEXT, width, device=device, dtype=SETTINGS.dtype)))


@contextmanager
def stepping(
    config: DrafterConfig, case: tuple[Backend, bool], batch: Batch, device: torch.device
) -> Iterator[Callable[[], object]]:
    """The product's step, compiled, of a replica of its own."""
    backend, recompute = case
    drafter = Drafter(config, backend, recompute=recompute).initialise(torch.Generator().manual_seed(0)).to(device)
    table = torch.randn(config.vocab_size, config.hidden_size, device=device, dtype=SETTINGS.dtype) * 0.02
    replica, exchange = Replica(0, drafter, FrozenEnds(table, table), RECIPE), GradientExchange(1)
    with TemporaryDirectory(prefix="draftsmith-bench-") as folder, use_cache(Path(folder)), Compiler(enabled=True) as compiler:
        core = compiler.compiled(drafter_core)
        step = partial(run_pack, drafter, replica.ends, batch, SETTINGS, core)

        def one() -> None:
            replica.update(exchange, compiler.run(step).weight_sum, 1e-4)

        with compiler.planned():
            step()
        replica.gradient.zero_()
        one()
        yield one


def time_a_step(case: tuple[Backend, bool], device: torch.device, rate: float) -> dict[str, object]:
    """One line of results."""
    config = drafter_shape(BLOCK, LAYERS, QWEN3_8B)
    batch = random_batch(config, device)
    before, begin = torch.cuda.memory_allocated(device), time.perf_counter()
    with stepping(config, case, batch, device) as one:
        ready = time.perf_counter() - begin
        torch.cuda.reset_peak_memory_stats(device)
        seconds = seconds_of(one, device, STEPS)
        peak = torch.cuda.max_memory_allocated(device) - before
    flops = useful_flops(config, CONTEXT, anchors_for(batch, SETTINGS, BLOCK).positions)
    return {
        "name": "gpu",
        "shape": f"Qwen3-8B: {LAYERS} layers, context {CONTEXT}, {SETTINGS.anchors} anchors x {BLOCK}",
        "dtype": "bf16",
        "attention": case[0],
        "activation_checkpointing": case[1],
        "seconds": seconds,
        "matmul_fraction": round(flops / seconds / rate, 3),
        "matmul_tflops": round(rate / 1e12, 1),
        "tflop": round(flops / 1e12, 2),
        "peak_gb": round(peak / 1e9, 2),
        "ready_s": round(ready, 1),
    }


def hand_off(device: torch.device) -> dict[str, object]:
    """How fast one pack's features pass from stream to stream."""
    features = torch.randn(CONTEXT, 3 * QWEN3_8B.dim, device=device, dtype=SETTINGS.dtype)
    pinned, size = features.cpu().pin_memory(), features.numel() * features.element_size()
    maker, taker = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def across(source: torch.Tensor) -> None:
        with torch.cuda.stream(maker):
            ready = torch.cuda.Event()
            ready.record()
        with torch.cuda.stream(taker):
            taker.wait_event(ready)
            source.to(device, non_blocking=True, copy=True)

    rates = {name: size / seconds_of(partial(across, x), device, 50) for name, x in (("device", features), ("pinned", pinned))}
    return {
        "name": "gpu_handoff",
        "shape": f"{size / 1e6:.0f} MB of features",
        "dtype": "bf16",
        **{f"{name}_gb_per_s": round(rate / 1e9, 1) for name, rate in rates.items()},
    }


def main() -> int:
    """Print one JSON object a line, or the same for people."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: no CUDA device here; nothing was run", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    rate = product_rate(device)
    show(hand_off(device), as_json=told.json)
    for case in CASES:
        show(time_a_step(case, device, rate), as_json=told.json)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Two drafter threads in one process against two processes under torchrun (DDP over gloo): same model, same packs, same global batch.

    python -m benchmarks.threads_vs_processes --json [--pairs 7] [--steps 16]

A target and a drafter of SmolLM2's widths, random weights, fp32, one core for each of the two. The threads are the product's own run: one
target thread and two drafters. A process is how trainers with processes are built: it holds a target of its own, captures its
share of the packs and trains its own drafter, of the same compiled step, in DistributedDataParallel with AdamW. `ratio`
is the median over interleaved pairs of samples per second, threads over processes, in the steps between the first three and the last.
Memory is the peak of what all processes of a side hold, torchrun's among them, pages they share counted once. Seconds to the first
step count from the side's start, compiling with an empty cache among them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pairs import middle, show
from benchmarks.parts import (
    PEAK_LR,
    RECIPE,
    SETTINGS,
    SMOLLM2,
    TINY,
    Widths,
    drafter_shape,
    first_drafter,
    random_packs,
    random_target,
    run_job,
)
from draftsmith.compiling.cache import use_cache
from draftsmith.compiling.compiler import Compiler
from draftsmith.draft.anchors import slot_targets
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.loss import chunked_head_loss, slot_weights
from draftsmith.draft.model import Drafter
from draftsmith.pipeline.plan import Plan, learning_rate
from draftsmith.pipeline.step import Core, anchors_for, drafted_hidden, drafter_core
from draftsmith.target.capture import Capture
from draftsmith.types import Batch

WORKERS, CONTEXT, PACKS = 2, 512, 24
AHEAD = 3
WIDTHS = {"smollm2": SMOLLM2, "tiny": TINY}


class Whole(nn.Module):
    """A pack to the sums of its weighted losses and of its weights: what DistributedDataParallel wraps."""

    def __init__(self, drafter: Drafter, ends: FrozenEnds, core: Core) -> None:
        super().__init__()
        self.drafter, self.ends, self.core = drafter, ends, core

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        block_size, tokens = self.drafter.config.block_size, batch.tokens
        anchors = anchors_for(batch, SETTINGS, block_size)
        hidden = drafted_hidden(self.drafter, self.ends, batch, anchors, SETTINGS.dtype, self.core)
        targets = slot_targets(tokens.ids, tokens.loss_mask, tokens.document_ids, anchors, block_size)
        rows = targets.supervised.flatten().nonzero().squeeze(1)
        loss = chunked_head_loss(hidden[:, 1:].flatten(0, 1)[rows], self.ends.head, targets.labels.flatten()[rows])
        weights = slot_weights(block_size, SETTINGS.gamma).expand_as(targets.labels).flatten()[rows]
        return (weights * loss.losses).sum(), weights.sum()


def tell(step: int, loss: float) -> None:
    """A finished step, for the parent that measures."""
    print(json.dumps({"step": step, "loss": loss, "at": time.time()}), flush=True)


def train_in_a_process(widths: Widths, steps: int) -> None:
    """One rank of the run under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    target, packs = random_target(widths), random_packs(CONTEXT, PACKS, widths.vocab)
    shape = drafter_shape(widths=widths)
    capture, plan = Capture(target, shape.target_layer_ids), Plan(len(packs), WORKERS, steps, WORKERS, WORKERS, SETTINGS.seed)
    drafter = first_drafter(shape)
    whole = Whole(drafter, FrozenEnds(target.embedding, target.head), torch.compile(drafter_core, dynamic=False))
    model = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(drafter.parameters(), weight_decay=RECIPE.weight_decay, fused=True)
    for step in range(steps):
        position = step * WORKERS + rank
        tokens = packs[plan.pack_at(position)]
        loss, weight = model(Batch(position, tokens, capture(tokens)))
        sums = torch.stack([loss.detach(), weight])
        dist.all_reduce(sums)
        # Gradients are averaged over the ranks; what is wanted is their sum over the weights of all.
        (loss * WORKERS / sums[1]).backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), RECIPE.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak=PEAK_LR, steps=steps, warmup=RECIPE.warmup)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            tell(step, float(sums[0] / sums[1]))
    dist.destroy_process_group()


def train_in_threads(widths: Widths, steps: int, cache: Path) -> None:
    """The product's run."""
    torch.set_num_threads(1)
    target, packs = random_target(widths), random_packs(CONTEXT, PACKS, widths.vocab)
    clock = time.time() - time.perf_counter()
    with use_cache(cache), Compiler(enabled=True, unplanned="error") as compiler:
        _, events = run_job(target, packs, compiler, steps=steps, replicas=WORKERS, widths=widths)
    for event in events:
        if event["kind"] == "step":
            print(
                json.dumps(
                    {
                        "step": event["step"] - 1,
                        "loss": event["loss"],
                        "at": clock + event["at"],
                        "S": event["spans_s"]["target-0"],
                    }
                ),
                flush=True,
            )


def held(pid: int) -> int:
    """Bytes that a process and all it started hold; a page that several map counts in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return own + sum(held(int(child)) for child in children)


def run_side(side: str, widths: str, steps: int) -> dict[str, object]:
    """A whole run of one side in processes of its own: its steps, seconds to the first, and peak memory."""
    words = ["-m", "benchmarks.threads_vs_processes", "--side", side, "--widths", widths, "--steps", str(steps)]
    if side == "processes":
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS), *words]
    with TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        out, errors = Path(folder, "stdout"), Path(folder, "stderr")
        with out.open("w") as stdout, errors.open("w") as stderr:
            begin = time.time()
            process = subprocess.Popen([sys.executable, *words], stdout=stdout, stderr=stderr, env=environment)
            peak = 0
            while process.poll() is None:
                peak = max(peak, held(process.pid))
                time.sleep(0.2)
        if process.returncode:
            sys.exit(f"{side} failed:\n{errors.read_text()}")
        told = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
    # A target thread runs ahead by what its channels hold, and has nothing left to do before the end: neither may count.
    first, last = told[AHEAD], told[-1 - AHEAD]
    return {
        "losses": [step["loss"] for step in told],
        "samples_per_s": WORKERS * (last["step"] - first["step"]) / (last["at"] - first["at"]),
        "first_step_s": told[0]["at"] - begin,
        "peak": peak,
    }


def compare(widths: str, steps: int, pairs: int) -> dict[str, object]:
    """The line of results."""
    runs: dict[str, list[dict]] = {"threads": [], "processes": []}
    for _ in range(pairs):
        for side, told in runs.items():
            told.append(run_side(side, widths, steps))
    ours, theirs = runs["threads"], runs["processes"]
    apart = [
        abs(a / b - 1)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one["losses"], other["losses"], strict=True)
    ]
    return {
        "name": "threads_vs_processes",
        "shape": f"target and drafter of {widths}'s widths, context {CONTEXT}, {SETTINGS.anchors} anchors x 8, {WORKERS} packs a step",
        "dtype": "fp32",
        "pairs": pairs,
        "ratio": middle([a["samples_per_s"] / b["samples_per_s"] for a, b in zip(ours, theirs, strict=True)]),
        "memory_ratio": middle([a["peak"] / b["peak"] for a, b in zip(ours, theirs, strict=True)]),
        "loss_difference": max(apart),
        "samples_per_s": {side: middle([run["samples_per_s"] for run in told]) for side, told in runs.items()},
        "first_step_s": {side: middle([run["first_step_s"] for run in told], 1) for side, told in runs.items()},
        "peak_mb": {side: round(middle([run["peak"] for run in told]) / 1e6) for side, told in runs.items()},
    }


def main() -> None:
    """Print one JSON object, or the same for people."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.threads_vs_processes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--widths", choices=[*WIDTHS], default="smollm2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=["threads", "processes"], help="run one side and print its steps, as the parent does")
    told = parser.parse_args()
    if told.side is None:
        show(compare(told.widths, told.steps, told.pairs), as_json=told.json)
    elif told.side == "processes":
        train_in_a_process(WIDTHS[told.widths], told.steps)
    else:
        train_in_threads(WIDTHS[told.widths], told.steps, Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))


if __name__ == "__main__":
    main()

"""Seven threads, a stream of shapes of which some were never planned: which way of protecting torch.compile is right?

Three threads capture hidden states from eager Hugging Face models, four train drafters with a compiled step and an
optimizer of their own. Every hidden state, loss and gradient is compared with a single-threaded eager reference. Each
mechanism runs in a process of its own (so that nothing is compiled yet) on the same stream, one after the other.

    python benchmarks/compile_threads.py --seconds 120 --json

Mechanisms: gate (the default), patch (tracing and compiling flags made thread-local), first_lock (a lock around each
worker's first step of a shape), step_lock (one lock around every piece of torch work), none.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx._symbolic_trace as fx_trace
from torch._dynamo import eval_frame
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftsmith.compiling.cache import use_cache
from draftsmith.compiling.compiler import Compiler
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.mask import Backend
from draftsmith.draft.model import Drafter, DrafterConfig
from draftsmith.pipeline.plan import generator_for
from draftsmith.pipeline.step import Core, StepSettings, drafter_core, run_pack
from draftsmith.types import Batch, HiddenStates, Tokens

MECHANISMS = ("gate", "patch", "first_lock", "step_lock", "none")
TARGETS, DRAFTERS, CYCLE = 3, 4, 6
VOCAB, TARGET_LAYERS = 128, 4


@dataclass(frozen=True)
class Stage:
    """Where a mechanism is tried and on what. planned and unplanned: context lengths that warm-up knows and that it does not."""

    planned: tuple[int, ...]
    unplanned: tuple[int, ...]
    device: str = "cpu"
    attention: Backend = "sdpa"
    dim: int = 32
    heads: int = 4
    anchors: int = 8

    @property
    def settings(self) -> StepSettings:
        return StepSettings(anchors=self.anchors, gamma=2.0, dtype=torch.float32, seed=0)


class Gated:
    """What the product does."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler

    def step(self, _key: object, work: Callable[[], Any]) -> Any:
        return self.compiler.run(work)

    def eager(self) -> Any:
        return self.compiler.gate.shared()


class Unprotected:
    """Everything at once."""

    def step(self, _key: object, work: Callable[[], Any]) -> Any:
        return work()

    def eager(self) -> Any:
        return nullcontext()


class FirstLock(Unprotected):
    """A lock around each worker's first step of a shape; nothing else."""

    def __init__(self) -> None:
        self.lock, self.seen = threading.Lock(), set()

    def step(self, key: object, work: Callable[[], Any]) -> Any:
        mine = (threading.get_ident(), key)
        if mine in self.seen:
            return work()
        with self.lock:
            self.seen.add(mine)
            return work()


class StepLock(Unprotected):
    """One thread in torch at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def step(self, _key: object, work: Callable[[], Any]) -> Any:
        with self.lock:
            return work()

    def eager(self) -> Any:
        return self.lock


@contextmanager
def thread_local_flags() -> Iterator[None]:
    """Make `torch.compiler._is_compiling_flag` and fx's tracing flag answer per thread, wherever they are read or written."""
    local = threading.local()
    tracer_trace = fx_trace.Tracer.trace

    def flag(name: str) -> property:
        return property(lambda _module: getattr(local, name, False), lambda _module, value: setattr(local, name, value))

    @contextmanager
    def session() -> Iterator[None]:
        old = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = old

    def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        old, local.tracing = getattr(local, "tracing", False), True
        try:
            return tracer_trace(self, *args, **kwargs)
        finally:
            local.tracing = old

    del torch.compiler._is_compiling_flag
    torch.compiler.__class__ = type("Patched", (type(torch.compiler),), {"_is_compiling_flag": flag("compiling")})
    torch.compiler.is_compiling = lambda: getattr(local, "compiling", False)
    torch.compiler._compile_session_context = session
    fx_trace.Tracer.trace = trace
    fx_trace.is_fx_tracing = lambda: getattr(local, "tracing", False)
    fx_trace.is_fx_symbolic_tracing = lambda: fx_trace.is_fx_tracing() and not torch.compiler.is_compiling()
    eval_frame.is_fx_symbolic_tracing = fx_trace.is_fx_symbolic_tracing
    # The process ends with the mechanism, so nothing is put back.
    yield


def blank_pack(bucket: int, seed: int) -> Tokens:
    """Two documents and a little padding, random ids."""
    rng = random.Random(seed)
    first = rng.randint(8, bucket - 16)
    second = bucket - first - rng.randint(0, 6)
    padding = bucket - first - second
    ids = torch.randint(0, VOCAB, (bucket,), generator=torch.Generator().manual_seed(seed))
    documents = torch.tensor([0] * first + [1] * second + [-1] * padding)
    positions = torch.tensor([*range(first), *range(second), *[0] * padding])
    return Tokens(ids, documents >= 0, documents, positions, (first, second), ("a", "b"))


def make_batch(stage: Stage, bucket: int, seed: int) -> Batch:
    features = torch.randn(bucket, 2 * stage.dim, generator=torch.Generator().manual_seed(seed))
    return Batch(seed, blank_pack(bucket, seed), HiddenStates(features.to(stage.device)))


def make_drafter(stage: Stage, seed: int, attention: Backend) -> Drafter:
    config = DrafterConfig(
        vocab_size=VOCAB,
        hidden_size=stage.dim,
        intermediate_size=2 * stage.dim,
        num_hidden_layers=1,
        num_attention_heads=stage.heads,
        num_key_value_heads=stage.heads // 2,
        head_dim=stage.dim // stage.heads,
        block_size=4,
        mask_token_id=VOCAB - 1,
        num_target_layers=TARGET_LAYERS,
        target_layer_ids=(0, 1),
        layer_types=("full_attention",),
    )
    return Drafter(config, attention).initialise(generator_for(seed, "weights", 0), std=0.2).to(stage.device)


def make_target(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": TARGET_LAYERS}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)).eval()


class Trainer:
    """One drafter, its AdamW and a cycle of planned packs; after each cycle it starts again from the same state."""

    def __init__(self, stage: Stage, rank: int, ends: FrozenEnds, core: Core, attention: Backend) -> None:
        self.stage, self.rank, self.ends, self.core, self.attention = stage, rank, ends, core, attention
        lengths = [stage.planned[n % len(stage.planned)] for n in range(CYCLE)]
        self.batches = [make_batch(stage, length, 1000 * rank + n) for n, length in enumerate(lengths)]
        self.reset()

    def reset(self) -> None:
        self.drafter = make_drafter(self.stage, self.rank, self.attention)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-2)

    def forward_backward(self, batch: Batch) -> tuple[float, torch.Tensor]:
        self.drafter.zero_grad()
        result = run_pack(self.drafter, self.ends, batch, self.stage.settings, self.core)
        gradient = torch.cat([p.grad.flatten() for p in self.drafter.parameters()])
        return result.loss_sum, gradient


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to what reordered fp32 sums may do over one cycle of steps."""
    return bool(torch.isfinite(a).all()) and float((a - b).norm()) <= 2e-3 * float(b.norm()) + 1e-5


def run_mechanism(name: str, seconds: float, stage: Stage) -> dict[str, object]:
    """Run the stream under one mechanism for `seconds` and count what went wrong."""
    torch.set_num_threads(1)
    table = torch.randn(VOCAB, stage.dim, generator=torch.Generator().manual_seed(7)).to(stage.device)
    ends = FrozenEnds(table, table)
    # The reference, single-threaded and eager, before anything is compiled.
    models = [make_target(s).to(stage.device) for s in range(TARGETS)]
    lengths = [[16 + 8 * m + 4 * n for n in range(3)] for m in range(TARGETS)]
    ids = [
        [
            torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length)).to(stage.device)
            for length in mine
        ]
        for mine in lengths
    ]
    with torch.no_grad():
        states = [
            [model(i, output_hidden_states=True).hidden_states for i in mine] for model, mine in zip(models, ids, strict=True)
        ]
    cycle: list[list[tuple[float, torch.Tensor]]] = []
    surprises: list[list[tuple[Batch, float, torch.Tensor]]] = []
    for rank in range(DRAFTERS):
        trainer, found = Trainer(stage, rank, ends, drafter_core, "sdpa"), []
        for batch in trainer.batches:
            found.append(trainer.forward_backward(batch))
            trainer.optimizer.step()
        cycle.append(found)
        trainer.reset()
        odd = [make_batch(stage, bucket, 5000 * rank + bucket) for bucket in stage.unplanned]
        surprises.append([(batch, *trainer.forward_backward(batch)) for batch in odd])

    counts: Counter[str] = Counter()
    compiler = Compiler(enabled=True, graphs=len(stage.planned) + len(stage.unplanned), unplanned="warn")
    guard: Any = {"gate": Gated, "step_lock": lambda _c: StepLock(), "first_lock": lambda _c: FirstLock()}.get(
        name, lambda _c: Unprotected()
    )(compiler)
    patch = thread_local_flags() if name == "patch" else nullcontext()
    with patch, compiler:
        core = compiler.compiled(drafter_core)
        trainers = [Trainer(stage, rank, ends, core, stage.attention) for rank in range(DRAFTERS)]
        stop = threading.Event()
        warm_begin = time.perf_counter()
        for trainer in trainers:
            for batch in trainer.batches[: len(stage.planned)]:
                with compiler.planned() if name == "gate" else nullcontext():
                    trainer.forward_backward(batch)
        if name == "gate":
            compiler.seal()
        warm_s = time.perf_counter() - warm_begin
        begin = time.perf_counter()

        def attempt(kind: str, work: Callable[[], bool]) -> None:
            counts["steps"] += kind == "train"
            counts["captures"] += kind == "capture"
            try:
                counts["wrong"] += not work()
            except Exception as error:
                counts["errors"] += 1
                counts[f"error: {type(error).__name__}: {str(error)[:70]}"] += 1

        def target_thread(rank: int) -> None:
            torch.set_num_threads(1)

            def capture(n: int) -> bool:
                with guard.eager(), torch.no_grad():
                    got = models[rank](ids[rank][n], output_hidden_states=True).hidden_states
                expected = states[rank][n]
                return (
                    got is not None
                    and len(got) == len(expected)
                    and all(a.shape == b.shape and close(a, b) for a, b in zip(got, expected, strict=True))
                )

            while not stop.is_set():
                for n in range(3):
                    attempt("capture", lambda n=n: capture(n))

        def drafter_thread(rank: int) -> None:
            torch.set_num_threads(1)
            trainer = trainers[rank]
            surprise = iter(enumerate(surprises[rank]))
            share = seconds / (len(stage.unplanned) + 1)

            def train(n: int) -> bool:
                batch = trainer.batches[n]
                loss, gradient = guard.step(batch.tokens.bucket, lambda: trainer.forward_backward(batch))
                with guard.eager():
                    trainer.optimizer.step()
                right_loss, right_gradient = cycle[rank][n]
                return abs(loss - right_loss) <= 1e-3 * abs(right_loss) and close(gradient, right_gradient)

            def surprised(batch: Batch, right_loss: float, right_gradient: torch.Tensor) -> bool:
                trainer.reset()
                loss, gradient = guard.step(batch.tokens.bucket, lambda: trainer.forward_backward(batch))
                return abs(loss - right_loss) <= 1e-3 * abs(right_loss) and close(gradient, right_gradient)

            used = 0
            while not stop.is_set():
                trainer.reset()
                for n in range(CYCLE):
                    attempt("train", lambda n=n: train(n))
                    if stop.is_set():
                        return
                if used < len(stage.unplanned) and time.perf_counter() - begin > share * (used + 0.5):
                    _, (batch, loss, gradient) = next(surprise)
                    used += 1
                    attempt("train", lambda b=batch, x=loss, g=gradient: surprised(b, x, g))

        works = [(target_thread, r) for r in range(TARGETS)] + [(drafter_thread, r) for r in range(DRAFTERS)]
        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True, name=f"{work.__name__}-{rank}") for work, rank in works
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        deadline = time.monotonic() + 60
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        took = time.perf_counter() - begin
        gate = compiler.gate.metrics
        return {
            "mechanism": name,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if stage.device == "cuda" else "cpu",
            "attention": stage.attention,
            "errors": counts["errors"],
            "wrong": counts["wrong"],
            "hangs": sum(thread.is_alive() for thread in threads),
            "steps": counts["steps"],
            "captures": counts["captures"],
            "planned_compiles": compiler.metrics.planned if name == "gate" else len(stage.planned),
            "unplanned_compiles": compiler.metrics.unplanned if name == "gate" else len(stage.unplanned),
            "escaped_compiles": compiler.metrics.escaped if name == "gate" else None,
            "gate_holds": gate.exclusive_holds,
            "gate_hold_s": round(gate.exclusive_s, 2),
            "gate_longest_s": round(gate.longest_s, 2),
            "gate_wait_s": round(gate.total_wait_s, 2),
            "warm_up_s": round(warm_s, 2),
            "seconds": round(took, 1),
            "kinds": {k: v for k, v in counts.most_common(8) if k.startswith("error: ")},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="per mechanism, after warm-up")
    parser.add_argument("--unplanned", type=int, default=6, help="shapes that warm-up does not know")
    parser.add_argument("--mechanisms", nargs="*", default=list(MECHANISMS), choices=MECHANISMS)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", choices=MECHANISMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        stage = Stage(planned=(48, 64), unplanned=tuple(52 + 7 * n for n in range(arguments.unplanned)))
        with tempfile.TemporaryDirectory() as folder, use_cache(Path(folder)):
            print(json.dumps(run_mechanism(arguments.only, arguments.seconds, stage)), flush=True)
        return
    for name in arguments.mechanisms:
        command = [
            sys.executable,
            __file__,
            "--only",
            name,
            "--seconds",
            str(arguments.seconds),
            "--unplanned",
            str(arguments.unplanned),
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        row = json.loads(lines[-1]) if lines else {"mechanism": name, "died": done.returncode, "stderr": done.stderr[-400:]}
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()

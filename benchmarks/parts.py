"""What several benchmarks share: a random target in a folder, packs of random documents, and a job built from them."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftsmith.compiling.compiler import Compiler
from draftsmith.config import TrainSection
from draftsmith.data.packing import pack
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.model import Drafter, DrafterConfig, default_target_layer_ids
from draftsmith.pipeline.coordinator import Coordinator, Outcome, StopRequest
from draftsmith.pipeline.plan import Plan, generator_for
from draftsmith.pipeline.replicas import Replica
from draftsmith.pipeline.step import StepSettings, drafter_core
from draftsmith.pipeline.workers import Job
from draftsmith.target.capture import Capture
from draftsmith.target.load import Target
from draftsmith.types import Document, Tokens


@dataclass(frozen=True)
class Widths:
    """What target and drafter have in common; layers: the target's."""

    vocab: int
    dim: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


TINY = Widths(vocab=640, dim=128, mlp=384, heads=4, kv_heads=2, head_dim=32, layers=6)
SMOLLM2 = Widths(vocab=49152, dim=576, mlp=1536, heads=9, kv_heads=3, head_dim=64, layers=30)


SETTINGS = StepSettings(anchors=64, gamma=4.0, dtype=torch.float32, seed=0)
RECIPE, PEAK_LR = TrainSection(), 1e-3


def random_target(widths: Widths = TINY) -> Target:
    """A random Qwen3 target as the pipeline knows it; it has no tokenizer, since nothing is tokenised."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=widths.vocab,
        hidden_size=widths.dim,
        intermediate_size=widths.mlp,
        num_hidden_layers=widths.layers,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    decoder, weight = model.get_decoder(), model.lm_head.weight.detach()
    facts = ("random", None, FrozenEnds(weight, weight), frozenset[int](), config, widths.layers, "random")
    return Target(*facts, model, torch.device("cpu"), decoder, "model.layers")  # type: ignore[arg-type]


def random_packs(bucket: int, count: int, vocab: int = TINY.vocab) -> list[Tokens]:
    """Packs of random documents of mixed lengths, supervised in their second halves."""
    generator = torch.Generator().manual_seed(0)
    documents, total = [], 0
    while total < bucket * count:
        length = int(torch.randint(20, 140, (), generator=generator))
        ids = torch.randint(0, vocab - 1, (length,), generator=generator)
        documents.append(Document(f"d{len(documents)}", ids, torch.arange(length) >= length // 2))
        total += length
    return pack(documents, [bucket], 0)[0]


def drafter_shape(block_size: int = 8, layers: int = 3, widths: Widths = TINY) -> DrafterConfig:
    return DrafterConfig(
        vocab_size=widths.vocab,
        hidden_size=widths.dim,
        intermediate_size=widths.mlp,
        num_hidden_layers=layers,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        block_size=block_size,
        mask_token_id=widths.vocab - 1,
        num_target_layers=widths.layers,
        target_layer_ids=default_target_layer_ids(widths.layers, 3),
        layer_types=("full_attention",) * layers,
    )


def useful_flops(config: DrafterConfig, context: int, anchors: Tensor) -> float:
    """FLOPs that no way of doing a step can leave out.

    A product of [m, k] and [k, n] counts 2mkn. With weights it is done three times (forward, gradient of the input, of the weights), but
    the features need no gradient and the frozen head has none of its weights. Attention counts visible pairs alone:
    the context before the anchor and the block itself, two products forward and four backward. The head runs for slots 1..K-1.
    """
    dim, layers, block = config.hidden_size, config.num_hidden_layers, config.block_size
    width, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    fuse = 2 * 2 * context * len(config.target_layer_ids) * dim * dim
    encode = 3 * layers * 2 * context * dim * 2 * kv
    slots = 3 * layers * 2 * anchors.numel() * block * dim * (2 * width + 2 * kv + 3 * config.intermediate_size)
    attention = 3 * layers * 4 * width * block * int((anchors + block).sum())
    head = 2 * 2 * anchors.numel() * (block - 1) * dim * config.vocab_size
    return float(fuse + encode + slots + attention + head)


def first_drafter(shape: DrafterConfig) -> Drafter:
    """The drafter that every run begins with, attending as the product does on a CPU."""
    return Drafter(shape, "blocks").initialise(generator_for(0, "weights", 0))


def run_job(
    target: Target, packs: list[Tokens], compiler: Compiler, *, steps: int, replicas: int = 2, widths: Widths = TINY
) -> tuple[Outcome, list[dict]]:
    """Train `steps` steps on threads as the product does, saving nothing; the outcome and the step events."""
    shape, events = drafter_shape(widths=widths), []
    ends = FrozenEnds(target.embedding, target.head)
    made = [Replica(rank, first_drafter(shape), ends, RECIPE, replicas) for rank in range(replicas)]
    job = Job(
        replicas=made,
        sources=[Capture(target, shape.target_layer_ids)],
        packs=packs,
        plan=Plan(len(packs), replicas, steps, replicas, 1, 0),
        settings=SETTINGS,
        peak_lr=PEAK_LR,
        warmup=RECIPE.warmup,
        channel_capacity=4,
        cpu_threads=1,
        checkpoint_every=10**9,
        compiler=compiler,
        core=compiler.compiled(drafter_core),
    )
    coordinator = Coordinator(
        job,
        save=lambda _step, _replica, _digest, _spared: None,
        evaluate=None,
        judge=lambda _step, _figures: None,
        emit=lambda kind, fields: events.append({"kind": kind, "at": time.perf_counter(), **fields}),
        stop=StopRequest(),
    )
    return coordinator.run(0), events


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        yield Path(folder)

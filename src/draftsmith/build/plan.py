"""A run fully decided before anything starts: devices, drafter, packs, plan, and what it will need."""

import hashlib
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch

from draftsmith.build.inputs import Inputs, cached_day, chat_format, check_cache, from_cache, from_target, resolve_devices
from draftsmith.compiling.buckets import choose_buckets
from draftsmith.config import Config, DraftSection
from draftsmith.data.chat import ChatFormat
from draftsmith.data.packing import PackingReport, pack
from draftsmith.draft.blocks import SCORES
from draftsmith.draft.loss import default_gamma, suitable_chunk
from draftsmith.draft.mask import Backend
from draftsmith.draft.model import FULL, Drafter, DrafterConfig, default_target_layer_ids
from draftsmith.errors import ConfigError
from draftsmith.pipeline.plan import Plan, total_steps
from draftsmith.pipeline.step import StepSettings
from draftsmith.target.cache_index import token_bytes
from draftsmith.target.facts import TargetFacts
from draftsmith.target.load import DTYPES, Target, choose_mask_token
from draftsmith.types import Tokens


def drafter_config(section: DraftSection, target: TargetFacts) -> tuple[DrafterConfig, str]:
    """The drafter's shape from its section, taking from the target what is not given; and how the mask token was chosen."""
    text = target.text_config()
    mask_token_id, how = choose_mask_token(target.tokenizer, target.vocab_size, section.mask_token_id)
    ids = section.target_layer_ids
    rope = getattr(text, "rope_parameters", None) or {}
    # Families with sliding layers have one set for each kind.
    rope = rope.get(FULL) or rope
    heads = section.num_attention_heads or text.num_attention_heads
    config = DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=section.intermediate_size or text.intermediate_size,
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=section.num_key_value_heads or min(heads, text.num_key_value_heads),
        head_dim=section.head_dim or getattr(text, "head_dim", None) or target.hidden_size // text.num_attention_heads,
        block_size=section.block_size,
        mask_token_id=mask_token_id,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(ids) if ids else default_target_layer_ids(target.num_layers, section.target_layers),
        layer_types=tuple(section.layer_types or [FULL] * section.layers),
        rope_theta=float(rope.get("rope_theta", 1e6)),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(text.max_position_embeddings),
        sliding_window=section.sliding_window,
    )
    return config, how


def data_digest(packs: list[Tokens]) -> str:
    """SHA-256 over ids and loss masks of all packs: resuming on other data would silently be another run."""
    digest = hashlib.sha256()
    for tokens in packs:
        digest.update(tokens.ids.numpy().tobytes())
        digest.update(tokens.loss_mask.numpy().tobytes())
    return digest.hexdigest()


def parameter_count(config: DrafterConfig) -> int:
    """Trainable parameters of a drafter, without building it in memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in Drafter(config).parameters())


@dataclass(frozen=True)
class Resolved:
    """A run fully decided but not started. day: the date that chat templates see, kept for all of the run's life."""

    config: Config
    day: date
    target_devices: list[torch.device]
    drafter_devices: list[torch.device]
    inputs: Inputs
    packs: list[Tokens]
    packing: PackingReport
    drafter: DrafterConfig
    mask_choice: str
    plan: Plan
    settings: StepSettings

    @property
    def facts(self) -> TargetFacts:
        """What is known of the target, whether it is loaded or not."""
        return self.inputs.facts

    @property
    def targets(self) -> list[Target]:
        """Target replicas; none where hidden states are read from a cache."""
        return self.inputs.targets

    @property
    def attention(self) -> Backend:
        """How training attends. Left to us, a CPU goes by parts, since torch's fused kernel takes several times as long there."""
        told = self.config.draft.attention
        if told != "auto":
            return told
        return "blocks" if any(device.type == "cpu" for device in self.drafter_devices) else "sdpa"

    def chat(self) -> ChatFormat:
        """How this run speaks to its target."""
        return chat_format(self.facts, self.config.data, self.day)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to continue this run exactly."""
        train = self.config.train
        return {
            "data": data_digest(self.packs),
            "target": self.facts.digest,
            "target.dtype": self.config.target.dtype,
            "drafter": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.drafter).items()},
            "train.seed": train.seed,
            "train.packs_per_step": train.packs_per_step,
            "train.anchors": train.anchors,
            "train.precision": train.precision,
            "train.loss": self.loss(),
        }

    def loss(self) -> str:
        """The loss in words, with what shapes it."""
        train = self.config.train
        return {
            "ce": f"cross-entropy, gamma {self.settings.gamma:g}",
            "dpace": f"cross-entropy, D-PACE alpha {train.dpace_alpha:g}",
            "kl": f"divergence from the target, gamma {self.settings.gamma:g}",
        }[train.loss]

    def recipe(self) -> dict[str, Any]:
        """What may be changed on resume, and is told when it is."""
        train = self.config.train
        return {
            "steps": self.plan.steps,
            "train.lr": train.lr,
            "train.warmup": train.warmup,
            "train.weight_decay": train.weight_decay,
            "train.clip": train.clip,
            "train.activation_checkpointing": train.activation_checkpointing,
            "hidden states": "from vLLM" if self.config.hidden_states.source in ("files", "server") else "captured here",
        }

    def describe(self, *, training: bool = True) -> list[str]:
        """The plan for people, a line each; without `training`, only up to the packs."""
        train, drafter, plan = self.config.train, self.drafter, self.plan
        parameters = parameter_count(drafter)
        compile, checkpoint = self.config.compile, self.config.checkpoint
        lines = [
            f"target     {self.facts.name}: {self.facts.num_layers} layers, width {drafter.hidden_size}, "
            f"vocabulary {drafter.vocab_size}, {self.config.target.dtype}",
            f"states     {self.states()}",
            f"devices    {self.target_threads()}; drafter threads on {', '.join(map(str, self.drafter_devices))}",
            f"drafter    {drafter.num_hidden_layers} layers, {parameters / 1e6:.2f} M parameters, block size {drafter.block_size}, "
            f"target layers {list(drafter.target_layer_ids)}, attention {self.attention}",
            f"mask token {drafter.mask_token_id} ({self.mask_choice})",
            f"data       {self.inputs.counts.line()}",
            f"buckets    {self.packing.line()}",
        ]
        if not training:
            return lines
        lines += [
            f"steps      {plan.steps} of {plan.per_step} packs ({plan.steps * plan.per_step / plan.packs:.2f} epochs), "
            f"{train.anchors} anchors a pack, {train.precision}, lr {train.lr:g}, seed {train.seed}; loss: {self.loss()}",
            f"compile    {compile.enabled}; {len({p.bucket for p in self.packs})} graphs per kind of device, unplanned: {compile.unplanned}",
            f"checkpoint every {checkpoint.every} steps, keep {checkpoint.keep}, "
            f"{12 * parameters / 1e6:.1f} MB each, in {self.config.run.dir}",
        ]
        return lines + [f"memory     {line}" for line in self.memory()]

    def states(self) -> str:
        """Where hidden states come from, in words."""
        section = self.config.hidden_states
        if section.source == "live":
            return "live"
        if section.source == "server":
            return f"asked of {section.url}"
        ids, final = self.drafter.target_layer_ids, self.config.train.loss == "kl"
        each = token_bytes(ids, self.facts.hidden_size, DTYPES[self.config.target.dtype], final=final)
        size = sum(p.filled for p in self.packs) * each / 1e9
        told = "live the first time, then from" if section.source == "hybrid" else "read from"
        return f"{told} {section.folder}, {size:.2f} GB"

    def target_threads(self) -> str:
        """Where target threads run, in words."""
        return f"target threads on {', '.join(map(str, self.target_devices))}" if self.targets else "one thread reads states"

    def memory(self) -> list[str]:
        """Estimated peak per device: the target's weights and waiting hidden states, each replica's share."""
        sizes: dict[str, float] = {}
        facts = self.facts
        width = DTYPES[self.config.target.dtype].itemsize
        bucket = max(p.bucket for p in self.packs)
        features = bucket * len(self.drafter.target_layer_ids) * self.drafter.hidden_size * width
        # The channels' hidden states stay on the device that made them until a drafter takes them.
        waiting = features * self.config.train.channel_capacity * len(self.drafter_devices) / self.plan.targets
        running = bucket * (6 * self.drafter.hidden_size + 3 * facts.text_config().intermediate_size) * width
        for target in self.targets:
            sizes[str(target.device)] = sizes.get(str(target.device), 0.0) + waiting + running
        for target in {t.device: t for t in self.targets}.values():
            sizes[str(target.device)] += sum(p.numel() * p.element_size() for p in target.model.parameters())
        if not self.targets:
            sizes["cpu"] = waiting
        for device in self.drafter_devices:
            borrowed = device in [t.device for t in self.targets]
            ends = 0 if borrowed else facts.embedding.numel() * width * (1 if facts.head is facts.embedding else 2)
            sizes[str(device)] = sizes.get(str(device), 0.0) + replica_bytes(self, bucket, device) + ends
        return [f"about {size / 2**20:,.0f} MiB on {device}" for device, size in sorted(sizes.items())]


def replica_bytes(run: Resolved, bucket: int, device: torch.device) -> float:
    """Estimated bytes of one drafter replica on a device at its peak: weights and gradient in fp32, its share of the moments, a copy
    of the weights in the compute type, saved activations of one pack, the mask, a chunk of logits."""
    config, width = run.drafter, DTYPES[run.config.train.precision].itemsize
    parameters = parameter_count(config)
    slots = run.config.train.anchors * config.block_size
    keys = bucket + slots
    heads, kv = config.num_attention_heads, config.num_key_value_heads * config.head_dim
    fused = len(config.target_layer_ids) * config.hidden_size
    per_slot = 8 * config.hidden_size + 6 * heads * config.head_dim + 4 * config.intermediate_size
    per_key = 4 * kv + 2 * heads * config.head_dim
    activations = config.num_hidden_layers * (slots * per_slot + keys * per_key) + bucket * (fused + 4 * config.hidden_size)
    # In parts, scores are few and the mask is one row a block; elsewhere the mask is dense.
    seen = 2 * SCORES * width + bucket * run.config.train.anchors if run.attention == "blocks" else slots * keys
    logits = min(suitable_chunk(device), slots * config.vocab_size) * 8
    cast = parameters * width if width < 4 else 0
    return (8 + 8 / len(run.drafter_devices)) * parameters + cast + activations * width + seen + logits


def resolve(config: Config, day: date | None = None) -> Resolved:
    """Load the targets and the data and decide everything; raises errors for whatever cannot work.

    day: the date that chat templates print, today by default; a resumed run passes the one it began with.
    """
    day = day or cached_day(config) or date.today()
    target_devices = resolve_devices(config.target.devices, for_target=True)
    drafter_devices = resolve_devices(config.train.devices, for_target=False)
    if config.train.packs_per_step % len(drafter_devices):
        raise ConfigError(
            f"train.packs_per_step {config.train.packs_per_step} cannot be shared evenly by {len(drafter_devices)} drafter replicas; "
            "choose a multiple"
        )
    if config.draft.attention == "flex" and any(d.type == "cpu" for d in drafter_devices):
        raise ConfigError("draft.attention 'flex' has no backward on CPU, where the drafter would train; use 'auto'")
    inputs = from_cache(config) if config.hidden_states.source == "cached" else from_target(config, target_devices, day)
    documents = inputs.documents
    drafter, mask_choice = drafter_config(config.draft, inputs.facts)
    if inputs.cache is not None:
        check_cache(config, inputs.cache, drafter)
    train = config.train
    buckets = config.data.buckets
    if buckets == "auto":
        buckets = choose_buckets(config.data.longest, lambda chosen: pack(documents, list(chosen), train.seed)[1].waste)
    packs, packing = pack(documents, buckets, train.seed)
    steps = total_steps(len(packs), train.packs_per_step, train.epochs, train.max_steps)
    plan = Plan(len(packs), train.packs_per_step, steps, len(drafter_devices), max(1, len(inputs.targets)), train.seed)
    gamma = train.gamma if train.gamma is not None else default_gamma(drafter.block_size)
    settings = StepSettings(train.anchors, gamma, DTYPES[train.precision], train.seed, train.loss, train.dpace_alpha)
    return Resolved(config, day, target_devices, drafter_devices, inputs, packs, packing, drafter, mask_choice, plan, settings)

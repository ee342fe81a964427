"""The only assembly point: configuration to objects, and the jobs the command line runs."""

import copy
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from draftsmith.checkpoint import save as checkpoints
from draftsmith.checkpoint.export import Format, Precision, check_weights, export_drafter, load_drafter
from draftsmith.config import Config, DraftSection, TargetSection
from draftsmith.data.chat import DataCounts, encode_files
from draftsmith.data.packing import PackingReport, pack
from draftsmith.decode.speculate import Speculator
from draftsmith.draft.loss import CHUNK_ELEMENTS, default_gamma
from draftsmith.draft.model import FULL, Drafter, DrafterConfig, default_target_layer_ids
from draftsmith.errors import CheckpointError, ConfigError, UsageError
from draftsmith.evaluate.suite import Prompt, load_prompts, measure_tau
from draftsmith.pipeline.coordinator import Coordinator, Emit, Job, Outcome, StopRequest, stop_on_signals
from draftsmith.pipeline.plan import Plan, generator_for, learning_rate, total_steps
from draftsmith.pipeline.replicas import Replica
from draftsmith.pipeline.step import FrozenEnds, StepSettings
from draftsmith.runs.events import RunEvents
from draftsmith.target.capture import Capture
from draftsmith.target.load import DTYPES, Target, choose_mask_token, load_target
from draftsmith.types import Tokens

Say = Callable[[str], None]


def resolve_devices(names: list[str], *, for_target: bool) -> list[torch.device]:
    """Devices by name. `auto`: the CPU without GPUs; with one GPU that one; with more, the first for the target and the
    others for drafters. Raises ConfigError for a device that is not there."""
    gpus = torch.cuda.device_count()
    resolved = []
    for name in names:
        if name == "auto":
            chosen = ["cpu"] if gpus == 0 else ["cuda:0"] if for_target or gpus == 1 else [f"cuda:{i}" for i in range(1, gpus)]
            resolved += [torch.device(c) for c in chosen]
            continue
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(f"device '{name}' is not a device; expected 'auto', 'cpu' or 'cuda:N'") from None
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigError(
                f"device '{name}' is not on this machine, which has {gpus} CUDA devices; use 'cpu' or fewer devices"
            )
        resolved.append(torch.device("cuda", device.index or 0) if device.type == "cuda" else device)
    return resolved


def drafter_config(section: DraftSection, target: Target) -> tuple[DrafterConfig, str]:
    """The drafter's shape from its section, taking from the target what is not given; and how the mask token was chosen."""
    text = target.text_config()
    mask_token_id, how = choose_mask_token(target.tokenizer, target.vocab_size, section.mask_token_id)
    ids = section.target_layer_ids
    rope = getattr(text, "rope_parameters", None) or {}
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


@dataclass(frozen=True)
class Resolved:
    """A run fully decided but not started."""

    config: Config
    target_devices: list[torch.device]
    drafter_devices: list[torch.device]
    targets: list[Target]
    packs: list[Tokens]
    counts: DataCounts
    packing: PackingReport
    drafter: DrafterConfig
    mask_choice: str
    plan: Plan
    settings: StepSettings

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to continue this run exactly."""
        train = self.config.train
        return {
            "data": data_digest(self.packs),
            "drafter": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.drafter).items()},
            "seed": train.seed,
            "packs_per_step": train.packs_per_step,
            "anchors": train.anchors,
            "gamma": self.settings.gamma,
            "precision": train.precision,
        }

    def describe(self) -> list[str]:
        """The plan for people, a line each."""
        train, drafter, plan = self.config.train, self.drafter, self.plan
        parameters = parameter_count(drafter)
        lines = [
            f"target     {self.config.target.model}: {self.targets[0].num_layers} layers, width {drafter.hidden_size}, "
            f"vocabulary {drafter.vocab_size}, {self.config.target.dtype}",
            f"devices    target threads on {', '.join(map(str, self.target_devices))}; "
            f"drafter threads on {', '.join(map(str, self.drafter_devices))}",
            f"drafter    {drafter.num_hidden_layers} layers, {parameters / 1e6:.2f} M parameters, block size {drafter.block_size}, "
            f"target layers {list(drafter.target_layer_ids)}, attention {self.config.draft.attention}",
            f"mask token {drafter.mask_token_id} ({self.mask_choice})",
            f"data       {self.counts.line()}",
            f"buckets    {self.packing.line()}",
            f"steps      {plan.steps} of {plan.per_step} packs ({plan.steps * plan.per_step / plan.packs:.2f} epochs), "
            f"{train.anchors} anchors a pack, {train.precision}, lr {train.lr:g}, seed {train.seed}",
            f"checkpoint every {self.config.checkpoint.every} steps, keep {self.config.checkpoint.keep}, "
            f"{12 * parameters / 1e6:.1f} MB each, in {self.config.run.dir}",
        ]
        return lines + [f"memory     {line}" for line in self.memory()]

    def memory(self) -> list[str]:
        """Estimated peak per device."""
        sizes: dict[str, float] = {}
        target_bytes = sum(p.numel() * p.element_size() for p in self.targets[0].model.parameters())
        for device in set(self.target_devices):
            sizes[str(device)] = sizes.get(str(device), 0.0) + target_bytes
        for device in self.drafter_devices:
            sizes[str(device)] = sizes.get(str(device), 0.0) + replica_bytes(self)
        return [f"about {size / 2**20:,.0f} MiB on {device}" for device, size in sorted(sizes.items())]


def parameter_count(config: DrafterConfig) -> int:
    """Trainable parameters of a drafter, without building it in memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in Drafter(config).parameters())


def replica_bytes(run: Resolved) -> float:
    """Estimated bytes of one drafter replica at its peak: weights, gradient and moments in fp32, saved activations of one
    pack, the mask, a chunk of logits, and its channel full of hidden states."""
    config, width = run.drafter, DTYPES[run.config.train.precision].itemsize
    bucket = max(p.bucket for p in run.packs)
    slots = run.config.train.anchors * config.block_size
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    fused = len(config.target_layer_ids) * config.hidden_size
    per_slot = 8 * config.hidden_size + 6 * heads + 4 * config.intermediate_size
    per_key = 4 * kv + 2 * heads
    activations = config.num_hidden_layers * (slots * per_slot + (bucket + slots) * per_key) + bucket * (
        fused + 4 * config.hidden_size
    )
    logits = min(CHUNK_ELEMENTS, slots * config.vocab_size) * 8
    channel = run.config.train.channel_capacity * bucket * fused * DTYPES[run.config.target.dtype].itemsize
    return 16 * parameter_count(config) + activations * width + slots * (bucket + slots) + logits + channel


def resolve(config: Config) -> Resolved:
    """Load the targets and the data and decide everything; raises errors for whatever cannot work."""
    target_devices = resolve_devices(config.target.devices, for_target=True)
    drafter_devices = resolve_devices(config.train.devices, for_target=False)
    if config.train.packs_per_step % len(drafter_devices):
        raise ConfigError(
            f"train.packs_per_step {config.train.packs_per_step} cannot be shared evenly by {len(drafter_devices)} drafter replicas; "
            "choose a multiple"
        )
    for path in config.data.train:
        # Before the target loads: a typing error should not cost a minute.
        if not Path(path).is_file():
            raise ConfigError(f"data.train names '{path}', which is not an existing file; give JSONL files")
    targets = load_target(config.target, target_devices)
    drafter, mask_choice = drafter_config(config.draft, targets[0])
    documents, counts = encode_files(
        targets[0].tokenizer,
        [Path(p) for p in config.data.train],
        longest=max(config.data.buckets),
        vocab_size=targets[0].vocab_size,
        ends=set(targets[0].end_ids),
    )
    packs, packing = pack(documents, config.data.buckets, config.train.seed)
    train = config.train
    steps = total_steps(len(packs), train.packs_per_step, train.epochs, train.max_steps)
    plan = Plan(len(packs), train.packs_per_step, steps, len(drafter_devices), len(targets), train.seed)
    gamma = train.gamma if train.gamma is not None else default_gamma(drafter.block_size)
    settings = StepSettings(train.anchors, gamma, DTYPES[train.precision], train.seed)
    return Resolved(
        config, target_devices, drafter_devices, targets, packs, counts, packing, drafter, mask_choice, plan, settings
    )


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process; raises UsageError if another holds it. The lock goes with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"run folder '{folder}' is in use by another process; stop it or choose another run.dir") from None
        yield


def find_resume(root: Path, resume: str | None, say: Say) -> checkpoints.Checkpoint | None:
    """The checkpoint to continue from; says what was skipped. Without `resume`, refuses a folder that already has some."""
    latest, skipped = checkpoints.find_latest(root)
    if resume is None:
        if latest is not None:
            raise UsageError(
                f"run folder '{root}' already has {latest.name}; continue it with --resume latest or choose another run.dir"
            )
        return None
    if resume != "latest":
        return checkpoints.load_checkpoint(Path(resume))
    for line in skipped:
        say(line)
    if latest is None:
        say(f"nothing to resume in {root}: starting at step 0")
        return None
    return checkpoints.load_checkpoint(latest)


def check_fit(run: Resolved, checkpoint: checkpoints.Checkpoint) -> None:
    """Raise CheckpointError unless the checkpoint continues exactly this run."""
    now, then = run.fingerprint(), checkpoint.state.get("fingerprint", {})
    differences = []
    for key, value in now.items():
        if key == "drafter":
            old = then.get("drafter", {})
            differences += [f"{k} was {old.get(k)}, is now {v}" for k, v in value.items() if old.get(k) != v]
        elif then.get(key) != value:
            differences.append(
                "the training data changed" if key == "data" else f"train.{key} was {then.get(key)}, is now {value}"
            )
    if differences:
        raise CheckpointError(
            f"checkpoint at step {checkpoint.step} does not continue this run: {'; '.join(differences)}. "
            "Restore these values, or train anew in another run.dir"
        )


def build_replicas(run: Resolved, checkpoint: checkpoints.Checkpoint | None) -> list[Replica]:
    """One replica per drafter device, all with the same weights."""
    first = Drafter(run.drafter, run.config.draft.attention)
    first.initialise(generator_for(run.config.train.seed, "weights", 0))
    if checkpoint is not None:
        check_weights(first, checkpoint.weights, f"checkpoint at step {checkpoint.step}")
    target = run.targets[0]
    replicas = []
    for rank, device in enumerate(run.drafter_devices):
        drafter = copy.deepcopy(first).to(device)
        # On the target's own device the drafter borrows the very same tensors; elsewhere it needs a copy.
        ends = FrozenEnds(target.embedding.to(device), target.head.to(device))
        replica = Replica(rank, drafter, ends, run.config.train)
        if checkpoint is not None:
            replica.load(checkpoint.weights, checkpoint.optimizer)
        replicas.append(replica)
    return replicas


def _saver(run: Resolved, root: Path, emit: Emit) -> Callable[[int, Replica], None]:
    train, fingerprint = run.config.train, run.fingerprint()

    def save(step: int, replica: Replica) -> None:
        checkpoint = checkpoints.Checkpoint(
            step=step,
            config=run.drafter,
            weights=replica.weights(),
            optimizer=replica.optimizer_state(),
            scheduler={
                "name": "cosine",
                "last_step": step,
                "peak_lr": train.lr,
                "warmup": train.warmup,
                "steps": run.plan.steps,
                "next_lr": learning_rate(step, peak=train.lr, steps=run.plan.steps, warmup=train.warmup),
            },
            rng={
                "seed": train.seed,
                "rule": "every draw is a function of seed, purpose and stream position (pipeline/plan.py)",
            },
            state={
                "epoch": step * run.plan.per_step / run.plan.packs,
                "max_steps": run.plan.steps,
                "weights_sha256": replica.digest(),
                "target": run.config.target.model,
                "fingerprint": fingerprint,
            },
        )
        path = checkpoints.save_checkpoint(root, checkpoint, run.config.checkpoint.keep)
        emit("checkpoint", {"step": step, "path": str(path), "weights_sha256": replica.digest()})

    return save


def _evaluator(run: Resolved, prompts: list[Prompt], emit: Emit, stop: StopRequest) -> Callable[[int, Replica], None]:
    def evaluate(step: int, replica: Replica) -> None:
        if not prompts:
            return
        target = run.targets[0]
        drafter = replica.drafter if replica.flat.device == target.device else copy.deepcopy(replica.drafter).to(target.device)
        tau = measure_tau(Speculator(target, drafter), prompts, run.config.evaluate.max_new_tokens, lambda: bool(stop))
        if tau is not None:
            emit("evaluation", {"step": step, "tau": tau, "prompts": len(prompts)})

    return evaluate


def _write_config(config: Config, root: Path) -> None:
    aside = root / ".config.yaml.tmp"
    aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    os.replace(aside, root / "config.yaml")


def train(config: Config, *, resume: str | None, say: Say) -> Outcome:
    """Train to the end of the plan, or to the first SIGTERM or SIGINT, saving last. Raises DraftsmithError."""
    root = Path(config.run.dir)
    stop = StopRequest()
    with stop_on_signals(stop), run_lock(root):
        checkpoint = find_resume(root, resume, say)
        run = resolve(config)
        if checkpoint is not None:
            check_fit(run, checkpoint)
        for line in run.describe():
            say(line)
        prompts = []
        if config.evaluate.prompts is not None:
            prompts = load_prompts(run.targets[0], Path(config.evaluate.prompts), config.evaluate.count)
        replicas = build_replicas(run, checkpoint)
        checkpoints.require_space(root, 2 * checkpoints.checkpoint_bytes(replicas[0].weights()))
        _write_config(config, root)
        start_step = checkpoint.step if checkpoint is not None else 0
        if start_step:
            say(f"resuming at step {start_step}")
        job = Job(
            replicas=replicas,
            captures=[Capture(target, run.drafter.target_layer_ids) for target in run.targets],
            packs=run.packs,
            plan=run.plan,
            settings=run.settings,
            peak_lr=config.train.lr,
            warmup=config.train.warmup,
            channel_capacity=config.train.channel_capacity,
            cpu_threads=config.train.cpu_threads,
            checkpoint_every=config.checkpoint.every,
        )
        with RunEvents(root, steps=run.plan.steps, start_step=start_step, log_every=config.run.log_every) as events:
            coordinator = Coordinator(
                job,
                save=_saver(run, root, events.emit),
                evaluate=_evaluator(run, prompts, events.emit, stop),
                emit=events.emit,
                stop=stop,
            )
            return coordinator.run(start_step)


def load_pair(target: str, drafter: Path, *, dtype: str = "bf16", device: str = "auto") -> tuple[Target, Speculator]:
    """A target and an exported drafter (or checkpoint) for decoding on one device. Raises DraftsmithError."""
    where = resolve_devices([device], for_target=True)
    section = TargetSection.model_validate({"model": target, "dtype": dtype, "devices": [device]})
    loaded = load_target(section, where)[0]
    return loaded, Speculator(loaded, load_drafter(drafter, device=where[0]))


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
    export_drafter(
        out,
        drafter,
        format=format,
        dtype=dtype,
        target=target,
        target_architectures=[type(loaded.model).__name__],
        embedding=loaded.embedding,
    )

"""The configuration: strict, typed, from a YAML file plus dotted overrides.

Every section has its own model; parts receive only their own section. An unknown key is an error that names the nearest
known one. Nothing is read from environment variables.
"""

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftsmith.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: immutable, and no key it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSection(Section):
    """The frozen model that is to be made faster."""

    model: str = Field(description="Hugging Face folder or id, or a path to a .gguf file")
    dtype: Literal["fp32", "bf16"] = "bf16"
    devices: list[str] = Field(default=["auto"], min_length=1, description="one replica and one thread per device")
    blocks: str | None = Field(
        default=None,
        description="path of the list of decoder blocks in the model, where it is not found by itself, for example transformer.h",
    )


class DataSection(Section):
    """Training text and how it is packed."""

    train: list[str] = Field(
        min_length=1,
        description=".jsonl, .json, .parquet, saved datasets or hf:NAME:SPLIT, with `messages`, `conversations` or `text`",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="told to the chat template for every row, for example {enable_thinking: false}; a row's own win"
    )
    longest: int = Field(default=3072, ge=2, description="longer samples are cut; the largest bucket when buckets are chosen")
    buckets: Literal["auto"] | list[int] = Field(
        default="auto", description="context lengths of packs; auto chooses from the data"
    )


class HiddenStatesSection(Section):
    """Where the target's hidden states come from."""

    source: Literal["live", "hybrid", "cached", "files", "server"] = Field(
        default="live",
        description="live: the target runs beside the drafters; hybrid: live the first time, kept in folder and read from there "
        "afterwards; cached: read from a folder that `draftsmith cache` or a hybrid run has filled, without a target; files: read from a "
        "folder of files as vLLM's hidden-state extraction writes them; server: asked of a vLLM server that extracts them",
    )
    folder: str | None = Field(
        default=None, description="where states lie; of a server: where its files lie here, if not where it says"
    )
    url: str | None = Field(default=None, description="of the server, up to and including /v1")
    model: str | None = Field(default=None, description="the target's name on the server")


class DraftSection(Section):
    """Shape of the drafter; None takes the target's value."""

    layers: int = Field(default=5, ge=1)
    block_size: int = Field(default=16, ge=2)
    target_layers: int = Field(default=5, ge=1, description="how many target layers are fused (n)")
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = Field(default=None, ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2, multiple_of=2)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: int | None = Field(default=None, ge=1)
    attention: Literal["auto", "sdpa", "blocks", "flex"] = Field(
        default="auto",
        description="how training attends: sdpa, torch's fused kernel; blocks, only what a block sees; flex, on GPUs; auto takes blocks where a "
        "drafter trains on a CPU, else sdpa",
    )


class TrainSection(Section):
    """The recipe. Defaults are DFlash's (arXiv 2602.06036)."""

    devices: list[str] = Field(default=["auto"], min_length=1, description="one drafter replica and thread per device")
    epochs: float = Field(default=6.0, gt=0, allow_inf_nan=False)
    max_steps: int | None = Field(default=None, ge=1)
    packs_per_step: int = Field(default=8, ge=1, description="global batch, in packs, over all replicas")
    anchors: int = Field(default=512, ge=1)
    lr: float = Field(default=6e-4, gt=0, allow_inf_nan=False)
    warmup: float = Field(default=0.04, ge=0, le=1, description="share of the steps")
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    loss: Literal["ce", "dpace", "kl"] = Field(
        default="ce",
        description="ce: cross-entropy, slots weighted by decay; dpace: cross-entropy, slots weighted by what they add to the expected "
        "accepted length (arXiv 2605.18810); kl: divergence from the target's own distribution, slots weighted by decay",
    )
    gamma: float | None = Field(default=None, gt=0, description="decay of slot weights; None: by block size")
    dpace_alpha: float = Field(default=0.5, gt=0, le=1, description="smoothing of D-PACE's confidences")
    precision: Literal["fp32", "bf16"] = "bf16"
    activation_checkpointing: bool = Field(
        default=False,
        description="keep only each layer's input and run the layer again for its gradients: less memory, a third more work",
    )
    seed: int = 0
    channel_capacity: int = Field(default=4, ge=1, description="packs buffered per drafter replica")
    cpu_threads: int = Field(default=1, ge=1, description="intra-op threads of each worker on a CPU device")


class CompileSection(Section):
    """Whether and how the training step is compiled (docs/compile-safety.md)."""

    enabled: Literal["auto"] | bool = Field(default="auto", description="auto weighs warm-up time against the steps to do")
    unplanned: Literal["warn", "error"] = "warn"
    cache: str = Field(default="~/.cache/draftsmith/compile", description="where compiled artefacts are kept")


class CheckpointSection(Section):
    """When to save and what to keep."""

    every: int = Field(default=500, ge=1, description="optimizer steps")
    keep: int = Field(default=3, ge=1)


class EvaluateSection(Section):
    """Held-out prompts decoded at checkpoints through the real decoding path."""

    prompts: str | None = Field(default=None, description="JSONL with `messages` or `text`")
    max_new_tokens: int = Field(default=128, ge=1)
    count: int = Field(default=16, ge=1, description="prompts decoded at each checkpoint")


class RunSection(Section):
    """Where the run lives."""

    dir: str = "runs/train"
    log_every: int = Field(default=10, ge=1)


class Config(Section):
    """Everything `draftsmith train` needs."""

    target: TargetSection
    data: DataSection
    hidden_states: HiddenStatesSection = HiddenStatesSection()
    draft: DraftSection = DraftSection()
    train: TrainSection = TrainSection()
    compile: CompileSection = CompileSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    run: RunSection = RunSection()


def _explain(error: ValidationError, place: str) -> str:
    """All problems of a validation error as one line, each with its key, its value and a cure."""
    parts = []
    for problem in error.errors():
        key = ".".join(str(p) for p in problem["loc"])
        if problem["type"] == "extra_forbidden":
            parts.append(f"unknown key '{key}'{_suggest(key)}")
        elif problem["type"] == "missing":
            parts.append(f"'{key}' is required but not given")
        else:
            parts.append(f"'{key}' is {problem['input']!r}: {problem['msg']}")
    return f"{place}: " + "; ".join(parts)


def _known_keys() -> list[str]:
    keys = []
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, Section)
        keys += [name, *(f"{name}.{key}" for key in section.model_fields)]
    return keys


def _suggest(key: str) -> str:
    """The nearest key of the same section, else the same name in another section, else the nearest of all."""
    known = _known_keys()
    section, _, leaf = key.rpartition(".")
    leaves = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    near = [f"{section}.{name}".lstrip(".") for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    near = near or [k for k in known if leaf in k.split(".")[1:]][:1]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else f"; sections are {', '.join(Config.model_fields)}"


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    path = key.split(".")
    if not sign or len(path) != 2 or not all(path):
        raise ConfigError(f"override '{override}' is not of the form section.key=value, for example train.lr=1e-4")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"override '{override}': the value is not YAML; quote it for your shell") from error
    section = tree.setdefault(path[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"override '{override}': section '{path[0]}' is {section!r} in the file, not a mapping")
    section[path[1]] = value


def parse_config(tree: object, place: str, overrides: list[str] | None = None) -> Config:
    """Validate a parsed YAML tree with overrides applied; `place` names its source in errors."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{place}: expected sections ({', '.join(Config.model_fields)}), found {type(tree).__name__}")
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for override in overrides or []:
        _apply(merged, override)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, place)) from None
    _cross_check(config, place)
    return config


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read `path` (YAML) and apply `section.key=value` overrides; raises ConfigError."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file '{path}' does not exist; give an existing file with --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{path}' cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"config file '{path}' is not YAML: {' '.join(str(error).split())}") from error
    return parse_config(tree, str(path), overrides)


def _cross_check(config: Config, place: str) -> None:
    buckets = config.data.buckets
    if buckets == []:
        raise ConfigError(f"{place}: data.buckets is empty; give context lengths, for example [512, 1024], or auto")
    smallest = config.data.longest if buckets == "auto" else min(buckets)
    if config.draft.block_size > smallest:
        raise ConfigError(
            f"{place}: draft.block_size {config.draft.block_size} is larger than the smallest of data.buckets, {smallest}; "
            "lower the block size or raise the bucket"
        )
    states = config.hidden_states
    if states.source in ("hybrid", "cached", "files") and states.folder is None:
        raise ConfigError(
            f"{place}: hidden_states.source is '{states.source}' but hidden_states.folder is not set; name a folder"
        )
    if states.source == "server" and (states.url is None or states.model is None):
        raise ConfigError(
            f"{place}: hidden_states.source is 'server' but hidden_states.url or hidden_states.model is not set; set both"
        )
    if states.url is not None and "@" in states.url.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            f"{place}: hidden_states.url holds a name or a password, which would reach records and logs; leave them out"
        )
    if states.source in ("files", "server") and config.train.loss == "kl":
        raise ConfigError(
            f"{place}: train.loss is 'kl', which needs the target's final states, but hidden_states.source '{states.source}' does not give "
            "them normed; use ce or dpace, or another source"
        )
    replicas = len(config.train.devices)
    if config.train.packs_per_step % replicas:
        raise ConfigError(
            f"{place}: train.packs_per_step {config.train.packs_per_step} cannot be shared evenly by {replicas} drafter "
            "replicas (train.devices); choose a multiple"
        )
    if config.draft.attention == "flex" and any(d.startswith("cpu") for d in config.train.devices):
        raise ConfigError(f"{place}: draft.attention 'flex' has no backward on CPU but train.devices has one; use 'auto' there")
    if config.draft.attention == "flex" and config.compile.enabled is False:
        raise ConfigError(
            f"{place}: draft.attention 'flex' works only compiled but compile.enabled is false; set it to auto, or use draft.attention 'auto'"
        )

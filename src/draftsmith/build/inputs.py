"""What a run is made from: the target and the text, or a cache folder that stands for both."""

from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.config import Config, DataSection
from draftsmith.data.chat import ChatFormat, DataCounts, encode_files
from draftsmith.data.files import is_there
from draftsmith.draft.model import DrafterConfig
from draftsmith.errors import CaptureError, ConfigError, TargetError
from draftsmith.target.cache import StateCache, documents_digest
from draftsmith.target.cache_index import INDEX, CacheHeader, read_header
from draftsmith.target.facts import TargetFacts
from draftsmith.target.load import DTYPES, Target, load_target
from draftsmith.types import Document


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
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device '{name}' is of a kind that is not supported; expected 'auto', 'cpu' or 'cuda:N'")
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigError(
                f"device '{name}' is not on this machine, which has {gpus} CUDA devices; use 'cpu' or fewer devices"
            )
        resolved.append(torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu"))
    return resolved


def chat_format(target: TargetFacts, section: DataSection, day: date | None = None) -> ChatFormat:
    """How the target is spoken to in training, in evaluation, and when it writes answers: the same everywhere."""
    return ChatFormat(target.tokenizer, target.end_ids, day, section.chat_template_kwargs)


def _check_files(config: Config) -> None:
    # Before the target loads: a typing error should not cost a minute.
    for key, paths in (("data.train", config.data.train), ("evaluate.prompts", [config.evaluate.prompts])):
        for path in paths:
            if path is not None and not is_there(path):
                raise ConfigError(
                    f"{key} names '{path}', which does not exist; give a .jsonl, .json or .parquet file, a folder written by datasets' "
                    "save_to_disk, or hf:NAME:SPLIT"
                )


class Inputs(NamedTuple):
    """What a run is made from. targets: none where states are read from a cache."""

    facts: TargetFacts
    documents: list[Document]
    counts: DataCounts
    targets: list[Target]
    cache: StateCache | None


def from_target(config: Config, devices: list[torch.device], day: date) -> Inputs:
    """Load the target on each device and encode the text. Where others run the target, only its facts are kept. Raises
    DraftsmithError."""
    _check_files(config)
    elsewhere = config.hidden_states.source in ("files", "server")
    targets = load_target(config.target, [torch.device("cpu")] if elsewhere else devices)
    documents, counts = encode_files(
        chat_format(targets[0], config.data, day),
        config.data.train,
        longest=longest_document(config.data),
        vocab_size=targets[0].vocab_size,
    )
    facts = TargetFacts(**{field.name: getattr(targets[0], field.name) for field in fields(TargetFacts)})
    return Inputs(facts, documents, counts, [] if elsewhere else targets, None)


def from_cache(config: Config) -> Inputs:
    """Everything from a cache folder: neither the target nor the text need be on this machine."""
    assert config.hidden_states.folder is not None
    cache = StateCache.open(Path(config.hidden_states.folder))
    facts = cache.facts(torch.device("cpu"))
    try:
        counts = DataCounts(**cache.header.data["counts"])
    except (KeyError, TypeError) as error:
        raise CaptureError(
            f"cache '{cache.folder}': its index does not say what it was made of ({error}); make it again"
        ) from None
    return Inputs(facts, cache.documents(), counts, [], cache)


def cached_day(config: Config) -> date | None:
    """The day that chat templates saw when the cache of this configuration was begun, if there is one: tomorrow's would be other text."""
    section = config.hidden_states
    if section.source not in ("hybrid", "cached") or section.folder is None or not (Path(section.folder) / INDEX).is_file():
        return None
    return date.fromisoformat(str(read_header(Path(section.folder)).data.get("day", date.today().isoformat())))


def load_again(config: Config, device: torch.device, facts: TargetFacts) -> Target:
    """The target that these facts are of, loaded. Raises TargetError if it is not there, or another one is."""
    target = load_target(config.target, [device])[0]
    if target.digest != facts.digest:
        raise TargetError(
            f"target.model '{config.target.model}' is another model, or another version of it, than '{facts.name}', of which the cached hidden "
            "states are; give that one"
        )
    return target


def longest_document(section: DataSection) -> int:
    """Tokens kept of a sample at most."""
    return section.longest if section.buckets == "auto" else max(section.buckets)


def _told_data(section: DataSection) -> dict[str, Any]:
    """What of the data section decides the documents, as a cache records it."""
    return {"train": section.train, "chat_template_kwargs": section.chat_template_kwargs, "longest": longest_document(section)}


def make_cache(config: Config, inputs: Inputs, drafter: DrafterConfig, day: date) -> StateCache:
    """The cache that this configuration names, made or opened; day: what chat templates saw. Raises DraftsmithError."""
    assert config.hidden_states.folder is not None
    header = CacheHeader(
        target=inputs.facts.digest,
        layer_ids=drafter.target_layer_ids,
        width=inputs.facts.hidden_size,
        dtype=_dtype_name(config),
        final=config.train.loss == "kl",
        documents=documents_digest(inputs.documents),
        data={**_told_data(config.data), "counts": asdict(inputs.counts), "day": day.isoformat()},
    )
    return StateCache.create(Path(config.hidden_states.folder), header, inputs.facts, inputs.documents)


def _dtype_name(config: Config) -> str:
    return str(DTYPES[config.target.dtype]).removeprefix("torch.")


def check_cache(config: Config, cache: StateCache, drafter: DrafterConfig) -> None:
    """Raise ConfigError where a cache that was made earlier is not what this run would have made."""
    header = cache.header
    told = {
        "target layers": (header.layer_ids, drafter.target_layer_ids),
        "target.dtype": (header.dtype, _dtype_name(config)),
        **{f"data.{key}": (header.data.get(key), value) for key, value in _told_data(config.data).items()},
    }
    differences = [f"{key} was {was}, is now {now}" for key, (was, now) in told.items() if was != now]
    if config.train.loss == "kl" and not header.final:
        differences.append("it has no final states, which train.loss=kl needs")
    if differences:
        raise ConfigError(
            f"hidden_states.folder '{cache.folder}' was made otherwise: {'; '.join(differences)}; restore that, or make another with "
            "`draftsmith cache`"
        )

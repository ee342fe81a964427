"""Drafters as others load them: `dflash` (also read by vLLM and SGLang) and `speculators`; and our own strict loader."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from draftsmith.checkpoint import contract
from draftsmith.checkpoint.save import MANIFEST, fault_of
from draftsmith.draft.mask import Backend
from draftsmith.draft.model import Drafter, DrafterConfig
from draftsmith.errors import CheckpointError, UsageError

Format = Literal["dflash", "speculators"]
Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_drafter(folder: Path, *, device: torch.device | str = "cpu", backend: Backend = "sdpa") -> Drafter:
    """A drafter from any folder in the dflash layout, checkpoints included. Strict: every tensor must be there, none over.

    Raises CheckpointError.
    """
    fault = fault_of(folder) if (folder / MANIFEST).exists() else None
    if fault is not None:
        raise CheckpointError(f"drafter '{folder}' is a damaged checkpoint: {fault}; use another one")
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load((folder / "model.safetensors").read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"drafter '{folder}': {Path(str(error.filename)).name} is missing; give an exported folder"
        ) from None
    except Exception as error:
        raise CheckpointError(f"drafter '{folder}' cannot be read: {' '.join(str(error).split())}") from error
    drafter = Drafter(contract.from_json(tree, folder / "config.json"), backend)
    check_weights(drafter, weights, str(folder))
    drafter.load_state_dict(weights)
    return drafter.to(device)


def check_weights(drafter: Drafter, weights: dict[str, Tensor], place: str) -> None:
    """Raise CheckpointError unless names and shapes are exactly the drafter's."""
    expected = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    missing, over = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    wrong = [
        f"{n} is {tuple(weights[n].shape)}, expected {expected[n]}"
        for n in sorted(expected.keys() & weights.keys())
        if tuple(weights[n].shape) != expected[n]
    ]
    if missing or over or wrong:
        raise CheckpointError(
            f"{place}: weights do not fit the drafter's config (missing: {missing or 'none'}; unexpected: {over or 'none'}; "
            f"wrong shape: {wrong or 'none'})"
        )


def _speculators_config(config: DrafterConfig, dtype: str, target: str, architectures: list[str]) -> dict[str, Any]:
    layers = contract.transformer_fields(config)
    del layers["rope_theta"]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "dtype": dtype,
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        # That format counts hidden states, ours target blocks: block j gives hidden state j + 1.
        "aux_hidden_state_layer_ids": [j + 1 for j in config.target_layer_ids],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            # Slot 0 holds the token already known: a block of K drafts K - 1.
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }


def export_drafter(
    folder: Path,
    drafter: Drafter,
    *,
    format: Format,
    dtype: Precision,
    target: str | None = None,
    target_architectures: list[str] | None = None,
    embedding: Tensor | None = None,
) -> None:
    """Write config.json and model.safetensors to a new `folder`, whole or not at all.

    The speculators format also names the target and saves its embeddings [V, D]; give both for it. Raises UsageError if
    the folder exists already.
    """
    if folder.exists():
        raise UsageError(f"export folder '{folder}' already exists; give a new one")
    name = "float32" if dtype == "fp32" else "bfloat16"
    weights = {n: t.detach().to("cpu", DTYPES[dtype]).contiguous().clone() for n, t in drafter.state_dict().items()}
    if format == "dflash":
        tree = contract.to_json(drafter.config, name)
    else:
        if target is None or embedding is None:
            raise UsageError("the speculators format refers to the target and saves its embeddings; give --target")
        tree = _speculators_config(drafter.config, name, target, target_architectures or [])
        weights["embed_tokens.weight"] = embedding.detach().to("cpu", DTYPES[dtype]).contiguous().clone()
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        aside.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"export to '{folder}' failed ({error}); free some space or choose another place") from error

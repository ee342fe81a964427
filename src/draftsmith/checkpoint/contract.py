"""The drafter's config.json: what `dflash` 0.1.0, vLLM and SGLang read (DESIGN.md, "Checkpoint contract")."""

from pathlib import Path
from typing import Any

from draftsmith.draft.model import FULL, DrafterConfig
from draftsmith.errors import CheckpointError


def transformer_fields(config: DrafterConfig) -> dict[str, Any]:
    """The usual Qwen3 fields of the drafter's layers."""
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        # Both spellings: transformers 5 reads rope_parameters, older readers rope_theta.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        # Never the target's flag: the drafter has neither embeddings nor a head of its own to tie.
        "tie_word_embeddings": False,
    }


def to_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json of a drafter whose tensors are saved as `dtype` ("float32" or "bfloat16")."""
    return {
        "architectures": ["DFlashDraftModel"],
        **transformer_fields(config),
        "dtype": dtype,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }


def from_json(tree: Any, place: Path) -> DrafterConfig:
    """Read a config.json; block_size may stand in either place, but not with two values. Raises CheckpointError."""
    if not isinstance(tree, dict) or not isinstance(tree.get("dflash_config") or {}, dict):
        raise CheckpointError(f"{place}: not a DFlash drafter config (expected JSON objects)")
    nested = tree.get("dflash_config") or {}
    sizes = {value for value in (tree.get("block_size"), nested.get("block_size")) if value is not None}
    if len(sizes) != 1:
        found = sorted(sizes) or "none"
        raise CheckpointError(f"{place}: block_size is {found}; expected one value, in block_size or dflash_config.block_size")
    rope = tree.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "?"
    if kind != "default" or tree.get("rope_scaling"):
        raise CheckpointError(f"{place}: rotary positions of type '{kind}' are not supported; only 'default' is")
    try:
        return DrafterConfig(
            vocab_size=tree["vocab_size"],
            hidden_size=tree["hidden_size"],
            intermediate_size=tree["intermediate_size"],
            num_hidden_layers=tree["num_hidden_layers"],
            num_attention_heads=tree["num_attention_heads"],
            num_key_value_heads=tree["num_key_value_heads"],
            head_dim=tree["head_dim"],
            block_size=sizes.pop(),
            mask_token_id=nested["mask_token_id"],
            num_target_layers=tree["num_target_layers"],
            target_layer_ids=tuple(nested["target_layer_ids"]),
            layer_types=tuple(tree.get("layer_types") or [FULL] * tree["num_hidden_layers"]),
            rope_theta=float(rope.get("rope_theta") or tree.get("rope_theta") or 1e6),
            rms_norm_eps=tree["rms_norm_eps"],
            max_position_embeddings=tree["max_position_embeddings"],
            sliding_window=tree.get("sliding_window") if tree.get("use_sliding_window", True) else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{place}: not a DFlash drafter config ({type(error).__name__}: {error})") from error

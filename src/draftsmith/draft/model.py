"""The DFlash drafter: Qwen3-style layers whose keys and values are `[context | block]` (arXiv 2602.06036).

Parameter names are the public checkpoint contract. Weights stay in fp32; the input's dtype is the compute dtype. Context
keys and values are made by `encode_context` alone, so training computes them once per pack and decoding caches them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from draftsmith.draft.blocks import PartMask, attend_blocks
from draftsmith.draft.mask import Backend, Mask
from draftsmith.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes the drafter's shape and meaning; stored in the checkpoint's config.json.

    target_layer_ids: id j is the output of target block j (0-based). layer_types: one of "full_attention" and
    "sliding_attention" per drafter layer; sliding layers need `sliding_window`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ConfigError(f"draft.block_size is {self.block_size}; a block needs the anchor and at least one drafted slot")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"draft.mask_token_id is {self.mask_token_id}, outside the target's vocabulary of {self.vocab_size} rows; "
                "choose an id the text never uses"
            )
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= {FULL, SLIDING}:
            raise ConfigError(
                f"draft.layer_types is {list(self.layer_types)}; expected {self.num_hidden_layers} of '{FULL}' or '{SLIDING}'"
            )
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ConfigError(f"draft.layer_types asks for '{SLIDING}' but draft.sliding_window is not set; set it to W > 0")
        counts = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
        }
        for name, value in counts.items():
            if value < 1 or (name == "head_dim" and value % 2):
                raise ConfigError(
                    f"draft.{name} is {value}; expected {'an even number' if name == 'head_dim' else 'at least 1'}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"draft heads: {self.num_attention_heads} query heads are not a multiple of "
                f"{self.num_key_value_heads} key/value heads"
            )
        # The output of the last block is never exposed un-normed by Hugging Face models, so readers would disagree on it.
        bad = [j for j in self.target_layer_ids if not 0 <= j < self.num_target_layers - 1]
        if bad or not self.target_layer_ids:
            raise ConfigError(
                f"draft.target_layer_ids is {list(self.target_layer_ids)}; the target has blocks 0..{self.num_target_layers - 1} "
                f"and ids must lie in 0..{self.num_target_layers - 2}"
            )


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` ids spread over a target of L layers: round(1 + i*(L-4)/(count-1)); L//2 for a single one (dflash 0.1.0)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


class Linear(nn.Linear):
    """A bias-free linear layer that keeps fp32 weights and computes in its input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in fp32 (Qwen3's order of casts)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)
        return self.weight.to(x.dtype) * normed


class Rotary(NamedTuple):
    """cos and sin: [B, T, head_dim] in the compute dtype."""

    cos: Tensor
    sin: Tensor


class KeyValue(NamedTuple):
    """Rotated keys and values of one layer: [B, key/value heads, T, head_dim]."""

    key: Tensor
    value: Tensor


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Rotary tables for integer positions [B, T], angles in fp32."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponent
    angles = torch.cat([angles, angles], dim=-1)
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


def _rotate(x: Tensor, tables: Rotary) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * tables.cos[:, None] + turned * tables.sin[:, None]


def attend(query: Tensor, context: KeyValue, own: KeyValue, mask: Mask | None) -> Tensor:
    """Grouped-query attention over `[context | own]`. query [B, H, Q, d], keys and values [B, G, T, d] -> [B, Q, H*d].

    mask: as `build_mask` makes it, its form saying how to attend; None where everything is visible.
    """
    if isinstance(mask, PartMask):
        return attend_blocks(query, *context, *own, *mask).transpose(1, 2).flatten(2)
    key, value = torch.cat([context.key, own.key], dim=2), torch.cat([context.value, own.value], dim=2)
    scale, groups = query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    if isinstance(mask, BlockMask):
        out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=groups > 1)
        assert isinstance(out, Tensor)
    else:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Queries from block slots only; keys and values from context and block, with q/k norms and rotary positions."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, width)
        self.k_proj = Linear(config.hidden_size, kv_width)
        self.v_proj = Linear(config.hidden_size, kv_width)
        self.o_proj = Linear(width, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def key_value(self, x: Tensor, tables: Rotary) -> KeyValue:
        """Keys and values of [B, T, D] inputs, context features or block slots alike."""
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return KeyValue(_rotate(key, tables), self._heads(self.v_proj(x)).transpose(1, 2))

    def forward(self, x: Tensor, tables: Rotary, context: KeyValue, mask: Mask | None) -> Tensor:
        query = _rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), tables)
        return self.o_proj(attend(query, context, self.key_value(x, tables), mask))


class MLP(nn.Module):
    """Gated feed-forward layer, SiLU gate."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, tables: Rotary, context: KeyValue, mask: Mask | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Drafts all slots of a block at once from the target's hidden states.

    `forward` and `encode_context` are the whole interface; embeddings and head belong to the target and are not here.
    recompute: keep only each layer's input for the backward pass and run the layer again there (arXiv 1604.06174).
    """

    def __init__(self, config: DrafterConfig, backend: Backend = "sdpa", *, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.backend: Backend = backend
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, std: float = 0.02) -> "Drafter":
        """Fill linear weights from N(0, std) and norms with ones, drawing from `generator` alone."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)
        return self

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        return rotary(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def encode_context(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of every layer for target features [B, T, n*D] at positions [B, T]."""
        fused = self.hidden_norm(self.fc(features))
        tables = self._tables(positions, fused.dtype)
        return [layer.self_attn.key_value(fused, tables) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(
        self,
        slots: Tensor,
        positions: Tensor,
        context: Sequence[KeyValue],
        masks: dict[str, Mask] | None = None,
    ) -> Tensor:
        """Hidden states of block slots after the final norm, ready for the target's head: [B, Q, D].

        slots: embedded slot inputs [B, Q, D]; positions: int64 [B, Q]; context: from `encode_context`;
        masks: one per layer type in use, None where every slot sees everything (a single block when decoding).
        """
        tables = self._tables(positions, slots.dtype)
        x = slots
        for layer, layer_type, seen in zip(self.layers, self.config.layer_types, context, strict=True):
            mask = None if masks is None else masks[layer_type]
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, tables, seen, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, tables, seen, mask)
        return self.norm(x)

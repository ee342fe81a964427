"""Speculative decoding of several prompts in one batch: every row drafts and is checked in the same pass, and keeps what is its own.

Rows keep different numbers of tokens, so after each check the caches are shifted until all rows end in the last column: what lies
before a row's first token is padding, as in any batch padded on the left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draftsmith.decode.acceptance import Policy, Sampling
from draftsmith.decode.speculate import Decoded, DraftCache, Speculator, check_prompt, policy_for
from draftsmith.draft.model import KeyValue


@dataclass
class _Row:
    """One prompt on its way. ids: written so far; kept: by each check; length: its columns in the caches."""

    prompt: list[int]
    policy: Policy
    length: int
    ids: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


def _last(values: Tensor, ends: Tensor, length: int) -> Tensor:
    """The `length` columns before each row's end: [B, H, T, d] -> [B, H, length, d]; columns before the first repeat it."""
    columns = (ends[:, None] - length + torch.arange(length, device=values.device)).clamp_(min=0)
    return values.gather(2, columns[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))


class _Batch:
    """The rows that are not done, and their caches. A cache has T columns; row r fills the last `length` of them."""

    def __init__(self, speculator: Speculator, rows: list[_Row]) -> None:
        self._spec, self.rows = speculator, rows
        self._cache = DynamicCache(config=speculator.target.model.config)
        self._context = DraftCache()
        self._columns = 0

    @property
    def device(self) -> torch.device:
        return self._spec.target.device

    def lengths(self) -> Tensor:
        return torch.tensor([row.length for row in self.rows], device=self.device)

    def _visible(self, lengths: Tensor, columns: int) -> Tensor:
        """True [B, columns] where a row has something in a cache of so many columns."""
        return torch.arange(columns, device=self.device) >= columns - lengths[:, None]

    def prefill(self) -> Tensor:
        """Run all prompts; the logits [B, V] after each."""
        longest, lengths = max(row.length for row in self.rows), self.lengths()
        ids = torch.zeros(len(self.rows), longest, dtype=torch.long)
        for number, row in enumerate(self.rows):
            ids[number, longest - row.length :] = torch.tensor(row.prompt)
        seen = self._visible(lengths, longest)
        positions = (torch.arange(longest, device=self.device) - (longest - lengths[:, None])).clamp(min=0)
        logits, features = self._spec.run(ids.to(self.device), self._cache, positions, seen.long(), keep=1)
        self._context.extend(self._spec.drafter.encode_context(features, positions))
        self._columns = longest
        return logits[:, -1]

    def draft(self) -> Tensor:
        """Logits [B, K-1, V] for the tokens after each row's last."""
        config, lengths, count = self._spec.config, self.lengths(), len(self.rows)
        block = config.block_size
        ids = torch.full((count, block), config.mask_token_id, device=self.device)
        ids[:, 0] = torch.tensor([row.ids[-1] for row in self.rows], device=self.device)
        positions = lengths[:, None] + torch.arange(block, device=self.device)
        before = self._visible(lengths, self._columns)[:, None, :].expand(-1, block, -1)
        own = torch.ones(count, block, block, dtype=torch.bool, device=self.device)
        masks = {"full_attention": torch.cat([before, own], dim=-1)[:, None]}
        if config.sliding_window is not None:
            near = torch.arange(self._columns, device=self.device) >= self._columns - config.sliding_window
            masks["sliding_attention"] = torch.cat([before & near, own.tril()], dim=-1)[:, None]
        hidden = self._spec.drafter(self._spec.target.ends.embed(ids), positions, self._context.layers, masks)
        return self._spec.target.ends.logits(hidden[:, 1:])

    def check(self, drafted: Tensor) -> Tensor:
        """The target's logits [B, K, V] over each row's last token and what was drafted after it, [B, K-1]."""
        lengths, block = self.lengths(), self._spec.config.block_size
        first = torch.tensor([[row.ids[-1]] for row in self.rows], device=self.device)
        positions = lengths[:, None] + torch.arange(block, device=self.device)
        seen = self._visible(lengths + block, self._columns + block)
        logits, features = self._spec.run(torch.cat([first, drafted], dim=1), self._cache, positions, seen.long(), keep=0)
        self._context.extend(self._spec.drafter.encode_context(features, positions))
        return logits

    def settle(self, kept: Sequence[int], going: Sequence[bool]) -> None:
        """Keep of the last check only what each row kept, and of the rows only those that go on."""
        places = torch.tensor([n for n, goes in enumerate(going) if goes], device=self.device, dtype=torch.long)
        ends = self._columns + torch.tensor([n for n, goes in zip(kept, going, strict=True) if goes], device=self.device)
        for row, n in zip(self.rows, kept, strict=True):
            row.length += n
        self.rows = [row for row, goes in zip(self.rows, going, strict=True) if goes]
        if not self.rows:
            return
        self._columns = max(row.length for row in self.rows)
        layers: list[Any] = self._cache.layers
        for layer in layers:
            layer.keys = _last(layer.keys[places], ends, self._columns)
            layer.values = _last(layer.values[places], ends, self._columns)
        self._context.layers = [
            KeyValue(_last(kv.key[places], ends, self._columns), _last(kv.value[places], ends, self._columns))
            for kv in self._context.layers
        ]


def decode_together(
    speculator: Speculator, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling | None = None
) -> list[Decoded]:
    """Decode prompts as `Speculator.decode` does each, in one batch: the same ids in exact arithmetic, in about the passes of the
    slowest alone. Targets with sliding or recurrent layers decode one prompt after another. Raises UsageError."""
    cache: Any = DynamicCache(config=speculator.target.model.config)
    if len(prompts) < 2 or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return [speculator.decode(prompt, max_new_tokens, sampling) for prompt in prompts]
    for prompt in prompts:
        check_prompt(speculator.target, prompt)
    rows = [_Row(list(prompt), policy_for(sampling, speculator.target.device), len(prompt)) for prompt in prompts]
    with torch.inference_mode():
        _run(_Batch(speculator, list(rows)), max_new_tokens, speculator)
    return [Decoded(row.ids, row.kept, len(row.kept) + 1) for row in rows]


def _run(batch: _Batch, max_new_tokens: int, speculator: Speculator) -> None:
    ends = speculator.target.end_ids
    for row, logits in zip(batch.rows, batch.prefill(), strict=True):
        row.ids.append(row.policy.first(logits))
    batch.settle([0] * len(batch.rows), [max_new_tokens > 1 and row.ids[-1] not in ends for row in batch.rows])
    while batch.rows:
        drafted = torch.stack([row.policy.propose(logits) for row, logits in zip(batch.rows, batch.draft(), strict=True)])
        kept, going = [], []
        for row, proposed, logits in zip(batch.rows, drafted.tolist(), batch.check(drafted), strict=True):
            agreed, added = row.policy.accept(logits)
            fresh = speculator.until_end([*proposed[:agreed], added][: max_new_tokens - len(row.ids)])
            row.ids += fresh
            row.kept.append(len(fresh))
            kept.append(len(fresh))
            going.append(len(row.ids) < max_new_tokens and fresh[-1] not in ends)
        batch.settle(kept, going)

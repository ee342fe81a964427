"""Speculative decoding of one prompt: the drafter proposes a block, the target checks it in one pass, a prefix is kept.

Greedily the output is exactly the target's own; sampled, it is distributed as the target's own. Caches hold only what was kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from draftsmith.decode.acceptance import Greedy, Policy, Sampled, Sampling
from draftsmith.decode.cache import TargetCache
from draftsmith.draft.model import Drafter, DrafterConfig, KeyValue
from draftsmith.errors import UsageError
from draftsmith.target.capture import Recorder
from draftsmith.target.load import Target, find_blocks, share_weights

FeatureFilter = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Decoded:
    """New token ids (the stop token included), tokens kept by each check, and the number of target passes."""

    ids: list[int]
    kept: list[int]
    target_passes: int

    @property
    def tau(self) -> float:
        """Mean kept tokens per check: accepted ones plus the one the target adds."""
        return sum(self.kept) / len(self.kept) if self.kept else 0.0


class DraftCache:
    """The drafter's context keys and values, grown by accepted positions only: block slots never enter it."""

    def __init__(self) -> None:
        self.layers: list[KeyValue] = []

    def extend(self, new: list[KeyValue]) -> None:
        """Keys and values of further positions, one pair a layer."""
        if not self.layers:
            self.layers = new
            return
        self.layers = [
            KeyValue(torch.cat([old.key, more.key], dim=2), torch.cat([old.value, more.value], dim=2))
            for old, more in zip(self.layers, new, strict=True)
        ]


def check_prompt(target: Target, prompt: list[int]) -> None:
    """Refuse an empty prompt or ids outside the target's vocabulary, on the host."""
    if not prompt:
        raise UsageError("the prompt has no tokens; give some text")
    worst = max(prompt, key=lambda i: (i >= target.vocab_size) or (i < 0))
    if not 0 <= worst < target.vocab_size:
        raise UsageError(f"prompt token id {worst} is outside the target's {target.vocab_size} embedding rows")


def policy_for(sampling: Sampling | None, device: torch.device) -> Policy:
    """How tokens are chosen: greedily without `sampling`."""
    return Greedy() if sampling is None else Sampled(sampling, device)


@torch.inference_mode()
def decode_plain(target: Target, prompt: list[int], max_new_tokens: int, sampling: Sampling | None = None) -> Decoded:
    """Plain decoding with a cache, one token a pass; greedy without `sampling`."""
    check_prompt(target, prompt)
    policy = policy_for(sampling, target.device)
    cache = DynamicCache(config=target.model.config)
    ids = torch.tensor([prompt], device=target.device)
    new: list[int] = []
    while len(new) < max_new_tokens:
        logits = target.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = policy.first(logits[0, -1])
        new.append(token)
        if token in target.end_ids:
            break
        ids = torch.tensor([[token]], device=target.device)
    return Decoded(new, [1] * (len(new) - 1), len(new))


def check_pair(config: DrafterConfig, target: Target) -> None:
    """Raise UsageError unless a drafter of this shape belongs to a target of this one."""
    expected = (config.hidden_size, config.num_target_layers, config.vocab_size)
    found = (target.hidden_size, target.num_layers, target.vocab_size)
    if expected != found:
        raise UsageError(
            "drafter expects a target of width {}, {} layers and a vocabulary of {}, but ".format(*expected)
            + f"'{target.name}' has "
            + "width {}, {} layers and a vocabulary of {}; use the target it was trained for".format(*found)
        )


class Speculator:
    """A target and a drafter ready to decode together; owns a hooked copy of the target over the same weights."""

    def __init__(self, target: Target, drafter: Drafter, features: FeatureFilter | None = None) -> None:
        check_pair(drafter.config, target)
        self.target, self.drafter, self.config = target, drafter, drafter.config
        self._features, self._passes = features, 0
        self._model = share_weights(target.model)
        self._recorder = Recorder(find_blocks(self._model, target.blocks_path), self.config.target_layer_ids)

    def _pass(self, ids: list[int], cache: TargetCache, keep: int) -> tuple[Tensor, Tensor]:
        """One target pass over new ids: logits [keep, V] of the last `keep` positions (all if 0), features [1, T, n*D]."""
        tokens = torch.tensor([ids], device=self.target.device)
        logits, features = self.run(tokens, cache.inner, None, None, keep)
        return logits[0], features

    def run(
        self, ids: Tensor, cache: DynamicCache, positions: Tensor | None, mask: Tensor | None, keep: int
    ) -> tuple[Tensor, Tensor]:
        """One target pass over ids [B, T], whose positions and mask [B, cached + T] follow from the cache where they are None: logits
        [B, keep, V] of the last `keep` positions (all if 0), features [B, T, n*D]."""
        self._passes += 1
        told = {} if positions is None else {"position_ids": positions, "attention_mask": mask}
        logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=keep, **told).logits
        features = self._recorder.take(self.config.hidden_size)
        return logits, features if self._features is None else self._features(features)

    def _draft(self, cache: DraftCache, features: Tensor, seen: int, token: int, slots: int) -> Tensor:
        """Logits [slots - 1, V] for the tokens after `token`, which stands at position `seen`; the features lead up to it."""
        device = self.target.device
        # The drafter computes in its caller's dtype; the target's states decide it.
        start = seen - features.shape[1]
        cache.extend(self.drafter.encode_context(features, torch.arange(start, seen, device=device)[None]))
        ids = torch.full((1, slots), self.config.mask_token_id, device=device)
        ids[0, 0] = token
        positions = torch.arange(seen, seen + slots, device=device)[None]
        hidden = self.drafter(self.target.ends.embed(ids), positions, cache.layers, self._masks(seen, slots))
        return self.target.ends.logits(hidden[0, 1:])

    def _masks(self, seen: int, slots: int) -> dict[str, Tensor] | None:
        if self.config.sliding_window is None:
            return None
        key = torch.arange(seen + slots, device=self.target.device)[None, :]
        query = seen + torch.arange(slots, device=self.target.device)[:, None]
        everything = torch.ones(slots, seen + slots, dtype=torch.bool, device=self.target.device)
        sliding = (key >= seen - self.config.sliding_window) & (key <= query)
        return {"full_attention": everything[None, None], "sliding_attention": sliding[None, None]}

    def decode(self, prompt: list[int], max_new_tokens: int, sampling: Sampling | None = None) -> Decoded:
        """Speculative decoding of a whole answer. Greedy without `sampling`: the same ids as `decode_plain` in exact arithmetic."""
        before = self._passes
        checks = list(self.stream(prompt, max_new_tokens, sampling))
        ids = [token for fresh in checks for token in fresh]
        return Decoded(ids, [len(fresh) for fresh in checks[1:]], self._passes - before)

    def stream(self, prompt: list[int], max_new_tokens: int, sampling: Sampling | None = None) -> Iterator[list[int]]:
        """The answer as it comes: the first token, then what each check keeps. The stop token, if one comes, is the last."""
        check_prompt(self.target, prompt)
        policy = policy_for(sampling, self.target.device)
        target_cache, draft_cache = TargetCache(self._model.config), DraftCache()
        # A generator must not leave inference mode on while its caller runs.
        with torch.inference_mode():
            logits, features = self._pass(prompt, target_cache, keep=1)
            target_cache.forget(0)
            fresh, written = [policy.first(logits[-1])], 1
        yield fresh
        while written < max_new_tokens and fresh[-1] not in self.target.end_ids:
            seen = len(prompt) + written - 1
            # Near the end a shorter block is drafted, as the reference does: more could not be kept.
            slots = min(self.config.block_size, max_new_tokens - written + 1)
            with torch.inference_mode():
                drafted = policy.propose(self._draft(draft_cache, features, seen, fresh[-1], slots))
                target_cache.remember()
                last = fresh[-1]
                logits, features = self._pass([last, *drafted.tolist()], target_cache, keep=0)
                agreed, added = policy.accept(logits)
                fresh = self.until_end([*drafted[:agreed].tolist(), added][: max_new_tokens - written])
                refused = slots - len(fresh)
                if refused and target_cache.is_recurrent:
                    target_cache.forget(slots)
                    _, features = self._pass([last, *fresh[:-1]], target_cache, keep=1)
                    target_cache.forget(0)
                else:
                    target_cache.forget(refused)
                features = features[:, : len(fresh)]
            written += len(fresh)
            yield fresh

    def until_end(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first that ends a turn, which is the last."""
        end = next((place for place, token in enumerate(tokens) if token in self.target.end_ids), None)
        return tokens if end is None else tokens[: end + 1]

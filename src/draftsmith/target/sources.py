"""Where hidden states come from besides live capture: all sources look alike to the pipeline."""

from collections.abc import Callable
from typing import Protocol

import torch

from draftsmith.errors import CaptureError, TargetError
from draftsmith.target.cache import DamagedShardError, StateCache
from draftsmith.target.capture import Capture
from draftsmith.types import HiddenStates, Tokens


class StateSource(Protocol):
    """Gives the hidden states of packs; used by one thread. device and dtype: of what it makes."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, tokens: Tokens) -> HiddenStates:
        """Features [S, n*D] of one pack, zero on padding."""


class CachedStates:
    """A source of hidden states that reads a cache, and captures what is not in it, or is damaged, with a live target.

    live: makes the target's capture when it is first needed; say: told about each damaged shard.
    """

    def __init__(
        self, cache: StateCache, live: Callable[[], Capture], say: Callable[[str], None], device: torch.device | None = None
    ) -> None:
        self.device = device or torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, cache.header.dtype)
        self._cache, self._live, self._say = cache, live, say
        self._capture: Capture | None = None

    def __call__(self, tokens: Tokens) -> HiddenStates:
        """Features [S, n*D] of one pack: on the host if they were cached, on the target's device if not."""
        damaged = None
        while True:
            try:
                found = self._cache.get(tokens)
                break
            except DamagedShardError as error:
                damaged = error
                self._say(f"{str(error).partition(';')[0]}; it is made anew")
                self._cache.forget(error.shard)
        if found is not None:
            return found
        if self._capture is None:
            try:
                self._capture = self._live()
            except TargetError as error:
                raise CaptureError(f"{damaged or tokens.names[0]}. Here that failed: {error}") from error
        hidden = self._capture(tokens)
        self._cache.put(tokens, hidden)
        return hidden

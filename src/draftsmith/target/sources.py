"""Where hidden states come from besides live capture: all sources look alike to the pipeline."""

from collections.abc import Callable
from typing import Protocol

import torch

from draftsmith.errors import CaptureError, TargetError, UsageError
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
        self.dtype = cache.header.torch_dtype
        self._cache, self._live, self._say = cache, live, say
        self._capture: Capture | None = None

    def __call__(self, tokens: Tokens) -> HiddenStates:
        """Features [S, n*D] of one pack: on the host if they were cached, on the target's device if not."""
        damaged = None
        while True:
            try:
                found = self._cache.get(tokens)
            except DamagedShardError as error:
                damaged = error
                capture = self._live_capture(str(error))
                self._say(f"{str(error).partition(';')[0]}; it is made anew")
                if not self._forget(error.shard):
                    return capture(tokens)
                continue
            if found is not None:
                return found
            hidden = self._live_capture(str(damaged or f"cached hidden states: {tokens.names[0]} has none"))(tokens)
            self._cache.put(tokens, hidden)
            return hidden

    def _live_capture(self, why: str) -> Capture:
        if self._capture is None:
            try:
                self._capture = self._live()
            except TargetError as error:
                raise CaptureError(f"{why}. Here that failed: {error}") from error
        return self._capture

    def _forget(self, shard: str) -> bool:
        """Whether this process may write to the cache, and has given the shard up."""
        try:
            self._cache.forget(shard)
        except (UsageError, OSError) as error:
            self._say(f"states     {self._cache.folder} cannot be written here ({error}); it is left as it is")
            return False
        return True

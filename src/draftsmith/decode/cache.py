"""The target's cache during speculation: what was drafted and not kept must leave it without a trace."""

import copy
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin


class TargetCache:
    """Wraps the library's cache. Keys and values are cropped; the state of a recurrent layer cannot be, since each token is mixed into
    it for good, so such layers are copied before a check and put back after it, and `is_recurrent` says that kept tokens must then
    be run once more.
    """

    def __init__(self, config: Any) -> None:
        self.inner = DynamicCache(config=config)
        self._recurrent = [i for i, layer in enumerate(self.inner.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._kept: dict[int, Any] = {}
        for number, layer in enumerate(self.inner.layers):
            # A sliding layer must remember enough to be cropped back.
            if number not in self._recurrent and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers cannot be cropped."""
        return bool(self._recurrent)

    def remember(self) -> None:
        """Keep a copy of what cannot be cropped, as it stands now."""
        self._kept = {number: copy.deepcopy(self.inner.layers[number]) for number in self._recurrent}

    def forget(self, tokens: int) -> None:
        """Take back the last `tokens` of a pass. Recurrent layers go back to what was remembered, whatever was fed since."""
        layers: list[Any] = self.inner.layers
        for number, layer in enumerate(layers):
            if number in self._recurrent:
                if tokens:
                    layers[number] = self._kept[number]
            else:
                # A negative count means "remove so many"; zero lets a sliding layer drop what it no longer needs.
                layer.crop(-tokens)

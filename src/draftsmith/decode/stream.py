"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "�"


class TextStream:
    """Give it fresh tokens; it gives back the text that is certain by now. `stopped` once a stop string came, which is cut off."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._given = ""
        self.stopped = False

    def push(self, fresh: Sequence[int]) -> str:
        """The text that `fresh` adds. What may be the beginning of a stop string, or half a character, waits."""
        self._ids += fresh
        text = self._text()
        found = [text.index(stop) for stop in self._stops if stop in text]
        if found:
            self.stopped = True
            return self._give(text[: min(found)])
        held = len(text) - len(text.rstrip(UNFINISHED))
        for stop in self._stops:
            held = max(held, next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0))
        return self._give(text[: len(text) - held])

    def end(self) -> str:
        """What was waiting when no more tokens come."""
        return "" if self.stopped else self._give(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _give(self, text: str) -> str:
        fresh, self._given = text[len(self._given) :], text
        return fresh

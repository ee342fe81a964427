"""Records to tokens: the tokenizer's own chat template, and a loss mask over exactly what the assistant wrote.

The mask comes from the template's generation markers where it has them, else from rendering prefixes of the chat. A
template that rewrites earlier turns makes their prefixes disagree: such turns are context and never supervised, since
their tokens are not what the target would be given when it serves them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.data.files import read_records
from draftsmith.data.text import Message, Record
from draftsmith.errors import DataError
from draftsmith.types import Document

AROUND_THOUGHTS = re.compile(r"</?think>|\s+")
MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


# What a template, or a tokenizer given text that is none, says of a chat it cannot render.
UNUSABLE = (TemplateError, TypeError, ValueError, UnicodeError)
REFUSED = "refused by the chat template"


def fault_of(ids: Tensor, mask: Tensor) -> str | None:
    """Why a sample, cut already, teaches nothing: it has no position from which a supervised token could be drafted."""
    if ids.numel() < 2:
        return "too short (under 2 tokens)"
    return None if bool(mask[1:].any()) else "with nothing to learn (no supervised token)"


@dataclass
class DataCounts:
    """What happened to the rows of the training files. turns_unsupervised: assistant turns that the template rewrites."""

    rows: int = 0
    used: int = 0
    cut: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    supervised: int = 0
    turns_unsupervised: int = 0

    def skip(self, reason: str) -> None:
        """Count one row that is left out for `reason`."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def take(self, document: Document, longest: int) -> Document:
        """Count one row that is used, and cut it to the longest bucket."""
        self.used += 1
        self.cut += document.ids.numel() > longest
        kept = Document(document.name, document.ids[:longest], document.loss_mask[:longest])
        self.tokens += kept.ids.numel()
        self.supervised += int(kept.loss_mask.sum())
        return kept

    def line(self) -> str:
        """One line for people."""
        skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.skipped.items())) or "none"
        rewritten = (
            f"; {self.turns_unsupervised} turns not supervised, since the template renders them otherwise than the target is served"
            if self.turns_unsupervised
            else ""
        )
        return (
            f"{self.used} of {self.rows} samples used ({self.tokens} tokens, {self.supervised} supervised); "
            f"{self.cut} cut to the longest bucket; skipped: {skipped}{rewritten}"
        )


@dataclass(frozen=True)
class ChatFormat:
    """How a target is spoken to: its tokenizer with the chat template, and what the template is told besides the messages.

    ends: token ids with which the target ends a turn; day: the date a template may print, None for today; options: arguments of the
    template such as `enable_thinking`, which a row's own may override.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int] = frozenset()
    day: date | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], like: Record | None = None, **how: Any) -> Any:
        """The template's rendering, with the tools and options of the row it belongs to."""
        if not self.tokenizer.chat_template:
            raise DataError(
                f"tokenizer '{self.tokenizer.name_or_path}' has no chat template but the data has 'messages'; "
                "use an instruct model or rows with 'text'"
            )
        told = {**self.options, **(like.options if like is not None else {})}
        if self.day is not None:
            # Several templates print today's date: a run that is resumed tomorrow must see the same tokens.
            told["strftime_now"] = self.day.strftime
        tools = list(like.tools) if like is not None and like.tools else None
        return self.tokenizer.apply_chat_template(list(messages), tools=tools, **{**told, **how})

    def ids(self, text: str) -> list[int]:
        """Token ids of text that is rendered already, or plain."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, messages: Sequence[Message], like: Record | None = None, *, opened: bool = False) -> str:
        """The chat as text. opened: up to where the assistant starts to write, which is what the target is given when it is served."""
        return str(self.render(messages, like, tokenize=False, add_generation_prompt=opened))

    def prompt(self, messages: Sequence[Message], like: Record | None = None) -> list[int]:
        """Token ids of a chat up to where the assistant starts to write."""
        return self.ids(self.text(messages, like, opened=True))


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items two sequences have in common from their start."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _span(ids: list[int], start: list[int], stop: list[int], ends: frozenset[int]) -> range | None:
    """The places of `ids` that the assistant wrote in one turn, or None if inside the chat the turn reads otherwise than served.

    ids: the whole chat; start: what the target was given before the turn; stop: the chat up to the turn's end.
    """
    if ids[: len(start)] != start:
        return None
    shared = common_prefix(ids, stop)
    end = next((place for place in range(len(start), shared) if ids[place] in ends), None)
    if end is not None:
        # What follows the end-of-turn token, often a newline, is the template's and never the target's.
        return range(len(start), end + 1)
    if shared == len(stop):
        # Some targets end a turn with the token that opens the next one.
        return range(len(start), shared + (shared < len(ids) and ids[shared] in ends))
    # Some templates close earlier turns with another token than the target does: all before it is what the target wrote.
    return range(len(start), shared) if stop[shared] in ends and shared > len(start) else None


def _says(message: Message, text: str) -> bool:
    """Whether a turn's rendering holds all that the row says the assistant wrote; some templates leave out thoughts or tool calls.

    Spaces and the marks around thoughts are the template's to set, and may stand in the prompt already.
    """
    called = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
    written = [message["content"], message.get("reasoning_content"), message.get("thinking"), *called]
    shown = AROUND_THOUGHTS.sub("", text)
    return all(AROUND_THOUGHTS.sub("", str(part)) in shown for part in written if part)


def _mask_by_prefixes(chat: ChatFormat, record: Record, ids: list[int]) -> tuple[list[bool], int]:
    """The mask, and how many assistant turns could not be supervised because they render differently inside the chat."""
    messages = list(record.messages or ())
    mask, rewritten = [False] * len(ids), 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0:
            continue
        before, after = chat.text(messages[:turn], record, opened=True), chat.text(messages[: turn + 1], record)
        span = None
        if _says(message, after[common_prefix(before, after) :]):
            span = _span(ids, chat.ids(before), chat.ids(after), chat.ends)
        rewritten += span is None
        for place in span or ():
            mask[place] = True
    return mask, rewritten


def encode_record(chat: ChatFormat, record: Record) -> tuple[Document, int]:
    """Tokens and loss mask of one record, and its turns that the template rewrites.

    Plain text is supervised throughout. Raises jinja2.TemplateError where the template refuses the chat.
    """
    rewritten = 0
    if record.messages is None:
        ids = chat.ids(record.text or "")
        mask = [True] * len(ids)
    elif not record.messages:
        ids, mask = [], []
    elif record.unfinished and record.messages[-1]["role"] == "assistant":
        # What the target was given and what it wrote until it was cut off; the template would close thought and turn for it.
        ids = chat.prompt(record.messages[:-1], record)
        mask, rewritten = _mask_by_prefixes(chat, replace(record, messages=record.messages[:-1]), ids)
        written = chat.ids(record.messages[-1]["content"])
        ids, mask = ids + written, mask + [True] * len(written)
    elif MARKERS.search(str(chat.tokenizer.chat_template)):
        out = chat.render(record.messages, record, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    else:
        ids = chat.ids(chat.text(record.messages, record))
        mask, rewritten = _mask_by_prefixes(chat, record, ids)
    document = Document(record.name, torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.bool))
    return document, rewritten


def encode_files(
    chat: ChatFormat, sources: Sequence[Path | str], *, longest: int, vocab_size: int
) -> tuple[list[Document], DataCounts]:
    """All usable documents of the sources, in order.

    Rules: a sample longer than `longest` tokens keeps its first `longest`; one with no supervised token after its first
    position teaches nothing and is skipped, as is one that the chat template refuses; an id outside the target's
    `vocab_size` rows raises DataError, since on a GPU it would poison the device. Raises DataError if no sample is left.
    """
    documents, counts = [], DataCounts()
    for source in sources:
        for record in read_records(source):
            counts.rows += 1
            try:
                document, rewritten = encode_record(chat, record)
            except UNUSABLE:
                counts.skip(REFUSED)
                continue
            counts.turns_unsupervised += rewritten
            ids, mask = document.ids, document.loss_mask
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                worst = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
                raise DataError(
                    f"{record.name}: token id {worst} is outside the target's {vocab_size} embedding rows; "
                    "the tokenizer does not belong to this target"
                )
            fault = fault_of(ids[:longest], mask[:longest])
            if fault is not None:
                counts.skip(fault)
                continue
            documents.append(counts.take(document, longest))
    if not documents:
        raise DataError(
            f"no sample in {', '.join(map(str, sources))} has a supervised token ({counts.line()}); "
            "rows need an assistant turn, or 'text'; for a template that rewrites turns add {% generation %} markers"
        )
    return documents, counts

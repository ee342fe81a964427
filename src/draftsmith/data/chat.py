"""Records to tokens: the tokenizer's own chat template, and a loss mask over exactly what the assistant wrote.

The mask comes from the template's generation markers where it has them, else from rendering prefixes of the chat. A
template that rewrites earlier turns makes their prefixes disagree: such turns are context and never supervised, since
their tokens are not what the target would be given when it serves them.
"""

import re
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from draftsmith.data.text import Record, read_records
from draftsmith.errors import DataError
from draftsmith.types import Document

MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


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

    def line(self) -> str:
        """One line for people."""
        skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.skipped.items())) or "none"
        rewritten = (
            f"; {self.turns_unsupervised} earlier turns rewritten by the template, not supervised"
            if self.turns_unsupervised
            else ""
        )
        return (
            f"{self.used} of {self.rows} samples used ({self.tokens} tokens, {self.supervised} supervised); "
            f"{self.cut} cut to the longest bucket; skipped: {skipped}{rewritten}"
        )


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], day: date | None, **options: Any) -> Any:
    if day is not None:
        # Several templates print today's date: a run that is resumed tomorrow must see the same tokens.
        options["strftime_now"] = day.strftime
    return tokenizer.apply_chat_template(messages, **options)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], day: date | None = None) -> list[int]:
    """Token ids of a chat up to where the assistant starts to write. day: the date a template may print, None for today."""
    if not tokenizer.chat_template:
        raise DataError(
            f"tokenizer '{tokenizer.name_or_path}' has no chat template but the data has 'messages'; "
            "use an instruct model or rows with 'text'"
        )
    text = _render(tokenizer, messages, day, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _whole(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], day: date | None) -> list[int]:
    return list(tokenizer(_render(tokenizer, messages, day, tokenize=False), add_special_tokens=False)["input_ids"])


def _mask_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], ids: list[int], ends: set[int], day: date | None
) -> tuple[list[bool], int]:
    """The mask, and how many assistant turns could not be supervised because they render differently inside the chat."""
    mask, rewritten = [False] * len(ids), 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0:
            continue
        start = encode_prompt(tokenizer, messages[:turn], day)
        stop = _whole(tokenizer, messages[: turn + 1], day)
        if ids[: len(start)] != start or ids[: len(stop)] != stop:
            rewritten += 1
            continue
        for place in range(len(start), len(stop)):
            mask[place] = True
            # What follows the end-of-turn token, often a newline, is the template's and never the target's.
            if ids[place] in ends:
                break
    return mask, rewritten


def encode_record(
    tokenizer: PreTrainedTokenizerBase, record: Record, ends: set[int], day: date | None = None
) -> tuple[Document, int]:
    """Tokens and loss mask of one record, and its turns that the template rewrites; `ends` are the ids that end a turn.

    Plain text is supervised throughout. Raises jinja2.TemplateError where the template refuses the chat.
    """
    rewritten = 0
    if record.messages is None:
        ids = list(tokenizer(record.text or "", add_special_tokens=False)["input_ids"])
        mask = [True] * len(ids)
    elif not record.messages:
        ids, mask = [], []
    elif not tokenizer.chat_template:
        encode_prompt(tokenizer, [])
    elif MARKERS.search(str(tokenizer.chat_template)):
        options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        out = _render(tokenizer, list(record.messages), day, **options)
        ids, mask = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    else:
        messages = list(record.messages)
        ids = _whole(tokenizer, messages, day)
        mask, rewritten = _mask_by_prefixes(tokenizer, messages, ids, ends, day)
    document = Document(record.name, torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.bool))
    return document, rewritten


def encode_files(
    tokenizer: PreTrainedTokenizerBase,
    paths: list[Path],
    *,
    longest: int,
    vocab_size: int,
    ends: set[int],
    day: date | None = None,
) -> tuple[list[Document], DataCounts]:
    """All usable documents of the files, in order.

    Rules: a sample longer than `longest` tokens keeps its first `longest`; one with no supervised token after its first
    position teaches nothing and is skipped, as is one that the chat template refuses; an id outside the target's
    `vocab_size` rows raises DataError, since on a GPU it would poison the device. Raises DataError if no sample is left.
    """
    documents, counts = [], DataCounts()
    for path in paths:
        for record in read_records(path):
            counts.rows += 1
            try:
                document, rewritten = encode_record(tokenizer, record, ends, day)
            except (TemplateError, TypeError, ValueError, UnicodeError):
                counts.skip("refused by the chat template")
                continue
            counts.turns_unsupervised += rewritten
            ids, mask = document.ids, document.loss_mask
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                worst = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
                raise DataError(
                    f"{record.name}: token id {worst} is outside the target's {vocab_size} embedding rows; "
                    "the tokenizer does not belong to this target"
                )
            if ids.numel() < 2:
                counts.skip("too short (under 2 tokens)")
                continue
            if ids.numel() > longest:
                ids, mask = ids[:longest], mask[:longest]
                counts.cut += 1
            if not bool(mask[1:].any()):
                counts.skip("with nothing to learn (no supervised token)")
                continue
            documents.append(Document(record.name, ids, mask))
            counts.used += 1
            counts.tokens += ids.numel()
            counts.supervised += int(mask.sum())
    if not documents:
        raise DataError(
            f"no sample in {', '.join(str(p) for p in paths)} has a supervised token ({counts.line()}); "
            "rows need an assistant turn, or 'text'; for a template that rewrites turns add {% generation %} markers"
        )
    return documents, counts

"""Records to tokens: the tokenizer's own chat template, and a loss mask over exactly what the assistant wrote.

The mask comes from the template's generation markers where it has them, else from rendering prefixes of the chat. A
template that rewrites earlier turns makes prefixes disagree; that is refused, not guessed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data.text import Record, read_records
from draftsmith.errors import DataError
from draftsmith.types import Document


@dataclass
class DataCounts:
    """What happened to the rows of the training files."""

    rows: int = 0
    used: int = 0
    cut: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    supervised: int = 0

    def skip(self, reason: str) -> None:
        """Count one row that is left out for `reason`."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def line(self) -> str:
        """One line for people."""
        skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.skipped.items())) or "none"
        return (
            f"{self.used} of {self.rows} samples used ({self.tokens} tokens, {self.supervised} supervised); "
            f"{self.cut} cut to the longest bucket; skipped: {skipped}"
        )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat up to where the assistant starts to write."""
    if not tokenizer.chat_template:
        raise DataError(
            f"tokenizer '{tokenizer.name_or_path}' has no chat template but the data has 'messages'; "
            "use an instruct model or rows with 'text'"
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _mask_by_prefixes(tokenizer: PreTrainedTokenizerBase, record: Record, ids: list[int], ends: set[int]) -> list[bool]:
    messages = list(record.messages or ())
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = encode_prompt(tokenizer, messages[:turn])
        text = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        stop = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids[: len(start)] != start or ids[: len(stop)] != stop:
            raise DataError(
                f"{record.name}: the chat template rewrites earlier turns (turn {turn} renders differently inside the whole "
                "chat), so what the assistant wrote cannot be told; add {% generation %} markers to the template"
            )
        for place in range(len(start), len(stop)):
            mask[place] = True
            # What follows the end-of-turn token, often a newline, is the template's and never the target's.
            if ids[place] in ends:
                break
    return mask


def encode_record(tokenizer: PreTrainedTokenizerBase, record: Record, ends: set[int]) -> Document:
    """Tokens and loss mask of one record; `ends` are the ids that end a turn. Plain text is supervised throughout."""
    if record.messages is None:
        ids = tokenizer(record.text or "", add_special_tokens=False)["input_ids"]
        return Document(record.name, torch.tensor(ids, dtype=torch.long), torch.ones(len(ids), dtype=torch.bool))
    messages = list(record.messages)
    if not messages:
        return Document(record.name, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool))
    encode_prompt(tokenizer, messages[:1])
    if "{% generation %}" in str(tokenizer.chat_template):
        out: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    else:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        mask = _mask_by_prefixes(tokenizer, record, ids, ends)
    return Document(record.name, torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.bool))


def encode_files(
    tokenizer: PreTrainedTokenizerBase, paths: list[Path], *, longest: int, vocab_size: int, ends: set[int]
) -> tuple[list[Document], DataCounts]:
    """All usable documents of the files, in order.

    Rules: a sample longer than `longest` tokens keeps its first `longest`; one with no supervised token after its first
    position teaches nothing and is skipped; an id outside the target's `vocab_size` rows raises DataError, since on a GPU
    it would poison the device. Raises DataError if no sample is left.
    """
    documents, counts = [], DataCounts()
    for path in paths:
        for record in read_records(path):
            counts.rows += 1
            document = encode_record(tokenizer, record, ends)
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
            "rows need an assistant turn, or 'text'"
        )
    return documents, counts

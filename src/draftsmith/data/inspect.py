"""What a training file teaches, for a person: lengths, what is dropped and why, and chats with the supervised tokens marked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftsmith.data.chat import REFUSED, UNUSABLE, ChatFormat, DataCounts, encode_record, fault_of
from draftsmith.data.files import read_records
from draftsmith.data.text import Record

BINS, BAR = 12, 40


@dataclass(frozen=True)
class Piece:
    """A run of tokens as text; supervised: whether the drafter learns to predict it."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Look:
    """counts: what happens to the rows; tokens and supervised: of each used row; shown: the first chats, each as its pieces;
    dropped: names of rows left out with the reason, at most as many."""

    counts: DataCounts
    tokens: list[int]
    supervised: list[int]
    shown: list[tuple[str, list[Piece]]]
    dropped: list[tuple[str, str]]


def pieces(chat: ChatFormat, ids: Sequence[int], mask: Sequence[bool]) -> list[Piece]:
    """Runs of equally supervised tokens, decoded together so that characters of several tokens stay whole."""
    runs: list[tuple[bool, list[int]]] = []
    for token, supervised in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != supervised:
            runs.append((supervised, []))
        runs[-1][1].append(token)
    return [Piece(str(chat.tokenizer.decode(run)), supervised) for supervised, run in runs]


def _take(chat: ChatFormat, record: Record, longest: int, show: int, look: Look) -> str | None:
    """Count one row; why it is dropped, if it is."""
    try:
        document, rewritten = encode_record(chat, record)
    except UNUSABLE as error:
        look.counts.skip(REFUSED)
        return f"{REFUSED}: {' '.join(str(error).split())}"
    look.counts.turns_unsupervised += rewritten
    fault = fault_of(document.ids[:longest], document.loss_mask[:longest])
    if fault is not None:
        look.counts.skip(fault)
        return fault
    kept = look.counts.take(document, longest)
    look.tokens.append(kept.ids.numel())
    look.supervised.append(int(kept.loss_mask.sum()))
    if len(look.shown) < show:
        look.shown.append((record.name, pieces(chat, kept.ids.tolist(), kept.loss_mask.tolist())))
    return None


def look_at(chat: ChatFormat, source: str, *, longest: int, show: int, limit: int | None = None) -> Look:
    """Encode up to `limit` rows of a source as training would, keeping the first `show` chats and reasons for people."""
    look = Look(DataCounts(), [], [], [], [])
    for record in read_records(source):
        if limit is not None and look.counts.rows >= limit:
            break
        look.counts.rows += 1
        reason = _take(chat, record, longest, show, look)
        if reason is not None and len(look.dropped) < show:
            look.dropped.append((record.name, reason))
    return look


def histogram(values: Sequence[int], bins: int = BINS) -> Iterator[str]:
    """Lines `from-to  count  bar` of equally wide bins over whole numbers."""
    if not values:
        return
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // bins))
    counts = [0] * ((high - low) // width + 1)
    for value in values:
        counts[(value - low) // width] += 1
    digits = len(str(low + len(counts) * width - 1))
    for number, count in enumerate(counts):
        first = low + number * width
        yield f"{first:>{digits}}-{first + width - 1:<{digits}} {count:>7} {'#' * -(-count * BAR // max(counts))}".rstrip()

"""Documents to packs of bucket length. First fit in a seeded order, then each pack takes the smallest bucket that holds it."""

import random
from dataclasses import dataclass

import torch

from draftsmith.types import Document, Tokens

OPEN_PACKS = 64


@dataclass(frozen=True)
class PackingReport:
    """How well the packs are filled."""

    packs: int
    tokens: int
    padding: int
    per_bucket: dict[int, int]

    @property
    def waste(self) -> float:
        """Share of positions that are padding."""
        return self.padding / (self.tokens + self.padding)

    def line(self) -> str:
        """One line for people."""
        buckets = ", ".join(f"{count} of {length}" for length, count in sorted(self.per_bucket.items()))
        return f"{self.packs} packs ({buckets}), {self.waste:.1%} padding"


def _lay_out(documents: list[Document], bucket: int) -> Tokens:
    ids = torch.zeros(bucket, dtype=torch.long)
    loss_mask = torch.zeros(bucket, dtype=torch.bool)
    document_ids = torch.full((bucket,), -1, dtype=torch.long)
    position_ids = torch.zeros(bucket, dtype=torch.long)
    start = 0
    for number, document in enumerate(documents):
        place = slice(start, start + document.ids.numel())
        ids[place], loss_mask[place] = document.ids, document.loss_mask
        document_ids[place] = number
        position_ids[place] = torch.arange(document.ids.numel())
        start = place.stop
    lengths = tuple(d.ids.numel() for d in documents)
    return Tokens(ids, loss_mask, document_ids, position_ids, lengths, tuple(d.name for d in documents))


def pack(documents: list[Document], buckets: list[int], seed: int) -> tuple[list[Tokens], PackingReport]:
    """Pack documents, none longer than the largest bucket, each exactly once; the result is a function of the arguments."""
    order = list(documents)
    random.Random(f"pack-{seed}").shuffle(order)
    largest = max(buckets)
    done: list[list[Document]] = []
    open_packs: list[tuple[int, list[Document]]] = []
    for document in order:
        size = document.ids.numel()
        assert size <= largest, f"{document.name} is longer than every bucket"
        for place, (used, members) in enumerate(open_packs):
            if used + size <= largest:
                members.append(document)
                open_packs[place] = (used + size, members)
                break
        else:
            open_packs.append((size, [document]))
            if len(open_packs) > OPEN_PACKS:
                fullest = max(range(len(open_packs)), key=lambda i: open_packs[i][0])
                done.append(open_packs.pop(fullest)[1])
    done += [members for _, members in open_packs]
    packs, per_bucket = [], dict.fromkeys(sorted(buckets), 0)
    for members in done:
        used = sum(d.ids.numel() for d in members)
        bucket = min(b for b in buckets if b >= used)
        per_bucket[bucket] += 1
        packs.append(_lay_out(members, bucket))
    tokens = sum(p.filled for p in packs)
    return packs, PackingReport(len(packs), tokens, sum(p.bucket for p in packs) - tokens, per_bucket)

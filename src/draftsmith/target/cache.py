"""Hidden states on disk: safetensors shards and an index with their hashes, read instead of running the target.

States are kept document by document, each with the pack it was captured in: that pack read back has the very bits of live capture,
while a document packed otherwise has the same states up to rounding. A shard is written aside, synced, renamed and then entered in
the index, a line at a time, so that work that is cut off loses at most the states of one shard.
"""

import hashlib
import itertools
import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import CaptureError, UsageError
from draftsmith.target.cache_index import CURE, CacheHeader, CacheIndex, Row, token_bytes
from draftsmith.target.facts import TargetFacts, load_facts, save_facts
from draftsmith.types import Document, HiddenStates, Tokens

DOCUMENTS, FACTS = "documents.safetensors", "target"
SHARD_BYTES = 2**28
OPEN_SHARDS = 64
DIFFERS = {"target": "the target is another model", "documents": "the training data differ"}


class DamagedShardError(CaptureError):
    """A shard's bytes are not those that were written; `shard` is its file name."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"cached hidden states: shard '{path}' is damaged, its bytes do not have the SHA-256 of the index; {CURE}"
        )
        self.shard = path.name


def digest(*tensors: Tensor) -> str:
    """Tells one list of token ids from another."""
    made = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        made.update(tensor.numpy().tobytes())
    return made.hexdigest()


def documents_digest(documents: Sequence[Document]) -> str:
    """Tells one list of documents from another."""
    return digest(*itertools.chain.from_iterable((d.ids, d.loss_mask) for d in documents))


def _pack_digest(tokens: Tokens) -> str:
    return digest(tokens.ids, torch.tensor(tokens.lengths))


def parts(tokens: Tokens) -> Iterator[slice]:
    """Where each document of a pack lies in it."""
    ends = list(itertools.accumulate(tokens.lengths))
    yield from (slice(end - length, end) for end, length in zip(ends, tokens.lengths, strict=True))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class StateCache:
    """One cache folder. Any number of threads may read and write it through one object; only one process may write."""

    def __init__(self, index: CacheIndex) -> None:
        self.folder, self.header, self._index = index.folder, index.header, index
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._verified: dict[str, str] = {}
        self._waiting: dict[tuple[str, int], tuple[str, Tensor]] = {}
        self._waiting_bytes = 0

    @classmethod
    def create(cls, folder: Path, header: CacheHeader, facts: TargetFacts, documents: Sequence[Document]) -> "StateCache":
        """The cache in a folder, made if it is not there. Raises UsageError if what is there was made of something else."""
        index, new = CacheIndex.claimed(folder, header)
        if not new:
            differences = [
                DIFFERS.get(key, f"{key} was {value}, is now {getattr(header, key)}")
                for key, value in vars(index.header).items()
                if key != "data" and value != getattr(header, key)
            ]
            if differences:
                index.release()
                raise UsageError(
                    f"cache '{folder}' was made of something else: {'; '.join(differences)}; restore that, or name another folder"
                )
            return cls(index)
        save_facts(folder / FACTS, facts)
        ids, mask = torch.cat([d.ids for d in documents]), torch.cat([d.loss_mask for d in documents])
        lengths = torch.tensor([d.ids.numel() for d in documents])
        names = json.dumps([d.name for d in documents])
        save_file({"ids": ids, "loss_mask": mask, "lengths": lengths}, folder / DOCUMENTS, metadata={"names": names})
        # Last, so that a folder with an index has the rest.
        index.begin()
        return cls(index)

    @classmethod
    def open(cls, folder: Path) -> "StateCache":
        """A cache that is there. Raises CaptureError naming what is missing."""
        return cls(CacheIndex.open(folder))

    def facts(self, device: torch.device) -> TargetFacts:
        """What a drafter needs of the target. Raises TargetError."""
        return load_facts(self.folder / FACTS, device)

    def documents(self) -> list[Document]:
        """All documents in their order, whether their states are there or not. Raises CaptureError."""
        path = self.folder / DOCUMENTS
        try:
            with safe_open(path, framework="pt") as file:
                names = json.loads(file.metadata()["names"])
            kept = load_file(path)
            lengths = kept["lengths"].tolist()
            rows = zip(names, kept["ids"].split(lengths), kept["loss_mask"].split(lengths), strict=True)
            documents = [Document(name, ids.clone(), mask.clone()) for name, ids, mask in rows]
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CaptureError(
                f"cache '{self.folder}': {DOCUMENTS} cannot be read ({' '.join(str(error).split())[:200]}); make it again in another folder"
            ) from None
        if documents_digest(documents) != self.header.documents:
            raise CaptureError(f"cache '{self.folder}': {DOCUMENTS} is damaged; make it again in another folder")
        return documents

    def check_complete(self, packs: Sequence[Tokens]) -> None:
        """Raise CaptureError unless every shard is there and every document of the packs has states."""
        gone = self.missing()
        if gone:
            raise CaptureError(
                f"cached hidden states: shard '{self.folder / gone[0]}' is missing ({len(gone)} of {len(self._index.hashes)} shards are); {CURE}"
            )
        lacking = [tokens.names[i] for tokens in packs for i, row in enumerate(self._rows(tokens)) if row is None]
        if lacking:
            raise CaptureError(
                f"cached hidden states: '{self.folder}' lacks {len(lacking)} documents, the first of them {lacking[0]}; {CURE}"
            )

    def missing(self) -> list[str]:
        """Shards of the index that are not on the disk."""
        return [name for name in self._index.hashes if not (self.folder / name).is_file()]

    def repair(self) -> list[str]:
        """Forget every shard that is missing or damaged; their names."""
        bad = [name for name in self._index.hashes if not self._is_sound(name)]
        for name in bad:
            self.forget(name)
        return bad

    def forget(self, shard: str) -> None:
        """Take a shard out of the index and off the disk."""
        with self._lock:
            self._index.forget(shard)
            self._open.pop(shard, None)
            (self.folder / shard).unlink(missing_ok=True)

    def has(self, tokens: Tokens) -> bool:
        """Whether this very pack was captured."""
        pack = _pack_digest(tokens)
        return all((pack, place) in self._index.exact or (pack, place) in self._waiting for place in range(len(tokens.lengths)))

    def get(self, tokens: Tokens) -> HiddenStates | None:
        """The states of a pack on the host, or None if some document has none. Raises DamagedShardError."""
        with self._lock:
            dtype = self.header.torch_dtype
            split = self.header.width * len(self.header.layer_ids)
            features = torch.zeros(tokens.bucket, split, dtype=dtype)
            final = torch.zeros(tokens.bucket, self.header.width, dtype=dtype) if self.header.final else None
            for part, states in zip(parts(tokens), self._states(tokens), strict=True):
                if states is None:
                    return None
                features[part] = states[:, :split]
                if final is not None:
                    final[part] = states[:, split:]
        return HiddenStates(features, None, final)

    def put(self, tokens: Tokens, hidden: HiddenStates) -> None:
        """Keep the states of a captured pack; on disk once a shard is full, or at `flush`."""
        pack = _pack_digest(tokens)
        columns = [hidden.features] if hidden.final is None else [hidden.features, hidden.final]
        states = torch.cat([c.cpu() for c in columns], dim=1)
        if states.shape[1] != self.header.columns:
            raise CaptureError(
                f"cache '{self.folder}' holds {self.header.columns} values a token, but {states.shape[1]} were captured"
            )
        with self._lock:
            for place, part in enumerate(parts(tokens)):
                self._waiting[pack, place] = (digest(tokens.ids[part]), states[part].clone())
            self._waiting_bytes += states.numel() * states.element_size()
            full = self._waiting_bytes >= SHARD_BYTES
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one shard. Raises CaptureError, and what was written before stays."""
        with self._lock:
            if not self._waiting:
                return
            self._index.claim()
            name = self._index.free_name()
            rows, start = [], 0
            for (pack, place), (document, states) in self._waiting.items():
                rows.append((pack, place, document, start, states.shape[0]))
                start += states.shape[0]
            aside = self.folder / f".{name}.tmp"
            try:
                save_file({"states": torch.cat([states for _, states in self._waiting.values()])}, aside)
                _sync(aside)
                sha256 = _file_digest(aside)
                os.replace(aside, self.folder / name)
                _sync(self.folder)
                self._index.add(name, sha256, rows)
            except (OSError, SafetensorError) as error:
                aside.unlink(missing_ok=True)
                raise CaptureError(
                    f"shard '{self.folder / name}' cannot be written ({error}); free some space and run again"
                ) from error
            self._verified[name] = sha256
            self._waiting, self._waiting_bytes = {}, 0

    def close(self) -> None:
        """Write what waits, and let others write."""
        self.flush()
        self._index.release()

    def covers(self, tokens: Tokens) -> bool:
        """Whether every document of the pack has states, be it from this pack or another."""
        return None not in self._rows(tokens)

    def require_space(self, tokens: int) -> None:
        """Raise CaptureError unless the states of so many more tokens fit on the disk."""
        needed = self.bytes_of(tokens)
        free = shutil.disk_usage(self.folder).free
        if free < needed + 2**20:
            raise CaptureError(
                f"{self.folder}: {free / 1e9:.2f} GB free, but the hidden states of {tokens} tokens need {needed / 1e9:.2f} GB; free some "
                "space, name another hidden_states.folder, or train with hidden_states.source=live"
            )

    def bytes_of(self, tokens: int) -> int:
        """Bytes that the states of so many tokens take."""
        header = self.header
        return tokens * token_bytes(header.layer_ids, header.width, header.torch_dtype, final=header.final)

    def _rows(self, tokens: Tokens, pack: str | None = None) -> list[Row | None]:
        """Where the states of each document lie; pack: the pack's digest, if it is known already."""
        pack = pack or _pack_digest(tokens)
        return [
            self._index.exact.get((pack, place)) or self._index.by_document.get(digest(tokens.ids[part]))
            for place, part in enumerate(parts(tokens))
        ]

    def _states(self, tokens: Tokens) -> Iterator[Tensor | None]:
        """The states of each document of a pack, from memory or disk."""
        pack = _pack_digest(tokens)
        for place, row in enumerate(self._rows(tokens, pack)):
            if (pack, place) in self._waiting:
                yield self._waiting[pack, place][1]
            else:
                yield None if row is None else self._shard(row.shard).get_slice("states")[row.start : row.start + row.tokens]

    def _is_sound(self, name: str) -> bool:
        path, wanted = self.folder / name, self._index.hashes[name]
        if self._verified.get(name) != wanted and path.is_file() and _file_digest(path) == wanted:
            self._verified[name] = wanted
        return self._verified.get(name) == wanted and path.is_file()

    def _shard(self, name: str) -> Any:
        """A shard opened for reading, checked once."""
        if name not in self._open:
            path = self.folder / name
            if not path.is_file():
                raise CaptureError(f"cached hidden states: shard '{path}' is missing; {CURE}")
            if not self._is_sound(name):
                raise DamagedShardError(path)
            self._open[name] = safe_open(path, framework="pt")
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

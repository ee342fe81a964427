"""The index of a cache folder: what the cache holds, and a line for each shard that was written or given up."""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import torch

from draftsmith.errors import CaptureError, UsageError

INDEX, LOCK = "index.jsonl", "draftsmith-cache.lock"
SHARD = re.compile(r"states-\d{5,}\.safetensors")
VERSION = 1
CURE = "run `draftsmith cache` again with the same configuration: it makes what is missing or damaged"


def token_bytes(layer_ids: Sequence[int], width: int, dtype: torch.dtype, *, final: bool) -> int:
    """Bytes that the states of one token take."""
    return width * (len(layer_ids) + final) * dtype.itemsize


@dataclass(frozen=True)
class CacheHeader:
    """What a cache holds. target: digest of the target; layer_ids, width, dtype and final: of the states; documents: digest of all
    tokens and masks; data: how they were encoded, as told by the one who made it."""

    target: str
    layer_ids: tuple[int, ...]
    width: int
    dtype: str
    final: bool
    documents: str
    data: dict[str, Any]

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype '{self.dtype}' is none that states have")

    @property
    def columns(self) -> int:
        """Values kept of one token."""
        return self.width * (len(self.layer_ids) + self.final)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the states."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class Row(NamedTuple):
    """Where the states of one document lie."""

    shard: str
    start: int
    tokens: int


UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _damaged(folder: Path, number: int, error: Exception) -> CaptureError:
    return CaptureError(f"cache '{folder}': line {number} of {INDEX} is damaged ({error}); make it again in another folder")


@contextmanager
def _reading(folder: Path) -> Iterator[TextIO]:
    try:
        with (folder / INDEX).open(encoding="utf-8") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise CaptureError(f"'{folder}' is no cache of hidden states: {INDEX} cannot be read ({error}); {CURE}") from None


def _header(folder: Path, line: str) -> CacheHeader:
    if not line:
        raise CaptureError(f"cache '{folder}': {INDEX} is empty; remove the folder, or name another")
    try:
        entry = json.loads(line)
        version = entry.pop("version")
        header = CacheHeader(**{**entry, "layer_ids": tuple(entry["layer_ids"])}) if version == VERSION else None
    except UNREADABLE as error:
        raise _damaged(folder, 1, error) from None
    if header is None:
        raise CaptureError(f"cache '{folder}' was made by another version of Draftsmith; name another folder")
    return header


def read_header(folder: Path) -> CacheHeader:
    """What a cache holds, without reading where. Raises CaptureError."""
    with _reading(folder) as file:
        return _header(folder, file.readline())


class CacheIndex:
    """Reads the whole file once and appends to it. hashes: SHA-256 by shard; exact: rows by digest of the pack and place in it;
    by_document: rows by digest of the document."""

    def __init__(self, folder: Path, header: CacheHeader) -> None:
        self.folder, self.header = folder, header
        self.hashes: dict[str, str] = {}
        self.exact: dict[tuple[str, int], Row] = {}
        self.by_document: dict[str, Row] = {}
        self._writer: BinaryIO | None = None

    @classmethod
    def claimed(cls, folder: Path, header: CacheHeader) -> tuple["CacheIndex", bool]:
        """The index of a folder that nobody else writes to from here on, and whether it is new and not on the disk yet. Raises UsageError
        for a folder that another process writes to, or that holds something else."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in folder.iterdir()}
            if names and LOCK not in names and INDEX not in names:
                raise UsageError(
                    f"hidden_states.folder '{folder}' holds other files ({', '.join(sorted(names)[:4])}); name a folder of its own"
                )
            index = cls(folder, header)
            index._lock()
        except OSError as error:
            raise UsageError(f"hidden_states.folder '{folder}' cannot be written ({error.strerror}); name another") from error
        if not (folder / INDEX).is_file():
            return index, True
        there = cls.open(folder)
        there._writer = index._writer
        return there, False

    def begin(self) -> None:
        """Make the index of a new cache, which holds no shard."""
        self._append({"version": VERSION, **asdict(self.header)})

    @classmethod
    def open(cls, folder: Path) -> "CacheIndex":
        """The index that is there. Raises CaptureError naming what is wrong with it."""
        with _reading(folder) as file:
            index = cls(folder, _header(folder, file.readline()))
            lines = file.read().splitlines()
        for number, line in enumerate(lines, start=2):
            try:
                index._enter(json.loads(line))
            except UNREADABLE as error:
                # The last line may have been cut off; its shard is then written again.
                if number <= len(lines):
                    raise _damaged(folder, number, error) from None
        return index

    def add(self, shard: str, sha256: str, rows: list[tuple[str, int, str, int, int]]) -> None:
        """Enter a shard that is whole on the disk. rows: digest of the pack, place in it, digest of the document, start, tokens."""
        self._record({"shard": shard, "sha256": sha256, "documents": rows})

    def forget(self, shard: str) -> None:
        """Give up a shard."""
        self._record({"forget": shard})

    def claim(self) -> None:
        """Be the one process that writes, and know all that others have written. The claim goes with the process. Raises UsageError if
        another holds it."""
        if self._writer is None:
            self._lock()
            if (self.folder / INDEX).is_file():
                now = CacheIndex.open(self.folder)
                self.hashes, self.exact, self.by_document = now.hashes, now.exact, now.by_document

    def _lock(self) -> None:
        writer = (self.folder / LOCK).open("ab")
        try:
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            writer.close()
            raise UsageError(
                f"cache '{self.folder}' is being written by another process; wait for it, stop it, or name another hidden_states.folder"
            ) from None
        self._writer = writer

    def free_name(self) -> str:
        """A name for the next shard, which nothing bears."""
        number = len(self.hashes)
        while (name := f"states-{number:05}.safetensors") in self.hashes or (self.folder / name).exists():
            number += 1
        return name

    def release(self) -> None:
        """Give up the claim."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _record(self, line: dict[str, Any]) -> None:
        self._append(line)
        self._enter(line)

    def _append(self, line: dict[str, Any]) -> None:
        path = self.folder / INDEX
        self.claim()
        path.touch()
        with path.open("r+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    # A line that was cut off must not swallow this one.
                    file.truncate(path.read_bytes().rfind(b"\n") + 1)
                    file.seek(0, os.SEEK_END)
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _enter(self, line: dict[str, Any]) -> None:
        """Let the maps know a line."""
        name = str(line["forget"] if "forget" in line else line["shard"])
        if not SHARD.fullmatch(name):
            raise ValueError(f"'{name}' is no name of a shard")
        if self.hashes.pop(name, None) is not None:
            self.exact = {key: row for key, row in self.exact.items() if row.shard != name}
            self.by_document = {key: row for key, row in self.by_document.items() if row.shard != name}
        if "forget" in line:
            return
        self.hashes[name] = str(line["sha256"])
        for pack, place, document, start, tokens in line["documents"]:
            row = Row(name, int(start), int(tokens))
            self.exact[pack, int(place)] = row
            self.by_document.setdefault(document, row)

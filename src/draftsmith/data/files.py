"""Where rows come from: JSONL, JSON, Parquet, a dataset saved to disk, or the Hugging Face hub. Rows are read in order, one at a time."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.sets import SETS
from draftsmith.data.text import Record, parse_record
from draftsmith.errors import DataError

HUB = "hf:"
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")


def is_there(source: str) -> bool:
    """Whether a source can be opened without asking anybody; hub names are believed."""
    path = Path(source)
    return source.startswith(HUB) or source in SETS or path.is_file() or any((path / name).is_file() for name in SAVED)


def read_records(source: Path | str) -> Iterator[Record]:
    """Rows of a source in order; each record's name says where it stands. Raises DataError naming place and fault.

    source: a .jsonl, .json or .parquet file, a folder written by `datasets`' save_to_disk, `hf:NAME[:SPLIT]`, or the short name of a
    usual set (data/sets.py).
    """
    text = str(source)
    if text.startswith(HUB):
        rows = _hub(*text.removeprefix(HUB).partition(":")[::2])
    elif text in SETS and not Path(source).exists():
        rows = _set(text)
    else:
        rows = _file(Path(source))
    for name, row in rows:
        yield parse_record(row, name)


def _set(name: str) -> Iterator[tuple[str, object]]:
    chosen = SETS[name]
    for place, row in _hub(chosen.path, chosen.split, chosen.config):
        try:
            yield place, chosen.row(row, name)
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{place}: not a row of the set '{name}' as it is known ({type(error).__name__}: {error})"
            ) from None


def _file(path: Path) -> Iterator[tuple[str, object]]:
    if not path.exists():
        raise DataError(f"data file '{path}' does not exist; check the path")
    if path.is_dir():
        if not any((path / name).is_file() for name in SAVED):
            raise DataError(
                f"data file '{path}' is a folder; name the files in it, or a folder written by datasets' save_to_disk"
            )
        return _saved(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    return _json(path) if path.suffix == ".json" else _lines(path)


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _loads(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise DataError(f"data file '{path}' is not UTF-8 (byte {error.start}); convert it") from None


def _loads(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{name}: not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise DataError(f"{name}: nested too deeply") from None


def _json(path: Path) -> Iterator[tuple[str, object]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"data file '{path}' is not UTF-8 (byte {error.start}); convert it") from None
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            # One object a line under the wrong suffix is common.
            yield from _lines(path)
            return
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from None
    rows = tree.get("data") if isinstance(tree, dict) and isinstance(tree.get("data"), list) else tree
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield f"{path}:{number}", row


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file '{path}' cannot be read as Parquet after row {number}: {_one_line(error)}") from error


def _saved(path: Path) -> Iterator[tuple[str, object]]:
    import datasets

    try:
        found: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"dataset folder '{path}' cannot be read: {_one_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if len(found) != 1:
            raise DataError(
                f"dataset folder '{path}' holds the splits {', '.join(found)}; name one: {path}/{next(iter(found))}"
            )
        found = next(iter(found.values()))
    for number, row in enumerate(found, start=1):
        yield f"{path}:{number}", row


def _hub(title: str, split: str, config: str | None = None) -> Iterator[tuple[str, Any]]:
    import datasets

    name = f"{HUB}{title}" + (f":{split}" if split else "")
    try:
        # Streamed, so that a look at a few rows does not fetch them all.
        rows: Any = datasets.load_dataset(title, config, split=split or "train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{name}:{number}", row
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"dataset '{name}' cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def write_records(path: Path, chats: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Write chats as JSONL rows with `messages`, aside first and then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    lines = [json.dumps({"messages": list(chat)}, ensure_ascii=False) + "\n" for chat in chats]
    aside.write_text("".join(lines), encoding="utf-8")
    aside.replace(path)

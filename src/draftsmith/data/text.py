"""Records of text from JSONL files: one JSON object a line, with `messages` (role/content) or `text`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Record:
    """One row: either a chat (`messages`) or plain `text`; `name` is `file:line`."""

    name: str
    messages: tuple[dict[str, str], ...] | None
    text: str | None


def _record(row: object, name: str) -> Record:
    if not isinstance(row, dict):
        raise DataError(f"{name}: expected a JSON object with 'messages' or 'text', found {type(row).__name__}")
    if "messages" in row:
        messages = row["messages"]
        valid = isinstance(messages, list) and all(
            isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
        )
        if not valid:
            raise DataError(f"{name}: 'messages' must be a list of objects with 'role' in {list(ROLES)} and a text 'content'")
        return Record(name, tuple({"role": m["role"], "content": m["content"]} for m in messages), None)
    if isinstance(row.get("text"), str):
        return Record(name, None, row["text"])
    raise DataError(f"{name}: row has keys {sorted(row)}; expected 'messages' (list) or 'text' (string)")


def read_records(path: Path) -> Iterator[Record]:
    """Rows of a JSONL file in order, blank lines skipped; raises DataError naming file, line and fault."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise DataError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
                    yield _record(row, f"{path}:{number}")
    except FileNotFoundError:
        raise DataError(f"data file '{path}' does not exist; check the path") from None
    except IsADirectoryError:
        raise DataError(f"data file '{path}' is a folder; name the JSONL files in it") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data file '{path}' is not UTF-8 (byte {error.start}); convert it") from None


def write_records(path: Path, chats: list[list[dict[str, str]]]) -> None:
    """Write chats as JSONL rows with `messages`, aside first and then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text("".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats), encoding="utf-8")
    aside.replace(path)

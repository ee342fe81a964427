"""A file of responses that may be cut off at any moment and goes on where it was: no row twice, none lost."""

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.errors import DataError, UsageError

ROW = "row"


class ResponseFile:
    """JSONL at `path`, a row as soon as it is written, each with its number in the source under `row`.

    settings: what decides the responses; they stand beside the file, and another call with others is refused. Use it as a context.
    done: numbers of the rows that are there; unfinished: how many of them were cut off.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, json.loads(json.dumps(settings))
        self._beside = path.with_name(path.name + ".settings.json")
        self._file: FileIO | None = None
        self.done: set[int] = set()
        self.unfinished = 0

    def __enter__(self) -> "ResponseFile":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            there = self.path.exists() and self.path.stat().st_size > 0
            self._file = FileIO(self.path, "a+")
        except OSError as error:
            raise UsageError(f"'{self.path}' cannot be written ({error.strerror}); give another file") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(f"'{self.path}' is being written by another process; wait for it, or give another file") from None
        try:
            self._check_settings(there)
            self._recover()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()

    def _check_settings(self, there: bool) -> None:
        if self._beside.is_file():
            try:
                before = dict(json.loads(self._beside.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise UsageError(f"'{self._beside}' cannot be read ({error}); give another file for the responses") from None
            differences = [
                f"{key} was {before.get(key)}, is now {self._settings.get(key)}"
                for key in sorted({*before, *self._settings})
                if before.get(key) != self._settings.get(key)
            ]
            if differences:
                raise UsageError(
                    f"'{self.path}' was begun otherwise: {'; '.join(differences)}; restore that, or give another file for the responses"
                )
        elif there:
            raise UsageError(f"'{self.path}' exists and was not begun by this command; give another file for the responses")
        else:
            aside = self._beside.with_name(f".{self._beside.name}.tmp")
            aside.write_text(json.dumps(self._settings, indent=2) + "\n", encoding="utf-8")
            aside.replace(self._beside)

    def _recover(self) -> None:
        """Note the rows that are there, and cut off the one that was being written when the last process ended."""
        assert self._file is not None
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    content = json.loads(line)
                    row = content[ROW] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    row = None
                if row is None:
                    if file.read(1):
                        raise DataError(
                            f"{self.path}:{number}: not a row of this command's; mend or remove the line, or give another file"
                        )
                    break
                whole += len(line)
                self._note(row, content)
        self._file.truncate(whole)

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """Write the row of that number, once; it is on the disk when this returns. Raises DataError where it cannot be."""
        assert self._file is not None
        if number in self.done:
            return
        content = {ROW: number, **row}
        try:
            line = json.dumps(content, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:
            # Half of a pair of surrogates, which only an escape can hold.
            line = json.dumps(content).encode() + b"\n"
        whole = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(whole)
            raise DataError(
                f"'{self.path}' cannot be written ({error.strerror}); free some space and run again: {len(self.done)} rows are kept"
            ) from error
        self._note(number, row)

    def _note(self, number: int, row: Mapping[str, Any]) -> None:
        self.done.add(number)
        self.unfinished += bool(row.get("unfinished"))

    def sort(self) -> None:
        """Put the rows into the order of their source, all at once."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        lines.sort(key=lambda line: json.loads(line)[ROW])
        aside = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with aside.open("wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self.path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise DataError(
                f"'{self.path}' is whole but cannot be sorted ({error.strerror}); free some space and run again"
            ) from error

"""The resumable file: whatever moment it is cut off at, no row comes twice and none is lost."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.data import responses
from draftsmith.data.files import read_records
from draftsmith.data.responses import ResponseFile
from draftsmith.errors import DataError, UsageError

SETTINGS = {"model": "m", "sampling": {"temperature": 0.7}}


def row(number: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "ä\n" * number}]}


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["row"] for line in path.read_text(encoding="utf-8").splitlines()]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 400))
def test_cut_anywhere_it_goes_on_with_nothing_twice_and_nothing_lost(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], cut: int
) -> None:
    path = tmp_path_factory.mktemp("r") / "out.jsonl"
    with ResponseFile(path, SETTINGS) as file:
        for number in order:
            file.add(number, row(number))
        assert file.done == set(order)
    raw = path.read_bytes()
    kept = raw[: max(0, len(raw) - cut)]
    path.write_bytes(kept)
    with ResponseFile(path, SETTINGS) as file:
        assert len(file.done) == kept.count(b"\n")
        for number in range(10):
            file.add(number, row(number))
        file.sort()
    assert numbers(path) == list(range(10))
    assert [r.messages[1]["content"] for r in read_records(path) if r.messages] == ["ä\n" * n for n in range(10)]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResponseFile(path, SETTINGS):
        pass
    with (
        pytest.raises(UsageError, match=r"was begun otherwise: model was m, is now n.*give another file"),
        ResponseFile(path, {**SETTINGS, "model": "n"}),
    ):
        pass


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("precious\n")
    with pytest.raises(UsageError, match="was not begun by this command"), ResponseFile(path, SETTINGS):
        pass
    assert path.read_text() == "precious\n"


def test_a_strange_line_in_the_middle_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResponseFile(path, SETTINGS) as file:
        file.add(0, row(0))
    before = path.read_bytes()
    path.write_bytes(before + b"hm\n" + before)
    with pytest.raises(DataError, match=r"out.jsonl:2: not a row"), ResponseFile(path, SETTINGS):
        pass
    assert path.read_bytes() == before + b"hm\n" + before


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with (
        ResponseFile(tmp_path / "out.jsonl", SETTINGS),
        pytest.raises(UsageError, match="being written by another process"),
        ResponseFile(tmp_path / "out.jsonl", SETTINGS),
    ):
        pass


def test_a_full_disk_leaves_whole_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ResponseFile(path, SETTINGS) as file:
        file.add(3, row(3))
        monkeypatch.setattr(responses.os, "fsync", full)
        with pytest.raises(DataError, match=r"No space left on device.*1 rows are kept"):
            file.add(4, row(4))
        monkeypatch.undo()
        file.add(5, row(5))
    assert numbers(path) == [3, 5]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"), ResponseFile(tmp_path / "file" / "out.jsonl", SETTINGS):
        pass

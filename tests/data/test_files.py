"""Rows in the layouts and formats that people own; whatever cannot be meant is named with its place."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.data.files import is_there, read_records, write_records
from draftsmith.data.sets import SETS
from draftsmith.data.text import parse_record
from draftsmith.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ROWS: list[dict[str, Any]] = [{"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, {**ANSWERED, "content": "ü\n"}]}]


def read(source: Path | str) -> list[list[dict[str, Any]]]:
    return [list(record.messages or ()) for record in read_records(source)]


def test_the_same_rows_in_every_format(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2))
    (tmp_path / "wrapped.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table).save_to_disk(str(tmp_path / "split"))
    (tmp_path / "hub").mkdir()
    table.to_parquet(str(tmp_path / "hub" / "train.parquet"))
    expected = [row["messages"] for row in ROWS]
    for name in ("a.jsonl", "a.json", "wrapped.json", "lines.json", "a.parquet", "saved", "split", "split/train"):
        assert read(tmp_path / name) == expected, name
        assert is_there(str(tmp_path / name))
    # A folder of files stands for the hub, which tests cannot reach.
    assert read(f"hf:{tmp_path / 'hub'}:train") == expected
    assert [record.name for record in read_records(tmp_path / "a.parquet")] == [f"{tmp_path}/a.parquet:{n}" for n in (1, 2)]
    assert not is_there(str(tmp_path / "none.json"))
    assert not is_there(str(tmp_path))


def test_sharegpt_and_text() -> None:
    turns = [("system", "s"), ("human", "q"), ("gpt", "a"), ("observation", "o"), ("chatgpt", "b")]
    record = parse_record({"conversations": [{"from": who, "value": said} for who, said in turns]}, "f:1")
    assert [(m["role"], m["content"]) for m in record.messages or ()] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "a"),
        ("tool", "o"),
        ("assistant", "b"),
    ]
    assert parse_record({"text": "t", "messages": None}, "f:1").text == "t", "tables hold None where a row has no such column"


def test_what_templates_read_of_a_message_is_kept_and_nothing_else() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "weight": 3,
                "name": None,
            },
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "2", "tool_call_id": "1", "tool_calls": None},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "f"}}]),
        "chat_template_kwargs": {"enable_thinking": False, "unset": None},
    }
    record = parse_record(row, "f:1")
    asked, called, answered = record.messages or ()
    assert asked == {"role": "user", "content": "ab"}
    assert called["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert (called["content"], called["reasoning_content"]) == ("", "hm")
    assert answered == {"role": "tool", "content": "2", "tool_call_id": "1"}
    assert record.tools == ({"type": "function", "function": {"name": "f"}},)
    assert record.options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1], "expected an object with 'messages', 'conversations' or 'text', found list"),
        ({"prompt": "x"}, "row has keys ['prompt']; expected 'messages' (list), 'conversations' (list) or 'text' (string)"),
        ({"text": 5}, "row has keys"),
        ({"messages": "hi"}, "'messages' is str, expected a list"),
        ({"messages": [3]}, "message 1 is int, expected an object"),
        (
            {"messages": [ASKED, {"role": "robot", "content": "x"}]},
            "message 2 has role 'robot'; expected one of system, developer",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 has content of type int, expected text"),
        ({"messages": [{"role": "user"}]}, "message 1 has content of type NoneType"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1 has parts of type image_url; only text",
        ),
        ({"messages": [{**ANSWERED, "tool_calls": "f()"}]}, "message 1.tool_calls is str, expected a list"),
        ({"messages": [{**ANSWERED, "tool_calls": ["f()"]}]}, "message 1.tool_calls holds str, expected objects"),
        ({"messages": [{**ANSWERED, "tool_calls": [{"function": {"arguments": "{x"}}]}]}, "arguments that are not JSON: '{x'"),
        ({"messages": [ASKED], "tools": "[x"}, "'tools' is text that is not JSON: '[x'"),
        ({"messages": [ASKED], "tools": 3}, "'tools' is int, expected a list"),
        ({"messages": [ASKED], "chat_template_kwargs": [1]}, "'chat_template_kwargs' is list, expected an object"),
        ({"conversations": [{"from": "human"}]}, "turn 1 is not an object with 'from' and a text 'value'"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "turn 1 is from 'robot'; expected one of human, user, gpt"),
    ],
)
def test_what_cannot_be_meant_names_row_place_and_fault(row: object, words: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(row, "file:7")
    assert str(caught.value).startswith("file:7: ")
    assert words in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"text": "\xe9"}')
    (tmp_path / "latin.json").write_bytes(b'{"text": "\xe9"}')
    (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n{not json\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "bad.json").write_text('[{"text": "ok"},\n nope]')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "two").mkdir()
    datasets.DatasetDict(a=datasets.Dataset.from_list(ROWS), b=datasets.Dataset.from_list(ROWS)).save_to_disk(
        str(tmp_path / "two")
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{")
    for name, words in [
        ("none", "does not exist; check the path"),
        ("", "is a folder; name the files in it"),
        ("latin", r"not UTF-8 \(byte 10\)"),
        ("latin.json", r"not UTF-8 \(byte 10\)"),
        ("bad.jsonl", r"bad\.jsonl:2: not JSON"),
        ("deep.jsonl", r"deep\.jsonl:1: n"),
        ("bad.json", r"bad\.json:2: not JSON"),
        ("bad.parquet", "cannot be read as Parquet after row 0"),
        ("two", "holds the splits a, b; name one: .*two/a"),
        ("broken", "dataset folder .* cannot be read"),
    ]:
        with pytest.raises(DataError, match=words):
            list(read_records(tmp_path / name))


def test_records_round_trip(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": 'ü\n"x"'}, {"role": "assistant", "content": "y"}]]
    write_records(tmp_path / "sub" / "c.jsonl", chats)
    assert read(tmp_path / "sub" / "c.jsonl") == chats


ROWS_OF_SETS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "How many eggs?", "answer": "9"}, "How many eggs?", "gsm8k"),
    "math500": ({"problem": "What is 1+1?", "answer": "2", "level": 1}, "What is 1+1?", "math500"),
    "humaneval": ({"prompt": "def f(x):\n", "entry_point": "f"}, "```python\ndef f(x):\n", "humaneval"),
    "mbpp": ({"text": "Add two numbers.", "test_list": ["assert f(1, 2) == 3"]}, "assert f(1, 2) == 3", "mbpp"),
    "mt-bench": ({"prompt": ["Write a poem.", "Again."], "category": "writing"}, "Write a poem.", "writing"),
}


@pytest.mark.parametrize("name", sorted(SETS))
def test_the_usual_sets_become_questions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, words, category = ROWS_OF_SETS[name]
    asked: list[tuple[object, ...]] = []

    def load(*where: object, split: str, streaming: bool) -> list[dict[str, Any]]:
        asked.append((*where, split, streaming))
        return [row]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert is_there(name)
    (record,) = read_records(name)
    assert asked == [(SETS[name].path, SETS[name].config, SETS[name].split, True)]
    assert record.messages is not None
    assert [m["role"] for m in record.messages] == ["user"]
    assert words in record.messages[0]["content"]
    assert record.category == category
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"other": 1}])
    with pytest.raises(DataError, match=f"not a row of the set '{name}'"):
        list(read_records(name))


def test_a_set_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"dataset 'hf:openai/gsm8k:test' cannot be read: no route"):
        list(read_records("gsm8k"))


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").write_text('{"text": "mine"}\n')
    assert [record.text for record in read_records("gsm8k")] == ["mine"]

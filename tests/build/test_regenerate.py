"""The target writes the training responses: here in batches, or through a server that nobody here wrote."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from draftsmith.build import Writing, regenerate_by_server, regenerate_here
from draftsmith.data.chat import ChatFormat, encode_record
from draftsmith.data.files import read_records
from draftsmith.data.responses import ResponseFile
from draftsmith.decode import server as serving
from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.converse import Conversation, converse
from draftsmith.decode.respond import Written
from draftsmith.decode.speculate import decode_plain
from draftsmith.errors import DataError, ServerError, UsageError
from draftsmith.target.load import Target
from tests.conftest import load_fp32, save_target, until
from tests.pipeline.test_run import quiet

WRITING = Writing(max_new_tokens=12)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> str:
    rows: list[dict[str, Any]] = [
        {"messages": [user("one"), assistant("old")], "category": "numbers"},
        {"messages": [{"role": "system", "content": "be brief"}, user("two"), assistant("old"), user("and"), assistant("old")]},
        {"conversations": [{"from": "human", "value": "three"}]},
        {"messages": [{"role": "system", "content": "nobody asks"}]},
        {"text": "no chat"},
        *({"messages": [user(f"question {n}" + " long" * (n % 5))]} for n in range(9)),
    ]
    return write_rows(tmp_path / "prompts.jsonl", rows)


@pytest.fixture
def writer(tmp_path: Path) -> Target:
    """A target that ends some of its answers."""
    import dataclasses

    target = load_fp32(save_target(tmp_path / "writer", seed=4))
    free = decode_plain(target, ChatFormat(target.tokenizer).prompt([user("one")]), 12).ids
    return dataclasses.replace(target, end_ids=frozenset({free[5]}))


def test_every_answer_is_the_targets_own_and_becomes_the_history_of_the_next(
    source: str, tmp_path: Path, writer: Target
) -> None:
    done = regenerate_here(source, tmp_path / "out.jsonl", writer, WRITING, batch_size=3, say=quiet)
    assert (done.rows, done.skipped, done.signal_number) == (12, {"no question to answer": 2}, None)
    chat = ChatFormat(writer.tokenizer)
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["row"] for row in rows] == [0, 1, 2, *range(5, 14)], "in the order of the source"
    assert rows[0]["category"] == "numbers"
    finished = 0
    for row in rows:
        messages = row["messages"]
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            plain = decode_plain(writer, chat.prompt(messages[:turn]), 12).ids
            ended = plain[-1] in writer.end_ids
            assert message["content"] == writer.tokenizer.decode(plain[:-1] if ended else plain)
            finished += ended
            assert ended or (turn == len(messages) - 1 and row["unfinished"])
    assert 0 < done.unfinished < 12
    assert finished


def test_an_unfinished_answer_teaches_no_end_of_turn(tmp_path: Path, target: Target) -> None:
    rows = [{"messages": [user("q"), assistant("some words")], "unfinished": u} for u in (False, True)]
    records = list(read_records(write_rows(tmp_path / "r.jsonl", rows)))
    chat = ChatFormat(target.tokenizer, target.end_ids)
    (whole, _), (cut, _) = (encode_record(chat, record) for record in records)
    text = {name: chat.tokenizer.decode(d.ids[d.loss_mask]) for name, d in (("whole", whole), ("cut", cut))}
    assert text == {"whole": "some words<|im_end|>", "cut": "some words"}
    assert chat.tokenizer.decode(cut.ids).endswith("some words")


def test_conversations_end_where_the_target_cannot_go_on() -> None:
    def run(given: list[dict[str, Any]], answers: list[Written]) -> tuple[list[list[dict[str, Any]]], Conversation]:
        talk, asked = converse(given), []
        try:
            asked.append(next(talk))
            for answer in answers:
                asked.append(talk.send(answer))
        except StopIteration as ended:
            return asked, ended.value
        raise AssertionError("it goes on")

    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    result = {"role": "tool", "content": "4"}
    asked, whole = run([user("a"), call, result, assistant("b")], [Written("new", True, 3)])
    assert asked == [[user("a")]]
    assert whole == Conversation([user("a"), assistant("new")], False, 3)
    asked, whole = run([user("a"), assistant("x"), user("b"), assistant("y")], [Written("cut", False, 9)])
    assert whole == Conversation([user("a"), assistant("cut")], True, 9)
    assert len(asked) == 1
    asked, whole = run([user("a"), assistant("x"), user("b")], [Written("1", True, 1), Written("2", True, 1)])
    assert asked == [[user("a")], [user("a"), assistant("1"), user("b")]]
    assert whole.messages[-1] == assistant("2")
    assert run([assistant("hello"), user("a")], [])[1].messages == []


def interrupting(add: Any, after: int) -> Any:
    """`add` that is cut off after so many rows."""
    count = 0

    def counted(self: Any, number: int, row: dict[str, Any]) -> None:
        nonlocal count
        add(self, number, row)
        count += 1
        if count == after:
            raise KeyboardInterrupt

    return counted


def test_a_kill_at_any_row_loses_nothing_and_repeats_nothing(source: str, tmp_path: Path, writer: Target) -> None:
    regenerate_here(source, tmp_path / "straight.jsonl", writer, WRITING, batch_size=3, say=quiet)
    for stop_after in (1, 4, 7):
        out = tmp_path / f"stopped-{stop_after}.jsonl"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ResponseFile, "add", interrupting(ResponseFile.add, stop_after))
            with pytest.raises(KeyboardInterrupt):
                regenerate_here(source, out, writer, WRITING, batch_size=3, say=quiet)
        assert len(rows_of(out)) == stop_after
        regenerate_here(source, out, writer, WRITING, batch_size=3, say=quiet)
        assert [r["row"] for r in rows_of(out)] == [r["row"] for r in rows_of(tmp_path / "straight.jsonl")]


def test_sampling_is_repeated_by_its_seed(source: str, tmp_path: Path, writer: Target) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        writing = Writing(12, Sampling(temperature=2.0, seed=seed))
        regenerate_here(source, tmp_path / f"{name}.jsonl", writer, writing, batch_size=4, say=quiet)
        texts.append([r["messages"] for r in rows_of(tmp_path / f"{name}.jsonl")])
    assert texts[0] == texts[1] != texts[2]


def test_other_settings_and_other_prompts_are_refused(source: str, tmp_path: Path, writer: Target) -> None:
    out = tmp_path / "out.jsonl"
    regenerate_here(source, out, writer, WRITING, batch_size=3, say=quiet)
    with pytest.raises(UsageError, match="max_new_tokens was 12, is now 13"):
        regenerate_here(source, out, writer, Writing(13), batch_size=3, say=quiet)
    with Path(source).open("a") as file:
        file.write(json.dumps({"messages": [user("new")]}) + "\n")
    with pytest.raises(UsageError, match="source_sha256 was"):
        regenerate_here(source, out, writer, WRITING, batch_size=3, say=quiet)


def test_a_source_without_questions_is_refused(tmp_path: Path, writer: Target) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"text": "only text"}])
    with pytest.raises(DataError, match=r"no row could be answered.*no question to answer"):
        regenerate_here(source, tmp_path / "out.jsonl", writer, WRITING, batch_size=3, say=quiet)


def test_prompts_longer_than_the_target_are_skipped_and_counted(tmp_path: Path, writer: Target) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [user("x" * 3000)]}, {"messages": [user("short")]}])
    done = regenerate_here(source, tmp_path / "out.jsonl", writer, WRITING, batch_size=3, say=quiet)
    assert (done.rows, done.skipped) == (1, {"longer than the target's 2048 positions": 1})


class Script(BaseHTTPRequestHandler):
    """A server that says what it is told to, to try what real servers do only on bad days."""

    answers: ClassVar[list[tuple[int, str]]] = []
    seen: ClassVar[list[dict[str, Any]]] = []
    headers_seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Script.seen.append(body)
        Script.headers_seen.append(str(self.headers.get("Authorization")))
        code, text = Script.answers.pop(0) if Script.answers else (200, good("fine"))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def good(text: str, finish: str = "stop", **more: str) -> str:
    choice = {"message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(serving, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(
        serving.ChatServer.__init__, "__kwdefaults__", {**serving.ChatServer.__init__.__kwdefaults__, "first_wait_s": 0.0}
    )
    Script.answers, Script.seen, Script.headers_seen = [], [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def by_server(source: str, out: Path, url: str, *, key: str | None = None, at_once: int = 1, writing: Writing = WRITING) -> Any:
    return regenerate_by_server(source, out, url, "m", writing, key=key, at_once=at_once, say=quiet)


def test_a_busy_server_is_asked_again_and_a_refused_prompt_is_skipped(source: str, tmp_path: Path, scripted: str) -> None:
    Script.answers = [(503, "busy"), (429, "slow down"), (200, good("a")), (400, "too long"), (200, good("b", "length"))]
    done = by_server(source, tmp_path / "out.jsonl", scripted, key="s3cret")
    reasons = {re.sub(r" \(.*", "", reason): count for reason, count in done.skipped.items()}
    assert (done.rows, reasons, done.unfinished) == (11, {"refused by the server": 1, "no question to answer": 2}, 1)
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["row"] for row in rows] == [0, 2, *range(5, 14)]
    assert (rows[0]["messages"][1]["content"], rows[1]["messages"][1]["content"]) == ("a", "b")
    assert {"model", "messages", "max_tokens", "temperature"} == set(Script.seen[0])
    assert set(Script.headers_seen) == {"Bearer s3cret"}
    assert "s3cret" not in "".join(p.read_text() for p in tmp_path.glob("out*"))


def test_thoughts_that_the_server_took_apart_are_put_back(tmp_path: Path, scripted: str) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [user("q")], "chat_template_kwargs": {"enable_thinking": True}}])
    Script.answers = [(200, good("answer", reasoning_content="hm"))]
    by_server(source, tmp_path / "out.jsonl", scripted)
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert row["messages"][1]["content"] == "<think>\nhm\n</think>\n\nanswer"
    assert row["chat_template_kwargs"] == {"enable_thinking": True}
    assert Script.seen[0]["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(401, "no")], "answers with status 401: no; check --server, --model and --key-file"),
        ([(200, "<html>")], "something else than a chat completion.*ends in /v1"),
        ([(200, "{}")], "something else than a chat completion"),
        ([(500, "broken")] * 20, r"did not answer 6 times \(status 500: broken\).*is kept"),
    ],
)
def test_a_server_that_cannot_serve_is_named_and_what_was_written_is_kept(
    source: str, tmp_path: Path, scripted: str, answers: list[tuple[int, str]], words: str
) -> None:
    Script.answers = [(200, good("kept")), *answers]
    out = tmp_path / "out.jsonl"
    with pytest.raises(ServerError, match=words):
        by_server(source, out, scripted)
    assert [r["row"] for r in rows_of(out)] == [0]
    Script.answers = []
    assert by_server(source, out, scripted, at_once=4).rows == 12
    assert rows_of(out)[0]["messages"][1]["content"] == "kept"


def test_a_server_that_is_not_there_is_named(source: str, tmp_path: Path, scripted: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(ServerError, match=r"did not answer 6 times \(Connect"):
        by_server(source, tmp_path / "out.jsonl", url, at_once=3)


def test_a_stop_ends_a_wait_for_the_server_and_keeps_what_is_there(
    source: str, tmp_path: Path, scripted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    original = Script.do_POST

    def slow(self: Script) -> None:
        if len(Script.seen) >= 2:
            os.kill(os.getpid(), signal.SIGTERM)
            held.wait(60)
        original(self)

    monkeypatch.setattr(Script, "do_POST", slow)
    done = by_server(source, tmp_path / "out.jsonl", scripted)
    held.set()
    assert (done.rows, done.signal_number) == (1, signal.SIGTERM)


@pytest.mark.process
def test_transformers_serve_writes_what_the_target_writes_here(tmp_path: Path) -> None:
    """A real server of another project; a kill in the middle; the same answers as in this process."""
    folder = save_target(tmp_path / "target", seed=4)
    rows = [{"messages": [user(f"question {n}"), assistant("old"), user("and then?")]} for n in range(12)]
    source = write_rows(tmp_path / "p.jsonl", rows)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path / "serve.log").open("w")
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    server = subprocess.Popen([*command, "--device", "cpu", "--dtype", "float32"], stdout=log, stderr=log, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"

        def up() -> bool:
            assert server.poll() is None, (tmp_path / "serve.log").read_text()
            try:
                return httpx.get(f"{url}/health").status_code == 200
            except httpx.TransportError:
                return False

        until(up, "the server", 120.0)
        out = tmp_path / "out.jsonl"
        call = [sys.executable, "-m", "draftsmith", "regenerate", source, str(out), "--server", f"{url}/v1"]
        call += ["--model", str(folder), "--max-new-tokens", "8", "--batch-size", "2"]
        first = subprocess.Popen(call, stdout=subprocess.DEVNULL)
        until(lambda: out.is_file() and out.read_bytes().count(b"\n") >= 3, "three rows", 120.0)
        first.kill()
        first.wait()
        kept = rows_of(out)
        assert 3 <= len(kept) < 12
        assert subprocess.run(call, stdout=subprocess.DEVNULL).returncode == 0
    finally:
        server.terminate()
        server.wait()
        log.close()
    written = rows_of(out)
    assert [row["row"] for row in written] == list(range(12))
    assert all(row in written for row in kept)
    target = load_fp32(folder)
    regenerate_here(source, tmp_path / "here.jsonl", target, Writing(8), batch_size=4, say=quiet)
    # That server strips its answers.
    stripped = [
        [[m["content"].strip() for m in row["messages"]] for row in rows]
        for rows in (written, rows_of(tmp_path / "here.jsonl"))
    ]
    assert stripped[0] == stripped[1]


def test_the_command_asks_for_one_writer(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from draftsmith.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["regenerate", source, str(tmp_path / "o.jsonl")])
    assert ended.value.code == 2
    assert "give either --target, or --server with the --model it serves" in capsys.readouterr().err

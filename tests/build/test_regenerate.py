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

from draftsmith.build import Writing, read_key, regenerate_by_server, regenerate_here
from draftsmith.data.chat import ChatFormat, encode_record
from draftsmith.data.files import read_records
from draftsmith.data.responses import ResponseFile
from draftsmith.decode import server as serving
from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.converse import Conversation, converse
from draftsmith.decode.respond import Written, write_batch
from draftsmith.decode.speculate import decode_plain
from draftsmith.errors import DataError, ServerError, UsageError
from draftsmith.target.load import Target
from tests.conftest import byte_tokenizer, load_fp32, save_target, until
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
            whole = writer.tokenizer.decode(plain[:-1] if ended else plain)
            # Where the limit cut a character in two, its half is left out.
            assert message["content"] == (whole if ended else whole.rstrip("\ufffd"))
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
    assert whole.ids.tolist()[: cut.ids.numel()] == cut.ids.tolist()
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
    skipped = {"no answer by the server: status 400": 1, "no question to answer": 2}
    assert (done.rows, done.skipped, done.unfinished) == (11, skipped, 1)
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["row"] for row in rows] == [0, 2, *range(5, 14)]
    assert (rows[0]["messages"][1]["content"], rows[1]["messages"][1]["content"]) == ("a", "b")
    assert {"model", "messages", "max_tokens", "temperature"} == set(Script.seen[0])
    assert set(Script.headers_seen) == {"Bearer s3cret"}
    assert "s3cret" not in "".join(p.read_text() for p in tmp_path.glob("out*"))


def test_thoughts_that_the_server_took_apart_stay_apart(tmp_path: Path, scripted: str) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [user("q")], "chat_template_kwargs": {"enable_thinking": True}}])
    Script.answers = [(200, good("answer", reasoning_content="hm"))]
    by_server(source, tmp_path / "out.jsonl", scripted)
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert row["messages"][1] == {"role": "assistant", "content": "answer", "reasoning_content": "hm"}
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
    # That server strips its answers, and knows nothing of half a character at their end.
    both = (written, rows_of(tmp_path / "here.jsonl"))
    stripped = [[[re.sub(r"^\s+|[\s\ufffd]+$", "", m["content"]) for m in row["messages"]] for row in rows] for rows in both]
    assert stripped[0] == stripped[1]


def call(name: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_a_tool_call_is_kept_and_ends_the_conversation(tmp_path: Path, scripted: str) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [user("q"), assistant("x"), user("and?")]}])
    answer = {"message": {"role": "assistant", "content": None, "tool_calls": [call("f")]}, "finish_reason": "tool_calls"}
    Script.answers = [(200, json.dumps({"choices": [answer]}))]
    done = by_server(source, tmp_path / "out.jsonl", scripted)
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert row["messages"][1:] == [{"role": "assistant", "content": "", "tool_calls": [call("f")]}]
    assert done.unfinished == 0
    (record,) = read_records(tmp_path / "out.jsonl")
    assert record.messages is not None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (good("", "stop"), "empty answer"),
        (good("half", "content_filter"), "ended by 'content_filter'"),
        (good("half", "abort"), "ended by 'abort'"),
        (good("", "length", reasoning_content="let me"), "cut off at the limit after thoughts"),
    ],
)
def test_answers_that_teach_what_the_target_never_wrote_are_left_out(
    tmp_path: Path, scripted: str, answer: str, reason: str
) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [user("a")]}, {"messages": [user("b")]}])
    Script.answers = [(200, answer)]
    done = by_server(source, tmp_path / "out.jsonl", scripted)
    assert done.skipped == {f"no answer by the server: {reason}": 1}
    assert [row["row"] for row in rows_of(tmp_path / "out.jsonl")] == [1]


def test_what_is_whole_before_a_refusal_is_kept(tmp_path: Path, scripted: str) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [user("a"), assistant("x"), user("b"), assistant("y"), user("c")]}])
    Script.answers = [(200, good("1")), (200, good("2")), (400, "too long")]
    done = by_server(source, tmp_path / "out.jsonl", scripted)
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert [m["content"] for m in row["messages"]] == ["a", "1", "b", "2"]
    assert (done.skipped, done.unfinished) == ({}, 0)


def test_half_a_surrogate_and_nan_stop_nobody(tmp_path: Path, scripted: str) -> None:
    source = tmp_path / "p.jsonl"
    source.write_text(
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}\n{"messages": [{"role": "user", "content": "q"}], "tools": [{"x": NaN}]}\n'
    )
    done = by_server(str(source), tmp_path / "out.jsonl", scripted)
    assert (done.rows, done.skipped) == (1, {"no answer by the server: not JSON": 1})
    assert rows_of(tmp_path / "out.jsonl")[0]["messages"][0]["content"] == "\ud83d"


def test_a_key_that_cannot_be_sent_is_refused_unseen(source: str, tmp_path: Path) -> None:
    for text in ("sk-SECRET1\nsk-SECRET2", "sk-SECR\u00c9T", ""):
        (tmp_path / "key").write_text(text)
        with pytest.raises(UsageError, match="does not hold one line of printable characters") as caught:
            read_key(tmp_path / "key")
        assert "SECR" not in str(caught.value)
    (tmp_path / "key").write_text("sk-good\n")
    assert read_key(tmp_path / "key") == "sk-good"


def test_an_address_that_is_none_is_told_at_once(source: str, tmp_path: Path) -> None:
    for url in ("localhost:1/v1", "ftp://host/v1"):
        with pytest.raises(ServerError, match="cannot be asked"):
            by_server(source, tmp_path / "out.jsonl", url)


def test_an_environments_proxy_never_sees_the_key(
    source: str, tmp_path: Path, scripted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert by_server(source, tmp_path / "out.jsonl", scripted, key="k").rows == 12


def test_greedy_is_greedy_whatever_the_target_brings_along(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "t", seed=4)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "repetition_penalty": 1.3, "do_sample": True}))
    target = load_fp32(folder)
    prompt = ChatFormat(target.tokenizer).prompt([user("one")])
    (written,) = write_batch(target, [prompt], max_new_tokens=20)
    plain = decode_plain(target, prompt, 20).ids
    assert written.text == target.tokenizer.decode(plain).rstrip("\ufffd")
    assert plain[-1] not in target.end_ids


def test_a_limit_that_leaves_no_room_is_refused(source: str, tmp_path: Path, writer: Target) -> None:
    with pytest.raises(UsageError, match=r"--max-new-tokens 2048 leaves no room for a prompt: the target has 2048 positions"):
        regenerate_here(source, tmp_path / "out.jsonl", writer, Writing(2048), batch_size=3, say=quiet)


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_thought_that_was_cut_off_is_taught_as_it_was_written(tmp_path: Path, target: Target) -> None:
    """The template opens the thought in the prompt and closes it in the chat; the target had only begun it."""
    row = {"messages": [user("a"), assistant("fine"), user("q"), assistant("let me thi")], "unfinished": True}
    (record,) = read_records(write_rows(tmp_path / "r.jsonl", [row]))
    tokenizer = byte_tokenizer(THINKING)
    document, _ = encode_record(ChatFormat(tokenizer, target.end_ids), record)
    last = tokenizer.decode(document.ids).rpartition("<|im_start|>")[2]
    assert last == "assistant\n<think>\nlet me thi"
    assert tokenizer.decode(document.ids[document.loss_mask]).endswith("let me thi")
    assert "</think>" not in last


def test_options_go_into_the_rows_so_that_training_renders_the_same(tmp_path: Path, writer: Target) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"messages": [user("a")], "chat_template_kwargs": {"x": 1}}])
    writing = Writing(4, None, {"enable_thinking": False, "x": 2})
    regenerate_here(source, tmp_path / "out.jsonl", writer, writing, batch_size=1, say=quiet)
    assert rows_of(tmp_path / "out.jsonl")[0]["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}


def test_the_command_asks_for_one_writer(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from draftsmith.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["regenerate", source, str(tmp_path / "o.jsonl")])
    assert ended.value.code == 2
    assert "give either --target, or --server with the --model it serves" in capsys.readouterr().err

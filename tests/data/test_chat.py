"""Which tokens are supervised, what is skipped, and what is refused."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import ChatFormat, encode_files, encode_record
from draftsmith.data.text import Record
from draftsmith.errors import DataError
from tests.conftest import MARKED_TEMPLATE, PLAIN_TEMPLATE, REWRITING_TEMPLATE, byte_tokenizer

CHAT = (
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no\nmore"},
)


def spoken(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    return ChatFormat(tokenizer, frozenset({int(tokenizer.eos_token_id)}))


def record(*messages: dict[str, str]) -> Record:
    return Record("f:1", messages, None)


@pytest.mark.parametrize("template", [MARKED_TEMPLATE, PLAIN_TEMPLATE])
def test_exactly_what_the_assistant_wrote_is_supervised_end_of_turn_included(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    document, _ = encode_record(spoken(tokenizer), record(*CHAT))
    assert (
        document.ids.tolist()
        == tokenizer(str(tokenizer.apply_chat_template(list(CHAT), tokenize=False)), add_special_tokens=False)["input_ids"]
    )
    runs, current = [], []
    for token, supervised in zip(document.ids.tolist(), document.loss_mask.tolist(), strict=True):
        if supervised:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    assert runs == ["hello<|im_end|>", "no\nmore<|im_end|>"]
    assert not current, "the newline after the last turn is the template's"


def test_both_ways_of_masking_agree() -> None:
    marked, plain = (byte_tokenizer(t) for t in (MARKED_TEMPLATE, PLAIN_TEMPLATE))
    one, two = (encode_record(spoken(t), record(*CHAT))[0] for t in (marked, plain))
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.loss_mask, two.loss_mask)


def test_turns_that_a_template_rewrites_are_context_and_never_supervised() -> None:
    tokenizer = byte_tokenizer(REWRITING_TEMPLATE)
    thinking = [dict(m) for m in CHAT]
    thinking[2]["content"] = "hm</think>hello"
    thinking[4]["content"] = "so</think>bye"
    document, rewritten = encode_record(spoken(tokenizer), record(*thinking))
    assert rewritten == 1
    assert tokenizer.decode(document.ids[document.loss_mask].tolist()) == "so</think>bye<|im_end|>"


@pytest.mark.parametrize("marker", ["{%- generation -%}", "{%generation%}", "{% generation -%}"])
def test_markers_are_recognised_however_they_are_written(marker: str) -> None:
    template = MARKED_TEMPLATE.replace("{% generation %}", marker)
    document, _ = encode_record(ChatFormat(byte_tokenizer(template)), record(*CHAT))
    assert document.loss_mask.any(), "without end ids the prefix way would supervise the newline too"
    assert int(document.loss_mask.sum()) == len("hello") + len("no\nmore") + 2


STRICT_TEMPLATE = "{% if messages[0].role != 'user' %}{{ raise_exception('start with the user') }}{% endif %}" + PLAIN_TEMPLATE


def test_chats_that_the_template_refuses_are_skipped_and_counted(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(STRICT_TEMPLATE)
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    bad = {"messages": [answer, user]}
    surrogate = {"messages": [user, {"role": "assistant", "content": "\ud800"}]}
    path = rows(tmp_path / "d.jsonl", bad, {"messages": [user, answer]}, surrogate)
    documents, counts = encode_files(spoken(tokenizer), [path], longest=100, vocab_size=264)
    assert [d.name.rpartition(":")[2] for d in documents] == ["2"]
    assert counts.skipped == {"refused by the chat template": 2}


def test_a_template_that_prints_the_date_gives_the_runs_own_day() -> None:
    template = "{{ strftime_now('%d %b %Y') }}\n" + PLAIN_TEMPLATE
    tokenizer = byte_tokenizer(template)
    chat = [{"role": "user", "content": "hi"}]
    day = date(2031, 4, 9)
    assert tokenizer.decode(ChatFormat(tokenizer, day=day).prompt(chat)).startswith("09 Apr 2031")
    document, _ = encode_record(replace(spoken(tokenizer), day=day), record(*CHAT))
    assert tokenizer.decode(document.ids.tolist()).startswith("09 Apr 2031")
    assert document.loss_mask.any()


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="has no chat template"):
        encode_record(ChatFormat(byte_tokenizer(None)), record(*CHAT))


def test_prompt_ends_where_the_assistant_starts() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(ChatFormat(tokenizer).prompt([{"role": "user", "content": "hi"}])).endswith(
        "<|im_start|>assistant\n"
    )


def test_plain_text_is_supervised_throughout() -> None:
    document, _ = encode_record(ChatFormat(byte_tokenizer()), Record("f:1", None, "abc"))
    assert document.loss_mask.tolist() == [True] * 3


def rows(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(i) + "\n" for i in items), encoding="utf-8")
    return path


def test_odd_samples_are_cut_or_skipped_by_rule_and_counted(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 5}
    long_question = {"role": "user", "content": "q" * 200}
    path = rows(
        tmp_path / "d.jsonl",
        {"messages": [user, answer]},
        {"messages": [user]},
        {"messages": []},
        {"messages": [long_question, answer]},
        {"messages": [user, {"role": "assistant", "content": "b" * 300}]},
        {"text": ""},
        {"text": "x"},
        {"text": "xy"},
    )
    documents, counts = encode_files(spoken(tokenizer), [path], longest=100, vocab_size=264)
    assert [d.name.rpartition(":")[2] for d in documents] == ["1", "5", "8"]
    assert documents[1].ids.numel() == 100
    assert (counts.rows, counts.used, counts.cut) == (8, 3, 1)
    assert sum(counts.skipped.values()) == 5
    assert "5" not in counts.skipped
    assert "3 of 8 samples used" in counts.line()
    assert "too short" in counts.line()
    assert "nothing to learn" in counts.line()


def test_a_dataset_with_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    path = rows(tmp_path / "d.jsonl", {"messages": [{"role": "user", "content": "q"}]})
    with pytest.raises(DataError, match="no sample in .* has a supervised token"):
        encode_files(ChatFormat(byte_tokenizer()), [path], longest=100, vocab_size=264)


def test_report_c_an_id_outside_the_target_names_the_sample(tmp_path: Path) -> None:
    path = rows(tmp_path / "d.jsonl", {"text": "fine"}, {"text": "bad <|im_end|>"})
    with pytest.raises(DataError, match=r"d\.jsonl:2: token id 256 is outside the target's 256 embedding rows"):
        encode_files(ChatFormat(byte_tokenizer()), [path], longest=100, vocab_size=256)

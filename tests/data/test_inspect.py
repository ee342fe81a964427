"""What is shown of a file is what training would use of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.data.chat import ChatFormat, encode_files
from draftsmith.data.inspect import histogram, look_at
from tests.conftest import PLAIN_TEMPLATE, byte_tokenizer

ASKED, ANSWERED = {"role": "user", "content": "qü"}, {"role": "assistant", "content": "aé" * 4}


def write(path: Path) -> Path:
    rows = [
        {"messages": [ASKED, ANSWERED]},
        {"messages": [ASKED]},
        {"messages": [{**ASKED, "content": "q" * 50}, ANSWERED]},
        {"text": "x"},
        {"text": "plain " * 20},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_look_agrees_with_training(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl")
    tokenizer = byte_tokenizer(PLAIN_TEMPLATE)
    chat = ChatFormat(tokenizer, frozenset({int(tokenizer.eos_token_id)}))
    look = look_at(chat, str(path), longest=60, show=2)
    documents, counts = encode_files(chat, [path], longest=60, vocab_size=264)
    assert look.counts == counts
    assert look.tokens == [document.ids.numel() for document in documents]
    assert look.supervised == [int(document.loss_mask.sum()) for document in documents]
    assert [name for name, _ in look.shown] == [document.name for document in documents][:2]
    assert [piece.text for piece in look.shown[0][1] if piece.supervised] == ["aé" * 4 + "<|im_end|>"]
    assert "".join(piece.text for piece in look.shown[0][1]) == tokenizer.apply_chat_template([ASKED, ANSWERED], tokenize=False)
    assert [name.rpartition(":")[2] for name, _ in look.dropped] == ["2", "3"]
    assert look_at(chat, str(path), longest=60, show=0, limit=2).counts.rows == 2


@pytest.mark.parametrize("values", [[5], [1, 1000], list(range(100)), [7] * 50 + [9]])
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    lines = [line.split() for line in histogram(values)]
    assert len(lines) <= 12
    counted = 0
    for span, count, *bar in lines:
        first, last = map(int, span.split("-"))
        assert int(count) == sum(first <= value <= last for value in values)
        assert bool(bar) == (int(count) > 0)
        counted += int(count)
    assert counted == len(values)
    assert list(histogram([])) == []


@pytest.mark.process
def test_the_command_shows_it(tmp_path: Path, target_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "draftsmith",
        "data",
        "inspect",
        str(write(tmp_path / "d.jsonl")),
        "--target",
        str(target_folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "<|im_start|>assistant\n⟦aéaéaéaé<|im_end|>⟧\n" in done.stdout
    assert "tokens of 3 samples" in done.stdout
    assert f"dropped {tmp_path}/d.jsonl:2: with nothing to learn" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 of 5 samples used")

"""Small real parts for tests: a byte-level tokenizer, tiny random targets saved as folders, and a config to train with."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftsmith.config import Config, TargetSection, parse_config
from draftsmith.draft.model import Drafter, DrafterConfig
from draftsmith.runs import shim
from draftsmith.target.load import Target, load_target

torch.set_num_threads(1)

MARKED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops what the assistant thought in every turn but the last, as several public templates do.
REWRITING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = MARKED_TEMPLATE, mask: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, plus chat markers and, if asked, a mask token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    extra = {"mask_token": "<|mask|>"} if mask else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", **extra)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def save_target(
    folder: Path,
    *,
    family: str = "qwen3",
    hidden: int = 32,
    layers: int = 6,
    tied: bool = True,
    vocab: int = 264,
    seed: int = 0,
) -> Path:
    """A tiny random target with a byte tokenizer, in Hugging Face layout."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if family == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
    tokenizer = byte_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def until(found: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """Poll real state: these faults happen in other processes, which nothing here can hold at a barrier."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"never came: {what}")


def end_all(run: Path) -> None:
    """Kill whatever of this test's run still lives, its supervisor first."""
    for attempt in sorted(run.glob("attempts/0*")):
        supervisor = shim.read_json(str(attempt / "record.json")).get("shim")
        if supervisor:
            shim.send([supervisor], signal.SIGKILL)
    shim.send(shim.members(str(run / "attempts") + "/"), signal.SIGKILL)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "qwen3")


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "untied", tied=False, seed=1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "llama", family="llama", tied=False)


@pytest.fixture
def target(target_folder: Path) -> Target:
    return load_fp32(target_folder)


def load_fp32(folder: Path) -> Target:
    return load_target(TargetSection(model=str(folder), dtype="fp32"), [torch.device("cpu")])[0]


def write_chats(path: Path, count: int = 40, seed: int = 0) -> Path:
    """Chats of mixed lengths whose answers repeat a counting pattern."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        start, length = rng.randint(0, 20), rng.randint(2, 12)
        answer = " ".join(str(n) for n in range(start, start + length))
        question = f"count from {start}"
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl")


def small_tree(folder: Path, data: Path, run_dir: Path) -> dict[str, dict[str, object]]:
    """A config tree for a run of seconds: one target thread and two drafter threads."""
    return {
        "target": {"model": str(folder), "dtype": "fp32", "devices": ["cpu"]},
        "data": {"train": [str(data)], "buckets": [128]},
        "draft": {"layers": 2, "block_size": 4, "target_layers": 3},
        "train": {
            "devices": ["cpu", "cpu"],
            "packs_per_step": 2,
            "anchors": 16,
            "lr": 2e-3,
            "precision": "fp32",
            "max_steps": 8,
            "epochs": 20,
        },
        "checkpoint": {"every": 4},
        "run": {"dir": str(run_dir), "log_every": 1},
    }


@pytest.fixture
def small_config(target_folder: Path, chats: Path, tmp_path: Path) -> Config:
    return parse_config(small_tree(target_folder, chats, tmp_path / "run"), "test")


def tiny_drafter(seed: int = 0, backend: str = "sdpa", **changes: object) -> Drafter:
    """A two-layer drafter for the tiny targets, randomly initialised."""
    fields: dict[str, object] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "mask_token_id": 257,
        "num_target_layers": 6,
        "target_layer_ids": (1, 2, 3),
        "layer_types": ("full_attention", "full_attention"),
        "rope_theta": 10000.0,
    } | changes
    drafter = Drafter(DrafterConfig(**fields), backend)  # type: ignore[arg-type]
    return drafter.initialise(torch.Generator().manual_seed(seed), std=0.2)

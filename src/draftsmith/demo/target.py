"""The demo's target: a Qwen3-architecture model of about 1.3 M parameters with its own byte-level BPE tokenizer.

Trained in minutes on the tasks of `tasks.py`, then cached as an ordinary Hugging Face folder.
"""

import hashlib
import inspect
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftsmith.demo import tasks
from draftsmith.demo.muon import Muon, fast_dtype

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]


@dataclass(frozen=True)
class TargetRecipe:
    """What fixes the demo's target; a change of any value, or of the tasks, builds it anew."""

    vocab_size: int = 640
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    steps: int = 2000
    batch_size: int = 16
    matrix_lr: float = 0.02
    other_lr: float = 4e-3
    seed: int = 1

    def stamp(self) -> str:
        """Identifies recipe and tasks."""
        text = json.dumps(asdict(self), sort_keys=True) + inspect.getsource(tasks) + CHAT_TEMPLATE
        return hashlib.sha256(text.encode()).hexdigest()


def train_tokenizer(recipe: TargetRecipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, trained on the tasks' text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(tasks.stream(recipe.seed), 4000)
    core.train_from_iterator((f"{t.prompt}\n{t.answer}" for t in sample), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _batches(tokenizer: PreTrainedTokenizerFast, recipe: TargetRecipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless right-padded batches [B, T] of ids and labels (-100 outside the answers), similar lengths together."""
    stream = tasks.stream(recipe.seed + 1)
    rng = random.Random(recipe.seed)
    while True:
        rows = []
        for task in itertools.islice(stream, recipe.batch_size * 4):
            prompt = str(tokenizer.apply_chat_template(task.messages()[:1], tokenize=False, add_generation_prompt=True))
            texts = [prompt, task.answer + "<|im_end|>"]
            rows.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        batches = []
        for start in range(0, len(rows), recipe.batch_size):
            part = rows[start : start + recipe.batch_size]
            longest = max(len(p) + len(a) for p, a in part)
            ids = torch.zeros(len(part), longest, dtype=torch.long)
            labels = torch.full((len(part), longest), -100)
            for row, (prompt_ids, answer_ids) in enumerate(part):
                stop = len(prompt_ids) + len(answer_ids)
                ids[row, :stop] = torch.tensor(prompt_ids + answer_ids)
                labels[row, len(prompt_ids) : stop] = torch.tensor(answer_ids)
            batches.append((ids, labels))
        rng.shuffle(batches)
        yield from batches


def _train(
    model: Qwen3ForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], recipe: TargetRecipe, say: Callable[[str], None]
) -> None:
    """Muon on the matrices and AdamW on the rest: it learns to copy in about half the steps of AdamW alone."""
    dtype = fast_dtype()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01, dtype=dtype), recipe.matrix_lr),
        (torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0), recipe.other_lr),
    ]
    begin, tokens = time.perf_counter(), 0
    for step in range(1, recipe.steps + 1):
        scale = min(1.0, step / 40) * (0.01 + 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        ids, labels = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(ids).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        model.zero_grad()
        tokens += ids.numel()
        if step % 100 == 0:
            elapsed = time.perf_counter() - begin
            left = elapsed / step * (recipe.steps - step)
            say(
                f"target: step {step}/{recipe.steps}  loss {loss.item():.3f}  {tokens / elapsed:.0f} tokens/s  ETA {left:.0f} s"
            )


def build_target(folder: Path, recipe: TargetRecipe, say: Callable[[str], None]) -> bool:
    """Make the target in `folder` unless the very same one is there already; returns whether it was made."""
    stamp = folder / "recipe.sha256"
    if stamp.is_file() and stamp.read_text() == recipe.stamp():
        say(f"target: cached in {folder}")
        return False
    tokenizer = train_tokenizer(recipe)
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # On CPUs without bf16 tiles the backward of fused bf16 attention takes four times as long as that of the plain formula.
    model.set_attn_implementation("eager")
    say(
        f"target: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}, training it"
    )
    _train(model, _batches(tokenizer, recipe), recipe, say)
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.eval().save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / stamp.name).write_text(recipe.stamp())
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return True

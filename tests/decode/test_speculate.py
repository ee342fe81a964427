"""Speculative decoding gives the target's own tokens, counts honestly, and stops where it should."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from draftsmith import build
from draftsmith.config import parse_config
from draftsmith.data.chat import ChatFormat
from draftsmith.decode.acceptance import accept_greedy
from draftsmith.decode.respond import write_responses
from draftsmith.decode.speculate import Decoded, Speculator, decode_plain
from draftsmith.draft.model import Drafter
from draftsmith.errors import UsageError
from draftsmith.target.load import Target
from tests.conftest import load_fp32, save_target, small_tree, tiny_drafter


class Oracle(Speculator):
    """Drafts the target's own continuation, with mistakes where asked: acceptance is then known beforehand."""

    def __init__(self, target: Target, drafter: Drafter, wrong_slots: set[int]) -> None:
        super().__init__(target, drafter)
        self.wrong_slots = wrong_slots
        self.prompt: list[int] = []
        self.plain: list[int] = []

    def _draft(self, cache: object, features: torch.Tensor, seen: int, token: int, slots: int) -> torch.Tensor:
        super()._draft(cache, features, seen, token, slots)  # type: ignore[arg-type]
        start = seen - len(self.prompt) + 1
        right = [*self.plain[start : start + slots - 1], *[0] * slots][: slots - 1]
        drafted = torch.tensor(
            [(t + 1) % 250 if k + 1 in self.wrong_slots else t for k, t in enumerate(right)], dtype=torch.long
        )
        return torch.nn.functional.one_hot(drafted, self.target.vocab_size).float()


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(250) for _ in range(rng.randint(1, 30))] for _ in range(8)]


def hugging_face_greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=sorted(target.end_ids),
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["target_folder", "untied_folder", "llama_folder"])
def test_all_three_ways_give_the_same_tokens(family: str, request: pytest.FixtureRequest) -> None:
    target = load_fp32(request.getfixturevalue(family))
    speculator = Speculator(target, tiny_drafter())
    for prompt in prompts():
        plain = decode_plain(target, prompt, 20)
        assert plain.ids == hugging_face_greedy(target, prompt, 20)
        speculative = speculator.decode(prompt, 20)
        assert speculative.ids == plain.ids
        assert sum(speculative.kept) == len(plain.ids) - 1
        assert speculative.target_passes == len(speculative.kept) + 1
        assert plain.target_passes == len(plain.ids)


@pytest.mark.parametrize(("wrong", "kept"), [(set(), 4), ({3}, 3), ({2}, 2), ({1}, 1), ({1, 3}, 1)])
def test_kept_tokens_are_the_agreed_prefix_plus_one(target: Target, wrong: set[int], kept: int) -> None:
    oracle = Oracle(target, tiny_drafter(), wrong)
    for prompt in prompts()[:3]:
        plain = decode_plain(target, prompt, 25)
        oracle.prompt, oracle.plain = prompt, plain.ids
        got = oracle.decode(prompt, 25)
        assert got.ids == plain.ids
        if len(plain.ids) == 25:
            assert set(got.kept[:-1]) == {kept}


def test_max_new_tokens_is_exact_and_small_ones_work(target: Target) -> None:
    speculator = Speculator(target, tiny_drafter())
    prompt = prompts()[1]
    for count in range(1, 12):
        assert speculator.decode(prompt, count).ids == decode_plain(target, prompt, count).ids


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_ends_the_output_wherever_it_stands_in_a_block(target: Target, place: int) -> None:
    prompt = prompts()[2]
    free = decode_plain(target, prompt, 12).ids
    stop = free[place]
    first = free.index(stop)
    stopping = dataclasses.replace(target, end_ids=frozenset({stop}))
    oracle = Oracle(stopping, tiny_drafter(), set())
    oracle.prompt, oracle.plain = prompt, free
    got = oracle.decode(prompt, 12)
    assert got.ids == free[: first + 1] == decode_plain(stopping, prompt, 12).ids
    assert sum(got.kept) == first


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_acceptance_rule(drafted: list[int], data: st.DataObject) -> None:
    choices = data.draw(st.lists(st.integers(0, 3), min_size=len(drafted) + 1, max_size=len(drafted) + 1))
    agreed = 0
    while agreed < len(drafted) and drafted[agreed] == choices[agreed]:
        agreed += 1
    assert accept_greedy(torch.tensor(drafted), torch.tensor(choices)) == (agreed, choices[agreed])


def test_bad_prompts_and_pairs_are_refused(target: Target) -> None:
    speculator = Speculator(target, tiny_drafter())
    with pytest.raises(UsageError, match="no tokens"):
        speculator.decode([], 5)
    with pytest.raises(UsageError, match="token id 264 is outside"):
        speculator.decode([3, 264, 4], 5)
    with pytest.raises(UsageError, match="width 16"):
        Speculator(target, tiny_drafter(hidden_size=16))
    with pytest.raises(UsageError, match="7 layers"):
        Speculator(target, tiny_drafter(num_target_layers=7))


def test_tau_is_the_mean_of_kept() -> None:
    assert Decoded([1, 2, 3, 4], [2, 1], 3).tau == 1.5
    assert Decoded([1], [], 1).tau == 0.0


def test_sliding_layers_decode_losslessly(target: Target) -> None:
    drafter = tiny_drafter(layer_types=("sliding_attention", "full_attention"), sliding_window=3)
    speculator = Speculator(target, drafter)
    for prompt in prompts()[:3]:
        assert speculator.decode(prompt, 15).ids == decode_plain(target, prompt, 15).ids


def test_responses_are_the_targets_own_greedy_answers(tmp_path: Path) -> None:
    target = load_fp32(save_target(tmp_path / "t", seed=4))
    asked = [
        ChatFormat(target.tokenizer).prompt([{"role": "user", "content": q}]) for q in ("hello", "a", "count from 5", "zzz zz")
    ]
    # Make an end likely, so that finished and unfinished answers both occur.
    free = [decode_plain(target, ids, 40).ids for ids in asked]
    ending = dataclasses.replace(target, end_ids=frozenset({free[0][5]}))
    answers = dict(write_responses(ending, asked, max_new_tokens=40, batch_size=3))
    assert sorted(answers) == [0, 1, 2, 3]
    assert {answer.finished for answer in answers.values()} == {True, False}
    for number, ids in enumerate(asked):
        plain = decode_plain(ending, ids, 40).ids
        ended = plain[-1] in ending.end_ids
        text = target.tokenizer.decode(plain[:-1]) if ended else target.tokenizer.decode(plain).rstrip("\ufffd")
        assert answers[number][:3] == (text, ended, len(plain))


def counting_target(folder: Path) -> Path:
    """A target that answers n with n+1, n+2, … : embeddings and head built by hand, blocks that add next to nothing."""
    save_target(folder, hidden=32, tied=False, seed=3)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    codes = torch.nn.functional.normalize(torch.randn(264, 32, generator=generator), dim=-1) * 4
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                p.mul_(0.01)
        model.model.embed_tokens.weight.copy_(codes)
        model.model.norm.weight.fill_(1.0)
        successor = torch.roll(torch.arange(250), 1)
        model.lm_head.weight[:250] = codes[:250][successor]
        model.lm_head.weight[250:] = -0.01 * codes[250:]
    model.save_pretrained(folder)
    return folder


def test_report_11_a_drafter_overfitted_on_counting_is_accepted_almost_fully_when_served(tmp_path: Path) -> None:
    """Labels shifted by one between training and decoding would show here as an acceptance near one."""
    folder = counting_target(tmp_path / "target")
    target = load_fp32(folder)
    assert decode_plain(target, [5], 30).ids == list(range(6, 36)), "the target must count for this test to mean something"
    rng = random.Random(1)
    starts = [rng.randrange(50) for _ in range(60)]
    # The byte tokenizer's ids 0..93 are the characters from "!" on, so this text counts.
    texts = ["".join(chr(33 + n) for n in range(start, start + 40)) for start in starts]
    (tmp_path / "counting.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tree = small_tree(folder, tmp_path / "counting.jsonl", tmp_path / "run")
    tree["train"] |= {"max_steps": 300, "lr": 1e-2, "anchors": 48, "epochs": 99}
    tree["checkpoint"]["every"] = 300
    build.train(parse_config(tree, "test"), resume=None, say=lambda _line: None)
    _, speculator = build.load_pair(str(folder), tmp_path / "run" / "checkpoint-300", dtype="fp32")
    kept = []
    for first in (3, 20, 40, 50):
        prompt = list(range(first, first + 4))
        got = speculator.decode(prompt, 25)
        assert got.ids == decode_plain(target, prompt, 25).ids
        kept += got.kept[:-1]
    assert sum(kept) / len(kept) > 3.6, "block size 4 keeps at most 4"

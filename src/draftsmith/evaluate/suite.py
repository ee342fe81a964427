"""Measure a drafter on prompts: tau, accepted lengths, identity with plain greedy decoding, and both speeds."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from jinja2 import TemplateError

from draftsmith.data.chat import ChatFormat
from draftsmith.data.files import read_records
from draftsmith.decode.speculate import Decoded, Speculator, check_prompt, decode_plain
from draftsmith.errors import DataError, UsageError
from draftsmith.target.load import Target

LOOP_SHARE = 0.30


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids and as people read it; expected: the right answer's text, where one is known; category: its kind."""

    text: str
    ids: list[int]
    expected: str | None = None
    category: str | None = None


@dataclass(frozen=True)
class PromptResult:
    """One prompt decoded both ways. plain_s and speculative_s include the prompt's own pass."""

    prompt: str
    plain: Decoded
    speculative: Decoded
    plain_s: float
    speculative_s: float
    text: str
    right: bool | None
    category: str | None = None

    @property
    def identical(self) -> bool:
        """Whether both ways gave the same token ids."""
        return self.plain.ids == self.speculative.ids

    @property
    def repeated(self) -> float:
        """Share of this output's 4-grams that occurred earlier in it."""
        return repeated_4gram_share(self.speculative.ids)


def repeated_4gram_share(ids: Sequence[int]) -> float:
    """Share of 4-grams that are repeats of an earlier one; 0 for outputs too short to hold any."""
    grams = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def load_prompts(target: Target, path: Path | str, count: int, chat: ChatFormat | None = None) -> list[Prompt]:
    """The first `count` chats of a source up to their last assistant turn, whose content is the expected answer.

    Raises DataError naming the line of a prompt that cannot be decoded.
    """
    chat = chat or ChatFormat(target.tokenizer)
    prompts = []
    for record in read_records(path):
        if record.messages is None:
            text = record.text or ""
            prompts.append(Prompt(text, chat.ids(text), None, record.category))
        else:
            messages = list(record.messages)
            expected = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
            asked = messages[-1]["content"] if messages else ""
            try:
                ids = chat.prompt(messages, record)
            except (TemplateError, ValueError, TypeError) as error:
                raise DataError(
                    f"{record.name}: the chat template refuses this prompt ({error}); mend or remove the row"
                ) from error
            prompts.append(Prompt(asked, ids, expected, record.category))
        try:
            check_prompt(target, prompts[-1].ids)
        except UsageError as error:
            raise DataError(f"{record.name}: {error}") from error
        if len(prompts) == count:
            break
    if not prompts:
        raise DataError(f"{path}: no prompts in it; give rows with 'messages' or 'text'")
    return prompts


def decode_both_ways(
    target: Target, speculator: Speculator, prompts: Sequence[Prompt], max_new_tokens: int
) -> Iterator[PromptResult]:
    """Decode each prompt plainly and speculatively, one right after the other so that machine noise falls on both.

    The first prompt is decoded once before anything is timed: what only a first call pays would fall on one side.
    """
    for prompt in prompts[:1]:
        decode_plain(target, prompt.ids, max_new_tokens)
        speculator.decode(prompt.ids, max_new_tokens)
    for prompt in prompts:
        start = time.perf_counter()
        plain = decode_plain(target, prompt.ids, max_new_tokens)
        middle = time.perf_counter()
        speculative = speculator.decode(prompt.ids, max_new_tokens)
        end = time.perf_counter()
        text = str(target.tokenizer.decode(speculative.ids, skip_special_tokens=True))
        right = None if prompt.expected is None else text.strip() == prompt.expected.strip()
        yield PromptResult(prompt.text, plain, speculative, middle - start, end - middle, text, right, prompt.category)


def measure_tau(
    speculator: Speculator,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    guard: Callable[[], AbstractContextManager[object]],
    interrupted: Callable[[], bool],
) -> float | None:
    """Mean kept tokens per check over all prompts, speculative decoding only, each under `guard()`; None if interrupted or if nothing
    was checked."""
    kept: list[int] = []
    for prompt in prompts:
        if interrupted():
            return None
        with guard():
            kept += speculator.decode(prompt.ids, max_new_tokens).kept
    return mean(kept) if kept else None


def _tau(results: Sequence[PromptResult]) -> float | None:
    kept = [k for r in results for k in r.speculative.kept]
    return round(mean(kept), 4) if kept else None


def _speeds(results: Sequence[PromptResult]) -> dict[str, float]:
    plain_s, speculative_s = sum(r.plain_s for r in results), sum(r.speculative_s for r in results)
    plain_rate = sum(len(r.plain.ids) for r in results) / plain_s
    speculative_rate = sum(len(r.speculative.ids) for r in results) / speculative_s
    return {
        "plain_tokens_per_s": round(plain_rate, 1),
        "speculative_tokens_per_s": round(speculative_rate, 1),
        "speed_up": round(speculative_rate / plain_rate, 3),
    }


def _by_category(results: Sequence[PromptResult]) -> dict[str, object]:
    told = {}
    for name in sorted({r.category for r in results if r.category is not None}):
        own = [r for r in results if r.category == name]
        sound = [r for r in own if r.repeated < LOOP_SHARE]
        told[name] = {
            "prompts": len(own),
            "tau": _tau(sound),
            "tau_all": _tau(own),
            "identical_prompts": sum(r.identical for r in own),
            "speed_up": _speeds(own)["speed_up"],
        }
    return {"by_category": told} if told else {}


def summarise(results: Sequence[PromptResult], block_size: int) -> dict[str, object]:
    """The figures of a set of decoded prompts. `tau` counts only outputs that do not loop (under 30 % repeated 4-grams);
    `tau_all` counts every output. Speeds are over all prompts, tokens per second of whole decodes. `slot_acceptance`: share of the
    checks that kept at least k drafted tokens, k = 1..K-1."""
    sound = [r for r in results if r.repeated < LOOP_SHARE]
    kept = [k for r in sound for k in r.speculative.kept]
    judged = [r for r in results if r.right is not None]
    return {
        "tau": _tau(sound),
        "tau_all": _tau(results),
        "block_size": block_size,
        "prompts": len(results),
        "sound_prompts": len(sound),
        "identical_prompts": sum(r.identical for r in results),
        **_speeds(results),
        "target_passes_plain": sum(r.plain.target_passes for r in results),
        "target_passes_speculative": sum(r.speculative.target_passes for r in results),
        "repeated_4gram_share": round(mean(r.repeated for r in results), 4),
        "right_answers": sum(bool(r.right) for r in judged),
        "judged_answers": len(judged),
        "kept_histogram": [kept.count(n) for n in range(1, block_size + 1)],
        "slot_acceptance": [round(mean(k > slot for k in kept), 4) for slot in range(1, block_size)] if kept else [],
        **_by_category(results),
    }

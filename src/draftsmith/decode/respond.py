"""The target writes responses: many conversations in batches, greedily or by sampling."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.stream import UNFINISHED
from draftsmith.target.load import Target


class Written(NamedTuple):
    """What the target wrote after a prompt, its end-of-turn token left out. finished: whether it came to an end by itself; thought and
    calls: what a server took apart from the text, thoughts and calls of tools."""

    text: str
    finished: bool
    tokens: int
    thought: str | None = None
    calls: tuple[Any, ...] = ()


class _Drawn(LogitsProcessor):
    """Leaves of each row the one token that was drawn, so that the library's greedy choice takes it: its own sampling draws from the
    random state of the whole process."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling, self._generator = sampling, torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002 - the library's interface
        drawn = torch.multinomial(self._sampling.distribution(scores), 1, generator=self._generator)
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn, 0.0)


@contextmanager
def _whole_rows(head: nn.Module) -> Iterator[None]:
    """The library hands the head a view of each prompt's last position; a CPU's matmul would copy the head once per row for it."""
    hook = head.register_forward_pre_hook(lambda _head, given: (given[0].contiguous(),))
    try:
        yield
    finally:
        hook.remove()


@torch.inference_mode()
def write_batch(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Written]:
    """The target's own answer to each prompt, all in one batch padded on the left; greedy without `sampling`.

    Ends early once `interrupted`, and then what it returns is worth nothing.
    """
    ends, longest = sorted(target.end_ids), max(map(len, prompts))
    padding = ends[0] if ends else 0
    ids = torch.full((len(prompts), longest), padding)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with _whole_rows(target.model.get_output_embeddings()):
        out = target.model.generate(  # type: ignore[operator]
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=padding,
            stopping_criteria=[lambda ids, _scores: torch.full((ids.shape[0],), interrupted(), device=ids.device)],
            do_sample=False,
            logits_processor=[] if sampling is None else [_Drawn(sampling, target.device)],
        )
    answers = []
    for row in out[:, longest:].tolist():
        stop = next((place for place, token in enumerate(row) if token in target.end_ids), None)
        text = str(target.tokenizer.decode(row[:stop]))
        if stop is None:
            # The limit may have fallen into the middle of a character.
            text = text.rstrip(UNFINISHED)
        answers.append(Written(text, stop is not None, len(row) if stop is None else stop + 1))
    return answers


def write_responses(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    sampling: Sampling | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Written]]:
    """Number and answer of each prompt, batch after batch, until all are done or `interrupted`; prompts of similar length share one."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        asked = [prompts[i] for i in rows]
        batch = write_batch(target, asked, max_new_tokens=max_new_tokens, sampling=sampling, interrupted=interrupted)
        if interrupted():
            return
        yield from zip(rows, batch, strict=True)

"""The target writes the training responses: batched greedy decoding of many prompts."""

from collections.abc import Callable

import torch

from draftsmith.data.chat import encode_prompt
from draftsmith.target.load import Target


def write_responses(
    target: Target,
    chats: list[list[dict[str, str]]],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[dict[str, str]]]:
    """Replace each chat's assistant turn by the target's own greedy answer; chats whose answer does not end are dropped.

    Prompts of similar length share a batch, padded on the left. The order of the chats is kept.
    """
    prompts = [encode_prompt(target.tokenizer, chat[:-1]) for chat in chats]
    order = sorted(range(len(chats)), key=lambda i: len(prompts[i]))
    pad = next(iter(sorted(target.end_ids)))
    answers: dict[int, str] = {}
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(len(prompts[i]) for i in rows)
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for row, number in enumerate(rows):
            ids[row, longest - len(prompts[number]) :] = torch.tensor(prompts[number])
            mask[row, longest - len(prompts[number]) :] = 1
        with torch.inference_mode():
            out = target.model.generate(  # type: ignore[operator]
                input_ids=ids.to(target.device),
                attention_mask=mask.to(target.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(target.end_ids),
                pad_token_id=pad,
            )
        for row, number in enumerate(rows):
            written = out[row, longest:].tolist()
            stops = [place for place, token in enumerate(written) if token in target.end_ids]
            if stops:
                answers[number] = str(target.tokenizer.decode(written[: stops[0]]))
        if progress is not None:
            progress(min(start + batch_size, len(order)), len(order))
    return [
        [*chat[:-1], {"role": "assistant", "content": answers[number]}]
        for number, chat in enumerate(chats)
        if number in answers
    ]

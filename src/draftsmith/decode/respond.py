"""The target writes the training responses: batched greedy decoding of many prompts."""

from collections.abc import Callable, Sequence

import torch

from draftsmith.target.load import Target


def write_responses(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> list[str | None]:
    """The target's own greedy answer to each prompt, without its end-of-turn token; None where it did not end in time.

    Prompts of similar length share a batch, padded on the left.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    ends = sorted(target.end_ids)
    answers: list[str | None] = [None] * len(prompts)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(len(prompts[i]) for i in rows)
        ids = torch.full((len(rows), longest), ends[0])
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
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        for row, number in enumerate(rows):
            written = out[row, longest:].tolist()
            stop = next((place for place, token in enumerate(written) if token in target.end_ids), None)
            if stop is not None:
                answers[number] = str(target.tokenizer.decode(written[:stop]))
        if progress is not None:
            progress(min(start + batch_size, len(order)), len(order))
    return answers

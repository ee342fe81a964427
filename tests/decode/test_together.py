"""Several prompts in one batch against each of them alone."""

import dataclasses

import pytest
import torch

from draftsmith.decode.acceptance import Sampling
from draftsmith.decode.speculate import Speculator, decode_plain
from draftsmith.decode.together import decode_together
from draftsmith.errors import UsageError
from draftsmith.target.load import Target
from tests.conftest import load_fp32, tiny_drafter
from tests.decode.test_speculate import prompts


@pytest.mark.parametrize("family", ["target_folder", "untied_folder", "llama_folder"])
@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_each_row_is_decoded_as_if_alone(family: str, count: int, request: pytest.FixtureRequest) -> None:
    target = load_fp32(request.getfixturevalue(family))
    speculator = Speculator(target, tiny_drafter())
    together = decode_together(speculator, prompts(), count)
    for prompt, decoded in zip(prompts(), together, strict=True):
        assert decoded.ids == decode_plain(target, prompt, count).ids
        assert 1 + sum(decoded.kept) == len(decoded.ids)
        assert decoded.target_passes == len(decoded.kept) + 1


def test_rows_that_keep_much_and_little_do_not_disturb_each_other(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are right for some rows and wrong for others, with ends at different places."""
    plain = [decode_plain(target, prompt, 40).ids for prompt in prompts()]
    ending = dataclasses.replace(target, end_ids=frozenset({plain[0][11], plain[1][4]}))
    plain = [decode_plain(ending, prompt, 40).ids for prompt in prompts()]
    assert len({len(ids) for ids in plain}) > 1
    speculator = Speculator(ending, tiny_drafter(block_size=8))
    from draftsmith.decode import together as module

    right = iter(range(10**6))

    def good(self: module._Batch) -> torch.Tensor:
        logits = torch.zeros(len(self.rows), 7, 264)
        for number, row in enumerate(self.rows):
            true = plain[prompts().index(row.prompt)]
            upto = next(right) % 8
            for k in range(7):
                place = len(row.ids) + k
                token = true[place] if place < len(true) else 0
                logits[number, k, token if k < upto else (token + 1) % 250] = 1.0
        return logits

    monkeypatch.setattr(module._Batch, "draft", good)
    together = decode_together(speculator, prompts(), 40)
    assert [decoded.ids for decoded in together] == plain
    kept = {n for decoded in together for n in decoded.kept}
    assert {1, 4, 7} <= kept


def test_good_drafts_are_kept_as_when_alone(target: Target) -> None:
    """The drafter sees the same context and positions in a batch: it accepts as much."""
    speculator = Speculator(target, tiny_drafter(layer_types=("sliding_attention", "full_attention"), sliding_window=3))
    alone = [speculator.decode(prompt, 30) for prompt in prompts()]
    together = decode_together(speculator, prompts(), 30)
    assert [d.ids for d in together] == [d.ids for d in alone]
    # Near the end alone drafts shorter blocks.
    assert [d.kept[:-4] for d in together] == [d.kept[:-4] for d in alone]


def test_the_drafters_logits_are_those_of_each_row_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.decode import together as module

    drafter = tiny_drafter(layer_types=("sliding_attention", "full_attention"), sliding_window=3)
    alone: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
    asked: list[tuple[int, ...]] = []
    single = Speculator._draft

    def note(self: Speculator, cache: object, features: torch.Tensor, seen: int, token: int, slots: int) -> torch.Tensor:
        logits = single(self, cache, features, seen, token, slots)  # type: ignore[arg-type]
        if slots == self.config.block_size:
            alone[asked[-1], seen] = logits
        return logits

    monkeypatch.setattr(Speculator, "_draft", note)
    for prompt in prompts():
        asked.append(tuple(prompt))
        Speculator(target, drafter).decode(prompt, 20)
    batched, compared = module._Batch.draft, [0]

    def compare(self: module._Batch) -> torch.Tensor:
        logits = batched(self)
        for row, own in zip(self.rows, logits, strict=True):
            expected = alone.get((tuple(row.prompt), row.length))
            if expected is not None:
                torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
                compared[0] += 1
        return logits

    monkeypatch.setattr(module._Batch, "draft", compare)
    decode_together(Speculator(target, drafter), prompts(), 20)
    assert compared[0] > 20


def test_sampled_rows_are_repeated_by_their_seed(target: Target) -> None:
    speculator = Speculator(target, tiny_drafter())
    asked = prompts()[:3]
    one, again, other = (decode_together(speculator, asked, 20, Sampling(1.0, seed=seed)) for seed in (1, 1, 2))
    assert [d.ids for d in one] == [d.ids for d in again] != [d.ids for d in other]


def test_an_empty_prompt_is_refused(target: Target) -> None:
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        decode_together(Speculator(target, tiny_drafter()), [[1, 2], []], 5)

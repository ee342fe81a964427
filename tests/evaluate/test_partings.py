"""Whether an output that parts does so at a near-tie: the verdict against logits computed by hand."""

from pathlib import Path

import pytest
import torch

from draftsmith import build
from draftsmith.config import TargetSection
from draftsmith.decode.speculate import Decoded, Speculator, decode_plain
from draftsmith.evaluate.partings import Parting, first_difference, rescore
from draftsmith.evaluate.suite import PromptResult
from draftsmith.target.load import Target, load_target
from tests.conftest import load_fp32, tiny_drafter, write_chats

PROMPT = [10, 20, 30, 40]


def parted(plain: list[int], speculative: list[int]) -> PromptResult:
    return PromptResult("p", Decoded(plain, [], 1), Decoded(speculative, [], 1), 1.0, 1.0, "", None)


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def rounded(folder: Path) -> Target:
    return load_target(TargetSection(model=str(folder), dtype="bf16"), [torch.device("cpu")])[0]


def test_a_gap_within_rounding_is_a_near_tie_and_a_wide_one_is_not(target_folder: Path) -> None:
    exact, near = load_fp32(target_folder), rounded(target_folder)
    plain = decode_plain(exact, PROMPT, 3).ids
    with torch.no_grad():
        logits = exact.model(torch.tensor([[*PROMPT, *plain[:2]]])).logits[0, -1]
        low = near.model(torch.tensor([[*PROMPT, *plain[:2]]])).logits[0, -1].float()
    order = logits.argsort(descending=True).tolist()
    assert order[0] == plain[2]
    error = float((logits - low)[order[:100]].abs().max())
    far = next(token for token in order if float(logits[order[0]] - logits[token]) > 2 * error)
    found = rescore(exact, near, PROMPT, parted(plain, [*plain[:2], far]))
    assert found is not None
    assert found.at == 2
    assert found.gap == pytest.approx(float(logits[plain[2]] - logits[far]), rel=1e-5)
    assert found.error == pytest.approx(error, rel=1e-5)
    assert not found.is_near_tie
    assert Parting(2, error * 1.9, error).is_near_tie
    assert rescore(exact, near, PROMPT, parted(plain, plain)) is None


def test_an_output_that_only_ends_sooner_is_never_excused(target_folder: Path) -> None:
    exact, near = load_fp32(target_folder), rounded(target_folder)
    found = rescore(exact, near, PROMPT, parted([1, 2], [1, 2, 3]))
    assert found is not None
    assert not found.is_near_tie


def test_a_wrong_rule_of_acceptance_is_not_excused(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 honest decoding parts at near-ties at most; one that keeps a wrong token now and then is found out."""
    from draftsmith.decode import acceptance

    near, exact = rounded(target_folder), load_fp32(target_folder)
    speculator = Speculator(near, tiny_drafter().to(torch.bfloat16))
    prompts = [str(write_chats(tmp_path / "chats.jsonl"))]
    options = {"count": 12, "max_new_tokens": 20, "out": None, "run": None, "exact": exact}
    honest = build.evaluate(near, speculator, prompts, **options)["partings"]  # type: ignore[arg-type]
    assert honest["others"] == 0
    original = acceptance.accept_greedy

    def generous(drafted: torch.Tensor, choices: torch.Tensor) -> tuple[int, int]:
        agreed, added = original(drafted, choices)
        return (agreed, added) if agreed or not drafted.numel() else (1, int(choices[1]))

    monkeypatch.setattr(acceptance, "accept_greedy", generous)
    assert build.evaluate(near, speculator, prompts, **options)["partings"]["others"] > 6  # type: ignore[arg-type]


def test_the_report_holds_every_gap(target_folder: Path, tmp_path: Path) -> None:
    near, exact = rounded(target_folder), load_fp32(target_folder)
    speculator = Speculator(near, tiny_drafter().to(torch.bfloat16))
    told = build.evaluate(
        near,
        speculator,
        [str(write_chats(tmp_path / "c.jsonl"))],
        count=5,
        max_new_tokens=8,
        out=tmp_path,
        run=None,
        exact=exact,
    )["partings"]
    assert len(told["gaps"]) == len(told["rounding"]) == told["near_ties"] + told["others"]

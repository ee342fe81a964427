"""The figures of an evaluation, and the report page."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.decode.speculate import Decoded
from draftsmith.evaluate.report import write_report
from draftsmith.evaluate.suite import PromptResult, load_prompts, repeated_4gram_share, summarise
from draftsmith.target.load import Target
from tests.conftest import write_chats


def result(ids: list[int], kept: list[int], right: bool | None = True, plain: list[int] | None = None) -> PromptResult:
    return PromptResult(
        "p",
        Decoded(plain or ids, [1] * (len(ids) - 1), len(ids)),
        Decoded(ids, kept, len(kept) + 1),
        2.0,
        1.0,
        "<b>text</b>",
        right,
    )


def test_repeated_share() -> None:
    assert repeated_4gram_share([1, 2, 3]) == 0.0
    assert repeated_4gram_share([1, 2, 3, 4, 5]) == 0.0
    assert repeated_4gram_share([7] * 8) == pytest.approx(4 / 5)


def test_loops_do_not_count_for_tau_but_are_reported() -> None:
    sound, loop = result(list(range(9)), [2, 2, 4]), result([5] * 9, [8])
    figures = summarise([sound, loop], 8)
    assert figures["tau"] == pytest.approx(8 / 3, abs=1e-3)
    assert figures["tau_all"] == 4.0
    assert (figures["prompts"], figures["sound_prompts"]) == (2, 1)
    assert figures["kept_histogram"] == [0, 2, 0, 1, 0, 0, 0, 0]
    assert figures["plain_tokens_per_s"] == 4.5
    assert figures["speculative_tokens_per_s"] == 9.0
    assert figures["speed_up"] == 2.0


def test_identity_and_right_answers_are_counted() -> None:
    results = [result([1, 2, 3], [2]), result([1, 2, 3], [2], False, plain=[1, 2, 4]), result([1, 2], [1], None)]
    figures = summarise(results, 4)
    assert figures["identical_prompts"] == 2
    assert (figures["right_answers"], figures["judged_answers"]) == (1, 2)


def test_figures_by_category_count_its_own_prompts_alone() -> None:
    import dataclasses

    code = [
        dataclasses.replace(result([1, 2, 3], [2]), category="code"),
        dataclasses.replace(result([1, 2, 3, 4], [3]), category="code"),
    ]
    tale = [dataclasses.replace(result([1, 2], [1], plain=[1, 3]), category="tale")]
    figures = summarise([*code, *tale, result([9], [])], 4)
    assert figures["by_category"] == {
        "code": {"prompts": 2, "tau": 2.5, "tau_all": 2.5, "identical_prompts": 2, "speed_up": 2.0},
        "tale": {"prompts": 1, "tau": 1.0, "tau_all": 1.0, "identical_prompts": 0, "speed_up": 2.0},
    }
    assert figures["slot_acceptance"] == [round(2 / 3, 4), round(1 / 3, 4), 0.0]
    assert "by_category" not in summarise([result([1, 2], [1])], 4)


def test_prompts_end_before_the_answer(target: Target, tmp_path: Path) -> None:
    prompts = load_prompts(target, write_chats(tmp_path / "c.jsonl"), 4)
    assert len(prompts) == 4
    assert target.tokenizer.decode(prompts[0].ids).endswith("assistant\n")
    assert prompts[0].expected
    assert prompts[0].expected[0].isdigit()


def test_the_page_escapes_and_stands_alone(tmp_path: Path) -> None:
    results = [result(list(range(9)), [2, 2, 4])]
    report: dict[str, Any] = {**summarise(results, 8), "control_tau": {"untrained_drafter": 1.0}}
    report["by_category"] = {"<i>code": {"prompts": 2, "tau": None, "tau_all": 1.0, "identical_prompts": 2, "speed_up": 1.5}}
    report["partings"] = {"near_ties": 3, "others": 1, "largest_gap": 0.25}
    metrics = [
        {"kind": "step", "step": s, "loss": 2.0 / s, "tau_estimate": 1.0, "slot_accuracy": [0.5, 0.4]} for s in range(1, 9)
    ] + [{"kind": "evaluation", "step": 4, "tau": 2.0}]
    write_report(tmp_path / "r.html", report, metrics, results)
    page = (tmp_path / "r.html").read_text()
    assert "&lt;b&gt;text&lt;/b&gt;" in page
    assert "<b>text</b>" not in page
    assert "<td>&lt;i&gt;code</td><td>2</td><td>none</td><td>1.50</td>" in page
    assert "4 outputs part from plain decoding: 3 at near-ties" in page
    assert page.count("<svg") == 5
    assert "<script" not in page
    assert "src=" not in page

"""The demo's tasks have the answers they claim, and held-out prompts are held out."""

import itertools
import json
import random

import pytest

from draftsmith.demo import tasks


def some(kind: str, count: int = 200) -> list[tasks.Task]:
    make = getattr(tasks, kind)
    return [make(random.Random(seed)) for seed in range(count)]


def test_json_tasks_are_inverse_to_each_other() -> None:
    for task in some("record_to_json"):
        lines = task.prompt.splitlines()[1:]
        assert [f"{k}: {v}" for k, v in json.loads(task.answer).items()] == lines
    for task in some("json_to_record"):
        record = json.loads(task.prompt.splitlines()[1])
        assert task.answer == "\n".join(f"- {k}: {v}" for k, v in record.items())


def test_tables_hold_the_same_cells() -> None:
    for kind in ("csv_to_table", "table_to_csv"):
        for task in some(kind):
            table, csv = (task.answer, task.prompt) if kind == "csv_to_table" else (task.prompt, task.answer)
            rows = [
                [c.strip() for c in line.strip("|").split("|")]
                for line in table.splitlines()
                if "---" not in line and "|" in line
            ]
            assert rows == [line.split(",") for line in csv.splitlines() if "," in line]


def test_arithmetic_is_right() -> None:
    for task in some("add_in_steps"):
        one, two = (int(w) for w in task.prompt.split() if w.isdigit())
        assert task.answer.endswith(f"The sum is {one + two}.")
    for task in some("convert_unit"):
        factor, number, result = (int(task.answer.replace(".", " ").split()[i]) for i in (3, 6, -2))
        assert number * factor == result


def test_functions_run() -> None:
    for task in some("small_function"):
        scope: dict = {}
        exec(task.answer, scope)
        function = next(v for k, v in scope.items() if callable(v) and not k.startswith("__"))
        expected = {"sum": 8, "difference": 4, "product": 12, "quotient": 3}[task.prompt.split("the ")[1].split()[0]]
        assert function(6, 2) == expected


def test_rewriting_is_right() -> None:
    for task in some("reverse_list"):
        assert task.answer.removeprefix("Reversed: ").split(", ")[::-1] == task.prompt.partition(": ")[2].split(", ")
    for task in some("replace_word"):
        old, new = task.prompt.split()[1], task.prompt.split()[3].rstrip(":")
        sentence = task.prompt.partition(": ")[2]
        assert f" {old}." in sentence
        assert task.answer == " ".join(f"{new}." if w == f"{old}." else w for w in sentence.split())


@pytest.mark.parametrize("make", tasks.KINDS)
def test_variety_does_not_run_out(make: object) -> None:
    prompts = {make(random.Random(seed)).prompt for seed in range(500)}  # type: ignore[operator]
    assert len(prompts) > 200


def test_held_out_prompts_are_new_distinct_and_of_every_kind() -> None:
    seen = {task.prompt for task in itertools.islice(tasks.stream(1), 5000)}
    held_out = tasks.held_out(2, 60, seen)
    prompts = [task.prompt for task in held_out]
    assert len(set(prompts)) == 60
    assert not set(prompts) & seen
    assert {task.kind for task in held_out} == {make.__name__ for make in tasks.KINDS}
    assert tasks.held_out(2, 60, seen) == held_out

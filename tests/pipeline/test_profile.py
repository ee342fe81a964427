"""Where each thread's time goes: counters that add up, and a trace that other tools open."""

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from draftsmith import build, spans
from draftsmith.config import Config
from draftsmith.pipeline.profile import Profile, _own_seconds, table
from draftsmith.spans import Kept, Spans, span
from tests.pipeline.test_run import metrics


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(spans.time, "perf_counter", lambda: self.now)


def test_a_span_counts_without_those_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mine = Clock(monkeypatch), Spans("me")
    with mine.attached(), span("forward"):
        clock.now += 1
        with span("copy"):
            clock.now += 2
            with span("gate"):
                clock.now += 4
        with span("gate"):
            clock.now += 8
        clock.now += 16
    assert mine.seconds == {"forward": 17, "copy": 2, "gate": 12}
    with span("forward"):
        clock.now += 1
    assert mine.seconds["forward"] == 17, "not attached any more"


def test_a_span_that_ends_with_an_error_counts_and_lets_it_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mine = Clock(monkeypatch), Spans("me")
    with mine.attached():
        try:
            with span("step"):
                clock.now += 3
                raise KeyError
        except KeyError:
            clock.now += 100
        with span("step"):
            clock.now += 1
    assert mine.seconds == {"step": 4}


def test_threads_count_apart() -> None:
    mine, other = Spans("me"), Spans("other")

    def work() -> None:
        with span("nobody's"), other.attached(), span("theirs"):
            pass

    with mine.attached(), span("mine"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(mine.seconds) == {"mine"}
    assert set(other.seconds) == {"theirs"}


def test_a_device_is_waited_for_only_while_a_profile_is_taken() -> None:
    settled: list[int] = []
    mine = Spans("me", lambda: settled.append(1))
    with mine.attached():
        with span("forward"):
            pass
        assert not settled
        mine.keep()
        with span("forward"):
            pass
    assert len(settled) == 1
    assert [k.name for k in mine.take()] == ["forward"]


def test_a_span_under_way_when_the_profile_ends_is_kept_as_far_as_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mine = Clock(monkeypatch), Spans("me")
    with mine.attached(), span("evaluate"):
        clock.now += 1
        mine.keep()
        with span("gate"):
            clock.now += 2
            assert mine.take() == [Kept("evaluate", 0, 3), Kept("gate", 1, 3)]
        clock.now += 1
    assert mine.seconds == {"evaluate": 2, "gate": 2}


def test_a_profile_may_be_taken_while_a_span_ends() -> None:
    """What ends a span must not fail when the profile ends within it."""
    mine = Spans("me", lambda: taken.extend(mine.take()))
    taken: list[Kept] = []
    mine.keep()
    with mine.attached(), span("forward"):
        pass
    assert [k.name for k in taken] == ["forward"]
    assert set(mine.seconds) == {"forward"}


def test_a_step_that_was_given_up_is_not_profiled(tmp_path: Path) -> None:
    said: list[str] = []
    profile = Profile(5, tmp_path / "p.json", said.append)
    for step in (10, 11, 12, 12):
        profile.at(step, [Spans("a")])
    profile.close()
    assert "steps 12 to 12" in said[0]


def test_the_table_cuts_spans_at_the_profiles_ends_and_names_what_no_span_covers() -> None:
    kept = [Kept("gate", 2, 3), Kept("capture", -5, 4), Kept("wait", 4, 30)]
    own = _own_seconds(kept, 0, 10)
    assert own == {"capture": 3, "gate": 1, "wait": 6}
    lines = table([("target-0", own), ("drafter-0", {"forward": 4.0})], wall_s=10, steps=2)
    assert [line.split() for line in lines] == [
        ["thread", "capture", "forward", "wait", "gate", "other"],
        ["target-0", "1500.0", "-", "3000.0", "500.0", "-"],
        ["drafter-0", "-", "2000.0", "-", "-", "3000.0"],
    ]


def test_a_profile_of_a_run_has_every_thread_and_ends_with_its_steps(small_config: Config) -> None:
    said: list[str] = []
    build.train(small_config, resume=None, say=lambda _line: None, profile_steps=3)
    trace = json.loads((Path(small_config.run.dir) / "profile.json").read_text())
    threads = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(threads.values()) == {"steps", "coordinator", "drafter-0", "drafter-1", "target-0"}
    found: dict[str, list[dict]] = {name: [] for name in threads.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[threads[event["tid"]]].append(event)
    assert [e["name"] for e in found["steps"]] == ["step 2", "step 3", "step 4"]
    last = found["steps"][-1]["ts"] + found["steps"][-1]["dur"]
    for name, lane in found.items():
        if name.startswith("drafter"):
            # They meet twice a step: over the gradients, and over the weights.
            for kind, times in {"copy": 1, "forward": 1, "backward": 1, "reduce": 2, "step": 1}.items():
                assert sum(e["name"] == kind for e in lane) == 3 * times, (name, kind)
        assert all(e["ts"] < last and e["ts"] + e["dur"] > 0 for e in lane)
        # Within a thread, spans lie side by side or inside each other.
        order = sorted(lane, key=lambda e: (e["ts"], -e["dur"]))
        for one, after in pairwise(order):
            assert after["ts"] >= one["ts"] + one["dur"] - 1 or after["ts"] + after["dur"] <= one["ts"] + one["dur"] + 1
    assert {e["name"] for e in found["target-0"]} & {"capture", "wait"}
    assert said == []


def test_every_step_event_says_where_the_time_went(small_config: Config) -> None:
    build.train(small_config, resume=None, say=lambda _line: None)
    steps = metrics(small_config)
    for record in steps:
        assert set(record["spans_s"]) == {"drafter-0", "drafter-1", "target-0"}
        for worker in ("drafter-0", "drafter-1"):
            assert {"wait", "copy", "forward", "backward", "reduce", "step"} <= set(record["spans_s"][worker])
    for one, after in pairwise(steps):
        for worker, seconds in one["spans_s"].items():
            assert all(after["spans_s"][worker][name] >= s for name, s in seconds.items())
    wall = steps[-1]["seconds"] - steps[0]["seconds"]
    for worker, seconds in steps[-1]["spans_s"].items():
        # What was under way when the first of them was told counts when it ends: at most as long as the run until then.
        spent = sum(seconds.values()) - sum(steps[0]["spans_s"][worker].values())
        assert 0 < spent <= wall + steps[0]["seconds"], worker


@pytest.mark.parametrize(("steps", "words"), [(2, "steps 2 to 3"), (99, "steps 2 to 8"), (0, "nothing kept")])
def test_a_profile_ends_with_the_run_at_the_latest(tmp_path: Path, steps: int, words: str) -> None:
    said: list[str] = []
    profile = Profile(steps or 9, tmp_path / "p.json", said.append)
    threads = [Spans("a")]
    for step in range(9 if steps else 1):
        profile.at(step, threads)
    profile.close()
    profile.close()
    assert words in said[0]
    assert len([line for line in said if "profile " in line]) == 1
    with threads[0].attached(), span("later"):
        pass
    assert threads[0].take() == []
    assert (tmp_path / "p.json").exists() == bool(steps)


def test_a_profile_that_cannot_be_written_is_told_and_the_table_still_comes(tmp_path: Path) -> None:
    said: list[str] = []
    profile = Profile(1, tmp_path / "missing" / "p.json", said.append)
    for step in range(3):
        profile.at(step, [Spans("a")])
    assert "cannot be written (No such file" in said[1]
    assert "thread" in said[2]

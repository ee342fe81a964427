"""The order of samples and the schedule as pure functions."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.pipeline.plan import Plan, epoch_order, generator_for, learning_rate, total_steps


@given(st.integers(1, 30), st.integers(0, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_every_worker_count_covers_the_same_stream(
    packs: int, seed: int, replicas: int, share: int, targets: int, steps: int
) -> None:
    plan = Plan(packs, replicas * share, steps, replicas, targets, seed)
    alone = Plan(packs, replicas * share, steps, 1, 1, seed)
    positions = sorted(p for t in range(targets) for p in plan.target_positions(t, 0))
    assert positions == list(range(steps * plan.per_step)) == list(alone.target_positions(0, 0))
    assert [plan.pack_at(p) for p in positions] == [alone.pack_at(p) for p in positions]
    places = Counter(plan.route(p, 0) for p in positions)
    assert set(places.values()) == {1}
    for replica in range(replicas):
        assert sorted(n for r, n in places if r == replica) == list(range(steps * share))


@given(st.integers(1, 40), st.integers(0, 9))
def test_an_epoch_holds_every_pack_once(packs: int, seed: int) -> None:
    orders = [epoch_order(packs, seed, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(packs)) for order in orders)


def test_epochs_and_seeds_differ() -> None:
    assert epoch_order(50, 0, 0) != epoch_order(50, 0, 1)
    assert epoch_order(50, 0, 0) != epoch_order(50, 1, 0)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(0, 8))
def test_a_resumed_attempt_continues_the_stream(replicas: int, targets: int, steps: int, start: int) -> None:
    start = min(start, steps)
    plan = Plan(7, replicas * 2, steps, replicas, targets, 3)
    straight = [p for p in range(steps * plan.per_step) if p >= start * plan.per_step]
    assert sorted(p for t in range(targets) for p in plan.target_positions(t, start)) == straight
    for p in straight:
        replica, number = plan.route(p, start)
        assert (replica, number + start * plan.share) == plan.route(p, 0)


def test_generators_depend_on_all_three_arguments() -> None:
    def draw(*key: object) -> float:
        return float(torch.rand((), generator=generator_for(*key)))  # type: ignore[arg-type]

    base = draw(1, "anchors", 2)
    assert base == draw(1, "anchors", 2)
    assert len({base, draw(2, "anchors", 2), draw(1, "weights", 2), draw(1, "anchors", 3)}) == 4


def test_schedule_rises_then_falls_as_a_cosine() -> None:
    rates = [learning_rate(s, peak=1.0, steps=100, warmup=0.04) for s in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[52] == pytest.approx(0.5, abs=0.01)
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert 0 < rates[-1] < 0.01
    assert learning_rate(0, peak=1.0, steps=1, warmup=0.0) == 1.0


@pytest.mark.parametrize(
    ("packs", "per_step", "epochs", "cap", "steps"),
    [(10, 4, 2.0, None, 5), (10, 4, 1.0, None, 3), (10, 4, 9.0, 6, 6), (1, 8, 0.1, None, 1)],
)
def test_total_steps(packs: int, per_step: int, epochs: float, cap: int | None, steps: int) -> None:
    assert total_steps(packs, per_step, epochs, cap) == steps

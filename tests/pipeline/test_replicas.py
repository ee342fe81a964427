"""Averaging, updates and equality of replicas."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from draftsmith.compiling.gate import Gate
from draftsmith.config import TrainSection
from draftsmith.draft.ends import FrozenEnds
from draftsmith.errors import PipelineError
from draftsmith.pipeline.replicas import GradientExchange, Replica, slices
from tests.conftest import tiny_drafter

ENDS = FrozenEnds(torch.zeros(1, 32), torch.zeros(1, 32))


def replicas(count: int, **recipe: object) -> list[Replica]:
    return [Replica(rank, tiny_drafter(), ENDS, TrainSection(**recipe), count) for rank in range(count)]  # type: ignore[arg-type]


def on_threads(works: list[object]) -> None:
    threads = [threading.Thread(target=work) for work in works]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [7, 700])
def test_each_slice_is_the_weighted_mean_and_the_norm_that_of_the_whole(count: int, size: int) -> None:
    exchange = GradientExchange(count)
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(count)]
    expected = torch.stack(gradients).double().sum(0) / sum(range(1, count + 1))
    norms = [0.0] * count

    def work(rank: int) -> None:
        norms[rank] = exchange.reduce(rank, gradients[rank], float(rank + 1))
        exchange.gather(rank, gradients[rank])

    on_threads([lambda r=r: work(r) for r in range(count)])
    assert all(torch.equal(g, gradients[0]) for g in gradients)
    torch.testing.assert_close(gradients[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert norms == [pytest.approx(float(expected.norm()), rel=1e-5)] * count
    assert len(set(norms)) == 1


@pytest.mark.parametrize("late", [1, 2])
def test_a_replica_that_goes_on_at_once_does_not_spoil_what_a_slower_one_still_reads(late: int) -> None:
    class SlowForOne(Gate):
        """Lets one thread in late: when it sums its slice of the gradients, or when it copies the other's weights."""

        entered = 0

        @contextmanager
        def shared(self) -> Iterator[None]:
            if threading.current_thread().name == "slow":
                self.entered += 1
                if self.entered == late:
                    time.sleep(0.3)
            with super().shared():
                yield

    exchange = GradientExchange(2, SlowForOne())
    gradients = [torch.full((128,), 1.0), torch.full((128,), 3.0)]
    weights = [torch.zeros(128), torch.zeros(128)]
    places = slices(128, 2)
    seen = []

    def work(rank: int) -> None:
        for _ in range(2):
            exchange.reduce(rank, gradients[rank], 1.0)
            weights[rank][places[rank]] += gradients[rank][places[rank]]
            gradients[rank].fill_(1.0)
            exchange.gather(rank, weights[rank])
            if rank == 1:
                seen.append(weights[rank].clone())

    slow = threading.Thread(target=lambda: work(1), name="slow")
    slow.start()
    on_threads([lambda: work(0)])
    slow.join(10)
    assert [set(each.tolist()) for each in seen] == [{2.0}, {3.0}]


def test_no_weight_at_all_keeps_zero_gradients() -> None:
    gradient = torch.zeros(5)
    assert GradientExchange(1).reduce(0, gradient, 0.0) == 0.0
    assert gradient.tolist() == [0.0] * 5


def test_flat_buffers_are_the_parameters() -> None:
    (replica,) = replicas(1)
    names = dict(replica.drafter.named_parameters())
    names["fc.weight"].data.fill_(3.0)
    assert (replica.weights()["fc.weight"] == 3.0).all()
    names["norm.weight"].sum().backward()
    assert replica.gradient.sum() == 32


def test_update_equals_plain_adamw_and_decay_spares_norms() -> None:
    (replica,) = replicas(1, weight_decay=0.5, clip=1.0)
    other = tiny_drafter()
    groups = [
        {"params": [p for p in other.parameters() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in other.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for mine, theirs in zip(replica.drafter.parameters(), other.parameters(), strict=True):
            gradient = torch.randn(mine.shape, generator=generator)
            mine.grad.copy_(gradient * 4)  # type: ignore[union-attr]
            theirs.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        assert replica.update(GradientExchange(1), 4.0, 0.1) == pytest.approx(float(norm), rel=1e-5)
        plain.step()
    for (name, mine), theirs in zip(replica.drafter.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_replicas_stay_bit_identical_after_every_step() -> None:
    pair = replicas(2)
    exchange = GradientExchange(2)
    for step in range(5):

        def work(replica: Replica, step: int = step) -> None:
            replica.gradient.copy_(
                torch.randn(replica.gradient.shape, generator=torch.Generator().manual_seed(step * 2 + replica.rank))
            )
            replica.update(exchange, 1.0, 1e-2)

        on_threads([lambda r=r: work(r) for r in pair])
        assert pair[0].digest() == pair[1].digest()
    assert pair[0].digest() != replicas(1)[0].digest()


def trained(count: int, steps: int) -> list[Replica]:
    made, exchange = replicas(count), GradientExchange(count)

    def work(replica: Replica) -> None:
        for step in range(steps):
            replica.gradient.normal_(generator=torch.Generator().manual_seed(step))
            replica.update(exchange, 1.0, 1e-2)

    on_threads([lambda r=r: work(r) for r in made])
    return made


@pytest.mark.parametrize("then", [1, 2, 3])
def test_state_round_trips_whatever_the_number_of_replicas(then: int) -> None:
    now = trained(2, 2)
    weights, state = now[0].weights(), now[1].optimizer_state(now)
    resumed = replicas(then)
    for replica in resumed:
        replica.load(weights, state)
    assert {replica.digest() for replica in resumed} == {now[0].digest()}
    again = resumed[-1].optimizer_state(resumed)
    assert again.keys() == state.keys() and all(torch.equal(t, again[n]) for n, t in state.items())
    exchanges = {2: GradientExchange(2), then: GradientExchange(then)}

    def work(replica: Replica, exchange: GradientExchange) -> None:
        replica.gradient.normal_(generator=torch.Generator().manual_seed(10))
        replica.update(exchange, 1.0, 1e-2)

    on_threads([lambda r=r: work(r, exchanges[2]) for r in now])
    on_threads([lambda r=r: work(r, exchanges[then]) for r in resumed])
    if then == 2:
        assert resumed[0].digest() == now[0].digest()
    torch.testing.assert_close(resumed[0].flat, now[0].flat)


def test_moments_exist_once_over_all_replicas() -> None:
    made = trained(3, 1)
    held = [sum(moments["exp_avg"].numel() for moments in r.optimizer.state.values()) for r in made]
    assert sum(held) == made[0].flat.numel() and max(held) - min(held) <= 128
    (alone,) = trained(1, 1)
    torch.testing.assert_close(torch.cat([r.moments("exp_avg_sq") for r in made]), alone.moments("exp_avg_sq"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run(value: float) -> None:
    pair, exchange = replicas(2), GradientExchange(2)
    before, told = pair[0].digest(), []
    # In the slice of one alone, and both must stop.
    pair[0].gradient[3] = value

    def work(replica: Replica) -> None:
        with pytest.raises(PipelineError, match="gradient norm is"):
            replica.update(exchange, 1.0, 1e-2)
        told.append(replica.rank)

    on_threads([lambda r=r: work(r) for r in pair])
    assert sorted(told) == [0, 1]
    assert {replica.digest() for replica in pair} == {before}


def test_abort_wakes_a_waiting_replica() -> None:
    exchange = GradientExchange(2)
    seen: list[str] = []

    def work() -> None:
        try:
            exchange.reduce(0, torch.zeros(2), 1.0)
        except threading.BrokenBarrierError:
            seen.append("woken")

    thread = threading.Thread(target=work)
    thread.start()
    while exchange._barrier.n_waiting == 0 and thread.is_alive():
        pass
    exchange.abort()
    thread.join(5)
    assert seen == ["woken"]

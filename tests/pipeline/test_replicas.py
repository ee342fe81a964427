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
from draftsmith.pipeline.replicas import GradientExchange, Replica
from tests.conftest import tiny_drafter

ENDS = FrozenEnds(torch.zeros(1, 32), torch.zeros(1, 32))


def replicas(count: int, **recipe: object) -> list[Replica]:
    return [Replica(rank, tiny_drafter(), ENDS, TrainSection(**recipe)) for rank in range(count)]  # type: ignore[arg-type]


def on_threads(works: list[object]) -> None:
    threads = [threading.Thread(target=work) for work in works]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_average_is_the_weighted_mean_and_bit_identical(count: int) -> None:
    exchange = GradientExchange(count)
    gradients = [torch.randn(101, generator=torch.Generator().manual_seed(r)) for r in range(count)]
    expected = torch.stack(gradients).double().sum(0) / sum(range(1, count + 1))
    on_threads([lambda r=r: exchange.average(r, gradients[r], float(r + 1)) for r in range(count)])
    assert all(torch.equal(g, gradients[0]) for g in gradients)
    torch.testing.assert_close(gradients[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_replica_that_goes_on_at_once_does_not_spoil_what_a_slower_one_still_reads() -> None:
    class SlowForOne(Gate):
        """Lets one thread in late the second time, when it copies the others' slices."""

        entered = 0

        @contextmanager
        def shared(self) -> Iterator[None]:
            if threading.current_thread().name == "slow":
                self.entered += 1
                if self.entered == 2:
                    time.sleep(0.3)
            with super().shared():
                yield

    exchange = GradientExchange(2, SlowForOne())
    gradients = [torch.full((10,), 1.0), torch.full((10,), 3.0)]

    def fast() -> None:
        exchange.average(0, gradients[0], 1.0)
        gradients[0].zero_()

    slow = threading.Thread(target=lambda: exchange.average(1, gradients[1], 1.0), name="slow")
    slow.start()
    on_threads([fast])
    slow.join(10)
    assert gradients[1].tolist() == [2.0] * 10


def test_no_weight_at_all_keeps_zero_gradients() -> None:
    gradient = torch.zeros(5)
    GradientExchange(1).average(0, gradient, 0.0)
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


def test_state_round_trips_exactly() -> None:
    (one,), (two,) = replicas(1), replicas(1)
    for _ in range(2):
        one.gradient.normal_(generator=torch.Generator().manual_seed(9))
        one.update(GradientExchange(1), 1.0, 1e-2)
    two.load(one.weights(), one.optimizer_state())
    for replica in (one, two):
        replica.gradient.normal_(generator=torch.Generator().manual_seed(10))
        replica.update(GradientExchange(1), 1.0, 1e-2)
    assert one.digest() == two.digest()
    assert all(torch.equal(t, two.optimizer_state()[n]) for n, t in one.optimizer_state().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run(value: float) -> None:
    (replica,) = replicas(1)
    before = replica.digest()
    replica.gradient[3] = value
    with pytest.raises(PipelineError, match="gradient norm is"):
        replica.update(GradientExchange(1), 1.0, 1e-2)
    assert replica.digest() == before


def test_abort_wakes_a_waiting_replica() -> None:
    exchange = GradientExchange(2)
    seen: list[str] = []

    def work() -> None:
        try:
            exchange.average(0, torch.zeros(2), 1.0)
        except threading.BrokenBarrierError:
            seen.append("woken")

    thread = threading.Thread(target=work)
    thread.start()
    while exchange._barrier.n_waiting == 0 and thread.is_alive():
        pass
    exchange.abort()
    thread.join(5)
    assert seen == ["woken"]

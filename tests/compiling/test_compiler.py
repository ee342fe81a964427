"""Compiled steps between threads: right numbers, nothing unplanned, nothing escaped, settings everywhere."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.compiling import settings as settings_module
from draftsmith.compiling.buckets import choose_buckets
from draftsmith.compiling.cache import cache_folder, use_cache
from draftsmith.compiling.compiler import Compiler
from draftsmith.compiling.settings import apply_settings, settings_in_force
from draftsmith.compiling.warmup import Warmed, seconds_left, warm_up, worth_compiling
from draftsmith.data.packing import pack
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.model import Drafter
from draftsmith.errors import CompileError
from draftsmith.pipeline.step import StepSettings, blank_batch, drafter_core, run_pack
from draftsmith.target.capture import Capture
from draftsmith.target.load import Target, share_weights
from draftsmith.types import Batch, Document, HiddenStates
from tests.conftest import tiny_drafter
from tests.draft.test_model import two_documents
from tests.target.test_capture import pack_of

pytestmark = pytest.mark.compiled


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with use_cache(tmp_path_factory.mktemp("compile")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")


def at_once(works: list[Callable[[], None]]) -> list[BaseException]:
    """Run all works on threads that start together; their exceptions."""
    barrier, errors = threading.Barrier(len(works)), []

    def start(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"
    return errors


def toy(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of its own code object, so that each number is a graph nobody has compiled."""
    scope: dict = {"torch": torch}
    exec(f"def toy(x):\n return (torch.tanh(x * {number + 1}) + {number}).sum()", scope)
    return scope["toy"]


def test_report_1_settings_hold_in_workers_in_threads_started_later_and_in_autograds() -> None:
    seen: list[dict[str, object]] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(settings_in_force())
            return grads[0]

    def work() -> None:
        started.wait(10)
        seen.append(settings_in_force())
        Note.apply(torch.ones(1, requires_grad=True)).sum().backward()

    started = threading.Event()
    early = threading.Thread(target=work)
    early.start()
    apply_settings(graphs=5)
    started.set()
    late = threading.Thread(target=work)
    late.start()
    for thread in (early, late):
        thread.join(20)
    seen.append(settings_in_force())
    assert len(seen) == 5
    expected = 5 + settings_module.SPARE_GRAPHS
    for found in seen:
        assert found["recompile_limit"] == expected
        assert found["fail_on_recompile_limit_hit"] is True
        # Report a: no mode that turns CUDA graphs on, in any thread.
        assert found["triton.cudagraphs"] is False


def test_report_3_the_recompile_limit_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "SPARE_GRAPHS", 0)
    with Compiler(enabled=True, graphs=2) as compiler:
        function = compiler.compiled(toy(900))
        function(torch.ones(2))
        function(torch.ones(3))
        with pytest.raises(Exception, match="recompile_limit"):
            function(torch.ones(4))
    apply_settings(graphs=8)


def test_report_3_twelve_document_lengths_need_no_more_graphs_than_buckets() -> None:
    lengths = range(9, 9 + 12 * 2, 2)
    documents = [
        Document(
            f"d{n}", torch.randint(0, 250, (n,), generator=torch.Generator().manual_seed(n)), torch.ones(n, dtype=torch.bool)
        )
        for n in lengths
    ]
    packs = pack(documents, [32, 64], 0)[0]
    assert {p.bucket for p in packs} == {32, 64}
    _, ends = batches(1)
    drafter, plain = one_layer(0), one_layer(0)
    with Compiler(enabled=True, graphs=2, unplanned="error") as compiler:
        core = compiler.compiled(drafter_core)
        blanks = [(str(size), blank_batch(size, drafter, torch.float32, torch.device("cpu"))) for size in (32, 64)]
        shapes = [(name, partial(run_pack, drafter, ends, blank, settings_for(), core)) for name, blank in blanks]
        warm_up(compiler, "drafter-0", shapes, lambda _warmed: None)
        compiler.seal()
        for number, tokens in enumerate(packs):
            features = torch.randn(tokens.bucket, 96, generator=torch.Generator().manual_seed(number))
            batch = Batch(number, tokens, HiddenStates(features))
            got = compiler.run(partial(run_pack, drafter, ends, batch, settings_for(), core))
            assert got.loss_sum == pytest.approx(run_pack(plain, ends, batch, settings_for()).loss_sum, rel=1e-4)
        assert (compiler.metrics.planned, compiler.metrics.unplanned) == (2, 0)


def test_report_5_first_calls_of_many_threads_are_right() -> None:
    compiled_at_all = 0
    for attempt in range(3):
        with Compiler(enabled=True) as compiler:
            compiler.seal()
            plain = [toy(100 + attempt * 2 + i) for i in range(2)]
            fast = [compiler.compiled(f) for f in plain]
            wrong: list[str] = []

            def work(
                rank: int, plain: list = plain, fast: list = fast, compiler: Compiler = compiler, wrong: list = wrong
            ) -> None:
                torch.set_num_threads(1)
                for number in range(4):
                    x = torch.linspace(-1, 1, 7).requires_grad_()
                    y = x.detach().clone().requires_grad_()

                    def step(x: torch.Tensor = x, number: int = number) -> torch.Tensor:
                        out = fast[(rank + number) % 2](x)
                        out.backward()
                        return out.detach()

                    got = compiler.run(step)
                    expected = plain[(rank + number) % 2](y)
                    expected.backward()
                    if not torch.allclose(got, expected) or not torch.allclose(x.grad, y.grad):  # type: ignore[arg-type]
                        wrong.append(f"thread {rank} call {number}")

            assert at_once([partial(work, rank) for rank in range(4)]) == []
            assert wrong == []
            assert compiler.metrics.escaped == 0
            compiled_at_all += compiler.metrics.unplanned
    assert compiled_at_all == 6


def one_layer(seed: int) -> Drafter:
    """A second layer would only compile longer."""
    return tiny_drafter(seed, num_hidden_layers=1, layer_types=("full_attention",))


def settings_for(seed: int = 0) -> StepSettings:
    return StepSettings(anchors=8, gamma=2.0, dtype=torch.float32, seed=seed)


def batches(count: int, lengths: tuple[int, ...] = (12, 15), padding: int = 5) -> tuple[list[Batch], FrozenEnds]:
    made = [two_documents(lengths, padding=padding, seed=s) for s in range(count)]
    return [Batch(n, b.tokens, b.hidden) for n, (b, _) in enumerate(made)], made[0][1]


def test_warm_workers_step_with_fresh_anchors_without_a_compile_and_as_eager_would() -> None:
    """Twenty steps, two replicas, one graph; and `error` means that nothing unplanned happened."""
    packs, ends = batches(20)
    with Compiler(enabled=True, unplanned="error") as compiler:
        core = compiler.compiled(drafter_core)
        warmed: list[Warmed] = []
        drafters = [one_layer(seed) for seed in (0, 1)]
        for rank, drafter in enumerate(drafters):
            blank = blank_batch(32, drafter, torch.float32, torch.device("cpu"))
            warm_up(
                compiler,
                f"drafter-{rank}",
                [("context 32", partial(run_pack, drafter, ends, blank, settings_for(), core))],
                warmed.append,
            )
            drafter.zero_grad()
        compiler.seal()
        assert [w.worker for w in warmed] == ["drafter-0", "drafter-1"]
        for seed, drafter in enumerate(drafters):
            plain = one_layer(seed)
            for batch in packs:
                got = compiler.run(partial(run_pack, drafter, ends, batch, settings_for(), core))
                expected = run_pack(plain, ends, batch, settings_for())
                assert got.loss_sum == pytest.approx(expected.loss_sum, rel=1e-4)
            for (name, a), (_, b) in zip(drafter.named_parameters(), plain.named_parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
        assert (compiler.metrics.planned, compiler.metrics.unplanned, compiler.metrics.escaped) == (1, 0, 0), (
            "one graph for both"
        )


def test_flex_attention_and_its_block_masks_are_one_planned_graph_with_fresh_anchors() -> None:
    """Forward only, since flex attention has no backward on CPU; a full and a sliding layer, twenty packs."""
    packs, ends = batches(20)
    layers = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5, "num_hidden_layers": 2}
    drafter, plain = tiny_drafter(0, backend="flex", **layers), tiny_drafter(0, backend="sdpa", **layers)
    with torch.no_grad(), Compiler(enabled=True, unplanned="error") as compiler:
        core = compiler.compiled(drafter_core)
        blank = blank_batch(32, drafter, torch.float32, torch.device("cpu"))
        warm_up(compiler, "flex", [("32", partial(run_pack, drafter, ends, blank, settings_for(), core))], lambda _warmed: None)
        compiler.seal()
        for batch in packs:
            got = compiler.run(partial(run_pack, drafter, ends, batch, settings_for(), core))
            expected = run_pack(plain, ends, batch, settings_for())
            assert got.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
            assert got.correct == expected.correct
        assert (compiler.metrics.planned, compiler.metrics.unplanned, compiler.metrics.escaped) == (1, 0, 0)


def test_an_unplanned_shape_is_counted_and_told_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    function = toy(500)
    with Compiler(enabled=True, unplanned="warn") as compiler:
        fast = compiler.compiled(function)
        with compiler.planned():
            fast(torch.ones(4))
        compiler.seal()
        told: list[int] = []
        for _ in range(2):
            with caplog.at_level(logging.WARNING):
                done = compiler.run(lambda: fast(torch.ones(6)), lambda: told.append(compiler.metrics.unplanned))
            assert done == function(torch.ones(6))
        assert compiler.metrics.unplanned == 1
        assert told == [0], "said once, before it compiled"
    assert "expected 4, actual 6" in caplog.text
    with Compiler(enabled=True, unplanned="error") as compiler:
        compiler.seal()
        with pytest.raises(CompileError, match="not planned .*expected 6, actual 9|expected 4, actual 9"):
            compiler.run(lambda: fast(torch.ones(9)))
        assert compiler.gate.holders() == []


def test_other_errors_pass_through() -> None:
    with Compiler(enabled=True) as compiler, pytest.raises(RuntimeError, match="mine"):
        compiler.run(lambda: (_ for _ in ()).throw(RuntimeError("mine")))


def test_a_compile_outside_the_gate_is_noticed_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with Compiler(enabled=True) as compiler:
        compiler.compiled(toy(501))(torch.ones(3))
        assert compiler.account()["escaped"] == 1
    assert "MainThread compiles outside the gate" in caplog.text


def test_the_three_experiments_on_our_own_parts_show_no_fault(target: Target) -> None:
    """Capture, optimizer and a warm compiled step, each on its thread, while another thread compiles graph after graph.

    The repro shows thousands of faults for these without a gate on torch 2.13.
    """
    tick = threading.Event()
    stop, counts, wrong = threading.Event(), dict.fromkeys(("capture", "optimizer", "warm"), 0), []
    replicas = [Capture(target, (1, 2, 3)), Capture(target, (0, 4))]
    packs = [pack_of(9 + s, 14, seed=s) for s in range(3)]
    expected = [[c(p).features for p in packs] for c in replicas]

    def trajectory(foreach: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        p = nn.Parameter(torch.randn(64, 64, generator=generator))
        optimizer = torch.optim.AdamW([p], lr=1e-2, foreach=foreach)
        for _ in range(5):
            p.grad = torch.randn(64, 64, generator=generator)
            optimizer.step()
        return p.detach()

    golden = {foreach: trajectory(foreach) for foreach in (True, False)}
    with Compiler(enabled=True) as compiler:
        warm = compiler.compiled(toy(600))
        with compiler.planned():
            warm(torch.ones(3, requires_grad=True)).backward()
        compiler.seal()

        def capture(rank: int) -> None:
            while not stop.is_set():
                for number, tokens in enumerate(packs):
                    with compiler.gate.shared():
                        got = replicas[rank](tokens).features
                    counts["capture"] += 1
                    if not torch.equal(got, expected[rank][number]):
                        wrong.append("capture")

        def optimize() -> None:
            while not stop.is_set():
                for foreach, right in golden.items():
                    with compiler.gate.shared():
                        got = trajectory(foreach)
                    counts["optimizer"] += 1
                    if not torch.equal(got, right):
                        wrong.append("optimizer")

        def step() -> None:
            while not stop.is_set():
                x = torch.ones(3, requires_grad=True)
                compiler.run(lambda x=x: warm(x).backward())
                counts["warm"] += 1
                if x.grad is None or not torch.allclose(x.grad, 601 * (1 - torch.tanh(torch.full((3,), 601.0)) ** 2)):
                    wrong.append("warm")

        def compile_graphs() -> None:
            try:
                for number in range(4):
                    x = torch.ones(4 + number, requires_grad=True)
                    fast = compiler.compiled(toy(700 + number))
                    before = dict(counts)
                    compiler.run(lambda x=x, fast=fast: fast(x).backward())
                    # Every kind of work goes on between two compilations, or the test would compare nothing.
                    while any(counts[kind] < before[kind] + 10 for kind in counts):
                        tick.wait(0.001)
            finally:
                stop.set()

        errors = at_once([partial(capture, 0), partial(capture, 1), optimize, step, compile_graphs])
    assert errors == []
    assert wrong == []
    assert (compiler.metrics.unplanned, compiler.metrics.escaped) == (4, 0)
    assert min(counts.values()) >= 40, counts


SCRIPT = """
import sys, torch
from draftsmith.compiling.cache import use_cache
from draftsmith.compiling.compiler import Compiler
from pathlib import Path
def function(x): return (torch.tanh(x) * 3 + x).sum()
with use_cache(Path(sys.argv[1])), Compiler(enabled=True) as compiler:
    x = torch.linspace(-1, 1, 50).requires_grad_()
    with compiler.planned():
        compiler.compiled(function)(x).backward()
    assert torch.allclose(x.grad, 3 * (1 - torch.tanh(x.detach()) ** 2) + 1), "wrong"
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.process
def test_report_7_damaged_caches_are_rebuilt(tmp_path: Path) -> None:
    def start() -> str:
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert start() == "0 0"
    assert start() != "0 0", "a second start must find what the first one left"
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 3
    for number, path in enumerate(files):
        payload = path.read_bytes()
        path.write_bytes([payload[: len(payload) // 2], b"", b"\x80\x04foreign"][number % 3])
    (next(p for p in tmp_path.rglob("*") if p.is_dir()) / "tmp1234").write_bytes(b"\x80")
    start()


def test_cache_folder_depends_on_machine_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache_folder(tmp_path)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert cache_folder(tmp_path) != here
    assert "torch-9.9.9" in cache_folder(tmp_path).name


def test_buckets_are_few_and_bound_padding() -> None:
    wastes = {(512,): 0.4, (256, 512): 0.2, (128, 256, 512): 0.02}
    asked: list[tuple[int, ...]] = []

    def waste_of(buckets: object) -> float:
        asked.append(tuple(buckets))  # type: ignore[arg-type]
        return wastes[tuple(buckets)]  # type: ignore[arg-type, index]

    assert choose_buckets(512, waste_of) == [128, 256, 512]
    assert choose_buckets(512, waste_of, enough=0.25) == [256, 512]
    assert choose_buckets(512, waste_of, enough=0.5) == [512]
    assert len(asked) == 6
    assert choose_buckets(4096, lambda b: 0.5) == [4096], "more buckets that gain nothing are not taken"


def test_the_estimate_learns_what_a_first_and_a_later_run_of_a_shape_cost() -> None:
    def left(*warmed: Warmed) -> float:
        return seconds_left(warmed, shapes=2, workers=3, guess=25)

    first, again = Warmed("a", "64", 10.0), Warmed("b", "64", 1.0)
    assert left() == 50
    assert left(first) == 10
    assert left(first, again) == 10 + 3 * 1
    other = Warmed("a", "128", 30.0)
    assert left(first, again, other) == 3
    assert left(first, again, other, *[again] * 3) == 0


def test_auto_weighs_warm_up_against_steps() -> None:
    assert worth_compiling(steps=100_000, step_seconds=0.5, graphs=2, device="cpu")[0]
    chosen, told = worth_compiling(steps=100, step_seconds=0.1, graphs=2, device="cpu")
    assert not chosen
    assert "100 steps of 0.100 s" in told


def test_copies_of_a_target_share_graphs_with_nothing(target: Target) -> None:
    """A hooked copy is a module of its own: hooking it must not force a recompile of anything else."""
    copy = share_weights(target.model)
    assert copy is not target.model
    assert next(copy.parameters()).data_ptr() == next(target.model.parameters()).data_ptr()

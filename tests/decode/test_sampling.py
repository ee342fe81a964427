"""Sampling is lossless: speculative outputs are distributed as the target's own, and the test sees it when a rule is wrong."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.decode import acceptance
from draftsmith.decode.acceptance import Greedy, Sampled, Sampling, accept_sampled, draw
from draftsmith.decode.speculate import Speculator, decode_plain
from draftsmith.decode.stream import TextStream
from draftsmith.errors import UsageError
from draftsmith.target.load import Target
from tests.conftest import byte_tokenizer, load_fp32, save_target, tiny_drafter

VOCAB, DRAWS, PROMPT = 8, 20_000, [1, 5, 2]


def chi_square_p(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int) -> float:
    """Probability of a deviation as large as this one by chance; cells expected under five times are put together."""
    if not set(counts) <= {key for key, probability in expected.items() if probability > 0}:
        return 0.0  # something impossible was drawn
    cells, rest_seen, rest_wanted = [], 0.0, 0.0
    for key, probability in expected.items():
        wanted = probability * draws
        if wanted < 5:
            rest_seen, rest_wanted = rest_seen + counts[key], rest_wanted + wanted
        else:
            cells.append((counts[key], wanted))
    if rest_wanted > 0:
        cells.append((rest_seen, rest_wanted))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


Rule = Callable[[Tensor, Tensor, Tensor, torch.Generator], tuple[int, int]]


def no_residual(drafted: Tensor, proposed: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Wrong: after a refusal it draws from the target's whole distribution."""
    agreed, _ = accept_sampled(drafted, proposed, wanted, generator)
    return agreed, draw(wanted[agreed], generator)


def always(drafted: Tensor, proposed: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Wrong: it keeps whatever was drafted."""
    return drafted.numel(), draw(wanted[-1], generator)


def by_threshold(drafted: Tensor, proposed: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Wrong, and found in the wild: keeps what the target finds likely enough."""
    rows = torch.arange(drafted.numel())
    agreed = int((wanted[rows, drafted] > 0.1).long().cumprod(dim=0).sum())
    return agreed, draw(wanted[agreed], generator)


def outputs_of(rule: Rule, draws: int) -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], float]]:
    """First tokens by `rule` where two are drafted, and what they should be: the target's distributions, whatever was drafted."""
    setup = torch.Generator().manual_seed(3)
    proposed = torch.rand(2, VOCAB, generator=setup).softmax(-1)
    wanted = (3 * torch.rand(3, VOCAB, generator=setup)).softmax(-1)
    wanted[:, 3] = 0
    wanted /= wanted.sum(-1, keepdim=True)
    generator, counts = torch.Generator().manual_seed(4), Counter[tuple[int, ...]]()
    for _ in range(draws):
        drafted = torch.multinomial(proposed, 1, generator=generator).squeeze(-1)
        agreed, added = rule(drafted, proposed, wanted, generator)
        counts[tuple([*drafted[:agreed].tolist(), added][:1])] += 1
    return counts, {(token,): float(wanted[0, token]) for token in range(VOCAB)}


def test_the_rule_alone_keeps_the_targets_distribution() -> None:
    counts, expected = outputs_of(accept_sampled, 20_000)
    assert chi_square_p(counts, expected, 20_000) > 1e-3


@pytest.mark.parametrize("rule", [no_residual, always, by_threshold])
def test_wrong_rules_are_seen(rule: Rule) -> None:
    counts, expected = outputs_of(rule, 20_000)
    assert chi_square_p(counts, expected, 20_000) < 1e-6


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target of eight tokens, sure enough of some of them that acceptance varies."""
    folder = save_target(tmp_path_factory.mktemp("small") / "t", vocab=VOCAB, hidden=16, layers=4, tied=False, seed=5)
    target = load_fp32(folder)
    target.head.mul_(4)
    return target


def speculator_of(target: Target) -> Speculator:
    drafter = tiny_drafter(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        head_dim=4,
        mask_token_id=0,
        num_target_layers=4,
        target_layer_ids=(1,),
        layer_types=("full_attention",),
    )
    # Unsure of itself, so that it proposes everything now and then.
    drafter.norm.weight.data.mul_(0.2)
    return Speculator(target, drafter)


@torch.inference_mode()
def exact(target: Target, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of the prompt, from the target's own logits: the obvious reference."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        keys = list(found)
        logits = target.model(torch.tensor([[*PROMPT, *key] for key in keys])).logits[:, -1]
        rows = sampling.distribution(logits)
        found = {(*key, token): found[key] * float(rows[i, token]) for i, key in enumerate(keys) for token in range(VOCAB)}
    return found


def prefixes(outputs: list[list[int]], length: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(output[:length]) for output in outputs)


SAMPLINGS = [Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9)]


@pytest.mark.long
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "limited"])
def test_speculative_outputs_are_distributed_as_the_targets(
    small: Target, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(small, sampling, monkeypatch, draws=800)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "limited"])
def test_twenty_thousand_outputs_are_distributed_as_the_targets(
    small: Target, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(small, sampling, monkeypatch, draws=DRAWS)


def compare(small: Target, sampling: Sampling, monkeypatch: pytest.MonkeyPatch, draws: int) -> None:
    speculator, policy = speculator_of(small), Sampled(sampling, small.device)
    # One stream of random numbers for all draws.
    monkeypatch.setattr("draftsmith.decode.speculate.Sampled", lambda *_: policy)
    outputs, kept = [], Counter[int]()
    for _ in range(draws):
        done = speculator.decode(PROMPT, 3, sampling)
        outputs.append(done.ids)
        kept[done.kept[0]] += 1
    assert len(kept) == 2, "drafted tokens are kept sometimes and refused sometimes"
    for length in (1, 2, 3):
        assert chi_square_p(prefixes(outputs, length), exact(small, sampling, length), len(outputs)) > 1e-3, length
    monkeypatch.setattr(acceptance, "accept_sampled", always)
    wrong = [speculator.decode(PROMPT, 3, sampling).ids for _ in range(draws // 5)]
    for length in (2, 3):
        assert chi_square_p(prefixes(wrong, length), exact(small, sampling, length), len(wrong)) < 1e-6, "it sees a wrong rule"


def test_plain_sampling_too(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SAMPLINGS[1]
    policy = Sampled(sampling, small.device)
    monkeypatch.setattr("draftsmith.decode.speculate.Sampled", lambda *_: policy)
    outputs = [decode_plain(small, PROMPT, 2, sampling).ids for _ in range(1000)]
    assert chi_square_p(prefixes(outputs, 2), exact(small, sampling, 2), len(outputs)) > 1e-3


def test_a_seed_fixes_the_output(small: Target) -> None:
    speculator = speculator_of(small)
    first, again, other = (speculator.decode(PROMPT, 20, Sampling(seed=seed)).ids for seed in (1, 1, 2))
    assert first == again != other


@given(
    st.floats(0.2, 3.0),
    st.integers(0, 12),
    st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    st.lists(st.integers(-40, 40), min_size=10, max_size=10, unique=True),
)
def test_the_distribution_is_that_of_hugging_face(temperature: float, top_k: int, top_p: float, raw: list[int]) -> None:
    logits = torch.tensor([raw], dtype=torch.float32) / 10
    scores = TemperatureLogitsWarper(temperature)(torch.empty(1, 0), logits.clone())
    if top_k:
        scores = TopKLogitsWarper(min(top_k, 10))(torch.empty(1, 0), scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(torch.empty(1, 0), scores)
    found = Sampling(temperature, top_p, top_k).distribution(logits)
    same = torch.allclose(found, scores.softmax(-1), atol=1e-5)
    # A cumulative sum that meets top_p to the last bit may fall to either side.
    edge = (logits / temperature).softmax(-1).sort(descending=True).values.cumsum(-1)
    assert same or bool(((edge - top_p).abs() < 1e-5).any()) or top_k


def test_values_out_of_range_are_refused() -> None:
    for values in ((0.0, 1.0, 0), (-1.0, 1.0, 0), (1.0, 0.0, 0), (1.0, 1.1, 0), (1.0, 1.0, -1)):
        with pytest.raises(UsageError, match="expected a temperature above 0"):
            Sampling(*values)


def test_greedy_keeps_what_the_target_would_say() -> None:
    policy = Greedy()
    drafted = policy.propose(torch.eye(4)[[1, 2]])
    assert drafted.tolist() == [1, 2]
    assert policy.accept(torch.eye(4)[[1, 3, 0]]) == (1, 3)


@pytest.mark.parametrize(
    ("stops", "shown", "stopped"),
    [
        ([], "héllo wörld", False),
        (["lo w"], "hél", True),
        (["ld!"], "héllo wörld", False),
        (["zzz", "ö"], "héllo w", True),
        (["wörld", "o"], "héll", True),
    ],
)
def test_text_comes_whole_and_ends_before_a_stop_string(stops: list[str], shown: str, stopped: bool) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("héllo wörld", add_special_tokens=False)["input_ids"]
    for size in (1, 2, 3, 50):
        stream, text = TextStream(tokenizer, stops), ""
        for start in range(0, len(ids), size):
            piece = stream.push(ids[start : start + size])
            assert "�" not in piece
            text += piece
            assert shown.startswith(text), "nothing is taken back"
            if stream.stopped:
                break
        assert text + stream.end() == shown
        assert stream.stopped == stopped


def test_half_a_character_at_the_end_is_still_shown(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("é", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert stream.push(ids[:1]) == ""
    assert stream.end() == "�"


def test_a_stream_gives_what_decoding_gives(small: Target) -> None:
    speculator = speculator_of(small)
    checks = list(speculator.stream(PROMPT, 12))
    done = speculator.decode(PROMPT, 12)
    assert list(itertools.chain(*checks)) == done.ids
    assert [len(check) for check in checks[1:]] == done.kept
    assert not torch.is_inference_mode_enabled()
    next(speculator.stream(PROMPT, 12))
    assert not torch.is_inference_mode_enabled(), "a caller who stops early is left as he was"

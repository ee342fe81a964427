"""What the drafter may and may not depend on, and that training and decoding are the same function."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.draft.anchors import Anchors
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.model import DrafterConfig, default_target_layer_ids
from draftsmith.errors import ConfigError
from draftsmith.pipeline.step import drafted_hidden
from draftsmith.types import Batch, HiddenStates, Tokens
from tests.conftest import tiny_drafter

K = 4


def two_documents(lengths: tuple[int, ...], padding: int = 6, seed: int = 0) -> tuple[Batch, FrozenEnds]:
    """A pack of random documents and features, and random embeddings."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    documents = [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    positions = [p for length in lengths for p in range(length)] + [0] * padding
    ids = torch.randint(0, 250, (total + padding,), generator=generator)
    mask = torch.tensor([True] * total + [False] * padding)
    tokens = Tokens(ids, mask, torch.tensor(documents), torch.tensor(positions), lengths, ("a", "b")[: len(lengths)])
    features = torch.randn(total + padding, 96, generator=generator)
    features[total:] = 0
    table = torch.randn(264, 32, generator=generator)
    return Batch(0, tokens, HiddenStates(features)), FrozenEnds(table, table)


def hidden_of(
    batch: Batch, ends: FrozenEnds, anchors: Anchors, backend: str = "sdpa", features: Tensor | None = None, **changes: object
) -> Tensor:
    drafter = tiny_drafter(backend=backend, **changes)
    if features is not None:
        batch = Batch(batch.position, batch.tokens, HiddenStates(features))
    with torch.no_grad():
        return drafted_hidden(drafter, ends, batch, anchors, torch.float32)


def some_anchors(*positions: int, padded: int = 0) -> Anchors:
    valid = [True] * len(positions) + [False] * padded
    return Anchors(torch.tensor([*positions, *[0] * padded]), torch.tensor(valid))


@pytest.mark.parametrize("backend", ["sdpa", "blocks"])
def test_report_9_states_at_or_after_an_anchor_do_not_reach_its_block(backend: str) -> None:
    batch, ends = two_documents((12, 15))
    anchors = some_anchors(3, 4, 6, 11, 14, 20)
    before = hidden_of(batch, ends, anchors, backend)
    for row, a in enumerate(anchors.positions.tolist()):
        changed = batch.hidden.features.clone()
        changed[a:] += 100.0
        after = hidden_of(batch, ends, anchors, backend, features=changed)
        assert torch.equal(before[row], after[row]), f"block at {a} sees states at or after its anchor"
        seen = batch.hidden.features.clone()
        seen[a - 1] += 100.0
        moved = hidden_of(batch, ends, anchors, backend, features=seen)
        assert not torch.allclose(before[row], moved[row]), f"block at {a} does not see the state just before its anchor"


def test_another_documents_states_do_not_reach_a_block() -> None:
    batch, ends = two_documents((12, 15))
    anchors = some_anchors(5, 20)
    before = hidden_of(batch, ends, anchors)
    changed = batch.hidden.features.clone()
    changed[:12] += 100.0
    after = hidden_of(batch, ends, anchors, features=changed)
    assert torch.equal(before[1], after[1])
    assert not torch.allclose(before[0], after[0])


def test_a_block_does_not_depend_on_the_other_blocks() -> None:
    batch, ends = two_documents((12, 15))
    together = hidden_of(batch, ends, some_anchors(2, 5, 6, 20, padded=3))
    for row, a in enumerate([2, 5, 6, 20]):
        torch.testing.assert_close(together[row], hidden_of(batch, ends, some_anchors(a))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "blocks"])
@pytest.mark.parametrize("sliding", [False, True])
def test_training_forward_equals_drafting_one_block_on_a_cropped_context(backend: str, sliding: bool) -> None:
    """The slow, obvious reference: for each anchor alone, only what exists when it is drafted, at its own positions."""
    changes: dict[str, object] = (
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3} if sliding else {}
    )
    batch, ends = two_documents((12, 15), seed=3)
    tokens, anchors = batch.tokens, some_anchors(1, 4, 11, 12, 13, 18, 26)
    together = hidden_of(batch, ends, anchors, backend, **changes)
    drafter = tiny_drafter(backend="sdpa", **changes)
    starts = [0, 12]
    for row, a in enumerate(anchors.positions.tolist()):
        start = starts[int(tokens.document_ids[a])]
        context = batch.hidden.features[start:a][None]
        length = a - start
        ids = torch.full((1, K), drafter.config.mask_token_id)
        ids[0, 0] = tokens.ids[a]
        masks = None
        if sliding:
            seen = torch.zeros(K, length + K, dtype=torch.bool)
            for k in range(K):
                seen[k, max(0, length - 3) : length] = True
                seen[k, length : length + k + 1] = True
            masks = {"sliding_attention": seen[None, None], "full_attention": torch.ones(1, 1, K, length + K, dtype=torch.bool)}
        with torch.no_grad():
            encoded = drafter.encode_context(context, torch.arange(length)[None])
            positions = torch.arange(length, length + K)[None]
            alone = drafter(F.embedding(ids, ends.embedding), positions, encoded, masks)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [(20, 200), (7,)])
def test_report_13_backends_agree_and_stay_finite_with_mixed_lengths_and_padding(lengths: tuple[int, ...]) -> None:
    batch, ends = two_documents(lengths, padding=36)
    anchors = some_anchors(1, 5, 6, padded=5)
    outputs = {backend: hidden_of(batch, ends, anchors, backend) for backend in ("sdpa", "blocks", "flex")}
    for backend, output in outputs.items():
        assert output.isfinite().all(), backend
        torch.testing.assert_close(output, outputs["sdpa"], rtol=1e-4, atol=1e-5, msg=lambda m, b=backend: f"{b}: {m}")


def test_gradients_stay_finite_when_all_blocks_are_padding() -> None:
    batch, ends = two_documents((5,))
    drafter = tiny_drafter()
    drafted_hidden(drafter, ends, batch, some_anchors(padded=4), torch.float32).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in drafter.parameters())


def test_bf16_computes_in_bf16_with_fp32_weights() -> None:
    batch, ends = two_documents((12,))
    drafter = tiny_drafter()
    hidden = drafted_hidden(drafter, ends, batch, some_anchors(3, 5), torch.bfloat16)
    hidden.float().sum().backward()
    assert hidden.dtype is torch.bfloat16
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in drafter.parameters() if p.grad is not None} == {torch.float32}
    exact = hidden_of(batch, ends, some_anchors(3, 5))
    torch.testing.assert_close(hidden.float(), exact, rtol=0.1, atol=0.15)


@pytest.mark.parametrize(
    ("layers", "count", "ids"), [(36, 5, (1, 9, 17, 25, 33)), (6, 3, (1, 2, 3)), (30, 1, (15,)), (28, 5, (1, 7, 13, 19, 25))]
)
def test_default_target_layers(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers, count) == ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": 264}, "mask_token_id is 264"),
        ({"block_size": 1}, "block_size is 1"),
        ({"target_layer_ids": (1, 5)}, "ids must lie in 0..4"),
        ({"layer_types": ("sliding_attention", "full_attention")}, "sliding_window is not set"),
        ({"layer_types": ("full_attention",)}, "expected 2"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        tiny_drafter(**changes)


def test_config_is_hashable_and_immutable() -> None:
    config = tiny_drafter().config
    assert isinstance(config, DrafterConfig)
    assert hash(config) == hash(tiny_drafter().config)

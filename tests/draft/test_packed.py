"""Linear layers packed for a CPU: the same function, and nothing is packed that does more than multiply."""

import pytest
import torch
from torch import nn

from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.packed import PackedLinear, pack, pack_linears
from draftsmith.target.load import share_weights
from tests.conftest import tiny_drafter


class Special(nn.Linear):
    """A layer that is not just its weight."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + 1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 72), nn.ReLU(), nn.Sequential(Special(72, 24), nn.Linear(24, 100, bias=False))).eval()


@pytest.mark.parametrize("rows", [(1, 1), (1, 8), (3, 5), (1, 130)])
@torch.inference_mode()
def test_a_packed_model_computes_the_same(rows: tuple[int, int]) -> None:
    plain, packed = model(), model()
    pack_linears(packed)
    kinds = [type(layer) for layer in packed.modules() if not isinstance(layer, nn.Sequential)]
    assert kinds == [PackedLinear, nn.ReLU, Special, PackedLinear]
    given = torch.randn(*rows, 40)
    torch.testing.assert_close(packed(given), plain(given), rtol=1e-5, atol=1e-5)
    # As the library hands the head what it keeps of each row.
    torch.testing.assert_close(packed(given[:, -1:]), plain(given[:, -1:]), rtol=1e-5, atol=1e-5)


def test_a_packed_layer_knows_its_weight_and_shares_it() -> None:
    plain, packed = model(), model()
    pack_linears(packed)
    assert torch.equal(packed[0].weight, plain[0].weight)
    assert packed[0].weight.dtype is torch.float32
    assert (packed[0].in_features, packed[0].out_features) == (40, 72)
    copied = share_weights(packed)
    assert copied[0] is not packed[0]
    assert copied[0].packed is packed[0].packed
    assert copied[0].bias is packed[0].bias


def test_a_drafter_packs_and_drafts_the_same() -> None:
    plain, packed = tiny_drafter(), tiny_drafter()
    pack_linears(packed)
    assert not any(isinstance(layer, nn.Linear) for layer in packed.modules())
    generator = torch.Generator().manual_seed(0)
    features, slots = torch.randn(1, 9, 96, generator=generator), torch.randn(1, 4, 32, generator=generator)
    outputs = []
    with torch.inference_mode():
        for drafter in (plain, packed):
            context = drafter.encode_context(features, torch.arange(9)[None])
            outputs.append(drafter(slots, torch.arange(9, 13)[None], context))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_a_packed_head_gives_the_same_logits_and_keeps_the_cap() -> None:
    head = torch.randn(264, 32, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    plain, packed = FrozenEnds(head, head, cap=3.0), FrozenEnds(head, head, cap=3.0, packed=pack(head))
    assert packed.packed is not None
    torch.testing.assert_close(packed.logits(hidden), plain.logits(hidden), rtol=1e-5, atol=1e-5)


def test_what_has_no_packed_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack(torch.zeros(4, 4, dtype=torch.float64)) is None
    assert pack(torch.zeros(4, 4, device="meta")) is None
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    untouched = model()
    pack_linears(untouched)
    assert not any(isinstance(layer, PackedLinear) for layer in untouched.modules())

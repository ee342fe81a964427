"""The demo's Muon takes the steps of torch's, in whatever type it multiplies."""

import pytest
import torch
from torch import Tensor, nn

from draftsmith.demo.muon import Muon, orthogonal

SHAPES = [(24, 8), (8, 24), (16, 16)]


def walk(make: object, gradients: list[list[Tensor]]) -> list[Tensor]:
    start = torch.Generator().manual_seed(1)
    matrices = [nn.Parameter(torch.randn(shape, generator=start)) for shape in SHAPES]
    optimizer = make(matrices)  # type: ignore[operator]
    for step in gradients:
        for matrix, gradient in zip(matrices, step, strict=True):
            matrix.grad = gradient.clone()
        optimizer.step()
    return [m.detach() for m in matrices]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_steps_as_torchs_does(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    gradients = [[torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(6)]
    theirs = walk(lambda p: torch.optim.Muon(p, lr=0.1, momentum=0.95, weight_decay=0.3), gradients)
    ours = walk(lambda p: Muon(p, lr=0.1, weight_decay=0.3, dtype=dtype), gradients)
    begin = walk(lambda p: Muon(p, lr=0.0, weight_decay=0.0, dtype=dtype), gradients)
    for a, b, still in zip(ours, theirs, begin, strict=True):
        # Rounding to bf16 is all that they may differ by.
        assert (a - b).norm() < 0.03 * (b - still).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    made = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(3)), torch.float32)
    values = torch.linalg.svdvals(made)
    assert made.shape == shape
    assert 0.3 < float(values.min()) <= float(values.max()) < 1.3
    assert orthogonal(torch.zeros(shape), torch.float32).abs().max() == 0

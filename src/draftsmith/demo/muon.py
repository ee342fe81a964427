"""Muon in a type that the machine is fast in: torch's own always multiplies in bf16, which takes hours where a CPU emulates it."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def fast_dtype() -> torch.dtype:
    """bf16 where this CPU multiplies it in hardware; else fp32, which is over ten times faster there."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [A, B] with its singular values brought near one, by five Newton-Schulz steps with Muon's coefficients."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Steps of matrices by their orthogonalised Nesterov momentum (Keller Jordan, 2024), as `torch.optim.Muon` takes them.

    weight_decay: decoupled. dtype: of the Newton-Schulz products.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], *, lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "not needed here"
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient: Tensor = parameter.grad
                average = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
                average.lerp_(gradient, 0.05)
                move = orthogonal(gradient.lerp(average, 0.95), self._dtype)
                rows, columns = parameter.shape
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(move, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))

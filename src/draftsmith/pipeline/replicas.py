"""Drafter replicas: flat parameters, the exchange that averages their gradients, and the proof that they stay equal."""

import hashlib
import itertools
import threading

import torch
from torch import Tensor, nn

from draftsmith.compiling.gate import Gate
from draftsmith.config import TrainSection
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.model import Drafter
from draftsmith.errors import PipelineError
from draftsmith.spans import span


class GradientExchange:
    """Sums flat gradients and weights over all replicas; every replica ends with the same bits.

    Each replica sums one slice over all, in its own gradient, and then all copy every slice: nothing of a gradient's size is ever
    made anew, which costs a CPU more than the sum. A failing replica aborts the barrier, which wakes the others with
    `threading.BrokenBarrierError`. Nobody waits at the barrier while inside the gate.
    """

    def __init__(self, replicas: int, gate: Gate | None = None) -> None:
        self.replicas, self.gate = replicas, gate or Gate()
        self._barrier = threading.Barrier(replicas)
        self._gradients: list[Tensor | None] = [None] * replicas
        self._weights = [0.0] * replicas

    def abort(self) -> None:
        """Break the barrier so that nobody waits in it, now or later."""
        self._barrier.abort()

    def _meet(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._barrier.wait()

    def average(self, rank: int, gradient: Tensor, weight: float) -> float:
        """Replace `gradient` (flat, of a summed loss) by the sum over replicas divided by the total weight; returns it."""
        self._gradients[rank], self._weights[rank] = gradient, weight
        self._meet(gradient.device)
        total = sum(self._weights)
        bounds = [gradient.numel() * r // self.replicas for r in range(self.replicas + 1)]
        slices = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        with self.gate.shared():
            mine = gradient[slices[rank]]
            for other in self._others(rank):
                mine += other[slices[rank]].to(gradient.device)
            # A step in which no slot was supervised has no weight and zero gradients: it must stay zero, not become NaN.
            if total > 0:
                mine /= total
        self._meet(gradient.device)
        with self.gate.shared():
            for other, place in zip(self._others(rank), (s for r, s in enumerate(slices) if r != rank), strict=True):
                gradient[place] = other[place].to(gradient.device)
        # Nobody may go on to clip or clear a gradient that another still reads.
        self._meet(gradient.device)
        return total

    def _others(self, rank: int) -> list[Tensor]:
        return [g for r, g in enumerate(self._gradients) if r != rank and g is not None]


class Replica:
    """One drafter with flat fp32 master weights and gradients, and its AdamW.

    Parameters are views into one buffer, matrices first and norms last; weight decay touches matrices only.
    """

    def __init__(self, rank: int, drafter: Drafter, ends: FrozenEnds, recipe: TrainSection) -> None:
        self.rank, self.drafter, self.ends, self.clip = rank, drafter, ends, recipe.clip
        named = sorted(drafter.named_parameters(), key=lambda item: item[1].ndim < 2)
        self.names = [name for name, _ in named]
        self.sizes = [p.numel() for _, p in named]
        self.flat = nn.Parameter(torch.cat([p.detach().float().flatten() for _, p in named]))
        self.gradient = torch.zeros_like(self.flat)
        start = 0
        for _, parameter in named:
            place = slice(start, start + parameter.numel())
            parameter.data = self.flat.data[place].view_as(parameter)
            parameter.grad = self.gradient[place].view_as(parameter)
            start = place.stop
        matrices = sum(p.numel() for _, p in named if p.ndim >= 2)
        self._parts = [nn.Parameter(self.flat.data[:matrices]), nn.Parameter(self.flat.data[matrices:])]
        self._parts[0].grad, self._parts[1].grad = self.gradient[:matrices], self.gradient[matrices:]
        groups = [
            {"params": [self._parts[0]], "weight_decay": recipe.weight_decay},
            {"params": [self._parts[1]], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, fused=True)

    def update(self, exchange: GradientExchange, weight: float, lr: float) -> float:
        """Average gradients, clip, step, zero; returns the gradient norm before clipping. All replicas do the same bits."""
        with span("reduce"):
            exchange.average(self.rank, self.gradient, weight)
        # Eager AdamW asks whether something compiles and would take another path: it belongs inside the gate.
        with span("step"), exchange.gate.shared():
            return self._step(lr)

    def _step(self, lr: float) -> float:
        norm = float(self.gradient.norm())
        if norm != norm or norm == float("inf"):
            raise PipelineError(
                f"gradient norm is {norm} on replica {self.rank}; nothing was updated. Lower train.lr or try train.precision=fp32, "
                "and resume from the last checkpoint"
            )
        if norm > self.clip:
            self.gradient *= self.clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.gradient.zero_()
        return norm

    def digest(self) -> str:
        """SHA-256 of the weights' bytes, in the order of `names`."""
        return hashlib.sha256(self.flat.detach().cpu().numpy().data).hexdigest()

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        shapes = dict(self.drafter.named_parameters())
        pieces = flat.split(self.sizes)
        return {name: piece.view_as(shapes[name]) for name, piece in zip(self.names, pieces, strict=True)}

    def weights(self) -> dict[str, Tensor]:
        """Copies of the master weights by contract name, on the CPU."""
        return {name: t.detach().cpu().clone() for name, t in self._split(self.flat.detach()).items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW moments by parameter name, and the step count, on the CPU."""
        state: dict[str, Tensor] = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            parts = [self.optimizer.state[p][moment] if self.optimizer.state[p] else torch.zeros_like(p) for p in self._parts]
            flat = torch.cat([p.detach() for p in parts])
            state |= {f"{moment}.{name}": t.cpu().clone() for name, t in self._split(flat).items()}
        steps = self.optimizer.state[self._parts[0]].get("step", torch.zeros(()))
        state["step"] = steps.detach().cpu().clone().reshape(())
        return state

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Restore what `weights` and `optimizer_state` gave."""
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                parameter.copy_(weights[name])
            start = 0
            for part in self._parts:
                self.optimizer.state[part] = {"step": optimizer["step"].clone().to(part.device)}
                for moment in ("exp_avg", "exp_avg_sq"):
                    flat = torch.cat([optimizer[f"{moment}.{name}"].float().flatten() for name in self.names])
                    self.optimizer.state[part][moment] = flat[start : start + part.numel()].to(part.device)
                start += part.numel()

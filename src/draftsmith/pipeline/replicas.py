"""Drafter replicas: flat parameters, the exchange through which they step together, and the proof that they stay equal."""

import hashlib
import itertools
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.compiling.gate import Gate
from draftsmith.config import TrainSection
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.model import Drafter
from draftsmith.errors import PipelineError
from draftsmith.spans import span

MOMENTS = ("exp_avg", "exp_avg_sq")
# Slices begin at multiples of this many numbers, so that kernels read whole vectors.
ALIGNED = 64


def slices(count: int, replicas: int) -> list[slice]:
    """Flat parameters in one slice a replica: what it sums over all, steps, and hands to the others."""
    bounds = [count * r // replicas // ALIGNED * ALIGNED for r in range(replicas)] + [count]
    return [slice(first, last) for first, last in itertools.pairwise(bounds)]


class GradientExchange:
    """Where replicas meet in a step: each sums its slice of the gradients over all, steps it alone, and hands the weights to the others.

    So every replica ends with the same bits, the moments of a weight exist once, and nothing of a gradient's size is ever made
    anew, which costs a CPU more than the sum. A failing replica aborts the barrier, which wakes the others with
    `threading.BrokenBarrierError`. Nobody waits at the barrier while inside the gate.
    """

    def __init__(self, replicas: int, gate: Gate | None = None) -> None:
        self.replicas, self.gate = replicas, gate or Gate()
        self._barrier = threading.Barrier(replicas)
        # Apart, since a replica may bring its next gradient while another still copies its weights.
        self._gradients: list[Tensor | None] = [None] * replicas
        self._flats: list[Tensor | None] = [None] * replicas
        self._weights, self._norms = [0.0] * replicas, [0.0] * replicas

    def abort(self) -> None:
        """Break the barrier so that nobody waits in it, now or later."""
        self._barrier.abort()

    def _meet(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._barrier.wait()

    def reduce(self, rank: int, gradient: Tensor, weight: float) -> float:
        """Replace this replica's slice of `gradient` (flat, of a summed loss) by the sum over replicas divided by the total weight.

        Returns the norm of the whole averaged gradient. Once it does, no other replica reads this one's gradient.
        """
        self._gradients[rank], self._weights[rank] = gradient, weight
        self._meet(gradient.device)
        total, place = sum(self._weights), slices(gradient.numel(), self.replicas)[rank]
        with self.gate.shared():
            mine = gradient[place]
            for other in (g for r, g in enumerate(self._gradients) if r != rank and g is not None):
                mine += other[place].to(gradient.device)
            # A step in which no slot was supervised has no weight and zero gradients: it must stay zero, not become NaN.
            if total > 0:
                mine /= total
            self._norms[rank] = float(mine.norm())
        self._meet(gradient.device)
        return math.hypot(*self._norms)

    def gather(self, rank: int, weights: Tensor) -> None:
        """Take over every other replica's slice of `weights` (flat), which each has just stepped."""
        self._flats[rank] = weights
        self._meet(weights.device)
        # Nobody steps its slice again before all have met in `reduce`, so that a slow replica may still copy from a faster one.
        with self.gate.shared():
            others = zip(slices(weights.numel(), self.replicas), self._flats, strict=True)
            for place, other in (pair for r, pair in enumerate(others) if r != rank):
                assert other is not None
                weights[place] = other[place].to(weights.device)


class Replica:
    """One drafter with flat fp32 master weights and gradients, and AdamW for its slice of them, which is all of them if it is the only one.

    Parameters are views into one buffer, matrices first and norms last; weight decay touches matrices only.
    """

    def __init__(self, rank: int, drafter: Drafter, ends: FrozenEnds, recipe: TrainSection, replicas: int = 1) -> None:
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
        self.slice = slices(self.flat.numel(), replicas)[rank]
        between = min(max(matrices, self.slice.start), self.slice.stop)
        self._places = [slice(self.slice.start, between), slice(between, self.slice.stop)]
        self._parts = [nn.Parameter(self.flat.data[place]) for place in self._places]
        for part, place in zip(self._parts, self._places, strict=True):
            part.grad = self.gradient[place]
        groups = [
            {"params": [self._parts[0]], "weight_decay": recipe.weight_decay},
            {"params": [self._parts[1]], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, fused=True)

    def update(self, exchange: GradientExchange, weight: float, lr: float) -> float:
        """Average gradients, clip, step, zero; returns the gradient norm before clipping. All replicas end with the same bits."""
        with span("reduce"):
            norm = exchange.reduce(self.rank, self.gradient, weight)
        if not math.isfinite(norm):
            raise PipelineError(
                f"gradient norm is {norm} on replica {self.rank}; nothing was updated. Lower train.lr or try train.precision=fp32, "
                "and resume from the last checkpoint"
            )
        # Eager AdamW asks whether something compiles and would take another path: it belongs inside the gate.
        with span("step"), exchange.gate.shared():
            self._step(norm, lr)
        with span("reduce"):
            exchange.gather(self.rank, self.flat.data)
        return norm

    def _step(self, norm: float, lr: float) -> None:
        if norm > self.clip:
            self.gradient[self.slice] *= self.clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.gradient.zero_()

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

    def moments(self, name: str) -> Tensor:
        """`exp_avg` or `exp_avg_sq` of this replica's slice, flat, on the CPU."""
        parts = [self.optimizer.state[p][name] if self.optimizer.state[p] else torch.zeros_like(p) for p in self._parts]
        return torch.cat([p.detach() for p in parts]).cpu()

    def optimizer_state(self, replicas: Sequence["Replica"]) -> dict[str, Tensor]:
        """AdamW moments by parameter name, and the step count, on the CPU: from the slices of all replicas, this one among them."""
        state: dict[str, Tensor] = {}
        for name in MOMENTS:
            whole = torch.cat([replica.moments(name) for replica in replicas])
            state |= {f"{name}.{parameter}": t.clone() for parameter, t in self._split(whole).items()}
        steps = self.optimizer.state[self._parts[0]].get("step", torch.zeros(()))
        state["step"] = steps.detach().cpu().clone().reshape(())
        return state

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Restore what `weights` and `optimizer_state` gave, whatever the number of replicas was."""
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                parameter.copy_(weights[name])
        whole = {m: torch.cat([optimizer[f"{m}.{name}"].float().flatten() for name in self.names]) for m in MOMENTS}
        for part, place in zip(self._parts, self._places, strict=True):
            self.optimizer.state[part] = {"step": optimizer["step"].clone().to(part.device)}
            for name, flat in whole.items():
                # A copy: a slice would keep the whole in memory.
                self.optimizer.state[part][name] = flat[place].to(part.device, copy=True)

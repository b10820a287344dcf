"""Trainable parameters that all members of a run share: one row per run, with an optimizer state of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import dissensus.train.optim as optim
from dissensus.train.averaging import GradientAverage


@dataclass
class SharedWeights:
    """The shared parameters of all runs, ``[R, P]``, and everything that training keeps for them.

    The gradient of the objective's total is the sum over members. It is multiplied by ``scale``: 1 / M for the mean
    over members, 1 for the sum.
    """

    flat: Float[Tensor, "R P"]
    settings: optim.OptimizerColumns
    moments: dict[str, Tensor]
    clip_norm: Float[Tensor, "R 1"] | None
    scale: float
    ema: float | None = None
    """The decay of the moving average of the weights; None: no average."""
    accumulated: GradientAverage | None = None
    grad: Float[Tensor, "R P"] | None = None
    """The gradient of the latest batch."""
    best: Float[Tensor, "R P"] = field(init=False)
    """The weights of the best epoch."""
    average: Float[Tensor, "R P"] = field(init=False)
    averaged: Float[Tensor, "R 1"] = field(init=False)
    """The number of updates in the average."""

    def __post_init__(self) -> None:
        self.flat.requires_grad_()
        self.best, self.average = self.flat.detach().clone(), self.flat.detach().clone()
        self.averaged = self.flat.new_zeros((len(self.flat), 1), requires_grad=False)

    def take(self, grad: Float[Tensor, "R P"]) -> None:
        """Take the gradient of a batch."""
        self.grad = grad * self.scale

    def update(
        self, optimizer: str, factor: Tensor, active: Bool[Tensor, " R"], weight: Tensor | int, *, updates: bool
    ) -> None:
        """Clip and step active runs. A batch without an update adds its gradient to those of the next one."""
        assert self.grad is not None
        grad = self.grad
        if self.accumulated is not None:
            self.accumulated.add(torch.where(active.unsqueeze(1), grad, 0.0), weight)
            if not updates:
                return
            grad = self.accumulated.take(grad.dtype)
        current = replace(self.settings, lr=self.settings.lr * factor, everyone=False)
        finite = torch.where(active.unsqueeze(1), grad, 0.0)
        optim.apply(
            optimizer, optim.UpdateRows(self.flat.detach(), self.moments, current, active, self.clip_norm), finite
        )
        if self.ema is not None:
            self._move_average(active)

    def _move_average(self, active: Bool[Tensor, " R"]) -> None:
        """a ← d·a + (1 − d)·w; it begins with the weights after the first update."""
        assert self.ema is not None
        going = active.unsqueeze(1).to(self.averaged.dtype)
        step = torch.where(self.averaged == 0, 1.0, 1 - self.ema) * going
        self.average.lerp_(self.flat.detach(), step)
        self.averaged.add_(going)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A block in which members share the averaged weights, if there is an average."""
        if self.ema is None:
            yield
            return
        with torch.no_grad():
            weights = self.flat.detach().clone()
            self.flat.copy_(self.average)
            try:
                yield
            finally:
                self.flat.copy_(weights)

    def note_best(self, runs: Bool[Tensor, " R"]) -> None:
        """Keep the present weights of some runs as the best ones."""
        self.best.copy_(torch.where(runs.unsqueeze(1), self.flat.detach(), self.best))

    def finish(self, done: Bool[Tensor, " R"], best: Bool[Tensor, " R"]) -> None:
        """Give runs the weights that training ends with: those of the best epoch, the averaged ones, or the last."""
        with torch.no_grad():
            if self.ema is not None:
                self.flat.copy_(torch.where(done.unsqueeze(1), self.average, self.flat))
            self.flat.copy_(torch.where((done & best).unsqueeze(1), self.best, self.flat))

    def select(self, runs: Bool[Tensor, " R"]) -> None:
        """Go on with some of the runs."""
        self.flat = self.flat.detach()[runs].requires_grad_()
        self.settings = self.settings.select(runs)
        self.moments = {name: tensor[runs] for name, tensor in self.moments.items()}
        self.clip_norm = None if self.clip_norm is None else self.clip_norm[runs]
        self.best, self.average, self.averaged = self.best[runs], self.average[runs], self.averaged[runs]
        self.grad = None
        if self.accumulated is not None:
            self.accumulated.select(runs)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        accumulated = {} if self.accumulated is None else self.accumulated.tensors()
        return {
            "flat": self.flat.detach(),
            "best": self.best,
            "average": self.average,
            "averaged": self.averaged,
            **{f"moments/{name}": tensor for name, tensor in self.moments.items()},
            **{f"accumulated/{name}": tensor for name, tensor in accumulated.items()},
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(tensors[name])

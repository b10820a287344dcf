"""Averages over the steps of a training: of the weights (EMA), and of the gradients of several batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dissensus.execution import Body
from dissensus.train.optim import wide


class WeightAverage:
    """The exponential moving average of every row's weights and floating-point buffers: a ← d·a + (1 − d)·w.

    It begins with the weights after a row's first update, as ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn`` and ``use_buffers=True`` does. Whole numbers, such as counters, are not averaged.
    """

    def __init__(self, decay: float, body: Body, flat: Tensor) -> None:
        self.decay, self.body, self.sections = decay, body, body.sections
        # At least float32: a small step of the average would be lost to rounding in bfloat16.
        self.weights = [part.to(wide(part), copy=True) for part in self._parts(flat)]
        self.buffers = {name: tensor.to(wide(tensor), copy=True) for name, tensor in self._averaged().items()}
        self.updates = torch.zeros((len(flat), 1), dtype=wide(flat), device=flat.device)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The weights of every dtype, as views of the matrix."""
        return [section.numbers(flat.detach()) for section in self.sections] or [flat.detach()]

    def _averaged(self) -> dict[str, Tensor]:
        state = self.body.state().items()
        return {name: t for name, t in state if t.is_floating_point() and not isinstance(t, nn.Parameter)}

    def update(self, flat: Tensor, active: Bool[Tensor, " G"], rows: Tensor | None = None) -> None:
        """Take the weights after a step into account: those of active rows, or of the active ones among ``rows``."""
        going = active.to(self.updates.dtype)
        if rows is not None:
            going = going * torch.zeros_like(going).index_fill_(0, rows, 1.0)
        weight = torch.where(self.updates.squeeze(1) == 0, going, (1 - self.decay) * going)
        for average, current in zip(self.weights, self._parts(flat), strict=True):
            average.lerp_(current.to(average.dtype), weight.unsqueeze(1).to(average.dtype))
        current = self._averaged()
        for name, tensor in current.items():
            if name not in self.buffers:  # made by a pass
                self.buffers[name] = tensor.to(wide(tensor), copy=True)
        self.body.average(self.buffers, current, weight)
        self.updates.add_(going.unsqueeze(1))

    @contextmanager
    def swapped_in(self, flat: Tensor) -> Iterator[None]:
        """A block in which members have the averaged weights and buffers."""
        with torch.no_grad():
            weights, buffers = flat.detach().clone(), {n: t.clone() for n, t in self._averaged().items()}
            for part, average in zip(self._parts(flat), self.weights, strict=True):
                part.copy_(average)
            self._write(self.buffers)
            try:
                yield
            finally:
                flat.detach().copy_(weights)
                self._write(buffers)

    def _write(self, buffers: Mapping[str, Tensor]) -> None:
        for name, tensor in self._averaged().items():
            if name in buffers:
                tensor.copy_(buffers[name])

    def adopt(self, flat: Tensor, rows: Bool[Tensor, " G"]) -> None:
        """Give some rows their averaged weights and buffers for good."""
        with torch.no_grad():
            for part, average in zip(self._parts(flat), self.weights, strict=True):
                part[rows] = average[rows].to(part.dtype)
        current = self._averaged()
        self.body.merge({name: current[name] for name in self.buffers}, self.buffers, rows)

    def select(self, rows: Bool[Tensor, " G"]) -> None:
        """Go on with some rows."""
        self.weights, self.updates = [part[rows] for part in self.weights], self.updates[rows]
        self.buffers = {name: tensor[rows] for name, tensor in self.buffers.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        weights = {f"weights/{number}": part for number, part in enumerate(self.weights)}
        return {"updates": self.updates, **weights, **{f"buffers/{n}": t for n, t in self.buffers.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.updates = tensors["updates"]
        self.weights = [tensors[f"weights/{number}"] for number in range(len(self.weights))]
        stored = {name.removeprefix("buffers/"): t for name, t in tensors.items() if name.startswith("buffers/")}
        self.buffers = stored


class GradientAverage:
    """The mean of the gradients of several batches, each weighted by its examples or their summed weight."""

    def __init__(self, flat: Tensor) -> None:
        self.total = torch.zeros_like(flat, dtype=wide(flat), requires_grad=False)
        self.weight = self.total.new_zeros((len(flat), 1))

    def add(self, grad: Float[Tensor, "G P"], weight: Tensor | int) -> None:
        """Add the gradient of a batch; ``weight`` is one number, or one per row ``[G]``."""
        column = weight.to(self.weight.dtype).reshape(-1, 1) if isinstance(weight, Tensor) else weight
        self.total.add_(grad * column)
        self.weight.add_(column)

    def take(self, dtype: torch.dtype) -> Float[Tensor, "G P"]:
        """The mean, zero where no example counted; afterwards the average is empty."""
        mean = torch.where(self.weight > 0, self.total / self.weight, 0.0).to(dtype)
        self.total.zero_()
        self.weight.zero_()
        return mean

    def select(self, rows: Bool[Tensor, " G"]) -> None:
        """Go on with some rows."""
        self.total, self.weight = self.total[rows], self.weight[rows]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        return {"total": self.total, "weight": self.weight}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.total, self.weight = tensors["total"], tensors["weight"]

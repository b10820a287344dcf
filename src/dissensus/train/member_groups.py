"""The gradient of members that do not fit into memory all at once: group by group, with equal results.

An objective may couple members, so it needs all outputs before any gradient. A first pass without gradients gives the
outputs, the objective gives their gradients, and a second pass with gradients takes those back to the weights, one
group after the other. Both passes start from the same buffers (so dropout drops the same units, and batch-norm
statistics move once) and from the same random numbers.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.axes import LossParts
from dissensus.execution import Body

Forward = Callable[[Tensor, slice], Tensor]
"""``(flat [m, P], rows) -> outputs [m, B, ...]`` of some members."""
State = tuple[list[Tensor], Any, Any]
Losses = Callable[[Tensor], LossParts]
"""``outputs [M, B, ...] -> LossParts``."""


class Generators:
    """Generators whose numbers are not keyed: torch's, Python's and numpy's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host(self) -> State:
        """Where those of the host stand."""
        return [torch.get_rng_state()], random.getstate(), np.random.get_state()  # noqa: NPY002

    def state(self) -> State:
        """Where all of them stand; without the device's while a graph is being captured."""
        torchs, pythons, numpys = self.host()
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torchs.append(torch.cuda.get_rng_state(self.device))
        return torchs, pythons, numpys

    def put(self, state: State) -> None:
        """Put them there."""
        (own, *devices), pythons, numpys = state
        torch.set_rng_state(own)
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002
        for one in devices:
            torch.cuda.set_rng_state(one, self.device)


def moved(before: State, after: State) -> bool:
    """Whether anything was drawn from torch's in between. (Python's moves under type checkers, which sample.)"""
    return any(not torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


class Grouped:
    """Computes gradients of ``at_once`` members at a time.

    ``separable`` says that the objective's total is a sum over members, each term of one member's outputs alone: then
    one pass is enough.
    """

    def __init__(self, body: Body, at_once: int, separable: bool, device: torch.device) -> None:
        self.body, self.at_once, self.separable = body, at_once, separable
        self.generators = Generators(device)
        self.draws = False
        """Whether a pass has drawn from torch's own generators."""

    def groups(self) -> Iterator[slice]:
        """The members of each group."""
        for start in range(0, len(self.body), self.at_once):
            yield slice(start, min(start + self.at_once, len(self.body)))

    def gradient(self, flat: Tensor, forward: Forward, losses: Losses) -> tuple[Tensor, LossParts, Tensor]:
        """Outputs ``[M, B, ...]``, losses, and the gradient ``[M, P]`` of the total's sum."""
        grad = torch.empty_like(flat)
        if self.separable:
            found: list[Tensor] = []
            for rows in self.groups():
                part = flat.detach()[rows].requires_grad_()
                outputs = forward(part, rows)
                (grad[rows],) = torch.autograd.grad(losses(outputs).total.sum(), part)
                found.append(outputs.detach())
            with torch.no_grad():
                outputs = torch.cat(found)
                return outputs, losses(outputs), grad
        with self._left_as_it_was(), torch.no_grad():
            # Weights that could have a gradient: both passes then run in the backend that is fastest for both ways.
            outputs = torch.cat([forward(flat.detach()[rows].requires_grad_(), rows) for rows in self.groups()])
        outputs.requires_grad_()
        before = self._before
        parts = losses(outputs)
        (wanted,) = torch.autograd.grad(parts.total.sum(), outputs)
        after = self.generators.state()
        self.generators.put(before)
        for rows in self.groups():
            part = flat.detach()[rows].requires_grad_()
            (grad[rows],) = torch.autograd.grad(forward(part, rows), part, wanted[rows])
        self.generators.put(after)
        return outputs.detach(), parts, grad

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Buffers as they were before; where the generators stood is remembered for the second pass."""
        held = {name: tensor.clone() for name, tensor in self.body.state().items()}
        self._before = self.generators.state()
        yield
        self.draws |= moved(self._before, self.generators.state())
        with torch.no_grad():
            for name, tensor in self.body.state().items():
                tensor.copy_(held[name])

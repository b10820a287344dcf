"""The gradient of members that do not fit into memory all at once: group by group, with equal results.

An objective may couple members, so it needs all outputs before any gradient. A first pass without gradients computes
the outputs, and the objective their gradients. A second pass with gradients takes these back to the weights, one group
after the other. Both passes start from the same buffers (so dropout drops the same units, and batch-norm statistics are
updated once) and from the same random numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dissensus.axes import LossParts
from dissensus.execution import Body
from dissensus.randomness import GlobalGenerators

Forward = Callable[[Tensor, slice], Tensor]
"""``(flat [m, P], rows) -> outputs [m, B, ...]`` of some members."""
Losses = Callable[[Tensor, slice], LossParts]
"""``(outputs [m, B, ...], rows) -> LossParts`` of some members."""


class MemberGroups:
    """Computes gradients of ``at_once`` members at a time.

    ``separable`` means that the objective's total is a sum of terms that depend on one member's outputs each. One pass
    is enough then.
    """

    def __init__(self, body: Body, at_once: int, separable: bool, device: torch.device) -> None:
        self.body, self.at_once, self.separable = body, at_once, separable
        self.device = device
        self.draws = False
        """Whether a pass has drawn from global generators."""

    def groups(self) -> Iterator[slice]:
        """The members of each group."""
        for start in range(0, len(self.body), self.at_once):
            yield slice(start, min(start + self.at_once, len(self.body)))

    def gradient(self, flat: Tensor, forward: Forward, losses: Losses) -> tuple[Tensor, LossParts, Tensor]:
        """Outputs ``[M, B, ...]``, losses, and the gradient ``[M, P]`` of the total's sum."""
        grad = torch.empty_like(flat)
        if self.separable:
            pieces: list[Tensor] = []
            for rows in self.groups():
                part = flat.detach()[rows].requires_grad_()
                outputs = forward(part, rows)
                (grad[rows],) = torch.autograd.grad(losses(outputs, rows).total.sum(), part)
                pieces.append(outputs.detach())
            with torch.no_grad():
                outputs = torch.cat(pieces)
                return outputs, losses(outputs, slice(None)), grad
        with self._buffers_restored(), torch.no_grad():
            # Weights that require gradients, so that both passes run in the same backend.
            outputs = torch.cat([forward(flat.detach()[rows].requires_grad_(), rows) for rows in self.groups()])
        outputs.requires_grad_()
        before = self._before
        parts = losses(outputs, slice(None))
        (output_grad,) = torch.autograd.grad(parts.total.sum(), outputs)
        after = GlobalGenerators.now(self.device)
        before.restore()
        for rows in self.groups():
            part = flat.detach()[rows].requires_grad_()
            (grad[rows],) = torch.autograd.grad(forward(part, rows), part, output_grad[rows])
        after.restore()
        return outputs.detach(), parts, grad

    @contextmanager
    def _buffers_restored(self) -> Iterator[None]:
        """Restore buffers after a block; the generators' states before it are kept for the second pass."""
        restore = self.body.snapshot()
        self._before = GlobalGenerators.now(self.device)
        yield
        self.draws |= self._before.drawn_from()
        restore()

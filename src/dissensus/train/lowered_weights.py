"""Weights of products in bfloat16 beside their float32 masters, and gradients in both precisions.

Under autocast a step casts all weights of products to bfloat16, and widens their gradients into one float32 matrix.
Both are passes over the memory of all weights. Here the kernel that updates the masters writes copies of them, too.
Passes read the copies, and the kernel reads gradients as they come. Numbers do not change: a copy is
``master.to(torch.bfloat16)``, and the gradient of a product in bfloat16 has no more digits. Steps of two passes, whose
gradients would be added up in bfloat16, keep no copies. All other weights, such as biases and those of norms, are read
from the masters. Copies follow from the masters and are never stored.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus.execution.weights import Parts, read_in_parts

DEVICES = {"cuda"}
"""Types of devices on which copies are kept; on a CPU they only cost time, and serve tests."""
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class LoweredGradient:
    """The gradient of a matrix of weights ``[G, P]``: in bfloat16 where it is one of products, else in float32."""

    products: Tensor
    """The gradient of weights of products ``[G, W]``, which are the first columns."""
    rest: Tensor
    """The gradient of the other columns ``[G, P - W]``."""
    copies: Tensor
    """Weights of products in bfloat16 ``[G, W]``, which an update writes."""

    @property
    def parts(self) -> list[Tensor]:
        """Both parts, without one that has no columns."""
        return [part for part in (self.products, self.rest) if part.numel()]

    def sum(self) -> Tensor:
        """The sum of all entries, in float32."""
        return self.products.sum(dtype=self.rest.dtype) + self.rest.sum()

    def whole(self) -> Tensor:
        """The gradient as one float32 matrix ``[G, P]``."""
        return torch.cat([self.products.to(self.rest.dtype), self.rest], 1)

    def where(self, active: Tensor) -> "LoweredGradient":
        """The gradient with zeros for rows that are not active ``[G]``."""
        products, rest = (torch.where(active.unsqueeze(1), part, 0.0) for part in (self.products, self.rest))
        return LoweredGradient(products, rest, self.copies)


Gradient = Tensor | LoweredGradient
"""A gradient of all rows, as one matrix or in two precisions."""


def whole(grad: Gradient) -> Tensor:
    """A gradient as one matrix."""
    return grad.whole() if isinstance(grad, LoweredGradient) else grad


class LoweredWeights:
    """What passes read in place of a matrix of weights ``[G, P]``: its first columns in bfloat16, and the rest.

    An update writes both. Whatever else writes the matrix must be followed by `refresh`.
    """

    def __init__(self, flat: Tensor, columns: int, parameters: Iterable[Tensor]) -> None:
        self.flat = flat
        self.parameters = [parameter for parameter in parameters if not parameter.is_inference()]
        """Those that users see, which count what is written through them; updates write the matrix itself."""
        self.writes = self._writes()
        masters = flat.detach()
        self.products = masters[:, :columns].to(DTYPE).requires_grad_()
        self.rest = masters[:, columns:].requires_grad_()

    def read(self) -> AbstractContextManager[None]:
        """A block in which passes read copies and the rest."""
        return read_in_parts(Parts(self.flat, self.products, self.rest))

    def refresh(self) -> None:
        """Make the copies anew, because something else than an update may have written the masters."""
        self.products.detach().copy_(self.flat.detach()[:, : self.products.shape[1]])

    def follow(self) -> None:
        """Make the copies anew if somebody has written to parameters since, as a source of batches may."""
        writes = self._writes()
        if writes != self.writes:
            self.writes = writes
            self.refresh()

    def _writes(self) -> int:
        return sum(parameter._version for parameter in self.parameters)

    def gradient(self, total: Tensor) -> LoweredGradient:
        """The gradient of a number that passes have led to."""
        leaves = (self.products, self.rest)
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        if all(grad is None for grad in grads):
            raise RuntimeError("the objective does not depend on weights that are trained")
        products, rest = (
            torch.zeros_like(leaf) if grad is None else grad.contiguous()
            for leaf, grad in zip(leaves, grads, strict=True)
        )
        return LoweredGradient(products, rest, self.products.detach())

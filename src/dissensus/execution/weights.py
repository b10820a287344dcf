"""The parameters of a pass: stacked tensors, or a matrix ``[M, P]`` that holds all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dissensus import checks
from dissensus.execution.skeleton import Skeleton, Tensors


def check_one_dtype(params: Tensors) -> None:
    """Refuse parameters that a matrix cannot hold: complex ones, or those of several dtypes."""
    names = {str(tensor.dtype).removeprefix("torch."): name for name, tensor in reversed(list(params.items()))}
    if any(tensor.is_complex() for tensor in params.values()):
        name = next(name for name, tensor in params.items() if tensor.is_complex())
        fix = "Store real and imaginary parts as two real parameters."
        checks.refuse("ensemble", "have real parameters to be trained", f"complex {name!r}", fix, TypeError)
    if len(names) > 1:
        got = " and ".join(f"{dtype} ({name!r})" for dtype, name in sorted(names.items()))
        fix = (
            "Use ensemble.float(), set requires_grad=False for those that need no training, or train "
            "ensemble.parameters() with torch.optim, which updates each in its own dtype."
        )
        checks.refuse("ensemble", "have parameters of one dtype to be trained", got, fix, TypeError)


Member = Callable[[int], dict[str, Tensor]]
"""``index -> parameters`` of a member. It is called on the stream of the member's pass, where it creates the views."""


class Hanging:
    """Stacked parameters as they are stored in a network."""

    def __init__(self, tensors: Tensors, count: int) -> None:
        self.hanging, self.count = dict(tensors), count

    def __len__(self) -> int:
        return self.count

    def stacked(self) -> dict[str, Tensor]:
        """Every parameter, ``[M, ...]``."""
        return self.hanging

    def members(self) -> Member:
        """Each member's parameters.

        Unbound once per pass: indexing tensors member by member would make the backward pass quadratic in M.
        """
        unbound = {name: tensor.unbind(0) for name, tensor in self.hanging.items()}
        return lambda index: {name: tensors[index] for name, tensors in unbound.items()}

    def tensors(self) -> list[Tensor]:
        """The tensors that hold the parameters."""
        return list(self.hanging.values())

    def leaves(self) -> list[Tensor]:
        """The tensors that require a gradient."""
        return [tensor for tensor in self.hanging.values() if tensor.requires_grad]

    def first(self, members: int) -> "Hanging":
        """The first members, as new leaves: a captured graph cannot lead back to tensors from before it."""
        cut = {n: t.detach()[:members].requires_grad_(t.requires_grad) for n, t in self.hanging.items()}
        return Hanging(cut, min(members, self.count))


@dataclass(frozen=True)
class Layout:
    """The order of a member's parameters in a row of the matrix ``[M, P]``.

    Weights of convolutions and linear layers come first, so that a single cast lowers their precision. With
    ``channels_last``, weights of convolutions are stored as ``[out, height, width, in]``, so that passes need not
    rearrange them.
    """

    shapes: dict[str, torch.Size]
    """Shapes of a member's parameters, in the order of columns."""
    products: int
    """The number of parameters that are weights of convolutions and linear layers."""
    channels_last: frozenset[str]
    """Weights that are stored channels last: those of plain 2-D convolutions, which nothing else reads."""

    @classmethod
    def of(cls, skeleton: Skeleton, params: Tensors, channels_last: bool) -> "Layout":
        """The layout of a network's trainable parameters, stacked ``[M, ...]``."""
        layers = [m for m in skeleton.network.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
        held = {id(layer._parameters.get("weight")) for layer in layers}
        order = sorted(params, key=lambda name: id(params[name]) not in held)  # stable: otherwise as they come
        shapes = {name: params[name].shape[1:] for name in order}
        plain = {id(layer.weight) for layer in layers if type(layer) is nn.Conv2d}
        last = frozenset(name for name in order if channels_last and id(params[name]) in plain)
        return cls(shapes, sum(id(params[name]) in held for name in order), last)

    def packed(self, params: Tensors) -> Tensor:
        """The matrix ``[M, P]`` of stacked parameters."""
        tensors = {name: params[name].detach() for name in self.shapes}
        stored = [t.movedim(2, -1) if name in self.channels_last else t for name, t in tensors.items()]
        return torch.cat([t.reshape(len(t), -1) for t in stored], 1)

    def views(self, rows: Tensor, names: list[str] | None = None) -> dict[str, Tensor]:
        """Parameters, all or those named, as views of ``[M, P]`` or of a row ``[P]``."""
        shapes = {name: self.shapes[name] for name in names} if names is not None else self.shapes
        pieces = rows.split([shape.numel() for shape in shapes.values()], -1)
        return {name: self._shaped(name, piece) for name, piece in zip(shapes, pieces, strict=True)}

    def _shaped(self, name: str, piece: Tensor) -> Tensor:
        shape = self.shapes[name]
        if name in self.channels_last:
            out, into, height, width = shape
            return piece.unflatten(-1, (out, height, width, into)).movedim(-1, -3)
        return piece.unflatten(-1, shape) if shape else piece.squeeze(-1)


class Packed:
    """Parameters as views of a matrix; weights of products in the precision of autocast."""

    def __init__(self, layout: Layout, flat: Tensor, dtype: torch.dtype | None) -> None:
        self.layout, self.flat, self.dtype = layout, flat, dtype

    def __len__(self) -> int:
        return len(self.flat)

    def _sections(self) -> list[tuple[Tensor, list[str]]]:
        """The matrix and the names of its parameters; two matrices if weights of products are cast."""
        names, count = list(self.layout.shapes), self.layout.products
        if self.dtype is None or not count:
            return [(self.flat, names)]
        width = sum(self.layout.shapes[name].numel() for name in names[:count])
        products, rest = _Cut.apply(self.flat, width, self.dtype)
        return [(products, names[:count]), (rest, names[count:])]

    def stacked(self) -> dict[str, Tensor]:
        """Every parameter, ``[M, ...]``, by a single split, whose gradient is a single concatenation."""
        return {n: view for matrix, names in self._sections() for n, view in self.layout.views(matrix, names).items()}

    def members(self) -> Member:
        """Each member's parameters as views of its row, so that its gradient is a row too."""
        unbound = [(matrix.unbind(0), names) for matrix, names in self._sections()]
        return lambda index: {
            n: view for rows, names in unbound for n, view in self.layout.views(rows[index], names).items()
        }

    def tensors(self) -> list[Tensor]:
        """The matrix."""
        return [self.flat]

    def leaves(self) -> list[Tensor]:
        """The matrix."""
        return [self.flat] if self.flat.requires_grad else []

    def first(self, members: int) -> "Packed":
        """The first members, as a new leaf."""
        flat = self.flat.detach()[:members].requires_grad_(self.flat.requires_grad)
        return Packed(self.layout, flat, self.dtype)


class _Cut(torch.autograd.Function):
    """The first columns of a matrix in another precision, and the rest; gradients are written into a single matrix."""

    generate_vmap_rule = True

    @staticmethod
    def forward(flat: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return flat[:, :width].to(dtype), flat[:, width:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        _, ctx.width, ctx.dtype = inputs

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> tuple[Tensor, Tensor]:
        change = changes[0]
        return change[:, : ctx.width].to(ctx.dtype), change[:, ctx.width :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        products, rest = grads
        whole = rest.new_empty((len(rest), products.shape[1] + rest.shape[1]))
        whole[:, : ctx.width], whole[:, ctx.width :] = products, rest
        return whole, None, None


Weights = Hanging | Packed
"""The parameters of M members for a pass."""

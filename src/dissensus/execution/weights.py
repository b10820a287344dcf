"""The parameters of a pass: stacked tensors, or a matrix ``[M, P]`` that holds all of them."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dissensus import checks
from dissensus.execution.skeleton import Skeleton, Tensors


def check_real(params: Tensors) -> None:
    """Refuse complex parameters, which a matrix of real numbers cannot hold."""
    name = next((name for name, tensor in params.items() if tensor.is_complex()), None)
    if name is not None:
        fix = "Store real and imaginary parts as two real parameters."
        checks.refuse("ensemble", "have real parameters to be trained", f"complex {name!r}", fix, TypeError)


def check_one_dtype(params: Tensors) -> None:
    """Refuse parameters of several dtypes, for members of different architectures, whose rows are laid out apart."""
    names = {str(tensor.dtype).removeprefix("torch."): name for name, tensor in reversed(list(params.items()))}
    if len(names) > 1:
        got = " and ".join(f"{dtype} ({name!r})" for dtype, name in sorted(names.items()))
        fix = (
            "Use ensemble.float(), set requires_grad=False for those that need no training, or train "
            "ensemble.parameters() with torch.optim, which updates each in its own dtype."
        )
        requirement = "have parameters of one dtype to be trained, where architectures differ"
        checks.refuse("ensemble", requirement, got, fix, TypeError)


Named = Callable[[Sequence[Tensor]], dict[str, Tensor]]
"""``tensors -> parameters`` by name, from a few tensors that hold all of them, or from one member's rows of those."""
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

    def matrices(self) -> tuple[list[Tensor], Named]:
        """The tensors that a pass reads, and a function that names what they hold."""
        names = list(self.hanging)
        return list(self.hanging.values()), lambda tensors: dict(zip(names, tensors, strict=True))

    def form(self) -> tuple[object, ...]:
        """Everything that naming depends on."""
        return tuple(self.hanging)

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


class Section(NamedTuple):
    """Columns of a matrix ``[M, P]`` whose parameters have one dtype, where parameters have several.

    Every parameter has as many columns as numbers, and the matrix has the widest dtype. Numbers of a narrower dtype
    fill the first bytes of their section. So copies of rows are copies of numbers, whatever their dtype; arithmetic
    works on `numbers`.
    """

    start: int
    stop: int
    dtype: torch.dtype

    def numbers(self, flat: Tensor) -> Tensor:
        """The numbers in a matrix ``[M, P]`` or a row ``[P]`` as a view, in their own dtype."""
        return flat[..., self.start : self.stop].view(self.dtype)[..., : self.stop - self.start]


@dataclass(frozen=True)
class Layout:
    """The order of a member's parameters in a row of the matrix ``[M, P]``.

    Weights of convolutions and linear layers come first, so that a single cast lowers their precision. Parameters of
    several dtypes are sorted by these; see `Section`. With ``channels_last``, weights of convolutions are stored as
    ``[out, height, width, in]``, so that passes need not rearrange them.
    """

    shapes: dict[str, torch.Size]
    """Shapes of a member's parameters, in the order of columns."""
    products: int
    """The number of parameters that are weights of convolutions and linear layers."""
    channels_last: frozenset[str]
    """Weights that are stored channels last: those of plain 2-D convolutions, which nothing else reads."""
    sections: tuple[Section, ...] = ()
    """The columns of every dtype; empty where all parameters have one."""
    sectioned: tuple[tuple[str, ...], ...] = ()
    """The names of every section's parameters."""

    @property
    def products_width(self) -> int:
        """The number of columns of weights of convolutions and linear layers, which are the first."""
        return sum(shape.numel() for shape in itertools.islice(self.shapes.values(), self.products))

    @classmethod
    def of(cls, skeleton: Skeleton, params: Tensors, channels_last: bool) -> "Layout":
        """The layout of a network's trainable parameters, stacked ``[M, ...]``."""
        layers = [m for m in skeleton.network.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
        held = {id(layer._parameters.get("weight")) for layer in layers}
        dtypes = list(dict.fromkeys(tensor.dtype for tensor in params.values()))
        # Stable: otherwise as they come.
        order = sorted(params, key=lambda name: (dtypes.index(params[name].dtype), id(params[name]) not in held))
        shapes = {name: params[name].shape[1:] for name in order}
        plain = {id(layer.weight) for layer in layers if type(layer) is nn.Conv2d}
        last = frozenset(name for name in order if channels_last and id(params[name]) in plain)
        products = sum(id(params[name]) in held for name in order)
        if len(dtypes) == 1:
            return cls(shapes, products, last)
        sectioned = tuple(tuple(name for name in order if params[name].dtype == dtype) for dtype in dtypes)
        stops = list(itertools.accumulate(sum(shapes[name].numel() for name in names) for names in sectioned))
        return cls(shapes, products, last, tuple(map(Section, [0, *stops], stops, dtypes)), sectioned)

    def packed(self, params: Tensors) -> Tensor:
        """The matrix ``[M, P]`` of stacked parameters."""
        tensors = {name: params[name].detach() for name in self.shapes}
        stored = [t.movedim(2, -1) if name in self.channels_last else t for name, t in tensors.items()]
        if not self.sections:
            return torch.cat([t.reshape(len(t), -1) for t in stored], 1)
        widest = functools.reduce(torch.promote_types, (section.dtype for section in self.sections))
        flat = stored[0].new_zeros((len(stored[0]), self.sections[-1].stop), dtype=widest)
        for view, tensor in zip(self.weights(flat).values(), tensors.values(), strict=True):
            view.copy_(tensor)
        return flat

    def weights(self, rows: Tensor) -> dict[str, Tensor]:
        """Parameters in their own dtypes, as views of the matrix ``[M, P]`` that holds them or of its row ``[P]``."""
        if not self.sections:
            return self.views(rows)
        pairs = zip(self.sections, self.sectioned, strict=True)
        return {n: view for part, names in pairs for n, view in self.views(part.numbers(rows), names).items()}

    def views(self, rows: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Columns of parameters, all or those named, as views of ``[M, P]`` or of a row ``[P]``, in the dtype of these.

        For gradients and masks, which have the layout of the weights and one dtype.
        """
        shapes = {name: self.shapes[name] for name in names} if names is not None else self.shapes
        pieces = rows.split([shape.numel() for shape in shapes.values()], -1)
        return {name: self._shaped(name, piece) for name, piece in zip(shapes, pieces, strict=True)}

    def _shaped(self, name: str, piece: Tensor) -> Tensor:
        shape = self.shapes[name]
        if name in self.channels_last:
            out, into, height, width = shape
            return piece.unflatten(-1, (out, height, width, into)).movedim(-1, -3)
        return piece.view((*piece.shape[:-1], *shape)) if len(shape) != 1 else piece


class Parts(NamedTuple):
    """A matrix ``[M, P]``, and two leaves that passes under autocast read in its place."""

    flat: Tensor
    products: Tensor
    """Its first columns, the weights of products, in the precision of autocast."""
    rest: Tensor
    """The other columns."""


_parts: ContextVar[Parts | None] = ContextVar("parts", default=None)


@contextmanager
def read_in_parts(parts: Parts) -> Iterator[None]:
    """A block in which passes with this very matrix read its parts, so that they need not cast it.

    Gradients are those of the two parts. Passes with another matrix, or in another precision, do as ever.
    """
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)


class Packed:
    """Parameters as views of a matrix; weights of products in the precision of autocast."""

    def __init__(self, layout: Layout, flat: Tensor, dtype: torch.dtype | None) -> None:
        self.layout, self.flat, self.dtype = layout, flat, dtype
        parts = _parts.get()
        self.parts = parts if parts is not None and parts.flat is flat and parts.products.dtype == dtype else None
        """What is read in place of the matrix; None: the matrix itself."""

    def __len__(self) -> int:
        return len(self.flat)

    def _sections(self) -> list[tuple[Tensor, Sequence[str]]]:
        """The matrix and the names of its parameters; several matrices if weights of products are cast.

        Parameters of several dtypes are one matrix each, and are not cast.
        """
        if self.layout.sections:
            matrices = _Sections.apply(self.flat, self.layout.sections)
            return list(zip(matrices, self.layout.sectioned, strict=True))
        names, count = list(self.layout.shapes), self.layout.products
        if self.dtype is None or not count:
            return [(self.flat, names)]
        if self.parts is None:
            products, rest = _Cut.apply(self.flat, self.layout.products_width, self.dtype)
        else:
            _, products, rest = self.parts
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

    def matrices(self) -> tuple[list[Tensor], Named]:
        """The matrices that a pass reads, in its precision, and a function that names what they hold as views."""
        layout, held = self.layout, self._sections()
        names = [own for _, own in held]

        def named(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            pairs = zip(tensors, names, strict=True)
            return {name: view for tensor, own in pairs for name, view in layout.views(tensor, own).items()}

        return [matrix for matrix, _ in held], named

    def form(self) -> tuple[object, ...]:
        """Everything that naming depends on."""
        layout = self.layout
        return (*layout.shapes.items(), layout.products, layout.channels_last, layout.sectioned, self.dtype)

    def tensors(self) -> list[Tensor]:
        """The matrix, or those of every dtype."""
        flat = self.flat.detach()
        return [section.numbers(flat) for section in self.layout.sections] or [self.flat]

    def leaves(self) -> list[Tensor]:
        """The matrix, or its parts."""
        leaves = [self.flat] if self.parts is None else self.parts[1:]
        return [leaf for leaf in leaves if leaf.requires_grad]

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


class _Sections(torch.autograd.Function):
    """One matrix per dtype; gradients are written into a single matrix of the widest dtype, which holds all exactly."""

    @staticmethod
    def forward(flat: Tensor, sections: tuple[Section, ...]) -> tuple[Tensor, ...]:
        return tuple(section.numbers(flat).clone() for section in sections)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat([grad.to(ctx.dtype) for grad in grads], 1), None


Weights = Hanging | Packed
"""The parameters of M members for a pass."""

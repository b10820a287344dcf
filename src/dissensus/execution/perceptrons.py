"""Training passes of perceptrons with ReLU on a CPU: blocks of members that fit into the cache, forward and backward.

Autograd would keep and create matrices of all members' activations, layer by layer, which travel through the main
memory. Here the gradient is written where it belongs in the matrix of all weights, activations are ``[M, units, B]``,
which suits small products, and their memory is used again in the next step.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable

from dissensus.execution.skeleton import Skeleton
from dissensus.execution.weights import Layout, Packed, Weights

SHAPE = "own_shape"
"""A buffer of padded networks: the number of each row's own sizes, -1 for rows of padding."""
SIZES = "own_sizes"
"""An attribute of padded networks: sizes by number."""
Sizes = tuple[tuple[int, int], ...]
BLOCK = 2**17
"""Activations of a layer that are computed at once: half a megabyte in float32."""
FEWEST = 2**16
"""Activations of a layer from which this pays; the memory of fewer is no matter. Of padded networks it always does."""
LARGEST = 2**14
"""The size of a layer's weight up to which this pays; larger products keep the cores busy by themselves."""


@dataclass(frozen=True)
class Perceptron:
    """Linear layers with a ReLU between every two, by the names of their parameters."""

    layers: tuple[tuple[str, str | None], ...]
    """Weight and bias of every layer; None where it has no bias."""
    names: frozenset[str]
    flattens: bool
    """Whether inputs are flattened first."""
    shapes: tuple[Sizes, ...] = ()
    """Own sizes of the networks in padded stacks, by number; rows have their numbers in the buffer `SHAPE`."""
    space: "Space" = field(default_factory=lambda: Space(), compare=False)

    def takes(self, weights: Weights, x: Tensor) -> bool:
        """Whether this pass is one of training on a CPU, whose gradient is that of the weights alone."""
        if not isinstance(weights, Packed) or not weights.flat.requires_grad or not torch.is_grad_enabled():
            return False
        flat = weights.flat
        if flat.device.type != "cpu" or x.requires_grad or x.dtype != flat.dtype or weights.layout.sections:
            return False
        if flat.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
            return False
        if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(flat) or is_functorch_wrapped_tensor(x):
            return False
        if weights.layout.shapes.keys() != self.names or not (self.flattens or x.ndim == 3):
            return False
        widest = max(weights.layout.shapes[weight][0] for weight, _ in self.layers)
        return bool(self.shapes) or x.shape[0] * x.shape[1] * widest >= FEWEST

    def run(self, weights: Weights, x: Tensor, shapes: Tensor | None = None) -> Tensor:
        """Outputs ``[M, B, C]`` of inputs ``[M, B, ...]``; ``shapes`` are the numbers of rows in padded stacks."""
        assert isinstance(weights, Packed)
        x = x.flatten(2) if self.flattens else x
        shapes_of_all = [weights.layout.shapes[weight] for weight, _ in self.layers]
        sizes = tuple((out, inputs) for out, inputs in shapes_of_all)
        if shapes is None:
            pieces = [Piece(slice(0, len(x)), sizes, range(len(sizes)))]
        else:
            pieces = self.space.pieces(shapes, self.shapes, len(sizes))
        blocks = [block for piece in pieces for block in piece.blocks(x.shape[1])]
        return _Pass.apply(weights.flat, x, self, weights.layout, blocks)


@dataclass(frozen=True)
class Piece:
    """Members of equal sizes."""

    rows: slice | Tensor
    """Neighbours, or the numbers of others."""
    sizes: Sizes
    """``(outputs, inputs)`` of every layer that they have."""
    layers: Sequence[int]
    """Which layers of the network these are."""

    @property
    def count(self) -> int:
        """The number of members."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    def blocks(self, batch: int) -> "Iterator[Piece]":
        """Members that are computed at once."""
        count = max(1, BLOCK // (batch * max(out for out, _ in self.sizes)))
        for start in range(0, self.count, count):
            if isinstance(self.rows, slice):
                first = self.rows.start + start
                yield replace(self, rows=slice(first, min(first + count, self.rows.stop)))
            else:
                yield replace(self, rows=self.rows[start : start + count])

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor: a view of neighbours, a copy of others."""
        return tensor[self.rows] if isinstance(self.rows, slice) else tensor.index_select(0, self.rows)

    def matrix(self, flat: Tensor) -> tuple[Tensor, int]:
        """A matrix that holds the rows side by side, and the first of them: the whole one, or a copy of the rows."""
        return (flat, self.rows.start) if isinstance(self.rows, slice) else (self.of(flat), 0)


class Columns(NamedTuple):
    """Where a parameter lies in a row of the matrix of all weights."""

    start: int
    inputs: int
    """The length of a row of a weight; 1 for a bias."""

    def of(self, matrix: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
        """The first units of the parameter in neighbouring rows from ``first``, as a view."""
        row, column = matrix.stride()
        strides = (row, self.inputs * column, column)[: len(shape)]
        return matrix.as_strided(shape, strides, matrix.storage_offset() + first * row + self.start * column)


def _columns(network: Perceptron, layout: Layout) -> list[tuple[Columns, Columns | None]]:
    """The columns of every layer's weight and bias."""
    sizes = [shape.numel() for shape in layout.shapes.values()]
    starts = dict(zip(layout.shapes, itertools.accumulate(sizes, initial=0), strict=False))
    return [
        (Columns(starts[weight], layout.shapes[weight][1]), None if bias is None else Columns(starts[bias], 1))
        for weight, bias in network.layers
    ]


def perceptron(skeleton: Skeleton) -> Perceptron | None:
    """The network as a perceptron; None if it is anything else. Its graph has one chain of layers."""
    graph, layers = skeleton.graph(), dict(skeleton.network.named_modules(remove_duplicate=False))
    chain: list[tuple[str, nn.Module]] = []
    for node in graph.nodes:
        if node.op == "call_module" and node.args and isinstance(node.args[0], fx.Node) and len(node.users) == 1:
            chain.append((str(node.target), layers[str(node.target)]))
        elif node.op not in ("placeholder", "output"):
            return None
    chain = [entry for entry in chain if type(entry[1]) is not nn.Identity]
    first = chain[0][1] if chain else None
    flattens = type(first) is nn.Flatten and first.end_dim == -1
    chain = chain[1:] if flattens else chain
    linear = [(name, layer) for name, layer in chain[::2] if type(layer) is nn.Linear]
    alternate = len(chain) % 2 == 1 and len(linear) == len(chain[::2])
    if not alternate or not all(type(layer) is nn.ReLU for _, layer in chain[1::2]):
        return None
    if any(layer.weight[0].numel() > LARGEST for _, layer in linear):
        return None
    params = tuple((f"{name}.weight", None if layer.bias is None else f"{name}.bias") for name, layer in linear)
    names = [name for pair in params for name in pair if name is not None]
    shapes = getattr(skeleton.network, SIZES, ())
    return Perceptron(params, frozenset(names), flattens, shapes) if len(set(names)) == len(names) else None


class Space:
    """Memory for activations, which a pass takes for as long as its gradient may be asked for."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], Tensor] = {}
        self._pieces: tuple[Tensor, list[Piece]] | None = None
        self._lock = threading.Lock()

    def take(self, sizes: list[int], like: Tensor) -> "Taken":
        """Rows of these lengths, with any content."""
        with self._lock:
            tensors = [self._free.pop((i, size, like.dtype), None) for i, size in enumerate(sizes)]
        return Taken(self, [like.new_empty(n) if t is None else t for t, n in zip(tensors, sizes, strict=True)])

    def give_back(self, tensors: list[Tensor]) -> None:
        """Memory that the next pass may take; that of passes of other shapes is freed."""
        with self._lock:
            self._free = {(i, len(tensor), tensor.dtype): tensor for i, tensor in enumerate(tensors)}

    def pieces(self, numbers: Tensor, shapes: Sequence[Sizes], layers: int) -> list["Piece"]:
        """Rows by their shapes; rows of padding, whose number is -1, are in none."""
        if self._pieces is not None and torch.equal(self._pieces[0], numbers):
            return self._pieces[1]
        pieces: list[Piece] = []
        for number, sizes in enumerate(shapes):
            rows = (numbers == number).nonzero().flatten()
            if len(rows):
                places = [*range(len(sizes) - 1), layers - 1]
                first, last = int(rows[0]), int(rows[-1])
                neighbours = last - first + 1 == len(rows)
                pieces.append(Piece(slice(first, last + 1) if neighbours else rows, sizes, places))
        self._pieces = numbers.clone(), pieces
        return pieces


class Taken:
    """Memory that is given back when nobody refers to this object."""

    def __init__(self, space: Space, tensors: list[Tensor]) -> None:
        self.space, self.tensors = space, tensors

    def __del__(self) -> None:
        self.space.give_back(self.tensors)


class _Pass(torch.autograd.Function):
    """A perceptron's outputs, and the gradient of the matrix of its weights."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, x: Tensor, network: Perceptron, layout: Layout, blocks: list[Piece]) -> Tensor:
        members, batch = x.shape[:2]
        units = [layout.shapes[weight][0] for weight, _ in network.layers]
        taken = network.space.take([members * width * batch for width in units[:-1]], flat)
        covered = sum(block.count for block in blocks) == members
        outputs = (flat.new_empty if covered else flat.new_zeros)(members, units[-1], batch)
        start, columns = 0, _columns(network, layout)
        for block in blocks:
            count, values = block.count, block.of(x).transpose(1, 2)
            weights, first = block.matrix(flat)
            for (out, inputs), place in zip(block.sizes, block.layers, strict=True):
                weight, bias = columns[place]
                last = place == len(units) - 1
                if not last:
                    target = _piece(taken.tensors[place], start * units[place] * batch, (count, out, batch))
                elif isinstance(block.rows, slice):
                    target = outputs[block.rows]
                else:
                    target = outputs.new_empty(count, out, batch)
                torch.bmm(weight.of(weights, first, (count, out, inputs)), values, out=target)
                if bias is not None:
                    target.add_(bias.of(weights, first, (count, out)).unsqueeze(2))
                values = target if last else target.relu_()
            if not isinstance(block.rows, slice):
                outputs.index_copy_(0, block.rows, values)
            start += count
        ctx.save_for_backward(flat, x, *taken.tensors)
        ctx.network, ctx.layout, ctx.blocks, ctx.taken, ctx.covered = network, layout, blocks, taken, covered
        return outputs.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        flat, x, *hidden = ctx.saved_tensors
        network, layout, batch = ctx.network, ctx.layout, x.shape[1]
        grad, flat.grad = torch.empty_like(flat) if flat.grad is None else flat.grad, None
        if network.shapes:
            grad.zero_()
        units = [layout.shapes[weight][0] for weight, _ in network.layers]
        scratch = _Scratch(flat, ctx.blocks, batch)
        start, columns = 0, _columns(network, layout)
        for block in ctx.blocks:
            count, neighbours = block.count, isinstance(block.rows, slice)
            weights, first = block.matrix(flat)
            into = grad if neighbours else flat.new_zeros(count, flat.shape[1])
            change, inner = block.of(grad_outputs).transpose(1, 2), block.of(x).transpose(1, 2)
            for i in reversed(range(len(block.layers))):
                place, (out, inputs) = block.layers[i], block.sizes[i]
                weight, bias = columns[place]
                if bias is not None:
                    torch.sum(change, 2, out=bias.of(into, first, (count, out)))
                target = weight.of(into, first, (count, out, inputs))
                if i == 0:  # the transposed product is the faster one for few inputs
                    product = torch.bmm(inner, change.transpose(1, 2), out=scratch.product((count, inputs, out)))
                    target.copy_(product.transpose(1, 2))
                    break
                below_place = block.layers[i - 1]
                values = _piece(hidden[below_place], start * units[below_place] * batch, (count, inputs, batch))
                target.copy_(torch.bmm(change, values.transpose(1, 2), out=scratch.product((count, out, inputs))))
                lower = weight.of(weights, first, (count, out, inputs)).transpose(1, 2)
                below = scratch.gradient(i, (count, inputs, batch))
                if out == 1:
                    torch.mul(lower, change, out=below)
                else:
                    torch.bmm(lower, change, out=below)
                change = torch.ops.aten.threshold_backward.grad_input(below, values, 0, grad_input=below)
            if not neighbours:
                grad.index_copy_(0, block.rows, into)
            start += count
        return grad, None, None, None, None


class _Scratch:
    """Memory for a block: for the gradient of a weight, and for those of two neighbouring layers' activations."""

    def __init__(self, like: Tensor, blocks: Sequence[Piece], batch: int) -> None:
        units = max(block.count * max(out for out, _ in block.sizes) for block in blocks)
        self.halves = [like.new_empty(units * batch) for _ in range(2)]
        self.of_weight = like.new_empty(
            max(block.count * out * inputs for block in blocks for out, inputs in block.sizes)
        )

    def gradient(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        """A tensor with any content, in other memory than that of the neighbouring layers."""
        return _piece(self.halves[layer % 2], 0, shape)

    def product(self, shape: tuple[int, int, int]) -> Tensor:
        """A tensor with any content."""
        return _piece(self.of_weight, 0, shape)


def _piece(memory: Tensor, start: int, shape: tuple[int, int, int]) -> Tensor:
    """A tensor within a row of memory."""
    return memory[start : start + shape[0] * shape[1] * shape[2]].view(shape)

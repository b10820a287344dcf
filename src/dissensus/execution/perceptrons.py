"""Training passes of perceptrons with ReLU on a CPU: blocks of members that fit into the cache, forward and backward.

Autograd would keep and create matrices of all members' activations, layer by layer, which travel through the main
memory. Here the gradient is written where it belongs in the matrix of all weights, activations are ``[M, units, B]``,
which suits small products, and their memory is used again in the next step.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable

from dissensus.execution.skeleton import Skeleton
from dissensus.execution.weights import Layout, Packed, Weights

BLOCK = 2**17
"""Activations of a layer that are computed at once: half a megabyte in float32."""
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
        return weights.layout.shapes.keys() == self.names and (self.flattens or x.ndim == 3)

    def run(self, weights: Packed, x: Tensor) -> Tensor:
        """Outputs ``[M, B, C]`` of inputs ``[M, B, ...]``."""
        return _Pass.apply(weights.flat, x.flatten(2) if self.flattens else x, self, weights.layout)


def perceptron(skeleton: Skeleton) -> Perceptron | None:
    """The network as a perceptron; None if it is anything else. Its graph has one chain of layers."""
    graph, layers = skeleton.trace(), dict(skeleton.network.named_modules(remove_duplicate=False))
    chain: list[tuple[str, nn.Module]] = []
    for node in graph.nodes:
        if node.op == "call_module" and node.args and isinstance(node.args[0], fx.Node) and len(node.users) == 1:
            chain.append((str(node.target), layers[str(node.target)]))
        elif node.op not in ("placeholder", "output"):
            return None
    chain = [entry for entry in chain if type(entry[1]) is not nn.Identity]
    flattens = bool(chain) and type(chain[0][1]) is nn.Flatten
    chain = chain[1:] if flattens else chain
    linear = [(name, layer) for name, layer in chain[::2] if type(layer) is nn.Linear]
    alternate = len(chain) % 2 == 1 and len(linear) == len(chain[::2])
    if not alternate or not all(type(layer) is nn.ReLU for _, layer in chain[1::2]):
        return None
    if any(layer.weight[0].numel() > LARGEST for _, layer in linear):
        return None
    params = tuple((f"{name}.weight", None if layer.bias is None else f"{name}.bias") for name, layer in linear)
    names = [name for pair in params for name in pair if name is not None]
    return Perceptron(params, frozenset(names), flattens) if len(set(names)) == len(names) else None


class Space:
    """Memory for activations, which a pass takes for as long as its gradient may be asked for."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], Tensor] = {}
        self._lock = threading.Lock()

    def take(self, shapes: list[tuple[int, ...]], like: Tensor) -> "Taken":
        """Tensors of these shapes, with any content."""
        with self._lock:
            tensors = [self._free.pop((i, shape, like.dtype), None) for i, shape in enumerate(shapes)]
        return Taken(self, [like.new_empty(s) if t is None else t for t, s in zip(tensors, shapes, strict=True)])

    def give_back(self, tensors: list[Tensor]) -> None:
        """Memory that the next pass may take; that of passes of other shapes is freed."""
        with self._lock:
            self._free = {(i, tuple(tensor.shape), tensor.dtype): tensor for i, tensor in enumerate(tensors)}


class Taken:
    """Memory that is given back when nobody refers to this object."""

    def __init__(self, space: Space, tensors: list[Tensor]) -> None:
        self.space, self.tensors = space, tensors

    def __del__(self) -> None:
        self.space.give_back(self.tensors)


class _Pass(torch.autograd.Function):
    """A perceptron's outputs, and the gradient of the matrix of its weights."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, x: Tensor, network: Perceptron, layout: Layout) -> Tensor:
        members, batch = x.shape[:2]
        widths = [layout.shapes[weight][0] for weight, _ in network.layers]
        taken = network.space.take([(members, width, batch) for width in widths[:-1]], flat)
        outputs = flat.new_empty(members, widths[-1], batch)
        for block in _blocks(members, batch * max(widths)):
            values = x[block].transpose(1, 2)
            views = layout.views(flat[block])
            for i, (weight, bias) in enumerate(network.layers):
                last = i == len(widths) - 1
                target = (outputs if last else taken.tensors[i])[block]
                torch.bmm(views[weight], values, out=target)
                if bias is not None:
                    target.add_(views[bias].unsqueeze(2))
                values = target if last else target.relu_()
        ctx.save_for_backward(flat, x, *taken.tensors)
        ctx.network, ctx.layout, ctx.taken = network, layout, taken
        return outputs.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        flat, x, *hidden = ctx.saved_tensors
        network, layout = ctx.network, ctx.layout
        grad, flat.grad = torch.empty_like(flat) if flat.grad is None else flat.grad, None
        batch, widths = x.shape[1], [layout.shapes[weight][0] for weight, _ in network.layers]
        blocks = _blocks(len(x), batch * max(widths))
        size = len(x[blocks[0]])
        scratch = _Scratch(flat, size, [widths[i] * batch for i in range(len(widths) - 1)])
        product = flat.new_empty(size * max(layout.shapes[weight].numel() for weight, _ in network.layers))
        for block in blocks:
            views, into = layout.views(flat[block]), layout.views(grad[block])
            change = grad_outputs[block].transpose(1, 2)
            count = len(change)
            for i in reversed(range(len(widths))):
                weight, bias = network.layers[i]
                if bias is not None:
                    torch.sum(change, 2, out=into[bias])
                values = x[block].transpose(1, 2) if i == 0 else hidden[i - 1][block]
                shape = layout.shapes[weight]
                own = product[: count * shape.numel()]
                if i == 0:  # the transposed product is the faster one for few inputs
                    torch.bmm(values, change.transpose(1, 2), out=own.view(count, shape[1], shape[0]))
                    into[weight].copy_(own.view(count, shape[1], shape[0]).transpose(1, 2))
                    break
                torch.bmm(change, values.transpose(1, 2), out=own.view(count, *shape))
                into[weight].copy_(own.view(count, *shape))
                lower, below = views[weight].transpose(1, 2), scratch.of(i, count, widths[i - 1], batch)
                if widths[i] == 1:
                    torch.mul(lower, change, out=below)
                else:
                    torch.bmm(lower, change, out=below)
                change = torch.ops.aten.threshold_backward.grad_input(below, values, 0, grad_input=below)
        return grad, None, None, None


class _Scratch:
    """Memory for the gradients of activations of a block: that of one layer, and that of the layer above it."""

    def __init__(self, like: Tensor, members: int, sizes: list[int]) -> None:
        self.halves = [like.new_empty(members * max(sizes, default=0)) for _ in range(2)]

    def of(self, layer: int, members: int, units: int, batch: int) -> Tensor:
        """A tensor ``[members, units, batch]`` with any content, other memory than that of the neighbouring layers."""
        return self.halves[layer % 2][: members * units * batch].view(members, units, batch)


def _blocks(members: int, activations: int) -> list[slice]:
    """Members that are computed at once, by the number of activations of each in the widest layer."""
    size = max(1, BLOCK // activations)
    return [slice(start, start + size) for start in range(0, members, size)]

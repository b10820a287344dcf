"""Networks of several widths and depths as rows of one stack, padded with units that are always zero.

A unit whose weights, in and out, are zero has the activation f(0) = 0 and gets a gradient of exactly zero, so it stays
what it is. A missing layer is the identity, which a ReLU leaves alone: relu(I · relu(x)) = relu(x). The gradient of
such a layer is not zero, so training must hold it still (`Held`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.dropout import UNITS, KeyedDropout
from dissensus.execution.batched import unsupported
from dissensus.execution.perceptrons import LARGEST, SHAPE, SIZES
from dissensus.execution.skeleton import Unsupported
from dissensus.execution.stacked import StackedMembers, attached


class Unpaddable(Exception):
    """Networks that cannot be padded to one shape; the message says why in one line."""


@dataclass(frozen=True)
class Layers:
    """A network of linear layers, with functions between them that keep zeros."""

    names: tuple[str, ...]
    """The linear layers, in order."""
    sizes: tuple[tuple[int, int], ...]
    """``(outputs, inputs)`` of each."""
    biases: tuple[bool, ...]
    first: tuple[str, ...]
    """What comes before the first linear layer, in words."""
    after: tuple[tuple[str, ...], ...]
    """What comes after each linear layer."""
    dropouts: tuple[tuple[str, int], ...]
    """Layers that drop units, and the number of the linear layer before each."""

    @property
    def numbers(self) -> int:
        """The number of weights and biases."""
        return sum(out * (inputs + bias) for (out, inputs), bias in zip(self.sizes, self.biases, strict=True))

    @property
    def is_perceptron(self) -> bool:
        """Whether there is a ReLU alone between every two layers, and none of them is large."""
        small = all(inputs * out <= LARGEST for out, inputs in self.sizes)
        return (
            small and not self.after[-1] and all(len(words) == 1 and set(words) <= _RELU for words in self.after[:-1])
        )


def layers_of(body: StackedMembers) -> Layers:
    """The linear layers of a body's network; `Unpaddable` where it has other layers, or functions with f(0) ≠ 0."""
    network = body.network
    if body.skeleton.shared:
        raise Unpaddable("members share weights")
    if body.output is not None:
        raise Unpaddable("the output is chosen from several")
    try:
        graph = body.skeleton.graph()
    except Unsupported as reason:
        raise Unpaddable(str(reason)) from reason
    reason = unsupported(network, graph)
    if reason:
        raise Unpaddable(reason)
    modules = dict(network.named_modules(remove_duplicate=False))
    linear: list[tuple[str, nn.Linear]] = []
    words: list[list[str]] = [[]]
    dropouts: list[tuple[str, int]] = []
    for node in graph.nodes:
        if node.op == "output":
            break
        if len(node.users) != 1 or len(node.all_input_nodes) > 1:
            raise Unpaddable(f"{node.name} is used several times, or has several inputs")
        if node.op == "call_function":
            options = {name: value for name, value in node.kwargs.items() if name != "inplace"}
            word = f"{getattr(node.target, '__name__', node.target)}{node.args[1:]}{options}"
            _check_zero(lambda x, node=node, options=options: node.target(x, *node.args[1:], **options), node)
            words[-1].append(word)
        elif node.op == "call_module":
            name, layer = str(node.target), modules[str(node.target)]
            if type(layer) is nn.Linear:
                linear.append((name, layer))
                words.append([])
            elif isinstance(layer, KeyedDropout):
                if layer.channel_axes:
                    raise Unpaddable(f"layer {name} drops channels")
                dropouts.append((name, len(linear) - 1))
                words[-1].append(f"dropout {layer.p}")
            elif isinstance(layer, nn.Flatten) and not linear:
                words[-1].append(f"Flatten({layer.extra_repr()})")
            elif isinstance(layer, nn.Flatten | nn.Conv2d) or "Pool" in type(layer).__name__:
                raise Unpaddable(f"layer {name} ({type(layer).__name__}) has no padded form")
            elif type(layer) is not nn.Identity:
                _check_zero(layer, f"layer {name} ({type(layer).__name__})")
                extra = ", ".join(part for part in layer.extra_repr().split(", ") if not part.startswith("inplace"))
                words[-1].append(f"{type(layer).__name__}({extra})")
    names = [name for name, _ in linear]
    if not names or len(set(names)) < len(names):
        raise Unpaddable("it has no linear layer, or uses one twice")
    parameters = [f"{name}.{key}" for name, layer in linear for key in layer._parameters]
    known = [*parameters, *(f"{name}.{key}" for name, _ in dropouts for key in ("key", "step"))]
    others = [name for name in body.tensors() if name not in known]
    if others:
        raise Unpaddable(f"tensor {others[0]!r} belongs to no linear layer")
    if len(body.trainable()) != sum(layer.bias is not None for _, layer in linear) + len(linear):
        raise Unpaddable("parameters are frozen, or shared between layers")
    return Layers(
        names=tuple(names),
        sizes=tuple((layer.weight.shape[-2], layer.weight.shape[-1]) for _, layer in linear),
        biases=tuple(layer.bias is not None for _, layer in linear),
        first=tuple(words[0]),
        after=tuple(map(tuple, words[1:])),
        dropouts=tuple(dropouts),
    )


def _check_zero(function: Any, name: object) -> None:
    """Refuse a function with f(0) ≠ 0, or whose derivative there is not finite."""
    zero = torch.zeros(1, requires_grad=True)
    with torch.enable_grad():
        value = function(zero.clone())
        slope = torch.autograd.grad(value.sum(), zero, allow_unused=True)[0]
    if bool(value != 0) or (slope is not None and not bool(slope.isfinite())):
        raise Unpaddable(f"{name} has f(0) ≠ 0, so units that are not there would count")


@dataclass(frozen=True)
class Frame:
    """The shape to which networks are padded."""

    sizes: tuple[tuple[int, int], ...]
    biases: tuple[bool, ...]
    deepest: int
    """The number of the network that has all layers."""

    @property
    def numbers(self) -> int:
        """The number of weights and biases."""
        return sum(out * (inputs + bias) for (out, inputs), bias in zip(self.sizes, self.biases, strict=True))

    @property
    def units(self) -> int:
        """The number of units of all layers."""
        return sum(out for out, _ in self.sizes)


def frame_of(networks: Sequence[Layers]) -> Frame:
    """The smallest shape that holds all networks; `Unpaddable` where they differ in more than widths and depth."""
    depth, deepest = max((len(network.sizes), -number) for number, network in enumerate(networks))
    deepest = -deepest
    whole = networks[deepest]
    widths = [out for out, _ in whole.sizes]
    for network in networks:
        own = len(network.sizes)
        if network.first != whole.first or network.after[-1] != whole.after[-1]:
            raise Unpaddable("networks differ before their first, or after their last linear layer")
        if network.sizes[0][1] != whole.sizes[0][1] or network.sizes[-1][0] != whole.sizes[-1][0]:
            raise Unpaddable("networks differ in their numbers of inputs or outputs")
        if network.after[: own - 1] != whole.after[: own - 1]:
            raise Unpaddable("networks differ between their layers")
        if network.biases[: own - 1] != whole.biases[: own - 1] or network.biases[-1] != whole.biases[-1]:
            raise Unpaddable("some networks have biases where others have none")
        if own < depth:
            following = {layer for words in whole.after[own - 2 : -1] for layer in (words or ("nothing",))}
            if own < 2 or following - _RELU:
                raise Unpaddable("depths differ, and not every layer is followed by a ReLU alone")
        for place, (out, _) in enumerate(network.sizes[:-1]):
            widths[place] = max(widths[place], out)
        for place in range(own - 1, depth - 1):
            widths[place] = max(widths[place], network.sizes[own - 2][0])
    inputs = [whole.sizes[0][1], *widths[:-1]]
    return Frame(tuple(zip(widths, inputs, strict=True)), whole.biases, deepest)


_RELU = {"ReLU()", "relu(){}"}


def _places(network: Layers, frame: Frame) -> list[int]:
    """The place in the frame of each linear layer of a network: the last one is last."""
    return [*range(len(network.sizes) - 1), len(frame.sizes) - 1]


@dataclass(frozen=True)
class Held:
    """Rows of a linear layer that are the identity: their gradient is zero, and weight decay leaves them alone."""

    names: tuple[str, ...]
    """Parameters of the layer."""
    rows: Tensor
    """Which rows, bool ``[G]``."""
    widths: Tensor
    """The width of the identity in each row ``[G]``; 0 in others."""

    def values(self, like: Tensor) -> Tensor:
        """What a parameter of the layer holds in its rows, ``[G, ...]``."""
        if like.ndim == 2:
            return torch.zeros_like(like)
        units = torch.arange(like.shape[1], device=like.device)
        return torch.eye(*like.shape[1:], dtype=like.dtype, device=like.device) * (
            units < self.widths.to(like.device).unsqueeze(1)
        ).unsqueeze(2)

    def select(self, rows: Tensor) -> "Held":
        """Some of the rows."""
        rows = rows.to(self.rows.device)
        return Held(self.names, self.rows[rows], self.widths[rows])


def padded(
    bodies: Sequence[StackedMembers], networks: Sequence[Layers], rows: Sequence[Tensor], count: int
) -> tuple[StackedMembers, list[Held]]:
    """Members of several bodies as rows of one, and the layers that must be held still.

    Args:
        bodies: Members of one shape each.
        networks: Their layers.
        rows: The rows that the members of each body get.
        count: The number of all rows. Those that nobody gets are zero.
    """
    frame = frame_of(networks)
    whole = networks[frame.deepest]
    network = bodies[frame.deepest].member(0)
    layers = dict(network.named_modules())
    for name, (out, inputs) in zip(whole.names, frame.sizes, strict=True):
        layer: Any = layers[name]
        layer.out_features, layer.in_features = out, inputs
    like = next(iter(bodies[0].tensors().values()))
    stacked: dict[str, Tensor] = {}
    for name, (out, inputs), bias in zip(whole.names, frame.sizes, frame.biases, strict=True):
        stacked[f"{name}.weight"] = like.new_zeros(count, out, inputs)
        if bias:
            stacked[f"{name}.bias"] = like.new_zeros(count, out)
    held: dict[int, Held] = {}
    for body, own, places in zip(bodies, networks, rows, strict=True):
        tensors = body.tensors()
        for j, place in enumerate(_places(own, frame)):
            for key in ("weight", "bias") if own.biases[j] else ("weight",):
                tensor = tensors[f"{own.names[j]}.{key}"].detach()
                into = stacked[f"{whole.names[place]}.{key}"]
                _part(into, tensor.shape[1:])[places] = tensor
        width = own.sizes[-2][0] if len(own.sizes) > 1 else 0
        for place in range(len(own.sizes) - 1, len(frame.sizes) - 1):
            if place not in held:
                names = tuple(f"{whole.names[place]}.{key}" for key in ("weight", "bias")[: 1 + frame.biases[place]])
                held[place] = Held(names, torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64))
            held[place].rows[places], held[place].widths[places] = True, width
            units = torch.arange(width)
            stacked[f"{whole.names[place]}.weight"][places.unsqueeze(1), units, units] = 1
    for name, place in whole.dropouts:
        for key in ("key", "step"):
            stacked[f"{name}.{key}"] = torch.zeros(count, dtype=torch.int64)
        if 0 <= place < len(frame.sizes) - 1:
            units = torch.full((count,), frame.sizes[place][0])
            for own, places in zip(networks, rows, strict=True):
                units[places] = own.sizes[place][0]
            layers[name].register_buffer(UNITS, units[0], persistent=False)
            stacked[f"{name}.{UNITS}"] = units
    setattr(network, SIZES, tuple(dict.fromkeys(own.sizes for own in networks)))
    shapes = torch.full((count,), -1)
    for own, places in zip(networks, rows, strict=True):
        shapes[places] = getattr(network, SIZES).index(own.sizes)
    network.register_buffer(SHAPE, shapes[0], persistent=False)
    stacked[SHAPE] = shapes
    return StackedMembers(attached(network, stacked)).train(bodies[0].training), list(held.values())


def unpadded(
    body: StackedMembers, frame: Frame, whole: Layers, rows: Tensor, own: Layers, single: StackedMembers
) -> StackedMembers:
    """Some rows of a padded body as members of their own shape, which ``single`` has."""
    result, tensors = single.subset([0] * len(rows)), body.tensors()
    targets = result.tensors()
    with torch.no_grad():
        for j, place in enumerate(_places(own, frame)):
            for key in ("weight", "bias") if own.biases[j] else ("weight",):
                target = targets[f"{own.names[j]}.{key}"]
                target.copy_(_part(tensors[f"{whole.names[place]}.{key}"], target.shape[1:])[rows])
        for (name, _), (in_whole, _) in zip(own.dropouts, whole.dropouts, strict=True):
            for key in ("key", "step"):
                targets[f"{name}.{key}"].copy_(tensors[f"{in_whole}.{key}"][rows])
    return result


def _part(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The first units of a stacked weight or bias, as a view."""
    for axis, size in enumerate(shape, 1):
        tensor = tensor.narrow(axis, 0, size)
    return tensor

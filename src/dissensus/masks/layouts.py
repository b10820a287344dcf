"""Layouts of the channels of a layer in later tensors, through all ways to flatten, squeeze and pool.

A mask can be cut out of a network only where channels can be traced from the layer that makes them to the layers that
take them. Sizes that are written as numbers would be wrong without some of the channels, so `channel_layouts` rewrites
every reshaping that it understands in a form that holds for any number of channels and examples.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Node

from dissensus.dropout import KeyedDropout
from dissensus.masks.layer import Masksembles, Tile

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED = (nn.Linear, *CONVOLUTIONS)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, KeyedDropout)
ADAPTIVE = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
POOLS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    *ADAPTIVE,
)
ACTIVATIONS = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Tanh,
    nn.Hardswish,
    nn.Mish,
)
"""All of them map 0 to 0, so a channel that is masked before them is masked after them."""
ACTIVATION_CALLS = (F.relu, torch.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.elu, torch.tanh, F.hardswish)
ACTIVATION_METHODS = ("relu", "relu_", "tanh")
_ADAPTIVE_CALLS = (
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
    F.adaptive_max_pool1d,
    F.adaptive_max_pool2d,
    F.adaptive_max_pool3d,
)
POOL_CALLS = (
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    F.avg_pool1d,
    F.avg_pool2d,
    F.avg_pool3d,
    *_ADAPTIVE_CALLS,
)
_SAME = (*ACTIVATIONS, *DROPOUTS, *NORMS, nn.Identity, Masksembles, Tile)
_SAME_METHODS = (*ACTIVATION_METHODS, "contiguous", "clone", "float", "double")
_REDUCING: tuple[Any, ...] = (torch.mean, torch.sum, torch.amax, "mean", "sum", "amax")
_RESHAPING: tuple[Any, ...] = (torch.reshape, "view", "reshape")
_SHAPED: tuple[Any, ...] = (*_RESHAPING, torch.unflatten, "unflatten", "expand")
"""Steps that may take a number of channels as a size, which then is the number of remaining channels."""
_ARITHMETIC = (operator.mul, operator.floordiv, operator.getitem)
_AXES = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}


class ChannelLayout(NamedTuple):
    """ChannelLayout of a layer's channels in a tensor; examples are on axis 0."""

    width: int
    """Number of channels."""
    last: bool
    """Whether channels are on the last axis, as after a linear layer; otherwise they are on axis 1."""
    axes: int | None
    """Number of axes of the tensor; None where it is unknown."""
    flat: bool = False
    """Whether channels share their axis with flattened positions."""
    single: bool = False
    """Whether all axes after the channels have size one."""


def layer_of(graph: fx.GraphModule, node: Node) -> nn.Module | None:
    """The layer that a node calls."""
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def input_of(node: Node) -> Node | None:
    """The tensor that a step takes."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, Node) else None


def channel_layouts(graph: fx.GraphModule) -> dict[Node, ChannelLayout]:
    """Layouts of all tensors whose channels are known. Reshaping steps are rewritten in place."""
    layouts: dict[Node, ChannelLayout] = {}
    for node in list(graph.graph.nodes):
        layer = layer_of(graph, node)
        before = input_of(node)
        if isinstance(layer, WEIGHTED):
            known = layouts.get(before) if before is not None else None
            axes = _AXES.get(type(layer), known.axes if known else None)
            layouts[node] = ChannelLayout(int(layer.weight.shape[0]), isinstance(layer, nn.Linear), axes)
        elif before in layouts:
            step = _Step(graph, node, layer, before, layouts)
            after = step.layout()
            if after is not None:
                layouts[step.node] = after
    _drop_unused(graph)
    return layouts


class _Step:
    """A step after a tensor of known layout."""

    def __init__(
        self,
        graph: fx.GraphModule,
        node: Node,
        layer: nn.Module | None,
        before: Node,
        layouts: dict[Node, ChannelLayout],
    ) -> None:
        self.graph, self.node, self.layer, self.before, self.layouts = graph, node, layer, before, layouts
        self.old = layouts[before]

    def layout(self) -> ChannelLayout | None:
        """ChannelLayout after the step; None where channels cannot be traced further."""
        node, layer, old = self.node, self.layer, self.old
        if keeps(self.graph, node):
            return old
        if pools(self.graph, node):
            return self._pooled()
        if isinstance(layer, nn.ZeroPad2d):
            return None if old.last or old.flat else old._replace(single=False)
        if isinstance(layer, nn.Flatten):
            return self._flattened(layer.start_dim, layer.end_dim)
        if isinstance(layer, nn.Unflatten):
            sizes: Any = layer.unflattened_size
            return self._unflattened(layer.dim, sizes) if isinstance(layer.dim, int) else None
        if self._is(torch.flatten, "flatten"):
            return self._flattened(self._argument(1, "start_dim", 0), self._argument(2, "end_dim", -1))
        if self._is(torch.unflatten, "unflatten"):
            return self._unflattened(self._argument(1, "dim", None), self._argument(2, "sizes", None))
        if self._is(*_RESHAPING):
            return self._reshaped()
        if self._is(torch.squeeze, "squeeze"):
            return self._squeezed()
        if self._is(*_REDUCING):
            return self._reduced()
        return self._taken() if node.target is operator.getitem else None

    def _is(self, *targets: Any) -> bool:
        return self.node.op in ("call_function", "call_method") and self.node.target in targets

    def _argument(self, place: int, name: str, otherwise: Any) -> Any:
        args = self.node.args
        return args[place] if len(args) > place else self.node.kwargs.get(name, otherwise)

    def _axis(self, axis: Any) -> int | None:
        """An axis counted from the front; None where it is unknown."""
        if not isinstance(axis, int) or (axis < 0 and self.old.axes is None):
            return None
        return axis if axis >= 0 else axis + (self.old.axes or 0)

    @property
    def _by_channel(self) -> bool:
        """Whether axis 1 holds the channels and nothing else."""
        return not self.old.last and not self.old.flat

    def _pooled(self) -> ChannelLayout | None:
        if not self._by_channel:
            return None
        size = getattr(self.layer, "output_size", None) if self.layer else self._argument(1, "output_size", None)
        adaptive = isinstance(self.layer, ADAPTIVE) or self.node.target in _ADAPTIVE_CALLS
        to_one = adaptive and (size == 1 or (isinstance(size, tuple | list) and set(size) == {1}))
        return self.old._replace(single=self.old.single or to_one)

    def _flattened(self, start: Any, end: Any) -> ChannelLayout | None:
        old = self.old
        first = self._axis(start)
        whole = end == -1 or (old.axes is not None and self._axis(end) == old.axes - 1)
        if first is None or first < 1 or not whole:
            return None
        if first > 1:
            return old._replace(axes=first + 1) if self._by_channel and (old.axes or 0) > first else None
        if self.layer is None:
            self._replace(torch.flatten, (self.before, 1))
        return self._flat()

    def _flat(self) -> ChannelLayout:
        """Every example in one row."""
        alone = self.old.axes == 2 or (self.old.single and not self.old.last)
        return self.old._replace(axes=2, flat=self.old.flat or not alone, single=False)

    def _unflattened(self, axis: Any, sizes: Any) -> ChannelLayout | None:
        old, place = self.old, self._axis(axis)
        if old.last or place is None or not isinstance(sizes, tuple | list):
            return None
        if place > 1:
            return old._replace(axes=old.axes + len(sizes) - 1) if self._by_channel and old.axes else None
        first, *rest = sizes
        if place != 1 or old.axes != 2 or -1 in rest or (first not in (-1, old.width) and not self._reads(first, 1)):
            return None
        self._replace(torch.unflatten, (self.before, 1, (-1, *rest)))
        return old._replace(axes=1 + len(sizes), flat=False, single=set(rest) == {1})

    def _reshaped(self) -> ChannelLayout | None:
        old, node = self.old, self.node
        shape: Any = node.args[1:] if len(node.args) > 1 else (node.kwargs.get("shape", node.kwargs.get("size", ())),)
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else list(shape)
        if len(sizes) < 2 or not all(isinstance(size, int | Node) for size in sizes):
            return None
        rows, columns, *rest = sizes
        certain = self._is_rows(rows)
        if not certain and not isinstance(rows, int):
            return None
        if not rest:
            if not certain and columns != -1 and not self._is_all(columns):
                return None
            self._replace(torch.flatten, (self.before, 1))
            return self._flat()
        if old.last:
            return None
        if old.flat or old.axes == 2:
            return self._unflattened(1, (columns, *rest))
        if columns != old.width and not self._reads(columns, 1):
            return None
        if node.target == "reshape" and self._reads(rows, 0) and self._reads(columns, 1):
            return old._replace(axes=len(sizes), single=set(rest) == {1})
        with self.graph.graph.inserting_before(node):
            kept = [self.graph.graph.call_method("size", (self.before, axis)) for axis in (0, 1)]
        self._replace("reshape", (self.before, (*kept, *rest)))
        return old._replace(axes=len(sizes), single=set(rest) == {1})

    def _is_rows(self, size: Any) -> bool:
        """Whether a size is certainly the number of examples."""
        source = extent(size)
        return source is not None and source[1] == 0 and (source[0] in self.layouts or source[0].op == "placeholder")

    def _is_all(self, size: Any) -> bool:
        """Whether a size is that of a whole example: a number that fits, or the product of its axes."""
        if isinstance(size, int):
            more = size % self.old.width == 0 and (size > self.old.width or not self.old.last or self.old.axes == 2)
            return size > 0 and more
        axes = sorted(self._multiplied(size))
        return self.old.axes is not None and axes == list(range(1, self.old.axes))

    def _multiplied(self, size: Any) -> Iterator[int]:
        """The axes of the tensor whose sizes a number is the product of; −1 for anything else."""
        if isinstance(size, Node) and size.target is operator.mul:
            for part in size.args:
                yield from self._multiplied(part)
            return
        source = extent(size)
        axis = self._axis(source[1]) if source is not None and source[0] is self.before else None
        yield -1 if axis is None else axis

    def _reads(self, size: Any, axis: int) -> bool:
        source = extent(size)
        return source is not None and source[0] is self.before and self._axis(source[1]) == axis

    def _squeezed(self) -> ChannelLayout | None:
        old = self.old
        dim = self._argument(1, "dim", None)
        if not self._by_channel or old.axes is None:
            return None
        if dim is None:
            takers = [layer_of(self.graph, user) for user in self.node.users]
            fits = [isinstance(taker, nn.Linear) and taker.in_features == old.width for taker in takers]
            if not old.single and not (fits and all(fits)):
                return None
            self._replace(torch.flatten, (self.before, 1))  # which is right for a batch of one example
            return old._replace(axes=2, single=False)
        axes = {self._axis(axis) for axis in (dim if isinstance(dim, tuple | list) else (dim,))}
        if not all(axis is not None and axis > 1 for axis in axes):
            return None
        return old._replace(axes=old.axes - len(axes))

    def _reduced(self) -> ChannelLayout | None:
        old = self.old
        dim = self._argument(1, "dim", self.node.kwargs.get("axis"))
        kept = self._argument(2, "keepdim", False)
        if old.axes is None or old.flat or dim is None or not isinstance(kept, bool):
            return None
        axes = {self._axis(axis) for axis in (dim if isinstance(dim, tuple | list) else (dim,))}
        others = set(range(1, old.axes - 1)) if old.last else set(range(2, old.axes))
        if not axes or not axes <= others:
            return None
        if kept:
            return old._replace(single=old.single or (not old.last and axes == others))
        return old._replace(axes=old.axes - len(axes))

    def _taken(self) -> ChannelLayout | None:
        """Indices of the axes after the channels: ``x[:, :, 0, 0]``."""
        which = self.node.args[1]
        if not self._by_channel or self.old.axes is None or not isinstance(which, tuple):
            return None
        if which and which[0] is Ellipsis:
            behind = which[1:]
            fits = len(behind) <= self.old.axes - 2
        else:
            behind = which[2:]
            fits = which[:2] == (slice(None), slice(None))
        if not fits or not all(isinstance(index, int | slice) for index in behind):
            return None
        return self.old._replace(axes=self.old.axes - sum(isinstance(index, int) for index in behind))

    def _replace(self, target: Any, args: tuple[Any, ...]) -> None:
        """Replace this step by another one."""
        if self.node.target == target and self.node.args == args and not self.node.kwargs:
            return
        graph = self.graph.graph
        with graph.inserting_before(self.node):
            made = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args)
        self.node.replace_all_uses_with(made)
        graph.erase_node(self.node)
        self.node = made


def keeps(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a step keeps a tensor's axes: activations, dropout, batch norm and others."""
    if node.op == "call_function":
        return node.target in (*ACTIVATION_CALLS, F.dropout)
    if node.op == "call_method":
        return node.target in _SAME_METHODS
    return isinstance(layer_of(graph, node), _SAME)


def pools(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a step pools over the axes after the channels."""
    return isinstance(layer_of(graph, node), POOLS) or (node.op == "call_function" and node.target in POOL_CALLS)


def extent(size: Any) -> tuple[Node, int] | None:
    """The tensor and the axis whose size a number is; None for any other number."""
    if not isinstance(size, Node):
        return None
    if size.op == "call_function" and size.target is len:
        source, axis = size.args[0], 0
    elif size.op == "call_method" and size.target == "size" and len(size.args) + len(size.kwargs) == 2:
        source, axis = size.args[0], size.args[1] if len(size.args) > 1 else size.kwargs.get("dim")
    elif size.target is operator.getitem and _is_shape(size.args[0]):
        (source, *_), axis = size.args[0].args, size.args[1]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]  # a node, as `_is_shape` has checked
    else:
        return None
    return (source, axis) if isinstance(source, Node) and isinstance(axis, int) else None


def _is_shape(value: Any) -> bool:
    if not isinstance(value, Node):
        return False
    whole = value.op == "call_method" and value.target == "size" and len(value.args) + len(value.kwargs) == 1
    return whole or (value.target is getattr and value.args[1] == "shape")


def _is_count(value: Node) -> bool:
    return value.target == "numel" or value.target is torch.numel


def harmless(node: Node, layout: ChannelLayout) -> bool:
    """Whether a step reads only a tensor's shape, and nothing that depends on the number of channels.

    It may read the number of channels where that determines only the sizes of other tensors.
    """
    source = extent(node)
    if source is not None:
        axis = source[1] if source[1] >= 0 or layout.axes is None else source[1] + layout.axes
        is_channels = axis in (-1, (layout.axes or 0) - 1) if layout.last else axis == 1
        return not (is_channels or axis < 0) or _for_sizes(node)
    if node.target is getattr and node.args[1] in ("dtype", "device", "ndim"):
        return True
    if node.op == "call_method" and node.target in ("dim", "ndimension"):
        return True
    if _is_count(node):
        return _for_sizes(node)
    if not _is_shape(node):
        return False
    return all(
        harmless(user, layout) if extent(user) is not None else _is_behind(user, layout) or _for_sizes(user)
        for user in node.users
    )


def _is_behind(node: Node, layout: ChannelLayout) -> bool:
    """Whether a step takes the sizes of axes after the channels from a shape: ``x.shape[2:]``."""
    which = node.args[1] if node.target is operator.getitem else None
    if layout.last or layout.axes is None or not isinstance(which, slice) or not isinstance(which.start, int):
        return False
    return (which.start if which.start >= 0 else which.start + layout.axes) > 1


def _for_sizes(node: Node) -> bool:
    """Whether a number is used only for sizes of other tensors."""
    if node.op == "output":
        return False
    shaped = node.op in ("call_function", "call_method") and node.target in _SHAPED
    if shaped:
        return True
    return bool(node.users) and all(
        _for_sizes(user) if user.target in _ARITHMETIC else user.target in _SHAPED and user.args[0] is not node
        for user in node.users
    )


def _drop_unused(graph: fx.GraphModule) -> None:
    """Remove steps that read shapes for steps that have been rewritten."""
    for node in reversed(list(graph.graph.nodes)):
        read = extent(node) is not None or _is_shape(node) or _is_count(node)
        if (read or node.target in (operator.mul, operator.floordiv)) and not node.users:
            graph.graph.erase_node(node)

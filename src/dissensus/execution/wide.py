"""Members that share weights as batched products: a shared layer is one call on the examples of all members.

The network becomes a list of steps. A value that depends on no member is common: it has no member axis, and is computed
once. All others are ``[M, B, ...]``, or ``[M, ...]`` where they come from weights alone.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from dissensus.calls import NetworkInputs
from dissensus.dropout import KeyedDropout, keyed_layers
from dissensus.execution.aliases import IN_PLACE, is_read_elsewhere, writes
from dissensus.execution.batched import (
    POINTWISE_FUNCTIONS,
    POINTWISE_LAYERS,
    POOLING_LAYERS,
    stacked_batch_norm,
    stacked_convolution,
    stacked_dropout,
    stacked_linear,
)
from dissensus.execution.common import RANDOM, common_layers
from dissensus.execution.common_graph import CommonTracer, is_common, keys_of, name_of
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported
from dissensus.execution.weights import Weights
from dissensus.randomness import GlobalGenerators

Step = Callable[[list[Any]], Any]

ROWWISE_LAYERS: tuple[type[nn.Module], ...] = (
    *POINTWISE_LAYERS,
    *POOLING_LAYERS,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.PReLU,
)
"""Layers that treat every example apart: examples of all members can be one batch."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLING_FUNCTIONS = {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, torch.max_pool2d}
_POINTWISE = {*POINTWISE_FUNCTIONS, operator.truediv, operator.pow, torch.div, torch.pow, torch.abs, torch.sqrt}
_CASTS = {"to", "float", "double", "half", "bfloat16", "type_as"}


class Forms(NamedTuple):
    """Forms that another backend has for some operations."""

    prepare: Callable[[Skeleton, fx.Graph], None]
    """Changes a network's graph, whose nodes know whether their values are common, before steps are made of it."""
    function: Callable[[Skeleton, fx.Node], Callable[..., Tensor] | None]
    """What a node calls with its arguments; None: what it calls here."""


def run_wide(
    skeleton: Skeleton,
    weights: Weights,
    buffers: Tensors,
    x: NetworkInputs,
    per_member: bool,
    forms: Forms | None = None,
) -> Tensor:
    """Run all members; raises `Unsupported` where the network has something that has no such form."""
    if not isinstance(x, Tensor):
        raise Unsupported("its forward pass takes several inputs")
    plan = wide_plan(skeleton, per_member, forms)
    copies = plan.writes is not False and not torch.compiler.is_compiling()
    values: list[Any] = [x.clone() if copies else x]  # the input is the user's
    watched = not (plan.is_known or torch.compiler.is_compiling() or _is_captured(x))
    before = GlobalGenerators.now(x.device) if watched else None
    with skeleton.lending(weights.stacked(), buffers):
        for step, dead in zip(plan.steps, plan.dead, strict=True):
            values.append(step(values))
            for place in dead:
                values[place] = None
    if before is not None:
        if before.drawn_from():
            raise Unsupported("a layer draws random numbers")
        plan.is_known = True
    if copies and not (values[0].is_inference() or is_functorch_wrapped_tensor(values[0])):  # these have no version
        plan.writes = values[0]._version > 0
    outputs = values[-1]
    return outputs.expand(len(weights), *outputs.shape) if plan.is_common else outputs


def _is_captured(x: Tensor) -> bool:
    """Whether a graph records this pass, in which generators cannot be read. A pass outside of it has come before."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Plan:
    """The steps of a network. Each reads earlier values and adds one; the first value is the input."""

    def __init__(self, steps: list[Step], dead: list[list[int]], is_common: bool) -> None:
        self.steps, self.is_common = steps, is_common
        self.dead = dead
        """Values that no step reads after each."""
        self.is_known = False
        """Whether a pass has shown that layers which are not looked into draw no random numbers."""
        self.writes: bool | None = None
        """Whether a layer writes into the input, as the first pass has shown."""


def wide_plan(skeleton: Skeleton, per_member: bool, forms: Forms | None = None) -> _Plan:
    """The plan for a mode, for inputs of all members or one per member; made anew where rates of dropout change."""
    plans = skeleton.once(_new_plans)
    key = (forms, per_member, *((layer.p, layer.training) for layer in keyed_layers(skeleton.network.modules())))
    if key not in plans:
        plans[key] = _made(skeleton, per_member, forms)
    return plans[key]


def _new_plans(skeleton: Skeleton) -> dict[Any, _Plan]:  # noqa: ARG001
    return {}


def _made(skeleton: Skeleton, per_member: bool, forms: Forms | None) -> _Plan:
    if skeleton.output is not None:
        raise Unsupported("its output is chosen from several")
    keys = keys_of(skeleton, skeleton.tensors().values())
    graph = skeleton.trace(CommonTracer(keys, per_member, common_layers(skeleton)))
    if forms is not None:
        forms.prepare(skeleton, graph)
    nodes = list(graph.nodes)
    if sum(node.op == "placeholder" for node in nodes) != 1:
        raise Unsupported("its forward pass takes several inputs")
    maker = _Maker(skeleton, keys, forms)
    for node in nodes[:-1]:
        maker.add(node)
    (result,) = nodes[-1].args
    if not isinstance(result, fx.Node):
        raise Unsupported("it returns more than one tensor")
    maker.steps.append(operator.itemgetter(maker.place[result]))
    last = {before: node for node in nodes for before in node.all_input_nodes}
    dead: list[list[int]] = [[] for _ in maker.steps]
    for before, node in last.items():
        if before.op != "placeholder" and node.op != "output":
            dead[maker.place[node] - 1].append(maker.place[before])
    return _Plan(maker.steps, dead, is_common(result))


class _Maker:
    """Makes steps of nodes."""

    def __init__(self, skeleton: Skeleton, keys: Mapping[str, frozenset[str]], forms: Forms | None) -> None:
        self.skeleton, self.network, self.keys, self.forms = skeleton, skeleton.network, keys, forms
        self.modules = dict(skeleton.network.named_modules(remove_duplicate=False))
        self.steps: list[Step] = []
        self.place: dict[fx.Node, int] = {}

    def add(self, node: fx.Node) -> None:
        """Add the step of a node."""
        if node.op == "placeholder":
            self.place[node] = 0
            return
        if node.op == "get_attr":
            self.steps.append(self._attribute(str(node.target)))
        elif self._writes_into_what_is_read(node):
            raise Unsupported(f"{name_of(node)} writes into what another operation reads")
        elif _writes(node):
            raise Unsupported(f"{name_of(node)} writes into a tensor")
        elif is_common(node):
            self.steps.append(self._called(node, self._function(node)))
        elif self.forms is not None and (function := self.forms.function(self.skeleton, node)) is not None:
            self.steps.append(self._called(node, function))
        elif node.op == "call_module":
            self.steps.append(self._layer(node))
        else:
            self.steps.append(self._called(node, _batched_function(node)))
        self.place[node] = len(self.steps)

    def _writes_into_what_is_read(self, node: fx.Node) -> bool:
        """Whether something else reads what an operation writes into. If not, members get a copy of their own."""
        if node.op == "call_module" and is_common(node):
            return False
        if not writes(node, self.modules):
            return False
        if is_read_elsewhere(node.all_input_nodes[0], self.modules):
            return True
        if node.target in IN_PLACE:
            node.target = IN_PLACE[node.target]
        return False

    def _attribute(self, target: str) -> Step:
        path, _, key = target.rpartition(".")
        layer = self.network.get_submodule(path)
        store = layer._parameters if key in layer._parameters else layer._buffers
        if key not in store:
            raise Unsupported(f"it uses the tensor {target}")
        return lambda values: store[key]  # noqa: ARG005

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        """What a node whose value is common calls, as it is."""
        if node.op == "call_module":
            return self.network.get_submodule(str(node.target))
        if RANDOM.search(name_of(node)) or ("drop" in name_of(node) and self.network.training):
            raise Unsupported(f"{name_of(node)} draws random numbers")
        return _method(str(node.target)) if node.op == "call_method" else cast(Any, node.target)

    def _called(self, node: fx.Node, function: Callable[..., Any]) -> Step:
        """A step that calls a function with earlier values and constants."""
        place = self.place

        def step(values: list[Any]) -> Any:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda other: values[place[other]])
            return function(*args, **kwargs)

        return step

    def _layer(self, node: fx.Node) -> Step:
        name = str(node.target)
        layer, own = self.network.get_submodule(name), self.keys[name]
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            raise Unsupported(f"layer {name} takes several inputs")
        before = node.args[0]
        if not before.meta["batch"]:
            raise Unsupported(f"layer {name} takes something else than a batch")
        run = _batched_layer(name, layer, own, self.network.training)
        at = self.place[before]
        if not is_common(before):
            return lambda values: run(layer, values[at])
        if own == {"bias"}:  # the product is common, too
            return lambda values: _with_bias(layer, values[at])
        key = next(iter(own))

        def step(values: list[Any]) -> Any:
            x = values[at]
            return run(layer, x.expand(len(getattr(layer, key)), *x.shape))

        return step


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


_IN_PLACE = {name for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")} - {
    "index",
    "inv",
    "invert",
    "is_",
    "is_not",
}


def _writes(node: fx.Node) -> bool:
    """Whether a node writes into a value that another one may read."""
    if node.op == "call_module":
        return False  # layers get a copy
    name = name_of(node)
    method = name.endswith("_") and not name.endswith("__")
    return method or name in ("setitem", *_IN_PLACE) or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def _batched_layer(name: str, layer: nn.Module, own: frozenset[str], training: bool) -> Callable[[Any, Tensor], Tensor]:
    """The form of a layer for ``[M, B, ...]``; keys of tensors that members have for themselves are ``own``."""
    kind, any_layer = type(layer), cast(Any, layer)
    if kind is KeyedDropout:
        return stacked_dropout
    if not own:
        if isinstance(layer, nn.Flatten) and layer.start_dim >= 1:
            return _on_all_examples
        if kind in BATCH_NORMS and not (layer.training or any_layer.running_mean is None):
            return _on_all_examples
        if kind in ROWWISE_LAYERS:
            return _on_all_examples
    elif kind is nn.Linear:
        return functools.partial(_linear_layer, own)
    elif kind is nn.Conv2d and is_plain(
        any_layer.groups, any_layer.dilation, any_layer.padding, any_layer.padding_mode
    ):
        return functools.partial(_convolution_layer, own)
    elif kind is nn.LayerNorm:
        return functools.partial(_layer_norm, own)
    elif kind in BATCH_NORMS and any_layer.momentum is not None:
        return functools.partial(_batch_norm, own)
    raise Unsupported(f"layer {name} ({kind.__name__}) has no batched form{' in training' if training else ''}")


def _on_all_examples(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer that all members share, on the examples of all of them as one batch."""
    rows = x.flatten(0, 1)
    if getattr(layer, "inplace", False):
        rows = rows.clone()
    return layer(rows).unflatten(0, x.shape[:2])


def is_plain(groups: Any, dilation: Any, padding: Any, mode: str = "zeros") -> bool:
    """Whether a convolution has one group, no dilation, and padding by numbers of zeros."""
    return groups == 1 and tuple(dilation) == (1, 1) and mode == "zeros" and not isinstance(padding, str)


def _linear_layer(own: frozenset[str], layer: nn.Linear, x: Tensor) -> Tensor:
    return _linear(x, layer.weight, layer.bias, "weight" in own, "bias" in own)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, own_weight: bool, own_bias: bool) -> Tensor:
    """``[M, B, ..., in]`` through a weight and a bias, each of which members share or have for themselves."""
    if own_weight:
        y = stacked_linear(x, weight, bias if own_bias else None)
        return y if bias is None or own_bias else y + bias
    y = F.linear(x, weight, None if own_bias else bias)
    return y if bias is None or not own_bias else y + _aligned(bias, y.ndim)


def _with_bias(layer: Any, x: Tensor) -> Tensor:
    """A linear layer or a convolution of a common value, whose bias alone is a member's."""
    if isinstance(layer, nn.Linear):
        y, bias = F.linear(x, layer.weight), layer.bias
    else:
        y, bias = F.conv2d(x, layer.weight, None, layer.stride, layer.padding), layer.bias.unsqueeze(-1).unsqueeze(-1)
    return y + _aligned(bias, y.ndim + 1)


def _convolution_layer(own: frozenset[str], layer: nn.Conv2d, x: Tensor) -> Tensor:
    bias, padding = layer.bias, layer.padding
    assert not isinstance(padding, str)
    if "weight" in own:
        y = stacked_convolution(x, layer.weight, bias if "bias" in own else None, layer.stride, padding)
        return y if bias is None or "bias" in own else y + bias.view(-1, 1, 1)
    y = F.conv2d(x.flatten(0, 1), layer.weight, None, layer.stride, padding).unflatten(0, x.shape[:2])
    return y if bias is None else y + bias.view(len(bias), 1, -1, 1, 1)


def _layer_norm(own: frozenset[str], layer: nn.LayerNorm, x: Tensor) -> Tensor:
    y = F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    for key, combine in (("weight", torch.mul), ("bias", torch.add)):
        tensor = getattr(layer, key)
        if tensor is not None:
            y = combine(y, _aligned(tensor, y.ndim) if key in own else tensor)
    return y


def _batch_norm(own: frozenset[str], layer: Any, x: Tensor) -> Tensor:
    members = len(x)

    def expanded(key: str) -> Tensor | None:
        tensor = getattr(layer, key)
        return tensor if tensor is None or key in own else tensor.expand(members, -1).contiguous()

    training = layer.training or layer.running_mean is None
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    mean, variance, weight, bias = map(expanded, ("running_mean", "running_var", "weight", "bias"))
    return stacked_batch_norm(x, mean, variance, weight, bias, training, layer.momentum, layer.eps)


def _aligned(tensor: Tensor, dimensions: int) -> Tensor:
    """A tensor ``[M, ...]`` with axes of size 1 after M, so that each member's part is broadcast from the right."""
    missing = dimensions - tensor.ndim
    return tensor if missing <= 0 else tensor.view(len(tensor), *[1] * missing, *tensor.shape[1:])


def _batched_function(node: fx.Node) -> Callable[..., Any]:
    """The form of a function or method that reads values with a member axis."""
    name, args = name_of(node), node.args
    own = [isinstance(argument, fx.Node) and not is_common(argument) for argument in args]
    if any(isinstance(leaf, fx.Node) and not is_common(leaf) for leaf in node.kwargs.values()):
        raise Unsupported(f"function {name} takes tensors by name")
    of_batch = isinstance(args[0], fx.Node) and args[0].meta["batch"]
    first_batch = of_batch and own[0]
    if node.op == "call_function" and node.target in _POINTWISE:
        return functools.partial(_pointwise, cast(Any, node.target), tuple(own))
    if node.op == "call_method" and name in _CASTS and own[0] and not any(own[1:]):
        return _method(name)
    if node.target is F.linear and of_batch:
        return functools.partial(_linear_function, tuple(own))
    if node.target in (F.conv2d, torch.conv2d) and of_batch and len(args) > 1 and own[1]:
        return functools.partial(_convolution_function, tuple(own))
    if name == "flatten" and first_batch and (*args[1:], *node.kwargs.values()) == (1,):
        return lambda x, *_, **__: x.flatten(2)
    if name == "mean" and first_batch:
        return _mean
    if node.target in POOLING_FUNCTIONS and first_batch and not any(own[1:]):
        return functools.partial(_on_all_rows, cast(Any, node.target))
    if _is_shape(node) and first_batch:
        return lambda x, *of: x.shape[1:] if node.target is getattr else x[0].size(*of)
    if _is_part_of_shape(node):
        return operator.getitem
    if node.op == "call_method" and name in ("view", "reshape") and all(map(_is_size, args[1:])):
        return lambda x, *sizes: x.reshape(len(x), *sizes)
    raise Unsupported(f"function {name} is not known to be pointwise")


def _is_shape(node: fx.Node) -> bool:
    """Whether a node asks for sizes of a tensor, which are those of one member's."""
    return (node.op == "call_method" and node.target == "size") or (node.target is getattr and node.args[1] == "shape")


def _is_size(value: Any) -> bool:
    """Whether an argument is one size."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int)
    return _is_part_of_shape(value) or (value.op == "call_method" and _is_shape(value) and len(value.args) == 2)


def _is_part_of_shape(node: fx.Node) -> bool:
    return node.target is operator.getitem and all(map(_is_shape, node.all_input_nodes))


def _on_all_rows(function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function that treats every example apart, on the examples of all members as one batch."""
    return function(x.flatten(0, 1), *args, **kwargs).unflatten(0, x.shape[:2])


def _pointwise(function: Callable[..., Any], own: tuple[bool, ...], *args: Any, **kwargs: Any) -> Any:
    """A function of numbers, whose arguments are aligned as one member's are."""
    tensors = [(value, is_own) for value, is_own in zip(args, own, strict=True) if isinstance(value, Tensor)]
    dimensions = 1 + max(value.ndim - is_own for value, is_own in tensors)
    aligned = [
        _aligned(value, dimensions) if is_own and isinstance(value, Tensor) else value
        for value, is_own in zip(args, own, strict=True)
    ]
    kwargs.pop("inplace", None)
    return function(*aligned, **kwargs)


def _linear_function(own: tuple[bool, ...], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not own[0]:
        members = weight if own[1] else bias
        assert members is not None
        x = x.expand(len(members), *x.shape)
    return _linear(x, weight, bias, own[1], len(own) > 2 and own[2])


def _convolution_function(
    own: tuple[bool, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Tensor:
    def pair(value: Any) -> tuple[int, int]:
        return (value, value) if isinstance(value, int) else tuple(value)

    if not is_plain(groups, pair(dilation), padding) or (bias is not None and not (len(own) > 2 and own[2])):
        raise Unsupported("a convolution has no batched form")
    if not own[0]:
        x = x.expand(len(weight), *x.shape)
    return stacked_convolution(x, weight, bias, pair(stride), pair(padding))


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """A mean of each example over some of its axes."""
    axes = [dim] if isinstance(dim, int) else list(dim or ())
    if not axes or 0 in axes or kwargs or min(axes) < 2 - x.ndim:
        raise Unsupported("a mean goes over examples")
    return x.mean([axis + 1 if axis > 0 else axis for axis in axes], keepdim)

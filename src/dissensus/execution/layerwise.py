"""Members in turn on a CPU, layer by layer, with images channels last.

Networks are run from a graph of known layers and functions, so that images can be kept channels last, for which
convolutions and pooling on a CPU are faster. A ReLU before a max pooling comes after it instead, where it has fewer
numbers to work on: both only compare, so values are the same.
"""

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from dissensus.calls import NetworkInputs
from dissensus.dropout import KeyedDropout
from dissensus.execution.aliases import IN_PLACE, chain, depends_on_layout, is_read_elsewhere, writes
from dissensus.execution.batched import POINTWISE_FUNCTIONS, POINTWISE_LAYERS, POOLING_LAYERS
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported
from dissensus.execution.weights import Weights

LAYERS: tuple[type[nn.Module], ...] = (
    *POINTWISE_LAYERS,
    *POOLING_LAYERS,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.PReLU,
    nn.Flatten,
    nn.Unflatten,
    nn.MaxPool1d,
    nn.AvgPool1d,
    KeyedDropout,
)
"""Layers that compute from their inputs and their own tensors, and draw nothing but by key."""
FUNCTIONS: set[Callable[..., Any]] = {
    *POINTWISE_FUNCTIONS,
    getattr,
    operator.getitem,
    operator.floordiv,
    operator.truediv,
    *IN_PLACE,
    torch.cat,
    torch.flatten,
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    F.pad,
    F.log_softmax,
    F.softmax,
}
METHODS = {"view", "reshape", "flatten", "mean", "size", "relu", "add", "mul", "permute", "transpose", "contiguous"}


def run_layerwise(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run members in turn; raises `Unsupported` where the network has something that is not known."""
    if not isinstance(x, Tensor):
        raise Unsupported("its forward pass takes several inputs")
    if x.device.type != "cpu":
        raise Unsupported("images channels last are for a CPU here")
    members, own = _Members(skeleton.once(_plan), buffers, per_member), weights.members()
    return torch.stack([members.outputs(index, own(index), x) for index in range(len(weights))])


class _Layer(NamedTuple):
    module: nn.Module
    tensors: Mapping[str, tuple[bool, str]]
    """By its own name of a tensor: whether it is a parameter, and its name in the network."""


class _Plan(NamedTuple):
    steps: list[tuple[fx.Node, list[fx.Node]]]
    """Operations, and the values that each is the last to read."""
    layers: Mapping[str, _Layer]
    writes_to_input: bool
    convolves: bool
    """Whether it has 2-D convolutions, which are faster channels last."""


def _plan(skeleton: Skeleton) -> _Plan:
    """The graph of a network, without its weights; `Unsupported` where it has what is not known."""
    if skeleton.output is not None:
        raise Unsupported("its output is chosen from several")
    if skeleton.shared:
        raise Unsupported("members share weights")
    graph = copy.deepcopy(skeleton.graph())  # other backends read it too
    modules = dict(skeleton.network.named_modules(remove_duplicate=False))
    names = {id(tensor): name for name, tensor in skeleton.tensors().items()}
    layers: dict[str, _Layer] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise Unsupported(f"its forward pass takes {len(inputs)} inputs")
    for node in graph.nodes:
        if node.op == "call_module":
            layer = modules[str(node.target)]
            if type(layer) not in LAYERS:
                raise Unsupported(f"layer {node.target} ({type(layer).__name__}) has no form here")
            stores = ((True, layer._parameters), (False, layer._buffers))
            layers[str(node.target)] = _Layer(
                layer,
                {
                    key: (is_parameter, names[id(tensor)])
                    for is_parameter, store in stores
                    for key, tensor in store.items()
                    if tensor is not None
                },
            )
        elif node.op == "call_function" and node.target not in FUNCTIONS:
            name = getattr(node.target, "__name__", node.target)
            raise Unsupported(f"function {name} has no form here")
        elif node.op == "call_method" and node.target not in METHODS:
            raise Unsupported(f"method {node.target} has no form here")
        elif node.op == "get_attr":
            raise Unsupported(f"it reads {node.target} outside of a layer")
        if node.op != "placeholder" and writes(node, modules) and depends_on_layout(node, modules):
            raise Unsupported(f"{node} writes into what may be a view")
    if not isinstance(list(graph.nodes)[-1].args[0], fx.Node):
        raise Unsupported("it returns more than one tensor")
    writing = [node for node in graph.nodes if node.op.startswith("call") and writes(node, modules)]
    writes_to_input = any(chain(node.all_input_nodes[0], modules)[-1] is inputs[0] for node in writing)
    _pool_first(graph, modules)
    nodes = list(graph.nodes)
    last = {before: node for node in nodes for before in node.all_input_nodes}
    dead: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for before, node in last.items():
        dead[node].append(before)
    convolves = any(type(layer.module) is nn.Conv2d for layer in layers.values())
    return _Plan([(node, dead[node]) for node in nodes], layers, writes_to_input, convolves)


def _pool_first(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Put every ReLU that only a max pooling reads after that pooling."""

    def is_relu(node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(modules[str(node.target)]) is nn.ReLU
        return node.op == "call_function" and node.target in (F.relu, torch.relu) and len(node.all_input_nodes) == 1

    def is_pooling(node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        layer = modules[str(node.target)]
        return isinstance(layer, nn.MaxPool1d | nn.MaxPool2d) and not layer.return_indices

    for relu in list(graph.nodes):
        pooling = next(iter(relu.users), None)
        if pooling is None or len(relu.users) > 1 or not (is_relu(relu) and is_pooling(pooling)):
            continue
        before = relu.all_input_nodes[0]
        # Something may write into it in between, or into the result, which the gradient of a ReLU needs.
        if is_read_elsewhere(before, modules) or any(writes(user, modules) for user in pooling.users):
            continue
        pooling.args = (before,)
        pooling.replace_all_uses_with(relu)
        relu.update_arg(0, pooling)
        pooling.append(relu)


class _Members:
    """The members of a pass."""

    def __init__(self, plan: _Plan, buffers: Tensors, per_member: bool) -> None:
        self.plan, self.buffers, self.per_member = plan, buffers, per_member

    def outputs(self, index: int, parameters: Tensors, x: Tensor) -> Tensor:
        """Outputs of one member."""
        x = x[index] if self.per_member else x
        if self.plan.convolves and x.ndim == 4:
            x = _channels_last(x)
        values: dict[fx.Node, Any] = {}
        for node, dead in self.plan.steps:
            if node.op == "placeholder":
                values[node] = x.clone() if self.plan.writes_to_input else x
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            for before in dead:
                del values[before]
            if node.op == "output":
                assert isinstance(args[0], Tensor)
                return args[0]
            if node.op == "call_module":
                values[node] = self._layer(self.plan.layers[str(node.target)], index, parameters)(*args, **kwargs)
            elif node.op == "call_method":
                method = "reshape" if node.target == "view" else str(node.target)  # channels last, few views exist
                values[node] = getattr(args[0], method)(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                values[node] = node.target(*args, **kwargs)
        raise AssertionError("a traced graph ends with an output")

    def _layer(self, layer: _Layer, index: int, parameters: Tensors) -> nn.Module:
        """A layer with the tensors of a member, which shares everything else with the network's."""
        module = layer.module
        if not layer.tensors:
            return module
        own = object.__new__(type(module))
        held: dict[bool, dict[str, Tensor | None]] = {True: dict(module._parameters), False: dict(module._buffers)}
        for key, (is_parameter, name) in layer.tensors.items():
            tensor = parameters[name] if name in parameters else self.buffers[name][index]
            held[is_parameter][key] = tensor
            if type(module) is nn.Conv2d and key == "weight":
                held[is_parameter][key] = _channels_last(tensor)
        vars(own).update({**vars(module), "_parameters": held[True], "_buffers": held[False]})
        return own


def _channels_last(tensor: Tensor) -> Tensor:
    """A tensor ``[N, C, H, W]`` channels last; strides alone tell one of a single channel from one channels first."""
    if tensor.shape[1] == 1:
        return tensor[:, 0].contiguous().unsqueeze(-1).permute(0, 3, 1, 2)
    return tensor.contiguous(memory_format=torch.channels_last)

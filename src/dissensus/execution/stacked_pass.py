"""Convolutional networks with convolutions and batch norm of all members in one kernel each, as a plan of `wide`.

Batch norm, the sum with a residual after it and the ReLU after that are one operation. Everything else runs as in
`dissensus.execution.wide`. Images are channels last in memory.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dissensus.calls import NetworkInputs
from dissensus.execution.aliases import is_read_elsewhere
from dissensus.execution.common_graph import is_common, keys_of
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported
from dissensus.execution.stacked_convolution import convolution
from dissensus.execution.stacked_norm import batch_norm
from dissensus.execution.weights import Weights
from dissensus.execution.wide import BATCH_NORMS, Forms, is_plain, run_wide

SECONDS_PER_CONVOLUTION = 3.0
"""Time that kernels of a convolution and of what follows it take to compile and to be measured, beside an H200."""


def run_stacked(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run all members; raises `Unsupported` where the network has no convolutions, or something without a form."""
    return run_wide(skeleton, weights, buffers, x, per_member, FORMS)


def seconds_to_compile(network: nn.Module) -> float:
    """About how long it takes to compile kernels, one set for each kind of convolution."""
    layers = [layer for layer in network.modules() if type(layer) is nn.Conv2d]
    kinds = {(*layer.weight.shape[-4:], layer.stride, layer.padding) for layer in layers}
    return SECONDS_PER_CONVOLUTION * len(kinds)


def _prepare(skeleton: Skeleton, graph: fx.Graph) -> None:
    """Make batch norm, a residual and ReLU one call."""
    network, keys = skeleton.network, keys_of(skeleton, skeleton.tensors().values())
    if not any(_is_convolution(network, node, keys) for node in graph.nodes):
        raise Unsupported("it has no 2-D convolutions of members, for which there are kernels")
    norms = [node for node in graph.nodes if _is_norm(network, node, keys)]
    calls = Counter(network.get_submodule(str(norm.target)) for norm in norms)
    for norm in norms:
        _fuse(network, graph, norm, moves=calls[network.get_submodule(str(norm.target))] == 1)


def _fuse(network: nn.Module, graph: fx.Graph, norm: fx.Node, *, moves: bool) -> None:
    """Join a batch norm with what follows it; one that is called twice stays, since its statistics have an order."""
    last, residual = norm, ()
    user = _only_user(norm) if moves else None
    if user is not None and _is_sum(network, user):
        last, residual = user, tuple(value for value in user.args if value is not norm)
        user = _only_user(last)
    relu = user is not None and _is_relu(network, user)
    if relu:
        last = cast(fx.Node, user)
    with graph.inserting_before(last):
        fused = graph.create_node("call_module", norm.target, (norm.args[0], *residual))
    fused.meta.update(norm.meta, relu=relu)
    last.replace_all_uses_with(fused)
    while last is not norm:
        before = next(node for node in last.all_input_nodes if node not in residual)
        graph.erase_node(last)
        last = before
    graph.erase_node(norm)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_sum(network: nn.Module, node: fx.Node) -> bool:
    """Whether a node adds two different values of members, in place only if nothing else reads what it writes."""
    values = [value for value in node.args if isinstance(value, fx.Node) and value.meta["batch"]]
    if len({*values}) != len(node.args) or len(node.args) != 2 or node.kwargs:
        return False
    if node.target is operator.iadd:
        return not is_read_elsewhere(values[0], dict(network.named_modules(remove_duplicate=False)))
    return node.target in (operator.add, torch.add)


def _is_relu(network: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(network.get_submodule(str(node.target))) is nn.ReLU
    is_function = node.op == "call_function" and node.target in (F.relu, torch.relu)
    return is_function or (node.op == "call_method" and node.target == "relu")


def _is_convolution(network: nn.Module, node: fx.Node, keys: dict[str, frozenset[str]]) -> bool:
    layer = _layer_of(network, node, keys)
    if type(layer) is not nn.Conv2d:
        return False
    return is_plain(layer.groups, layer.dilation, layer.padding, layer.padding_mode)


def _is_norm(network: nn.Module, node: fx.Node, keys: dict[str, frozenset[str]]) -> bool:
    layer: Any = _layer_of(network, node, keys)
    return type(layer) in BATCH_NORMS and layer.momentum is not None and "weight" in keys[str(node.target)]


def _layer_of(network: nn.Module, node: fx.Node, keys: dict[str, frozenset[str]]) -> nn.Module | None:
    """The layer that a node calls with a batch, if all of its tensors are members' own."""
    if node.op != "call_module" or node.kwargs or not all(isinstance(value, fx.Node) for value in node.args):
        return None
    layer = network.get_submodule(str(node.target))
    tensors = [key for key, tensor in [*layer._parameters.items(), *layer._buffers.items()] if tensor is not None]
    batch = bool(node.args) and cast(fx.Node, node.args[0]).meta["batch"]
    return layer if batch and tensors and keys[str(node.target)] >= {*tensors} else None


def _function(skeleton: Skeleton, node: fx.Node) -> Callable[..., Tensor] | None:
    """What a node calls, where this file has a form of its own."""
    network, keys = skeleton.network, keys_of(skeleton, skeleton.tensors().values())
    if _is_convolution(network, node, keys):
        run = functools.partial(_convolution, skeleton)
    elif _is_norm(network, node, keys):
        run = functools.partial(_norm, node.meta["relu"])
    else:
        return None
    layer: Any = network.get_submodule(str(node.target))
    common = [is_common(cast(fx.Node, value)) for value in node.args]

    def function(*values: Tensor) -> Tensor:
        pairs = zip(values, common, strict=True)
        members = len(layer.weight)
        return run(layer, *(value.expand(members, *value.shape) if alike else value for value, alike in pairs))

    return function


def _convolution(skeleton: Skeleton, layer: Any, x: Tensor) -> Tensor:
    return convolution(x, layer.weight, layer.bias, layer.stride, layer.padding, skeleton.ways)


def _norm(relu: bool, layer: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    statistics = None if layer.running_mean is None else (layer.running_mean, layer.running_var)
    affine = (layer.weight, layer.bias)
    how = {"training": layer.training, "momentum": layer.momentum, "eps": layer.eps, "relu": relu}
    return batch_norm(x, statistics, affine, residual, **how)


FORMS = Forms(_prepare, _function)

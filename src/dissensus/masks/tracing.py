"""Where in a network a mask may stand: behind one layer and before others, with nothing between that minds zeros."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jaxtyping
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from dissensus import checks
from dissensus.dropout import KeyedDropout
from dissensus.masks.layer import Masksembles, Tile

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED = (nn.Linear, *CONVOLUTIONS)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, KeyedDropout)
POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.CELU, nn.Tanh, nn.Hardswish, nn.Mish,
)  # fmt: skip
"""All of them give 0 for 0, so a channel that is masked in front of them is masked behind them."""
PASSING = (*ACTIVATIONS, *DROPOUTS, *POOLS, nn.Identity, nn.ZeroPad2d, Masksembles, Tile)
_ACTIVATION_CALLS = (F.relu, torch.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.elu, torch.tanh, F.hardswish)
_POOL_CALLS = (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.max_pool1d, F.avg_pool1d, F.dropout)
_ACTIVATION_METHODS = ("relu", "relu_", "tanh")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Layers of ours are not looked into."""
        return isinstance(m, Masksembles | Tile | KeyedDropout) or super().is_leaf_module(m, module_qualified_name)


def traced(network: nn.Module) -> fx.GraphModule:
    """A network as a graph of its layers; they are its own, not copies."""
    checked = jaxtyping.config.jaxtyping_disable
    modes = {layer: layer.training for layer in network.modules()}
    jaxtyping.config.update("jaxtyping_disable", True)  # what goes through layers now are stand-ins for tensors
    try:
        network.eval()
        other = _Tracer().trace(network)
        network.train()
        graph = _Tracer().trace(network)
    except Exception as reason:
        fix = "Put `dissensus.masks.Masksembles` layers into it by hand, and wrap it in `dissensus.masks.Masked`."
        got = f"{type(network).__name__} ({str(reason).splitlines()[0]})"
        checks.refuse("network", "be one that torch.fx can follow", got, fix)
    finally:
        jaxtyping.config.update("jaxtyping_disable", checked)
        for layer, mode in modes.items():
            layer.training = mode
    if _steps(graph) != _steps(other):
        fix = "Use layers for what only training does: nn.Dropout instead of functional dropout."
        checks.refuse("network", "do the same steps in training and evaluation", type(network).__name__, fix)
    moving = next((node for node in graph.nodes if _moves_examples(node)), None)
    if moving is not None:
        checks.refuse("network", "keep examples on axis 0", f"one that moves them ({moving.name})")
    return fx.GraphModule(network, graph)


def _steps(graph: fx.Graph) -> list[tuple[str, ...]]:
    return [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]


def _moves_examples(node: Node) -> bool:
    """Whether a node takes examples away from axis 0."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    axes: list[Any] = []
    for told in (*node.args[1:], *node.kwargs.values()):
        axes += told if isinstance(told, tuple | list) else [told]
    if name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis"):
        return 0 in axes
    if name == "permute":
        return bool(axes) and axes[0] != 0
    return name in ("t", "T") and node.op != "call_module"


class Span(NamedTuple):
    """The stretch around a place where a mask stands, or may: who makes its channels, and who takes them."""

    producer: str
    norms: tuple[str, ...]
    consumers: tuple[str, ...]


def span_of(graph: fx.GraphModule, node: Node) -> Span | None:
    """The stretch around a node's output; None where a mask could not be cut out of it again."""
    calls = [n.target for n in graph.graph.nodes if n.op == "call_module"]
    norms: list[str] = []
    at, spatial = node, False
    while True:
        layer = _layer(graph, at)
        if isinstance(layer, WEIGHTED):
            break
        norm = isinstance(layer, NORMS)
        if not norm and not _passes(graph, at):
            return None
        spatial = spatial or _is_spatial(graph, at)
        norms += [str(at.target)] if norm else []
        before = at.args[0] if at.args else None
        if not isinstance(before, Node) or (before is not node and len(before.users) > 1):
            return None
        at = before
    flat = isinstance(layer, nn.Linear)
    if getattr(layer, "groups", 1) != 1 or (flat and spatial):
        return None
    if any(graph.get_submodule(name).num_features != layer.weight.shape[0] for name in norms):
        return None  # batch norm over another axis
    consumers = _consumers(graph, node, flat)
    if not consumers:
        return None
    names = (str(at.target), *norms, *consumers)
    if any(calls.count(name) > 1 or _is_tied(graph, name) for name in names):
        return None  # a layer with several places, or whose weight is made or read elsewhere, keeps its shape
    return Span(str(at.target), tuple(norms), tuple(consumers))


def _consumers(graph: fx.GraphModule, node: Node, flat: bool) -> list[str] | None:
    """Layers that take a node's channels as their inputs, all of them; None where something else does."""
    found: list[str] = []
    for user in node.users:
        layer = _layer(graph, user)
        if isinstance(layer, WEIGHTED) and getattr(layer, "groups", 1) == 1:
            if isinstance(layer, CONVOLUTIONS) == flat:
                return None  # a convolution takes its channels from axis 1, a linear layer from the last
            found.append(str(user.target))
        elif (_passes(graph, user) and not (flat and _is_spatial(graph, user))) or _flattens(graph, user):
            inner = _consumers(graph, user, flat or _flattens(graph, user))
            if inner is None:
                return None
            found += inner
        else:
            return None
    return found or None


def _layer(graph: fx.GraphModule, node: Node) -> nn.Module | None:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_activation(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a node is an activation that gives 0 for 0."""
    if node.op == "call_function":
        return node.target in _ACTIVATION_CALLS
    if node.op == "call_method":
        return node.target in _ACTIVATION_METHODS
    return isinstance(_layer(graph, node), ACTIVATIONS)


def is_dropout(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a node is a layer of dropout."""
    return isinstance(_layer(graph, node), DROPOUTS)


def _passes(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a node leaves channels apart, and zero at zero."""
    if node.op == "call_function":
        return node.target in (*_ACTIVATION_CALLS, *_POOL_CALLS)
    return is_activation(graph, node) or isinstance(_layer(graph, node), PASSING)


def _is_spatial(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a node works along axes behind the channels, which behind a linear layer are the channels."""
    return isinstance(_layer(graph, node), (*POOLS, nn.ZeroPad2d)) or (
        node.op == "call_function" and node.target in _POOL_CALLS and node.target is not F.dropout
    )


def _is_tied(graph: fx.GraphModule, name: str) -> bool:
    layer = graph.get_submodule(name)
    made = is_parametrized(layer) or any(key.endswith(("_g", "_orig")) for key, _ in layer.named_parameters())
    read = any(n.op == "get_attr" and str(n.target).startswith(f"{name}.") for n in graph.graph.nodes)
    own = {id(p) for p in layer.parameters()}
    shared = any(
        id(p) in own
        for other, m in graph.named_modules()
        if m is not layer
        for p in m.parameters(recurse=False)
        if other
    )
    return made or read or shared


def _flattens(graph: fx.GraphModule, node: Node) -> bool:
    layer = _layer(graph, node)
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    named = node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten")
    return named and node.args[1:] in ((1,), (1, -1))


def add_tiles(graph: fx.GraphModule, tile: Callable[[], Tile]) -> None:
    """Lay the batch N times end to end where masks begin to matter: what comes before is computed once for all."""
    masked: set[Node] = set()
    given: set[Node] = set()
    """What is computed from the input."""
    for node in graph.graph.nodes:
        if node.op == "placeholder" or any(n in given for n in node.all_input_nodes):
            given.add(node)
        if isinstance(_layer(graph, node), Masksembles) or any(n in masked for n in node.all_input_nodes):
            masked.add(node)
    edges: dict[Node, list[Node]] = {}
    for node in graph.graph.nodes:
        for source in node.all_input_nodes if node in masked else []:
            if source not in masked and source in given:
                edges.setdefault(source, []).append(node)
    if any(not _is_batch(source) for source in edges):  # a number of rows, say, that tiling would make wrong
        edges = {node: list(node.users) for node in graph.graph.nodes if node.op == "placeholder"}
    for number, (source, users) in enumerate(edges.items()):
        name = f"tile_{number}"
        graph.add_submodule(name, tile())
        with graph.graph.inserting_after(source):
            tiled = graph.graph.call_module(name, (source,))
        for user in users:
            user.replace_input_with(source, tiled)
    graph.graph.lint()
    graph.recompile()


def _is_batch(node: Node) -> bool:
    """Whether a node is surely a tensor with a row per example."""
    known: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, torch.cat, torch.flatten)
    calls = node.op == "call_function" and node.target in (*_ACTIVATION_CALLS, *_POOL_CALLS, *known)
    methods = node.op == "call_method" and node.target in (*_ACTIVATION_METHODS, "flatten", "contiguous")
    return node.op in ("placeholder", "call_module") or calls or methods

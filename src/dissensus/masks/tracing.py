"""Places for masks in a network: after one layer and before others, with only steps in between that keep zeros."""

import builtins
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jaxtyping
import torch
from torch import fx, nn
from torch.fx import Node
from torch.nn.utils.parametrize import is_parametrized

from dissensus import checks
from dissensus.dropout import KeyedDropout
from dissensus.masks.layer import Masksembles, Tile
from dissensus.masks.layouts import (
    ACTIVATION_CALLS,
    ACTIVATION_METHODS,
    ACTIVATIONS,
    CONVOLUTIONS,
    DROPOUTS,
    NORMS,
    POOL_CALLS,
    WEIGHTED,
    ChannelLayout,
    channel_layouts,
    harmless,
    input_of,
    keeps,
    layer_of,
)

_ADDING = (operator.add, operator.iadd, torch.add, torch.cat, "add", "add_")
"""Steps that add to a residual stream."""


class _LayerTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Layers of this package are leaves."""
        return isinstance(m, Masksembles | Tile | KeyedDropout) or super().is_leaf_module(m, module_qualified_name)


def trace(network: nn.Module) -> fx.GraphModule:
    """A network as a graph of its layers, which are not copied. All ways to flatten are brought to one form."""
    checked = jaxtyping.config.jaxtyping_disable
    modes = {layer: layer.training for layer in network.modules()}
    jaxtyping.config.update("jaxtyping_disable", True)  # proxies, not tensors, go through the layers
    try:
        with _traced_lengths(network):
            network.eval()
            other = _LayerTracer().trace(network)
            network.train()
            graph = _LayerTracer().trace(network)
    except Exception as reason:
        fix = "Insert `dissensus.masks.Masksembles` layers by hand, and wrap it in `dissensus.masks.Masked`."
        got = f"{type(network).__name__} ({str(reason).splitlines()[0]})"
        checks.refuse("network", "be traceable by torch.fx", got, fix)
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
    module = fx.GraphModule(network, graph)
    channel_layouts(module)
    module.graph.lint()
    module.recompile()
    return module


@contextmanager
def _traced_lengths(network: nn.Module) -> Iterator[None]:
    """Trace ``len(x)`` too, for which Python needs a number at once."""
    spaces: list[dict[str, Any]] = [
        space
        for layer in network.modules()
        if (space := getattr(inspect.unwrap(type(layer).forward), "__globals__", None)) is not None
    ]
    patched = [space for space in {id(space): space for space in spaces}.values() if "len" not in space]
    for space in patched:
        space["len"] = _length
    try:
        yield
    finally:
        for space in patched:
            del space["len"]


def _length(value: Any) -> Any:
    if isinstance(value, fx.Proxy):
        return value.tracer.create_proxy("call_function", len, (value,), {})
    return builtins.len(value)


def _steps(graph: fx.Graph) -> list[tuple[str, ...]]:
    return [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]


def _moves_examples(node: Node) -> bool:
    """Whether a node moves examples away from axis 0."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    axes: list[Any] = []
    for argument in (*node.args[1:], *node.kwargs.values()):
        axes += argument if isinstance(argument, tuple | list) else [argument]
    if name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis"):
        return 0 in axes
    if name == "permute":
        return bool(axes) and axes[0] != 0
    return name in ("t", "T") and node.op != "call_module"


class Span(NamedTuple):
    """The layers around a place of a mask: the layer that makes its channels, and the layers that take them."""

    producer: str
    norms: tuple[str, ...]
    consumers: tuple[str, ...]


class Unplaced(Exception):
    """Raised where a mask cannot be, with the reason; ``expected`` is True where `convert` documents it."""

    def __init__(self, reason: str, *, expected: bool = False) -> None:
        super().__init__(reason)
        self.expected = expected


def span_of(graph: fx.GraphModule, node: Node) -> Span | None:
    """The span around a node's output; None where a mask cannot be cut out."""
    try:
        return find_span(graph, node)
    except Unplaced:
        return None


def find_span(graph: fx.GraphModule, node: Node) -> Span:
    """The span around a node's output; `Unplaced` where a mask cannot be cut out."""
    layouts = channel_layouts(graph)
    at, norms = node, []
    while not isinstance(layer_of(graph, at), WEIGHTED):
        if at not in layouts:
            while keeps(graph, at) and (before := input_of(at)) is not None:
                at = before
            raise Unplaced(f"its channels cannot be traced back beyond {_named(at)}", expected=_is_stream(at))
        if layouts[at].flat:
            raise Unplaced("its channels are flattened")
        norms += [str(at.target)] if isinstance(layer_of(graph, at), NORMS) else []
        before = input_of(at)
        assert before is not None
        others = [user for user in before.users if user is not at and not harmless(user, layouts[before])]
        if others:
            raise Unplaced(f"{_named(others[0])} takes its channels before it", expected=_is_stream(others[0]))
        at = before
    layer: Any = layer_of(graph, at)
    if getattr(layer, "groups", 1) != 1:
        raise Unplaced(f"{_named(at)} makes its channels in groups")
    if any(graph.get_submodule(name).num_features != layer.weight.shape[0] for name in norms):
        raise Unplaced("batch norm is over another axis")
    consumers = list(_consumers(graph, node, layouts))
    if not consumers:
        raise Unplaced("nothing takes its channels", expected=True)
    names = (str(at.target), *norms, *consumers)
    calls = [n.target for n in graph.graph.nodes if n.op == "call_module"]
    for name in names:
        if calls.count(name) > 1 or _is_tied(graph, name):
            raise Unplaced(f"{name!r} has several places, or its weight is made or read elsewhere")
    return Span(str(at.target), tuple(norms), tuple(consumers))


def _consumers(graph: fx.GraphModule, node: Node, layouts: dict[Node, ChannelLayout]) -> Iterator[str]:
    """All layers that take a node's channels as their inputs; `Unplaced` where another step takes them."""
    layout = layouts[node]
    for user in node.users:
        if harmless(user, layout):
            continue
        layer = layer_of(graph, user)
        if isinstance(layer, WEIGHTED) and getattr(layer, "groups", 1) == 1:
            if not _fits(layer, layout):
                raise Unplaced(f"{_named(user)} does not take its channels as inputs")
            yield str(user.target)
        elif user in layouts and input_of(user) is node and not isinstance(layer, (*NORMS, *WEIGHTED)):
            yield from _consumers(graph, user, layouts)
        else:
            end = user.op == "output"
            reason = "its channels are the network's outputs" if end else f"{_named(user)} takes its channels"
            raise Unplaced(reason, expected=end or _is_stream(user))


def _fits(layer: nn.Module, layout: ChannelLayout) -> bool:
    """Whether a layer's inputs are the channels: a convolution has them on axis 1, a linear layer on the last."""
    if isinstance(layer, CONVOLUTIONS):
        return not layout.last and not layout.flat and layer.in_channels == layout.width
    assert isinstance(layer, nn.Linear)
    if layout.flat:
        return layout.axes == 2 and layer.in_features % layout.width == 0
    return (layout.last or layout.axes == 2) and layer.in_features == layout.width


def _named(node: Node) -> str:
    return repr(str(node.target) if node.op == "call_module" else node.name)


def _is_stream(node: Node) -> bool:
    """Whether a step belongs to a residual stream, which has no masks."""
    return node.op in ("call_function", "call_method") and node.target in _ADDING


def is_activation(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a node is an activation that gives 0 for 0."""
    if node.op == "call_function":
        return node.target in ACTIVATION_CALLS
    if node.op == "call_method":
        return node.target in ACTIVATION_METHODS
    return isinstance(layer_of(graph, node), ACTIVATIONS)


def is_dropout(graph: fx.GraphModule, node: Node) -> bool:
    """Whether a node is a layer of dropout."""
    return isinstance(layer_of(graph, node), DROPOUTS)


def _is_tied(graph: fx.GraphModule, name: str) -> bool:
    layer = graph.get_submodule(name)
    made = is_parametrized(layer) or any(key.endswith(("_g", "_orig")) for key, _ in layer.named_parameters())
    read = any(n.op == "get_attr" and str(n.target).startswith(f"{name}.") for n in graph.graph.nodes)
    parameters = {id(p) for p in layer.parameters()}
    shared = any(
        id(p) in parameters
        for other, m in graph.named_modules()
        if m is not layer
        for p in m.parameters(recurse=False)
        if other
    )
    return made or read or shared


def add_tiles(graph: fx.GraphModule, tile: Callable[[], Tile]) -> None:
    """Repeat the batch N times before the first masks; earlier steps are computed once for all masks."""
    masked: set[Node] = set()
    from_input: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or any(n in from_input for n in node.all_input_nodes):
            from_input.add(node)
        if isinstance(layer_of(graph, node), Masksembles) or any(n in masked for n in node.all_input_nodes):
            masked.add(node)
    edges: dict[Node, list[Node]] = {}
    for node in graph.graph.nodes:
        for source in node.all_input_nodes if node in masked else []:
            if source not in masked and source in from_input:
                edges.setdefault(source, []).append(node)
    if any(not _is_batch(source) for source in edges):  # such as a number of rows, which tiling would change
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
    """Whether a node is certainly a tensor with one row per example."""
    known: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, torch.cat, torch.flatten)
    calls = node.op == "call_function" and node.target in (*ACTIVATION_CALLS, *POOL_CALLS, *known)
    methods = node.op == "call_method" and node.target in (*ACTIVATION_METHODS, "flatten", "contiguous")
    return node.op in ("placeholder", "call_module") or calls or methods

"""A traced network in two parts: what comes first, and the rest, which takes the values that pass between them."""

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jaxtyping
import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from dissensus import calls
from dissensus.calls import NetworkInputs
from dissensus.dropout import FUNCTIONAL_KEY, FUNCTIONAL_STEP, KeyedDropout, KeyedDropPath, keyed_layers, may_drop_units
from dissensus.execution.common import RANDOM, common_layers
from dissensus.execution.common_graph import CommonTracer, is_common, keys_of, name_of
from dissensus.execution.skeleton import Skeleton, Unsupported
from dissensus.randomness import GlobalGenerators, generators_kept

_COPYING = (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.cat)
"""Functions whose result is never a view of their arguments."""


class _PartTracer(fx.Tracer):
    """Traces a part again when it is unpickled."""

    proxy_buffer_attributes = True


def front(network: nn.Module, nodes: Sequence[Node], passed: Sequence[Node]) -> fx.GraphModule:
    """The steps ``nodes`` as a network that returns the values that pass: one by itself, several as a tuple."""
    graph = fx.Graph(tracer_cls=_PartTracer)
    held: dict[Node, Node] = {}
    for node in nodes:
        held[node] = graph.node_copy(node, held.__getitem__)
    values = tuple(held[value] for value in passed)
    graph.output(values[0] if len(values) == 1 else values)
    graph.lint()
    return fx.GraphModule(network, graph)


def back(
    network: nn.Module, nodes: Sequence[Node], passed: Sequence[Node], batch_sizes: Collection[Node] = ()
) -> fx.GraphModule:
    """The steps ``nodes``, the last of which returns the result, as a network that takes the values that pass.

    Batch sizes are those of these values. Other values from before, such as parameters, are computed again. What a step
    may write into is copied.
    """
    graph = fx.Graph(tracer_cls=_PartTracer)
    names = ["features"] if len(passed) == 1 else [f"features_{place}" for place in range(len(passed))]
    held = dict(zip(passed, map(graph.placeholder, names), strict=True))
    for value in passed:
        if _writes_into(network, nodes, value):
            held[value] = graph.call_function(torch.mul, (held[value], 1))  # in a form that the batched backend knows

    def taken(node: Node) -> Node:
        if node not in held and node in batch_sizes:
            held[node] = graph.call_method("size", (held[passed[0]], 0))
        if node not in held:
            held[node] = graph.node_copy(node, taken)
        return held[node]

    for node in nodes[:-1]:
        held[node] = graph.node_copy(node, taken)
    result: Any = nodes[-1].args[0]
    graph.output(held[result])
    graph.lint()
    return fx.GraphModule(network, graph)


def has_parameters(network: nn.Module, node: Node) -> bool:
    """Whether a step calls a layer with parameters."""
    return node.op == "call_module" and any(True for _ in network.get_submodule(str(node.target)).parameters())


def _writes_into(network: nn.Module, nodes: Sequence[Node], value: Node) -> bool:
    """Whether a step may write into a value that passes, which all members share."""
    same = {value}
    for node in nodes:
        if same.isdisjoint(node.all_input_nodes):
            continue
        if _writes(network, node):
            return True
        if not has_parameters(network, node) and node.target not in _COPYING:  # the result may be a view of it
            same.add(node)
    return False


def _writes(network: nn.Module, node: Node) -> bool:
    """Whether a step may write into its input."""
    if node.op == "call_module":
        return bool(getattr(network.get_submodule(str(node.target)), "inplace", False))
    name = name_of(node)
    in_place = node.kwargs.get("inplace") is True or any(argument is True for argument in node.args)
    assigns = getattr(node.target, "__module__", "") == "_operator" and (name.startswith("i") or name == "setitem")
    return in_place or assigns or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """A block in which annotations of shapes are not checked: a tracer's stand-ins, not tensors, go through layers."""
    checked = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", checked)


def steps_of(nodes: Sequence[Node]) -> list[tuple[str, str, str, str]]:
    """Steps in words, by which those of two modes are compared."""
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in nodes]


class CommonSplit(NamedTuple):
    """What members compute alike, and the rest of a member; both have the layers of the network itself."""

    common: fx.GraphModule
    """Takes the tensors of the inputs, and returns what passes to the rest."""
    own: fx.GraphModule
    dropout: str
    """A layer or function whose masks leave layers out of the common part that are common in evaluation; or nothing."""


def common_split(skeleton: Skeleton, example: NetworkInputs) -> CommonSplit:
    """Split the network of members before everything that depends on a member, or on weights that are trained.

    A value passes from one part to the other where its rows are those of the examples. Others, such as sizes, are
    computed again. Raises `Unsupported` where there is nothing to split.

    Args:
        skeleton: The members' network.
        example: Inputs of two examples or more.
    """
    evaluation = _traced(skeleton, example, training=False)
    nodes, common = _training_steps(skeleton, evaluation, example)
    before = [node for node in nodes if node in common]
    unless_dropped = _common(evaluation)
    with_rows, batch_sizes = _kinds(skeleton, before, example)
    rest = [node for node in nodes if node not in common]
    passed: dict[Node, None] = {}

    def note(node: Node) -> None:
        if node in with_rows:
            passed[node] = None
        elif node not in batch_sizes:
            for source in node.all_input_nodes:
                note(source)

    for node in rest:
        for source in node.all_input_nodes:
            if source in common:
                note(source)
    network = skeleton.network
    dropped = [
        node for node, other in zip(nodes, evaluation, strict=True) if node not in common and other in unless_dropped
    ]
    names = [str(node.target) if node.op == "call_module" else name_of(node) for node in dropped]
    if all(value.op == "placeholder" for value in passed):
        raise Unsupported(f"{names[0]} drops units of each member" if names else "members share nothing before it")
    dropout = names[0] if any(has_parameters(network, node) for node in dropped) else ""
    own = own_part(back(network, rest, list(passed), batch_sizes).graph, network)
    return CommonSplit(front(network, before, list(passed)), own, dropout)


def _training_steps(
    skeleton: Skeleton, evaluation: Sequence[Node], example: NetworkInputs
) -> tuple[list[Node], set[Node]]:
    """The steps of the network in training, which are those of evaluation, and those of them that are common."""
    problem = ""
    for may_drop in (_never, may_drop_units):  # the latter reads code, and suspects layers that drop nothing
        try:
            nodes = _traced(skeleton, example, training=True, may_drop=may_drop)
        except Unsupported as reason:
            problem = str(reason)
            continue
        common = _common(nodes)
        if steps_of(nodes) != steps_of(evaluation):
            problem = "its steps differ between training and evaluation; nn.Dropout is a layer, F.dropout is not"
        elif _draws(skeleton, [node for node in nodes if node in common], example):
            problem = "it draws random numbers"
        else:
            return nodes, common
    raise Unsupported(_dropping_layer(skeleton) or problem)


def _dropping_layer(skeleton: Skeleton) -> str:
    """A sentence about a layer of dropout that lies in a layer of shared weights; empty without one."""
    with _mode(skeleton, False):
        layers = [layer for layer in common_layers(skeleton) if any(True for _ in layer.parameters())]
    inside = {part for layer in layers for part in layer.modules()}
    for name, module in skeleton.network.named_modules():
        if isinstance(module, KeyedDropout | KeyedDropPath) and module in inside and module.p:
            return f"{name} drops units of each member with rate {module.p}"
    return ""


def _common(nodes: Sequence[Node]) -> set[Node]:
    """Nodes whose values are common, and come from such values alone."""
    common: set[Node] = set()
    for node in nodes:
        if node.op != "output" and is_common(node) and common.issuperset(node.all_input_nodes):
            common.add(node)
    return common


def _never(layers: list[nn.Module]) -> bool:  # noqa: ARG001
    return False


@contextmanager
def _mode(skeleton: Skeleton, training: bool) -> Iterator[None]:
    """A block in which the network is in a mode, apart from layers that stay in evaluation."""
    before = [(module, module.training) for module in skeleton.network.modules()]
    fixed = set(skeleton.fixed_layers())
    for module, _ in before:
        module.training = training and module not in fixed
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


class _SplitTracer(CommonTracer):
    """Takes layers of torch, and layers without others inside, as they are; inputs are those of an example."""

    def __init__(
        self,
        skeleton: Skeleton,
        keys: Mapping[str, frozenset[str]],
        layers: Iterable[nn.Module],
        example: NetworkInputs,
    ) -> None:
        super().__init__(keys, False, layers)
        trained = {id(tensor) for tensor in skeleton.shared_tensors().values() if tensor.requires_grad}
        self.whole = {layer for layer in self.whole if trained.isdisjoint(map(id, layer.parameters()))}
        self.example, self.output, self.training = example, skeleton.output, skeleton.network.training

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is not looked into."""
        return not list(m.children()) or fx.Tracer.is_leaf_module(self, m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:  # noqa: ARG002
        """One placeholder for every tensor of the example; the result is what counts as a member's output."""
        found, rebuilt = calls.split_tensors(self.example)
        inputs = [self.create_proxy("placeholder", f"input_{place}", (), {}) for place in range(len(found))]

        def called(network: nn.Module):
            result = calls.outputs_of(functools.partial(root_fn, network), rebuilt(inputs))  # pyright: ignore[reportArgumentType]
            return result if self.output is None else calls.part(result, self.output)

        return called, [self.root]

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> Node:
        """A node that knows whether its value is common; random numbers belong to each member."""
        node = super().create_node(kind, target, *rest, **named)
        if kind in ("call_function", "call_method"):
            name = name_of(node)
            if RANDOM.search(name) or ("drop" in name and self.training):
                node.meta["common"] = False
        return node


def _traced(
    skeleton: Skeleton,
    example: NetworkInputs,
    *,
    training: bool,
    may_drop: Callable[[list[nn.Module]], bool] = may_drop_units,
) -> list[Node]:
    """Steps of the network in a mode; what belongs to members or is trained is not common."""
    trained = [tensor for tensor in skeleton.shared_tensors().values() if tensor.requires_grad]
    keys = keys_of(skeleton, [*skeleton.tensors().values(), *trained])
    with _mode(skeleton, training), shapes_unchecked():
        layers = common_layers(skeleton, may_drop)
        nodes = list(skeleton.trace(_SplitTracer(skeleton, keys, layers, example)).nodes)
    if not isinstance(nodes[-1].args[0], Node):
        raise Unsupported("it returns more than one tensor")
    return nodes


def _values(network: nn.Module, nodes: Sequence[Node], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The values of all steps for inputs, which are copied."""
    values = front(network, nodes, nodes)(*(tensor.clone() for tensor in inputs))
    return values if len(nodes) > 1 else (values,)


def _draws(skeleton: Skeleton, nodes: Sequence[Node], example: NetworkInputs) -> bool:
    """Whether steps draw random numbers in training."""
    device = calls.first_tensor(example).device
    with torch.no_grad(), generators_kept(device), _mode(skeleton, True):
        before = GlobalGenerators.now(device)
        _values(skeleton.network, nodes, calls.tensors(example))
        return before.drawn_from()


def _kinds(skeleton: Skeleton, nodes: Sequence[Node], example: NetworkInputs) -> tuple[set[Node], set[Node]]:
    """Nodes whose values have one row per example, which depends on that example alone; and numbers of examples."""
    count = calls.examples(example)
    sizes = count, count // 2
    with torch.no_grad(), _mode(skeleton, False):
        inputs = calls.tensors(example)
        values = [_values(skeleton.network, nodes, [tensor[:size] for tensor in inputs]) for size in sizes]
    pairs = dict(zip(nodes, zip(*values, strict=True), strict=True))
    rows = {node for node, (value, first) in pairs.items() if _are_rows(value, first, count)}
    return rows, {node for node, pair in pairs.items() if all(type(v) is int for v in pair) and pair == sizes}


def _are_rows(value: object, first: object, count: int) -> bool:
    """Whether the value of some examples is the first part of the value of all of them."""
    if not isinstance(value, Tensor) or not isinstance(first, Tensor) or not value.ndim or len(value) != count:
        return False
    if first.shape != (count // 2, *value.shape[1:]):
        return False
    if not value.is_floating_point():
        return torch.equal(value[: len(first)], first)
    allowed = math.sqrt(torch.finfo(value.dtype).eps)  # sums are rounded otherwise in batches of another size
    largest = float(first.abs().nan_to_num(0, 0, 0).max()) if first.numel() else 0.0
    return torch.allclose(value[: len(first)], first, allowed, allowed * largest, equal_nan=True)


def own_part(graph: fx.Graph, network: nn.Module) -> fx.GraphModule:
    """The rest of a network, by the steps of it, with the layers of the network.

    They come in their order in the network, and with all of its dropout, by which masks are keyed.
    """
    part = fx.GraphModule(network, graph)
    for path, layer in network.named_modules():
        if keyed_layers([layer]):
            part.add_submodule(path, layer)
    for path, module in list(part.named_modules()):
        order = {name: place for place, name in enumerate(network.get_submodule(path)._modules)}
        if module is not network.get_submodule(path):
            module._modules = dict(sorted(module._modules.items(), key=lambda entry: order[entry[0]]))
    for name in (FUNCTIONAL_KEY, FUNCTIONAL_STEP):
        if name in network._buffers:
            part.register_buffer(name, network._buffers[name], persistent=False)
    return part

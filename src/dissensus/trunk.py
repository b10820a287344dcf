"""Shallow ensembles: many heads on one frozen trunk, which is computed once for all of them."""

import copy
import operator
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jaxtyping
import torch
from jaxtyping import Shaped
from torch import Tensor, fx, nn
from torch.fx import Node

from dissensus import checks
from dissensus.ensemble import Ensemble

_MAKING = (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.cat)
"""Functions that never give a view of what they are given."""


class SharedTrunk(nn.Module):
    """Heads on one frozen backbone: ``x [B, ...] -> [M, B, ...]``, with the backbone computed once for all members.

    Args:
        backbone: Any module. It is not copied: from now on it is in evaluation mode, whatever `train` says, and its
            parameters want no gradient. Gradients with respect to inputs pass through it.
        heads: An `Ensemble` that takes what the backbone gives, of whatever shape.
        cut: Features are what the layer of this name gives, at its first call; the rest of the backbone is not
            computed. By default they are what the backbone gives.

    What is trained are the heads: ``fit(trunk.heads, (trunk.features(x), y), ...)``, or on features that
    `dissensus.data.features.cached_features` keeps on disk, or, where each step is to see inputs of its own, with
    ``fit(trunk.heads, (x, y), ..., augment=lambda x, generator: trunk.features(flips(x, generator)))``.

    >>> backbone = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))
    >>> trunk = SharedTrunk(backbone, Ensemble(lambda: nn.Linear(8, 2), members=5), cut="1")
    >>> x = torch.ones(7, 3)
    >>> trunk.features(x).shape, trunk(x).shape
    (torch.Size([7, 8]), torch.Size([5, 7, 2]))

    The heads are also what is saved; a trunk is built again from its backbone and loaded heads.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trunk.heads.save(folder)
    ...     again = SharedTrunk(backbone, Ensemble.load(folder, lambda: nn.Linear(8, 2)), cut="1")
    >>> torch.allclose(again(x), trunk(x))
    True
    """

    def __init__(self, backbone: nn.Module, heads: Ensemble, *, cut: str | None = None) -> None:
        super().__init__()
        if not isinstance(backbone, nn.Module):
            checks.refuse("backbone", "be an nn.Module", type(backbone).__name__, error=TypeError)
        if not isinstance(heads, Ensemble):
            fix = "Modules that exist? Use Ensemble.from_modules."
            checks.refuse("heads", "be an Ensemble", type(heads).__name__, fix, TypeError)
        if cut is not None:
            _check_name(backbone, cut)
        self.backbone, self.heads, self.cut = backbone, heads, cut
        backbone.requires_grad_(False)
        self.train(heads.training)

    def train(self, mode: bool = True) -> "SharedTrunk":
        """Put the heads into training or evaluation mode; the backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    @property
    def members(self) -> int:
        """M."""
        return self.heads.members

    def features(self, x: Shaped[Tensor, "B *S"]) -> Shaped[Tensor, "B *F"]:
        """What the heads see: the output of the backbone, or of its layer ``cut``."""
        if self.backbone.training:  # someone else holds it too
            self.backbone.eval()
        x = x.clone()  # the backbone may write into what it is handed
        found = self.backbone(x) if self.cut is None else self._until(self.cut, x)
        if not isinstance(found, Tensor):
            name, fix = ("backbone", "Name a layer to `cut` at.") if self.cut is None else ("cut", "Cut elsewhere.")
            what = "give one tensor" if self.cut is None else "name a layer that gives one tensor"
            checks.refuse(name, what, f"a {type(found).__name__}", fix, TypeError)
        return found

    def _until(self, cut: str, x: Tensor) -> object:
        """The output of a layer; the pass ends there."""
        found: list[object] = []
        thread = threading.get_ident()

        def stop(_layer: nn.Module, _inputs: object, output: object) -> None:
            if threading.get_ident() == thread:  # a pass in another thread has a hook of its own
                found.append(output)
                raise _Reached

        hook = self.backbone.get_submodule(cut).register_forward_hook(stop)
        try:
            self.backbone(x)
        except _Reached:
            return found.pop()
        finally:
            hook.remove()
        fix = "It is there, but the forward pass does not call it."
        checks.refuse("cut", "name a layer that the backbone comes to", repr(cut), fix)

    def forward(self, x: Shaped[Tensor, "B *S"]) -> Shaped[Tensor, "M B *R"]:
        """Member outputs."""
        return self.heads(self.features(x))

    def extra_repr(self) -> str:
        """Where the backbone ends."""
        return "" if self.cut is None else f"cut={self.cut!r}"


class _Reached(BaseException):
    """The pass has come to the cut. No ``except Exception`` of a foreign forward pass holds it up."""


def last_layers(
    network: nn.Module,
    cut: str | int,
    *,
    members: int,
    seed: int = 0,
    start: Literal["copy", "fresh"] = "copy",
) -> SharedTrunk:
    """Split a network in two: a frozen trunk, and M heads that are the layers behind the cut. The network is copied.

    With ``start="copy"``, in evaluation mode, every member gives what the network gives.

    Args:
        network: Any that ``torch.fx`` can follow, with one input and one output.
        cut: The name of a layer, or of a container such as ``"features"``: the trunk ends behind its last step. Or a
            number k: the trunk ends just before the last k layers that have parameters (batch norm is one).
        members: M.
        seed: Determines first weights with ``start="fresh"``, and dropout outside of `fit`.
        start: Heads start as copies of the network's layers, or ``"fresh"``: drawn anew by each layer's
            ``reset_parameters``, under the seed of the member.

    Heads are loaded into a trunk that was split in the same way:
    ``trunk.heads = Ensemble.load(folder, lambda: trunk.heads.member(0))``.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> trunk = last_layers(network, 2, members=5)
    >>> trunk.features(torch.zeros(7, 3)).shape, sum(p.numel() for p in trunk.heads.member(0).parameters())
    (torch.Size([7, 8]), 90)
    >>> torch.allclose(trunk(torch.ones(7, 3))[4], network(torch.ones(7, 3)))
    True
    """
    if not isinstance(network, nn.Module):
        checks.refuse("network", "be an nn.Module", type(network).__name__, error=TypeError)
    checks.count("members", members)
    checks.count("seed", seed, 0)
    checks.one_of("start", start, ("copy", "fresh"))
    if isinstance(cut, str):
        _check_name(network, cut)
    else:
        checks.count("cut", cut)
    own = copy.deepcopy(network)
    training, nodes = _steps(own, cut)
    end = _behind(own, nodes, cut) if isinstance(cut, str) else _before_the_last(own, nodes, cut)
    passed = _passed(nodes, end)
    if len(passed) != 1 or passed[0].op == "placeholder":
        _refuse_cut(own, nodes, cut, passed)
    _check_same(training[end - len(nodes) :], nodes[end:])
    trunk, tail = _front(own, nodes[:end], passed[0]), _back(own, nodes[end:], passed[0])
    if not any(parameter.requires_grad for parameter in tail.parameters()):
        frozen = any(True for _ in tail.parameters())
        fix = "They are frozen: set requires_grad." if frozen else "Cut earlier."
        checks.refuse("cut", "leave layers to train behind it", repr(cut), fix)
    if start == "fresh":
        _check_resettable(tail)
    heads = Ensemble(lambda: _reset(copy.deepcopy(tail)) if start == "fresh" else copy.deepcopy(tail), members, seed)
    return SharedTrunk(trunk, heads).train(network.training)


def _check_name(network: nn.Module, cut: str) -> None:
    names = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    if cut not in names:
        outer = ", ".join(name for name in names if "." not in name)
        fix = checks.nearest(cut, names, f"Layers: {outer}." if names else "It has no layers inside.")
        checks.refuse("cut", "name a layer of the network", repr(cut), fix)


class _Tracer(fx.Tracer):
    """Looks into every module that has others inside, down to the cut, but not into those of torch."""

    def __init__(self, cut: str | int) -> None:
        super().__init__()
        self.cut = str(cut)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self.cut.startswith(f"{module_qualified_name}."):
            return False
        return not any(True for _ in m.children()) or super().is_leaf_module(m, module_qualified_name)


def _steps(network: nn.Module, cut: str | int) -> tuple[list[Node], list[Node]]:
    """The steps of a network in training, and in evaluation."""
    checked = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)  # what goes through layers now are stand-ins for tensors
    try:
        training = list(_Tracer(cut).trace(network.train()).nodes)
        nodes = list(_Tracer(cut).trace(network.eval()).nodes)
    except Exception as reason:  # a tracer runs foreign code: anything may come out of it
        got = f"{type(network).__name__} ({(str(reason).splitlines() or [type(reason).__name__])[0]})"
        fix = "Build the heads by hand, and use SharedTrunk(backbone, heads, cut=...)."
        checks.refuse("network", "be one that torch.fx can follow", got, fix)
    finally:
        jaxtyping.config.update("jaxtyping_disable", checked)
    inputs = [str(node.target) for node in nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        fix = "Wrap it in a module whose forward pass takes one."
        checks.refuse("network", "take one input", ", ".join(inputs) or "none", fix)
    if not isinstance(nodes[-1].args[0], Node):
        checks.refuse("network", "return one tensor", f"a {type(nodes[-1].args[0]).__name__}")
    return training, nodes


def _check_same(training: Sequence[Node], nodes: Sequence[Node]) -> None:
    """Heads are trained, so what they do must not depend on the mode, but for what their layers make of it."""
    steps = [[(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in each] for each in (training, nodes)]
    if steps[0] != steps[1]:
        fix = "Use layers for what only training does: nn.Dropout instead of functional dropout."
        checks.refuse("network", "do the same steps behind the cut in training and evaluation", "others", fix)


def _behind(network: nn.Module, nodes: Sequence[Node], cut: str) -> int:
    """The place behind the last step of a layer or container."""
    layer = network.get_submodule(cut)
    name = next(name for name, other in network.named_modules() if other is layer)  # a shared layer goes by its first
    inside = [
        place
        for place, node in enumerate(nodes)
        if any(path == name for path, _ in node.meta.get("nn_module_stack", {}).values())
    ]
    if not inside:
        checks.refuse("cut", "name a layer that the network comes to", repr(cut), "Its forward pass does not call it.")
    return inside[-1] + 1


def _before_the_last(network: nn.Module, nodes: Sequence[Node], count: int) -> int:
    """The place before the last layers that have parameters."""
    places = _places(network, nodes)
    if count >= len(places):
        fix = "All of them? Use Ensemble.from_modules." if places else ""
        checks.refuse("cut", f"leave a layer for the trunk, of {len(places)} with parameters", count, fix)
    return places[count - 1]


def _places(network: nn.Module, nodes: Sequence[Node]) -> list[int]:
    """The places of layers that have parameters, from the last to the first; a layer of several calls counts once."""
    places: dict[str, int] = {}
    for place in reversed(range(len(nodes))):
        if _has_parameters(network, nodes[place]):
            places.setdefault(str(nodes[place].target), place)
    return list(places.values())


def _has_parameters(network: nn.Module, node: Node) -> bool:
    return node.op == "call_module" and any(True for _ in network.get_submodule(str(node.target)).parameters())


def _passed(nodes: Sequence[Node], end: int) -> list[Node]:
    """Values that steps behind a place need of the steps before it; parameters are not passed, but named anew."""
    before = {node for node in nodes[:end] if node.op != "get_attr"}
    return list(dict.fromkeys(source for node in nodes[end:] for source in node.all_input_nodes if source in before))


def _refuse_cut(network: nn.Module, nodes: Sequence[Node], cut: str | int, passed: Sequence[Node]) -> None:
    """Say why a cut is none, and where the nearest one is."""

    def is_cut(end: int) -> bool:
        found = _passed(nodes, end)
        return len(found) == 1 and found[0].op != "placeholder"

    if isinstance(cut, int):
        good = [count for count, end in enumerate(_places(network, nodes)[:-1], 1) if is_cut(end)]
        near = sorted(sorted(good, key=lambda count: abs(count - cut))[:2])
        fix = f"Possible: {' or '.join(map(str, near))}." if near else ""
    else:
        parts = cut.split(".")
        outer = [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
        good = [name for name in outer if is_cut(_behind(network, nodes, name))]
        fix = f"Cut behind the whole of {good[0]!r}." if good else ""
    names = ", ".join(node.name for node in passed) or "none"
    got = f"{cut!r}, where {len(passed)} go ({names})" if len(passed) != 1 else f"{cut!r}, where its input goes past it"
    checks.refuse("cut", "be where one value goes from the trunk to the heads", got, fix)


def _front(network: nn.Module, nodes: Sequence[Node], features: Node) -> fx.GraphModule:
    """The steps before the cut as a network."""
    graph = fx.Graph()
    held: dict[Node, Node] = {}
    for node in nodes:
        held[node] = graph.node_copy(node, held.__getitem__)
    graph.output(held[features])
    graph.lint()
    return fx.GraphModule(network, graph)


def _back(network: nn.Module, nodes: Sequence[Node], features: Node) -> fx.GraphModule:
    """The steps behind the cut as a network."""
    graph = fx.Graph()
    given = graph.placeholder("features")
    if _writes_into(network, nodes, features):
        given = graph.call_function(torch.mul, (given, 1))  # a copy, in a form that batched products know
    held: dict[Node, Node] = {features: given}
    for node in nodes[:-1]:
        for source in node.all_input_nodes:
            if source not in held:  # a parameter that was first named before the cut
                held[source] = graph.node_copy(source)
        held[node] = graph.node_copy(node, held.__getitem__)
    last: Any = nodes[-1].args[0]
    graph.output(held[last])
    graph.lint()
    return fx.GraphModule(network, graph)


def _writes_into(network: nn.Module, nodes: Sequence[Node], features: Node) -> bool:
    """Whether a step may write into the features, which all members share."""
    same = {features}
    for node in nodes:
        if same.isdisjoint(node.all_input_nodes):
            continue
        if _writes(network, node):
            return True
        if not _has_parameters(network, node) and node.target not in _MAKING:  # it may give a view of them
            same.add(node)
    return False


def _writes(network: nn.Module, node: Node) -> bool:
    """Whether a step may write into what it is given."""
    if node.op == "call_module":
        return bool(getattr(network.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.kwargs.get("inplace") is True or any(argument is True for argument in node.args)
    assigns = getattr(node.target, "__module__", "") == "_operator" and (name.startswith("i") or name == "setitem")
    return in_place or assigns or (name.endswith("_") and not name.endswith("__"))


def _check_resettable(tail: nn.Module) -> None:
    for name, layer in tail.named_modules():
        if any(True for _ in layer.parameters(recurse=False)) and _resetting(layer) is None:
            got = f"{name or 'a parameter of the network itself'} ({type(layer).__name__})"
            fix = "Give it one, or use start='copy'."
            checks.refuse("start", "be 'copy' where a layer has no `reset_parameters`", got, fix)


def _resetting(layer: nn.Module) -> Any:
    """How a layer draws its weights anew; attention keeps that to itself."""
    return getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)


def _reset(head: nn.Module) -> nn.Module:
    for layer in reversed(list(head.modules())):  # what holds other layers has the last word
        reset = _resetting(layer)
        if reset is not None:
            reset()
    return head

"""Shallow ensembles: many heads on one frozen trunk, which is computed once for all of them."""

import copy
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, fx, nn
from torch.fx import Node

from dissensus import calls, checks
from dissensus.calls import NetworkInputs, network_inputs
from dissensus.dropout import keyed, keyed_layers
from dissensus.ensemble import Ensemble
from dissensus.execution import StackedMembers, Unsupported
from dissensus.execution.exporting import is_exporting
from dissensus.execution.skeleton import Skeleton
from dissensus.execution.splitting import (
    back,
    common_split,
    front,
    has_parameters,
    own_part,
    shapes_unchecked,
    steps_of,
)

log = logging.getLogger("dissensus")


class SharedTrunk(nn.Module):
    """Heads on one frozen backbone: ``x [B, ...] -> [M, B, ...]``, with the backbone computed once for all members.

    Args:
        backbone: Any module. It is not copied. It stays in evaluation mode, also after `train`, and its parameters get
            no gradient. Gradients with respect to inputs pass through it.
        heads: An `Ensemble` that takes the backbone's outputs, which may have any shape.
        cut: Name of the layer whose output, at its first call, is the features. The rest of the backbone is not
            computed. The default is the output of the backbone.

    It is a view of members that share their first part: `ensemble` returns the same members as an ordinary `Ensemble`
    with shared weights, and `of` makes the trunk of such an ensemble. Here only the heads are trained:
    ``fit(trunk.heads, (trunk.features(x), y), ...)``, or on features that `dissensus.data.features.cached_features`
    keeps on disk. For augmented inputs use
    ``fit(trunk.heads, (x, y), ..., augment=lambda x, generator: trunk.features(flips(x, generator)))``.

    >>> backbone = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))
    >>> trunk = SharedTrunk(backbone, Ensemble(lambda: nn.Linear(8, 2), members=5), cut="1")
    >>> x = torch.ones(7, 3)
    >>> trunk.features(x).shape, trunk(x).shape
    (torch.Size([7, 8]), torch.Size([5, 7, 2]))

    Only the heads are saved. A trunk is rebuilt from its backbone and loaded heads.

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
        self._whole: _Whole | None = None
        backbone.requires_grad_(False)
        self.train(heads.training)

    @classmethod
    def of(cls, ensemble: Ensemble, example: Any) -> "SharedTrunk":
        """The part that members of an ensemble compute alike, and the rest of them, which is trained.

        The common part is found by tracing: all that is computed from inputs and from frozen weights that members
        share, and that no dropout reaches in training. Trunk and heads have the layers of the ensemble, and no copies
        of them: `fit` of the heads trains the ensemble, as `fit` of the ensemble does, to rounding.

        >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> def with_head():
        ...     member = copy.deepcopy(network).requires_grad_(False)
        ...     member[2] = nn.Linear(8, 2)
        ...     return member
        >>> ens, x, y = Ensemble(with_head, members=5, shared="frozen"), torch.rand(7, 3), torch.arange(7) % 2
        >>> trunk = SharedTrunk.of(ens, x)
        >>> trunk.features(x).shape
        torch.Size([7, 8])
        >>> import functools
        >>> import dissensus as ds
        >>> objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
        >>> _ = ds.fit(trunk.heads, (trunk.features(x), y), objective, epochs=1)
        >>> torch.allclose(ens(x), trunk(x)), trunk.ensemble() is ens
        (True, True)

        Args:
            ensemble: Members that share frozen weights, on the device on which they are trained.
            example: Inputs of two examples or more, as for `Ensemble.predict`: a tensor, a dictionary of named inputs,
                or a tuple of inputs. The trunk takes inputs of this form.

        Where several values pass from the common part to the rest, such as hidden states and a mask, ``features`` are a
        tuple, which `fit` takes as the inputs of heads. The record of training rows of the ensemble is unknown once its
        heads are trained, since features tell nothing about rows. Other heads, such as loaded ones, may replace those
        of the trunk; `ensemble` then returns other members.
        """
        if not isinstance(ensemble, Ensemble):
            checks.refuse("ensemble", "be an Ensemble", type(ensemble).__name__, error=TypeError)
        ensemble.check_whole("a trunk")
        body, inputs = ensemble.body, network_inputs(example)
        if not isinstance(body, StackedMembers) or not body.shared_tensors():
            fix = 'Ensemble(..., shared="frozen") stores frozen weights once.'
            checks.refuse("ensemble", "share weights", "members that share none", fix)
        if calls.examples(inputs, "example") < 2:
            checks.refuse("example", "hold two examples or more", "one")
        try:
            split = common_split(body.skeleton, inputs)
        except Unsupported as reason:
            fix = "Or write both parts by hand: SharedTrunk(backbone, heads)."
            fix = f"Set the rate to 0 in `build`. {fix}" if "drops units" in str(reason) else fix
            checks.refuse("ensemble", "have a part that members compute alike", str(reason), fix)
        if split.dropout:
            log.warning(
                "members compute alike what lies before %s, which drops units in training; with a rate of 0 it is more",
                split.dropout,
            )
        common = {id(tensor) for tensor in body.shared_tensors().values()}
        names = {id(tensor): name for name, tensor in body.tensors().items()}
        hanging = Skeleton(split.own).tensors()
        heads = StackedMembers(split.own, shared=frozenset(n for n, t in hanging.items() if id(t) in common))
        heads.skeleton.share_lock(body.skeleton)
        modes = {layer: layer.training for layer in ensemble.modules()}
        backend = ensemble.body.requested_backend
        last = Ensemble.around(heads.train(ensemble.training), ensemble.seed, list(ensemble.member_ids), backend)
        last.in_bag = ensemble.in_bag
        last.tell(ensemble)
        trunk = cls(_Common(split.common), last)
        own = {name: names[id(tensor)] for name, tensor in heads.tensors().items() if id(tensor) in names}
        trunk._whole = _Whole(ensemble, trunk.heads, own, split.own.graph)
        try:
            trunk._check(inputs)
        except BaseException:
            for layer, mode in modes.items():
                layer.training = mode
            raise
        return trunk

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of a trunk has a copy of the ensemble, with the same weights as its heads."""
        super().__setstate__(state)
        if self._whole is not None:
            self._whole.heads.tell(self._whole.ensemble)

    @torch.no_grad()
    def _check(self, inputs: NetworkInputs) -> None:
        """Refuse a trunk with other members than the ensemble, as where a member writes into features."""
        assert self._whole is not None
        whole, heads, modes = self._whole.ensemble, self.heads, {layer: layer.training for layer in self._layers()}
        try:
            whole.eval()
            expected = whole.body.run(None, inputs, backend="loop")
            features = network_inputs(features_of(self.backbone, None, inputs))
            outputs = heads.body.run(None, features, backend="loop")
        finally:
            for layer, mode in modes.items():
                layer.training = mode
        allowed = math.sqrt(torch.finfo(expected.dtype).eps)
        if not torch.allclose(outputs, expected, allowed, allowed * float(expected.abs().max()), equal_nan=True):
            fix = "Do members write into what they share? Write both parts by hand: SharedTrunk(backbone, heads)."
            checks.refuse("ensemble", "give equal outputs when it is split", "other outputs", fix)

    def head(self, network: nn.Module) -> nn.Module:
        """The part of a network behind the trunk, for networks of the architecture of the ensemble (`of`).

        It builds heads of other runs: ``sweep(lambda: trunk.head(build()), (trunk.features(x), y), ...)``.

        >>> network = nn.Sequential(nn.Linear(3, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 2))
        >>> ens = Ensemble(lambda: copy.deepcopy(network), members=5, shared="frozen")
        >>> trunk = SharedTrunk.of(ens, torch.rand(4, 3))
        >>> trunk.head(network)(torch.rand(4, 8)).shape
        torch.Size([4, 2])
        """
        if self._whole is None:
            fix = "The heads of others have a `build` of their own."
            checks.refuse("trunk", "be that of an ensemble (SharedTrunk.of)", "another one", fix)
        return own_part(self._whole.graph, keyed(network)).train(network.training)

    def _layers(self) -> set[nn.Module]:
        assert self._whole is not None
        return {*self._whole.ensemble.modules(), *self.modules()}

    def train(self, mode: bool = True) -> "SharedTrunk":
        """Put the heads into training or evaluation mode; the backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    @property
    def members(self) -> int:
        """M."""
        return self.heads.members

    def features(self, *inputs: Any, **named: Any) -> Any:
        """Inputs of the heads: the output of the backbone, or of its layer ``cut``."""
        if self.backbone.training or self._whole is not None:  # another module that shares it has changed its mode
            self.backbone.eval()
        features = features_of(self.backbone, self.cut, calls.call(*inputs, **named))
        if not isinstance(features, Tensor) and self._whole is None:
            name, fix = ("backbone", "Name a layer to `cut` at.") if self.cut is None else ("cut", "Cut elsewhere.")
            requirement = "return one tensor" if self.cut is None else "name a layer that returns one tensor"
            checks.refuse(name, requirement, f"a {type(features).__name__}", fix, TypeError)
        return features

    def forward(self, *inputs: Any, **named: Any) -> Shaped[Tensor, "M B *R"]:
        """Member outputs."""
        return calls.outputs_of(self.heads, network_inputs(self.features(*inputs, **named)))

    def ensemble(self) -> Ensemble:
        """The same members as an ordinary `Ensemble` that shares the backbone.

        All that is possible with an ensemble is possible with it: attacks and audits of whole members, files that hold
        the backbone once, and `fit` on inputs instead of features, with the same result. For the trunk of an ensemble
        (`of`) this is the ensemble itself, or members of its architecture where heads have been replaced. Otherwise a
        member is a copy, ``nn.Sequential(Features(backbone, cut), head)``.

        >>> backbone = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))
        >>> trunk = SharedTrunk(backbone, Ensemble(lambda: nn.Linear(8, 2), members=5), cut="1")
        >>> ens = trunk.ensemble()
        >>> ens.shared[:2], torch.allclose(ens(torch.ones(7, 3)), trunk(torch.ones(7, 3)))
        (['0.backbone.0.weight', '0.backbone.0.bias'], True)
        """
        if self._whole is not None:
            return self._whole.ensemble if self.heads is self._whole.heads else self._whole.with_heads(self.heads)
        features = Features(_without_dropout(copy.deepcopy(self.backbone)), self.cut)
        heads = (self.heads.member(index) for index in range(self.members))
        members = (nn.Sequential(features, head).train(self.heads.training) for head in heads)
        body = StackedMembers.of(members, lambda name: name.startswith("0."))
        body.output = self.heads.output
        seed, ids = self.heads.seed, self.heads.member_ids
        body.set_keys([(seed, member) for member in ids])
        return Ensemble.around(body, seed, list(ids), self.heads.body.requested_backend)

    def extra_repr(self) -> str:
        """The layer at which the backbone ends."""
        return "" if self.cut is None else f"cut={self.cut!r}"


class _Whole(NamedTuple):
    """The ensemble that a trunk is a view of."""

    ensemble: Ensemble
    heads: Ensemble
    """The last part of its members."""
    names: dict[str, str]
    """Names of its tensors by those of the heads' tensors."""
    graph: fx.Graph
    """The steps of a head."""

    def with_heads(self, heads: Ensemble) -> Ensemble:
        """Members like those of the ensemble, with the weights of other heads."""
        body, own = self.ensemble.body.subset([0] * len(heads)), heads.body.tensors()
        missing = sorted(self.names.keys() ^ own.keys())
        if missing:
            fix = "Heads of this trunk are loaded by Ensemble.load(folder, lambda: trunk.heads.member(0))."
            checks.refuse("heads", "have the tensors of the trunk's heads", f"others ({missing[0]})", fix)
        tensors = body.tensors()
        for name, tensor in own.items():
            tensors[self.names[name]].data = tensor.detach().clone()
        return Ensemble.around(body, heads.seed, list(heads.member_ids), heads.body.requested_backend).train(
            heads.training
        )


class _Common(nn.Module):
    """The common part of members, for inputs in the form that the network takes."""

    def __init__(self, network: fx.GraphModule) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What passes to the rest of members."""
        return self.network(*calls.tensors(calls.call(*inputs, **named)))


def _without_dropout(backbone: nn.Module) -> nn.Module:
    """A backbone whose dropout layers, which drop nothing in evaluation mode, are gone.

    Masks are keyed by the place of a layer among those that drop units, so those of heads are what they are without it.
    """
    idle = {id(layer) for layer in keyed_layers(keyed(backbone).modules())}
    for module in list(backbone.modules()):
        for name, child in module._modules.items():
            if id(child) in idle:
                module._modules[name] = nn.Identity()
    return backbone


class Features(nn.Module):
    """The first part of a frozen network: its output, or that of its layer ``cut``. It stays in evaluation mode."""

    def __init__(self, backbone: nn.Module, cut: str | None = None) -> None:
        super().__init__()
        if cut is not None:
            _check_name(backbone, cut)
        self.backbone, self.cut = backbone.requires_grad_(False), cut

    def train(self, mode: bool = True) -> "Features":
        """Note the mode; the backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Inputs of a head."""
        return features_of(self.backbone, self.cut, calls.call(*inputs, **named))


def features_of(backbone: nn.Module, cut: str | None, inputs: NetworkInputs) -> Any:
    """The output of a backbone, or of its layer ``cut``."""
    inputs = calls.mapped(Tensor.clone, inputs)  # the backbone may write into its input
    return calls.outputs_of(backbone, inputs) if cut is None else output_at(backbone, cut, inputs)


class _Reached(BaseException):
    """Raised where a pass reaches the cut. No ``except Exception`` of a foreign forward pass catches it."""


def output_at(backbone: nn.Module, cut: str, x: NetworkInputs) -> object:
    """The output of a layer, at which the forward pass ends.

    ``torch.export`` follows a pass to its end. It drops what nothing needs, which is all that comes after the layer.
    """
    outputs: list[object] = []
    thread, exporting = threading.get_ident(), is_exporting()

    def stop(_layer: nn.Module, _inputs: object, output: object) -> None:
        if threading.get_ident() != thread or outputs:  # a pass in another thread has another hook
            return
        if exporting and isinstance(output, Tensor):
            output = output.clone()  # a later layer may write into it
        outputs.append(output)
        if not exporting:
            raise _Reached

    hook = backbone.get_submodule(cut).register_forward_hook(stop)
    try:
        calls.outputs_of(backbone, x)
    except _Reached:
        return outputs.pop()
    finally:
        hook.remove()
    if outputs:
        return outputs.pop()
    fix = "The backbone has it, but its forward pass does not call it."
    checks.refuse("cut", "name a layer that the backbone calls", repr(cut), fix)


def last_layers(
    network: nn.Module,
    cut: str | int,
    *,
    members: int,
    seed: int = 0,
    start: Literal["copy", "fresh"] = "copy",
) -> SharedTrunk:
    """Split a copy of a network in two: a frozen trunk, and M heads of the layers after the cut.

    With ``start="copy"``, in evaluation mode, the output of every member is that of the network. `fit` trains members
    on the same batches, so equal members stay equal unless they have dropout or ``active_members`` draws them.

    Args:
        network: A network that ``torch.fx`` can trace, with one input and one output.
        cut: Name of a layer, or of a container such as ``"features"``, after which the trunk ends. Or a number k: the
            trunk ends before the last k layers with parameters, among which batch norm counts.
        members: M.
        seed: Determines first weights with ``start="fresh"``, and dropout outside of `fit`.
        start: ``"copy"`` for heads that start with the network's weights, ``"fresh"`` for weights that each layer's
            ``reset_parameters`` draws under the seed of the member.

    Load heads into a trunk that was split in the same way:
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
    copied = copy.deepcopy(network)
    training, nodes = _steps(copied, cut)
    end = _after(copied, nodes, cut) if isinstance(cut, str) else _before_last(copied, nodes, cut)
    passed = _passed(nodes, end)
    if len(passed) != 1 or passed[0].op == "placeholder":
        _refuse_cut(copied, nodes, cut, passed)
    _check_same(training[end - len(nodes) :], nodes[end:])
    trunk, tail = front(copied, nodes[:end], passed), back(copied, nodes[end:], passed)
    if not any(parameter.requires_grad for parameter in tail.parameters()):
        frozen = any(True for _ in tail.parameters())
        fix = "They are frozen: set requires_grad." if frozen else "Cut earlier."
        checks.refuse("cut", "leave layers to train after it", repr(cut), fix)
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


class _CutTracer(fx.Tracer):
    """Traces into every module with submodules, down to the cut, but not into modules of torch."""

    def __init__(self, cut: str | int) -> None:
        super().__init__()
        self.cut = str(cut)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self.cut.startswith(f"{module_qualified_name}."):
            return False
        return not any(True for _ in m.children()) or super().is_leaf_module(m, module_qualified_name)


def _steps(network: nn.Module, cut: str | int) -> tuple[list[Node], list[Node]]:
    """The steps of a network in training, and in evaluation."""
    try:
        with shapes_unchecked():
            training = list(_CutTracer(cut).trace(network.train()).nodes)
            nodes = list(_CutTracer(cut).trace(network.eval()).nodes)
    except Exception as reason:  # a tracer runs foreign code, which may raise anything
        got = f"{type(network).__name__} ({(str(reason).splitlines() or [type(reason).__name__])[0]})"
        fix = "Build the heads by hand, and use SharedTrunk(backbone, heads, cut=...)."
        checks.refuse("network", "be traceable by torch.fx", got, fix)
    inputs = [str(node.target) for node in nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        fix = "Wrap it in a module whose forward pass takes one."
        checks.refuse("network", "take one input", ", ".join(inputs) or "none", fix)
    if not isinstance(nodes[-1].args[0], Node):
        checks.refuse("network", "return one tensor", f"a {type(nodes[-1].args[0]).__name__}")
    return training, nodes


def _check_same(training: Sequence[Node], nodes: Sequence[Node]) -> None:
    """Refuse heads whose steps differ between training and evaluation, apart from the modes of their layers."""
    if steps_of(training) != steps_of(nodes):
        fix = "Use layers for what only training does: nn.Dropout instead of functional dropout."
        checks.refuse("network", "do the same steps after the cut in training and evaluation", "different steps", fix)


def _after(network: nn.Module, nodes: Sequence[Node], cut: str) -> int:
    """The index after the last step of a layer or container."""
    layer = network.get_submodule(cut)
    name = next(name for name, other in network.named_modules() if other is layer)  # a shared layer has its first name
    inside = [
        place
        for place, node in enumerate(nodes)
        if any(path == name for path, _ in node.meta.get("nn_module_stack", {}).values())
    ]
    if not inside:
        checks.refuse("cut", "name a layer that the network calls", repr(cut), "Its forward pass does not call it.")
    return inside[-1] + 1


def _before_last(network: nn.Module, nodes: Sequence[Node], count: int) -> int:
    """The index before the last `count` layers with parameters."""
    places = _places(network, nodes)
    if count >= len(places):
        fix = "All of them? Use Ensemble.from_modules." if places else ""
        checks.refuse("cut", f"leave a layer for the trunk, of {len(places)} with parameters", count, fix)
    return places[count - 1]


def _places(network: nn.Module, nodes: Sequence[Node]) -> list[int]:
    """Indices of layers with parameters, from the last to the first. A layer that is called twice counts once."""
    places: dict[str, int] = {}
    for place in reversed(range(len(nodes))):
        if has_parameters(network, nodes[place]):
            places.setdefault(str(nodes[place].target), place)
    return list(places.values())


def _passed(nodes: Sequence[Node], end: int) -> list[Node]:
    """Values that steps from an index on take from the steps before it. Parameters are not passed, but named again."""
    before = {node for node in nodes[:end] if node.op != "get_attr"}
    return list(dict.fromkeys(source for node in nodes[end:] for source in node.all_input_nodes if source in before))


def _refuse_cut(network: nn.Module, nodes: Sequence[Node], cut: str | int, passed: Sequence[Node]) -> None:
    """Refuse a cut, and name the nearest possible one."""

    def is_cut(end: int) -> bool:
        values = _passed(nodes, end)
        return len(values) == 1 and values[0].op != "placeholder"

    if isinstance(cut, int):
        good = [count for count, end in enumerate(_places(network, nodes)[:-1], 1) if is_cut(end)]
        near = sorted(sorted(good, key=lambda count: abs(count - cut))[:2])
        fix = f"Possible: {' or '.join(map(str, near))}." if near else ""
    else:
        parts = cut.split(".")
        outer = [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
        good = [name for name in outer if is_cut(_after(network, nodes, name))]
        fix = f"Cut after the whole of {good[0]!r}." if good else ""
    names = ", ".join(node.name for node in passed) or "none"
    got = (
        f"{cut!r}, where {len(passed)} pass ({names})" if len(passed) != 1 else f"{cut!r}, where only its input passes"
    )
    checks.refuse("cut", "be where one value passes from the trunk to the heads", got, fix)


def _check_resettable(tail: nn.Module) -> None:
    for name, layer in tail.named_modules():
        if any(True for _ in layer.parameters(recurse=False)) and _resetting(layer) is None:
            got = f"{name or 'a parameter of the network itself'} ({type(layer).__name__})"
            fix = "Add this method, or use start='copy'."
            checks.refuse("start", "be 'copy' where a layer has no `reset_parameters`", got, fix)


def _resetting(layer: nn.Module) -> Any:
    """The method by which a layer draws its weights; it is private in attention."""
    return getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)


def _reset(head: nn.Module) -> nn.Module:
    for layer in reversed(list(head.modules())):  # containers come last
        reset = _resetting(layer)
        if reset is not None:
            reset()
    return head

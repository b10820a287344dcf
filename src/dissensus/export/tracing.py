"""Models as modules that ``torch.export`` can trace: ordinary layers in evaluation mode, and no backend to choose."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dissensus import calls, checks
from dissensus.calls import Call, NetworkInputs, OutputChoice, call, chosen_output, network_inputs
from dissensus.ensemble import Ensemble
from dissensus.execution import Body, StackedMembers
from dissensus.execution.compiled import original, uncompiled
from dissensus.execution.skeleton import Skeleton, members_inside
from dissensus.export.outputs import Outputs, checked
from dissensus.masks import MonteCarlo
from dissensus.trunk import Features, SharedTrunk


class Exportable(nn.Module):
    """A model and the function of its members' outputs, as one module that returns tensors by name."""

    def __init__(self, members: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.members, self._outputs = members, outputs

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Predictions and uncertainty by name."""
        return checked(self._outputs(self.members(*args, **kwargs)))


class Separate(nn.Module):
    """Members as ordinary networks, one after the other: ``[M, B, ...]``."""

    def __init__(self, networks: list[nn.Module], output: OutputChoice | None, copied: bool) -> None:
        super().__init__()
        self.networks, self._output, self._copied = nn.ModuleList(networks), output, copied
        self._inside = all(map(members_inside, networks))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of all members."""
        inputs = call(*args, **kwargs)
        outputs = [chosen_output(calls.outputs_of(network, self._own(inputs)), self._output) for network in self]
        return torch.cat(outputs) if self._inside else torch.stack(outputs)

    def _own(self, inputs: NetworkInputs) -> NetworkInputs:
        return calls.mapped(Tensor.clone, inputs) if self._copied else inputs

    def __iter__(self) -> Any:
        return iter(self.networks)


class Stacked(nn.Module):
    """Members of linear layers as batched products on stacked weights."""

    def __init__(self, body: StackedMembers) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of all members."""
        return self.body.run(None, x, backend="batched")


class OnTrunk(nn.Module):
    """Heads on features that are computed once."""

    def __init__(self, features: Features, heads: nn.Module) -> None:
        super().__init__()
        self.features, self.heads = features, heads

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of all heads."""
        return calls.outputs_of(self.heads, network_inputs(self.features(*args, **kwargs)))


def with_signature(exportable: Exportable, model: nn.Module, inputs: NetworkInputs) -> Exportable:
    """The module with a forward pass whose arguments have names; torch.export takes no ``**kwargs``."""
    args, kwargs = inputs if isinstance(inputs, Call) else ((inputs,), {})
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in (*_argument_names(model, inputs, len(args)), *kwargs)]

    def forward(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return Exportable.forward(exportable, *args, **kwargs)

    forward.__signature__ = inspect.Signature(parameters)
    exportable.forward = forward
    return exportable


def input_names(model: nn.Module, inputs: NetworkInputs) -> list[str]:
    """Names of all tensors of the inputs, in their order.

    >>> input_names(nn.Linear(1, 1), torch.zeros(1, 1)), input_names(nn.Linear(1, 1), call(ids=(torch.zeros(1), None)))
    (['input'], ['ids_0'])
    """
    args, kwargs = inputs if isinstance(inputs, Call) else ((inputs,), {})
    named = [*zip(_argument_names(model, inputs, len(args)), args, strict=True), *kwargs.items()]
    names = [
        "_".join([name, *map(_word, path)])
        for name, part in named
        for path, leaf in pytree.tree_flatten_with_path(part)[0]
        if isinstance(leaf, Tensor)
    ]
    return [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]


def _word(key: Any) -> str:
    """A step into a container: the key of a dictionary, a position or an attribute."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def _argument_names(model: nn.Module, inputs: NetworkInputs, count: int) -> list[str]:
    """Names of positional arguments: those of the network's forward pass, where it tells them."""
    if isinstance(inputs, Tensor):
        return ["input"]
    network = model.member(0) if isinstance(model, Ensemble) else original(model)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [entry.name for entry in inspect.signature(network.forward).parameters.values() if entry.kind in kinds]
    return [known[place] if place < len(known) else f"input_{place}" for place in range(count)]


def members_of(model: nn.Module, example: NetworkInputs) -> nn.Module:
    """A copy of a model whose outputs are ``[M, B, ...]``, in evaluation mode."""
    if not isinstance(model, nn.Module):
        fix = "Arrays of outputs need no network: pool them with dissensus.pooling."
        checks.refuse("model", "be an Ensemble or an nn.Module", type(model).__name__, fix, TypeError)
    if any(isinstance(layer, MonteCarlo) for layer in model.modules()):
        fix = "Use dissensus.masks.convert, whose masks are fixed."
        checks.refuse("model", "give the same outputs at any place of a batch", "Monte Carlo dropout", fix)
    model = original(model)
    if isinstance(model, SharedTrunk):
        with torch.no_grad():
            features = calls.outputs_of(model.features, example)
        heads = members_of(model.heads, network_inputs(features))
        return OnTrunk(Features(copy.deepcopy(model.backbone), model.cut), heads).eval()
    if isinstance(model, Ensemble):
        return _of_ensemble(model, example).eval()
    network = uncompiled(copy.deepcopy(model)).eval()
    return Separate([network], None, _writes(network, example)).eval()


def _of_ensemble(ensemble: Ensemble, example: NetworkInputs) -> nn.Module:
    ensemble.check_whole("an export")
    body = ensemble.body
    if isinstance(body, StackedMembers) and isinstance(example, Tensor) and not _convolves(body.network):
        copied = body.subset(range(len(body))).eval()
        copied.run(None, example, backend="batched")  # makes the plan, outside of the tracer; or shows that none exists
        if copied.ran == "batched" and not members_inside(body.network):
            return Stacked(copied)
    networks = _separate(body)
    return Separate(networks, body.output, any(_writes(network, example) for network in networks))


def _separate(body: Body) -> list[nn.Module]:
    """Members as ordinary networks, in evaluation mode. What they share is in all of them the same tensor."""
    networks: list[nn.Module] = []
    for index in range(len(body)):
        networks.append(body.member(index).eval())
        if body.shared_tensors():
            skeleton, first = Skeleton(networks[-1]), Skeleton(networks[0]).tensors()
            skeleton.hang({name: first[name] for name in body.shared_tensors()})
    return networks


def _convolves(network: nn.Module) -> bool:
    """Whether a network has convolutions; their batched form suits small ones only."""
    return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in network.modules())


@torch.no_grad()
def _writes(network: nn.Module, example: NetworkInputs) -> bool:
    """Whether a forward pass writes into its inputs, which other members and the caller still need."""
    own = calls.mapped(Tensor.clone, example)
    before = [tensor._version for tensor in calls.tensors(own)]
    calls.outputs_of(network, own)
    return before != [tensor._version for tensor in calls.tensors(own)]

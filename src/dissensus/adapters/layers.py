"""Which layers of a network get adapters, and how a layer is replaced."""

import copy
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dissensus import checks

LayerT = TypeVar("LayerT", bound=nn.Module)


class Adapted(nn.Module):
    """A layer with an adapter. Attributes that it does not have are those of the layer inside, ``base``.

    Foreign code may ask a layer for its ``weight``, its dtype or its sizes. ``weight`` is that of an ordinary layer
    with the same outputs.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # A special method of the layer inside, such as a parametrized layer's __deepcopy__, would copy that alone.
            if "base" not in self._modules or name.startswith("__"):
                raise
            return getattr(self._modules["base"], name)


def with_weight(layer: LayerT, weight: Tensor) -> LayerT:
    """A copy of a layer with another weight. Parametrizations, such as a weight norm, become plain parameters."""
    layer = copy.deepcopy(layer)
    if parametrize.is_parametrized(layer):
        # torch's function for it changes the class, which is that of the layer that was copied too.
        names = list(cast(nn.ModuleDict, layer.parametrizations))
        plain = {name: getattr(layer, name).detach() for name in names}
        layer.__class__ = parametrize.type_before_parametrizations(layer)
        del layer.parametrizations
        for name, tensor in plain.items():
            layer.register_parameter(name, nn.Parameter(tensor.clone()))
    with torch.no_grad():
        cast(Tensor, layer.weight).copy_(weight)
    return layer


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is ``Conv1D`` of transformers, as in GPT-2: a linear layer whose weight is ``[in, out]``."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def with_linear_layers(network: nn.Module) -> nn.Module:
    """The network with ordinary linear layers in place of transposed ones."""
    layers = {name: _linear(layer) for name, layer in network.named_modules() if is_transposed(layer)}
    return replaced(network, layers)


def _linear(layer: nn.Module) -> nn.Module:
    weight, bias = cast(nn.Parameter, layer.weight), cast(nn.Parameter, layer.bias)
    into, out = weight.shape
    linear = nn.Linear(into, out, device="meta")
    linear.weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
    linear.bias = bias
    return linear.train(layer.training)


Targets = str | Sequence[str] | None
"""Names of layers: patterns of whole names (``"encoder.*.query"``), or last parts of names as in peft (``"query"``)."""


def adaptable(network: nn.Module) -> dict[str, nn.Module]:
    """Linear layers, transposed ones too, and 2-D convolutions by name, in the network's order.

    Layers inside ``nn.MultiheadAttention`` are left out: it reads their weights and does not call them.
    """
    hidden = tuple(
        f"{name}." if name else "" for name, m in network.named_modules() if isinstance(m, nn.MultiheadAttention)
    )
    return {
        name: layer
        for name, layer in network.named_modules()
        if (isinstance(layer, nn.Linear | nn.Conv2d) or is_transposed(layer))
        and not (hidden and name.startswith(hidden))
    }


def check_network(network: object) -> None:
    """Refuse what is no network, and ensembles, whose layers hold the weights of all members."""
    if not isinstance(network, nn.Module):
        checks.refuse("network", "be an nn.Module", type(network).__name__, error=TypeError)
    if hasattr(network, "member_ids"):  # an Ensemble, which cannot be imported here: its room imports this one
        fix = "A member? Use ens.member(i)."
        checks.refuse("network", "be one network", "an Ensemble", fix, TypeError)


def chosen(network: nn.Module, targets: Targets) -> dict[str, nn.Module]:
    """The layers that ``targets`` names, or all of them. A target that matches nothing is refused."""
    if any(isinstance(module, Adapted) for module in network.modules()):
        checks.refuse("network", "have no adapters yet", "one that has", "Use adapters.merge(network) first.")
    layers = adaptable(network)
    if not layers:
        fix = "nn.MultiheadAttention reads its weights itself; use attention made of nn.Linear layers."
        checks.refuse("network", "have a linear layer or a 2-D convolution", type(network).__name__, fix)
    if targets is None:
        return layers
    patterns = [targets] if isinstance(targets, str) else list(targets)
    matches = {pattern: [name for name in layers if _matches(name, pattern)] for pattern in patterns}
    for pattern, names in matches.items():
        if not names:
            last_parts = sorted({name.rpartition(".")[2] for name in layers})
            listed = f"Last parts of names: {', '.join(last_parts)}."
            fix = checks.nearest(pattern, sorted({*last_parts, *layers}), listed)
            checks.refuse("targets", "name linear layers or 2-D convolutions of the network", repr(pattern), fix)
    named = {name for names in matches.values() for name in names}
    return {name: layer for name, layer in layers.items() if name in named}


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.endswith(f".{pattern}")


def replaced(network: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """The network with some layers replaced by name, at every place where they hang; a layer itself may be replaced."""
    if "" in layers:
        return layers[""]
    old = {id(network.get_submodule(name)): layer for name, layer in layers.items()}
    for module in list(network.modules()):
        for key, child in list(module._modules.items()):
            if child is not None and id(child) in old:
                module._modules[key] = old[id(child)]
    return network


def mapped(network: nn.Module, kinds: type | tuple[type, ...], make: Callable[..., nn.Module]) -> nn.Module:
    """The network with ``make(layer)`` in place of every layer of some types."""
    return replaced(network, {name: make(m) for name, m in network.named_modules() if isinstance(m, kinds)})

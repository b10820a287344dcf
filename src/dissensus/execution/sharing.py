"""Which tensors members share: stored once, ``[...]``, instead of once per member, ``[M, ...]``."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from dissensus import checks
from dissensus.dropout import key_tensors

Shared = str | Sequence[str] | Callable[[str], bool] | None
"""``"frozen"``, a pattern of names or several, a function of a name, or None."""

FROZEN = "frozen"


def shared_names(network: nn.Module, shared: Shared, names: Iterable[str]) -> frozenset[str]:
    """The names among ``names``, those of a network's parameters and buffers, that members share.

    With ``"frozen"`` these are the parameters that want no gradient, and the buffers of layers all of whose parameters
    are frozen, such as the statistics of a frozen batch norm. Of a module without parameters of its own, around frozen
    layers alone or inside of a module with frozen layers alone, these are the buffers that a state dict leaves out,
    which are constants. A tensor that hangs in several places is shared if one of them is chosen. Keys and counters of
    dropout belong to members, whatever matches their names.
    """
    if shared is None:
        return frozenset()
    keys = {id(tensor) for tensor in key_tensors(network.modules())}
    of_members = {name for name, buffer in network.named_buffers() if id(buffer) in keys}
    known = [name for name in names if name not in of_members]
    places = {place: name for place, name in _places(network).items() if name not in of_members}
    if isinstance(shared, str) and shared == FROZEN:
        return _frozen(network, known)
    got = "a function that chooses none"
    if callable(shared):
        chosen = {name for place, name in places.items() if shared(place)}
    elif not isinstance(shared, Iterable):
        checks.refuse("shared", _CHOICES, type(shared).__name__, error=TypeError)
    else:
        patterns, got = [shared] if isinstance(shared, str) else list(shared), "an empty list"
        for pattern in patterns:
            if not isinstance(pattern, str):
                checks.refuse("shared", _CHOICES, type(pattern).__name__, error=TypeError)
            if not any(fnmatchcase(place, pattern) for place in places):
                fix = checks.nearest(pattern, [FROZEN, *places], "Names are those of named_parameters() of a member.")
                if any(place.startswith(f"{pattern}.") for place in places):
                    fix = f"The layer? Use '{pattern}.*'."
                checks.refuse("shared", "match names of parameters", repr(pattern), fix)
        chosen = {name for place, name in places.items() if any(fnmatchcase(place, pattern) for pattern in patterns)}
    if not chosen:
        checks.refuse("shared", "choose parameters", got)
    return _with_members(network, frozenset(chosen), known)


_CHOICES = "be 'frozen', patterns of names, or a function of a name"


def _places(network: nn.Module) -> dict[str, str]:
    """All places of parameters and buffers; a tensor that hangs in several has the name of its first one."""
    first: dict[int, str] = {}
    tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    return {place: first.setdefault(id(tensor), place) for place, tensor in tensors}


def stored_choice(network: nn.Module, names: Sequence[str] | None) -> Shared:
    """Stored names of shared tensors as a choice for `shared_names`; None where the network has none of them."""
    return None if names is None or _places(network).keys().isdisjoint(names) else frozenset(names).__contains__


def _frozen(network: nn.Module, known: Sequence[str]) -> frozenset[str]:
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    if not frozen:
        fix = "Set requires_grad=False for what members share, or use adapters.lora."
        checks.refuse("shared", "be 'frozen' for networks with frozen parameters", "a network without any", fix)
    places = _places(network)
    for path, module in network.named_modules():
        own = [places[f"{path}.{key}".lstrip(".")] for key, p in module._parameters.items() if p is not None]
        buffers = {key for key, buffer in module._buffers.items() if buffer is not None}
        if not own and buffers:
            # Constants that code beside frozen layers reads, such as the numbers of positions in BERT, and the
            # frequencies of rotary positions, which lie in a module without parameters.
            around = _with_parameters(network, path)
            inside = network.get_submodule(around)
            own = [places[f"{around}.{name}".lstrip(".")] for name, _ in inside.named_parameters()]
            buffers &= module._non_persistent_buffers_set
        if own and frozen.issuperset(own):
            frozen |= {f"{path}.{key}".lstrip(".") for key in buffers}
    return _with_members(network, frozenset(name for name in known if name in frozen), known)


def _with_parameters(network: nn.Module, path: str) -> str:
    """The path of a module, or of the smallest one around it, that has parameters."""
    while path and not any(True for _ in network.get_submodule(path).parameters()):
        path = path.rpartition(".")[0]
    return path


def _with_members(network: nn.Module, chosen: frozenset[str], known: Sequence[str]) -> frozenset[str]:
    """The chosen names, if they leave a parameter for every member to have for itself, or a buffer such as a mask."""
    norms = (path for path, layer in network.named_modules() if isinstance(layer, nn.modules.batchnorm._NormBase))
    statistics = {f"{path}.{key}".lstrip(".") for path in norms for key in network.get_submodule(path)._buffers}
    if not any(name not in chosen and name not in statistics for name in known):
        fix = "Members that share all parameters are one network."
        checks.refuse("shared", "leave parameters that each member has for itself", "all of them", fix)
    return chosen


def equal_frozen(modules: Sequence[nn.Module]) -> list[str]:
    """Names of what `shared_names` calls frozen in the first module, and what is equal in all of them."""
    tensors = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]
    names = shared_names(modules[0], FROZEN, tensors[0])
    equal = [
        name
        for name in tensors[0]
        if name in names and all(name in own and torch.equal(own[name], tensors[0][name]) for own in tensors)
    ]
    if not equal:
        fix = "Different trunks? Leave `shared` out."
        checks.refuse(
            "shared", "be 'frozen' for modules with equal frozen parameters", "modules that differ in all", fix
        )
    return equal

"""What two networks must share to be run by one network's code, and what identifies an architecture."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, fx, nn

from dissensus.calls import OutputChoice
from dissensus.dropout import keyed
from dissensus.execution.compiled import uncompiled
from dissensus.execution.skeleton import Skeleton
from dissensus.fingerprint import fingerprint, hooks, module_settings

Visit = Callable[[object], None]
"""Called with every value that a fingerprint meets."""
Entry = tuple[str, str, str]
"""A layer, a setting of it, and the fingerprint of its value."""


def signature(network: nn.Module) -> list[Entry]:
    """Layers and their settings, as (layer, setting, fingerprint of its value)."""
    entries: list[Entry] = []
    for name, layer in network.named_modules():
        entries.append((name, "the class", f"{type(layer).__module__}.{type(layer).__qualname__}"))
        if isinstance(layer, fx.GraphModule):
            entries.append((name, "the code", layer.code))
            continue
        settings = module_settings(layer)
        entries += [(name, setting, fingerprint(value, opaque=[])) for setting, value in settings.items()]
    return entries


def other_class(first: nn.Module, second: nn.Module) -> str | None:
    """The name of the first layer whose class has the same name in two networks, but other code; None without one."""
    for (name, layer), other in zip(first.named_modules(), second.modules(), strict=False):
        if type(layer) is not type(other) and _class_fingerprint(type(layer)) != _class_fingerprint(type(other)):
            return name
    return None


def difference(settings: Sequence[Entry], shapes: Mapping[str, Sequence[int]], network: nn.Module) -> str | None:
    """The first difference of a network from an architecture, in words; None if there is none. Weights do not count.

    Args:
        settings: The `signature` of the architecture.
        shapes: Shapes of its tensors, by name.
        network: The network.
    """
    network = keyed(uncompiled(network))
    tensors = {name: list(tensor.shape) for name, tensor in Skeleton(network).tensors().items()}
    for name in [*shapes, *tensors]:
        if name not in shapes or name not in tensors:
            return f"there is {'a' if name in tensors else 'no'} tensor {name!r}"
        if tensors[name] != list(shapes[name]):
            return f"tensor {name!r} is {tensors[name]}, not {list(shapes[name])}"
    differing = sorted(set(signature(network)) ^ set(settings))
    if differing:
        layer, setting, _ = differing[0]
        return f"{setting} of {f'layer {layer!r}' if layer else 'the network'} differs"
    return None


def _class_fingerprint(kind: type) -> str:
    return fingerprint(kind, skip_counters=True, opaque=[])


def with_output(output: OutputChoice | None) -> tuple[object, ...]:
    """What a choice of output adds to an architecture: nothing without one, so that earlier checkpoints still fit."""
    return () if output is None else ("output", output)


def architecture_fingerprint(
    networks: Iterable[nn.Module],
    settings: Sequence[Sequence[Entry]],
    tensors: Mapping[str, Tensor],
    shapes: object,
    opaque: list[str] | None = None,
    visit: Visit | None = None,
) -> str:
    """A checksum of architectures, by which checkpoints recognise them. Classes and hooks count by their code.

    Args:
        networks: The networks; one for members that share an architecture.
        settings: The signature of each network, from before its first pass, which may change attributes.
        tensors: All tensors by name, whose numbers do not count.
        shapes: Shapes of the tensors, and how they are laid out.
        opaque: Gets the types of everything that cannot be inspected.
        visit: Called with everything that the networks consist of, apart from their tensors.
    """
    layers = [layer for network in networks for layer in network.modules()]
    parts = {id(part) for part in (*layers, *tensors.values())}
    code = [(type(layer), hooks(layer)) for layer in layers]
    opaque = [] if opaque is None else opaque

    def visited(value: object) -> object:
        value = "a part of the network" if id(value) in parts else value
        if visit is not None:
            visit(value)
        return value

    if visit is not None:
        for layer in layers:
            visit(layer)
        # Settings count as they were before the first pass; this walk through the present ones visits what they hold.
        fingerprint([module_settings(layer) for layer in layers], replace=visited, skip_counters=True, opaque=opaque)
    return fingerprint(
        [list(settings), list(tensors), shapes, code], replace=visited, skip_counters=True, opaque=opaque
    )

"""Dropout with masks keyed by run, member, layer and step, so that every backend drops the same units."""

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dissensus import checks
from dissensus.randomness import Use, derived_seed, keep_mask, seeded

UNITS = "units"
"""A buffer of keyed layers in padded networks: how many units are not padding. Masks are those of that width."""


class KeyedDropout(nn.Dropout):
    """Dropout with a counter instead of a global generator.

    ``key`` identifies run, member and layer, and ``step`` counts training passes. Both are buffers that ``state_dict``
    leaves out, so that a network with this layer loads weights of the same network with ordinary dropout.
    """

    key: Tensor
    step: Tensor

    def __init__(self, p: float = 0.5, channel_axes: int = 0, inplace: bool = False) -> None:
        super().__init__(p, inplace)
        self.channel_axes = channel_axes
        """Trailing axes that are dropped together: 0 for `nn.Dropout`, 2 for `nn.Dropout2d`."""
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's names it `input`
        """Drop units of one member's activations."""
        if not self.training or self.p == 0:
            return x
        shape = mask_shape(x.shape, self.channel_axes)
        self.step.add_(1)
        y = dropped(x, keep_mask(shape, self.p, self.key, self.step, self._buffers.get(UNITS)), self.p)
        return x.copy_(y) if self.inplace else y


class KeyedDropPath(nn.Module):
    """Stochastic depth with a counter instead of a global generator: drops a residual branch of whole examples.

    Stands in for timm's ``DropPath``, its copies in transformers and torchvision's ``StochasticDepth``, with their
    attributes. Key and step are those of `KeyedDropout`.
    """

    key: Tensor
    step: Tensor

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True, mode: str = "row") -> None:
        super().__init__()
        self.drop_prob = self.p = drop_prob
        self.scale_by_keep = scale_by_keep
        self.mode = mode
        """``"row"`` draws once per example, ``"batch"`` once for all of them."""
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Drop examples of one member's activations."""
        if not self.training or self.p == 0:
            return x
        rows = x.shape[:1] if self.mode == "row" else (1,)
        self.step.add_(1)
        keep = keep_mask((*rows, *[1] * (x.ndim - 1)), self.p, self.key, self.step)
        return dropped(x, keep, self.p) if self.scale_by_keep else torch.where(keep, x, 0.0)

    def extra_repr(self) -> str:
        """Settings in words."""
        return f"drop_prob={self.drop_prob}, scale_by_keep={self.scale_by_keep}, mode={self.mode}"


def mask_shape(shape: Sequence[int], channel_axes: int) -> tuple[int, ...]:
    """The shape of the mask of one member's activations, in which axes that are dropped together have length 1.

    As in torch, inputs of `nn.Dropout1d` and `nn.Dropout3d` may lack the batch axis. Those of `nn.Dropout2d` may not:
    its 3-D inputs are ``[N, C, L]``.

    >>> mask_shape((8, 3, 5, 5), 2), mask_shape((8, 3, 5), 2), mask_shape((3, 5), 1), mask_shape((8, 3), 0)
    ((8, 3, 1, 1), (8, 3, 1), (3, 1), (8, 3))
    """
    if channel_axes == 0:
        return tuple(shape)
    if channel_axes == 1 and len(shape) not in (2, 3):
        checks.refuse("input", "have the shape [N, C, L] or [C, L] for 1-D dropout of channels", list(shape))
    kept = 2 if channel_axes == 2 or len(shape) == channel_axes + 2 else 1
    return (*shape[:kept], *[1] * (len(shape) - kept))


def dropped(x: Float[Tensor, "*S"], keep: Tensor, p: float) -> Float[Tensor, "*S"]:
    """Set units to zero that are not kept, and rescale the rest. ``p=1`` drops everything."""
    if p == 1:
        return x * keep
    return torch.where(keep, x / (1 - p), 0.0)  # a product with 1/(1−p), rounded to bf16, would be biased


_CHANNEL_AXES: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


FUNCTIONAL_KEY, FUNCTIONAL_STEP = "_functional_dropout_key", "_functional_dropout_step"
"""Buffers of a network whose code may call functions that drop units; `state_dict` leaves them out."""


def keyed(network: nn.Module) -> nn.Module:
    """Replace every dropout layer of a network by a keyed one, in place.

    Layers are those of `nn.Dropout`, `nn.Dropout1d` to `nn.Dropout3d`, and of stochastic depth. A network whose code
    mentions dropout elsewhere gets a key for functions that drop units (`dissensus.execution.functional_dropout`).
    Other random layers do not change.
    """
    if type(network) in _CHANNEL_AXES:
        raise TypeError("a network that is only a dropout layer has nothing to train")
    replaced: dict[int, nn.Module] = {}  # a layer that is used in several places stays one layer
    for parent in list(network.modules()):
        for name, child in parent._modules.items():
            layer = None if child is None else replaced.get(id(child)) or _keyed_layer(child)
            if child is not None and layer is not None:
                if id(child) not in replaced:
                    vars(layer).update({key: value for key, value in vars(child).items() if "hook" in key})
                parent._modules[name] = replaced.setdefault(id(child), layer.train(child.training))
    if FUNCTIONAL_KEY not in network._buffers and any(
        map(_mentions_dropout, {type(module) for module in network.modules()})
    ):
        for name in (FUNCTIONAL_KEY, FUNCTIONAL_STEP):
            network.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)
    return network


def _keyed_layer(layer: nn.Module) -> nn.Module | None:
    """A keyed layer in place of another; None if the layer is none that can be replaced."""
    if isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d) and type(layer) in _CHANNEL_AXES:
        return KeyedDropout(layer.p, _CHANNEL_AXES[type(layer)], layer.inplace)
    if isinstance(layer, KeyedDropPath) or not type(layer).__name__.endswith(("DropPath", "StochasticDepth")):
        return None
    stand_in = KeyedDropPath(
        float(getattr(layer, "drop_prob", None) or getattr(layer, "p", None) or 0.0),
        bool(getattr(layer, "scale_by_keep", True)),
        str(getattr(layer, "mode", "row")),
    )
    return stand_in if _drops_examples(layer, stand_in) else None


def _drops_examples(layer: nn.Module, stand_in: KeyedDropPath) -> bool:
    """Whether a layer that is named for it does what its stand-in does, apart from which examples it drops."""
    if [*layer.children(), *layer.parameters(), *layer.buffers()] or not 0 <= stand_in.p <= 1:
        return False
    training, kept = layer.training, 1 / (1 - stand_in.p) if stand_in.scale_by_keep and stand_in.p < 1 else 1.0
    try:
        with torch.no_grad(), seeded(0):
            outputs = layer.train()(torch.ones(64, 2, 2)).flatten(1)
            unchanged = layer.eval()(torch.ones(64, 2, 2))
    except Exception:  # it takes something else
        return False
    finally:
        layer.train(training)
    if outputs.shape != (64, 4) or not bool((unchanged == 1).all()):
        return False
    whole = bool((outputs == outputs[:, :1]).all()) and (stand_in.mode == "row" or bool((outputs == outputs[0]).all()))
    return whole and bool(((outputs == 0) | ((outputs - kept).abs() < 1e-5)).all())


def _mentions_dropout(layer_class: type[nn.Module]) -> bool:
    """Whether the code of a class of layers has a name with "drop" in it; recurrent layers drop on their own.

    Inherited methods count, and `__init__` does not. Functions outside of classes are not looked into.
    """
    if issubclass(layer_class, KeyedDropout | KeyedDropPath | nn.RNNBase):
        return False
    classes = [cls for cls in layer_class.__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
    methods = [method for cls in classes for name, method in vars(cls).items() if name != "__init__"]
    return any("drop" in name.lower() for method in methods for name in _names(method))


def _names(method: object) -> Iterator[str]:
    """The names that the code of a method, and of functions inside of it, refers to; none for anything else."""
    function: Any = method.__func__ if isinstance(method, staticmethod | classmethod) else method
    codes = [getattr(inspect.unwrap(function), "__code__", None)] if callable(function) else []
    for code in codes:
        if isinstance(code, types.CodeType):
            yield from code.co_names
            codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def may_drop_units(modules: Iterable[nn.Module]) -> bool:
    """Whether these modules drop units, or call functions that may.

    A layer whose every rate is 0 drops none. Rates are attributes and layers inside of it with "drop" in their names.
    """
    return any(
        module.p > 0
        if isinstance(module, KeyedDropout | KeyedDropPath)
        else _mentions_dropout(type(module)) and _has_a_rate(module)
        for module in modules
    )


def _has_a_rate(layer: nn.Module) -> bool:
    """Whether a layer whose code mentions dropout has a rate above 0, or no rate that could be read."""
    named = [value for name, value in [*vars(layer).items(), *layer._modules.items()] if "drop" in name.lower()]
    rates = [value for value in (getattr(v, "p", v) for v in named) if isinstance(value, int | float)]
    return any(rate > 0 for rate in rates) or not named


def keyed_layers(modules: Iterable[nn.Module]) -> list[KeyedDropout | KeyedDropPath]:
    """The layers among these modules whose draws are keyed."""
    return [layer for layer in modules if isinstance(layer, KeyedDropout | KeyedDropPath)]


def is_idle(layer: nn.Module) -> bool:
    """Whether a layer is one of keyed draws that draws nothing as it is."""
    return isinstance(layer, KeyedDropout | KeyedDropPath) and (layer.p == 0 or not layer.training)


def key_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Keys and counters of draws in these modules."""
    found: list[Tensor | None] = []
    for module in modules:
        if isinstance(module, KeyedDropout | KeyedDropPath):
            found += [module.key, module.step]
        found += [module._buffers.get(FUNCTIONAL_KEY), module._buffers.get(FUNCTIONAL_STEP)]
    return [tensor for tensor in found if tensor is not None]


def counter_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of dropout's counters among those of a network's tensors.

    The counter of a keyed layer lies beside its key, and the one of functions has a name of its own. A buffer of the
    user that is called ``step`` is none.

    >>> number, counts = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2)
    >>> sorted(counter_names({"drop.key": number, "drop.step": number, "mine.step": number, "mine.mean": counts}))
    ['drop.step']
    """
    found: set[str] = set()
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        key = tensors.get(f"{path}.key")
        beside_key = key is not None and key.dtype == tensor.dtype == torch.int64 and key.shape == tensor.shape
        if last == FUNCTIONAL_STEP or (path and last == "step" and beside_key):
            found.add(name)
    return found


def set_keys(network: nn.Module, owners: Sequence[tuple[int, int]]) -> None:
    """Key stacked dropout layers, one row per owner (run seed, member), and reset their counters."""
    for index, layer in enumerate(keyed_layers(network.modules())):
        layer.key = _keys(owners, index, layer.key)
        layer.step = torch.zeros_like(layer.key)
    key = network._buffers.get(FUNCTIONAL_KEY)
    if key is not None:
        network._buffers[FUNCTIONAL_KEY] = _keys(owners, "functions", key)
        network._buffers[FUNCTIONAL_STEP] = torch.zeros_like(key)


def _keys(owners: Sequence[tuple[int, int]], use: int | str, like: Tensor) -> Tensor:
    keys = [derived_seed(seed, Use.DROPOUT, member, use) for seed, member in owners]
    return torch.tensor(keys, dtype=torch.int64, device=like.device).view(like.shape)

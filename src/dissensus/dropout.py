"""Dropout with masks keyed by run, member, layer and step, so that every backend drops the same units."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dissensus.randomness import Use, derived_seed, keep_mask


class KeyedDropout(nn.Dropout):
    """Dropout with a counter instead of a global generator.

    ``key`` identifies run, member and layer, and ``step`` counts training passes. Both are buffers that ``state_dict``
    leaves out, so that a network with this layer loads weights of the same network with ordinary dropout.
    """

    key: Tensor
    step: Tensor

    def __init__(self, p: float = 0.5, channel_axes: int = 0) -> None:
        super().__init__(p)
        self.channel_axes = channel_axes
        """Trailing axes that are dropped together: 0 for `nn.Dropout`, 2 for `nn.Dropout2d`."""
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's names it `input`
        """Drop units of one member's activations."""
        if not self.training or self.p == 0:
            return x
        shape = x.shape[: x.ndim - self.channel_axes] + (1,) * self.channel_axes
        self.step.add_(1)
        return dropped(x, keep_mask(tuple(shape), self.p, self.key, self.step), self.p)


def dropped(x: Float[Tensor, "*S"], keep: Tensor, p: float) -> Float[Tensor, "*S"]:
    """Set units to zero that are not kept, and rescale the rest. ``p=1`` drops everything."""
    if p == 1:
        return x * keep
    return torch.where(keep, x / (1 - p), 0.0)  # a product with 1/(1−p), rounded to bf16, would be biased


_CHANNEL_AXES: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def keyed(network: nn.Module) -> nn.Module:
    """Replace every dropout layer of a network by a keyed one, in place. Other random layers do not change."""
    replaced: dict[int, KeyedDropout] = {}  # a layer that is used in several places stays one layer
    for parent in list(network.modules()):
        for name, child in parent._modules.items():
            if (
                isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
                and type(child) in _CHANNEL_AXES
            ):
                layer = KeyedDropout(child.p, _CHANNEL_AXES[type(child)]).train(child.training)
                parent._modules[name] = replaced.setdefault(id(child), layer)
    if type(network) in _CHANNEL_AXES:
        raise TypeError("a network that is only a dropout layer has nothing to train")
    return network


def set_keys(network: nn.Module, owners: Sequence[tuple[int, int]]) -> None:
    """Key stacked dropout layers, one row per owner (run seed, member), and reset their counters."""
    layers = [layer for layer in network.modules() if isinstance(layer, KeyedDropout)]
    for index, layer in enumerate(layers):
        keys = [derived_seed(seed, Use.DROPOUT, member, index) for seed, member in owners]
        layer.key = torch.tensor(keys, dtype=torch.int64, device=layer.key.device).view(layer.key.shape)
        layer.step = torch.zeros_like(layer.key)

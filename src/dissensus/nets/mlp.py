"""Multilayer perceptrons."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from dissensus import checks


def mlp(
    inputs: int,
    outputs: int,
    hidden: Sequence[int] = (64, 64),
    *,
    activation: type[nn.Module] = nn.ReLU,
    dropout: float = 0.0,
) -> nn.Sequential:
    """A chain of linear layers; stacked, it runs as batched matrix products.

    >>> tuple(tuple(p.shape) for p in mlp(10, 1, (30,)).parameters())
    ((30, 10), (30,), (1, 30), (1,))
    """
    widths = [checks.count("inputs", inputs), *(checks.count("hidden", width) for width in hidden)]
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), activation()]
        if checks.number("dropout", dropout, 0, 1):
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(widths[-1], checks.count("outputs", outputs)))

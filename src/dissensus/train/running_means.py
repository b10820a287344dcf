"""Sums of losses over an epoch, on the device, and the means that a history tells."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dissensus.axes import LossParts
from dissensus.train.sampling import Drawn

DRAWS = "draws"
"""Examples that each member has been drawn for, ``[R, M]``."""


def add(sums: dict[str, Tensor], parts: LossParts, examples: int, drawn: Drawn | None, chosen: Tensor | None) -> None:
    """Add a step's losses; those of drawn members go to their places among all."""
    values = {"loss": parts.total, **parts.parts}
    if drawn is not None and chosen is not None:
        values[DRAWS] = torch.ones_like(chosen, dtype=parts.total.dtype)
        values |= {name: drawn.spread(value, chosen) for name, value in values.items() if value.ndim == 2}
    for name, value in values.items():
        if name not in sums:
            sums[name] = torch.zeros_like(value)
        sums[name].add_(value.detach(), alpha=examples)


def averages(sums: Mapping[str, Tensor], examples: int) -> dict[str, Tensor]:
    """Means over the examples so far; a member's own over those it was drawn for (NaN where it never was)."""
    own = sums.get(DRAWS)
    return {
        name: total / (own if own is not None and total.ndim == 2 else examples)
        for name, total in sums.items()
        if name != DRAWS
    }

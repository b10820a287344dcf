"""Sums of losses over an epoch, on the device, and the means that a history records."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dissensus.axes import LossParts
from dissensus.train.sampling import MemberSampling

SAMPLED = "sampled"
"""Examples of the steps that have sampled each member, ``[R, M]``."""


def add(
    sums: dict[str, Tensor],
    parts: LossParts,
    examples: int,
    sampling: MemberSampling | None,
    sampled: Tensor | None,
) -> None:
    """Add the losses of a step; those of sampled members are added at their places among all members."""
    values = {"loss": parts.total, **parts.parts}
    if sampling is not None and sampled is not None:
        values[SAMPLED] = torch.ones_like(sampled, dtype=parts.total.dtype)
        values |= {name: sampling.scattered(value, sampled) for name, value in values.items() if value.ndim == 2}
    for name, value in values.items():
        if name not in sums:
            sums[name] = torch.zeros_like(value)
        sums[name].add_(value.detach(), alpha=examples)


def averages(sums: Mapping[str, Tensor], examples: int) -> dict[str, Tensor]:
    """Means over the examples so far.

    The mean of a member is over the examples of steps that sampled it, and NaN where no step did.
    """
    sampled = sums.get(SAMPLED)
    return {
        name: total / (sampled if sampled is not None and total.ndim == 2 else examples)
        for name, total in sums.items()
        if name != SAMPLED
    }

"""Sums of losses over an epoch, on the device, and the means that a history records."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dissensus.axes import LossParts
from dissensus.train.sampling import MemberSampling

SAMPLED = "sampled"
"""Examples of the steps that have sampled each member, ``[R, M]``."""
WEIGHT, MEMBER_WEIGHT = "weight of examples", "weight of examples of members"
"""Sums of the weights of examples, ``[R]`` and ``[R, M]``, where examples are weighted."""


def add(
    sums: dict[str, Tensor],
    parts: LossParts,
    examples: int,
    sampling: MemberSampling | None,
    sampled: Tensor | None,
    weight: Tensor | None = None,
) -> None:
    """Add the losses of a step; those of sampled members are added at their places among all members.

    A step counts by its examples, or by their summed weight, ``[R]``, or ``[R, M]`` where members have their own.
    """
    values = {"loss": parts.total, **parts.parts}
    if sampling is not None and sampled is not None:
        values[SAMPLED] = torch.ones_like(sampled, dtype=parts.total.dtype)
        values |= {name: sampling.scattered(value, sampled) for name, value in values.items() if value.ndim == 2}
    if weight is not None:
        weight = weight.to(parts.total.dtype)
        of_members = weight if weight.ndim == 2 else weight.unsqueeze(1)
        if sampling is not None and sampled is not None:
            of_members = sampling.scattered(of_members.expand(sampled.shape), sampled)
        weight = weight.mean(1) if weight.ndim == 2 else weight
        values = {
            name: value * (of_members if value.ndim == 2 else weight)
            for name, value in values.items()
            if name != SAMPLED
        }
        values, examples = {**values, WEIGHT: weight, MEMBER_WEIGHT: of_members}, 1
    for name, value in values.items():
        if name not in sums:
            sums[name] = torch.zeros_like(value)
        sums[name].add_(value.detach(), alpha=examples)


def averages(sums: Mapping[str, Tensor], examples: int) -> dict[str, Tensor]:
    """Means over the examples so far, by their weights where they have any.

    The mean of a member is over the examples of steps that sampled it, and NaN where no step did.
    """
    of_runs = sums.get(WEIGHT, examples)
    of_members = sums.get(MEMBER_WEIGHT, sums.get(SAMPLED, examples))
    return {
        name: total / (of_members if total.ndim == 2 else of_runs)
        for name, total in sums.items()
        if name not in (SAMPLED, WEIGHT, MEMBER_WEIGHT)
    }

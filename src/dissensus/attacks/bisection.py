"""Bisection, per example, for the constant c that weighs "be misclassified" against "stay close"."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

GROWTH = 10.0
"""Factor by which c grows as long as no run has succeeded."""


class Nearest(NamedTuple):
    """Each example's nearest adversarial point so far, its distance (∞: none), and whether the last run had any."""

    best: Float[Tensor, "B *S"]
    distance: Float[Tensor, " B"]
    success: Bool[Tensor, " B"]


def nearest_points(
    run: Callable[[Float[Tensor, " B"], Nearest], Nearest],
    x: Float[Tensor, "B *S"],
    constant: float,
    search_steps: int,
) -> Float[Tensor, "B *S"]:
    """Nearest adversarial points over all constants tried; x where there is none.

    An example's c grows tenfold until a run succeeds. From then on, c is the midpoint between the largest value that
    failed and the smallest that succeeded. With ``search_steps`` of 0 or 1 there is one run, with the constant as set.
    """
    c = x.new_full((len(x),), constant)
    low, high = torch.zeros_like(c), torch.full_like(c, torch.inf)
    none = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    nearest = Nearest(x, torch.full_like(c, torch.inf), none)
    for _ in range(max(search_steps, 1)):
        nearest = run(c, nearest)
        high = torch.where(nearest.success, c, high)
        low = torch.where(nearest.success, low, c)
        c = torch.where(high.isinf(), GROWTH * c, (low + high) / 2)
    return nearest.best

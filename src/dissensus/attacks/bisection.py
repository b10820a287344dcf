"""The constant c that weighs "be misclassified" against "stay close": found for each example by bisection."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

GROWTH = 10.0
"""What c is multiplied by as long as nothing has been found."""


class Found(NamedTuple):
    """Each example's nearest adversarial point so far, its distance (∞: none), and whether the last run had any."""

    best: Float[Tensor, "B *S"]
    distance: Float[Tensor, " B"]
    any: Bool[Tensor, " B"]


def nearest(
    run: Callable[[Float[Tensor, " B"], Found], Found], x: Float[Tensor, "B *S"], constant: float, search_steps: int
) -> Float[Tensor, "B *S"]:
    """The nearest adversarial points over all constants tried; x where there is none.

    An example's c rises tenfold until a run succeeds; from then on it is the middle of the largest that failed and the
    least that succeeded. With ``search_steps`` of 0 or 1 there is one run, and c stays as it is given.
    """
    c = x.new_full((len(x),), constant)
    low, high = torch.zeros_like(c), torch.full_like(c, torch.inf)
    found = Found(x, torch.full_like(c, torch.inf), torch.zeros(len(x), dtype=torch.bool, device=x.device))
    for _ in range(max(search_steps, 1)):
        found = run(c, found)
        high = torch.where(found.any, c, high)
        low = torch.where(found.any, low, c)
        c = torch.where(high.isinf(), GROWTH * c, (low + high) / 2)
    return found.best

"""How well a score tells two sets of examples apart."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus.auditing.measuring import Figure


def roc_area(inside: Float[Tensor, " N"], outside: Float[Tensor, " U"], *, confidence: float = 0.95) -> Figure:
    """Probability that an example from outside scores higher (ties count half), with DeLong's interval.

    >>> print(roc_area(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 3.0, 4.0])))
    0.889 (0.581 to 1)
    """
    n, u = len(inside), len(outside)
    above = _placements(outside, inside)
    below = 1 - _placements(inside, outside)
    area = float(above.mean())
    variance = (float(above.var()) / u if u > 1 else 0.0) + (float(below.var()) / n if n > 1 else 0.0)
    width = math.sqrt(2) * float(torch.erfinv(torch.tensor(confidence, dtype=torch.float64))) * math.sqrt(variance)
    return Figure(area, max(0.0, area - width), min(1.0, area + width))


def _placements(of: Tensor, among: Tensor) -> Float[Tensor, " K"]:
    """For every value, the share of others that lie below it; equal ones count half."""
    ordered = among.double().sort().values
    values = of.double().contiguous()
    left = torch.searchsorted(ordered, values, right=False)
    right = torch.searchsorted(ordered, values, right=True)
    return (left + right).double() / (2 * len(ordered))

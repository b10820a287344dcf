"""The ROC curve of a score that tells examples from outside from those within; higher scores are farther out."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks


class Roc(NamedTuple):
    """Shares of examples that are called out, at every threshold that a score has; from none of them to all."""

    false_positives: Float[Tensor, " K"]
    """Of those within."""
    true_positives: Float[Tensor, " K"]
    """Of those from outside."""


@arguments.arrays
def roc(inside: Float[Tensor, " N"], outside: Float[Tensor, " U"]) -> Roc:
    """The ROC curve, in double precision; its area is that of `dissensus.metrics.auroc`.

    >>> roc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    Roc(false_positives=tensor([0.0000, 0.0000, 0.5000, 1.0000], dtype=torch.float64),
        true_positives=tensor([0.0000, 0.5000, 1.0000, 1.0000], dtype=torch.float64))
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
            got = "NaN" if scores.ndim == 1 and len(scores) else checks.shape_text(scores.shape)
            checks.refuse(name, "be scores [N] of at least one example, without NaN", got)
    scores = torch.cat([inside.double(), outside.double()]).cpu()
    order = scores.argsort(descending=True)
    last = torch.cat([scores[order].diff() != 0, torch.tensor([True])])  # where a run of equal scores ends
    is_out = (order >= len(inside)).double()
    start = torch.zeros(1, dtype=torch.float64)
    false, true = (torch.cat([start, part.cumsum(0)[last]]) for part in (1 - is_out, is_out))
    return Roc(false / len(inside), true / len(outside))

"""Hyperparameters that a method chooses on held-out rows, as a user without shifted data would."""

import math
from collections.abc import Sequence

from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import losses
from dissensus.axes import Pool
from dissensus.metrics.generalisation import pooled


def errors(outputs: Float[Tensor, "M N C"], targets: Integer[Tensor, " N"], pool: Pool) -> tuple[float, float]:
    """The error of the pooled prediction, and the mean error of members; NaN where an output is.

    >>> import torch
    >>> outputs = torch.tensor([[[2.0, 0.0], [3.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    >>> errors(outputs, torch.tensor([0, 0]), "score")
    (0.0, 0.5)
    """
    pair = [pooled(outputs, pool).unsqueeze(0), outputs]
    ensemble, members = (losses.per_member("zero_one", part, targets).double().mean() for part in pair)
    return float(ensemble), float(members)


def largest_without_loss(
    values: Sequence[float], ensemble_errors: Sequence[float], member_errors: Sequence[float], examples: int
) -> int:
    """The index of the largest value at which neither the ensemble nor its members are worse than at the best value.

    The one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984, section 3.4.3), for two
    errors at once. A value v is admitted where

        e(v) ≤ min e + √(min e (1 − min e) / N)

    holds for the ensemble's error and for the mean error of members, each with its own minimum. Detection by
    disagreement profits from diversity, so the largest admitted strength is taken. The condition on members excludes
    collusion, in which the ensemble is right although its members are not.

    Args:
        values: Strengths v of a diversity term.
        ensemble_errors: The ensemble's error on held-out rows at each value. NaN for a training that has failed.
        member_errors: The mean error of members on the same rows at each value.
        examples: N, the number of held-out rows.

    Without a value that meets both conditions, the one with the smallest member error is taken. Equal values count
    once, the first.

    >>> largest_without_loss([0.0, 0.1, 1.0, 5.0], [0.10, 0.10, 0.09, 0.09], [0.12, 0.12, 0.13, 0.60], examples=400)
    2
    """
    finished = [i for i in range(len(values)) if not math.isnan(ensemble_errors[i] + member_errors[i])]
    if not finished:
        return 0
    admitted = [
        i
        for i in finished
        if all(e[i] <= _bound(min(e[j] for j in finished), examples) for e in (ensemble_errors, member_errors))
    ]
    if not admitted:
        return min(finished, key=lambda i: member_errors[i])
    return max(admitted, key=lambda i: values[i])


def _bound(smallest: float, examples: int) -> float:
    return smallest + math.sqrt(smallest * (1 - smallest) / examples)

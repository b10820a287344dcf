"""The diversity-accuracy plane (Masksembles supplement, equation 7): pairs of members, and reference curves."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import arguments, checks, losses
from dissensus.diversity.disagreement import pairwise_disagreement


class Plane(NamedTuple):
    """Every pair of members as a point."""

    accuracy: Float[Tensor, " P"]
    """Mean accuracy of the two."""
    diversity: Float[Tensor, " P"]
    """Share of examples on which they predict different classes, divided by their mean error rate."""


@arguments.positions("all")
def plane(probs: Float[Tensor, "M B C"], labels: Int[Tensor, " B"]) -> Plane:
    """Accuracy and diversity of all pairs of members. Takes logits or log-probabilities as well.

    The diversity of a pair without errors is 0. One member has no pairs. Pairs of a member with a NaN output are NaN.

    >>> probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.8, 0.2], [0.3, 0.7]]])
    >>> plane(probs, torch.tensor([0, 0]))
    Plane(accuracy=tensor([0.7500]), diversity=tensor([2.]))
    """
    checks.member_outputs(probs, "probs")
    right = (1 - losses.zero_one(probs, labels)).mean(-1)
    return plane_of(right, pairwise_disagreement(probs))


def plane_of(accuracy: Float[Tensor, " M"], disagreement: Float[Tensor, "M M"]) -> Plane:
    """The plane from the accuracy of every member and the disagreement of every pair.

    >>> plane_of(torch.tensor([1.0, 0.5]), torch.tensor([[0.0, 0.5], [0.5, 0.0]]))
    Plane(accuracy=tensor([0.7500]), diversity=tensor([2.]))
    """
    first, second = torch.triu_indices(len(accuracy), len(accuracy), 1, device=accuracy.device)
    both = (accuracy[first] + accuracy[second]) / 2
    return Plane(both, _over_error_rate(disagreement[first, second], both))


@arguments.arrays
def flipped(
    accuracy: float, flips: Float[Tensor, " K"], classes: int
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """The lower curve: a network compared to itself with a share of its predictions flipped (Fort et al. 2019).

    Returns:
        The flipped network's accuracy a(1 − p) + (1 − a)p / (C − 1), and the diversity: p divided by its error rate.

    >>> flipped(0.9, torch.tensor([0.0, 0.5]), 10)
    (tensor([0.9000, 0.4556]), tensor([0.0000, 0.9184]))
    """
    checks.number("accuracy", accuracy, 0, 1)
    checks.count("classes", classes, 2)
    flipped_accuracy = accuracy * (1 - flips) + (1 - accuracy) * flips / (classes - 1)
    return flipped_accuracy, _over_error_rate(flips, flipped_accuracy)


def _over_error_rate(differing: Float[Tensor, " K"], accuracy: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    return torch.where(accuracy >= 1, 0.0, differing / (1 - accuracy).clamp_min(1e-12))


@arguments.arrays
def independent_errors(accuracy: float, others: Float[Tensor, " K"], classes: int) -> Float[Tensor, " K"]:
    """The upper curve: a network compared to others whose errors are independent of its own.

    The two differ on a share 1 − a·a' − (1 − a)(1 − a') / (C − 1) of the examples, which is divided by the error rate
    1 − a' of the other network.

    >>> independent_errors(0.9, torch.tensor([0.9]), 10)
    tensor([1.8889])
    """
    checks.number("accuracy", accuracy, 0, 1)
    checks.count("classes", classes, 2)
    return (1 - accuracy * others - (1 - accuracy) * (1 - others) / (classes - 1)) / (1 - others)

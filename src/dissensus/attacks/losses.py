"""What an attack climbs: losses of scores per example, higher where the example is nearer to being broken.

Each takes scores ``[K, B, C]`` (K: members whose losses are added, or one), labels ``[B]``, and classes to be reached
``[B]`` or None. Scores are logits up to a shift; every loss here is blind to such a shift.
"""

import logging
import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks, losses

Scores = Float[Tensor, "K B C"]
Labels = Integer[Tensor, " B"]
Climbed = Callable[[Scores, Labels, Labels | None], Float[Tensor, "K B"]]
LossName = Literal["ce", "margin", "dlr", "targeted_dlr"]
TINY = 1e-12
"""Added to the denominator of DLR, as its authors do."""

log = logging.getLogger("dissensus")


def cross_entropy(scores: Scores, labels: Labels, target: Labels | None = None) -> Float[Tensor, "K B"]:
    """Cross-entropy of the label, or minus that of the class to be reached."""
    return losses.cross_entropy(scores, labels) if target is None else -losses.cross_entropy(scores, target)


def margin(scores: Scores, labels: Labels, target: Labels | None = None) -> Float[Tensor, "K B"]:
    """By how much the best other class is above the label, or the class to be reached above the best other one.

    >>> margin(torch.tensor([[[-3.0, -5.0, -4.0]]]), torch.tensor([0]))  # negative scores are as good as any
    tensor([[-1.]])
    """
    own = labels if target is None else target
    lead = best_other(scores, own) - losses.at_label(scores, own)
    return lead if target is None else -lead


def dlr(scores: Scores, labels: Labels, target: Labels | None = None) -> Float[Tensor, "K B"]:
    """Difference of logits ratio (Croce and Hein, 2020, equations 6 and 7): a margin blind to scale and shift.

    −(z_y − max_{j≠y} z_j) / (z_π1 − z_π3); with a class t to be reached −(z_y − z_t) / (z_π1 − (z_π3 + z_π4) / 2).

    >>> dlr(torch.tensor([[[4.0, 2.0, 0.0]]]), torch.tensor([0]))
    tensor([[-0.5000]])
    """
    own = losses.at_label(scores, labels)
    if target is None:
        best = scores.topk(3, -1).values
        return (best_other(scores, labels) - own) / (best[..., 0] - best[..., 2] + TINY)
    best = scores.topk(4, -1).values
    return (losses.at_label(scores, target) - own) / (best[..., 0] - (best[..., 2] + best[..., 3]) / 2 + TINY)


def best_other(scores: Scores, labels: Labels) -> Float[Tensor, "K B"]:
    """The best score of any class but the label, which is masked with −∞: scores below zero count like any other."""
    return scores.masked_fill(marked(labels, scores.shape[-1]), -math.inf).max(-1).values


def marked(places: Labels, width: int) -> Bool[Tensor, "B width"]:
    """Where each row has its place; unlike ``one_hot``, no look at the numbers."""
    return torch.arange(width, device=places.device) == places.unsqueeze(1)


def named(loss: str, classes: int, targeted: bool) -> Climbed:
    """The loss of a name; DLR needs three classes, towards a class four, and gives way to `margin` below that."""
    checks.one_of("loss", loss, ("ce", "margin", "dlr", "targeted_dlr"))
    if loss == "ce":
        return cross_entropy
    least = 4 if targeted else 3
    if loss != "margin" and classes < least:
        words = "DLR towards a class" if targeted else "DLR"
        log.warning("%s needs %d classes or more; with %d the attack climbs the margin instead.", words, least, classes)
        return margin
    return margin if loss == "margin" else dlr

"""Losses that attacks raise, one value per example: the larger, the nearer the example is to being misclassified.

Each takes scores ``[K, B, C]`` (K members whose losses are summed, or one), labels ``[B]``, and target classes ``[B]``
or None. Scores are logits up to an additive constant; every loss here is invariant to it.
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
AttackLoss = Callable[[Scores, Labels, Labels | None], Float[Tensor, "K B"]]
LossName = Literal["ce", "margin", "dlr", "targeted_dlr"]
LOSSES: tuple[LossName, ...] = ("ce", "margin", "dlr", "targeted_dlr")
TINY = 1e-12
"""Added to the denominator of DLR, as in its authors' code."""

log = logging.getLogger("dissensus")


def cross_entropy(scores: Scores, labels: Labels, target: Labels | None = None) -> Float[Tensor, "K B"]:
    """Cross-entropy of the label, or minus the cross-entropy of the target class."""
    return losses.cross_entropy(scores, labels) if target is None else -losses.cross_entropy(scores, target)


def margin(scores: Scores, labels: Labels, target: Labels | None = None) -> Float[Tensor, "K B"]:
    """Largest other score minus that of the label, or the target's score minus the largest other score.

    >>> margin(torch.tensor([[[-3.0, -5.0, -4.0]]]), torch.tensor([0]))  # negative scores are treated like any other
    tensor([[-1.]])
    """
    classes = labels if target is None else target
    lead = best_other(scores, classes) - losses.at_label(scores, classes)
    return lead if target is None else -lead


def dlr(scores: Scores, labels: Labels, target: Labels | None = None) -> Float[Tensor, "K B"]:
    """Difference of logits ratio (Croce and Hein, 2020, equations 6 and 7): a margin invariant to scale and shift.

    −(z_y − max_{j≠y} z_j) / (z_π1 − z_π3); with a target class t, −(z_y − z_t) / (z_π1 − (z_π3 + z_π4) / 2).

    >>> dlr(torch.tensor([[[4.0, 2.0, 0.0]]]), torch.tensor([0]))
    tensor([[-0.5000]])
    """
    label_score = losses.at_label(scores, labels)
    if target is None:
        top = scores.topk(3, -1).values
        return (best_other(scores, labels) - label_score) / (top[..., 0] - top[..., 2] + TINY)
    top = scores.topk(4, -1).values
    return (losses.at_label(scores, target) - label_score) / (top[..., 0] - (top[..., 2] + top[..., 3]) / 2 + TINY)


def best_other(scores: Scores, labels: Labels) -> Float[Tensor, "K B"]:
    """Largest score of any class but the label, which is masked with −∞."""
    return scores.masked_fill(one_hot_mask(labels, scores.shape[-1]), -math.inf).max(-1).values


def one_hot_mask(indices: Labels, width: int) -> Bool[Tensor, "B width"]:
    """Boolean one-hot rows; unlike ``one_hot``, this does not read values on the host."""
    return torch.arange(width, device=indices.device) == indices.unsqueeze(1)


def loss_function(name: str, classes: int, targeted: bool) -> AttackLoss:
    """The loss of a name. DLR needs three classes, targeted DLR four; with fewer, `margin` replaces it."""
    checks.one_of("loss", name, LOSSES)
    if name == "ce":
        return cross_entropy
    least = 4 if targeted else 3
    if name != "margin" and classes < least:
        label = "targeted DLR" if targeted else "DLR"
        log.warning("%s needs %d classes or more; with %d the attack uses the margin instead.", label, least, classes)
        return margin
    return margin if name == "margin" else dlr

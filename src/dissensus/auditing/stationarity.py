"""Derivatives of training losses when the outputs of every member are scaled: which loss were members trained on?

The last layer of a network is linear, so a training may scale its outputs. Where training ends, the loss that it
minimised does not change with the scale s of outputs, to first order. Members trained alone have dL_i/ds = 0 on their
training data. Members trained on (1 − β) mean_i L_i + β L_pool have

    (1 − β) mean_i dL_i/ds + β dL_pool/ds = 0,   so   β = mean_i dL_i/ds / (mean_i dL_i/ds − dL_pool/ds).

For squared error (½|f − y|²) the denominator is the diversity. The outputs of members trained jointly (β = 1) are too
large by exactly their diversity, and those of a pool of members trained alone are too small by as much. Early stopping,
weight decay, augmentation, label smoothing and dropout all make outputs too small, which makes β too small. Training
that did not converge, or that minimised another loss, can make β large.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from dissensus.axes import Pool


@dataclass(frozen=True)
class Slopes:
    """First and second derivatives with respect to the scale s of each member's outputs, at s = 1, and the losses."""

    slope: Float[Tensor, "n M"]
    """First derivative of the member's loss."""
    pool_slope: Float[Tensor, "n M"]
    """First derivative of the pool's loss. The sum over members is the derivative for scaling all of them."""
    curvature: Float[Tensor, "n M"]
    """Second derivative of the member's loss."""
    pool_curvature: Float[Tensor, "n M"]
    """Second derivative of the pool's loss."""
    member_loss: Float[Tensor, "n M"]
    pool_loss: Float[Tensor, " n"]


def value_slopes(outputs: Float[Tensor, "n M C"], targets: Float[Tensor, "n C"], centre: Float[Tensor, " C"]) -> Slopes:
    """Derivatives of ½|f − y|², with the outputs of a member scaled about `centre`.

    Constant offsets are stationary too, so the choice of the centre does not matter.
    """
    errors, centred, members = outputs - targets.unsqueeze(1), outputs - centre, outputs.shape[1]
    return Slopes(
        slope=(errors * centred).sum(-1),
        pool_slope=(errors.mean(1, keepdim=True) * centred).sum(-1) / members,
        curvature=centred.square().sum(-1),
        pool_curvature=centred.square().sum(-1) / members**2,
        member_loss=errors.square().sum(-1) / 2,
        pool_loss=errors.mean(1).square().sum(-1) / 2,
    )


def class_slopes(
    logits: Float[Tensor, "n M C"],
    probs: Float[Tensor, "n M C"],
    log_at_labels: Float[Tensor, "n M"],
    labels: Int[Tensor, " n"],
    pool: Pool,
) -> Slopes:
    """Derivatives of cross-entropy, with the logits of a member scaled.

    ∂/∂s −log p_y = Σ_c p_c z_c − z_y. Adding a constant to all logits of an example changes nothing.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    mean = (probs * logits).sum(-1)
    slope = mean - _at(logits, labels)
    curvature = ((probs * logits.square()).sum(-1) - mean.square()).clamp_min(0.0)
    members = logits.shape[1]
    if pool == "probability":
        shares = log_at_labels.softmax(-1)  # of members in the pooled probability of the label
        pool_slope = shares * slope
        pool_curvature = shares * (curvature - slope.square()) + pool_slope.square()
        pool_loss = math.log(members) - log_at_labels.logsumexp(-1)
    else:
        pooled = logits.mean(1, keepdim=True)
        weights = pooled.softmax(-1)
        average = (weights * logits).sum(-1)
        pool_slope = (average - _at(logits, labels)) / members
        pool_curvature = ((weights * logits.square()).sum(-1) - average.square()).clamp_min(0.0) / members**2
        pool_loss = -_at(pooled.log_softmax(-1), labels).squeeze(1)
    return Slopes(slope, pool_slope, curvature, pool_curvature, -log_at_labels, pool_loss)


def _at(values: Float[Tensor, "n M C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n M"]:
    index = labels.view(-1, 1, 1).expand(-1, values.shape[1], 1)
    return values.gather(-1, index).squeeze(-1)

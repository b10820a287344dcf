"""What members' own training left undone: how losses change when every member's outputs are scaled.

The last layer of a network is linear, so a training may scale its outputs. Where it ends, the loss that it minimised
does not change with the scale s of outputs, to first order. Members trained alone have dL_i/ds = 0 on their training
data. Members trained on (1 − β) mean_i L_i + β L_pool have

    (1 − β) mean_i dL_i/ds + β dL_pool/ds = 0,   so   β = mean_i dL_i/ds / (mean_i dL_i/ds − dL_pool/ds).

For squared error the denominator is twice the diversity: members trained jointly (β = 1) overstate what they say by
exactly their diversity, and members trained alone make a pool that understates it by as much. What ends a training
early, weight decay, augmentation, label smoothing and dropout all leave outputs too small, which makes β too small.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import losses
from dissensus.axes import Pool


def of_values(
    outputs: Float[Tensor, "M n C"], targets: Float[Tensor, "n C"], centre: Float[Tensor, " C"]
) -> dict[str, Tensor]:
    """d/ds of ½|f − y|² at s = 1, with outputs scaled about `centre`: of every member ``[n, M]``, of the pool ``[n]``.

    Constant offsets are stationary too, so any centre will do.
    """
    errors, centred = outputs - targets, outputs - centre
    return {
        "slope": (errors * centred).sum(-1).T,
        "pool_slope": (errors.mean(0) * centred.mean(0)).sum(-1),
        "curvature": centred.square().sum(-1).T,
        "fitted_loss": errors.square().sum(-1).T / 2,
    }


def of_classes(log_probs: Float[Tensor, "M n C"], labels: Int[Tensor, " n"], pool: Pool) -> dict[str, Tensor]:
    """d/ds of cross-entropy at s = 1, with logits scaled: of every member ``[n, M]``, of the pool ``[n]``.

    ∂/∂s −log p_y = Σ_c p_c z_c − z_y; adding a constant to all logits of an example changes nothing.
    """
    logits = log_probs.clamp_min(-100.0)
    probs = log_probs.exp()
    mean = (probs * logits).sum(-1)
    slope = mean - losses.at_label(logits, labels)
    if pool == "probability":
        shares = losses.at_label(log_probs, labels).softmax(0)  # of members in the pooled probability of the label
        pool_slope = (shares * slope).sum(0)
    else:
        pooled = logits.mean(0)
        pooled_probs = pooled.softmax(-1)
        pool_slope = (pooled_probs * pooled).sum(-1) - losses.at_label(pooled, labels)
    return {
        "slope": slope.T,
        "pool_slope": pool_slope,
        "curvature": ((probs * logits.square()).sum(-1) - mean.square()).clamp_min(0.0).T,
        "fitted_loss": -losses.at_label(log_probs, labels).T,
    }

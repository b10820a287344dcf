"""What members' own training left undone: how losses change when every member's outputs are scaled.

The last layer of a network is linear, so a training may scale its outputs. Where it ends, the loss that it minimised
does not change with the scale s of outputs, to first order. Members trained alone have dL_i/ds = 0 on their training
data. Members trained on (1 − β) mean_i L_i + β L_pool have

    (1 − β) mean_i dL_i/ds + β dL_pool/ds = 0,   so   β = mean_i dL_i/ds / (mean_i dL_i/ds − dL_pool/ds).

For squared error (½|f − y|²) the denominator is the diversity: members trained jointly (β = 1) overstate what they say
by exactly their diversity, and members trained alone make a pool that understates it by as much. What ends a training
early, weight decay, augmentation, label smoothing and dropout all leave outputs too small, which makes β too small. A
training that did not settle, or that minimised another loss, can make it large.
"""

import math

from jaxtyping import Float, Int
from torch import Tensor

from dissensus.axes import Pool


def of_values(
    outputs: Float[Tensor, "n M C"], targets: Float[Tensor, "n C"], centre: Float[Tensor, " C"]
) -> dict[str, Tensor]:
    """d/ds and d²/ds² of ½|f − y|² at s = 1, with outputs of a member scaled about `centre`: of its own loss and of the
    pool's, both ``[n, M]``.

    Constant offsets are stationary too, so any centre will do.
    """
    errors, centred, members = outputs - targets.unsqueeze(1), outputs - centre, outputs.shape[1]
    return {
        "slope": (errors * centred).sum(-1),
        "pool_slope": (errors.mean(1, keepdim=True) * centred).sum(-1) / members,
        "curvature": centred.square().sum(-1),
        "pool_curvature": centred.square().sum(-1) / members**2,
        "fitted_loss": errors.square().sum(-1) / 2,
        "pool_loss": errors.mean(1).square().sum(-1) / 2,
    }


def of_classes(
    logits: Float[Tensor, "n M C"],
    probs: Float[Tensor, "n M C"],
    log_at_labels: Float[Tensor, "n M"],
    labels: Int[Tensor, " n"],
    pool: Pool,
) -> dict[str, Tensor]:
    """d/ds and d²/ds² of cross-entropy at s = 1, with logits of a member scaled: of its own loss and of the pool's.

    All are ``[n, M]``; the sum of the pool's slopes over members is that of scaling all of them.

    ∂/∂s −log p_y = Σ_c p_c z_c − z_y; adding a constant to all logits of an example changes nothing.
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
    return {
        "slope": slope,
        "pool_slope": pool_slope,
        "curvature": curvature,
        "pool_curvature": pool_curvature,
        "fitted_loss": -log_at_labels,
        "pool_loss": pool_loss,
    }


def _at(values: Float[Tensor, "n M C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n M"]:
    index = labels.view(-1, 1, 1).expand(-1, values.shape[1], 1)
    return values.gather(-1, index).squeeze(-1)

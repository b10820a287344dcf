"""What members' own training left undone: how losses change when every member's outputs are scaled.

The last layer of a network is linear, so a training may scale its outputs. Where it ends, the loss that it minimised
does not change with the scale s of outputs, to first order. Members trained alone have dL_i/ds = 0 on their training
data. Members trained on (1 − β) mean_i L_i + β L_pool have

    (1 − β) mean_i dL_i/ds + β dL_pool/ds = 0,   so   β = mean_i dL_i/ds / (mean_i dL_i/ds − dL_pool/ds).

For squared error the denominator is twice the diversity: members trained jointly (β = 1) overstate what they say by
exactly their diversity, and members trained alone make a pool that understates it by as much. What ends a training
early, weight decay, augmentation, label smoothing and dropout all leave outputs too small, which makes β too small.
"""

from jaxtyping import Float, Int
from torch import Tensor

from dissensus.axes import Pool


def of_values(
    outputs: Float[Tensor, "n M C"], targets: Float[Tensor, "n C"], centre: Float[Tensor, " C"]
) -> dict[str, Tensor]:
    """d/ds of ½|f − y|² at s = 1, with outputs scaled about `centre`: of every member ``[n, M]``, of the pool ``[n]``.

    Constant offsets are stationary too, so any centre will do.
    """
    errors, centred = outputs - targets.unsqueeze(1), outputs - centre
    return {
        "slope": (errors * centred).sum(-1),
        "pool_slope": (errors.mean(1) * centred.mean(1)).sum(-1),
        "curvature": centred.square().sum(-1),
        "fitted_loss": errors.square().sum(-1) / 2,
    }


def of_classes(
    logits: Float[Tensor, "n M C"],
    probs: Float[Tensor, "n M C"],
    log_at_labels: Float[Tensor, "n M"],
    labels: Int[Tensor, " n"],
    pool: Pool,
) -> dict[str, Tensor]:
    """d/ds of cross-entropy at s = 1, with logits scaled: of every member ``[n, M]``, of the pool ``[n]``.

    ∂/∂s −log p_y = Σ_c p_c z_c − z_y; adding a constant to all logits of an example changes nothing.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    mean = (probs * logits).sum(-1)
    slope = mean - _at(logits, labels)
    if pool == "probability":
        shares = log_at_labels.softmax(-1)  # of members in the pooled probability of the label
        pool_slope = (shares * slope).sum(-1)
    else:
        pooled = logits.mean(1, keepdim=True)
        pool_slope = ((pooled.softmax(-1) * pooled).sum(-1) - _at(pooled, labels)).squeeze(1)
    return {
        "slope": slope,
        "pool_slope": pool_slope,
        "curvature": ((probs * logits.square()).sum(-1) - mean.square()).clamp_min(0.0),
        "fitted_loss": -log_at_labels,
    }


def _at(values: Float[Tensor, "n M C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n M"]:
    index = labels.view(-1, 1, 1).expand(-1, values.shape[1], 1)
    return values.gather(-1, index).squeeze(-1)

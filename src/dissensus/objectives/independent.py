"""Every member on its own."""

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss
from dissensus.pooling import Weights


def independent(
    outputs: Float[Tensor, "M B C"],
    targets: Tensor,
    *,
    loss: str | PerExampleLoss,
    weights: Weights = None,
) -> LossParts:
    """Train members as if each were alone: Σ_j L(f_j, y), averaged over the batch (``M · Σ_j w_j L_j`` with weights).

    The usual deep ensemble, and β = 0 of `dissensus.objectives.augmented`. Differs from the collusion paper, which
    divides by M: there each member gets 1/M of the gradient that it would get alone, so a learning rate of the paper's
    is M times smaller here.

    Returns:
        ``parts``: ``member_loss`` ``[M]`` and their weighted mean, ``individual``.

    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> independent(outputs, targets, loss="mse").total
    tensor(2.5000)
    """
    members, _, _ = checks.member_outputs(outputs)
    losses.check_trainable(loss)
    member_loss = losses.per_member(loss, outputs, targets).mean(-1)
    individual = torch.dot(checks.member_weights(weights, members, member_loss), member_loss)
    return LossParts(members * individual, {"member_loss": member_loss, "individual": individual})

"""Negative correlation learning: members are rewarded for errors on opposite sides of the mean."""

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss
from dissensus.diversity.decomposition import check_curved, mean_parts, member_and_ensemble_loss
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples


@Declaration(sweepable=("strength",), pool="score", neutral={"strength": 0}, example_weights="shared")
def negative_correlation(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    *,
    strength: float | Float[Tensor, ""],
    loss: str | PerExampleLoss = "squared_error",
    example_weights: Tensor | None = None,
) -> LossParts:
    """Σ_j L(f_j, y) − λ/2 · d_jᵀ H d_j with d_j = f_j − f̄ and H the loss's Hessian at the mean f̄.

    For squared error H = 2·I, the penalty is λ(f_j − f̄)², and this is classic negative correlation learning: a
    member's gradient is 2[(f_j − y) − λ(f_j − f̄)], whether the mean is held fixed or not. (Differs from Liu and Yao,
    1999, by the factor 2, since their error carries ½.) It then equals `augmented` with β = λ and pool ``"score"``. For
    other losses the two agree to second order in the spread (theorem 4.5 with the curvature taken at the mean), as in
    generalised negative correlation learning. Scores are averaged.

    Curvature along d_j is computed by differentiation, so no Hessian is stored. Gradients flow through H as well.

    Args:
        outputs: Raw member outputs f_j ``[M, B, C]``.
        targets: y, as the loss takes them.
        strength: λ. 0 trains members independently. Above 1 the objective has no lower bound for squared error.
        loss: A name from `dissensus.losses`, or a callable per example that is twice differentiable.
        example_weights: Weights of examples ``[B]``: all means over the batch become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble``, ``diversity`` and ``penalty``, the mean of
        d_jᵀ H d_j / 2.

    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> negative_correlation(outputs, targets, strength=0.5).total
    tensor(1.5000)
    """
    outputs, targets, example_weights = examples(outputs, targets, example_weights, interacting="negative_correlation")
    members, _, _ = checks.member_outputs(outputs)
    check_curved(loss)
    if isinstance(strength, int | float):
        checks.number("strength", strength, 0)
    outputs = checks.full_precision(outputs)
    member, ensemble = member_and_ensemble_loss(outputs, targets, loss=loss, pool="score", weights=None)
    mean = outputs.mean(0)
    bends = curvature(mean, outputs - mean, targets, loss)
    penalty = (bends.mean() if example_weights is None else losses.batch_mean(bends, example_weights).mean()) / 2
    parts = {**mean_parts(member, ensemble, example_weights=example_weights), "penalty": penalty}
    return LossParts(members * (parts["individual"] - strength * penalty), parts)


def curvature(
    at: Float[Tensor, "B C"], along: Float[Tensor, "M B C"], targets: Tensor, loss: str | PerExampleLoss
) -> Float[Tensor, "M B"]:
    """dᵀ H d of a loss at a point per example, for M directions.

    >>> at, along = torch.tensor([[0.0, 0.0]]), torch.tensor([[[1.0, -1.0]]])
    >>> curvature(at, along, torch.tensor([0]), "cross_entropy")
    tensor([[1.]])
    """
    function = losses.function_of(loss)

    slope = torch.func.grad(lambda point: function(point, targets).sum())

    def along_direction(direction: Tensor) -> Tensor:
        product = torch.func.grad(lambda point: (slope(point) * direction).sum())(at)  # H d
        return (product * direction).sum(-1)

    return torch.func.vmap(along_direction)(along)

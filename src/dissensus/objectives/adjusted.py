"""Targets moved against the ensemble's error: another parametrisation of β (collusion paper, appendix D)."""

import math

from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts
from dissensus.diversity.decomposition import mean_parts, member_and_ensemble_loss
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples


@Declaration(sweepable=("alpha",), loss="squared_error", pool="score", neutral={"alpha": 0}, example_weights="shared")
def gradient_adjusted(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    *,
    alpha: float | Float[Tensor, ""],
    others_only: bool = False,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Train each member on a target that is moved by α against the ensemble's error: Σ_i ‖f_i − ỹ_i‖².

    ỹ_i = y − α (f̄ − y), or with ``others_only`` y − α/(M−1) Σ_{j≠i} (f_j − y)

    (collusion paper, equations 8 and 10; squared error only; ``total`` is M times the paper's.) Theorem D.1: this is
    (1 + α)² times `augmented` at β = 1 − 1/(1 + α)², gradients included; theorem D.3 says the same of ``others_only``
    with γ (see `gamma_from_alpha`). A learning rate that suits `augmented` is therefore (1 + α)² times too large here.
    Gradients flow through the moved targets, as the theorems require.

    Args:
        outputs: Values f_j ``[M, B, C]``.
        targets: y ``[B, C]``.
        alpha: α ≥ 0, the step. 0 trains members independently. Larger values are closer to joint training.
        others_only: Leave a member's own error out of its target. Needs M ≥ 2.
        example_weights: Weights of examples ``[B]``: all means over the batch become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` and ``diversity``, all on the true targets.

    >>> import torch
    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> gradient_adjusted(outputs, targets, alpha=1.0).total
    tensor(4.)
    """
    outputs, targets, example_weights = examples(outputs, targets, example_weights, interacting="gradient_adjusted")
    members, _, _ = checks.member_outputs(outputs)
    if isinstance(alpha, int | float):
        checks.number("alpha", alpha, 0)
    if others_only and members < 2:
        checks.refuse("others_only", "be False for one member", "True", "There are no others.")
    outputs = checks.full_precision(outputs)
    member, ensemble = member_and_ensemble_loss(outputs, targets, loss="squared_error", pool="score", weights=None)
    residual = outputs - losses.as_values(outputs, targets)
    mean_residual = residual.mean(0)
    if others_only:
        mean_residual = (members * mean_residual - residual) / (members - 1)
    moved = (residual + alpha * mean_residual).square().sum(-1)
    total = losses.batch_mean(moved, example_weights).sum()
    return LossParts(total, mean_parts(member, ensemble, example_weights=example_weights))


def beta_from_alpha(alpha: float) -> float:
    """The β of `augmented` that is equivalent to a step α: 1 − 1/(1 + α)² (theorem D.1).

    >>> beta_from_alpha(1.0)
    0.75
    """
    checks.number("alpha", alpha, 0)
    return 1 - 1 / (1 + alpha) ** 2


def alpha_from_beta(beta: float) -> float:
    """The step α that is equivalent to a β, 1/√(1 − β) − 1. It grows without bound as β → 1 (Figure 9).

    >>> alpha_from_beta(0.75)
    1.0
    """
    checks.number("beta", beta, 0, 1)
    if beta == 1:
        checks.refuse("beta", "be below 1, since β = 1 needs an infinite step", "1")
    return 1 / math.sqrt(1 - beta) - 1


def gamma_from_alpha(members: int, alpha: float) -> float:
    """The β of `augmented` that is equivalent to a step α against the error of the *other* members (theorem D.3).

    γ = α/(α + 1)² · M((α + 2)M − 2(α + 1))/(M − 1)²

    It rises from 0 at α = 0 to 1 at α = M − 1, and falls after that (Figure 8).

    >>> gamma_from_alpha(5, 4.0)
    1.0
    """
    _check_several(members)
    checks.number("alpha", alpha, 0)
    return alpha / (alpha + 1) ** 2 * members * ((alpha + 2) * members - 2 * (alpha + 1)) / (members - 1) ** 2


def alpha_from_gamma(members: int, gamma: float) -> float:
    """The step α in [0, M − 1] that is equivalent to a γ in [0, 1]: the inverse of `gamma_from_alpha` where it rises.

    With t = α/(α + 1), γ = 1 − (1 − t · M/(M − 1))², so t = (1 − √(1 − γ)) (M − 1)/M.

    >>> round(alpha_from_gamma(5, 1.0), 12)
    4.0
    """
    _check_several(members)
    checks.number("gamma", gamma, 0, 1)
    share = (1 - math.sqrt(1 - gamma)) * (members - 1) / members
    return share / (1 - share)


def _check_several(members: int) -> None:
    if checks.count("members", members) < 2:
        checks.refuse("members", "be at least 2, since the step is against the error of other members", members)

"""The path from independent to joint training (collusion paper, equation 2)."""

from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss, Pool
from dissensus.diversity.decomposition import check_pool, mean_parts, member_and_ensemble_loss
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples
from dissensus.pooling import Weights


@Declaration(per_member=("weights",), sweepable=("beta",), neutral={"beta": 0}, example_weights="shared")
def augmented(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    *,
    beta: float | Float[Tensor, ""],
    loss: str | PerExampleLoss,
    pool: Pool,
    weights: Weights = None,
    allow_pathological: bool = False,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Reward diversity by β: M · (mean member loss − β · diversity), averaged over the batch.

    L^β = mean member loss − β · DIV = (1 − β) · mean member loss + β · ensemble loss

    (collusion paper, equation 2; ``total`` is M · L^β.) β = 0 trains members independently, β = 1 trains the ensemble
    as one model, and members collude at values near 1. β < 0 rewards agreement: members are pulled together.

    Args:
        outputs: Raw member outputs f_j ``[M, B, C]``.
        targets: y, as the loss takes them.
        beta: β, at most 1. Above 1 the objective is not bounded from below (theorem 5.1).
        loss: A name from `dissensus.losses`, or a callable per example (see `dissensus.diversity.decompose`).
        pool: How the ensemble predicts.
        weights: w_j ``[M]``.
        allow_pathological: Permit β > 1, to study what happens there.
        example_weights: Weights of examples ``[B]``: all means over the batch become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` and ``diversity``.

    >>> import torch
    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> augmented(outputs, targets, beta=0.5, loss="squared_error", pool="score").total
    tensor(1.5000)
    """
    outputs, targets, example_weights = examples(outputs, targets, example_weights, interacting="augmented")
    members, _, _ = checks.member_outputs(outputs)
    check_pool(loss, pool)
    losses.check_trainable(loss)
    if isinstance(beta, int | float):
        _check_beta(float(beta), allow_pathological)
    outputs = checks.full_precision(outputs)
    w = None if weights is None else checks.member_weights(weights, members, outputs)
    member, ensemble = member_and_ensemble_loss(outputs, targets, loss=loss, pool=pool, weights=w)
    parts = mean_parts(member, ensemble, w, example_weights)
    return LossParts(members * ((1 - beta) * parts["individual"] + beta * parts["ensemble"]), parts)


@Declaration(per_member=("weights",), sweepable=(), example_weights="shared")
def joint(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    *,
    loss: str | PerExampleLoss,
    pool: Pool,
    weights: Weights = None,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Train the ensemble as one model: M · L(f̄, y), averaged over the batch. β = 1 of `augmented`.

    >>> import torch
    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> joint(outputs, targets, loss="squared_error", pool="score").total
    tensor(0.5000)
    """
    outputs, targets, example_weights = examples(outputs, targets, example_weights, interacting="joint")
    return augmented(outputs, targets, beta=1.0, loss=loss, pool=pool, weights=weights, example_weights=example_weights)


def _check_beta(beta: float, allow_pathological: bool) -> None:
    if beta != beta or beta in (float("inf"), float("-inf")):
        checks.refuse("beta", "be a finite number", repr(beta))
    if beta > 1 and not allow_pathological:
        checks.refuse(
            "beta",
            "be at most 1: above it the objective has no lower bound, since members gain by moving apart without limit "
            "(theorem 5.1)",
            f"{beta:g}",
            "To study that, pass allow_pathological=True.",
        )

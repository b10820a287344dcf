"""Objectives of clean and attacked inputs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.axes import LossParts
from dissensus.objectives.declaration import Declaration


@Declaration(
    separable=True,
    adversarial=True,
    sweepable=("strength",),
    class_labels=True,
    loss="cross_entropy",
    pool="probability",
    neutral={"strength": 0},
)
def trades(
    logits: Float[Tensor, "M B C"],
    labels: Int[Tensor, " B"],
    *,
    adversarial: Float[Tensor, "M B C"] | None = None,
    strength: float | Float[Tensor, ""] = 6.0,
) -> LossParts:
    """Fit clean inputs, and keep predictions the same under attack (TRADES, Zhang et al. 2019), each member by itself.

    total = Σ_m CE_m + λ · Σ_m mean KL(p_m(x) ‖ p_m(x'))

    Pass `dissensus.fit` an `AdversarialTraining` with ``beside=True``, which attacks every batch and adds the members'
    outputs on x'. Without those, as on validation data, there is no second term.

    Args:
        logits: Of members on clean inputs x.
        labels: Their classes ``[B]``.
        adversarial: Of members on attacked inputs x'.
        strength: λ.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` (of the mean probabilities), ``moved`` (the
        mean divergence).

    >>> trades(torch.zeros(1, 1, 2), torch.tensor([0]), adversarial=torch.tensor([[[0.0, 2.0]]]), strength=1.0).total
    tensor(1.1269)
    """
    _, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    if adversarial is not None and adversarial.shape != logits.shape:
        checks.refuse("adversarial", f"have the shape of logits, {list(logits.shape)}", list(adversarial.shape))
    logits = checks.full_precision(logits)
    member_loss = losses.cross_entropy(logits, labels).mean(-1)
    moved = torch.zeros_like(member_loss) if adversarial is None else losses.divergence(logits, adversarial).mean(-1)
    ensemble = -losses.at_label(pooling.mean_probability(logits), labels).mean()
    parts = {"member_loss": member_loss, "individual": member_loss.mean(), "ensemble": ensemble, "moved": moved.mean()}
    return LossParts(member_loss.sum() + strength * moved.sum(), parts)

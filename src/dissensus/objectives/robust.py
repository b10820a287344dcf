"""Objectives that see attacked inputs beside clean ones."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.axes import LossParts


def trades(
    logits: Float[Tensor, "M B C"],
    labels: Int[Tensor, " B"],
    *,
    adversarial: Float[Tensor, "M B C"] | None = None,
    strength: float | Float[Tensor, ""] = 6.0,
) -> LossParts:
    """Fit clean inputs, and stay where you are under attack (Zhang et al. 2019, TRADES), each member by itself.

    total = Σ_m CE_m + λ · Σ_m mean KL(p_m(x) ‖ p_m(x')). Give `dissensus.fit` an `AdversarialTraining` with
    ``beside=True``, so that it gets members' outputs on x'; without those, as on validation data, there is no second
    term.

    >>> trades(torch.zeros(1, 1, 2), torch.tensor([0]), adversarial=torch.tensor([[[0.0, 2.0]]]), strength=1.0).total
    tensor(1.1269)
    """
    _, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    if adversarial is not None and adversarial.shape != logits.shape:
        checks.refuse("adversarial", f"have the shape of logits, {list(logits.shape)}", list(adversarial.shape))
    logits = checks.full_precision(logits)
    own = losses.cross_entropy(logits, labels).mean(-1)
    moved = torch.zeros_like(own) if adversarial is None else losses.divergence(logits, adversarial).mean(-1)
    ensemble = -losses.at_label(pooling.mean_probability(logits), labels).mean()
    parts = {"member_loss": own, "individual": own.mean(), "ensemble": ensemble, "moved": moved.mean()}
    return LossParts(own.sum() + strength * moved.sum(), parts)

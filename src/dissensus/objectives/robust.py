"""Objectives of clean and attacked inputs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, dense, losses, pooling
from dissensus.axes import LossParts
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples, present, shared


@Declaration(
    separable=True,
    adversarial=True,
    sweepable=("strength",),
    class_labels=True,
    loss="cross_entropy",
    pool="probability",
    neutral={"strength": 0},
    example_weights="per_member",
)
def trades(
    logits: Float[Tensor, "M B C *S"],
    labels: Int[Tensor, "B *S"],
    *,
    adversarial: Float[Tensor, "M B C *S"] | None = None,
    strength: float | Float[Tensor, ""] = 6.0,
    example_weights: Tensor | None = None,
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
        example_weights: Weights of examples ``[B]``, or one per member ``[M, B]`` (bagging): all means over the batch
            become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` (of the mean probabilities; with weights per
        member, an example has their mean), ``moved`` (the mean divergence).

    >>> trades(torch.zeros(1, 1, 2), torch.tensor([0]), adversarial=torch.tensor([[[0.0, 2.0]]]), strength=1.0).total
    tensor(1.1269)
    """
    if adversarial is not None and adversarial.shape != logits.shape:
        checks.refuse("adversarial", f"have the shape of logits, {list(logits.shape)}", list(adversarial.shape))
    logits, labels, example_weights = examples(logits, labels, example_weights)
    _, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    logits = checks.full_precision(logits)
    member_loss = losses.batch_mean(losses.cross_entropy(logits, labels), example_weights)
    moved = torch.zeros_like(member_loss)
    if adversarial is not None:
        adversarial = present(dense.flat(adversarial), example_weights)
        moved = losses.batch_mean(losses.divergence(logits, adversarial), example_weights)
    ensemble = -losses.batch_mean(losses.at_label(pooling.mean_probability(logits), labels), shared(example_weights))
    parts = {"member_loss": member_loss, "individual": member_loss.mean(), "ensemble": ensemble, "moved": moved.mean()}
    return LossParts(member_loss.sum() + strength * moved.sum(), parts)

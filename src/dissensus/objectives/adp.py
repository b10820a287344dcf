"""ADP: members whose predictions differ beside the label (Pang et al. 2019)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.axes import LossParts
from dissensus.diversity.volume import LEAST, gram, log_determinant
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples
from dissensus.randomness import random_bits


@Declaration(
    draw=True,
    sweepable=("alpha", "beta", "temperature", "entropy_drop"),
    class_labels=True,
    loss="cross_entropy",
    pool="probability",
    neutral={"alpha": 0, "beta": 0, "temperature": 1},
    example_weights="shared",
)
def adp(
    logits: Float[Tensor, "M B C *S"],
    labels: Int[Tensor, "B *S"],
    *,
    alpha: float | Float[Tensor, ""] = 2.0,
    beta: float | Float[Tensor, ""] = 0.5,
    temperature: float | Float[Tensor, ""] = 1.0,
    entropy_drop: float | Float[Tensor, ""] = 0.0,
    draw: int | Tensor = 0,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Fit the labels with diverse non-maximal predictions (ADP paper, equations 2 to 5).

    total = Σ_k CE_k − α · H(mean of the probabilities) − β · log ED, averaged over the batch, with ED
    `dissensus.diversity.nonmaximal_volume`. With β = 0 no determinant is computed. In a sweep it is computed for all
    runs that are trained together if one of them has β > 0. If predictions are free, every member gives the label the
    same probability at the optimum, that of equation 7 (`adp_entropy_weight`), and, where K divides C − 1, each member
    puts the rest on classes that no other member uses. Identical members get the same gradient and stay identical.

    Args:
        logits: Of members.
        labels: Their classes ``[B]``.
        alpha: α ≥ 0, the weight of the ensemble's entropy.
        beta: β ≥ 0, the weight of the logarithm of the volume.
        temperature: Divides logits in training, which enlarges non-maximal predictions when there are many classes
            (appendix B.2). Predict with the logits as they are.
        entropy_drop: Share of the classes that the entropy leaves out, drawn anew at each step (appendix B.2). The
            label is never left out. The number of classes is rounded up: 0.2 of ten classes draws two.
        draw: The only number that this choice depends on. `dissensus.fit` passes a new one at every step.
        example_weights: Weights of examples ``[B]``: all means over the batch become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble``, ``entropy``; ``log_volume`` unless β = 0.

    >>> adp(torch.zeros(2, 1, 3), torch.tensor([0]), alpha=1.0, beta=0.0).total / math.log(3)
    tensor(1.)
    """
    logits, labels, example_weights = examples(logits, labels, example_weights, interacting="adp")
    _, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    if classes < 3:
        fix = "Members differ in the classes beside the label, so two of those are needed."
        checks.refuse("logits", "hold at least three classes", classes, fix)
    for name, value, low, high in (
        ("alpha", alpha, 0, math.inf),
        ("beta", beta, 0, math.inf),
        ("temperature", temperature, 1e-6, math.inf),
        ("entropy_drop", entropy_drop, 0, 1),
    ):
        if not isinstance(value, Tensor):
            checks.number(name, value, low, high)
    logits = checks.full_precision(logits)
    log_probs = (logits / temperature).log_softmax(-1)
    member_loss = -losses.batch_mean(losses.at_label(log_probs, labels), example_weights)
    mean = pooling.pooled_log_probs(log_probs.clamp_min(LEAST))  # no gradient at a class that every member rules out
    entropy = losses.batch_mean(_entropy(mean, labels, entropy_drop, draw), example_weights)
    total = member_loss.sum() - alpha * entropy
    parts = {
        "member_loss": member_loss,
        "individual": member_loss.mean(),
        "ensemble": -losses.batch_mean(losses.at_label(mean, labels), example_weights),
        "entropy": entropy,
    }
    if isinstance(beta, Tensor) or beta != 0:
        volumes = log_determinant(gram(log_probs, labels))
        parts["log_volume"] = losses.batch_mean(volumes, example_weights).to(logits.dtype)
        total = total - beta * parts["log_volume"]
    return LossParts(total, parts)


def _entropy(
    log_probs: Float[Tensor, "B C"], labels: Int[Tensor, " B"], drop: float | Tensor, draw: int | Tensor
) -> Float[Tensor, " B"]:
    """Shannon entropy in nats of the label and the kept classes, with their probabilities renormalised."""
    if isinstance(drop, Tensor) or drop > 0:
        classes = log_probs.shape[-1]
        key = draw if isinstance(draw, Tensor) else torch.full((), draw, dtype=torch.int64, device=log_probs.device)
        rank = random_bits((classes,), key, torch.zeros_like(key)).argsort().argsort()
        dropped = (rank < drop * classes - 1e-4).expand_as(log_probs)  # rounded up, despite rounding errors of `drop`
        is_label = torch.nn.functional.one_hot(labels, classes).bool()
        log_probs = log_probs.masked_fill(dropped & ~is_label, -torch.inf).log_softmax(-1)
    probs = log_probs.exp()
    return -torch.where(probs == 0, 0.0, probs * log_probs.clamp_min(-1e30)).sum(-1)


def adp_entropy_weight(members: int, classes: int, confidence: float) -> float:
    """The α for which labels have this probability at the optimum (ADP paper, equation 7, with β = 0).

    α = K / (F_y · log(F_y (L − 1) / (1 − F_y))).

    >>> round(adp_entropy_weight(5, 1000, 0.9), 2)
    0.61
    """
    _check_sizes(members, classes)
    low = 1 / classes
    if not low < checks.number("confidence", confidence, 0, 1) < 1:
        checks.refuse("confidence", f"lie between 1/{classes} and 1", confidence)
    return members / (confidence * math.log(confidence * (classes - 1) / (1 - confidence)))


def adp_confidence(members: int, classes: int, alpha: float) -> float:
    """The probability of labels at the optimum for an α: the inverse of `adp_entropy_weight`.

    >>> round(adp_confidence(3, 10, 2.0), 3)
    0.588
    """
    _check_sizes(members, classes)
    if checks.number("alpha", alpha, 0) == 0:
        return 1.0
    low, high = 1 / classes, 1.0
    for _ in range(200):  # α falls as confidence rises
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if middle >= 1 or adp_entropy_weight(members, classes, middle) < alpha:
            high = middle
        else:
            low = middle
    return 0.5 * (low + high)


def _check_sizes(members: int, classes: int) -> None:
    checks.count("members", members)
    if checks.count("classes", classes) < 2:
        checks.refuse("classes", "be at least 2", classes)

"""The measurable parts of theorem 2 of the LDR paper: disagreement at high loss, and on data from outside.

f^m(x) is the class that member m names. H are the examples whose loss, summed over members, is at least γ (τ in the
theorem).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dissensus import checks, losses
from dissensus.metrics.generalisation import check_classified, check_outputs, slices, wilson
from dissensus.metrics.intervals import Interval

SHARE = 0.1
"""Default share of examples that count as having a high loss."""


class Premise(NamedTuple):
    """Premise and conclusion of theorem 2 side by side; rates are of J_M = 1, with Wilson's intervals."""

    delta: float
    """The largest δ_H that the premise allows: mean `pair_disagreement` on H; NaN where H is empty."""
    on_high: Interval
    """Rate of disagreement on H; at least delta (lemma 2)."""
    on_rest: Interval
    """Rate of disagreement on the other examples from within; lemma 1 has it at 0."""
    on_ood: Interval
    """Rate of disagreement on examples from outside: the left side of the conclusion."""
    inside_high: float
    """Share of the disagreements within that fall on H; lemma 1 has it at 1. NaN where there are none."""
    threshold: float
    """γ."""
    examples: int
    """Number of examples of H."""


def disagreement_indicator(outputs: Float[Tensor, "M B C"]) -> Bool[Tensor, " B"]:
    """J_M (LDR paper, theorem 1): do any two members name different classes? Never for one member.

    >>> outputs = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    >>> tuple(disagreement_indicator(outputs).tolist())
    (False, True)
    """
    check_outputs(outputs)
    named = outputs.argmax(-1)
    return (named != named[0]).any(0)


def pair_disagreement(outputs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Share of ordered pairs m ≠ m' that name different classes (LDR paper, theorem 2), per example; 0 for one member.

    With n_c votes for class c, Σ_c n_c (n_c − 1) of the M(M − 1) pairs agree, which needs no loop over pairs. The
    mean over examples is that of `dissensus.diversity.pairwise_disagreement` off its diagonal.

    >>> outputs = torch.tensor([[[2.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    >>> round(float(pair_disagreement(outputs)), 4)
    0.6667
    """
    check_outputs(outputs)
    members, batch, classes = outputs.shape
    named = outputs.argmax(-1).T
    votes = torch.zeros(batch, classes, dtype=torch.int32, device=outputs.device)
    votes.scatter_add_(1, named, torch.ones_like(named, dtype=torch.int32))
    agreeing = (votes * (votes - 1)).sum(-1)
    return 1 - agreeing.double() / (members * (members - 1)) if members > 1 else torch.zeros_like(agreeing).double()


def high_loss(
    outputs: Float[Tensor, "M B C"],
    labels: Int[Tensor, " B"],
    *,
    share: float | None = None,
    threshold: float | None = None,
) -> Bool[Tensor, " B"]:
    """H (LDR paper, theorem 2): the examples with Σ_m −log p_m(y) ≥ γ.

    Args:
        outputs: Logits of the members.
        labels: The right classes.
        share: Share of the examples with the highest loss, a tenth by default; ties with the last one are included.
        threshold: γ itself, instead.

    >>> outputs = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 1.0]]])
    >>> tuple(high_loss(outputs, torch.tensor([0, 0]), threshold=1.0).tolist())
    (False, True)
    """
    loss = _summed_loss(outputs, labels)
    return loss >= _threshold(loss, share, threshold)


def premise(
    outputs: Float[Tensor, "M B C"],
    labels: Int[Tensor, " B"],
    ood: Float[Tensor, "M U C"],
    *,
    share: float | None = None,
    threshold: float | None = None,
) -> Premise:
    """Measure what theorem 2 assumes (disagreement on H is at least δ_H) and what it concludes (disagreement outside).

    Pr_Q[J_M = 1] ≥ C1(τ) δ_H − C2(τ)

    It cannot show that the theorem holds or fails. C1 and C2 are not observable: by the proof they are α₀ρ and
    α₀ρΓ + η̄, which depend on how much of Q lies near each of its points, how much of the disagreement is truly from
    outside, and how stable members are in between. With small α₀ρ or large η̄ the bound is vacuous. A high delta with a
    high rate outside does not show that one caused the other: members without skill disagree everywhere. ``on_rest``
    shows this.

    Args:
        outputs: Logits of the members on data from within; the theorem is about training data.
        labels: Their classes.
        ood: Logits of the same members on data from outside.
        share: Share of examples in H, as for `high_loss`.
        threshold: γ, instead.

    >>> outputs = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [1.0, 0.0]]])
    >>> result = premise(outputs, torch.tensor([0, 0]), outputs[:, 1:], share=0.5)
    >>> result.delta, result.on_rest.value, result.on_ood.value, result.inside_high
    (1.0, 0.0, 1.0, 1.0)
    """
    loss = _summed_loss(outputs, labels)
    check_outputs(ood, "ood")
    if (len(ood), ood.shape[2]) != (len(outputs), outputs.shape[2]):
        wanted = f"[M={len(outputs)}, U, C={outputs.shape[2]}]"
        checks.refuse("ood", f"be outputs of the same members, {wanted}", checks.shape_text(ood.shape))
    limit = _threshold(loss, share, threshold)
    high, differ = loss >= limit, disagreement_indicator(outputs)
    among, rest = int((high & differ).sum()), int((~high & differ).sum())
    count, outside = int(high.sum()), disagreement_indicator(ood)
    return Premise(
        delta=float(pair_disagreement(outputs)[high].mean()),
        on_high=wilson(among, count),
        on_rest=wilson(rest, len(loss) - count),
        on_ood=wilson(int(outside.sum()), len(outside)),
        inside_high=among / (among + rest) if among + rest else math.nan,
        threshold=limit,
        examples=count,
    )


def _summed_loss(outputs: Tensor, labels: Tensor) -> Float[Tensor, " B"]:
    """Cross-entropy, summed over members, in double precision."""
    check_classified(outputs, labels)
    parts = [
        -losses.at_label(outputs[:, part].double().log_softmax(-1), labels[part]).sum(0) for part in slices(outputs)
    ]
    return torch.cat(parts)


def _threshold(loss: Float[Tensor, " B"], share: float | None, threshold: float | None) -> float:
    if threshold is not None:
        if share is not None:
            checks.refuse("threshold", "stand alone", f"{threshold} and a share of {share}", "Leave out one of them.")
        return checks.number("threshold", threshold, 0)
    share = checks.number("share", SHARE if share is None else share, 0, 1, open_low=True)
    count = max(1, math.ceil(share * len(loss) - 1e-9))
    return float(loss.topk(count).values[-1])

"""The measurable parts of theorems 2 and 4 of the LDR paper: disagreement at high loss, and on data from outside.

f^m(x) is the class that member m names. H are the examples whose loss, summed over members, is at least γ (τ in the
theorem). μ draws from H uniformly, and Q is the distribution of data from outside. J(x) says whether members disagree.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dissensus import arguments, checks, losses
from dissensus.metrics.generalisation import check_classified, check_outputs, slices, wilson
from dissensus.metrics.intervals import Interval

SHARE = 0.1
"""Default share of examples that count as having a high loss."""
DISAGREEMENT_LOSS = math.log(2)
"""τ of lemma 1: where members disagree, their summed loss is at least log 2. Of two members that name different classes
one does not name the label, so that it gives the label ½ at most. No larger number will do: one member may be at
(½, ½) and all others certain of the label."""


class Premise(NamedTuple):
    """Premise and conclusion of theorem 2 side by side; rates are of J_M = 1, with Wilson's intervals."""

    delta: float
    """The largest δ_H that the premise allows: mean `pair_disagreement` on H; NaN where H is empty."""
    on_high: Interval
    """Rate of disagreement on H; at least delta (lemma 2)."""
    on_rest: Interval
    """Rate of disagreement on the other examples from within; 0 by lemma 1 if γ is at most `DISAGREEMENT_LOSS`."""
    on_ood: Interval
    """Rate of disagreement on examples from outside: the left side of the conclusion."""
    inside_high: float
    """Share of the disagreements within that fall on H; 1 by lemma 1 if γ is at most `DISAGREEMENT_LOSS`. NaN where
    there are none."""
    threshold: float
    """γ."""
    examples: int
    """Number of examples of H."""


@arguments.positions("examples")
def disagreement_indicator(outputs: Float[Tensor, "M B C"]) -> Bool[Tensor, " B"]:
    """J_M (LDR paper, theorem 1): do any two members name different classes? Never for one member.

    >>> outputs = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    >>> tuple(disagreement_indicator(outputs).tolist())
    (False, True)
    """
    check_outputs(outputs)
    named = outputs.argmax(-1)
    return (named != named[0]).any(0)


@arguments.positions("examples")
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


@arguments.positions("examples")
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


@arguments.arrays
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

    It cannot show that the theorem holds or fails. C1 and C2 are not observable from outputs alone: they depend on how
    much of Q lies near each of its points, how much of the disagreement is truly from outside, and how stable members
    are in between. `ood_coverage` measures them from distances, and `ood_disagreement_bound` is the right side. A high
    delta with a high rate outside does not show that one caused the other: members without skill disagree everywhere.
    ``on_rest`` shows this.

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
    for name, part in (("outputs", outputs), ("ood", ood)):
        if part.ndim > 3:
            fix = "Intervals need independent examples. Use one position of each."
            checks.refuse(name, "have one prediction per example, [M, B, C]", checks.shape_text(part.shape), fix)
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


class OodCoverage(NamedTuple):
    """How far disagreement on H reaches into the data from outside: lemmas 3 to 5 and the constants of theorem 4.

    ``expected ≤ covered`` (lemma 3), ``alpha · rho · E_μ[J] ≤ expected`` (lemma 4) and
    ``ood_disagreement_bound(delta, ...) ≤ guaranteed ≤ disagreeing ≤`` the rate of disagreement outside.
    """

    covered: float
    """Q(U): share of the examples from outside that lie within the radius of a disagreement on H."""
    expected: float
    """E_μ[J(x) Q(B_r(x))]: the right side of lemma 3."""
    disagreeing: float
    """Q(U_dis): share of the examples from outside that are covered and disagreed on."""
    guaranteed: float
    """max J(x) (1 − η(x)) Q(B_r(x)): share of disagreements outside in the best ball."""
    eta: float
    """η̄ = E_μ[η(x)] of assumption 5. η(x) is the share of agreement in the ball of a disagreement x, otherwise 0."""
    alpha: float
    """α₀ of assumption 3: the smallest Q(B_r(x)) of the disagreements on H that are from outside; NaN if unknown."""
    rho: float
    """ρ of assumption 4, on H: share of the disagreements on H that are from outside; NaN if unknown."""


@arguments.arrays
def ood_coverage(
    distances: Float[Tensor, "H U"],
    on_high: Bool[Tensor, " H"],
    on_ood: Bool[Tensor, " U"],
    *,
    radius: float,
    from_ood: Bool[Tensor, " H"] | None = None,
) -> OodCoverage:
    """Measure the sets of lemmas 3 to 5 and the constants of theorem 4 of the LDR paper, with a sample of Q for Q.

    U = ∪ B_r(x) over x in H with J(x) = 1,    Q(U) ≥ E_μ[J(x) Q(B_r(x))] ≥ α₀ ρ E_μ[J(x)]

    B_r(x) is the open ball of the radius r. Lemma 3 is loose: U contains every single ball, so that Q(U) is at least
    the *largest* J(x) Q(B_r(x)). The same argument proves theorem 4, with ``guaranteed`` in between. Differs from the
    paper, whose proof uses lemma 5, Q(U_dis) ≥ (1 − η̄) Q(U). That lemma is false where balls overlap: disagreement
    that balls share lowers η(x) of each of them, but counts only once in Q(U_dis). For balls that do not overlap the
    two sides are equal, with η̄ weighted by Q(B_r(x)).

    Args:
        distances: From every example of H to every example from outside, in any metric, for example of features.
        on_high: J(x) on H: `disagreement_indicator` of the outputs there.
        on_ood: J(x) on the examples from outside.
        radius: r > 0.
        from_ood: Which examples of H are truly from outside, if that is known. ``alpha`` and ``rho`` need it.

    Without a disagreement on H all shares are 0, and ``alpha`` and ``rho`` are NaN. ``alpha`` is also NaN if no
    disagreement on H is from outside. A ball without examples from outside has η(x) = 0.

    >>> yes, no = True, False
    >>> distances = torch.tensor([[0.0, 1.0, 9.0, 9.0], [9.0, 9.0, 1.0, 0.0]])
    >>> differ, outside = torch.tensor([yes, no]), torch.tensor([yes, no, no, yes])
    >>> ood_coverage(distances, differ, outside, radius=2.0, from_ood=torch.tensor([yes, no]))
    OodCoverage(covered=0.5, expected=0.25, disagreeing=0.25, guaranteed=0.25, eta=0.25, alpha=0.5, rho=1.0)
    """
    if distances.ndim != 2 or 0 in distances.shape:
        checks.refuse("distances", "have shape [H, U], with examples on both sides", checks.shape_text(distances.shape))
    if not bool((distances >= 0).all()):
        checks.refuse("distances", "be numbers of at least 0", "negative numbers or NaN")
    checks.number("radius", radius, 0, open_low=True)
    _check_flags("on_high", on_high, distances.shape[0])
    _check_flags("on_ood", on_ood, distances.shape[1])
    near = (distances < radius) & on_high.unsqueeze(1)  # balls of disagreements alone
    inside, differing = near.sum(1).double(), (near & on_ood).sum(1).double()
    mass, covered = inside / near.shape[1], near.any(0)
    alpha = rho = math.nan
    if from_ood is not None:
        _check_flags("from_ood", from_ood, distances.shape[0])
        witnesses = from_ood & on_high
        rho = float(from_ood[on_high].double().mean())  # NaN without disagreements
        alpha = float(mass[witnesses].min()) if bool(witnesses.any()) else math.nan
    return OodCoverage(
        covered=float(covered.double().mean()),
        expected=float(mass.mean()),
        disagreeing=float((covered & on_ood).double().mean()),
        guaranteed=float(differing.max() / near.shape[1]),
        eta=float(((inside - differing) / inside.clamp_min(1)).mean()),
        alpha=alpha,
        rho=rho,
    )


def ood_disagreement_bound(delta: float, *, alpha: float, rho: float, eta: float, gap: float = 0.0) -> float:
    """Lower bound of the rate of disagreement outside (LDR paper, theorem 4): α₀ρ(δ_H − Γ) − η̄.

    Theorem 2's constants are C1 = α₀ρ and C2 = α₀ρΓ + η̄. The paper calls them monotone in τ and does not show it. The
    bound is below zero, and says nothing, unless η̄ < α₀ρ(δ_H − Γ).

    Args:
        delta: δ_H, mean `pair_disagreement` on H: ``premise(...).delta``.
        alpha: α₀ in (0, 1], the least share of Q near one of its points.
        rho: ρ in (0, 1], the share of disagreements on H that are from outside. The paper's assumption 4 has it on all
            training data, which is the same if γ is at most `DISAGREEMENT_LOSS`. For a larger γ it must be that on H.
        eta: η̄ in [0, 1], the mean over μ as in assumption 5. With the mean over witnesses, as in lemma 5, the bound
            does not hold.
        gap: Γ ≥ 0. It is 0 for μ as the paper defines it, uniform over H itself, where δ_H is exact.

    >>> round(ood_disagreement_bound(0.8, alpha=0.5, rho=0.9, eta=0.1), 4)
    0.26
    """
    checks.number("delta", delta, 0, 1)
    checks.number("alpha", alpha, 0, 1, open_low=True)
    checks.number("rho", rho, 0, 1, open_low=True)
    checks.number("eta", eta, 0, 1)
    checks.number("gap", gap, 0)
    return alpha * rho * (delta - gap) - eta


def _check_flags(name: str, flags: Tensor, size: int) -> None:
    if tuple(flags.shape) != (size,):
        checks.refuse(name, f"have shape [{size}], as `distances` has it", checks.shape_text(flags.shape))
    if flags.dtype != torch.bool:
        checks.refuse(name, "be true or false", str(flags.dtype), f"Use {name}.bool().", TypeError)


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

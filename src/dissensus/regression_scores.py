"""Scores of how far an example is out of distribution, for regression: ``[M, B, C] -> [B]``, higher is farther out.

They are reached as `dissensus.scores`, which has the table of them. Each takes one kind of outputs, as losses do:
``values`` (D predictions), ``gaussian`` (D means, then D logarithms of variances) or ``quantiles`` (Q of each of D
targets). Variances and widths are averaged over targets, so that targets should be standardised; entropies and
divergences sum over targets and are in nats. NaN in an output gives NaN for that example.

A variance of the targets given the inputs is *aleatoric*; members estimate it. Their disagreement about the mean is
*epistemic*: it is what more training data would remove.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks, losses


@arguments.positions("examples")
def value_variance(values: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Variance of the members' predictions (with divisor M), averaged over targets; 0 for one member.

    >>> value_variance(torch.tensor([[[1.0]], [[3.0]]]))
    tensor([1.])
    """
    checks.member_outputs(values, "values")
    return checks.full_precision(values).var(0, correction=0).mean(-1)


@arguments.positions("examples")
def epistemic_variance(outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR) -> Float[Tensor, " B"]:
    """Variance of the members' means (with divisor M), averaged over targets; 0 for one member."""
    means, _ = _moments(outputs, floor)
    return means.var(0, correction=0).mean(-1)


@arguments.positions("examples")
def aleatoric_variance(outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR) -> Float[Tensor, " B"]:
    """Mean of the members' variances, averaged over targets."""
    _, variances = _moments(outputs, floor)
    return variances.mean((0, -1))


@arguments.positions("examples")
def total_variance(outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR) -> Float[Tensor, " B"]:
    """Variance of the mixture: epistemic and aleatoric together (Lakshminarayanan et al., 2017), mean over targets.

    >>> total_variance(torch.tensor([[[-1.0, 0.0]], [[1.0, 0.0]]]))
    tensor([2.0000])
    """
    return epistemic_variance(outputs, floor=floor) + aleatoric_variance(outputs, floor=floor)


@arguments.positions("examples")
def gaussian_entropy(outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR) -> Float[Tensor, " B"]:
    """Upper bound on the entropy of the mixture: that of independent Gaussians with its means and variances.

    ½ Σ_d log(2πe v_d). Of all densities with these variances the Gaussian has the largest entropy. The bound is the
    entropy itself for one member and for identical members.

    >>> gaussian_entropy(torch.tensor([[[0.0, 0.0]]]))
    tensor([1.4189])
    """
    means, variances = _moments(outputs, floor, double=True)  # entropies of variances that float32 lacks are finite
    return _entropy(variances.mean(0) + means.var(0, correction=0)).to(checks.full_precision(outputs).dtype)


@arguments.positions("examples")
def mean_gaussian_entropy(
    outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR
) -> Float[Tensor, " B"]:
    """Mean of the members' entropies, ½ Σ_d log(2πe v_d): the aleatoric part of the mixture's entropy."""
    _, variances = _moments(outputs, floor, double=True)
    return _entropy(variances).mean(0).to(checks.full_precision(outputs).dtype)


@arguments.positions("examples")
def gaussian_information_lower(
    outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR
) -> Float[Tensor, " B"]:
    """Lower bound on the mutual information of target and member, from 0 to log M; 0 for one member.

    −(1/M) Σ_i log (1/M) Σ_j exp(−B_ij) with Bhattacharyya distances B_ij = Σ_d [¼ (μ_i − μ_j)²/(v_i + v_j)
    + ½ log((v_i + v_j)/(2 σ_i σ_j))] (Kolchinsky and Tracey, 2017, equation 10 with Chernoff's α = ½). The mutual
    information itself, entropy of the mixture less mean entropy, has no closed form.

    >>> gaussian_information_lower(torch.tensor([[[-50.0, 0.0]], [[50.0, 0.0]]]))
    tensor([0.6931])
    """
    return _information(outputs, floor, _bhattacharyya)


@arguments.positions("examples")
def gaussian_information_upper(
    outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR
) -> Float[Tensor, " B"]:
    """Upper bound on the mutual information of target and member, from 0 to log M; 0 for one member.

    As `gaussian_information_lower`, with Kullback-Leibler divergences KL(p_i ‖ p_j) for the distances (Kolchinsky and
    Tracey, 2017, equation 9).

    >>> gaussian_information_upper(torch.tensor([[[-1.0, 0.0]], [[1.0, 0.0]]]))  # 0.34 in truth
    tensor([0.5662])
    """
    return _information(outputs, floor, _kullback_leibler)


@arguments.positions("examples")
def gaussian_pairwise_kl(
    outputs: Float[Tensor, "M B C"], *, floor: float = losses.VARIANCE_FLOOR
) -> Float[Tensor, " B"]:
    """Mean of KL(p_i ‖ p_j) over all ordered pairs of members, from 0 to ∞; 0 for one member.

    KL(p_i ‖ p_j) = ½ Σ_d [log(v_j/v_i) + (v_i + (μ_i − μ_j)²)/v_j − 1]. Logarithms cancel in the sum over pairs:
    it is (M/2) Σ_j Σ_d [(v̄ + (μ̄ − μ_j)²)/v_j − 1] with the mixture's mean μ̄ and variance v̄.

    >>> gaussian_pairwise_kl(torch.tensor([[[-1.0, 0.0]], [[1.0, 0.0]]]))
    tensor([2.0000])
    """
    means, variances = _moments(outputs, floor, double=True)
    members = len(means)
    mean, total = means.mean(0), variances.mean(0) + means.var(0, correction=0)
    pairs = ((total + (mean - means).square()) / variances - 1).sum((0, -1)) / 2 * members
    return (pairs / max(1, members * (members - 1))).clamp_min(0).to(checks.full_precision(outputs).dtype)


@arguments.positions("examples")
def interval_width(
    outputs: Float[Tensor, "M B C"], *, levels: Sequence[float] = losses.QUANTILE_LEVELS
) -> Float[Tensor, " B"]:
    """Distance of the outermost quantiles, averaged over members and targets: the aleatoric spread.

    Args:
        outputs: Quantiles ``[M, B, D·Q]``, those of the first target first.
        levels: The Q levels. Only their number counts.

    >>> interval_width(torch.tensor([[[-1.0, 0.0, 2.0]], [[-2.0, 0.0, 3.0]]]))
    tensor([4.])
    """
    quantiles = _quantiles(outputs, levels)
    return (quantiles.amax(-1) - quantiles.amin(-1)).mean((0, -1))  # crossed quantiles are taken in order


@arguments.positions("examples")
def quantile_variance(
    outputs: Float[Tensor, "M B C"], *, levels: Sequence[float] = losses.QUANTILE_LEVELS
) -> Float[Tensor, " B"]:
    """Variance over members of each quantile, averaged over levels and targets: the epistemic spread; 0 for one member.

    >>> quantile_variance(torch.tensor([[[-1.0, 0.0, 2.0]], [[-3.0, 0.0, 2.0]]]))
    tensor([0.3333])
    """
    return _quantiles(outputs, levels).var(0, correction=0).mean((-2, -1))


def _moments(outputs: Tensor, floor: float, *, double: bool = False) -> tuple[Tensor, Tensor]:
    checks.member_outputs(outputs)
    means, variances = losses.gaussian_moments(outputs.double() if double else outputs, floor)
    unknown = means.isnan() | variances.isnan()
    return means.masked_fill(unknown, math.nan), variances.masked_fill(unknown, math.nan)


def _entropy(variance: Float[Tensor, "*S D"]) -> Float[Tensor, "*S"]:
    return (2 * math.pi * math.e * variance).log().sum(-1) / 2


def _quantiles(outputs: Tensor, levels: Sequence[float]) -> Float[Tensor, "M B D Q"]:
    """Quantiles of every target, in order."""
    *_, width = checks.member_outputs(outputs)
    count = len(losses.check_levels(levels))
    if width % count:
        checks.refuse("outputs", f"have {count} quantiles per target", checks.shape_text(outputs.shape, "MBC"))
    return checks.full_precision(outputs).unflatten(-1, (-1, count)).sort(-1).values


_Distance = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(means, variances, other means, other variances) -> distances``, per target."""


def _information(outputs: Tensor, floor: float, distance: _Distance) -> Float[Tensor, " B"]:
    """−(1/M) Σ_i log (1/M) Σ_j exp(−D_ij), in double precision."""
    means, variances = _moments(outputs, floor, double=True)
    members = len(means)
    similar = 0 * (means + variances).sum(-1)  # log Σ_j exp(−D_ij), with j = i; NaN where an output is
    for shift in range(1, members):  # M pairs at a time: all at once would take M times the memory
        apart = distance(means, variances, means.roll(shift, 0), variances.roll(shift, 0)).sum(-1)
        similar = torch.logaddexp(similar, -apart)
    bound = (math.log(members) - similar).mean(0)
    return bound.clamp_min(0).to(checks.full_precision(outputs).dtype)  # below zero by rounding only


def _bhattacharyya(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    both = variance + other_variance
    logs = both.log() - math.log(2) - (variance.log() + other_variance.log()) / 2
    return (mean - other_mean).square() / both / 4 + logs / 2


def _kullback_leibler(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    squares = (variance + (mean - other_mean).square()) / other_variance
    return (other_variance.log() - variance.log() + squares - 1) / 2

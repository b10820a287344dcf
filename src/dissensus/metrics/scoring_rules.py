"""Proper scoring rules of predictive distributions of real targets, for every example; lower is better.

All functions work on each number by itself, in double precision: means, variances and targets have one shape, such as
``[B, D]`` for D targets, and members come first, ``[M, B, D]``. For means ``[B, 1]`` targets may be ``[B]``. The
negative log-likelihoods are joint: they sum over targets, ``[B, D] -> [B]``. NaN gives NaN for its example. The mean
over a data set, with an interval, is `dissensus.metrics.mean_interval`.

A mean and a variance of every member come from `dissensus.losses.gaussian_moments`.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks

_TINY = torch.finfo(torch.float64).tiny


@arguments.arrays
def crps_gaussian(mean: Float[Tensor, "*S"], variance: Float[Tensor, "*S"], targets: Tensor) -> Float[Tensor, "*S"]:
    """CRPS of a Gaussian, σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − μ)/σ (Gneiting et al., 2005, equation 5).

    It has the unit of the target. A variance of 0 gives the absolute error.

    >>> crps_gaussian(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    tensor([0.2337, 2.0000], dtype=torch.float64)
    """
    mean, variance, targets = _moments(mean, variance, targets, "mean", "variance")
    return _mean_distance(targets - mean, variance) - (variance / math.pi).sqrt()


@arguments.arrays
def crps_mixture(
    means: Float[Tensor, "M *S"],
    variances: Float[Tensor, "M *S"],
    targets: Tensor,
    *,
    weights: Tensor | Sequence[float] | None = None,
) -> Float[Tensor, "*S"]:
    """CRPS of a mixture of Gaussians, exactly (Grimit et al., 2006, equation 5), with M² terms per number.

    Σ_i w_i A(y − μ_i, σ_i²) − ½ Σ_i Σ_j w_i w_j A(μ_i − μ_j, σ_i² + σ_j²), where A(μ, σ²) = E|N(μ, σ²)|
    = μ (2Φ(μ/σ) − 1) + 2σ φ(μ/σ). One member, and identical members, give `crps_gaussian`.

    Args:
        means: Of the members.
        variances: Of the members, at least 0.
        targets: In the shape of one member's means.
        weights: Of the members ``[M]``, with sum one. None: all the same.

    >>> means, variances = torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1)
    >>> crps_mixture(means, variances, torch.tensor([0.0]))
    tensor([0.3594], dtype=torch.float64)
    """
    means, variances, targets = _moments(means, variances, targets, "means", "variances", members=True)
    shares = _shares(weights, means)
    outer = (shares * _mean_distance(targets - means, variances)).sum(0)
    members = len(means)
    inner = (shares.square() * (4 * variances / math.pi).sqrt()).sum(0)  # a member with itself: A(0, 2σ²) = 2σ/√π
    for shift in range(1, members // 2 + 1):  # M pairs at a time: all M² at once would take M times the memory
        pairs = _mean_distance(means - means.roll(shift, 0), variances + variances.roll(shift, 0))
        both_ways = 1 if 2 * shift == members else 2  # (i, i + shift) and (i + shift, i)
        inner = inner + both_ways * (shares * shares.roll(shift, 0) * pairs).sum(0)
    return outer - inner / 2


@arguments.arrays
def crps_ensemble(values: Float[Tensor, "M *S"], targets: Tensor, *, fair: bool = False) -> Float[Tensor, "*S"]:
    """CRPS of the empirical distribution of M point predictions, in O(M log M) by sorting.

    (1/M) Σ_i |x_i − y| − 1/(2M²) Σ_i Σ_j |x_i − x_j| (Gneiting and Raftery, 2007). One member gives the absolute error.
    The spread of point predictions is not the noise of targets, so that this rule prefers members with probabilities.

    Args:
        values: Predictions of the members.
        targets: In the shape of one member's predictions.
        fair: Divide the second sum by 2M(M − 1) instead. In expectation this is the CRPS of the distribution that the
            members were drawn from (Ferro, 2014), so that ensembles of several sizes can be compared. It may be
            negative, and it needs two members.

    >>> crps_ensemble(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
    tensor([0.5000], dtype=torch.float64)
    >>> crps_ensemble(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]), fair=True)
    tensor([0.], dtype=torch.float64)
    """
    checks.flag("fair", fair)
    if not values.is_floating_point() or values.ndim < 2 or not len(values):
        got = f"{checks.shape_text(values.shape)} {values.dtype}"
        checks.refuse("values", "be floating point with members first, [M, B, D]", got)
    members = len(values)
    if fair and members == 1:
        checks.refuse("values", "have two members or more for fair=True", "one member", "Use fair=False.")
    gaps = (values.double() - as_shaped(targets, values.shape[1:])).sort(0).values  # near zero: sums stay exact
    ranks = torch.arange(members, dtype=torch.float64, device=gaps.device).mul_(2).sub_(members - 1)
    spread = (ranks.view(-1, *[1] * (gaps.ndim - 1)) * gaps).sum(0)  # ½ Σ_i Σ_j |x_i − x_j|
    return gaps.abs().mean(0) - spread / (members * (members - 1 if fair else members))


@arguments.arrays
def pinball(
    quantiles: Float[Tensor, "*S Q"], targets: Tensor, *, levels: Sequence[float] | Tensor
) -> Float[Tensor, "*S Q"]:
    """Pinball loss of quantiles, max(τ (y − q), (τ − 1)(y − q)), for every level τ.

    Args:
        quantiles: Predicted quantiles, with the levels last: ``[B, D, Q]``. Outputs of one member for
            `dissensus.losses.quantile` are ``[B, D·Q]``: use ``outputs.unflatten(-1, (-1, Q))``.
        targets: ``[B, D]``.
        levels: The Q levels, between 0 and 1.

    >>> pinball(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0]), levels=(0.1, 0.5))
    tensor([[0.2000, 0.5000]], dtype=torch.float64)
    """
    if quantiles.ndim < 2 or not quantiles.is_floating_point():
        got = f"{checks.shape_text(quantiles.shape)} {quantiles.dtype}"
        checks.refuse("quantiles", "be floating point with levels last, [B, D, Q]", got)
    shares = checked_levels(levels, quantiles.shape[-1]).to(quantiles.device)
    gaps = as_shaped(targets, quantiles.shape[:-1]).unsqueeze(-1) - quantiles.double()
    return torch.maximum(shares * gaps, (shares - 1) * gaps)


@arguments.arrays
def crps_quantiles(
    quantiles: Float[Tensor, "*S Q"], targets: Tensor, *, levels: Sequence[float] | Tensor
) -> Float[Tensor, "*S"]:
    """Approximate CRPS of quantiles: twice the mean pinball loss over levels (Gneiting and Ranjan, 2011).

    CRPS = 2 ∫₀¹ pinball_τ dτ, so the mean is a midpoint sum for the levels (k − ½)/Q, k = 1 to Q, which is exact in the
    limit of many levels. For a median and pairs of levels α/2 and 1 − α/2 it is the weighted interval score (Bracher et
    al., 2021). Compare it between models of the same levels only.

    >>> crps_quantiles(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0]), levels=(0.1, 0.5))
    tensor([0.7000], dtype=torch.float64)
    """
    return 2 * pinball(quantiles, targets, levels=levels).mean(-1)


@arguments.arrays
def winkler(
    low: Float[Tensor, "*S"], high: Float[Tensor, "*S"], targets: Tensor, *, level: float
) -> Float[Tensor, "*S"]:
    """Interval score of prediction intervals (Winkler, 1972; Gneiting and Raftery, 2007, equation 43).

    (u − l) + (2/α) (l − y)₊ + (2/α) (y − u)₊ with α = 1 − level: the width, and a penalty for targets outside. It is
    least in expectation for the quantiles at α/2 and 1 − α/2.

    >>> winkler(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 1.5]), level=0.5)
    tensor([1., 3.], dtype=torch.float64)
    """
    checks.number("level", level, 0, 1, open_low=True, open_high=True)
    low, high, targets = checked_ends(low, high, targets)
    outside = (low - targets).clamp_min(0) + (targets - high).clamp_min(0)
    return high - low + 2 / (1 - level) * outside


@arguments.arrays
def nll_gaussian(mean: Float[Tensor, "*S D"], variance: Float[Tensor, "*S D"], targets: Tensor) -> Float[Tensor, "*S"]:
    """Negative log-likelihood of independent Gaussians, ½ Σ_d [log 2πσ_d² + (y_d − μ_d)²/σ_d²], with its constant.

    >>> nll_gaussian(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([1.0]))
    tensor([1.4189], dtype=torch.float64)
    """
    mean, variance, targets = _moments(mean, variance, targets, "mean", "variance", positive=True)
    return -_log_density(mean, variance, targets)


@arguments.arrays
def nll_mixture(
    means: Float[Tensor, "M *S D"],
    variances: Float[Tensor, "M *S D"],
    targets: Tensor,
    *,
    weights: Tensor | Sequence[float] | None = None,
) -> Float[Tensor, "*S"]:
    """Negative log-likelihood of a mixture of Gaussians, −log Σ_m w_m Π_d N(y_d; μ_md, σ_md²).

    Targets are independent within a member, not in the mixture. The mixture is computed in log space, so that nothing
    underflows. One member, and identical members, give `nll_gaussian`.

    >>> means, variances = torch.tensor([[[0.0]], [[100.0]]]), torch.ones(2, 1, 1)
    >>> nll_mixture(means, variances, torch.tensor([0.0]))  # that of the first member, and log 2
    tensor([1.6121], dtype=torch.float64)
    """
    means, variances, targets = _moments(means, variances, targets, "means", "variances", members=True, positive=True)
    shares = checks.member_weights(weights, len(means), means).log()
    densities = _log_density(means, variances, targets)
    return -(densities + shares.view(-1, *[1] * (densities.ndim - 1))).logsumexp(0)


@arguments.arrays
def pit(
    means: Float[Tensor, "M *S"],
    variances: Float[Tensor, "M *S"],
    targets: Tensor,
    *,
    weights: Tensor | Sequence[float] | None = None,
) -> Float[Tensor, "*S"]:
    """Probability integral transform of a mixture of Gaussians, F(y) = Σ_m w_m Φ((y − μ_m)/σ_m).

    It is uniform on [0, 1] where the mixture is the distribution of the targets (see `distribution_calibration`). For
    one Gaussian use ``mean.unsqueeze(0)`` and ``variance.unsqueeze(0)``. A variance of 0 gives a step, with ½ at it.

    >>> pit(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 4.0]]), torch.tensor([0.0, 2.0]))
    tensor([0.5000, 0.8413], dtype=torch.float64)
    """
    means, variances, targets = _moments(means, variances, targets, "means", "variances", members=True)
    return (_shares(weights, means) * torch.special.ndtr((targets - means) / _std(variances))).sum(0)


def as_shaped(targets: Tensor, shape: Sequence[int], name: str = "targets") -> Float[Tensor, "..."]:
    """Targets of a shape in double precision; the last axis may be left out where it is 1."""
    shape = tuple(shape)
    if tuple(targets.shape) == shape[:-1] and shape[-1:] == (1,):
        targets = targets.unsqueeze(-1)
    if tuple(targets.shape) != shape:
        checks.refuse(name, f"have shape {list(shape)}, that of one prediction", checks.shape_text(targets.shape))
    return targets.double()


def checked_levels(levels: Sequence[float] | Tensor, count: int | None = None) -> Float[Tensor, " Q"]:
    """Levels between 0 and 1, ascending, in double precision."""
    numbers = checks.listed("levels", levels)
    for number in numbers:
        checks.number("levels", number, 0, 1, open_low=True, open_high=True)
    if not numbers or sorted(set(numbers)) != numbers:
        checks.refuse("levels", "be numbers in ascending order", numbers)
    if count is not None and len(numbers) != count:
        fix = "Outputs of members, [B, D*Q]? Use unflatten(-1, (-1, Q))."
        checks.refuse("levels", f"have one number for each of the {count} quantiles", f"{len(numbers)} of them", fix)
    return torch.tensor(numbers, dtype=torch.float64)


def checked_ends(low: Tensor, high: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ends of intervals and targets in double precision; NaN and infinite ends are allowed."""
    if low.shape != high.shape:
        checks.refuse("high", f"have the shape of `low`, {list(low.shape)}", checks.shape_text(high.shape))
    low, high = low.double(), high.double()
    if bool((low > high).any()):
        fix = "Crossed quantiles? Sort them: quantiles.sort(-1).values."
        checks.refuse("low", "be at most `high`", f"{int((low > high).sum())} larger numbers", fix)
    return low, high, as_shaped(targets, low.shape)


def checked_variance(variance: Tensor, name: str, *, positive: bool = False) -> Float[Tensor, "..."]:
    """Variances in double precision, of at least 0 or above it."""
    variance = variance.double()
    wrong = variance <= 0 if positive else variance < 0
    if bool(wrong.any()):
        wanted = "be above 0" if positive else "be at least 0"
        fix = "Outputs of losses.gaussian_nll? Use losses.gaussian_moments(outputs)."
        checks.refuse(name, wanted, float(variance[wrong].min()), fix)
    return variance


def _moments(
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    *names: str,
    members: bool = False,
    positive: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Means, variances and targets in double precision and in shapes that fit."""
    if not mean.is_floating_point() or (members and (mean.ndim < 2 or not len(mean))):
        wanted = "be floating point" + (" with at least one member first, [M, B, D]" if members else "")
        checks.refuse(names[0], wanted, f"{checks.shape_text(mean.shape)} {mean.dtype}")
    if variance.shape != mean.shape:
        wanted = f"have the shape of `{names[0]}`, {list(mean.shape)}"
        checks.refuse(names[1], wanted, checks.shape_text(variance.shape))
    variance = checked_variance(variance, names[1], positive=positive)
    return mean.double(), variance, as_shaped(targets, mean.shape[1:] if members else mean.shape)


def _shares(weights: Tensor | Sequence[float] | None, means: Tensor) -> Tensor:
    """Weights of members, one per row of means."""
    return checks.member_weights(weights, len(means), means).view(-1, *[1] * (means.ndim - 1))


def _std(variance: Tensor) -> Tensor:
    """Standard deviations that one may divide by."""
    return variance.sqrt().clamp_min(_TINY)


def _mean_distance(gap: Tensor, variance: Tensor) -> Tensor:
    """E|X| of X ~ N(gap, variance); |gap| where the variance is 0."""
    z = gap / _std(variance)
    return gap * torch.special.erf(z / math.sqrt(2)) + (2 / math.pi * variance).sqrt() * (-z.square() / 2).exp()


def _log_density(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Log-density of independent Gaussians, summed over the last axis."""
    return -0.5 * ((2 * math.pi * variance).log() + (targets - mean).square() / variance).sum(-1)

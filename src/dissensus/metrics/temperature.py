"""Temperature scaling: one number by which logits are divided, or variances multiplied, to calibrate predictions."""

import itertools
import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import arguments, checks, dense, losses, pooling
from dissensus.metrics.generalisation import check_classified, pooled, slices
from dissensus.metrics.scoring_rules import as_shaped, checked_variance

COLDEST, HOTTEST = 1e-2, 1e2
"""Range in which temperatures are searched."""
_POINTS = 33
"""Number of temperatures, evenly spaced in their logarithm, of the grid that separates local minima."""
_POOLS = {"probability": pooling.mean_probability, "score": pooling.mean_score}


class Tempered(NamedTuple):
    """A temperature for all members that `temper` has fitted, for use on other data."""

    temperature: float
    when: Literal["before", "after"]
    pool: Literal["probability", "score"]

    def log_probs(self, outputs: Float[Tensor, "M B C *S"]) -> Float[Tensor, "B C *S"]:
        """Pooled log-probabilities of members with these logits at this temperature."""
        outputs = arguments.as_tensor(outputs, "outputs")
        checks.member_axes(outputs, dense=True)
        outputs = checks.full_precision(outputs)
        pool = _POOLS[self.pool]
        if self.when == "before":
            return pool(outputs / self.temperature)
        return (pool(outputs) / self.temperature).log_softmax(1)


@arguments.arrays
def temperature(
    logits: Float[Tensor, "B C *S"], labels: Int[Tensor, "B *S"], *, ignore_index: int | None = None
) -> float:
    """The T at which softmax(logits / T) has the least cross-entropy (Guo et al., 2017), for one network or one pool.

    T is above 1 for overconfident predictions. The loss is convex in 1/T, so there is one minimum, which Newton's
    method finds to about twelve digits. T is between 0.01 and 100: it is 0.01 where every prediction is right, 100
    where predictions are worse than uniform, and 1 where it makes no difference. Log-probabilities can be used as
    logits.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> round(temperature(logits, torch.tensor([0, 0, 0, 1])), 4)  # right in three of four: p = 3/4, 4/T = log 3
    3.641
    """
    if (logits.ndim > 2 and labels.ndim == logits.ndim - 1) or (ignore_index is not None and logits.ndim == 2):
        members, labels = dense.counted(logits.unsqueeze(0), labels, ignore_index=ignore_index)
        logits = members[0]
    if logits.ndim != 2:
        fix = "Outputs of members? Use temper, or pool them first." if logits.ndim == 3 else ""
        checks.refuse("logits", "have shape [B, C]", checks.shape_text(logits.shape), fix)
    _check(logits.unsqueeze(0), labels, "logits")
    return _best(logits.unsqueeze(0), labels, 2)  # convex: the two ends tell where the minimum is


@arguments.arrays
def temper(
    outputs: Float[Tensor, "M B C *S"],
    labels: Int[Tensor, "B *S"],
    *,
    when: Literal["before", "after"] = "after",
    pool: Literal["probability", "score"] = "probability",
    ignore_index: int | None = None,
) -> Tempered:
    """Fit one temperature to the pooled prediction on validation data; its `log_probs` are for test data.

    ``"after"`` pools first and divides the pooled log-probabilities by T. ``"before"`` divides every member's logits by
    the same T and then pools. Both minimise the cross-entropy of the *pooled* prediction. Neither calibrates members
    separately (`temperature` of its logits): the mean of calibrated members is underconfident (Rahaman and Thiery,
    2021, who advise to pool and then calibrate).

    The two differ for mean probabilities. After pooling, T changes the confidence of the pool but never its class.
    Before pooling, T can change the class: a low T approaches a vote of the members, a high T the class of the mean
    logits. For mean scores, and for one member, the two are the same.

    Args:
        outputs: Logits of the members.
        labels: The right classes.
        when: After pooling the loss is convex in 1/T. Before pooling it need not be, so every minimum on a grid of
            temperatures is refined, and the lowest is taken.
        pool: Mean of probabilities, or of scores.
        ignore_index: Label of positions of dense outputs, or examples, that do not count.

    >>> outputs = torch.tensor([[[6.0, 0.0], [5.0, 0.0], [0.0, 6.0]], [[6.0, 0.0], [0.0, 2.0], [0.0, 1.0]]])
    >>> labels = torch.tensor([0, 0, 0])
    >>> fitted = temper(outputs, labels, when="before")
    >>> round(fitted.temperature, 3), round(temper(outputs, labels).temperature, 3)
    (5.351, 3.828)
    >>> fitted.log_probs(outputs).shape
    torch.Size([3, 2])
    """
    checks.one_of("when", when, ("before", "after"))
    outputs, labels = dense.counted(outputs, labels, ignore_index=ignore_index)
    checks.one_of("pool", pool, _POOLS)
    _check(outputs, labels, "outputs")
    if when == "before" and pool == "probability" and len(outputs) > 1:
        fitted = _best(outputs, labels, _POINTS)
    else:
        fitted = _best(pooled(outputs, pool).unsqueeze(0), labels, 2)
    return Tempered(fitted, when, pool)


class TemperedVariance(NamedTuple):
    """A temperature of the variance that `temper_variance` has fitted, for use on other data."""

    temperature: float

    def members(
        self, means: Float[Tensor, "M *S"], variances: Float[Tensor, "M *S"]
    ) -> tuple[Float[Tensor, "M *S"], Float[Tensor, "M *S"]]:
        """Means and variances of the members, whose mixture is stretched about its mean.

        The mean of the mixture stays, and its variance is multiplied by the temperature T: distances of members' means
        from it by √T, and members' variances by T. Distances of quantiles from the mean are multiplied by √T.
        """
        means = checks.full_precision(arguments.as_tensor(means, "means"))
        variances = checks.full_precision(arguments.as_tensor(variances, "variances"))
        centre = means.mean(0)
        return centre + math.sqrt(self.temperature) * (means - centre), self.temperature * variances


@arguments.arrays
def variance_temperature(mean: Float[Tensor, "*S"], variance: Float[Tensor, "*S"], targets: Tensor) -> float:
    """The T at which Gaussians N(μ, T σ²) have the least negative log-likelihood: the mean of (y − μ)²/σ².

    The loss ½ [log T + log 2πσ² + (y − μ)²/(T σ²)] has one minimum, in closed form (Laves et al., 2020; Levi et al.,
    2022). Standard deviations are multiplied by √T. T is above 1 for overconfident predictions, and 0 where every
    prediction is exact.

    >>> mean, variance = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 4.0])
    >>> variance_temperature(mean, variance, torch.tensor([1.0, -4.0]))
    2.5
    """
    if variance.shape != mean.shape:
        wanted = f"have the shape of `mean`, {list(mean.shape)}"
        checks.refuse("variance", wanted, checks.shape_text(variance.shape))
    squares = (as_shaped(targets, mean.shape) - mean.double()).square()
    ratios = squares / checked_variance(variance, "variance", positive=True)
    if not ratios.numel():
        checks.refuse("mean", "hold at least one example", checks.shape_text(mean.shape))
    if not bool(ratios.isfinite().all()):
        checks.refuse("mean", "be finite, as variances and targets", "NaN or infinity", "Leave such examples out.")
    return float(ratios.mean())


@arguments.arrays
def temper_variance(
    means: Float[Tensor, "M *S"], variances: Float[Tensor, "M *S"], targets: Tensor
) -> TemperedVariance:
    """Fit the temperature of the variance of a mixture on validation data; its `members` are for test data.

    It is `variance_temperature` of the Gaussian with the mean and variance of the mixture. The pool is
    calibrated, not each member: a mixture of calibrated members is wider than the errors of its mean.

    Args:
        means: Of the members.
        variances: Of the members. Zeros, for members that predict a value only, are allowed where members differ.
        targets: In the shape of one member's means.

    >>> means, variances = torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1)  # variance 1 within members, 1 between
    >>> temper_variance(means, variances, torch.tensor([4.0]))
    TemperedVariance(temperature=8.0)
    """
    if means.ndim < 2 or not len(means) or not means.is_floating_point():
        got = f"{checks.shape_text(means.shape)} {means.dtype}"
        checks.refuse("means", "be floating point with at least one member first, [M, B, D]", got)
    if variances.shape != means.shape:
        wanted = f"have the shape of `means`, {list(means.shape)}"
        checks.refuse("variances", wanted, checks.shape_text(variances.shape))
    variance = checked_variance(variances, "variances").mean(0) + means.double().var(0, correction=0)
    return TemperedVariance(variance_temperature(means.double().mean(0), variance, targets))


class _Curve(NamedTuple):
    """The loss at an inverse temperature, and its first two derivatives by it."""

    loss: float
    slope: float
    bend: float


def _best(logits: Float[Tensor, "M B C"], labels: Tensor, points: int) -> float:
    """The temperature of the lowest minimum. Signs of slopes on a grid separate the minima."""
    low, high = -math.log(HOTTEST), -math.log(COLDEST)
    grid = [low + (high - low) * step / (points - 1) for step in range(points)]
    curves = [(place, _curve(logits, labels, place)) for place in grid]
    sloped = [(place, curve.slope) for place, curve in curves if curve.slope != 0]
    if not sloped:
        return 1.0
    minima: list[tuple[float, float]] = []
    if sloped[0][1] > 0:
        minima.append((curves[0][1].loss, HOTTEST))
    if sloped[-1][1] < 0:
        minima.append((curves[-1][1].loss, COLDEST))
    for (left, falling), (right, rising) in itertools.pairwise(sloped):
        if falling < 0 < rising:
            place = _level(logits, labels, left, right)
            minima.append((_curve(logits, labels, place).loss, math.exp(-place)))
    return min(minima)[1]


def _level(logits: Float[Tensor, "M B C"], labels: Tensor, low: float, high: float) -> float:
    """The place between two others where the slope is zero, by Newton's method, and bisection where that fails."""
    here, last = (low + high) / 2, math.inf
    for _ in range(200):
        _, slope, bend = _curve(logits, labels, here)
        if slope == 0:
            break
        low, high = (low, here) if slope > 0 else (here, high)
        steep = math.exp(here) * bend  # by the logarithm of the inverse temperature
        step = here - slope / steep if steep > 0 else math.inf
        if abs(step - here) < 1e-12 or high - low < 1e-12:
            break
        newton = low < step < high and abs(slope) < last / 2
        here, last = step if newton else (low + high) / 2, abs(slope)
    return here


def _curve(logits: Float[Tensor, "M B C"], labels: Tensor, log_inverse: float) -> _Curve:
    """Cross-entropy of the mean of softmax(β f_m), averaged over examples, at β = exp(log_inverse).

    With d = f_m − f_m(y), −log p_m(y) = log Σ_c exp(β d_c) has the derivatives E[d] and V[d] under p_m; members have
    weights in the mean by their share of Σ_m p_m(y).
    """
    inverse = math.exp(log_inverse)
    sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
    for part in slices(logits):
        wide = logits[:, part].double()
        gaps = wide - losses.at_label(wide, labels[part]).unsqueeze(-1)
        top = gaps.amax(-1, keepdim=True)
        weights = ((gaps - top) * inverse).exp_()  # p_m, up to a factor
        total = weights.sum(-1)
        member_loss = inverse * top.squeeze(-1) + total.log()
        mean = weights.mul_(gaps).sum(-1) / total
        spread = weights.mul_(gaps).sum(-1) / total - mean.square()
        shares = (-member_loss).softmax(0)
        loss = -pooling.pooled_log_probs(-member_loss)
        slope = (shares * mean).sum(0)
        bend = (shares * (spread - mean.square())).sum(0) + slope.square()
        sums += torch.stack([loss.sum(), slope.sum(), bend.sum()])
    return _Curve(*(sums / logits.shape[1]).tolist())


def _check(logits: Tensor, labels: Tensor, name: str) -> None:
    check_classified(logits, labels, name)
    if not bool(logits.amin(-1).isfinite().all()):
        checks.refuse(name, "be finite", "-inf", f"Use {name}.clamp_min(-1e4).")

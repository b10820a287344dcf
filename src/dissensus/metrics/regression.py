"""Quality of predictions of real targets: errors, prediction intervals and predictive distributions, with intervals.

Examples are the rows ``[B]``, which the bootstrap draws; several targets of an example, ``[B, D]``, stay together.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks
from dissensus.metrics.generalisation import score_interval
from dissensus.metrics.intervals import Interval, absolute_sum, percentile
from dissensus.metrics.scoring_rules import as_shaped, checked_ends, checked_levels, winkler

LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))
"""Levels at which the calibration of a distribution is looked at."""
_NUMBERS_AT_ONCE = 2**23
"""Numbers that are drawn at once."""


class Regression(NamedTuple):
    """Errors of point predictions, with bootstrap intervals. Several targets count the same, as in scikit-learn."""

    rmse: Interval
    """Root of the mean squared error; with several targets, the mean of their roots."""
    mae: Interval
    """Mean absolute error."""
    r2: Interval
    """One less the squared error over that of the targets' mean. NaN where a target is constant."""


class PredictionIntervals(NamedTuple):
    """Quality of prediction intervals of one level."""

    coverage: Interval
    """Share of targets that lie within, ends included, with Wilson's interval."""
    width: Interval
    """Mean width."""
    score: Interval
    """Mean interval score (`winkler`); lower is better."""


class DistributionCalibration(NamedTuple):
    """How often targets lie where a predictive distribution says, level by level."""

    expected: Float[Tensor, " K"]
    """The levels."""
    observed: Float[Tensor, " K"]
    """Share of targets within the central interval, or below the quantile, of each level."""
    error: Interval
    """Mean distance of the two over the levels."""


@arguments.arrays
def regression(
    predictions: Float[Tensor, "B *D"],
    targets: Tensor,
    *,
    repeats: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Regression:
    """RMSE, MAE and R² of pooled predictions, with bootstrap intervals over examples.

    Args:
        predictions: ``[B, D]`` or ``[B]``; for an ensemble of point predictions `dissensus.pooling.mean_output`.
        targets: In the same shape; ``[B]`` for predictions ``[B, 1]``.
        repeats: Number of resamples.
        seed: Of the resamples.
        confidence: Confidence of the intervals.

    >>> quality = regression(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]), repeats=100)
    >>> round(quality.rmse.value, 4), round(quality.mae.value, 4), round(quality.r2.value, 4)
    (0.5774, 0.3333, 0.5)
    """
    _check_rows("predictions", predictions)
    values, truth = predictions.double(), as_shaped(targets, predictions.shape)
    _check_finite("predictions", values)
    _check_finite("targets", truth)
    values, truth = (numbers.reshape(len(numbers), -1) for numbers in (values, truth))
    error, centred = truth - values, truth - truth.mean(0)
    statistics = torch.cat([error.square(), error.abs(), centred, centred.square()], -1)
    squared, absolute, mean, square = resampled_means(statistics, repeats, seed).chunk(4, -1)
    variance = square - mean.square()
    r2 = torch.where(variance > 0, 1 - squared / variance, math.nan)
    figures = (squared.sqrt().mean(-1), absolute.mean(-1), r2.mean(-1))
    return Regression(*(percentile(figure, confidence) for figure in figures))


@arguments.arrays
def mean_interval(
    values: Float[Tensor, "B *S"], *, repeats: int = 1000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Mean of a number per example, such as a CRPS or a negative log-likelihood, with its bootstrap interval.

    Rows are drawn. The numbers of one row, such as those of D targets, are averaged first.

    >>> mean_interval(torch.tensor([1.0, 1.0, 1.0]))
    Interval(value=1.0, low=1.0, high=1.0)
    """
    _check_rows("values", values)
    if bool(values.isnan().any()):
        checks.refuse("values", "be numbers", "NaN", "Leave such examples out.")
    return percentile(resampled_means(_row_means(values.double()), repeats, seed)[:, 0], _confidence(confidence))


@arguments.arrays
def prediction_intervals(
    low: Float[Tensor, "B *D"],
    high: Float[Tensor, "B *D"],
    targets: Tensor,
    *,
    level: float,
    repeats: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PredictionIntervals:
    """Coverage, mean width and interval score of prediction intervals.

    Args:
        low: Lower ends, which may be −∞.
        high: Upper ends, which may be ∞.
        targets: In the shape of the ends; ``[B]`` for ends ``[B, 1]``.
        level: Share of targets that the intervals promise, such as 0.9.
        repeats: Number of resamples for width and score.
        seed: Of the resamples.
        confidence: Confidence of the three intervals. That of the coverage counts examples, not the targets of each,
            which need not be independent: it is too wide where they are.

    >>> low, high = torch.zeros(4), torch.ones(4)
    >>> quality = prediction_intervals(low, high, torch.tensor([0.1, 0.5, 1.0, 2.0]), level=0.5, repeats=100)
    >>> quality.coverage.value, quality.width.value, quality.score.value
    (0.75, 1.0, 2.0)
    """
    _check_rows("low", low)
    low, high, truth = checked_ends(low, high, targets)
    for name, numbers in (("low", low), ("high", high), ("targets", truth)):
        if bool(numbers.isnan().any()):
            checks.refuse(name, "be numbers", "NaN", "Leave such examples out.")
    scores = winkler(low, high, truth, level=level)
    covered = float(_row_means(((low <= truth) & (truth <= high)).double()).mean())
    statistics = torch.cat([_row_means(high - low), _row_means(scores)], -1)
    drawn = resampled_means(statistics, repeats, seed)
    width, score = (percentile(drawn[:, i], _confidence(confidence)) for i in range(2))
    return PredictionIntervals(score_interval(covered, len(low), confidence), width, score)


@arguments.arrays
def distribution_calibration(
    pit: Float[Tensor, "B *D"],
    *,
    kind: Literal["interval", "quantile"] = "interval",
    levels: Sequence[float] | Tensor = LEVELS,
    repeats: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> DistributionCalibration:
    """Expected and observed coverage of a predictive distribution over levels, from its PIT values.

    Args:
        pit: F(y) of every target, from `dissensus.metrics.pit`. Uniform on [0, 1] for calibrated distributions.
        kind: ``"interval"``: the central interval of level p holds y where |2 F(y) − 1| ≤ p. ``"quantile"``: y is below
            the quantile of level p where F(y) ≤ p (Kuleshov et al., 2018), which also shows a shift of the mean.
        levels: The levels p.
        repeats: Number of resamples for the interval of the error.
        seed: Of the resamples.
        confidence: Confidence of the interval. Noise biases the error upwards, which the interval allows for.

    >>> result = distribution_calibration(torch.tensor([0.1, 0.5, 0.5, 0.9]), levels=(0.2, 0.9), repeats=100)
    >>> result.observed.tolist(), round(result.error.value, 4)
    ([0.5, 1.0], 0.2)
    """
    checks.one_of("kind", kind, ("interval", "quantile"))
    _check_rows("pit", pit)
    places = pit.double()
    if not bool(((places >= 0) & (places <= 1)).all()):
        checks.refuse("pit", "be numbers from 0 to 1", "others, or NaN", "Leave such examples out.")
    expected = checked_levels(levels)
    reach = (2 * places - 1).abs() if kind == "interval" else places
    within = (reach.unsqueeze(-1) <= expected.to(reach.device) + 1e-12).double()  # level 0.3 holds |2 · 0.35 − 1|
    drawn = resampled_means(within.reshape(len(within), -1, len(expected)).mean(1), repeats, seed)
    error = absolute_sum((drawn - expected) / len(expected), _confidence(confidence))
    return DistributionCalibration(expected, drawn[0], error)


def resampled_means(values: Float[Tensor, "B K"], repeats: int, seed: int) -> Float[Tensor, "S K"]:
    """Means over examples, of the data in the first row and of resamples of the examples in the others."""
    checks.count("repeats", repeats, 0)
    values = values.cpu()
    means = [values.mean(0, keepdim=True)]
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _NUMBERS_AT_ONCE // values.numel())
    for start in range(0, repeats, step):
        chosen = torch.randint(len(values), (min(step, repeats - start), len(values)), generator=generator)
        means.append(values[chosen].mean(1))  # not by weights: 0 · ∞ is NaN
    return torch.cat(means)


def _row_means(values: Float[Tensor, "B *S"]) -> Float[Tensor, "B 1"]:
    return values.reshape(len(values), -1).mean(-1, keepdim=True)


def _confidence(confidence: float) -> float:
    return checks.number("confidence", confidence, 0, 1)


def _check_rows(name: str, values: Tensor) -> None:
    if values.ndim < 1 or not values.numel() or not values.is_floating_point():
        got = f"{checks.shape_text(values.shape)} {values.dtype}"
        checks.refuse(name, "be floating point numbers [B] or [B, D] of at least one example", got)


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        checks.refuse(name, "be finite", "NaN or infinity", "Leave such examples out.")

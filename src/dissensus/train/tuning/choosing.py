"""The choice between candidates, ties, and the interval of what the choice gains."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dissensus.auditing.distributions import student_quantile
from dissensus.metrics.intervals import Interval


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """A mean and its standard error; NaN as the error of a single value.

    >>> mean_and_error([1.0, 3.0]), mean_and_error([2.0])
    ((2.0, 1.0), (2.0, nan))
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def is_tie(differences: Sequence[float]) -> bool:
    """Whether a candidate's advantages over independent training, one per split, are within one standard error.

    A single advantage has no standard error: it is a tie if it is not positive.

    >>> is_tie([0.1, 0.3]), is_tie([0.1, -0.09]), is_tie([0.1]), is_tie([0.0])
    (False, True, False, True)
    """
    mean, error = mean_and_error(differences)
    return not mean > (0.0 if math.isnan(error) else error)


def resampled_interval(differences: Sequence[float], train: int, test: int, confidence: float = 0.95) -> Interval:
    """Nadeau and Bengio's corrected interval of a mean over repeated random splits.

    Splits share rows, so their differences are correlated, and the usual interval is too narrow. With J splits, n₁
    training and n₂ test rows the variance of the mean is (1/J + n₂/n₁) s² (Nadeau and Bengio 2003, section 3), with
    J − 1 degrees of freedom. One split gives NaN as ends.

    >>> resampled_interval([1.0, 2.0, 3.0], train=90, test=10)
    Interval(value=2.0, low=-0.868..., high=4.868...)
    """
    splits = len(differences)
    mean, error = mean_and_error(differences)
    if splits < 2:
        return Interval(mean, math.nan, math.nan)
    variance = splits * error**2
    half = student_quantile((1 - confidence) / 2, splits - 1) * math.sqrt((1 / splits + test / train) * variance)
    return Interval(mean, mean - half, mean + half)


class Gain(NamedTuple):
    """What choosing gains over independent training on test rows; above zero is better."""

    value: float
    low: float
    high: float
    unit: str
    """``"%"`` of the loss of independent training, ``"points"`` of a share, or empty for the metric itself."""


def gain_of(
    chosen: Sequence[float],
    independent: Sequence[float],
    *,
    sign: float,
    share: bool,
    train: int,
    test: int,
) -> Gain:
    """The gain over all splits, from the metric of the chosen candidate and of independent training in each.

    Args:
        chosen: The metric on test rows, one number per split.
        independent: The same for independent training.
        sign: 1 if lower is better, −1 if higher is.
        share: Whether the metric is a share.
        train: Rows for training and validation.
        test: Rows of the test.
    """
    base = sum(independent) / len(independent)
    differences = [sign * (own - other) for own, other in zip(independent, chosen, strict=True)]
    if share:
        unit, scale = "points", 100.0
    elif min(independent) > 0 and base > 0:
        unit, scale = "%", 100.0 / base
    else:
        unit, scale = "", 1.0
    interval = resampled_interval([scale * difference for difference in differences], train, test)
    return Gain(*interval, unit)

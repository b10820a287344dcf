"""Curves of a report, as plain data: calibration in bins, risk over coverage, error over uncertainty."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dissensus import checks, metrics
from dissensus.metrics.detection import placements
from dissensus.metrics.generalisation import score_interval
from dissensus.metrics.intervals import Interval, percentile
from dissensus.metrics.regression import resampled_means

REPEATS = 400
"""Resamples of a band."""
POINTS = 100
"""Coverages at which a curve is given."""
BINS = 10
"""Groups of about equal size, by uncertainty."""
_NUMBERS_AT_ONCE = 2**22


class Bin(NamedTuple):
    """Examples with about the same confidence or uncertainty."""

    centre: float
    """Mean confidence, or mean uncertainty."""
    value: Interval
    """Accuracy, or error."""
    examples: int


class RiskCurve(NamedTuple):
    """Risk among the examples that are kept, where those with the highest scores are refused."""

    risk: list[Interval]
    area: float
    """Mean risk over all coverages (AURC)."""


def calibration_bins(log_probs: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> list[Bin]:
    """Accuracy in bins of confidence that are not empty, with Wilson's intervals."""
    result = metrics.calibration(log_probs, labels)
    rows = zip(result.confidence.tolist(), result.accuracy.tolist(), result.examples.tolist(), strict=True)
    return [
        Bin(confidence, metrics.wilson(round(accuracy * count), count), count)
        for confidence, accuracy, count in rows
        if count
    ]


def coverages(examples: int) -> list[float]:
    """Coverages at which risks are given: all where there are few examples."""
    count = min(POINTS, examples)
    return [(i + 1) / count for i in range(count)]


def error_curve(scores: Float[Tensor, " N"], wrong: Bool[Tensor, " N"]) -> RiskCurve:
    """Share of wrong answers among those kept (`dissensus.metrics.risk_coverage`), with Wilson's intervals.

    An interval is that of the examples that are kept. It has a width even where all of them are right.
    """
    curve = metrics.risk_coverage(scores, wrong)
    risks = [
        score_interval(curve.risk_at(share), math.ceil(share * len(scores) - 1e-9), 0.95)
        for share in coverages(len(scores))
    ]
    return RiskCurve(risks, curve.area)


def root_error_curve(
    scores: Float[Tensor, " N"], squared: Float[Tensor, " N"], *, repeats: int = REPEATS, seed: int = 0
) -> RiskCurve:
    """Root mean squared error of the examples that are kept, with percentiles of resamples of the examples."""
    curve = metrics.risk_coverage(scores, squared)
    kept = coverages(len(scores))
    values = torch.tensor([[curve.risk_at(share) for share in kept]], dtype=torch.float64)
    drawn = torch.cat([values, _resampled_risks(scores, squared, kept, repeats, seed)]).sqrt()
    return RiskCurve([percentile(drawn[:, i]) for i in range(len(kept))], curve.area)


def risk_at(curve: RiskCurve, share: float) -> Interval:
    """The risk of a curve at a coverage, or at the next one that it has."""
    place = next(i for i in range(len(curve.risk)) if (i + 1) / len(curve.risk) >= share - 1e-9)
    return curve.risk[place]


def _resampled_risks(
    scores: Float[Tensor, " N"], loss: Tensor, kept: list[float], repeats: int, seed: int
) -> Float[Tensor, "S K"]:
    """Risks of resamples. Scores are sorted once: a resample is a count per example."""
    ordered, order = scores.double().sort()
    _, tie, size = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    losses = loss[order].double()
    losses = (torch.zeros(len(size), dtype=torch.float64).index_add_(0, tie, losses) / size)[tie]
    examples, generator = len(scores), torch.Generator().manual_seed(seed)
    wanted = torch.tensor([math.ceil(share * examples - 1e-9) for share in kept], dtype=torch.float64)
    parts = []
    step = max(1, _NUMBERS_AT_ONCE // examples)
    for start in range(0, repeats, step):
        count = min(step, repeats - start)
        chosen = torch.randint(examples, (count, examples), generator=generator)
        weights = torch.zeros(count, examples, dtype=torch.float64)
        weights.scatter_add_(1, chosen, torch.ones(chosen.shape, dtype=torch.float64))
        size_kept, sums = weights.cumsum(1), (weights * losses).cumsum(1)
        last = torch.searchsorted(size_kept, wanted.expand(count, -1).contiguous()).clamp_max(examples - 1)
        parts.append(sums.gather(1, last) / size_kept.gather(1, last))
    return torch.cat(parts) if parts else torch.zeros(0, len(kept), dtype=torch.float64)


def best_risks(loss: Tensor) -> list[float]:
    """Risks of the best possible score, which refuses examples from the largest loss down."""
    best = loss.double().sort().values.cumsum(0) / torch.arange(1, len(loss) + 1)
    return [float(best[max(1, math.ceil(share * len(loss) - 1e-9)) - 1]) for share in coverages(len(loss))]


def uncertainty_groups(scores: Float[Tensor, " N"], groups: int = BINS) -> list[Int[Tensor, " n"]]:
    """Rows of groups of about equal size by rising score; equal scores stay together.

    >>> [rows.tolist() for rows in uncertainty_groups(torch.tensor([0.3, 0.1, 0.1, 0.9]), 2)]
    [[1, 2], [0, 3]]
    """
    checks.count("groups", groups)
    levels = torch.arange(1, groups, dtype=torch.float64) / groups
    edges = scores.double().quantile(levels, interpolation="higher") if len(scores) < 2**24 else _edges(scores, levels)
    place = torch.bucketize(scores.double(), edges.unique(), right=True)
    return [rows for i in range(groups) if len(rows := (place == i).nonzero().flatten())]


def _edges(scores: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of more numbers than `torch.quantile` takes."""
    ordered = scores.double().sort().values
    return ordered[(levels * (len(ordered) - 1)).ceil().long()]


def error_rates(scores: Float[Tensor, " N"], wrong: Bool[Tensor, " N"]) -> list[Bin]:
    """Share of wrong predictions by uncertainty, with Wilson's intervals."""
    return [
        Bin(float(scores[rows].double().mean()), metrics.wilson(int(wrong[rows].sum()), len(rows)), len(rows))
        for rows in uncertainty_groups(scores)
    ]


def root_errors(scores: Float[Tensor, " N"], squared: Float[Tensor, " N"]) -> list[Bin]:
    """Root mean squared error by uncertainty, with bootstrap intervals."""
    bins = []
    for rows in uncertainty_groups(scores):
        drawn = resampled_means(squared[rows].double().unsqueeze(1), REPEATS, 0)[:, 0].sqrt()
        bins.append(Bin(float(scores[rows].double().mean()), percentile(drawn), len(rows)))
    return bins


def rank_correlation(first: Float[Tensor, " N"], second: Float[Tensor, " N"]) -> Interval:
    """Spearman's rank correlation with a bootstrap interval; NaN where one side is constant.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 5.0, 9.0])).value
    1.0
    """
    ranks = [placements(part, part) for part in (first, second)]
    a, b = ((part - part.mean()) for part in ranks)
    moments = torch.stack([a, b, a * b, a.square(), b.square()], 1)
    mean = resampled_means(moments, REPEATS, 0)
    spread = ((mean[:, 3] - mean[:, 0] ** 2) * (mean[:, 4] - mean[:, 1] ** 2)).clamp_min(0).sqrt()
    values = torch.where(spread > 1e-12, (mean[:, 2] - mean[:, 0] * mean[:, 1]) / spread, math.nan)
    return percentile(values.clamp(-1, 1))


def as_rows(bins: list[Bin]) -> list[dict[str, Any]]:
    """Bins as plain data."""
    return [
        {
            "centre": item.centre,
            "value": item.value.value,
            "low": item.value.low,
            "high": item.value.high,
            "examples": item.examples,
        }
        for item in bins
    ]


def as_columns(curves: Mapping[str, RiskCurve]) -> dict[str, Any]:
    """Risk curves as plain data."""
    return {
        name: {
            "risk": [point.value for point in curve.risk],
            "low": [point.low for point in curve.risk],
            "high": [point.high for point in curve.risk],
            "area": curve.area,
        }
        for name, curve in curves.items()
    }

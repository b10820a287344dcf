"""Detection of examples from outside by a score; higher scores are farther out."""

import logging
import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks
from dissensus.metrics.intervals import Interval, percentile

log = logging.getLogger("dissensus")

_NUMBERS_AT_ONCE = 2**24
"""Examples times resamples that are computed at once."""


class Detection(NamedTuple):
    """Quality of a score for detection, with bootstrap intervals."""

    auroc: Interval
    """Probability that an example from outside scores higher than one from within; ties count half."""
    aupr_out: Interval
    """Average precision of finding examples from outside."""
    aupr_in: Interval
    """Average precision of finding examples from within."""
    fpr_at_95: Interval
    """Share of examples from outside that pass where 95 % of those from within do."""


class Difference(NamedTuple):
    """Difference of two scores on the same examples, by DeLong's test."""

    difference: Interval
    """AUROC of the first less that of the second."""
    p_value: float


@arguments.arrays
def auroc(inside: Float[Tensor, " N"], outside: Float[Tensor, " U"], *, confidence: float = 0.95) -> Interval:
    """Area under the ROC curve with DeLong's interval.

    One example on either side is too few for any interval: it is the whole range then, and a warning is logged. Where
    all pairs come out the same way, DeLong's interval has no width. Then K = min(N, U) pairs without a common example
    agreed, so that with confidence 1 − α the share of all pairs that do is at least (α/2)^(1/K). DeLong's interval is
    for large samples: of 400 simulated 95 % intervals, 0.93 held the true area with 80 against 60 examples, 0.90 with
    ten against ten, 0.84 with five against five, and 0.68 with three against thirty.

    >>> area = auroc(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 3.0, 4.0]))
    >>> round(area.value, 3), round(area.low, 3), area.high
    (0.889, 0.581, 1.0)
    """
    _check(inside, outside)
    checks.number("confidence", confidence, 0, 1)
    above, below = placements(outside, inside), 1 - placements(inside, outside)
    area = float(above.mean())
    if _too_few(inside, outside):
        return Interval(area, 0.0, 1.0)
    spread = math.sqrt(_variance(above, above) + _variance(below, below))
    if spread == 0:
        return _unanimous(area, min(len(inside), len(outside)), confidence)
    width = _normal(confidence) * spread
    return Interval(area, max(0.0, area - width), min(1.0, area + width))


@arguments.arrays
def compared(
    first: tuple[Float[Tensor, " N"], Float[Tensor, " U"]],
    second: tuple[Float[Tensor, " N"], Float[Tensor, " U"]],
    *,
    confidence: float = 0.95,
) -> Difference:
    """DeLong's test of the difference of two scores' AUROC on the same examples.

    Args:
        first: A score of the examples within, and of those from outside.
        second: Another score of the same examples, in the same order.
        confidence: Confidence of the interval.

    One example on either side is too few: the difference may be anything, and p is 1. Where all pairs of examples
    differ in the same way, p is that of the sign test of min(N, U) pairs without a common example.
    """
    for inside, outside in (first, second):
        _check(inside, outside)
    checks.number("confidence", confidence, 0, 1)
    if len(first[0]) != len(second[0]) or len(first[1]) != len(second[1]):
        got = f"{len(first[0])} and {len(second[0])} within, {len(first[1])} and {len(second[1])} outside"
        checks.refuse("second", "score the same examples as the first", got)
    above = placements(first[1], first[0]) - placements(second[1], second[0])
    below = placements(second[0], second[1]) - placements(first[0], first[1])
    difference = float(above.mean())
    if all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        return Difference(Interval(0.0, 0.0, 0.0), 1.0)  # the same score twice
    if _too_few(*first):
        return Difference(Interval(difference, -1.0, 1.0), 1.0)
    spread = math.sqrt(_variance(above, above) + _variance(below, below))
    if spread == 0:
        pairs = min(len(first[0]), len(first[1]))
        share = _share(pairs, confidence)
        ends = (max(-1.0, share * difference - (1 - share)), min(1.0, share * difference + 1 - share))
        p_value = 1.0 if difference == 0 else min(1.0, 2.0 ** (1 - pairs))
        return Difference(Interval(difference, *ends), p_value)
    width = _normal(confidence) * spread
    p_value = 1.0 if difference == 0 else math.erfc(abs(difference) / spread / math.sqrt(2))
    low, high = max(-1.0, difference - width), min(1.0, difference + width)
    return Difference(Interval(difference, low, high), p_value)


@arguments.arrays
def ood(
    inside: Float[Tensor, " N"],
    outside: Float[Tensor, " U"],
    *,
    repeats: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Detection:
    """AUROC, average precision both ways, and false positives at 95 %, with bootstrap intervals over examples.

    Examples are drawn with replacement within each of the two sets. Scores are sorted once: a resample is a count per
    example, and all resamples are added up together.

    One example on either side is too few: intervals are the whole range, and a warning is logged. Where all resamples
    are alike, as with scores that separate the two sets, the interval is that of `auroc`. Fewer than 59 examples within
    (for 95 %) do not tell where their 95 % point ends, since 0.95⁵⁸ > 0.05: then false positives may be up to 1. Of 400
    simulated 95 % intervals, 0.91 to 0.96 held the true value for 80 examples or more on both sides, and 0.8 to 0.9
    those of average precision for 10 to 20 examples on one of them, and fewer for less. Without resamples
    (``repeats=0``) intervals are the whole range.

    >>> quality = ood(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([2.5, 3.5, 4.0, 5.0]), repeats=200)
    >>> round(quality.auroc.value, 4), round(quality.fpr_at_95.value, 4)
    (0.9375, 0.25)
    """
    _check(inside, outside)
    checks.count("repeats", repeats, 0)
    checks.number("confidence", confidence, 0, 1)
    values = _resampled(inside, outside, repeats, seed)
    if not repeats or _too_few(inside, outside):
        return Detection(*(Interval(float(value), 0.0, 1.0) for value in values[0]))
    intervals = [_interval(figure, min(len(inside), len(outside)), confidence) for figure in values.T]
    if 0.95 ** len(inside) > 1 - confidence:
        intervals[-1] = intervals[-1]._replace(high=1.0)
    return Detection(*intervals)


def _resampled(inside: Tensor, outside: Tensor, repeats: int, seed: int) -> Float[Tensor, "S 4"]:
    """The four figures of the data, and of every resample."""
    scores = torch.cat([inside, outside]).double().cpu()
    order = scores.argsort(descending=True)
    is_out = torch.arange(len(scores))[order] >= len(inside)
    last = torch.cat([scores[order].diff() != 0, torch.tensor([True])])  # where a run of equal scores ends
    drawn = [_figures(torch.ones(1, len(scores), dtype=torch.float64), is_out, last)]
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _NUMBERS_AT_ONCE // len(scores))
    for start in range(0, repeats, step):
        count = min(step, repeats - start)
        weights = torch.zeros(count, len(scores), dtype=torch.float64)
        for rows in (torch.arange(len(inside)), torch.arange(len(inside), len(scores))):
            chosen = torch.randint(len(rows), (count, len(rows)), generator=generator)
            weights.scatter_add_(1, chosen + rows[0], torch.ones(chosen.shape, dtype=torch.float64))
        drawn.append(_figures(weights[:, order], is_out, last))
    return torch.cat(drawn)


def _interval(values: Float[Tensor, " S"], pairs: int, confidence: float) -> Interval:
    """Percentiles; without spread, the interval of that many pairs that agree."""
    alike = len(values) > 1 and bool((values - values[0]).abs().max() < 1e-12)
    return _unanimous(float(values[0]), pairs, confidence) if alike else percentile(values, confidence)


def _unanimous(value: float, pairs: int, confidence: float) -> Interval:
    """Interval of a mean of numbers in [0, 1] when all observed are equal: a share of 1 − `_share` may be anything."""
    share = _share(pairs, confidence)
    return Interval(value, value * share, 1 - (1 - value) * share)


def _share(pairs: int, confidence: float) -> float:
    """Smallest share that is equal, if that many independent pairs were."""
    return ((1 - confidence) / 2) ** (1 / pairs)


def _too_few(inside: Tensor, outside: Tensor) -> bool:
    few = min(len(inside), len(outside)) < 2
    if few:
        log.warning("%d against %d examples are too few for an interval", len(inside), len(outside))
    return few


@arguments.arrays
def threshold(inside: Float[Tensor, " N"], false_alarms: float = 0.05) -> float:
    """The score that at most a share of the examples within exceeds: examples above it count as out of distribution.

    >>> threshold(torch.arange(100.0), 0.05)
    94.0
    """
    checks.number("false_alarms", false_alarms, 0, 1)
    _check_scores("inside", inside)
    allowed = math.floor(false_alarms * len(inside) + 1e-9)
    return float(inside.sort(descending=True).values[allowed]) if allowed < len(inside) else -math.inf


def placements(of: Float[Tensor, " K"], among: Float[Tensor, " L"]) -> Float[Tensor, " K"]:
    """For every value, the share of other values below it; equal values count half."""
    ordered = among.double().sort().values
    values = of.double().contiguous()
    left = torch.searchsorted(ordered, values, right=False)
    right = torch.searchsorted(ordered, values, right=True)
    return (left + right).double() / (2 * len(ordered))


def _figures(weights: Float[Tensor, "R N"], is_out: Tensor, last: Tensor) -> Float[Tensor, "R 4"]:
    """The four figures of every resample, for scores sorted from high to low."""
    out, into = weights * is_out, weights * ~is_out
    hits, alarms = (part.cumsum(1)[:, last] for part in (out, into))  # up to and with each distinct score
    all_out, all_in = hits[:, -1:], alarms[:, -1:]
    step_out, step_in = _steps(hits), _steps(alarms)
    area = (step_in * (hits - step_out / 2)).sum(1, keepdim=True) / (all_out * all_in)
    precision = (step_out * hits / (hits + alarms).clamp_min(1e-12)).sum(1, keepdim=True) / all_out
    kept_out, kept_in = all_out - hits + step_out, all_in - alarms + step_in  # from each distinct score down
    inner = (step_in * kept_in / (kept_out + kept_in).clamp_min(1e-12)).sum(1, keepdim=True) / all_in
    # The lowest threshold at which 95 % of those within lie at or below it; the share of those outside that do.
    passing = (kept_in >= 0.95 * all_in - 1e-9).long().sum(1, keepdim=True) - 1
    passed = kept_out.gather(1, passing.clamp_min(0)) / all_out
    return torch.cat([area, precision, inner, passed], 1)


def _steps(sums: Float[Tensor, "R K"]) -> Float[Tensor, "R K"]:
    return torch.cat([sums[:, :1], sums.diff(dim=1)], 1)


def _variance(a: Tensor, b: Tensor) -> float:
    """Variance of a mean of placements."""
    return float(((a - a.mean()) * (b - b.mean())).sum()) / (len(a) - 1) / len(a)


def _normal(confidence: float) -> float:
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(confidence, dtype=torch.float64)))


def _check(inside: Tensor, outside: Tensor) -> None:
    _check_scores("inside", inside)
    _check_scores("outside", outside)


def _check_scores(name: str, scores: Tensor) -> None:
    if scores.ndim != 1 or not len(scores):
        dense = "Scores of positions? These are not independent. Use one score per example, such as flatten(1).mean(1)."
        fix = dense if scores.ndim > 1 else ""
        checks.refuse(name, "be scores, [N], of at least one example", list(scores.shape), fix)
    if not bool(scores.isfinite().all()):
        checks.refuse(name, "be finite", "NaN or infinity", "Leave such examples out.")

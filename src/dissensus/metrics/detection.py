"""How well a score tells examples from outside from those within; higher scores are farther out."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks

_NUMBERS_AT_ONCE = 2**24
"""Examples times resamples that are held at once."""


class Interval(NamedTuple):
    """A number, and where it lies with 95 % confidence (or what was asked for)."""

    value: float
    low: float
    high: float


class Detection(NamedTuple):
    """What a score is worth, with bootstrap intervals."""

    auroc: Interval
    """Probability that an example from outside scores higher than one from within; ties count half."""
    aupr_out: Interval
    """Average precision of finding examples from outside."""
    aupr_in: Interval
    """Average precision of finding examples from within."""
    fpr_at_95: Interval
    """Share of examples from outside that pass where 95 % of those from within do."""


class Difference(NamedTuple):
    """Two scores on the same examples, by DeLong's test."""

    difference: Interval
    """AUROC of the first less that of the second."""
    p_value: float


def auroc(inside: Float[Tensor, " N"], outside: Float[Tensor, " U"], *, confidence: float = 0.95) -> Interval:
    """Area under the ROC curve with DeLong's interval.

    >>> found = auroc(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 3.0, 4.0]))
    >>> round(found.value, 3), round(found.low, 3), found.high
    (0.889, 0.581, 1.0)
    """
    _check(inside, outside)
    above, below = placements(outside, inside), 1 - placements(inside, outside)
    area = float(above.mean())
    width = _normal(confidence) * math.sqrt(_variance(above, above) + _variance(below, below))
    return Interval(area, max(0.0, area - width), min(1.0, area + width))


def compared(
    first: tuple[Float[Tensor, " N"], Float[Tensor, " U"]], second: tuple[Float[Tensor, " N"], Float[Tensor, " U"]],
    *, confidence: float = 0.95,
) -> Difference:  # fmt: skip
    """Is one score better than another on the same examples? DeLong's test of the difference of their AUROC.

    Args:
        first: A score of the examples within, and of those from outside.
        second: Another score of the same examples, in the same order.
        confidence: Of the interval.
    """
    for inside, outside in (first, second):
        _check(inside, outside)
    if len(first[0]) != len(second[0]) or len(first[1]) != len(second[1]):
        got = f"{len(first[0])} and {len(second[0])} within, {len(first[1])} and {len(second[1])} outside"
        checks.refuse("second", "score the same examples as the first", got)
    above = placements(first[1], first[0]) - placements(second[1], second[0])
    below = placements(second[0], second[1]) - placements(first[0], first[1])
    found = float(above.mean())
    spread = math.sqrt(_variance(above, above) + _variance(below, below))
    width = _normal(confidence) * spread
    chance = 1.0 if found == 0 else 0.0 if spread == 0 else math.erfc(abs(found) / spread / math.sqrt(2))
    return Difference(Interval(found, found - width, found + width), chance)


def ood(
    inside: Float[Tensor, " N"], outside: Float[Tensor, " U"], *, repeats: int = 1000, seed: int = 0,
    confidence: float = 0.95,
) -> Detection:  # fmt: skip
    """AUROC, average precision both ways, and false positives at 95 %, with bootstrap intervals over examples.

    Examples are drawn with replacement within each of the two sets. Scores are sorted once: a resample is a count per
    example, and all resamples are added up together.

    >>> found = ood(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([2.5, 3.5, 4.0, 5.0]), repeats=200)
    >>> round(found.auroc.value, 4), round(found.fpr_at_95.value, 4)
    (0.9375, 0.25)
    """
    _check(inside, outside)
    checks.count("repeats", repeats, 0)
    scores = torch.cat([inside, outside]).double().cpu()
    order = scores.argsort(descending=True)
    is_out = torch.arange(len(scores))[order] >= len(inside)
    last = torch.cat([scores[order].diff() != 0, torch.tensor([True])])  # where a run of equal scores ends
    whole = _figures(torch.ones(1, len(scores), dtype=torch.float64), is_out, last)
    drawn: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _NUMBERS_AT_ONCE // len(scores))
    for start in range(0, repeats, step):
        count = min(step, repeats - start)
        weights = torch.zeros(count, len(scores), dtype=torch.float64)
        for rows in (torch.arange(len(inside)), torch.arange(len(inside), len(scores))):
            chosen = torch.randint(len(rows), (count, len(rows)), generator=generator)
            weights.scatter_add_(1, chosen + rows[0], torch.ones(chosen.shape, dtype=torch.float64))
        drawn.append(_figures(weights[:, order], is_out, last))
    if not drawn:
        return Detection(*(Interval(v, v, v) for v in whole[0].tolist()))
    ends = torch.cat(drawn).quantile(torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64), 0)
    return Detection(*(Interval(v, *e) for v, e in zip(whole[0].tolist(), ends.T.tolist(), strict=True)))


def threshold(inside: Float[Tensor, " N"], false_alarms: float = 0.05) -> float:
    """The score above which at most a share of the examples within lies: what to call out of distribution.

    >>> threshold(torch.arange(100.0), 0.05)
    94.0
    """
    checks.number("false_alarms", false_alarms, 0, 1)
    _check_scores("inside", inside)
    allowed = math.floor(false_alarms * len(inside) + 1e-9)
    return float(inside.sort(descending=True).values[allowed]) if allowed < len(inside) else -math.inf


def placements(of: Float[Tensor, " K"], among: Float[Tensor, " L"]) -> Float[Tensor, " K"]:
    """For every value, the share of others that lie below it; equal ones count half."""
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
    """Of a mean of placements."""
    return float(((a - a.mean()) * (b - b.mean())).sum()) / (len(a) - 1) / len(a) if len(a) > 1 else 0.0


def _normal(confidence: float) -> float:
    checks.number("confidence", confidence, 0, 1)
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(confidence, dtype=torch.float64)))


def _check(inside: Tensor, outside: Tensor) -> None:
    _check_scores("inside", inside)
    _check_scores("outside", outside)


def _check_scores(name: str, scores: Tensor) -> None:
    if scores.ndim != 1 or not len(scores):
        checks.refuse(name, "be scores, [N], of at least one example", list(scores.shape))
    if not bool(scores.isfinite().all()):
        checks.refuse(name, "be finite", "NaN or infinity", "Leave such examples out.")

"""Does what we measured agree with what a paper says? Computed from numbers, never written by hand."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dissensus.studies.spec import Expectation, Spec, SpecError

AGREES, DIRECTION, DISAGREES, NOT_RUN = "agrees", "agrees in direction", "disagrees", "not run"
WORST_FIRST = (DISAGREES, DIRECTION, AGREES, NOT_RUN)

RESAMPLES = 4999
"""Of a bootstrap."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One expectation, judged on one data set."""

    says: str
    data: str
    verdict: str
    paper: str
    ours: float | None
    low: float | None
    """The interval of ours, or of the difference where two points are ``compared``."""
    high: float | None
    difference: float | None
    """Ours less the paper's number, or less the value at the point of comparison."""
    seeds: int
    compared: bool = False
    """Whether two points were compared: the interval is then of their paired difference."""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def judged(spec: Spec, rows: Sequence[Row]) -> list[Verdict]:
    """Every expectation of a study on every data set that it speaks of; not run where there are none of them."""
    found: list[Verdict] = []
    for told in spec.expect:
        spoken_of = [data for data in told.data or spec.data if data in spec.data]
        exact = spec.procedure == "formula"
        found += [_judged(told, data, [row for row in rows if row["data"] == data], exact) for data in spoken_of]
        if not spoken_of:
            found.append(_judged(told, ", ".join(told.data), [], exact=False))
    return found


def overall(verdicts: Sequence[str]) -> str:
    """The worst of several verdicts; not run where nothing was."""
    seen = [verdict for verdict in WORST_FIRST if verdict in verdicts and verdict != NOT_RUN]
    return seen[0] if seen else NOT_RUN


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error over seeds; the error of one seed is zero.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval of a mean over seeds, by percentiles; for one seed, the value itself.

    >>> interval([1.0, 1.0]), interval([0.0, 1.0])
    ((1.0, 1.0), (0.0, 1.0))
    """
    if len(values) < 2 or max(values) == min(values):
        return values[0], values[0]
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(-1), [0.025, 0.975])
    return float(low), float(high)


def _at(rows: Sequence[Row], point: dict[str, Any], measure: str) -> dict[Any, float]:
    """The measure at a point, by seed."""
    here = [row for row in rows if all(_same(row.get(axis), value) for axis, value in point.items())]
    if len({row["seed"] for row in here}) < len(here):
        raise SpecError(f"an expectation about {measure!r} at {point} does not say which of several runs it means.")
    return {
        row["seed"]: row["measures"][measure] for row in here if math.isfinite(row["measures"].get(measure, math.nan))
    }


def _same(a: Any, b: Any) -> bool:
    return math.isclose(a, b) if isinstance(a, int | float) and isinstance(b, int | float) else a == b


def _judged(told: Expectation, data: str, rows: Sequence[Row], exact: bool) -> Verdict:
    if told.along:
        return _inside(told, data, rows)
    here, there = _at(rows, told.at, told.measure), _at(rows, told.than, told.measure) if told.than else {}
    paper = _in_words(told)
    if not here or (told.than and not set(here) & set(there)):
        return Verdict(told.says, data, NOT_RUN, paper, None, None, None, None, 0)
    if told.than:
        seeds = sorted(set(here) & set(there))
        a, b = [here[s] for s in seeds], [there[s] for s in seeds]
        return _compared(told, data, paper, a, b, exact)
    values = list(here.values())
    mean, (low, high) = sum(values) / len(values), interval(values)
    if told.paper is not None:
        off = mean - told.paper
        verdict = AGREES if abs(off) <= told.tolerance else DISAGREES
        return Verdict(told.says, data, verdict, paper, mean, low, high, off, len(values))
    floor, ceiling = -math.inf if told.low is None else told.low, math.inf if told.high is None else told.high
    inside = floor <= mean <= ceiling
    verdict = AGREES if inside else DIRECTION if low <= ceiling and high >= floor else DISAGREES
    return Verdict(told.says, data, verdict, paper, mean, low, high, None, len(values))


def _compared(told: Expectation, data: str, paper: str, a: list[float], b: list[float], exact: bool) -> Verdict:
    """Two points, paired by seed; ``exact`` ones carry no chance, and one is enough."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, base = sum(a) / len(a), sum(b) / len(b)
    off, (low, high) = sum(differences) / len(differences), interval(differences)
    if told.direction == "similar":
        limit = told.tolerance * abs(base)
        verdict = AGREES if abs(off) <= limit else DIRECTION if low <= limit and high >= -limit else DISAGREES
        return Verdict(told.says, data, verdict, paper, mean, low, high, off, len(a), compared=True)
    sign = 1 if told.direction == "greater" else -1
    right = sign * off > 0
    sure = (exact or len(a) > 1) and (low > 0 if sign > 0 else high < 0)
    above, below = (mean, base) if sign > 0 else (base, mean)
    enough = told.factor <= 1 or (above / below if below else math.inf) >= told.factor
    near = told.paper is None or abs(mean - told.paper) <= told.tolerance
    verdict = AGREES if right and sure and enough and near else DIRECTION if right else DISAGREES
    return Verdict(told.says, data, verdict, paper, mean, low, high, off, len(a), compared=True)


def _inside(told: Expectation, data: str, rows: Sequence[Row]) -> Verdict:
    """Whether a measure has its extreme strictly between the ends of an axis.

    Every seed is judged at the point that is best for the other seeds, against the better of its own two ends: choosing
    among several points gains nothing where all are alike. One seed cannot be judged so, and tells a direction at most.
    """
    values = sorted({row[told.along] for row in rows if told.along in row})
    points = [_at(rows, {**told.at, told.along: value}, told.measure) for value in values]
    seeds = sorted(set.intersection(*(set(point) for point in points))) if points else []
    if len(values) < 3 or not seeds:
        return Verdict(told.says, data, NOT_RUN, _in_words(told), None, None, None, None, 0)
    sign = 1 if told.direction == "lowest inside" else -1
    table = sign * np.array([[point[seed] for point in points] for seed in seeds])

    best = 1 + int(table.mean(0)[1:-1].argmin())
    better_end = table[:, [0, -1]].min(1)
    if len(seeds) > 1:
        others = (table.sum(0) - table) / (len(seeds) - 1)
        chosen = 1 + others[:, 1:-1].argmin(1)
        differences = (table[np.arange(len(seeds)), chosen] - better_end).tolist()
    else:
        differences = [float(table[0, best] - better_end[0])]
    off, (low, high) = sum(differences) / len(differences), interval(differences)
    verdict = AGREES if len(seeds) > 1 and high < 0 else DIRECTION if off < 0 else DISAGREES
    ends = sorted((sign * low, sign * high))
    says = f"{told.says} (ours: best inside at {told.along} = {values[best]:g})"
    ours = float(sign * table.mean(0)[best])
    return Verdict(says, data, verdict, _in_words(told), ours, ends[0], ends[1], sign * off, len(seeds), compared=True)


def _in_words(told: Expectation) -> str:
    """What the paper has, in few words."""
    if told.paper is not None:
        return f"{told.paper:g} ± {told.tolerance:g}"
    if told.low is not None or told.high is not None:
        low, high = told.low, told.high
        return f"at least {low:g}" if high is None else f"at most {high:g}" if low is None else f"{low:g} to {high:g}"
    factor = f", {told.factor:g} times or more" if told.factor > 1 else ""
    within = f" within {told.tolerance:.0%}" if told.direction == "similar" else ""
    return f"{told.direction}{within}{factor}" or "told in words"

"""Whether our numbers agree with what a paper says. Verdicts are computed, never written by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dissensus.studies.results import Row, Verdict
from dissensus.studies.spec import Expectation, Spec

AGREES, DIRECTION, DISAGREES, NOT_RUN = "agrees", "agrees in direction", "disagrees", "not run"
WORST_FIRST = (DISAGREES, DIRECTION, AGREES, NOT_RUN)

RESAMPLES = 4999
"""Resamples of a bootstrap."""


class AmbiguousPoint(Exception):
    """Several runs of one seed are at the point of an expectation: the grid has an axis that it does not name."""


def judge(spec: Spec, rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts on every expectation of a study, by data set; "not run" where there are no rows, or several per seed."""
    verdicts: list[Verdict] = []
    exact = spec.procedure == "formula"
    for expectation in spec.expect:
        names = [data for data in expectation.data or spec.data if data in spec.data]
        for data in names:
            try:
                verdicts.append(_verdict(expectation, data, [row for row in rows if row.data == data], exact))
            except AmbiguousPoint:
                says = f"{expectation.says} (not judged: it does not say which of several runs it means)"
                verdicts.append(_not_run(replace(expectation, says=says), data))
        if not names:
            verdicts.append(_not_run(expectation, ", ".join(expectation.data)))
    return verdicts


def overall(verdicts: Sequence[str]) -> str:
    """The worst of several verdicts; not run where nothing was run."""
    present = [verdict for verdict in WORST_FIRST if verdict in verdicts and verdict != NOT_RUN]
    return present[0] if present else NOT_RUN


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
    resamples = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[resamples].mean(-1), [0.025, 0.975])
    return float(low), float(high)


def _by_seed(rows: Sequence[Row], point: dict[str, Any], measure: str) -> dict[int, float]:
    """Finite values of a measure at a point, by seed."""
    here = [row for row in rows if all(_same(row.value(axis), value) for axis, value in point.items())]
    if len({row.seed for row in here}) < len(here):
        raise AmbiguousPoint
    return {row.seed: row.measures[measure] for row in here if math.isfinite(row.measures.get(measure, math.nan))}


def _same(a: Any, b: Any) -> bool:
    return math.isclose(a, b) if isinstance(a, int | float) and isinstance(b, int | float) else a == b


def _not_run(expectation: Expectation, data: str) -> Verdict:
    return Verdict(expectation.says, data, NOT_RUN, _in_words(expectation), None, None, None, None, 0)


def _verdict(expectation: Expectation, data: str, rows: Sequence[Row], exact: bool) -> Verdict:
    if expectation.along:
        return _inside(expectation, data, rows)
    here = _by_seed(rows, expectation.at, expectation.measure)
    there = _by_seed(rows, expectation.than, expectation.measure) if expectation.than else {}
    if not here or (expectation.than and not set(here) & set(there)):
        return _not_run(expectation, data)
    if expectation.than:
        seeds = sorted(set(here) & set(there))
        return _compared(expectation, data, [here[s] for s in seeds], [there[s] for s in seeds], exact)
    values = list(here.values())
    mean, (low, high) = sum(values) / len(values), interval(values)
    says, paper = expectation.says, _in_words(expectation)
    if expectation.paper is not None:
        difference = mean - expectation.paper
        verdict = AGREES if abs(difference) <= expectation.tolerance else DISAGREES
        return Verdict(says, data, verdict, paper, mean, low, high, difference, len(values))
    floor = -math.inf if expectation.low is None else expectation.low
    ceiling = math.inf if expectation.high is None else expectation.high
    within = floor <= mean <= ceiling
    verdict = AGREES if within else DIRECTION if low <= ceiling and high >= floor else DISAGREES
    return Verdict(says, data, verdict, paper, mean, low, high, None, len(values))


def _compared(expectation: Expectation, data: str, a: list[float], b: list[float], exact: bool) -> Verdict:
    """Two points, paired by seed. An ``exact`` value does not vary with the seed, and one seed is enough."""
    says, paper = expectation.says, _in_words(expectation)
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, base = sum(a) / len(a), sum(b) / len(b)
    difference, (low, high) = sum(differences) / len(differences), interval(differences)
    if expectation.direction == "similar":
        limit = expectation.tolerance * abs(base)
        verdict = AGREES if abs(difference) <= limit else DIRECTION if low <= limit and high >= -limit else DISAGREES
        return Verdict(says, data, verdict, paper, mean, low, high, difference, len(a), compared=True)
    sign = 1 if expectation.direction == "greater" else -1
    right = sign * difference > 0
    sure = (exact or len(a) > 1) and (low > 0 if sign > 0 else high < 0)
    above, below = (mean, base) if sign > 0 else (base, mean)
    enough = expectation.factor <= 1 or (above / below if below else math.inf) >= expectation.factor
    near = expectation.paper is None or abs(mean - expectation.paper) <= expectation.tolerance
    verdict = AGREES if right and sure and enough and near else DIRECTION if right else DISAGREES
    return Verdict(says, data, verdict, paper, mean, low, high, difference, len(a), compared=True)


def _inside(expectation: Expectation, data: str, rows: Sequence[Row]) -> Verdict:
    """Whether a measure has its extreme strictly between the ends of an axis.

    Every seed is judged at the point that is best for the other seeds, against the better of its two ends: choosing
    among several points gains nothing where all are alike. A single seed cannot be judged this way, and agrees in
    direction at most.
    """
    axis = expectation.along
    values = sorted({row.value(axis) for row in rows} - {None})
    points = [_by_seed(rows, {**expectation.at, axis: value}, expectation.measure) for value in values]
    seeds = sorted(set.intersection(*(set(point) for point in points))) if points else []
    if len(values) < 3 or not seeds:
        return _not_run(expectation, data)
    sign = 1 if expectation.direction == "lowest inside" else -1
    table = sign * np.array([[point[seed] for point in points] for seed in seeds])

    best = 1 + int(table.mean(0)[1:-1].argmin())
    better_end = table[:, [0, -1]].min(1)
    if len(seeds) > 1:
        others = (table.sum(0) - table) / (len(seeds) - 1)
        chosen = 1 + others[:, 1:-1].argmin(1)
        differences = (table[np.arange(len(seeds)), chosen] - better_end).tolist()
    else:
        differences = [float(table[0, best] - better_end[0])]
    difference, (low, high) = sum(differences) / len(differences), interval(differences)
    verdict = AGREES if len(seeds) > 1 and high < 0 else DIRECTION if difference < 0 else DISAGREES
    ends = sorted((sign * low, sign * high))
    return Verdict(
        f"{expectation.says} (ours: best inside at {axis} = {values[best]:g})",
        data,
        verdict,
        _in_words(expectation),
        float(sign * table.mean(0)[best]),
        ends[0],
        ends[1],
        sign * difference,
        len(seeds),
        compared=True,
    )


def _in_words(expectation: Expectation) -> str:
    """The paper's number, bounds or direction in few words."""
    low, high = expectation.low, expectation.high
    if expectation.paper is not None:
        return f"{expectation.paper:g} ± {expectation.tolerance:g}"
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if low is not None or high is not None:
        return f"at least {low:g}" if high is None else f"at most {high:g}"
    factor = f", {expectation.factor:g} times or more" if expectation.factor > 1 else ""
    within = f" within {expectation.tolerance:.0%}" if expectation.direction == "similar" else ""
    return f"{expectation.direction}{within}{factor}" or "in words"

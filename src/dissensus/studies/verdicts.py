"""Whether our numbers agree with what a paper says. Verdicts are computed, never written by hand.

A verdict rests on a 95 % interval: Student's t over seeds, of paired differences where two values are compared. A
statement agrees where the whole interval lies in what it allows, disagrees where the whole interval lies outside of
it, and is undecided otherwise. One seed has no interval, and neither have seeds without any spread.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dissensus.auditing.distributions import binomial_interval, student_quantile
from dissensus.studies.results import Estimate, Point, Verdict
from dissensus.studies.spec import Condition, Expectation, Spec, on_data

AGREES, DIRECTION, DISAGREES, UNDECIDED = "agrees", "agrees in direction", "disagrees", "undecided"
NOT_COMPARABLE, NOT_RUN = "not comparable", "not run"
VERDICTS = (AGREES, DIRECTION, UNDECIDED, DISAGREES, NOT_COMPARABLE, NOT_RUN)
CONFIDENCE = 0.95
ROUNDING = 1e-6
"""Relative size of roundings: values are stored with six digits."""
_OF_SEEDS = "audit_"
"""Measures that are yes or no for every seed: their means are shares of seeds."""


class Ambiguous(Exception):
    """Several settings are at the point of an expectation: the grid has an axis that it does not name."""


class Diverged(Exception):
    """No seed has a finite value at the point of an expectation."""


@dataclass(frozen=True)
class Sample:
    """A measure at a point: its mean, and what is known about its uncertainty."""

    mean: float
    error: float
    """Standard error over seeds."""
    seeds: int
    by_seed: Mapping[int, float] | None = None
    """Values by seed; None where a result has kept mean and standard error only."""
    exact: bool = False
    """Whether nothing about the value is random."""
    trials: int = 0
    """Number of independent trials, where the value is a share of them."""
    scale: float = 0.0
    """The largest absolute value that it was computed from: a spread within its rounding is none."""
    diverged: int = 0
    """Number of seeds without a finite value. What is left is no fair sample, so there is no interval."""

    @classmethod
    def of(cls, by_seed: Mapping[int, float], *, exact: bool = False, diverged: int = 0) -> "Sample":
        """A sample from values by seed."""
        mean, error = mean_and_error(list(by_seed.values()))
        largest = max(map(abs, by_seed.values()), default=0.0)
        return cls(mean, error, len(by_seed), by_seed, exact, scale=largest, diverged=diverged)

    def minus(self, other: "Sample", factor: float = 1.0) -> "Sample":
        """The difference to ``factor`` times another sample, paired by seed where values by seed are known.

        Without them the two errors are added: the standard error of a difference is never larger.
        """
        exact = self.exact and other.exact
        scale = max(self.scale, abs(factor) * other.scale)
        diverged = max(self.diverged, other.diverged)
        if self.by_seed is None or other.by_seed is None:
            mean, error = self.mean - factor * other.mean, self.error + abs(factor) * other.error
            return Sample(mean, error, min(self.seeds, other.seeds), None, exact, scale=scale, diverged=diverged)
        seeds = sorted(self.by_seed.keys() & other.by_seed.keys())
        values = {seed: self.by_seed[seed] - factor * other.by_seed[seed] for seed in seeds}
        return replace(Sample.of(values, exact=exact, diverged=diverged), scale=scale)

    def negated(self) -> "Sample":
        """The sample of negated values."""
        by_seed = None if self.by_seed is None else {seed: -value for seed, value in self.by_seed.items()}
        return replace(self, mean=-self.mean, by_seed=by_seed)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Ends of the interval; infinite where there is one seed, no spread, or a seed that diverged.

        >>> [round(end, 3) for end in Sample.of({0: 1.0, 1: 2.0, 2: 3.0}).interval()]
        [-0.484, 4.484]
        >>> Sample.of({0: 1.0}).interval(), Sample.of({0: 0.1, 1: 0.1, 2: 0.1}).interval()
        ((-inf, inf), (-inf, inf))
        """
        if self.exact:
            return self.mean, self.mean
        if self.trials:
            return binomial_interval(round(self.mean * self.trials), self.trials, confidence)
        if self.seeds < 2 or self.diverged or self.error <= ROUNDING * self.scale:
            return -math.inf, math.inf
        half = student_quantile((1 - confidence) / 2, self.seeds - 1) * self.error
        return self.mean - half, self.mean + half


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error over seeds; the error of one seed is zero, the mean of none is not a number.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = sum(values) / len(values) if values else math.nan
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def judge(
    spec: Spec,
    points: Sequence[Point],
    differences: Mapping[str, Sequence[str]] | None = None,
    *,
    exact: bool = False,
    trials: str = "",
) -> list[Verdict]:
    """Verdicts on every expectation of a study, by data set.

    Args:
        spec: The study, with its expectations.
        points: What was measured.
        differences: By data set, how the run differs from the paper's setting. A paper's number is not comparable in
            another setting.
        exact: Whether values are not random.
        trials: The measure that counts the independent trials of which all other measures are shares.
    """
    verdicts: list[Verdict] = []
    for number, expectation in enumerate(spec.expect):
        names = _data_of(expectation, spec)
        for data in names:
            measured = _Measured(points, data, exact, trials, on_data(spec, data).evaluation.measures)
            parts = [part for part in spec.expect if part.group == expectation.every and data in _data_of(part, spec)]
            about = parts if expectation.every else [expectation]
            reduced = list(dict.fromkeys(word for part in about for word in _reduced(part, data, differences or {})))
            if expectation.every:
                verdict = _all_of(expectation, parts, measured, reduced)
            else:
                verdict = _judged(expectation, measured, reduced)
            verdicts.append(replace(verdict, statement=number, differences=reduced))
        if not names:
            verdicts.append(replace(_not_run(expectation, ", ".join(expectation.data)), statement=number))
    return verdicts


def _data_of(expectation: Expectation, spec: Spec) -> list[str]:
    return [data for data in expectation.data or spec.data if data in spec.data]


def _reduced(expectation: Expectation, data: str, differences: Mapping[str, Sequence[str]]) -> list[str]:
    """Differences to the paper's setting on all data that a statement is about."""
    others = expectation.than.get("data", data)
    names = [data, *(others if isinstance(others, list) else [others])]
    return list(dict.fromkeys(words for name in names for words in differences.get(str(name), ())))


class _Measured(NamedTuple):
    """All points, seen from one data set."""

    points: Sequence[Point]
    data: str
    exact: bool
    trials: str
    wanted: Sequence[str]
    """Measures that the study asks for."""

    @property
    def here(self) -> list[Point]:
        """Points of the data set."""
        return [point for point in self.points if point.data == self.data]

    def sample(self, at: Mapping[str, Any], measure: str, gain_over: Mapping[str, Any] | None = None) -> Sample | None:
        """A measure at a point, or its gain over another point; None where it was not measured."""
        if gain_over:
            value, base = self.sample(at, measure), self.sample({**at, **gain_over}, measure)
            return None if value is None or base is None else value.minus(base)
        at = {"data": self.data, **at}
        here = [point for point in self.points if all(_same(point.value(axis), value) for axis, value in at.items())]
        here = [point for point in here if measure in point.measures]
        if len(here) > 1:
            raise Ambiguous
        estimate = here[0].measures[measure] if here else None
        if estimate is not None and estimate.mean is None and estimate.values:
            raise Diverged
        if estimate is None or estimate.mean is None:
            return None
        trials = here[0].mean(self.trials) if self.trials else None
        if measure.startswith(_OF_SEEDS):
            trials = estimate.seeds
        return _sample(estimate, here[0].seeds, self.exact, int(trials or 0))


def _sample(estimate: Estimate, seeds: Sequence[int] | None, exact: bool, trials: int) -> Sample:
    mean, error = estimate.mean, estimate.error or 0.0
    assert mean is not None
    if trials and 0 <= mean <= 1:
        return Sample(mean, error, estimate.seeds, None, exact, trials, abs(mean))
    if estimate.values is None or seeds is None:
        return Sample(mean, error, estimate.seeds, None, exact, scale=abs(mean))
    by_seed = {seed: value for seed, value in zip(seeds, estimate.values, strict=True) if value is not None}
    return Sample.of(by_seed, exact=exact, diverged=len(seeds) - len(by_seed))


def _same(a: Any, b: Any) -> bool:
    return math.isclose(a, b) if isinstance(a, int | float) and isinstance(b, int | float) else a == b


def _not_run(expectation: Expectation, data: str) -> Verdict:
    return Verdict(expectation.says, data, NOT_RUN, _in_words(expectation), None, None, None, None, 0)


def _judged(expectation: Expectation, measured: _Measured, reduced: Sequence[str], parts: int = 1) -> Verdict:
    """The verdict on one statement, which is one of several ``parts`` of another."""
    try:
        verdict = _verdict(expectation, measured, reduced, parts)
        conditions = [_holds(condition, expectation, measured) for condition in expectation.given]
    except Ambiguous:
        says = f"{expectation.says} (not judged: it does not say which of several runs it means)"
        return _not_run(replace(expectation, says=says), measured.data)
    except Diverged:
        says = f"{expectation.says} (no seed gave a finite value)"
        return replace(_not_run(replace(expectation, says=says), measured.data), verdict=UNDECIDED)
    for outcome in (NOT_RUN, NOT_COMPARABLE, UNDECIDED):
        if outcome in (verdict.verdict, *conditions):
            return replace(verdict, verdict=outcome)
    return verdict


def _holds(condition: Condition, expectation: Expectation, measured: _Measured) -> str:
    """Whether all runs meet a condition: it is about these runs, so that no interval is needed."""
    try:
        sample = measured.sample(condition.at or expectation.at, condition.measure)
    except Diverged:
        return UNDECIDED
    if sample is None:
        return NOT_RUN
    low = -math.inf if condition.low is None else condition.low
    high = math.inf if condition.high is None else condition.high
    values = [sample.mean] if sample.by_seed is None else list(sample.by_seed.values())
    met = [low <= value <= high for value in values] + [False] * sample.diverged
    return AGREES if all(met) else UNDECIDED if any(met) else NOT_COMPARABLE


def _all_of(
    expectation: Expectation, parts: Sequence[Expectation], measured: _Measured, reduced: Sequence[str]
) -> Verdict:
    """The verdict on all statements of a group together: every one must agree, and one that disagrees is enough."""
    outcomes = [_judged(part, measured, reduced, len(parts)).verdict for part in parts]
    if not any(outcome != NOT_RUN for outcome in outcomes):
        return _not_run(expectation, measured.data)
    missing = next((outcome for outcome in (NOT_RUN, NOT_COMPARABLE) if outcome in outcomes), None)
    combined = _combined(outcomes) if missing is None or DISAGREES in outcomes else missing
    number = "1 statement" if len(parts) == 1 else f"{len(parts)} statements"
    says = f"{expectation.says} ({number}: {counts_in_words(_counted(outcomes))})"
    return replace(_not_run(expectation, measured.data), says=says, verdict=combined, sums_up=True)


def _verdict(expectation: Expectation, measured: _Measured, reduced: Sequence[str], parts: int) -> Verdict:
    data = measured.data
    if expectation.along:
        return _inside(expectation, data, measured, parts)
    if expectation.direction:
        if reduced:  # the direction is a statement about other settings too, a paper's number is not
            expectation = replace(expectation, paper=None)
        return _compared(expectation, measured, bool(reduced), parts)
    value = measured.sample(expectation.at, expectation.measure, expectation.gain_over)
    if value is None:
        return _not_run(expectation, data)
    base = _finished(
        Verdict(expectation.says, data, "", _in_words(expectation), value.mean, None, None, None, 0), value
    )
    if expectation.paper is None:
        floor = -math.inf if expectation.low is None else expectation.low
        ceiling = math.inf if expectation.high is None else expectation.high
        wide = _within(value.interval(_wide(parts)), floor, ceiling)
        return replace(base, verdict=_corrected(_within(value.interval(), floor, ceiling), wide))
    difference = value.mean - expectation.paper
    if reduced:
        return replace(base, verdict=NOT_COMPARABLE, difference=difference)
    verdict = _within(_from_paper(expectation, value), *_tolerated(expectation))
    wide = _within(_from_paper(expectation, value, _wide(parts)), *_tolerated(expectation))
    return replace(base, verdict=_corrected(verdict, wide), difference=difference)


def _finished(verdict: Verdict, shown: Sample) -> Verdict:
    """A verdict with the interval of a sample, where that is finite."""
    low, high = shown.interval()
    finite = math.isfinite(low) and math.isfinite(high)
    note = f" ({shown.diverged} of {shown.seeds + shown.diverged} seeds gave no finite value)" if shown.diverged else ""
    ends = (low, high) if finite else (None, None)
    return replace(verdict, says=verdict.says + note, low=ends[0], high=ends[1], seeds=shown.seeds)


def _within(interval: tuple[float, float], floor: float, ceiling: float) -> str:
    low, high = interval
    if low > high or math.isnan(low):
        return UNDECIDED
    return AGREES if floor <= low and high <= ceiling else DISAGREES if high < floor or low > ceiling else UNDECIDED


def _corrected(verdict: str, wide: str) -> str:
    """A verdict that disagrees only where the wider interval of several comparisons does."""
    return UNDECIDED if verdict == DISAGREES and wide != DISAGREES else verdict


def _from_paper(expectation: Expectation, value: Sample, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of our value less the paper's; widths of both are added in squares (Zou and Donner, 2008)."""
    assert expectation.paper is not None
    low, high = value.interval(confidence)
    half = math.hypot((high - low) / 2, _paper_half_width(expectation)) if math.isfinite(high) else math.inf
    middle = (low + high) / 2 if math.isfinite(high) else 0.0
    return middle - half - expectation.paper, middle + half - expectation.paper


def _paper_half_width(expectation: Expectation) -> float:
    if not expectation.paper_error:
        return 0.0
    seeds = expectation.paper_seeds
    quantile = student_quantile((1 - CONFIDENCE) / 2, seeds - 1) if seeds else 1.96
    return quantile * expectation.paper_error


def _tolerated(expectation: Expectation) -> tuple[float, float]:
    return -expectation.tolerance, expectation.tolerance


# Comparisons


def _compared(expectation: Expectation, measured: _Measured, reduced: bool, parts: int) -> Verdict:
    """A value against one or several others, on one or several sets; it must hold for every one of them.

    Every comparison has to agree, so no correction for their number is needed. One that disagrees is enough, so the
    intervals that show this are as wide as their number asks for (Bonferroni).
    """
    data, gain_over = measured.data, expectation.gain_over
    pairs: dict[str, tuple[Sample, Sample]] = {}
    for dataset in _sets(expectation, measured, reduced):
        value = measured.sample(expectation.at, _on(dataset, expectation.measure), gain_over)
        for name, at, measure in _opponents(expectation):
            other = measured.sample(at, _on(dataset, measure), gain_over)
            if value is None or other is None or not value.minus(other).seeds:
                return _not_run(expectation, data)
            pairs[", ".join(filter(None, (dataset, name)))] = value, other
    if not pairs:
        return _not_run(expectation, data)
    compare, ease = _COMPARISONS[expectation.direction], _EASE[expectation.direction]
    outcomes = {name: compare(expectation, *pair, parts * len(pairs)) for name, pair in pairs.items()}
    worst = (DISAGREES, UNDECIDED, DIRECTION, AGREES).index
    hardest = min(pairs, key=lambda name: (worst(outcomes[name]), ease(pairs[name][0].mean - pairs[name][1].mean)))
    value, other = pairs[hardest]
    says = expectation.says if len(pairs) == 1 else f"{expectation.says} (the hardest: {hardest})"
    shown, combined = value.minus(other), _combined(list(outcomes.values()))
    verdict = Verdict(says, data, combined, _in_words(expectation), value.mean, None, None, shown.mean, 0)
    return replace(_finished(verdict, shown), compared=True)


def _sets(expectation: Expectation, measured: _Measured, reduced: bool) -> list[str]:
    """Sets that a statement is judged on.

    In the paper's setting these are all that the study asks for. A reduced setting has some of them, or stand-ins.
    """
    if not expectation.sets:
        return [""]

    def is_there(dataset: str) -> bool:
        name = _on(dataset, expectation.measure)
        return measured.sample(expectation.at, name) is not None if reduced else name in measured.wanted

    return [dataset for dataset in expectation.sets if is_there(dataset)]


def _on(dataset: str, measure: str) -> str:
    return f"{measure}_{dataset}" if dataset else measure


def _opponents(expectation: Expectation) -> Iterable[tuple[str, dict[str, Any], str]]:
    """What a value is compared with: a name, a point and a measure; lists stand for every one of their values."""
    measures = expectation.than_measure
    names = [measures] if isinstance(measures, str) else measures
    axes = {axis: value if isinstance(value, list) else [value] for axis, value in expectation.than.items()}
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        for measure in names or [expectation.measure]:
            words = [*map(str, values), *([measure] if names and measure else [])]
            yield ", ".join(words), point or expectation.at, measure or expectation.measure


def _combined(outcomes: Sequence[str]) -> str:
    if DISAGREES in outcomes:
        return DISAGREES
    if UNDECIDED in outcomes:
        return UNDECIDED
    return DIRECTION if DIRECTION in outcomes else AGREES


def _is_positive(difference: Sample, comparisons: int) -> str:
    if difference.interval()[0] > 0:
        return AGREES
    return DISAGREES if difference.interval(_wide(comparisons))[1] <= 0 else UNDECIDED


def _is_not_negative(difference: Sample, comparisons: int) -> str:
    if difference.interval()[0] >= 0:
        return AGREES
    return DISAGREES if difference.interval(_wide(comparisons))[1] < 0 else UNDECIDED


def _greater(expectation: Expectation, a: Sample, b: Sample, comparisons: int) -> str:
    return _larger_by(expectation, a, b, a, comparisons)


def _less(expectation: Expectation, a: Sample, b: Sample, comparisons: int) -> str:
    return _larger_by(expectation, b, a, a, comparisons)


def _larger_by(expectation: Expectation, above: Sample, below: Sample, value: Sample, comparisons: int) -> str:
    direction = _is_positive(above.minus(below), comparisons)
    if direction != AGREES:
        return direction
    multiple = above.minus(below, expectation.factor).interval()[0] > 0 and below.mean >= 0
    enough = expectation.factor <= 1 or multiple
    near = expectation.paper is None or _within(_from_paper(expectation, value), *_tolerated(expectation)) == AGREES
    return AGREES if enough and near else DIRECTION


def _wide(comparisons: int) -> float:
    return 1 - (1 - CONFIDENCE) / comparisons


def _similar(expectation: Expectation, a: Sample, b: Sample, comparisons: int) -> str:
    """Equivalence: the value is neither greater nor less by more than the tolerance."""
    parts = (_not_greater, _not_less)
    return _combined([part(expectation, a, b, 2 * comparisons) for part in parts])


def _not_greater(expectation: Expectation, a: Sample, b: Sample, comparisons: int) -> str:
    factor = 1 + math.copysign(expectation.tolerance, b.mean)
    return _is_not_negative(a.minus(b, factor).negated(), comparisons)


def _not_less(expectation: Expectation, a: Sample, b: Sample, comparisons: int) -> str:
    return _not_greater(expectation, a.negated(), b.negated(), comparisons)


_COMPARISONS: dict[str, Callable[[Expectation, Sample, Sample, int], str]] = {
    "greater": _greater,
    "less": _less,
    "similar": _similar,
    "not greater": _not_greater,
    "not less": _not_less,
}
_EASE: dict[str, Callable[[float], float]] = {
    "greater": lambda difference: difference,
    "not less": lambda difference: difference,
    "less": lambda difference: -difference,
    "not greater": lambda difference: -difference,
    "similar": lambda difference: -abs(difference),
}
"""By direction, how much a difference speaks for a statement."""


def _inside(expectation: Expectation, data: str, measured: _Measured, parts: int) -> Verdict:
    """Whether a measure has its extreme strictly between the ends of an axis.

    It agrees where some inner point is beyond both ends, by intervals as wide as the number of inner points asks for
    (Bonferroni). It disagrees where an end is beyond every inner point.
    """
    axis, sign = expectation.along, 1 if expectation.direction == "lowest inside" else -1
    values = sorted({point.value(axis) for point in measured.here} - {None})
    points = (measured.sample({**expectation.at, axis: value}, expectation.measure) for value in values)
    samples = [sample for sample in points if sample is not None]
    if len(values) < 3 or len(samples) < len(values):
        return _not_run(expectation, data)
    inner, ends = samples[1:-1], (samples[0], samples[-1])
    if not all(end.minus(point).seeds for end in ends for point in inner):
        return _not_run(expectation, data)

    def is_below(a: Sample, b: Sample, comparisons: int) -> bool:
        difference = a.minus(b) if sign > 0 else b.minus(a)
        return difference.interval(_wide(comparisons))[1] < 0

    agrees = any(all(is_below(point, end, len(inner)) for end in ends) for point in inner)
    disagrees = any(all(is_below(end, point, parts * len(ends)) for point in inner) for end in ends)
    best = min(inner, key=lambda point: sign * point.mean)
    gain = best.minus(min(ends, key=lambda end: sign * end.mean))
    verdict = Verdict(
        f"{expectation.says} (ours: best inside at {axis} = {values[1 + inner.index(best)]:g})",
        data,
        AGREES if agrees else DISAGREES if disagrees else UNDECIDED,
        _in_words(expectation),
        best.mean,
        None,
        None,
        gain.mean,
        0,
    )
    return replace(_finished(verdict, gain), compared=True)


def _in_words(expectation: Expectation) -> str:
    """The paper's number, bounds or direction in few words."""
    low, high = expectation.low, expectation.high
    if expectation.every:
        return "all of them"
    if expectation.paper is not None:
        return f"{expectation.paper:g} ± {expectation.tolerance:g}"
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if low is not None or high is not None:
        return f"at least {low:g}" if high is None else f"at most {high:g}"
    factor = f", {expectation.factor:g} times or more" if expectation.factor > 1 else ""
    has_margin = expectation.direction in ("similar", "not greater", "not less") and expectation.tolerance
    within = f" within {100 * expectation.tolerance:g} %" if has_margin else ""
    return f"{expectation.direction}{within}{factor}" or "in words"


# A study in short


PAPER, REDUCED = "paper", "reduced"


class InShort(NamedTuple):
    """Verdicts of a study in one of the two settings."""

    claim: Mapping[str, int]
    """Number of data sets by verdict on the statement of the study's claim; empty where it was not judged."""
    statements: Mapping[str, int]
    """Number of statements by verdict."""


def in_short(verdicts: Sequence[Verdict], setting: str) -> InShort:
    """The verdicts on the study's claim, which is its first statement, and on all statements."""
    here = [v for v in verdicts if v.setting == setting and v.verdict not in (NOT_RUN, NOT_COMPARABLE)]
    return InShort(
        _counted([v.verdict for v in here if v.statement == 0]),
        _counted([v.verdict for v in here if not v.sums_up]),
    )


def _counted(verdicts: Sequence[str]) -> dict[str, int]:
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS if verdict in verdicts}


_PLURAL = {AGREES: "agree", DIRECTION: "agree in direction", DISAGREES: "disagree"}


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Numbers by verdict, in words.

    >>> counts_in_words({"agrees": 3, "undecided": 1})
    '3 agree, 1 undecided'
    """
    words = {verdict: verdict if n == 1 else _PLURAL.get(verdict, verdict) for verdict, n in counts.items()}
    return ", ".join(f"{n} {words[verdict]}" for verdict, n in counts.items())

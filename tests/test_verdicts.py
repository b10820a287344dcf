"""Verdicts are computed: every kind of expectation, at and beside its limits."""

import math

import numpy as np
import pytest
import scipy.stats

from dissensus.studies import verdicts
from dissensus.studies.results import Row
from dissensus.studies.spec import Expectation, Spec


def spec_of(*expect, data=("a",)):
    return Spec("collusion/x", "t", "Figure 0", "c.", list(data), expect=list(expect))


def rows_of(values, data="a", **point):
    return [Row(data, point, seed, {"m": value}) for seed, value in enumerate(values)]


def verdict(expectation, rows):
    (result,) = verdicts.judge(spec_of(expectation), rows)
    return result


@pytest.mark.parametrize(
    ("value", "expected"), [(0.52, "agrees"), (0.55, "agrees"), (0.551, "disagrees"), (0.4, "disagrees")]
)
def test_a_number_agrees_within_its_tolerance(value, expected):
    expectation = Expectation("s", "m", at={"beta": 1.0}, paper=0.5, tolerance=0.05)
    result = verdict(expectation, rows_of([value - 0.01, value + 0.01 - 1e-12], beta=1.0))
    assert result.verdict == expected
    assert result.ours == pytest.approx(value)
    assert result.difference == pytest.approx(value - 0.5)
    assert result.paper == "0.5 ± 0.05"
    assert result.low <= result.ours <= result.high


@pytest.mark.parametrize(
    ("baseline", "compared", "factor", "expected"),
    [
        ([1.0, 2.0, 3.0], [2.0, 3.1, 4.2], 1.0, "agrees"),
        ([1.0, 2.0, 3.0], [2.0, 3.1, 4.2], 3.0, "agrees in direction"),
        ([1.0, 2.0, 3.0], [4.0, 6.1, 9.3], 3.0, "agrees"),
        ([1.0, 2.0, 3.0], [0.95, 2.6, 3.8], 1.0, "agrees in direction"),
        ([1.0, 2.0, 3.0], [0.9, 1.9, 2.9], 1.0, "disagrees"),
        ([1.0], [5.0], 1.0, "agrees in direction"),
    ],
)
@pytest.mark.parametrize("direction", ["greater", "less"])
def test_directions_are_judged_by_paired_differences(baseline, compared, factor, expected, direction):
    if direction == "less":
        baseline, compared = ([1 / v for v in values] for values in (baseline, compared))
    expectation = Expectation("s", "m", at={"beta": 1.0}, than={"beta": 0.0}, direction=direction, factor=factor)
    result = verdict(expectation, rows_of(compared, beta=1.0) + rows_of(baseline, beta=0.0))
    assert result.verdict == expected
    assert result.difference == pytest.approx(np.mean(compared) - np.mean(baseline))
    assert result.seeds == len(compared)


def test_a_direction_with_a_number_agrees_only_near_it():
    baseline, compared = rows_of([1.0, 1.1], beta=0.0), rows_of([2.0, 2.2], beta=1.0)
    comparison = {"at": {"beta": 1.0}, "than": {"beta": 0.0}, "direction": "greater", "tolerance": 0.2}
    assert verdict(Expectation("s", "m", paper=2.2, **comparison), baseline + compared).verdict == "agrees"
    assert verdict(Expectation("s", "m", paper=9.0, **comparison), baseline + compared).verdict == "agrees in direction"


@pytest.mark.parametrize(
    ("compared", "expected"), [([1.05, 1.02], "agrees"), ([0.9, 1.7], "agrees in direction"), ([1.5, 1.6], "disagrees")]
)
def test_similar_is_relative_to_the_other_point(compared, expected):
    expectation = Expectation("s", "m", at={"beta": 1.0}, than={"beta": 0.0}, direction="similar", tolerance=0.1)
    assert verdict(expectation, rows_of(compared, beta=1.0) + rows_of([1.0, 1.0], beta=0.0)).verdict == expected


@pytest.mark.parametrize(
    ("curves", "expected", "best"),
    [
        ([[3.0, 2.0, 1.0, 2.5], [3.2, 2.1, 1.2, 2.4]], "agrees", 0.8),
        ([[3.0, 2.5, 3.1, 4.0], [3.0, 3.05, 3.2, 4.0]], "agrees in direction", 0.4),
        ([[1.0, 2.0, 3.0, 4.0], [1.1, 2.0, 3.0, 4.0]], "disagrees", 0.4),
        ([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.1, 1.1]], "disagrees", 0.8),
        ([[3.0, 1.0, 2.0, 3.0]], "agrees in direction", 0.4),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_extreme_strictly_inside_an_axis(curves, expected, best, sign):
    rows = [
        Row("a", {"beta": beta, "members": 5}, s, {"m": sign * value})
        for s, curve in enumerate(curves)
        for beta, value in zip([0.0, 0.4, 0.8, 1.0], curve, strict=True)
    ]
    rows += [Row("a", {**row.point, "members": 10}, row.seed, {"m": 0.0}) for row in rows]
    direction = "lowest inside" if sign == 1 else "highest inside"
    expectation = Expectation("s", "m", at={"members": 5}, along="beta", direction=direction)
    result = verdict(expectation, rows)
    means = np.mean(curves, 0)
    assert result.verdict == expected
    assert result.ours == pytest.approx(sign * means[1:-1].min())
    table = np.array(curves)
    by_seed = []
    for s in range(len(curves)):
        other_seeds = np.delete(table, s, 0) if len(curves) > 1 else table
        position = 1 + other_seeds.mean(0)[1:-1].argmin()
        by_seed.append(table[s, position] - min(table[s, 0], table[s, -1]))
    assert result.difference == pytest.approx(sign * np.mean(by_seed))
    assert result.low <= result.difference <= result.high
    assert f"beta = {best:g}" in result.says
    two_points = [row for row in rows if row.point["beta"] in (0.0, 1.0)]
    assert verdict(expectation, two_points).verdict == verdict(expectation, []).verdict == "not run"


@pytest.mark.parametrize(
    ("compared", "expected"), [([0.5, 0.6], "agrees"), ([0.2, 0.35], "agrees in direction"), ([0.1, 0.12], "disagrees")]
)
def test_ranges(compared, expected):
    expectation = Expectation("s", "m", at={"beta": 1.0}, low=0.3, high=0.7)
    result = verdict(expectation, rows_of(compared, beta=1.0))
    assert result.verdict == expected
    assert result.paper == "0.3 to 0.7"


def test_expectations_without_rows_are_not_run():
    expectation = Expectation("s", "m", at={"beta": 0.5}, paper=1.0, tolerance=0.1)
    for rows in ([], rows_of([1.0], beta=1.0), rows_of([math.nan], beta=0.5)):
        result = verdict(expectation, rows)
        assert (result.verdict, result.ours, result.seeds) == ("not run", None, 0)
    elsewhere = Expectation("s", "m", at={"beta": 1.0}, low=0.0, data=["b", "c"])
    (result,) = verdicts.judge(spec_of(elsewhere), rows_of([1.0], beta=1.0))
    assert (result.verdict, result.data) == ("not run", "b, c")
    unpaired = Expectation("s", "m", at={"beta": 1.0}, than={"beta": 0.0}, direction="greater")
    rows = [*rows_of([2.0], beta=1.0), Row("a", {"beta": 0.0}, 7, {"m": 1.0})]
    assert verdict(unpaired, rows).verdict == "not run"


def test_each_data_set_is_judged_by_itself():
    expectation = Expectation("s", "m", at={"beta": 1.0}, low=0.5)
    rows = rows_of([1.0, 1.1], data="a", beta=1.0) + rows_of([0.1, 0.2], data="b", beta=1.0)
    assert [v.verdict for v in verdicts.judge(spec_of(expectation, data=("a", "b")), rows)] == ["agrees", "disagrees"]


def test_the_worst_verdict_stands_for_all():
    assert verdicts.overall(["agrees", "not run"]) == "agrees"
    assert verdicts.overall(["agrees", "agrees in direction"]) == "agrees in direction"
    assert verdicts.overall(["disagrees", "agrees"]) == "disagrees"
    assert verdicts.overall([]) == verdicts.overall(["not run"]) == "not run"


def test_intervals_cover_the_mean_as_often_as_they_say():
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        values = generator.normal(3.0, 1.0, 25).tolist()
        low, high = verdicts.interval(values)
        hits += low <= 3.0 <= high
    assert 48 <= hits <= 60
    assert verdicts.interval([2.0]) == (2.0, 2.0)
    assert verdicts.interval([2.0, 2.0]) == (2.0, 2.0)


def test_a_point_that_could_be_several_runs_is_not_judged():
    expectation = Expectation("s", "m", at={"beta": 1.0}, low=0.0)
    rows = rows_of([1.0], beta=1.0, members=5) + rows_of([2.0], beta=1.0, members=10)
    result = verdict(expectation, rows)
    assert result.verdict == verdicts.NOT_RUN
    assert "which of several runs" in result.says


@pytest.mark.parametrize(("compared", "baseline", "direction"), [(0.5, 0.0, "greater"), (0.0, 0.5, "less")])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_value_of_zero_is_compared_like_any_other(compared, baseline, direction, factor):
    expectation = Expectation("s", "m", at={"beta": 1.0}, than={"beta": 0.0}, direction=direction, factor=factor)
    assert (
        verdict(expectation, rows_of([compared] * 3, beta=1.0) + rows_of([baseline] * 3, beta=0.0)).verdict == "agrees"
    )


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_intervals_are_scipys(seeds):
    values = np.random.default_rng(seeds).normal(size=seeds)
    options = {"n_resamples": verdicts.RESAMPLES, "method": "percentile", "rng": np.random.default_rng(0)}
    result = scipy.stats.bootstrap((values,), np.mean, **options).confidence_interval
    assert verdicts.interval(values.tolist()) == pytest.approx((result.low, result.high))

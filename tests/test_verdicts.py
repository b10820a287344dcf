"""Verdicts are computed: every kind of expectation, at and beside its limits, and how often verdicts are wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from dissensus.auditing.distributions import binomial_interval, student_quantile
from dissensus.studies import library, verdicts
from dissensus.studies.page import standing
from dissensus.studies.results import Estimate, Point, Provenance, Summary, Verdict
from dissensus.studies.spec import Condition, Evaluation, Expectation, Spec
from dissensus.studies.summary import estimate
from dissensus.studies.verdicts import Sample


def spec_of(*expect, data=("a",)):
    return Spec("collusion/x", "t", "Figure 0", "c.", list(data), expect=list(expect))


def point(values, data="a", measure="m", **axes):
    return Point(data, axes, {measure: estimate(values)}, seeds=list(range(len(values))))


def without_values(one):
    measures = {name: replace_values(e) for name, e in one.measures.items()}
    return replace(one, measures=measures, seeds=None)


def replace_values(e):
    return Estimate(e.mean, e.error, e.seeds)


def verdict(expectation, points, differences=(), **options):
    (result,) = verdicts.judge(spec_of(expectation), points, {"a": list(differences)}, **options)
    return result


AT_ONE = {"at": {"beta": 1.0}}
COMPARED = {"at": {"beta": 1.0}, "than": {"beta": 0.0}}


def compared(above, below, **settings):
    points = [point(above, beta=1.0), point(below, beta=0.0)]
    return verdict(Expectation("s", "m", **COMPARED, **settings), points)


# Intervals


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_intervals_are_those_of_students_t(seeds):
    values = np.random.default_rng(seeds).normal(size=seeds)
    low, high = Sample.of(dict(enumerate(values))).interval(0.9)
    oracle = scipy.stats.t.interval(0.9, seeds - 1, values.mean(), scipy.stats.sem(values))
    assert (low, high) == pytest.approx(oracle)


@pytest.mark.parametrize("degrees", [1, 2, 4, 30])
@pytest.mark.parametrize("tail", [0.4, 0.025, 1e-4])
def test_quantiles_of_students_t(degrees, tail):
    assert student_quantile(tail, degrees) == pytest.approx(scipy.stats.t.isf(tail, degrees))


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (1, 1), (37, 400)])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_intervals_of_shares_are_those_of_clopper_and_pearson(successes, trials, confidence):
    oracle = scipy.stats.binomtest(successes, trials).proportion_ci(confidence, "exact")
    assert binomial_interval(successes, trials, confidence) == pytest.approx((oracle.low, oracle.high), abs=1e-12)


def test_one_seed_and_no_spread_have_no_interval():
    assert Sample.of({0: 2.0}).interval() == (-math.inf, math.inf)
    assert Sample.of({0: 2.0, 1: 2.0, 2: 2.0}).interval() == (-math.inf, math.inf)
    assert Sample.of({0: 2.0}, exact=True).interval() == (2.0, 2.0)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("noise", ["normal", "uniform", "skewed"])
def test_verdicts_on_pure_chance_are_as_rare_as_they_say(seeds, noise):
    """Where two settings are alike, at most 2.5 % of directions agree and 2.5 % disagree; so does a true number."""
    generator = np.random.default_rng(seeds)
    draws = {
        "normal": lambda: generator.normal(size=(2, seeds)),
        "uniform": lambda: generator.uniform(-1, 1, (2, seeds)),
        "skewed": lambda: generator.exponential(size=(2, seeds)),
    }[noise]
    runs = 1500
    outcomes = [compared(*draws().tolist(), direction="greater").verdict for _ in range(runs)]
    for wrong in ("agrees", "disagrees"):
        assert outcomes.count(wrong) <= 0.025 * runs + 3 * math.sqrt(0.025 * runs)
    assert outcomes.count("undecided") >= 0.93 * runs


@pytest.mark.parametrize(("seeds", "power"), [(2, 0.18), (3, 0.45), (6, 0.97)])
def test_few_seeds_detect_little(seeds, power):
    """The share of effects of two standard deviations (of the difference) that are seen."""
    generator = np.random.default_rng(0)
    runs = 800
    outcomes = [
        compared(row.tolist(), [0.0] * seeds, direction="greater").verdict
        for row in generator.normal(2.0, 1.0, (runs, seeds))
    ]
    assert outcomes.count("agrees") / runs == pytest.approx(power, abs=0.05)
    assert outcomes.count("disagrees") <= 2


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_an_extreme_inside_is_rarely_seen_where_all_points_are_alike(seeds):
    generator = np.random.default_rng(seeds)
    expectation = Expectation("s", "m", along="beta", direction="lowest inside")
    runs, outcomes = 500, []
    for _ in range(runs):
        table = generator.normal(size=(6, seeds)).tolist()
        outcomes.append(verdict(expectation, [point(v, beta=i / 5) for i, v in enumerate(table)]).verdict)
    for wrong in ("agrees", "disagrees"):
        assert outcomes.count(wrong) <= 0.05 * runs + 3 * math.sqrt(0.05 * runs)


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-9, 123.4])
@pytest.mark.parametrize("seeds", [2, 3, 6, 10])
def test_rounding_is_no_spread(value, seeds):
    assert verdict(Expectation("s", "m", **AT_ONE, low=-1e9), [point([value] * seeds, beta=1.0)]).verdict == "undecided"
    above, below = [value * (3 + i) for i in range(seeds)], [value * (1 + i) for i in range(seeds)]
    assert compared(above, below, direction="greater").verdict == "undecided"  # a constant shift


def test_seeds_that_diverge_are_no_fair_sample():
    """What is left after some seeds diverged is a selection: it decides nothing, and the statement says so."""
    below = [2.0, 2.01, 2.02, 1.99, 2.0, 2.03]
    result = compared([1.0, 1.01, math.inf, math.nan, math.inf, math.inf], below, direction="less")
    assert result.verdict == "undecided"
    assert "4 of 6 seeds gave no finite value" in result.says
    result = compared([math.nan] * 6, below, direction="less")
    assert (result.verdict, result.ours) == ("undecided", None)
    assert "no seed gave a finite value" in result.says


# Numbers and bounds


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.52, 0.521, 0.519], "agrees"),
        ([0.60, 0.601, 0.599], "disagrees"),
        ([0.52, 0.58, 0.46], "undecided"),
        ([0.52], "undecided"),
        ([0.5, 0.5, 0.5], "undecided"),
        ([0.9], "undecided"),
    ],
)
def test_a_number_agrees_where_the_interval_lies_within_its_tolerance(values, expected):
    expectation = Expectation("s", "m", **AT_ONE, paper=0.5, tolerance=0.05)
    result = verdict(expectation, [point(values, beta=1.0)])
    assert result.verdict == expected
    assert result.ours == pytest.approx(np.mean(values))
    assert result.difference == pytest.approx(np.mean(values) - 0.5)
    assert result.paper == "0.5 ± 0.05"
    assert (result.low is None) == (len(set(values)) == 1)


def test_the_papers_standard_error_counts():
    values = [0.57, 0.571, 0.569]
    expectation = Expectation("s", "m", **AT_ONE, paper=0.5, tolerance=0.05)
    assert verdict(expectation, [point(values, beta=1.0)]).verdict == "disagrees"
    for error, seeds, expected in [(0.005, 0, "disagrees"), (0.02, 0, "undecided"), (0.005, 2, "undecided")]:
        printed = replace(expectation, paper_error=error, paper_seeds=seeds)
        assert verdict(printed, [point(values, beta=1.0)]).verdict == expected
    low, high = verdicts._from_paper(replace(expectation, paper_error=0.02, paper_seeds=5), Sample.of({0: 1.0, 1: 2.0}))
    half = math.hypot(scipy.stats.t.isf(0.025, 1) * 0.5, scipy.stats.t.isf(0.025, 4) * 0.02)
    assert (low, high) == pytest.approx((1.0 - half, 1.0 + half))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.5, 0.51, 0.49], "agrees"), ([0.1, 0.11, 0.12], "disagrees"), ([0.2, 0.35], "undecided"), ([0.5], "undecided")],
)
def test_ranges(values, expected):
    result = verdict(Expectation("s", "m", **AT_ONE, low=0.3, high=0.7), [point(values, beta=1.0)])
    assert result.verdict == expected
    assert result.paper == "0.3 to 0.7"


def test_exact_values_need_one_run():
    at_most = Expectation("s", "m", **AT_ONE, high=0.5)
    assert verdict(at_most, [point([0.5], beta=1.0)], exact=True).verdict == "agrees"
    assert verdict(at_most, [point([0.6], beta=1.0)], exact=True).verdict == "disagrees"
    greater = Expectation("s", "m", **COMPARED, direction="greater")
    for above, expected in [(1.1, "agrees"), (1.0, "disagrees"), (0.9, "disagrees")]:
        points = [point([above], beta=1.0), point([1.0], beta=0.0)]
        assert verdict(greater, points, exact=True).verdict == expected
    for direction in ("not greater", "not less", "similar"):
        points = [point([1.0], beta=1.0), point([1.0], beta=0.0)]
        assert verdict(replace(greater, direction=direction), points, exact=True).verdict == "agrees"


def test_shares_of_counted_trials():
    at_most = Expectation("s", "m", **AT_ONE, high=0.01)
    for trials, expected in [(100, "undecided"), (1000, "agrees")]:
        counted = Point("a", {"beta": 1.0}, {"m": estimate([0.0]), "n": estimate([float(trials)])}, seeds=[0])
        result = verdict(at_most, [counted], trials="n")
        assert result.verdict == expected
        assert result.high == pytest.approx(scipy.stats.binomtest(0, trials).proportion_ci(method="exact").high)


# Comparisons


@pytest.mark.parametrize(
    ("baseline", "value", "factor", "expected"),
    [
        ([1.0, 2.0, 3.0], [2.0, 3.1, 4.2], 1.0, "agrees"),
        ([1.0, 2.0, 3.0], [2.0, 3.1, 4.2], 3.0, "agrees in direction"),
        ([1.0, 2.0, 3.0], [4.0, 7.1, 10.0], 3.0, "agrees"),
        ([1.0, 2.0, 3.0], [0.95, 2.6, 3.8], 1.0, "undecided"),
        ([1.0, 2.0, 3.0], [0.9, 1.91, 2.92], 1.0, "disagrees"),
        ([1.0], [5.0], 1.0, "undecided"),
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], 1.0, "undecided"),
    ],
)
@pytest.mark.parametrize("direction", ["greater", "less"])
def test_directions_are_judged_by_paired_differences(baseline, value, factor, expected, direction):
    if direction == "less":
        baseline, value = value, baseline
    result = compared(value, baseline, direction=direction, factor=factor)
    assert result.verdict == expected
    assert result.difference == pytest.approx(np.mean(value) - np.mean(baseline))
    assert result.seeds == len(value)
    if result.low is not None:
        differences = np.subtract(value, baseline)
        oracle = scipy.stats.t.interval(0.95, len(value) - 1, differences.mean(), scipy.stats.sem(differences))
        assert (result.low, result.high) == pytest.approx(oracle, rel=1e-5)


def test_seeds_are_paired_by_their_numbers():
    above = Point("a", {"beta": 1.0}, {"m": estimate([5.0, 2.0, 9.0])}, seeds=[2, 0, 7])
    below = Point("a", {"beta": 0.0}, {"m": estimate([1.1, 3.9, 0.0])}, seeds=[0, 2, 9])
    result = verdict(Expectation("s", "m", **COMPARED, direction="greater"), [above, below])
    assert result.seeds == 2
    assert result.difference == pytest.approx(np.mean([5.0 - 3.9, 2.0 - 1.1]))


def test_without_values_by_seed_errors_are_added():
    above, below = [2.0, 3.1, 4.2], [1.0, 2.0, 3.0]
    points = [without_values(point(above, beta=1.0)), without_values(point(below, beta=0.0))]
    result = verdict(Expectation("s", "m", **COMPARED, direction="greater"), points)
    half = scipy.stats.t.isf(0.025, 2) * (scipy.stats.sem(above) + scipy.stats.sem(below))
    assert (result.low, result.high) == pytest.approx((1.1 - half, 1.1 + half), rel=1e-5)
    assert result.verdict == "undecided"


def test_a_direction_with_a_number_agrees_only_near_it():
    values = {"direction": "greater", "tolerance": 0.2}
    above, below = [2.0, 2.2, 2.1], [1.0, 1.1, 1.06]
    assert compared(above, below, paper=2.05, **{**values, "tolerance": 0.5}).verdict == "agrees"
    assert compared(above, below, paper=9.0, **values).verdict == "agrees in direction"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1.05, 1.02, 1.03], "agrees"),
        ([0.95, 0.98, 0.97], "agrees"),
        ([0.9, 1.7, 1.2], "undecided"),
        ([1.5, 1.6, 1.55], "disagrees"),
        ([0.5, 0.6, 0.55], "disagrees"),
        ([1.0], "undecided"),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_similar_is_an_equivalence_test_within_a_share_of_the_other_value(value, expected, sign):
    value = [sign * v for v in value]
    assert compared(value, [sign * 1.0] * len(value), direction="similar", tolerance=0.1).verdict == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1.05, 1.02, 1.03], "agrees"),
        ([0.5, 0.7, 0.6], "agrees"),
        ([1.5, 1.6, 1.55], "disagrees"),
        ([0.9, 1.7, 1.2], "undecided"),
        ([0.5], "undecided"),
    ],
)
@pytest.mark.parametrize("direction", ["not greater", "not less"])
def test_no_better_is_one_sided(value, expected, direction):
    baseline = [1.0] * len(value)
    if direction == "not less":
        value, baseline = [-v for v in value], [-1.0] * len(value)
    assert compared(value, baseline, direction=direction, tolerance=0.1).verdict == expected


def test_a_value_is_compared_with_every_opponent():
    at, than = {"method": "ours"}, {"method": ["x", "y"]}
    expectation = Expectation("s", "m", at=at, than=than, direction="greater")
    ours, x = point([3.0, 3.1, 3.2], method="ours"), point([1.0, 1.2, 1.1], method="x")
    for y, expected in [([2.0, 2.0, 2.2], "agrees"), ([2.0, 3.5, 4.2], "undecided"), ([9.0, 9.1, 9.3], "disagrees")]:
        result = verdict(expectation, [ours, x, point(y, method="y")])
        assert result.verdict == expected
        assert "(the hardest: y)" in result.says
        assert result.difference == pytest.approx(np.mean([3.0, 3.1, 3.2]) - np.mean(y))
    assert verdict(expectation, [ours, x]).verdict == "not run"


def test_two_measures_of_one_point_are_compared():
    measures = {"m": estimate([3.0, 3.1, 3.2]), "n": estimate([1.0, 1.2, 1.1]), "o": estimate([2.0, 2.5, 2.2])}
    points = [Point("a", {"beta": 1.0}, measures, seeds=[0, 1, 2])]
    for names, hardest in [("n", None), (["n", "o"], "o")]:
        expectation = Expectation("s", "m", **AT_ONE, than_measure=names, direction="greater")
        result = verdict(expectation, points)
        assert result.verdict == "agrees"
        assert hardest is None or f"hardest: {hardest}" in result.says
    assert verdict(replace(expectation, direction="less"), points).verdict == "disagrees"
    assert verdict(replace(expectation, than_measure="p"), points).verdict == "not run"


def on_sets(**settings):
    """A statement about the sets x, y and z at two points; z was asked for and is not there."""
    ours = {"m": [0.5, 0.5, 0.6], "m_x": [3.0, 3.1, 3.2], "m_y": [2.0, 2.1, 2.3], "n_x": [2.0, 2.1, 2.2]}
    theirs = {"m": [0.1, 0.2, 0.1], "m_x": [1.0, 1.2, 1.1], "m_y": [1.7, 1.75, 1.9], "n_x": [2.6, 2.6, 2.75]}
    points = [
        Point("a", {"beta": beta}, {name: estimate(v) for name, v in values.items()}, seeds=[0, 1, 2])
        for beta, values in [(1.0, ours), (0.0, theirs)]
    ]
    return Expectation("s", "m", **{**COMPARED, "direction": "greater", **settings}), points


@pytest.mark.parametrize(
    ("sets", "settings", "expected", "hardest"),
    [
        (["x", "y"], {}, "agrees", "y, 0.0"),
        (["", "x"], {}, "agrees", "0.0"),
        (["x", "y", "z"], {}, "agrees", "y, 0.0"),
        (["x", "y"], {"direction": "less"}, "disagrees", "x, 0.0"),
        (["x", "y"], {"direction": "not greater", "tolerance": 0.5}, "disagrees", "x, 0.0"),
        (["x", "y"], {"direction": "similar", "tolerance": 5.0}, "agrees", "x, 0.0"),
        (["x"], {"than_measure": ["", "n"]}, "agrees", "x, 0.0, n"),
        (["y"], {"than_measure": "n"}, "not run", None),
        (["z"], {}, "not run", None),
    ],
)
def test_a_comparison_must_hold_on_every_set_that_a_reduced_setting_has(sets, settings, expected, hardest):
    result = verdict(*on_sets(sets=sets, **settings), ["other data"])
    assert result.verdict == expected
    assert hardest is None or f"(the hardest: {hardest})" in result.says


def test_the_papers_setting_needs_every_set_that_the_study_asks_for():
    expectation, points = on_sets(sets=["x", "y", "z"])
    for asked, expected in [(["m_x", "m_y"], "agrees"), (["m_x", "m_y", "m_z"], "not run"), (["m"], "not run")]:
        spec = replace(spec_of(expectation), evaluation=Evaluation(measures=asked))
        (result,) = verdicts.judge(spec, points)
        assert result.verdict == expected


@pytest.mark.parametrize(
    ("values", "bounds", "expected"),
    [
        ([1.0] * 6, {"low": 0.5}, "agrees"),
        ([1.0] * 5, {"low": 0.5}, "undecided"),
        ([0.0] * 6, {"high": 0.5}, "agrees"),
        ([0.0] * 6, {"low": 0.5}, "disagrees"),
        ([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], {"low": 0.5}, "undecided"),
    ],
)
def test_verdicts_of_the_audit_are_counted_by_seed(values, bounds, expected):
    points = [point(values, measure="audit_collusive", beta=1.0)]
    result = verdict(Expectation("s", "audit_collusive", **AT_ONE, **bounds), points)
    assert result.verdict == expected
    oracle = scipy.stats.binomtest(int(sum(values)), len(values)).proportion_ci(0.95)
    assert (result.low, result.high) == pytest.approx((oracle.low, oracle.high))


@pytest.mark.parametrize(
    ("curves", "expected", "best"),
    [
        ([[3.0, 2.0, 1.0, 2.5], [3.2, 2.1, 1.2, 2.4], [3.1, 2.2, 1.0, 2.6]], "agrees", 0.8),
        ([[3.0, 2.5, 3.1, 4.0], [3.0, 3.05, 3.2, 4.0], [3.0, 2.9, 3.3, 4.0]], "undecided", 0.4),
        ([[1.0, 2.0, 3.0, 4.0], [1.1, 2.0, 3.0, 4.0], [1.05, 2.0, 3.0, 4.0]], "disagrees", 0.4),
        ([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.1, 1.1], [4.0, 3.0, 2.15, 1.12]], "disagrees", 0.8),
        ([[3.0, 1.0, 2.0, 3.0]], "undecided", 0.4),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_extreme_strictly_inside_an_axis(curves, expected, best, sign):
    points = [
        point([sign * curve[i] for curve in curves], beta=beta, members=5)
        for i, beta in enumerate([0.0, 0.4, 0.8, 1.0])
    ]
    points += [replace(p, axes={**p.axes, "members": 10}) for p in points]
    direction = "lowest inside" if sign == 1 else "highest inside"
    expectation = Expectation("s", "m", at={"members": 5}, along="beta", direction=direction)
    result = verdict(expectation, points)
    table = np.array(curves)
    assert result.verdict == expected
    assert result.ours == pytest.approx(sign * table.mean(0)[1:-1].min())
    assert result.difference == pytest.approx(sign * (table.mean(0)[1:-1].min() - table.mean(0)[[0, -1]].min()))
    assert f"beta = {best:g}" in result.says
    two_points = [p for p in points if p.axes["beta"] in (0.0, 1.0)]
    assert verdict(expectation, two_points).verdict == verdict(expectation, []).verdict == "not run"


# Conditions, gains and groups


@pytest.mark.parametrize(
    ("fooled", "expected"),
    [
        ([0.97, 0.99, 0.96], "agrees"),
        ([1.0, 1.0, 1.0], "agrees"),
        ([0.97, 0.94, 0.96], "undecided"),
        ([0.9, 0.94, 0.8], "not comparable"),
        ([0.97, math.nan, 0.96], "undecided"),
        ([math.nan] * 3, "undecided"),
    ],
)
def test_a_statement_needs_its_conditions_in_every_run(fooled, expected):
    measures = {"m": estimate([0.8, 0.81, 0.83]), "fooled": estimate(fooled)}
    points = [Point("a", {"beta": 1.0}, measures, seeds=[0, 1, 2])]
    expectation = Expectation("s", "m", **AT_ONE, low=0.5, given=[Condition("fooled", low=0.95)])
    result = verdict(expectation, points)
    assert result.verdict == expected
    assert result.ours == pytest.approx(0.81333, rel=1e-4)
    assert verdict(replace(expectation, given=[]), points).verdict == "agrees"


def test_a_condition_may_be_of_another_point_and_has_two_ends():
    points = [point([0.8, 0.81, 0.83], beta=1.0), point([0.1, 0.12, 0.11], beta=0.0)]
    for bounds, expected in [
        ({"low": 0.05, "high": 0.2}, "agrees"),
        ({"high": 0.11}, "undecided"),
        ({"low": 0.5}, "not comparable"),
    ]:
        given = [Condition("m", {"beta": 0.0}, **bounds)]
        assert verdict(Expectation("s", "m", **AT_ONE, low=0.5, given=given), points).verdict == expected
    failing = Expectation("s", "m", **AT_ONE, high=0.5, given=[Condition("m", low=0.9)])
    assert verdict(failing, points).verdict == "not comparable", "a contradiction says nothing either"
    without = [without_values(one) for one in points]
    one_side = Expectation("s", "m", **AT_ONE, low=0.5, given=[Condition("m", high=0.82)])
    assert verdict(one_side, points).verdict == "undecided"
    assert verdict(one_side, without).verdict == "agrees", "of the mean, where that is all"


def gains(first, second):
    """Points of two data sets: a method's values, over a baseline of the seeds' numbers."""
    points = []
    for data, values in (("a", first), ("b", second)):
        base = [0.1 * seed for seed in range(len(values))]
        points += [
            point([b + v for b, v in zip(base, values, strict=True)], data=data, method="ours"),
            point(base, data=data, method="baseline"),
        ]
    return points


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, 1.1, 1.2], [2.0, 2.3, 2.1], "agrees"),
        ([3.0, 3.1, 3.2], [2.0, 2.3, 2.1], "disagrees"),
        ([1.0, 2.6, 1.2], [2.0, 2.3, 2.1], "undecided"),
    ],
)
def test_gains_are_compared_across_data(first, second, expected):
    expectation = Expectation(
        "s",
        "m",
        at={"method": "ours"},
        than={"data": "b", "method": "ours"},
        gain_over={"method": "baseline"},
        direction="less",
        data=["a"],
    )
    differing = {"a": [], "b": ["8 of 80 epochs"]}
    (result,) = verdicts.judge(spec_of(expectation, data=("a", "b")), gains(first, second), differing)
    assert (result.verdict, result.data) == (expected, "a")
    assert result.ours == pytest.approx(np.mean(first))
    assert result.difference == pytest.approx(np.mean(first) - np.mean(second))
    assert result.differences == ["8 of 80 epochs"], "the setting of both counts"
    (missing,) = verdicts.judge(spec_of(expectation, data=("a", "b")), gains(first, second)[:2])
    assert missing.verdict == "not run"


def all_of(*values, points=(), **settings):
    """The verdict on a group of statements that a value is above zero, one for each list of values."""
    parts = [Expectation(f"s{i}", f"m{i}", low=0.0, group="g", **settings) for i in range(len(values))]
    measures = {f"m{i}": estimate(v) for i, v in enumerate(values) if v}
    seeds = list(range(max(map(len, values))))
    spec = spec_of(Expectation("all", every="g"), *parts)
    return verdicts.judge(spec, [Point("a", {}, measures, seeds=seeds), *points])[0]


GOOD, BAD, OPEN = [1.0, 1.1, 1.2], [-1.0, -1.1, -1.2], [1.0, -1.0, 0.1]


@pytest.mark.parametrize(
    ("values", "expected", "words"),
    [
        ([GOOD, GOOD], "agrees", "2 statements: 2 agree"),
        ([GOOD, OPEN], "undecided", "1 agrees, 1 undecided"),
        ([GOOD, BAD, OPEN, []], "disagrees", "1 disagrees"),
        ([GOOD, []], "not run", "1 agrees, 1 not run"),
        ([[2.0], [3.0]], "undecided", "2 undecided"),
    ],
)
def test_a_group_agrees_where_all_of_its_statements_do(values, expected, words):
    result = all_of(*values)
    assert (result.verdict, result.ours, result.paper) == (expected, None, "all of them")
    assert words in result.says


def test_a_group_without_any_result_is_not_run():
    assert all_of([], []).verdict == "not run"
    elsewhere = Expectation("part", "m", low=0.0, group="g", data=["b"])
    spec = spec_of(Expectation("all", every="g"), elsewhere, data=("a", "b"))
    results = verdicts.judge(spec, [point(GOOD, data="b"), point(GOOD, data="a")])
    assert [(r.data, r.verdict) for r in results[:2]] == [("a", "not run"), ("b", "agrees")]


def test_a_group_is_not_comparable_where_a_part_is_not():
    given = [Condition("m1", low=5.0)]
    assert all_of(GOOD, GOOD, given=given).verdict == "not comparable"


def test_many_statements_rarely_contradict_by_chance():
    """Of a group in which nothing is true or false, at most 2.5 % disagree, however many statements it has."""
    generator = np.random.default_rng(1)
    runs = 400
    outcomes = [all_of(*generator.normal(size=(15, 3)).tolist()).verdict for _ in range(runs)]
    assert outcomes.count("disagrees") <= 0.025 * runs + 3 * math.sqrt(0.025 * runs)
    assert outcomes.count("agrees") == 0
    parts = [Expectation(f"s{i}", f"m{i}", **COMPARED, direction="greater", group="g") for i in range(15)]
    spec = spec_of(Expectation("all", every="g"), *parts)
    outcomes = []
    for _ in range(runs):
        tables = generator.normal(size=(2, 15, 3)).tolist()
        points = [
            Point("a", {"beta": float(b)}, {f"m{i}": estimate(v) for i, v in enumerate(table)}, seeds=[0, 1, 2])
            for b, table in enumerate(tables)
        ]
        outcomes.append(verdicts.judge(spec, points)[0].verdict)
    assert outcomes.count("disagrees") <= 0.025 * runs + 3 * math.sqrt(0.025 * runs)


# Settings, data, and studies in short


def test_a_papers_number_is_not_comparable_in_a_reduced_setting():
    number = Expectation("s", "m", **AT_ONE, paper=0.5, tolerance=0.1)
    points = [point([0.5, 0.51, 0.49], beta=1.0), point([0.1, 0.11, 0.13], beta=0.0)]
    assert verdict(number, points).verdict == "agrees"
    result = verdict(number, points, ["8 of 80 epochs"])
    assert (result.verdict, result.setting, result.differences) == ("not comparable", "reduced", ["8 of 80 epochs"])
    assert result.ours == pytest.approx(0.5)
    both = Expectation("s", "m", **COMPARED, direction="greater", paper=0.9, tolerance=0.1)
    assert verdict(both, points).verdict == "agrees in direction"
    assert verdict(both, points, ["8 of 80 epochs"]).verdict == "agrees"


def test_expectations_without_points_are_not_run():
    expectation = Expectation("s", "m", at={"beta": 0.5}, paper=1.0, tolerance=0.1)
    for points in ([], [point([1.0], beta=1.0)]):
        result = verdict(expectation, points)
        assert (result.verdict, result.ours, result.seeds) == ("not run", None, 0)
    elsewhere = Expectation("s", "m", **AT_ONE, low=0.0, data=["b", "c"])
    (result,) = verdicts.judge(spec_of(elsewhere), [point([1.0], beta=1.0)])
    assert (result.verdict, result.data) == ("not run", "b, c")
    unpaired = [point([2.0], beta=1.0), Point("a", {"beta": 0.0}, {"m": estimate([1.0])}, seeds=[7])]
    assert verdict(Expectation("s", "m", **COMPARED, direction="greater"), unpaired).verdict == "not run"


def test_each_data_set_is_judged_by_itself():
    expectation = Expectation("s", "m", **AT_ONE, low=0.5)
    points = [point([1.0, 1.1, 1.05], data="a", beta=1.0), point([0.1, 0.12, 0.11], data="b", beta=1.0)]
    results = verdicts.judge(spec_of(expectation, data=("a", "b")), points)
    assert [result.verdict for result in results] == ["agrees", "disagrees"]


def test_a_point_that_could_be_several_runs_is_not_judged():
    expectation = Expectation("s", "m", **AT_ONE, low=0.0)
    result = verdict(expectation, [point([1.0], beta=1.0, members=5), point([2.0], beta=1.0, members=10)])
    assert result.verdict == verdicts.NOT_RUN
    assert "which of several runs" in result.says


def test_a_study_in_short_shows_the_claim_and_counts_statements():
    def one(statement, outcome, differences=()):
        return Verdict("s", "a", outcome, "", 1.0, None, None, None, 3, statement=statement, differences=differences)

    paper = [one(0, "agrees"), one(0, "agrees"), one(1, "disagrees"), one(2, "undecided"), one(3, "not run")]
    reduced = [one(0, "agrees", ["x"]), one(0, "disagrees", ["x"]), one(1, "not comparable", ["x"])]
    assert verdicts.in_short([*paper, *reduced], "paper") == (
        {"agrees": 2},
        {"agrees": 2, "undecided": 1, "disagrees": 1},
    )
    assert verdicts.in_short([*paper, *reduced], "reduced") == (
        {"agrees": 1, "disagrees": 1},
        {"agrees": 1, "disagrees": 1},
    )
    assert verdicts.in_short([one(1, "agrees")], "paper") == ({}, {"agrees": 1})
    assert verdicts.in_short([], "paper") == ({}, {})


@pytest.mark.parametrize(
    ("outcomes", "claim", "news"),
    [
        (["agrees", "agrees"], "agrees", "good"),
        (["agrees", "disagrees"], "1 agrees, 1 disagrees", "fair"),
        (["undecided", "disagrees", "disagrees"], "1 undecided, 2 disagree", "bad"),
        (["undecided"], "undecided", "none"),
        ([], "not run", "none"),
    ],
)
def test_where_a_study_stands(outcomes, claim, news):
    judged = [Verdict("s", "a", outcome, "", 1.0, None, None, None, 3) for outcome in outcomes]
    made = Provenance("0", "3", {}, "any", [0], 1, 0, 1.0, None, [])
    result = Summary("collusion/figure-2", "paper", made, {}, ["data"], [], judged, stale="it is old")
    where = standing(library.load("collusion/figure-2"), [result], "paper")
    assert (where.claim, where.news) == (claim, news)
    assert where.statements.endswith("(scale paper, stale)") == bool(outcomes)
    assert standing(library.load("collusion/figure-2"), [result], "reduced").claim == ""

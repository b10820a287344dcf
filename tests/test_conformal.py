"""Split conformal prediction: slow oracles, coverage by simulation against its distribution, and edges."""

import dataclasses
import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus.conformal import METHODS, Conformal, calibrate

LEVELS = partial(ds.losses.quantile, levels=(0.1, 0.5, 0.9))
CLASSES = ["lac", "aps", "raps"]
REGRESSIONS = [
    ("mse", "normalised"),
    ("squared_error", "absolute"),
    ("gaussian_nll", "normalised"),
    ("gaussian_nll", "absolute"),
    (LEVELS, "cqr"),
    (LEVELS, "absolute"),
    (LEVELS, "normalised"),
]
PARTS = {"mse": 1, "squared_error": 1, "gaussian_nll": 2, LEVELS: 3}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classified(examples, seed=0, members=3, classes=5):
    """Logits of members, and labels that are drawn from other probabilities than theirs."""
    generator = torch.Generator().manual_seed(seed)
    truth = 2 * torch.randn(examples, classes, generator=generator, dtype=torch.float64)
    noise = torch.randn(members, examples, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(truth.softmax(-1), 1, generator=generator).squeeze(-1)
    return 1.5 * truth + noise, labels


def regressed(loss, examples, seed=0, members=3, targets=2):
    """Outputs of members, and targets that are near to them."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(members, examples, targets * PARTS[loss], generator=generator, dtype=torch.float64)
    return outputs, torch.randn(examples, targets, generator=generator, dtype=torch.float64)


# --- oracles, one example and one class at a time ---------------------------------------------------------------------


def slow_threshold(scores, level):
    """The ⌈(n + 1) level⌉-th smallest, by counting."""
    for value in sorted(scores):
        if sum(score <= value for score in scores) >= (len(scores) + 1) * level - 1e-9:
            return value
    return math.inf


def slow_class_score(probs, label, method, penalty, unpenalised):
    if method == "lac":
        return 1 - probs[label]
    likelier = [c for c in range(len(probs)) if probs[c] > probs[label] or (probs[c] == probs[label] and c < label)]
    score = sum(probs[c] for c in likelier) + probs[label]
    return score + penalty * max(0, len(likelier) + 1 - unpenalised) if method == "raps" else score


def slow_probs(outputs):
    odds = np.exp(outputs - outputs.max(-1, keepdims=True))
    return (odds / odds.sum(-1, keepdims=True)).mean(0)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("method", CLASSES)
def test_sets_equal_a_slow_oracle(method, level):
    (outputs, labels), (test, _) = classified(37), classified(20, seed=1)
    fitted = calibrate(outputs, labels, task="classification", method=method, penalty=0.07, unpenalised=2)
    probs = slow_probs(outputs.numpy())
    scores = [slow_class_score(p, y, method, 0.07, 2) for p, y in zip(probs, labels.tolist(), strict=True)]
    threshold = slow_threshold(scores, level)
    assert fitted.thresholds(level) == pytest.approx((threshold,), abs=1e-12)
    expected = np.zeros((20, 5), dtype=bool)
    for row, p in enumerate(slow_probs(test.numpy())):
        for c in range(5):
            expected[row, c] = slow_class_score(p, c, method, 0.07, 2) <= threshold + 1e-12
        if method != "lac":
            expected[row, p.argmax()] = True
    np.testing.assert_array_equal(fitted.sets(test, level=level).numpy(), expected)


def slow_ends(outputs, loss, method):
    """Lower and upper ends that are widened, and the unit, of one example and one target."""
    if loss is LEVELS:
        members = np.sort(outputs, -1)
        if method == "cqr":
            return members[:, 0].mean(), members[:, 2].mean(), 1.0
        mean = members[:, 1].mean()
        width = 2 * 1.2815515655446004
        variance = ((members[:, 2] - members[:, 0]) / width) ** 2
        spread = math.sqrt(variance.mean() + members.var(0).mean())
    elif loss == "gaussian_nll":
        mean = outputs[:, 0].mean()
        spread = math.sqrt((np.exp(outputs[:, 1]) + 1e-6).mean() + outputs[:, 0].var())
    else:
        mean, spread = outputs[:, 0].mean(), outputs[:, 0].std()
    return mean, mean, spread + 0.03 if method == "normalised" else 1.0


def of_target(outputs, loss, target):
    """Outputs ``[M, n, parts]`` of one of two targets."""
    parts = PARTS[loss]
    columns = [target, 2 + target] if loss == "gaussian_nll" else range(parts * target, parts * (target + 1))
    return outputs[..., list(columns)].numpy()


@pytest.mark.parametrize(("loss", "method"), REGRESSIONS)
def test_intervals_equal_a_slow_oracle(loss, method):
    (outputs, targets), (test, _) = regressed(loss, 29), regressed(loss, 11, seed=1)
    fitted = calibrate(outputs, targets, task="regression", loss=loss, method=method, floor=0.03)
    low, high = fitted.intervals(test, level=0.8)
    for target in range(2):
        own, truth = of_target(outputs, loss, target), targets[:, target].tolist()
        scores = []
        for row, y in enumerate(truth):
            below, above, unit = slow_ends(own[:, row], loss, method)
            scores.append(max(below - y, y - above) / unit)
        threshold = slow_threshold(scores, 0.8)
        assert fitted.thresholds(0.8)[target] == pytest.approx(threshold, rel=1e-9)
        own = of_target(test, loss, target)
        for row in range(11):
            below, above, unit = slow_ends(own[:, row], loss, method)
            assert float(low[row, target]) == pytest.approx(below - threshold * unit, abs=1e-9)
            assert float(high[row, target]) == pytest.approx(above + threshold * unit, abs=1e-9)


# --- coverage ---------------------------------------------------------------------------------------------------------

N, TESTS, REPEATS = 19, 100, 300


def expected_coverage(level):
    """Mean coverage, and 4.5 standard errors of REPEATS of it: less than a rank that is off by one changes the mean.

    For scores without ties, coverage given the calibration data is Beta(k, n + 1 − k), so that the number of covered
    examples is beta-binomial.
    """
    rank = math.ceil((N + 1) * level - 1e-9)
    mean = rank / (N + 1)
    variance = mean * (1 - mean) * (N + 1 + TESTS) / (TESTS * (N + 2))
    tolerance = 4.5 * math.sqrt(variance / REPEATS)
    assert level <= mean <= level + 1 / (N + 1)
    assert tolerance < 0.6 / (N + 1)
    return mean, tolerance


def class_coverage(method, level, randomised):
    shares = []
    for repeat in range(REPEATS):
        outputs, labels = classified(N + TESTS, seed=repeat)
        options = {"method": method, "randomised": randomised, "penalty": 0.1, "unpenalised": 1, "seed": repeat}
        fitted = calibrate(outputs[:, :N], labels[:N], task="classification", **options)
        sets = fitted.sets(outputs[:, N:], level=level)
        shares.append(float(sets[torch.arange(TESTS), labels[N:]].double().mean()))
    return float(np.mean(shares))


@pytest.mark.parametrize("level", [0.61, 0.91])
@pytest.mark.parametrize(("method", "randomised"), [("lac", False), ("aps", True), ("raps", True)])
def test_sets_hold_the_label_as_often_as_theory_says(method, randomised, level):
    mean, tolerance = expected_coverage(level)
    assert abs(class_coverage(method, level, randomised) - mean) < tolerance


@pytest.mark.parametrize("method", ["aps", "raps"])
def test_sets_without_draws_hold_the_label_at_least_as_often(method):
    mean, tolerance = expected_coverage(0.61)
    assert class_coverage(method, 0.61, False) > mean - tolerance


@pytest.mark.parametrize(("loss", "method"), REGRESSIONS)
def test_intervals_hold_the_target_as_often_as_theory_says(loss, method):
    mean, tolerance = expected_coverage(0.81)
    shares = []
    for repeat in range(REPEATS):
        outputs, targets = regressed(loss, N + TESTS, seed=repeat, targets=1)
        fitted = calibrate(outputs[:, :N], targets[:N], task="regression", loss=loss, method=method)
        low, high = fitted.intervals(outputs[:, N:], level=0.81)
        shares.append(float(((low <= targets[N:]) & (targets[N:] <= high)).double().mean()))
    assert abs(np.mean(shares) - mean) < tolerance


def test_a_shift_of_the_data_breaks_the_guarantee():
    outputs, targets = regressed("mse", 500, targets=1)
    fitted = calibrate(outputs, targets, task="regression", method="absolute")
    low, high = fitted.intervals(outputs, level=0.9)
    shifted = targets + 3
    assert ((low <= shifted) & (shifted <= high)).double().mean() < 0.6


def test_coverage_of_draws_needs_separate_streams_for_calibration_and_test():
    outputs, labels = classified(200)
    fitted = calibrate(outputs, labels, task="classification", method="aps", randomised=True, seed=3)
    again = calibrate(outputs, labels, task="classification", method="aps", randomised=True, seed=3)
    other = calibrate(outputs, labels, task="classification", method="aps", randomised=True, seed=4)
    assert fitted == again
    assert fitted.scores != other.scores
    assert torch.equal(fitted.sets(outputs), again.sets(outputs))
    # With the same draws, exactly ⌈201 · 0.9⌉ of the calibration labels would be in their sets at every seed.
    counts = set()
    for seed in range(10):
        own = dataclasses.replace(fitted, seed=seed)
        scored = calibrate(outputs, labels, task="classification", method="aps", randomised=True, seed=seed)
        own = dataclasses.replace(own, scores=scored.scores)
        counts.add(int(own.sets(outputs)[torch.arange(200), labels].sum()))
    assert len(counts) > 1


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "level", "finite"),
    [(8, 0.9, False), (9, 0.9, True), (1, 0.5, True), (1, 0.51, False), (18, 0.95, False), (19, 0.95, True)],
)
def test_too_few_examples_give_everything(examples, level, finite):
    outputs, labels = classified(examples)
    for method in CLASSES:
        fitted = calibrate(outputs, labels, task="classification", method=method)
        assert math.isfinite(fitted.thresholds(level)[0]) == finite
        assert finite or bool(fitted.sets(classified(50, seed=2)[0], level=level).all())
    for loss, method in REGRESSIONS:
        outputs, targets = regressed(loss, examples)
        fitted = calibrate(outputs, targets, task="regression", loss=loss, method=method)
        low, high = fitted.intervals(outputs, level=level)
        assert bool(low.isfinite().all() and high.isfinite().all()) == finite
        assert finite or (bool((low == -math.inf).all()) and bool((high == math.inf).all()))


def test_the_rank_is_not_moved_by_rounding():
    scores = (tuple(float(i) for i in range(1, 1000)),)
    kind = ds.output_kinds.output_kind("regression")
    fitted = Conformal("absolute", kind, 1, 999, scores)
    for hundredths in range(1, 100):
        assert fitted.thresholds(hundredths / 100) == (10.0 * hundredths,)


@pytest.mark.parametrize("method", CLASSES)
def test_ties_are_all_in(method):
    outputs = torch.zeros(2, 30, 4)
    fitted = calibrate(outputs, torch.arange(30) % 4, task="classification", method=method)
    sets = fitted.sets(outputs, level=0.8)
    if method == "lac":
        assert bool(sets.all())  # one score for all
    else:
        assert sets.tolist() == [[True, True, True, True]] * 30  # 24.8 of 30 labels need the fourth class
        assert fitted.sets(outputs, level=0.45).tolist() == [[True, True, False, False]] * 30


def test_equal_scores_cover_more_not_less():
    outputs, targets = torch.zeros(1, 20, 1), torch.tensor([1.0] * 15 + [2.0] * 5)
    fitted = calibrate(outputs, targets, task="regression", method="absolute")
    assert fitted.thresholds(0.5) == fitted.thresholds(0.71) == (1.0,)
    low, high = fitted.intervals(outputs, level=0.5)
    assert float(((low[:, 0] <= targets) & (targets <= high[:, 0])).double().mean()) == 0.75


@pytest.mark.parametrize("method", CLASSES)
def test_one_member_and_identical_members_are_the_same(method):
    outputs, labels = classified(40, members=1)
    one = calibrate(outputs, labels, task="classification", method=method)
    three = calibrate(outputs.repeat(3, 1, 1), labels, task="classification", method=method)
    np.testing.assert_allclose(one.scores, three.scores, rtol=1e-12)


def test_members_that_all_agree_have_no_spread_to_normalise_by():
    outputs, targets = regressed("mse", 30, members=1)
    for equal in (outputs, outputs.repeat(3, 1, 1)):
        with pytest.raises(ValueError, match="members that all agree. Use method='absolute', or a floor above 0"):
            calibrate(equal, targets, task="regression")
        plain = calibrate(equal, targets, task="regression", method="absolute")
        floored = calibrate(equal, targets, task="regression", method="normalised", floor=0.5)
        ends = zip(plain.intervals(equal), floored.intervals(equal), strict=True)
        assert all(torch.allclose(a, b) for a, b in ends)


def test_an_example_without_spread_has_an_infinite_score_unless_it_is_exact():
    outputs, targets = regressed("mse", 20, targets=1)
    outputs[:, 0], outputs[:, 1] = outputs[0, 0], targets[1]
    fitted = calibrate(outputs, targets, task="regression")
    assert len(fitted.scores[0]) == 19
    assert fitted.scores[0][0] == 0
    assert fitted.thresholds(19 / 21)[0] == fitted.scores[0][-1]
    assert fitted.thresholds(20 / 21) == (math.inf,)
    low, high = fitted.intervals(outputs, level=20 / 21)
    assert bool((low == -math.inf).all())
    assert bool((high == math.inf).all())
    json.dumps(fitted.record(), allow_nan=False)


def test_quantiles_that_are_too_far_apart_meet_in_the_middle():
    outputs = torch.tensor([-10.0, 0.0, 10.0]).repeat(2, 50, 1)
    fitted = calibrate(outputs, torch.linspace(-1, 1, 50), task="regression", loss="quantile")
    assert fitted.thresholds(0.9)[0] < -9
    low, high = fitted.intervals(torch.tensor([[[0.0, 1.0, 3.0]]]), level=0.9)
    assert low.item() == high.item() == 1.5


@pytest.mark.parametrize("method", CLASSES)
def test_sets_and_intervals_grow_with_the_level(method):
    (outputs, labels), (test, _) = classified(60), classified(40, seed=5)
    fitted = calibrate(outputs, labels, task="classification", method=method)
    sets = [fitted.sets(test, level=level) for level in (0.1, 0.5, 0.8, 0.95)]
    assert all(bool((small <= large).all()) for small, large in itertools.pairwise(sets))
    assert bool((sets[0] != sets[-1]).any())


@pytest.mark.parametrize("method", CLASSES)
def test_the_order_of_classes_does_not_matter(method):
    (outputs, labels), (test, _) = classified(60), classified(40, seed=5)
    order = torch.tensor([3, 0, 4, 2, 1])
    fitted = calibrate(outputs, labels, task="classification", method=method)
    moved = calibrate(outputs[..., order], order.argsort()[labels], task="classification", method=method)
    assert torch.equal(moved.sets(test[..., order]), fitted.sets(test)[:, order])


@pytest.mark.parametrize(("loss", "method"), REGRESSIONS)
def test_intervals_follow_the_unit_of_the_targets(loss, method):
    def scaled(outputs):
        if loss != "gaussian_nll":
            return 10 * outputs + 4
        mean, log_variance = outputs.chunk(2, -1)
        return torch.cat([10 * mean + 4, log_variance + math.log(100)], -1)

    outputs, targets = regressed(loss, 40)
    fitted = calibrate(outputs, targets, task="regression", loss=loss, method=method)
    other = calibrate(scaled(outputs), 10 * targets + 4, task="regression", loss=loss, method=method)
    for end, moved in zip(fitted.intervals(outputs), other.intervals(scaled(outputs)), strict=True):
        torch.testing.assert_close(10 * end + 4, moved, rtol=1e-4, atol=1e-4)  # the floor of variances has a unit


def test_the_penalty_makes_large_sets_rarer():
    (outputs, labels), (test, _) = classified(500, classes=40), classified(300, seed=1, classes=40)
    sizes = {
        penalty: calibrate(outputs, labels, task="classification", method="raps", penalty=penalty, unpenalised=3)
        .sets(test)
        .sum(-1)
        for penalty in (0.0, 0.2)
    }
    aps = calibrate(outputs, labels, task="classification", method="aps").sets(test).sum(-1)
    assert torch.equal(sizes[0.0], aps)
    assert sizes[0.2].max() < aps.max()


def test_pools_and_kinds_are_those_of_the_prediction():
    outputs, labels = classified(60)
    for pool in ("probability", "score"):
        fitted = calibrate(outputs, labels, task="classification", pool=pool)
        pooled = ds.predictive(outputs, task="classification", pool=pool).probs
        expected = (1 - pooled[torch.arange(60), labels]).sort().values
        torch.testing.assert_close(torch.tensor(fitted.scores[0], dtype=torch.float64), expected)
    probs = calibrate(outputs.softmax(-1), labels, task="classification", kind="probabilities")
    np.testing.assert_allclose(probs.scores, calibrate(outputs, labels, task="classification").scores, rtol=1e-12)
    votes = calibrate(outputs, labels, task="classification", loss="zero_one", pool="vote")
    assert {round(3 * score) / 3 for score in votes.scores[0]} <= {0, 1 / 3, 2 / 3, 1}


def test_arrays_and_half_precision_are_taken():
    outputs, labels = classified(60)
    fitted = calibrate(outputs, labels, task="classification")
    assert calibrate(outputs.numpy(), labels.numpy(), task="classification") == fitted
    assert torch.equal(fitted.sets(outputs.numpy()), fitted.sets(outputs))
    half = outputs.half()
    assert calibrate(half, labels, task="classification") == calibrate(half.double(), labels, task="classification")
    values, targets = regressed("mse", 30, targets=1)
    flat = calibrate(values.squeeze(-1), targets.squeeze(-1), task="regression")
    assert flat == calibrate(values, targets, task="regression")


# --- records ----------------------------------------------------------------------------------------------------------


def every_calibration():
    for method in CLASSES:
        yield calibrate(*classified(25), task="classification", method=method)
    yield calibrate(*classified(25), task="classification", method="aps", randomised=True, seed=7)
    for loss, method in REGRESSIONS:
        yield calibrate(*regressed(loss, 25), task="regression", loss=loss, method=method, floor=0.25)


def test_a_record_survives_json():
    for fitted in every_calibration():
        assert Conformal.of_record(json.loads(json.dumps(fitted.record(), allow_nan=False))) == fitted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 1; got 2"),
        ({"method": "lac"}, "`method` must be one of 'normalised', 'absolute'"),
        ({"scores": [[2.0, 1.0]]}, "rising order"),
        ({"scores": [[1.0], [1.0]]}, "`scores` must be 1 rows"),
        ({"scores": [[float("nan")]]}, "`scores` must be a finite number"),
        ({"examples": 1}, "up to 1 numbers"),
        ({"seed": -1}, "`seed`"),
        ({"floor": "no"}, "`floor`"),
        ({"extra": 1}, "entries of Conformal.record"),
        ({"kind": {}}, "entries of Conformal.record"),
    ],
)
def test_a_changed_record_is_refused(change, message, unchecked):
    fitted = calibrate(*regressed("mse", 5, targets=1), task="regression")
    with pytest.raises((ValueError, TypeError), match=message):
        Conformal.of_record({**fitted.record(), **change})
    with pytest.raises(ValueError, match="format 1; got list"):
        Conformal.of_record([])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["outputs", "targets"])
def test_nan_is_refused(where):
    outputs, targets = regressed("mse", 10)
    (outputs[1] if where == "outputs" else targets)[3] = math.nan
    with pytest.raises(ValueError, match=f"`{where}` must be"):
        calibrate(outputs, targets, task="regression")
    fitted = calibrate(*regressed("mse", 10), task="regression")
    outputs[0, 0, 0] = math.inf
    with pytest.raises(ValueError, match="NaN or infinity"):
        fitted.intervals(outputs)


def test_what_does_not_fit_is_refused_by_name(unchecked):
    outputs, labels = classified(10)
    fitted = calibrate(outputs, labels, task="classification")
    values = calibrate(*regressed("mse", 10), task="regression")
    with pytest.raises(ValueError, match="`method` must be one of 'lac', 'aps', 'raps'; got 'cqr'"):
        calibrate(outputs, labels, task="classification", method="cqr")
    with pytest.raises(ValueError, match="one label at a time"):
        calibrate(outputs, labels, task="multilabel")
    with pytest.raises(ValueError, match="labels from 0 to 4"):
        calibrate(outputs, labels + 3, task="classification")
    with pytest.raises(ValueError, match=r"`targets` must have shape \[B=10\]"):
        calibrate(outputs, labels[:9], task="classification")
    with pytest.raises(TypeError, match="be class labels"):
        calibrate(outputs, labels.float(), task="classification")
    with pytest.raises(ValueError, match="be False for other methods"):
        calibrate(outputs, labels, task="classification", randomised=True)
    with pytest.raises(ValueError, match="have C=5 outputs, as in calibration"):
        fitted.sets(outputs[..., :4])
    with pytest.raises(TypeError, match="Use sets"):
        fitted.intervals(outputs)
    with pytest.raises(TypeError, match="Use intervals"):
        values.sets(outputs)
    with pytest.raises(ValueError, match="`level` must be a number above 0 and below 1; got 1"):
        fitted.sets(outputs, level=1)
    with pytest.raises(ValueError, match="hold at least one member, example and output"):
        calibrate(outputs[:, :0], labels[:0], task="classification")
    levels = partial(ds.losses.quantile, levels=(0.1, 0.9))
    with pytest.raises(ValueError, match=r"have the level 0.5 for method='absolute'; got the levels \(0.1, 0.9\)"):
        calibrate(outputs[..., :2], random(10), task="regression", loss=levels, method="absolute")
    one = partial(ds.losses.quantile, levels=(0.5,))
    with pytest.raises(ValueError, match="two levels or more"):
        calibrate(outputs[..., :1], random(10), task="regression", loss=one)


def test_the_table_of_methods_names_what_the_page_names():
    assert {name for names in METHODS.values() for name in names} == set(CLASSES) | {m for _, m in REGRESSIONS}

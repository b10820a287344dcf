"""Metrics of regression: scoring rules against integrals, scipy and scikit-learn; intervals against their promise."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.metrics import mean_absolute_error, mean_pinball_loss, r2_score, root_mean_squared_error

import dissensus as ds
from dissensus import metrics

M, B, D = 4, 6, 2


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture(members=M, seed=0):
    """Means, variances, targets and weights."""
    means, variances = 2 * draw(members, B, D, seed=seed), (0.6 * draw(members, B, D, seed=seed + 1)).exp()
    return (
        means,
        variances,
        draw(B, D, seed=seed + 2),
        torch.arange(1.0, members + 1).double() / sum(range(1, members + 1)),
    )


def crps_by_integral(cdf, y, low=-60.0, high=60.0):
    """∫ (F(x) − 1[x ≥ y])² dx."""
    below = integrate.quad(lambda x: cdf(x) ** 2, low, y, limit=200, points=[y - 1])[0]
    return below + integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, high, limit=200, points=[y + 1])[0]


# --- scoring rules


def test_crps_of_a_gaussian_is_its_integral():
    means, variances, y, _ = mixture(1)
    result = metrics.crps_gaussian(means[0], variances[0], y)
    for place in np.ndindex(B, D):
        normal = stats.norm(float(means[0][place]), math.sqrt(float(variances[0][place])))
        assert float(result[place]) == pytest.approx(crps_by_integral(normal.cdf, float(y[place])), abs=1e-8)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_crps_of_a_mixture_is_its_integral(members, weighted):
    means, variances, y, weights = mixture(members)
    result = metrics.crps_mixture(means, variances, y, weights=weights if weighted else None)
    w = weights.numpy() if weighted else np.full(members, 1 / members)
    for place in [(0, 0), (3, 1)]:
        mu, std = means[:, *place].numpy(), variances[:, *place].sqrt().numpy()
        expected = crps_by_integral(lambda x, mu=mu, std=std: float(w @ stats.norm.cdf(x, mu, std)), float(y[place]))
        assert float(result[place]) == pytest.approx(expected, abs=1e-7)


def test_crps_of_a_mixture_is_its_double_sum():
    means, variances, y, weights = mixture(5)

    def a(mu, v):
        return mu * (2 * stats.norm.cdf(mu / v**0.5) - 1) + 2 * v**0.5 * stats.norm.pdf(mu / v**0.5)

    mu, v, w = means.numpy(), variances.numpy(), weights.numpy()
    expected = sum(w[i] * a(y.numpy() - mu[i], v[i]) for i in range(5))
    expected -= sum(w[i] * w[j] * a(mu[i] - mu[j], v[i] + v[j]) for i in range(5) for j in range(5)) / 2
    np.testing.assert_allclose(metrics.crps_mixture(means, variances, y, weights=weights), expected, rtol=1e-12)


def test_equal_members_and_one_member_are_one_gaussian():
    means, variances, y, _ = mixture(1)
    for members in (1, 2, 5):
        many = means.expand(members, B, D), variances.expand(members, B, D)
        torch.testing.assert_close(metrics.crps_mixture(*many, y), metrics.crps_gaussian(means[0], variances[0], y))
        torch.testing.assert_close(metrics.nll_mixture(*many, y), metrics.nll_gaussian(means[0], variances[0], y))
        torch.testing.assert_close(metrics.pit(*many, y), torch.special.ndtr((y - means[0]) / variances[0].sqrt()))


def test_rules_of_members_without_variance_are_those_of_their_values():
    means, _, y, _ = mixture(5)
    zero = torch.zeros_like(means)
    torch.testing.assert_close(metrics.crps_mixture(means, zero, y), metrics.crps_ensemble(means, y))
    torch.testing.assert_close(metrics.crps_gaussian(means[0], zero[0], y), (means[0] - y).abs())
    assert metrics.crps_gaussian(y, zero[0], y).tolist() == [[0.0] * D] * B
    torch.testing.assert_close(metrics.pit(means, zero, y), (means < y).double().mean(0))
    assert metrics.pit(y[None], zero[:1], y).unique().tolist() == [0.5]


@pytest.mark.parametrize("members", [1, 2, 7, 10])
def test_crps_of_point_predictions_is_its_double_sum(members):
    x, y = draw(members, B, D).numpy(), draw(B, D, seed=1).numpy()
    x[:, 0] = x[:1, 0]  # ties
    outer = np.abs(x - y).mean(0)
    inner = np.abs(x[:, None] - x[None]).sum((0, 1)) / 2
    result = metrics.crps_ensemble(x, y)
    np.testing.assert_allclose(result, outer - inner / members**2, atol=1e-13)
    if members > 1:
        fair = metrics.crps_ensemble(x, y, fair=True)
        np.testing.assert_allclose(fair, outer - inner / (members * (members - 1)), atol=1e-13)
    shifted = metrics.crps_ensemble(x + 1e6, y + 1e6)  # no cancellation
    np.testing.assert_allclose(shifted, result, atol=1e-8)


def test_the_fair_crps_of_few_members_is_that_of_many_in_expectation():
    x, y = draw(4, 40_000), 0.5 * draw(40_000, seed=1)
    whole = metrics.crps_gaussian(torch.zeros_like(y), torch.ones_like(y), y).mean()
    fair, plain = (metrics.crps_ensemble(x, y, fair=fair).mean() for fair in (True, False))
    assert float(fair) == pytest.approx(float(whole), abs=0.01)
    assert float(plain - whole) > 0.1


def test_pinball_loss_is_scikit_learns():
    levels = (0.05, 0.5, 0.95)
    q, y = draw(B, D, 3).sort(-1).values, draw(B, D, seed=1)
    result = metrics.pinball(q, y, levels=levels)
    for k, level in enumerate(levels):
        expected = mean_pinball_loss(y, q[..., k], alpha=level)
        assert float(result[..., k].mean()) == pytest.approx(expected)


def test_crps_of_many_quantiles_is_that_of_their_distribution():
    levels = (np.arange(2000) + 0.5) / 2000
    q = torch.from_numpy(stats.norm.ppf(levels, 1.0, 2.0)).expand(3, 1, -1)
    y = torch.tensor([0.0, 1.0, 5.0])
    expected = metrics.crps_gaussian(torch.ones(3, 1), torch.full((3, 1), 4.0), y)
    torch.testing.assert_close(metrics.crps_quantiles(q, y, levels=levels), expected, rtol=0, atol=1e-3)


def test_crps_of_quantiles_is_the_weighted_interval_score():
    """Bracher et al., 2021, equation 2: 1/(K + ½) (½ |y − m| + Σ_k α_k/2 IS_αk)."""
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    q, y = 2 * draw(B, D, 5).sort(-1).values, draw(B, D, seed=1)
    total = 0.5 * (y - q[..., 2]).abs()
    for low, high, alpha in ((0, 4, 0.1), (1, 3, 0.5)):
        total = total + alpha / 2 * metrics.winkler(q[..., low], q[..., high], y, level=1 - alpha)
    torch.testing.assert_close(metrics.crps_quantiles(q, y, levels=levels), total / 2.5)


def test_interval_score_by_hand():
    low, high = torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, math.inf])
    result = metrics.winkler(low, high, torch.tensor([0.5, -0.25, 1.5, 3.0]), level=0.8)
    torch.testing.assert_close(result, torch.tensor([1.0, 1 + 10 * 0.25, 1 + 10 * 0.5, math.inf]).double())


def test_likelihoods_are_scipys():
    means, variances, y, weights = mixture()
    densities = stats.norm.logpdf(y, means, variances.sqrt()).sum(-1)  # [M, B]
    np.testing.assert_allclose(metrics.nll_gaussian(means[0], variances[0], y), -densities[0], rtol=1e-12)
    expected = -np.log((weights.numpy()[:, None] * np.exp(densities)).sum(0))
    np.testing.assert_allclose(metrics.nll_mixture(means, variances, y, weights=weights), expected, rtol=1e-12)
    far = metrics.nll_mixture(means, variances, y + 1e4)
    assert far.isfinite().all()


def test_pit_is_the_distribution_function():
    means, variances, y, weights = mixture()
    expected = (weights.numpy()[:, None, None] * stats.norm.cdf(y, means, variances.sqrt())).sum(0)
    np.testing.assert_allclose(metrics.pit(means, variances, y, weights=weights), expected, rtol=1e-12)


RULES = {
    "crps_gaussian": lambda means, variances, y: metrics.crps_gaussian(means[0], variances[0], y),
    "crps_mixture": metrics.crps_mixture,
    "crps_ensemble": lambda means, variances, y: metrics.crps_ensemble(means, y),
    "crps_quantiles": lambda means, variances, y: metrics.crps_quantiles(
        means[:3].movedim(0, -1), y, levels=(0.1, 0.5, 0.9)
    ),
    "nll_gaussian": lambda means, variances, y: metrics.nll_gaussian(means[0], variances[0], y),
    "nll_mixture": metrics.nll_mixture,
    "pit": metrics.pit,
    "winkler": lambda means, variances, y: metrics.winkler(means[0] - 1, means[0] + variances[0], y, level=0.9),
}


@pytest.mark.parametrize("name", RULES)
def test_nan_affects_its_example_only(name):
    means, variances, y, _ = mixture()
    expected = RULES[name](means, variances, y)
    for what in range(3):
        changed = [means.clone(), variances.clone(), y.clone()]
        changed[what][..., 2, 1] = math.nan
        result = RULES[name](*changed)
        wrong = result.isnan().reshape(B, -1).any(-1)
        takes_no_variance = what == 1 and name in ("crps_ensemble", "crps_quantiles")
        assert wrong.nonzero().flatten().tolist() == ([] if takes_no_variance else [2])
        torch.testing.assert_close(result[~wrong], expected[~wrong])


@pytest.mark.parametrize("name", RULES)
def test_columns_arrays_and_half_precision(name):
    means, variances, y, _ = (part[..., :1] if part.ndim > 1 else part for part in mixture())
    expected = RULES[name](means, variances, y)
    torch.testing.assert_close(RULES[name](means, variances, y.squeeze(-1)), expected)
    if name not in ("winkler", "crps_quantiles", "crps_gaussian", "nll_gaussian"):
        torch.testing.assert_close(RULES[name](means.numpy(), variances.numpy(), y.numpy()), expected)
    half = RULES[name](means.bfloat16(), variances.bfloat16(), y)
    assert half.dtype == torch.float64
    torch.testing.assert_close(half, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: metrics.crps_gaussian(torch.zeros(2), torch.tensor([1.0, -1.0]), torch.zeros(2)),
            "`variance` must be",
        ),
        (
            lambda: metrics.nll_gaussian(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2)),
            "`variance` must be above",
        ),
        (lambda: metrics.crps_mixture(torch.zeros(3, 2), torch.ones(2, 2), torch.zeros(2)), "`variances` must have"),
        (
            lambda: metrics.crps_mixture(torch.zeros(3, 2), torch.ones(3, 2), torch.zeros(3)),
            "`targets` must have shape",
        ),
        (lambda: metrics.crps_mixture(torch.zeros(0, 2), torch.ones(0, 2), torch.zeros(2)), "`means` must be floating"),
        (lambda: metrics.crps_mixture(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(2), weights=[2.0]), "sum to 1"),
        (lambda: metrics.crps_ensemble(torch.zeros(1, 2), torch.zeros(2), fair=True), "two members or more"),
        (lambda: metrics.pinball(torch.zeros(2, 3), torch.zeros(2), levels=(0.1, 0.9)), "for each of the 3 quantiles"),
        (lambda: metrics.pinball(torch.zeros(2, 2), torch.zeros(2), levels=(0.9, 0.1)), "ascending order"),
        (lambda: metrics.pinball(torch.zeros(2, 1), torch.zeros(2), levels=(1.0,)), "`levels` must be a number"),
        (lambda: metrics.winkler(torch.ones(2), torch.zeros(2), torch.zeros(2), level=0.9), r"quantiles\.sort"),
        (lambda: metrics.winkler(torch.ones(2), torch.ones(2), torch.zeros(2), level=1.0), "`level` must be a number"),
        (lambda: metrics.regression(torch.tensor([math.nan]), torch.zeros(1)), "`predictions` must be finite"),
        (lambda: metrics.regression(torch.zeros(3, 2), torch.zeros(3)), "`targets` must have shape"),
        (lambda: metrics.regression(torch.zeros(0), torch.zeros(0)), "at least one example"),
        (lambda: metrics.mean_interval(torch.tensor([1.0, math.nan])), "`values` must be numbers"),
        (lambda: metrics.distribution_calibration(torch.tensor([1.5])), "`pit` must be numbers from 0 to 1"),
        (
            lambda: metrics.variance_temperature(torch.zeros(2), torch.zeros(2), torch.zeros(2)),
            "`variance` must be above",
        ),
        (lambda: metrics.variance_temperature(torch.zeros(2), torch.ones(2), torch.full((2,), math.nan)), "be finite"),
        (lambda: metrics.temper_variance(torch.zeros(2), torch.ones(2), torch.zeros(2)), "`means` must be floating"),
    ],
)
def test_what_is_wrong_is_named(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call()


# --- numbers of a data set


@pytest.mark.parametrize("targets", [1, 3])
def test_errors_are_scikit_learns(targets):
    y, predictions = draw(50, targets), draw(50, targets, seed=1) / 2
    y[:, 0] += 100
    result = metrics.regression(predictions, y, repeats=50)
    assert result.rmse.value == pytest.approx(root_mean_squared_error(y, predictions))
    assert result.mae.value == pytest.approx(mean_absolute_error(y, predictions))
    assert result.r2.value == pytest.approx(r2_score(y, predictions))
    for interval in result:
        assert interval.low <= interval.value <= interval.high
        assert interval.low < interval.high


def test_r2_of_constant_targets_is_undefined():
    result = metrics.regression(torch.tensor([1.0, 2.0]), torch.ones(2), repeats=10)
    assert math.isnan(result.r2.value)
    assert result.rmse.value == pytest.approx(math.sqrt(0.5))
    only = metrics.regression(torch.tensor([1.0]), torch.tensor([3.0]), repeats=0)
    assert only.rmse.value == 2.0
    assert math.isnan(only.rmse.low)


def test_bootstrap_intervals_hold_what_they_promise():
    held = {"rmse": 0, "mae": 0, "r2": 0, "mean": 0}
    truth = {"rmse": 1.0, "mae": math.sqrt(2 / math.pi), "r2": 0.8, "mean": 0.5 * math.log(2 * math.pi) + 0.5}
    for seed in range(150):
        signal, noise = 2 * draw(100, seed=2 * seed), draw(100, seed=2 * seed + 1)
        result = metrics.regression(signal, signal + noise, repeats=200, seed=seed)
        nll = metrics.nll_gaussian(torch.zeros(100, 1).double(), torch.ones(100, 1).double(), noise)
        mean = metrics.mean_interval(nll, repeats=200, seed=seed)
        for name, interval in {**result._asdict(), "mean": mean}.items():
            held[name] += interval.low <= truth[name] <= interval.high
    assert all(0.87 <= count / 150 <= 1.0 for count in held.values()), held


def test_coverage_width_and_score_of_intervals():
    y = draw(400)
    ends = stats.norm.ppf(0.9)
    result = metrics.prediction_intervals(torch.full((400,), -ends), torch.full((400,), ends), y, level=0.8)
    inside = int(((y >= -ends) & (y <= ends)).sum())
    assert result.coverage == metrics.wilson(inside, 400)
    assert result.width == metrics.Interval(*[pytest.approx(2 * ends)] * 3)
    assert result.score.low < 2 * stats.norm.pdf(ends) / 0.1 < result.score.high  # 2φ(z)/(α/2), at the truth
    everything = metrics.prediction_intervals(torch.full((5,), -math.inf), torch.full((5,), math.inf), y[:5], level=0.8)
    assert everything.coverage.value == 1.0
    assert everything.coverage.low < 0.7
    assert everything.width.value == everything.score.value == math.inf


def test_targets_of_one_example_count_as_one():
    y = draw(40, 1).expand(40, 5)
    low, high = torch.full((40, 5), -1.0), torch.full((40, 5), 1.0)
    five = metrics.prediction_intervals(low, high, y, level=0.7, repeats=50)
    one = metrics.prediction_intervals(low[:, :1], high[:, :1], y[:, :1], level=0.7, repeats=50)
    for a, b in zip(five, one, strict=True):
        assert a == pytest.approx(b)


@pytest.mark.parametrize("kind", ["interval", "quantile"])
def test_calibration_of_distributions(kind):
    y = draw(3000)
    places = {
        name: metrics.pit(torch.full((1, 3000), mean).double(), torch.full((1, 3000), std**2).double(), y)
        for name, mean, std in (("right", 0.0, 1.0), ("narrow", 0.0, 0.5), ("shifted", 0.5, 1.0))
    }
    results = {name: metrics.distribution_calibration(pit, kind=kind, repeats=200) for name, pit in places.items()}
    right = results["right"]
    assert right.expected.tolist() == pytest.approx([0.05 * k for k in range(1, 20)])
    u = places["right"].numpy()
    for level, observed in zip(right.expected.tolist(), right.observed.tolist(), strict=True):
        within = np.abs(u - 0.5) <= level / 2 if kind == "interval" else u <= level
        assert observed == pytest.approx(within.mean())
    assert right.error.low == 0.0
    assert right.error.value < 0.02
    truth = {"narrow": (0.5, 0.0), "shifted": (1.0, 0.5)}
    for name, (std, mean) in truth.items():
        levels = np.arange(1, 20) * 0.05
        upper = stats.norm.ppf((1 + levels) / 2 if kind == "interval" else levels, mean, std)
        lower = stats.norm.ppf((1 - levels) / 2, mean, std) if kind == "interval" else -np.inf
        expected = np.abs(stats.norm.cdf(upper) - stats.norm.cdf(lower) - levels).mean()
        assert results[name].error.low < expected < results[name].error.high
        assert results[name].error.value > 2 * right.error.value


# --- temperature of the variance


def test_the_temperature_of_the_variance_has_the_least_likelihood():
    means, variances, y, _ = mixture(1)
    fitted = metrics.variance_temperature(means[0], variances[0], y)
    assert fitted == pytest.approx(float(((y - means[0]) ** 2 / variances[0]).mean()))

    def at(t):
        return float(metrics.nll_gaussian(means[0], t * variances[0], y).mean())

    assert all(at(fitted) < at(fitted * factor) for factor in (0.9, 0.99, 1.01, 1.1))
    assert metrics.variance_temperature(y, variances[0], y) == 0.0


def test_tempering_stretches_the_mixture_about_its_mean():
    means, variances, y, _ = mixture()
    fitted = metrics.temper_variance(means, variances, y)
    stretched, scaled = fitted.members(means, variances)
    torch.testing.assert_close(stretched.mean(0), means.mean(0))
    before = variances.mean(0) + means.var(0, correction=0)
    after = scaled.mean(0) + stretched.var(0, correction=0)
    torch.testing.assert_close(after, fitted.temperature * before)
    assert metrics.variance_temperature(means.mean(0), after, y) == pytest.approx(1.0)
    moved = means.mean(0) + math.sqrt(fitted.temperature) * (y - means.mean(0))
    torch.testing.assert_close(metrics.pit(stretched, scaled, moved), metrics.pit(means, variances, y))


def test_selective_prediction_of_regression_losses():
    means, variances = draw(3, 300), draw(3, 300, seed=1).exp()
    y = means.mean(0) + variances.mean(0).sqrt() * draw(300, seed=2)
    wrong = (means.mean(0) - y).square()
    curve = metrics.risk_coverage(variances.mean(0), wrong)
    order = np.argsort(variances.mean(0).numpy())
    np.testing.assert_allclose(curve.risk, np.cumsum(wrong.numpy()[order]) / np.arange(1, 301))
    assert curve.risk_at(0.2) < curve.risk_at(1.0) == pytest.approx(float(wrong.mean()))
    negative = metrics.risk_coverage(variances.mean(0), metrics.nll_gaussian(y[:, None], variances[0][:, None] / 99, y))
    assert negative.risk.min() < 0 <= negative.excess
    assert ds.metrics.risk_coverage(wrong, wrong).excess == 0.0

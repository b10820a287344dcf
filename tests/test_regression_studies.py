"""Studies of regressions with an uncertainty: networks of the right width, and measures of it."""

import math
import re

import numpy as np
import pytest
import regression_loss_oracles as oracles
import torch
from scipy import stats

from dissensus.losses import LOSSES, QUANTILE_LEVELS
from dissensus.studies import measures
from dissensus.studies import run as runner
from dissensus.studies.procedures.training import TARGETS, stored_outputs
from dissensus.studies.run_folders import read_report
from dissensus.studies.spec import SpecError

STUDY = """
title = "A regression with an uncertainty"
reference = "Figure 99"
claim = "It runs."
data = ["made-table"]

[members]
network = "mlp"
count = 3
options = {{width = 4}}

[objective]
name = "augmented"
loss = "{loss}"
pool = "{pool}"

[grid]
beta = [0.0, 1.0]
seed = [0, 1]

[optimisation]
epochs = 3

[evaluation]
measures = {measures}

[[expect]]
says = "losses are numbers"
measure = "error"
at = {{beta = 0.0}}
low = -100.0

[scales.smoke]
"""
SHARED = ["error", "individual", "diversity", "bias_share", "gap", "crps", "interval_coverage", "interval_width"]
M, N, D = 3, 40, 2


def study(folder, loss, pool, names):
    file = folder / "collusion" / "study.toml"
    file.parent.mkdir()
    file.write_text(STUDY.format(loss=loss, pool=pool, measures=names).replace("'", '"'))
    return file


@pytest.mark.parametrize(
    ("loss", "pool", "names"),
    [("gaussian_nll", "probability", ["nll", "rmse"]), ("quantile", "score", ["relative_diversity"])],
)
def test_a_study_of_a_regression_runs_and_measures(tmp_path, loss, pool, names):
    names = [*SHARED, *names]
    folder = runner.run(study(tmp_path, loss, pool, names), "smoke", root=tmp_path / "runs")
    rows = read_report(folder).rows
    assert len(rows) == 4
    for row in rows:
        assert row.measures.keys() == set(names)
        assert all(math.isfinite(value) for value in row.measures.values())
    settings = {"levels": QUANTILE_LEVELS} if loss == "quantile" else {}
    for row in rows:
        unit = folder / f"made-table-seed-{row.seed}"
        targets, outputs = np.load(unit / TARGETS).astype(float), stored_outputs(unit, row.run).double().numpy()
        assert outputs.shape == (3, len(targets), (2 if loss == "gaussian_nll" else 3) * targets.shape[-1])
        parts = oracles.over_batch(outputs, targets, loss=loss, pool=pool, **settings)
        for name, part in zip(("error", "individual", "diversity"), parts, strict=True):
            assert row.measures[name] == pytest.approx(part.mean(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "pool", "name", "words"),
    [
        ("gaussian_nll", "probability", "accuracy", "the measure 'accuracy' takes outputs for a loss of logits"),
        ("gaussian_nll", "probability", "relative_diversity", "'relative_diversity' is a ratio of losses"),
        ("gaussian_nll", "probability", "codependence_0.2", "'codependence_0.2' is a ratio of losses"),
        (
            "squared_error",
            "score",
            "interval_width",
            "'interval_width' takes outputs for a loss of gaussian or quantiles",
        ),
        ("gaussian_nll", "score", "error", "`pool` must be 'probability' for loss 'gaussian_nll'"),
    ],
)
def test_measures_that_a_loss_does_not_have_are_refused_before_training(tmp_path, loss, pool, name, words):
    with pytest.raises(SpecError, match=re.escape(words)):
        runner.run(study(tmp_path, loss, pool, sorted({name, "error"})), "smoke", root=tmp_path / "runs")


def test_class_labels_are_no_values_and_no_labels_of_their_own(tmp_path):
    for loss, pool in (("gaussian_nll", "probability"), ("bce", "probability"), ("quantile", "score")):
        (tmp_path / loss).mkdir()
        file = study(tmp_path / loss, loss, pool, ["error"])
        file.write_text(file.read_text().replace("made-table", "digits"))
        with pytest.raises(
            SpecError, match=f"'objective.loss' is '{loss}', but digits has class labels.*cross_entropy"
        ):
            runner.run(file, "smoke", root=tmp_path / "runs")


def test_own_measures_take_any_outputs():
    own = {**measures.MEASURES, "accuracy": lambda outputs, targets, loss, pool: 0.5}
    assert measures.unfit("accuracy", "gaussian_nll")
    assert not measures.unfit("accuracy", "gaussian_nll", own)
    assert not measures.unfit("spread", "gaussian_nll", own)


def test_kinds_of_measures_are_kinds_of_losses():
    assert measures.TAKES.keys() <= measures.MEASURES.keys()
    kinds = {entry.takes for entry in LOSSES.values()}
    assert all(set(taken) <= kinds for taken in measures.TAKES.values())


# --- each measure against its definition ------------------------------------------------------------------------------


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GAUSSIAN, Y = draw(M, N, 2 * D, seed=1), draw(N, D, seed=2)
QUANTILES = draw(M, N, 3 * D, seed=3)


def test_measures_of_gaussians():
    def value(name):
        return measures.MEASURES[name](GAUSSIAN, Y, "gaussian_nll", "probability")

    mean, aleatoric, epistemic = oracles.mixture_moments(GAUSSIAN.numpy())
    deviation, truth = np.sqrt(aleatoric + epistemic), Y.numpy()
    low, high = (stats.norm.ppf(level, mean, deviation) for level in (0.05, 0.95))
    inside = (low <= truth) & (truth <= high)
    assert 0 < inside.mean() < 1
    assert value("interval_coverage") == pytest.approx(inside.mean(), rel=1e-12)
    assert value("interval_width") == pytest.approx((high - low).mean(), rel=1e-9)
    assert value("rmse") == pytest.approx(np.sqrt(((mean - truth) ** 2).mean(0)).mean(), rel=1e-9)
    ensemble, _, _ = oracles.over_batch(GAUSSIAN.numpy(), truth, loss="gaussian_nll", pool="probability")
    assert value("nll") == pytest.approx(ensemble.mean(), rel=1e-9)
    grid = np.linspace(-40, 40, 80001)  # CRPS = ∫ (F(z) − [y ≤ z])² dz
    total = 0.0
    for n in range(4):
        for d in range(D):
            deviations = np.sqrt(np.exp(GAUSSIAN[:, n, D + d].numpy()) + oracles.VARIANCE_FLOOR)
            below = np.mean([stats.norm.cdf(grid, GAUSSIAN[j, n, d], deviations[j]) for j in range(M)], 0)
            total += np.trapezoid((below - (truth[n, d] <= grid)) ** 2, grid)
    first = measures.crps(GAUSSIAN[:, :4], Y[:4], "gaussian_nll", "probability")
    assert first == pytest.approx(total / (4 * D), rel=1e-3)


def test_measures_of_quantiles():
    def value(name):
        return measures.MEASURES[name](QUANTILES, Y, "quantile", "score")

    quantiles = np.sort(QUANTILES.numpy().mean(0).reshape(N, D, 3), -1)
    inside = (quantiles[..., 0] <= Y.numpy()) & (Y.numpy() <= quantiles[..., 2])
    assert value("interval_coverage") == pytest.approx(inside.mean(), rel=1e-12)
    assert value("interval_width") == pytest.approx((quantiles[..., 2] - quantiles[..., 0]).mean(), rel=1e-9)
    losses = [oracles.quantile(quantiles[n].ravel(), Y[n].numpy(), QUANTILE_LEVELS) for n in range(N)]
    assert value("crps") == pytest.approx(2 * np.mean(losses), rel=1e-9)


def test_measures_of_values():
    values = draw(M, N, D, seed=4)
    apart = np.abs(values.numpy()[:, None] - values.numpy()[None]).mean((0, 1)) / 2
    expected = (np.abs(values.numpy() - Y.numpy()).mean(0) - apart).mean()
    assert measures.crps(values, Y, "mse", "score") == pytest.approx(expected, rel=1e-9)
    error = (values.numpy().mean(0) - Y.numpy()) ** 2
    assert measures.rmse(values, Y, "mse", "score") == pytest.approx(np.sqrt(error.mean(0)).mean(), rel=1e-9)


def test_one_target_may_be_a_vector():
    for name in ("crps", "rmse", "interval_coverage", "interval_width", "nll"):
        outputs = GAUSSIAN[..., :2]
        column, vector = (
            measures.MEASURES[name](outputs, y, "gaussian_nll", "probability") for y in (Y[:, :1], Y[:, 0])
        )
        assert column == vector, name


def test_shares_of_bias_are_of_what_is_averaged():
    """A constant offset of members is all of their spread in means, probabilities or rates."""
    offsets = torch.tensor([-0.2, 0.0, 0.2], dtype=torch.float64).view(M, 1, 1)
    means = draw(1, N, D, seed=5) + offsets
    variances = draw(M, N, D, seed=6)  # spread of log-variances is not of the mean
    gaussian = torch.cat([means, variances], -1)
    probs = 0.5 + offsets + 0.1 * draw(1, N, D, seed=7).tanh()
    rates = 2 + offsets + draw(1, N, D, seed=8).tanh()
    cases = {"gaussian_nll": gaussian, "bce": probs.logit(), "poisson": rates.log()}
    for loss, outputs in cases.items():
        assert measures.constant_bias(outputs, Y, loss, "probability") == pytest.approx(1.0, abs=1e-9), loss
    assert measures.constant_bias(probs.logit(), Y, "bce", "score") < 1 - 1e-4


def test_a_search_prefers_no_trial_that_diverged():
    """Losses of densities may be negative: ten times the worst of them would be the best."""
    from dissensus.studies.procedures.search import _finite

    for values in ([-3.0, -1.0], [0.5, 2.0], [-1.0, 2.0]):
        trials = _finite([{"value": value} for value in (*values, math.inf)])
        assert trials[-1]["value"] > max(values)
    assert _finite([{"value": 2.0}, {"value": math.inf}])[-1]["value"] == 20.0

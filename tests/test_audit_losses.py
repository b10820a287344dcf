"""Audits of outputs that predict distributions, and of labels that do not exclude each other."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import dissensus as ds

M, N = 4, 300


def gaussians(targets=1, spread=0.2, offset=0.0, examples=N, seed=0):
    """Members ``[M, N, 2D]`` with means around a signal, log-variances around the truth, and targets ``[N, D]``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, targets, generator=generator, dtype=torch.float64)

    signal = 2 * normal(examples)
    y = signal + 0.5 * normal(examples)
    shifts = offset * torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64).view(-1, 1, 1)
    mean = signal + spread * normal(M, examples) + shifts
    log_variance = math.log(0.25) + 0.3 * normal(M, examples)
    return torch.cat([mean, log_variance], -1), y


def values(audit):
    return {name: figure.value for name, figure in audit.test.items()}


@pytest.mark.parametrize("targets", [1, 2])
def test_gaussians_are_decomposed_as_a_mixture_of_densities(targets):
    outputs, y = gaussians(targets)
    audit = ds.audit(outputs, y, task="regression", loss="gaussian_nll")
    mean, variance = outputs[..., :targets].numpy(), outputs[..., targets:].exp().numpy() + 1e-6
    log_density = stats.norm.logpdf(y.numpy(), mean, np.sqrt(variance)).sum(-1)
    ensemble = -np.log(np.exp(log_density).mean(0)).mean()
    figures = values(audit)
    assert figures["ensemble"] == pytest.approx(ensemble, rel=1e-9)
    assert figures["individual"] == pytest.approx(-log_density.mean(), rel=1e-9)
    assert figures["diversity"] == pytest.approx(-log_density.mean() - ensemble, rel=1e-7)
    assert figures["best_member"] == pytest.approx(-log_density.mean(1).max(), rel=1e-9)
    assert audit.by_member["loss"] == pytest.approx(list(-log_density.mean(1)))
    errors = mean.mean(0) - y.numpy()
    assert figures["mse"] == pytest.approx((errors**2).mean(), rel=1e-9)
    below = stats.norm.cdf(y.numpy(), mean, np.sqrt(variance)).mean(0)
    assert figures["coverage"] == pytest.approx(((below >= 0.05) & (below <= 0.95)).mean())
    assert audit.facts["nominal_coverage"] == 0.9
    assert "codependence_0.4" not in figures, "a ratio of log-densities says nothing"
    assert "predicted means" in audit.summary()


def test_the_summary_tells_how_often_intervals_hold():
    outputs, y = gaussians()
    wide, narrow = (
        ds.audit(
            torch.cat([outputs[..., :1], torch.full_like(outputs[..., 1:], s)], -1), y, task="regression", loss=loss
        )
        for s, loss in ((40.0, "gaussian_nll"), (-40.0, functools.partial(ds.losses.gaussian_nll, floor=1e-30)))
    )
    assert "intervals should hold 90% of targets. They hold 100% (" in wide.summary()
    held = narrow.test["coverage"]
    assert held.value < 0.9
    assert f"They hold {held.value:.0%} ({held.low:.0%} to {held.high:.0%})." in narrow.summary()
    assert "should hold" not in ds.audit(outputs[..., :1], y, task="regression").summary()
    middle = ds.audit(outputs[..., :1], y, task="regression", loss=functools.partial(ds.losses.quantile, levels=(0.5,)))
    assert "predicted medians" in middle.summary()
    assert "should hold" not in middle.summary()


def test_losses_below_zero_keep_their_intervals():
    outputs, y = gaussians()
    small = torch.cat([outputs[..., :1] / 100, outputs[..., 1:] - 2 * math.log(100)], -1)
    audit = ds.audit(small, y / 100, task="regression", loss="gaussian_nll")
    for name in ("ensemble", "individual", "best_member", "worst_member"):
        figure = audit.test[name]
        assert figure.low < figure.value < figure.high < 0, name


def test_the_verdict_on_gaussians_is_that_on_their_means():
    for offset, expected in ((0.0, "healthy"), (1.0, "collusive")):
        outputs, y = gaussians(spread=0.4, offset=offset)
        whole = ds.audit(outputs, y, task="regression", loss="gaussian_nll")
        means = ds.audit(outputs[..., :1], y, task="regression")
        assert whole.verdict == means.verdict == expected
        assert [item.numbers() for item in whole.judgement.evidence] == [
            item.numbers() for item in means.judgement.evidence
        ]


def test_shifted_data_is_told_by_the_variances_of_gaussians():
    outputs, y = gaussians()
    far = outputs.clone()
    far[..., 1:] += 3.0
    audit = ds.audit(outputs, y, task="regression", loss="gaussian_nll", ood=far)
    assert audit.detection["aleatoric_variance"].value > 0.95
    assert audit.detection["epistemic_variance"].value == pytest.approx(0.5, abs=1e-12)


LEVELS = (0.1, 0.4, 0.6, 0.9)


def test_quantiles_are_pooled_by_their_mean():
    outputs, y = gaussians()
    shifts = torch.tensor(stats.norm.ppf(LEVELS) * 0.5)
    quantiles = outputs[..., :1] + shifts
    loss = functools.partial(ds.losses.quantile, levels=LEVELS)
    audit = ds.audit(quantiles, y, task="regression", loss=loss)
    levels, pooled = np.array(LEVELS), quantiles.mean(0).numpy()
    apart = y.numpy() - pooled
    assert values(audit)["ensemble"] == pytest.approx(np.maximum(levels * apart, (levels - 1) * apart).mean())
    inside = (pooled[:, :1] <= y.numpy()) & (y.numpy() <= pooled[:, -1:])
    assert values(audit)["coverage"] == pytest.approx(inside.mean())
    assert audit.facts["nominal_coverage"] == pytest.approx(0.8)
    medians = quantiles[..., 1:3].mean(-1)
    assert values(audit)["mse"] == pytest.approx(float((medians.mean(0) - y[:, 0]).square().mean()))


@pytest.mark.parametrize("pool", ["score", "probability"])
def test_counts_are_judged_by_their_rates(pool):
    outputs, _ = gaussians()
    log_rate = 0.3 * outputs[..., :1]
    counts = torch.poisson(log_rate.mean(0).exp(), generator=torch.Generator().manual_seed(1))
    audit = ds.audit(log_rate, counts, task="regression", loss="poisson", pool=pool)
    nll = (log_rate.exp() - counts * log_rate).squeeze(-1)
    expected = log_rate.mean(0).exp() - counts * log_rate.mean(0) if pool == "score" else -((-nll).exp().mean(0).log())
    assert values(audit)["ensemble"] == pytest.approx(float(expected.mean()), rel=1e-9)
    assert values(audit)["mse"] == pytest.approx(float((log_rate.exp().mean(0) - counts).square().mean()))


@pytest.mark.parametrize("part", ["test", "train"])
def test_negative_counts_are_refused(part):
    log_rate, counts = torch.zeros(M, 20, 1), torch.ones(20)
    wrong = counts.clone()
    wrong[3] = -1
    data = {"test": (log_rate, wrong), "train": (log_rate, counts)}[part]
    with pytest.raises(ValueError, match=r"`targets` must be counts of at least 0; got -1"):
        ds.audit(*data, task="regression", loss="poisson", train=(log_rate, wrong) if part == "train" else None)


@pytest.mark.parametrize(("loss", "value", "shown"), [("poisson", 800.0, "inf"), ("mse", 1e200, r"1e\+200")])
@pytest.mark.parametrize("part", ["test", "ood"])
def test_values_whose_powers_are_no_numbers_are_refused(loss, value, shown, part):
    outputs, targets = torch.zeros(M, 20, 1, dtype=torch.float64), torch.ones(20)
    wrong = outputs.clone()
    wrong[1, 4] = value
    outputs, ood = (wrong, None) if part == "test" else (outputs, wrong)
    name = "outputs" if part == "test" else "ood"
    with pytest.raises(ValueError, match=rf"`{name}` must predict values of at most 1e\+60 in size; got {shown}\. Has"):
        ds.audit(outputs, targets, task="regression", loss=loss, ood=ood)


def labelled(labels=3, examples=N):
    generator = torch.Generator().manual_seed(2)
    signal = 2 * torch.randn(examples, labels, generator=generator, dtype=torch.float64)
    targets = (torch.rand(examples, labels, generator=generator, dtype=torch.float64) < signal.sigmoid()).long()
    return signal + 0.7 * torch.randn(M, examples, labels, generator=generator, dtype=torch.float64), targets


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_every_label_of_an_example_counts(kind):
    logits, targets = labelled()
    outputs = logits if kind == "logits" else logits.sigmoid()
    audit = ds.audit(outputs, targets, task="multilabel", kind=kind)
    parts = ds.diversity.decompose(logits, targets.double(), loss="bce", pool="probability")
    figures = values(audit)
    assert figures["ensemble"] == pytest.approx(float(parts.ensemble.mean()), rel=1e-9)
    assert figures["individual"] == pytest.approx(float(parts.individual.mean()), rel=1e-9)
    right = (logits.sigmoid().mean(0) > 0.5).long() == targets
    assert figures["accuracy"] == pytest.approx(float(right.double().mean()))
    assert audit.facts["loss"] == "bce"
    assert "300 examples, 3 labels" in audit.summary()
    listed = ds.audit(list(outputs), targets.numpy(), task="multilabel", kind=kind)
    assert listed.to_json() == audit.to_json()


def test_unknown_labels_do_not_count():
    logits, targets = labelled()
    partly = targets.clone()
    partly[::2, 1] = -1
    audit = ds.audit(logits, partly, task="multilabel", kind="logits", ignore_index=-1)
    right = ((logits.sigmoid().mean(0) > 0.5).long() == targets)[partly >= 0]
    assert values(audit)["accuracy"] == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "gaussian_nll", "pool": "score"}, "be 'probability' for loss 'gaussian_nll'.*negative"),
        ({"loss": "quantile"}, "3 columns for every target.*got 2 columns. Other levels"),
        ({"loss": "brier"}, "`loss` must be one of 'mse'"),
        ({"loss": lambda f, y: f}, "`loss` must be one of 'mse'"),
        ({"task": "multilabel", "kind": "labels"}, "`kind` must be 'logits' or 'probabilities'; got 'labels'"),
        ({"task": "multilabel", "kind": "logits"}, "`targets` must be 0 or 1 for every label; got"),
    ],
)
def test_wrong_losses_are_refused(arguments, message, unchecked):
    outputs, y = gaussians()
    with pytest.raises(ValueError, match=message):
        ds.audit(outputs, y, **{"task": "regression", **arguments})


def test_targets_must_go_with_the_columns(unchecked):
    outputs, _ = gaussians(targets=2)
    with pytest.raises(ValueError, match=r"shape \[N, 2\], as `outputs` has; its 4 columns are for 2 of them"):
        ds.audit(outputs, torch.zeros(N), task="regression", loss="gaussian_nll")
    logits, _ = labelled()
    with pytest.raises(ValueError, match=r"`targets` must have shape \[N, L\].*Use task='classification'"):
        ds.audit(logits, torch.zeros(N), task="multilabel", kind="logits")


def test_mse_is_the_mean_over_outputs_and_squared_error_the_sum():
    outputs, y = gaussians(targets=2)
    means = outputs[..., :2]
    mean, summed = (ds.audit(means, y, task="regression", loss=loss) for loss in ("mse", "squared_error"))
    assert mean.verdict == summed.verdict
    for name in ("ensemble", "individual", "diversity", "best_member", "error_covariance"):
        assert values(summed)[name] == pytest.approx(2 * values(mean)[name]), name
    for name in ("mse", "explained", "error_correlation", "gain", "dominance", "codependence_0.6"):
        assert values(summed)[name] == pytest.approx(values(mean)[name]), name
    assert values(mean)["mse"] == pytest.approx(float((means.mean(0) - y).square().mean()))


def test_a_trained_ensemble_of_gaussians_is_audited():
    x = torch.linspace(-2, 2, 200).unsqueeze(1)
    y = x.sin() + 0.2 * torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    ens = ds.Ensemble(functools.partial(ds.nets.mlp, 1, 2, (16,)), members=3)
    ds.fit(
        ens,
        (x, y),
        functools.partial(ds.objectives.independent, loss="gaussian_nll"),
        epochs=60,
        lr=0.01,
        batch_size=50,
    )
    audit = ds.audit_estimator(ens, x, y, task="regression", loss="gaussian_nll", train=(x, y))
    outputs = ens.predict(x)
    expected = ds.diversity.decompose(outputs, y, loss="gaussian_nll", pool="probability").ensemble.mean()
    assert values(audit)["ensemble"] == pytest.approx(float(expected), rel=1e-4)
    assert audit.verdict in ("healthy", "redundant")
    logits, targets = labelled()
    several = ds.audit_estimator(lambda _: logits, torch.zeros(N), targets, task="multilabel", kind="logits")
    assert several.facts["labels"] == 3


def test_the_command_takes_losses_and_levels(tmp_path):
    from dissensus.cli.main import app

    outputs, y = gaussians()
    np.savez(tmp_path / "gaussian.npz", outputs=outputs.numpy(), targets=y.numpy())
    arguments = ["audit", str(tmp_path / "gaussian.npz"), "--task", "regression", "--loss"]
    result = CliRunner().invoke(app, [*arguments, "gaussian_nll"])
    assert result.exit_code == 0, result.output
    assert "inside predicted intervals" in result.output
    assert "should hold 90% of" in result.output
    result = CliRunner().invoke(app, [*arguments, "quantile", "--levels", "0.1,0.9"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, [*arguments, "mse", "--levels", "0.1,0.9"])
    assert result.exit_code != 0
    assert "--levels goes with --loss quantile" in result.output + (result.stderr or "")

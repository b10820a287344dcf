"""Detection: against scikit-learn, and against what its intervals promise."""

import json
import logging
import math
import re

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from typer.testing import CliRunner

import dissensus as ds
from dissensus.cli.main import app
from dissensus.metrics import auroc, compared, detection, ood, threshold


def random_scores(n=300, u=200, shift=1.0, ties=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inside = torch.randn(n, generator=generator, dtype=torch.float64)
    outside = shift + torch.randn(u, generator=generator, dtype=torch.float64)
    return ((inside * 2).round() / 2, (outside * 2).round() / 2) if ties else (inside, outside)


def by_sklearn(inside, outside):
    scores = torch.cat([inside, outside]).numpy()
    out = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    # Those within are the positives here, as false positives at 95 % are usually told.
    false, true, _ = roc_curve(1 - out, -scores, drop_intermediate=False)
    return {
        "auroc": roc_auc_score(out, scores),
        "aupr_out": average_precision_score(out, scores),
        "aupr_in": average_precision_score(1 - out, -scores),
        "fpr_at_95": false[np.argmax(true >= 0.95)],
    }


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [(300, 200), (7, 50), (40, 3), (1, 1)])
def test_figures_are_scikit_learns(sizes, ties):
    inside, outside = random_scores(*sizes, ties=ties)
    result = ood(inside, outside, repeats=50)
    for name, value in by_sklearn(inside, outside).items():
        assert getattr(result, name).value == pytest.approx(value), name
    assert auroc(inside, outside).value == pytest.approx(result.auroc.value)


@pytest.mark.parametrize("ties", [False, True])
def test_the_roc_curve_is_scikit_learns(ties):
    inside, outside = random_scores(ties=ties)
    curve = ds.metrics.roc(inside, outside)
    false, true, _ = roc_curve([0] * 300 + [1] * 200, torch.cat([inside, outside]).numpy(), drop_intermediate=False)
    np.testing.assert_allclose(curve.false_positives, false)
    np.testing.assert_allclose(curve.true_positives, true)
    area = float(torch.trapezoid(curve.true_positives, curve.false_positives))
    assert area == pytest.approx(auroc(inside, outside).value)


@pytest.mark.parametrize("inside", [torch.zeros(0), torch.tensor([math.nan]), torch.zeros(2, 1)])
def test_roc_curves_of_what_is_no_score_are_refused(inside, unchecked):
    with pytest.raises(ValueError, match="`inside` must be scores"):
        ds.metrics.roc(inside, torch.zeros(2))


def test_a_resample_is_what_scikit_learn_says_of_the_drawn_examples():
    inside, outside = random_scores(30, 20, ties=True)
    generator = torch.Generator().manual_seed(5)
    chosen = torch.randint(30, (1, 30), generator=generator)[0], torch.randint(20, (1, 20), generator=generator)[0]
    expected = by_sklearn(inside[chosen[0]], outside[chosen[1]])
    result = ds.metrics.Detection(*detection._resampled(inside, outside, 1, 5)[1].tolist())
    for name, value in expected.items():
        assert getattr(result, name) == pytest.approx(value), name


def test_intervals_hold_what_they_promise():
    truth = 0.5 * (1 + math.erf(1.0 / 2))  # two normals, one apart: Φ(1/√2)
    covered = {"delong": 0, "bootstrap": 0}
    for seed in range(200):
        inside, outside = random_scores(80, 60, seed=seed)
        for name, interval in (
            ("delong", auroc(inside, outside)),
            ("bootstrap", ood(inside, outside, repeats=300).auroc),
        ):
            covered[name] += interval.low <= truth <= interval.high
    assert 180 <= covered["delong"] <= 198
    assert 178 <= covered["bootstrap"] <= 198


def test_delongs_test_of_a_difference():
    alarms, powers = 0, 0
    for seed in range(200):
        inside, outside = random_scores(80, 60, seed=seed)
        noise = torch.Generator().manual_seed(1000 + seed)
        first_noisy = [
            part + 0.5 * torch.randn(len(part), generator=noise, dtype=torch.float64) for part in (inside, outside)
        ]
        second_noisy = [
            part + 0.5 * torch.randn(len(part), generator=noise, dtype=torch.float64) for part in (inside, outside)
        ]
        alarms += compared((first_noisy[0], first_noisy[1]), (second_noisy[0], second_noisy[1])).p_value < 0.05
        powers += compared((inside, outside), (inside, outside - 0.7)).p_value < 0.05
    assert 2 <= alarms <= 22, "about one in twenty where there is no difference"
    assert powers > 150
    first = random_scores()
    assert compared(first, first) == ds.metrics.Difference(ds.metrics.Interval(0.0, 0.0, 0.0), 1.0)
    swapped = compared((first[0], first[1] - 0.5), first)
    assert swapped.difference.value == pytest.approx(-compared(first, (first[0], first[1] - 0.5)).difference.value)


def test_scores_that_tell_everything_and_nothing():
    inside, outside = torch.arange(10.0), torch.arange(20.0, 30.0)
    best = ood(inside, outside)
    assert [figure.value for figure in best] == [1.0, 1.0, 1.0, 0.0]
    least = 0.025**0.1  # with this share or more of ten pairs alike, all of them are in one of forty data sets
    assert best.auroc == pytest.approx((1.0, least, 1.0))
    tied = ood(torch.zeros(10), torch.zeros(30), repeats=20)
    assert tied.auroc == pytest.approx((0.5, least / 2, 1 - least / 2)), "ten against thirty do not prove a tie"
    assert tied.aupr_out.value == pytest.approx(0.75)
    assert tied.fpr_at_95.value == 1.0


@pytest.mark.parametrize("sizes", [(1, 1), (1, 50), (50, 1)])
def test_one_example_is_too_few_for_an_interval(sizes, caplog):
    inside, outside = random_scores(*sizes)
    second = random_scores(*sizes, seed=1)
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        assert auroc(inside, outside)[1:] == (0.0, 1.0)
        assert f"{sizes[0]} against {sizes[1]} examples are too few" in caplog.text
        for figure in ood(inside, outside, repeats=50):
            assert figure[1:] == (0.0, 1.0)
        difference = compared((inside, outside), second)
    assert (difference.difference.low, difference.difference.high, difference.p_value) == (-1.0, 1.0, 1.0)


@pytest.mark.parametrize("examples", [2, 3, 10, 100])
def test_scores_that_separate_all_examples_are_not_certain_to_separate_others(examples):
    inside, outside = torch.arange(float(examples)), 1000 + torch.arange(float(examples))
    least = 0.025 ** (1 / examples)
    assert auroc(inside, outside) == pytest.approx((1.0, least, 1.0))
    assert auroc(outside, inside) == pytest.approx((0.0, 0.0, 1 - least))
    figures = ood(inside, outside, repeats=50)
    assert all(figure.low < figure.high for figure in figures)
    difference = compared((inside, outside), (inside, -outside))
    assert difference.p_value == pytest.approx(2.0 ** (1 - examples))
    assert difference.difference.low < difference.difference.high == 1.0


def test_few_examples_within_do_not_tell_their_95_percent_point():
    assert ood(*random_scores(58, 100), repeats=50).fpr_at_95.high == 1.0
    assert ood(*random_scores(59, 100, shift=3.0), repeats=50).fpr_at_95.high < 1.0


def test_intervals_of_few_and_of_separated_examples_hold_what_they_promise():
    for sizes, shift in (((10, 10), 3.0), ((2, 2), 1.0)):
        truth = 0.5 * (1 + math.erf(shift / 2))
        covered = sum(
            low <= truth <= high for _, low, high in (auroc(*random_scores(*sizes, shift, seed=s)) for s in range(200))
        )
        assert covered >= 190, "with no width where examples are separated, 102 and 96 of them hold it"


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (2, 9), (5, 5), (30, 4), (100, 80)])
def test_estimates_lie_within_their_intervals(sizes, ties):
    for seed in range(20):
        first, second = random_scores(*sizes, ties=ties, seed=seed), random_scores(*sizes, ties=ties, seed=seed + 1000)
        for value, low, high in (auroc(*first), *ood(*first, repeats=30, seed=seed)):
            assert 0 <= low <= value <= high <= 1
        value, low, high = compared(first, second).difference
        assert -1 <= low <= value <= high <= 1


def test_a_threshold_keeps_to_its_false_alarms():
    inside = random_scores()[0]
    for rate in (0.0, 0.01, 0.05, 0.5):
        assert float((inside > threshold(inside, rate)).double().mean()) <= rate
        assert float((inside >= threshold(inside, rate)).double().mean()) > rate
    assert threshold(inside, 1.0) == -math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ood(torch.zeros(0), torch.zeros(3)), "`inside`"),
        (lambda: ood(torch.zeros(3), torch.tensor([math.nan])), "finite"),
        (lambda: auroc(torch.zeros(3, 2), torch.zeros(3)), "`inside`"),
        (lambda: compared((torch.zeros(3), torch.zeros(2)), (torch.zeros(3), torch.zeros(4))), "same examples"),
        (lambda: threshold(torch.zeros(3), 1.5), "false_alarms"),
    ],
)
def test_invalid_arguments_are_refused(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call()


def stored(folder, name, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    sure = 6 * torch.nn.functional.one_hot(torch.randint(4, (150,), generator=generator), 4)
    outputs = scale * sure + 1.5 * torch.randn(5, 150, 4, generator=generator)
    np.save(folder / f"{name}.npy", outputs.numpy())
    return outputs.double()


def test_the_command_compares_several_outside_sets(tmp_path):
    inside = stored(tmp_path, "in", 1.0, 0)
    near_outputs, far_outputs = stored(tmp_path, "near", 0.6, 1), stored(tmp_path, "far", 0.0, 2)
    arguments = [
        "ood",
        str(tmp_path / "in.npy"),
        "--outside",
        f"near={tmp_path / 'near.npy'}",
        "--outside",
        f"far={tmp_path / 'far.npy'}",
        "--json",
        str(tmp_path / "o.json"),
        "--figure",
        str(tmp_path / "o.png"),
        "--repeats",
        "50",
        "--false-alarms",
        "0.1",
    ]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "o.json").read_text())
    for name, outputs in (("near", near_outputs), ("far", far_outputs)):
        for score in ("predictive_diversity", "model_average", "mean_energy"):
            expected = auroc(ds.scores.table(inside)[score], ds.scores.table(outputs)[score]).value
            assert content["sets"][name]["scores"][score]["auroc"][0] == pytest.approx(expected, abs=1e-6)
        assert next(iter(content["sets"][name]["scores"])) == content["sets"][name]["best"]
    pds = ds.scores.table(inside)["predictive_diversity"]
    assert float((pds > content["thresholds"]["predictive_diversity"]).double().mean()) <= 0.1
    assert content["sets"]["far"]["scores"]["model_average"]["auroc"][0] > 0.9
    assert (tmp_path / "o.png").stat().st_size > 10_000
    assert "predictive diversity" in result.output
    for wrong_arguments, message in (
        (["--kind", "votes"], "must be logits, probabilities, values, gaussian or quantiles"),
        (["--outside", "no.npy"], "no file"),
    ):
        failed = CliRunner().invoke(app, [*arguments[:4], *wrong_arguments])
        assert failed.exit_code == 1
        assert message in re.sub(r"\s+", " ", failed.output)


@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
def test_calibration_takes_logarithms_of_probabilities_alone(outputs):
    logits, labels = torch.randn(20, 4), torch.randint(4, (20,))
    values = {"logits": logits, "probabilities": logits.softmax(-1)}[outputs]
    with pytest.raises(ValueError, match="sum to one"):
        ds.metrics.calibration(values, labels)
    ds.metrics.calibration(logits.log_softmax(-1), labels)
    ds.metrics.calibration(logits.bfloat16().log_softmax(-1), labels)


def test_intervals_are_formatted_number_by_number():
    interval = ds.metrics.Interval(1234.5, -0.5, float("inf"))
    assert f"{interval:,.1f}" == "1,234.5 (-0.5 to inf)"
    assert f"{interval}" == str(interval) == "Interval(value=1234.5, low=-0.5, high=inf)"
    with pytest.raises(ValueError, match="format"):
        f"{interval:d}"

"""Predictions with uncertainty: every number against a slow oracle, and every edge."""

import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit, softmax
from scipy.stats import norm

import dissensus as ds
from dissensus import output_kinds

LEVELS = partial(ds.losses.quantile, levels=(0.1, 0.25, 0.5, 0.9))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def entropy(probs):
    return -sum(p * math.log(p) for p in probs if p > 0)


def classified(outputs=None, **options):
    return ds.predictive(2 * random(4, 7, 3) if outputs is None else outputs, task="classification", **options)


def regressed(outputs, loss=None, **options):
    return ds.predictive(outputs, task="regression", loss=loss, **options)


# --- classes and labels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["probability", "score", "vote"])
def test_classes_equal_a_slow_oracle(pool):
    outputs = 2 * random(4, 7, 3)
    result = classified(outputs, pool=pool, loss="zero_one" if pool == "vote" else None)
    for row in range(7):
        members = softmax(outputs[:, row].numpy(), -1)
        pooled = {
            "probability": members.mean(0),
            "score": softmax(outputs[:, row].numpy().mean(0)),
            "vote": np.bincount(members.argmax(-1), minlength=3) / 4,
        }[pool]
        np.testing.assert_allclose(result.probs[row], pooled, rtol=1e-12)
        assert result.labels[row] == pooled.argmax()
        assert float(result.entropy[row]) == pytest.approx(entropy(pooled), abs=1e-12)
        inside = np.mean([entropy(member) for member in members])
        assert float(result.aleatoric[row]) == pytest.approx(inside, rel=1e-12)
        assert float(result.epistemic[row]) == pytest.approx(entropy(members.mean(0)) - inside, rel=1e-9)
    if pool == "probability":
        torch.testing.assert_close(result.entropy, result.aleatoric + result.epistemic)


@pytest.mark.parametrize("pool", ["probability", "score"])
def test_labels_equal_a_slow_oracle(pool):
    outputs = 2 * random(4, 7, 3)
    result = ds.predictive(outputs, task="multilabel", pool=pool)
    for row in range(7):
        for label in range(3):
            logits = outputs[:, row, label].numpy()
            members = expit(logits)
            pooled = members.mean() if pool == "probability" else expit(logits.mean())
            assert float(result.probs[row, label]) == pytest.approx(pooled, rel=1e-12)
            assert result.labels[row, label] == (pooled > 0.5)
            assert float(result.entropy[row, label]) == pytest.approx(entropy([pooled, 1 - pooled]), rel=1e-9)
            inside = np.mean([entropy([p, 1 - p]) for p in members])
            assert float(result.aleatoric[row, label]) == pytest.approx(inside, rel=1e-9)
            total = entropy([members.mean(), 1 - members.mean()])
            assert float(result.epistemic[row, label]) == pytest.approx(total - inside, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("task", ["classification", "multilabel"])
@pytest.mark.parametrize("pool", ["probability", "score"])
def test_probabilities_are_the_same_as_their_logits(task, pool):
    outputs = random(4, 7, 3)
    probs = outputs.softmax(-1) if task == "classification" else outputs.sigmoid()
    expected = ds.predictive(outputs, task=task, pool=pool)
    result = ds.predictive(probs, task=task, pool=pool, kind="probabilities")
    for name in ("probs", "labels", "entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))


def test_ties_go_to_the_lowest_class_and_to_no_label():
    assert classified(torch.zeros(2, 1, 3)).labels.tolist() == [0]
    assert ds.predictive(torch.zeros(2, 1, 3), task="multilabel").labels.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("members", [1, 3])
def test_one_member_and_identical_members_disagree_about_nothing(members):
    single = 2 * random(1, 7, 6)
    outputs = single.repeat(members, 1, 1)
    for task, loss in (
        ("classification", None),
        ("multilabel", None),
        ("regression", "mse"),
        ("regression", "gaussian_nll"),
        ("regression", "quantile"),
    ):
        result = ds.predictive(outputs, task=task, loss=loss)
        torch.testing.assert_close(result.epistemic, torch.zeros_like(result.epistemic), rtol=0, atol=1e-14)
        if task == "regression":
            assert bool((result.epistemic == 0).all())
    mean, variance = ds.losses.gaussian_moments(single[0])
    low, high = regressed(outputs, "gaussian_nll").interval(0.8)
    np.testing.assert_allclose(low, norm.ppf(0.1, mean, variance.sqrt()), rtol=1e-9)
    np.testing.assert_allclose(high, norm.ppf(0.9, mean, variance.sqrt()), rtol=1e-9)


def test_sets_without_calibration_hold_the_likeliest_classes():
    probs = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.0, 0.9], [0.25, 0.35, 0.4]]])
    sets = classified(probs, kind="probabilities").sets(0.7)
    assert sets.tolist() == [[True, True, False], [False, False, True], [False, True, True]]
    halves = torch.tensor([[[0.5, 0.25, 0.25]]])
    assert classified(halves, kind="probabilities").sets(0.5).tolist() == [[True, False, False]]
    assert classified(halves, kind="probabilities").sets(0.75).tolist() == [[True, True, False]]


def test_extreme_logits_stay_finite():
    outputs = torch.tensor([[[1e4, -1e4], [0.0, -math.inf]], [[-1e4, 1e4], [0.0, 0.0]]])
    result = classified(outputs)
    assert all(bool(getattr(result, name).isfinite().all()) for name in ("probs", "entropy", "aleatoric", "epistemic"))
    assert float(result.epistemic[0]) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="use pool='probability'"):
        classified(torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]]), pool="score")


# --- values -----------------------------------------------------------------------------------------------------------


def test_gaussians_follow_the_law_of_total_variance():
    outputs = random(4, 6, 4)
    result = regressed(outputs, "gaussian_nll")
    mean, variance = outputs[..., :2].numpy(), np.exp(outputs[..., 2:].numpy()) + 1e-6
    np.testing.assert_allclose(result.mean, mean.mean(0))
    np.testing.assert_allclose(result.aleatoric, variance.mean(0))
    np.testing.assert_allclose(result.epistemic, mean.var(0))
    np.testing.assert_allclose(result.std, np.sqrt(variance.mean(0) + mean.var(0)))
    floor = regressed(outputs, partial(ds.losses.gaussian_nll, floor=0.5))
    np.testing.assert_allclose(floor.aleatoric, variance.mean(0) - 1e-6 + 0.5)


@pytest.mark.parametrize("level", [0.01, 0.5, 0.9, 0.999999])
def test_intervals_are_quantiles_of_the_mixture(level):
    outputs = random(4, 5, 4)
    outputs[..., :2] *= 6  # several modes
    low, high = regressed(outputs, "gaussian_nll").interval(level)
    mean, deviation = outputs[..., :2].numpy(), np.sqrt(np.exp(outputs[..., 2:].numpy()) + 1e-6)
    tail = (1 - level) / 2
    for row in range(5):
        for target in range(2):
            own = norm(mean[:, row, target], deviation[:, row, target])
            expected_low = brentq(lambda y, own=own: own.cdf(y).mean() - tail, -99, 99, xtol=1e-13)
            expected_high = brentq(lambda y, own=own: own.sf(y).mean() - tail, -99, 99, xtol=1e-13)
            assert float(low[row, target]) == pytest.approx(expected_low, abs=1e-8)
            assert float(high[row, target]) == pytest.approx(expected_high, abs=1e-8)


def test_the_moment_matched_gaussian_is_not_the_mixture():
    result = regressed(torch.tensor([[[-10.0, 0.0]], [[10.0, 0.0]]]), "gaussian_nll")
    low, high = result.interval(0.5)
    assert float(low) == pytest.approx(-10, abs=1e-6)  # a quarter of the mixture lies below the mean of the first
    assert float(high) == pytest.approx(10, abs=1e-6)
    assert float(result.std) == pytest.approx(math.sqrt(101), rel=1e-6)


def test_mixture_quantiles_take_weights_steps_and_distant_members(unchecked):
    mean, variance = random(3, 4), random(3, 4, seed=1).exp()
    weights = [0.2, 0.0, 0.8]
    result = ds.pooling.mixture_quantile(mean, variance, 0.3, weights)
    shares = ds.metrics.pit(mean[[0, 2]], variance[[0, 2]], result, weights=[0.2, 0.8])
    np.testing.assert_allclose(shares, 0.3, rtol=1e-12)
    mean[1] = math.nan  # of a member without weight
    assert torch.equal(ds.pooling.mixture_quantile(mean, variance, 0.3, weights), result)
    step = ds.pooling.mixture_quantile(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1), 0.25)
    assert step.item() == pytest.approx(1, abs=1e-15)
    far = ds.pooling.mixture_quantile(torch.tensor([[-1e150], [1e150]], dtype=torch.float64), torch.ones(2, 1), 0.75)
    assert far.item() == pytest.approx(1e150)
    unknown = ds.pooling.mixture_quantile(torch.tensor([[0.0, math.nan]]), torch.ones(1, 2), 0.5)
    assert unknown[0] == 0
    assert unknown[1].isnan()
    with pytest.raises(ValueError, match="the shape of `variance`"):
        ds.pooling.mixture_quantile(mean, variance[:2], 0.5)
    with pytest.raises(ValueError, match="`level` must be a number above 0 and below 1"):
        ds.pooling.mixture_quantile(mean, variance, 1.0)


def test_the_spread_of_members_by_squared_error_is_no_interval():
    outputs = random(4, 6, 2)
    for loss in (None, "mse", ds.losses.squared_error):
        result = regressed(outputs, loss)
        np.testing.assert_allclose(result.mean, outputs.mean(0))
        np.testing.assert_allclose(result.epistemic, outputs.numpy().var(0))
        np.testing.assert_allclose(result.std, outputs.numpy().std(0))
        assert not hasattr(result, "aleatoric")
        with pytest.raises(ValueError, match=r"Calibrate on held-out data: conformal=dissensus.conformal.calibrate"):
            result.interval(0.9)
    fitted = ds.conformal.calibrate(outputs, random(6, 2), task="regression")
    low, high = regressed(outputs, "mse", conformal=fitted).interval(0.7)
    expected = fitted.intervals(outputs, level=0.7)
    assert torch.equal(low, expected[0])
    assert torch.equal(high, expected[1])


def test_quantiles_equal_a_slow_oracle():
    outputs = random(3, 5, 8)  # crossed ones among them
    result = regressed(outputs, LEVELS)
    members = np.sort(outputs.numpy().reshape(3, 5, 2, 4), -1)
    np.testing.assert_allclose(result.mean, members[..., 2].mean(0))
    np.testing.assert_allclose(result.epistemic, members.var(0).mean(-1))
    widths = (members[..., 3] - members[..., 0]) / (norm.ppf(0.9) - norm.ppf(0.1))
    np.testing.assert_allclose(result.aleatoric, (widths**2).mean(0))
    np.testing.assert_allclose(result.std, np.sqrt((widths**2).mean(0) + members.var(0).mean(-1)))
    low, high = result.interval(0.8)
    np.testing.assert_allclose(low, members[..., 0].mean(0))
    np.testing.assert_allclose(high, members[..., 3].mean(0))
    np.testing.assert_allclose(result.quantile(0.25), members[..., 1].mean(0))
    with pytest.raises(ValueError, match=r"of \[0.1, 0.25, 0.5, 0.9\]; got the quantile 0.05. Train on other levels"):
        result.interval(0.9)


def test_gaussian_quantiles_have_the_variance_of_the_gaussian():
    levels = (0.05, 0.5, 0.95)
    outputs = torch.tensor(norm.ppf(levels, 3.0, 2.0)).expand(1, 1, 3)
    result = regressed(outputs, "quantile")
    assert float(result.mean) == pytest.approx(3)
    assert float(result.std) == pytest.approx(2)


def test_quantiles_without_a_middle_or_a_width_say_so():
    outputs = random(3, 5, 2)
    no_middle = regressed(outputs, partial(ds.losses.quantile, levels=(0.1, 0.9)))
    with pytest.raises(AttributeError, match="0.5 is one of their levels"):
        _ = no_middle.mean
    assert no_middle.interval(0.8)[0].shape == (5, 1)
    assert "mean" not in no_middle.frame(0.8)
    one = regressed(outputs, partial(ds.losses.quantile, levels=(0.5,)))
    assert one.mean.shape == (5, 2)
    for name in ("aleatoric", "std"):
        with pytest.raises(AttributeError, match="two levels or more"):
            getattr(one, name)


# --- of every task ----------------------------------------------------------------------------------------------------

EVERY = [
    ("classification", "cross_entropy", ["probs", "labels", "entropy", "aleatoric", "epistemic"]),
    ("classification", "brier", ["probs", "labels", "entropy", "aleatoric", "epistemic"]),
    ("multilabel", "bce", ["probs", "labels", "entropy", "aleatoric", "epistemic"]),
    ("regression", "mse", ["mean", "std", "epistemic"]),
    ("regression", "squared_error", ["mean", "std", "epistemic"]),
    ("regression", "gaussian_nll", ["mean", "std", "aleatoric", "epistemic"]),
    ("regression", "quantile", ["mean", "std", "aleatoric", "epistemic"]),
]
NUMBERS = ["probs", "labels", "entropy", "mean", "std", "aleatoric", "epistemic"]
every = pytest.mark.parametrize(("task", "loss", "known"), EVERY)


@every
def test_a_prediction_has_what_its_task_has_and_names_the_rest(task, loss, known):
    result = ds.predictive(random(3, 5, 6), task=task, loss=loss)
    assert [name for name in NUMBERS if hasattr(result, name)] == [name for name in NUMBERS if name in known]
    for name in set(NUMBERS) - set(known):
        with pytest.raises(AttributeError, match=f"`{name}` is not known from outputs of .*; known are {known[0]}"):
            getattr(result, name)
    assert len(result) == 5
    assert all(getattr(result, name).dtype in (torch.float64, torch.int64) for name in known)


@every
def test_neither_order_of_members_nor_layout_nor_slices_matter(task, loss, known, monkeypatch):
    outputs = random(3, 5, 6)
    expected = ds.predictive(outputs, task=task, loss=loss)
    monkeypatch.setattr(output_kinds, "_AT_ONCE", 36)
    for other in (outputs[[2, 0, 1]], outputs.numpy(), outputs.clone().requires_grad_()):
        result = ds.predictive(other, task=task, loss=loss)
        for name in known:
            torch.testing.assert_close(getattr(result, name), getattr(expected, name))
            assert not getattr(result, name).requires_grad
    half = ds.predictive(outputs.bfloat16(), task=task, loss=loss)
    wide = ds.predictive(outputs.bfloat16().double(), task=task, loss=loss)
    for name in known:
        torch.testing.assert_close(getattr(half, name), getattr(wide, name), rtol=1e-12, atol=1e-15)


@every
def test_nan_and_infinity_are_refused(task, loss, known):
    for value in (math.nan, math.inf):
        outputs = random(3, 5, 6)
        outputs[1, 2, 0] = outputs[0, 4, 1] = value
        with pytest.raises(ValueError, match="`outputs` must be numbers; got NaN or infinity in 2 examples"):
            ds.predictive(outputs, task=task, loss=loss)


def test_what_does_not_fit_is_refused_by_name(unchecked):
    outputs = random(3, 5, 6)
    with pytest.raises(ValueError, match="`task` must be one of 'classification', 'multilabel', 'regression'"):
        ds.predictive(outputs, task="clasification")
    with pytest.raises(ValueError, match="be one of 'squared_error', 'mse', 'gaussian_nll', 'quantile' for task='reg"):
        regressed(outputs, "cross_entropy")
    with pytest.raises(ValueError, match="`loss` must be one of"):
        regressed(outputs, lambda f, y: (f - y).sum(-1))
    with pytest.raises(ValueError, match="`loss` must be one of .*; got 'mes'"):
        regressed(outputs, "mes")
    with pytest.raises(ValueError, match="`pool` must be one of 'score'; got 'vote'"):
        regressed(outputs, pool="vote")
    with pytest.raises(ValueError, match="`kind` must be left out for task='regression'"):
        regressed(outputs, kind="probabilities")
    with pytest.raises(ValueError, match="be logits; got .*: probabilities. Use kind='probabilities'"):
        classified(outputs.softmax(-1))
    with pytest.raises(ValueError, match="`outputs` must be probabilities, which sum to one"):
        classified(outputs, kind="probabilities")
    with pytest.raises(ValueError, match="be probabilities from 0 to 1"):
        ds.predictive(outputs, task="multilabel", kind="probabilities")
    with pytest.raises(ValueError, match="two classes or more"):
        classified(outputs[..., :1])
    with pytest.raises(ValueError, match="have two outputs per target"):
        regressed(outputs[..., :5], "gaussian_nll")
    with pytest.raises(ValueError, match=r"have 3 outputs per target, for the levels \(0.05, 0.5, 0.95\)"):
        regressed(outputs[..., :4], "quantile")
    with pytest.raises(ValueError, match="at least one member, example and output"):
        classified(outputs[:, :0])
    with pytest.raises(ValueError, match=r"have shape \[M, N, C\]; got \[3, 5, 6, 2\]. .* dissensus.dense.flat"):
        classified(random(3, 5, 6, 2))
    with pytest.raises(TypeError, match="torch.stack"):
        classified([outputs[0], outputs[1]])
    with pytest.raises(ValueError, match="log-variances below 709; got 1000"):
        regressed(torch.tensor([[[0.0, 1000.0]]]), "gaussian_nll")
    with pytest.raises(ValueError, match="be 'regression' for intervals"):
        classified(outputs).interval()
    with pytest.raises(ValueError, match="be 'classification' for sets"):
        regressed(outputs).sets()
    with pytest.raises(ValueError, match="`level` must be a number above 0 and below 1"):
        classified(outputs).sets(1.0)


def test_a_calibration_must_be_of_the_same_prediction(unchecked):
    outputs, labels = random(3, 20, 4), torch.arange(20) % 4
    fitted = ds.conformal.calibrate(outputs, labels, task="classification", method="aps")
    assert torch.equal(classified(outputs, conformal=fitted).sets(0.8), fitted.sets(outputs, level=0.8))
    brier = classified(outputs, loss="brier", conformal=fitted)  # reads outputs in the same way
    assert torch.equal(brier.sets(), fitted.sets(outputs))
    with pytest.raises(
        ValueError, match=r"calibrated for outputs of pool='score'; got pool='probability'\. .*the same"
    ):
        classified(outputs, pool="score", conformal=fitted)
    with pytest.raises(TypeError, match="`conformal` must be a Conformal; got dict. Use .*of_record"):
        classified(outputs, conformal=fitted.record())


def test_one_target_may_leave_out_its_axis():
    outputs = random(3, 5)
    torch.testing.assert_close(regressed(outputs).mean, outputs.mean(0).unsqueeze(-1))


# --- frames and figures -----------------------------------------------------------------------------------------------


def test_frames_of_classes():
    outputs, labels = 2 * random(3, 20, 3), torch.arange(20) % 3
    fitted = ds.conformal.calibrate(outputs, labels, task="classification")
    result = classified(outputs, conformal=fitted)
    frame = result.frame(names=["ant", "bee", "cat"])
    numbers = ["entropy", "aleatoric", "epistemic"]
    assert list(frame) == ["label", "confidence", *numbers, "set", "p_ant", "p_bee", "p_cat"]
    assert frame["label"].tolist() == [["ant", "bee", "cat"][label] for label in result.labels]
    np.testing.assert_allclose(frame["p_bee"], result.probs[:, 1])
    np.testing.assert_allclose(frame["confidence"], result.probs.max(-1).values)
    assert [len(names) for names in frame["set"]] == result.sets(0.9).sum(-1).tolist()
    assert "set" not in classified(outputs).frame()
    with pytest.raises(ValueError, match="`names` must be 3 names; got 2 of them"):
        result.frame(names=["ant", "bee"])


def test_frames_of_values_and_labels():
    result = regressed(random(3, 5, 2), "gaussian_nll")
    frame = result.frame(0.5)
    assert list(frame) == ["mean", "std", "aleatoric", "epistemic", "low", "high"]
    np.testing.assert_allclose(frame["low"], result.interval(0.5)[0][:, 0])
    assert list(regressed(random(3, 5, 1)).frame()) == ["mean", "std", "epistemic"]
    two = regressed(random(3, 5, 2)).frame(names=["a", "b"])
    assert list(two) == ["mean_a", "std_a", "epistemic_a", "mean_b", "std_b", "epistemic_b"]
    labels = ds.predictive(random(3, 5, 2), task="multilabel").frame()
    assert list(labels)[:5] == ["p_0", "label_0", "entropy_0", "aleatoric_0", "epistemic_0"]
    assert "low" not in regressed(random(3, 5, 3), "quantile").frame(0.8)


def drawn(figure):
    figure.canvas.draw()
    return figure.axes


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_figures_of_values():
    outputs, targets = random(3, 50, 2), torch.linspace(-2, 2, 50)
    result = regressed(outputs, "gaussian_nll")
    low, high = result.interval(0.8)
    share = ((low[:, 0] <= targets) & (targets <= high[:, 0])).double().mean()
    figure = result.plot(targets, level=0.8)
    (axes,) = drawn(figure)
    assert axes.get_title("left") == f"{100 * share:.1f} % of 50 targets inside"
    assert legend_of(figure) == ["mean", "80 % interval", "target, inside", "target, outside"]
    over = result.plot(targets, x=torch.arange(50), x_label="day")
    (axes,) = drawn(over)
    assert axes.get_xlabel() == "day"
    assert legend_of(over) == ["mean", "90 % interval", "±2 std of the members", "targets"]
    two = regressed(outputs).plot(names=["height", "width"])
    assert [axes.get_title("left") for axes in drawn(two)] == ["height", "width"]
    assert legend_of(two) == ["mean", "±2 std of the members"]
    with pytest.raises(ValueError, match=r"`x` must be one number per example, \[N=50\]; got \[50, 2\]"):
        result.plot(x=outputs[0])


def test_figures_of_infinite_intervals_are_drawn():
    outputs = random(3, 5, 1)
    fitted = ds.conformal.calibrate(outputs, random(5), task="regression", method="absolute")
    result = regressed(outputs, conformal=fitted)
    assert bool(result.interval(0.9)[0].isinf().all())
    for figure in (result.plot(random(5)), result.plot(random(5), x=torch.arange(5))):
        assert drawn(figure)[0].get_title("left") == "100.0 % of 5 targets inside"


def test_figures_of_classes():
    outputs, labels = 2 * random(3, 50, 3), torch.arange(50) % 3
    assert len(drawn(classified(outputs).plot())) == 2
    fitted = ds.conformal.calibrate(outputs, labels, task="classification")
    result = classified(outputs, conformal=fitted)
    axes = drawn(result.plot(labels, level=0.8))
    right = float((result.labels == labels).double().mean())
    held = float(result.sets(0.8)[torch.arange(50), labels].double().mean())
    assert axes[0].get_title("left") == f"confidence: {100 * right:.1f} % right"
    assert axes[2].get_title("left") == f"80 % sets: {100 * held:.1f} % hold the truth"
    assert sum(bar.get_height() for bar in axes[2].patches) == pytest.approx(1)
    points = [tuple(line.get_xdata()) for line in axes[1].lines]
    assert sorted(x for part in points for x in part) == pytest.approx(sorted(result.aleatoric.tolist()))
    several = ds.predictive(outputs, task="multilabel").plot(outputs[0] > 0)
    assert sum(len(line.get_xdata()) for line in drawn(several)[1].lines) == 150
    with pytest.raises(ValueError, match="`x` must be left out"):
        result.plot(x=torch.arange(50))


def test_absent_packages_are_named_with_their_extra(monkeypatch):
    result = classified()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"a frame needs pandas: pip install 'dissensus\[data\]'"):
        result.frame()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"figures need matplotlib: pip install 'dissensus\[report\]'"):
        result.plot()

"""Estimators with scikit-learn's interface: its own checks, and what they promise beyond those."""

import copy
import functools
import io
import pickle
import subprocess
import sys
from contextlib import redirect_stdout

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse, stats
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.datasets import make_classification, make_multilabel_classification, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import dissensus as ds
from dissensus.sklearn import EnsembleClassifier, EnsembleRegressor
from dissensus.sklearn.columns import Columns
from dissensus.sklearn.estimators import _halves

SMALL = {"members": 2, "hidden": 8, "lr": 0.02, "batch_size": 16, "epochs": 20}
STOCHASTIC = {
    "check_sample_weight_equivalence_on_dense_data": (
        "rows that are repeated are drawn into other mini-batches than rows with a weight, "
        "as scikit-learn says of its own stochastic estimators"
    ),
}


# Values of the integer limits that a check hands to every estimator do not fit into float32 arithmetic of numpy.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@parametrize_with_checks(
    [EnsembleClassifier(**SMALL), EnsembleRegressor(**SMALL)], expected_failed_checks=lambda _: STOCHASTIC
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def classes():
    x, y = make_classification(240, 6, n_informative=4, n_classes=3, random_state=0)
    return x, np.array(["low", "mid", "top"])[y]


@pytest.fixture(scope="module")
def values():
    x, y = make_regression(200, 5, noise=20.0, random_state=0)
    return x, y


def classifier(**settings):
    return EnsembleClassifier(**{"random_state": 0, **SMALL, "epochs": 8, **settings})


def regressor(**settings):
    return EnsembleRegressor(**{"random_state": 0, **SMALL, "epochs": 8, **settings})


@pytest.fixture(scope="module")
def fitted(classes):
    return classifier(epochs=20).fit(*classes)


def test_texts_are_classes_and_members_make_the_prediction(fitted, classes):
    x, y = classes
    assert fitted.classes_.tolist() == ["low", "mid", "top"]
    assert fitted.score(x, y) > 0.7
    members, probs = fitted.predict_members(x), fitted.predict_proba(x)
    assert members.shape == (2, 240, 3)
    np.testing.assert_allclose(members.mean(0), probs, rtol=1e-12)
    np.testing.assert_allclose(np.exp(fitted.predict_log_proba(x)), probs, rtol=1e-12)
    assert (fitted.predict(x) == fitted.classes_[probs.argmax(1)]).all()
    scored = classifier(epochs=2, pool="score").fit(x, y)
    logits = np.log(scored.predict_members(x)).mean(0)
    np.testing.assert_allclose(scored.predict_log_proba(x), logits - np.log(np.exp(logits).sum(1, keepdims=True)))


def test_uncertainty_of_classes_is_that_of_the_members(fitted, classes):
    uncertainty = fitted.predict_uncertainty(classes[0])
    members = fitted.predict_members(classes[0])
    np.testing.assert_allclose(uncertainty.total, stats.entropy(members.mean(0), axis=-1), rtol=1e-9)
    np.testing.assert_allclose(uncertainty.aleatoric, stats.entropy(members, axis=-1).mean(0), rtol=1e-9)
    np.testing.assert_allclose(uncertainty.total, uncertainty.aleatoric + uncertainty.epistemic, rtol=1e-9)
    assert uncertainty.std is None


@pytest.mark.parametrize("make", [classifier, regressor])
@pytest.mark.parametrize("fraction", [None, 0.2])
def test_rows_of_weight_zero_are_absent(make, fraction, classes, values):
    x, y = classes if make is classifier else values
    weights = np.random.default_rng(0).integers(0, 3, len(y)).astype(float)
    model = make(epochs=3, validation_fraction=fraction)
    weighted = clone(model).fit(x, y, sample_weight=weights)
    without = clone(model).fit(x[weights > 0], y[weights > 0], sample_weight=weights[weights > 0])
    assert (weighted.predict_members(x) == without.predict_members(x)).all()
    plain = clone(model).fit(x, y)
    assert (
        clone(model).fit(x, y, sample_weight=np.full(len(y), 3.0)).predict_members(x) == plain.predict_members(x)
    ).all()
    assert not np.allclose(weighted.predict_members(x), plain.predict_members(x))
    with pytest.raises(ValueError, match="zeros only|non-zero"):
        model.fit(x, y, sample_weight=np.zeros(len(y)))


def test_class_weights_are_weights_of_rows(classes):
    x, y = classes
    x, y = x[20:], y[20:]
    by_hand = dict(zip(["low", "mid", "top"], compute_class_weight("balanced", classes=np.unique(y), y=y), strict=True))
    balanced = classifier(epochs=2, scale=False, class_weight="balanced").fit(x, y).predict_proba(x)
    # Means and scales of columns go by weights of rows, and not by those of classes.
    plain = classifier(epochs=2, scale=False)
    rows = clone(plain).fit(x, y, sample_weight=[by_hand[label] for label in y]).predict_proba(x)
    np.testing.assert_allclose(balanced, rows, rtol=1e-12)
    np.testing.assert_allclose(plain.set_params(class_weight=by_hand).fit(x, y).predict_proba(x), rows, rtol=1e-12)
    heavy = classifier(class_weight={"top": 50.0}).fit(x, y).predict_proba(x)[:, 2].mean()
    assert heavy > classifier().fit(x, y).predict_proba(x)[:, 2].mean() + 0.1
    for wrong, words in [
        ({"best": 1.0}, "name classes"),
        ([1, 2, 3], "dictionary"),
        ({"low": -1.0}, "at least 0|0 or"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            classifier(class_weight=wrong).fit(x, y)
    with pytest.raises(ValueError, match="dictionary for partial_fit"):
        classifier(class_weight="balanced").partial_fit(x, y)


def test_held_out_rows_have_the_same_share_of_every_class(classes):
    x, y = classes
    rare = np.concatenate([np.flatnonzero(y == "low")[:20], np.flatnonzero(y != "low")])
    model = classifier(epochs=1, validation_fraction=0.2).fit(x[rare], y[rare])
    held_out = ~model.ensemble_.in_bag.any(0).numpy()
    assert held_out.sum() == round(0.2 * len(rare))
    assert (y[rare][held_out] == "low").sum() == 4
    assert classifier(epochs=1, validation_fraction=None).fit(x, y).ensemble_.in_bag == "all"
    assert classifier(epochs=1, validation_fraction=0.02).fit(x, y).ensemble_.in_bag == "all"  # 5 rows: too few


def test_early_stopping_keeps_the_best_epoch(classes):
    model = classifier(epochs=60, lr=0.1, patience=2).fit(*classes)
    assert model.history_.stopped_early
    assert model.n_iter_ == model.history_.best_epoch + 2 < 60


@pytest.mark.parametrize("loss", ["mse", "gaussian_nll", "quantile"])
def test_regression_is_equivariant_in_the_unit_of_y(loss, values):
    x, y = values
    plain, other = (regressor(loss=loss).fit(x, target) for target in (y, 1e-3 * y + 7.0))
    np.testing.assert_allclose(other.predict(x), 1e-3 * plain.predict(x) + 7.0, rtol=1e-4, atol=1e-4)
    first, second = plain.predict_uncertainty(x), other.predict_uncertainty(x)
    np.testing.assert_allclose(second.std, 1e-3 * first.std, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(second.epistemic, 1e-6 * first.epistemic, rtol=2e-2, atol=1e-10)
    if loss == "mse":
        assert first.total is first.aleatoric is first.lower is None
        with pytest.raises(ValueError, match=r"Call calibrate\(X, y\)"):
            plain.predict_interval(x)
    else:
        np.testing.assert_allclose(first.std**2, first.aleatoric + first.epistemic)
        assert (first.lower < first.upper).all()
        np.testing.assert_allclose(second.upper, 1e-3 * first.upper + 7.0, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
def test_variances_are_scaled_back_exactly(scale, values):
    x, y = values
    model = regressor(loss="gaussian_nll", epochs=2).fit(x, scale * y)
    outputs = model.ensemble_.predict(torch.from_numpy(model.columns_.features(x))).double()
    mean, variance = ds.losses.gaussian_moments(outputs)  # of the standardised target, with the floor of training
    unit = np.std(scale * y)
    uncertainty = model.predict_uncertainty(x)
    np.testing.assert_allclose(uncertainty.aleatoric, unit**2 * variance.mean(0)[:, 0].numpy(), rtol=1e-9)
    np.testing.assert_allclose(uncertainty.epistemic, unit**2 * mean.var(0, correction=0)[:, 0].numpy(), rtol=1e-6)
    np.testing.assert_allclose(model.predict(x), np.mean(scale * y) + unit * mean.mean(0)[:, 0].numpy(), rtol=1e-9)
    low, _ = model.predict_interval(x[:1], 0.8)
    centres, spreads = np.mean(scale * y) + unit * mean[:, 0, 0].numpy(), unit * variance[:, 0, 0].sqrt().numpy()
    assert stats.norm(centres, spreads).cdf(low[0]).mean() == pytest.approx(0.1, abs=1e-6)


def test_quantiles_without_a_median_are_interpolated(values):
    x, y = values
    model = regressor(loss="quantile", quantile_levels=(0.1, 0.4, 0.8), epochs=2).fit(x, y)
    outputs = model.ensemble_.predict(torch.from_numpy(model.columns_.features(x))).double().sort(-1).values
    expected = (outputs[..., 1] + 0.25 * (outputs[..., 2] - outputs[..., 1])).mean(0).numpy()
    np.testing.assert_allclose(model.predict(x), np.std(y) * expected + np.mean(y), rtol=1e-9)
    with pytest.raises(ValueError, match=r"quantile_levels.*add 0\.5"):
        regressor(loss="quantile", quantile_levels=(0.8, 0.9)).fit(x, y)


@pytest.mark.parametrize("loss", ["mse", "gaussian_nll", "quantile"])
def test_several_targets(loss, values):
    x, y = values
    both = np.column_stack([y, -100 * x[:, 0] + 5])
    model = regressor(loss=loss, epochs=30).fit(x, both)
    assert model.predict(x).shape == (200, 2)
    assert model.predict_members(x).shape == (2, 200, 2)
    assert model.score(x, both) > 0.7
    model.calibrate(x, both)
    low, high = model.predict_interval(x, 0.8)
    assert low.shape == (200, 2)
    assert (((low <= both) & (both <= high)).mean(0) > 0.7).all()
    with pytest.raises(ValueError, match="2 columns"):
        model.partial_fit(x, y)


def test_several_labels():
    x, y = make_multilabel_classification(200, 6, n_classes=3, random_state=0)
    model = classifier(epochs=20).fit(x, y)
    probs = model.predict_proba(x)
    assert probs.shape == (200, 3)
    np.testing.assert_allclose(model.predict_members(x).mean(0), probs)
    assert (model.predict(x) == (probs > 0.5)).all()
    assert (model.predict(x) == y).mean() > 0.75
    assert model.predict_uncertainty(x).epistemic.shape == (200, 3)
    for refused in (functools.partial(model.calibrate, x, y), functools.partial(model.audit, x, y)):
        with pytest.raises(ValueError, match="one class per row"):
            refused()
    with pytest.raises(ValueError, match="MultiOutputClassifier"):
        model.fit(x, np.column_stack([y[:, 0] + 3, y[:, 1] + 1]))


def test_degenerate_targets(values):
    x, y = values
    with pytest.raises(ValueError, match="two classes or more; got one class"):
        classifier().fit(x, np.full(len(y), "only"))
    with pytest.raises(TypeError, match="Drop rows without a class"):
        classifier().fit(x, np.array(["a", None] * 100, dtype=object))
    for loss in ("mse", "gaussian_nll", "quantile"):
        constant = regressor(loss=loss).fit(x, np.full(len(y), 7.0))
        np.testing.assert_allclose(constant.predict(x), 7.0, atol=1.5)
        single = regressor(loss=loss).fit(x[:1], y[:1])
        assert np.isfinite(single.predict(x)).all()
    with pytest.raises(TypeError, match="[Ss]parse"):
        regressor().fit(sparse.csr_matrix(x), y)


def frame_of(rows=120):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "size": rng.normal(5, 2, rows),
            "colour": rng.choice(["red", "green", "blue"], rows),
            "grade": pd.Categorical(rng.choice([1, 2, 3], rows)),
            "new": rng.random(rows) < 0.5,
        }
    )
    return frame, frame["size"] + 3 * (frame["colour"] == "red") - 2 * frame["new"]


def test_frames_with_categories():
    frame, y = frame_of()
    model = regressor(epochs=40, hidden=16).fit(frame, y)
    assert model.columns_.width == 1 + 3 + 3 + 2
    assert model.score(frame, y) > 0.9
    assert model.feature_names_in_.tolist() == list(frame.columns)
    unseen = frame.head(2).copy()
    unseen["colour"] = "mauve"
    features = model.columns_.features(unseen)
    assert (features[:, 1:4] == 0).all()
    assert np.isfinite(model.predict(unseen)).all()
    with pytest.raises(ValueError, match="same order"):
        model.predict(frame[["colour", "size", "grade", "new"]])
    with pytest.raises(ValueError, match="be a frame with the columns of training"):
        model.predict(np.zeros((2, 4)))
    with pytest.raises(TypeError, match="column 'colour'` must hold texts, as in training"):
        model.predict(frame.assign(colour=1.5))
    with pytest.raises(
        TypeError, match=r"column 'new'` must hold numbers or truth values .* got '(True|False)'.* its texts"
    ):
        model.predict(frame.assign(new=frame["new"].astype(bool).astype(str)))
    with pytest.raises(TypeError, match=r"column 'colour'` must hold texts, as in training; got True"):
        model.predict(frame.assign(colour=pd.Series([True] * len(frame), dtype=object, index=frame.index)))
    long = pd.concat([frame] * 3).assign(name=[f"row {row}" for row in range(360)])
    with pytest.raises(ValueError, match="at most 256 categories"):
        model.fit(long, pd.concat([y] * 3))
    with pytest.raises(TypeError, match="column 'day'` must hold numbers or categories"):
        model.fit(frame.assign(day=pd.Timestamp("2020-01-01")), y)


def test_missing_values_are_refused_or_imputed():
    frame, y = frame_of()
    frame.loc[3, "size"] = np.nan
    frame.loc[4, "colour"] = None
    with pytest.raises(ValueError, match=r"column 'size' contains NaN.*impute=True"):
        regressor().fit(frame, y)
    model = regressor(impute=True).fit(frame, y)
    features = model.columns_.features(frame)
    assert features.shape[1] == 2 + 3 + 3 + 2
    assert features[:, 1].nonzero()[0].tolist() == [3]
    size = frame["size"]
    assert features[3, 0] == pytest.approx((size.median() - size.mean()) / size.std(ddof=0), abs=1e-6)
    assert (features[4, 2:5] == 0).all()
    x = np.array([[1.0, 2.0], [np.nan, 4.0], [3.0, 6.0], [5.0, 8.0]])
    with pytest.raises(ValueError, match=r"X contains NaN.*impute=True"):
        regressor().fit(x, [1, 2, 3, 4.0])
    with pytest.raises(ValueError, match=r"X contains NaN.*impute=True"):
        regressor().fit(x[2:], [3, 4.0]).predict(x)
    whole, _ = frame_of()
    with pytest.raises(ValueError, match=r"column 'colour' contains NaN.*impute=True"):
        regressor().fit(whole, y).predict(whole.assign(colour=frame["colour"]))
    array = Columns.fit(x, impute=True)
    assert array.features(x)[:, 1].tolist() == [0, 1, 0, 0]
    later = Columns.fit(x[[0, 2, 3]], impute=True)  # which has seen no missing value, and so has no mark
    assert later.features(x)[1, 0] == 0  # its median is its mean


def test_columns_in_another_order_are_refused_whatever_names_they_have():
    frame = pd.DataFrame({0: [1.0, 2.0, 3.0, 4.0] * 5, 1: ["a", "b"] * 10, 2: ["a", "a", "b", "b"] * 5})
    model = EnsembleClassifier(members=2, hidden=(4,), epochs=1, random_state=0).fit(frame, [0, 1] * 10)
    assert model.predict_proba(frame).shape == (20, 2)
    with pytest.raises(ValueError, match=r"`X` must have the columns of training in their order \(0, 1, 2 ...\)"):
        model.predict_proba(frame[[0, 2, 1]])


@pytest.mark.parametrize("large", [1.0, 1e200])
def test_columns_are_standardised_by_weights(large):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(3, 2, (50, 2)) * large, rng.integers(1, 4, 50)
    x = np.column_stack([x, np.full(50, 0.1)])
    columns = Columns.fit(x, weights=weights.astype(float))
    repeated = np.repeat(x / large, weights, 0)
    expected = (x / large - repeated.mean(0))[:, :2] / repeated.std(0)[:2]
    np.testing.assert_allclose(columns.features(x)[:, :2], expected, rtol=1e-5)
    assert (np.abs(columns.features(x)[:, 2]) < 1e-6).all()
    assert Columns.of_record(columns.record()) == columns


def test_wide_tables():
    x = np.random.default_rng(0).normal(size=(20, 3000))
    model = classifier(epochs=1).fit(x, np.arange(20) % 2)
    assert model.predict_proba(x).shape == (20, 2)


def test_seeds_decide(classes):
    x, y = classes
    first, again, other = (classifier(epochs=2, random_state=seed).fit(x, y).predict_proba(x) for seed in (0, 0, 1))
    assert (first == again).all()
    assert not np.allclose(first, other)
    before = torch.get_rng_state()
    classifier(epochs=1).fit(x, y)
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_that_are_changed_after_training_wait_for_the_next_one(classes, values, tmp_path):
    x, y = values
    model = EnsembleRegressor(loss="quantile", quantile_levels=(0.05, 0.5, 0.95), **SMALL).fit(x, y)
    expected = model.predict_interval(x, 0.9)
    model.set_params(quantile_levels=(0.25, 0.5, 0.75), loss="mse")
    model.save(tmp_path / "model")
    for estimator in (model, copy.deepcopy(model), EnsembleRegressor.load(tmp_path / "model")):
        assert estimator.get_params()["loss"] == "mse"
        np.testing.assert_array_equal(estimator.predict_interval(x, 0.9), expected)
    with pytest.raises(ValueError, match="level"):
        model.predict_interval(x, 0.5)
    assert model.fit(x, y).predict_uncertainty(x).total is None, "the next training takes them"
    classifier = EnsembleClassifier(pool="score", **SMALL).fit(*classes)
    expected = classifier.predict_proba(classes[0])
    np.testing.assert_array_equal(classifier.set_params(pool="probability").predict_proba(classes[0]), expected)


def test_pickles_and_copies_predict_the_same(fitted, classes):
    loaded = pickle.loads(pickle.dumps(fitted))
    assert (loaded.predict_proba(classes[0]) == fitted.predict_proba(classes[0])).all()
    assert clone(fitted).get_params() == fitted.get_params()
    assert not hasattr(clone(fitted), "ensemble_")


def module(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def test_saved_classifiers_predict_the_same(classes, tmp_path):
    x, y = classes
    model = classifier(
        epochs=2, class_weight={"low": 2.0}, objective="augmented", objective_params={"beta": np.float64(0.5)}
    )
    model.fit(x[:150], y[:150]).calibrate(x[150:], y[150:])
    model.save(tmp_path / "model")
    assert not [file for file in (tmp_path / "model").rglob("*") if file.suffix in (".pkl", ".pickle", ".pt")]
    loaded = EnsembleClassifier.load(tmp_path / "model")
    assert (loaded.predict_proba(x) == model.predict_proba(x)).all()
    assert (loaded.predict_set(x) == model.predict_set(x)).all()
    assert loaded.get_params() == model.get_params()
    assert loaded.history_ == model.history_
    assert loaded.temperature_ == model.temperature_ != 1
    assert (loaded.partial_fit(x, y).predict_proba(x) == model.partial_fit(x, y).predict_proba(x)).all()
    with pytest.raises(ds.StorageError, match=r"use dissensus\.sklearn\.EnsembleClassifier\.load"):
        EnsembleRegressor.load(tmp_path / "model")
    model.ensemble_.save(tmp_path / "model" / "ensemble")
    with pytest.raises(ds.StorageError, match="not those that estimator.json was saved with"):
        EnsembleClassifier.load(tmp_path / "model")
    with pytest.raises(ds.StorageError, match="holds no estimator.json"):
        EnsembleClassifier.load(tmp_path)


@pytest.mark.parametrize("loss", ["mse", "gaussian_nll", "quantile"])
def test_saved_regressors_predict_the_same(loss, tmp_path):
    frame, y = frame_of()
    model = regressor(epochs=2, loss=loss, module=module, random_state=np.random.RandomState(0)).fit(frame, y)
    model.calibrate(frame, y).save(tmp_path)
    with pytest.raises(ValueError, match=r"`module` must be given again.*module=\.\.\."):
        EnsembleRegressor.load(tmp_path)
    with pytest.raises(ValueError, match="`objective` must be left out"):
        EnsembleRegressor.load(tmp_path, module=module, objective=ds.objectives.joint)
    loaded = EnsembleRegressor.load(tmp_path, module=module)
    assert (loaded.predict(frame) == model.predict(frame)).all()
    for ours, saved in zip(model.predict_interval(frame), loaded.predict_interval(frame), strict=True):
        assert (ours == saved).all()
    assert loaded.random_state is None


def test_partial_fit_goes_on(classes):
    x, y = classes
    model = classifier(batch_size=32)
    with pytest.raises(ValueError, match=r"classes that are known.*classes="):
        clone(model).partial_fit(x[y != "top"], y[y != "top"]).partial_fit(x, y)
    model.partial_fit(x[:40], y[:40], classes=["low", "mid", "top"])
    with pytest.raises(ValueError, match=r"`classes` must be those of the first call \(\['low', 'mid', 'top'\]\)"):
        model.partial_fit(x, y, classes=["low", "mid", "new", "top"])
    scale = model.columns_
    for _ in range(15):
        for start in range(0, 240, 80):
            model.partial_fit(x[start : start + 80], y[start : start + 80])
    assert model.columns_ is scale
    assert model.n_iter_ == 46
    assert model.score(x, y) > 0.75
    first = clone(model).partial_fit(x, y).ensemble_
    whole = clone(model).set_params(epochs=1, validation_fraction=None).fit(x, y).ensemble_
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), whole.parameters(), strict=True))


def test_warm_starts_go_on(values):
    x, y = values
    model = regressor(epochs=3, warm_start=True, validation_fraction=None).fit(x, y)
    before, ensemble = model.history_.column("loss")[-1], model.ensemble_
    model.fit(x, y)
    assert model.ensemble_.seed == ensemble.seed
    assert model.history_.column("loss")[-1] < before
    with pytest.raises(ValueError, match="`members` must be 2, as in the ensemble that goes on"):
        model.set_params(members=3).fit(x, y)
    model.set_params(members=2, warm_start=False).fit(x, y)
    assert model.ensemble_ is not ensemble


def test_a_training_that_fails_leaves_no_fitted_estimator(values):
    x, y = values
    model = regressor(lr=1e30, epochs=3)
    with pytest.raises(ds.TrainingDiverged):
        model.fit(x, y)
    assert not hasattr(model, "ensemble_")


@pytest.mark.parametrize("warm", [False, True], ids=["anew", "warm"])
def test_a_training_that_fails_leaves_the_estimator_as_it_was(warm, values):
    x, y = values
    model = regressor(epochs=3, warm_start=warm).fit(x, y).calibrate(x, y)
    before, interval = model.predict(x), model.predict_interval(x)
    with pytest.raises(ds.TrainingDiverged):
        model.set_params(lr=1e30).fit(100 * x + 5, 10 * y)
    assert (model.predict(x) == before).all()
    assert np.array_equal(model.predict_interval(x), interval)
    with pytest.raises(ds.TrainingDiverged):
        model.partial_fit(x, y)
    assert (model.predict(x) == before).all()


@pytest.mark.parametrize(
    ("objective", "params"),
    [
        ("augmented", {"beta": 0.7}),
        ("joint", None),
        ("adp", {"alpha": 0.5, "beta": 0.1}),
        ("ldr", {"strength": 0.1}),
        (functools.partial(ds.objectives.augmented, beta=0.7), None),
    ],
    ids=["augmented", "joint", "adp", "ldr", "own"],
)
def test_objectives(objective, params, classes):
    x, y = classes
    model = classifier(objective=objective, objective_params=params).fit(x, y)
    assert model.score(x, y) > 0.5
    assert not np.allclose(model.predict_proba(x), classifier().fit(x, y).predict_proba(x))


def test_settings_that_do_not_fit_are_refused(classes, values):
    x, y = classes
    for settings, words in [
        ({"objective": "agmented"}, "augmented"),
        ({"objective": "augmented", "objective_params": {"bta": 1}}, "parameters of the objective"),
        ({"objective": "augmented"}, r"no 'beta'. Pass objective_params=\{'beta': ...\}"),
        ({"objective": "a2d"}, "Use dissensus.fit"),
        ({"loss": "mse"}, "cross_entropy"),
        ({"pool": "vote"}, "probability"),
        ({"module": nn.Linear(6, 3)}, "returns a network"),
        ({"module": 5}, "function of the numbers of inputs"),
        ({"members": 0}, "members"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            classifier(**settings).fit(x, y)
    with pytest.raises(ValueError, match="loss"):
        regressor(loss="cross_entropy").fit(*values)
    model = classifier().set_params(objective_params__beta=0.3, objective="augmented")
    assert model.objective_params == {"beta": 0.3}


def test_modules_of_a_user(classes):
    x, y = classes
    model = classifier(module=module, epochs=2).fit(x, y)
    assert isinstance(model.ensemble_.member(0)[1], nn.Tanh)
    assert model.predict_proba(x).shape == (240, 3)


def test_calibrated_sets_hold_their_level():
    x, y = make_classification(3000, 8, n_informative=4, n_classes=3, flip_y=0.2, random_state=1)
    model = classifier(epochs=30, hidden=64, patience=None, validation_fraction=None).fit(x[:200], y[:200])
    before = -model.predict_log_proba(x[1000:])[np.arange(2000), y[1000:]].mean()
    model.calibrate(x[200:1000], y[200:1000])
    assert model.temperature_ > 1  # it was trained too long
    assert -model.predict_log_proba(x[1000:])[np.arange(2000), y[1000:]].mean() < before
    for method in ("aps", "lac", "raps"):
        held = model.calibrate(x[200:1000], y[200:1000], method=method).predict_set(x[1000:])[np.arange(2000), y[1000:]]
        assert held.mean() > 0.9 - 3 * np.sqrt(0.09 * (1 / 400 + 1 / 2000))
    assert model.fit(x[:200], y[:200]).temperature_ == 1.0
    assert model.conformal_ is None


def test_temperature_and_sets_use_different_rows(fitted, classes):
    x, y = classes
    model = pickle.loads(pickle.dumps(fitted))
    labels = torch.from_numpy(np.searchsorted(model.classes_, y))
    first, second = _halves(labels, model.seed_)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(240))
    model.calibrate(x, y)
    temperature, scores = model.temperature_, model.conformal_.scores
    # Features of the second half do not matter for the temperature, nor those of the first half for scores.
    x_other = x.copy()
    x_other[second] = x[second][::-1]
    assert model.calibrate(x_other, y).temperature_ == temperature
    assert model.conformal_.scores != scores
    x_other = x.copy()
    x_other[first] = 0.0
    other = model.calibrate(x_other, y)
    assert other.temperature_ != temperature
    other.temperature_ = temperature
    assert other._conformal_of(x[second], labels[second], None).scores == scores


@pytest.mark.parametrize("rare_is_easy", [True, False])
def test_halves_of_calibration_rows_leave_the_coverage_exact(rare_is_easy):
    # Many classes, most of them rare, whose scores differ by class: halves by class would cover 74 % or 88 %.
    rng, size, kinds, level = np.random.default_rng(0), 39, 60, 0.8
    shares = 1 / np.arange(1, kinds + 1)
    covered = []
    for seed in range(600):
        labels = rng.choice(kinds, size=size + 20, p=shares / shares.sum())
        scores = np.where(rare_is_easy, kinds - labels, labels) + 0.01 * rng.random(size + 20)
        _, second = _halves(torch.from_numpy(labels[:size]), seed)
        ranked = np.sort(scores[second])
        covered.append((scores[size:] <= ranked[int(np.ceil(level * (len(ranked) + 1))) - 1]).mean())
    assert level - 3 * stats.sem(covered) <= np.mean(covered) <= level + 1 / 20 + 3 * stats.sem(covered)


def test_too_few_rows_give_the_whole_set(fitted, classes, values):
    x, y = classes
    model = pickle.loads(pickle.dumps(fitted))
    for rows in (1, 3, 8):
        assert model.calibrate(x[:rows], y[:rows]).predict_set(x, 0.9).all()
    assert model.temperature_ > 0
    assert model.calibrate(x[:3], y[:3]).temperature_ == 1.0
    with pytest.raises(ValueError, match="classes that are known"):
        model.calibrate(x[:3], ["low", "mid", "odd"])
    numbers = regressor(epochs=1).fit(*values).calibrate(values[0][:5], values[1][:5])
    low, high = numbers.predict_interval(values[0])
    assert np.isneginf(low).all()
    assert np.isposinf(high).all()


def test_a_temperature_without_errors_stays_one():
    x = np.concatenate([np.full((60, 2), -3.0), np.full((60, 2), 3.0)]) + np.random.default_rng(0).normal(size=(120, 2))
    y = np.arange(120) // 60
    model = classifier(epochs=20).fit(x, y).calibrate(x, y)
    assert model.score(x, y) == 1.0
    assert model.temperature_ == 1.0


@pytest.mark.parametrize("loss", ["mse", "gaussian_nll", "quantile"])
def test_calibrated_intervals_hold_their_level(loss):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (2600, 1))
    y = np.sin(2 * x[:, 0]) + (0.1 + 0.3 * (x[:, 0] > 0)) * rng.normal(size=2600)
    model = (
        regressor(loss=loss, epochs=60, hidden=32, patience=None)
        .fit(x[:200], y[:200])
        .calibrate(x[200:600], y[200:600])
    )
    low, high = model.predict_interval(x[600:], 0.9)
    inside = (low <= y[600:]) & (y[600:] <= high)
    assert 0.84 < inside.mean() < 0.96
    uncertainty = model.predict_uncertainty(x[600:])
    assert (uncertainty.lower == low).all()
    if loss == "gaussian_nll":
        z = (y[600:] - model.predict(x[600:])) / uncertainty.std
        assert 0.8 < (z**2).mean() < 1.3
        assert (high - low)[x[600:, 0] > 0.5].mean() > 1.5 * (high - low)[x[600:, 0] < -0.5].mean()


def test_the_audit_reads_the_members(fitted, classes, values):
    x, y = classes
    labels = np.searchsorted(fitted.classes_, y)
    outputs = {rows: np.log(fitted.predict_members(x[:rows])) for rows in (100, 240)}
    asked = {"task": "classification", "kind": "logits"}
    train = {"train": (outputs[240], labels), "in_bag": fitted.ensemble_.in_bag}
    for ours, direct in (
        (fitted.audit(x[:100], y[:100]), ds.audit(outputs[100], labels[:100], **asked)),
        (fitted.audit(x[:100], y[:100], train=(x, y)), ds.audit(outputs[100], labels[:100], **asked, **train)),
    ):
        assert ours.verdict == direct.verdict
        for name, figure in direct.test.items():
            assert ours.test[name].value == pytest.approx(figure.value, rel=1e-6, abs=1e-9, nan_ok=True), name
        assert (ours.train is None) == (direct.train is None)
    with pytest.raises(ValueError, match="240 rows of training"):
        fitted.audit(x, y, train=(x[:10], y[:10]))
    regression = regressor().fit(*values)
    expected = ds.audit(regression.predict_members(values[0]), values[1], task="regression").verdict
    assert regression.audit(*values).verdict == expected


def test_it_works_inside_of_scikit_learn(classes):
    x, y = classes
    pipeline = make_pipeline(StandardScaler(), classifier())
    assert cross_val_score(pipeline, x, y, cv=3).mean() > 0.55
    grid = {"ensembleclassifier__objective_params__beta": [0.0, 0.9], "ensembleclassifier__lr": [1e-4, 0.02]}
    pipeline.set_params(ensembleclassifier__objective="augmented")
    found = GridSearchCV(pipeline, grid, cv=2).fit(x, y)
    assert found.best_params_["ensembleclassifier__lr"] == 0.02
    calibrated = CalibratedClassifierCV(classifier(), cv=2).fit(x, y)
    assert calibrated.predict_proba(x).shape == (240, 3)


def test_column_transformers(classes):
    frame, y = frame_of()
    columns = make_column_transformer(
        (StandardScaler(), ["size"]), (OneHotEncoder(sparse_output=False), ["colour", "grade", "new"])
    )
    model = make_pipeline(columns, regressor(epochs=40, hidden=16, scale=False)).fit(frame, y)
    assert model.score(frame, y) > 0.9


def test_progress_is_written_when_asked_for(values):
    written = io.StringIO()
    with redirect_stdout(written):
        regressor(epochs=4, verbose=True).fit(*values)
    lines = written.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]


def test_without_scikit_learn_the_extra_is_named():
    script = "import sys; sys.modules['sklearn'] = None\nimport dissensus\nimport dissensus.sklearn"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'dissensus[sklearn]'" in done.stderr.splitlines()[-1]


def test_a_calibration_on_training_rows_is_told(classes, caplog):
    X, y = classes
    model = EnsembleClassifier(members=2, epochs=2, random_state=0, validation_fraction=None).fit(X[:60], y[:60])
    model.calibrate(X[60:], y[60:])
    assert "calibration" not in caplog.text
    model.calibrate(X[:60], y[:60])
    assert "were used for training" in caplog.text

"""`EnsembleSearchCV` against `GridSearchCV` of the same estimators."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold
from sklearn.pipeline import make_pipeline
from torch import nn

import dissensus.sklearn.search as search
from dissensus.sklearn import EnsembleClassifier, EnsembleRegressor, EnsembleSearchCV

SMALL = {"members": 2, "hidden": 8, "lr": 0.02, "batch_size": 16, "epochs": 4, "random_state": 0}
GRID = {"lr": [0.003, 0.03], "objective_params__beta": [0.0, 0.8]}


def classifier(**settings):
    return EnsembleClassifier(**{**SMALL, "objective": "augmented", "objective_params": {"beta": 0.5}, **settings})


def regressor(**settings):
    return EnsembleRegressor(**{**SMALL, "objective": "augmented", "objective_params": {"beta": 0.5}, **settings})


@pytest.fixture(scope="module")
def classes():
    x, y = make_classification(150, 6, n_informative=4, n_classes=3, weights=[0.5, 0.3, 0.2], random_state=0)
    return x * [1, 10, 100, 1, 1, 1], np.array(["low", "mid", "top"])[y]


@pytest.fixture(scope="module")
def values():
    return make_regression(150, 5, noise=20.0, random_state=0)


@pytest.fixture
def sweeps(monkeypatch):
    """The number of runs of every sweep."""
    runs = []

    def counted(*arguments, grid, **settings):
        runs.append(len(grid))
        return sweep(*arguments, grid=grid, **settings)

    sweep = search.sweep
    monkeypatch.setattr(search, "sweep", counted)
    return runs


def both(model, grid, data, cv, scoring=None, **fit):
    ours = EnsembleSearchCV(model, grid, cv=cv, scoring=scoring, refit=False, return_train_score=True).fit(*data, **fit)
    theirs = GridSearchCV(model, grid, cv=cv, scoring=scoring, refit=False, return_train_score=True).fit(*data, **fit)
    return ours, theirs


@pytest.mark.parametrize(
    ("settings", "grid"),
    [
        ({}, GRID),
        ({"class_weight": "balanced", "validation_fraction": None}, GRID),
        (
            {"bootstrap": True, "objective": "independent", "objective_params": None},
            {"random_state": [0, 5], "weight_decay": [0.0, 0.1]},
        ),
        ({"pool": "score", "members": 3}, {"objective_params": [{"beta": 0.3}, {"beta": 0.9}]}),
    ],
    ids=["early stopping", "balanced", "seeds", "score"],
)
def test_scores_are_those_of_grid_search(settings, grid, classes, sweeps):
    ours, theirs = both(classifier(**settings), grid, classes, KFold(3), "neg_log_loss")
    for name in ("test", "train"):
        for fold in range(3):
            column = f"split{fold}_{name}_score"
            np.testing.assert_allclose(ours.cv_results_[column], theirs.cv_results_[column], rtol=1e-4, err_msg=column)
    assert (ours.cv_results_["rank_test_score"] == theirs.cv_results_["rank_test_score"]).all()
    assert ours.cv_results_["params"] == theirs.cv_results_["params"]
    assert ours.best_params_ == theirs.best_params_
    assert ours.best_score_ == pytest.approx(theirs.best_score_, rel=1e-4)
    assert sweeps == [3 * len(ours.cv_results_["params"])]


@pytest.mark.parametrize("loss", ["mse", "gaussian_nll", "quantile"])
def test_regressors_and_weights(loss, values, sweeps):
    weights = np.random.default_rng(0).uniform(0.5, 2.0, 150)
    ours, theirs = both(regressor(loss=loss, validation_fraction=0.2), GRID, values, KFold(3), sample_weight=weights)
    np.testing.assert_allclose(ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"], rtol=1e-3)
    assert sweeps == [12]


def test_folds_that_differ_by_a_row_are_filled_up(values, sweeps):
    """In one batch of all rows, what fills a fold up changes nothing."""
    x, y = values[0][:148], values[1][:148]
    model = regressor(batch_size=148, validation_fraction=None, epochs=20)
    ours, theirs = both(model, GRID, (x, y), KFold(5))
    np.testing.assert_allclose(ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"], rtol=1e-3)
    assert sweeps == [20]


def test_filled_up_folds_stop_early(classes, sweeps):
    x, y = classes[0][:149], classes[1][:149]
    ours, theirs = both(classifier(epochs=15, patience=3), {"lr": [0.003, 0.03]}, (x, y), 4)
    np.testing.assert_allclose(ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"], atol=0.12)
    assert sweeps == [8]


def test_shapes_and_other_settings_are_trained_apart(classes, sweeps):
    grid = [{"members": [2, 3], "hidden": [(4,), (4, 4)], "batch_size": [16, 32]}, {"pool": ["score"]}]
    found = EnsembleSearchCV(classifier(epochs=2), grid, cv=2).fit(*classes)
    assert sweeps == [16, 2]
    assert found.cv_results_["param_pool"].mask.tolist() == [True] * 8 + [False]
    assert found.best_estimator_.ensemble_.members == found.best_params_.get("members", 2)


def test_the_best_candidate_is_trained_on_all_rows(classes):
    x, y = classes
    found = EnsembleSearchCV(classifier(), GRID, cv=2).fit(x, y)
    direct = classifier().set_params(**found.best_params_).fit(x, y)
    assert (found.predict_proba(x) == direct.predict_proba(x)).all()
    assert (found.predict(x) == direct.predict(x)).all()
    assert found.score(x, y) == direct.score(x, y)
    assert found.classes_.tolist() == ["low", "mid", "top"]
    copied = clone(found)
    assert copied.get_params()["estimator__lr"] == 0.02
    assert not hasattr(copied, "cv_results_")


def test_frames_and_groups(classes):
    x, y = classes
    frame = pd.DataFrame(x, columns=list("abcdef")).assign(kind=np.where(x[:, 0] > 0, "up", "down"))
    frame.loc[:4, "kind"] = "rare"  # which some folds lack
    groups = np.arange(150) // 5
    found = EnsembleSearchCV(classifier(epochs=2), {"lr": [0.01]}, cv=GroupKFold(3)).fit(frame, y, groups=groups)
    assert np.isfinite(found.best_score_)
    assert found.feature_names_in_.tolist() == list(frame.columns)


def test_classes_that_a_fold_lacks():
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = np.repeat([0, 1, 2, 3], 10)
    found = EnsembleSearchCV(classifier(epochs=2), {"lr": [0.01]}, cv=KFold(4), scoring="accuracy").fit(x, y)
    assert found.cv_results_["mean_test_score"][0] == 0  # every fold is tested on the class that it lacks


def test_modules_of_a_user(classes):
    model = classifier(module=lambda inputs, outputs: nn.Linear(inputs, outputs))
    ours, theirs = both(model, GRID, classes, KFold(3), "neg_log_loss")
    np.testing.assert_allclose(ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"], rtol=1e-4)


def test_candidates_that_diverge(values):
    model, grid = regressor(), {"lr": [0.01, 1e30]}
    found = EnsembleSearchCV(model, grid, cv=3).fit(*values)
    assert found.best_params_ == {"lr": 0.01}
    assert np.isnan(found.cv_results_["mean_test_score"][1])
    with pytest.raises(RuntimeError, match="1e\\+30"):
        EnsembleSearchCV(model, grid, cv=3, error_score="raise").fit(*values)


def test_what_cannot_be_stacked_is_refused(classes):
    with pytest.raises(TypeError, match="Use GridSearchCV for other estimators"):
        EnsembleSearchCV(make_pipeline(classifier()), {}).fit(*classes)
    with pytest.raises(ValueError, match="one score"):
        EnsembleSearchCV(classifier(), GRID, scoring=["accuracy"]).fit(*classes)
    with pytest.raises(ValueError, match="`refit` must be True or False"):
        EnsembleSearchCV(classifier(), GRID, refit="accuracy").fit(*classes)

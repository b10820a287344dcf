"""`EnsembleSearchCV`: a grid search whose candidates and folds are trained together."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.base import clone, is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import GridSearchCV, ParameterGrid, check_cv
from sklearn.utils import _safe_indexing, indexable
from torch import Tensor

from dissensus import checks
from dissensus.data import Split
from dissensus.sklearn.columns import Columns
from dissensus.sklearn.estimators import EnsembleClassifier, EnsembleRegressor, Table
from dissensus.sklearn.training import builder, holds_out, widths
from dissensus.train import sweep

Estimator = EnsembleClassifier | EnsembleRegressor
RUN_SETTINGS = ("lr", "weight_decay", "batch_size", "members", "hidden", "random_state", "objective_params")
"""Settings in which runs of one sweep may differ. Other settings of a grid are trained one sweep after another."""


class Fold(NamedTuple):
    """The rows of a fold, and what an estimator has learnt from them before it is trained."""

    table: Table
    estimator: Estimator
    validation: tuple[Tensor, Tensor] | None


class EnsembleSearchCV(GridSearchCV):
    """Grid search with cross-validation, as `sklearn.model_selection.GridSearchCV`, in few stacked trainings.

    All candidates and all folds whose networks have the same shapes are trained as one computation. Scaling is learnt
    from the training rows of each fold. Folds that differ by some rows are filled up with rows of weight zero, and all
    folds hold out the same number of rows for early stopping. So scores equal those of ``GridSearchCV`` to rounding if
    all folds have equal sizes, and are close to them otherwise.

    Args:
        estimator: An `EnsembleClassifier` or an `EnsembleRegressor`.
        param_grid: Dictionary from names of settings to lists of values, or a list of such dictionaries.
            ``objective_params__beta`` is the setting ``beta`` of the objective.
        scoring: See ``GridSearchCV``; a single one.
        refit: Whether to train the best candidate on all rows.
        cv: See ``GridSearchCV``.
        verbose: Whether to show progress.
        error_score: Score of a candidate whose training has diverged; ``"raise"`` raises the error.
        return_train_score: Whether ``cv_results_`` has scores of the training rows.
    """

    def __init__(
        self,
        estimator: Estimator,
        param_grid: Any,
        *,
        scoring: Any = None,
        refit: bool = True,
        cv: Any = None,
        verbose: int = 0,
        error_score: Any = np.nan,
        return_train_score: bool = False,
    ) -> None:
        super().__init__(
            estimator,
            param_grid,
            scoring=scoring,
            refit=refit,
            cv=cv,
            verbose=verbose,
            error_score=error_score,
            return_train_score=return_train_score,
        )

    @classmethod
    def _get_param_names(cls) -> list[str]:
        names = ("cv", "error_score", "estimator", "param_grid", "refit", "return_train_score", "scoring", "verbose")
        return list(names)

    def fit(self, X: Any, y: Any = None, *, sample_weight: Any = None, groups: Any = None) -> "EnsembleSearchCV":
        """Train all candidates on all folds, and the best one on all rows.

        Args:
            X: Features, as for the estimator.
            y: Targets.
            sample_weight: The weight of every row in training. Scores are not weighted.
            groups: Groups of rows for ``cv``.
        """
        if not isinstance(self.estimator, EnsembleClassifier | EnsembleRegressor):
            fix = "Use GridSearchCV for other estimators, pipelines included."
            got = type(self.estimator).__name__
            checks.refuse("estimator", "be an EnsembleClassifier or an EnsembleRegressor", got, fix, TypeError)
        if self.scoring is not None and not isinstance(self.scoring, str) and not callable(self.scoring):
            checks.refuse("scoring", "be one score: a name or a function", type(self.scoring).__name__)
        if callable(self.refit) or isinstance(self.refit, str):
            checks.refuse("refit", "be True or False", repr(self.refit))
        self.scorer_ = check_scoring(self.estimator, self.scoring)
        self.multimetric_ = False
        X, y, sample_weight, groups = indexable(X, y, sample_weight, groups)
        splitter = check_cv(self.cv, y, classifier=is_classifier(self.estimator))
        splits = list(splitter.split(X, y, groups))
        self.n_splits_ = len(splits)
        candidates = list(ParameterGrid(self.param_grid))
        started = time.perf_counter()
        data = (X, y, sample_weight)
        test = np.full((len(candidates), len(splits)), np.nan)
        train, seconds = test.copy(), test.copy()
        for numbers in _groups(self.estimator, candidates):
            self._evaluate(numbers, candidates, data, splits, (test, train, seconds))
        self.search_time_ = time.perf_counter() - started
        self.cv_results_ = _results(candidates, test, train if self.return_train_score else None, seconds)
        self.best_index_ = int(self.cv_results_["rank_test_score"].argmin())
        self.best_params_ = candidates[self.best_index_]
        self.best_score_ = self.cv_results_["mean_test_score"][self.best_index_]
        if self.refit:
            started = time.perf_counter()
            self.best_estimator_ = _configured(self.estimator, self.best_params_)
            weights = {} if sample_weight is None else {"sample_weight": sample_weight}
            self.best_estimator_.fit(X, y, **weights)
            self.refit_time_ = time.perf_counter() - started
            if hasattr(self.best_estimator_, "feature_names_in_"):
                self.feature_names_in_ = self.best_estimator_.feature_names_in_
        return self

    def _evaluate(
        self,
        numbers: Sequence[int],
        candidates: Sequence[Mapping[str, Any]],
        data: tuple[Any, Any, Any],
        splits: Sequence[tuple[np.ndarray, np.ndarray]],
        results: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Train some candidates on all folds in one sweep, and enter their scores."""
        X, y, sample_weight = data
        test, train, seconds = results
        models = [_configured(self.estimator, candidates[number]) for number in numbers]
        seeds = [model._drawn_seed() for model in models]
        started = time.perf_counter()
        folds = _folds(models[0], X, y, sample_weight, splits, seeds[0])
        points = [
            {**_point(model, seed), "fold": fold}
            for model, seed in zip(models, seeds, strict=True)
            for fold in range(len(folds))
        ]
        first = folds[0].estimator
        x_train, y_train, weights = _filled([fold.table for fold in folds])
        arguments = first._fit_arguments(len(x_train[0]))
        held_out = [fold.validation for fold in folds if fold.validation is not None]
        arguments |= {"validation": held_out or None, "patience": arguments["patience"] if held_out else None}
        arguments = {name: value for name, value in arguments.items() if name not in points[0]}
        trained = sweep(
            builder(first.module, first.columns_.width, first._outputs()),
            list(zip(x_train, y_train, strict=True)),
            first._objective(without=_varied(models)),
            grid=points,
            epochs=checks.count("epochs", first.epochs),
            weights=weights,
            device=first.device,
            **arguments,
        )
        seconds[list(numbers)] = (time.perf_counter() - started) / len(points)
        for run, (place, fold) in enumerate(itertools.product(range(len(numbers)), range(len(folds)))):
            if trained.outcomes[run].status == "failed":
                if self.error_score == "raise":
                    raise RuntimeError(f"candidate {candidates[numbers[place]]}: {trained.outcomes[run].reason}")
                test[numbers[place], fold] = train[numbers[place], fold] = self.error_score
                continue
            model = models[place]
            model.__dict__.update({k: v for k, v in vars(folds[fold].estimator).items() if k.endswith("_")})
            model.seed_, model.ensemble_ = seeds[place], trained.run(run)
            for scores, rows in zip((test, train), reversed(splits[fold]), strict=True):
                if scores is test or self.return_train_score:
                    scores[numbers[place], fold] = self.scorer_(model, _safe_indexing(X, rows), _safe_indexing(y, rows))


def _configured(estimator: Estimator, params: Mapping[str, Any]) -> Estimator:
    """A new estimator with the settings of a candidate."""
    plain = {name: value for name, value in params.items() if not name.startswith("objective_params__")}
    inner = {name.partition("__")[2]: value for name, value in params.items() if name not in plain}
    model = clone(estimator).set_params(**clone(plain, safe=False))
    if inner:
        model.set_params(objective_params={**(model.objective_params or {}), **inner})
    return model


def _groups(estimator: Estimator, candidates: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Candidates, by number, that one sweep can train: they differ in settings of runs only."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for number, candidate in enumerate(candidates):
        params = _configured(estimator, candidate).get_params(deep=False)
        inner = tuple(params["objective_params"] or {})
        key = {**{name: value for name, value in params.items() if name not in RUN_SETTINGS}, "inner": inner}
        key["random_state"] = params["random_state"] is not None
        for known, numbers in groups:
            if all(known[name] is value or known[name] == value for name, value in key.items()):
                numbers.append(number)
                break
        else:
            groups.append((key, [number]))
    return [numbers for _, numbers in groups]


def _varied(models: Sequence[Estimator]) -> tuple[str, ...]:
    """Names of the objective's settings, which the points of a sweep hold."""
    return tuple(models[0].objective_params or {})


def _point(model: Estimator, seed: int) -> dict[str, Any]:
    """The point of a sweep for a candidate."""
    point = {
        "lr": model.lr,
        "weight_decay": model.weight_decay,
        "batch_size": model.batch_size,
        "members": model.members,
        "seed": seed,
        **(model.objective_params or {}),
    }
    return {**point, "hidden": widths(model.hidden)}


def _folds(
    model: Estimator, X: Any, y: Any, sample_weight: Any, splits: Sequence[tuple[np.ndarray, np.ndarray]], seed: int
) -> list[Fold]:
    """Every fold's training rows as tensors, scaled by themselves, with the same number of rows held out."""
    whole = clone(model)
    whole._table(X, y, sample_weight, reset=True)
    folds = [_fold(model, whole.columns_, whole, X, y, sample_weight, rows, seed) for rows, _ in splits]
    least = min(len(fold.validation[1]) if fold.validation is not None else 0 for fold in folds)
    return [_with_held_out(fold, least) for fold in folds]


def _fold(
    model: Estimator,
    columns: Columns,
    whole: Estimator,
    X: Any,
    y: Any,
    sample_weight: Any,
    rows: np.ndarray,
    seed: int,
) -> Fold:
    estimator = clone(model)
    weights = None if sample_weight is None else _safe_indexing(sample_weight, rows)
    classes = getattr(whole, "classes_", None) if not getattr(whole, "multilabel_", True) else None
    table = estimator._table(
        _safe_indexing(X, rows), _safe_indexing(y, rows), weights, reset=True, classes=classes, like=columns
    )
    if not holds_out(estimator.validation_fraction, len(rows)):
        return Fold(table, estimator, None)
    rest, part = Split(estimator.validation_fraction).rows(table.y, seed=seed)
    order = torch.cat([rest, part])
    return Fold(_selected(table, order), estimator, (table.x[part], table.y[part]))


def _with_held_out(fold: Fold, rows: int) -> Fold:
    """A fold that holds out so many rows; others are trained on. Held-out rows are the last ones of its table."""
    if fold.validation is None or not rows:
        return fold._replace(validation=None)
    spare = len(fold.validation[1]) - rows
    trained = len(fold.table.y) - rows
    validation = (fold.validation[0][spare:], fold.validation[1][spare:])
    return fold._replace(table=_selected(fold.table, torch.arange(trained)), validation=validation)


def _selected(table: Table, rows: Tensor) -> Table:
    return Table(table.x[rows], table.y[rows], None if table.weights is None else table.weights[rows])


def _filled(tables: Sequence[Table]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Features and targets of all folds with the same number of rows, and the weights of all rows end to end.

    Shorter folds are filled up with rows of weight zero. Weights are None where all rows count the same.
    """
    longest = max(len(table.y) for table in tables)
    rows = [torch.arange(longest).clamp(max=len(table.y) - 1) for table in tables]
    weights = []
    for table in tables:
        known = torch.ones(len(table.y)) if table.weights is None else table.weights
        weights.append(torch.cat([known, known.new_zeros(longest - len(known))]))
    plain = all(table.weights is None and len(table.y) == longest for table in tables)
    x = [table.x[index] for table, index in zip(tables, rows, strict=True)]
    y = [table.y[index] for table, index in zip(tables, rows, strict=True)]
    return x, y, None if plain else torch.cat(weights)


def _results(
    candidates: Sequence[Mapping[str, Any]], test: np.ndarray, train: np.ndarray | None, seconds: np.ndarray
) -> dict[str, Any]:
    """What ``GridSearchCV`` calls ``cv_results_``."""
    results: dict[str, Any] = {"mean_fit_time": seconds.mean(1), "std_fit_time": seconds.std(1)}
    for name in sorted({name for candidate in candidates for name in candidate}):
        values = [candidate.get(name) for candidate in candidates]
        column = np.ma.MaskedArray(np.empty(len(values), dtype=object), mask=[name not in c for c in candidates])
        for place, value in enumerate(values):
            if name in candidates[place]:
                column[place] = value
        results[f"param_{name}"] = column
    results["params"] = [dict(candidate) for candidate in candidates]
    for kind, scores in (("test", test), ("train", train)):
        if scores is None:
            continue
        results |= {f"split{fold}_{kind}_score": scores[:, fold] for fold in range(scores.shape[1])}
        results[f"mean_{kind}_score"], results[f"std_{kind}_score"] = scores.mean(1), scores.std(1)
    mean = results["mean_test_score"]
    worst = np.nanmin(mean) - 1 if np.isfinite(mean).any() else 0.0
    ranks = rankdata(-np.nan_to_num(mean, nan=worst), method="min")
    results["rank_test_score"] = ranks.astype(np.int32)
    return results

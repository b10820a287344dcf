"""`EnsembleSearchCV`: a grid search whose candidates and folds are trained together."""

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.base import clone, is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import GridSearchCV, ParameterGrid, check_cv
from sklearn.utils import _safe_indexing, indexable
from torch import Tensor

from dissensus import checks
from dissensus.sklearn.estimators import EnsembleClassifier, EnsembleRegressor, Table, shown
from dissensus.sklearn.training import builder, widths
from dissensus.train import Sweep, sweep

Estimator = EnsembleClassifier | EnsembleRegressor
RUN_SETTINGS = ("lr", "weight_decay", "batch_size", "members", "hidden", "random_state", "objective_params")
"""Settings in which runs of one sweep may differ. Other settings of a grid are trained one sweep after another."""
PARAMETERS = ("cv", "error_score", "estimator", "param_grid", "refit", "return_train_score", "scoring", "verbose")


class Fold(NamedTuple):
    """The training rows of a fold, and the estimator that has learnt scales and classes from them."""

    table: Table
    estimator: Estimator


class Scores(NamedTuple):
    """Results ``[candidates, folds]``."""

    test: np.ndarray
    train: np.ndarray
    seconds: np.ndarray


class EnsembleSearchCV(GridSearchCV):
    """Grid search with cross-validation, as `sklearn.model_selection.GridSearchCV`, in few stacked trainings.

    All candidates and all folds whose networks have the same shapes are trained as one computation. Scaling is learnt
    from the training rows of each fold. Folds that differ by some rows are filled up with rows of weight zero. Where
    all folds have as many rows, scores equal those of ``GridSearchCV`` to rounding; the held-out rows of filled-up
    folds are drawn differently, and their scores are close.

    Args:
        estimator: An `EnsembleClassifier` or an `EnsembleRegressor`.
        param_grid: Dictionary from names of settings to lists of values, or a list of such dictionaries.
            ``objective_params__beta`` is the setting ``beta`` of the objective. Candidates that differ in ``lr``,
            ``weight_decay``, ``random_state`` and settings of the objective are trained at once, those that differ in
            ``members``, ``hidden`` and ``batch_size`` by shapes. Others are trained one after another.
        scoring: See ``GridSearchCV``; a single one.
        refit: Whether to train the best candidate on all rows.
        cv: See ``GridSearchCV``.
        verbose: Whether to write progress, a line per epoch.
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
        return list(PARAMETERS)

    # Other parameters of fit cannot be handed to a stacked training.
    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, X: Any, y: Any = None, *, sample_weight: Any = None, groups: Any = None
    ) -> "EnsembleSearchCV":
        """Train all candidates on all folds, and the best one on all rows.

        Args:
            X: Features, as for the estimator.
            y: Targets.
            sample_weight: The weight of every row, in training and in scores that take weights.
            groups: Groups of rows for ``cv``.
        """
        self._check_settings()
        scorer: Any = check_scoring(self.estimator, self.scoring)
        self.scorer_, self.multimetric_ = scorer, False
        X, y, sample_weight, groups = indexable(X, y, sample_weight, groups)
        splitter: Any = check_cv(cast(Any, self.cv), y, classifier=is_classifier(self.estimator))
        splits = list(splitter.split(X, y, groups))
        self.n_splits_ = len(splits)
        candidates = list(ParameterGrid(self.param_grid))
        started = time.perf_counter()
        unknown = np.full((len(candidates), len(splits)), np.nan)
        scores = Scores(unknown, unknown.copy(), unknown.copy())
        for numbers in _groups(self.estimator, candidates):
            self._evaluate(numbers, candidates, (X, y, sample_weight), splits, scores)
        self.search_time_ = time.perf_counter() - started
        self.cv_results_ = _results(candidates, scores, with_train=self.return_train_score)
        self.best_index_ = int(self.cv_results_["rank_test_score"].argmin())
        self.best_params_ = candidates[self.best_index_]
        self.best_score_ = self.cv_results_["mean_test_score"][self.best_index_]
        if self.refit:
            started = time.perf_counter()
            best: Any = _configured(self.estimator, self.best_params_)
            self.best_estimator_ = best.fit(X, y, sample_weight=sample_weight)
            self.refit_time_ = time.perf_counter() - started
            if hasattr(best, "feature_names_in_"):
                self.feature_names_in_ = best.feature_names_in_
        return self

    def _check_settings(self) -> None:
        if not isinstance(self.estimator, EnsembleClassifier | EnsembleRegressor):
            fix = "Use GridSearchCV for other estimators, pipelines included."
            got = type(self.estimator).__name__
            checks.refuse("estimator", "be an EnsembleClassifier or an EnsembleRegressor", got, fix, TypeError)
        if self.scoring is not None and not isinstance(self.scoring, str) and not callable(self.scoring):
            checks.refuse("scoring", "be one score: a name or a function", type(self.scoring).__name__)
        if callable(self.refit) or isinstance(self.refit, str):
            checks.refuse("refit", "be True or False", repr(self.refit))

    def _evaluate(
        self,
        numbers: Sequence[int],
        candidates: Sequence[Mapping[str, Any]],
        data: tuple[Any, Any, Any],
        splits: Sequence[tuple[np.ndarray, np.ndarray]],
        scores: Scores,
    ) -> None:
        """Train some candidates on all folds in one sweep, and enter their scores."""
        X, y, sample_weight = data
        models = [_configured(self.estimator, candidates[number]) for number in numbers]
        seeds = [model._drawn_seed() for model in models]
        started = time.perf_counter()
        folds = _folds(models[0], X, y, sample_weight, splits)
        trained = _trained(models, seeds, folds, shown() if self.verbose else None)
        scores.seconds[list(numbers)] = (time.perf_counter() - started) / len(trained)
        score: Callable[..., float] = cast(Any, self.scorer_)
        parts = [[_part(data, rows) for rows in split] for split in splits]
        for run, (place, fold) in enumerate(itertools.product(range(len(numbers)), range(len(folds)))):
            at = numbers[place], fold
            outcome = trained.outcomes[run]
            if outcome.status == "failed":
                if self.error_score == "raise":
                    raise RuntimeError(f"candidate {candidates[numbers[place]]}: {outcome.reason}")
                scores.test[at] = scores.train[at] = self.error_score
                continue
            model = models[place]
            vars(model).update({name: value for name, value in vars(folds[fold].estimator).items() if name[-1] == "_"})
            model._keep(trained.run(run), outcome.history, seeds[place], len(outcome.history.epochs))
            scores.test[at] = _score(score, model, parts[fold][1])
            if self.return_train_score:
                scores.train[at] = _score(score, model, parts[fold][0])


def _part(data: tuple[Any, Any, Any], rows: np.ndarray) -> tuple[Any, Any, Any]:
    """Some rows of features, targets and weights."""
    X, y, weights = data
    return _safe_indexing(X, rows), _safe_indexing(y, rows), None if weights is None else _safe_indexing(weights, rows)


def _score(score: Callable[..., float], model: Estimator, part: tuple[Any, Any, Any]) -> float:
    """A score, weighted where it can be, as by ``GridSearchCV``."""
    X, y, weights = part
    weighted = weights is not None and getattr(score, "_accept_sample_weight", bool)()
    return score(model, X, y, sample_weight=weights) if weighted else score(model, X, y)


def _trained(models: Sequence[Estimator], seeds: Sequence[int], folds: Sequence[Fold], progress: Any) -> Sweep:
    """All candidates on all folds, the candidates' folds one after another."""
    first = folds[0].estimator
    points = [
        {**_point(model, seed), "fold": fold}
        for model, seed in zip(models, seeds, strict=True)
        for fold in range(len(folds))
    ]
    x, y, weights = _filled([fold.table for fold in folds])
    build = builder(first.module, first.columns_.width, first._outputs())
    if first.module is not None:  # which has no use for widths
        build = functools.partial(build, hidden=())
        points = [{name: value for name, value in point.items() if name != "hidden"} for point in points]
    return sweep(
        build,
        list(zip(x, y, strict=True)),
        first._objective(without=tuple(first.objective_params or {})),
        grid=points,
        epochs=checks.count("epochs", first.epochs),
        weights=weights,
        device=checks.device("device", first.device),
        progress=progress,
        **first._shared_arguments(len(x[0])),
    )


def _cloned(estimator: Any) -> Estimator:
    return cast(Estimator, clone(estimator))


def _configured(estimator: Any, params: Mapping[str, Any]) -> Estimator:
    """A new estimator with the settings of a candidate."""
    return _cloned(estimator).set_params(**{name: clone(value, safe=False) for name, value in params.items()})


def _groups(estimator: Any, candidates: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Candidates, by number, that one sweep can train: they differ in settings of runs only."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for number, candidate in enumerate(candidates):
        params = _configured(estimator, candidate).get_params(deep=False)
        key = {name: value for name, value in params.items() if name not in RUN_SETTINGS}
        # What is no number, such as the name of a part of the objective, is a constant of the computation.
        settings = params["objective_params"] or {}
        key["settings"] = {name: None if _is_number(value) else value for name, value in settings.items()}
        for known, numbers in groups:
            if all(known[name] is value or known[name] == value for name, value in key.items()):
                numbers.append(number)
                break
        else:
            groups.append((key, [number]))
    return [numbers for _, numbers in groups]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _point(model: Estimator, seed: int) -> dict[str, Any]:
    """The point of a sweep for a candidate."""
    named = isinstance(model.optimizer, str)  # the settings of another belong to it
    return {
        **({"lr": model.lr, "weight_decay": model.weight_decay} if named else {}),
        "batch_size": checks.count("batch_size", int(model.batch_size)),
        "members": checks.count("members", int(model.members)),
        "seed": seed,
        "hidden": widths(model.hidden),
        **(model.objective_params or {}),
    }


def _folds(
    model: Estimator, X: Any, y: Any, sample_weight: Any, splits: Sequence[tuple[np.ndarray, np.ndarray]]
) -> list[Fold]:
    """Every fold's training rows as tensors, scaled by themselves; classes and categories are those of all rows."""
    whole = _cloned(model)
    whole._table(X, y, sample_weight, reset=True)
    classes = whole.classes_ if isinstance(whole, EnsembleClassifier) and not whole.multilabel_ else None
    folds: list[Fold] = []
    for rows, _ in splits:
        estimator = _cloned(model)
        part = _part((X, y, sample_weight), rows)
        table = estimator._table(*part, reset=True, classes=classes, like=whole.columns_)
        folds.append(Fold(table, estimator))
    return folds


def _filled(tables: Sequence[Table]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Features and targets of all folds with the same number of rows, and the weights of all rows end to end.

    Shorter folds are filled up with rows of weight zero. Weights are None where all rows count the same.
    """
    longest = max(len(table.y) for table in tables)
    rows = [torch.arange(longest).clamp(max=len(table.y) - 1) for table in tables]
    weights: list[Tensor] = []
    for table in tables:
        counted = torch.ones(len(table.y)) if table.weights is None else table.weights
        weights.append(torch.cat([counted, counted.new_zeros(longest - len(counted))]))
    plain = all(table.weights is None and len(table.y) == longest for table in tables)
    x = [table.x[index] for table, index in zip(tables, rows, strict=True)]
    y = [table.y[index] for table, index in zip(tables, rows, strict=True)]
    return x, y, None if plain else torch.cat(weights)


def _results(candidates: Sequence[Mapping[str, Any]], scores: Scores, *, with_train: bool) -> dict[str, Any]:
    """What ``GridSearchCV`` calls ``cv_results_``."""
    results: dict[str, Any] = {"mean_fit_time": scores.seconds.mean(1), "std_fit_time": scores.seconds.std(1)}
    for name in sorted({name for candidate in candidates for name in candidate}):
        column = np.ma.MaskedArray(np.empty(len(candidates), dtype=object), mask=True)
        for place, candidate in enumerate(candidates):
            if name in candidate:
                column[place] = candidate[name]
        results[f"param_{name}"] = column
    results["params"] = [dict(candidate) for candidate in candidates]
    for kind, values in (("test", scores.test), ("train", scores.train))[: 1 + with_train]:
        results |= {f"split{fold}_{kind}_score": values[:, fold] for fold in range(values.shape[1])}
        results[f"mean_{kind}_score"], results[f"std_{kind}_score"] = values.mean(1), values.std(1)
    mean = results["mean_test_score"]
    worst = np.nanmin(mean) - 1 if np.isfinite(mean).any() else 0.0
    ranks = rankdata(-np.nan_to_num(mean, nan=worst), method="min")
    results["rank_test_score"] = ranks.astype(np.int32)
    return results

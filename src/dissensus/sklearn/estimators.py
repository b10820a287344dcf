"""scikit-learn estimators: tables in, calibrated predictions with uncertainty out."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.auditing import Audit, audit
from dissensus.data import Split
from dissensus.ensemble import Ensemble
from dissensus.sklearn.columns import Columns, has_categories, is_frame, target_scaling
from dissensus.sklearn.training import POOLS, bound_objective, builder, class_weights, holds_out
from dissensus.train import History, fit


class Table(NamedTuple):
    """Training data as tensors."""

    x: Tensor
    y: Tensor
    weights: Tensor | None


class _Estimator(BaseEstimator):
    """What classifiers and regressors share."""

    loss: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = bool(self.impute)
        tags.input_tags.categorical = True
        tags.target_tags.multi_output = True
        tags.non_deterministic = False
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on a table.

        Args:
            X: Features ``[N, F]``: an array, or a pandas frame whose columns of texts, categories and truth values get
                one feature per category.
            y: Targets ``[N]``, or several columns.
            sample_weight: The weight of every row, 0 or more.
        """
        going_on = self.warm_start and hasattr(self, "ensemble_")
        table = self._table(X, y, sample_weight, reset=not going_on)
        self.seed_ = self.seed_ + 1 if going_on else self._drawn_seed()
        if not going_on:
            self.ensemble_ = self._new_ensemble()
        self._forget_calibration()
        self.history_ = self._train(table, checks.count("epochs", self.epochs), early_stopping=True)
        self.n_iter_ = len(self.history_.epochs)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """Train for one epoch on some rows, from where the last call ended.

        Means and scales of features are those of the first call. The optimizer starts anew at every call, and nothing
        is held out. A classifier needs ``classes`` at its first call, unless the first rows have them all.
        """
        first = not hasattr(self, "ensemble_")
        table = self._table(X, y, sample_weight, reset=first, classes=classes)
        if first:
            self.seed_ = self._drawn_seed()
            self.ensemble_ = self._new_ensemble()
        else:
            self.seed_ += 1
        self._forget_calibration()
        self.history_ = self._train(table, 1, early_stopping=False)
        self.n_iter_ = getattr(self, "n_iter_", 0) + 1
        return self

    def _table(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        *,
        reset: bool,
        classes: Any = None,
        like: Columns | None = None,
    ) -> Table:
        """Features, targets and weights as tensors; with ``reset``, columns and targets are learnt."""
        if y is None:
            raise ValueError(f"requires y to be passed, but the target y is None. {type(self).__name__} is supervised.")
        X = self._checked_X(X, reset=reset)
        check_consistent_length(X, y)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if not (weights > 0).any():
                checks.refuse("sample_weight", "have a row that counts", "zeros only")
        if reset:
            self.columns_ = Columns.fit(X, impute=self.impute, scale=self.scale, weights=weights, like=like)
        targets = self._learnt_targets(y, weights, classes) if reset else self._known_targets(y)
        return Table(
            torch.from_numpy(self.columns_.features(X)),
            targets,
            None if weights is None else torch.from_numpy(weights).float(),
        )

    def _checked_X(self, X: Any, *, reset: bool) -> Any:
        """A frame as it is where columns hold categories, else an array of numbers."""
        if has_categories(X) or (not reset and is_frame(X) and self.columns_.names is not None):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if len(X) == 0:
                raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
            return X
        if not reset and self.columns_.names is not None:
            names = ", ".join(self.columns_.names[:5])
            checks.refuse("X", f"be a frame with the columns of training ({names} ...)", type(X).__name__)
        finite = "allow-nan" if self.impute else True
        return validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite=finite, ensure_min_samples=1)

    def _new_ensemble(self) -> Ensemble:
        build = builder(self.module, self.columns_.width, self._outputs(), self.hidden)
        members = checks.count("members", self.members)
        return Ensemble(build, members=members, seed=self.seed_).to(checks.device("device", self.device))

    def _train(self, table: Table, epochs: int, *, early_stopping: bool) -> History:
        return fit(
            self.ensemble_,
            (table.x, table.y),
            self._objective(),
            weights=table.weights,
            epochs=epochs,
            seed=self.seed_,
            **self._fit_arguments(len(table.x), early_stopping=early_stopping),
        )

    def _fit_arguments(self, rows: int, *, early_stopping: bool = True) -> dict[str, Any]:
        """Settings that a fit and a sweep take alike."""
        stops = early_stopping and holds_out(self.validation_fraction, rows)
        return {
            "batch_size": min(checks.count("batch_size", self.batch_size), rows),
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "optimizer": self.optimizer,
            "bootstrap": self.bootstrap,
            "validation": Split(self.validation_fraction) if stops else None,
            "patience": self.patience if stops else None,
            "deterministic": True,
        }

    def _objective(self, without: tuple[str, ...] = ()) -> Any:
        """The objective, bound to its settings but for those that a sweep varies."""
        settings = {name: value for name, value in (self.objective_params or {}).items() if name not in without}
        return bound_objective(self.objective, loss=self._loss(), pool=self._pool(), settings=settings)

    def _drawn_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _loss(self) -> Any:
        return self.loss

    def _pool(self) -> str:
        return self.pool or POOLS.get(self._loss(), "score")

    def _member_outputs(self, X: Any) -> Tensor:
        """Raw outputs of members ``[M, N, C]`` in float64 on the host."""
        check_is_fitted(self, "ensemble_")
        X = self._checked_X(X, reset=False)
        return self.ensemble_.predict(torch.from_numpy(self.columns_.features(X))).double().cpu()

    def _forget_calibration(self) -> None:
        """Calibration belongs to weights that are gone."""


class EnsembleClassifier(ClassifierMixin, _Estimator):
    """A deep ensemble that classifies tables, with scikit-learn's interface.

    Numeric columns are standardised, columns of texts and categories get one feature per category, labels may be texts.
    Two-dimensional ``y`` of 0 and 1 means several labels per row.
    """

    def __init__(
        self,
        module: Any = None,
        *,
        members: int = 5,
        hidden: Any = (64, 64),
        objective: Any = "independent",
        objective_params: Mapping[str, Any] | None = None,
        loss: str = "cross_entropy",
        pool: str | None = None,
        epochs: int = 100,
        batch_size: int = 64,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        optimizer: Any = "adamw",
        validation_fraction: float | None = 0.1,
        patience: int | None = 10,
        bootstrap: bool = False,
        class_weight: Any = None,
        scale: bool = True,
        impute: bool = False,
        device: str = "cpu",
        random_state: Any = None,
        verbose: bool = False,
        warm_start: bool = False,
    ) -> None:
        self.module = module
        self.members = members
        self.hidden = hidden
        self.objective = objective
        self.objective_params = objective_params
        self.loss = loss
        self.pool = pool
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.optimizer = optimizer
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.bootstrap = bootstrap
        self.class_weight = class_weight
        self.scale = scale
        self.impute = impute
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.target_tags.multi_output = False
        return tags

    def _learnt_targets(self, y: Any, weights: np.ndarray | None, classes: Any) -> Tensor:
        del weights
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        self.multilabel_ = kind == "multilabel-indicator"
        if self.multilabel_:
            labels = check_array(y, dtype=np.float32, input_name="y")
            self.classes_ = np.arange(labels.shape[1])
            return torch.from_numpy(labels)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_ = np.unique(y if classes is None else classes)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have two classes or more; got one class, {self.classes_[0]!r}.")
        return self._known_targets(y)

    def _known_targets(self, y: Any) -> Tensor:
        if self.multilabel_:
            labels = check_array(y, dtype=np.float32, input_name="y")
            if labels.shape[1] != len(self.classes_):
                checks.refuse("y", f"have {len(self.classes_)} columns, as in training", labels.shape[1])
            return torch.from_numpy(labels)
        y = column_or_1d(y, warn=True)
        place = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        unknown = self.classes_[place] != y
        if unknown.any():
            fix = "Pass all classes at the first partial_fit(..., classes=...)."
            checks.refuse("y", f"hold classes that are known ({self.classes_.tolist()[:10]})", repr(y[unknown][0]), fix)
        return torch.from_numpy(place)

    def _outputs(self) -> int:
        return len(self.classes_)

    def _loss(self) -> str:
        checks.one_of("loss", self.loss, ("cross_entropy", "brier", "bce"))
        return "bce" if self.multilabel_ else self.loss

    def _fit_arguments(self, rows: int, *, early_stopping: bool = True) -> dict[str, Any]:
        weights = class_weights(self.class_weight, self.classes_)
        if weights is not None and self.multilabel_:
            checks.refuse("class_weight", "come with one label per row", "several labels")
        return {**super()._fit_arguments(rows, early_stopping=early_stopping), "class_weights": weights}

    def _log_probs(self, X: Any) -> Tensor:
        """Log-probabilities of the pooled prediction ``[N, C]``."""
        outputs = self._member_outputs(X)
        if self._pool() == "score":
            return pooling.mean_score(outputs)
        return pooling.mean_probability(outputs)

    def predict_members(self, X: Any) -> np.ndarray:
        """The probabilities of every member ``[M, N, C]``."""
        outputs = self._member_outputs(X)
        return (outputs.sigmoid() if self.multilabel_ else outputs.softmax(-1)).numpy()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities ``[N, C]``, in the order of ``classes_``; of several labels, the probability of each."""
        check_is_fitted(self, "ensemble_")
        if self.multilabel_:
            outputs = self._member_outputs(X)
            pooled = outputs.mean(0).sigmoid() if self._pool() == "score" else outputs.sigmoid().mean(0)
            return pooled.numpy()
        return self._log_probs(X).exp().numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of probabilities ``[N, C]``."""
        check_is_fitted(self, "ensemble_")
        return np.log(self.predict_proba(X)) if self.multilabel_ else self._log_probs(X).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class ``[N]``; of several labels, those with a probability above 1/2, ``[N, L]``."""
        probs = self.predict_proba(X)
        return (probs > 0.5).astype(int) if self.multilabel_ else self.classes_[probs.argmax(1)]


class EnsembleRegressor(RegressorMixin, _Estimator):
    """A deep ensemble that predicts numbers from tables, with scikit-learn's interface.

    Features and targets are standardised; predictions are in the units of ``y``.
    """

    def __init__(
        self,
        module: Any = None,
        *,
        members: int = 5,
        hidden: Any = (64, 64),
        objective: Any = "independent",
        objective_params: Mapping[str, Any] | None = None,
        loss: str = "mse",
        pool: str | None = None,
        epochs: int = 100,
        batch_size: int = 64,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        optimizer: Any = "adamw",
        validation_fraction: float | None = 0.1,
        patience: int | None = 10,
        bootstrap: bool = False,
        quantile_levels: Sequence[float] = losses.QUANTILE_LEVELS,
        scale: bool = True,
        impute: bool = False,
        device: str = "cpu",
        random_state: Any = None,
        verbose: bool = False,
        warm_start: bool = False,
    ) -> None:
        self.module = module
        self.members = members
        self.hidden = hidden
        self.objective = objective
        self.objective_params = objective_params
        self.loss = loss
        self.pool = pool
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.optimizer = optimizer
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.bootstrap = bootstrap
        self.quantile_levels = quantile_levels
        self.scale = scale
        self.impute = impute
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start

    def _learnt_targets(self, y: Any, weights: np.ndarray | None, classes: Any) -> Tensor:
        if classes is not None:
            checks.refuse("classes", "be left out for a regressor", repr(classes))
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        self.flat_y_ = y.ndim == 1
        y = self._columns_of_y(y)
        self.n_outputs_ = y.shape[1]
        self.y_mean_, self.y_scale_ = target_scaling(y, weights)
        return self._scaled(y)

    def _known_targets(self, y: Any) -> Tensor:
        y = self._columns_of_y(y)
        if y.shape[1] != self.n_outputs_:
            checks.refuse("y", f"have {self.n_outputs_} columns, as in training", y.shape[1])
        return self._scaled(y)

    def _columns_of_y(self, y: Any) -> np.ndarray:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        return y[:, None] if y.ndim == 1 else y

    def _scaled(self, y: np.ndarray) -> Tensor:
        return torch.from_numpy((y - self.y_mean_) / self.y_scale_).float()

    def _outputs(self) -> int:
        self._loss()
        return self.n_outputs_ * {"gaussian_nll": 2, "quantile": len(self.quantile_levels)}.get(self.loss, 1)

    def _loss(self) -> Any:
        checks.one_of("loss", self.loss, ("mse", "gaussian_nll", "quantile"))
        if self.loss != "quantile" or tuple(self.quantile_levels) == losses.QUANTILE_LEVELS:
            return self.loss
        return functools.partial(losses.quantile, levels=tuple(self.quantile_levels))

    def _pool(self) -> str:
        return self.pool or POOLS.get(self.loss, "score")

    def _points(self, outputs: Tensor) -> Tensor:
        """Point predictions ``[..., D]`` in the units of y: means, or medians of quantiles."""
        if self.loss == "gaussian_nll":
            outputs = losses.gaussian_moments(outputs)[0]
        elif self.loss == "quantile":
            levels = np.asarray(self.quantile_levels)
            middle = int(np.abs(levels - 0.5).argmin())
            outputs = outputs.unflatten(-1, (self.n_outputs_, len(levels)))[..., middle]
        return outputs * torch.from_numpy(self.y_scale_) + torch.from_numpy(self.y_mean_)

    def predict_members(self, X: Any) -> np.ndarray:
        """The prediction of every member, ``[M, N, D]``: its mean, or its quantile next to the median."""
        return self._points(self._member_outputs(X)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The mean of the members' predictions, in the shape of ``y``."""
        return self._like_y(self.predict_members(X).mean(0))

    def _like_y(self, values: np.ndarray) -> np.ndarray:
        return values[:, 0] if self.flat_y_ else values

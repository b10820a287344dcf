"""scikit-learn estimators: tables in, calibrated predictions with uncertainty out."""

import copy
import functools
import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

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

import dissensus.conformal as conformal
import dissensus.sklearn.stored as stored
from dissensus import checks, losses, output_kinds
from dissensus.auditing import Audit, audit
from dissensus.conformal import Conformal
from dissensus.data import Split
from dissensus.ensemble import Ensemble
from dissensus.metrics import temper, temper_variance
from dissensus.predictive import Predictive, predictive
from dissensus.sklearn.columns import Columns, has_categories, is_frame, target_scaling
from dissensus.sklearn.training import bound_objective, builder, class_weights, holds_out, pool_of, widths
from dissensus.train import History, Progress, fit

NO_FLOOR = 1e-300
"""The floor of variances in the unit of y: that of training is part of them already."""

log = logging.getLogger("dissensus")

MOST_USED_ROWS = 0.01
"""Share of calibration rows that may be training rows without a word: some tables hold rows twice."""


class Table(NamedTuple):
    """Training data as tensors."""

    x: Tensor
    y: Tensor
    weights: Tensor | None
    """One per row; None where all rows count the same."""


class Uncertainty(NamedTuple):
    """How uncertain predictions are, one number per row (per label or target, where there are several).

    For classes the first three are in nats: entropy of the pooled prediction, mean entropy of the members, and mutual
    information of class and member. For real targets they are variances.
    """

    total: np.ndarray | None
    """None for a regressor with the loss "mse", whose members state no noise."""
    aleatoric: np.ndarray | None
    """Noise that members see in the data; None as above."""
    epistemic: np.ndarray
    """What members disagree about."""
    std: np.ndarray | None = None
    """Standard deviation of a real target: the root of ``total``. With the loss "mse", the members' spread alone."""
    lower: np.ndarray | None = None
    """Ends of the prediction interval of a real target; None with the loss "mse" before `calibrate`."""
    upper: np.ndarray | None = None


class _Estimator(BaseEstimator):
    """What classifiers and regressors share."""

    module: Any
    members: int
    hidden: Any
    objective: Any
    objective_params: Mapping[str, Any] | None
    loss: str
    pool: str | None
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    optimizer: Any
    validation_fraction: float | None
    patience: int | None
    bootstrap: bool
    scale: bool
    impute: bool
    device: str
    random_state: Any
    verbose: bool
    warm_start: bool

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = bool(self.impute)
        tags.input_tags.categorical = True
        tags.target_tags.multi_output = True
        tags.non_deterministic = False
        return tags

    def set_params(self, **params: Any) -> Self:
        """Set parameters; ``objective_params__beta=0.5`` sets one of the objective's."""
        inner = {name: value for name, value in params.items() if name.startswith("objective_params__")}
        super().set_params(**{name: value for name, value in params.items() if name not in inner})
        if inner:
            settings = {name.partition("__")[2]: value for name, value in inner.items()}
            self.objective_params = {**(self.objective_params or {}), **settings}
        return self

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table.

        Args:
            X: Features ``[N, F]``: an array, or a pandas frame whose columns of texts, categories and truth values get
                one feature per category.
            y: Targets ``[N]``, or several columns.
            sample_weight: The weight of every row, 0 or more. Rows of weight 0 are left out.
        """
        going_on = bool(self.warm_start) and hasattr(self, "ensemble_")
        with self._all_or_nothing():
            self._note_outputs()
            table = self._table(X, y, sample_weight, reset=not going_on)
            seed = self.seed_ + 1 if going_on else self._drawn_seed()
            ensemble = self._ensemble_to_train(seed, going_on=going_on)
            history = self._train(ensemble, table, seed, checks.count("epochs", self.epochs), early_stopping=True)
            self._keep(ensemble, history, seed, len(history.epochs))
        return self

    def _partial_fit(self, X: Any, y: Any, classes: Any, sample_weight: Any) -> Self:
        first = not hasattr(self, "ensemble_")
        with self._all_or_nothing():
            self._note_outputs()
            table = self._table(X, y, sample_weight, reset=first, classes=classes)
            seed = self._drawn_seed() if first else self.seed_ + 1
            ensemble = self._ensemble_to_train(seed, going_on=not first)
            history = self._train(ensemble, table, seed, 1, early_stopping=False)
            self._keep(ensemble, history, seed, 1 if first else self.n_iter_ + 1)
        return self

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Attributes stay as they were where training fails or is interrupted: new scales do not fit old weights."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    def _keep(self, ensemble: Ensemble, history: History, seed: int, epochs: int) -> None:
        """Everything that a training leaves. A calibration belonged to other weights."""
        self.ensemble_, self.history_, self.seed_, self.n_iter_ = ensemble, history, seed, epochs
        self._note_outputs()
        self.temperature_: float = 1.0
        self.conformal_: Conformal | None = None

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
        counted, weights = np.ones(len(X), dtype=bool), None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            counted = weights > 0
            if not counted.any():
                checks.refuse("sample_weight", "have a row that counts", "zeros only")
            weights = weights[counted]
        if not counted.all():
            X = X.iloc[counted.nonzero()[0]] if is_frame(X) else X[counted]
        if reset:
            self.columns_ = Columns.fit(X, impute=bool(self.impute), scale=bool(self.scale), weights=weights, like=like)
            targets = self._learnt_targets(y, counted, weights, classes)
        else:
            targets = self._known_targets(y)[torch.from_numpy(counted)]
        by_class = self._class_weights(targets)
        if by_class is not None:
            weights = by_class if weights is None else weights * by_class
        if weights is not None and np.ptp(weights) == 0:
            weights = None
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
            if not reset and self.columns_.names is None:
                fix = "Train on a frame with categories, or encode them before."
                checks.refuse("X", "hold numbers, as in training", "texts or categories", fix)
            if not reset and list(map(str, X.columns)) != self.columns_.names:  # scikit-learn compares texts alone
                names = ", ".join((self.columns_.names or [])[:5])
                checks.refuse("X", f"have the columns of training in their order ({names} ...)", list(X.columns)[:5])
            return X
        if not reset and self.columns_.names is not None:
            names = ", ".join(self.columns_.names[:5])
            checks.refuse("X", f"be a frame with the columns of training ({names} ...)", type(X).__name__)
        # Whether values may be missing is decided with the columns, where the message says what to do about them.
        return validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan")

    def _trained(self, name: str) -> Any:
        """A setting as it was when members were trained: it tells what their outputs are, whatever is set later."""
        return vars(self).get("outputs_", {}).get(name, getattr(self, name))

    @property
    def _loss_name(self) -> str:
        return self._trained("loss")

    def _note_outputs(self) -> None:
        """Keep the settings that tell what outputs are."""
        names = [name for name in ("loss", "pool", "quantile_levels") if hasattr(self, name)]
        self.outputs_ = {name: getattr(self, name) for name in names}

    def _ensemble_to_train(self, seed: int, *, going_on: bool) -> Ensemble:
        members = checks.count("members", self.members)
        architecture = {"members": members, "hidden": list(widths(self.hidden))}
        if going_on:
            for name, value in architecture.items():
                if value != self.architecture_[name]:
                    fix = "Fit with warm_start=False."
                    checks.refuse(name, f"be {self.architecture_[name]}, as in the ensemble that goes on", value, fix)
            return copy.deepcopy(self.ensemble_)  # an interrupted training leaves the original as it was
        self.architecture_ = architecture
        build = builder(self.module, self.columns_.width, self._outputs(), self.hidden)
        return Ensemble(build, members=members, seed=seed).to(checks.device("device", self.device))

    def _train(self, ensemble: Ensemble, table: Table, seed: int, epochs: int, *, early_stopping: bool) -> History:
        return fit(
            ensemble,
            (table.x, table.y),
            self._objective(),
            weights=table.weights,
            epochs=epochs,
            batch_size=checks.count("batch_size", self.batch_size),
            lr=self.lr,
            weight_decay=self.weight_decay,
            seed=seed,
            progress=shown() if self.verbose else None,
            **self._shared_arguments(len(table.x), early_stopping=early_stopping),
        )

    def _shared_arguments(self, rows: int, *, early_stopping: bool = True) -> dict[str, Any]:
        """Settings that are the same in all runs of a sweep."""
        stops = early_stopping and holds_out(self.validation_fraction, rows)
        return {
            "optimizer": self.optimizer,
            "bootstrap": self.bootstrap,
            "validation": Split(float(self.validation_fraction or 0)) if stops else None,
            "patience": self.patience if stops else None,
            "deterministic": True,
        }

    def _objective(self, without: tuple[str, ...] = ()) -> Any:
        """The objective, bound to its settings but for those that a sweep varies."""
        settings = {name: value for name, value in (self.objective_params or {}).items() if name not in without}
        return bound_objective(self.objective, loss=self._loss(), pool=self._pool(), settings=settings, varied=without)

    def _drawn_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _pool(self) -> Any:
        return pool_of(self._loss(), self._trained("pool"))

    def _member_outputs(self, X: Any) -> Tensor:
        """Raw outputs of members ``[M, N, C]`` in float64 on the host."""
        check_is_fitted(self, "ensemble_")
        X = self._checked_X(X, reset=False)
        return self.ensemble_.predict(torch.from_numpy(self.columns_.features(X))).double().cpu()

    def predictive(self, X: Any) -> Predictive:
        """The pooled prediction with its uncertainty, as `dissensus.predictive` returns it: tensors, in units of y."""
        outputs = self._calibrated_outputs(X)
        return predictive(
            outputs, task=self._task(), loss=self._output_loss(), pool=self._pool(), conformal=self.conformal_
        )

    def _conformal_of(self, X: Any, y: Tensor, method: Any) -> Conformal:
        features = torch.from_numpy(self.columns_.features(self._checked_X(X, reset=False)))
        used = int(self.ensemble_.trained_on(features).sum())
        if used > MOST_USED_ROWS * len(features):
            log.warning(
                "%d of %d rows for the calibration were used for training, so that sets and intervals are too small; "
                "calibrate on new rows",
                used,
                len(features),
            )
        outputs = self._calibrated_outputs(X)
        return conformal.calibrate(
            outputs, y, task=self._task(), loss=self._output_loss(), pool=self._pool(), method=method
        )

    def save(self, path: str | Path) -> None:
        """Save into a folder: weights as safetensors, everything else as JSON. Nothing is pickled.

        Functions (``module``, and an ``objective`` or ``optimizer`` that is no name) are not saved; give them again to
        `load`. A ``random_state`` that is a generator is saved as None.
        """
        check_is_fitted(self, "ensemble_")
        stored.write(path, self)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        module: Any = None,
        objective: Any = None,
        optimizer: Any = None,
        device: str | None = None,
    ) -> Self:
        """Load what `save` wrote.

        Args:
            path: The folder.
            module: The function that built members, where it was not the default.
            objective: The objective, where it was no name.
            optimizer: The optimizer, where it was no name.
            device: Where members are; by default where they were.
        """
        functions = {"module": module, "objective": objective, "optimizer": optimizer}
        return stored.read(path, cls, functions, device)

    @abstractmethod
    def _learnt_targets(self, y: Any, counted: np.ndarray, weights: np.ndarray | None, classes: Any) -> Tensor:
        """Targets of training as a tensor, without rows that do not count; what they teach is kept."""

    @abstractmethod
    def _known_targets(self, y: Any) -> Tensor:
        """Targets as a tensor, by what training has learnt of them."""

    @abstractmethod
    def _class_weights(self, targets: Tensor) -> np.ndarray | None:
        """The weight of every row by its class; None where all count the same."""

    @abstractmethod
    def _outputs(self) -> int:
        """Outputs of a member."""

    @abstractmethod
    def _loss(self) -> Any:
        """The loss of training."""

    @abstractmethod
    def _output_loss(self) -> Any:
        """The loss that `_calibrated_outputs` belong to."""

    @abstractmethod
    def _task(self) -> Any:
        """The task, as `dissensus.predictive` names it."""

    @abstractmethod
    def _calibrated_outputs(self, X: Any) -> Tensor:
        """Outputs of members that predictions are made of, in the unit of y."""


class EnsembleClassifier(ClassifierMixin, _Estimator):
    """A deep ensemble that classifies tables, with scikit-learn's interface.

    Numeric columns are standardised, columns of texts and categories get one feature per category, labels may be texts.
    Two-dimensional ``y`` of 0 and 1 means several labels per row, with one probability each.

    Args:
        module: Function ``(inputs, outputs) -> nn.Module`` that builds a member. The default is a multilayer
            perceptron with the layers ``hidden``.
        members: Number of members.
        hidden: Widths of the hidden layers of the default module.
        objective: A name of `dissensus.objectives.OBJECTIVES`, such as ``"independent"``, ``"augmented"``, ``"adp"`` or
            ``"ldr"``; or a function ``(outputs, targets) -> LossParts``.
        objective_params: Settings of the objective, such as ``{"beta": 0.5}``. In grids and ``set_params`` they are
            ``objective_params__beta``.
        loss: ``"cross_entropy"`` or ``"brier"``. Several labels per row are trained on ``"bce"``.
        pool: ``"probability"``, the mean of probabilities, or ``"score"``, the mean of logits. The default is the
            first.
        epochs: Maximum number of passes over the data.
        batch_size: Rows per step.
        lr: Learning rate.
        weight_decay: Weight decay.
        optimizer: As for `dissensus.fit`.
        validation_fraction: Share of the rows that is held out for early stopping, with the same share of every class.
            None or 0 holds out none. Nothing is held out where that would be fewer than 8 rows.
        patience: Epochs without a lower loss of the pooled prediction on held-out rows after which training stops. The
            weights of the best epoch are kept.
        bootstrap: Whether every member is trained on rows that are drawn for it, with replacement.
        class_weight: None, ``"balanced"``, or a dictionary from classes to weights.
        scale: Whether to standardise numeric columns.
        impute: Whether missing values are allowed: the median of a numeric column and a feature that marks them, no
            category in others. Otherwise they are refused.
        device: Where to train.
        random_state: Seed of initial weights, order and held-out rows.
        verbose: Whether to write the progress of training, a line per epoch.
        warm_start: Whether ``fit`` goes on from the members that are there.

    Attributes:
        ensemble_: The members, a `dissensus.Ensemble`.
        history_: The record of the last training, a `dissensus.History`.
        classes_: The classes, in the order of probabilities.
        temperature_: What logits are divided by; 1 before `calibrate`.
        conformal_: The calibration of prediction sets; None before `calibrate`.
        n_iter_: Number of epochs trained.
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

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train for one epoch on some rows, from where the last call ended.

        Means and scales of features are those of the first call. The optimizer starts anew at every call, and nothing
        is held out.

        Args:
            X: Features.
            y: Classes.
            classes: All classes, at the first call, unless its rows have them all.
            sample_weight: The weight of every row.
        """
        if isinstance(self.class_weight, str):
            fix = "Pass the weights of the classes as a dictionary."
            checks.refuse("class_weight", "be None or a dictionary for partial_fit", repr(self.class_weight), fix)
        known = getattr(self, "classes_", None)
        if known is not None and classes is not None and not np.array_equal(known, np.unique(classes)):
            fix = "Leave `classes` out after the first call."
            checks.refuse("classes", f"be those of the first call ({known.tolist()[:10]})", list(classes)[:10], fix)
        return self._partial_fit(X, y, classes, sample_weight)

    def _learnt_targets(self, y: Any, counted: np.ndarray, weights: np.ndarray | None, classes: Any) -> Tensor:
        del weights
        try:
            kind = type_of_target(y, input_name="y", raise_unknown=True)
        except TypeError as reason:
            fix = "Drop rows without a class. Otherwise use texts throughout, or numbers throughout."
            checks.refuse("y", "hold classes of one kind", f"several, which have no order ({reason})", fix, TypeError)
        self.multilabel_ = kind == "multilabel-indicator"
        if self.multilabel_:
            labels = check_array(y, dtype="float32", input_name="y")
            self.classes_ = np.arange(labels.shape[1])
            return torch.from_numpy(labels[counted])
        if kind == "multiclass-multioutput":
            fix = "Train one classifier per column: sklearn.multioutput.MultiOutputClassifier."
            checks.refuse("y", "be one class per row, or several labels of 0 and 1", "several columns of classes", fix)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_ = np.unique(y if classes is None else classes)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have two classes or more; got one class, {self.classes_.tolist()[0]!r}.")
        return self._known_targets(y)[torch.from_numpy(counted)]

    def _known_targets(self, y: Any) -> Tensor:
        if self.multilabel_:
            labels = check_array(y, dtype="float32", input_name="y")
            if labels.shape[1] != len(self.classes_):
                checks.refuse("y", f"have {len(self.classes_)} columns, as in training", labels.shape[1])
            return torch.tensor(labels)
        y = column_or_1d(y, warn=True)
        place = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        unknown = self.classes_[place] != y
        if unknown.any():
            fix = "New classes need a new fit, or all classes at the first partial_fit(..., classes=...)."
            got = repr(y[unknown].tolist()[0])
            checks.refuse("y", f"hold classes that are known ({self.classes_.tolist()[:10]})", got, fix)
        return torch.from_numpy(place)

    def _class_weights(self, targets: Tensor) -> np.ndarray | None:
        if self.class_weight is not None and self.multilabel_:
            checks.refuse("class_weight", "come with one label per row", "several labels")
        labels = targets.numpy()
        weights = class_weights(self.class_weight, self.classes_, labels)
        if weights is None:
            return None
        if not (weights[labels] > 0).any():
            checks.refuse("class_weight", "leave a row that counts", "zeros only")
        return weights[labels]

    def _outputs(self) -> int:
        return len(self.classes_)

    def _loss(self) -> str:
        checks.one_of("loss", self._loss_name, ("cross_entropy", "brier"))
        return "bce" if self.multilabel_ else self._loss_name

    _output_loss = _loss

    def _task(self) -> Any:
        return "multilabel" if self.multilabel_ else "classification"

    def _calibrated_outputs(self, X: Any) -> Tensor:
        return self._member_outputs(X) / self.temperature_

    def _log_probs(self, X: Any) -> Tensor:
        """Log-probabilities of the pooled prediction ``[N, C]``."""
        outputs = self._calibrated_outputs(X)
        kind = output_kinds.output_kind(self._task(), self._loss(), self._pool())
        if self.multilabel_:
            return output_kinds.class_probs(outputs, kind).log()
        pooled = outputs.mean(0) if kind.pool == "score" else outputs.log_softmax(-1).logsumexp(0)
        return pooled.log_softmax(-1)

    def predict_members(self, X: Any) -> np.ndarray:
        """The probabilities of every member ``[M, N, C]``."""
        outputs = self._calibrated_outputs(X)
        return (outputs.sigmoid() if self.multilabel_ else outputs.softmax(-1)).numpy()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities ``[N, C]``, in the order of ``classes_``; of several labels, the probability of each."""
        return self._log_probs(X).exp().numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of probabilities ``[N, C]``."""
        return self._log_probs(X).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class ``[N]``; of several labels, those with a probability above 1/2, ``[N, L]``."""
        probs = self.predict_proba(X)
        return (probs > 0.5).astype(int) if self.multilabel_ else self.classes_[probs.argmax(1)]

    def predict_set(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Which classes are in each row's prediction set, bool ``[N, C]`` in the order of ``classes_``.

        After `calibrate`, sets hold the true class with a probability of at least ``level``. Before it, they are the
        most probable classes whose probabilities sum to ``level``, without a guarantee.
        """
        return self.predictive(X).sets(level).numpy()

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Total, aleatoric and epistemic uncertainty of every row, in nats; of several labels, of each label."""
        prediction = self.predictive(X)
        return Uncertainty(*(getattr(prediction, name).numpy() for name in ("entropy", "aleatoric", "epistemic")))

    def calibrate(self, X: Any, y: Any, *, method: str | None = None) -> Self:
        """Calibrate probabilities by a temperature, and prediction sets by split conformal prediction.

        The rows must be new: neither training nor early stopping may have used them. Half of them, drawn at random,
        give the temperature, and the other half the scores of prediction sets, so that neither has seen the other's
        rows. Where no row of the first half is misclassified, the temperature stays 1, since the best one would be 0.
        With too few rows for a level, sets hold all classes.

        Args:
            X: Features.
            y: Classes, of those in training.
            method: Score of prediction sets: ``"lac"`` (the default), ``"aps"`` or ``"raps"``. See
                `dissensus.conformal.calibrate`.
        """
        check_is_fitted(self, "ensemble_")
        if self.multilabel_:
            checks.refuse("y", "have one class per row for a calibration", "several labels per row")
        labels = self._known_targets(y)
        check_consistent_length(X, labels)
        first, second = _halves(labels, self.seed_)
        self.temperature_, self.conformal_ = 1.0, None
        if len(first):
            outputs = self._member_outputs(_rows(X, first))
            fitted = temper(outputs, labels[first], when="before", pool=self._pool())
            wrong = fitted.log_probs(outputs).argmax(-1) != labels[first]
            self.temperature_ = fitted.temperature if bool(wrong.any()) else 1.0
        self.conformal_ = self._conformal_of(_rows(X, second), labels[second], method)
        return self

    def audit(self, X: Any, y: Any, *, train: tuple[Any, Any] | None = None, **options: Any) -> Audit:
        """Judge the members on test rows; see `dissensus.audit`.

        Args:
            X: Features.
            y: Classes.
            train: ``(X, y)`` of training, all rows in their order, for more tests.
            **options: Of `dissensus.audit`.
        """
        check_is_fitted(self, "ensemble_")
        if self.multilabel_:
            checks.refuse("y", "have one class per row for an audit", "several labels per row")
        on_train = None
        if train is not None:
            on_train = (self._calibrated_outputs(train[0]), self._known_targets(train[1]))
        loss = {"loss": self._loss(), "pool": self._pool(), **_bag(self.ensemble_, on_train), **options}
        outputs, labels = self._calibrated_outputs(X), self._known_targets(y)
        return audit(outputs, labels, task="classification", kind="logits", train=on_train, **loss)


class EnsembleRegressor(RegressorMixin, _Estimator):
    """A deep ensemble that predicts numbers from tables, with scikit-learn's interface.

    Features and targets are standardised; predictions are in the units of ``y``.

    Args:
        module: As for `EnsembleClassifier`, as all parameters that are not listed here. Its outputs are D values for D
            targets, 2D for ``"gaussian_nll"``, and D times the number of levels for ``"quantile"``.
        loss: ``"mse"``; ``"gaussian_nll"``, by which every member predicts a mean and a variance; or ``"quantile"``.
            For several targets ``"mse"`` is the sum over targets.
        quantile_levels: Levels of ``"quantile"``, in rising order, from below 0.5 to above. Without 0.5, predictions
            are interpolated between the two levels next to it.

    Attributes:
        ensemble_: The members, a `dissensus.Ensemble`. They predict standardised targets.
        history_: The record of the last training, a `dissensus.History`.
        temperature_: What variances are multiplied by with ``"gaussian_nll"``; 1 before `calibrate`.
        conformal_: The calibration of intervals; None before `calibrate`.
        n_iter_: Number of epochs trained.
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

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train for one epoch on some rows, from where the last call ended.

        Means and scales of features and targets are those of the first call. The optimizer starts anew at every call,
        and nothing is held out.

        Args:
            X: Features.
            y: Targets.
            sample_weight: The weight of every row.
        """
        return self._partial_fit(X, y, None, sample_weight)

    def _learnt_targets(self, y: Any, counted: np.ndarray, weights: np.ndarray | None, classes: Any) -> Tensor:
        del classes
        y = check_array(y, ensure_2d=False, dtype="float64", input_name="y")
        self.flat_y_ = y.ndim == 1
        y = self._columns_of_y(y)[counted]
        self.n_outputs_ = y.shape[1]
        self.y_mean_, self.y_scale_ = target_scaling(y, weights)
        return self._scaled(y)

    def _known_targets(self, y: Any) -> Tensor:
        return self._scaled(self._checked_y(y))

    def _checked_y(self, y: Any) -> np.ndarray:
        y = self._columns_of_y(y)
        if y.shape[1] != self.n_outputs_:
            checks.refuse("y", f"have {self.n_outputs_} columns, as in training", y.shape[1])
        return y

    def _columns_of_y(self, y: Any) -> np.ndarray:
        y = check_array(y, ensure_2d=False, dtype="float64", input_name="y")
        return y[:, None] if y.ndim == 1 else y

    def _scaled(self, y: np.ndarray) -> Tensor:
        return torch.from_numpy((y - self.y_mean_) / self.y_scale_).float()

    def _class_weights(self, targets: Tensor) -> None:
        del targets

    def _levels(self) -> tuple[float, ...]:
        levels = losses.check_levels(self._trained("quantile_levels"))
        if not levels[0] <= 0.5 <= levels[-1]:
            fix = "Predictions are medians; add 0.5."
            checks.refuse("quantile_levels", "reach from 0.5 or below to 0.5 or above", str(levels), fix)
        return levels

    def _outputs(self) -> int:
        self._loss()
        return self.n_outputs_ * {"gaussian_nll": 2, "quantile": len(self._trained("quantile_levels"))}.get(
            self._loss_name, 1
        )

    def _loss(self) -> Any:
        checks.one_of("loss", self._loss_name, ("mse", "gaussian_nll", "quantile"))
        if self._loss_name == "quantile":
            return functools.partial(losses.quantile, levels=self._levels())
        # The mean over targets is the sum up to a factor, and the sum needs no warning about an older release.
        return "squared_error" if self._loss_name == "mse" else self._loss_name

    def _output_loss(self) -> Any:
        """The loss that outputs in the unit of y belong to."""
        return (
            functools.partial(losses.gaussian_nll, floor=NO_FLOOR)
            if self._loss_name == "gaussian_nll"
            else self._loss()
        )

    def _task(self) -> Any:
        return "regression"

    def _in_units(self, outputs: Tensor) -> Tensor:
        """Outputs of members in the unit of y."""
        scale, mean = torch.from_numpy(self.y_scale_), torch.from_numpy(self.y_mean_)
        if self._loss_name == "quantile":
            targets = outputs.unflatten(-1, (self.n_outputs_, -1))
            return (targets * scale.unsqueeze(-1) + mean.unsqueeze(-1)).flatten(-2)
        if self._loss_name != "gaussian_nll":
            return outputs * scale + mean
        means, log_variance = outputs.chunk(2, -1)
        floor = log_variance.new_full((), losses.VARIANCE_FLOOR).log()
        return torch.cat([means * scale + mean, torch.logaddexp(log_variance, floor) + 2 * scale.log()], -1)

    def _calibrated_outputs(self, X: Any) -> Tensor:
        """Outputs of members in the unit of y; Gaussians are stretched about their mean by the temperature."""
        outputs = self._in_units(self._member_outputs(X))
        if self._loss_name != "gaussian_nll" or self.temperature_ == 1.0:
            return outputs
        means, log_variance = outputs.chunk(2, -1)
        centre = means.mean(0)
        means = centre + math.sqrt(self.temperature_) * (means - centre)
        return torch.cat([means, log_variance + math.log(self.temperature_)], -1)

    def _points(self, outputs: Tensor) -> Tensor:
        """Point predictions ``[M, N, D]`` of outputs in the unit of y: means, or medians of quantiles."""
        if self._loss_name == "gaussian_nll":
            return outputs.chunk(2, -1)[0]
        if self._loss_name != "quantile":
            return outputs
        levels = self._levels()
        quantiles = outputs.unflatten(-1, (self.n_outputs_, -1)).sort(-1).values
        above = next(place for place, level in enumerate(levels) if level >= 0.5)
        if levels[above] == 0.5:
            return quantiles[..., above]
        share = (0.5 - levels[above - 1]) / (levels[above] - levels[above - 1])
        return quantiles[..., above - 1].lerp(quantiles[..., above], share)

    def predict_members(self, X: Any) -> np.ndarray:
        """The prediction of every member, ``[M, N, D]``: its mean, or its median."""
        return self._points(self._in_units(self._member_outputs(X))).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The mean of the members' predictions, in the shape of ``y``."""
        return self._like_y(self.predict_members(X).mean(0))

    def _like_y(self, values: np.ndarray) -> np.ndarray:
        return values[:, 0] if self.flat_y_ else values

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of prediction intervals, each in the shape of ``y``.

        After `calibrate`, intervals hold the target with a probability of at least ``level``, for each target by
        itself. Before it, they are quantiles of the members' mixture for ``"gaussian_nll"``, and predicted quantiles
        for ``"quantile"``. For ``"mse"`` there are none, since the spread of members does not hold the noise of y.
        """
        check_is_fitted(self, "ensemble_")
        if self._loss_name == "mse" and self.conformal_ is None:
            fix = "Call calibrate(X, y) with new rows first, or train with loss='gaussian_nll' or 'quantile'."
            checks.refuse("loss", "state the noise of targets for an interval", "'mse'", fix)
        low, high = self.predictive(X).interval(level)
        return self._like_y(low.numpy()), self._like_y(high.numpy())

    def predict_uncertainty(self, X: Any, level: float = 0.9) -> Uncertainty:
        """Variances, standard deviation and interval of every row, each in the shape of ``y``.

        With the loss ``"mse"``, members state no noise: ``total`` and ``aleatoric`` are None, ``std`` is the spread of
        members, and there are intervals only after `calibrate`.

        Args:
            X: Features.
            level: Of the intervals.
        """
        prediction = self.predictive(X)
        epistemic = self._like_y(prediction.epistemic.numpy())
        lower = upper = None
        if self._loss_name != "mse" or self.conformal_ is not None:
            lower, upper = (self._like_y(end.numpy()) for end in prediction.interval(level))
        if self._loss_name == "mse":
            return Uncertainty(None, None, epistemic, np.sqrt(epistemic), lower, upper)
        aleatoric = self._like_y(prediction.aleatoric.numpy())
        total = aleatoric + epistemic
        return Uncertainty(total, aleatoric, epistemic, np.sqrt(total), lower, upper)

    def calibrate(self, X: Any, y: Any, *, method: str | None = None) -> Self:
        """Calibrate prediction intervals by split conformal prediction, and variances by a temperature.

        The rows must be new: neither training nor early stopping may have used them. With ``"gaussian_nll"``, half of
        them give the temperature, and the other half the scores of intervals, so that neither has seen the other's
        rows. Other losses have no variance, and all rows are for intervals. With too few rows for a level, intervals
        are infinite.

        Args:
            X: Features.
            y: Targets.
            method: ``"normalised"``, ``"absolute"`` or ``"cqr"``. The default is ``"cqr"`` for ``"quantile"``,
                ``"normalised"`` for ``"gaussian_nll"``, and ``"absolute"`` for ``"mse"``, whose members may agree where
                all are wrong.
        """
        check_is_fitted(self, "ensemble_")
        targets = torch.tensor(self._checked_y(y))
        check_consistent_length(X, targets)
        first, second = torch.arange(0), torch.arange(len(targets))
        if self._loss_name == "gaussian_nll":
            first, second = _halves(targets, self.seed_)
        self.temperature_, self.conformal_ = 1.0, None
        if len(first):
            means, log_variances = self._calibrated_outputs(_rows(X, first)).chunk(2, -1)
            self.temperature_ = temper_variance(means, log_variances.exp(), targets[first]).temperature or 1.0
        method = "absolute" if method is None and self._loss_name == "mse" else method
        self.conformal_ = self._conformal_of(_rows(X, second), targets[second], method)
        return self

    def audit(self, X: Any, y: Any, *, train: tuple[Any, Any] | None = None, **options: Any) -> Audit:
        """Judge the members' point predictions on test rows by their squared error; see `dissensus.audit`.

        Args:
            X: Features.
            y: Targets.
            train: ``(X, y)`` of training, all rows in their order, for more tests.
            **options: Of `dissensus.audit`.
        """
        check_is_fitted(self, "ensemble_")
        on_train = None
        if train is not None:
            on_train = (torch.from_numpy(self.predict_members(train[0])), self._checked_y(train[1]))
        bag = _bag(self.ensemble_, on_train)
        return audit(self.predict_members(X), self._checked_y(y), task="regression", train=on_train, **bag, **options)


def shown() -> Any:
    """What writes the progress of training to standard output, a line per epoch, as scikit-learn's ``verbose``."""
    last = 0

    def write(moment: Progress) -> None:
        nonlocal last
        done = moment.step * moment.epochs // max(moment.steps, 1)
        if done > last:
            last = done
            sys.stdout.write(f"{moment}\n")

    return write


def _halves(targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two halves of calibration rows, for a temperature and for scores; a single row, and too few, are for scores.

    Halves by class would not do: which rows give scores must not depend on labels, else new rows are not exchangeable
    with them, and sets hold the truth less often than they state.
    """
    if len(targets) < 4:
        return torch.arange(0), torch.arange(len(targets))
    second, first = Split(0.5, stratify=False).rows(targets, seed=seed)
    return first, second


def _rows(X: Any, rows: Tensor) -> Any:
    """Some rows of a frame, an array or a list."""
    if hasattr(X, "iloc"):
        return X.iloc[rows.numpy()]
    return np.asarray(X)[rows.numpy()]


def _bag(ensemble: Ensemble, train: tuple[Tensor, Any] | None) -> dict[str, Any]:
    """Which training rows each member was trained on, where that is known and fits the rows."""
    in_bag = ensemble.in_bag
    if train is None or in_bag is None:
        return {}
    if isinstance(in_bag, Tensor) and in_bag.shape[1] != train[0].shape[1]:
        fix = "Give all rows of the last fit, in their order."
        checks.refuse("train", f"have the {in_bag.shape[1]} rows of training", train[0].shape[1], fix)
    return {"in_bag": in_bag}

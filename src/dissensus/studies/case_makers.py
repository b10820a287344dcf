"""Ensembles whose correct verdict is known from how they were made: independent members, copies, biases, guesses.

Every maker is a pure function of `Materials` (data, seed, number of members, outputs of networks). It returns a `Case`,
or None where the data has too few rows, classes or members.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dissensus.studies.datasets import StudyData

Array = npt.NDArray[Any]
Kind = Literal["logits", "probabilities"]
TWIN = 100_003
"""Added to the seed for the reference: an ensemble of the same build, trained with other seeds."""


class Case(NamedTuple):
    """Outputs of an ensemble, and how they are interpreted."""

    test: Array
    """``[M, N, C]``, on test data."""
    targets: Array
    train: Array
    """``[M, K, C]``, on training data."""
    train_targets: Array
    reference: Array | None
    """``[M, N, C]``, on test data: an ensemble of the same build, trained alone with other seeds."""
    kind: Kind | None
    pool: Literal["probability", "score", "vote"]
    fitted_to: Array | None = None
    """bool ``[M, K]``: which training rows each member was fitted to; None: all of them."""

    @property
    def task(self) -> Literal["classification", "regression"]:
        """What is predicted: classes or numbers."""
        return "regression" if self.kind is None else "classification"

    @property
    def loss(self) -> str | None:
        """The loss of the audit; None for its default."""
        return "zero_one" if self.pool == "vote" else None


class NetworkOutputs(NamedTuple):
    """Outputs of members on test and on training data."""

    test: Array
    train: Array


@dataclass(frozen=True)
class Materials:
    """What cases are made from.

    Attributes:
        data: The data set, split by the seed.
        seed: Of everything that is drawn.
        members: M.
        networks: Outputs of networks by the name of their training, with the seed.
        twins: The same, with other seeds.
    """

    data: StudyData
    seed: int
    members: int
    networks: dict[str, NetworkOutputs]
    twins: dict[str, NetworkOutputs]

    @property
    def classes(self) -> int:
        """How many classes there are; 0 for regression."""
        return 0 if self.data.train[1].is_floating_point() else self.data.outputs

    @property
    def kind(self) -> Kind | None:
        """What networks' outputs are."""
        return "logits" if self.classes else None

    @property
    def x(self) -> Array:
        """Features of training rows, in float64 as scikit-learn computes."""
        return self.data.train[0].flatten(1).double().numpy()

    @property
    def x_test(self) -> Array:
        """Features of test rows."""
        return self.data.test[0].flatten(1).double().numpy()

    @property
    def y(self) -> Array:
        """Targets of training rows: ``[K]`` labels or ``[K, T]`` numbers."""
        return self.data.train[1].numpy()

    @property
    def y_test(self) -> Array:
        """Targets of test rows."""
        return self.data.test[1].numpy()

    def rng(self, *salt: int) -> np.random.Generator:
        """For what is drawn."""
        return np.random.default_rng([self.seed, self.members, *salt])


# Networks


def network(name: str, m: Materials, *, pool: Literal["probability", "score"] = "score", alone: str = "") -> Case:
    """Networks as they were trained; the reference is their twin, or that of other networks."""
    outputs, twin = m.networks[name], m.twins[alone or name]
    return Case(outputs.test, m.y_test, outputs.train, m.y, twin.test, m.kind, pool)


# Estimators of scikit-learn


class Fitted(NamedTuple):
    """A member: its prediction ``[N, C]`` for features, and the training rows that it was fitted to (None: all)."""

    predict: Callable[[Array], Array]
    rows: Array | None = None


Build = Callable[[Materials, int], Sequence[Fitted] | None]
"""Members for a seed; None where the data does not allow them."""


def estimators(build: Build, m: Materials, *, votes: bool = False) -> Case | None:
    """Members that scikit-learn fits, and a second ensemble of the same build as the reference."""
    members, twins = build(m, m.seed), build(m, m.seed + TWIN)
    if members is None or twins is None:
        return None
    test, train, reference = (
        np.stack([member.predict(x) for member in ensemble])
        for ensemble, x in ((members, m.x_test), (members, m.x), (twins, m.x_test))
    )
    pool = "probability" if m.classes else "score"
    if votes:
        test, train, reference = (_votes(part) for part in (test, train, reference))
        pool = "vote"
    kind = "probabilities" if m.classes else None
    return Case(test, m.y_test, train, m.y, reference, kind, pool, _fitted_to(members, len(m.y)))


def _fitted_to(members: Sequence[Fitted], rows: int) -> Array | None:
    if all(member.rows is None for member in members):
        return None
    fitted_to = np.ones((len(members), rows), bool)
    for i, member in enumerate(members):
        if member.rows is not None:
            fitted_to[i] = np.isin(np.arange(rows), member.rows)
    return fitted_to


def _votes(probs: Array) -> Array:
    return np.eye(probs.shape[-1])[probs.argmax(-1)]


def _predictor(model: Any, m: Materials, names: Array | None = None, columns: Array | None = None) -> Any:
    """The prediction of an estimator for all classes of the data; classes it was not fitted to have probability 0."""

    def predict(x: Array) -> Array:
        x = x if columns is None else x[:, columns]
        if not m.classes:
            return model.predict(x).reshape(len(x), -1)
        met = np.asarray(model.classes_).astype(int)
        met = met if names is None else np.asarray(names)[met].astype(int)
        probs = np.zeros((len(x), m.classes))
        probs[:, met] = _probabilities(model, x)
        return probs

    return predict


def _probabilities(model: Any, x: Array) -> Array:
    if hasattr(model, "predict_proba"):
        return model.predict_proba(x)
    scores = model.decision_function(x)  # of a support vector machine: softmax, which keeps its decisions
    scores = np.stack([-scores, scores], -1) if scores.ndim == 1 else scores
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def _y(m: Materials) -> Array:
    return m.y.squeeze(-1) if not m.classes and m.y.shape[1] == 1 else m.y


def _sklearn(module: str) -> Any:
    try:
        return import_module(f"sklearn.{module}")
    except ImportError as reason:
        raise ImportError("these ensembles need scikit-learn: pip install 'dissensus[sklearn]'") from reason


def model(name: str, m: Materials, seed: int, **settings: Any) -> Any:
    """An estimator by its name, for the task at hand."""
    ensemble, linear_model, naive_bayes, neighbors, svm, tree = map(
        _sklearn, ("ensemble", "linear_model", "naive_bayes", "neighbors", "svm", "tree")
    )
    classes = bool(m.classes)
    made: dict[str, Callable[[], Any]] = {
        "linear": lambda: linear_model.LogisticRegression(max_iter=300) if classes else linear_model.LinearRegression(),
        "ridge": lambda: linear_model.LogisticRegression(max_iter=300) if classes else linear_model.Ridge(1.0),
        "knn": lambda: (neighbors.KNeighborsClassifier if classes else neighbors.KNeighborsRegressor)(5),
        "tree": lambda: (tree.DecisionTreeClassifier if classes else tree.DecisionTreeRegressor)(
            random_state=seed, **settings
        ),
        "forest": lambda: (ensemble.RandomForestClassifier if classes else ensemble.RandomForestRegressor)(
            random_state=seed, **settings
        ),
        "bayes": lambda: naive_bayes.GaussianNB() if classes else linear_model.BayesianRidge(),
        "svm": lambda: svm.SVC(decision_function_shape="ovr") if classes else svm.SVR(),
    }
    return made[name]()


def forest(m: Materials, seed: int, *, trees: int | None = None, extra: bool = False, **settings: Any) -> list[Fitted]:
    """A random forest, or extremely random trees."""
    ensemble = _sklearn("ensemble")
    kind = {
        (True, False): ensemble.RandomForestClassifier,
        (False, False): ensemble.RandomForestRegressor,
        (True, True): ensemble.ExtraTreesClassifier,
        (False, True): ensemble.ExtraTreesRegressor,
    }[bool(m.classes), extra]
    fitted: Any = kind(trees or m.members, random_state=seed, **settings).fit(m.x, _y(m))
    names = fitted.classes_ if m.classes else None
    samples = fitted.estimators_samples_ if fitted.bootstrap else [None] * len(fitted.estimators_)
    return [Fitted(_predictor(tree, m, names), rows) for tree, rows in zip(fitted.estimators_, samples, strict=True)]


def bagging(m: Materials, seed: int, *, of: str, **settings: Any) -> list[Fitted] | None:
    """Bagging of an estimator: bootstrap or parts of the rows, all or some of the columns."""
    ensemble = _sklearn("ensemble")
    if m.x.shape[1] * settings.get("max_features", 1.0) < 1:
        return None
    kind = ensemble.BaggingClassifier if m.classes else ensemble.BaggingRegressor
    fitted: Any = kind(model(of, m, seed), m.members, random_state=seed, **settings).fit(m.x, _y(m))
    names = fitted.classes_ if m.classes else None
    return [
        Fitted(_predictor(estimator, m, names, columns), rows)
        for estimator, rows, columns in zip(
            fitted.estimators_, fitted.estimators_samples_, fitted.estimators_features_, strict=True
        )
    ]


def shards(m: Materials, seed: int, *, of: str = "linear") -> list[Fitted] | None:
    """Members on disjoint parts of the training rows."""
    parts = np.array_split(np.random.default_rng(seed).permutation(len(m.y)), m.members)
    if min(map(len, parts)) < 2 * m.x.shape[1] + 5:  # least squares with fewer rows explode
        return None
    return _each_on(m, seed, of, parts)


def few_shot(m: Materials, seed: int, *, rows: int, of: str) -> list[Fitted] | None:
    """Each member is fitted to a few random rows."""
    draw = np.random.default_rng(seed)
    return _each_on(m, seed, of, [draw.choice(len(m.y), rows, replace=False) for _ in range(m.members)])


def label_skew(m: Materials, seed: int) -> list[Fitted] | None:
    """Each member is fitted to classes in different proportions."""
    if not m.classes:
        return None
    draw = np.random.default_rng(seed)
    parts: list[Array] = []
    for _ in range(m.members):
        weights = draw.dirichlet(np.full(m.classes, 0.5))[m.y] + 1e-4
        parts.append(draw.choice(len(m.y), len(m.y) // 2, p=weights / weights.sum()))
    return _each_on(m, seed, "linear", parts)


def sites(m: Materials, seed: int) -> list[Fitted] | None:
    """Each member comes from a different site, whose targets are shifted by an intercept."""
    if m.classes:
        return None
    draw = np.random.default_rng(seed)
    members: list[Fitted] = []
    for i in range(m.members):
        rows = draw.choice(len(m.y), len(m.y) // 2, replace=False)
        shifted = _y(m)[rows] + 0.7 * draw.standard_normal()
        fitted = model("forest", m, seed + i, n_estimators=10, max_depth=8).fit(m.x[rows], shifted)
        members.append(Fitted(_predictor(fitted, m), rows))
    return members


def heterogeneous(m: Materials, seed: int) -> list[Fitted]:
    """Models of six families, as a voting ensemble has them."""
    small = {"n_estimators": 10, "max_depth": 5}
    names: dict[str, dict[str, Any]] = {
        "linear": {},
        "bayes": {},
        "knn": {},
        "tree": {"max_depth": 6},
        "forest": small,
        "svm": {},
    }
    single_output = m.classes or m.y.shape[1] == 1
    chosen = names if single_output else {name: names[name] for name in ("linear", "knn", "tree", "forest")}
    made = [model(name, m, seed, **settings).fit(m.x, _y(m)) for name, settings in chosen.items()]
    return [Fitted(_predictor(fitted, m)) for fitted in made]


def adaboost(m: Materials, seed: int, *, rounds: int = 30) -> list[Fitted] | None:
    """The stumps of AdaBoost."""
    if not m.classes:
        return None
    boosted = _sklearn("ensemble").AdaBoostClassifier(n_estimators=rounds, random_state=seed)
    draw = np.random.default_rng(seed)
    rows = draw.choice(len(m.y), len(m.y))  # stumps of the same rows would be the same for every seed
    boosted.fit(m.x[rows], m.y[rows])
    if len(boosted.estimators_) < 3:
        return None
    return [Fitted(_predictor(stump, m), rows) for stump in boosted.estimators_]


STAGES = (5, 10, 25, 50, 100)


def boosting_stages(m: Materials, seed: int) -> list[Fitted] | None:
    """Gradient boosting after several numbers of rounds, each taken as a member."""
    ensemble = _sklearn("ensemble")
    if not m.classes and m.y.shape[1] > 1:
        return None
    kind = ensemble.GradientBoostingClassifier if m.classes else ensemble.GradientBoostingRegressor
    fitted: Any = kind(n_estimators=STAGES[-1], subsample=0.8, max_features="sqrt", random_state=seed)
    fitted.fit(m.x, _y(m))

    def at(stage: int, x: Array) -> Array:
        staged = fitted.staged_predict_proba(x) if m.classes else fitted.staged_predict(x)
        values = next(value for i, value in enumerate(staged, 1) if i == stage)
        if not m.classes:
            return values.reshape(len(x), 1)
        probs = np.zeros((len(x), m.classes))
        probs[:, fitted.classes_] = values
        return probs

    return [Fitted(partial(at, stage)) for stage in STAGES]


def boosted_alike(m: Materials, seed: int) -> list[Fitted] | None:
    """Three boosted models on nearly all of the rows."""
    ensemble = _sklearn("ensemble")
    if not m.classes and m.y.shape[1] > 1:
        return None
    kind = ensemble.HistGradientBoostingClassifier if m.classes else ensemble.HistGradientBoostingRegressor
    draw = np.random.default_rng(seed)
    members: list[Fitted] = []
    for i in range(3):
        rows = np.sort(draw.choice(len(m.y), math.ceil(0.97 * len(m.y)), replace=False))
        settings: Any = {"max_iter": 40, "random_state": seed + i, "early_stopping": False}
        members.append(Fitted(_predictor(kind(**settings).fit(m.x[rows], _y(m)[rows]), m), rows))
    return members


def one_strong_among_weak(m: Materials, seed: int) -> list[Fitted]:
    """A forest of 100 among stumps that each look at one feature, drawn at random."""
    weak = forest(m, seed, trees=m.members - 1, extra=True, max_depth=1, max_features=1)
    strong = model("forest", m, seed, n_estimators=100).fit(m.x, _y(m))
    return [Fitted(_predictor(strong, m)), *weak]


def _each_on(m: Materials, seed: int, of: str, parts: Sequence[Array]) -> list[Fitted] | None:
    if m.classes and any(len(np.unique(m.y[rows])) < 2 for rows in parts):
        return None
    fitted = [model(of, m, seed + i).fit(m.x[rows], _y(m)[rows]) for i, rows in enumerate(parts)]
    return [Fitted(_predictor(estimator, m), rows) for estimator, rows in zip(fitted, parts, strict=True)]


# Data that is changed first


def _with(m: Materials, x: Array, y: Array, x_test: Array, y_test: Array, outputs: int) -> Materials:
    def pair(features: Array, targets: Array) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.from_numpy(targets)
        return torch.from_numpy(features), y.float() if y.is_floating_point() else y.long()

    return replace(m, data=StudyData(m.data.name, pair(x, y), pair(x_test, y_test), outputs), networks={}, twins={})


def imbalanced(build: Build, m: Materials, *, share: float = 0.05) -> Case | None:
    """One class against the rest, thinned out to a share of the rows."""
    if not m.classes:
        return None
    rng = m.rng(8)
    counts = np.bincount(m.y, minlength=m.classes)
    common = int(counts.argmax())
    chosen = int(np.where(np.arange(m.classes) == common, 0, counts).argmax())  # the largest class but one

    def thinned(labels: Array) -> tuple[Array, Array]:
        positive = labels == chosen
        rest = np.flatnonzero(~positive)
        wanted = round(share / (1 - share) * len(rest))
        kept = rng.permutation(np.flatnonzero(positive))[:wanted]
        rows = np.sort(np.concatenate([rest, kept]))
        return rows, positive[rows].astype(np.int64)

    (rows, y), (test_rows, y_test) = thinned(m.y), thinned(m.y_test)
    if y.sum() < 10 or y_test.sum() < 10:
        return None
    return estimators(build, _with(m, m.x[rows], y, m.x_test[test_rows], y_test, 2))


def balanced_trees(m: Materials) -> Case | None:
    """Weak trees for one class against the rest, each fitted to a balanced sample.

    The ensemble is sound, though its accuracy is below that of always predicting "the rest".
    """
    if m.classes < 3 or min((m.y == 0).sum(), (m.y_test == 0).sum()) < 5:
        return None
    y, y_test = ((labels == 0).astype(np.int64) for labels in (m.y, m.y_test))

    def build(m: Materials, seed: int) -> list[Fitted]:
        draw = np.random.default_rng(seed)
        few = min(80, int(m.y.sum()))
        members: list[Fitted] = []
        for _ in range(m.members):
            rows = np.concatenate([draw.choice(np.flatnonzero(m.y == kind), few) for kind in (1, 0)])
            settings: Any = {"max_features": 1, "random_state": int(draw.integers(2**31))}
            tree = _sklearn("tree").ExtraTreeClassifier(**settings).fit(m.x[rows], m.y[rows])
            members.append(Fitted(_predictor(tree, m), rows))
        return members

    return estimators(build, replace(_with(m, m.x, y, m.x_test, y_test, 2), members=20))


def unbiased_shards(m: Materials, *, rows: int = 60, features: int = 30) -> Case | None:
    """Least squares, or logistic regression, on disjoint parts of data that is made for it.

    Members are unbiased (least squares) and independent, so the ensemble is sound.
    """
    rng = m.rng(9)
    truth = rng.standard_normal((features, 1)) / math.sqrt(features)

    def drawn(count: int) -> tuple[Array, Array]:
        x = rng.standard_normal((count, features))
        if m.classes:
            return x, (rng.random(count) < 1 / (1 + np.exp(-3 * (x @ truth)[:, 0]))).astype(np.int64)
        return x, x @ truth + 0.5 * rng.standard_normal((count, 1))

    x, y = drawn(rows * m.members)
    x_test, y_test = drawn(len(m.y_test))
    case = estimators(partial(_on_parts, rows), _with(m, x, y, x_test, y_test, 2 if m.classes else 1))
    if case is None:
        return None
    x, y = drawn(rows * m.members)  # the reference has other rows
    twin = estimators(partial(_on_parts, rows), _with(m, x, y, x_test, y_test, 2 if m.classes else 1))
    return None if twin is None else case._replace(reference=twin.test)


def _on_parts(rows: int, m: Materials, seed: int) -> list[Fitted] | None:
    parts = np.array_split(np.arange(len(m.y)), len(m.y) // rows)
    return _each_on(m, seed, "linear", parts)


# Copies, guesses, and biases added to outputs of independent members


def copies(m: Materials, *, noise: float = 0.0) -> Case:
    """Copies of one member, with a little noise."""
    rng = m.rng(1)

    def copied(part: Array) -> Array:
        return part[:1] + noise * part.std() * rng.standard_normal(part.shape).astype(part.dtype)

    case = network("alone", m)
    return case._replace(test=copied(case.test), train=copied(case.train))


def constant_biases(m: Materials, *, size: float) -> Case | None:
    """Constants that cancel in the mean; they add ``size`` times the pool's error to that of members."""
    drawn = m.rng(2).standard_normal((m.members, 1, m.data.outputs))
    drawn -= drawn.mean(0)
    return _biased(m, size, lambda outputs: np.broadcast_to(drawn, outputs.shape))


def biases_per_example(m: Materials, *, size: float) -> Case | None:
    """Biases drawn for every example, which cancel in the mean; they add ``size`` times the pool's error."""
    rng = m.rng(3)

    def draw(outputs: Array) -> Array:
        drawn = rng.standard_normal(outputs.shape)
        return drawn - drawn.mean(0)

    return _biased(m, size, draw)


def _biased(m: Materials, size: float, draw: Callable[[Array], Array]) -> Case | None:
    case = network("alone", m)
    test, train = draw(case.test), draw(case.train)
    targets = np.eye(m.classes)[m.y_test] if m.classes else m.y_test

    def error(outputs: Array) -> float:
        return float(np.square((_softmax(outputs) if m.classes else outputs) - targets).mean())

    wanted = error(case.test) + size * error(case.test.mean(0, keepdims=True))
    low, high = 0.0, 1.0
    while error(case.test + high * test) < wanted:
        low, high = high, 2 * high
        if high > 1e4:  # a Brier score is bounded, so the rise may be out of reach
            return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if error(case.test + middle * test) < wanted else (low, middle)
    return case._replace(test=case.test + high * test, train=case.train + high * train)


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _drawn(m: Materials, draw: Callable[[Array, np.random.Generator], Array], kind: Kind | None) -> Case:
    """Random outputs of an ensemble and of its reference."""
    rng, other = m.rng(4), m.rng(5)
    pool = "probability" if m.classes else "score"
    return Case(draw(m.y_test, rng), m.y_test, draw(m.y, rng), m.y, draw(m.y_test, other), kind, pool)


def noise(m: Materials) -> Case:
    """Members that output noise."""
    width = m.data.outputs
    return _drawn(m, lambda y, rng: rng.standard_normal((m.members, len(y), width)), m.kind)


def wrong_values(m: Materials, *, slope: float, shift: float) -> Case | None:
    """``slope · y + shift``, and a little noise."""
    if m.classes:
        return None
    return _drawn(m, lambda y, rng: slope * y + shift + 0.1 * rng.standard_normal((m.members, *y.shape)), None)


def one_class_each(m: Materials) -> Case | None:
    """Members that each always answer one class."""
    if not m.classes:
        return None
    logits = 4.0 * np.eye(m.classes)[np.arange(m.members) % m.classes][:, None]
    return _drawn(m, lambda y, rng: logits + 0.01 * rng.standard_normal((m.members, len(y), m.classes)), "logits")


def guesses(m: Materials) -> Case | None:
    """Random probabilities."""
    if not m.classes:
        return None
    return _drawn(m, lambda y, rng: rng.dirichlet(np.ones(m.classes), (m.members, len(y))), "probabilities")


def prior(m: Materials) -> Case:
    """Members that always predict the class frequencies, or the mean."""
    if m.classes:
        shares = (np.bincount(m.y, minlength=m.classes) + 1) / (len(m.y) + m.classes)
        constant, kind = np.log(shares), "logits"
    else:
        constant, kind = m.y.mean(0), None
    width = m.data.outputs
    return _drawn(m, lambda y, rng: constant + 0.01 * rng.standard_normal((m.members, len(y), width)), kind)


def one_strong_among_guesses(m: Materials) -> Case:
    """One trained member among members that guess; the same holds for the reference."""
    rng = m.rng(6)

    def among(outputs: Array) -> Array:
        return np.concatenate([outputs[:1], 0.1 * rng.standard_normal(outputs[1:].shape)])

    case = network("alone", m)
    assert case.reference is not None
    return case._replace(test=among(case.test), train=among(case.train), reference=among(case.reference))


def known_to_one(m: Materials) -> Case | None:
    """A correct ensemble of members at chance: exactly one member knows each example."""
    if not m.classes:
        return None
    shares = np.bincount(m.y, minlength=m.classes) / len(m.y)

    def draw(y: Array, rng: np.random.Generator) -> Array:
        guessed = rng.choice(m.classes, (m.members, len(y)), p=shares)
        logits = 0.3 * np.eye(m.classes)[guessed] + 0.02 * rng.standard_normal((m.members, len(y), m.classes))
        knows = rng.integers(m.members, size=len(y))
        logits[knows, np.arange(len(y))] = 12.0 * np.eye(m.classes)[y]
        return logits

    case = _drawn(m, draw, "logits")
    return case._replace(pool="score", reference=m.twins["alone"].test)


def plus_minus(m: Materials, *, size: float = 0.45) -> Case | None:
    """Members ``f ± size`` around the true function f, under label noise of variance 1."""
    if m.classes:
        return None
    rng = m.rng(7)
    of_train, of_test = _signal(m)
    signs = np.resize([1.0, -1.0], m.members)[:, None, None]
    signs[m.members // 2 * 2 :] = 0.0  # the last of an odd number has no bias

    def around(f: Array, offsets: Any) -> Array:
        return f + offsets + 0.05 * rng.standard_normal((m.members, len(f), 1))

    targets, train_targets = (f + rng.standard_normal(f.shape) for f in (of_test, of_train))
    return Case(
        around(of_test, size * signs),
        targets,
        around(of_train, size * signs),
        train_targets,
        around(of_test, 0.0),
        None,
        "score",
    )


def _signal(m: Materials) -> tuple[Array, Array]:
    """A function of the features with variance 1: the least-squares prediction of the first target."""
    fitted = _sklearn("linear_model").Ridge(1.0).fit(m.x, m.y[:, :1])
    train, test = (fitted.predict(x).reshape(-1, 1) for x in (m.x, m.x_test))
    scale = train.std() or 1.0
    return train / scale, test / scale


class CaseFacts(NamedTuple):
    """Losses of a case on test data by simple arithmetic: squared errors, Brier scores, or shares of wrong votes."""

    ensemble: float
    individual: float
    best: float
    constant: float
    """Loss of the constant prediction: targets' mean, class frequencies or, for votes, the most frequent class."""
    correlation: float
    """Correlation of members' errors: the mean covariance of pairs over the mean variance."""


def facts(case: Case) -> CaseFacts:
    """Losses of a case's pool, members, best member and of a constant prediction, on test data."""
    outputs = case.test.astype(float)
    targets = case.targets
    if case.task == "classification":
        targets = np.eye(outputs.shape[-1])[targets]
        probs = _softmax(outputs) if case.kind == "logits" else outputs
        pooled = _softmax(outputs.mean(0)) if case.pool == "score" else probs.mean(0)
        pooled = _votes(pooled) if case.pool == "vote" else pooled
        outputs = probs
    else:
        pooled = outputs.mean(0)
    errors = (outputs - targets).reshape(len(outputs), -1)
    member_losses = np.square(errors).mean(1)
    count = len(member_losses)
    centred = errors - errors.mean(1, keepdims=True)
    variances = float(np.square(centred).sum())
    pairs = float(np.square(centred.sum(0)).sum()) - variances
    correlation = pairs / (count - 1) / variances if count > 1 and variances else math.nan
    constant = targets.mean(0) if case.pool != "vote" else _votes(targets.mean(0))
    ensemble, flat = (float(np.square(predicted - targets).mean()) for predicted in (pooled, constant))
    scale = targets.shape[-1] / 2 if case.pool == "vote" else 1.0  # a wrong vote is wrong in two of C places
    individual, best = float(member_losses.mean()), float(member_losses.min())
    return CaseFacts(scale * ensemble, scale * individual, scale * best, scale * flat, correlation)

"""Members of fitted models: their outputs on data, and whether their pooled outputs are the model's prediction."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from dissensus import checks
from dissensus.arrays import is_array
from dissensus.auditing.inputs import ClassLabels, union

PROBABILITIES, LABELS, LOGITS, VALUES = "probabilities", "labels", "logits", "values"
_TASKS = {"classifier": "classification", "regressor": "regression"}
_POOLS = {PROBABILITIES: "probability", LOGITS: "probability", LABELS: "vote", VALUES: "score"}
_BATCH = 1024
"""Batch size of networks."""
_ROUNDING = 1e-6
"""Largest difference of probabilities, or of values relative to the largest value, that counts as rounding."""
_REQUIREMENT = "be a fitted scikit-learn ensemble, a list of models, a callable or a dissensus Ensemble"


class ModelMembers(NamedTuple):
    """Access to the members of a model."""

    task: str | None
    kind: str | None
    """``probabilities``, ``labels``, ``logits`` or ``values``; None where it is unknown."""
    outputs: Callable[[Any], Any]
    """Members' outputs for inputs: one array ``[M, N, C]``, or a list of M."""
    classes: Any = None
    """The label of every column, where it is known."""
    predictor: Any = None
    """The model, where it has a prediction of its own; None for members that only an audit pools."""
    rule: str = ""
    """How the model predicts, in words."""


@dataclass(frozen=True)
class AuditArguments:
    """Arguments of `dissensus.audit` for a model, and facts about the model."""

    outputs: Any
    targets: Any
    settings: dict[str, Any]
    facts: dict[str, Any]


def read_model(
    model: Any,
    X: Any,
    y: Any,
    *,
    train: Any = None,
    reference: Any = None,
    ood: Any = None,
    task: str | None = None,
    kind: str | None = None,
    pool: str | None = None,
    classes: Any = None,
    staged: bool = False,
) -> AuditArguments:
    """Members' outputs on all data. The arguments are those of `dissensus.audit_estimator`."""
    if train is not None and (not isinstance(train, tuple | list) or len(train) != 2):
        checks.refuse("train", "be a pair (X, y)", type(train).__name__, error=TypeError)
    if task is not None:
        checks.one_of("task", task, (*_TASKS.values(), "multilabel"))
    members = members_of(model, "model", task=task, kind=kind, staged=staged)
    if members.task is None:
        fix = "Use task='classification', task='multilabel' or task='regression'."
        checks.refuse("task", "be stated for this model", "None", fix)
    known = VALUES if members.task == "regression" else members.kind
    if known is None:
        fix = "Use kind='logits', kind='probabilities' or kind='labels'."
        checks.refuse("kind", "be stated for this model", "None", fix)
    chosen, pool = pool, pool or _POOLS[known]
    wanted = members.classes if classes is None else classes
    if classes is None and wanted is not None:
        _check_labels(wanted, y, "y")

    def aligned(source: ModelMembers, raw: Any, name: str) -> Any:
        """Outputs with the columns of the audit."""
        if known != PROBABILITIES or source.classes is None or wanted is None:
            return raw
        return [_padded(part, source.classes, wanted, name) for part in raw]

    raw = members.outputs(X)
    settings: dict[str, Any] = {"task": members.task, "pool": chosen if known == VALUES else pool}
    settings |= {"kind": kind, "classes": classes} if known == VALUES else {"kind": known, "classes": wanted}
    facts: dict[str, Any] = {}
    if members.predictor is not None:
        facts["matches_own_prediction"] = own_prediction(members, raw, X, known, pool)
    if reference is None and getattr(model, "twin", None) is not None:
        reference, facts["reference"] = model.twin, "the ensemble's twin"
    if _is_model(reference):
        other_kind = None if known == VALUES else known
        other = members_of(reference, "reference", task=members.task, kind=other_kind, staged=staged)
        reference = aligned(other, other.outputs(X), "reference")
    settings["reference"] = reference
    if train is not None:
        settings["train"] = (aligned(members, members.outputs(train[0]), "train"), train[1])
        settings["in_bag"] = in_bag_of(model, len(train[1]))
    settings["ood"] = None if ood is None else aligned(members, members.outputs(ood), "ood")
    return AuditArguments(aligned(members, raw, "model"), y, settings, facts)


def _check_labels(classes: Any, labels: Any, name: str) -> None:
    """Refuse numbers as labels of a model that knows its classes by name: their order would be a guess."""
    has_names = np.asarray(classes).dtype.kind in "OUS"
    if has_names and np.asarray(labels).dtype.kind in "iufb":
        known = ", ".join(repr(str(label)) for label in list(classes)[:4])
        fix = "Give the names that it was fitted to, or the label of each column with `classes`."
        checks.refuse(name, f"hold names of classes, as the model does ({known})", "numbers", fix)


def in_bag_of(model: Any, examples: int) -> Any:
    """Training examples that each member was fitted to: "all", a mask ``[M, N]``, or None where there is no record.

    The record is by position, so it is read only for as many examples as the model was fitted to.
    """
    if isinstance(model, dict | list | tuple) or not hasattr(model, "predict"):
        return None
    inner = _unwrapped(model)[0]
    inner = getattr(inner, "ensemble_", inner)  # of an estimator of dissensus.sklearn
    if hasattr(inner, "twin"):  # a dissensus Ensemble
        recorded = getattr(inner, "in_bag", "all")
        return recorded if not isinstance(recorded, Tensor) or recorded.shape[1] == examples else None
    if type(inner).__name__.startswith(("Voting", "Stacking")):
        return "all"
    samples = getattr(inner, "estimators_samples_", None)
    if samples is None or not 0.98 * examples <= max(int(np.max(rows)) for rows in samples) + 1 <= examples:
        return None
    mask = np.zeros((len(samples), examples), dtype=bool)
    for member, rows in enumerate(samples):
        mask[member, rows] = True
    return "all" if mask.all() else mask if mask.any(0).mean() > 0.5 else None


def members_of(
    model: Any, name: str, *, task: str | None = None, kind: str | None = None, staged: bool = False
) -> ModelMembers:
    """Access to the members of a model.

    Args:
        model: See `dissensus.audit_estimator`.
        name: Name of the model in messages.
        task: Task of a model that does not state it.
        kind: Kind of outputs to read of estimators, or that a callable returns.
        staged: Take the predictions after each stage of a boosted model as its members.
    """
    if isinstance(model, type):
        fix = f"Write {model.__name__}(...), and fit it."
        checks.refuse(name, _REQUIREMENT, f"the class {model.__name__}", fix, TypeError)
    if isinstance(model, dict):
        model = list(model.values())
    if isinstance(model, list | tuple):
        return _several(list(model), name, task, kind)
    if isinstance(model, nn.Module):
        return _network(model, task, kind)
    if callable(model) and not hasattr(model, "predict"):
        return ModelMembers(task, kind, lambda X: _on_host(model(X)))
    _check_fitted(model, name)
    inner, prepare = _unwrapped(model)
    known = _task_of(inner)
    if task is not None and known is not None and task != known:
        checks.refuse("task", f"be {known!r} for {type(inner).__name__}", repr(task))
    if staged:
        return _stages(model, inner, prepare, known, kind)
    if hasattr(inner, "predict_members"):
        return _with_predict_members(model, inner, prepare, known, kind)
    parts = _parts_of(inner)
    if parts is None:
        _refuse_single(inner, name)
    classes = getattr(inner, "classes_", None)
    _check_classes(classes, name)
    read = "values" if known == "regression" else _kind_of(parts.members, kind, name, votes=parts.votes)

    def outputs(X: Any) -> list[Any]:
        ready = prepare(X)
        if parts.bare:
            inner.predict(_first(ready))  # this checks the columns and their names
            ready = _bare(ready)
        columns = parts.features or [None] * len(parts.members)
        return [
            _output(member, ready if chosen is None else ready[:, chosen], read, classes, coded=parts.coded)
            for member, chosen in zip(parts.members, columns, strict=True)
        ]

    return ModelMembers(known, read, outputs, classes, model, parts.rule)


def _with_predict_members(
    model: Any, inner: Any, prepare: Callable[[Any], Any], task: str | None, kind: str | None
) -> ModelMembers:
    """An estimator of `dissensus.sklearn`, whose members tell probabilities, or values."""
    read = VALUES if task == "regression" else PROBABILITIES
    if kind not in (None, read):
        checks.refuse("kind", f"be {read!r} for {type(inner).__name__}", repr(kind))

    def outputs(X: Any) -> list[Any]:
        return list(inner.predict_members(prepare(X)))

    if getattr(inner, "multilabel_", False):
        return ModelMembers("multilabel", read, outputs)
    return ModelMembers(task, read, outputs, getattr(inner, "classes_", None), model, "averages its members")


class _Parts(NamedTuple):
    """The members of a scikit-learn ensemble, and how the ensemble uses them."""

    members: list[Any]
    rule: str
    """How the ensemble predicts, in words."""
    coded: bool = False
    """Whether members know classes by their number."""
    bare: bool = False
    """Whether members get inputs as arrays, without names of columns."""
    votes: bool = False
    """Whether it counts labels."""
    features: list[Any] | None = None
    """Columns of the inputs that each member gets."""


def _parts_of(inner: Any) -> _Parts | None:
    """Members of scikit-learn ensembles that pool whole predictions; None for any other model."""
    if "sklearn" not in sys.modules:  # then the model is none of its estimators
        return None
    from sklearn import calibration, ensemble

    forests = (
        ensemble.RandomForestClassifier,
        ensemble.ExtraTreesClassifier,
        ensemble.RandomForestRegressor,
        ensemble.ExtraTreesRegressor,
    )
    if isinstance(inner, forests):
        return _Parts(list(inner.estimators_), "averages its members", coded=True, bare=True)
    if isinstance(inner, ensemble.BaggingClassifier | ensemble.BaggingRegressor):
        features = list(inner.estimators_features_)
        return _Parts(inner.estimators_, "averages its members", coded=True, bare=True, features=features)
    if isinstance(inner, ensemble.VotingClassifier | ensemble.VotingRegressor):
        votes = getattr(inner, "voting", "soft") == "hard"
        rule = "averages its members" if inner.weights is None else "weighs its members"
        return _Parts(list(inner.estimators_), rule, coded=True, votes=votes)
    if isinstance(inner, ensemble.StackingClassifier | ensemble.StackingRegressor):
        rule = "comes from a final estimator on top of its members"
        return _Parts(list(inner.estimators_), rule, coded=inner.cv != "prefit")
    if isinstance(inner, ensemble.AdaBoostClassifier):
        return _Parts(list(inner.estimators_), "weighs its members", bare=True, votes=True)
    if isinstance(inner, ensemble.AdaBoostRegressor):
        return _Parts(list(inner.estimators_), "is the weighted median of its members", bare=True)
    if isinstance(inner, calibration.CalibratedClassifierCV):
        return _Parts(list(inner.calibrated_classifiers_), "averages its members")
    return None


def _refuse_single(inner: Any, name: str) -> NoReturn:
    """Refuse a model without members."""
    type_name = type(inner).__name__
    fix = "Give a list of models as members."
    if any(word in type_name for word in ("Boost", "XGB", "LGBM")):
        fix = f"A boosted model adds up stages, which are not members that it averages. {fix}"
        if hasattr(inner, "staged_predict"):
            fix += " To audit the predictions after each stage, use staged=True."
    checks.refuse(name, _REQUIREMENT, f"{type_name}, which has no members", fix, TypeError)


def _unwrapped(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The best estimator of a search or the last one of a pipeline, and the transformation of inputs before it."""
    if hasattr(model, "best_estimator_"):
        return _unwrapped(model.best_estimator_)
    steps = getattr(model, "steps", None)
    if not isinstance(steps, list):
        return model, lambda X: X
    last, prepare = _unwrapped(steps[-1][1])
    return last, prepare if len(steps) == 1 else lambda X: prepare(model[:-1].transform(X))


def _stages(model: Any, inner: Any, prepare: Callable[[Any], Any], task: str | None, kind: str | None) -> ModelMembers:
    """The predictions after each stage as members."""
    if not hasattr(inner, "staged_predict"):
        checks.refuse("staged", "be left out for a model without stages", type(inner).__name__)
    proba = task == "classification" and kind != LABELS
    staged = inner.staged_predict_proba if proba else inner.staged_predict
    read = PROBABILITIES if proba else LABELS if task == "classification" else VALUES

    def outputs(X: Any) -> list[Any]:
        return [np.array(stage) for stage in staged(prepare(X))]

    return ModelMembers(task, read, outputs, getattr(inner, "classes_", None), model, "is that of its last stage")


def _several(models: list[Any], name: str, task: str | None, kind: str | None) -> ModelMembers:
    """A list of estimators, networks or callables as members."""
    if not models:
        checks.refuse(name, "hold at least one model", "an empty list")
    if all(callable(model) and (isinstance(model, nn.Module) or not hasattr(model, "predict")) for model in models):
        return ModelMembers(task, kind, lambda X: [_called(model, X) for model in models])
    for model in models:
        if isinstance(model, type) or not hasattr(model, "predict"):
            type_name = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
            checks.refuse(name, "hold estimators with `predict`, or callables, not both", type_name, error=TypeError)
        _check_fitted(model, name)
    tasks = {known for model in models if (known := _task_of(model)) is not None}
    if len(tasks) > 1:
        checks.refuse(name, "hold classifiers or regressors, not both", ", ".join(type(m).__name__ for m in models))
    known = next(iter(tasks), task)
    if task not in (None, known):
        checks.refuse("task", f"be {known!r} for these models", repr(task))
    if known != "classification":
        return ModelMembers(known, kind, lambda X: [_output(model, X, VALUES, None) for model in models])
    class_sets = [model.classes_ for model in models if getattr(model, "classes_", None) is not None]
    for labels in class_sets:
        _check_classes(labels, name, 1)
    classes = union(class_sets, name) if class_sets else None
    _check_classes(classes, name)
    read = _kind_of(models, kind, name)
    return ModelMembers(known, read, lambda X: [_output(model, X, read, classes) for model in models], classes)


def _kind_of(members: list[Any], kind: str | None, name: str, *, votes: bool = False) -> str:
    """What is read of classifiers: probabilities, unless a member has none or the ensemble counts labels."""
    without = [type(member).__name__ for member in members if not hasattr(member, "predict_proba")]
    if kind is None:
        return LABELS if votes or without else PROBABILITIES
    if kind not in (PROBABILITIES, LABELS):
        checks.refuse("kind", "be 'probabilities' or 'labels' for estimators", repr(kind))
    if kind == PROBABILITIES and without:
        fix = "Use kind='labels' to audit hard votes."
        checks.refuse(name, "have members with predict_proba for kind 'probabilities'", without[0], fix)
    return kind


def _output(member: Any, X: Any, kind: str, classes: Any, *, coded: bool = False) -> Any:
    """One member's values ``[N]`` or ``[N, C]``, labels ``[N]``, or probabilities with a column for each class."""
    if kind == VALUES:
        return _flat(member.predict(X))
    if kind == PROBABILITIES:
        probs, member_classes = np.asarray(member.predict_proba(X)), getattr(member, "classes_", None)
        if member_classes is None or classes is None:
            return probs
        member_classes = np.asarray(classes)[np.asarray(member_classes).astype(int)] if coded else member_classes
        return _padded(probs, member_classes, classes, "model")
    if not hasattr(member, "predict"):  # a calibrated classifier inside its ensemble
        return np.asarray(classes)[np.asarray(member.predict_proba(X)).argmax(-1)]
    labels = _flat(member.predict(X))
    return np.asarray(classes)[labels.astype(int)] if coded else labels


def _padded(probs: Any, member_classes: Any, classes: Any, name: str) -> Any:
    """Probabilities with a column for each of ``classes``: zero for those that a member was not trained on."""
    if np.array_equal(member_classes, classes):
        return probs
    padded = np.zeros((len(probs), len(classes)), dtype=probs.dtype)
    padded[:, ClassLabels(classes).columns(ClassLabels(member_classes).labels, name)] = probs
    return padded


def _flat(values: Any) -> Any:
    """A single column as a plain array."""
    array = np.asarray(values)
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _first(X: Any) -> Any:
    """The first example."""
    return X.iloc[:1] if hasattr(X, "iloc") else X.tocsr()[:1] if hasattr(X, "tocsr") else X[:1]


def _bare(X: Any) -> Any:
    """Inputs without names of columns, as ensembles hand them to their members."""
    if hasattr(X, "tocsr"):
        return X.tocsr()
    return X.to_numpy() if hasattr(X, "to_numpy") else np.asarray(X)


def _task_of(model: Any) -> str | None:
    """Task of an estimator by scikit-learn's tags."""
    tags = getattr(model, "__sklearn_tags__", None)
    type_name = tags().estimator_type if tags is not None else getattr(model, "_estimator_type", None)
    return _TASKS.get(str(type_name))


def _check_fitted(model: Any, name: str) -> None:
    if not hasattr(model, "fit") or "sklearn" not in sys.modules:
        return
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(model)
    except NotFittedError:
        fix = "Call fit(X_train, y_train) first."
        checks.refuse(name, "be fitted", f"a {type(model).__name__} that is not", fix)


def _check_classes(classes: Any, name: str, least: int = 2) -> None:
    """Refuse several outputs of classes, and too few classes."""
    if isinstance(classes, list):
        fix = "Give models with one output each, and audit every output by itself."
        checks.refuse(name, "have one output", f"{len(classes)} outputs of classes", fix)
    if classes is not None and len(classes) < least:
        checks.refuse(name, "know two classes or more", f"one that was fitted to {classes[0]} alone")


def _is_model(value: Any) -> bool:
    """Whether a value is a model or several models, rather than outputs."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_model(part) for part in value)
    return not hasattr(value, "to_numpy") and (hasattr(value, "predict") or callable(value))


def _network(model: nn.Module, task: str | None, kind: str | None) -> ModelMembers:
    """A network that returns all members' outputs ``[M, N, C]``; those of a dissensus Ensemble are logits."""
    predict = getattr(model, "predict", None)
    if callable(predict) and hasattr(model, "members"):
        kind = kind or (LOGITS if task in ("classification", "multilabel") else None)
        return ModelMembers(task, kind, lambda X: predict(_inputs(X, model)))
    return ModelMembers(task, kind, lambda X: _called(model, X, axis=1))


def _called(model: Callable[[Any], Any], X: Any, axis: int = 0) -> Any:
    """Outputs of a callable, on the host. A network runs in evaluation mode and in batches, joined along ``axis``."""
    if not isinstance(model, nn.Module):
        return _on_host(model(X))
    inputs = _tensor(X, model)
    modes = [(module, module.training) for module in model.modules()]
    weight = next(model.parameters(), inputs)
    try:
        model.eval()
        with torch.no_grad():
            outputs = [_on_host(model(batch.to(weight.device))) for batch in inputs.split(_BATCH)]
    finally:
        for module, training in modes:
            module.training = training
    return torch.cat(outputs, axis)


def _on_host(outputs: Any) -> Any:
    return outputs.detach().cpu() if isinstance(outputs, Tensor) else outputs


def _inputs(X: Any, model: nn.Module) -> Any:
    """Inputs as an ensemble predicts on them; a tuple holds several inputs, not inputs and targets."""
    if isinstance(X, torch.utils.data.Dataset | torch.utils.data.DataLoader | Mapping):
        return X
    several = isinstance(X, tuple | list) and bool(X) and all(isinstance(x, Tensor) or is_array(x) for x in X)
    return (tuple(X), None) if several else _tensor(X, model)


def _tensor(X: Any, model: nn.Module) -> Tensor:
    """Inputs as a tensor; floats in the precision of the network."""
    if hasattr(X, "tocsr"):
        checks.refuse("X", "be dense for a network", "a sparse matrix", "Use X.toarray().", TypeError)
    inputs = X if isinstance(X, Tensor) else torch.as_tensor(np.array(X.to_numpy() if hasattr(X, "to_numpy") else X))
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    return inputs.to(weight.dtype) if inputs.is_floating_point() and weight is not None else inputs


def own_prediction(members: ModelMembers, outputs: list[Any], X: Any, kind: str, pool: str) -> bool | str:
    """Whether pooled outputs are what the model predicts: True, or a sentence about the difference."""
    if kind == VALUES:
        pooled, predicted = np.mean(np.asarray(outputs), 0), _flat(members.predictor.predict(X))
        apart = np.abs(pooled - predicted)
        if float(apart.max()) <= _ROUNDING * float(np.abs(predicted).max()):
            return True
        return _differs(members, "mean", f"they differ by {np.sqrt(np.mean(apart**2)):.3g} (root mean square)")
    classes = np.asarray(members.classes)
    probs = np.asarray(outputs) if kind == PROBABILITIES else None
    if probs is not None and pool == "probability":
        pooled, words = probs.mean(0), "mean of probabilities"
    elif probs is not None and pool == "score":
        logs = np.log(np.maximum(probs, np.finfo(probs.dtype).tiny)).mean(0)
        pooled, words = np.exp(logs) / np.exp(logs).sum(-1, keepdims=True), "mean of log-probabilities"
    else:
        columns = probs.argmax(-1) if probs is not None else ClassLabels(classes).columns(np.asarray(outputs), "model")
        pooled, words = np.eye(len(classes))[columns].mean(0), "majority vote"
    share = float((classes[pooled.argmax(-1)] != members.predictor.predict(X)).mean())
    if kind == PROBABILITIES and pool != "vote" and hasattr(members.predictor, "predict_proba"):
        most = float(np.abs(pooled - members.predictor.predict_proba(X)).max())
        if most <= _ROUNDING:
            return True
        return _differs(members, words, f"{share:.1%} of labels differ, and probabilities by up to {most:.2g}")
    return True if share == 0 else _differs(members, words, f"{share:.1%} of labels differ")


def _differs(members: ModelMembers, pooled: str, how: str) -> str:
    return f"the model's own prediction {members.rule}; the audit takes their plain {pooled}: {how}."

"""Conversion of users' data to what an audit reads: votes, names, frames and lists become arrays and class indices.

Arrays, tensors and memory maps of numbers pass through unchanged, so that they are still read slice by slice.
"""

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dissensus import checks
from dissensus.auditing.streaming import Outputs

_LABELS_AT_ONCE = 2**22
"""Number of votes that are searched for labels at once."""
_MOST_NAMED = 5
"""Largest number of labels that a message lists."""


class AuditData(NamedTuple):
    """The data of an audit: outputs that can be sliced, and targets as class indices or values."""

    outputs: Outputs
    targets: Any
    train: tuple[Outputs, Any] | None
    reference: Outputs | None
    ood: Outputs | None


class ClassesThird:
    """Dense outputs with the classes at another axis, ``[M, N, *S]``, as ``[M, N, C, *S]``; read when they are sliced.

    Outputs of one member have no axis M, so that their classes become the second axis.
    """

    def __init__(self, outputs: Any, axis: int, to: int) -> None:
        self.outputs, self.axis, self.to = outputs, axis, to
        sizes = list(outputs.shape)
        sizes.insert(to, sizes.pop(axis))
        self.shape, self.ndim = tuple(sizes), len(sizes)

    def __getitem__(self, index: Any) -> Any:
        places = list(index) if isinstance(index, tuple) else [index]
        places += [slice(None)] * (self.ndim - len(places))
        places.insert(self.axis, places.pop(self.to))
        part = self.outputs[tuple(places)]
        return part.movedim(self.axis, self.to) if isinstance(part, Tensor) else np.moveaxis(part, self.axis, self.to)


def with_classes_third(outputs: Outputs, class_axis: int, name: str) -> Outputs:
    """Outputs ``[M, N, C, *S]`` from outputs with the classes at ``class_axis``; a list of members likewise."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return [_moved(part, class_axis if class_axis < 0 else class_axis - 1, 1, name) for part in outputs]
    return _moved(outputs, class_axis, 2, name)


def _moved(outputs: Any, class_axis: int, to: int, name: str) -> Any:
    shape = tuple(getattr(outputs, "shape", ()))
    axis = class_axis + len(shape) if class_axis < 0 else class_axis
    if not to <= axis < len(shape):
        given = class_axis if to == 2 or class_axis < 0 else class_axis + 1
        wanted = f"be an axis of `{name}` after members and examples"
        checks.refuse("class_axis", wanted, f"{given} for shape {checks.shape_text(shape)}")
    return outputs if axis == to else ClassesThird(outputs, axis, to)


def without_ignored(targets: Any, ignore_index: int, name: str = "targets") -> tuple[Any, Any]:
    """Targets with a label that occurs instead of ``ignore_index``, and which of them count, as flat booleans.

    >>> without_ignored([1, -100, 2], -100)
    (array([1, 1, 2]), array([ True, False,  True]))
    """
    labels = _labels(_narrow(targets), name)
    counted = np.asarray(labels != ignore_index)
    if counted.ndim == 0 or not bool(counted.any()):
        checks.refuse(name, "hold a label that is not ignored", f"{ignore_index} everywhere")
    return np.where(counted, labels, labels[counted][0]), counted.ravel()


class OneHot:
    """Votes ``[M, N]`` as probabilities ``[M, N, C]``, which are computed when they are sliced."""

    def __init__(self, votes: Any, classes: "ClassLabels", name: str) -> None:
        self.votes, self.classes, self.name = votes, classes, name
        self.shape = (*votes.shape, len(classes.labels))

    def __getitem__(self, index: Any) -> Any:
        columns = self.classes.columns(_labels(self.votes[index], self.name), self.name)
        return np.eye(len(self.classes.labels), dtype=np.float32)[columns]


class ClassLabels:
    """The labels of columns, in the columns' order."""

    def __init__(self, labels: Any) -> None:
        self.labels = _labels(labels, "classes")
        if self.labels.ndim != 1 or not len(self.labels):
            checks.refuse("classes", "be a list of labels", checks.shape_text(self.labels.shape))
        if len(_unique(self.labels, "classes")) < len(self.labels):
            checks.refuse("classes", "differ from each other", _listed(self.labels))
        self.order = np.argsort(self.labels)

    def columns(self, labels: Any, name: str) -> Any:
        """The column of every label."""
        labels = _typed(labels) if labels.dtype == object else labels
        if _is_text(labels) != _is_text(self.labels):
            unknown, place = np.ones(labels.shape, bool), np.zeros(labels.shape, int)
        else:
            ordered = self.labels[self.order]
            place = np.minimum(np.searchsorted(ordered, labels), len(ordered) - 1)
            unknown = ordered[place] != labels
        if bool(unknown.any()):
            got = _listed(_unique(labels[unknown], name))
            checks.refuse(name, f"be among the classes {_listed(self.labels)}", got, "Name every class with `classes`.")
        return self.order[place]

    def columns_of(self, targets: Any) -> Any:
        """The column of every target. Whole numbers are columns already where classes have names."""
        labels = _labels(_narrow(targets), "targets")
        return labels if _is_text(self.labels) and not _is_text(labels) else self.columns(labels, "targets")


def prepare(
    outputs: Outputs,
    targets: Any,
    train: tuple[Outputs, Any] | None,
    reference: Outputs | None,
    ood: Outputs | None,
    *,
    task: str,
    kind: str | None,
    classes: Any,
) -> AuditData:
    """All data as arrays that can be sliced, and targets as class indices or values.

    Args:
        outputs: See `dissensus.audit`.
        targets: See `dissensus.audit`.
        train: See `dissensus.audit`.
        reference: See `dissensus.audit`.
        ood: See `dissensus.audit`.
        task: ``"classification"``, ``"multilabel"`` or ``"regression"``.
        kind: ``"logits"``, ``"probabilities"``, ``"labels"``, or None for regression.
        classes: The label of every column.
    """
    if train is not None and (not isinstance(train, tuple | list) or len(train) != 2):
        checks.refuse("train", "be a pair (outputs, targets)", type(train).__name__, error=TypeError)
    for name, part in (("outputs", outputs), ("targets", targets)):
        if part is None or isinstance(part, str):
            got = "None" if part is None else repr(part)
            checks.refuse(name, "be an array, a frame or a list", got, error=TypeError)
    data = AuditData(outputs, targets, None if train is None else (train[0], train[1]), reference, ood)
    if task != "classification":
        if classes is not None:
            checks.refuse("classes", f"be left out for {task}", repr(classes))
        return _values(data)
    return _votes(data, classes) if kind == "labels" else _scores(data, classes)


def union(parts: list[Any], name: str) -> Any:
    """All labels that occur in any of several sets, sorted.

    >>> union([["b", "a"], ["c", "a"]], "targets").tolist()
    ['a', 'b', 'c']
    """
    return _unique(np.concatenate(_one_type([_unique(_labels(part, name), name) for part in parts])), name)


def _values(data: AuditData) -> AuditData:
    """Outputs and targets of a regression. A single frame has one column per member."""
    columns = _columns(data.targets) or _first_columns(data.outputs)

    def read(outputs: Outputs, name: str, targets: Any) -> Outputs:
        if _is_frame(outputs) and (targets.ndim == 1 or targets.shape[1:] == (1,)):
            return _numbers(outputs, name).T
        return _members(outputs, name, columns)

    targets = _numbers(data.targets, "targets")
    train = None
    if data.train is not None:
        train_targets = _numbers(data.train[1], "targets")
        train = read(data.train[0], "train", train_targets), train_targets
    reference = None if data.reference is None else read(data.reference, "reference", targets)
    ood = None if data.ood is None else read(data.ood, "ood", targets)
    return AuditData(read(data.outputs, "outputs", targets), targets, train, reference, ood)


def _scores(data: AuditData, names: Any) -> AuditData:
    """Logits or probabilities with a column for each class, and targets as columns."""
    classes = ClassLabels(names) if names is not None else _read_classes(data)
    columns = _first_columns(data.outputs) if classes is None else classes.labels.tolist()

    def read(outputs: Outputs, name: str) -> Outputs:
        members = _members(outputs, name, columns)
        parts = members if isinstance(members, list) else [members]
        if any(getattr(getattr(part, "dtype", None), "kind", "") in tuple("OUS") for part in parts):
            checks.refuse(name, "be numbers", "names", "Hard votes? Use kind='labels' (--kind labels).", TypeError)
        width = _width(members)
        if classes is not None and width not in (None, len(classes.labels)):
            wanted = f"have {len(classes.labels)} columns, one for each class: {_listed(classes.labels)}"
            checks.refuse(name, wanted, f"{width} columns")
        return members

    def indices(targets: Any) -> Any:
        return _numbers(_narrow(targets), "targets") if classes is None else classes.columns_of(targets)

    return AuditData(
        read(data.outputs, "outputs"),
        indices(data.targets),
        None if data.train is None else (read(data.train[0], "train"), indices(data.train[1])),
        None if data.reference is None else read(data.reference, "reference"),
        None if data.ood is None else read(data.ood, "ood"),
    )


def _read_classes(data: AuditData) -> ClassLabels | None:
    """The label of each column: as frames name their columns, or in sorted order; None where targets are columns."""
    targets = [_numbers(_narrow(part), "targets") for part in _all_targets(data)]
    columns = _first_columns(data.outputs)
    numeric = all(isinstance(part, Tensor) or part.dtype.kind in "fiub" for part in targets)
    if numeric and columns is None:
        return None
    labels = union(targets, "targets")
    if columns is not None and set(labels.tolist()) <= set(columns):
        return ClassLabels(columns)
    if numeric:
        return None
    width = _width(_members(data.outputs, "outputs", columns))
    if width is not None and len(labels) != width:
        fix = "Name the label of every column: classes=estimator.classes_ (--classes a,b,c)."
        wanted = f"hold {width} different labels, one for each column of `outputs`"
        checks.refuse("targets", wanted, f"{len(labels)}: {_listed(labels)}", fix)
    return ClassLabels(labels)


def _votes(data: AuditData, names: Any) -> AuditData:
    """Hard votes as one-hot probabilities."""
    sets = {
        "outputs": data.outputs,
        "reference": data.reference,
        "ood": data.ood,
        "train": None if data.train is None else data.train[0],
    }
    votes = {name: _vote_array(part, name) for name, part in sets.items() if part is not None}
    targets = [_labels(_narrow(part), "targets") for part in _all_targets(data)]
    if names is None:
        classes = ClassLabels(
            union([*targets, *(piece for part in votes.values() for piece in _pieces(part))], "outputs")
        )
    else:
        classes = ClassLabels(names)
    if len(classes.labels) < 2:
        checks.refuse("targets", "hold two classes or more", _listed(classes.labels), "Name them with `classes`.")
    read = {name: OneHot(part, classes, name) for name, part in votes.items()}
    indices = [classes.columns_of(part) for part in targets]
    train = None if data.train is None else (read["train"], indices[1])
    return AuditData(read["outputs"], indices[0], train, read.get("reference"), read.get("ood"))


def _vote_array(outputs: Any, name: str) -> Any:
    """Votes ``[M, N]`` as an array that can be sliced. A frame has one column per member, so it is transposed."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if _is_frame(outputs):
        votes = _labels(outputs, name).T
    elif isinstance(outputs, list | tuple):
        rows = [_labels(row, name) for row in outputs if not isinstance(row, str)]
        if len({row.shape for row in rows}) > 1:
            shapes = ", ".join(sorted({checks.shape_text(row.shape) for row in rows}))
            checks.refuse(name, "hold a vote of every member for every example", f"members of shapes {shapes}")
        votes = np.stack(_one_type(rows)) if rows else np.empty(0)
    else:
        votes = outputs.detach().cpu().numpy() if isinstance(outputs, Tensor) else outputs
    if not hasattr(votes, "shape"):
        checks.refuse(name, "be votes [M, N], or a list of M lists of labels", type(votes).__name__, error=TypeError)
    shape = tuple(votes.shape)
    if len(shape) != 2 or 0 in shape:
        fix = "Probabilities? Use kind='probabilities'." if len(shape) == 3 else "One member? Give [votes]."
        checks.refuse(name, "be votes [M, N], or a list of M lists of labels", checks.shape_text(shape), fix)
    return votes


def _pieces(votes: Any) -> Any:
    """Slices of votes."""
    size = max(1, _LABELS_AT_ONCE // votes.shape[0])
    return (votes[:, start : start + size] for start in range(0, votes.shape[1], size))


def _members(outputs: Outputs, name: str, columns: Sequence[Any] | None) -> Outputs:
    """Outputs as one array ``[M, N, C]`` or a list of M. Frames and lists become arrays; arrays are unchanged."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if _is_frame(outputs):
        fix = "One member? Give [frame]. Several? Give a list of frames [N, C]."
        checks.refuse(name, "be a list of frames [N, C], one per member", "one frame", fix, TypeError)
    if not isinstance(outputs, list | tuple):
        return outputs
    return [_numbers(_by_name(part, columns, name), name) for part in outputs]


def _by_name(part: Any, columns: Sequence[Any] | None, name: str) -> Any:
    """A frame's columns in the order of ``columns`` if it has the same names, and by position if it has others."""
    names = _columns(part)
    if columns is None or names is None or names == list(columns):
        return part
    if set(names) == set(columns):
        return part[list(columns)]
    counted = names == list(range(len(names)))
    if set(names) & set(columns) and not counted and len(names) == len(columns):
        checks.refuse(name, f"have the columns {_listed(columns)}", _listed(names), "Rename them, or give arrays.")
    return part


def _numbers(part: Any, name: str) -> Any:
    """Frames, series and lists as arrays; arrays and tensors as they are."""
    checks.unmasked(part, name)
    if hasattr(part, "to_numpy"):
        part = part.to_numpy()
    elif not hasattr(part, "shape"):
        try:
            part = np.array(part)
        except ValueError:
            checks.refuse(name, "have rows of one length", "a list with rows of several lengths")
    return _typed(part) if isinstance(part, np.ndarray) and part.dtype == object else part


def _labels(part: Any, name: str) -> Any:
    """Labels as an array: whole numbers, booleans or strings. Floats without fractions become whole numbers."""
    checks.unmasked(part, name)
    if isinstance(part, Tensor):
        part = part.detach().cpu().numpy()
    elif hasattr(part, "to_numpy"):
        part = part.to_numpy()
    elif not isinstance(part, np.ndarray):
        words = not hasattr(part, "shape") and any(isinstance(entry, str) for entry in part)
        part = np.array(part, dtype=object if words else None)  # numbers beside strings stay numbers
    if part.dtype == object:
        part = _typed(part)
    if part.dtype.kind == "f":
        if not bool((part == np.round(part)).all()):
            got = "numbers with fractions" if bool(np.isfinite(part).all()) else "NaN or infinity"
            fix = "" if name in ("targets", "classes") else "Probabilities? Use kind='probabilities'."
            checks.refuse(name, "be labels: whole numbers or names", got, fix)
        part = part.astype(np.int64)
    return part


def _typed(part: Any) -> Any:
    """Objects as numbers or strings, where all of them are."""
    entries = part.ravel().tolist()
    if all(isinstance(entry, str) for entry in entries):
        return part.astype(str) if entries else part
    if all(isinstance(entry, bool | np.bool_) for entry in entries):
        return part.astype(bool)
    if all(isinstance(entry, numbers.Integral) for entry in entries):
        return part.astype(np.int64)
    if all(isinstance(entry, numbers.Real) for entry in entries):
        return part.astype(np.float64)
    return part


def _unique(labels: Any, name: str) -> Any:
    """Every label once, sorted."""
    try:
        return np.unique(labels)
    except TypeError:
        kinds = sorted({type(entry).__name__ for entry in np.ravel(labels).tolist()})
        return checks.refuse(name, "hold labels of one type", ", ".join(kinds), "Are some missing?", TypeError)


def _one_type(parts: list[Any]) -> list[Any]:
    """Arrays that numpy can join without turning numbers into strings."""
    mixed = len({_is_text(part) for part in parts}) > 1
    return [part.astype(object) for part in parts] if mixed else parts


def _is_text(labels: Any) -> bool:
    return labels.dtype.kind in "US"


def _all_targets(data: AuditData) -> list[Any]:
    return [data.targets, *([] if data.train is None else [data.train[1]])]


def _is_frame(part: Any) -> bool:
    return hasattr(part, "to_numpy") and hasattr(part, "columns")


def _columns(part: Any) -> list[Any] | None:
    return list(part.columns) if _is_frame(part) else None


def _first_columns(outputs: Any) -> list[Any] | None:
    """The names of columns, where members are frames."""
    parts = list(outputs.values()) if isinstance(outputs, dict) else outputs
    frames = [part for part in parts if _is_frame(part)] if isinstance(parts, list | tuple) else []
    return _columns(frames[0]) if frames else None


def _narrow(targets: Any) -> Any:
    """A frame of one column as that column."""
    return targets.to_numpy()[:, 0] if _is_frame(targets) and targets.shape[1] == 1 else targets


def _width(outputs: Outputs) -> int | None:
    """Number of columns of outputs; None where the number of axes is wrong."""
    stacked = not isinstance(outputs, list)
    part = outputs if stacked else next(iter(outputs), None)
    shape = [int(size) for size in getattr(part, "shape", ())]
    return shape[-1] if len(shape) == (3 if stacked else 2) else None


def _listed(labels: Any) -> str:
    """The first few labels, for a message."""
    entries = [getattr(entry, "tolist", lambda entry=entry: entry)() for entry in list(labels)]
    more = f" and {len(entries) - _MOST_NAMED} more" if len(entries) > _MOST_NAMED else ""
    return ", ".join(map(repr, entries[:_MOST_NAMED])) + more

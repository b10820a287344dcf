"""Tables as numbers: columns of arrays and pandas frames become standardised features of a network.

The result of fitting is plain data (numbers and texts), so that it is stored as JSON and loaded without pickle.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from dissensus import checks

MOST_CATEGORIES = 256
"""Categories of one column that get a feature each. More are refused: such a column is an identifier or a text."""


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers, as (x − mean) / scale. A constant column becomes 0."""

    mean: float
    scale: float
    missing: float | None = None
    """What stands for a missing value, where values are imputed: the median of the column."""
    marked: bool = False
    """Whether a second feature says that a value is missing."""

    @property
    def width(self) -> int:
        """Number of features."""
        return 1 + self.marked

    def features(self, name: object, values: np.ndarray) -> np.ndarray:
        """The features ``[N, width]`` of a column ``[N]``."""
        values = _numbers(name, values)
        absent = np.isnan(values)
        if absent.any():
            if self.missing is None:
                _refuse_missing(name)
            values = np.where(absent, self.missing, values)
        result = (values - self.mean) / self.scale
        return np.column_stack([result, absent]) if self.marked else result[:, None]


@dataclass(frozen=True)
class CategoricalColumn:
    """A column of categories, one feature each.

    A category that training did not have has zeros in all features, as a missing value has where they are imputed.
    """

    categories: list[str | float | bool]
    imputed: bool = False

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.categories)

    def features(self, name: object, values: np.ndarray) -> np.ndarray:
        """The features ``[N, width]`` of a column ``[N]``."""
        keys = [_key(value) for value in values]
        if None in keys and not self.imputed:
            _refuse_missing(name)
        self._check_kinds(name, keys)
        place: dict[object, int] = {category: number for number, category in enumerate(self.categories)}
        codes = np.fromiter((place.get(key, -1) for key in keys), dtype=int, count=len(values))
        result = np.zeros((len(values), len(self.categories)))
        known = codes >= 0
        result[known.nonzero()[0], codes[known]] = 1.0
        return result

    def _check_kinds(self, name: object, keys: list[str | float | bool | None]) -> None:
        """Refuse texts where training had none, and the reverse: "True" would pass for a category that is new."""
        texts = [isinstance(category, str) for category in self.categories]
        if not texts or (any(texts) and not all(texts)):
            return
        other = next((key for key in keys if key is not None and isinstance(key, str) != texts[0]), None)
        if other is None:
            return
        wanted, fix = "texts", f"Convert it first: X[{name!r}] = X[{name!r}].astype(str), if its texts are numbers."
        if not texts[0]:
            known = ", ".join(map(repr, self.categories[:4]))
            wanted, fix = f"numbers or truth values ({known})", "Convert its texts first."
        checks.refuse(f"column {name!r}", f"hold {wanted}, as in training", repr(other), fix, TypeError)


Column = NumericColumn | CategoricalColumn


@dataclass(frozen=True)
class Columns:
    """What a table's columns are turned into, learnt from training data."""

    columns: list[Column]
    names: list[str] | None = None
    """Names of the columns of a frame; None for an array."""

    @classmethod
    def fit(
        cls,
        X: Any,
        *,
        impute: bool = False,
        scale: bool = True,
        weights: np.ndarray | None = None,
        like: "Columns | None" = None,
    ) -> "Columns":
        """Learn means, scales and categories.

        ``like`` gives the features: its categories and marks of missing values. Means and scales are those of X.
        """
        if is_frame(X):
            columns: list[Column] = [
                _categories(name, values, impute)
                if categorical
                else _scaling(name, values[:, None], impute, scale, weights)[0]
                for name, values, categorical in _frame_columns(X)
            ]
        else:
            columns = list(_scaling(None, X, impute, scale, weights))
        if like is not None:
            columns = [
                replace(column, marked=other.marked)
                if isinstance(column, NumericColumn) and isinstance(other, NumericColumn)
                else other
                for column, other in zip(columns, like.columns, strict=True)
            ]
        return cls(columns, [str(name) for name in X.columns] if is_frame(X) else None)

    def features(self, X: Any) -> np.ndarray:
        """The features ``[N, F]`` of a table with these columns, as float32."""
        numeric = [column for column in self.columns if isinstance(column, NumericColumn) and not column.marked]
        if not is_frame(X) and len(numeric) == len(self.columns):
            result = self._all_at_once(_numbers(None, X), numeric)
        else:
            values = _frame_columns(X) if is_frame(X) else [(None, column, False) for column in np.asarray(X).T]
            parts = [c.features(name, column) for c, (name, column, _) in zip(self.columns, values, strict=True)]
            result = np.concatenate(parts, 1)
        return np.ascontiguousarray(result, dtype=np.float32)

    def _all_at_once(self, X: np.ndarray, columns: list[NumericColumn]) -> np.ndarray:
        absent = np.isnan(X)
        if absent.any():
            missing = [column.missing for column in columns if column.missing is not None]
            if len(missing) < len(columns):
                _refuse_missing(None)
            X = np.where(absent, np.array(missing), X)
        return (X - np.array([c.mean for c in columns])) / np.array([c.scale for c in columns])

    @property
    def width(self) -> int:
        """Number of features."""
        return sum(column.width for column in self.columns)

    def record(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"columns": [vars(column) for column in self.columns], "names": self.names}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Columns":
        """What `record` returned."""
        columns: list[Column] = [
            CategoricalColumn(**column) if "categories" in column else NumericColumn(**column)
            for column in record["columns"]
        ]
        return cls(columns, record["names"])


def is_frame(X: Any) -> bool:
    """Whether X is a pandas frame."""
    return hasattr(X, "columns") and hasattr(X, "iloc")


def has_categories(X: Any) -> bool:
    """Whether X is a frame with a column that holds no numbers."""
    return is_frame(X) and any(_is_categorical(dtype) for dtype in X.dtypes)


def _is_categorical(dtype: Any) -> bool:
    """Texts, categories, truth values and other objects; numbers and nullable numbers are not."""
    return getattr(dtype, "kind", "O") not in "iufc"


def _frame_columns(X: Any) -> Iterable[tuple[object, np.ndarray, bool]]:
    """Name, values and whether they are categories, for every column of a frame."""
    for place, name in enumerate(X.columns):
        series = X.iloc[:, place]
        if getattr(series.dtype, "kind", "O") in "mM":
            fix = "Make numbers of it, such as its year, its hour or the days since a date."
            checks.refuse(f"column {name!r}", "hold numbers or categories", f"times ({series.dtype})", fix, TypeError)
        if _is_categorical(series.dtype):
            yield name, np.asarray(series.astype(object)), True
        else:
            yield name, np.asarray(series.to_numpy(dtype=float, na_value=np.nan)), False


def _scaling(
    name: object, X: np.ndarray, impute: bool, scale: bool, weights: np.ndarray | None
) -> tuple[NumericColumn, ...]:
    """How the columns of an array ``[N, F]`` are scaled."""
    X = _numbers(name, X)
    present = ~np.isnan(X)
    if not present.all() and not impute:
        _refuse_missing(name)
    counted = present if weights is None else present * weights[:, None]
    total = np.maximum(counted.sum(0), np.finfo(float).tiny)
    filled = np.where(present, X, 0.0)
    largest = np.maximum(np.abs(filled).max(0, initial=0.0), np.finfo(float).tiny)  # squares of 1e200 overflow
    mean, spread = np.zeros(X.shape[1]), np.ones(X.shape[1])
    if scale:
        mean = (counted / total * filled).sum(0)
        apart = np.where(present, filled / largest - mean / largest, 0.0)
        spread = largest * np.sqrt((counted * apart**2).sum(0) / total)
        # A column that is constant up to rounding has no scale of its own.
        spread = np.where(spread <= 10 * np.finfo(float).eps * np.abs(mean), 1.0, spread)
        spread = np.where(spread == 0, 1.0, spread)
    return tuple(
        NumericColumn(
            float(mean[place]),
            float(spread[place]),
            _median(X[present[:, place], place]) if impute else None,
            not bool(present[:, place].all()),
        )
        for place in range(X.shape[1])
    )


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _categories(name: object, values: np.ndarray, impute: bool) -> CategoricalColumn:
    keys = {_key(value) for value in values}
    if None in keys and not impute:
        _refuse_missing(name)
    categories = sorted((key for key in keys if key is not None), key=lambda key: (type(key).__name__, key))
    if len(categories) > MOST_CATEGORIES:
        fix = "Is it an identifier or a text? Drop it, or encode it before. Numbers? Convert them with astype(float)."
        checks.refuse(f"column {name!r}", f"have at most {MOST_CATEGORIES} categories", len(categories), fix)
    return CategoricalColumn(categories, impute)


def _key(value: Any) -> str | float | bool | None:
    """A category as JSON holds it: a text, a number or a truth value; None where it is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | float | np.number):
        return float(value)
    return str(value)


def _numbers(name: object, values: np.ndarray) -> np.ndarray:
    try:
        values = np.asarray(values, dtype=float)
    except (TypeError, ValueError) as reason:
        raise ValueError(f"{_label(name)} must hold numbers, as in training: {reason}.") from reason
    if np.isinf(values).any():
        raise ValueError(f"Input {_label(name)} contains infinity. Replace it by a number, or by NaN with impute=True.")
    return values


def _refuse_missing(name: object) -> NoReturn:
    raise ValueError(
        f"Input {_label(name)} contains NaN: values are missing. Pass impute=True (the median, and a feature that "
        "marks missing values), or impute them before."
    )


def _label(name: object) -> str:
    return "X" if name is None else f"column {name!r}"


def target_scaling(y: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every target ``[N, D]``; 1 for a constant one."""
    columns = _scaling("y", y, False, True, weights)
    return np.array([column.mean for column in columns]), np.array([column.scale for column in columns])

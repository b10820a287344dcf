"""Tables as numbers: columns of arrays and pandas frames become standardised features of a network.

The result of fitting is plain data (numbers and lists of texts), so that it is stored as JSON and loaded without pickle.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

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
    """A column of categories, one feature each. A category that was not seen in training has zeros in all of them."""

    categories: list[str | float | bool]

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.categories)

    def features(self, name: object, values: np.ndarray) -> np.ndarray:
        """The features ``[N, width]`` of a column ``[N]``."""
        del name
        keys = [_key(value) for value in values]
        place = {category: number for number, category in enumerate(self.categories)}
        result = np.zeros((len(keys), len(self.categories)))
        for row, key in enumerate(keys):
            if key in place:
                result[row, place[key]] = 1.0
        return result


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
        """Learn means, scales and categories. Rows of weight zero do not count in means and scales.

        ``like`` gives the features: its categories and marks of missing values. Means and scales are those of X.
        """
        rows = slice(None) if weights is None else weights > 0
        counted = None if weights is None else weights[weights > 0]
        columns = [
            _categories(name, values, impute) if categorical else _scaling(name, values[rows], impute, scale, counted)
            for name, values, categorical in _columns_of(X)
        ]
        if like is not None:
            columns = [
                replace(column, marked=other.marked) if isinstance(other, NumericColumn) else other
                for column, other in zip(columns, like.columns, strict=True)
            ]
        return cls(columns, [str(name) for name in X.columns] if is_frame(X) else None)

    def features(self, X: Any) -> np.ndarray:
        """The features ``[N, F]`` of a table with these columns, as float32."""
        parts = [
            column.features(name, values)
            for column, (name, values, _) in zip(self.columns, _columns_of(X), strict=True)
        ]
        return np.ascontiguousarray(np.concatenate(parts, 1), dtype=np.float32)

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


def _columns_of(X: Any) -> list[tuple[object, np.ndarray, bool]]:
    """Name, values and whether they are categories, for every column."""
    if not is_frame(X):
        return [(place, X[:, place], False) for place in range(X.shape[1])]
    columns = []
    for place, name in enumerate(X.columns):
        series = X.iloc[:, place]
        if _is_categorical(series.dtype):
            columns.append((name, np.asarray(series.astype(object)), True))
        else:
            columns.append((name, np.asarray(series.to_numpy(dtype=float, na_value=np.nan)), False))
    return columns


def _scaling(name: object, values: np.ndarray, impute: bool, scale: bool, weights: np.ndarray | None) -> NumericColumn:
    values = _numbers(name, values)
    present = ~np.isnan(values)
    if not present.all() and not impute:
        _refuse_missing(name)
    kept = values[present]
    share = None if weights is None else weights[present]
    mean = float(np.average(kept, weights=share)) if scale and len(kept) else 0.0
    spread = math.sqrt(float(np.average((kept - mean) ** 2, weights=share))) if scale and len(kept) else 1.0
    # A column that is constant up to rounding has no scale of its own.
    constant = spread <= 10 * np.finfo(float).eps * max(abs(mean), np.finfo(float).tiny)
    median = float(np.median(kept)) if len(kept) else 0.0
    return NumericColumn(mean, 1.0 if constant else spread, median if impute else None, not present.all())


def _categories(name: object, values: np.ndarray, impute: bool) -> CategoricalColumn:
    keys = [_key(value) for value in values]
    if None in keys and not impute:
        _refuse_missing(name)
    categories = sorted({key for key in keys if key is not None}, key=lambda key: (type(key).__name__, key))
    if len(categories) > MOST_CATEGORIES:
        fix = "Is it an identifier or a text? Drop it, or encode it before."
        checks.refuse(f"column {name!r}", f"have at most {MOST_CATEGORIES} categories", len(categories), fix)
    return CategoricalColumn(categories)


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
    values = np.asarray(values, dtype=float)
    if np.isinf(values).any():
        label = f"column {name!r}" if isinstance(name, str) else "X"
        raise ValueError(f"Input {label} contains infinity. Replace it by a number, or by NaN with impute=True.")
    return values


def _refuse_missing(name: object) -> None:
    label = f"column {name!r}" if isinstance(name, str) else "X"
    raise ValueError(
        f"Input {label} contains NaN: values are missing. Pass impute=True (the median, and a feature that marks missing "
        "values), or impute them before."
    )


def target_scaling(y: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every target ``[N, D]``; 1 for a constant one."""
    mean = np.average(y, axis=0, weights=weights)
    spread = np.sqrt(np.average((y - mean) ** 2, axis=0, weights=weights))
    return mean, np.where(spread <= 10 * np.finfo(float).eps * np.abs(mean), 1.0, spread)

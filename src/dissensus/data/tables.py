"""The collusion paper's preprocessing of its UCI tables (appendix B), for any table.

"Standardization of the features and targets, one hot encoding of categorical features, and log transformation of skewed
features." The paper leaves the details open; they are decided by each table's `TableSchema` and by `TableScaler`. Only
`TableScaler` learns from values, and it is fitted on training rows alone.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from dissensus import checks

log = logging.getLogger("dissensus")

SKEW = 1.0
"""Skewness above which a feature without negative values is transformed by log(1 + x)."""


@dataclass(frozen=True)
class TableSchema:
    """Roles of the columns of a table; columns that are not named are numeric features.

    Attributes:
        targets: Columns to be predicted, in this order.
        categories: Features without an order, one-hot encoded. Their levels are those of the whole table.
        dropped: Columns that are neither features nor targets.
        leaks: Columns that nearly determine the target. They are features only on request.
        infer_categories: Treat every feature with an entry that is not a number as a category.
        classification: Whether the target is a class. Classes are numbered 0, 1, ... in the order of their names.
    """

    targets: tuple[str, ...]
    categories: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    infer_categories: bool = False
    classification: bool = False


class Table(NamedTuple):
    """Features and targets of a table in float64, not yet scaled; classes are int64."""

    x: Float[Tensor, "N F"]
    y: Float[Tensor, "N T"] | Int64[Tensor, " N"]
    features: tuple[str, ...]
    targets: tuple[str, ...]


def table(
    schema: TableSchema, columns: Mapping[str, Sequence[str]], *, leaky: bool = False, name: str = "columns"
) -> Table:
    """Features and targets from the columns of a file (`dissensus.data.formats.csv_columns`).

    Rows with a missing value in any column are dropped, whether the column is used or not, so that the table has the
    same rows with and without leaks. This drops 162 rows of ``weather`` and 5 of ``facebook``.

    Args:
        schema: Roles of the columns.
        columns: Text by column.
        leaky: Keep the columns that nearly determine the target. The paper's Facebook results suggest that its authors
            kept ``comment``, ``like`` and ``share``, whose sum is the target.
        name: Name of the table in messages.

    >>> columns = {"sex": ["M", "F", "M", ""], "length": ["1", "2.5", "3", "4"], "rings": ["15", "7", "9", "10"]}
    >>> abalone = table(TableSchema(targets=("rings",), categories=("sex",)), columns)
    >>> abalone.features, abalone.x.tolist(), abalone.y.flatten().tolist()
    (('sex=F', 'sex=M', 'length'), [[0.0, 1.0, 1.0], [1.0, 0.0, 2.5], [0.0, 1.0, 3.0]], [15.0, 7.0, 9.0])
    """
    missing = [column for column in (*schema.targets, *schema.categories) if column not in columns]
    if missing:
        checks.refuse(name, f"have the columns {', '.join(map(repr, missing))}", list(columns))
    complete = [i for i, row in enumerate(zip(*columns.values(), strict=True)) if not any(map(is_missing, row))]
    rows = len(next(iter(columns.values())))
    if len(complete) < rows:
        log.info("%s: %d of %d rows lack a value and are dropped", name, rows - len(complete), rows)
    unused = {*schema.targets, *schema.dropped, *(() if leaky else schema.leaks)}
    features: dict[str, list[float]] = {}
    for column in [column for column in columns if column not in unused]:
        texts = [columns[column][i] for i in complete]
        category = column in schema.categories or (
            schema.infer_categories and not all(map(checks.is_number_text, texts))
        )
        features.update(_one_hot(column, texts) if category else {column: _numbers(column, texts)})
    x = torch.tensor(list(features.values()), dtype=torch.float64).T.contiguous()
    target_texts = [[columns[column][i] for i in complete] for column in schema.targets]
    if schema.classification:
        levels = _one_hot(schema.targets[0], target_texts[0])
        return Table(x, torch.tensor(list(levels.values())).argmax(0), tuple(features), schema.targets)
    targets = [_numbers(column, texts) for column, texts in zip(schema.targets, target_texts, strict=True)]
    return Table(x, torch.tensor(targets, dtype=torch.float64).T.contiguous(), tuple(features), schema.targets)


@dataclass(frozen=True, eq=False)
class TableScaler:
    """Standardisation that is fitted on training rows.

    A feature without negative values and with a skewness above `SKEW` is transformed by log(1 + x), which continues as
    sign(x)·log(1 + |x|) for negative values of other rows. Then every feature and target gets mean 0 and standard
    deviation 1 (of the population, divided by N); a constant one becomes 0. One-hot columns are scaled like the others.

    >>> x = torch.tensor([[0.0, 1.0], [1.0, 2.0], [0.0, 3.0], [30.0, 4.0]])
    >>> scaler = TableScaler.fit(x, x[:, 1:])
    >>> scaler.logged
    tensor([ True, False])
    >>> scaler.transform(x, x[:, 1:])[1].flatten()
    tensor([-1.3416, -0.4472,  0.4472,  1.3416])
    """

    logged: Bool[Tensor, " F"]
    mean: Float[Tensor, " F"]
    std: Float[Tensor, " F"]
    target_mean: Float[Tensor, " T"]
    target_std: Float[Tensor, " T"]

    @classmethod
    def fit(cls, x: Float[Tensor, "N F"], y: Float[Tensor, "N T"], *, skew: float = SKEW) -> "TableScaler":
        """Learn means, deviations and logarithms from training rows."""
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or len(x) == 0:
            got = f"{checks.shape_text(x.shape)} and {checks.shape_text(y.shape)}"
            checks.refuse("x, y", "have shapes [N, F] and [N, T]", got, "One target? Use y.unsqueeze(-1).")
        logged = (x >= 0).all(0) & (_skewness(x) > skew)
        values = _log(x, logged)
        return cls(logged, values.mean(0), _deviation(values), y.mean(0), _deviation(y))

    def transform(
        self, x: Float[Tensor, "N F"], y: Float[Tensor, "N T"]
    ) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N T"]]:
        """Scaled features and targets, of training rows or any others."""
        if x.shape[1:] != self.mean.shape or y.shape[1:] != self.target_mean.shape:
            what = f"have {len(self.mean)} features and {len(self.target_mean)} targets, as the training rows had"
            checks.refuse("x, y", what, f"{checks.shape_text(x.shape)} and {checks.shape_text(y.shape)}")
        return (_log(x, self.logged) - self.mean) / self.std, (y - self.target_mean) / self.target_std

    def inverse_transform(self, y: Float[Tensor, "... T"]) -> Float[Tensor, "... T"]:
        """Targets or predictions in the units of the table."""
        return y * self.target_std + self.target_mean


def scaled(
    x: Float[Tensor, "N F"], y: Float[Tensor, "N T"], train: Int[Tensor, " n"], *others: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Rows of a table as float32 pairs ``(x, y)``, scaled by a `TableScaler` that is fitted on the rows ``train``.

    >>> train, test = scaled(torch.eye(4), torch.arange(4.0).unsqueeze(1), torch.tensor([0, 1, 2]), torch.tensor([3]))
    >>> test
    (tensor([[-0.7071, -0.7071, -0.7071,  1.0000]]), tensor([[2.4495]]))
    """
    scaler = TableScaler.fit(x[train], y[train])
    pairs = [scaler.transform(x[rows], y[rows]) for rows in (train, *others)]
    return [(x_part.float(), y_part.float()) for x_part, y_part in pairs]


def is_missing(text: str) -> bool:
    """Whether a text stands for a missing value: empty, "NA", "NaN" or "?"."""
    return text.strip().lower() in ("", "na", "nan", "?")


def _numbers(column: str, texts: Sequence[str]) -> list[float]:
    try:
        values = [float(text) for text in texts]
    except ValueError:
        odd = next(text for text in texts if not checks.is_number_text(text))
        checks.refuse(column, "be a column of numbers", repr(odd), "A category? Name it in the schema's `categories`.")
    if not all(map(math.isfinite, values)):
        checks.refuse(column, "be finite", "infinity")
    return values


def _one_hot(column: str, texts: Sequence[str]) -> dict[str, list[float]]:
    """One column of zeros and ones per level: numbers in increasing order, then words in alphabetical order."""
    spelled = [f"{float(text):g}" if checks.is_number_text(text) else text for text in texts]
    levels = sorted(
        set(spelled), key=lambda level: (0, float(level), "") if checks.is_number_text(level) else (1, 0.0, level)
    )
    return {f"{column}={level}": [float(text == level) for text in spelled] for level in levels}


def _log(x: Float[Tensor, "N F"], logged: Bool[Tensor, " F"]) -> Float[Tensor, "N F"]:
    return torch.where(logged, x.sign() * x.abs().log1p(), x)


def _deviation(values: Float[Tensor, "N F"]) -> Float[Tensor, " F"]:
    std = values.std(0, correction=0)
    return torch.where(
        std > 1e-12 * values.abs().amax(0), std, 1.0
    )  # the deviation of a constant column is rounding error


def _skewness(x: Float[Tensor, "N F"]) -> Float[Tensor, " F"]:
    centred = x - x.mean(0)
    return centred.pow(3).mean(0) / centred.square().mean(0).pow(1.5).clamp_min(torch.finfo(x.dtype).tiny)

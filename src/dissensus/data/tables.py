"""The collusion paper's preprocessing of its UCI tables (appendix B), and the same for other tables.

"Standardization of the features and targets, one hot encoding of categorical features, and log transformation of skewed
features." The paper says no more; what it leaves open is decided in `RECIPES` and `Scaling`. Only `Scaling` learns
anything from the values, and it is fitted on training rows alone.
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
from dissensus.data.common import COMMON, LABELS

log = logging.getLogger("dissensus")

SKEW = 1.0
"""Skewness above which a feature that is never negative goes through log(1 + x)."""


@dataclass(frozen=True)
class Recipe:
    """What the columns of a table are; those not named are numeric features.

    Attributes:
        targets: To be predicted, in this order.
        categories: Features without an order, one-hot encoded; their levels are those of the whole table.
        dropped: No features.
        leaks: Columns that nearly give the target away; features only if asked for.
        words: Whether features with entries that are no numbers are categories, beside those that are named.
        labels: Whether the target is a class: then it is one of 0, 1, ..., in the order of the classes' names.
    """

    targets: tuple[str, ...]
    categories: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    words: bool = False
    labels: bool = False


RECIPES: dict[str, Recipe] = {
    "abalone": Recipe(targets=("rings",), categories=("sex",)),
    # The class says how a chemical's measured logBCF lies to the one expected: it is made from the target.
    "bioconcentration": Recipe(targets=("logBCF",), dropped=("CAS", "SMILES", "Set"), leaks=("Class",)),
    # Solar radiation carries the season; the date would add the year alone. Only the station is a category.
    "weather": Recipe(targets=("Next_Tmax", "Next_Tmin"), categories=("station",), dropped=("Date",)),
    # The target is the sum of the three leaks.
    "facebook": Recipe(
        targets=("Total Interactions",), categories=("Type", "Category"), leaks=("comment", "like", "share")
    ),
    **{
        name: Recipe((known.target,), dropped=known.dropped, words=True, labels=name in LABELS)
        for name, known in COMMON.items()
    },
}
"""What each table's columns are."""


class Table(NamedTuple):
    """Features and targets of a table, in float64, before any scaling; classes are int64."""

    x: Float[Tensor, "N F"]
    y: Float[Tensor, "N T"] | Int64[Tensor, " N"]
    features: tuple[str, ...]
    targets: tuple[str, ...]


def table(name: str, columns: Mapping[str, Sequence[str]], *, leaky: bool = False) -> Table:
    """Features and targets from the columns of a file (`dissensus.data.formats.csv_columns`).

    Rows with a missing value in any column are dropped, used or not, so that both variants of a table have the same
    rows: 162 of weather's, 5 of facebook's.

    Args:
        name: A table of `RECIPES`.
        columns: Text by column.
        leaky: Keep the columns that nearly give the target away. The paper's Facebook results suggest that its authors
            kept ``comment``, ``like`` and ``share``, whose sum is the target.

    >>> columns = {"sex": ["M", "F", "M", ""], "length": ["1", "2.5", "3", "4"], "rings": ["15", "7", "9", "10"]}
    >>> abalone = table("abalone", columns)
    >>> abalone.features, abalone.x.tolist(), abalone.y.flatten().tolist()
    (('sex=F', 'sex=M', 'length'), [[0.0, 1.0, 1.0], [1.0, 0.0, 2.5], [0.0, 1.0, 3.0]], [15.0, 7.0, 9.0])
    """
    checks.one_of("name", name, RECIPES)
    recipe = RECIPES[name]
    missing = [column for column in (*recipe.targets, *recipe.categories) if column not in columns]
    if missing:
        checks.refuse(name, f"have the columns {', '.join(map(repr, missing))}", list(columns))
    whole = [i for i, row in enumerate(zip(*columns.values(), strict=True)) if not any(map(_is_missing, row))]
    rows = len(next(iter(columns.values())))
    if len(whole) < rows:
        log.info("%s: %d of %d rows lack a value and are dropped", name, rows - len(whole), rows)
    unused = {*recipe.targets, *recipe.dropped, *(() if leaky else recipe.leaks)}
    features: dict[str, list[float]] = {}
    for column in [column for column in columns if column not in unused]:
        texts = [columns[column][i] for i in whole]
        category = column in recipe.categories or (recipe.words and not all(map(_is_number, texts)))
        features.update(_one_hot(column, texts) if category else {column: _numbers(column, texts)})
    x = torch.tensor(list(features.values()), dtype=torch.float64).T.contiguous()
    texts_of = [[columns[column][i] for i in whole] for column in recipe.targets]
    if recipe.labels:
        levels = _one_hot(recipe.targets[0], texts_of[0])
        return Table(x, torch.tensor(list(levels.values())).argmax(0), tuple(features), recipe.targets)
    targets = [_numbers(column, texts) for column, texts in zip(recipe.targets, texts_of, strict=True)]
    return Table(x, torch.tensor(targets, dtype=torch.float64).T.contiguous(), tuple(features), recipe.targets)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Scales that were learnt from training rows.

    A feature that is never negative and has a skewness above `SKEW` goes through log(1 + x); where other rows turn out
    negative, sign(x)·log(1 + |x|) is its continuation. Then every feature and target gets mean 0 and deviation 1
    (population's); one that is constant stays at 0. One-hot columns are scaled like the others.

    >>> x = torch.tensor([[0.0, 1.0], [1.0, 2.0], [0.0, 3.0], [30.0, 4.0]])
    >>> scaling = Scaling.fit(x, x[:, 1:])
    >>> scaling.logged
    tensor([ True, False])
    >>> scaling.apply(x, x[:, 1:])[1].flatten()
    tensor([-1.3416, -0.4472,  0.4472,  1.3416])
    """

    logged: Bool[Tensor, " F"]
    mean: Float[Tensor, " F"]
    std: Float[Tensor, " F"]
    target_mean: Float[Tensor, " T"]
    target_std: Float[Tensor, " T"]

    @classmethod
    def fit(cls, x: Float[Tensor, "N F"], y: Float[Tensor, "N T"], *, skew: float = SKEW) -> "Scaling":
        """Learn scales from training rows."""
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or len(x) == 0:
            got = f"{checks.shape_text(x.shape)} and {checks.shape_text(y.shape)}"
            checks.refuse("x, y", "have shapes [N, F] and [N, T]", got, "One target? Use y.unsqueeze(-1).")
        logged = (x >= 0).all(0) & (_skewness(x) > skew)
        values = _log(x, logged)
        return cls(logged, values.mean(0), _deviation(values), y.mean(0), _deviation(y))

    def apply(
        self, x: Float[Tensor, "N F"], y: Float[Tensor, "N T"]
    ) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N T"]]:
        """Scale rows, whether they were learnt from or not."""
        if x.shape[1:] != self.mean.shape or y.shape[1:] != self.target_mean.shape:
            what = f"have {len(self.mean)} features and {len(self.target_mean)} targets, as the training rows had"
            checks.refuse("x, y", what, f"{checks.shape_text(x.shape)} and {checks.shape_text(y.shape)}")
        return (_log(x, self.logged) - self.mean) / self.std, (y - self.target_mean) / self.target_std

    def restored(self, y: Float[Tensor, "... T"]) -> Float[Tensor, "... T"]:
        """Targets or predictions in the units of the table."""
        return y * self.target_std + self.target_mean


def scaled(
    x: Float[Tensor, "N F"], y: Float[Tensor, "N T"], train: Int[Tensor, " n"], *others: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Rows of a table as float32 pairs ``(x, y)``, all scaled by the first, the training rows.

    >>> train, test = scaled(torch.eye(4), torch.arange(4.0).unsqueeze(1), torch.tensor([0, 1, 2]), torch.tensor([3]))
    >>> test
    (tensor([[-0.7071, -0.7071, -0.7071,  1.0000]]), tensor([[2.4495]]))
    """
    scaling = Scaling.fit(x[train], y[train])
    pairs = [scaling.apply(x[rows], y[rows]) for rows in (train, *others)]
    return [(x_part.float(), y_part.float()) for x_part, y_part in pairs]


def _is_missing(text: str) -> bool:
    return text.strip().lower() in ("", "na", "nan", "?")


def _numbers(column: str, texts: Sequence[str]) -> list[float]:
    try:
        values = [float(text) for text in texts]
    except ValueError:
        odd = next(text for text in texts if not _is_number(text))
        checks.refuse(column, "be a column of numbers", repr(odd), "A category? Name it in the recipe.")
    if not all(map(math.isfinite, values)):
        checks.refuse(column, "be finite", "infinity")
    return values


def _one_hot(column: str, texts: Sequence[str]) -> dict[str, list[float]]:
    """One column of zeros and ones per level, numbers in their order and words in theirs."""
    spelled = [f"{float(text):g}" if _is_number(text) else text for text in texts]
    levels = sorted(set(spelled), key=lambda level: (0, float(level), "") if _is_number(level) else (1, 0.0, level))
    return {f"{column}={level}": [float(text == level) for text in spelled] for level in levels}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _log(x: Float[Tensor, "N F"], logged: Bool[Tensor, " F"]) -> Float[Tensor, "N F"]:
    return torch.where(logged, x.sign() * x.abs().log1p(), x)


def _deviation(values: Float[Tensor, "N F"]) -> Float[Tensor, " F"]:
    std = values.std(0, correction=0)
    return torch.where(std > 1e-12 * values.abs().amax(0), std, 1.0)  # a constant column has rounding for deviation


def _skewness(x: Float[Tensor, "N F"]) -> Float[Tensor, " F"]:
    centred = x - x.mean(0)
    return centred.pow(3).mean(0) / centred.square().mean(0).pow(1.5).clamp_min(torch.finfo(x.dtype).tiny)

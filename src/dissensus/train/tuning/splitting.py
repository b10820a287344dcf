"""Repeated splits of examples into training, validation and test rows."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dissensus import checks
from dissensus.data.splits import Split
from dissensus.randomness import Use, derived_seed


class Rows(NamedTuple):
    """The rows of one split; every row is in one of the three at most."""

    train: Int[Tensor, " T"]
    validation: Int[Tensor, " V"]
    test: Int[Tensor, " E"]


def repeated_splits(targets: Tensor, validation: Split, test: float, splits: int, seed: int) -> list[Rows]:
    """Splits of equal sizes: test rows first, then validation rows of the rest.

    Groups and classes are treated as ``validation`` says, in both steps. Where groups differ in size, rows are left out
    at random until all splits have as many.
    """
    if validation.time is not None and splits > 1:
        fix = "Use splits=1; there is no interval of the gain then."
        checks.refuse(
            "validation", "draw rows if there are several splits", "a Split by time, which draws nothing", fix
        )
    drawn: list[list[Tensor]] = []
    for number in range(splits):
        first, second = derived_seed(seed, Use.TEST_SPLIT, number), derived_seed(seed, Use.SEARCH_SPLIT, number)
        rest, tested = replace(validation, fraction=test, seed=None).rows(targets, seed=first)
        train, held_out = _of_rows(validation, rest).rows(targets[rest], seed=second)
        drawn.append([rest[train], rest[held_out], tested])
    sizes = [min(len(rows[part]) for rows in drawn) for part in range(3)]
    generator = torch.Generator().manual_seed(derived_seed(seed, Use.SEARCH_SPLIT, "equal sizes"))
    return [Rows(*(_cut(part, size, generator) for part, size in zip(rows, sizes, strict=True))) for rows in drawn]


def _cut(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    if len(rows) == size:
        return rows
    return rows[torch.randperm(len(rows), generator=generator)[:size].sort().values]


def _of_rows(split: Split, rows: Tensor) -> Split:
    """The same split of some rows only."""
    columns = {name: getattr(split, name) for name in ("groups", "time", "stratify")}
    kept = {name: value[rows.numpy()] for name, value in columns.items() if isinstance(value, np.ndarray)}
    return replace(split, seed=None, **kept)

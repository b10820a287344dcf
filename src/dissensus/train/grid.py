"""Grids: which runs a sweep has, and which of them share shapes."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus import checks
from dissensus.randomness import Use, derived_seed
from dissensus.train.engine import ADVERSARIAL, DRAW, UNLABELLED

Grid = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Names to lists (or arrays) of values, or a list of points."""

PER_RUN = ("lr", "weight_decay", "momentum", "clip_norm")
"""Settings of the optimizer that may differ between runs."""
SEEDS = ("seed", "split_seed")
SHAPES = ("members", "batch_size")
FOLD = "fold"
"""The data set of a run, where there are several."""
_DATA = ("outputs", "targets", "logits", "labels", DRAW, UNLABELLED, ADVERSARIAL)
"""Parameters of objectives that a grid cannot set."""


@dataclass(frozen=True)
class Run:
    """One point of a grid, with its settings sorted by use."""

    point: dict[str, Any]
    seed: int
    split_seed: int
    members: int
    batch_size: int
    fold: int
    optimizer: dict[str, Any]
    """Learning rate, weight decay, momentum and largest norm of gradients: numbers, or one per member."""
    hyper: dict[str, float]
    """The objective's numbers, which become one tensor over runs."""
    words: dict[str, Any]
    """The objective's other settings; runs that differ in them are trained separately."""
    build: dict[str, Any]

    @classmethod
    def single(cls, *, members: int, batch_size: int, seed: int, optimizer: dict[str, Any]) -> "Run":
        """The run of a `fit`, which has no grid."""
        return cls(
            point={},
            seed=seed,
            split_seed=seed,
            members=members,
            batch_size=batch_size,
            fold=0,
            optimizer=optimizer,
            hyper={},
            words={},
            build={},
        )

    @property
    def shape(self) -> str:
        """Runs of the same shape are trained as one computation."""
        return repr((self.members, self.batch_size, sorted(self.words.items()), sorted(self.build.items())))


def points(grid: Grid) -> list[dict[str, Any]]:
    """The cartesian product of a grid in the order of its keys, or an explicit list of points.

    >>> points({"beta": [0, 1], "seed": [7]})
    [{'beta': 0, 'seed': 7}, {'beta': 1, 'seed': 7}]
    """
    if isinstance(grid, Mapping):
        grid = {
            key: values.tolist() if isinstance(values, np.ndarray | Tensor) else values for key, values in grid.items()
        }
        for key, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
                checks.refuse("grid", f"map {key!r} to a list of values", repr(values), f"One value? Use [{values!r}].")
        return [_plain(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    listed = [_plain(point.items()) for point in grid]
    if not listed:
        checks.refuse("grid", "hold at least one point", "none")
    return listed


def _plain(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in items}


def runs_of(
    grid: Grid, build: Callable[..., Any], objective: Callable[..., Any], defaults: Mapping[str, Any], folds: int = 1
) -> list[Run]:
    """Every run of a grid; a key that nothing takes is refused with the nearest one that something does."""
    of_objective, of_build = _free_parameters(objective), _free_parameters(build)
    known = [*PER_RUN, *SEEDS, *SHAPES, FOLD, *of_objective, *of_build]
    runs: list[Run] = []
    for point in points(grid):
        for key in point:
            checks.one_of("grid key", key, known)
        values = {**defaults, **point}
        hyper = {key: point[key] for key in of_objective if key in point}
        numbers = {key: float(v) for key, v in hyper.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for key in PER_RUN:
            if values.get(key) is not None:
                checks.number(key, values[key], 0)
        seed = checks.count("seed", values["seed"], 0)
        runs.append(
            Run(
                point=point,
                seed=seed,
                split_seed=checks.count("split_seed", values.get("split_seed", seed), 0),
                members=checks.count("members", values["members"]),
                batch_size=checks.count("batch_size", values["batch_size"]),
                fold=_fold(point, folds),
                optimizer={key: values[key] for key in PER_RUN if values.get(key) is not None},
                hyper=numbers,
                words={key: value for key, value in hyper.items() if key not in numbers},
                build={key: point[key] for key in of_build if key in point and key not in (*SHAPES, *SEEDS, FOLD)},
            )
        )
    return runs


def _fold(point: Mapping[str, Any], folds: int) -> int:
    if folds > 1 and FOLD not in point:
        checks.refuse("grid", f"say which of {folds} data sets each run takes", "no 'fold'", "Add 'fold': [0, 1, ...].")
    fold = checks.count(FOLD, point.get(FOLD, 0), 0)
    if fold >= folds:
        checks.refuse(FOLD, f"be below {folds}, the number of data sets", fold, "Give `data` as a list of pairs.")
    return fold


def _free_parameters(function: Callable[..., Any]) -> list[str]:
    """Names that a call can still set: keywords that no ``partial`` has bound, without data."""
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in kinds and p.name not in bound]
    return [name for name in names if name not in _DATA]


def draw_keys(objective: Callable[..., Any], seeds: Sequence[int], device: torch.device) -> Tensor | None:
    """Each run's key for an objective that draws: one with a parameter ``draw`` that nobody has bound."""
    bound = set(objective.keywords) if isinstance(objective, functools.partial) else set()
    asked = inspect.signature(objective).parameters.get(DRAW)
    if DRAW in bound or asked is None:
        return None
    if asked.default is inspect.Parameter.empty:
        checks.refuse("objective", "give `draw` a default", "none", "On validation data it is called without one.")
    return torch.tensor([derived_seed(seed, Use.OBJECTIVE) for seed in seeds], device=device)


def grouped(runs: Sequence[Run]) -> list[list[int]]:
    """Numbers of the runs that share shapes, group by group, in the order in which they appear."""
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(f"{run.shape} {sorted(run.hyper)} {sorted(run.optimizer)}", []).append(number)
    return list(groups.values())

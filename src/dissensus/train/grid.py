"""Grids: which runs a sweep has, and which of them share shapes."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus import checks
from dissensus.fingerprint import fingerprint
from dissensus.objectives.declaration import DRAW, argument, declaration, hyperparameters, takes, unwrapped
from dissensus.randomness import Use, derived_seed
from dissensus.train.optim import checked_number

Grid = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Names to lists (or arrays) of values, or a list of points."""

PER_RUN = ("lr", "weight_decay", "momentum", "clip_norm")
"""Settings of the optimizer that may differ between runs."""
SHARED = ("shared_lr", "shared_clip_norm")
"""Settings of parameters that members share, which may differ between runs."""
SEEDS = ("seed", "split_seed")
SHAPES = ("members", "batch_size")
FOLD = "fold"
"""The data set of a run, where there are several."""


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
    shared: dict[str, float] = field(default_factory=dict)
    """Learning rate and largest norm of gradients of what members share, where the grid gives them."""

    def identity(self) -> dict[str, Any]:
        """Everything that distinguishes a run from others."""
        return {name: value for name, value in vars(self).items() if name != "shared" or value}

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
        return repr((self.members, self.batch_size, key_of(self.words), key_of(self.build)))


def key_of(settings: Mapping[str, Any]) -> str:
    """A text that only equal settings share. Tensors and arrays count number by number: their ``repr`` is rounded.

    >>> near = [{"weights": torch.tensor([0.5, weight])} for weight in (0.5, 0.50001)]
    >>> repr(near[0]) == repr(near[1]), key_of(near[0]) == key_of(near[1])
    (True, False)
    """
    return repr(sorted((name, _text_of(value)) for name, value in settings.items()))


def _text_of(value: Any) -> str:
    if type(value) in (bool, int, float, str, type(None)):
        return repr(value)
    if type(value) in (list, tuple):
        return repr((type(value).__name__, [_text_of(part) for part in value]))
    opaque: list[str] = []
    text = fingerprint(value, opaque=opaque)
    return f"{text} {id(value)}" if opaque else text


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
    if not isinstance(grid, Sequence) or not all(isinstance(point, Mapping) for point in grid):
        requirement = "be a dictionary from names to lists of values, or a list of points (dictionaries)"
        checks.refuse("grid", requirement, repr(grid), error=TypeError)
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
    of_objective, of_build = hyperparameters(objective), free_parameters(build)
    sweepable = declaration(objective).sweepable
    known = [*PER_RUN, *SHARED, *SEEDS, *SHAPES, FOLD, *of_objective, *of_build]
    runs: list[Run] = []
    for point in points(grid):
        for key in point:
            checks.one_of("grid key", key, known)
        values = {**defaults, **point}
        hyper = {key: point[key] for key in of_objective if key in point}
        numbers = {
            key: float(value)
            for key, value in hyper.items()
            if (sweepable is None or key in sweepable)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        }
        for key, value in hyper.items():
            if sweepable is not None and key in sweepable and isinstance(value, str | bytes | Mapping | None):
                checks.refuse("grid", f"map {key!r} to numbers", repr(value))
        for key in PER_RUN:
            if key in values and (values[key] is not None or key != "clip_norm"):
                checked_number(key, values[key])
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
                shared={key: point[key] for key in SHARED if point.get(key) is not None},
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


def free_parameters(function: Callable[..., Any]) -> list[str]:
    """Keywords of a builder that no ``partial`` has bound."""
    _, bound = unwrapped(function)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in bound]


def draw_keys(objective: Callable[..., Any], seeds: Sequence[int], device: torch.device) -> Tensor | None:
    """The key of each run for an objective that draws; None for one that does not, or whose ``draw`` is bound."""
    if not takes(objective, DRAW):
        return None
    if argument(objective, DRAW) is None:
        checks.refuse("objective", "give `draw` a default", "none", "On validation data it is called without one.")
    return torch.tensor([derived_seed(seed, Use.OBJECTIVE) for seed in seeds], device=device)


def grouped(runs: Sequence[Run], examples: Sequence[int]) -> list[list[int]]:
    """Numbers of the runs that share shapes, group by group, in the order in which they appear.

    ``examples`` are the numbers of training examples of every run, by which steps are counted.
    """
    groups: dict[str, list[int]] = {}
    for number, (run, size) in enumerate(zip(runs, examples, strict=True)):
        groups.setdefault(
            f"{run.shape} {sorted(run.hyper)} {sorted(run.optimizer)} {sorted(run.shared)} {size}", []
        ).append(number)
    return list(groups.values())

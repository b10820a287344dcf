"""What a search is of: data in splits, the space, and what independent training is there."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dissensus import calls, checks
from dissensus.arrays import Conversion, has_whole_numbers
from dissensus.axes import LossParts
from dissensus.batch import check_finite
from dissensus.calls import NetworkInputs, network_inputs
from dissensus.data.batches import as_pair, is_source
from dissensus.data.splits import Split
from dissensus.objectives.declaration import argument, declaration, hyperparameters, unset_parameters, unwrapped
from dissensus.randomness import seeded
from dissensus.train.grid import FOLD, PER_RUN, SEEDS, SHAPES, SHARED, free_parameters
from dissensus.train.trained_loss import trained_loss
from dissensus.train.tuning.scoring import Scorer
from dissensus.train.tuning.space import Axis, point_of, space_of
from dissensus.train.tuning.splitting import Rows, repeated_splits
from dissensus.train.twin import without_interaction


@dataclass(frozen=True)
class Sizes:
    """Numbers that a search is of; see `dissensus.tune`."""

    epochs: int
    members: int
    splits: int
    seeds: int
    factor: float
    first_rung: int
    budget: float | None
    seed: int


@dataclass(frozen=True)
class Problem:
    """What is searched, on what data, and how candidates are compared."""

    build: Callable[..., nn.Module]
    objective: Callable[..., LossParts]
    space: list[Axis]
    sizes: Sizes
    x: NetworkInputs
    y: Tensor
    rows: list[Rows]
    scorer: Scorer
    settings: dict[str, Any]
    neutral: dict[str, float] | None
    """Settings with which the objective is that of independent training; None where it has none."""
    separate: Callable[..., LossParts] | None
    """The objective of independent training where the objective has no neutral value."""
    judged: bool
    """Whether collusive candidates are set aside."""

    @classmethod
    def of(
        cls,
        build: Callable[..., nn.Module],
        data: Any,
        objective: Callable[..., LossParts],
        axes: list[Axis],
        *,
        sizes: Sizes,
        validation: float | Split,
        test: float,
        scorer: Scorer,
        settings: dict[str, Any],
        judged: bool,
    ) -> "Problem":
        """Check everything before anything is trained."""
        x, y = _pair(build, data, axes)
        if not isinstance(validation, Split):
            share = checks.number("validation", validation, 0, 1, open_low=True, open_high=True)
            validation = Split(share)
        neutral, separate = _independent(objective)
        rows = repeated_splits(y.cpu(), validation, test, sizes.splits, sizes.seed)
        return cls(build, objective, axes, sizes, x, y, rows, scorer, settings, neutral, separate, judged)

    @functools.cached_property
    def other_axes(self) -> list[str]:
        """Names of the space that are no hyperparameters of the objective."""
        of_objective = hyperparameters(self.objective)
        return [axis.name for axis in self.space if axis.name not in of_objective]

    @property
    def all_independent(self) -> bool:
        """Whether members of no candidate interact."""
        return self.neutral is None and self.separate is None

    def is_independent(self, point: Mapping[str, Any]) -> bool:
        """Whether members of a candidate do not interact."""
        if self.neutral is None:
            return self.all_independent
        return all(equals(point.get(name, argument(self.objective, name)), v) for name, v in self.neutral.items())

    def independent_version(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """A point with the settings of independent training in the place of the objective's."""
        others = {name: point[name] for name in self.other_axes}
        if self.neutral is None:
            return others
        needed = {name: point[name] for name in unset_parameters(self.objective) if name in point}
        names = {axis.name for axis in self.space}
        values = {
            name: value
            for name, value in self.neutral.items()
            if name in names or not equals(argument(self.objective, name), value)
        }
        return {**needed, **values, **others}

    def inputs(self, split: int, part: str) -> NetworkInputs:
        """The inputs of a part of a split."""
        return calls.rows(self.x, getattr(self.rows[split], part).to(self.y.device))

    def targets(self, split: int, part: str) -> Tensor:
        """The targets of a part of a split."""
        return self.y[getattr(self.rows[split], part).to(self.y.device)]


def equals(value: Any, neutral: float) -> bool:
    """Whether a setting is a number that equals the neutral one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and float(value) == float(neutral)


def axes_of(build: Callable[..., nn.Module], objective: Callable[..., LossParts], space: object) -> list[Axis]:
    """The axes of a space, which together with partials sets every parameter of the objective, such as its loss."""
    known = [*PER_RUN, *SHARED, *SHAPES, *hyperparameters(objective), *free_parameters(build)]
    axes = space_of(space, known, (*SEEDS, FOLD))
    unset = [name for name in unset_parameters(objective) if name not in {axis.name for axis in axes}]
    if unset:
        name = getattr(unwrapped(objective)[0], "__name__", "objective")
        fix = f"Use functools.partial({name}, {unset[0]}=...), or put it into the space."
        checks.refuse("objective", "have a value for each of its parameters", f"{name} without `{unset[0]}`", fix)
    return axes


def _pair(build: Callable[..., nn.Module], data: Any, axes: Sequence[Axis]) -> tuple[NetworkInputs, Tensor]:
    """Inputs and targets as tensors."""
    conversion = Conversion(torch.get_default_dtype())
    if has_whole_numbers(data):
        parameters = {axis.name: axis.drawn(0.0) for axis in axes}
        free = free_parameters(build)
        point = {name: value for name, value in point_of(axes, parameters).items() if name in free}
        with seeded(0):
            conversion = conversion._replace(indices=Conversion.of(build(**point)).indices)
    pair = None if is_source(data) else as_pair(conversion.pair(data))
    if pair is None:
        fix = "Splits are drawn from its rows. Read it into tensors."
        got = type(data).__name__
        checks.refuse("data", "be a pair (inputs, targets) in memory", got, fix, TypeError)
    x, y = network_inputs(pair[0]), pair[1]
    for tensor in calls.tensors(x):
        check_finite("x", tensor)
    return x, y


def _independent(
    objective: Callable[..., LossParts],
) -> tuple[dict[str, float] | None, Callable[..., LossParts] | None]:
    """The settings of independent training, or an objective for it; neither where members never interact."""
    declared = declaration(objective)
    if declared.separable:
        return None, None
    free = hyperparameters(objective)
    reachable = all(name in free or equals(argument(objective, name), v) for name, v in declared.neutral.items())
    if declared.neutral and reachable:
        return {name: value for name, value in declared.neutral.items() if name in free}, None
    if trained_loss(objective) is None:
        fix = "Bind its loss by name, or declare a neutral value (dissensus.objectives.Declaration(neutral=...))."
        checks.refuse("objective", "say what independent training is", "one without a neutral value or a loss", fix)
    return None, without_interaction(objective)

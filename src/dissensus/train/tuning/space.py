"""Spaces of settings: which values each may take, and how a number between 0 and 1 becomes a value."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from dissensus import checks


@dataclass(frozen=True)
class Range:
    """A range of numbers in the space of `dissensus.tune`.

    Args:
        low: The smallest value.
        high: The largest value.
        log: Whether values are drawn on a logarithmic scale; both ends are above zero then.
        integer: Whether values are whole numbers.

    >>> round(Range(1e-4, 1e-2, log=True).at(0.5), 6), Range(2, 5, integer=True).at(0.99)
    (0.001, 5)
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            checks.number(name, getattr(self, name))
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            checks.refuse("Range", "have whole numbers as ends if integer=True", f"{self.low} to {self.high}")
        if self.low >= self.high:
            checks.refuse("Range", "have low < high", f"{self.low} to {self.high}", "One value? Use a list.")
        if self.log and self.low <= 0:
            checks.refuse("Range", "begin above zero if log=True", self.low)

    def at(self, place: float) -> Any:
        """The value at a place between 0 and 1."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.integer else (self.low, self.high)
        if self.log:
            low = max(low, self.low / 2)
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        value = min(max(value, self.low), self.high)
        return int(min(max(round(value), self.low), self.high)) if self.integer else value


@runtime_checkable
class HasQuantiles(Protocol):
    """A distribution, such as a frozen one of ``scipy.stats``."""

    def ppf(self, q: float) -> Any:
        """The value that a share of all values lies below."""
        ...


_TAIL = 1e-6
"""Of distributions without ends, which have no finite value at 0 and 1."""


def _counts(distribution: HasQuantiles) -> bool:
    """Whether a distribution is of whole numbers, as ``scipy.stats.randint`` is."""
    return hasattr(distribution, "pmf") and not hasattr(distribution, "pdf")


@dataclass(frozen=True)
class Axis:
    """A setting and its values. A parameter stands for a value: an index into choices, or a place between 0 and 1."""

    name: str
    choices: tuple[Any, ...] = ()
    """All values; empty for ranges and distributions."""
    distribution: Range | HasQuantiles | None = None

    def extremes(self) -> list[Any]:
        """Values that show whether others are allowed: all choices, or both ends."""
        return list(self.choices) or [self.value(0.0), self.value(1.0)]

    @property
    def ordered(self) -> bool:
        """Whether the choices are numbers in rising order."""
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.choices)
        return numbers and list(self.choices) == sorted(self.choices)

    def value(self, parameter: float) -> Any:
        """The value that a parameter stands for."""
        if self.choices:
            return self.choices[int(parameter)]
        if isinstance(self.distribution, Range):
            return self.distribution.at(parameter)
        assert self.distribution is not None
        value = self.distribution.ppf(min(max(parameter, _TAIL), 1 - _TAIL))
        value = value.item() if isinstance(value, np.generic | np.ndarray) else value
        return int(value) if _counts(self.distribution) and float(value).is_integer() else value

    def drawn(self, uniform: float) -> float:
        """The parameter at a number in [0, 1)."""
        return int(uniform * len(self.choices)) if self.choices else uniform


Space = Sequence[Axis]


def space_of(space: Any, known: Iterable[str], reserved: Iterable[str]) -> list[Axis]:
    """The axes of a space as a user gives it: names to lists, ranges or distributions.

    >>> space_of({"beta": [0, 0.5]}, ["beta", "lr"], ["seed"])
    [Axis(name='beta', choices=(0, 0.5), distribution=None)]
    """
    if not isinstance(space, Mapping) or not space:
        requirement = "map names of settings to lists, ranges or distributions, such as {'beta': [0, 0.5, 0.9]}"
        checks.refuse("space", requirement, repr(space), error=TypeError)
    reserved = list(reserved)
    for name in space:
        if name in reserved:
            fix = "Their numbers are arguments: seeds=, splits=."
            checks.refuse("space", "leave seeds and splits to `tune`", repr(name), fix)
        checks.one_of("space key", name, known)
    return [_axis(name, values) for name, values in space.items()]


def _axis(name: str, values: Any) -> Axis:
    if isinstance(values, np.ndarray | Tensor):
        values = values.tolist()
    if isinstance(values, list | tuple | range):
        if not len(values):
            checks.refuse("space", f"map {name!r} to one value or more", "none")
        plain = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
        if any(isinstance(value, float) and not math.isfinite(value) for value in plain):
            checks.refuse("space", f"map {name!r} to finite numbers", repr(list(plain)))
        if any(value in plain[:place] for place, value in enumerate(plain)):
            checks.refuse("space", f"map {name!r} to values that differ", repr(list(plain)))
        return Axis(name, plain)
    if isinstance(values, Range):
        return Axis(name, distribution=values)
    kind = type(values).__name__
    if kind == "CategoricalDistribution":
        return _axis(name, list(values.choices))
    if kind in ("FloatDistribution", "IntDistribution"):
        if values.step not in (None, 1):
            checks.refuse("space", f"map {name!r} to a distribution without steps", repr(values), "Use a list.")
        if values.low == values.high:
            return Axis(name, (values.low,))
        return Axis(name, distribution=Range(values.low, values.high, values.log, kind == "IntDistribution"))
    if isinstance(values, HasQuantiles):
        return Axis(name, distribution=values)
    requirement = f"map {name!r} to a list, a dissensus.train.Range or a distribution with ppf"
    checks.refuse("space", requirement, repr(values), f"One value? Use [{values!r}].", TypeError)


def size_of(space: Space) -> int | None:
    """The number of points of a space; None where it has ranges or distributions."""
    if any(not axis.choices for axis in space):
        return None
    return math.prod(len(axis.choices) for axis in space)


def all_parameters(space: Space) -> list[dict[str, float]]:
    """The parameters of every point of a space of choices, in the order of its names."""
    product = itertools.product(*(range(len(axis.choices)) for axis in space))
    return [dict(zip((axis.name for axis in space), places, strict=True)) for places in product]


def point_of(space: Space, parameters: Mapping[str, float]) -> dict[str, Any]:
    """The settings that parameters stand for."""
    return {axis.name: axis.value(parameters[axis.name]) for axis in space}

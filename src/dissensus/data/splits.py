"""Splits of examples into training and validation: at random, stratified by class, by groups, or by time."""

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dissensus import calls, checks
from dissensus.arrays import is_array, tensor_of
from dissensus.calls import NetworkInputs
from dissensus.randomness import Use, derived_seed

log = logging.getLogger("dissensus")

Labels = Any
"""A tensor, an array, a pandas column or a list ``[N]``."""


@dataclass(frozen=True, eq=False)
class Split:
    """Which examples are held out for validation; ``validation=Split(...)`` in `dissensus.fit` and `dissensus.sweep`.

    Args:
        fraction: Share of the examples to hold out, above 0 and below 1. Groups, ties in time and rare classes may
            allow it only approximately.
        groups: The group of every example ``[N]``, such as a patient or a user: numbers or texts. No group is in both
            parts. The groups of validation are drawn by the seed.
        time: The time of every example ``[N]``: numbers or ``datetime64``. The latest examples are held out. Examples
            of one time are in the same part. Nothing is drawn.
        stratify: Whether both parts have the same share of every class, to within one example. True takes the targets
            as classes; labels ``[N]`` are classes of their own. ``"auto"``, the default, is True without ``groups`` and
            ``time`` if targets are whole numbers ``[N]``. A class with one example stays in training.
        seed: Seed of the draw. None, the default, takes ``split_seed`` of the fit, or of each run of a sweep, so that
            runs with different seeds have different splits.

    >>> split = Split(0.25, groups=["ann", "bob", "ann", "cid", "bob", "cid", "cid", "cid"])
    >>> train, validation = split.rows(torch.zeros(8), seed=1)
    >>> train, validation
    (tensor([1, 3, 4, 5, 6, 7]), tensor([0, 2]))
    """

    fraction: float = 0.2
    groups: Labels | None = field(default=None, repr=False)
    time: Labels | None = field(default=None, repr=False)
    stratify: bool | Literal["auto"] | Labels = field(default="auto", repr=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        fraction = checks.number("fraction", self.fraction, 0, 1, open_low=True, open_high=True)
        object.__setattr__(self, "fraction", fraction)
        if self.seed is not None:
            object.__setattr__(self, "seed", checks.count("seed", self.seed, 0))
        for name in ("groups", "time", "stratify"):
            value = getattr(self, name)
            if name == "stratify" and isinstance(value, str | bool | np.bool_):
                if isinstance(value, str):
                    checks.one_of("stratify", value, ("auto",))
            elif value is not None or name == "stratify":
                object.__setattr__(self, name, _column(name, value))
        chosen = [name for name in ("groups", "time") if getattr(self, name) is not None]
        if self._stratifies is True:
            chosen.append("stratify")
        if len(chosen) > 1:
            fix = f"Leave out {' or '.join(f'`{name}`' for name in chosen)}."
            checks.refuse("Split", "be by groups, by time or stratified", " and ".join(chosen), fix)

    @property
    def _stratifies(self) -> bool | None:
        """Whether it is stratified; None where targets decide."""
        if isinstance(self.stratify, np.ndarray):
            return True
        return None if isinstance(self.stratify, str) else bool(self.stratify)

    def check(self, targets: Tensor) -> None:
        """Refuse targets ``[N, ...]`` that do not go with this split; the log names classes that stay in training."""
        classes = self._classes(targets)
        self.rows(targets)
        if classes is not None:
            single = int((classes.bincount() == 1).sum())
            if single:
                log.info("%d classes have one example each, which stays in training", single)

    def rows(self, targets: Any, *, seed: int = 0) -> tuple[Int[Tensor, " T"], Int[Tensor, " V"]]:
        """Rows of training and of validation, on the host.

        Args:
            targets: Targets ``[N, ...]`` of the examples, a tensor or an array. Values matter for classes only.
            seed: Seed of the draw, where the split has none.

        Every row is in one of the two parts, and neither is empty. The same arguments give the same rows.
        """
        targets = tensor_of("targets", targets) if is_array(targets) else targets
        examples = len(targets)
        if examples < 2:
            checks.refuse("data", "hold two examples or more to split", examples)
        generator = torch.Generator().manual_seed(derived_seed(seed if self.seed is None else self.seed, Use.SPLIT))
        if self.groups is not None:
            held_out = self._by_groups(_codes("groups", self.groups, examples), generator)
        elif self.time is not None:
            held_out = self._by_time(_codes("time", self.time, examples))
        else:
            classes = self._classes(targets)
            if classes is None:
                return _random_rows(examples, self.fraction, generator)
            held_out = self._by_class(classes, generator)
        return (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)

    def _classes(self, targets: Tensor) -> Tensor | None:
        """The class of every example as numbers from 0 on; None where the split is not stratified."""
        if isinstance(self.stratify, np.ndarray):
            return _codes("stratify", self.stratify, len(targets))
        are_labels = targets.ndim == 1 and not targets.is_floating_point() and not targets.is_complex()
        if self._stratifies is None:
            stratified = are_labels and self.groups is None and self.time is None
        else:
            stratified = bool(self._stratifies)
        if stratified and not are_labels:
            fix = "Give classes to stratify by: stratify=labels [N]. Regression? Leave `stratify` out."
            got = f"{checks.shape_text(targets.shape)} {targets.dtype}"
            checks.refuse("stratify", "come with targets that are class labels [N]", got, fix)
        return targets.cpu().unique(return_inverse=True)[1] if stratified else None

    def _by_groups(self, groups: Tensor, generator: torch.Generator) -> Tensor:
        """Rows that are held out, bool ``[N]``.

        Groups are taken in random order. Each is held out if that brings the number of rows closer to the fraction.
        So this number is off by at most half a group, unless there are too few groups.
        """
        sizes = groups.bincount().tolist()
        if len(sizes) < 2:
            checks.refuse("groups", "name two groups or more", "one", "One group cannot be in both parts.")
        wanted, rows = self.fraction * len(groups), 0
        chosen = torch.zeros(len(sizes), dtype=torch.bool)
        order = torch.randperm(len(sizes), generator=generator).tolist()
        for group in order:
            if abs(rows + sizes[group] - wanted) < abs(rows - wanted):
                chosen[group], rows = True, rows + sizes[group]
        if rows == 0 or rows == len(groups):  # every part has one group at least
            chosen[min(order, key=lambda group: sizes[group])] ^= True
        return chosen[groups]

    def _by_time(self, times: Tensor) -> Tensor:
        """Rows that are held out, bool ``[N]``: those from the time on whose number is closest to the fraction."""
        sizes = times.bincount()
        if len(sizes) < 2:
            checks.refuse("time", "have two different times or more", "one", "Examples of one time stay together.")
        later = len(times) - sizes.cumsum(0)[:-1]  # examples after each time but the last
        distance = (later - self.fraction * len(times)).abs()
        last_of_training = len(distance) - 1 - int(distance.flip(0).argmin())  # of equal ones, the smaller part
        return times > last_of_training

    def _by_class(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Rows that are held out, bool ``[N]``: a share of every class, rounded by the largest remainders."""
        sizes = classes.bincount()
        share = self.fraction * sizes.double()
        counts = share.floor().long()
        room = counts + 1 < sizes  # a class keeps an example for training
        if not bool(room.any()) and not bool(counts.any()):
            fix = "Classes of one example cannot be in both parts. Use stratify=False."
            checks.refuse("stratify", "have a class with two examples or more", "none", fix)
        missing = _part_size(len(classes), self.fraction) - int(counts.sum())
        remainders = torch.where(room, share - counts, -1.0)
        for index in remainders.argsort(descending=True, stable=True)[: max(missing, 0)].tolist():
            counts[index] += int(room[index])
        held_out = torch.zeros(len(classes), dtype=torch.bool)
        order = torch.randperm(len(classes), generator=generator)
        order = order[classes[order].argsort(stable=True)]  # class by class, at random within each
        for rows, count in zip(order.split(sizes.tolist()), counts.tolist(), strict=True):
            held_out[rows[:count]] = True
        return held_out

    def identity(self) -> dict[str, Any]:
        """Everything that decides rows besides targets, by which checkpoints recognise the split."""
        columns = {name: getattr(self, name) for name in ("groups", "time", "stratify")}
        codes = {
            name: _codes(name, value, len(value)) if isinstance(value, np.ndarray) else value
            for name, value in columns.items()
        }
        return {"fraction": self.fraction, "seed": self.seed, **codes}


def held_out_rows(validation: float | Split, targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of training and of validation, for a fraction or a split."""
    if isinstance(validation, Split):
        return validation.rows(targets, seed=seed)
    return split_rows(len(targets), validation, seed)


def split_rows(examples: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """A random split of row numbers, determined by the seed: ``(rest, part)``, each with at least one row.

    >>> rest, part = split_rows(10, 0.3, seed=0)
    >>> len(rest), len(part), sorted([*rest.tolist(), *part.tolist()]) == list(range(10))
    (7, 3, True)
    """
    if not 0 < fraction < 1 or examples < 2:
        what = "lie between 0 and 1 as a fraction, with two examples or more to split"
        checks.refuse("validation", what, f"{fraction} of {examples}")
    return _random_rows(examples, fraction, torch.Generator().manual_seed(derived_seed(seed, Use.SPLIT)))


Pair = tuple[NetworkInputs, Tensor]


def split(x: NetworkInputs, y: Tensor, fraction: float, seed: int) -> tuple[Pair, Pair]:
    """Split off a random fraction of the examples: ``(rest, part)``, each ``(x, y)``."""
    rest, part = split_rows(calls.examples(x), fraction, seed)
    return (calls.rows(x, rest), y[rest]), (calls.rows(x, part), y[part])


def _random_rows(examples: int, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.randperm(examples, generator=generator)
    size = _part_size(examples, fraction)
    return order[size:], order[:size]


def _part_size(examples: int, fraction: float) -> int:
    return min(max(round(fraction * examples), 1), examples - 1)


def _column(name: str, values: Any) -> np.ndarray:
    """A copy of one value per example, ``[N]``, without missing ones."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        checks.refuse(name, "have one value per example [N]", repr(values), error=TypeError)
    column = np.array(values, dtype=object if isinstance(values, list | tuple) else None)
    if column.ndim != 1:
        checks.refuse(name, "have one value per example [N]", checks.shape_text(column.shape))
    missing = _missing(column)
    if missing.any():
        got = f"{int(missing.sum())} missing, the first in row {int(missing.argmax())}"
        checks.refuse(name, "have no missing values", got, "Drop these examples, or fill them.")
    if column.dtype == object:
        if len({isinstance(value, str) for value in column}) > 1:
            checks.refuse(name, "hold values of one kind", "texts and others", "Use texts throughout.", TypeError)
        column = np.array(column.tolist())
    if name == "time" and column.dtype.kind not in "iufmM":
        fix = "Texts? Use numpy.array(..., dtype='datetime64[s]')."
        checks.refuse(name, "be numbers or datetime64", str(column.dtype), fix, TypeError)
    if name == "time" and column.dtype.kind == "f" and not np.isfinite(column).all():
        checks.refuse(name, "be finite", "infinity")
    return column


def _missing(column: np.ndarray) -> np.ndarray:
    """Which values are missing: None, NaN, NaT or pandas' NA."""
    if column.dtype.kind in "mM":
        return np.isnat(column)
    if column.dtype == object:
        nothing = ("NoneType", "NAType", "NaTType")
        return np.array([type(value).__name__ in nothing or value != value for value in column], dtype=bool)
    return np.isnan(column) if column.dtype.kind in "fc" else np.zeros(len(column), dtype=bool)


def _codes(name: str, column: np.ndarray, examples: int) -> Int[Tensor, " N"]:
    """Values as numbers from 0 on, in their order."""
    if len(column) != examples:
        checks.refuse(name, f"have one value per example (N={examples})", f"{len(column)} values")
    try:
        return torch.from_numpy(np.unique(column, return_inverse=True)[1].astype(np.int64))
    except TypeError:
        fix = "Use texts throughout, or numbers throughout."
        checks.refuse(name, "hold values of one kind", "several, which have no order", fix, TypeError)

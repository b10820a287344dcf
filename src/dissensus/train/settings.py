"""Settings of a training that belong together, as small frozen dataclasses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

import dissensus.train.optim as optim
import dissensus.train.schedules as schedules
from dissensus import checks
from dissensus.batch import Unpack
from dissensus.data.batches import Augments

Metric = Callable[[Tensor, Tensor], Tensor | float]
"""``(outputs [M, N, C], targets) ->`` a number, or one per member."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, and those of its settings that all runs and members share."""

    name: str = "adamw"
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: str | schedules.Schedule = "constant"

    def __post_init__(self) -> None:
        checks.one_of("optimizer", self.name, optim.OPTIMIZERS)
        schedules.resolved(self.schedule)
        optim.checked_betas(self.betas)
        checks.number("eps", self.eps, 0)
        checks.flag("nesterov", self.nesterov)


@dataclass(frozen=True)
class BatchSettings:
    """How data becomes batches; the batch size is a setting of each run."""

    shuffle: bool = True
    drop_last: bool = False
    augment: Augments = None
    unpack: Unpack | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.unpack is not None:
            checks.function("unpack", self.unpack, "batch -> (inputs, targets) or (inputs, targets, weights)")
        if self.steps_per_epoch is not None:
            checks.count("steps_per_epoch", self.steps_per_epoch)
        checks.flag("shuffle", self.shuffle)
        checks.flag("drop_last", self.drop_last)
        several = self.augment if isinstance(self.augment, Sequence) else (self.augment,)
        for augment in (self.augment,) if isinstance(self.augment, str | bytes) else several:
            if augment is not None:
                checks.function("augment", augment, "(x, generator) -> x, or a list with one per member")


@dataclass(frozen=True)
class ValidationSettings:
    """What is measured on validation data, and what follows from it."""

    metric: Metric | None = None
    mode: Literal["min", "max"] | None = None
    """Whether a lower or a higher metric is better; None is ``"min"``, for losses."""
    track: Mapping[str, Metric] | None = None
    watch: Literal["ensemble", "member"] = "ensemble"
    patience: int | None = None
    min_delta: float = 0.0
    keep: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        checks.one_of("watch", self.watch, ("ensemble", "member"))
        checks.one_of("keep", self.keep, ("best", "last"))
        if self.track is None:
            return
        if not isinstance(self.track, Mapping):
            requirement = "be a dictionary from names to functions (outputs, targets) -> number"
            checks.refuse("track", requirement, repr(self.track), error=TypeError)
        for name, measure in self.track.items():
            checks.function("track", measure, f"(outputs, targets) -> number at {name!r}")

    @property
    def per_member(self) -> bool:
        """Whether each member is judged by its own metric."""
        return self.watch == "member"


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints are, and how often they are written."""

    folder: Path
    resume: bool = False
    seconds: float | None = None
    """Time between checkpoints; None: ten seconds, or more where writing takes more than 2 % of the time."""
    choices: Path | None = None
    """The file of the chosen backends; None: in the folder."""
    part: tuple[int, ...] | None = None
    """The runs of a part of a sweep, by number: a checkpoint of other runs is refused."""

    def __post_init__(self) -> None:
        if self.seconds is not None:
            checks.number("checkpoint_seconds", self.seconds, 0)
        object.__setattr__(self, "folder", checks.path("checkpoint", self.folder))

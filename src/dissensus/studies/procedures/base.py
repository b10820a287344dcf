"""The form of every procedure: what it needs, the units of its work, and how a unit becomes rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from dissensus.data.sources import DATASETS, DatasetInfo
from dissensus.studies.measures import MEASURES, OutputMeasure
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec, on_data
from dissensus.train import RayCluster

OnProgress = Callable[[str, float], None]
"""``(text, share of the work that is done)``."""


def no_progress(text: str, share: float) -> None:
    """Ignore the progress."""


class Unit(Protocol):
    """Work that does not depend on other units. One that is done is not done again."""

    @property
    def name(self) -> str:
        """Name of its folder, within that of the run."""
        ...


@dataclass(frozen=True)
class StudyContext:
    """Everything that a unit is run with."""

    spec: Spec
    """Resolved at a scale."""
    folder: Path
    """The folder of this run."""
    base: Path
    """The folder with the trainings: that of the study which this one uses, or this run's."""
    device: torch.device
    measures: Mapping[str, OutputMeasure] = field(default_factory=lambda: MEASURES)
    """Measures of member outputs by name."""
    progress: OnProgress = no_progress
    catalogue: Mapping[str, DatasetInfo] = field(default_factory=lambda: DATASETS)
    """Data sets by name."""
    cluster: RayCluster | None = None
    """Where runs are trained, as tasks of their own; None: by this process."""

    def on_data(self, data: str) -> "StudyContext":
        """The same, with the settings that the study has for one of its data sets."""
        return replace(self, spec=on_data(self.spec, data))

    def titled(self, title: str) -> "StudyContext":
        """The same, with a title before every text of the progress."""
        progress = self.progress
        return replace(self, progress=lambda text, share: progress(f"{title}: {text}", share))


def never(task: Any, context: StudyContext, few: bool) -> bool:  # noqa: ARG001
    """A task is never done from here, where there is a cluster."""
    return False


def whole(task: Any, parts: int) -> Sequence[Any]:  # noqa: ARG001
    """A task is not divided."""
    return [task]


@dataclass(frozen=True)
class Step:
    """Work that comes before the units, such as a search of hyperparameters that several units share."""

    tasks: Callable[[StudyContext], Sequence[Any]]
    """What is left to do; tasks do not depend on each other."""
    run: Callable[[Any, StudyContext], None]
    """Does one task, and leaves its result in the run's folder."""
    weight: float = 1.0
    """Duration in proportion to that of the units."""
    spreads: Callable[[Any, StudyContext, bool], bool] = never
    """``(task, context, few)``: whether a task is done from here, and its runs are tasks of a cluster; else it is one
    task of a cluster as a whole. ``few`` says that there are fewer tasks than workers."""
    divided: Callable[[Any, int], Sequence[Any]] = whole
    """``(task, parts)``: the task as at most so many tasks, which processes of this machine share."""


def _none_missing(spec: Spec, measures: Mapping[str, OutputMeasure]) -> list[str]:  # noqa: ARG001
    return []


def _in_order(unit: Any) -> Any:  # noqa: ARG001
    return 0


@dataclass(frozen=True)
class Procedure:
    """A way to make a study's rows. `PROCEDURES` lists those that are built in.

    All functions are module-level functions, so that worker processes can import them.
    """

    units: Callable[[Spec], Sequence[Any]]
    """The units of a study, in the order of its rows."""
    run: Callable[[Any, StudyContext], Sequence[Row]]
    """The rows of one unit."""
    missing: Callable[[Spec, Mapping[str, OutputMeasure]], list[str]] = _none_missing
    """Why a study cannot be run, each reason a clause without a full stop; empty where it can."""
    steps: tuple[Step, ...] = ()
    combine: Callable[[Sequence[Row]], Sequence[Row]] = list
    """The study's rows from those of all units."""
    spreads: Callable[[Any, StudyContext, bool], bool] = never
    """Whether the runs of a unit are tasks of a cluster; see `Step`."""
    priority: Callable[[Any], Any] = _in_order
    """Units with the lowest value are run first."""
    trains: bool = True
    """Whether members are trained for an objective, and the options of both are checked."""
    version: int = 1
    """Raised whenever the numbers of an unchanged study change: results of other versions are stale."""
    includes: tuple[str, ...] = ()
    """Names of other procedures whose work is a part of this one, such as the trainings that are attacked."""
    exact: bool = False
    """Whether measures are not random, so that one value is enough for a verdict."""
    trials: str = ""
    """The measure that counts the independent trials of which all other measures are shares."""

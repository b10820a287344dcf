"""The procedure "formula": results that papers prove, evaluated on a grid. Nothing is trained, and no data is read."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus import objectives, scores
from dissensus.studies.measures import OutputMeasure
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.requirements import unknown_axis
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec


def extreme(*, case: str, members: int, classes: int) -> Tensor:
    """Probabilities ``[M, 1, C]`` of members that are all uniform, or certain of a class each (LDR paper, Figure 2)."""
    if case == "unsure":
        return torch.full((members, 1, classes), 1 / classes)
    return torch.nn.functional.one_hot(torch.arange(members) % classes, classes).float().unsqueeze(1)


FORMULAS: dict[str, Callable[..., float]] = {
    "equivalent_beta": lambda *, alpha, members: objectives.gamma_from_alpha(members, alpha),
    "equivalent_alpha": lambda *, beta: objectives.alpha_from_beta(beta),
    "predictive_diversity": lambda *, case, members, classes: float(
        scores.predictive_diversity(extreme(case=case, members=members, classes=classes))
    ),
    "model_average": lambda *, case, members, classes: float(
        scores.model_average(extreme(case=case, members=members, classes=classes))
    ),
}
"""Measures of this procedure by name; their keywords are the axes of the grid."""


@dataclass(frozen=True)
class WholeGrid:
    """All points of a grid as one unit."""

    name: str = "grid"


def whole_grid(spec: Spec) -> Sequence[WholeGrid]:
    """One unit with all points."""
    del spec
    return [WholeGrid()]


def missing(spec: Spec, measures: Mapping[str, OutputMeasure]) -> list[str]:
    """Formulas that do not exist, and axes that they need or do not take."""
    del measures
    names = spec.evaluation.measures
    unknown = [f"no formula of 'evaluation.measures' is called {name!r}" for name in names if name not in FORMULAS]
    axes = [axis for name in names if name in FORMULAS for axis in spec.grid.keys() ^ _axes(name)]
    known = {axis for name in names if name in FORMULAS for axis in _axes(name)}
    return unknown or [
        unknown_axis(axis, known) if axis in spec.grid else f"'grid' needs the axis {axis!r}"
        for axis in dict.fromkeys(axes)
    ]


def _axes(name: str) -> set[str]:
    return set(inspect.signature(FORMULAS[name]).parameters)


def run(unit: WholeGrid, context: StudyContext) -> list[Row]:
    """One row per point of the grid."""
    del unit
    spec = context.spec
    points = [dict(zip(spec.grid, values, strict=True)) for values in itertools.product(*spec.grid.values())]
    formulas = {name: FORMULAS[name] for name in spec.evaluation.measures}
    return [
        Row(spec.data[0], point, 0, {name: formula(**point) for name, formula in formulas.items()}) for point in points
    ]


PROCEDURE = Procedure(whole_grid, run, missing, trains=False, exact=True)

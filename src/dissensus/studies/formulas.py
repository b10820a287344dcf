"""The procedure "formula": what the papers prove, evaluated on a grid. Nothing is trained, and no data is read."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dissensus import objectives, scores
from dissensus.studies.spec import Spec


def extreme(*, case: str, members: int, classes: int) -> Tensor:
    """Probabilities ``[M, 1, C]`` of members that are all unsure, or sure of a class each (LDR paper, Figure 2)."""
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
"""Measures by name, with the axes of a grid as keywords."""


def missing(spec: Spec) -> list[str]:
    """Formulas that there are none of, and axes that they need or do not have."""
    asked = spec.evaluation.measures
    unknown = [f"the formula {name!r}" for name in asked if name not in FORMULAS]
    axes = [axis for name in asked if name in FORMULAS for axis in spec.grid.keys() ^ _axes(name)]
    return unknown or [f"the axis {axis!r}" for axis in dict.fromkeys(axes)]


def _axes(name: str) -> set[str]:
    return set(inspect.signature(FORMULAS[name]).parameters)


def rows(spec: Spec) -> list[dict[str, Any]]:
    """One row per point of the grid."""
    points = [dict(zip(spec.grid, values, strict=True)) for values in itertools.product(*spec.grid.values())]
    taken = {name: FORMULAS[name] for name in spec.evaluation.measures}
    return [
        {"data": spec.data[0], **point, "seed": 0, "measures": {name: taken[name](**point) for name in taken}}
        for point in points
    ]

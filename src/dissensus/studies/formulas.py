"""The procedure "formula": what the papers prove, evaluated on a grid. Nothing is trained, and no data is read."""

import itertools
from collections.abc import Callable
from typing import Any

from dissensus import objectives
from dissensus.studies.spec import Spec

FORMULAS: dict[str, Callable[..., float]] = {
    "equivalent_beta": lambda *, alpha, members: objectives.gamma_from_alpha(members, alpha),
    "equivalent_alpha": lambda *, beta: objectives.alpha_from_beta(beta),
}
"""Measures by name, with the axes of a grid as keywords."""


def rows(spec: Spec) -> list[dict[str, Any]]:
    """One row per point of the grid."""
    points = [dict(zip(spec.grid, values, strict=True)) for values in itertools.product(*spec.grid.values())]
    taken = {name: FORMULAS[name] for name in spec.evaluation.measures}
    return [
        {"data": spec.data[0], **point, "seed": 0, "measures": {name: taken[name](**point) for name in taken}}
        for point in points
    ]

"""A sweep that ends before its first step: it checks the extremes of a space as the sweeps to come would."""

from collections.abc import Sequence
from typing import Any, NoReturn

from dissensus.train.notification import Entry, Start
from dissensus.train.sweeping import sweep
from dissensus.train.tuning.problem import Problem
from dissensus.train.tuning.space import Axis


class _Curtain(Exception):
    """Ends a rehearsal."""


class _AtTheStart:
    """A callback that lets nothing begin."""

    def on_start(self, start: Start) -> NoReturn:  # noqa: ARG002
        raise _Curtain

    def on_epoch(self, entry: Entry) -> NoReturn:  # noqa: ARG002
        raise _Curtain


def extremes(space: Sequence[Axis]) -> list[dict[str, Any]]:
    """Points that have every extreme of every axis once, beside the first of the others.

    >>> extremes([Axis("beta", (0.1, 0.5)), Axis("lr", (0.01,))])
    [{'beta': 0.1, 'lr': 0.01}, {'beta': 0.5, 'lr': 0.01}]
    """
    first = {axis.name: axis.extremes()[0] for axis in space}
    points = [{**first, axis.name: value} for axis in space for value in axis.extremes()]
    return [point for place, point in enumerate(points) if point not in points[:place]]


def rehearse(problem: Problem) -> None:
    """Refuse a space whose later brackets would hold what `sweep` refuses."""
    own = {"metric": problem.scorer.metric, "mode": problem.scorer.mode} if problem.scorer.metric else {}
    try:
        sweep(
            problem.build,
            [(problem.inputs(0, "train"), problem.targets(0, "train"))],
            problem.objective,
            grid=[{**point, "fold": 0, "seed": problem.sizes.seed} for point in extremes(problem.space)],
            members=problem.sizes.members,
            epochs=problem.sizes.epochs,
            validation=[(problem.inputs(0, "validation"), problem.targets(0, "validation"))],
            **{**own, **problem.settings, "callbacks": [_AtTheStart()]},
        )
    except _Curtain:
        return

"""Which run of a sweep, or which point over all seeds, is best; and the lines of a sweep's figure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dissensus import checks
from dissensus.ensemble import Ensemble
from dissensus.pages.training import SweepLine, standard_error

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Best:
    """The best run of a sweep, or the best point as a mean over its runs."""

    run: int
    """The number of the best run; of several that were averaged, the best single one."""
    point: dict[str, Any]
    """Its point of the grid, without the names that were averaged over."""
    value: float
    """The metric of the run, or its mean over ``runs``."""
    standard_error: float
    """Of the mean over ``runs``; NaN for one run."""
    runs: list[int]
    """The runs that ``value`` is the mean of."""
    ensemble: Ensemble = field(repr=False, compare=False)
    """The ensemble of ``run``: a copy in evaluation mode."""


def averaged_names(over: str | Iterable[str], points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the grid to average over; one that no point has is refused."""
    names = [over] if isinstance(over, str) else list(over)
    known = list(dict.fromkeys(name for point in points for name in point))
    for name in names:
        checks.one_of("over", name, known)
    return names


def values_of(rows: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """The metric of every run; NaN for runs that failed or have none. A metric that no run has is refused."""
    measured = [
        {
            name: value
            for name, value in row.items()
            if name not in point and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for row, point in zip(rows, points, strict=True)
    ]
    known = list(dict.fromkeys(name for numbers in measured for name in numbers))
    if metric == "validation" and metric not in known:
        fix = "Pass validation=... to the sweep, or name another: " + ", ".join(known) + "."
        checks.refuse("metric", "be in the table of the sweep", "'validation', which no run has", fix)
    checks.one_of("metric", metric, known)
    return [
        math.nan if row["status"] == "failed" else float(numbers.get(metric, math.nan))
        for row, numbers in zip(rows, measured, strict=True)
    ]


def checked_mode(mode: Mode | None, metric: str, of_sweep: Mode) -> Mode:
    """Whether lower or higher is better. For ``validation`` the sweep knows it, and a loss is better if it is lower."""
    if mode is None and metric in ("validation", "loss"):
        return of_sweep if metric == "validation" else "min"
    if mode is None:
        checks.refuse("mode", f"be 'min' or 'max' for {metric!r}", "None", "Is lower or higher better?")
    checks.one_of("mode", mode, ("min", "max"))
    return mode


def groups_of(points: Sequence[Mapping[str, Any]], over: Sequence[str]) -> list[tuple[dict[str, Any], list[int]]]:
    """Points without the names in ``over``, in the order of the grid, each with the numbers of its runs.

    >>> groups_of([{"beta": 0, "seed": 0}, {"beta": 0, "seed": 1}, {"beta": 1, "seed": 0}], ["seed"])
    [({'beta': 0}, [0, 1]), ({'beta': 1}, [2])]
    """
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for number, point in enumerate(points):
        rest = {name: value for name, value in point.items() if name not in over}
        known = next((runs for other, runs in groups if other == rest), None)
        if known is None:
            groups.append((rest, [number]))
        else:
            known.append(number)
    return groups


def best_group(
    points: Sequence[Mapping[str, Any]], values: Sequence[float], mode: Mode, over: Sequence[str]
) -> tuple[dict[str, Any], list[int], float, float]:
    """The point with the best mean, its runs, the mean and its standard error; of equals the first.

    A point counts if all of its runs have a number: a mean over the seeds that went well would favour a point that
    fails often.

    >>> points = [{"beta": beta, "seed": seed} for beta in (0, 1) for seed in (0, 1)]
    >>> best_group(points, [3.0, 1.0, 1.5, 1.7], "min", ["seed"])[:2]
    ({'beta': 1}, [2, 3])
    >>> best_group(points, [3.0, 1.0, 1.5, 1.7], "min", [])[:2]
    ({'beta': 0, 'seed': 1}, [1])
    """
    sign = 1.0 if mode == "min" else -1.0
    groups = groups_of(points, over)
    whole = [(point, runs) for point, runs in groups if not any(math.isnan(values[run]) for run in runs)]
    if not whole:
        each = "every point has a run that failed" if over else "every run failed"
        raise ValueError(f"there is no best run: {each}, or has no number. `table()` says why.")
    means = [sum(values[run] for run in runs) / len(runs) for _, runs in whole]
    place = min(range(len(whole)), key=lambda place: sign * means[place])
    point, runs = whole[place]
    return point, runs, means[place], standard_error([values[run] for run in runs])


def lines_over(
    points: Sequence[Mapping[str, Any]], values: Sequence[float], x: str, over: Sequence[str]
) -> tuple[list[Any], list[SweepLine]]:
    """The values of a setting in order, and one line for each combination of the others; NaN is left out."""
    found = [point[x] for point in points if x in point]
    distinct = [value for place, value in enumerate(found) if value not in found[:place]]
    if all(isinstance(value, int | float) for value in distinct):
        distinct.sort()
    lines: list[SweepLine] = []
    for rest, runs in groups_of(points, [x, *over]):
        at = [[values[run] for run in runs if points[run].get(x) == value] for value in distinct]
        finite = [[number for number in numbers if math.isfinite(number)] for numbers in at]
        if any(finite):
            lines.append(SweepLine(", ".join(f"{name} = {_word(value)}" for name, value in rest.items()), finite))
    return [_word(value) if not isinstance(value, int | float) else value for value in distinct], lines


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return getattr(value, "__qualname__", None) or str(value)

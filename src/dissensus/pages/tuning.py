"""Figures of a search: error against diversity, and the values of candidates over epochs."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from dissensus.pages.style import COLOURS, INK, add_legend, blank_figure, figure_style, legend_height

Kind = Literal["chosen", "reference", "finalist", "collusive", "dropped"]
_LOOKS: dict[str, tuple[str, str, str, float]] = {
    "chosen": ("the choice", COLOURS[0], "o", 90),
    "reference": ("independent training", COLOURS[1], "s", 60),
    "finalist": ("trained to the end", COLOURS[4], "D", 32),
    "collusive": ("set aside as collusive", COLOURS[3], "X", 50),
    "dropped": ("dropped at a rung", INK, "o", 16),
}
"""Name, colour, marker and its area for every kind of candidate, from the front to the back."""


class FrontierPoint(NamedTuple):
    """A candidate on the plane of error and diversity."""

    name: str
    diversity: float
    error: float
    kind: Kind


@figure_style()
def frontier(points: Sequence[FrontierPoint], edge: Sequence[FrontierPoint], x_label: str, y_label: str) -> Any:
    """Candidates by diversity and error, with a line through those that none beats in both."""
    shown = [point for point in points if math.isfinite(point.error) and math.isfinite(point.diversity)]
    kinds = [kind for kind in _LOOKS if any(point.kind == kind for point in shown)]
    names = [_LOOKS[kind][0] for kind in kinds] + (["frontier"] if len(edge) > 1 else [])
    figure = blank_figure(5.6, 3.9 + legend_height(names))
    axes = figure.subplots()
    if len(edge) > 1:
        line = sorted(edge, key=lambda point: point.diversity)
        x, y = [point.diversity for point in line], [point.error for point in line]
        axes.plot(x, y, color=INK, alpha=0.35, linewidth=1.2, linestyle="--", label="frontier")
    for kind in reversed(kinds):  # the choice lies above all others
        words, colour, marker, area = _LOOKS[kind]
        own = [point for point in shown if point.kind == kind]
        axes.scatter(
            [point.diversity for point in own],
            [point.error for point in own],
            s=area,
            marker=marker,
            color=colour,
            alpha=0.45 if kind == "dropped" else 1.0,
            linewidths=0,
            label=words,
        )
    xs = [point.diversity for point in shown]
    for point in shown:
        if point.kind != "dropped" and len([p for p in shown if p.kind != "dropped"]) <= 8:
            is_right = 2 * point.diversity > min(xs) + max(xs)
            place = {"xytext": (-7 if is_right else 7, 7), "ha": "right" if is_right else "left"}
            where = (point.diversity, point.error)
            axes.annotate(point.name, where, textcoords="offset points", fontsize=9, **place)
    axes.margins(0.14)
    axes.set(xlabel=x_label, ylabel=y_label)
    add_legend(figure, names)
    return figure


class CandidateCurve(NamedTuple):
    """The values of a candidate over epochs."""

    name: str
    points: Sequence[tuple[int, float]]
    kind: Kind


@figure_style()
def rung_curves(curves: Sequence[CandidateCurve], rungs: Sequence[int], y_label: str) -> Any:
    """The best mean value of every candidate so far, with the rungs at which the worst were dropped."""
    kinds = [kind for kind in _LOOKS if any(curve.kind == kind for curve in curves)]
    names = [_LOOKS[kind][0] for kind in kinds]
    figure = blank_figure(5.6, 3.9 + legend_height(names))
    axes = figure.subplots()
    for rung in rungs:
        axes.axvline(rung, color=INK, alpha=0.25, linewidth=1)
    for kind in reversed(kinds):
        words, colour, marker, _ = _LOOKS[kind]
        thin = kind == "dropped"
        for number, curve in enumerate([curve for curve in curves if curve.kind == kind]):
            x, y = [epoch for epoch, _ in curve.points], [value for _, value in curve.points]
            label = words if not number else None
            style = {"color": colour, "linewidth": 0.9 if thin else 2.0, "alpha": 0.45 if thin else 1.0}
            axes.plot(x, y, label=label, **style)
            axes.plot(x[-1:], y[-1:], marker="x" if thin else marker, markersize=4 if thin else 6, **style)
    every = [value for curve in curves for _, value in curve.points]
    if every and min(every) > 0 and max(every) > 5 * min(every):
        axes.set_yscale("log")
    if any(curve.points and curve.points[-1][0] >= 20 for curve in curves):
        axes.set_xscale("log")
        ticks = sorted({1, *rungs, max(curve.points[-1][0] for curve in curves if curve.points)})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="epoch", ylabel=y_label)
    add_legend(figure, names)
    return figure


class SettingPoint(NamedTuple):
    """The value of a setting, and the metric there with its standard error."""

    setting: float
    value: float
    error: float
    kind: Kind


@figure_style()
def over_setting(points: Sequence[SettingPoint], x_label: str, y_label: str) -> Any:
    """The metric over one setting; bars are one standard error to either side."""
    shown = sorted((point for point in points if math.isfinite(point.value)), key=lambda point: point.setting)
    kinds = [kind for kind in _LOOKS if any(point.kind == kind for point in shown)]
    names = [_LOOKS[kind][0] for kind in kinds]
    figure = blank_figure(5.6, 3.9 + legend_height(names))
    axes = figure.subplots()
    whole = [point for point in shown if point.kind != "dropped"]
    axes.plot([p.setting for p in whole], [p.value for p in whole], color=INK, alpha=0.35, linewidth=1.2)
    for kind in reversed(kinds):
        words, colour, marker, area = _LOOKS[kind]
        own = [point for point in shown if point.kind == kind]
        x, y = [point.setting for point in own], [point.value for point in own]
        errors = [point.error if math.isfinite(point.error) else 0.0 for point in own]
        faint = 0.45 if kind == "dropped" else 1.0
        axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=colour, capsize=3, alpha=faint)
        axes.scatter(x, y, s=area, marker=marker, color=colour, alpha=faint, linewidths=0, label=words)
    axes.set(xlabel=x_label, ylabel=y_label)
    add_legend(figure, names)
    return figure

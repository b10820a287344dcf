"""Figures of trainings: losses over epochs, and a measure over the settings of a sweep."""

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from dissensus.pages.style import COLOURS, DASHES, INK, MARKERS, add_legend, blank_figure, figure_style, legend_height

_MOST_MARKED = 25
"""Points of a line up to which each has a marker."""
_WIDE = 10.0
"""An axis is logarithmic where the largest number is at least this many times the smallest."""
_WIDE_SETTINGS = 20.0
"""The same for settings, whose values are often a few powers of two."""


class LearningCurves(NamedTuple):
    """The numbers of a training, epoch by epoch."""

    name: str
    """Stands before the names of its lines, in dashes; empty for the training itself."""
    loss: Sequence[float]
    members: Sequence[Sequence[float]]
    """The loss of each member, or nothing."""
    validation: Sequence[Sequence[float]]
    """What is watched on validation data: one number, one per member, or nothing."""
    marks: Sequence[tuple[int, float]]
    """Epochs whose weights were kept, and what was watched then."""
    starts: Sequence[int]
    """Epochs before each member's training, where members are trained in turn."""


@figure_style()
def learning_curves(trainings: Sequence[LearningCurves], log: bool | None = None) -> Any:
    """Losses of trainings over their epochs, and beside them what is watched on validation data."""
    validated = any(any(curves.validation) for curves in trainings)
    figure = blank_figure(9.6 if validated else 5.6, 3.7)
    panels = figure.subplots(1, 2 if validated else 1, squeeze=False)[0]
    for number, curves in enumerate(trainings):
        _draw_losses(panels[0], curves, dash=DASHES[number % len(DASHES)])
        if validated:
            _draw_validation(panels[1], curves, dash=DASHES[number % len(DASHES)])
    titles = ("training", "validation")
    in_turn = len(trainings[0].starts) > 1
    for axes, title in zip(panels, titles, strict=False):
        axes.set(title=title, xlabel="epoch, members in turn" if in_turn else "epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        for start in trainings[0].starts[1:]:
            axes.axvline(start + 0.5, color=INK, alpha=0.25, linewidth=1)
        _scale(axes.set_yscale, [value for curves in trainings for value in _drawn(curves, title)], _WIDE, log)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    panels[0].set_ylabel("loss")
    return figure


def _named(curves: LearningCurves, words: str) -> str:
    return f"{curves.name}: {words}" if curves.name else words


def _options(epochs: Sequence[int], dash: Any) -> dict[str, Any]:
    """A line of few epochs has markers, so that one epoch can be seen."""
    return {"linestyle": dash, "marker": "o" if len(epochs) <= _MOST_MARKED else "", "markersize": 3.5}


def _draw_losses(axes: Any, curves: LearningCurves, dash: Any) -> None:
    epochs = range(1, len(curves.loss) + 1)
    options = _options(epochs, dash)
    several = [(epoch, values) for epoch, values in zip(epochs, curves.members, strict=True) if len(values) > 1]
    if several:
        x = [epoch for epoch, _ in several]
        means = [sum(values) / len(values) for _, values in several]
        low, high = [min(values) for _, values in several], [max(values) for _, values in several]
        faint = 0.2 if not curves.name else 0.1
        axes.fill_between(x, low, high, color=COLOURS[4], alpha=faint, linewidth=0, label=_named(curves, "members"))
        axes.plot(x, means, color=COLOURS[4], label=_named(curves, "mean of members"), **options)
    axes.plot(epochs, curves.loss, color=COLOURS[0], label=_named(curves, "objective"), **options)


def _draw_validation(axes: Any, curves: LearningCurves, dash: Any) -> None:
    epochs = range(1, len(curves.loss) + 1)
    watched = max(map(len, curves.validation), default=0)
    for member, colour in zip(range(watched), cycle(COLOURS[1:]), strict=False):
        x = [epoch for epoch, values in zip(epochs, curves.validation, strict=True) if len(values) > member]
        y = [values[member] for values in curves.validation if len(values) > member]
        name = "watched" if watched == 1 else f"member {member}"
        label = _named(curves, name) if watched <= len(COLOURS) else None
        axes.plot(x, y, color=colour, label=label, **_options(x, dash))
    if curves.marks:
        x, y = zip(*curves.marks, strict=True)
        style = {"s": 70, "facecolors": "none", "edgecolors": INK, "linewidths": 1.5, "zorder": 3}
        axes.scatter(x, y, label=_named(curves, "kept"), **style)


def _drawn(curves: LearningCurves, title: str) -> list[float]:
    """All numbers of a training in the panel of this title."""
    several = curves.members if title == "training" else curves.validation
    return [*(curves.loss if title == "training" else []), *(value for values in several for value in values)]


def _scale(set_scale: Any, values: Iterable[float], wide: float, log: bool | None) -> None:
    """Make an axis logarithmic if that is asked for, or if its numbers span much and are all above zero."""
    finite = [value for value in values if math.isfinite(value)]
    if log is None:
        log = bool(finite) and min(finite) > 0 and max(finite) >= wide * min(finite)
    if log:
        set_scale("log")


class SweepLine(NamedTuple):
    """One line over the values of a setting: the runs' numbers at each value, such as those of all seeds."""

    name: str
    values: Sequence[Sequence[float]]


@figure_style()
def sweep_lines(
    x: Sequence[Any],
    lines: Sequence[SweepLine],
    *,
    x_label: str,
    y_label: str,
    note: str = "",
    log: bool | None = None,
) -> Any:
    """The mean of every line with bars of one standard error, and the single runs behind it as points."""
    names = [line.name for line in lines if line.name]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in x)
    places = list(x) if numeric else list(range(len(x)))
    figure = blank_figure(5.8, 3.9 + legend_height(names))
    axes = figure.subplots()
    for line, colour, dash, marker in zip(lines, cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False):
        shown = [(place, values) for place, values in zip(places, line.values, strict=True) if values]
        means = [sum(values) / len(values) for _, values in shown]
        errors = [standard_error(values) for _, values in shown]
        several = any(len(values) > 1 for _, values in shown)
        if several:
            points = [(place, value) for place, values in shown for value in values]
            axes.scatter(*zip(*points, strict=True), s=10, color=colour, alpha=0.35, linewidths=0)
        axes.errorbar(
            [place for place, _ in shown],
            means,
            yerr=errors if several else None,
            color=colour,
            linestyle=dash,
            marker=marker,
            markersize=5,
            capsize=3,
            label=line.name or None,
        )
    _scale(axes.set_xscale, places if numeric else [], _WIDE_SETTINGS, None)
    every = [value for line in lines for values in line.values for value in values]
    _scale(axes.set_yscale, every, _WIDE, log)
    if numeric and axes.get_xscale() == "log":
        axes.set_xticks(places, [f"{value:g}" for value in places])
        axes.set_xticks([], minor=True)
    elif not numeric:
        rotation = 0 if sum(len(str(value)) for value in x) < 40 else 30
        side = "center" if not rotation else "right"
        axes.set_xticks(places, [str(value) for value in x], rotation=rotation, ha=side)
        axes.margins(x=0.1)
    axes.set(xlabel=x_label, ylabel=y_label)
    if note:
        axes.set_title(note)
    if len(names) > 1:
        add_legend(figure, names)
    return figure


def standard_error(values: Sequence[float]) -> float:
    """The standard error of a mean; NaN for a single number.

    >>> standard_error([1.0, 3.0]), standard_error([1.0])
    (1.0, nan)
    """
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))

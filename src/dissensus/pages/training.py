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


def _broken(curves: LearningCurves, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Epochs and numbers of a line that breaks off where the training of another member begins."""
    x: list[float] = []
    y: list[float] = []
    for place, value in enumerate(values):
        if place and place in curves.starts:
            x, y = [*x, place + 0.5], [*y, math.nan]
        x, y = [*x, place + 1], [*y, value]
    return x, y


def _draw_losses(axes: Any, curves: LearningCurves, dash: Any) -> None:
    options = _options(range(len(curves.loss)), dash)
    if any(len(values) > 1 for values in curves.members):
        known = [values if len(values) > 1 else [math.nan] for values in curves.members]
        x, low = _broken(curves, [min(values) for values in known])
        _, high = _broken(curves, [max(values) for values in known])
        _, means = _broken(curves, [sum(values) / len(values) for values in known])
        label = None if curves.name else "from best to worst member"
        axes.fill_between(x, low, high, color=COLOURS[4], alpha=0.1 if curves.name else 0.2, linewidth=0, label=label)
        axes.plot(x, means, color=COLOURS[4], label=_named(curves, "mean of members"), **options)
    axes.plot(*_broken(curves, curves.loss), color=COLOURS[0], label=_named(curves, "objective"), **options)


def _draw_validation(axes: Any, curves: LearningCurves, dash: Any) -> None:
    watched = max(map(len, curves.validation), default=0)
    for member, colour in zip(range(watched), cycle(COLOURS[1:]), strict=False):
        x, y = _broken(curves, [v[member] if len(v) > member else math.nan for v in curves.validation])
        name = "watched" if watched == 1 else f"member {member}"
        label = _named(curves, name) if watched <= len(COLOURS) else None
        axes.plot(x, y, color=colour, label=label, **_options(range(len(curves.loss)), dash))
    if curves.marks:
        x, y = zip(*curves.marks, strict=True)
        style = {"s": 70, "facecolors": "none", "edgecolors": INK, "linewidths": 1.5, "zorder": 3}
        axes.scatter(x, y, label=None if curves.name else "kept", **style)


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
    from matplotlib.transforms import ScaledTranslation

    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in x)
    places = list(x) if numeric else list(range(len(x)))
    figure = blank_figure(5.8, 3.9 + legend_height(names))
    axes = figure.subplots()
    has_bars = any(len(values) > 1 for line in lines for values in line.values)
    styles = zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False)
    for number, (line, (colour, dash, marker)) in enumerate(zip(lines, styles, strict=False)):
        # Bars stand a few points apart, so that those at one value do not hide each other.
        shift = min(3.0, 18.0 / len(lines)) * (number - (len(lines) - 1) / 2) if has_bars else 0.0
        aside = axes.transData + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
        shown = [(place, values) for place, values in zip(places, line.values, strict=True) if values]
        means = [sum(values) / len(values) for _, values in shown]
        errors = [standard_error(values) for _, values in shown]
        several = any(len(values) > 1 for _, values in shown)
        if several:
            points = [(place, value) for place, values in shown for value in values]
            dots = axes.scatter(*zip(*points, strict=True), s=14, color=colour, alpha=0.35, linewidths=0)
            dots.set_offset_transform(aside)
        bars = axes.errorbar(
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
        for artist in bars.get_children():  # after the fact, since axes take no limits from what is moved
            artist.set_transform(aside)
    _scale(axes.set_xscale, places if numeric else [], _WIDE_SETTINGS, None)
    every = [value for line in lines for values in line.values for value in values]
    _scale(axes.set_yscale, every, _WIDE, log)
    if numeric and axes.get_xscale() == "log":
        axes.set_xticks(places, [f"{value:g}" for value in places])
        axes.set_xticks([], minor=True)
    elif numeric and all(isinstance(value, int) for value in x):
        axes.xaxis.get_major_locator().set_params(integer=True)
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

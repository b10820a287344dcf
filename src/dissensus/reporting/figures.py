"""The figures of a report."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from dissensus.pages import style
from dissensus.reporting.curves import Bin, RiskCurve

_MOST_POINTS = 500
"""Points that are drawn one by one; more of them are a picture."""
_FLAT_RISK = 1.15
"""Room above the highest point of a curve."""


def _errors(bins: Sequence[Bin]) -> Any:
    """Distances of the ends of intervals, as matplotlib takes them."""
    return np.array(
        [[item.value.value - item.value.low for item in bins], [item.value.high - item.value.value for item in bins]]
    ).clip(min=0)


@style.figure_style()
def reliability(bins: Sequence[Bin], total: int) -> Any:
    """Accuracy over confidence, and how many examples have which confidence."""
    figure = style.blank_figure(height=4.2)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.4, 1]})
    centres = [item.centre for item in bins]
    above.plot([0, 1], [0, 1], color=style.INK, alpha=0.4, linewidth=1)
    accuracies = [item.value.value for item in bins]
    above.errorbar(
        centres, accuracies, _errors(bins), fmt="o", color=style.COLOURS[0], markersize=5, elinewidth=1.4, zorder=3
    )
    above.set(ylabel="accuracy", ylim=(-0.02, 1.04))
    below.bar(centres, [item.examples / total for item in bins], width=0.045, color=style.COLOURS[0], alpha=0.7)
    below.set(xlabel="confidence", ylabel="share", xlim=(0, 1.02))
    for axis in (above.yaxis, below.yaxis, below.xaxis):
        style.percent_axis(axis)
    return figure


@style.figure_style()
def risk_coverage(curves: Mapping[str, RiskCurve], best: Sequence[float], label: str, *, shares: bool) -> Any:
    """Risk over coverage for several scores, with the band of the first."""
    names = [*curves, "best possible"]
    figure = style.blank_figure(height=4.0 + style.legend_height(names))
    axes = figure.subplots()
    for i, ((name, curve), colour, dash) in enumerate(
        zip(curves.items(), cycle(style.COLOURS), cycle(style.DASHES), strict=False)
    ):
        kept = [(place + 1) / len(curve.risk) for place in range(len(curve.risk))]
        risks = [point.value for point in curve.risk]
        if i == 0:
            band = [point.low for point in curve.risk], [point.high for point in curve.risk]
            style.draw_line(axes, kept, risks, band, color=colour, label=name)
        else:
            axes.plot(kept, risks, color=colour, linestyle=dash, label=name)
    kept = [(place + 1) / len(best) for place in range(len(best))]
    axes.plot(kept, best, color=style.INK, alpha=0.5, linewidth=1, label="best possible")
    overall = next(iter(curves.values())).risk[-1].value
    axes.axhline(overall, color=style.INK, alpha=0.25, linewidth=1)
    axes.set(xlabel="share of examples kept", ylabel=label, xlim=(0, 1.0))
    tops = [max(point.value for point in curve.risk[len(curve.risk) // 5 :]) for curve in curves.values()]
    top = _FLAT_RISK * max(overall, *tops)
    axes.set_ylim(0, top if top > 0 else 1)
    style.percent_axis(axes.xaxis)
    if shares:
        style.percent_axis(axes.yaxis)
    style.add_legend(figure, names)
    return figure


@style.figure_style()
def error_by_rank(bins: Sequence[Bin], name: str, label: str) -> Any:
    """Share of errors in groups of about equal size, from the least to the most uncertain."""
    figure = style.blank_figure(height=3.4)
    axes = figure.subplots()
    sizes = np.array([item.examples for item in bins])
    ends = sizes.cumsum() / sizes.sum()
    width = sizes / sizes.sum()
    values = [item.value.value for item in bins]
    axes.bar(ends - width / 2, values, width=0.86 * width, color=style.COLOURS[0], alpha=0.75)
    axes.errorbar(ends - width / 2, values, _errors(bins), fmt="none", ecolor=style.INK, elinewidth=1.2)
    axes.set(xlabel=f"examples, by rising {name}", ylabel=label, xlim=(0, 1))
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        style.percent_axis(axis)
    return figure


@style.figure_style()
def error_by_deviation(bins: Sequence[Bin], name: str, label: str) -> Any:
    """Errors over deviations in groups of about equal size, with the diagonal on which both are equal."""
    figure = style.blank_figure(height=3.4)
    axes = figure.subplots()
    centres = [item.centre for item in bins]
    values = [item.value.value for item in bins]
    axes.errorbar(centres, values, _errors(bins), fmt="o", color=style.COLOURS[0], markersize=5, elinewidth=1.4)
    reach = min(max(centres), max(item.value.high for item in bins if item.value.high == item.value.high))
    axes.plot([0, reach], [0, reach], color=style.INK, alpha=0.4, linewidth=1)
    axes.set(xlabel=name, ylabel=label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    return figure


@style.figure_style()
def predicted_and_true(points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """Targets over predictions, with the diagonal; targets have a colour each where they are few."""
    has_legend = 1 < len(names) <= len(style.COLOURS)
    figure = style.blank_figure(height=4.2 + (style.legend_height(names) if has_legend else 0))
    axes = figure.subplots()
    predictions = np.array([point["prediction"] for point in points])
    targets = np.array([point["target"] for point in points])
    for place, (name, colour, marker) in enumerate(
        zip(names, cycle(style.COLOURS), cycle(style.MARKERS), strict=False)
    ):
        axes.scatter(
            predictions[:, place],
            targets[:, place],
            s=14,
            alpha=0.6,
            color=colour if has_legend else style.COLOURS[0],
            marker=marker if has_legend else style.MARKERS[0],
            label=name,
            linewidths=0,
            rasterized=len(points) * len(names) > _MOST_POINTS,
        )
    both = np.concatenate([predictions.ravel(), targets.ravel()])
    ends = [float(both.min()), float(both.max())]
    axes.plot(ends, ends, color=style.INK, alpha=0.4, linewidth=1)
    axes.set(xlabel="prediction", ylabel="target")
    if has_legend:
        style.add_legend(figure, names)
    return figure


@style.figure_style()
def interval_calibration(levels: Sequence[Mapping[str, Any]], label: str) -> Any:
    """Observed over expected shares, level by level."""
    figure = style.blank_figure(height=4.0)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=style.INK, alpha=0.4, linewidth=1)
    bins = [Bin(entry["level"], entry["share"], 0) for entry in levels]
    values = [item.value.value for item in bins]
    axes.errorbar(
        [item.centre for item in bins],
        values,
        _errors(bins),
        fmt="o-",
        color=style.COLOURS[0],
        markersize=4,
        elinewidth=1.4,
    )
    axes.set(xlabel="level that is promised", ylabel=label, xlim=(0, 1), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        style.percent_axis(axis)
    return figure


@style.figure_style()
def pictures(entries: Sequence[tuple[Any, str]], columns: int = 3) -> Any:
    """Pictures ``[C, H, W]`` in bytes in rows, each below a few lines; large enough for a narrow screen."""
    rows = -(-len(entries) // columns)
    lines = max(words.count("\n") + 1 for _, words in entries)
    figure = style.blank_figure(1.75 * columns, rows * (1.6 + 0.19 * lines))
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, (picture, words) in zip(grid, entries, strict=False):
        pixels = np.asarray(picture, dtype=np.uint8).transpose(1, 2, 0)
        axes.imshow(_enlarged(pixels if pixels.shape[2] == 3 else pixels[..., 0]), cmap="gray", vmin=0, vmax=255)
        axes.set_title(words, loc="center", fontsize=11)
    return figure


@style.figure_style()
def score_histogram(inside: Any, outside: Any, names: tuple[str, str], score: str) -> Any:
    """How a score is distributed on two sets."""
    figure = style.blank_figure(height=3.4)
    axes = figure.subplots()
    both = np.concatenate([inside, outside])
    low, high = float(both.min()), float(both.max())
    edges = np.linspace(low, high if high > low else low + 1, 31)
    for values, name, colour, dash in zip((inside, outside), names, style.COLOURS, style.DASHES, strict=False):
        shares = np.histogram(values, edges)[0] / len(values)
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.18)
        axes.stairs(shares, edges, color=colour, linestyle=dash, linewidth=1.6, label=name)
    axes.set(xlabel=score, ylabel="share of examples")
    axes.set_ylim(bottom=0)
    style.percent_axis(axes.yaxis)
    style.add_legend(figure, names)
    return figure


@style.figure_style()
def roc_curves(curves: Mapping[str, tuple[Any, Any]]) -> Any:
    """ROC curves by name, beside the diagonal of chance."""
    names = list(curves)
    figure = style.blank_figure(height=3.6 + style.legend_height(names))
    axes = figure.subplots()
    for (name, rates), colour, dash in zip(curves.items(), cycle(style.COLOURS), cycle(style.DASHES), strict=False):
        axes.plot(*rates, color=colour, linestyle=dash, label=name)
    axes.plot([0, 1], [0, 1], color=style.INK, alpha=0.4, linewidth=1)
    axes.set(xlabel="usual examples flagged", ylabel="shifted examples flagged", xlim=(0, 1), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        style.percent_axis(axis)
    style.add_legend(figure, names)
    return figure


_SIDE = 96
"""Pixels that a small picture is enlarged to, so that a browser does not blur it."""


def _enlarged(pixels: Any) -> Any:
    """A picture of which each pixel is repeated, if it is small; every so many pixels of one that is large."""
    longest = max(pixels.shape[:2])
    if longest < _SIDE:
        times = -(-_SIDE // longest)
        return pixels.repeat(times, 0).repeat(times, 1)
    step = max(1, longest // (3 * _SIDE))
    return pixels[::step, ::step]

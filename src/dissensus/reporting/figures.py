"""The figures of a report."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from dissensus.pages import style
from dissensus.reporting.curves import Bin, RiskCurve

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
def error_by_uncertainty(bins: Sequence[Bin], name: str, label: str, *, shares: bool, diagonal: bool = False) -> Any:
    """Error over uncertainty in groups of about equal size."""
    figure = style.blank_figure(height=3.4)
    axes = figure.subplots()
    centres = [item.centre for item in bins]
    values = [item.value.value for item in bins]
    axes.errorbar(centres, values, _errors(bins), fmt="o-", color=style.COLOURS[0], markersize=5, elinewidth=1.4)
    if diagonal:
        reach = max(*centres, *values) if len(bins) > 1 else max(centres[0], values[0])
        axes.plot([0, reach], [0, reach], color=style.INK, alpha=0.4, linewidth=1)
    axes.set(xlabel=name, ylabel=label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=min(0, *centres) if len(centres) > 1 else None)
    if shares:
        style.percent_axis(axes.yaxis)
    return figure


@style.figure_style()
def predicted_and_true(points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """Targets over predictions, with the diagonal."""
    figure = style.blank_figure(height=4.2 if len(names) < 2 else 4.2 + style.legend_height(names))
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
            color=colour,
            marker=marker,
            label=name,
            linewidths=0,
            rasterized=len(points) > 500,
        )
    both = np.concatenate([predictions.ravel(), targets.ravel()])
    ends = [float(both.min()), float(both.max())]
    axes.plot(ends, ends, color=style.INK, alpha=0.4, linewidth=1)
    axes.set(xlabel="prediction", ylabel="target")
    if len(names) > 1:
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
    """Pictures ``[C, H, W]`` in bytes in rows, each with a few lines below it; large enough for a narrow screen."""
    columns = min(columns, len(entries))
    rows = -(-len(entries) // columns)
    lines = max(words.count("\n") + 1 for _, words in entries)
    figure = style.blank_figure(1.75 * 3, rows * (1.5 + 0.2 * lines))
    grid = figure.subplots(rows, 3, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, (picture, words) in zip(grid, entries, strict=False):
        pixels = np.asarray(picture, dtype=np.uint8).transpose(1, 2, 0)
        axes.imshow(_enlarged(pixels if pixels.shape[2] == 3 else pixels[..., 0]), cmap="gray", vmin=0, vmax=255)
        axes.text(0.5, -0.04, words, transform=axes.transAxes, ha="center", va="top", fontsize=9.5)
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

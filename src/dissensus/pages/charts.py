"""Charts of general shape: lines with bands, points, counts, matrices, maps and pictures."""

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

from dissensus.pages.style import (
    CLASS_COLOURS,
    COLOURS,
    DARK_INK,
    DASHES,
    INK,
    MARKERS,
    SHADES,
    TITLE_SIZE,
    add_legend,
    blank_figure,
    draw_line,
    figure_style,
    legend_height,
)

_LIGHT_INK_ABOVE = 0.8
"""The share above which light ink reads better on its shade."""
_FLAT = 0.6
"""An axis begins at zero where the smallest value is below this share of the largest."""
_MOST_MARKED = 25
"""Points of a line up to which each has a marker."""
_MOST_POINTS = 500
"""Points of a cloud that are drawn one by one; more of them are a picture."""
_MOST_IN_A_PAIR = 7
"""Rows of a matrix that can stand beside another one."""

Matrix = Sequence[Sequence[float | None]]
Cloud = tuple[str, Sequence[Sequence[float]]]
"""A name and its points ``[x, y]``."""
Curve = tuple[str, Sequence[float], Sequence[float]]
"""A name, all x and all y."""


class Line(NamedTuple):
    """One line: a name, and for every x the mean over seeds and its standard error."""

    name: str
    mean: Sequence[float]
    error: Sequence[float]


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    y_label: str
    lines: Sequence[Line]


@figure_style()
def line_chart(x: Sequence[float] | Sequence[str], x_label: str, panels: Sequence[Panel]) -> Any:
    """Panels side by side: means over seeds, with bands of one standard error to either side."""
    longest = max((len(value) for value in x if isinstance(value, str)), default=0)
    names = [line.name for line in panels[0].lines] if len(panels) == 1 else []
    figure = blank_figure(5.2 * len(panels), 3.3 + 0.1 * max(0, longest - 4) + legend_height(names))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, x, x_label, panel)
    if len(names) > 1:
        add_legend(figure, names)
    return figure


@figure_style()
def panel_grid(x: Sequence[float] | Sequence[str], x_label: str, panels: Sequence[Panel], columns: int = 3) -> Any:
    """Small panels in rows, each with its own axis of values."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = blank_figure(2.75 * columns, 2.5 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, x, x_label, panel)
    return figure


def _draw_panel(axes: Any, x: Sequence[float] | Sequence[str], x_label: str, panel: Panel) -> None:
    marker = "o" if len(x) <= _MOST_MARKED else ""
    for line, colour, dash in zip(panel.lines, cycle(COLOURS), cycle(DASHES), strict=False):
        low = [mean - error for mean, error in zip(line.mean, line.error, strict=True)]
        high = [mean + error for mean, error in zip(line.mean, line.error, strict=True)]
        options = {"linestyle": dash, "color": colour, "marker": marker, "markersize": 4, "label": line.name}
        draw_line(axes, x, line.mean, (low, high), **options)
    values = [value for line in panel.lines for value in line.mean if math.isfinite(value)]
    if 0 <= min(values) < _FLAT * max(values):  # lines that all lie far above zero would look flat beside it
        axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel=panel.y_label, title=panel.title)
    if isinstance(x[0], str):
        axes.set_xticks(range(len(x)), x, rotation=35, ha="right", rotation_mode="anchor")


@figure_style()
def scatter_chart(clouds: Sequence[Cloud], curves: Sequence[Curve], x_label: str, y_label: str, title: str) -> Any:
    """Clouds of points, and curves to compare them with."""
    names = [name for name, *_ in (*curves, *clouds)]
    figure = blank_figure(5.6, 3.6 + legend_height(names))
    draw_scatter(figure.subplots(), clouds, curves, x_label, y_label, title)
    add_legend(figure, names)
    return figure


def draw_scatter(
    axes: Any, clouds: Sequence[Cloud], curves: Sequence[Curve], x_label: str, y_label: str, title: str = ""
) -> None:
    """Draw clouds of points and curves on axes that exist."""
    for (name, x, y), dash in zip(curves, DASHES[1:], strict=False):
        axes.plot(x, y, linestyle=dash, color=INK, alpha=0.5, linewidth=1.5, label=name)
    for (name, points), colour, marker in zip(clouds, cycle(COLOURS), cycle(MARKERS), strict=False):
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, color=colour, marker=marker, s=28, label=name, rasterized=len(points) > _MOST_POINTS)
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.set_ylim(bottom=0)


@figure_style()
def roc_chart(lines: Sequence[Line], x_label: str, y_label: str, title: str) -> Any:
    """True positive rates at false positive rates from 0 to 1, beside the diagonal of chance."""
    x = [i / (len(lines[0].mean) - 1) for i in range(len(lines[0].mean))]
    figure = line_chart(x, x_label, [Panel(title, y_label, lines)])
    figure.axes[0].plot([0, 1], [0, 1], color=INK, alpha=0.4, linewidth=1)
    figure.axes[0].set(xlim=(0, 1), ylim=(0, 1.02))
    return figure


@figure_style()
def histogram(edges: Sequence[float], lines: Sequence[Line], x_label: str, y_label: str, title: str) -> Any:
    """Counts in bins, one outline with a light filling per line."""
    names = [line.name for line in lines]
    figure = blank_figure(5.2, 3.3 + legend_height(names))
    axes = figure.subplots()
    for line, colour, dash in zip(lines, cycle(COLOURS), cycle(DASHES), strict=False):
        axes.stairs(line.mean, edges, fill=True, color=colour, alpha=0.18)
        axes.stairs(line.mean, edges, color=colour, linestyle=dash, linewidth=1.6, label=line.name)
    axes.set(xlabel=x_label, ylabel=y_label, title=title, xlim=(edges[0], edges[-1]))
    axes.set_ylim(bottom=0)
    add_legend(figure, names)
    return figure


@figure_style()
def gallery(rows: Sequence[tuple[str, Sequence[tuple[Any, str]]]]) -> Any:
    """Rows of pictures ``[C, H, W]`` in bytes, each with words below it."""
    import numpy as np

    columns = max(len(pictures) for _, pictures in rows)
    figure = blank_figure(1.55 * columns, 2.5 * len(rows))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for row_axes, (title, pictures) in zip(grid, rows, strict=True):
        for axes in row_axes:
            axes.set_axis_off()
        for axes, (picture, words) in zip(row_axes, pictures, strict=False):
            pixels = np.asarray(picture, dtype=np.uint8).transpose(1, 2, 0)
            axes.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=255)
            axes.text(0.5, -0.05, words, transform=axes.transAxes, ha="center", va="top", fontsize=9)
        row_axes[0].set_title(title, loc="left", fontsize=11)
    return figure


@figure_style()
def matrices(entries: Sequence[tuple[str, Matrix]], x_label: str, y_label: str, title: str) -> Any:
    """Square matrices of shares in per cent, each under a title; the last row and column are the ensemble."""
    from matplotlib.colors import LinearSegmentedColormap

    size = len(entries[0][1])
    side, columns = (2.6, min(2, len(entries))) if size <= _MOST_IN_A_PAIR else (5.2, 1)
    rows = -(-len(entries) // columns)
    shades = LinearSegmentedColormap.from_list("shares", SHADES)
    figure = blank_figure(5.2, 0.4 + rows * (side + 0.35))
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE_SIZE)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.08}).ravel()
    for axes in grid[len(entries) :]:
        axes.set_axis_off()
    for place, (axes, (name, matrix)) in enumerate(zip(grid, entries, strict=False)):
        _draw_matrix(axes, matrix, shades)
        is_last_row, is_first_column = place + columns >= len(entries), place % columns == 0
        axes.set(xlabel=x_label if is_last_row else "", ylabel=y_label if is_first_column else "", aspect="equal")
        axes.set_title(name, fontsize=10.5)
    return figure


def _draw_matrix(axes: Any, matrix: Matrix, shades: Any) -> None:
    import numpy as np

    values = np.array([[math.nan if value is None else value for value in row] for row in matrix])
    axes.pcolormesh(values, cmap=shades, vmin=0, vmax=1, edgecolors="none")
    for (row, column), value in np.ndenumerate(values):
        known = math.isfinite(value)
        colour = (SHADES[0] if value > _LIGHT_INK_ABOVE else DARK_INK) if known else INK
        words = f"{100 * value:.0f}" if known else "–"
        axes.text(column + 0.5, row + 0.5, words, ha="center", va="center", color=colour)
    ticks, names = [i + 0.5 for i in range(len(values))], [*map(str, range(1, len(values))), "all"]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@figure_style()
def maps(members: Sequence[Sequence[Sequence[float]]], classes: Sequence[str], title: str) -> Any:
    """Points ``[x, y, class]``, a square for every member, coloured by class."""
    columns = min(3, len(members))
    rows = -(-len(members) // columns)
    labels = sorted({int(point[2]) for points in members for point in points})
    has_legend = len(labels) <= len(CLASS_COLOURS)
    figure = blank_figure(5.2, 0.3 + rows * (4.9 / columns + 0.25) + 0.5 * has_legend, dpi=220)
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE_SIZE)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(members) :]:
        axes.set_axis_off()
    for place, (axes, points) in enumerate(zip(grid, members, strict=False)):
        for label in labels:
            x, y = ([point[i] for point in points if int(point[2]) == label] for i in (0, 1))
            colour = CLASS_COLOURS[label % len(CLASS_COLOURS)]
            name = classes[label] if has_legend and place == 0 else None
            axes.scatter(x, y, color=colour, s=7, linewidths=0, label=name, rasterized=True)  # as paths: megabytes
        axes.set(xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), xticks=[], yticks=[], aspect="equal")
        axes.set_title(f"member {place + 1}", fontsize=10.5)
        axes.spines[:].set(visible=True, alpha=0.3)
    if has_legend:
        figure.legend(
            loc="outside lower center", ncols=5, fontsize=10.5, handletextpad=0.1, columnspacing=0.9, markerscale=2.2
        )
    return figure

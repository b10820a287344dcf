"""Figures as SVG that take their ink from the page, so that they read in light, in dark and in print."""

import io
import math
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dissensus import diversity, metrics

INK = "#010203"
"""Stands for the page's text colour: replaced by ``currentColor`` in the SVG."""
COLOURS = ("#149398", "#dc5568", "#8d70d4", "#c98a1b", "#5a7fb8", "#6f9a3c", "#b04f9b", "#7a6a5a")
COLOURS_OF_CLASSES = (*COLOURS, "#e58a5c", "#8b8f98")
SHADES = ("#eef6f5", "#7cc4c5", "#0b5f68")
"""Of shares from 0 to 1."""
DARK = "#1c2428"
"""Ink on a light shade, whatever the page's own."""
_DARK_FROM = 0.8
"""The share above which light ink is read better."""
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
MARKS = ("o", "s", "^", "D", "v", "P")
_LEGEND_WIDTH = 62
"""Letters that fit side by side below a panel."""
_FLAT = 0.6
"""Share of the largest value above which the smallest does without the axis' zero."""
MOST_MARKED = 25
"""Points of a line that get a mark each."""

MOST_IN_A_PAIR = 7
"""Rows of a matrix that stands beside another one."""
Matrix = Sequence[Sequence[float | None]]


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


STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dissensus",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2,
}


def styled() -> Any:
    """What is drawn inside looks like our figures."""
    try:
        from matplotlib import rc_context
    except ImportError as reason:
        raise ImportError("figures need matplotlib: pip install 'dissensus[report]'") from reason
    return rc_context(STYLE)  # pyright: ignore[reportArgumentType]  # matplotlib lists its keys one by one


def draw(x: Sequence[float] | Sequence[str], x_label: str, panels: Sequence[Panel]) -> Any:
    """A matplotlib figure, panels side by side: means over seeds, with bands of one standard error around them."""
    with styled():
        from matplotlib.figure import Figure

        words = max((len(value) for value in x if isinstance(value, str)), default=0)
        names = [line.name for line in panels[0].lines] if len(panels) == 1 else []
        height = 3.3 + 0.1 * max(0, words - 4) + _legend_height(names)
        figure = Figure(figsize=(5.2 * len(panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, x, x_label, panel)
        if len(names) > 1:
            figure.legend(loc="outside lower center", ncols=_beside(names))
    return figure


def _beside(names: Sequence[str]) -> int:
    """Entries of a legend that fit beside each other."""
    longest = max(map(len, names), default=0)
    return max(1, min(3, len(names), _LEGEND_WIDTH // (longest + 6)))


def _legend_height(names: Sequence[str]) -> float:
    """Inches that a legend takes beyond two rows."""
    return 0.25 * max(0, -(-len(names) // _beside(names)) - 2)


Cloud = tuple[str, Sequence[Sequence[float]]]
"""Points ``[x, y]`` and their name."""
Curve = tuple[str, Sequence[float], Sequence[float]]
"""A name, all x and all y."""


def scatter(clouds: Sequence[Cloud], curves: Sequence[Curve], x_label: str, y_label: str, title: str) -> Any:
    """A figure with clouds of points, and curves to read them by."""
    with styled():
        from matplotlib.figure import Figure

        names = [name for name, *_ in (*curves, *clouds)]
        figure = Figure(figsize=(5.6, 3.6 + _legend_height(names)), layout="constrained")
        draw_scatter(figure.subplots(), clouds, curves, x_label, y_label, title)
        figure.legend(loc="outside lower center", ncols=_beside(names))
    return figure


def draw_scatter(
    axes: Any, clouds: Sequence[Cloud], curves: Sequence[Curve], x_label: str, y_label: str, title: str = ""
) -> None:
    """Draw clouds of points and curves on axes that exist."""
    for (name, x, y), dash in zip(curves, DASHES[1:], strict=False):
        axes.plot(x, y, linestyle=dash, color=INK, alpha=0.5, linewidth=1.5, label=name)
    for (name, points), colour, mark in zip(clouds, cycle(COLOURS), cycle(MARKS), strict=False):
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, color=colour, marker=mark, s=28, label=name)
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.set_ylim(bottom=0)


def plane(clouds: Sequence[Cloud], best: float, classes: int, x_label: str, y_label: str, title: str = "") -> Any:
    """Pairs of members on the plane of accuracy and diversity, between the curves of `dissensus.diversity`.

    Args:
        clouds: Pairs ``[accuracy, diversity]``, with a name each.
        best: Accuracy of the network that the curves begin at.
        classes: How many there are.
        x_label: What is along the plane.
        y_label: What is up.
        title: Of the figure.
    """
    return scatter(clouds, plane_curves(clouds, best, classes), x_label, y_label, title)


def plane_curves(clouds: Sequence[Cloud], best: float, classes: int) -> list[Curve]:
    """The curves of `plane`: independent errors above, flipped predictions below."""
    low = min((pair[0] for _, pairs in clouds for pair in pairs), default=best)
    others = torch.linspace(max(0.0, low - 0.3 * (best - low) - 0.01), best, 41, dtype=torch.float64)
    others = others[others < 1]  # a network that never errs has no place on the plane
    left, diversities = diversity.flipped(best, torch.linspace(0, 1, 401, dtype=torch.float64), classes)
    shown = (left >= others[0]) & (left < 1)
    return [
        ("independent errors", others.tolist(), diversity.independent_errors(best, others, classes).tolist()),
        ("flipped predictions", left[shown].tolist(), diversities[shown].tolist()),
    ]


def budgets(given: Sequence[float], plans: Sequence[Sequence[Any]], words: str) -> Any:
    """What a budget buys, over S: the cost of a member, and what members have in common (`dissensus.masks.plan`)."""
    x = [row.scale for row in plans[0]]
    none = [0.0] * len(x)
    costs = [Line(f"budget {b:g}", [row.member for row in rows], none) for b, rows in zip(given, plans, strict=True)]
    overlap = [Line("overlap", [row.iou for row in plans[0]], none)]
    panels = [
        Panel(f"a member's {words}", "times those of one network", costs),
        Panel("overlap of members", "intersection over union", overlap),
    ]
    figure = draw(x, "S", panels)
    figure.axes[0].legend()
    return figure


def detection(within: dict[str, Any], beyond: dict[str, dict[str, Any]], most: int = 4) -> Any:
    """For every set from outside: how the best score is distributed, and the ROC curves of the best few."""
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.6, 3.3 * len(beyond)), layout="constrained")
        rows = figure.subplots(len(beyond), 2, squeeze=False)
        for (left, right), (name, scores) in zip(rows, beyond.items(), strict=True):
            areas = {score: metrics.auroc(within[score], scores[score]).value for score in within}
            best, *others = sorted(areas, key=lambda score: -areas[score])
            both = (within[best].tolist(), scores[best].tolist())
            low, high = min(map(min, both)), max(map(max, both))
            edges = [low + (high - low or 1.0) * i / 40 for i in range(41)]
            for values, label, colour in zip(both, ("within", name), COLOURS, strict=False):
                left.hist(values, edges, density=True, alpha=0.6, color=colour, label=label)
            left.set(xlabel=best.replace("_", " "), ylabel="density", title=f"{name}: the best score")
            left.legend()
            for score, colour, dash in zip([best, *others][:most], cycle(COLOURS), cycle(DASHES), strict=False):
                rates = [part.tolist() for part in metrics.roc(within[score], scores[score])]
                words = f"{score.replace('_', ' ')}, {areas[score]:.3f}"
                right.plot(*rates, linestyle=dash, color=colour, label=words)
            right.plot([0, 1], [0, 1], color=INK, alpha=0.3, linewidth=1)
            right.set(xlabel="false alarms", ylabel="found", title=f"{name}: ROC")
            right.legend()
    return figure


def gallery(rows: Sequence[tuple[str, Sequence[tuple[Any, str]]]]) -> Any:
    """Rows of pictures ``[C, H, W]`` in bytes, each with words below it."""
    most = max(len(pictures) for _, pictures in rows)
    with styled():
        import numpy as np
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.55 * most, 2.25 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), most, squeeze=False)
        for axes_of_row, (title, pictures) in zip(grid, rows, strict=True):
            for axes in axes_of_row:
                axes.set_axis_off()
            for axes, (picture, words) in zip(axes_of_row, pictures, strict=False):
                pixels = np.asarray(picture, dtype=np.uint8).transpose(1, 2, 0)
                axes.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=255)
                axes.text(0.5, -0.05, words, transform=axes.transAxes, ha="center", va="top", fontsize=7)
            axes_of_row[0].set_title(title, loc="left", fontsize=9)
    return figure


def matrices(entries: Sequence[tuple[str, Matrix]], x_label: str, y_label: str, title: str) -> Any:
    """Shares as squares of numbers in per cent, each under a title: members and, last, all of them together."""
    size = len(entries[0][1])
    ticks = [*map(str, range(1, size)), "all"]
    side, columns = (2.6, min(2, len(entries))) if size <= MOST_IN_A_PAIR else (5.2, 1)
    rows = -(-len(entries) // columns)
    with styled():
        import numpy as np
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        shades = LinearSegmentedColormap.from_list("shares", SHADES)
        figure = Figure(figsize=(5.2, 0.4 + rows * (side + 0.35)), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])
        grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.08}).ravel()
        for axes in grid[len(entries) :]:
            axes.set_axis_off()
        for place, (axes, (name, entry)) in enumerate(zip(grid, entries, strict=False)):
            values = np.array([[math.nan if v is None else v for v in line] for line in entry])
            axes.pcolormesh(values, cmap=shades, vmin=0, vmax=1, edgecolors="none")
            for (row, column), value in np.ndenumerate(values):
                known = math.isfinite(value)
                colour = (SHADES[0] if value > _DARK_FROM else DARK) if known else INK
                words = f"{100 * value:.0f}" if known else "–"
                axes.text(column + 0.5, row + 0.5, words, ha="center", va="center", color=colour)
            below, beside = place + columns >= len(entries), place % columns == 0
            axes.set(xlabel=x_label if below else "", ylabel=y_label if beside else "", aspect="equal")
            axes.set_title(name, fontsize=10.5)
            axes.set_xticks([i + 0.5 for i in range(size)], ticks)
            axes.set_yticks([i + 0.5 for i in range(size)], ticks)
            axes.invert_yaxis()
            axes.grid(False)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
    return figure


def maps(members: Sequence[Sequence[Sequence[float]]], classes: Sequence[str], title: str) -> Any:
    """Points ``[x, y, class]`` of every member in a square of its own, coloured by class."""
    columns = min(3, len(members))
    rows = -(-len(members) // columns)
    seen = sorted({int(point[2]) for points in members for point in points})
    named = len(seen) <= len(COLOURS_OF_CLASSES)
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, 0.3 + rows * (4.9 / columns + 0.25) + 0.5 * named), dpi=220, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(members) :]:
            axes.set_axis_off()
        for place, (axes, points) in enumerate(zip(grid, members, strict=False)):
            for label in seen:
                x, y = ([point[i] for point in points if int(point[2]) == label] for i in (0, 1))
                colour = COLOURS_OF_CLASSES[label % len(COLOURS_OF_CLASSES)]
                name = classes[label] if named and place == 0 else None
                axes.scatter(x, y, color=colour, s=7, linewidths=0, label=name, rasterized=True)  # as paths: megabytes
            axes.set(xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), xticks=[], yticks=[], aspect="equal")
            axes.set_title(f"member {place + 1}", fontsize=10.5)
            axes.spines[:].set(visible=True, alpha=0.3)
        if named:
            figure.legend(
                loc="outside lower center", ncols=5, fontsize=9.5, handletextpad=0.1, columnspacing=0.9, markerscale=2.2
            )
    return figure


def roc(lines: Sequence[Line], x_label: str, y_label: str, title: str) -> Any:
    """True positive rates at false positive rates from 0 to 1, beside the diagonal that chance would be."""
    x = [i / (len(lines[0].mean) - 1) for i in range(len(lines[0].mean))]
    with styled():
        figure = draw(x, x_label, [Panel(title, y_label, lines)])
        figure.axes[0].plot([0, 1], [0, 1], color=INK, alpha=0.4, linewidth=1)
        figure.axes[0].set(xlim=(0, 1), ylim=(0, 1.02))
    return figure


def histogram(edges: Sequence[float], lines: Sequence[Line], x_label: str, y_label: str, title: str) -> Any:
    """Counts in bins, one outline with a light filling per line."""
    names = [line.name for line in lines]
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, 3.3 + _legend_height(names)), layout="constrained")
        axes = figure.subplots()
        for line, colour, dash in zip(lines, cycle(COLOURS), cycle(DASHES), strict=False):
            axes.stairs(line.mean, edges, fill=True, color=colour, alpha=0.18)
            axes.stairs(line.mean, edges, color=colour, linestyle=dash, linewidth=1.6, label=line.name)
        axes.set(xlabel=x_label, ylabel=y_label, title=title, xlim=(edges[0], edges[-1]))
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=_beside(names))
    return figure


def _draw_panel(axes: Any, x: Sequence[float] | Sequence[str], x_label: str, panel: Panel) -> None:
    for line, colour, dash in zip(panel.lines, cycle(COLOURS), cycle(DASHES), strict=False):
        mark = "o" if len(x) <= MOST_MARKED else ""
        axes.plot(x, line.mean, linestyle=dash, color=colour, marker=mark, markersize=4, label=line.name)
        low = [m - e for m, e in zip(line.mean, line.error, strict=True)]
        high = [m + e for m, e in zip(line.mean, line.error, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    values = [value for line in panel.lines for value in line.mean if math.isfinite(value)]
    if 0 <= min(values) < _FLAT * max(values):  # lines that all lie far above zero would look flat beside it
        axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel=panel.y_label, title=panel.title)
    if isinstance(x[0], str):
        axes.set_xticks(range(len(x)), x, rotation=35, ha="right", rotation_mode="anchor")


def save(figure: Any, file: Path) -> None:
    """The figure on white as PDF, PNG or SVG, by the file's ending."""
    figure.savefig(file, facecolor="white", bbox_inches="tight", dpi=200)


def as_png(figure: Any) -> bytes:
    """The figure on white, for places that take no SVG."""
    held = io.BytesIO()
    for axes in figure.axes:
        if len(axes.lines) > 1 and not figure.legends:
            axes.legend(frameon=False)
    figure.savefig(held, format="png", dpi=110, facecolor="white", bbox_inches="tight")
    return held.getvalue()


def as_svg(figure: Any, description: str) -> str:
    """The figure as inline SVG with a spoken description and the page's ink."""
    held = io.StringIO()
    with styled():
        figure.savefig(held, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = held.getvalue()
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    body = body.replace(INK, "currentColor")
    start, rest = body.split(">", 1)
    return f'{start} role="img" aria-label="{description}">{rest}'

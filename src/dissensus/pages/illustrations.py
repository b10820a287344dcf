"""Pictures of what papers explain by a drawing: learners that collude, the volume they span, where they disagree."""

from collections.abc import Sequence
from itertools import combinations, cycle
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from dissensus.pages.style import COLOURS, DASHES, INK, SHADES, blank_figure, figure_style

Values = Sequence[float]
_WORDS_SIZE = 10.5
_AZIMUTH, _ELEVATION = -60.0, 24.0
"""The direction, in degrees, from which a box is seen."""
_SHADES_OF_DISAGREEMENT = ("#c98a1b00", "#c98a1ba0")
"""From none, through which the page is seen, to certain disagreement."""


class LearnerPanel(NamedTuple):
    """Learners of a curve: every member's predictions at ``x``, and the examples that they fit."""

    title: str
    words: str
    x: Values
    members: Sequence[Values]
    train_x: Values
    train_y: Values


class VolumePanel(NamedTuple):
    """Members' unit vectors of non-maximal predictions: one value per class, 0 at the label."""

    title: str
    words: str
    members: Sequence[Values]
    label: int


class DisagreementPanel(NamedTuple):
    """Two classes in the plane: every member's probability of class 1 on a square, and the examples."""

    title: str
    words: str
    members: Sequence[Values]
    """Row by row from below; a square number of values each."""
    x: Values
    y: Values
    labels: Values
    high_loss: Values | None = None
    """1 at examples of high loss, on which members are told to disagree, and 0 at the others."""
    unlabelled: tuple[Values, Values] | None = None
    """x and y of other examples on which members are told to disagree."""


def _headline(axes: Any, title: str, words: str) -> None:
    """A title, and smaller words between it and the axes."""
    height = 1.35 * _WORDS_SIZE * (words.count("\n") + 1)
    axes.set_title(title, pad=height + 6)
    axes.annotate(words, (0, 1), (0, 4), "axes fraction", "offset points", fontsize=_WORDS_SIZE, va="bottom")


@figure_style()
def learners(panels: Sequence[LearnerPanel], x_label: str, y_label: str) -> Any:
    """Members' curves and their mean, a panel per ensemble. The first two members have colours of their own."""
    figure = blank_figure(2.75 * len(panels) + 0.3, 3.7)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(grid, panels, strict=True):
        for i, (member, name) in enumerate(zip(panel.members, ("f₁", "f₂"), strict=False)):
            axes.plot(panel.x, member, color=COLOURS[i], linewidth=1.8, zorder=3, label=name)
        for i, member in enumerate(panel.members[2:]):
            name = None if i else "other learners"
            axes.plot(panel.x, member, color=INK, alpha=0.4, linewidth=1.1, zorder=2, label=name)
        mean = np.mean(np.asarray(panel.members, dtype=float), 0)
        axes.plot(panel.x, mean, color=INK, linewidth=2.2, linestyle="--", zorder=4, label="ensemble's prediction")
        axes.scatter(panel.train_x, panel.train_y, s=9, color=INK, alpha=0.3, linewidths=0, label="examples")
        axes.set(xlabel=x_label, xlim=(min(panel.x), max(panel.x)))
        _headline(axes, panel.title, panel.words)
    grid[0].set_ylabel(y_label)
    _shared_legend(figure, *grid[0].get_legend_handles_labels())
    return figure


def _shared_legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    """One row below all panels."""
    place = {"loc": "outside lower center", "ncols": len(names)}
    figure.legend(handles, names, **place, fontsize=10, columnspacing=1.2, handletextpad=0.5, handlelength=1.6)


def in_space(vectors: Float[ndarray, "K C"]) -> Float[ndarray, "K K"]:
    """K vectors in K dimensions, with the same lengths and angles: the symmetric square root of their Gram matrix.

    Orthogonal unit vectors become the axes, and unit vectors that are alike lie near the diagonal between the axes. The
    determinant of the result is the volume that they span.

    >>> in_space(np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> in_space(np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])).round(4).tolist()
    [[0.7071, 0.7071], [0.7071, 0.7071]]
    """
    values, basis = np.linalg.eigh(vectors @ vectors.T)
    return (basis * np.sqrt(np.maximum(values, 0))) @ basis.T


@figure_style()
def spanned_volumes(panels: Sequence[VolumePanel], x_label: str, y_label: str) -> Any:
    """Members' vectors as bars, and the box that three of them span; a row per ensemble."""
    figure = blank_figure(6.8, 2.75 * len(panels) + 0.4)
    grid = figure.subplots(len(panels), 2, squeeze=False, gridspec_kw={"width_ratios": [1.7, 1]})
    for (bars, box), panel in zip(grid, panels, strict=True):
        classes, count = np.arange(len(panel.members[0])), len(panel.members)
        for k, (member, colour) in enumerate(zip(panel.members, cycle(COLOURS), strict=False)):
            places = classes + (k - (count - 1) / 2) * 0.8 / count
            bars.bar(places, member, 0.8 / count, color=colour, label=f"network {k + 1}")
        bars.axvspan(panel.label - 0.5, panel.label + 0.5, color=INK, alpha=0.07, linewidth=0)
        bars.text(panel.label, 0.5, "true class", rotation=90, ha="center", va="center", fontsize=_WORDS_SIZE)
        bars.set(xticks=classes, ylim=(0, 1.02), xlim=(-0.5, len(classes) - 0.5), ylabel=y_label, axisbelow=True)
        bars.grid(False, axis="x")
        _headline(bars, panel.title, panel.words)
        _draw_box(box, np.asarray(panel.members, dtype=float))
    grid[-1][0].set_xlabel(x_label)
    _shared_legend(figure, *grid[0][0].get_legend_handles_labels())
    return figure


def _draw_box(axes: Any, members: Float[ndarray, "K C"]) -> None:
    """Three vectors from the origin, and the box that they span, seen from a fixed direction; of others, the volume."""
    vectors = in_space(members)
    words = f"squared volume\non this example {np.linalg.det(vectors) ** 2:.2f}"
    axes.set_title(words, fontsize=_WORDS_SIZE, loc="center")
    axes.set(aspect="equal", xlim=(-0.1, 2.45), ylim=(-0.3, 2.1))
    axes.set_axis_off()
    if len(vectors) != 3:
        return
    turn, tilt = np.radians([_AZIMUTH, _ELEVATION])
    right = np.array([-np.sin(turn), np.cos(turn), 0.0])
    up = np.array([-np.sin(tilt) * np.cos(turn), -np.sin(tilt) * np.sin(turn), np.cos(tilt)])
    flat = vectors @ np.stack([right, up], 1)
    for a, b in combinations(range(3), 2):
        for corner in (np.zeros(2), flat[3 - a - b]):  # a face, and the one opposite
            face = np.array([corner, corner + flat[a], corner + flat[a] + flat[b], corner + flat[b]])
            axes.fill(*face.T, facecolor=SHADES[1], alpha=0.22)
            axes.fill(*face.T, fill=False, edgecolor=INK, alpha=0.5, linewidth=0.7)
    for vector, colour in zip(flat, COLOURS, strict=False):
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", vector, (0, 0), arrowprops=arrow)


@figure_style()
def disagreement_maps(panels: Sequence[DisagreementPanel], extent: float, x_label: str, y_label: str) -> Any:
    """Where members predict different classes, with their boundaries and the examples they were told to disagree on."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.lines import Line2D

    shades = LinearSegmentedColormap.from_list("disagreement", _SHADES_OF_DISAGREEMENT)
    figure = blank_figure(2.75 * len(panels) + 0.3, 3.9, dpi=220)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(grid, panels, strict=True):
        probs = np.asarray(panel.members, dtype=float)
        side = round(probs.shape[1] ** 0.5)
        probs = probs.reshape(-1, side, side)
        ticks = np.linspace(-extent, extent, side)
        axes.contourf(ticks, ticks, pair_disagreement(probs), levels=np.linspace(0, 1, 11), cmap=shades)
        for member, dash in zip(probs, cycle(DASHES), strict=False):
            axes.contour(ticks, ticks, member, levels=[0.5], colors=[INK], linestyles=[dash], linewidths=1.4)
        _draw_examples(axes, panel)
        axes.set(xlabel=x_label, aspect="equal", xlim=(-extent, extent), ylim=(-extent, extent))
        axes.grid(False)
        _headline(axes, panel.title, panel.words)
    grid[0].set_ylabel(y_label)
    dot = {"marker": "o", "linestyle": "", "markersize": 4, "markeredgewidth": 0}
    handles = {
        "class 0": Line2D([], [], color=COLOURS[0], **dot),
        "class 1": Line2D([], [], color=COLOURS[1], **dot),
        "unlabelled": Line2D([], [], color=COLOURS[2], marker="x", linestyle="", markersize=5),
        "high loss": Line2D([], [], color=INK, marker="o", linestyle="", markersize=7, fillstyle="none"),
        "members' boundaries": Line2D([], [], color=INK, linewidth=1.4),
    }
    _shared_legend(figure, list(handles.values()), list(handles))
    return figure


def pair_disagreement(probs: Float[ndarray, "M H W"]) -> Float[ndarray, "H W"]:
    """The probability that two members give different classes, averaged over pairs, from probabilities of class 1.

    >>> pair_disagreement(np.array([[[1.0, 0.5]], [[0.0, 0.5]]])).tolist()
    [[1.0, 0.5]]
    """
    pairs = [a * (1 - b) + b * (1 - a) for a, b in combinations(probs, 2)]
    return np.mean(pairs, 0)


def _draw_examples(axes: Any, panel: DisagreementPanel) -> None:
    x, y, labels = (np.asarray(values, dtype=float) for values in (panel.x, panel.y, panel.labels))
    for label in (0, 1):
        chosen = labels == label
        colour = COLOURS[label]
        axes.scatter(x[chosen], y[chosen], s=8, color=colour, linewidths=0, alpha=0.8, rasterized=True)
    if panel.unlabelled is not None:
        axes.scatter(*panel.unlabelled, s=16, color=COLOURS[2], marker="x", linewidths=1, rasterized=True)
    if panel.high_loss is not None:
        ringed = np.asarray(panel.high_loss) > 0
        axes.scatter(x[ringed], y[ringed], s=50, facecolors="none", edgecolors=INK, linewidths=0.9)

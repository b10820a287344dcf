"""Figures of particular quantities: the accuracy-diversity plane, budgets of masks, detection of shifted data."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch

from dissensus import diversity, metrics
from dissensus.pages.charts import Cloud, Curve, Line, Panel, line_chart, scatter_chart
from dissensus.pages.style import COLOURS, DASHES, INK, MARKERS, add_legend, blank_figure, figure_style, legend_height


def plane(clouds: Sequence[Cloud], best: float, classes: int, x_label: str, y_label: str, title: str = "") -> Any:
    """Pairs of members on the plane of accuracy and diversity, between the curves of `dissensus.diversity`.

    Args:
        clouds: Pairs ``[accuracy, diversity]`` under a name each.
        best: Accuracy of the network at which the curves begin.
        classes: Number of classes.
        x_label: Label of the axis of accuracy.
        y_label: Label of the axis of diversity.
        title: Title of the figure.
    """
    return scatter_chart(clouds, plane_curves(clouds, best, classes), x_label, y_label, title)


def plane_curves(clouds: Sequence[Cloud], best: float, classes: int) -> list[Curve]:
    """The curves of `plane`: independent errors above, flipped predictions below."""
    low = min((pair[0] for _, pairs in clouds for pair in pairs), default=best)
    accuracies = torch.linspace(max(0.0, low - 0.3 * (best - low) - 0.01), best, 41, dtype=torch.float64)
    accuracies = accuracies[accuracies < 1]  # a network that never errs has no place on the plane
    flipped, diversities = diversity.flipped(best, torch.linspace(0, 1, 401, dtype=torch.float64), classes)
    inside = (flipped >= accuracies[0]) & (flipped < 1)
    independent = diversity.independent_errors(best, accuracies, classes)
    return [
        ("independent errors", accuracies.tolist(), independent.tolist()),
        ("flipped predictions", flipped[inside].tolist(), diversities[inside].tolist()),
    ]


class MethodPoint(NamedTuple):
    """A method on the plane of accuracy and diversity."""

    family: str
    """Has a colour."""
    variant: str
    """Of the method, such as its objective; has a marker."""
    accuracy: float
    diversity: float
    cost: float
    """In multiples of one network: the area of the marker."""


_AREA = 30
"""Area of the marker of a method that costs one network, in points²."""


@figure_style()
def cost_plane(methods: Sequence[MethodPoint], x_label: str, y_label: str, title: str = "") -> Any:
    """Methods on the plane of accuracy and diversity, with what they cost as areas."""
    families = list(dict.fromkeys(method.family for method in methods))
    variants = list(dict.fromkeys(method.variant for method in methods))
    costs = sorted({round(method.cost) or 1 for method in methods})
    sizes = list(dict.fromkeys([costs[0], costs[-1]]))
    names = [*families, *(name for name in variants if name), *(f"costs {size} networks" for size in sizes)]
    figure = blank_figure(6.4, 4.0 + legend_height(names))
    axes = figure.subplots()
    for method in sorted(methods, key=lambda method: -method.cost):  # small ones lie above large ones
        axes.scatter(
            method.accuracy,
            method.diversity,
            s=_AREA * method.cost,
            marker=MARKERS[variants.index(method.variant) % len(MARKERS)],
            color=COLOURS[families.index(method.family) % len(COLOURS)],
            alpha=0.65,
            linewidths=0.8,
            edgecolors=INK,
        )
    for family, colour in zip(families, cycle(COLOURS), strict=False):
        axes.scatter([], [], s=2 * _AREA, color=colour, label=family)
    for variant, marker in zip(variants, cycle(MARKERS), strict=False):
        if variant:
            axes.scatter([], [], s=2 * _AREA, marker=marker, facecolors="none", edgecolors=INK, label=variant)
    for size in sizes:
        words = "costs one network" if size == 1 else f"costs {size} networks"
        axes.scatter([], [], s=_AREA * size, facecolors="none", edgecolors=INK, label=words)
    axes.margins(0.1)  # for whole markers at the edges
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    add_legend(figure, names)
    return figure


def mask_budgets(budgets: Sequence[float], plans: Sequence[Sequence[Any]], cost: str) -> Any:
    """A member's cost at each budget, and the overlap of members, over S (rows of `dissensus.masks.plan`)."""
    scales = [row.scale for row in plans[0]]
    zeros = [0.0] * len(scales)
    costs = [
        Line(f"budget {budget:g}", [row.member for row in rows], zeros)
        for budget, rows in zip(budgets, plans, strict=True)
    ]
    overlap = [Line("overlap", [row.iou for row in plans[0]], zeros)]
    panels = [
        Panel(f"a member's {cost}", "times those of one network", costs),
        Panel("overlap of members", "intersection over union", overlap),
    ]
    figure = line_chart(scales, "S", panels)
    figure.axes[0].legend()
    return figure


@figure_style()
def detection(inside: dict[str, Any], outside: dict[str, dict[str, Any]], most: int = 4) -> Any:
    """For every set of shifted data: the distribution of the best score, and the ROC curves of the best few.

    Args:
        inside: Scores of the data that others are told from, by the name of the score.
        outside: The same for every set of shifted data, by its name.
        most: Number of ROC curves.
    """
    figure = blank_figure(9.6, 3.3 * len(outside))
    rows = figure.subplots(len(outside), 2, squeeze=False)
    for (left, right), (name, scores) in zip(rows, outside.items(), strict=True):
        areas = {score: metrics.auroc(inside[score], scores[score]).value for score in inside}
        ranked = sorted(areas, key=lambda score: -areas[score])
        samples = (inside[ranked[0]].tolist(), scores[ranked[0]].tolist())
        low, high = min(map(min, samples)), max(map(max, samples))
        edges = [low + (high - low or 1.0) * i / 40 for i in range(41)]
        for values, label, colour in zip(samples, ("within", name), COLOURS, strict=False):
            left.hist(values, edges, density=True, alpha=0.6, color=colour, label=label)
        left.set(xlabel=ranked[0].replace("_", " "), ylabel="density", title=f"{name}: the best score")
        left.legend()
        for score, colour, dash in zip(ranked[:most], cycle(COLOURS), cycle(DASHES), strict=False):
            rates = [part.tolist() for part in metrics.roc(inside[score], scores[score])]
            right.plot(*rates, linestyle=dash, color=colour, label=f"{score.replace('_', ' ')}, {areas[score]:.3f}")
        right.plot([0, 1], [0, 1], color=INK, alpha=0.3, linewidth=1)
        right.set(xlabel="false positive rate", ylabel="true positive rate", title=f"{name}: ROC")
        right.legend()
    return figure

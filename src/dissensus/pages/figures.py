"""Figures of particular quantities: the accuracy-diversity plane, budgets of masks, detection of shifted data."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch

from dissensus import diversity, metrics
from dissensus.pages.charts import Cloud, Curve, Line, Panel, line_chart, scatter_chart
from dissensus.pages.style import COLOURS, DASHES, INK, blank_figure, figure_style


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

"""The figures of a study, from its summary: the paper's axes, our means and bands."""

import base64
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dissensus.pages import charts, illustrations
from dissensus.pages.figures import MethodPoint, cost_plane, plane
from dissensus.studies.labels import class_labels, measure_label, method_label
from dissensus.studies.procedures.disagreement import EXTENT
from dissensus.studies.procedures.train import HISTOGRAM
from dissensus.studies.results import Curve, Measure, Point, Summary
from dissensus.studies.spec import FigureSection, Spec

Points = Sequence[Point]
_CLASSES = 10
"""Number of classes of every data set whose members are shown on the plane."""
_WIDE = 50
"""Ratio of the largest to the smallest value of an axis beyond which its values stand at equal distances."""
_SYMBOLS = {"beta": "β", "alpha": "α", "members": "M"}


def figures(spec: Spec, summary: Summary) -> list[tuple[Any, str]]:
    """Matplotlib figures with their titles: one per panel, or one per point where a figure can show only one."""
    if spec.figure is None:
        return []
    single = [(point, draw) for point in summary.points if (draw := _single_point_figure(spec.figure, point))]
    if single:
        titles = [_point_title(summary.axes, point) for point, _ in single]
        return [(draw(spec.figure, point, title), title) for (point, draw), title in zip(single, titles, strict=True)]
    axis = spec.figure.panels if spec.figure.panels in summary.axes else "data"
    draw = _GROUP_FIGURES.get(spec.figure.x, _lines)
    panels = []
    for value in dict.fromkeys(point.value(axis) for point in summary.points):
        points = [point for point in summary.points if point.value(axis) == value]
        title = str(value) if axis == "data" else f"{axis} {value}"
        figure = draw(spec.figure, points, title)
        if figure is not None:
            panels.append((figure, title))
    return panels


def _point_title(axes: Sequence[str], point: Point) -> str:
    """The values of a point; numbers come with their axis."""
    values = [(axis, point.value(axis)) for axis in axes if point.value(axis) is not None]
    return ", ".join(value if isinstance(value, str) else f"{axis} {value}" for axis, value in values)


def _single_point_figure(settings: FigureSection, point: Point) -> Callable[[FigureSection, Point, str], Any] | None:
    """The function that draws a point by itself; None for a point that is drawn with others."""
    if point.matrices:
        return _transfer_matrices
    if point.feature_map:
        return _feature_maps
    if settings.x == "false_positive_rate" and any(name in point.curves for name in settings.lines):
        return _roc_curves
    return _gallery if settings.x.startswith("predictive_diversity") and point.pictures else None


def _transfer_matrices(settings: FigureSection, point: Point, title: str) -> Any:  # noqa: ARG001
    """Success of examples that were crafted on one member and tried on another."""
    entries = []
    for name, matrix in (point.matrices or {}).items():
        content = "target reached" if Measure.parse(name).targeted else "accuracy"
        entries.append((f"{measure_label(name)}\n{content}, %", matrix))
    return charts.matrices(entries, "tried on", "crafted on", title)


def _feature_maps(settings: FigureSection, point: Point, title: str) -> Any:  # noqa: ARG001
    """Members' features in the plane."""
    similarity = point.mean("features_similarity")
    words = "" if similarity is None else f": similarity of members {similarity:.2f}"
    return charts.maps(point.feature_map or [], class_labels(point.data), title + words)


def _roc_curves(settings: FigureSection, point: Point, title: str) -> Any:
    """ROC curves of ensemble diversity for every attack, with the area under each."""
    lines = []
    for name in settings.lines:
        if name in point.curves:
            area = point.mean(str(Measure("auroc", Measure.parse(name).attack, score="nonmaximal_volume")))
            label = measure_label(name) + ("" if area is None else f", area {area:.3f}")
            lines.append(_line(label, point.curves[name]))
    return charts.roc_chart(lines, settings.x_label, settings.y_label, title)


def _gallery(settings: FigureSection, point: Point, title: str) -> Any:  # noqa: ARG001
    """The pictures that members disagree on most and least."""
    names = class_labels(point.data)

    def picture(entry: Any) -> tuple[Any, str]:
        others = sorted({names[label] for label in entry["members"]} - {names[entry["ensemble"]]})
        values = torch.frombuffer(bytearray(base64.b64decode(entry["picture"])), dtype=torch.uint8)
        words = [f"is {names[entry['true']]}", f"ensemble: {names[entry['ensemble']]}", *others]
        return values.view(entry["shape"]).numpy(), "\n".join(words)

    pictures = [picture(entry) for entry in point.pictures or []]
    half = len(pictures) // 2
    rows = [(f"{title}: most disagreement", pictures[:half]), ("least disagreement", pictures[half:])]
    return charts.gallery(rows)


def _line(name: str, curve: Curve) -> charts.Line:
    mean, error = ([math.nan if value is None else value for value in values] for values in (curve.mean, curve.error))
    return charts.Line(name, mean, error)


def _lines(settings: FigureSection, points: Points, title: str) -> Any:
    """Lines over an axis of the grid, over epochs, or over confidence."""
    x, lines = _LINES.get(settings.x, _over_axis)(settings, points)
    if not lines:
        return None
    if settings.separate:
        panels = [charts.Panel(line.name, settings.y_label, [line]) for line in lines]
        return charts.panel_grid(x, settings.x_label or settings.x, panels)
    y_label = settings.y_label or ", ".join(measure_label(name) for name in settings.lines[:2])
    return charts.line_chart(x, settings.x_label or settings.x, [charts.Panel(title, y_label, lines)])


def _over_axis(settings: FigureSection, points: Points) -> tuple[list[Any], list[charts.Line]]:
    values = list(dict.fromkeys(value for point in points if (value := point.value(settings.x)) is not None))
    x = values if any(isinstance(value, str) for value in values) else sorted(values)
    groups = list(dict.fromkeys(point.value(settings.groups) for point in points)) if settings.groups else [None]
    lines: list[charts.Line] = []
    for group in groups:
        chosen = [point for point in points if not settings.groups or point.value(settings.groups) == group]
        by_x = {point.value(settings.x): point.measures for point in chosen}
        for name in settings.lines:
            estimates = [by_x[value][name] for value in x if value in by_x and name in by_x[value]]
            if len(estimates) == len(x) and x and all(estimate.mean is not None for estimate in estimates):
                curve = Curve([estimate.mean for estimate in estimates], [estimate.error for estimate in estimates])
                lines.append(_line(_label(settings, name, group), curve))
    return _places(x), lines


def _places(x: list[Any]) -> list[Any]:
    """Values of an axis; as words, which stand at equal distances, where they span several orders of magnitude."""
    positive = [value for value in x if not isinstance(value, str) and value > 0]
    is_wide = len(positive) > 2 and max(positive) >= _WIDE * min(positive)
    return [f"{value:g}" for value in x] if is_wide else x


def _over_epochs(settings: FigureSection, points: Points) -> tuple[list[Any], list[charts.Line]]:
    lines: list[charts.Line] = []
    for point in points:
        group = point.value(settings.groups) if settings.groups else None
        lines += [
            _line(_label(settings, name, group), point.curves[name]) for name in settings.lines if name in point.curves
        ]
    length = len(lines[-1].mean) if lines else 0
    return list(range(1, length + 1)), [line for line in lines if len(line.mean) == length]


def _over_confidence(settings: FigureSection, points: Points) -> tuple[list[Any], list[charts.Line]]:
    """Accuracy in bins of confidence, beside the diagonal of perfect calibration."""
    _, lines = _over_epochs(settings, points)
    bins = len(lines[0].mean) if lines else 0
    x = [(i + 0.5) / bins for i in range(bins)]
    return x, [*lines, charts.Line("perfect", x, [0.0] * bins)] if lines else []


def _histogram(settings: FigureSection, points: Points, title: str) -> Any:
    """Counts of examples by value; the measure of the same name is their median."""
    lines = []
    for point in points:
        median = point.mean(settings.x)
        form = ".1f" if abs(median or 0) >= 1 else ".2g"
        words = "" if median is None else f", median {median:{form}}".replace("-", "−")
        for name in settings.lines:
            if name in point.curves:
                label = _label(settings, name, point.value(settings.groups))
                lines.append(_line(label + words, point.curves[name]))
    if not lines:
        return None
    (_, low, high), bins = HISTOGRAM, len(lines[0].mean)
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    return charts.histogram(edges, lines, settings.x_label, settings.y_label, title)


def _pairs_on_the_plane(settings: FigureSection, points: Points, title: str) -> Any:
    """Pairs of members on the plane of accuracy and diversity, between the two curves of theory."""
    clouds: Any = [(str(point.value(settings.groups)), point.pairs) for point in points if point.pairs]
    best = max((pair[0] for _, pairs in clouds for pair in pairs), default=0.0)
    return plane(clouds, best, _CLASSES, settings.x_label, settings.y_label, title)


_VARIANTS = {"-equal": "equal training cost", "-short": "cost of one", "-beta": "β", "-ldr": "LDR"}
"""Ends of methods' names, and what they say."""


def _methods_and_costs(settings: FigureSection, points: Points, title: str) -> Any:
    """Methods by accuracy and the first of the figure's lines; the second is their cost."""
    methods = []
    for point in points:
        values = [point.mean(name) for name in (settings.x, *settings.lines)]
        if any(value is None for value in values):
            continue
        name = str(point.value(settings.groups))
        end = next((end for end in _VARIANTS if name.endswith(end)), "")
        methods.append(MethodPoint(method_label(name.removesuffix(end)), _VARIANTS.get(end, ""), *values))  # pyright: ignore[reportArgumentType]
    return cost_plane(methods, settings.x_label, settings.y_label, title) if methods else None


def _members(point: Point) -> list[Sequence[float]]:
    """What a point has kept of each member, in their order."""
    names = (f"member_{i}" for i in itertools.count(1))
    return [_values(point, name) for name in itertools.takewhile(point.curves.__contains__, names)]


def _values(point: Point, name: str) -> list[float]:
    return [math.nan if value is None else value for value in point.curves[name].mean]


def _headline(settings: FigureSection, point: Point) -> tuple[str, str]:
    """A point's method or case, and the measures of the figure's lines."""
    means = ((measure_label(name), point.mean(name)) for name in settings.lines)
    words = [f"{label}: {mean:.2g}" for label, mean in means if mean is not None]
    return ", ".join(method_label(str(value)) for value in point.axes.values()), "\n".join(words)


def _learners(settings: FigureSection, points: Points, title: str) -> Any:  # noqa: ARG001
    """Members' curves in several cases."""
    panels = [
        illustrations.LearnerPanel(
            *_headline(settings, point),
            _values(point, "x"),
            _members(point),
            _values(point, "train_x"),
            _values(point, "train_y"),
        )
        for point in points
        if _members(point)
    ]
    return illustrations.learners(panels, settings.x_label, settings.y_label) if panels else None


def _volumes(settings: FigureSection, points: Points, title: str) -> Any:  # noqa: ARG001
    """Members' non-maximal predictions on one example, and the volume that they span."""
    panels = [
        illustrations.VolumePanel(*_headline(settings, point), _members(point), int(_values(point, "label")[0]))
        for point in points
        if _members(point)
    ]
    return illustrations.spanned_volumes(panels, settings.x_label, settings.y_label) if panels else None


def _disagreement_maps(settings: FigureSection, points: Points, title: str) -> Any:  # noqa: ARG001
    """Where in the plane members disagree, and on which examples they were told to."""
    panels = []
    for point in points:
        if not _members(point):
            continue
        x, y, labels = (_values(point, name) for name in ("x", "y", "label"))
        high_loss = _values(point, "high_loss") if "high_loss" in point.curves else None
        has_unlabelled = "unlabelled_x" in point.curves
        unlabelled = (_values(point, "unlabelled_x"), _values(point, "unlabelled_y")) if has_unlabelled else None
        headline, members = _headline(settings, point), _members(point)
        panels.append(illustrations.DisagreementPanel(*headline, members, x, y, labels, high_loss, unlabelled))
    return illustrations.disagreement_maps(panels, EXTENT, settings.x_label, settings.y_label) if panels else None


_LINES = {"epoch": _over_epochs, "confidence": _over_confidence}
"""Lines by the figure's x, where it is no axis of the grid."""
_GROUP_FIGURES = {
    "member_accuracy": _pairs_on_the_plane,
    "accuracy": _methods_and_costs,
    "log_nonmaximal_volume": _histogram,
    "input": _learners,
    "class": _volumes,
    "input_1": _disagreement_maps,
}
"""Figures of several points other than lines, by the figure's x."""


def _label(settings: FigureSection, name: str, group: Any) -> str:
    if group is None:
        is_alone = settings.separate and Measure.parse(name).kind == "codependence"  # no axis says what rises
        return f"rise of loss, {measure_label(name)}" if is_alone else measure_label(name)
    value = f"{group:g}" if isinstance(group, int | float) else str(group)
    if settings.groups == "method":
        return value
    symbol = _SYMBOLS.get(settings.groups, settings.groups)
    return f"{symbol} = {value}" + (f", {measure_label(name)}" if len(settings.lines) > 1 else "")

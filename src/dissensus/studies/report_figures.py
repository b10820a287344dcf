"""A study's figure from its summary: the paper's axes, our means and bands."""

import base64
import math
from collections.abc import Callable
from typing import Any

import torch

from dissensus.pages import figures
from dissensus.studies import datasets
from dissensus.studies.procedures.train import HISTOGRAM
from dissensus.studies.results import Measure
from dissensus.studies.spec import FigureSection, Spec

Draw = Callable[[FigureSection, dict[str, Any], str], Any]
"""``(figure, point, title) -> figure``."""
WORDS = {
    "error": "ensemble's error",
    "individual": "members' error",
    "diversity": "diversity",
    "gap": "generalisation gap",
    "train_error": "training error",
    "test_error": "test error",
    "bias_share": "share that is bias",
    "relative_diversity": "diversity / error",
    "train_individual": "members' training error",
    "train_diversity": "training diversity",
    "test_individual": "members' test error",
    "test_diversity": "test diversity",
    "member_accuracy": "members' accuracy",
    "error_rate": "ensemble's error rate",
    "member_error_rate": "members' error rate",
    "worst_member_error_rate": "worst member's error rate",
    "nonmaximal_volume": "ensemble diversity",
    "log_nonmaximal_volume": "log of ensemble diversity",
    "features_similarity": "similarity of members' features (CKA)",
}


def in_words(name: str) -> str:
    """A measure's name as people say it.

    >>> in_words("codependence_0.2"), in_words("error"), in_words("auroc_predictive_diversity_mnist")
    ('drop 20%', "ensemble's error", 'PDS, mnist')
    >>> in_words("accuracy_fgsm_0.02"), in_words("transfer_targeted_pgd_0.05"), in_words("standard_0.01")
    ('FGSM 0.02', 'transfer, targeted PGD 0.05', 'worst case, standard 0.01')
    """
    measure = Measure.parse(name)
    score = SCORES.get(measure.score, measure.score.replace("_", " "))
    if measure.kind == "worst_case":
        return f"worst case, {measure.attack} {measure.parameter}"
    if measure.attack:
        before = f"{score}, " if score else _BEFORE.get(measure.kind, "")
        words = ("targeted" if measure.targeted else "", ATTACKS[measure.attack], measure.parameter)
        return before + " ".join(filter(None, words))
    if measure.dataset:
        return f"{score or in_words(name.removesuffix(f'_{measure.dataset}'))}, {measure.dataset}"
    if measure.kind == "codependence":
        return f"drop {float(measure.parameter):.0%}"
    return WORDS.get(name, name.replace("_", " "))


SCORES = {"predictive_diversity": "PDS", "model_average": "BMA", "nonmaximal_volume": "ED"}
"""Scores as papers abbreviate them; the area under the ROC curve is what is told of each."""
ATTACKS = {
    "fgsm": "FGSM",
    "bim": "BIM",
    "pgd": "PGD",
    "mim": "MIM",
    "apgd": "APGD",
    "square": "Square",
    "jsma": "JSMA",
    "carlini_wagner": "C&W",
    "elastic_net": "EAD",
}
_BEFORE = {"transfer": "transfer, ", "fooled": "fooled by "}
"""What is said before an attack's name, by the kind of measure."""


def drawn(spec: Spec, result: dict[str, Any]) -> list[tuple[Any, str]]:
    """One matplotlib figure per panel, or per point where a figure can show but one, with a title."""
    told = spec.figure
    if told is None:
        return []
    alone = [(point, draw) for point in result["points"] if (draw := _alone(told, point)) is not None]
    if alone:
        titles = [_title(result["axes"], point) for point, _ in alone]
        return [(draw(told, point, title), title) for (point, draw), title in zip(alone, titles, strict=True)]
    axis = told.panels if told.panels in result["axes"] else "data"
    found = []
    for value in dict.fromkeys(point[axis] for point in result["points"]):
        points = [point for point in result["points"] if point[axis] == value]
        title = str(value) if axis == "data" else f"{axis} {value}"
        figure = _TOGETHER.get(told.x, _lines)(told, points, title)
        if figure is not None:
            found.append((figure, title))
    return found


def _title(axes: list[str], point: dict[str, Any]) -> str:
    """A point by its values; numbers come with their axis."""
    values = [(axis, point[axis]) for axis in axes if point.get(axis) is not None]
    return ", ".join(value if isinstance(value, str) else f"{axis} {value}" for axis, value in values)


def _alone(told: FigureSection, point: dict[str, Any]) -> Draw | None:
    """How a point is drawn that has a figure of its own."""
    if point.get("matrices"):
        return _matrices
    if point.get("map"):
        return _maps
    if told.x == "false_positive_rate" and any(name in point.get("curves", {}) for name in told.lines):
        return _roc
    return _gallery if told.x.startswith("predictive_diversity") and point.get("shown") else None


def _matrices(told: FigureSection, point: dict[str, Any], title: str) -> Any:  # noqa: ARG001
    """How what was crafted on one member does on another."""
    entries = []
    for name, matrix in point["matrices"].items():
        what = "target reached" if name.startswith("targeted_") else "accuracy"
        entries.append((f"{in_words(name)}\n{what}, %", matrix))
    return figures.matrices(entries, "tried on", "crafted on", title)


def _maps(told: FigureSection, point: dict[str, Any], title: str) -> Any:  # noqa: ARG001
    """Members' features in the plane."""
    alike = _mean(point, "features_similarity")
    words = "" if alike is None else f": similarity of members {alike:.2f}"
    return figures.maps(point["map"], _classes(point["data"]), title + words)


def _roc(told: FigureSection, point: dict[str, Any], title: str) -> Any:
    """What ensemble diversity finds of every attack, and the area under each curve."""
    lines = []
    for name in told.lines:
        if name in point["curves"]:
            area = _mean(point, str(Measure("auroc", Measure.parse(name).attack, score="nonmaximal_volume")))
            label = in_words(name) + ("" if area is None else f", area {area:.3f}")
            lines.append(_curve(label, point["curves"][name]))
    return figures.roc(lines, told.x_label, told.y_label, title)


def _histogram(told: FigureSection, points: list[dict[str, Any]], title: str) -> Any:
    """How many examples have which value; the measure of the same name is their median."""
    lines = []
    for point in points:
        median = _mean(point, told.x)
        form = ".1f" if abs(median or 0) >= 1 else ".2g"
        words = "" if median is None else f", median {median:{form}}".replace("-", "−")
        for name in told.lines:
            if name in point.get("curves", {}):
                label = _label(told, name, point.get(told.groups))
                lines.append(_curve(label + words, point["curves"][name]))
    if not lines:
        return None
    (_, low, high), bins = HISTOGRAM, len(lines[0].mean)
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    return figures.histogram(edges, lines, told.x_label, told.y_label, title)


def _mean(point: dict[str, Any], name: str) -> float | None:
    return point["measures"].get(name, (None,))[0]


def _curve(name: str, curve: dict[str, Any]) -> figures.Line:
    mean, error = ([math.nan if v is None else v for v in curve[key]] for key in ("mean", "error"))
    return figures.Line(name, mean, error)


def _lines(told: FigureSection, points: list[dict[str, Any]], title: str) -> Any:
    """Lines over an axis of the grid, over epochs, or over confidence."""
    x, lines = _LINES.get(told.x, _over_axis)(told, points)
    if not lines:
        return None
    y_label = told.y_label or ", ".join(in_words(name) for name in told.lines[:2])
    return figures.draw(x, told.x_label or told.x, [figures.Panel(title, y_label, lines)])


def _over_axis(told: FigureSection, points: list[dict[str, Any]]) -> tuple[list[Any], list[figures.Line]]:
    seen = list(dict.fromkeys(point[told.x] for point in points if point.get(told.x) is not None))
    x = seen if any(isinstance(value, str) for value in seen) else sorted(seen)
    groups = list(dict.fromkeys(point.get(told.groups) for point in points)) if told.groups else [None]
    lines: list[figures.Line] = []
    for group in groups:
        own = [p for p in points if not told.groups or p.get(told.groups) == group]
        by_x = {point.get(told.x): point["measures"] for point in own}
        for name in told.lines:
            each = [by_x[value][name] for value in x if value in by_x and name in by_x[value]]
            if len(each) == len(x) and x and all(entry[0] is not None for entry in each):
                lines.append(figures.Line(_label(told, name, group), [e[0] for e in each], [e[1] for e in each]))
    return _spread(x), lines


WIDE = 50
"""Values whose largest is so many times the least stand side by side, not at their places on a line."""


def _spread(x: list[Any]) -> list[Any]:
    above = [value for value in x if not isinstance(value, str) and value > 0]
    wide = len(above) > 2 and max(above) >= WIDE * min(above)
    return [f"{value:g}" for value in x] if wide else x


def _over_epochs(told: FigureSection, points: list[dict[str, Any]]) -> tuple[list[Any], list[figures.Line]]:
    lines: list[figures.Line] = []
    length = 0
    for point in points:
        group = point.get(told.groups) if told.groups else None
        for name in told.lines:
            curve = point.get("curves", {}).get(name)
            if curve is not None:
                length = len(curve["mean"])
                lines.append(_curve(_label(told, name, group), curve))
    return list(range(1, length + 1)), [line for line in lines if len(line.mean) == length]


def _over_confidence(told: FigureSection, points: list[dict[str, Any]]) -> tuple[list[Any], list[figures.Line]]:
    """Accuracy in bins of confidence, beside the diagonal that perfect calibration would be."""
    _, lines = _over_epochs(told, points)
    bins = len(lines[0].mean) if lines else 0
    x = [(i + 0.5) / bins for i in range(bins)]
    return x, [*lines, figures.Line("perfect", x, [0.0] * bins)] if lines else []


NAMES = {
    "cifar10": ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "fashion-mnist": ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
}
"""What classes are called."""


def _classes(data: str) -> tuple[str, ...]:
    return NAMES.get(datasets.source_of(data), tuple(map(str, range(1000))))


def _gallery(told: FigureSection, point: dict[str, Any], title: str) -> Any:  # noqa: ARG001
    """The pictures that members disagree on most and least."""
    names = _classes(point["data"])

    def shown(one: dict[str, Any]) -> tuple[Any, str]:
        others = sorted({names[c] for c in one["members"]} - {names[one["ensemble"]]})
        pixels = torch.frombuffer(bytearray(base64.b64decode(one["picture"])), dtype=torch.uint8).view(one["shape"])
        return pixels.numpy(), "\n".join([f"is {names[one['true']]}", f"ensemble: {names[one['ensemble']]}", *others])

    half = len(point["shown"]) // 2
    rows = (("most disagreement", point["shown"][:half]), ("least disagreement", point["shown"][half:]))
    return figures.gallery([(title, [shown(one) for one in some]) for title, some in rows])


def _pairs(told: FigureSection, points: list[dict[str, Any]], title: str) -> Any:
    """Pairs of members in the plane, between the two curves of theory."""
    clouds = [(str(point[told.groups]), point["pairs"]) for point in points if point.get("pairs")]
    best = max((pair[0] for _, pairs in clouds for pair in pairs), default=0.0)
    return figures.plane(clouds, best, CLASSES, told.x_label, told.y_label, title)


CLASSES = 10
"""Of every data set that these studies compare on."""
_LINES = {"epoch": _over_epochs, "confidence": _over_confidence}
_TOGETHER = {"member_accuracy": _pairs, "log_nonmaximal_volume": _histogram}
"""Figures of several points, other than lines."""


def _label(told: FigureSection, name: str, group: Any) -> str:
    if group is None:
        return in_words(name)
    symbol = {"beta": "β", "alpha": "α", "members": "M"}.get(told.groups, told.groups)
    value = f"{group:g}" if isinstance(group, int | float) else str(group)
    if told.groups == "method":
        return value
    return f"{symbol} = {value}" + (f", {in_words(name)}" if len(told.lines) > 1 else "")

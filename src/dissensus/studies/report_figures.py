"""A study's figure from its summary: the paper's axes, our means and bands."""

import base64
import math
from typing import Any

import torch

from dissensus import diversity
from dissensus.studies import figures, problems
from dissensus.studies.shift_measures import AUROC, taken_apart
from dissensus.studies.spec import Figure, Spec

WORDS = {
    "error": "ensemble's error", "individual": "members' error", "diversity": "diversity", "gap": "generalisation gap",
    "train_error": "training error", "test_error": "test error", "bias_share": "share that is bias",
    "relative_diversity": "diversity / error", "train_individual": "members' training error",
    "train_diversity": "training diversity", "test_individual": "members' test error",
    "test_diversity": "test diversity", "member_accuracy": "members' accuracy",
}  # fmt: skip


def in_words(name: str) -> str:
    """A measure's name as people say it.

    >>> in_words("codependence_0.2"), in_words("error"), in_words("auroc_predictive_diversity_mnist")
    ('drop 20%', "ensemble's error", 'PDS, mnist')
    """
    if name.startswith("codependence_"):
        return f"drop {float(name.removeprefix('codependence_')):.0%}"
    what, of = taken_apart(name)
    if of:
        score = what.removeprefix(AUROC)
        return f"{SCORES.get(score, score.replace('_', ' ')) if what != score else in_words(what)}, {of}"
    return WORDS.get(name, name.replace("_", " "))


SCORES = {"predictive_diversity": "PDS", "model_average": "BMA"}
"""Scores as the LDR paper abbreviates them; the area under the ROC curve is what is told of each."""


def drawn(spec: Spec, result: dict[str, Any]) -> list[tuple[Any, str]]:
    """One matplotlib figure per panel, with a title."""
    told = spec.figure
    if told is None:
        return []
    axis = told.panels if told.panels in result["axes"] else "data"
    panels = list(dict.fromkeys(point[axis] for point in result["points"]))
    found = []
    for value in panels:
        points = [point for point in result["points"] if point[axis] == value]
        title = str(value) if axis == "data" else f"{axis} {value}"
        label = told.x_label or told.x
        if told.x.startswith("predictive_diversity"):
            found += [(_gallery(point), f"{title}, {point['method']}") for point in points if point.get("shown")]
            continue
        if told.x == "member_accuracy":
            found.append((_pairs(told, points, title), title))
            continue
        x, lines = _LINES.get(told.x, _over_axis)(told, points)
        if lines:
            y_label = told.y_label or ", ".join(in_words(name) for name in told.lines[:2])
            found.append((figures.draw(x, label, [figures.Panel(title, y_label, lines)]), title))
    return found


def _over_axis(told: Figure, points: list[dict[str, Any]]) -> tuple[list[Any], list[figures.Line]]:
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


def _over_epochs(told: Figure, points: list[dict[str, Any]]) -> tuple[list[Any], list[figures.Line]]:
    lines: list[figures.Line] = []
    length = 0
    for point in points:
        group = point.get(told.groups) if told.groups else None
        for name in told.lines:
            curve = point.get("curves", {}).get(name)
            if curve is not None:
                length = len(curve["mean"])
                mean, error = ([math.nan if v is None else v for v in curve[key]] for key in ("mean", "error"))
                lines.append(figures.Line(_label(told, name, group), mean, error))
    return list(range(1, length + 1)), [line for line in lines if len(line.mean) == length]


def _over_confidence(told: Figure, points: list[dict[str, Any]]) -> tuple[list[Any], list[figures.Line]]:
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


def _gallery(point: dict[str, Any]) -> Any:
    """The pictures that members disagree on most and least."""
    names = NAMES.get(problems.source_of(point["data"]), tuple(map(str, range(1000))))

    def told(one: dict[str, Any]) -> tuple[Any, str]:
        others = sorted({names[c] for c in one["members"]} - {names[one["ensemble"]]})
        pixels = torch.frombuffer(bytearray(base64.b64decode(one["picture"])), dtype=torch.uint8).view(one["shape"])
        return pixels.numpy(), "\n".join([f"is {names[one['true']]}", f"ensemble: {names[one['ensemble']]}", *others])

    half = len(point["shown"]) // 2
    rows = (("most disagreement", point["shown"][:half]), ("least disagreement", point["shown"][half:]))
    return figures.gallery([(title, [told(one) for one in shown]) for title, shown in rows])


def _pairs(told: Figure, points: list[dict[str, Any]], title: str) -> Any:
    """Pairs of members in the plane, between the two curves of theory."""
    clouds = [(str(point[told.groups]), point["pairs"]) for point in points if point.get("pairs")]
    best = max((pair[0] for _, pairs in clouds for pair in pairs), default=0.0)
    low = min((pair[0] for _, pairs in clouds for pair in pairs), default=0.0)
    accuracy = torch.linspace(max(0.0, low - 0.3 * (best - low) - 0.01), best, 40)
    flips = torch.linspace(0, 1, 400)
    left, worst = diversity.flipped(best, flips, CLASSES)
    shown = left >= accuracy[0]
    curves = [
        ("independent errors", accuracy.tolist(), diversity.independent_errors(best, accuracy, CLASSES).tolist()),
        ("flipped predictions", left[shown].tolist(), worst[shown].tolist()),
    ]
    return figures.scatter(clouds, curves, told.x_label, told.y_label, title)


CLASSES = 10
"""Of every data set that these studies compare on."""
_LINES = {"epoch": _over_epochs, "confidence": _over_confidence}


def _label(told: Figure, name: str, group: Any) -> str:
    if group is None:
        return in_words(name)
    symbol = {"beta": "β", "alpha": "α", "members": "M"}.get(told.groups, told.groups)
    value = f"{group:g}" if isinstance(group, int | float) else str(group)
    if told.groups == "method":
        return value
    return f"{symbol} = {value}" + (f", {in_words(name)}" if len(told.lines) > 1 else "")

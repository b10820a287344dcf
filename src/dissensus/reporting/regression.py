"""Measures of a regressor: errors, intervals, what its spread is worth, and its hardest examples."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses, metrics
from dissensus.metrics.generalisation import score_interval
from dissensus.metrics.intervals import Interval, percentile
from dissensus.metrics.regression import resampled_means
from dissensus.predictive import Predictive, predictive
from dissensus.reporting.curves import best_risks, rank_correlation, risk_at, root_error_curve, root_errors
from dissensus.reporting.measures import ROUNDING, Example, Measured, ShiftedResult, audited, detected, score_table
from dissensus.reporting.reading import OnProgress, OutputSet, ReportData, Settings
from dissensus.scores import REGRESSION_SCORES, Score

SPREAD, DISAGREEMENT = "predicted deviation", "members' spread"
LEVEL = 0.9
"""Level of the intervals that are judged, where members can say them."""
COVERAGES = (0.5, 0.8, 0.9)
_DETECTORS = {
    "values": {"variance of the members": "value_variance"},
    "gaussian": {
        "variance of the members' means": "epistemic_variance",
        "predicted variance": "total_variance",
        "mean predicted noise": "aleatoric_variance",
        "mutual information, lower bound": "gaussian_information_lower",
    },
    "quantiles": {
        "variance of the members' quantiles": "quantile_variance",
        "width of the quantiles": "interval_width",
    },
}


def detectors(settings: Settings) -> dict[str, Score]:
    """Scores of uncertainty, by the names that a report shows. The first was chosen before any data was seen."""
    chosen = {title: REGRESSION_SCORES[name] for title, name in _DETECTORS[settings.kind].items()}
    if settings.kind != "quantiles":
        return chosen
    return {title: Score(_with_levels(score, settings), "quantiles") for title, score in chosen.items()}


def _with_levels(score: Score, settings: Settings) -> Any:
    """The function of a score, for the levels at hand."""
    function: Any = score.function
    return partial(function, levels=settings.levels)


def predicted(outputs: Float[Tensor, "M N C"], settings: Settings) -> Predictive:
    """The pooled prediction."""
    loss: Any = settings.loss
    if settings.kind == "quantiles":
        if not any(abs(level - 0.5) < 1e-9 for level in settings.levels):
            fix = "A report compares targets with the median."
            checks.refuse("loss", "have 0.5 among the levels of its quantiles", str(list(settings.levels)), fix)
        loss = partial(losses.quantile, levels=settings.levels)
    return predictive(outputs, task="regression", loss=loss)


def points(outputs: Float[Tensor, "M N C"], settings: Settings) -> Float[Tensor, "M N D"]:
    """Every member's point prediction: its value, mean or median."""
    if settings.kind == "gaussian":
        return losses.gaussian_moments(outputs.double())[0]
    if settings.kind == "quantiles":
        middle = min(range(len(settings.levels)), key=lambda place: abs(settings.levels[place] - 0.5))
        return outputs.unflatten(-1, (-1, len(settings.levels))).sort(-1).values[..., middle]
    return outputs


def measured(data: ReportData, count: int, progress: OnProgress) -> Measured:
    """Everything that a report says about a regressor; `count` is the number of examples of each kind to show."""
    settings, targets = data.settings, data.targets
    prediction = predicted(data.outputs, settings)
    squared = (prediction.mean - targets).square().mean(-1)
    progress("the audit", 0.0)
    training = None
    if data.training is not None and data.training.targets is not None:
        training = points(data.training.outputs, settings), data.training.targets
    reference = None if data.reference is None else points(data.reference, settings)
    members = points(data.outputs, settings)
    result = audited(data, members, reference, training)
    progress("scores", 0.4)
    values = score_table(data.outputs, detectors(settings), settings)
    kept = _deviations(prediction, len(data.outputs) == 1)
    numbers = _numbers(data.outputs, prediction, targets, settings)
    numbers |= {f"error_correlation: {name}": rank_correlation(s, squared) for name, s in kept.items()}
    progress("curves", 0.6)
    risk = {name: root_error_curve(scores, squared) for name, scores in kept.items()}
    if risk:
        first = next(iter(risk.values()))
        numbers |= {f"risk_at_{share:.0%}": risk_at(first, share) for share in COVERAGES}
    progress("shifted data", 0.8)
    hardest = squared.argsort(descending=True, stable=True)[:count].tolist()
    spread = prediction.epistemic.mean(-1)
    disputed = [
        row
        for row in spread.argsort(descending=True, stable=True)[:count].tolist()
        if float(spread[row]) > ROUNDING * float(spread.max() + squared.mean())
    ]
    examples = {row: _example(row, data, prediction, members) for row in {*hardest, *disputed}}
    rows = range(len(targets))
    shown = rows if len(rows) <= _MOST_POINTS else torch.linspace(0, len(rows) - 1, _MOST_POINTS).long().tolist()
    return Measured(
        numbers,
        _of_members(members, targets),
        result,
        risk,
        [value**0.5 for value in best_risks(squared)],
        {name: root_errors(scores, squared) for name, scores in kept.items()},
        values,
        hardest,
        disputed,
        examples,
        {name: _shifted(part, values, settings) for name, part in data.shifted.items()},
        [],
        {
            "targets": _by_target(prediction, data),
            "predictions": [
                {"target": targets[row].tolist(), "prediction": prediction.mean[row].tolist()} for row in shown
            ],
            "levels": _levels(data.outputs, targets, settings),
        },
    )


_MOST_POINTS = 2000
"""Points that a scatter shows."""


def _deviations(prediction: Predictive, single: bool) -> dict[str, Float[Tensor, " N"]]:
    """Deviations by which examples are refused: the predicted one, and the members' spread."""
    kept: dict[str, Tensor] = {}
    if prediction.kind.takes != "values":
        kept[SPREAD] = prediction.std.square().mean(-1).sqrt()
    if not single:
        kept[DISAGREEMENT] = prediction.epistemic.mean(-1).sqrt()
    return kept


def _numbers(
    outputs: Float[Tensor, "M N C"], prediction: Predictive, targets: Float[Tensor, "N D"], settings: Settings
) -> dict[str, Interval]:
    numbers: dict[str, Interval] = dict(metrics.regression(prediction.mean, targets)._asdict())
    numbers["deviation"] = metrics.mean_interval(prediction.std)
    if settings.kind == "values":
        numbers["crps"] = metrics.mean_interval(metrics.crps_ensemble(outputs.double(), targets))
        return numbers
    if settings.kind == "gaussian":
        means, variances = losses.gaussian_moments(outputs.double())
        numbers["nll"] = metrics.mean_interval(metrics.nll_mixture(means, variances, targets))
        numbers["crps"] = metrics.mean_interval(metrics.crps_mixture(means, variances, targets))
    else:
        pooled = torch.stack([prediction.quantile(level) for level in settings.levels], -1).sort(-1).values
        pinball = metrics.pinball(pooled, targets, levels=settings.levels).mean(-1)
        numbers["pinball"] = metrics.mean_interval(pinball)
    level = interval_level(settings)
    if level is not None:
        low, high = prediction.interval(level)
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        quality = metrics.prediction_intervals(low, high, targets, level=level)
        numbers |= {"coverage": quality.coverage, "width": quality.width, "interval_score": quality.score}
    if settings.kind == "gaussian":
        places = metrics.pit(*losses.gaussian_moments(outputs.double()), targets)
        numbers["interval_calibration"] = metrics.distribution_calibration(places).error
    return numbers


def interval_level(settings: Settings) -> float | None:
    """The level of the intervals that are judged: 0.9, or that of the widest pair of quantiles around the median."""
    if settings.kind == "gaussian":
        return LEVEL
    pairs = [
        1 - 2 * low for low in settings.levels if low < 0.5 and any(abs(1 - low - h) < 1e-9 for h in settings.levels)
    ]
    return max(pairs, default=None)


def _levels(outputs: Float[Tensor, "M N C"], targets: Float[Tensor, "N D"], settings: Settings) -> list[dict[str, Any]]:
    """How often targets lie within the interval, or below the quantile, of each level."""
    if settings.kind == "values":
        return []
    if settings.kind == "gaussian":
        places = metrics.pit(*losses.gaussian_moments(outputs.double()), targets)
        result = metrics.distribution_calibration(places, repeats=0)
        expected, observed = result.expected.tolist(), result.observed.tolist()
    else:
        prediction = predicted(outputs, settings)
        expected = list(settings.levels)
        observed = [float((targets <= prediction.quantile(level)).double().mean()) for level in expected]
    return [
        {"level": level, "share": score_interval(share, len(targets), 0.95)}
        for level, share in zip(expected, observed, strict=True)
    ]


def _of_members(members: Float[Tensor, "M N D"], targets: Float[Tensor, "N D"]) -> dict[str, Interval]:
    """Root mean squared and mean absolute error, averaged over members."""
    gaps = members.double() - targets
    absolute = metrics.mean_interval(gaps.abs().mean((0, 2)))
    squares = gaps.square().movedim(0, 1).reshape(len(targets), -1)
    drawn = resampled_means(squares, 1000 if squares.numel() < 2**22 else 200, 0)
    roots = drawn.sqrt().mean(-1)
    return {"rmse": percentile(roots), "mae": absolute}


def _example(row: int, data: ReportData, prediction: Predictive, members: Float[Tensor, "M N D"]) -> Example:
    mean, target = prediction.mean[row], data.targets[row]
    low, high = members[:, row].amin(0), members[:, row].amax(0)
    votes = "; ".join(f"{a:.3g} to {b:.3g}" for a, b in zip(low.tolist(), high.tolist(), strict=True))
    numbers = {
        "error": float((mean - target).square().mean().sqrt()),
        "deviation": float(prediction.std[row].square().mean().sqrt()),
        "disagreement": float(prediction.epistemic[row].mean().sqrt()),
    }
    return Example(row, _text(target), _text(mean), numbers, votes)


def _text(values: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in values.tolist())


def _by_target(prediction: Predictive, data: ReportData) -> list[dict[str, Any]]:
    """Errors of every target."""
    rows = []
    for place, name in enumerate(data.classes):
        quality = metrics.regression(prediction.mean[:, place], data.targets[:, place])
        rows.append({"target": name, **quality._asdict()})
    return rows


def _shifted(part: OutputSet, inside: Mapping[str, Tensor], settings: Settings) -> ShiftedResult:
    values = score_table(part.outputs, detectors(settings), settings)
    areas, passing = detected(dict(inside), values)
    prediction = predicted(part.outputs, settings)
    numbers = {"deviation": metrics.mean_interval(prediction.std)}
    if part.targets is not None:
        numbers |= dict(metrics.regression(prediction.mean, part.targets)._asdict())
        level = interval_level(settings) if settings.kind != "values" else None
        if level is not None:
            low, high = prediction.interval(level)
            ends = torch.minimum(low, high), torch.maximum(low, high)
            numbers["coverage"] = metrics.prediction_intervals(*ends, part.targets, level=level).coverage
    return ShiftedResult(part.outputs.shape[1], numbers, areas, passing, values)

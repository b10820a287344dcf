"""What a page shows besides numbers: names of numbers in words, and inputs as pictures, rows or text."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8
from torch import Tensor

import dissensus.reporting.classification as classification
import dissensus.reporting.regression as regression
from dissensus.pages.parts import counted
from dissensus.reporting.measures import Measured
from dissensus.reporting.reading import ReportData, Settings

_ERRORS = (classification.CONFIDENCE, classification.ENTROPY, classification.DISAGREEMENT)
_SPREADS = (regression.SPREAD, regression.DISAGREEMENT)
TITLES: dict[str, str] = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood",
    "brier": "Brier score",
    "ece": "expected calibration error",
    "overconfidence": "mean confidence minus accuracy",
    "above_majority": "accuracy above the most frequent class",
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
    "r2": "variance explained (R²)",
    "crps": "CRPS",
    "pinball": "pinball loss",
    "coverage": "coverage of intervals",
    "width": "mean width of intervals",
    "interval_score": "score of intervals (Winkler)",
    "interval_calibration": "calibration error of intervals",
    "confidence": "mean confidence",
    "deviation": "mean predicted deviation",
    "fpr_at_95": "shifted examples that are missed at 5 % false alarms",
    **{f"error_auroc: {name}": f"errors found by {name} (AUROC)" for name in _ERRORS},
    **{f"error_correlation: {name}": f"rank correlation of error and {name}" for name in _SPREADS},
}
"""Names of numbers in words."""
BETTER = {
    **dict.fromkeys(("accuracy", "r2", "above_majority"), "higher"),
    **{f"error_auroc: {name}": "higher" for name in _ERRORS},
    **{f"error_correlation: {name}": "higher" for name in _SPREADS},
    **dict.fromkeys(("nll", "brier", "ece", "rmse", "mae", "crps", "pinball", "interval_score"), "lower"),
    **dict.fromkeys(("interval_calibration", "width"), "lower"),
    **{f"risk_at_{share:.0%}": "lower" for share in classification.COVERAGES},
    "overconfidence": "near 0",
    "coverage": "near its level",
}
"""What is better, for numbers of which it can be said."""
SHARES = (
    *("accuracy", "ece", "overconfidence", "above_majority", "r2", "coverage", "interval_calibration", "confidence"),
    "fpr_at_95",
)
"""Numbers that are shown in per cent."""
_PICTURE_CHANNELS = (1, 3)
_LEAST_SIDE = 4
_MOST_COLUMNS = 8
"""Numbers of an input up to which each has a column; of longer ones the most unusual are shown."""
_MOST_UNUSUAL = 4
_MOST_TEXT = 300


class Shown(NamedTuple):
    """An input as it is shown: a picture ``[C, H, W]`` in bytes, or words by the name of their column."""

    picture: UInt8[np.ndarray, "C H W"] | None
    cells: Mapping[str, str]


class Content(NamedTuple):
    """What the figures, tables and pictures of a page are made of."""

    settings: Settings
    classes: tuple[str, ...]
    measured: Measured
    shown: Mapping[int, Shown]


def title(name: str, task: str) -> str:
    """The name of a number in words; a number of the user's own keeps its name.

    >>> title("nll", "classification"), title("risk_at_80%", "regression")
    ('negative log-likelihood', 'root mean squared error without the 20% most uncertain')
    """
    for share in classification.COVERAGES:
        if name == f"risk_at_{share:.0%}":
            error = "error rate" if task == "classification" else TITLES["rmse"]
            return f"{error} without the {1 - share:.0%} most uncertain"
    return TITLES.get(name, name)


def size(facts: Mapping[str, Any]) -> str:
    """Members and examples in words."""
    return f"{counted(facts['members'], 'member')}, {counted(facts['examples'], 'example')}"


def shown_inputs(data: ReportData, rows: Iterable[int]) -> dict[int, Shown]:
    """Inputs of examples, as far as they can be shown."""
    if data.inputs is None:
        return {}
    spread = None
    if data.matrix is not None:
        spread = np.median(data.matrix, 0), data.matrix.std(0)
    return {row: _shown(data.inputs(row), data.features, spread) for row in rows}


def _shown(value: Any, features: tuple[str, ...], spread: Any) -> Shown:
    if isinstance(value, str):
        return Shown(None, {"input": value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}…"})
    values = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if values.dtype.kind not in "fiub":
        return Shown(None, {})
    picture = _picture(values)
    if picture is not None:
        return Shown(picture, {})
    return Shown(None, _cells(values, features, spread) if values.ndim == 1 else {})


def _cells(values: Shaped[np.ndarray, " F"], features: tuple[str, ...], spread: Any) -> dict[str, str]:
    names = features if len(features) == len(values) else tuple(f"x{i}" for i in range(len(values)))
    if len(values) <= _MOST_COLUMNS or spread is None:
        return {name: f"{v:.4g}" for name, v in list(zip(names, values.tolist(), strict=True))[:_MOST_COLUMNS]}
    median, deviation = spread
    apart = np.divide(values - median, deviation, out=np.zeros(len(values)), where=deviation > 0)
    order = np.argsort(-np.abs(apart), kind="stable")[:_MOST_UNUSUAL]
    return {"most unusual features": ", ".join(f"{names[i]} = {values[i]:.3g} ({apart[i]:+.1f} sd)" for i in order)}


def _picture(values: Shaped[np.ndarray, "..."]) -> UInt8[np.ndarray, "C H W"] | None:
    """A picture ``[C, H, W]`` in bytes, of an input that looks like one: grey or with three channels."""
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3:
        return None
    if values.shape[0] not in _PICTURE_CHANNELS and values.shape[2] in _PICTURE_CHANNELS:
        values = values.transpose(2, 0, 1)
    if values.shape[0] not in _PICTURE_CHANNELS or min(values.shape[1:]) < _LEAST_SIDE:
        return None
    if values.dtype == np.uint8:
        return values
    numbers = values.astype(np.float64)
    low, high = float(numbers.min()), float(numbers.max())
    if low < 0 or high > 1:  # standardised, or in other units
        numbers = (numbers - low) / ((high - low) or 1.0)
    return (numbers * 255).round().astype(np.uint8)

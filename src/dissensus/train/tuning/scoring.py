"""What candidates are compared by: the loss of the pooled prediction, a named metric, or a function."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus import checks, losses
from dissensus.output_kinds import class_probs, gaussians, output_kind, quantiles
from dissensus.train.settings import Metric
from dissensus.train.trained_loss import TrainedLoss

Mode = Literal["min", "max"]


class Scores(NamedTuple):
    """The metric on some rows."""

    ensemble: float
    members: float
    """The mean over single members."""


class Scorer(NamedTuple):
    """How outputs become a number."""

    name: str
    """As sentences have it: "loss", "accuracy"."""
    mode: Mode
    metric: Metric | None
    """A function ``(outputs, targets) -> number``; None for the loss that the objective trains on."""
    known: TrainedLoss | None
    """The loss and the pool of the objective."""
    share: bool = False
    """Whether it is a share, whose differences are points of a per cent."""

    def of(self, outputs: Tensor, targets: Tensor) -> Scores:
        """The metric of an ensemble and of its members; NaN where it is not finite."""
        with torch.no_grad():
            if self.metric is None:
                assert self.known is not None
                whole = self.known(outputs, targets)
                return Scores(_number(whole.total), _number(whole.parts["member_loss"].mean()))
            each = [self.metric(outputs[member : member + 1], targets) for member in range(len(outputs))]
            own = [_number(value) for value in each]
            return Scores(_number(self.metric(outputs, targets)), sum(own) / len(own))


def _number(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else math.nan


def scorer_of(metric: str | Metric, mode: Mode | None, known: TrainedLoss | None) -> Scorer:
    """The scorer of a metric as a user gives it."""
    if callable(metric):
        if mode is None:
            checks.refuse("mode", "be 'min' or 'max' for a metric of your own", "None", "Is lower or higher better?")
        checks.one_of("mode", mode, ("min", "max"))
        name = getattr(metric, "__name__", "metric")
        return Scorer("metric" if name == "<lambda>" else name, mode, metric, known)
    checks.one_of("metric", metric, ("loss", *METRICS))
    if known is None:
        fix = "Pass metric=function(outputs, targets), with mode='min' or mode='max'."
        checks.refuse("metric", "be a function where the loss of `objective` is unknown", repr(metric), fix)
    if metric == "loss":
        if mode not in (None, "min"):
            checks.refuse("mode", "be 'min' for the loss", repr(mode))
        return Scorer("loss", "min", None, known)
    function, natural, share, takes = METRICS[metric]
    kind = losses.known(known.loss)
    if kind is None or kind.takes not in takes:
        fix = "Pass metric=function(outputs, targets), with mode='min' or mode='max'."
        got = f"{metric!r} with the loss {losses.text_of(known.loss)}"
        checks.refuse("metric", f"go with outputs that are {' or '.join(takes)}", got, fix)
    if mode not in (None, natural):
        checks.refuse("mode", f"be {natural!r} for {metric!r}", repr(mode))
    return Scorer(metric, natural, functools.partial(function, loss=known.loss, pool=known.pool), known, share)


def accuracy(outputs: Tensor, targets: Tensor, *, loss: Any, pool: str) -> float:
    """The share of examples whose class the pooled prediction names."""
    kind = output_kind("classification", loss, pool)
    return float((class_probs(outputs, kind).argmax(1) == targets.flatten()).double().mean())


def error(outputs: Tensor, targets: Tensor, *, loss: Any, pool: str) -> float:
    """The share of examples whose class it does not name."""
    return 1.0 - accuracy(outputs, targets, loss=loss, pool=pool)


def rmse(outputs: Tensor, targets: Tensor, *, loss: Any, pool: str) -> float:
    """Root mean squared error of the pooled value."""
    return math.sqrt(float((_values(outputs, loss, pool) - _as_rows(targets)).square().mean()))


def mae(outputs: Tensor, targets: Tensor, *, loss: Any, pool: str) -> float:
    """Mean absolute error of the pooled value."""
    return float((_values(outputs, loss, pool) - _as_rows(targets)).abs().mean())


def _as_rows(targets: Tensor) -> Tensor:
    return targets.unsqueeze(-1) if targets.ndim == 1 else targets


def _values(outputs: Tensor, loss: Any, pool: str) -> Tensor:
    """The value that an ensemble predicts: its mean, or the median of quantiles."""
    kind = output_kind("regression", loss, pool)
    if kind.takes == "gaussian":
        return gaussians(outputs, kind)[0].mean(0)
    if kind.takes == "quantiles":
        middle = min(range(len(kind.levels)), key=lambda place: abs(kind.levels[place] - 0.5))
        return quantiles(outputs, kind)[..., middle].mean(0)
    return outputs.mean(0)


_OF_CLASSES = ("logits",)
_OF_VALUES = ("values", "gaussian", "quantiles")
METRICS: dict[str, tuple[Callable[..., float], Mode, bool, tuple[str, ...]]] = {
    "accuracy": (accuracy, "max", True, _OF_CLASSES),
    "error": (error, "min", True, _OF_CLASSES),
    "rmse": (rmse, "min", False, _OF_VALUES),
    "mae": (mae, "min", False, _OF_VALUES),
}
"""Metrics by name besides "loss": function, mode, whether it is a share, and the outputs that it takes."""


def audit_settings(known: TrainedLoss | None) -> dict[str, Any] | None:
    """Arguments of `dissensus.audit` for outputs trained on a loss; None where it does not take them."""
    entry = None if known is None else losses.known(known.loss)
    if known is None or entry is None:
        return None
    shared = {"loss": known.loss, "pool": known.pool}
    if entry.takes == "logits":
        return {**shared, "task": "classification", "kind": "logits"}
    if entry.takes == "label_logits":
        return {**shared, "task": "multilabel", "kind": "logits"}
    if entry.takes in ("values", "gaussian", "quantiles", "log_rate"):
        return {**shared, "task": "regression"}
    return None

"""What candidates are compared by: the loss of the pooled prediction, a named metric, or a function."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dissensus import checks, dense, losses
from dissensus.output_kinds import class_probs, output_kind, quantiles
from dissensus.train.settings import Metric, TargetSettings
from dissensus.train.trained_loss import TrainedLoss
from dissensus.train.weighting import CLASS_WEIGHTS, balanced_weights, weighted

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
    targets: TargetSettings = TargetSettings()
    """How targets count in the loss, as in the loss that is watched in training."""

    def class_weights(self, labels: Tensor) -> Tensor | None:
        """The weight of every class, for training labels ``[N, ...]``."""
        given = self.targets.class_weights
        if not isinstance(given, str):
            return given
        counted = labels if self.targets.ignore_index is None else labels[labels != self.targets.ignore_index]
        classes = int(counted.max()) + 1 if counted.numel() else 1
        return balanced_weights(labels, classes, self.targets.ignore_index)

    def of(self, outputs: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Scores:
        """The metric of an ensemble and of its members; NaN where it is not finite."""
        with torch.no_grad():
            if self.metric is None:
                assert self.known is not None
                loss = weighted(self.known, self.targets, self.known.loss, smooth=False)
                beside = {} if class_weights is None else {CLASS_WEIGHTS: class_weights.to(outputs)}
                whole = loss(outputs, targets, **beside)
                return Scores(_number(whole.total), _number(whole.parts["member_loss"].mean()))
            each = [self.metric(outputs[member : member + 1], targets) for member in range(len(outputs))]
            own = [_number(value) for value in each]
            return Scores(_number(self.metric(outputs, targets)), sum(own) / len(own))


def _number(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else math.nan


def scorer_of(
    metric: str | Metric, mode: Mode | None, known: TrainedLoss | None, targets: TargetSettings | None = None
) -> Scorer:
    """The scorer of a metric as a user gives it."""
    targets = targets or TargetSettings()
    if callable(metric):
        if mode is None:
            checks.refuse("mode", "be 'min' or 'max' for a metric of your own", "None", "Is lower or higher better?")
        checks.one_of("mode", mode, ("min", "max"))
        name = getattr(metric, "__name__", "metric")
        return Scorer("metric" if name == "<lambda>" else name, mode, metric, known, targets=targets)
    checks.one_of("metric", metric, ("loss", *METRICS))
    if known is None:
        fix = "Pass metric=function(outputs, targets), with mode='min' or mode='max'."
        checks.refuse("metric", "be a function where the loss of `objective` is unknown", repr(metric), fix)
    if metric == "loss":
        if mode not in (None, "min"):
            checks.refuse("mode", "be 'min' for the loss", repr(mode))
        return Scorer("loss", "min", None, known, targets=targets)
    function, natural, share, takes = METRICS[metric]
    kind = losses.known(known.loss)
    if kind is None or kind.takes not in takes:
        fix = "Pass metric=function(outputs, targets), with mode='min' or mode='max'."
        got = f"{metric!r} with the loss {losses.text_of(known.loss)}"
        checks.refuse("metric", f"go with outputs that are {' or '.join(takes)}", got, fix)
    if mode not in (None, natural):
        checks.refuse("mode", f"be {natural!r} for {metric!r}", repr(mode))
    named = functools.partial(_of_positions, function, targets.class_axis, targets.ignore_index)
    return Scorer(metric, natural, functools.partial(named, loss=known.loss, pool=known.pool), known, share, targets)


def _of_positions(
    metric: Callable[..., float],
    class_axis: int,
    ignore_index: int | None,
    outputs: Tensor,
    targets: Tensor,
    **settings: Any,
) -> float:
    """A metric on all positions of dense outputs that count; of plain outputs, on all examples."""
    return metric(*dense.counted(outputs, targets, class_axis=class_axis, ignore_index=ignore_index), **settings)


def accuracy(outputs: Tensor, targets: Tensor, *, loss: Any, pool: str) -> float:
    """The share of examples whose class the pooled prediction names; NaN where members have diverged."""
    kind = output_kind("classification", loss, pool)
    if not bool(outputs.amax(-1).isfinite().all()):  # the largest is NaN where any is; -inf may rule out a class
        return math.nan
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
        return losses.gaussian_moments(outputs.double(), kind.floor)[0].mean(0)  # of any variance, in a bad training
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


def audit_settings(known: TrainedLoss | None, targets: TargetSettings) -> dict[str, Any] | None:
    """Arguments of `dissensus.audit` for outputs trained on a loss; None where it does not take them."""
    entry = None if known is None else losses.known(known.loss)
    if known is None or entry is None:
        return None
    shared: dict[str, Any] = {"loss": known.loss, "pool": known.pool}
    if entry.takes == "logits":
        if targets.class_axis != 2:
            shared["class_axis"] = targets.class_axis
        if targets.ignore_index is not None:
            shared["ignore_index"] = targets.ignore_index
        return {**shared, "task": "classification", "kind": "logits"}
    if entry.takes == "label_logits":
        return {**shared, "task": "multilabel", "kind": "logits"}
    if entry.takes in ("values", "gaussian", "quantiles", "log_rate"):
        return {**shared, "task": "regression"}
    return None

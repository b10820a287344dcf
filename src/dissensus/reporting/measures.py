"""What a report measures, as plain data that classification and regression share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from jaxtyping import Float
from torch import Tensor

from dissensus import metrics, scores
from dissensus.auditing import Audit, audit
from dissensus.metrics.intervals import Interval
from dissensus.reporting.curves import Bin, RiskCurve
from dissensus.reporting.reading import ReportData, Settings

ROUNDING = 1e-9
"""Disagreement up to which members count as identical."""


class ShiftedResult(NamedTuple):
    """How an ensemble does on a shifted set, and how well scores find its examples."""

    examples: int
    numbers: dict[str, Interval]
    """Accuracy and calibration error, or errors of values, where the set has targets."""
    detection: dict[str, Interval]
    """Area under the ROC curve by score, with DeLong's interval."""
    false_positives: Interval
    """Share of shifted examples that pass for usual ones where 95 % of usual ones do, by the first score."""
    scores: dict[str, Float[Tensor, " U"]]


class Example(NamedTuple):
    """An example that is shown."""

    row: int
    target: str
    prediction: str
    numbers: dict[str, float]
    votes: str
    """What members say, in words."""


@dataclass(frozen=True)
class Measured:
    """Everything that is measured on a data set."""

    numbers: dict[str, Interval]
    members: dict[str, Interval]
    """The same for the members' mean."""
    audit: Audit
    risk: dict[str, RiskCurve]
    """Risk over coverage, by score."""
    best_risk: list[float]
    uncertainty: dict[str, list[Bin]]
    """Error by uncertainty, by score."""
    scores: dict[str, Float[Tensor, " N"]]
    """Scores by which shifted examples are found."""
    hardest: list[int]
    disputed: list[int]
    examples: dict[int, Example]
    shifted: dict[str, ShiftedResult] = field(default_factory=dict)
    calibration: list[Bin] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By class: ``classes`` and ``confusions``. For regression: ``targets``, ``predictions`` and ``levels``."""


def audited(
    data: ReportData, outputs: Tensor, reference: Tensor | None, training: tuple[Tensor, Tensor] | None
) -> Audit:
    """The audit of outputs, which are point predictions for regression."""
    settings = data.settings
    classifies = settings.task == "classification"
    arguments: dict[str, Any] = {"kind": settings.kind, "pool": settings.pool} if classifies else {}
    return audit(
        outputs,
        data.targets,
        task="classification" if classifies else "regression",
        loss=settings.loss if classifies else None,
        train=training,
        in_bag=data.in_bag,
        reference=reference,
        **arguments,
    )


def score_table(
    outputs: Float[Tensor, "M N C"], chosen: Mapping[str, scores.Score], settings: Settings
) -> dict[str, Float[Tensor, " N"]]:
    """Scores of every example in double precision, those that can be computed from outputs of this kind."""
    kind = cast(scores.Takes, settings.kind)
    return {name: values.double() for name, values in scores.table(outputs, kind=kind, scores=chosen).items()}


def detected(inside: dict[str, Tensor], outside: dict[str, Tensor]) -> tuple[dict[str, Interval], Interval]:
    """Areas under ROC curves, and false positives of the first score."""
    first = next(iter(inside))
    areas = {name: metrics.auroc(inside[name], outside[name]) for name in inside}
    return areas, metrics.ood(inside[first], outside[first], repeats=400).fpr_at_95

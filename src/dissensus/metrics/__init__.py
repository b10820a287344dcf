"""Metrics of predictions and scores, with intervals.

All functions refuse NaN, which one number for a whole data set would hide: leave such examples out, and report it.
(`Tempered.log_probs`, which predicts, returns NaN for that example.)

Functions of outputs and labels take dense ones, ``[M, B, C, *S]`` and ``[B, *S]``, and leave out positions whose label
is ``ignore_index``. Positions of an image are not independent examples, so functions with an interval refuse them.
NumPy arrays are taken as tensors.
"""

from dissensus.metrics.calibration import Calibration, calibration
from dissensus.metrics.detection import Detection, Difference, auroc, compared, ood, threshold
from dissensus.metrics.generalisation import Groups, Oracle, oracle, prediction_accuracy, wilson, worst_group
from dissensus.metrics.intervals import Interval
from dissensus.metrics.roc import Roc, roc
from dissensus.metrics.selective import RiskCoverage, risk_coverage
from dissensus.metrics.temperature import Tempered, temper, temperature
from dissensus.metrics.theory import (
    DISAGREEMENT_LOSS,
    OodCoverage,
    Premise,
    disagreement_indicator,
    high_loss,
    ood_coverage,
    ood_disagreement_bound,
    pair_disagreement,
    premise,
)

__all__ = [
    "DISAGREEMENT_LOSS",
    "Calibration",
    "Detection",
    "Difference",
    "Groups",
    "Interval",
    "OodCoverage",
    "Oracle",
    "Premise",
    "RiskCoverage",
    "Roc",
    "Tempered",
    "auroc",
    "calibration",
    "compared",
    "disagreement_indicator",
    "high_loss",
    "ood",
    "ood_coverage",
    "ood_disagreement_bound",
    "oracle",
    "pair_disagreement",
    "prediction_accuracy",
    "premise",
    "risk_coverage",
    "roc",
    "temper",
    "temperature",
    "threshold",
    "wilson",
    "worst_group",
]

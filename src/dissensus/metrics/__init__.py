"""Metrics of predictions and scores, with intervals.

Functions of a whole data set refuse NaN, which one number would hide: leave such examples out, and report it. What
returns numbers per example (`Tempered.log_probs`, and the scoring rules of regression) has NaN for that example.

Functions of outputs and labels take dense ones, ``[M, B, C, *S]`` and ``[B, *S]``, and leave out positions whose label
is ``ignore_index``. Positions of an image are not independent examples, so functions with an interval refuse them.
NumPy arrays are taken as tensors.
"""

from dissensus.metrics.calibration import Calibration, calibration
from dissensus.metrics.detection import Detection, Difference, auroc, compared, ood, threshold
from dissensus.metrics.generalisation import Groups, Oracle, oracle, prediction_accuracy, wilson, worst_group
from dissensus.metrics.intervals import Interval
from dissensus.metrics.regression import (
    DistributionCalibration,
    PredictionIntervals,
    Regression,
    distribution_calibration,
    mean_interval,
    prediction_intervals,
    regression,
)
from dissensus.metrics.roc import Roc, roc
from dissensus.metrics.scoring_rules import (
    crps_ensemble,
    crps_gaussian,
    crps_mixture,
    crps_quantiles,
    nll_gaussian,
    nll_mixture,
    pinball,
    pit,
    winkler,
)
from dissensus.metrics.selective import RiskCoverage, risk_coverage
from dissensus.metrics.temperature import (
    Tempered,
    TemperedVariance,
    temper,
    temper_variance,
    temperature,
    variance_temperature,
)
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
    "DistributionCalibration",
    "Groups",
    "Interval",
    "OodCoverage",
    "Oracle",
    "PredictionIntervals",
    "Premise",
    "Regression",
    "RiskCoverage",
    "Roc",
    "Tempered",
    "TemperedVariance",
    "auroc",
    "calibration",
    "compared",
    "crps_ensemble",
    "crps_gaussian",
    "crps_mixture",
    "crps_quantiles",
    "disagreement_indicator",
    "distribution_calibration",
    "high_loss",
    "mean_interval",
    "nll_gaussian",
    "nll_mixture",
    "ood",
    "ood_coverage",
    "ood_disagreement_bound",
    "oracle",
    "pair_disagreement",
    "pinball",
    "pit",
    "prediction_accuracy",
    "prediction_intervals",
    "premise",
    "regression",
    "risk_coverage",
    "roc",
    "temper",
    "temper_variance",
    "temperature",
    "threshold",
    "variance_temperature",
    "wilson",
    "winkler",
    "worst_group",
]

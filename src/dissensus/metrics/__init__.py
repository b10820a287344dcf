"""Numbers that say how good predictions and scores are, with intervals."""

from dissensus.metrics.calibration import Calibration, calibration
from dissensus.metrics.detection import Detection, Difference, Interval, auroc, compared, ood, threshold

__all__ = ["Calibration", "Detection", "Difference", "Interval", "auroc", "calibration", "compared", "ood", "threshold"]

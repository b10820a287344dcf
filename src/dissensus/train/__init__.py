"""Training: one stacked computation for all members."""

from dissensus.train import schedules
from dissensus.train.fit import fit
from dissensus.train.history import History, Progress, TrainingDiverged

__all__ = ["History", "Progress", "TrainingDiverged", "fit", "schedules"]

"""Training: one stacked computation for all members."""

from dissensus.train import schedules
from dissensus.train.fit import fit
from dissensus.train.history import History, Progress, TrainingDiverged
from dissensus.train.sweep import sweep
from dissensus.train.sweep_result import Sweep

__all__ = ["History", "Progress", "Sweep", "TrainingDiverged", "fit", "schedules", "sweep"]

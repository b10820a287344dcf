"""Training: one stacked computation for all members."""

from dissensus.train import schedules
from dissensus.train.fitting import fit
from dissensus.train.history import History, Progress, TrainingDiverged
from dissensus.train.memory import OutOfMemory
from dissensus.train.sweep_result import Sweep
from dissensus.train.sweeping import sweep

__all__ = ["History", "OutOfMemory", "Progress", "Sweep", "TrainingDiverged", "fit", "schedules", "sweep"]

"""Training: one stacked computation for all members."""

from dissensus.execution.meeting import RankFailed
from dissensus.execution.out_of_memory import OutOfMemory
from dissensus.train import callbacks, schedules
from dissensus.train.adversary import AdversarialTraining
from dissensus.train.cluster import ClusterError, RayCluster
from dissensus.train.convergence import Convergence
from dissensus.train.fitting import fit
from dissensus.train.history import History, Progress, TrainingDiverged
from dissensus.train.hyperparameters import drawn_hyperparameters, low_confidence, scale_weights
from dissensus.train.selection import Best
from dissensus.train.sweep_result import Sweep
from dissensus.train.sweeping import sweep
from dissensus.train.tuning import Candidate, Range, Spent, Tuned, tune

__all__ = [
    "AdversarialTraining",
    "Best",
    "Candidate",
    "ClusterError",
    "Convergence",
    "History",
    "OutOfMemory",
    "Progress",
    "Range",
    "RankFailed",
    "RayCluster",
    "Spent",
    "Sweep",
    "TrainingDiverged",
    "Tuned",
    "callbacks",
    "drawn_hyperparameters",
    "fit",
    "low_confidence",
    "scale_weights",
    "schedules",
    "sweep",
    "tune",
]

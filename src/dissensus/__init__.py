"""dissensus: deep ensembles whose members disagree where it counts."""

from dissensus import auditing, data, diversity, losses, masks, metrics, nets, objectives, pooling, scores, train
from dissensus.auditing import Audit, audit
from dissensus.axes import Decomposition, LossParts
from dissensus.ensemble import Ensemble
from dissensus.storage import StorageError
from dissensus.train import History, OutOfMemory, Progress, Sweep, TrainingDiverged, fit, sweep

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Decomposition",
    "Ensemble",
    "History",
    "LossParts",
    "OutOfMemory",
    "Progress",
    "StorageError",
    "Sweep",
    "TrainingDiverged",
    "audit",
    "auditing",
    "data",
    "diversity",
    "fit",
    "losses",
    "masks",
    "metrics",
    "nets",
    "objectives",
    "pooling",
    "scores",
    "sweep",
    "train",
]

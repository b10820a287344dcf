"""dissensus: deep ensembles whose members disagree where it counts."""

from dissensus import startup  # noqa: F401  # before the slow imports

# isort: split

from dissensus import (
    attacks,
    auditing,
    conformal,
    data,
    dense,
    diversity,
    export,
    losses,
    masks,
    metrics,
    nets,
    objectives,
    pooling,
    scores,
    train,
    trunk,
)
from dissensus.auditing import Audit, audit, audit_estimator
from dissensus.axes import Decomposition, LossParts
from dissensus.ensemble import Ensemble
from dissensus.predictive import Predictive, predictive
from dissensus.storage import StorageError
from dissensus.train import History, OutOfMemory, Progress, Sweep, TrainingDiverged, fit, sweep
from dissensus.trunk import SharedTrunk

__version__ = "0.2.0.dev0"

__all__ = [
    "Audit",
    "Decomposition",
    "Ensemble",
    "History",
    "LossParts",
    "OutOfMemory",
    "Predictive",
    "Progress",
    "SharedTrunk",
    "StorageError",
    "Sweep",
    "TrainingDiverged",
    "attacks",
    "audit",
    "audit_estimator",
    "auditing",
    "conformal",
    "data",
    "dense",
    "diversity",
    "export",
    "fit",
    "losses",
    "masks",
    "metrics",
    "nets",
    "objectives",
    "pooling",
    "predictive",
    "scores",
    "sweep",
    "train",
    "trunk",
]

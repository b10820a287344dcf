"""dissensus: deep ensembles whose members disagree where it counts."""

from dissensus import startup  # noqa: F401  # before the slow imports

# isort: split

from dissensus import (
    adapters,
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
    reporting,
    scores,
    train,
    trunk,
)
from dissensus.architecture import Architecture
from dissensus.auditing import Audit, audit, audit_estimator
from dissensus.axes import Decomposition, LossParts
from dissensus.ensemble import Ensemble
from dissensus.predictive import Predictive, predictive
from dissensus.reporting import Report, report
from dissensus.storage import StorageError
from dissensus.train import History, OutOfMemory, Progress, Sweep, TrainingDiverged, callbacks, fit, sweep
from dissensus.trunk import SharedTrunk

__version__ = "0.2.0"

__all__ = [
    "Architecture",
    "Audit",
    "Decomposition",
    "Ensemble",
    "History",
    "LossParts",
    "OutOfMemory",
    "Predictive",
    "Progress",
    "Report",
    "SharedTrunk",
    "StorageError",
    "Sweep",
    "TrainingDiverged",
    "adapters",
    "attacks",
    "audit",
    "audit_estimator",
    "auditing",
    "callbacks",
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
    "report",
    "reporting",
    "scores",
    "sweep",
    "train",
    "trunk",
]

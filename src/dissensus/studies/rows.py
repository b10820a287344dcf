"""What a training leaves in a report: one row per run, with its point, its measures and its curves."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dissensus.ensemble import Ensemble
from dissensus.execution.inference import Inputs
from dissensus.studies import measures
from dissensus.studies.spec import Spec
from dissensus.train import History
from dissensus.train.settings import Metric

TRACKED = ("accuracy", "member_accuracy")
"""Measures that are followed over the epochs, beside the losses."""


class Done(NamedTuple):
    """A run that has been trained."""

    number: int
    point: dict[str, Any]
    ensemble: Ensemble
    history: History
    status: str


def row(
    spec: Spec, data: str, done: Done, test: tuple[Inputs, Tensor], train: tuple[Inputs, Tensor], own: Path
) -> dict[str, Any]:
    """Measure a run; its test outputs are left in the folder ``own``."""
    assert spec.objective is not None
    loss, pool = spec.objective.loss, spec.objective.pool
    outputs = done.ensemble.predict(test[0], file=own / f"outputs-{done.number:03d}.npy")
    wanted = any(name in measures.OF_TRAINING for name in spec.evaluation.measures)
    on_train = measures.error(done.ensemble.predict(train[0]), train[1], loss, pool) if wanted else None
    told: dict[str, Any] = {
        "data": data,
        **{key: value for key, value in done.point.items() if key in spec.grid},
        "run": done.number,
        "status": done.status,
        "epochs": len(done.history.epochs),
        "members": done.ensemble.members,
        "measures": measures.measured(
            measures.of_outputs(spec.evaluation.measures), outputs, test[1], loss, pool, on_train
        ),
    }
    if on_train is not None:
        told["train_error"] = on_train
    if spec.evaluation.curves:
        told["curves"] = curves(done.history.epochs)
    return told


def tracked(spec: Spec) -> dict[str, Metric]:
    """What is followed on test data over the epochs, where curves are wanted."""
    assert spec.objective is not None
    loss, pool = spec.objective.loss, spec.objective.pool
    names = [name for name in TRACKED if name in spec.evaluation.measures] if spec.evaluation.curves else []
    return {name: partial(_taken, name, loss, pool) for name in names}


def _taken(name: str, loss: str, pool: Any, outputs: Tensor, targets: Tensor) -> float:
    return measures.MEASURES[name](outputs, targets, loss, pool)


def curves(epochs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Losses over the epochs: of training as it went, and of the test data at every epoch's end; and what is tracked.

    >>> curves([{"ensemble": 1.0, "validation_ensemble": 1.5, "validation_accuracy": 0.5}])
    {'train_error': [1.0], 'test_error': [1.5], 'accuracy': [0.5], 'gap': [0.5]}
    """
    parts = {"error": "ensemble", "individual": "individual", "diversity": "diversity"}
    names = {f"train_{name}": part for name, part in parts.items()}
    names |= {f"test_{name}": f"validation_{part}" for name, part in parts.items()}
    names |= {name: f"validation_{name}" for name in TRACKED}
    found = {name: [entry[key] for entry in epochs] for name, key in names.items() if epochs and key in epochs[0]}
    if "test_error" in found and "train_error" in found:
        found["gap"] = [b - a for a, b in zip(found["train_error"], found["test_error"], strict=True)]
    return found

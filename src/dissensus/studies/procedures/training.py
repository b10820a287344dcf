"""What all trainings of studies share: units, trainers, trained runs and their rows."""

import io
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.ensemble import Ensemble
from dissensus.execution.inference import Inputs
from dissensus.storage import Formats, StorageError, read_regular, write_atomically, write_record
from dissensus.studies import measures
from dissensus.studies.checked_folders import (
    check_files,
    inside,
    run_name,
    stored_record,
    sums_of,
    write_unit_manifest,
)
from dissensus.studies.datasets import is_split_by_seed
from dissensus.studies.measures import LabelledOutputs
from dissensus.studies.procedures.base import StudyContext
from dissensus.studies.results import Measure, Row
from dissensus.studies.spec import Spec
from dissensus.train import History
from dissensus.train.settings import Metric

log = logging.getLogger("dissensus")

TRACKED = ("accuracy", "member_accuracy")
"""Measures that are followed over the epochs, beside the losses."""
_PARTS = {"error": "ensemble", "individual": "individual", "diversity": "diversity"}
"""Losses that are followed over the epochs, and their names in a history."""
CURVES = (*(f"{part}_{name}" for part in ("train", "test") for name in _PARTS), *TRACKED, "gap")
"""Curves over the epochs; ``"CURVE@SHARE"`` is a measure, the value at the end of that share of the epochs."""
ROWS = "rows.json"
TARGETS = "targets.npy"
POINT_FORMATS = Formats(newest=1)
"""Of files of finished points."""


@dataclass(frozen=True)
class TrainingUnit:
    """One data set, and the seeds that share its split."""

    data: str
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.data}-seed-{self.seeds[0]}" if len(self.seeds) == 1 else self.data


def training_units(spec: Spec) -> list[TrainingUnit]:
    """Units of a study: one per data set or, where every seed has its own split or search, per data set and seed."""
    seeds = [int(seed) for seed in spec.grid.get("seed", [0])]
    units: list[TrainingUnit] = []
    for data in spec.data:
        if is_split_by_seed(data) or spec.search is not None:
            units += [TrainingUnit(data, (seed,)) for seed in seeds]
        else:
            units.append(TrainingUnit(data, tuple(seeds)))
    return units


def first_seed(unit: TrainingUnit) -> int:
    """Priority of a unit: all data sets get their first seed before any gets its second."""
    return unit.seeds[0]


@dataclass(frozen=True)
class Trainer:
    """A way to train the points of a grid on one data set."""

    suits: Callable[[Spec, str], bool]
    """Whether it trains a study's grid on some data."""
    rows: Callable[[TrainingUnit, StudyContext, Path], list[Row]]
    """Trains all points; leaves outputs and targets in the folder."""
    axes: Callable[[Spec], set[str]]
    """Axes that a grid may have."""
    is_sweep: bool = False
    """Whether runs are those of sweeps, which a cluster can train."""


@dataclass(frozen=True)
class TrainedRun:
    """An ensemble that has been trained at a point of the grid."""

    number: int
    point: Mapping[str, Any]
    ensemble: Ensemble
    history: History
    status: str
    hyperparameters: Mapping[str, Any] | None = None
    """Those that the method has chosen."""

    def row(self, spec: Spec, data: str, values: Mapping[str, float]) -> Row:
        """The run's row with some measures."""
        return Row(
            data,
            {axis: value for axis, value in self.point.items() if axis in spec.grid and axis != "seed"},
            int(self.point["seed"]),
            values,
            run=self.number,
            status=self.status,
            epochs=len(self.history.epochs),
            members=self.ensemble.members,
            hyperparameters=self.hyperparameters,
        )


def outputs_file(folder: Path, run: int, dataset: str = "") -> Path:
    """The file of a run's member outputs, on test data or on another set."""
    return folder / f"outputs-{run:03d}{f'-{dataset}' if dataset else ''}.npy"


def stored_outputs(folder: Path, run: int, dataset: str = "") -> Tensor:
    """Member outputs ``[M, N, C]`` that a run has left."""
    return torch.from_numpy(np.load(outputs_file(folder, run, dataset)))


def write_targets(folder: Path, targets: Tensor) -> None:
    """Write the targets of the test data, for studies that measure the same outputs again."""
    write_array(folder / TARGETS, targets.numpy())


def write_array(file: Path, array: np.ndarray[Any, Any]) -> None:
    """Write an ``.npy`` file so that it is whole or absent, on a full disk too."""
    content = io.BytesIO()
    np.save(content, array)
    write_atomically(file, content.getvalue())


def finish_unit(run: Path, unit: str, rows: Sequence[Row]) -> None:
    """Write a unit's rows and its manifest, which marks it as finished; remove what `finish_point` has left."""
    folder = inside(run, unit)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ROWS, json.dumps([row.to_json() for row in rows], indent=1).encode())
    write_unit_manifest(run, unit)
    for file in folder.glob(".row-*.json"):
        file.unlink(missing_ok=True)


def point_file(folder: Path, number: int) -> Path:
    """The file of a finished point within an unfinished unit; no part of the unit's result."""
    return folder / f".row-{number:03d}.json"


def finish_point(run: Path, unit: str, row: Row, reference: int | None = None) -> None:
    """Keep the row of a trained point, so that a run that is interrupted does not train the point again.

    Args:
        run: The folder of the run.
        unit: Name of the unit.
        row: The point's row. Its outputs are in the unit's folder.
        reference: Number of the run that the audit has compared with this one.
    """
    assert row.run is not None
    folder, outputs = inside(run, unit), outputs_file(inside(run, unit), row.run)
    files = {outputs, *folder.glob(f"{outputs.stem}-*.npy")}
    if reference is not None:
        files.add(outputs_file(folder, reference))
    of, sums = _point_name(run, unit, row.run), sums_of(folder, sorted(files))
    content = {"format": POINT_FORMATS.newest, "of": of, "row": row.to_json(), "files": sums}
    write_record(point_file(folder, row.run), content)


def finished_point(run: Path, unit: str, number: int, spec: Spec) -> Row | None:
    """The row of a point that an interrupted run has finished; None where there is none, or its files are not whole."""
    folder = inside(run, unit)
    file = point_file(folder, number)
    if not file.exists():
        return None
    try:
        record = stored_record(file, POINT_FORMATS)
        if record.get("of") != _point_name(run, unit, number):
            raise StorageError(f"{file} is of {record.get('of')!r}: it was moved or swapped.")
        check_files(folder, record["files"], file.name)
    except StorageError as reason:
        log.warning("%s The point is trained again.", reason)
        return None
    return Row.from_json(record["row"], list(spec.grid))


def _point_name(run: Path, unit: str, number: int) -> str:
    """What the file of a point is of: paper, study, scale with the digest of settings and version, unit and number."""
    return f"{run_name(run)}/{unit}/{number}"


def read_rows(folder: Path, spec: Spec) -> list[Row]:
    """The rows that a unit has left."""
    return [Row.from_json(row, list(spec.grid)) for row in json.loads(read_regular(folder / ROWS))]


def measured_row(
    context: StudyContext,
    data: str,
    trained: TrainedRun,
    folder: Path,
    *,
    test: tuple[Inputs, Tensor],
    train: tuple[Inputs, Tensor],
) -> Row:
    """A run with its measures; its outputs on test data are left in the folder."""
    spec = context.spec
    assert spec.objective is not None
    loss, pool = spec.objective.loss, trained.point.get("pool", spec.objective.pool)
    outputs = trained.ensemble.predict(test[0], file=outputs_file(folder, trained.number))
    train_error = None
    if any(name in measures.TRAIN_MEASURES for name in spec.evaluation.measures):
        train_error = measures.error(trained.ensemble.predict(train[0]), train[1], loss, pool)
    judged = LabelledOutputs(outputs, test[1], loss, pool, train_error)
    curves = epoch_curves(trained.history.epochs) if spec.evaluation.curves else None
    row = trained.row(spec, data, measured_values(context, spec, judged, curves))
    return replace(row, train_error=train_error, curves=curves)


def measured_values(
    context: StudyContext, spec: Spec, judged: LabelledOutputs, curves: Mapping[str, Sequence[float]] | None
) -> dict[str, float]:
    """A study's measures of outputs and of curves, by name."""
    names = [name for name in spec.evaluation.measures if measures.is_output_measure(name, context.measures)]
    others = [name for name in spec.evaluation.measures if name not in names and is_curve_measure(name)]
    values = measures.values(names, judged, context.measures)
    return values | {name: curve_value(name, curves or {}) for name in others}


def is_curve_measure(name: str) -> bool:
    """Whether a measure is the value of a known curve at the end of a share of the epochs.

    >>> is_curve_measure("train_error@0.1"), is_curve_measure("train_error@2"), is_curve_measure("train_error")
    (True, False, False)
    """
    measure = Measure.parse(name)
    return bool(measure.share) and measure.kind in CURVES and 0 < Fraction(measure.share) <= 1


def curve_value(name: str, curves: Mapping[str, Sequence[float]]) -> float:
    """The value of a curve at the end of a share of its epochs, rounded up; not a number where there is no such curve.

    >>> curve_value("train_error@0.5", {"train_error": [3.0, 2.0, 1.0]}), curve_value("gap@1", {})
    (2.0, nan)
    """
    measure = Measure.parse(name)
    curve = curves.get(measure.kind, ())
    return curve[math.ceil(Fraction(measure.share) * len(curve)) - 1] if len(curve) else math.nan


def tracked(spec: Spec) -> dict[str, Metric]:
    """Metrics that `fit` follows on test data over the epochs, where curves are asked for."""
    assert spec.objective is not None
    loss, pool = spec.objective.loss, spec.objective.pool
    names = [name for name in TRACKED if name in spec.evaluation.measures] if spec.evaluation.curves else []
    return {name: partial(_tracked_value, name, loss, pool) for name in names}


def _tracked_value(name: str, loss: str, pool: Any, outputs: Tensor, targets: Tensor) -> float:
    return measures.MEASURES[name](outputs, targets, loss, pool)


def epoch_curves(epochs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Losses over the epochs, during training and on test data at the end of every epoch, and tracked metrics.

    >>> epoch_curves([{"ensemble": 1.0, "validation_ensemble": 1.5, "validation_accuracy": 0.5}])
    {'train_error': [1.0], 'test_error': [1.5], 'accuracy': [0.5], 'gap': [0.5]}
    """
    names = {f"train_{name}": part for name, part in _PARTS.items()}
    names |= {f"test_{name}": f"validation_{part}" for name, part in _PARTS.items()}
    names |= {name: f"validation_{name}" for name in TRACKED}
    curves = {name: [entry[key] for entry in epochs] for name, key in names.items() if epochs and key in epochs[0]}
    if "test_error" in curves and "train_error" in curves:
        curves["gap"] = [b - a for a, b in zip(curves["train_error"], curves["test_error"], strict=True)]
    return curves

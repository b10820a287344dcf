"""The procedures "attack", "transfer" and "features": measures of ensembles that were trained before.

Every ensemble is a unit, so that several can be attacked at once. Measures that are finished are kept: an interrupted
unit continues after the last one.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dissensus.ensemble import Ensemble
from dissensus.storage import Formats, StorageError, write_record
from dissensus.studies import datasets
from dissensus.studies.checked_folders import inside, run_name, stored_record
from dissensus.studies.datasets import StudyData, is_split_by_seed
from dissensus.studies.measures import OutputMeasure, is_output_measure
from dissensus.studies.procedures import adversarial, attack_measures, methods, requirements, train
from dissensus.studies.procedures.attack_measures import AttackedEnsemble
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.training import TrainingUnit, training_units
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec
from dissensus.studies.standardisation import Standardised, channel_scales
from dissensus.train.grid import points

log = logging.getLogger("dissensus")

FORMATS = Formats(newest=1, oldest=0)
"""Of files of measures."""

GPU_BATCH = 2000
"""Examples in a batch on a GPU: every batch captures its own graphs."""


@dataclass(frozen=True)
class AttackUnit:
    """One trained ensemble."""

    training: TrainingUnit
    number: int
    """Of the point, among those of the training unit."""
    point: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of its folder, within that of its training."""
        return f"{self.training.name}/attacked-{self.number:03d}"


def units(spec: Spec) -> list[AttackUnit]:
    """One unit per point of the grid and seed."""
    return [
        AttackUnit(training, number, point)
        for training in training_units(spec)
        for number, point in enumerate(points({**spec.grid, "seed": list(training.seeds)}))
    ]


def run(unit: AttackUnit, context: StudyContext) -> list[Row]:
    """The rows of an ensemble with measures of clean outputs and under attack."""
    rows = train.remeasured(unit.training, context, unit.point)
    return [_attacked_row(unit, context.on_data(unit.training.data), row) for row in rows]


def _attacked_row(unit: AttackUnit, context: StudyContext, row: Row) -> Row:
    names = [name for name in context.spec.evaluation.measures if not is_output_measure(name, context.measures)]
    if row.status != "done":
        return replace(row, measures={**row.measures, **dict.fromkeys(names, float("nan"))})
    assert row.run is not None
    folder = inside(context.folder, unit.name)
    folder.mkdir(parents=True, exist_ok=True)
    spec = context.spec
    data = datasets.load_unscaled(
        row.data, train_examples=spec.optimisation.examples, test_examples=spec.evaluation.examples
    )
    model = stored_model(spec, data, row, context.base / unit.training.name).to(context.device)
    ensemble = AttackedEnsemble(
        model,
        *data.test,
        folder=folder,
        examples=spec.evaluation.attacked,
        strengths=spec.evaluation.strong,
        seed=row.seed,
        batch_size=GPU_BATCH if context.device.type == "cuda" else AttackedEnsemble.batch_size,
    )
    stored = _measured(unit, context, names, ensemble, folder / "finished.json")
    return replace(
        row,
        measures={**row.measures, **{name: stored["measures"][name] for name in names}},
        examples={name: attack_measures.examples_of(name, ensemble) for name in names},
        curves=stored.get("curves", row.curves),
        matrices=stored.get("matrices"),
        flags=stored.get("flags"),
        feature_map=stored.get("map"),
    )


def _measured(
    unit: AttackUnit, context: StudyContext, names: list[str], ensemble: AttackedEnsemble, file: Path
) -> dict[str, Any]:
    """All measures under attack, and what figures show of them; every finished measure is stored in the file."""
    of = f"{run_name(context.folder)}/{unit.name}"
    stored = _finished(file, of)
    title = " ".join(str(value) for value in unit.point.values())
    for number, name in enumerate(names):
        if name in stored["measures"]:
            continue
        context.progress(f"{unit.training.data}, {title}: {name}", number / len(names))
        value = attack_measures.value(name, ensemble)
        assert value is not None, name
        stored["measures"][name] = value
        for key, drawn in ensemble.drawn.items():
            stored[key] = {**stored.get(key, {}), **drawn} if isinstance(drawn, dict) else drawn
        write_record(file, stored)
    return stored


def _finished(file: Path, of: str) -> dict[str, Any]:
    """Measures that a unit has left; none where the file is damaged or that of another unit."""
    nothing: dict[str, Any] = {"format": FORMATS.newest, "of": of, "measures": {}}
    if not file.exists():
        return nothing
    try:
        stored = stored_record(file, FORMATS)
    except StorageError as reason:
        log.warning("%s The measures are taken again.", reason)
        return nothing
    if stored.get("of") != of:
        log.warning("%s holds measures of %r: it was moved or swapped. They are taken again.", file, stored.get("of"))
        return nothing
    return stored


def stored_model(spec: Spec, data: StudyData, row: Row, folder: Path) -> nn.Module:
    """A run's ensemble, for images in [0, 1]."""
    assert row.run is not None
    method = methods.method_of(spec, row.value("method"))
    ensemble_folder = methods.ensemble_folder(folder, row.run)
    if row.value(adversarial.AXIS) is not None:
        return Ensemble.load(ensemble_folder, adversarial.standardised_builder(spec, method, data)).eval()
    ensemble = Ensemble.load(ensemble_folder, methods.method_builder(spec, method, data))
    return Standardised(ensemble, *channel_scales(data)).eval()


def missing(spec: Spec, measures: Mapping[str, OutputMeasure]) -> list[str]:
    """What a study under attack lacks."""
    lacks = requirements.missing_objective(spec) + requirements.missing_network(spec)
    lacks += requirements.missing_measures(spec, attack_measures.is_attack_measure, measures)
    lacks = lacks or requirements.missing_method_settings(spec)
    return lacks or _missing_targets(spec) or train.missing_axes(spec) or requirements.missing_search(spec)


def _missing_targets(spec: Spec) -> list[str]:
    """Axes, test sets and attacks that do not exist."""
    lacks = [f"'grid' needs the axis {axis!r}" for axis in ("method", "seed") if axis not in spec.grid]
    lacks += [f"{name!r} has no fixed test set to attack" for name in spec.data if is_split_by_seed(name)]
    for key, known in (("attacked", attack_measures.LIMITED), ("strong", attack_measures.STRENGTHS)):
        names = [name for name in getattr(spec.evaluation, key) if name not in known]
        lacks += [f"no attack of 'evaluation.{key}' is called {name!r}" for name in names]
    return lacks[:1]


PROCEDURE = Procedure(units, run, missing, steps=(train.SEARCH, train.TRAINING), includes=("train",))

"""The procedures "detect", "generalise" and "timing": methods that are measured on data they were not trained on."""

import base64
import io
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus import pooling, scores
from dissensus.ensemble import Ensemble
from dissensus.storage import write_atomically
from dissensus.studies.backbones import Preparation, PreparedData
from dissensus.studies.checked_folders import inside, listed_files
from dissensus.studies.measures import OutputMeasure
from dissensus.studies.procedures import requirements, shift_measures
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.shift_measures import AUDITED_EXAMPLES, LDR, SECONDS, SOUP, ShiftOutputs
from dissensus.studies.procedures.shift_training import PointTraining, Settings, interacts, point_settings
from dissensus.studies.procedures.train import SEARCH
from dissensus.studies.procedures.training import (
    TrainedRun,
    TrainingUnit,
    finish_point,
    finished_point,
    first_seed,
    outputs_file,
    read_rows,
    stored_outputs,
    training_units,
    write_array,
)
from dissensus.studies.results import AuditNote, Measure, Row
from dissensus.studies.shifted_datasets import ShiftedData, is_chosen_in_training, load_shifted
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import VARIED
from dissensus.train import History, Progress
from dissensus.train.grid import points

SHOWN = 5
"""Number of pictures with the most, and with the least, disagreement that are kept."""
_TARGETS = "sets.npz"
_PICTURES = "pictures.npy"


def _train(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """Train and measure every point of the grid on a data set; an interrupted unit continues after the last point."""
    folder = inside(context.folder, unit.name)
    folder.mkdir(parents=True, exist_ok=True)
    context = context.on_data(unit.data).titled(unit.name)
    spec = context.spec
    grid = points({**spec.grid, "seed": list(unit.seeds)})
    settings = [point_settings(spec, point) for point in grid]
    named = [str(setting["unlabelled"]) for setting in settings if setting.get("unlabelled")]
    unlabelled = [name for name in dict.fromkeys(named) if not is_chosen_in_training(name)]
    raw = load_shifted(unit.data, spec, shift_measures.sets_of(spec.evaluation.measures), unlabelled)
    context.progress("preparing the data", 0.0)
    cache = folder.parents[3] / "features"  # shared by all studies
    preparation = Preparation(raw, spec, context.device, cache)
    rows: list[Row] = []
    references: dict[tuple[object, ...], int] = {}  # first runs without interaction, by seed and network
    for number, (point, setting) in enumerate(zip(grid, settings, strict=True)):
        title = f"{number + 1} of {len(grid)}, {', '.join(str(value) for value in point.values())}"

        def on_progress(moment: Progress, number: int = number, title: str = title) -> None:
            context.progress(f"{title}: {moment}", (number + moment.step / moment.steps) / len(grid))

        kind = tuple(setting.get(name) for name in ("members", "backbone", "layers", "initial"))
        key = (int(point["seed"]), *kind)
        row = finished_point(context.folder, unit.name, number, spec)
        if row is None:
            prepared = _prepared(preparation, setting)
            trained = PointTraining(context, setting, point, number, prepared, on_progress).trained()
            row = _row(context, setting, trained, prepared, folder, references.get(key))
            finish_point(context.folder, unit.name, row, references.get(key))
        chosen = {**setting, **(row.hyperparameters or {})}
        if row.status == "done" and not interacts(chosen) and not chosen.get("diverse"):
            references.setdefault(key, number)
        rows.append(row)
    _write_targets(_prepared(preparation, settings[0]).data, raw, folder)
    return rows


def _prepared(preparation: Preparation, settings: Settings) -> PreparedData:
    """The data for a point; what whole networks ignore may be missing."""
    backbone, layers = str(settings.get("backbone", "")), int(settings.get("layers", 2))
    return preparation.of(backbone, layers, str(settings.get("initial", "pretrained")))


def _row(
    context: StudyContext,
    settings: Settings,
    trained: TrainedRun,
    prepared: PreparedData,
    folder: Path,
    reference: int | None,
) -> Row:
    """A run's row; the audit compares with the run whose number is ``reference``."""
    spec, shifted, ensemble = context.spec, prepared.data, trained.ensemble
    data = shifted.study_data()
    assert spec.objective is not None
    outputs = ensemble.predict(data.test[0], file=outputs_file(folder, trained.number))
    others = {
        name: (ensemble.predict(x, file=outputs_file(folder, trained.number, name)), y)
        for name, (x, y) in shifted.sets.items()
        if isinstance(x, Tensor)
    }
    x, y = prepared.split[0]
    on_train = ensemble.predict(x[:AUDITED_EXAMPLES]), y[:AUDITED_EXAMPLES]
    note = None
    if ensemble.members > 1 and trained.status == "done":
        pool = spec.objective.pool
        compared = None if reference is None else stored_outputs(folder, reference)
        audit = shift_measures.audit_outputs(outputs, data.test[1], pool, on_train, compared)
        note = AuditNote(audit.verdict, audit.judgement.reasons)
    measured = ShiftOutputs(
        outputs,
        data.test[1],
        others,
        spec.objective.loss,
        spec.objective.pool,
        str(settings["objective"]),
        shifted.groups,
        _soup_outputs(spec, ensemble, prepared),
        "" if note is None else note.verdict,
        _seconds_per_epoch(trained.history),
    )
    values = shift_measures.values(spec.evaluation.measures, measured, context.measures)
    return replace(
        trained.row(spec, shifted.name, values),
        objective=measured.objective,
        seconds_per_epoch=measured.seconds_per_epoch if SECONDS in values else None,
        audit=note,
    )


def _seconds_per_epoch(history: History) -> float:
    """The median over all epochs but the first, which also chooses a backend and captures a graph."""
    times = [entry["seconds"] for entry in history.epochs]
    return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else float("nan")


def _soup_outputs(spec: Spec, ensemble: Ensemble, prepared: PreparedData) -> dict[str, Tensor]:
    """Outputs of the averaged weights on the sets that measures ask for."""
    parsed = [Measure.parse(name) for name in spec.evaluation.measures]
    sets = [measure.dataset for measure in parsed if measure.kind == SOUP]
    if not sets:
        return {}
    data = prepared.data
    soup = Ensemble.from_modules([ensemble.soup(prepared.split[0][0][:AUDITED_EXAMPLES])])
    inputs = {"": data.test[0], **{name: x for name, (x, _) in data.sets.items()}}
    return {name: soup.predict(inputs[name]) for name in sets}


def _write_targets(shifted: ShiftedData, raw: ShiftedData, folder: Path) -> None:
    """Leave targets of all sets, and test pictures, for studies that measure the same trainings again."""
    labelled = {name: y for name, (_, y) in shifted.sets.items() if y is not None}
    arrays: dict[str, Any] = {name: y.numpy() for name, y in {"test": shifted.study_data().test[1], **labelled}.items()}
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_atomically(folder / _TARGETS, content.getvalue())
    if isinstance(raw.test[0], Tensor):
        write_array(folder / _PICTURES, (raw.test[0] * 255).round().to(torch.uint8).numpy())


def _remeasured(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """A unit's rows with this study's measures, from outputs that another study has kept."""
    folder, spec = context.base / unit.name, context.on_data(unit.data).spec
    assert spec.objective is not None
    stored = listed_files(context.base, unit.name)
    labels = {name: torch.from_numpy(y) for name, y in np.load(folder / _TARGETS).items()}
    sets = shift_measures.sets_of(spec.evaluation.measures)
    methods = spec.grid.get("method")
    with_pictures = spec.figure is not None and spec.figure.x.startswith("predictive_diversity")
    rows: list[Row] = []
    for row in read_rows(folder, spec):
        if methods is not None and row.value("method") not in methods:
            continue
        assert row.run is not None
        outputs = stored_outputs(folder, row.run)
        others = {
            name: (stored_outputs(folder, row.run, name), labels.get(name))
            for name in sets
            if outputs_file(folder, row.run, name).name in stored  # not all data has all sets
        }
        measured = ShiftOutputs(
            outputs,
            labels["test"],
            others,
            spec.objective.loss,
            spec.objective.pool,
            row.objective or "",
            verdict="" if row.audit is None else row.audit.verdict,
            seconds_per_epoch=float("nan") if row.seconds_per_epoch is None else row.seconds_per_epoch,
        )
        row = replace(row, measures=shift_measures.values(spec.evaluation.measures, measured, context.measures))
        if with_pictures and row.objective == LDR and not any(other.pictures for other in rows):
            row = replace(row, pictures=extreme_pictures(outputs, labels["test"], folder / _PICTURES))
        rows.append(row)
    return rows


def extreme_pictures(outputs: Tensor, targets: Tensor, file: Path) -> list[dict[str, Any]]:
    """Pictures with the most and the least disagreement, with their class and the predictions of pool and members."""
    if not file.exists():
        return []
    pictures = np.load(file, mmap_mode="r")
    disagreement = scores.predictive_diversity(outputs.softmax(-1))
    order = disagreement.argsort()
    pooled = pooling.mean_score(outputs).argmax(-1)
    predicted = outputs.argmax(-1)
    return [
        {
            "disagreement": float(disagreement[i]),
            "true": int(targets[i]),
            "ensemble": int(pooled[i]),
            "members": predicted[:, i].tolist(),
            "shape": list(pictures[i].shape),
            "picture": base64.b64encode(np.ascontiguousarray(pictures[i]).tobytes()).decode(),
        }
        for i in [*order[-SHOWN:].flip(0).tolist(), *order[:SHOWN].tolist()]
    ]


def run(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """Train and measure a unit, or measure it again where another study has trained it."""
    return _remeasured(unit, context) if context.spec.uses else _train(unit, context)


def missing(spec: Spec, measures: Mapping[str, OutputMeasure]) -> list[str]:
    """What a study lacks."""
    lacks = requirements.missing_objective(spec) + requirements.missing_network(spec, heads=True)
    lacks += requirements.missing_measures(spec, shift_measures.is_shift_measure, measures)
    axes = {"seed", "method", "members", "layers", "initial", "sampled", "unlabelled", *VARIED}
    axes |= requirements.objective_parameters(spec) | requirements.network_options(spec)
    lacks = lacks or requirements.missing_method_settings(spec)
    return lacks or requirements.missing_axes(spec, axes) or requirements.missing_search(spec)


PROCEDURE = Procedure(training_units, run, missing, steps=(SEARCH,), priority=first_seed, version=2)

"""The procedures "detect", "generalise" and "timing": methods that are measured on data they were not trained on."""

import base64
import io
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dissensus import objectives, pooling, scores, train
from dissensus.ensemble import Ensemble
from dissensus.storage import write_atomically
from dissensus.studies.backbones import head, prepared
from dissensus.studies.checked_folders import inside, listed_files
from dissensus.studies.datasets import StudyData
from dissensus.studies.measures import OutputMeasure
from dissensus.studies.procedures import requirements, shift_measures
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.shift_measures import AUDITED_EXAMPLES, LDR, SECONDS, SOUP, ShiftOutputs
from dissensus.studies.procedures.train import SEARCH
from dissensus.studies.procedures.training import (
    TrainedRun,
    TrainingUnit,
    first_seed,
    outputs_file,
    read_rows,
    stored_outputs,
    training_units,
    write_array,
)
from dissensus.studies.registry import HEADS, METHODS, NETWORKS, MethodError, maker, objective_with, options_of
from dissensus.studies.results import AuditNote, Measure, Row
from dissensus.studies.shifted_datasets import CONFIDENCE, ShiftedData, load_shifted
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import VARIED, training_arguments
from dissensus.train import History, Progress, TrainingDiverged, fit
from dissensus.train.grid import points

SHOWN = 5
"""Number of pictures with the most, and with the least, disagreement that are kept."""
RANGES: dict[str, tuple[float, float]] = {
    "lr": (0.1, 1.0),
    "weight_decay": (0.1, 10.0),
    "smoothing": (0.0, 0.1),
    "initial_scale": (0.5, 2.0),
}
"""Ranges of diverse hyperparameters; learning rate and weight decay are multiplied by the study's."""
FIRST_STAGE = 1000
"""Added to the seed of the network that chooses examples in two stages."""
_TARGETS = "sets.npz"
_PICTURES = "pictures.npy"

Settings = Mapping[str, Any]
"""Settings of one point: those of the study, of its method and of the point, the last taking precedence."""


def point_settings(spec: Spec, point: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a point of the grid."""
    assert spec.members is not None
    assert spec.objective is not None
    options = {key: value for key, value in spec.objective.options.items() if key != METHODS}
    methods = spec.objective.options.get(METHODS, {})
    name = point.get("method", "")
    if name and name not in methods:
        raise MethodError(f"grid.method names {name!r}, which {METHODS} do not hold: {', '.join(methods)}")
    return {
        "objective": spec.objective.name,
        "members": spec.members.count,
        **spec.members.options,
        **options,
        **methods.get(name, {}),
        **{key: value for key, value in point.items() if key not in ("method", "seed")},
    }


@dataclass
class _PreparedData:
    """Inputs as networks take them, prepared once per backbone."""

    raw: ShiftedData
    context: StudyContext
    cache: Path
    by_backbone: dict[str, ShiftedData] = field(default_factory=dict)

    def of(self, settings: Settings) -> ShiftedData:
        """The data for a point."""
        backbone = str(settings.get("backbone", ""))
        if backbone not in self.by_backbone:
            context = self.context
            self.by_backbone[backbone] = prepared(self.raw, context.spec, backbone, context.device, self.cache)
        return self.by_backbone[backbone]


def _train(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """Train and measure every point of the grid on a data set."""
    folder = inside(context.folder, unit.name)
    folder.mkdir(parents=True, exist_ok=True)
    context = context.on_data(unit.data).titled(unit.name)
    spec = context.spec
    grid = points({**spec.grid, "seed": list(unit.seeds)})
    settings = [point_settings(spec, point) for point in grid]
    named = [str(setting["unlabelled"]) for setting in settings if setting.get("unlabelled")]
    unlabelled = [name for name in dict.fromkeys(named) if not CONFIDENCE.fullmatch(name)]
    raw = load_shifted(unit.data, spec, shift_measures.sets_of(spec.evaluation.measures), unlabelled)
    context.progress("preparing the data", 0.0)
    cache = folder.parents[3] / "features"  # shared by all studies
    data = _PreparedData(raw, context, cache)
    rows: list[Row] = []
    references: dict[tuple[object, ...], Tensor] = {}
    for number, (point, setting) in enumerate(zip(grid, settings, strict=True)):
        title = f"{number + 1} of {len(grid)}, {', '.join(str(value) for value in point.values())}"

        def on_progress(moment: Progress, number: int = number, title: str = title) -> None:
            context.progress(f"{title}: {moment}", (number + moment.step / moment.steps) / len(grid))

        trained = _fit(context, setting, point, number, data.of(setting), on_progress)
        rows.append(_row(context, setting, trained, data.of(setting), folder, references))
    _write_targets(data.of(settings[0]), raw, folder)
    return rows


def point_builder(spec: Spec, settings: Settings, data: StudyData) -> Callable[[], nn.Module]:
    """The function that builds a member."""
    assert spec.members is not None
    if spec.members.network == HEADS:
        return partial(head, data.shape[0], data.outputs, int(settings.get("layers", 2)))
    name, options = spec.members.network, dict(spec.members.options)
    if name in NETWORKS:
        options |= {key: settings[key] for key in options_of(name) if key in settings}
    return maker(name, data, {key: value for key, value in options.items() if key not in ("backbone", "layers")})


def _fit(
    context: StudyContext,
    settings: Settings,
    point: Mapping[str, Any],
    number: int,
    shifted: ShiftedData,
    on_progress: Callable[[Progress], None],
) -> TrainedRun:
    data, seed, members = shifted.study_data(), int(point["seed"]), int(settings["members"])
    ensemble = Ensemble(point_builder(context.spec, settings, data), members, seed=seed).to(context.device)
    arguments = training_arguments(context.spec.optimisation, point)
    smoothing: dict[str, Any] = {}
    if settings.get("diverse"):
        drawn = train.drawn_hyperparameters(members, seed, **_diverse_ranges(settings["diverse"], arguments))
        train.scale_weights(ensemble, drawn.pop("initial_scale", 1.0))
        smoothing = {"smoothing": drawn.pop("smoothing")} if "smoothing" in drawn else {}
        arguments |= drawn
    labelled, unlabelled = _split_by_labels(context, settings, shifted, point)
    sampled = int(settings.get("sampled", members))
    objective = objective_with(str(settings["objective"]), {"loss": "cross_entropy", **settings})
    status = "done"
    try:
        history = fit(
            ensemble,
            labelled,
            partial(objective, **smoothing),
            unlabelled=unlabelled,
            active_members=sampled if sampled < members else None,
            sequential=bool(settings.get("sequential")),
            seed=seed,
            progress=on_progress,
            **arguments,
        )
    except TrainingDiverged as reason:
        history, status = reason.history, "failed"
    return TrainedRun(number, point, ensemble, history, status)


def _diverse_ranges(names: list[str], arguments: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    scales = {key: arguments[key] for key in ("lr", "weight_decay")}
    return {name: (RANGES[name][0] * scales.get(name, 1.0), RANGES[name][1] * scales.get(name, 1.0)) for name in names}


def _split_by_labels(
    context: StudyContext, settings: Settings, shifted: ShiftedData, point: Mapping[str, Any]
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Examples to fit, and to disagree on: another set, or training examples that a first network finds hard."""
    data, name = shifted.study_data(), settings.get("unlabelled")
    if not name:
        return data.train, None
    threshold = CONFIDENCE.fullmatch(str(name))
    if threshold is None:
        unlabelled = shifted.unlabelled[str(name)]
        assert isinstance(unlabelled, Tensor)
        return data.train, unlabelled
    spec, seed = context.spec, int(point["seed"]) + FIRST_STAGE
    first = Ensemble(point_builder(spec, settings, data), 1, seed=seed).to(context.device)
    independent = partial(objectives.independent, loss="cross_entropy")
    fit(first, data.train, independent, seed=seed, **training_arguments(spec.optimisation, point))
    x, y = data.train
    hard = train.low_confidence(first.predict(x)[0].log_softmax(-1), float(threshold[1]))
    if not 2 <= int(hard.sum()) < len(hard):
        share = f"{int(hard.sum())} of {len(hard)} training examples have a confidence below {threshold[1]}"
        raise MethodError(f"{share}: ask for another confidence")
    return (x[~hard], y[~hard]), x[hard]


def _row(
    context: StudyContext,
    settings: Settings,
    trained: TrainedRun,
    shifted: ShiftedData,
    folder: Path,
    references: dict[tuple[object, ...], Tensor],
) -> Row:
    """A run's row. The first ensemble without interaction is the reference of others with its seed and network."""
    spec, data, ensemble = context.spec, shifted.study_data(), trained.ensemble
    assert spec.objective is not None
    outputs = ensemble.predict(data.test[0], file=outputs_file(folder, trained.number))
    others = {
        name: (ensemble.predict(x, file=outputs_file(folder, trained.number, name)), y)
        for name, (x, y) in shifted.sets.items()
        if isinstance(x, Tensor)
    }
    x, y = data.train
    on_train = ensemble.predict(x[:AUDITED_EXAMPLES]), y[:AUDITED_EXAMPLES]
    key = (int(trained.point["seed"]), ensemble.members, settings.get("backbone"), settings.get("layers"))
    note = None
    if ensemble.members > 1 and trained.status == "done":
        pool = spec.objective.pool
        audit = shift_measures.audit_outputs(outputs, data.test[1], pool, on_train, references.get(key))
        note = AuditNote(audit.verdict, audit.judgement.reasons)
    interacts = settings["objective"] != "independent" and settings.get("strength") != 0
    if not interacts and trained.status == "done" and not settings.get("diverse"):
        references.setdefault(key, outputs)
    measured = ShiftOutputs(
        outputs,
        data.test[1],
        others,
        spec.objective.loss,
        spec.objective.pool,
        str(settings["objective"]),
        shifted.groups,
        _soup_outputs(spec, ensemble, shifted),
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


def _soup_outputs(spec: Spec, ensemble: Ensemble, shifted: ShiftedData) -> dict[str, Tensor]:
    """Outputs of the averaged weights on the sets that measures ask for."""
    parsed = [Measure.parse(name) for name in spec.evaluation.measures]
    sets = [measure.dataset for measure in parsed if measure.kind == SOUP]
    if not sets:
        return {}
    data = shifted.study_data()
    soup = Ensemble.from_modules([ensemble.soup(data.train[0][:AUDITED_EXAMPLES])])
    inputs = {"": data.test[0], **{name: x for name, (x, _) in shifted.sets.items()}}
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
    axes = {"seed", "method", "members", "layers", "sampled", "unlabelled", *VARIED}
    axes |= requirements.objective_parameters(spec) | requirements.network_options(spec)
    lacks = lacks or requirements.missing_method_settings(spec)
    return lacks or requirements.missing_axes(spec, axes) or requirements.missing_search(spec)


PROCEDURE = Procedure(training_units, run, missing, steps=(SEARCH,), priority=first_seed)

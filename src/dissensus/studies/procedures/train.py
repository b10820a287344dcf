"""The procedure "train": ensembles at every point of a grid, their outputs kept, their measures taken.

`TRAINERS` are the ways to train a grid. A study that uses the trainings of another one measures the outputs which
that one has kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dissensus import diversity
from dissensus.studies import datasets, measures
from dissensus.studies.checked_folders import inside, is_finished
from dissensus.studies.datasets import StudyData
from dissensus.studies.measures import LabelledOutputs, OutputMeasure
from dissensus.studies.procedures import adversarial, methods, requirements, search, streamed
from dissensus.studies.procedures.base import Procedure, Step, StudyContext
from dissensus.studies.procedures.training import (
    TARGETS,
    TrainedRun,
    Trainer,
    TrainingUnit,
    finish_unit,
    first_seed,
    is_curve_measure,
    measured_row,
    measured_values,
    read_rows,
    stored_outputs,
    tracked,
    training_units,
    write_targets,
)
from dissensus.studies.registry import build_of, check_task, objective_of
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec, SpecError
from dissensus.studies.training_arguments import VARIED, training_arguments
from dissensus.train import Progress, Sweep, sweep

TRIALS = "trials.json"
HISTOGRAM = (60, -30.0, 0.0)
"""Bins of the histogram of log ED, and its range."""
_SWEEP_ARGUMENTS = ("lr", "batch_size", "weight_decay", "members", "epochs")
"""Hyperparameters of a search that are arguments of `sweep`; the others are options of the network."""


# The plain way: all points of the grid as one sweep


def _train_grid(unit: TrainingUnit, context: StudyContext, folder: Path) -> list[Row]:
    spec = context.spec
    chosen = search.best(folder / TRIALS) if spec.search is not None else {}
    data = datasets.load(unit.data, unit.seeds[0], spec, catalogue=context.catalogue)
    check_task(spec, data)
    swept = _sweep(unit, context, data, chosen, folder)
    rows: list[Row] = []
    for i, point in enumerate(swept.points):
        trained = TrainedRun(i, point, swept.run(i), swept.history(i), swept.outcomes[i].status)
        row = measured_row(context, unit.data, trained, folder, test=data.test, train=data.train)
        rows.append(replace(row, hyperparameters=chosen))
    write_targets(folder, data.test[1])
    return rows


def _sweep(unit: TrainingUnit, context: StudyContext, data: StudyData, chosen: dict[str, Any], folder: Path) -> Sweep:
    spec = context.spec
    assert spec.objective is not None
    assert spec.members is not None
    optimisation = spec.optimisation
    if spec.search is not None:  # learning rates follow the schedule of the search
        optimisation = replace(optimisation, epochs=spec.search.epochs)
    options = {key: [value] for key, value in chosen.items() if key not in _SWEEP_ARGUMENTS}
    arguments = {"members": spec.members.count, **training_arguments(optimisation)}
    arguments |= {key: chosen[key] for key in _SWEEP_ARGUMENTS if key in chosen}
    if spec.evaluation.curves:
        arguments |= {"validation": data.test, "patience": None, "keep": "last"}

    def on_progress(moment: Progress) -> None:
        context.progress(str(moment), moment.step / moment.steps)

    return sweep(
        build_of(spec, data),
        data.train,
        objective_of(spec.objective, spec.grid),
        grid={**spec.grid, "seed": list(unit.seeds), **options},
        track=tracked(spec),
        device=context.device,
        checkpoint=folder / "checkpoints",
        resume=True,
        progress=on_progress,
        cluster=context.cluster,
        **arguments,
    )


def _grid_axes(spec: Spec) -> set[str]:
    known = {"seed", "network", "members", "split_seed", *VARIED}
    fixed = ("loss", "pool") if spec.evaluation.curves else ("loss",)  # what is followed over the epochs has one pool
    return known | requirements.objective_parameters(spec, fixed) | requirements.network_options(spec)


GRID = Trainer(lambda spec, data: True, _train_grid, _grid_axes, is_sweep=True)  # noqa: ARG005

TRAINERS: tuple[Trainer, ...] = (streamed.TRAINER, adversarial.TRAINER, methods.TRAINER, GRID)
"""Ways to train a grid; the first that suits a study and its data is taken."""


def trainer_for(spec: Spec, data: str) -> Trainer:
    """The way to train a study's grid on some data."""
    return next(trainer for trainer in TRAINERS if trainer.suits(spec, data))


# Steps, units and measures


def train_unit(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """Train a unit in this run's folder."""
    folder = inside(context.folder, unit.name)
    folder.mkdir(parents=True, exist_ok=True)
    context = context.on_data(unit.data).titled(unit.name)
    return trainer_for(context.spec, unit.data).rows(unit, context, folder)


def run(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """Train and measure a unit, or measure it again where another study has trained it."""
    return remeasured(unit, context) if context.spec.uses else train_unit(unit, context)


def untrained(context: StudyContext) -> list[TrainingUnit]:
    """Units that are not finished in the folder of the trainings; refused where another study was to train them."""
    units = [unit for unit in training_units(context.spec) if not is_finished(context.base, unit.name)]
    if context.spec.uses and units:
        raise SpecError(f"{context.spec.name} uses {context.spec.uses}, which has not trained {units[0].name}.")
    return sorted(units, key=first_seed)


def _unsearched(context: StudyContext) -> list[list[TrainingUnit]]:
    """Units whose hyperparameters are searched together: those of one data set."""
    by_data: dict[str, list[TrainingUnit]] = {}
    for unit in untrained(context):
        if context.spec.search is not None:
            by_data.setdefault(unit.data, []).append(unit)
    return list(by_data.values())


def _search(units: Sequence[TrainingUnit], context: StudyContext) -> None:
    """Search the hyperparameters of units that share a data set; trials are left in each unit's folder."""
    name, spec = units[0].data, context.spec
    search.search(
        spec,
        [
            (unit.seeds[0], datasets.load(name, unit.seeds[0], spec, searching=True, catalogue=context.catalogue))
            for unit in units
        ],
        [inside(context.folder, unit.name) / TRIALS for unit in units],
        context.device,
        lambda trial, trials: context.progress(f"{name}: search {trial}/{trials}", trial / trials),
        context.cluster,
    )


def _divided(units: Sequence[TrainingUnit], parts: int) -> list[Sequence[TrainingUnit]]:
    """A search as several: that of a large data set can take longer than all the others together."""
    return [units[start::parts] for start in range(min(parts, len(units)))]


def _always(task: Any, context: StudyContext, few: bool) -> bool:  # noqa: ARG001
    return True


def spreads(unit: TrainingUnit, context: StudyContext, few: bool) -> bool:
    """Whether the runs of a unit are tasks of a cluster: those of a sweep, where units leave workers idle."""
    context = context.on_data(unit.data)
    return few and not context.spec.uses and trainer_for(context.spec, unit.data).is_sweep


def _train_and_store(unit: TrainingUnit, context: StudyContext) -> None:
    finish_unit(context.folder, unit.name, train_unit(unit, context))


SEARCH = Step(_unsearched, _search, weight=7 / 3, spreads=_always, divided=_divided)
"""The search of hyperparameters, where a study asks for it."""
TRAINING = Step(untrained, _train_and_store, spreads=spreads)
"""Trainings that come before a procedure which works on trained ensembles."""


def remeasured(unit: TrainingUnit, context: StudyContext, point: Mapping[str, Any] | None = None) -> list[Row]:
    """A unit's rows with this study's measures, from outputs that were kept; of one ``point`` or of all."""
    folder = context.base / unit.name
    spec = context.on_data(unit.data).spec
    assert spec.objective is not None
    targets = torch.from_numpy(np.load(folder / TARGETS))
    examples = spec.evaluation.examples or len(targets)
    if examples > len(targets):
        raise SpecError(
            f"{spec.name} looks at {examples} test examples; {spec.uses or 'its training'} kept "
            f"{len(targets)} of {unit.data}."
        )
    targets = targets[:examples]
    allowed = spec.grid if point is None else {axis: [value] for axis, value in point.items()}
    rows: list[Row] = []
    for row in read_rows(folder, spec):
        if any(row.value(axis) not in values for axis, values in allowed.items() if row.value(axis) is not None):
            continue
        assert row.run is not None
        outputs = stored_outputs(folder, row.run)[:, :examples]
        pool = row.value("pool") or spec.objective.pool
        judged = LabelledOutputs(outputs, targets, spec.objective.loss, pool, row.train_error)
        row = replace(row, measures=measured_values(context, spec, judged, row.curves))
        if "log_nonmaximal_volume" in row.measures:
            row = replace(row, curves={"count": histogram(outputs, targets)})
        rows.append(row)
    return rows


def histogram(outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Number of examples by log ED, in the bins of `HISTOGRAM`; lower values count in the first bin."""
    bins, low, high = HISTOGRAM
    volumes = diversity.nonmaximal_volume(outputs, targets, log=True).double().clamp(low, high)
    return torch.histc(volumes, bins, low, high).tolist()


def _is_measure(name: str, output_measures: Mapping[str, OutputMeasure]) -> bool:
    return measures.is_output_measure(name, output_measures) or is_curve_measure(name)


def missing(spec: Spec, output_measures: Mapping[str, OutputMeasure]) -> list[str]:
    """What a study that trains networks lacks."""
    lacks = requirements.missing_objective(spec) + requirements.missing_network(spec)
    lacks += requirements.missing_measures(spec, _is_measure, output_measures)
    lacks += requirements.missing_curves(spec, is_curve_measure)
    lacks = lacks or requirements.missing_method_settings(spec)
    return lacks or missing_axes(spec) or requirements.missing_search(spec)


def missing_axes(spec: Spec) -> list[str]:
    """An axis that the study's grid has, and the trainer of some of its data cannot vary."""
    axes = [trainer_for(spec, data).axes(spec) for data in spec.data]
    return requirements.missing_axes(spec, set.intersection(*axes)) if axes else []


PROCEDURE = Procedure(training_units, run, missing, steps=(SEARCH,), spreads=spreads, priority=first_seed)

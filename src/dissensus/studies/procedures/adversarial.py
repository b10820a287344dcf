"""Adversarial training of methods: every method against every attack.

Attacks work on images in [0, 1], so members standardise their inputs themselves.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from dissensus.ensemble import Ensemble
from dissensus.studies import datasets
from dissensus.studies.datasets import StudyData
from dissensus.studies.procedures.base import StudyContext
from dissensus.studies.procedures.methods import (
    MeasuredData,
    Method,
    References,
    method_axes,
    method_builder,
    method_objective,
    method_of,
    method_row,
)
from dissensus.studies.procedures.training import TrainedRun, Trainer, TrainingUnit, write_targets
from dissensus.studies.registry import MethodError
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec
from dissensus.studies.standardisation import Standardised, channel_scales
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import AdversarialTraining, History, Progress, TrainingDiverged, fit
from dissensus.train.grid import points

AXIS = "adversarial"
STEPS = {"none": 0, "fgsm": 1, "pgd": 10}
"""Attacks of the training, and their steps."""
EPSILONS = (0.01, 0.05)
"""The range of every example's ε, as in the ADP paper."""


def standardised_builder(spec: Spec, method: Method, data: StudyData) -> Callable[[], nn.Module]:
    """The function that builds a member for images in [0, 1]."""
    mean, std = channel_scales(data)
    return method_builder(spec, method, data, partial(Standardised, mean=mean, std=std))


def _train_adversarially(unit: TrainingUnit, context: StudyContext, folder: Path) -> list[Row]:
    """Train every point of the grid."""
    spec = context.spec
    data = datasets.load_unscaled(
        unit.data, train_examples=spec.optimisation.examples, test_examples=spec.evaluation.examples
    )
    measured = MeasuredData.of(data)
    rows: list[Row] = []
    grid = points({**spec.grid, "seed": list(unit.seeds)})
    references: dict[str, References] = {str(attack): {} for attack in spec.grid[AXIS]}
    for number, point in enumerate(grid):
        title = ", ".join(str(value) for value in point.values())

        def on_progress(moment: Progress, number: int = number, title: str = title) -> None:
            context.progress(f"{title}: {moment}", (number + moment.step / moment.steps) / len(grid))

        method = method_of(spec, point["method"])
        build = standardised_builder(spec, method, data)
        ensemble = Ensemble(build, method.networks, seed=int(point["seed"])).to(context.device)
        checkpoint = folder / f"checkpoints-{number:03d}"
        history, status = _fit(spec, method, ensemble, data, point, checkpoint, on_progress)
        trained = TrainedRun(number, point, ensemble, history, status)
        rows.append(method_row(context, trained, method, measured, folder, references[point[AXIS]]))
    write_targets(folder, data.test[1])
    return rows


def _fit(
    spec: Spec,
    method: Method,
    ensemble: Ensemble,
    data: StudyData,
    point: Mapping[str, Any],
    checkpoint: Path,
    on_progress: Callable[[Progress], None],
) -> tuple[History, str]:
    try:
        history = fit(
            ensemble,
            data.train,
            partial(method_objective(spec, method), **method.numbers),
            seed=int(point["seed"]),
            checkpoint=checkpoint,
            resume=True,
            progress=on_progress,
            adversarial=adversary(point[AXIS]),
            **training_arguments(spec.optimisation),
        )
    except TrainingDiverged as reason:
        return reason.history, "failed"
    return history, "done"


def adversary(attack: str) -> AdversarialTraining | None:
    """Adversarial training on half of each batch, with a random start where there are several steps; None for none."""
    if attack not in STEPS:
        raise MethodError(f"grid.{AXIS} names {attack!r}; it may be one of {', '.join(STEPS)}")
    steps = STEPS[attack]
    if steps == 0:
        return None
    return AdversarialTraining(epsilon=EPSILONS, steps=steps, random_start=steps > 1)


def _is_adversarial(spec: Spec, data: str) -> bool:
    del data
    return "method" in spec.grid and AXIS in spec.grid


TRAINER = Trainer(_is_adversarial, _train_adversarially, method_axes)

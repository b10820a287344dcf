"""Adversarial training in a study: every method against every attack, members with their standardisation inside.

What is attacked are images in [0, 1], so the images are not standardised before they come to the members.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.ensemble import Ensemble
from dissensus.studies import rows as rows_of
from dissensus.studies.comparing import Method, Say, build_of, measured, method_of, objective_for
from dissensus.studies.optimising import training_arguments
from dissensus.studies.problems import Problem
from dissensus.studies.registry import MethodError
from dissensus.studies.scaling import Standardised, scales
from dissensus.studies.spec import Spec
from dissensus.studies.subjects import images
from dissensus.train import AdversarialTraining, History, Progress, TrainingDiverged, fit
from dissensus.train.grid import points

AXIS = "adversarial"
STEPS = {"none": 0, "fgsm": 1, "pgd": 10}
"""Attacks of the training, and their steps."""
EPSILONS = (0.01, 0.05)
"""What each example's ε is drawn from, as in the ADP paper."""


def build_inside(spec: Spec, method: Method, data: Problem) -> Callable[[], nn.Module]:
    """The function that builds a member that takes images in [0, 1]."""
    mean, std = scales(data)
    return build_of(spec, method, data, partial(Standardised, mean=mean, std=std))


def rows(
    spec: Spec, seeds: tuple[int, ...], name: str, own: Path, device: torch.device, say: Say
) -> list[dict[str, Any]]:
    """Train and measure every point of the grid on a data set."""
    data = images(name, trained_on=spec.optimisation.examples, tested_on=spec.evaluation.examples)
    found: list[dict[str, Any]] = []
    grid = points({**spec.grid, "seed": list(seeds)})
    references: dict[str, dict[int, Tensor]] = {attack: {} for attack in spec.grid[AXIS]}
    for number, point in enumerate(grid):
        title = ", ".join(str(value) for value in point.values())

        def on_progress(moment: Progress, number: int = number, title: str = title) -> None:
            say(f"{title}: {moment}", (number + moment.step / moment.steps) / len(grid))

        method = method_of(spec, point["method"])
        members = 1 if method.inside else method.members
        ensemble = Ensemble(build_inside(spec, method, data), members, seed=int(point["seed"])).to(device)
        history, status = _fitted(spec, method, ensemble, data, point, own / f"checkpoints-{number:03d}", on_progress)
        done = rows_of.Done(number, point, ensemble, history, status)
        found.append(measured(spec, done, method, data, own, references[point[AXIS]]))
    return found


def _fitted(
    spec: Spec,
    method: Method,
    ensemble: Ensemble,
    data: Problem,
    point: dict[str, Any],
    checkpoint: Path,
    on_progress: Callable[[Progress], None],
) -> tuple[History, str]:
    try:
        history = fit(
            ensemble,
            data.train,
            partial(objective_for(spec, method), **method.numbers),
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
    """Half of the batch, ε / steps a step, from a random start with more than one step; None without an attack."""
    if attack not in STEPS:
        raise MethodError(f"grid.{AXIS} names {attack!r}; it may be one of {', '.join(STEPS)}")
    steps = STEPS[attack]
    if steps == 0:
        return None
    return AdversarialTraining(epsilon=EPSILONS, steps=steps, random_start=steps > 1)

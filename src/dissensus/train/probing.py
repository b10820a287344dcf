"""Checks of data and objective on one batch, with concrete numbers, before a sweep is trained."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dissensus.axes import LossParts
from dissensus.data.unlabelled import WithUnlabelled
from dissensus.objectives.declaration import EXAMPLE_WEIGHTS, UNLABELLED
from dissensus.train.engine import Engine
from dissensus.train.grid import Run
from dissensus.train.settings import TargetSettings
from dissensus.train.trained_loss import Targets, trained_loss
from dissensus.train.weighting import CLASS_WEIGHTS, weighted


def targets_of(
    objective: Callable[..., LossParts],
    runs: Sequence[Run],
    held_out: object = None,
    metric: Callable[..., Any] | None = None,
    settings: TargetSettings | None = None,
) -> list[Targets]:
    """The checks of targets that runs need, one for each loss, since a grid may name several.

    ``held_out`` is the validation data ``(x, y)``, a fraction, or None; ``metric`` what it is measured by.
    """
    held = held_out[1] if isinstance(held_out, tuple) else None
    checks = [
        Targets.of(functools.partial(objective, **run.words, **run.hyper), held, metric, settings) for run in runs
    ]
    return list({targets.loss: targets for targets in checks}.values())


def probe(
    engine: Engine,
    runs: Sequence[Run],
    objective: Callable[..., LossParts],
    y: Tensor | None,
    held_out: object,
    metric: Callable[..., Any] | None = None,
    settings: TargetSettings | None = None,
) -> None:
    """Call the objective once per point of the grid, so that a value out of range is refused before training.

    The number of outputs is known here, so all targets are checked as well.
    """
    batch = next(engine.feed.epoch(0))
    engine.body.eval()
    feed = engine.feed.labelled if isinstance(engine.feed, WithUnlabelled) else engine.feed
    with torch.no_grad():
        outputs = engine.outputs(batch.inputs, per_run=False, per_member=feed.per_member)
        for targets in targets_of(objective, runs, held_out, metric, settings):
            if feed.changes_targets or batch.weights is not None:
                targets.check_batch(batch.targets, batch.weights)
            targets.observe(outputs, batch.targets if y is None else y)
        inputs = {}
        class_weights = engine.state.settings.class_weights
        if class_weights is not None:
            inputs[CLASS_WEIGHTS] = class_weights[0]
        known = trained_loss(functools.partial(objective, **runs[0].words))
        objective = weighted(objective, settings or TargetSettings(), None if known is None else known.loss)
        if batch.weights is not None:
            inputs[EXAMPLE_WEIGHTS] = batch.weights
        if batch.unlabelled is not None:
            inputs[UNLABELLED] = engine.outputs(batch.unlabelled, per_run=False, per_member=feed.per_member)[0]
        for hyper in {repr(run.hyper): run.hyper for run in runs}.values():
            objective(outputs[0], batch.targets, **hyper, **runs[0].words, **inputs)

"""A look at data and objective before a sweep is trained: on one batch, with concrete numbers."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dissensus.axes import LossParts
from dissensus.data.unlabelled import WithUnlabelled
from dissensus.train.engine import UNLABELLED, Engine
from dissensus.train.grid import Run
from dissensus.train.trained_loss import Targets


def targets_of(objective: Callable[..., LossParts], runs: Sequence[Run], held_out: object = None) -> list[Targets]:
    """What runs ask of targets, once for each loss: a grid may name several. ``held_out``: ``(x, y)``, if anything."""
    held = held_out[1] if isinstance(held_out, tuple) else None
    found = [Targets.of(functools.partial(objective, **run.words)) for run in runs]
    return [Targets(loss, held) for loss in dict.fromkeys(each.loss for each in found)]


def probe(
    engine: Engine, runs: Sequence[Run], objective: Callable[..., LossParts], y: Tensor, held_out: object
) -> None:
    """Call the objective once per point, so that a value out of range is told before training.

    The number of outputs is known here, so all labels are looked at as well.
    """
    x, labels = next(engine.feed.epoch(0))
    engine.body.eval()
    own, other = x if isinstance(x, tuple) else (x, None)
    feed = engine.feed.labelled if isinstance(engine.feed, WithUnlabelled) else engine.feed
    with torch.no_grad():
        outputs = engine.outputs(own, per_run=False, per_member=feed.per_member)
        for targets in targets_of(objective, runs, held_out):
            targets.see(outputs, y)
        more = (
            {} if other is None else {UNLABELLED: engine.outputs(other, per_run=False, per_member=feed.per_member)[0]}
        )
        for hyper in {repr(run.hyper): run.hyper for run in runs}.values():
            objective(outputs[0], labels, **hyper, **runs[0].words, **more)

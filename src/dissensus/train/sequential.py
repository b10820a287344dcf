"""Members trained one after the other, each against the frozen ones before it (the original A2D)."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dissensus import checks
from dissensus.axes import Objective
from dissensus.data.batches import refuse_iterator
from dissensus.ensemble import Ensemble
from dissensus.objectives import independent
from dissensus.objectives.declaration import declaration, unwrapped
from dissensus.train.history import History, OnProgress, share_of
from dissensus.train.notification import Callbacks
from dissensus.train.recipe import ExistingMembers, Recipe
from dissensus.train.trained_loss import trained_loss


def one_by_one(
    train: Callable[..., History], recipe: Recipe, progress: OnProgress | None, callbacks: Callbacks | None = None
) -> History:
    """Train each member in turn, beside the frozen earlier ones; return the histories of all, concatenated.

    Entries that callbacks get name the ``member``; a callback that stops training stops that of this member.
    """
    assert isinstance(recipe.initial, ExistingMembers)
    ensemble = recipe.initial.ensemble
    if recipe.frozen or recipe.active_members is not None or recipe.freeze is not None:
        checks.refuse("sequential", "come without `frozen`, `freeze` and `active_members`", "one of them")
    if ensemble.members < 2 or len(ensemble.body) != ensemble.members:
        got = "one member, or masks of one network"
        checks.refuse("sequential", "come with two members or more that are networks of their own", got)
    if ensemble.body.shared_trainable():
        fix = "Freeze what is shared."
        checks.refuse("sequential", "be left out where members share parameters that are trained", "True", fix)
    refuse_iterator(recipe.data, "every member")
    first = _first_objective(recipe.objective)
    stages: list[History] = []
    for member in range(ensemble.members):
        subset = ensemble.subset(range(member + 1))
        subset.twin = ensemble.twin
        share = None if progress is None else share_of(progress, member, 1, ensemble.members)
        try:
            own = None if callbacks is None else callbacks.at(member=member)
            stages.append(train(_stage(recipe, subset, first), share, callbacks=own))
        finally:
            ensemble.body.copy_member(member, subset.body)
            ensemble.twin = subset.twin  # None once a stage has begun to train
    return _joined(stages)


def _first_objective(objective: Objective) -> Objective | None:
    """The objective of the first member, which has nobody to interact with: its own loss. None: the objective itself.

    >>> from dissensus.objectives import augmented
    >>> _first_objective(functools.partial(augmented, loss="brier", pool="score", beta=0.5)).keywords
    {'loss': 'brier'}
    """
    if declaration(objective).separable:
        return None
    known = trained_loss(objective)
    if known is None:
        name = getattr(unwrapped(objective)[0], "__name__", "the objective")
        fix = "Declare its loss: dissensus.objectives.Declaration(loss=...), or a parameter `loss` with a name."
        checks.refuse("sequential", "come with an objective whose loss is known, for the first member", name, fix)
    return functools.partial(independent, loss=known.loss)


def _stage(recipe: Recipe, subset: Ensemble, first: Objective | None) -> Recipe:
    """The recipe of the last member of a subset, in which the other members are frozen."""
    count, run, checkpoint = subset.members, recipe.runs[0], recipe.checkpoint
    optimizer = {name: _first(value, count) for name, value in run.optimizer.items()}
    if checkpoint is not None:
        checkpoint = replace(checkpoint, folder=checkpoint.folder / f"member-{count - 1}")
    alone: dict[str, Any] = {} if first is None else {"objective": first, "unlabelled": None}
    return replace(
        recipe,
        initial=ExistingMembers(subset),
        runs=(replace(run, members=count, optimizer=optimizer),),
        batches=replace(recipe.batches, augment=_first(recipe.batches.augment, count)),
        frozen=tuple(range(count - 1)),
        twin=None,
        checkpoint=checkpoint,
        **(alone if count == 1 else {}),
    )


def _first(value: Any, count: int) -> Any:
    """The settings of the first members where there is one per member; a setting for all members as it is."""
    if isinstance(value, Tensor):
        return value[:count] if value.ndim else value
    return value[:count] if isinstance(value, Sequence) else value


def _joined(stages: list[History]) -> History:
    epochs = [{**entry, "member": member} for member, stage in enumerate(stages) for entry in stage.epochs]
    last = stages[-1]
    best: list[int | None] = [stage.best_epoch for stage in stages if isinstance(stage.best_epoch, int)]
    return History(
        epochs=epochs,
        steps=sum(stage.steps for stage in stages),
        seconds=sum(stage.seconds for stage in stages),
        stopped_early=any(stage.stopped_early for stage in stages),
        stopped_by=next((stage.stopped_by for stage in stages if stage.stopped_by is not None), None),
        seed=last.seed,
        best_epoch=best if len(best) == len(stages) else None,
        backend=last.backend,
        precision=last.precision,
        optimizer=last.optimizer,
        memory=last.memory,
    )

"""Members trained one after the other, each against those before it, which stand still (the original A2D)."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dissensus import checks
from dissensus.ensemble import Ensemble
from dissensus.objectives import independent
from dissensus.train.history import History, share_of

PER_MEMBER = ("lr", "weight_decay", "momentum", "clip_norm", "augment")


def one_by_one(fit: Callable[..., History], ensemble: Ensemble, **told: Any) -> History:
    """Fit each member in turn, with the earlier ones frozen beside it; the history of all, one after the other."""
    if list(told["frozen"]) or told["active_members"] is not None or told["freeze"] is not None:
        checks.refuse("sequential", "come without `frozen`, `freeze` and `active_members`", "one of them")
    if ensemble.members < 2 or len(ensemble.body) != ensemble.members:
        got = "one member, or masks of one network"
        checks.refuse("sequential", "come with two members or more that are networks of their own", got)
    stages: list[History] = []
    for member in range(ensemble.members):
        stage = {**told, "sequential": False, "frozen": range(member)}
        stage |= {name: _first(told[name], member + 1) for name in PER_MEMBER}
        if member == 0:
            stage |= {"objective": functools.partial(independent, loss="cross_entropy"), "unlabelled": None}
        if told["checkpoint"] is not None:
            stage["checkpoint"] = Path(told["checkpoint"]) / f"member-{member}"
        if told["progress"] is not None:
            stage["progress"] = share_of(told["progress"], member, 1, ensemble.members)
        some = ensemble.subset(range(member + 1))
        some.twin = ensemble.twin
        try:
            stages.append(fit(some, **{name: value for name, value in stage.items() if name != "ensemble"}))
        finally:
            ensemble.body.copy_member(member, some.body)
            ensemble.twin = some.twin  # None once a stage has begun to train
    return _joined(stages)


def _first(value: Any, count: int) -> Any:
    """The first of settings that there is one of per member; a setting for all as it is."""
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
        best_epoch=best if len(best) == len(stages) else None,
        backend=last.backend,
        precision=last.precision,
        memory=last.memory,
    )

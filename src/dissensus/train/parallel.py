"""What trainings in several processes refuse, and the callbacks of their first process."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dissensus import checks
from dissensus.data.batches import LoadedBatches
from dissensus.data.unlabelled import WithUnlabelled
from dissensus.ensemble import Ensemble, stored_tensors
from dissensus.execution import Body, StackedMembers
from dissensus.execution.ranks import Ranks, checked_parallel
from dissensus.execution.skeleton import members_inside
from dissensus.fingerprint import digest, glance
from dissensus.train.checkpoint import are_plain, differing_settings
from dissensus.train.engine import Engine
from dissensus.train.evaluation import Source, Validation
from dissensus.train.notification import Callbacks
from dissensus.train.recipe import Recipe

log = logging.getLogger("dissensus")


class RankCallbacks(Callbacks):
    """Callbacks that rank 0 calls; the others hear whether training stops."""

    def __init__(self, callbacks: Callbacks | None, ranks: Ranks) -> None:
        super().__init__(() if callbacks is None else callbacks.listeners)
        object.__setattr__(self, "_callbacks", callbacks if ranks.first else None)
        object.__setattr__(self, "_ranks", ranks)
        object.__setattr__(self, "_sees", ranks.decided(callbacks is not None and callbacks.see_steps))

    @property
    def see_steps(self) -> bool:
        """Whether any callback of rank 0 wants the numbers of every step."""
        return self._sees  # pyright: ignore[reportAttributeAccessIssue]

    def _told(self, method: str, *arguments: Any) -> Any:
        callbacks, ranks = self._callbacks, self._ranks  # pyright: ignore[reportAttributeAccessIssue]
        return ranks.decided(None if callbacks is None else getattr(callbacks, method)(*arguments))

    def start(self, resumed: bool, histories: Any) -> None:
        """Tell the callbacks of rank 0 that a training begins, or goes on."""
        self._told("start", resumed, histories)

    def epoch(self, run: int, entry: Any) -> str | None:
        """Give the callbacks of rank 0 the entry of an epoch; the name of the first that stops the run."""
        return self._told("epoch", run, entry)

    def step(self, run: int, entry: Any) -> str | None:
        """Give the callbacks of rank 0 the numbers of a step; the name of the first that stops the run."""
        return self._told("step", run, entry)

    def runs(self, entries: Any) -> dict[int, str]:
        """Give the callbacks of rank 0 the epoch of all runs; those that they stop."""
        return self._told("runs", entries) or {}


def check_parallel(parallel: object, refused: dict[str, object], body: Body) -> bool:
    """Whether several processes train the ensemble; what they cannot train is refused.

    ``refused`` has the values of settings that do not go with it; None where a setting was not given.
    """
    if checked_parallel(parallel) is None:
        return False
    for name, value in refused.items():
        if value is not None:
            checks.refuse(name, f"be left out with parallel={parallel!r}", str(value), "Train it in one process.")
    if not isinstance(body, StackedMembers):
        fix = "Train it in one process."
        checks.refuse("ensemble", f"have members of one architecture with parallel={parallel!r}", "several", fix)
    if members_inside(body.network):
        fix = "Its masks share all weights. Train it in one process."
        requirement = f"have members of their own weights with parallel={parallel!r}"
        checks.refuse("ensemble", requirement, "a Masked network", fix)
    return True


_SEEDED = (
    "Draw what is random from a seed (torch.manual_seed(0) at the beginning of the script), and let no function or "
    "data set refer to the number of its process."
)


def check_same(recipe: Recipe, ensemble: Ensemble, ranks: Ranks) -> None:
    """Refuse a training whose settings, data or initial weights are not the same in all processes.

    They would wait for each other, or train on examples that do not belong together.
    """
    shared = ensemble.body.shared_tensors()
    weights = stored_tensors(ensemble.body) if ensemble.parallel is None else shared
    settings = recipe.checkpoint
    mine = {
        **recipe.identity,
        "initial weights": digest(*weights.values()),
        "checkpoint": "None" if settings is None else repr(str(settings.folder)),
        "checkpoint_seconds": "None" if settings is None else repr(settings.seconds),
        "resume": repr(settings is not None and settings.resume),
    }
    everyone = ranks.everyone(mine)
    for rank, other in enumerate(everyone):
        keys = differing_settings(everyone[0], other)
        if keys:
            values = [f"{everyone[0][key]} and {other[key]}" for key in keys if are_plain(everyone[0], other, key)]
            got = f"others on rank {rank} than on rank 0" + (f" ({'; '.join(values)})" if values else "")
            drawn = len(values) < len(keys) or any("seed" in key for key in keys)
            checks.refuse("`, `".join(keys), "be the same in all processes", got, _SEEDED if drawn else "")


class SameBatches:
    """Refuses batches of a source that are not the same in all processes, at the first that differs."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self.ranks, self.name, self.read = ranks, name, 0

    def __call__(self, epoch: int, batch: Sequence[Tensor] | None) -> None:
        """Compare the tensors of a batch, or, without any, the end of the source."""
        self.read += 1
        each = self.ranks.numbers(*((0, 0) if batch is None else (len(batch[0]), glance(*batch))))
        for rank, numbers in enumerate(each):
            if numbers != each[0]:
                sizes = [f"{count} examples" if count else "the end of the data" for count, _ in (each[0], numbers)]
                got = f"{sizes[0]} on rank 0 and {sizes[1]} on rank {rank} as batch {self.read} of epoch {epoch + 1}"
                got = got if sizes[0] != sizes[1] else f"other examples on rank {rank} in batch {self.read}"
                fix = (
                    "A loader that shuffles needs generator=torch.Generator().manual_seed(0), and no shard of its own."
                )
                checks.refuse(self.name, "give the same batches in all processes", got, fix)
        if batch is None:
            self.read = 0


def watch_batches(engine: Engine, ranks: Ranks) -> None:
    """Compare the batches that sources give in all processes; tensors are compared before training."""
    feed, validator = engine.feed, engine.validator
    both = isinstance(feed, WithUnlabelled)
    feeds = {"data": feed.labelled, "unlabelled": feed.unlabelled} if both else {"data": feed}
    for name, source in feeds.items():
        if isinstance(source, LoadedBatches):
            source.seen = SameBatches(ranks, name)
    if isinstance(validator, Validation) and isinstance(validator.data, Source):
        validator.data = validator.data._replace(seen=SameBatches(ranks, "validation"))


def tell_of_statistics(body: Body) -> None:
    """A line of the log where layers see a part of the batch only, by which results differ from one process's."""
    layers = body.modules() if isinstance(body, nn.Module) else ()
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers):
        log.warning(
            "batch norm sees a part of the batch in every process, so that the training differs from that of one "
            "process; its running statistics are averaged over processes"
        )

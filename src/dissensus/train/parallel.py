"""What trainings in several processes refuse, and the callbacks of their first process."""

import logging
from typing import Any

from torch import nn

from dissensus import checks
from dissensus.execution import Body, StackedMembers
from dissensus.execution.ranks import Ranks, checked_parallel
from dissensus.execution.skeleton import members_inside
from dissensus.train.notification import Callbacks

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


def tell_of_statistics(body: Body) -> None:
    """A line of the log where layers see a part of the batch only, by which results differ from one process's."""
    layers = body.modules() if isinstance(body, nn.Module) else ()
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers):
        log.warning(
            "batch norm sees a part of the batch in every process, so that the training differs from that of one "
            "process; its running statistics are averaged over processes"
        )

"""Records of a training: progress while it runs, its history, and errors."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dissensus.ensemble import Ensemble


@dataclass(frozen=True)
class Progress:
    """A moment of training, for a progress bar."""

    epoch: int
    """The epoch that is under way; the first is 1, as in `History`."""
    epochs: int
    step: int
    steps: int
    """Steps done so far and in all."""
    loss: float
    """The objective's total as a mean over members, over the examples of this epoch so far."""
    parts: dict[str, float]
    member_loss: list[float]
    seconds: float
    runs: int = 1
    """Runs still in training; losses are means over them."""
    frozen: list[int] = field(default_factory=list)
    """Members that have converged and are frozen."""
    twin: bool = False
    """Whether the independent twin is in training, after the ensemble itself. Epochs then count from 1 again."""

    @classmethod
    def of(cls, means: Mapping[str, Tensor], **where: Any) -> "Progress":
        """A moment, from the means over an epoch's examples so far, ``[R]`` or ``[R, M]``."""
        values = {name: mean.mean(0) for name, mean in means.items()}
        members = values.pop("member_loss", torch.zeros(0)).tolist()
        parts = {name: float(value) for name, value in values.items() if value.ndim == 0}
        return cls(loss=parts.pop("loss"), parts=parts, member_loss=members, **where)

    @property
    def spread(self) -> float:
        """The largest member loss minus the smallest."""
        return max(self.member_loss) - min(self.member_loss) if self.member_loss else 0.0

    def __str__(self) -> str:
        parts = "".join(f"  {name} {value:.4g}" for name, value in self.parts.items())
        spread = f"  spread {self.spread:.3g}" if self.member_loss else ""
        runs = f"  {self.runs} runs" if self.runs > 1 else ""
        frozen = "  frozen " + ", ".join(map(str, self.frozen)) if self.frozen else ""
        twin = "twin, " if self.twin else ""
        return f"{twin}epoch {self.epoch}/{self.epochs}{runs}  loss {self.loss:.4g}{parts}{spread}{frozen}"


OnProgress = Callable[[Progress], None]


def share_of(progress: OnProgress, before: int, count: int, runs: int, *, twin: bool = False) -> OnProgress:
    """Progress for ``count`` of several ``runs`` of equal length, after ``before`` others: steps count over all runs.

    >>> moment = Progress(epoch=1, epochs=2, step=3, steps=10, loss=0.5, parts={}, member_loss=[], seconds=1.0)
    >>> share_of(lambda moment: print(moment.step, moment.steps), before=1, count=1, runs=2)(moment)
    13 20
    """
    return functools.partial(_shifted, progress, before, count, runs, twin)


def _shifted(progress: OnProgress, before: int, count: int, runs: int, twin: bool, moment: Progress) -> None:
    per_run = moment.steps // count
    progress(replace(moment, step=before * per_run + moment.step, steps=runs * per_run, twin=twin))


@dataclass
class History:
    """The record of a training: one entry per epoch, and how it ended.

    Epochs count from 1 everywhere: in entries, in ``best_epoch``, in ``frozen_at`` and in `Progress`. So epoch e is
    ``history.epochs[e - 1]``, and its weights are those after e passes over the data.

    An entry holds ``epoch``; ``seconds`` since the beginning; ``lr``, the learning rate of the epoch's last step, one
    number, or a list where members differ; ``loss``, the objective's total divided by the number of members; and the
    objective's parts. Losses are means over the epoch's examples. With validation data it also holds ``validation``,
    the number that is watched (`dissensus.fit` says which), or a list with one per member; and the objective's parts
    and tracked measures on that data as ``validation_...``. With ``sequential=True`` an entry names its ``member``,
    and every member's epochs count from 1.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    stopped_early: bool = False
    best_epoch: int | list[int | None] | None = None
    """The epoch whose weights were kept, for the ensemble or per member; None without validation data, or where no
    epoch had a finite metric."""
    frozen_at: list[int | None] | None = None
    """With ``freeze``, the epoch at whose end each member was frozen as converged; None for those that were not."""
    backend: str = ""
    precision: str = ""
    optimizer: str = ""
    """The optimizer, and whether one update serves all members or each has its own in a loop."""
    memory: str = ""
    """Members at once and about how much memory that takes, as planned before the first step."""
    twin: Ensemble | None = field(default=None, repr=False, compare=False)
    """With ``twin``, the independent twin, also at ``ensemble.twin``."""
    twin_history: "History | None" = None
    """The twin's own record; ``steps`` and ``seconds`` of this one do not include it."""

    def column(self, name: str) -> list[Any]:
        """One quantity over the epochs."""
        if self.epochs and name not in self.epochs[0]:
            raise KeyError(f"there is no {name!r} in this history; it holds {', '.join(self.epochs[0])}.")
        return [entry[name] for entry in self.epochs]

    def to_json(self) -> str:
        """The whole record as JSON, that of a twin's training included; a twin's weights are not."""
        return json.dumps(self._record(), indent=2)

    def _record(self) -> dict[str, Any]:
        record = {name: value for name, value in vars(self).items() if name not in ("twin", "twin_history")}
        return record if self.twin_history is None else {**record, "twin_history": self.twin_history._record()}

    def __str__(self) -> str:
        stopped = ", stopped early" if self.stopped_early else ""
        best = "" if self.best_epoch is None else f", best epoch {self.best_epoch}"
        ends = ["never" if epoch is None else str(epoch) for epoch in self.frozen_at or []]
        frozen = f", members frozen at epochs {', '.join(ends)}" if ends else ""
        twin = "" if self.twin_history is None else f"; twin: {self.twin_history}"
        return f"{len(self.epochs)} epochs, {self.steps} steps, {self.seconds:.3g} s{stopped}{best}{frozen}{twin}"


def entry(
    run: int,
    epoch: int,
    rates: Tensor,
    losses: Mapping[str, Sequence[Any]],
    judged: Mapping[str, Tensor],
    seconds: float,
) -> dict[str, Any]:
    """The entry of one epoch in the history of a run; the arguments hold the numbers of all runs.

    ``rates``: learning rates ``[R, M]``; the entry has one number where members agree. ``judged``: numbers of the
    validation data by name; the name of the watched one is empty.

    >>> entry(0, 1, torch.tensor([[0.1, 0.1]]), {"loss": [2.0]}, {"": torch.tensor([1.5])}, 3.0)
    {'epoch': 1, 'lr': 0.1, 'loss': 2.0, 'validation': 1.5, 'seconds': 3.0}
    """
    lr = [float(str(rate)) for rate in rates[run].cpu().numpy()]  # 0.001, not float32's 0.0010000000474974513
    run_losses = {name: values[run] for name, values in losses.items()}
    held_out = {f"validation_{name}" if name else "validation": part[run].tolist() for name, part in judged.items()}
    return {"epoch": epoch, "lr": lr[0] if len(set(lr)) == 1 else lr, **run_losses, **held_out, "seconds": seconds}


@dataclass(frozen=True)
class Failure:
    """Where a run met NaN or infinity."""

    step: int
    part: str
    members: list[int]

    def __str__(self) -> str:
        who = "members " + ", ".join(map(str, self.members)) if self.members else "no single member"
        return f"NaN or infinity at step {self.step}, in {self.part} ({who})"


class TrainingDiverged(RuntimeError):
    """Training met NaN or infinity and stopped; the ensemble holds the last good weights (the best, if validated).

    ``step`` counts from 0, ``part`` names what was not finite, ``members`` whose it was, ``history`` holds the epochs
    before. With ``twin`` the training that failed is that of the independent twin: the ensemble is trained, and
    ``history`` is its own, with the twin's epochs as ``twin_history``. The message says so where the weights that the
    ensemble holds are not finite either.
    """

    def __init__(self, failure: Failure, history: History, *, twin: bool = False, finite: bool = True) -> None:
        held = "the weights from before that step" if history.best_epoch is None else "its best weights up to then"
        held += "" if finite else ", which an earlier step has made infinite or NaN"
        if twin:
            what, held = "the training of the independent twin", "the result of its own training, which went well"
        else:
            what = "training"
        super().__init__(
            f"{what} met {failure}. The ensemble holds {held}. "
            "A smaller `lr`, `clip_norm=1.0` or scaled inputs usually help."
        )
        self.failure, self.history, self.twin = failure, history, twin
        self.step, self.part, self.members = failure.step, failure.part, failure.members

"""Records of a training: progress while it runs, its history, and errors."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dissensus import checks
from dissensus.ensemble import Ensemble
from dissensus.pages.parts import counted
from dissensus.pages.training import LearningCurves, learning_curves


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
    stopped_by: str | None = None
    """The name of the callback that has stopped the training before its last epoch; None where none has."""
    seed: int | None = None
    """The seed of the training, also where it was drawn from torch's generator (``seed=None``)."""
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

    def frame(self) -> Any:
        """One row per epoch as a pandas frame; lists have one column per member, such as ``member_loss.0``.

        With a twin, its epochs follow those of the ensemble, and the column ``twin`` tells them apart.

        >>> History([{"epoch": 1, "loss": 0.5, "member_loss": [0.4, 0.6]}]).frame().to_dict("records")
        [{'epoch': 1, 'loss': 0.5, 'member_loss.0': 0.4, 'member_loss.1': 0.6}]
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("a frame needs pandas: pip install 'dissensus[data]'") from None
        entries = self.epochs
        if self.twin_history is not None:
            own = [{**entry, "twin": False} for entry in self.epochs]
            entries = own + [{**entry, "twin": True} for entry in self.twin_history.epochs]
        return pandas.DataFrame([flattened(entry) for entry in entries])

    def plot(self, *, log: bool | None = None) -> Any:
        """The losses over the epochs as a matplotlib figure: ``history.plot().savefig("history.png")``.

        The first panel has the training loss, and the mean of the members' losses with a band from the best to the
        worst member. The second has what is watched on validation data, with one line per member if each is watched,
        and a mark at the epoch whose weights were kept. A twin is drawn in dashes.

        Args:
            log: Whether the axes of losses are logarithmic. By default, they are if all numbers are above zero and the
                largest is at least ten times the smallest.
        """
        if log is not None:
            checks.flag("log", log)
        if not self.epochs:
            checks.refuse("history", "hold an epoch to draw", "none")
        curves = [_curves(self.epochs, self.best_epoch, "")]
        if self.twin_history is not None and self.twin_history.epochs:
            curves.append(_curves(self.twin_history.epochs, self.twin_history.best_epoch, "twin"))
        return learning_curves(curves, log)

    def __str__(self) -> str:
        by = "" if self.stopped_by is None else f" by {self.stopped_by}"
        stopped = f", stopped early{by}" if self.stopped_early else ""
        best = "" if self.best_epoch is None else f", best epoch {self.best_epoch}"
        ends = ["never" if epoch is None else str(epoch) for epoch in self.frozen_at or []]
        frozen = f", members frozen at epochs {', '.join(ends)}" if ends else ""
        twin = "" if self.twin_history is None else f"; twin: {self.twin_history}"
        counts = f"{counted(len(self.epochs), 'epoch')}, {counted(self.steps, 'step')}, {self.seconds:.3g} s"
        return f"{counts}{stopped}{best}{frozen}{twin}"


def _curves(epochs: Sequence[Mapping[str, Any]], best: int | list[int | None] | None, name: str) -> LearningCurves:
    """What is drawn of a history; epochs of members that were trained in turn follow each other."""
    starts = [0, *(i for i in range(1, len(epochs)) if epochs[i]["epoch"] <= epochs[i - 1]["epoch"])]
    watched = [_numbers(entry.get("validation")) for entry in epochs]
    of_each = best if isinstance(best, list) else [best]
    in_turn = len(starts) > 1
    marks = [
        (start + epoch, watched[start + epoch - 1][0 if in_turn or len(of_each) == 1 else place])
        for place, (epoch, start) in enumerate(zip(of_each, starts if in_turn else [0] * len(of_each), strict=False))
        if epoch is not None and watched[start + epoch - 1]
    ]
    return LearningCurves(
        name=name,
        loss=[entry["loss"] for entry in epochs],
        members=[_numbers(entry.get("member_loss")) for entry in epochs],
        validation=watched,
        marks=marks,
        starts=starts,
    )


def _numbers(value: Any) -> list[float]:
    """A number, several or none, as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def flattened(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without lists and dictionaries inside: their values get names with dots.

    Values that are no numbers, texts or None, such as functions in the grid of a sweep, become their names.

    >>> flattened({"run": 2, "point": {"beta": 0.5}, "epoch": 1, "member_loss": [0.25, 0.5]})
    {'run': 2, 'point.beta': 0.5, 'epoch': 1, 'member_loss.0': 0.25, 'member_loss.1': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            flat |= flattened({f"{name}.{key}": inner for key, inner in value.items()})
        elif isinstance(value, list | tuple):
            flat |= flattened({f"{name}.{place}": inner for place, inner in enumerate(value)})
        elif isinstance(value, bool | int | float | str | None):
            flat[name] = value
        else:
            flat[name] = getattr(value, "__qualname__", None) or str(value)
    return flat


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
    source: str = ""
    """What of the batch was not finite before the step, ``"targets"`` or ``"inputs"``; empty where both were."""

    def __str__(self) -> str:
        who = "members " + ", ".join(map(str, self.members)) if self.members else "no single member"
        why = f", because the {self.source} of that batch are not finite" if self.source else ""
        return f"NaN or infinity at step {self.step}, in {self.part} ({who}){why}"


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
        fix = "A smaller `lr`, `clip_norm=1.0` or scaled inputs and targets usually help."
        if failure.source:
            fix = f"Drop or fill such {failure.source}."
        super().__init__(f"{what} met {failure}. The ensemble holds {held}. {fix}")
        self.failure, self.history, self.twin = failure, history, twin
        self.step, self.part, self.members = failure.step, failure.part, failure.members

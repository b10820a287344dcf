"""The engine: R runs × M members trained as one computation. A single fit is one run."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import dissensus.train.optim as optim
import dissensus.train.running_means as running_means
import dissensus.train.schedules as schedules
from dissensus.axes import LossParts
from dissensus.data.batches import TensorBatches
from dissensus.data.unlabelled import Batches, WithUnlabelled
from dissensus.execution.graphs import on
from dissensus.objectives.declaration import ADVERSARIAL, DRAW, UNLABELLED
from dissensus.train.adversary import Adversary
from dissensus.train.convergence import Freezing, standing
from dissensus.train.diagnosis import check_names, culprit
from dissensus.train.early_stopping import Body, Watch
from dissensus.train.finished import Finished, some_rows
from dissensus.train.history import Failure, OnProgress, Progress, entry
from dissensus.train.inputs import Fed, Inputs, fed
from dissensus.train.member_groups import Grouped
from dissensus.train.numerics import Numerics
from dissensus.train.sampling import Drawn
from dissensus.train.trained_loss import Targets

RunLosses = Callable[[Tensor, Tensor, Mapping[str, Tensor]], LossParts]
"""``(outputs [R, M, B, C], targets [R, B, ...], hyperparameters [R]) -> LossParts``, all entries with an axis R."""
Validator = Callable[["Engine"], tuple[Tensor, dict[str, Tensor]]]
"""The watched metric of every run, ``[R]``, or of every member, ``[R·M]``; and the objective's parts, ``[R]``."""

_SECONDS_BETWEEN_REPORTS = 0.1
_STRIDE = 0x2545F4914F6CDD1D


@runtime_checkable
class CapturedSteps(Protocol):
    """See `dissensus.train.capture`."""

    def steps(self, engine: "Engine", factors: Tensor) -> Iterator[int]:
        """Do the steps of the rest of an epoch; give the number of examples of each."""
        ...

    def forget(self) -> None:
        """Shapes or branches have changed: capture anew."""
        ...

    def tell(self, engine: "Engine") -> None:
        """Note the runs that failed on the device since the last time."""
        ...


@dataclass
class Engine:
    """Everything that training changes, with rows ``G = R·M``, and the loop that changes it."""

    body: Body
    flat: Float[Tensor, "G P"]
    members: int
    losses: RunLosses
    hyper: dict[str, Float[Tensor, " R"]]
    optimizer: str
    settings: optim.Settings
    limit: Float[Tensor, "G 1"] | None
    active: Bool[Tensor, " G"]
    feed: Batches
    schedule: schedules.Schedule
    epochs: int
    numerics: Numerics
    validator: Validator | None = None
    watch: Watch | None = None
    progress: OnProgress | None = None
    after_step: Callable[["Engine"], None] | None = None
    """Called between steps: the moment for a checkpoint."""
    captured: "CapturedSteps | None" = None
    """Does steps by replaying a graph, on a GPU."""
    grouped: Grouped | None = None
    """Members in groups, where all at once would not fit into memory."""
    plan: Callable[["Engine", Inputs], str] | None = None
    """Looks at the first batch before the first step, and decides on that; tells what it decided."""
    keys: Int[Tensor, " R"] | None = None
    """What an objective that draws is keyed by, per run; None for one that does not."""
    drawn: Drawn | None = None
    """Draws members at every step; None where all take all steps."""
    adversary: Adversary | None = None
    """Attacks the batches of one run."""
    freezing: Freezing | None = None
    """Freezes members of one run that have converged."""
    targets: Targets = field(default_factory=Targets)  # looked at again at the first step, when outputs are known
    planned: str = ""
    members_at_once: int | None = None
    """Members at a time, as decided before a checkpoint; None where nothing has been decided yet."""
    needs: object = None
    """What it found out; see `dissensus.train.memory.Needs`."""
    epoch: int = 0  # whole epochs done; what people read counts from 1
    in_epoch: int = 0
    """Steps done in this epoch."""
    steps: int = 0
    run_ids: list[int] = field(default_factory=list)
    histories: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    best_epochs: dict[int, Any] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over this epoch's examples of every loss, ``[R]`` or ``[R, M]``."""
    examples: int = 0
    seconds: float = 0.0
    """Time spent before the latest start."""
    backup: dict[str, Tensor] = field(default_factory=dict)
    """Buffers as they were when the epoch began."""
    finished: "Finished | None" = None
    started: float = field(default_factory=time.perf_counter)
    reported: float = 0.0
    backend: str = ""
    """What ran the latest training step."""

    def __post_init__(self) -> None:
        self.flat.requires_grad_()
        self.resting, self.dead = not bool(self.active.all()), False
        self.state = optim.fresh_state(self.optimizer, self.flat.detach(), self.settings.momentum)
        self.run_ids = list(range(len(self.flat) // self.members))
        self.histories = {run: [] for run in self.run_ids}
        self.ticks = torch.zeros((), dtype=torch.int64, device=self.flat.device)
        """Steps done, on the device; graphs count on, so it stays where it is."""
        self.chosen: Tensor | None = None
        """The members ``[R, K]`` that the latest step has drawn."""
        self.summed = self.members  # that the objective's total is a sum over

    @property
    def runs(self) -> int:
        """Runs still in training."""
        return len(self.run_ids)

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self.seconds + time.perf_counter() - self.started

    def rates(self) -> list[float]:
        """The schedule at the beginning of every epoch, by which a checkpoint knows it."""
        return self.schedule(torch.arange(self.epochs, dtype=torch.float64), float(self.epochs)).tolist()

    def train(self) -> None:
        """Train until every run is done; weights end up in the body, best ones where they were watched."""
        try:
            with on(self.flat.device), self.numerics.training():
                while self.epoch < self.epochs and self.runs:
                    self._train_epoch()
        finally:
            self._retire(torch.ones(self.runs, dtype=torch.bool))
            if self.finished is not None:
                self.flat = self.finished.flat
                self.body.hang(self.flat, self.finished.state)
                self.finished = None
            self.flat.requires_grad_(False)
            self.body.replayed = False

    def _train_epoch(self) -> None:
        self.body.train()
        if self.in_epoch == 0:
            self.backup = {name: tensor.clone() for name, tensor in self.body.state().items()}
            self.examples = 0
            for total in self.sums.values():
                total.zero_()
        when = self.epoch + torch.arange(len(self.feed), dtype=torch.float64) / len(self.feed)
        factors = self.schedule(when, float(self.epochs)).to(self.settings.lr)
        for examples in self._steps(factors):
            self.examples += examples
            self.in_epoch += 1
            self.steps += 1
            if self.dead:
                self._retire(torch.ones(self.runs, dtype=torch.bool))
                return
            self._report(last=False)
            if self.after_step is not None:
                self.after_step(self)
        self._end_epoch(float(factors[-1]))
        if self.after_step is not None and self.runs:
            self.after_step(self)

    def _steps(self, factors: Tensor) -> Iterator[int]:
        """Do the steps of the rest of an epoch; give the number of examples of each."""
        if self.captured is not None:
            yield from self.captured.steps(self, factors)
            return
        for x, y in self.feed.epoch(self.epoch, self.in_epoch):
            self.step(x, y, factors[self.in_epoch])
            yield len(y) if self.runs == 1 else y.shape[1]

    def outputs(
        self,
        x: Tensor,
        flat: Tensor | None = None,
        *,
        per_run: bool,
        per_member: bool = False,
        rows: slice | Tensor = slice(None),
    ) -> Float[Tensor, "R M ..."]:
        """Member outputs per run for a batch that all runs share, ``[B, ...]``, or one per run, ``[R, B, ...]``.

        Where members have a batch each, an axis M stands before B. With ``flat`` the pass is one of training; ``rows``
        names the rows whose weights these are: of one run a slice, or of all runs their numbers.
        """
        if per_run or per_member:
            if not per_member:
                x = x.unsqueeze(1).expand(-1, self.members, *x.shape[1:])
            elif not per_run:
                x = x.expand(self.runs, *x.shape)
            x = x.flatten(0, 1)[rows]
        self.body.replayed = self.captured is not None and flat is not None
        with self.numerics.passes():
            outputs = self.body.run(flat, self.numerics.laid(x), per_run or per_member, rows)
        if outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        return outputs.unflatten(0, (self.runs, -1))

    def training_outputs(
        self, parts: Sequence[Fed], flat: Tensor, rows: slice | Tensor = slice(None)
    ) -> Float[Tensor, "R M ..."]:
        """Member outputs of a training pass on a batch and what stands beside it, one behind the other."""
        each = [self.outputs(x, flat, per_run=by_run, per_member=own, rows=rows) for x, by_run, own in parts]
        return each[0] if len(each) == 1 else torch.cat(each, 2)

    def step(self, x: Inputs, y: Tensor, factor: Tensor) -> None:
        """One step of all rows: forward, objective, backward, clip, update."""
        self.ticks.fill_(self.steps)
        outputs, parts, grad = self.gradient(x, y)
        with torch.no_grad():
            # A sum is finite only if every entry is, and it is one number to read back.
            going = self.active.view(self.runs, self.members).any(1)
            if not math.isfinite(float(torch.where(going, parts.total, 0.0).sum() + grad.sum())):
                grad = self._fail(outputs, parts, grad)
            self.update(grad, factor, unseen=self.captured is not None)  # to the bit what a captured step does
            self.add(parts, len(y) if self.runs == 1 else y.shape[1])

    def gradient(self, x: Inputs, y: Tensor) -> tuple[Tensor, LossParts, Float[Tensor, "G P"]]:
        """Outputs, losses and the gradient of all rows, or of those drawn; rows that rest keep their buffers."""
        body, active = self.body, self.active
        if self.plan is not None:
            self.planned, self.plan = self.plan(self, x), None
        before = {name: tensor.clone() for name, tensor in standing(body.state()).items()} if self.resting else {}
        outputs, parts, grad = self.raw_gradient(x, y)
        self.backend = body.ran
        if self.resting:
            body.merge(standing(body.state()), before, ~active)
            grad = self._of_active(grad)
        return outputs, parts, grad

    def raw_gradient(self, x: Inputs, y: Tensor) -> tuple[Tensor, LossParts, Float[Tensor, "G P"]]:
        """The same whether rows rest or not."""
        given = fed(self.feed, x)
        if self.adversary is not None:
            given = self.adversary.given(self, given, y)
        if self.grouped is None:
            flat, rows = self.flat, slice(None)
            if self.drawn is not None:
                self.chosen = self.drawn.chosen(self.ticks)
                rows = self.drawn.rows(self.chosen)
                flat = self.flat.detach()[rows].requires_grad_()
            outputs = self.training_outputs(given, flat, rows)
            parts = self._losses(outputs, y)
            (grad,) = torch.autograd.grad(parts.total.sum(), flat)
            return outputs, parts, grad
        outputs, parts, grad = self.grouped.gradient(
            self.flat,
            lambda flat, rows: self.training_outputs(given, flat, rows)[0],
            lambda outputs: self._losses(outputs.unsqueeze(0), y),
        )
        return outputs.unsqueeze(0), parts, grad

    def _losses(self, outputs: Tensor, y: Tensor) -> LossParts:
        if not self.targets.observed:  # at the first step, or the first after a resume, which is never a captured one
            own = self.feed.labelled if isinstance(self.feed, WithUnlabelled) else self.feed
            self.targets.observe(outputs, own.y if isinstance(own, TensorBatches) else y)
        self.summed = outputs.shape[1] if self.drawn is None else self.members  # masks of a network count
        hyper = self.hyper if self.keys is None else {**self.hyper, DRAW: self.keys + self.ticks * _STRIDE}
        y = y if self.runs > 1 else y.unsqueeze(0)
        if outputs.shape[2] > y.shape[1]:
            outputs, other = outputs.tensor_split([y.shape[1]], 2)
            hyper = {**hyper, UNLABELLED if isinstance(self.feed, WithUnlabelled) else ADVERSARIAL: other}
        parts = self.losses(outputs, y, hyper)
        if self.steps == 0:
            check_names(parts, judged=self.freezing is not None)
        return parts if self.drawn is None else self.drawn.scaled(parts)

    def _of_active(self, grad: Tensor) -> Tensor:
        """A gradient without that of rows that rest."""
        rows = self._rows()
        return torch.where((self.active if rows is None else self.active[rows]).unsqueeze(1), grad, 0.0)

    def _rows(self) -> Tensor | None:
        """The rows that the latest step has drawn; None for all."""
        return None if self.drawn is None or self.chosen is None else self.drawn.rows(self.chosen)

    def update(self, grad: Float[Tensor, "G P"], factor: Tensor, *, unseen: bool = False) -> None:
        """Clip and step; reads nothing back from the device. ``unseen``: nobody has looked for NaN on the host.

        Rows that were not drawn are not touched: weights, moments and step counts stay as they are.
        """
        now = replace(self.settings, lr=self.settings.lr * factor, everyone=not (self.resting or unseen))
        flat, limit = self.flat.detach(), self.limit
        optim.apply(self.optimizer, flat, grad, self.state, now, self.active, limit, self._rows())

    def _fail(self, outputs: Tensor, parts: LossParts, grad: Tensor) -> Tensor:
        """Freeze the runs that met NaN or infinity; the gradient of the others."""
        rows = self.active.view(self.runs, self.members)
        bad = ~(parts.total.isfinite() & grad.view(self.runs, -1).isfinite().all(1)) & rows.any(1)
        for run in bad.nonzero().flatten().tolist():
            self.blame(run, self.steps, outputs, parts, grad)
        self.freeze(bad)
        return self._of_active(grad)

    def blame(self, run: int, step: int, outputs: Tensor, parts: LossParts, grad: Tensor) -> None:
        """Note what was not finite in a run's step, and whose it was."""
        part, members = culprit(outputs[run], parts, grad.view(self.runs, outputs.shape[1], -1)[run], run)
        if self.chosen is not None:
            members = [int(self.chosen[run, member]) for member in members]
        self.failures[self.run_ids[run]] = Failure(step, part, members)

    def freeze(self, runs: Bool[Tensor, " R"]) -> None:
        """Stop runs where they are, and put statistics that NaN has spoilt back to where the epoch began."""
        rows = runs.repeat_interleave(self.members)
        own = self.body.state()
        spoilt = {
            name: self.backup[name]
            for name, tensor in own.items()
            if tensor.is_floating_point() and not bool(tensor.isfinite().all())
        }
        self.body.merge({name: own[name] for name in spoilt}, spoilt, rows)
        self.active.logical_and_(~rows)
        self.resting = True
        self.dead = not bool(self.active.any())

    def _end_epoch(self, factor: float) -> None:
        values = {name: mean.tolist() for name, mean in running_means.averages(self.sums, self.examples).items()}
        judged: dict[str, Tensor] = {}
        if self.validator is not None and self.watch is not None:
            watched, judged = self.validator(self)
            judged = {"": watched.view(self.runs, -1) if self.watch.per_member else watched, **judged}
            self.active.copy_(self.watch.see(self.epoch + 1, watched, self.flat, self.active))
        if self.freezing is not None:
            self.active.copy_(self.freezing.see(self.epoch + 1, values["member_loss"][0], self.active))
        going = self.active.view(self.runs, self.members).any(1).cpu()
        rates = (self.settings.lr * factor).view(self.runs, -1)
        for r, run in enumerate(self.run_ids):
            if run not in self.failures:
                self.histories[run].append(entry(r, self.epoch + 1, rates, values, judged, self.elapsed))
        self._report(last=True)
        self.epoch, self.in_epoch = self.epoch + 1, 0
        if not bool(going.all()):
            self._retire(~going)
        resting = not bool(self.active.all())
        if resting != self.resting and self.captured is not None:
            self.captured.forget()
        self.resting = resting

    def _retire(self, done: Bool[Tensor, " R"]) -> None:
        """Put runs that are done aside, with their best weights, and go on with the others as a smaller computation."""
        if not bool(done.any()):
            return
        rows = done.repeat_interleave(self.members).to(self.flat.device)
        if self.watch is not None:
            self.watch.restore(self.flat, rows)
            for run, best in zip(self.run_ids, self.watch.best_epochs(self.runs), strict=True):
                if done[self.run_ids.index(run)] and self.watch.keep == "best":
                    self.best_epochs[run] = [b or None for b in best] if isinstance(best, list) else best or None
        if bool(done.all()) and self.finished is None:
            self.run_ids = []
            return
        if self.finished is None:
            self.finished = Finished.like(self.flat.detach(), self.body.state())
        retired = [run for run, is_done in zip(self.run_ids, done.tolist(), strict=True) if is_done]
        self.finished.put(retired, self.members, self.flat.detach()[rows], some_rows(self.body.state(), rows))
        self.select(~done)

    def select(self, runs: Bool[Tensor, " R"]) -> None:
        """Go on with some of the runs."""
        rows = runs.repeat_interleave(self.members).to(self.flat.device)
        flat, state = self.flat.detach()[rows], some_rows(self.body.state(), rows)
        self.body.hang(flat, state)
        self.flat = flat.requires_grad_()
        self.state = some_rows(self.state, rows)
        self.backup = some_rows(self.backup, rows)
        self.active = self.active[rows]
        self.limit = None if self.limit is None else self.limit[rows]
        self.settings = self.settings.select(rows)
        self.hyper = {name: value[runs.to(value.device)] for name, value in self.hyper.items()}
        self.keys = None if self.keys is None else self.keys[runs.to(self.keys.device)]
        self.drawn = None if self.drawn is None else self.drawn.select(runs)
        kept = runs.nonzero().flatten().tolist()
        self.run_ids = [self.run_ids[r] for r in kept]
        if self.watch is not None:
            self.watch.select(rows)
        if isinstance(self.feed, TensorBatches | WithUnlabelled) and kept:
            self.feed.select(kept)
        self.sums = {}
        if self.captured is not None:
            self.captured.forget()

    def add(self, parts: LossParts, examples: int) -> None:
        """Add a step's losses to the epoch's sums, with the total as a mean over members."""
        mean = LossParts(parts.total / self.summed, parts.parts)
        running_means.add(self.sums, mean, examples, self.drawn, self.chosen)

    def _report(self, *, last: bool) -> None:
        now = time.perf_counter()
        if self.progress is None or (not last and now - self.reported < _SECONDS_BETWEEN_REPORTS):
            return
        self.reported = now
        self.progress(
            Progress.of(
                running_means.averages(self.sums, self.examples),
                epoch=self.epoch + 1,
                epochs=self.epochs,
                step=self.steps,
                steps=self.epochs * len(self.feed),
                seconds=self.elapsed,
                runs=self.runs,
                frozen=[] if self.freezing is None else self.freezing.members(),
            )
        )

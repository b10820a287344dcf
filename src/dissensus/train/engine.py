"""The engine: R runs × M members trained as one computation. A single fit is one run."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import dissensus.train.lowered_weights as lowered_weights
import dissensus.train.memory as memory
import dissensus.train.optim as optim
import dissensus.train.running_means as running_means
import dissensus.train.schedules as schedules
from dissensus import calls
from dissensus.axes import LossParts
from dissensus.batch import Batch
from dissensus.calls import NetworkInputs
from dissensus.data.batches import TensorBatches
from dissensus.data.unlabelled import Batches, WithUnlabelled
from dissensus.execution import Body, StackedMembers
from dissensus.execution.graphs import on
from dissensus.execution.ranks import Ranks
from dissensus.execution.recomputation import MESSAGE as RECOMPUTES
from dissensus.objectives.declaration import ADVERSARIAL, DRAW, EXAMPLE_WEIGHTS, UNLABELLED
from dissensus.train.adversary import Adversary
from dissensus.train.convergence import frozen_buffers
from dissensus.train.diagnosis import check_names, culprit, source
from dissensus.train.history import Failure, History, OnProgress, Progress, entry
from dissensus.train.inputs import StepInput, step_inputs
from dissensus.train.lowered_weights import Gradient, LoweredWeights, whole
from dissensus.train.notification import Callbacks
from dissensus.train.numerics import Numerics
from dissensus.train.padded_runs import PaddedRuns
from dissensus.train.python_state import unchanged
from dissensus.train.running_means import WEIGHT
from dissensus.train.state import TrainState
from dissensus.train.trained_loss import Targets

RunLosses = Callable[[Tensor, Tensor, Mapping[str, Tensor]], LossParts]
"""``(outputs [R, M, B, C], targets [R, B, ...], hyperparameters [R]) -> LossParts``, all entries with an axis R."""
Validator = Callable[["Engine"], tuple[Tensor, dict[str, Tensor]]]
"""The watched metric of every run, ``[R]``, or of every member, ``[R·M]``; and the objective's parts, ``[R]``."""

_SECONDS_BETWEEN_REPORTS = 0.1
_STRIDE = 0x2545F4914F6CDD1D


@runtime_checkable
class CapturedSteps(Protocol):
    """Steps that are replayed from graphs; see `dissensus.train.capture`."""

    @property
    def given_up(self) -> bool:
        """Whether steps run eagerly from now on, because none could be captured."""
        ...

    def steps(self, engine: "Engine", factors: Tensor) -> Iterator[int]:
        """Do the remaining steps of an epoch; yield the number of examples of each."""
        ...

    def forget(self) -> None:
        """Capture anew, because shapes or branches have changed."""
        ...

    def tell(self, engine: "Engine") -> None:
        """Record the runs that have failed on the device since the last call."""
        ...


@runtime_checkable
class EvaluatesOutputs(Protocol):
    """A validator that computes outputs; see `dissensus.train.evaluation`."""

    def outputs(self, engine: "Engine") -> tuple[Tensor, Tensor]:
        """Outputs ``[R, M, N, ...]`` on validation data, and targets ``[R, N, ...]``."""
        ...


@runtime_checkable
class CheckpointWriter(Protocol):
    """Writes and restores checkpoints; see `dissensus.train.checkpoint`."""

    def __call__(self, engine: "Engine") -> None:
        """Write a checkpoint if one is due."""
        ...


@dataclass
class Engine:
    """Trains the runs of a `TrainState`. Everything besides the state is fixed at construction."""

    state: TrainState
    feed: Batches
    losses: RunLosses
    optimizer: str
    schedule: schedules.Schedule
    epochs: int
    numerics: Numerics
    targets: Targets
    """Checks targets; the number of classes is known from the first outputs on."""
    bootstrap: bool = False
    """Whether weights of examples have an axis M, because each member counts its own drawn examples."""
    pooled_loss: Callable[[Tensor], Tensor] | None = None
    """With `bootstrap`: the loss of runs ``[R]`` from that of members ``[R, M]``, whose epochs count other examples."""
    accumulate: int = 1
    """Batches per update; an epoch ends with an update."""
    validator: Validator | None = None
    adversary: Adversary | None = None
    """Attacks the batches of one run."""
    memory_limit: memory.MemoryLimit | None = None
    """Plans how many members of one run train at once, on the first batch; None: all of them."""
    seeds: Sequence[int] = ()
    """The seed of every run, for its history."""
    own_members: Sequence[int] = ()
    """The number of members of every run, where the others of its rows are padding."""
    padded: PaddedRuns | None = None
    """The shapes of runs that are padded to a common one."""
    progress: OnProgress | None = None
    callbacks: Callbacks | None = None
    checkpointer: CheckpointWriter | None = None
    """Called between steps."""
    ranks: Ranks | None = None
    """Processes that train one run together; the state then has the members of this one."""
    capture: InitVar[Callable[["Engine"], CapturedSteps | None] | None] = None
    """Makes the captured steps of an engine; None, or a result of None: steps run eagerly."""
    captured: CapturedSteps | None = field(init=False)
    lowered: LoweredWeights | None = field(default=None, init=False)
    """Weights of products in bfloat16, which training passes read; None where autocast casts them."""
    reported: float = field(default=0.0, init=False)
    """When progress was reported last."""

    def __post_init__(self, capture: Callable[["Engine"], CapturedSteps | None] | None) -> None:
        self.captured = None if capture is None else capture(self)
        if self.callbacks is not None and self.callbacks.see_steps:
            self.state.latest = {}

    @property
    def body(self) -> Body:
        """The members of all runs in training."""
        return self.state.body

    @property
    def members(self) -> int:
        """Members per run, those of other processes included."""
        return self.state.members if self.ranks is None else self.ranks.members

    @property
    def runs(self) -> int:
        """Runs in training."""
        return self.state.runs

    @property
    def replaying(self) -> bool:
        """Whether steps are, or are going to be, replayed from graphs."""
        return self.captured is not None and not self.captured.given_up

    def start(self, *, resumed: bool) -> None:
        """Tell callbacks that training begins, or goes on from a checkpoint; they may refuse it."""
        if self.callbacks is not None:
            self.callbacks.start(resumed, self.state.histories)

    def train(self) -> None:
        """Train until every run is done; the body then has the trained weights, or the best ones of validation."""
        state = self.state
        state.body.passes = (self.epochs - state.epoch) * len(self.feed) - state.in_epoch
        try:
            self.advance(self.epochs)
        finally:
            state.body.passes = None
            self._retire(torch.ones(state.runs, dtype=torch.bool))
            state.finish()

    def advance(self, until: int) -> None:
        """Train up to the end of an epoch, counted from 1, from which training can go on."""
        state = self.state
        with on(state.flat.device), self.numerics.training():
            while state.epoch < min(until, self.epochs) and state.runs:
                self._train_epoch()

    def latest_entries(self) -> dict[int, dict[str, Any]]:
        """The latest epoch of every run that is in training, by its place among all runs."""
        state = self.state
        return {run: state.histories[run][-1] for run in state.run_ids if run not in (*state.failures, *state.stops)}

    def stop_runs(self, runs: Mapping[int, str]) -> None:
        """Stop runs between two epochs, each with the name of the callback that wants it."""
        for run, callback in runs.items():
            self.state.stop(self.state.run_ids.index(run), callback)
        self._settle()

    def validation_outputs(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Outputs ``[M, N, ...]`` on validation data and its targets, for every run in training; empty without any."""
        state = self.state
        if not isinstance(self.validator, EvaluatesOutputs) or not state.runs:
            return {}
        with on(state.flat.device), self.numerics.training(), torch.no_grad(), state.evaluated():
            outputs, targets = self.validator.outputs(self)
        return {
            run: (self.own_outputs(outputs, place).cpu(), targets[place].cpu())
            for place, run in enumerate(state.run_ids)
        }

    def _train_epoch(self) -> None:
        state = self.state
        state.body.train()
        if state.optimizers is not None:
            state.optimizers.train(state.active)
        if state.in_epoch == 0:
            state.begin_epoch()
        self._lower()
        updates = math.ceil(len(self.feed) / self.accumulate)
        places = torch.arange(len(self.feed)).div(self.accumulate, rounding_mode="floor")  # batches of an update agree
        when = state.epoch + places.double() / updates
        factors = schedules.factors(self.schedule, when, float(self.epochs)).to(state.settings.optimizer.lr)
        for examples in self._steps(factors):
            state.examples += examples
            state.in_epoch += 1
            state.steps += 1
            if state.latest is not None and self.captured is not None and self.replaying:
                self.captured.tell(self)  # a run that has just failed has no numbers to report
            if state.all_failed:
                self._retire(torch.ones(state.runs, dtype=torch.bool))
                return
            self._report(last=False)
            if state.latest is not None and self._notify_step(state.latest, examples, factors[state.in_epoch - 1]):
                self._retire(torch.ones(state.runs, dtype=torch.bool))
                return
            if self.checkpointer is not None:
                self.checkpointer(self)
        self._end_epoch(float(factors[-1]))
        if self.checkpointer is not None and state.runs:
            self.checkpointer(self)

    def _lower(self) -> None:
        """Make copies of weights in bfloat16, or make them anew: between epochs, others may write weights."""
        columns, before = self._lowered_columns(), self.lowered
        if before is not None and before.flat is self.state.flat and columns:
            before.refresh()
            return
        if before is not None and self.captured is not None:
            self.captured.forget()  # graphs read and write copies that go
        body = self.state.body
        if columns and isinstance(body, StackedMembers):
            self.lowered = LoweredWeights(self.state.flat, columns, body.trainable().values())
        else:
            self.lowered = None

    def _lowered_columns(self) -> int:
        """The number of columns of weights of which copies in bfloat16 are kept; 0: none.

        None are kept where steps take some members only, where gradients are added up or exchanged before an update,
        where members share what they train, and where something else than the update may write weights in every step.
        """
        state, body, settings = self.state, self.state.body, self.state.settings
        kind, dtype = state.flat.device.type, state.flat.dtype
        if kind not in lowered_weights.DEVICES or self.numerics.precision != "bf16" or dtype != torch.float32:
            return 0
        if not isinstance(body, StackedMembers) or body.recompute:
            return 0
        if settings.sampling is not None:
            return 0
        if state.plan is not None and (state.plan.groups is not None or not state.plan.lowers):
            return 0
        if state.accumulated is not None or self.ranks is not None or state.shared is not None:
            return 0
        if state.held or state.latest is not None:
            return 0
        if isinstance(self.feed, WithUnlabelled) or (self.adversary is not None and self.adversary.settings.beside):
            return 0  # gradients of two passes would be added up in bfloat16
        if state.optimizers is not None or not optim.has_kernel(self.optimizer, state.moments, settings.optimizer):
            return 0
        if kind == "cuda" and not optim.fused.takes(state.flat):
            return 0
        return body.layout().products_width

    def _steps(self, factors: Tensor) -> Iterator[int]:
        """Do the remaining steps of an epoch; yield the number of examples of each."""
        state = self.state
        if self.captured is not None and not self.captured.given_up:
            yield from self.captured.steps(self, factors)
            return
        for batch in self.feed.epoch(state.epoch, state.in_epoch):
            self.step(batch, factors[state.in_epoch])
            yield self._examples(batch)

    @property
    def updates(self) -> bool:
        """Whether the batch that is under way ends with an update."""
        batches = self.state.in_epoch + 1
        return batches % self.accumulate == 0 or batches == len(self.feed)

    def _examples(self, batch: Batch) -> int:
        """Number of examples of a step."""
        return batch.targets.shape[0] if self.state.runs == 1 else batch.targets.shape[1]

    def outputs(
        self,
        x: NetworkInputs,
        flat: Tensor | None = None,
        *,
        per_run: bool,
        per_member: bool = False,
        rows: slice | Tensor = slice(None),
        backend: str | None = None,
    ) -> Float[Tensor, "R M ..."]:
        """Member outputs per run for a batch that all runs share, ``[B, ...]``, or one per run, ``[R, B, ...]``.

        Where each member has its own batch, x has an axis M before B. A pass with ``flat`` is a training pass, with the
        weights of ``rows``: a slice of the rows of one run, or row numbers of all runs.
        """
        state = self.state

        def per_row(tensor: Tensor) -> Tensor:
            if not per_member:
                tensor = tensor.unsqueeze(1).expand(-1, state.members, *tensor.shape[1:])
            elif not per_run:
                own = tensor if state.own is None else tensor[state.own]
                tensor = own.expand(state.runs, *own.shape)
            return tensor.flatten(0, 1)[rows]

        def run(x: NetworkInputs) -> Tensor:
            with self.numerics.passes():
                return state.body.run(
                    flat,
                    calls.mapped(self.numerics.laid, x),
                    per_member=per_run or per_member,
                    rows=rows,
                    replayed=flat is not None and self.replaying,
                    backend=backend,
                    shared=None if flat is None or state.shared is None else state.shared.flat,
                )

        if per_run or per_member:
            x = calls.mapped(per_row, x)
        if self.ranks is not None:
            counts = None if isinstance(rows, slice) else self.ranks.counts_of(state.sampled)
            return self.ranks.run(run, x, counts, per_member=per_member).unsqueeze(0)
        outputs = run(x)
        if outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        return outputs.unflatten(0, (state.runs, -1))

    def training_outputs(
        self,
        inputs: Sequence[StepInput],
        flat: Tensor,
        rows: slice | Tensor = slice(None),
        backend: str | None = None,
    ) -> Float[Tensor, "R M ..."]:
        """Member outputs of a training pass on all inputs of a step, concatenated along the batch."""
        outputs = [
            self.outputs(x, flat, per_run=per_run, per_member=per_member, rows=rows, backend=backend)
            for x, per_run, per_member in inputs
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def step(self, batch: Batch, factor: Tensor) -> None:
        """One step of all rows: forward, objective, backward, clip, update."""
        state = self.state
        state.ticks.fill_(state.steps)
        if self.lowered is not None:
            self.lowered.follow()
        outputs, parts, grad = self.gradient(batch)
        with torch.no_grad():
            # A sum is finite only if every entry is, and it is one number to read back.
            total = torch.where(state.active_runs(), parts.total, 0.0) if state.resting else parts.total
            shared = 0.0 if state.shared is None or state.shared.grad is None else state.shared.grad.sum()
            finite = math.isfinite(float(total.sum() + grad.sum() + shared))
            if not self._agreed(finite, total.device):
                failed = ~self._finite_runs(parts.total, grad)
                for run in failed.nonzero().flatten().tolist():
                    self.blame(run, state.steps, batch, outputs, parts, grad)
                state.freeze(failed)
                grad = state.active_gradient(grad)
            everyone = not (state.resting or self.replaying)  # as a captured step does
            self._update(grad, factor, self._examples(batch), everyone=everyone, updates=self.updates)
            state.add_losses(parts, self._examples(batch))
            if (
                isinstance(grad, Tensor)
                and self.body.ran == "batched"
                and grad.device.type == "cpu"
                and state.optimizers is None
            ):
                state.flat.grad = grad if grad.shape == state.flat.shape else None  # memory of the next gradient

    def _finite_runs(self, total: Tensor, grad: Gradient) -> Bool[Tensor, " R"]:
        """Runs that may go on, in all processes; nothing is read back."""
        finite = self.state.finite_runs(total, grad)
        return finite if self.ranks is None else self.ranks.agreed(finite)

    def _agreed(self, finite: bool, device: torch.device) -> bool:
        """Whether numbers are finite in all processes."""
        if self.ranks is None:
            return finite
        return bool(self.ranks.agreed(torch.tensor([finite], device=device)))

    def device_step(self, batch: Batch, factor: Tensor, failed_at: Tensor, *, updates: bool = True) -> None:
        """One step that reads nothing back, so that a graph can hold it.

        Runs that fail are stopped at this step; ``failed_at`` ``[R]`` gets its number. ``updates``: whether it ends
        with an update.
        """
        state = self.state
        _, parts, grad = self.gradient(batch)
        with torch.no_grad():
            finite = self._finite_runs(parts.total, grad)
            failed_at.copy_(torch.where(finite | (failed_at >= 0), failed_at, state.ticks))
            state.active.view(state.runs, state.members).logical_and_(finite.unsqueeze(1))
            self._update(grad, factor, self._examples(batch), everyone=False, updates=updates)
            state.add_losses(parts, self._examples(batch))
            state.ticks.add_(1)

    def gradient(self, batch: Batch) -> tuple[Tensor, LossParts, Gradient]:
        """Outputs, losses and the gradient of all rows, or of the sampled ones; rows that rest keep their buffers."""
        state, body = self.state, self.state.body
        if self.memory_limit is not None and state.plan is None:
            try:
                self._plan_memory(batch, self.memory_limit)  # which is the first pass of all
            except (RuntimeError, IndexError, TypeError) as reason:
                told = calls.misfit(reason, batch.inputs, state.body)
                if told is None:
                    raise
                raise told from reason
        if not state.resting:
            outputs, parts, grad = self.raw_gradient(batch)
            state.backend = body.ran
            return outputs, parts, grad
        before = {name: tensor.clone() for name, tensor in frozen_buffers(body.state()).items()}
        outputs, parts, grad = self.raw_gradient(batch)
        state.backend = body.ran
        state_now = body.state()  # a first pass may have made buffers, which all members keep
        body.merge({name: state_now[name] for name in before}, before, ~state.active)
        return outputs, parts, state.active_gradient(grad)

    def raw_gradient(self, batch: Batch) -> tuple[Tensor, LossParts, Gradient]:
        """Outputs, losses and the gradient; rows that rest are treated like the others."""
        state, sampling = self.state, self.state.settings.sampling
        inputs = step_inputs(self.feed, batch)
        if self.adversary is not None:
            inputs = self.adversary.step_inputs(self, inputs, batch.targets)
        groups = None if state.plan is None else state.plan.groups
        if groups is not None or (state.plan is not None and not state.plan.lowers):
            self.lowered = None  # memory is short
        if self.lowered is not None:
            with self.lowered.read():
                outputs = self.training_outputs(inputs, state.flat)
            parts = self._losses(outputs, batch)
            return outputs, parts, self.lowered.gradient(parts.total.sum())
        if groups is None:
            flat, rows = state.flat, slice(None)
            if sampling is not None:
                state.sampled = sampling.sample(state.ticks)
                sampled_rows = state.sampled_rows()
                assert sampled_rows is not None
                rows = sampled_rows
                flat = state.flat.detach()[rows].requires_grad_()
            outputs = self.training_outputs(inputs, flat, rows)
            parts = self._losses(outputs, batch)
            if not len(flat):  # no member of this process was sampled
                grad = flat.detach()
            elif state.shared is None:
                (grad,) = torch.autograd.grad(parts.total.sum(), flat)
                for columns in state.held:
                    columns.still(grad)
            else:
                leaves = (flat, state.shared.flat) if flat.numel() else (state.shared.flat,)
                *own, shared = torch.autograd.grad(parts.total.sum(), leaves)
                grad = own[0] if own else torch.zeros_like(flat)
                state.shared.take(shared if self.ranks is None else self.ranks.summed(shared))
            return outputs, parts, grad if self.ranks is None else self.ranks.summed_over_data(grad)
        outputs, parts, grad = groups.gradient(
            state.flat,
            lambda flat, rows: self.training_outputs(inputs, flat, rows)[0],
            lambda outputs, rows: self._losses(outputs.unsqueeze(0), batch, rows),
        )
        return outputs.unsqueeze(0), parts, grad

    def _losses(self, outputs: Tensor, batch: Batch, rows: slice = slice(None)) -> LossParts:
        """The objective of all runs, or of the members of one run in ``rows``."""
        state, settings, y, weights = self.state, self.state.settings, batch.targets, batch.weights
        if not self.targets.observed:  # at the first step, or the first after a resume, which is never a captured one
            labelled = self.feed.labelled if isinstance(self.feed, WithUnlabelled) else self.feed
            if labelled.changes_targets or weights is not None:
                self.targets.check_batch(y, weights)
            loaded = y if state.runs == 1 else y[0]
            self.targets.observe(outputs, labelled.y if isinstance(labelled, TensorBatches) else loaded)
        state.members_summed = outputs.shape[1] if settings.sampling is None else self.members
        hyper = settings.of_objective
        if settings.draw_keys is not None:
            hyper = {**hyper, DRAW: settings.draw_keys + state.ticks * _STRIDE}
        y = y if state.runs > 1 else y.unsqueeze(0)
        if weights is not None:
            weights = weights if state.runs > 1 else weights.unsqueeze(0)
            if self.bootstrap:
                weights = self._of_members(weights, rows)
            hyper = {**hyper, EXAMPLE_WEIGHTS: weights}
        if outputs.shape[2] > y.shape[1]:
            outputs, other = outputs.tensor_split([y.shape[1]], 2)
            hyper = {**hyper, UNLABELLED if isinstance(self.feed, WithUnlabelled) else ADVERSARIAL: other}
        parts = self.losses(outputs, y, hyper)
        if settings.own_members is not None:  # the objective counts all rows as members
            parts = LossParts(parts.total * (settings.own_members / state.members), parts.parts)
            state.members_summed = settings.own_members
        named = dict(parts.parts)
        state.step_weight = named.pop(WEIGHT, None)
        parts = LossParts(parts.total, named)
        if state.step_weight is None and weights is not None:
            state.step_weight = weights.flatten(2 if self.bootstrap else 1).sum(-1)
        if state.steps == 0:
            check_names(parts, judged=state.freezing is not None)
        return parts if settings.sampling is None else settings.sampling.scaled(parts)

    def _of_members(self, weights: Float[Tensor, "R M B *S"], rows: slice) -> Tensor:
        """Weights of the members that the objective sees: all, those in ``rows``, or the sampled ones."""
        sampled = self.state.sampled
        if self.state.settings.sampling is None or sampled is None:
            return weights[:, rows]
        return weights.gather(
            1, sampled.view(*sampled.shape, *[1] * (weights.ndim - 2)).expand(*sampled.shape, *weights.shape[2:])
        )

    def _update(self, grad: Gradient, factor: Tensor, examples: int, *, everyone: bool, updates: bool) -> None:
        """Clip and step; nothing is read back from the device. ``everyone``: the host knows that no row rests.

        Rows that were not sampled keep their weights, moments and step counts. A batch that does not end with an update
        adds its gradient to those of the next one. Optimizers that the user brings are stepped by the host.
        """
        state, settings, sampled = self.state, self.state.settings, self.state.sampled_rows()
        if state.shared is not None:
            state.update_shared(self.optimizer, factor, examples, updates=updates)
        if state.accumulated is not None:
            matrix = whole(grad)
            state.accumulate(matrix, examples)
            if not updates:
                return
            grad = state.accumulated.take(matrix.dtype)
        if state.optimizers is None:
            current = replace(settings.optimizer, lr=settings.optimizer.lr * factor, everyone=everyone)
            rows = optim.UpdateRows(state.flat.detach(), state.moments, current, state.active, settings.clip_norm)
            optim.apply(self.optimizer, rows, grad, sampled)
            for columns in state.held:
                columns.restore(rows.flat)
        else:
            matrix = whole(grad)
            if settings.clip_norm is not None:
                limit = settings.clip_norm if sampled is None else settings.clip_norm[sampled]
                matrix = matrix * optim.clip_scale(matrix, limit).to(matrix.dtype)
            state.optimizers.step(matrix, factor, state.active, sampled)
        if state.average is not None:
            state.average.update(state.flat, state.active, sampled)

    def blame(self, run: int, step: int, batch: Batch, outputs: Tensor, parts: LossParts, grad: Gradient) -> None:
        """Record what was not finite in a run's step, in which members, and whether its batch had NaN already."""
        state, grad = self.state, whole(grad)
        shared = None if state.shared is None or state.shared.grad is None else state.shared.grad[run]
        if self.ranks is not None:  # one number per member says whether its gradient is finite
            norms = torch.linalg.vector_norm(grad, math.inf, 1, keepdim=True) if len(grad) else grad[:, :1]
            grad = self.ranks.gathered(norms, counts=self.ranks.counts_of(state.sampled))
        part, members = culprit(outputs[run], parts, grad.view(state.runs, outputs.shape[1], -1)[run], run, shared)
        if state.sampled is not None:
            members = [int(state.sampled[run, member]) for member in members]
        if self.own_members:
            members = [member for member in members if member < self.own_members[state.run_ids[run]]]
        inputs = [
            tensor[run] if item.per_run else tensor
            for item in step_inputs(self.feed, batch)
            for tensor in calls.tensors(item.x)
        ]
        # An objective of a user may pass over NaN in targets, which mark what is missing; known losses do not.
        targets = None if self.targets.loss is None else batch.targets if state.runs == 1 else batch.targets[run]
        state.failures[state.run_ids[run]] = Failure(step, part, members, source(inputs, targets))

    def _end_epoch(self, factor: float) -> None:
        state = self.state
        means = self._decided({name: mean.tolist() for name, mean in self._means().items()})
        validation: dict[str, Tensor] = {}
        if self.ranks is not None:
            self.ranks.averaged_over_data(self.body)
        if self.validator is not None and state.stopping is not None:
            with state.evaluated():
                metric, parts = self._decided(self.validator(self))
                validation = {"": metric.view(state.runs, -1) if state.stopping.rule.per_member else metric, **parts}
                everyone = self._of_all(state.active)
                if self.ranks is not None and state.stopping.rule.per_member:
                    metric = metric.flatten()[self.ranks.own]
                going = state.stopping.update(state.epoch + 1, metric, state.flat, state.active, everyone)
                state.active.copy_(going)
                if state.shared is not None:
                    improved = state.stopping.best_epoch == state.epoch + 1
                    state.shared.note_best(improved.to(state.flat.device))
        if state.freezing is not None:
            active = state.freezing.update(state.epoch + 1, means["member_loss"][0], self._of_all(state.active))
            state.active.copy_(active if self.ranks is None else active[self.ranks.own])
            if state.optimizers is not None:  # a member that is frozen stands still with the weights to evaluate
                state.optimizers.eval((~state.active).tolist())
        rates = self._of_all(state.settings.optimizer.lr * factor).view(state.runs, -1)
        for place, run in enumerate(state.run_ids):
            if run not in state.failures and run not in state.stops:
                record = self._own(run, entry(place, state.epoch + 1, rates, means, validation, state.elapsed))
                state.histories[run].append(record)
                by = None if self.callbacks is None else self.callbacks.epoch(run, record)
                if by is not None:
                    state.stop(place, by)
        self._notify_runs()
        self._report(last=True)
        state.epoch, state.in_epoch = state.epoch + 1, 0
        self._settle()

    def _settle(self) -> None:
        """Between two epochs: put runs that are done aside, and note whether any row rests."""
        state = self.state
        going = self._of_all(state.active).view(state.runs, -1).any(1).cpu()
        if not bool(going.all()):
            self._retire(~going)
        resting = not bool(self._of_all(state.active).all())  # all processes run eagerly, or none
        if resting != state.resting and self.captured is not None:
            self.captured.forget()
        state.resting = resting

    def _own(self, run: int, record: dict[str, Any]) -> dict[str, Any]:
        """An entry of a run's history without members that are padding."""
        if not self.own_members:
            return record
        own = self.own_members[run]
        return {name: value[:own] if isinstance(value, list) else value for name, value in record.items()}

    def own_outputs(self, outputs: Float[Tensor, "R M ..."], place: int) -> Float[Tensor, "K ..."]:
        """The outputs of one of the runs in training, without those of members that are padding."""
        return outputs[place, : self.own_members[self.state.run_ids[place]]] if self.own_members else outputs[place]

    def _notify_runs(self) -> None:
        """Give callbacks the epoch of all runs that are still in training, and stop those that they name."""
        ended = self.latest_entries() if self.callbacks is not None else {}
        stopped = self.callbacks.runs(ended) if self.callbacks is not None and ended else {}
        for run, by in stopped.items():
            self.state.stop(self.state.run_ids.index(run), by)

    def _of_all(self, rows: Tensor) -> Tensor:
        """Rows of all processes."""
        return rows if self.ranks is None else self.ranks.gathered(rows)

    def _decided(self, value: Any) -> Any:
        """Numbers that decide, as the first process has them."""
        return value if self.ranks is None else self.ranks.decided(value)

    def _notify_step(self, latest: Mapping[str, Tensor], examples: int, factor: Tensor) -> bool:
        """Give callbacks the numbers of the latest step; return whether they have stopped the last run in training.

        A run that is stopped among others rests until the end of the epoch: a feed serves the same runs for a whole
        epoch.
        """
        state = self.state
        assert self.callbacks is not None
        means = {name: mean.tolist() for name, mean in running_means.averages(latest, examples).items()}
        rates = self._of_all(state.settings.optimizer.lr * factor).view(state.runs, -1)
        stopped = False
        for place, run in enumerate(state.run_ids):
            if run in state.failures or run in state.stops:
                continue
            numbers = self._own(run, entry(place, state.epoch + 1, rates, means, {}, state.elapsed))
            by = self.callbacks.step(run, {"step": state.steps, **numbers})
            if by is not None:
                state.stop(place, by)
                stopped = True
        if not stopped:
            return False
        if not bool(state.active.any()):
            return True
        if not state.resting and self.captured is not None:
            self.captured.forget()  # graphs of steps in which no row rests would change the buffers of those that do
        state.resting = True
        return False

    def _means(self) -> dict[str, Tensor]:
        """Means of the epoch so far."""
        means = running_means.averages(self.state.sums, self.state.examples)
        if self.pooled_loss is not None and "member_loss" in means:
            means["loss"] = means["individual"] = self.pooled_loss(means["member_loss"])
        own = self.state.settings.own_members
        if own is not None:  # means over runs are over members that there are
            for name, mean in means.items():
                if mean.ndim == 2:
                    there = torch.arange(mean.shape[1], device=mean.device) < own.unsqueeze(1)
                    average = torch.where(there, mean, 0.0).sum(1, keepdim=True) / own.unsqueeze(1)
                    means[name] = torch.where(there, mean, average)
        return means

    def _retire(self, done: Bool[Tensor, " R"]) -> None:
        """Put runs that are done aside and go on with the others."""
        if bool(done.any()):
            self.lowered = None  # it would keep the matrix of all runs in memory, beside that of the others
        if bool(done.any()) and self.state.retire(done):
            self._follow_selection(~done)

    def select(self, runs: Bool[Tensor, " R"]) -> None:
        """Go on with some of the runs."""
        self.lowered = None
        self.state.select(runs)
        self._follow_selection(runs)

    def _follow_selection(self, runs: Bool[Tensor, " R"]) -> None:
        """Reduce the feed to the runs that the state has selected; graphs of more runs are useless."""
        kept = runs.nonzero().flatten().tolist()
        if kept:
            self.feed.select(kept)
        if self.captured is not None:
            self.captured.forget()

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go back to the moment of a checkpoint."""
        kept = set(facts["run_ids"])
        if kept and kept != set(self.state.run_ids):
            self.select(torch.tensor([run in kept for run in self.state.run_ids]))
        self.state.restore(tensors, facts)

    def memory_needs(self, batch: Batch) -> memory.Needs:
        """Measure the memory of one run on a batch."""
        state, sampling = self.state, self.state.settings.sampling
        inputs = step_inputs(self.feed, batch)
        known = calls.tensors(inputs[0].x)
        size = sum(tensor.numel() * tensor.element_size() for tensor in known)
        own_size = size // (state.members if inputs[0].per_member else 1)
        inputs += inputs if self.adversary is not None and self.adversary.settings.beside else []
        forward = functools.partial(self.training_outputs, inputs)
        kept = memory.pass_bytes(state.body, state.flat, forward, known)
        at_a_time = len(state.body) if sampling is None else sampling.count
        copies = memory.COPIES + sum(average is not None for average in (state.average, state.accumulated))
        held = copies * state.flat.numel() * state.flat.element_size()
        spare = self._lowered_columns() * len(state.flat) * lowered_weights.DTYPE.itemsize
        held += spare
        if state.body.recompute:  # activations of one member at a time; what a network checkpoints itself is not known
            state.body.recompute = False
            try:
                held += memory.pass_bytes(state.body, state.flat, forward, known)
            except RuntimeError as reason:
                if str(reason) != RECOMPUTES:
                    raise
            finally:
                state.body.recompute = True
        return memory.Needs(at_a_time, held, kept + own_size, spare)

    def _plan_memory(self, batch: Batch, limit: memory.MemoryLimit) -> None:
        state = self.state
        # A resumed training measures once more, which must not count as a call of a network that counts its calls.
        with unchanged(state.python.values() if state.steps else ()):
            needs = self.memory_needs(batch)
        state.plan = memory.plan_members(
            needs,
            limit,
            state.body,
            state.flat.device,
            sampled=state.settings.sampling is not None,
            at_once=state.members_at_once,
        )

    def out_of_memory(self) -> memory.OutOfMemory:
        """An error that says what helps."""
        state = self.state
        return memory.Footprint(
            device=state.flat.device,
            runs=state.runs,
            members=state.members,
            batch_size=getattr(self.feed, "batch_size", None),
            precision=self.numerics.precision,
            plan=state.plan,
        ).advice()

    def history(self, run: int) -> History:
        """The record of a run."""
        state, epochs = self.state, self.state.histories[run]
        failure, stop = state.failures.get(run), state.stops.get(run)
        early = failure is None and len(epochs) < self.epochs
        steps = stop.step if stop else len(epochs) * len(self.feed)
        return History(
            epochs=epochs,
            steps=failure.step if failure else steps,
            seconds=epochs[-1]["seconds"] if epochs else 0.0,
            stopped_early=early,
            stopped_by=stop.callback if stop and early else None,
            seed=self.seeds[run] if self.seeds else None,
            best_epoch=state.best_epochs.get(run),
            frozen_at=None if state.freezing is None else state.freezing.epochs(),
            backend=state.backend,
            precision=str(self.numerics),
            optimizer=f"{self.optimizer}, all members at once"
            if state.optimizers is None
            else f"{state.optimizers.name}, one per member in a loop",
            memory="" if state.plan is None else str(state.plan),
        )

    def _report(self, *, last: bool) -> None:
        now = time.perf_counter()
        if self.progress is None or (not last and now - self.reported < _SECONDS_BETWEEN_REPORTS):
            return
        self.reported, state = now, self.state
        self.progress(
            Progress.of(
                self._means(),
                epoch=state.epoch + 1,
                epochs=self.epochs,
                step=state.steps,
                steps=self.epochs * len(self.feed),
                seconds=state.elapsed,
                runs=state.runs,
                frozen=[] if state.freezing is None else state.freezing.members(),
            )
        )
        if self.lowered is not None:
            self.lowered.refresh()  # a function of the user's may have written weights

"""Objectives over runs, and the metric that training watches."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus import calls, checks
from dissensus.arrays import Conversion
from dissensus.axes import LossParts
from dissensus.batch import Unpack, check_dtype, read_batches, unpacked
from dissensus.calls import NetworkInputs
from dissensus.data.batches import TargetCheck
from dissensus.data.unlabelled import WithUnlabelled
from dissensus.execution.skeleton import first_line
from dissensus.objectives.declaration import EXAMPLE_WEIGHTS, UNLABELLED
from dissensus.randomness import generators_kept
from dissensus.train.engine import Engine, RunLosses
from dissensus.train.settings import TargetSettings, ValidationSettings
from dissensus.train.trained_loss import trained_loss
from dissensus.train.weighting import CLASS_WEIGHTS, weighted

log = logging.getLogger("dissensus")

ROWS_AT_ONCE = 2**16
"""Examples times members that are evaluated at once; this bounds the memory of an evaluation."""


def evaluation_batch(rows: int, most: int = 1024) -> int:
    """Examples to evaluate at once with a number of members."""
    return max(1, min(most, ROWS_AT_ONCE // rows))


def over_runs(objective: Callable[..., LossParts], runs: int) -> RunLosses:
    """An objective for ``[M, B, C]`` as one for ``[R, M, B, C]``: as it is for one run, under ``vmap`` for more."""

    def one_by_one(outputs: Tensor, targets: Tensor, hyper: Mapping[str, Tensor]) -> LossParts:
        losses = [
            checked(objective(outputs[r], targets[r], **{name: value[r] for name, value in hyper.items()}), outputs)
            for r in range(len(outputs))
        ]
        parts = {name: torch.stack([loss.parts[name] for loss in losses]) for name in losses[0].parts}
        return LossParts(torch.stack([loss.total for loss in losses]), parts)

    if runs == 1:
        return one_by_one

    def together(outputs: Tensor, targets: Tensor, hyper: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        total, parts = checked(objective(outputs, targets, **hyper), outputs.unsqueeze(0))
        return total, dict(parts)

    refused: list[str] = []

    def batched(outputs: Tensor, targets: Tensor, hyper: Mapping[str, Tensor]) -> LossParts:
        if not refused:
            try:
                return LossParts(*torch.func.vmap(together)(outputs, targets, dict(hyper)))
            except RuntimeError as reason:
                if "vmap" not in str(reason):
                    raise
                refused.append(first_line(reason))
                log.warning("the objective runs once per run: %s", refused[0])
        return one_by_one(outputs, targets, hyper)

    return batched


def checked(result: object, outputs: Tensor) -> LossParts:
    """Check what an objective returned: one number as total, and named numbers, or one per member, as parts."""
    fix = "Use total.sum() or total.mean()."
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        checks.refuse("objective", "return LossParts(total, parts)", type(result).__name__, error=TypeError)
    total, parts = result
    if not isinstance(total, Tensor) or total.ndim:
        got = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        checks.refuse("objective", "return a tensor of one number, shape [], as total", got, fix)
    for name, part in parts.items():
        if not isinstance(part, Tensor) or tuple(part.shape) not in ((), (outputs.shape[1],)):
            got = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            checks.refuse(f"parts[{name!r}]", "be a tensor of shape [], or [M]", got)
    return LossParts(total, parts)


class Source(NamedTuple):
    """Batches of validation data, and how they are unpacked."""

    batches: Iterable[Any]
    unpack: Unpack | None = None
    seen: Callable[[int, Sequence[Tensor] | None], None] | None = None
    """Called with the number of an epoch and the tensors of every batch, on the host, and with None at its end."""


@dataclass
class Validation:
    """Computes the watched metric of all runs on validation data.

    By default that is the loss of the pooled prediction, or each member's loss with ``watch="member"``. An objective of
    this package determines the loss and the pool, by itself or by what is bound to it. An objective of a user gives the
    loss as its part ``ensemble`` (``member_loss``). Without that part, the loss that is bound to it by name counts, and
    without such a loss its total divided by the number of members.

    Weights of examples and classes count in that loss, and ignored labels do not. Labels are not smoothed.
    """

    data: tuple[NetworkInputs, Tensor] | Source
    """``(inputs, targets)`` on the device, or a source of batches for all runs."""
    objective: Callable[..., LossParts]
    """For one run."""
    settings: ValidationSettings
    rows: Tensor | None = None
    """Each run's examples ``[R, n]``, for all runs of the training; None: every run takes all examples."""
    check: TargetCheck | None = None
    """Checks the targets of a loader."""
    losses: RunLosses | None = None
    """The objective of all runs without label smoothing; None: that of the engine."""
    targets: TargetSettings = field(default_factory=TargetSettings)
    weights: Tensor | None = None
    """The weight of every example ``[N]`` in memory."""
    pooled: RunLosses | None = field(default=None, init=False)
    """The known loss of members and of their pooled prediction, for all runs."""

    def __post_init__(self) -> None:
        self.known = trained_loss(self.objective)

    @torch.no_grad()
    def __call__(self, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        """``[R]``, or ``[R·M]`` per member; and the objective's parts that are one number per run."""
        engine.body.eval()
        outputs, y, weights = self._outputs(engine)
        values, parts = self._values(engine, outputs, y, weights)
        if not bool(values.isfinite().all()):
            log.warning("the validation metric of epoch %d is not finite in every run", engine.state.epoch + 1)
        numbers = {name: part for name, part in parts.items() if part.ndim == 1}
        for name, measure in (self.settings.track or {}).items():
            own = [float(measure(engine.own_outputs(outputs, r), y[r])) for r in range(engine.runs)]
            numbers[name] = torch.tensor(own)
        return values.reshape(-1).cpu(), {name: part.cpu() for name, part in numbers.items()}

    @torch.no_grad()
    def outputs(self, engine: Engine) -> tuple[Tensor, Tensor]:
        """Outputs ``[R, M, N, C]`` with the present weights, and targets ``[R, N, ...]``."""
        engine.body.eval()
        outputs, y, _ = self._outputs(engine)
        return outputs, y

    def _outputs(self, engine: Engine) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs ``[R, M, N, C]``, targets ``[R, N, ...]`` and weights ``[R, N, ...]``."""
        if isinstance(self.data, Source):
            # Reading must not change what training draws: a DataLoader draws a seed at every pass. A validation set
            # that draws on purpose begins where training is: with the same numbers every epoch if training draws none.
            with generators_kept(torch.device("cpu")):
                return self._loaded_outputs(engine, self.data)
        (x, y), weights = self.data, self.weights
        size = evaluation_batch(engine.runs * engine.members)
        if self.rows is not None and engine.runs > 1:
            rows = self.rows[engine.state.run_ids].to(y.device)
            pieces = [engine.outputs(calls.rows(x, batch_rows), per_run=True) for batch_rows in rows.split(size, 1)]
            y, weights = y[rows], None if weights is None else weights[rows]
        else:
            if self.rows is not None:
                rows = self.rows[engine.state.run_ids[0]].to(y.device)
                x, y, weights = calls.rows(x, rows), y[rows], None if weights is None else weights[rows]
            pieces = [engine.outputs(batch, per_run=False) for batch in calls.split(x, size)]
            y = y.expand(engine.runs, *y.shape)
            weights = None if weights is None else weights.expand(engine.runs, *weights.shape)
        return torch.cat(pieces, 2), y, weights

    def _loaded_outputs(self, engine: Engine, source: Source) -> tuple[Tensor, Tensor, Tensor | None]:
        device = engine.state.flat.device
        outputs: list[Tensor] = []
        targets: list[Tensor] = []
        weights: list[Tensor] = []
        conversion = Conversion.of(engine.body)
        for read in read_batches(source.batches, "validation"):
            batch = unpacked(read, source.unpack, conversion=conversion)
            if conversion.exact:
                check_dtype(batch.inputs, conversion.dtype)
            if self.check is not None:
                self.check(batch.targets)
            if source.seen is not None:
                beside = [batch.targets] if batch.weights is None else [batch.targets, batch.weights]
                source.seen(engine.state.epoch, [*calls.tensors(batch.inputs), *beside])
            inputs = calls.mapped(lambda tensor: tensor.to(device), batch.inputs)
            outputs.append(engine.outputs(inputs, per_run=False))
            targets.append(batch.targets.to(device))
            if batch.weights is not None:
                weights.append(batch.weights.to(device))
        if source.seen is not None:
            source.seen(engine.state.epoch, None)
        if not outputs:
            checks.refuse("validation", "hold at least one example", "none")
        if weights and len(weights) < len(outputs):
            got = f"weights in {len(weights)} of {len(outputs)} batches"
            checks.refuse("unpack", "give weights for all batches of validation data, or for none", got)
        y, weight = torch.cat(targets), torch.cat(weights) if weights else None
        weight = None if weight is None else weight.expand(engine.runs, *weight.shape)
        return torch.cat(outputs, 2), y.expand(engine.runs, *y.shape), weight

    def _values(
        self, engine: Engine, outputs: Tensor, y: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        metric = self.settings.metric
        if metric is not None:
            each = [metric(engine.own_outputs(outputs, run), y[run]) for run in range(engine.runs)]
            return torch.stack([self._checked(_tensor_of(value), engine.members) for value in each]), {}
        hyper = self._hyper(engine)
        beside = {} if weights is None else {EXAMPLE_WEIGHTS: weights}
        total, parts = (self.losses or engine.losses)(outputs, y, {**hyper, **beside})
        if CLASS_WEIGHTS in hyper:
            beside[CLASS_WEIGHTS] = hyper[CLASS_WEIGHTS]
        if engine.state.settings.own_members is not None:
            beside["member_weights"] = hyper["weights"]
        values = self._pooled(outputs, y, parts, beside)
        if values is None and self.settings.per_member:
            fix = "Add it to the parts, or pass `metric`."
            checks.refuse("objective", "tell `member_loss` [M] for watch='member'", sorted(parts), fix)
        if values is None:
            values = total / outputs.shape[1]
        return torch.stack([self._checked(value, engine.members) for value in values]), parts

    def _pooled(
        self, outputs: Tensor, y: Tensor, parts: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> Tensor | None:
        """The loss of the pooled prediction, ``[R]``, or of each member, ``[R, M]``; None where it is not known."""
        part = parts.get("member_loss" if self.settings.per_member else "ensemble")
        if self.known is None or (part is not None and not self.known.declared) or outputs.ndim < 4:
            return part
        if outputs.ndim > 4 and not (self.known.declared or self.targets.given):
            return part  # an objective of a user may take dense outputs in its own way
        if self.pooled is None:
            pooled = weighted(self.known, self.targets, self.known.loss, smooth=False)
            self.pooled = over_runs(pooled, len(outputs))
        ensemble_loss, members = self.pooled(outputs, y, weights)
        return members["member_loss"] if self.settings.per_member else ensemble_loss

    def _hyper(self, engine: Engine) -> Mapping[str, Tensor]:
        """The objective's hyperparameters; unlabelled data is its first batch, the same at every epoch."""
        hyper = engine.state.settings.of_objective
        if not isinstance(engine.feed, WithUnlabelled):
            return hyper
        return {**hyper, UNLABELLED: engine.outputs(engine.feed.first_unlabelled(), per_run=False)}

    def _checked(self, value: Tensor, members: int) -> Tensor:
        if tuple(value.shape) != ((members,) if self.settings.per_member else ()):
            shape = "one number per member" if self.settings.per_member else "one number"
            checks.refuse("metric", f"give {shape}", list(value.shape))
        return value.detach().double()


def _tensor_of(value: Any) -> Tensor:
    """What a metric has returned, as a tensor."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        checks.refuse("metric", "return a number or a tensor", repr(value), error=TypeError)

"""Objectives over runs, and the metric that training watches."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dissensus import checks
from dissensus.axes import LossParts
from dissensus.data.batches import TargetCheck
from dissensus.data.unlabelled import WithUnlabelled
from dissensus.execution.skeleton import first_line
from dissensus.objectives.declaration import UNLABELLED
from dissensus.train.engine import Engine, RunLosses
from dissensus.train.trained_loss import trained_loss

log = logging.getLogger("dissensus")

Metric = Callable[[Tensor, Tensor], Tensor | float]
ROWS_AT_ONCE = 2**16
"""Examples times members that are evaluated at once: what bounds the memory of an evaluation."""


def evaluation_batch(rows: int, most: int = 1024) -> int:
    """Examples to evaluate at once with so many members."""
    return max(1, min(most, ROWS_AT_ONCE // rows))


def over_runs(objective: Callable[..., LossParts], runs: int) -> RunLosses:
    """An objective for ``[M, B, C]`` as one for ``[R, M, B, C]``: as it is for one run, under ``vmap`` for more."""

    def one_by_one(outputs: Tensor, targets: Tensor, hyper: Mapping[str, Tensor]) -> LossParts:
        each = [
            checked(objective(outputs[r], targets[r], **{name: value[r] for name, value in hyper.items()}), outputs)
            for r in range(len(outputs))
        ]
        parts = {name: torch.stack([e.parts[name] for e in each]) for name in each[0].parts}
        return LossParts(torch.stack([e.total for e in each]), parts)

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


def checked(found: object, outputs: Tensor) -> LossParts:
    """Hold an objective to its promise: one number as total, and named numbers, or one per member, as parts."""
    fix = "Use total.sum() or total.mean()."
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        checks.refuse("objective", "return LossParts(total, parts)", type(found).__name__, error=TypeError)
    total, parts = found
    if not isinstance(total, Tensor) or total.ndim:
        got = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        checks.refuse("objective", "return a tensor of one number, shape [], as total", got, fix)
    for name, part in parts.items():
        if not isinstance(part, Tensor) or tuple(part.shape) not in ((), (outputs.shape[1],)):
            got = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            checks.refuse(f"parts[{name!r}]", "be a tensor of shape [], or [M]", got)
    return LossParts(total, parts)


class Validation:
    """Computes the watched metric of all runs on held-out data.

    By default that is the loss of the pooled prediction, or each member's own with ``per_member``. An objective of this
    package says by itself, or by what is bound to it, which loss and which pool. An objective of a user's own gives it
    as its part ``ensemble`` (``member_loss``). Without that part, the loss that is bound to it by name counts, and
    without such a loss its total divided by the number of members.
    """

    def __init__(
        self,
        held_out: tuple[Tensor, Tensor] | DataLoader[Any],
        objective: Callable[..., LossParts],
        *,
        rows: Tensor | None,
        metric: Metric | None,
        per_member: bool,
        track: Mapping[str, Metric] | None = None,
        check: TargetCheck | None = None,
    ) -> None:
        """``held_out``: ``(x, y)`` on the device, or a loader of such batches, for one run, whose targets are checked.

        ``objective`` is for one run. ``rows``: each run's own examples ``[R, n]`` for all runs there ever were, or
        None: all examples for all.
        """
        self.held_out, self.rows, self.track, self.check = held_out, rows, dict(track or {}), check
        self.metric, self.per_member = metric, per_member
        self.known = trained_loss(objective)
        self.pooled: RunLosses | None = None
        """The known loss of members and of their pooled prediction, for all runs."""

    @torch.no_grad()
    def __call__(self, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        """``[R]``, or ``[R·M]`` per member; and the objective's parts that are one number per run."""
        engine.body.eval()
        outputs, y = self._outputs(engine)
        values, parts = self._values(engine, outputs, y)
        if not bool(values.isfinite().all()):
            log.warning("the validation metric of epoch %d is not finite in every run", engine.epoch + 1)
        told = {name: part for name, part in parts.items() if part.ndim == 1}
        for name, measure in self.track.items():
            told[name] = torch.tensor([float(measure(outputs[r], y[r])) for r in range(engine.runs)])
        return values.reshape(-1).cpu(), {name: part.cpu() for name, part in told.items()}

    def _outputs(self, engine: Engine) -> tuple[Tensor, Tensor]:
        """Outputs ``[R, M, N, C]`` and targets ``[R, N, ...]``."""
        if isinstance(self.held_out, DataLoader):
            assert engine.runs == 1
            device, both = engine.flat.device, []
            for x, y in self.held_out:
                if self.check is not None:
                    self.check(y)
                both.append((engine.outputs(x.to(device), per_run=False), y.to(device)))
            return torch.cat([outputs for outputs, _ in both], 2), torch.cat([y for _, y in both]).unsqueeze(0)
        x, y = self.held_out
        size = evaluation_batch(engine.runs * engine.members)
        if self.rows is not None and engine.runs > 1:
            own = self.rows[engine.run_ids].to(x.device)
            pieces = [engine.outputs(x[chosen], per_run=True) for chosen in own.split(size, 1)]
            y = y[own]
        else:
            if self.rows is not None:
                own = self.rows[engine.run_ids[0]].to(x.device)
                x, y = x[own], y[own]
            pieces = [engine.outputs(batch, per_run=False) for batch in x.split(size)]
            y = y.expand(engine.runs, *y.shape)
        return torch.cat(pieces, 2), y

    def _values(self, engine: Engine, outputs: Tensor, y: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self.metric is not None:
            each = [torch.as_tensor(self.metric(outputs[r], y[r])) for r in range(engine.runs)]
            return torch.stack([self._checked(value, engine.members) for value in each]), {}
        total, parts = engine.losses(outputs, y, self._hyper(engine))
        values = self._pooled(outputs, y, parts)
        if values is None and self.per_member:
            fix = "Add it to the parts, or pass `metric`."
            checks.refuse("objective", "tell `member_loss` [M] for watch='member'", sorted(parts), fix)
        if values is None:
            values = total / outputs.shape[1]
        return torch.stack([self._checked(value, engine.members) for value in values]), parts

    def _pooled(self, outputs: Tensor, y: Tensor, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The loss of the pooled prediction, ``[R]``, or of each member, ``[R, M]``; None where it cannot be known."""
        told = parts.get("member_loss" if self.per_member else "ensemble")
        if self.known is None or (told is not None and not self.known.declared) or outputs.ndim != 4:
            return told
        if self.pooled is None:
            self.pooled = over_runs(self.known, len(outputs))
        ensemble, own = self.pooled(outputs, y, {})
        return own["member_loss"] if self.per_member else ensemble

    def _hyper(self, engine: Engine) -> Mapping[str, Tensor]:
        """The objective's settings; data without labels is its first batch, the same at every epoch."""
        if not isinstance(engine.feed, WithUnlabelled):
            return engine.hyper
        return {**engine.hyper, UNLABELLED: engine.outputs(engine.feed.first_unlabelled(), per_run=False)}

    def _checked(self, value: Tensor, members: int) -> Tensor:
        if tuple(value.shape) != ((members,) if self.per_member else ()):
            wanted = "one number per member" if self.per_member else "one number"
            checks.refuse("metric", f"give {wanted}", list(value.shape))
        return value.detach().double()

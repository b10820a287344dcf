"""Regression losses whose outputs are more than predicted values: Gaussians, quantiles and rates of counts.

The tests of an audit compare predicted values by their squared error. This module gives the values that such outputs
predict, and the decomposition of the loss itself, which an audit shows beside the tests.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses
from dissensus.auditing.sums import LossSums
from dissensus.axes import PerExampleLoss, Pool
from dissensus.diversity.decomposition import check_pool, member_and_ensemble_loss
from dissensus.scores import Takes

GAUSSIAN_INTERVAL = 0.9
"""Level of the central interval of a mixture of Gaussians whose coverage is measured."""
_VALUES = {
    "gaussian_nll": "their predicted means",
    "quantile": "their predicted medians",
    "poisson": "their predicted rates",
}


@dataclass(frozen=True)
class ProbabilisticLoss:
    """A loss by which members predict a distribution, and how they are pooled."""

    loss: str | PerExampleLoss
    pool: Pool

    @classmethod
    def of(cls, loss: str | PerExampleLoss, pool: Pool | None) -> "ProbabilisticLoss | None":
        """The loss with its pool, by default its natural one; None for a loss of predicted values."""
        name = losses.name_of(loss)
        if name not in _VALUES:
            return None
        pool = losses.named(name).pools[0] if pool is None else pool
        check_pool(loss, pool)
        return cls(loss, pool)

    @property
    def name(self) -> str:
        """Name of the loss."""
        return str(losses.name_of(self.loss))

    @property
    def basis(self) -> str:
        """What the tests are about, in words."""
        return f"Tests and verdict compare members by the squared error of {_VALUES[self.name]}."

    @property
    def takes(self) -> Takes:
        """Kind of outputs that scores take; rates count as values."""
        return {"gaussian_nll": "gaussian", "quantile": "quantiles", "poisson": "values"}[self.name]  # pyright: ignore[reportReturnType]

    @property
    def may_be_negative(self) -> bool:
        """Whether the loss has values below zero, so that ratios of losses say nothing."""
        return losses.named(self.name).density

    @property
    def nominal_coverage(self) -> float | None:
        """Share of targets that should lie inside the intervals whose coverage is measured; None without intervals."""
        if self.name == "gaussian_nll":
            return GAUSSIAN_INTERVAL
        levels = self._levels
        return round(levels[-1] - levels[0], 12) if self.name == "quantile" and len(levels) > 1 else None

    @property
    def _levels(self) -> tuple[float, ...]:
        return losses.check_levels(losses.settings_of(self.loss).get("levels", losses.QUANTILE_LEVELS))

    @property
    def _floor(self) -> float:
        return losses.settings_of(self.loss).get("floor", losses.VARIANCE_FLOOR)

    def targets(self, width: int, name: str) -> int:
        """Number of targets of outputs with a number of columns."""
        parts = losses.outputs_per_target(self.loss)
        if width % parts:
            meaning = "a mean and a log-variance" if self.name == "gaussian_nll" else f"{parts} quantiles"
            requirement = f"have {parts} columns for every target, {meaning}, for the loss {self.name!r}"
            fix = "Other levels? Use loss=functools.partial(losses.quantile, levels=...)." if parts > 2 else ""
            checks.refuse(name, requirement, f"{width} columns", fix)
        return width // parts

    def values(self, outputs: Float[Tensor, "n M C"]) -> Float[Tensor, "n M D"]:
        """The value that each member predicts: the mean, the median, or the rate.

        Without the level 0.5, the median is the mean of the quantiles nearest to it.
        """
        if self.name == "gaussian_nll":
            return outputs[..., : outputs.shape[-1] // 2]
        if self.name == "poisson":
            return outputs.exp()
        levels = torch.tensor(self._levels, dtype=torch.float64)
        distance = (levels - 0.5).abs()
        nearest = (distance - distance.min() < 1e-9).nonzero().flatten().to(outputs.device)
        return outputs.unflatten(-1, (-1, len(levels))).index_select(-1, nearest).mean(-1)

    def sums(self, outputs: Float[Tensor, "n M C"], targets: Float[Tensor, "n D"]) -> LossSums:
        """The loss of members and ensemble, and the share of targets inside the ensemble's intervals."""
        member, ensemble = member_and_ensemble_loss(
            outputs.transpose(0, 1), targets, loss=self.loss, pool=self.pool, weights=None
        )
        return LossSums(member.T, ensemble, self._covered(outputs, targets))

    def _covered(self, outputs: Float[Tensor, "n M C"], targets: Float[Tensor, "n D"]) -> Float[Tensor, " n"] | None:
        if self.nominal_coverage is None:
            return None
        if self.name == "gaussian_nll":
            mean, variance = losses.gaussian_moments(outputs, self._floor)
            below = torch.special.ndtr((targets.unsqueeze(1) - mean) / variance.sqrt()).mean(1)
            inside = (below - 0.5).abs() <= GAUSSIAN_INTERVAL / 2
        else:
            pooled = outputs.unflatten(-1, (-1, len(self._levels))).mean(1).sort(-1).values
            inside = (pooled[..., 0] <= targets) & (targets <= pooled[..., -1])
        return inside.to(outputs.dtype).mean(-1)


class LabelColumns:
    """Outputs of labels that do not exclude each other, ``[..., L]``, as two classes each, ``[..., 2, L]``.

    Each label of an example is a question with two answers, as each pixel of an image is. Columns are computed when
    they are sliced.
    """

    def __init__(self, outputs: Any, kind: str) -> None:
        self.outputs, self.kind = outputs, kind
        *leading, labels = outputs.shape
        self.shape = (*leading, 2, labels)

    def __getitem__(self, index: Any) -> Tensor:
        entries = index if isinstance(index, tuple) else (index,)
        rows, rest = entries[: len(self.shape) - 2], entries[len(self.shape) - 2 :]
        part = torch.as_tensor(self.outputs[rows])
        part = part if part.is_floating_point() else part.float()
        other = torch.zeros_like(part) if self.kind == "logits" else 1 - part
        return torch.stack([other, part], -2)[(..., *rest)] if rest else torch.stack([other, part], -2)


def as_label_columns(outputs: Any, kind: str, name: str) -> Any:
    """Outputs ``[M, N, L]``, or M arrays ``[N, L]``, as two classes for every label."""
    parts = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    axes = 2 if isinstance(outputs, list | tuple) else 3
    if any(len(getattr(part, "shape", ())) != axes for part in parts):
        got = ", ".join(sorted({checks.shape_text(getattr(part, "shape", ())) for part in parts}))
        checks.refuse(name, "have shape [M, N, L], one column for every label", got)
    wrapped = [LabelColumns(part, kind) for part in parts]
    return wrapped if isinstance(outputs, list | tuple) else wrapped[0]


def as_label_targets(targets: Any, ignore_index: int | None) -> Any:
    """Labels 0 and 1, ``[N, L]``, as whole numbers."""
    values = torch.as_tensor(targets)
    if values.ndim != 2:
        fix = "One class for every example? Use task='classification'." if values.ndim == 1 else ""
        checks.refuse("targets", "have shape [N, L], one number for every label", checks.shape_text(values.shape), fix)
    known = (values == 0) | (values == 1)
    if ignore_index is not None:
        known |= values == ignore_index
    if not bool(known.all()):
        value = float(values[~known][0])
        fix = "Unknown labels? Mark them by a whole number, and pass ignore_index." if math.isnan(value) else ""
        checks.refuse("targets", "be 0 or 1 for every label", f"{value:g}", fix)
    return values.long().numpy()

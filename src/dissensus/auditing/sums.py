"""Sums over examples, by block: the typed record that every figure and every test of an audit is computed from."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dissensus.metrics.calibration import BINS, bin_of

Record = TypeVar("Record")
_SINGLE_PRECISION_ROWS = 64
"""Examples of a block that are added in single precision before their sum is added in double precision."""


@dataclass(frozen=True)
class ChoiceSums:
    """Classes that members name."""

    agreements: Shaped[Tensor, "K M M"]
    """Examples on which two members name the same class."""
    distinct: Shaped[Tensor, " K"]
    """Numbers of different classes that are named."""


@dataclass(frozen=True)
class ErrorSums:
    """Losses of the members and of the ensemble, and their squared errors (Brier scores of classifiers)."""

    member_loss: Shaped[Tensor, "K M"]
    ensemble_loss: Shaped[Tensor, " K"]
    quadratic: Shaped[Tensor, " K"]
    """Squared error of the members' mean prediction."""
    products: Shaped[Tensor, "K M M"]
    """Inner products of members' error vectors."""
    rises: Shaped[Tensor, "K D"] | None = None
    """Rise of the ensemble's loss without a share of the members, for each share of `DROPS`."""


@dataclass(frozen=True)
class LossSums:
    """A loss of predicted distributions, where that is not the squared error of predicted values."""

    member: Shaped[Tensor, "K M"]
    ensemble: Shaped[Tensor, " K"]
    covered: Shaped[Tensor, " K"] | None = None
    """Share of targets inside the ensemble's intervals."""


@dataclass(frozen=True)
class ValueSums:
    """Regression targets, less their mean over all examples."""

    y: Shaped[Tensor, "K C"]
    y_squared: Shaped[Tensor, " K"]


@dataclass(frozen=True)
class ClassSums:
    """Accuracy, likelihood and Brier score of a classifier."""

    right: Shaped[Tensor, " K"]
    member_right: Shaped[Tensor, "K M"]
    guessed: Shaped[Tensor, " K"]
    """Frequency of the predicted class among the labels: the chance that a guess with the same answers is right."""
    member_guessed: Shaped[Tensor, "K M"]
    nll: Shaped[Tensor, " K"]
    member_nll: Shaped[Tensor, "K M"]
    brier: Shaped[Tensor, " K"]
    member_brier: Shaped[Tensor, "K M"]


@dataclass(frozen=True)
class SlopeSums:
    """Derivatives of training losses with respect to the scale of outputs (see `dissensus.auditing.stationarity`).

    The sums of `slope`, `curvature` and `fitted_loss` are over the examples that each member was trained on.
    """

    slope: Shaped[Tensor, "K M"]
    curvature: Shaped[Tensor, "K M"]
    fitted_loss: Shaped[Tensor, "K M"]
    mean_slope: Shaped[Tensor, " K"]
    """Mean of the members' slopes over all examples."""
    pool_slope: Shaped[Tensor, "K M"]
    pool_curvature: Shaped[Tensor, "K M"]
    pool_loss: Shaped[Tensor, " K"]
    bag_count: Shaped[Tensor, "K M"]
    """Number of examples that each member was trained on."""


@dataclass(frozen=True)
class Sums:
    """Sums over the examples of every block, ``[K, ...]``. Before they are added up, one row per example, ``[n, ...]``.

    A group is None where the outputs do not have it: choices and classes for regression, everything but `spread` and
    `choices` without targets, and slopes except for training outputs.
    """

    spread: Shaped[Tensor, " K"]
    """Mean squared distance of the members from their mean."""
    choices: ChoiceSums | None = None
    errors: ErrorSums | None = None
    values: ValueSums | None = None
    losses: LossSums | None = None
    classes: ClassSums | None = None
    slopes: SlopeSums | None = None


@dataclass(frozen=True)
class OffsetSums:
    """Sums of every output. Where outputs are many, they are kept for fewer blocks, ``[L, ...]``."""

    count: Float[Tensor, " L"]
    """Number of examples of each of these blocks."""
    deviation: Float[Tensor, "L M C"]
    """Differences of the members from their mean, in what the pool averages."""
    offset: Float[Tensor, "L M C"]
    """The same in probabilities, votes or values. This is `deviation` itself but for pool "score" of a classifier."""
    pool_error: Float[Tensor, "L C"] | None = None
    """Mean probabilities of the members less the label, for pool "score" of a classifier."""


@dataclass(frozen=True)
class BinSums:
    """Count, confidence and accuracy in bins of confidence."""

    pool: Float[Tensor, "K bins 3"]
    members: Float[Tensor, "K M bins 3"]


@dataclass(frozen=True)
class Totals:
    """All sums over all examples."""

    count: Float[Tensor, " K"]
    """Number of examples of each block."""
    sums: Sums
    offsets: OffsetSums
    labels: Float[Tensor, "K C"] | None = None
    """Number of examples of each class."""
    bins: BinSums | None = None


@dataclass
class Chunk:
    """Numbers of some examples, which come first in every tensor."""

    sums: Sums
    deviation: Float[Tensor, "n M C"]
    offset: Float[Tensor, "n M C"] | None = None
    confidence: tuple[Float[Tensor, " n"], Float[Tensor, "n M"]] | None = None
    """Probability of the predicted class: of the pool, and of the members."""
    labels: Int[Tensor, " n"] | None = None
    scores: dict[str, Float[Tensor, " n"]] = field(default_factory=dict)
    hard: bool = False
    """Whether every probability is 0 or 1."""


def tensors(record: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a record and of the records inside it, in the order of their fields.

    >>> [name for name, _ in tensors(Sums(torch.zeros(2), ChoiceSums(torch.zeros(2, 3, 3), torch.zeros(2))))]
    ['spread', 'choices.agreements', 'choices.distinct']
    """
    for part in dataclasses.fields(record):
        value = getattr(record, part.name)
        if isinstance(value, Tensor):
            yield prefix + part.name, value
        elif dataclasses.is_dataclass(value):
            yield from tensors(value, f"{prefix}{part.name}.")


def mapped(record: Record, function: Callable[[Tensor], Tensor]) -> Record:
    """A record of the same type with a function of every tensor.

    >>> mapped(ValueSums(torch.ones(2, 1), torch.ones(2)), lambda sums: 3 * sums).y_squared
    tensor([3., 3.])
    """
    changed: dict[str, Any] = {}
    for part in dataclasses.fields(record):  # pyright: ignore[reportArgumentType] (every record is a dataclass)
        value = getattr(record, part.name)
        if isinstance(value, Tensor):
            changed[part.name] = function(value)
        elif dataclasses.is_dataclass(value):
            changed[part.name] = mapped(value, function)
    return dataclasses.replace(record, **changed)  # pyright: ignore[reportArgumentType]


class BlockSums:
    """Running sums by block, in double precision.

    Args:
        blocks: Number of blocks.
        coarse: Number of blocks of the sums of every output.
        device: Device of the sums.
    """

    def __init__(self, blocks: int, coarse: int, device: torch.device) -> None:
        self.blocks, self.coarse, self.device = blocks, coarse, device
        self.layout: Sums | None = None  # an empty record with the fields and shapes of the chunks
        self.rows: Tensor | None = None  # all of `Sums` side by side and the count, [K, columns]
        self.coarse_count = torch.zeros(coarse, dtype=torch.float64, device=device)
        self.deviation: _OutputSum | None = None
        self.offset: _OutputSum | None = None
        self.labels: Tensor | None = None
        self.bins: tuple[Tensor, Tensor] | None = None
        self.pending = 0

    def add(self, chunk: Chunk, block: Int[Tensor, " n"]) -> None:
        """Add the numbers of some examples, each to the sums of its block."""
        coarse_block = block % self.coarse
        ones = torch.ones(len(block), dtype=torch.float64, device=self.device)
        self.coarse_count.index_add_(0, coarse_block, ones)
        columns = [values.flatten(1) if values.ndim > 1 else values.unsqueeze(1) for _, values in tensors(chunk.sums)]
        rows = torch.cat([*(column.double() for column in columns), ones.unsqueeze(1)], 1)
        if self.rows is None:
            self.layout = mapped(chunk.sums, lambda values: values[:0].double().cpu())
            self.rows = self._zeros(rows.shape[1])
        self.rows.index_add_(0, block, rows)
        if chunk.labels is not None:
            self._add_labels(chunk, block, ones)
        self.deviation = self._add_outputs(self.deviation, chunk.deviation, coarse_block)
        if chunk.offset is not None:
            self.offset = self._add_outputs(self.offset, chunk.offset, coarse_block)
        self.pending += len(block)
        if self.pending >= _SINGLE_PRECISION_ROWS * self.coarse:
            self._merge_pending()

    def totals(self) -> Totals:
        """All sums, on the host."""
        self._merge_pending()
        assert self.rows is not None
        assert self.layout is not None
        assert self.deviation is not None
        rows = self.rows.cpu()
        start = 0

        def restore(empty: Tensor) -> Tensor:
            nonlocal start
            width = math.prod(empty.shape[1:])
            start += width
            return rows[:, start - width : start].reshape(self.blocks, *empty.shape[1:])

        sums = mapped(self.layout, restore)
        deviation = deviations(self.deviation.total.cpu())
        offset, pool_error = deviation, None
        if self.offset is not None:  # probabilities less the label, where there are labels
            probs = self.offset.total.cpu()
            offset, pool_error = deviations(probs), probs.mean(1)
        return Totals(
            rows[:, -1].contiguous(),
            sums,
            OffsetSums(self.coarse_count.cpu(), deviation, offset, pool_error),
            None if self.labels is None else self.labels.cpu(),
            None if self.bins is None else BinSums(*(part.cpu() for part in self.bins)),
        )

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self.blocks, *shape, dtype=torch.float64, device=self.device)

    def _add_labels(self, chunk: Chunk, block: Tensor, ones: Tensor) -> None:
        """Count labels, and add confidences to their bins."""
        assert chunk.labels is not None
        assert chunk.confidence is not None
        assert chunk.sums.classes is not None
        members, classes = chunk.deviation.shape[1:]
        if self.labels is None or self.bins is None:
            self.labels = self._zeros(classes)
            self.bins = self._zeros(BINS, 3), self._zeros(members, BINS, 3)
        self.labels.view(-1).index_add_(0, block * classes + chunk.labels, ones)
        right = chunk.sums.classes.right, chunk.sums.classes.member_right
        for total, confidence, correct in zip(self.bins, chunk.confidence, right, strict=True):
            self._add_bins(total, block, confidence.double(), correct.double())

    def _add_bins(self, total: Tensor, block: Tensor, confidence: Tensor, correct: Tensor) -> None:
        """Add count, confidence and accuracy, each to its bin."""
        shape = confidence.shape[1:]
        inner = torch.arange(math.prod(shape), device=self.device).view(shape)
        row = block.view(-1, *[1] * len(shape)) * inner.numel() + inner
        place = 3 * (row * BINS + bin_of(confidence, BINS)).flatten()
        for i, values in enumerate((torch.ones_like(confidence), confidence, correct)):
            total.view(-1).index_add_(0, place + i, values.flatten())

    def _add_outputs(self, running: "_OutputSum | None", values: Tensor, block: Tensor) -> "_OutputSum":
        if running is None:
            running = _OutputSum(torch.zeros(self.coarse, *values.shape[1:], dtype=torch.float64, device=self.device))
        if values.dtype == torch.float64 or len(block) > _SINGLE_PRECISION_ROWS * self.coarse:
            running.total.index_add_(0, block, values.double())
            return running
        if running.pending is None:
            running.pending = values.new_zeros(self.coarse, *values.shape[1:])
        running.pending.index_add_(0, block, values)
        return running

    def _merge_pending(self) -> None:
        """Add what was summed in single precision to the sums in double precision."""
        for running in (self.deviation, self.offset):
            if running is not None and running.pending is not None:
                running.total.add_(running.pending)
                running.pending.zero_()
        self.pending = 0


@dataclass
class _OutputSum:
    """A sum of outputs in double precision, and what is still to be added to it in single precision."""

    total: Tensor
    pending: Tensor | None = None


def deviations(averaged: Float[Tensor, "n M C"]) -> Float[Tensor, "n M C"]:
    """Differences of the members from their mean; exactly zero for members that are equal."""
    relative = averaged - averaged[:, :1]  # members less their mean need not be zero where all are equal
    return relative.sub_(relative.mean(1, keepdim=True))

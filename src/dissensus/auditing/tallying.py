"""One pass over member outputs: every figure of an audit is a function of sums, which are kept for blocks of examples.

Units (examples, or groups of examples that belong together) are assigned to blocks at random. Sums over all blocks give
a figure, and drawing blocks with replacement gives its bootstrap interval. Nothing is read twice, and memory does not
grow with the number of examples. With fewer units than blocks this is the ordinary bootstrap.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dissensus.auditing.examples import ExampleSlice, Kind, SliceContext
from dissensus.auditing.probabilistic import ProbabilisticLoss
from dissensus.auditing.streaming import OutputReader
from dissensus.auditing.sums import BinSums, BlockSums, Chunk, ErrorSums, OffsetSums, Sums
from dissensus.axes import Pool
from dissensus.randomness import random_bits
from dissensus.scores import Score

BLOCKS = 256
_MOST_HELD = 2**24
"""Numbers of the largest sum, over all blocks."""
_ALONE_UP_TO = 2**22
"""Numbers up to which no other threads are started."""
_GPU_FROM = 2**28
"""Numbers from which a GPU is worth its start."""
_GPU_AT_ONCE = 2**25
"""Numbers of a slice on a GPU."""
_MOST_WORKERS = 8
"""Largest number of slices that are computed at the same time: each holds memory."""

_Result = tuple[Tensor, Chunk | None]
"""The image of every example of a slice, and their numbers; None where none of them counts."""


@dataclass(frozen=True)
class AuditTally:
    """Sums over all examples, by block, and what they are sums of."""

    members: int
    examples: int
    width: int
    kind: Kind
    loss: str
    pool: Pool
    units: int
    """Number of units that the bootstrap draws: groups of examples, images of dense outputs, or examples."""
    count: Float[Tensor, " K"]
    """Number of examples of each block."""
    sums: Sums
    offsets: OffsetSums
    labels: Float[Tensor, "K C"] | None = None
    """Number of examples of each class."""
    bins: BinSums | None = None
    """Calibration of a classifier."""
    hard: bool = False
    """Whether every probability is 0 or 1, as for votes."""
    scores: dict[str, Float[Tensor, " N"]] = field(default_factory=dict)
    """Scores of every example."""
    frequencies: Float[Tensor, " C"] | None = None
    """Frequencies of classes among the targets."""
    probabilistic: ProbabilisticLoss | None = None
    """Loss of outputs that predict a distribution."""

    @property
    def errors(self) -> ErrorSums:
        """Sums of errors, which outputs with targets have."""
        assert self.sums.errors is not None
        return self.sums.errors


def tally_outputs(
    outputs: OutputReader,
    targets: Tensor | None,
    *,
    kind: Kind,
    loss: str,
    pool: Pool,
    scores: Mapping[str, Score] | None = None,
    groups: Tensor | None = None,
    in_bag: Tensor | None = None,
    probabilistic: ProbabilisticLoss | None = None,
    counted: Bool[Tensor, " N"] | None = None,
    device: torch.device | str | None = None,
) -> AuditTally:
    """Read all outputs once. Without targets, the sums that need none.

    Slices are read and added up one after the other. They are computed on as many threads as torch has, or on a GPU.

    Args:
        outputs: Outputs of the members.
        targets: One for each example, or for each pixel of dense outputs.
        kind: Kind of the outputs.
        loss: The loss that is decomposed.
        pool: How the ensemble predicts.
        scores: Scores to keep for every example, which detection needs; an empty dictionary for the variance of values.
        groups: Whole numbers, one for each example (each image of dense outputs): examples with equal numbers are
            resampled together. Pixels of an image always are.
        in_bag: For training data: 1 where a member was trained on an example (image), ``[M, N]`` or ``[1, N]``.
            Derivatives of losses with respect to the scale of outputs are added up then.
        probabilistic: The loss of outputs that predict a distribution, for regression.
        counted: Which examples (pixels) count; the others are left out. All by default.
        device: Where slices are computed. The default is a GPU where there is one and outputs are many.
    """
    device = _device(outputs) if device is None else torch.device(device)
    units, block_of = _assign_blocks(outputs.images, groups, counted)
    examples = outputs.examples if counted is None else int(counted.sum())
    blocks = max(2, min(units, BLOCKS))
    coarse = max(2, min(blocks, _MOST_HELD // (outputs.members * outputs.width)))  # for sums over every output
    frequencies = centre = None
    if kind != "values" and targets is not None:
        labels_counted = targets if counted is None else targets[counted]
        frequencies = torch.bincount(labels_counted, minlength=outputs.width).double() / examples
    elif targets is not None:
        centre = targets.double().reshape(len(targets), -1).mean(0)
    context = SliceContext(outputs.name, kind, loss, pool, examples, frequencies, centre, scores, probabilistic)

    def compute(rows: slice, part: Tensor) -> _Result:
        values = part.to(device).to(outputs.dtype).contiguous()
        outputs.check_finite(values, rows.start)
        numbers = torch.arange(rows.start, rows.stop)
        if counted is not None:
            numbers = numbers[counted[rows]]
            values = values[(numbers - rows.start).to(device)]
        images = numbers // outputs.pixels
        if not len(numbers):
            return images, None
        mask = None if in_bag is None else in_bag[:, images].T.to(device)
        labels = None if targets is None else targets[numbers].to(device)
        return images, ExampleSlice(context, values, labels, rows.start, mask).chunk()

    sums = BlockSums(blocks, coarse, device)
    columns: dict[str, list[Tensor]] = {}
    hard = kind != "values"
    parts = outputs.parts(_GPU_AT_ONCE if device.type == "cuda" else None)
    for images, chunk in _in_order(compute, parts, 1 if device.type == "cuda" else _workers(outputs)):
        if chunk is None:
            continue
        sums.add(chunk, block_of[images].to(device))
        hard = hard and chunk.hard
        for name, values in chunk.scores.items():
            columns.setdefault(name, []).append(values.float().cpu())
    totals = sums.totals()
    return AuditTally(
        outputs.members,
        examples,
        outputs.width,
        kind,
        loss,
        pool,
        units,
        totals.count,
        totals.sums,
        totals.offsets,
        totals.labels,
        totals.bins,
        hard,
        {name: torch.cat(values) for name, values in columns.items()},
        frequencies,
        probabilistic,
    )


def _assign_blocks(
    examples: int, groups: Tensor | None, counted: Tensor | None = None
) -> tuple[int, Int[Tensor, " N"]]:
    """The number of units, and the block of every example. Units are in random order, as many in every block.

    Images without a pixel that counts are no units, and their block means nothing.
    """
    if counted is not None:
        with_pixels = counted.view(examples, -1).any(1)
        units, block_of = _assign_blocks(int(with_pixels.sum()), None if groups is None else groups[with_pixels])
        everywhere = torch.zeros(examples, dtype=block_of.dtype)
        everywhere[with_pixels] = block_of
        return units, everywhere
    unit = torch.arange(examples) if groups is None else groups.unique(return_inverse=True)[1]
    units = int(unit.max()) + 1
    order = random_bits((units,), torch.tensor(units), torch.tensor(0)).argsort()
    block = torch.empty_like(order)
    block[order] = torch.arange(units) % max(2, min(units, BLOCKS))
    return units, block[unit]


def _device(outputs: OutputReader) -> torch.device:
    return torch.device("cuda" if outputs.numbers >= _GPU_FROM and torch.cuda.is_available() else "cpu")


def _workers(outputs: OutputReader) -> int:
    """Number of threads that compute slices: zero where outputs are few."""
    return min(torch.get_num_threads(), _MOST_WORKERS) if outputs.numbers > _ALONE_UP_TO else 0


class _OneThread:
    """Sets torch's number of threads to one as long as any audit is inside, and restores it afterwards."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = Lock(), 0, 1

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = torch.get_num_threads()
            self.inside += 1
            torch.set_num_threads(1)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            torch.set_num_threads(self.before if self.inside == 0 else 1)


_ONE_THREAD = _OneThread()


def _in_order(
    function: Callable[[slice, Tensor], _Result], calls: Iterable[tuple[slice, Tensor]], workers: int
) -> Iterator[_Result]:
    """Results of calls in their order, computed by threads of one core each while this thread reads on.

    Threads of whole slices do not wait for each other after every operation, as torch's own do. Until the last result
    is taken, torch uses one thread per operation.
    """
    if workers == 0:
        yield from itertools.starmap(function, calls)
        return
    _ONE_THREAD.enter()
    pool = ThreadPoolExecutor(workers, "dissensus-audit", initializer=partial(torch.set_num_threads, 1))
    waiting: deque[Future[_Result]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(function, *call))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        _ONE_THREAD.leave()

"""Batches of an epoch: from tensors on the device, from a ``Dataset``, or from a foreign ``DataLoader``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dissensus import checks
from dissensus.randomness import Use, derived_seed

DataLike = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]
"""Data to train or evaluate on: tensors ``(x, y)``, a ``Dataset`` or a ``DataLoader`` of such pairs."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""``(x [B, ...], generator) -> x``, on the device."""
Augments = Augment | Sequence[Augment] | None
"""One augmentation for all members, or a list with one per member; then every member sees a different batch."""
TargetCheck = Callable[[Tensor], None]
"""Refuses targets ``[B, ...]`` that do not fit the loss."""


class TensorBatches:
    """Batches of tensors that are stored on the device; batches are gathered there by index, for one run or several.

    The order of an epoch is drawn on the host from (seed, epoch), so it is the same on every device. Runs with the same
    seed and the same rows share their batches, which are gathered once.

    Args:
        x: Inputs ``[N, ...]``.
        y: Targets ``[N, ...]``.
        batch_size: Examples per step.
        seeds: One seed per run.
        rows: Row numbers of each run's examples, ``[R, n]``; all examples by default.
        device: Device of the tensors.
        shuffle: Draw a new order every epoch.
        drop_last: Omit a last batch that is smaller.
        augment: Applied to every batch, seeded by (seed, epoch, step); a list contains one per member.
    """

    resumable = True
    """Whether an epoch can start in its middle."""
    parts = 1
    """Number of tensors that `raw` yields for a step."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        batch_size: int,
        seeds: Sequence[int],
        device: torch.device,
        rows: Int[Tensor, "R n"] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augments = None,
    ) -> None:
        if len(x) != len(y):
            checks.refuse("data", "hold as many targets as inputs", f"{len(x)} inputs and {len(y)} targets")
        if len(x) == 0:
            checks.refuse("data", "hold at least one example", "none")
        self.examples = len(x) if rows is None else rows.shape[1]
        if drop_last and self.examples < batch_size:
            fix = "No batch would remain."
            checks.refuse("batch_size", f"be at most {self.examples} with drop_last=True", batch_size, fix)
        check_finite("x", x)
        check_finite("y", y)
        self.x, self.y = x.to(device), y.to(device)
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.seeds, self.rows, self.augment = list(seeds), rows, augment
        self._group()

    def _group(self) -> None:
        """Group the runs that see the same batches: those with the same seed and the same rows."""
        keys = [
            (seed if self.shuffle or self.augment else 0, None if self.rows is None else self.rows[r].numpy().tobytes())
            for r, seed in enumerate(self.seeds)
        ]
        distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        self._leaders = [keys.index(key) for key in distinct]
        self._group_of = torch.tensor([distinct[key] for key in keys], device=self.x.device)
        count = len(self._leaders) if self.augment is not None else 0
        self.generators = [torch.Generator(self.x.device) for _ in range(count)]

    @property
    def per_run(self) -> bool:
        """Whether runs see different batches."""
        return len(self._leaders) > 1

    @property
    def per_member(self) -> bool:
        """Whether members see different batches."""
        return isinstance(self.augment, Sequence)

    def select(self, runs: Sequence[int]) -> None:
        """Continue with these runs only."""
        self.seeds = [self.seeds[r] for r in runs]
        self.rows = None if self.rows is None else self.rows[list(runs)]
        self._group()

    def __len__(self) -> int:
        whole, rest = divmod(self.examples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def order(self, index: int, run: int = 0) -> Int[Tensor, " n"]:
        """Row numbers in the order in which a run sees its examples in an epoch, on the host."""
        rows = torch.arange(self.examples) if self.rows is None else self.rows[run]
        if not self.shuffle:
            return rows
        generator = torch.Generator().manual_seed(derived_seed(self.seeds[run], Use.SHUFFLE, index))
        return rows[torch.randperm(self.examples, generator=generator)]

    def epoch(self, index: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of an epoch, starting at a step; the last may be smaller.

        One run gives ``x [B, ...], y [B, ...]``. Several runs give ``y [R, B, ...]`` and ``x [R, B, ...]``, or
        ``x [B, ...]`` if all runs see the same batches. Where members see different batches, x has an axis M before B.
        """
        for step, raw in enumerate(self.raw(index, start), start):
            self.seed_step(index, step)
            yield self.batch(*raw)

    def raw(self, index: int, start: int = 0) -> Iterator[tuple[Int[Tensor, "U B"]]]:
        """Row numbers of every step of an epoch, on the device, for each of the U distinct orders."""
        orders = torch.stack([self.order(index, run) for run in self._leaders]).to(self.x.device)
        for rows in list(orders.split(self.batch_size, 1))[start : len(self)]:
            yield (rows,)

    def size(self, rows: Int[Tensor, "U B"]) -> int:
        """Number of examples of a step."""
        return rows.shape[1]

    def seed_step(self, index: int, step: int) -> None:
        """Seed the generators for a step: their draws depend on (seed, epoch, step) alone."""
        for generator, run in zip(self.generators, self._leaders, strict=False):
            generator.manual_seed(derived_seed(self.seeds[run], Use.AUGMENT, index, step))

    def batch(self, rows: Int[Tensor, "U B"]) -> tuple[Tensor, Tensor]:
        """The batch of one step, gathered and augmented on the device."""
        x, y = self.x[rows], self.y[rows]
        if self.augment is not None:
            x = torch.stack([augmented(self.augment, batch, g) for batch, g in zip(x, self.generators, strict=True)])
        return self._expand(x, y)

    def _expand(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct batches ``[U, B, ...]`` expanded to the runs."""
        if len(self.seeds) == 1:
            return x[0], y[0]
        if len(self._leaders) == 1:
            return x[0], y.expand(len(self.seeds), *y.shape[1:])
        return x[self._group_of], y[self._group_of]


def augmented(augment: Augment | Sequence[Augment], x: Tensor, generator: torch.Generator) -> Tensor:
    """An augmented batch ``[B, ...]``, or one per member, ``[M, B, ...]``; augmentations may write into the batch."""
    if isinstance(augment, Sequence):
        return torch.stack([augment_member(x.clone(), generator) for augment_member in augment])
    return augment(x, generator)


class LoadedBatches:
    """Batches of a ``Dataset`` or of a user's ``DataLoader``, moved to the device batch by batch, for one run.

    A ``Dataset`` is shuffled by (seed, epoch), and collated by its method ``collate`` if it has one. A ``DataLoader``
    keeps its order and randomness. With ``labels=False`` a batch may consist of inputs alone. ``check`` is called with
    the targets of every batch before they are moved to the device.
    """

    resumable = False
    per_run = False
    parts = 2

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augments = None,
        labels: bool = True,
        check: TargetCheck | None = None,
    ) -> None:
        self.device, self.seed, self.augment, self.labels, self.check = device, seed, augment, labels, check
        self.generators = [torch.Generator(device)] if augment is not None else []
        self.generator: torch.Generator | None = None
        if isinstance(source, DataLoader):
            self.loader = source
        else:
            self.generator = torch.Generator()
            collate = getattr(source, "collate", None)
            self.loader = DataLoader(
                source, batch_size, shuffle, drop_last=drop_last, generator=self.generator, collate_fn=collate
            )
        try:
            empty = len(self.loader) == 0
        except TypeError:
            fix = "Read it into a map-style Dataset, or into tensors."
            checks.refuse("data", "have a length", "a stream (IterableDataset)", fix, TypeError)
        if empty:
            checks.refuse("data", "give at least one batch", "an empty loader")

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def per_member(self) -> bool:
        """Whether members see different batches."""
        return isinstance(self.augment, Sequence)

    def generator_of_loader(self) -> torch.Generator | None:
        """The generator that a user's ``DataLoader`` shuffles by, if it has one."""
        return self.loader.generator or getattr(self.loader.sampler, "generator", None)

    def epoch(self, index: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of an epoch, from its beginning."""
        for step, raw in enumerate(self.raw(index, start)):
            self.seed_step(index, step)
            yield self.batch(*raw)

    def raw(self, index: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the loader, moved to the device."""
        assert start == 0, "a DataLoader cannot start in the middle of an epoch"
        if self.generator is not None:
            self.generator.manual_seed(derived_seed(self.seed, Use.SHUFFLE, index))
        for batch in self.loader:
            if not self.labels:
                inputs = batch[0] if isinstance(batch, list | tuple) else batch
                batch = (inputs, torch.zeros(len(inputs)))
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                checks.refuse("data", "give pairs (x, y)", type(batch).__name__)
            if self.check is not None:
                self.check(batch[1])
            x, y = (part.to(self.device, non_blocking=True) for part in batch)
            yield x, y

    def size(self, x: Tensor, y: Tensor) -> int:  # noqa: ARG002
        """Number of examples of a step."""
        return len(y)

    def seed_step(self, index: int, step: int) -> None:
        """Seed the generator for a step: its draws depend on (seed, epoch, step) alone."""
        for generator in self.generators:
            generator.manual_seed(derived_seed(self.seed, Use.AUGMENT, index, step))

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of one step, augmented."""
        if self.augment is None:
            return x, y
        return augmented(self.augment, x.clone(), self.generators[0]), y  # the batch may share memory with the data set


def as_pair(data: object) -> tuple[Tensor, Tensor] | None:
    """``(x, y)`` if the data is a pair of tensors or a ``TensorDataset`` of two tensors; None otherwise.

    A class derived from ``TensorDataset``, or a data set that is a list as well, may change what an example is, so it
    is read example by example.
    """
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if isinstance(data, tuple | list) and not isinstance(data, Dataset | DataLoader):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            fix = "Arrays? Use torch.from_numpy(...).float()."
            checks.refuse("data", "be a pair of tensors (x, y)", [type(part).__name__ for part in data], fix, TypeError)
        return data[0], data[1]
    return None


def end_to_end(name: str, data: object) -> tuple[Tensor, Tensor, int]:
    """The concatenation of one pair ``(x, y)`` or of a list of pairs of one shape, and the number of pairs.

    >>> x, y, folds = end_to_end("data", [(torch.zeros(4, 2), torch.zeros(4)), (torch.ones(4, 2), torch.ones(4))])
    >>> x.shape, y.shape, folds
    (torch.Size([8, 2]), torch.Size([8]), 2)
    """
    pairs = data if isinstance(data, list) and not any(isinstance(part, Tensor) for part in data) else [data]
    tensors = [pair for pair in map(as_pair, pairs) if pair is not None]
    if not tensors or len(tensors) < len(pairs):
        got = type(data).__name__
        checks.refuse(name, "be a pair of tensors (x, y), or a list of such pairs", got, "Runs share the device.")
    shapes = {(tuple(x.shape), tuple(y.shape), x.dtype, y.dtype) for x, y in tensors}
    if len(shapes) > 1:
        got = f"{len(shapes)} shapes"
        checks.refuse(name, "hold pairs of one shape and dtype", got, "Sweep over each shape separately.")
    if len(tensors) == 1:
        return *tensors[0], 1
    return torch.cat([x for x, _ in tensors]), torch.cat([y for _, y in tensors]), len(tensors)


def batches(
    data: DataLike,
    *,
    batch_size: int,
    seed: int,
    device: torch.device,
    shuffle: bool = True,
    drop_last: bool = False,
    augment: Augments = None,
    check: TargetCheck | None = None,
) -> TensorBatches | LoadedBatches:
    """Batches of data for one run; tensors are stored on the device and batched there.

    ``check`` is called at once with the targets of tensors, and batch by batch with those of a loader.
    """
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "device": device,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "augment": augment,
    }
    pair = as_pair(data)
    if pair is not None:
        if check is not None:
            check(pair[1])
        return TensorBatches(*pair, seeds=[seed], **settings)
    if isinstance(data, Dataset | DataLoader):
        return LoadedBatches(data, seed=seed, check=check, **settings)
    checks.refuse("data", "be (x, y), a Dataset or a DataLoader", type(data).__name__, error=TypeError)


_CHUNK = 2**26
"""Numbers that are checked at once, which bounds the memory of a check."""


def check_finite(name: str, x: Tensor) -> None:
    """Refuse NaN and infinity, for any memory layout."""
    if not x.is_floating_point():
        return
    rows = max(1, _CHUNK * len(x) // max(1, x.numel()))
    bad = torch.cat([~part.isfinite().reshape(len(part), -1).all(1) for part in x.split(rows)]) if len(x) else x.bool()
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        got = f"NaN or infinity in {int(bad.sum())} examples, first in {first}"
        checks.refuse(name, "be finite", got, "Drop or fill them.")

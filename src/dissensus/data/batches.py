"""Batches of an epoch: from tensors on the device, from a ``Dataset``, or from a foreign ``DataLoader``."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dissensus import checks
from dissensus.randomness import derived_seed

Source = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]

_SHUFFLE, _SPLIT = 0xDA7A, 0x5911


class TensorBatches:
    """Tensors that lie on the device as a whole; batches are gathered there by index.

    The order of an epoch is drawn on the host from (seed, epoch), so it is the same on every device.
    """

    def __init__(
        self, x: Tensor, y: Tensor, *, batch_size: int, seed: int, device: torch.device,
        shuffle: bool = True, drop_last: bool = False,
    ) -> None:  # fmt: skip
        if len(x) != len(y):
            checks.refuse("data", "hold as many targets as inputs", f"{len(x)} inputs and {len(y)} targets")
        if len(x) == 0:
            checks.refuse("data", "hold at least one example", "none")
        if drop_last and len(x) < batch_size:
            checks.refuse(
                "batch_size", f"be at most {len(x)} with drop_last=True", batch_size, "No batch would be left."
            )
        _check_finite(x)
        self.x, self.y = x.to(device), y.to(device)
        self.batch_size, self.seed = batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.x), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def order(self, index: int) -> Tensor:
        """The order of examples in an epoch, on the device."""
        if not self.shuffle:
            return torch.arange(len(self.x), device=self.x.device)
        generator = torch.Generator().manual_seed(derived_seed(self.seed, _SHUFFLE, index))
        return torch.randperm(len(self.x), generator=generator).to(self.x.device)

    def epoch(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of one epoch; the last may be smaller."""
        for chosen in self.order(index).split(self.batch_size)[: len(self)]:
            yield self.x[chosen], self.y[chosen]


class LoadedBatches:
    """A ``Dataset`` or a foreign ``DataLoader``, moved to the device batch by batch.

    A loader of our own making shuffles by (seed, epoch). A foreign one keeps its own order and randomness.
    """

    def __init__(
        self, source: Dataset[Any] | DataLoader[Any], *, batch_size: int, seed: int, device: torch.device,
        shuffle: bool = True, drop_last: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.seed = device, seed
        self.generator: torch.Generator | None = None
        if isinstance(source, DataLoader):
            self.loader = source
        else:
            self.generator = torch.Generator()
            self.loader = DataLoader(
                source, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, generator=self.generator
            )
        if len(self.loader) == 0:
            checks.refuse("data", "give at least one batch", "an empty loader")

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of one epoch."""
        if self.generator is not None:
            self.generator.manual_seed(derived_seed(self.seed, _SHUFFLE, index))
        for batch in self.loader:
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                checks.refuse("data", "give pairs (x, y)", type(batch).__name__)
            x, y = batch
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


Batches = TensorBatches | LoadedBatches
"""What training asks of data: ``len``, the steps of an epoch, and ``epoch(i)``, its batches in an order fixed by i."""


def batches(
    data: Source, *, batch_size: int, seed: int, device: torch.device, shuffle: bool = True, drop_last: bool = False
) -> Batches:
    """The batches of a source; tensors (also a ``TensorDataset`` of two) take the fast path on the device."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    settings = {"batch_size": batch_size, "seed": seed, "device": device, "shuffle": shuffle, "drop_last": drop_last}
    if isinstance(data, tuple | list):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            checks.refuse("data", "be a pair of tensors (x, y)", [type(part).__name__ for part in data], "", TypeError)
        return TensorBatches(data[0], data[1], **settings)
    if isinstance(data, Dataset | DataLoader):
        return LoadedBatches(data, **settings)
    checks.refuse("data", "be (x, y), a Dataset or a DataLoader", type(data).__name__, error=TypeError)


def split(x: Tensor, y: Tensor, fraction: float, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split off a random fraction, drawn from the seed: ``(rest, part)``, each with at least one example.

    >>> rest, part = split(torch.arange(10.0), torch.arange(10), 0.3, seed=0)
    >>> len(rest[0]), len(part[0])
    (7, 3)
    """
    if not 0 < fraction < 1 or len(x) < 2:
        checks.refuse("fraction", "lie between 0 and 1, with two examples or more to split", f"{fraction} of {len(x)}")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(derived_seed(seed, _SPLIT))).to(x.device)
    size = min(max(round(fraction * len(x)), 1), len(x) - 1)
    part, rest = order[:size], order[size:]
    return (x[rest], y[rest]), (x[part], y[part])


def _check_finite(x: Tensor) -> None:
    if not x.is_floating_point():
        return
    bad = ~x.isfinite().flatten(1).all(1) if x.ndim > 1 else ~x.isfinite()
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        checks.refuse(
            "x", "be finite", f"NaN or infinity in {int(bad.sum())} examples, first in {first}", "Drop or fill them."
        )

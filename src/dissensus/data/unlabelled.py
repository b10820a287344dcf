"""Batches of labelled data beside batches of data without labels."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dissensus import checks
from dissensus.data.batches import Augments, LoadedBatches, Source, TensorBatches, as_pair
from dissensus.randomness import Use, derived_seed


class WithUnlabelled:
    """Batches of labelled data, each beside a batch of other data that has no labels: ``((x, u), y)``.

    An epoch is one of the labelled data. The other data goes round on its own, in a new order each time, in batches of
    one size: what is left over of a round of tensors is left out. A loader starts a new round with every epoch.
    """

    def __init__(self, labelled: TensorBatches | LoadedBatches, unlabelled: TensorBatches | LoadedBatches) -> None:
        self.labelled, self.unlabelled = labelled, unlabelled
        self.resumable = labelled.resumable and unlabelled.resumable
        self._first: Tensor | None = None

    @property
    def per_run(self) -> bool:
        """Whether runs see different batches."""
        return self.labelled.per_run

    @property
    def per_member(self) -> bool:
        """Whether members see different batches."""
        return self.labelled.per_member

    @property
    def generators(self) -> list[torch.Generator]:
        """Of both."""
        return [*self.labelled.generators, *self.unlabelled.generators]

    def __len__(self) -> int:
        return len(self.labelled)

    def select(self, runs: Sequence[int]) -> None:
        """Go on with these runs only."""
        for own in (self.labelled, self.unlabelled):
            if isinstance(own, TensorBatches):
                own.select(runs)

    def epoch(self, index: int, start: int = 0) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        """Batches of an epoch from a step on."""
        for step, raw in enumerate(self.raw(index, start), start):
            self.seed_step(index, step)
            yield self.batch(*raw)

    def raw(self, index: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """What the host must say of every step, of both."""
        others = self._others(index, start)
        for own in self.labelled.raw(index, start):
            yield (*own, *next(others))

    def _others(self, index: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        each = len(self.unlabelled)
        done = index * len(self) + start if self.resumable else index * -(-len(self) // each) * each
        for round_ in itertools.count(done // each):
            yield from self.unlabelled.raw(round_, done % each)
            done = 0

    def size(self, *raw: Tensor) -> int:
        """Labelled examples of a step."""
        own: Any = self.labelled
        return own.size(*raw[: own.parts])

    def seed_step(self, index: int, step: int) -> None:
        """Make the generators ready for a step."""
        self.labelled.seed_step(index, step)
        self.unlabelled.seed_step(index, step)

    def batch(self, *raw: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The batches of one step."""
        own: Any = self.labelled
        other: Any = self.unlabelled
        x, y = own.batch(*raw[: own.parts])
        return (x, other.batch(*raw[own.parts :])[0]), y

    def first_unlabelled(self) -> Tensor:
        """The first batch of the other data as it lies there, for measures that are to be the same at every epoch."""
        other = self.unlabelled
        if isinstance(other, TensorBatches):
            return other.x[: other.batch_size]
        if self._first is None:
            own = other.generator_of_loader()
            before = None if own is None else own.get_state()
            with torch.random.fork_rng(devices=[]):  # a look must not change what training draws
                self._first = next(other.raw(0))[0]
            if own is not None and before is not None:
                own.set_state(before)
        return self._first


Batches = TensorBatches | LoadedBatches | WithUnlabelled
"""What training asks of data: ``len``, the steps of an epoch, and ``epoch(i)``, its batches in an order fixed by i.

A step that is captured in a graph takes it apart: ``raw(i)`` gives what the host must say (row numbers, or a foreign
loader's batch), ``seed_step`` sets the ``generators``, and ``batch(*raw)`` is the rest, on the device.
"""


def with_unlabelled(
    labelled: TensorBatches | LoadedBatches,
    data: Tensor | Source,
    *,
    batch_size: int,
    seeds: Sequence[int],
    device: torch.device,
    augment: Augments = None,
) -> WithUnlabelled:
    """Labelled batches beside batches of other data: a tensor, a source (whose targets are not looked at), a loader."""
    seeds = [derived_seed(seed, Use.UNLABELLED) for seed in seeds]
    inputs = data if isinstance(data, Tensor) else (as_pair(data) or (None,))[0]
    if isinstance(inputs, Tensor):
        if not len(inputs):
            checks.refuse("unlabelled", "hold at least one example", "none")
        size = min(batch_size, len(inputs))
        dummies = torch.zeros(len(inputs))
        other: TensorBatches | LoadedBatches = TensorBatches(
            inputs, dummies, batch_size=size, seeds=seeds, device=device, drop_last=True, augment=augment
        )
    elif isinstance(data, Dataset | DataLoader):
        if len(seeds) > 1:
            checks.refuse("unlabelled", "be a tensor where several runs share it", type(data).__name__)
        other = LoadedBatches(
            data, batch_size=batch_size, seed=seeds[0], device=device, drop_last=False, augment=augment, labels=False
        )
    else:
        checks.refuse("unlabelled", "be a tensor, a Dataset or a DataLoader", type(data).__name__, error=TypeError)
    return WithUnlabelled(labelled, other)

"""Batches of labelled data together with batches of unlabelled data."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dissensus import checks
from dissensus.data.batches import Augments, DataLike, LoadedBatches, TensorBatches, as_pair
from dissensus.randomness import Use, derived_seed


class WithUnlabelled:
    """Batches of labelled data, each together with a batch of unlabelled data: ``((x, u), y)``.

    An epoch is an epoch of the labelled data. The unlabelled data is repeated in rounds, each in a new order. A smaller
    last batch of a round of tensors is omitted. A loader starts a new round with every epoch.
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
        """Generators of the labelled and of the unlabelled batches."""
        return [*self.labelled.generators, *self.unlabelled.generators]

    def __len__(self) -> int:
        return len(self.labelled)

    def select(self, runs: Sequence[int]) -> None:
        """Continue with these runs only."""
        for batches in (self.labelled, self.unlabelled):
            if isinstance(batches, TensorBatches):
                batches.select(runs)

    def epoch(self, index: int, start: int = 0) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        """Batches of an epoch, starting at a step."""
        for step, raw in enumerate(self.raw(index, start), start):
            self.seed_step(index, step)
            yield self.batch(*raw)

    def raw(self, index: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Raw steps of both: the labelled tensors, then the unlabelled ones."""
        unlabelled = self._unlabelled_raw(index, start)
        for labelled in self.labelled.raw(index, start):
            yield (*labelled, *next(unlabelled))

    def _unlabelled_raw(self, index: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        round_steps = len(self.unlabelled)
        done = index * len(self) + start if self.resumable else index * -(-len(self) // round_steps) * round_steps
        for round_index in itertools.count(done // round_steps):
            yield from self.unlabelled.raw(round_index, done % round_steps)
            done = 0

    def size(self, *raw: Tensor) -> int:
        """Number of labelled examples of a step."""
        labelled: Any = self.labelled
        return labelled.size(*raw[: labelled.parts])

    def seed_step(self, index: int, step: int) -> None:
        """Seed the generators for a step."""
        self.labelled.seed_step(index, step)
        self.unlabelled.seed_step(index, step)

    def batch(self, *raw: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The batches of one step."""
        labelled: Any = self.labelled
        unlabelled: Any = self.unlabelled
        x, y = labelled.batch(*raw[: labelled.parts])
        return (x, unlabelled.batch(*raw[labelled.parts :])[0]), y

    def first_unlabelled(self) -> Tensor:
        """The first unlabelled batch, without augmentation, for measures that must not change between epochs."""
        unlabelled = self.unlabelled
        if isinstance(unlabelled, TensorBatches):
            return unlabelled.x[: unlabelled.batch_size]
        if self._first is None:
            generator = unlabelled.generator_of_loader()
            before = None if generator is None else generator.get_state()
            with torch.random.fork_rng(devices=[]):  # reading it must not change the draws of training
                self._first = next(unlabelled.raw(0))[0]
            if generator is not None and before is not None:
                generator.set_state(before)
        return self._first


Batches = TensorBatches | LoadedBatches | WithUnlabelled
"""Data as training uses it: ``len`` is the number of steps of an epoch, ``epoch(i)`` yields its batches, in an order
that i determines.

A step that is captured in a graph uses the parts of ``epoch``: ``raw(i)`` yields what comes from the host (row numbers,
or a ``DataLoader``'s batch), ``seed_step`` seeds the ``generators``, and ``batch(*raw)`` does the rest on the device.
"""


def with_unlabelled(
    labelled: TensorBatches | LoadedBatches,
    data: Tensor | DataLike,
    *,
    batch_size: int,
    seeds: Sequence[int],
    device: torch.device,
    augment: Augments = None,
) -> WithUnlabelled:
    """Labelled batches together with unlabelled ones: from a tensor, a pair, a ``Dataset`` or a ``DataLoader``.

    Targets of the unlabelled data are ignored.
    """
    seeds = [derived_seed(seed, Use.UNLABELLED) for seed in seeds]
    inputs = data if isinstance(data, Tensor) else (as_pair(data) or (None,))[0]
    if isinstance(inputs, Tensor):
        if not len(inputs):
            checks.refuse("unlabelled", "hold at least one example", "none")
        size = min(batch_size, len(inputs))
        targets = torch.zeros(len(inputs))
        unlabelled: TensorBatches | LoadedBatches = TensorBatches(
            inputs, targets, batch_size=size, seeds=seeds, device=device, drop_last=True, augment=augment
        )
    elif isinstance(data, Dataset | DataLoader):
        if len(seeds) > 1:
            checks.refuse("unlabelled", "be a tensor where several runs share it", type(data).__name__)
        unlabelled = LoadedBatches(
            data, batch_size=batch_size, seed=seeds[0], device=device, drop_last=False, augment=augment, labels=False
        )
    else:
        checks.refuse("unlabelled", "be a tensor, a Dataset or a DataLoader", type(data).__name__, error=TypeError)
    return WithUnlabelled(labelled, unlabelled)

"""Batches of labelled data together with batches of unlabelled data."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dissensus import calls, checks
from dissensus.arrays import Conversion
from dissensus.batch import Batch, Unpack
from dissensus.calls import NetworkInputs
from dissensus.data.batches import Augments, DataLike, LoadedBatches, TensorBatches, as_pair
from dissensus.randomness import Use, derived_seed


class WithUnlabelled:
    """Batches of labelled data, each together with the inputs of a batch of unlabelled data.

    An epoch is an epoch of the labelled data. The unlabelled data is repeated in rounds, each in a new order. A smaller
    last batch of a round of tensors is omitted. A loader starts a new round with every epoch.
    """

    def __init__(self, labelled: TensorBatches | LoadedBatches, unlabelled: TensorBatches | LoadedBatches) -> None:
        self.labelled, self.unlabelled = labelled, unlabelled
        self.resumable = labelled.resumable and unlabelled.resumable
        self._first: NetworkInputs | None = None

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
            batches.select(runs)

    @property
    def form(self) -> object:
        """The structure of the latest batch, besides the shapes of what `raw` yields."""
        return self.labelled.form, self.unlabelled.form

    def epoch(self, index: int, start: int = 0) -> Iterator[Batch]:
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

    def batch(self, *raw: Tensor) -> Batch:
        """The batches of one step."""
        labelled: Any = self.labelled
        unlabelled: Any = self.unlabelled
        batch: Batch = labelled.batch(*raw[: labelled.parts])
        return batch._replace(unlabelled=unlabelled.batch(*raw[labelled.parts :]).inputs)

    def first_unlabelled(self) -> NetworkInputs:
        """The first unlabelled batch, without augmentation, for measures that must not change between epochs."""
        unlabelled = self.unlabelled
        if isinstance(unlabelled, TensorBatches):
            return calls.rows(unlabelled.x, slice(unlabelled.batch_size))
        if self._first is None:
            generator = unlabelled.generator_of_loader()
            before = None if generator is None else generator.get_state()
            with torch.random.fork_rng(devices=[]):  # reading it must not change the draws of training
                raw = next(unlabelled.raw(0))
                self._first = unlabelled.rebuilt(raw).inputs
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
    unpack: Unpack | None = None,
    conversion: Conversion | None = None,
) -> WithUnlabelled:
    """Labelled batches together with unlabelled ones: from inputs, a pair, or a source of batches.

    Targets of the unlabelled data are ignored.
    """
    seeds = [derived_seed(seed, Use.UNLABELLED) for seed in seeds]
    inputs = unlabelled_inputs(data)
    if inputs is not None:
        length = calls.examples(inputs, "unlabelled")
        if not length:
            checks.refuse("unlabelled", "hold at least one example", "none")
        size = min(batch_size, length)
        targets = torch.zeros(length)
        unlabelled: TensorBatches | LoadedBatches = TensorBatches(
            inputs, targets, batch_size=size, seeds=seeds, device=device, drop_last=True, augment=augment
        )
    else:
        if not isinstance(data, Dataset | DataLoader):
            checks.refuse("unlabelled", "be a tensor, a Dataset or a DataLoader", type(data).__name__, error=TypeError)
        if len(seeds) > 1:
            checks.refuse("unlabelled", "be a tensor where several runs share it", type(data).__name__)
        unlabelled = LoadedBatches(
            data,
            batch_size=batch_size,
            seeds=seeds,
            device=device,
            drop_last=False,
            augment=augment,
            labels=False,
            unpack=unpack,
            conversion=conversion,
        )
    return WithUnlabelled(labelled, unlabelled)


def unlabelled_inputs(data: object) -> NetworkInputs | None:
    """Inputs in memory of data without labels: a tensor, named inputs, or those of a pair; None for a source."""
    if isinstance(data, Tensor | Mapping | calls.Call):
        return calls.network_inputs(data)
    pair = as_pair(data)
    return None if pair is None else pair[0]

"""Batches of an epoch: from tensors on the device, from a ``Dataset``, or from a foreign ``DataLoader``."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dissensus import calls, checks
from dissensus.arrays import Conversion, is_array
from dissensus.batch import Batch, Unpack, check_dtype, check_finite, check_lengths, read_batches, unpacked
from dissensus.calls import NetworkInputs, network_inputs
from dissensus.randomness import Use, derived_seed

DataLike = tuple[Any, Any] | Dataset[Any] | DataLoader[Any] | Iterable[Any]
"""Data to train or evaluate on: tensors ``(inputs, targets)``, or a ``Dataset``, a ``DataLoader`` or any iterable of
such batches. Inputs are a tensor, a tuple of inputs, or a dictionary of named inputs."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""``(x [B, ...], generator) -> x``, on the device."""
AugmentPair = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""``(x [B, ...], y [B, ...], generator) -> (x, y)``, on the device. Targets may become soft labels ``[B, C]``."""
Augments = Augment | AugmentPair | Sequence[Augment] | None
"""One augmentation for all members, or a list with one per member; then every member sees a different batch."""
TargetCheck = Callable[[Tensor], None]
"""Refuses targets ``[B, ...]`` that do not fit the loss."""


class TensorBatches:
    """Batches of tensors that are stored on the device; batches are gathered there by index, for one run or several.

    The order of an epoch is drawn on the host from (seed, epoch), so it is the same on every device. Runs with the same
    seed and the same rows share their batches, which are gathered once.

    Args:
        x: Inputs; every tensor is ``[N, ...]``.
        y: Targets ``[N, ...]``.
        weights: The weight of every example ``[N]``.
        batch_size: Examples per step.
        seeds: One seed per run.
        rows: Row numbers of each run's examples, ``[R, n]``; all examples by default.
        device: Device of the tensors.
        shuffle: Draw a new order every epoch.
        drop_last: Omit a last batch that is smaller.
        augment: Applied to every batch, seeded by (seed, epoch, step); a list contains one per member.
        bootstrap: Numbers of the members, for each of which examples are drawn with replacement, once for all epochs.
            An example counts as often as it was drawn. None: all members count all examples.
    """

    resumable = True
    """Whether an epoch can start in its middle."""
    parts = 1
    """Number of tensors that `raw` yields for a step."""
    form: object = ()
    """The structure of a batch, besides the shapes of what `raw` yields; it is always the same."""

    def __init__(
        self,
        x: NetworkInputs,
        y: Tensor,
        *,
        batch_size: int,
        seeds: Sequence[int],
        weights: Tensor | None = None,
        device: torch.device,
        rows: Int[Tensor, "R n"] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augments = None,
        bootstrap: Sequence[int] | None = None,
    ) -> None:
        length = check_lengths(x, y, weights)
        self.examples = length if rows is None else rows.shape[1]
        if drop_last and self.examples < batch_size:
            fix = "No batch would remain."
            checks.refuse("batch_size", f"be at most {self.examples} with drop_last=True", batch_size, fix)
        for tensor in calls.tensors(x):
            check_finite("x", tensor)
        check_finite("y", y)
        self.x, self.y = calls.mapped(lambda tensor: tensor.to(device), x), y.to(device)
        self.weights = None if weights is None else weights.to(device)
        self.device = self.y.device
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.seeds, self.rows, self.augment = list(seeds), rows, augment
        self.changes_targets, self.bootstrap = changes_targets(augment), bootstrap
        self._group()

    def _group(self) -> None:
        """Group the runs that see the same batches: those with the same seed and the same rows."""
        draws = self.shuffle or self.augment is not None or self.bootstrap is not None
        keys = [
            (seed if draws else 0, None if self.rows is None else self.rows[r].numpy().tobytes())
            for r, seed in enumerate(self.seeds)
        ]
        distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        self._leaders = [keys.index(key) for key in distinct]
        self._group_of = torch.tensor([distinct[key] for key in keys], device=self.device)
        count = len(self._leaders) if self.augment is not None else 0
        self.generators = [torch.Generator(self.device) for _ in range(count)]
        self._counts = None if self.bootstrap is None else self._drawn_counts(self.bootstrap).to(self.device)

    def _drawn_counts(self, members: Sequence[int]) -> Float[Tensor, "U M N"]:
        """How often each example was drawn for each member; 0 for examples of other runs."""
        counts = torch.stack([bootstrap_counts(self.examples, self.seeds[run], members) for run in self._leaders])
        if self.rows is None:
            return counts
        rows = self.rows[self._leaders].unsqueeze(1).expand_as(counts)
        return counts.new_zeros(*counts.shape[:2], len(self.y)).scatter(2, rows, counts)

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

    def epoch(self, index: int, start: int = 0) -> Iterator[Batch]:
        """Batches of an epoch, starting at a step; the last may be smaller.

        One run gives inputs and targets ``[B, ...]``. Several runs give targets ``[R, B, ...]`` and inputs
        ``[R, B, ...]``, or ``[B, ...]`` if all runs see the same batches. Where members see different batches, inputs
        have an axis M before B.
        """
        for step, raw in enumerate(self.raw(index, start), start):
            self.seed_step(index, step)
            yield self.batch(*raw)

    def raw(self, index: int, start: int = 0) -> Iterator[tuple[Int[Tensor, "U B"]]]:
        """Row numbers of every step of an epoch, on the device, for each of the U distinct orders."""
        orders = torch.stack([self.order(index, run) for run in self._leaders]).to(self.device)
        for rows in list(orders.split(self.batch_size, 1))[start : len(self)]:
            yield (rows,)

    def size(self, rows: Int[Tensor, "U B"]) -> int:
        """Number of examples of a step."""
        return rows.shape[1]

    def seed_step(self, index: int, step: int) -> None:
        """Seed the generators for a step: their draws depend on (seed, epoch, step) alone."""
        for generator, run in zip(self.generators, self._leaders, strict=False):
            generator.manual_seed(derived_seed(self.seeds[run], Use.AUGMENT, index, step))

    def batch(self, rows: Int[Tensor, "U B"]) -> Batch:
        """The batch of one step, gathered and augmented on the device."""
        x, y = calls.rows(self.x, rows), self.y[rows]
        weights = None if self.weights is None else self.weights[rows]
        if self._counts is not None:
            counts = self._counts.gather(2, rows.unsqueeze(1).expand(-1, self._counts.shape[1], -1))
            weights = per_member_weights(counts, weights)
        if self.augment is not None:
            distinct = [calls.rows(x, place) for place in range(len(rows))]
            if self.changes_targets:
                pairs = [augmented_pair(self.augment, *pair) for pair in zip(distinct, y, self.generators, strict=True)]
                x, y = calls.stacked([inputs for inputs, _ in pairs]), torch.stack([targets for _, targets in pairs])
            else:
                x = calls.stacked(
                    [augmented(self.augment, batch, g) for batch, g in zip(distinct, self.generators, strict=True)]
                )
        return self._expand(x, y, weights)

    def _expand(self, x: NetworkInputs, y: Tensor, weights: Tensor | None) -> Batch:
        """Distinct batches ``[U, B, ...]`` expanded to the runs."""
        beside = [y] if weights is None else [y, weights]
        if len(self.seeds) == 1:
            return Batch(calls.rows(x, 0), *(part[0] for part in beside))
        if len(self._leaders) == 1:
            return Batch(calls.rows(x, 0), *(part.expand(len(self.seeds), *part.shape[1:]) for part in beside))
        return Batch(calls.rows(x, self._group_of), *(part[self._group_of] for part in beside))


def bootstrap_counts(examples: int, seed: int, members: Sequence[int]) -> Float[Tensor, "M n"]:
    """How often each example is drawn for each member by bagging: n draws with replacement (Breiman, 1996).

    A member's draws depend on the seed and on its number, and on nothing else. `dissensus.fit` with ``bootstrap=True``
    trains member i with these counts as weights of examples. Examples that were never drawn (a share of 1/e) are "out
    of bag": the member has not seen them.

    Args:
        examples: n.
        seed: The seed of the run.
        members: Numbers of members, counted from 0.

    >>> counts = bootstrap_counts(1000, 0, range(3))
    >>> counts.sum(1), round(float((counts == 0).float().mean()), 2)
    (tensor([1000., 1000., 1000.]), 0.37)
    """
    drawn = []
    for member in members:
        generator = torch.Generator().manual_seed(derived_seed(seed, Use.BOOTSTRAP, member))
        drawn.append(torch.randint(examples, (examples,), generator=generator).bincount(minlength=examples))
    return torch.stack(drawn).float()


def per_member_weights(counts: Float[Tensor, "U M B"], weights: Tensor | None) -> Tensor:
    """Weights ``[U, M, B, ...]``: how often a member counts an example, times the example's weight ``[U, B, ...]``."""
    if weights is None:
        return counts
    return counts.view(*counts.shape, *[1] * (weights.ndim - 2)) * weights.unsqueeze(1)


def changes_targets(augment: object) -> bool:
    """Whether an augmentation is a function ``(x, y, generator) -> (x, y)``: one of three positional parameters.

    Parameters with a default do not count.

    >>> changes_targets(lambda x, y, generator: (x, y)), changes_targets(lambda x, generator, strength=1: x)
    (True, False)
    """
    if not callable(augment):
        return False
    try:
        parameters = inspect.signature(augment).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is inspect.Parameter.empty for p in positional) == 3


def augmented_pair(
    augment: Any, x: NetworkInputs, y: Tensor, generator: torch.Generator
) -> tuple[NetworkInputs, Tensor]:
    """An augmented batch and its targets, both of B examples."""
    result = augment(calls.as_given(x), y, generator)
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[1], Tensor):
        got = f"{len(result)} parts" if isinstance(result, tuple | list) else type(result).__name__
        fix = "A function of three positional parameters takes (x, y, generator)."
        checks.refuse("augment", "return (x, y)", got, fix, TypeError)
    inputs, targets = network_inputs(result[0]), result[1]
    if not targets.ndim or len(targets) != len(y):
        checks.refuse("augment", f"return targets of all {len(y)} examples", checks.shape_text(targets.shape))
    return inputs, targets


def augmented(augment: Any, x: NetworkInputs, generator: torch.Generator) -> NetworkInputs:
    """An augmented batch ``[B, ...]``, or one per member, ``[M, B, ...]``; augmentations may write into the batch."""
    if isinstance(augment, Sequence):
        copies = [calls.mapped(Tensor.clone, x) for _ in augment]
        return calls.stacked(
            [augmented(member_augment, own, generator) for member_augment, own in zip(augment, copies, strict=True)]
        )
    if isinstance(x, Tensor):
        return augment(x, generator)
    return network_inputs(augment(calls.as_given(x), generator))


class PlaceInSource(NamedTuple):
    """How far a source has been read that counts epochs by ``steps_per_epoch``."""

    passes: int
    """Whole passes over the source before this one."""
    read: int
    """Batches of this pass that have been read."""
    noted: Any
    """What `LoadedBatches.at_pass` returned at the beginning of this pass."""


class LoadedBatches:
    """Batches of a ``Dataset``, a ``DataLoader`` or any iterable, moved to the device one by one, for all runs.

    A ``Dataset`` is shuffled by (seed, epoch), and collated by its method ``collate`` if it has one. Everything else
    keeps its order and randomness. All runs see the same batches, and each batch is read once.

    Args:
        source: A ``Dataset``, a ``DataLoader``, or an iterable of batches.
        batch_size: Examples per step of a ``Dataset``; everything else has its own.
        seeds: One seed per run.
        device: Where batches are moved.
        shuffle: Draw a new order of a ``Dataset`` every epoch.
        drop_last: Omit a last batch of a ``Dataset`` that is smaller.
        augment: Applied to every batch, seeded by (seed, epoch, step); a list contains one per member.
        labels: Whether batches have targets; without, a batch may consist of inputs alone.
        check: Called with the targets of every batch before they are moved to the device.
        unpack: Inputs, targets and weights of a batch of any form.
        steps_per_epoch: Steps of an epoch. The source is then read on where the last epoch has ended, and from its
            beginning when it is exhausted. None: an epoch is one pass over the source, which needs a length.
        conversion: How arrays become tensors. Inputs of real numbers must have its dtype; None: any.
        bootstrap: As for `TensorBatches`; only a ``Dataset`` with a length says which examples a batch holds.
    """

    resumable = False
    parts = 2
    """Number of tensors that `raw` has yielded for the latest step."""

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any] | Iterable[Any],
        *,
        batch_size: int,
        seeds: Sequence[int],
        device: torch.device,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augments = None,
        labels: bool = True,
        check: TargetCheck | None = None,
        unpack: Unpack | None = None,
        steps_per_epoch: int | None = None,
        conversion: Conversion | None = None,
        bootstrap: Sequence[int] | None = None,
    ) -> None:
        self.device, self.seeds, self.augment, self.labels, self.check = device, list(seeds), augment, labels, check
        self.changes_targets, self.bootstrap = changes_targets(augment), bootstrap
        self.unpack, self.steps_per_epoch, self.conversion = unpack, steps_per_epoch, conversion
        self.generator: torch.Generator | None = None
        self.form: object = ()
        """The structure of the latest batch."""
        self._rebuilt: Callable[[Sequence[Tensor]], Batch] | None = None
        self._weighted: bool | None = None
        """Whether batches have weights; None before the first one."""
        self._reading: Iterator[Any] | None = None
        """With ``steps_per_epoch``: the source as far as it has been read."""
        self.at_pass: Callable[[], Any] | None = None
        """With ``steps_per_epoch``: called at the beginning of every pass; checkpoints note generators there."""
        self.seen: Callable[[int, Sequence[Tensor] | None], None] | None = None
        """Called with the number of an epoch and the tensors of every batch, on the host, and with None at its end."""
        self.place: PlaceInSource | None = None
        """With ``steps_per_epoch``: how far the source has been read; None before its first batch."""
        streams = isinstance(source, IterableDataset)
        if isinstance(source, Dataset) and not isinstance(source, DataLoader):
            if shuffle and not streams and len(set(self.seeds)) > 1:
                fix = "Use a DataLoader, whose order is the same for all runs, or tensors."
                checks.refuse("data", "have one order for runs of several seeds", "a Dataset", fix)
            self.generator = torch.Generator()
            collate = getattr(source, "collate", None)
            if bootstrap is not None and not streams:
                source = _Numbered(source)
                collate = functools.partial(_collated_with_rows, collate or default_collate)
            self.loader: Iterable[Any] = DataLoader(
                source,
                batch_size,
                shuffle and not streams,
                drop_last=drop_last,
                generator=self.generator,
                collate_fn=collate,
            )
        else:
            self.loader = source
        self.examples = len(source) if isinstance(source, _Numbered) else None
        """Number of examples, where batches say which examples they hold."""
        if bootstrap is not None and self.examples is None:
            fix = "Pass tensors or a Dataset, whose examples have numbers."
            checks.refuse("bootstrap", "come with examples that are drawn by number", "a source of batches", fix)
        self._group()
        if steps_per_epoch is not None:
            self.steps = checks.count("steps_per_epoch", steps_per_epoch)
            return
        length = _length(self.loader)
        if length is None:
            fix = "Pass steps_per_epoch=..., the number of batches that count as an epoch."
            got = "a stream (IterableDataset)" if streams or _is_stream(source) else type(source).__name__
            checks.refuse("data", "have a length", got, fix, TypeError)
        if length == 0:
            checks.refuse("data", "give at least one batch", "an empty loader")
        if isinstance(self.loader, Iterator):
            fix = "Pass a list or a DataLoader, or steps_per_epoch=... to read on where an epoch ended."
            checks.refuse("data", "be readable once per epoch", "an iterator, which can be read once", fix, TypeError)
        self.steps = length

    def _group(self) -> None:
        """Group the runs that see the same augmented batches: those with the same seed."""
        distinct = {seed: place for place, seed in enumerate(dict.fromkeys(self.seeds))}
        self._group_of = torch.tensor([distinct[seed] for seed in self.seeds], device=self.device)
        self._leaders = list(distinct) if self.augment is not None else []
        self.generators = [torch.Generator(self.device) for _ in self._leaders]
        self._counts: Tensor | None = None
        if self.bootstrap is not None and self.examples is not None:
            drawn = [bootstrap_counts(self.examples, seed, self.bootstrap) for seed in distinct]
            self._counts = torch.stack(drawn).to(self.device)

    def __len__(self) -> int:
        return self.steps

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
        self.seeds = [self.seeds[run] for run in runs]
        self._group()

    def generator_of_loader(self) -> torch.Generator | None:
        """The generator that a user's ``DataLoader`` shuffles by, if it has one."""
        if not isinstance(self.loader, DataLoader):
            return None
        return self.loader.generator or getattr(self.loader.sampler, "generator", None)

    def epoch(self, index: int, start: int = 0) -> Iterator[Batch]:
        """Batches of an epoch, from its beginning."""
        for step, raw in enumerate(self.raw(index, start)):
            self.seed_step(index, step)
            yield self.batch(*raw)

    def raw(self, index: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of every batch, moved to the device."""
        assert start == 0, "a DataLoader cannot start in the middle of an epoch"
        for batch in self._batches(index):
            rows: list[Tensor] = []
            if self._counts is not None:
                batch, *rows = batch
            read = unpacked(batch, self.unpack, labels=self.labels, conversion=self.conversion)
            if self.conversion is not None and self.conversion.exact:
                check_dtype(read.inputs, self.conversion.dtype)
            if self.check is not None:
                self.check(read.targets)
            self._check_weighted(read.weights is not None)
            inputs, rebuilt = calls.split_tensors(read.inputs)
            weights = [] if read.weights is None else [read.weights]
            self._rebuilt = functools.partial(_rebuilt_batch, rebuilt, len(inputs))
            raw = (*inputs, read.targets, *weights, *rows)
            self.parts, self.form = len(raw), (calls.form(read.inputs), len(inputs))
            if self.seen is not None:
                self.seen(index, raw)
            yield tuple(part.to(self.device, non_blocking=True) for part in raw)
        if self.seen is not None:
            self.seen(index, None)

    def _check_weighted(self, weighted: bool) -> None:
        """Refuse weights in some batches only: those of the other batches would count for less, or for more."""
        if self._weighted not in (None, weighted):
            got = "a batch with weights after one without" if weighted else "a batch without weights after one with"
            fix = "Examples that count the same? Give weights of 1."
            checks.refuse("unpack", "give weights for all batches, or for none", got, fix)
        self._weighted = weighted

    def _batches(self, index: int) -> Iterator[Any]:
        """The batches of an epoch as the source gives them."""
        if self.steps_per_epoch is None:
            yield from self._pass(index)
            return
        self._reading = self._reading or self._endless(0)
        for _ in range(self.steps_per_epoch):
            yield next(self._reading)

    def begin_pass(self, passes: int) -> None:
        """Read from the beginning of a pass over the source, as a resumed training does with ``steps_per_epoch``."""
        self._reading = self._endless(passes)

    def skip(self, count: int) -> None:
        """Read batches that were trained on before an interruption."""
        assert self._reading is not None
        for _ in range(count):
            next(self._reading)

    def _endless(self, passes: int) -> Iterator[Any]:
        """The source, again and again, from the beginning of a pass."""
        while True:
            begun = PlaceInSource(passes, 0, None if self.at_pass is None else self.at_pass())
            for count, batch in enumerate(self._pass(passes), 1):
                self.place = begun._replace(read=count)
                yield batch
            passes += 1
            if self.place is None or self.place.passes < passes - 1:
                got = "no batch" if self.place is None else "an iterator that has ended"
                fix = "Pass a list, a DataLoader, or an object whose __iter__ starts again; or fewer steps."
                checks.refuse("data", "give batches for every step", got, fix)

    def _pass(self, index: int) -> Iterator[Any]:
        if self.generator is not None:
            self.generator.manual_seed(derived_seed(self.seeds[0], Use.SHUFFLE, index))
        yield from read_batches(self.loader)

    def size(self, *raw: Tensor) -> int:
        """Number of examples of a step."""
        return len(raw[0])

    def seed_step(self, index: int, step: int) -> None:
        """Seed the generators for a step: their draws depend on (seed, epoch, step) alone."""
        for generator, seed in zip(self.generators, self._leaders, strict=True):
            generator.manual_seed(derived_seed(seed, Use.AUGMENT, index, step))

    def rebuilt(self, raw: Sequence[Tensor]) -> Batch:
        """A batch of the tensors that `raw` has yielded, as the source gave it."""
        assert self._rebuilt is not None
        return self._rebuilt(raw)

    def batch(self, *raw: Tensor) -> Batch:
        """The batch of one step, augmented."""
        raw, rows = (raw, None) if self._counts is None else (raw[:-1], raw[-1])
        inputs, targets, weights = self.rebuilt(raw)[:3]
        distinct_targets: list[Tensor] = []
        if self.augment is not None:
            own = [calls.mapped(Tensor.clone, inputs) for _ in self.generators]  # it may share memory with the data set
            if self.changes_targets:
                copies = [targets.clone() for _ in own]
                pairs = [augmented_pair(self.augment, *pair) for pair in zip(own, copies, self.generators, strict=True)]
                own, distinct_targets = [x for x, _ in pairs], [y for _, y in pairs]
            else:
                own = [augmented(self.augment, x, g) for x, g in zip(own, self.generators, strict=True)]
            inputs = calls.rows(calls.stacked(own), self._group_of) if self.per_run else own[0]
        if self._counts is not None:
            per_member = per_member_weights(self._counts[:, :, rows], None if weights is None else weights.unsqueeze(0))
            weights = per_member[self._group_of] if len(self.seeds) > 1 else per_member[0]
        elif weights is not None and len(self.seeds) > 1:
            weights = weights.expand(len(self.seeds), *weights.shape)
        if len(distinct_targets) > 1:
            targets = torch.stack(distinct_targets)[self._group_of]
        else:
            targets = distinct_targets[0] if distinct_targets else targets
            targets = targets.expand(len(self.seeds), *targets.shape) if len(self.seeds) > 1 else targets
        return Batch(inputs, targets, weights)


class _Numbered(Dataset[Any]):
    """A ``Dataset`` whose examples come with their numbers."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.source[index], index


def _collated_with_rows(collate: Callable[[list[Any]], Any], examples: list[tuple[Any, int]]) -> tuple[Any, Tensor]:
    """A batch as the data set collates it, and the numbers of its examples."""
    return collate([example for example, _ in examples]), torch.tensor([number for _, number in examples])


def _rebuilt_batch(rebuilt: Callable[[Sequence[Tensor]], NetworkInputs], inputs: int, parts: Sequence[Tensor]) -> Batch:
    """A batch of its tensors: those of the inputs, the targets, and the weights if there are any."""
    return Batch(rebuilt(parts[:inputs]), *parts[inputs:])


def _length(source: Iterable[Any]) -> int | None:
    try:
        return len(source)  # pyright: ignore[reportArgumentType]  # an iterable may have a length
    except TypeError:
        return None


def _is_stream(source: object) -> bool:
    return isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset)


def as_pair(data: object, name: str = "data") -> tuple[NetworkInputs, Tensor] | None:
    """``(inputs, targets)`` if the data is a pair of tensors or a ``TensorDataset`` of two tensors; None otherwise.

    Inputs may be a tuple or a dictionary of tensors as well.

    A class derived from ``TensorDataset``, or a data set that is a list as well, may change what an example is, so it
    is read example by example.
    """
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if isinstance(data, tuple | list) and not isinstance(data, Dataset | DataLoader):
        if isinstance(data, list) and data and all(isinstance(part, tuple | list | Mapping) for part in data):
            return None  # a list of batches
        if (
            len(data) != 2
            or not isinstance(data[1], Tensor)
            or not isinstance(data[0], Tensor | tuple | list | Mapping | calls.Call)
        ):
            fix = "Weights of examples? Pass weights=..." if len(data) == 3 else "Arrays? Use torch.from_numpy(...)."
            checks.refuse(name, "be a pair (inputs, targets)", [type(part).__name__ for part in data], fix, TypeError)
        return network_inputs(data[0]), data[1]
    return None


def folds_of(data: Any) -> list[Any]:
    """The pairs of a list of pairs, such as the folds of a cross-validation; otherwise the data alone."""
    several = isinstance(data, list) and any(isinstance(part, tuple | list | TensorDataset) for part in data)
    return data if several else [data]


def end_to_end(name: str, data: object) -> tuple[NetworkInputs, Tensor, int]:
    """The concatenation of one pair ``(x, y)`` or of a list of pairs of one shape, and the number of pairs.

    >>> x, y, folds = end_to_end("data", [(torch.zeros(4, 2), torch.zeros(4)), (torch.ones(4, 2), torch.ones(4))])
    >>> x.shape, y.shape, folds
    (torch.Size([8, 2]), torch.Size([8]), 2)
    """
    pairs = folds_of(data)
    tensors = [pair for pair in (as_pair(part, name) for part in pairs) if pair is not None]
    if not tensors or len(tensors) < len(pairs):
        got = type(data).__name__
        checks.refuse(name, "be a pair of tensors (x, y), or a list of such pairs", got, "Runs share the device.")
    shapes = {str([(part.shape, part.dtype) for part in (*calls.tensors(x), y)]) for x, y in tensors}
    if len(shapes) > 1:
        got = f"{len(shapes)} shapes"
        checks.refuse(name, "hold pairs of one shape and dtype", got, "Sweep over each shape separately.")
    if len(tensors) == 1:
        return *tensors[0], 1
    return calls.concatenated([x for x, _ in tensors]), torch.cat([y for _, y in tensors]), len(tensors)


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
    return LoadedBatches(check_source(data), seeds=[seed], check=check, **settings)


def refuse_iterator(data: object, reader: str) -> None:
    """Refuse data that can be read once, where it is read several times; ``reader`` says what for."""
    if isinstance(data, Iterator) and not isinstance(data, Dataset | DataLoader):
        fix = "Pass a list, a DataLoader, or an object whose __iter__ starts again."
        got = "an iterator, which can be read once"
        checks.refuse("data", f"be readable from its beginning for {reader}", got, fix, TypeError)


def is_source(data: Any) -> bool:
    """Whether data is a source of batches: a ``Dataset`` of more than two tensors, a ``DataLoader``, or an iterable.

    A list of pairs of tensors is none: those are the folds of a sweep.
    """
    if isinstance(data, Dataset | DataLoader):
        return as_pair(data) is None
    return isinstance(data, Iterable) and not isinstance(
        data, tuple | list | str | bytes | Tensor | Mapping | nn.Module
    )


def check_source(data: Any, name: str = "data") -> Dataset[Any] | DataLoader[Any] | Iterable[Any]:
    """A source of batches; anything else is refused."""
    if is_array(data):
        got, fix = type(data).__name__, 'As in (frame[["age", "height"]], frame["label"]).'
        checks.refuse(name, "be (inputs, targets)", f"one {got}", fix, TypeError)
    if isinstance(data, Dataset | DataLoader) or (
        isinstance(data, Iterable) and not isinstance(data, str | bytes | Tensor | Mapping | nn.Module)
    ):
        return data
    requirement = "be (inputs, targets), a Dataset, a DataLoader or an iterable of batches"
    checks.refuse(name, requirement, type(data).__name__, error=TypeError)

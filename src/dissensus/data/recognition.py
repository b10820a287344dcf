"""How data and functions are recognised, in any process."""

import copy
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dissensus import checks
from dissensus.data.batches import DataLike, as_pair
from dissensus.execution.skeleton import first_line
from dissensus.fingerprint import Replace, digest, fingerprint
from dissensus.randomness import GlobalGenerators, seeded
from dissensus.trunk import SharedTrunk

PROBES = 16
"""Examples by which a data set is recognised, so that it need not be read as a whole."""
_TRAINING_PROBES = 8
"""Examples by which the data of a training is recognised, besides the attributes of the data set."""
_LARGE_BYTES = 2**23
"""Arrays above this size count by a sample of their rows; smaller ones too, once there are several times as many."""
_LONG = 2**8
"""Lists and the like above this length count by a sample of their entries."""
_MANY_VALUES = 5000
"""Values after which shorter lists count by a sample, too."""
_SAMPLE = 64
_WITHOUT_EFFECT = {
    *("num_workers", "prefetch_factor", "pin_memory", "pin_memory_device", "timeout", "persistent_workers", "in_order"),
    *("_DataLoader__multiprocessing_context", "_DataLoader__initialized", "_IterableDataset_len_called", "_iterator"),
}
"""Attributes of a ``DataLoader`` that decide no batch."""


class Pairs(NamedTuple):
    """Batches of pairs ``(x, y)`` in a fixed order, which can be read several times."""

    examples: int
    batches: Callable[[], Iterable[Any]]
    identity: str
    sizes: str
    """What identifies the sizes of the batches."""


def pairs_of(data: DataLike, batch_size: int) -> Pairs:
    """The pairs of a source, identified by their numbers; of a ``Dataset`` or ``DataLoader``, by order and examples."""
    checks.count("batch_size", batch_size)
    pair = as_pair(data)
    if pair is not None:
        x, y = pair
        if len(x) != len(y):
            checks.refuse("data", "hold as many targets as inputs", f"{len(x)} inputs and {len(y)} targets")
        if len(x) == 0:
            checks.refuse("data", "hold at least one example", "none")
        halves = functools.partial(zip, x.split(batch_size), y.split(batch_size), strict=True)
        return Pairs(len(x), halves, digest(x, y), str(batch_size))
    stream = isinstance(data.dataset if isinstance(data, DataLoader) else data, IterableDataset)
    if stream or (isinstance(data, DataLoader) and data.batch_sampler is None):
        got = "a stream" if stream else "a loader without batches"
        checks.refuse("data", "have batches in an order", got, "Read it into a map-style Dataset.", TypeError)
    if isinstance(data, Dataset):
        data = _loader(data, batch_size)
    if not isinstance(data, DataLoader):
        checks.refuse("data", "be (x, y), a Dataset or a DataLoader", type(data).__name__, error=TypeError)
    return _pairs_of_loader(data)


def _loader(data: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    if not hasattr(data, "__len__"):
        checks.refuse("data", "have a length", type(data).__name__, error=TypeError)
    return DataLoader(data, batch_size, collate_fn=getattr(data, "collate", None))


def _pairs_of_loader(loader: DataLoader[Any]) -> Pairs:
    """The pairs of a loader, whose order and examples must be the same at every pass."""
    with seeded(0):
        orders = [[list(batch) for batch in loader.batch_sampler or ()] for _ in range(2)]
        if orders[0] != orders[1]:
            checks.refuse("data", "keep its order", "a loader that shuffles", "Use shuffle=False: training shuffles.")
        order = [index for batch in orders[0] for index in batch]
        if not order:
            checks.refuse("data", "hold at least one example", "none")
        probes = [order[int(place)] for place in np.linspace(0, len(order) - 1, min(PROBES, len(order)))]
        digests = [digest(*pair_of(_collated(loader, probes))) for _ in range(2)]
    if digests[0] != digests[1]:
        fix = "Random transforms go into `augmentations`."
        checks.refuse("data", "give the same example every time", "another at the second look", fix)
    sizes = [len(batch) for batch in orders[0]]
    own_class = () if type(loader) is DataLoader else (fingerprint(type(loader), opaque=[]),)  # it may change batches
    return Pairs(len(order), lambda: loader, fingerprint((order, digests[0], *own_class)), fingerprint(sizes))


def _collated(loader: DataLoader[Any], indices: Sequence[Any]) -> Any:
    examples = [loader.dataset[index] for index in indices]
    try:
        return loader.collate_fn(examples)
    except (TypeError, RuntimeError) as error:
        fix = "Bring them to tensors of one size."
        checks.refuse("data", "give examples that make a batch", f"an error ({first_line(error)})", fix, TypeError)


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch."""
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        got = [type(part).__name__ for part in batch] if isinstance(batch, list | tuple) else type(batch).__name__
        checks.refuse("data", "give pairs (x, y) of tensors", got, error=TypeError)
    x, y = batch
    if len(x) != len(y) or not y.numel():
        got = f"{checks.shape_text(x.shape)} inputs and {checks.shape_text(y.shape)} targets"
        checks.refuse("data", "hold a target for every input", got)
    return x, y


def networks_in(function: object) -> list[nn.Module]:
    """Networks that a function computes with, wherever `fingerprint` meets them; of a shared trunk, the backbone.

    >>> network = nn.Linear(2, 2)
    >>> networks_in(network.forward) == networks_in(functools.partial(map, network)) == [network]
    True
    """
    networks: dict[int, nn.Module] = {}

    def note(value: object) -> object:
        if not isinstance(value, nn.Module) or isinstance(value, SharedTrunk):
            return _without_heads(value)
        networks[id(value)] = value
        return "a network"

    fingerprint(function, replace=note)
    return list(networks.values())


def features_fingerprint(function: object) -> str:
    """The fingerprint of a function of inputs; of a shared trunk without its heads, which features do not depend on."""
    return fingerprint(function, replace=_without_heads)


def _without_heads(value: object) -> object:
    return ("trunk", value.cut, value.backbone) if isinstance(value, SharedTrunk) else value


def data_fingerprint(data: Tensor | DataLike | None, opaque: list[str], replace: Replace | None = None) -> str | None:
    """The fingerprint of the data of a training, by which a checkpoint recognises it.

    Tensors count by all of their numbers. A ``Dataset`` or ``DataLoader`` counts by its class, attributes (batch size,
    sampler, transforms and so on) and length, by a sample of what is large, and by a few examples. Random transforms
    draw the same numbers for these at every call. No iterator is started, and generators are left as they were; their
    states do not count. Absolute paths count by their last part, so that data may lie elsewhere.

    Args:
        data: Training, validation or unlabelled data.
        opaque: Gets what cannot be inspected, such as the examples of a stream.
        replace: As for `dissensus.fingerprint.fingerprint`.
    """
    if data is None or isinstance(data, Tensor):
        return None if data is None else digest(data)
    pair = as_pair(data)
    if pair is not None:
        return digest(*pair)
    dataset = data.dataset if isinstance(data, DataLoader) else data
    contents = _Contents(replace or (lambda value: value))
    structure = fingerprint(_attributes(data), replace=contents.stand_in, skip_progress=True, opaque=opaque)
    examples = contents.examples(dataset)
    if examples is None:
        opaque.append(f"examples of {type(dataset).__name__}")
    return fingerprint((structure, examples))


def _attributes(data: DataLike) -> object:
    """Everything about a source that decides its batches."""
    if not isinstance(data, DataLoader):
        return data
    attributes = {name: value for name, value in vars(data).items() if name not in _WITHOUT_EFFECT}
    return type(data), attributes


class _Sample(NamedTuple):
    """What stands for a large value."""

    kind: str
    shape: tuple[int, ...]
    part: object


class _Contents:
    """What a walk through a data set meets: generators, and values that are too large to be read as a whole."""

    def __init__(self, replace: Replace) -> None:
        self.replace = replace
        self.generators: list[Any] = []
        self.values = self.bytes = 0

    def stand_in(self, value: object) -> object:
        """The value that is fingerprinted in place of another one."""
        value = self.replace(value)
        self.values += 1
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            self.generators.append(value)
            return f"generator {type(value).__name__}"  # a checkpoint holds the states of those that it restores
        if isinstance(value, Tensor | np.ndarray):
            self.bytes += value.nbytes
            return _array(value, _LARGE_BYTES if self.bytes < 4 * _LARGE_BYTES else 2**16)
        if isinstance(value, str | bytes | bytearray):
            return _text(value)
        if isinstance(value, PurePath):
            return value.name if value.is_absolute() else value
        if isinstance(value, list | tuple | set | frozenset | Mapping):
            return _container(value, _LONG if self.values < _MANY_VALUES else 16)
        return value

    def examples(self, dataset: Any) -> str | None:
        """The fingerprint of a few examples; None where they cannot be read, or are others at every look."""
        if isinstance(dataset, IterableDataset):
            return None
        try:
            places = [int(place) for place in np.linspace(0, len(dataset) - 1, min(_TRAINING_PROBES, len(dataset)))]
            source = _copied(dataset)  # a file that reading opens is not passed on to workers
            with self._seeded():
                first = [fingerprint(source[place], replace=self.replace) for place in places]
            with self._seeded():
                again = [fingerprint(source[place], replace=self.replace) for place in places[:1]]
        except Exception:
            return None
        return fingerprint((places, first)) if first[:1] == again else None

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Run a block with seeded generators, those of the data set included, and restore all of them afterwards."""
        host, states = GlobalGenerators.now(), [_state(generator) for generator in self.generators]
        try:
            with seeded(0):
                random.seed(0)
                np.random.seed(0)  # noqa: NPY002
                for generator in self.generators:
                    _seed(generator)
                yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                _set_state(generator, state)
            host.restore()


def _copied(dataset: Any) -> Any:
    """A copy of a data set and of the data sets in it, which share all other attributes."""
    try:
        duplicate = copy.copy(dataset)
        for name, value in vars(duplicate).items():
            if isinstance(value, Dataset):
                vars(duplicate)[name] = _copied(value)
            elif isinstance(value, list) and value and len(value) <= _LONG and isinstance(value[0], Dataset):
                vars(duplicate)[name] = [_copied(part) for part in value]
    except Exception:
        return dataset
    return duplicate


def _array(array: Any, most: int) -> object:
    """An array, or a sample of the rows of a large one."""
    if array.nbytes <= most or array.ndim == 0 or (isinstance(array, Tensor) and array.layout != torch.strided):
        return array
    rows = np.linspace(0, len(array) - 1, min(_SAMPLE, len(array)), dtype=np.int64).tolist()
    return _Sample(str(array.dtype), tuple(array.shape), [array[row].reshape(-1)[:1024] for row in rows])


def _text(text: Any) -> object:
    """A text, pieces of a long one, or the last part of an absolute path."""
    if len(text) > _LARGE_BYTES:
        pieces = [text[len(text) * k // _SAMPLE :][:1024] for k in range(_SAMPLE)]
        return _Sample(type(text).__name__, (len(text),), pieces)
    return os.path.basename(text) if isinstance(text, str) and os.path.isabs(text) else text


def _container(values: Any, most: int) -> object:
    """A container, or a sample of a long one; a list of numbers counts as a whole."""
    if len(values) <= most:
        return values
    name, size = type(values).__name__, (len(values),)
    if isinstance(values, Mapping):
        return _Sample(name, size, list(itertools.islice(values.items(), _SAMPLE)))
    if not isinstance(values, Sequence):
        return _Sample(name, size, None)  # the order of a set differs between processes
    if len(values) < 2**18 and set(map(type, values)) <= {int, float, bool}:
        return _Sample(name, size, np.array(values))
    return _Sample(name, size, [values[len(values) * k // _SAMPLE] for k in range(_SAMPLE)])


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _seed(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(0)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(0).state
    else:
        generator.seed(0)

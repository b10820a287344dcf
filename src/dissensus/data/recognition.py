"""How data and functions are recognised, in any process."""

import copy
import functools
import hashlib
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
from dissensus.calls import Call, network_inputs
from dissensus.data.batches import DataLike, as_pair
from dissensus.execution.skeleton import first_line
from dissensus.fingerprint import Namespace, Replace, digest, fingerprint
from dissensus.randomness import GlobalGenerators, generator_state, is_generator, seeded, set_generator_state
from dissensus.trunk import SharedTrunk

PROBES = 16
"""Examples by which a data set is recognised, so that it need not be read as a whole."""
_TRAINING_PROBES = 8
"""Examples by which the data of a training is recognised, besides the attributes of the data set."""
_LONG = 2**8
"""Containers above this length are read as one text, which is fast, if all in them is plain."""
_MOST_PLAIN = 4 * 10**6
"""Entries of a container of plain values above which it counts by a sample."""
_MOST_OBJECTS = 3 * 10**5
"""Entries of containers of objects that are read; those of long containers met afterwards count by a sample."""
_SAMPLE = 64
_SCALARS = {bool, int, float, complex, str, bytes, type(None)}
DECIDES_NO_BATCH = {
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
        if not isinstance(x, Tensor):
            checks.refuse("data", "be pairs of tensors (x, y)", "several inputs", error=TypeError)
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
        checks.refuse("data", "give the same example every time", "another one the second time", fix)
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


def data_fingerprint(
    data: Tensor | DataLike | None,
    opaque: list[str],
    replace: Replace | None = None,
    visit: Callable[[object], None] | None = None,
) -> str | None:
    """The fingerprint of the data of a training, by which a checkpoint recognises it.

    Tensors count by all of their numbers. A ``Dataset`` or ``DataLoader`` counts by its class, attributes (batch size,
    sampler, transforms and so on) and length, with the numbers of all tensors and arrays in memory and the entries of
    its containers, and by a few examples. Random transforms draw the same numbers for these at every call. No iterator
    is started, and generators are left as they were. Generators count by their seeds where those are known; their
    states do not count, because a checkpoint restores them. Absolute paths count without their folder, so that data may
    lie elsewhere.

    Args:
        data: Training, validation or unlabelled data.
        opaque: Gets what is not compared, such as the examples of a stream, most entries of a container of millions,
            the content of a memory-mapped file, and the folders of absolute paths.
        replace: As for `dissensus.fingerprint.fingerprint`.
        visit: Called with everything that the data consists of, such as its generators and samplers.
    """
    if data is None or isinstance(data, Tensor):
        return None if data is None else digest(data)
    if isinstance(data, Mapping | Call):
        return fingerprint(network_inputs(data))
    pair = as_pair(data)
    if pair is not None:
        inputs, targets = pair
        return digest(inputs, targets) if isinstance(inputs, Tensor) else fingerprint((inputs, targets))
    dataset = data.dataset if isinstance(data, DataLoader) else data
    contents = _Contents(replace or (lambda value: value), visit)
    if visit is not None:
        visit(data)
    structure = fingerprint(_attributes(data), replace=contents.stand_in, skip_counters=True, opaque=opaque)
    opaque += contents.left_out
    examples = contents.examples(dataset)
    if examples is None:
        opaque.append(f"examples of {type(dataset).__name__}")
    return fingerprint((structure, examples))


def visit_source(data: DataLike, visit: Callable[[object], None]) -> None:
    """Visit everything that a source of batches consists of, in an order that is the same in every process.

    No example is read, and generators are left as they were.
    """
    contents = _Contents(lambda value: value, visit)
    visit(data)
    fingerprint(_attributes(data), replace=contents.stand_in, skip_counters=True, opaque=[])


def _attributes(data: DataLike) -> object:
    """Everything about a source that decides its batches."""
    if not isinstance(data, DataLoader):
        return data
    attributes = {name: value for name, value in vars(data).items() if name not in DECIDES_NO_BATCH}
    return type(data), attributes


class _Stands(NamedTuple):
    """What stands for a value that is not walked through."""

    kind: str
    shape: tuple[int, ...]
    part: object


class _Contents:
    """What a walk through a data set meets: generators, and values that are not read as a whole."""

    def __init__(self, replace: Replace, visit: Callable[[object], None] | None) -> None:
        self.replace, self.visit = replace, visit
        self.generators: list[Any] = []
        self.values = 0
        self.left_out: dict[str, None] = {}
        """What is not compared."""

    def stand_in(self, value: object) -> object:
        """The value that is fingerprinted in place of another one."""
        value = self.replace(value)
        if self.visit is not None:
            self.visit(value)
        if is_generator(value):
            self.generators.append(value)
            return f"generator {type(value).__name__} {_seed_of(value)}"
        if isinstance(value, np.memmap):
            self.left_out["most of a memory-mapped file"] = None
            rows = np.linspace(0, len(value) - 1, min(_SAMPLE, len(value)), dtype=np.int64).tolist()
            return _Stands(str(value.dtype), value.shape, [np.array(value[row]).reshape(-1)[:1024] for row in rows])
        if isinstance(value, bytes | bytearray):
            return _Stands(type(value).__name__, (len(value),), hashlib.sha256(value).hexdigest())
        if isinstance(value, str | PurePath):
            return self._without_folder(value)
        if isinstance(value, list | tuple | set | frozenset | Mapping) and not isinstance(value, Namespace):
            return self._container(value)
        return value

    def _without_folder(self, path: str | PurePath) -> object:
        """A text as it is, or the last part of an absolute path."""
        if not os.path.isabs(path):
            return path
        self.left_out["the folders of absolute paths"] = None
        return os.path.basename(path)

    def _container(self, values: Any) -> object:
        """A container as it is; as one text, if it is long and plain; or a sample of one that is too long."""
        size, name = len(values), type(values).__name__
        if size <= _LONG:
            self.values += size
            return values
        if size <= _MOST_PLAIN:
            try:
                text = self._text(values)
            except TypeError:  # it holds objects
                if self.values + size <= _MOST_OBJECTS:
                    self.values += size
                    return values
            else:
                return _Stands(name, (size,), hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())
        self.left_out[f"most entries of a {name} of {size}"] = None
        entries = values.items() if isinstance(values, Mapping) else values
        ordered = not isinstance(values, set | frozenset)  # the order of a set differs between processes
        return _Stands(name, (size,), list(itertools.islice(entries, 0, None, size // _SAMPLE)) if ordered else None)

    def _text(self, value: Any) -> str:
        """Plain values as a text that is another one for other values; `TypeError` where there is more than those."""
        kind = type(value)
        if kind in _SCALARS:
            return repr(self._without_folder(value) if kind is str else value)
        if kind is dict:
            return f"dict{sorted((self._text(key), self._text(part)) for key, part in value.items())}"
        if kind in (set, frozenset):
            return f"{kind.__name__}{sorted(map(self._text, value))}"
        if kind not in (list, tuple):
            raise TypeError(f"{kind.__name__} is not plain")
        kinds = set(map(type, value))
        if kinds <= _SCALARS and str not in kinds:
            return f"{kind.__name__}{list(value)}"
        return f"{kind.__name__}[{','.join(map(self._text, value))}]"

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
        host, states = GlobalGenerators.now(), [generator_state(generator) for generator in self.generators]
        try:
            with seeded(0):
                random.seed(0)
                np.random.seed(0)  # noqa: NPY002
                for generator in self.generators:
                    _seed(generator)
                yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                set_generator_state(generator, state)
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


def _seed_of(generator: Any) -> int | None:
    """The seed of a generator; None where it is not known, or was taken from the operating system."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    sequence = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return entropy if isinstance(entropy, int) and entropy < 2**64 else None  # NumPy draws 128 bits of its own


def _seed(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(0)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(0).state
    else:
        generator.seed(0)

"""How data and functions are recognised, in any process."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dissensus import checks
from dissensus.data.batches import DataLike, as_pair
from dissensus.execution.skeleton import first_line
from dissensus.fingerprint import digest, fingerprint
from dissensus.randomness import seeded
from dissensus.trunk import SharedTrunk

PROBES = 16
"""Examples by which a data set is recognised, so that it need not be read as a whole."""


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
    return Pairs(len(order), lambda: loader, fingerprint((order, digests[0])), fingerprint(sizes))


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

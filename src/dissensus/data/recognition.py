"""What data and functions are known by, in words that are the same in every process."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dissensus import checks
from dissensus.data.batches import DataLike, as_pair
from dissensus.execution.skeleton import first_line
from dissensus.fingerprint import code_digest, digest, fingerprint
from dissensus.randomness import seeded
from dissensus.trunk import SharedTrunk

PROBES = 16
"""Examples that a data set is known by; it is not read as a whole."""


class Pairs(NamedTuple):
    """Batches of pairs ``(x, y)`` in a fixed order, to be gone through several times."""

    examples: int
    batches: Callable[[], Iterable[Any]]
    identity: str
    sizes: str
    """How they fall into batches."""


def pairs_of(data: DataLike, batch_size: int) -> Pairs:
    """The pairs of a source, known by their checksum; of a ``Dataset`` or ``DataLoader``, by its order and examples."""
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
    """Both the order and the examples of a loader must be the same every time."""
    with seeded(0):
        orders = [[list(batch) for batch in loader.batch_sampler or ()] for _ in range(2)]
        if orders[0] != orders[1]:
            checks.refuse("data", "keep its order", "a loader that shuffles", "Use shuffle=False: training shuffles.")
        order = [index for batch in orders[0] for index in batch]
        if not order:
            checks.refuse("data", "hold at least one example", "none")
        some = [order[int(place)] for place in np.linspace(0, len(order) - 1, min(PROBES, len(order)))]
        seen = [digest(*pair_of(_collated(loader, some))) for _ in range(2)]
    if seen[0] != seen[1]:
        fix = "Random transforms go into `augmentations`."
        checks.refuse("data", "give the same example every time", "another at the second look", fix)
    sizes = [len(batch) for batch in orders[0]]
    return Pairs(len(order), lambda: loader, _hashed(repr((order, seen[0]))), _hashed(repr(sizes)))


def _collated(loader: DataLoader[Any], indices: Sequence[Any]) -> Any:
    examples = [loader.dataset[index] for index in indices]
    try:
        return loader.collate_fn(examples)
    except (TypeError, RuntimeError) as reason:
        fix = "Bring them to tensors of one size."
        checks.refuse("data", "give examples that make a batch", f"an error ({first_line(reason)})", fix, TypeError)


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """A batch as inputs and targets, one for each."""
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        got = [type(part).__name__ for part in batch] if isinstance(batch, list | tuple) else type(batch).__name__
        checks.refuse("data", "give pairs (x, y) of tensors", got, error=TypeError)
    x, y = batch
    if len(x) != len(y) or not y.numel():
        got = f"{checks.shape_text(x.shape)} inputs and {checks.shape_text(y.shape)} targets"
        checks.refuse("data", "hold a target for every input", got)
    return x, y


def parts_of(function: object) -> list[object]:
    """What a function computes with, as far as can be seen: its code, its network, what it closes over and names.

    >>> network = nn.Linear(2, 2)
    >>> network in parts_of(lambda x: network(x) / 255), network in parts_of(network.forward)
    (True, True)
    """
    found: list[object] = []
    seen: list[object] = []
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if any(value is other for other in seen):
            continue
        seen.append(value)
        if isinstance(value, SharedTrunk):  # its heads have no part in its features
            found.append(f"cut at {value.cut}")
            waiting.append(value.backbone)
        elif isinstance(value, MethodType):
            found.append(value.__func__.__qualname__)
            waiting.append(value.__self__)
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            found.append(f"{value.__module__}.{value.__qualname__} {code_digest(value.__code__)}")
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_named(value)]
        else:
            found.append(value)
            waiting += _inside(value)
    return found


def _inside(value: object) -> list[object]:
    """Networks that an object or a container holds, however deep."""
    if isinstance(value, nn.Module | Tensor | str):
        return []
    if isinstance(value, Mapping):
        held = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        held = list(value)
    else:
        held = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [part for part in held if isinstance(part, nn.Module | Mapping | list | tuple | set | frozenset)]


def digest_of(function: object) -> str:
    """A checksum of a function and of what it computes with; of a shared trunk, without its heads."""
    return fingerprint(function, _without_heads)


def _without_heads(value: object) -> object:
    """What stands for a value: of a trunk the backbone and the cut, since heads have no part in its features."""
    return ("trunk", value.cut, value.backbone) if isinstance(value, SharedTrunk) else value


def _named(function: FunctionType) -> Iterator[object]:
    """What a function closes over or names, less what other files define."""
    names = inspect.getclosurevars(function)
    inner = [code for code in function.__code__.co_consts if isinstance(code, CodeType)]
    also: dict[str, object] = {}
    while inner:  # functions and comprehensions within
        code = inner.pop()
        inner += [deeper for deeper in code.co_consts if isinstance(deeper, CodeType)]
        also |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for value in (*names.nonlocals.values(), *{**names.globals, **also}.values()):
        foreign = isinstance(value, FunctionType) and value.__globals__ is not function.__globals__
        if not foreign and not isinstance(value, ModuleType | type | BuiltinFunctionType):
            yield value


def _hashed(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()

"""What training changes outside of the library: generators, counters and other variables of the user's objects.

A data set may draw from a generator of its own, a sampler may count epochs, and an objective may anneal a weight. A
checkpoint holds these values beside weights and moments, so that a resumed training continues with them.
"""

import collections
import dis
import json
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dissensus.data.batches import is_source
from dissensus.data.recognition import DECIDES_NO_BATCH, visit_source
from dissensus.fingerprint import Namespace, array_digest, decides_nothing, is_installed, is_special, module_settings
from dissensus.randomness import generator_state, is_generator, set_generator_state

log = logging.getLogger("dissensus")

_MOST_HOLDERS = 10**4
"""Containers, tensors and arrays that are watched."""
_MOST_ENTRIES = 10**4
"""Entries of a container up to which it is watched entry by entry."""
_MOST_BYTES = 2**26
"""Size of arrays that are watched, and of values that a checkpoint stores."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, set, collections.deque)


class NotStorable(Exception):
    """A value that is more than numbers, texts, tensors and containers of those, or that is too large."""


class PythonState:
    """Generators and variables of objects that a training uses, as a checkpoint stores and restores them.

    Objects are visited before the first step (`visit`), in an order that is the same in every process. From `begin` on
    they are watched: `tensors` holds the states of generators and the variables that have changed since.

    Args:
        generators: Generators by name, besides those that are visited.
    """

    def __init__(self, generators: Mapping[str, Any] | None = None) -> None:
        self.generators: dict[str, Any] = dict(generators or {})
        self.holders: list[Any] = []
        self.start: list[Any] = []
        self.start_states: dict[str, Any] = {}
        self.visited: dict[int, object] = {}
        self.watched = self.watched_bytes = 0
        self.not_stored: list[str] = []
        """What is known to change and cannot be stored."""
        self.told: set[str] = set()

    def visit(self, value: object) -> None:
        """Note a value of the training, if it is a generator or something that may change."""
        if isinstance(value, (*_SCALARS, tuple)) or id(value) in self.visited:
            return
        self.visited[id(value)] = value
        if isinstance(value, DataLoader) and value.num_workers and value.persistent_workers:
            self.not_stored.append("what persistent workers of a DataLoader draw and keep")
        if is_generator(value):
            self.generators[f"visited {len(self.generators)}"] = value
        elif self._is_holder(value):
            self.holders.append(value)

    def _is_holder(self, value: Any) -> bool:
        """Whether a value is watched. Installed code keeps nothing that decides a result, apart from data loading."""
        if isinstance(value, FunctionType):
            return not is_installed(str(value.__globals__.get("__name__", "")))
        if isinstance(value, type):
            return not is_installed(value.__module__)
        if isinstance(value, (*_CONTAINERS, Tensor, np.ndarray)):
            self.watched += 1
            return self.watched <= _MOST_HOLDERS and not isinstance(value, Namespace)
        if isinstance(value, nn.Module):
            return True
        module = type(value).__module__
        return not is_installed(module) or module.startswith("torch.utils.data")

    def begin(self) -> None:
        """Note the present values of everything that was visited."""
        self.start = [self._now(holder) for holder in self.holders]
        self.start_states = {name: generator_state(each) for name, each in self.generators.items()}

    def rewind(self) -> None:
        """Put generators and counters back to where they were at `begin`.

        Counters are variables of objects that hold a number, a text or None, such as the epoch of a sampler. Variables
        of classes and functions, which other objects share, and entries of containers stay as they are.
        """
        for name, state in self.start_states.items():
            set_generator_state(self.generators[name], state)
        for holder, start in zip(self.holders, self.start, strict=True):
            if not isinstance(holder, (*_CONTAINERS, Tensor, np.ndarray, FunctionType, type, nn.Module)):
                values = {name: value for name, value in start.items() if isinstance(value, _SCALARS)}
                _write(holder, _changed(_variables(holder), values), [])

    def _now(self, holder: Any) -> Any:
        """What tells whether a holder has changed: a version, a checksum, or its variables."""
        if isinstance(holder, Tensor):
            return None if holder.is_inference() else holder._version
        if isinstance(holder, np.ndarray):
            self.watched_bytes += holder.nbytes
            known = not holder.dtype.hasobject and self.watched_bytes <= _MOST_BYTES
            return array_digest(holder) if known else None
        if isinstance(holder, _CONTAINERS) and len(holder) > _MOST_ENTRIES:
            return len(holder)
        return _variables(holder)

    def tensors(self) -> dict[str, Tensor]:
        """States of generators and changed variables. A line of the log names changes that cannot be stored."""
        encoder = _Encoder()
        states = {name: encoder.encoded(generator_state(each)) for name, each in self.generators.items()}
        self.watched_bytes = 0
        changes, unknown = [], list(self.not_stored)
        for index, (holder, start) in enumerate(zip(self.holders, self.start, strict=True)):
            now = self._now(holder)
            if isinstance(now, dict) and isinstance(start, dict):
                stored = []
                for key, value in _changed(start, now).items():
                    try:
                        stored.append([encoder.encoded(key), encoder.encoded(value)])
                    except NotStorable:
                        unknown += [] if decides_nothing(value) else [_label(holder, key)]
                missing = [encoder.encoded(key) for key in start if key not in now and isinstance(key, _SCALARS)]
                if stored or missing:
                    changes.append([index, stored, missing])
            elif now != start:
                try:
                    changes.append([index, encoder.encoded(holder), []])
                except NotStorable:
                    unknown.append(self._container_label(holder))
        self._tell(unknown)
        facts = json.dumps({"generators": states, "changes": changes}).encode()
        return {"facts": torch.frombuffer(bytearray(facts), dtype=torch.uint8), **encoder.tensors}

    def _container_label(self, container: Any) -> str:
        """The name of a container: that of the variable that holds it."""
        for holder, start in zip(self.holders, self.start, strict=True):
            names = [key for key, value in start.items() if value is container] if isinstance(start, dict) else []
            if names:
                return _label(holder, names[0])
        return f"a {type(container).__name__}"

    def _tell(self, unknown: list[str]) -> None:
        new = sorted(set(unknown) - self.told)
        if new:
            self.told |= set(new)
            log.warning(
                "training changes %s, which checkpoints do not store: a resumed training may differ", ", ".join(new)
            )

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        facts = json.loads(bytes(tensors["facts"].cpu().numpy()))
        for name, state in facts["generators"].items():
            set_generator_state(self.generators[name], _decoded(state, tensors))
        for index, stored, missing in facts["changes"]:
            holder = self.holders[index]
            if isinstance(stored, list):
                values = {_decoded(key, tensors): _decoded(value, tensors) for key, value in stored}
                _write(holder, values, [_decoded(key, tensors) for key in missing])
            else:
                _overwrite(holder, _decoded(stored, tensors))


@contextmanager
def unchanged(states: Iterable[PythonState]) -> Iterator[None]:
    """A block after which generators and variables are as before, as far as a checkpoint would store them."""
    before = [(state, state.tensors()) for state in states]
    yield
    for state, tensors in before:
        state.restore(tensors)


def _variables(holder: Any) -> dict[Any, Any]:
    """The variables of something that holds values, by name, key or place."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, list):
        return dict(enumerate(holder))
    if isinstance(holder, set | collections.deque):
        return {"entries": frozenset(holder) if isinstance(holder, set) else tuple(holder)}
    if isinstance(holder, FunctionType):
        assigned = {f"global {name}": holder.__globals__.get(name) for name in _assigned_globals(holder.__code__)}
        return {**_cells(holder), **assigned, **vars(holder)}
    if isinstance(holder, type):
        values = {name: value for name, value in vars(holder).items() if not is_special(name) and name != "_abc_impl"}
        return {name: value for name, value in values.items() if not callable(value) and not hasattr(value, "__get__")}
    if isinstance(holder, nn.Module):
        return module_settings(holder)
    names = [name for kind in type(holder).__mro__ for name in _slots(kind) if hasattr(holder, name)]
    values = {**{name: getattr(holder, name) for name in names}, **getattr(holder, "__dict__", {})}
    without = DECIDES_NO_BATCH if isinstance(holder, DataLoader) else ()
    return {name: value for name, value in values.items() if name not in without}


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not is_special(name)]


def _cells(function: FunctionType) -> dict[str, Any]:
    """Variables that a function closes over, as far as they have values."""
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[f"closure {name}"] = cell.cell_contents
        except ValueError:
            continue
    return cells


def _assigned_globals(code: CodeType) -> Iterator[str]:
    """Global variables that code assigns."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned_globals(constant)
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL")


def _write(holder: Any, values: Mapping[Any, Any], missing: list[Any]) -> None:
    """Assign variables, and delete those that are missing."""
    if isinstance(holder, set | collections.deque):
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(values["entries"])
    elif isinstance(holder, dict):
        for key in missing:
            holder.pop(key, None)
        holder.update(values)
    elif isinstance(holder, list):
        entries = {place: value for place, value in {**_variables(holder), **values}.items() if place not in missing}
        holder[:] = [entries[place] for place in sorted(entries)]
    else:
        for name, value in values.items():
            _assign(holder, name, value)
        for name in missing:
            if hasattr(holder, name):
                delattr(holder, name)


def _assign(holder: Any, name: str, value: object) -> None:
    kind, _, variable = name.partition(" ")
    if isinstance(holder, FunctionType) and kind == "closure":
        cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
        cells[variable].cell_contents = value
    elif isinstance(holder, FunctionType) and kind == "global":
        holder.__globals__[variable] = value
    else:
        setattr(holder, name, value)


def _overwrite(holder: Any, value: Any) -> None:
    """Copy the numbers of a tensor or an array, or the entries of a container that has become long."""
    if isinstance(holder, Tensor):
        with torch.no_grad():
            holder.copy_(value)
    elif isinstance(holder, np.ndarray):
        holder[...] = value
    else:
        _write(holder, _variables(value), list(_variables(holder).keys() - _variables(value).keys()))


def _changed(start: Mapping[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any]:
    nothing = object()
    return {key: value for key, value in now.items() if not _same(start.get(key, nothing), value)}


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, frozenset):
        return first == second
    return isinstance(first, _SCALARS) and (first == second or first != first)


def _label(holder: Any, name: object) -> str:
    """A variable, for people."""
    if isinstance(holder, _CONTAINERS):
        return f"entry {name!r} of a {type(holder).__name__}"
    kind = holder if isinstance(holder, type | FunctionType) else type(holder)
    return f"`{name}` of {kind.__qualname__}"


class _Encoder:
    """Values as JSON, with their tensors beside them."""

    def __init__(self, most_bytes: float = _MOST_BYTES) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.bytes, self.most_bytes = 0, most_bytes

    def encoded(self, value: Any) -> Any:
        """A value as JSON; `NotStorable` where it has no such form."""
        self.bytes += 8
        if self.bytes > self.most_bytes:
            raise NotStorable
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) in (float, complex):
            return {type(value).__name__: [value.real.hex(), value.imag.hex()]}
        if type(value) is bytes:
            return {"bytes": value.hex()}
        if type(value) in _SEQUENCES.values():
            return {type(value).__name__: [self.encoded(entry) for entry in value]}
        if type(value) in _MAPPINGS.values():
            return {type(value).__name__: [[self.encoded(key), self.encoded(part)] for key, part in value.items()]}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            kind = "array" if isinstance(value, np.ndarray) else "number"
            return {kind: [self._stored(torch.from_numpy(np.array(value))), str(value.dtype)]}
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            return {"tensor": [self._stored(value), str(value.device)]}
        raise NotStorable(f"a {type(value).__name__}")

    def _stored(self, tensor: Tensor) -> str:
        self.bytes += tensor.nbytes
        if self.bytes > self.most_bytes:
            raise NotStorable
        name = f"value {len(self.tensors)}"
        try:
            self.tensors[name] = tensor.detach().cpu().clone().contiguous()
        except RuntimeError as reason:  # a tensor of a transformation such as vmap, which exists within it only
            raise NotStorable from reason
        return name


_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decoded(entry, tensors) for entry in content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decoded(key, tensors): _decoded(part, tensors) for key, part in content})
    decode: dict[str, Callable[[Any], Any]] = {
        "float": lambda parts: float.fromhex(parts[0]),
        "complex": lambda parts: complex(*map(float.fromhex, parts)),
        "bytes": bytes.fromhex,
        "array": lambda parts: tensors[parts[0]].cpu().numpy().astype(parts[1]),
        "number": lambda parts: tensors[parts[0]].cpu().numpy().astype(parts[1])[()],
        "tensor": lambda parts: tensors[parts[0]].to(parts[1]),
    }
    return decode[kind](content)


def encoded(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A value of any size as JSON, and its tensors by name; `NotStorable` where it has no such form."""
    encoder = _Encoder(math.inf)
    return encoder.encoded(value), encoder.tensors


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encoded` was given."""
    return _decoded(value, tensors)


def global_generators(device: torch.device) -> dict[str, Any]:
    """Generators that any code may draw from: torch's, the device's, Python's and NumPy's."""
    generators: dict[str, Any] = {"torch": torch.default_generator, "python": random, "numpy": np.random}
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators["device"] = torch.cuda.default_generators[index]
    return generators


def sources_at_beginning(device: torch.device, *data: Any) -> PythonState | None:
    """Global generators, and generators and counters of sources of batches, as they are now; None without a source.

    `PythonState.rewind` puts them back, so that another training reads what the first one has read.
    """
    sources = [part for part in data if is_source(part)]
    if not sources:
        return None
    python = PythonState(global_generators(device))
    for source in sources:
        visit_source(source, python.visit)
    python.begin()
    return python

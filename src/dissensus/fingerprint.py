"""Identity: checksums of tensors, settings, functions and networks that are the same in every process.

A stored result is known by the fingerprint of everything that decided it. Names are not enough: all lambdas have one
name, and a function depends on the numbers that it closes over or names.
"""

import dis
import enum
import functools
import hashlib
import io
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from dissensus import checks

Instead = Callable[[object], object]
"""``value -> `` what stands for it; most values stand for themselves."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, PurePath)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    np.ufunc,
)
_LEFT_OUT = (io.IOBase, weakref.ReferenceType, torch.Stream, torch.Event)
"""Types whose content decides no result; locks, which have no public type, are left out as well."""
_WITHOUT_VERSION = ("torch", "numpy")
"""Packages whose releases change results by rounding only."""
_OF_EVERY_MODULE = {*vars(nn.Module()), "_flat_weights", "_flat_weights_names", "_flat_weight_refs"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_CLASS = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__qualname__",
    "__annotations__",
    "__slotnames__",
    "__parameters__",
    "__orig_bases__",
    "__firstlineno__",
    "__static_attributes__",
    "__abstractmethods__",
    "_abc_impl",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__match_args__",
    "__dataclass_fields__",
}
_PIECE = 1 << 26


def fingerprint(value: object, instead: Instead | None = None) -> str:
    """A checksum of a value and of everything that its behaviour depends on, as far as Python can see it.

    Numbers, words and containers count by content; tensors and arrays by type, shape and numbers. A function counts
    by its code, its defaults, and all that it closes over or names; a ``functools.partial`` by function and arguments;
    a bound method by function and owner. A network counts by its class, settings, parameters, buffers, hooks and mode.
    Functions and classes of installed packages count by name and version; PyTorch's and NumPy's by name alone.
    Any other object counts by what its method ``fingerprint_parts()`` returns or, without one, by what ``pickle`` would
    store of it. Devices and memory layouts do not count.

    Args:
        value: Anything. `TypeError` names what cannot be looked into.
        instead: Gives what stands for a value, where that is not the value itself.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> fingerprint(scaled(2.0)) == fingerprint(scaled(2.0)), fingerprint(scaled(2.0)) == fingerprint(scaled(3.0))
    (True, False)
    """
    return _Walk(instead or (lambda found: found)).of(value)


def digest(*tensors: Tensor) -> str:
    """A checksum of tensors, taken piece by piece.

    >>> digest(torch.ones(3)) == digest(torch.ones(3)), digest(torch.ones(3)) == digest(torch.ones(3, 1))
    (True, False)
    """
    found = hashlib.sha256()
    for tensor in tensors:
        bare = tensor.detach()
        bare = bare.dequantize() if bare.is_quantized else bare.to_dense() if bare.layout != torch.strided else bare
        bare = torch.view_as_real(bare.resolve_conj()) if bare.is_complex() else bare
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        rows = bare if bare.ndim else bare.reshape(1)
        for piece in rows.split(max(1, _PIECE * len(rows) // max(1, rows.nbytes))):
            found.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def code_digest(code: CodeType) -> str:
    """A checksum of what a function does: not of its name, nor of where it stands."""
    held = [_constant(value) for value in code.co_consts]
    return _hashed(repr((code.co_code, code.co_names, code.co_exceptiontable, held)))


def _constant(value: object) -> object:
    if isinstance(value, CodeType):
        return code_digest(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


class _Walk:
    """One fingerprint being taken: what has been seen, and where the walk is."""

    def __init__(self, instead: Instead) -> None:
        self.instead = instead
        self.known: dict[int, str] = {}
        self.kept: list[object] = []
        """What `known` speaks of: as long as it lives, no other object gets its number."""
        self.path: list[int] = []

    def of(self, value: object) -> str:
        """The checksum of one value."""
        value = self.instead(value)
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return _hashed(f"{type(value).__qualname__} {value!r}")
        place = id(value)
        if place in self.path:  # it holds itself
            return _hashed(f"{len(self.path) - self.path.index(place)} up")
        if place not in self.known:
            self.path.append(place)
            kind, parts = self._parts(value)
            self.known[place] = _hashed(repr((kind, [self.of(part) for part in parts])))
            self.kept.append(value)
            self.path.pop()
        return self.known[place]

    def _parts(self, value: Any) -> tuple[str, list[object]]:
        """What kind of thing a value is, and what it is made of."""
        own = None if isinstance(value, type) else getattr(value, "fingerprint_parts", None)
        if own is not None:
            return "object", [type(value), *own()]
        if isinstance(value, Tensor):
            return f"tensor {digest(value)}", []
        if isinstance(value, np.ndarray | np.generic):
            return _array(value)
        if isinstance(value, (*_PLAIN_OF_TORCH, enum.Enum)):
            return f"{type(value).__qualname__} {value}", []
        if isinstance(value, Mapping):
            return f"mapping {type(value).__qualname__}", _items(value)
        if isinstance(value, list | tuple):
            return f"sequence {type(value).__qualname__}", list(value)
        if isinstance(value, set | frozenset):
            return "set", [*sorted(_Walk(self.instead).of(each) for each in value)]
        if isinstance(value, _LEFT_OUT) or type(value).__module__ in ("_thread", "_weakref"):
            return f"left out {type(value).__qualname__}", []
        if isinstance(value, ModuleType):
            return f"module {value.__name__} {_version(value.__name__)}", []
        for kinds, parts in _WAYS:
            if isinstance(value, kinds):
                return parts(value)
        return _object(value)


def _items(mapping: Mapping[Any, Any]) -> list[object]:
    """Keys and values, in the order of the keys where those are words."""
    keys = list(mapping)
    ordered = sorted(keys) if all(isinstance(key, str) for key in keys) else keys
    return [part for key in ordered for part in (key, mapping[key])]


def _array(array: Any) -> tuple[str, list[object]]:
    if array.dtype.hasobject:
        return f"array {array.shape}", [array.tolist()]
    return f"array {array.dtype} {array.shape} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}", []


def _partial(value: Any) -> tuple[str, list[object]]:
    return "partial", [value.func, value.args, value.keywords]


def _method(method: MethodType) -> tuple[str, list[object]]:
    return "method", [method.__func__, method.__self__]


def _function(function: FunctionType) -> tuple[str, list[object]]:
    compiled = getattr(function, "_torchdynamo_orig_callable", None)
    if compiled is not None:
        return "compiled", [compiled]
    name = f"{function.__module__}.{function.__qualname__}"
    held: list[object] = [function.__defaults__, function.__kwdefaults__]
    if _installed(function.__module__):
        made_at_runtime = "<locals>" in function.__qualname__
        return f"function {name} {_version(function.__module__)}", [
            *held,
            *(_cells(function) if made_at_runtime else []),
        ]
    held += [*_cells(function), *_named(function)]
    return f"function {code_digest(function.__code__)}", held


def _cells(function: FunctionType) -> list[object]:
    """What a function closes over; a cell that is still empty stands for itself."""
    found: list[object] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found += [name, cell.cell_contents]
        except ValueError:
            found += [name, "empty"]
    return found


def _named(function: FunctionType) -> list[object]:
    """Globals that a function names, also in functions and comprehensions within it."""
    found: dict[str, object] = {}
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for step in dis.get_instructions(code):
            name = step.argval
            if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or name not in function.__globals__:
                continue
            value = found[name] = function.__globals__[name]
            if isinstance(value, ModuleType) and not _installed(value.__name__):
                used = {key: vars(value)[key] for key in code.co_names if key in vars(value)}
                found |= {f"{name}.{key}": each for key, each in used.items()}
    return _items(found)


def _class(value: type) -> tuple[str, list[object]]:
    name = f"class {value.__module__}.{value.__qualname__}"
    if _installed(value.__module__):
        return f"{name} {_version(value.__module__)}", []
    own = {key: each for key, each in vars(value).items() if key not in _OF_EVERY_CLASS}
    return name, [*value.__bases__, *_items(own)]


def _network(network: nn.Module) -> tuple[str, list[object]]:
    if hasattr(network, "_orig_mod"):  # compiled: the same network, computed in another way
        return "compiled", [network._orig_mod]
    parts: list[object] = [type(network), network.training, network._parameters, network._buffers, network._modules]
    hooks = [list(getattr(network, name).values()) for name in _HOOKS if getattr(network, name, None)]
    parts += [hooks] if hooks else []
    if isinstance(network, torch.jit.ScriptModule):
        return f"script {network.inlined_graph}", [network.training, network.state_dict()]
    if isinstance(network, fx.GraphModule):
        return f"graph {network.code}", parts[1:]
    settings: dict[str, object] = {}
    for key, value in vars(network).items():
        # Old-style weight norm and spectral norm keep a weight that they make anew from parameters at every pass.
        made = {f"{key}_orig", f"{key}_g"} & set(network._parameters)
        passed = isinstance(value, Tensor) and value.grad_fn is not None
        if key not in _OF_EVERY_MODULE and not made and not passed:
            settings[key] = value
    return "network", [*parts, settings]


def _object(value: Any) -> tuple[str, list[object]]:
    """Any other object: what `pickle` would store of it."""
    try:
        stored = value.__reduce_ex__(2)
    except Exception as reason:
        fix = "Bind settings with functools.partial, and keep open files, generators and the like out of it."
        got = f"{type(value).__module__}.{type(value).__qualname__} ({reason})"
        checks.refuse("identity", "be taken of things that can be looked into", got, fix, TypeError)
    if isinstance(stored, str):
        return f"object {type(value).__module__} {stored}", []
    make, arguments, *rest = stored
    state, items, pairs = (*rest, None, None, None)[:3]
    return "object", [make, arguments, state, list(items or ()), list(pairs or ())]


def _generator(generator: torch.Generator) -> tuple[str, list[object]]:
    return "generator", [generator.get_state()]


def _wrapped(value: Any) -> tuple[str, list[object]]:
    return type(value).__qualname__, [value.__func__ if hasattr(value, "__func__") else value.__wrapped__]


def _property(value: property) -> tuple[str, list[object]]:
    return "property", [value.fget, value.fset]


def _builtin(value: Any) -> tuple[str, list[object]]:
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    return f"builtin {getattr(value, '__module__', '')} {name}", [] if isinstance(owner, ModuleType) else [owner]


_WAYS: tuple[tuple[Any, Callable[[Any], tuple[str, list[object]]]], ...] = (
    (functools.partial, _partial),
    (MethodType, _method),
    (FunctionType, _function),
    (_BUILTIN, _builtin),
    (staticmethod | classmethod | functools._lru_cache_wrapper, _wrapped),
    (property, _property),
    (type, _class),
    (nn.Module, _network),
    (torch.Generator, _generator),
)


def _installed(module: str | None) -> bool:
    """Whether a module belongs to this package, to Python or to an installed package, whose code does not change."""
    top = (module or "").partition(".")[0]
    if top in ("dissensus", "builtins", "torch") or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return bool(file) and not {"site-packages", "dist-packages"}.isdisjoint(PurePath(str(file)).parts)


def _version(module: str) -> str:
    top = module.partition(".")[0]
    if top in _WITHOUT_VERSION or top in sys.stdlib_module_names:
        return ""
    return str(getattr(sys.modules.get(top), "__version__", ""))


def _hashed(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()

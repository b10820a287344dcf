"""Identity: checksums of tensors, settings, functions and networks that are the same in every process.

A stored result is recognised by the fingerprint of everything that decided it. Names are not enough: all lambdas have
one name, and a function depends on the numbers that it closes over or refers to.
"""

import collections
import dis
import enum
import functools
import hashlib
import importlib.util
import inspect
import io
import re
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from dissensus import checks

Replace = Callable[[object], object]
"""``value -> `` the value that stands for it; most values stand for themselves."""

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
"""Types whose content decides no result. Locks, which have no public type, are left out too."""
_WITHOUT_VERSION = ("torch", "numpy")
"""Packages whose releases change results by rounding only."""
_OF_EVERY_MODULE = {
    *vars(nn.Module()),
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
    "flatten_parameters",
}
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
_CALLS = ("__call__", "forward", "__getitem__", "__getitems__", "__iter__", "__next__", "__len__")
"""Methods by which a network, an objective or a data set is used."""
_HAS_DOCSTRING = 0x4000000
"""The flag of code objects by which Python 3.13 and later say that the first constant is the docstring."""
_PIECE = 1 << 26
_CARD = re.compile(r"cuda:[0-9]+")
_COLUMNS = 16
"""Numbers of a row that `glance` reads."""


def fingerprint(
    value: object, *, replace: Replace | None = None, skip_counters: bool = False, opaque: list[str] | None = None
) -> str:
    """A checksum of a value and of everything that its behaviour depends on, as far as Python can see it.

    - Numbers, strings and containers count by type and content. The order of a dict counts if it holds functions or
      networks, or is an ``OrderedDict``; the order of keyword arguments and attributes does not.
    - Tensors and arrays count by dtype, shape and numbers, whatever their device and memory layout. A card counts the
      same whatever its number, be it a ``torch.device`` or a string such as ``"cuda:1"``.
    - A function counts by its code (without name, docstring and line numbers), its parameters, defaults and attributes,
      and everything that it closes over or refers to; a ``functools.partial`` by function and arguments; a bound method
      by function and owner.
    - A network counts by its class, settings, parameters, buffers, hooks and mode; the result of ``torch.compile`` as
      the network or function that was compiled.
    - A class counts by its name, its bases and its attributes, whichever module it is in.
    - Functions and classes of installed packages count by name and version; those of PyTorch and NumPy by name alone. A
      function belongs to the module that its code is from, whatever ``functools.wraps`` has copied.
    - A module that is not installed counts by the variables that a function uses, by its code where a function imports
      it when it is called, and by all of its variables where it is passed on, such as in a ``functools.partial``.
    - Any other object counts by what its method ``fingerprint_parts()`` returns or, without one, by its class and what
      ``pickle`` would store of it, whole numbers included.

    Args:
        value: Anything. `TypeError` names what cannot be inspected, such as a generator.
        replace: Returns what stands for a value.
        skip_counters: Leave out attributes of a class that making or using its objects assigns, such as the number of
            objects made so far. They are those that ``__init__``, ``__call__``, ``forward``, ``__getitem__`` and the
            like assign as ``Network.made`` or ``type(self).made``.
        opaque: A list that gets the type of everything that cannot be inspected, which then counts by its type alone.
            Without a list `TypeError` is raised.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> fingerprint(scaled(2.0)) == fingerprint(scaled(2.0)), fingerprint(scaled(2.0)) == fingerprint(scaled(3.0))
    (True, False)
    """
    return _Walk(replace or (lambda other: other), skip_counters, opaque).checksum(value)


def fingerprints(
    settings: Mapping[str, object],
    *,
    replace: Replace | None = None,
    skip_counters: bool = False,
    opaque: dict[str, list[str]] | None = None,
) -> dict[str, str]:
    """The fingerprint of each setting, so that an error can name those that differ.

    ``opaque`` gets the types that cannot be inspected, by setting.

    >>> differing(fingerprints({"lr": 0.1, "epochs": 3}), fingerprints({"lr": 0.2, "epochs": 3, "seed": 0}))
    ['lr', 'seed']
    """
    result: dict[str, str] = {}
    for name, value in settings.items():
        types_of_setting: list[str] | None = None if opaque is None else []
        result[name] = fingerprint(value, replace=replace, skip_counters=skip_counters, opaque=types_of_setting)
        if opaque is not None and types_of_setting:
            opaque[name] = types_of_setting
    return result


def differing(stored: object, current: Mapping[str, object]) -> list[str]:
    """Names of settings that two identities do not share or have different values for.

    ``stored`` comes from a file; if it is not a mapping, every setting differs.
    """
    known = stored if isinstance(stored, Mapping) else {}
    missing = object()
    return [name for name in {**known, **current} if known.get(name, missing) != current.get(name, missing)]


def digest(*tensors: Tensor) -> str:
    """A checksum of tensors by dtype, shape and numbers, taken piece by piece.

    >>> digest(torch.ones(3)) == digest(torch.ones(3)), digest(torch.ones(3)) == digest(torch.ones(3, 1))
    (True, False)
    """
    checksum = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach()
        plain = plain.dequantize() if plain.is_quantized else plain
        plain = plain if plain.layout == torch.strided else plain.to_dense()
        plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        checksum.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        rows = plain if plain.ndim else plain.reshape(1)
        for piece in rows.split(max(1, _PIECE * len(rows) // max(1, rows.nbytes))):
            checksum.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def glance(*tensors: Tensor) -> int:
    """A fast checksum of batches ``[B, ...]``: of their shapes, and of a few numbers of every row.

    >>> x = torch.arange(6.0).view(3, 2)
    >>> glance(x) == glance(x.clone()), glance(x) == glance(x.flip(0))
    (True, False)
    """
    checksum = 0
    for tensor in tensors:
        plain = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        rows = plain.flatten(1) if plain.ndim > 1 else plain.reshape(-1, 1)
        columns = torch.linspace(0, rows.shape[1] - 1, min(_COLUMNS, rows.shape[1])).long()
        few = rows[:, columns.to(rows.device)].cpu().contiguous()
        checksum = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(few.view(torch.uint8).numpy().data, checksum)
    return checksum


def module_settings(module: nn.Module) -> dict[str, object]:
    """Attributes of one layer that are neither parameters, buffers, layers nor made by a forward pass."""
    settings: dict[str, object] = {}
    for name, value in vars(module).items():
        # Old-style weight norm and spectral norm keep a weight that they compute from parameters at every pass.
        computed = {f"{name}_orig", f"{name}_g"} & set(module._parameters)
        from_pass = isinstance(value, Tensor) and value.grad_fn is not None
        if name not in _OF_EVERY_MODULE and not computed and not from_pass:
            settings[name] = value
    return settings


def hooks(module: nn.Module) -> list[list[object]]:
    """Hooks of one layer."""
    return [list(getattr(module, name).values()) for name in _HOOKS if getattr(module, name, None)]


class Namespace(dict[str, object]):
    """Keyword arguments or attributes, whose order does not matter."""


def _on_first_card(value: object) -> object:
    """The first card for any other, since results do not depend on its number; everything else as it is."""
    if isinstance(value, torch.device):
        return torch.device(value.type, 0) if value.index else value
    if isinstance(value, str) and _CARD.fullmatch(value):
        return "cuda:0"
    return value


class _Walk:
    """One fingerprint being taken: the options, the checksums so far, and the path to the present value."""

    def __init__(self, replace: Replace, skip_counters: bool, opaque: list[str] | None) -> None:
        self.replace, self.skip_counters, self.opaque = replace, skip_counters, opaque
        self.checksums: dict[int, str] = {}
        self.visited: list[object] = []
        """The values of `checksums`. While they live, no other object gets their ids."""
        self.path: list[int] = []

    def checksum(self, value: object) -> str:
        value = _on_first_card(self.replace(value))
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum | np.generic):
            return _hash(f"{type(value).__qualname__} {value!r}")
        key = id(value)
        if key in self.path:  # it holds itself
            return _hash(f"{len(self.path) - self.path.index(key)} up")
        if key not in self.checksums:
            self.path.append(key)
            kind, parts = self._parts(value)
            self.checksums[key] = _hash(repr((kind, [self.checksum(part) for part in parts])))
            self.visited.append(value)
            self.path.pop()
        return self.checksums[key]

    def _parts(self, value: Any) -> tuple[str, list[object]]:
        """The kind of a value, and the values that it consists of."""
        if type(value) in (list, tuple):
            return f"sequence {type(value).__qualname__}", list(value)
        declared = getattr(type(value), "fingerprint_parts", None)  # of the class: some objects have every attribute
        if declared is not None:
            return "object", [type(value), *declared(value)]
        if isinstance(value, Tensor):
            return f"tensor {digest(value)}", []
        if isinstance(value, np.ndarray | np.generic):
            return _array(value)
        if isinstance(value, _PLAIN_OF_TORCH):
            return f"{type(value).__qualname__} {value}", []
        if isinstance(value, enum.Enum):
            return f"enum {type(value).__qualname__} {value.name}", [value.value]
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            return f"sequence {type(value).__qualname__}", list(value)
        if isinstance(value, set | frozenset):
            options = (self.replace, self.skip_counters, self.opaque)
            return "set", [*sorted(_Walk(*options).checksum(item) for item in value)]
        if decides_nothing(value):
            return f"left out {type(value).__qualname__}", []
        if isinstance(value, ModuleType):
            return self._module_value(value)
        if isinstance(value, MethodType):
            return "method", [value.__func__, value.__self__]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, nn.Module):
            return self._network(value)
        if isinstance(value, type):
            return self._class(value)
        for kinds, parts in _SIMPLE:
            if isinstance(value, kinds):
                return parts(value)
        return self._object(value)

    def _mapping(self, mapping: Mapping[Any, Any]) -> tuple[str, list[object]]:
        keys = list(mapping)
        kind = "namespace" if isinstance(mapping, Namespace) else f"mapping {type(mapping).__qualname__}"
        ordered = isinstance(mapping, collections.OrderedDict) or any(callable(value) for value in mapping.values())
        if isinstance(mapping, Namespace) or not ordered:
            keys.sort(key=self.checksum)
        factory = [mapping.default_factory] if isinstance(mapping, collections.defaultdict) else []
        return kind, [*factory, *(part for key in keys for part in (key, mapping[key]))]

    @staticmethod
    def _module_value(module: ModuleType) -> tuple[str, list[object]]:
        """A module that is passed on: nobody knows which of its variables are used."""
        if is_installed(module.__name__):
            return f"module {module.__name__} {_version(module.__name__)}", []
        return "module", [Namespace({name: value for name, value in vars(module).items() if not is_special(name)})]

    def _function(self, function: FunctionType) -> tuple[str, list[object]]:
        compiled = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled is not None:
            return "compiled", [compiled]
        code, name = function.__code__, _installed_name(function)
        held: list[object] = [_defaults(function)]
        if name is None or "<locals>" in name:  # made while the program runs
            held.append(_closure(function))
        if name is not None:
            return f"function {name} {_code_digest(code) if '<lambda>' in name else ''}", held  # lambdas share a name
        attributes = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
        held += [Namespace(attributes), _globals(function)]
        return f"function {_code_digest(code)}", held

    def _network(self, network: nn.Module) -> tuple[str, list[object]]:
        if hasattr(network, "_orig_mod"):  # compiled: the same network, computed in another way
            return "compiled", [network._orig_mod]
        if isinstance(network, torch.jit.ScriptModule):
            # Without the lines of the source and the names of types, which count how often a class was compiled.
            compiled: Any = network.inlined_graph
            graph = re.sub(r"__torch__[\w.]*", "", compiled.str(False))
            return f"script {graph}", [network.training, network.state_dict()]
        tensors = [Namespace(held) for held in (network._parameters, network._buffers)]
        # The order of layers is the order in which containers such as nn.Sequential run them.
        parts: list[object] = [network.training, *tensors, list(network._modules.items())]
        parts.append(hooks(network))
        if isinstance(network, fx.GraphModule):
            return f"graph {network.code}", parts
        return "network", [type(network), *parts, Namespace(module_settings(network))]

    def _class(self, value: type) -> tuple[str, list[object]]:
        if is_installed(value.__module__):
            return f"class {value.__module__}.{value.__qualname__} {_version(value.__module__)}", []
        counters = _counters(value) if self.skip_counters else set[str]()
        attributes = {key: part for key, part in vars(value).items() if key not in _OF_EVERY_CLASS | counters}
        return f"class {value.__qualname__}", [type(value), *value.__bases__, Namespace(attributes)]

    def _object(self, value: Any) -> tuple[str, list[object]]:
        """Any other object: what `pickle` would store of it."""
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        try:
            stored = value.__reduce_ex__(2)
        except Exception as error:
            if self.opaque is not None:
                self.opaque.append(name)
                return f"opaque {name}", []
            fix = "Bind settings with functools.partial, and keep open files, generators and the like out of it."
            checks.refuse("identity", "be taken of things that can be inspected", f"{name} ({error})", fix, TypeError)
        if isinstance(stored, str):
            return f"object {type(value).__module__} {stored}", []
        make, arguments, *rest = stored
        state, items, pairs = (*rest, None, None, None)[:3]
        if isinstance(state, dict):
            state = Namespace(state)
        elif isinstance(state, tuple):  # the dict of attributes, if any, and that of slots
            state = tuple(Namespace(part) if isinstance(part, dict) else part for part in state)
        return "object", [make, arguments, state, list(items or ()), list(pairs or ())]


def _counters(kind: type) -> set[str]:
    """Attributes of a class that making or using its objects assigns, such as the number of objects made so far."""
    functions = [vars(kind).get(name) for name in (*_CALLS, "__init__", "__new__")]
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    return {name for code in codes for name in _assigned(code, kind.__name__)}


def _assigned(code: CodeType, owner: str) -> set[str]:
    """Attributes that code assigns as ``Owner.name``, ``type(self).name`` or ``self.__class__.name``.

    The instructions of an expression such as ``Owner.name`` share its start in the source, and begin with the name.
    """
    assigned: set[str] = set()
    chains: dict[tuple[int | None, int | None], list[str]] = {}
    for step in dis.get_instructions(code):
        place = step.positions
        chain = chains.setdefault((place.lineno, place.col_offset) if place else (None, None), [])
        if step.opname == "STORE_ATTR":
            before = chain[:-1] if chain[-1:] == [step.argval] else chain  # Owner.name += 1 loads the name first
            if before in ([owner], ["type"], ["__class__"]) or before[1:] == ["__class__"]:
                assigned.add(step.argval)
        elif step.opname.startswith("LOAD_") and isinstance(step.argval, str) and step.opname != "LOAD_CONST":
            chain.append(step.argval)
    return assigned


def _code_digest(code: CodeType) -> str:
    """A checksum of what a function does, without its name, its docstring and its place in a file."""
    constants = list(code.co_consts)
    named = code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<")
    documented = code.co_flags & _HAS_DOCSTRING if sys.version_info >= (3, 13) else named
    if documented and constants and isinstance(constants[0], str):
        constants[0] = None
    count = code.co_argcount + code.co_kwonlyargcount
    variadic = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    parameters = (code.co_posonlyargcount, code.co_argcount, code.co_varnames[:count], variadic)
    held = [_constant(constant) for constant in constants]
    return _hash(repr((code.co_code, code.co_names, code.co_exceptiontable, parameters, held)))


def _constant(value: object) -> object:
    if isinstance(value, CodeType):
        return _code_digest(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _defaults(function: FunctionType) -> Namespace:
    """Defaults of parameters, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return Namespace({**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})})


def _closure(function: FunctionType) -> Namespace:
    """Variables that a function closes over, as far as they have values."""
    variables, used = Namespace(), _names(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            value = "no value yet"
        variables |= _variable(name, value, used)
    return variables


def _names(code: CodeType) -> list[str]:
    """Names that code uses, also in functions and comprehensions within it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _globals(function: FunctionType) -> Namespace:
    """Global variables that a function refers to, also in functions and comprehensions within it."""
    variables, used = Namespace(), _names(function.__code__)
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        constants: list[Any] = []
        for step in dis.get_instructions(code):
            name = step.argval
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants.append(name)
            elif step.opname == "IMPORT_NAME":
                level, members = constants[-2:]
                variables |= _imported(name, level, members, str(function.__globals__.get("__package__") or ""))
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                variables |= _variable(name, function.__globals__[name], used)
    return variables


def _variable(name: str, value: object, used: Sequence[str], around: tuple[ModuleType, ...] = ()) -> Namespace:
    """A variable; of a module that is not installed, those of its variables whose names the code uses."""
    if not isinstance(value, ModuleType) or is_installed(value.__name__):
        return Namespace({name: value})
    variables = Namespace({name: "a module"})
    for key in used:
        if key in vars(value) and value not in around:
            variables |= _variable(f"{name}.{key}", vars(value)[key], used, (*around, value))
    return variables


def _imported(name: str, level: int, members: Sequence[str] | None, package: str) -> Namespace:
    """Modules that a function imports when it is called: by name, or by their code where they are not installed."""
    try:
        name = importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return Namespace()
    names = [name, *(f"{name}.{member}" for member in members or ())]
    return Namespace({f"import {module}": text for module in names if (text := _module(module)) is not None})


def _module(name: str) -> str | None:
    """What identifies a module: name and version, or the code of one that is not installed; None if there is none."""
    if is_installed(name):
        return f"module {name} {_version(name)}"
    try:
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        source = loader.get_source(name) if hasattr(loader, "get_source") else None
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if source is None or _is_installed_file(spec.origin):
        return f"module {name}"
    return f"module {_code_digest(compile(source, '', 'exec'))}"


def _array(array: Any) -> tuple[str, list[object]]:
    if array.dtype.hasobject:
        return f"array {array.shape}", [array.tolist()]
    return f"array {array.dtype} {array.shape} {array_digest(array)}", []


def array_digest(array: Any) -> str:
    """A checksum of the numbers of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _partial(value: functools.partial[Any]) -> tuple[str, list[object]]:
    return "partial", [value.func, value.args, Namespace(value.keywords)]


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


_SIMPLE: tuple[tuple[Any, Callable[[Any], tuple[str, list[object]]]], ...] = (
    (functools.partial, _partial),
    (_BUILTIN, _builtin),
    (staticmethod | classmethod | functools._lru_cache_wrapper, _wrapped),
    (property, _property),
    (torch.Generator, _generator),
    (types.UnionType | types.GenericAlias, lambda value: (f"annotation {value}", [])),
)


def _installed_name(function: FunctionType) -> str | None:
    """The module, name and version of a function of an installed package; None for one of a user.

    ``functools.wraps`` copies a name to any function, so the name is believed where all of the code is installed.
    """
    module, name = _module_of(function), function.__code__.co_qualname
    if not is_installed(module):
        return None
    inner: Any = function
    while isinstance(getattr(inner, "__wrapped__", None), FunctionType) and is_installed(_module_of(inner)):
        inner = inner.__wrapped__
    if is_installed(_module_of(inner)) and is_installed(function.__module__):
        module, name = function.__module__, function.__qualname__
    return f"{module}.{name} {_version(module)}"


def _module_of(function: FunctionType) -> str:
    """The module that the code of a function is from."""
    return str(function.__globals__.get("__name__", function.__module__))


def decides_nothing(value: object) -> bool:
    """Whether a value, such as an open file or a lock, has no content that decides a result."""
    return isinstance(value, _LEFT_OUT) or type(value).__module__ in ("_thread", "_weakref")


def is_special(name: str) -> bool:
    """Whether a name is one of Python's own, such as ``__doc__``."""
    return name.startswith("__") and name.endswith("__")


def is_installed(module: str | None) -> bool:
    """Whether a module belongs to this package, to Python or to an installed package, whose code does not change."""
    top = (module or "").partition(".")[0]
    if top == "__main__":  # of a script, also where a worker of another program was sent its code
        return False
    if top in ("dissensus", "builtins", "torch") or top in sys.stdlib_module_names:
        return True
    return _is_installed_file(getattr(sys.modules.get(module or ""), "__file__", None))


def _is_installed_file(file: str | None) -> bool:
    return bool(file) and not {"site-packages", "dist-packages"}.isdisjoint(PurePath(str(file)).parts)


def _version(module: str) -> str:
    top = module.partition(".")[0]
    if top in _WITHOUT_VERSION or top in sys.stdlib_module_names:
        return ""
    return str(getattr(sys.modules.get(top), "__version__", ""))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """A short checksum of the library's own source, so that a result says which code made it."""
    root = Path(__file__).parent
    together = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        together.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return together.hexdigest()[:12]

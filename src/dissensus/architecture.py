"""Architectures by name, so that what is saved can be loaded without the code that built it.

A name is ``"package.module:function"``; calling the function with the arguments returns a new network. Names and
arguments are stored as JSON, never code. A stored name is compared with a list of known ones before anything is
imported: those of `dissensus.nets`, `dissensus.masks.convert`, and what the caller trusts.
"""

import importlib
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from dissensus import checks, nets
from dissensus.storage import StorageError

KNOWN = frozenset({*(f"dissensus.nets:{name}" for name in nets.__all__), "dissensus.masks:convert"})
"""Names that are loaded without further question: functions of this package that build networks and nothing else."""
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_NESTED = "dissensus.architecture"
"""The key by which JSON tells a nested architecture from a dictionary."""
_DEEPEST = 16


@dataclass(frozen=True, init=False, repr=False)
class Architecture:
    """A function that builds a network, by its name, and its arguments. Calling it returns a new network.

    ``Ensemble(Architecture(...))`` and ``ens.save(path, architecture=...)`` store it with the weights, and
    ``Ensemble.load(path)`` then needs no ``build``.

    Args:
        name: ``"package.module:function"``, such as ``"dissensus.nets:mlp"``. A class counts as a function.
        arguments: Keyword arguments of the function: None, booleans, numbers, texts, lists and dictionaries of those;
            or an `Architecture`, for a function that takes a network. Tuples become lists.

    >>> network = Architecture("dissensus.nets:mlp", inputs=10, outputs=3, hidden=[8])
    >>> masked = Architecture("dissensus.masks:convert", network=network, count=4, scale=2.0, seed=0)
    >>> network, type(masked()).__name__
    (Architecture('dissensus.nets:mlp', inputs=10, outputs=3, hidden=[8]), 'Masked')
    """

    name: str
    arguments: dict[str, Any]

    def __init__(self, name: str, /, **arguments: Any) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            requirement = "be 'package.module:function', such as 'dissensus.nets:mlp'"
            checks.refuse("name", requirement, repr(name), error=TypeError if not isinstance(name, str) else ValueError)
        object.__setattr__(self, "name", name)
        plain = {key: _plain(f"arguments[{key!r}]", value) for key, value in arguments.items()}
        object.__setattr__(self, "arguments", plain)

    def __call__(self) -> nn.Module:
        """A new network. It imports the module, and calls the function."""
        return self._network(None)

    def trusted(self, trust: str | Iterable[str] = ()) -> "TrustedArchitecture":
        """What builds the network as long as its names are known, or trusted; a `StorageError` says which is not.

        Nothing is imported here.
        """
        trusted = _checked_trust(trust)
        for name in self.names():
            if not _is_trusted(name, trusted):
                package = name.partition(":")[0].partition(".")[0]
                raise StorageError(
                    f"the architecture {name!r} is not one of dissensus.nets: to load it, its module would be imported "
                    f"and its function called. Do you trust it? Pass trust={package!r}, or `build`."
                )
        return TrustedArchitecture(self, trusted)

    def names(self) -> list[str]:
        """The name, and those of nested architectures."""
        return [self.name, *(name for part in _nested(self.arguments) for name in part.names())]

    def to_json(self) -> dict[str, Any]:
        """Name and arguments, as JSON holds them.

        >>> Architecture("dissensus.nets:resnet20", classes=10).to_json()
        {'name': 'dissensus.nets:resnet20', 'arguments': {'classes': 10}}
        """
        return {"name": self.name, "arguments": _stored(self.arguments)}

    @classmethod
    def from_json(cls, stored: Any) -> "Architecture":
        """The architecture of `to_json`. Nothing is imported."""
        if not isinstance(stored, Mapping) or set(stored) != {"name", "arguments"}:
            raise ValueError("an architecture has a name and arguments")
        arguments = _read(stored["arguments"])
        if not isinstance(arguments, dict):
            raise ValueError("the arguments of an architecture have names")
        return cls(stored["name"], **arguments)

    def _network(self, trust: tuple[str, ...] | None) -> nn.Module:
        module, _, function = self.name.partition(":")
        build = _function(_imported(self.name, module), function, self.name)
        if trust is not None:
            _check_origin(build, self.name, trust)
        _check_arguments(build, self)
        return build(**_built(self.arguments, trust))

    def __repr__(self) -> str:
        words = [repr(self.name), *(f"{name}={value!r}" for name, value in self.arguments.items())]
        return f"Architecture({', '.join(words)})"


@dataclass(frozen=True)
class TrustedArchitecture:
    """An architecture whose names have been checked. Calling it returns a new network."""

    architecture: Architecture
    trust: tuple[str, ...]

    def __call__(self) -> nn.Module:
        """A new network."""
        return self.architecture._network(self.trust)


def _checked_trust(trust: str | Iterable[str]) -> tuple[str, ...]:
    entries = [trust] if isinstance(trust, str) else checks.listed("trust", trust)
    pattern = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?", re.ASCII)
    for entry in entries:
        if not isinstance(entry, str) or not pattern.fullmatch(entry):
            fix = "As in trust=['my_package'] or trust=['my_package.models:build']."
            checks.refuse("trust", "name packages, modules or functions", repr(entry), fix)
    return tuple(entries)


def _is_trusted(name: str, trust: tuple[str, ...]) -> bool:
    return name in KNOWN or any(name == entry or name.startswith((f"{entry}.", f"{entry}:")) for entry in trust)


def _imported(name: str, module: str) -> ModuleType:
    """The module of an architecture, imported."""
    try:
        return importlib.import_module(module)
    except ImportError as reason:
        raise ImportError(
            f"the architecture {name!r} cannot be built: {reason}. Is its module on sys.path?"
        ) from reason


def _function(module: ModuleType, function: str, name: str) -> Any:
    build = getattr(module, function, None)
    if not callable(build):
        got = "nothing of that name" if build is None else type(build).__name__
        checks.refuse("name", "name a function of its module", f"{name!r}, where there is {got}")
    return build


def _check_arguments(build: Any, architecture: Architecture) -> None:
    """Refuse arguments that a function does not take, and name those that it takes."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # a function that does not tell
        return
    try:
        signature.bind(**architecture.arguments)
    except TypeError as reason:
        wanted = f"be those of {architecture.name}({', '.join(signature.parameters)})"
        checks.refuse("arguments", wanted, f"{architecture!r}: {reason}", error=TypeError)


def _check_origin(build: Any, name: str, trust: tuple[str, ...]) -> None:
    """Refuse what a trusted module has imported from elsewhere, such as a function that runs commands."""
    module, qualified = getattr(build, "__module__", None), getattr(build, "__qualname__", "")
    origin = f"{module}:{qualified}"
    if name in KNOWN or name in trust or _is_trusted(origin, trust):
        return
    raise StorageError(
        f"the architecture {name!r} is {origin!r}, which its module has imported from elsewhere. Do you trust it? Pass "
        f"trust={name!r}, or `build`."
    )


def _plain(place: str, value: Any, depth: int = 0) -> Any:
    """A value as JSON gives it back; anything else is refused."""
    if depth > _DEEPEST:
        checks.refuse(place, f"be nested at most {_DEEPEST} deep", "more")
    if value is None or isinstance(value, bool | str | Architecture):
        return value
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [_plain(f"{place}[{index}]", part, depth + 1) for index, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and _NESTED not in value:
        return {key: _plain(f"{place}[{key!r}]", part, depth + 1) for key, part in value.items()}
    fix = "Write a function that takes texts and numbers, and name that."
    requirement = "be JSON: None, a boolean, a finite number, a text, or a list or dictionary of those"
    checks.refuse(place, requirement, repr(value), fix, TypeError)


def _nested(value: Any) -> list[Architecture]:
    if isinstance(value, Architecture):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [nested for part in parts for nested in _nested(part)]


def _mapped(value: Any, function: Any) -> Any:
    """Plain values with a function applied to nested architectures."""
    if isinstance(value, dict):
        return {key: _mapped(part, function) for key, part in value.items()}
    if isinstance(value, list):
        return [_mapped(part, function) for part in value]
    return function(value) if isinstance(value, Architecture) else value


def _stored(value: Any) -> Any:
    return _mapped(value, lambda nested: {_NESTED: nested.to_json()})


def _built(value: Any, trust: tuple[str, ...] | None) -> Any:
    return _mapped(value, lambda nested: nested._network(trust))


def _read(value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise ValueError("arguments are nested too deep")
    if isinstance(value, dict):
        if set(value) == {_NESTED}:
            return Architecture.from_json(value[_NESTED])
        return {key: _read(part, depth + 1) for key, part in value.items()}
    return [_read(part, depth + 1) for part in value] if isinstance(value, list) else value

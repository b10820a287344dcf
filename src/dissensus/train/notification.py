"""Calls of a user's callbacks: what they are given, and what their answers do."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch import Tensor

from dissensus import checks

Entry = dict[str, Any]
"""The numbers of an epoch or of a step, by name."""


class Start(NamedTuple):
    """The beginning of a training, or of a part of one, for callbacks that have a method ``on_start``."""

    resumed: bool
    """Whether training goes on from a checkpoint."""
    entries: list[Entry]
    """The epochs before that checkpoint, as `on_epoch` was given them."""
    places: list[Entry]
    """What is about to be trained, as entries name it: one dictionary per run, with ``run`` and ``point`` in a sweep,
    ``member`` in a sequential training and ``twin`` in a training with a twin."""


class Rung(NamedTuple):
    """The end of an epoch that all runs of a sweep have reached, for callbacks that have a method ``on_rung``."""

    epoch: int
    """Counted from 1."""
    entries: list[Entry]
    """The entries of all runs that are still in training, of every shape, in the order of the grid."""
    outputs: Callable[[], list[tuple[Tensor, Tensor] | None]]
    """Computes member outputs ``[M, N, ...]`` on validation data and its targets, one pair per entry, with the weights
    of this epoch; None without validation data."""
    failed: Sequence[int] = ()
    """The numbers of runs whose loss has become NaN or infinite; they have no entries."""


class Stop(NamedTuple):
    """A run that a callback has stopped."""

    callback: str
    step: int
    """Steps of the run so far."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a training, and what their entries say about the place of it."""

    listeners: Sequence[object]
    places: Sequence[Mapping[str, Any]] = field(default_factory=lambda: [{}])
    """What entries of each run begin with."""

    @classmethod
    def of(cls, callbacks: Any) -> "Callbacks | None":
        """Callbacks as a user gives them; None where there are none. What is no callback is refused."""
        if callbacks is None:
            return None
        if isinstance(callbacks, str | bytes | Mapping) or not isinstance(callbacks, Iterable):
            fix = "One callback? Put it into a list."
            checks.refuse("callbacks", "be a list of callbacks", repr(callbacks), fix, TypeError)
        listeners = list(callbacks)
        for place, listener in enumerate(listeners):
            _check(listener)
            if any(listener is other for other in listeners[:place]):
                checks.refuse("callbacks", "hold every object once", f"{name_of(listener)} twice")
        return cls(listeners) if listeners else None

    def at(self, **place: Any) -> "Callbacks":
        """The same callbacks for a part of the training that entries name."""
        return replace(self, places=[{**here, **place} for here in self.places])

    def for_runs(self, numbers: Sequence[int], points: Sequence[Mapping[str, Any]]) -> "Callbacks":
        """The same callbacks for some runs of a sweep."""
        return replace(self, places=[{"run": number, "point": dict(points[number])} for number in numbers])

    @property
    def see_runs(self) -> bool:
        """Whether any of them sees all runs of an epoch."""
        return any(_method(listener, "on_runs") is not None for listener in self.listeners)

    @property
    def see_steps(self) -> bool:
        """Whether any callback wants the numbers of every step."""
        return any(_method(listener, "on_step") is not None for listener in self.listeners)

    def start(self, resumed: bool, histories: Mapping[int, Sequence[Entry]]) -> None:
        """Tell callbacks that want to know it that a training begins, or goes on."""
        entries = [self._placed(run, entry) for run, epochs in histories.items() for entry in epochs]
        for listener in self.listeners:
            method = _method(listener, "on_start")
            if method is not None:
                method(Start(resumed, [dict(entry) for entry in entries], [dict(place) for place in self.places]))

    def epoch(self, run: int, entry: Entry) -> str | None:
        """Give all callbacks the entry of an epoch; return the name of the first that stops the run."""
        return self._call("on_epoch", self._placed(run, entry))

    def runs(self, entries: Mapping[int, Entry]) -> dict[int, str]:
        """Give callbacks the entries of all runs at the end of an epoch; return the runs that they stop, and who."""
        stopped: dict[int, str] = {}
        numbers = list(entries)
        for listener in self.listeners:
            method = _method(listener, "on_runs")
            if method is not None:
                answer = method(self.placed(entries))
                for place in _places(answer, len(numbers), listener, "on_runs"):
                    stopped.setdefault(numbers[place], name_of(listener))
        return stopped

    def placed(self, entries: Mapping[int, Entry]) -> list[Entry]:
        """Copies of entries, each with the place of its run."""
        return [_copied(self._placed(run, entry)) for run, entry in entries.items()]

    @property
    def rungs(self) -> list[int]:
        """Epochs at which all runs of a sweep wait for each other, in rising order."""
        wanted = [rung for listener in self.listeners for rung in _rungs(listener)]
        return sorted(set(wanted))

    def rung(self, rung: Rung) -> dict[int, str]:
        """Give callbacks a rung that is theirs; return the places among its entries that they stop, and who."""
        stopped: dict[int, str] = {}
        for listener in self.listeners:
            method = _method(listener, "on_rung")
            if method is not None and rung.epoch in _rungs(listener):
                answer = method(rung._replace(entries=[_copied(entry) for entry in rung.entries]))
                for place in _places(answer, len(rung.entries), listener, "on_rung"):
                    stopped.setdefault(place, name_of(listener))
        return stopped

    def step(self, run: int, entry: Entry) -> str | None:
        """Give callbacks the numbers of a step; return the name of the first that stops the run."""
        return self._call("on_step", self._placed(run, entry))

    def _placed(self, run: int, entry: Entry) -> Entry:
        return {**self.places[run], **entry}

    def _call(self, name: str, entry: Entry) -> str | None:
        stopping: list[str] = []
        for listener in self.listeners:
            method = _method(listener, name)
            # Each gets a dictionary of its own, so that writing into it changes nothing for others.
            if method is not None and _stops(method(_copied(entry))):
                stopping.append(name_of(listener))
        return stopping[0] if stopping else None


def _copied(entry: Entry) -> Entry:
    return {
        name: list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
        for name, value in entry.items()
    }


def _stops(answer: object) -> bool:
    """Whether an answer is True. Other answers, such as the number that a file's ``write`` returns, stop nothing."""
    if isinstance(answer, Tensor):
        return answer.dtype.is_floating_point is False and answer.ndim == 0 and answer.tolist() is True
    return isinstance(answer, bool | np.bool_) and bool(answer)


def _rungs(listener: Any) -> list[int]:
    """The epochs at which a callback wants to compare all runs of a sweep."""
    if _method(listener, "on_rung") is None:
        return []
    rungs = getattr(listener, "rungs", None)
    if not isinstance(rungs, Iterable) or isinstance(rungs, str | bytes):
        fix = f"Set {name_of(listener)}.rungs = [3, 9]."
        checks.refuse("callbacks", "have `rungs`, a list of epochs, beside on_rung", repr(rungs), fix, TypeError)
    return [checks.count("rungs", rung) for rung in rungs]


def _places(answer: object, runs: int, listener: object, method: str) -> list[int]:
    """The places in the list of entries that an answer of ``on_runs`` or ``on_rung`` names."""
    if answer is None:
        return []
    requirement = f"return None or places in its list of {runs} entries from {method}"
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
        checks.refuse("callbacks", requirement, f"{answer!r} from {name_of(listener)}", error=TypeError)
    places = list(answer)
    if not all(isinstance(place, int | np.integer) and not isinstance(place, bool) for place in places):
        checks.refuse("callbacks", requirement, f"{places!r} from {name_of(listener)}", error=TypeError)
    if not all(0 <= place < runs for place in places):
        checks.refuse("callbacks", requirement, f"{places!r} from {name_of(listener)}")
    return [int(place) for place in places]


_METHODS = ("on_epoch", "on_step", "on_runs", "on_rung")


def _method(listener: Any, name: str) -> Callable[..., Any] | None:
    """A method of a callback; a plain function is its own ``on_epoch``."""
    if not any(callable(getattr(listener, method, None)) for method in _METHODS):
        return listener if name == "on_epoch" else None
    method = getattr(listener, name, None)
    return method if callable(method) else None


def _check(listener: object) -> None:
    if isinstance(listener, type):
        _refuse(f"the class {listener.__name__}", f"Create one: {listener.__name__}(...).")
    if not callable(listener) and not any(callable(getattr(listener, method, None)) for method in _METHODS):
        _refuse(repr(listener), "")
    for name in ("on_start", *_METHODS):
        method = _method(listener, name)
        if method is not None and (signature := _unfit(method)) is not None:
            # Told now, not at the end of the first epoch.
            got = f"{name_of(method)}{signature}"
            _refuse(got, f"Use def {name}(self, entry) in a class, or def {name_of(method)}(entry).")
    _rungs(listener)


def _unfit(method: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of what cannot be called with one argument; None for what can, or cannot be inspected."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind({})
    except TypeError:
        return signature
    return None


def _refuse(got: str, fix: str) -> NoReturn:
    requirement = "hold objects with a method on_epoch(entry) or on_step(entry), or functions of an entry"
    checks.refuse("callbacks", requirement, got, fix, TypeError)


def name_of(listener: Any) -> str:
    """The name of a callback, as a history has it.

    >>> name_of(functools.partial(len)), name_of(Start(False, [], []))
    ('len', 'Start')
    """
    while isinstance(listener, functools.partial):
        listener = listener.func
    return getattr(listener, "__qualname__", None) or type(listener).__name__

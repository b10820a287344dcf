"""A study as data: what a TOML file of the library may say, checked key by key.

Sections are dataclasses; a field's annotation is the type that is wanted and its metadata the values that are possible.
``scales`` holds, for each scale, what it says otherwise.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import dissensus
from dissensus import checks
from dissensus.fingerprint import fingerprint

SCALES = ("smoke", "laptop", "gpu", "paper")
"""From seconds to the full protocol; ``gpu``: all of the data, and as much of the rest as a card does in minutes."""
PAPERS = {
    "collusion": "Joint Training of Deep Ensembles Fails Due to Learner Collusion",
    "ldr": "Rethinking Out-of-Distribution Detection at Scale through Ensemble Diversity",
    "adp": "Improving Adversarial Robustness via Promoting Ensemble Diversity",
    "masksembles": "Masksembles for Uncertainty Estimation (supplement)",
    "audit": "The audit's own experiments",
}


class SpecError(ValueError):
    """A study's file says something that cannot be; the message names file, key, what came, and the nearest fix."""


def _at_least(low: float, default: Any = dataclasses.MISSING, high: float = math.inf) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Members:
    """Who is trained."""

    network: str
    count: int = _at_least(1, 5)
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the network's builder, such as ``hidden``."""


@dataclass(frozen=True)
class Objective:
    """What they are trained for."""

    name: str
    loss: str = "cross_entropy"
    pool: Literal["probability", "score", "vote"] = "probability"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimisation:
    """How they are trained; see `dissensus.fit`."""

    epochs: int = _at_least(1, 100)
    batch_size: int = _at_least(1, 128)
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = _at_least(0, 1e-3)
    momentum: float = _at_least(0, 0.0, 1)
    weight_decay: float = _at_least(0, 0.0)
    cut_at: list[float] = field(default_factory=list)
    """Shares of the training after which the rate is multiplied by ``cut``."""
    cut: float = _at_least(0, 0.1, 1)
    patience: int | None = _at_least(1, None)
    validation: float = _at_least(0, 0.0, 1)
    """Share of the training rows that early stopping and best weights are judged by; 0: none."""
    keep: Literal["best", "last"] = "best"
    augment: list[str] = field(default_factory=list)
    examples: int | None = _at_least(1, None)
    """Training examples that are used: the first so many."""


@dataclass(frozen=True)
class Search:
    """Bayesian optimisation of hyperparameters before the runs, for every seed by itself."""

    trials: int = _at_least(1, 20)
    space: dict[str, Any] = field(default_factory=dict)
    """Names to lists of values: ``lr``, ``batch_size``, ``weight_decay``, ``members``, ``width``, ``depth``."""
    validation: float = _at_least(0, 0.2, 1)
    epochs: int = _at_least(1, 200)
    patience: int = _at_least(1, 5)


@dataclass(frozen=True)
class Evaluation:
    """What is measured, and on what."""

    measures: list[str] = field(default_factory=list)
    curves: bool = False
    """Whether losses are followed over the epochs, on training and test data."""
    test_fraction: float = _at_least(0, 0.2, 1)
    """Share of a table that is held out for testing."""
    examples: int | None = _at_least(1, None)
    """Test examples that are used: the first so many."""
    attacked: dict[str, Any] = field(default_factory=dict)
    """Attacks or suites, and how many of these examples they are run on, the first ones."""
    strong: dict[str, Any] = field(default_factory=dict)
    """How strong attacks are that detection is tried on, where it is not as usual."""


@dataclass(frozen=True)
class Figure:
    """How results are drawn: one panel per value of ``panels``, lines over ``x``."""

    x: str = "beta"
    lines: list[str] = field(default_factory=list)
    panels: str = "data"
    x_label: str = ""
    y_label: str = ""
    groups: str = ""
    """An axis whose values give a line each, for one measure."""


@dataclass(frozen=True)
class Expectation:
    """One statement of the paper that numbers can confirm or contradict."""

    says: str
    measure: str
    at: dict[str, Any] = field(default_factory=dict)
    """The point where the measure is taken, such as ``{beta = 1.0}``."""
    than: dict[str, Any] = field(default_factory=dict)
    """A point to compare it with."""
    along: str = ""
    """An axis along which the measure is said to be ``lowest inside`` or ``highest inside``: at neither end."""
    direction: Literal["", "greater", "less", "similar", "lowest inside", "highest inside"] = ""
    factor: float = _at_least(0, 1.0)
    """By which factor at least it is greater or less."""
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    """The paper's number at ``at``."""
    tolerance: float = _at_least(0, 0.0)
    data: list[str] = field(default_factory=list)
    """The data it speaks of; all by default."""


@dataclass(frozen=True)
class Spec:
    """A whole study."""

    name: str
    title: str
    reference: str
    claim: str
    data: list[str]
    procedure: str = "train"
    uses: str = ""
    """Another study whose trainings this one measures."""
    note: str = ""
    members: Members | None = None
    objective: Objective | None = None
    grid: dict[str, Any] = field(default_factory=dict)
    optimisation: Optimisation = field(default_factory=Optimisation)
    search: Search | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    figure: Figure | None = None
    cost: dict[str, Any] = field(default_factory=dict)
    """Minutes per scale: ``{cpu = 5}`` or ``{gpu = 3}``."""
    expect: list[Expectation] = field(default_factory=list)
    scales: dict[str, Any] = field(default_factory=dict)
    by_data: dict[str, Any] = field(default_factory=dict)
    """What is otherwise for some of the data, such as ``{mnist = {optimisation = {epochs = 40}}}``."""

    @property
    def paper(self) -> str:
        """Which paper."""
        return self.name.split("/")[0]

    def to_dict(self) -> dict[str, Any]:
        """The study as plain values, empty ones left out."""
        return _plain(self)

    def settings_fingerprint(self, foreign: str = "") -> str:
        """A checksum of all settings that decide what is computed: texts, costs and expectations do not.

        ``foreign`` is a checksum of procedures and measures from outside the package.
        """
        settings = {key: value for key, value in self.to_dict().items() if key not in _TEXTS}
        return fingerprint((settings, foreign))[:12]

    def digest(self, foreign: str = "") -> str:
        """A checksum of the settings and of the library's version; names the folder of a run."""
        return fingerprint((self.settings_fingerprint(foreign), dissensus.__version__))[:12]


_TEXTS = ("title", "reference", "claim", "note", "cost", "expect", "scales", "figure")


def parse(told: dict[str, Any], name: str, file: str) -> Spec:
    """A study from what its file says."""
    paper = name.split("/")[0]
    if paper not in PAPERS:
        raise SpecError(f"{file}: studies lie in a folder of one of {', '.join(PAPERS)}; got {paper!r}.")
    spec = _section({"name": name, **told}, Spec, file, "")
    for scale, other in spec.scales.items():
        if scale not in SCALES:
            raise SpecError(f"{file}: key 'scales.{scale}' is not known.{_near(scale, SCALES)}")
        _section(merged(told, other) | {"name": name}, Spec, file, f"scales.{scale}")
    for data, other in spec.by_data.items():
        _section(merged(told, other) | {"name": name}, Spec, file, f"by_data.{data}")
    for scale, minutes in spec.cost.items():
        kinds = isinstance(minutes, dict) and all(
            kind in ("cpu", "gpu") and isinstance(m, int | float) for kind, m in minutes.items()
        )
        if scale not in SCALES or not kinds:
            raise SpecError(f"{file}: key 'cost.{scale}' must be minutes such as {{cpu = 5}}; got {minutes!r}.")
    return spec


def resolved(spec: Spec, scale: str, changes: dict[str, Any], file: str) -> Spec:
    """A study at a scale, with changes by dotted keys."""
    if scale not in spec.scales:
        have = ", ".join(spec.scales) or "none"
        raise SpecError(f"{spec.name} has no scale {scale!r}; it has {have}.{_near(scale, tuple(spec.scales))}")
    told = merged(spec.to_dict(), spec.scales[scale])
    if "by_data" not in spec.scales[scale]:
        for other in told.get("by_data", {}).values():
            for path in _paths(spec.scales[scale]):
                _forget(other, path)
    for key, value in changes.items():
        place = told
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise SpecError(f"--set {key}: {part!r} is no section.")
        place[last] = value
        for other in told.get("by_data", {}).values():
            _forget(other, [*path, last])
    told.pop("scales", None)
    return _section({**told, "name": spec.name}, Spec, file, "")


def _paths(told: dict[str, Any]) -> Iterator[list[str]]:
    """Of everything that is told, but whole sections."""
    for key, value in told.items():
        if isinstance(value, dict):
            yield from ([key, *rest] for rest in _paths(value))
        else:
            yield [key]


def _forget(told: dict[str, Any], path: list[str]) -> None:
    """Take a key out: what a scale says, or what is changed by hand, holds for all data."""
    for part in path[:-1]:
        told = told.get(part, {})
    told.pop(path[-1], None)


def on_data(spec: Spec, data: str) -> Spec:
    """A study as it is for one of its data sets."""
    if data not in spec.by_data:
        return spec
    told = merged(spec.to_dict(), spec.by_data[data])
    return _section({**told, "name": spec.name}, Spec, f"{spec.name}.toml", f"by_data.{data}")


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """One mapping over another, section by section; lists are replaced whole, and so is a scale's grid."""
    result = dict(base)
    for key, value in other.items():
        inner = base.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        result[key] = merged(inner, value) if both and key != "grid" else value  # pyright: ignore[reportArgumentType]
    return result


def _section(told: object, kind: Any, file: str, key: str) -> Any:
    if not isinstance(told, dict):
        raise SpecError(f"{file}: key {key!r} must be a section; got {_kind(told)}.")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in told.items():
        at = f"{key}.{name}" if key else name
        if name not in fields:
            raise SpecError(f"{file}: key {at!r} is not known.{_near(name, tuple(fields))}")
        values[name] = _value(value, hints[name], fields[name], file, at)
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"{file}: key {f'{key}.' if key else ''}{missing[0]} is missing.")
    return kind(**values)


def _value(value: Any, hint: Any, about: dataclasses.Field[Any], file: str, key: str) -> Any:
    options = [h for h in (typing.get_args(hint) if _is_union(hint) else [hint]) if h is not type(None)]
    wanted = options[0]
    if dataclasses.is_dataclass(wanted):
        return _section(value, wanted, file, key)
    origin = typing.get_origin(wanted) or wanted
    if origin is list and isinstance(value, list):
        (inner,) = typing.get_args(wanted)
        return [_value(item, inner, about, file, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is Literal:
        known = typing.get_args(wanted)
        if value not in known:
            one_of = ", ".join(repr(word) for word in known if word)
            near = checks.nearest(str(value), known)
            raise SpecError(f"{file}: key {key!r} must be one of {one_of}; got {value!r}. {near}".rstrip())
        return value
    fits = isinstance(value, origin) and (origin is bool or not isinstance(value, bool))
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        value, fits = float(value), True
    if not fits:
        raise SpecError(f"{file}: key {key!r} must be {_TYPES[origin]}; got {_kind(value)} {value!r}.")
    low, high = about.metadata.get("low", -math.inf), about.metadata.get("high", math.inf)
    if isinstance(value, int | float) and not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise SpecError(f"{file}: key {key!r} must be {limits}; got {value!r}.")
    return value


_TYPES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def _kind(value: object) -> str:
    return _TYPES.get(type(value), type(value).__name__)


def _near(word: str, known: tuple[Any, ...]) -> str:
    return " " + checks.nearest(word, known, f"It may be one of {', '.join(map(str, known))}.")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if _said(value, f)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _said(section: Any, f: dataclasses.Field[Any]) -> bool:
    """Whether a value is worth telling: it is something, or it was told to be nothing."""
    value = getattr(section, f.name)
    if value is None:
        return False
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    return value not in ("", [], {}) or value != default


def to_toml(told: dict[str, Any], prefix: str = "") -> str:
    """Plain values as TOML.

    >>> print(to_toml({"title": "a \\"b\\"", "grid": {"beta": [0.0, 1.0]}, "expect": [{"says": "x"}]}))
    title = "a \\"b\\""
    <BLANKLINE>
    [grid]
    beta = [0.0, 1.0]
    <BLANKLINE>
    [[expect]]
    says = "x"
    """
    plain = {k: v for k, v in told.items() if not isinstance(v, dict) and not _is_tables(v)}
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    for key, value in told.items():
        path = f"{prefix}.{_key(key)}" if prefix else _key(key)
        if isinstance(value, dict):
            lines += ["", f"[{path}]", *([text] if (text := to_toml(value, path)) else [])]
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{path}]]", *(f"{_key(k)} = {toml_value(v)}" for k, v in item.items())]
    return "\n".join(lines)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def toml_value(value: Any) -> str:
    """A value as TOML, in one line.

    >>> toml_value({"lr": [0.01, True], "name": "x"})
    '{lr = [0.01, true], name = "x"}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, repr(value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)

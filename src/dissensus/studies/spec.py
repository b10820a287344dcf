"""A study as data: the sections and keys of its TOML file, checked key by key.

Sections are dataclasses. A field's annotation is the type of its value, its metadata the range. ``scales`` holds the
settings that differ at a scale.
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
"""From seconds to the full protocol; ``gpu`` has all of the data, and takes minutes on a GPU."""
PAPERS = {
    "collusion": "Joint Training of Deep Ensembles Fails Due to Learner Collusion",
    "ldr": "Rethinking Out-of-Distribution Detection at Scale through Ensemble Diversity",
    "adp": "Improving Adversarial Robustness via Promoting Ensemble Diversity",
    "masksembles": "Masksembles for Uncertainty Estimation (supplement)",
    "audit": "Experiments on the audit",
}


class SpecError(ValueError):
    """A study's file is not valid; the message names the file, the key, the value and the nearest fix."""


def _at_least(low: float, default: Any = dataclasses.MISSING, high: float = math.inf) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Members:
    """The networks of an ensemble."""

    network: str
    count: int = _at_least(1, 5)
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the network's builder, such as ``hidden``."""


@dataclass(frozen=True)
class Objective:
    """The objective of the training."""

    name: str
    loss: str = "cross_entropy"
    pool: Literal["probability", "score", "vote"] = "probability"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimisation:
    """Settings of the training; see `dissensus.fit`."""

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
    """Share of the training rows that are validation rows, for early stopping and the best weights."""
    keep: Literal["best", "last"] = "best"
    augment: list[str] = field(default_factory=list)
    examples: int | None = _at_least(1, None)
    """Number of training examples that are used, the first ones."""


@dataclass(frozen=True)
class Search:
    """Bayesian optimisation of hyperparameters before the training, for every seed separately."""

    trials: int = _at_least(1, 20)
    space: dict[str, Any] = field(default_factory=dict)
    """Names to lists of values: ``lr``, ``batch_size``, ``weight_decay``, ``members``, ``width``, ``depth``."""
    validation: float = _at_least(0, 0.2, 1)
    epochs: int = _at_least(1, 200)
    patience: int = _at_least(1, 5)


@dataclass(frozen=True)
class Evaluation:
    """Measures, and the data they are taken on."""

    measures: list[str] = field(default_factory=list)
    curves: bool = False
    """Whether losses on training and test data are recorded over the epochs."""
    test_fraction: float = _at_least(0, 0.2, 1)
    """Share of a table's rows that are test rows."""
    examples: int | None = _at_least(1, None)
    """Number of test examples that are used, the first ones."""
    attacked: dict[str, Any] = field(default_factory=dict)
    """Number of examples by attack or suite, the first ones."""
    strong: dict[str, Any] = field(default_factory=dict)
    """Parameters of attacks for detection, where they are not the usual ones."""


@dataclass(frozen=True)
class FigureSection:
    """The study's figure: one panel per value of ``panels``, lines over ``x``."""

    x: str = "beta"
    lines: list[str] = field(default_factory=list)
    panels: str = "data"
    x_label: str = ""
    y_label: str = ""
    groups: str = ""
    """An axis with a line for each of its values."""


@dataclass(frozen=True)
class Expectation:
    """A statement of the paper that can be checked by a number."""

    says: str
    measure: str
    at: dict[str, Any] = field(default_factory=dict)
    """The point of the measure, such as ``{beta = 1.0}``."""
    than: dict[str, Any] = field(default_factory=dict)
    """A point to compare it with."""
    along: str = ""
    """An axis along which the measure is ``lowest inside`` or ``highest inside``: at neither end."""
    direction: Literal["", "greater", "less", "similar", "lowest inside", "highest inside"] = ""
    factor: float = _at_least(0, 1.0)
    """The smallest factor between the two points."""
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    """The paper's number at ``at``."""
    tolerance: float = _at_least(0, 0.0)
    data: list[str] = field(default_factory=list)
    """The data that it is about; all by default."""


@dataclass(frozen=True)
class Spec:
    """A study."""

    name: str
    title: str
    reference: str
    claim: str
    data: list[str]
    procedure: str = "train"
    uses: str = ""
    """The study whose trainings this one measures."""
    note: str = ""
    members: Members | None = None
    objective: Objective | None = None
    grid: dict[str, Any] = field(default_factory=dict)
    optimisation: Optimisation = field(default_factory=Optimisation)
    search: Search | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    figure: FigureSection | None = None
    cost: dict[str, Any] = field(default_factory=dict)
    """Minutes per scale: ``{cpu = 5}`` or ``{gpu = 3}``."""
    expect: list[Expectation] = field(default_factory=list)
    scales: dict[str, Any] = field(default_factory=dict)
    by_data: dict[str, Any] = field(default_factory=dict)
    """Settings that differ for some of the data, such as ``{mnist = {optimisation = {epochs = 40}}}``."""

    @property
    def paper(self) -> str:
        """The paper's key in `PAPERS`."""
        return self.name.split("/")[0]

    def to_dict(self) -> dict[str, Any]:
        """The study as plain values, without empty ones."""
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


def parse(settings: dict[str, Any], name: str, file: str) -> Spec:
    """A study from the content of its file."""
    paper = name.split("/")[0]
    if paper not in PAPERS:
        raise SpecError(f"{file}: studies lie in a folder of one of {', '.join(PAPERS)}; got {paper!r}.")
    spec = _section({"name": name, **settings}, Spec, file, "")
    for scale, other in spec.scales.items():
        if scale not in SCALES:
            raise SpecError(f"{file}: key 'scales.{scale}' is not known.{_near(scale, SCALES)}")
        _section(merged(settings, other) | {"name": name}, Spec, file, f"scales.{scale}")
    for data, other in spec.by_data.items():
        _section(merged(settings, other) | {"name": name}, Spec, file, f"by_data.{data}")
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
    settings = merged(spec.to_dict(), spec.scales[scale])
    if "by_data" not in spec.scales[scale]:
        for other in settings.get("by_data", {}).values():
            for path in _paths(spec.scales[scale]):
                _remove(other, path)
    for key, value in changes.items():
        place = settings
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise SpecError(f"--set {key}: {part!r} is no section.")
        place[last] = value
        for other in settings.get("by_data", {}).values():
            _remove(other, [*path, last])
    settings.pop("scales", None)
    return _section({**settings, "name": spec.name}, Spec, file, "")


def _paths(settings: dict[str, Any]) -> Iterator[list[str]]:
    """Paths of all values, without those of sections."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from ([key, *rest] for rest in _paths(value))
        else:
            yield [key]


def _remove(settings: dict[str, Any], path: list[str]) -> None:
    """Remove a key: settings of a scale, and changed ones, hold for all data."""
    for part in path[:-1]:
        settings = settings.get(part, {})
    settings.pop(path[-1], None)


def on_data(spec: Spec, data: str) -> Spec:
    """A study with the settings of one of its data sets."""
    if data not in spec.by_data:
        return spec
    settings = merged(spec.to_dict(), spec.by_data[data])
    return _section({**settings, "name": spec.name}, Spec, f"{spec.name}.toml", f"by_data.{data}")


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A mapping updated by another, section by section; lists and grids are replaced as a whole."""
    result = dict(base)
    for key, value in other.items():
        inner = base.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        result[key] = merged(inner, value) if both and key != "grid" else value  # pyright: ignore[reportArgumentType]
    return result


def _section(settings: object, kind: Any, file: str, key: str) -> Any:
    if not isinstance(settings, dict):
        raise SpecError(f"{file}: key {key!r} must be a section; got {_kind(settings)}.")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in settings.items():
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
            choices = ", ".join(repr(word) for word in known if word)
            near = checks.nearest(str(value), known)
            raise SpecError(f"{file}: key {key!r} must be one of {choices}; got {value!r}. {near}".rstrip())
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
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if _is_written(value, f)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _is_written(section: Any, f: dataclasses.Field[Any]) -> bool:
    """Whether a value is written: it is not empty, or it is empty and the default is not."""
    value = getattr(section, f.name)
    if value is None:
        return False
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    return value not in ("", [], {}) or value != default


def to_toml(settings: dict[str, Any], prefix: str = "") -> str:
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
    plain = {k: v for k, v in settings.items() if not isinstance(v, dict) and not _is_tables(v)}
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    for key, value in settings.items():
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

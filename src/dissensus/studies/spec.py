"""A study as data: the sections and keys of its TOML file, checked key by key.

Sections are dataclasses. A field's annotation is the type of its value and, by `ValueRange`, its range. `checked_value`
is the only way from a value of a file to a value of a study; options of networks and objectives go through it as well
(`validation`). ``scales`` holds the settings that differ at a scale.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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
    "sharing": "Experiments on members that share weights",
}


class SpecError(ValueError):
    """A study's file is not valid; the message names the file, the key, the value and the nearest fix."""


class ValueRange(typing.NamedTuple):
    """The range of a number, or of each number in a list or table; and the smallest length of a list."""

    low: float = -math.inf
    high: float = math.inf
    length: int = 0
    distinct: bool = False
    """Whether a list must not hold a value twice."""
    single: bool = False
    """Whether the values of a list must be neither lists nor tables."""


Scalar = str | int | float | bool
"""A value that is neither a list nor a table."""
Count = Annotated[int, ValueRange(1)]
MemberCount = Annotated[int, ValueRange(1, 100_000)]
Share = Annotated[float, ValueRange(0, 1)]
NonNegative = Annotated[float, ValueRange(0)]
Values = Annotated[list[Any], ValueRange(length=1, distinct=True, single=True)]
"""The values of an axis of a grid, or of a search."""
Table = dict[str, Any]
LARGEST = 2**63 - 1
"""The largest whole number of a study: that of a tensor."""


@dataclass(frozen=True)
class Members:
    """The networks of an ensemble."""

    network: str
    count: MemberCount = 5
    options: Table = field(default_factory=dict)
    """Arguments of the network's builder, such as ``hidden``."""


@dataclass(frozen=True)
class Objective:
    """The objective of the training."""

    name: str
    loss: str = "cross_entropy"
    pool: Literal["probability", "score", "vote"] = "probability"
    options: Table = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows as a `dissensus.data.Split`."""

    fraction: Share
    by: Literal["class", "chance"] = "class"
    """Whether both parts have the same share of every class."""
    seed: Annotated[int, ValueRange(0)] | None = None
    """Seed of the draw; that of each run, or of the procedure, by default."""


@dataclass(frozen=True)
class Optimisation:
    """Settings of the training; see `dissensus.fit`."""

    epochs: Count = 100
    batch_size: Count = 128
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: NonNegative = 1e-3
    momentum: Share = 0.0
    weight_decay: NonNegative = 0.0
    cut_at: Annotated[list[float], ValueRange(0)] = field(default_factory=list)
    """Shares of the training after which the rate is multiplied by ``cut``."""
    cut: Share = 0.1
    patience: Count | None = None
    validation: Share | HeldOut = 0.0
    """Share of the training rows that are held out: for early stopping, the best weights and methods that choose.

    A table such as ``{fraction = 0.2, by = "class"}`` is a `dissensus.data.Split`."""
    keep: Literal["best", "last"] = "best"
    augment: list[str] = field(default_factory=list)
    examples: Count | None = None
    """Number of training examples that are used, the first ones."""


@dataclass(frozen=True)
class Search:
    """Bayesian optimisation of hyperparameters before the training, for every seed separately."""

    trials: Count = 20
    drawn: Count = 10
    """Trials that are drawn at random before the sampler learns; they are trained together."""
    space: dict[str, Values] = field(default_factory=dict)
    """Names to lists of values: ``lr``, ``batch_size``, ``weight_decay``, ``members``, ``width``, ``depth``."""
    validation: Share = 0.2
    epochs: Count = 200
    patience: Count = 5


@dataclass(frozen=True)
class Evaluation:
    """Measures, and the data they are taken on."""

    measures: list[str] = field(default_factory=list)
    curves: bool = False
    """Whether losses on training and test data are recorded over the epochs."""
    test_fraction: Share = 0.2
    """Share of a table's rows that are test rows."""
    examples: Count | None = None
    """Number of test examples that are used, the first ones."""
    attacked: dict[str, Count] = field(default_factory=dict)
    """Number of examples by attack or suite, the first ones."""
    strong: dict[str, NonNegative] = field(default_factory=dict)
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
    separate: bool = False
    """Whether every line has a panel of its own."""


@dataclass(frozen=True)
class Condition:
    """What must hold in the runs themselves before a statement on them says anything."""

    measure: str
    at: dict[str, Scalar] = field(default_factory=dict)
    """The point of the measure; that of the statement by default."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Expectation:
    """A statement of the paper that can be checked by a number."""

    says: str
    measure: str = ""
    every: str = ""
    """A group, in place of a measure: all of its statements must hold."""
    group: str = ""
    """The group that it is part of."""
    given: list[Condition] = field(default_factory=list)
    """Conditions without which the statement is not comparable, such as that an attack succeeds."""
    at: dict[str, Scalar] = field(default_factory=dict)
    """The point of the measure, such as ``{beta = 1.0}``."""
    than: dict[str, Scalar | list[Scalar]] = field(default_factory=dict)
    """A point to compare it with, of other data where it names ``data``; a list stands for every one of its values."""
    than_measure: str | list[str] = ""
    """A measure to compare it with, or several, at ``than`` or at the same point; the measure itself by default."""
    gain_over: dict[str, Scalar] = field(default_factory=dict)
    """Values are gains over those at the point with these changes, such as ``{method = "baseline"}``."""
    sets: list[str] = field(default_factory=list)
    """Sets that a comparison must hold on, all of them: measures are ``MEASURE_SET``, or ``MEASURE`` for ``""``."""
    along: str = ""
    """An axis along which the measure is ``lowest inside`` or ``highest inside``: at neither end."""
    direction: Literal[
        "", "greater", "less", "similar", "not greater", "not less", "lowest inside", "highest inside"
    ] = ""
    factor: NonNegative = 1.0
    """The smallest factor between the two points."""
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    """The paper's number at ``at``."""
    paper_error: NonNegative = 0.0
    """The standard error that the paper prints with its number."""
    paper_seeds: Annotated[int, ValueRange(0)] = 0
    """Number of runs behind the paper's number; 0 where it is not told."""
    tolerance: NonNegative = 0.0
    """Of the paper's number; or a share of the other value, for similar, not greater and not less."""
    data: list[str] = field(default_factory=list)
    """The data that it is about; all by default."""


@dataclass(frozen=True)
class Spec:
    """A study."""

    name: str
    title: str
    reference: str
    claim: str
    data: Annotated[list[str], ValueRange(length=1, distinct=True)]
    procedure: str = "train"
    uses: str = ""
    """The study whose trainings this one measures."""
    note: str = ""
    members: Members | None = None
    objective: Objective | None = None
    grid: dict[str, Values] = field(default_factory=dict)
    optimisation: Optimisation = field(default_factory=Optimisation)
    search: Search | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    figure: FigureSection | None = None
    cost: dict[str, dict[str, NonNegative]] = field(default_factory=dict)
    """Minutes per scale: ``{cpu = 5}`` or ``{gpu = 3}``."""
    expect: list[Expectation] = field(default_factory=list)
    scales: dict[str, Table] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    """Data that the paper does not show here: statements on it are judged in a reduced setting."""
    by_data: dict[str, Table] = field(default_factory=dict)
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
        return fingerprint((self.settings(), foreign))[:12]

    def settings(self) -> dict[str, Any]:
        """Plain values of everything that decides what is computed."""
        return {key: value for key, value in self.to_dict().items() if key not in _TEXTS}

    def digest(self, foreign: str = "", procedures: Mapping[str, int] | None = None) -> str:
        """A checksum of the settings and of the versions of procedures and library; names the folder of a run."""
        return fingerprint((self.settings_fingerprint(foreign), dict(procedures or {}), dissensus.__version__))[:12]


_TEXTS = ("title", "reference", "claim", "note", "cost", "expect", "scales", "figure", "beside")


def parse(settings: dict[str, Any], name: str, file: str) -> Spec:
    """A study from the content of its file."""
    paper = name.split("/")[0]
    if paper not in PAPERS:
        raise SpecError(f"{file}: studies lie in a folder of one of {', '.join(PAPERS)}; got {paper!r}.")
    if settings.get("name", name) != name:
        raise SpecError(f"{file}: key 'name' must not be set: the name of a study is that of its file, {name}.")
    spec = _section({**settings, "name": name}, Spec, file, "")
    for scale, other in spec.scales.items():
        if scale not in SCALES:
            raise SpecError(f"{file}: key 'scales.{scale}' is not known.{_near(scale, SCALES)}")
        _section(merged(settings, other) | {"name": name}, Spec, file, f"scales.{scale}")
    _check_by_data(spec, settings, file)
    _check_cost(spec, file)
    _check_statements(spec, file)
    return spec


def _check_statements(spec: Spec, file: str) -> None:
    """Refuse statements that cannot be judged: without a measure, without anything to hold it against."""
    groups = tuple(dict.fromkeys(e.group for e in spec.expect if e.group))
    for number, expectation in enumerate(spec.expect):
        key = f"expect[{number}]"
        if bool(expectation.measure) == bool(expectation.every):
            raise SpecError(f"{file}: key '{key}.measure' is missing; only a statement with 'every' has none.")
        bounds = [bound for bound in (expectation.low, expectation.high) if bound is not None]
        if expectation.measure and expectation.paper is None and not expectation.direction and not bounds:
            raise SpecError(
                f"{file}: key '{key}' must have 'paper', 'low', 'high' or 'direction': nothing else is judged."
            )
        if expectation.paper_seeds == 1:
            raise SpecError(f"{file}: key '{key}.paper_seeds' is 1: one run has no standard error; leave it out.")
        if expectation.every and (expectation.every not in groups or expectation.group):
            raise SpecError(
                f"{file}: key '{key}.every' must be the group of other statements; got {_shown(expectation.every)}."
                f"{_near(expectation.every, groups) if groups else ''}"
            )


def _check_by_data(spec: Spec, settings: dict[str, Any], file: str) -> None:
    for data, other in spec.by_data.items():
        _section(merged(settings, other) | {"name": spec.name}, Spec, file, f"by_data.{data}")


def _check_cost(spec: Spec, file: str) -> None:
    for scale, minutes in spec.cost.items():
        if scale not in SCALES or not minutes.keys() <= {"cpu", "gpu"}:
            raise SpecError(f"{file}: key 'cost.{scale}' must be minutes such as {{cpu = 5}}; got {_shown(minutes)}.")


def changed_file(file: str, changes: Mapping[str, Any]) -> str:
    """The name of a file in messages, with the settings that `--set` has changed.

    >>> changed_file("collusion/figure-2.toml", {"grid.seed": [3]})
    'collusion/figure-2.toml with --set grid.seed=[3]'
    """
    expressions = [f"--set {key}={_shown(value, toml_value)}" for key, value in changes.items()]
    return f"{file} with {' '.join(expressions)}" if changes else file


def resolved(spec: Spec, scale: str, changes: dict[str, Any], file: str) -> Spec:
    """A study at a scale, with changes by dotted keys."""
    if scale not in spec.scales:
        near = checks.nearest(scale, spec.scales)
        raise SpecError(
            f"{spec.name} has no scale {scale!r}; it has {', '.join(spec.scales) or 'none'}. {near}".rstrip()
        )
    settings = merged(spec.to_dict(), spec.scales[scale])
    if "by_data" not in spec.scales[scale]:
        for path in _paths(spec.scales[scale]):
            _remove_by_data(settings, path)
    file = changed_file(file, changes)
    for key, value in changes.items():
        if key.split(".")[0] in ("name", "scales"):
            raise SpecError(f"{file}: key {key!r} cannot be changed by --set; change it in a file of your own.")
        if not all(key.split(".")):
            raise SpecError(f"{file}: --set {key}: a part of the key is empty; write section.key=value.")
        place = settings
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise SpecError(f"{file}: --set {key}: {part!r} is no section.")
        place[last] = value
        _remove_by_data(settings, [*path, last])
    settings.pop("scales", None)
    changed = _section({**settings, "name": spec.name}, Spec, file, "")
    _check_by_data(changed, settings, file)
    _check_cost(changed, file)
    return changed


def _paths(settings: dict[str, Any]) -> Iterator[list[str]]:
    """Paths of all values, without those of sections."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from ([key, *rest] for rest in _paths(value))
        else:
            yield [key]


def _remove_by_data(settings: dict[str, Any], path: list[str]) -> None:
    """Remove a key from the settings of single data sets: settings of a scale, and changed ones, hold for all data."""
    by_data = settings.get("by_data")
    for place in by_data.values() if isinstance(by_data, dict) else ():
        for part in path[:-1]:
            place = place.get(part) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(path[-1], None)


def on_data(spec: Spec, data: str, file: str = "") -> Spec:
    """A study with the settings of one of its data sets; ``file`` is named in messages."""
    if data not in spec.by_data:
        return spec
    settings = merged(spec.to_dict(), spec.by_data[data])
    return _section({**settings, "name": spec.name}, Spec, file or f"{spec.name}.toml", f"by_data.{data}")


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
    hints = _type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in settings.items():
        at = f"{key}.{name}" if key else name
        if name not in fields:
            raise SpecError(f"{file}: key {at!r} is not known.{_near(name, tuple(fields))}")
        values[name] = checked_value(value, hints[name], at, file)
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"{file}: key {f'{key}.' if key else ''}{missing[0]} is missing.")
    return kind(**values)


def checked_value(value: Any, hint: Any, key: str, file: str, limits: ValueRange | None = None) -> Any:
    """A value of a file as an annotation describes it, or a `SpecError` that names the file and the key.

    Annotations are those of sections, and of parameters of networks and objectives: text, numbers, ``Literal``, lists
    and tables of these, and unions. Types that no file can hold, such as tensors and functions, are passed over in
    unions; where nothing else is left, the value is returned as it is.

    >>> checked_value(3, float, "lr", "a.toml"), checked_value([3], list[int] | None, "widths", "a.toml")
    (3.0, [3])
    >>> checked_value("x", int, "members.options.width", "a.toml")
    Traceback (most recent call last):
    dissensus.studies.spec.SpecError: a.toml: key 'members.options.width' must be a whole number; got text 'x'.
    """
    if typing.get_origin(hint) is Annotated:
        hint, *notes = typing.get_args(hint)
        limits = next((note for note in notes if isinstance(note, ValueRange)), limits)
    limits = limits or ValueRange()
    options = _plain_options(hint)
    if not options:
        return value
    option = next((option for option in options if _fits(value, option)), None)
    if option is None:
        _refuse_type(value, options, key, file)
    if typing.get_origin(option) is Annotated:
        return checked_value(value, option, key, file)
    if dataclasses.is_dataclass(option):
        return _section(value, option, file, key)
    if isinstance(value, list):
        return _checked_list(value, option, key, file, limits)
    if isinstance(value, dict):
        inner = (typing.get_args(option) or (str, Any))[1]
        return {name: checked_value(item, inner, f"{key}.{name}", file, limits) for name, item in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(value, key, file, limits)
        return float(value) if option is float else value
    return value


def _checked_list(values: list[Any], hint: Any, key: str, file: str, limits: ValueRange) -> list[Any]:
    inner = Scalar if limits.single else (typing.get_args(hint) or (Any,))[0]
    if len(values) < limits.length:
        raise SpecError(f"{file}: key {key!r} must be a list of values; got an empty list.")
    checked = [checked_value(item, inner, f"{key}[{i}]", file, limits) for i, item in enumerate(values)]
    if limits.distinct and len(set(map(repr, checked))) < len(checked):
        raise SpecError(f"{file}: key {key!r} must not hold a value twice; got {_shown(values)}.")
    return checked


def _check_range(value: float, key: str, file: str, limits: ValueRange) -> None:
    if isinstance(value, float) and not math.isfinite(value) and limits.low == -math.inf:
        raise SpecError(f"{file}: key {key!r} must be a finite number; got {value!r}.")
    low = max(limits.low, -LARGEST if isinstance(value, int) else -math.inf)
    high = min(limits.high, LARGEST) if isinstance(value, int) or value == math.inf else limits.high
    if low <= value <= high:
        return
    words = f"between {low:g} and {high:g}"
    if limits.high == math.inf:
        words = f"at most {high:g}" if value > high else f"at least {low:g}"
    raise SpecError(f"{file}: key {key!r} must be {words}; got {_shown(value)}.")


def _refuse_type(value: Any, options: Sequence[Any], key: str, file: str) -> typing.NoReturn:
    words = [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]
    if words:
        choices = ", ".join(repr(word) for word in words if word)
        near = checks.nearest(str(value), words)
        raise SpecError(f"{file}: key {key!r} must be one of {choices}; got {_shown(value)}. {near}".rstrip())
    if all(dataclasses.is_dataclass(option) for option in options):
        raise SpecError(f"{file}: key {key!r} must be a section; got {_kind(value)}.")
    bases = list(dict.fromkeys(_base(option) for option in options))
    wanted = "a single value" if set(bases) == set(typing.get_args(Scalar)) else " or ".join(_TYPES[b] for b in bases)
    raise SpecError(f"{file}: key {key!r} must be {wanted}; got {_kind(value)} {_shown(value)}.")


_TYPES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}
_LISTS = (list, tuple, Sequence)


_type_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


@functools.cache
def _plain_options(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation that a file can hold."""
    return tuple(option for option in _options(hint) if _base(option) is not None)


def _options(hint: Any) -> list[Any]:
    """The alternatives of a union, or the annotation itself."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return [inner for part in typing.get_args(hint) for inner in _options(part)] if is_union else [hint]


@functools.cache
def _base(option: Any) -> Any:
    """The type of TOML that an annotation stands for; None where a file cannot hold it."""
    if typing.get_origin(option) is Annotated:
        return _base(_options(typing.get_args(option)[0])[0])
    if typing.get_origin(option) is Literal:
        return str
    if isinstance(option, type) and dataclasses.is_dataclass(option):
        return dict
    origin = typing.get_origin(option) or option
    if origin in _LISTS:
        return list
    return origin if origin in (str, int, float, bool, dict) else None


def _fits(value: Any, option: Any) -> bool:
    """Whether a value has the type of an annotation; whole numbers are numbers, and booleans are not."""
    if typing.get_origin(option) is Literal:
        return isinstance(value, str) and value in typing.get_args(option)
    base = _base(option)
    if isinstance(value, bool) or base is bool:
        return isinstance(value, bool) and base is bool
    return isinstance(value, int | float) if base is float else isinstance(value, base)


def _kind(value: object) -> str:
    return _TYPES.get(type(value), type(value).__name__)


_MOST_SHOWN = 100


def _shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """A value for a message, cut where it is long."""
    text = form(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


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

"""Typed results of studies, and how they are written as JSON.

A run of a study leaves a `Report`: one `Row` per trained ensemble or computed point. A `Summary` is what is shown and
shipped: one `Point` per setting, with means over seeds, and the `Verdict` on every statement of the paper.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from dissensus.attacks.suites import PUBLISHED
from dissensus.studies.shifted_datasets import SETS
from dissensus.studies.spec import Spec, parse

ATTACKS = (*PUBLISHED, "apgd", "square")
"""Attacks that names of measures may hold."""
SUITES = ("standard", "adaptive")
WORST_CASE = "worst_case"
_NUMBER = r"\d+(?:\.\d+)?"
_UNDER_ATTACK = re.compile(
    rf"(?:(accuracy|fooled|transfer|true_positive_rate|auroc_(\w+?))_)?(targeted_)?({'|'.join(ATTACKS)})(?:_({_NUMBER}))?"
)
_SUITE = re.compile(rf"({'|'.join(SUITES)})_({_NUMBER})")
_PARAMETER = re.compile(rf"(codependence)_({_NUMBER})")
_ON_CURVE = re.compile(rf"(\w+)@({_NUMBER})")


@dataclass(frozen=True)
class Measure:
    """What a measure's name says. `str` gives the name back.

    | name | fields |
    |---|---|
    | ``accuracy`` | kind |
    | ``codependence_0.2`` | kind, parameter |
    | ``accuracy_corrupted-5`` | kind, dataset |
    | ``auroc_mean_energy_mnist`` | kind, score, dataset |
    | ``accuracy_pgd_0.01`` | kind, attack, parameter |
    | ``auroc_mean_energy_pgd``, ``fooled_pgd`` | kind, score, attack |
    | ``transfer_targeted_pgd_0.05`` | kind, targeted, attack, parameter |
    | ``standard_0.01``, ``adaptive_0.01`` | kind ``"worst_case"``, attack (the suite), parameter |
    | ``train_diversity@0.1`` | kind (a curve over the epochs), share |
    """

    kind: str
    attack: str = ""
    """An attack or, for the kind ``"worst_case"``, a suite of attacks."""
    parameter: str = ""
    """As written: ε of a bounded attack, the parameter of another one, the share of members that are dropped."""
    dataset: str = ""
    """The data it is taken on where that is not the test data."""
    score: str = ""
    """The out-of-distribution score of the kind ``"auroc"``."""
    targeted: bool = False
    share: str = ""
    """As written: the share of the epochs at whose end a curve is read."""

    @classmethod
    def parse(cls, name: str) -> "Measure":
        """The fields of a name. A name without known parts is a kind.

        >>> Measure.parse("accuracy_pgd_0.01")
        Measure(kind='accuracy', attack='pgd', parameter='0.01', dataset='', score='', targeted=False, share='')
        >>> Measure.parse("auroc_mean_energy_corrupted-5").score, Measure.parse("auroc_mean_energy_corrupted-5").dataset
        ('mean_energy', 'corrupted-5')
        >>> Measure.parse("adaptive_0.1").attack, Measure.parse("accuracy_top5").kind
        ('adaptive', 'accuracy_top5')
        >>> Measure.parse("train_error@0.1").kind, Measure.parse("train_error@0.1").share
        ('train_error', '0.1')
        """
        if match := _UNDER_ATTACK.fullmatch(name):
            before, score, targeted, attack, parameter = match.groups()
            kind = "auroc" if score else before or ""
            return cls(kind, attack, parameter or "", score=score or "", targeted=bool(targeted))
        if match := _SUITE.fullmatch(name):
            return cls(WORST_CASE, match[1], match[2])
        if match := _PARAMETER.fullmatch(name):
            return cls(match[1], parameter=match[2])
        if match := _ON_CURVE.fullmatch(name):
            return cls(match[1], share=match[2])
        dataset = max((known for known in SETS if name.endswith(f"_{known}")), key=len, default="")
        kind = name.removesuffix(f"_{dataset}") if dataset else name
        if dataset and kind.startswith("auroc_"):
            return cls("auroc", dataset=dataset, score=kind.removeprefix("auroc_"))
        if dataset and (match := _PARAMETER.fullmatch(kind)):
            return cls(match[1], parameter=match[2], dataset=dataset)
        return cls(kind, dataset=dataset)

    def __str__(self) -> str:
        kind = "" if self.kind == WORST_CASE else self.kind
        targeted = "targeted" if self.targeted else ""
        name = "_".join(filter(None, (kind, self.score, targeted, self.attack, self.parameter, self.dataset)))
        return f"{name}@{self.share}" if self.share else name


class Estimate(NamedTuple):
    """A measure over seeds. Mean and standard error are None where no seed has a finite value."""

    mean: float | None
    error: float | None
    seeds: int
    values: Sequence[float | None] | None = None
    """By seed, in the order of the point's seeds; None in results of earlier releases."""

    def to_json(self) -> list[Any]:
        """Mean, error and number of seeds, and the values where there are several."""
        plain: list[Any] = [self.mean, self.error, self.seeds]
        return plain if self.values is None else [*plain, list(self.values)]


class Curve(NamedTuple):
    """Means over seeds and their standard errors, at every place of a curve."""

    mean: Sequence[float | None]
    error: Sequence[float | None]


class AuditNote(NamedTuple):
    """The audit's verdict on one ensemble, and its reasons in words."""

    verdict: str
    reasons: Sequence[str]


def _stored(key: str = "", *, required: bool = False) -> Any:
    """A field that is left out of JSON where it is None; ``key`` where JSON has another word."""
    return field(metadata={"key": key}) if required else field(default=None, metadata={"key": key})


Matrices = Mapping[str, Sequence[Sequence[float | None]]]


@dataclass(frozen=True)
class Row:
    """One ensemble, or one computed point, with its measures."""

    data: str
    point: Mapping[str, Any]
    """Values of the grid's axes, but the seed."""
    seed: int
    measures: Mapping[str, float]
    run: int | None = None
    """Number of the trained ensemble within its unit; names its files. None where nothing was trained."""
    status: str | None = None
    """Of the training: ``"done"``, ``"stopped early"`` or ``"failed"``."""
    epochs: int | None = None
    members: int | None = None
    objective: str | None = None
    hyperparameters: Mapping[str, Any] | None = None
    """Those that a search has chosen."""
    train_error: float | None = None
    seconds_per_epoch: float | None = None
    curves: Mapping[str, Sequence[float]] | None = None
    audit: AuditNote | None = None
    pairs: Sequence[Sequence[float]] | None = None
    """Accuracy and diversity of every pair of members."""
    pictures: Sequence[Mapping[str, Any]] | None = _stored("shown")
    feature_map: Sequence[Any] | None = _stored("map")
    """Every member's features in the plane: ``[x, y, class]`` per example."""
    matrices: Matrices | None = None
    flags: Mapping[str, Sequence[str]] | None = None
    """Signs that an attack was too weak, by suite."""
    examples: Mapping[str, int] | None = None
    """Number of examples that a measure is taken on, where it is not all."""
    verdict_counts: Mapping[str, Mapping[str, int]] | None = _stored("said")
    """How often the audit gives which verdict, by evidence."""
    ensembles: Sequence[Mapping[str, Any]] | None = _stored("each")
    """The ensembles that a pooled row stands for."""
    summary: str | None = None
    """Name of a pooled row."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Values of procedures from outside."""

    def value(self, axis: str) -> Any:
        """The row's value on an axis: of the grid, or one of its fields; None where it has none."""
        return self.point[axis] if axis in self.point else getattr(self, axis, None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; axes of the grid lie beside the other fields."""
        return {"data": self.data, **self.point, "seed": self.seed, **_plain_fields(self, self.point), **self.extras}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], axes: Sequence[str]) -> "Row":
        """A row from plain values; ``axes`` are those of the study's grid."""
        keys = _keys(cls)
        known = {name: values[key] for name, key in keys.items() if key in values}
        if "audit" in known:
            known["audit"] = AuditNote(known["audit"]["verdict"], known["audit"]["reasons"])
        point = {axis: values[axis] for axis in axes if axis in values and axis not in ("seed", "data")}
        extras = {
            key: value
            for key, value in values.items()
            if key not in (*axes, *keys.values(), "data", "seed", "measures")
        }
        return cls(values["data"], point, values.get("seed", 0), values["measures"], **known, extras=extras)


@dataclass(frozen=True)
class Point:
    """One setting on one data set: rows that differ in their seeds only."""

    data: str
    axes: Mapping[str, Any]
    """Values of the grid's axes, but the seed."""
    measures: Mapping[str, Estimate]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    seeds: Sequence[int] | None = None
    """In the order of the values of measures; None in results of earlier releases."""
    verdict_counts: Mapping[str, Mapping[str, int]] | None = _stored("said")
    audit_verdicts: Mapping[str, int] | None = _stored("audited")
    """Number of seeds by the audit's verdict."""
    audit_reasons: Sequence[str] | None = None
    """Where there is one seed."""
    pictures: Sequence[Mapping[str, Any]] | None = _stored("shown")
    feature_map: Sequence[Any] | None = _stored("map")
    pairs: Sequence[Sequence[float | None]] | None = None
    matrices: Matrices | None = None
    examples: Mapping[str, int] | None = None
    flags: Mapping[str, Sequence[str]] | None = None

    def value(self, axis: str) -> Any:
        """The point's value on an axis, ``"data"`` included; None where it has none."""
        return self.data if axis == "data" else self.axes.get(axis)

    def mean(self, measure: str) -> float | None:
        """A measure's mean over seeds; None where there is none."""
        return self.measures[measure].mean if measure in self.measures else None

    def to_json(self) -> dict[str, Any]:
        """Plain values; axes of the grid lie beside the other fields."""
        curves = {name: {"mean": list(curve.mean), "error": list(curve.error)} for name, curve in self.curves.items()}
        return {
            "data": self.data,
            **self.axes,
            "measures": {name: estimate.to_json() for name, estimate in self.measures.items()},
            **_plain_fields(self, (*self.axes, "curves", "measures")),
            **({"curves": curves} if curves else {}),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], axes: Sequence[str]) -> "Point":
        """A point from plain values."""
        known = {name: values[key] for name, key in _keys(cls).items() if key in values and name not in axes}
        known["curves"] = {name: Curve(**curve) for name, curve in values.get("curves", {}).items()}
        measures = {name: Estimate(*estimate) for name, estimate in values["measures"].items()}
        return cls(values["data"], {axis: values.get(axis) for axis in axes if axis != "data"}, measures, **known)


def _keys(kind: type[Row] | type[Point]) -> dict[str, str]:
    """Optional fields and their words in JSON."""
    special = ("data", "point", "axes", "seed", "measures", "extras")
    return {f.name: f.metadata.get("key") or f.name for f in dataclasses.fields(kind) if f.name not in special}


def _plain_fields(result: Row | Point, without: Any) -> dict[str, Any]:
    values = {key: getattr(result, name) for name, key in _keys(type(result)).items() if name not in without}
    plain = {key: value for key, value in values.items() if value is not None}
    if isinstance(result, Row):
        plain["measures"] = dict(result.measures)
        if result.audit is not None:
            plain["audit"] = {"verdict": result.audit.verdict, "reasons": list(result.audit.reasons)}
    return plain


@dataclass(frozen=True)
class Verdict:
    """One expectation, judged on one data set. A run that differs from the paper's setting is a reduced setting."""

    says: str
    data: str
    verdict: str
    paper: str
    ours: float | None
    low: float | None
    """The interval of ours, or of the difference where two points are ``compared``."""
    high: float | None
    difference: float | None
    """Ours less the paper's number, or less the value at the point of comparison."""
    seeds: int
    compared: bool = False
    """Whether two values were compared: the interval is then of their paired difference."""
    statement: int = 0
    """Number of the expectation in its study; the first is that of the study's claim."""
    differences: Sequence[str] = ()
    """How the run differs from the paper's setting."""
    sums_up: bool = False
    """Whether it sums up other statements, and is not counted beside them."""

    @property
    def setting(self) -> Literal["paper", "reduced"]:
        """Whether the statement was judged in the setting that it speaks of."""
        return "reduced" if self.differences else "paper"


@dataclass(frozen=True)
class Provenance:
    """How a result was made."""

    version: str
    """Of this library."""
    python: str
    packages: Mapping[str, str]
    hardware: str
    seeds: Sequence[int]
    networks: int
    searched_networks: int
    """Networks that were trained in searches of hyperparameters."""
    seconds: float
    peak_mib: float | None
    data: Sequence[Mapping[str, Any]]
    device: str = "cpu"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were changed by hand, by dotted keys."""
    fingerprint: str = ""
    """Of the settings; empty in results of earlier releases."""
    procedures: Mapping[str, int] = field(default_factory=dict)
    """Versions of the procedures that made it, by name; empty in results of earlier releases."""
    foreign: str = ""
    """Fingerprint of procedures, measures and data from outside of the package."""
    source: str = ""
    """Digest of the library's source; empty in results of earlier releases."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, without those that there are not."""
        optional = ("changes", "fingerprint", "procedures", "foreign", "source")
        return {key: value for key, value in asdict(self).items() if value or key not in optional}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Provenance":
        """Plain values as they are written; unknown keys are left out."""
        return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})


@dataclass(frozen=True)
class Report:
    """All rows of a run, with its settings."""

    study: str
    scale: str
    spec: Spec
    provenance: Provenance
    rows: Sequence[Row]
    outputs: str = "."
    """Folder with member outputs, relative to that of the report."""
    differences: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By data set, how the run differs from the study at scale paper, when it was made."""

    def to_json(self) -> dict[str, Any]:
        """What ``report.json`` holds."""
        return {
            "study": self.study,
            "scale": self.scale,
            "spec": self.spec.to_dict(),
            "made": self.provenance.to_json(),
            "outputs": self.outputs,
            **({"differences": dict(self.differences)} if self.differences else {}),
            "rows": [row.to_json() for row in self.rows],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Report":
        """A report from what ``report.json`` holds."""
        settings = {key: value for key, value in values["spec"].items() if key != "name"}
        spec = parse(settings, values["study"], "report.json")
        rows = [Row.from_json(row, list(spec.grid)) for row in values["rows"]]
        provenance = Provenance.from_json(values["made"])
        outputs, differences = values.get("outputs", "."), values.get("differences", {})
        return cls(values["study"], values["scale"], spec, provenance, rows, outputs, differences)


@dataclass(frozen=True)
class Summary:
    """A run in short: settings, points and verdicts. Small enough to ship."""

    study: str
    scale: str
    provenance: Provenance
    settings: Mapping[str, Any]
    """Everything that decides what is computed, as plain values."""
    axes: Sequence[str]
    """``"data"`` and the axes of the grid, but the seed."""
    points: Sequence[Point]
    verdicts: Sequence[Verdict] = ()
    """Judged by the statements of today; not part of the file."""
    origin: str = ""
    """Where it comes from, in words; empty for a run of the study as it is today. Not part of the file."""
    stale: str = ""
    """Why today's study would not give this result, in words; empty where it would. Not part of the file."""

    def to_json(self) -> dict[str, Any]:
        """What a shipped file holds."""
        return {
            "study": self.study,
            "scale": self.scale,
            "made": self.provenance.to_json(),
            "settings": dict(self.settings),
            "axes": list(self.axes),
            "points": [point.to_json() for point in self.points],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Summary":
        """A summary from what a shipped file holds, without verdicts."""
        return cls(
            values["study"],
            values["scale"],
            Provenance.from_json(values["made"]),
            values["settings"],
            values["axes"],
            [Point.from_json(point, values["axes"]) for point in values["points"]],
        )

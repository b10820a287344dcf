"""Ensembles whose correct verdict is known from how they were made, and the audit's verdicts on them.

`CASES` lists every case with its allowed verdicts, by the evidence that the audit gets: outputs on test data alone,
with outputs on training data, with those of a reference. The lists do not depend on the audit's rules. For members
trained at a β between 0 and 1, or to disagree by LDR or ADP, no verdict is known to be correct: their verdicts are
recorded, and not called right or wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from dissensus import masks, objectives
from dissensus.auditing import Audit, audit
from dissensus.axes import LossParts
from dissensus.studies import case_makers as makers
from dissensus.studies.case_makers import TWIN, Case, CaseFacts, Materials, NetworkOutputs
from dissensus.studies.datasets import GROUPS, SYNTHETIC_SIZED, StudyData, load
from dissensus.studies.registry import build_of
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import sweep

Evidence = Literal["alone", "train", "reference"]
EVIDENCE: tuple[Evidence, ...] = ("alone", "train", "reference")
Make = Callable[[Materials], Case | None]

# Trainings of networks


class Training(NamedTuple):
    """How an ensemble of networks is trained."""

    objective: Literal["score", "probability", "ldr", "adp", "masksembles"]
    """Of `augmented`, how outputs are pooled; or another objective."""
    value: float
    """β of `augmented` and ADP, λ of LDR."""
    rate: float = 1.0
    """Times the study's learning rate."""
    classes: int = 0
    """How many the data must have, at least."""


BETWEEN = {f"β = {beta:g}": Training("score", beta) for beta in (0.25, 0.5, 0.75, 0.9)}
LDR = {f"LDR, λ = {strength:g}": Training("ldr", strength, classes=2) for strength in (0.1, 5.0)}
ADP = {"ADP, α = 2, β = 0.5": Training("adp", 0.5, classes=3)}
TRAININGS: dict[str, Training] = {
    "alone": Training("score", 0.0),
    "alone, under-trained": Training("score", 0.0, 0.05),
    "alone, over-trained": Training("score", 0.0, 5.0),
    "jointly": Training("score", 1.0),
    "jointly, over-trained": Training("score", 1.0, 5.0),
    "jointly, probabilities": Training("probability", 1.0, classes=2),
    "masksembles": Training("masksembles", 0.0),
    **BETWEEN,
    **LDR,
    **ADP,
}
"""Trainings of networks by name."""


def materials(
    spec: Spec, data: StudyData, seed: int, members: int, trainings: Iterable[str], twins: Iterable[str]
) -> Materials:
    """Outputs of all networks that cases need, with the seed and with that of the twin; stacked where possible."""
    points = [*((name, seed) for name in trainings), *((name, seed + TWIN) for name in twins)]
    outputs: dict[tuple[str, int], NetworkOutputs] = {}
    for objective in dict.fromkeys(TRAININGS[name].objective for name, _ in points):
        chosen = [point for point in points if TRAININGS[point[0]].objective == objective]
        trained = _trained(spec, data, members, [(TRAININGS[name], at) for name, at in chosen])
        outputs |= zip(chosen, trained, strict=True)
    networks, references = (
        {name: result for (name, at), result in outputs.items() if at == wanted} for wanted in (seed, seed + TWIN)
    )
    return Materials(data, seed, members, networks, references)


def _trained(spec: Spec, data: StudyData, members: int, points: list[tuple[Training, int]]) -> list[NetworkOutputs]:
    """Outputs of trainings with one objective, by training and seed."""
    arguments = training_arguments(spec.optimisation)
    kind = points[0][0].objective
    loss = "cross_entropy" if _classes(data) else "squared_error"
    build: Callable[..., nn.Module] = build_of(spec, data)
    known: dict[str, tuple[Callable[..., LossParts], str]] = {
        "score": (partial(objectives.augmented, loss=loss, pool="score"), "beta"),
        "probability": (partial(objectives.augmented, loss=loss, pool="probability"), "beta"),
        "ldr": (objectives.ldr, "strength"),
        "adp": (partial(objectives.adp, alpha=2.0), "beta"),
        "masksembles": (partial(objectives.independent, loss=loss), ""),
    }
    objective, name = known[kind]
    if kind == "masksembles":  # as many masks as members, over a network whose members are as wide as the others
        build, members = partial(_masked, build, members), 1
    grid = [
        {**({name: training.value} if name else {}), "lr": training.rate * arguments["lr"], "seed": seed}
        for training, seed in points
    ]
    swept = sweep(build, data.train, objective, grid=grid, members=members, **arguments)
    failed = [outcome.reason for outcome in swept.outcomes if outcome.status == "failed"]
    if failed:  # a failed training is not a case
        raise RuntimeError(f"training failed on {data.name}: {'; '.join(failed)}")
    runs = [swept.run(i) for i in range(len(swept))]
    return [NetworkOutputs(run.predict(data.test[0]).numpy(), run.predict(data.train[0]).numpy()) for run in runs]


def _masked(build: Callable[[], nn.Module], count: int) -> nn.Module:
    return masks.convert(build(), count, 2.0, widen=True)


def _classes(data: StudyData) -> int:
    return 0 if data.train[1].is_floating_point() else data.outputs


# Cases


class Known(NamedTuple):
    """A case, and its allowed verdicts."""

    make: Make
    truth: str
    """In a word: sound, alike, unskilled, dominated, redundant, collusive, ambiguous, unknown."""
    allowed: Mapping[Evidence, tuple[str, ...]]
    """By evidence; empty where the correct verdict is unknown."""
    trainings: tuple[str, ...] = ()
    """Networks that it is made from."""
    twins: tuple[str, ...] = ()
    """Networks whose twins it needs."""
    fixed_count: int | None = None
    """Its number of members, where it does not follow the study."""
    least: int = 2
    """The smallest number of members."""
    task: str = ""
    """The only task that it applies to."""
    weak: bool = False
    """Whether its members are weak by design: then `undecided` is allowed too."""


def _case(
    make: Make,
    truth: str,
    *allowed: str,
    alone: tuple[str, ...] = (),
    train: tuple[str, ...] = (),
    networks: tuple[str, ...] = (),
    twins: tuple[str, ...] = (),
    **more: Any,
) -> Known:
    """A case with the same allowed verdicts for all evidence, and more of them with less evidence."""
    by = {"alone": (*allowed, *alone), "train": (*allowed, *train), "reference": allowed}
    return Known(make, truth, by, networks, twins, **more)  # pyright: ignore[reportArgumentType]


def _network(name: str, truth: str, *allowed: str, pool: Any = "score", of: str = "", **more: Any) -> Known:
    make: Any = partial(makers.network, name, pool=pool, alone=of)
    return _case(make, truth, *allowed, networks=(name,), twins=(of or name,), **more)


def _fitted(build: Any, truth: str, *allowed: str, votes: bool = False, **more: Any) -> Known:
    make: Any = partial(makers.estimators, build, votes=votes)
    return _case(make, truth, *allowed, **{"task": "classification" if votes else "", **more})


def _put_on(make: Any, truth: str, *allowed: str, **more: Any) -> Known:
    return _case(make, truth, *allowed, networks=("alone",), twins=("alone",), **more)


SOUND = "sound"
COLLUSIVE = "collusive"
ANY_BUT_UNSKILLED = ("healthy", "collusive", "dominated", "redundant", "undecided")
HIDDEN: Any = {"alone": ("undecided", "healthy")}
"""Verdicts that are allowed where test outputs alone cannot show collusion."""

CASES: dict[str, Known] = {
    # Members trained alone
    "networks alone": _network("alone", SOUND, "healthy"),
    "networks alone, probabilities": _network("alone", SOUND, "healthy", pool="probability", task="classification"),
    "networks alone, under-trained": _network("alone, under-trained", "alike", "healthy", "redundant", weak=True),
    "networks alone, over-trained": _network("alone, over-trained", SOUND, "healthy"),
    "masksembles": _network("masksembles", SOUND, "healthy"),
    **{
        f"forest of {trees}": _fitted(partial(makers.forest, trees=trees), SOUND, "healthy", fixed_count=trees)
        for trees in (5, 50, 100)
    },
    **{
        f"forest of {trees}, votes": _fitted(
            partial(makers.forest, trees=trees), SOUND, "healthy", votes=True, fixed_count=trees, weak=trees == 5
        )
        for trees in (5, 50, 100)
    },
    **{
        f"forest, depth {depth}{', votes' * votes}": _fitted(
            partial(makers.forest, max_depth=depth), SOUND, "healthy", votes=votes, weak=True
        )
        for depth in (1, 2, 4)
        for votes in (False, True)
    },
    **{
        f"extra trees of one feature, depth {depth}{', votes' * votes}": _fitted(
            partial(makers.forest, extra=True, max_depth=depth, max_features=1),
            SOUND,
            "healthy",
            votes=votes,
            weak=True,
        )
        for depth in (1, 2, 3)
        for votes in (False, True)
    },
    "bagged linear models": _fitted(partial(makers.bagging, of="linear"), "alike", "healthy", "redundant"),
    "bagged nearest neighbours": _fitted(partial(makers.bagging, of="knn"), "alike", "healthy", "redundant"),
    "bagged trees": _fitted(partial(makers.bagging, of="tree"), SOUND, "healthy"),
    "trees on halves": _fitted(partial(makers.bagging, of="tree", max_samples=0.5, bootstrap=False), SOUND, "healthy"),
    "random subspaces of trees": _fitted(
        partial(makers.bagging, of="tree", max_features=0.5, bootstrap=False), SOUND, "healthy", weak=True
    ),
    "random subspaces of linear models": _fitted(
        partial(makers.bagging, of="linear", max_features=0.5, bootstrap=False), SOUND, "healthy", weak=True
    ),
    "linear models on shards": _fitted(makers.shards, SOUND, "healthy", weak=True),
    "trees on shards": _fitted(partial(makers.shards, of="tree"), SOUND, "healthy", weak=True),
    "unbiased models on shards": _case(makers.unbiased_shards, SOUND, "healthy", weak=True),
    "families of models": _fitted(makers.heterogeneous, SOUND, "healthy", "dominated", fixed_count=6),
    **{
        f"few-shot, {rows} rows, {of}": _fitted(partial(makers.few_shot, rows=rows, of=of), SOUND, "healthy", weak=True)
        for rows, of in ((10, "ridge"), (20, "ridge"), (30, "tree"))
    },
    "imbalanced forest of 50": _case(
        partial(makers.imbalanced, partial(makers.forest, trees=50)),
        SOUND,
        "healthy",
        task="classification",
        fixed_count=50,
        weak=True,
    ),
    "balanced trees": _case(makers.balanced_trees, SOUND, "healthy", task="classification", fixed_count=20, weak=True),
    "stumps of AdaBoost, votes": _fitted(
        makers.adaboost,
        "ambiguous",
        "healthy",
        "undecided",
        "dominated",
        "redundant",
        votes=True,
        fixed_count=30,
        weak=True,
    ),
    # Members that know nothing
    "noise": _case(makers.noise, "unskilled", "unskilled"),
    "minus the target": _case(
        partial(makers.wrong_values, slope=-1.0, shift=0.0), "unskilled", "unskilled", task="regression"
    ),
    "the target plus three": _case(
        partial(makers.wrong_values, slope=1.0, shift=3.0), "unskilled", "unskilled", task="regression"
    ),
    "one class each": _case(makers.one_class_each, "unskilled", "unskilled", task="classification"),
    "random probabilities": _case(makers.guesses, "unskilled", "unskilled", task="classification"),
    "the prior": _case(makers.prior, "unskilled", "unskilled"),
    # One member that is better than all together
    "one strong among guesses": _put_on(makers.one_strong_among_guesses, "dominated", "dominated", least=5),
    "one strong among weak": _fitted(makers.one_strong_among_weak, "dominated", "dominated", least=5),
    "stages of a boosting": _fitted(makers.boosting_stages, "dominated", "dominated", fixed_count=5),
    # Members that are the same
    "copies": _put_on(makers.copies, "redundant", "redundant"),
    "copies with noise": _put_on(partial(makers.copies, noise=1e-3), "redundant", "redundant"),
    "boosted models alike": _fitted(makers.boosted_alike, "redundant", "redundant", fixed_count=3),
    # Members that lean on each other
    "networks jointly": _network("jointly", COLLUSIVE, COLLUSIVE, of="alone", **HIDDEN),
    "networks jointly, over-trained": _network(
        "jointly, over-trained", COLLUSIVE, COLLUSIVE, of="alone, over-trained", **HIDDEN
    ),
    "networks jointly, probabilities": _network(
        "jointly, probabilities", COLLUSIVE, COLLUSIVE, of="alone", pool="probability", task="classification", **HIDDEN
    ),
    **{
        f"constant biases, {size:g} times": _put_on(partial(makers.constant_biases, size=size), COLLUSIVE, COLLUSIVE)
        for size in (1.0, 3.0)
    },
    **{
        f"biases per example, {size:g} times": _put_on(
            partial(makers.biases_per_example, size=size),
            COLLUSIVE,
            COLLUSIVE,
            train=("undecided", "healthy"),
            **HIDDEN,
        )
        for size in (1.0, 3.0)
    },
    # Which of several verdicts is right is a matter of words
    "f ± 0.45 under noise": _case(
        makers.plus_minus, "ambiguous", "collusive", "undecided", "dominated", task="regression"
    ),
    "known to one": _put_on(makers.known_to_one, "ambiguous", "collusive", "undecided", task="classification", least=5),
    "label skew": _fitted(makers.label_skew, "ambiguous", *ANY_BUT_UNSKILLED, task="classification", weak=True),
    "sites with intercepts": _fitted(makers.sites, "ambiguous", *ANY_BUT_UNSKILLED, task="regression", weak=True),
    # Nobody knows
    **{name: _network(name, "unknown", of="alone") for name in BETWEEN},
    **{name: _network(name, "unknown", of="alone", task="classification") for name in LDR},
    **{name: _network(name, "unknown", of="alone", pool="probability", task="classification") for name in ADP},
}
"""Cases by name."""


MANY = 20_000
"""Test rows above which only ensembles of up to 20 members are made."""


def fits(name: str, data: StudyData, members: int, *, first: bool = True) -> bool:
    """Whether a case can be made from data with M members; with a fixed number of members, for the first M only."""
    known = CASES[name]
    task = "classification" if _classes(data) else "regression"
    enough = all(TRAININGS[training].classes <= _classes(data) for training in known.trainings)
    if len(data.test[0]) > MANY and (known.fixed_count or members) > 20:
        return False
    return known.task in ("", task) and enough and (first if known.fixed_count else members >= known.least)


def allowed(name: str, case: Case) -> dict[Evidence, list[str]]:
    """The allowed verdicts of a case, by evidence; an empty list where the correct verdict is unknown.

    Simple arithmetic on test data (the squared error, or the Brier score) adds verdicts to those of `CASES`:

    - `undecided` for sound ensembles of weak members, of fewer than 5 members or 200 examples;
    - `unskilled` for a pool of weak members, or one that is dominated, that does not lose 2 % less than a constant;
    - `dominated` for a sound ensemble of weak members of which one loses less than the pool;
    - `redundant` for a sound pool that gains less than 3 % over its members: that is what the word means;
    - `healthy`, `redundant` and `undecided` where no member loses 2 % less than the pool, though one was meant to;
    - `healthy` and `undecided` where errors of members that were meant to be alike are correlated by less than 0.97.
    """
    known, facts = CASES[name], makers.facts(case)
    members, examples = case.test.shape[:2]
    more: list[str] = []
    sound = known.truth in ("sound", "alike")
    if sound and (known.weak or members < 5 or examples < 200):
        more.append("undecided")
    if (known.weak or known.truth == "dominated") and facts.ensemble > 0.98 * facts.constant:
        more.append("unskilled")
    if sound and known.weak and facts.best < facts.ensemble:
        more.append("dominated")
    if sound and facts.ensemble > 0.97 * facts.individual:
        more.append("redundant")
    if known.truth == "dominated" and facts.best > 0.98 * facts.ensemble:
        more += ["healthy", "redundant", "undecided"]
    if known.truth == "redundant" and facts.correlation < 0.97:
        more += ["healthy", "undecided"]
    return {
        by: [*words, *(word for word in more if word not in words)] if words else []
        for by, words in known.allowed.items()
    }


def audited(case: Case, by: Evidence) -> Audit:
    """The audit of a case, with outputs on test data and further evidence."""
    settings: dict[str, Any] = {"task": case.task, "kind": case.kind, "pool": case.pool, "loss": case.loss}
    if by == "train":
        settings |= {
            "train": (case.train, case.train_targets),
            "in_bag": "all" if case.fitted_to is None else case.fitted_to,
        }
    if by == "reference":
        settings["reference"] = case.reference
    return audit(case.test, case.targets, **settings)


def outcome(verdict: str, words: list[str]) -> str:
    """``"right"``, ``"undecided"`` (which is not right, and honest), ``"wrong"``, or ``"unknown"``."""
    if not words:
        return "unknown"
    if verdict in words:
        return "right"
    return "undecided" if verdict == "undecided" else "wrong"


class Made(NamedTuple):
    """A case that was made from data, with its allowed verdicts."""

    name: str
    case: Case
    truth: str
    allowed: dict[Evidence, list[str]]
    facts: CaseFacts


def made(spec: Spec, unit: "AuditUnit", cases: Iterable[str]) -> Iterator[Made]:
    """All cases of a unit that its data allows, one after the other, since they may be large."""
    data = _load_unit(spec, unit)
    names = [name for name in cases if fits(name, data, unit.members, first=unit.first)]
    trainings = dict.fromkeys(training for name in names for training in CASES[name].trainings)
    twins = dict.fromkeys(training for name in names for training in CASES[name].twins)
    m = materials(spec, data, unit.seed, unit.members, trainings, twins)
    for name in names:
        case = CASES[name].make(m)
        if case is not None:
            yield Made(name, case, CASES[name].truth, allowed(name, case), makers.facts(case))


def _load_unit(spec: Spec, unit: "AuditUnit") -> StudyData:
    data = load(unit.data, unit.seed, spec)
    x, y = data.test
    most = len(x) if unit.data in SYNTHETIC_SIZED else spec.evaluation.examples or len(x)
    return StudyData(data.name, data.train, (x[:most], y[:most]), data.outputs)


class AuditUnit(NamedTuple):
    """All cases of one data set, seed and number of members."""

    group: str
    """The study's name for the data sets that are shown together."""
    data: str
    seed: int
    members: int
    first: bool
    """Whether it includes cases with a fixed number of members."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.group}, {self.data}, seed {self.seed}, {self.members} members"


EVERY = "all"
"""In a study's grid: every case."""
MORE_MEMBERS = {("audit-sizes", "friedman"): (2, 20, 100), ("audit-sizes", "five-classes"): (2, 20, 100)}
"""Numbers of members instead of the study's, by group and data set."""


def units(spec: Spec) -> list[AuditUnit]:
    """The units of a study."""
    assert spec.members is not None
    counts = tuple(int(count) for count in spec.grid.get("members", [spec.members.count]))
    seeds = [int(seed) for seed in spec.grid["seed"]]
    return [
        AuditUnit(group, name, seed, m, m == MORE_MEMBERS.get((group, name), counts)[0])
        for seed in seeds  # an interrupted run has all data sets with its first seeds
        for group in spec.data
        for name in GROUPS.get(group, (group,))
        for m in MORE_MEMBERS.get((group, name), counts)
    ]


def cases_of(spec: Spec) -> list[str]:
    """The cases that a study asks for."""
    return list(CASES) if EVERY in spec.grid["case"] else [str(case) for case in spec.grid["case"]]


@dataclass(frozen=True)
class AuditedEnsemble:
    """The audit's verdicts on one ensemble, by evidence, and whether each is allowed."""

    group: str
    data: str
    case: str
    members: int
    seed: int
    verdicts: Mapping[str, str]
    truth: str
    allowed: Mapping[Any, Sequence[str]]
    count: int
    """Number of members of this ensemble; a case may have its own."""
    examples: int
    measures: Mapping[str, float]


def audit_unit(spec: Spec, unit: AuditUnit) -> list[AuditedEnsemble]:
    """All cases of a unit, audited."""
    return [audit_case(unit, case) for case in made(spec, unit, cases_of(spec))]


def audit_case(unit: AuditUnit, known: Made) -> AuditedEnsemble:
    """One case, audited with all evidence.

    Measures are 1 or 0, by evidence: ``right`` (the verdict is allowed), ``wrong`` (neither allowed nor undecided),
    ``collusive`` and ``healthy`` (the verdict is that), ``belittled`` (`redundant` or `dominated` where that is not
    allowed). ``collusive_either``: with outputs on training data or with the reference.
    """
    case = known.case
    evidence: list[Evidence] = [by for by in EVIDENCE if by != "reference" or case.reference is not None]
    verdicts: dict[str, str] = {by: audited(case, by).verdict for by in evidence}
    measures: dict[str, float] = {}
    for by in evidence:
        verdict, result = verdicts[by], outcome(verdicts[by], known.allowed[by])
        if result != "unknown":
            measures |= {f"right_{by}": float(result == "right"), f"wrong_{by}": float(result == "wrong")}
            measures[f"belittled_{by}"] = float(result == "wrong" and verdict in ("redundant", "dominated"))
        measures |= {f"{word}_{by}": float(verdict == word) for word in ("collusive", "healthy")}
    measures["collusive_either"] = float("collusive" in (verdicts["train"], verdicts.get("reference")))
    return AuditedEnsemble(
        unit.group,
        unit.data,
        known.name,
        unit.members,
        unit.seed,
        verdicts,
        known.truth,
        known.allowed,
        len(case.test),
        len(case.targets),
        measures,
    )


def as_arrays(unit: AuditUnit, known: Made) -> tuple[dict[str, makers.Array], dict[str, Any]]:
    """A case as arrays for a file, and its description."""
    case = known.case
    arrays: dict[str, Any] = {
        "outputs": case.test.astype(np.float32),
        "targets": case.targets,
        "train_outputs": case.train.astype(np.float32),
        "train_targets": case.train_targets,
    }
    if case.reference is not None:
        arrays["reference"] = case.reference.astype(np.float32)
    if case.fitted_to is not None:
        arrays["fitted_to"] = case.fitted_to
    meta = {
        "data": unit.data,
        "case": known.name,
        "seed": unit.seed,
        "members": len(case.test),
        "truth": known.truth,
        "allowed": known.allowed,
        "task": case.task,
        "kind": case.kind,
        "pool": case.pool,
        "loss": case.loss,
        "facts": known.facts._asdict(),
    }
    return arrays, meta


def from_arrays(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Made:
    """A case from a file."""
    case = Case(
        arrays["outputs"],
        arrays["targets"],
        arrays["train_outputs"],
        arrays["train_targets"],
        arrays.get("reference"),
        meta["kind"],
        meta["pool"],
        arrays.get("fitted_to"),
    )
    return Made(meta["case"], case, meta["truth"], dict(meta["allowed"]), CaseFacts(**meta["facts"]))


def one_thread() -> None:
    """Set up one of several worker processes."""
    torch.set_num_threads(1)

"""`tune`: how much diversity, found by successive halving inside stacked trainings, with the audit as a conscience."""

import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus import calls, checks
from dissensus.arrays import Conversion, has_whole_numbers
from dissensus.auditing import Audit, audit
from dissensus.axes import LossParts
from dissensus.calls import NetworkInputs, network_inputs
from dissensus.data.batches import as_pair, is_source
from dissensus.data.splits import Split
from dissensus.fingerprint import fingerprint
from dissensus.objectives.declaration import argument, declaration, hyperparameters, unset_parameters
from dissensus.randomness import seeded
from dissensus.storage import Formats, StorageError, make_folder, read_record, write_record
from dissensus.train.evaluation import evaluation_batch
from dissensus.train.grid import FOLD, PER_RUN, SEEDS, SHAPES, free_parameters
from dissensus.train.history import OnProgress
from dissensus.train.settings import Metric
from dissensus.train.sweep_result import Sweep
from dissensus.train.sweeping import sweep
from dissensus.train.trained_loss import trained_loss
from dissensus.train.tuning.brackets import Bracket, bracket_of, halving, hyperband, most_halvings
from dissensus.train.tuning.choosing import Gain, gain_of, is_tie, mean_and_error
from dissensus.train.tuning.contest import OVERALL, Contest, Outputs, RunKey, mostly_collusive
from dissensus.train.tuning.proposing import (
    Parameters,
    Seen,
    check_optuna,
    proposed_parameters,
    random_parameters,
    store,
)
from dissensus.train.tuning.records import Candidate, Spent
from dissensus.train.tuning.result import Tuned
from dissensus.train.tuning.scoring import Scorer, Scores, audit_settings, scorer_of
from dissensus.train.tuning.sentence import sentence_of
from dissensus.train.tuning.space import Axis, all_parameters, point_of, size_of, space_of
from dissensus.train.tuning.splitting import Rows, repeated_splits
from dissensus.train.twin import without_interaction

FORMATS = Formats()
"""Of the file of proposals."""
OWN = ("grid", "validation", "metric", "mode", "checkpoint", "resume", "seed", "weights", "unlabelled", "keep", "watch")
"""Settings of `sweep` that `tune` decides, or does not hand on."""


def tune(
    build: Callable[..., nn.Module],
    data: Any,
    objective: Callable[..., LossParts],
    *,
    space: Mapping[str, Any],
    epochs: int,
    members: int = 5,
    budget: float | None = None,
    factor: float = 3.0,
    first_rung: int = 1,
    validation: float | Split = 0.2,
    test: float = 0.2,
    splits: int = 5,
    seeds: int = 2,
    metric: str | Metric = "loss",
    mode: Literal["min", "max"] | None = None,
    allow_collusive: bool = False,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    storage: Any = None,
    progress: bool | OnProgress | None = None,
    seed: int = 0,
    **settings: Any,
) -> Tuned:
    """Find how much diversity is best, and say what that gains over independent training.

    All candidates start as runs of one stacked training. At each rung the worst drop out and cost nothing any more; the
    others go on without a restart, whatever their shapes. Independent candidates compete among themselves, and the best
    of them is always trained to the end with all its seeds. It is the reference of the audit and of the gain.

    Every split of the data has training, validation and test rows. Candidates are compared on validation rows: within
    every split, and by their means over all splits. ``best`` is the best by these means. ``gain`` is measured on test
    rows: each split's own choice, which its test rows had no part in, against independent training. Candidates whose
    ensembles the audit calls collusive are set aside. Where nothing is better than independent training by more than a
    standard error, that is the choice.

    Args:
        build: Function that returns a new member. Names of the space that are its parameters are passed to it.
        data: A pair ``(inputs, targets)`` in memory: tensors, arrays or frames. Each split holds a copy of its rows.
        objective: Function ``(outputs, targets, **hyperparameters) -> LossParts``. Independent training is its neutral
            value (`dissensus.objectives.Declaration`); without one, members are trained on their own loss beside it.
        space: Names to lists of values, to a `dissensus.train.Range`, or to distributions: those of Optuna, or objects
            with a method ``ppf`` as in ``scipy.stats``. Names are hyperparameters of the objective, parameters of
            ``build`` such as widths, ``lr``, ``weight_decay``, ``momentum``, ``clip_norm``, ``members`` and
            ``batch_size``. Independent training is added where the lists lack it.
        epochs: Epochs of a whole training.
        members: Number of members. The space takes precedence.
        budget: What may be spent, in whole trainings of one candidate: 10 is as much as ten candidates that are trained
            to the end. None trains every point of a space of lists, or all brackets of Hyperband once. A bracket that
            would exceed the budget is made smaller. The reference counts; runs that only the contest of their split
            keeps come on top.
        factor: Of n candidates, about n / factor go on at each rung.
        first_rung: Epochs before the first rung, at least.
        validation: The share of the rest that is held out for validation, or a `dissensus.data.Split` with groups,
            classes or times.
        test: The share of all examples that is held out for the test.
        splits: Number of splits. The interval of the gain needs two or more.
        seeds: Number of runs per candidate and split.
        metric: ``"loss"`` of the pooled prediction, ``"accuracy"``, ``"error"``, ``"rmse"``, ``"mae"``, or a function
            ``(outputs [M, N, C], targets) -> number``.
        mode: Whether lower (``"min"``) or higher (``"max"``) is better, for a function.
        allow_collusive: Whether candidates that the audit calls collusive may be chosen.
        checkpoint: Folder that keeps everything, so that an interrupted search can be resumed.
        resume: Whether to go on with the search in ``checkpoint``.
        storage: An Optuna storage (an address such as ``"sqlite:///tune.db"``, or an object). Candidates are written
            there, and those of other searches of the same space inform the proposals.
        progress: See `dissensus.sweep`; one bar per bracket.
        seed: Seed of splits, runs and proposals.
        **settings: Other settings of `dissensus.sweep`, such as ``batch_size``, ``lr``, ``patience`` or ``device``.

    >>> import dissensus as ds
    >>> x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    >>> objective = functools.partial(ds.objectives.augmented, loss="squared_error", pool="score")
    >>> build = functools.partial(ds.nets.mlp, 3, 1, (8,))
    >>> tuned = tune(build, (x, x[:, :1].sin()), objective, space={"beta": [0.4, 0.8]}, epochs=2, splits=2, seeds=1)
    >>> len(tuned.candidates), tuned.independent.point, tuned.spent.runs
    (3, {'beta': 0}, 6)
    """
    started = time.perf_counter()
    problem = _Problem.of(
        build,
        data,
        objective,
        space,
        sizes=_Sizes(
            checks.count("epochs", epochs),
            checks.count("members", members),
            checks.count("splits", splits),
            checks.count("seeds", seeds),
            checks.number("factor", factor, 1, open_low=True),
            _first_rung(first_rung, epochs),
            None if budget is None else checks.number("budget", budget, 1),
            checks.count("seed", seed, 0),
        ),
        validation=validation,
        test=checks.number("test", test, 0, 1, open_low=True, open_high=True),
        scorer=scorer_of(metric, mode, trained_loss(objective)),
        settings=_checked_settings(settings),
        judged=not checks.flag("allow_collusive", allow_collusive),
    )
    if resume and checkpoint is None:
        checks.refuse("resume", "come with `checkpoint`", "no folder", "Give checkpoint=folder.")
    folder = None if checkpoint is None else checks.path("checkpoint", checkpoint)
    search = _Search(problem, folder, resume, storage, progress)
    search.run()
    return search.result(started)


def _first_rung(first_rung: int, epochs: int) -> int:
    first = checks.count("first_rung", first_rung)
    if first > epochs:
        checks.refuse("first_rung", f"be at most `epochs` ({epochs})", first)
    return first


def _checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    import inspect

    known = [name for name in inspect.signature(sweep).parameters if name not in ("build", "data", "objective")]
    for name in settings:
        if name in OWN:
            fix = {"grid": "Use space=.", "weights": "Examples count the same here."}.get(name, "")
            checks.refuse(name, "be left out of `tune`, which decides it or cannot split it", "it", fix)
        checks.one_of("setting", name, [name for name in known if name not in OWN])
    return dict(settings)


@dataclass(frozen=True)
class _Sizes:
    epochs: int
    members: int
    splits: int
    seeds: int
    factor: float
    first_rung: int
    budget: float | None
    seed: int


@dataclass(frozen=True)
class _Problem:
    """What is searched, on what data, and how candidates are compared."""

    build: Callable[..., nn.Module]
    objective: Callable[..., LossParts]
    space: list[Axis]
    sizes: _Sizes
    x: NetworkInputs
    y: Tensor
    rows: list[Rows]
    scorer: Scorer
    settings: dict[str, Any]
    neutral: dict[str, float] | None
    """Settings with which the objective is that of independent training; None where it has none."""
    separate: Callable[..., LossParts] | None
    """The objective of independent training where the objective has no neutral value."""
    judged: bool
    """Whether collusive candidates are set aside."""

    @classmethod
    def of(
        cls,
        build: Callable[..., nn.Module],
        data: Any,
        objective: Callable[..., LossParts],
        space: Mapping[str, Any],
        *,
        sizes: _Sizes,
        validation: float | Split,
        test: float,
        scorer: Scorer,
        settings: dict[str, Any],
        judged: bool,
    ) -> "_Problem":
        """Check everything before anything is trained."""
        known = [*PER_RUN, *SHAPES, *hyperparameters(objective), *free_parameters(build)]
        axes = space_of(space, known, (*SEEDS, FOLD))
        x, y = _pair(build, data, axes)
        if not isinstance(validation, Split):
            share = checks.number("validation", validation, 0, 1, open_low=True, open_high=True)
            validation = Split(share)
        neutral, separate = _independent(objective)
        rows = repeated_splits(y.cpu(), validation, test, sizes.splits, sizes.seed)
        return cls(build, objective, axes, sizes, x, y, rows, scorer, settings, neutral, separate, judged)

    @functools.cached_property
    def other_axes(self) -> list[str]:
        """Names of the space that are no hyperparameters of the objective."""
        of_objective = hyperparameters(self.objective)
        return [axis.name for axis in self.space if axis.name not in of_objective]

    @property
    def all_independent(self) -> bool:
        """Whether members of no candidate interact."""
        return self.neutral is None and self.separate is None

    def is_independent(self, point: Mapping[str, Any]) -> bool:
        """Whether members of a candidate do not interact."""
        if self.neutral is None:
            return self.all_independent
        return all(_is(point.get(name, argument(self.objective, name)), v) for name, v in self.neutral.items())

    def independent_version(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """A point with the settings of independent training in the place of the objective's."""
        others = {name: point[name] for name in self.other_axes}
        if self.neutral is None:
            return others
        needed = {name: point[name] for name in unset_parameters(self.objective) if name in point}
        names = {axis.name for axis in self.space}
        values = {
            name: _own_type(value)
            for name, value in self.neutral.items()
            if name in names or not _is(argument(self.objective, name), value)
        }
        return {**needed, **values, **others}

    def inputs(self, split: int, part: str) -> NetworkInputs:
        """The inputs of a part of a split."""
        return calls.rows(self.x, getattr(self.rows[split], part).to(self.y.device))

    def targets(self, split: int, part: str) -> Tensor:
        """The targets of a part of a split."""
        return self.y[getattr(self.rows[split], part).to(self.y.device)]


def _own_type(value: float) -> float:
    return value


def _is(value: Any, neutral: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and float(value) == float(neutral)


def _pair(build: Callable[..., nn.Module], data: Any, axes: Sequence[Axis]) -> tuple[NetworkInputs, Tensor]:
    """Inputs and targets as tensors."""
    conversion = Conversion(torch.get_default_dtype())
    if has_whole_numbers(data):
        parameters = {axis.name: axis.drawn(0.0) for axis in axes}
        free = free_parameters(build)
        point = {name: value for name, value in point_of(axes, parameters).items() if name in free}
        with seeded(0):
            conversion = conversion._replace(indices=Conversion.of(build(**point)).indices)
    pair = None if is_source(data) else as_pair(conversion.pair(data))
    if pair is None:
        fix = "Splits are drawn from its rows. Read it into tensors."
        got = type(data).__name__
        checks.refuse("data", "be a pair (inputs, targets) in memory", got, fix, TypeError)
    return network_inputs(pair[0]), pair[1]


def _independent(
    objective: Callable[..., LossParts],
) -> tuple[dict[str, float] | None, Callable[..., LossParts] | None]:
    """The settings of independent training, or an objective for it; neither where members never interact."""
    declared = declaration(objective)
    if declared.separable:
        return None, None
    free = hyperparameters(objective)
    reachable = all(name in free or _is(argument(objective, name), v) for name, v in declared.neutral.items())
    if declared.neutral and reachable:
        return {name: value for name, value in declared.neutral.items() if name in free}, None
    if trained_loss(objective) is None:
        fix = "Bind its loss by name, or declare a neutral value (dissensus.objectives.Declaration(neutral=...))."
        checks.refuse("objective", "say what independent training is", "one without a neutral value or a loss", fix)
    return None, without_interaction(objective)


@dataclass
class _Entry:
    """A candidate in training and after it."""

    number: int
    point: dict[str, Any]
    parameters: Parameters | None
    """None for independent versions of proposals, which were not proposed themselves."""
    independent: bool
    bracket: int
    contest: Contest = field(init=False)
    swept: Sweep = field(init=False)
    scores: dict[RunKey, Scores] = field(default_factory=dict)
    """On test rows."""
    verdicts: dict[RunKey, str] = field(default_factory=dict)

    def runs(self, contest: int) -> list[int]:
        """Its runs in its sweep."""
        return self.contest.runs_of(self.number, contest)

    def value(self, contest: int) -> float:
        """What it is compared by; lower is better."""
        return self.contest.value(self.number, contest)

    def finished(self, contest: int) -> bool:
        """Whether it was left in a contest to the end, without a run that failed."""
        failed = any(self.swept.outcomes[run].status == "failed" for run in self.runs(contest))
        return self.number in self.contest.finalists(contest) and not failed and math.isfinite(self.value(contest))

    def by_split(self, contest: int, until: int | None = None) -> dict[int, list[float]]:
        """The best values of its runs, split by split, in the order of seeds."""
        values: dict[int, list[float]] = {}
        for run in self.runs(contest):
            values.setdefault(self.contest.runs[run].split, []).append(self.contest.best(run, until))
        return values

    def epochs(self) -> list[int]:
        """Epochs of its runs."""
        return [len(self.swept.history(run).epochs) for run in self.runs(OVERALL)]

    def left_at(self) -> int | None:
        """The rung at which it left the contest over all splits; None if it did not. Runs may go on for their split."""
        rungs = zip(self.contest.rungs, self.contest.left, strict=False)
        return next((rung for rung, left in rungs if self.number not in left[OVERALL]), None)


class _Search:
    """A search under way."""

    def __init__(
        self, problem: _Problem, folder: Path | None, resume: bool, storage: Any, progress: bool | OnProgress | None
    ) -> None:
        self.problem, self.folder, self.resume = problem, folder, resume
        self.storage, self.progress = storage, progress
        self.entries: list[_Entry] = []
        self.rungs: list[Bracket] = []
        self.audit_settings = audit_settings(problem.scorer.known)
        self.identity = self._identity()
        self.proposals = self._stored_proposals()

    def run(self) -> None:
        """Train brackets until the space is exhausted or the budget is spent."""
        for number, bracket in enumerate(self._brackets()):
            parameters = self._parameters(number, bracket)
            if parameters:
                self._train_bracket(number, bracket, parameters)
                self._store()
        self._judge_finalists()

    # Proposals

    def _brackets(self) -> Iterable[Bracket]:
        """The brackets, one after another; what each has cost decides about the next."""
        sizes, problem = self.problem.sizes, self.problem
        points = size_of(problem.space)
        budget = math.inf if sizes.budget is None else sizes.budget * sizes.epochs
        if points is not None:
            competing = sum(
                not problem.is_independent(point_of(problem.space, p)) for p in all_parameters(problem.space)
            )
            whole = halving(max(1, competing), sizes.epochs, sizes.factor, sizes.first_rung)
            if sizes.budget is None or whole.cost + sizes.epochs <= budget:
                yield whole
                return
        self._check_optuna()
        while True:
            for bracket in hyperband(sizes.epochs, sizes.factor, sizes.first_rung):
                left = budget - self._spent_epochs() - (0 if self.entries else sizes.epochs)
                affordable = math.floor(bracket.sizes[0] * min(1.0, left / bracket.cost))
                if affordable < 1 or (self.entries and affordable < 2) or self._exhausted():
                    return
                halvings = min(len(bracket.rungs) - 1, math.floor(math.log(affordable) / math.log(sizes.factor) + 1e-9))
                if affordable == bracket.sizes[0]:
                    yield bracket
                else:
                    yield bracket_of(affordable, sizes.epochs, sizes.factor, halvings)
            if sizes.budget is None:
                return

    def _check_optuna(self) -> None:
        """Refuse a search of several brackets without Optuna before the first of them."""
        if most_halvings(self.problem.sizes.epochs, self.problem.sizes.factor, self.problem.sizes.first_rung):
            check_optuna()

    def _exhausted(self) -> bool:
        points = size_of(self.problem.space)
        proposed = {repr(entry.point) for entry in self.entries if entry.parameters is not None}
        return points is not None and len(proposed) >= points

    def _spent_epochs(self) -> float:
        """Epochs so far, in those of one candidate."""
        sizes = self.problem.sizes
        return self._run_epochs() / (sizes.splits * sizes.seeds)

    def _run_epochs(self) -> int:
        return sum(len(entry.swept.history(run).epochs) for entry in self.entries for run in entry.runs(OVERALL))

    def _parameters(self, number: int, bracket: Bracket) -> list[Parameters]:
        """The candidates of a bracket: stored ones, all of the space, random ones, or those that TPE proposes."""
        problem, sizes = self.problem, self.problem.sizes
        if number < len(self.proposals):
            return self.proposals[number]
        points = size_of(problem.space)
        count = bracket.sizes[0]
        if (
            points is not None
            and not number
            and bracket == halving(count, sizes.epochs, sizes.factor, sizes.first_rung)
        ):
            every = all_parameters(problem.space)
            competing = sum(not problem.is_independent(point_of(problem.space, p)) for p in every)
            if count == max(1, competing):
                return self._keep(every)
        if not number and self.storage is None:
            drawn = random_parameters(problem.space, count, sizes.seed, number)
        else:
            seen = [self._seen(entry) for entry in self.entries if entry.parameters is not None]
            drawn = proposed_parameters(
                problem.space, count, seen, sizes.seed, number, self.storage, self.identity["search"]
            )
        known = {repr(entry.point) for entry in self.entries}
        fresh: list[Parameters] = []
        for parameters in drawn:
            point = repr(point_of(problem.space, parameters))
            if point not in known:
                known.add(point)
                fresh.append(parameters)
        return self._keep(fresh)

    def _keep(self, parameters: list[Parameters]) -> list[Parameters]:
        self.proposals.append(parameters)
        if self.folder is not None:
            content = {"format": FORMATS.newest, "settings": self.identity, "proposals": self.proposals}
            write_record(self.folder / "tune.json", content)
        return parameters

    def _seen(self, entry: _Entry) -> Seen:
        assert entry.parameters is not None
        epochs = {epoch for run in entry.runs(OVERALL) for epoch in entry.contest.values.get(run, {})}
        reached = [rung for rung in entry.contest.bracket.rungs if rung in epochs]
        values = {rung: entry.contest.value(entry.number, OVERALL, rung) for rung in reached}
        return Seen(entry.number, entry.parameters, values)

    def _store(self) -> None:
        """Write what was trained into the storage."""
        if self.storage is None:
            return
        proposed = [entry for entry in self.entries if entry.parameters is not None]
        seen, points = [self._seen(entry) for entry in proposed], [entry.point for entry in proposed]
        store(self.problem.space, seen, points, self.identity["search"], self.storage)

    def _identity(self) -> dict[str, str]:
        """What files of a search belong to."""
        problem = self.problem
        parts = {
            "space": [(axis.name, axis.choices, axis.distribution) for axis in problem.space],
            "sizes": vars(problem.sizes),
            "objective": problem.objective,
            "rows": problem.rows,
            "metric": problem.scorer,
            "audit": problem.judged,
        }
        each = {name: fingerprint(value) for name, value in parts.items()}
        return {**each, "search": fingerprint(sorted(each.items()))}

    def _stored_proposals(self) -> list[list[Parameters]]:
        if self.folder is None:
            return []
        file = self.folder / "tune.json"
        if not file.exists():
            make_folder("checkpoint", self.folder)
            return []
        if not self.resume:
            raise ValueError(
                f"{self.folder} holds a search already; pass resume=True to go on with it, or another folder."
            )
        stored = read_record(file, FORMATS)
        differ = [name for name, value in self.identity.items() if stored["settings"].get(name) != value]
        if differ:
            names = ", ".join(map(repr, [name for name in differ if name != "search"]))
            raise StorageError(f"{self.folder} belongs to another search: {names} differ. Give another folder.")
        return stored["proposals"]

    # Training

    def _train_bracket(self, number: int, bracket: Bracket, parameters: Sequence[Parameters]) -> None:
        problem = self.problem
        points = [point_of(problem.space, each) for each in parameters]
        entries = [
            _Entry(0, point, own, problem.is_independent(point), number)
            for point, own in zip(points, parameters, strict=True)
        ]
        independent: list[_Entry] = []
        if not problem.all_independent:
            whole = size_of(problem.space) is not None and not number
            wanted = points if whole else points[: max(1, math.ceil(len(points) / problem.sizes.factor))]
            known = {_sorted(entry.point) for entry in [*entries, *self.entries] if entry.independent}
            for point in map(problem.independent_version, wanted):
                if _sorted(point) not in known:
                    known.add(_sorted(point))
                    independent.append(_Entry(0, point, None, True, number))
        if problem.separate is None:
            self._train([*independent, *entries], bracket, problem.objective, f"bracket-{number:03d}")
            return
        if independent:
            own = halving(len(independent), problem.sizes.epochs, problem.sizes.factor, problem.sizes.first_rung)
            self._train(independent, own, problem.separate, f"independent-{number:03d}")
        self._train(entries, bracket, problem.objective, f"bracket-{number:03d}")

    def _train(self, entries: list[_Entry], bracket: Bracket, objective: Any, name: str) -> None:
        """Train candidates as one sweep, in which they compete."""
        problem, sizes = self.problem, self.problem.sizes
        for number, entry in enumerate(entries, len(self.entries)):
            entry.number = number
        keys = [
            RunKey(entry.number, split, run)
            for entry in entries
            for split in range(sizes.splits)
            for run in range(sizes.seeds)
        ]
        by_number = {entry.number: entry for entry in entries}
        grid = [{**by_number[key.candidate].point, "fold": key.split, "seed": self._seed(key)} for key in keys]
        reference = self._reference(OVERALL)
        contest = Contest(
            keys,
            frozenset(entry.number for entry in entries if entry.independent),
            bracket,
            maximise=problem.scorer.mode == "max",
            judge=self._judge if problem.judged and self.audit_settings is not None else None,
            references={} if reference is None else self._outputs(reference, "validation"),
            file=None if self.folder is None else self.folder / f"{name}.json",
        )
        own = {"metric": problem.scorer.metric, "mode": problem.scorer.mode} if problem.scorer.metric else {}
        listeners = [contest, *(problem.settings.get("callbacks") or ())]
        swept = sweep(
            problem.build,
            [(problem.inputs(split, "train"), problem.targets(split, "train")) for split in range(sizes.splits)],
            objective,
            grid=grid,
            members=sizes.members,
            epochs=sizes.epochs,
            validation=[
                (problem.inputs(split, "validation"), problem.targets(split, "validation"))
                for split in range(sizes.splits)
            ],
            checkpoint=None if self.folder is None else self.folder / name,
            resume=self.folder is not None and self.resume,
            progress=self.progress,
            **{**own, **problem.settings, "callbacks": listeners},
        )
        self.rungs.append(bracket)
        for entry in entries:
            entry.contest, entry.swept = contest, swept
        for split in range(sizes.splits):
            numbers = [number for number, key in enumerate(keys) if key.split == split]
            outputs = outputs_of(swept, numbers, problem.inputs(split, "test"))
            targets = problem.targets(split, "test").cpu()
            for number in numbers:
                by_number[keys[number].candidate].scores[keys[number]] = problem.scorer.of(outputs[number], targets)
        self.entries += entries

    def _seed(self, key: RunKey) -> int:
        """Runs of one split and number start alike for all candidates."""
        return self.problem.sizes.seed + key.split * self.problem.sizes.seeds + key.seed

    # Judging

    def _judge(self, outputs: Outputs, reference: Outputs | None) -> str:
        """The audit's verdict."""
        assert self.audit_settings is not None
        if not bool(outputs[0].isfinite().all()):
            return "failed"
        known = None if reference is None or not bool(reference[0].isfinite().all()) else reference[0]
        return audit(outputs[0], outputs[1], reference=known, **self.audit_settings).verdict

    def _outputs(self, entry: _Entry, part: str, contest: int = OVERALL) -> dict[tuple[int, int], Outputs]:
        """Outputs of the trained members of a candidate's runs, by split and seed."""
        result: dict[tuple[int, int], Outputs] = {}
        for number in entry.runs(contest):
            key = entry.contest.runs[number]
            outputs = outputs_of(entry.swept, [number], self.problem.inputs(key.split, part))[number]
            result[key.split, key.seed] = outputs, self.problem.targets(key.split, part).cpu()
        return result

    def _judge_finalists(self) -> None:
        """Audit all candidates that were left in a contest to the end, on validation rows."""
        if self.audit_settings is None or self.problem.all_independent:
            return
        for contest in (OVERALL, *range(self.problem.sizes.splits)):
            reference = self._reference(contest)
            known = {} if reference is None else self._outputs(reference, "validation", contest)
            for entry in self.entries:
                if entry.independent or not entry.finished(contest):
                    continue
                outputs = self._outputs(entry, "validation", contest)
                for number in entry.runs(contest):
                    key = entry.contest.runs[number]
                    if key not in entry.verdicts:
                        place = key.split, key.seed
                        entry.verdicts[key] = self._judge(outputs[place], known.get(place))

    def _reference(self, contest: int) -> _Entry | None:
        """The best independent candidate of a contest."""
        whole = [entry for entry in self.entries if entry.independent and entry.finished(contest)]
        return min(whole, key=lambda entry: (entry.value(contest), entry.number), default=None)

    def _is_collusive(self, entry: _Entry, contest: int) -> bool:
        keys = [entry.contest.runs[number] for number in entry.runs(contest)]
        return mostly_collusive([entry.verdicts[key] for key in keys if key in entry.verdicts])

    def _choice(self, contest: int) -> _Entry:
        """The choice of a contest."""
        reference = self._reference(contest)
        others = [
            entry
            for entry in self.entries
            if not entry.independent
            and entry.finished(contest)
            and not (self.problem.judged and self._is_collusive(entry, contest))
        ]
        best = min(others, key=lambda entry: (entry.value(contest), entry.number), default=None)
        if best is None and reference is None:
            raise RuntimeError(
                "no candidate was trained to the end: each has a run whose loss is not finite. Use smaller learning "
                "rates or clip_norm."
            )
        if best is None:
            assert reference is not None
            return reference
        if reference is None:
            return best
        return reference if is_tie(_advantages(best, reference, contest)) else best

    # Result

    def result(self, started: float) -> Tuned:
        """The choice, and what it gains."""
        problem, sizes = self.problem, self.problem.sizes
        chosen, reference = self._choice(OVERALL), self._reference(OVERALL)
        of_splits = [(self._choice(split), self._reference(split)) for split in range(sizes.splits)]
        gain = self._gain(of_splits)
        run = min(chosen.runs(OVERALL), key=lambda number: chosen.contest.best(number))
        candidates = {entry.number: self._candidate(entry, chosen, reference) for entry in self.entries}
        change = math.nan if reference is None else self._member_change(candidates[chosen.number], reference)
        audited = self._audit(chosen, run, reference)
        best = candidates[chosen.number]
        spent = Spent(
            candidates=len(self.entries),
            runs=sum(len(entry.runs(OVERALL)) for entry in self.entries),
            run_epochs=self._run_epochs(),
            full_run_epochs=sum(len(entry.runs(OVERALL)) for entry in self.entries) * sizes.epochs,
            examples=self._run_epochs() * len(problem.rows[0].train),
            seconds=time.perf_counter() - started,
        )
        first = problem.rows[0]
        return Tuned(
            best=best,
            independent=None if reference is None else candidates[reference.number],
            candidates=list(candidates.values()),
            gain=gain,
            member_change=change,
            choices=[dict(entry.point) for entry, _ in of_splits],
            sentence=sentence_of(
                best,
                None if reference is None else candidates[reference.number],
                list(candidates.values()),
                gain,
                change,
                None if audited is None else audited.verdict,
                problem.scorer,
            ),
            audit=audited,
            ensemble=chosen.swept.run(run),
            spent=spent,
            settings={
                "metric": problem.scorer.name,
                "mode": problem.scorer.mode,
                "epochs": sizes.epochs,
                "splits": sizes.splits,
                "seeds": sizes.seeds,
                "factor": sizes.factor,
                "budget": sizes.budget,
                "brackets": [{"sizes": list(each.sizes), "rungs": list(each.rungs)} for each in self.rungs],
                "rows": {name: len(rows) for name, rows in first._asdict().items()},
                "space": {axis.name: _axis_text(axis) for axis in problem.space},
                "collusive_allowed": not problem.judged,
                "seed": sizes.seed,
            },
        )

    def _gain(self, of_splits: Sequence[tuple[_Entry, _Entry | None]]) -> Gain | None:
        """What the choices of all splits gain on their test rows."""
        if self.problem.all_independent or any(reference is None for _, reference in of_splits):
            return None
        own = [_mean(self._test(entry, split)) for split, (entry, _) in enumerate(of_splits)]
        other = [_mean(self._test(ref, split)) for split, (_, ref) in enumerate(of_splits) if ref is not None]
        if not all(map(math.isfinite, [*own, *other])):
            return None
        first = self.problem.rows[0]
        sign = 1.0 if self.problem.scorer.mode == "min" else -1.0
        return gain_of(
            own,
            other,
            sign=sign,
            share=self.problem.scorer.share,
            train=len(first.train) + len(first.validation),
            test=len(first.test),
        )

    def _test(self, entry: _Entry, contest: int) -> list[float]:
        return [entry.scores[entry.contest.runs[run]].ensemble for run in entry.runs(contest)]

    def _candidate(self, entry: _Entry, chosen: _Entry, reference: _Entry | None) -> Candidate:
        """The record of a candidate."""
        sign = -1.0 if self.problem.scorer.mode == "max" else 1.0
        until = entry.left_at()
        by_split = entry.by_split(OVERALL, until)
        means = [_mean(values) for values in by_split.values()]
        errors = means if len(means) > 1 else next(iter(by_split.values()))
        value, error = entry.contest.value(entry.number, OVERALL, until), mean_and_error(errors)[1]
        scores = [entry.scores[entry.contest.runs[run]] for run in entry.runs(OVERALL)]
        test, members = _mean([score.ensemble for score in scores]), _mean([score.members for score in scores])
        epochs = entry.epochs()
        whole = entry.finished(OVERALL)
        failed = any(entry.swept.outcomes[run].status == "failed" for run in entry.runs(OVERALL))
        status: Any = (
            "chosen"
            if entry is chosen
            else "reference"
            if entry is reference
            else "failed"
            if failed or not math.isfinite(value)
            else "collusive"
            if whole and self.problem.judged and self._is_collusive(entry, OVERALL)
            else "finalist"
            if whole
            else "dropped"
        )
        last = max(epochs) if until is None else until
        curve = [(epoch, sign * entry.contest.value(entry.number, OVERALL, epoch)) for epoch in range(1, last + 1)]
        return Candidate(
            number=entry.number,
            point=dict(entry.point),
            independent=entry.independent,
            bracket=entry.bracket,
            epochs=last,
            runs=len(epochs),
            status=status,
            value=sign * value if math.isfinite(value) else math.nan,
            standard_error=error if math.isfinite(error) else math.nan,
            test=test if until is None else math.nan,
            members=members if until is None else math.nan,
            diversity=sign * (members - test) if until is None else math.nan,
            verdicts=dict(Counter(entry.verdicts.values())),
            curve=[(epoch, number) for epoch, number in curve if math.isfinite(number)],
        )

    def _member_change(self, best: Candidate, reference: _Entry) -> float:
        """By how much members of the choice are worse than independent ones: per cent, or points for shares."""
        scores = [reference.scores[reference.contest.runs[run]].members for run in reference.runs(OVERALL)]
        sign, base = (1.0 if self.problem.scorer.mode == "min" else -1.0), _mean(scores)
        change = sign * (best.members - base)
        if self.problem.scorer.share:
            return 100.0 * change
        return 100.0 * change / base if base > 0 else math.nan

    def _audit(self, chosen: _Entry, run: int, reference: _Entry | None) -> Audit | None:
        """The audit of the ensemble that is returned, on its test rows, against independent training."""
        if self.audit_settings is None:
            return None
        key = chosen.contest.runs[run]
        problem = self.problem
        outputs = outputs_of(chosen.swept, [run], problem.inputs(key.split, "test"))[run]
        known: Tensor | None = None
        if reference is not None:
            others = [n for n in reference.runs(OVERALL) if reference.contest.runs[n].split == key.split]
            # Independent training is compared with another seed of itself where there is one.
            same = [n for n in others if (reference.contest.runs[n].seed == key.seed) != (reference is chosen)]
            if same:
                known = outputs_of(reference.swept, same[:1], problem.inputs(key.split, "test"))[same[0]]
        train: dict[str, Any] = {}
        if not problem.settings.get("bootstrap"):
            on_train = outputs_of(chosen.swept, [run], problem.inputs(key.split, "train"))[run]
            train = {"train": (on_train, problem.targets(key.split, "train").cpu()), "in_bag": "all"}
        targets = problem.targets(key.split, "test").cpu()
        return audit(outputs, targets, reference=known, **train, **self.audit_settings)


def _sorted(point: Mapping[str, Any]) -> str:
    return repr(sorted((name, float(v) if isinstance(v, int | float) else v) for name, v in point.items()))


def _axis_text(axis: Axis) -> Any:
    return json.loads(json.dumps(list(axis.choices), default=str)) if axis.choices else str(axis.distribution)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _advantages(best: _Entry, reference: _Entry, contest: int) -> list[float]:
    """By how much a candidate is better than independent training: one number per split, or per seed of one split."""
    own, other = best.by_split(contest), reference.by_split(contest)
    if len(own) > 1:
        return [_mean(other[split]) - _mean(own[split]) for split in own]
    return [b - a for split in own for a, b in zip(own[split], other[split], strict=True)]


@torch.no_grad()
def outputs_of(swept: Sweep, numbers: Sequence[int], x: NetworkInputs, batch_size: int = 1024) -> dict[int, Tensor]:
    """Member outputs ``[M, N, ...]`` of some runs of a sweep on the same inputs, on the host."""
    result: dict[int, Tensor] = {}
    for group in swept.groups:
        places = [place for place, run in enumerate(group.runs) if run in numbers]
        if not places:
            continue
        rows = [place * group.members + member for place in places for member in range(group.members)]
        body = group.body.subset(rows).eval()
        body.choices = group.body.choices
        device = next(body.parameters()).device
        pieces = [
            body.run(None, calls.mapped(lambda tensor: tensor.to(device), batch)).cpu()  # noqa: B023
            for batch in calls.split(x, evaluation_batch(len(rows), batch_size))
        ]
        outputs = torch.cat(pieces, 1).unflatten(0, (len(places), -1))
        outputs = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        result |= {group.runs[place]: outputs[i] for i, place in enumerate(places)}
    return result

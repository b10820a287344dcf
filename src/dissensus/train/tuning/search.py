"""A search under way: brackets, proposals, stacked trainings, and the files that keep them."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dissensus import calls, checks
from dissensus.fingerprint import fingerprint
from dissensus.storage import Formats, StorageError, make_folder, read_record, write_record
from dissensus.train.history import OnProgress
from dissensus.train.sweeping import sweep
from dissensus.train.tuning.brackets import Bracket, bracket_of, halving, hyperband, most_halvings
from dissensus.train.tuning.contest import OVERALL, Contest, RunKey
from dissensus.train.tuning.entries import Entry, canonical, outputs_of, run_epochs
from dissensus.train.tuning.judging import Judging
from dissensus.train.tuning.problem import Problem
from dissensus.train.tuning.proposing import (
    Parameters,
    Seen,
    Store,
    check_optuna,
    proposed_parameters,
    random_parameters,
)
from dissensus.train.tuning.rehearsal import rehearse
from dissensus.train.tuning.result import Tuned
from dissensus.train.tuning.scoring import audit_settings
from dissensus.train.tuning.space import all_parameters, point_of, size_of

FORMATS = Formats()
"""Of the file of proposals."""
_CHANCES = 3
"""How often the next in line is trained where all that were left are set aside."""
_TRIES = 20
"""Random candidates for each that is wanted, in a space where many are known already."""
_SECONDS = 1.0
"""Between two notes of the time."""
_WHERE = ("callbacks", "device", "backend", "max_memory", "padding", "checkpoint_seconds", "deterministic")
"""Settings that do not decide what a search finds, but for rounding."""


class Search:
    """A search under way."""

    def __init__(
        self,
        problem: Problem,
        folder: Path | None,
        resume: bool,
        storage: Any,
        progress: bool | OnProgress | None,
        started: float,
    ) -> None:
        self.problem, self.folder, self.resume, self.progress = problem, folder, resume, progress
        self.judging = Judging(problem, audit_settings(problem.scorer.known, problem.scorer.targets))
        self.entries = self.judging.entries
        self.rungs: list[Bracket] = []
        self.identity = self._identity()
        self.store = None if storage is None else self._opened(storage)
        self.started, self.before = started, 0.0
        self.proposals = self._stored_proposals()

    def run(self) -> None:
        """Train brackets until the space is exhausted or the budget is spent."""
        for number, bracket in enumerate(self._brackets()):
            parameters = self._parameters(number, bracket)
            if not parameters:
                break  # nothing new is left in the space
            self._train_bracket(number, bracket, parameters)
            if self.store is not None:
                proposed = [entry for entry in self.entries if entry.parameters is not None]
                seen = [self._seen(entry) for entry in proposed]
                self.store.keep(self.problem.space, seen, [entry.point for entry in proposed])
        for number in itertools.count():
            again = bool(number) and number <= _CHANCES and self._train_next(number)
            trained = self._train_references(number)
            self.judging.judge_finalists()  # it may set the best aside, so that another is the best
            if number and not trained and not again:
                return

    def _opened(self, storage: Any) -> Store:
        """The storage, which is tried before anything is trained."""
        check_optuna()
        scorer = self.problem.scorer
        store = Store(storage, self.identity["task"], self.identity["search"], scorer.name, scorer.mode == "max")
        store.study()
        return store

    def _brackets(self) -> Iterable[Bracket]:
        """The brackets, one after another; what each has cost decides about the next."""
        sizes, problem = self.problem.sizes, self.problem
        budget = math.inf if sizes.budget is None else sizes.budget * sizes.epochs
        if budget < sizes.epochs * (1 if problem.all_independent else 2):
            fix = "One candidate and independent training are two whole trainings."
            checks.refuse("budget", "be at least 2, where members of candidates interact", sizes.budget, fix)
        if size_of(problem.space) is not None:
            points = [point_of(problem.space, parameters) for parameters in all_parameters(problem.space)]
            competing = sum(not problem.is_independent(point) for point in points)
            whole = halving(max(1, competing), sizes.epochs, sizes.factor, sizes.first_rung)
            references = len({canonical(problem.independent_version(point)) for point in points})
            if whole.cost + (0 if problem.all_independent else whole.cost_of_share(references)) <= budget:
                yield whole
                return
        if most_halvings(sizes.epochs, sizes.factor, sizes.first_rung):
            check_optuna()  # before the first of several brackets
        rehearse(problem)
        while True:
            for bracket in hyperband(sizes.epochs, sizes.factor, sizes.first_rung):
                affordable = self._affordable(bracket, budget - self._spent_epochs())
                if affordable is None or self._exhausted():
                    return
                yield affordable
            if sizes.budget is None:
                return

    def _affordable(self, bracket: Bracket, left: float) -> Bracket | None:
        """A bracket, or a smaller one that what is left pays for with the independent candidates beside it."""
        sizes = self.problem.sizes
        for count in range(bracket.sizes[0], 1 if self.entries else 0, -1):
            halvings = min(len(bracket.rungs) - 1, math.floor(math.log(count) / math.log(sizes.factor) + 1e-9))
            smaller = bracket if count == bracket.sizes[0] else bracket_of(count, sizes.epochs, sizes.factor, halvings)
            last = sizes.epochs if self.problem.other_axes and count > 1 else 0  # of `_train_references`
            if smaller.cost + smaller.cost_of_share(self._references(count)) + last <= left:
                return smaller
        return None

    def _references(self, count: int) -> int:
        """How many independent candidates a bracket of random or proposed ones brings with it."""
        if self.problem.all_independent:
            return 0
        if not self.problem.other_axes:
            return 0 if self.entries else 1
        return math.ceil(count / self.problem.sizes.factor)

    def _exhausted(self) -> bool:
        points = size_of(self.problem.space)
        proposed = {canonical(entry.point) for entry in self.entries if entry.parameters is not None}
        return points is not None and len(proposed) >= points

    def _spent_epochs(self) -> float:
        """Epochs so far, in those of one candidate."""
        sizes = self.problem.sizes
        return run_epochs(self.entries) / (sizes.splits * sizes.seeds)

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
        at_random = random_parameters(problem.space, _TRIES * count, sizes.seed, number)
        if not number and self.store is None:
            drawn = at_random
        else:
            seen = [self._seen(entry) for entry in self.entries if entry.parameters is not None]
            # Few values are proposed again and again; random ones stand in for what has been trained already.
            drawn = [
                *proposed_parameters(problem.space, count, seen, sizes.seed, number, self.store),
                *at_random,
            ]
        known = {canonical(entry.point) for entry in self.entries}
        fresh: list[Parameters] = []
        for parameters in drawn:
            point = canonical(point_of(problem.space, parameters))
            if point not in known and len(fresh) < count:
                known.add(point)
                fresh.append(parameters)
        return self._keep(fresh)

    def _keep(self, parameters: list[Parameters]) -> list[Parameters]:
        self.proposals.append(parameters)
        self._write()
        return parameters

    def _write(self) -> None:
        """Keep the proposals, and the seconds so far."""
        if self.folder is not None:
            content = {"settings": self.identity, "proposals": self.proposals, "seconds": self._seconds()}
            write_record(self.folder / "tune.json", {"format": FORMATS.newest, **content})

    def _seconds(self) -> float:
        """Seconds so far, those before an interruption included."""
        return self.before + time.perf_counter() - self.started

    def _seen(self, entry: Entry) -> Seen:
        assert entry.parameters is not None
        epochs = {epoch for run in entry.runs(OVERALL) for epoch in entry.contest.values.get(run, {})}
        reached = [rung for rung in entry.contest.bracket.rungs if rung in epochs]
        values = {rung: entry.contest.value(entry.number, OVERALL, rung) for rung in reached}
        return Seen(entry.number, entry.parameters, values)

    def _identity(self) -> dict[str, str]:
        """What files of a search belong to. What only decides where and how fast it runs does not count."""
        problem = self.problem
        task = {
            "space": [(axis.name, axis.choices, axis.distribution) for axis in problem.space],
            "objective": problem.objective,
            "metric": problem.scorer,
            "build": problem.build,
            "data": [*calls.tensors(problem.x), problem.y],
        }
        rest = {
            "sizes": vars(problem.sizes),
            "rows": problem.rows,
            "audit": problem.judged,
            "settings": {name: value for name, value in problem.settings.items() if name not in _WHERE},
        }
        each = {name: fingerprint(value, opaque=[]) for name, value in {**task, **rest}.items()}
        whole = fingerprint([each[name] for name in task])
        return {**each, "task": whole, "search": fingerprint(sorted(each.items()))}

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
            names = ", ".join(map(repr, [name for name in differ if name not in ("task", "search")]))
            raise StorageError(f"{self.folder} belongs to another search: {names} differ. Give another folder.")
        self.before = float(stored.get("seconds", 0.0))
        return stored["proposals"]

    def _train_bracket(self, number: int, bracket: Bracket, parameters: Sequence[Parameters]) -> None:
        problem = self.problem
        points = [point_of(problem.space, each) for each in parameters]
        entries = [
            Entry(0, point, own, problem.is_independent(point), number)
            for point, own in zip(points, parameters, strict=True)
        ]
        independent: list[Entry] = []
        if not problem.all_independent:
            whole = size_of(problem.space) == len(points)
            wanted = points if whole else points[: max(1, math.ceil(len(points) / problem.sizes.factor))]
            known = {canonical(entry.point) for entry in [*entries, *self.entries] if entry.independent}
            for point in map(problem.independent_version, wanted):
                if canonical(point) not in known:
                    known.add(canonical(point))
                    independent.append(Entry(0, point, None, True, number))
        if problem.separate is None:
            self._train([*independent, *entries], bracket, problem.objective, f"bracket-{number:03d}")
            return
        if independent:
            own = halving(len(independent), problem.sizes.epochs, problem.sizes.factor, problem.sizes.first_rung)
            self._train(independent, own, problem.separate, f"independent-{number:03d}")
        self._train(entries, bracket, problem.objective, f"bracket-{number:03d}")

    def _train_next(self, number: int) -> bool:
        """Train the next in line to the end where the audit has set aside all that were left.

        Otherwise independent training would win wherever the last candidate turns collusive after the last rung.
        Returns whether there were any.
        """
        judging = self.judging
        contests = [OVERALL] if judging.all_set_aside(OVERALL) else range(self.problem.sizes.splits)
        points: dict[str, dict[str, Any]] = {}
        for contest in contests:
            if judging.all_set_aside(contest) and (entry := judging.next_in_line(contest)) is not None:
                points.setdefault(canonical(entry.point), entry.point)
        if points:
            entries = [Entry(0, point, None, False, len(self.proposals)) for point in points.values()]
            bracket = Bracket((len(entries),), (self.problem.sizes.epochs,))
            self._train(entries, bracket, self.problem.objective, f"next-{number:03d}")
        return bool(points)

    def _train_references(self, number: int) -> bool:
        """Train independent versions of the best candidates, so that no gain is due to a learning rate or a width.

        Returns whether any was missing.
        """
        problem, sizes = self.problem, self.problem.sizes
        if problem.all_independent or not problem.other_axes:
            return False
        independent = [entry for entry in self.entries if entry.independent]
        missing: dict[str, dict[str, Any]] = {}
        for contest in (OVERALL, *range(sizes.splits)):
            best = self.judging.best_interacting(contest)
            if best is None:
                continue
            point = problem.independent_version(best.point)
            # One that was dropped at a rung, where it was compared by early epochs, is trained again.
            known = {canonical(entry.point) for entry in independent if entry.finished(contest) or entry.failed()}
            if canonical(point) not in known:
                missing.setdefault(canonical(point), point)
        if missing:
            entries = [Entry(0, point, None, True, len(self.proposals)) for point in missing.values()]
            bracket = halving(len(entries), sizes.epochs, sizes.factor, sizes.first_rung)
            self._train(entries, bracket, problem.separate or problem.objective, f"reference-{number:03d}")
        return bool(missing)

    def _train(self, entries: list[Entry], bracket: Bracket, objective: Any, name: str) -> None:
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
        reference = self.judging.reference(OVERALL)
        contest = Contest(
            keys,
            frozenset(entry.number for entry in entries if entry.independent),
            bracket,
            maximise=problem.scorer.mode == "max",
            judge=self.judging.judge if problem.judged and self.judging.audit_settings is not None else None,
            references={} if reference is None else self.judging.outputs(reference, "validation"),
            file=None if self.folder is None else self.folder / f"{name}.json",
        )
        own = {"metric": problem.scorer.metric, "mode": problem.scorer.mode} if problem.scorer.metric else {}
        listeners = [contest, _Clock(self._write), *(problem.settings.get("callbacks") or ())]
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
        if name.startswith("bracket"):
            self.rungs.append(bracket)
        self._write()
        for entry in entries:
            entry.contest, entry.swept = contest, swept
        for split in range(sizes.splits):
            numbers = [number for number, key in enumerate(keys) if key.split == split]
            outputs = outputs_of(swept, numbers, problem.inputs(split, "test"))
            targets, class_weights = problem.targets(split, "test").cpu(), self._class_weights(split)
            for number in numbers:
                score = problem.scorer.of(outputs[number], targets, class_weights)
                by_number[keys[number].candidate].scores[keys[number]] = score
        self.entries += entries

    def _class_weights(self, split: int) -> Tensor | None:
        """The weight of every class in the test loss of a split, as in its training."""
        return self.problem.scorer.class_weights(self.problem.targets(split, "train").cpu())

    def _seed(self, key: RunKey) -> int:
        """Runs of one split and number start alike for all candidates."""
        return self.problem.sizes.seed + key.split * self.problem.sizes.seeds + key.seed

    def result(self) -> Tuned:
        """The choice, and what it gains."""
        tuned = self.judging.result(self.rungs, self._seconds())
        self._write()
        return tuned


class _Clock:
    """Keeps the time that a search has taken, now and then, so that one that is interrupted tells all of it."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.write, self.last = write, time.monotonic()

    def on_epoch(self, entry: dict[str, Any]) -> None:  # noqa: ARG002
        """Write, a few seconds after the last time."""
        if time.monotonic() - self.last > _SECONDS:
            self.write()
            self.last = time.monotonic()

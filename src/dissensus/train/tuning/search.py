"""A search under way: brackets, proposals, stacked trainings, and the files that keep them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dissensus import calls
from dissensus.fingerprint import digest, fingerprint
from dissensus.storage import Formats, StorageError, make_folder, read_record, write_record
from dissensus.train.grid import key_of
from dissensus.train.history import OnProgress
from dissensus.train.sweeping import sweep
from dissensus.train.tuning.brackets import Bracket, bracket_of, halving, hyperband, most_halvings
from dissensus.train.tuning.contest import OVERALL, Contest, RunKey
from dissensus.train.tuning.entries import Entry, outputs_of, run_epochs
from dissensus.train.tuning.judging import Judging
from dissensus.train.tuning.problem import Problem
from dissensus.train.tuning.proposing import (
    Parameters,
    Seen,
    check_optuna,
    proposed_parameters,
    random_parameters,
    store,
)
from dissensus.train.tuning.result import Tuned
from dissensus.train.tuning.scoring import audit_settings
from dissensus.train.tuning.space import all_parameters, point_of, size_of

FORMATS = Formats()
"""Of the file of proposals."""
_OF_THE_MACHINE = ("callbacks", "checkpoint_seconds", "cluster", "device", "max_memory")
"""Settings that do not decide what a search finds."""


class Search:
    """A search under way."""

    def __init__(
        self, problem: Problem, folder: Path | None, resume: bool, storage: Any, progress: bool | OnProgress | None
    ) -> None:
        self.problem, self.folder, self.resume = problem, folder, resume
        self.storage, self.progress = storage, progress
        self.judging = Judging(problem, audit_settings(problem.scorer.known, problem.scorer.targets))
        self.entries = self.judging.entries
        self.rungs: list[Bracket] = []
        self.identity = self._identity()
        self.proposals = self._stored_proposals()

    def run(self) -> None:
        """Train brackets until the space is exhausted or the budget is spent."""
        for number, bracket in enumerate(self._brackets()):
            parameters = self._parameters(number, bracket)
            if parameters:
                self._train_bracket(number, bracket, parameters)
                self._store()
        self.judging.judge_finalists()

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
        proposed = {key_of(entry.point) for entry in self.entries if entry.parameters is not None}
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
        if not number and self.storage is None:
            drawn = random_parameters(problem.space, count, sizes.seed, number)
        else:
            seen = [self._seen(entry) for entry in self.entries if entry.parameters is not None]
            drawn = proposed_parameters(
                problem.space, count, seen, sizes.seed, number, self.storage, self.identity["search"]
            )
        known = {key_of(entry.point) for entry in self.entries}
        fresh: list[Parameters] = []
        for parameters in drawn:
            point = key_of(point_of(problem.space, parameters))
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

    def _seen(self, entry: Entry) -> Seen:
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
            "build": problem.build,
            "data": digest(*calls.tensors(problem.x), problem.y),
            "settings": sorted((name, v) for name, v in problem.settings.items() if name not in _OF_THE_MACHINE),
        }
        each = {name: fingerprint(value, opaque=[]) for name, value in parts.items()}
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

    def _train_bracket(self, number: int, bracket: Bracket, parameters: Sequence[Parameters]) -> None:
        problem = self.problem
        points = [point_of(problem.space, each) for each in parameters]
        entries = [
            Entry(0, point, own, problem.is_independent(point), number)
            for point, own in zip(points, parameters, strict=True)
        ]
        independent: list[Entry] = []
        if not problem.all_independent:
            whole = size_of(problem.space) is not None and not number
            wanted = points if whole else points[: max(1, math.ceil(len(points) / problem.sizes.factor))]
            known = {_sorted(entry.point) for entry in [*entries, *self.entries] if entry.independent}
            for point in map(problem.independent_version, wanted):
                if _sorted(point) not in known:
                    known.add(_sorted(point))
                    independent.append(Entry(0, point, None, True, number))
        if problem.separate is None:
            self._train([*independent, *entries], bracket, problem.objective, f"bracket-{number:03d}")
            return
        if independent:
            own = halving(len(independent), problem.sizes.epochs, problem.sizes.factor, problem.sizes.first_rung)
            self._train(independent, own, problem.separate, f"independent-{number:03d}")
        self._train(entries, bracket, problem.objective, f"bracket-{number:03d}")

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

    def result(self, started: float) -> Tuned:
        """The choice, and what it gains."""
        return self.judging.result(self.rungs, started)


def _sorted(point: Mapping[str, Any]) -> str:
    return key_of({name: float(v) if isinstance(v, int | float) else v for name, v in point.items()})

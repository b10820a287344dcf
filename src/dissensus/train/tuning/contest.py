"""Who goes on at a rung: candidates compete within every split, and by their means over all splits.

A split's own contest looks at nothing but that split's training and validation rows, so that what it chooses can be
measured on that split's test rows. The contest over all splits decides what is recommended. A run goes on while its
candidate is left in the contest of its split or in that over all splits.

Independent candidates compete among themselves, and at least one of them is left in every contest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dissensus.storage import Formats, StorageError, read_record, write_record
from dissensus.train.notification import Entry, Rung, Start
from dissensus.train.tuning.brackets import Bracket, left_of

FORMATS = Formats()
"""Of files of decisions."""

OVERALL = -1
"""The contest over all splits; others have the number of their split."""

Outputs = tuple[Tensor, Tensor]
"""Member outputs ``[M, N, ...]`` and targets of one run."""
Judge = Callable[[Outputs, Outputs | None], str]
"""The audit's verdict on outputs, given those of independent members on the same data."""


class RunKey(NamedTuple):
    """What a run is of."""

    candidate: int
    split: int
    seed: int


@dataclass
class Contest:
    """The callback that drops candidates of one bracket at its rungs."""

    runs: Sequence[RunKey]
    """In the order of the sweep's grid."""
    independent: frozenset[int]
    """Candidates whose members do not interact."""
    bracket: Bracket
    maximise: bool = False
    judge: Judge | None = None
    """Candidates that it calls collusive stand behind all others."""
    references: Mapping[tuple[int, int], Outputs] = field(default_factory=dict)
    """Outputs of independent runs of other sweeps by split and seed, for contests without any."""
    file: Path | None = None
    """Keeps decisions, so that a sweep that is resumed in the middle takes the same ones."""
    values: dict[int, dict[int, float]] = field(default_factory=dict, init=False)
    """What is watched, by run and epoch; lower is better, and infinity where it is not finite."""
    left: list[dict[int, list[int]]] = field(default_factory=list, init=False)
    """After every rung: the candidates left in every contest, best first."""

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            stored = read_record(self.file, FORMATS)
            if stored.get("runs") != [list(run) for run in self.runs]:
                raise StorageError(f"{self.file} holds decisions on other candidates. Give another folder.")
            self.left = [{int(name): left for name, left in rung.items()} for rung in stored["left"]]

    @property
    def rungs(self) -> list[int]:
        """Epochs at which candidates are dropped."""
        return list(self.bracket.rungs[:-1])

    @property
    def splits(self) -> list[int]:
        """The numbers of all splits."""
        return sorted({run.split for run in self.runs})

    def on_start(self, start: Start) -> None:
        """Take up the epochs before a checkpoint."""
        for entry in start.entries:
            self.on_epoch(entry)

    def on_epoch(self, entry: Entry) -> None:
        """Note the value of an epoch."""
        value = float(entry["validation"])
        value = -value if self.maximise else value
        self.values.setdefault(entry["run"], {})[entry["epoch"]] = value if math.isfinite(value) else math.inf

    def on_rung(self, rung: Rung) -> list[int]:
        """Decide who goes on; return the places of runs that do not."""
        stage = self.rungs.index(rung.epoch)
        if stage >= len(self.left):
            self.left.append(self._decided(stage, rung))
            if self.file is not None:
                content = {"runs": [list(run) for run in self.runs], "left": self.left}
                write_record(self.file, {"format": FORMATS.newest, **content})
        left = self.left[stage]
        keys = [self.runs[entry["run"]] for entry in rung.entries]
        return [
            place
            for place, key in enumerate(keys)
            if key.candidate not in left[key.split] and key.candidate not in left[OVERALL]
        ]

    def finalists(self, contest: int) -> list[int]:
        """The candidates left in a contest after the last rung."""
        return self.left[-1][contest] if self.left else sorted({run.candidate for run in self.runs})

    def value(self, candidate: int, contest: int, until: int | None = None) -> float:
        """The mean over a candidate's runs of the best value that each has reached; infinity if one has none."""
        each = [self.best(run, until) for run in self.runs_of(candidate, contest)]
        return sum(each) / len(each) if each else math.inf

    def runs_of(self, candidate: int, contest: int) -> list[int]:
        """The runs of a candidate that a contest looks at."""
        return [
            number
            for number, run in enumerate(self.runs)
            if run.candidate == candidate and contest in (OVERALL, run.split)
        ]

    def best(self, run: int, until: int | None = None) -> float:
        """The best value of a run so far, or up to an epoch; infinity if it has none."""
        known = self.values.get(run, {})
        return min((value for epoch, value in known.items() if until is None or epoch <= until), default=math.inf)

    def _decided(self, stage: int, rung: Rung) -> dict[int, list[int]]:
        """The candidates that are left in every contest."""
        audits = _Audits(self, rung)
        result: dict[int, list[int]] = {}
        for contest in (OVERALL, *self.splits):
            standing = self.finalists(contest) if not stage else self.left[stage - 1][contest]
            values = {candidate: self._standing_value(candidate, contest, rung) for candidate in standing}
            order = sorted(standing, key=lambda candidate: (values[candidate], candidate))
            own = [candidate for candidate in order if candidate in self.independent]
            others = [candidate for candidate in order if candidate not in self.independent]
            reference = own[0] if own else None
            kept = self._size(stage + 1, interacting=True)
            clean, behind = list[int](), list[int]()
            for candidate in others:
                if len(clean) == kept:
                    break
                collusive = math.isfinite(values[candidate]) and audits.collusive(candidate, reference, contest)
                (behind if collusive else clean).append(candidate)
            result[contest] = [*own[: self._size(stage + 1, interacting=False)], *[*clean, *behind][:kept]]
        return result

    def _standing_value(self, candidate: int, contest: int, rung: Rung) -> float:
        """What a candidate is worth at a rung; infinity if one of its runs has failed, whatever it reached before."""
        failed = any(run in rung.failed for run in self.runs_of(candidate, contest))
        return math.inf if failed else self.value(candidate, contest, rung.epoch)

    def _size(self, stage: int, *, interacting: bool) -> int:
        """How many candidates are left at a stage: of all the bracket's size, of independent ones their share."""
        candidates = {run.candidate for run in self.runs}
        count = len([candidate for candidate in candidates if (candidate not in self.independent) == interacting])
        return left_of(count, self.bracket.sizes[stage], self.bracket.sizes[0])


class _Audits:
    """Verdicts at a rung, each made once."""

    def __init__(self, contest: Contest, rung: Rung) -> None:
        self.contest, self.rung = contest, rung
        self.outputs: dict[int, Outputs] | None = None
        self.verdicts: dict[tuple[int, int | None], str] = {}

    def collusive(self, candidate: int, reference: int | None, contest: int) -> bool:
        """Whether the audit calls a candidate collusive in most of the splits that a contest looks at.

        One run a split is audited: its first seed.
        """
        judge, runs = self.contest.judge, self.contest.runs
        if judge is None:
            return False
        if self.outputs is None:
            pairs = zip(self.rung.entries, self.rung.outputs(), strict=True)
            self.outputs = {entry["run"]: pair for entry, pair in pairs if pair is not None}
        verdicts: list[str] = []
        for number in self.contest.runs_of(candidate, contest):
            if runs[number].seed == min(run.seed for run in runs) and number in self.outputs:
                key = number, reference
                if key not in self.verdicts:
                    self.verdicts[key] = judge(self.outputs[number], self._reference(runs[number], reference))
                verdicts.append(self.verdicts[key])
        return mostly_collusive(verdicts)

    def _reference(self, run: RunKey, reference: int | None) -> Outputs | None:
        assert self.outputs is not None
        known = self.contest.references.get((run.split, run.seed))
        if reference is None:
            return known
        number = self.contest.runs.index(run._replace(candidate=reference))
        return self.outputs.get(number, known)


def mostly_collusive(verdicts: Sequence[str]) -> bool:
    """Whether more than half of some verdicts are "collusive".

    >>> mostly_collusive(["collusive", "healthy"]), mostly_collusive(["collusive"] * 2 + ["undecided"])
    (False, True)
    """
    return 2 * sum(verdict == "collusive" for verdict in verdicts) > len(verdicts)

"""The audit's part in a search, the choices, and the result."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dissensus.auditing import Audit, audit
from dissensus.train.tuning.brackets import Bracket
from dissensus.train.tuning.choosing import Gain, gain_of, is_tie, mean_and_error
from dissensus.train.tuning.contest import OVERALL, Outputs, mostly_collusive
from dissensus.train.tuning.entries import Entry, canonical, mean, outputs_of, run_epochs
from dissensus.train.tuning.problem import Problem
from dissensus.train.tuning.records import Candidate, Spent
from dissensus.train.tuning.result import Tuned
from dissensus.train.tuning.sentence import sentence_of
from dissensus.train.tuning.space import Axis


@dataclass
class Judging:
    """Judges the candidates of a search."""

    problem: Problem
    audit_settings: dict[str, Any] | None
    """Arguments of the audit; None where the loss cannot be audited."""
    entries: list[Entry] = field(default_factory=list)
    """All candidates so far."""

    def judge(self, outputs: Outputs, reference: Outputs | None) -> str:
        """The audit's verdict."""
        assert self.audit_settings is not None
        if not bool(outputs[0].isfinite().all()):
            return "failed"
        known = None if reference is None or not bool(reference[0].isfinite().all()) else reference[0]
        return audit(outputs[0], outputs[1], reference=known, **self.audit_settings).verdict

    def outputs(self, entry: Entry, part: str, contest: int = OVERALL) -> dict[tuple[int, int], Outputs]:
        """Outputs of the trained members of a candidate's runs, by split and seed."""
        result: dict[tuple[int, int], Outputs] = {}
        for number in entry.runs(contest):
            key = entry.contest.runs[number]
            outputs = outputs_of(entry.swept, [number], self.problem.inputs(key.split, part))[number]
            result[key.split, key.seed] = outputs, self.problem.targets(key.split, part).cpu()
        return result

    def judge_finalists(self) -> None:
        """Audit all candidates that were left in a contest to the end, on validation rows."""
        if self.audit_settings is None or self.problem.all_independent:
            return
        for contest in (OVERALL, *range(self.problem.sizes.splits)):
            reference = self.reference(contest)
            known = {} if reference is None else self.outputs(reference, "validation", contest)
            for entry in self.entries:
                if entry.independent or not entry.finished(contest):
                    continue
                outputs = self.outputs(entry, "validation", contest)
                for number in entry.runs(contest):
                    key = entry.contest.runs[number]
                    if key not in entry.verdicts:
                        place = key.split, key.seed
                        entry.verdicts[key] = self.judge(outputs[place], known.get(place))

    def reference(self, contest: int) -> Entry | None:
        """The best independent candidate of a contest."""
        whole = [entry for entry in self.entries if entry.independent and entry.finished(contest)]
        return min(whole, key=lambda entry: (entry.value(contest), entry.number), default=None)

    def best_interacting(self, contest: int) -> Entry | None:
        """The best candidate of a contest whose members interact, beside those that are set aside."""
        others = [
            entry
            for entry in self.entries
            if not entry.independent
            and entry.finished(contest)
            and not (self.problem.judged and self._is_collusive(entry, contest))
        ]
        return min(others, key=lambda entry: (entry.value(contest), entry.number), default=None)

    def all_set_aside(self, contest: int) -> bool:
        """Whether the audit has set aside every candidate that was left in a contest."""
        left = [entry for entry in self.entries if not entry.independent and entry.finished(contest)]
        return bool(left) and self.best_interacting(contest) is None

    def next_in_line(self, contest: int) -> Entry | None:
        """The candidate that came farthest in a contest without being left to its end; of several the best."""
        known = {canonical(entry.point) for entry in self.entries if entry.finished(contest)}
        line: list[tuple[int, float, int, Entry]] = []
        for entry in self.entries:
            rung = entry.left_at(contest)
            if rung is None or entry.independent or entry.failed(contest) or canonical(entry.point) in known:
                continue
            line.append((-rung, entry.contest.value(entry.number, contest, rung), entry.number, entry))
        return min(line, key=lambda place: place[:3], default=(0, 0.0, 0, None))[3]

    def _is_collusive(self, entry: Entry, contest: int) -> bool:
        keys = [entry.contest.runs[number] for number in entry.runs(contest)]
        return mostly_collusive([entry.verdicts[key] for key in keys if key in entry.verdicts])

    def choice(self, contest: int) -> Entry:
        """The choice of a contest."""
        reference = self.reference(contest)
        best = self.best_interacting(contest)
        if best is None and reference is None:
            raise RuntimeError(
                f"no candidate was trained to the end: each has a run whose {self.problem.scorer.name} is not finite. "
                "Use smaller learning rates or clip_norm."
            )
        if best is None:
            assert reference is not None
            return reference
        if reference is None:
            return best
        return reference if is_tie(_advantages(best, reference, contest)) else best

    def result(self, brackets: Sequence[Bracket], seconds: float) -> Tuned:
        """The choice, and what it gains."""
        problem, sizes = self.problem, self.problem.sizes
        chosen, reference = self.choice(OVERALL), self.reference(OVERALL)
        of_splits = [(self.choice(split), self.reference(split)) for split in range(sizes.splits)]
        gain, only_in_validation = self._gain(of_splits), None
        if gain is not None and gain.value <= 0 and reference is not None and chosen is not reference:
            chosen, only_in_validation = reference, chosen  # it looked better because it was chosen
        run = min(chosen.runs(OVERALL), key=lambda number: chosen.contest.best(number))
        candidates = {entry.number: self._candidate(entry, chosen, reference) for entry in self.entries}
        change = math.nan if reference is None else self._member_change(candidates[chosen.number], reference)
        audited = self._audit(chosen, run, reference)
        best = candidates[chosen.number]
        spent = Spent(
            candidates=len(self.entries),
            runs=sum(len(entry.runs(OVERALL)) for entry in self.entries),
            run_epochs=run_epochs(self.entries),
            full_run_epochs=sum(len(entry.runs(OVERALL)) for entry in self.entries) * sizes.epochs,
            examples=run_epochs(self.entries) * len(problem.rows[0].train),
            seconds=seconds,
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
                None if only_in_validation is None else candidates[only_in_validation.number],
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
                "brackets": [{"sizes": list(each.sizes), "rungs": list(each.rungs)} for each in brackets],
                "rows": {name: len(rows) for name, rows in first._asdict().items()},
                "space": {axis.name: _axis_text(axis) for axis in problem.space},
                "collusive_allowed": not problem.judged,
                "seed": sizes.seed,
            },
        )

    def _gain(self, of_splits: Sequence[tuple[Entry, Entry | None]]) -> Gain | None:
        """What the choices of all splits gain on their test rows."""
        if self.problem.all_independent or any(reference is None for _, reference in of_splits):
            return None
        own = [mean(self._test(entry, split)) for split, (entry, _) in enumerate(of_splits)]
        other = [mean(self._test(ref, split)) for split, (_, ref) in enumerate(of_splits) if ref is not None]
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

    def _test(self, entry: Entry, contest: int) -> list[float]:
        return [entry.scores[entry.contest.runs[run]].ensemble for run in entry.runs(contest)]

    def _candidate(self, entry: Entry, chosen: Entry, reference: Entry | None) -> Candidate:
        """The record of a candidate."""
        sign = -1.0 if self.problem.scorer.mode == "max" else 1.0
        until = entry.left_at()
        by_split = entry.by_split(OVERALL, until)
        means = [mean(values) for values in by_split.values()]
        errors = means if len(means) > 1 else next(iter(by_split.values()))
        value, error = entry.contest.value(entry.number, OVERALL, until), mean_and_error(errors)[1]
        scores = [entry.scores[entry.contest.runs[run]] for run in entry.runs(OVERALL)]
        test, members = mean([score.ensemble for score in scores]), mean([score.members for score in scores])
        epochs = entry.epochs()
        ahead, ahead_error = math.nan, math.nan
        if reference is not None and math.isfinite(value):
            ahead, ahead_error = mean_and_error(_advantages(entry, reference, OVERALL, until))
        whole = entry.finished(OVERALL)
        status: Any = (
            "chosen"
            if entry is chosen
            else "reference"
            if entry is reference
            else "failed"
            if entry.failed() or not math.isfinite(value)
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
            ahead=ahead if math.isfinite(ahead) else math.nan,
            ahead_error=ahead_error if math.isfinite(ahead) else math.nan,
            by_split=[sign * number if math.isfinite(number) else math.nan for number in means],
            verdicts=dict(Counter(entry.verdicts.values())),
            curve=[(epoch, number) for epoch, number in curve if math.isfinite(number)],
        )

    def _member_change(self, best: Candidate, reference: Entry) -> float:
        """By how much members of the choice are worse than independent ones: per cent, or points for shares."""
        scores = [reference.scores[reference.contest.runs[run]].members for run in reference.runs(OVERALL)]
        sign, base = (1.0 if self.problem.scorer.mode == "min" else -1.0), mean(scores)
        change = sign * (best.members - base)
        if self.problem.scorer.share:
            return 100.0 * change
        return 100.0 * change / base if base > 0 else math.nan

    def _audit(self, chosen: Entry, run: int, reference: Entry | None) -> Audit | None:
        """The audit of the ensemble that is returned, on its test rows, against independent training."""
        if self.audit_settings is None:
            return None
        key = chosen.contest.runs[run]
        problem = self.problem
        outputs = outputs_of(chosen.swept, [run], problem.inputs(key.split, "test"))[run]
        if not bool(outputs.isfinite().all()):
            return None
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


def _axis_text(axis: Axis) -> Any:
    return json.loads(json.dumps(list(axis.choices), default=str)) if axis.choices else str(axis.distribution)


def _advantages(entry: Entry, reference: Entry, contest: int, until: int | None = None) -> list[float]:
    """By how much a candidate is better than independent training: one number per split, or per seed of one split.

    Both are taken up to an epoch, if one is given.
    """
    own, other = entry.by_split(contest, until), reference.by_split(contest, until)
    if len(own) > 1:
        return [mean(other[split]) - mean(own[split]) for split in own]
    return [b - a for split in own for a, b in zip(own[split], other[split], strict=True)]

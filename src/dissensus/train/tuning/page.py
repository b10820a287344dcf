"""The page of a search: the sentence, the frontier, the rungs, all candidates, the audit, and what was spent."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from dissensus.auditing.page import AuditRecord
from dissensus.auditing.page import answer as audit_answer
from dissensus.auditing.page import drawings as audit_drawings
from dissensus.pages import Badge, Cell, Drawing, FactList, Folded, News, Number, Page, PageTable, Part, Section, Text
from dissensus.pages.parts import counted
from dissensus.pages.tuning import (
    CandidateCurve,
    FrontierPoint,
    Kind,
    SettingPoint,
    frontier,
    over_setting,
    rung_curves,
)
from dissensus.train.tuning.choosing import Gain
from dissensus.train.tuning.records import SYMBOLS, Candidate, Spent, audit_words, in_order, opening, words_of
from dissensus.train.tuning.sentence import gain_words

_MOST_ROWS = 12
"""Candidates that the table shows before it is folded."""
_NEWS: Mapping[str, News] = {"chosen": "good", "reference": "none", "collusive": "bad", "failed": "bad"}
_STATUS = {"chosen": "the choice", "reference": "independent", "finalist": "to the end", "collusive": "collusive"}
_MEANINGS = {
    "stage": "how far the candidate came: dropped at a rung, trained to the end, set aside by the audit, or chosen",
    "validation": "what candidates are compared by: the best epoch of each run, averaged over runs, up to the epoch at "
    "which a candidate was dropped",
    "ahead": "by how much it is better than independent training after as many epochs, split by split; within the "
    "standard error it is a tie",
    "test": "of candidates that were trained to the end, for information only: the gain to quote is above",
    "members": "a single member on the test rows, on average",
    "diversity": "by how much the ensemble is better than its members",
    "audit": "verdicts on validation rows, against independent training; candidates that came far enough are audited",
}


class TunedRecord(Protocol):
    """What is read of `dissensus.Tuned`."""

    @property
    def best(self) -> Candidate:
        """The choice."""
        ...

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates."""
        ...

    @property
    def frontier(self) -> list[Candidate]:
        """Candidates that none beats in error and diversity."""
        ...

    @property
    def gain(self) -> Gain | None:
        """What choosing gains."""
        ...

    @property
    def choices(self) -> list[dict[str, Any]]:
        """What every split chooses."""
        ...

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        ...

    @property
    def audit(self) -> AuditRecord | None:
        """The audit of the choice."""
        ...

    @property
    def spent(self) -> Spent:
        """What it cost."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for."""
        ...


def page(tuned: TunedRecord, title: str) -> Page:
    """The page of a search."""
    return Page(
        title,
        [
            badge(tuned),
            Text(opening(tuned.sentence), "lead"),
            Text(_explanation(tuned)),
            Section("Error against diversity", [_frontier(tuned), *_over_setting(tuned)]),
            Section("Rungs", [Text(_rungs_in_words(tuned)), _curves(tuned)]),
            Section("Candidates", _table(tuned)),
            *_audit(tuned),
            Section("What was spent", [FactList(_spent(tuned))]),
        ],
    )


def badge(tuned: TunedRecord) -> Badge:
    """The result in a few words, with the news that it is."""
    gain, best = tuned.gain, tuned.best
    if best.independent or gain is None:
        return Badge("independent" if best.independent else "chosen", "none")
    if gain.low > 0:
        return Badge("better than independent", "good")
    return Badge("gain not certain", "fair")


def _explanation(tuned: TunedRecord) -> str:
    settings, splits = tuned.settings, tuned.settings["splits"]
    if tuned.gain is None:
        return "There is no independent training to compare with."
    counts: dict[str, int] = {}
    for point in tuned.choices:
        counts[words_of(point)] = counts.get(words_of(point), 0) + 1
    chosen = ", ".join(f"{name} in {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    interval = (
        "The interval is 95 %, with Nadeau and Bengio's correction for splits that share rows."
        if splits > 1
        else "One split gives no interval."
    )
    rows = settings["rows"]
    return (
        f"The gain is that of choosing: each of {counted(splits, 'split')} makes its choice on its own validation rows "
        f"({rows['validation']:,}), and is compared with independent training on its test rows ({rows['test']:,}). "
        f"{_gained(tuned, tuned.gain)} {interval} Splits chose {chosen}. Ties within a standard error go to "
        "independent training."
    )


def _gained(tuned: TunedRecord, gain: Gain) -> str:
    """The gain as a sentence, whatever was chosen."""
    if gain.value == gain.low == gain.high == 0:
        return "All of them chose independent training, so that there is no gain."
    return f"That gives {gain_words(gain, tuned.settings['metric'], tuned.settings['mode'])}."


def _kind(candidate: Candidate) -> Kind:
    return "dropped" if candidate.status == "failed" else candidate.status


def frontier_figure(tuned: TunedRecord) -> Any:
    """Error against diversity of all candidates."""
    metric = tuned.settings["metric"]

    def at(candidate: Candidate) -> FrontierPoint:
        return FrontierPoint(candidate.name, candidate.diversity, candidate.test, _kind(candidate))

    points, edge = [at(candidate) for candidate in tuned.candidates], [at(candidate) for candidate in tuned.frontier]
    above = "members' {} beyond the ensemble's" if tuned.settings["mode"] == "min" else "ensemble's {} beyond members'"
    return frontier(points, edge, f"diversity: {above.format(metric)}", f"{metric} on test rows")


def _frontier(tuned: TunedRecord) -> Drawing:
    better = "lower" if tuned.settings["mode"] == "min" else "higher"
    return Drawing(
        frontier_figure(tuned),
        f"Each point is a candidate, the mean over its runs on test rows; {better} is better. Diversity is useful "
        "where it comes with a better ensemble, and not where points move to the right only.",
    )


def _over_setting(tuned: TunedRecord) -> list[Part]:
    """The metric over the first setting of numbers that varies, where it is the only one."""
    names = list(tuned.settings["space"])
    points = [candidate for candidate in tuned.candidates if names[0] in candidate.point]
    numeric = all(isinstance(c.point[names[0]], int | float) for c in points)
    if len(names) > 1 or not numeric or len(points) < 3:
        return []
    symbol: str = SYMBOLS.get(names[0]) or names[0]
    metric = tuned.settings["metric"]
    settings = [SettingPoint(c.point[names[0]], c.value, c.ahead_error, _kind(c)) for c in points]
    return [
        Drawing(
            over_setting(settings, symbol, f"{metric} on validation rows"),
            f"What candidates are compared by, over {symbol}. Bars are one standard error of the difference from "
            "independent training, which is compared split by split. Candidates that were dropped stand where they "
            "were then.",
        )
    ]


def _rungs_in_words(tuned: TunedRecord) -> str:
    brackets = tuned.settings["brackets"]
    each = [
        " → ".join(f"{size} up to epoch {rung}" for size, rung in zip(bracket["sizes"], bracket["rungs"], strict=True))
        for bracket in brackets
    ]
    what = "one bracket" if len(each) == 1 else f"{len(each)} brackets"
    return (
        f"Candidates competed in {what}: {'; '.join(each)}. Independent candidates are beside them. A run also goes on "
        "while its candidate is among the best of its own split."
    )


def _curves(tuned: TunedRecord) -> Drawing:
    metric = tuned.settings["metric"]
    curves = [CandidateCurve(c.name, c.curve, _kind(c)) for c in tuned.candidates if c.curve]
    rungs = sorted({rung for bracket in tuned.settings["brackets"] for rung in bracket["rungs"][:-1]})
    return Drawing(
        rung_curves(curves, rungs, f"best {metric} so far"),
        f"The best {metric} on validation rows up to each epoch, averaged over runs. Vertical lines are rungs, crosses "
        "are the ends of candidates that were dropped.",
    )


def _table(tuned: TunedRecord) -> list[Part]:
    share = tuned.settings["metric"] in ("accuracy", "error")
    form, small = (".1%", ".2%") if share else (".4g", ".3g")
    header = ("settings", "stage", "validation", "ahead", "test", "members", "diversity", "audit")
    rows: list[list[Cell]] = []
    for candidate in in_order(tuned.candidates, tuned.settings["mode"]):
        words = _STATUS.get(candidate.status, f"{candidate.status} at {candidate.epochs}")
        news = _NEWS.get(candidate.status)
        error = candidate.ahead_error if math.isfinite(candidate.ahead_error) and not share else None
        rows.append(
            [
                candidate.name,
                words if news is None else Badge(words, news),
                Number(candidate.value, form=form),
                "" if candidate.ahead == error == 0 else Number(candidate.ahead, error=error, form=small),
                Number(candidate.test, form=form),
                Number(candidate.members, form=form),
                Number(candidate.diversity, form=small),
                audit_words(candidate.verdicts),
            ]
        )
    parts: list[Part] = [PageTable(header, rows[:_MOST_ROWS], narrow="cards", columns=_MEANINGS)]
    if len(rows) > _MOST_ROWS:
        rest = PageTable(header, rows[_MOST_ROWS:], narrow="cards")
        parts.append(Folded(f"The other {len(rows) - _MOST_ROWS} candidates", [rest]))
    return parts


def _audit(tuned: TunedRecord) -> list[Part]:
    if tuned.audit is None:
        return []
    intro = Text(f"The ensemble of {tuned.best.name} with the best validation, on its test rows.")
    return [Section("Audit of the choice", [intro, *audit_answer(tuned.audit), *audit_drawings(tuned.audit)])]


def _spent(tuned: TunedRecord) -> list[tuple[str, str]]:
    spent, settings = tuned.spent, tuned.settings
    minutes = f"{spent.seconds:.0f} s" if spent.seconds < 120 else f"{spent.seconds / 60:.0f} min"
    pairs = [
        ("candidates", f"{spent.candidates:,}"),
        ("runs", f"{spent.runs:,} ({counted(settings['splits'], 'split')}, {counted(settings['seeds'], 'seed')} each)"),
        ("epochs of all runs", f"{spent.run_epochs:,}, {spent.share:.0%} of training every candidate to the end"),
        ("examples seen", f"{spent.examples:,}"),
        ("time", minutes),
        ("rows of a split", ", ".join(f"{count:,} {name}" for name, count in settings["rows"].items())),
    ]
    for name, values in settings["space"].items():
        text = ", ".join(map(str, values)) if isinstance(values, list) else str(values)
        pairs.append((f"space of {SYMBOLS.get(name, name)}", text))
    if settings["budget"] is not None:
        pairs.append(("budget", f"{settings['budget']:g} whole trainings of a candidate"))
    return pairs

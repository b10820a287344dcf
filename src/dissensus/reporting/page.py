"""The page of a report: answers at a glance, numbers, curves, examples, shifted data, and the audit."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import dissensus.reporting.figures as figures
import dissensus.reporting.regression as regression
from dissensus.auditing.page import answer as audit_answer
from dissensus.auditing.page import drawings as audit_drawings
from dissensus.auditing.page import parts as audit_parts
from dissensus.metrics import roc
from dissensus.metrics.intervals import Interval
from dissensus.pages import Badge, Cell, Drawing, FactList, Folded, Number, Page, PageTable, Part, Section, Text
from dissensus.pages.parts import counted
from dissensus.reporting.content import BETTER, SHARES, TITLES, Content, size
from dissensus.reporting.content import title as title_of
from dissensus.reporting.judging import VERDICTS, Finding, percent
from dissensus.reporting.judging import number as in_words
from dissensus.reporting.measures import Example

_MOST_CLASSES = 12
"""Classes that a table shows before it is folded."""
_MOST_CONFUSIONS = 8
_MEANINGS = {
    "sound": "No answer below speaks against this ensemble, and some speak for it.",
    "reservations": "Some answers below call for care.",
    "problems": "At least one answer below is bad.",
    "undecided": "The data does not suffice for an answer.",
}


class ReportRecord(Protocol):
    """What is read of `dissensus.reporting.Report`."""

    @property
    def facts(self) -> dict[str, Any]:
        """Settings and sizes."""
        ...

    @property
    def findings(self) -> list[Finding]:
        """Questions at a glance."""
        ...

    @property
    def verdict(self) -> str:
        """The verdict, a key of `VERDICTS`."""
        ...

    @property
    def content(self) -> Content:
        """What figures, tables and pictures are made of."""
        ...


def page(report: ReportRecord, title: str) -> Page:
    """The page of a report."""
    content = report.content
    classifies = content.settings.task == "classification"
    return Page(
        title,
        [
            Badge(report.verdict, VERDICTS[report.verdict]),
            Text(_lead(report), "lead"),
            _glance(report.findings),
            Section("Numbers", _numbers(content)),
            *(_classification_curves(content, report.facts) if classifies else _regression_curves(content)),
            *([_by_class(content)] if classifies else _by_target(content)),
            *_example_sections(content),
            *_shifted(content),
            _audit(content),
            Section("What was evaluated", [FactList(_facts(report.facts))]),
        ],
    )


def _lead(report: ReportRecord) -> str:
    numbers = report.content.measured.numbers
    if report.content.settings.task == "classification":
        quality = f"right on {percent(numbers['accuracy'])} of examples"
    else:
        quality = f"root mean squared error {in_words(numbers['rmse'])}"
    return f"{size(report.facts).capitalize()}: {quality}. {_MEANINGS[report.verdict]}"


def _glance(answers: Sequence[Finding]) -> PageTable:
    rows: list[list[Cell]] = [[item.question, Badge(item.answer, item.news), item.sentence] for item in answers]
    return PageTable(("question", "answer", "numbers"), rows, narrow="cards")


def number(name: str, value: Interval, task: str = "") -> Number:
    """A number in the form that its name asks for; errors of a classification are shares."""
    is_share = name in SHARES or (task == "classification" and name.startswith("risk_at_"))
    return Number(value.value, value.low, value.high, form=".1%" if is_share else ".4g")


def _numbers(content: Content) -> list[Part]:
    measured = content.measured
    task = content.settings.task
    rows: list[list[Cell]] = []
    for name, value in measured.numbers.items():
        members = measured.members.get(name)
        title = title_of(name, task)
        if name in ("coverage", "width", "interval_score"):
            title = title.replace("intervals", f"{regression.interval_level(content.settings):.0%} intervals")
        beside: Cell = number(name, members, task) if members is not None else ""
        rows.append([title, number(name, value, task), beside, BETTER.get(name, "")])
    note = (
        "Intervals are 95 % confidence intervals over examples. The members' column is their mean: what one of them "
        "alone would do."
    )
    return [Text(note), PageTable(("", "ensemble", "members", "better"), rows, narrow="fit")]


def _classification_curves(content: Content, facts: Mapping[str, Any]) -> list[Part]:
    measured = content.measured
    rows = [
        Drawing(
            figures.reliability(measured.calibration, facts["examples"]),
            "Does confidence agree with accuracy? Points below the diagonal: more confident than right. Points above: "
            "less. Bars are 95 % intervals; below, the share of examples with that confidence.",
        ),
        Drawing(
            figures.risk_coverage(measured.risk, measured.best_risk, "wrong among those kept", shares=True),
            "What is gained by refusing the most uncertain examples? The faster a curve falls to the left, the more "
            "its score knows about errors. The band is a 95 % interval.",
        ),
    ]
    return [Section("Calibration and refusal", rows), *_uncertainty(content, "wrong", shares=True)]


def _uncertainty(content: Content, label: str, *, shares: bool) -> list[Part]:
    measured = content.measured
    captions = {
        "entropy of the mean": "Total uncertainty, in steps of about a tenth of the examples: bars should rise from "
        "left to right.",
        "mutual information": "Members' disagreement alone: what more data or other members would change. Flat: the "
        "disagreement says nothing about errors.",
        regression.SPREAD: "On the diagonal, errors are as large as predicted. Above it they are larger. Each point is "
        "about a tenth of the examples.",
        regression.DISAGREEMENT: "Members' disagreement alone: what more data or other members would change. It leaves "
        "out the noise of targets, so points lie above the diagonal.",
    }
    draw = figures.error_by_rank if shares else figures.error_by_deviation
    drawings = [Drawing(draw(bins, name, label), captions.get(name, "")) for name, bins in measured.uncertainty.items()]
    if not drawings:
        return []
    introduction = "Are errors where the ensemble is uncertain? Bars are 95 % intervals."
    return [Section("Uncertainty against error", [Text(introduction), *drawings])]


def _regression_curves(content: Content) -> list[Part]:
    measured = content.measured
    first: list[Part] = [
        Drawing(
            figures.predicted_and_true(measured.tables["predictions"], content.classes),
            "Targets over predictions. On the diagonal a prediction is exact.",
        )
    ]
    if measured.tables["levels"]:
        quantiles = content.settings.kind == "quantiles"
        label = "targets below the quantile" if quantiles else "targets within the interval"
        first.append(
            Drawing(
                figures.interval_calibration(measured.tables["levels"], label),
                "Do targets lie where the ensemble says, as often as it says? Below the diagonal: "
                + ("quantiles are too low." if quantiles else "intervals are too narrow.")
                + " Bars are 95 % intervals.",
            )
        )
    if measured.risk:
        first.append(
            Drawing(
                figures.risk_coverage(
                    measured.risk, measured.best_risk, "root mean squared error of those kept", shares=False
                ),
                "What is gained by refusing the most uncertain examples? The faster a curve falls to the left, the "
                "more its score knows about errors. The band is a 95 % interval.",
            )
        )
    return [Section("Predictions and refusal", first), *_uncertainty(content, "root mean squared error", shares=False)]


def _by_class(content: Content) -> Section:
    rows: list[list[Cell]] = [
        [
            row["class"],
            Number(row["examples"], form=","),
            number("accuracy", row["recall"]) if row["examples"] else "",
            number("accuracy", row["precision"]),
        ]
        for row in content.measured.tables["classes"]
    ]
    header = ("class", "examples", "recall", "precision")
    parts: list[Part] = [
        Text(
            "Recall is the share of a class that is found; precision is the share that is right where the class is "
            "named. The class that is found least often comes first."
        ),
        PageTable(header, rows[:_MOST_CLASSES], narrow="fit"),
    ]
    if len(rows) > _MOST_CLASSES:
        table = PageTable(header, rows[_MOST_CLASSES:], narrow="fit")
        parts.append(Folded(counted(len(rows) - _MOST_CLASSES, "other class", "other classes"), [table]))
    confusions = content.measured.tables["confusions"]
    if confusions:
        pairs: list[list[Cell]] = [
            [row["class"], row["taken for"], Number(row["examples"], form=","), number("accuracy", row["share"])]
            for row in confusions[:_MOST_CONFUSIONS]
        ]
        parts += [
            Text("The most frequent confusions, as a share of the class."),
            PageTable(("class", "taken for", "examples", "share"), pairs, narrow="fit"),
        ]
    return Section("By class", parts)


def _by_target(content: Content) -> list[Part]:
    rows = content.measured.tables["targets"]
    if len(rows) < 2:
        return []
    cells: list[list[Cell]] = [
        [row["target"], *(number(name, row[name]) for name in ("rmse", "mae", "r2"))] for row in rows
    ]
    header = ("target", *(TITLES[name] for name in ("rmse", "mae", "r2")))
    return [Section("By target", [PageTable(header, cells, narrow="cards")])]


def _example_sections(content: Content) -> list[Part]:
    measured = content.measured
    if content.settings.task == "classification":
        hardest = "The right class has the least probability here. Wrong labels in the data show up here, too."
        disputed = "Members disagree most here, whether the ensemble is right or not."
    else:
        hardest = "The largest errors. Wrong values in the data show up here, too."
        disputed = "Members disagree most here, whether the ensemble is right or not."
    entries = [("Hardest examples", hardest, measured.hardest), ("Most disputed examples", disputed, measured.disputed)]
    entries = [entry for entry in entries if entry[2]]
    chosen = {row for _, _, rows in entries for row in rows}
    if chosen and all(row in content.shown and content.shown[row].picture is not None for row in chosen):
        galleries = [
            Drawing(
                figures.pictures([(content.shown[row].picture, _words(measured.examples[row])) for row in rows]),
                f"{title}: prediction with its confidence, truth, members' votes, row. {text}",
            )
            for title, text, rows in entries
        ]
        return [Section("Hardest and most disputed examples", galleries)]
    sections = [Section(title, [Text(text), _rows(content, rows)]) for title, text, rows in entries]
    return [Section("Hardest and most disputed examples", sections)] if sections else []


def _words(example: Example) -> str:
    """What stands above a picture."""
    sure = example.numbers.get("confidence")
    prediction = _short(example.prediction) + ("" if sure is None else f" ({sure:.0%})")
    return "\n".join([prediction, f"true: {_short(example.target)}", _short(example.votes, 19), f"row {example.row:,}"])


def _short(text: str, most: int = 12) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rows(content: Content, rows: Sequence[int]) -> PageTable:
    """Examples as rows of a table, with their inputs where those can be shown."""
    measured = content.measured
    columns = list(
        dict.fromkeys(name for row in rows for name in (content.shown[row].cells if row in content.shown else ()))
    )
    classifies = content.settings.task == "classification"
    shares = ("confidence", "probability of the right class")
    names = list(measured.examples[rows[0]].numbers)
    cells: list[list[Cell]] = []
    for row in rows:
        example = measured.examples[row]
        inputs = content.shown[row].cells if row in content.shown else {}
        cells.append(
            [
                f"row {row:,}",
                example.target,
                example.prediction,
                *(Number(example.numbers[name], form=".1%" if name in shares else ".3g") for name in names),
                example.votes,
                *(inputs.get(name, "") for name in columns),
            ]
        )
    header = (
        "example",
        "target",
        "prediction",
        *names,
        "members' votes" if classifies else "range of members",
        *columns,
    )
    return PageTable(header, cells, narrow="cards")


def _shifted(content: Content) -> list[Part]:
    measured = content.measured
    if not measured.shifted:
        return []
    names = list(dict.fromkeys(name for result in measured.shifted.values() for name in result.numbers))
    first = next(iter(measured.scores))
    rows: list[list[Cell]] = [
        ["the data of this report", Number(len(measured.scores[first]), form=","), *_cells(measured.numbers, names)],
        *(
            [name, Number(result.examples, form=","), *_cells(result.numbers, names)]
            for name, result in measured.shifted.items()
        ),
    ]
    header = ("set", "examples", *(title_of(key, content.settings.task) for key in names))
    scores: list[list[Cell]] = [
        [score, *(_area(result.detection[score]) for result in measured.shifted.values())] for score in measured.scores
    ]
    text = (
        "Does the ensemble notice data unlike its own? The area under the ROC curve (AUROC) is the chance that a "
        f"shifted example scores higher than a usual one: 0.5 is guessing. The first score, {first}, was chosen before "
        "any data was seen. The answer at the top goes by it."
    )
    missed = ", ".join(f"{percent(result.false_positives)} of {name}" for name, result in measured.shifted.items())
    return [
        Section(
            "Shifted data",
            [
                PageTable(header, rows, narrow="cards"),
                Text(text),
                PageTable(("AUROC of", *measured.shifted), scores, narrow="scroll"),
                Text(f"A threshold of {first} that flags 5 % of usual examples misses {missed}."),
                *(drawing for name in measured.shifted for drawing in _detection(content, name, first)),
            ],
        )
    ]


def _cells(numbers: Mapping[str, Interval], names: Sequence[str]) -> list[Cell]:
    return [number(name, numbers[name]) if name in numbers else "" for name in names]


_MOST_CURVES = 4


def _detection(content: Content, name: str, score: str) -> list[Drawing]:
    """The distributions of a score on usual and on shifted data, and the ROC curves of the scores."""
    measured, result = content.measured, content.measured.shifted[name]
    others = [other for other in list(measured.scores) if other != score]
    best = sorted(others, key=lambda other: -result.detection[other].value)[: _MOST_CURVES - 1]
    rates = {key: roc(measured.scores[key], result.scores[key]) for key in [score, *best]}
    curves = {f"{key}, {result.detection[key].value:.3f}": (x.numpy(), y.numpy()) for key, (x, y) in rates.items()}
    return [
        Drawing(
            figures.score_histogram(
                measured.scores[score].numpy(), result.scores[score].numpy(), ("this data", name), score
            ),
            f"{name}: the less the two overlap, the better {score} tells them apart.",
        ),
        Drawing(
            figures.roc_curves(curves),
            f"{name}: the closer a curve comes to the upper left corner, the better. Numbers are areas (AUROC).",
        ),
    ]


def _area(value: Interval) -> Number:
    return Number(value.value, value.low, value.high, form=".3f")


def _audit(content: Content) -> Section:
    audit = content.measured.audit
    details = [
        part for part in audit_parts(audit) if not isinstance(part, Drawing | Badge) and part not in audit_answer(audit)
    ]
    title = "Audit: is its diversity real?"
    return Section(
        title, [*audit_answer(audit), *audit_drawings(audit), Folded("Every test and number of the audit", details)]
    )


def _facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [("ensemble", size(facts)), ("task", facts["task"]), ("outputs are", facts["kind"])]
    pairs += [("loss", facts["loss"]), ("pooled by", facts["pool"])]
    if facts["task"] == "classification":
        pairs.append(("classes", ", ".join(facts["names"])))
    if facts.get("training"):
        pairs.append(("training data, for the audit", counted(facts["training"], "example")))
    pairs += [(f"shifted: {name}", counted(count, "example")) for name, count in facts["shifted"].items()]
    match = facts.get("matches_own_prediction")
    if match is not None:
        pairs.append(("the model's own prediction", match if isinstance(match, str) else "equals the pooled outputs"))
    pairs.append(("made with", f"dissensus {facts['dissensus']}, torch {facts['torch']}"))
    return pairs

"""The audit's page and its figure: the verdict, the charts, and every number behind them."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from dissensus.auditing.examples import DROPS
from dissensus.auditing.judging import Judgement
from dissensus.auditing.measuring import Figure
from dissensus.diversity.plane import plane_of
from dissensus.pages import Badge, Drawing, FactList, News, Number, Page, PageTable, Part, Section, Text, charts, style
from dissensus.pages.figures import plane_curves
from dissensus.pages.parts import counted


class Meaning(NamedTuple):
    """A verdict in plain words, and what kind of news it is."""

    news: News
    text: str


MEANINGS = {
    "healthy": Meaning(
        "good",
        "As far as this data shows, every member is a usable model. Members disagree, and their mean is better for it.",
    ),
    "redundant": Meaning(
        "fair", "The members say nearly the same, so one of them would do almost as well as all together."
    ),
    "dominated": Meaning(
        "fair",
        "One member is as good as the whole ensemble, or better. The others cost time and may cost quality.",
    ),
    "collusive": Meaning(
        "bad",
        "The members lean on each other. Each is worse than a model trained alone would be, and their errors cancel in "
        "the mean. Such diversity looks large, and need not hold up on other data or when a member is missing.",
    ),
    "unskilled": Meaning(
        "bad", "The ensemble predicts no better than a constant answer would. There is nothing to judge yet."
    ),
    "undecided": Meaning("none", "The data does not suffice for a verdict."),
}
_MOST_DRAWN = 60
"""Members beyond which a matrix of pairs is too fine to read."""


@runtime_checkable
class AuditRecord(Protocol):
    """What is read of `dissensus.auditing.Audit`."""

    @property
    def verdict(self) -> str:
        """The verdict, a key of `MEANINGS`."""
        ...

    @property
    def judgement(self) -> Judgement:
        """The verdict with reasons, advice and evidence."""
        ...

    @property
    def test(self) -> dict[str, Figure]:
        """Figures on test data."""
        ...

    @property
    def train(self) -> dict[str, Figure] | None:
        """Figures on training data."""
        ...

    @property
    def reference(self) -> dict[str, Figure] | None:
        """Figures of a reference."""
        ...

    @property
    def detection(self) -> dict[str, Figure]:
        """Areas under the ROC curve, by score."""
        ...

    @property
    def by_member(self) -> dict[str, list[Any]]:
        """Losses, accuracies and correlations of members."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """Settings and sizes."""
        ...

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Every figure with its title and its group."""
        ...


def page(audit: AuditRecord, title: str) -> Page:
    """The page of an audit; ``title`` names the ensemble."""
    return Page(f"Audit: {title}", parts(audit))


def parts(audit: AuditRecord) -> list[Part]:
    """What a page says about an audit: the verdict, the charts, the evidence, every number, and the settings."""
    facts = audit.facts
    content: list[Part] = [
        *answer(audit),
        *drawings(audit),
        *_evidence(audit.judgement),
        Section("Every number", [Text("Intervals are 95 % bootstrap intervals over examples."), *_tables(audit)]),
        *_detection(audit),
        Section("What was audited", [FactList(_settings(facts))]),
    ]
    return explained(content, _terms(facts))


def answer(audit: AuditRecord) -> list[Part]:
    """The verdict, its reasons and advice."""
    meaning, judgement = MEANINGS[audit.verdict], audit.judgement
    return [
        Badge(audit.verdict, meaning.news),
        Text(meaning.text, "lead"),
        *(Text(f"{_capitalised(reason)}.") for reason in judgement.reasons),
        *(Text(advice, "finding") for advice in judgement.advice),
        *([Text(_capitalised(text))] if (text := difference(audit.facts)) else []),
    ]


def difference(facts: Mapping[str, Any]) -> str:
    """How the pooled outputs differ from the model's own prediction; empty where they do not, or it is not known."""
    match = facts.get("matches_own_prediction")
    return match if isinstance(match, str) else ""


def _settings(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [
        ("ensemble", size(facts)),
        ("task", facts["task"]),
        ("outputs are", facts["kind"]),
        ("loss", facts["loss"]),
        ("pooled by", facts["pool"]),
    ]
    if "basis" in facts:
        pairs.append(("tests", facts["basis"]))
    if "nominal_coverage" in facts:
        pairs.append(("predicted intervals", f"should hold {facts['nominal_coverage']:.0%} of targets"))
    if "matches_own_prediction" in facts:
        pairs.append(("the model's own prediction", difference(facts) or "equals the pooled outputs"))
    return pairs


def size(facts: Mapping[str, Any]) -> str:
    """The numbers of members, examples and outputs, in words."""
    columns = counted(facts["labels"], "label") if "labels" in facts else counted(facts["outputs"], "output")
    examples = counted(facts["examples"] // facts.get("labels", 1), "example")
    return f"{counted(facts['members'], 'member')}, {examples}, {columns}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


Terms = Mapping[str, str]
"""Explanations by the pattern of the word that they explain."""


def _terms(facts: Mapping[str, Any]) -> Terms:
    scores = "values" if facts["task"] == "regression" else "logits"
    pooling = {
        "probability": f"the mean of their {'densities' if facts['task'] == 'regression' else 'probabilities'}",
        "score": f"the mean of their {scores}",
        "vote": "the class that most of them vote for",
    }[facts["pool"]]
    return {
        r"\bpool(s|ed|ing)?\b": f"Pooling makes one prediction out of the members' outputs: here {pooling}.",
        r"\blogits?\b": "Logits are the scores that a classifier gives to classes; the softmax turns them into "
        "probabilities.",
        r"\boffsets?\b": "An offset is a constant that a member adds to its outputs on every example.",
        r"\breference\b": "The reference is an ensemble of the same build whose members were trained alone.",
        "β": "β sets how members are trained: at 0 each on its own loss, at 1 all of them on the ensemble's loss.",
    }


def explained(parts: Sequence[Part], terms: Terms) -> list[Part]:
    """Parts with a note beside the first that uses a term: below a text, above a table, at the end of a caption."""
    missing = dict(terms)

    def notes(text: str) -> str:
        explanation = ""
        while used := [pattern for pattern in missing if re.search(pattern, f"{text} {explanation}")]:
            explanation = " ".join([*filter(None, [explanation]), *(missing.pop(pattern) for pattern in used)])
        return explanation

    def walk(parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Section):
                yield replace(part, parts=list(walk(part.parts)))
            elif isinstance(part, Drawing):
                caption = " ".join(filter(None, [part.caption, notes(part.caption)]))
                yield replace(part, caption=caption, description=part.description or part.caption)
            else:
                note = notes(_words(part))
                both = [part, Text(note, "note")] if note else [part]
                yield from both if isinstance(part, Text) else reversed(both)

    return list(walk(parts))


def _words(part: Part) -> str:
    """The text of a part, as far as it may hold terms."""
    if isinstance(part, Text):
        return part.text
    if isinstance(part, PageTable):
        return " ".join(cell for row in part.rows for cell in row if isinstance(cell, str))
    return " ".join(value for _, value in part.pairs) if isinstance(part, FactList) else ""


def _evidence(judgement: Judgement) -> list[Part]:
    """Every question that was asked, with its answer and its numbers."""
    if not judgement.evidence:
        return []
    rows = [[item.question, item.answer, item.measure, item.numbers()] for item in judgement.evidence]
    introduction = (
        "The verdict is the first of unskilled, collusive, dominated, redundant, undecided and healthy that applies. "
        "Each question is a statistical test with a threshold: p is the probability of a number at least this far "
        "beyond the threshold if the true number lies on it."
    )
    parts = [
        Text(introduction),
        PageTable(("question", "answer", "what was measured", "numbers"), rows, narrow="cards"),
        Text(f"Confidence: {judgement.confidence}."),
    ]
    return [Section("What the verdict rests on", parts)]


def _tables(audit: AuditRecord) -> list[Part]:
    """One table per group of numbers."""
    columns = ["test", *(name for name in ("train", "reference") if getattr(audit, name) is not None)]
    sections: list[Part] = []
    for group in dict.fromkeys(finding["group"] for finding in audit.findings):
        rows = [
            [
                finding["title"],
                number(finding),
                *(number(finding[name]) if name in finding else "" for name in columns[1:]),
            ]
            for finding in audit.findings
            if finding["group"] == group
        ]
        sections.append(Section(_capitalised(group), [PageTable(("", *columns), rows, narrow="fit")]))
    return sections


def number(finding: Mapping[str, Any]) -> Number:
    """The number of a finding, with its interval."""
    return Number(finding["value"], finding["low"], finding["high"], form=".4g")


def _detection(audit: AuditRecord) -> list[Part]:
    if not audit.detection:
        return []
    rows = [[name, Number(area.value, area.low, area.high, form=".3f")] for name, area in audit.detection.items()]
    introduction = "Area under the ROC curve: the chance that a shifted example scores higher than one that is not."
    return [
        Section("Telling shifted data apart", [Text(introduction), PageTable(("score", "area"), rows, narrow="fit")])
    ]


Draw = Callable[[AuditRecord, Any], None]
"""Draws on axes."""


def panels(audit: AuditRecord) -> list[tuple[Draw, str]]:
    """The charts of an audit: functions that draw on axes, with their captions."""
    entries: list[tuple[Draw, str]] = [(_losses, "Each member's loss, and the loss of the pooled ensemble.")]
    if any(name.startswith("codependence_") for name in audit.test):
        entries.append((_codependence, "How much the ensemble's loss rises when members are left out at random."))
    if audit.facts["members"] <= _MOST_DRAWN:
        entries.append(
            (
                _correlations,
                "Correlation of members' errors: 1 where two members err alike, 0 where their errors have nothing in "
                "common, below 0 where they cancel.",
            )
        )
    if audit.facts["members"] > 1 and min(audit.by_member.get("accuracy", [1.0])) < 1:
        caption = (
            "Pairs of members on the plane of accuracy and disagreement. Upper line: the best member beside one whose "
            "errors are independent of its own. Lower line: beside itself with some predictions flipped at random."
        )
        entries.append((_plane, caption))
    return entries


def drawings(audit: AuditRecord) -> list[Drawing]:
    """Every chart as a figure."""
    return [Drawing(_single_figure(audit, draw), caption) for draw, caption in panels(audit)]


@style.figure_style()
def _single_figure(audit: AuditRecord, draw: Draw) -> Any:
    figure = style.blank_figure(height=3.4)
    axes = figure.subplots()
    draw(audit, axes)
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        style.add_legend(figure, names)
    return figure


@style.figure_style()
def overview(audit: AuditRecord) -> Any:
    """Every chart in one matplotlib figure under the verdict."""
    entries = panels(audit)
    columns = min(2, len(entries))
    rows = -(-len(entries) // columns)
    figure = style.blank_figure(5.2 * columns, 0.4 + 3.3 * rows)
    figure.suptitle(f"audit: {audit.verdict}", x=0.01, ha="left")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(entries) :]:
        axes.set_axis_off()
    for axes, (draw, _) in zip(grid, entries, strict=False):
        draw(audit, axes)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize=10.5)
    return figure


def _losses(audit: AuditRecord, axes: Any) -> None:
    losses = audit.by_member["loss"]
    axes.scatter(range(len(losses)), losses, color=style.COLOURS[0], s=30, label="member", zorder=3)
    for name, label, colour, dash in (
        ("individual", "members' mean", style.COLOURS[0], "--"),
        ("ensemble", "ensemble", style.COLOURS[1], "-"),
    ):
        loss = audit.test[name]
        axes.axhline(loss.value, color=colour, linestyle=dash, label=label)
        axes.axhspan(loss.low, loss.high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="member", ylabel="loss")
    highest = max(axes.get_ylim()[1], *losses)
    lowest = min(0.0, axes.get_ylim()[0] if min(losses) < 0 else 0.0)  # negative log-densities lie below zero too
    axes.set_ylim(lowest, 1.06 * highest if math.isfinite(highest) and highest > 0 else None)  # room for the worst
    axes.xaxis.get_major_locator().set_params(integer=True)


def _codependence(audit: AuditRecord, axes: Any) -> None:
    for figures, label, colour in (
        (audit.test, "this ensemble", style.COLOURS[1]),
        (audit.reference, "reference", style.COLOURS[0]),
    ):
        if figures is None:
            continue
        drops = [drop for drop in DROPS if f"codependence_{drop}" in figures]
        rises = [figures[f"codependence_{drop}"] for drop in drops]
        band = [0.0, *(rise.low for rise in rises)], [0.0, *(rise.high for rise in rises)]
        values = [0.0, *(rise.value for rise in rises)]
        style.draw_line(axes, [0.0, *drops], values, band, color=colour, marker="o", label=label)
    axes.set(xlabel="share of members left out", ylabel="rise of the loss")
    style.percent_axis(axes.xaxis)
    style.percent_axis(axes.yaxis)
    axes.set_ylim(bottom=0)


def _correlations(audit: AuditRecord, axes: Any) -> None:
    image = axes.imshow(audit.by_member["error_correlation"], cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set(xlabel="member", ylabel="member")
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.figure.colorbar(image, ax=axes, label="correlation of errors")


def _plane(audit: AuditRecord, axes: Any) -> None:
    accuracy, disagreement = (torch.tensor(audit.by_member[name]) for name in ("accuracy", "disagreement"))
    pairs = plane_of(accuracy, disagreement)
    points = torch.stack(pairs, 1)[pairs.accuracy < 1].tolist()
    curves = plane_curves([("pair", points)], float(accuracy.max()), audit.facts["outputs"])
    charts.draw_scatter(axes, [("pair", points)], curves, "accuracy of a pair", "disagreement / error rate")

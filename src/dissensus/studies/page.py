"""One page for all results: per paper the claims with their verdicts, and every study that was run, with figures."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dissensus.pages import (
    Badge,
    Cell,
    Drawing,
    FactList,
    Folded,
    Link,
    News,
    Number,
    Page,
    PageTable,
    Part,
    Section,
    Text,
    style,
)
from dissensus.pages.parts import counted
from dissensus.studies import datasets, library, verdicts
from dissensus.studies.figures import figures
from dissensus.studies.labels import measure_label
from dissensus.studies.procedures.attack_measures import is_published, is_within, suite_of
from dissensus.studies.procedures.base import OnProgress, no_progress
from dissensus.studies.results import Estimate, Point, Provenance, Summary, Verdict
from dissensus.studies.run_folders import find_all, unfinished
from dissensus.studies.spec import PAPERS, Spec, toml_value
from dissensus.studies.validation import missing

NEWS: dict[str, News] = {
    verdicts.AGREES: "good",
    verdicts.DIRECTION: "fair",
    verdicts.DISAGREES: "bad",
    verdicts.UNDECIDED: "none",
    verdicts.NOT_COMPARABLE: "none",
    verdicts.NOT_RUN: "none",
}
"""What kind of news each verdict is."""
VERDICT_COLUMNS = ("statement", "verdict", "data", "paper", "ours", "interval", "difference")
_COLUMN_NOTES: dict[str, str] = {
    "paper": "the paper's number, or what it says of ours",
    "ours": "the mean over seeds",
    "interval": "95 % over seeds; Δ: of the paired difference, where two values are compared",
    "difference": "ours minus the paper's number, or minus the value that ours is compared with",
}
"""What columns of the table of verdicts hold."""
_CURVES = (
    "Training curves are means over each epoch's steps, in training mode (dropout on); test curves are taken at the "
    "epoch's end. The table's gap compares both in evaluation mode, after the last epoch."
)
_MOST_COLUMNS = 10
"""Points of a grid that can stand beside each other in a table."""
_MOST_NAMED, _MOST_NAMED_TWICE = 12, 4
"""Points that a sentence can name with one number each, and with two."""

Study = tuple[Spec, Sequence[Summary]]
"""A study and its results, the largest scale first."""
SETTINGS = {verdicts.PAPER: "at the paper's setting", verdicts.REDUCED: "in a reduced setting"}


class Standing(NamedTuple):
    """What a study's results say in one of the two settings."""

    claim: str
    """The verdict on the study's claim, or why there is none."""
    news: News
    statements: str
    """How many statements have which verdict, and at which scale; empty where none was judged."""


def standing(spec: Spec, results: Sequence[Summary], setting: str) -> Standing:
    """Where a study stands in a setting: by a result that judges the claim there and is not stale, if there is one."""
    judged = [(summary, verdicts.in_short(summary.verdicts, setting)) for summary in results]
    judged = [(summary, short) for summary, short in judged if short.statements]
    judged.sort(key=lambda pair: (not pair[1].claim, bool(pair[0].stale)))  # the largest scale among equals
    if judged:
        summary, short = judged[0]
        changed, stale = "changed by --set" if summary.provenance.changes else "", "stale" if summary.stale else ""
        notes = ", ".join(filter(None, (f"scale {summary.scale}", changed, stale)))
        words = f"{verdicts.counts_in_words(short.statements)} ({notes})"
        return Standing(_claim_in_words(short.claim), _news(short.claim), words)
    if setting != verdicts.PAPER:
        return Standing("", "none", "")
    return Standing(verdicts.NOT_RUN if results else lacking(spec), "none", "")


def _claim_in_words(claim: Mapping[str, int]) -> str:
    if len(claim) == 1:
        return next(iter(claim))
    return verdicts.counts_in_words(claim) if claim else "the claim itself is not judged"


def _news(claim: Mapping[str, int]) -> News:
    """Different verdicts on a claim are fair news, unless none of them agrees."""
    if len(claim) == 1:
        return NEWS[next(iter(claim))]
    if verdicts.AGREES in claim or verdicts.DIRECTION in claim:
        return "fair"
    return "bad" if verdicts.DISAGREES in claim else "none"


def freshest(results: Sequence[Summary]) -> Summary:
    """The result at the largest scale that is not stale; at the largest scale where all are."""
    return min(results, key=lambda summary: bool(summary.stale))


def lacking(spec: Spec) -> str:
    """Why a study has no result, in a few words."""
    waiting = missing(spec)
    if waiting:
        return f"cannot be run: {waiting[0]}"
    absent = [name for name in spec.data if not datasets.available(name)]
    return f"{verdicts.NOT_RUN}; needs {', '.join(absent)}" if absent else verdicts.NOT_RUN


def page(names: Sequence[str], root: Path, on_progress: OnProgress = no_progress) -> Page:
    """The report on studies; results are looked for under ``root`` and among those that are shipped.

    ``on_progress`` is called with a text and the share of the work that is done, before a study is read or drawn.
    """
    studies: list[Study] = []
    for i, name in enumerate(names):
        on_progress(f"reading {name}", i / len(names) / 2)
        spec = library.load(name)
        studies.append((spec, find_all(spec.name, root, spec)))
    sections: list[Part] = []
    drawn = 0
    for paper, title in PAPERS.items():
        chosen = [(spec, results) for spec, results in studies if spec.paper == paper]
        if chosen:
            details: list[Part] = []
            for spec, results in chosen:
                on_progress(f"drawing {spec.name}", 0.5 + drawn / len(names) / 2)
                drawn += 1
                details += [_study(spec, freshest(results), _keywords(spec, results))] if results else []
            notes = [Text(f"{spec.reference}: {text}") for spec, _ in chosen for text in unfinished(spec.name, root)]
            sections.append(Section(title, [_overview(chosen), *notes, *details]))
    introduction = (
        "Every line is a table or a figure of a paper, with its claim and the verdict on it. Verdicts are computed "
        "from our numbers, by 95 % intervals over seeds (Student's t; of paired differences, Δ, where two values are "
        "compared)."
    )
    reading = (
        "A statement agrees where the whole interval lies in what it allows. It disagrees where the whole interval "
        "lies outside of it, and is undecided otherwise. One seed decides nothing. “Agrees in direction” means that "
        "the direction is shown, and the amount is not."
    )
    settings = (
        "Runs on other data, with other networks, with less training or on a subset are reduced settings, where a "
        "paper's numbers are not comparable. Stale results were made by other settings or another version of the "
        "procedure than today's."
    )
    return Page(
        "What the papers say, and what we measured",
        [Text(introduction, "lead"), Text(reading), Text(settings), _counts(studies), *sections],
        filter="Show studies with these words (a data set, a method, a verdict):",
    )


def _counts(studies: Sequence[Study]) -> Text:
    words = []
    for setting, title in SETTINGS.items():
        claims = [standing(spec, results, setting).claim for spec, results in studies if results]
        counts = {
            verdict: claims.count(verdict) for verdict in NEWS if verdict in claims and verdict != verdicts.NOT_RUN
        }
        mixed = sum(", " in claim for claim in claims)
        parts = [verdicts.counts_in_words(counts), f"{mixed} with several verdicts, by data" if mixed else ""]
        words.append(f"{title}: {', '.join(filter(None, parts)) or 'none'}")
    with_results = [results for _, results in studies if results]
    stale = sum(bool(freshest(results).stale) for results in with_results)
    numbers = f"{len(with_results)} of {len(studies)}" + (f", {stale} of them stale" if stale else "")
    return Text(f"Studies with results: {numbers}. Claims {'; '.join(words)}.")


def _overview(studies: Sequence[Study]) -> PageTable:
    rows: list[list[Cell]] = []
    for spec, results in studies:
        name = Link(_anchor(spec), spec.reference) if results else spec.reference
        places = [standing(spec, results, setting) for setting in SETTINGS]
        badges = [Badge(where.claim, where.news, where.statements) if where.claim else "" for where in places]
        rows.append([name, spec.claim, *badges])
    keywords = [_keywords(spec, results) for spec, results in studies]
    return PageTable(("study", "claim", *SETTINGS.values()), rows, narrow="cards", keywords=keywords)


def _keywords(spec: Spec, results: Sequence[Summary]) -> str:
    """The words that a reader may look for a study by: its name, what it says, its data and its verdicts."""
    claims = [standing(spec, results, setting).claim for setting in SETTINGS]
    return " ".join([spec.name, spec.reference, spec.title, spec.claim, *spec.data, *claims])


def _study(spec: Spec, summary: Summary, keywords: str) -> Section:
    drawings = [Drawing(figure, description=f"{spec.reference}: {title}") for figure, title in figures(spec, summary)]
    judged = [verdict for verdict in summary.verdicts if verdict.verdict != verdicts.NOT_RUN]
    others = [verdict for verdict in summary.verdicts if verdict.verdict == verdicts.NOT_RUN]
    parts: list[Part] = [
        Text(spec.claim),
        *([Text(f"This result is stale: {summary.stale}.", "note")] if summary.stale else []),
        *drawings,
        *([Text(_CURVES)] if spec.evaluation.curves and drawings else []),
        *worst_cases(summary),
        *_settings_in_words(summary),
        *([_verdict_table(judged)] if judged else []),
        *_statements_left_out(others),
        *_every_measure(summary),
        *_audits(summary),
        *_flags(summary),
        FactList(_provenance(spec, summary)),
    ]
    return Section(f"{spec.reference}: {spec.title}", parts, _anchor(spec), keywords)


def _provenance(spec: Spec, summary: Summary) -> list[tuple[str, str]]:
    made = summary.provenance
    return [
        ("command", command(spec.name, summary.scale, made)),
        *([("result", summary.origin)] if summary.origin else []),
        ("seeds", f"{len(made.seeds)}"),
        ("networks", _networks(made)),
        ("machine", f"{made.hardware}; dissensus {made.version}, torch {made.packages.get('torch', '')}"),
        *([("trainings", f"those of {spec.uses}, measured again")] if spec.uses else []),
        ("data", "; ".join(entry["source"] for entry in made.data)),
        *([("note", spec.note)] if spec.note else []),
    ]


def command(name: str, scale: str, made: Provenance) -> str:
    """The command that makes a result."""
    changes = [f"--set {shlex.quote(f'{key}={toml_value(value)}')}" for key, value in made.changes.items()]
    device = [] if made.device == "cpu" else ["--device", made.device]
    return " ".join(["dissensus study run", name, "--scale", scale, *changes, *device])


def _networks(made: Provenance) -> str:
    searched = f" after a search over {made.searched_networks:,}" if made.searched_networks else ""
    minutes = made.seconds / 60
    duration = f"{minutes:,.1f} minutes" if minutes >= 1 else counted(max(1, round(made.seconds)), "second")
    return f"{made.networks:,}{searched}, in {duration}"


def _settings_in_words(summary: Summary) -> list[Part]:
    """How the run differs from the paper's setting, by data set."""
    by_data = {verdict.data: verdict.differences for verdict in summary.verdicts if verdict.differences}
    lines = [(data, "; ".join(words)) for data, words in by_data.items()]
    return [Text("How the run differs from the paper's setting:"), FactList(lines)] if lines else []


def _verdict_table(judged: Sequence[Verdict]) -> PageTable:
    return PageTable(VERDICT_COLUMNS, [_verdict_row(verdict) for verdict in judged], "cards", _COLUMN_NOTES)


def verdict_words(verdict: Verdict) -> str:
    """A verdict with its setting where that is reduced."""
    setting = _setting_in_words(verdict)
    return f"{verdict.verdict} ({setting})" if setting else verdict.verdict


def _setting_in_words(verdict: Verdict) -> str:
    reduced = verdict.setting == "reduced" and verdict.verdict not in (verdicts.NOT_RUN, verdicts.NOT_COMPARABLE)
    return "reduced setting" if reduced else ""


def _verdict_row(verdict: Verdict) -> list[Cell]:
    interval = Number(verdict.ours, verdict.low, verdict.high).interval
    if interval and verdict.compared:
        interval = f"Δ {interval}"
    if not interval and verdict.ours is not None:
        interval = "one seed" if verdict.seeds == 1 else "no spread"
    return [
        verdict.says,
        Badge(verdict.verdict, NEWS[verdict.verdict], _setting_in_words(verdict)),
        verdict.data,
        verdict.paper,
        Number(verdict.ours),
        interval,
        Number(verdict.difference),
    ]


def _statements_left_out(others: Sequence[Verdict]) -> list[Part]:
    if not others:
        return []
    title = f"{counted(len(others), 'more statement')}, about data or points that this scale does not have"
    rows = [[verdict.says, verdict.data, verdict.paper] for verdict in others]
    return [Folded(title, [PageTable(("statement", "data", "paper"), rows, "cards", _COLUMN_NOTES)])]


def _every_measure(summary: Summary) -> list[Part]:
    """Tables of all measures, folded; data sets with too many points for a table are left out."""
    axes = [axis for axis in summary.axes if axis != "data"]
    parts: list[Part] = []
    for data, points in _by_data(summary).items():
        if 1 < len(points) <= _MOST_COLUMNS:
            header = ("", *(point_name(point, axes) for point in points))
            table = PageTable(header, measure_rows(points))
            parts.append(Folded(f"{data}: every measure, mean ± standard error", [table]))
    return parts


def measure_rows(points: Sequence[Point]) -> list[list[Cell]]:
    """A row for every measure that any point has, and one with the audit's verdicts; a column for every point."""
    rows: list[list[Cell]] = []
    for name in points[0].measures:
        estimates = [point.measures.get(name, Estimate(None, None, 0)) for point in points]
        if any(estimate.mean is not None for estimate in estimates) and not name.startswith("audit_"):
            examples = (points[0].examples or {}).get(name)
            label = measure_label(name) + (f", {counted(examples, 'example')}" if examples else "")
            rows.append([label, *(Number(estimate.mean, error=estimate.error) for estimate in estimates)])
    if any(point.audit_verdicts for point in points):
        counts = [(point.audit_verdicts or {}).items() for point in points]
        rows.append(["the audit says", *(", ".join(f"{verdict} {n}" for verdict, n in count) for count in counts)])
    return rows


def worst_cases(summary: Summary) -> list[Part]:
    """A sentence and a table for every ε: accuracy under single attacks, and in the worst case of a suite."""
    axes = [axis for axis in summary.axes if axis != "data"]
    parts: list[Part] = []
    for data, points in _by_data(summary).items():
        named = {point_name(point, axes): point for point in points}
        suites = {name: suite[1] for name in points[0].measures if (suite := suite_of(name))}
        for epsilon in dict.fromkeys(suites.values()):
            single = [name for name in points[0].measures if is_within(name, epsilon)]
            worst = [name for name, suite_epsilon in suites.items() if suite_epsilon == epsilon]
            words = f"{data}, at ε = {epsilon}: {_worst_case_in_words(named, single, worst)}"
            parts += [Text(words), _attack_table(data, epsilon, named, [*single, *worst])]
    return parts


def _attack_table(data: str, epsilon: str, points: Mapping[str, Point], measures: Sequence[str]) -> PageTable:
    """Accuracy by measure and point; the longer of the two runs down the table."""
    examples = next(iter(points.values())).examples or {}
    labels = [measure_label(name).removesuffix(f" {epsilon}") for name in measures]
    counts = [f"{examples[name]:,}" if name in examples else "all" for name in measures]
    shares = [[Number(point.mean(name), form=".1%") for name in measures] for point in points.values()]
    if len(points) <= len(measures):
        rows = [[*row] for row in zip(labels, counts, *shares, strict=True)]
        return PageTable((data, "examples", *points), rows)
    rows = [["examples", *counts], *([name, *row] for name, row in zip(points, shares, strict=True))]
    return PageTable((data, *labels), rows)


def _worst_case_in_words(points: Mapping[str, Point], single: Sequence[str], worst: Sequence[str]) -> str:
    """Accuracy under the paper's attacks and in the worst case; of very many points only the extremes."""

    def lowest(measures: Sequence[str]) -> dict[str, float]:
        means = {title: [point.mean(name) for name in measures] for title, point in points.items()}
        known = {title: [v for v in values if v is not None] for title, values in means.items()}
        return {title: min(values) for title, values in known.items() if values and len(values) == len(measures)}

    published, left = lowest([name for name in single if is_published(name)]), lowest(worst)
    if not left:
        return "no worst case was found."
    if len(left) > _MOST_NAMED:
        low, high = min(left, key=left.__getitem__), max(left, key=left.__getitem__)
        return f"the worst case leaves {left[low]:.1%} ({low}) to {left[high]:.1%} ({high})."
    words = f"the worst case leaves {_listed_shares(left)}."
    if published and len(left) <= _MOST_NAMED_TWICE:
        return f"the paper's attacks leave {_listed_shares(published)}; {words}"
    return words


def _listed_shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.1%} ({title})" for title, share in shares.items())


def _audits(summary: Summary) -> list[Part]:
    """The audit's reasons for every point, where there is one seed."""
    lines = [
        (title, f"{', '.join(point.audit_verdicts or {})}: {'; '.join(point.audit_reasons)}")
        for title, point in _titled_points(summary).items()
        if point.audit_reasons
    ]
    return [Text("What the audit says of each ensemble:"), FactList(lines)] if lines else []


def _flags(summary: Summary) -> list[Part]:
    """Flags that were raised, a line per point: a worst case with flags is doubtful."""
    lines = []
    for title, point in _titled_points(summary).items():
        if point.flags is not None:
            raised = [
                f"{', '.join(names)} ({suite.replace('_', ' ')})" for suite, names in point.flags.items() if names
            ]
            lines.append((title, f"flags raised: {'; '.join(raised) or 'none'}"))
    return [FactList(lines)] if lines else []


def _by_data(summary: Summary) -> dict[str, list[Point]]:
    points: dict[str, list[Point]] = {}
    for point in summary.points:
        points.setdefault(point.data, []).append(point)
    return points


def point_name(point: Point, axes: Sequence[str]) -> str:
    """The values of a point on some axes."""
    return ", ".join(str(point.value(axis)) for axis in axes)


def _titled_points(summary: Summary) -> dict[str, Point]:
    """Points by the values that tell them apart."""
    has_several = len({point.data for point in summary.points}) > 1
    axes = [axis for axis in summary.axes if has_several or axis != "data"]
    return {point_name(point, axes): point for point in summary.points}


def _anchor(spec: Spec) -> str:
    return spec.name.replace("/", "-")


def write_figures(names: Sequence[str], root: Path, folder: Path, kind: str) -> list[Path]:
    """Write every figure as a file for a paper: PDF, PNG or SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in names:
        spec = library.load(name)
        results = find_all(spec.name, root, spec)
        if not results:
            continue
        summary = freshest(results)
        for figure, title in figures(spec, summary):
            file = folder / f"{_anchor(spec)}-{_file_name(title)}.{kind}"
            style.save(figure, file)
            files.append(file)
    return files


def _file_name(title: str) -> str:
    """A title as a part of a file's name: characters that separate folders, or that are not printable, become ``-``."""
    return "".join("-" if character in "/\\: " or not character.isprintable() else character for character in title)

"""One page for all results: per paper the claims with their verdicts, and every study that was run, with figures."""

import math
import shlex
from pathlib import Path
from typing import Any

from dissensus.pages import figures, layout
from dissensus.studies import datasets, library, report_figures, verdicts
from dissensus.studies import dict_results as results
from dissensus.studies.procedures.attack_measures import is_published, is_within, suite_of
from dissensus.studies.run_folders import unfinished
from dissensus.studies.spec import PAPERS, Spec, toml_value
from dissensus.studies.validation import missing as waits_for

KINDS = {verdicts.AGREES: "good", verdicts.DIRECTION: "fair", verdicts.DISAGREES: "bad", verdicts.NOT_RUN: "none"}


CURVES = (
    "Training curves are means over each epoch's steps, in training mode (dropout on); test curves are taken at the "
    "epoch's end. The table's gap compares both in evaluation mode, after the last epoch."
)


def state_of(spec: Spec, result: dict[str, Any] | None) -> str:
    """Where a study stands, in few words: its verdict, or what it waits for."""
    if result is not None:
        return verdicts.overall([verdict["verdict"] for verdict in result["verdicts"]])
    waiting = waits_for(spec)
    if waiting:
        return f"waits for {waiting[0]}"
    absent = [name for name in spec.data if not datasets.available(name)]
    return f"{verdicts.NOT_RUN}; needs {', '.join(absent)}" if absent else verdicts.NOT_RUN


def html(names: list[str], root: Path) -> str:
    """The whole page."""
    studies = [(library.load(name), results.found(name, root)) for name in names]
    body = [
        layout.heading("What the papers say, and what we measured", 1),
        layout.paragraph(
            "Every line is a table or a figure of a paper, with its claim and a verdict that is computed from our "
            "numbers: agrees, agrees in direction (the right way, but by another amount or within the spread over "
            "seeds), disagrees, or not run. A study's verdict is that of its worst statement. Means are over seeds; "
            "intervals are 95 % bootstrap intervals, of paired differences (Δ) where two settings are compared.",
            "lead",
        ),
        _counts(studies),
    ]
    for paper, title in PAPERS.items():
        own = [(spec, result) for spec, result in studies if spec.paper == paper]
        if own:
            body += [layout.heading(title), _overview(own)]
            notes = [(spec, sentence) for spec, _ in own for sentence in unfinished(spec.name, root)]
            body += [layout.paragraph(f"{spec.reference}: {sentence}") for spec, sentence in notes]
            body += [part for spec, result in own if result is not None for part in _study(spec, result)]
    return layout.page("dissensus: studies", body)


def _counts(studies: list[tuple[Spec, dict[str, Any] | None]]) -> str:
    run = [state_of(spec, result) for spec, result in studies if result is not None]
    parts = [f"{run.count(verdict)} {verdict}" for verdict in KINDS if run.count(verdict)]
    return layout.paragraph(f"{len(run)} of {len(studies)} studies have results: {', '.join(parts) or 'none yet'}.")


def _overview(own: list[tuple[Spec, dict[str, Any] | None]]) -> str:
    rows = []
    for spec, result in own:
        state = state_of(spec, result)
        name = layout.link(f"#{_anchor(spec)}", spec.reference) if result is not None else layout.Html(spec.reference)
        scale = result["scale"] if result is not None else ""
        badge = layout.badge(state, KINDS.get(state, "none"))
        rows.append([name, badge, _agreeing(result), scale, layout.Wrapped(spec.claim)])
    return layout.table(("study", "verdict", "statements", "scale", "claim"), rows, cards=True)


def _agreeing(result: dict[str, Any] | None) -> str:
    """How many statements agree, if only in direction: a study's verdict is that of its worst."""
    found = [
        verdict["verdict"] for verdict in (result or {}).get("verdicts", []) if verdict["verdict"] != verdicts.NOT_RUN
    ]
    return f"{len(found) - found.count(verdicts.DISAGREES)} of {len(found)} agree" if found else ""


def _study(spec: Spec, result: dict[str, Any]) -> list[str]:
    made = result["made"]
    drawn = [
        (figures.as_svg(figure, f"{spec.reference}: {title}"), title)
        for figure, title in report_figures.drawn(spec, result)
    ]
    judged, others = (
        [
            _verdict_row(verdict, len(made["seeds"]))
            for verdict in result["verdicts"]
            if (verdict["verdict"] == verdicts.NOT_RUN) == left_out
        ]
        for left_out in (False, True)
    )
    told = [
        ("command", _command(spec, result)),
        *([("result", result["origin"])] if result.get("origin") else []),
        ("seeds", f"{len(made['seeds'])}"),
        ("networks", _networks(made)),
        ("machine", f"{made['hardware']}; dissensus {made['version']}, torch {made['packages'].get('torch', '')}"),
        *([("trainings", f"those of {spec.uses}, measured again")] if spec.uses else []),
        ("data", "; ".join(entry["source"] for entry in made["data"])),
        *([("note", spec.note)] if spec.note else []),
    ]
    return [
        layout.heading(f"{spec.reference}: {spec.title}", 3, _anchor(spec)),
        layout.paragraph(spec.claim),
        *([layout.figures(drawn)] if drawn else []),
        *([layout.paragraph(CURVES)] if spec.evaluation.curves and drawn else []),
        *_worst_case(result),
        *([layout.table(VERDICT_COLUMNS, judged, cards=True)] if judged else []),
        *([layout.folded(_left_out(len(others)), layout.table(VERDICT_COLUMNS, others, cards=True))] if others else []),
        *_measured(result),
        *_audits(result),
        *_flags(result),
        layout.facts(told),
    ]


def _command(spec: Spec, result: dict[str, Any]) -> str:
    """What made a result; older ones tell neither device nor changes."""
    made = result["made"]
    device = made.get("device", "cpu")
    changes = [shlex.quote(f"{key}={toml_value(value)}") for key, value in made.get("changes", {}).items()]
    words = ["dissensus study run", spec.name, "--scale", result["scale"], *(f"--set {change}" for change in changes)]
    return " ".join([*words, *([] if device == "cpu" else ["--device", device])])


VERDICT_COLUMNS = ("the paper says", "verdict", "data", "paper", "ours", "interval", "difference")
MOST_COLUMNS = 10
"""Points of a grid that stand beside each other in a table."""


def _left_out(count: int) -> str:
    return f"{count} more statements, of data or points that this scale does not have"


def _measured(result: dict[str, Any]) -> list[str]:
    """Every measure of every point, folded away, where points are few enough to stand beside each other."""
    axes = [axis for axis in result["axes"] if axis != "data"]
    found: list[str] = []
    for data in dict.fromkeys(point["data"] for point in result["points"]):
        points = [point for point in result["points"] if point["data"] == data]
        if not 1 < len(points) <= MOST_COLUMNS:
            continue
        header = ("", *(_name(point, axes) for point in points))
        rows: list[list[Any]] = []
        for name in points[0]["measures"]:
            cells = [point["measures"].get(name, (None, None))[:2] for point in points]
            if any(mean is not None for mean, _ in cells) and not name.startswith("audit_"):
                rows.append([_of_examples(name, points[0]), *(_mean(*cell) for cell in cells)])
        said = [point.get("audited") for point in points]
        if any(said):
            words = [", ".join(f"{word} {n}" for word, n in (own or {}).items()) for own in said]
            rows.append(["the audit says", *map(layout.Wrapped, words)])
        found.append(layout.folded(f"{data}: every measure, mean ± standard error", layout.table(header, rows)))
    return found


def _worst_case(result: dict[str, Any]) -> list[str]:
    """What is left of every ensemble under single attacks and under a suite of them, at the suite's ε."""
    axes = [axis for axis in result["axes"] if axis != "data"]
    found: list[str] = []
    for data in dict.fromkeys(point["data"] for point in result["points"]):
        points = {_name(point, axes): point for point in result["points"] if point["data"] == data}
        names, few = (next(iter(points.values())).get(key, {}) for key in ("measures", "examples"))
        suites = {name: suite[1] for name in names if (suite := suite_of(name))}
        for epsilon in dict.fromkeys(suites.values()):
            single = [name for name in names if is_within(name, epsilon)]
            worst = [name for name, own in suites.items() if own == epsilon]
            table = [[data, "examples", *points]]
            for name in (*single, *worst):
                words = report_figures.in_words(name).removesuffix(f" {epsilon}")
                examples = f"{few[name]:,}" if name in few else "all"
                table.append([words, examples, *(_share(point, name) for point in points.values())])
            header, *rows = table if len(points) < len(table) else [list(row) for row in zip(*table, strict=True)]
            words = f"{data}, at ε = {epsilon}: {_plainly(points, single, worst)}"
            found += [layout.paragraph(words), layout.table(header, rows)]
    return found


def _plainly(points: dict[str, Any], single: list[str], worst: list[str]) -> str:
    """What the paper's attacks leave, and what the worst case does; of very many points, of the best and the worst."""

    def left(names: list[str]) -> dict[str, float]:
        each = {title: [point["measures"].get(name, (None,))[0] for name in names] for title, point in points.items()}
        return {title: min(found) for title, found in each.items() if found and None not in found}

    theirs, ours = left([name for name in single if is_published(name)]), left(worst)
    if not ours:
        return "no worst case was found."
    if len(ours) > MOST_NAMED:
        low, high = min(ours, key=ours.__getitem__), max(ours, key=ours.__getitem__)
        return f"the worst case leaves {100 * ours[low]:.1f} % ({low}) to {100 * ours[high]:.1f} % ({high})."
    told = f"the worst case leaves {_several(ours)}"
    return f"the paper's attacks leave {_several(theirs)}; {told}." if theirs and len(ours) <= MOST_BOTH else f"{told}."


MOST_NAMED, MOST_BOTH = 12, 4
"""Points that a sentence can tell of; with two numbers each."""


def _several(shares: dict[str, float]) -> str:
    return ", ".join(f"{100 * share:.1f} % ({title})" for title, share in shares.items())


def _of_examples(name: str, point: dict[str, Any]) -> str:
    """A measure in words, with the number of examples where they are not all."""
    examples = point.get("examples", {}).get(name)
    return report_figures.in_words(name) + (f", {examples:,} examples" if examples else "")


def _share(point: dict[str, Any], name: str) -> str:
    mean = point["measures"].get(name, (None,))[0]
    return "" if mean is None else f"{100 * mean:.1f} %"


def _audits(result: dict[str, Any]) -> list[str]:
    """Why the audit says what it says of every point, where there is one seed."""
    lines = [
        (title, f"{', '.join(point['audited'])}: {'; '.join(point['audit_reasons'])}")
        for title, point in _titled(result).items()
        if point.get("audit_reasons")
    ]
    return [layout.paragraph("What the audit says of each ensemble:"), layout.facts(lines)] if lines else []


def _flags(result: dict[str, Any]) -> list[str]:
    """What the checks of attacks say, a line per point: a worst case with flags is one to be doubted."""
    lines = []
    for title, point in _titled(result).items():
        if "flags" in point:
            raised = [(name.replace("_", " "), names) for name, names in point["flags"].items() if names]
            words = "; ".join(f"{', '.join(names)} ({suite})" for suite, names in raised)
            lines.append((title, f"flags raised: {words or 'none'}"))
    return [layout.facts(lines)] if lines else []


def _name(point: dict[str, Any], axes: list[str]) -> str:
    return ", ".join(str(point.get(axis)) for axis in axes)


def _titled(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Points by what tells them apart."""
    several = len({point["data"] for point in result["points"]}) > 1
    axes = [axis for axis in result["axes"] if several or axis != "data"]
    return {_name(point, axes): point for point in result["points"]}


def _mean(mean: float | None, error: float | None) -> str:
    return "" if mean is None else _number(mean) + (f" ± {error:.1g}" if error else "")


def _networks(made: dict[str, Any]) -> str:
    searched = f" after a search over {made['searched_networks']:,}" if made.get("searched_networks") else ""
    return f"{made['networks']:,}{searched}, in {made['seconds'] / 60:.1f} minutes"


def _verdict_row(verdict: dict[str, Any], seeds: int) -> list[Any]:
    sign = "Δ " if verdict["compared"] else ""
    span = "" if verdict["low"] is None else f"{sign}{_number(verdict['low'])} to {_number(verdict['high'])}"
    if seeds == 1 and span:
        span = "one seed"
    word = verdict["verdict"]
    return [
        layout.Wrapped(verdict["says"]),
        layout.badge(word, KINDS[word]),
        verdict["data"],
        verdict["paper"],
        _number(verdict["ours"]),
        span,
        _number(verdict["difference"]),
    ]


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _anchor(spec: Spec) -> str:
    return spec.name.replace("/", "-")


def write_figures(names: list[str], root: Path, folder: Path, kind: str) -> list[Path]:
    """Every figure as a file of its own, for a paper: PDF, PNG or SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        result = results.found(name, root)
        if result is None:
            continue
        spec = library.load(name)
        for figure, title in report_figures.drawn(spec, result):
            file = folder / f"{_anchor(spec)}-{title.replace(' ', '-')}.{kind}"
            figures.save(figure, file)
            written.append(file)
    return written

"""One page for all results: per paper the claims with their verdicts, and every study that was run, with figures."""

import math
from pathlib import Path
from typing import Any

from dissensus.studies import figures, finding, page, problems, report_figures, results, verdicts
from dissensus.studies.ingredients import waits_for
from dissensus.studies.spec import PAPERS, Spec

KINDS = {
    verdicts.AGREES: "good", verdicts.DIRECTION: "fair", verdicts.DISAGREES: "bad", verdicts.NOT_RUN: "none"
}  # fmt: skip


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
    absent = [name for name in spec.data if not problems.available(name)]
    return f"{verdicts.NOT_RUN}; needs {', '.join(absent)}" if absent else verdicts.NOT_RUN


def html(names: list[str], root: Path) -> str:
    """The whole page."""
    studies = [(finding.load(name), results.found(name, root)) for name in names]
    body = [
        page.heading("What the papers say, and what we measured", 1),
        page.paragraph(
            "Every line is a table or a figure of a paper, with its claim and a verdict that is computed from our "
            "numbers: agrees, agrees in direction (the right way, but by another amount or within the spread over "
            "seeds), disagrees, or not run. Means are over seeds; intervals are 95 % bootstrap intervals, of paired "
            "differences (Δ) where two settings are compared.",
            "lead",
        ),
        _counts(studies),
    ]
    for paper, title in PAPERS.items():
        own = [(spec, result) for spec, result in studies if spec.paper == paper]
        if own:
            body += [page.heading(title), _overview(own)]
            body += [part for spec, result in own if result is not None for part in _study(spec, result)]
    return page.page("dissensus: studies", body)


def _counts(studies: list[tuple[Spec, dict[str, Any] | None]]) -> str:
    run = [state_of(spec, result) for spec, result in studies if result is not None]
    parts = [f"{run.count(verdict)} {verdict}" for verdict in KINDS if run.count(verdict)]
    return page.paragraph(f"{len(run)} of {len(studies)} studies have results: {', '.join(parts) or 'none yet'}.")


def _overview(own: list[tuple[Spec, dict[str, Any] | None]]) -> str:
    rows = []
    for spec, result in own:
        state = state_of(spec, result)
        name = page.link(f"#{_anchor(spec)}", spec.reference) if result is not None else page.Html(spec.reference)
        scale = result["scale"] if result is not None else ""
        rows.append([name, page.badge(state, KINDS.get(state, "none")), scale, page.Wrapped(spec.claim)])
    return page.table(("study", "verdict", "scale", "claim"), rows, cards=True)


def _study(spec: Spec, result: dict[str, Any]) -> list[str]:
    made = result["made"]
    drawn = [
        (figures.as_svg(figure, f"{spec.reference}: {title}"), title)
        for figure, title in report_figures.drawn(spec, result)
    ]
    rows = [_verdict_row(verdict) for verdict in result["verdicts"]]
    command = f"dissensus study run {spec.name} --scale {result['scale']}"
    told = [
        ("command", command),
        ("seeds", f"{len(made['seeds'])}"),
        ("networks", _networks(made)),
        ("machine", f"{made['hardware']}; dissensus {made['version']}, torch {made['packages'].get('torch', '')}"),
        *([("trainings", f"those of {spec.uses}, measured again")] if spec.uses else []),
        ("data", "; ".join(entry["source"] for entry in made["data"])),
        *([("note", spec.note)] if spec.note else []),
    ]
    return [
        page.heading(f"{spec.reference}: {spec.title}", 3, _anchor(spec)),
        page.paragraph(spec.claim),
        *([page.figures(drawn)] if drawn else []),
        *([page.paragraph(CURVES)] if spec.evaluation.curves and drawn else []),
        page.table(("the paper says", "verdict", "data", "paper", "ours", "interval", "difference"), rows, cards=True),
        page.facts(told),
    ]


def _networks(made: dict[str, Any]) -> str:
    searched = f" after a search over {made['searched_networks']:,}" if made.get("searched_networks") else ""
    return f"{made['networks']:,}{searched}, in {made['seconds'] / 60:.1f} minutes"


def _verdict_row(verdict: dict[str, Any]) -> list[Any]:
    sign = "Δ " if verdict["compared"] else ""
    span = "" if verdict["low"] is None else f"{sign}{_number(verdict['low'])} to {_number(verdict['high'])}"
    word = verdict["verdict"]
    return [
        page.Wrapped(verdict["says"]), page.badge(word, KINDS[word]), verdict["data"], verdict["paper"],
        _number(verdict["ours"]), span, _number(verdict["difference"]),
    ]  # fmt: skip


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
        spec = finding.load(name)
        for figure, title in report_figures.drawn(spec, result):
            file = folder / f"{_anchor(spec)}-{title.replace(' ', '-')}.{kind}"
            figures.save(figure, file)
            written.append(file)
    return written

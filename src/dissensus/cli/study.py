"""`dissensus study`: list, show, run and report studies."""

import json
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding

from dissensus.cli.screen import check_drawn, check_folder, console, device_of, fail, keep, resumable, shown, table

app = typer.Typer(no_args_is_help=True, help="Tables and figures of the papers, one command each.")

NARROW = 120
"""Columns of a terminal below which a list reads better than a table."""
COLOURS = {"agrees": "green", "agrees in direction": "yellow", "disagrees": "red"}


@app.command("list")
def list_studies(
    paper: Annotated[str, typer.Argument(help="Only this paper's: collusion, ldr, adp or masksembles.")] = "",
) -> None:
    """List all studies: claim, data, scales with their cost in minutes, and where each stands."""
    from dissensus.studies import dict_results as results
    from dissensus.studies import library
    from dissensus.studies import run as running
    from dissensus.studies.report_page import state_of
    from dissensus.studies.spec import PAPERS, SpecError

    if paper and paper not in PAPERS:
        fail(f"there is no paper {paper!r}; there are {', '.join(PAPERS)}")
    root, rows = running.runs_folder(), []
    try:
        for name in library.names():
            if name.startswith(paper):
                spec = library.load(name)
                result = results.found(name, root)
                state = state_of(spec, result)
                scale = f" ({result['scale']})" if result else ""
                rows.append([name, escape(spec.claim), ", ".join(spec.data), _scales(spec), _coloured(state) + scale])
    except SpecError as reason:
        fail(str(reason))
    if console.width < NARROW:
        for name, claim, data, scales, state in rows:
            console.print(f"[bold]{name}[/bold]  {state}", highlight=False)
            told = f"{claim}\n[dim]{data}; minutes: {', '.join(scales.splitlines())}[/dim]\n"
            console.print(Padding(told, (0, 0, 0, 2)), highlight=False)
    else:
        console.print(table("", ("study", "claim", "data", "scales (minutes)", "state"), rows, left=(0, 1, 2, 3, 4)))
    console.print("`dissensus study show NAME` tells more, `dissensus study run NAME --scale smoke` tries one.")


WIDEST = 12
"""Letters of a column's head that stand on one line."""


def _narrow(name: str) -> str:
    """A long name over several lines, broken behind its hyphens."""
    return name if len(name) <= WIDEST else name.replace("-", "-\n")


def _scales(spec: Any) -> str:
    told = []
    for scale in spec.scales:
        cost = spec.cost.get(scale, {})
        told.append(f"{scale} " + "/".join(f"{minutes:g} {kind}" for kind, minutes in cost.items()))
    return "\n".join(told)


def _coloured(state: str) -> str:
    colour = COLOURS.get(state, "dim")
    return f"[{colour}]{escape(state)}[/{colour}]"


@app.command()
def show(name: Annotated[str, typer.Argument(help="Such as collusion/figure-2.")]) -> None:
    """Show a study: what it claims, what it would run, and what its results say."""
    from dissensus.studies import datasets, library
    from dissensus.studies import dict_results as results
    from dissensus.studies import run as running
    from dissensus.studies.run_folders import unfinished
    from dissensus.studies.spec import PAPERS, SpecError, to_toml
    from dissensus.studies.validation import missing as waits_for

    try:
        spec = library.load(name)
    except SpecError as reason:
        fail(str(reason))
    console.print(f"[bold]{escape(spec.reference)}: {escape(spec.title)}[/bold]  [dim]{PAPERS[spec.paper]}[/dim]")
    console.print(escape(spec.claim))
    if spec.note:
        console.print(f"[dim]{escape(spec.note)}[/dim]")
    words = ("name", "title", "reference", "claim", "note", "expect", "scales", "figure", "cost")
    console.print()
    console.print(
        to_toml({k: v for k, v in spec.to_dict().items() if k not in words}),
        highlight=False,
        markup=False,
        style="cyan",
    )
    console.print()
    console.print(f"scales (minutes): {', '.join(_scales(spec).splitlines())}", highlight=False)
    for data in spec.data:
        there = "present" if datasets.available(data) else f"absent: dissensus data get {datasets.source_of(data)}"
        console.print(f"data {data}: {there}")
    for missing in waits_for(spec):
        console.print(f"[yellow]waits for {escape(missing)}[/yellow]")
    for sentence in unfinished(spec.name, running.runs_folder()):
        console.print(f"[yellow]{escape(sentence)}[/yellow]", soft_wrap=True)
    result = results.found(name, running.runs_folder())
    if result is not None:
        if result["origin"]:
            console.print(f"[dim]The result is {escape(result['origin'])}.[/dim]", soft_wrap=True)
        _print_verdicts(result)


def _print_verdicts(result: dict[str, Any]) -> None:
    rows, seeds = [], len(result["made"]["seeds"])
    _print_points(result)
    judged = [verdict for verdict in result["verdicts"] if verdict["verdict"] != "not run"]
    for verdict in judged:
        ours = f"{verdict['ours']:.3g}" if verdict["ours"] is not None else ""
        sign = "Δ " if verdict["compared"] else ""
        span = ""
        if verdict["low"] is not None:
            low, high = (f"{verdict[end]:.3g}" for end in ("low", "high"))
            span = f"\n[dim]{sign}{low} to {high}[/dim]" if seeds > 1 else f"\n[dim]{sign}{low}[/dim]" if sign else ""
        told = f"[bold]{verdict['data']}[/bold]: {escape(verdict['says'])}"
        rows.append([_coloured(verdict["verdict"]), told, escape(verdict["paper"]), ours + span])
    title = f"{result['study']} at scale {result['scale']}, {seeds} seed{'s' if seeds > 1 else ''}"
    if judged:
        console.print(table(title, ("verdict", "the paper says", "paper", "ours, interval"), rows, left=(0, 1)))
    left = len(result["verdicts"]) - len(judged)
    if left:
        console.print(f"{left} more statements of the paper speak of data or points that this scale does not have.")


MOST_COLUMNS = 8
"""Points of a grid that fit beside each other on a screen."""
MOST_MEASURES = 9
"""Measures that are told in columns, where points are more."""
COLUMN = 12
"""Letters that a measure takes there."""


def _print_points(result: dict[str, Any]) -> None:
    """Every measure of every point, where points, or else measures, are few enough to stand beside each other."""
    from dissensus.studies import report_figures

    axes = [axis for axis in result["axes"] if axis != "data"]
    for data in dict.fromkeys(point["data"] for point in result["points"]):
        points = [point for point in result["points"] if point["data"] == data]
        rows: list[list[str]] = []
        for name in points[0]["measures"]:
            if name.startswith("audit_"):
                continue  # said in words below
            cells = [point["measures"].get(name, (None, None))[:2] for point in points]
            if any(mean is not None for mean, _ in cells):
                rows.append([report_figures.in_words(name), *(_cell(mean, error) for mean, error in cells)])
        said = [point.get("audited", {}) for point in points]
        if any(said):
            rows.append(["the audit says", *("\n".join(f"{word} {n}" for word, n in own.items()) for own in said)])
        title = f"{data}: means over seeds, ± standard error"
        if len(points) <= MOST_COLUMNS:
            heads = ["\n".join(_narrow(f"{point.get(axis)}") for axis in axes) for point in points]
            console.print(table(title, ("", *heads), rows, left=(0,)))
        elif (
            len(rows) <= MOST_MEASURES
        ):  # a point is a row, and measures stand in as many tables as the screen asks for
            names = ["", *(", ".join(f"{point.get(axis)}" for axis in axes) for point in points)]
            tables = math.ceil(len(rows) / max(2, (console.width - max(map(len, names)) - 4) // COLUMN))
            beside = math.ceil(len(rows) / tables)
            for first in range(0, len(rows), beside):
                header, *body = zip(names, *rows[first : first + beside], strict=True)
                console.print(table("" if first else title, header, [list(row) for row in body], left=(0,)))


def _cell(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.3g}" + (f"\n[dim]±{error:.1g}[/dim]" if error else "")


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="Such as collusion/figure-2.")],
    scale: Annotated[
        str,
        typer.Option(help="smoke (seconds), laptop (minutes), gpu (minutes, on a card) or paper (the full protocol)."),
    ] = "laptop",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, such as optimisation.epochs=3; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
) -> None:
    """Run a study, or go on with one that was interrupted. One that is done is not run again."""
    from dissensus.data.formats import DataError
    from dissensus.studies import dict_results as results
    from dissensus.studies import run as running

    chosen = device_of(device)
    check_folder("the folder of runs, DISSENSUS_RUNS,", running.runs_folder())
    try:
        with resumable(), shown() as bar:
            folder = running.run(
                name,
                scale,
                changes=_parsed(changes or []),
                device=chosen,
                jobs=jobs,
                on_study=lambda text, share: bar.update(name, share, text),
            )
    except (ValueError, DataError, ImportError, OSError, running.Busy) as reason:
        fail(str(reason))
    _print_verdicts(results.summary(json.loads((folder / "report.json").read_text())))
    console.print(f"Results are in {folder}", soft_wrap=True)


def _parsed(changes: list[str]) -> dict[str, Any]:
    """``key=value`` with values as in TOML; a word needs no quotes."""
    found: dict[str, Any] = {}
    for change in changes:
        key, sign, text = change.partition("=")
        if not sign or not key:
            fail(f"--set {change}: write it as key=value, such as optimisation.epochs=3")
        try:
            found[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = text.strip()
    return found


@app.command()
def report(
    names: Annotated[list[str] | None, typer.Argument(help="Studies; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("runs/studies.html"),
    figures: Annotated[Path | None, typer.Option(help="A folder for the figures as files of their own.")] = None,
    kind: Annotated[str, typer.Option("--format", help="pdf, png or svg, for --figures.")] = "pdf",
) -> None:
    """Write one page for all results: claims with verdicts, and figures drawn like the papers'."""
    from dissensus.studies import library, report_page
    from dissensus.studies import run as running
    from dissensus.studies.spec import SpecError

    if kind not in ("pdf", "png", "svg"):
        fail(f"--format must be pdf, png or svg; got {kind}")
    check_drawn("--out", out)
    check_folder("--figures", figures)
    root = running.runs_folder()
    try:
        chosen = [library.load(name).name for name in names] if names else library.names()
        text = report_page.html(chosen, root)
        written = report_page.write_figures(chosen, root, figures, kind) if figures is not None else []
    except (SpecError, ImportError, OSError) as reason:
        fail(str(reason))
    keep(out, text.encode())
    console.print("Open ", end="")
    console.print(f"{out}", style="bold", soft_wrap=True)
    if figures is not None:
        console.print(f"{len(written)} figures are in {figures}", soft_wrap=True)

"""`dissensus study`: list, show, run and report studies."""

import errno
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding

from dissensus.cli.screen import (
    COLOURS,
    WRONG_USE,
    Command,
    CommandGroup,
    check_apart,
    check_drawn,
    check_folder,
    console,
    fail,
    in_options,
    parsed_settings,
    print_place,
    progress_bar,
    resumable,
    said,
    table,
    torch_device,
    write_file,
)

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Run tables and figures of the papers, and compare with their numbers."
)

ARGUMENTS = {"root": "the folder of runs (DISSENSUS_RUNS)"}
"""What a user knows arguments of the library by."""
STUDIES_PAGE = Path("runs/studies.html")
NARROW = 140
"""Columns of a terminal below which studies are shown as a list instead of a table."""
MOST_POINTS = 8
"""Points of a grid that fit beside each other on a screen."""
MOST_MEASURES = 9
"""Measures that fit beside each other, where there are more points."""
MEASURE_WIDTH = 12
"""Characters of a column of measures."""
LONG_NAME = 12
"""Characters of a header beyond which it is broken over lines."""


@app.command("list", cls=Command)
def list_studies(
    paper: Annotated[
        str, typer.Argument(help="Only studies of this paper: collusion, ldr, adp, masksembles, audit or sharing.")
    ] = "",
) -> None:
    """List all studies: claim, data, scales with their cost in minutes, and where the claim stands.

    The claim's verdict and the number of statements by verdict are shown twice: at the paper's setting, and in a
    reduced setting, such as other data, smaller networks or fewer epochs. A stale result was made by other settings or
    another version of the procedure than today's.
    """
    from dissensus.studies import library
    from dissensus.studies.page import SETTINGS, standing
    from dissensus.studies.run_folders import damaged, find_all, runs_folder
    from dissensus.studies.spec import PAPERS, SpecError

    if paper and paper not in PAPERS:
        fail(f"there is no paper {paper!r}; there are {', '.join(PAPERS)}")
    rows, problems = [], []
    try:
        for name in library.names():
            if name.startswith(paper):
                spec = library.load(name)
                results = find_all(name, runs_folder(), spec)
                cells = [_standing(standing(spec, results, setting)) for setting in SETTINGS]
                sentences = damaged(name, runs_folder())
                problems += [f"{name}: {sentence}" for sentence in sentences]
                cells[0] += f"\n[{COLOURS['bad']}]damaged: {len(sentences)}[/{COLOURS['bad']}]" if sentences else ""
                rows.append([name, escape(spec.claim), ", ".join(spec.data), _scales(spec), *cells])
    except SpecError as reason:
        fail(said(reason))
    if console.width < NARROW:
        for name, claim, data, scales, *cells in rows:
            console.print(f"[bold]{name}[/bold]  {claim}", highlight=False)
            words = [
                f"{title}: {'; statements: '.join(cell.splitlines())}"
                for title, cell in zip(SETTINGS.values(), cells, strict=True)
                if cell
            ]
            details = "\n".join([*words, f"[dim]{data}; minutes: {', '.join(scales.splitlines())}[/dim]\n"])
            console.print(Padding(details, (0, 0, 0, 2)), highlight=False)
    else:
        header = ("study", "claim", "data", "scales (minutes)", *SETTINGS.values())
        console.print(table("", header, rows, left=tuple(range(len(header)))))
    for sentence in problems:
        console.print(f"[yellow]{escape(sentence)}[/yellow]", soft_wrap=True, highlight=False)
    console.print("`dissensus study show NAME` shows more, `dissensus study run NAME --scale smoke` tries one.")


def _standing(where: Any) -> str:
    """The claim's verdict, then the statements by verdict and the scale, one in a line."""
    lines = [_in_colour(where.claim, where.news)] if where.claim else []
    return "\n".join([*lines, *([f"[dim]{where.statements}[/dim]"] if where.statements else [])])


def _in_colour(words: str, news: str) -> str:
    colour = "dim" if news == "none" else COLOURS[news]
    return f"[{colour}]{escape(words)}[/{colour}]"


def _scales(spec: Any) -> str:
    """A study's scales with their costs, one in a line."""
    lines = []
    for scale in spec.scales:
        cost = spec.cost.get(scale, {})
        lines.append(
            f"{scale}{' ' if cost else ''}" + "/".join(f"{minutes:g} {kind}" for kind, minutes in cost.items())
        )
    return "\n".join(lines)


@app.command(cls=Command)
def show(
    name: Annotated[str, typer.Argument(help="Such as collusion/figure-2, or the file of a study.")],
    scale: Annotated[
        str, typer.Option(help="The scale whose result is shown; by default the largest with one that is not stale.")
    ] = "",
) -> None:
    """Show a study: its claim, its settings, its data, and its results."""
    from dissensus.studies import datasets, library
    from dissensus.studies.page import freshest
    from dissensus.studies.run_folders import find_all, runs_folder, unfinished
    from dissensus.studies.spec import PAPERS, SpecError, to_toml
    from dissensus.studies.validation import missing

    try:
        spec = library.load(name)
    except SpecError as reason:
        fail(said(reason))
    console.print(f"[bold]{escape(spec.reference)}: {escape(spec.title)}[/bold]")
    console.print(f"[dim]{PAPERS[spec.paper]}[/dim]")
    console.print(escape(spec.claim))
    if spec.note:
        console.print(f"[dim]{escape(spec.note)}[/dim]")
    in_words = ("name", "title", "reference", "claim", "note", "expect", "scales", "figure", "cost")
    settings = to_toml({key: value for key, value in spec.to_dict().items() if key not in in_words})
    console.print()
    console.print(settings, highlight=False, markup=False, style="cyan")
    console.print()
    console.print(f"scales (minutes): {', '.join(_scales(spec).splitlines())}", highlight=False)
    for data in spec.data:
        there = "present" if datasets.available(data) else f"absent (dissensus data get {datasets.source_of(data)})"
        console.print(f"data {data}: {there}")
    for part in missing(spec):
        console.print(f"[yellow]It cannot be run: {escape(part)}[/yellow]")
    for sentence in unfinished(spec.name, runs_folder()):
        console.print(f"[yellow]{escape(sentence)}[/yellow]", soft_wrap=True)
    results = {summary.scale: summary for summary in find_all(spec.name, runs_folder(), spec)}
    if scale and scale not in results:
        fail(f"--scale: {spec.name} has no result at scale {scale!r}; it has {', '.join(results) or 'none'}")
    if not results:
        return
    summary = results[scale] if scale else freshest(list(results.values()))
    _print_summary(summary)
    _print_standing(spec, list(results.values()))
    others = [other for other in results if other != summary.scale]
    if others:
        console.print(f"There are results at other scales too: --scale {' or '.join(others)}.")


def _print_standing(spec: Any, results: list[Any]) -> None:
    """Print where the claim stands, in both settings."""
    from dissensus.studies.page import SETTINGS, standing

    console.print(f"[bold]Claim:[/bold] {escape(spec.claim)}")
    for setting, title in SETTINGS.items():
        where = standing(spec, results, setting)
        if where.claim:
            detail = f" [dim](statements: {where.statements})[/dim]" if where.statements else ""
            console.print(f"{title}: {_in_colour(where.claim, where.news)}{detail}", highlight=False)


def _print_summary(summary: Any) -> None:
    """Print points and verdicts."""
    from dissensus.pages.parts import counted
    from dissensus.studies.page import NEWS, verdict_words
    from dissensus.studies.verdicts import NOT_RUN

    seeds = len(summary.provenance.seeds)
    if summary.origin:
        console.print(f"[dim]The result is {escape(summary.origin)}.[/dim]", highlight=False)
    if summary.stale:
        console.print(f"[yellow]The result is stale: {escape(summary.stale)}.[/yellow]", highlight=False)
    _print_points(summary)
    for data, words in {v.data: v.differences for v in summary.verdicts if v.differences}.items():
        console.print(f"{data} differs from the paper's setting: {escape('; '.join(words))}", highlight=False)
    judged = [verdict for verdict in summary.verdicts if verdict.verdict != NOT_RUN]
    rows = [
        [
            _in_colour(verdict_words(verdict), NEWS[verdict.verdict]),
            f"[bold]{verdict.data}[/bold]: {escape(verdict.says)}",
            escape(verdict.paper),
            _ours(verdict),
        ]
        for verdict in judged
    ]
    title = f"{summary.study} at scale {summary.scale}, {counted(seeds, 'seed')}"
    if judged:
        console.print(table(title, ("verdict", "statement", "paper", "ours, 95 % interval"), rows, left=(0, 1)))
    left = len(summary.verdicts) - len(judged)
    if left:
        words = "1 more statement is" if left == 1 else f"{left} more statements are"
        console.print(f"{words} about data or points that this scale does not have.")


def _ours(verdict: Any) -> str:
    """Our number, with its interval or that of the difference on a second line."""
    if verdict.ours is None:
        return ""
    ours = f"{verdict.ours:.3g}"
    if verdict.low is None:
        return f"{ours}\n[dim]{'one seed' if verdict.seeds == 1 else 'no spread'}[/dim]"
    sign = "Δ " if verdict.compared else ""
    return f"{ours}\n[dim]{sign}{verdict.low:.3g} to {verdict.high:.3g}[/dim]"


def _print_points(summary: Any) -> None:
    """Print every measure of every point, where points or measures are few enough to stand beside each other."""
    from dissensus.studies.page import measure_rows, point_name

    axes = [axis for axis in summary.axes if axis != "data"]
    for data in dict.fromkeys(point.data for point in summary.points):
        points = [point for point in summary.points if point.data == data]
        rows = [[name, *map(_cell, cells)] for name, *cells in measure_rows(points)]
        title = f"{data}: means over seeds, ± standard error"
        if len(points) <= MOST_POINTS:
            heads = ["\n".join(_broken(f"{point.value(axis)}") for axis in axes) for point in points]
            console.print(table(title, ("", *heads), rows, left=(0,)))
        elif len(rows) <= MOST_MEASURES:
            _print_transposed(title, ["", *(point_name(point, axes) for point in points)], rows)


def _print_transposed(title: str, names: list[str], rows: Sequence[list[str]]) -> None:
    """Print a point in every row, and measures in as many tables as the width of the screen needs."""
    room = max(2, (console.width - max(map(len, names)) - 4) // MEASURE_WIDTH)
    beside = math.ceil(len(rows) / math.ceil(len(rows) / room))
    for first in range(0, len(rows), beside):
        header, *body = zip(names, *rows[first : first + beside], strict=True)
        console.print(table("" if first else title, header, [list(row) for row in body], left=(0,)))


def _broken(name: str) -> str:
    """A long name over several lines, broken after its hyphens."""
    return name if len(name) <= LONG_NAME else name.replace("-", "-\n")


def _cell(cell: Any) -> str:
    """A number with its error on a second line; words one below the other."""
    if isinstance(cell, str):
        return "\n".join(cell.split(", "))
    interval = cell.interval.replace("± ", "±")
    return (cell.text or "–") + (f"\n[dim]{interval}[/dim]" if interval else "")


@app.command(cls=Command)
def run(
    name: Annotated[str, typer.Argument(help="Such as collusion/figure-2.")],
    scale: Annotated[
        str,
        typer.Option(help="smoke (seconds), laptop (minutes), gpu (minutes, on a GPU) or paper (the full protocol)."),
    ] = "laptop",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, such as optimisation.epochs=3; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where networks are trained: cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    cluster: Annotated[str, typer.Option(help="ray: on the machines of a Ray cluster that see the same files.")] = "",
    address: Annotated[
        str, typer.Option(help="HOST:PORT of the cluster's head; by default RAY_ADDRESS, or a cluster on this machine.")
    ] = "",
) -> None:
    """Run a study, or continue one that was interrupted. A finished study is not run again."""
    from dissensus.data.formats import DataError
    from dissensus.studies import library
    from dissensus.studies import run as studies
    from dissensus.studies.run_folders import read_report, runs_folder
    from dissensus.studies.summary import summarise
    from dissensus.train import ClusterError

    where, machines = _place(device, cluster, address)
    check_folder("the folder of runs, DISSENSUS_RUNS,", runs_folder())
    for result in _stale_results(name, scale):
        console.print(f"[yellow]{escape(result)}[/yellow]", soft_wrap=True, highlight=False)
    settings = parsed_settings("--set", changes or [], "optimisation.epochs=3")
    try:
        with resumable(), progress_bar() as bar:
            folder = studies.run(
                name,
                scale,
                changes=settings,
                device=where,
                jobs=jobs,
                cluster=machines,
                on_study=lambda text, share: bar.update(name, share, text),
            )
    except (ValueError, DataError, ImportError, OSError, studies.Busy, ClusterError) as reason:
        fail(_full_disk(reason) or _in_keys(reason, name, settings))
    _print_summary(summarise(read_report(folder), library.load(name)))
    console.print(f"Results are in {folder}", soft_wrap=True)


def _in_keys(reason: Exception, name: str, changes: dict[str, Any]) -> str:
    """An error of a run; one of the library names the study's file, and keys of it instead of Python's arguments."""
    from dissensus.storage import StorageError
    from dissensus.studies.spec import SpecError, changed_file

    message = in_options(said(reason), ARGUMENTS)
    if type(reason) is not ValueError or isinstance(reason, SpecError | StorageError):
        return message
    message = re.sub(
        r"Use functools\.partial\(\w+, (\w+)=.*", r"Set grid.\1, a list, or objective.options.\1.", message
    )
    message = re.sub(r"pass (\w+)=True", r"set objective.options.\1=true", message)
    return f"{changed_file(name, changes)}: {message}"


def _place(device: str, cluster: str, address: str) -> tuple[Any, Any]:
    """The device of networks, and the cluster; that of a cluster need not be here."""
    if not cluster:
        if address:
            fail("--address goes with --cluster ray", WRONG_USE)
        return torch_device(device), None
    import torch

    from dissensus.train import RayCluster

    if cluster != "ray":
        fail(f"--cluster must be ray; got {cluster}", WRONG_USE)
    if device not in ("cpu", "cuda"):
        fail(f"--device must be cpu or cuda with --cluster; got {device}", WRONG_USE)
    try:
        return torch.device(device), RayCluster(address=address or None)
    except ValueError as reason:
        fail(in_options(str(reason), {"address": "--address"}), WRONG_USE)


def _stale_results(name: str, scale: str) -> list[str]:
    """One sentence on a result at the same scale that is out of date."""
    from dissensus.studies.run_folders import find_all, runs_folder

    stale = [result for result in find_all(name, runs_folder()) if result.stale and result.scale == scale]
    return [f"The result so far is stale: {result.stale}. This run makes it again." for result in stale]


def _full_disk(reason: Exception) -> str:
    """One sentence on a disk that is full, or a limit that is reached; empty for other errors."""
    from dissensus.studies.run_folders import runs_folder

    if not isinstance(reason, OSError) or reason.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ""
    place = f"{runs_folder()} cannot be written to: {os.strerror(reason.errno)}"
    return f"{place}. What is finished is kept: the same command goes on when there is space again"


@app.command(cls=Command)
def report(
    names: Annotated[list[str] | None, typer.Argument(help="Studies; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = STUDIES_PAGE,
    figures: Annotated[Path | None, typer.Option(help="A folder for the figures as single files.")] = None,
    kind: Annotated[str, typer.Option("--format", help="Format of --figures: pdf, png or svg.")] = "pdf",
) -> None:
    """Write one page for all results: claims with verdicts, and figures drawn like those of the papers."""
    from dissensus.pages import html
    from dissensus.studies import library, page
    from dissensus.studies.run_folders import runs_folder
    from dissensus.studies.spec import SpecError

    if kind not in ("pdf", "png", "svg"):
        fail(f"--format must be pdf, png or svg; got {kind}")
    check_drawn("--out", out, makes_folders=out == STUDIES_PAGE)
    check_folder("--figures", figures)
    root = runs_folder()
    check_apart({"--out": out}, map(Path, names or []), folders={"--figures": figures}, stores=[root])
    try:
        chosen = names or library.names()
        with progress_bar() as bar:
            drawn = page.page(chosen, root, lambda text, share: bar.update("page", 0.8 * share, text))
            bar.update("page", 0.8, "writing figures")
            text = html(drawn)
            files = page.write_figures(chosen, root, figures.expanduser(), kind) if figures is not None else []
    except (SpecError, ImportError, OSError) as reason:
        fail(said(reason))
    write_file(out, text.encode())
    print_place("Open", out)
    if figures is not None:
        words = "1 figure is" if len(files) == 1 else f"{len(files)} figures are"
        console.print(f"{words} in {figures}", soft_wrap=True)

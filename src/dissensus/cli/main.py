"""The program, and `dissensus demo`."""

import io
import json
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.markup import escape

import dissensus
import dissensus.cli.audit as audit
import dissensus.cli.convert as convert
import dissensus.cli.data as data
import dissensus.cli.masks as masks
import dissensus.cli.ood as ood
import dissensus.cli.report as report
import dissensus.cli.robust as robust
import dissensus.cli.study as study
import dissensus.cli.tune as tune
from dissensus import startup
from dissensus.cli.screen import (
    Command,
    CommandGroup,
    check_folder,
    check_installed,
    console,
    errors,
    fail,
    print_place,
    progress_bar,
    said,
    table,
    write_file,
)

_ORDER = ("demo", "audit", "report", "tune", "ood", "robust", "masks", "study", "data", "convert")


class Interruptible(CommandGroup):
    """Commands that exit with one line when they are interrupted, with the shell's code, or run out of memory."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands as a new user meets them; others after these."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        startup.raise_again()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            errors.print("; ".join(["interrupted", *getattr(stop, "__notes__", [])]), soft_wrap=True, highlight=False)
            raise typer.Exit(startup.INTERRUPTED) from stop
        except RuntimeError as reason:
            from dissensus.execution.out_of_memory import OutOfMemory

            if not isinstance(reason, OutOfMemory):
                raise
            fail(str(reason))


app = typer.Typer(
    cls=Interruptible,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="**dissensus**: deep ensembles whose members disagree where it counts.\n\n"
    "Start with `dissensus demo`: it trains small ensembles on real data and writes a page that shows what joint "
    "training does to diversity. Have an ensemble already? `dissensus audit` judges its predictions.",
)
app.add_typer(study.app, name="study")
app.add_typer(data.app, name="data")
app.command(cls=Command)(audit.audit)
app.command(cls=Command)(convert.convert)
app.command(cls=Command)(masks.masks)
app.command(cls=Command)(ood.ood)
app.command(cls=Command)(report.report)
app.command(cls=Command)(robust.robust)
app.command(cls=Command)(tune.tune)


def _show_version(wanted: bool) -> bool:
    if wanted:
        console.print(f"dissensus {dissensus.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log which backend was chosen, and why.")] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may have bytes that are no text
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)])


@app.command(cls=Command)
def demo(
    fast: Annotated[
        bool, typer.Option("--fast", help="Fewer values of β, seeds and epochs: seconds, not minutes.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its numbers.")] = Path("runs/demo"),
) -> None:
    """Train ensembles from independent (β = 0) to joint (β = 1) and write a page about them.

    Data: scikit-learn's `diabetes` (regression) and `digits` (classification). Takes minutes on two cores.

    Writes four files: `report.html` (open it in any browser), `audit.html` (the audit of a jointly trained ensemble),
    `overview.png`, and `results.json` (the numbers behind them).
    """
    from dissensus.pages import html
    from dissensus.pages.parts import counted
    from dissensus.studies import demo as ensembles
    from dissensus.studies import demo_page

    check_folder("--out", out)
    check_installed("scipy", "matplotlib", "sklearn")
    out = out.expanduser()
    started = time.perf_counter()
    try:
        with progress_bar() as bar:
            result = ensembles.run(
                ensembles.FAST if fast else ensembles.DemoSettings(),
                lambda label, share, progress: bar.update(label, share, str(progress)),
            )
        demo_report, overview = html(demo_page.page(result)), demo_page.overview(result)
    except ImportError as reason:
        fail(said(reason))
    write_file(out / "results.json", (json.dumps(result.to_dict(), indent=1) + "\n").encode())
    write_file(out / "report.html", demo_report.encode())
    jointly_trained = result.audits["digits, scores", 1.0]
    write_file(out / "audit.html", lambda file: jointly_trained.page(file, "digits, trained jointly"))
    write_file(out / "overview.png", overview)
    for problem in result.problems:
        console.print(table(problem.title, demo_page.TABLE_HEADER, demo_page.table_rows(result, problem.name)))
        console.print(demo_page.finding(result, problem.name), highlight=False)
        console.print()
    notes = "; ".join(f"{name}: {note}" for name, note in demo_page.COLUMN_NOTES.items())
    console.print(f"[dim]Columns: {escape(notes)}.[/dim]\n", highlight=False)
    names = ("β", *(problem.name for problem in result.problems))
    verdicts = demo_page.verdict_rows(result)
    console.print(table("What the audit says", names, verdicts, left=tuple(range(1, len(names)))))
    seconds = time.perf_counter() - started
    print_place(f"{counted(result.made['networks'], 'network')} in {seconds:.0f} s. Open", out / "report.html")


def main() -> None:
    """Run the command line."""
    try:
        app()
    finally:
        startup.end_quietly()

"""The program, and `dissensus demo`."""

import json
import logging
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from typer.core import TyperGroup

import dissensus
import dissensus.cli.audit as audit
import dissensus.cli.data as data
import dissensus.cli.masks as masks
import dissensus.cli.ood as ood
import dissensus.cli.robust as robust
import dissensus.cli.study as study
from dissensus.cli.screen import check_folder, check_installed, console, errors, fail, keep, shown, table


class Interruptible(TyperGroup):
    """Commands that leave with one line and the shell's own code when they are interrupted."""

    def invoke(self, ctx: Any) -> Any:
        """Run what was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            errors.print("; ".join(["interrupted", *getattr(stop, "__notes__", [])]), soft_wrap=True, highlight=False)
            raise typer.Exit(INTERRUPTED) from stop


INTERRUPTED = 130
"""128 and the number of the signal, as shells have it."""
app = typer.Typer(
    cls=Interruptible,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="**dissensus**: deep ensembles whose members disagree where it counts.\n\n"
    "Start with `dissensus demo`: it trains small ensembles on real data and writes a page that shows what joint "
    "training does to diversity.",
)
app.add_typer(study.app, name="study")
app.add_typer(data.app, name="data")
app.command()(audit.audit)
app.command()(masks.masks)
app.command()(ood.ood)
app.command()(robust.robust)


def _show_version(wanted: bool) -> bool:
    if wanted:
        console.print(f"dissensus {dissensus.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say which backend was chosen, and why.")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)])


@app.command()
def demo(
    fast: Annotated[
        bool, typer.Option("--fast", help="Fewer values of β, seeds and epochs: about 15 seconds.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its numbers.")] = Path("runs/demo"),
) -> None:
    """Train ensembles from independent (β = 0) to joint (β = 1) and write a page about it.

    Data: scikit-learn's `diabetes` (regression) and `digits` (classification). Takes under two minutes on two cores.

    Writes `report.html`, one file to open in any browser, `audit.html`, the audit of a jointly trained ensemble,
    `overview.png`, and `results.json`, the numbers behind them.
    """
    from dissensus.studies import demo as study_of_demo
    from dissensus.studies import demo_page

    check_folder("--out", out)
    check_installed("scipy", "matplotlib", "sklearn")
    started = time.perf_counter()
    audits: study_of_demo.Audits = {}
    try:
        with shown() as bar:
            result = study_of_demo.run(
                study_of_demo.FAST if fast else study_of_demo.Settings(),
                lambda label, share, progress: bar.update(label, share, str(progress)),
                audits,
            )
        report, overview = demo_page.html(result), demo_page.overview(result)
    except ImportError as reason:
        fail(str(reason))
    keep(out / "results.json", (json.dumps(result, indent=1) + "\n").encode())
    keep(out / "report.html", report.encode())
    keep(out / "audit.html", lambda file: audits["digits, scores", 1.0].page(file, "digits, trained jointly"))
    keep(out / "overview.png", overview)
    for problem in result["problems"]:
        console.print(table(problem["title"], demo_page.TABLE_HEADER, demo_page.table_rows(result, problem["name"])))
        console.print(demo_page.finding(result, problem["name"]), highlight=False)
        console.print()
    titles = ("β", *(problem["name"] for problem in result["problems"]))
    console.print(table("What the audit says", titles, demo_page.verdict_rows(result)))
    console.print(f"{result['made']['networks']} networks in {time.perf_counter() - started:.0f} s. Open ", end="")
    console.print(f"{out / 'report.html'}", style="bold", soft_wrap=True)


def main() -> None:
    """Run the command line."""
    app()

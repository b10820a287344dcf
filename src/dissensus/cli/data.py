"""`dissensus data`: list, get and check data sets."""

from typing import Annotated

import typer
from rich.markup import escape

from dissensus.cli.screen import Command, CommandGroup, console, fail, in_options, progress_bar, said, table

ARGUMENTS = {"name": "NAME"}
"""Arguments of the command line by those of the library that they become."""

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="List data sets, fetch them, and check their files.")


@app.command("list", cls=Command)
def list_datasets() -> None:
    """List all data sets, with their size, their terms of use, and whether they are on this machine."""
    from dissensus.data import sources

    rows = []
    for name, info in sources.DATASETS.items():
        size = _size(info.download) if info.download else ""
        state = sources.state(name)
        colour = {"present": "green", "incomplete": "yellow"}.get(state, "dim")
        rows.append([name, escape(info.description), size, f"[{colour}]{state}[/{colour}]", escape(info.terms)])
    console.print(table("", ("name", "what it is", "download", "state", "terms"), rows, left=(0, 1, 3, 4)))
    console.print(f"Data is kept in {sources.data_folder()} (set DISSENSUS_DATA for another place).", soft_wrap=True)


def _size(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.0f} kB"


@app.command(cls=Command)
def get(name: Annotated[str, typer.Argument(help="A data set of `dissensus data list`.")]) -> None:
    """Download a data set, verify it and keep it."""
    from dissensus.data import sources
    from dissensus.data.formats import DataError

    try:
        with progress_bar() as bar:

            def on_bytes(file: str, done: int, total: int | None) -> None:
                bar.update(file, done / total if total else 0.0, f"{done / 1e6:,.1f} MB")

            folder = sources.get(name, progress=on_bytes)
    except (DataError, ValueError) as reason:
        fail(in_options(said(reason), ARGUMENTS))
    console.print(f"{name} is in {folder}", soft_wrap=True)


@app.command(cls=Command)
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; by default all that are present.")] = None,
) -> None:
    """Read the files of data sets again and verify them."""
    from dissensus.data import sources
    from dissensus.data.formats import DataError

    chosen = names or [name for name in sources.DATASETS if sources.state(name) != "absent"]
    rows, is_broken = [], False
    try:
        for name in chosen:
            for file, ok, reason in sources.check(name):
                is_broken |= not ok
                rows.append([name, file, "[green]whole[/green]" if ok else "[red]not whole[/red]", escape(reason)])
    except (DataError, ValueError) as reason:
        fail(in_options(said(reason), ARGUMENTS))
    console.print(table("", ("name", "file", "state", "why"), rows, left=(0, 1, 2, 3)))
    if is_broken:
        raise typer.Exit(1)

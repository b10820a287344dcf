"""What commands share: the console, bars, tables and errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dissensus.storage import write_atomically

console = Console(stderr=False)


class Shown:
    """A bar with a line of detail below it."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console, expand=True,
        )  # fmt: skip
        self.detail = Text(style="dim", no_wrap=True, overflow="ellipsis")
        self.task = self.bar.add_task("starting", total=1.0)

    def update(self, label: str, share: float, detail: str = "") -> None:
        """Move the bar."""
        self.bar.update(self.task, description=escape(label), completed=share)
        self.detail.plain = detail


@contextmanager
def shown() -> Iterator[Shown]:
    """A bar for the length of some work."""
    bar = Shown()
    with Live(Group(bar.bar, bar.detail), console=console, transient=True, refresh_per_second=8):
        yield bar


def table(title: str, header: tuple[str, ...], rows: list[list[Any]], *, left: tuple[int, ...] = ()) -> Table:
    """A table; columns are right-aligned but for those named in ``left``, which may be wrapped."""
    result = Table(title=title or None, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        result.add_column(name, justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def written(json_file: Path | None, text: Callable[[], str], page: Path | None, html: Callable[[], str]) -> None:
    """Write a result as JSON and as a page, where those are asked for."""
    try:
        for file, made in ((json_file, lambda: text() + "\n"), (page, html)):
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, made().encode())
    except (ImportError, OSError) as reason:
        fail(str(reason))
    if page is not None:
        console.print(f"Open [bold]{escape(str(page))}[/bold]", soft_wrap=True)


def fail(message: str) -> NoReturn:
    """Say what is wrong and leave."""
    console.print(f"[red]error:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(1)

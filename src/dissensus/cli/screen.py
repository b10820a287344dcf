"""What commands share: the console, bars, tables, devices, places to write to, and errors."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dissensus.storage import write_atomically

if TYPE_CHECKING:
    from torch import device as Device

console = Console(stderr=False)
errors = Console(stderr=True)
FIGURES = (".png", ".pdf", ".svg")
"""What figures may be written as."""


class Shown:
    """A bar with a line of detail below it."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
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
    """A table; columns are right-aligned but for those named in ``left``, and only these may be wrapped.

    Titles and heads are plain text, cells may have markup. On a narrow terminal cells have no space around them.
    """
    result = Table(title=escape(title) or None, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        words = i in left
        result.add_column(escape(name), justify="left" if words else "right", overflow="fold" if words else "ellipsis")
    for row in rows:
        result.add_row(*row)
    least = Measurement.get(console, console.options.update(max_width=WIDEST), result).minimum
    if least > console.width:
        result.padding = (0, 0)
    return result


WIDEST = 10_000
"""Columns of a terminal that holds any table."""


def device_of(name: str) -> "Device":
    """A device of this machine; one that is not there is refused with the names of those that are."""
    import torch

    there = ["cpu"]
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        there += [kind.type, *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in there:
        fail(f"there is no device {name!r} that torch can see; use --device {' or '.join(there)}")
    return torch.device(name)


EXTRAS = {
    "matplotlib": "figures need matplotlib: pip install 'dissensus[report]'",
    "scipy": "intervals over seeds need scipy: pip install 'dissensus[report]'",
    "sklearn": "this data ships with scikit-learn: pip install 'dissensus[data]'",
}
"""What is said of a package that is missing."""


def check_installed(*packages: str) -> None:
    """Refuse work that needs a package which is not installed, before any of it is done."""
    missing = []
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(EXTRAS[package])
    if missing:
        fail("; ".join(missing))


def check_drawn(option: str, file: Path | None, endings: tuple[str, ...] = ()) -> None:
    """Refuse a page or figure that could not be drawn or written, before any work is done for it."""
    check_file(option, file, endings)
    if file is not None:
        check_installed("matplotlib")


def check_file(option: str, file: Path | None, endings: tuple[str, ...] = ()) -> None:
    """Refuse a file that could not be written, before any work is done for it."""
    if file is None:
        return
    if endings and file.suffix.lower() not in endings:
        fail(f"{option} {file} must end in {', '.join(endings[:-1])} or {endings[-1]}", WRONG_USE)
    try:
        if file.is_dir():
            fail(f"{option} {file} is a folder; give a file", WRONG_USE)
        if file.exists() and not os.access(file, os.W_OK):
            fail(f"{option} {file} may not be written to", WRONG_USE)
    except OSError as reason:
        fail(f"{option} {file} cannot be written: {reason.strerror}", WRONG_USE)
    check_folder(option, file.parent, file)


def check_folder(option: str, folder: Path | None, given: Path | None = None) -> None:
    """Refuse a folder that is not one, or could not be made or written to; ``given`` is what the user said."""
    if folder is None:
        return
    given = folder if given is None else given
    try:
        nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    except OSError as reason:
        fail(f"{option} {given} cannot be written: {reason.strerror}", WRONG_USE)
    if not nearest.is_dir():
        which = f"{option} {given} is a file" if nearest == given else f"{option} {given}: {nearest} is a file"
        fail(f"{which}; give a folder" if given == folder else which, WRONG_USE)
    if not os.access(nearest, os.W_OK | os.X_OK):
        fail(f"{option} {given}: {nearest} may not be written to", WRONG_USE)


def keep(file: Path, payload: bytes | Callable[[Path], object]) -> None:
    """Write a file, or have it written, with the folders above it; what goes wrong is told of the file's own name."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(payload, bytes):
            write_atomically(file, payload)
        else:
            payload(file)
    except OSError as reason:
        fail(f"{file} cannot be written: {reason.strerror or reason}")


def written(json_file: Path | None, text: Callable[[], str], page: Path | None, html: Callable[[], str]) -> None:
    """Write a result as JSON and as a page, where those are asked for."""
    try:
        for file, made in ((json_file, lambda: text() + "\n"), (page, html)):
            if file is not None:
                keep(file, made().encode())
    except ImportError as reason:
        fail(str(reason))
    if page is not None:
        console.print(f"Open [bold]{escape(str(page))}[/bold]", soft_wrap=True)


@contextmanager
def resumable(keeps: bool = True) -> Iterator[None]:
    """Work of which an interruption loses nothing that is finished, where ``keeps`` is true."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if keeps:
            stop.add_note("the same command goes on where it stopped")
        raise


WRONG_USE = 2
"""The code of a call that could never work, as typer has it."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what is wrong and leave."""
    errors.print(f"[red]error:[/red] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)

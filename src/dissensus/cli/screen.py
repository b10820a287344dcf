"""What commands share: the console, progress bars, tables, devices, files, options and errors."""

import importlib
import itertools
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from typer.core import TyperCommand, TyperGroup

from dissensus.output_files import is_replaceable, same_place, write_output

if TYPE_CHECKING:
    from torch import device as Device

console = Console(stderr=False)
errors = Console(stderr=True)
FIGURES = (".png", ".pdf", ".svg")
"""Endings of files that a figure can be written to."""
COLOURS = {"good": "green", "fair": "yellow", "bad": "red", "none": "cyan"}
"""Colours of verdicts, by the kind of news that they are (`dissensus.pages.News`)."""


class _WithoutTypesOfFlags:
    """Shows no type beside a flag in the help, where ``<bool>`` would look like a value that has to be given."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options and arguments."""
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]  # of the class beside it
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_WithoutTypesOfFlags, TyperCommand):
    """A command."""


class CommandGroup(_WithoutTypesOfFlags, TyperGroup):
    """A command with commands of its own."""


class ProgressBar:
    """A progress bar with a line of detail below it."""

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
def progress_bar() -> Iterator[ProgressBar]:
    """A progress bar that is shown while the block runs."""
    bar = ProgressBar()
    with Live(Group(bar.bar, bar.detail), console=console, transient=True, refresh_per_second=8):
        yield bar


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], *, left: tuple[int, ...] = ()) -> Table:
    """A table; columns are aligned to the right but for those in ``left``, and only these may be wrapped.

    Titles and headers are plain text. Cells are shown as ``str`` gives them, and strings may have markup. On a narrow
    terminal cells have no space around them.
    """
    result = Table(title=escape(title) or None, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        is_text = i in left
        justify, overflow = ("left", "fold") if is_text else ("right", "ellipsis")
        result.add_column(escape(name), justify=justify, overflow=overflow)
    for row in rows:
        result.add_row(*map(str, row))
    narrowest = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), result).minimum
    if narrowest > console.width:
        result.padding = (0, 0)
    return result


_ANY_WIDTH = 10_000
"""Columns of a terminal that is wide enough for any table."""


def torch_device(name: str) -> "Device":
    """A device of this machine; an absent one is refused with the names of those that are present."""
    import torch

    present = ["cpu"]
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        present += [kind.type, *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in present:
        fail(f"there is no device {name!r} that torch can see; use --device {' or '.join(present)}")
    return torch.device(name)


def parsed_settings(option: str, words: Sequence[str], example: str) -> dict[str, Any]:
    """Values of a repeatable option, each written as ``name=value``; values are as in TOML, and words need no quotes.

    >>> parsed_settings("--set", ["optimisation.epochs=3", "data=['a']", "objective.loss=brier"], "")
    {'optimisation.epochs': 3, 'data': ['a'], 'objective.loss': 'brier'}
    """
    values: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name.strip():
            fail(f"{option} {word}: write it as name=value, such as {example}")
        try:
            values[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[name.strip()] = text.strip()
    return values


def files_by_name(option: str, words: list[str], reserved: tuple[str, ...] = ()) -> dict[str, Path]:
    """Files written as ``NAME=FILE``, or as ``FILE`` with the name of the file; names are unique.

    A word that is the path of a file is a FILE, even where it has a ``=``.
    """
    files: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not equals or os.path.isfile(word):  # no error for a name that no file can have
            name, file = Path(word).stem, word
        path = Path(file)
        if not name or not file:
            raise ValueError(f"{option} {word}: write it as NAME=FILE, such as near=a.npz, or as FILE")
        if name in reserved:
            raise ValueError(f"{option} {word}: the name {name!r} is taken by the first set; use another name")
        if name in files:
            raise ValueError(
                f"{option} names {name!r} twice: {files[name]} and {path}; use another NAME for one of them"
            )
        files[name] = path
    return files


def said(reason: BaseException) -> str:
    """What an error says; that of the system names its file first.

    >>> said(IsADirectoryError(21, "Is a directory", "runs/spec.toml")), said(ValueError("`a` must be 1"))
    ('runs/spec.toml: Is a directory', '`a` must be 1')
    """
    if isinstance(reason, OSError) and reason.strerror:
        return f"{reason.filename}: {reason.strerror}" if reason.filename is not None else reason.strerror
    return str(reason)


def in_options(message: str, options: Mapping[str, str]) -> str:
    """A message of the library in the words of the command line: arguments are named by their options.

    >>> flags = {"in_bag": "--in-bag", "train": "--train", "kind": "--kind"}
    >>> in_options("`in_bag` must come with `train`; got no `train`. Give train=(outputs, targets).", flags)
    '--in-bag must come with --train; got no --train. Give --train FILE.'
    >>> in_options("`outputs` must be logits. Say kind='labels' (--kind labels).", flags)
    '`outputs` must be logits. Say --kind labels.'
    >>> in_options("`kind` must be 'logits'; got None. It is not guessed.", flags)
    "--kind must be 'logits'; got none. It is not guessed."
    """
    for name, flag in options.items():
        message = message.replace(f"`{name}`", flag)
        message = re.sub(rf"\b{name}='(\w+)'( \({flag} \1\))?", rf"{flag} \1", message)
        message = re.sub(rf"\b{name}=\([^)]*\)", f"{flag} FILE", message)
    return re.sub(r"\bgot None\b", "got none", message)


EXTRAS = {
    "matplotlib": "figures need matplotlib: pip install 'dissensus[report]'",
    "scipy": "intervals over seeds need scipy: pip install 'dissensus[report]'",
    "sklearn": "this data ships with scikit-learn: pip install 'dissensus[data]'",
}
"""Messages on packages that are missing."""


def check_installed(*packages: str) -> None:
    """Refuse work that needs a package which is not installed, before the work begins."""
    missing = []
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(EXTRAS[package])
    if missing:
        fail("; ".join(missing))


def check_drawn(option: str, file: Path | None, endings: tuple[str, ...] = (), *, makes_folders: bool = False) -> None:
    """Refuse a page or a figure that could not be drawn or written, before the work begins."""
    check_file(option, file, endings, makes_folders=makes_folders)
    if file is not None:
        check_installed("matplotlib")


def check_file(option: str, file: Path | None, endings: tuple[str, ...] = (), *, makes_folders: bool = False) -> None:
    """Refuse a file that could not be written, before the work begins; ``makes_folders``: folders above it are made."""
    if file is None:
        return
    if endings and file.suffix.lower() not in endings:
        fail(f"{option} {file} must end in {', '.join(endings[:-1])} or {endings[-1]}", WRONG_USE)
    try:
        path = file.expanduser()
        is_folder = path.is_dir()
        is_refused = path.exists() and not os.access(path, os.W_OK)
        replaceable = is_folder or is_replaceable(path)
        target = Path(os.path.realpath(path))
    except _UNUSABLE as reason:
        _refuse_place(option, file, reason)
    if is_folder:
        fail(f"{option} {file} is a folder; give a file", WRONG_USE)
    if is_refused:
        fail(f"{option} {file} may not be written to", WRONG_USE)
    if not replaceable:
        return
    check_folder(option, target.parent if path.is_symlink() else path.parent, file)
    if not makes_folders and not target.parent.is_dir():
        missing = target.parent if path.is_symlink() else file.parent
        fail(f"{option} {file}: there is no folder {missing}; make it first", WRONG_USE)


_UNUSABLE = (OSError, RuntimeError, ValueError)
"""Errors of names that no file can have: too long, of a user without a home folder, with a zero byte."""


def _refuse_place(option: str, argument: Path, reason: Exception) -> NoReturn:
    fail(f"{option} {argument} cannot be written: {getattr(reason, 'strerror', None) or reason}", WRONG_USE)


def check_folder(option: str, folder: Path | None, argument: Path | None = None) -> None:
    """Refuse a folder that is a file, or that could not be made or written to; ``argument`` is what the user wrote."""
    if folder is None:
        return
    argument = folder if argument is None else argument
    try:
        folder = folder.expanduser()
        nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    except _UNUSABLE as reason:
        _refuse_place(option, argument, reason)
    if not nearest.is_dir():
        problem = f"{argument} is a file" if nearest == argument else f"{argument}: {nearest} is a file"
        fail(f"{option} {problem}" + ("; give a folder" if argument == folder else ""), WRONG_USE)
    if not os.access(nearest, os.W_OK | os.X_OK):
        fail(f"{option} {argument}: {nearest} may not be written to", WRONG_USE)


def check_apart(
    files: Mapping[str, Path | None],
    inputs: Iterable[Path | None] = (),
    *,
    folders: Mapping[str, Path | None] | None = None,
    stores: Iterable[Path] = (),
) -> None:
    """Refuse outputs that would replace what a command reads, or each other, before the work begins.

    Args:
        files: Files that are written, by their options, each checked by `check_file` before.
        inputs: Files and folders that are read.
        folders: Folders that are written to, by their options, each checked by `check_folder` before.
        stores: Folders in which every file belongs to dissensus, such as that of runs.
    """
    written = {**files, **(folders or {})}
    places = {option: path.expanduser() for option, path in written.items() if path is not None}
    sources = [path for path in inputs if path is not None]
    for option, place in places.items():
        if any(same_place(place, source) for source in sources):
            fail(f"{option} {written[option]} is a file or folder that is read; give another place", WRONG_USE)
        store = next((store for store in stores if _is_within(place, store)), None)
        if store is not None:
            fail(f"{option} {written[option]} is in {store}, which is read; give another place", WRONG_USE)
    for option, other in itertools.permutations(places, 2):
        if option in files and is_replaceable(places[option]) and _is_within(places[other], places[option]):
            fail(f"{option} {written[option]} and {other} {written[other]} must be two places", WRONG_USE)


def _is_within(path: Path, folder: Path) -> bool:
    """Whether a path, with its links followed, is another one or lies below it."""
    return same_place(path, folder) or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def write_file(file: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a file with the folders above it; ``content`` may be a function that writes to a path."""
    path = file.expanduser()
    try:
        if not path.is_symlink():
            path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            write_output(path, content)
        else:
            content(path)
    except OSError as reason:
        fail(f"{file} cannot be written: {reason.strerror or reason}")


def print_place(words: str, file: Path) -> None:
    """Say where something is; the path is never broken over lines."""
    console.print(f"{words} [bold]{escape(str(file))}[/bold]", soft_wrap=True, highlight=False)


@contextmanager
def resumable(keeps_results: bool = True) -> Iterator[None]:
    """Work that can be interrupted: where finished parts are kept, the user is told that the command can go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if keeps_results:
            stop.add_note("the same command goes on where it stopped")
        raise


WRONG_USE = 2
"""The exit code of a wrong call, as typer has it."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error and exit."""
    errors.print(f"[red]error:[/red] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)

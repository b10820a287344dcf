"""The bar that ``progress=True`` draws on the terminal: with rich if it is installed, else as one line of text."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from dissensus import checks
from dissensus.train.history import OnProgress, Progress

_SECONDS_BETWEEN_DRAWINGS = 0.1


class Drawing(Protocol):
    """A bar on the terminal."""

    def draw(self, moment: Progress) -> None:
        """Show a moment."""
        ...

    def erase(self) -> None:
        """Leave the terminal as it was before."""
        ...


@dataclass
class Display:
    """Who is told of progress while a block runs."""

    progress: OnProgress | None
    summary: str = ""
    """What a bar leaves behind at the end, in one line."""


def check_progress(progress: object) -> None:
    """Refuse what is neither True, False or None, nor a function."""
    if not isinstance(progress, bool | None):
        checks.function("progress", progress, "of one argument, a Progress, or True for a bar")


@contextmanager
def displayed(progress: bool | OnProgress | None) -> Iterator[Display]:
    """A block that shows its progress: by a bar with ``progress=True``, or by the user's function.

    The bar appears with the first moment and is gone after the block, however that ends. A block that ends well leaves
    its summary in one line. Where stderr is no terminal, that line is all.
    """
    if progress is None or isinstance(progress, bool):
        bar = Bar(new_drawing()) if progress else None
    else:
        yield Display(progress)
        return
    display = Display(bar)
    ended_well = False
    try:
        yield display
        ended_well = True
    finally:
        if bar is not None:
            bar.close(display.summary if ended_well else "")


class Bar:
    """Draws the moments that it is called with, ten a second at most."""

    def __init__(self, drawing: Drawing | None, now: Callable[[], float] = time.perf_counter) -> None:
        self.drawing, self.now = drawing, now
        self.drawn = -float("inf")

    def __call__(self, moment: Progress) -> None:
        """Draw a moment, unless the last one was drawn just before."""
        if self.drawing is None or self.now() - self.drawn < _SECONDS_BETWEEN_DRAWINGS:
            return
        with self._quietly():
            self.drawing.draw(moment)
        self.drawn = self.now()

    def close(self, summary: str = "") -> None:
        """Erase the bar, and leave a line behind."""
        with self._quietly():
            if self.drawing is not None and self.drawn > -float("inf"):
                self.drawing.erase()
            if summary and sys.stderr is not None:
                sys.stderr.write(f"{summary}\n")

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """A block after whose failure nothing is drawn any more: a terminal that was closed ends no training."""
        try:
            yield
        except (OSError, ValueError):
            drawing, self.drawing = self.drawing, None
            with suppress(OSError, ValueError):
                if drawing is not None:
                    drawing.erase()  # which also puts back the streams that rich has redirected


def new_drawing() -> Drawing | None:
    """The bar for this terminal; None where stderr is none. (A notebook is one for rich.)"""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    try:
        from rich.console import Console
    except ImportError:
        return PlainLine() if is_terminal else None
    console = Console(stderr=True)
    return RichBar(console) if is_terminal or console.is_jupyter else None


class RichBar:
    """A bar with a line of numbers below it. It has no thread of its own, which a loader's workers would inherit."""

    def __init__(self, console: Any) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.text import Text

        self.bar = Progress(
            TextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            auto_refresh=False,
        )
        self.task = self.bar.add_task("", total=1.0)
        self.numbers = Text(style="dim", no_wrap=True, overflow="ellipsis")
        # What is printed meanwhile goes above the bar, but into a file or a pipe if stdout is one.
        redirect = sys.stdout is not None and sys.stdout.isatty()
        self.live = Live(
            Group(self.bar, self.numbers),
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=redirect,
        )

    def draw(self, moment: Progress) -> None:
        """Show a moment."""
        self.bar.update(self.task, completed=moment.step, total=moment.steps)
        self.numbers.plain = str(moment)
        if not self.live.is_started:
            self.live.start()
        self.live.refresh()

    def erase(self) -> None:
        """Stop, which erases the bar and shows the cursor again."""
        self.live.stop()


class PlainLine:
    """One line that is written over and over."""

    def __init__(self) -> None:
        self.width = 0

    def draw(self, moment: Progress) -> None:
        """Show a moment."""
        most = shutil.get_terminal_size().columns - 1
        self._write(f"{moment.step / moment.steps:4.0%}  {moment}"[:most])

    def erase(self) -> None:
        """Write spaces over the line."""
        self._write("")
        sys.stderr.write("\r")
        sys.stderr.flush()

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self.width))
        sys.stderr.flush()
        self.width = len(text)

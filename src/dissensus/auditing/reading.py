"""Stored outputs: one file for all members, or one file per member. Files that could run code are not opened."""

import csv
import math
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dissensus import checks

OUTPUTS, TARGETS = "outputs", "targets"
STREAMED = (OUTPUTS, "reference", "ood")
"""Endings of the names of arrays that may be large, and are read slice by slice."""
KINDS = (".npz", ".npy", ".safetensors", ".csv", ".parquet")


class ReadingError(ValueError):
    """Raised for a file that an audit cannot read; the message says what to do."""


def read_files(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Arrays of files by name: ``outputs``, and where the file has them ``targets``, ``train_outputs`` and others.

    Args:
        paths: One ``.npz`` or ``.safetensors`` with arrays of these names, one ``.npy`` ``[M, N, C]``, or one ``.npy``,
            ``.csv`` or ``.parquet`` ``[N, C]`` per member. Large arrays are read slice by slice, except in compressed
            archives (``numpy.savez_compressed``) and text.
    """
    files = [Path(path) for path in paths]
    for file in files:
        if not file.is_file():
            raise ReadingError(f"there is no file {file}")
        if file.suffix not in KINDS:
            raise ReadingError(f"{file} is none of {', '.join(KINDS)}; save arrays with numpy.savez or safetensors")
    if len(files) > 1:
        return {OUTPUTS: [read_array(file) for file in files]}
    (file,) = files
    if file.suffix == ".npz":
        return _npz(file)
    if file.suffix == ".safetensors":
        return _safetensors(file)
    member = read_array(file)
    if file.suffix != ".npy":
        raise ReadingError(f"{file} holds one member; give one file per member")
    return {OUTPUTS: member}


def read_array(path: str | Path) -> Any:
    """One array: targets ``[N]``, or a member ``[N, C]``."""
    file = Path(path)
    if not file.is_file():
        raise ReadingError(f"there is no file {file}")
    if file.suffix == ".npy":
        try:
            return np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as reason:
            raise ReadingError(
                f"{file} is no plain array of numbers (pickles are not opened){_detail(reason)}"
            ) from reason
    if file.suffix == ".csv":
        return _csv(file)
    if file.suffix == ".parquet":
        return _parquet(file)
    raise ReadingError(f"{file} holds several arrays or none; give a .npy, .csv or .parquet file")


def _detail(reason: Exception) -> str:
    """What a reader said of a file, without NumPy's advice to open pickles."""
    text = str(reason)
    return "" if "pickle" in text else f": {text}"


def _npz(file: Path) -> dict[str, Any]:
    """Arrays of an archive as memory maps; compressed arrays are loaded."""
    try:
        with zipfile.ZipFile(file) as archive, np.load(file, allow_pickle=False) as loaded:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            arrays = {name: _mapped(file, entries[name]) for name in loaded.files if _is_plain(entries[name])}
            arrays |= {name: loaded[name] for name in loaded.files if name not in arrays}
    except (ValueError, EOFError, zipfile.BadZipFile) as reason:
        raise ReadingError(f"{file} cannot be read (pickles are not opened){_detail(reason)}") from reason
    return _with_outputs(file, arrays)


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type == zipfile.ZIP_STORED and entry.filename.endswith(".npy")


def _mapped(file: Path, entry: zipfile.ZipInfo) -> Any:
    """A memory map of an array in an archive. The array follows a header, which ends with two lengths."""
    with file.open("rb") as stream:
        stream.seek(entry.header_offset + 26)
        name, extra = struct.unpack("<HH", stream.read(4))
        start = entry.header_offset + 30 + name + extra
        stream.seek(start)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        version = np.lib.format.read_magic(stream)
        if version not in read:  # of columns with names
            raise ValueError(f"`{entry.filename}` holds no plain numbers")
        shape, by_columns, dtype = read[version](stream)
        if dtype.hasobject:
            raise ValueError(f"`{entry.filename}` holds objects")
        at = stream.tell()
        if at - start + dtype.itemsize * math.prod(shape) != entry.file_size:
            raise ValueError(f"`{entry.filename}` is cut short")
    if not shape or 0 in shape:  # nothing to map
        return np.load(file)[entry.filename.removesuffix(".npy")]
    return np.memmap(file, dtype, "r", at, shape, "F" if by_columns else "C")


class _Slices:
    """A tensor of a safetensors file, read when it is sliced."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.get_shape())

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]


def _safetensors(file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        stored_tensors = safe_open(file, "pt")
        names = list(stored_tensors.keys())
        arrays: dict[str, Any] = {
            name: _Slices(stored_tensors.get_slice(name)) for name in names if name.endswith(STREAMED)
        }
        arrays |= {name: stored_tensors.get_tensor(name) for name in names if name not in arrays}
        return _with_outputs(file, arrays)
    except SafetensorError as reason:
        raise ReadingError(f"{file} cannot be read: {reason}") from reason


def _with_outputs(file: Path, arrays: dict[str, Any]) -> dict[str, Any]:
    if OUTPUTS not in arrays:
        raise ReadingError(f"{file} has no array `outputs` [M, N, C]; it has {', '.join(sorted(arrays)) or 'none'}")
    return arrays


def _csv(file: Path) -> Any:
    """Numbers, with or without a header. A header may be the columns' numbers, as pandas writes it."""
    try:
        with file.open(newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (UnicodeDecodeError, csv.Error) as reason:
        raise ReadingError(f"{file} cannot be read as text: {reason}") from reason
    counted = len(rows[0]) > 1 and rows[0] == [str(i) for i in range(len(rows[0]))] if rows else False
    if rows and (counted or not all(checks.is_number_text(text) for text in rows[0])):
        rows = rows[1:]
    try:
        table = np.array([[float(text) for text in row] for row in rows])
    except ValueError as reason:
        raise ReadingError(f"{file}: every line must hold the same count of numbers: {reason}") from reason
    if not len(table):
        raise ReadingError(f"{file} holds no lines")
    return _narrow(table)


def _parquet(file: Path) -> Any:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as reason:
        raise ReadingError("parquet files need pyarrow: pip install pyarrow; or save as .npy or .csv") from reason
    return _narrow(np.column_stack([column.to_numpy() for column in parquet.read_table(file).columns]))


def _narrow(table: Any) -> Any:
    """A single column as a list of numbers; whole numbers as labels."""
    narrow = table[:, 0] if table.ndim == 2 and table.shape[1] == 1 else table
    whole = narrow.ndim == 1 and bool((narrow == np.round(narrow)).all())
    return narrow.astype(np.int64) if whole else narrow

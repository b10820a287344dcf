"""Stored outputs: one file for all members, or one file per member. Files that could run code are not opened."""

import csv
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dissensus import checks
from dissensus.auditing.archives import ReadingError, check_regular, read_npy, read_npz

__all__ = ["KINDS", "ReadingError", "read_array", "read_files"]

OUTPUTS, TARGETS = "outputs", "targets"
STREAMED = (OUTPUTS, "reference", "ood")
"""Endings of the names of arrays that may be large, and are read slice by slice."""
KINDS = (".npz", ".npy", ".safetensors", ".csv", ".parquet")


def read_files(paths: Sequence[str | Path], *, unpack_limit: float | None = None) -> dict[str, Any]:
    """Arrays of files by name: ``outputs``, and where the file has them ``targets``, ``train_outputs`` and others.

    Args:
        paths: One ``.npz`` or ``.safetensors`` with arrays of these names, one ``.npy`` ``[M, N, C]``, or one ``.npy``,
            ``.csv`` or ``.parquet`` ``[N, C]`` per member. Large arrays are read slice by slice, except in text.
            Compressed ones (``numpy.savez_compressed``) are first unpacked into a temporary file. Arrays of an
            ``.npz`` have checksums, which are compared while they are read.
        unpack_limit: Gigabytes that compressed arrays of a file may have when they are unpacked; half of this
            machine's memory by default.
    """
    files = [Path(path) for path in paths]
    for file in files:
        check_regular(file)
        if file.suffix not in KINDS:
            raise ReadingError(f"{file} is none of {', '.join(KINDS)}; save arrays with numpy.savez or safetensors")
    if len(files) > 1:
        return {OUTPUTS: [read_array(file) for file in files]}
    (file,) = files
    if file.suffix == ".npz":
        return _with_outputs(file, read_npz(file, STREAMED, unpack_limit))
    if file.suffix == ".safetensors":
        return _safetensors(file)
    member = read_array(file)
    if file.suffix != ".npy":
        raise ReadingError(f"{file} holds one member; give one file per member")
    return {OUTPUTS: member}


def read_array(path: str | Path) -> Any:
    """One array: targets ``[N]``, or a member ``[N, C]``."""
    file = Path(path)
    check_regular(file)
    if file.suffix == ".npy":
        return read_npy(file)
    if file.suffix == ".csv":
        return _csv(file)
    if file.suffix == ".parquet":
        return _parquet(file)
    raise ReadingError(f"{file} holds several arrays or none; give a .npy, .csv or .parquet file")


class _Slices:
    """A tensor of a safetensors file, read when it is sliced."""

    def __init__(self, tensor: Any, file: Path, name: str) -> None:
        self.tensor, self.file, self.name = tensor, file, name
        self.shape, self.ndim = tuple(tensor.get_shape()), len(tensor.get_shape())

    def __getitem__(self, index: Any) -> Any:
        return _real(self.tensor[index], self.file, self.name)


def _real(tensor: Any, file: Path, name: str) -> Any:
    """A tensor of real numbers; eight-bit floats, with which torch cannot compute, as single precision."""
    if tensor.is_complex():
        raise ReadingError(f"{file} cannot be read: `{name}` holds complex numbers; save real ones")
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _safetensors(file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        stored_tensors = safe_open(file, "pt")
        names = list(stored_tensors.keys())
        arrays: dict[str, Any] = {}
        for name in names:
            if name.endswith(STREAMED):
                arrays[name] = _Slices(stored_tensors.get_slice(name), file, name)
                if arrays[name].ndim:
                    arrays[name][(slice(0, 1),) * arrays[name].ndim]  # refuses a type that torch does not know
            else:
                arrays[name] = _real(stored_tensors.get_tensor(name), file, name)
    except (SafetensorError, TypeError, AttributeError, RuntimeError, OverflowError, MemoryError) as reason:
        raise ReadingError(f"{file} cannot be read: {reason}") from reason
    return _with_outputs(file, arrays)


def _with_outputs(file: Path, arrays: dict[str, Any]) -> dict[str, Any]:
    if OUTPUTS not in arrays:
        raise ReadingError(f"{file} has no array `outputs` [M, N, C]; it has {', '.join(sorted(arrays)) or 'none'}")
    return arrays


def _csv(file: Path) -> Any:
    """Numbers, with or without a header. A header may be the columns' numbers, as pandas writes it."""
    numbers, width = array("d"), 0
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.reader(stream)
            for row in lines:
                if not row:
                    continue
                if not width:
                    width = len(row)
                    if _is_header(row):
                        continue
                if len(row) != width:
                    raise ReadingError(f"{file}, line {lines.line_num}: it must hold {width} numbers; got {len(row)}")
                try:
                    numbers.extend(map(float, row))
                except ValueError as reason:
                    text = next(text for text in row if not checks.is_number_text(text))
                    got = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
                    raise ReadingError(f"{file}, line {lines.line_num}: it must hold numbers; got {got}") from reason
    except (UnicodeDecodeError, csv.Error) as reason:
        raise ReadingError(f"{file} cannot be read as text: {reason}") from reason
    if not numbers:
        raise ReadingError(f"{file} holds no lines")
    return _narrow(np.frombuffer(numbers).reshape(-1, width))


_SHOWN = 40
"""Characters of a cell that a message shows."""


def _is_header(row: Sequence[str]) -> bool:
    counted = len(row) > 1 and list(row) == [str(i) for i in range(len(row))]
    return counted or not all(checks.is_number_text(text) for text in row)


def _parquet(file: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as reason:
        raise ReadingError(f"{file} needs pyarrow: pip install pyarrow; or save as .npy or .csv") from reason
    try:
        return _narrow(np.column_stack([column.to_numpy() for column in parquet.read_table(file).columns]))
    except (pyarrow.ArrowException, ValueError) as reason:
        raise ReadingError(f"{file} cannot be read: {reason}") from reason


def _narrow(table: Any) -> Any:
    """A single column as a list of numbers; whole numbers as labels."""
    narrow = table[:, 0] if table.ndim == 2 and table.shape[1] == 1 else table
    whole = narrow.ndim == 1 and bool((narrow == np.round(narrow)).all() and (np.abs(narrow) < 2**63).all())
    return narrow.astype(np.int64) if whole else narrow

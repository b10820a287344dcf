"""Readers of raw data files: idx, CIFAR's batches and sheets, SVHN, CSV, KEEL, npz. Nothing is ever unpickled.

Images are ``uint8 [N, C, H, W]`` and labels ``int64 [N]``. A file that is missing, truncated or in another format is
refused with `DataError`, whose message names the file and what it should contain.
"""

import csv
import gzip
import io
import json
import math
import re
import stat
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from dissensus import checks
from dissensus.storage import read_regular

AGAIN = "Fetch it again."
DECOMPRESSED_LIMIT = 1 << 30
"""Bytes that a compressed file may hold, where nothing else is known about it."""

Images = UInt8[Tensor, "N C H W"]
Labels = Int64[Tensor, " N"]


class DataError(ValueError):
    """A data file is missing, damaged or another one than expected; the message names it."""


def idx(path: str | Path) -> UInt8[Tensor, "..."]:
    """The array in an idx file of bytes, or in its ``.gz`` (MNIST's format).

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
    >>> _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    >>> idx(file)
    tensor([7, 2, 1], dtype=torch.uint8)
    """
    data = _content(path)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or not 1 <= data[3] <= 4:
        refuse(path, "be an idx file of bytes, beginning 00 00 08 and 1 to 4 axes", f"{data[:4].hex(' ') or 'nothing'}")
    axes = data[3]
    sizes = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i]) for i in range(axes)]
    expected = 4 + 4 * axes
    _refuse_other_size(path, len(data), expected + math.prod(sizes), checks.shape_text(sizes))
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=expected).reshape(sizes).copy())


def idx_pair(images: str | Path, labels: str | Path, classes: int = 10) -> tuple[Images, Labels]:
    """Grey images and labels from two idx files."""
    pictures, numbers = idx(images), idx(labels)
    if pictures.ndim != 3:
        refuse(images, "hold images [N, H, W]", checks.shape_text(pictures.shape), "Are images and labels swapped?")
    if numbers.ndim != 1:
        refuse(labels, "hold labels [N]", checks.shape_text(numbers.shape), "Are images and labels swapped?")
    if len(pictures) != len(numbers):
        refuse(labels, f"hold as many labels as {Path(images).name} has images, {len(pictures)}", len(numbers))
    return pictures.unsqueeze(1), _labels(labels, numbers, classes)


def cifar10_batch(path: str | Path) -> tuple[Images, Labels]:
    """One of CIFAR-10's binary batches: records of a label and 3,072 bytes, red, green, blue."""
    records = _records(path, 1)
    return _pictures(records[:, 1:]), _labels(path, records[:, 0], 10)


def cifar100_batch(path: str | Path) -> tuple[Images, Labels, Labels]:
    """One of CIFAR-100's binary batches: images, fine labels of 100, coarse labels of 20."""
    records = _records(path, 2)
    return _pictures(records[:, 2:]), _labels(path, records[:, 1], 100), _labels(path, records[:, 0], 20)


def cifar_sheet(path: str | Path) -> Images:
    """CIFAR images from a PNG sheet: one row of 1,024 RGB pixels per image."""
    try:
        from PIL import Image
    except ImportError as reason:
        raise ImportError("PNG sheets are read by pillow: pip install 'dissensus[data]'") from reason
    try:
        with Image.open(io.BytesIO(_content(path)), formats=["PNG"]) as sheet:
            if sheet.width != 1024 or sheet.mode != "RGB":
                refuse(path, "be an RGB sheet, 1024 pixels wide", f"{sheet.mode}, {sheet.width} pixels wide")
            pixels = np.asarray(sheet)
    except (OSError, SyntaxError, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning) as reason:
        # pillow reports a broken PNG as a SyntaxError
        refuse(path, "be a whole PNG file", _first_line(reason), AGAIN)
    return torch.from_numpy(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).copy())


def json_labels(path: str | Path, classes: int = 10) -> Labels:
    """Labels from a JSON list of whole numbers."""
    try:
        values = json.loads(_content(path))
    except ValueError as reason:
        refuse(path, "be JSON", _first_line(reason), AGAIN)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        refuse(path, "hold a list of whole numbers", type(values).__name__)
    return _labels(path, torch.tensor(values, dtype=torch.int64), classes)


def svhn(path: str | Path) -> tuple[Images, Labels]:
    """SVHN's cropped digits (``*_32x32.mat``); class 10, the digit zero, becomes class 0."""
    try:
        from scipy.io import loadmat
    except ImportError as reason:
        raise ImportError("SVHN's .mat files are read by scipy: pip install 'dissensus[report]'") from reason
    data = _content(path)
    try:
        arrays = loadmat(io.BytesIO(data), variable_names=["X", "y"])
    except Exception as reason:  # scipy's reader raises errors of many types on damaged files
        refuse(path, "be a whole MATLAB file", _first_line(reason), AGAIN)
    if not {"X", "y"} <= arrays.keys():
        refuse(path, "hold X and y", [name for name in arrays if not name.startswith("__")])
    pixels, numbers = np.asarray(arrays["X"]), np.asarray(arrays["y"]).ravel()
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
        refuse(path, "hold X, bytes [32, 32, 3, N]", f"{pixels.dtype} {checks.shape_text(pixels.shape)}")
    if len(numbers) != pixels.shape[3]:
        refuse(path, f"hold {pixels.shape[3]} labels y", len(numbers))
    labels = torch.from_numpy(numbers.astype(np.int64))
    return torch.from_numpy(pixels.transpose(3, 2, 0, 1).copy()), _labels(
        path, torch.where(labels == 10, 0, labels), 10
    )


def csv_columns(path: str | Path, *, delimiter: str = ",", names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Columns of a CSV file as text, by the names in its first line, or by ``names`` if it has no such line.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "table.csv"
    >>> _ = file.write_text("a,b\\n1,x\\n2,y\\n")
    >>> csv_columns(file)
    {'a': ['1', '2'], 'b': ['x', 'y']}
    """
    try:
        text = _content(path).decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]
    except (UnicodeDecodeError, csv.Error) as reason:
        refuse(path, "be a CSV file in UTF-8", _first_line(reason), AGAIN)
    if names is None:
        if not rows:
            refuse(path, "begin with a line of column names", "an empty file", AGAIN)
        names, rows = rows[0], rows[1:]
    return _columns(path, names, rows)


def _columns(path: str | Path, names: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    if len(set(names)) < len(names):
        refuse(path, "name its columns differently", list(names))
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            refuse(path, f"have {len(names)} fields in row {number}", len(row), "It may be cut short. " + AGAIN)
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def keel_columns(path: str | Path) -> dict[str, list[str]]:
    """Columns of a KEEL file (``.dat``) as text, by the names of its ``@attribute`` lines.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "table.dat"
    >>> _ = file.write_text("@relation t\\n@attribute a real[0, 9]\\n@attribute b {x, y}\\n@data\\n1, x\\n2.5, y\\n")
    >>> keel_columns(file)
    {'a': ['1', '2.5'], 'b': ['x', 'y']}
    """
    try:
        lines = [line.strip() for line in _content(path).decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as reason:
        refuse(path, "be a KEEL file in UTF-8", _first_line(reason), AGAIN)
    lines = [line for line in lines if line and not line.startswith(("%", "#"))]
    data = next((i for i, line in enumerate(lines) if line.lower() == "@data"), None)
    if data is None:
        refuse(path, "have a line '@data' before its rows", "a file without it", "It may be cut short. " + AGAIN)
    declared = [line.split(None, 1)[1] for line in lines[:data] if re.match(r"@attribute\s+\S", line, re.IGNORECASE)]
    names = [re.match(r"'[^']*'|[^\s{\[]+", text) for text in declared]
    if not names or not all(names):
        refuse(path, "name its columns in lines '@attribute NAME TYPE'", declared or "none")
    rows = [[field.strip() for field in line.split(",")] for line in lines[data + 1 :]]
    return _columns(path, [name.group().strip("'") for name in names if name], rows)


def spaced_columns(path: str | Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Columns of a file whose fields are separated by blanks."""
    try:
        rows = [line.split() for line in _content(path).decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as reason:
        refuse(path, "be a text in UTF-8", _first_line(reason), AGAIN)
    return _columns(path, names, rows)


def npz(path: str | Path, names: Sequence[str]) -> dict[str, Shaped[Tensor, "..."]]:
    """Arrays of these names from an npz file, as tensors."""
    arrays = npz_arrays(path, names)
    try:
        return {name: torch.from_numpy(arrays[name]) for name in names}
    except TypeError as reason:
        refuse(path, "be a whole npz file of plain arrays", _first_line(reason))


def npz_arrays(
    path: str | Path, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Arrays of these names from an npz file, and those of optional names that it has."""
    data = _content(path)
    try:
        _check_compressed(path, data)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                refuse(path, "be an npz file", "one array", "Use numpy.savez.")
            missing = [name for name in names if name not in arrays]
            if missing:
                refuse(path, f"hold {', '.join(map(repr, names))}", f"{list(arrays)}")
            found = {name: arrays[name] for name in (*names, *optional) if name in arrays}
            other = next((name for name, array in found.items() if not isinstance(array, np.ndarray)), None)
            if other is not None:
                refuse(path, "be a whole npz file of plain arrays", f"something else as {other!r}")
            return found
    except DataError:
        raise
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as reason:
        refuse(path, "be a whole npz file of plain arrays", _first_line(reason))
    except (MemoryError, ArithmeticError, RuntimeError) as reason:
        refuse(path, "be an npz file that NumPy can read", _first_line(reason))


def _check_compressed(path: str | Path, data: bytes) -> None:
    """Refuse an npz file whose compressed entries are too large once they are decompressed."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED)
    if size > DECOMPRESSED_LIMIT:
        _refuse_large(path, f"{size} bytes")


def _refuse_large(path: str | Path, got: str) -> NoReturn:
    fix = "Decompress it first, or raise dissensus.data.formats.DECOMPRESSED_LIMIT."
    refuse(path, f"hold at most {DECOMPRESSED_LIMIT} bytes once decompressed", got, fix)


def refuse(path: str | Path, requirement: str, got: object, fix: str = "") -> NoReturn:
    """Refuse a file with `DataError`, in the format of `dissensus.checks.refuse`."""
    checks.refuse(str(path), requirement, got, fix, DataError)


def _content(path: str | Path) -> bytes:
    """Content of a regular file, decompressed if it is a ``.gz``."""
    file = Path(path)
    try:
        if not stat.S_ISREG(file.stat().st_mode) and not file.is_dir():
            refuse(path, "be a regular file", "a pipe, a device or a socket")
        data = read_regular(file)
    except FileNotFoundError:
        refuse(path, "be a file", "nothing of that name")
    except OSError as reason:
        refuse(path, "be a readable file", reason.strerror or _first_line(reason))
    if file.suffix != ".gz":
        return data
    try:
        with gzip.open(io.BytesIO(data)) as compressed:
            content = compressed.read(DECOMPRESSED_LIMIT + 1)
    except (OSError, EOFError, zlib.error) as reason:
        refuse(path, "be a whole gzip file", _first_line(reason), AGAIN)
    if len(content) > DECOMPRESSED_LIMIT:
        _refuse_large(path, "more")
    return content


def _records(path: str | Path, labels: int) -> UInt8[Tensor, "N width"]:
    data, width = _content(path), labels + 3072
    if not data or len(data) % width:
        refuse(path, f"hold records of {width} bytes", f"{len(data)} bytes", "It may be cut short. " + AGAIN)
    return torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, width).copy())


def _pictures(rows: UInt8[Tensor, "N 3072"]) -> Images:
    return rows.reshape(-1, 3, 32, 32).contiguous()


def _labels(path: str | Path, numbers: Tensor, classes: int) -> Labels:
    """Labels as int64; a label that is not a class is refused."""
    labels = numbers.long()
    outside = (labels < 0) | (labels >= classes)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        refuse(path, f"hold labels 0 to {classes - 1}", f"{int(labels[first])} in example {first}", AGAIN)
    return labels


def _refuse_other_size(path: str | Path, size: int, expected: int, shape: str) -> None:
    if size != expected:
        why = "It is cut short. " if size < expected else "Something was added to it. "
        refuse(path, f"have {expected} bytes for {shape}", f"{size} bytes", why + AGAIN)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")

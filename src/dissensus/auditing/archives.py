"""Arrays in files of numpy (``.npy``, ``.npz``), read slice by slice. No pickle is opened, and checksums are compared.

An array that an archive stores as it is, is mapped. Its checksum is compared while it is read. A compressed array is
unpacked, a large one into a temporary file.
"""

import errno
import io
import math
import os
import re
import shutil
import stat
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from dissensus import checks

try:
    from lzma import LZMAError

    _DECOMPRESSION_ERRORS = (zlib.error, struct.error, LZMAError)
except ImportError:  # Python can be built without it
    _DECOMPRESSION_ERRORS = (zlib.error, struct.error)

_IN_MEMORY = 2**26
"""Bytes up to which a compressed array is unpacked into memory."""
_AT_ONCE = 2**22
"""Bytes that are read at once where an array is read from its beginning to its end."""
_ENCRYPTED = 0x1
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The header in front of an entry: its mark, and the lengths of the name and of the extra field, which follow it."""
_LOCAL_MARK = b"PK\x03\x04"
_FIX = {
    "O": "objects (pickles are not opened); save plain numbers",
    "c": "complex numbers; save real ones",
    "m": "durations; save them as numbers",
    "M": "dates; save them as numbers",
}
"""Arrays that are not read, by the kind of their dtype, and what to do."""


class ReadingError(ValueError):
    """Raised for a file that an audit cannot read; the message says what to do."""


class UnpackLimitError(ReadingError):
    """Raised for an archive that is larger than allowed when it is unpacked."""


AGAIN = "Make the file again, with numpy.savez."


def check_regular(file: Path) -> None:
    """Refuse anything but a regular file: a pipe would wait for its writer, and a device may never end."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError as reason:
        raise ReadingError(f"there is no file {file}") from reason
    except (OSError, ValueError) as reason:
        raise ReadingError(f"{file} cannot be read: {getattr(reason, 'strerror', None) or reason}") from reason
    if stat.S_ISDIR(mode):
        raise ReadingError(f"{file} is a folder; give a file")
    if not stat.S_ISREG(mode):
        raise ReadingError(f"{file} is a pipe, a socket or a device; copy what it gives into a file, and give that")


class ArrayHeader(NamedTuple):
    """What the beginning of a ``.npy`` file says of its array."""

    shape: tuple[int, ...]
    by_columns: bool
    """Whether the first index changes fastest (Fortran's order)."""
    dtype: np.dtype[Any]
    size: int
    """Bytes of the header itself."""

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * math.prod(self.shape)


def read_header(stream: io.BufferedIOBase) -> ArrayHeader:
    """The header of an array, at the beginning of which the stream stands.

    Raises:
        ReadingError: The array is not of numbers or text, or there is no header.
    """
    start = stream.tell()
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read:
            raise ReadingError("it holds columns with names; save a plain array")
        shape, by_columns, dtype = read[version](stream)
    except ReadingError:
        raise
    except (ValueError, TypeError, KeyError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as reason:
        raise ReadingError(f"it is no array of numpy (pickles are not opened): {_one_line(reason)}") from reason
    if dtype.hasobject or dtype.kind in _FIX:
        raise ReadingError(f"it holds {_FIX['O' if dtype.hasobject else dtype.kind]}")
    if dtype.names or dtype.subdtype:
        raise ReadingError("it holds columns with names; save a plain array")
    if dtype.kind == "V":
        raise ReadingError(f"it holds raw bytes ({dtype}), as bfloat16 and float8 are saved; save float32")
    if any(length < 0 for length in shape) or not dtype.itemsize:
        raise ReadingError(f"its header is damaged: {checks.shape_text(shape)} {dtype}")
    return ArrayHeader(tuple(shape), by_columns, dtype, stream.tell() - start)


def _one_line(reason: BaseException) -> str:
    line = (str(reason).splitlines() or [type(reason).__name__])[0]
    return re.sub(r":?\s*<[^<>]* object at 0x[0-9a-f]+>", "", line)  # numpy shows parts of a header so


def read_npy(file: Path) -> Any:
    """A memory map of the array in a ``.npy`` file."""
    with file.open("rb") as stream:
        try:
            header = read_header(stream)
            present = os.fstat(stream.fileno()).st_size - header.size
            if header.bytes > present:
                raise ReadingError(
                    f"it is cut short: its header says {header.bytes:,} bytes, and {present:,} are there"
                )
            return _mapped(stream, header, 0)
        except ReadingError as reason:
            raise ReadingError(f"{file} cannot be read: {reason}") from reason


def _mapped(stream: io.BufferedIOBase, header: ArrayHeader, start: int) -> Any:
    """A memory map of an array."""
    if not header.bytes:
        return _empty(header)
    try:
        order = "F" if header.by_columns else "C"
        return np.memmap(stream, header.dtype, "r", start + header.size, header.shape, order)
    except (ValueError, OverflowError) as reason:
        raise ReadingError(f"its header is damaged: {checks.shape_text(header.shape)} {header.dtype}") from reason


def _empty(header: ArrayHeader) -> Any:
    """An array without entries."""
    try:
        return np.empty(header.shape, header.dtype)
    except (ValueError, OverflowError) as reason:
        raise ReadingError(f"its header is damaged: {checks.shape_text(header.shape)} {header.dtype}") from reason


def default_unpack_limit() -> float:
    """Gigabytes that are unpacked without asking: half of this machine's memory, or 4 where that is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2e9
    except (AttributeError, ValueError, OSError):
        return 4.0


def read_npz(file: Path, streamed: Sequence[str], unpack_limit: float | None = None) -> dict[str, Any]:
    """Arrays of an archive by name.

    Args:
        file: The archive.
        streamed: Endings of the names of arrays that are read slice by slice. Others are loaded.
        unpack_limit: Gigabytes (10⁹ bytes) that compressed arrays may have together when they are unpacked. The default
            is that of `default_unpack_limit`.
    """
    limit = default_unpack_limit() if unpack_limit is None else checks.number("unpack_limit", unpack_limit, 0)
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            entries = _checked_entries(archive)
            _check_size(file, entries.values(), limit)
            return {name: _array(archive, entry, name.endswith(tuple(streamed))) for name, entry in entries.items()}
    except UnpackLimitError:
        raise
    except (ReadingError, NotImplementedError) as reason:
        raise ReadingError(f"{file} cannot be read: {_one_line(reason)}") from reason
    except zipfile.BadZipFile as reason:
        problem = (
            "empty" if file.stat().st_size == 0 else f"damaged, cut short, or no .npz at all ({_one_line(reason)})"
        )
        raise ReadingError(f"{file} cannot be read: it is {problem}. {AGAIN}") from reason
    except OSError as reason:
        folder = f" in {tempfile.gettempdir()}, where arrays are unpacked (TMPDIR names another folder)"
        where = folder if reason.errno == errno.ENOSPC else ""
        raise ReadingError(f"{file} cannot be read: {reason.strerror or reason}{where}") from reason
    except (*_DECOMPRESSION_ERRORS, ValueError, OverflowError, EOFError, RuntimeError, MemoryError) as reason:
        raise ReadingError(f"{file} cannot be read: it is damaged ({_one_line(reason)}). {AGAIN}") from reason


def _checked_entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Entries by the names of their arrays. No two of them share bytes or a name."""
    entries: dict[str, zipfile.ZipInfo] = {}
    end = 0
    for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
        path = PurePosixPath(entry.filename)
        if path.is_absolute() or ".." in path.parts:
            raise ReadingError(f"its entry {entry.filename!r} is named outside the archive")
        name = entry.filename.removesuffix(".npy")
        if name == entry.filename:
            continue  # no array
        if name in entries:
            raise ReadingError(f"it holds two arrays {name!r}")
        if entry.flag_bits & _ENCRYPTED:
            raise ReadingError(f"`{name}` is encrypted")
        if entry.header_offset < end:
            raise ReadingError(f"its entries overlap at `{name}`")
        end = _data_start(archive, entry) + entry.compress_size
        if end > archive.start_dir:
            raise ReadingError(f"`{name}` is cut short")
        entries[name] = entry
    return entries


def _data_start(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """The place of an entry's first byte in the file."""
    stream = archive.fp
    assert stream is not None
    stream.seek(entry.header_offset)
    header = stream.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_MARK):
        raise ReadingError(f"`{entry.filename}` does not begin where the archive says")
    _, name, extra = _LOCAL_HEADER.unpack(header)
    return entry.header_offset + _LOCAL_HEADER.size + name + extra


def _check_size(file: Path, entries: Any, limit: float) -> None:
    size = sum(entry.file_size for entry in entries if entry.compress_type != zipfile.ZIP_STORED) / 1e9
    if size > limit:
        got = f"{limit:.3g}, and the arrays of {file} have {size:.3g} GB when they are unpacked"
        fix = "Raise it if you trust the file."
        checks.refuse("unpack_limit", f"be at least {math.ceil(size * 100) / 100:g}", got, fix, UnpackLimitError)


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, streamed: bool) -> Any:
    try:
        if streamed and entry.compress_type == zipfile.ZIP_STORED:
            return _stored(archive, entry)
        return _unpacked(archive, entry)
    except ReadingError as reason:
        raise ReadingError(f"`{entry.filename.removesuffix('.npy')}`: {reason}") from reason


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Any:
    """An array of an archive, in memory or, if it is large, in a temporary file. Its checksum is compared."""
    with archive.open(entry) as packed:
        if entry.file_size <= _IN_MEMORY:
            content = io.BytesIO(packed.read())
            header = _whole_header(content, entry.file_size)
            if not header.bytes:
                return _empty(header)
            array = np.frombuffer(content.getbuffer(), header.dtype, math.prod(header.shape), header.size)
            return array.reshape(header.shape, order="F" if header.by_columns else "C")
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(packed, unpacked, _AT_ONCE)
            unpacked.flush()
            unpacked.seek(0)
            return _mapped(unpacked, _whole_header(unpacked, entry.file_size), 0)


def _whole_header(stream: io.BufferedIOBase, size: int) -> ArrayHeader:
    """The header of an array that takes ``size`` bytes together with it."""
    header = read_header(stream)
    if header.size + header.bytes != size:
        shape = f"{checks.shape_text(header.shape)} {header.dtype}"
        raise ReadingError(f"its size is wrong: its header says {shape}, and {size - header.size:,} bytes are there")
    return header


def _stored(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Any:
    """An array that is not compressed, as a memory map."""
    if entry.file_size != entry.compress_size:
        raise ReadingError("its two sizes differ, though it is not compressed")
    start = _data_start(archive, entry)
    stream: Any = archive.fp
    stream.seek(start)
    header = _whole_header(stream, entry.file_size)
    if not header.bytes or not header.shape:
        return _unpacked(archive, entry)
    array = _mapped(stream, header, start)
    stream.seek(start)
    checked = CheckedArray(array, zlib.crc32(stream.read(header.size)), entry.CRC, str(archive.filename))
    if header.by_columns or array.ndim < 2:
        checked.check()  # slices of examples are scattered over the file
        return array
    return checked


class CheckedArray:
    """A memory map ``[M, N, ...]`` of an array with a checksum, which is compared while the array is read.

    Slices of examples that follow each other, ``array[:, a:b]``, are read once: each member has a checksum of its own,
    which grows slice by slice, and with the last slice all of them are joined. Before any other slice is taken, the
    whole array is read. Nobody therefore sees all examples of a damaged array.
    """

    def __init__(self, array: Any, header_checksum: int, checksum: int, file: str) -> None:
        self.array, self.header_checksum, self.checksum, self.file = array, header_checksum, checksum, file
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self.is_checked = False
        self.next, self.checksums = 0, [0] * len(array)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows(index)
        if self.is_checked:
            pass
        elif rows is None:
            self.check()
        else:
            self._add(rows)
        return self.array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self[:], dtype) if copy is not False else np.asarray(self[:], dtype)

    def _rows(self, index: Any) -> slice | None:
        """The examples that an index takes of all members, if they follow those that were taken before."""
        if (
            not isinstance(index, tuple)
            or len(index) != 2
            or index[0] != slice(None)
            or not isinstance(index[1], slice)
        ):
            return None
        start, stop, step = index[1].indices(self.shape[1])
        return slice(start, stop) if step == 1 and start < stop and start in (0, self.next) else None

    def _add(self, rows: slice) -> None:
        """Read on; a reader may begin again."""
        if rows.start == 0:
            self.checksums = [0] * len(self.array)
        for i, member in enumerate(self.array):
            self.checksums[i] = zlib.crc32(member[rows], self.checksums[i])
        self.next = rows.stop
        if self.next == self.shape[1]:
            length, joined = self.array[0].nbytes, self.header_checksum
            for checksum in self.checksums:
                joined = joined_checksum(joined, checksum, length)
            self._compare(joined)

    def check(self) -> None:
        """Read the whole array, and compare its checksum."""
        content = self.array.reshape(-1, order="A").view(np.uint8)
        checksum = self.header_checksum
        for start in range(0, len(content), _AT_ONCE):
            checksum = zlib.crc32(content[start : start + _AT_ONCE], checksum)
        self._compare(checksum)

    def _compare(self, checksum: int) -> None:
        if checksum != self.checksum:
            raise ReadingError(f"{self.file} is damaged: the checksum of an array in it is wrong. Make the file again.")
        self.is_checked = True


_POLYNOMIAL, _ONE, _X = 0xEDB88320, 1 << 31, 1 << 30
"""Polynomials over GF(2) modulo that of CRC-32; the highest bit is the coefficient of x⁰."""


def joined_checksum(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces one after the other, from those of the pieces; the second has ``length`` bytes.

    >>> joined_checksum(zlib.crc32(b"dis"), zlib.crc32(b"sensus"), 6) == zlib.crc32(b"dissensus")
    True
    """
    return _product(_power_of_x(8 * length), first) ^ second


@lru_cache
def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _X
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square, exponent = _product(square, square), exponent >> 1
    return power


def _product(first: int, second: int) -> int:
    total = 0
    while first:
        if first & _ONE:
            total ^= second
        first = (first << 1) & 0xFFFFFFFF
        second = (second >> 1) ^ (_POLYNOMIAL if second & 1 else 0)
    return total

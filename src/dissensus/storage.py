"""Folders of tensors: a safetensors file, or several, and a JSON manifest. Nothing is unpickled.

The manifest names the weights file, whose name is its checksum; several processes write one each. The weights are
written first, and the manifest is replaced last, atomically. At any moment the manifest therefore names a complete
file. Writers of one folder wait for each other; readers wait for nobody, and see either the old or the new contents.
"""

import errno
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dissensus import checks

log = logging.getLogger("dissensus")

MANIFEST = "manifest.json"
LOCK = ".lock"
_CHECKSUM = "manifest_sha256"
OF_FOLDERS = ("kind", "format", "weights", "sha256", "bytes", "tensors", "layout", "parts", "stacked", _CHECKSUM)
"""Entries of a manifest that `write_folder` makes; the others are details of its kind."""
_TEMPORARY = ".unfinished"
_OUR_NAME = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
_OUR_TEMPORARY = re.compile(r"\.([0-9a-f]{12}-)?[0-9a-f]{16}\.unfinished")
"""Temporary files, and temporary folders of weights."""
_OF_SAFETENSORS = re.compile(r"\.tmp[0-9A-Za-z]{6}")
"""Temporary files of safetensors, which earlier releases wrote beside the weights."""
_ABANDONED_SECONDS = 24 * 3600.0
"""The age of a temporary file that counts as abandoned where locks cannot tell."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_MOST_UNUSED = 2
"""The layout of tensors in memory is stored unless their memory is larger than they are by this factor."""


class StorageError(ValueError):
    """A stored folder is missing, damaged or not the expected one; the message says which."""


class OtherFormat(StorageError):
    """A file is whole, but this release does not read its format."""


class Formats(NamedTuple):
    """The formats of one kind of file that this release reads, by number. It writes the newest."""

    newest: int = 1
    oldest: int = 1
    """0 for files that had no number at first."""
    advice: str = ""
    """What to do with an older file, after a colon; ``{place}`` stands for the file."""
    whole: int | None = None
    """The format of a folder with one weights file, where it is older than that of a folder with several."""

    def check(self, place: Path, stored: object) -> None:
        """Refuse a format that is newer or older than these.

        >>> Formats(newest=2).check(Path("saved"), 3)
        Traceback (most recent call last):
        dissensus.storage.OtherFormat: saved was written by a newer dissensus (format 3);
            this one reads up to 2: upgrade.
        """
        if isinstance(stored, bool) or not isinstance(stored, int):
            raise StorageError(f"{place} is damaged: its format must be a whole number; got {stored!r}.")
        if stored > self.newest:
            raise OtherFormat(
                f"{place} was written by a newer dissensus (format {stored}); this one reads up to {self.newest}: "
                "upgrade."
            )
        if stored < self.oldest:
            advice = self.advice.format(place=place) or "write it anew."
            raise OtherFormat(
                f"{place} was written by an older dissensus (format {stored}); this one reads from {self.oldest} on: "
                f"{advice}"
            )


FORMATS = Formats()
"""Of a kind of file whose format has not changed so far."""


def write_folder(
    path: str | Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    details: Mapping[str, Any],
    formats: Formats = FORMATS,
) -> None:
    """Write tensors and details as a folder; an interrupted save leaves the previous contents in place.

    A save into a folder that another process is writing waits for it. What earlier saves that were killed have left
    behind is removed.
    """
    folder = checks.path("path", path)
    with write_errors_told(folder):
        make_folder("path", folder)
        with locked(folder, wait=True) as exclusive:
            previous = _previous_weights(folder, kind)
            _remove_leftovers(folder, previous, exclusive)
            number = formats.newest if formats.whole is None else formats.whole
            written = _written_weights(folder, tensors)
            write_record(folder / MANIFEST, {"kind": kind, "format": number, **written, **details})
            _remove_previous(folder, previous, [written["weights"]])


class Together(Protocol):
    """Processes that write one folder together."""

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the manifest."""
        ...

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, on every process."""
        ...


def write_folder_together(
    path: str | Path,
    kind: str,
    tensors: Mapping[str, Tensor] | None,
    details: Mapping[str, Any],
    formats: Formats,
    processes: Together,
) -> None:
    """Write a folder as `write_folder` does, in several processes: each writes its tensors, the first the manifest.

    A tensor that several processes give is one of their rows, in the order of the processes. ``tensors=None``: this
    process has nothing to write. Details are those of the first process.
    """
    folder = checks.path("path", path)
    with write_errors_told(folder), ExitStack() as stack:
        previous: list[str] = []
        if processes.first:
            make_folder("path", folder)
            exclusive = stack.enter_context(locked(folder, wait=True))
            previous = _previous_weights(folder, kind)
            _remove_leftovers(folder, previous, exclusive)
        processes.everyone(None)
        entry = None if tensors is None else _written_weights(folder, tensors)
        entries = [entry for entry in processes.everyone(entry) if entry is not None]
        if processes.first:
            names = [name for entry in entries for name in entry["tensors"]]
            stacked = sorted({name for name in names if names.count(name) > 1} if len(entries) > 1 else set())
            parts = {"parts": entries[1:], "stacked": stacked} if len(entries) > 1 else {}
            number = formats.newest if parts or formats.whole is None else formats.whole
            write_record(folder / MANIFEST, {"kind": kind, "format": number, **entries[0], **parts, **details})
            _remove_previous(folder, previous, [entry["weights"] for entry in entries])
        processes.everyone(None)


def _remove_previous(folder: Path, previous: Sequence[str], written: Sequence[str]) -> None:
    """Remove weights files that the manifest named before."""
    for name in previous:
        if name not in written:
            (folder / name).unlink(missing_ok=True)


def make_folder(argument: str, folder: Path) -> bool:
    """Make a folder with those above it, and say whether it is new; `StorageError` says what is in the way."""
    try:
        if folder.is_dir():
            return False
        if folder.is_symlink():
            problem = "which is a link to a file, or to nothing"
        elif folder.exists():
            problem = "which is a file"
        else:
            folder.mkdir(parents=True, exist_ok=True)
            return True
    except OSError as reason:
        if reason.errno in _FULL:
            raise
        problem = f"which cannot be made: {reason.strerror or reason}"
    checks.refuse(argument, "be a folder, or a place for a new one", f"{folder}, {problem}", error=StorageError)


def _written_weights(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a weights file; return what a manifest says about it."""
    temporary = (
        folder / f".{secrets.token_hex(8)}{_TEMPORARY}"
    )  # a folder, since safetensors makes files beside its own
    try:
        temporary.mkdir()
        unnamed = temporary / "weights"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, unnamed)
        checksum, size = file_digest(unnamed), unnamed.stat().st_size
        weights = f"weights-{checksum[:16]}.safetensors"
        _to_disk(unnamed, folder / weights)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {
        "weights": weights,
        "sha256": checksum,
        "bytes": size,
        "tensors": {name: {"shape": list(t.shape), "dtype": _dtype_name(t)} for name, t in tensors.items()},
        "layout": _layout(tensors),
    }


def _previous_weights(folder: Path, kind: str) -> list[str]:
    """The weights files that the folder's manifest names; a folder of another kind is refused."""
    try:
        manifest = json.loads(read_regular(folder / MANIFEST))
        present, names = manifest["kind"], [str(part["weights"]) for part in (manifest, *manifest.get("parts", ()))]
    except (OSError, ValueError, RecursionError):
        return []
    except (KeyError, TypeError, AttributeError) as reason:
        words = f"{folder} holds a {MANIFEST} of another program; give another folder to save {kind!r} into."
        raise StorageError(words) from reason
    if present != kind:
        raise StorageError(f"{folder} holds {present!r}; give another folder to save {kind!r} into.")
    return [name for name in names if _OUR_NAME.fullmatch(name)]


def _remove_leftovers(folder: Path, weights: Sequence[str], exclusive: bool) -> None:
    """Remove what saves that were killed have left in a folder; without a lock, only what is old."""
    for entry in folder.iterdir():
        if _OUR_TEMPORARY.fullmatch(entry.name) and entry.is_file():
            _remove_if_abandoned(entry)
        elif _OF_SAFETENSORS.fullmatch(entry.name):
            if _is_old(entry) and _begins_as_safetensors(entry):
                entry.unlink(missing_ok=True)
        elif exclusive or _is_old(entry):
            if _OUR_TEMPORARY.fullmatch(entry.name) and entry.is_dir():  # rmtree would wait for a pipe
                shutil.rmtree(entry, ignore_errors=True)
            elif weights and entry.name not in weights and _is_our_weights(entry):
                entry.unlink(missing_ok=True)


def _is_our_weights(file: Path) -> bool:
    """Whether a file is one that a save has written: its name is its checksum."""
    if not _OUR_NAME.fullmatch(file.name):
        return False
    try:
        return file_digest(file)[:16] == file.stem.removeprefix("weights-")
    except OSError:
        return False


def remove_folder(folder: Path, kind: str) -> None:
    """Remove a folder that `write_folder` has written, or has begun to write; anything else in it stays."""
    if folder.is_symlink():
        return
    try:
        entries = list(folder.iterdir())
        named = (MANIFEST, LOCK, *_previous_weights(folder, kind))
    except (OSError, StorageError):
        return
    ours = [entry for entry in entries if entry.name in named or _is_our_weights(entry)]
    temporary = [entry for entry in entries if _OUR_TEMPORARY.fullmatch(entry.name)]
    if folder / MANIFEST not in ours and len(ours) + len(temporary) < len(entries):
        return  # what a killed save has left has nothing else in it
    for entry in sorted(ours, key=lambda entry: entry.name != MANIFEST):
        with suppress(OSError):
            entry.unlink()
    for entry in filter(Path.is_dir, temporary):
        shutil.rmtree(entry, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


def stored_kind(folder: Path) -> str | None:
    """The kind that the manifest of a folder names; None where there is no manifest, or none that can be read."""
    try:
        return str(json.loads(read_regular(folder / MANIFEST))["kind"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def files_of(folder: Path) -> list[Path]:
    """The manifest and the weights that lie in a folder, as `write_folder` names them.

    >>> files_of(Path("absent"))
    []
    """
    try:
        return [file for file in folder.iterdir() if file.name == MANIFEST or _OUR_NAME.fullmatch(file.name)]
    except OSError:
        return []


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
    except OSError:
        return False


def _begins_as_safetensors(path: Path) -> bool:
    """Whether a file, maybe a part of one, has the header of safetensors: its length, and a JSON object."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and int.from_bytes(start[:8], "little") < 100_000_000 and start[8:] == b"{"


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Where tensors lie in the memory that they share with others, for tensors that are not plain.

    Kernels may round differently for other strides or another alignment. Loaded tensors therefore lie in memory as the
    saved ones did: members after training, for example, are views of one matrix.
    """
    views: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        plain = tensor.is_contiguous() and tensor.storage_offset() == 0
        broadcast = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() and not broadcast and (not plain or tensor.untyped_storage().nbytes() > tensor.nbytes):
            views.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(name)
    sizes: list[int] = []
    entries: dict[str, list[Any]] = {}
    for names in views.values():
        first = tensors[names[0]]
        size = first.untyped_storage().nbytes() // first.element_size()
        if size <= _MOST_UNUSED * sum(tensors[name].numel() for name in names):
            for name in names:
                entries[name] = [len(sizes), tensors[name].storage_offset(), list(tensors[name].stride())]
            sizes.append(size)
    return {"sizes": sizes, "tensors": entries}


def write_record(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of all its entries, atomically; its ``format`` is a whole number."""
    assert isinstance(content.get("format"), int), f"a record has a format: {file}"
    record = json.loads(json.dumps(content))
    record[_CHECKSUM] = _manifest_digest(record)
    write_atomically(file, (json.dumps(record, indent=2) + "\n").encode())


def read_record(file: Path, formats: Formats = FORMATS) -> dict[str, Any]:
    """A JSON object that `write_record` wrote; `StorageError` says what is wrong with it.

    One without a ``format`` was written before records had one, and counts as format 0.
    """
    record = _parsed(file, read_regular(file))
    formats.check(file, record.get("format", 0))
    return _checked_record(file, record)


def _parsed(file: Path, content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as reason:
        raise StorageError(f"{file} is damaged: {reason}.") from reason
    if not isinstance(record, dict):
        raise StorageError(f"{file} is damaged: it holds no JSON object.")
    return record


def _checked_record(file: Path, record: dict[str, Any]) -> dict[str, Any]:
    if record.get(_CHECKSUM) != _manifest_digest(record):
        raise StorageError(f"{file} was changed after it was saved: its checksum does not match its contents.")
    return record


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != _CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def open_regular(path: Path) -> io.BufferedReader:
    """A regular file, opened for reading. A pipe, which might never answer, or a device is an `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code, words = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "Not a regular file")
        raise OSError(code, words, str(path))
    return open(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """The content of a regular file; see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def file_digest(path: Path) -> str:
    """SHA-256 of a regular file, read in pieces."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(temporary: Path, path: Path) -> None:
    """Flush a file to disk, and rename it atomically."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


_open_locks: dict[tuple[int, int], tuple[int, IO[Any]]] = {}
"""Locked files of this process by device and inode, each with the thread that locked it."""


def _close_inherited_locks() -> None:
    """Close locked files after a fork: a lock would otherwise last until the last child has ended."""
    for _, file in _open_locks.values():
        with suppress(OSError):
            file.close()
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


def _lock(file: IO[Any], *, wait: bool) -> bool | None:
    """Lock an open file: True if it is locked now, False if another has locked it, None if that cannot be known."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as reason:
        if reason.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _key(file: IO[Any]) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


@contextmanager
def _registered(file: IO[Any]) -> Iterator[None]:
    key = _key(file)
    _open_locks[key] = threading.get_ident(), file
    try:
        yield
    finally:
        _open_locks.pop(key, None)


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a folder for this process; the lock ends with the process, whatever ends it.

    The value is whether there is a lock: some network file systems do not support any. With ``wait=False``,
    `BlockingIOError` is raised for a locked folder and says which process holds it since when. With ``wait=True``, a
    thread that holds the lock already gets it again.
    """
    file = folder / LOCK
    while True:
        with _opened_lock(file) as lock:
            holder = _open_locks.get(_key(lock))
            if wait and holder is not None and holder[0] == threading.get_ident():
                yield True
                return
            exclusive = _lock(lock, wait=wait)
            if exclusive is False:
                lock.seek(0)
                raise BlockingIOError(lock.read().strip() or "another process")
            if not _is_at(lock, file):  # its folder was removed meanwhile
                continue
            if exclusive is None:
                log.warning("%s does not support locks: only one process at a time may write there", folder)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
            lock.flush()
            with _registered(lock):
                yield exclusive is not None
            return


def _opened_lock(file: Path) -> IO[str]:
    """The lock file of a folder, which is made if there is none."""
    if file.exists() and not file.is_file():
        raise StorageError(f"{file} must be a file, as it marks a folder that is in use; remove what is there.")
    with write_errors_told(file):
        return file.open("a+")


def _is_at(opened: IO[Any], path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(opened.fileno()), path.stat())
    except OSError:
        return False


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A new, empty file in the folder of ``path``, to be written and renamed to it; otherwise it is deleted at the end.

    The file is locked as long as it is written. Files that processes left behind when they were killed are therefore
    recognised, and removed.
    """
    prefix = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:12]}-"
    for leftover in path.parent.glob(f"{prefix}*{_TEMPORARY}"):
        if _OUR_TEMPORARY.fullmatch(leftover.name):
            _remove_if_abandoned(leftover)
    while True:
        temporary = path.parent / f"{prefix}{secrets.token_hex(8)}{_TEMPORARY}"
        with temporary.open("xb") as file:
            if _lock(file, wait=True) is None:
                file.close()  # some systems cannot rename open files
            elif not _is_at(file, temporary):  # it was taken for a left-over before it was locked
                continue
            try:
                if file.closed:
                    yield temporary
                else:
                    with _registered(file):
                        yield temporary
            finally:
                temporary.unlink(missing_ok=True)
            return


def _remove_if_abandoned(temporary: Path) -> None:
    """Delete a temporary file unless a process is writing it."""
    if not temporary.is_file():
        return
    with suppress(OSError), temporary.open("r+b") as file:
        free = _lock(file, wait=False)
        if free or (free is None and _is_old(temporary)):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, payload: bytes) -> None:
    """Write a file so that readers see either the old or the new contents, never a part."""
    path = path.absolute()
    with write_errors_told(path), temporary_beside(path) as temporary:
        temporary.write_bytes(payload)
        _to_disk(temporary, path)


@contextmanager
def write_errors_told(path: Path) -> Iterator[None]:
    """A block that writes to a path; errors of the system become one sentence about it, in an `OSError`."""
    try:
        yield
    except SafetensorError as reason:
        code = re.search(r"os error (\d+)", str(reason))
        if code is None:
            raise StorageError(f"{path} could not be written: {reason}.") from reason
        raise _not_written(path, OSError(int(code[1]), os.strerror(int(code[1])))) from reason
    except OSError as reason:
        if reason.strerror is None and reason.errno not in _FULL:  # a sentence already
            raise
        raise _not_written(path, reason) from reason


def _not_written(path: Path, reason: OSError) -> OSError:
    if reason.errno in _FULL:
        fix = "What was there before is unchanged. Free some space, or write to another place."
    else:
        fix = "Remove what is in the way, or write to another place."
    words = reason.strerror or os.strerror(reason.errno or 0)  # a sentence of ours has a number only
    error = type(reason)(f"{path} could not be written: {words}. {fix}")
    error.errno = reason.errno
    return error


def new_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> "np.memmap[Any, Any]":
    """A new ``.npy`` file, mapped into memory, with all of its bytes reserved on disk.

    A full disk is an error here. Without the reservation, it would end the process by a signal when memory is written.
    """
    with write_errors_told(path):
        array = np.lib.format.open_memmap(path, "w+", dtype, shape)
        with path.open("r+b") as file:
            _reserve(file, array.offset, path.stat().st_size)
    return array


def _reserve(file: IO[bytes], start: int, size: int) -> None:
    """Reserve the bytes of a file on disk; all from ``start`` on are zero."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as reason:
            if reason.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP):
                raise
        else:
            return
    file.seek(start)
    zeros = bytes(2**20)
    for position in range(start, size, len(zeros)):
        file.write(zeros[: size - position])


def read_folder(
    path: str | Path, kind: str, formats: Formats = FORMATS, rows: Callable[[str], slice | None] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of a folder; `StorageError` says what is wrong with it.

    Tensors are copied into new memory, aligned as that of any new tensor, in the layout of the saved ones. A folder
    that is overwritten meanwhile is read again. ``rows`` says which rows of a tensor are wanted: None for all of them,
    and an empty slice for none. Others are not held in memory.
    """
    folder = checks.path("path", path)
    vanished: object = None
    while True:
        manifest, version = _manifest(folder, kind, formats)
        parts = [manifest, *manifest.get("parts", ())]
        name = ""
        found: list[dict[str, Tensor]] = []
        wanted = _Wanted(rows, frozenset(manifest.get("stacked", ())))
        try:
            for part in parts:
                name = str(part["weights"])
                if name != Path(name).name:
                    words = f"{folder / MANIFEST} names a weights file outside its folder ({name!r}): refused."
                    raise StorageError(words)
                found.append(_tensors(folder / name, part, wanted))
        except OSError as reason:
            if reason.errno not in (None, errno.ENOENT, errno.ESTALE):
                raise
            if version == vanished:
                raise StorageError(f"{folder / name} is missing, though {MANIFEST} names it.") from reason
            vanished = version
            continue
        if len(found) == 1:
            return found[0], manifest
        whole = {name: tensor for part in found for name, tensor in part.items()}
        for name in manifest["stacked"]:
            pieces = [part[name] for part in found if name in part]
            if pieces:
                whole[name] = torch.cat(pieces)
        return whole, manifest


def read_manifest(path: str | Path, kind: str, formats: Formats = FORMATS) -> dict[str, Any]:
    """The manifest of a folder; `StorageError` says what is wrong with it."""
    return _manifest(checks.path("path", path), kind, formats)[0]


class _Wanted:
    """Which rows of every tensor are wanted, file by file."""

    def __init__(self, rows: Callable[[str], slice | None] | None, stacked: frozenset[str]) -> None:
        self.rows, self.stacked = rows, stacked
        self.before: dict[str, int] = {}
        """Rows of a tensor in the files so far."""

    def of(self, name: str, tensor: Tensor) -> Tensor | None:
        """The rows of a tensor of the next file that are wanted; None for none of them."""
        rows = None if self.rows is None else self.rows(name)
        if rows is None:
            return tensor
        first = self.before.get(name, 0)
        if name in self.stacked:
            self.before[name] = first + len(tensor)
        start, stop = max(rows.start - first, 0), min(rows.stop - first, len(tensor) if tensor.ndim else 0)
        return tensor[start:stop] if start < stop else None

    @property
    def all(self) -> bool:
        """Whether all tensors are wanted as they were saved."""
        return self.rows is None and not self.stacked


def _tensors(file: Path, manifest: Mapping[str, Any], wanted: _Wanted) -> dict[str, Tensor]:
    if not file.is_file():
        raise _vanished(file)
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != manifest["bytes"]:
            raise StorageError(f"{file} is truncated: {size} bytes, where {manifest['bytes']} were saved.")
        if hashlib.file_digest(opened, "sha256").hexdigest() != manifest["sha256"]:
            raise StorageError(f"{file} was changed after it was saved: its checksum is not the manifest's.")
        try:
            tensors = _copied_tensors(file, manifest, size, wanted)
        except (SafetensorError, RuntimeError, KeyError, IndexError, TypeError, ValueError) as reason:
            if not _is_at(opened, file):  # safetensors opens it anew, and it was replaced meanwhile
                raise _vanished(file) from reason
            raise StorageError(f"{file} is damaged: {reason}.") from reason
    listed = {name: {"shape": list(t.shape), "dtype": _dtype_name(t)} for name, t in tensors.items()}
    if not wanted.all:
        entries: dict[str, dict[str, Any]] = manifest["tensors"]
        listed = {name: {**listed.get(name, entry), "shape": entry["shape"]} for name, entry in entries.items()}
    if listed != manifest["tensors"]:
        raise StorageError(f"{file} does not hold the tensors that {MANIFEST} lists.")
    return tensors


def _vanished(file: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))


def _copied_tensors(file: Path, manifest: Mapping[str, Any], size: int, wanted: _Wanted) -> dict[str, Tensor]:
    """The tensors of a weights file, or the rows of them that are wanted, copied into new memory."""
    layout = manifest.get("layout", {"sizes": [], "tensors": {}})
    memory: dict[int, Tensor] = {}
    with safe_open(file, framework="pt") as stored:
        if not wanted.all:
            found = {name: wanted.of(name, stored.get_tensor(name)) for name in stored.keys()}  # noqa: SIM118
            return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}
        return {
            name: _copied(stored.get_tensor(name), layout["tensors"].get(name), layout["sizes"], memory, size)
            for name in stored.keys()  # noqa: SIM118  # it is no mapping
        }


def _copied(tensor: Tensor, entry: list[Any] | None, sizes: list[int], memory: dict[int, Tensor], limit: int) -> Tensor:
    """A tensor in new memory; as a view of memory that it shares with others, where its entry of the layout says so."""
    if entry is None:
        return tensor.clone()
    index, offset, strides = entry
    if sizes[index] > _MOST_UNUSED * limit:
        raise ValueError(f"a layout of {sizes[index]} numbers")
    if index not in memory:
        memory[index] = torch.zeros(sizes[index], dtype=tensor.dtype)
    view = memory[index].as_strided(tensor.shape, strides, offset)
    return view.copy_(tensor)


def _manifest(folder: Path, kind: str, formats: Formats) -> tuple[dict[str, Any], object]:
    """The manifest of a folder, and what tells it from the manifest of another save."""
    file = folder / MANIFEST
    if not file.is_file():
        raise StorageError(f"{folder} holds no {MANIFEST}; is it a folder that dissensus saved?")
    with open_regular(file) as opened:
        status, manifest = os.fstat(opened.fileno()), _parsed(file, opened.read())
    absent = [key for key in ("kind", "format", "weights", "sha256", "bytes", "tensors") if key not in manifest]
    if "kind" not in absent and manifest["kind"] != kind:
        raise StorageError(f"{folder} holds {manifest['kind']!r}, not {kind!r}.")
    if "format" not in absent:
        formats.check(folder, manifest["format"])
    if absent:
        raise StorageError(f"{file} is damaged: it lacks {', '.join(absent)}.")
    return _checked_record(file, manifest), (status.st_ino, status.st_mtime_ns)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_match(folder: str | Path, stored: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Refuse stored tensors whose names or shapes are not those of the network."""
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected]
    if missing or extra:
        problem = f"lacks {missing[0]!r}" if missing else f"holds {extra[0]!r}, which the network lacks"
        raise StorageError(f"{folder} does not fit the network: it {problem}. Is `build` the one that was saved?")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise StorageError(
                f"{folder} does not fit the network: {name!r} is {list(stored[name].shape)} there"
                f" and {list(shape)} in the network."
            )

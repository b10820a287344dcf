"""Folders of tensors: a safetensors file and a JSON manifest. Nothing is unpickled.

The manifest names the weights file, whose name is its checksum. The weights are written first, and the manifest is
replaced last, atomically. At any moment the manifest therefore names a complete file.
"""

import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY = ".unfinished"
_OUR_NAME = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


class StorageError(ValueError):
    """A stored folder is missing, damaged or not the expected one; the message says which."""


def write_folder(path: str | Path, kind: str, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
    """Write tensors and details as a folder; an interrupted save leaves the previous contents in place."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; give a folder to save into.")
    folder.mkdir(parents=True, exist_ok=True)
    previous = _previous_weights(folder, kind)
    temporary = folder / f".{secrets.token_hex(8)}{_TEMPORARY}"
    try:
        _save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        checksum, size = file_digest(temporary), temporary.stat().st_size
        weights = f"weights-{checksum[:16]}.safetensors"
        _to_disk(temporary, folder / weights)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    manifest = {
        "kind": kind,
        "format": FORMAT,
        "weights": weights,
        "sha256": checksum,
        "bytes": size,
        "tensors": {name: {"shape": list(t.shape), "dtype": _dtype_name(t)} for name, t in tensors.items()},
        **details,
    }
    manifest["manifest_sha256"] = _manifest_digest(json.loads(json.dumps(manifest)))
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    if previous is not None and previous != weights:
        (folder / previous).unlink(missing_ok=True)
    for leftover in folder.iterdir():  # of saves that were interrupted
        if leftover.name.endswith(_TEMPORARY) or (_OUR_NAME.fullmatch(leftover.name) and leftover.name != weights):
            leftover.unlink(missing_ok=True)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file; a full disk is an `OSError`, as it is for other files."""
    try:
        save_file(tensors, file)
    except SafetensorError as reason:
        code = re.search(r"os error (\d+)", str(reason))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file.parent)) from reason


def _previous_weights(folder: Path, kind: str) -> str | None:
    """The weights file that the folder's manifest names; a folder of another kind is refused."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        stored_kind, name = manifest["kind"], Path(manifest["weights"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if stored_kind != kind:
        raise StorageError(f"{folder} holds {stored_kind!r}; give another folder to save {kind!r} into.")
    return name


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(temporary: Path, path: Path) -> None:
    """Flush a file to disk, and rename it atomically."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder for this process, if the system supports such locks; the lock ends with the process.

    With ``wait=False``, `BlockingIOError` is raised for a locked folder and says which process holds it since when.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise BlockingIOError(lock.read().strip() or "another process") from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        yield


def write_atomically(path: Path, payload: bytes) -> None:
    """Write a file so that readers see either the old or the new contents, never a part."""
    temporary = path.parent / f".{secrets.token_hex(8)}{_TEMPORARY}"
    try:
        temporary.write_bytes(payload)
        _to_disk(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_folder(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of a folder; `StorageError` says what is wrong with it."""
    folder = Path(path)
    manifest = _manifest(folder, kind)
    name = str(manifest["weights"])
    if name != Path(name).name:
        raise StorageError(f"{folder / MANIFEST} names a weights file outside its folder ({name!r}): refused.")
    file = folder / name
    if not file.is_file():
        raise StorageError(f"{file} is missing, though {MANIFEST} names it.")
    size = file.stat().st_size
    if size != manifest["bytes"]:
        raise StorageError(f"{file} is truncated: {size} bytes, where {manifest['bytes']} were saved.")
    if file_digest(file) != manifest["sha256"]:
        raise StorageError(f"{file} was changed after it was saved: its checksum is not the manifest's.")
    tensors = load_file(file)
    listed = {name: {"shape": list(t.shape), "dtype": _dtype_name(t)} for name, t in tensors.items()}
    if listed != manifest["tensors"]:
        raise StorageError(f"{file} does not hold the tensors that {MANIFEST} lists.")
    return tensors, manifest


def _manifest(folder: Path, kind: str) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise StorageError(f"{folder} holds no {MANIFEST}; is it a folder that dissensus saved?")
    try:
        manifest = json.loads(file.read_text())
        stored_kind, form = manifest["kind"], manifest["format"]
        missing = [key for key in ("weights", "sha256", "bytes", "tensors") if key not in manifest]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{file} is damaged: {error}.") from error
    if stored_kind != kind:
        raise StorageError(f"{folder} holds {stored_kind!r}, not {kind!r}.")
    if form != FORMAT:
        raise StorageError(f"{folder} has format {form}; this version reads format {FORMAT}. Update dissensus.")
    if missing:
        raise StorageError(f"{file} is damaged: it lacks {', '.join(missing)}.")
    if manifest.get("manifest_sha256") != _manifest_digest(manifest):
        raise StorageError(f"{file} was changed after it was saved: its checksum does not match its contents.")
    return manifest


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

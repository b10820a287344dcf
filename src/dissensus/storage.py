"""Folders that hold tensors: safetensors and a JSON manifest. Nothing is ever unpickled.

A folder's manifest names its weights file, which is named by its own checksum. The weights are written first and the
manifest is replaced last, in one step, so whatever happens in between, the manifest points at a whole file.
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
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY = ".unfinished"
_OUR_NAME = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


class StorageError(ValueError):
    """A stored folder is missing, damaged or not what was expected; the message says which."""


def write_folder(path: str | Path, kind: str, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
    """Write tensors and details as a folder; a save that breaks off leaves the one before it in place."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; give a folder to save into.")
    folder.mkdir(parents=True, exist_ok=True)
    before = _previous_weights(folder, kind)
    temporary = folder / f".{secrets.token_hex(8)}{_TEMPORARY}"
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
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
    if before is not None and before != weights:
        (folder / before).unlink(missing_ok=True)
    for leftover in folder.iterdir():  # of saves that were killed
        if leftover.name.endswith(_TEMPORARY) or (_OUR_NAME.fullmatch(leftover.name) and leftover.name != weights):
            leftover.unlink(missing_ok=True)


def _previous_weights(folder: Path, kind: str) -> str | None:
    """The weights file that the folder's manifest names now; a folder of another kind is refused."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found, name = manifest["kind"], Path(manifest["weights"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if found != kind:
        raise StorageError(f"{folder} holds {found!r}; give another folder to save {kind!r} into.")
    return name


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(temporary: Path, path: Path) -> None:
    """Make sure that a file is on disk, and give it its name in one step."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder for this process, where the system has such locks; the lock goes with the process.

    With ``wait=False`` a folder that is held raises `BlockingIOError`, which says who holds it since when.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as reason:
            lock.seek(0)
            raise BlockingIOError(lock.read().strip() or "another process") from reason
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        yield


def write_atomically(path: Path, payload: bytes) -> None:
    """Write a file so that readers see the old one or the new one, whole, and never a part."""
    temporary = path.parent / f".{secrets.token_hex(8)}{_TEMPORARY}"
    try:
        temporary.write_bytes(payload)
        _to_disk(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_folder(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of a folder, or `StorageError` that says what is wrong with it."""
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
    found = {name: {"shape": list(t.shape), "dtype": _dtype_name(t)} for name, t in tensors.items()}
    if found != manifest["tensors"]:
        raise StorageError(f"{file} does not hold the tensors that {MANIFEST} lists.")
    return tensors, manifest


def _manifest(folder: Path, kind: str) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise StorageError(f"{folder} holds no {MANIFEST}; is it a folder that dissensus saved?")
    try:
        manifest = json.loads(file.read_text())
        found = (manifest["kind"], manifest["format"])
        missing = [key for key in ("weights", "sha256", "bytes", "tensors") if key not in manifest]
    except (ValueError, KeyError, TypeError) as reason:
        raise StorageError(f"{file} is damaged: {reason}.") from reason
    if found[0] != kind:
        raise StorageError(f"{folder} holds {found[0]!r}, not {kind!r}.")
    if found[1] != FORMAT:
        raise StorageError(f"{folder} has format {found[1]}; this version reads format {FORMAT}. Update dissensus.")
    if missing:
        raise StorageError(f"{file} is damaged: it lacks {', '.join(missing)}.")
    if manifest.get("manifest_sha256") != _manifest_digest(manifest):
        raise StorageError(f"{file} was changed after it was saved: its checksum is not its own.")
    return manifest


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_match(folder: str | Path, stored: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Refuse stored tensors whose names or shapes are not those of the network that shall take them."""
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected]
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"holds {extra[0]!r}, which the network lacks"
        raise StorageError(f"{folder} does not fit the network: it {what}. Is `build` the one that was saved?")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise StorageError(
                f"{folder} does not fit the network: {name!r} is {list(stored[name].shape)} there"
                f" and {list(shape)} in the network."
            )

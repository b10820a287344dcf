"""Folders that hold tensors: safetensors and a JSON manifest. Nothing is ever unpickled.

A folder's manifest names its weights file, which is named by its own checksum. The weights are written first and the
manifest is replaced last, in one step, so whatever happens in between, the manifest points at a whole file.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"


class StorageError(ValueError):
    """A stored folder is missing, damaged or not what was expected; the message says which."""


def write_folder(path: str | Path, kind: str, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
    """Write tensors and details as a folder; a save that breaks off leaves the one before it in place."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; give a folder to save into.")
    folder.mkdir(parents=True, exist_ok=True)
    payload = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    checksum = hashlib.sha256(payload).hexdigest()
    weights = f"weights-{checksum[:16]}.safetensors"
    manifest = {
        "kind": kind,
        "format": FORMAT,
        "weights": weights,
        "sha256": checksum,
        "bytes": len(payload),
        "tensors": {name: {"shape": list(t.shape), "dtype": _dtype_name(t)} for name, t in tensors.items()},
        **details,
    }
    write_atomically(folder / weights, payload)
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    for stale in folder.glob("weights-*.safetensors"):
        if stale.name != weights:
            stale.unlink()


def write_atomically(path: Path, payload: bytes) -> None:
    """Write a file so that readers see the old one or the new one, whole, and never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
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
    payload = file.read_bytes()
    if len(payload) != manifest["bytes"]:
        raise StorageError(f"{file} is truncated: {len(payload)} bytes, where {manifest['bytes']} were saved.")
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"]:
        raise StorageError(f"{file} was changed after it was saved: its checksum is not the manifest's.")
    tensors = load_tensors(payload)
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

"""Features of a frozen network, computed once and kept on disk: heads then train on them as on any other data."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import dissensus
from dissensus import checks, storage
from dissensus.data.batches import Augment, Source
from dissensus.data.extraction import Job, OnRows, extract
from dissensus.data.recognition import features_fingerprint, networks_in, pairs_of
from dissensus.execution.skeleton import first_line
from dissensus.fingerprint import differing
from dissensus.storage import StorageError

KIND = "dissensus.features"
FORMAT = 1
FEATURES, TARGETS = "features.npy", "targets.npy"

_PIECE = 1 << 26
_ANEW = "Compute it anew: cached_features(..., overwrite=True)."
_NAMES = {torch.float16: "float16", torch.float32: "float32"}

log = logging.getLogger("dissensus")


class Rows(Sequence[tuple[Tensor, Tensor]]):
    """Some examples, read at once. A loader that knows nothing of it can take it for a list of pairs ``(x, y)``."""

    def __init__(self, x: Float[Tensor, "B *F"], y: Shaped[Tensor, "B *T"]) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        return self.x[index], self.y[index]


class FeatureCache(Dataset[tuple[Tensor, Tensor]]):
    """Features and targets in a folder, mapped into memory: a ``Dataset`` of pairs, float32 whatever the file holds.

    Rows of augmentation a lie at ``a · N`` to ``(a + 1) · N``. Whole batches are read at once; a ``DataLoader`` of your
    own skips the work per example with ``collate_fn=cache.collate``. Worker processes open the files themselves.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], features: np.ndarray, targets: np.ndarray) -> None:
        self.folder, self.features, self.targets = folder, features, targets
        self.augmentations, self.examples = int(manifest["augmentations"]), int(manifest["examples"])
        """A and N."""

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> "FeatureCache":
        """What `cached_features` left in a folder; ``verify=True`` reads all of it and compares checksums."""
        folder = Path(folder)
        manifest = _manifest(folder)
        arrays = [_array(folder / name, manifest["files"].get(name), verify) for name in (FEATURES, TARGETS)]
        rows = manifest["augmentations"] * manifest["examples"]
        if any(len(array) != rows for array in arrays):
            raise StorageError(f"{folder} does not hold the {rows} rows that {storage.MANIFEST} tells of. {_ANEW}")
        return cls(folder, manifest, *arrays)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Rows of these numbers, in that order, by one read in the order of the file."""
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows go from 0 to {len(self) - 1}; got {rows.min()} to {rows.max()}.")
        rows = rows % len(self)
        order = np.argsort(rows, kind="stable")
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        x, y = (torch.from_numpy(array[rows[order]])[back] for array in (self.features, self.targets))
        return Rows(x.float(), y)

    @staticmethod
    def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Float[Tensor, "B *F"], Shaped[Tensor, "B *T"]]:
        """A batch ``(x, y)`` from what `__getitems__` gives, which is one already; from a list of pairs, as usual."""
        if isinstance(rows, Rows):
            return rows.x, rows.y
        x, y = default_collate(list(rows))
        return x, y

    def tensors(self, device: torch.device | str | None = None) -> tuple[Float[Tensor, "N *F"], Shaped[Tensor, "N *T"]]:
        """Everything as ``(x, y)`` on a device, for those who have the memory: 4 bytes for each number of a feature."""
        x = torch.empty(self.features.shape, dtype=torch.float32, device=device)
        step = max(1, _PIECE * len(self) // self.features.nbytes)
        for start in range(0, len(self), step):
            x[start : start + step] = torch.from_numpy(np.array(self.features[start : start + step]))
        return x, torch.from_numpy(np.array(self.targets)).to(x.device)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.features.nbytes + self.targets.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache.open, (self.folder,)  # a copy maps the files again, and holds no rows

    def __repr__(self) -> str:
        shape = checks.shape_text(self.features.shape[1:])
        return f"FeatureCache({len(self)} rows of {shape} {self.features.dtype}, {str(self.folder)!r})"


def cached_features(
    features: Callable[[Tensor], Tensor],
    data: Source,
    folder: str | Path,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float16,
    augmentations: Sequence[Augment | None] = (None,),
    seed: int = 0,
    overwrite: bool = False,
    progress: OnRows | None = None,
) -> FeatureCache:
    """Features of every example under every augmentation, from the folder where it holds them, else computed into it.

    Each batch is written as it comes, so memory does not grow with the data. The manifest is written last: without it
    a folder counts as broken off, and is computed anew. Processes that share a folder wait for the first of them.

    Args:
        features: ``x [B, ...] -> [B, ...]``, such as ``trunk.features``. A network is used in evaluation mode; its mode
            is put back. Data in whole numbers come as they are: ``lambda x: trunk.features(x.float() / 255)``.
        data: ``(x, y)`` tensors, or a ``Dataset`` or ``DataLoader`` of such pairs, which must keep its order.
        folder: Where ``features.npy``, ``targets.npy`` and ``manifest.json`` go.
        batch_size: Examples at once; a ``DataLoader`` has its own.
        device: Where features are computed; by default where the network is.
        dtype: How they are stored: float16, which keeps 11 bits of each number at half the size (bfloat16 would keep 8,
            and ``.npy`` does not know it), or float32, for features beyond 65,504.
        augmentations: Each gives N rows: ``(x, generator) -> x`` on the device, or None for the data as they are.
        seed: Determines the draws of augmentations, by (seed, augmentation, batch).
        overwrite: Compute whatever the folder holds, instead of refusing features of other data, or another network.
        progress: Called after every batch with the rows so far, and in all.

    The folder remembers what its features are of. Tensors are known by their checksum, a ``Dataset`` or ``DataLoader``
    by its order and 16 of its examples, a function by its code and all that it belongs to, closes over or names, such
    as a network's weights (see `dissensus.fingerprint`).

    >>> import tempfile
    >>> folder, x, y = tempfile.TemporaryDirectory(), torch.rand(10, 3), torch.arange(10)
    >>> cache = cached_features(nn.Linear(3, 2), (x, y), folder.name, augmentations=[None, lambda x, g: 2 * x])
    >>> len(cache), cache[10][0].shape, cache[10][1]
    (20, torch.Size([2]), tensor(0))
    >>> folder.cleanup()
    """
    augmentations = _check(features, dtype, augmentations, seed)
    source = pairs_of(data, batch_size)
    networks = networks_in(features)
    with _evaluating(networks):  # the mode in which they are used
        known = features_fingerprint(features)
    fingerprint: dict[str, Any] = {"data": source.identity, "features": known, "dtype": _NAMES[dtype]}
    if augmentations != [None]:
        drawn = [None if augment is None else features_fingerprint(augment) for augment in augmentations]
        fingerprint |= {"augmentations": drawn, "seed": seed, "batches": source.sizes}
    job = Job(features, source, augmentations, seed, _place(networks, device), dtype, progress)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; give a folder for features.")
    found = _found(folder, fingerprint, overwrite)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with storage.locked(folder, wait=True):
        found = _found(folder, fingerprint, overwrite)  # another process may have been first
        if found is None:
            with _evaluating(networks):
                _write(folder, job, fingerprint)
            found = FeatureCache.open(folder)
    return found


def _check(features: object, dtype: torch.dtype, augmentations: object, seed: int) -> list[Augment | None]:
    if not callable(features):
        fix = "Pass trunk.features, not trunk.features(x)." if isinstance(features, Tensor) else ""
        checks.refuse("features", "be a function of inputs", type(features).__name__, fix, TypeError)
    if dtype not in _NAMES:
        fix = "A .npy file knows no bfloat16." if dtype is torch.bfloat16 else ""
        checks.refuse("dtype", "be torch.float16 or torch.float32", str(dtype), fix, TypeError)
    checks.count("seed", seed, 0)
    if not isinstance(augmentations, Sequence) or not all(each is None or callable(each) for each in augmentations):
        got = repr(augmentations)
        checks.refuse("augmentations", "be a list of functions (x, generator) -> x, or None", got, error=TypeError)
    if not augmentations:
        checks.refuse("augmentations", "hold at least one", "none", "Data as they are? Use (None,).")
    return list(augmentations)


def _found(folder: Path, fingerprint: Mapping[str, Any], overwrite: bool) -> FeatureCache | None:
    """The cache in a folder, if it is whole and the one that is wanted; another one is refused."""
    if not (folder / storage.MANIFEST).exists():
        return None
    try:
        stored = _manifest(folder)["fingerprint"]
    except StorageError as reason:
        if overwrite and not isinstance(reason, _OtherKind):
            return None
        raise
    if overwrite:
        return None
    names = differing(stored, fingerprint)
    if names:
        got = f"others in {folder}: {', '.join(map(repr, names))} differ"
        fix = "Give another folder, or overwrite=True."
        checks.refuse("folder", "be empty or hold these features", got, fix, StorageError)
    cache = FeatureCache.open(folder)
    log.info("features are taken from %s: %d rows", folder, len(cache))
    return cache


class _OtherKind(StorageError):
    """The folder holds something else of ours."""


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / storage.MANIFEST
    if not file.is_file():
        raise StorageError(f"{folder} holds no whole features: {storage.MANIFEST} is missing. Run cached_features.")
    try:
        manifest = json.loads(file.read_text())
        kind, form = manifest["kind"], manifest["format"]
        missing = [key for key in ("augmentations", "examples", "files", "fingerprint") if key not in manifest]
    except (ValueError, KeyError, TypeError) as reason:
        raise StorageError(f"{file} is damaged: {reason}. {_ANEW}") from reason
    if kind != KIND:
        raise _OtherKind(f"{folder} holds {kind!r}, not {KIND!r}. Give another folder.")
    if form != FORMAT:
        raise StorageError(f"{folder} has format {form}; this version reads format {FORMAT}. {_ANEW}")
    if missing:
        raise StorageError(f"{file} is damaged: it lacks {', '.join(missing)}. {_ANEW}")
    return manifest


def _array(file: Path, told: Mapping[str, Any] | None, verify: bool) -> np.ndarray:
    """A file as an array that is mapped into memory, once it is what the manifest tells."""
    if told is None or not file.is_file():
        raise StorageError(f"{file} is missing. {_ANEW}")
    size = file.stat().st_size
    if size != told["bytes"]:
        raise StorageError(f"{file} is damaged: {size} bytes, where {told['bytes']} were written. {_ANEW}")
    if verify and storage.file_digest(file) != told["sha256"]:
        raise StorageError(f"{file} was changed after it was written: its checksum is not the manifest's. {_ANEW}")
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as reason:
        raise StorageError(f"{file} is damaged: {first_line(reason)}. {_ANEW}") from reason
    if [list(array.shape), str(array.dtype)] != [told["shape"], told["dtype"]]:
        raise StorageError(f"{file} is not the array that {storage.MANIFEST} tells of. {_ANEW}")
    return array


def _place(networks: Sequence[nn.Module], device: torch.device | str | None) -> torch.device:
    """The device that inputs go to: the networks' own."""
    own = next((parameter.device for network in networks for parameter in network.parameters()), None)
    if device is None:
        return own or torch.device("cpu")
    device = torch.device(device)
    if own is not None and (own.type != device.type or device.index not in (None, own.index)):
        checks.refuse("device", f"be where the network is, {own}", str(device), "Move the network there first.")
    return device


@contextmanager
def _evaluating(networks: Sequence[nn.Module]) -> Iterator[None]:
    modes = {layer: layer.training for network in networks for layer in network.modules()}
    for network in networks:
        network.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def _write(folder: Path, job: Job, fingerprint: Mapping[str, Any]) -> None:
    """Compute everything beside what the folder holds, and put it in its place once it is whole."""
    parts = {name: folder / f".{name}.unfinished" for name in (FEATURES, TARGETS)}
    try:
        extract(job, parts[FEATURES], parts[TARGETS])
        files = {name: _told(part) for name, part in parts.items()}
        (folder / storage.MANIFEST).unlink(missing_ok=True)
        for name, part in parts.items():
            os.replace(part, folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    manifest = {
        "kind": KIND,
        "format": FORMAT,
        "examples": job.source.examples,
        "augmentations": len(job.augmentations),
        "files": files,
        "fingerprint": fingerprint,
        "versions": {"dissensus": dissensus.__version__, "torch": torch.__version__, "numpy": np.__version__},
    }
    storage.write_atomically(folder / storage.MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _told(part: Path) -> dict[str, Any]:
    """What the manifest tells of a file, which is brought to disk."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    array = np.load(part, mmap_mode="r")
    size, checksum = part.stat().st_size, storage.file_digest(part)
    return {"shape": list(array.shape), "dtype": str(array.dtype), "bytes": size, "sha256": checksum}

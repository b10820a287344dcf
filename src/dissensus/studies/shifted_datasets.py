"""Data that differs from the training data: corrupted, of other classes, from other sources; and unlabelled data.

| name | set |
|---|---|
| ``corrupted-1`` to ``corrupted-5`` | every example with one corruption; corruptions take turns |
| ``unseen`` | classes that a data set ``...-six`` does not train on |
| ``jigsaw`` | a grid of 4 × 4 squares in another order |
| ``validation`` | a part of the same data without its shortcut |
| another source, such as ``mnist`` | images brought to the same shape |

Sets that members disagree on in training are made of training examples, sets for measures of test examples. Sets with
a folder, such as ImageNet-R, are the same for both, as in the LDR paper.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from dissensus.data import corruptions, folders, sources
from dissensus.randomness import Use, derived_seed
from dissensus.studies.datasets import (
    FOLDERS,
    StudyData,
    images,
    is_split_by_seed,
    load_streamed,
    load_unscaled,
    source_of,
    training_classes,
)
from dissensus.studies.spec import Spec, SpecError

Inputs = Tensor | Dataset[Any]
Examples = tuple[Inputs, Tensor | None]
"""Inputs, and labels where the classes are those of the training data."""

CORRUPTED = tuple(f"corrupted-{severity}" for severity in range(1, corruptions.SEVERITIES + 1))
OTHER_SOURCES = ("mnist", "fashion-mnist", "cifar10", "svhn")
OTHER_FOLDERS = ("imagenet-a", "imagenet-r", "inaturalist", "openimages")
SETS = (*CORRUPTED, "unseen", "jigsaw", "validation", *OTHER_SOURCES, *OTHER_FOLDERS)
CONFIDENCE = re.compile(r"confidence-below-(0?\.\d+)")
"""Unlabelled data of two-stage training: training examples on which a first network has a lower confidence."""
LEAST_CONFIDENT = re.compile(r"least-confident-(0?\.\d+)")
"""The same, as the share of training examples on which the first network has the lowest confidence."""


def is_chosen_in_training(name: str) -> bool:
    """Whether unlabelled data are training examples that a first network chooses.

    >>> is_chosen_in_training("least-confident-0.014"), is_chosen_in_training("jigsaw")
    (True, False)
    """
    return any(pattern.fullmatch(name) for pattern in (CONFIDENCE, LEAST_CONFIDENT))


@dataclass(frozen=True)
class ShiftedData:
    """A data set with its shifted sets; inputs are raw: images in [0, 1], or files of images."""

    name: str
    train: Examples
    test: Examples
    classes: int
    sets: Mapping[str, Examples] = field(default_factory=dict)
    unlabelled: Mapping[str, Inputs] = field(default_factory=dict)
    """Sets to disagree on in training."""
    groups: Tensor | None = None
    """Groups of test examples."""
    source: object = None
    """Keeps a temporary folder alive while its images are read."""

    def transformed(self, transform: Callable[[Inputs], Tensor]) -> "ShiftedData":
        """The same with all inputs transformed."""
        train, test = ((transform(x), y) for x, y in (self.train, self.test))
        sets = {name: (transform(x), y) for name, (x, y) in self.sets.items()}
        unlabelled = {name: transform(x) for name, x in self.unlabelled.items()}
        return ShiftedData(self.name, train, test, self.classes, sets, unlabelled, self.groups)

    def study_data(self) -> StudyData:
        """Training and test data, once inputs are tensors."""
        (x, y), (test_x, test_y) = self.train, self.test
        assert isinstance(x, Tensor)
        assert isinstance(test_x, Tensor)
        assert y is not None
        assert test_y is not None
        return StudyData(self.name, (x, y), (test_x, test_y), self.classes)


def load_shifted(name: str, spec: Spec, sets: list[str], unlabelled: list[str], seed: int = 0) -> ShiftedData:
    """A data set with shifted sets for measures and unlabelled sets for training, by name.

    ``seed`` splits data without a fixed test set, such as ``"digits"``.
    """
    if name in FOLDERS:
        return _from_folders(name, spec, sets, unlabelled)
    most = {"train": spec.optimisation.examples, "test": spec.evaluation.examples}
    train, test = (_first(name, part, count, seed) for part, count in most.items())
    return ShiftedData(
        name,
        (train.x, train.y),
        (test.x, test.y),
        int(train.y.max()) + 1,
        {key: _shifted_set(key, name, test, spec.evaluation.examples) for key in sets if _has(name, key)},
        {key: _shifted_set(key, name, train, spec.optimisation.examples)[0] for key in unlabelled},
        test.groups,
    )


def _has(name: str, key: str) -> bool:
    """Whether data has a shifted set: not its own source, and unseen classes only where some are not trained on."""
    return key != source_of(name) and (key != "unseen" or training_classes(name) is not None)


@dataclass(frozen=True)
class _Part:
    x: Tensor
    y: Tensor
    groups: Tensor | None
    part: str


def _first(name: str, part: str, count: int | None, seed: int) -> _Part:
    if is_split_by_seed(name):
        data = load_unscaled(name, train_examples=count, test_examples=count, seed=seed)
        return _Part(*(data.train if part == "train" else data.test), None, part)
    x, y, groups = images(name, part)
    return _Part(x[:count], y[:count], None if groups is None else groups[:count], part)


def _shifted_set(key: str, name: str, part: _Part, count: int | None) -> tuple[Tensor, Tensor | None]:
    """A shifted set, made from a part of the data or from another source."""
    if key in CORRUPTED:
        return corrupted(part.x, int(key.rpartition("-")[2])), part.y
    if key == "jigsaw":
        return jigsaw(part.x), None
    if key == "unseen":
        return images(name, part.part, unseen=True)[0][:count], None
    if key == "validation":
        x, y, _ = images(name, "validation")
        return x[:count], y[:count]
    if key in OTHER_SOURCES:
        return reshaped(images(key, part.part)[0][:count], part.x.shape[1:]), None
    raise SpecError(f"no set of examples is called {key!r} for {name}; it may be one of {', '.join(SETS)}")


def corrupted(x: Tensor, severity: int, seed: int = 0) -> Tensor:
    """Every image with one corruption; corruptions take turns in random order. Grey images are not saturated."""
    names = [name for name in sorted(corruptions.CORRUPTIONS) if x.shape[1] == 3 or name != "saturate"]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(derived_seed(seed, Use.CORRUPTION_ORDER)))
    result = torch.empty_like(x)
    for place, name in enumerate(names):
        rows = order[place :: len(names)]
        if len(rows):
            result[rows] = corruptions.corrupt(x[rows], name, severity, seed)
    return result


def jigsaw(x: Tensor, pieces: int = 4, seed: int = 0) -> Tensor:
    """Every image as ``pieces`` × ``pieces`` squares in random order."""
    size, side = len(x), x.shape[-1] // pieces
    cut = x[..., : side * pieces, : side * pieces].unfold(2, side, side).unfold(3, side, side)
    squares = cut.flatten(2, 3).transpose(1, 2)  # [N, pieces², C, side, side]
    generator = torch.Generator().manual_seed(derived_seed(seed, Use.JIGSAW))
    order = torch.rand(size, pieces**2, generator=generator).argsort(1)
    squares = squares[torch.arange(size).unsqueeze(1), order]
    whole = squares.transpose(1, 2).unflatten(2, (pieces, pieces)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return F.interpolate(whole, tuple(x.shape[2:])) if whole.shape != x.shape else whole


def reshaped(x: Tensor, shape: torch.Size) -> Tensor:
    """Images with the channels and the size of others."""
    if x.shape[1] != shape[0]:
        x = x.expand(-1, shape[0], -1, -1) if x.shape[1] == 1 else x.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    return x if x.shape[2:] == shape[1:] else F.interpolate(x, tuple(shape[1:]), mode="bilinear", antialias=True)


class ScaledImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images in files as floats in [0, 1], with labels; corrupted where there is a severity."""

    def __init__(self, pictures: folders.ImageFiles, severity: int | None = None) -> None:
        self.pictures, self.severity = pictures, severity

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, label = self.pictures[index]
        x = pixels.float() / 255
        if self.severity is not None:
            names = sorted(corruptions.CORRUPTIONS)
            x = corruptions.corrupt(x.unsqueeze(0), names[index % len(names)], self.severity)[0]
        return x, label


def _from_folders(name: str, spec: Spec, sets: list[str], unlabelled: list[str]) -> ShiftedData:
    data = load_streamed(name, spec)

    def load(key: str, pictures: folders.ImageFiles) -> Examples:
        if key in CORRUPTED:
            return ScaledImageFiles(pictures, int(key.rpartition("-")[2])), pictures.labels
        if key == "validation":
            validation = sources.dataset(name, "validation", size=data.train.size)
            return ScaledImageFiles(validation), validation.labels
        if key not in OTHER_FOLDERS:
            raise SpecError(f"no set of pictures is called {key!r} beside {name}")
        other = folders.by_class(sources.data_folder() / key, data.train.size).subset(spec.evaluation.examples)
        numbers = {word: number for number, word in enumerate(data.train.classes)}
        if not set(other.classes) <= set(numbers):
            return ScaledImageFiles(other), None
        return ScaledImageFiles(other), torch.tensor([numbers[other.classes[label]] for label in other.labels.tolist()])

    return ShiftedData(
        name,
        (ScaledImageFiles(data.train), data.train.labels),
        (ScaledImageFiles(data.test), data.test.labels),
        data.outputs,
        {key: load(key, data.test) for key in sets},
        {key: load(key, data.train)[0] for key in unlabelled},
        data.test.groups,
        data,
    )

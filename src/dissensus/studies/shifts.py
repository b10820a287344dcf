"""Data that members are not trained on: corrupted, of other classes, of other sources; and data to disagree on.

A study names such sets: ``corrupted-1`` to ``corrupted-5`` (every example with one of our corruptions, dealt in turn),
``unseen`` (the classes that a data set ``...-six`` keeps back), ``jigsaw`` (quarters of quarters in another order),
``validation`` (a part of the same data without its shortcut), or another source. What members disagree on in training
is made of training examples, what they are measured on of test examples; but pictures in a folder of their own, such as
ImageNet-R, are the same in both, as the LDR paper has it.
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
from dissensus.studies.problems import FOLDERS, Problem, classes_kept, images, source_of, streamed
from dissensus.studies.spec import Spec, SpecError

Inputs = Tensor | Dataset[Any]
Examples = tuple[Inputs, Tensor | None]
"""Inputs, and labels where the classes are those that members know."""

CORRUPTED = tuple(f"corrupted-{severity}" for severity in range(1, corruptions.SEVERITIES + 1))
OTHER_SOURCES = ("mnist", "fashion-mnist", "cifar10", "svhn")
OTHER_FOLDERS = ("imagenet-a", "imagenet-r", "inaturalist", "openimages")
SETS = (*CORRUPTED, "unseen", "jigsaw", "validation", *OTHER_SOURCES, *OTHER_FOLDERS)
CONFIDENCE = re.compile(r"confidence-below-(0?\.\d+)")
"""Data to disagree on in two stages: the training examples that a first network is less sure of."""


@dataclass(frozen=True)
class Shifted:
    """A data set, and what lies around it; inputs are raw (images in [0, 1], or pictures in files)."""

    name: str
    train: Examples
    test: Examples
    classes: int
    sets: Mapping[str, Examples] = field(default_factory=dict)
    disagreed_on: Mapping[str, Inputs] = field(default_factory=dict)
    groups: Tensor | None = None
    """Of test examples."""
    source: object = None
    """What must live as long as pictures are read: a folder may go with it."""

    def through(self, ready: Callable[[Inputs], Tensor]) -> "Shifted":
        """The same with all inputs as networks take them."""
        train, test = ((ready(x), y) for x, y in (self.train, self.test))
        sets = {name: (ready(x), y) for name, (x, y) in self.sets.items()}
        other = {name: ready(x) for name, x in self.disagreed_on.items()}
        return Shifted(self.name, train, test, self.classes, sets, other, self.groups)

    def problem(self) -> Problem:
        """What is trained, once inputs are ready."""
        (x, y), (test_x, test_y) = self.train, self.test
        assert isinstance(x, Tensor)
        assert isinstance(test_x, Tensor)
        assert y is not None
        assert test_y is not None
        return Problem(self.name, (x, y), (test_x, test_y), self.classes)


def shifted(name: str, spec: Spec, sets: list[str], disagreed_on: list[str]) -> Shifted:
    """A data set with the sets that are asked for."""
    if name in FOLDERS:
        return _of_folders(name, spec, sets, disagreed_on)
    train, test = _some(name, "train", spec.optimisation.examples), _some(name, "test", spec.evaluation.examples)
    return Shifted(
        name,
        (train.x, train.y),
        (test.x, test.y),
        int(train.y.max()) + 1,
        {other: _other(other, name, test, spec.evaluation.examples) for other in sets if _has(name, other)},
        {other: _other(other, name, train, spec.optimisation.examples)[0] for other in disagreed_on},
        test.groups,
    )


def _has(name: str, other: str) -> bool:
    """Data of which no class is kept back has none unseen, and no data is another source to itself."""
    return other != source_of(name) and (other != "unseen" or classes_kept(name) is not None)


@dataclass(frozen=True)
class _Part:
    x: Tensor
    y: Tensor
    groups: Tensor | None
    part: str


def _some(name: str, part: str, count: int | None) -> _Part:
    x, y, groups = images(name, part)
    return _Part(x[:count], y[:count], None if groups is None else groups[:count], part)


def _other(other: str, name: str, of: _Part, count: int | None) -> tuple[Tensor, Tensor | None]:
    """Another set, made of a part of the data or beside it."""
    if other in CORRUPTED:
        return corrupted(of.x, int(other.rpartition("-")[2])), of.y
    if other == "jigsaw":
        return jigsaw(of.x), None
    if other == "unseen":
        return images(name, of.part, unseen=True)[0][:count], None
    if other == "validation":
        x, y, _ = images(name, "validation")
        return x[:count], y[:count]
    if other in OTHER_SOURCES:
        return fitted(images(other, of.part)[0][:count], of.x.shape[1:]), None
    raise SpecError(f"no set of examples is called {other!r} for {name}; it may be one of {', '.join(SETS)}")


def corrupted(x: Tensor, severity: int, seed: int = 0) -> Tensor:
    """Every image with one of the corruptions, dealt in turn in an order of the seed's; grey ones are not saturated."""
    names = [name for name in sorted(corruptions.CORRUPTIONS) if x.shape[1] == 3 or name != "saturate"]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(derived_seed(seed, Use.CORRUPTION_ORDER)))
    found = torch.empty_like(x)
    for place, name in enumerate(names):
        rows = order[place :: len(names)]
        if len(rows):
            found[rows] = corruptions.corrupt(x[rows], name, severity, seed)
    return found


def jigsaw(x: Tensor, pieces: int = 4, seed: int = 0) -> Tensor:
    """Every image cut into ``pieces`` × ``pieces`` squares that are put together in an order of its own."""
    size, side = len(x), x.shape[-1] // pieces
    cut = x[..., : side * pieces, : side * pieces].unfold(2, side, side).unfold(3, side, side)
    squares = cut.flatten(2, 3).transpose(1, 2)  # [N, pieces², C, side, side]
    generator = torch.Generator().manual_seed(derived_seed(seed, Use.JIGSAW))
    order = torch.rand(size, pieces**2, generator=generator).argsort(1)
    squares = squares[torch.arange(size).unsqueeze(1), order]
    whole = squares.transpose(1, 2).unflatten(2, (pieces, pieces)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return F.interpolate(whole, tuple(x.shape[2:])) if whole.shape != x.shape else whole


def fitted(x: Tensor, shape: torch.Size) -> Tensor:
    """Images brought to the channels and the size of others."""
    if x.shape[1] != shape[0]:
        x = x.expand(-1, shape[0], -1, -1) if x.shape[1] == 1 else x.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    return x if x.shape[2:] == shape[1:] else F.interpolate(x, tuple(shape[1:]), mode="bilinear", antialias=True)


class Unlabelled(Dataset[tuple[Tensor, Tensor]]):
    """Pictures in files as floats in [0, 1], each with a corruption where a severity is told."""

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


def _of_folders(name: str, spec: Spec, sets: list[str], disagreed_on: list[str]) -> Shifted:
    data = streamed(name, spec)

    def other(which: str, pictures: folders.ImageFiles) -> Examples:
        if which in CORRUPTED:
            return Unlabelled(pictures, int(which.rpartition("-")[2])), pictures.labels
        if which == "validation":
            held = sources.dataset(name, "validation", size=data.train.size)
            return Unlabelled(held), held.labels
        if which not in OTHER_FOLDERS:
            raise SpecError(f"no set of pictures is called {which!r} beside {name}")
        found = folders.by_class(sources.data_folder() / which, data.train.size).subset(spec.evaluation.examples)
        known = {word: number for number, word in enumerate(data.train.classes)}
        if not set(found.classes) <= set(known):
            return Unlabelled(found), None
        return Unlabelled(found), torch.tensor([known[found.classes[label]] for label in found.labels.tolist()])

    return Shifted(
        name,
        (Unlabelled(data.train), data.train.labels),
        (Unlabelled(data.test), data.test.labels),
        data.outputs,
        {which: other(which, data.test) for which in sets},
        {which: other(which, data.train)[0] for which in disagreed_on},
        data.test.groups,
        data,
    )

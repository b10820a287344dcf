"""Trainings that differ in one thing, and trainings that are the same: only the same are resumed.

A training is a source file. Another training is that file with one expression replaced.
"""

import functools
import importlib.util
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dissensus as ds
from attempts import children, trainings
from attempts.cases import Case, Outcome, Settings

SOURCE = """
import functools
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
import dissensus as ds

FACTOR = 2
TABLE = torch.arange(4.0)
OPTIONS = {"shift": 1}


def scaled(x, by=torch.tensor(1.5)):
    return x * by


class Act(nn.Module):
    power = 1

    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        return torch.relu(x) ** self.power + self.slope * x


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(6, 16), Act(3), nn.Linear(16, 1)
        self.drop, self.depth = nn.Dropout(0.25), depth

    def forward(self, x):
        for _ in range(self.depth):
            x = scaled(x) * FACTOR + TABLE[1] + OPTIONS["shift"]
        return self.outer(self.drop(self.act(self.inner(x))))


def builder(depth):
    def build():
        return Net(depth)
    return build


def augmenter(times, table):
    def augment(x, generator):
        return x + 0.01 * times * table[0] * torch.randn(x.shape, generator=generator)
    return augment


class Loss:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, outputs, targets):
        return ds.objectives.independent(self.weight * outputs, targets, loss="squared_error")


class Rows(Dataset):
    def __init__(self, x, y, factor):
        self.x, self.y, self.factor = x, y, factor

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] * self.factor, self.y[i]


def tensors():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(60, 6, generator=generator)
    return x, x[:, :1] + 0.1 * torch.randn(60, 1, generator=generator)


def train(**saving):
    x, y = tensors()
    data = DATA
    ensemble = ds.Ensemble(builder(2), 2, seed=0, backend="loop")
    history = ds.fit(
        ensemble,
        data,
        functools.partial(Loss(1.0)),
        epochs=4,
        batch_size=20,
        lr=0.01,
        augment=augmenter(5, torch.tensor([1.0])),
        schedule=lambda step, steps: 1.0 - 0.5 * step / steps,
        seed=0,
        checkpoint_seconds=0.0,
        **saving,
    )
    return ensemble, history
"""
DATA = {
    "tensors": "(x, y)",
    "a DataLoader": "DataLoader(TensorDataset(x, y), batch_size=20)",
    "a DataLoader of a Dataset": "DataLoader(Rows(x, y, 3), batch_size=20)",
    "a Dataset": "Rows(x, y, 3)",
}


@dataclass(frozen=True)
class Pair:
    """Two trainings."""

    name: str
    old: str
    new: str
    data: str = "tensors"
    same: bool = False
    hidden: bool = False
    """Whether the difference cannot be known; then it must be said that it is not, when the checkpoint is made."""


PAIRS = (
    Pair("a value of tensor data", "manual_seed(7)", "manual_seed(8)"),
    Pair("data behind a DataLoader", "manual_seed(7)", "manual_seed(8)", "a DataLoader"),
    Pair(
        "batch size of a DataLoader",
        "TensorDataset(x, y), batch_size=20",
        "TensorDataset(x, y), batch_size=30",
        "a DataLoader",
    ),
    Pair("rows of a DataLoader", "TensorDataset(x, y)", "TensorDataset(x[:50], y[:50])", "a DataLoader"),
    Pair("data of a Dataset", "manual_seed(7)", "manual_seed(8)", "a Dataset"),
    Pair("an attribute of a Dataset", "Rows(x, y, 3)", "Rows(x, y, 4)", "a Dataset"),
    Pair("an attribute of a Dataset in a DataLoader", "Rows(x, y, 3)", "Rows(x, y, 4)", "a DataLoader of a Dataset"),
    Pair("the code of a Dataset", "self.x[i] * self.factor", "self.x[i] + self.factor", "a DataLoader of a Dataset"),
    Pair(
        "the last row of a DataLoader",
        "return x, x[:, :1]",
        "x[-1] += 1; return x, x[:, :1]",
        "a DataLoader",
        hidden=True,
    ),
    Pair("batch_size", "epochs=4,\n        batch_size=20", "epochs=4,\n        batch_size=30"),
    Pair("lr", "lr=0.01", "lr=0.02"),
    Pair("seed of fit", "seed=0,\n        checkpoint", "seed=1,\n        checkpoint"),
    Pair("seed of the ensemble", "2, seed=0, backend", "2, seed=1, backend"),
    Pair("a whole number in a closure of the network", "builder(2)", "builder(3)"),
    Pair("a whole number in a closure of augment", "augmenter(5", "augmenter(6"),
    Pair("a tensor in a closure of augment", "torch.tensor([1.0])", "torch.tensor([2.0])"),
    Pair("a tensor as a default", "by=torch.tensor(1.5)", "by=torch.tensor(2.5)"),
    Pair("a global whole number", "FACTOR = 2", "FACTOR = 3"),
    Pair("a global tensor", "torch.arange(4.0)", "torch.arange(4.0) * 2"),
    Pair("a value of a global dict", '{"shift": 1}', '{"shift": 2}'),
    Pair("a class attribute", "power = 1", "power = 2"),
    Pair("an attribute of a layer", "Act(3)", "Act(4)"),
    Pair("the body of a class", "torch.relu(x)", "torch.tanh(x)"),
    Pair("a probability of dropout", "Dropout(0.25)", "Dropout(0.5)"),
    Pair("an attribute of the objective", "Loss(1.0)", "Loss(2.0)"),
    Pair("the code of the objective", "self.weight * outputs", "self.weight + outputs"),
    Pair("a constant of the schedule", "1.0 - 0.5 * step", "1.0 - 0.6 * step"),
    Pair("nothing", "FACTOR = 2", "FACTOR = 2", same=True),
    Pair("nothing, with a DataLoader", "FACTOR = 2", "FACTOR = 2", "a DataLoader", same=True),
    Pair("nothing, with a Dataset", "FACTOR = 2", "FACTOR = 2", "a Dataset", same=True),
    Pair("checkpoint_seconds", "checkpoint_seconds=0.0", "checkpoint_seconds=0.1", same=True),
    Pair("a function that is not used", "def tensors", "def unused():\n    return 3\n\n\ndef tensors", same=True),
    Pair("line numbers", "import functools", "\n\n\nimport functools", same=True),
)


def identity(settings: Settings) -> Iterator[Case]:
    """Pairs of trainings."""
    del settings
    for pair in PAIRS:
        if pair.same:
            must = "the same training is resumed"
        elif pair.hidden:
            must = "another training is refused, or it is said that this difference is not noticed"
        else:
            must = "another training is refused"
        kind = "same" if pair.same else "differs"
        yield Case(f"{kind}: {pair.name}", must, functools.partial(_attempt, pair), limit=1)


def _attempt(pair: Pair, rng: random.Random, folder: Path) -> Outcome:
    source = SOURCE.replace("DATA", DATA[pair.data])
    if source.count(pair.old) < 1:
        raise ValueError(f"the source has no {pair.old!r}")
    first, second = folder / "first" / "subject.py", folder / "second" / "subject.py"
    for file, text in ((first, source), (second, source.replace(pair.old, pair.new, 1))):
        file.parent.mkdir()
        file.write_text(text)
    steps = rng.randint(4, 8)
    started = children.call(_train, first, folder / "checkpoint", steps)
    if started.problem is None or started.problem.kind != "KeyboardInterrupt":
        return Outcome(f"the first training was not interrupted: {started.problem or started.crash}")
    resumed = children.call(_train, second, folder / "checkpoint", None)
    if resumed.crash:
        return Outcome(resumed.crash)
    if pair.same:
        return Outcome("" if resumed.problem is None else f"refused: {resumed.problem.message[:200]}")
    if resumed.problem is not None or (pair.hidden and "notice" in started.text.lower()):
        return Outcome()
    said = [word for word in ("cannot", "not noticed", "not compared") if word in started.text]
    return Outcome("" if pair.hidden and said else "another training was taken for its own")


def _train(file: Path, folder: Path, stop_at: int | None) -> str:
    trainings.start("cpu")
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("always")
    about: Any = importlib.util.spec_from_file_location("subject", file)
    subject: Any = importlib.util.module_from_spec(about)
    sys.modules["subject"] = subject  # where `inspect` looks for the source of classes
    about.loader.exec_module(subject)
    ensemble, history = subject.train(checkpoint=folder, resume=True, progress=trainings.Signals(stop_at))
    assert isinstance(ensemble, ds.Ensemble)
    return trainings.identity([ensemble], [history])["weights"]

"""Another training is never taken for one's own, and one's own is recognised in any process."""

import dataclasses
import functools
import logging
import os
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import dissensus as ds
from dissensus import attacks
from dissensus.data.catalogue import DATASETS
from dissensus.data.recognition import data_fingerprint
from dissensus.fingerprint import fingerprint
from dissensus.randomness import GlobalGenerators
from dissensus.studies import library
from dissensus.studies.measures import MEASURES
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.run import foreign_fingerprint
from dissensus.train import schedules

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 4, generator=GENERATOR), torch.randn(40, 1, generator=GENERATOR)
SCALE = torch.ones(1)
mse = functools.partial(ds.objectives.independent, loss="mse")


class Examples(Dataset):
    """A data set with a setting, as users write them."""

    def __init__(self, x=X, scale=1, transform=None):
        self.x, self.scale, self.transform = x, scale, transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] * self.scale
        return (x if self.transform is None else self.transform(x)), Y[index % len(Y)]


class FromFile(Dataset):
    """Data that no attribute holds: only examples tell what it is."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return X[index] + float((self.folder / "shift").read_text()), Y[index]


class Stream(IterableDataset):
    """A stream that can be read once."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __len__(self):
        return 5

    def __iter__(self):
        return (pair for pair in self.batches)


class Augmented(Dataset):
    """Draws from every generator there is, global ones and its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.python = random.Random(3)
        self.calls, self.file = 0, None

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.calls += 1
        self.file = self.file or object()
        noise = torch.rand(4) + torch.rand(4, generator=self.generator) + np.random.rand() + random.random()  # noqa: NPY002
        return X[index] + noise + self.numpy.random() + self.python.random(), Y[index]


def network(activation):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)

        def forward(self, x):
            return self.last(activation(self.first(x)))

    return Network


class Activated(nn.Module):
    """A network whose class is changed by a test."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return torch.relu(self.layer(x))


mlp = functools.partial(ds.nets.mlp, 4, 1, (5,))


def hooked(factor):
    def build():
        net = mlp()
        net[0].register_forward_hook(lambda module, inputs, outputs: factor * outputs)
        return net

    return build


def frozen(value):
    def build():
        net = mlp()
        net[0].weight.requires_grad_(False).fill_(value)
        return net

    return build


def closing(value):
    return lambda outputs, targets: mse(outputs * value, targets)


def defaulting(value):
    return lambda outputs, targets, by=value: mse(outputs * by, targets)


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, outputs, targets):
        return mse(outputs * self.by, targets)


def by_global(outputs, targets):
    return mse(outputs * SCALE, targets)


def by_namespace(**values):
    namespace = types.SimpleNamespace(**values)
    return lambda outputs, targets: mse(outputs * namespace.by, targets)


OTHERS = {
    "data of a loader": [{"data": DataLoader(Examples(x), 8)} for x in (X, X + 1)],
    "tensors of a loader": [{"data": DataLoader(TensorDataset(x, Y), 8)} for x in (X, X + 1)],
    "batch size of a loader": [{"data": DataLoader(Examples(), size)} for size in (8, 10)],
    "order of a loader": [{"data": DataLoader(Examples(), 8, shuffle=shuffle)} for shuffle in (False, True)],
    "sampler of a loader": [
        {"data": DataLoader(Examples(), 8, sampler=WeightedRandomSampler(weights, 40))}
        for weights in ([1.0] * 40, [1.0] * 39 + [2.0])
    ],
    "last batch of a loader": [{"data": DataLoader(Examples(), 12, drop_last=drop)} for drop in (False, True)],
    "data set": [{"data": Examples(x)} for x in (X, X + 1)],
    "setting of a data set": [{"data": Examples(scale=scale)} for scale in (1, 2)],
    "transform of a data set": [{"data": Examples(transform=f)} for f in (torch.sin, torch.cos)],
    "length of a data set": [{"data": Examples(x)} for x in (X, X[:39])],
    "rows of a data set": [{"data": Subset(Examples(), rows)} for rows in (range(20), range(20, 40))],
    "data sets in a data set": [{"data": ConcatDataset([Examples(), Examples(x)])} for x in (X, X + 1)],
    "validation": [{"validation": DataLoader(Examples(x), 8)} for x in (X, X + 1)],
    "whole number closed over": [{"objective": closing(value)} for value in (1, 2)],
    "tensor closed over": [{"objective": closing(torch.tensor(value))} for value in (1.0, 2.0)],
    "whole number as a default": [{"objective": defaulting(value)} for value in (1, 2)],
    "tensor as a default": [{"objective": defaulting(torch.tensor(value))} for value in (1.0, 2.0)],
    "whole number as an attribute": [{"objective": Scaled(value)} for value in (1, 2)],
    "tensor as an attribute": [{"objective": Scaled(torch.tensor(value))} for value in (1.0, 2.0)],
    "whole number in a namespace": [{"objective": by_namespace(by=value)} for value in (1, 2)],
    "class": [{"build": network(activation)} for activation in (torch.relu, torch.tanh)],
    "hook": [{"build": hooked(factor)} for factor in (1, 3)],
    "frozen parameters": [{"build": frozen(value)} for value in (1.0, 2.0)],
    "schedule within an epoch": [{"schedule": schedules.step([at])} for at in (0.5, 0.7)],
    "augmentation": [{"augment": lambda x, generator, by=by: by * x} for by in (1, 2)],
}


def fitted(folder, *, build=mlp, data=(X, Y), objective=mse, **options):
    ensemble = ds.Ensemble(build, 2, backend="loop")
    options = {"epochs": 1, "batch_size": 8, "checkpoint": folder, "resume": True, **options}
    return ds.fit(ensemble, data, objective, **options)


@pytest.mark.slow(fast=["data of a loader", "batch size of a loader", "data set", "class"])
@pytest.mark.parametrize("name", OTHERS)
def test_another_training_is_refused(name, tmp_path):
    own_options, other_options = OTHERS[name]
    fitted(tmp_path, **own_options)
    fitted(tmp_path, **own_options)
    with pytest.raises(ds.StorageError, match="belongs to another training"):
        fitted(tmp_path, **other_options)


def test_changed_globals_and_classes_are_refused(tmp_path, monkeypatch):
    fitted(tmp_path / "global", objective=by_global)
    fitted(tmp_path / "class", build=Activated)
    monkeypatch.setitem(globals(), "SCALE", torch.full((1,), 2.0))
    monkeypatch.setattr(Activated, "forward", lambda self, x: torch.tanh(self.layer(x)))
    with pytest.raises(ds.StorageError, match="'objective' differ"):
        fitted(tmp_path / "global", objective=by_global)
    with pytest.raises(ds.StorageError, match="'network' differ"):
        fitted(tmp_path / "class", build=Activated)


def test_a_sweep_with_another_class_is_refused(tmp_path, monkeypatch):
    options = {"grid": {"seed": [0, 1]}, "members": 2, "epochs": 1, "checkpoint": tmp_path, "resume": True}
    ds.sweep(Activated, (X, Y), mse, **options)
    ds.sweep(Activated, (X, Y), mse, **options)
    monkeypatch.setattr(Activated, "forward", lambda self, x: torch.tanh(self.layer(x)))
    with pytest.raises(ds.StorageError, match="belongs to another sweep: 'build' differ"):
        ds.sweep(Activated, (X, Y), mse, **options)


def test_stored_attacks_on_another_class_are_refused(tmp_path, monkeypatch):
    class Classifier(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    attack = functools.partial(attacks.fgsm, epsilon=0.1)
    inputs, labels = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    attacks.over(attack, Classifier(), inputs, labels, folder=tmp_path)
    attacks.over(attack, Classifier(), inputs, labels, folder=tmp_path)
    monkeypatch.setattr(Classifier, "forward", lambda self, x: torch.tanh(x))
    with pytest.raises(ValueError, match="'model' differ"):
        attacks.over(attack, Classifier(), inputs, labels, folder=tmp_path)


def test_a_study_on_replaced_data_is_another_run():
    spec = dataclasses.replace(library.load("collusion/figure-2"), data=("abalone",))
    replaced = {**DATASETS, "abalone": dataclasses.replace(DATASETS["abalone"], description="another")}
    prints = {foreign_fingerprint(spec, PROCEDURES, MEASURES, catalogue) for catalogue in (DATASETS, replaced)}
    assert "" in prints
    assert len(prints) == 2


def test_examples_tell_where_attributes_do_not(tmp_path):
    (tmp_path / "shift").write_text("0")
    before = data_fingerprint(FromFile(tmp_path), [])
    assert data_fingerprint(FromFile(tmp_path), []) == before
    (tmp_path / "shift").write_text("1")
    assert data_fingerprint(FromFile(tmp_path), []) != before


def random_order(seed):
    return DataLoader(Examples(), 8, sampler=RandomSampler(Examples(), generator=torch.Generator().manual_seed(seed)))


def unseeded():
    data = Examples()
    data.numpy, data.python = np.random.default_rng(), random.Random()
    return data


def drawing(generator):
    data = Examples()
    data.generator = generator
    return data


def workers(count):
    return DataLoader(Examples(), 8, num_workers=count)


def advanced(data):
    for _ in data:
        pass
    return data


SAME = {
    "data set": (Examples(), Examples(X.clone())),
    "loader": (DataLoader(Examples(), 8), DataLoader(Examples(), 8)),
    "loader that was read": (DataLoader(Examples(), 8), advanced(DataLoader(Examples(), 8))),
    "generator that was drawn from": (random_order(1), advanced(random_order(1))),
    "generator without a seed, whose state a checkpoint restores": (unseeded(), unseeded()),
    "workers": (workers(0), workers(2)),
    "random data set": (Augmented(), Augmented()),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_data_is_recognised(name):
    first, second = SAME[name]
    assert data_fingerprint(first, []) == data_fingerprint(second, []) is not None


def test_seeds_of_generators_count():
    assert data_fingerprint(random_order(1), []) != data_fingerprint(random_order(2), [])
    one, other = (data_fingerprint(drawing(np.random.default_rng(seed)), []) for seed in (1, 2))
    assert one != other


def test_a_look_at_data_changes_nothing(unchecked):
    """The examples that training reads afterwards are those that it would have read."""
    looked_at, untouched = Augmented(), Augmented()
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    before = GlobalGenerators.now()
    missing = []
    assert data_fingerprint(DataLoader(looked_at, 8), missing) == data_fingerprint(DataLoader(looked_at, 8), [])
    assert missing == []
    assert not before.drawn_from()
    assert random.getstate() == before.python
    assert looked_at.calls == 0
    assert looked_at.file is None, "a file that is opened here would be passed on to workers"
    first = looked_at[3][0]
    before.restore()
    assert torch.equal(first, untouched[3][0])


def test_a_stream_is_not_read_and_what_is_unknown_is_said_once(tmp_path, caplog):
    pairs = [(X[:8], Y[:8])] * 5
    stream = Stream(pairs)
    missing = []
    data_fingerprint(DataLoader(stream, batch_size=None), missing)
    assert "examples of Stream" in missing
    assert len(list(stream)) == 5, "nothing was taken from it"
    with caplog.at_level(logging.WARNING, "dissensus"):
        fitted(tmp_path, data=DataLoader(Stream(pairs), batch_size=None))
    (line,) = [r.getMessage() for r in caplog.records if "do not recognise" in r.getMessage()]
    assert "`data` (" in line
    assert "examples of Stream" in line


def test_nothing_is_said_where_all_is_known(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "dissensus"):
        fitted(tmp_path, data=DataLoader(Examples(), 8), objective=Scaled(2))
    assert not [r for r in caplog.records if "do not recognise" in r.getMessage()]


def test_what_is_unknown_in_a_network_is_said(tmp_path, caplog):
    class Endless(Activated):
        def __init__(self):
            super().__init__()
            self.numbers = (1.0 for _ in range(100))

    with caplog.at_level(logging.WARNING, "dissensus"):
        fitted(tmp_path, build=Endless)
    assert [r for r in caplog.records if "`network` (builtins.generator)" in r.getMessage()]


def test_examples_that_differ_at_every_look_are_said():
    count = iter(range(100))
    missing = []

    class Restless(Examples):
        def __getitem__(self, index):
            return X[index] + next(count), Y[index]

    data_fingerprint(Restless(), missing)
    assert "examples of Restless" in missing


def test_nothing_is_fingerprinted_without_a_checkpoint(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("a fit without a checkpoint needs no identity")

    monkeypatch.setattr("dissensus.train.recipe.fingerprints", refused)
    monkeypatch.setattr("dissensus.train.recipe.data_fingerprint", refused)
    monkeypatch.setattr("dissensus.execution.stacked.architecture_fingerprint", refused)
    ds.fit(ds.Ensemble(mlp, 2), (X, Y), mse, epochs=1)


def with_one(values, value, at=77):
    values[at] = value
    return values


LARGE = {
    "row of an array": lambda value: with_one(np.zeros((3_000, 1_000)), value),
    "row of a tensor": lambda value: with_one(torch.zeros(3_000, 1_000), value),
    "number": lambda value: with_one([0.0] * 100_000, value),
    "number of NumPy": lambda value: with_one(list(np.arange(1_000)), np.int64(value)),
    "text": lambda value: with_one(["a"] * 100_000, f"{value}"),
    "sample": lambda value: with_one([(f"{i}.png", i % 7) for i in range(1_000)], ("77.png", value)),
    "value of a table": lambda value: with_one(dict.fromkeys(range(10_000), 0.0), value),
    "entry of a set": lambda value: {*range(1_000, 2_000), value},
    "array in a list": lambda value: with_one([np.zeros(100) for _ in range(1_000)], np.full(100, value)),
    "byte": lambda value: with_one(bytearray(10_000_000), int(value)),
    "folder of a sample": lambda value: {"a": [f"/data/{value}/train"], "b": [f"{value}/1.png"] * 300},
}


class Holding(Dataset):
    def __init__(self, content):
        self.content = content

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize("name", LARGE)
def test_large_contents_count_in_full(name):
    make, missing = LARGE[name], []
    same, again, other = (data_fingerprint(Holding(make(value)), missing) for value in (1.0, 1.0, 2.0))
    assert same == again != other
    assert set(missing) <= {"the folders of absolute paths"}


def test_what_is_too_large_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("dissensus.data.recognition._MOST_OBJECTS", 1_000)
    missing = []
    data_fingerprint(Holding([torch.zeros(1) for _ in range(1_001)]), missing)
    assert missing == ["most entries of a list of 1001"]
    np.save(tmp_path / "array.npy", np.zeros((100, 2)))
    missing = []
    data_fingerprint(Holding(np.load(tmp_path / "array.npy", mmap_mode="r")), missing)
    assert missing == ["most of a memory-mapped file"]


def test_data_may_lie_elsewhere_which_is_said_but_not_be_another_folder():
    missing = []
    one_place, another_place, other_data = (
        data_fingerprint(Holding(path), missing) for path in ("/disk/train", "/scratch/train", "/disk/test")
    )
    assert one_place == another_place != other_data
    assert missing == ["the folders of absolute paths"] * 3


def test_stacked_and_mixed_members_are_identified_by_one_rule():
    def stacked(activation):
        return ds.Ensemble(network(activation), 2).body.identity()

    def mixed(activation):
        return ds.Ensemble.from_modules([network(activation)(), nn.Linear(4, 1)]).body.identity()

    for identity in (stacked, mixed):
        assert identity(torch.relu) == identity(torch.relu) != identity(torch.tanh)


def test_networks_of_classes_with_one_name_and_other_code_are_not_run_by_the_first():
    def of_class(code):
        namespace = {"nn": nn, "torch": torch, "__name__": "user"}
        source = f"class Net(nn.Linear):\n    def forward(self, x):\n        return {code}\n"
        exec(source, namespace)
        return namespace["Net"](4, 1)

    networks = [of_class("nn.Linear.forward(self, x)"), of_class("-nn.Linear.forward(self, x)")]
    ensemble = ds.Ensemble.from_modules(networks)
    torch.testing.assert_close(ensemble(X), torch.stack([net(X) for net in networks]))


PROGRAM = """
import functools, sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import dissensus as ds
{padding}
WORDS = {{"one", "two", "three"}}
class Data(Dataset):
    def __init__(self):
        self.words, self.table = {{"a", "b", "c"}}, {{"x": 1, "y": 2}}
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4), torch.zeros(1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.words = nn.Linear(4, 1), {{"p", "q"}}
    def forward(self, x):
        return self.layer(x) if WORDS else x
objective = lambda o, t: ds.objectives.independent(o, t, loss="mse")
options = {{"epochs": 1, "batch_size": 8, "checkpoint": sys.argv[1], "resume": True}}
ds.fit(ds.Ensemble(Net, 2, backend="loop"), DataLoader(Data(), 8), objective, **options)
"""


@pytest.mark.slow
def test_a_training_is_recognised_in_another_process_with_another_hash_seed_and_other_lines(tmp_path):
    for seed, padding in (("1", ""), ("2", "\n# a comment\n\n")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM.format(padding=padding), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_module_imported_by_a_call_counts_by_its_code(tmp_path, monkeypatch):
    module = tmp_path / "imported_late.py"
    module.write_text("def scaled(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)

    def function(x):
        from imported_late import scaled

        return scaled(x)

    before = fingerprint(function)
    assert function(2) == 4
    assert fingerprint(function) == before, "whether it is imported already does not count"
    module.write_text("# a comment\n\ndef scaled(x):\n    return 2 * x\n")
    assert fingerprint(function) == before
    module.write_text("def scaled(x):\n    return 3 * x\n")
    assert fingerprint(function) != before

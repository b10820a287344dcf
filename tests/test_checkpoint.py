"""Checkpoints: killed at any moment, a training goes on bit for bit."""

import collections
import json
import logging
import math
import random
import re
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import NETWORKS
from recording import recorded
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

import dissensus as ds
from dissensus import storage
from dissensus.train import capture
from dissensus.train import checkpoint as checkpoints
from dissensus.train.settings import CheckpointSettings

M = 3
mse = partial(ds.objectives.independent, loss="squared_error")


class Interrupted(Exception):
    pass


def data(n=24):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 3, generator=generator)


def weights(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_identical(ensemble, expected):
    """Two ensembles have the same weights, bit for bit."""
    actual = weights(ensemble)
    assert all(torch.equal(actual[name], tensor) for name, tensor in weights(expected).items())


class Interrupting:
    """An objective that stops training with an error at a step, and is the same training whatever the step."""

    def __init__(self, steps):
        self.steps, self.calls = steps, 0

    def fingerprint_parts(self):
        return []

    def __call__(self, outputs, targets):
        self.calls += 1
        if self.calls > self.steps:
            raise Interrupted
        return mse(outputs, targets)


def run(folder, steps=10**9, name="two_dropouts", source=None, **options):
    ensemble = ds.Ensemble(NETWORKS[name][0], M, backend="loop")
    settings = {"epochs": 6, "batch_size": 7, "checkpoint": folder, "checkpoint_seconds": 0.0, **options}
    history = ds.fit(ensemble, source or data(), Interrupting(steps), **settings)
    return ensemble, history


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fit", "sweep"])
def test_a_training_killed_ten_times_ends_bit_for_bit_equal(kind, tmp_path):
    script = Path(__file__).with_name("kill_and_resume.py")
    command = [sys.executable, str(script), kind, str(tmp_path / "kept"), "1"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert report["kills"] >= 10
    assert report["result"] == report["expected"]
    assert report["result"]["parts"] == (1 if kind == "fit" else 2)


@pytest.mark.slow(fast=["1-two_dropouts", "9-norm_first", "23-mlp"])
@pytest.mark.parametrize("name", ["mlp", "two_dropouts", "norm_first"])
@pytest.mark.parametrize("steps", [1, 4, 9, 23])
def test_an_interrupted_fit_resumes_exactly(name, steps, tmp_path):
    expected, expected_history = run(None, name=name, checkpoint_seconds=None, validation=0.2)
    with pytest.raises(Interrupted):
        run(tmp_path, steps, name=name, validation=0.2)
    resumed, history = run(tmp_path, name=name, resume=True, validation=0.2)
    assert_identical(resumed, expected)
    assert history.column("loss") == expected_history.column("loss")
    assert history.column("validation") == expected_history.column("validation")
    assert history.steps == expected_history.steps


def test_mixed_architectures_and_foreign_loaders_resume(tmp_path):
    def fresh():
        torch.manual_seed(0)
        wide = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
        return ds.Ensemble.from_modules([torch.nn.Linear(6, 3), wide])

    loader = DataLoader(TensorDataset(*data()), batch_size=7)
    expected, resumed = fresh(), fresh()
    ds.fit(expected, loader, mse, epochs=4)
    saving = {"epochs": 4, "checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(Interrupted):
        ds.fit(fresh(), loader, Interrupting(9), **saving)
    epochs = [json.loads((path / "manifest.json").read_text())["facts"]["in_epoch"] for path in tmp_path.glob("step-*")]
    assert epochs == [0, 0], "a foreign loader can only start at an epoch's beginning"
    ds.fit(resumed, loader, Interrupting(10**9), resume=True, **saving)
    assert_identical(resumed, expected)


def test_the_last_two_are_kept_and_a_corrupt_one_is_skipped(tmp_path, caplog):
    expected, _ = run(None, checkpoint_seconds=None)
    with pytest.raises(Interrupted):
        run(tmp_path, 9)
    _, newest = sorted(tmp_path.glob("step-*"))
    (file,) = newest.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "dissensus"):
        resumed, _ = run(tmp_path, resume=True)
    assert any("skipped" in record.getMessage() and "truncated" in record.getMessage() for record in caplog.records)
    assert_identical(resumed, expected)
    for path in tmp_path.glob("step-*"):
        (path / "manifest.json").write_text("{")
    with pytest.raises(ds.StorageError, match="no checkpoint in .* is whole"):
        run(tmp_path, resume=True)


def test_a_finished_training_is_not_trained_again(tmp_path):
    done, _ = run(tmp_path)
    resumed, history = run(tmp_path, steps=0, resume=True)
    assert_identical(resumed, done)
    assert len(history.epochs) == 6


def test_another_training_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, 5)
    with pytest.raises(ValueError, match="pass resume=True to go on"):
        run(tmp_path)
    with pytest.raises(
        ds.StorageError, match="another training: 'epochs', 'lr' differ .'epochs' was 6 and is 7; 'lr' was 0.001"
    ):
        run(tmp_path, resume=True, epochs=7, lr=0.5)
    with pytest.raises(ds.StorageError, match="'data' differ"):
        run(tmp_path, resume=True, source=data(25))


CHANGES = {
    "weight_decay": 0.1,
    "schedule": "cosine",
    "clip_norm": 1.0,
    "frozen": [0],
    "validation": 0.2,
    "shuffle": False,
    "betas": (0.8, 0.9),
    "min_delta": 0.1,
    "drop_last": True,
    "name": "mlp",
}


@pytest.mark.parametrize("key", CHANGES)
def test_every_setting_that_changes_the_result_is_part_of_the_fingerprint(key, tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, 5)
    with pytest.raises(ds.StorageError, match="belongs to another training"):
        run(tmp_path, resume=True, **{key: CHANGES[key]})


def error_of(outputs, targets):
    return (outputs.mean(0) - targets).square().mean()


def test_the_mode_of_a_metric_is_part_of_the_fingerprint(tmp_path):
    options = {"validation": 0.3, "metric": error_of, "mode": "min"}
    with pytest.raises(Interrupted):
        run(tmp_path, 5, **options)
    with pytest.raises(ds.StorageError, match="belongs to another training: 'mode' differ"):
        run(tmp_path, resume=True, **{**options, "mode": "max"})


def test_a_training_interrupted_before_its_first_checkpoint_starts_anew(tmp_path):
    expected, _ = run(None, checkpoint_seconds=None)
    ensemble = ds.Ensemble(NETWORKS["two_dropouts"][0], M, backend="loop")
    options = {"epochs": 6, "batch_size": 7, "checkpoint": tmp_path, "resume": True}
    with pytest.raises(Interrupted):
        ds.fit(ensemble, data(), Interrupting(9), **options)
    ds.fit(ensemble, data(), Interrupting(10**9), **options)  # the same, half-trained ensemble
    assert_identical(ensemble, expected)


def other_activation():
    """Another network under the same name: only a look at the network itself can tell."""
    build = lambda: ds.nets.mlp(6, 3, (8, 7), activation=torch.nn.Tanh)  # noqa: E731
    build.__qualname__ = NETWORKS["mlp"][0].__qualname__
    return build


def test_every_setting_of_a_sweep_is_part_of_the_fingerprint(tmp_path):
    build, objective = NETWORKS["mlp"][0], partial(ds.objectives.augmented, loss="mse", pool="score")
    options = {"grid": {"beta": [0.0, 1.0]}, "members": 2, "epochs": 2, "checkpoint": tmp_path, "resume": True}
    ds.sweep(build, data(), objective, **options)
    for change in ({"lr": 0.1}, {"seed": 7}, {"batch_size": 4}, {"schedule": "cosine"}, {"weight_decay": 0.1}):
        with pytest.raises(ds.StorageError, match="belongs to another sweep"):
            ds.sweep(build, data(), objective, **options, **change)
    with pytest.raises(ds.StorageError, match="'build' differ"):
        ds.sweep(other_activation(), data(), objective, **options)
    with_metric = {**options, "checkpoint": tmp_path / "judged", "validation": 0.3, "metric": error_of, "mode": "min"}
    ds.sweep(build, data(), objective, **with_metric)
    with pytest.raises(ds.StorageError, match="belongs to another sweep: 'mode' differ"):
        ds.sweep(build, data(), objective, **{**with_metric, "mode": "max"})
    with pytest.raises(ValueError, match="holds a sweep already"):
        ds.sweep(build, data(), objective, **{**options, "resume": False})


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (4, r"an older dissensus \(format 4\); this one reads from 5 on: training cannot go on from it"),
        (7, r"a newer dissensus \(format 7\); this one reads up to 6: upgrade\."),
    ],
)
def test_checkpoints_of_another_version_are_refused(tmp_path, monkeypatch, number, words):
    build, objective = NETWORKS["mlp"][0], partial(ds.objectives.augmented, loss="mse", pool="score")
    sweep_options = {
        "grid": {"beta": [0.0, 1.0]},
        "members": 2,
        "epochs": 1,
        "checkpoint": tmp_path / "sweep",
        "resume": True,
    }
    fit_options = {"epochs": 1, "checkpoint": tmp_path / "fit", "resume": True}
    with monkeypatch.context() as patch:
        for module in ("checkpoint", "sweeping"):
            patch.setattr(f"dissensus.train.{module}.FORMATS", storage.Formats(newest=number, oldest=number))
        ds.fit(ds.Ensemble(build, 2), data(), mse, **fit_options)
        ds.sweep(build, data(), objective, **sweep_options)
    with pytest.raises(ds.StorageError, match=words):
        ds.fit(ds.Ensemble(build, 2), data(), mse, **fit_options)
    with pytest.raises(ds.StorageError, match=words):
        ds.sweep(build, data(), objective, **sweep_options)


def test_parts_with_a_slash_in_their_name_are_restored(tmp_path):
    def objective(outputs, targets):
        total, parts = mse(outputs, targets)
        return ds.LossParts(total, {"train/mse": parts["individual"]})

    def stopping(steps):
        inner = Interrupting(steps)

        def named_parts(outputs, targets):
            inner(outputs, targets)
            return objective(outputs, targets)

        return named_parts

    options = {"epochs": 3, "batch_size": 7, "shuffle": False}
    saving = {"checkpoint": tmp_path, "checkpoint_seconds": 0.0, "resume": True}
    expected = ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M, backend="loop"), data(), stopping(10**9), **options)
    with pytest.raises(Interrupted):
        ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M, backend="loop"), data(), stopping(6), **options, **saving)
    resumed = ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M, backend="loop"), data(), stopping(10**9), **options, **saving)
    assert resumed.column("train/mse") == expected.column("train/mse")
    assert resumed.backend == "loop"


def test_a_loader_with_its_own_generator_resumes(tmp_path):
    def loader():
        return DataLoader(
            TensorDataset(*data()), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(5)
        )

    def fresh():
        return ds.Ensemble(NETWORKS["mlp"][0], M, backend="loop")

    expected, resumed = fresh(), fresh()
    ds.fit(expected, loader(), mse, epochs=4)
    saving = {"epochs": 4, "checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(Interrupted):
        ds.fit(fresh(), loader(), Interrupting(9), **saving)
    ds.fit(resumed, loader(), Interrupting(10**9), resume=True, **saving)
    assert_identical(resumed, expected)


@pytest.mark.slow
def test_a_failure_inside_a_graph_survives_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda engine: capture.GraphSteps(lambda: recorded))

    def explodes(outputs, targets, *, fuse):
        total, parts = mse(outputs, targets)
        return ds.LossParts(torch.where(total < 5.5 * torch.as_tensor(fuse), math.inf, total), parts)

    def swept(steps, folder):
        write = checkpoints.Checkpointer.write

        def stops(self, engine):
            write(self, engine)
            if engine.state.steps >= steps:
                raise Interrupted

        monkeypatch.setattr(checkpoints.Checkpointer, "write", stops)
        options = {"epochs": 4, "batch_size": 2, "lr": 0.01, "checkpoint": folder, "checkpoint_seconds": 0.0}
        options["backend"] = "loop"  # what is fastest may change from one training to the next, and its last bits too
        try:
            build = NETWORKS["norm_first"][0]
            return ds.sweep(build, data(), explodes, grid={"fuse": [0.0, 1.0]}, members=3, resume=True, **options)
        finally:
            monkeypatch.setattr(checkpoints.Checkpointer, "write", write)

    expected = swept(10**9, tmp_path / "whole")
    assert expected.outcomes[1].status == "failed"
    step = int(expected.outcomes[1].reason.split("step ")[1].split(",")[0])
    assert step > 3
    with pytest.raises(Interrupted):
        swept(step + 2, tmp_path / "killed")
    resumed = swept(10**9, tmp_path / "killed")
    assert resumed.outcomes[1].status == "failed"
    assert resumed.outcomes[1].reason == expected.outcomes[1].reason
    for i in range(2):
        assert_identical(resumed.run(i), expected.run(i))


def test_the_default_interval_keeps_the_cost_under_two_percent(tmp_path, monkeypatch, unchecked):
    clock = [0.0]
    monkeypatch.setattr(checkpoints.time, "perf_counter", lambda: clock[0])
    saver = checkpoints.Checkpointer(CheckpointSettings(tmp_path), {})

    class Feed:
        resumable = True

    class State:
        in_epoch = 0

    class Engine:
        state, feed = State(), Feed()

    writes = []

    def write(engine):
        writes.append(clock[0])
        start, clock[0] = clock[0], clock[0] + 3.0  # a slow disk
        saver.written, saver.cost = clock[0], clock[0] - start

    monkeypatch.setattr(saver, "write", write)
    while clock[0] < 10_000:
        saver(Engine())
        clock[0] += 1.0
    assert writes[0] == pytest.approx(10.0)
    assert 0.01 < 3.0 * len(writes) / clock[0] <= 0.02


def test_threads_and_backend_are_restored(tmp_path, caplog):
    with pytest.raises(Interrupted):
        run(tmp_path, 5)
    stored = json.loads((tmp_path / "choices.json").read_text())
    assert stored["choices"] == [[["loop", True, True, False, "cpu", False, False], ["loop", {}, {}]]]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with caplog.at_level(logging.WARNING, "dissensus"):
            run(tmp_path, resume=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert any("using 1 threads" in record.getMessage() for record in caplog.records)


def test_a_checkpoint_of_other_initial_weights_or_another_function_of_the_same_name_is_refused(tmp_path):
    options = {"epochs": 2, "batch_size": 8, "checkpoint": tmp_path, "resume": True}
    build = NETWORKS["mlp"][0]
    objective, halved = (lambda o, t: mse(o, t)), (lambda o, t: mse(o / 2, t))
    ds.fit(ds.Ensemble(build, M, seed=1), data(), objective, **options)
    with pytest.raises(ValueError, match="another training: 'seed of the ensemble' differ .* was 1 and is 2"):
        ds.fit(ds.Ensemble(build, M, seed=2), data(), objective, **options)
    with pytest.raises(ValueError, match="'objective'"):
        ds.fit(ds.Ensemble(build, M, seed=1), data(), halved, **options)
    ds.fit(ds.Ensemble(build, M, seed=1), data(), objective, **options)


def test_a_checkpoint_of_a_function_with_other_numbers_is_refused(tmp_path):
    def powered(power):
        return lambda o, t: mse(o**power, t)

    def with_default(power, **_):
        return lambda o, t, power=power: mse(o**power, t)

    def with_named_default(power):
        return lambda o, t, *, power=power: mse(o**power, t)

    build = NETWORKS["mlp"][0]
    for number, make in enumerate((powered, with_default, with_named_default)):
        options = {"epochs": 1, "batch_size": 8, "checkpoint": tmp_path / str(number), "resume": True}
        ds.fit(ds.Ensemble(build, M), data(), make(1), **options)
        ds.fit(ds.Ensemble(build, M), data(), make(1), **options)
        with pytest.raises(ValueError, match="'objective'"):
            ds.fit(ds.Ensemble(build, M), data(), make(3), **options)


class PowerLoss:
    """An objective with a whole number as its setting, which counts its calls."""

    def __init__(self, power):
        self.power, self.calls, self.log = power, 0, []

    def __call__(self, outputs, targets):
        self.calls += 1
        self.log.append(self.calls)
        return mse(outputs**self.power, targets)


def test_an_objective_is_known_by_its_settings_and_counters_at_the_beginning(tmp_path):
    options = {"epochs": 1, "batch_size": 8, "checkpoint": tmp_path, "resume": True}
    objective = PowerLoss(1)
    ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M), data(), objective, **options)
    assert objective.calls > 0
    ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M), data(), PowerLoss(1), **options)
    with pytest.raises(ds.StorageError, match="belongs to another training: 'objective' differ"):
        ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M), data(), PowerLoss(3), **options)
    with pytest.raises(ds.StorageError, match="was used before .* create it anew"):
        ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M), data(), objective, **options)


def test_a_sweep_with_an_objective_that_counts_is_recognised(tmp_path):
    """Trying the objective on every point of the grid, which only the first process does, changes its counter."""

    class Counting(PowerLoss):
        def __call__(self, outputs, targets, *, scale):
            return super().__call__(scale * outputs, targets)

    options = {"grid": {"scale": [0.5, 1.0]}, "members": 2, "epochs": 1, "checkpoint": tmp_path, "resume": True}
    first, second = (ds.sweep(NETWORKS["mlp"][0], data(), Counting(1), backend="loop", **options) for _ in range(2))
    assert_identical(first.run(1), second.run(1))


class Rows(Dataset):
    """Examples with noise from ``draw``, and generators of their own."""

    def __init__(self, draw=lambda rows: 0.0):
        self.draw, self.calls = draw, 0
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.python, self.old = random.Random(1), np.random.RandomState(1)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        x, y = data()
        self.calls += 1
        return x[index] + self.draw(self), y[index]


class EpochSampler(Sampler):
    """Another order in every epoch, from the number of the epoch."""

    epoch = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.epoch += 1
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Annealed:
    """An objective with numbers of all kinds that its calls change."""

    def __init__(self):
        self.weight, self.seen, self.log = 1.0, {"steps": 0, "name": "a"}, []
        self.mean, self.array, self.recent = torch.ones(2), np.ones(2), collections.deque(maxlen=3)

    def __call__(self, outputs, targets):
        self.weight *= 0.9
        self.seen["steps"] += 1
        self.log.append((len(self.log), self.weight))
        self.mean.mul_(0.9)
        self.array *= 0.9
        self.recent.append(self.seen["steps"])
        self.last = np.float64(len(self.log))
        scale = self.weight + self.seen["steps"] + len(self.log) + float(self.mean[0]) + self.array[1] + self.last
        return mse(outputs * (scale + sum(self.recent)), targets)


def annealed_by_closure():
    weight = 1.0

    def objective(outputs, targets):
        nonlocal weight
        weight *= 0.9
        return mse(outputs * weight, targets)

    return objective


class CountingNetwork(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (1 + 0.1 * self.calls)


def two_generators():
    sampler = RandomSampler(Rows(), generator=torch.Generator().manual_seed(1))
    return DataLoader(Rows(lambda rows: torch.rand(())), 7, sampler=sampler, generator=torch.Generator().manual_seed(2))


def batch_sampler():
    sampler = RandomSampler(Rows(), generator=torch.Generator().manual_seed(1))
    return DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 7, False))


def held_out():
    return DataLoader(Rows(), 9, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(1))


STATEFUL = {
    "global generator of Python": lambda: {"source": Rows(lambda rows: random.random())},
    "global generator of NumPy": lambda: {"source": Rows(lambda rows: np.random.rand())},  # noqa: NPY002
    "generator of torch in a data set": lambda: {"source": Rows(lambda rows: torch.rand((), generator=rows.torch))},
    "generator of NumPy in a data set": lambda: {"source": Rows(lambda rows: rows.numpy.random())},
    "generator of Python in a data set": lambda: {"source": Rows(lambda rows: rows.python.random())},
    "old generator of NumPy in a data set": lambda: {"source": Rows(lambda rows: rows.old.rand())},
    "counter of a data set": lambda: {"source": Rows(lambda rows: 0.01 * rows.calls)},
    "epoch of a sampler": lambda: {"source": DataLoader(Rows(), 7, sampler=EpochSampler())},
    "generator of a batch sampler": lambda: {"source": batch_sampler()},
    "generators of a loader and its sampler": lambda: {"source": two_generators()},
    "generator of a validation loader": lambda: {"validation": held_out(), "lr": 0.1},
    "objective": lambda: {"objective": Annealed()},
    "closure of an objective": lambda: {"objective": annealed_by_closure()},
    "augmentation": lambda: {"augment": lambda x, generator: x + np.random.rand()},  # noqa: NPY002
    "network": lambda: {"build": CountingNetwork},
}


def fitted(options, **saving):
    options = {"source": data(), "objective": mse, "build": NETWORKS["mlp"][0], **options}
    ensemble = ds.Ensemble(options.pop("build"), 2, backend="loop")
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    source, objective = options.pop("source"), options.pop("objective")
    history = ds.fit(ensemble, source, objective, epochs=4, batch_size=7, **saving, **options)
    return ensemble, [{**entry, "seconds": None} for entry in history.epochs]


@pytest.mark.parametrize("name", STATEFUL)
def test_generators_and_variables_of_objects_are_restored(name, tmp_path, caplog):
    """What a fresh process makes continues where the interrupted one was."""

    def stop(moment):
        if moment.step >= 10:
            raise Interrupted

    saving = {"checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    expected, record = fitted(STATEFUL[name]())
    with pytest.raises(Interrupted):
        fitted(STATEFUL[name](), progress=stop, **saving)
    resumed, resumed_record = fitted(STATEFUL[name](), resume=True, **saving)
    assert_identical(resumed, expected)
    assert resumed_record == record
    assert not [entry for entry in caplog.records if "do not store" in entry.getMessage()]


class Generating:
    """An objective whose state cannot be stored."""

    def __init__(self):
        self.weight = Fraction(1)

    def __call__(self, outputs, targets):
        self.weight *= Fraction(9, 10)
        return mse(outputs * float(self.weight), targets)


def test_what_changes_and_is_not_stored_is_said_once(tmp_path, caplog):
    loader = DataLoader(Rows(), 7, num_workers=1, persistent_workers=True)
    with caplog.at_level(logging.WARNING, "dissensus"):
        fitted({"objective": Generating()}, checkpoint=tmp_path / "objective", checkpoint_seconds=0.0)
        fitted({"source": loader}, checkpoint=tmp_path / "loader", checkpoint_seconds=0.0)
    first, second = [entry.getMessage() for entry in caplog.records if "do not store" in entry.getMessage()]
    assert "training changes `weight` of Generating, which checkpoints do not store" in first
    assert "persistent workers" in second


def test_an_objective_may_refer_to_the_ensemble_that_it_trains(tmp_path):
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M, backend="loop")

    def decayed(outputs, targets):
        assert len(list(ensemble.parameters())) > 1
        return mse(outputs, targets)

    options = {"epochs": 1, "batch_size": 8, "checkpoint": tmp_path, "resume": True}
    ds.fit(ensemble, data(), decayed, **options)
    before, ensemble = ensemble, ds.Ensemble(NETWORKS["mlp"][0], M, backend="loop")
    ds.fit(ensemble, data(), decayed, **options)
    assert_identical(ensemble, before)


def gained(gain):
    def build():
        network = NETWORKS["mlp"][0]()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(gain)
        return network

    return build


def test_other_initial_weights_are_refused(tmp_path):
    options = {"epochs": 1, "batch_size": 8, "checkpoint": tmp_path, "resume": True}
    ensemble = ds.Ensemble(gained(1.0), M, backend="loop")
    ds.fit(ensemble, data(), mse, **options)
    for other in (ensemble, ds.Ensemble(gained(2.0), M, backend="loop")):
        with pytest.raises(ds.StorageError, match="'initial weights' differ.*Begin with the ensemble as it was before"):
            ds.fit(other, data(), mse, **options)
    ds.fit(ds.Ensemble(gained(1.0), M, backend="loop"), data(), mse, **options)
    networks, options["checkpoint"] = [gained(1.0)(), gained(1.0)()], tmp_path / "modules"
    ds.fit(ds.Ensemble.from_modules(networks), data(), mse, **options)
    with pytest.raises(ds.StorageError, match="'initial weights' differ"):
        ds.fit(ds.Ensemble.from_modules(networks[::-1]), data(), mse, **options)


DIFFERENCES = {
    "deterministic": ({"deterministic": True}, "'deterministic' differ ('deterministic' was False and is True)"),
    "epochs": ({"epochs": 7}, "'epochs' differ ('epochs' was 6 and is 7)"),
    "validation": ({"validation": 0.3}, "'validation' differ ('validation' was 0.2 and is 0.3)"),
    "seed": ({"seed": 1}, "'seed' differ ('seed' was 0 and is 1)"),
    "track": ({"track": {"error": lambda outputs, targets: 1.0}}, "'track' differ"),
    "learning rates": ({"lr": [0.1, 0.2, 0.1]}, "'lr' differ ('lr' was 0.001 and is [0.1, 0.2, 0.1])"),
}


def test_an_error_names_the_setting_that_differs_and_its_values(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, 5, validation=0.2)
    for changes, message in DIFFERENCES.values():
        with pytest.raises(ds.StorageError, match=re.escape(f"belongs to another training: {message}")):
            run(tmp_path, resume=True, **{"validation": 0.2, **changes})


def test_another_backend_is_refused(tmp_path):
    options = {"epochs": 1, "batch_size": 8, "checkpoint": tmp_path, "resume": True}
    ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M, backend="loop"), data(), mse, **options)
    with pytest.raises(ds.StorageError, match="'backend' differ"):
        ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M, backend="vmap"), data(), mse, **options)


def test_checkpoints_remove_only_what_they_have_written(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-notes" / "n.txt").write_text("mine")
    run(tmp_path / "step-inner", epochs=1)
    inner = sorted(path.name for path in (tmp_path / "step-inner").glob("step-*/manifest.json"))
    saved = ds.Ensemble(NETWORKS["mlp"][0], 2)
    ours = ["step-000000005", "step-0000005", "step-000000001-000001"]
    for name in ours:
        saved.save(tmp_path / name)
    killed = tmp_path / "step-000000000-000000"
    (killed / ".0123456789abcdef.unfinished").mkdir(parents=True)
    noted = tmp_path / "step-000000003-000000"

    def note(moment):
        if noted.is_dir():
            (noted / "note.txt").write_text("mine")

    ensemble, _ = run(tmp_path, progress=note)
    assert (tmp_path / "step-notes" / "n.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "step-inner").glob("step-*/manifest.json")) == inner
    assert all(ds.Ensemble.load(tmp_path / name, NETWORKS["mlp"][0]).members == 2 for name in ours)
    assert not killed.exists()
    assert [path.name for path in noted.iterdir()] == ["note.txt"]
    again, _ = run(tmp_path, resume=True)
    assert_identical(again, ensemble)
    assert len(checkpoints.checkpoints_in(tmp_path)) == 2


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for name in ("step-999999999-000001", "step-1000000000-000001", "step-000000002-000001"):
        ds.storage.write_folder(tmp_path / name, checkpoints.KIND, {"x": torch.ones(1)}, {})
    names = [path.name for path in checkpoints.checkpoints_in(tmp_path)]
    assert names == ["step-000000002-000001", "step-999999999-000001", "step-1000000000-000001"]


def test_a_folder_that_was_there_stays_after_a_training_that_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr(ds.storage, "write_folder", full)
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        with pytest.raises(OSError, match="no space"):
            run(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]

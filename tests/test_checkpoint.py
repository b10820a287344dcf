"""Checkpoints: killed at any moment, a training goes on bit for bit."""

import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from networks import NETWORKS
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.train import checkpoint as checkpoints

M = 3
mse = partial(ds.objectives.independent, loss="mse")


class Interrupted(Exception):
    pass


def data(n=24):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 3, generator=generator)


def weights(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


def interrupting(steps):
    """An objective that stops training with an error at a step."""
    count = [0]

    def objective(outputs, targets):
        count[0] += 1
        if count[0] > steps:
            raise Interrupted
        return mse(outputs, targets)

    objective.__qualname__ = "objective"
    return objective


def run(folder, steps=10**9, name="two_dropouts", source=None, **options):
    ensemble = ds.Ensemble(NETWORKS[name][0], M, backend="loop")
    settings = {"epochs": 6, "batch_size": 7, "checkpoint": folder, "checkpoint_seconds": 0.0, **options}
    history = ds.fit(ensemble, source or data(), interrupting(steps), **settings)
    return ensemble, history


@pytest.mark.parametrize("kind", ["fit", "sweep"])
def test_killed_ten_times_it_ends_bit_for_bit_as_if_it_had_not_been(kind, tmp_path):
    script = Path(__file__).with_name("kill_and_resume.py")
    command = [sys.executable, str(script), kind, str(tmp_path / "kept"), "1"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert found["kills"] >= 10
    assert found["result"] == found["expected"]
    assert found["result"]["parts"] == (1 if kind == "fit" else 2)


@pytest.mark.parametrize("name", ["mlp", "two_dropouts", "norm_first"])
@pytest.mark.parametrize("steps", [1, 4, 9, 23])
def test_an_interrupted_fit_resumes_exactly(name, steps, tmp_path):
    expected, told = run(None, name=name, checkpoint_seconds=None, validation=0.2)
    with pytest.raises(Interrupted):
        run(tmp_path, steps, name=name, validation=0.2)
    resumed, history = run(tmp_path, name=name, resume=True, validation=0.2)
    own, other = weights(resumed), weights(expected)
    assert all(torch.equal(own[key], other[key]) for key in own)
    assert history.column("loss") == told.column("loss")
    assert history.column("validation") == told.column("validation")
    assert history.steps == told.steps


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
        ds.fit(fresh(), loader, interrupting(9), **saving)
    epochs = [json.loads((path / "manifest.json").read_text())["facts"]["in_epoch"] for path in tmp_path.iterdir()]
    assert epochs == [0, 0], "a foreign loader can only start at an epoch's beginning"
    ds.fit(resumed, loader, interrupting(10**9), resume=True, **saving)
    own, other = weights(resumed), weights(expected)
    assert all(torch.equal(own[key], other[key]) for key in own)


def test_the_last_two_are_kept_and_a_corrupt_one_is_passed_over(tmp_path, caplog):
    expected, _ = run(None, checkpoint_seconds=None)
    with pytest.raises(Interrupted):
        run(tmp_path, 9)
    _, newest = sorted(tmp_path.iterdir())
    (file,) = newest.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "dissensus"):
        resumed, _ = run(tmp_path, resume=True)
    assert any("passed over" in record.getMessage() and "truncated" in record.getMessage() for record in caplog.records)
    own, other = weights(resumed), weights(expected)
    assert all(torch.equal(own[key], other[key]) for key in own)
    for path in tmp_path.iterdir():
        (path / "manifest.json").write_text("{")
    with pytest.raises(ds.StorageError, match="no checkpoint in .* is whole"):
        run(tmp_path, resume=True)


def test_a_finished_training_is_not_trained_again(tmp_path):
    done, _ = run(tmp_path)
    again, history = run(tmp_path, steps=0, resume=True)
    own, other = weights(again), weights(done)
    assert all(torch.equal(own[key], other[key]) for key in own)
    assert len(history.epochs) == 6


def test_another_training_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, 5)
    with pytest.raises(ValueError, match="pass resume=True to go on"):
        run(tmp_path)
    with pytest.raises(ds.StorageError, match="belongs to another training: 'epochs', 'lr' differ"):
        run(tmp_path, resume=True, epochs=7, lr=0.5)
    with pytest.raises(ds.StorageError, match="'data' differ"):
        run(tmp_path, resume=True, source=data(25))


def test_the_default_interval_keeps_the_cost_under_two_percent(tmp_path, monkeypatch, unchecked):
    now = [0.0]
    monkeypatch.setattr(checkpoints.time, "perf_counter", lambda: now[0])
    saver = checkpoints.Checkpointer(tmp_path, {})

    class Feed:
        resumable = True

    class Engine:
        in_epoch, feed = 0, Feed()

    writes = []

    def write(engine):
        writes.append(now[0])
        start, now[0] = now[0], now[0] + 3.0  # a slow disk
        saver.written, saver.cost = now[0], now[0] - start

    monkeypatch.setattr(saver, "write", write)
    while now[0] < 10_000:
        saver(Engine())
        now[0] += 1.0
    assert writes[0] == pytest.approx(10.0)
    assert 0.01 < 3.0 * len(writes) / now[0] <= 0.02


def test_threads_and_backend_come_back(tmp_path, caplog):
    with pytest.raises(Interrupted):
        run(tmp_path, 5)
    manifest = next(tmp_path.iterdir()) / "manifest.json"
    assert json.loads(manifest.read_text())["choices"] == [[["loop", True, True, False, "cpu"], "loop"]]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with caplog.at_level(logging.WARNING, "dissensus"):
            run(tmp_path, resume=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert any("using 1 threads" in record.getMessage() for record in caplog.records)

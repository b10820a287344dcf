"""Callbacks, the bar, and logs: what they see, what stops, and what is left after errors and resumes."""

import csv
import inspect
import io
import json
import re
import sys
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import NETWORKS
from recording import Captures, recorded

import dissensus as ds
from dissensus.train import bar, capture

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin()
LABELS = (X[:, 0] > 0).long()
build = partial(ds.nets.mlp, 6, 1, (4,))
augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score")
OPTIONS = {"epochs": 5, "batch_size": 10, "lr": 1e-2}


class Recorder:
    """Keeps all entries, and stops where it is told to."""

    def __init__(self, stop_epoch=None, stop_step=None, run=None):
        self.epochs, self.steps = [], []
        self.stop_epoch, self.stop_step, self.run = stop_epoch, stop_step, run

    def on_epoch(self, entry):
        self.epochs.append(entry)
        return entry["epoch"] == self.stop_epoch and self.run in (None, entry.get("run"))

    def on_step(self, entry):
        self.steps.append(entry)
        return entry["step"] == self.stop_step and self.run in (None, entry.get("run"))


def fit(ensemble=None, **options):
    ensemble = ds.Ensemble(build, 2, backend="loop") if ensemble is None else ensemble
    return ensemble, ds.fit(ensemble, (X, Y), partial(augmented, beta=0.5), **{**OPTIONS, **options})


def sweep(**options):
    settings = {"grid": {"beta": [0.0, 0.5], "seed": [0, 1]}, "members": 2, "backend": "loop"}
    return ds.sweep(build, (X, Y), augmented, **{**OPTIONS, **settings, **options})


def weights(ensemble):
    return torch.cat([parameter.detach().flatten() for parameter in ensemble.parameters()])


# What callbacks see


@pytest.mark.parametrize("validation", [None, 0.2])
def test_a_fit_gives_every_number_of_its_history(validation):
    recorder, functions = Recorder(), []
    _, history = fit(validation=validation, batch_size=8, callbacks=[recorder, functions.append])
    assert recorder.epochs == functions == history.epochs
    assert ("validation" in recorder.epochs[0]) == (validation is not None)
    assert [entry["step"] for entry in recorder.steps] == list(range(1, history.steps + 1))
    for epoch in history.epochs:  # all batches have one size, so an epoch's means are the means of its steps
        mine = [step for step in recorder.steps if step["epoch"] == epoch["epoch"]]
        for name in ("loss", "individual", "diversity"):
            assert np.mean([step[name] for step in mine]) == pytest.approx(epoch[name], rel=1e-5)
        assert np.mean([step["member_loss"] for step in mine], 0) == pytest.approx(epoch["member_loss"], rel=1e-5)


def test_a_step_has_the_loss_of_its_own_batch():
    recorder = Recorder()
    ensemble = ds.Ensemble(build, 2, backend="loop")
    with torch.no_grad():
        parts = augmented(ensemble(X[:30]), Y[:30], beta=0.5)
    fit(ensemble, epochs=1, batch_size=30, shuffle=False, schedule="cosine", callbacks=[recorder])
    first = recorder.steps[0]
    assert first["loss"] == pytest.approx(float(parts.total) / 2)
    assert first["member_loss"] == pytest.approx(parts.parts["member_loss"].tolist())
    assert [step["lr"] for step in recorder.steps] == pytest.approx([1e-2, 5e-3])


@pytest.mark.parametrize(
    "options",
    [
        {"weights": torch.rand(40)},
        {"active_members": 1},
        {"accumulate": 3},
        {"optimizer": partial(torch.optim.SGD, lr=0.1), "lr": None},
    ],
    ids=["weights", "active", "accumulate", "own optimizer"],
)
def test_steps_average_to_epochs_by_their_examples(options):
    recorder = Recorder()
    _, history = fit(epochs=2, batch_size=16, callbacks=[recorder], **options)
    if "weights" not in options:
        sizes = [16, 16, 8]
        for epoch in history.epochs:
            mine = [step["loss"] for step in recorder.steps if step["epoch"] == epoch["epoch"]]
            assert np.average(mine, weights=sizes) == pytest.approx(epoch["loss"], rel=1e-5)
    assert len(recorder.steps) == 6
    assert np.isfinite([step["loss"] for step in recorder.steps]).all()


def test_callbacks_change_nothing_of_the_training():
    plain, history = fit(validation=0.2)
    watched, same = fit(validation=0.2, callbacks=[Recorder()], progress=True)
    assert torch.equal(weights(plain), weights(watched))
    assert history.column("loss") == same.column("loss")


def test_what_a_callback_writes_into_its_entry_stays_there():
    def spoil(entry):
        entry["loss"] = -1.0
        entry["member_loss"][0] = -1.0

    recorder = Recorder()
    _, history = fit(callbacks=[spoil, recorder])
    assert recorder.epochs == history.epochs
    assert min(history.column("loss")) > 0


def test_entries_of_a_sweep_name_run_and_point():
    recorder = Recorder()
    swept = sweep(validation=0.2, grid={"beta": [0.0, 0.5], "batch_size": [10, 20]}, callbacks=[recorder])
    for run, point in enumerate(swept.points):
        mine = [entry for entry in recorder.epochs if entry["run"] == run]
        assert all(entry["point"] == point for entry in mine)
        kept = [{name: value for name, value in e.items() if name not in ("run", "point")} for e in mine]
        assert kept == swept.history(run).epochs
        steps = [entry["step"] for entry in recorder.steps if entry["run"] == run]
        assert steps == list(range(1, swept.history(run).steps + 1))


def test_entries_of_a_twin_say_so():
    recorder = Recorder(stop_epoch=3)
    _, history = fit(twin=True, callbacks=[recorder])
    assert [entry["twin"] for entry in recorder.epochs] == [False] * 3 + [True] * 3
    assert history.stopped_by == history.twin_history.stopped_by == "Recorder"
    only_twin = []
    _, history = fit(twin=True, callbacks=[lambda entry: only_twin.append(entry) or entry["twin"]])
    assert (len(history.epochs), len(history.twin_history.epochs)) == (5, 1)
    assert history.stopped_by is None


def test_entries_of_a_sequential_training_name_the_member():
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 6, 2, (4,)), 3)
    recorder = Recorder(stop_epoch=2)
    options = {"sequential": True, "unlabelled": X, "callbacks": [recorder]}
    history = ds.fit(ensemble, (X, LABELS), partial(ds.objectives.a2d, strength=0.1), **OPTIONS, **options)
    assert [(entry["member"], entry["epoch"]) for entry in recorder.epochs] == [
        (m, e) for m in range(3) for e in (1, 2)
    ]
    assert history.stopped_by == "Recorder"
    assert history.seed == 0


# Stopping


def yes(entry):
    return True


@pytest.mark.parametrize(
    ("callback", "name"),
    [(yes, "yes"), (partial(yes), "yes"), (Recorder(stop_epoch=1), "Recorder"), (lambda entry: np.True_, "<lambda>")],
    ids=["function", "partial", "object", "numpy"],
)
def test_true_stops_and_is_recorded(callback, name):
    _, history = fit(callbacks=[callback])
    assert len(history.epochs) == 1
    assert history.stopped_early
    assert history.stopped_by.endswith(name)
    assert f"stopped early by {history.stopped_by}" in str(history)
    assert json.loads(history.to_json())["stopped_by"] == history.stopped_by


@pytest.mark.parametrize("answer", [None, False, 1, "stop", [True], torch.tensor(1.0), torch.tensor([True])], ids=repr)
def test_other_answers_stop_nothing(answer):
    _, history = fit(callbacks=[lambda entry: answer])
    assert (len(history.epochs), history.stopped_by) == (5, None)


def test_a_tensor_that_is_true_stops():
    assert len(fit(callbacks=[lambda entry: torch.tensor(entry["epoch"]) == 2])[1].epochs) == 2


def test_a_stop_at_the_last_epoch_is_no_stop():
    _, history = fit(callbacks=[Recorder(stop_epoch=5)])
    assert (history.stopped_early, history.stopped_by) == (False, None)


def test_all_callbacks_are_called_and_the_first_that_stops_is_named():
    last = Recorder()
    _, history = fit(callbacks=[yes, Recorder(stop_epoch=1), last])
    assert len(last.epochs) == 1
    assert history.stopped_by == "yes"


def test_weights_after_a_stop_are_the_last_ones_or_the_best():
    short, _ = fit(epochs=3)
    stopped, _ = fit(callbacks=[Recorder(stop_epoch=3)])
    assert torch.equal(weights(short), weights(stopped))
    rising = iter([1.0, 0.5, 0.7, 0.9, 0.1])
    options = {"validation": 0.2, "metric": lambda outputs, targets: next(rising), "mode": "min"}
    stopped, history = fit(callbacks=[Recorder(stop_epoch=4)], **options)
    assert history.best_epoch == 2
    two, _ = fit(epochs=2, validation=0.2, keep="last")
    assert torch.equal(weights(two), weights(stopped))


def test_a_stop_in_the_middle_of_an_epoch():
    kept = []

    class Watcher(Recorder):
        def on_step(self, entry):
            kept.append(weights(ensemble).clone())
            return super().on_step(entry)

    ensemble = ds.Ensemble(build, 2, backend="loop")
    _, history = fit(ensemble, callbacks=[Watcher(stop_step=6)])
    assert (len(history.epochs), history.steps) == (1, 6)
    assert history.stopped_by.endswith("Watcher")
    assert torch.equal(weights(ensemble), kept[-1])
    best, history = fit(validation=0.2, callbacks=[Recorder(stop_step=9)])
    one, _ = fit(validation=0.2, epochs=1)
    two, _ = fit(validation=0.2, epochs=2)
    assert torch.equal(weights(best), weights({1: one, 2: two}[history.best_epoch]))


@pytest.mark.parametrize("at", [{"stop_epoch": 2}, {"stop_step": 6}], ids=["epoch", "step"])
@pytest.mark.parametrize("validation", [None, 0.2])
def test_a_stopped_run_of_a_sweep_leaves_the_others_alone(at, validation):
    whole = sweep(validation=validation)
    swept = sweep(validation=validation, callbacks=[Recorder(run=1, **at)])
    row = swept.table(frame=False)[1]
    assert (row["status"], row["reason"]) == ("stopped early", "stopped by Recorder")
    alone = Recorder(**at)
    ensemble, history = ds.Ensemble(build, 2, seed=1, backend="loop"), None
    history = ds.fit(
        ensemble, (X, Y), partial(augmented, beta=0.0), seed=1, validation=validation, callbacks=[alone], **OPTIONS
    )
    assert swept.history(1).steps == history.steps
    assert swept.history(1).best_epoch == history.best_epoch
    torch.testing.assert_close(weights(swept.run(1)), weights(ensemble))
    for run in (0, 2, 3):
        torch.testing.assert_close(weights(swept.run(run)), weights(whole.run(run)))
        assert swept.history(run).stopped_by is None


def test_a_sweep_whose_runs_are_all_stopped_in_an_epoch():
    recorder = Recorder(stop_step=2)
    swept = sweep(callbacks=[recorder])
    assert {len(swept.history(run).epochs) for run in range(4)} == {0}
    assert {swept.history(run).steps for run in range(4)} == {2}
    assert len(recorder.steps) == 8


# Captured steps


@pytest.fixture
def replays(monkeypatch):
    counts = Captures()
    counts.capture = recorded

    def switch(on):
        steps = (lambda engine: capture.GraphSteps(lambda: counts)) if on else (lambda engine: None)
        monkeypatch.setattr("dissensus.train.recipe.graph_steps", steps)

    switch.counts = counts
    return switch


@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm"])
def test_captured_steps_are_reported_as_eager_ones(name, replays):
    make, shape = NETWORKS[name]
    x, y = torch.randn(45, *shape).double(), torch.randn(45, 3).double()
    recorders = []
    for on in (False, True):
        replays(on)
        recorders.append(Recorder())
        ensemble = ds.Ensemble(make, 2, backend="loop").double()
        ds.fit(ensemble, (x, y), partial(augmented, beta=0.5), epochs=4, batch_size=8, callbacks=[recorders[-1]])
    assert replays.counts.replays > 0
    eager, captured = recorders
    assert len(captured.steps) == len(eager.steps) == 4 * 6
    for one, other in zip(eager.steps, captured.steps, strict=True):
        assert {n: one[n] for n in ("step", "epoch", "lr")} == {n: other[n] for n in ("step", "epoch", "lr")}
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert other["member_loss"] == pytest.approx(one["member_loss"], rel=1e-9)


def test_a_run_that_is_stopped_between_captured_steps_stands_still(replays):
    make, shape = NETWORKS["cnn_batch_norm"]
    x, y = torch.randn(80, *shape).double(), torch.randn(80, 3).double()
    options = {"grid": {"beta": [0.0, 0.5]}, "members": 2, "epochs": 3, "batch_size": 8, "backend": "loop"}
    results = []
    for on in (False, True):
        replays(on)
        recorder = Recorder(stop_step=15, run=0)
        results.append(ds.sweep(make, (x, y), augmented, callbacks=[recorder], **options))
        assert [e["step"] for e in recorder.steps if e["run"] == 0] == list(range(1, 16))
    assert replays.counts.replays > 0
    for run in range(2):
        eager, captured = (result.run(run).body.tensors() for result in results)
        for name in eager:  # batch-norm statistics included
            torch.testing.assert_close(captured[name], eager[name], rtol=1e-7, atol=1e-9, msg=f"{run} {name}")


def test_a_run_that_fails_between_captured_steps_is_not_reported(replays):
    recorders = []
    for on in (False, True):
        replays(on)
        recorders.append(Recorder())
        swept = sweep(
            optimizer="sgd",
            lr=None,
            grid={"lr": [1e-2, 1e8], "beta": [0.5]},
            epochs=3,
            callbacks=[recorders[-1]],
            batch_size=5,
        )
        assert [outcome.status for outcome in swept.outcomes] == ["done", "failed"]
        assert all(np.isfinite(step["loss"]) for step in recorders[-1].steps)
    seen = [[(step["run"], step["step"]) for step in recorder.steps] for recorder in recorders]
    assert seen[0] == seen[1]


# Errors


class Broken:
    """Raises an error at an epoch or a step."""

    def __init__(self, error, epoch=None, step=None):
        self.error, self.epoch, self.step = error, epoch, step

    def on_epoch(self, entry):
        if entry["epoch"] == self.epoch:
            raise self.error

    def on_step(self, entry):
        if entry["step"] == self.step:
            raise self.error


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("at", [{"epoch": 3}, {"step": 10}], ids=["epoch", "step"])
@pytest.mark.parametrize("validation", [None, 0.2])
def test_an_error_leaves_the_weights_so_far_and_the_checkpoint(error, at, validation, tmp_path):
    whole, history = fit(validation=validation)
    ensemble = ds.Ensemble(build, 2, backend="loop")
    saving = {"validation": validation, "checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(type(error)):
        fit(ensemble, callbacks=[Broken(error, **at)], **saving)
    if "epoch" in at and validation is None:
        assert torch.equal(weights(ensemble), weights(fit(epochs=3)[0]))
    assert not torch.equal(weights(ensemble), weights(ds.Ensemble(build, 2)))
    recorder = Recorder()
    _, resumed = fit(ensemble, resume=True, callbacks=[recorder], **saving)
    assert torch.equal(weights(ensemble), weights(whole))
    assert resumed.column("loss") == history.column("loss")
    assert [entry["epoch"] for entry in recorder.epochs] == [3, 4, 5]


def test_an_error_at_the_start_changes_nothing():
    class Refusing(Recorder):
        def on_start(self, start):
            raise ValueError("not this one")

    ensemble = ds.Ensemble(build, 2, backend="loop")
    before = weights(ensemble).clone()
    with pytest.raises(ValueError, match="not this one"):
        fit(ensemble, callbacks=[Refusing()])
    assert torch.equal(weights(ensemble), before)
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in ensemble.parameters())
    fitted, _ = fit(ensemble)
    assert torch.equal(weights(fitted), weights(fit()[0]))


@pytest.mark.parametrize("train", [fit, sweep])
@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (Recorder(), r"One callback\? Put it into a list\."),
        ([Recorder], r"the class Recorder. Create one: Recorder\(...\)"),
        ([3], r"objects with a method on_epoch\(entry\) or on_step\(entry\), or functions of an entry; got 3"),
        ("abc", "must be a list of callbacks"),
        ([lambda: None], r"functions of an entry; got <lambda>\(\)\. Use .*\(entry\)"),
        (
            [types.SimpleNamespace(on_step=lambda trainer, module: None)],
            r"got <lambda>\(trainer, module\)\. Use def on_step",
        ),
    ],
)
def test_what_is_no_callback_is_refused(train, callbacks, words):
    with pytest.raises(TypeError, match=words):
        train(callbacks=callbacks)


def test_a_callback_without_a_signature_is_taken():
    entries = {}
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(entries.update)
    fit(callbacks=[entries.update])
    assert entries["epoch"] == OPTIONS["epochs"]


def test_a_callback_twice_is_refused():
    recorder = Recorder()
    with pytest.raises(ValueError, match="`callbacks` must hold every object once; got Recorder twice"):
        fit(callbacks=[recorder, yes, recorder])
    assert not recorder.epochs


# Resumes


@pytest.mark.parametrize("at", [{"stop_epoch": 3}, {"stop_step": 9}], ids=["epoch", "step"])
def test_a_training_that_was_stopped_is_done_when_it_is_resumed(at, tmp_path):
    options = {"checkpoint": tmp_path, "checkpoint_seconds": 0}
    ensemble, history = fit(callbacks=[Recorder(**at)], **options)
    again, resumed = fit(callbacks=[Recorder()], resume=True, **options)
    assert (resumed.stopped_by, resumed.steps) == (history.stopped_by, history.steps) == ("Recorder", resumed.steps)
    assert torch.equal(weights(ensemble), weights(again))


def test_callbacks_and_progress_are_no_part_of_a_trainings_identity(tmp_path):
    options = {"checkpoint": tmp_path, "resume": True}
    fit(callbacks=[Recorder()], **options)
    fit(callbacks=[print], progress=True, **options)
    with pytest.raises(ds.StorageError, match="'seed' was 0 and is 3"):
        fit(seed=3, **options)


def interrupted(train, log, folder, callback):
    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[log, callback], checkpoint=folder, checkpoint_seconds=1000)


READERS = {
    "csv": (ds.callbacks.CSVLog, lambda path: list(csv.DictReader(path.read_text().splitlines()))),
    "json": (ds.callbacks.JSONLines, lambda path: list(map(json.loads, path.read_text().splitlines()))),
}


@pytest.fixture(params=READERS)
def log(request, tmp_path):
    make, read = READERS[request.param]
    path = tmp_path / "logs" / f"log.{request.param}"
    return types.SimpleNamespace(make=partial(make, path), read=lambda: read(path), path=path, kind=request.param)


def test_a_log_holds_the_history(log):
    lines = []
    _, history = fit(validation=0.2, callbacks=[log.make(), lambda entry: lines.append(len(log.read()))])
    assert lines == [1, 2, 3, 4, 5], "flushed at every epoch"
    rows = log.read()
    if log.kind == "json":
        assert rows == history.epochs
    else:
        expected = [ds.callbacks.flattened(entry) for entry in history.epochs]
        assert [{name: float(value) for name, value in row.items()} for row in rows] == expected
        assert "member_loss.1" in rows[0]


@pytest.mark.parametrize("change", ["two logs", "deleted", "cut off"])
def test_a_log_is_whole_whatever_happens_to_its_file(change, log):
    def spoil(entry):
        if entry["epoch"] == 3 and change == "deleted":
            log.path.unlink()
        if entry["epoch"] == 3 and change == "cut off":
            log.path.write_text(log.path.read_text()[:-20])

    logs = [log.make() for _ in range(2 if change == "two logs" else 1)]
    _, history = fit(callbacks=[*logs, spoil])
    assert [(int(row["epoch"]), float(row["loss"])) for row in log.read()] == [
        (entry["epoch"], entry["loss"]) for entry in history.epochs
    ]


@pytest.mark.parametrize("checkpoints", ["every step", "the beginning only"])
@pytest.mark.parametrize("train", [fit, sweep])
def test_a_log_goes_on_after_a_resume_without_an_epoch_twice(train, checkpoints, log, tmp_path):
    saving = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0 if checkpoints == "every step" else 1000}
    whole = []
    train(callbacks=[whole.append])
    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[log.make(), Broken(KeyboardInterrupt(), epoch=4)], **saving)
    assert max(int(row["epoch"]) for row in log.read()) == 4
    train(callbacks=[log.make()], resume=True, **saving)
    rows = [(str(row.get("run")), int(row["epoch"]), float(row["loss"])) for row in log.read()]
    assert sorted(rows) == sorted((str(e.get("run")), e["epoch"], e["loss"]) for e in whole)
    before = log.path.read_text()
    train(callbacks=[log.make()], resume=True, **saving)  # done already
    assert log.path.read_text() == before


def test_a_log_gets_the_epochs_before_the_resume_from_the_checkpoint(log, tmp_path):
    saving = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[Broken(KeyboardInterrupt(), epoch=4)], **saving)
    fit(callbacks=[log.make()], resume=True, **saving)
    assert [int(row["epoch"]) for row in log.read()] == [1, 2, 3, 4, 5]


def test_a_line_that_was_cut_off_is_written_again(log, tmp_path):
    saving = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[log.make(), Broken(KeyboardInterrupt(), epoch=3)], **saving)
    log.path.write_text(log.path.read_text()[:-9])
    fit(callbacks=[log.make()], resume=True, **saving)
    assert [int(row["epoch"]) for row in log.read()] == [1, 2, 3, 4, 5]


FOREIGN = ["a,b\n1,2\n", "some notes\n", '{"a": 1}\n', "epoch,loss\n1,0.5\n", '{"epoch": 1, "loss": 0.5}\n', "x"]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_something_else_is_refused_before_anything_is_trained(content, log, tmp_path):
    log.path.parent.mkdir()
    log.path.write_text(content)
    ensemble = ds.Ensemble(build, 2)
    before = weights(ensemble).clone()
    with pytest.raises(ValueError, match="`path` must be a new file, or the log of this training"):
        fit(ensemble, callbacks=[log.make()], checkpoint=tmp_path / "run")
    assert log.path.read_text() == content
    assert torch.equal(weights(ensemble), before)
    assert not (tmp_path / "run").exists()


def test_the_log_of_another_training_is_refused_also_on_a_resume(log, tmp_path):
    saving = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    fit(callbacks=[log.make()])
    with pytest.raises(ValueError, match="an earlier training's"):
        fit(callbacks=[log.make()])
    with pytest.raises(KeyboardInterrupt):
        fit(lr=1e-3, callbacks=[Broken(KeyboardInterrupt(), epoch=3)], **saving)
    with pytest.raises(ValueError, match="another training's"):
        fit(lr=1e-3, callbacks=[log.make()], resume=True, **saving)
    fit(lr=1e-3, callbacks=[log.make(overwrite=True)], epochs=2)
    assert len(log.read()) == 2


def test_a_log_of_a_sweep_with_points_and_of_a_twin(log):
    sweep(grid={"beta": [0.5], "lr": [1e-3, 1e-2], "batch_size": [10, 20]}, callbacks=[log.make()])
    rows = log.read()
    assert len(rows) == 20
    row = next(row for row in rows if int(row["run"]) == 2 and int(row["epoch"]) == 1)
    point = row["point"] if log.kind == "json" else {n: float(row[f"point.{n}"]) for n in ("beta", "lr", "batch_size")}
    assert point == {"beta": 0.5, "lr": 1e-2, "batch_size": 10}
    fit(twin=True, callbacks=[log.make(overwrite=True)], epochs=2)
    assert [str(row["twin"]) for row in log.read()] == ["False"] * 2 + ["True"] * 2


def test_columns_that_appear_later_are_added(log):
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 6, 2, (4,)), 3)
    options = {"sequential": True, "unlabelled": X, "callbacks": [log.make()]}
    history = ds.fit(ensemble, (X, LABELS), partial(ds.objectives.a2d, strength=0.1), **OPTIONS, **options)
    rows = log.read()
    assert [(int(row["member"]), float(row["loss"])) for row in rows] == [
        (e["member"], e["loss"]) for e in history.epochs
    ]
    if log.kind == "csv":
        assert rows[0]["member_loss.2"] == "" != rows[-1]["member_loss.2"]


def test_numbers_that_json_lacks_are_null(tmp_path):
    log = ds.callbacks.JSONLines(tmp_path / "log")
    log.on_epoch({"epoch": 1, "loss": float("inf"), "parts": [float("nan"), 1.0], "build": print})
    assert json.loads((tmp_path / "log").read_text()) == {
        "epoch": 1,
        "loss": None,
        "parts": [None, 1.0],
        "build": "print",
    }


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="`path` must be a file; got the folder"):
        ds.callbacks.CSVLog(tmp_path)


# TensorBoard


@pytest.fixture
def events(monkeypatch):
    """A stand-in for torch's writer, which keeps what it is given."""
    written = []

    class SummaryWriter:
        def __init__(self, log_dir, purge_step=None):
            self.folder = Path(log_dir)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "events.out.tfevents.0").touch()
            written.append(("purge", self.folder.name, purge_step))

        def add_scalar(self, tag, value, step):
            written.append((tag, self.folder.name, step, value))

        def add_text(self, tag, text):
            written.append((tag, self.folder.name, text))

        def flush(self):
            written.append(("flush", self.folder.name))

        def close(self):
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return written


def test_tensorboard_gets_every_number(events, tmp_path):
    _, history = fit(validation=0.2, callbacks=[ds.callbacks.TensorBoard(tmp_path / "board")])
    scalars = {(event[0], event[2]): event[3] for event in events if len(event) == 4}
    for entry in history.epochs:
        assert scalars["validation", entry["epoch"]] == entry["validation"]
        assert scalars["member_loss/1", entry["epoch"]] == entry["member_loss"][1]
    assert events.count(("flush", "board")) == 5
    with pytest.raises(ValueError, match="`folder` must have no events of an earlier training"):
        fit(callbacks=[ds.callbacks.TensorBoard(tmp_path / "board")])


def test_tensorboard_has_a_folder_per_run_and_hides_epochs_that_are_trained_again(events, tmp_path):
    saving = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    board = tmp_path / "board"
    with pytest.raises(KeyboardInterrupt):
        sweep(callbacks=[ds.callbacks.TensorBoard(board), Broken(KeyboardInterrupt(), epoch=3)], **saving)
    assert sorted(path.name for path in board.iterdir()) == [f"run-000{run}" for run in range(4)]
    assert ("point", "run-0001", "{'beta': 0.0, 'seed': 1}") in events
    events.clear()
    sweep(callbacks=[ds.callbacks.TensorBoard(board)], resume=True, **saving)
    assert ("purge", "run-0000", 3) in events
    assert {event[2] for event in events if len(event) == 4} == {3, 4, 5}


def test_a_missing_tensorboard_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        ds.callbacks.TensorBoard(tmp_path)


def test_the_documented_lines_for_other_services_run(monkeypatch):
    logged = {"wandb": [], "mlflow": []}
    wandb, mlflow = types.ModuleType("wandb"), types.ModuleType("mlflow")
    wandb.init = lambda **options: types.SimpleNamespace(
        log=lambda numbers, step: logged["wandb"].append((step, numbers)), finish=lambda: None
    )
    mlflow.log_metrics = lambda numbers, step: logged["mlflow"].append((step, numbers))
    for module in (wandb, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    blocks = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 2
    names = {"ds": ds, "partial": partial, "x": X, "y": Y, "build": build, "objective": augmented}
    for block in blocks:
        exec(block, names)
    for entries in logged.values():
        assert [step for step, _ in entries] == [1, 2, 3]
        assert all(isinstance(value, int | float) for _, numbers in entries for value in numbers.values())
        assert "member_loss.0" in entries[0][1]


# The bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=["rich", "plain"])
def terminal(request, monkeypatch):
    """Make stderr a terminal. (It is called in a test, because pytest puts its own stderr back after fixtures.)"""

    def stream():
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(bar, "_SECONDS_BETWEEN_DRAWINGS", 0.0)
    monkeypatch.setattr("dissensus.train.engine._SECONDS_BETWEEN_REPORTS", 0.0)
    return stream


def shown(stream):
    """What a terminal shows in the end: carriage returns, moves up and erased lines are carried out."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\r\n\x1b]+", stream.getvalue()):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b["):
            if token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
            elif token.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize(("train", "summary"), [(fit, "trained: 5 epochs, 20 steps"), (sweep, "4 runs: 4 done")])
def test_the_bar_is_drawn_and_leaves_one_line(train, summary, terminal):
    drawn = terminal()
    train(progress=True)
    assert "epoch 3/5" in drawn.getvalue()
    assert "50%" in drawn.getvalue()
    (line,) = shown(drawn)
    assert line.startswith(summary)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("train", [fit, sweep])
def test_the_bar_is_gone_after_an_error(train, error, terminal):
    drawn = terminal()
    with pytest.raises(type(error)):
        train(progress=True, callbacks=[Broken(error, epoch=2)])
    assert "epoch 2/5" in drawn.getvalue()
    assert shown(drawn) == []
    hidden, visible = drawn.getvalue().rfind("\x1b[?25l"), drawn.getvalue().rfind("\x1b[?25h")
    assert visible >= hidden, "the cursor is shown again"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("I/O operation on closed file")])
@pytest.mark.parametrize("train", [fit, sweep])
def test_a_terminal_that_is_closed_ends_no_training(train, error, terminal, monkeypatch):
    stream, seen = terminal(), []

    def fail(text):
        raise error

    def close(entry):
        seen.append(entry["epoch"])
        if entry["epoch"] == 2:
            monkeypatch.setattr(stream, "write", fail)

    train(progress=True, callbacks=[close])
    assert "epoch 2/5" in stream.getvalue()
    assert max(seen) == 5
    assert sys.stderr is stream, "and not what rich has put in its place"


def test_settings_that_are_refused_draw_nothing(terminal):
    drawn = terminal()
    with pytest.raises(ValueError, match="batch_size"):
        fit(progress=True, batch_size=0)
    assert drawn.getvalue() == ""


def test_one_bar_for_a_twin_and_members_in_turn(terminal):
    drawn = terminal()
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 6, 2, (4,)), 3)
    options = {"sequential": True, "unlabelled": X, "twin": True, "progress": True}
    ds.fit(ensemble, (X, LABELS), partial(ds.objectives.a2d, strength=0.1), **OPTIONS, **options)
    shares = [int(share) for share in re.findall(r"(\d+)%", drawn.getvalue())]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert len(shown(drawn)) == 1


@pytest.mark.parametrize("train", [fit, sweep])
def test_no_bar_where_stderr_is_no_terminal(train, capsys):
    train(progress=True)
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "\x1b" in err) == ("", 1, False)
    train(progress=False)
    assert capsys.readouterr() == ("", "")


def test_the_bar_is_drawn_ten_times_a_second_at_most():
    class Counted:
        def __init__(self):
            self.drawn = 0

        def draw(self, moment):
            self.drawn += 1

        def erase(self):
            self.drawn = -1

    clock, counted = iter(float(i) / 1000 for i in range(10**6)), Counted()
    shower = bar.Bar(counted, lambda: next(clock))
    moment = ds.Progress(epoch=1, epochs=1, step=1, steps=1, loss=0.0, parts={}, member_loss=[], seconds=0.0)
    for _ in range(1000):  # one second
        shower(moment)
    assert 5 <= counted.drawn <= 11
    shower.close()
    assert counted.drawn == -1


def test_prints_go_to_a_file_that_stdout_is(terminal, capsys):
    terminal()
    fit(progress=True, callbacks=[lambda entry: print("epoch", entry["epoch"])])
    assert capsys.readouterr().out == "".join(f"epoch {epoch}\n" for epoch in range(1, 6))


@pytest.mark.parametrize("train", [fit, sweep])
def test_progress_is_true_false_or_a_function(train):
    with pytest.raises(TypeError, match="`progress` must be a function of one argument, a Progress, or True for a bar"):
        train(progress="yes")

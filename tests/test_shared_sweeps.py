"""Runs whose members train what they share are one computation, and equal separate fits."""

from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import adapters

objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
independent = partial(ds.objectives.independent, loss="cross_entropy")
M = 2


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 3


def build():
    """Shared weights that seeds draw, a batch norm and dropout of each member."""
    layers = nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
    return adapters.tabm(nn.Sequential(*layers).double())


OPTIONS = {"epochs": 5, "batch_size": 6, "weight_decay": 0.1}
GRID = [
    {"lr": 0.05, "shared_lr": 0.01, "seed": 0, "beta": 0.3, "clip_norm": 0.5, "shared_clip_norm": 0.1},
    {"lr": 0.01, "shared_lr": 0.08, "seed": 1, "beta": 0.0, "clip_norm": 2.0, "shared_clip_norm": 0.7},
    {"lr": 0.03, "shared_lr": 0.03, "seed": 0, "beta": 0.6, "clip_norm": 1.0, "shared_clip_norm": 0.3},
]


def alone(point, **options):
    ens = ds.Ensemble(build, M, seed=point["seed"], shared=adapters.SHARED, backend=options.pop("backend", "auto"))
    settings = {name: value for name, value in point.items() if name != "beta"}
    history = ds.fit(ens, data(), partial(objective, beta=point["beta"]), **settings, **{**OPTIONS, **options})
    return ens, history


def swept(grid=GRID, **options):
    return ds.sweep(build, data(), objective, grid=grid, members=M, shared=adapters.SHARED, **{**OPTIONS, **options})


def assert_equal(ensemble, expected):
    for i in range(M):
        actual = ensemble.member(i).state_dict()
        for name, tensor in expected.member(i).state_dict().items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.slow(fast=["batched-sgd"])
@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [("loop", "adamw"), ("vmap", "adamw"), ("batched", "sgd"), ("auto", "adamw"), ("loop", "lion")],
)
def test_runs_equal_separate_fits(backend, optimizer):
    options = {"backend": backend, "optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0}
    result = swept(**options)
    assert [group.runs for group in result.groups] == [[0, 1, 2]], "all runs are trained together"
    x, _ = data()
    for run, point in enumerate(GRID):
        expected, history = alone(point, **options)
        assert_equal(result.run(run), expected)
        losses = [entry["loss"] for entry in history.epochs]
        torch.testing.assert_close([entry["loss"] for entry in result.history(run).epochs], losses)
        torch.testing.assert_close(result.outputs(x)[run], expected.eval().predict(x))
    first, second = (result.run(run).member(0)[0].base.weight for run in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["vmap", "batched"])
def test_passes_of_runs_are_joined(backend):
    """With `deterministic` they are joined by a rule, and no clock decides."""
    options = {"backend": backend, "deterministic": True, "validation": 0.25}
    result = swept(**options)
    body = result.groups[0].body
    assert set(body.choices.joined.values()) == {backend}
    for run, point in enumerate(GRID):
        assert_equal(result.run(run), alone(point, **options)[0])
    x, _ = data()
    torch.testing.assert_close(result.outputs(x), torch.stack([result.run(run).predict(x) for run in range(3)]))


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x):
        return x * self.scale


def test_joined_passes_follow_settings_that_change():
    def scaled():
        return adapters.tabm(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), Scaled()).double())

    settings = {**OPTIONS, "backend": "batched", "deterministic": True}
    result = ds.sweep(scaled, data(), objective, grid=GRID, members=M, shared=adapters.SHARED, **settings)
    body = result.groups[0].body
    before = result.outputs(data()[0])
    assert set(body.choices.joined.values()) == {"batched"}
    (layer,) = (part for part in body.network.modules() if isinstance(part, Scaled))
    layer.scale = 3.0
    torch.testing.assert_close(result.outputs(data()[0]), 3 * before)


def test_passes_that_cannot_be_joined_are_taken_one_after_another():
    class Branching(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if float(y.detach().sum()) > 0 else -y

    def branching():
        return adapters.batch_ensemble(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Branching(5, 3)).double(), ["0"])

    options = {**OPTIONS, "deterministic": True}
    grid = {"lr": [0.1, 0.01], "seed": [0, 1]}
    result = ds.sweep(branching, data(), independent, grid=grid, members=M, shared=adapters.SHARED, **options)
    assert set(result.groups[0].body.choices.joined.values()) == {None}
    for run, point in enumerate(result.points):
        expected = ds.Ensemble(branching, M, seed=point["seed"], shared=adapters.SHARED)
        ds.fit(expected, data(), independent, **point, **options)
        assert_equal(result.run(run), expected)


def test_runs_that_end_early_leave_with_their_best_and_averaged_weights():
    options = {"epochs": 8, "validation": 0.25, "patience": 1, "ema": 0.6, "accumulate": 2}
    grid = [{**point, "lr": lr, "shared_lr": lr} for point, lr in zip(GRID, (0.5, 0.002, 0.01), strict=True)]
    result = swept(grid, **options)
    epochs = []
    for run, point in enumerate(grid):
        expected, history = alone(point, **options)
        assert result.history(run).best_epoch == history.best_epoch
        epochs.append(len(history.epochs))
        assert len(result.history(run).epochs) == epochs[-1]
        assert_equal(result.run(run), expected)
    assert len(set(epochs)) > 1, "runs stop in different epochs"


def test_a_run_that_diverges_leaves_the_others_as_they_are():
    grid = [GRID[0], {**GRID[1], "lr": 1e300, "shared_lr": 1e300}, GRID[2]]
    result = swept(grid, optimizer="sgd")
    assert [outcome.status for outcome in result.outcomes] == ["done", "failed", "done"]
    for run in (0, 2):
        assert_equal(result.run(run), alone(grid[run], optimizer="sgd")[0])
    assert all(bool(p.isfinite().all()) for p in result.run(1).parameters())


def test_halving_drops_shared_weights_with_their_runs():
    halving = ds.callbacks.SuccessiveHalving([2], factor=3, metric="loss")
    result = swept(callbacks=[halving])
    (kept,) = [run for run in range(3) if len(result.history(run).epochs) == OPTIONS["epochs"]]
    assert_equal(result.run(kept), alone(GRID[kept])[0])


def test_a_sweep_resumes(tmp_path):
    options = {"deterministic": True, "validation": 0.25, "ema": 0.9, "accumulate": 2}
    whole = swept(**options)

    class Interrupt(Exception):
        pass

    def stop(progress):
        if progress.epoch == 3:
            raise Interrupt

    with pytest.raises(Interrupt):
        swept(checkpoint=tmp_path, progress=stop, **options)
    with pytest.raises((ValueError, ds.StorageError), match="runs"):
        swept([{**point, "shared_lr": 0.5} for point in GRID], checkpoint=tmp_path, resume=True, **options)
    resumed = swept(checkpoint=tmp_path, resume=True, **options)
    for run in range(3):
        assert_equal(resumed.run(run), whole.run(run))


def test_a_resumed_sweep_joins_passes_as_it_did_before(tmp_path, monkeypatch):
    """Joined passes have other last bits, and a clock decides about them."""

    class Interrupt(Exception):
        pass

    def stop(progress):
        if progress.epoch == 3:
            raise Interrupt

    options = {"backend": "batched", "validation": 0.25, "checkpoint": tmp_path}
    monkeypatch.setattr("dissensus.execution.stacked.joining_pays", lambda *_, **__: True)
    with pytest.raises(Interrupt):
        swept(progress=stop, **options)
    monkeypatch.setattr("dissensus.execution.stacked.joining_pays", lambda *_, **__: False)
    resumed = swept(resume=True, **options)
    assert set(resumed.groups[0].body.choices.joined.values()) == {"batched"}


def test_sweeps_are_saved_and_loaded(tmp_path):
    result = swept()
    result.save(tmp_path / "s")
    loaded = ds.Sweep.load(tmp_path / "s", build)
    x, _ = data()
    torch.testing.assert_close(loaded.outputs(x), result.outputs(x))
    for run in range(3):
        assert_equal(loaded.run(run), result.run(run))
    one = swept(GRID[:1])
    one.save(tmp_path / "one")
    assert_equal(ds.Sweep.load(tmp_path / "one", build).run(0), one.run(0))


def test_members_of_several_runs_are_no_ensemble():
    body = swept(GRID[:2], epochs=1).groups[0].body
    assert body.subset([2, 3]).shared_rows is None
    assert len(body.subset([2, 3, 0, 1, 2, 3]).shared_rows) == 3
    for indices in ([0, 2], [0, 1, 2]):
        with pytest.raises(ValueError, match="members of several runs"):
            body.subset(indices)
    member = body.member(3)
    torch.testing.assert_close(member[0].base.weight, body.subset([2, 3]).member(1)[0].base.weight)


@pytest.mark.parametrize("name", ["shared_lr", "shared_clip_norm"])
def test_a_grid_of_shared_settings_wants_shared_weights_that_are_trained(name):
    message = f"`{name}` must be left out where members share no parameters that are trained"
    with pytest.raises(ValueError, match=message):
        ds.sweep(build, data(), independent, grid={name: [0.1, 0.2]}, members=M, epochs=1)
    with pytest.raises(ValueError, match=f"`{name}`"):
        swept([{name: -1.0, "beta": 0.0}])


def test_what_is_frozen_must_be_equal_for_all_seeds():
    def partly():
        network = build()
        network[0].base.weight.requires_grad_(False)
        return network

    with pytest.raises(ValueError, match="tensor '0.base.weight', which members share, differs"):
        ds.sweep(partly, data(), independent, grid={"seed": [0, 1]}, members=M, shared=adapters.SHARED, epochs=1)


def test_learning_rates_of_what_members_share_are_tuned():
    tuned = ds.tune(
        build,
        data(60),
        objective,
        space={"beta": [0.0, 0.5], "shared_lr": [1e-3, 1e-1]},
        shared=adapters.SHARED,
        members=M,
        epochs=2,
        seeds=2,
        splits=1,
    )
    assert {candidate.point["shared_lr"] for candidate in tuned.candidates} == {1e-3, 1e-1}
    assert tuned.ensemble.shared

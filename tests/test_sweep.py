"""Sweeps: every run equals the same run fitted alone, and nothing that happens to one run touches another."""

import logging
import math
from functools import partial

import pytest
import torch
from networks import NETWORKS

import dissensus as ds
from dissensus.train import memory
from dissensus.train.evaluation import evaluation_batch

N, BATCH = 22, 8
augmented = partial(ds.objectives.augmented, loss="mse", pool="score")


def regression(shape=(6,), n=N):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 3, generator=generator, dtype=torch.float64)


def tensors_of(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def fit_single_run(build, data, objective, point, *, members=3, **options):
    """The run of one point through `fit`."""
    hyper = {key: point[key] for key in ("beta",) if key in point}
    settings = {
        key: point[key] for key in ("lr", "weight_decay", "momentum", "batch_size", "split_seed") if key in point
    }
    seed = point.get("seed", options.pop("seed", 0))
    ensemble = ds.Ensemble(build, point.get("members", members), seed=seed).double()
    history = ds.fit(ensemble, data, partial(objective, **hyper), seed=seed, **{**options, **settings})
    return ensemble, history


GRIDS = {
    "betas": {"beta": [0.0, 0.7, 1.0]},
    "rates and seeds": {"lr": [0.01, 0.003], "seed": [0, 4], "beta": [0.4]},
    "decay": {"weight_decay": [0.0, 0.1], "beta": [0.4, 0.9]},
    "shapes": {"batch_size": [8, 5], "members": [1, 3], "beta": [0.4]},
}


@pytest.mark.slow(fast=["mlp-rates and seeds", "mlp-decay", "mlp-shapes", "cnn_batch_norm-betas", "two_dropouts-betas"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "two_dropouts"])
def test_every_run_equals_a_single_fit(name, grid):
    build, shape = NETWORKS[name]
    data = regression(shape)
    options = {"epochs": 7, "batch_size": BATCH, "lr": 0.01, "clip_norm": 2.0, "schedule": "cosine"}
    swept = ds.sweep(build, data, augmented, grid=GRIDS[grid], members=3, **options)
    assert len(swept) == math.prod(len(values) for values in GRIDS[grid].values())
    for i, point in enumerate(swept.points):
        single, history = fit_single_run(build, data, augmented, point, **options)
        assert_same(tensors_of(swept.run(i)), tensors_of(single))
        assert swept.history(i).column("loss") == pytest.approx(history.column("loss"))


@pytest.mark.slow(fast=["sgd"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_run_equals_a_single_fit_with_any_optimiser(optimizer):
    build, _ = NETWORKS["mlp"]
    data = regression()
    grid = {"momentum": [0.0, 0.9], "beta": [0.2, 0.8]}
    options = {"epochs": 7, "batch_size": BATCH, "lr": 0.01, "optimizer": optimizer}
    swept = ds.sweep(build, data, augmented, grid=grid, members=3, **options)
    for i, point in enumerate(swept.points):
        single, _ = fit_single_run(build, data, augmented, point, **options)
        assert_same(tensors_of(swept.run(i)), tensors_of(single))


@pytest.mark.slow(fast=["norm_first-ensemble"])
@pytest.mark.parametrize("watch", ["ensemble", "member"])
@pytest.mark.parametrize("name", ["mlp", "norm_first", "two_dropouts"])
def test_every_run_equals_a_single_fit_with_early_stopping_and_compaction(name, watch):
    build, shape = NETWORKS[name]
    data = regression(shape, n=40)
    grid = {"lr": [0.1, 0.02, 0.001], "seed": [0, 1], "split_seed": [5, 6], "beta": [0.3]}
    options = {"epochs": 25, "batch_size": BATCH, "validation": 0.3, "patience": 2, "watch": watch}
    sizes = []
    swept = ds.sweep(build, data, augmented, grid=grid, members=3, progress=lambda p: sizes.append(p.runs), **options)
    statuses = [outcome.status for outcome in swept.outcomes]
    assert statuses.count("stopped early") > 2
    assert min(sizes) < 12, "runs that are done still cost"
    for i, point in enumerate(swept.points):
        single, history = fit_single_run(build, data, augmented, point, **options)
        assert_same(tensors_of(swept.run(i)), tensors_of(single))
        assert swept.history(i).best_epoch == history.best_epoch
        assert swept.history(i).stopped_early == history.stopped_early


def test_every_run_equals_a_single_fit_with_augmentation():
    def noisy(x, generator):
        return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    build, _ = NETWORKS["mlp"]
    data, held_out = regression(), regression(n=9)
    options = {"epochs": 4, "batch_size": BATCH, "augment": noisy, "validation": held_out, "drop_last": True}
    swept = ds.sweep(build, data, augmented, grid={"seed": [0, 1], "beta": [0.0, 0.9]}, members=3, **options)
    for i, point in enumerate(swept.points):
        single, history = fit_single_run(build, data, augmented, point, **options)
        assert_same(tensors_of(swept.run(i)), tensors_of(single))
        assert swept.history(i).column("validation") == pytest.approx(history.column("validation"))


def test_a_run_that_turns_nan_is_frozen_and_the_others_go_on():
    build, _ = NETWORKS["norm_first"]
    data = regression()

    def explodes(outputs, targets, *, fuse):
        parts = ds.objectives.independent(outputs, targets, loss="mse")
        return ds.LossParts(parts.total * torch.where(torch.as_tensor(fuse) > 0, math.inf, 1.0), parts.parts)

    options = {"epochs": 4, "batch_size": BATCH, "lr": 0.01}
    swept = ds.sweep(build, data, explodes, grid=[{"fuse": 0.0}, {"fuse": 1.0}, {"fuse": -1.0}], members=2, **options)
    assert [outcome.status for outcome in swept.outcomes] == ["done", "failed", "done"]
    assert "step 0" in swept.outcomes[1].reason
    assert swept.table(frame=False)[1]["reason"] == swept.outcomes[1].reason
    assert swept.history(1).epochs == []
    independent = partial(ds.objectives.independent, loss="mse")
    single = ds.Ensemble(build, 2).double()
    ds.fit(single, data, independent, **options)
    assert_same(tensors_of(swept.run(0)), tensors_of(single))
    failed, fresh = tensors_of(swept.run(1)), tensors_of(ds.Ensemble(build, 2).double())
    assert all(tensor.isfinite().all() for tensor in failed.values() if tensor.is_floating_point())
    assert torch.equal(failed["net.1.weight"], fresh["net.1.weight"])


def test_the_grid_sets_parameters_of_network_and_objective():
    def build(width=4, depth=1):
        return ds.nets.mlp(6, 3, (width,) * depth)

    grid = {"width": [4, 7], "depth": [1, 2], "loss": ["mse", "logistic"]}
    objective = partial(ds.objectives.joint, pool="score")
    x, _ = regression()
    y = torch.randint(0, 2, (N, 3)).double() * 2 - 1
    swept = ds.sweep(build, (x, y), objective, grid=grid, members=2, epochs=1)
    assert len(swept.groups) == 8
    for i, point in enumerate(swept.points):
        assert swept.run(i).member(0)[0].weight.shape == (point["width"], 6)


def test_max_memory_limits_runs_at_once_and_keeps_results(caplog):
    build, _ = NETWORKS["two_dropouts"]
    data = regression()
    options = {"grid": {"beta": [0.0, 0.3, 0.6, 0.9, 1.0]}, "members": 3, "epochs": 3, "batch_size": BATCH}
    at_once = ds.sweep(build, data, augmented, **options)
    with caplog.at_level(logging.INFO, "dissensus"):
        ds.sweep(build, data, augmented, **options)
    (message,) = [record.getMessage() for record in caplog.records if "at once" in record.getMessage()]
    assert message.startswith("5 runs of 3 members, about ")
    per_run = int(message.split("about ")[1].split(" bytes each")[0].replace(",", ""))
    in_parts = ds.sweep(build, data, augmented, max_memory=int(2.5 * per_run), **options)
    assert len(at_once.groups) == 1
    assert len(in_parts.groups) > 1
    for i in range(5):
        assert_same(tensors_of(in_parts.run(i)), tensors_of(at_once.run(i)))
    with pytest.raises(ValueError, match=r"`max_memory` must hold one member at a time, about .* smaller batches"):
        ds.sweep(build, data, augmented, max_memory=100, **options)


def test_saved_bytes_counts_what_autograd_keeps():
    x = torch.randn(100, 50)
    weight = torch.randn(50, 20, requires_grad=True)
    assert memory.saved_bytes(lambda: (x @ weight).relu()) == 4 * (100 * 50 + 100 * 20 * 2)


def test_table_outputs_and_errors():
    build, _ = NETWORKS["mlp"]
    data = regression()
    swept = ds.sweep(build, data, augmented, grid={"beta": [0.0, 1.0], "seed": [0, 1]}, members=2, epochs=2)
    rows = swept.table(frame=False)
    assert [row["beta"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert rows[0]["loss"] == swept.history(0).epochs[-1]["loss"]
    frame = swept.table()
    assert list(frame["seed"]) == [0, 1, 0, 1]
    outputs = swept.outputs(data[0], batch_size=5)
    assert outputs.shape == (4, 2, N, 3)
    for i in range(4):
        torch.testing.assert_close(outputs[i], swept.run(i).predict(data[0]))
    with pytest.raises(IndexError, match="runs 0 to 3"):
        swept.run(4)
    mixed = ds.sweep(build, data, augmented, grid={"members": [1, 2], "beta": [0.0]}, epochs=1)
    with pytest.raises(ValueError, match="different numbers of members"):
        mixed.outputs(data[0])


def test_save_and_load(tmp_path):
    def build(width=4):
        return ds.nets.mlp(6, 3, (width,), dropout=0.2)

    data = regression()
    swept = ds.sweep(build, data, augmented, grid={"beta": [0.0, 1.0], "width": [4, 6]}, members=2, epochs=2)
    swept.save(tmp_path / "sweep")
    loaded = ds.Sweep.load(tmp_path / "sweep", build)
    assert loaded.table(frame=False) == swept.table(frame=False)
    for i in range(4):
        expected = tensors_of(swept.run(i))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(loaded.run(i)).items())
    with pytest.raises(ds.StorageError, match="does not fit"):
        ds.Sweep.load(tmp_path / "sweep", lambda width=4: ds.nets.mlp(6, 3, (width, 5)))


def test_bad_grids_are_refused_with_a_fix(unchecked):
    build, _ = NETWORKS["mlp"]
    data = regression()

    def refused(match, error=ValueError, **options):
        with pytest.raises(error, match=match):
            ds.sweep(build, options.pop("data", data), augmented, **{"epochs": 1, "grid": {"beta": [0.5]}, **options})

    refused("Did you mean 'beta'", grid={"betta": [0.5]})
    refused(r"map 'beta' to a list of values; got 0.5. One value\? Use \[0.5\]", grid={"beta": 0.5})
    refused("at least one point", grid=[])
    refused("theorem 5.1", grid={"beta": [0.5, 1.5]})
    refused("`objective` must have a value for each .*; got augmented without `beta`", grid={"lr": [0.1]})
    refused("`lr` must be a number of at least 0; got -1", grid={"lr": [0.1, -1.0], "beta": [0.5]})
    refused(r"give pairs \(x, y\); got Tensor", TypeError, data=torch.utils.data.DataLoader([1]))
    refused("`patience` must come with", patience=2)
    refused("`patience` must be a whole number", patience=0, validation=0.3)


def test_an_objective_that_vmap_cannot_take_runs_once_per_run(caplog):
    build, _ = NETWORKS["mlp"]
    data = regression()

    def stubborn(outputs, targets, *, beta):
        scale = 1.0 if float(beta) > 0 else 2.0  # reads a value: no vmap
        total, parts = augmented(outputs, targets, beta=beta)
        return ds.LossParts(total * scale, parts)

    options = {"epochs": 3, "batch_size": BATCH, "lr": 0.01}
    with caplog.at_level(logging.WARNING, "dissensus"):
        swept = ds.sweep(build, data, stubborn, grid={"beta": [0.0, 0.5]}, members=2, **options)
    assert sum("once per run" in record.getMessage() for record in caplog.records) == 1
    for i, point in enumerate(swept.points):
        single, _ = fit_single_run(build, data, stubborn, point, members=2, **options)
        assert_same(tensors_of(swept.run(i)), tensors_of(single))


def test_functions_in_the_grid_can_be_saved(tmp_path):
    build = partial(ds.nets.mlp, 6, 3, (4,))
    grid = {"activation": [torch.nn.ReLU, torch.nn.Tanh], "beta": [0.5]}
    swept = ds.sweep(build, regression(), augmented, grid=grid, members=2, epochs=1)
    swept.save(tmp_path / "sweep")
    builds = [partial(build, activation=activation) for activation in grid["activation"]]
    loaded = ds.Sweep.load(tmp_path / "sweep", builds)
    x, _ = regression()
    torch.testing.assert_close(loaded.outputs(x), swept.outputs(x))
    assert loaded.points[1]["activation"] == "Tanh"
    with pytest.raises(ValueError, match="one per group"):
        ds.Sweep.load(tmp_path / "sweep", builds[:1])


def test_runs_are_returned_in_evaluation_mode():
    build, _ = NETWORKS["two_dropouts"]
    x, y = regression()
    swept = ds.sweep(build, (x, y), augmented, grid={"beta": [0.0, 1.0]}, members=2, epochs=1)
    first = swept.run(0)
    assert not first.training
    swept.outputs(x)
    torch.testing.assert_close(swept.run(0)(x), first(x))


def test_augmentation_may_change_the_number_of_axes():
    build, _ = NETWORKS["mlp"]
    x, y = regression((2, 3))
    options = {"epochs": 2, "batch_size": BATCH, "augment": lambda batch, generator: batch.flatten(1)}
    swept = ds.sweep(build, (x, y), augmented, grid={"seed": [0, 1], "beta": [0.5]}, members=2, **options)
    for i, point in enumerate(swept.points):
        single, _ = fit_single_run(build, (x, y), augmented, point, members=2, **options)
        assert_same(tensors_of(swept.run(i)), tensors_of(single))


def test_numpy_values_are_fine_in_a_grid():
    import numpy as np

    build, _ = NETWORKS["mlp"]
    swept = ds.sweep(build, regression(), augmented, grid={"beta": np.linspace(0, 1, 3)}, members=1, epochs=1)
    assert [point["beta"] for point in swept.points] == [0.0, 0.5, 1.0]
    points = [{"beta": np.float64(0.5), "seed": np.int64(3)}]
    assert ds.sweep(build, regression(), augmented, grid=points, members=1, epochs=1).points[0]["seed"] == 3


def test_evaluation_takes_fewer_examples_at_once_with_more_members():
    assert evaluation_batch(5) == 1024
    assert evaluation_batch(22_000) * 22_000 <= 2**16
    assert evaluation_batch(10**6) == 1


def folds(n=30, held_out=12):
    generator = torch.Generator().manual_seed(8)

    def draw(rows):
        x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        return x, x[:, :1].sin() + 0.1 * torch.randn(rows, 1, generator=generator, dtype=torch.float64)

    return [draw(n) for _ in range(3)], [draw(held_out) for _ in range(3)]


@pytest.mark.slow(fast=["0.3"])
@pytest.mark.parametrize("validation", ["own", "one for all", 0.3, None])
def test_runs_on_several_data_sets_equal_runs_on_one(validation):
    train, held_out = folds()
    build = partial(ds.nets.mlp, 4, 1, (6,))
    objective = partial(ds.objectives.augmented, loss="mse", pool="score")
    options = {"members": 2, "epochs": 8, "batch_size": 7, "lr": 0.02}
    options |= {"patience": 2} if validation is not None else {}
    validation_data = {"own": held_out, "one for all": held_out[0]}.get(validation, validation)
    grid = [{"fold": f, "seed": s, "beta": b} for f in (2, 0, 1) for s, b in ((0, 0.2), (1, 0.9))]
    swept = ds.sweep(build, train, objective, grid=grid, validation=validation_data, **options)
    for i, point in enumerate(grid):
        fold = point["fold"]
        single = ds.sweep(
            build,
            train[fold],
            objective,
            grid=[{"seed": point["seed"], "beta": point["beta"]}],
            validation=held_out[fold] if validation == "own" else validation_data,
            **options,
        )
        x = held_out[0][0]
        torch.testing.assert_close(swept.run(i).predict(x), single.run(0).predict(x), rtol=1e-9, atol=1e-11)
        assert len(swept.history(i).epochs) == len(single.history(0).epochs)
        assert swept.history(i).column("loss") == pytest.approx(single.history(0).column("loss"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": {"beta": [0.5]}}, "which of 3 data sets"),
        ({"grid": {"beta": [0.5], "fold": [3]}}, "below 3"),
        ({"validation": folds()[1][:2]}, "hold 3 pairs"),
        ({"data": [folds()[0][0], folds(n=29)[0][0]]}, "one shape"),
        ({"data": [folds()[0][0], 3]}, "list of such pairs"),
        ({"data": folds()[0][0], "validation": None}, "below 1"),
    ],
)
def test_inconsistent_data_sets_are_refused(change, message, unchecked):
    train, held_out = folds()
    options = {"data": train, "grid": {"beta": [0.5], "fold": [0, 2]}, "validation": held_out, **change}
    build = partial(ds.nets.mlp, 4, 1, (6,))
    objective = partial(ds.objectives.augmented, loss="mse", pool="score")
    with pytest.raises(ValueError, match=message):
        ds.sweep(build, options.pop("data"), objective, members=2, epochs=1, **options)


def test_targets_that_a_loss_of_the_grid_does_not_take_are_refused():
    generator = torch.Generator().manual_seed(4)
    x, counts = torch.randn(12, 5, generator=generator), torch.arange(12.0) % 4
    build = partial(ds.nets.mlp, 5, 1, (4,))
    options = {"members": 2, "epochs": 1, "batch_size": 4}
    ds.sweep(build, (x, counts), ds.objectives.independent, grid={"loss": ["mse", "poisson"]}, **options)
    for name, validation in (("targets", {}), ("validation targets", {"validation": (x, counts)})):
        data = (x, counts if name == "targets" else counts.clamp(1, 1))
        with pytest.raises(ValueError, match=f"`{name}` must be -1 or \\+1; got values such as \\[0.0, 1.0, 2.0\\]"):
            ds.sweep(
                build, data, ds.objectives.independent, grid={"loss": ["mse", "logistic"]}, **validation, **options
            )
    data_sets, poisson = [(x, counts), (x, counts - 2)], partial(ds.objectives.independent, loss="poisson")
    with pytest.raises(ValueError, match="`targets` must be counts of at least 0; got -2"):
        ds.sweep(build, data_sets, poisson, grid={"fold": [0, 1]}, **options)


@pytest.mark.parametrize("objective", [partial(ds.objectives.independent, loss="cross_entropy"), ds.objectives.adp])
def test_labels_outside_of_the_outputs_are_refused_before_a_sweep(objective):
    generator = torch.Generator().manual_seed(4)
    x, labels = torch.randn(12, 5, generator=generator), torch.arange(12) % 3
    out_of_range = torch.where(torch.arange(12) == 11, 3, labels)
    build, options = partial(ds.nets.mlp, 5, 3, (4,)), {"members": 2, "epochs": 1, "batch_size": 4}
    ds.sweep(build, (x, labels), objective, grid={"seed": [0, 1]}, validation=(x, labels), **options)
    for name, train_labels, validation_labels in (
        ("targets", out_of_range, labels),
        ("validation targets", labels, out_of_range),
        ("targets", out_of_range, None),
    ):
        validation = 0.5 if validation_labels is None else (x, validation_labels)
        with pytest.raises(ValueError, match=f"`{name}` must be labels from 0 to 2; got labels from 0 to 3"):
            ds.sweep(build, (x, train_labels), objective, grid={"seed": [0, 1]}, validation=validation, **options)


def test_validation_watches_the_pooled_loss_of_every_run():
    generator = torch.Generator().manual_seed(4)
    pair = torch.randn(12, 5, generator=generator), torch.arange(12) % 3
    build, options = partial(ds.nets.mlp, 5, 3, (4,)), {"epochs": 2, "lr": 0.05, "validation": pair, "keep": "last"}
    grid = {"loss": ["cross_entropy", "brier"], "seed": [0, 1], "members": [1, 3]}
    swept = ds.sweep(build, pair, ds.objectives.independent, grid=grid, **options)
    for run, point in enumerate(swept.points):
        outputs = swept.run(run).predict(pair[0])
        decomposition = ds.diversity.decompose(outputs, pair[1], loss=point["loss"], pool="probability")
        assert swept.history(run).column("validation")[-1] == pytest.approx(
            float(decomposition.ensemble.mean()), rel=1e-5
        )
        assert swept.history(run).column("epoch") == [1, 2]
        last = swept.history(run).epochs[-1]
        assert last["loss"] == pytest.approx(sum(last["member_loss"]) / point["members"], rel=1e-5)


def test_runs_are_stopped_and_kept_by_the_highest_metric_on_request():
    build, data = NETWORKS["mlp"][0], regression()
    grid = {"lr": [0.1, 0.02, 0.001], "seed": [0, 1], "beta": [0.3]}
    options = {"epochs": 20, "batch_size": BATCH, "validation": 0.3, "patience": 2}
    negative = partial(_negative_error, 1.0)
    lowest = ds.sweep(
        build, data, augmented, grid=grid, members=2, metric=partial(_negative_error, -1.0), mode="min", **options
    )
    highest = ds.sweep(build, data, augmented, grid=grid, members=2, metric=negative, mode="max", **options)
    assert len({len(highest.history(run).epochs) for run in range(6)}) > 1, "runs stop at different epochs"
    for run, point in enumerate(highest.points):
        single, history = fit_single_run(
            build, data, augmented, point, members=2, metric=negative, mode="max", **options
        )
        assert highest.history(run).best_epoch == lowest.history(run).best_epoch == history.best_epoch
        assert_same(tensors_of(highest.run(run)), tensors_of(lowest.run(run)))
        assert_same(tensors_of(highest.run(run)), tensors_of(single))


def _negative_error(sign, outputs, targets):
    return -sign * (outputs.mean(0) - targets).square().mean()


@pytest.mark.slow
def test_the_table_has_the_metrics_of_the_kept_weights():
    build, data = partial(ds.nets.mlp, 5, 1, (16,)), (torch.randn(60, 5), torch.randn(60, 1))
    options = {"epochs": 12, "batch_size": 8, "validation": (data[0][:20], torch.randn(20, 1)), "members": 2}
    swept = ds.sweep(build, data, augmented, grid={"lr": [0.1, 0.03], "beta": [0.5]}, **options)
    for run, row in enumerate(swept.table(frame=False)):
        losses = swept.history(run).column("validation")
        assert row["validation"] == min(losses) == losses[row["best_epoch"] - 1]
        outputs = swept.run(run).predict(options["validation"][0])
        error = (outputs.mean(0) - options["validation"][1]).square().mean().item()
        assert row["validation"] == pytest.approx(error, rel=1e-5)
        assert losses[-1] > min(losses), "or the test tests nothing"
    last = ds.sweep(build, data, augmented, grid={"lr": [0.1], "beta": [0.5]}, keep="last", **options)
    assert last.table(frame=False)[0]["validation"] == last.history(0).column("validation")[-1]


def test_settings_that_differ_in_late_digits_are_different_settings():
    """Printed, both tensors are the same: numbers are rounded to four digits there."""
    near = [torch.tensor([0.3, 0.7], dtype=torch.float64), torch.tensor([0.30001, 0.69999], dtype=torch.float64)]
    assert repr(near[0]) == repr(near[1])
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, width, generator=generator, dtype=torch.float64) for width in (3, 1))
    objective = partial(ds.objectives.augmented, beta=0.5, loss="squared_error", pool="score")
    options = {"epochs": 2, "lr": 0.1, "optimizer": "sgd", "batch_size": 5}
    build = partial(torch.nn.Linear, 3, 1, dtype=torch.float64)
    swept = ds.sweep(build, (x, y), objective, grid={"weights": near}, members=2, backend="loop", **options)
    for run, weights in enumerate(near):
        alone = ds.Ensemble(build, 2, backend="loop")
        ds.fit(alone, (x, y), partial(objective, weights=weights), **options)
        torch.testing.assert_close(swept.run(run).predict(x), alone.eval().predict(x), rtol=1e-10, atol=1e-12)
    assert len(swept.groups) == 2

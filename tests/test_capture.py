"""Captured steps train as eager steps do. On a CPU, operations are recorded and replayed (see `recording`)."""

import math
from functools import partial

import pytest
import torch
from networks import NETWORKS
from recording import Captures, recorded
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.execution.graphs import captured
from dissensus.train import capture

augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def data(shape, device, n=45):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x.to(device), torch.randn(n, 3, generator=generator, dtype=torch.float64).to(device)


def weights(ensemble):
    return {name: tensor.detach().cpu().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_same(actual, expected):
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def steps_by(monkeypatch):
    """Set what makes the captured steps of an engine."""

    return partial(monkeypatch.setattr, "dissensus.train.recipe.graph_steps")


@pytest.fixture
def eager(steps_by):
    """Switch capture off."""
    return lambda: steps_by(lambda engine: None)


@pytest.fixture
def replays(steps_by):
    """Switch capture on, and count captures and replays."""
    counts = Captures()

    def steps(engine):
        counts.capture = captured if engine.state.flat.is_cuda else recorded
        return capture.GraphSteps(lambda: counts)

    def switch():
        steps_by(steps)
        return counts

    return switch


@pytest.mark.slow(
    fast=[
        "mlp-loop-cpu",
        "two_dropouts-vmap-cpu",
        "cnn_batch_norm-batched-cpu",
        "mlp-streams-cpu",
        "cnn_batch_norm-stacked-cpu",
    ]
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["loop", "vmap", "batched", "streams", "stacked"])
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "two_dropouts"])
def test_captured_fits_equal_eager_ones(name, backend, device, eager, replays):
    build, shape = NETWORKS[name]
    options = {"epochs": 8, "batch_size": 8, "lr": 0.01, "clip_norm": 2.0, "schedule": "cosine", "validation": 0.2}
    options |= {"frozen": [1], "optimizer": "sgd", "momentum": 0.9} if backend == "vmap" else {}
    results = []
    for switch in (eager, replays):
        counts = switch()
        ensemble = ds.Ensemble(build, 3, backend=backend).double().to(device)
        history = ds.fit(ensemble, data(shape, device), partial(augmented, beta=0.7), **options)
        results.append((weights(ensemble), history.column("loss"), history.column("validation")))
    assert counts.captures == 2, "one graph for whole batches, one for the last"
    assert counts.replays == 8 * 5 - 2 * capture.WARM_UP
    assert_same(results[1][0], results[0][0])
    assert results[1][1] == pytest.approx(results[0][1])
    assert results[1][2] == pytest.approx(results[0][2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_captured_steps_train_what_members_share(backend, device, eager, replays):
    build, shape = NETWORKS["mlp"]
    base = build()
    results = []
    for switch in (eager, replays):
        counts = switch()
        ensemble = ds.Ensemble(lambda: ds.adapters.batch_ensemble(base), 3, backend=backend, shared=ds.adapters.SHARED)
        options = {"epochs": 8, "batch_size": 8, "lr": 0.01, "ema": 0.9, "accumulate": 2, "validation": 0.2}
        history = ds.fit(ensemble.double().to(device), data(shape, device), partial(augmented, beta=0.7), **options)
        shared = [tensor.detach().clone() for tensor in ensemble.body.shared_tensors().values()]
        results.append((weights(ensemble), shared, history.column("validation")))
    assert counts.replays > 10
    assert_same(results[1][0], results[0][0])
    for actual, expected in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(actual, expected)
    assert results[1][2] == pytest.approx(results[0][2])


def jitter(x, generator):
    """An augmentation that draws twice."""
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    flip = torch.rand(len(x), generator=generator, device=x.device) < 0.5
    return torch.where(flip.view(-1, *[1] * (x.ndim - 1)), -x, x) + 0.1 * noise


@pytest.mark.parametrize("device", DEVICES)
def test_captured_augmentation_equals_eager(device, eager, replays):
    build, shape = NETWORKS["cnn_batch_norm"]
    results = []
    for switch in (eager, replays):
        counts = switch()
        ensemble = ds.Ensemble(build, 3, backend="streams").double().to(device)
        options = {"epochs": 8, "batch_size": 8, "lr": 0.01, "augment": jitter}
        history = ds.fit(ensemble, data(shape, device), partial(augmented, beta=0.7), **options)
        results.append((weights(ensemble), history.column("loss")))
    assert counts.captures == 2
    assert_same(results[1][0], results[0][0])
    assert results[1][1] == pytest.approx(results[0][1])


WEIGHTED = {
    "classes": {"class_weights": [0.5, 2.0, 1.0], "label_smoothing": 0.2, "ignore_index": -100},
    "balanced": {"class_weights": "balanced", "ignore_index": -100},
    "bagging": {"bootstrap": True, "ignore_index": -100},
    "sampled bagging": {"bootstrap": True, "active_members": 2, "class_weights": [0.5, 2.0, 1.0], "ignore_index": -100},
    "mixup": {"augment": ds.data.augment.mixup(3, 0.4), "label_smoothing": 0.1},
    "cutmix": {"augment": ds.data.augment.chain(ds.data.augment.flips, ds.data.augment.cutmix(3))},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", ["tensors", "loader", "sweep"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_captured_weights_mixing_and_bagging_equal_eager(name, source, device, eager, replays, monkeypatch):
    monkeypatch.setattr("dissensus.checks.is_concrete", lambda tensor: False)  # as on a GPU, where values are not read
    monkeypatch.setattr(
        torch.nn.functional,
        "one_hot",
        lambda y, classes: (y.unsqueeze(-1) == torch.arange(classes, device=y.device)).long(),
    )
    if source == "loader" and name in ("balanced", "bagging", "sampled bagging"):
        pytest.skip("for data in memory")
    build, shape = NETWORKS["cnn_batch_norm"]
    x, _ = data(shape, device)
    y = torch.arange(len(x), device=device) % 3
    if "ignore_index" in WEIGHTED[name]:
        y[::7] = -100
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    options = {"epochs": 8, "batch_size": 8, "lr": 0.01, **WEIGHTED[name]}
    results = []
    for switch in (eager, replays):
        counts = switch()
        if source == "sweep":
            grid = {"seed": [0, 1], "lr": [0.01, 0.02]}
            swept = ds.sweep(build, (x, y), objective, grid=grid, members=3, backend="vmap", **options)
            results.append([weights(swept.run(i)) for i in range(4)])
            continue
        ensemble = ds.Ensemble(build, 3, backend="streams").double().to(device)
        ds.fit(ensemble, (x, y) if source == "tensors" else DataLoader(TensorDataset(x, y), 8), objective, **options)
        results.append([weights(ensemble)])
    assert counts.captures == 2
    assert counts.replays
    for one, other in zip(*results, strict=True):
        assert_same(other, one)


@pytest.mark.parametrize("device", DEVICES)
def test_captured_augmentation_uses_the_seed_of_every_run(device, eager, replays):
    build, shape = NETWORKS["mlp"]
    sweeps = []
    for switch in (eager, replays):
        counts = switch()
        grid = {"seed": [0, 1, 2], "beta": [0.3, 0.9]}
        options = {"epochs": 6, "batch_size": 8, "augment": jitter, "members": 2, "device": device}
        sweeps.append(ds.sweep(build, data(shape, device), augmented, grid=grid, **options))
    assert counts.captures == 2
    for i in range(6):
        assert_same(weights(sweeps[1].run(i)), weights(sweeps[0].run(i)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per", ["batch", "example"])
def test_captured_learner_dropout_equals_eager(per, device, eager, replays):
    build, shape = NETWORKS["mlp"]
    objective = partial(ds.objectives.learner_dropout, loss="squared_error", pool="score", per=per)
    sweeps = []
    for switch in (eager, replays):
        counts = switch()
        options = {"epochs": 8, "batch_size": 8, "lr": 0.01, "members": 4, "device": device}
        sweeps.append(
            ds.sweep(build, data(shape, device), objective, grid={"seed": [0, 1], "drop": [0.3, 0.6]}, **options)
        )
    assert counts.captures == 2
    assert counts.replays == 8 * 6 - 2 * capture.WARM_UP
    for i in range(4):
        assert_same(weights(sweeps[1].run(i)), weights(sweeps[0].run(i)))
        assert sweeps[1].history(i).column("kept_ensemble") == pytest.approx(
            sweeps[0].history(i).column("kept_ensemble")
        )


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_a_foreign_loader_are_captured(device, eager, replays):
    build, shape = NETWORKS["two_dropouts"]
    x, y = data(shape, "cpu")
    trained = []
    for switch in (eager, replays):
        counts = switch()
        loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=torch.Generator().manual_seed(5))
        ensemble = ds.Ensemble(build, 3, backend="streams").double().to(device)
        ds.fit(ensemble, loader, partial(augmented, beta=0.7), epochs=6, lr=0.01, augment=jitter)
        trained.append(weights(ensemble))
    assert counts.captures == 2
    assert counts.replays == 6 * 6 - 2 * capture.WARM_UP
    assert_same(trained[1], trained[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_failure_with_a_foreign_loader_names_its_step(device, replays):
    replays()
    x, y = data((6,), "cpu", n=40)
    x[29] = math.nan
    ensemble = ds.Ensemble(NETWORKS["norm_first"][0], 3).double().to(device)
    with pytest.raises(ds.TrainingDiverged, match="step 7, in the outputs") as caught:
        ds.fit(ensemble, DataLoader(TensorDataset(x, y), 4), partial(augmented, beta=0.7), epochs=3)
    assert caught.value.history.epochs == []
    assert ensemble.predict(x[:8]).isfinite().all()


def test_the_number_of_captured_shapes_is_limited(replays):
    counts = replays()
    x, y = data((6,), "cpu")
    sizes = [batch for size in (3, 4, 5, 6, 7) for batch in [size] * 5]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    batches = [[i % 45 for i in range(end - size, end)] for end, size in zip(ends, sizes, strict=True)]
    loader = DataLoader(TensorDataset(x, y), batch_sampler=batches)
    history = ds.fit(ds.Ensemble(NETWORKS["mlp"][0], 2).double(), loader, partial(augmented, beta=0.7), epochs=1)
    assert history.steps == 25
    assert counts.captures == capture.MOST_SHAPES == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mlp", "norm_first"])
def test_captured_sweeps_equal_eager_ones(name, device, eager, replays):
    build, shape = NETWORKS[name]
    grid = {"lr": [0.1, 0.02, 0.001], "seed": [0, 1], "beta": [0.3]}
    options = {"epochs": 20, "batch_size": 8, "validation": 0.2, "patience": 3, "backend": "vmap"}
    sweeps = []
    for switch in (eager, replays):
        counts = switch()
        sweeps.append(ds.sweep(build, data(shape, device), augmented, grid=grid, members=3, device=device, **options))
    assert counts.captures > 2, "compaction asks for new graphs"
    for i in range(6):
        assert_same(weights(sweeps[1].run(i)), weights(sweeps[0].run(i)))
        assert sweeps[1].history(i).best_epoch == sweeps[0].history(i).best_epoch


@pytest.mark.parametrize("device", DEVICES)
def test_a_failure_inside_a_graph_names_step_part_and_members(device, replays):
    replays()
    build, shape = NETWORKS["norm_first"]
    x, y = data(shape, device)

    def explodes(outputs, targets, *, fuse):
        parts = ds.objectives.independent(outputs, targets, loss="squared_error")
        grown = parts.parts["member_loss"] * torch.where(parts.total < 4.0 * torch.as_tensor(fuse), math.inf, 1.0)
        return ds.LossParts(grown.sum(), {"member_loss": grown})

    grid = [{"fuse": 0.0}, {"fuse": 1.0}]
    swept = ds.sweep(build, (x, y), explodes, grid=grid, members=3, epochs=60, batch_size=15, lr=0.02, device=device)
    assert [outcome.status for outcome in swept.outcomes] == ["done", "failed"]
    assert "in `member_loss` (members 0, 1, 2)" in swept.outcomes[1].reason
    assert all(t.isfinite().all() for t in weights(swept.run(1)).values() if t.is_floating_point())
    step = int(swept.outcomes[1].reason.split("step ")[1].split(",")[0])
    assert len(swept.history(1).epochs) == step // 3 > 3
    ensemble = ds.Ensemble(build, 3).double().to(device)
    with pytest.raises(ds.TrainingDiverged, match=f"step {step}, in `member_loss`"):
        ds.fit(ensemble, (x, y), partial(explodes, fuse=1.0), epochs=60, batch_size=15, lr=0.02)
    assert_same(weights(ensemble), weights(swept.run(1)))


def test_steps_that_cannot_be_captured_run_eagerly_with_a_notice(monkeypatch, caplog):
    def refuses(function, generators):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda engine: capture.GraphSteps(lambda: refuses))
    build, shape = NETWORKS["mlp"]
    ensemble = ds.Ensemble(build, 3).double()
    history = ds.fit(ensemble, data(shape, "cpu"), partial(augmented, beta=0.7), epochs=5, batch_size=8)
    assert history.steps == 30
    (record,) = [r for r in caplog.records if "not captured" in r.getMessage()]
    assert record.getMessage().endswith("operation not permitted when stream is capturing")


@pytest.mark.slow(fast=["auto"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["loop", "streams", "auto"])
def test_a_capture_that_fails_leaves_no_trace(backend, monkeypatch, caplog):
    """An objective that reads a number back cannot be captured: what follows must be what it would have been."""
    build, shape = NETWORKS["two_dropouts"]

    def reads_back(outputs, targets):
        parts = augmented(outputs, targets, beta=0.7)
        return parts if parts.total.detach().item() < 1e9 else augmented(outputs, targets, beta=0.0)

    results = []
    for may_capture in (False, True):
        with monkeypatch.context() as patch:
            if not may_capture:
                patch.setattr("dissensus.train.recipe.graph_steps", lambda engine: None)
            torch.manual_seed(4)
            torch.cuda.manual_seed(4)
            ensemble = ds.Ensemble(build, 3, backend=backend).double().cuda()
            options = {"epochs": 6, "batch_size": 8, "lr": 0.01, "augment": jitter, "validation": 0.2}
            history = ds.fit(ensemble, data(shape, "cuda"), reads_back, **options)
            random_numbers = torch.randn(3, device="cuda").tolist(), torch.randn(3).tolist()
            results.append((weights(ensemble), history.column("validation"), random_numbers))
    notices = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert notices, "the fall-back is told"
    assert all(len(line.splitlines()) == 1 for line in notices)
    assert_same(results[1][0], results[0][0])
    assert results[1][1] == pytest.approx(results[0][1])
    assert results[1][2] == results[0][2], "torch's own generators go on as if nothing had been tried"
    x, y = data(shape, "cuda")
    history = ds.fit(ensemble, (x, y), partial(augmented, beta=0.7), epochs=6, batch_size=8)
    assert history.steps == 36, "and the next training is captured as ever"


def test_other_shapes_stay_captured_when_one_is_refused(monkeypatch, caplog):
    captures = []

    def second_refuses(function, generators):
        captures.append(1)
        if len(captures) == 2:
            raise RuntimeError("out of memory")
        return recorded(function, generators)

    monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda engine: capture.GraphSteps(lambda: second_refuses))
    build, shape = NETWORKS["mlp"]
    ds.fit(ds.Ensemble(build, 3).double(), data(shape, "cpu"), partial(augmented, beta=0.7), epochs=8, batch_size=8)
    assert len(captures) == 2
    assert sum("not captured" in record.getMessage() for record in caplog.records) == 1


def test_a_failure_inside_a_graph_is_repeated_with_the_masks_of_its_step(replays, eager):
    """Dropout decides here whose outputs are not finite: replays after the failure must not change whose they are."""
    build, shape = NETWORKS["two_dropouts"]
    x, y = data(shape, "cpu", n=48)

    def fragile(outputs, targets):
        parts = augmented(outputs, targets, beta=0.5)
        factors = torch.where(outputs.detach().flatten(1).amax(1) > 1.3, math.inf, 1.0)
        loss = parts.parts["member_loss"] * factors
        return ds.LossParts(loss.sum(), {"member_loss": loss})

    failures, counters = [], []
    for switch in (eager, replays):
        switch()
        ensemble = ds.Ensemble(build, 3, seed=5, backend="loop").double()
        with pytest.raises(ds.TrainingDiverged) as caught:
            ds.fit(ensemble, (x, y), fragile, epochs=60, batch_size=8, lr=0.02)
        failures.append((caught.value.step, caught.value.members, caught.value.part))
        counters.append({n: t.tolist() for n, t in ensemble.body.tensors().items() if n.endswith("step")})
    assert failures[0][0] > 6 * capture.WARM_UP, "it failed within a graph"
    assert failures[1] == failures[0]
    step = failures[0][0]
    assert counters[0] == {"2.step": [step + 1] * 3, "5.step": [step + 1] * 3}, "the pass that failed is counted"
    assert counters[1] == {"2.step": [step] * 3, "5.step": [step] * 3}, "replays after the failure are not counted"


def test_predict_while_training_leaves_its_mode_alone():
    build, shape = NETWORKS["two_dropouts"]
    ensemble = ds.Ensemble(build, 2).double().eval()
    x, y = data(shape, "cpu")
    modes = []

    def predict_and_record(moment):
        ensemble.predict(x)
        modes.append(ensemble.body.training)

    ds.fit(ensemble, (x, y), partial(augmented, beta=0.7), epochs=3, batch_size=8, progress=predict_and_record)
    assert all(modes)
    assert not ensemble.training


@pytest.mark.parametrize("capture_function", [recorded, lambda function, generators: function])
def test_replays_with_stale_tensors_are_detected(capture_function, eager, steps_by):
    """When a run ends, tensors are replaced: a graph that is not forgotten goes on with the old ones."""

    class Forgetful(capture.GraphSteps):
        def forget(self):
            """Keep the graphs."""

    build, shape = NETWORKS["mlp"]
    options = {"grid": {"lr": [0.1, 0.001]}, "epochs": 12, "batch_size": 9, "validation": 0.2, "patience": 2}
    eager()
    expected = ds.sweep(build, data(shape, "cpu"), partial(augmented, beta=0.3), members=2, **options)
    ends = [len(expected.history(i).epochs) for i in range(2)]
    assert ends[0] < ends[1] - 1, "the first run ends while the other goes on"
    steps_by(lambda engine: Forgetful(lambda: capture_function))
    swept = ds.sweep(build, data(shape, "cpu"), partial(augmented, beta=0.3), members=2, **options)
    if capture_function is recorded:
        with pytest.raises(AssertionError, match="not close"):
            assert_same(weights(swept.run(1)), weights(expected.run(1)))
    else:  # a function finds the new tensors, as a graph would not
        assert_same(weights(swept.run(1)), weights(expected.run(1)))

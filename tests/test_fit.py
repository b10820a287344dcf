"""`fit`: equal to separate trainings, and what it promises around that."""

import gc
import logging
import math
from functools import partial

import numpy as np
import pytest
import torch
from networks import NETWORKS
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dissensus as ds
from dissensus.data import TensorBatches

M, N, BATCH = 3, 22, 8  # the last batch of an epoch holds 6
mse = partial(ds.objectives.independent, loss="squared_error")
OPTIMISERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.01}),
}


def regression(shape=(6,), n=N, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, *shape, generator=generator, dtype=dtype)
    return x, torch.randn(n, 3, generator=generator, dtype=dtype)


def ensemble_of(name, backend="auto", members=M):
    return ds.Ensemble(NETWORKS[name][0], members, seed=1, backend=backend).double()


def weights(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("optimizer", OPTIMISERS)
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "two_dropouts", "tied", "plain_average_norm"])
def test_fit_equals_separate_trainings(name, optimizer):
    make_optimiser, options = OPTIMISERS[optimizer]
    x, y = regression(NETWORKS[name][1])
    rates = [0.01, 0.003, 0.02]
    ensemble = ensemble_of(name)
    ensemble.body.set_keys([(5, member) for member in range(M)])
    independent = [ensemble.member(i) for i in range(M)]
    schedule = ds.train.schedules.step([4], 0.3)
    ds.fit(
        ensemble,
        (x, y),
        mse,
        epochs=7,
        batch_size=BATCH,
        lr=rates,
        optimizer=optimizer,
        schedule=schedule,
        clip_norm=2.0,
        seed=5,
        **options,
    )
    loader = TensorBatches(x, y, batch_size=BATCH, seeds=[5], device=torch.device("cpu"))
    for i, module in enumerate(independent):
        optimiser = make_optimiser(module.parameters(), lr=rates[i], **options)
        for epoch in range(7):
            optimiser.param_groups[0]["lr"] = rates[i] * (0.3 if epoch >= 4 else 1.0)
            for xs, ys, *_ in loader.epoch(epoch):
                optimiser.zero_grad()
                (module(xs) - ys).square().sum(-1).mean().backward()
                nn.utils.clip_grad_norm_(module.parameters(), 2.0)
                optimiser.step()
        assert_same(ensemble.member(i).state_dict(), module.state_dict())


@pytest.mark.parametrize("name", ["mlp", "two_dropouts", "cnn_batch_norm"])
def test_backends_train_to_the_same_weights_under_an_interacting_objective(name):
    x, y = regression(NETWORKS[name][1])
    objective = partial(ds.objectives.augmented, beta=0.8, loss="squared_error", pool="score")
    trained = []
    for backend in ("loop", "vmap", "batched"):
        ensemble = ensemble_of(name, backend)
        ds.fit(ensemble, (x, y), objective, epochs=7, batch_size=BATCH, lr=0.01, seed=2)
        trained.append(weights(ensemble))
    assert_same(trained[1], trained[0])
    assert_same(trained[2], trained[0])


def test_members_of_different_architectures_train_together():
    modules = [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3))]
    x, y = regression()
    ensemble = ds.Ensemble.from_modules(modules).double()
    ds.fit(ensemble, (x, y), mse, epochs=7, batch_size=BATCH, lr=0.01, seed=4)
    loader = TensorBatches(x, y, batch_size=BATCH, seeds=[4], device=torch.device("cpu"))
    for i, module in enumerate(modules):
        module.double()
        optimiser = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0)
        for epoch in range(7):
            for xs, ys, *_ in loader.epoch(epoch):
                optimiser.zero_grad()
                (module(xs) - ys).square().sum(-1).mean().backward()
                optimiser.step()
        assert_same(ensemble.member(i).state_dict(), module.state_dict())


def test_sources_agree():
    x, y = regression()

    class Items(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return x[index], y[index]

    ordered = []
    for data in ((x, y), TensorDataset(x, y), Items(), DataLoader(TensorDataset(x, y), batch_size=BATCH)):
        ensemble = ensemble_of("mlp", "loop")
        history = ds.fit(ensemble, data, mse, epochs=2, batch_size=BATCH, shuffle=False)
        assert history.steps == 6
        ordered.append(weights(ensemble))
    for tensors in ordered[1:]:
        assert_same(tensors, ordered[0])
    shuffled = []
    for seed in (0, 0, 1):
        ensemble = ensemble_of("mlp", "loop")
        ds.fit(ensemble, Items(), mse, epochs=2, batch_size=BATCH, seed=seed)
        shuffled.append(weights(ensemble)["0.weight"])
    assert torch.equal(shuffled[0], shuffled[1])
    assert not torch.equal(shuffled[0], shuffled[2])


def test_drop_last_and_augment():
    x, y = regression()
    batches = []

    def augment(batch, generator):
        batches.append((len(batch), torch.rand(1, generator=generator).item()))
        return batch + 1

    ds.fit(ensemble_of("mlp"), (x, y), mse, epochs=2, batch_size=BATCH, drop_last=True, augment=augment)
    assert [size for size, _ in batches] == [8] * 4
    assert len({draw for _, draw in batches}) == 4
    first_batches = list(batches)
    batches.clear()
    ds.fit(ensemble_of("mlp"), (x, y), mse, epochs=2, batch_size=BATCH, drop_last=True, augment=augment)
    assert batches == first_batches
    with pytest.raises(ValueError, match="at most 22 with drop_last"):
        ds.fit(ensemble_of("mlp"), (x, y), mse, epochs=1, batch_size=64, drop_last=True)


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_frozen_members_do_not_move(optimizer):
    x, y = regression((2, 8, 8))
    ensemble = ensemble_of("cnn_batch_norm")
    before = weights(ensemble)
    ds.fit(ensemble, (x, y), mse, epochs=2, batch_size=BATCH, frozen=[1], optimizer=optimizer, weight_decay=0.1)
    for name, tensor in weights(ensemble).items():
        assert torch.equal(tensor[1], before[name][1]), f"{name} of a frozen member moved"
        assert not torch.equal(tensor[0], before[name][0]), f"{name} of a member in training stood still"
    with pytest.raises(ValueError, match="at least one member"):
        ds.fit(ensemble, (x, y), mse, epochs=1, frozen=[0, 1, 2])


def overfitting():
    """Noise as targets: validation loss rises soon."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=generator), torch.randn(40, 3, generator=generator)
    return (x[:20], y[:20]), (x[20:], y[20:])


def test_early_stopping_keeps_the_ensembles_best_weights():
    train, held_out = overfitting()
    objective = partial(ds.objectives.augmented, beta=0.5, loss="squared_error", pool="score")
    ensemble = ds.Ensemble(NETWORKS["norm_first"][0], M)
    history = ds.fit(ensemble, train, objective, epochs=200, batch_size=5, lr=0.01, validation=held_out, patience=3)
    curve = history.column("validation")
    assert history.stopped_early
    assert len(curve) < 200
    assert history.best_epoch == 1 + min(range(len(curve)), key=curve.__getitem__) == len(curve) - 3
    outputs = ensemble.predict(held_out[0])
    assert objective(outputs, held_out[1]).parts["ensemble"].item() == pytest.approx(min(curve), rel=1e-5)


def test_early_stopping_per_member_keeps_each_members_own_best():
    train, held_out = overfitting()
    ensemble = ds.Ensemble(NETWORKS["norm_first"][0], M)
    options = {"epochs": 60, "batch_size": 5, "lr": [0.01, 0.001, 0.05]}
    history = ds.fit(ensemble, train, mse, validation=held_out, patience=4, watch="member", **options)
    curves = list(zip(*history.column("validation"), strict=True))
    member_losses = mse(ensemble.predict(held_out[0]), held_out[1]).parts["member_loss"]
    assert len(set(history.best_epoch)) > 1
    for member, curve in enumerate(curves):
        assert history.best_epoch[member] == 1 + curve.index(min(curve))
        assert member_losses[member].item() == pytest.approx(min(curve), rel=1e-5)
    single = ds.Ensemble(NETWORKS["norm_first"][0], M).subset([1])
    single_history = ds.fit(
        single, train, mse, validation=held_out, patience=4, watch="member", **{**options, "lr": 0.001}
    )
    assert single_history.best_epoch[0] == history.best_epoch[1], "a member's stopping depends on its neighbours"


def test_validation_by_fraction_and_custom_metric():
    x, y = regression(n=30)
    shapes = []

    def metric(outputs, targets):
        shapes.append((tuple(outputs.shape), tuple(targets.shape)))
        return float(len(shapes))  # rises: the first epoch is the best

    history = ds.fit(ensemble_of("mlp"), (x, y), mse, epochs=3, validation=0.2, metric=metric, mode="min")
    assert shapes == [((M, 6, 3), (6, 3))] * 3
    assert history.best_epoch == 1
    assert history.column("validation") == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="`metric` must give one number per member; got \\[\\]"):
        ds.fit(ensemble_of("mlp"), (x, y), mse, epochs=1, validation=0.2, metric=metric, mode="min", watch="member")


def test_history_and_progress():
    x, y = regression()
    moments = []
    history = ds.fit(ensemble_of("mlp"), (x, y), mse, epochs=3, batch_size=BATCH, progress=moments.append)
    assert (history.steps, len(history.epochs)) == (9, 3)
    assert moments[-1].step == moments[-1].steps == 9
    assert {moment.epoch for moment in moments} <= {1, 2, 3}
    assert moments[-1].epoch == history.epochs[-1]["epoch"] == 3
    assert history.column("epoch") == [1, 2, 3]
    assert moments[-1].spread == max(moments[-1].member_loss) - min(moments[-1].member_loss) > 0
    assert "spread" in str(moments[-1])
    last = history.epochs[-1]
    assert last["loss"] == moments[-1].loss == pytest.approx(sum(last["member_loss"]) / M)
    assert last["individual"] == pytest.approx(sum(last["member_loss"]) / M)
    assert '"steps": 9' in history.to_json()
    with pytest.raises(KeyError, match="there is no 'accuracy'"):
        history.column("accuracy")


def test_epoch_means_weigh_examples_not_batches():
    x, y = regression()
    ensemble = ensemble_of("mlp")
    expected = mse(ensemble(x), y).total.item()
    history = ds.fit(ensemble, (x, y), mse, epochs=1, batch_size=BATCH, lr=0.0)
    assert history.epochs[0]["loss"] == pytest.approx(expected / M)


def test_divergence_names_step_part_and_members_and_keeps_the_last_good_weights():
    x, y = regression((2, 8, 8))
    ensemble = ensemble_of("cnn_batch_norm")
    steps = []

    def breaks_later(outputs, targets):
        steps.append(1)
        if len(steps) == 5:
            outputs = outputs * torch.tensor([1.0, math.nan, 1.0], dtype=outputs.dtype).view(3, 1, 1)
        return mse(outputs, targets)

    expected = ensemble_of("cnn_batch_norm")
    with pytest.raises(ds.TrainingDiverged, match=r"step 4, in `member_loss` \(members 1\).*smaller `lr`") as caught:
        ds.fit(ensemble, (x, y), breaks_later, epochs=5, batch_size=BATCH, lr=0.01)
    assert (caught.value.step, caught.value.members) == (4, [1])
    assert len(caught.value.history.epochs) == 1
    assert not any(p.requires_grad and not p.isfinite().all() for p in ensemble.parameters())

    class Enough(Exception):
        pass

    def stops_later(outputs, targets):
        steps.append(1)
        if len(steps) == 10:
            raise Enough
        return mse(outputs, targets)

    with pytest.raises(Enough):
        ds.fit(expected, (x, y), stops_later, epochs=5, batch_size=BATCH, lr=0.01)
    assert_same(
        {k: v for k, v in weights(ensemble).items() if k in ensemble.body.trainable()},
        {k: v for k, v in weights(expected).items() if k in expected.body.trainable()},
    )


def test_divergence_in_a_gradient_alone_is_caught():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return (self.scale * x).abs().sqrt() * 0 + self.scale

    ensemble = ds.Ensemble(Root, 2)
    with pytest.raises(ds.TrainingDiverged, match=r"step 0, in the gradient \(members 0, 1\)"):
        ds.fit(ensemble, (torch.ones(4, 1), torch.ones(4, 1)), mse, epochs=1)
    assert all(p.isfinite().all() for p in ensemble.parameters())


@pytest.mark.parametrize(
    ("part", "value"), [("targets", math.nan), ("targets", math.inf), ("inputs", math.nan), (None, None)]
)
def test_divergence_names_data_that_is_not_finite(part, value):
    x, y = regression()
    if part is not None:
        {"inputs": x, "targets": y}[part][5] = value
    loader = DataLoader(TensorDataset(x, y), 4)
    words = rf"step 1, in .*, because the {part} of that batch are not finite\. .* Drop or fill such {part}\.$"
    with pytest.raises(
        ds.TrainingDiverged, match=words if part else r"\)\. .* A smaller `lr`.*and targets usually help\.$"
    ):
        ds.fit(ensemble_of("mlp"), loader, mse, epochs=3, optimizer="sgd", lr=1e-3 if part else 1e30)


def test_a_sweep_names_data_that_is_not_finite():
    x, y = regression()
    x[5] = math.nan
    loader = DataLoader(TensorDataset(x, y), 4)
    build = NETWORKS["mlp"][0]
    swept = ds.sweep(lambda: build().double(), loader, mse, grid={"lr": [1e-3, 1e-2]}, members=2, epochs=1)
    assert all("because the inputs of that batch are not finite" in outcome.reason for outcome in swept.outcomes)


def test_divergence_does_not_spoil_batch_norm_statistics():
    x, y = regression()
    calls = []

    def poison(batch, _generator):
        calls.append(1)
        return batch * math.inf if len(calls) == 4 else batch

    ensemble = ensemble_of("norm_first")
    with pytest.raises(ds.TrainingDiverged, match="step 3, in the outputs"):
        ds.fit(ensemble, (x, y), mse, epochs=3, batch_size=BATCH, augment=poison)
    assert all(tensor.isfinite().all() for tensor in ensemble.body.tensors().values() if tensor.is_floating_point())
    assert ensemble.predict(x).isfinite().all()


def test_bf16_runs_networks_under_autocast_and_the_objective_in_float32():
    dtypes = set()

    def objective(outputs, targets):
        dtypes.add(outputs.dtype)
        return mse(outputs, targets)

    x, y = regression(dtype=torch.float32)
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M)
    history = ds.fit(ensemble, (x, y), objective, epochs=3, lr=0.01, precision="bf16", validation=(x, y))
    assert dtypes == {torch.float32}
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def test_fit_leaves_mode_and_other_generators_alone():
    x, y = regression()
    ensemble = ensemble_of("two_dropouts", "loop").eval()
    state = torch.get_rng_state()
    ds.fit(ensemble, (x, y), mse, epochs=1)
    assert not ensemble.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.requires_grad and p.is_leaf for p in ensemble.parameters())
    ds.fit(ensemble, (x, y), mse, epochs=1)
    ensemble(x).sum().backward()


def test_parameters_without_gradient_stay(caplog):
    def build():
        net = NETWORKS["mlp"][0]()
        net[0].weight.requires_grad_(False)
        return net

    ensemble = ds.Ensemble(build, M).double()
    before = weights(ensemble)
    with caplog.at_level(logging.WARNING):
        ds.fit(ensemble, regression(), mse, epochs=1, weight_decay=0.1)
    after = weights(ensemble)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])


def test_bad_input_is_refused_with_a_fix(unchecked):
    x, y = regression()
    labels = torch.zeros(N, dtype=torch.int64)
    ce = partial(ds.objectives.independent, loss="cross_entropy")

    def refused(match, data=(x, y), objective=mse, error=ValueError, **options):
        with pytest.raises(error, match=match):
            ds.fit(ensemble_of("mlp"), data, objective, **{"epochs": 1, **options})

    refused("`epochs` must be a whole number of at least 1; got 0", epochs=0)
    refused("`batch_size` must be", batch_size=0)
    refused("Did you mean 'adamw'", optimizer="adamww")
    refused("as many targets as inputs", data=(x, y[:-1]))
    refused("at least one example", data=(x[:0], y[:0]))
    refused(r"be a pair \(inputs, targets\).*Pass weights=", data=(x, y, y), error=TypeError)
    refused("a Dataset, a DataLoader or an iterable of batches; got str", data="cifar", error=TypeError)
    refused("`patience` must come with `validation`", patience=3)
    refused("name members 0 to 2", frozen=[7])
    refused(r"got labels from 0 to 5", data=(x, labels + 5 * (torch.arange(N) == 3)), objective=ce)
    refused(r"`targets` must have shape \[B=22, C=3\]; got \[22, 2\]", data=(x, y[:, :2]), batch_size=64)
    with_nan = x.clone()
    with_nan[17, 2] = math.nan
    refused("in 1 example, first in 17", data=(with_nan, y))
    refused("or a fraction", validation=3)
    refused("`validation` must lie between 0 and 1 as a fraction", validation=1.5)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield x[0], y[0]

    refused("have a length; got a stream .* Pass steps_per_epoch", data=DataLoader(Stream()), error=TypeError)
    refused("loss scaling", precision="fp16")


@pytest.mark.parametrize(
    ("loss", "targets"), [("poisson", torch.arange(N)), ("logistic", 2 * (torch.arange(N) % 2) - 1)]
)
def test_integer_targets_of_one_output_are_values(loss, targets):
    x, _ = regression()
    trained = []
    for y in (targets, targets.double()):
        ensemble = ds.Ensemble(lambda: nn.Linear(6, 1), M, seed=1).double()
        ds.fit(ensemble, (x, y), partial(ds.objectives.independent, loss=loss), epochs=2, lr=1e-2)
        trained.append(weights(ensemble))
    assert_same(*trained)


def test_names_that_the_history_uses_are_refused():
    def clashing(outputs, targets):
        parts = mse(outputs, targets)
        return ds.LossParts(parts.total, {"loss": parts.total})

    with pytest.raises(ValueError, match="`parts` must not be named 'loss'"):
        ds.fit(ensemble_of("mlp"), regression(), clashing, epochs=1)


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="have parameters to train"):
        ds.fit(ensemble_of("mlp").requires_grad_(False), regression(), mse, epochs=1)


def test_divergence_with_validation_keeps_the_best_weights():
    x, y = regression()
    calls = []

    def breaks(outputs, targets):
        calls.append(1)
        parts = mse(outputs, targets)
        return ds.LossParts(parts.total * (math.nan if len(calls) > 12 else 1.0), parts.parts)

    with pytest.raises(ds.TrainingDiverged, match="holds its best weights up to then") as caught:
        ds.fit(ensemble_of("mlp"), (x, y), breaks, epochs=9, batch_size=BATCH, validation=0.3)
    assert not caught.value.history.stopped_early


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda parts: parts.total, "`objective` must return LossParts"),
        (lambda parts: ds.LossParts(parts.total.view(1), {}), r"shape \[\], as total; got shape \[1\]. Use total.sum"),
        (lambda parts: ds.LossParts(parts.parts["member_loss"], {}), r"got shape \[3\]"),
        (lambda parts: ds.LossParts(parts.total, {"a": 1.0}), r"`parts\['a'\]` must be a tensor"),
    ],
)
def test_wrong_results_of_objectives_are_refused(returned, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        ds.fit(ensemble_of("mlp"), regression(), lambda o, t: returned(mse(o, t)), epochs=1)


def test_low_precision_weights_can_be_clipped():
    x, y = (part.bfloat16() for part in regression())
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M).bfloat16()
    history = ds.fit(ensemble, (x, y), mse, epochs=20, lr=0.01, clip_norm=1.0)
    assert history.column("loss")[-1] < history.column("loss")[0]


def test_wrong_dtypes_and_nan_targets_are_refused(unchecked):
    x, y = regression()
    with pytest.raises(TypeError, match=r"networks' dtype, torch.float32; got torch.float64. Use x.float\(\)"):
        ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M), (x, y), mse, epochs=1)
    with pytest.raises(ValueError, match="`y` must be finite"):
        ds.fit(ensemble_of("mlp"), (x, y * math.nan), mse, epochs=1)
    with pytest.raises(TypeError, match="torch.from_numpy"):
        ds.fit(ensemble_of("mlp"), (x, y.tolist()), mse, epochs=1)
    single_output = ds.Ensemble(lambda: nn.Linear(6, 1), M).double()
    with pytest.raises(ValueError, match="two classes or more; got one output"):
        ds.fit(
            single_output,
            (x, torch.zeros(N).long()),
            partial(ds.objectives.independent, loss="cross_entropy"),
            epochs=1,
        )


def test_validation_with_keep_last_keeps_the_last_weights_and_records_the_parts(unchecked):
    x, y = regression()
    objective = partial(ds.objectives.augmented, loss="squared_error", pool="score", beta=0.5)
    options = {"epochs": 6, "batch_size": BATCH, "lr": 0.3}
    watched, unwatched = ensemble_of("mlp"), ensemble_of("mlp")
    history = ds.fit(watched, (x, y), objective, validation=(-x, y), keep="last", **options)
    ds.fit(unwatched, (x, y), objective, **options)
    torch.testing.assert_close(watched.predict(x), unwatched.predict(x))
    assert history.best_epoch is None
    last = history.epochs[-1]
    parts = objective(watched.predict(-x), y).parts
    for name in ("ensemble", "individual", "diversity"):
        assert last[f"validation_{name}"] == pytest.approx(float(parts[name]))
    assert last["validation"] == last["validation_ensemble"]
    assert "validation_member_loss" not in last
    with pytest.raises(ValueError, match="Did you mean 'last'"):
        ds.fit(unwatched, (x, y), objective, keep="lst", **options)


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_validation_by_a_loader_equals_validation_by_tensors(kind):
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)
    held_out = x[25:], y[25:]
    dataset = TensorDataset(*held_out)
    results = []
    for validation in (held_out, dataset if kind == "dataset" else DataLoader(dataset, 4)):
        ensemble = ds.Ensemble(partial(ds.nets.mlp, 5, 3, (8,)), 3)
        track = {"accuracy": lambda outputs, targets: (outputs.mean(0).argmax(-1) == targets).double().mean()}
        objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="score", beta=0.5)
        options = {"epochs": 6, "batch_size": 8, "patience": 3, "lr": 0.05}
        history = ds.fit(ensemble, (x[:25], y[:25]), objective, validation=validation, track=track, **options)
        results.append((history, ensemble.predict(held_out[0])))
    assert results[1][0].column("validation") == pytest.approx(results[0][0].column("validation"), rel=1e-5)
    assert results[1][0].best_epoch == results[0][0].best_epoch
    torch.testing.assert_close(results[1][1], results[0][1])
    best = results[0][0].best_epoch
    accuracy = float((results[0][1].mean(0).argmax(-1) == held_out[1]).double().mean())
    assert results[0][0].column("validation_accuracy")[best - 1] == pytest.approx(accuracy)


def test_measures_are_tracked_per_run_of_a_sweep():
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 5, generator=generator), torch.randn(40, 1, generator=generator)
    track = {"spread": lambda outputs, targets: outputs.std(0).mean()}
    objective = partial(ds.objectives.augmented, loss="squared_error", pool="score")
    swept = ds.sweep(
        partial(ds.nets.mlp, 5, 1, (8,)),
        (x[:25], y[:25]),
        objective,
        grid={"beta": [0.0, 1.0]},
        members=3,
        epochs=3,
        lr=0.02,
        validation=(x[25:], y[25:]),
        track=track,
        keep="last",
    )
    for run in range(2):
        spreads = swept.history(run).column("validation_spread")
        assert spreads[-1] == pytest.approx(float(swept.run(run).predict(x[25:]).std(0).mean()), rel=1e-5)


@pytest.mark.slow(fast=["fit", "sweep"])
@pytest.mark.parametrize("kind", ["fit", "fit and predict", "fit with a twin", "sweep"])
def test_weights_are_freed_with_the_ensemble_not_when_python_collects_cycles(kind):
    """Memory of a GPU does not count in Python's collector: what cycles keep may stay for long."""
    x, y = torch.randn(32, 200), torch.randint(10, (32,))
    build, independent = partial(ds.nets.mlp, 200, 10, (200,)), partial(ds.objectives.independent, loss="cross_entropy")
    options = {"epochs": 1, "batch_size": 16, "lr": 1e-3}

    def train():
        if kind == "sweep":
            ds.sweep(build, (x, y), independent, grid=[{"seed": 0}, {"seed": 1}], members=2, **options)
            return
        ensemble = ds.Ensemble(build, members=2)
        if kind == "fit with a twin":
            ds.fit(ensemble, (x, y), ds.objectives.adp, twin=True, **options)
        else:
            ds.fit(ensemble, (x, y), independent, **options)
        if kind == "fit and predict":
            ensemble.predict(x)

    def large_tensors():
        return sum(type(o) in (torch.Tensor, nn.Parameter) and o.numel() >= 200 * 200 for o in gc.get_objects())

    gc.collect()
    before = large_tensors()
    gc.disable()
    try:
        train()
        assert large_tensors() == before
    finally:
        gc.enable()


def test_settings_without_effect_are_reported(caplog, unchecked):
    x, y = regression(dtype=torch.float32)
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (4,)), 2)
    with caplog.at_level(logging.WARNING, "dissensus"):
        ds.fit(ensemble, (x, y), mse, epochs=1, momentum=0.9)
    assert "`momentum` belongs to SGD" in caplog.text
    with pytest.raises(ValueError, match="come with `checkpoint`"):
        ds.fit(ensemble, (x, y), mse, epochs=1, resume=True)
    with pytest.raises(ValueError, match="`track` must come with `validation`"):
        ds.fit(ensemble, (x, y), mse, epochs=1, track={"spread": lambda o, t: o.std()})
    with pytest.raises(ValueError, match="`validation` must hold at least one example"):
        ds.fit(ensemble, (x, y), mse, epochs=1, validation=(x[:0], y[:0]))
    with pytest.raises(TypeError, match="`objective` must be a function"):
        ds.fit(ensemble, (x, y), "squared_error", epochs=1)
    with pytest.raises(TypeError, match=r"Use x\.double\(\)"):
        ds.fit(ds.Ensemble(partial(ds.nets.mlp, 6, 3, (4,)), 2).double(), (x, y), mse, epochs=1)


def test_numpy_scalars_are_accepted(tmp_path, unchecked):
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (4,)), members=np.int64(2), seed=np.int64(1))
    assert (ensemble.members, ensemble.seed, type(ensemble.seed)) == (2, 1, int)
    ensemble.save(tmp_path / "saved")
    x, y = regression(dtype=torch.float32)
    ds.fit(ensemble, (x, y), mse, epochs=np.int64(1), seed=np.int64(3), lr=np.float32(1e-3))
    subset = ensemble.subset(torch.tensor([1]))
    torch.testing.assert_close(subset.predict(x)[0], ensemble.predict(x)[1])


def test_predictions_of_a_dataset_leave_the_global_generator_alone():
    x, y = regression(dtype=torch.float32)
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (4,)), 2)
    before = torch.get_rng_state()
    ensemble.predict(TensorDataset(x, y))
    assert torch.equal(torch.get_rng_state(), before)


# Targets that the loss does not take

OBJECTIVES = ds.objectives
X12 = torch.randn(12, 5, generator=torch.Generator().manual_seed(4))
LABELS = torch.arange(12) % 3
SIGNS = (2 * (torch.arange(12) % 2) - 1).float()
SOFT = torch.nn.functional.one_hot(LABELS, 3).float()


def with_last_target(targets, value):
    """Targets of which the last is another."""
    changed = targets.clone()
    changed[-1] = value
    return changed


def objective_with_loss(loss):
    """A user's own objective with a parameter ``loss``."""

    def objective(outputs, targets, *, loss=loss):
        return ds.objectives.independent(outputs, targets, loss=loss)

    return objective


independent = OBJECTIVES.independent
WRONG_TARGETS = {
    "0 and 1 as signs": (
        partial(independent, loss="logistic"),
        1,
        SIGNS,
        SIGNS.clamp_min(0),
        "be -1 or \\+1; got .* Use 2 \\* targets - 1",
    ),
    "bool as signs": (partial(independent, loss="exponential"), 1, SIGNS, SIGNS > 0, "be -1 or \\+1"),
    "one sign wrong": (partial(independent, loss="logistic"), 1, SIGNS, with_last_target(SIGNS, 0), "be -1 or \\+1"),
    "counts": (
        partial(independent, loss="poisson"),
        1,
        SIGNS + 1,
        with_last_target(SIGNS + 1, -2),
        "be counts of at least 0; got -2",
    ),
    "sums of 5": (partial(independent, loss="cross_entropy"), 3, SOFT, 5 * SOFT, "be soft labels: .* with sum one"),
    "one below zero": (
        partial(independent, loss="brier"),
        3,
        SOFT,
        with_last_target(SOFT, torch.tensor([-1.0, 1.0, 1.0])),
        "be soft labels",
    ),
    "too high": (
        partial(independent, loss="cross_entropy"),
        3,
        LABELS,
        with_last_target(LABELS, 3),
        "be labels from 0 to 2; .* to 3",
    ),
    "negative": (
        partial(independent, loss="brier"),
        3,
        LABELS,
        with_last_target(LABELS, -1),
        "be labels from 0 .*; .* from -1 to 2",
    ),
    "nested partials": (
        partial(partial(partial(OBJECTIVES.augmented, loss="squared_error"), pool="score", beta=0.5), loss="logistic"),
        1,
        SIGNS,
        with_last_target(SIGNS, 0),
        "be -1 or \\+1",
    ),
    "a function": (
        partial(independent, loss=ds.losses.logistic),
        1,
        SIGNS,
        with_last_target(SIGNS, 0),
        "be -1 or \\+1",
    ),
    "a user's default": (objective_with_loss("logistic"), 1, SIGNS, with_last_target(SIGNS, 0), "be -1 or \\+1"),
    "a user's name": (
        partial(objective_with_loss("squared_error"), loss="poisson"),
        1,
        SIGNS + 1,
        with_last_target(SIGNS, -1),
        "be counts",
    ),
    "adp": (OBJECTIVES.adp, 3, LABELS, with_last_target(LABELS, 3), "be labels from 0 to 2"),
    "ldr": (partial(OBJECTIVES.ldr, strength=1.0), 3, LABELS, with_last_target(LABELS, -1), "be labels from 0 "),
}


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


SOURCES = {
    "tensors": lambda x, y: (x, y),
    "tensor dataset": TensorDataset,
    "dataset": Pairs,
    "loader": lambda x, y: DataLoader(Pairs(x, y), 4),
}


@pytest.mark.slow(cases=["*-dataset", "*-tensor dataset"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", WRONG_TARGETS)
def test_targets_that_the_loss_does_not_take_are_refused(kind, source):
    objective, width, valid, invalid, message = WRONG_TARGETS[kind]
    build, make = partial(ds.nets.mlp, 5, width, (4,)), SOURCES[source]
    options = {"epochs": 1, "batch_size": 4, "shuffle": False}
    ensemble = ds.Ensemble(build, 2)
    before = weights(ensemble)
    ds.fit(ds.Ensemble(build, 2), make(X12, valid), objective, validation=make(X12, valid), **options)
    with pytest.raises(ValueError, match=f"`targets` must {message}"):
        ds.fit(ensemble, make(X12, invalid), objective, **options)
    with pytest.raises(ValueError, match=f"`validation targets` must {message}"):
        ds.fit(ensemble, make(X12, valid), objective, validation=make(X12, invalid), **options)
    if source.startswith("tensor"):
        assert_same(weights(ensemble), before)
        with pytest.raises(ValueError, match=f"targets` must {message}"):  # of whichever part they fall into
            ds.fit(ensemble, make(X12, invalid), objective, validation=0.5, **options)


def test_targets_of_hidden_losses_are_not_checked():
    build = partial(ds.nets.mlp, 5, 1, (4,))
    for objective in (
        lambda outputs, targets: independent(outputs, targets, loss="logistic"),
        partial(independent, loss=lambda outputs, targets: (outputs[:, 0] - targets).square()),
        partial(objective_with_loss("logistic"), loss=lambda outputs, targets: ds.losses.logistic(outputs, targets)),
    ):
        history = ds.fit(ds.Ensemble(build, 2), (X12, SIGNS.clamp_min(0)), objective, epochs=1, validation=0.25)
        assert len(history.epochs) == 1


class Doubled(TensorDataset):
    """Examples that are not those of its tensors."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


class DoubledPairs(list, Dataset):
    """A data set that is a list of two examples, too."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


class DoublingLoader(DataLoader):
    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


DERIVED = {
    "TensorDataset": Doubled,
    "DataLoader": lambda x, y: DoublingLoader(TensorDataset(x, y), 2),
    "list": lambda x, y: DoubledPairs(zip(x, y, strict=True)),
}


@pytest.mark.parametrize("name", DERIVED)
def test_examples_are_those_that_a_derived_class_gives(name):
    x, y = regression(n=2)

    def losses(data, held_out):
        history = ds.fit(ensemble_of("mlp"), data, mse, epochs=1, batch_size=2, shuffle=False, validation=held_out)
        return history.column("loss") + history.column("validation")

    source = DERIVED[name](x, y)
    assert losses(source, source) == pytest.approx(losses((2 * x, y), (2 * x, y)), rel=1e-10)


@pytest.mark.parametrize("loaded", [lambda x, y: TensorDataset(x, y), lambda x, y: DataLoader(Pairs(x, y), 4)])
def test_targets_of_unlabelled_data_are_ignored(loaded):
    trained = []
    for unlabelled in (loaded(X12, LABELS + 7), loaded(X12, torch.full((12,), -1.5))):
        ensemble = ds.Ensemble(partial(ds.nets.mlp, 5, 3, (4,)), 2)
        before = weights(ensemble)
        ds.fit(ensemble, (X12, LABELS), OBJECTIVES.a2d, epochs=1, batch_size=4, unlabelled=unlabelled)
        trained.append(weights(ensemble))
        assert not any(torch.equal(trained[-1][name], before[name]) for name in before)
    assert_same(*trained)


def test_labels_of_a_late_batch_are_checked_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.train.recipe.data_fingerprint", lambda *_: "data that is not recognised as changed")
    build, objective = partial(ds.nets.mlp, 5, 3, (4,)), partial(independent, loss="cross_entropy")
    options = {"checkpoint": tmp_path, "checkpoint_seconds": 0.0, "resume": True}

    def stop(moment):
        if moment.epoch == 2:
            raise KeyboardInterrupt

    valid, invalid = Pairs(X12, LABELS), Pairs(X12, with_last_target(LABELS, 3))
    with pytest.raises(KeyboardInterrupt):
        ds.fit(ds.Ensemble(build, 2), DataLoader(valid, 4), objective, epochs=3, progress=stop, **options)
    with pytest.raises(ValueError, match="`targets` must be labels from 0 to 2; got labels from 0 to 3"):
        ds.fit(ds.Ensemble(build, 2), DataLoader(invalid, 4), objective, epochs=3, **options)


# What the history tells


def pooled_loss(ensemble, pair, loss, pool, weights=None):
    return float(
        ds.diversity.decompose(
            ensemble.predict(pair[0]), pair[1], loss=loss, pool=pool, weights=weights
        ).ensemble.mean()
    )


WATCHED = {
    "independent, classes": (partial(independent, loss="cross_entropy"), "cross_entropy", "probability"),
    "independent, Brier": (partial(independent, loss="brier"), "brier", "probability"),
    "independent, smoothed": (
        partial(independent, loss="cross_entropy", smoothing=0.3),
        "cross_entropy",
        "probability",
    ),
    "joint": (partial(OBJECTIVES.joint, loss="cross_entropy", pool="score"), "cross_entropy", "score"),
    "negative correlation": (
        partial(OBJECTIVES.negative_correlation, strength=0.3, loss="cross_entropy"),
        "cross_entropy",
        "score",
    ),
    "adp": (partial(OBJECTIVES.adp, temperature=4.0), "cross_entropy", "probability"),
    "ldr": (partial(OBJECTIVES.ldr, strength=0.5), "cross_entropy", "probability"),
    "trades": (OBJECTIVES.trades, "cross_entropy", "probability"),
    "a user's loss": (objective_with_loss("cross_entropy"), "cross_entropy", "probability"),
}


@pytest.mark.parametrize("kind", WATCHED)
def test_validation_watches_the_pooled_loss_of_every_objective(kind):
    objective, loss, pool = WATCHED[kind]
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 5, 3, (4,)), M)
    pair = X12, LABELS
    history = ds.fit(ensemble, pair, objective, epochs=2, lr=0.05, validation=pair, keep="last")
    assert history.column("validation")[-1] == pytest.approx(pooled_loss(ensemble, pair, loss, pool), rel=1e-5)


def test_values_are_pooled_by_score_and_weights_count():
    pair, shares = (X12, SIGNS), [0.2, 0.7, 0.1]
    for objective, loss, weights in (
        (mse, "squared_error", None),
        (partial(independent, loss="logistic"), "logistic", None),
        (partial(independent, loss="poisson"), "poisson", None),
        (partial(independent, loss="squared_error", weights=shares), "squared_error", shares),
        (partial(OBJECTIVES.gradient_adjusted, alpha=0.5), "squared_error", None),
        (partial(independent, loss=lambda outputs, targets: (outputs[:, 0] - targets).square()), "squared_error", None),
    ):
        ensemble = ds.Ensemble(partial(ds.nets.mlp, 5, 1, (4,)), M)
        data = pair if loss != "poisson" else (X12, SIGNS + 1)
        history = ds.fit(ensemble, data, objective, epochs=2, lr=0.05, validation=data, keep="last")
        expected = pooled_loss(ensemble, data, loss, "score", weights)
        assert history.column("validation")[-1] == pytest.approx(expected, rel=1e-5)


def test_validation_watches_the_ensemble_part_or_the_mean_total():
    pair = X12, SIGNS
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 5, 1, (4,)), M)

    def with_ensemble_loss(outputs, targets):
        parts = mse(outputs, targets)
        return ds.LossParts(parts.total, {"ensemble": 7 * parts.total})

    history = ds.fit(ensemble, pair, with_ensemble_loss, epochs=1, lr=0.0, validation=pair)
    total = float(mse(ensemble.predict(X12), SIGNS).total)
    assert history.column("validation") == pytest.approx([7 * total], rel=1e-5)
    history = ds.fit(
        ensemble, pair, lambda *arguments: ds.LossParts(mse(*arguments).total, {}), epochs=1, lr=0.0, validation=pair
    )
    assert history.column("validation") == pytest.approx([total / M], rel=1e-5)
    assert history.column("loss") == pytest.approx([total / M], rel=1e-5)
    with pytest.raises(ValueError, match="`objective` must tell `member_loss` \\[M\\] for watch='member'"):
        ds.fit(ensemble, pair, with_ensemble_loss, epochs=1, validation=pair, watch="member")


def test_losses_do_not_grow_with_the_number_of_members():
    network = ds.nets.mlp(5, 3, (4,))
    pair, objective = (X12, LABELS), partial(independent, loss="cross_entropy")
    losses = []
    for members in (1, 2, 6):
        ensemble = ds.Ensemble.from_modules([network] * members)
        history = ds.fit(ensemble, pair, objective, epochs=3, lr=0.05, validation=pair, shuffle=False)
        losses.append((history.column("loss"), history.column("validation")))
    for loss, validation in losses[1:]:
        assert loss == pytest.approx(losses[0][0], rel=1e-5)
        assert validation == pytest.approx(losses[0][1], rel=1e-5)


def test_losses_of_drawn_members_and_masks_are_means_over_members():
    pair = X12, LABELS
    objective = partial(independent, loss="cross_entropy")
    ensemble = ds.Ensemble.from_modules([ds.nets.mlp(5, 3, (4,))] * 4)
    sampled = ds.fit(ensemble, pair, objective, epochs=1, lr=0.0, active_members=2)
    assert sampled.column("loss") == pytest.approx(
        [float(objective(ensemble.predict(X12), LABELS).total) / 4], rel=1e-5
    )
    masked = ds.masks.convert(ds.nets.mlp(5, 3, (16,)), 3, 2.0, widen=True, assign="all")
    history = ds.fit(masked, pair, objective, epochs=1, lr=0.0)
    assert history.column("loss")[0] == pytest.approx(sum(history.column("member_loss")[0]) / 3, rel=1e-5)


def test_history_records_learning_rates():
    pair = X12, SIGNS
    build, schedule = partial(ds.nets.mlp, 5, 1, (4,)), ds.train.schedules.step([1], 0.5)
    options = {"epochs": 2, "schedule": schedule}
    assert ds.fit(ds.Ensemble(build, 2), pair, mse, lr=0.002, **options).column("lr") == [0.002, 0.001]
    assert ds.fit(ds.Ensemble(build, 2), pair, mse, lr=[0.1, 0.1], **options).column("lr") == [0.1, 0.05]
    rates = ds.fit(ds.Ensemble(build, 2), pair, mse, lr=[0.1, 0.3], **options).column("lr")
    assert rates == [[0.1, 0.3], [0.05, 0.15]]
    swept = ds.sweep(build, pair, mse, grid={"lr": [0.1, 0.3]}, members=2, **options)
    assert [swept.history(run).column("lr") for run in range(2)] == [[0.1, 0.05], [0.3, 0.15]]


def test_a_member_without_a_finite_epoch_has_no_best_one(caplog):
    calls = []

    def metric(outputs, targets):
        calls.append(1)
        return torch.tensor([math.nan, 1.0 / len(calls)])

    build = partial(ds.nets.mlp, 5, 1, (4,))
    history = ds.fit(
        ds.Ensemble(build, 2),
        (X12, SIGNS),
        mse,
        epochs=3,
        validation=(X12, SIGNS),
        metric=metric,
        mode="min",
        watch="member",
    )
    assert history.best_epoch == [None, 3]
    assert "the validation metric of epoch 1 is not finite" in caplog.text


# Which way is better


def scripted(values):
    """A metric that takes these values, one after the other."""
    remaining = list(values)
    return lambda outputs, targets: torch.tensor(remaining.pop(0))


ACCURACIES = [0.1, 0.5, 0.9, 0.7, 0.8, 0.6, 0.2]


def test_the_highest_metric_is_best_on_request():
    build, pair = partial(ds.nets.mlp, 5, 1, (4,)), (X12, SIGNS)
    options = {"epochs": 7, "validation": pair, "lr": 0.05, "deterministic": True}
    for mode, extra in (("max", {}), ("max", {"patience": 2}), ("min", {})):
        ensemble = ds.Ensemble(build, 2)
        history = ds.fit(ensemble, pair, mse, metric=scripted(ACCURACIES), mode=mode, **{**options, **extra})
        assert history.best_epoch == (1 if mode == "min" else 3)
        assert len(history.epochs) == (5 if extra else 7)
        expected = ds.Ensemble(build, 2)
        ds.fit(expected, pair, mse, epochs=history.best_epoch, lr=0.05, deterministic=True)
        assert_same(weights(ensemble), weights(expected))
    history = ds.fit(
        ds.Ensemble(build, 2), pair, mse, metric=scripted(ACCURACIES), mode="max", min_delta=0.5, **options
    )
    assert history.best_epoch == 3, "0.5 is not more than 0.5 above 0.1"
    per_member = [[0.1, 0.9], [0.5, 0.5], [0.2, 0.1]]
    history = ds.fit(
        ds.Ensemble(build, 2),
        pair,
        mse,
        metric=scripted(per_member),
        mode="max",
        watch="member",
        **{**options, "epochs": 3},
    )
    assert history.best_epoch == [2, 1]
    ensemble = ds.Ensemble(build, 2)
    history = ds.fit(ensemble, pair, mse, metric=scripted(ACCURACIES), mode="max", keep="last", **options)
    assert history.best_epoch is None


def test_a_metric_that_falls_below_zero_and_one_that_starts_at_minus_infinity_are_fine():
    build, pair = partial(ds.nets.mlp, 5, 1, (4,)), (X12, SIGNS)
    options = {"epochs": 3, "validation": pair}
    values = [-5.0, -1.0, -3.0]
    for mode, best in (("max", 2), ("min", 1)):
        history = ds.fit(ds.Ensemble(build, 2), pair, mse, metric=scripted(values), mode=mode, **options)
        assert history.best_epoch == best


def test_conflicting_validation_settings_are_refused(unchecked):
    build, pair = partial(ds.nets.mlp, 5, 1, (4,)), (X12, SIGNS)
    accuracy = scripted([1.0])
    for message, options in {
        "`mode` must be one of 'min', 'max'; got 'highest'": {"mode": "highest", "metric": accuracy, "validation": 0.2},
        "`mode` must be 'min' without `metric`": {"mode": "max", "validation": 0.2},
        "`metric` must come with `validation` data": {"metric": accuracy},
        "`mode` must say whether a lower or a higher `metric` is better; got nothing": {
            "metric": accuracy,
            "validation": 0.2,
        },
        "`metric` must be a function .*; got 'accuracy'": {"metric": "accuracy", "validation": 0.2},
        "`min_delta` must be a number of at least 0": {"min_delta": -1.0, "validation": 0.2, "patience": 2},
        "`validation` must hold as many targets as inputs; got 12 inputs and 3": {"validation": (X12, SIGNS[:3])},
        "`validation x` must be finite": {"validation": (X12 / 0, SIGNS)},
    }.items():
        with pytest.raises((ValueError, TypeError), match=message):
            ds.fit(ds.Ensemble(build, 2), pair, mse, epochs=1, **options)
        with pytest.raises((ValueError, TypeError), match=message):
            ds.sweep(build, pair, mse, grid={"seed": [0]}, members=2, epochs=1, **options)


def test_targets_of_unknown_losses_are_not_checked():
    def gaussian(outputs, targets):
        mean, log_variance = outputs.unbind(-1)
        return ds.LossParts((log_variance + (targets - mean).square() / log_variance.exp()).mean(1).sum(), {})

    def trained(outputs, x, y, objective):
        ensemble = ds.Ensemble(partial(ds.nets.mlp, 5, outputs, (4,)), 2)
        ds.fit(ensemble, (x, y), objective, epochs=1, shuffle=False)
        return weights(ensemble)

    ages = torch.randint(18, 90, (12,))
    assert_same(trained(2, X12, ages, gaussian), trained(2, X12, ages.float(), gaussian))

    def ignoring(outputs, targets):
        losses = [torch.nn.functional.cross_entropy(output, targets, ignore_index=-100) for output in outputs]
        return ds.LossParts(torch.stack(losses).sum(), {})

    labels = torch.arange(12) % 3
    labels[::4] = -100
    labelled = labels >= 0
    expected = trained(3, X12[labelled], labels[labelled], ignoring)
    for name, weight in trained(3, X12, labels, ignoring).items():
        torch.testing.assert_close(weight, expected[name])


# How tensors lie in memory

IMAGES = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
}
VALUES = {
    "channels last": lambda y: y.t().contiguous().t(),
    "transposed": lambda y: y.t().contiguous().t(),
    "every second": lambda y: y.repeat_interleave(2, 0)[::2],
    "expanded": lambda y: y[:1].expand(len(y), -1),
}


@pytest.mark.slow(fast=["channels last", "expanded"])
@pytest.mark.parametrize("layout", IMAGES)
def test_inputs_and_targets_may_have_any_memory_layout(layout, tmp_path):
    build, shape = NETWORKS["cnn_batch_norm"]
    x, y = regression(shape)
    x, y = IMAGES[layout](x), VALUES[layout](y)
    options = {"epochs": 2, "batch_size": BATCH, "lr": 0.01}
    sources = [lambda *pair: pair, TensorDataset, lambda *pair: DataLoader(Pairs(*pair), BATCH)]
    for number, make in enumerate(sources):
        results = []
        for pair in ((x.contiguous(), y.contiguous()), (x, y)):
            ensemble = ensemble_of("cnn_batch_norm", "loop")
            history = ds.fit(
                ensemble,
                make(*pair),
                mse,
                validation=make(*pair),
                checkpoint=tmp_path / str(number),
                resume=True,
                **options,
            )
            results.append((weights(ensemble), history.column("validation")))
        assert_same(results[1][0], results[0][0])
        assert results[1][1] == pytest.approx(results[0][1])
    swept = [
        ds.sweep(build, pair, mse, grid={"seed": [0, 1]}, members=2, validation=pair, backend="loop", **options)
        for pair in ((x.contiguous(), y.contiguous()), (x, y))
    ]
    torch.testing.assert_close(swept[1].outputs(x), swept[0].outputs(x.contiguous()))

"""Numbers that make no sense are refused by name, before anything is trained or attacked."""

import functools
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dissensus as ds
from dissensus import attacks, checks
from dissensus.data.features import cached_features
from dissensus.train import AdversarialTraining, Convergence, schedules

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 4, generator=GENERATOR), torch.randn(40, 1, generator=GENERATOR)
LABELS = torch.randint(0, 3, (40,), generator=GENERATOR)
IMAGES = torch.rand(4, 1, 8, 8, generator=GENERATOR)
OUTPUTS = torch.randn(3, 40, 3, generator=GENERATOR)
mse = functools.partial(ds.objectives.independent, loss="squared_error")
build = functools.partial(ds.nets.mlp, 4, 1, (5,))
classifier = functools.partial(ds.nets.mlp, 4, 3, (5,))
attacked = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()

HUGE = 10**400
"""A whole number that no float holds."""
NO_NUMBERS = (math.nan, math.inf, -math.inf, -1, True, "3", 1 + 1j, torch.tensor(math.nan), HUGE)
"""Values that no setting below takes."""
NO_COUNTS = (*NO_NUMBERS, 0.5)


def fit(**options):
    ensemble = ds.Ensemble(build, 2, backend="loop")
    return ds.fit(ensemble, (X, Y), mse, **{"epochs": 1, "optimizer": "sgd", "validation": 0.2, **options})


def sweep(**options):
    return ds.sweep(build, (X, Y), mse, **{"grid": {"seed": [0]}, "members": 2, "epochs": 1, **options})


def gridded(**options):
    return sweep(grid={name: [value] for name, value in options.items()})


def attack(name, **fixed):
    return lambda **options: getattr(attacks, name)(attacked, IMAGES, torch.arange(4) % 3, **{**fixed, **options})


def evaluate(**options):
    return attacks.evaluate(attacked, (IMAGES, torch.arange(4) % 3), suite="quick", **{"epsilon": 0.1, **options})


def over(**options):
    return attacks.over(functools.partial(attacks.fgsm, epsilon=0.1), attacked, IMAGES, torch.arange(4) % 3, **options)


SETTINGS = {
    "fit": (
        fit,
        ("epochs", "batch_size", "active_members", "patience", "max_memory", "seed", "split_seed"),
        (
            "lr",
            "momentum",
            "betas",
            "eps",
            "weight_decay",
            "clip_norm",
            "min_delta",
            "validation",
            "frozen",
            "label_smoothing",
        ),
    ),
    "sweep": (
        sweep,
        ("epochs", "batch_size", "members", "active_members", "max_memory", "seed"),
        ("lr", "momentum", "betas", "eps", "weight_decay", "clip_norm", "min_delta", "validation", "label_smoothing"),
    ),
    "grid": (
        gridded,
        ("batch_size", "members", "seed", "split_seed", "fold"),
        ("lr", "momentum", "weight_decay", "clip_norm"),
    ),
    "Ensemble": (lambda **options: ds.Ensemble(build, **{"members": 2, **options}), ("members", "seed"), ()),
    "Convergence": (Convergence, ("patience",), ("tolerance",)),
    "AdversarialTraining": (
        lambda **options: AdversarialTraining(**{"epsilon": 0.1, **options}),
        ("steps",),
        ("epsilon", "step_share", "share", "box"),
    ),
    "schedules.step": (lambda **options: schedules.step(**{"at": [1], **options}), (), ("at", "factor")),
    "schedules.cosine": (schedules.cosine, (), ("floor",)),
    "schedules.warmup": (schedules.warmup, (), ("epochs",)),
    "fgsm": (attack("fgsm"), (), ("epsilon",)),
    "bim": (attack("bim", epsilon=0.1, steps=2), ("steps",), ("epsilon", "step_size")),
    "pgd": (attack("pgd", epsilon=0.1, steps=2), ("steps", "restarts", "seed"), ("epsilon", "step_size")),
    "mim": (attack("mim", epsilon=0.1, steps=2), ("steps",), ("epsilon", "step_size", "decay")),
    "jsma": (attack("jsma"), (), ("step_size", "distortion")),
    "carlini_wagner": (
        attack("carlini_wagner", steps=2, search_steps=1),
        ("steps", "search_steps"),
        ("step_size", "confidence", "constant", "widening"),
    ),
    "elastic_net": (
        attack("elastic_net", steps=2, search_steps=1),
        ("steps", "search_steps"),
        ("step_size", "l1_weight", "confidence", "constant"),
    ),
    "apgd": (attack("apgd", epsilon=0.1, steps=2), ("steps", "restarts", "classes", "seed"), ("epsilon",)),
    "square": (attack("square", epsilon=0.1, queries=5), ("queries", "restarts", "seed"), ("epsilon", "share")),
    "evaluate": (evaluate, ("examples", "batch_size", "seed"), ("epsilon", "epsilons")),
    "over": (over, ("batch_size",), ()),
    "audit": (
        lambda **options: ds.audit(OUTPUTS, LABELS, task="classification", kind="logits", **options),
        ("seed",),
        (),
    ),
}


@pytest.mark.slow(cases=["sweep", "audit", "evaluate", "apgd", "elastic_net", "mim", "pgd"])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_no_number_of_a_setting_is_refused_by_name(name, unchecked):
    call, counts, numbers = SETTINGS[name]
    for setting, values in [*((c, NO_COUNTS) for c in counts), *((n, NO_NUMBERS) for n in numbers)]:
        for value in values:
            with pytest.raises((ValueError, TypeError)) as caught:
                call(**{setting: value})
            assert str(caught.value).startswith(f"`{setting}` must "), f"{setting}={value!r}: {caught.value}"


NOT_SETTINGS = (object(), "no", b"x", np.array([[1, 2]]), [0, None], {"a": 1}, math.nan)
"""Values of other types than settings have, but for texts: names and paths."""
SUBJECTS = {"self", "ensemble", "build", "data", "objective", "model", "x", "y", "attack", "features"}
TAKEN = {"file": "no", "folder": "no", "checkpoint": "no", "output": "no"}
"""A name in the working folder, or of an output."""
CALLS = {
    "fit": (fit, ds.fit),
    "sweep": (sweep, ds.sweep),
    "predict": (lambda **options: ds.Ensemble(build, 2, backend="loop").predict(X, **options), ds.Ensemble.predict),
    "Ensemble": (SETTINGS["Ensemble"][0], ds.Ensemble.__init__),
    "cached_features": (
        lambda **options: cached_features(nn.Linear(4, 2), (X, Y), **{"folder": "features", **options}),
        cached_features,
    ),
    "evaluate": (
        lambda **options: attacks.evaluate(
            attacked, (IMAGES, torch.arange(4) % 3), **{"epsilon": 0.1, "suite": "quick", **options}
        ),
        attacks.evaluate,
    ),
    "fgsm": (attack("fgsm", epsilon=0.1), attacks.fgsm),
    **{name: (SETTINGS[name][0], getattr(attacks, name)) for name in ("pgd", "mim", "jsma", "over")},
    **{name: (SETTINGS[name][0], getattr(attacks, name)) for name in ("carlini_wagner", "apgd", "square")},
}


@pytest.mark.slow(cases=["sweep"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_of_another_type_is_refused_by_name(name, unchecked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, function = CALLS[name]
    for setting in inspect.signature(function).parameters.keys() - SUBJECTS:
        for value in NOT_SETTINGS:
            if isinstance(value, str) and TAKEN.get(setting) == value:
                continue
            with pytest.raises((ValueError, TypeError)) as caught:
                call(**{setting: value})
            named = "`objective` must take" if setting == "unlabelled" else f"`{setting}` must "
            assert str(caught.value).startswith(named), f"{setting}={value!r}: {caught.value}"


def test_wrong_values_of_a_grid_are_refused(unchecked):
    beta = functools.partial(ds.objectives.augmented, loss="squared_error", pool="score")
    for value in ("a", None, {}):
        with pytest.raises(ValueError, match="^`grid` must map 'beta' to numbers; got"):
            ds.sweep(build, (X, Y), beta, grid={"beta": [value]}, epochs=1)
    with pytest.raises(ValueError, match=r"^`device` must be a device that torch can use here.*; got 'foo'\."):
        sweep(device="foo")
    with pytest.raises(ValueError, match=r"more than 64 bits\. Use 1.18059e\+21\."):
        fit(min_delta=2**70)


def test_numbers_of_numpy_are_settings(unchecked):
    counts = {"epochs": np.int64(1), "batch_size": np.int64(8), "patience": np.int64(2), "seed": np.int64(3)}
    history = fit(**counts, shuffle=np.bool_(True), lr=np.float32(0.5))
    expected = fit(epochs=1, batch_size=8, patience=2, seed=3, lr=0.5)
    assert history.column("loss") == expected.column("loss")
    sweep(**counts, members=np.int64(2), validation=0.2)
    assert ds.Ensemble(build, 2).predict(X, np.int64(8)).shape == (2, 40, 1)


def test_the_time_between_checkpoints_is_a_number(tmp_path, unchecked):
    for value in NO_NUMBERS:
        with pytest.raises((ValueError, TypeError), match="^`checkpoint_seconds` must be a number of at least 0"):
            fit(checkpoint=tmp_path, checkpoint_seconds=value)
    assert not list(tmp_path.iterdir())


OUT_OF_RANGE = {
    "momentum": (1.0, 2, [0.5, 1.5]),
    "betas": ((0.9, 1.0), (0.9,), (0.9, 0.9, 0.9), "ab", (0.9, math.nan)),
    "lr": (1e300, [0.1, math.nan], [0.1, True], [0.1, "a"], [0.1]),
    "weight_decay": (1e300, math.nan),
    "frozen": ([0.5], [True], [5], ["a"]),
    "split_seed": (1.0,),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(name, unchecked):
    for value in OUT_OF_RANGE[name]:
        with pytest.raises((ValueError, TypeError)) as caught:
            fit(**{name: value})
        assert str(caught.value).startswith(f"`{name}` must "), f"{name}={value!r}: {caught.value}"
    with pytest.raises(ValueError, match="`momentum` must be a number of at least 0 and below 1; got 2"):
        gridded(momentum=2)


def test_numbers_of_numpy_and_tensors_are_numbers(unchecked):
    assert checks.listed("at", torch.tensor([1, 2])) == [1, 2]
    fit(lr=torch.tensor(0.01), frozen=torch.tensor([1]), momentum=torch.tensor([0.5, 0.9]))
    assert schedules.step(torch.tensor([1]))(torch.tensor([0.0, 1.0]), 2.0).tolist() == pytest.approx([1.0, 0.1])


SCHEDULES = {
    "NaN": (lambda epoch, epochs: torch.where(epoch > 1.5, math.nan, 1.0), "got nan at epoch 1.6"),
    "infinity": (lambda epoch, epochs: torch.where(epoch > 1.5, math.inf, 1.0), "got inf at epoch 1.6"),
    "negative": (lambda epoch, epochs: 1 - epoch, "got -0.2 at epoch 1.2"),
    "one number": (lambda epoch, epochs: 0.5, "give one factor per step, a tensor"),
    "another shape": (lambda epoch, epochs: torch.ones(3), "give one factor per step, a tensor"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_gives_no_rates_is_refused_before_the_first_step(name, unchecked):
    schedule, message = SCHEDULES[name]
    ensemble = ds.Ensemble(build, 2, backend="loop")
    before = [parameter.clone() for parameter in ensemble.parameters()]
    with pytest.raises(ValueError, match="`schedule` must .*" + message.replace(".", r"\.")):
        ds.fit(ensemble, (X, Y), mse, epochs=3, batch_size=8, schedule=schedule)
    assert all(torch.equal(a, b) for a, b in zip(before, ensemble.parameters(), strict=True))
    with pytest.raises(ValueError, match="`schedule` must"):
        sweep(epochs=3, batch_size=8, schedule=schedule)


def test_a_schedule_that_breaks_later_ends_training_with_finite_weights(monkeypatch):
    monkeypatch.setattr(schedules, "_MOST_CHECKED", 4)
    ensemble = ds.Ensemble(build, 2, backend="loop")
    with pytest.raises(ValueError, match="`schedule` must give finite factors"):
        ds.fit(ensemble, (X, Y), mse, epochs=3, batch_size=8, schedule=SCHEDULES["NaN"][0])
    assert all(bool(parameter.isfinite().all()) for parameter in ensemble.parameters())


def test_a_rate_that_explodes_is_not_said_to_have_left_good_weights():
    ensemble = ds.Ensemble(build, 2, backend="loop")
    with pytest.raises(ds.TrainingDiverged, match="which an earlier step has made infinite or NaN"):
        ds.fit(ensemble, (X, 1e4 * Y), mse, epochs=3, batch_size=8, lr=1e38, optimizer="sgd")
    assert not all(bool(parameter.isfinite().all()) for parameter in ensemble.parameters())


class Examples(Dataset):
    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], self.labels[index]


def own_objective(outputs, targets):
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.repeat(len(outputs)))
    return ds.LossParts(losses, {})


def with_strength(outputs, targets, *, strength):
    return ds.LossParts(strength * own_objective(outputs, targets).total, {})


def ignoring(outputs, targets):
    logits, labels = outputs.flatten(0, 1), targets.repeat(len(outputs))
    return ds.LossParts(nn.functional.cross_entropy(logits, labels, ignore_index=-100), {})


def spoilt(label):
    labels = LABELS.clone()
    labels[37] = label  # in the last batch
    return labels


OBJECTIVES = {
    "independent": functools.partial(ds.objectives.independent, loss="cross_entropy"),
    "adp": functools.partial(ds.objectives.adp, alpha=2.0, beta=0.5),
    "own": own_objective,
}


@pytest.mark.slow(fast=["independent-7", "own-7"])
@pytest.mark.parametrize("label", [7, -3])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_labels_out_of_range_are_refused_wherever_they_are(name, label, unchecked):
    good, bad = (X, LABELS), (X, spoilt(label))
    sources = [
        ("targets", bad, None),
        ("targets", DataLoader(Examples(bad[1]), 8), None),
        ("targets", Examples(bad[1]), None),
        ("validation targets", good, bad),
        ("validation targets", good, DataLoader(Examples(bad[1]), 8)),
        ("validation targets", good, Examples(bad[1])),
    ]
    for what, data, validation in sources:
        options = {"epochs": 1, "batch_size": 8, "shuffle": False, "validation": validation}
        with pytest.raises(ValueError, match=f"^`{what}` must be labels from 0 .*; got labels from"):
            ds.fit(ds.Ensemble(classifier, 2, backend="loop"), data, OBJECTIVES[name], **options)


def test_labels_out_of_range_are_refused_in_sweeps_of_any_objective(unchecked):
    for data, validation in (((X, spoilt(7)), None), ((X, LABELS), (X, spoilt(7)))):
        with pytest.raises(ValueError, match="targets` must be labels from 0 to 2"):
            ds.sweep(
                classifier,
                data,
                with_strength,
                grid={"strength": [1.0, 2.0]},
                members=2,
                epochs=1,
                validation=validation,
            )


def test_labels_that_an_objective_or_metric_takes_are_not_refused():
    ensemble = ds.Ensemble(classifier, 2, backend="loop")
    ds.fit(ensemble, (X, spoilt(-100)), ignoring, epochs=1, validation=(X, spoilt(-100)))
    ds.fit(ensemble, DataLoader(Examples(spoilt(-100)), 8), ignoring, epochs=1)

    def known_share(outputs, targets):
        return (targets < 3).float().mean()

    options = {"validation": (X, spoilt(7)), "metric": known_share, "mode": "max"}
    history = ds.fit(ensemble, (X, LABELS), own_objective, epochs=1, **options)
    assert history.column("validation") == [pytest.approx(39 / 40)]


def test_a_metric_that_takes_labels_for_indices_gets_none_out_of_range(unchecked):
    def at_label(outputs, targets):
        return outputs.mean(0).gather(1, targets.unsqueeze(1)).mean()

    options = {"validation": (X, spoilt(7)), "metric": at_label, "mode": "max"}
    with pytest.raises(ValueError, match="`validation targets` must be labels from 0 to 2"):
        ds.fit(ds.Ensemble(classifier, 2), (X, LABELS), own_objective, epochs=1, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_labels_out_of_range_do_not_end_the_use_of_a_gpu(unchecked):
    on_gpu = [
        (X.cuda(), spoilt(7).cuda()),
        DataLoader(Examples(spoilt(7)), 8),
        DataLoader(Examples(spoilt(7).cuda()), 8),
    ]
    for data in on_gpu:
        for objective in OBJECTIVES.values():
            with pytest.raises(ValueError, match="`targets` must be labels from 0 to 2"):
                ds.fit(ds.Ensemble(classifier, 2).to("cuda"), data, objective, epochs=2, batch_size=8, shuffle=False)
    assert float(torch.ones(1, device="cuda") + 1) == 2


def parts_out_of_order(outputs, targets):
    total = (outputs - targets).square().mean()
    return ds.LossParts(total, {"zeta": total.detach(), "alpha": total.detach(), "member_loss": total.expand(2)})


def test_columns_of_a_history_keep_their_order_after_a_resume(tmp_path):
    class Stopped(Exception):
        pass

    def stops(moment):
        if moment.step >= 7:
            raise Stopped

    options = {"epochs": 3, "batch_size": 8, "checkpoint": tmp_path, "checkpoint_seconds": 0, "resume": True}
    with pytest.raises(Stopped):
        ds.fit(ds.Ensemble(build, 2, backend="loop"), (X, Y), parts_out_of_order, progress=stops, **options)
    history = ds.fit(ds.Ensemble(build, 2, backend="loop"), (X, Y), parts_out_of_order, **options)
    columns = [list(entry) for entry in history.epochs]
    assert columns == [["epoch", "lr", "loss", "zeta", "alpha", "member_loss", "seconds"]] * 3

"""`fit(..., twin=True)`: an independent twin as `independent` would have trained it, and a sibling left alone."""

import copy
import json
import math
from functools import partial

import pytest
import torch
from networks import NETWORKS
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dissensus as ds
from dissensus.fingerprint import fingerprint

M = 3
OBJECTIVES = ds.objectives
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))
VALUES = torch.randn(24, 3, generator=torch.Generator().manual_seed(4))
LABELS = torch.arange(24) % 3
OTHER = torch.randn(10, 6, generator=torch.Generator().manual_seed(5))
augmented = partial(OBJECTIVES.augmented, beta=0.9, loss="squared_error", pool="score")
independent = partial(OBJECTIVES.independent, loss="squared_error")
alone_on_classes = partial(OBJECTIVES.independent, loss="cross_entropy")


def cube(outputs, targets):
    return (outputs - targets).abs().pow(3).sum(-1)


def fresh(name="two_dropouts", members=M, backend="loop"):
    return ds.Ensemble(NETWORKS[name][0], members, seed=1, backend=backend)


def weights(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


def identical(ensemble, reference):
    actual, expected = weights(ensemble), weights(reference)
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


def check_twin(objective, reference, data, *, make=fresh, main=(), twin=True, **options):
    """Hold a twin, and its sibling, to what each would be without the other; give the ensemble and its history."""
    settings = {"epochs": 3, "batch_size": 7, "lr": 0.01, "seed": 2, **options}
    ensemble, without, expected = make(), make(), make()
    history = ds.fit(ensemble, data, objective, twin=twin, **settings, **dict(main))
    ds.fit(without, data, objective, **settings, **dict(main))
    expected_history = ds.fit(expected, data, reference, **settings)
    assert identical(ensemble, without), "the twin changed its sibling"
    assert identical(ensemble.twin, expected), "the twin is not what independent training gives"
    assert not identical(ensemble, ensemble.twin)
    assert history.twin is ensemble.twin
    assert history.twin_history.column("loss") == expected_history.column("loss")
    assert history.twin_history.best_epoch == expected_history.best_epoch
    return ensemble, history


# Every objective

WITH_TWIN = {
    "a2d": (OBJECTIVES.a2d, alone_on_classes, LABELS, {"unlabelled": OTHER}),
    "adp": (OBJECTIVES.adp, alone_on_classes, LABELS, {}),
    "augmented": (augmented, independent, VALUES, {}),
    "divdis": (OBJECTIVES.divdis, alone_on_classes, LABELS, {"unlabelled": DataLoader(TensorDataset(OTHER), 5)}),
    "gradient_adjusted": (partial(OBJECTIVES.gradient_adjusted, alpha=0.5), independent, VALUES, {}),
    "joint": (partial(OBJECTIVES.joint, loss="squared_error", pool="score"), independent, VALUES, {}),
    "ldr": (partial(OBJECTIVES.ldr, strength=0.5), alone_on_classes, LABELS, {}),
    "learner_dropout": (
        partial(OBJECTIVES.learner_dropout, drop=0.4, loss="squared_error", pool="score"),
        independent,
        VALUES,
        {},
    ),
    "negative_correlation": (partial(OBJECTIVES.negative_correlation, strength=0.5), independent, VALUES, {}),
}
WITHOUT_TWIN = {"independent": independent, "trades": OBJECTIVES.trades}


def test_every_objective_has_a_twin_or_is_refused():
    assert set(OBJECTIVES.OBJECTIVES) == {*WITH_TWIN, *WITHOUT_TWIN}


@pytest.mark.slow(fast=["adp", "augmented", "gradient_adjusted", "ldr"])
@pytest.mark.parametrize("name", WITH_TWIN)
def test_a_twin_is_what_independent_training_gives_and_its_sibling_is_as_without(name):
    objective, reference, targets, options = WITH_TWIN[name]
    ensemble, history = check_twin(objective, reference, (X, targets), main=options)
    assert ensemble.twin.twin is None
    assert history.twin_history.twin is None
    assert {"individual", "ensemble", "diversity"} <= set(history.twin_history.epochs[-1])


VARIANTS = {
    "weights": (partial(augmented, weights=[0.5, 0.3, 0.2]), partial(independent, weights=[0.5, 0.3, 0.2])),
    "a user's loss": (partial(augmented, loss=cube), partial(independent, loss=cube)),
    "a loss as a function": (partial(augmented, loss=ds.losses.squared_error), independent),
    "nested": (partial(partial(augmented, beta=0.5), loss="squared_error"), independent),
}


@pytest.mark.slow(fast=["weights", "nested"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_weights_are_the_objectives(name):
    check_twin(*VARIANTS[name], (X, VALUES))


@pytest.mark.parametrize("loss", ["cross_entropy", "brier"])
@pytest.mark.parametrize("pool", ["probability", "score"])
def test_losses_of_classes_agree_to_rounding_whatever_the_pool(loss, pool):
    ensemble, expected = (fresh("norm_first").double() for _ in range(2))
    data, options = (X.double(), LABELS), {"epochs": 3, "batch_size": 7}
    ds.fit(ensemble, data, partial(OBJECTIVES.joint, loss=loss, pool=pool), twin=True, **options)
    ds.fit(expected, data, partial(independent, loss=loss), **options)
    actual, expected_weights = weights(ensemble.twin), weights(expected)
    for name in expected_weights:
        torch.testing.assert_close(actual[name], expected_weights[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("objective", WITHOUT_TWIN.values(), ids=WITHOUT_TWIN)
def test_objectives_without_interaction_are_refused_as_their_own_reference(objective):
    ensemble = fresh()
    before = weights(ensemble)
    with pytest.raises(ValueError, match="`twin` must come with an objective in which members interact; .* own refere"):
        ds.fit(ensemble, (X, VALUES), objective, epochs=1, twin=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(ensemble).items())


@pytest.mark.parametrize(
    ("objective", "description"),
    [
        (partial(augmented, beta=0), "augmented with beta=0"),
        (partial(augmented, beta=torch.tensor(0.0)), "augmented with beta=0"),
        (partial(OBJECTIVES.negative_correlation, strength=0.0), "negative_correlation with strength=0"),
        (partial(OBJECTIVES.gradient_adjusted, alpha=0.0), "gradient_adjusted with alpha=0"),
        (partial(OBJECTIVES.adp, alpha=0.0, beta=0.0), "adp with alpha=0, beta=0, temperature=1"),
    ],
)
def test_neutral_hyperparameters_are_refused_too(objective, description):
    with pytest.raises(ValueError, match=f"got {description}. Its twin, from the same seeds, would be a copy"):
        ds.fit(fresh(), (X, VALUES), objective, epochs=1, twin=True)


def test_another_temperature_is_another_training():
    check_twin(partial(OBJECTIVES.adp, alpha=0.0, beta=0.0, temperature=3.0), alone_on_classes, (X, LABELS))


# An objective of one's own


def shy(outputs, targets):
    parts = OBJECTIVES.independent(outputs, targets, loss="squared_error")
    return ds.LossParts(parts.total + 0.5 * ds.diversity.ambiguity(outputs).mean(), {**parts.parts})


def visible(outputs, targets, *, loss="squared_error"):
    return ds.LossParts(shy(outputs, targets).total, dict(independent(outputs, targets, loss=loss).parts))


def test_a_hidden_loss_requires_the_twins_objective():
    for hidden in (shy, lambda outputs, targets: augmented(outputs, targets)):
        with pytest.raises(ValueError, match="`twin` must be an objective if .*; got True. Pass twin=partial"):
            ds.fit(fresh(), (X, VALUES), hidden, epochs=1, twin=True)
    check_twin(shy, independent, (X, VALUES), twin=independent)


def test_a_parameter_named_loss_makes_it_visible():
    check_twin(visible, independent, (X, VALUES))


@pytest.mark.parametrize("twin", ["independent", 1, None])
def test_invalid_twins_are_refused(twin, unchecked):
    with pytest.raises(TypeError, match="`twin` must be True, False, or an objective; got"):
        ds.fit(fresh(), (X, VALUES), augmented, epochs=1, twin=twin)


def test_a_twins_objective_must_go_with_the_settings():
    adversarial_training = ds.train.AdversarialTraining(0.1, steps=1, beside=True, box=(-9, 9))
    with pytest.raises(ValueError, match="`twin` does not go with this training: `objective` must take .*adversarial"):
        ds.fit(
            fresh(), (X, LABELS), OBJECTIVES.trades, epochs=1, adversarial=adversarial_training, twin=alone_on_classes
        )
    with pytest.raises(ValueError, match="`twin` does not go with this training: `unlabelled` must be given"):
        ds.fit(fresh(), (X, LABELS), OBJECTIVES.adp, epochs=1, twin=OBJECTIVES.a2d)
    with pytest.raises(ValueError, match="`twin` does not go with this training: `targets` must be"):
        ds.fit(fresh(), (X, VALUES), augmented, epochs=1, twin=partial(independent, loss="logistic"))


def test_a_twin_that_takes_unlabelled_data_gets_it():
    ensemble, expected = fresh(), fresh()
    options = {"epochs": 2, "unlabelled": OTHER}
    ds.fit(ensemble, (X, LABELS), OBJECTIVES.a2d, twin=OBJECTIVES.divdis, **options)
    ds.fit(expected, (X, LABELS), OBJECTIVES.divdis, **options)
    assert identical(ensemble.twin, expected)


# Members


def test_one_member_has_nobody_to_interact_with():
    with pytest.raises(ValueError, match="`twin` must come with two members or more; got one"):
        ds.fit(fresh(members=1), (X, VALUES), augmented, epochs=1, twin=True)
    with pytest.raises(ValueError, match="two members or more"):
        ds.fit(nn.Linear(6, 3), (X, VALUES), augmented, epochs=1, twin=True)


def masked(assign):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), ds.masks.Masksembles(8, 4, 2.0, seed=0), nn.Linear(8, 3))
    return ds.masks.Masked(layers, assign=assign)


def test_masks_of_a_network_have_a_twin_where_they_interact():
    network, expected = masked("all"), masked("all")
    history = ds.fit(network, (X, VALUES), augmented, epochs=2, twin=True)
    ds.fit(expected, (X, VALUES), independent, epochs=2)
    torch.testing.assert_close(history.twin.predict(X), expected.eval()(X).detach())
    with pytest.raises(ValueError, match="`twin` must come with masks that interact; got assign='split'"):
        ds.fit(masked("split"), (X, VALUES), augmented, epochs=1, twin=True)


def test_members_of_different_architectures_have_a_twin():
    def mixed():
        torch.manual_seed(0)
        return ds.Ensemble.from_modules([nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))])

    check_twin(augmented, independent, (X, VALUES), make=mixed)


@pytest.mark.parametrize("backend", ["auto", "vmap", "batched"])
def test_other_backends_agree_to_rounding(backend):
    ensemble, expected = (fresh("norm_first", backend=backend).double() for _ in range(2))
    data, options = (X.double(), VALUES.double()), {"epochs": 3, "batch_size": 7}
    history = ds.fit(ensemble, data, augmented, twin=True, **options)
    ds.fit(expected, data, independent, **options)
    actual, expected_weights = weights(ensemble.twin), weights(expected)
    for name in expected_weights:
        torch.testing.assert_close(actual[name], expected_weights[name], rtol=1e-8, atol=1e-10)
    assert history.twin_history.backend == history.backend
    assert ensemble.twin.backend == backend


def test_backends_are_measured_once_for_both(monkeypatch):
    from dissensus.execution import stacked

    measured, chosen = [], stacked.chosen
    monkeypatch.setattr(stacked, "chosen", lambda *args, **kwargs: measured.append(1) or chosen(*args, **kwargs))
    ds.fit(fresh(backend="auto"), (X, VALUES), augmented, epochs=1)
    measurements = len(measured)
    ds.fit(fresh(backend="auto"), (X, VALUES), augmented, epochs=1, twin=True)
    assert len(measured) == 2 * measurements > 0


# Settings that go with it

SETTINGS = {
    "validation": {"validation": 0.25, "epochs": 6, "lr": 0.05},
    "patience": {"validation": 0.25, "patience": 1, "epochs": 20, "lr": 0.1},
    "each member's own": {"validation": 0.25, "patience": 1, "watch": "member", "epochs": 20, "lr": 0.1},
    "metric": {"validation": 0.25, "metric": lambda o, y: -(o.mean(0) - y).square().mean(), "mode": "max", "epochs": 5},
    "freeze": {"freeze": ds.train.Convergence(patience=1, tolerance=0.02), "epochs": 20},
    "frozen": {"frozen": [1]},
    "drawn": {"active_members": 2},
    "augment": {"augment": lambda x, generator: x + torch.randn(x.shape, generator=generator)},
    "deterministic": {"deterministic": True},
    "per member": {"lr": [0.1, 0.01, 0.02], "clip_norm": [1.0, 2.0, 3.0]},
    "schedule": {"schedule": "cosine", "optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
}


@pytest.mark.slow(fast=["freeze", "validation", "augment"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_twin_follows_the_same_settings(name):
    check_twin(augmented, independent, (X, VALUES), **SETTINGS[name])


def test_an_iterable_of_frozen_members_is_for_both():
    ensemble, start = fresh("mlp"), fresh("mlp")
    ds.fit(ensemble, (X, VALUES), augmented, epochs=2, twin=True, frozen=(i for i in (0, 2)))
    for trained in (ensemble, ensemble.twin):
        after, before = weights(trained), weights(start)
        moved = [any(not torch.equal(after[n][m], before[n][m]) for n in after) for m in range(M)]
        assert moved == [False, True, False]


@pytest.mark.slow
def test_adversarial_training_is_that_of_both():
    attack = ds.train.AdversarialTraining(0.1, steps=2, box=(-9.0, 9.0))
    check_twin(OBJECTIVES.adp, alone_on_classes, (X, LABELS), adversarial=attack)


def test_validation_judges_both_by_the_same_pool():
    objective = partial(OBJECTIVES.joint, loss="cross_entropy", pool="score")
    ensemble, pair = fresh("mlp"), (X, LABELS)
    history = ds.fit(ensemble, pair, objective, epochs=2, lr=0.1, validation=pair, keep="last", twin=True)
    for trained, record in ((ensemble, history), (ensemble.twin, history.twin_history)):
        pooled = ds.diversity.decompose(trained.predict(X), LABELS, loss="cross_entropy", pool="score").ensemble.mean()
        assert record.column("validation")[-1] == pytest.approx(float(pooled), rel=1e-5)


@pytest.mark.slow
def test_a_sequential_training_has_an_ordinary_independent_twin():
    objective = partial(OBJECTIVES.a2d, classes="earlier")
    moments = []
    options = {"sequential": True, "unlabelled": OTHER, "progress": moments.append}
    ensemble, _ = check_twin(objective, alone_on_classes, (X, LABELS), main=options)
    first = [moment for moment in moments if moment.steps == (M + 1) * 12]
    assert first[-1].step == first[-1].steps
    assert first[-1].twin
    ds.fit(ensemble, (X, LABELS), objective, epochs=1, sequential=True, unlabelled=OTHER)
    assert ensemble.twin is None


def test_progress_counts_the_steps_of_both():
    moments = []
    history = ds.fit(fresh(), (X, VALUES), augmented, epochs=3, batch_size=7, twin=True, progress=moments.append)
    steps = [moment.step for moment in moments]
    assert steps == sorted(steps)
    assert {moment.steps for moment in moments} == {24}
    assert (steps[-1], history.steps, history.twin_history.steps) == (24, 12, 12)
    assert [moment.twin for moment in moments] == sorted(moment.twin for moment in moments)
    assert str(moments[-1]).startswith("twin, epoch 3/3")
    assert str(moments[0]).startswith("epoch 1/3")


# Generators


class Noisy(Dataset):
    """Draws from torch's global generator."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + 0.1 * torch.randn(6), VALUES[index]


class Dropping(nn.Module):
    """Noise that is drawn from torch's global generator."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x + torch.randn_like(x) if self.training else x)


@pytest.mark.parametrize("kind", ["global", "own", "data set", "network"])
def test_ensemble_and_twin_draw_the_same_random_numbers(kind):
    settings, make, data = {"epochs": 3, "lr": 0.01}, fresh, (X, VALUES)
    if kind == "network":
        make = partial(ds.Ensemble, Dropping, M, backend="loop")
    if kind == "data set":
        data = Noisy()
    after = []

    def trained(objective, **changes):
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(8)
        source = data
        if kind in ("global", "own"):
            shuffled = {"shuffle": True, "generator": generator if kind == "own" else None}
            source = DataLoader(TensorDataset(X, VALUES), 7, **shuffled)
        ensemble = make()
        ds.fit(ensemble, source, objective, **settings, **changes)
        after.append((torch.get_rng_state(), generator.get_state()))
        return ensemble

    twinned_ensemble, main, twin = trained(augmented, twin=True), trained(augmented), trained(independent)
    assert identical(twinned_ensemble, main)
    assert identical(twinned_ensemble.twin, twin)
    assert not identical(twinned_ensemble, twinned_ensemble.twin)
    assert all(torch.equal(first, second) for first, second in zip(after[0], after[1], strict=True)), (
        "generators went on"
    )


# What keeps it


def twinned(**options):
    ensemble = fresh()
    return ensemble, ds.fit(ensemble, (X, VALUES), augmented, epochs=2, twin=True, **options)


def test_a_twin_is_no_part_of_its_sibling(tmp_path):
    ensemble, _ = twinned()
    without_twin = fresh()
    ds.fit(without_twin, (X, VALUES), augmented, epochs=2)
    assert without_twin.twin is None
    assert list(ensemble.state_dict()) == list(without_twin.state_dict())
    assert len(list(ensemble.parameters())) == len(list(without_twin.parameters()))
    assert ensemble.twin not in list(ensemble.modules())
    assert fingerprint(ensemble) == fingerprint(without_twin)
    ensemble.double().eval()
    assert (ensemble.twin.dtype, ensemble.twin.training) == (torch.float32, True)
    ensemble.float().save(tmp_path / "with")
    without_twin.double().float().eval().save(tmp_path / "without")  # lies in memory as the other
    manifests = [json.loads((tmp_path / kind / "manifest.json").read_text()) for kind in ("with", "without")]
    assert manifests[0] == manifests[1]
    assert ds.Ensemble.load(tmp_path / "with", NETWORKS["two_dropouts"][0]).twin is None
    assert ensemble.subset([0, 1]).twin is None


def test_a_copy_has_a_copy_of_the_twin():
    ensemble, _ = twinned()
    copied = copy.deepcopy(ensemble)
    assert copied.twin is not ensemble.twin
    assert identical(copied.twin, ensemble.twin)
    ds.fit(copied.twin, (X, VALUES), augmented, epochs=1)
    assert not identical(copied.twin, ensemble.twin)


def test_a_twin_can_be_set_and_dropped_and_never_becomes_a_submodule():
    ensemble = fresh()
    ensemble.twin = twin = fresh()
    assert ensemble.twin is twin
    assert twin not in list(ensemble.modules())
    ensemble.twin = None
    assert ensemble.twin is None
    with pytest.raises(TypeError, match="`twin` must be an Ensemble, or None; got Linear"):
        ensemble.twin = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="`twin` must be another ensemble"):
        ensemble.twin = ensemble
    assert ensemble.twin is None


def test_a_fit_without_a_twin_drops_the_old_one_and_a_refused_fit_does_not(tmp_path):
    ensemble, _ = twinned()
    twin = ensemble.twin
    refused = [
        {"lr": [0.1, 0.2]},
        {"validation": 2.0},
        {"sequential": True, "frozen": [0]},
        {"twin": 3},
    ]
    for options in refused:
        with pytest.raises((ValueError, TypeError)):
            ds.fit(ensemble, (X, VALUES), augmented, **{"epochs": 1, **options})
        assert ensemble.twin is twin
    ds.fit(fresh(), (X, VALUES), augmented, epochs=1, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        ds.fit(ensemble, (X, VALUES), augmented, epochs=1, checkpoint=tmp_path)
    assert ensemble.twin is twin
    ds.fit(ensemble, (X, VALUES), augmented, epochs=1)
    assert ensemble.twin is None


def test_a_second_twin_starts_where_its_sibling_does():
    ensemble, _ = twinned()
    first, expected = ensemble.twin, ensemble.subset(range(M))
    ds.fit(ensemble, (X, VALUES), augmented, epochs=1, twin=True)
    ds.fit(expected, (X, VALUES), independent, epochs=1)
    assert ensemble.twin is not first
    assert identical(ensemble.twin, expected)


def test_the_history_holds_both_trainings():
    _, history = twinned()
    _, without_twin = None, ds.fit(fresh(), (X, VALUES), augmented, epochs=2)
    stored = json.loads(history.to_json())
    assert stored["twin_history"]["epochs"] == history.twin_history.epochs
    assert "twin" not in stored
    assert set(json.loads(without_twin.to_json())) == set(stored) - {"twin_history"}
    assert "; twin: 2 epochs" in str(history)
    assert "twin" not in str(without_twin)
    assert (without_twin.twin, without_twin.twin_history) == (None, None)


# When something breaks


def breaking_at(step, objective=independent):
    count = [0]

    def breaks(outputs, targets):
        count[0] += 1
        return objective(outputs * (math.nan if count[0] == step else 1.0), targets)

    return breaks


def test_a_twin_that_diverges_leaves_its_sibling_trained():
    ensemble, expected = fresh(), fresh()
    options = {"epochs": 3, "batch_size": 7}
    with pytest.raises(
        ds.TrainingDiverged, match="training of the independent twin met NaN or infinity at step 5"
    ) as e:
        ds.fit(ensemble, (X, VALUES), augmented, twin=breaking_at(6), **options)
    expected_history = ds.fit(expected, (X, VALUES), augmented, **options)
    assert identical(ensemble, expected)
    assert ensemble.twin is None
    assert e.value.twin
    assert e.value.history.column("loss") == expected_history.column("loss")
    assert len(e.value.history.twin_history.epochs) == 1


def test_an_ensemble_that_diverges_has_no_twin():
    ensemble, _ = twinned()
    with pytest.raises(ds.TrainingDiverged, match="^training met") as error:
        ds.fit(ensemble, (X, VALUES), breaking_at(3, augmented), epochs=2, batch_size=7, twin=independent)
    assert not error.value.twin
    assert ensemble.twin is None
    assert error.value.history.twin_history is None


class Interrupted(Exception):
    pass


def stopping(twin, epoch):
    def stop(moment):
        if moment.twin == twin and moment.epoch == epoch:
            raise Interrupted

    return stop


@pytest.mark.slow(fast=["at2-True-loader", "at1-False-tensors"])
@pytest.mark.parametrize("source", ["tensors", "loader"])
@pytest.mark.parametrize("same_ensemble", [True, False])
@pytest.mark.parametrize("at", [(False, 2), (False, 4), (True, 1), (True, 3)])
def test_an_interrupted_training_goes_on_with_its_twin(at, same_ensemble, source, tmp_path):
    def data():
        return (X, VALUES) if source == "tensors" else DataLoader(TensorDataset(X, VALUES), 7, shuffle=True)

    options = {"epochs": 4, "batch_size": 7, "validation": (X, VALUES), "twin": True}
    saving = {**options, "checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    torch.manual_seed(5)
    expected = fresh()
    expected_history = ds.fit(expected, data(), augmented, **options)
    torch.manual_seed(5)
    ensemble = fresh()
    with pytest.raises(Interrupted):
        ds.fit(ensemble, data(), augmented, progress=stopping(*at), **saving)
    assert ensemble.twin is None
    torch.manual_seed(6)
    resumed = ensemble if same_ensemble else fresh()
    history = ds.fit(resumed, data(), augmented, resume=True, **saving)
    assert identical(resumed, expected)
    assert identical(resumed.twin, expected.twin)
    assert history.column("loss") == expected_history.column("loss")
    assert history.twin_history.column("validation") == expected_history.twin_history.column("validation")
    finished = fresh()
    ds.fit(finished, data(), augmented, resume=True, **saving)  # done already
    assert identical(finished, expected)
    assert identical(finished.twin, expected.twin)


def test_checkpoints_of_another_training_are_refused_before_anything_is_trained(tmp_path):
    options = {"epochs": 2, "checkpoint": tmp_path}
    ds.fit(fresh(), (X, VALUES), augmented, twin=True, **options)
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        ds.fit(fresh(), (X, VALUES), augmented, twin=True, **options)
    for twin in (False, partial(independent, loss="squared_error")):
        with pytest.raises(ValueError, match="belongs to another training: 'twin' differ"):
            ds.fit(fresh(), (X, VALUES), augmented, twin=twin, resume=True, **options)
    ds.fit(fresh(), (X, VALUES), augmented, epochs=2, checkpoint=tmp_path / "plain")
    untouched, before = fresh(), dict(fresh().named_parameters())
    with pytest.raises(ValueError, match="belongs to a training without a twin"):
        ds.fit(untouched, (X, VALUES), augmented, epochs=2, checkpoint=tmp_path / "plain", resume=True, twin=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in untouched.named_parameters())
    for old in tmp_path.glob("step-*"):
        old.rename(tmp_path / f"moved-{old.name}")
    with pytest.raises(ValueError, match="twin holds a checkpoint already"):
        ds.fit(fresh(), (X, VALUES), augmented, twin=True, **options)


def test_a_fit_that_is_refused_leaves_no_checkpoint_behind(tmp_path):
    with pytest.raises(ValueError, match="lr"):
        ds.fit(fresh(), (X, VALUES), augmented, epochs=1, lr=[0.1, 0.2], checkpoint=tmp_path / "new", twin=True)
    assert not (tmp_path / "new").exists()


def test_a_sequential_training_with_a_twin_has_no_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="`twin` must come without `checkpoint` where training is sequential"):
        ds.fit(
            fresh(),
            (X, LABELS),
            OBJECTIVES.a2d,
            epochs=1,
            unlabelled=OTHER,
            sequential=True,
            twin=True,
            checkpoint=tmp_path,
        )

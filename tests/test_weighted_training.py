"""Weights of classes and examples, soft labels, ignored labels, mixing and bagging in training."""

import functools
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dissensus as ds
from dissensus.data.augment import cutmix, mixup
from dissensus.data.batches import bootstrap_counts, changes_targets
from dissensus.data.splits import split_rows
from dissensus.objectives.declaration import Declaration
from dissensus.train.settings import TargetSettings
from dissensus.train.weighting import balanced_weights, weighted

N, M, C, B = 30, 3, 4, 10
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 5, generator=GENERATOR).double()
LABELS = torch.randint(0, C, (N,), generator=GENERATOR)
IGNORED = torch.where(torch.rand(N, generator=GENERATOR) < 0.3, -100, LABELS)
WEIGHTS = torch.rand(N, generator=GENERATOR).double() + 0.1
CLASS_WEIGHTS = torch.tensor([0.3, 2.0, 1.0, 0.7], dtype=torch.float64)
cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")
build = functools.partial(ds.nets.mlp, 5, C, (6,))
STEPS = {"epochs": 7, "batch_size": B, "lr": 0.05, "optimizer": "sgd", "momentum": 0.9, "shuffle": False}  # 21 steps


def ensemble(seed=0, backend="loop", members=M):
    return ds.Ensemble(build, members, seed=seed, backend=backend).double()


def trained(data=(X, LABELS), objective=cross_entropy, backend="loop", seed=0, members=M, **options):
    ens = ensemble(seed, backend, members)
    ds.fit(ens, data, objective, **{**STEPS, "seed": seed, **options})
    return ens


def flat(ens):
    return torch.cat([p.detach().flatten() for p in ens.parameters()])


def assert_same(one, other, **tolerance):
    torch.testing.assert_close(flat(one), flat(other), **tolerance)


def assert_trained_alone(ens, loss, seed=0, start=None):
    """Each member equals a module that torch trains with ``loss(outputs, rows, member)``."""
    beginning = ensemble(seed, members=ens.members) if start is None else start
    for i in range(ens.members):
        network = beginning.member(i).train()
        optimiser = torch.optim.SGD(network.parameters(), lr=STEPS["lr"], momentum=STEPS["momentum"])
        for _ in range(STEPS["epochs"]):
            for rows in torch.arange(N).split(B):
                optimiser.zero_grad()
                loss(network(X[rows]), rows, i).backward()
                optimiser.step()
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(ens.member(i).state_dict()[name], tensor)


SETTINGS = {
    "class weights": ({"class_weights": CLASS_WEIGHTS}, {"weight": CLASS_WEIGHTS}),
    "smoothing": ({"label_smoothing": 0.3}, {"label_smoothing": 0.3}),
    "ignored": ({"ignore_index": -100}, {"ignore_index": -100}),
    "ignored class": ({"ignore_index": 2, "label_smoothing": 0.1}, {"ignore_index": 2, "label_smoothing": 0.1}),
    "class weights and smoothing": (
        {"class_weights": CLASS_WEIGHTS.tolist(), "label_smoothing": 0.3},
        {"weight": CLASS_WEIGHTS, "label_smoothing": 0.3},
    ),
    "all": (
        {"class_weights": CLASS_WEIGHTS.numpy(), "label_smoothing": 0.3, "ignore_index": -100},
        {"weight": CLASS_WEIGHTS, "label_smoothing": 0.3, "ignore_index": -100},
    ),
}


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("name", SETTINGS)
def test_independent_members_train_as_torch_trains_each(name, backend):
    options, of_torch = SETTINGS[name]
    labels = IGNORED if options.get("ignore_index") == -100 else LABELS
    ens = trained((X, labels), backend=backend, **options)
    assert_trained_alone(ens, lambda outputs, rows, _: F.cross_entropy(outputs, labels[rows], **of_torch))


def test_class_weights_of_soft_labels_are_those_of_torch():
    soft = torch.rand(N, C, generator=torch.Generator().manual_seed(1)).double()
    soft = soft / soft.sum(1, keepdim=True)
    settings = {"label_smoothing": 0.2}
    ens = trained((X, soft), class_weights=CLASS_WEIGHTS, **settings)
    assert_trained_alone(
        ens, lambda outputs, rows, _: F.cross_entropy(outputs, soft[rows], weight=CLASS_WEIGHTS, **settings)
    )


def test_weights_of_classes_and_examples_are_multiplied():
    ens = trained(class_weights=CLASS_WEIGHTS, weights=WEIGHTS)

    def loss(outputs, rows, _):
        weights = WEIGHTS[rows] * CLASS_WEIGHTS[LABELS[rows]]
        return (weights * F.cross_entropy(outputs, LABELS[rows], reduction="none")).sum() / weights.sum()

    assert_trained_alone(ens, loss)


def test_a_loss_that_is_no_sum_over_classes_takes_soft_labels_and_weights_per_example():
    ens = trained(objective=functools.partial(ds.objectives.independent, loss="brier"), class_weights=CLASS_WEIGHTS,
                  label_smoothing=0.4)  # fmt: skip

    def loss(outputs, rows, _):
        soft = 0.6 * F.one_hot(LABELS[rows], C) + 0.1
        weights = CLASS_WEIGHTS[LABELS[rows]]
        return (weights * (outputs.softmax(1) - soft).square().sum(1)).sum() / weights.sum()

    assert_trained_alone(ens, loss)


def test_balanced_weights_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    expected = sklearn.compute_class_weight("balanced", classes=np.unique(LABELS), y=LABELS.numpy())
    torch.testing.assert_close(balanced_weights(LABELS, C).double(), torch.from_numpy(expected), rtol=1e-6, atol=0)
    assert_same(trained(class_weights="balanced"), trained(class_weights=expected), rtol=1e-5, atol=1e-7)
    without = balanced_weights(torch.where(LABELS == 1, -1, LABELS), C, ignore_index=-1)
    assert without[1] == 1
    # Labels 0 and 2 of four classes: outputs without labels have the weight 1, and do not matter.
    two = torch.where(LABELS > 1, 2, 0)
    assert trained((X, two), class_weights="balanced").predict(X).shape == (M, N, C)


def test_ignored_labels_are_absent_whatever_their_inputs():
    loud = torch.where((IGNORED == -100).unsqueeze(1), 1e3, X)
    assert_same(trained((X, IGNORED), ignore_index=-100), trained((loud, IGNORED), ignore_index=-100))
    counted = (IGNORED != -100).double()
    expected = trained((X, LABELS), weights=counted)
    assert_same(trained((X, IGNORED), ignore_index=-100), expected)


@pytest.mark.parametrize("source", ["loader", "dataset"])
def test_settings_count_for_sources_of_batches(source):
    data = TensorDataset(X, IGNORED, WEIGHTS)
    options = {"class_weights": CLASS_WEIGHTS, "label_smoothing": 0.1, "ignore_index": -100}
    expected = trained((X, IGNORED), weights=WEIGHTS, **options)
    data = DataLoader(data, B) if source == "loader" else data
    assert_same(trained(data, unpack=lambda batch: batch, **options), expected)


OBJECTIVES = {
    "independent": (cross_entropy, True),
    "augmented": (functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="probability", beta=0.5), True),
    "joint": (functools.partial(ds.objectives.joint, loss="cross_entropy", pool="score"), True),
    "negative_correlation": (
        functools.partial(ds.objectives.negative_correlation, loss="cross_entropy", strength=0.5),
        True,
    ),
    "learner_dropout": (
        functools.partial(ds.objectives.learner_dropout, loss="cross_entropy", pool="probability", drop=0.5),
        True,
    ),
    "adp": (ds.objectives.adp, False),
    "ldr": (functools.partial(ds.objectives.ldr, strength=0.1), False),
    "a2d": (ds.objectives.a2d, False),
    "divdis": (ds.objectives.divdis, False),
    "trades": (ds.objectives.trades, False),
    "gradient_adjusted": (functools.partial(ds.objectives.gradient_adjusted, alpha=0.5), None),
}
"""Objectives, and whether they take soft labels; None for losses without classes."""


def test_the_table_holds_every_objective():
    assert set(OBJECTIVES) == set(ds.objectives.OBJECTIVES)


def options_of(name):
    if name in ("a2d", "divdis"):
        return {"unlabelled": X}
    if name == "trades":
        settings = ds.train.AdversarialTraining(epsilon=0.1, box=(-9.0, 9.0), beside=True, share=1.0)
        return {"adversarial": settings}
    return {}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_takes_weights_and_soft_labels_or_refuses_them_by_name(name):
    objective, soft = OBJECTIVES[name]
    fit = functools.partial(trained, objective=objective, epochs=2, lr=0.01, **options_of(name))
    mixed = mixup(C)
    if soft is None:
        for options in ({"class_weights": CLASS_WEIGHTS}, {"label_smoothing": 0.1}, {"ignore_index": 3}):
            with pytest.raises(ValueError, match=f"`{next(iter(options))}` must come with a loss of class labels"):
                fit((X, X[:, :C]), **options)
        return
    # Class weights are weights of examples.
    by_class = fit(class_weights=CLASS_WEIGHTS)
    assert_same(by_class, fit(weights=CLASS_WEIGHTS[LABELS]))
    assert not torch.allclose(flat(by_class), flat(fit()))
    if name != "trades":
        assert_same(fit((X, IGNORED), ignore_index=-100), fit(weights=(IGNORED != -100).double()))
    if soft:
        smooth = 0.9 * F.one_hot(LABELS, C) + 0.1 / C
        assert_same(fit(label_smoothing=0.1), fit((X, smooth)))
        assert not torch.allclose(flat(fit(augment=mixed)), flat(fit()))
        return
    with pytest.raises(ValueError, match=f"`label_smoothing` must be 0 for the objective {name}, which needs class"):
        fit(label_smoothing=0.1)
    refusal = f"`augment` must keep .*{'adversarial' if name == 'trades' else name}"
    refusal = "`augment` must keep targets beside `unlabelled`" if name in ("a2d", "divdis") else refusal
    with pytest.raises(ValueError, match=refusal):
        fit(augment=mixed)


def test_an_objective_without_weights_refuses_what_needs_them():
    def plain(outputs, targets, *, loss="cross_entropy"):
        return ds.objectives.independent(outputs, targets, loss=loss)

    for options in ({"class_weights": CLASS_WEIGHTS}, {"ignore_index": -100}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must come with an objective that takes weights"):
            trained(objective=plain, **options)
    with pytest.raises(
        ValueError, match="`bootstrap` must come with an objective whose members do not interact; got pl"
    ):
        trained(objective=plain, bootstrap=True)
    assert_same(trained(objective=plain, label_smoothing=0.2), trained(label_smoothing=0.2))
    loader = DataLoader(TensorDataset(X, LABELS, WEIGHTS), B)
    with pytest.raises(ValueError, match="`objective` must take weights of examples; got plain, which does not"):
        trained(loader, objective=plain, unpack=lambda batch: batch)


def test_attacks_need_the_labels_of_all_inputs():
    attacked = ds.train.AdversarialTraining(epsilon=0.1, box=(-9.0, 9.0))
    with pytest.raises(ValueError, match="`ignore_index` must come without `adversarial`"):
        trained((X, IGNORED), ignore_index=-100, adversarial=attacked)
    ens = trained(class_weights=CLASS_WEIGHTS, adversarial=attacked, epochs=1)
    assert bool(flat(ens).isfinite().all())


def test_a_twin_and_members_trained_one_by_one_are_weighted_too():
    objective, options = OBJECTIVES["augmented"][0], {"class_weights": CLASS_WEIGHTS, "label_smoothing": 0.1}
    ens = trained(objective=objective, twin=True, **options)
    assert_same(ens.twin, trained(**options))
    assert_same(trained(sequential=True, **options), trained(**options))


REFUSED = {
    "length": ({"class_weights": [1.0, 2.0, 3.0, 4.0, 5.0]}, r"`class_weights` must have shape \[C=4\]"),
    "short": (
        {"class_weights": [1.0, 2.0]},
        "`class_weights` must have one number per class; got 2 numbers for labels from 0 to 3",
    ),
    "negative": ({"class_weights": [1, 1, 1, -1]}, "`class_weights` must be finite, 0 or more"),
    "NaN": ({"class_weights": [1, 1, 1, math.nan]}, "`class_weights` must be finite, 0 or more"),
    "zeros": ({"class_weights": [0, 0, 0, 0]}, "not all 0"),
    "word": ({"class_weights": "even"}, "`class_weights` must be 'balanced'"),
    "too smooth": ({"label_smoothing": 1.1}, "`label_smoothing` must be a number of at least 0 and at most 1"),
    "axis": ({"class_axis": 1}, "`class_axis` must be an axis of member outputs after members and examples"),
    "axis that is none": ({"class_axis": 3}, "`class_axis` must be an axis of outputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_make_no_sense_are_refused(name):
    options, message = REFUSED[name]
    ens = ensemble()
    before = flat(ens)
    with pytest.raises((ValueError, TypeError), match=message):
        ds.fit(ens, (X, LABELS), cross_entropy, **STEPS, **options)
    assert torch.equal(flat(ens), before)


def test_labels_out_of_range_are_refused_beside_ignored_ones():
    wrong = IGNORED.clone()
    wrong[3] = C
    with pytest.raises(ValueError, match="be labels from 0 to 3; got labels from 0 to 4"):
        trained((X, wrong), ignore_index=-100)
    with pytest.raises(ValueError, match="be labels from 0 on; got labels from -100 to 3"):
        trained((X, IGNORED), ignore_index=-1)
    with pytest.raises(
        ValueError, match=r"got labels from -100 to 3. Labels that do not count\? Pass ignore_index=-100"
    ):
        trained((X, IGNORED), class_weights="balanced")
    with pytest.raises(ValueError, match="validation targets` must be labels from 0 to 3; got labels from 0 to 4"):
        trained((X, IGNORED), ignore_index=-100, validation=(X, wrong))
    with pytest.raises(TypeError, match="be class labels for `ignore_index`"):
        trained((X, F.one_hot(LABELS, C).double()), ignore_index=-100)
    with pytest.raises(ValueError, match="`class_weights` must be numbers unless data is in memory; got 'balanced'"):
        trained(DataLoader(TensorDataset(X, LABELS), B), class_weights="balanced")
    assert trained((X, torch.full((N,), -100)), ignore_index=-100).predict(X).isfinite().all()


@pytest.mark.parametrize("objective", ["independent", "augmented", "adp"])
def test_a_sweep_trains_with_weights_as_separate_fits(objective):
    options = {"class_weights": "balanced", "ignore_index": -100, "validation": 0.3, "weights": WEIGHTS}
    options |= {"shuffle": True, "epochs": 3}
    if objective != "adp":
        options["label_smoothing"] = 0.2
    function = OBJECTIVES[objective][0]
    data = (X, IGNORED)
    swept = ds.sweep(build, data, function, grid={"seed": [0, 5], "lr": [0.05, 0.01]}, members=M, backend="loop",
                     **{**STEPS, **options})  # fmt: skip
    for number, point in enumerate(swept.points):
        ens = ensemble(point["seed"])
        history = ds.fit(ens, data, function, **{**STEPS, **options, **point})
        torch.testing.assert_close(swept.run(number).predict(X), ens.predict(X))
        assert swept.history(number).column("validation") == pytest.approx(history.column("validation"))


def test_validation_weighs_classes_and_examples_and_does_not_smooth():
    options = {"class_weights": CLASS_WEIGHTS, "label_smoothing": 0.3, "ignore_index": -100, "keep": "last"}
    loader = DataLoader(TensorDataset(X, IGNORED, WEIGHTS), 7)
    ens = ensemble()
    history = ds.fit(ens, loader, cross_entropy, epochs=1, validation=loader, unpack=lambda batch: batch, **options)
    pooled = ens.predict(X).softmax(-1).mean(0).log()
    counted = IGNORED != -100
    weights = (WEIGHTS * CLASS_WEIGHTS[LABELS])[counted]
    loss = F.cross_entropy(pooled, LABELS, reduction="none")[counted]
    assert history.column("validation") == pytest.approx([float((weights * loss).sum() / weights.sum())])
    own = torch.stack([F.cross_entropy(outputs, LABELS, reduction="none")[counted] for outputs in ens.predict(X)])
    expected = ((weights * own).sum(1) / weights.sum()).tolist()
    assert history.epochs[-1]["validation_individual"] == pytest.approx(np.mean(expected))
    ens = ensemble()
    history = ds.fit(ens, (X, IGNORED), cross_entropy, epochs=1, validation=(X, IGNORED), watch="member", **options)
    expected = [F.cross_entropy(o, IGNORED, weight=CLASS_WEIGHTS).item() for o in ens.predict(X)]
    assert history.epochs[-1]["validation"] == pytest.approx(expected)


def test_weights_of_a_held_out_fraction_count_in_the_watched_loss():
    ens = ensemble()
    history = ds.fit(ens, (X, LABELS), cross_entropy, epochs=1, validation=0.4, weights=WEIGHTS, keep="last")
    _, rows = split_rows(N, 0.4, 0)
    loss = F.cross_entropy(ens.predict(X[rows]).softmax(-1).mean(0).log(), LABELS[rows], reduction="none")
    weights = WEIGHTS[rows]
    assert history.column("validation") == pytest.approx([float((weights * loss).sum() / weights.sum())])
    with pytest.raises(ValueError, match=r"`weights` must have one number per example \(30\)"):
        ds.fit(ens, (X, LABELS), cross_entropy, epochs=1, validation=0.4, weights=WEIGHTS[:18])


def test_weights_in_some_validation_batches_only_are_refused():
    batches = [(X[:5], LABELS[:5], WEIGHTS[:5]), (X[5:], LABELS[5:])]
    with pytest.raises(ValueError, match="for all batches of validation data, or for none; got weights in 1 of 2"):
        trained(DataLoader(TensorDataset(X, LABELS, WEIGHTS), B), unpack=lambda batch: batch, validation=batches)


def test_checkpoints_tell_settings_apart(tmp_path):
    options = {"checkpoint": tmp_path / "run", "class_weights": CLASS_WEIGHTS, "label_smoothing": 0.1}
    options |= {"ignore_index": -100, "bootstrap": True}
    expected = trained(**options)
    assert_same(trained(**options, resume=True), expected)
    changes = {"class_weights": CLASS_WEIGHTS.flip(0), "label_smoothing": 0.2, "ignore_index": -1, "bootstrap": False}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=name):
            trained(**{**options, name: value}, resume=True)
    mixed = {"checkpoint": tmp_path / "mixed", "class_axis": -1}
    trained(augment=mixup(C, 0.2), **mixed)
    for change in ({"augment": mixup(C, 0.3)}, {"augment": mixup(C, 0.2), "class_axis": 2}):
        with pytest.raises(ValueError, match="augment|class_axis"):
            trained(**{**mixed, **change}, resume=True)


# Augmentations of inputs and targets.


def test_an_augmentation_of_three_positional_parameters_gets_the_targets():
    def swap(x, y, generator):
        order = torch.randperm(len(x), generator=generator)
        return x[order], y[order]

    for function, expected in (
        (swap, True),
        (lambda x, generator: x, False),
        (lambda x, generator, strength=0.1: x, False),
        (lambda x, generator, *, y=None: x, False),
        (functools.partial(lambda scale, x, y, generator: (x, y), 2.0), True),
        (mixup(3), True),
        (ds.data.augment.flips, False),
        (ds.data.augment.chain(ds.data.augment.flips, cutmix(3)), True),
        (ds.data.augment.chain(ds.data.augment.flips), False),
        (torch.relu, False),
        (None, False),
    ):
        assert changes_targets(function) == expected
    whole = {"batch_size": N}
    assert_same(trained(augment=swap, **whole), trained(**whole))
    loader = DataLoader(TensorDataset(X, LABELS), N)
    assert_same(trained(loader, augment=swap), trained(**whole))


@pytest.mark.parametrize("source", ["tensors", "loader"])
def test_mixed_batches_train_as_torch_trains_on_them(source):
    mixed = []

    def recorded(x, y, generator):
        mixed.append(mixup(C, 0.4)(x, y, generator))
        return mixed[-1]

    data = (X, LABELS) if source == "tensors" else DataLoader(TensorDataset(X, LABELS), B)
    ens = trained(data, augment=recorded)
    assert len(mixed) == 21
    for i, network in enumerate(ensemble().member(i) for i in range(M)):
        optimiser = torch.optim.SGD(network.parameters(), lr=STEPS["lr"], momentum=STEPS["momentum"])
        for x, y in mixed:
            optimiser.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimiser.step()
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(ens.member(i).state_dict()[name], tensor)


@pytest.mark.parametrize("source", ["tensors", "loader"])
def test_a_sweep_mixes_by_the_seed_of_each_run(source):
    x = X if source == "tensors" else X.float()
    data = (x, LABELS) if source == "tensors" else DataLoader(TensorDataset(x, LABELS), B)
    options = {**STEPS, "augment": mixup(C), "epochs": 2, "class_weights": CLASS_WEIGHTS}
    swept = ds.sweep(build, data, cross_entropy, grid={"seed": [0, 3, 3]}, members=M, backend="loop", **options)
    for number, seed in enumerate((0, 3, 3)):
        ens = ensemble(seed).to(x.dtype)
        ds.fit(ens, data, cross_entropy, seed=seed, **options)
        torch.testing.assert_close(swept.run(number).predict(x), ens.predict(x))


def test_augmentations_of_targets_are_refused_where_they_cannot_be():
    mixed = mixup(C)
    with pytest.raises(ValueError, match=r"`augment` must be one function where it changes targets; got a list. All"):
        trained(augment=[mixed] * M)
    with pytest.raises(TypeError, match=r"`augment` must return \(x, y\); got Tensor. A function of three"):
        trained(augment=lambda x, strength, generator: x)
    with pytest.raises(ValueError, match=r"return targets of all 10 examples; got \[9\]"):
        trained(augment=lambda x, y, generator: (x, y[1:]))
    with pytest.raises(ValueError, match=r"have shape \[B=10, C=4\] when they are floats"):
        trained(augment=mixup(C + 1))
    with pytest.raises(ValueError, match="be labels from 0 to 3; got labels from 0 to 4"):
        trained((X, LABELS + (LABELS == 3)), augment=mixed)
    with pytest.raises(
        ValueError, match="`augment` must keep class labels for `adp`, which needs them; got soft labels"
    ):
        ds.sweep(build, (X, LABELS), ds.objectives.adp, grid={"seed": [0]}, epochs=1, augment=mixed)
    with pytest.raises(ValueError, match="`augmentations` must change inputs only; got a function"):
        ds.data.features.cached_features(nn.Linear(5, 2), (X, LABELS), folder="none", augmentations=[mixed])


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 3.0])
def test_shares_are_drawn_from_the_beta_distribution(alpha):
    stats = pytest.importorskip("scipy.stats")
    n = 200_000
    x, y = torch.stack([torch.zeros(n), torch.ones(n)], 1), torch.arange(n) % 2
    x = F.one_hot(y, 2).float()
    mixed, soft = mixup(2, alpha)(x, y, torch.Generator().manual_seed(3))
    torch.testing.assert_close(mixed, soft)
    own = soft.gather(1, y.unsqueeze(1)).squeeze(1).numpy()  # λ, where the partner is of the other class; else 1
    crossed = own[own < 1 - 1e-6]
    points = np.array([1e-4, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1 - 1e-4])
    below = stats.beta(alpha, alpha).cdf(1 - 1e-6)
    expected = stats.beta(alpha, alpha).cdf(points) / below
    error = np.sqrt(expected * (1 - expected) / len(crossed))
    assert (np.abs((crossed[:, None] <= points).mean(0) - expected) < 5 * error).all()
    assert len(crossed) / n == pytest.approx(0.5 * below, abs=0.01)


def test_mixup_mixes_inputs_and_labels_of_one_permutation():
    x = torch.arange(6.0).view(6, 1)
    mixed, soft = mixup(6, 1.0)(x, torch.arange(6), torch.Generator().manual_seed(1))
    torch.testing.assert_close(mixed, soft @ x)
    assert ((soft > 0).sum(1) <= 2).all()
    torch.testing.assert_close(soft.sum(0).sum(), torch.tensor(6.0))
    values, targets = mixup(2, 1.0)(x, x.clone(), torch.Generator().manual_seed(1))
    torch.testing.assert_close(values, targets)
    alone, label = mixup(2)(x[:1], torch.tensor([1]), torch.Generator())
    torch.testing.assert_close(alone, x[:1])
    assert label.tolist() == [[0.0, 1.0]]
    for arguments in ((1, 0.2), (3, 0.0), (3, -1), (3, math.nan), (True, 1.0)):
        with pytest.raises((ValueError, TypeError), match="`(classes|alpha)` must be"):
            mixup(*arguments)
    with pytest.raises(TypeError, match="`x` must be one tensor of floats to be mixed; got torch.uint8"):
        mixup(3)(torch.zeros(2, 1, 4, 4).byte(), torch.zeros(2).long(), torch.Generator())
    with pytest.raises(ValueError, match=r"`y` must be labels \[B\], or floats"):
        mixup(3)(torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4).long(), torch.Generator())


def test_cutmix_pastes_one_box_and_mixes_labels_by_its_area():
    count, size = 64, 8
    x = torch.arange(float(count)).view(-1, 1, 1, 1).expand(count, 2, size, size).contiguous()
    mixed, soft = cutmix(count)(x, torch.arange(count), torch.Generator().manual_seed(0))
    for i in range(count):
        image = mixed[i, 0]
        assert torch.equal(image, mixed[i, 1])
        pasted = image != i
        assert soft[i, i] == pytest.approx(1 - float(pasted.float().mean()), abs=1e-6)
        if pasted.any():
            (partner,) = image[pasted].unique().tolist()
            assert soft[i, int(partner)] == pytest.approx(float(pasted.float().mean()), abs=1e-6)
            rows, columns = pasted.any(1).nonzero(), pasted.any(0).nonzero()
            assert pasted.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)  # a full box
    assert len({tuple(s.nonzero().flatten().tolist()) for s in soft}) > count // 2
    # The share of a box before it is cut off is uniform: 1 − λ is 1/2 on average, and less after it.
    share = 1 - soft.diagonal().mean()
    assert 0.2 < float(share) < 0.5
    with pytest.raises(ValueError, match=r"be images of shape \[B, C, H, W\]"):
        cutmix(3)(torch.zeros(2, 4), torch.zeros(2).long(), torch.Generator())


# Bagging.


def test_counts_are_multinomial_and_belong_to_their_member():
    counts = bootstrap_counts(50, 3, range(4))
    assert counts.sum(1).tolist() == [50.0] * 4
    assert torch.equal(bootstrap_counts(50, 3, [2])[0], counts[2])
    assert not torch.equal(counts[0], counts[1])
    assert not torch.equal(bootstrap_counts(50, 4, [0])[0], counts[0])
    many = bootstrap_counts(20, 0, range(2000))
    torch.testing.assert_close(many.mean(0), torch.ones(20), atol=0.12, rtol=0)
    assert float(many.var(0).mean()) == pytest.approx(1 - 1 / 20, rel=0.05)  # n p (1 − p)
    assert bootstrap_counts(1, 0, range(3)).tolist() == [[1.0]] * 3


def bagged_loss(weights=None, class_weights=None, seed=0):
    counts = bootstrap_counts(N, seed, range(M)).double()

    def loss(outputs, rows, member):
        weight = counts[member][rows]
        weight = weight if weights is None else weight * weights[rows]
        weight = weight if class_weights is None else weight * class_weights[LABELS[rows]]
        return (weight * F.cross_entropy(outputs, LABELS[rows], reduction="none")).sum() / weight.sum()

    return loss


@pytest.mark.parametrize("options", [{}, {"backend": "vmap"}, {"max_memory": 1}, {"seed": 2}], ids=str)
def test_bagging_equals_separate_training_with_counts_as_weights(options):
    if "max_memory" in options:
        options = {"max_memory": smallest_memory()}
    ens = trained(bootstrap=True, **options)
    assert_trained_alone(ens, bagged_loss(seed=options.get("seed", 0)), seed=options.get("seed", 0))


def smallest_memory():
    """Bytes with which members are trained in groups."""
    for size in range(4096, 2**15, 256):
        try:
            history = ds.fit(ensemble(), (X, LABELS), cross_entropy, max_memory=size, **{**STEPS, "epochs": 1})
        except ValueError:
            continue
        assert re.match("[12] of 3 members at once", history.memory)
        return size
    raise AssertionError


def test_bagging_multiplies_weights_of_examples_and_classes():
    ens = trained(bootstrap=True, weights=WEIGHTS, class_weights=CLASS_WEIGHTS)
    assert_trained_alone(ens, bagged_loss(WEIGHTS, CLASS_WEIGHTS))


def test_bagging_does_not_depend_on_other_members():
    together = trained(bootstrap=True)
    subset = ensemble().subset([2, 0])
    ds.fit(subset, (X, LABELS), cross_entropy, bootstrap=True, **STEPS)
    for place, member in enumerate((2, 0)):
        for name, tensor in together.member(member).state_dict().items():
            torch.testing.assert_close(subset.member(place).state_dict()[name], tensor)
    frozen = trained(bootstrap=True, frozen=[0])
    torch.testing.assert_close(frozen.member(1).state_dict()["0.weight"], together.member(1).state_dict()["0.weight"])
    alone = trained(bootstrap=True, sequential=True)
    assert_same(alone, together)


def test_sampled_members_keep_their_own_examples():
    """Active members train as in a bagging by hand: a weight of zero for all but one example of each member."""

    class Recorded:
        declaration = Declaration(separable=True, example_weights="per_member")

        def __init__(self):
            self.weights = []

        def __call__(self, outputs, targets, *, example_weights=None):
            self.weights.append(example_weights)
            return cross_entropy(outputs, targets, example_weights=example_weights)

    objective = Recorded()
    trained(objective=objective, bootstrap=True, active_members=2, batch_size=N, epochs=6)
    counts = bootstrap_counts(N, 0, range(M))
    chosen = []
    for weights in objective.weights:
        assert weights.shape == (2, N)
        chosen.append(tuple(next(i for i in range(M) if torch.equal(row, counts[i])) for row in weights))
    assert all(first < second for first, second in chosen)
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("validation", [None, 0.3])
def test_a_sweep_draws_examples_by_the_seed_of_each_run(shuffle, validation):
    options = {**STEPS, "epochs": 3, "bootstrap": True, "shuffle": shuffle, "validation": validation}
    grid = {"seed": [0, 4], "lr": [0.05, 0.01]}
    swept = ds.sweep(build, (X, LABELS), cross_entropy, grid=grid, members=M, backend="loop", **options)
    for number, point in enumerate(swept.points):
        ens = ensemble(point["seed"])
        ds.fit(ens, (X, LABELS), cross_entropy, **{**options, **point})
        torch.testing.assert_close(swept.run(number).predict(X), ens.predict(X))


class Rows(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"x": X[index], "y": LABELS[index], "w": WEIGHTS[index]}


def test_bagging_of_a_dataset_is_that_of_its_tensors():
    expected = trained(bootstrap=True, weights=WEIGHTS)
    assert_same(trained(Rows(), bootstrap=True, unpack=lambda batch: (batch["x"], batch["y"], batch["w"])), expected)
    assert_same(trained(Rows(), bootstrap=True, unpack=lambda batch: (batch["x"], batch["y"])), trained(bootstrap=True))
    shuffled = trained(
        Rows(), bootstrap=True, unpack=lambda batch: (batch["x"], batch["y"]), batch_size=N, shuffle=True
    )
    assert_same(shuffled, trained(bootstrap=True, batch_size=N))


def test_bagging_sets_members_apart_that_start_equal(caplog):
    network = build()
    ens = ds.Ensemble.from_modules([network, network], backend="loop").double()
    ds.fit(ens, (X, LABELS), cross_entropy, bootstrap=True, **STEPS)
    assert not caplog.records
    first, second = ens.predict(X)
    assert not torch.allclose(first, second)
    ens = ds.Ensemble.from_modules([network, network], backend="loop").double()
    ds.fit(ens, (X, LABELS), cross_entropy, **STEPS)
    assert "bootstrap=True" in caplog.text


def test_bagging_of_a_part_of_a_dataset_is_that_of_its_rows():
    options = {"validation": 0.3, "batch_size": N, "keep": "last"}
    one = trained(Rows(), bootstrap=True, unpack=lambda batch: (batch["x"], batch["y"]), **options)
    assert_same(one, trained(bootstrap=True, **options))


def test_bagging_is_refused_where_members_interact_or_examples_have_no_number():
    interacting = OBJECTIVES["augmented"][0]
    with pytest.raises(
        ValueError, match="`bootstrap` must come with an objective whose members do not interact; got a"
    ):
        trained(objective=interacting, bootstrap=True)
    with pytest.raises(
        ValueError, match="`bootstrap` must .* by number; got a source of batches. Pass tensors or a Dat"
    ):
        trained(DataLoader(TensorDataset(X, LABELS), B), bootstrap=True)
    with pytest.raises(TypeError, match="`bootstrap` must be True or False; got 2"):
        trained(bootstrap=2)
    layers = (nn.Linear(5, 8), ds.masks.Masksembles(8, 4, 2.0), nn.ReLU(), nn.Linear(8, C))
    masked = ds.masks.Masked(nn.Sequential(*layers).double(), assign="all")
    with pytest.raises(
        ValueError, match="`bootstrap` must come with members that are networks of their own; got masks"
    ):
        ds.fit(masked, (X, LABELS), cross_entropy, bootstrap=True, **STEPS)


def test_settings_that_are_not_used_leave_the_objective_as_it_is():
    assert weighted(cross_entropy, TargetSettings(), "cross_entropy") is cross_entropy
    assert weighted(cross_entropy, TargetSettings(label_smoothing=0.1), "cross_entropy") is not cross_entropy


@pytest.mark.parametrize("shares", [None, [0.5, 0.3, 0.2]])
def test_the_loss_of_bagging_is_the_mean_of_what_members_are_trained_on(shares):
    """Members count other examples, so a mean over members of each step is not the mean of an epoch."""
    ens = ensemble()
    objective = functools.partial(cross_entropy, weights=shares) if shares else cross_entropy
    options = {**STEPS, "epochs": 1, "lr": 0.0, "momentum": 0.0}
    (record,) = ds.fit(ens, (X, LABELS), objective, bootstrap=True, **options).epochs
    counts = bootstrap_counts(N, 0, range(M)).double()
    own = torch.stack([F.cross_entropy(ens.member(i)(X), LABELS, reduction="none") for i in range(M)]).detach()
    members = (own * counts).sum(1) / counts.sum(1)
    mean = (members * torch.tensor(shares or [1 / M] * M, dtype=torch.float64)).sum()
    assert record["member_loss"] == pytest.approx(members.tolist(), rel=1e-12)
    assert record["loss"] == record["individual"] == pytest.approx(float(mean), rel=1e-12)


@pytest.mark.parametrize("first", [True, False])
def test_weights_in_some_batches_only_are_refused(first, unchecked):
    batches = [(X[:10], LABELS[:10], WEIGHTS[:10]), (X[10:20], LABELS[10:20])]
    batches = batches if first else batches[::-1]
    message = f"for all batches, or for none; got a batch {'without' if first else 'with'} weights.*weights of 1"
    with pytest.raises(ValueError, match=message):
        trained(batches, unpack=lambda batch: batch)
    trained([batches[0], batches[0]], unpack=lambda batch: batch)


def test_labels_are_not_smoothed_twice(unchecked):
    smoothed = functools.partial(cross_entropy, smoothing=0.1)
    with pytest.raises(ValueError, match="`label_smoothing` must come without `smoothing` of independent; got both"):
        trained(objective=smoothed, label_smoothing=0.1)
    with pytest.raises(ValueError, match="`label_smoothing` must come without `smoothing`"):
        ds.sweep(
            build, (X, LABELS), cross_entropy, grid={"smoothing": [0.0, 0.1]}, members=2, epochs=1, label_smoothing=0.1
        )
    torch.testing.assert_close(flat(trained(objective=smoothed)), flat(trained(label_smoothing=0.1)))


def test_class_weights_of_another_length_are_blamed_themselves(unchecked):
    with pytest.raises(ValueError, match="`class_weights` must have one number per class; got 2 numbers for labels fr"):
        trained(class_weights=[1.0, 2.0])
    with pytest.raises(
        ValueError, match=r"`targets` must be labels from 0 on; got labels from -100.*ignore_index=-100"
    ):
        trained((X, torch.where(LABELS == 0, -100, LABELS)), class_weights=[1.0, 2.0])

"""Members that have converged stand still one by one (ADP paper, Algorithm 1): the rule, and a loop by hand."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from networks import NETWORKS
from recording import recorded
from torch.nn import functional as F

import dissensus as ds
from dissensus.data.batches import batches
from dissensus.execution.graphs import captured
from dissensus.train import capture, checkpoint
from dissensus.train.convergence import Convergence, Freezing

M = 3
adp = partial(ds.objectives.adp, alpha=0.5, beta=0.05)
alone = partial(ds.objectives.independent, loss="cross_entropy")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def classes(shape=(6,), n=22, device="cpu"):
    """Labels that can be learnt: which of three numbers is the largest."""
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x.to(device), x.flatten(1)[:, :3].argmax(1).to(device)


def ensemble_of(name="mlp", members=M, backend="auto"):
    return ds.Ensemble(NETWORKS[name][0], members, seed=1, backend=backend).double()


def weights(ensemble):
    return {name: tensor.detach().cpu().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_same(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# The rule


def seen(losses, patience=2, tolerance=0.1, active=None):
    """When members freeze that have these losses, ``[epochs][M]``; and who goes on at the end."""
    freezing = Freezing(Convergence(patience, tolerance), len(losses[0]))
    going = torch.ones(len(losses[0]), dtype=torch.bool) if active is None else torch.tensor(active)
    for epoch, now in enumerate(losses, 1):
        going = freezing.update(epoch, now, going)
    return freezing.epochs(), going.tolist()


def test_a_member_that_has_not_improved_for_so_long_is_frozen():
    falling = [2.0, 1.0, 0.5, 0.25, 0.12, 0.06]
    stuck = [2.0, 1.0, 0.95, 0.92, 0.99, 0.2]
    assert seen(list(zip(falling, stuck, strict=True))) == ([None, 4], [True, False])
    slow = [1.0, 0.95, 0.89, 0.85, 0.80, 0.76]
    assert seen([[loss] for loss in slow]) == ([None], [True]), "small falls add up to one that counts"
    assert seen([[loss] for loss in slow], tolerance=0.2) == ([3], [False])


def test_a_fall_of_just_the_tolerance_is_none():
    assert seen([[1.0], [0.75], [0.75 * 0.75]], patience=1, tolerance=0.25) == ([2], [False])
    assert seen([[1.0], [0.7499], [0.5]], patience=1, tolerance=0.25) == ([None], [True])
    assert seen([[1.0], [1.0]], patience=1, tolerance=0.0) == ([2], [False])
    assert seen([[-1.0], [-1.05], [-1.2]], patience=2) == ([None], [True]), "losses below zero fall too"
    assert seen([[0.0], [0.0], [0.0]]) == ([3], [False])


def test_they_freeze_one_by_one_and_who_has_waited_longest_goes_first():
    assert seen([[1.0, 1.0, 1.0]] * 5) == ([3, 4, 5], [False] * 3), "of several the first"
    late = [[1.0, 1.0, 1.0], [0.5, 0.5, 1.0], [0.5, 0.5, 1.0], [0.5, 0.5, 1.0], [0.5, 0.5, 1.0]]
    assert seen(late)[0] == [4, 5, 3]
    recovers = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.5], [1.0, 0.5], [1.0, 0.5]]
    assert seen(recovers)[0] == [3, 6], "who improves while waiting has not converged"


def test_members_that_rest_already_are_no_part_of_it():
    assert seen([[1.0, 1.0]] * 3, active=[False, True]) == ([None, 3], [False, False])
    assert seen([[math.nan, 1.0], [0.9, 0.5], [0.5, 0.2]])[0] == [None, None], "NaN is no improvement to start from"


def test_masks_of_a_network_are_one_member():
    freezing = Freezing(Convergence(1, 0.1), 2)
    going = freezing.update(1, [1.0, 3.0, 1.0, 1.0], torch.ones(2, dtype=torch.bool))
    assert freezing.update(2, [1.2, 1.2, 1.2, 0.8], going).tolist() == [True, False]
    network = ds.masks.convert(ds.nets.mlp(6, 3, (16,)).double(), 3, 2.0, widen=True, assign="all")
    history = ds.fit(network, classes(), alone, epochs=9, lr=0.0, freeze=Convergence(2), shuffle=False)
    assert history.frozen_at == [3]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("patience", 0), ("patience", 1.5), ("tolerance", -0.1), ("tolerance", math.nan), ("tolerance", math.inf)],
)
def test_impossible_rules_are_refused(name, wrong, unchecked):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        Convergence(**{name: wrong})


# Training


def by_hand(networks, pair, objective, *, make, rates, epochs, size, seed, patience, tolerance):
    """Algorithm 1 with the documented rule, one module at a time; the epoch at which each froze."""
    steppers = [make(network.parameters(), lr=rate) for network, rate in zip(networks, rates, strict=True)]
    members = range(len(networks))
    best, improved, frozen = [math.inf] * len(networks), [-1] * len(networks), [None] * len(networks)
    feed = batches(pair, batch_size=size, seed=seed, device=torch.device("cpu"))
    for epoch in range(epochs):
        sums = [0.0] * len(networks)
        for x, y in feed.epoch(epoch):
            kept = {m: [b.clone() for b in networks[m].buffers()] for m in members if frozen[m] is not None}
            outputs = torch.stack([network(x) for network in networks])
            for stepper in steppers:
                stepper.zero_grad()
            objective(outputs, y).total.backward()
            for m in members:
                sums[m] += len(y) * float(F.cross_entropy(outputs[m].detach(), y))
                if m not in kept:
                    steppers[m].step()
            with torch.no_grad():
                for m, held in kept.items():
                    for buffer, before in zip(networks[m].buffers(), held, strict=True):
                        buffer.copy_(before)
        for m in members:
            if sums[m] / len(pair[1]) < best[m] * (1 - tolerance):
                best[m], improved[m] = sums[m] / len(pair[1]), epoch
        ready = sorted((improved[m], m) for m in members if frozen[m] is None and epoch - improved[m] >= patience)
        if ready:
            frozen[ready[0][1]] = epoch + 1  # the first epoch is 1
        if None not in frozen:
            break
    return frozen


RULES = {"some": (3, 0.04), "all": (1, 0.45), "none": (50, 0.0)}


@pytest.mark.slow(cases=["cnn_batch_norm-adamw-*"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm"])
def test_training_equals_algorithm_1_by_hand_with_a_rate_per_member(name, optimizer, rule):
    pair = classes(NETWORKS[name][1])
    patience, tolerance = RULES[rule]
    rates = [0.03, 0.01, 0.0005] if optimizer == "sgd" else [0.05, 0.005, 0.0005]
    ours, theirs = ensemble_of(name), ensemble_of(name)
    more = {"momentum": 0.9} if optimizer == "sgd" else {}
    history = ds.fit(
        ours,
        pair,
        adp,
        epochs=12,
        batch_size=8,
        lr=rates,
        optimizer=optimizer,
        weight_decay=0.02,
        seed=5,
        freeze=Convergence(patience, tolerance),
        **more,
    )
    make = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}[optimizer]
    networks = [theirs.member(m).train() for m in range(M)]
    frozen = by_hand(
        networks,
        pair,
        adp,
        make=partial(make, weight_decay=0.02),
        rates=rates,
        epochs=12,
        size=8,
        seed=5,
        patience=patience,
        tolerance=tolerance,
    )
    assert history.frozen_at == frozen
    ends = [epoch for epoch in frozen if epoch is not None]
    assert len(ends) in {"some": (1, 2, 3), "all": (3,), "none": (0,)}[rule], frozen
    assert rule == "none" or min(ends) + 1 < len(history.epochs), "the others went on for a while"
    assert_same(weights(ours), weights(ds.Ensemble.from_modules(networks).double()))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_frozen_member_stands_still_in_everything_and_the_others_go_on(optimizer, monkeypatch):
    engines, ends = [], {}

    def spied(engine):
        engines.append(engine)
        checkpoint.train(engine)

    def look(moment):
        state = engines[0].state
        held = {"flat": state.flat, **state.moments, **state.body.state()}
        if moment.step == 3 * moment.epoch:  # the last look at an epoch is that at its end
            ends[moment.epoch] = (moment, {name: tensor.detach().clone() for name, tensor in held.items()})

    monkeypatch.setattr("dissensus.train.fitting.train", spied)
    more = {"momentum": 0.9} if optimizer == "sgd" else {}
    history = ds.fit(
        ensemble_of("cnn_batch_norm"),
        classes((2, 8, 8)),
        adp,
        epochs=10,
        batch_size=8,
        lr=[0.02, 1e-7, 0.02],
        optimizer=optimizer,
        weight_decay=0.1,
        freeze=Convergence(3, 0.02),
        progress=look,
        **more,
    )
    assert history.frozen_at[1] is not None
    assert None in history.frozen_at
    for (before, held), (_, later) in pairwise(ends.values()):
        for name, tensor in held.items():
            for m in range(M):
                if m in before.frozen:
                    assert torch.equal(tensor[m], later[name][m]), f"{name} of member {m}, which is frozen, moved"
    (last, held), (_, earlier) = ends[10], ends[9]
    going = next(m for m in range(M) if m not in last.frozen)
    assert all(not torch.equal(tensor[going], earlier[name][going]) for name, tensor in held.items())
    assert str(last).endswith("frozen " + ", ".join(map(str, last.frozen)))
    assert "frozen" not in str(ends[1][0])


def test_the_others_still_learn_from_a_frozen_members_outputs():
    pair = classes()
    options = {"batch_size": 8, "lr": [1e-7, 0.1, 0.1], "optimizer": "sgd", "shuffle": False}
    ours, stages = ensemble_of(), ensemble_of()
    history = ds.fit(ours, pair, adp, epochs=8, freeze=Convergence(3, 0.002), **options)
    (first, *rest) = history.frozen_at
    assert first == 4
    assert rest == [None, None]
    ds.fit(stages, pair, adp, epochs=4, **options)
    without = stages.subset([1, 2])
    ds.fit(stages, pair, adp, epochs=4, frozen=[0], **options)
    assert_same(weights(ours), weights(stages))
    ds.fit(without, pair, adp, epochs=4, **{**options, "lr": 0.1})
    differ = [not torch.allclose(tensor, weights(ours)[name][1:]) for name, tensor in weights(without).items()]
    assert any(differ), "in an ensemble without the frozen member the others learn something else"


def test_a_resting_member_drops_other_units_at_every_step():
    pair, seen_outputs = classes(), []

    def recording(outputs, targets):
        seen_outputs.append(outputs[0].detach().clone())
        return alone(outputs, targets)

    ensemble = ensemble_of("two_dropouts", backend="loop")
    ds.fit(ensemble, pair, recording, epochs=3, batch_size=22, shuffle=False, frozen=[0])
    assert not torch.equal(seen_outputs[-1], seen_outputs[-2])


def test_it_ends_when_all_are_frozen_one_per_epoch():
    options = {"batch_size": 8, "lr": 0.0, "shuffle": False}
    history = ds.fit(ensemble_of(), classes(), alone, epochs=20, freeze=Convergence(2), **options)
    assert history.frozen_at == [3, 4, 5]
    assert len(history.epochs) == 5
    assert history.stopped_early
    assert "5 epochs, 15 steps" in str(history)
    assert str(history).endswith("stopped early, members frozen at epochs 3, 4, 5")
    short = ds.fit(ensemble_of(), classes(), alone, epochs=3, freeze=Convergence(2), **options)
    assert short.frozen_at == [3, None, None]
    assert not short.stopped_early
    assert str(short).endswith("members frozen at epochs 3, never, never")
    held = ds.fit(ensemble_of(), classes(), alone, epochs=20, freeze=Convergence(2), frozen=[0], **options)
    assert held.frozen_at == [None, 3, 4]
    assert len(held.epochs) == 4
    plain = ds.fit(ensemble_of(), classes(), alone, epochs=2, **options)
    assert plain.frozen_at is None


def test_one_member_is_an_ensemble_of_one():
    network = NETWORKS["mlp"][0]().double()
    history = ds.fit(network, classes(), alone, epochs=9, lr=0.0, shuffle=False, freeze=Convergence(1))
    assert history.frozen_at == [2]
    assert len(history.epochs) == 2


def test_validation_data_only_looks_on():
    pair, held_out = classes(), classes(n=9)
    options = {"epochs": 10, "batch_size": 8, "lr": [0.1, 0.01, 0.001], "freeze": Convergence(2, 0.05)}
    found = []
    for more in ({}, {"validation": held_out, "keep": "last"}):
        ensemble = ensemble_of()
        found.append((ds.fit(ensemble, pair, adp, **options, **more).frozen_at, weights(ensemble)))
    assert found[0][0] == found[1][0] != [None] * M
    assert_same(found[1][1], found[0][1])
    history = ds.fit(ensemble_of(), pair, adp, validation=held_out, watch="member", patience=1, **options)
    assert len(history.epochs) <= 10, "members may stop for either reason"


class Interrupted(Exception):
    pass


def interrupting(steps):
    """An objective that stops training with an error at a step."""
    count = [0, steps]  # in a list: a number of its own would belong to the training's identity

    def objective(outputs, targets):
        count[0] += 1
        if count[0] > count[1]:
            raise Interrupted
        return adp(outputs, targets)

    objective.__qualname__ = "objective"
    return objective


@pytest.mark.slow(fast=["10-norm_first", "2-two_dropouts"])
@pytest.mark.parametrize("name", ["two_dropouts", "norm_first"])
@pytest.mark.parametrize("steps", [2, 10, 13, 18, 20])
def test_it_resumes_to_the_bit(name, steps, tmp_path):
    options = {"epochs": 9, "batch_size": 8, "lr": [0.05, 1e-7, 0.05], "validation": 0.2}
    rule = {"freeze": Convergence(3, 0.1)}

    def run(folder, steps=10**9, **more):
        ensemble = ensemble_of(name, backend="loop")
        saving = {} if folder is None else {"checkpoint": folder, "checkpoint_seconds": 0.0}
        return ensemble, ds.fit(ensemble, classes(), interrupting(steps), **{**options, **rule, **saving, **more})

    whole, told = run(None)
    assert sum(epoch is not None for epoch in told.frozen_at) > 0
    with pytest.raises(Interrupted):
        run(tmp_path, steps)
    with pytest.raises(ds.StorageError, match="'freeze' differ"):
        run(tmp_path, resume=True, freeze=Convergence(3, 0.2))
    again, history = run(tmp_path, resume=True)
    assert history.frozen_at == told.frozen_at
    assert history.column("loss") == told.column("loss")
    assert all(torch.equal(tensor, weights(again)[key]) for key, tensor in weights(whole).items())
    _, history = run(tmp_path, 0, resume=True)
    assert history.frozen_at == told.frozen_at, "a training that is done tells it again"


@pytest.mark.slow(cases=["two_dropouts-*"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "two_dropouts"])
def test_captured_steps_freeze_as_eager_ones_do(name, device, monkeypatch):
    captures, pools, found = [], [], []

    def fresh():
        pools.append(torch.cuda.graph_pool_handle() if device == "cuda" else None)

        def counting(function, generators):
            captures.append(function)
            if device == "cuda":
                return captured(function, generators, pool=pools[-1])
            return recorded(function, generators, host_reads=True)  # `one_hot` checks its labels on a CPU

        return counting

    for steps in (lambda engine: None, lambda engine: capture.GraphSteps(fresh)):
        monkeypatch.setattr("dissensus.train.recipe.graph_steps", steps)
        ensemble = ensemble_of(name, backend="loop").to(device)
        history = ds.fit(
            ensemble,
            classes(NETWORKS[name][1], device=device),
            adp,
            epochs=16,
            batch_size=8,
            lr=[0.03, 1e-9, 1e-9],
            freeze=Convergence(4, 0.05),
        )
        found.append((weights(ensemble), history.column("loss"), history.frozen_at))
    assert sum(epoch is not None for epoch in found[0][2]) >= 2
    assert len(captures) == 4, "two shapes of batches, once with all members at work and once with some at rest"
    assert len(pools) == 2, "the second time in memory of their own"
    assert found[1][2] == found[0][2]
    assert found[1][1] == pytest.approx(found[0][1])
    assert_same(found[1][0], found[0][0], 1e-7)


def test_what_it_cannot_be_combined_with_is_refused_by_name(unchecked):
    pair, rule = classes(), Convergence()
    with pytest.raises(ValueError, match="`freeze` must come without `active_members`"):
        ds.fit(ensemble_of(), pair, alone, epochs=1, freeze=rule, active_members=2)
    with pytest.raises(ValueError, match="`sequential` must come without `frozen`, `freeze` and"):
        ds.fit(ensemble_of(), pair, alone, epochs=1, freeze=rule, sequential=True)
    with pytest.raises(TypeError, match=r"`freeze` must be a dissensus.train.Convergence; got \[0\].*frozen="):
        ds.fit(ensemble_of(), pair, alone, epochs=1, freeze=[0])

    def silent(outputs, targets):
        return ds.LossParts(alone(outputs, targets).total, {})

    with pytest.raises(ValueError, match="`objective` must tell `member_loss`"):
        ds.fit(ensemble_of(), pair, silent, epochs=1, freeze=rule)

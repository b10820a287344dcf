"""Members that have converged stand still one by one (ADP paper, Algorithm 1): the rule, and a loop by hand."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from networks import NETWORKS
from recording import recorded
from torch import nn
from torch.nn import functional as F

import dissensus as ds
from dissensus.data.batches import batches
from dissensus.execution.graphs import captured
from dissensus.train import capture, checkpoint
from dissensus.train.convergence import Convergence, Freezing

M = 3
adp = partial(ds.objectives.adp, alpha=0.5, beta=0.05)
independent = partial(ds.objectives.independent, loss="cross_entropy")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def classes(shape=(6,), n=22, device="cpu"):
    """Labels that can be learnt: which of three numbers is the largest."""
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x.to(device), x.flatten(1)[:, :3].argmax(1).to(device)


def ensemble_of(name="mlp", members=M, backend="auto"):
    return ds.Ensemble(NETWORKS[name][0], members, seed=1, backend=backend).double()


def weights(ensemble):
    return {name: tensor.detach().cpu().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_same(actual, expected, tolerance=1e-9):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# The rule


def freezing_epochs(losses, patience=2, tolerance=0.1, active=None):
    """When members freeze that have these losses, ``[epochs][M]``; and who goes on at the end."""
    freezing = Freezing(Convergence(patience, tolerance), len(losses[0]))
    active_now = torch.ones(len(losses[0]), dtype=torch.bool) if active is None else torch.tensor(active)
    for epoch, epoch_losses in enumerate(losses, 1):
        active_now = freezing.update(epoch, epoch_losses, active_now)
    return freezing.epochs(), active_now.tolist()


def test_a_member_without_improvement_is_frozen():
    falling = [2.0, 1.0, 0.5, 0.25, 0.12, 0.06]
    stuck = [2.0, 1.0, 0.95, 0.92, 0.99, 0.2]
    assert freezing_epochs(list(zip(falling, stuck, strict=True))) == ([None, 4], [True, False])
    slow = [1.0, 0.95, 0.89, 0.85, 0.80, 0.76]
    assert freezing_epochs([[loss] for loss in slow]) == ([None], [True]), "small falls add up to one that counts"
    assert freezing_epochs([[loss] for loss in slow], tolerance=0.2) == ([3], [False])


def test_a_fall_by_the_tolerance_is_no_improvement():
    assert freezing_epochs([[1.0], [0.75], [0.75 * 0.75]], patience=1, tolerance=0.25) == ([2], [False])
    assert freezing_epochs([[1.0], [0.7499], [0.5]], patience=1, tolerance=0.25) == ([None], [True])
    assert freezing_epochs([[1.0], [1.0]], patience=1, tolerance=0.0) == ([2], [False])
    assert freezing_epochs([[-1.0], [-1.05], [-1.2]], patience=2) == ([None], [True]), "losses below zero fall too"
    assert freezing_epochs([[0.0], [0.0], [0.0]]) == ([3], [False])


def test_members_freeze_one_at_a_time_longest_wait_first():
    assert freezing_epochs([[1.0, 1.0, 1.0]] * 5) == ([3, 4, 5], [False] * 3), "of several the first"
    last_stuck_first = [[1.0, 1.0, 1.0], [0.5, 0.5, 1.0], [0.5, 0.5, 1.0], [0.5, 0.5, 1.0], [0.5, 0.5, 1.0]]
    assert freezing_epochs(last_stuck_first)[0] == [4, 5, 3]
    recovers = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.5], [1.0, 0.5], [1.0, 0.5]]
    assert freezing_epochs(recovers)[0] == [3, 6], "who improves while waiting has not converged"


def test_inactive_members_do_not_converge():
    assert freezing_epochs([[1.0, 1.0]] * 3, active=[False, True]) == ([None, 3], [False, False])
    assert freezing_epochs([[math.nan, 1.0], [0.9, 0.5], [0.5, 0.2]])[0] == [None, None], (
        "NaN is no improvement to start from"
    )


def test_a_masked_network_converges_as_one_member():
    freezing = Freezing(Convergence(1, 0.1), 2)
    active = freezing.update(1, [1.0, 3.0, 1.0, 1.0], torch.ones(2, dtype=torch.bool))
    assert freezing.update(2, [1.2, 1.2, 1.2, 0.8], active).tolist() == [True, False]
    network = ds.masks.convert(ds.nets.mlp(6, 3, (16,)).double(), 3, 2.0, widen=True, assign="all")
    history = ds.fit(network, classes(), independent, epochs=9, lr=0.0, freeze=Convergence(2), shuffle=False)
    assert history.frozen_at == [3]


@pytest.mark.parametrize(
    ("name", "value"),
    [("patience", 0), ("patience", 1.5), ("tolerance", -0.1), ("tolerance", math.nan), ("tolerance", math.inf)],
)
def test_impossible_rules_are_refused(name, value, unchecked):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        Convergence(**{name: value})


# Training


def train_by_hand(networks, pair, objective, *, make, rates, epochs, size, seed, patience, tolerance):
    """Algorithm 1 with the documented rule, one module at a time; the epoch at which each froze."""
    steppers = [make(network.parameters(), lr=rate) for network, rate in zip(networks, rates, strict=True)]
    members = range(len(networks))
    best, last_improvement, frozen = [math.inf] * len(networks), [-1] * len(networks), [None] * len(networks)
    feed = batches(pair, batch_size=size, seed=seed, device=torch.device("cpu"))
    for epoch in range(epochs):
        loss_sums = [0.0] * len(networks)
        for x, y, *_ in feed.epoch(epoch):
            saved_buffers = {m: [b.clone() for b in networks[m].buffers()] for m in members if frozen[m] is not None}
            outputs = torch.stack([network(x) for network in networks])
            for stepper in steppers:
                stepper.zero_grad()
            objective(outputs, y).total.backward()
            for m in members:
                loss_sums[m] += len(y) * float(F.cross_entropy(outputs[m].detach(), y))
                if m not in saved_buffers:
                    steppers[m].step()
            with torch.no_grad():
                for m, saved in saved_buffers.items():
                    for buffer, before in zip(networks[m].buffers(), saved, strict=True):
                        buffer.copy_(before)
        for m in members:
            if loss_sums[m] / len(pair[1]) < best[m] * (1 - tolerance):
                best[m], last_improvement[m] = loss_sums[m] / len(pair[1]), epoch
        ready = sorted(
            (last_improvement[m], m) for m in members if frozen[m] is None and epoch - last_improvement[m] >= patience
        )
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
    ensemble, reference = ensemble_of(name), ensemble_of(name)
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    history = ds.fit(
        ensemble,
        pair,
        adp,
        epochs=12,
        batch_size=8,
        lr=rates,
        optimizer=optimizer,
        weight_decay=0.02,
        seed=5,
        freeze=Convergence(patience, tolerance),
        **momentum,
    )
    make = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}[optimizer]
    networks = [reference.member(m).train() for m in range(M)]
    frozen = train_by_hand(
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
    frozen_epochs = [epoch for epoch in frozen if epoch is not None]
    assert len(frozen_epochs) in {"some": (1, 2, 3), "all": (3,), "none": (0,)}[rule], frozen
    assert rule == "none" or min(frozen_epochs) + 1 < len(history.epochs), "the others went on for a while"
    assert_same(weights(ensemble), weights(ds.Ensemble.from_modules(networks).double()))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_frozen_member_keeps_weights_and_state_while_others_train(optimizer, monkeypatch):
    engines, epoch_ends = [], {}

    def recording_train(engine):
        engines.append(engine)
        checkpoint.train(engine)

    def record(moment):
        state = engines[0].state
        tensors = {"flat": state.flat, **state.moments, **state.body.state()}
        if moment.step == 3 * moment.epoch:  # the last look at an epoch is that at its end
            epoch_ends[moment.epoch] = (moment, {name: tensor.detach().clone() for name, tensor in tensors.items()})

    monkeypatch.setattr("dissensus.train.fitting.train", recording_train)
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
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
        progress=record,
        **momentum,
    )
    assert history.frozen_at[1] is not None
    assert None in history.frozen_at
    for (before, tensors), (_, later) in pairwise(epoch_ends.values()):
        for name, tensor in tensors.items():
            for m in range(M):
                if m in before.frozen:
                    assert torch.equal(tensor[m], later[name][m]), f"{name} of member {m}, which is frozen, moved"
    (last, tensors), (_, earlier) = epoch_ends[10], epoch_ends[9]
    active = next(m for m in range(M) if m not in last.frozen)
    assert all(not torch.equal(tensor[active], earlier[name][active]) for name, tensor in tensors.items())
    assert str(last).endswith("frozen " + ", ".join(map(str, last.frozen)))
    assert "frozen" not in str(epoch_ends[1][0])


def test_the_others_still_learn_from_a_frozen_members_outputs():
    pair = classes()
    options = {"batch_size": 8, "lr": [1e-7, 0.1, 0.1], "optimizer": "sgd", "shuffle": False}
    ensemble, stages = ensemble_of(), ensemble_of()
    history = ds.fit(ensemble, pair, adp, epochs=8, freeze=Convergence(3, 0.002), **options)
    (first, *others) = history.frozen_at
    assert first == 4
    assert others == [None, None]
    ds.fit(stages, pair, adp, epochs=4, **options)
    without_frozen = stages.subset([1, 2])
    ds.fit(stages, pair, adp, epochs=4, frozen=[0], **options)
    assert_same(weights(ensemble), weights(stages))
    ds.fit(without_frozen, pair, adp, epochs=4, **{**options, "lr": 0.1})
    differ = [
        not torch.allclose(tensor, weights(ensemble)[name][1:]) for name, tensor in weights(without_frozen).items()
    ]
    assert any(differ), "in an ensemble without the frozen member the others learn something else"


class Dropping(nn.Module):
    """Drops units by a function, and counts its training passes in a buffer named like dropout's."""

    def __init__(self):
        super().__init__()
        self.first, self.counting, self.second = nn.Linear(6, 8), Counting(), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(F.dropout(self.counting(self.first(x)), 0.5, self.training))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.step.add_(1)
        return x


@pytest.mark.parametrize("other", [False, True], ids=["stacked", "of two architectures"])
@pytest.mark.parametrize("build", [NETWORKS["two_dropouts"][0], Dropping], ids=["layers", "functions"])
def test_a_frozen_member_draws_new_dropout_masks_at_every_step(build, other):
    pair, outputs_of_first = classes(), []

    def recording(outputs, targets):
        outputs_of_first.append(outputs[0].detach().clone())
        return independent(outputs, targets)

    if other:
        ensemble = ds.Ensemble.from_modules([build(), NETWORKS["mlp"][0]()]).double()
    else:
        ensemble = ds.Ensemble(build, M, seed=1, backend="loop").double()
    ds.fit(ensemble, pair, recording, epochs=3, batch_size=22, shuffle=False, frozen=[0])
    assert len(outputs_of_first) >= 3
    for i, outputs in enumerate(outputs_of_first):
        assert not any(torch.equal(outputs, later) for later in outputs_of_first[i + 1 :])


@pytest.mark.parametrize("other", [False, True], ids=["stacked", "of two architectures"])
def test_a_buffer_of_the_users_that_is_named_step_does_not_move_in_a_frozen_member(other):
    if other:
        ensemble = ds.Ensemble.from_modules([Dropping(), Dropping(), NETWORKS["mlp"][0]()]).double()
    else:
        ensemble = ds.Ensemble(Dropping, M, seed=1, backend="loop").double()
    ds.fit(ensemble, classes(), independent, epochs=3, batch_size=11, frozen=[0])
    assert [int(ensemble.member(i).counting.step) for i in (0, 1)] == [0, 6]


def test_training_ends_when_all_members_are_frozen():
    options = {"batch_size": 8, "lr": 0.0, "shuffle": False}
    history = ds.fit(ensemble_of(), classes(), independent, epochs=20, freeze=Convergence(2), **options)
    assert history.frozen_at == [3, 4, 5]
    assert len(history.epochs) == 5
    assert history.stopped_early
    assert "5 epochs, 15 steps" in str(history)
    assert str(history).endswith("stopped early, members frozen at epochs 3, 4, 5")
    short = ds.fit(ensemble_of(), classes(), independent, epochs=3, freeze=Convergence(2), **options)
    assert short.frozen_at == [3, None, None]
    assert not short.stopped_early
    assert str(short).endswith("members frozen at epochs 3, never, never")
    partly_frozen = ds.fit(
        ensemble_of(), classes(), independent, epochs=20, freeze=Convergence(2), frozen=[0], **options
    )
    assert partly_frozen.frozen_at == [None, 3, 4]
    assert len(partly_frozen.epochs) == 4
    without_rule = ds.fit(ensemble_of(), classes(), independent, epochs=2, **options)
    assert without_rule.frozen_at is None


def test_a_single_network_is_frozen_as_an_ensemble_of_one():
    network = NETWORKS["mlp"][0]().double()
    history = ds.fit(network, classes(), independent, epochs=9, lr=0.0, shuffle=False, freeze=Convergence(1))
    assert history.frozen_at == [2]
    assert len(history.epochs) == 2


def test_validation_does_not_change_convergence():
    pair, held_out = classes(), classes(n=9)
    options = {"epochs": 10, "batch_size": 8, "lr": [0.1, 0.01, 0.001], "freeze": Convergence(2, 0.05)}
    results = []
    for validation in ({}, {"validation": held_out, "keep": "last"}):
        ensemble = ensemble_of()
        results.append((ds.fit(ensemble, pair, adp, **options, **validation).frozen_at, weights(ensemble)))
    assert results[0][0] == results[1][0] != [None] * M
    assert_same(results[1][1], results[0][1])
    history = ds.fit(ensemble_of(), pair, adp, validation=held_out, watch="member", patience=1, **options)
    assert len(history.epochs) <= 10, "members may stop for either reason"


class Interrupted(Exception):
    pass


class Interrupting:
    """An objective that stops training with an error at a step, and is the same training whatever the step."""

    def __init__(self, steps):
        self.steps, self.calls = steps, 0

    def fingerprint_parts(self):
        return []

    def __call__(self, outputs, targets):
        self.calls += 1
        if self.calls > self.steps:
            raise Interrupted
        return adp(outputs, targets)


@pytest.mark.slow(fast=["10-norm_first", "2-two_dropouts"])
@pytest.mark.parametrize("name", ["two_dropouts", "norm_first"])
@pytest.mark.parametrize("steps", [2, 10, 13, 18, 20])
def test_a_resumed_training_freezes_at_the_same_epochs(name, steps, tmp_path):
    options = {"epochs": 9, "batch_size": 8, "lr": [0.05, 1e-7, 0.05], "validation": 0.2}
    rule = {"freeze": Convergence(3, 0.1)}

    def run(folder, steps=10**9, **changes):
        ensemble = ensemble_of(name, backend="loop")
        saving = {} if folder is None else {"checkpoint": folder, "checkpoint_seconds": 0.0}
        return ensemble, ds.fit(ensemble, classes(), Interrupting(steps), **{**options, **rule, **saving, **changes})

    expected, expected_history = run(None)
    assert sum(epoch is not None for epoch in expected_history.frozen_at) > 0
    with pytest.raises(Interrupted):
        run(tmp_path, steps)
    with pytest.raises(ds.StorageError, match="'freeze' differ"):
        run(tmp_path, resume=True, freeze=Convergence(3, 0.2))
    resumed, history = run(tmp_path, resume=True)
    assert history.frozen_at == expected_history.frozen_at
    assert history.column("loss") == expected_history.column("loss")
    assert all(torch.equal(tensor, weights(resumed)[key]) for key, tensor in weights(expected).items())
    _, history = run(tmp_path, 0, resume=True)
    assert history.frozen_at == expected_history.frozen_at, "a training that is done tells it again"


@pytest.mark.slow(cases=["two_dropouts-*"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "two_dropouts"])
def test_captured_steps_freeze_as_eager_ones_do(name, device, monkeypatch):
    captures, pools, results = [], [], []

    def new_pool():
        pools.append(torch.cuda.graph_pool_handle() if device == "cuda" else None)

        def capture_and_count(function, generators):
            captures.append(function)
            if device == "cuda":
                return captured(function, generators, pool=pools[-1])
            return recorded(function, generators, host_reads=True)  # `one_hot` checks its labels on a CPU

        return capture_and_count

    for steps in (lambda engine: None, lambda engine: capture.GraphSteps(new_pool)):
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
        results.append((weights(ensemble), history.column("loss"), history.frozen_at))
    assert sum(epoch is not None for epoch in results[0][2]) >= 2
    assert len(captures) == 4, "two shapes of batches, once with all members at work and once with some at rest"
    assert len(pools) == 2, "the second time in memory of their own"
    assert results[1][2] == results[0][2]
    assert results[1][1] == pytest.approx(results[0][1])
    assert_same(results[1][0], results[0][0], 1e-7)


def test_conflicting_settings_are_refused(unchecked):
    pair, rule = classes(), Convergence()
    with pytest.raises(ValueError, match="`freeze` must come without `active_members`"):
        ds.fit(ensemble_of(), pair, independent, epochs=1, freeze=rule, active_members=2)
    with pytest.raises(ValueError, match="`sequential` must come without `frozen`, `freeze` and"):
        ds.fit(ensemble_of(), pair, independent, epochs=1, freeze=rule, sequential=True)
    with pytest.raises(TypeError, match=r"`freeze` must be a dissensus.train.Convergence; got \[0\].*frozen="):
        ds.fit(ensemble_of(), pair, independent, epochs=1, freeze=[0])

    def without_member_loss(outputs, targets):
        return ds.LossParts(independent(outputs, targets).total, {})

    with pytest.raises(ValueError, match="`objective` must tell `member_loss`"):
        ds.fit(ensemble_of(), pair, without_member_loss, epochs=1, freeze=rule)

"""Members in groups: what does not fit into memory at once trains to the same weights, and is told beforehand."""

import gc
import logging
import random
import re
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from networks import NETWORKS
from recording import Captures, recorded
from torch import nn

import dissensus as ds
from dissensus.train import capture, memory
from dissensus.train.grid import Run
from dissensus.train.recipe import NewMembers, Recipe

M = 5
augmented = partial(ds.objectives.augmented, loss="mse", pool="score", beta=0.7)
independent = partial(ds.objectives.independent, loss="mse")


class Noisy(nn.Module):
    """Draws from torch's own generator, unlike anything keyed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        outputs = self.linear(x)
        return outputs * (torch.rand_like(outputs) > 0.3) / 0.7 if self.training else outputs


def data(shape=(6,), n=22):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 3, generator=generator, dtype=torch.float64)


def random_objective(outputs, targets):
    """Drops members at random: an objective that draws numbers of its own."""
    keep = torch.rand(len(outputs), 1, 1, dtype=outputs.dtype) < 0.7
    return augmented(outputs * keep, targets)


def fitted(build, shape, objective=augmented, **options):
    torch.manual_seed(11)
    ensemble = ds.Ensemble(build, M, backend=options.pop("backend", "loop")).double()
    history = ds.fit(ensemble, data(shape), objective, epochs=4, batch_size=8, lr=0.01, **options)
    return {name: t.detach().clone() for name, t in ensemble.body.tensors().items()}, history, torch.get_rng_state()


def assert_same(actual, expected):
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def at_once(monkeypatch):
    """Pretend that so many members fit."""
    return lambda count: monkeypatch.setattr(memory.Needs, "at_once", lambda self, budget: count)


@pytest.mark.slow(fast=["mlp-*", "*-2-coupled"])
@pytest.mark.parametrize("objective", [augmented, independent], ids=["coupled", "separable"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "two_dropouts", "plain_average_norm"])
def test_groups_train_to_the_same_weights(name, count, objective, at_once):
    build, shape = NETWORKS[name]
    expected, history, _ = fitted(build, shape, objective, frozen=[1], clip_norm=1.0)
    at_once(count)
    parts, grouped_history, _ = fitted(build, shape, objective, frozen=[1], clip_norm=1.0)
    assert_same(parts, expected)
    assert grouped_history.column("loss") == pytest.approx(history.column("loss"))
    assert grouped_history.memory.startswith(f"{count} of 5 members at once, about ")


@pytest.mark.parametrize("objective", [augmented, random_objective], ids=["plain", "random"])
def test_random_numbers_that_are_not_keyed_are_the_same_in_both_passes(objective, at_once):
    expected, _, after = fitted(Noisy, (6,), objective)
    at_once(2)
    parts, _, after_groups = fitted(Noisy, (6,), objective)
    assert_same(parts, expected)
    assert torch.equal(after, after_groups)


def test_members_of_different_architectures_go_in_groups(at_once):
    def run():
        torch.manual_seed(0)
        modules = [ds.nets.mlp(6, 3, (4 + i,), dropout=0.2).double() for i in range(4)]
        ensemble = ds.Ensemble.from_modules(modules)
        ds.fit(ensemble, data(), augmented, epochs=3, batch_size=8)
        return {name: t.detach().clone() for name, t in ensemble.body.tensors().items()}

    expected = run()
    at_once(3)
    assert_same(run(), expected)


def test_groups_are_captured_unless_members_draw_from_torchs_own_generator(monkeypatch, at_once, caplog):
    counts = Captures(partial(recorded, host_reads=True))  # states of generators are compared on the host
    build, shape = NETWORKS["two_dropouts"]
    expected, _, _ = fitted(build, shape)
    at_once(2)
    monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda engine: capture.GraphSteps(lambda: counts))
    parts, _, _ = fitted(build, shape)
    assert counts.captures == 2, "whole batches and the last"
    assert_same(parts, expected)
    with caplog.at_level(logging.WARNING, "dissensus"):
        fitted(Noisy, (6,))
    assert counts.captures == 2, "none was added"
    assert any("not captured" in r.getMessage() and "own generator" in r.getMessage() for r in caplog.records)


def test_a_failure_in_groups_names_step_part_and_members(at_once):
    at_once(2)
    x, y = data()
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M).double()
    with torch.no_grad():
        ensemble.body.trainable()["0.weight"][3] = 1e200
    with pytest.raises(ds.TrainingDiverged, match=r"step 0, in .*\(members 3\)"):
        ds.fit(ensemble, (x * 1e200, y), independent, epochs=1, batch_size=8)


def test_max_memory_splits_members_and_says_so(caplog):
    build, shape = NETWORKS["cnn_batch_norm"]
    expected, history, _ = fitted(build, shape)
    about = float(history.memory.split("about ")[1].split(" MiB")[0])
    assert history.memory.startswith("5 of 5")
    with caplog.at_level(logging.WARNING, "dissensus"):
        parts, grouped_history, _ = fitted(build, shape, max_memory=int(0.7 * about * 2**20))
    assert_same(parts, expected)
    count = int(grouped_history.memory.split(" of ")[0])
    assert 1 <= count < 5
    assert any("all at once would take" in record.getMessage() for record in caplog.records)
    with pytest.raises(
        ValueError, match=r"`max_memory` must hold one member at a time, about .* MiB; got 1,000 bytes. Allow"
    ):
        fitted(build, shape, max_memory=1000)
    with pytest.raises(ValueError, match="max_memory"):
        fitted(build, shape, max_memory=0)


def test_a_sweep_whose_single_run_does_not_fit_takes_its_members_in_groups():
    build, shape = NETWORKS["cnn_batch_norm"]
    options = {"grid": {"beta": [0.2, 0.7]}, "members": M, "epochs": 2, "batch_size": 8}
    objective = partial(ds.objectives.augmented, loss="mse", pool="score")
    expected = ds.sweep(build, data(shape), objective, **options)
    run = Run.single(members=M, batch_size=8, seed=0, optimizer={"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0})
    members = NewMembers(build, torch.device("cpu"))
    engine = Recipe(members, [run], data(shape), partial(objective, beta=0.2), epochs=2).engine()
    needs = engine.memory_needs(next(engine.feed.epoch(0)))
    grouped = ds.sweep(build, data(shape), objective, max_memory=needs.held + 2 * needs.per_member, **options)
    assert [len(group.runs) for group in grouped.groups] == [1, 1]
    assert grouped.history(0).memory.startswith("2 of 5 members at once")
    for i in range(2):
        in_groups, at_once = grouped.run(i).body.tensors(), expected.run(i).body.tensors()
        assert_same({n: t.detach() for n, t in in_groups.items()}, {n: t.detach() for n, t in at_once.items()})


def test_needs_grow_with_the_batch_and_leave_no_trace():
    build, shape = NETWORKS["two_dropouts"]
    sizes = []
    for batch in (4, 16):
        ensemble = ds.Ensemble(build, 2).double()
        before = {name: t.clone() for name, t in ensemble.body.tensors().items()}
        state = torch.get_rng_state()
        with pytest.MonkeyPatch.context() as patch:

            def stop(needs, *_, **__):
                sizes.append(needs)
                raise KeyboardInterrupt

            patch.setattr(memory, "plan_members", stop)
            with pytest.raises(KeyboardInterrupt):
                ds.fit(ensemble, data(shape), augmented, epochs=1, batch_size=batch)
        assert torch.equal(torch.get_rng_state(), state)
        for name, tensor in ensemble.body.tensors().items():
            if not name.endswith(("key", "step")):
                assert torch.equal(tensor, before[name]), name
    small, large = sizes
    assert small.held == large.held
    assert large.per_member == 4 * small.per_member


@pytest.mark.parametrize(
    "reason",
    [torch.OutOfMemoryError("CUDA out of memory. Tried ..."), RuntimeError("can't allocate memory: you tried")],
)
def test_out_of_memory_comes_with_advice(reason):
    calls = []

    def hungry(outputs, targets):
        calls.append(1)
        if len(calls) > 3:
            raise reason
        return augmented(outputs, targets)

    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M).double()
    with pytest.raises(ds.OutOfMemory, match=r"on cpu with 5 members.*max_memory=\d+ \(fewer members.*batch \(now 8\)"):
        ds.fit(ensemble, data(), hungry, epochs=4, batch_size=8)
    assert ensemble.predict(data()[0]).isfinite().all()


def test_other_errors_pass_through():
    def broken(outputs, targets):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        ds.fit(ds.Ensemble(NETWORKS["mlp"][0], M).double(), data(), broken, epochs=1)


def test_measuring_memory_leaves_nothing_in_memory():
    alive = []

    def forward():
        x = torch.randn(5, 5, requires_grad=True)
        result = torch.relu(x).exp()
        alive.append(weakref.ref(result))
        return result

    assert memory.saved_bytes(forward) > 0
    gc.collect()
    assert alive[0]() is None


class Stochastic(nn.Module):
    """Leaves a layer out at random, by a number that is drawn on the host."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(6, 6), nn.Linear(6, 3), draw

    def forward(self, x):
        return self.second(self.first(x) if self.training and self.draw() < 0.5 else x)


@pytest.mark.parametrize(
    "draw", [random.random, lambda: float(torch.rand(())), np.random.random], ids=["python", "torch", "numpy"]
)
def test_numbers_drawn_on_the_host_are_the_same_in_both_passes(draw, at_once, unchecked):
    def run():
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        return fitted(lambda: Stochastic(draw), (6,))[0]

    expected = run()
    at_once(2)
    assert_same(run(), expected)


def test_a_step_that_draws_from_torch_on_the_host_is_not_captured(monkeypatch, caplog):
    capture_with = partial(recorded, host_reads=True)  # the number is drawn on the host
    monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda e: capture.GraphSteps(lambda: capture_with))
    fitted(lambda: Stochastic(lambda: float(torch.rand(()))), (6,))
    assert any("on the host" in record.getMessage() for record in caplog.records)


def test_both_passes_run_in_one_backend(at_once):
    at_once(2)
    ensemble = ds.Ensemble(NETWORKS["two_dropouts"][0], M).double()
    ds.fit(ensemble, data(), augmented, epochs=2, batch_size=8)
    trained = [mode for mode in ensemble.body.choices if mode[1]]
    assert len(trained) == 1, "one choice for training, whether gradients are on or not"


def test_advice_can_be_followed():
    calls = []

    def hungry(outputs, targets):
        calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return augmented(outputs, targets)

    build, shape = NETWORKS["cnn_batch_norm"]
    with pytest.raises(ds.OutOfMemory) as caught:
        ds.fit(ds.Ensemble(build, M).double(), data(shape), hungry, epochs=4, batch_size=8)
    allowed = int(re.search(r"max_memory=(\d+)", str(caught.value)).group(1))
    _, history, _ = fitted(build, shape, max_memory=allowed)
    assert history.memory.startswith("2 of 5 members at once")

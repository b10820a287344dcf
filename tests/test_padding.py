"""Runs of several widths, depths and numbers of members in one computation: each equals its separate training."""

import functools

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.execution.padding import Unpaddable, frame_of, layers_of
from dissensus.execution.stacked import StackedMembers
from dissensus.randomness import Use, derived_seed
from dissensus.train import engine as engines
from dissensus.train import optim

X = torch.randn(44, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
Y = torch.randn(44, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
SETTINGS = {"epochs": 4, "batch_size": 16, "lr": 0.02}
augmented = functools.partial(ds.objectives.augmented, loss="squared_error", pool="score")


def perceptron(width=5, depth=1, activation=nn.ReLU, dropout=0.0):
    return ds.nets.mlp(4, 1, (width,) * depth, activation=activation, dropout=dropout)


def swept(build, grid, objective=augmented, data=(X, Y), **settings):
    return ds.sweep(build, data, objective, grid=grid, **{**SETTINGS, **settings})


def check_equal(padded, apart):
    assert padded.points == apart.points
    for number in range(len(apart)):
        own, expected = padded.run(number), apart.run(number)
        assert len(own) == len(expected)
        tensors, expected_tensors = own.body.tensors(), expected.body.tensors()
        assert list(tensors) == list(expected_tensors)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected_tensors[name], rtol=1e-9, atol=1e-11)
        entries, expected_entries = padded.history(number).epochs, apart.history(number).epochs
        assert len(entries) == len(expected_entries)
        for entry, expected_entry in zip(entries, expected_entries, strict=True):
            assert list(entry) == list(expected_entry)
            for name in entry.keys() - {"seconds"}:
                torch.testing.assert_close(
                    torch.tensor(entry[name]), torch.tensor(expected_entry[name]), rtol=1e-6, atol=1e-8
                )
        assert padded.history(number).best_epoch == apart.history(number).best_epoch
        assert padded.outcomes[number].status == apart.outcomes[number].status


@pytest.fixture
def computations(monkeypatch):
    """The numbers of runs that were trained together."""
    together: list[int] = []
    train = engines.Engine.train

    def counted(engine):
        together.append(engine.runs)
        train(engine)

    monkeypatch.setattr(engines.Engine, "train", counted)
    return together


OPTIMIZERS = {
    "adamw": {"weight_decay": 0.1, "clip_norm": 0.3},
    "adam": {"optimizer": "adam", "weight_decay": 0.1, "schedule": "cosine"},
    "sgd": {"optimizer": "sgd", "weight_decay": 0.1, "momentum": 0.9, "accumulate": 2},
    "lion": {"optimizer": "lion", "lr": 0.003, "weight_decay": 0.1, "ema": 0.8},
    "no decay of biases": {"weight_decay": 0.3, "no_decay": ["bias"]},
}


@pytest.mark.parametrize("backend", ["batched", "vmap"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_widths_depths_and_members_together_equal_separate_trainings(optimizer, backend, computations):
    grid = [
        {"width": 3, "depth": 1, "members": 1, "beta": 0.0, "seed": 1},
        {"width": 6, "depth": 3, "members": 2, "beta": 0.6, "seed": 1},
        {"width": 4, "depth": 2, "members": 3, "beta": 0.9, "seed": 2},
        {"width": 6, "depth": 3, "members": 3, "beta": 0.0, "seed": 2},
    ]
    settings = {**OPTIMIZERS[optimizer], "backend": backend, "validation": (X[:9], Y[:9])}
    padded = swept(perceptron, grid, padding=True, **settings)
    assert computations == [4]
    check_equal(padded, swept(perceptron, grid, padding=False, **settings))


def modules_in_a_loop(build, point, epochs, batch_size):
    """A run as one would write it: modules, torch's optimizers, and the equation of the objective."""
    ens = ds.Ensemble(functools.partial(build, width=point["width"]), point["members"], seed=point["seed"])
    modules = [ens.member(i).double().train() for i in range(point["members"])]
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=point["lr"], weight_decay=point["weight_decay"]) for m in modules
    ]
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derived_seed(point["seed"], Use.SHUFFLE, epoch))
        for rows in torch.randperm(len(X), generator=generator).split(batch_size):
            outputs = torch.stack([module(X[rows]) for module in modules])
            members = (outputs - Y[rows]).square().mean(1).sum()
            pooled = (outputs.mean(0) - Y[rows]).square().mean()
            ((1 - point["beta"]) * members + point["beta"] * len(modules) * pooled).backward()
            for module, optimizer in zip(modules, optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(module.parameters(), point["clip_norm"])
                optimizer.step()
                optimizer.zero_grad()
    return torch.stack([module.eval()(X) for module in modules])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("fused", [1, 2**14])
def test_runs_equal_modules_in_a_loop(fused, dropout, monkeypatch, computations):
    monkeypatch.setattr(optim, "FUSED_ROWS", fused)
    build = functools.partial(perceptron, depth=2, dropout=dropout)
    settings = {"lr": [0.02, 0.003], "clip_norm": [0.2, 5.0], "weight_decay": [0.0, 0.5]}
    grid = [
        {"width": width, "members": members, "seed": seed, "beta": beta} | {k: v[i % 2] for k, v in settings.items()}
        for i, (width, members, seed, beta) in enumerate([(1, 1, 0, 0.0), (2, 3, 1, 1.0), (7, 2, 0, 0.5), (3, 1, 2, 0)])
    ]
    swept_runs = swept(build, grid, padding=True)
    assert computations == [4]
    for number, point in enumerate(grid):
        expected = modules_in_a_loop(build, point, SETTINGS["epochs"], SETTINGS["batch_size"])
        torch.testing.assert_close(swept_runs.run(number).eval()(X), expected, rtol=1e-7, atol=1e-9)


def test_runs_that_stop_early_leave_the_others(computations):
    grid = {"width": [3, 6], "depth": [1, 2], "members": [2, 3], "beta": [0.0, 0.6]}
    settings = {
        "validation": 0.3,
        "patience": 2,
        "min_delta": 0.01,
        "epochs": 12,
        "track": {"members": lambda outputs, _: len(outputs)},
    }
    padded = swept(perceptron, grid, padding=True, **settings)
    assert computations == [16]
    ends = {len(padded.history(number).epochs) for number in range(len(padded))}
    assert len(ends) > 1
    assert padded.history(0).column("validation_members")[0] == 2
    check_equal(padded, swept(perceptron, grid, padding=False, **settings))


@pytest.mark.parametrize("backend", ["batched", "vmap", "loop"])
def test_dropout_is_that_of_the_own_width(backend):
    grid = {"width": [3, 6], "seed": [0, 1]}
    build = functools.partial(perceptron, depth=2, dropout=0.4)
    objective = functools.partial(augmented, beta=0.5)
    settings = {"backend": backend, "members": 2}
    padded = swept(build, grid, objective, padding=True, **settings)
    check_equal(padded, swept(build, grid, objective, padding=False, **settings))
    assert not torch.equal(padded.run(0)(X), padded.run(1)(X))


def test_classes_and_other_functions_that_keep_zeros(computations):
    labels = (Y[:, 0] > 0).long()

    def build(widths, activation):
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(4, widths[0], bias=False),
            activation(),
            nn.Linear(widths[0], widths[1]),
            nn.GELU(),
            nn.Linear(widths[1], 2),
        )

    grid = {"widths": [(3, 7), (6, 2)], "members": [1, 3]}
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    build = functools.partial(build, activation=nn.Tanh)
    settings = {"class_weights": "balanced", "label_smoothing": 0.1, "validation": (X, labels)}
    padded = swept(build, grid, objective, (X, labels), padding=True, **settings)
    assert computations == [4]
    check_equal(padded, swept(build, grid, objective, (X, labels), padding=False, **settings))


def test_a_run_that_diverges_does_not_touch_the_others():
    grid = [{"width": 3, "lr": 0.01}, {"width": 6, "lr": 1e300}, {"width": 5, "lr": 0.02}]
    objective = functools.partial(augmented, beta=0.5)
    padded = swept(perceptron, grid, objective, padding=True, members=2)
    apart = swept(perceptron, grid, objective, padding=False, members=2)
    assert [outcome.status for outcome in padded.outcomes] == ["done", "failed", "done"]
    assert padded.outcomes[1].history.steps == apart.outcomes[1].history.steps
    for number in (0, 2):
        torch.testing.assert_close(padded.run(number)(X), apart.run(number)(X), rtol=1e-9, atol=1e-11)


class Stops:
    """Breaks a training off after some epochs."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch(self, entry):
        if entry["epoch"] == self.epochs and entry["run"] == 0:
            raise KeyboardInterrupt


def test_an_interrupted_sweep_resumes(tmp_path, computations):
    grid = {"width": [3, 6], "depth": [1, 2], "members": [2, 3], "beta": [0.3]}
    settings = {"validation": 0.3, "weight_decay": 0.1, "patience": 3, "epochs": 6, "padding": True}
    whole = swept(perceptron, grid, **settings)
    with pytest.raises(KeyboardInterrupt):
        swept(perceptron, grid, checkpoint=tmp_path / "c", callbacks=[Stops(3)], **settings)
    resumed = swept(perceptron, grid, checkpoint=tmp_path / "c", resume=True, **settings)
    assert computations == [8, 8, 8]
    check_equal(resumed, whole)
    resumed.save(tmp_path / "s")
    loaded = ds.Sweep.load(tmp_path / "s", perceptron)
    for number in range(len(whole)):
        torch.testing.assert_close(loaded.run(number)(X), resumed.run(number)(X))


def test_little_memory_trains_padded_runs_in_parts(computations):
    grid = {"width": [3, 6], "members": [2, 3], "beta": [0.3]}
    padded = swept(perceptron, grid, padding=True, max_memory=30_000)
    assert len(computations) > 1
    check_equal(padded, swept(perceptron, grid, padding=False))


def test_padding_is_done_where_it_is_faster(computations):
    small = {"width": [3, 6], "depth": [1, 2], "beta": [0.3]}
    swept(perceptron, small, members=2, epochs=1)
    assert computations == [4]
    computations.clear()
    swept(perceptron, {"width": [2, 3000], "beta": [0.3], "seed": list(range(6))}, members=8, epochs=1)
    assert computations == [6, 6]
    computations.clear()
    swept(perceptron, small, members=2, epochs=1, backend="loop")
    assert computations == [1, 1, 1, 1]


class SeesAll:
    def on_runs(self, entries):
        self.seen = len(entries)


def test_callbacks_that_see_all_runs_see_those_of_one_shape_unless_asked():
    for padding, seen in (("auto", 1), (True, 2)):
        listener = SeesAll()
        swept(perceptron, {"width": [3, 6], "beta": [0.3]}, padding=padding, callbacks=[listener])
        assert listener.seen == seen


def with_norm(width=3):
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))


def with_own_parameter(width=3):
    return nn.Sequential(nn.Linear(4, width), nn.PReLU(), nn.Linear(width, 1))


REFUSED = {
    "layer norm": (with_norm, {"width": [3, 4]}, {}, "LayerNorm"),
    "own parameters": (with_own_parameter, {"width": [3, 4]}, {}, "PReLU"),
    "f(0) ≠ 0": (functools.partial(perceptron, activation=nn.Sigmoid), {"width": [3, 4]}, {}, r"f\(0\) ≠ 0"),
    "depth of tanh": (functools.partial(perceptron, activation=nn.Tanh), {"depth": [1, 2]}, {}, "followed by a ReLU"),
    "depth of dropout": (functools.partial(perceptron, dropout=0.1), {"depth": [1, 2]}, {}, "differ between|ReLU"),
    "no hidden layer": (perceptron, {"depth": [0, 2]}, {}, "followed by a ReLU"),
    "muon": (perceptron, {"width": [3, 4]}, {"optimizer": "muon"}, "muon"),
    "own optimizer": (perceptron, {"width": [3, 4]}, {"optimizer": torch.optim.Adam, "lr": None}, "depend on shapes"),
    "eps": (perceptron, {"width": [3, 4]}, {"eps": 0.0}, "eps=0"),
    "active members": (perceptron, {"width": [3, 4]}, {"active_members": 2}, "active_members"),
    "watched members": (perceptron, {"members": [2, 3]}, {"watch": "member", "validation": (X, Y)}, "watch"),
    "names": (perceptron, {"depth": [1, 2]}, {"no_decay": ["0.*"], "weight_decay": 0.1}, "patterns of names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_is_refused_and_auto_trains_it_apart(case, computations):
    build, grid, settings, reason = REFUSED[case]
    objective = functools.partial(ds.objectives.independent, loss="squared_error")
    settings = {**settings, "epochs": 1}
    with pytest.raises(ValueError, match=reason):
        swept(build, grid, objective, padding=True, **settings)
    assert computations == []
    swept(build, grid, objective, **settings)
    assert computations == [1, 1]


def test_numbers_of_members_are_refused_for_other_objectives():
    grid = {"members": [2, 3]}
    with pytest.raises(ValueError, match="`independent` and `augmented` alone"):
        swept(
            perceptron, grid, functools.partial(ds.objectives.joint, loss="squared_error", pool="score"), padding=True
        )
    weighted = functools.partial(augmented, beta=0.1, weights=[0.5, 0.5])
    with pytest.raises(ValueError, match="weights of members"):
        swept(perceptron, grid, weighted, padding=True)
    with pytest.raises(ValueError, match="True, False or 'auto'"):
        swept(perceptron, grid, padding=2)


def body(*layers):
    return StackedMembers.of([nn.Sequential(*layers)])


def test_networks_have_a_common_shape_only_where_they_differ_in_width_and_depth():
    relu = nn.ReLU()
    one = layers_of(body(nn.Linear(4, 3), relu, nn.Linear(3, 1)))
    frame = frame_of([one, layers_of(body(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1)))])
    assert frame.sizes == ((3, 4), (5, 3), (1, 5))
    for other in (
        body(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)),
        body(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        body(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)),
        body(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 1)),
        body(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)),
    ):
        with pytest.raises(Unpaddable):
            frame_of([one, layers_of(other)])
    frozen = nn.Linear(4, 3)
    frozen.weight.requires_grad_(False)
    for other in (body(frozen, nn.ReLU(), nn.Linear(3, 1)), body(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 1))):
        with pytest.raises(Unpaddable):
            layers_of(other)

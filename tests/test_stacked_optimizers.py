"""Optimisers by name, with weight decay for some parameters, equal separate trainings with parameter groups."""

from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds

independent = partial(ds.objectives.independent, loss="squared_error")
M, N, BATCH, EPOCHS = 3, 22, 8, 3
STEPS = EPOCHS * 3
DECAYS = [0.3, 0.0, 0.1]


def mlp():
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    ).double()


def cnn():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Tanh(), nn.Linear(4, 2)
    ).double()


class Words(nn.Module):
    """An embedding, and a head that shares its weights on request."""

    def __init__(self, tied):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(2, 5), nn.Linear(5, 7), nn.Linear(5, 2)
        self.back = nn.Linear(7, 5)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, x):
        return self.head(self.back(self.hidden(self.embedding((x > 0).long()).mean(1)).tanh()))


NETWORKS = {"mlp": mlp, "cnn": cnn, "embedding": partial(Words, False), "tied": partial(Words, True)}


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(N, 2, generator=generator, dtype=torch.float64)


class Lion(torch.optim.Optimizer):
    """Lion as Algorithm 2 of Chen et al. (2023) has it."""

    def __init__(self, params, lr, weight_decay=0.0, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = first * m + (1 - first) * p.grad
                p -= group["lr"] * (torch.sign(c) + group["weight_decay"] * p)
                m.copy_(second * m + (1 - second) * p.grad)


class Several:
    """Several optimizers that step together; no subclass of torch's."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return [group for each in self.optimizers for group in each.param_groups]

    def step(self):
        for each in self.optimizers:
            each.step()

    def state_dict(self):
        return {"each": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state):
        for each, part in zip(self.optimizers, state["each"], strict=True):
            each.load_state_dict(part)


def muon(groups, lr, **options):
    """Muon for matrices, AdamW for the rest; groups are made of (parameters, weight decay, whether they are tables)."""
    matrices, others = [], []
    for group in groups:
        parameters, decay = group["params"], group["weight_decay"]
        tables = group.get("tables", set())
        matrices.append({"params": [p for p in parameters if p.ndim == 2 and p not in tables], "weight_decay": decay})
        others.append({"params": [p for p in parameters if p.ndim != 2 or p in tables], "weight_decay": decay})
    return Several(
        torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw", **options), torch.optim.AdamW(others, lr=lr)
    )


NAMED = {
    "sgd": (partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True), {"momentum": 0.9, "nesterov": True}),
    "adam": (partial(torch.optim.Adam, lr=0.05), {}),
    "adamw": (partial(torch.optim.AdamW, lr=0.05, betas=(0.8, 0.95)), {"betas": (0.8, 0.95)}),
    "lion": (partial(Lion, lr=0.05), {}),
    "muon": (partial(muon, lr=0.05), {}),
}
if not hasattr(torch.optim, "Muon"):  # torch has it from 2.9 on
    del NAMED["muon"]


@pytest.fixture
def exact_muon(monkeypatch):
    """Newton-Schulz iterations in the precision of the weights, in torch's Muon and in ours.

    In bfloat16 a product of a stack of matrices is rounded in another order now and then, by 0.4 %.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


def by_hand(network, make, *, clip=None, factor=None, steps=range(STEPS)):
    """An ordinary training of one network, in the order of the data; it takes part in some steps."""
    x, y = data()
    optimizer = make(network)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = [*zip(x.split(BATCH), y.split(BATCH), strict=True)] * EPOCHS
    for step in steps:
        part, target = batches[step]
        for parameter in network.parameters():
            parameter.grad = None
        (network(part) - target).square().sum(-1).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 if factor is None else factor(step))
        optimizer.step()
    return network


def grouped(network, make, decay, spared=lambda name: False):
    """An optimizer with two parameter groups, of which one does not decay."""
    tables = {m.weight for m in network.modules() if isinstance(m, nn.Embedding)}
    named = dict(network.named_parameters()).items()
    groups = [
        {"params": [p for name, p in named if spared(name)], "weight_decay": 0.0},
        {"params": [p for name, p in named if not spared(name)], "weight_decay": decay},
    ]
    own = {"tables": tables} if make.func is muon else {}
    return make([{**group, **own} for group in groups])


def fitted(ensemble, **options):
    # Backends by rule: trainings that are compared to the bit must not differ by what a clock says.
    defaults = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "deterministic": True}
    return ds.fit(ensemble, data(), independent, **{**defaults, **options})


def assert_members_equal(ensemble, expected, rtol=1e-9, atol=1e-11):
    for i, network in enumerate(expected):
        torch.testing.assert_close(
            dict(ensemble.member(i).named_parameters()), dict(network.named_parameters()), rtol=rtol, atol=atol
        )


@pytest.mark.usefixtures("exact_muon")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", NAMED)
def test_named_optimizers_equal_separate_trainings(name, network):
    """With a schedule, clipping and a weight decay per member."""
    make, options = NAMED[name]
    ensemble = ds.Ensemble(NETWORKS[network], M, seed=2)
    expected = [
        by_hand(ensemble.member(i), partial(grouped, make=make, decay=DECAYS[i]), clip=0.5, factor=lambda s: 1 - s / 20)
        for i in range(M)
    ]
    history = fitted(
        ensemble,
        optimizer=name,
        lr=0.05,
        weight_decay=DECAYS,
        clip_norm=0.5,
        schedule=lambda epoch, epochs: 1 - epoch * 3 / 20,
        **options,
    )
    assert_members_equal(ensemble, expected)
    assert history.optimizer == f"{name}, all members at once"


@pytest.mark.usefixtures("exact_muon")
@pytest.mark.parametrize("name", NAMED)
def test_biases_and_norms_need_not_decay(name):
    make, options = NAMED[name]

    def spared(key):
        return key.endswith("bias") or key.startswith("1.")

    for no_decay in (["bias", "norm"], True, ["*.bias", "1.*"]):
        ensemble = ds.Ensemble(mlp, M, seed=2)
        expected = [
            by_hand(ensemble.member(i), partial(grouped, make=make, decay=DECAYS[i], spared=spared)) for i in range(M)
        ]
        fitted(ensemble, optimizer=name, lr=0.05, weight_decay=DECAYS, no_decay=no_decay, **options)
        assert_members_equal(ensemble, expected)


@pytest.mark.skipif("muon" not in NAMED, reason="torch has it from 2.9 on")
def test_muon_follows_torchs_in_bfloat16():
    ensemble = ds.Ensemble(mlp, M, seed=2)
    make, _ = NAMED["muon"]
    expected = [by_hand(ensemble.member(i), partial(grouped, make=make, decay=0.1)) for i in range(M)]
    fitted(ensemble, optimizer="muon", lr=0.05, weight_decay=0.1)
    assert_members_equal(ensemble, expected, rtol=0, atol=0.01)


def test_words_for_kinds_may_match_nothing_and_patterns_must():
    plain = ds.Ensemble(cnn, 2)
    expected = ds.Ensemble(cnn, 2)
    fitted(plain, weight_decay=0.3, no_decay=["bias", "norm"])
    fitted(expected, weight_decay=0.3, no_decay=["*.bias"])
    assert_members_equal(plain, [expected.member(i) for i in range(2)], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"`no_decay` must match parameters to be trained; got 'head\.\*'"):
        fitted(plain, weight_decay=0.3, no_decay=["bias", "head.*"])


@pytest.mark.usefixtures("exact_muon")
@pytest.mark.parametrize("name", NAMED)
def test_runs_of_a_sweep_decay_by_their_own_numbers(name):
    _, options = NAMED[name]
    options = {**options, "optimizer": name, "epochs": 6, "batch_size": BATCH, "lr": 0.05, "no_decay": ["bias", "norm"]}
    options |= {"validation": 0.25, "patience": 1, "schedule": "cosine"}
    grid = {"weight_decay": [0.0, 0.5], "seed": [0, 1], "clip_norm": [0.3]}
    swept = ds.sweep(mlp, data(), independent, members=2, grid=grid, **options)
    for i, point in enumerate(swept.points):
        alone = ds.Ensemble(mlp, 2, seed=point["seed"])
        no_decay = bool(point["weight_decay"])  # refused without any decay
        history = ds.fit(alone, data(), independent, **{**options, **point, "no_decay": no_decay})
        assert swept.history(i).best_epoch == history.best_epoch
        assert_members_equal(swept.run(i), [alone.member(m) for m in range(2)])


@pytest.mark.usefixtures("exact_muon")
@pytest.mark.parametrize("name", ["lion", "muon"])
def test_members_that_rest_or_are_not_drawn_are_left_alone(name):
    if name not in NAMED:
        pytest.skip("torch has it from 2.9 on")
    make, _ = NAMED[name]
    ensemble = ds.Ensemble(mlp, M)
    frozen, expected = ensemble.member(1), by_hand(ensemble.member(2), partial(grouped, make=make, decay=0.1))
    fitted(ensemble, optimizer=name, lr=0.05, weight_decay=0.1, frozen=[1])
    assert_members_equal(ensemble.subset([1]), [frozen], rtol=0, atol=0)
    assert_members_equal(ensemble.subset([2]), [expected])

    def own(params):
        return make([{"params": params, "weight_decay": 0.1}])

    stacked, drawn = ds.Ensemble(mlp, 4), ds.Ensemble(mlp, 4)
    fitted(stacked, optimizer=name, lr=0.05, weight_decay=0.1, active_members=2)
    fitted(drawn, optimizer=own, active_members=2)
    assert_members_equal(drawn, [stacked.member(i) for i in range(4)])


def by_name_and_by_callable(**options):
    """One ensemble with Adam by name, and one with torch's Adam for each member."""
    results = []
    for optimizer in ({"optimizer": "adam", "lr": 0.02}, {"optimizer": partial(torch.optim.Adam, lr=0.02)}):
        ensemble = ds.Ensemble(mlp, M)
        results.append((ensemble, ds.fit(ensemble, **{"epochs": 5, "batch_size": BATCH, **options, **optimizer})))
    return results


augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score", beta=0.8)
WAYS = {
    "member by member": {"validation": 0.3, "watch": "member", "patience": 1, "epochs": 12, "schedule": "cosine"},
    "converging": {"freeze": ds.train.Convergence(patience=1, tolerance=0.2), "epochs": 8},
    "twin": {"twin": True, "objective": augmented, "clip_norm": 0.5},
    "groups": {"max_memory": 18_000, "objective": augmented},
    "averaged": {"ema": 0.8, "accumulate": 2, "validation": 0.3},
    "bagging": {"bootstrap": True, "accumulate": 2, "drop_last": True},
    "deterministic": {"deterministic": True, "ema": 0.5},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_callable_equals_the_name_in_every_way_of_training(way):
    (named, history), (own, other) = by_name_and_by_callable(**{"data": data(), "objective": independent, **WAYS[way]})
    assert_members_equal(own, [named.member(i) for i in range(M)])
    assert history.best_epoch == other.best_epoch
    assert history.frozen_at == other.frozen_at
    assert history.column("lr") == pytest.approx(other.column("lr"))
    if way == "member by member":
        assert len(history.epochs) < 12
    if way == "converging":
        assert any(history.frozen_at)
    if way == "groups":
        assert "of 3 members at once" in history.memory
        assert history.memory[0] < "3"
    if way == "twin":
        assert_members_equal(own.twin, [named.twin.member(i) for i in range(M)])


def test_a_callable_equals_the_name_in_sequential_training():
    x, _ = data()
    labels = (x[:, 0] > 0).long()
    objective = partial(ds.objectives.a2d, strength=0.5, classes="earlier")
    (named, _), (own, _) = by_name_and_by_callable(
        data=(x, labels), objective=objective, unlabelled=x.flip(0), sequential=True, ema=0.7, accumulate=2
    )
    assert_members_equal(own, [named.member(i) for i in range(M)])


def test_defaults_are_those_that_the_documentation_names():
    def rates(name, **options):
        return fitted(ds.Ensemble(mlp, M), optimizer=name, **options).column("lr")[0]

    assert [rates(name) for name in NAMED if name != "lion"] == [1e-3] * (len(NAMED) - 1)
    assert rates("lion") == 1e-4
    plain, decayed = ds.Ensemble(mlp, M), ds.Ensemble(mlp, M)
    fitted(plain)
    fitted(decayed, weight_decay=0.0)
    assert_members_equal(plain, [decayed.member(i) for i in range(M)], rtol=0, atol=0)

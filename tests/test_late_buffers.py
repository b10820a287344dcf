"""Buffers that a network's first pass makes: every member has its own, as in separate training."""

import copy
import logging
import pickle
from functools import partial

import pytest
import torch
from test_members import BACKENDS, STEPS, M, data_for, trained_alone, trained_stacked
from torch import nn

import dissensus as ds
from dissensus import storage
from dissensus.train import memory

squared = partial(ds.objectives.independent, loss="squared_error")


class Statistic(nn.Module):
    """Centres by a running mean that begins with the first batch; the mean is None until then."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("mean", None)

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.first(x)))
        if self.mean is None:
            self.mean = hidden.detach().mean(0)
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.second(hidden - self.mean)


class Written(Statistic):
    """Writes into the running mean, instead of assigning a new one."""

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.first(x)))
        if self.mean is None:
            self.mean = torch.zeros_like(hidden[0])
        if self.training:
            self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.second(hidden - self.mean)


class Registered(nn.Module):
    """Registers buffers in its first pass: weights at its start, and positions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(8, dtype=x.dtype), persistent=False)
            self.register_buffer("start", self.head.weight.detach().clone())
        hidden = self.inner(x) + 0.01 * self.positions
        return self.head(hidden) - hidden @ self.start.T


NETWORKS = {"statistic": Statistic, "written": Written, "registered": Registered}
LATE = {"statistic": ["mean"], "written": ["mean"], "registered": ["positions", "start"]}


def tensors_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same(ensemble, modules, **tolerance):
    for i, module in enumerate(modules):
        stacked, alone = tensors_of(ensemble.member(i)), tensors_of(module)
        assert {name for name in stacked if not name.startswith("_dissensus")} == set(alone)
        for name, tensor in alone.items():
            torch.testing.assert_close(stacked[name], tensor, rtol=1e-9, atol=1e-11, **tolerance)


@pytest.mark.parametrize("per_member", [False, True], ids=["shared", "per_member"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_members_train_as_separate_modules_do(name, backend, per_member):
    ensemble = ds.Ensemble(NETWORKS[name], M, seed=3, backend=backend).double()
    modules = [ensemble.member(i) for i in range(M)]
    x, y = data_for((6,), per_member=per_member)
    trained_alone(modules, x, y, per_member)
    trained_stacked(ensemble, x, y, per_member)
    assert_same(ensemble, modules)
    assert set(LATE[name]) <= set(ensemble.body.state())
    assert len(x) == STEPS
    outputs = ensemble.eval()(x[0], per_member=per_member)
    expected = [m.eval()(x[0][i] if per_member else x[0]) for i, m in enumerate(modules)]
    torch.testing.assert_close(outputs, torch.stack(expected), rtol=1e-9, atol=1e-11)


def data(n=40):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 3, generator=generator, dtype=torch.float64)


OPTIONS = {"epochs": 10, "batch_size": 20, "shuffle": False, "optimizer": "sgd", "lr": 0.02}


def fresh(name="statistic", backend="loop"):
    return ds.Ensemble(NETWORKS[name], M, seed=3, backend=backend).double()


def alone(modules, epochs=10):
    x, y = data()
    batches = list(zip(x.split(20), y.split(20), strict=True)) * epochs
    for module in modules:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
        for inputs, targets in batches:
            optimizer.zero_grad()
            (module(inputs) - targets).square().sum(-1).mean().backward()
            optimizer.step()
    return modules


@pytest.mark.parametrize("backend", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("name", NETWORKS)
def test_fit_trains_them_as_separate_modules(name, backend):
    ensemble = fresh(name, backend)
    modules = [ensemble.member(i) for i in range(M)]
    ds.fit(ensemble, data(), squared, **OPTIONS)
    assert_same(ensemble, alone(modules))


@pytest.mark.parametrize("option", [{"recompute": True}, {"max_memory": 2**30}, {"deterministic": True}])
@pytest.mark.parametrize("name", NETWORKS)
def test_settings_of_fit_change_nothing(name, option):
    ensemble = fresh(name)
    modules = [ensemble.member(i) for i in range(M)]
    ds.fit(ensemble, data(), squared, **OPTIONS, **option)
    assert_same(ensemble, alone(modules))


@pytest.mark.parametrize(
    "objective", [squared, partial(ds.objectives.augmented, loss="squared_error", pool="score", beta=0.5)]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_members_in_groups_train_as_all_at_once(name, objective, monkeypatch):
    reference, ensemble = fresh(name), fresh(name)
    ds.fit(reference, data(), objective, **OPTIONS)
    monkeypatch.setattr(memory.Needs, "at_once", lambda self, budget: 2)
    history = ds.fit(ensemble, data(), objective, **OPTIONS)
    assert history.memory.startswith("2 of 3")
    assert_same(ensemble, [reference.member(i) for i in range(M)])


def test_the_first_pass_runs_in_a_loop_and_later_ones_as_asked(caplog):
    ensemble = fresh("written", "vmap")
    with caplog.at_level(logging.WARNING, "dissensus"):
        ensemble(data()[0])
        assert ensemble.choices[0].backend == "loop"
        assert "buffer 'mean' appears in the network's first pass" in ensemble.choices[0].refused["vmap"]
        ensemble(data()[0])
    assert [choice.backend for choice in ensemble.choices] == ["vmap"]
    assert not caplog.records


@pytest.mark.parametrize("name", NETWORKS)
def test_trial_passes_leave_no_trace(name):
    """A pass that measures backends or memory makes no buffer that the first step would find."""
    ensemble = fresh(name, "auto")
    twin = fresh(name, "loop")
    x, _ = data()
    torch.testing.assert_close(ensemble(x), twin(x))
    for (key, tensor), other in zip(ensemble.body.tensors().items(), twin.body.tensors().values(), strict=True):
        torch.testing.assert_close(tensor, other, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_before_training_make_them_too(name):
    ensemble = fresh(name)
    modules = [ensemble.member(i).eval() for i in range(M)]
    x, _ = data()
    with torch.no_grad():
        expected = torch.stack([torch.cat([module(part) for part in x.split(16)]) for module in modules])
    torch.testing.assert_close(ensemble.predict(x, batch_size=16), expected)
    assert_same(ensemble, modules)


@pytest.mark.parametrize("name", NETWORKS)
def test_copies_have_what_the_ensemble_has(name, tmp_path):
    ensemble = fresh(name)
    untouched = copy.deepcopy(ensemble)
    assert not set(LATE[name]) & set(untouched.body.state())
    ds.fit(ensemble, data(), squared, **OPTIONS)
    x, _ = data()
    outputs = ensemble.predict(x)
    ensemble.save(tmp_path / "whole")
    ensemble.subset([2, 0]).save(tmp_path / "part")
    copies = {
        "deepcopy": copy.deepcopy(ensemble),
        "pickle": pickle.loads(pickle.dumps(ensemble)),
        "loaded": ds.Ensemble.load(tmp_path / "whole", lambda: NETWORKS[name]().double()),
    }
    for kind, other in copies.items():
        assert torch.allclose(other.predict(x), outputs), kind
    for part in (ensemble.subset([2, 0]), ds.Ensemble.load(tmp_path / "part", lambda: NETWORKS[name]().double())):
        assert torch.allclose(part.predict(x), outputs[[2, 0]])
    soup = ensemble.soup()
    for key in LATE[name]:
        expected = torch.stack([tensors_of(ensemble.member(i))[key] for i in range(M)]).mean(0)
        torch.testing.assert_close(tensors_of(soup)[key], expected)
    more = copies["loaded"]
    for each in (ensemble, more):
        ds.fit(each, data(), squared, **OPTIONS)
    assert_same(more, [ensemble.member(i) for i in range(M)])


class Interrupted(Exception):
    pass


class Interrupting:
    """An objective that stops training at a step, and is the same training whatever the step."""

    def __init__(self, steps):
        self.steps, self.calls = steps, 0

    def fingerprint_parts(self):
        return []

    def __call__(self, outputs, targets):
        self.calls += 1
        if self.calls > self.steps:
            raise Interrupted
        return squared(outputs, targets)


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("name", NETWORKS)
def test_an_interrupted_training_resumes_exactly(name, steps, tmp_path):
    options = {**OPTIONS, "validation": 0.25, "ema": 0.9}
    expected = fresh(name)
    ds.fit(expected, data(), Interrupting(10**9), **options)
    saving = {"checkpoint": tmp_path, "checkpoint_seconds": 0.0, **options}
    with pytest.raises(Interrupted):
        ds.fit(fresh(name), data(), Interrupting(steps), **saving)
    resumed = fresh(name)
    ds.fit(resumed, data(), Interrupting(10**9), resume=True, **saving)
    for (key, tensor), other in zip(expected.body.tensors().items(), resumed.body.tensors().values(), strict=True):
        assert torch.equal(tensor, other), key


def test_averaged_statistics_are_those_of_the_weights(tmp_path):
    ensemble = fresh()
    ds.fit(ensemble, data(), squared, **{**OPTIONS, "ema": 0.5})
    (module, *_) = modules = [fresh().member(0)]
    average = {}
    x, y = data()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    for inputs, targets in list(zip(x.split(20), y.split(20), strict=True)) * 10:
        optimizer.zero_grad()
        (module(inputs) - targets).square().sum(-1).mean().backward()
        optimizer.step()
        now = {name: t.detach().clone() for name, t in tensors_of(module).items() if t.is_floating_point()}
        average = {name: t if not average else 0.5 * average[name] + 0.5 * t for name, t in now.items()}
    assert len(modules) == 1
    for name, tensor in average.items():
        torch.testing.assert_close(tensors_of(ensemble.member(0))[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sweep_trains_every_run_as_a_fit_does(name):
    shared = {"epochs": 4, "batch_size": 20, "optimizer": "sgd", "validation": 0.25, "patience": 2}
    grid = {"lr": [0.01, 0.05], "seed": [0, 1]}
    result = ds.sweep(NETWORKS[name], data(), squared, members=M, grid=grid, backend="loop", **shared)
    for run, point in enumerate(result.points):
        ensemble = ds.Ensemble(NETWORKS[name], M, point["seed"], "loop").double()
        ds.fit(ensemble, data(), squared, lr=point["lr"], seed=point["seed"], **shared)
        swept = result.run(run).body.tensors()
        assert swept.keys() == ensemble.body.tensors().keys()
        for key, tensor in ensemble.body.tensors().items():
            torch.testing.assert_close(swept[key], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")


def test_frozen_members_rest():
    ensemble = fresh()
    modules = [ensemble.member(i) for i in range(M)]
    ds.fit(ensemble, data(), squared, frozen=[1], **OPTIONS)
    alone([modules[0], modules[2]])
    for i in (0, 2):
        torch.testing.assert_close(ensemble.member(i).mean, modules[i].mean, rtol=1e-9, atol=1e-11)
    assert torch.equal(ensemble.member(1).first.weight, modules[1].first.weight)


@pytest.mark.parametrize("recompute", [False, True])
def test_members_of_different_architectures_make_their_own(recompute, tmp_path):
    modules = [Statistic().double(), nn.Sequential(Statistic(), nn.Linear(3, 3)).double(), Registered().double()]
    ensemble = ds.Ensemble.from_modules(modules)
    ds.fit(ensemble, data(), squared, recompute=recompute, **OPTIONS)
    assert_same(ensemble, alone(modules))
    ensemble.save(tmp_path)
    builds = [Statistic, lambda: nn.Sequential(Statistic(), nn.Linear(3, 3)), Registered]
    loaded = ds.Ensemble.load(tmp_path, [lambda b=b: b().double() for b in builds])
    assert torch.allclose(loaded.predict(data()[0]), ensemble.predict(data()[0]))
    assert torch.allclose(ensemble.subset([2]).predict(data()[0])[0], ensemble.predict(data()[0])[2])


def test_a_network_that_never_fills_a_buffer_runs_in_every_backend():
    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))

    ensemble = ds.Ensemble(build, M, backend="vmap")
    ensemble(torch.randn(5, 6))
    assert ensemble.choices[0].backend == "vmap"


class Growing(nn.Module):
    """A cache of positions that grows with its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 3)
        self.register_buffer("cache", None)

    def forward(self, x):
        if self.cache is None or len(self.cache) < x.shape[1]:
            self.cache = torch.arange(x.shape[1], dtype=x.dtype)
        return self.layer((x * self.cache[: x.shape[1]]).sum(1, keepdim=True))


class Sometimes(nn.Module):
    """Makes its buffer where its weights say so: in some members and not in others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.layer.bias.detach()[0] > 0:
            self.scale = x.detach().mean()
        return self.layer(x)


def test_what_cannot_be_kept_is_refused_by_name(unchecked):
    growing = ds.Ensemble(Growing, M, backend="loop")
    growing(torch.randn(5, 4))
    growing(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"buffer 'cache' changes its shape in a pass, from \[4\] to \[7\].*`build`"):
        growing(torch.randn(5, 7))
    with pytest.raises(ValueError, match="buffer scale.*appear in the same pass in all members; got 2 of 4"):
        ds.Ensemble(Sometimes, 4, seed=next(s for s in range(20) if _positive(s) == 2), backend="loop")(
            torch.randn(5, 6)
        )
    ensemble = fresh()
    with pytest.raises(ValueError, match="buffer mean.*in all members.*Leave `active_members` out"):
        ds.fit(ensemble, data(), squared, active_members=2, **OPTIONS)
    x, y = data()
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    with pytest.raises(ValueError, match="buffer mean.*one after the other.*Run the network once inside `build`"):
        ds.fit(fresh(), (x, y.argmax(-1)), objective, sequential=True, **OPTIONS)


def _positive(seed):
    ensemble = ds.Ensemble(Sometimes, 4, seed=seed)
    return int((ensemble.body.network.layer.bias[:, 0] > 0).sum())


def test_a_wrong_architecture_is_still_refused_on_loading(tmp_path):
    ensemble = fresh("registered")
    ensemble.save(tmp_path)
    with pytest.raises(storage.StorageError):
        ds.Ensemble.load(tmp_path, lambda: nn.Sequential(nn.Linear(6, 3)).double())


@pytest.mark.parametrize(
    "make", [lambda build: ds.Ensemble(build, 2), lambda build: ds.Ensemble.from_modules([build(), build()])]
)
def test_lazy_layers_are_refused_with_the_fix(make, unchecked):
    with pytest.raises(ValueError, match=r"initialised.*; got a lazy one \(0: LazyLinear\).*[rR]un (it|each) once"):
        make(lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)))

    def build():
        network = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))
        network(torch.zeros(2, 6))
        return network

    ensemble = make(build)
    assert ensemble(torch.randn(5, 6)).shape == (2, 5, 3)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
@pytest.mark.parametrize("name", ["statistic", "registered"])
def test_a_compiled_ensemble_makes_them_too(name):
    ensemble, reference = fresh(name, "auto"), fresh(name)
    compiled = torch.compile(ensemble, backend="eager")
    x, _ = data()
    for scale in (1.0, 2.0, 3.0):
        torch.testing.assert_close(compiled(scale * x), reference(scale * x))
    for key in LATE[name]:
        torch.testing.assert_close(ensemble.body.state()[key], reference.body.state()[key])

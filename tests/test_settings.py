"""How members run is nobody's surprise: compiled or not, twice the same, and settings as they were after every call."""

import copy
import functools
import json
import shutil
import threading

import pytest
import torch
from networks import NETWORKS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dissensus as ds
from dissensus.execution import choice, recomputation

cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")


def data(shape=(6,), examples=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, *shape, generator=generator, dtype=dtype)
    return x, torch.randint(3, (examples,), generator=generator)


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


COMPILED = ["mlp", "two_dropouts", "channel_dropout", "cnn_batch_norm"]


@pytest.mark.slow(fast=["two_dropouts-auto", "cnn_batch_norm-vmap"])
@pytest.mark.parametrize("backend", ["loop", "streams", "vmap", "batched", "stacked", "auto"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_compiled_members_have_the_values_and_gradients_of_eager_ones(name, backend, unchecked):
    build, shape = NETWORKS[name]
    x = data(shape, 8, torch.float64)[0]
    eager, compiled = (ds.Ensemble(build, 3, seed=1, backend=backend).double() for _ in range(2))
    with torch.no_grad():  # both have chosen a backend, and drop other units by now
        assert torch.equal(eager(x), compiled(x)) or backend == "auto"
    compiled.body.choices = eager.body.choices
    torch._dynamo.reset()
    run = torch.compile(compiled, backend="aot_eager")
    for _ in range(3):  # counters of dropout go on
        eager.zero_grad(), compiled.zero_grad()
        expected, outputs = eager(x), run(x)
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        expected.square().sum().backward()
        outputs.square().sum().backward()
        torch.testing.assert_close(gradients(compiled), gradients(eager), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_inductor_drops_the_units_that_eager_dropout_drops(unchecked):
    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    x, y = data()
    ensemble = ds.Ensemble(build, 3)
    ds.fit(ensemble, (x, y), cross_entropy, epochs=1)
    ensemble(x)
    eager = copy.deepcopy(ensemble)
    torch._dynamo.reset()
    outputs, expected = torch.compile(ensemble)(x), eager(x)
    torch.testing.assert_close(outputs, expected)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(gradients(ensemble), gradients(eager))


@pytest.mark.filterwarnings("ignore")
def test_an_ensemble_that_has_chosen_nothing_can_be_compiled(unchecked):
    x = data()[0]
    ensemble = ds.Ensemble(NETWORKS["two_dropouts"][0], 3, seed=2)
    expected = ds.Ensemble(NETWORKS["two_dropouts"][0], 3, seed=2, backend="loop")(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(ensemble, backend="aot_eager")(x), expected)


@pytest.fixture
def another_clock(monkeypatch):
    """Make any backend the fastest by a clock that says so."""

    def fastest(name):
        def measured(ensemble, candidates, refused, replayed, rounds):
            return {backend: 1.0 if backend == name else 2.0 for backend in candidates}

        monkeypatch.setattr(choice, "_measured", measured)

    return fastest


@pytest.mark.slow(fast=["mlp"])
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "norm_first"])
def test_a_deterministic_training_is_not_decided_by_a_clock(name, another_clock, unchecked):
    build, shape = NETWORKS[name]
    trained = {}
    for fastest in ("loop", "vmap", "batched"):
        another_clock(fastest)
        for deterministic in (True, False):
            ensemble = ds.Ensemble(build, 3)
            history = ds.fit(
                ensemble, data(shape), cross_entropy, epochs=2, validation=data(shape), deterministic=deterministic
            )
            trained[fastest, deterministic] = history.backend, [p.detach().clone() for p in ensemble.parameters()]
            swept = ds.sweep(
                build,
                data(shape),
                cross_entropy,
                grid={"lr": [1e-3, 1e-2]},
                members=3,
                epochs=2,
                deterministic=deterministic,
            )
            trained[fastest, deterministic] += (swept.history(0).backend, swept.outputs(data(shape)[0]))
    backends = {trained[fastest, True][0] for fastest in ("loop", "vmap", "batched")}
    assert backends == {"batched" if name == "mlp" else "loop"}
    first = trained["loop", True]
    for fastest in ("vmap", "batched"):
        other = trained[fastest, True]
        assert all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))
        assert first[2] == other[2]
        assert torch.equal(first[3], other[3])
    assert {trained[fastest, False][0] for fastest in ("loop", "vmap")} == {"loop", "vmap"}


class Interrupted(Exception):
    pass


def test_a_resumed_training_runs_in_the_backend_it_had(tmp_path, another_clock, unchecked):
    def stops(moment):
        if moment.step >= 2:
            raise Interrupted

    build, shape = NETWORKS["mlp"]
    options = {"epochs": 2, "batch_size": 8, "validation": data(shape), "checkpoint": tmp_path, "resume": True}
    another_clock("vmap")
    with pytest.raises(Interrupted):
        ds.fit(ds.Ensemble(build, 3), data(shape), cross_entropy, progress=stops, **options)
    another_clock("batched")
    resumed = ds.Ensemble(build, 3)
    assert ds.fit(resumed, data(shape), cross_entropy, **options).backend == "vmap"
    assert resumed.body.choices.file is None
    another_clock("vmap")
    uninterrupted = ds.Ensemble(build, 3)
    ds.fit(uninterrupted, data(shape), cross_entropy, **{**options, "checkpoint": tmp_path / "other"})
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), uninterrupted.parameters(), strict=True))


def test_a_sweep_measures_once_and_keeps_its_choice(tmp_path, another_clock, monkeypatch, unchecked):
    monkeypatch.setattr("dissensus.train.memory.runs_at_once", lambda *_: 1)
    build, shape = NETWORKS["mlp"]
    options = {
        "grid": {"lr": [1e-3, 1e-2, 1e-1], "batch_size": [8, 12]},
        "members": 3,
        "epochs": 1,
        "checkpoint": tmp_path,
        "resume": True,
    }
    another_clock("vmap")
    stopped = []

    def stops(moment):
        stopped.append(moment.step)
        if len(stopped) == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        ds.sweep(build, data(shape), cross_entropy, progress=stops, **options)
    another_clock("batched")
    swept = ds.sweep(build, data(shape), cross_entropy, **options)
    assert len(swept.groups) > 2, "the sweep was to be cut into parts"
    chosen = {run: swept.history(run).backend for run in range(len(swept))}
    first = [run for run in chosen if swept.points[run]["batch_size"] == 8]
    assert {chosen[run] for run in first} == {"vmap"}
    assert {chosen[run] for run in chosen if run not in first} == {"batched"}, "another shape is measured by itself"
    outputs = [swept.run(run) for run in first]
    with torch.no_grad():
        for ensemble in outputs:
            ensemble(data(shape)[0])
    assert len({id(ensemble.body.choices) for ensemble in outputs}) == 1
    stored = json.loads((tmp_path / "choices-0000.json").read_text())["choices"]
    assert sum(mode[1] is False for mode, _ in stored) == 1, "evaluation was measured once for all runs"


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        assert isinstance(hidden, Tensor)
        return self.head(hidden.relu())


@pytest.mark.parametrize("backend", ["auto", "loop", "streams", "vmap", "batched", "stacked"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing_inside_members_is_refused(reentrant, backend, unchecked):
    ensemble = ds.Ensemble(lambda: Recomputing(reentrant), 3, backend=backend)
    before = copy.deepcopy(ensemble.state_dict())
    x, y = data()
    with pytest.raises(RuntimeError, match="recomputes activations.*set_grad_checkpointing"):
        ds.fit(ensemble, (x, y), cross_entropy, epochs=1)
    with pytest.raises(RuntimeError, match="recomputes activations"):
        ensemble(x)
    with pytest.raises(RuntimeError, match="recomputes activations"):
        ds.sweep(lambda: Recomputing(reentrant), (x, y), cross_entropy, grid={"lr": [0.1, 0.2]}, members=2, epochs=1)
    mixed = ds.Ensemble.from_modules([Recomputing(reentrant), nn.Linear(6, 3)])
    with pytest.raises(RuntimeError, match="recomputes activations"):
        ds.fit(mixed, (x, y), cross_entropy, epochs=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in ensemble.state_dict().items())
    with torch.no_grad():
        expected = torch.stack([ensemble.member(i)(x) for i in range(3)])
    torch.testing.assert_close(ensemble.predict(x), expected)
    network = Recomputing(reentrant=False)  # the entries of torch's are in place again
    network(x).sum().backward()
    assert network.first.weight.grad is not None


class Switched(nn.Module):
    """Recomputes activations once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.on = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), False

    def forward(self, x: Tensor) -> Tensor:
        def scaled(hidden: Tensor) -> Tensor:
            return torch.tanh(hidden * self.scale)

        hidden = self.layer(x)
        return checkpoint(scaled, hidden, use_reentrant=True) if self.on else scaled(hidden)


@pytest.mark.parametrize("backend", ["auto", "loop", "vmap"])
def test_activation_checkpointing_that_is_switched_on_later_is_refused(backend, unchecked):
    ensemble = ds.Ensemble(Switched, 2, backend=backend)
    x = torch.randn(2, 4)  # as many examples as members: shapes would fit
    ensemble(x)
    ensemble.body.network.on = True
    with pytest.raises(RuntimeError, match="recomputes activations"):
        ensemble(x)


def test_trainings_in_threads_leave_torchs_checkpointing_alone(unchecked):
    entries = [getattr(torch.utils.checkpoint, name) for name in recomputation.ENTRIES]
    failures = []

    def work():
        try:
            mixed = ds.Ensemble.from_modules([nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))])
            ds.fit(mixed, data(), cross_entropy, epochs=5, batch_size=4)
            network = Recomputing(reentrant=False)
            network(data()[0]).sum().backward()
        except Exception as reason:
            failures.append(reason)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [getattr(torch.utils.checkpoint, name) for name in recomputation.ENTRIES] == entries


class Counts(nn.Module):
    """A buffer that every training pass moves, and evaluation reads."""

    def __init__(self, update: str) -> None:
        super().__init__()
        self.layer, self.update = nn.Linear(6, 3), update
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.update == "in place":
            self.count += 1
        elif self.training and self.update == "assigned":
            self.count = self.count + 1
        elif self.training and self.update == "mean":
            self.count += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x + self.mean) * (self.count / 8).clamp(max=1)


@pytest.mark.parametrize("update", ["in place", "assigned", "mean"])
def test_buffers_that_a_pass_moves_are_moved_once_in_every_backend(update, unchecked):
    x, y = data(examples=64)
    states = {}
    for backend in ("loop", "vmap", "batched", "auto", "rule"):
        ensemble = ds.Ensemble(lambda: Counts(update), 3, seed=1, backend="auto" if backend == "rule" else backend)
        ds.fit(ensemble, (x, y), cross_entropy, epochs=2, batch_size=16, deterministic=backend == "rule")
        states[backend] = ensemble.body.state() | {"outputs": ensemble.predict(x)}
        assert ensemble.body.network.count.tolist() == [8.0] * 3, backend
    for backend, state in states.items():
        torch.testing.assert_close(state, states["loop"], msg=lambda m, b=backend: f"{b}: {m}")
    single = Counts(update)
    ds.fit(single, (x, y), cross_entropy, epochs=2, batch_size=16)
    assert single.count == 8
    if update == "mean":
        torch.testing.assert_close(single.mean, states["loop"]["mean"][0])


def test_an_input_of_the_wrong_shape_does_not_settle_the_backend(unchecked):
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], 3, backend="vmap")
    with pytest.raises(ValueError, match=r"members cannot take inputs \[5, 7\]"):
        ensemble.predict(torch.randn(5, 7))
    ensemble.predict(data()[0])
    assert ensemble.body.ran == "vmap"


def test_frozen_layers_keep_their_precision_in_a_sweep(unchecked):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.head = nn.Linear(6, 6).double().requires_grad_(False), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.frozen(x.double()).float())

    swept = ds.sweep(Mixed, data(), cross_entropy, grid={"lr": [0.1]}, members=2, epochs=2)
    ensemble = ds.Ensemble(Mixed, 2)
    ds.fit(ensemble, data(), cross_entropy, epochs=2, lr=0.1)
    assert swept.run(0).body.network.frozen.weight.dtype == torch.float64
    torch.testing.assert_close(swept.run(0).predict(data()[0]), ensemble.predict(data()[0]))


def half_in_bf16():
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    network[0].bfloat16()
    return network


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave, self.head = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(self.wave.dtype) @ self.wave).real)


COMPLEX = r"real parameters to be trained; got complex '.*wave'"


@pytest.mark.parametrize(
    ("build", "mixed", "message"),
    [
        (half_in_bf16, True, r"one dtype to be trained, where architectures differ; got bfloat16 \('.*0.weight'\) and"),
        (Complex, True, COMPLEX),
        (Complex, False, COMPLEX),
    ],
)
def test_weights_that_cannot_be_trained_as_one_are_refused_before_they_are_touched(build, mixed, message, unchecked):
    ensemble = ds.Ensemble.from_modules([build(), nn.Linear(6, 3)]) if mixed else ds.Ensemble(build, 3)
    before = {name: (tensor, tensor.clone()) for name, tensor in ensemble.state_dict().items()}
    with pytest.raises(TypeError, match=message):
        ds.fit(ensemble, data(), cross_entropy, epochs=1)
    if build is Complex:
        with pytest.raises(TypeError, match=message.replace(r"'.*", "'")):
            ds.sweep(build, data(), cross_entropy, grid={"lr": [0.1, 0.2]}, members=2, epochs=1)
    for name, tensor in ensemble.state_dict().items():
        assert tensor.dtype == before[name][1].dtype
        assert torch.equal(tensor, before[name][1])
    if build is Complex:
        assert ensemble(data()[0]).shape == (len(ensemble), 24, 3)


class Fails(nn.Module):
    """A network that fails at one of its passes."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.after = after
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] > self.after:
            raise RuntimeError("pass failed")
        return self.norm(self.layer(x))


def settings(ensemble):
    body = ensemble.body
    return (
        body.backend,
        body.channels_last,
        body.by_rule,
        [m.training for m in ensemble.modules()],
        [p.requires_grad for p in ensemble.parameters()],
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        body.choices.file,
    )


def objective_fails(outputs, targets):
    raise RuntimeError("objective failed")


CALLS = {
    "fit, objective": lambda e, x, y, d: ds.fit(e, (x, y), objective_fails, epochs=1, deterministic=True, checkpoint=d),
    "fit, argument": lambda e, x, y, d: ds.fit(e, (x, y), cross_entropy, epochs=1, lr=[0.1, 0.2]),
    "fit, targets": lambda e, x, y, d: ds.fit(e, (x, y[:3]), cross_entropy, epochs=1),
    "fit, metric": lambda e, x, y, d: ds.fit(
        e, (x, y), cross_entropy, epochs=1, validation=(x, y), metric=objective_fails, mode="min", channels_last=True
    ),
    "fit, progress": lambda e, x, y, d: ds.fit(e, (x, y), cross_entropy, epochs=1, progress=lambda moment: 1 / 0),
    "fit, sequential": lambda e, x, y, d: ds.fit(e, (x, y), objective_fails, epochs=1, sequential=True),
    "fit, twin": lambda e, x, y, d: ds.fit(
        e, (x, y), ds.objectives.adp, epochs=1, deterministic=True, checkpoint=d, twin=objective_fails
    ),
    "fit, twin's progress": lambda e, x, y, d: ds.fit(
        e, (x, y), ds.objectives.adp, epochs=1, twin=True, progress=lambda moment: 1 / (not moment.twin)
    ),
    "fit, pass": lambda e, x, y, d: ds.fit(e, (x, y), cross_entropy, epochs=9),
    "predict": lambda e, x, y, d: e.predict(x[:, :4]),
    "predict, file": lambda e, x, y, d: e.predict(x, file="/dev/null/outputs.npy"),
    "attack": lambda e, x, y, d: ds.attacks.pgd(e, x[:, :4].sigmoid(), y, epsilon=0.1, steps=2, step_size=0.1),
    "soup": lambda e, x, y, d: e.soup(x[:, :4]),
}


@pytest.mark.parametrize("backend", ["auto", "loop", "vmap", "batched"])
@pytest.mark.parametrize("call", CALLS)
def test_no_call_leaves_settings_changed_behind_it(call, backend, tmp_path, unchecked):
    for training in (True, False):
        after = 8 if call == "fit, pass" else 10**9
        ensemble = ds.Ensemble(lambda after=after: Fails(after), 3, backend=backend).train(training)
        for norm in (m for m in ensemble.modules() if isinstance(m, nn.BatchNorm1d)):
            norm.train(not training)
        before = settings(ensemble)
        generator = torch.get_rng_state()
        with pytest.raises(Exception) as raised:  # noqa: PT011  # whatever it is
            CALLS[call](ensemble, *data(), tmp_path / str(training))
        assert settings(ensemble) == before, raised.value
        assert torch.equal(torch.get_rng_state(), generator)
    ensemble(data()[0]) if call != "fit, pass" else None

"""Trainings with compiled passes are trainings without, to rounding, and say why where they cannot be compiled."""

import functools
import shutil

import pytest
import torch
from networks import NETWORKS, FunctionalMLP
from torch import nn
from torch.nn import functional as F

import dissensus as ds
from dissensus.execution import batched, choice, compilation
from dissensus.execution.backends import BACKENDS, COMPILED, backend_named

cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("unchecked"),
]  # compilers warn of themselves


def data(shape=(6,), examples=24, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, *shape, generator=generator, dtype=dtype)
    return x, torch.randint(3, (examples,), generator=generator)


@pytest.fixture
def quickly(monkeypatch):
    """Compile all but the kernels: what Dynamo and AOTAutograd make of a pass is run operation by operation."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Let the compiler keep what it makes in the folder of a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    torch._dynamo.reset()
    yield tmp_path / "inductor"
    torch._dynamo.reset()


def trained(build, pair, members=3, backend="auto", output=None, **options):
    """An ensemble after training, and its history."""
    ensemble = ds.Ensemble(build, members, seed=1, backend=backend, output=output)
    ensemble = ensemble.to(next(t for t in _leaves(pair[0])).dtype)
    settings = {"epochs": 2, "batch_size": 10, "optimizer": "sgd", "momentum": 0.9, "lr": 0.1}
    return ensemble, ds.fit(ensemble, pair, cross_entropy, **{**settings, **options})


def _leaves(x):
    return [x] if isinstance(x, torch.Tensor) else [t for t in x.values() if t.is_floating_point()]


def assert_same(first, second, tolerance=1e-10):
    tensors = second.body.tensors()
    for name, tensor in first.body.tensors().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=tolerance, atol=tolerance)


def recorded(caplog, words):
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


class DropsInItsCode(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(F.dropout(F.relu(self.first(x)), 0.4, self.training))


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(-1, 3, 2).repeat(1, 1, 2)).mean(1))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(10, 3)

    def forward(self, x, words, scale=2.0):
        return {"logits": self.head(torch.cat([x * scale, self.words(words).mean(1)], 1)), "other": None}


OWN = {"drops_in_its_code": (DropsInItsCode, (6,)), "attention": (Attention, (6,))}
CASES = {**{name: NETWORKS[name] for name in NETWORKS if name != "plain_average_norm"}, **OWN}
"""`plain_average_norm` reads a counter on the host."""
BATCHED = ["mlp", "functional", "two_dropouts", "channel_dropout", "pooled"]


@pytest.mark.slow(fast=["two_dropouts-*", "cnn_batch_norm-loop", "drops_in_its_code-loop"])
@pytest.mark.parametrize("backend", ["loop", "vmap", "batched"])
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_training_is_the_training(name, backend, quickly):
    build, shape = CASES[name]
    pair = data(shape)
    if backend == "batched" and name not in BATCHED:
        pytest.skip("not a network for batched products")
    eager, history = trained(build, pair, backend=backend, compile=False)
    compiled, compiled_history = trained(build, pair, backend=backend, compile=True)
    assert history.backend == backend
    assert compiled_history.backend == f"{backend}, compiled", compiled.choices
    assert_same(eager, compiled)


def test_all_members_share_one_compilation_per_shape(quickly):
    build, shape = NETWORKS["cnn_batch_norm"]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for members in (2, 5):
        ensemble, _ = trained(build, data(shape), members, "loop", compile=True)
        (compiled,) = ensemble.body.skeleton.compiled.values()
        assert len(compiled.shapes) == 2  # 24 examples: batches of 10 and one of 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 4


def test_large_layers_in_batched_products(quickly, monkeypatch):
    monkeypatch.setattr(batched, "LARGE", 0)
    eager, _ = trained(NETWORKS["mlp"][0], data(), backend="batched", compile=False)
    compiled, history = trained(NETWORKS["mlp"][0], data(), backend="batched", compile=True)
    assert history.backend == "batched, compiled"
    assert_same(eager, compiled)


def test_more_networks_of_one_code_than_the_compiler_allows_are_compiled(quickly):
    for width in range(torch._dynamo.config.recompile_limit + 2):
        _, history = trained(lambda width=width: nn.Linear(6, 3 + width), data(examples=10), 2, "loop", compile=True)
        assert history.backend == "loop, compiled"


def test_several_inputs_and_words_among_them(quickly):
    x, y = data()
    pair = {"x": x, "words": torch.arange(48).view(24, 2) % 5}, y
    choose = lambda outputs: outputs["logits"]  # noqa: E731
    eager, _ = trained(TwoInputs, pair, output=choose, backend="loop", compile=False)
    compiled, history = trained(TwoInputs, pair, output=choose, backend="loop", compile=True)
    assert history.backend == "loop, compiled"
    assert_same(eager, compiled)


def test_parameters_of_several_dtypes(quickly):
    def build():
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        network[0].double()
        network.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
        network[1].register_forward_hook(lambda module, inputs, output: output.float())
        return network

    x, y = data(dtype=torch.float32)
    results = []
    for compiles in (False, True):
        ensemble = ds.Ensemble(build, 3, seed=1, backend="loop")
        history = ds.fit(ensemble, (x, y), cross_entropy, epochs=2, batch_size=10, compile=compiles)
        results.append((ensemble, history.backend))
    assert [name for _, name in results] == ["loop", "loop, compiled"]
    assert_same(results[0][0], results[1][0], 1e-6)


def test_bf16_and_channels_last(quickly):
    build, shape = NETWORKS["cnn_batch_norm"]
    options = {"precision": "bf16", "channels_last": True, "backend": "loop"}
    pair = data(shape, dtype=torch.float32)
    eager, _ = trained(build, pair, compile=False, **options)
    compiled, history = trained(build, pair, compile=True, **options)
    assert history.backend == "loop, compiled"
    assert "bf16" in history.precision
    assert_same(eager, compiled, 2e-2)


@pytest.mark.slow(fast=["sampled"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"active_members": 2}, id="sampled"),
        pytest.param({"max_memory": 2**21}, id="memory"),
        pytest.param({"accumulate": 2, "ema": 0.9, "validation": 0.25}, id="averaged"),
        pytest.param({"optimizer": torch.optim.NAdam, "lr": None, "momentum": None}, id="own optimizer"),
        pytest.param({"bootstrap": True, "frozen": [0]}, id="bootstrap"),
    ],
)
def test_compiled_passes_go_with_other_settings(options, quickly):
    build, shape = NETWORKS["two_dropouts"]
    pair = data(shape)
    eager, _ = trained(build, pair, backend="loop", compile=False, **options)
    compiled, history = trained(build, pair, backend="loop", compile=True, **options)
    assert history.backend == "loop, compiled"
    assert_same(eager, compiled)


@pytest.mark.slow
def test_attacked_batches_are_those_of_a_training_without(quickly):
    build, shape = NETWORKS["two_dropouts"]
    x, y = data(shape)
    adversarial = ds.train.AdversarialTraining(epsilon=0.1, steps=2)
    pair = x.sigmoid(), y
    eager, _ = trained(build, pair, backend="loop", compile=False, adversarial=adversarial)
    compiled, _ = trained(build, pair, backend="loop", compile=True, adversarial=adversarial)
    assert_same(eager, compiled)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_a_sweep_is_compiled_too(backend, quickly):
    build, shape = NETWORKS["two_dropouts"]
    options = {"grid": {"lr": [0.1, 0.2], "seed": [0, 1]}, "members": 2, "epochs": 2, "batch_size": 10}
    eager, compiled = (
        ds.sweep(build, data(shape), cross_entropy, backend=backend, compile=compiles, **options)
        for compiles in (False, True)
    )
    assert compiled.history(0).backend == f"{backend}, compiled"
    torch.testing.assert_close(compiled.outputs(data(shape)[0]), eager.outputs(data(shape)[0]), rtol=1e-9, atol=1e-9)
    assert compiled.run(0).body.compiling is False


def test_settings_are_as_before_after_a_training(quickly):
    ensemble, _ = trained(*(NETWORKS["mlp"][0], data()), compile=True)
    assert ensemble.body.compiling is False
    ensemble.train()(data()[0])
    assert "compiled" not in ensemble.body.ran


class Interrupted(Exception):
    pass


class Interrupts:
    """Ends a training in its second epoch."""

    def on_step(self, entry):
        if entry["step"] == 4:
            raise Interrupted


def test_a_resumed_training_goes_on_compiled(tmp_path, quickly):
    build, shape = NETWORKS["two_dropouts"]
    whole, _ = trained(build, data(shape), backend="loop", compile=True)
    options = {"backend": "loop", "compile": True, "checkpoint": tmp_path, "checkpoint_seconds": 0, "resume": True}
    with pytest.raises(Interrupted):
        trained(build, data(shape), callbacks=[Interrupts()], **options)
    resumed, history = trained(build, data(shape), **options)
    assert history.backend == "loop, compiled"
    for name, tensor in whole.body.tensors().items():
        assert torch.equal(resumed.body.tensors()[name], tensor), name
    with pytest.raises(ValueError, match="compile"):
        trained(build, data(shape), **{**options, "compile": False})


def test_a_choice_of_another_machine_is_tried_and_given_up(tmp_path, monkeypatch, caplog, quickly):
    options = {"backend": "loop", "compile": True, "checkpoint": tmp_path, "checkpoint_seconds": 0, "resume": True}
    with pytest.raises(Interrupted):
        trained(NETWORKS["mlp"][0], data(), callbacks=[Interrupts()], **options)
    monkeypatch.setattr(torch, "compile", failing)
    _, history = trained(NETWORKS["mlp"][0], data(), **options)
    assert history.backend == "loop"
    assert recorded(caplog, "members are not compiled: no compiler here")


def failing(function, **_):
    def call(*_):
        raise RuntimeError("no compiler here")

    return call


def test_a_failure_is_told_and_members_run_as_they_are(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", failing)
    eager, _ = trained(NETWORKS["cnn_batch_norm"][0], data((2, 8, 8)), backend="loop", compile=False)
    ensemble, history = trained(NETWORKS["cnn_batch_norm"][0], data((2, 8, 8)), backend="loop", compile=True)
    assert history.backend == "loop"
    assert recorded(caplog, "members are not compiled: no compiler here")
    assert any("no compiler here" in made.refused.get("loop, compiled", "") for made in ensemble.choices)
    assert_same(eager, ensemble, 0)


def test_a_comparison_that_does_not_fit_into_memory_ends_no_training(monkeypatch, caplog):
    def results(*_):
        raise torch.OutOfMemoryError("no memory for two results")

    monkeypatch.setattr(choice.TrialPass, "results", results)
    _, history = trained(NETWORKS["mlp"][0], data(), backend="loop", compile=True)
    assert history.backend == "loop"
    assert recorded(caplog, "members are not compiled: no memory for two results")


@pytest.mark.parametrize("wrong", ["outputs", "buffers", "gradients"])
def test_a_compiler_that_computes_something_else_is_refused(wrong, monkeypatch, caplog):
    def compiled(function, **_):
        def call(pieces, state, inputs):
            if wrong == "gradients":
                pieces = [piece.detach() + (piece - piece.detach()) * 1.01 for piece in pieces]
            outputs, calls = function(pieces, state, inputs)
            if wrong == "buffers":
                next(tensor for name, tensor in state.items() if name.endswith("running_mean")).data.add_(1)
            return outputs + (1 if wrong == "outputs" else 0), calls

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    _, history = trained(NETWORKS["cnn_batch_norm"][0], data((2, 8, 8)), backend="loop", compile=True)
    assert history.backend == "loop"
    assert recorded(caplog, "differ")


@pytest.mark.parametrize("build", [NETWORKS["plain_average_norm"][0], functools.partial(Attention, 0.2)])
def test_networks_that_cannot_be_traced_are_told(build, quickly, caplog):
    """One reads a counter on the host; one replaces functions inside of torch's attention, to key its dropout."""
    _, history = trained(build, data(), backend="loop", compile=True)
    assert history.backend == "loop"
    assert recorded(caplog, "members are not compiled")


def test_shared_weights_and_different_architectures_are_told(quickly, caplog):
    shared = ds.Ensemble(FunctionalMLP, 3, shared="first.*").double()
    assert "compiled" not in ds.fit(shared, data(), cross_entropy, epochs=1, compile=True).backend
    assert recorded(caplog, "members share weights")
    widths = [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))]
    mixed = ds.Ensemble.from_modules(widths).double()
    assert ds.fit(mixed, data(), cross_entropy, epochs=1, compile=True).backend == "loop"
    assert recorded(caplog, "different architectures")


def test_batches_of_many_shapes_run_as_they_are(quickly, caplog, monkeypatch):
    monkeypatch.setattr(compilation, "MOST_SHAPES", 2)
    caplog.set_level("INFO")
    build, shape = NETWORKS["two_dropouts"]
    x, y = data(shape)
    batches = [(x[:size], y[:size]) for size in (4, 6, 8, 10, 6)]
    results = []
    for compiles in (False, True):
        ensemble = ds.Ensemble(build, 3, seed=1, backend="loop").double()
        ds.fit(ensemble, batches, cross_entropy, epochs=2, compile=compiles)
        results.append(ensemble)
    assert_same(*results)
    assert len(recorded(caplog, "members are compiled for 2 shapes")) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "always"}, "compile.*True, False or 'auto'"),
        ({"compile": 1}, "compile.*True, False or 'auto'"),
        ({"compile": True, "recompute": True}, "compile.*without `recompute`"),
        ({"compile": True, "deterministic": True}, "compile.*without `deterministic`"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        trained(NETWORKS["mlp"][0], data(), **options)


@pytest.fixture
def clock(monkeypatch):
    """Say how long passes of a backend take, in milliseconds."""

    def says(**milliseconds):
        def measured(trial, candidates, refused, replayed, passes):
            return {name: milliseconds[name.replace(", ", "_")] for name in candidates}

        monkeypatch.setattr(choice, "_measured", measured)
        monkeypatch.setattr(choice, "_candidates", lambda trial: (["loop", "vmap"], {}, True))

    return says


@pytest.mark.parametrize(
    ("passes", "compiled", "backend"),
    [(6, 50.0, "vmap"), (10**5, 50.0, "vmap, compiled"), (10**5, 79.0, "vmap"), (None, 50.0, "vmap")],
)
def test_auto_compiles_long_trainings_where_it_is_faster(passes, compiled, backend, clock, quickly):
    clock(loop=100.0, vmap=80.0, vmap_compiled=compiled)
    body = ds.Ensemble(NETWORKS["two_dropouts"][0], 3).double().train().body
    body.compiling, body.passes = "auto", passes
    body.run(body.packed().requires_grad_(), data()[0])
    assert body.ran == backend
    (made,) = body.choices.values()
    assert ("vmap, compiled" in made.milliseconds) == (passes == 10**5)


@pytest.mark.parametrize("settings", [{"backend": "loop"}, {"by_rule": True}, {"compile": False}])
def test_auto_leaves_what_was_asked_for(settings, clock, quickly):
    clock(loop=80.0, vmap=100.0, loop_compiled=10.0)
    body = ds.Ensemble(NETWORKS["two_dropouts"][0], 3, backend=settings.get("backend", "auto")).double().train().body
    body.compiling, body.passes = settings.get("compile", "auto"), 10**6
    body.by_rule = settings.get("by_rule", False)
    body.run(body.packed().requires_grad_(), data()[0])
    assert "compiled" not in body.ran


def test_every_compiled_form_belongs_to_a_backend():
    assert COMPILED.keys() <= BACKENDS.keys()
    for name, form in COMPILED.items():
        assert form.name == f"{name}, compiled"
        assert backend_named(form.name) is form
        assert backend_named(name) is BACKENDS[name]
    assert backend_named("faster") is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["two_dropouts", "cnn_batch_norm"])
def test_kernels_of_the_compiler_train_the_same_ensemble(name, own_cache):
    build, shape = NETWORKS[name]
    pair = data(shape, 20)
    eager, _ = trained(build, pair, backend="loop", compile=False)
    compiled, history = trained(build, pair, backend="loop", compile=True)
    assert history.backend == "loop, compiled"
    assert_same(eager, compiled, 1e-9)
    assert any(own_cache.rglob("*.cpp"))

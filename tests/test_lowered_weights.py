"""Trainings with copies of weights in bfloat16 equal those whose weights autocast casts, to the bit.

On a CPU, copies are switched on for these tests, and kernels run by Triton's interpreter, where Triton is installed.
"""

import importlib.util
import math
import os
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from networks import NETWORKS
from recording import Captures, recorded
from torch import nn

import dissensus as ds
from dissensus.train import capture, checkpoint, lowered_weights, optim
from dissensus.train.grid import Run
from dissensus.train.lowered_weights import LoweredGradient, LoweredWeights
from dissensus.train.numerics import PrecisionSettings
from dissensus.train.recipe import NewMembers, Recipe

cross_entropy = partial(ds.objectives.independent, loss="cross_entropy")
ldr = partial(ds.objectives.ldr, strength=0.5)
M = 3
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA")


def data(shape=(6,), n=45):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, *shape, generator=generator), torch.randint(3, (n,), generator=generator)


def tensors(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.fixture
def gradients(monkeypatch):
    """Gradients that were taken with copies, each of which must be those of their masters."""
    taken = []

    def gradient(self, total):
        if not torch.utils._python_dispatch._get_current_dispatch_mode():  # while recording, numbers may not be read
            masters, width = self.flat.detach(), self.products.shape[1]
            assert torch.equal(self.products, masters[:, :width].bfloat16())
            assert torch.equal(self.rest, masters[:, width:])
        taken.append(original(self, total))
        return taken[-1]

    original = LoweredWeights.gradient
    monkeypatch.setattr(LoweredWeights, "gradient", gradient)
    return taken


@pytest.fixture
def ways(monkeypatch, gradients):
    """Ways to train: without copies, then with them. Each says whether it takes gradients as expected."""

    def both(uses=True):
        for copies in (False, True):
            monkeypatch.setattr(lowered_weights, "DEVICES", {"cpu"} if copies else set())
            gradients.clear()
            yield copies
            assert bool(gradients) == (copies and uses)

    return both


@pytest.fixture
def captures(monkeypatch):
    """Captured steps on a CPU, with counts."""
    counts = Captures(recorded)
    monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda engine: capture.GraphSteps(lambda: counts))
    return counts


def fitted(name="mlp", objective=ldr, build=None, backend="loop", **options):
    own, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build or own, M, seed=1, backend=backend)
    options = {"epochs": 4, "batch_size": 8, "lr": 0.01, "precision": "bf16", **options}
    history = ds.fit(ensemble, options.pop("data", None) or data(shape), objective, **options)
    return tensors(ensemble), history.column("loss"), history.epochs[-1].get("validation")


OPTIONS = {
    "plain": {},
    "adam with a penalty": {"optimizer": "adam", "weight_decay": 0.1},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "clipping and a schedule": {"clip_norm": 0.3, "schedule": "cosine", "lr": [0.01, 0.1, 0.03], "weight_decay": 0.1},
    "averaged weights": {"ema": 0.9, "validation": 0.2},
    "the best epoch": {"validation": 0.2, "patience": 1, "watch": "member", "lr": 0.3, "epochs": 8},
    "a frozen member": {"frozen": [1], "freeze": ds.train.Convergence(patience=1, tolerance=0.5)},
    "weights of examples": {"weights": torch.arange(1.0, 46.0), "class_weights": [1.0, 2.0, 0.5]},
    "an attack": {"adversarial": ds.train.AdversarialTraining(0.1, box=(-5.0, 5.0), steps=1)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_trainings_are_equal(option, ways):
    cast, copied = (fitted(**OPTIONS[option]) for _ in ways())
    assert_equal(copied[0], cast[0])
    assert copied[1:] == cast[1:]


@pytest.mark.parametrize("backend", ["loop", "vmap", "batched", "streams", "stacked"])
@pytest.mark.parametrize("name", ["cnn_batch_norm", "norm_first", "two_dropouts", "tied"])
def test_every_backend_reads_copies(name, backend, ways):
    """Parameters of norms are read from the masters, in float32."""
    objective = ldr if name != "tied" else lambda outputs, targets: cross_entropy(outputs[..., :3], targets)
    cast, copied = (fitted(name, objective, backend=backend) for _ in ways())
    assert_equal(copied[0], cast[0])


@pytest.mark.parametrize("option", ["plain", "momentum", "clipping and a schedule", "the best epoch"])
def test_captured_trainings_are_equal(option, ways, captures):
    cast, copied = (fitted(**OPTIONS[option]) for _ in ways())
    assert captures.replays >= 10
    assert_equal(copied[0], cast[0])
    assert copied[1:] == cast[1:]


@pytest.mark.parametrize("bias", [True, False])
def test_networks_of_one_layer(bias, ways):
    """Without a bias, all weights are those of products."""
    cast, copied = (fitted(build=lambda: nn.Linear(6, 3, bias=bias)) for _ in ways())
    assert_equal(copied[0], cast[0])


def test_parameters_that_nothing_reads_get_no_gradient(ways):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.idle = nn.Linear(6, 3, bias=False), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.layer(x)

    cast, copied = (fitted(build=Idle, weight_decay=0.1) for _ in ways())
    assert_equal(copied[0], cast[0])


def test_runs_of_a_sweep_leave_and_fail(ways, captures):
    """Copies are those of the runs that are left, and graphs of others are forgotten."""

    def explodes(outputs, targets, *, fuse):
        total, parts = ldr(outputs, targets)
        return ds.LossParts(torch.where(total < 8 * fuse, math.inf, total), parts)

    swept = []
    for _ in ways():
        grid = {"lr": [0.3, 0.01], "fuse": [0.0, 1.0]}
        options = {"members": M, "epochs": 10, "batch_size": 9, "validation": 0.2, "patience": 2, "precision": "bf16"}
        swept.append(ds.sweep(NETWORKS["mlp"][0], data(), explodes, grid=grid, backend="loop", **options))
    cast, copied = swept
    assert [outcome.status for outcome in copied.outcomes] == [outcome.status for outcome in cast.outcomes]
    assert "failed" in {outcome.status for outcome in copied.outcomes}
    for run, outcome in enumerate(cast.outcomes):
        assert outcome.reason == copied.outcomes[run].reason
        if outcome.status != "failed":
            assert_equal(tensors(copied.run(run)), tensors(cast.run(run)))


@pytest.mark.parametrize("captured", [False, True])
def test_gradients_that_are_not_finite_are_noticed(captured, ways, request):
    """The loss itself remains finite."""
    counts = request.getfixturevalue("captures") if captured else None

    def overflows(outputs, targets):
        total, parts = ldr(outputs, targets)
        steep = torch.where(parts["member_loss"].detach() < 0.9, 3e38, 0.0).view(-1, 1, 1)
        return ds.LossParts(total + ((outputs - outputs.detach()) * steep).sum(), parts)

    failures = []
    for _ in ways():
        with pytest.raises(ds.TrainingDiverged) as caught:
            fitted(objective=overflows, epochs=40, lr=0.03)
        failures.append((caught.value.step, caught.value.members, caught.value.part))
    assert failures[0] == failures[1]
    assert counts is None or counts.replays > 10


def test_what_users_write_between_epochs_counts(ways):
    results = []
    for _ in ways():
        ensemble = ds.Ensemble(NETWORKS["mlp"][0], M, seed=1, backend="loop")

        def halved(entry, ensemble=ensemble):
            with torch.no_grad():
                for parameter in ensemble.parameters():
                    parameter.mul_(0.5)

        options = {"epochs": 3, "batch_size": 8, "precision": "bf16"}
        ds.fit(ensemble, data(), ldr, callbacks=[halved], **options)
        halved({})
        ds.fit(ensemble, data(), ldr, progress=halved, **options)
        results.append(tensors(ensemble))
    assert_equal(*results)


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_loader_writes_between_steps_counts(captured, ways, request):
    if captured:
        request.getfixturevalue("captures")
    results, (x, y) = [], data()
    for _ in ways():
        ensemble = ds.Ensemble(NETWORKS["mlp"][0], M, seed=1, backend="loop")
        torch.manual_seed(0)
        kept = {name: torch.rand_like(p) > 0.5 for name, p in ensemble.named_parameters()}

        class Pruning:
            def __len__(self):
                return 5

            def __iter__(self, ensemble=ensemble, kept=kept):
                for start in range(0, 40, 8):
                    with torch.no_grad():
                        for name, parameter in ensemble.named_parameters():
                            parameter.mul_(kept[name])
                    yield x[start : start + 8], y[start : start + 8]

        ds.fit(ensemble, Pruning(), ldr, epochs=4, lr=0.01, precision="bf16")
        results.append(tensors(ensemble))
    assert_equal(*results)


@pytest.mark.parametrize("steps", [4, 12])
def test_a_training_resumes_without_stored_copies(steps, ways, tmp_path, monkeypatch):
    expected, _ = (fitted(epochs=3) for _ in ways())
    write = checkpoint.Checkpointer.write

    def stops(self, engine):
        write(self, engine)
        assert not any(tensor.dtype == torch.bfloat16 for tensor in engine.state.tensors().values())
        if engine.state.steps == steps:
            raise KeyboardInterrupt

    saving = {"epochs": 3, "checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "write", stops)
        with pytest.raises(KeyboardInterrupt):
            fitted(**saving)
    assert_equal(fitted(resume=True, **saving)[0], expected[0])


class Watching:
    def on_step(self, entry):
        pass


ELSEWHERE = {
    "float32": {"precision": "float32"},
    "several batches per update": {"accumulate": 2},
    "members drawn per step": {"active_members": 2},
    "an optimiser without a kernel": {"optimizer": "lion"},
    "no momentum": {"optimizer": "sgd"},
    "an optimiser of the user's": {"optimizer": partial(torch.optim.Adam, lr=0.01), "lr": None},
    "some weights without decay": {"no_decay": True, "weight_decay": 0.1},
    "a callback that sees steps": {"callbacks": [Watching()]},
    "members in turn": {"recompute": True},
    "members in groups": {"max_memory": 13_000, "objective": cross_entropy},
    "two passes, one attacked": {
        "adversarial": ds.train.AdversarialTraining(0.1, box=(-5.0, 5.0), steps=1, beside=True),
        "objective": partial(ds.objectives.trades, strength=1.0),
    },
    "two passes, one without labels": {
        "unlabelled": torch.randn(40, 6, generator=torch.Generator().manual_seed(5)),
        "objective": ds.objectives.divdis,
    },
}


@pytest.mark.parametrize("option", ELSEWHERE)
def test_no_copies_are_kept_elsewhere(option, ways):
    cast, copied = (fitted(**ELSEWHERE[option]) for _ in ways(uses=False))
    assert_equal(copied[0], cast[0])


def test_no_copies_are_kept_where_members_share_or_differ(ways):
    base = NETWORKS["mlp"][0]()
    options = {"epochs": 2, "batch_size": 8, "precision": "bf16"}
    for _ in ways(uses=False):
        shared = ds.Ensemble(lambda: ds.adapters.batch_ensemble(base), M, backend="loop", shared=ds.adapters.SHARED)
        mixed = ds.Ensemble.from_modules([ds.nets.mlp(6, 3, (width,)) for width in (4, 5)])
        for ensemble in (shared, mixed):
            ds.fit(ensemble, data(), ldr, **options)


def test_planned_memory_counts_copies(monkeypatch):
    run = Run.single(members=M, batch_size=8, seed=0, optimizer={"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0})
    members = NewMembers(NETWORKS["mlp"][0], torch.device("cpu"))
    held = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(lowered_weights, "DEVICES", devices)
        engine = Recipe(members, [run], data(), ldr, epochs=1, precision=PrecisionSettings("bf16")).engine()
        held.append(engine.memory_needs(next(engine.feed.epoch(0))).held)
    assert held[1] - held[0] == 2 * M * (6 * 8 + 8 * 7 + 7 * 3)


@pytest.mark.parametrize("max_memory", range(11_000, 18_000, 1000))
def test_memory_that_lacks_for_copies_alone_changes_nothing_else(max_memory, monkeypatch):
    results = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(lowered_weights, "DEVICES", devices)
        try:
            results.append(fitted(max_memory=max_memory, objective=ldr)[0])
        except ValueError as reason:
            results.append({"refused": torch.tensor(list(str(reason).encode()))})
    assert_equal(results[1], results[0])


def test_copies_go_before_runs_are_selected(monkeypatch):
    """They would keep the weights of all runs in memory beside those of the others."""
    monkeypatch.setattr(lowered_weights, "DEVICES", {"cpu"})
    run = Run.single(members=M, batch_size=8, seed=0, optimizer={"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0})
    members = NewMembers(NETWORKS["mlp"][0], torch.device("cpu"))
    engine = Recipe(members, [run], data(), ldr, epochs=2, precision=PrecisionSettings("bf16")).engine()
    engine._lower()
    matrix = weakref.ref(engine.lowered.flat)
    assert matrix() is engine.state.flat
    engine.select(torch.tensor([True]))
    assert engine.lowered is None
    assert matrix() is None


def test_rows_that_kernels_cannot_count_are_left_to_torch(monkeypatch):
    class Matrix:
        is_cuda, dtype = True, torch.float32

        def __init__(self, columns):
            self.shape = (1, columns)

        def __len__(self):
            return 1

        def is_contiguous(self):
            return True

    monkeypatch.setattr(optim.fused, "kernels", lambda: object())
    monkeypatch.setattr(optim.fused, "_refused", [])
    assert optim.fused.takes(Matrix(2**30))
    assert not optim.fused.takes(Matrix(2**31))


def test_passes_with_another_matrix_cast_it():
    body = ds.Ensemble(NETWORKS["mlp"][0], M, backend="batched").body
    flat = body.packed().requires_grad_()
    lowered = LoweredWeights(flat, body.layout().products_width, [])
    x = data()[0]
    with torch.autocast("cpu", torch.bfloat16), lowered.read():
        ours, others = body.run(flat, x), body.run(flat.detach(), x)
        assert torch.equal(ours, others)
        assert not others.requires_grad
        gradient = lowered.gradient(ours.float().square().sum())
    with torch.autocast("cpu", torch.bfloat16):
        (expected,) = torch.autograd.grad(body.run(flat, x).float().square().sum(), flat)
    assert torch.equal(gradient.whole(), expected)
    assert gradient.sum() == pytest.approx(float(expected.sum()), rel=1e-5)
    with pytest.raises(RuntimeError, match="does not depend on weights"):
        lowered.gradient(flat.sum())


def settings(flat, **options):
    hyper = {"lr": [0.1, 0.01, 0.3], "weight_decay": 0.0, "momentum": 0.0, "betas": (0.9, 0.99), "eps": 1e-8} | options
    return optim.settings(hyper, M, flat, nesterov=bool(options.get("momentum")))


def updated(name, start, width, way, clipped=True, dtype=torch.bfloat16):
    """Weights, moments and copies after three updates, of a member that rests in two of them among others."""
    flat = start.clone()
    columns = settings(flat, weight_decay=0.1, **({"momentum": 0.9} if name == "sgd" else {}))
    moments, copies = optim.initial_moments(name, flat, columns.momentum), flat[:, :width].to(dtype)
    limit = optim.column("clip_norm", [1.0, 5.0, 100.0], M, flat) if clipped else None
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        active = torch.tensor([True, step == 1, True], device=flat.device)
        whole = torch.randn(start.shape, generator=generator).to(flat.device)
        whole[~active] = torch.nan
        gradient = LoweredGradient(whole[:, :width].to(dtype), whole[:, width:].contiguous(), copies)
        rows = optim.UpdateRows(flat, moments, columns, active, limit)
        optim.apply(name, rows, gradient.whole() if way == "whole" else gradient)
    return [flat, *moments.values()], copies


SIZES = {"odd": (37, 1500), "nothing else": (1028, 0), "aligned": (1024, 1028), "few": (4, 2044)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_updates_without_a_kernel_write_copies(name, size):
    width, rest = SIZES[size]
    start = torch.randn(M, width + rest)
    expected, _ = updated(name, start, width, "whole")
    actual, copies = updated(name, start, width, "split")
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(copies, actual[0][:, :width].bfloat16())


def test_norms_are_those_of_the_whole_gradient():
    whole = torch.randn(M, 50).bfloat16().float()
    gradient = LoweredGradient(whole[:, :40].bfloat16(), whole[:, 40:], whole[:, :40].bfloat16())
    limit = torch.full((M, 1), 0.3)
    torch.testing.assert_close(optim.clip_scale(gradient, limit), optim.clip_scale(whole, limit))
    assert torch.equal(gradient.where(torch.tensor([True, False, True])).whole()[1], torch.zeros(50))


def kernels_checked():
    launched, original = [], optim.fused.launch

    def launch(name, *arguments, **constants):
        launched.append(name)
        return original(name, *arguments, **constants)

    optim.fused.launch = launch
    for name in ("adam", "adamw", "sgd"):
        for width, rest in SIZES.values():
            start = torch.randn(M, width + rest)
            results = {}
            for way, takes in (("whole", False), ("whole kernel", True), ("split", True)):
                optim.fused.takes = lambda flat, takes=takes: takes
                results[way] = updated(name, start, width, way.split()[0], clipped=way != "whole")
            # Without clipping, sums of squares have no part in the numbers.
            unclipped = [updated(name, start, width, way, clipped=False) for way in ("whole", "split")]
            assert all(map(torch.equal, unclipped[1][0], unclipped[0][0]))
            for kernel, split in zip(results["whole kernel"][0], results["split"][0], strict=True):
                torch.testing.assert_close(split, kernel, rtol=1e-5, atol=1e-6)
            flat, copies = results["split"][0][0], results["split"][1]
            # The interpreter cuts digits off, where a GPU rounds.
            torch.testing.assert_close(copies.float(), flat[:, :width], rtol=2**-7, atol=0)
            optim.fused.takes = lambda flat: False
            by_torch = updated(name, start, width, "whole", clipped=False)[0]
            for kernel, plain in zip(unclipped[1][0], by_torch, strict=True):
                torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)
    assert set(launched) == {"adam_rows", "sgd_rows"}
    assert not optim.fused._refused


@TRITON
@pytest.mark.slow
def test_kernels_compute_what_they_replace():
    """By Triton's interpreter, which needs no GPU."""
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_lowered_weights as tests"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", f"{code}; tests.kernels_checked()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_kernel_that_cannot_be_compiled_is_replaced_at_once(monkeypatch, caplog):
    monkeypatch.setattr(optim.fused, "kernels", lambda: type("Room", (), {"BLOCK": 4})())  # launching anything fails
    monkeypatch.setattr(optim.fused, "_refused", [])
    start = torch.randn(M, 60)
    expected, _ = updated("adamw", start, 40, "whole")
    monkeypatch.setattr(optim.fused, "takes", lambda flat: not optim.fused._refused)
    actual, copies = updated("adamw", start, 40, "split")
    assert "updates take several passes" in caplog.text
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(copies, actual[0][:, :40].bfloat16())


# On a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_kernels_write_copies_on_a_gpu(name, size):
    width, rest = SIZES[size]
    start = torch.randn(M, width + rest, device="cuda")
    expected, _ = updated(name, start, width, "whole", clipped=False)
    actual, copies = updated(name, start, width, "split", clipped=False)
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(copies, actual[0][:, :width].bfloat16())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("option", ["plain", "momentum", "clipping and a schedule", "averaged weights"])
def test_trainings_on_a_gpu_are_equal(option, monkeypatch):
    x, y = data((256,), 300)
    taken, original, results = [], LoweredWeights.gradient, []
    monkeypatch.setattr(LoweredWeights, "gradient", lambda self, total: taken.append(1) or original(self, total))
    for devices in (set(), {"cuda"}):
        monkeypatch.setattr(lowered_weights, "DEVICES", devices)
        ensemble = ds.Ensemble(partial(ds.nets.mlp, 256, 3, (256,)), M, seed=1, backend="batched").to("cuda")
        options = {"epochs": 6, "batch_size": 32, "lr": 1e-3, "deterministic": True, **OPTIONS[option]}
        history = ds.fit(ensemble, (x.cuda(), y.cuda()), ldr, **options)
        assert history.precision.startswith("bf16")
        assert bool(taken) == bool(devices)
        results.append((tensors(ensemble), history.column("loss")))
    if "clip_norm" in OPTIONS[option]:  # sums of squares are in another order, which later epochs make larger
        assert results[1][1][:2] == pytest.approx(results[0][1][:2], rel=1e-2)
    else:
        assert_equal(results[1][0], results[0][0])
        assert results[1][1] == results[0][1]

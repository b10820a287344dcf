"""Trainable parameters of several dtypes in `fit` and `sweep`: as in separate training by ``torch.optim``."""

import copy
from functools import partial

import pytest
import torch
from test_optim import CASES, settings
from torch import nn

import dissensus as ds
from dissensus.execution.weights import Section
from dissensus.train import memory, optim

M, N, BATCH, EPOCHS = 3, 64, 32, 10
squared = partial(ds.objectives.independent, loss="squared_error")


class Halves(nn.Module):
    """A layer in one dtype, and a head in another.

    Sizes are multiples of 32, since torch rounds bf16 numbers that do not fill a vector register in another way.
    """

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32, dtype=first), nn.Linear(32, 3, dtype=second)
        self.scale = nn.Parameter(torch.ones(32, dtype=first))

    def forward(self, x):
        hidden = torch.relu(self.first(x.to(self.first.weight.dtype))) * self.scale
        return self.second(hidden.to(self.second.weight.dtype))


NETWORKS = {
    "float32 and float64": partial(Halves, torch.float32, torch.float64),
    "float64 and float32": partial(Halves, torch.float64, torch.float32),
    "bfloat16 and float32": partial(Halves, torch.bfloat16, torch.float32),
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 8, generator=generator), torch.randn(N, 3, generator=generator).to(dtype)


def fitted(build, objective=squared, source=None, *, backend="loop", seed=3, **options):
    ensemble = ds.Ensemble(build, M, seed, backend)
    initial = [ensemble.member(i) for i in range(M)]
    options = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "optimizer": "adamw", "lr": 0.01, **options}
    return ensemble, initial, ds.fit(ensemble, source or data(), objective, **options)


def trained(module, optimizer, source=None, *, accumulate=1, clip_norm=None, after=lambda: None):
    """A separate training, by hand."""
    x, y = source or data()
    parts = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    for batches in [parts[i : i + accumulate] for i in range(0, len(parts), accumulate)] * EPOCHS:
        optimizer.zero_grad()
        for inputs, targets in batches:
            ((module(inputs) - targets).square().sum(-1).mean() / len(batches)).backward()
        if clip_norm is not None:
            norm = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in module.parameters()]))
            for parameter in module.parameters():
                parameter.grad.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        after()
    return module


def assert_close(actual, expected, *, exact=False):
    """Weights are equal to the rounding of float32; those beside bf16 weights to that of bf16; or to the bit.

    A number near the middle of two bf16 numbers may be rounded the other way, and others follow it. So few bf16 weights
    differ at all, which an update in another precision would not give.
    """
    low = any(p.dtype == torch.bfloat16 for p in expected.parameters())
    for (name, parameter), other in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert parameter.dtype == other.dtype, name
        tolerance = 0.0 if exact else 3e-2 if low else 2e-6
        scale = float(parameter.detach().abs().max())
        torch.testing.assert_close(other, parameter, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")
    pairs = [p for p in zip(expected.parameters(), actual.parameters(), strict=True) if p[0].dtype == torch.bfloat16]
    if pairs:
        differing = torch.cat([(a != b).flatten() for a, b in pairs])
        assert float(differing.double().mean()) < 0.15


def moved(actual, expected):
    return max(
        float((a - b).detach().abs().max()) for a, b in zip(actual.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_fit_trains_members_as_separate_training_does(name, case):
    make, options = OPTIMIZERS[case]
    ensemble, initial, history = fitted(NETWORKS[name], optimizer=make.__name__.lower(), **options)
    assert history.precision == name
    for i, module in enumerate(initial):
        before = copy.deepcopy(module)
        assert_close(ensemble.member(i), trained(module, make(module.parameters(), **options)))
        assert moved(module, before) > 0.05


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_updates_in_bf16_equal_torchs_to_the_bit(case, everyone):
    name, make_optimizer, options = CASES[case]
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(M, 64, generator=generator).bfloat16()
    flat, rates = start.clone(), [0.1, 0.01, 0.3]
    columns = settings(flat, rates, everyone=everyone, **options)
    state = optim.initial_moments(name, flat, columns.momentum)
    rows = [nn.Parameter(row.clone()) for row in start]
    optimizers = [make_optimizer([row], lr=rate, **options) for row, rate in zip(rows, rates, strict=True)]
    for _ in range(20):
        grad = torch.randn(M, 64, generator=generator).bfloat16()
        optim.OPTIMIZERS[name](flat, grad.clone(), state, columns, torch.ones(M, 1))
        for row, optimizer, member_grad in zip(rows, optimizers, grad, strict=True):
            row.grad = member_grad.clone()
            optimizer.step()
    assert torch.equal(flat, torch.stack([row.detach() for row in rows]))


@pytest.mark.parametrize("backend", ["vmap", "streams", "auto"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_backend_trains_them(name, backend):
    if name.startswith("bfloat16") and backend != "streams":
        pytest.skip("vmap adds bf16 numbers in another order")
    reference, _, _ = fitted(NETWORKS[name])
    ensemble, _, _ = fitted(NETWORKS[name], backend=backend)
    for i in range(M):
        assert_close(ensemble.member(i), reference.member(i))


def test_a_section_is_a_view_of_its_columns():
    flat = torch.zeros(2, 7)
    section = Section(2, 6, torch.bfloat16)
    section.numbers(flat).copy_(torch.arange(8.0).view(2, 4))
    assert section.numbers(flat).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert section.numbers(flat[1]).tolist() == [4, 5, 6, 7]
    assert section.numbers(flat.clone()[[1]]).tolist() == [[4, 5, 6, 7]]
    assert not flat[:, :2].any()
    assert not flat[:, 6:].any()


def test_packed_parameters_are_views_of_the_matrix():
    ensemble = ds.Ensemble(NETWORKS["bfloat16 and float32"], M)
    before = [p.detach().clone() for p in ensemble.parameters()]
    flat = ensemble.body.packed()
    assert flat.shape == (M, 8 * 32 + 32 + 32 + 32 * 3 + 3)
    assert flat.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(ensemble.parameters(), before, strict=True))
    assert {p.untyped_storage().data_ptr() for p in ensemble.parameters()} == {flat.untyped_storage().data_ptr()}
    assert ensemble.body.packed().dtype == torch.float32
    assert ensemble.double().body.packed().dtype == torch.float64
    assert ensemble.body.sections == ()


@pytest.mark.parametrize("name", ["float32 and float64", "bfloat16 and float32"])
@pytest.mark.parametrize("option", ["clip_norm", "accumulate", "no_decay", "per_member"])
def test_settings_of_updates_are_those_of_separate_training(name, option):
    options, extra, rates = {"lr": 0.01, "weight_decay": 0.1}, {}, [0.01] * M
    if option in ("clip_norm", "accumulate"):
        extra = {"clip_norm": 0.5} if option == "clip_norm" else {"accumulate": 2}
    elif option == "per_member":
        rates = options["lr"] = [0.02, 0.01, 0.005]
    given = {**options, **({"no_decay": ["first.*", "*bias"]} if option == "no_decay" else extra)}
    ensemble, initial, _ = fitted(NETWORKS[name], **given)
    for i, module in enumerate(initial):
        decays = {
            n: not (option == "no_decay" and (n.startswith("first") or n.endswith("bias")))
            for n, _ in module.named_parameters()
        }
        groups = [
            {"params": [p for n, p in module.named_parameters() if decays[n] == which], "weight_decay": 0.1 * which}
            for which in (True, False)
        ]
        assert_close(ensemble.member(i), trained(module, torch.optim.AdamW(groups, lr=rates[i]), **extra))


@pytest.mark.parametrize("name", ["float32 and float64", "bfloat16 and float32"])
def test_the_moving_average_is_that_of_separate_training(name):
    ensemble, initial, _ = fitted(NETWORKS[name], ema=0.9, optimizer="sgd", lr=0.05)
    for i, module in enumerate(initial):
        averages = []

        def after(module=module, averages=averages):  # torch's AveragedModel over weights in float32 at least
            if not averages:
                wide = {name: p.dtype for name, p in module.named_parameters()}
                wide = {name: torch.promote_types(dtype, torch.float32) for name, dtype in wide.items()}
                averages.append({name: p.detach().to(wide[name], copy=True) for name, p in module.named_parameters()})
                return
            for name, p in module.named_parameters():
                averages[0][name].lerp_(p.detach().to(averages[0][name].dtype), 1 - 0.9)

        trained(module, torch.optim.SGD(module.parameters(), lr=0.05), after=after)
        averaged = copy.deepcopy(module)
        with torch.no_grad():
            for name, p in averaged.named_parameters():
                p.copy_(averages[0][name])
        assert moved(averaged, module) > 1e-3
        assert_close(ensemble.member(i), averaged)


@pytest.mark.parametrize("name", NETWORKS)
def test_optimizers_of_the_user_step_each_parameter_in_its_dtype(name):
    make = partial(torch.optim.NAdam, lr=0.01)
    ensemble, initial, _ = fitted(NETWORKS[name], optimizer=make, lr=None)
    for i, module in enumerate(initial):
        assert_close(ensemble.member(i), trained(module, make(module.parameters())))


def test_lion_moves_every_weight_by_its_rate():
    ensemble, initial, _ = fitted(NETWORKS["bfloat16 and float32"], optimizer="lion", lr=2**-6, epochs=1, batch_size=N)
    for i, module in enumerate(initial):
        steps = [
            (a.detach().float() - b.detach().float()).abs()
            for a, b in zip(ensemble.member(i).parameters(), module.parameters(), strict=True)
        ]
        torch.testing.assert_close(steps[-1], torch.full((3,), 2**-6), rtol=0, atol=1e-6)
        assert float(steps[1].max()) == pytest.approx(2**-6, rel=0.1)


@pytest.mark.parametrize("name", ["float32 and float64", "bfloat16 and float32"])
def test_frozen_members_rest_and_others_train_as_before(name):
    ensemble, initial, _ = fitted(NETWORKS[name], frozen=[1])
    reference, _, _ = fitted(NETWORKS[name])
    for i in range(M):
        assert_close(ensemble.member(i), initial[i] if i == 1 else reference.member(i), exact=i == 1)


@pytest.mark.parametrize(
    "objective", [squared, partial(ds.objectives.augmented, loss="squared_error", pool="score", beta=0.5)]
)
def test_members_in_groups_train_as_all_at_once(objective, monkeypatch):
    reference, _, _ = fitted(NETWORKS["bfloat16 and float32"], objective)
    monkeypatch.setattr(memory.Needs, "at_once", lambda self, budget: 2)
    ensemble, _, history = fitted(NETWORKS["bfloat16 and float32"], objective)
    assert history.memory.startswith("2 of 3 members")
    for i in range(M):
        assert_close(ensemble.member(i), reference.member(i))


def test_recomputed_passes_train_them():
    reference, _, _ = fitted(NETWORKS["bfloat16 and float32"])
    ensemble, _, _ = fitted(NETWORKS["bfloat16 and float32"], recompute=True)
    for i in range(M):
        assert_close(ensemble.member(i), reference.member(i))


def test_sampled_members_train_them():
    ensemble, initial, _ = fitted(NETWORKS["bfloat16 and float32"], active_members=2)
    for i, module in enumerate(initial):
        member = ensemble.member(i)
        assert moved(member, module) > 0.01
        assert all(p.isfinite().all() for p in member.parameters())


def test_gradients_of_two_passes_are_added():
    """Labelled and unlabelled inputs are two passes of a step."""
    x, y = data()
    objective = partial(ds.objectives.a2d, strength=1.0)
    build = NETWORKS["float32 and float64"]
    mixed, _, _ = fitted(build, objective, (x, y.argmax(-1)), unlabelled=x.flip(1), optimizer="sgd", lr=0.05)
    double = ds.Ensemble(build, M, 3, "loop").double()
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "optimizer": "sgd", "lr": 0.05}
    ds.fit(double, (x.double(), y.argmax(-1)), objective, unlabelled=x.flip(1).double(), **settings)
    for i in range(M):
        for a, b in zip(mixed.member(i).parameters(), double.member(i).parameters(), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


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


@pytest.mark.parametrize(
    "extra",
    [{}, {"ema": 0.9, "accumulate": 2}, {"optimizer": partial(torch.optim.NAdam, lr=0.01), "lr": None}],
    ids=["plain", "averages", "own"],
)
def test_an_interrupted_training_resumes_exactly(extra, tmp_path):
    build, options = NETWORKS["bfloat16 and float32"], {"validation": 0.25, "batch_size": 16, **extra}
    expected, _, _ = fitted(build, Interrupting(10**9), **options)
    saving = {"checkpoint": tmp_path, "checkpoint_seconds": 0.0, **options}
    with pytest.raises(Interrupted):
        fitted(build, Interrupting(17), **saving)
    resumed, _, _ = fitted(build, Interrupting(10**9), resume=True, **saving)
    for i in range(M):
        assert_close(resumed.member(i), expected.member(i), exact=True)


def test_a_sweep_trains_every_run_as_a_fit_does():
    build, (x, y) = NETWORKS["bfloat16 and float32"], data()
    shared = {
        "epochs": 6,
        "batch_size": BATCH,
        "optimizer": "adamw",
        "backend": "loop",
        "validation": 0.25,
        "patience": 2,
    }
    grid = {"lr": [0.003, 0.03], "seed": [0, 1]}
    options = {"members": M, "grid": grid, **shared}
    result = ds.sweep(build, (x, y), squared, **options)
    shared.pop("backend")
    for run in range(4):
        point = result.points[run]
        ensemble = ds.Ensemble(build, M, point["seed"], "loop")
        ds.fit(ensemble, (x, y), squared, lr=point["lr"], seed=point["seed"], **shared)
        for i in range(M):
            assert_close(result.run(run).member(i), ensemble.member(i))


def test_saved_weights_keep_their_dtypes(tmp_path):
    build = NETWORKS["bfloat16 and float32"]
    ensemble, _, _ = fitted(build)
    ensemble.save(tmp_path)
    loaded = ds.Ensemble.load(tmp_path, build)
    x, _ = data()
    assert torch.allclose(loaded.predict(x), ensemble.predict(x))
    for i in range(M):
        assert_close(loaded.member(i), ensemble.member(i), exact=True)
        assert all(p.is_contiguous() for p in ensemble.member(i).parameters())
    assert {p.dtype for p in ensemble.soup().parameters()} == {torch.bfloat16, torch.float32}
    again, _, _ = fitted(build)
    ds.fit(again, data(), squared, epochs=1, optimizer="sgd", lr=0.01)
    assert moved(again.member(0), ensemble.member(0)) > 0


def test_what_several_dtypes_do_not_go_with_is_refused_before_training(unchecked):
    build = NETWORKS["bfloat16 and float32"]
    ensemble = ds.Ensemble(build, M)
    before = [p.detach().clone() for p in ensemble.parameters()]
    cases = [
        (
            ValueError,
            r"an optimizer other than 'muon' for parameters of several dtypes.*Use 'adamw'",
            {"optimizer": "muon"},
        ),
        (ValueError, "be 'auto' for networks in bfloat16 and float32", {"precision": "bf16"}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            ds.fit(ensemble, data(), squared, epochs=1, **options)
    assert all(torch.equal(a, b) for a, b in zip(ensemble.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="float32, float64 or bfloat16 to be trained; got float16"):
        ds.fit(ds.Ensemble(partial(Halves, torch.float32, torch.float16), M), data(), squared, epochs=1)
    wider = nn.Sequential(build(), nn.Linear(3, 3))
    several = ds.Ensemble.from_modules([build(), wider])
    assert several(data()[0]).shape == (2, N, 3)
    with pytest.raises(TypeError, match=r"one dtype to be trained, where architectures differ.*with torch.optim"):
        ds.fit(several, data(), squared, epochs=1)

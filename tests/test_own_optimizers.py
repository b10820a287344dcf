"""Optimisers that users bring train members as separate trainings do."""

from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds

independent = partial(ds.objectives.independent, loss="squared_error")
M, N, BATCH, EPOCHS = 3, 24, 8, 3


def build():
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)
    ).double()


def data(n=N):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 2, generator=generator, dtype=torch.float64)


def separate(network, make, *, batch=BATCH, epochs=EPOCHS, factor=None, clip=None, steps=None, x=None, y=None):
    """An ordinary training of one network in the order of the data."""
    if x is None:
        x, y = data()
    network.train()
    optimizer = make(list(network.parameters()))
    scheduler = None if factor is None else torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if hasattr(optimizer, "train"):
        optimizer.train()
    done = 0
    for _ in range(epochs):
        for part, target in zip(x.split(batch), y.split(batch), strict=True):
            if done == steps:
                break
            optimizer.zero_grad()
            (network(part) - target).square().sum(-1).mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            done += 1
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return network


def assert_members_equal(ensemble, expected, rtol=1e-9, atol=1e-11):
    for i, network in enumerate(expected):
        torch.testing.assert_close(
            dict(ensemble.member(i).named_parameters()), dict(network.named_parameters()), rtol=rtol, atol=atol
        )


def fitted(ensemble, optimizer, **options):
    options = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "deterministic": True, **options}
    return ds.fit(ensemble, data(), independent, optimizer=optimizer, **options)


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020), whose step of a layer is scaled by the norms of that layer."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].lerp_(p.grad.square(), 1 - second)
                mean = state["m"] / (1 - first ** state["step"])
                update = mean / ((state["v"] / (1 - second ** state["step"])).sqrt() + 1e-6) + group["weight_decay"] * p
                ratio = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
                p.sub_(group["lr"] * ratio * update)


class Averaging(torch.optim.SGD):
    """SGD that evaluates the mean of its weights, in the manner of schedule-free optimisers."""

    training = False

    @torch.no_grad()
    def train(self):
        self._swap(True)

    @torch.no_grad()
    def eval(self):
        self._swap(False)

    def _swap(self, training):
        for group in self.param_groups:
            for p in group["params"] if group.get("mode", False) != training else []:
                state = self.state[p]
                if "mean" in state:
                    kept = p.clone()
                    p.copy_(state["mean"])
                    state["mean"].copy_(kept)
            group["mode"] = training

    def step(self, closure=None):
        assert self.param_groups[0]["mode"], "in training mode"
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state.setdefault("mean", torch.zeros_like(p))
                    state["count"] = state.get("count", 0) + 1
                    state["mean"].lerp_(p, 1 / state["count"])


def schedule_free(params):
    schedulefree = pytest.importorskip("schedulefree")
    return schedulefree.AdamWScheduleFree(params, lr=0.01, weight_decay=0.05)


def groups(params):
    """Parameter groups with rates of their own."""
    matrices = [p for p in params if p.ndim == 2]
    return torch.optim.SGD([{"params": matrices, "lr": 0.1}, {"params": [p for p in params if p.ndim < 2]}], lr=0.01)


OPTIMIZERS = {
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.003),
    "class": torch.optim.Adagrad,
    "lamb": Lamb,
    "groups": groups,
    "modes": partial(Averaging, lr=0.1),
    "schedule-free": schedule_free,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_equals_separate_trainings(name):
    ensemble = ds.Ensemble(build, M, seed=3)
    expected = [separate(ensemble.member(i), OPTIMIZERS[name]) for i in range(M)]
    before = ensemble.member(0)
    history = fitted(ensemble, OPTIMIZERS[name])
    assert_members_equal(ensemble, expected)
    assert not torch.equal(before[0].weight, ensemble.member(0)[0].weight)
    assert history.optimizer.endswith("one per member in a loop")
    assert history.steps == EPOCHS * 3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
def test_torchs_muon_gets_matrices_in_their_own_shapes():
    def matrices(params):
        return torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)

    ensemble = ds.Ensemble(build, M)
    expected = [separate(ensemble.member(i), matrices) for i in range(M)]
    fitted(ensemble, matrices)
    assert_members_equal(ensemble, expected)


def test_schedules_and_clipping_reach_every_group():
    def decreasing(epoch, epochs):
        return 1 - epoch / epochs

    ensemble = ds.Ensemble(build, M)
    total = EPOCHS * 3
    expected = [separate(ensemble.member(i), groups, factor=lambda s: 1 - s / total, clip=0.3) for i in range(M)]
    history = fitted(ensemble, groups, schedule=decreasing, clip_norm=0.3)
    assert_members_equal(ensemble, expected)
    assert history.column("lr") == pytest.approx([0.1 * (1 - s / total) for s in (2, 5, 8)])


def test_named_parameters_are_passed_on_request():
    seen = []

    def decayed_by_name(named_parameters):
        seen.append([name for name, _ in named_parameters])
        return torch.optim.SGD([p for name, p in named_parameters if name.endswith("weight")], lr=0.1)

    ensemble = ds.Ensemble(build, 2)
    before = ensemble.member(1)
    fitted(ensemble, decayed_by_name)
    assert seen[0] == [name for name, _ in before.named_parameters()]
    after = ensemble.member(1)
    assert torch.equal(before[0].bias, after[0].bias)
    assert not torch.equal(before[0].weight, after[0].weight)


def test_members_that_rest_or_are_not_drawn_do_not_step():
    ensemble = ds.Ensemble(build, M)
    frozen, expected = ensemble.member(1), separate(ensemble.member(2), OPTIMIZERS["modes"])
    fitted(ensemble, OPTIMIZERS["modes"], frozen=[1])
    assert_members_equal(ensemble.subset([1]), [frozen], rtol=0, atol=0)
    assert_members_equal(ensemble.subset([2]), [expected])
    stacked, own = ds.Ensemble(build, 4), ds.Ensemble(build, 4)
    options = {"active_members": 2, "clip_norm": 0.5}
    fitted(stacked, "adam", lr=0.01, **options)
    fitted(own, partial(torch.optim.Adam, lr=0.01), **options)
    assert_members_equal(own, [stacked.member(i) for i in range(4)])


def test_a_sweep_has_an_optimizer_for_every_row():
    grid = {"seed": [0, 1, 2], "clip_norm": [0.2, 5.0]}
    options = {"members": 2, "epochs": 12, "batch_size": BATCH, "validation": 0.25, "patience": 1}
    swept = ds.sweep(build, data(), independent, grid=grid, optimizer=OPTIMIZERS["modes"], **options)
    ends = []
    for i, point in enumerate(swept.points):
        alone = ds.Ensemble(build, 2, seed=point["seed"])
        options_of_fit = {key: value for key, value in options.items() if key != "members"}
        history = ds.fit(alone, data(), independent, optimizer=OPTIMIZERS["modes"], **point, **options_of_fit)
        ends.append(len(history.epochs))
        assert swept.history(i).best_epoch == history.best_epoch
        assert_members_equal(swept.run(i), [alone.member(m) for m in range(2)])
    assert len(set(ends)) > 1, "runs ended at different times"


class Interrupted(Exception):
    pass


def interrupting(step):
    def progress(moment):
        if moment.step >= step:
            raise Interrupted

    return progress


def assert_resumes_equal(tmp_path, monkeypatch, step=5, **options):
    """A training that is interrupted within an epoch goes on as if it had not been."""
    monkeypatch.setattr("dissensus.train.engine._SECONDS_BETWEEN_REPORTS", 0.0)
    options = {"epochs": 4, "batch_size": 5, "checkpoint_seconds": 0.0, "deterministic": True, **options}
    whole = ds.Ensemble(build, M)
    ds.fit(whole, data(), independent, checkpoint=tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        ds.fit(
            ds.Ensemble(build, M),
            data(),
            independent,
            checkpoint=tmp_path / "parts",
            progress=interrupting(step),
            **options,
        )
    resumed = ds.Ensemble(build, M)
    ds.fit(resumed, data(), independent, checkpoint=tmp_path / "parts", resume=True, **options)
    for name, tensor in whole.body.tensors().items():
        assert torch.equal(resumed.body.tensors()[name], tensor), name
    again = ds.Ensemble(build, M)
    ds.fit(again, data(), independent, checkpoint=tmp_path / "parts", resume=True, **options)
    for name, tensor in whole.body.tensors().items():
        assert torch.equal(again.body.tensors()[name], tensor), name


@pytest.mark.parametrize("name", ["nadam", "lamb", "modes", "schedule-free"])
def test_states_of_own_optimizers_resume_to_the_bit(name, tmp_path, monkeypatch):
    assert_resumes_equal(tmp_path, monkeypatch, step=7, optimizer=OPTIMIZERS[name], validation=0.2)


class WideState(torch.optim.SGD):
    """Keeps a state in another precision than the weights'."""

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p, dtype=torch.float32))
                state["sum"] += p.grad.float() / 3
                p.sub_(0.01 * state["sum"].double() + 0.01 * p.grad)


def test_states_of_another_precision_resume_to_the_bit(tmp_path, monkeypatch):
    assert_resumes_equal(tmp_path, monkeypatch, optimizer=partial(WideState, lr=0.1))


class Opaque(torch.optim.SGD):
    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["thing"] = object()
        super().step()


class Beside(torch.optim.SGD):
    counted = 0

    def step(self, closure=None):
        self.counted = self.counted + 1
        super().step()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counted = 0


def needing(params):
    class Needing(torch.optim.SGD):
        def step(self, closure=None):
            assert closure is not None, "a closure"

    return Needing(params, lr=0.1)


class Demanding(torch.optim.SGD):
    """It needs a learning rate."""

    def __init__(self, params, lr):
        super().__init__(params, lr)


shared = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def growing(params):
    """One optimizer for all members, which gets their parameters one after another."""
    shared.add_param_group({"params": params})
    return shared


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (shared, {}, r"`optimizer` must be a name \('sgd', .*\) or a callable; got a SGD that was made already. Each"),
        (None, {}, "`optimizer` must be a name .* or a callable; got None"),
        (0.1, {}, "`optimizer` must be a name .* or a callable; got 0.1"),
        (Demanding, {}, "from a list of parameters alone; got Demanding, which failed .*'lr'.*functools.partial"),
        (lambda: None, {}, "got <lambda>, which failed .TypeError"),
        (lambda params: torch.optim.SGD([], lr=0.1), {}, "which failed .ValueError: optimizer got an empty parameter"),
        (lambda params: 1 / 0, {}, "got <lambda>, which failed .ZeroDivisionError: division by zero"),
        (lambda params: torch.optim.LBFGS(params), {}, "got LBFGS, which needs one"),
        (torch.optim.SparseAdam, {}, "got SparseAdam, whose first step failed"),
        (growing, {}, "`optimizer` must hold only the parameters that it was given; got others as well"),
        (lambda params: shared, {}, "`optimizer` must hold only the parameters that it was given"),
        ("lin", {}, "Did you mean 'lion'"),
        ("Adam", {}, "Did you mean 'adam'"),
        ("adamw", {"accumulate": True}, "`accumulate` must be"),
        ("adamw", {"accumulate": 1.5}, "`accumulate` must be"),
        ("adamw", {"accumulate": -1}, "`accumulate` must be"),
        ("adamw", {"ema": 0}, "`ema` must be a number above 0 and below 1; got 0"),
        ("adamw", {"ema": -1}, "`ema` must be"),
        ("adamw", {"ema": float("nan")}, "`ema` must be"),
        ("adamw", {"ema": True}, "`ema` must be"),
        ("adamw", {"ema": "0.9"}, "`ema` must be"),
        ("adamw", {"no_decay": ["bias", 3], "weight_decay": 0.1}, "`no_decay` must be"),
        ("adamw", {"no_decay": None, "weight_decay": 0.1}, "`no_decay` must be"),
        ("lion", {"betas": (0.9, 1.0)}, "`betas` must be"),
        (torch.optim.LBFGS, {}, "`optimizer` must take steps without a closure; got LBFGS, which needs one"),
        (needing, {}, "got needing, whose first step failed"),
        (torch.optim.NAdam, {"lr": 1e-3}, "`lr` must be left out if `optimizer` is a callable"),
        (torch.optim.NAdam, {"weight_decay": 0.0}, "`weight_decay` must be left out"),
        (torch.optim.NAdam, {"no_decay": True}, "`no_decay` must be left out"),
        (torch.optim.NAdam, {"betas": (0.9, 0.99)}, "`betas` must be left out"),
        (lambda params: params, {}, "`optimizer` must return an optimizer"),
        (lambda params: torch.optim.SGD, {}, "`optimizer` must return an optimizer"),
        (
            lambda params: torch.optim.SGD([nn.Parameter(torch.ones(1))]),
            {},
            "hold only the parameters that it was given",
        ),
        (Averaging, {"ema": 0.9}, "`ema` must come without an optimizer that has modes"),
        (Opaque, {"checkpoint": "folder"}, "got Opaque, whose state holds a object"),
        (Beside, {"checkpoint": "folder"}, "got Beside, which changes `counted`"),
        (lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1)), {"lr": 0.1}, "`lr` must be left out"),
        ("adamm", {}, "`optimizer` must be one of"),
        ("adamw", {"accumulate": 0}, "`accumulate` must be"),
        ("adamw", {"accumulate": 2, "active_members": 2}, "`accumulate` must come without `active_members`"),
        ("adamw", {"ema": 1.0}, "`ema` must be"),
        ("adamw", {"recompute": 1}, "`recompute` must be"),
        ("adamw", {"no_decay": True}, "`no_decay` must come with a `weight_decay`"),
        ("adamw", {"no_decay": ["nrom"], "weight_decay": 0.1}, "got 'nrom'. There are: 0.weight, 0.bias, 1.weight"),
        ("adamw", {"no_decay": "bias", "weight_decay": 0.1}, r"One pattern\? Use \['bias'\]"),
    ],
)
def test_what_cannot_train_is_refused_before_training(optimizer, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ensemble = ds.Ensemble(build, M)
    before = {name: tensor.clone() for name, tensor in ensemble.body.tensors().items()}
    with pytest.raises((ValueError, TypeError), match=message):
        fitted(ensemble, optimizer, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ensemble.body.tensors().items())


def test_a_grid_of_rates_is_refused_beside_a_callable():
    with pytest.raises(ValueError, match="`lr` must be left out"):
        ds.sweep(build, data(), independent, grid={"lr": [0.1, 0.2]}, optimizer=torch.optim.SGD, epochs=1)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    fitted(ds.Ensemble(build, M), OPTIMIZERS["nadam"], checkpoint=tmp_path)
    other = partial(torch.optim.NAdam, lr=0.02)
    with pytest.raises(ValueError, match="'optimizer' differ"):
        fitted(ds.Ensemble(build, M), other, checkpoint=tmp_path, resume=True)


def test_members_of_different_architectures_take_own_optimizers_and_averages():
    def other():
        return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()

    torch.manual_seed(0)
    networks = [build(), other()]
    ensemble = ds.Ensemble.from_modules(networks)
    expected = [separate(ensemble.member(i), Lamb) for i in range(2)]
    fitted(ensemble, Lamb)
    assert_members_equal(ensemble, expected)

    def decayed(params):
        norms = [p for p in params if p.ndim < 2]
        return torch.optim.SGD(
            [{"params": norms, "weight_decay": 0.0}, {"params": [p for p in params if p.ndim > 1]}],
            lr=0.1,
            weight_decay=0.3,
        )

    ensemble = ds.Ensemble.from_modules(networks)
    expected = [separate(ensemble.member(i), decayed) for i in range(2)]
    fitted(ensemble, "sgd", lr=0.1, weight_decay=0.3, no_decay=True, recompute=True)
    assert_members_equal(ensemble, expected)


def test_each_architecture_is_tried():
    def matrices(params):
        class Picky(torch.optim.SGD):
            def step(self, closure=None):
                assert self.param_groups[0]["params"][0].shape[0] == 6, "rows"
                super().step()

        return Picky(params, lr=0.1)

    torch.manual_seed(0)
    ensemble = ds.Ensemble.from_modules([build(), nn.Sequential(nn.Linear(4, 2)).double()])
    with pytest.raises(ValueError, match="got matrices, whose first step failed .rows"):
        fitted(ensemble, matrices)


def test_a_rate_that_is_a_tensor_belongs_to_each_member_and_stays_what_it_is():
    rate = torch.tensor(0.1, dtype=torch.float64)

    def make(params):
        optimizer = torch.optim.SGD(params[:1], lr=rate)
        optimizer.add_param_group({"params": params[1:], "lr": 0.01})
        return optimizer

    total = EPOCHS * 3
    ensemble = ds.Ensemble(build, M)
    expected = [
        separate(ensemble.member(i), lambda params: groups_of(params, 0.1), factor=lambda s: 1 - s / total)
        for i in range(M)
    ]
    for _ in range(2):  # a second training begins with the same rate
        ensemble = ds.Ensemble(build, M)
        fitted(ensemble, make, schedule=lambda epoch, epochs: 1 - epoch / epochs)
        assert_members_equal(ensemble, expected)
    assert rate == 0.1


def groups_of(params, rate):
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.01}], lr=rate)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): steps are taken at z, gradients at y, and x is evaluated."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] else []:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            for p in group["params"] if not group["train_mode"] else []:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"])
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


free = partial(ScheduleFree, lr=0.1)


def test_schedule_free_optimizers_equal_separate_trainings_and_are_evaluated_at_their_averages():
    ensemble = ds.Ensemble(build, M)
    start = [ensemble.member(i) for i in range(M)]
    x, y = data()
    held_out = (x.flip(0), y)
    history = fitted(ensemble, free, validation=held_out, keep="last")
    # Each epoch ends in evaluation mode, as where one measures by hand.
    for epochs, measured in enumerate(history.column("validation"), 1):
        networks = [ds.Ensemble.from_modules([network]).member(0) for network in start]
        expected = [separate(network, free, epochs=epochs) for network in networks]
        with torch.no_grad():
            mean = torch.stack([network(held_out[0]) for network in expected]).mean(0)
        assert measured == pytest.approx(float((mean - y).square().sum(-1).mean()))
    assert_members_equal(ensemble, expected)


@pytest.mark.parametrize("step", [4, 7])
def test_schedule_free_optimizers_resume_to_the_bit(step, tmp_path, monkeypatch):
    assert_resumes_equal(tmp_path, monkeypatch, step=step, optimizer=free, validation=0.2, accumulate=2)


def test_members_that_converge_stand_still_with_the_weights_to_evaluate():
    """So validation data changes nothing, for optimizers with modes either."""
    results = []
    for options in ({}, {"validation": data(), "keep": "last"}):
        ensemble = ds.Ensemble(build, M)
        augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score", beta=0.9)
        rule = ds.train.Convergence(patience=1, tolerance=0.3)
        history = ds.fit(
            ensemble, data(), augmented, epochs=8, batch_size=BATCH, optimizer=free, freeze=rule, **options
        )
        results.append(ensemble)
        assert any(history.frozen_at)
    assert_members_equal(results[1], [results[0].member(i) for i in range(M)])


def test_what_is_a_loop_is_told(caplog):
    with caplog.at_level("INFO", "dissensus"):
        history = fitted(ds.Ensemble(build, M), lambda params: torch.optim.RMSprop(params, lr=0.003))
    assert "optimizer RMSprop: one per member, stepped in a loop; passes stay stacked" in caplog.text
    assert history.optimizer == "RMSprop, one per member in a loop"

"""Gradients of several batches per update, averaged weights, and recomputed activations equal trainings by hand."""

import copy
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from recording import Captures, recorded
from test_own_optimizers import assert_resumes_equal
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dissensus as ds
from dissensus.train import capture, memory
from dissensus.train.averaging import WeightAverage

independent = partial(ds.objectives.independent, loss="squared_error")
augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score", beta=0.8)
cross_entropy = partial(ds.objectives.independent, loss="cross_entropy")
M, N = 3, 26
SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9}


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def normed():
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def data(n=N):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 2, generator=generator, dtype=torch.float64)


def labelled(n=N):
    x, y = data(n)
    return x, (y[:, 0] > 0).long()


def fitted(build=mlp, *, train=None, objective=independent, members=M, seed=0, **options):
    ensemble = ds.Ensemble(build, members, seed=seed)
    options = {"epochs": 4, "batch_size": 8, **SGD, **options}
    history = ds.fit(ensemble, data() if train is None else train, objective, **options)
    return ensemble, history


def tensors(ensemble):
    """Weights and buffers, without the keys and counters of dropout."""
    return {n: t.detach() for n, t in ensemble.body.tensors().items() if "dropout" not in n}


def assert_equal(ensemble, expected, rtol=1e-9, atol=1e-11):
    torch.testing.assert_close(tensors(ensemble), tensors(expected), rtol=rtol, atol=atol)


# Accumulation: 26 examples are batches of 8, 8, 8, 2; or, two at a time, batches of 16 and 10.


def gentle(epoch, epochs):
    return 1 - epoch / epochs / 2


WEIGHTS = torch.rand(N, generator=torch.Generator().manual_seed(2)) + 0.1
LARGE = {
    "plain": {},
    "schedule and clipping": {"schedule": gentle, "clip_norm": 0.3},
    "weights": {"weights": WEIGHTS},
    "class weights": {"train": labelled(), "objective": cross_entropy, "class_weights": [0.3, 2.0]},
    "ignored labels": {
        "train": (labelled()[0], labelled()[1].where(torch.arange(N) % 5 > 0, -100)),
        "objective": cross_entropy,
        "ignore_index": -100,
    },
    "bagging": {"bootstrap": True},
    "bagging and weights": {"bootstrap": True, "weights": WEIGHTS},
    "unlabelled": {
        "train": labelled(32),
        "objective": partial(ds.objectives.a2d, strength=0.5),
        "unlabelled": data(32)[0].flip(0),
    },
    "attacks": {
        "train": (labelled()[0].sigmoid(), labelled()[1]),
        "objective": cross_entropy,
        "adversarial": ds.train.AdversarialTraining(epsilon=0.1, steps=2, share=1.0, random_start=False),
    },
    "groups of members": {"objective": augmented},
    "frozen": {"frozen": [1], "objective": augmented},
    "drop last": {"drop_last": True, "train": data(38)},
    "own optimizer": {"optimizer": partial(torch.optim.NAdam, lr=0.01), "lr": None, "momentum": None},
    "averaged": {"ema": 0.7, "validation": (data()[0].flip(0), data()[1])},
}


@pytest.mark.parametrize("way", LARGE)
def test_accumulated_batches_equal_large_ones(way, monkeypatch):
    if way == "groups of members":
        monkeypatch.setattr(memory.Needs, "at_once", lambda needs, budget: 2)
    options = {"shuffle": False, **LARGE[way]}
    accumulated, history = fitted(accumulate=2, **options)
    large, other = fitted(batch_size=16, **options)
    assert_equal(accumulated, large)
    for losses, wanted in zip(history.column("member_loss"), other.column("member_loss"), strict=True):
        assert losses == pytest.approx(wanted)
    assert history.steps == 16
    if way == "groups of members":
        assert history.memory.startswith("2 of 3 members at once")
    plain, _ = fitted(**options)
    with pytest.raises(AssertionError):
        assert_equal(plain, large)


def test_accumulation_shuffles_as_large_batches_do_and_counts_updates_for_the_schedule():
    accumulated, history = fitted(accumulate=3, batch_size=4, schedule="cosine")
    large, other = fitted(batch_size=12, schedule="cosine")
    assert_equal(accumulated, large)
    assert history.column("lr") == pytest.approx(other.column("lr"))


def test_accumulation_of_a_whole_epoch_and_of_sources_of_batches():
    x, y = data()
    batches = [(x[:3], y[:3]), (x[3:13], y[3:13]), (x[13:14], y[13:14]), (x[14:], y[14:])]
    accumulated, _ = fitted(train=batches, accumulate=9)
    large, _ = fitted(batch_size=N, shuffle=False)
    assert_equal(accumulated, large)
    streamed, history = fitted(train=iter(batches * 4), accumulate=3, steps_per_epoch=4)
    by_hand, _ = fitted(train=[(x[:14], y[:14]), (x[14:], y[14:])])
    assert_equal(streamed, by_hand)
    assert history.steps == 16


def test_accumulation_in_a_sweep_equals_fits():
    options = {"epochs": 6, "batch_size": 4, "accumulate": 3, "ema": 0.6, "validation": 0.3, "patience": 1, **SGD}
    swept = ds.sweep(normed, data(), independent, members=2, grid={"lr": [0.02, 0.3], "seed": [0, 1]}, **options)
    ends = set()
    for i, point in enumerate(swept.points):
        alone = ds.Ensemble(normed, 2, seed=point["seed"])
        history = ds.fit(alone, data(), independent, **{**options, **point})
        assert swept.history(i).best_epoch == history.best_epoch
        ends.add(len(history.epochs))
        assert_equal(swept.run(i), alone)
    assert len(ends) > 1, "runs ended at different times"


# Averages of weights.


def averaged_by_hand(network, decay, *, epochs=4, batch=8):
    """torch's averages of one network that is trained by SGD in the order of the data, after every epoch."""
    x, y = data()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    kept = []
    for _ in range(epochs):
        network.train()
        for part, target in zip(x.split(batch), y.split(batch), strict=True):
            optimizer.zero_grad()
            (network(part) - target).square().sum(-1).mean().backward()
            optimizer.step()
            average.update_parameters(network)
        kept.append(copy.deepcopy(average.module).eval())
    return kept


def test_averages_equal_those_of_torch_with_buffers_and_are_evaluated():
    ensemble = ds.Ensemble(normed, M)
    before = [ensemble.member(i) for i in range(M)]
    expected = [averaged_by_hand(copy.deepcopy(network), 0.9) for network in before]
    x, y = data()
    held_out = (x + 0.3, y)
    ensemble, history = fitted(normed, shuffle=False, ema=0.9, validation=held_out, keep="last")
    last = [networks[-1] for networks in expected]
    for i, network in enumerate(last):
        actual = {n: t for n, t in ensemble.member(i).state_dict().items() if "num_batches" not in n}
        wanted = {n: t for n, t in network.state_dict().items() if "num_batches" not in n}
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11)
    measured = []
    for epoch in range(4):
        with torch.no_grad():
            mean = torch.stack([networks[epoch](held_out[0]) for networks in expected]).mean(0)
        measured.append(float((mean - y).square().sum(-1).mean()))
    assert history.column("validation") == pytest.approx(measured)


def test_best_weights_are_averages_of_the_best_epoch():
    x, y = data()
    held_out = (x.flip(0), y)
    ensemble, history = fitted(normed, shuffle=False, ema=0.6, lr=0.05, epochs=12, validation=held_out, patience=3)
    assert 1 <= history.best_epoch < len(history.epochs)
    start = ds.Ensemble(normed, M)
    for i in range(M):
        network = averaged_by_hand(start.member(i), 0.6, epochs=history.best_epoch)[-1]
        actual = {n: t for n, t in ensemble.member(i).state_dict().items() if "num_batches" not in n}
        wanted = {n: t for n, t in network.state_dict().items() if "num_batches" not in n}
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11)


def test_averages_do_not_change_what_is_trained():
    """Validation puts the trained weights back."""
    seen = []

    def noting(outputs, targets):
        seen.append(outputs.detach().clone())
        return ds.LossParts(independent(outputs, targets).total, {})

    for ema in (None, 0.5):
        fitted(normed, objective=noting, ema=ema, validation=data(), metric=pooled_error, mode="min")
    half = len(seen) // 2
    for first, second in zip(seen[:half], seen[half:], strict=True):
        assert torch.equal(first, second)


def pooled_error(outputs, targets):
    return (outputs.mean(0) - targets).square().mean()


def test_members_that_rest_have_the_averages_of_their_own_updates():
    ensemble = ds.Ensemble(normed, 4)
    frozen = ensemble.member(1)
    fitted_by = partial(ds.fit, data=data(), objective=independent, epochs=3, batch_size=8, **SGD)
    fitted_by(ensemble, ema=0.8, frozen=[1])
    for name, tensor in ensemble.member(1).state_dict().items():
        assert torch.equal(tensor, frozen.state_dict()[name]), name
    drawn = ds.Ensemble(mlp, 4)
    fitted_by(drawn, ema=0.8, active_members=2)
    own = ds.Ensemble(mlp, 4)
    fitted_by(own, active_members=2, optimizer=partial(Averaging, lr=0.05), lr=None, momentum=None)
    assert_equal(drawn, own)


class Averaging(torch.optim.SGD):
    """SGD with momentum that keeps the average of its own steps, and evaluates it."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.9)

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            with torch.no_grad():
                state = self.state[p]
                state["mean"] = 0.8 * state["mean"] + 0.2 * p if "mean" in state else p.clone()

    def train(self):
        for p, state in self.state.items():
            p.data.copy_(state["trained"])

    def eval(self):
        for p, state in self.state.items():
            state["trained"] = p.detach().clone()
            p.data.copy_(state["mean"])


class Causal(nn.Module):
    """A network with a mask of infinities among its buffers."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.double()

    def forward(self, x):
        weights = (self.mask + self.layer.weight).softmax(-1)
        return self.head(self.norm(self.layer(x)) @ weights.T)


def test_infinities_of_a_mask_stay_what_they_are():
    ensemble, _ = fitted(Causal, ema=0.9)
    assert torch.equal(tensors(ensemble)["mask"][0], Causal().mask)
    assert all(tensor.isfinite().all() for name, tensor in tensors(ensemble).items() if name != "mask")


def test_averages_of_low_precision_weights_move():
    """In bfloat16 an average would not move by a thousandth of a difference."""
    body = ds.Ensemble(lambda: nn.Linear(2, 1).bfloat16(), 2).body
    flat = body.packed().fill_(1.0)
    average = WeightAverage(0.999, body, flat)
    everyone = torch.ones(2, dtype=torch.bool)
    average.update(flat, everyone)
    flat.fill_(2.0)
    for _ in range(200):
        average.update(flat, everyone)
    average.adopt(flat, torch.tensor([True, False]))
    expected = torch.tensor([[2 - 0.999**200], [2.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(flat, expected.expand_as(flat))


def test_a_run_that_fails_keeps_finite_averages():
    x, y = data()

    def exploding(outputs, targets, *, lr_like=0.0):
        parts = independent(outputs, targets)
        return ds.LossParts(parts.total * (1 + lr_like * 1e300 * 1e300), parts.parts)

    swept = ds.sweep(
        normed,
        (x, y),
        exploding,
        members=2,
        grid={"lr_like": [0.0, 1.0]},
        epochs=2,
        batch_size=8,
        ema=0.9,
        accumulate=2,
        **SGD,
    )
    assert [row["status"] for row in swept.table(frame=False)] == ["done", "failed"]
    assert all(bool(t.isfinite().all()) for t in tensors(swept.run(1)).values())
    alone = ds.Ensemble(normed, 2)
    ds.fit(alone, (x, y), independent, epochs=2, batch_size=8, ema=0.9, accumulate=2, **SGD)
    assert_equal(swept.run(0), alone)


# Checkpoints: training goes on to the bit, in the middle of an accumulation too.


@pytest.mark.parametrize("step", [5, 7, 8])
def test_averages_and_half_an_update_are_resumed(step, tmp_path, monkeypatch):
    options = {"ema": 0.9, "accumulate": 3, "validation": 0.2, "schedule": "cosine", "weight_decay": 0.1}
    assert_resumes_equal(tmp_path, monkeypatch, step=step, optimizer="adamw", no_decay=True, **options)


@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_states_of_lion_and_muon_are_resumed(optimizer, tmp_path, monkeypatch):
    assert_resumes_equal(tmp_path, monkeypatch, step=6, optimizer=optimizer, lr=0.01, recompute=True)


def test_own_optimizers_are_resumed_in_the_middle_of_an_accumulation(tmp_path, monkeypatch):
    own = partial(torch.optim.NAdam, lr=0.01)
    assert_resumes_equal(tmp_path, monkeypatch, step=6, optimizer=own, accumulate=3, ema=0.5, schedule="cosine")


@pytest.mark.parametrize("name", ["accumulate", "ema", "recompute", "no_decay"])
def test_a_checkpoint_of_other_updates_is_refused(name, tmp_path):
    values = {"accumulate": (2, 3), "ema": (0.9, 0.99), "recompute": (False, True), "no_decay": (["*.bias"], False)}
    first, second = values[name]
    fitted(checkpoint=tmp_path, weight_decay=0.1, **{name: first})
    with pytest.raises(ValueError, match=f"'{name}' differ"):
        fitted(checkpoint=tmp_path, resume=True, weight_decay=0.1, **{name: second})


# Captured steps.


CAPTURED = {
    "accumulated": {"accumulate": 2, "bootstrap": True},
    "averaged": {"ema": 0.8, "validation": 0.2},
    "both": {"ema": 0.8, "accumulate": 3, "clip_norm": 0.5, "schedule": "cosine"},
    "drawn": {"ema": 0.8, "active_members": 2},
    "lion": {"optimizer": "lion", "momentum": None, "weight_decay": 0.1, "no_decay": True},
    "muon": {"optimizer": "muon", "weight_decay": 0.1, "no_decay": ["bias"], "frozen": [1]},
}


@pytest.mark.parametrize("way", CAPTURED)
def test_captured_steps_equal_eager_ones(way, monkeypatch):
    counts = Captures(partial(recorded, host_reads=True))  # weights of examples are checked on a CPU
    results = []
    for steps in (lambda engine: None, lambda engine: capture.GraphSteps(lambda: counts)):
        monkeypatch.setattr("dissensus.train.recipe.graph_steps", steps)
        results.append(fitted(normed, epochs=8, **CAPTURED[way]))
    assert counts.replays > 8
    assert_equal(results[1][0], results[0][0], rtol=1e-7, atol=1e-9)


def test_a_failure_in_captured_steps_leaves_finite_averages(monkeypatch):
    x, y = data()
    x, y = x.repeat(4, 1), y.repeat(4, 1)

    class Overflowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.double()

        def forward(self, x):
            return self.layer(self.norm(x.square()))

    x[90] = 1e200  # in a late batch
    counts = Captures()
    monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda engine: capture.GraphSteps(lambda: counts))
    swept = ds.sweep(
        Overflowing, (x, y), independent, members=2, grid={"lr": [0.01]}, epochs=2, batch_size=8, shuffle=False, ema=0.9
    )
    assert counts.replays > 4
    assert swept.table(frame=False)[0]["status"] == "failed"
    assert all(bool(t.isfinite().all()) for t in tensors(swept.run(0)).values())


# Recomputed activations.


class Dropping(nn.Module):
    """Dropout as a layer and as a function, batch norm, and blocks that may checkpoint themselves."""

    def __init__(self, own=False, reentrant=False):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(32, 2)
        self.own, self.reentrant = own, reentrant
        self.double()

    def forward(self, x):
        x = F.dropout(self.drop(self.norm(self.first(x)).relu()), 0.2, self.training)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant) if self.own else block(x)
        return self.last(x)


def noisy(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


RECOMPUTED = {
    "plain": {},
    "inputs per member": {"augment": [noisy] * M},
    "drawn": {"active_members": 2},
    "groups": {},
    "accumulated": {"accumulate": 2, "ema": 0.9},
    "unlabelled": {
        "train": labelled(),
        "objective": partial(ds.objectives.a2d, strength=0.5),
        "unlabelled": data()[0].flip(0),
    },
    "attacks": {
        "train": (labelled()[0].sigmoid(), labelled()[1]),
        "objective": cross_entropy,
        "adversarial": ds.train.AdversarialTraining(epsilon=0.1, steps=2),
    },
    "deterministic": {"deterministic": True, "validation": 0.3},
}


@pytest.mark.parametrize("own", [False, True], ids=["", "own"])
@pytest.mark.parametrize("way", RECOMPUTED)
def test_recomputed_activations_change_nothing(way, own, monkeypatch):
    if way == "groups":
        monkeypatch.setattr(memory.Needs, "at_once", lambda needs, budget: 2)
    options = {"objective": augmented, "epochs": 2, **RECOMPUTED[way]}
    kept, _ = fitted(Dropping, **options)
    recomputed, history = fitted(partial(Dropping, own), recompute=True, **options)
    assert_equal(recomputed, kept)
    assert history.backend == "loop, recomputed"
    assert recomputed.body.recompute is False, "the setting of one training"
    if way == "groups":
        assert history.memory.startswith("2 of 3 members at once")


def test_recomputed_members_of_different_architectures():
    def networks():
        torch.manual_seed(0)
        return [Dropping(), mlp(), Dropping(own=False)]

    results = []
    for recompute in (False, True):
        ensemble = ds.Ensemble.from_modules(networks())
        ds.fit(ensemble, data(), augmented, epochs=2, batch_size=8, recompute=recompute, **SGD)
        results.append(ensemble)
    assert_equal(results[1], results[0])


def test_recomputed_runs_of_a_sweep():
    options = {
        "members": 2,
        "epochs": 2,
        "batch_size": 8,
        "grid": {"lr": [0.01, 0.05], "seed": [0, 1]},
        "optimizer": "sgd",
    }
    kept = ds.sweep(Dropping, data(), augmented, **options)
    recomputed = ds.sweep(partial(Dropping, True), data(), augmented, recompute=True, **options)
    for i in range(4):
        assert_equal(recomputed.run(i), kept.run(i))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_networks_that_recompute_by_themselves_are_refused_otherwise():
    with pytest.raises(RuntimeError, match=r"use fit\(recompute=True\)"):
        fitted(partial(Dropping, True))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        fitted(partial(Dropping, True, True), recompute=True)


def test_recomputation_saves_the_memory_of_activations():
    """What autograd keeps between the passes is the inputs and the outputs, not what lies between."""
    ensemble = ds.Ensemble(Dropping, M)
    flat = ensemble.body.packed().requires_grad_()
    x = torch.randn(256, 4, dtype=torch.float64)
    ensemble.train()
    ensemble.body.backend = "loop"
    sizes = {}
    for recompute in (False, True):
        ensemble.body.recompute = recompute
        known = [x, flat, *ensemble.body.state().values()]
        sizes[recompute] = memory.saved_bytes(lambda: ensemble.body.run(flat, x), known)
    assert sizes[True] < sizes[False] / 10
    assert sizes[True] < 3 * M * 256 * 2 * 8, "a few times the outputs"

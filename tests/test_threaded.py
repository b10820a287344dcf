"""Members on threads: a training equals the loop's, and what threads cannot do is left to it."""

import functools
import logging
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dissensus as ds
from dissensus.dropout import KeyedDropout
from dissensus.execution.threads import cores, side_by_side

M, B = 3, 8
cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Residual(nn.Module):
    """Functions, methods and operations in place, as written in many networks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.pool, self.relu = nn.BatchNorm2d(4, momentum=None), nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.last = nn.Linear(4 * 9, 3)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        y = self.second(x)
        y += x
        y = self.pool(F.relu(self.pool(y)))
        return self.last(torch.cat([y, self.pool(self.pool(x))], 1).view(y.shape[0], -1)[:, :36])


def in_place_first():
    return nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3))


def grouped():
    layers = nn.Conv2d(1, 4, 3, stride=2, padding_mode="circular", padding=1), nn.GroupNorm(2, 4), nn.PReLU(4)
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


NETWORKS = {
    "blocks": functools.partial(ds.nets.cnn, 1, 3, 12, (3, 4), batch_norm=True, dropout=0.3),
    "residual": Residual,
    "in place first": in_place_first,
    "grouped": grouped,
}


def trained(build, backend, data, **settings):
    ens = ds.Ensemble(lambda: build().double(), M, backend=backend, seed=1)
    history = ds.fit(ens, data, cross_entropy, epochs=2, batch_size=B, **settings)
    return ens, history


def image_data(n=20):
    torch.manual_seed(0)
    return torch.randn(n, 1, 12, 12, dtype=torch.float64), torch.randint(0, 3, (n,))


@pytest.mark.parametrize("way", ["threads", "layerwise"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_training_equals_the_loop(network, way):
    x, y = image_data()
    before = x.clone()
    settings = {"validation": (x, y), "weight_decay": 0.1, "clip_norm": 1.0}
    (loop, expected), (threads, history) = (
        trained(NETWORKS[network], backend, (x, y), **settings) for backend in ("loop", way)
    )
    assert threads.body.ran == way
    tensors = threads.body.tensors()
    for name, tensor in loop.body.tensors().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(history.column("validation"), expected.column("validation"))
    torch.testing.assert_close(threads.predict(x), loop.predict(x))
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_augmentations_of_members_are_their_own():
    x, y = image_data()
    augment = [lambda x, generator, scale=scale: x * scale for scale in (1.0, 2.0, -1.0)]
    loop, threads = (trained(NETWORKS["blocks"], b, (x, y), augment=augment)[0] for b in ("loop", "threads"))
    torch.testing.assert_close(threads.predict(x), loop.predict(x))


def test_members_run_beside_each_other(monkeypatch):
    names = []
    original = KeyedDropout.forward

    def watched(self, x):
        names.append(threading.current_thread().name)
        return original(self, x)

    monkeypatch.setattr(KeyedDropout, "forward", watched)
    trained(NETWORKS["blocks"], "threads", image_data())
    assert any(name.startswith("dissensus") for name in names)


@pytest.mark.parametrize("inplace", [False, True])
def test_pooling_before_relu_changes_nothing(inplace):
    """Ties, windows without a positive number, and NaN."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (B, 1, 12, 12)).double()
    x[0, 0, 3, 3] = torch.nan

    def build():
        layer = nn.Conv2d(1, 2, 1)
        nn.init.constant_(layer.weight, 1.0)
        nn.init.constant_(layer.bias, -1.0)
        return nn.Sequential(layer, nn.ReLU(inplace), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Flatten()).double()

    results = []
    for backend in ("loop", "threads"):
        body = ds.Ensemble(build, M, backend=backend).body
        flat = body.packed().requires_grad_()
        outputs = body.run(flat, x)
        aim = torch.randn(outputs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert body.ran == backend
        results.append((outputs, torch.autograd.grad((outputs * aim)[:, 1:].sum(), flat)[0]))
    (expected, expected_grad), (outputs, grad) = results
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(grad, expected_grad, equal_nan=True)


@pytest.mark.parametrize("way", ["threads", "layerwise"])
def test_gradients_of_inputs_and_of_stacked_tensors_are_the_loops(way):
    x, _ = image_data(B)
    grads = []
    for backend in ("loop", way):
        ens = ds.Ensemble(lambda: NETWORKS["grouped"]().double(), M, backend=backend)
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *ens.parameters()]
        grads.append(torch.autograd.grad(ens(leaf).square().sum(), leaves, create_graph=True))
        torch.autograd.grad(grads[-1][0].square().sum(), leaf)
    torch.testing.assert_close(*grads)


class Hooked(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(144, 3))
        self[1].register_forward_hook(lambda *_: None)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(144, 3)

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.scale


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(144, 3)

    def forward(self, x):
        return self.layer(torch.rand_like(x.flatten(1)))


@pytest.mark.parametrize(("build", "reason"), [(Hooked, "Linear"), (Reads, "scale"), (Draws, "rand_like")])
def test_other_networks_run_in_a_loop(build, reason, caplog):
    x, _ = image_data(B)
    ens = ds.Ensemble(lambda: build().double(), M, backend="threads")
    with caplog.at_level(logging.WARNING, "dissensus"):
        ens(x)
    assert ens.body.ran == "loop"
    assert reason in caplog.text


def test_an_error_of_a_member_is_that_of_the_network():
    skeleton = ds.Ensemble(NETWORKS["blocks"], M).body.skeleton
    body = ds.Ensemble(NETWORKS["blocks"], M, backend="threads").body
    assert skeleton is not body.skeleton
    with pytest.raises(RuntimeError, match="size mismatch|shapes cannot be multiplied|expected input"):
        body.run(body.packed().requires_grad_(), torch.randn(B, 1, 20, 20))


def test_jobs_inside_of_jobs_run_in_turn_and_other_threads_keep_their_cores():
    assert side_by_side([lambda: cores(), lambda: cores()]) == [1, 1]
    assert side_by_side([lambda: (torch.randn(10**5).relu(), torch.get_num_threads())[1]] * 2) == [1, 1]
    assert cores() == 2
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]


def test_all_jobs_have_ended_when_one_has_failed():
    ended = threading.Event()

    def slow():
        threading.Event().wait(0.05)
        ended.set()

    def fails():
        raise ZeroDivisionError("of a job")

    with pytest.raises(ZeroDivisionError, match="of a job"):
        side_by_side([fails, slow])
    assert ended.is_set()


def test_one_core_and_one_member_run_in_turn():
    x, y = image_data()
    expected, _ = trained(NETWORKS["blocks"], "loop", (x, y))
    torch.set_num_threads(1)
    threads, _ = trained(NETWORKS["blocks"], "threads", (x, y))
    assert threads.body.ran == "threads"
    torch.testing.assert_close(threads.predict(x), expected.predict(x))
    body = ds.Ensemble(NETWORKS["blocks"], 1, backend="threads").body
    outputs = body.run(body.packed().requires_grad_(), torch.randn(B, 1, 12, 12))
    assert outputs.shape == (1, B, 3)


def test_auto_measures_threads_for_passes_that_they_have_a_way_for():
    x, y = image_data()
    ens = ds.Ensemble(NETWORKS["blocks"], M)
    ens(x.float())
    assert "threads" not in ens.choices[0].milliseconds, "gradients of stacked tensors are the loop's"
    ds.fit(ens, (x.float(), y), cross_entropy, epochs=1, batch_size=B)
    assert "threads" in ens.choices[-1].milliseconds
    with torch.no_grad():
        ens.eval()(x.float())
    assert "threads" in ens.choices[-1].milliseconds

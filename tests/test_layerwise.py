"""Members layer by layer: a training equals the loop's, and unknown networks are left to it."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dissensus as ds

M, B = 3, 8
cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")


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


@pytest.mark.parametrize("network", NETWORKS)
def test_a_training_equals_the_loop(network):
    x, y = image_data()
    before = x.clone()
    settings = {"validation": (x, y), "weight_decay": 0.1, "clip_norm": 1.0}
    (loop, expected), (layerwise, history) = (
        trained(NETWORKS[network], backend, (x, y), **settings) for backend in ("loop", "layerwise")
    )
    assert layerwise.body.ran == "layerwise"
    tensors = layerwise.body.tensors()
    for name, tensor in loop.body.tensors().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(history.column("validation"), expected.column("validation"))
    torch.testing.assert_close(layerwise.predict(x), loop.predict(x))
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_augmentations_of_members_are_their_own():
    x, y = image_data()
    augment = [lambda x, generator, scale=scale: x * scale for scale in (1.0, 2.0, -1.0)]
    loop, layerwise = (trained(NETWORKS["blocks"], b, (x, y), augment=augment)[0] for b in ("loop", "layerwise"))
    torch.testing.assert_close(layerwise.predict(x), loop.predict(x))


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
    for backend in ("loop", "layerwise"):
        body = ds.Ensemble(build, M, backend=backend).body
        flat = body.packed().requires_grad_()
        outputs = body.run(flat, x)
        aim = torch.randn(outputs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert body.ran == backend
        results.append((outputs, torch.autograd.grad((outputs * aim)[:, 1:].sum(), flat)[0]))
    (expected, expected_grad), (outputs, grad) = results
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(grad, expected_grad, equal_nan=True)


def test_gradients_of_inputs_and_of_stacked_tensors_are_the_loops():
    x, _ = image_data(B)
    grads = []
    for backend in ("loop", "layerwise"):
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


@pytest.mark.parametrize(("build", "reason"), [(Hooked, "hooks"), (Reads, "scale"), (Draws, "rand_like")])
def test_other_networks_run_in_a_loop(build, reason, caplog):
    x, _ = image_data(B)
    ens = ds.Ensemble(lambda: build().double(), M, backend="layerwise")
    with caplog.at_level(logging.WARNING, "dissensus"):
        ens(x)
    assert ens.body.ran == "loop"
    assert reason in caplog.text


def test_an_error_of_a_member_is_that_of_the_network():
    skeleton = ds.Ensemble(NETWORKS["blocks"], M).body.skeleton
    body = ds.Ensemble(NETWORKS["blocks"], M, backend="layerwise").body
    assert skeleton is not body.skeleton
    with pytest.raises(RuntimeError, match="size mismatch|shapes cannot be multiplied|expected input"):
        body.run(body.packed().requires_grad_(), torch.randn(B, 1, 20, 20))

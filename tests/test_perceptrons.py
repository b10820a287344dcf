"""Training passes of perceptrons on a CPU: outputs and gradients are those of separate modules."""

import copy
import functools
import gc

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.execution import perceptrons
from dissensus.execution.perceptrons import perceptron
from dissensus.execution.stacked import StackedMembers
from dissensus.execution.weights import Packed


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(perceptrons, "FEWEST", 0)


MEMBERS, BATCH = 5, 3


def networks(layers):
    torch.manual_seed(1)
    return [nn.Sequential(*(make() for make in layers)).double() for _ in range(MEMBERS)]


def passed(body, flat, x):
    network = perceptron(body.skeleton)
    assert network is not None
    weights = Packed(body.layout(), flat, None)
    assert network.takes(weights, x)
    return network.run(weights, x)


def gradient_of_modules(members, xs, aim):
    """Outputs and the row of gradients of each module, weights before biases, as the layout has them."""
    outputs, rows = [], []
    for module, x, own_aim in zip(members, xs, aim, strict=True):
        y = module(x)
        names = [name for name, _ in module.named_parameters()]
        order = sorted(names, key=lambda name: name.endswith("bias"))
        grads = dict(zip(names, torch.autograd.grad((y * own_aim).sum(), list(module.parameters())), strict=True))
        outputs.append(y.detach())
        rows.append(torch.cat([grads[name].flatten() for name in order]))
    return torch.stack(outputs), torch.stack(rows)


CHAINS = {
    "one layer": [lambda: nn.Linear(4, 2)],
    "one output": [lambda: nn.Linear(4, 6), nn.ReLU, lambda: nn.Linear(6, 1)],
    "deep": [
        lambda: nn.Linear(4, 6),
        nn.ReLU,
        lambda: nn.Linear(6, 1),
        nn.ReLU,
        lambda: nn.Linear(1, 7, bias=False),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Linear(7, 3),
    ],
    "flattened": [nn.Flatten, lambda: nn.Linear(4, 5), nn.ReLU, nn.Identity, lambda: nn.Linear(5, 2, bias=False)],
}


@pytest.mark.parametrize("block", [1, 40, 2**17])
@pytest.mark.parametrize("chain", CHAINS)
def test_outputs_and_gradients_are_those_of_separate_modules(chain, block, monkeypatch):
    monkeypatch.setattr(perceptrons, "BLOCK", block)
    members = networks(CHAINS[chain])
    shape = (2, 2) if chain == "flattened" else (4,)
    for shared in (True, False):
        x = torch.randn(BATCH, *shape, dtype=torch.float64)
        xs = x.expand(MEMBERS, *x.shape) if shared else torch.randn(MEMBERS, *x.shape, dtype=torch.float64)
        aim = torch.randn(MEMBERS, BATCH, members[0][-1].out_features, dtype=torch.float64)
        expected, expected_grad = gradient_of_modules(members, xs, aim)
        body = StackedMembers.of(copy.deepcopy(members))
        flat = body.packed().requires_grad_()
        outputs = passed(body, flat, xs)
        (grad,) = torch.autograd.grad((outputs * aim).sum(), flat)
        torch.testing.assert_close(outputs, expected)
        torch.testing.assert_close(grad, expected_grad)


def test_a_unit_at_zero_passes_no_gradient_and_nan_stays_nan():
    members = networks(CHAINS["one output"])
    for member in members:
        nn.init.zeros_(member[0].weight)
        nn.init.zeros_(member[0].bias)
    xs = torch.randn(MEMBERS, BATCH, 4, dtype=torch.float64)
    xs[1, 0, 2] = torch.nan
    aim = torch.ones(MEMBERS, BATCH, 1, dtype=torch.float64)
    expected, expected_grad = gradient_of_modules(members, xs, aim)
    body = StackedMembers.of(copy.deepcopy(members))
    flat = body.packed().requires_grad_()
    outputs = passed(body, flat, xs)
    torch.testing.assert_close(outputs, expected, equal_nan=True)
    torch.testing.assert_close(torch.autograd.grad(outputs.sum(), flat)[0], expected_grad, equal_nan=True)
    assert bool(outputs[1].isnan().any())
    assert not bool(outputs[0].isnan().any())


def test_memory_is_used_again_only_after_its_gradient():
    members = networks(CHAINS["deep"])
    body = StackedMembers.of(copy.deepcopy(members))
    flat = body.packed().requires_grad_()
    first, second = (torch.randn(MEMBERS, BATCH, 4, dtype=torch.float64) for _ in range(2))
    aim = torch.ones(MEMBERS, BATCH, 3, dtype=torch.float64)
    outputs = [passed(body, flat, x) for x in (first, second)]
    for x, output in zip((first, second), outputs, strict=True):
        expected = gradient_of_modules(members, x, aim)[1]
        for _ in range(2):  # a graph that is kept gives its gradient again
            (grad,) = torch.autograd.grad(output.sum(), flat, retain_graph=True)
            torch.testing.assert_close(grad, expected)
    del output
    outputs.clear()
    gc.collect()
    again = passed(body, flat, second)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), flat)[0], gradient_of_modules(members, second, aim)[1])


def test_the_gradient_of_the_step_before_lends_its_memory():
    body = StackedMembers.of(networks(CHAINS["one output"]))
    flat = body.packed().requires_grad_()
    x = torch.randn(MEMBERS, BATCH, 4, dtype=torch.float64)
    (grad,) = torch.autograd.grad(passed(body, flat, x).sum(), flat)
    expected, address = grad.clone(), grad.data_ptr()
    flat.grad = grad.fill_(torch.nan)
    (grad,) = torch.autograd.grad(passed(body, flat, x).sum(), flat)
    assert grad.data_ptr() == address
    assert flat.grad is None
    torch.testing.assert_close(grad, expected)


OTHERS = {
    "tanh": [lambda: nn.Linear(4, 6), nn.Tanh, lambda: nn.Linear(6, 1)],
    "two in a row": [lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 1)],
    "relu last": [lambda: nn.Linear(4, 6), nn.ReLU],
    "dropout": [lambda: nn.Linear(4, 6), nn.ReLU, lambda: nn.Dropout(0.5), lambda: nn.Linear(6, 1)],
    "flattened in part": [lambda: nn.Flatten(1, 2), lambda: nn.Linear(4, 6), nn.ReLU, lambda: nn.Linear(6, 1)],
    "large": [lambda: nn.Linear(4, 200), nn.ReLU, lambda: nn.Linear(200, 200)],
}


@pytest.mark.parametrize("chain", OTHERS)
def test_other_networks_take_the_general_way(chain):
    assert perceptron(StackedMembers.of(networks(OTHERS[chain])).skeleton) is None


def test_passes_with_other_gradients_take_the_general_way():
    body = StackedMembers.of(networks(CHAINS["one output"]))
    network = perceptron(body.skeleton)
    assert network is not None
    flat = body.packed().requires_grad_()
    x = torch.randn(MEMBERS, BATCH, 4, dtype=torch.float64)
    weights = Packed(body.layout(), flat, None)
    assert network.takes(weights, x)
    assert not network.takes(weights, x.clone().requires_grad_())
    assert not network.takes(weights, x.float())
    with torch.no_grad():
        assert not network.takes(weights, x)
    body.trainable()["0.bias"].requires_grad_(False)  # the matrix then has other columns
    frozen = Packed(body.layout(), body.packed().requires_grad_(), None)
    assert not network.takes(frozen, x)


def test_a_shared_layer_takes_the_general_way():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.relu = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.inner(self.relu(self.inner(x)))

    assert perceptron(StackedMembers.of([Twice()]).skeleton) is None


def test_a_training_equals_the_loop():
    torch.manual_seed(0)
    x, y = torch.randn(23, 4, dtype=torch.float64), torch.randn(23, 1, dtype=torch.float64)
    objective = functools.partial(ds.objectives.augmented, beta=0.7, loss="squared_error", pool="score")
    settings = {"batch_size": 8, "lr": 0.02, "weight_decay": 0.1, "clip_norm": 0.5, "validation": (x, y)}
    trained = []
    for backend in ("batched", "loop"):
        ens = ds.Ensemble(lambda: ds.nets.mlp(4, 1, (6, 5)).double(), members=3, seed=0, backend=backend)
        history = ds.fit(ens, (x, y), objective, epochs=3, **settings)
        trained.append((ens(x).detach(), history.column("validation")))
    torch.testing.assert_close(trained[0], trained[1])


def test_small_stacks_are_left_to_autograd(monkeypatch):
    monkeypatch.undo()
    ens = ds.Ensemble(functools.partial(ds.nets.mlp, 3, 2, (8,)), 4)
    network, weights = (
        perceptron(ens.body.skeleton),
        Packed(ens.body.layout(), ens.body.packed().requires_grad_(), None),
    )
    assert network is not None
    enough = -(-perceptrons.FEWEST // (4 * 8))
    assert not network.takes(weights, torch.zeros(4, enough - 1, 3))
    assert network.takes(weights, torch.zeros(4, enough, 3))

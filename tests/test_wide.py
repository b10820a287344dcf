"""Members that share weights as batched products equal members in turn."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
from dissensus import adapters

M = 3
independent = partial(ds.objectives.independent, loss="cross_entropy")


def vectors(n=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 3


def pictures(n=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64), torch.arange(n) % 3


def mlp(dropout=0.0):
    torch.manual_seed(7)
    layers = (
        nn.Linear(4, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(8, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )
    return nn.Sequential(*layers).double()


def cnn():
    torch.manual_seed(7)
    layers = (
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return nn.Sequential(*layers).double()


def frozen(network, *trained):
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(any(name.startswith(f"{own}.") for own in trained))
    return network


class Odd(nn.Module):
    """A frozen trunk that no tracer can look into, values of weights alone, and functions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.trunk = Branching().requires_grad_(False)
        self.scale, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(1, 5))
        self.register_buffer("center", torch.full((5,), 0.5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = self.trunk((x - x.mean()).clamp(-1, 1))["features"]
        h = (h - self.center) * torch.exp(self.scale) / 2 + self.shift.view(5)
        return self.head(torch.tanh(h)) + h.mean(1, keepdim=True)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x):
        y = self.layer(x)
        return {"features": y if float(y.detach().sum()) > 0 else -y}


CASES = {
    "lora": (lambda: adapters.lora(mlp(), 2, trained=["6.*"]), "frozen", vectors),
    "lora, dropout": (lambda: adapters.lora(mlp(0.3), 2, ["4"], trained=["6.*"]), "frozen", vectors),
    "lora, convolutions": (lambda: adapters.lora(cnn(), 2, ["0"], trained=["6.*"]), "frozen", pictures),
    "batch ensemble": (lambda: adapters.batch_ensemble(mlp()), adapters.SHARED, vectors),
    "batch ensemble, convolutions": (lambda: adapters.batch_ensemble(cnn()), adapters.SHARED, pictures),
    "tabm": (lambda: adapters.tabm(mlp(0.3)), adapters.SHARED, vectors),
    "heads": (lambda: frozen(mlp(), "6"), "frozen", vectors),
    "heads on convolutions": (lambda: frozen(cnn(), "6"), "frozen", pictures),
    "dropout before heads": (lambda: frozen(mlp(0.3), "6"), "frozen", vectors),
    "biases": (mlp, "*.weight", vectors),
    "weights": (mlp, "*.bias", vectors),
    "norms": (cnn, ["0.*", "4.*"], pictures),
    "a trained trunk": (mlp, ["0.*", "1.*"], vectors),
    "code": (lambda: Odd().double(), "frozen", vectors),
}


def members_of(name, backend):
    build, shared, data = CASES[name]
    ens = ds.Ensemble(build, M, backend=backend, shared=shared)
    with torch.no_grad():
        for index, parameter in enumerate(ens.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return ens, data()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_the_loops(name, training):
    results = []
    for backend in ("loop", "batched"):
        ens, (x, _) = members_of(name, backend)
        ens.train(training)
        passes = []
        for own in (x, torch.stack([x + i for i in range(M)])):
            own = own.requires_grad_()
            outputs = ens(own, per_member=own.ndim > x.ndim)
            wanted = [p for p in ens.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(outputs.square().sum(), [own, *wanted], allow_unused=True)
            passes.append((outputs, gradients, {k: v.clone() for k, v in ens.body.state().items()}))
        # Where members have inputs of their own, no layer is common, and code that branches runs in a loop.
        assert {choice.backend for choice in ens.choices} - ({"loop"} if name == "code" else set()) <= {backend}
        results.append(passes)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_loops(name):
    results = []
    for backend in ("loop", "batched"):
        ens, (x, y) = members_of(name, backend)
        history = ds.fit(ens, (x, y), independent, epochs=7, batch_size=4, lr=0.02, momentum=0.9, optimizer="sgd")
        assert history.backend == backend
        results.append([ens.member(i).state_dict() for i in range(M)])
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-9)


class Products(TorchDispatchMode):
    """The sizes of matrix products: rows, and columns of the result."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            a, b = args[-2:]
            self.sizes.append((*a.shape[:-1], b.shape[-1]))
        return func(*args, **(kwargs or {}))


def test_shared_weights_are_one_product_and_what_is_common_is_computed_once():
    ens, (x, _) = members_of("lora, dropout", "batched")
    with torch.no_grad():
        ens.eval()(x)  # the backend is tried
        with Products() as products:
            ens(x)
    # Both frozen layers are common, and the second has two products of low rank. The head has another operation.
    assert products.sizes[:2] == [(12, 8), (12, 6)]
    assert sorted(products.sizes[2:]) == [(M, 12, 2), (M, 12, 6)]
    whole, (x, _) = members_of("lora", "batched")
    with torch.no_grad():
        whole.eval()(x)
        with Products() as products:
            whole(x)
    assert (M * 12, 6) in products.sizes, "one product of the shared weight on all examples of all members"
    assert (12, 8) in products.sizes


def test_auto_measures_it():
    ens, (x, _) = members_of("tabm", "auto")
    ens(x)
    assert "batched" in ens.choices[0].milliseconds
    assert ens.body.is_batchable()


def test_rates_of_dropout_may_change():
    loop, (x, _) = members_of("tabm", "loop")
    batched, _ = members_of("tabm", "batched")
    for rate in (0.3, 0.0, 0.6):
        for ens in (loop, batched):
            ens.train().body.network[3].p = rate
        torch.testing.assert_close(loop(x), batched(x))
    assert [choice.backend for choice in batched.choices] == ["batched"]


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class Refused(nn.Module):
    """Code between a frozen layer and a head."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(5)
        self.trunk, self.head, self.between = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3), between
        self.noisy = Noisy(5, 5).requires_grad_(False)

    def forward(self, x):
        return self.head(self.between(self, self.trunk(x)))


def told_by_an_attribute(network, h):
    network.trunk.factor = network.head.bias
    return h * network.trunk.factor.sum()


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda _, h: h.add_(1), "add_ writes into a tensor"),
        (lambda _, h: h + torch.randn_like(h), "randn_like draws random numbers"),
        (lambda network, h: h * network.head.bias.softmax(0).sum(), "function softmax is not known to be pointwise"),
        (lambda network, h: (h + network.head.weight[0]).mean(0, keepdim=True) + h, "getitem is not known"),
        (lambda network, h: (h * network.head.weight.mean()).mean(0), "mean is not known to be pointwise"),
        (lambda network, h: network.noisy(h), "a layer draws random numbers"),
        (told_by_an_attribute, "function sum is not known to be pointwise"),
    ],
    ids=["write", "draw", "softmax", "index", "mean", "noise", "attribute"],
)
def test_what_has_no_such_form_runs_in_a_loop(between, reason):
    ens = ds.Ensemble(lambda: Refused(between).double(), M, backend="batched", shared="frozen")
    x, _ = vectors()
    torch.manual_seed(0)
    outputs = ens(x)
    torch.manual_seed(0)
    torch.testing.assert_close(outputs, torch.stack([ens.member(i)(x) for i in range(M)]))
    (choice,) = ens.choices
    assert choice.backend == "loop"
    assert reason in choice.refused["batched"]


def test_layers_with_hooks_run_for_every_member():
    ens, (x, _) = members_of("heads", "batched")
    called = []
    ens.body.network[0].register_forward_hook(lambda *_: called.append(1))
    for _ in range(2):
        called.clear()
        ens(x)
    assert len(called) == M
    assert "has hooks" in ens.choices[0].refused["batched"]


class ReadsAgain(nn.Module):
    """A layer writes into what is read again: what is common, or what is a member's own."""

    def __init__(self, own):
        super().__init__()
        torch.manual_seed(5)
        self.trunk, self.head, self.relu = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3), nn.ReLU(inplace=True)
        self.own = own

    def forward(self, x):
        h = self.head(self.trunk(x)) if self.own else self.trunk(x)
        y = self.relu(h)
        return h - 3 * y if self.own else self.head(h - 3 * y)


@pytest.mark.parametrize("own", [True, False])
def test_layers_that_write_into_what_is_read_again(own):
    ens = ds.Ensemble(lambda: ReadsAgain(own).double(), M, backend="batched", shared="frozen")
    x, _ = vectors()
    for _ in range(2):
        torch.testing.assert_close(ens(x), torch.stack([ens.member(i)(x) for i in range(M)]))


@pytest.mark.parametrize("backend", ["loop", "vmap", "batched", "stacked", "auto"])
def test_a_shared_layer_that_writes_into_its_input_leaves_the_users_data_alone(backend):
    def build():
        return frozen(nn.Sequential(nn.ReLU(inplace=True), *mlp()), "7")

    ens = ds.Ensemble(build, M, backend=backend, shared="frozen")
    x, y = vectors()
    before = x.clone()
    for _ in range(3):
        ens.eval()(x)
        ens.predict(x)
        ds.fit(ens, (x, y), independent, epochs=1)
    assert torch.equal(x, before)


def test_the_fused_form_keeps_the_precision_of_autocast():
    outputs = []
    for backend in ("loop", "batched"):
        ens = ds.Ensemble(lambda: adapters.lora(mlp().float(), 2, trained=["6.*"]), M, backend=backend, shared="frozen")
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(ens(vectors()[0].float()))
        assert {choice.backend for choice in ens.choices} == {backend}
    assert outputs[0].dtype == outputs[1].dtype
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)


def test_dropout_that_drops_nothing_does_not_keep_a_frozen_trunk_from_being_common():
    class Trunk(nn.Module):
        """A forward pass that nobody can trace."""

        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.4))

        def forward(self, x):
            return self.layers(x) if x.sum() > 0 else self.layers(-x)

    def build():
        torch.manual_seed(5)
        return nn.Sequential(Trunk().requires_grad_(False), nn.Linear(5, 3)).double()

    ens = ds.Ensemble(build, M, backend="batched", shared="frozen").eval()
    x, _ = vectors()
    torch.testing.assert_close(ens(x), torch.stack([ens.member(i)(x) for i in range(M)]))
    assert {choice.backend for choice in ens.choices} == {"batched"}

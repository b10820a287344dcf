"""Members in turn take results of each other only where these would not differ."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dissensus as ds

M = 3
PASSES = 3
"""The first pass of a mode looks at the network."""


def inputs():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Scaled(nn.Linear):
    """A frozen layer that whoever calls it scales by an attribute."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.factor = 1.0
        self.factors = {}

    def forward(self, x):
        return super().forward(x) * self.factor * self.factors.get("more", 1.0)


class Conditioned(nn.Module):
    """A network that tells its trunk something about the member by an attribute, or by what hangs in a dictionary."""

    def __init__(self, inside):
        super().__init__()
        torch.manual_seed(3)
        self.inside, self.trunk, self.head = inside, Scaled(4, 5).requires_grad_(False), nn.Linear(5, 3)

    def forward(self, x):
        own = self.head.bias.sum()
        if self.inside:
            self.trunk.factors["more"] = own
        else:
            self.trunk.factor = own
        h = self.trunk(x)
        self.trunk.factor, self.trunk.factors = 1.0, {}
        return self.head(h)


class Noisy(nn.Module):
    """Noise in the trunk that is switched on after the first pass."""

    def __init__(self, whole):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.head = nn.Sequential(Noise() if whole else nn.Identity(), nn.Linear(4, 5)), nn.Linear(5, 3)
        self.trunk.requires_grad_(False)
        self.noise = None if whole else Noise()

    def forward(self, x):
        return self.head(self.trunk(x if self.noise is None else self.noise(x)))


class Noise(nn.Module):
    size = 0.0

    def forward(self, x):
        return x + self.size * torch.randn_like(x) if self.size else x


class WithEnergy(nn.Module):
    """The derivative of an energy at features of the trunk, taken in the forward pass."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.head, self.way = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3), way

    def forward(self, x):
        with torch.enable_grad():
            h = self.trunk(x.detach())
            if self.way == "setter":
                h.requires_grad = True
            else:
                h.requires_grad_()
            energy = self.head(h).square().sum()
            if self.way == "grad":
                (slope,) = torch.autograd.grad(energy, h, create_graph=True)
            else:
                energy.backward()
                slope = h.grad
        return self.head(h.detach() - slope)


class Attending(nn.Module):
    """A frozen layer of attention that drops weights."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        if kind == "layer":
            self.trunk = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        else:
            self.trunk = Fused()
        self.trunk.requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x.unsqueeze(0)
        return self.head(self.trunk(x, x, x)[0].squeeze(0))


class Fused(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.dropout = 0.5

    def forward(self, q, k, v):
        rate = self.dropout if self.training else 0.0
        return (F.scaled_dot_product_attention(super().forward(q), k, v, dropout_p=rate),)


class Returned(nn.Module):
    """Some members write into what they return, which all have in common."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.own = nn.Linear(4, 3).requires_grad_(False), nn.Parameter(torch.randn(3))

    def forward(self, x):
        out = self.trunk(x)
        if self.own[0] > 0:
            out += 1
        return out


class Replaced(nn.Module):
    """Memory of a result is exchanged."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.head = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3)

    def forward(self, x):
        h = self.trunk(x.detach())
        before = h.clone()
        h.data = 2 * before
        return self.head(h + before)


class Twice(nn.Module):
    """Nested modules that are called twice, with arguments by name, and precisions that differ."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = Inner()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        first = self.inner(self.trunk(x), scale=2.0)
        second = self.inner(scale=3.0, h=self.trunk(x))
        first += self.head.bias.sum()
        third, _ = self.trunk(first), self.trunk[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.trunk[0](x.float()) if self.trunk[0].weight.dtype == torch.float32 else self.trunk[0](x)
        return self.head(first + 2 * second.flip(0) + third + self.trunk[0](x) * 3 + low)


class Inner(nn.Module):
    def forward(self, h, scale):
        return {"h": h * scale}["h"].view(-1, 4)


CASES = {
    "an attribute": lambda: Conditioned(False),
    "a dictionary": lambda: Conditioned(True),
    "energy, autograd.grad": lambda: WithEnergy("grad"),
    "energy, setter": lambda: WithEnergy("setter"),
    "a returned result": Returned,
    "exchanged memory": Replaced,
    "called twice": Twice,
}


def members_of(build, backend="loop"):
    """Members whose own weights differ, and whose shared weights are equal."""
    count = iter(range(M))

    def built():
        network = build().double()
        torch.manual_seed(next(count))
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        return network

    return ds.Ensemble(built, M, backend=backend, shared="frozen")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_outputs_are_those_of_members(build, grad):
    ens = members_of(build)
    for _ in range(PASSES):
        with torch.set_grad_enabled(grad):
            outputs, expected = ens(inputs()), torch.stack([ens.member(i)(inputs()) for i in range(M)])
        torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("whole", [True, False])
def test_noise_that_begins_after_the_first_pass_is_a_members_own(whole):
    ens = members_of(lambda: Noisy(whole))
    torch.testing.assert_close(ens(inputs()), torch.stack([ens.member(i)(inputs()) for i in range(M)]))
    for layer in ens.body.network.modules():
        if isinstance(layer, Noise):
            layer.size = 1.0
    torch.manual_seed(0)
    outputs = ens(inputs())
    torch.manual_seed(0)
    torch.testing.assert_close(outputs, torch.stack([ens.member(i)(inputs()) for i in range(M)]))


@pytest.mark.parametrize("kind", ["layer", "function"])
def test_weights_of_attention_are_dropped_apart(kind):
    loop, vmap = (members_of(lambda: Attending(kind), backend).train() for backend in ("loop", "vmap"))
    with torch.no_grad():  # equal members, whose masks differ
        for ens in (loop, vmap):
            for parameter in ens.body.network.head.parameters():
                parameter.copy_(parameter[:1].expand_as(parameter))
    for _ in range(PASSES):
        outputs = loop(inputs())
        torch.testing.assert_close(outputs, vmap(inputs()))
        assert not torch.equal(outputs[0], outputs[1])
    whole = loop.eval()(inputs())
    torch.testing.assert_close(whole[0], whole[1])


def test_hooks_of_layers_run_for_every_member():
    ens, seen = members_of(lambda: Trunk()), []
    ens(inputs())
    ens.body.network.trunk[1].register_forward_hook(lambda *_: seen.append("forward"))
    ens.body.network.trunk[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    ens(inputs())  # hooks that are new are looked at in a pass of one member
    seen.clear()
    ens(inputs().requires_grad_()).sum().backward()
    assert seen.count("forward") == M
    assert seen.count("backward") in (1, M)


class Residual(nn.Module):
    """A trunk as those of torchvision: layers side by side with functions that write into their inputs."""

    def __init__(self, uses_result=True, own=False):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.requires_grad_(False)
        self.head = nn.Linear(2, 3)
        self.uses_result, self.own = uses_result, own

    def forward(self, x):
        x = x.view(-1, 1, 2, 2).repeat(1, 1, 2, 2)
        h = self.norm(self.first(x))
        if self.own:
            h.add_(self.head.bias[0])  # a member's own
        if self.uses_result:
            h = self.relu(h)
        else:
            self.relu(h)
        y = self.second(h)
        y += h
        y.add_(2 * h)
        return self.head(self.second(y).mean((2, 3)))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("uses_result", [True, False])
@pytest.mark.parametrize("backend", ["loop", "streams"])
def test_what_comes_after_a_write_into_common_results_is_common(backend, uses_result, own, trained):
    def build():
        network = Residual(uses_result, own)
        network.second.requires_grad_(trained)
        network.head = nn.Linear(2, 3)
        return network

    torch.manual_seed(0)
    ens = ds.Ensemble(build, M, backend=backend, shared=["first.*", "norm.*", "second.*"]).double().eval()
    with torch.no_grad():
        ens.body.network.head.bias.copy_(torch.randn(M, 3))
    alone, x = [ens.member(i) for i in range(M)], inputs()
    ens(x)
    calls = []
    forward = ens.body.network.second._conv_forward
    ens.body.network.second._conv_forward = lambda *args: calls.append(1) or forward(*args)
    outputs = ens(x)
    del ens.body.network.second._conv_forward
    # The result of the first call is written to, so that each member makes it; the second call is common.
    assert len(calls) == (2 * M if own else M + 1)
    expected = torch.stack([network(x) for network in alone])
    torch.testing.assert_close(outputs, expected)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    for i, network in enumerate(alone):
        torch.testing.assert_close(ens.body.network.head.weight.grad[i], network.head.weight.grad)
    if trained:
        summed = torch.stack([network.second.weight.grad for network in alone]).sum(0)
        torch.testing.assert_close(ens.body.network.second.weight.grad, summed)


@pytest.mark.parametrize("backend", ["loop", "streams"])
def test_inference_mode_computes_the_common_part_once(backend):
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x).relu_()

    def build():
        torch.manual_seed(3)
        return nn.Sequential(Counted(4, 3).requires_grad_(False), nn.Linear(3, 3)).double()

    ens = ds.Ensemble(build, M, backend=backend, shared="frozen")
    expected = torch.stack([ens.member(i)(inputs()) for i in range(M)])
    with torch.inference_mode():
        made_inside = inputs() + 0
        for x in (inputs(), made_inside):
            ens(x)
            calls.clear()
            outputs = ens(x)
            assert len(calls) == 1
            torch.testing.assert_close(outputs, expected)
            assert not outputs.requires_grad


def test_inference_mode_and_modes_of_layers_that_change():
    ens = members_of(Trunk)
    expected = torch.stack([ens.member(i)(inputs()) for i in range(M)])
    for block in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with block():
            torch.testing.assert_close(ens(inputs()), expected)
    ens.train()
    first = ens(inputs())
    ens.body.network.trunk[2].p = 0.5  # a rate that is changed after the first pass
    outputs = ens(inputs())
    assert not torch.allclose(outputs, first)
    alone = [outputs[i] - ens.member(i).head.bias for i in range(M)]
    weights = torch.stack([ens.member(i).head.weight for i in range(M)])
    features = [torch.linalg.lstsq(weights[i], out.T).solution.T for i, out in enumerate(alone)]
    assert not torch.allclose(features[0], features[1]), "units of its own are dropped in every member"


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.0)).requires_grad_(False)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.trunk(x))

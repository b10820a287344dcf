"""The master oracle: M stacked members are M ordinary modules, in every backend, statistics and dropout included."""

import copy
import logging
from functools import partial

import pytest
import torch
from networks import BATCHED, NETWORKS
from torch import nn

import dissensus as ds
from dissensus import execution

M, B, STEPS = 3, 5, 20
BACKENDS = ("loop", "streams", "vmap", "batched", "layerwise", "stacked", "auto")


def data_for(shape, *, per_member, batch=B):
    lead = (M, batch) if per_member else (batch,)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, *lead, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(STEPS, *lead, 3, generator=generator, dtype=torch.float64)
    return x, y


def trained_alone(modules, x, y, per_member):
    """Ordinary modules, ordinary optimisers, one after the other."""
    for i, module in enumerate(modules):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        for xs, ys in zip(x, y, strict=True):
            optimiser.zero_grad()
            inputs, targets = (xs[i], ys[i]) if per_member else (xs, ys)
            (module(inputs) - targets).square().sum(-1).mean().backward()
            optimiser.step()
    return modules


def trained_stacked(ensemble, x, y, per_member):
    """The ensemble as one module under an ordinary optimiser."""
    optimiser = torch.optim.SGD(ensemble.parameters(), lr=0.01, momentum=0.9)
    for xs, ys in zip(x, y, strict=True):
        optimiser.zero_grad()
        (ensemble(xs, per_member=per_member) - ys).square().sum(-1).mean(-1).sum().backward()
        optimiser.step()
    return ensemble


@pytest.mark.slow(
    fast=["mlp-*", "tied-*", "functional-*", "*-vmap-shared", "*-batched-per_member", "two_dropouts-loop-shared"]
)
@pytest.mark.parametrize("per_member", [False, True], ids=["shared", "per_member"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_members_train_as_separate_modules_do(name, backend, per_member):
    build, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build, M, seed=3, backend=backend).double()
    modules = [ensemble.member(i) for i in range(M)]
    x, y = data_for(shape, per_member=per_member)
    trained_alone(modules, x, y, per_member)
    trained_stacked(ensemble, x, y, per_member)
    for i, module in enumerate(modules):
        stacked = ensemble.member(i).state_dict()
        assert stacked.keys() == module.state_dict().keys() == build().state_dict().keys()
        for key, tensor in module.state_dict().items():
            torch.testing.assert_close(stacked[key], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")
    ensemble.eval()
    inputs = x[0]
    for i, module in enumerate(modules):
        expected = module.eval()(inputs[i] if per_member else inputs)
        torch.testing.assert_close(ensemble(inputs, per_member=per_member)[i], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NETWORKS)
def test_named_backends_run_what_they_can(name, caplog):
    build, shape = NETWORKS[name]
    x = data_for(shape, per_member=False)[0][0].float()
    batched = ds.Ensemble(build, M, backend="batched")
    with caplog.at_level(logging.WARNING, "dissensus"):
        batched(x)
    assert (batched.choices[0].backend == "batched") == (name in BATCHED)
    assert (len(caplog.records) == 0) == (name in BATCHED)
    vmapped = ds.Ensemble(build, M, backend="vmap")
    vmapped(x)
    assert (vmapped.choices[0].backend == "vmap") == (name != "plain_average_norm")


def test_fallback_notice_is_one_line_that_names_the_reason(caplog):
    ensemble = ds.Ensemble(NETWORKS["plain_average_norm"][0], M, backend="vmap")
    with caplog.at_level(logging.WARNING, "dissensus"):
        for _ in range(3):
            ensemble(torch.randn(B, 6))
    (record,) = caplog.records
    assert "loop" in record.getMessage()
    assert "item()" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert ensemble.body.tensors()["norm.num_batches_tracked"].tolist() == [3, 3, 3], "the failed try left a trace"


def test_auto_measures_once_per_mode_and_leaves_no_trace():
    build, shape = NETWORKS["norm_first"]
    ensemble, reference = (ds.Ensemble(build, M, backend=b) for b in ("auto", "loop"))
    x = torch.randn(B, *shape)
    for model in (ensemble, reference):
        model(x)
        model(x)
    assert len(ensemble.choices) == 1
    assert ensemble.choices[0].milliseconds.keys() == {"loop", "vmap", "layerwise"}
    assert "batched" in ensemble.choices[0].refused
    assert "BatchNorm1d" in str(ensemble.choices[0])
    for actual, expected in zip(ensemble.body.tensors().values(), reference.body.tensors().values(), strict=True):
        torch.testing.assert_close(actual, expected)
    ensemble.eval()
    with torch.no_grad():
        ensemble(x)
    assert len(ensemble.choices) == 2


def test_auto_refuses_a_backend_whose_outputs_differ(monkeypatch):
    from dissensus.execution import choice

    loop = execution.BACKENDS["loop"].run
    backends = [execution.Backend("vmap", lambda *a: loop(*a) + 1), execution.Backend("batched", loop)]
    table = {**execution.BACKENDS, **{backend.name: backend for backend in backends}}
    monkeypatch.setattr(choice, "BACKENDS", table)
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M)
    ensemble(torch.randn(B, 6))
    assert "differ" in ensemble.choices[0].refused["vmap"]


def test_functional_dropout_in_a_foreign_forward_runs_in_every_backend():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(nn.functional.dropout(x, 0.5, self.training))

    for backend in BACKENDS:
        outputs = ds.Ensemble(Foreign, M, backend=backend)(torch.randn(B, 6))
        assert outputs.shape == (M, B, 3)
        assert outputs.isfinite().all()


def test_initial_weights_depend_on_seed_and_member_alone():
    build = NETWORKS["mlp"][0]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    two_members, six_members = ds.Ensemble(build, 2, seed=7), ds.Ensemble(build, 6, seed=7)
    assert torch.equal(torch.get_rng_state(), state), "building disturbed the global generator"
    weights = six_members.body.tensors()["0.weight"]
    assert torch.equal(two_members.body.tensors()["0.weight"], weights[:2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(ds.Ensemble(build, 2, seed=8).body.tensors()["0.weight"], weights[:2])


def test_dropout_masks_differ_between_members_layers_and_steps():
    ensemble = ds.Ensemble(lambda: nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Linear(1, 1)), 4)
    layer = ensemble.body.network[0]
    assert len(set(layer.key.tolist())) == 4
    two_dropouts = ds.Ensemble(NETWORKS["two_dropouts"][0], 1)
    assert len({int(m.key) for m in two_dropouts.body.network.modules() if isinstance(m, nn.Dropout)}) == 2
    x = torch.ones(1000, 6)
    net = ds.Ensemble(lambda: nn.Sequential(nn.Dropout(0.25), nn.Linear(6, 3)), 1, backend="loop")
    first, second = net(x), net(x)
    assert not torch.equal(first, second)
    dropout = net.member(0)[0]
    kept_share = (dropout(torch.ones(100_000)) > 0).double().mean()
    assert abs(kept_share - 0.75) < 0.005
    torch.testing.assert_close(dropout(torch.ones(100_000)).mean(), torch.tensor(1.0), atol=0.01, rtol=0)


def test_from_modules_copies_and_stacks():
    modules = [nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)) for _ in range(M)]
    before = copy.deepcopy(modules[0].state_dict())
    ensemble = ds.Ensemble.from_modules(modules).eval()
    x = torch.randn(B, 6)
    for i, module in enumerate(modules):
        torch.testing.assert_close(ensemble(x)[i], module.eval()(x))
    with torch.no_grad():
        for p in ensemble.parameters():
            p.zero_()
    assert all(torch.equal(modules[0].state_dict()[k], v) for k, v in before.items())
    assert type(modules[0][1]) is nn.Dropout


def test_from_modules_with_other_settings_or_shapes_runs_a_loop():
    narrow, wide = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    x = torch.randn(B, 6)
    mixed = ds.Ensemble.from_modules([narrow, wide])
    torch.testing.assert_close(mixed(x)[0], narrow(x))
    torch.testing.assert_close(mixed.eval()(x)[1], mixed.member(1)(x))
    same_tensors = [nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(slope)) for slope in (0.1, 0.9)]
    leaky = ds.Ensemble.from_modules(same_tensors)
    for i, module in enumerate(same_tensors):
        torch.testing.assert_close(leaky(x)[i], module(x))
    with pytest.raises(ValueError, match="agree on the shape"):
        ds.Ensemble.from_modules([nn.Linear(6, 3), nn.Linear(6, 4)])(x)
    with pytest.raises(ValueError, match="one architecture"):
        mixed.soup()


def test_subset_keeps_identities():
    ensemble = ds.Ensemble(NETWORKS["two_dropouts"][0], 4, backend="loop")
    part = ensemble.subset([2, -1])
    assert part.member_ids == [2, 3]
    x = torch.randn(B, 6)
    torch.testing.assert_close(part(x), ensemble(x)[[2, 3]])
    with pytest.raises(IndexError, match="members 0 to 3"):
        ensemble.subset([4])


def test_soup_averages_weights_and_recomputes_statistics():
    ensemble = ds.Ensemble(NETWORKS["norm_first"][0], M).double()
    x = torch.randn(64, 6, dtype=torch.float64) * 3 + 1
    soup = ensemble.soup(x, batch_size=64)
    weights = ensemble.body.tensors()
    torch.testing.assert_close(soup.net[1].weight, weights["net.1.weight"].mean(0))
    torch.testing.assert_close(soup.net[0].running_mean, x.mean(0))
    assert soup.net[0].momentum == 0.1
    torch.testing.assert_close(ensemble.soup().net[0].running_mean, weights["net.0.running_mean"].mean(0))


def test_members_are_ordinary_modules():
    ensemble = ds.Ensemble(NETWORKS["tied"][0], M)
    member = ensemble.member(1)
    assert type(member) is type(NETWORKS["tied"][0]())
    assert member.encode.weight is member.decode.weight
    assert ensemble.body.network.encode.weight is ensemble.body.network.decode.weight
    with torch.no_grad():
        member.head.weight.zero_()
    assert ensemble.body.tensors()["head.weight"].abs().sum() > 0


def test_gradients_reach_the_inputs_in_every_backend():
    x = torch.randn(B, 6, dtype=torch.float64)
    gradients = []
    for backend in BACKENDS:
        ensemble = ds.Ensemble(NETWORKS["mlp"][0], M, backend=backend).double()
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(ensemble(inputs).square().sum(), inputs)
        gradients.append(grad)
    for grad in gradients[1:]:
        torch.testing.assert_close(grad, gradients[0])


def test_predict_equals_one_pass_and_puts_the_mode_back():
    ensemble = ds.Ensemble(NETWORKS["two_dropouts"][0], M)
    x = torch.randn(11, 6)
    outputs = ensemble.predict(x, batch_size=4)
    assert ensemble.training
    torch.testing.assert_close(outputs, ensemble.eval()(x))
    with pytest.raises(ValueError, match="at least one example"):
        ensemble.predict(x[:0])


def test_bad_builds_are_refused_with_a_fix(unchecked):
    widths = iter([3, 4])
    with pytest.raises(ValueError, match=r"'weight' is \[4, 6\].*from_modules"):
        ds.Ensemble(lambda: nn.Linear(6, next(widths)), 2)
    with pytest.raises(TypeError, match="return an nn.Module; got int"):
        ds.Ensemble(lambda: 3, 2)
    with pytest.raises(ValueError, match="lazy"):
        ds.Ensemble(lambda: nn.Sequential(nn.LazyLinear(3)), 2)
    with pytest.raises(ValueError, match="with parameters"):
        ds.Ensemble(nn.ReLU, 2)
    with pytest.raises(ValueError, match="`members` must be a whole number of at least 1; got 0"):
        ds.Ensemble(lambda: nn.Linear(1, 1), 0)
    with pytest.raises(ValueError, match="Did you mean 'vmap'"):
        ds.Ensemble(lambda: nn.Linear(1, 1), 2, backend="vmapp")
    with pytest.raises(ValueError, match=r"\[M=2, B, ...\]"):
        ds.Ensemble(lambda: nn.Linear(1, 1), 2)(torch.ones(3, 4, 1), per_member=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deep_copy_is_on_its_own(backend):
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M, backend=backend)
    x = torch.randn(B, 6)
    before = ensemble(x)
    twin = copy.deepcopy(ensemble)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert torch.equal(ensemble(x), before)
    assert not torch.allclose(twin(x), before)
    torch.testing.assert_close(twin(x)[0], twin.member(0)(x))


def test_modules_keep_their_mode():
    modules = [NETWORKS["norm_first"][0]().eval() for _ in range(M)]
    ensemble = ds.Ensemble.from_modules(modules)
    assert not ensemble.training
    x = torch.randn(B, 6)
    for i, module in enumerate(modules):
        torch.testing.assert_close(ensemble(x)[i], module(x))
    mixed = ds.Ensemble.from_modules([nn.Linear(6, 3).eval(), nn.Sequential(nn.Linear(6, 3)).eval()])
    assert not mixed.training


class WithSetting(nn.Module):
    """A network with a setting that is neither a layer nor a plain number."""

    def __init__(self, setting):
        super().__init__()
        self.layer, self.setting = nn.Linear(6, 6), setting

    def forward(self, x):
        return self.setting(self.layer(x)) if callable(self.setting) else self.layer(x) @ self.setting.float()


def scaled(factor):
    return lambda x: x * factor


SETTINGS = {
    "function": (torch.relu, torch.tanh),
    "tensor": (torch.eye(6), 2 * torch.eye(6)),
    "low precision": (torch.eye(6).bfloat16(), 2 * torch.eye(6).bfloat16()),
    "partial": tuple(partial(nn.functional.leaky_relu, negative_slope=slope) for slope in (0.1, 0.9)),
    "closure": (scaled(1.0), scaled(5.0)),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_networks_that_differ_in_an_attribute_are_not_stacked_as_one(settings):
    modules = [WithSetting(setting) for setting in settings]
    x = torch.randn(B, 6)
    ensemble = ds.Ensemble.from_modules(modules)
    for i, module in enumerate(modules):
        torch.testing.assert_close(ensemble(x)[i], module(x))
    remaining = iter(settings)
    with pytest.raises(ValueError, match="setting of the network differs in member 1.*make it a buffer"):
        ds.Ensemble(lambda: WithSetting(next(remaining)), 2)


def hooked():
    layer = nn.Linear(6, 3)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return nn.Sequential(layer)


class ThroughNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) * float(self.layer.bias.detach().numpy().shape[0])


FOREIGN = {
    "parametrised": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)),
    "hooks": hooked,
    "numpy": ThroughNumpy,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # where vmap is the fastest all the same
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_foreign_constructions_run_as_their_modules_do(name, backend):
    ensemble = ds.Ensemble(FOREIGN[name], M, backend=backend)
    x = torch.randn(B, 6)
    outputs = ensemble(x)
    for i in range(M):
        torch.testing.assert_close(outputs[i], ensemble.member(i)(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_pass_that_looks_at_its_mode(backend):
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) if self.training else torch.sigmoid(self.layer(x))

    ensemble = ds.Ensemble(Moody, M, backend=backend)
    x = torch.randn(B, 6)
    for mode in (True, False, True):
        ensemble.train(mode)
        torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


def test_a_dropout_layer_that_hangs_twice_stays_one_keyed_layer():
    def build():
        drop = nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(6, 8), drop, nn.ReLU(), nn.Linear(8, 8), drop, nn.Linear(8, 3))

    results = [ds.Ensemble(build, M, backend=backend)(torch.ones(B, 6)) for backend in BACKENDS]
    for outputs in results[1:]:
        torch.testing.assert_close(outputs, results[0])
    network = ds.Ensemble(build, M).body.network
    assert network[1] is network[4]
    assert type(network[1]) is not nn.Dropout


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ensemble_without_gradients_runs(backend):
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M, backend=backend).requires_grad_(False)
    assert ensemble(torch.randn(B, 6)).shape == (M, B, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_pass_must_return_one_tensor(backend):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x), x

    with pytest.raises(TypeError, match="must return one tensor; got tuple"):
        ds.Ensemble(Pair, M, backend=backend)(torch.randn(B, 6))


def test_soup_takes_any_number_of_examples():
    ensemble = ds.Ensemble(NETWORKS["norm_first"][0], M).double()
    x = torch.randn(9, 6, dtype=torch.float64)
    soup = ensemble.soup(x, batch_size=8)  # batches of 5 and 4, not of 8 and 1
    torch.testing.assert_close(soup.net[0].running_mean, (x[:5].mean(0) + x[5:].mean(0)) / 2)


def test_a_network_that_keeps_an_activation_can_be_taken_apart():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(6, 3), None

        def forward(self, x):
            self.last = self.layer(x)
            return self.last

    for backend in BACKENDS:
        ensemble = ds.Ensemble(Keeps, M, backend=backend)
        x = torch.randn(B, 6)
        outputs = ensemble(x)
        torch.testing.assert_close(ensemble.member(1)(x), outputs[1])
        ensemble.subset([0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_activations_whose_input_is_read_again(backend):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu, self.second = nn.Linear(6, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)

        def forward(self, x):
            h = self.first(x)
            return self.second(self.relu(h)) + h

    ensemble = ds.Ensemble(Residual, M, backend=backend)
    x = torch.randn(B, 6)
    torch.testing.assert_close(ensemble(x)[2], ensemble.member(2)(x))


def doubled(module, inputs, output):
    return 2 * output


def tripled(module, gradient, _):
    return tuple(None if part is None else 3 * part for part in gradient)


def hooked(where):
    """A network with hooks on itself, on a layer, on a layer that drops units, or on a gradient."""
    last = nn.Sequential(nn.Linear(5, 3)) if where == "container" else nn.Linear(5, 3)
    network = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.ReLU(), last).double()
    network[0].requires_grad_(False)
    if where == "gradient":
        network[3].register_full_backward_hook(tripled)
    elif where == "before":
        network.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    elif where != "none":
        at = {"network": network, "layer": last, "container": last, "dropout": network[1]}
        at[where].register_forward_hook(doubled)
    return network


@pytest.mark.parametrize("shared", [None, "frozen"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["network", "before", "layer", "container", "dropout", "gradient"])
def test_hooks_run_for_every_member_in_every_backend(where, backend, shared):
    build = partial(hooked, where)
    if shared is not None:  # what is shared is equal in all members
        network = build()
        build = partial(new_head, network)
    ensemble = ds.Ensemble(build, M, backend=backend, shared=shared).train()
    x = torch.randn(B, 6, dtype=torch.float64, requires_grad=True)
    modules = [build() for _ in range(M)]
    for module, member in zip(modules, ensemble, strict=True):
        module.train().load_state_dict(member.state_dict())
    for outputs in (ensemble(x) for _ in range(2)):
        expected = torch.stack([module(x) for module in modules])
        torch.testing.assert_close(outputs, expected)
        (gradient,), (wanted,) = (torch.autograd.grad(out.square().sum(), x) for out in (outputs, expected))
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("where", ["network", "layer", "dropout", "gradient"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_that_come_after_a_pass_run_too_until_they_are_removed(backend, where):
    ensemble = ds.Ensemble(lambda: hooked("none"), M, backend=backend).train()
    x = torch.randn(B, 6, dtype=torch.float64, requires_grad=True)

    def values():
        outputs = ensemble(x)
        return outputs.detach(), *torch.autograd.grad(outputs.square().sum(), x)

    before = values()
    network = ensemble.body.network
    layer = {"network": network, "layer": network[3], "dropout": network[1], "gradient": network[3]}[where]
    register = layer.register_full_backward_hook if where == "gradient" else layer.register_forward_hook
    hook = register(tripled if where == "gradient" else doubled)
    factors = {"gradient": (1, 3), "dropout": None}.get(where, (2, 4))
    hooked_values = values()
    if factors is None:
        expected = torch.stack([member(x) for member in ensemble])
        torch.testing.assert_close(hooked_values[0], expected)
        assert not torch.equal(expected, before[0])
    else:
        for now, then, factor in zip(hooked_values, before, factors, strict=True):
            torch.testing.assert_close(now, factor * then)
    hook.remove()
    for now, then in zip(values(), before, strict=True):
        torch.testing.assert_close(now, then)


def new_head(network):
    copied = copy.deepcopy(network)
    for layer in copied[3].modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return copied


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_hook_of_a_container_records_is_what_members_compute(backend):
    network, seen = hooked("none"), []
    inner = nn.Sequential(nn.Sequential(network[0], network[1]), network[2], network[3])
    inner[0].register_forward_hook(lambda *call: seen.append(type(call[-1])))
    ensemble = ds.Ensemble(lambda: copy.deepcopy(inner), 1, backend=backend)
    ensemble(torch.randn(B, 6, dtype=torch.float64))
    assert seen
    assert all(issubclass(kind, torch.Tensor) for kind in seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_place_is_in_place(backend):
    class Forgets(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(6, 50), nn.Dropout(0.5, inplace=True)

        def forward(self, x):
            h = self.layer(x)
            self.drop(h)
            return h

    outputs = ds.Ensemble(Forgets, M, backend=backend).train()(torch.randn(B, 6))
    assert 0.3 < (outputs == 0).double().mean() < 0.7


def test_errors_of_the_network_itself_come_through():
    ensemble = ds.Ensemble(NETWORKS["mlp"][0], M, backend="vmap")
    ensemble(torch.randn(B, 6))
    with pytest.raises(RuntimeError, match="size|shape"):
        ensemble(torch.randn(B, 7))


def test_build_must_make_a_new_network(unchecked):
    net = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="return a new network at every call; got the same one twice"):
        ds.Ensemble(lambda: net, 2)
    assert net.weight.shape == (3, 6)
    with pytest.raises(TypeError, match="`build` must be a function.*from_modules"):
        ds.Ensemble(net, 2)


def counted_loop(calls):
    """A backend from outside of the package: the loop, with a list of how many members each pass ran."""

    def run(skeleton, weights, buffers, x, per_member):
        calls.append(len(weights))
        return execution.BACKENDS["loop"].run(skeleton, weights, buffers, x, per_member)

    return execution.Backend("counted", run)


def test_a_backend_from_outside_is_passed_as_an_argument(tmp_path):
    calls = []
    backend, table = counted_loop(calls), dict(execution.BACKENDS)
    build = partial(ds.nets.mlp, 3, 2, (4,))
    ens, reference = ds.Ensemble(build, 3, backend=backend), ds.Ensemble(build, 3, backend="loop")
    x, y = torch.randn(12, 3), torch.randint(2, (12,))
    assert torch.equal(ens(x), reference(x))
    assert calls[-1] == 3
    assert ens.backend == "counted"
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    history = ds.fit(ens, (x, y), objective, epochs=1, batch_size=4)
    ds.fit(reference, (x, y), objective, epochs=1, batch_size=4)
    assert history.backend == "counted"
    assert torch.equal(ens(x), reference(x))
    before = len(calls)
    assert torch.equal(ens.subset([0, 1])(x), reference(x)[:2])  # a part keeps the backend
    assert calls[before:]
    assert set(calls[before:]) == {2}
    ens.save(tmp_path / "ens")
    assert ds.Ensemble.load(tmp_path / "ens", build).backend == "auto"
    result = ds.sweep(build, (x, y), objective, grid={"lr": [1e-3, 1e-2]}, members=2, epochs=1, backend=backend)
    assert result.run(0).backend == "counted"
    assert table == execution.BACKENDS


def test_a_backend_from_outside_that_fails_leaves_the_loop(caplog):
    def run(skeleton, weights, buffers, x, per_member):
        raise RuntimeError("not today")

    ens = ds.Ensemble(partial(ds.nets.mlp, 3, 2, (4,)), 2, backend=execution.Backend("broken", run))
    with torch.no_grad():
        outputs = ens(torch.zeros(5, 3))
    assert outputs.shape == (2, 5, 2)
    assert "members run in a loop: not today" in caplog.text


@pytest.mark.parametrize("name", ["auto", "loop", "vmap"])
def test_a_backend_from_outside_needs_a_name_of_its_own(name):
    with pytest.raises(ValueError, match="name that is not taken"):
        ds.Ensemble(lambda: nn.Linear(2, 2), 2, backend=execution.Backend(name, execution.BACKENDS["loop"].run))

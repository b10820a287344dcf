"""Compiled ensembles, compiled members, and ensembles inside of other libraries' modules."""

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.execution.compiled import is_compiled
from dissensus.execution.exporting import is_exporting

compile_eagerly = partial(torch.compile, backend="eager")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
mse = partial(ds.objectives.independent, loss="mse")


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def compiled_in_place():
    built = network()
    built.compile(backend="eager")
    return built


def with_compiled_layer():
    built = network()
    built[0] = compile_eagerly(built[0])
    return built


COMPILED = {
    "network": lambda: compile_eagerly(network()),
    "in place": compiled_in_place,
    "layer": with_compiled_layer,
}


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_members_are_stacked_as_the_networks_they_were(kind, caplog):
    with caplog.at_level(logging.WARNING, "dissensus"):
        ens = ds.Ensemble(COMPILED[kind], 3, seed=1)
    assert [record.getMessage() for record in caplog.records] == [
        "members run without the code that was compiled for them: use torch.compile(ensemble)"
    ]
    plain = ds.Ensemble(network, 3, seed=1)
    x = torch.randn(5, 6)
    torch.testing.assert_close(ens(x), plain(x))
    assert ens.state_dict().keys() == plain.state_dict().keys()
    modules = [COMPILED[kind]() for _ in range(2)]
    copied = ds.Ensemble.from_modules(modules)
    torch.testing.assert_close(copied(x), torch.stack([module(x) for module in modules]))
    mixed = ds.Ensemble.from_modules([modules[0], nn.Linear(6, 3)])
    torch.testing.assert_close(mixed(x)[0], modules[0](x))


def test_a_compiled_ensemble_is_fitted_as_the_ensemble_it_is():
    ens = ds.Ensemble(network, 3, seed=1)
    alone, compiled = copy.deepcopy(ens), compile_eagerly(ens)
    x, y = torch.randn(16, 6), torch.randn(16, 3)
    before = compiled(x)
    ds.fit(compiled, (x, y), mse, epochs=2, batch_size=8)
    ds.fit(alone, (x, y), mse, epochs=2, batch_size=8)
    torch.testing.assert_close(compiled(x), alone(x))
    assert not torch.allclose(before, compiled(x))


@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_network_is_fitted_as_the_network_it_is(kind):
    compiled, alone = COMPILED[kind](), network()
    ordinary = {name.replace("_orig_mod.", ""): tensor for name, tensor in compiled.state_dict().items()}
    alone.load_state_dict(ordinary)
    x, y = torch.randn(16, 6), torch.randn(16, 3)
    for each in (compiled, alone):
        ds.fit(each, (x, y), mse, epochs=2, batch_size=8)
    torch.testing.assert_close(compiled(x), alone(x))
    assert is_compiled(compiled)


def test_compiling_is_not_exporting_where_pytorch_says_so_of_both(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert not is_exporting()
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True, raising=False)
    assert is_exporting()
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: False)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", False)
    assert is_exporting()

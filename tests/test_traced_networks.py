"""Backends that run a trace of a network compute what the network computes: now, and in place."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dissensus as ds

M = 3
BACKENDS = ("loop", "layerwise", "vmap", "batched", "auto")


class Scaled(nn.Module):
    """A network with settings that its code reads, and a part with a mode of its own."""

    shift = 0.5

    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(5, 8), nn.Sequential(nn.ReLU()), nn.Linear(8, 3)
        self.scale, self.powers, self.function = 1.0, [1.0, 1.0], torch.tanh

    def forward(self, x):
        h = self.part(self.first(x)) * self.scale * self.powers[1] + self.shift
        return self.last(self.function(h) * 2 if self.part.training else h)


def rescaled(network):
    network.scale = 3.0


def shifted(network):
    network.shift = 2.0


def with_powers(network):
    network.powers[1] = 3.0


def with_function(network):
    network.function = torch.sin


def with_layer(network):
    network.part[0] = nn.Sigmoid()


def with_part_in_evaluation(network):
    network.part.eval()


CHANGES = [rescaled, shifted, with_powers, with_function, with_layer, with_part_in_evaluation]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_settings_that_change_after_a_pass_count_in_the_next(backend, change):
    ensemble = ds.Ensemble(Scaled, M, backend=backend).double().train()
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = ensemble(x)
    change(ensemble.body.network)
    members = [ensemble.member(index) for index in range(M)]
    for member in members:
        change(member)
    expected = torch.stack([member(x) for member in members])
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(ensemble(x), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_settings_of_a_class_that_change_after_a_pass_count_in_the_next(backend, monkeypatch):
    ensemble = ds.Ensemble(Scaled, M, backend=backend).double()
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = ensemble(x)
    monkeypatch.setattr(Scaled, "shift", 2.0)
    expected = torch.stack([ensemble.member(index)(x) for index in range(M)])
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(ensemble(x), expected)


def test_a_network_that_counts_its_passes_is_traced_once(monkeypatch):
    class Counts(Scaled):
        passes = 0

        def forward(self, x):
            self.passes += 1
            return super().forward(x)

    ensemble = ds.Ensemble(Counts, M, backend="batched").eval()
    x = torch.randn(4, 5)
    ensemble(x)
    ensemble.body.network.passes = 7
    monkeypatch.setattr(type(ensemble.body.skeleton), "trace", None)
    ensemble(x)
    assert ensemble.body.ran == "batched"


class Writes(nn.Module):
    """A network that writes into values, which something else may read under another name."""

    def __init__(self, middle=nn.Identity):
        super().__init__()
        self.first, self.middle, self.relu = nn.Linear(6, 6), middle(), nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 3)


class WritesThroughALayer(Writes):
    def forward(self, x):
        h = self.first(x)
        return self.last(self.relu(self.middle(h)) + h)


class Adds(Writes):
    def forward(self, x):
        h = self.first(x)
        g = h
        g += 1
        g *= 2
        g -= 0.5
        return self.last(g * h)


class WritesIntoTheInput(Writes):
    def forward(self, x):
        return self.last(self.relu(self.middle(x)))


class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.middle, self.last = nn.Identity(), nn.Linear(4, 3)


class PoolsWhatItWrites(Convolves):
    def forward(self, x):
        h = self.conv(x)
        return self.last(self.pool(self.relu(self.middle(h))).mean((2, 3)) + h.mean((2, 3)))


class AddsToWhatIsPooled(Convolves):
    def forward(self, x):
        h = self.pool(self.relu(self.conv(x)))
        h += 1
        return self.last((h * h).mean((2, 3)))


class WritesIntoFlattened(Convolves):
    def forward(self, x):
        h = self.conv(x)
        return self.last(self.relu(torch.flatten(h, 1)).view(len(h), 4, -1).mean(2) * h.mean((2, 3)))


def flattening():
    return WritesThroughALayer(nn.Flatten)


def dropping():
    return WritesThroughALayer(lambda: nn.Dropout(0.5))


NETWORKS = {
    "identity": (WritesThroughALayer, (6,)),
    "flatten": (flattening, (6,)),
    "dropout": (dropping, (6,)),
    "operators": (Adds, (6,)),
    "input": (WritesIntoTheInput, (6,)),
    "pooling": (PoolsWhatItWrites, (3, 6, 6)),
    "pooled": (AddsToWhatIsPooled, (3, 6, 6)),
    "view": (WritesIntoFlattened, (3, 6, 6)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_in_place_is_read_as_in_the_network(backend, name):
    build, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build, M, backend=backend).double().eval()
    x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    expected = torch.stack([member(x.clone()) for member in ensemble])
    for _ in range(2):
        torch.testing.assert_close(ensemble(x), expected)
        torch.testing.assert_close(x, kept, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["vmap", "batched"])
def test_what_is_written_in_place_is_shared_as_in_the_network(backend):
    class OnATrunk(Writes):
        def __init__(self):
            super().__init__()
            self.first.requires_grad_(False)
            with torch.no_grad():
                for tensor in self.first.parameters():
                    tensor.fill_(0.3)

        def forward(self, x):
            h = self.first(x)
            g = h
            g += 1
            return self.last(F.relu(g * h))

    ensemble = ds.Ensemble(OnATrunk, M, backend=backend, shared="frozen").double().eval()
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ensemble(x), torch.stack([member(x) for member in ensemble]))


def test_copies_of_members_have_the_modes_of_their_layers():
    ensemble = ds.Ensemble(Scaled, M).train()
    ensemble.body.network.part.eval()
    for copied in (ensemble.member(0), ensemble.subset([1, 2]).member(1), ensemble[0]):
        modes = [layer.training for layer in copied.modules()]
        assert modes == [layer.training for layer in ensemble.body.network.modules()]
    assert not any(layer.training for layer in ensemble.eval().member(0).modules())

"""Monte Carlo dropout: the ensemble that everyone knows, from a network that is asked several times with dropout on."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dissensus import checks
from dissensus.dropout import KeyedDropout, dropped
from dissensus.masks.layouts import DROPOUTS
from dissensus.masks.network import Where, insert, places
from dissensus.randomness import Use, derived_seed, keep_mask


class _Dropout(nn.Module):
    """Dropout that goes on in evaluation, with masks that depend on the place in the batch alone."""

    key: Tensor

    def __init__(self, inner: nn.Module, rate: float, channel_axes: int, seed: int) -> None:
        super().__init__()
        self.inner, self.rate, self.channel_axes = inner, rate, channel_axes
        self.calls = 0
        """In this pass: a layer that is used twice drops twice."""
        self.register_buffer("key", torch.tensor(seed), persistent=False)

    def forward(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "B *S"]:
        """Activations of which some are dropped."""
        if self.training or self.rate == 0:
            return self.inner(x)
        shape = x.shape[: x.ndim - self.channel_axes] + (1,) * self.channel_axes
        step = torch.full_like(self.key, self.calls)
        self.calls += 1
        return dropped(x, keep_mask(tuple(shape), self.rate, self.key, step), self.rate)


class MonteCarlo(nn.Module):
    """A network with dropout as an ensemble: in evaluation N passes with dropout on, ``x [B, ...] -> [N, B, ...]``.

    In training it is the network, ``[1, B, ...]``. Passes are drawn by the seed: the same batch gives the same outputs.

    Args:
        network: With dropout layers; it is copied.
        count: N.
        seed: Determines what is dropped.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    >>> MonteCarlo(network, 4).eval()(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """

    members_inside = True

    def __init__(self, network: nn.Module, count: int, seed: int = 0) -> None:
        super().__init__()
        self.count = checks.count("count", count)
        self.network = copy.deepcopy(network)
        found: dict[int, _Dropout] = {}
        for parent in list(self.network.modules()):
            for name, child in parent._modules.items():
                if isinstance(child, nn.AlphaDropout):
                    checks.refuse("network", "have ordinary dropout", "nn.AlphaDropout")
                if isinstance(child, DROPOUTS) and not isinstance(parent, _Dropout):
                    made = _Dropout(
                        child, float(child.p), _channel_axes(child), derived_seed(seed, Use.MONTE_CARLO, len(found))
                    )
                    parent._modules[name] = found.setdefault(id(child), made)  # one layer in two places stays one
        if not found:
            fix = "`dissensus.masks.monte_carlo` puts some in."
            checks.refuse("network", "have dropout layers", "one without", fix)
        self.train(network.training)

    def forward(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "N B *R"]:
        """Predictions of all passes, or in training of one."""
        if self.training:
            return self.network(x).unsqueeze(0)
        try:
            return self.network(x.repeat(self.count, *[1] * (x.ndim - 1))).unflatten(0, (self.count, -1))
        finally:
            for layer in self.network.modules():
                if isinstance(layer, _Dropout):
                    layer.calls = 0


def _channel_axes(layer: nn.Module) -> int:
    """Trailing axes that a layer drops together."""
    kinds = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
    return layer.channel_axes if isinstance(layer, KeyedDropout) else kinds.get(type(layer), 0)


def monte_carlo(
    network: nn.Module, count: int, rate: float, *, where: Where = "activations", seed: int = 0
) -> MonteCarlo:
    """Put dropout into a network, where `convert` would put masks, and ask it N times; the network is copied.

    >>> monte_carlo(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), 4, 0.1).count
    4
    """
    checks.number("rate", rate, 0, 1)
    graph, found = places(network, where)
    for number, (node, _) in enumerate(found):
        name = f"dropout_{number}"
        graph.add_submodule(name, nn.Dropout(rate))
        insert(graph, node, name, instead=where == "dropout")
    return MonteCarlo(graph.train(network.training), count, seed).train(network.training)

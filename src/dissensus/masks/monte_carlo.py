"""Monte Carlo dropout: an ensemble from several passes of one network with dropout switched on."""

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
    """Dropout that is active in evaluation, with masks that depend on the position in the batch alone."""

    key: Tensor

    def __init__(self, inner: nn.Module, rate: float, channel_axes: int, seed: int) -> None:
        super().__init__()
        self.inner, self.rate, self.channel_axes = inner, rate, channel_axes
        self.calls = 0
        """Number of calls in this pass: a layer that is called twice draws two masks."""
        self.register_buffer("key", torch.tensor(seed), persistent=False)

    def forward(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "B *S"]:
        """Activations after dropout."""
        if self.training or self.rate == 0:
            return self.inner(x)
        shape = x.shape[: x.ndim - self.channel_axes] + (1,) * self.channel_axes
        step = torch.full_like(self.key, self.calls)
        self.calls += 1
        return dropped(x, keep_mask(tuple(shape), self.rate, self.key, step), self.rate)


class MonteCarlo(nn.Module):
    """A network with dropout as an ensemble: in evaluation N passes with dropout on, ``x [B, ...] -> [N, B, ...]``.

    In training the output is the network's, ``[1, B, ...]``. Masks depend on the seed: the same batch gives the same
    outputs.

    Args:
        network: A network with dropout layers, which is copied.
        count: N.
        seed: Determines the masks.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    >>> MonteCarlo(network, 4).eval()(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """

    members_inside = True

    def __init__(self, network: nn.Module, count: int, seed: int = 0) -> None:
        super().__init__()
        self.count = checks.count("count", count)
        self.network = copy.deepcopy(network)
        dropouts: dict[int, _Dropout] = {}
        for parent in list(self.network.modules()):
            for name, child in parent._modules.items():
                if isinstance(child, nn.AlphaDropout):
                    checks.refuse("network", "have ordinary dropout", "nn.AlphaDropout")
                if isinstance(child, DROPOUTS) and not isinstance(parent, _Dropout):
                    layer = _Dropout(
                        child, float(child.p), _channel_axes(child), derived_seed(seed, Use.MONTE_CARLO, len(dropouts))
                    )
                    parent._modules[name] = dropouts.setdefault(
                        id(child), layer
                    )  # a layer in two places stays one layer
        if not dropouts:
            fix = "`dissensus.masks.monte_carlo` inserts them."
            checks.refuse("network", "have dropout layers", "one without", fix)
        self.train(network.training)

    def forward(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "N B *R"]:
        """Predictions of all passes; in training, of one pass."""
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
    """Insert dropout into a copy of a network where `convert` would insert masks, and run it N times.

    >>> monte_carlo(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), 4, 0.1).count
    4
    """
    checks.number("rate", rate, 0, 1)
    graph, mask_places = places(network, where)
    for number, (node, _) in enumerate(mask_places):
        name = f"dropout_{number}"
        graph.add_submodule(name, nn.Dropout(rate))
        insert(graph, node, name, instead=where == "dropout")
    return MonteCarlo(graph.train(network.training), count, seed).train(network.training)

"""Initialisation of the ready-made networks."""

from torch import nn


def he_normal(network: nn.Module, *kinds: type[nn.Conv2d] | type[nn.Linear]) -> nn.Module:
    """The network, with weights of these kinds of layers drawn anew from N(0, 2 / fan-in) and their biases zero.

    >>> layer = he_normal(nn.Conv2d(8, 512, 5), nn.Conv2d)
    >>> round(layer.weight.std().item(), 2), layer.bias.any().item()
    (0.1, False)
    """
    for layer in network.modules():
        if isinstance(layer, kinds):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network

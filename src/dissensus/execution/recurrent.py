"""Recurrent layers, which keep a second list of their weights.

On a GPU, ``nn.LSTM`` and its relatives move all weights of a layer into one chunk of memory (``flatten_parameters``),
whenever they notice that a weight has changed its place. Stacked weights ``[M, ...]`` have the wrong shape for it, and
weights that are lent for a pass must stay where they are.
"""

from torch import nn


def _left_in_place() -> None:
    """Replaces ``flatten_parameters``."""


def keep_in_place(network: nn.Module) -> nn.Module:
    """Keep recurrent layers of a network from moving their weights; in place."""
    for layer in recurrent_layers(network):
        vars(layer)["flatten_parameters"] = _left_in_place
    return network


def as_ordinary(network: nn.Module) -> nn.Module:
    """Let recurrent layers of a network move their weights again; in place."""
    for layer in recurrent_layers(network):
        vars(layer).pop("flatten_parameters", None)
    return network


def recurrent_layers(network: nn.Module) -> list[nn.RNNBase]:
    """The recurrent layers of a network."""
    return [layer for layer in network.modules() if isinstance(layer, nn.RNNBase)]

"""A network for tables whose members share their weights."""

from collections.abc import Sequence

from torch import nn

from dissensus.adapters import tabm as adapted
from dissensus.nets.mlp import mlp


def tabm(inputs: int, outputs: int, hidden: Sequence[int] = (512, 512, 512), *, dropout: float = 0.1) -> nn.Module:
    """A member of TabM (Gorishniy et al. 2025): a multilayer perceptron between scales, with a last layer of its own.

    Use it with ``Ensemble(partial(nets.tabm, 10, 3), members=32, shared=adapters.SHARED)``; see `dissensus.adapters`.
    Sizes are those of the paper. Biases of members start apart, while TabM starts them equal; with
    ``base = nets.mlp(...)`` and ``Ensemble(lambda: adapters.tabm(base), ...)`` they start equal here too.

    >>> from functools import partial
    >>> import torch
    >>> from dissensus import Ensemble, adapters
    >>> ens = Ensemble(partial(tabm, 10, 3, (16, 16)), members=8, shared=adapters.SHARED)
    >>> ens(torch.zeros(5, 10)).shape, sum(p.numel() for p in ens.parameters())
    (torch.Size([8, 5, 3]), 1544)
    """
    return adapted(mlp(inputs, outputs, hidden, dropout=dropout))

"""Adapters folded into the weights of ordinary layers."""

import copy

from torch import nn

from dissensus import checks
from dissensus.adapters.layers import check_network, mapped
from dissensus.adapters.lora import LoraConv2d, LoraLinear
from dissensus.adapters.scaling import ScaledConv2d, ScaledLinear

ADAPTED = (LoraLinear, LoraConv2d, ScaledLinear, ScaledConv2d)


def merge(network: nn.Module) -> nn.Module:
    """A copy of a member as an ordinary network, whose weights hold what its adapters did.

    Outputs are equal up to rounding. All parameters want gradients again.

    >>> import torch
    >>> from dissensus.adapters import lora
    >>> adapted = lora(nn.Linear(4, 3), rank=2)
    >>> _ = nn.init.normal_(adapted.up)
    >>> x = torch.ones(1, 4)
    >>> torch.allclose(merge(adapted)(x), adapted(x)), merge(adapted)
    (True, Linear(in_features=4, out_features=3, bias=True))
    """
    check_network(network)
    if not any(isinstance(module, ADAPTED) for module in network.modules()):
        checks.refuse("network", "have adapters", f"a {type(network).__name__} without any")
    merged = mapped(copy.deepcopy(network), ADAPTED, lambda layer: layer.merged())
    return merged.requires_grad_(True)

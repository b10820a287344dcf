"""What an ensemble costs, in multiples of one network: numbers to store, inference and training.

Operations are those of linear layers and convolutions, as PyTorch counts them. Scales, norms and losses are left out.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


class Operations(NamedTuple):
    """Operations of a network, or of several, on some examples."""

    inference: float
    step: float
    """Forward and backward, without gradients of what is frozen."""

    def times(self, networks: int, common: float = 0.0) -> "Operations":
        """Those of several networks; ``common`` operations without a gradient are done once for all of them."""
        return Operations(*(common + networks * (part - common) for part in self))


def operations(network: nn.Module, x: Tensor) -> Operations:
    """Operations of one network on inputs.

    >>> operations(nn.Linear(4, 3), torch.zeros(2, 4))  # 2·2·4·3 forward, and as many for the weights
    Operations(inference=48.0, step=96.0)
    >>> frozen = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 5))
    >>> operations(frozen, torch.zeros(2, 4))  # 48 + 60 forward, 60 for the last weights
    Operations(inference=108.0, step=168.0)
    """
    network = copy.deepcopy(network).cpu()
    with torch.no_grad(), FlopCounterMode(display=False) as inference:
        network.eval()(x)
    with torch.enable_grad(), FlopCounterMode(display=False) as step:
        network.train()(x).logsumexp(-1).sum().backward()
    return Operations(float(inference.get_total_flops()), float(step.get_total_flops()))


def common_operations(network: nn.Module, x: Tensor, own: Sequence[nn.Module]) -> float:
    """Operations of inference outside of the layers ``own`` of the network: done once for members that share the rest.

    >>> network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    >>> common_operations(network, torch.zeros(2, 4), [network[1]])
    48.0
    """
    inputs: dict[nn.Module, Tensor] = {}

    def keep(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs[layer] = arguments[0]

    hooks = [layer.register_forward_pre_hook(keep) for layer in own]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as whole:
            network.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad(), FlopCounterMode(display=False) as part:
        for layer, value in inputs.items():
            layer(value)
    return float(whole.get_total_flops() - part.get_total_flops())

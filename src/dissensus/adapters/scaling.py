"""Members that share weights up to scales of inputs and outputs: BatchEnsemble and TabM."""

import copy
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from dissensus import checks
from dissensus.adapters.layers import Adapted, Targets, check_network, chosen, replaced, with_linear_layers, with_weight

SHARED = "*base.weight"
"""Pattern of the weights that members of `batch_ensemble` and `tabm` share, for ``Ensemble(..., shared=SHARED)``."""

Start = Literal["signs", "normal", "ones"]


class ScaledLinear(Adapted):
    """A linear layer between scales: y = s ∘ (W (r ∘ x)) + b, so W ∘ (s rᵀ) is its weight."""

    base: nn.Linear

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.bias = base.bias
        base.bias = None  # pyright: ignore[reportAttributeAccessIssue] (a layer without a bias has None)
        self.base = base
        self.scale_in = nn.Parameter(base.weight.new_ones(base.in_features))
        self.scale_out = nn.Parameter(base.weight.new_ones(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the scaled layer.

        Scaling inputs and outputs keeps three tensors of their size for the backward pass. Where there are more of
        their numbers than of the weight's, the weight is scaled instead, in training.
        """
        if self.training and torch.is_grad_enabled() and self._has_many(x):
            return F.linear(x, self.weight, self.bias)
        y = self.base(x * self.scale_in) * self.scale_out
        return y if self.bias is None else y + self.bias

    def _has_many(self, x: Tensor) -> bool:
        """Whether inputs and outputs have more numbers than two weights. A tracer's stand-in for inputs does not."""
        base = self.base
        if not isinstance(x, Tensor) or type(base) is not nn.Linear or base._forward_hooks or base._forward_pre_hooks:
            return False
        into, out = base.in_features, base.out_features
        return x.numel() // into * (into + out) > 2 * into * out

    @property
    def weight(self) -> Tensor:
        """W ∘ (s rᵀ)."""
        return self.base.weight * (self.scale_out.unsqueeze(1) * self.scale_in)

    def merged(self) -> nn.Linear:
        """An ordinary layer with the same outputs."""
        layer = with_weight(self.base, self.weight)
        layer.bias = copy.deepcopy(self.bias)
        return layer


class ScaledConv2d(Adapted):
    """A 2-D convolution between scales of its input and output channels."""

    base: nn.Conv2d

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__()
        self.bias = base.bias
        base.bias = None
        self.base = base
        self.scale_in = nn.Parameter(base.weight.new_ones(base.in_channels))
        self.scale_out = nn.Parameter(base.weight.new_ones(base.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the scaled layer."""
        y = self.base(x * self.scale_in.view(-1, 1, 1)) * self.scale_out.view(-1, 1, 1)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)

    @property
    def weight(self) -> Tensor:
        """The weight of a convolution with the same outputs."""
        base = self.base
        into = self.scale_in.view(base.groups, 1, -1).expand(-1, base.out_channels // base.groups, -1)
        return base.weight * (self.scale_out.unsqueeze(1) * into.flatten(0, 1)).view(*base.weight.shape[:2], 1, 1)

    def merged(self) -> nn.Conv2d:
        """An ordinary layer with the same outputs."""
        layer = with_weight(self.base, self.weight)
        layer.bias = copy.deepcopy(self.bias)
        return layer


def batch_ensemble(
    network: nn.Module, targets: Targets = None, *, start: Literal["signs", "normal"] = "signs"
) -> nn.Module:
    """A copy of a network whose layers are between scales of inputs and outputs (BatchEnsemble, Wen et al. 2020).

    Member i has the weight W ∘ (s_i r_iᵀ) and its own bias. W is shared: ``Ensemble(..., shared=adapters.SHARED)``.

    Args:
        network: The network, new or trained. It is copied, so members start with the same weights W and biases.
        targets: Names of layers, as for `lora`. The default is all linear layers and 2-D convolutions.
        start: First values of scales: ``"signs"`` for −1 and +1 at random, ``"normal"`` for numbers around 1 with
            standard deviation 0.5. The paper uses both.

    >>> adapted = batch_ensemble(nn.Linear(4, 3))
    >>> {name: tuple(p.shape) for name, p in adapted.named_parameters()}
    {'bias': (3,), 'scale_in': (4,), 'scale_out': (3,), 'base.weight': (3, 4)}
    """
    check_network(network)
    checks.one_of("start", start, ("signs", "normal"))
    network = with_linear_layers(copy.deepcopy(network))
    adapted = {name: _scaled(name, layer) for name, layer in chosen(network, targets).items()}
    for layer in adapted.values():
        _draw(layer.scale_in, start)
        _draw(layer.scale_out, start)
    return replaced(network, dict(adapted))


def tabm(network: nn.Module, *, start: Start = "signs", head: str | None = None) -> nn.Module:
    """A copy of a network as a member of TabM (Gorishniy et al. 2025): scales begin with 1, but for the first ones.

    All linear layers but the last have the weight W ∘ (s_i r_iᵀ) with a shared W, as in `batch_ensemble`. The last
    layer is a member's own, with weights that it draws. All scales start with 1, except the input scale of the first
    layer, which tells members apart. `fit` averages gradients of W over members, as TabM does. Use
    ``Ensemble(..., shared=adapters.SHARED)``.

    Args:
        network: A network of linear layers, such as `dissensus.nets.mlp`. It is copied.
        start: First values of the first scale: ``"signs"``, −1 and +1 at random, as TabM has it for plain features, or
            ``"normal"``, standard normal numbers, as it has it for embedded features.
        head: Name of the last layer. The default is the last linear layer.

    >>> adapted = tabm(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> [name for name, _ in adapted.named_parameters()]
    ['0.bias', '0.scale_in', '0.scale_out', '0.base.weight', '2.weight', '2.bias']
    """
    check_network(network)
    checks.one_of("start", start, ("signs", "normal"))
    network = with_linear_layers(copy.deepcopy(network))
    layers = {name: layer for name, layer in chosen(network, None).items() if isinstance(layer, nn.Linear)}
    if len(layers) < 2:
        checks.refuse(
            "network", "have two linear layers or more", f"{len(layers)}", "TabM shares all but the last one."
        )
    head = list(layers)[-1] if head is None else head
    if head not in layers:
        fix = checks.nearest(head, list(layers), f"There are: {', '.join(layers)}.")
        checks.refuse("head", "name a linear layer", repr(head), fix)
    layers.pop(head).reset_parameters()
    adapted = {name: _scaled(name, layer) for name, layer in layers.items()}
    first = next(iter(adapted.values())).scale_in
    if start == "normal":
        nn.init.normal_(first)
    else:
        _draw(first, "signs")
    return replaced(network, dict(adapted))


def _scaled(name: str, layer: nn.Module) -> ScaledLinear | ScaledConv2d:
    if parametrize.is_parametrized(layer):
        fix = "Leave the layer out of `targets`, or use torch.nn.utils.parametrize.remove_parametrizations."
        checks.refuse("network", "have plain weights, which members share", f"parametrized ones in {name!r}", fix)
    return ScaledLinear(layer) if isinstance(layer, nn.Linear) else ScaledConv2d(cast(nn.Conv2d, layer))


def _draw(scale: nn.Parameter, start: str) -> None:
    with torch.no_grad():
        if start == "signs":
            scale.copy_(torch.randint(2, scale.shape, device=scale.device) * 2 - 1)
        else:
            nn.init.normal_(scale, 1.0, 0.5)

"""Low-rank adapters, W + (α/r)·B·A on frozen weights W (LoRA, Hu et al. 2022; as ensembles, Halbheer et al. 2024)."""

import copy
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dissensus import checks
from dissensus.adapters.layers import Adapted, Targets, check_network, chosen, is_transposed, replaced, with_weight


class LoraLinear(Adapted):
    """A frozen linear layer with a low-rank addition: y = W x + b + scale · B (A x)."""

    base: nn.Linear

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        like, (into, out) = _trainable_like(base.weight), self._sizes()
        self.down = nn.Parameter(like.new_empty(rank, into))
        self.up = nn.Parameter(like.new_zeros(out, rank))
        nn.init.kaiming_uniform_(self.down, math.sqrt(5))

    def _sizes(self) -> tuple[int, int]:
        return self.base.in_features, self.base.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the layer, and of its addition."""
        y, x = self.base(x), _input(x, self.down)
        return y + F.linear(_scaled(F.linear(x, self.down), self.scale), self.up).to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """W + scale · B A."""
        weight = self.base.weight
        return (weight + self.scale * (self.up @ self.down)).to(weight.dtype)

    def merged(self) -> nn.Linear:
        """An ordinary layer with the same outputs."""
        return with_weight(self.base, self.weight)


class LoraTransposed(LoraLinear):
    """`LoraLinear` for ``Conv1D`` of transformers, whose weight is ``[in, out]``."""

    def _sizes(self) -> tuple[int, int]:
        into, out = self.base.weight.shape
        return into, out

    @property
    def weight(self) -> Tensor:
        """W + scale · (B A)ᵀ."""
        weight = self.base.weight
        return (weight + self.scale * (self.up @ self.down).t()).to(weight.dtype)


class LoraConv2d(Adapted):
    """A frozen convolution with a low-rank addition: a convolution to ``rank`` channels, then one of size 1."""

    base: nn.Conv2d

    def __init__(self, base: nn.Conv2d, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        like = _trainable_like(base.weight)
        self.down = nn.Parameter(like.new_empty(rank, *base.weight.shape[1:]))
        self.up = nn.Parameter(like.new_zeros(base.out_channels, rank, 1, 1))
        nn.init.kaiming_uniform_(self.down, math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the layer, and of its addition."""
        y, x = self.base(x), _input(x, self.down)
        inner = _scaled(self.base._conv_forward(x, self.down, None), self.scale)
        return y + F.conv2d(inner, self.up).to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight of a convolution with the same outputs."""
        weight = self.base.weight
        return (weight + self.scale * torch.einsum("or,r...->o...", self.up.flatten(1), self.down)).to(weight.dtype)

    def merged(self) -> nn.Conv2d:
        """An ordinary layer with the same outputs."""
        return with_weight(self.base, self.weight)


def _input(x: Tensor, weight: Tensor) -> Tensor:
    """Inputs in the dtype of an adapter; autocast needs no such copy, since it casts both to its own."""
    if isinstance(x, Tensor) and x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(weight.dtype)


def _scaled(inner: Tensor, scale: float) -> Tensor:
    """The few numbers between both matrices, times α / r, rather than the many outputs."""
    return inner if scale == 1 else inner * scale


def _trainable_like(weight: Tensor) -> Tensor:
    """An empty tensor in the precision of adapters: that of the weight, or float32 where it has 16 bits."""
    return weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))


def lora(
    network: nn.Module,
    rank: int = 8,
    targets: Targets = None,
    *,
    alpha: float | None = None,
    trained: str | Sequence[str] = (),
) -> nn.Module:
    """A copy of a network whose weights are frozen, with low-rank adapters on some layers.

    ΔW = (α / r) · B A, with A ``[r, in]`` drawn as the weights of ``nn.Linear`` are, and B ``[out, r]`` zero: at first
    the outputs are those of the network. Members of an ensemble draw different A, and so drift apart.

    Args:
        network: A trained network. It is copied.
        rank: r.
        targets: Names of linear layers and 2-D convolutions: patterns of whole names, or last parts of names, as
            ``["query", "value"]`` in peft. The default is all of them, those of GPT-2 (``Conv1D`` of transformers)
            too. Layers inside ``nn.MultiheadAttention``, and grouped convolutions, take no adapters.
        alpha: α. The default is r, so that ΔW = B A.
        trained: Patterns of names of parameters that are trained as they are, per member, such as ``"head.*"``.

    Adapters of bfloat16 or float16 weights are float32, as in peft: small updates would be rounded away. Their addition
    is cast to the dtype of the layer's outputs.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> adapted = lora(network, rank=2, trained=["2.*"], targets="0")
    >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
    ['0.down', '0.up', '2.weight', '2.bias']
    """
    check_network(network)
    rank = checks.count("rank", rank)
    alpha = float(rank) if alpha is None else checks.number("alpha", alpha, 0, open_low=True)
    network, trained = copy.deepcopy(network), [trained] if isinstance(trained, str) else list(trained)
    names = [name for name, _ in network.named_parameters()]
    for pattern in trained:
        if not any(fnmatchcase(name, pattern) for name in names):
            checks.refuse("trained", "match names of parameters", repr(pattern), checks.nearest(pattern, names, ""))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trained))
    layers = chosen(network, targets)
    kept = {name for name in layers if any(fnmatchcase(f"{name}.weight", pattern) for pattern in trained)}
    adapted: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        if name in kept:
            continue  # it is trained as a whole
        if is_transposed(layer):
            adapted[name] = LoraTransposed(cast(nn.Linear, layer), rank, alpha / rank)
        elif isinstance(layer, nn.Linear):
            adapted[name] = LoraLinear(layer, rank, alpha / rank)
        elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
            adapted[name] = LoraConv2d(layer, rank, alpha / rank)
        elif targets is not None:
            got = f"{name!r} with {cast(nn.Conv2d, layer).groups} groups"
            checks.refuse("targets", "name convolutions without groups", got, "Leave it out.")
    if not adapted:
        checks.refuse("targets", "leave a layer for adapters", "none: all of them are in `trained`, or have groups")
    return replaced(network, adapted)

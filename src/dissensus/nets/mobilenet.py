"""Networks of inverted residual blocks."""

from collections import OrderedDict

from jaxtyping import Float
from torch import Tensor, nn

from dissensus import checks
from dissensus.nets.initialisation import he_normal

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, blocks and the first block's stride of each stage (t, c, n, s of the paper's Table 2)."""


class Residual(nn.Module):
    """x + conv(x)."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Feature maps of the block."""
        return x + self.conv(x)


def mobilenet_v2(classes: int = 1000, channels: int = 3) -> nn.Module:
    """MobileNetV2 of width 1 (Sandler et al. 2018), with the parameter names of torchvision's public weights.

    Convolutions start He-normal, and have no bias in front of batch norm, which would cancel it. Takes images
    of any size; the resolution falls by a factor of 32.

    >>> sum(p.numel() for p in mobilenet_v2().parameters())
    3504872
    """
    checks.count("classes", classes)
    features: list[nn.Module] = [_convolution(checks.count("channels", channels), 32, 3, stride=2)]
    before = 32
    for expansion, width, blocks, first_stride in STAGES:
        for stride in (first_stride, *(1,) * (blocks - 1)):
            conv = _inverted(before, width, stride, expansion)
            same_shape = stride == 1 and before == width
            features.append(Residual(conv) if same_shape else nn.Sequential(OrderedDict(conv=conv)))
            before = width
    features.append(_convolution(before, 1280, 1))
    network = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes)),
        )
    )
    return he_normal(network, nn.Conv2d)


def _convolution(before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU6(inplace=True))


def _inverted(before: int, after: int, stride: int, expansion: int) -> nn.Sequential:
    """Widen by a 1×1 convolution (not at expansion 1), filter each channel alone, narrow without an activation."""
    inner = before * expansion
    widening = [_convolution(before, inner, 1)] if expansion > 1 else []
    filtering = _convolution(inner, inner, 3, stride=stride, groups=inner)
    return nn.Sequential(*widening, filtering, nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after))

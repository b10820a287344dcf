"""Residual networks of basic blocks: the narrow ones for CIFAR (20 and 32 layers) and the wide ones (18 and 34).

Convolutions in front of batch norm have no bias, which batch norm would cancel.
"""

from collections import OrderedDict
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from dissensus import checks
from dissensus.nets.initialisation import he_normal

Shortcut = Callable[[int, int, int], nn.Module]
"""(channels before, channels after, stride) -> the layer past a block that changes its input's shape."""


class Block(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)), with 3×3 convolutions, the first one strided."""

    def __init__(self, before: int, after: int, stride: int, downsample: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D h w"]:
        """Feature maps of the block."""
        inner = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


def resnet20(classes: int = 10, channels: int = 3) -> nn.Module:
    """ResNet-20 of the ADP paper (He et al. 2016, for CIFAR): stages of 16, 32 and 64 channels, three blocks each.

    A 1×1 convolution with bias and without batch norm is the shortcut where the width changes. Weights start He-normal,
    those of the linear layer too. Takes images of any size.
    Differs from the Keras network of the paper's authors (P2333/Adaptive-Diversity-Promoting on GitHub): no biases in
    front of batch norm (688 of its 273,066 trainable parameters), torch's symmetric padding of strided convolutions,
    torch's constants of batch norm.

    >>> sum(p.numel() for p in resnet20().parameters())
    272378
    """
    return _narrow(3, classes, channels)


def resnet32(classes: int = 10, channels: int = 3) -> nn.Module:
    """ResNet-32: as `resnet20`, with five blocks in each stage.

    >>> sum(p.numel() for p in resnet32().parameters())
    466810
    """
    return _narrow(5, classes, channels)


def resnet18(classes: int = 10, channels: int = 3, stem: str = "cifar") -> nn.Module:
    """ResNet-18: four stages of 64 to 512 channels, two blocks each; shortcuts are 1×1 convolutions with batch norm.

    ``stem="cifar"`` starts with a 3×3 convolution and keeps the resolution; ``stem="imagenet"`` starts with a 7×7
    convolution and max-pooling, both of stride 2, and carries the parameter names of torchvision's public weights.
    Takes images of any size. Convolutions start He-normal.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    return _wide((2, 2, 2, 2), classes, channels, stem)


def resnet34(classes: int = 10, channels: int = 3, stem: str = "cifar") -> nn.Module:
    """ResNet-34: as `resnet18`, with 3, 4, 6 and 3 blocks.

    >>> sum(p.numel() for p in resnet34().parameters())
    21282122
    """
    return _wide((3, 4, 6, 3), classes, channels, stem)


def _narrow(blocks: int, classes: int, channels: int) -> nn.Module:
    stem = _stem(checks.count("channels", channels), 16, 3, 1)
    network = _chain(stem, (16, 32, 64), (blocks,) * 3, _projection, checks.count("classes", classes))
    return he_normal(network, nn.Conv2d, nn.Linear)


def _wide(depths: tuple[int, ...], classes: int, channels: int, stem: str) -> nn.Module:
    checks.one_of("stem", stem, ["cifar", "imagenet"])
    kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
    layers = _stem(checks.count("channels", channels), 64, kernel, stride)
    if stem == "imagenet":
        layers["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
    network = _chain(layers, (64, 128, 256, 512), depths, _normed_projection, checks.count("classes", classes))
    return he_normal(network, nn.Conv2d)


def _stem(channels: int, width: int, kernel: int, stride: int) -> OrderedDict[str, nn.Module]:
    return OrderedDict(
        conv1=nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
    )


def _chain(
    layers: OrderedDict[str, nn.Module],
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    shortcut: Shortcut,
    classes: int,
) -> nn.Sequential:
    """The stem's layers, then stages that halve the resolution from the second on, pooling and one linear layer."""
    before = widths[0]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
        stride = 1 if stage == 1 else 2
        first = Block(before, width, stride, nn.Identity() if stage == 1 else shortcut(before, width, stride))
        rest = [Block(width, width, 1, nn.Identity()) for _ in range(depth - 1)]
        layers[f"layer{stage}"] = nn.Sequential(first, *rest)
        before = width
    layers.update(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(before, classes))
    return nn.Sequential(layers)


def _projection(before: int, after: int, stride: int) -> nn.Module:
    return nn.Conv2d(before, after, 1, stride)


def _normed_projection(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

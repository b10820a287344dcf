"""Small convolutional networks."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from dissensus import checks


def cnn(
    channels: int,
    outputs: int,
    image_size: int,
    widths: Sequence[int] = (16, 32),
    *,
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Blocks of 3×3 convolution (padded), optional batch norm, ReLU and 2×2 max-pooling, then one linear layer.

    >>> net = cnn(1, 10, 8)
    >>> sum(p.numel() for p in net.parameters())
    6090
    """
    if image_size < 2 ** len(widths):
        checks.refuse("image_size", f"be at least {2 ** len(widths)} for {len(widths)} poolings", image_size)
    layers: list[nn.Module] = []
    for before, after in zip([channels, *widths], widths, strict=False):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(after)] if batch_norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    side = image_size // 2 ** len(widths)
    layers += [nn.Flatten()] + ([nn.Dropout(dropout)] if dropout else [])
    return nn.Sequential(*layers, nn.Linear(widths[-1] * side * side, outputs))


def vanilla_cnn(classes: int = 10, channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """The vanilla network of the collusion paper (Table 3): two convolutions, two linear layers, dropout of 0.1.

    Differs from the table, whose strides and paddings do not give its 500 features: unpadded 5×5 convolutions of
    stride 1, each followed by 2×2 max-pooling, do. Dropout "throughout" is read as after every hidden activation.

    >>> sum(p.numel() for p in vanilla_cnn().parameters())
    31340
    """
    if checks.count("image_size", image_size) < 16:
        checks.refuse("image_size", "be at least 16 for two unpadded 5×5 convolutions with poolings", image_size)
    side = ((image_size - 4) // 2 - 4) // 2
    widths = [checks.count("channels", channels), 10, 20]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    layers += [nn.Flatten(), nn.Linear(20 * side * side, 50), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(50, checks.count("classes", classes)))

"""Small convolutional networks."""

from collections.abc import Sequence

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

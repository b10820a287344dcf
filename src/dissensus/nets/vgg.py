"""Networks of the VGG kind."""

from torch import nn

from dissensus import checks

BLOCKS = (
    ((64, 0.3), (64, 0.0)),
    ((128, 0.4), (128, 0.0)),
    ((256, 0.4), (256, 0.4), (256, 0.0)),
    ((512, 0.4), (512, 0.4), (512, 0.0)),
    ((512, 0.4), (512, 0.4), (512, 0.0)),
)
"""Channels and dropout rate of each convolution; every block ends with 2×2 max-pooling."""
SMALLEST = 2 ** len(BLOCKS)


def vgg(classes: int = 10, channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """The VGG network of the collusion paper (Table 4), with batch norm and dropout.

    Layers in front of batch norm have no bias, which batch norm would cancel. Five poolings need 32×32
    pixels: smaller images are padded with zeros to that size, larger ones give the first linear layer more inputs.
    Differs from the table: its pooling with "Padding:2", impossible for a kernel of 2, is read as stride 2.

    >>> sum(p.numel() for p in vgg().parameters())
    14987210
    """
    checks.count("classes", classes)
    before = checks.count("channels", channels)
    missing = max(0, SMALLEST - checks.count("image_size", image_size))
    near, far = missing // 2, missing - missing // 2
    layers: list[nn.Module] = [nn.ZeroPad2d((near, far, near, far))] if missing else []
    for block in BLOCKS:
        for width, rate in block:
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            layers += [nn.Dropout(rate)] if rate else []
            before = width
        layers.append(nn.MaxPool2d(2))
    side = max(image_size, SMALLEST) // SMALLEST
    layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(before * side * side, 512, bias=False)]
    layers += [nn.BatchNorm1d(512), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(512, classes))

"""Small images and models that the tests of attacks share."""

import torch
from torch import nn

from dissensus.attacks import norms

C, SIDE = 4, 6


def images(count=24, seed=0, dtype=torch.float32):
    """Noisy copies of C patterns, with values of exactly 0 and 1 among them."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(C, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(9), dtype=dtype)
    y = torch.randint(C, (count,), generator=generator)
    noisy = patterns[y] + 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=generator, dtype=dtype)
    return noisy.clamp(0, 1), y


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 16), nn.ReLU(), nn.Linear(16, C))


class Steady(nn.Module):
    """Two layers whose sums are written out: an example's outputs and gradients are the same bits in any batch."""

    def __init__(self, width=SIDE * SIDE, classes=C, seed=0, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(width, 8, generator=generator, dtype=dtype))
        self.second = nn.Parameter(torch.randn(8, classes, generator=generator, dtype=dtype))

    def forward(self, x):
        hidden = self.layer(x.flatten(1) - 0.5, self.first).relu()
        return self.layer(hidden, self.second)

    @staticmethod
    def layer(x, weight):
        products = x.unsqueeze(1) * weight.T
        return norms.sums(products.flatten(0, 1)).view(len(x), -1)


class Normed(nn.Module):
    """Batch norm, dropout, a frozen layer and one layer that stays in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(SIDE * SIDE), nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(SIDE * SIDE).eval()
        self.head = nn.Linear(SIDE * SIDE, C)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.drop(self.frozen(self.norm(x.flatten(1)))))


def right_only(model, x, y=None):
    """Inputs with the labels that the model gives them, so that none is misclassified."""
    with torch.no_grad():
        outputs = model(x)
    return x, (outputs if outputs.ndim == 2 else outputs.softmax(-1).mean(0)).argmax(-1)


def linear(weight, bias=None):
    """A plain classifier with known weights ``[C, D]``."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(torch.zeros(weight.shape[0]) if bias is None else bias)
    return layer

"""Write golden tensors of the public `masksembles` package: its masks, and what its layers make of inputs.

Usage: python oracles/masksembles_layer.py tests/golden/masksembles.safetensors   (`make oracles` does it)
"""

import sys

import numpy as np
import torch
from masksembles.torch import Masksembles1D, Masksembles2D
from safetensors.torch import save_file

torch.manual_seed(0)
np.random.seed(0)  # noqa: NPY002 (the package draws from this one)
found: dict[str, torch.Tensor] = {}
for name, kind, channels, count, scale, shape in (
    ("flat", Masksembles1D, 24, 4, 2.0, (12, 24)),
    ("image", Masksembles2D, 32, 4, 3.0, (8, 32, 5, 3)),
    ("three", Masksembles2D, 20, 3, 1.5, (6, 20, 2, 2)),
):
    layer, x = kind(channels, count, scale), torch.randn(shape)
    with torch.no_grad():
        found |= {f"{name}.masks": layer.masks.detach(), f"{name}.x": x, f"{name}.y": layer(x)}
save_file({key: tensor.contiguous() for key, tensor in found.items()}, sys.argv[1])

"""Augmentations ``(x [B, C, H, W], generator) -> x``: batched, on the device, with independent draws per example.

All randomness comes from the generator, nothing is read on the host and no shape depends on a draw, so they can be
captured in a CUDA graph. Options are bound by `functools.partial`. Dtype and memory format are kept.
"""

import math
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dissensus import checks
from dissensus.data.batches import Augment

Images = Shaped[Tensor, "B C H W"]


def flips(x: Images, generator: torch.Generator) -> Images:
    """Mirror each image left to right with probability one half.

    >>> x = torch.arange(3.0).expand(4, 1, 1, 3)
    >>> flips(x, torch.Generator().manual_seed(0))[:, 0, 0, 0]
    tensor([2., 0., 2., 2.])
    """
    _check(x)
    mirrored = _uniform((len(x),), x, generator) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


def shifts(
    x: Images, generator: torch.Generator, *, fraction: float = 0.1, fill: Literal["nearest", "zero"] = "nearest"
) -> Images:
    """Shift images by whole pixels: uniform within ± ``fraction`` of the height and of the width, then rounded.

    These are ADP's "shifts of ±10 %". Pixels that enter the image repeat the nearest edge pixel, or are zero.

    Differs from Keras (``width_shift_range``), whose later versions interpolate linearly between pixels.

    >>> x = torch.arange(10.0).expand(1, 1, 10, 10)
    >>> shifts(x, torch.Generator().manual_seed(3), fraction=0.2)[0, 0, 0].tolist()
    [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.0, 9.0]
    """
    _check(x)
    checks.number("fraction", fraction, 0, 1)
    checks.one_of("fill", fill, ("nearest", "zero"))
    height, width = x.shape[-2:]
    draws = 2 * _uniform((2, len(x)), x, generator) - 1
    down, right = (draws[0] * (fraction * height)).round().long(), (draws[1] * (fraction * width)).round().long()
    return _shift(x, down, right, fill)


def crops(x: Images, generator: torch.Generator, *, padding: int = 4) -> Images:
    """Crop images at random, to their size, after padding with ``padding`` zeros on every side (the CIFAR protocol).

    Zero is black before standardisation and the mean colour after it.

    >>> crops(torch.ones(1, 1, 2, 3), torch.Generator().manual_seed(0), padding=1)
    tensor([[[[0., 0., 0.],
              [1., 1., 0.]]]])
    """
    _check(x)
    checks.count("padding", padding, 0)
    down, right = torch.randint(-padding, padding + 1, (2, len(x)), generator=generator, device=x.device)
    return _shift(x, down, right, "zero")


def rotations(
    x: Images,
    generator: torch.Generator,
    *,
    degrees: float = 15.0,
    interpolation: Literal["nearest", "bilinear"] = "nearest",
) -> Images:
    """Rotate images anticlockwise about their centre, by an angle uniform within ± ``degrees``; padded with zeros.

    ``"nearest"`` takes the nearest pixel, as torchvision's ``RandomRotation`` does by default.

    >>> x = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)
    >>> rotations(x, torch.Generator().manual_seed(1), degrees=60)[0, 0]
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    _check(x)
    checks.number("degrees", degrees, 0, 180)
    checks.one_of("interpolation", interpolation, ("nearest", "bilinear"))
    if interpolation == "bilinear" and not x.is_floating_point():
        checks.refuse("x", "be floating point to be interpolated", str(x.dtype), "Use x.float() / 255.", TypeError)
    angle = (2 * _uniform((len(x),), x, generator) - 1) * math.radians(degrees)
    row, column = _rotated_coordinates(angle, *x.shape[-2:])
    if interpolation == "nearest":
        return _gather(x, row.round().long(), column.round().long())
    top, left = row.floor(), column.floor()
    below, beside = (row - top).to(x.dtype).unsqueeze(1), (column - left).to(x.dtype).unsqueeze(1)
    top, left = top.long(), left.long()
    upper = torch.lerp(_gather(x, top, left), _gather(x, top, left + 1), beside)
    lower = torch.lerp(_gather(x, top + 1, left), _gather(x, top + 1, left + 1), beside)
    return torch.lerp(upper, lower, below)


def chain(*augmentations: Augment) -> Augment:
    """One augmentation that applies several in order; without arguments, the identity.

    >>> augment = chain(flips, partial(crops, padding=4), partial(rotations, degrees=15))
    >>> augment(torch.rand(8, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([8, 3, 32, 32])
    """
    return partial(_apply_all, augmentations)  # a checkpoint's fingerprint reads the arguments of a partial


def _apply_all(augmentations: tuple[Augment, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    for augmentation in augmentations:
        x = augmentation(x, generator)
    return x


def _check(x: Tensor) -> None:
    if x.ndim != 4:
        fixes = {3: "One image? Use x.unsqueeze(0). Grey images? Use x.unsqueeze(1)."}
        checks.refuse("x", "be images of shape [B, C, H, W]", checks.shape_text(x.shape), fixes.get(x.ndim, ""))


def _uniform(shape: tuple[int, ...], x: Tensor, generator: torch.Generator) -> Float[Tensor, "..."]:
    return torch.rand(
        shape, generator=generator, device=x.device, dtype=torch.float32
    )  # independent of the default dtype


def _shift(x: Images, down: Int[Tensor, " B"], right: Int[Tensor, " B"], fill: str) -> Images:
    """Images shifted by whole pixels: ``x[b, :, i − down[b], j − right[b]]``."""
    height, width = x.shape[-2:]
    row = (torch.arange(height, device=x.device) - down.unsqueeze(1)).unsqueeze(2)
    column = (torch.arange(width, device=x.device) - right.unsqueeze(1)).unsqueeze(1)
    if fill == "nearest":
        row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    return _gather(x, *torch.broadcast_tensors(row, column))


def _rotated_coordinates(
    angle: Float[Tensor, " B"], height: int, width: int
) -> tuple[Float[Tensor, "B H W"], Float[Tensor, "B H W"]]:
    """Row and column in the original image of each pixel of an image rotated by ``angle``."""
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    middle_row, middle_column = (height - 1) / 2, (width - 1) / 2
    row = (torch.arange(height, device=angle.device, dtype=angle.dtype) - middle_row).view(-1, 1)
    column = torch.arange(width, device=angle.device, dtype=angle.dtype) - middle_column
    return cos * row + sin * column + middle_row, cos * column - sin * row + middle_column


def _gather(x: Images, row: Int[Tensor, "B H W"], column: Int[Tensor, "B H W"]) -> Images:
    """``x[b, :, row[b, i, j], column[b, i, j]]``, zero where that lies outside the image."""
    batch, channels, height, width = x.shape
    outside = ((row < 0) | (row >= height) | (column < 0) | (column >= width)).flatten(1)
    index = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        pixels = x.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        gathered = pixels.gather(1, index.unsqueeze(2).expand_as(pixels)).masked_fill(outside.unsqueeze(2), 0)
        return gathered.view(batch, height, width, channels).permute(0, 3, 1, 2)
    gathered = x.flatten(2).gather(2, index.unsqueeze(1).expand(-1, channels, -1)).masked_fill(outside.unsqueeze(1), 0)
    return gathered.view(batch, channels, height, width)

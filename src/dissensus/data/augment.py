"""Augmentations ``(x [B, C, H, W], generator) -> x``: batched, on the device, with independent draws per example.

`mixup` and `cutmix` mix pairs of examples and their labels: they return functions ``(x, y, generator) -> (x, y)``.

All randomness comes from the generator, nothing is read on the host and no shape depends on a draw, so they can be
captured in a CUDA graph. Options are bound by `functools.partial`. Dtype and memory format are kept.
"""

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from dissensus import checks
from dissensus.data.batches import Augment, AugmentPair, changes_targets

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


def mixup(classes: int, alpha: float = 0.2) -> AugmentPair:
    """Mix each example and its label with another one of the batch (Zhang et al., 2018).

    x ← λ x + (1 − λ) x', y ← λ y + (1 − λ) y', λ ~ Beta(α, α), with x' a random permutation of the batch.

    Differs from the authors' code, which draws one λ for the whole batch: here every example has its own. α → 0 leaves
    examples (or swaps whole ones), α = 1 draws λ uniformly.

    Args:
        classes: C. Labels ``[B]`` become soft labels ``[B, C]``. Targets that are floats (soft labels, values) are
            mixed as they are.
        alpha: α > 0.

    Returns:
        ``(x, y, generator) -> (x, y)``, for ``fit(augment=...)``. Inputs must be floats, of any shape ``[B, ...]``.

    >>> x, y = mixup(3)(torch.rand(4, 2), torch.tensor([0, 1, 2, 2]), torch.Generator().manual_seed(0))
    >>> x.shape, y.sum(1)
    (torch.Size([4, 2]), tensor([1., 1., 1., 1.]))
    """
    return partial(_mixup, checks.count("classes", classes, 2), checks.number("alpha", alpha, 0, open_low=True))


def cutmix(classes: int, alpha: float = 1.0) -> AugmentPair:
    """Paste a box of another image into each image, and mix their labels by the area (Yun et al., 2019).

    The box has the share 1 − λ of the area, λ ~ Beta(α, α), and its centre is uniform in the image. Parts outside of
    the image are cut off, and λ becomes the share of pixels that stay, as in the authors' code. Differs from that code
    in that every image has its own λ and its own box.

    Args:
        classes: C. Labels ``[B]`` become soft labels ``[B, C]``. Targets that are floats are mixed as they are.
        alpha: α > 0; 1 draws λ uniformly.

    Returns:
        ``(x, y, generator) -> (x, y)`` for images ``[B, C, H, W]``, for ``fit(augment=...)``.

    >>> x, y = cutmix(2)(torch.ones(3, 1, 4, 4), torch.tensor([0, 0, 1]), torch.Generator().manual_seed(0))
    >>> x.shape, y.sum(1)
    (torch.Size([3, 1, 4, 4]), tensor([1., 1., 1.]))
    """
    return partial(_cutmix, checks.count("classes", classes, 2), checks.number("alpha", alpha, 0, open_low=True))


def _mixup(classes: int, alpha: float, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        checks.refuse("x", "be one tensor of floats to be mixed", got, "Images? Use x.float() / 255.", TypeError)
    share = _symmetric_beta(alpha, x, generator)
    partner = _uniform((len(x),), x, generator).argsort()
    mixed = torch.lerp(x[partner], x, _per_example(share, x))
    return mixed, _mixed_targets(y, classes, partner, share, x.dtype)


def _cutmix(classes: int, alpha: float, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if not isinstance(x, Tensor):
        checks.refuse("x", "be images of shape [B, C, H, W]", type(x).__name__, error=TypeError)
    _check(x)
    height, width = x.shape[-2:]
    side = (1 - _symmetric_beta(alpha, x, generator)).sqrt()
    centres = _uniform((2, len(x)), x, generator)
    partner = _uniform((len(x),), x, generator).argsort()
    inside = [_inside(centre, side, size) for centre, size in zip(centres, (height, width), strict=True)]
    box = inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
    share = 1 - box.float().mean((1, 2))
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return torch.where(box.unsqueeze(1), x[partner], x), _mixed_targets(y, classes, partner, share, dtype)


def _inside(centre: Float[Tensor, " B"], side: Float[Tensor, " B"], size: int) -> Bool[Tensor, "B S"]:
    """Pixels of one axis that lie within a box of ``side`` · ``size`` pixels around a centre; both are shares."""
    length = (side * size).floor()
    first = (centre * size).floor() - (length / 2).floor()
    pixel = torch.arange(size, device=side.device)
    return (pixel >= first.unsqueeze(1)) & (pixel < (first + length).unsqueeze(1))


def _mixed_targets(
    y: Tensor, classes: int, partner: Int[Tensor, " B"], share: Float[Tensor, " B"], dtype: torch.dtype
) -> Float[Tensor, "B ..."]:
    """Targets mixed with those of the partners; labels become soft labels.

    A label out of range has no class here. Training checks labels against the outputs, and refuses it.
    """
    if not y.is_floating_point():
        if y.ndim != 1:
            checks.refuse("y", "be labels [B], or floats, to be mixed", checks.shape_text(y.shape))
        y = (y.unsqueeze(1) == torch.arange(classes, device=y.device)).to(dtype)
    return torch.lerp(y[partner], y, _per_example(share, y))


def _per_example(share: Float[Tensor, " B"], like: Tensor) -> Tensor:
    return share.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def _symmetric_beta(alpha: float, x: Tensor, generator: torch.Generator) -> Float[Tensor, " B"]:
    """Draws of Beta(α, α), one per example.

    λ = ½ + ½ T / √(2α + T²) has this distribution if T is Student's t with 2α degrees of freedom, and
    T = √(2α (U^(−1/α) − 1)) cos 2πV is (Bailey, 1994; Devroye, 1996). So two uniform numbers are enough for every α:
    nothing is rejected, and a graph can hold it. With u = U^(1/α) it is written without overflow.
    """
    first, second = _uniform((2, len(x)), x, generator)
    power, cosine = first.pow(1 / alpha), (2 * math.pi * second).cos()
    ratio = cosine * (1 - power).sqrt() / (power + (1 - power) * cosine.square()).sqrt()
    return (0.5 + 0.5 * ratio).clamp(0, 1)


def chain(*augmentations: Augment | AugmentPair) -> Any:
    """One augmentation that applies several in order; without arguments, the identity.

    With one that changes targets among them, such as `mixup`, the result is a function ``(x, y, generator) -> (x, y)``.

    >>> augment = chain(flips, partial(crops, padding=4), partial(rotations, degrees=15))
    >>> augment(torch.rand(8, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([8, 3, 32, 32])
    """
    # A checkpoint's fingerprint reads the arguments of a partial.
    return partial(_apply_to_pairs if any(map(changes_targets, augmentations)) else _apply_all, augmentations)


def _apply_all(augmentations: tuple[Augment, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    for augmentation in augmentations:
        x = augmentation(x, generator)
    return x


def _apply_to_pairs(
    augmentations: tuple[Any, ...], x: Tensor, y: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    for augmentation in augmentations:
        if changes_targets(augmentation):
            x, y = augmentation(x, y, generator)
        else:
            x = augmentation(x, generator)
    return x, y


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

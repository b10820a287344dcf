"""Covariate shift as in ImageNet-C: ten corruptions of float images in [0, 1], in five severities.

Strengths are those of CIFAR-10-C where it has them, for 32×32 images. All run batched, on the device. Noise comes from
a counter-based hash of (seed, corruption, image, position), so an image gets the same noise in any batch, in any order,
on any device, and at every severity. For the same reason sums are written out: a matrix product of a library may round
differently in another batch.

Differs from CIFAR-10-C: results are not rounded to 256 levels; see each function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dissensus import checks
from dissensus.randomness import Use, derived_seed, example_keys, uniform

Images = Float[Tensor, "B C H W"]

SEVERITIES = 5


@dataclass(frozen=True)
class Corruption:
    """A corruption ``(images, strength) -> images`` and its five strengths.

    A noisy corruption takes uniform numbers in (0, 1) as a third argument.
    """

    apply: Callable[..., Images]
    strengths: tuple[float, float, float, float, float]
    noisy: bool = False


def corrupt(images: Images, name: str, severity: int, seed: int = 0) -> Images:
    """Corrupted images in [0, 1].

    Args:
        images: ``[B, C, H, W]``, floats in [0, 1].
        name: A name of `CORRUPTIONS`.
        severity: From 1 (mild) to 5.
        seed: Seed of the noise.

    >>> corrupt(torch.full((1, 3, 8, 8), 0.5), "brightness", 2)[0, 0, 0, 0]
    tensor(0.6000)
    """
    checks.one_of("name", name, CORRUPTIONS)
    if images.ndim != 4:
        fix = "One image? Use images.unsqueeze(0)." if images.ndim == 3 else ""
        checks.refuse("images", "have shape [B, C, H, W]", checks.shape_text(images.shape), fix)
    if not images.is_floating_point():
        checks.refuse("images", "be floats in [0, 1]", str(images.dtype), "Bytes? Use images.float() / 255.", TypeError)
    if isinstance(severity, bool) or severity not in range(1, SEVERITIES + 1):
        checks.refuse("severity", f"be a whole number from 1 to {SEVERITIES}", repr(severity))
    if checks.is_concrete(images) and images.numel():
        low, high = (float(edge) for edge in images.aminmax())
        if not 0 <= low <= high <= 1:
            fix = "Corrupt images before they are standardised."
            checks.refuse("images", "lie in [0, 1]", f"values from {low:g} to {high:g}", fix)
    corruption = CORRUPTIONS[name]
    keys = example_keys(images, derived_seed(seed, Use.CORRUPTION, name))
    noise = [uniform(keys, images.shape[1:]).to(images.dtype)] if corruption.noisy else []
    return corruption.apply(images, corruption.strengths[severity - 1], *noise).clamp(0, 1)


def gaussian_noise(images: Images, deviation: float, noise: Images) -> Images:
    """Normal noise added to every value."""
    return images + deviation * torch.special.ndtri(noise)


def shot_noise(images: Images, photons: float, noise: Images) -> Images:
    """Poisson(photons · x) / photons: exact for rates below 8, by Cornish and Fisher's expansion above."""
    rate = images * photons
    z = torch.special.ndtri(noise)
    many = (rate + rate.sqrt() * z + (z.square() - 1) / 6).round().clamp_min(0)
    few_rate = rate.clamp_max(8.0)
    chance = (-few_rate).exp()
    below, few = chance, torch.zeros_like(rate)
    for count in range(1, 32):
        few = few + (noise > below)
        chance = chance * few_rate / count
        below = below + chance
    return torch.where(rate < 8, few, many) / photons


def impulse_noise(images: Images, share: float, noise: Images) -> Images:
    """Salt and pepper: a fraction ``share`` of all values becomes 0 or 1, with equal probability."""
    peppered = torch.where(noise < share / 2, 0.0, images)
    return torch.where(noise > 1 - share / 2, 1.0, peppered)


def gaussian_blur(images: Images, deviation: float) -> Images:
    """Convolution with a Gaussian kernel, truncated at four deviations; edge pixels are repeated."""
    radius = max(1, round(4 * deviation))
    weights = [math.exp(-0.5 * (i / deviation) ** 2) for i in range(-radius, radius + 1)]
    row = [[weight / sum(weights) for weight in weights]]
    return _filter(_filter(images, row), [[weight] for weight in row[0]])


def defocus_blur(images: Images, radius: float) -> Images:
    """The mean over a disc with a soft edge; edge pixels of the image are repeated.

    Differs from CIFAR-10-C: the edge of the disc is a linear ramp, not a blur, and the strengths are not its own.
    """
    reach = math.ceil(radius)
    steps = range(-reach, reach + 1)
    disc = [[min(max(radius + 0.5 - math.hypot(i, j), 0.0), 1.0) for j in steps] for i in steps]
    total = sum(map(sum, disc))
    return _filter(images, [[weight / total for weight in row] for row in disc])


def contrast(images: Images, factor: float) -> Images:
    """Each channel moved towards its mean: (x − mean) · factor + mean."""
    mean = images.mean((2, 3), keepdim=True)
    return (images - mean) * factor + mean


def brightness(images: Images, added: float) -> Images:
    """A constant added to the value (of hue, saturation, value), up to 1."""
    value = images.amax(1, keepdim=True)
    brighter = (value + added).clamp_max(1.0)
    return torch.where(value > 0, images * (brighter / value.clamp_min(torch.finfo(images.dtype).tiny)), brighter)


def saturate(images: Images, factor: float) -> Images:
    """The saturation (of hue, saturation, value) times a factor, up to 1; grey stays grey.

    Differs from CIFAR-10-C: the strengths are not its own.
    """
    if images.shape[1] != 3:
        checks.refuse("images", "have three channels to be saturated", checks.shape_text(images.shape, "BCHW"))
    value, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    # Saturation is (value − least) / value, and at most 1.
    most = value / (value - least).clamp_min(torch.finfo(images.dtype).tiny)
    return value - (value - images) * most.clamp_max(factor)


def pixelate(images: Images, share: float) -> Images:
    """Downsampling by box means to a fraction ``share`` of height and width, then upsampling by repetition.

    Boxes are those of pillow: a pixel belongs to the box that contains its centre.
    """
    for dim in (2, 3):
        images = _box_means(images, _boxes(images.shape[dim], share), dim)
    return images


def jpeg_like(images: Images, quality: float) -> Images:
    """JPEG's loss: 8×8 cosine transforms, quantised by its standard tables at a quality.

    Differs from JPEG: colour is not subsampled.
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (0, -width % 8, 0, -height % 8), mode="replicate")
    colour = images.shape[1] == 3
    middle = torch.tensor([128.0, 0.0, 0.0] if colour else [128.0]).to(images).view(-1, 1, 1)
    planes = 255 * (_mix_channels(padded, _YCBCR) if colour else padded) - middle
    tables = [_LUMINANCE, _CHROMINANCE, _CHROMINANCE] if colour else [_LUMINANCE]
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    steps = ((torch.tensor(tables).to(planes) * scale + 50) / 100).floor().clamp(1, 255)
    blocks = planes.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)
    steps = steps.view(-1, 1, 1, 8, 8)
    cosines = _cosines().to(planes)
    coefficients = _matrix_along(cosines, _matrix_along(cosines, blocks, -1), -2)
    rounded = (coefficients / steps).round() * steps
    back = (
        _matrix_along(cosines.T, _matrix_along(cosines.T, rounded, -1), -2).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    )
    back = (back + middle) / 255
    return (_mix_channels(back, _RGB) if colour else back)[..., :height, :width]


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10), noisy=True),
    "shot_noise": Corruption(shot_noise, (500, 250, 100, 75, 50), noisy=True),
    "impulse_noise": Corruption(impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07), noisy=True),
    "gaussian_blur": Corruption(gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "defocus_blur": Corruption(defocus_blur, (0.6, 0.8, 1.0, 1.3, 1.7)),
    "contrast": Corruption(contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "brightness": Corruption(brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "saturate": Corruption(saturate, (1.4, 1.8, 2.3, 3.0, 4.0)),
    "pixelate": Corruption(pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_like": Corruption(jpeg_like, (80, 65, 58, 50, 40)),
}
"""All corruptions, by name."""

_LUMINANCE = [
    [16, 11, 10, 16, 24, 40, 51, 61],
    [12, 12, 14, 19, 26, 58, 60, 55],
    [14, 13, 16, 24, 40, 57, 69, 56],
    [14, 17, 22, 29, 51, 87, 80, 62],
    [18, 22, 37, 56, 68, 109, 103, 77],
    [24, 35, 55, 64, 81, 104, 113, 92],
    [49, 64, 78, 87, 103, 121, 120, 101],
    [72, 92, 95, 98, 112, 100, 103, 99],
]
_CHROMINANCE = [
    [17, 18, 24, 47, 99, 99, 99, 99],
    [18, 21, 26, 66, 99, 99, 99, 99],
    [24, 26, 56, 99, 99, 99, 99, 99],
    [47, 66, 99, 99, 99, 99, 99, 99],
    [99, 99, 99, 99, 99, 99, 99, 99],
    [99, 99, 99, 99, 99, 99, 99, 99],
    [99, 99, 99, 99, 99, 99, 99, 99],
    [99, 99, 99, 99, 99, 99, 99, 99],
]
_YCBCR = [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]]
_RGB = [[1.0, 0.0, 1.402], [1.0, -0.344136, -0.714136], [1.0, 1.772, 0.0]]


def _filter(images: Images, kernel: list[list[float]]) -> Images:
    rows, columns = len(kernel), len(kernel[0])
    height, width = images.shape[-2:]
    padded = F.pad(images, (columns // 2, columns // 2, rows // 2, rows // 2), mode="replicate")
    out = torch.zeros_like(images)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            if weight:
                out = out + weight * padded[..., i : i + height, j : j + width]
    return out


def _boxes(side: int, share: float) -> list[list[int]]:
    """For each of ``side`` pixels, the pixels of its box."""
    cells = max(1, int(side * share))
    step = side / cells
    boxes = [[j for j in range(side) if -0.5 < (j + 0.5) / step - (cell + 0.5) <= 0.5] for cell in range(cells)]
    return [boxes[int((i + 0.5) / step)] for i in range(side)]


def _box_means(images: Images, boxes: list[list[int]], dim: int) -> Images:
    """Box means of pixels along one axis."""
    most = max(map(len, boxes))
    shape = (-1, 1) if dim == 2 else (-1,)
    out = torch.zeros_like(images)
    for k in range(most):
        index = torch.tensor([box[min(k, len(box) - 1)] for box in boxes], device=images.device)
        weight = torch.tensor([1 / len(box) if k < len(box) else 0.0 for box in boxes]).to(images)
        out = out + weight.view(shape) * images.index_select(dim, index)
    return out


def _mix_channels(images: Images, matrix: list[list[float]]) -> Images:
    red, green, blue = images.unbind(1)
    return torch.stack([row[0] * red + row[1] * green + row[2] * blue for row in matrix], 1)


def _matrix_along(matrix: Float[Tensor, "8 8"], x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """The product with a matrix along one of the last two axes."""
    shape = (8, 1) if dim == -2 else (8,)
    out = torch.zeros_like(x)
    for j in range(8):
        out = out + matrix[:, j].view(shape) * x.narrow(dim, j, 1)
    return out


def _cosines() -> Float[Tensor, "8 8"]:
    """The orthonormal discrete cosine transform of eight values."""
    k, n = torch.arange(8.0, dtype=torch.float64).view(-1, 1), torch.arange(8.0, dtype=torch.float64)
    matrix = torch.cos(math.pi * (n + 0.5) * k / 8) / 2
    return torch.where(k > 0, matrix, matrix / math.sqrt(2))

"""Augmentations against loops over single images, given the same draws."""

import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from dissensus.data.augment import chain, crops, flips, rotations, shifts

ALL = {
    "flips": flips,
    "shifts": shifts,
    "shifts with zeros": partial(shifts, fill="zero"),
    "crops": crops,
    "rotations": rotations,
    "rotations, bilinear": partial(rotations, interpolation="bilinear"),
    "a chain": chain(flips, crops, rotations),
}
SHAPES = [(5, 3, 8, 8), (1, 1, 6, 11), (4, 2, 9, 5), (3, 1, 1, 1)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(shape, dtype=torch.float32):
    x = torch.rand(shape, generator=seeded(99), dtype=torch.float64)
    return (x * 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)


def moved(x, down, right, fill):
    out = np.zeros_like(x)
    batch, _, height, width = x.shape
    for b in range(batch):
        for i in range(height):
            for j in range(width):
                row, column = i - down[b], j - right[b]
                if fill == "nearest":
                    row, column = min(max(row, 0), height - 1), min(max(column, 0), width - 1)
                if 0 <= row < height and 0 <= column < width:
                    out[b, :, i, j] = x[b, :, row, column]
    return out


def pixel(image, row, column):
    inside = 0 <= row < image.shape[1] and 0 <= column < image.shape[2]
    return image[:, row, column] if inside else np.zeros_like(image[:, 0, 0])


def turned(x, angles, interpolation):
    out = np.zeros_like(x)
    batch, _, height, width = x.shape
    middle = (height - 1) / 2, (width - 1) / 2
    for b in range(batch):
        cos, sin = math.cos(angles[b]), math.sin(angles[b])
        for i in range(height):
            for j in range(width):
                row = cos * (i - middle[0]) + sin * (j - middle[1]) + middle[0]
                column = cos * (j - middle[1]) - sin * (i - middle[0]) + middle[1]
                if interpolation == "nearest":
                    out[b, :, i, j] = pixel(x[b], round(row), round(column))
                    continue
                top, left = math.floor(row), math.floor(column)
                for r, wr in ((top, top + 1 - row), (top + 1, row - top)):
                    for c, wc in ((left, left + 1 - column), (left + 1, column - left)):
                        out[b, :, i, j] += wr * wc * pixel(x[b], r, c)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_flips_equal_a_loop(shape, dtype):
    x = images(shape, dtype)
    mirrored = torch.rand(len(x), generator=seeded()) < 0.5
    expected = torch.stack([image.flip(-1) if m else image for image, m in zip(x, mirrored, strict=True)])
    assert torch.equal(flips(x, seeded()), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize("fill", ["nearest", "zero"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shifts_equal_a_loop(shape, fill, dtype):
    x = images(shape, dtype)
    draws = 2 * torch.rand(2, len(x), generator=seeded()) - 1
    down, right = (draws[0] * 0.3 * shape[2]).round().long(), (draws[1] * 0.3 * shape[3]).round().long()
    augmented = shifts(x, seeded(), fraction=0.3, fill=fill)
    assert augmented.dtype == dtype
    np.testing.assert_array_equal(augmented, moved(x.numpy(), down, right, fill))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_crops_equal_a_loop(shape, dtype):
    x = images(shape, dtype)
    down, right = torch.randint(-3, 4, (2, len(x)), generator=seeded())
    augmented = crops(x, seeded(), padding=3)
    assert augmented.dtype == dtype
    np.testing.assert_array_equal(augmented, moved(x.numpy(), down, right, "zero"))


def test_crops_are_crops_of_padded_images():
    x = images((20, 3, 8, 8))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    for before, after in zip(padded, crops(x, seeded(), padding=2), strict=True):
        windows = before.unfold(1, 8, 1).unfold(2, 8, 1).flatten(1, 2).transpose(0, 1)
        assert (windows == after).flatten(1).all(1).sum() == 1


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotations_equal_a_loop(shape, interpolation):
    x = images(shape, torch.float64)
    angles = (2 * torch.rand(len(x), generator=seeded()) - 1) * math.radians(40)
    augmented = rotations(x, seeded(), degrees=40, interpolation=interpolation)
    expected = turned(x.numpy(), angles.tolist(), interpolation)
    np.testing.assert_allclose(augmented, expected, atol=1e-5)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_rotations_of_a_flat_image_stay_within_its_range(interpolation):
    augmented = rotations(torch.ones(50, 1, 12, 12), seeded(), degrees=90, interpolation=interpolation)
    assert augmented.min() >= 0
    assert augmented.max() <= 1
    assert (augmented[:, :, 4:8, 4:8] - 1).abs().max() < 1e-6


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_rotations_agree_with_torchs_own_sampling(interpolation):
    x = images((6, 2, 10, 10), torch.float64)
    angle = ((2 * torch.rand(6, generator=seeded()) - 1) * math.radians(25)).double()
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(6, dtype=torch.float64)
    theta = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = torch.nn.functional.affine_grid(theta, [6, 2, 10, 10], align_corners=False)
    expected = torch.nn.functional.grid_sample(x, grid, mode=interpolation, align_corners=False)
    augmented = rotations(x, seeded(), degrees=25, interpolation=interpolation)
    torch.testing.assert_close(augmented, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize(
    "neutral",
    [
        partial(shifts, fraction=0),
        partial(shifts, fraction=0, fill="zero"),
        partial(crops, padding=0),
        partial(rotations, degrees=0),
        chain(),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_neutral_settings_change_nothing(neutral, shape, dtype):
    x = images(shape, dtype)
    assert torch.equal(neutral(x, seeded()), x)


def test_bilinear_rotation_by_nothing_changes_nothing():
    x = images((3, 2, 7, 4))
    assert torch.equal(rotations(x, seeded(), degrees=0, interpolation="bilinear"), x)


@pytest.mark.parametrize("name", ALL)
def test_the_generator_decides(name):
    x = images((16, 2, 10, 10))
    before = x.clone()
    first = ALL[name](x, seeded(1))
    torch.manual_seed(5)
    assert torch.equal(first, ALL[name](x, seeded(1)))
    assert not torch.equal(first, ALL[name](x, seeded(2)))
    assert torch.equal(x, before), "the input is left as it was"


@pytest.mark.parametrize("name", ALL)
def test_images_are_drawn_independently(name):
    x = images((1, 2, 12, 12)).expand(64, -1, -1, -1)
    distinct = len(torch.unique(ALL[name](x, seeded()).flatten(1), dim=0))
    assert distinct == 2 if name == "flips" else distinct > 5


@pytest.mark.parametrize("name", ALL)
def test_memory_format_is_kept(name):
    x = images((4, 3, 8, 8))
    last = x.contiguous(memory_format=torch.channels_last)
    assert ALL[name](x, seeded()).is_contiguous()
    augmented = ALL[name](last, seeded())
    assert augmented.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(augmented, ALL[name](x, seeded()))


@pytest.mark.parametrize("name", ALL)
def test_views_and_empty_batches(name):
    x = images((8, 3, 8, 8))
    assert torch.equal(ALL[name](x[::2], seeded()), ALL[name](x[::2].clone(), seeded()))
    assert ALL[name](x[:0], seeded()).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("name", ALL)
def test_the_default_dtype_has_no_say(name):
    x = images((8, 3, 8, 8))
    expected = ALL[name](x, seeded())
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(ALL[name](x, seeded()), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def found_shifts(augmentation, reach, size=32, count=20_000):
    """The shift of every image, read off a bright column or row in the middle."""
    ramp = torch.arange(float(size))
    across = augmentation(ramp.expand(count, 1, 1, size), seeded(3))[:, 0, 0, size // 2]
    return torch.bincount((size // 2 - across + reach).long(), minlength=2 * reach + 1) / count


def test_crops_shift_uniformly():
    crop = partial(crops, padding=4)
    rows = torch.ones(20_000, 1, 9, 9)
    zeros_above = (crop(rows, seeded(3))[:, 0, :, 4] == 0).sum(1)
    expected = torch.tensor([1, 2, 2, 2, 2]) / 9
    torch.testing.assert_close(torch.bincount(zeros_above) / 20_000, expected, atol=0.012, rtol=0)


def test_shifts_are_uniform_up_to_rounding():
    expected = torch.tensor([0.7, 1, 1, 1, 1, 1, 0.7]) / 6.4
    torch.testing.assert_close(found_shifts(shifts, 3), expected, atol=0.012, rtol=0)


def test_flips_are_fair():
    x = torch.arange(2.0).expand(20_000, 1, 1, 2)
    assert abs(flips(x, seeded())[:, 0, 0, 0].mean() - 0.5) < 0.012


def test_angles_are_uniform_and_anticlockwise():
    x = torch.zeros(1, 1, 41, 41)
    x[..., 0, 20] = 1.0
    angles = (2 * torch.rand(200, generator=seeded()) - 1) * math.radians(30)
    augmented = rotations(x.expand(200, -1, -1, -1), seeded(), degrees=30, interpolation="bilinear")[:, 0]
    columns = (augmented.sum(1) * torch.arange(41)).sum(1) / augmented.sum((1, 2))
    torch.testing.assert_close(20 - columns, 20 * angles.sin(), atol=0.7, rtol=0)


def test_a_chain_applies_one_after_another():
    x = images((6, 3, 10, 10))
    generator = seeded()
    expected = rotations(crops(flips(x, generator), generator), generator)
    chained = chain(flips, crops, rotations)
    assert torch.equal(chained(x, seeded()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(chained))(x, seeded()), expected)


@pytest.mark.parametrize("name", [name for name in ALL if name != "a chain"])
def test_other_shapes_are_refused(name, unchecked):
    with pytest.raises(ValueError, match=r"`x` must be images of shape \[B, C, H, W\]; got \[3, 8, 8\]. One image\?"):
        ALL[name](images((3, 8, 8)), seeded())


def test_other_settings_are_refused(unchecked):
    x = images((2, 1, 4, 4))
    with pytest.raises(ValueError, match="`fraction` must be a number of at least 0 and at most 1; got 1.5"):
        shifts(x, seeded(), fraction=1.5)
    with pytest.raises(ValueError, match="`fill` must be one of 'nearest', 'zero'; got 'zeros'. Did you mean 'zero'?"):
        shifts(x, seeded(), fill="zeros")
    with pytest.raises(ValueError, match="`padding` must be a whole number of at least 0; got -1"):
        crops(x, seeded(), padding=-1)
    with pytest.raises(ValueError, match="`degrees` must be a number of at least 0 and at most 180; got 200"):
        rotations(x, seeded(), degrees=200)
    with pytest.raises(ValueError, match="`interpolation` must be one of"):
        rotations(x, seeded(), interpolation="cubic")
    with pytest.raises(TypeError, match=r"`x` must be floating point to be interpolated; got torch.uint8"):
        rotations(images((2, 1, 4, 4), torch.uint8), seeded(), interpolation="bilinear")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALL)
def test_augmentations_can_be_captured(name):
    x = images((16, 3, 32, 32)).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    expected = [ALL[name](x, generator) for _ in range(2)]
    generator.manual_seed(0)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        augmented = ALL[name](x, generator)
    generator.manual_seed(0)
    for value in expected:
        graph.replay()
        assert torch.equal(augmented, value)

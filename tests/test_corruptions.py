"""Corruptions: oracles where they are exact, and what all of them promise."""

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from scipy.fft import dctn, idctn

from dissensus.data import corruptions
from dissensus.data.corruptions import CORRUPTIONS, corrupt
from dissensus.randomness import example_keys
from dissensus.randomness import uniform as uniform_of_keys

NAMES = list(CORRUPTIONS)


def uniform(images, key):
    return uniform_of_keys(example_keys(images, key), images.shape[1:]).to(images.dtype)


def photographs(n=24, channels=3, height=32, width=32, dtype=torch.float32):
    """Waves of all lengths and directions, the longer the stronger, in whole 255ths as photographs are."""
    generator = torch.Generator().manual_seed(4)
    draws = torch.rand(n, channels, 60, 3, 1, 1, generator=generator)
    length, angle, phase = 4 * 16 ** draws[:, :, :, 0], 6.3 * draws[:, :, :, 1], 6.3 * draws[:, :, :, 2]
    projection = torch.arange(height).view(-1, 1) * angle.sin() + torch.arange(width) * angle.cos()
    waves = (length * (6.3 * projection / length + phase).sin()).sum(2)
    return ((0.5 + waves / 500) * 255).round().div(255).clamp(0, 1).to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_distortion_grows_with_severity(name):
    x = photographs()
    errors = [float((corrupt(x, name, severity) - x).square().mean()) for severity in range(1, 6)]
    assert errors[0] > 0
    assert errors == sorted(errors)
    assert errors[4] > 1.4 * errors[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("severity", [1, 5])
def test_range_shape_and_dtype_are_kept(name, severity):
    edges = torch.stack([torch.zeros(3, 9, 13), torch.ones(3, 9, 13), torch.eye(9, 13).expand(3, -1, -1)])
    for dtype in (torch.float32, torch.float64):
        for x in (photographs(3, dtype=dtype), edges.to(dtype), photographs(0, dtype=dtype)):
            before = x.clone()
            corrupted = corrupt(x, name, severity)
            assert (corrupted.shape, corrupted.dtype) == (x.shape, dtype)
            assert corrupted.isfinite().all()
            assert ((corrupted >= 0) & (corrupted <= 1)).all()
            assert torch.equal(x, before)


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_order_change_nothing(name):
    x = photographs(20)
    expected = corrupt(x, name, 3, seed=7)
    assert torch.equal(torch.cat([corrupt(part, name, 3, seed=7) for part in x.split(7)]), expected)
    assert torch.equal(corrupt(x[5:6], name, 3, seed=7), expected[5:6])
    order = torch.randperm(20)
    assert torch.equal(corrupt(x[order], name, 3, seed=7), expected[order])
    last = corrupt(x.contiguous(memory_format=torch.channels_last), name, 3, seed=7)
    torch.testing.assert_close(last, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_the_noise_and_nothing_else(name):
    x = photographs(4)
    torch.manual_seed(1)
    first = corrupt(x, name, 3, seed=1)
    state = torch.get_rng_state()
    assert torch.equal(corrupt(x, name, 3, seed=1), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(corrupt(x, name, 3, seed=2), first) != CORRUPTIONS[name].noisy


@pytest.mark.parametrize("name", [name for name in NAMES if name != "saturate"])
def test_grey_images(name):
    assert corrupt(photographs(2, channels=1, height=28, width=28), name, 3).shape == (2, 1, 28, 28)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_devices_agree(name):
    x = photographs()
    difference = (corrupt(x.cuda(), name, 3, seed=1).cpu() - corrupt(x, name, 3, seed=1)).abs()
    assert difference.mean() < 1e-5


def test_uniform_numbers_are_uniform_and_independent():
    x = photographs(50)
    u = uniform(x, 12345).double()
    assert ((u > 0) & (u < 1)).all()
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    flat = u.flatten(1)
    assert abs(np.corrcoef(flat[:, :-1].flatten(), flat[:, 1:].flatten())[0, 1]) < 0.01
    correlations = (torch.corrcoef(flat) - torch.eye(50)).abs()
    assert correlations.max() < 0.1
    assert abs(np.corrcoef(flat.flatten(), uniform(x, 12346).double().flatten())[0, 1]) < 0.01


def test_uniform_numbers_depend_on_every_pixel():
    x = photographs(1)
    for position in [(0, 0, 0, 0), (0, 2, 31, 31), (0, 1, 5, 9)]:
        changed = x.clone()
        changed[position] = 1 - changed[position]
        assert not torch.equal(uniform(x, 0), uniform(changed, 0))
    zeros = torch.zeros(1, 1, 2, 2)
    assert torch.equal(uniform(zeros, 0), uniform(-zeros, 0))


def test_contrast_is_exact():
    x = photographs(dtype=torch.float64)
    for severity, factor in enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1):
        mean = x.numpy().mean((2, 3), keepdims=True)
        np.testing.assert_allclose(corrupt(x, "contrast", severity), (x.numpy() - mean) * factor + mean, atol=1e-12)


@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_changes_of_colour_are_exact(name):
    x = photographs(2, height=6, width=7, dtype=torch.float64)
    x[0, :, 0, 0], x[0, :, 0, 1], x[0, :, 0, 2] = 0.0, 1.0, torch.tensor([0.0, 0.5, 0.0])
    for severity, size in enumerate(CORRUPTIONS[name].strengths, 1):
        expected = np.empty(x.shape)
        for b, i, j in np.ndindex(2, 6, 7):
            hue, saturation, value = colorsys.rgb_to_hsv(*x[b, :, i, j].tolist())
            if name == "brightness":
                value = min(value + size, 1)
            else:
                saturation = min(saturation * size, 1)
            expected[b, :, i, j] = colorsys.hsv_to_rgb(hue, saturation, value)
        np.testing.assert_allclose(corrupt(x, name, severity), expected, atol=1e-9)


@pytest.mark.parametrize("shape", [(32, 32), (9, 13), (1, 1)])
def test_pixelate_equals_a_loop(shape):
    x = photographs(2, 3, *shape, dtype=torch.float64)
    for severity, share in enumerate(CORRUPTIONS["pixelate"].strengths, 1):
        cells = [max(1, int(side * share)) for side in shape]
        expected = np.empty(x.shape)
        for i, j in np.ndindex(*shape):
            cell_of_pixel = [int((k + 0.5) * n / side) for k, n, side in zip((i, j), cells, shape, strict=True)]
            rows, columns = (
                [k for k in range(side) if -0.5 < (k + 0.5) * n / side - (cell + 0.5) <= 0.5]
                for side, n, cell in zip(shape, cells, cell_of_pixel, strict=True)
            )
            expected[:, :, i, j] = x.numpy()[:, :, rows][:, :, :, columns].mean((2, 3))
        np.testing.assert_allclose(corrupt(x, "pixelate", severity), expected, atol=1e-12)


def test_pixelate_agrees_with_pillow():
    x = photographs(1)
    picture = Image.fromarray((x[0] * 255).round().byte().permute(1, 2, 0).numpy())
    for severity, share in enumerate(CORRUPTIONS["pixelate"].strengths, 1):
        small = picture.resize((int(32 * share), int(32 * share)), Image.Resampling.BOX)
        expected = np.asarray(small.resize((32, 32), Image.Resampling.BOX)).transpose(2, 0, 1) / 255
        assert np.abs(corrupt(x, "pixelate", severity)[0].numpy() - expected).max() < 1.5 / 255


def test_gaussian_blur_agrees_with_scipy():
    x = photographs(2, dtype=torch.float64)
    for severity, deviation in enumerate(CORRUPTIONS["gaussian_blur"].strengths, 1):
        radius = max(1, round(4 * deviation))
        expected = ndimage.gaussian_filter(x.numpy(), (0, 0, deviation, deviation), mode="nearest", radius=radius)
        np.testing.assert_allclose(corrupt(x, "gaussian_blur", severity), expected, atol=1e-9)


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "pixelate"])
def test_blurs_leave_flat_images_alone(name):
    x = torch.full((1, 3, 10, 10), 0.4)
    torch.testing.assert_close(corrupt(x, name, 5), x)


def test_gaussian_noise_is_normal():
    x = torch.full((40, 3, 32, 32), 0.5) + torch.arange(40).view(-1, 1, 1, 1) * 1e-6
    noise = ((corrupt(x, "gaussian_noise", 1) - x) / 0.04).flatten().double().numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-3


@pytest.mark.parametrize("photons", [50, 500])
@pytest.mark.parametrize("level", [0.004, 0.05, 0.15, 0.17, 0.5, 0.9])
def test_shot_noise_is_a_poisson_count(photons, level):
    x = torch.full((30, 3, 32, 32), level) + torch.arange(30).view(-1, 1, 1, 1) * 1e-7
    counts = corruptions.shot_noise(x, photons, uniform(x, 3)).double() * photons
    rate = float(x.mean()) * photons
    assert (counts - counts.round()).abs().max() < 1e-3
    n = counts.numel()
    assert abs(float(counts.mean()) - rate) < 5 * np.sqrt(rate / n) + 0.004 * np.sqrt(rate)
    assert abs(float(counts.var()) / rate - 1) < 5 * np.sqrt((2 + 1 / rate) / n) + 0.02


def test_shot_noise_is_the_exact_quantile_at_low_rates():
    x = torch.rand(2, 1, 16, 16, dtype=torch.float64) * 0.15
    noise = uniform(x, 9)
    expected = stats.poisson.ppf(noise.numpy(), x.numpy() * 50) / 50
    np.testing.assert_allclose(corruptions.shot_noise(x, 50, noise), expected, atol=1e-9)


def test_impulse_noise_replaces_its_share():
    x = torch.full((40, 3, 32, 32), 0.5) + torch.arange(40).view(-1, 1, 1, 1) * 1e-6
    corrupted = corrupt(x, "impulse_noise", 5)
    assert abs(float((corrupted == 0).float().mean()) - 0.035) < 0.003
    assert abs(float((corrupted == 1).float().mean()) - 0.035) < 0.003
    assert ((corrupted == x) | (corrupted == 0) | (corrupted == 1)).all()


def test_jpeg_like_equals_scipys_transform():
    x = photographs(2, channels=1, height=16, width=24, dtype=torch.float64)
    steps = np.clip(np.floor((np.array(corruptions._LUMINANCE).reshape(8, 8) * 40 + 50) / 100), 1, 255)
    expected = np.empty(x.shape)
    for b, i, j in np.ndindex(2, 2, 3):
        block = np.s_[b, 0, 8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
        coefficients = dctn(x.numpy()[block] * 255 - 128, norm="ortho")
        expected[block] = (idctn(np.round(coefficients / steps) * steps, norm="ortho") + 128) / 255
    np.testing.assert_allclose(corrupt(x, "jpeg_like", 1), expected.clip(0, 1), atol=1e-9)


def test_jpeg_like_is_like_jpeg():
    x = photographs(1)
    buffer = io.BytesIO()
    picture = Image.fromarray((x[0] * 255).round().byte().permute(1, 2, 0).numpy())
    picture.save(buffer, "JPEG", quality=40, subsampling=0)
    expected = np.asarray(Image.open(buffer)).transpose(2, 0, 1) / 255
    corrupted = corrupt(x, "jpeg_like", 5)[0].numpy()
    assert np.abs(corrupted - expected).mean() < 1.5 / 255
    assert np.abs(corrupted - x[0].numpy()).mean() > 4 * np.abs(corrupted - expected).mean()


def test_sides_that_are_no_multiples_of_eight():
    x = photographs(2, height=13, width=10)
    assert float((corrupt(x, "jpeg_like", 1) - x).abs().mean()) < 0.05


def test_refusals(unchecked):
    x = photographs(1)
    with pytest.raises(
        ValueError, match="`name` must be one of .*; got 'gausian_noise'. Did you mean 'gaussian_noise'?"
    ):
        corrupt(x, "gausian_noise", 1)
    for severity in (0, 6, 2.5, True):
        with pytest.raises(ValueError, match="`severity` must be a whole number from 1 to 5; got"):
            corrupt(x, "contrast", severity)
    with pytest.raises(ValueError, match=r"`images` must have shape \[B, C, H, W\]; got \[3, 32, 32\]. One image\?"):
        corrupt(x[0], "contrast", 1)
    with pytest.raises(TypeError, match=r"`images` must be floats in \[0, 1\]; got torch.uint8. Bytes\?"):
        corrupt((x * 255).byte(), "contrast", 1)
    with pytest.raises(ValueError, match=r"`images` must lie in \[0, 1\]; got values from .* before they are standard"):
        corrupt(x * 2 - 1, "contrast", 1)
    with pytest.raises(ValueError, match=r"`images` must lie in \[0, 1\]"):
        corrupt(x * torch.nan, "contrast", 1)
    with pytest.raises(ValueError, match=r"must have three channels to be saturated; got \[B=1, C=1, H=32, W=32\]"):
        corrupt(x[:, :1], "saturate", 1)

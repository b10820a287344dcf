"""Ready-made networks: sizes, names of public weights, first weights, and members that stack."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import dissensus as ds

NETWORKS = {
    "resnet20": (ds.nets.resnet20, (3, 8, 8)),
    "resnet32": (ds.nets.resnet32, (3, 8, 8)),
    "resnet18": (ds.nets.resnet18, (3, 8, 8)),
    "resnet34": (ds.nets.resnet34, (3, 8, 8)),
    "resnet18 of ImageNet": (lambda: ds.nets.resnet18(stem="imagenet"), (3, 32, 32)),
    "vgg": (ds.nets.vgg, (3, 32, 32)),
    "vgg of padded images": (lambda: ds.nets.vgg(channels=1, image_size=28), (1, 28, 28)),
    "vanilla_cnn": (ds.nets.vanilla_cnn, (3, 32, 32)),
    "mobilenet_v2": (lambda: ds.nets.mobilenet_v2(10), (3, 32, 32)),
}
REPRESENTATIVES = [name for name in NETWORKS if name not in {"resnet18", "vgg"}]
"""One of each architecture: networks with the same layers in other numbers would take time and show nothing new."""
one_of_each = pytest.mark.parametrize("name", REPRESENTATIVES)

PUBLIC = "mobilenet_v2-b0353104.pth"
BATCH_NORM = ("weight", "bias", "running_mean", "running_var")


def parameters_of(build, *arguments, **options):
    """The number of parameters, counted without drawing any."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(*arguments, **options).parameters())


def narrow_parameters(blocks, channels, classes):
    """Keras' ResNet v1 of ``6·blocks + 2`` layers by its layers, biases in front of batch norm taken out again."""
    convolution = lambda kernel, before, after: kernel**2 * before * after + after  # noqa: E731
    layers = [(3, channels, 16)] + [(3, 16, 16)] * 2 * blocks
    for width in (32, 64):
        layers += [(3, width // 2, width)] + [(3, width, width)] * (2 * blocks - 1)
    projections = convolution(1, 16, 32) + convolution(1, 32, 64)
    normed = sum(width for _, _, width in layers)
    keras = sum(convolution(*layer) for layer in layers) + 2 * normed + projections + 64 * classes + classes
    return keras, keras - normed


def test_narrow_resnets_have_the_reference_s_parameters_but_for_biases():
    assert narrow_parameters(3, 3, 10) == (273_066, 273_066 - 688)
    assert narrow_parameters(5, 3, 10) == (467_946, 467_946 - 1136)
    for build, blocks in ((ds.nets.resnet20, 3), (ds.nets.resnet32, 5)):
        for channels, classes in ((3, 10), (1, 10), (3, 100)):
            assert parameters_of(build, classes, channels) == narrow_parameters(blocks, channels, classes)[1]


@pytest.mark.parametrize(
    ("build", "options", "count"),
    [
        (ds.nets.resnet18, {}, 11_173_962),
        (ds.nets.resnet34, {}, 21_282_122),
        (ds.nets.resnet18, {"classes": 1000, "stem": "imagenet"}, 11_689_512),
        (ds.nets.resnet34, {"classes": 1000, "stem": "imagenet"}, 21_797_672),
        (ds.nets.mobilenet_v2, {}, 3_504_872),
        (ds.nets.vanilla_cnn, {}, (25 * 3 + 1) * 10 + (25 * 10 + 1) * 20 + 501 * 50 + 51 * 10),
        (ds.nets.vanilla_cnn, {"channels": 1, "image_size": 28}, 26 * 10 + 251 * 20 + 321 * 50 + 51 * 10),
    ],
)
def test_numbers_of_parameters(build, options, count):
    assert parameters_of(build, **options) == count


@pytest.mark.parametrize(("channels", "image_size", "features"), [(3, 32, 512), (1, 28, 512), (3, 64, 2048)])
def test_vgg_has_the_parameters_of_its_table(channels, image_size, features):
    widths = [channels, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = sum(9 * before * after for before, after in pairwise(widths))
    expected = convolutions + 2 * sum(widths[1:]) + features * 512 + 2 * 512 + 512 * 7 + 7
    assert parameters_of(ds.nets.vgg, 7, channels, image_size) == expected


def test_dropout_is_where_the_tables_say():
    rates = [layer.p for layer in ds.nets.vgg().modules() if isinstance(layer, nn.Dropout)]
    assert rates == [0.3, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.5, 0.5]
    layers = list(ds.nets.vanilla_cnn())
    after = [type(layers[i + 1]) for i, layer in enumerate(layers) if isinstance(layer, nn.ReLU)]
    assert after == [nn.Dropout] * 3
    assert {layer.p for layer in layers if isinstance(layer, nn.Dropout)} == {0.1}
    vgg_layers = list(ds.nets.vgg())
    for i, layer in enumerate(vgg_layers):
        if isinstance(layer, nn.Dropout):
            assert isinstance(vgg_layers[i - 1], nn.ReLU | nn.Flatten)


def wide_names(depths):
    """Shapes of torchvision's residual networks of basic blocks."""
    shapes = {"conv1.weight": (64, 3, 7, 7)} | {f"bn1.{key}": (64,) for key in BATCH_NORM}
    before = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            prefix = f"layer{stage + 1}.{block}"
            shapes[f"{prefix}.conv1.weight"] = (width, before, 3, 3)
            shapes[f"{prefix}.conv2.weight"] = (width, width, 3, 3)
            shapes |= {f"{prefix}.bn{i}.{key}": (width,) for i in (1, 2) for key in BATCH_NORM}
            if before != width:
                shapes[f"{prefix}.downsample.0.weight"] = (width, before, 1, 1)
                shapes |= {f"{prefix}.downsample.1.{key}": (width,) for key in BATCH_NORM}
            before = width
    return shapes | {"fc.weight": (1000, 512), "fc.bias": (1000,)}


def mobile_names():
    """Shapes of torchvision's MobileNetV2, from the widths of its blocks."""
    shapes = {}

    def convolution(prefix, norm, *shape):
        shapes[f"{prefix}.weight"] = shape
        shapes.update({f"{norm}.{key}": shape[:1] for key in BATCH_NORM})

    convolution("features.0.0", "features.0.1", 32, 3, 3, 3)
    widths = [32, 16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320]
    for i, (before, after) in enumerate(pairwise(widths), start=1):
        prefix, inner, step = f"features.{i}.conv", before * (1 if i == 1 else 6), 0
        if i > 1:
            convolution(f"{prefix}.0.0", f"{prefix}.0.1", inner, before, 1, 1)
            step = 1
        convolution(f"{prefix}.{step}.0", f"{prefix}.{step}.1", inner, 1, 3, 3)
        convolution(f"{prefix}.{step + 1}", f"{prefix}.{step + 2}", after, inner, 1, 1)
    convolution("features.18.0", "features.18.1", 1280, 320, 1, 1)
    return shapes | {"classifier.1.weight": (1000, 1280), "classifier.1.bias": (1000,)}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: ds.nets.resnet18(1000, stem="imagenet"), wide_names((2, 2, 2, 2))),
        (lambda: ds.nets.resnet34(1000, stem="imagenet"), wide_names((3, 4, 6, 3))),
        (ds.nets.mobilenet_v2, mobile_names()),
    ],
    ids=["resnet18", "resnet34", "mobilenet_v2"],
)
def test_names_are_those_of_public_weights(build, expected):
    with torch.device("meta"):
        state = build().state_dict()
    counters = {key for key in state if key.endswith("num_batches_tracked")}
    assert {key: tuple(tensor.shape) for key, tensor in state.items() if key not in counters} == expected
    assert counters == {key.replace("running_var", "num_batches_tracked") for key in expected if "running_var" in key}


def test_resolutions_and_residuals_of_mobilenet_are_the_paper_s():
    net, x, sizes, residual = ds.nets.mobilenet_v2(10).eval(), torch.randn(1, 3, 64, 64), [], []
    for i, block in enumerate(net.features):
        before, x = x, block(x)
        sizes.append(x.shape[-1])
        if hasattr(block, "conv") and x.shape == before.shape and torch.equal(x, before + block.conv(before)):
            residual.append(i)
    assert sizes == [32, 32] + [16] * 2 + [8] * 3 + [4] * 7 + [2] * 5
    assert residual == [3, 5, 6, 8, 9, 10, 12, 13, 15, 16]


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_a_silent_residual_block_leaves_its_shortcut(name):
    net = NETWORKS[name][0]()
    x = torch.randn(2, 16 if name == "resnet20" else 64, 8, 8)
    for block in (net.layer1[0], net.layer2[0]):
        nn.init.zeros_(block.bn2.weight)
        torch.testing.assert_close(block(x), block.downsample(x).relu())
    assert isinstance(net.layer1[0].downsample, nn.Identity)
    assert net.layer2[0].downsample(x).shape[-1] == 4


def test_public_weights_of_mobilenet_load():
    folder = os.environ.get("DISSENSUS_DATA")
    path = Path(folder or ".") / PUBLIC
    if folder is None or not path.is_file():
        pytest.skip(f"public weights: no {PUBLIC} in the folder that DISSENSUS_DATA names")
    net = ds.nets.mobilenet_v2()
    net.load_state_dict(torch.load(path, weights_only=True), strict=True)
    logits = net.eval()(torch.randn(4, 3, 224, 224))
    assert logits.isfinite().all()
    assert logits.std(0).min() > 0
    assert logits.std(1).min() > 0.5


@pytest.mark.parametrize("name", ["resnet20", "resnet32", "resnet18", "mobilenet_v2"])
def test_first_weights_are_he_normal(name):
    """The variance of n normal draws has a relative standard error of √(2/n)."""
    net = NETWORKS[name][0]()
    kinds = (nn.Conv2d, nn.Linear) if name in {"resnet20", "resnet32"} else nn.Conv2d
    for layer in net.modules():
        if isinstance(layer, kinds):
            z = layer.weight * (layer.weight[0].numel() / 2) ** 0.5
            assert abs(z.square().mean() - 1) < 5 * (2 / z.numel()) ** 0.5
            assert abs(z.mean()) < 5 / z.numel() ** 0.5
            assert abs(z.pow(4).mean() - 3) < 5 * (96 / z.numel()) ** 0.5
            assert layer.bias is None or not layer.bias.any()


def test_biases_stand_where_no_batch_norm_follows():
    for name in ("resnet20", "resnet32"):
        named = NETWORKS[name][0]().named_modules()
        biased = [key for key, layer in named if isinstance(layer, nn.Conv2d) and layer.bias is not None]
        assert biased == ["layer2.0.downsample", "layer3.0.downsample"]
    for name in ("resnet18", "vgg", "mobilenet_v2"):
        layers = NETWORKS[name][0]().modules()
        assert not any(isinstance(layer, nn.Conv2d) and layer.bias is not None for layer in layers)


@pytest.mark.parametrize("size", [28, 32, 33])
def test_narrow_resnets_take_images_of_any_size(size):
    for channels in (1, 3):
        net = ds.nets.resnet20(7, channels)
        x = torch.randn(2, channels, size, size)
        stages = nn.Sequential(*list(net)[:-3])
        assert stages(x).shape == (2, 64, -(-size // 4), -(-size // 4))
        assert net(x).shape == (2, 7)


def test_stems_differ_in_resolution():
    for stem, size in (("cifar", 4), ("imagenet", 1)):
        net = ds.nets.resnet18(stem=stem).eval()
        assert nn.Sequential(*list(net)[:-3])(torch.zeros(1, 3, 32, 32)).shape == (1, 512, size, size)


@pytest.mark.parametrize("size", [27, 28, 31])
def test_vgg_pads_small_images_on_all_sides(size):
    padded = ds.nets.vgg(channels=1, image_size=size)[0](torch.ones(1, 1, size, size))
    assert padded.shape == (1, 1, 32, 32)
    assert padded.sum() == size**2
    border = (32 - size) // 2
    assert padded[0, 0, border : border + size, border : border + size].all()


@pytest.mark.slow(cases=["resnet34", "vgg of padded images", "mobilenet_v2"])
@one_of_each
def test_stacked_members_are_the_same_in_a_loop_and_under_vmap(name):
    build, shape = NETWORKS[name]
    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    looped = ds.Ensemble(build, members=2, backend="loop").double()
    vmapped = ds.Ensemble.from_modules([looped.member(i) for i in range(2)], backend="vmap")
    result = []
    for ensemble, backend in ((looped, "loop"), (vmapped, "vmap")):
        outputs = [ensemble(x)]
        assert outputs[0].shape == (2, 3, 10)
        (gradient,) = torch.autograd.grad(outputs[0].log_softmax(-1)[..., 0].sum(), x)
        outputs.append(ensemble(x[:2]).detach())
        assert [choice.backend for choice in ensemble.choices] == [backend]
        assert not torch.allclose(outputs[0][0], outputs[0][1])
        result.append((outputs, gradient, dict(ensemble.named_buffers())))
    assert any("running_var" in key for key in result[0][2]) == (name != "vanilla_cnn")
    torch.testing.assert_close(result[1], result[0], rtol=1e-8, atol=1e-10)


@one_of_each
def test_networks_can_be_traced(name, unchecked):
    build, shape = NETWORKS[name]
    net = build().eval()
    x = torch.randn(2, *shape)
    torch.testing.assert_close(fx.symbolic_trace(net)(x), net(x))


@pytest.mark.slow(cases=["resnet34", "vgg of padded images"])
@one_of_each
def test_networks_take_channels_last_and_autocast(name):
    build, shape = NETWORKS[name]
    net, x = build().eval(), torch.randn(2, *shape)
    expected = net(x)
    net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = net.train()(x)
        low.float().sum().backward()
    assert low.dtype == torch.bfloat16
    assert low.isfinite().all()
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(
    "build",
    [ds.nets.resnet20, ds.nets.resnet32, ds.nets.resnet18, ds.nets.vgg, ds.nets.vanilla_cnn, ds.nets.mobilenet_v2],
)
def test_wrong_sizes_are_refused(build):
    with pytest.raises(ValueError, match="`classes` must be a whole number of at least 1; got 0"):
        build(classes=0)
    with pytest.raises(ValueError, match="`channels` must be a whole number of at least 1; got -1"):
        build(channels=-1)


def test_wrong_options_are_refused():
    for build in (ds.nets.resnet18, ds.nets.resnet34):
        with pytest.raises(ValueError, match="`stem` must be one of 'cifar', 'imagenet'; got 'imagnet'. Did you mean"):
            build(stem="imagnet")
    with pytest.raises(ValueError, match="`image_size` must be at least 16 for two unpadded 5×5 .*; got 15"):
        ds.nets.vanilla_cnn(image_size=15)
    assert ds.nets.vanilla_cnn(image_size=16)(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
    with pytest.raises(ValueError, match="`image_size` must be a whole number of at least 1; got 0"):
        ds.nets.vgg(image_size=0)

"""Masksembles: masks by construction, the layer, conversion, and members cut out of it."""

import contextlib
import copy
import logging
import math
from functools import partial
from itertools import combinations
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import dissensus as ds
from dissensus import masks
from dissensus.cli.main import app
from dissensus.masks import generation, planning, tracing

cross_entropy = partial(ds.objectives.independent, loss="cross_entropy")


def assert_sound(matrix, width, count, ones):
    assert matrix.dtype == torch.bool
    assert matrix.shape == (count, width)
    assert (matrix.sum(1) == ones).all()
    assert matrix.any(0).all()
    assert len(torch.unique(matrix, dim=0)) == count


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_every_feasible_request_works(count):
    feasible = 0
    for width in range(1, 15):
        for ones in range(1, width + 1):
            if ones <= width <= count * ones and count <= math.comb(width, ones):
                feasible += 1
                assert_sound(generation.draw_masks(width, count, ones, seed=feasible), width, count, ones)
            else:
                assert not generation.is_feasible(width, count, ones)
                with pytest.raises(ValueError, match="ones <= width"):
                    generation.draw_masks(width, count, ones, seed=0)
    assert feasible >= 14


@given(width=st.integers(4, 300), count=st.integers(2, 9), scale=st.floats(1.05, 8.0), seed=st.integers(0, 99))
def test_masks_for_any_width_are_sound_or_refused_with_a_range_that_works(width, count, scale, seed):
    try:
        matrix = masks.for_width(width, count, scale, seed)
    except ValueError as reason:
        words = str(reason).replace(",", "").split()
        if "between" in words:
            low, high = (float(words[words.index(word) + 1]) for word in ("between", "and"))
            for end in (low * 1.0005, min(high * 0.9995, 1e5)):
                masks.for_width(width, count, end, seed)
            assert not low * 1.001 < scale < high * 0.999
        else:
            assert not any(generation.is_feasible(width, count, m) for m in range(1, width + 1))
        return
    ones = int(matrix[0].sum())
    assert_sound(matrix, width, count, ones)
    expected_ones = width / masks.expected_width(count, 1, scale)
    assert abs(ones - expected_ones) < 1
    assert torch.equal(matrix, masks.for_width(width, count, scale, seed))


def test_all_sets_are_taken_where_no_fewer_will_do():
    matrix = generation.draw_masks(5, 10, 2, seed=3)
    assert {tuple(row.nonzero().flatten().tolist()) for row in matrix} == set(combinations(range(5), 2))


def test_other_seeds_give_other_masks():
    assert not torch.equal(masks.for_width(64, 4, 2.0, 0), masks.for_width(64, 4, 2.0, 1))
    assert not torch.equal(masks.generate(4, 10, 2.0, 0), masks.generate(4, 10, 2.0, 1))


@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0, 5.0])
def test_width_follows_equation_4(scale):
    """Oracle: the paper's procedure itself, drawn many times."""
    count, ones = 4, 30
    generator = torch.Generator().manual_seed(0)
    widths = []
    for _ in range(300):
        used = torch.zeros(int(ones * scale), dtype=torch.bool)
        for _ in range(count):
            used[torch.randperm(len(used), generator=generator)[:ones]] = True
        widths.append(int(used.sum()))
    expected = masks.expected_width(count, ones, scale)
    assert abs(sum(widths) / len(widths) - expected) < 0.6
    matrix = masks.generate(count, ones, scale)
    assert matrix.shape[1] == int(expected)
    assert_sound(matrix, int(expected), count, ones)


@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0, 4.0, 5.0, 6.0])
def test_overlap_follows_equation_6(scale):
    ious = [masks.iou(masks.for_width(128, 4, scale, seed)) for seed in range(100)]
    assert abs(sum(ious) / 100 - 1 / (2 * scale - 1)) < 0.01
    assert masks.expected_iou(scale) == 1 / (2 * scale - 1)


@pytest.mark.parametrize("scale", [2.0, 4.0])
def test_intersections_follow_equation_5(scale):
    """Two masks of M ones share M / S of them, and each position of the paper's M · S is one with probability 1 / S."""
    ones = 200
    matrices = [masks.generate(4, ones, scale, seed) for seed in range(40)]
    common = [float((m.double() @ m.double().T)[0, 1]) for m in matrices]
    assert sum(common) / len(common) == pytest.approx(ones / scale, rel=0.03)


def test_overlap_is_that_of_the_papers_own_procedure():
    """Given the width, every matrix has the same chance in the paper's procedure: so have the mean overlaps."""
    count, ones, positions, width = 4, 12, 24, 22
    generator = torch.Generator().manual_seed(1)
    expected = []
    while len(expected) < 300:
        matrix = torch.zeros(count, positions, dtype=torch.bool)
        for row in matrix:
            row[torch.randperm(positions, generator=generator)[:ones]] = True
        if int(matrix.any(0).sum()) == width:
            expected.append(masks.iou(matrix[:, matrix.any(0)]))
    actual = [masks.iou(generation.draw_masks(width, count, ones, seed)) for seed in range(300)]
    assert abs(sum(actual) - sum(expected)) / 300 < 0.008


def test_intersection_over_union_by_hand():
    rows = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 1, 1], [0, 1, 1, 1, 0]]).bool()
    assert masks.iou(rows) == pytest.approx((1 / 5 + 2 / 4 + 1 / 5) / 3)


def test_scale_of_is_the_inverse():
    for scale in (1.2, 2.0, 3.7):
        width = masks.expected_width(5, 1000, scale)
        assert masks.scale_of(round(width), 5, 1000) == pytest.approx(scale, rel=2e-3)
    assert masks.scale_of(12, 4, 3) == math.inf


def test_a_hundred_thousand_channels():
    matrix = masks.for_width(100_000, 4, 3.0)
    assert_sound(matrix, 100_000, 4, int(matrix[0].sum()))
    assert masks.iou(matrix) == pytest.approx(0.2, abs=0.005)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.for_width(2, 4, 2.0), "`width` must be at least 4"),
        (lambda: masks.for_width(64, 4, 1.0), "`scale` must lie between"),
        (lambda: masks.for_width(64, 4, 0.5), "`scale` must be a number of at least 1"),
        (lambda: masks.generate(4, 10, 1.05), "`scale` must be at least 1.1"),
        (lambda: masks.generate(4, 1, 1.5), "`ones` must be at least"),
        (lambda: masks.for_width(64, 0, 2.0), "`count`"),
        (lambda: masks.iou(torch.ones(1, 3).bool()), "two masks or more"),
    ],
)
def test_impossible_masks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_smallest_values_that_refusals_name_work():
    generated = masks.generate(4, 10, 1.101)
    assert_sound(generated, generated.shape[1], 4, 10)
    with pytest.raises(ValueError, match="`scale` must be at least 1.1"):
        masks.generate(4, 10, 1.099)
    narrow = masks.for_width(4, 4, 2.0)
    assert_sound(narrow, 4, 4, int(narrow[0].sum()))


# --- the layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8,), (8, 5), (8, 4, 4), (8, 2, 3, 4)])
@pytest.mark.parametrize("rows", [12, 13, 3, 1])
def test_rows_are_dealt_in_blocks(shape, rows):
    layer = masks.Masksembles(8, 4, 2.0, seed=1)
    x = torch.randn(rows, *shape)
    outputs = layer(x)
    dealt = [i * 4 // rows for i in range(rows)]
    for row, mask in enumerate(dealt):
        mask_of_row = layer.masks[mask].view(8, *[1] * (len(shape) - 1))
        assert torch.equal(outputs[row], x[row] * mask_of_row)
    sizes = [dealt.count(i) for i in range(4)]
    assert max(sizes) - min(sizes) <= 1


def test_tokens():
    layer = masks.Masksembles(8, 4, 2.0, channel_axis=-1)
    x = torch.randn(8, 6, 8)
    assert torch.equal(layer(x), x * layer.masks.repeat_interleave(2, 0).unsqueeze(1))
    with pytest.raises(ValueError, match="channel_axis=-1"):
        masks.Masksembles(8, 4, 2.0)(x)


def test_masks_live_in_the_state_dict_and_move_with_the_layer():
    layer, loaded = masks.Masksembles(8, 4, 2.0, seed=1), masks.Masksembles(8, 4, 2.0, seed=2)
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded.masks, layer.masks)
    assert layer.double().masks.dtype == torch.bool
    assert layer(torch.ones(4, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.to("meta").masks.device.type == "meta"


def test_masks_as_other_packages_store_them():
    layer = masks.Masksembles(8, 4, 2.0, seed=1)
    stored = layer.masks.double()
    assert torch.equal(masks.Masksembles.of(stored).masks, layer.masks)
    loaded = masks.Masksembles(8, 4, 2.0, seed=2)
    loaded.load_state_dict({"masks": stored})
    assert torch.equal(loaded.masks, layer.masks)
    with pytest.raises(ValueError, match=r"\[N, channels\]"):
        masks.Masksembles.of(torch.ones(3))


@pytest.mark.parametrize("name", ["flat", "image", "three"])
def test_the_public_packages_layer_gives_the_same(name):
    """Golden tensors of the package `masksembles`; see oracles/."""
    golden = load_file(Path(__file__).parent / "golden" / "masksembles.safetensors")
    layer = masks.Masksembles.of(golden[f"{name}.masks"])
    assert_sound(layer.masks, layer.channels, layer.count, int(layer.masks[0].sum()))
    assert torch.equal(layer(golden[f"{name}.x"]), golden[f"{name}.y"])


def test_masks_compile(unchecked):
    masked = masks.convert(ds.nets.mlp(3, 2, (8,)), 4, 2.0, seed=0).eval()
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.compile(masked, backend="eager", fullgraph=True)(x), masked(x))


# --- networks ---------------------------------------------------------------------------------------------------------

NETWORKS = {
    "mlp": (lambda: ds.nets.mlp(6, 3, (16, 24)), (6,), 2),
    "cnn": (lambda: ds.nets.cnn(3, 4, 8, (8, 12), batch_norm=True), (3, 8, 8), 2),
    "vanilla": (lambda: ds.nets.vanilla_cnn(5, 1, 20), (1, 20, 20), 3),
    "resnet20": (ds.nets.resnet20, (3, 8, 8), 9),
    "resnet18": (ds.nets.resnet18, (3, 8, 8), 8),
    "vgg": (lambda: ds.nets.vgg(4, 1, 28), (1, 28, 28), 14),
}


def by_hand(masked, x, index):
    """Oracle: the whole network, run for one mask alone."""
    network = copy.deepcopy(masked.network)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, masks.Masksembles):
            network.set_submodule(
                name, masks.Masksembles.of(layer.masks[index : index + 1], channel_axis=layer.channel_axis)
            )
        elif isinstance(layer, tracing.Tile):
            network.set_submodule(name, nn.Identity())
    return network.eval()(x)


@pytest.mark.slow(cases=["vgg-*", "resnet18-*"])
@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_members_are_small_dense_networks_with_equal_outputs(name, widen):
    build, shape, places = NETWORKS[name]
    torch.manual_seed(0)
    network = build()
    masked = masks.convert(network, 4, 2.0, widen=widen, seed=3).double()
    x = torch.randn(6, *shape, dtype=torch.float64)
    masked.train()(x)  # batch norm gets statistics of its own
    masked.eval()
    outputs = masked(x)
    assert outputs.shape[:2] == (4, 6)
    assert sum(isinstance(layer, masks.Masksembles) for layer in masked.modules()) == places
    for index in range(4):
        torch.testing.assert_close(outputs[index], by_hand(masked, x, index), rtol=1e-9, atol=1e-11)
        member = masked.member(index)
        assert not any(isinstance(layer, masks.Masksembles | tracing.Tile) for layer in member.modules())
        torch.testing.assert_close(member(x), outputs[index], rtol=1e-9, atol=1e-11)
    sizes = masked.sizes()
    assert sizes.single == sum(p.numel() for p in network.parameters())
    assert sizes.member == sizes.single if widen else sizes.member < 0.8 * sizes.single
    assert sizes.member < sizes.masked
    assert (sizes.masked > sizes.single) == widen


def test_weights_are_copied_where_shapes_allow():
    network = ds.nets.resnet20()
    same_width, wide = masks.convert(network, 4, 2.0, seed=0), masks.convert(network, 4, 2.0, seed=0, widen=True)
    state = network.state_dict()
    for name, tensor in state.items():
        assert torch.equal(same_width.network.state_dict()[name], tensor)
    same_shape = [n for n, t in wide.network.state_dict().items() if n in state and t.shape == state[n].shape]
    assert all(torch.equal(wide.network.state_dict()[n], state[n]) for n in same_shape if "num_batches" not in n)
    assert {"conv1.weight", "bn1.weight", "fc.weight"} <= set(same_shape)
    assert "layer1.0.conv1.weight" not in same_shape
    assert wide.network.get_submodule("layer1.0.bn1").running_var.isfinite().all()


def test_masks_in_place_of_dropout():
    network = ds.nets.mlp(6, 3, (16, 16), dropout=0.3)
    masked = masks.convert(network, 4, 2.0, where="dropout", seed=0)
    assert not any(isinstance(layer, nn.Dropout) for layer in masked.modules())
    assert sum(isinstance(layer, masks.Masksembles) for layer in masked.modules()) == 2
    with pytest.raises(ValueError, match="places for masks"):
        masks.convert(ds.nets.mlp(6, 3, (16,)), 4, 2.0, where="dropout")


def test_masks_at_named_layers():
    network = ds.nets.resnet20()
    masked = masks.convert(network, 4, 2.0, where=["layer2.0.bn1"], seed=0).eval()
    assert sum(isinstance(layer, masks.Masksembles) for layer in masked.modules()) == 1
    by_rule = masks.convert(network, 4, 2.0, where=lambda name: name.endswith("bn1") and "layer3" in name, seed=0)
    assert sum(isinstance(layer, masks.Masksembles) for layer in by_rule.modules()) == 3
    with pytest.raises(ValueError, match="residual stream"):
        masks.convert(network, 4, 2.0, where=["layer2.0.bn2"], seed=0)
    with pytest.raises(ValueError, match="Did you mean 'activations'"):
        masks.convert(network, 4, 2.0, where="activation")


class Shared(nn.Module):
    """One activation in two places, one of them on the residual stream."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 2)
        self.relu = nn.ReLU()

    def forward(self, x):
        inner = self.relu(self.first(x))
        return self.last(self.relu(x + self.second(inner)))


def test_a_shared_activation_is_masked_only_inside_the_branch():
    masked = masks.convert(Shared().double(), 3, 2.0, seed=0).eval()
    assert [layer.channels for layer in masked.modules() if isinstance(layer, masks.Masksembles)] == [12]
    x = torch.randn(5, 6, dtype=torch.float64)
    for index in range(3):
        torch.testing.assert_close(masked.member(index)(x), masked(x)[index])


class Counted(nn.Module):
    """Uses the number of rows of its input behind the masks."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 1, 1), nn.Linear(36, 2)

    def forward(self, x):
        rows = x.shape[0]
        return self.last(self.second(torch.relu(self.first(x))).reshape(rows, -1))


def test_rows_counted_on_the_input_are_rows_after_tiling():
    masked = masks.convert(Counted().double(), 4, 2.0, seed=0).eval()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    assert masked(x).shape == (4, 3, 2)
    for index in range(4):
        torch.testing.assert_close(masked.member(index)(x), masked(x)[index])


class Flattened(nn.Module):
    """A small network whose maps become rows in some way; in all of them to the same numbers."""

    def __init__(self, rows, stem, inputs=32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3)
        self.stem, self.rows = stem, rows
        self.third, self.last = nn.Linear(inputs, 10), nn.Linear(10, 3)

    def forward(self, x):
        x = self.second(torch.relu(self.norm(self.first(x))))
        x = self.rows(self.stem(torch.relu(x)))
        return self.last(torch.relu(self.third(x)))


class Rows(nn.Module):
    """A flatten of the user's own making, in a module that a trace looks into."""

    def forward(self, x):
        rows, *_ = x.shape[0], x.shape[1]
        return x.view(rows, -1)


def unpacked(x):
    rows, channels, height, width = x.shape
    return x.reshape(rows, channels * height * width)


HALVED = nn.MaxPool2d(2)  # [B, 8, 2, 2]
FLAT = {
    "flatten": lambda x: x.flatten(1),
    "flatten by name": lambda x: x.flatten(start_dim=1),
    "flatten to the end": lambda x: x.flatten(1, 3),
    "flatten from the end": lambda x: x.flatten(-3, -1),
    "flatten twice": lambda x: x.flatten(2).flatten(1),
    "torch.flatten": lambda x: torch.flatten(x, 1),
    "torch.flatten by name": lambda x: torch.flatten(input=x, start_dim=1, end_dim=-1),
    "nn.Flatten": nn.Flatten(),
    "nn.Flatten to the end": nn.Flatten(1, 3),
    "view, size": lambda x: x.view(x.size(0), -1),
    "view, size by name": lambda x: x.view(x.size(dim=0), -1),
    "view, whole size": lambda x: x.view(x.size()[0], -1),
    "view, shape": lambda x: x.view(x.shape[0], -1),
    "view, len": lambda x: x.view(len(x), -1),
    "view, tuple": lambda x: x.view((x.size(0), -1)),
    "view, list": lambda x: x.view([x.size(0), -1]),
    "view, number": lambda x: x.view(-1, 32),
    "view, both": lambda x: x.view(x.size(0), 32),
    "view, product": lambda x: x.view(x.size(0), 8 * 2 * 2),
    "view, product of sizes": lambda x: x.view(-1, x.size(1) * x.size(2) * x.shape[-1]),
    "view, rest": lambda x: x.view(x.size(0), x.numel() // x.size(0)),
    "view, constant batch": lambda x: x.view(6, -1),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "reshape by name": lambda x: torch.reshape(x, shape=(x.shape[0], -1)),
    "torch.reshape": lambda x: torch.reshape(x, (len(x), -1)),
    "unpacked": unpacked,
    "contiguous": lambda x: x.contiguous().view(x.size(0), -1),
    "module": Rows(),
    "by channel": lambda x: x.view(x.size(0), 8, -1).flatten(1),
    "by channel, sizes": lambda x: x.view(x.size(0), x.size(1), -1).view(x.size(0), -1),
    "by channel, shape": lambda x: x.reshape(-1, 8, 4, 1).flatten(1),
    "unflatten": lambda x: x.flatten(1).unflatten(1, (8, 4)).flatten(1),
    "unflatten space": lambda x: x.flatten(2).unflatten(2, (4, 1)).flatten(1),
    "nn.Unflatten": nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 2, 2)), nn.Flatten()),
    "view back": lambda x: x.view(x.size(0), -1).view(-1, 8, 2, 2).flatten(1),
}
POINTS = {
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(x.size(0), -1),
    "view, number": lambda x: x.view(-1, 8),
    "view, channels": lambda x: x.view(x.size(0), x.size(1)),
    "squeeze": lambda x: x.squeeze(-1).squeeze(-1),
    "squeeze from the front": lambda x: x.squeeze(3).squeeze(2),
    "squeeze both": lambda x: x.squeeze((2, 3)),
    "squeeze all": lambda x: x.squeeze(),
    "torch.squeeze": lambda x: torch.squeeze(torch.squeeze(x, 3), dim=2),
    "taken": lambda x: x[:, :, 0, 0],
    "taken from the end": lambda x: x[..., 0, 0],
    "mean": lambda x: x.mean((2, 3)),
    "sum": lambda x: x.sum(3).sum(2),
}
SPACE = {
    "mean": lambda x: x.mean((2, 3)),
    "mean, list": lambda x: x.mean([-1, -2]),
    "mean by name": lambda x: x.mean(dim=(2, 3)),
    "means": lambda x: x.mean(3).mean(2),
    "mean, kept": lambda x: x.mean((2, 3), keepdim=True).flatten(1),
    "mean, kept and squeezed": lambda x: x.mean((2, 3), True).squeeze(),
    "torch.mean": lambda x: torch.mean(x, dim=(2, 3)),
    "flatten and mean": lambda x: x.flatten(2).mean(-1),
    "view and mean": lambda x: x.view(x.size(0), x.size(1), -1).mean(2),
    "pool and view": lambda x: nn.functional.adaptive_avg_pool2d(x, 1).view(x.size(0), -1),
    "pool and squeeze": lambda x: nn.functional.adaptive_avg_pool2d(x, (1, 1)).squeeze(),
    "pool by size": lambda x: nn.functional.avg_pool2d(x, x.size()[2:]).view(-1, 8),
    "pool by side": lambda x: nn.functional.avg_pool2d(x, x.size(3)).flatten(1),
    "layer and view": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
}
WAYS = {
    **{f"maps, {name}": (way, HALVED, 32, FLAT["flatten"]) for name, way in FLAT.items()},
    **{f"points, {name}": (way, nn.AdaptiveMaxPool2d(1), 8, POINTS["flatten"]) for name, way in POINTS.items()},
    **{f"space, {name}": (way, HALVED, 8, SPACE["mean"]) for name, way in SPACE.items()},
}


def stands(masked):
    return [layer.channels for layer in masked.modules() if isinstance(layer, masks.Masksembles)]


@pytest.mark.slow(fast=["maps, view*-False", "points*-False", "space, mean*-False"])
@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_flatten_keeps_the_mask_before_it(name, widen, caplog):
    way, stem, inputs, reference = WAYS[name]
    with caplog.at_level(logging.INFO, "dissensus"):
        torch.manual_seed(1)
        masked = masks.convert(Flattened(way, stem, inputs).double(), 4, 2.0, seed=0, widen=widen).eval()
        torch.manual_seed(1)
        expected = masks.convert(Flattened(reference, stem, inputs).double(), 4, 2.0, seed=0, widen=widen).eval()
    assert not caplog.records
    assert stands(masked) == stands(expected)
    assert len(stands(masked)) == 3
    x = torch.randn(6, 1, 6, 6, dtype=torch.float64)
    outputs = masked(x)
    torch.testing.assert_close(outputs, expected(x), rtol=1e-12, atol=1e-12)
    for index in range(4):
        torch.testing.assert_close(by_hand(masked, x, index), outputs[index], rtol=1e-9, atol=1e-11)
        member = masked.member(index)
        assert not any(isinstance(layer, masks.Masksembles | tracing.Tile) for layer in member.modules())
        torch.testing.assert_close(member(x), outputs[index], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(member(x[:1]), outputs[index, :1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", WAYS)
def test_tracing_leaves_outputs_alone_in_every_way_to_flatten(name):
    way, stem, inputs, _ = WAYS[name]
    network = Flattened(way, stem, inputs).double().eval()
    x = torch.randn(6, 1, 6, 6, dtype=torch.float64)
    expected = network(x)
    torch.testing.assert_close(masks.convert(network, 1, 1.0, seed=0)(x)[0], expected, rtol=1e-12, atol=1e-12)
    assert "len" not in globals()


def test_a_mask_that_a_user_put_before_a_view_is_cut_out_as_well():
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), masks.Masksembles(8, 4, 2.0), Rows(), nn.Linear(128, 3))
    masked = masks.Masked(network.double()).eval()
    x = torch.randn(6, 1, 6, 6, dtype=torch.float64)
    for index in range(4):
        member = masked.member(index)
        assert not any(isinstance(layer, masks.Masksembles) for layer in member.modules())
        torch.testing.assert_close(member(x), masked(x)[index])


UNPLACED = {
    "groups": (lambda x: x.view(x.size(0), 2, 4, 2, 2).transpose(1, 2).reshape(x.size(0), -1), "takes its channels"),
    "turned": (lambda x: x.permute(0, 2, 3, 1).flatten(1), "'permute' takes its channels"),
    "the number of channels": (lambda x: x.flatten(1) / x.size(1), "'size' takes its channels"),
    "not zero at zero": (lambda x: torch.exp(x).flatten(1), "'exp' takes its channels"),
    "space and examples": (lambda x: x.flatten(2).transpose(1, 2).flatten(1), "'transpose' takes its channels"),
}


@pytest.mark.parametrize("name", UNPLACED)
def test_an_activation_without_a_mask_is_reported(name, caplog):
    way, reason = UNPLACED[name]
    with caplog.at_level(logging.WARNING, "dissensus"):
        masked = masks.convert(Flattened(way, HALVED).double(), 4, 2.0, seed=0).eval()
    assert stands(masked) == [6, 10]
    (record,) = caplog.records
    assert "no mask behind activations relu_1 (" in record.getMessage()
    assert reason in record.getMessage()
    x = torch.randn(6, 1, 6, 6, dtype=torch.float64)
    for index in range(4):
        torch.testing.assert_close(masked.member(index)(x), masked(x)[index], rtol=1e-9, atol=1e-11)


def test_dropout_without_a_mask_is_reported(caplog):
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Dropout2d(0.1), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 2)
    )
    with caplog.at_level(logging.WARNING, "dissensus"):
        masked = masks.convert(network, 4, 2.0, where="dropout", seed=0)
    assert stands(masked) == [8]
    assert "no mask in place of dropout 4 (its channels are flattened)" in caplog.text
    with pytest.raises(ValueError, match=r"4 \(its channels are flattened\)"):
        masks.convert(network, 4, 2.0, where=["1", "4"], seed=0)


def test_masks_left_out_on_a_residual_stream_are_logged(caplog):
    with caplog.at_level(logging.INFO, "dissensus"):
        masks.convert(ds.nets.resnet20(), 4, 2.0, seed=0)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert caplog.text.count("'add") == 10


class Failing(nn.Module):
    """Raises at some pass."""

    def __init__(self, passes):
        super().__init__()
        self.first, self.drop, self.last, self.passes = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2), passes

    def forward(self, x):
        type(self).seen = getattr(type(self), "seen", 0) + 1
        if type(self).seen > self.passes:
            raise RuntimeError("no more")
        return self.last(self.drop(torch.relu(self.first(x.view(len(x), -1)))))


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize(
    "call",
    [
        lambda network: masks.convert(network, 4, 2.0, seed=0),
        lambda network: masks.monte_carlo(network, 4, 0.1),
        lambda network: masks.plan(network, 4, 1.0, cost="multiply_adds", x=torch.zeros(1, 7)),
        lambda network: masks.Masked(nn.Sequential(masks.Masksembles(6, 3, 2.0), network)).member(0),
        lambda network: masks.MonteCarlo(network, 4).eval()(torch.zeros(2, 6)),
    ],
)
def test_a_call_leaves_no_setting_changed_whatever_it_raises(call, passes):
    network = Failing(passes).train()
    network.drop.eval()

    def settings():
        hooks = [
            len(registered)
            for m in network.modules()
            for name, registered in vars(m).items()
            if name.endswith("_hooks")
        ]
        modes = [m.training for m in network.modules()], [p.requires_grad for p in network.parameters()], hooks
        return *modes, torch.is_grad_enabled(), jaxtyping.config.jaxtyping_disable, "len" in globals()

    Failing.seen, before = 0, settings()
    with contextlib.suppress(ValueError, RuntimeError):
        call(network)
    assert settings() == before
    assert torch.initial_seed() == 0


def test_layers_keep_modes_of_their_own():
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).train()
    network[1].eval()
    masked = masks.convert(network, 4, 2.0, seed=0)
    assert masked.training
    assert masked.network.training
    assert not masked.network.get_submodule("1").training
    assert not masked.member(0).get_submodule("1").training
    assert all(layer.training for layer in masked.modules() if isinstance(layer, tracing.Tile))


def test_a_mask_on_the_stream_stays_in_the_member():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), masks.Masksembles(8, 3, 2.0), nn.Sigmoid(), nn.Linear(8, 2))
    masked = masks.Masked(network.double()).eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    for index in range(3):
        member = masked.member(index)
        assert any(isinstance(layer, masks.Masksembles) for layer in member.modules())
        torch.testing.assert_close(member(x), masked(x)[index])


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.convert(Branches(), 4, 2.0), "be traceable by torch.fx"),
        (lambda: masks.Masked(nn.Linear(2, 2)), "hold Masksembles layers"),
        (
            lambda: masks.Masked(nn.Sequential(masks.Masksembles(8, 3, 2.0), masks.Masksembles(8, 4, 2.0))),
            "same number",
        ),
        (lambda: masks.convert(masks.convert(ds.nets.mlp(2, 2, (8,)), 4, 2.0), 4, 2.0), "no masks yet"),
        (lambda: masks.Masked(nn.Sequential(masks.Masksembles(8, 3, 2.0)), assign="each"), "assign"),
        (lambda: masks.convert(ds.nets.mlp(2, 2, (2,)), 4, 2.0), "`width` must be at least 4"),
    ],
)
def test_networks_that_cannot_be_masked_are_refused(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mask_that_is_not_there():
    masked = masks.convert(ds.nets.mlp(2, 2, (8,)), 4, 2.0)
    with pytest.raises(IndexError, match="masks 0 to 3"):
        masked.member(4)
    assert masked.member(-1)(torch.zeros(1, 2)).shape == (1, 2)


def test_the_stem_is_computed_once_for_all_masks():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    masked = masks.convert(network, 4, 2.0, seed=0).eval()
    sizes = []
    masked.network.get_submodule("0").register_forward_hook(lambda m, i, o: sizes.append(len(o)))
    masked.network.get_submodule("2").register_forward_hook(lambda m, i, o: sizes.append(len(o)))
    masked(torch.zeros(5, 4))
    assert sizes == [5, 20]


# --- training ---------------------------------------------------------------------------------------------------------


def digits(n=90):
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(3, (n,), generator=generator)
    return torch.randn(n, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6), y


def test_split_trains_each_example_under_one_mask():
    torch.manual_seed(1)
    masked = masks.convert(ds.nets.mlp(6, 3, (16,)), 4, 2.0, seed=0)
    x, _ = digits(10)
    assert masked.train()(x).shape == (1, 10, 3)
    outputs = masked.eval()(x)
    dealt = [i * 4 // 10 for i in range(10)]
    torch.testing.assert_close(masked.train()(x)[0], torch.stack([outputs[m, i] for i, m in enumerate(dealt)]))


@pytest.mark.parametrize("assign", ["split", "all"])
@pytest.mark.parametrize("backend", ["loop", "vmap", "auto"])
def test_a_masked_network_is_an_ensemble_for_fit(assign, backend):
    build = partial(masks.convert, ds.nets.mlp(6, 3, (16,)), 4, 2.0, assign=assign)
    ensemble = ds.Ensemble(build, 1, backend=backend)
    objective = (
        cross_entropy
        if assign == "split"
        else partial(ds.objectives.augmented, loss="cross_entropy", pool="probability", beta=0.5)
    )
    history = ds.fit(ensemble, digits(), objective, epochs=12, batch_size=32, lr=0.02, validation=0.2)
    assert history.column("loss")[-1] < 0.5 * history.column("loss")[0]
    outputs = ensemble.predict(digits()[0])
    assert outputs.shape == (4, 90, 3)
    assert (outputs.mean(0).argmax(-1) == digits()[1]).float().mean() > 0.8
    assert len(history.column("member_loss")[0]) == (1 if assign == "split" else 4)
    audit = ds.audit(outputs, digits()[1], task="classification", kind="logits")
    assert audit.test["accuracy"].value > 0.8


def test_fit_trains_a_module_in_place_as_the_ensemble_of_it():
    torch.manual_seed(3)
    masked = masks.convert(ds.nets.mlp(6, 3, (16,)), 4, 2.0, assign="all", seed=0)
    ensemble = ds.Ensemble.from_modules([masked])
    options = {"epochs": 3, "batch_size": 32, "lr": 0.02, "deterministic": True}
    losses = [ds.fit(model, digits(), cross_entropy, **options).column("loss") for model in (masked, ensemble)]
    assert losses[0] == losses[1]
    torch.testing.assert_close(masked.eval()(digits()[0]), ensemble.eval()(digits()[0]))


def test_sweeps_of_masked_networks_equal_single_fits():
    network = ds.nets.mlp(6, 3, (16,))
    build = partial(masks.convert, network, 4, 2.0)
    options = {"epochs": 2, "batch_size": 32, "lr": 0.02}
    swept = ds.sweep(build, digits(), cross_entropy, grid={"seed": [0, 1]}, members=1, **options)
    assert swept.outputs(digits()[0]).shape == (2, 4, 90, 3)
    members = [swept.run(i).member(0) for i in range(2)]
    assert not torch.equal(members[0].network.mask_0.masks, members[1].network.mask_0.masks)
    for seed in range(2):
        single = ds.Ensemble(build, 1, seed=seed)
        ds.fit(single, digits(), cross_entropy, seed=seed, **options)
        torch.testing.assert_close(
            swept.run(seed).predict(digits()[0]), single.predict(digits()[0]), rtol=1e-4, atol=1e-5
        )


def test_ensembles_of_masked_networks_are_saved_and_loaded(tmp_path):
    build = partial(masks.convert, ds.nets.mlp(6, 3, (16,)), 4, 2.0)
    ensemble = ds.Ensemble(build, 2, seed=5)
    ensemble.save(tmp_path / "saved")
    loaded = ds.Ensemble.load(tmp_path / "saved", build)
    x = digits()[0]
    assert ensemble.predict(x).shape == (8, 90, 3)
    assert torch.equal(loaded.predict(x), ensemble.predict(x))


def test_modules_of_different_kinds_with_masks():
    networks = [masks.convert(ds.nets.mlp(6, 3, (width,)), 4, 2.0) for width in (8, 12)]
    ensemble = ds.Ensemble.from_modules(networks).eval()
    assert ensemble(digits()[0]).shape == (8, 90, 3)


# --- Monte Carlo dropout ----------------------------------------------------------------------------------------------


def test_monte_carlo_dropout_by_hand():
    network = nn.Sequential(nn.Linear(6, 400), nn.Dropout(0.25), nn.Linear(400, 2))
    monte_carlo = masks.MonteCarlo(network, 6, seed=1).eval()
    x = digits(8)[0]
    outputs = monte_carlo(x)
    assert outputs.shape == (6, 8, 2)
    assert torch.equal(monte_carlo(x), outputs), "the seed decides"
    assert (outputs.std(0) > 0).all()
    hidden = []
    monte_carlo.network[1].register_forward_hook(lambda m, i, o: hidden.append((i[0], o)))
    monte_carlo(x)
    before, after = hidden[0]
    dropped = after == 0
    assert abs(dropped.float().mean() - 0.25) < 0.01
    torch.testing.assert_close(after[~dropped], before[~dropped] / 0.75)
    mean = masks.MonteCarlo(network, 3000, seed=1).eval()(x).mean(0)
    torch.testing.assert_close(mean, network.eval()(x), atol=0.05, rtol=0)


def test_monte_carlo_dropout_is_put_in_where_masks_would_be():
    network = ds.nets.resnet20()
    monte_carlo = masks.monte_carlo(network, 3, 0.1, seed=0)
    assert sum(isinstance(layer, nn.Dropout) for layer in monte_carlo.modules()) == 9
    history = ds.fit(masks.monte_carlo(ds.nets.mlp(6, 3, (16,)), 3, 0.1), digits(), cross_entropy, epochs=2, lr=0.02)
    assert len(history.epochs) == 2
    with pytest.raises(ValueError, match="dropout layers"):
        masks.MonteCarlo(nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match="rate"):
        masks.monte_carlo(network, 3, 1.5)


def test_a_rate_of_zero_drops_nothing():
    network = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 2))
    x = digits(8)[0]
    torch.testing.assert_close(masks.MonteCarlo(network, 3).eval()(x), network.eval()(x).expand(3, -1, -1))


# --- planning ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow(cases=["vgg"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20", "vgg"])
def test_a_plan_is_what_conversion_gives(name):
    """A network that is converted with widening has the plan's parameters, where its budget is that network's."""
    build, _, _ = NETWORKS[name]
    network = build()
    for scale in (2.0, 3.0):
        sizes = masks.convert(network, 4, scale, widen=True, seed=0).sizes()
        (row,) = masks.plan(network, 4, sizes.masked / sizes.single, scales=[scale])
        assert row.ones == pytest.approx(1, abs=0.04), "channels come as whole numbers"
        assert row.member == pytest.approx(1, abs=0.05)
        assert row.width == pytest.approx(masks.expected_width(4, 1, scale), rel=0.04)
        assert row.iou == masks.expected_iou(scale)


def test_multiply_adds_by_hand():
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    )
    x = torch.zeros(1, 3, 5, 5)
    coefficients = planning.coefficients(network, cost="multiply_adds", x=x)
    assert coefficients == (0.0, 9 * 3 * 9 * 8 + 36 * 2, 9 * 8 * 4)
    assert planning.coefficients(network) == (2.0, 3 * 9 * 8 + 8 + 4 + 72, 32.0)


def test_budgets():
    network = ds.nets.resnet20()
    rows = masks.plan(network, 4, 1.0)
    assert all(row.width == pytest.approx(1) for row in rows)
    assert [row.member for row in rows] == sorted((row.member for row in rows), reverse=True)
    assert masks.plan(network, 4, 2.0)[0].width > 1
    with pytest.raises(ValueError, match="budget"):
        masks.plan(network, 4, 0.001)
    with pytest.raises(ValueError, match="multiply-adds"):
        masks.plan(network, 4, 1.0, cost="multiply_adds")


def test_the_command_prints_plans_and_draws_them(tmp_path):
    result = CliRunner().invoke(
        app, ["masks", "--network", "resnet20", "--budget", "1", "--figure", str(tmp_path / "p.png")]
    )
    assert result.exit_code == 0, result.output
    assert "resnet20, 4 masks, 1× the parameters" in result.output
    assert "0.333" in result.output
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert CliRunner().invoke(app, ["masks", "--network", "none"]).exit_code == 1
    assert CliRunner().invoke(app, ["masks", "--budget", "0"]).exit_code == 1


# --- the plane, and calibration ---------------------------------------------------------------------------------------


def test_the_plane_by_hand():
    predictions = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    labels = torch.tensor([0, 1, 2, 2])
    plane = ds.diversity.plane(nn.functional.one_hot(predictions, 3).float(), labels)
    accuracies = [3 / 4, 2 / 4, 1 / 4]
    disagreements = {(0, 1): 2 / 4, (0, 2): 2 / 4, (1, 2): 2 / 4}
    for index, (a, b) in enumerate(disagreements):
        accuracy = (accuracies[a] + accuracies[b]) / 2
        assert plane.accuracy[index] == pytest.approx(accuracy)
        assert plane.diversity[index] == pytest.approx(disagreements[a, b] / (1 - accuracy))
    assert ds.diversity.plane(torch.rand(1, 5, 3), torch.zeros(5).long()).diversity.shape == (0,)
    perfect = nn.functional.one_hot(labels, 3).float().expand(2, -1, -1)
    assert ds.diversity.plane(perfect, labels).diversity.tolist() == [0.0]


def test_the_curves_of_theory_by_simulation():
    classes, examples, base, other_accuracy = 5, 400_000, 0.8, 0.7
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (examples,), generator=generator)

    def predictions(accuracy):
        wrong_labels = (labels + torch.randint(1, classes, (examples,), generator=generator)) % classes
        return torch.where(torch.rand(examples, generator=generator) < accuracy, labels, wrong_labels)

    first, second = predictions(base), predictions(other_accuracy)
    upper = ds.diversity.independent_errors(base, torch.tensor([other_accuracy]), classes)
    assert float(upper) == pytest.approx(float((first != second).float().mean()) / (1 - other_accuracy), rel=0.01)
    flips = torch.rand(examples, generator=generator) < 0.3
    changed = torch.where(flips, (first + torch.randint(1, classes, (examples,), generator=generator)) % classes, first)
    accuracy, lower = ds.diversity.flipped(base, torch.tensor([0.3]), classes)
    simulated = float((changed == labels).float().mean())
    assert float(accuracy) == pytest.approx(simulated, rel=0.01)
    assert float(lower) == pytest.approx(float((changed != first).float().mean()) / (1 - simulated), rel=0.01)


@pytest.mark.slow
def test_calibration_is_torchmetrics():
    metric = pytest.importorskip("torchmetrics.functional.classification").multiclass_calibration_error
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(500, 4, generator=generator)
    labels = torch.randint(4, (500,), generator=generator)
    result = ds.metrics.calibration(logits.log_softmax(-1), labels, bins=10)
    assert result.error == pytest.approx(float(metric(logits.softmax(-1), labels, 4, n_bins=10)), abs=1e-6)
    assert int(result.examples.sum()) == 500
    assert result.confidence[0].isnan(), "an empty bin has no mean"
    sure = ds.metrics.calibration(torch.tensor([[0.0, -math.inf]]), torch.tensor([0]))
    assert sure.error == 0
    with pytest.raises(ValueError, match="label each"):
        ds.metrics.calibration(torch.zeros(0, 3), torch.zeros(0).long())


# --- what a review has found ------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Dropout as a function, which a trace would freeze in one mode."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.last(nn.functional.dropout(torch.relu(self.first(x)), 0.5, self.training))


class Turned(nn.Module):
    """Moves examples to axis 1."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.transpose(0, 1)))).mean(0)


class Placed(nn.Module):
    """Adds something that has no examples behind the masks."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.embed = nn.Linear(6, 12), nn.Linear(12, 6), nn.Embedding(7, 6)
        self.register_buffer("places", torch.arange(7))

    def forward(self, x):
        return self.last(torch.relu(self.first(x))) + self.embed(self.places)


def test_networks_that_differ_between_modes_or_move_examples_are_refused():
    for network, message in ((Functional(), "nn.Dropout instead"), (Turned(), "examples on axis 0")):
        network.first.eval()
        with pytest.raises(ValueError, match=message):
            masks.convert(network, 3, 2.0, seed=0)
        assert network.training
        assert not network.first.training, "a look at it leaves its mode alone"


def test_tensors_without_examples_are_not_tiled():
    network = Placed().double().eval()
    masked = masks.convert(network, 3, 2.0, seed=0)
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    outputs = masked(x)
    assert outputs.shape == (3, 5, 7, 6)
    for index in range(3):
        torch.testing.assert_close(masked.member(index)(x), outputs[index])


@pytest.mark.slow(cases=["*vgg", "*resnet18"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", [False, True])
def test_one_mask_of_all_channels_is_the_network_itself(name, training):
    build, shape, _ = NETWORKS[name]
    network = build().double().train(training)
    for layer in network.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    x = torch.randn(5, *shape, dtype=torch.float64)
    masked = masks.convert(network, 1, 1.0, seed=0)
    torch.testing.assert_close(masked(x)[0], network(x), rtol=1e-9, atol=1e-11)


def test_pooling_along_the_channels_of_a_linear_layer_is_not_cut():
    network = nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(),
        masks.Masksembles(16, 3, 2.0, channel_axis=-1),
        nn.AvgPool1d(3, 1, 1),
        nn.Linear(16, 2),
    ).double()
    masked = masks.Masked(network).eval()
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    for index in range(3):
        torch.testing.assert_close(masked.member(index)(x), masked(x)[index])


def test_two_masks_in_one_stretch_keep_what_both_keep():
    network = nn.Sequential(
        nn.Linear(6, 32),
        masks.Masksembles(32, 3, 2.0, seed=1),
        nn.ReLU(),
        masks.Masksembles(32, 3, 2.0, seed=2),
        nn.Linear(32, 2),
    ).double()
    masked = masks.Masked(network).eval()
    x = torch.randn(5, 6, dtype=torch.float64)
    for index in range(3):
        member = masked.member(index)
        torch.testing.assert_close(member(x), masked(x)[index])
        assert member.get_submodule("0").out_features == int((network[1].masks & network[3].masks)[index].sum())
    with pytest.raises(ValueError, match="not several"):
        masks.convert(ds.nets.cnn(3, 4, 8, (8,), batch_norm=True), 3, 2.0, where=["1", "2"])
    with pytest.raises(ValueError, match="typo"):
        masks.convert(ds.nets.mlp(6, 2, (8,)), 3, 2.0, where=["1", "typo"])


def test_weights_that_are_made_elsewhere_are_not_cut():
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 12))
    network = nn.Sequential(normed, nn.ReLU(), masks.Masksembles(12, 3, 2.0), nn.Linear(12, 2)).double()
    masked = masks.Masked(network).eval()
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(masked.member(1)(x), masked(x)[1])
    tokens = nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(7), nn.ReLU(), masks.Masksembles(12, 3, 2.0, channel_axis=-1), nn.Linear(12, 2)
    ).double()
    masked = masks.Masked(tokens).eval()
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(masked.member(1)(x), masked(x)[1])


def test_widened_layers_start_at_the_scale_of_the_networks_own():
    torch.manual_seed(0)
    network = ds.nets.resnet18()
    wide = masks.convert(network, 4, 2.0, widen=True, seed=0)
    for name in ("layer3.1.conv1", "layer3.1.conv2", "layer4.0.conv2"):
        before, after = (net.get_submodule(name).weight.detach() for net in (network, wide.network))
        assert before.shape != after.shape
        assert float(after.std() / before.std()) == pytest.approx(1, abs=0.02)


def test_the_mode_and_the_assignment_are_the_networks():
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), masks.Masksembles(8, 4, 2.0), nn.Linear(8, 2)).eval()
    masked = masks.Masked(network)
    assert masked(torch.zeros(5, 6)).shape == (4, 5, 2)
    masked.train()
    assert masked(torch.zeros(5, 6)).shape == (1, 5, 2)
    masked.assign = "all"
    assert masked(torch.zeros(5, 6)).shape == (4, 5, 2)
    monte_carlo = masks.MonteCarlo(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)).eval(), 3)
    assert monte_carlo(torch.zeros(5, 6)).shape == (3, 5, 2)


def test_interaction_without_common_examples_is_reported(caplog):
    masked = masks.convert(ds.nets.mlp(6, 3, (16,)), 4, 2.0, seed=0)
    joint = partial(ds.objectives.joint, loss="cross_entropy", pool="probability")
    ds.fit(masked, digits(), joint, epochs=1)
    assert "use assign='all'" in caplog.text
    caplog.clear()
    ds.fit(masked, digits(), cross_entropy, epochs=1)
    assert "assign" not in caplog.text


def test_dropout_of_whole_channels_and_of_a_layer_that_is_used_twice():
    twice = nn.Dropout2d(0.5)
    network = nn.Sequential(nn.Conv2d(1, 40, 1), twice, nn.Conv2d(40, 40, 1), twice)
    monte_carlo = masks.MonteCarlo(network, 4, seed=0).eval()
    dropped_masks = []
    monte_carlo.network[1].register_forward_hook(lambda m, i, o: dropped_masks.append(o == 0))
    monte_carlo(torch.randn(3, 1, 5, 5))
    assert len(dropped_masks) == 2
    for dropped in dropped_masks:
        dropped_share = dropped.flatten(2).float().mean(-1)
        assert set(dropped_share.unique().tolist()) == {0.0, 1.0}, "channels go as a whole"
    assert not torch.equal(dropped_masks[0], dropped_masks[1]), "and others the second time"
    with pytest.raises(ValueError, match="AlphaDropout"):
        masks.MonteCarlo(nn.Sequential(nn.AlphaDropout(0.5)), 3)


def test_one_scale_makes_no_two_masks():
    with pytest.raises(ValueError, match="above 1"):
        masks.generate(2, 1, 1.0)
    masks.for_width(2, 2, 1.5)
    with pytest.raises(ValueError, match="between 1 and"):
        masks.for_width(2, 2, 1.0)


def test_calibration_of_what_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="be numbers"):
        ds.metrics.calibration(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]))

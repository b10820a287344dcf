"""The backend "stacked": operations of all members equal those of each, and trainings equal the loop's.

Kernels run by Triton's interpreter, where Triton is installed, and on a GPU, where there is one. Elsewhere operations
run by torch.
"""

import functools
import importlib.util
import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import dissensus as ds
from dissensus.execution import BACKENDS, Backend, choice, stacked_convolution, stacked_norm, triton_launch
from dissensus.execution.stacked_convolution import GROUPED, KERNEL, STREAMS, Geometry, Routes, Way
from dissensus.execution.stacked_pass import FORMS, run_stacked, seconds_to_compile
from dissensus.execution.tf32 import tf32
from dissensus.execution.ways import Ways
from dissensus.execution.wide import wide_plan

M = 3
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA")
cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")

# members, batch, channels, outputs, height, width, kernel, stride, padding
CONVOLUTIONS = {
    "3x3": (2, 2, 3, 16, 5, 5, (3, 3), (1, 1), (1, 1)),
    "16 channels": (2, 2, 16, 16, 6, 6, (3, 3), (1, 1), (1, 1)),
    "stride 2, odd": (1, 1, 16, 20, 7, 7, (3, 3), (2, 2), (1, 1)),
    "stride 2, even": (2, 3, 5, 6, 6, 8, (3, 3), (2, 2), (1, 1)),
    "1x1": (3, 2, 70, 18, 4, 4, (1, 1), (1, 1), (0, 0)),
    "1x1, stride 2": (2, 2, 6, 70, 6, 5, (1, 1), (2, 2), (0, 0)),
    "oblong": (2, 2, 4, 5, 6, 5, (3, 2), (2, 1), (2, 1)),
    "5x5": (2, 1, 1, 4, 9, 9, (5, 5), (1, 1), (0, 0)),
    "two tiles": (2, 1, 32, 65, 5, 5, (3, 3), (1, 1), (1, 1)),
    "parts": (1, 40, 2, 3, 8, 8, (3, 3), (1, 1), (1, 1)),
}
# members, shape, residual, ReLU, training
NORMS = {
    "training": (2, (3, 5, 4, 4), True, True, True),
    "one member": (1, (2, 16, 3, 3), False, True, True),
    "no images": (3, (70, 130), False, False, True),
    "parts": (2, (300, 4, 3, 3), True, False, True),
    "evaluation": (2, (2, 20, 3), True, True, False),
    "plain": (2, (2, 4, 3, 3), False, False, False),
}


def drawn(*shape, dtype=torch.float64, device="cpu"):
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def convolved_by_hand(x, weight, bias, stride, padding):
    return torch.stack([F.conv2d(a, w, b, stride, padding) for a, w, b in zip(x, weight, bias, strict=True)])


def normed_by_hand(x, statistics, affine, residual, *, training, relu):
    """From the equation, in float64, with running statistics as torch documents them."""
    axes = [axis for axis in range(1, x.ndim) if axis != 2]
    shape = [len(x), 1, x.shape[2], *[1] * (x.ndim - 3)]
    mean, variance = (x.mean(axes), x.var(axes, unbiased=False)) if training else statistics
    y = (x - mean.view(shape)) / (variance.view(shape) + 1e-5).sqrt()
    y = y * affine[0].view(shape) + affine[1].view(shape)
    y = y if residual is None else y + residual
    y = torch.where(y > 0, y, 0) if relu else y
    if not training:
        return y, statistics
    moved = [0.9 * old + 0.1 * new for old, new in zip(statistics, (mean, x.var(axes)), strict=True)]
    return y, moved


def relative_error(ours, theirs):
    ours, theirs = (tensor.detach().cpu().double() for tensor in (ours, theirs))
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs).clamp_min(1e-30))


def convolution_errors(case, *, dtype=torch.float64, shared=False, last=False, device="cpu"):
    """Relative errors of outputs and of gradients, against each member's convolution in float64."""
    members, batch, channels, outputs, height, width, kernel, stride, padding = case
    x = drawn(1 if shared else members, batch, channels, height, width, dtype=dtype, device=device)
    weight = drawn(members, outputs, *kernel, channels, dtype=dtype, device=device).movedim(-1, 2)
    weight = weight if last else weight.contiguous()
    bias = drawn(members, outputs, dtype=dtype, device=device)
    leaves = [t.detach().double().cpu().requires_grad_() for t in (x, weight, bias)]
    expected = convolved_by_hand(leaves[0].expand(members, -1, -1, -1, -1), *leaves[1:], stride, padding)
    aim = drawn(*expected.shape, dtype=dtype, device=device)
    gradients = torch.autograd.grad(expected, leaves, aim.double().cpu())
    own = [weight.requires_grad_(), bias.requires_grad_()] + ([] if shared else [x.requires_grad_()])
    y = stacked_convolution.convolution(
        x.expand(members, -1, -1, -1, -1) if shared else x, weight, bias, stride, padding, Ways()
    )
    assert y.movedim(2, -1).is_contiguous()
    ours = torch.autograd.grad(y, own, aim)
    pairs = [(y, expected), *zip(ours, (*gradients[1:], gradients[0]), strict=False)]
    return [relative_error(mine, theirs) for mine, theirs in pairs]


def norm_errors(case, *, dtype=torch.float64, device="cpu"):
    members, shape, with_residual, relu, training = case
    x = drawn(members, *shape, dtype=dtype, device=device) + 30
    residual = drawn(members, *shape, dtype=dtype, device=device) if with_residual else None
    affine = [drawn(members, shape[1], dtype=dtype, device=device) for _ in range(2)]
    statistics = [drawn(members, shape[1], dtype=dtype, device=device), torch.rand(members, shape[1]).to(device, dtype)]
    leaves = [x, *affine, *([] if residual is None else [residual])]
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    exact_residual = exact[3] if with_residual else None
    exact_statistics = [tensor.double().cpu() for tensor in statistics]
    expected, moved = normed_by_hand(
        exact[0], exact_statistics, exact[1:3], exact_residual, training=training, relu=relu
    )
    aim = drawn(*expected.shape, dtype=dtype, device=device)
    gradients = torch.autograd.grad(expected, exact, aim.double().cpu())
    for leaf in leaves:
        leaf.requires_grad_()
    how = {"training": training, "momentum": 0.1, "eps": 1e-5, "relu": relu}
    y = stacked_norm.batch_norm(x, tuple(statistics), tuple(affine), residual, **how)
    ours = torch.autograd.grad(y, leaves, aim)
    pairs = [(y, expected), *zip(ours, gradients, strict=True), *zip(statistics, moved, strict=True)]
    return [relative_error(mine, theirs) for mine, theirs in pairs]


def outlier_error(dtype=torch.float32, device="cpu"):
    """The error of batch norm where the first image is far from all others, relative to the largest output."""
    x = drawn(2, 64, 3, 16, 16, dtype=dtype, device=device)
    x[:, 0, :, 0, 0] = 1e3
    statistics = [torch.zeros(2, 3, device=device), torch.ones(2, 3, device=device)]
    affine = [torch.ones(2, 3, device=device), torch.zeros(2, 3, device=device)]
    how = {"training": True, "momentum": 0.1, "eps": 1e-5, "relu": False}
    y = stacked_norm.batch_norm(x, tuple(statistics), tuple(affine), None, **how)
    exact = [tensor.double().cpu() for tensor in (x, *affine)]
    plain = [torch.zeros(2, 3).double(), torch.ones(2, 3).double()]
    expected, moved = normed_by_hand(exact[0], plain, exact[1:], None, training=True, relu=False)
    errors = [relative_error(y, expected), *map(relative_error, statistics, moved)]
    return max(errors)


@pytest.fixture
def routed(monkeypatch):
    """Let all convolutions run in one way."""
    return lambda way: monkeypatch.setattr(stacked_convolution, "_routes", lambda *_: Routes(way, way, way))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", [GROUPED, STREAMS])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_are_those_of_each_member(case, way, shared, routed):
    routed(way)
    assert max(convolution_errors(CONVOLUTIONS[case], shared=shared, last=shared)) < 1e-12


@pytest.mark.parametrize("case", NORMS)
def test_batch_norm_is_that_of_each_member(case):
    assert max(norm_errors(NORMS[case])) < 1e-11


@pytest.mark.parametrize("of_inputs", [KERNEL, STREAMS, GROUPED])
@pytest.mark.parametrize("of_weights", [KERNEL, STREAMS, GROUPED])
def test_streams_of_members_lie_in_no_other_streams(of_inputs, of_weights, monkeypatch):
    """Memory that one of two jobs frees on a stream is the other's before all have read it."""
    depths, depth = [], [0]

    def side_by_side(jobs, device):
        depth[0] += 1
        depths.append(depth[0])
        results = [job() for job in jobs]
        depth[0] -= 1
        return results

    routes = Routes(GROUPED, of_inputs, of_weights)
    monkeypatch.setattr(stacked_convolution, "side_by_side", side_by_side)
    monkeypatch.setattr(stacked_convolution, "_routes", lambda *_: routes)
    monkeypatch.setitem(stacked_convolution.WAYS, KERNEL, stacked_convolution.WAYS[GROUPED])
    x, weight = drawn(M, 2, 3, 4, 4).requires_grad_(), drawn(M, 5, 3, 3, 3).requires_grad_()
    y = stacked_convolution.convolution(x, weight, None, (1, 1), (1, 1), Ways())
    torch.autograd.grad(y.square().sum(), [x, weight])
    assert set(depths) == {1}


@pytest.mark.parametrize("way", [GROUPED, STREAMS])
def test_gradients_of_convolutions_are_those_of_differences(way, routed):
    routed(way)
    x, weight, bias = (drawn(2, *shape).requires_grad_() for shape in [(2, 2, 4, 3), (3, 2, 3, 2), (3,)])

    def function(x, weight, bias):
        return stacked_convolution.convolution(x, weight, bias, (2, 1), (1, 1), Ways())

    torch.autograd.gradcheck(function, (x, weight, bias))
    torch.autograd.gradgradcheck(function, (x, weight, bias))


def test_gradients_of_an_expanded_batch_are_each_members():
    x, weight = drawn(1, 2, 3, 5, 5).expand(M, -1, -1, -1, -1).requires_grad_(), drawn(M, 4, 3, 3, 3)
    y = stacked_convolution.convolution(x, weight, None, (1, 1), (1, 1), Ways())
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    own = x.detach().clone().requires_grad_()
    expected = convolved_by_hand(own, weight, [None] * M, 1, 1)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), own)[0])


def test_a_batch_that_members_share_is_not_copied():
    x = drawn(1, 2, 3, 4, 4).expand(M, -1, -1, -1, -1)
    last = stacked_convolution._channels_last(x, torch.float32)
    assert last.untyped_storage().nbytes() == 4 * x[0].numel()
    assert last[0].movedim(1, -1).is_contiguous()


# A network of residual blocks, written as in other libraries.


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after, momentum=0.3)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


class Net(nn.Module):
    """Blocks, a norm without ReLU, one whose output is read twice, and a linear layer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Block(4, 5, 1), Block(5, 6, 2))
        self.last, self.drop, self.head = nn.BatchNorm2d(6), nn.Dropout(dropout), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = torch.tanh(self.last(self.blocks(x + torch.relu(x))))
        return self.head(self.drop(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))


class Pooled(Net):
    def forward(self, x):
        x = self.last(self.blocks(self.norm(self.stem(x)).relu()))
        return self.head(self.drop(x.mean([2, 3])))


class Viewed(nn.Module):
    """Sizes, views and functions, as written in many networks."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 5, 3), nn.Linear(20, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.avg_pool2d(torch.relu(self.second(x)), 1, stride=1)
        return self.head(x.reshape(x.shape[0], 20)).view(x.size(0), -1)


class Wide(nn.Module):
    """Layers of many channels, which cuDNN computes on streams."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(2, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()),
            *(nn.Conv2d(128, 160, 3, padding=1, stride=2), nn.BatchNorm2d(160), nn.ReLU()),
            *(nn.Conv2d(160, 160, 3, padding=1), nn.BatchNorm2d(160), nn.ReLU()),
        )
        self.head = nn.Linear(160, 3)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


class CalledTwice(nn.Module):
    """A batch norm whose first output meets a ReLU after its second call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(2, 4, 3, padding=1) for _ in range(2))
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        before = self.norm(self.first(x))
        after = torch.tanh(self.norm(3 * self.second(x) + 1))
        return self.head((torch.relu(before) * after).mean((2, 3)))


class Broadcast(nn.Module):
    """A sum of batch norm with something of fewer axes, which eight images of 8×8 make possible."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x):
        h = self.layer(x)
        return (self.norm(h) + h.mean((2, 3))).mean((2, 3))  # [8, 8] beside [8, 8, 8, 8]


NETWORKS = {
    "pooled": Pooled,
    "wide": Wide,
    "batch norm called twice": CalledTwice,
    "dropout": functools.partial(Pooled, 0.3),
    "cnn": functools.partial(ds.nets.cnn, 2, 3, 8, (3, 4), batch_norm=True),
    "plain cnn": functools.partial(ds.nets.cnn, 2, 3, 8, (3, 4), dropout=0.2),
    "resnet20": functools.partial(ds.nets.resnet20, 3, 2),
    "viewed": Viewed,
}


def image_data(n=20, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return torch.randn(n, 2, 8, 8).to(device, dtype), torch.randint(0, 3, (n,)).to(device)


def trained(build, backend, data, dtype=torch.float64, **settings):
    ensemble = ds.Ensemble(lambda: build().to(dtype), M, backend=backend, seed=1).to(data[0].device)
    history = ds.fit(ensemble, data, cross_entropy, batch_size=8, **{"epochs": 2, **settings})
    assert ensemble.body.ran == backend
    return ensemble, history


def assert_trained_alike(loop, stacked, **tolerance):
    tensors = stacked.body.tensors()
    for name, tensor in loop.body.tensors().items():
        torch.testing.assert_close(tensors[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.slow(cases=["resnet20-*", "wide-*"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_training_equals_the_loop(network, channels_last):
    data = image_data()
    settings = {"validation": data, "weight_decay": 0.1, "clip_norm": 1.0, "channels_last": channels_last}
    (loop, expected), (stacked, history) = (
        trained(NETWORKS[network], backend, data, **settings) for backend in ("loop", "stacked")
    )
    assert_trained_alike(loop, stacked, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(history.column("validation"), expected.column("validation"))
    torch.testing.assert_close(stacked.predict(data[0]), loop.predict(data[0]))


@pytest.mark.parametrize("network", ["pooled", "cnn"])
def test_a_training_in_bf16_equals_the_loop_to_rounding(network):
    data = image_data(dtype=torch.float32)
    settings = {"precision": "bf16", "optimizer": "sgd", "lr": 0.01}
    (loop, _), (stacked, _) = (
        trained(NETWORKS[network], backend, data, torch.float32, **settings) for backend in ("loop", "stacked")
    )
    exact, _ = trained(NETWORKS[network], "loop", data, torch.float32, **{**settings, "precision": "float32"})
    bf16 = (loop.predict(data[0]) - exact.predict(data[0])).abs().max()
    assert 0 < (stacked.predict(data[0]) - loop.predict(data[0])).abs().max() < 3 * bf16
    assert_trained_alike(loop, stacked, rtol=0.05, atol=0.02)


def test_members_with_batches_of_their_own_equal_the_loop():
    x = image_data(M * 4)[0].unflatten(0, (M, 4)).requires_grad_()
    results = []
    for backend in ("loop", "stacked"):
        ensemble = ds.Ensemble(lambda: Pooled().double(), M, seed=1, backend=backend)
        outputs = ensemble(x, per_member=True)
        assert ensemble.body.ran == backend
        results.append((outputs, *torch.autograd.grad(outputs.square().sum(), [x, *ensemble.parameters()])))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


def test_second_derivatives_are_the_loops():
    x = image_data(4)[0].requires_grad_()
    results = []
    for backend in ("loop", "stacked"):
        ensemble = ds.Ensemble(lambda: Pooled().double(), M, seed=1, backend=backend)
        (gradient,) = torch.autograd.grad(ensemble(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), [x, *ensemble.parameters()], allow_unused=True))
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its forward mode
def test_transforms_of_torch_look_into_passes():
    ensemble, loop = (ds.Ensemble(lambda: Pooled().double(), M, seed=1, backend=b).eval() for b in ("stacked", "loop"))
    x, change = image_data(4)[0], drawn(4, 2, 8, 8)
    assert ensemble(x).shape == (M, 4, 3)
    assert ensemble.body.ran == "stacked"

    def derivatives(ens):
        with forward_ad.dual_level():
            forward = forward_ad.unpack_dual(ens(forward_ad.make_dual(x, change))).tangent
        return forward, *torch.func.jvp(ens, (x,), (change,)), torch.func.grad(lambda x: ens(x).square().sum())(x)

    torch.testing.assert_close(derivatives(ensemble), derivatives(loop))
    assert ensemble.body.ran == "stacked"


def test_transforms_over_any_parameter_are_the_loops():
    build = NETWORKS["cnn"]
    ensemble, loop = (ds.Ensemble(lambda: build().double(), M, seed=1, backend=b).eval() for b in ("stacked", "loop"))
    x = image_data(4)[0]
    torch.testing.assert_close(ensemble(x), loop(x))  # which chooses backends, once and outside of transforms
    for name, parameter in ensemble.named_parameters():
        values = torch.stack([parameter.detach(), 2 * parameter.detach()])
        results = [
            torch.func.vmap(lambda value, ens=ens: torch.func.functional_call(ens, {name: value}, (x,)))(values)  # noqa: B023
            for ens in (ensemble, loop)
        ]
        torch.testing.assert_close(*results)
    assert ensemble.body.ran == "stacked"


@pytest.mark.parametrize("members", [1, 8])
def test_a_residual_of_fewer_axes_is_aligned_as_each_members_is(members):
    x = image_data(8)[0]
    ensembles = [ds.Ensemble(lambda: Broadcast().double(), members, seed=1, backend=b) for b in ("stacked", "loop")]
    torch.testing.assert_close(*[ensemble(x) for ensemble in ensembles])
    assert ensembles[0].body.ran == "stacked"


def calls_of(build):
    """What a pass calls, with whether batch norm has a residual and ends with ReLU."""
    ensemble = ds.Ensemble(build, M)
    graphs = []
    forms = FORMS._replace(prepare=lambda skeleton, graph: (FORMS.prepare(skeleton, graph), graphs.append(graph)))
    wide_plan(ensemble.body.skeleton, False, forms)
    nodes = [node for node in graphs[0].nodes if node.op not in ("placeholder", "output")]
    return [(str(node.target), len(node.args) > 1, node.meta["relu"]) for node in nodes if "relu" in node.meta], nodes


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.stem(x)
        kept = x * 2
        x += self.norm(self.conv(x))
        return (x - kept).mean([2, 3])


class ReadsWhatIsWritten(WritesItsInput):
    def forward(self, x):
        x = self.stem(x)
        kept = x
        x += self.norm(self.conv(x))
        return (x - 0.5 * kept).mean([2, 3])


@pytest.mark.parametrize("build", [WritesItsInput, ReadsWhatIsWritten])
def test_a_sum_in_place_changes_what_others_read(build):
    x = drawn(3, 2, 4, 4)
    loop, stacked = (ds.Ensemble(lambda: build().double(), M, seed=1, backend=b) for b in ("loop", "stacked"))
    torch.testing.assert_close(stacked(x), loop(x))


def test_batch_norm_residual_and_relu_are_one_operation():
    norms, nodes = calls_of(Pooled)
    block = [("bn1", False, True), ("down.1", False, False), ("bn2", True, True)]
    assert norms == [
        ("norm", False, True),
        *((f"blocks.{index}.{name}", *rest) for index in range(2) for name, *rest in block),
        ("last", False, False),
    ]
    assert not [node for node in nodes if "relu" in node.name or "add" in node.name]
    norms, nodes = calls_of(Net)
    assert norms[0] == ("norm", False, False), "its output is read twice"
    assert sum("relu" in node.name for node in nodes) == 1
    assert sum(relu for *_, relu in calls_of(ds.nets.resnet20)[0]) == 19


class Reads(nn.Module):
    """Reads what ReLU has written to."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.head = nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True), nn.Linear(128, 3)

    def forward(self, x):
        y = self.conv(x)
        return self.head(torch.flatten(self.relu(y) * y, 1))


UNSUPPORTED = {
    "no convolutions": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), "no 2-D convolutions"),
    "groups": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten()), "no 2-D convolutions"),
    "unknown layer": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU(), nn.Flatten()), "PReLU"),
    "in place": (Reads, "writes into what another operation reads"),
}


@pytest.mark.parametrize("network", UNSUPPORTED)
def test_other_networks_run_in_a_loop(network, caplog):
    build, reason = UNSUPPORTED[network]
    x = image_data(4)[0]
    ensemble, loop = (ds.Ensemble(lambda: build().double(), M, seed=1, backend=b) for b in ("stacked", "loop"))
    with caplog.at_level(logging.WARNING, "dissensus"):
        torch.testing.assert_close(ensemble(x), loop(x))
    assert ensemble.body.ran == "loop"
    assert reason in caplog.text


# The choice of a backend, and of ways.


def test_auto_does_not_measure_it_on_a_cpu():
    ensemble = ds.Ensemble(NETWORKS["cnn"], M)
    ds.fit(ensemble, image_data(dtype=torch.float32), cross_entropy, epochs=200, batch_size=8)
    assert ensemble.choices
    for made in ensemble.choices:
        assert "stacked" not in {*made.milliseconds, *made.refused}


@pytest.fixture
def backends(monkeypatch):
    """Let ``"auto"`` measure a backend that compiles, as if on a GPU, with times that are given."""

    def use(run, milliseconds=0.5, seconds_to_compile=lambda network: 1.0, **settings):
        own = Backend("stacked", run, seconds_to_compile=seconds_to_compile, **settings)
        monkeypatch.setattr(choice, "BACKENDS", {**BACKENDS, "stacked": own})
        monkeypatch.setitem(BACKENDS, "stacked", own)

        def measured(trial, candidates, refused, replayed, passes):
            times = {"loop": 3.0, "vmap": 2.0, "stacked": milliseconds}
            for name in candidates:
                trial.whole(choice._run_of(name))
            return {name: 1e3 * times.get(name, 9.0) for name in candidates}

        monkeypatch.setattr(choice, "_measured", measured)

    return use


def fitted(epochs=40):
    ensemble = ds.Ensemble(NETWORKS["cnn"], M, seed=1)
    ds.fit(ensemble, image_data(dtype=torch.float32), cross_entropy, epochs=epochs, batch_size=8)
    chosen = next(made for made in ensemble.choices if made.milliseconds)
    return ensemble, chosen


def test_auto_takes_it_where_it_is_faster(backends):
    backends(run_stacked)
    ensemble, chosen = fitted()
    assert (chosen.backend, chosen.refused.get("stacked")) == ("stacked", None)
    assert ensemble.body.ran == "stacked"


def failing(*_):
    raise ValueError("no compiler here\nand more")  # not a RuntimeError


def failing_backward(skeleton, weights, buffers, x, per_member):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            failing()

    return Fails.apply(run_stacked(skeleton, weights, buffers, x, per_member))


def wrong_gradient(skeleton, weights, buffers, x, per_member):
    outputs = run_stacked(skeleton, weights, buffers, x, per_member)
    return outputs.detach() + 2 * (outputs - outputs.detach())


@pytest.mark.parametrize(
    ("run", "reason"),
    [(failing, "no compiler here"), (failing_backward, "no compiler here"), (wrong_gradient, "gradients differ")],
)
def test_auto_goes_on_without_it_where_it_fails(run, reason, backends, caplog):
    backends(run)
    with caplog.at_level(logging.INFO, "dissensus"):
        ensemble, chosen = fitted()
    assert chosen.backend == ensemble.body.ran == "vmap"
    assert reason in chosen.refused["stacked"]
    assert f"stacked refused: {chosen.refused['stacked']}" in caplog.text


def test_auto_does_not_compile_for_few_passes(backends):
    ran = []
    backends(lambda *arguments: ran.append(1) or run_stacked(*arguments))
    _, chosen = fitted(epochs=2)
    assert not ran
    assert chosen.backend == "vmap"
    backends(failing, seconds_to_compile=lambda network: 1e6)
    _, chosen = fitted()
    assert "stacked" not in chosen.refused


def test_compiling_takes_longer_for_more_kinds_of_convolutions():
    assert seconds_to_compile(ds.nets.mlp(2, 2)) == 0
    assert seconds_to_compile(ds.nets.resnet20()) == seconds_to_compile(ds.nets.resnet32())
    assert seconds_to_compile(ds.nets.cnn(1, 3, 8, (4,))) < seconds_to_compile(ds.nets.resnet20())


def test_the_fastest_way_is_taken_and_what_fails_is_left_out(monkeypatch, caplog):
    def timed(function):
        function()
        owner = function.func.__name__
        return 1.0 if "streams" in owner else 2.0

    monkeypatch.setattr(stacked_convolution, "replay_milliseconds", timed)
    monkeypatch.setattr(stacked_convolution, "_fastest_before", {})
    stacked_convolution._tell.cache_clear()
    monkeypatch.setitem(stacked_convolution.WAYS, KERNEL, Way(failing, failing, failing))
    x, weight, geometry = drawn(M, 2, 3, 5, 5), drawn(M, 4, 3, 3, 3), Geometry((1, 1), (1, 1))
    for operation in ("forward", "input gradient", "weight gradient"):
        with caplog.at_level(logging.WARNING, "dissensus"):
            fastest = stacked_convolution._fastest(operation, [KERNEL, GROUPED, STREAMS], x, weight, geometry)
        assert fastest == STREAMS
    assert caplog.text.count("convolutions do not all run in the way 'kernel': no compiler here") == 1
    monkeypatch.setattr(stacked_convolution, "replay_milliseconds", failing)
    assert stacked_convolution._fastest("forward", [GROUPED], x, weight, geometry) == STREAMS, "it is timed once"
    with pytest.raises(RuntimeError, match="no compiler here"):
        stacked_convolution._fastest("forward", [GROUPED], x[:1], weight[:1], geometry)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Choose ways as on a GPU; returns what is timed, and sets whether a graph is being captured."""
    timed, capturing = [], [False]

    def fastest(operation, candidates, x, weight, geometry):
        assert candidates[0] == KERNEL
        assert candidates[-1] == STREAMS
        timed.append((operation, x.shape[2]))
        return STREAMS

    monkeypatch.setattr(stacked_convolution, "_is_timed", lambda x: True)
    monkeypatch.setattr(stacked_convolution, "_fastest", fastest)
    monkeypatch.setattr(triton_launch, "runs_kernels", lambda x: x.ndim == 5 and x.is_floating_point())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setitem(stacked_convolution.WAYS, KERNEL, stacked_convolution.WAYS[GROUPED])
    return timed, capturing


def test_each_operation_is_timed_once_for_each_shape(as_on_a_gpu):
    timed, capturing = as_on_a_gpu
    ensemble, loop = (ds.Ensemble(NETWORKS["plain cnn"], M, seed=1, backend=b).eval() for b in ("stacked", "loop"))
    x, body = image_data(6, torch.float32)[0], ensemble.body
    with torch.no_grad():
        torch.testing.assert_close(ensemble(x), loop(x))
    assert timed == [("forward", 2), ("forward", 3)]
    torch.testing.assert_close(ensemble(x), loop(x))
    assert sorted(timed[2:]) == [(f"{of} gradient", channels) for of in ("input", "weight") for channels in (2, 3)]
    assert len(body.choices.ways) == 6
    assert set(body.choices.ways.values()) == {STREAMS}
    ensemble(x)
    assert len(timed) == 6
    ensemble(x[:4])
    assert len(timed) == 12, "another shape"
    body.choices.ways[next(iter(body.choices.ways))] = "a way of another machine"
    torch.testing.assert_close(ensemble(x), loop(x))
    assert len(timed) == 13
    assert set(body.choices.ways.values()) == {STREAMS}
    capturing[0] = True
    torch.testing.assert_close(ensemble(x[:3]), loop(x[:3]))
    capturing[0], body.by_rule = False, True
    torch.testing.assert_close(ensemble(x[:2]), loop(x[:2]))
    assert len(timed) == 13, "neither in a capture nor where a rule decides"


def test_the_rule_takes_kernels_for_few_channels(as_on_a_gpu):
    ways = Ways()
    ways.by_rule = True
    for channels, way in ((64, KERNEL), (65, STREAMS)):
        x, weight = drawn(M, 1, channels, 1, 1), drawn(M, 2, channels, 1, 1)
        assert stacked_convolution._routes(x, weight, Geometry((1, 1), (0, 0)), ways) == Routes(way, way, way)
        y = drawn(M, channels, 2, 1, 1)
        assert stacked_convolution._routes(x[:, :, :2], y, Geometry((1, 1), (0, 0)), ways).forward == way


def test_ways_are_kept_with_choices(tmp_path):
    file = tmp_path / "choices"
    first = choice.Choices()
    first.keep_in(file, "a network")
    first.ways["forward 3x3"] = KERNEL
    first.add(("stacked", True), choice.Choice("stacked", {}, {}))
    again, other = choice.Choices(), choice.Choices()
    again.keep_in(file, "a network")
    assert (again.ways, again) == ({"forward 3x3": KERNEL}, first)
    other.keep_in(file, "another network")
    assert other.ways == {}


def test_a_checkpoint_keeps_the_ways_of_all_shapes(as_on_a_gpu, tmp_path):
    ensemble = ds.Ensemble(NETWORKS["plain cnn"], M, backend="stacked", seed=1)
    data = image_data(20, torch.float32)  # the last batch of an epoch is smaller
    ds.fit(ensemble, data, cross_entropy, epochs=2, batch_size=8, checkpoint=tmp_path / "c")
    kept = "".join(file.read_text() for file in (tmp_path / "c").rglob("choices*"))
    assert len(ensemble.body.choices.ways) > 6
    assert all(way in kept for way in ensemble.body.choices.ways)


def test_passes_take_ways_from_choices_and_a_rule_where_wanted():
    ensemble = ds.Ensemble(NETWORKS["cnn"], M, backend="stacked")
    x = image_data(dtype=torch.float32)[0]
    ensemble(x)
    assert ensemble.body.skeleton.ways is ensemble.body.choices.ways
    assert not ensemble.body.skeleton.ways.by_rule
    ensemble.body.by_rule = True
    ensemble(x)
    assert ensemble.body.skeleton.ways.by_rule


# Kernels.


def kernels_checked():
    """Run by Triton's interpreter: kernels on small tensors, and passes of whole networks."""
    launched, sentinel = [], 1e30
    module = triton_launch.kernels()

    class Counted:
        def __getattr__(self, name):
            launched.append(name)
            return getattr(module, name)

    triton_launch.kernels = Counted
    triton_launch.runs_kernels = lambda x: x.dtype == torch.float32
    stacked_convolution._routes = lambda *_: Routes(KERNEL, KERNEL, KERNEL)
    guarded, new_empty = [], torch.Tensor.new_empty

    def with_guards(self, *size, dtype=None, **options):
        """Memory between numbers that must stay as they are."""
        size = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        count = size.numel()
        storage = torch.full((count + 512,), sentinel, dtype=dtype or self.dtype)
        storage[256 : 256 + count] = torch.nan
        guarded.append(storage)
        return storage[256 : 256 + count].view(size)

    def assert_inside():
        assert guarded
        for storage in guarded:
            assert (storage[:256] == sentinel).all()
            assert (storage[-256:] == sentinel).all()
        guarded.clear()

    torch.Tensor.new_empty = with_guards
    stacked_norm.PROGRAMS = 8  # sums of small tensors have parts too
    for name, (shared, last) in itertools.product(CONVOLUTIONS, [(False, False), (True, True)]):
        errors = convolution_errors(CONVOLUTIONS[name], dtype=torch.float32, shared=shared, last=last)
        assert max(errors) < 1e-6, (name, shared, last, errors)
        assert_inside()
    for name, case in NORMS.items():
        errors = norm_errors(case, dtype=torch.float32)
        assert max(errors) < 1e-4, (name, errors)
        assert_inside()
    assert outlier_error() < 1e-4
    torch.Tensor.new_empty = new_empty
    expected = {"convolve", "weigh", "add_parts", "norm_sums", "norm_statistics", "norm_rows", "norm_gradient"}
    assert set(launched) == expected, set(launched)
    x = image_data(2, torch.float32)[0].requires_grad_()
    for build in (NETWORKS["dropout"], NETWORKS["plain cnn"]):
        results = []
        for backend in ("loop", "stacked"):
            body = ds.Ensemble(build, 2, seed=1, backend=backend).body
            body.channels_last = True
            flat = body.packed().requires_grad_()
            outputs = body.run(flat, x)
            assert body.ran == backend, body.choices
            (gradient,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
            second = torch.autograd.grad(outputs.square().sum() + gradient.square().sum(), flat)
            results.append((outputs, gradient, *second, *body.state().values()))
        for mine, theirs in zip(*results, strict=True):
            assert relative_error(mine, theirs) < 1e-4 if mine.is_floating_point() else torch.equal(mine, theirs)
    assert_nan_is_not_hidden("cpu")


def assert_nan_is_not_hidden(device):
    x = torch.tensor([torch.nan, -1.0, 2.0], device=device).view(1, 3, 1).requires_grad_()
    zeros, ones = torch.zeros(1, 1, device=device), torch.ones(1, 1, device=device)
    how = {"training": False, "momentum": 0.1, "eps": 0.0, "relu": True}
    y = stacked_norm.batch_norm(x, (zeros, ones), (ones, zeros), **how)
    assert y.isnan().flatten().tolist() == [True, False, False], "NaN is not hidden by ReLU"
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert gradient.flatten().tolist() == [1, 0, 1], "as torch's ReLU has it"


def run_alone(call, **environment):
    folder = os.path.dirname(__file__)
    code = f"import sys; sys.path.insert(0, {folder!r}); import test_stacked_backend as tests; tests.{call}"
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@TRITON
@pytest.mark.slow
def test_kernels_compute_what_they_replace():
    run_alone("kernels_checked()", TRITON_INTERPRET="1")


def kernels_compiled():
    """Compile every kernel that a pass launches for GPUs, which needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, launches = triton_launch.kernels(), {}

    class Recorded:
        def __getattr__(self, name):
            return Launched(name)

    class Launched:
        def __init__(self, name):
            self.function = getattr(module, name)

        def __getitem__(self, grid):
            assert all(0 < size <= 65535 for size in grid[1:])
            return self.launch

        def launch(self, *arguments, num_warps=4, num_stages=3, **constants):
            names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}
            pairs = list(zip(self.function.arg_names, arguments, strict=False))
            assert len(pairs) + len(constants) == len(self.function.arg_names)
            signature = {
                name: names[value.dtype]
                if isinstance(value, torch.Tensor)
                else {int: "i32", float: "fp32"}[type(value)]
                for name, value in pairs
            }
            signature |= dict.fromkeys(constants, "constexpr")
            key = (self.function.fn.__name__, *signature.items(), *constants.items(), num_warps, num_stages)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            launches[key] = (ASTSource(self.function, signature, constants), options)

    triton_launch.kernels = Recorded
    triton_launch.runs_kernels = lambda x: x.dtype in triton_launch.DTYPES
    stacked_convolution._routes = lambda *_: Routes(KERNEL, KERNEL, KERNEL)
    for dtype in (torch.bfloat16, torch.float32):
        convolution_errors(CONVOLUTIONS["stride 2, odd"], dtype=dtype)
        convolution_errors(CONVOLUTIONS["parts"], dtype=dtype)
        norm_errors(NORMS["training"], dtype=dtype)
        norm_errors(NORMS["evaluation"], dtype=dtype)
    assert len(launches) > 12
    for source, options in launches.values():
        for capability in (80, 90):
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert made.asm["cubin"]


def sums_of_one_number_compile():
    """Triton makes a constant of a size of 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"size": 1, "SPLITS": 4, "SIZE": 256}
    signature = {"parts": "*fp32", "total": "*fp32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(triton_launch.kernels().add_parts, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def loads_are_wide():
    """Images are read 16 bytes at a time, ahead of the products: without that, kernels take three times as long."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    whole = {"rows": 4096, "height": 32, "width": 32, "to_height": 32, "to_width": 32, "x_member": 65536}
    whole |= {"w_member": 2304, "w_out": 144, "w_tap": 16, "bias_member": 16, "members": 16, "part_tap": 16}
    constants = {"w_in": 1, "part_in": 1, "INPUTS": 16, "OUTPUTS": 16, "LINES": 3, "COLUMNS": 3, "LINE_STRIDE": 1}
    constants |= {"COLUMN_STRIDE": 1, "LINE_PADDING": 1, "COLUMN_PADDING": 1, "TRANSPOSED": False, "HAS_BIAS": False}
    constants |= {"PRECISION": "tf32", "OUTS": 16, "EACH": 1024, "HEIGHT": 32, "WIDTH": 32}
    constants |= {"FROM_HEIGHT": 32, "FROM_WIDTH": 32}
    tile = stacked_convolution.SUM_TILES[KERNEL]
    sizes = {"convolve": {"ROWS": 128, "STEP": 16}, "weigh": {"ROWS": tile.rows, "STEP": tile.columns}}
    for name, size in sizes.items():
        function = getattr(triton_launch.kernels(), name)
        fixed = {key: value for key, value in (constants | size).items() if key in function.arg_names}
        signature = {
            key: "i32" if key in whole else "*fp32" if key == "parts" else "*bf16" for key in function.arg_names
        }
        signature |= dict.fromkeys(fixed, "constexpr")
        aligned = {(at,): [["tt.divisibility", 16]] for at, key in enumerate(function.arg_names) if key not in fixed}
        source = ASTSource(function, signature, fixed, aligned)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert "cp.async.cg.shared.global" in code, name
        assert "ld.global.b16" not in code, name


@TRITON
@pytest.mark.slow
def test_kernels_compile_for_gpus(tmp_path):
    run_alone("kernels_compiled()", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")


@TRITON
@pytest.mark.slow
def test_kernels_read_many_numbers_at_a_time(tmp_path):
    run_alone("loads_are_wide()", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    run_alone("sums_of_one_number_compile()", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")


# On a GPU.


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", [KERNEL, STREAMS, GROUPED])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_are_those_of_each_member_on_a_gpu(case, way, dtype, routed):
    routed(way)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    with tf32(on=False):
        for shared in (False, True):
            errors = convolution_errors(CONVOLUTIONS[case], dtype=dtype, shared=shared, last=shared, device="cuda")
            assert max(errors) < limit, errors


@GPU
@pytest.mark.parametrize("case", NORMS)
def test_batch_norm_is_that_of_each_member_on_a_gpu(case):
    assert max(norm_errors(NORMS[case], dtype=torch.float32, device="cuda")) < 1e-4


@GPU
def test_outliers_cost_batch_norm_no_digits_on_a_gpu():
    assert outlier_error(device="cuda") < 1e-4


@GPU
def test_nan_is_not_hidden_by_relu_on_a_gpu():
    assert_nan_is_not_hidden("cuda")


@GPU
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_training_equals_the_loop_on_a_gpu(network, settings):
    data = image_data(64, torch.float32, "cuda")
    settings = {"precision": "float32", "optimizer": "sgd", "lr": 0.01, "epochs": 4, **settings}
    (loop, _), (stacked, history) = (
        trained(NETWORKS[network], backend, data, torch.float32, **settings) for backend in ("loop", "stacked")
    )
    assert history.backend == "stacked"
    assert stacked.body.choices.ways or settings.get("deterministic")
    tolerance = 0.05 if settings["precision"] == "bf16" else 1e-3
    assert_trained_alike(loop, stacked, rtol=tolerance, atol=tolerance)


@GPU
def test_deterministic_trainings_are_equal_to_the_bit_on_a_gpu():
    data = image_data(64, torch.float32, "cuda")
    first, second = (trained(Pooled, "stacked", data, torch.float32, deterministic=True)[0] for _ in range(2))
    assert_trained_alike(first, second, rtol=0, atol=0)


def test_the_source_of_kernels_is_no_part_of_the_doctests():
    """Triton may be missing, so that the file cannot be imported."""
    root = Path(__file__).parents[1]
    assert "--ignore=src/dissensus/execution/triton_layers.py" in (root / "pyproject.toml").read_text()

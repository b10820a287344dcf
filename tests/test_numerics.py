"""Precision, layout of images and determinism: what is decided, what it does, and that it is put back."""

import contextlib
from functools import partial

import pytest
import torch
from networks import NETWORKS
from torch import nn

import dissensus as ds
from dissensus import execution
from dissensus.execution.batched import run_batched
from dissensus.execution.tf32 import tf32
from dissensus.execution.weights import Hanging, Layout, Packed
from dissensus.train.numerics import Numerics, PrecisionSettings, numerics

mse = partial(ds.objectives.independent, loss="mse")
CPU = torch.device("cpu")


def data(shape=(2, 8, 8), n=20, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator, dtype=dtype)
    return x, torch.randn(n, 3, generator=generator, dtype=dtype)


class Card:
    """Stands for a GPU."""

    type = "cuda"


@pytest.mark.parametrize(
    ("network", "capability", "dtype", "expected"),
    [
        (nn.Conv2d(3, 4, 3), (9, 0), torch.float32, "bf16, channels last"),
        (nn.Conv1d(3, 4, 3), (8, 0), torch.float32, "bf16"),
        (nn.Linear(256, 300), (8, 6), torch.float32, "bf16"),
        (nn.Linear(255, 1000), (9, 0), torch.float32, "float32"),
        (nn.Conv2d(3, 4, 3), (7, 5), torch.float32, "float32"),
        (nn.Conv2d(3, 4, 3), (9, 0), torch.float64, "float64"),
    ],
)
def test_auto_takes_bf16_where_card_and_network_gain(network, capability, dtype, expected, monkeypatch, unchecked):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert str(numerics(PrecisionSettings("auto", None, False), network, dtype, Card())) == expected


def test_explicit_settings_are_used(monkeypatch, unchecked):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    conv = nn.Conv2d(3, 4, 3)
    assert str(numerics(PrecisionSettings("tf32", False, True), conv, torch.float32, Card())) == "tf32, deterministic"
    assert (
        str(numerics(PrecisionSettings("float32", True, False), conv, torch.float32, Card()))
        == "float32, channels last"
    )
    assert str(numerics(PrecisionSettings("auto", None, False), conv, torch.float32, CPU)) == "float32"
    with pytest.raises(ValueError, match="no bf16"):
        numerics(PrecisionSettings("bf16", None, False), conv, torch.float32, Card())
    with pytest.raises(ValueError, match=r"'auto' for networks in float64; got 'bf16'. Use ensemble.float\(\)"):
        numerics(PrecisionSettings("bf16", None, False), conv, torch.float64, CPU)
    with pytest.raises(ValueError, match="without a GPU"):
        numerics(PrecisionSettings("tf32", None, False), conv, torch.float32, CPU)
    with pytest.raises(ValueError, match="Did you mean 'bf16'"):
        numerics(PrecisionSettings("bf61", None, False), conv, torch.float32, CPU)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_switches_are_set_and_put_back(precision, deterministic, monkeypatch, unchecked):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    switches = lambda: (  # noqa: E731
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )
    before = switches()
    expected = "tf32" if precision == "tf32" else "ieee"
    with contextlib.suppress(KeyboardInterrupt), Numerics(precision, False, deterministic, Card()).training():
        during = switches()
        raise KeyboardInterrupt
    assert during == (expected, expected, not deterministic, deterministic)
    assert switches() == before


def test_deterministic_works_on_the_cpu_and_changes_nothing_there():
    predictions = []
    for deterministic in (False, True):
        ensemble = ds.Ensemble(NETWORKS["cnn_batch_norm"][0], 2, backend="loop").double()
        ds.fit(ensemble, data(), mse, epochs=2, batch_size=8, deterministic=deterministic)
        predictions.append(ensemble.predict(data()[0]))
    assert not torch.are_deterministic_algorithms_enabled()
    torch.testing.assert_close(predictions[0], predictions[1], rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["loop", "streams", "vmap"])
def test_channels_last_changes_the_memory_layout_only(backend):
    build, shape = NETWORKS["cnn_batch_norm"]
    trained = []
    for channels_last in (False, True):
        ensemble = ds.Ensemble(build, 3, backend=backend).double()
        history = ds.fit(ensemble, data(shape), mse, epochs=3, batch_size=8, lr=0.01, channels_last=channels_last)
        trained.append({name: t.detach() for name, t in ensemble.body.tensors().items()})
        assert ("channels last" in history.precision) == channels_last
    conv = next(name for name, t in trained[1].items() if t.ndim == 5)
    assert trained[1][conv][0].is_contiguous(memory_format=torch.channels_last)
    assert trained[0][conv][0].is_contiguous()
    for name in trained[0]:
        torch.testing.assert_close(trained[1][name], trained[0][name], rtol=1e-9, atol=1e-11)


def test_channels_last_members_are_saved_and_loaded(tmp_path):
    build, shape = NETWORKS["cnn_batch_norm"]
    ensemble = ds.Ensemble(build, 3).double()
    ds.fit(ensemble, data(shape), mse, epochs=1, batch_size=8, channels_last=True)
    ensemble.save(tmp_path / "ens")
    loaded = ds.Ensemble.load(tmp_path / "ens", lambda: build().double())
    torch.testing.assert_close(loaded.predict(data(shape)[0]), ensemble.predict(data(shape)[0]))


def test_a_checkpoint_of_another_memory_layout_is_refused(tmp_path):
    build, shape = NETWORKS["cnn_batch_norm"]
    options = {"epochs": 2, "batch_size": 8, "checkpoint": tmp_path}
    ds.fit(ds.Ensemble(build, 2).double(), data(shape), mse, channels_last=True, **options)
    with pytest.raises(ds.StorageError, match="'network'"):
        ds.fit(ds.Ensemble(build, 2).double(), data(shape), mse, channels_last=False, resume=True, **options)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_packed_weights_equal_hanging_weights(name, channels_last):
    body = ds.Ensemble(NETWORKS[name][0], 3).double().body
    body.channels_last = channels_last
    before = {n: p.detach().clone() for n, p in body.trainable().items()}
    hanging = Hanging(before, 3)
    packed = Packed(body.layout(), body.packed(), None)
    assert len(hanging) == len(packed) == 3
    assert packed.stacked().keys() == before.keys()
    for n, tensor in before.items():
        assert torch.equal(packed.stacked()[n], tensor)
        assert torch.equal(body.trainable()[n], tensor), "the parameters are views of the matrix now"
        for i in range(3):
            assert torch.equal(packed.members()(i)[n], hanging.members()(i)[n])
            assert packed.members()(i)[n].shape == tensor.shape[1:]
    assert torch.equal(packed.first(2).stacked()[n], before[n][:2])


def test_weights_of_products_come_first_and_are_cast_together():
    build = lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 2))  # noqa: E731
    body = ds.Ensemble(build, 2).body
    layout = body.layout()
    assert list(layout.shapes) == ["0.weight", "3.weight", "0.bias", "1.weight", "1.bias", "3.bias"]
    assert layout.products == 2
    dtypes = {n: t.dtype for n, t in Packed(layout, body.packed(), torch.bfloat16).members()(1).items()}
    low, high = torch.bfloat16, torch.float32
    assert list(dtypes.values()) == [low, low, high, high, high, high]
    assert isinstance(layout, Layout)


@pytest.mark.parametrize("backend", ["loop", "streams", "vmap"])
def test_casting_once_gives_what_autocast_gives(backend):
    build, shape = NETWORKS["cnn_batch_norm"]
    ensemble = ds.Ensemble(build, 3, backend=backend)
    x = data(shape, dtype=torch.float32)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.stack([ensemble.member(i)(x) for i in range(3)])
        (gradient,) = torch.autograd.grad(expected.float().square().sum(), [expected], retain_graph=True)
        outputs = ensemble.body.run(ensemble.body.packed().requires_grad_(), x)
    assert outputs.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)
    assert gradient.shape == outputs.shape


class Scaled(nn.Module):
    """A parameter without axes, and a convolution that looks at its own weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = StandardisedConv(2, 3, 3)

    def forward(self, x):
        return self.scale * self.conv(x).mean((2, 3))


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.view(len(self.weight), -1).mean(1).view(-1, 1, 1, 1)
        return nn.functional.conv2d(x, weight, self.bias)


@pytest.mark.parametrize("channels_last", [False, True])
def test_scalars_and_convolutions_that_view_their_weights_train(channels_last):
    ensemble = ds.Ensemble(Scaled, 3, backend="loop").double()
    before = ensemble.body.trainable()["scale"].detach().clone()
    history = ds.fit(ensemble, data(), mse, epochs=3, batch_size=8, lr=0.01, channels_last=channels_last)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    assert (ensemble.body.trainable()["scale"] != before).all()


def test_precision_may_have_been_set_by_torchs_newer_switches(unchecked):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with Numerics("float32", False, False, Card()).training():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_backends_are_compared_without_the_roundings_of_tf32(monkeypatch):
    precisions = []

    def rounded(*arguments):
        precisions.append(torch.backends.cudnn.conv.fp32_precision)
        return run_batched(*arguments) * (1 + 0.01 * (precisions[-1] == "tf32"))

    monkeypatch.setitem(execution.BACKENDS, "batched", execution.Backend("batched", rounded))
    ensemble = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (8,)), 3)
    with tf32(on=True), torch.no_grad():
        ensemble(torch.randn(5, 6))
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert "batched" in ensemble.choices[0].milliseconds
    assert set(precisions) == {"ieee", "tf32"}, "compared in full, measured as it will be used"


@pytest.mark.parametrize("backend", ["vmap", "auto"])
def test_a_backend_that_runs_in_float32_is_tried_again_under_autocast(backend):
    build = partial(ds.nets.cnn, 1, 3, 8, batch_norm=True)
    x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    fresh, used = ds.Ensemble(build, 2, backend=backend), ds.Ensemble(build, 2, backend=backend)
    used(x)
    with torch.autocast("cpu", torch.bfloat16):
        used(x)  # of weights that are not packed
    for ensemble in (fresh, used):
        history = ds.fit(ensemble, (x, y), objective, epochs=1, batch_size=3, precision="bf16")
        assert history.backend == "loop", "PyTorch on a CPU has no vmap of mixed convolutions"
    for name, tensor in fresh.state_dict().items():
        assert torch.isfinite(tensor.float()).all(), name

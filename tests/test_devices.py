"""Devices other than CPUs and CUDA GPUs: outputs through the loop, everything else refused in one sentence.

Neither MPS nor XPU is at hand. ``meta`` stands in for them: a device that torch has everywhere, whose type is neither
``cpu`` nor ``cuda``. It has shapes but no numbers, so these tests show what is refused and which backend runs, and not
that numbers are right on MPS.
"""

from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.data.features import cached_features

OTHER = "meta"
X, Y = torch.rand(12, 3), torch.arange(12) % 2
LOSS = partial(ds.objectives.independent, loss="cross_entropy")


def build():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def ensemble(backend="auto"):
    return ds.Ensemble(build, 3, backend=backend).to(OTHER)


def refused(name, device=OTHER):
    words = rf"`{name}` must be on a CPU or a CUDA GPU; got the device {device}\. Use \.to\('cpu'\)\."
    return pytest.raises(ValueError, match=f"^{words}$")


def test_training_is_refused_in_one_sentence():
    with refused("ensemble"):
        ds.fit(ensemble(), (X, Y), LOSS, epochs=1)
    with refused("ensemble"):
        ds.fit(build().to(OTHER), (X, Y), LOSS, epochs=1)
    with refused("device"):
        ds.sweep(build, (X, Y), LOSS, grid={"seed": [0, 1]}, epochs=1, device=OTHER)
    with refused("device"):
        ds.sweep(build, (X.to(OTHER), Y), LOSS, grid={"seed": [0, 1]}, epochs=1)


def test_prediction_is_refused_in_one_sentence():
    with refused("ensemble"):
        ensemble().predict(X)
    sweep = ds.sweep(build, (X, Y), LOSS, grid={"seed": [0]}, epochs=1, members=2)
    for group in sweep.groups:
        group.body.to(torch.device(OTHER))
    with refused("sweep"):
        sweep.outputs(X)


@pytest.mark.parametrize("name", sorted(ds.attacks.ATTACKS))
def test_attacks_are_refused_in_one_sentence(name):
    entry = ds.attacks.ATTACKS[name]
    keywords = {"epsilon": 0.1} if entry.bounded else {}
    with refused("model"):
        entry.function(ensemble(), X, Y, **keywords)


def test_features_are_refused_in_one_sentence(tmp_path):
    with refused("network"):
        cached_features(build().to(OTHER), (X, Y), tmp_path / "features")
    with refused("device"):
        cached_features(lambda x: x, (X, Y), tmp_path / "features", device=OTHER)


def test_outputs_come_from_the_loop_and_nothing_is_measured():
    networks = ensemble()
    outputs = networks(torch.zeros(5, 3, device=OTHER))
    assert (outputs.shape, outputs.device.type) == ((3, 5, 2), OTHER)
    assert [(choice.backend, choice.milliseconds) for choice in networks.choices] == [("loop", {})]


def test_cpus_and_gpus_are_devices_to_compute_on():
    for device in ("cpu", "cuda", "cuda:1"):
        assert ds.checks.computes("ensemble", torch.device(device)) == torch.device(device)
    for device in ("mps", "xpu"):
        with refused("ensemble", device):
            ds.checks.computes("ensemble", torch.device(device))


# Half precision

SENTENCE = "fp16 needs loss scaling; bf16 does not"


@pytest.mark.parametrize("precision", ["fp16", "float16", "half"])
def test_training_in_fp16_is_refused_in_favour_of_bf16(precision):
    with pytest.raises(ValueError, match=f"`precision` must be 'bf16' or 'float32'; got '{precision}'. {SENTENCE}"):
        ds.fit(ds.Ensemble(build, 2), (X, Y), LOSS, epochs=1, precision=precision)
    with pytest.raises(ValueError, match=f"`precision` must be 'bf16' or 'float32'; got '{precision}'. {SENTENCE}"):
        ds.sweep(build, (X, Y), LOSS, grid={"seed": [0]}, epochs=1, precision=precision)


def test_networks_in_float16_are_not_trained():
    words = rf"`ensemble` must have weights in float32, float64 or bfloat16 to be trained; got float16\. {SENTENCE}"
    half = ds.Ensemble(build, 2).half()
    before = [parameter.clone() for parameter in half.parameters()]
    with pytest.raises(ValueError, match=words):
        ds.fit(half, (X.half(), Y), LOSS, epochs=1)
    with pytest.raises(ValueError, match=words):
        ds.sweep(build, (X.half(), Y), LOSS, grid={"seed": [0]}, epochs=1)
    assert all(torch.equal(old, new) for old, new in zip(before, half.parameters(), strict=True))
    assert half.predict(X.half()).dtype == torch.float16, "prediction in float16 is allowed"
    ds.fit(ds.Ensemble(build, 2).bfloat16(), (X.bfloat16(), Y), LOSS, epochs=1)

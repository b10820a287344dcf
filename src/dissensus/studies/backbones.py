"""Inputs of members: standardised images, or the features of a frozen network."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dissensus import nets
from dissensus.data import sources
from dissensus.data.features import cached_features
from dissensus.data.recognition import digest
from dissensus.ensemble import Ensemble
from dissensus.objectives import independent
from dissensus.studies.registry import HEADS, maker, timm_features
from dissensus.studies.shifted_datasets import Inputs, ScaledImageFiles, ShiftedData
from dissensus.studies.spec import Optimisation, Spec
from dissensus.studies.standardisation import IMAGENET_MEAN, IMAGENET_STD
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import fit

PRETRAINED = "mobilenet-v2:imagenet"
BACKBONE = Optimisation(epochs=5)
"""How a backbone is trained, with the study's batch size; the study's optimisation is for the heads."""
SIDE = 224
"""Height and width of images for pretrained networks."""


class ImageScaling(nn.Module):
    """Standardises images in [0, 1]; resizes them where ``side`` is set, and repeats a single channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, side: int | None = None) -> None:
        super().__init__()
        self.side = side
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Standardised images."""
        if self.side is not None and x.shape[-1] != self.side:
            x = F.interpolate(x, (self.side, self.side), mode="bilinear")
        return (x.expand(-1, len(self.mean), -1, -1) - self.mean) / self.std


def prepared(data: ShiftedData, spec: Spec, backbone: str, device: torch.device, cache: Path) -> ShiftedData:
    """All inputs of a study as its members take them; features are kept in the folder ``cache``."""
    assert spec.members is not None
    if spec.members.network != HEADS:
        return data.transformed(partial(_standardised, _scaling_of(data)))
    trunk = LowPrecision(_trunk(data, spec, backbone, device)).to(device).eval()
    return data.transformed(partial(_features, trunk, cache / re.sub(r"[^\w.-]+", "-", backbone)))


def _scaling_of(data: ShiftedData) -> ImageScaling:
    x = data.train[0]
    if not isinstance(x, Tensor):
        return ImageScaling(torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD))
    return ImageScaling(x.mean((0, 2, 3)), x.std((0, 2, 3)))


def _standardised(scaling: nn.Module, x: Inputs) -> Tensor:
    """Standardised images in memory."""
    return scaling(x) if isinstance(x, Tensor) else torch.cat([scaling(part) for part, _ in DataLoader(x, 256)])


class LowPrecision(nn.Module):
    """A frozen network, in bfloat16 on a GPU."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs in float32."""
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            return self.network(x).float()


def _features(trunk: nn.Module, cache: Path, x: Inputs) -> Tensor:
    """Features of inputs; the same inputs go through the network once."""
    weights = list(trunk.state_dict().values())
    if isinstance(x, Tensor):
        key, pairs = digest(*weights, x), (x, torch.zeros(len(x)))
    else:
        assert isinstance(x, ScaledImageFiles)
        words = repr(([str(file) for file in x.pictures.files], x.pictures.size, x.severity))
        key = digest(*weights, torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8))
        pairs: Any = DataLoader(x, 256)
    return cached_features(trunk, pairs, cache / key[:16], dtype=torch.float32).tensors()[0]


def _trunk(data: ShiftedData, spec: Spec, name: str, device: torch.device) -> nn.Module:
    """The network that heads stand on; it takes images in [0, 1]."""
    scaling = ImageScaling(torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD), SIDE)
    if name == PRETRAINED:
        network = nets.mobilenet_v2()
        network.load_state_dict(sources.weights("mobilenet-v2"))
        assert isinstance(network, nn.Sequential)
        return nn.Sequential(scaling, *list(network)[:-1])
    if name.startswith("timm:"):
        return nn.Sequential(scaling, timm_features(name.removeprefix("timm:")))
    return _trained_here(data, spec, name, device)


def _trained_here(data: ShiftedData, spec: Spec, name: str, device: torch.device) -> nn.Module:
    """A small network trained on the same data, without its last layer."""
    scaling = _scaling_of(data)
    standardised = data.transformed(partial(_standardised, scaling)).study_data()
    ensemble = Ensemble(maker(name, standardised, {}), members=1, seed=0).to(device)
    arguments = training_arguments(replace(BACKBONE, batch_size=spec.optimisation.batch_size))
    fit(ensemble, standardised.train, partial(independent, loss="cross_entropy"), **arguments)
    network = ensemble.member(0)
    assert isinstance(network, nn.Sequential)
    return nn.Sequential(scaling, *list(network)[:-1])


def head(inputs: int, outputs: int, layers: int) -> nn.Module:
    """A multilayer perceptron whose hidden layers are as wide as its inputs."""
    return nets.mlp(inputs, outputs, (inputs,) * (layers - 1))

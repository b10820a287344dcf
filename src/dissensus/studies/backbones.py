"""Inputs as members take them: standardised images, or the features of a network that stands still."""

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
from dissensus.studies.optimising import training_arguments
from dissensus.studies.registry import HEADS, maker, timm_features
from dissensus.studies.shifts import Inputs, Shifted, Unlabelled
from dissensus.studies.spec import Optimisation, Spec
from dissensus.studies.streaming import DEVIATION, MEAN
from dissensus.train import fit

PRETRAINED = "mobilenet-v2:imagenet"
BACKBONE = Optimisation(epochs=5)
"""How a backbone is trained here, in batches as large as the study's; the study's own optimisation is of its heads."""
SIDE = 224
"""Pixels that pretrained networks want."""


class Scaling(nn.Module):
    """Images in [0, 1], brought to a size and to three channels where those are told, less a mean over a deviation."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, side: int | None = None) -> None:
        super().__init__()
        self.side = side
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("deviation", deviation.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Standardised images."""
        if self.side is not None and x.shape[-1] != self.side:
            x = F.interpolate(x, (self.side, self.side), mode="bilinear")
        return (x.expand(-1, len(self.mean), -1, -1) - self.mean) / self.deviation


def ready(data: Shifted, spec: Spec, options: dict[str, Any], device: torch.device, cache: Path) -> Shifted:
    """All inputs of a study as its members take them; features are kept in the folder ``cache``."""
    assert spec.members is not None
    if spec.members.network != HEADS:
        return data.through(partial(_plain, _standardising(data)))
    name = str(options["backbone"])
    trunk = Lowered(_trunk(data, spec, name, device)).to(device).eval()
    return data.through(partial(_features, trunk, cache / name.replace(":", "-")))


def _standardising(data: Shifted) -> Scaling:
    x = data.train[0]
    if not isinstance(x, Tensor):
        return Scaling(torch.tensor(MEAN), torch.tensor(DEVIATION))
    return Scaling(x.mean((0, 2, 3)), x.std((0, 2, 3)))


def _plain(scaling: nn.Module, x: Inputs) -> Tensor:
    """Images in memory, as networks take them."""
    return scaling(x) if isinstance(x, Tensor) else torch.cat([scaling(part) for part, _ in DataLoader(x, 256)])


class Lowered(nn.Module):
    """A network that stands still, in bf16 where that is fast."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Its outputs."""
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            return self.network(x).float()


def _features(trunk: nn.Module, cache: Path, x: Inputs) -> Tensor:
    """What a network makes of inputs; the same inputs are looked at once."""
    own = list(trunk.state_dict().values())
    if isinstance(x, Tensor):
        known, pairs = digest(*own, x), (x, torch.zeros(len(x)))
    else:
        assert isinstance(x, Unlabelled)
        words = repr(([str(file) for file in x.pictures.files], x.pictures.size, x.severity))
        known = digest(*own, torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8))
        pairs: Any = DataLoader(x, 256)
    return cached_features(trunk, pairs, cache / known[:16], dtype=torch.float32).tensors()[0]


def _trunk(data: Shifted, spec: Spec, name: str, device: torch.device) -> nn.Module:
    """The network whose features heads see, from images in [0, 1]."""
    scaling = Scaling(torch.tensor(MEAN), torch.tensor(DEVIATION), SIDE)
    if name == PRETRAINED:
        network = nets.mobilenet_v2()
        network.load_state_dict(sources.weights("mobilenet-v2"))
        assert isinstance(network, nn.Sequential)
        return nn.Sequential(scaling, *list(network)[:-1])
    if name.startswith("timm:"):
        return nn.Sequential(scaling, timm_features(name.removeprefix("timm:")))
    return _trained_here(data, spec, name, device)


def _trained_here(data: Shifted, spec: Spec, name: str, device: torch.device) -> nn.Module:
    """A small network trained on the same data, without its last layer."""
    scaling = _standardising(data)
    problem = data.through(partial(_plain, scaling)).problem()
    ensemble = Ensemble(maker(name, problem, {}), members=1, seed=0).to(device)
    told = training_arguments(replace(BACKBONE, batch_size=spec.optimisation.batch_size))
    fit(ensemble, problem.train, partial(independent, loss="cross_entropy"), **told)
    network = ensemble.member(0)
    assert isinstance(network, nn.Sequential)
    return nn.Sequential(scaling, *list(network)[:-1])


def head(inputs: int, outputs: int, layers: int) -> nn.Module:
    """A head of so many layers, the hidden ones as wide as its inputs."""
    return nets.mlp(inputs, outputs, (inputs,) * (layers - 1))

"""Inputs of members: standardised images, or the features of a frozen network, whose last layers members start from."""

import copy
import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dissensus import nets
from dissensus.data import sources
from dissensus.data.features import cached_features
from dissensus.data.recognition import digest
from dissensus.data.splits import Split
from dissensus.data.splits import held_out_rows as split_rows
from dissensus.ensemble import Ensemble
from dissensus.objectives import independent
from dissensus.studies.registry import FRESH, HEADS, maker, timm_network
from dissensus.studies.shifted_datasets import Inputs, ScaledImageFiles, ShiftedData
from dissensus.studies.spec import Optimisation, Spec, SpecError
from dissensus.studies.standardisation import IMAGENET_MEAN, IMAGENET_STD
from dissensus.studies.training_arguments import training_arguments, validation_of
from dissensus.train import fit
from dissensus.trunk import last_layers

PRETRAINED = "mobilenet-v2:imagenet"
BACKBONE = Optimisation(epochs=20)
"""How a backbone, or a new classifier for one, is trained; the study's optimisation is for the heads."""
SIDE = 224
"""Height and width of images for pretrained networks."""
HELD_OUT_SEED = 0
"""Seed of the split into training rows and held-out rows, which is the same for backbones, methods and seeds."""


WEIGHT_LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""Layers that count when a network is split before its last layers. Norms do not."""


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


class PretrainedNetwork(NamedTuple):
    """A network from images in [0, 1] to logits of a data set's classes, after its scaling."""

    scaling: ImageScaling
    network: nn.Module


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PreparedData:
    """Inputs as members take them, and the pretrained layers that members start from."""

    data: ShiftedData
    held_out: float | Split | None = None
    """The share of rows that is held out, or how it is."""
    head: nn.Module | None = None
    """The last layers of the pretrained network, in evaluation mode; None where members start afresh."""

    @cached_property
    def split(self) -> tuple[Pair, Pair | None]:
        """The rows to train on, and those that are held out, which are the same for all methods and seeds."""
        x, y = self.data.study_data().train
        if not self.held_out:
            return (x, y), None
        rows, held_out = held_out_rows(y, self.held_out)
        return (x[rows], y[rows]), (x[held_out], y[held_out])


@dataclass
class Preparation:
    """Prepares a study's data for its members: once per network, number of layers and kind of start."""

    raw: ShiftedData
    spec: Spec
    device: torch.device
    cache: Path
    """Folder of features."""

    def __post_init__(self) -> None:
        self._networks: dict[str, PretrainedNetwork] = {}
        self._prepared: dict[tuple[str, int, bool], PreparedData] = {}

    def of(self, backbone: str, layers: int, initial: str) -> PreparedData:
        """The data for heads of some layers on a backbone; backbone and layers do not matter to whole networks."""
        assert self.spec.members is not None
        if self.spec.members.network != HEADS:
            backbone, layers, initial = "", 0, FRESH
        fresh = initial == FRESH
        key = backbone, 1 if fresh else layers, fresh  # fresh heads stand on the inputs of the last layer
        if key not in self._prepared:
            self._prepared[key] = self._prepare(*key)
        return self._prepared[key]

    def _prepare(self, backbone: str, layers: int, fresh: bool) -> PreparedData:
        held_out = validation_of(self.spec.optimisation)
        if not backbone:
            return PreparedData(self.raw.transformed(partial(_standardised, _scaling_of(self.raw))), held_out)
        if backbone not in self._networks:
            self._networks[backbone] = self._pretrained(backbone)
        pretrained = self._networks[backbone]
        trunk, head = split_network(pretrained.network, layers)
        data = self.raw.transformed(self._features_by(pretrained.scaling, trunk, backbone))
        return PreparedData(data, held_out, None if fresh else head)

    def _features_by(self, scaling: ImageScaling, trunk: nn.Module, backbone: str) -> partial[Tensor]:
        module = LowPrecision(nn.Sequential(scaling, trunk)).to(self.device).eval()
        return partial(_features, module, self.cache / re.sub(r"[^\w.-]+", "-", backbone))

    def _pretrained(self, name: str) -> PretrainedNetwork:
        """A pretrained network whose classes are those of the data."""
        scaling = ImageScaling(torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD), SIDE)
        if name == PRETRAINED:
            network = nets.mobilenet_v2()
            network.load_state_dict(sources.weights("mobilenet-v2"))
        elif name.startswith("timm:"):
            network = timm_network(name.removeprefix("timm:"))
        else:
            return self._trained_here(name)
        if _last_linear(network)[1].out_features != self.raw.classes:
            self._fit_classifier(scaling, network, name)
        return PretrainedNetwork(scaling, network)

    def _trained_here(self, name: str) -> PretrainedNetwork:
        """A small network trained on the training rows of the same data."""
        scaling = _scaling_of(self.raw)
        standardised = self.raw.transformed(partial(_standardised, scaling)).study_data()
        ensemble = Ensemble(maker(name, standardised, {}), members=1, seed=0).to(self.device)
        self._fit_once(ensemble, standardised.train)
        return PretrainedNetwork(scaling, ensemble.member(0).cpu())

    def _fit_classifier(self, scaling: ImageScaling, network: nn.Module, name: str) -> None:
        """Replace a classifier of other classes by one that is trained on its inputs; all other layers stay."""
        where, old = _last_linear(network)
        train, y = self.raw.train
        assert y is not None
        x = self._features_by(scaling, split_network(network, 1).trunk, name)(train)
        build = partial(nn.Linear, old.in_features, self.raw.classes)
        ensemble = Ensemble(build, members=1, seed=0).to(self.device)
        self._fit_once(ensemble, (x, y))
        network.set_submodule(where, ensemble.member(0).cpu())

    def _fit_once(self, ensemble: Ensemble, train: Pair) -> None:
        """Train one network, independently of the seeds of the study and without its held-out rows."""
        rows, _ = held_out_rows(train[1], validation_of(self.spec.optimisation))
        arguments = training_arguments(replace(BACKBONE, batch_size=self.spec.optimisation.batch_size))
        fit(ensemble, (train[0][rows], train[1][rows]), partial(independent, loss="cross_entropy"), **arguments)


def held_out_rows(targets: Tensor, held_out: float | Split | None) -> tuple[Tensor, Tensor]:
    """Numbers of the rows to train on, and of those that are held out, in order.

    >>> held_out_rows(torch.zeros(4), None)
    (tensor([0, 1, 2, 3]), tensor([], dtype=torch.int64))
    >>> train, held_out = held_out_rows(torch.zeros(10), 0.3)
    >>> len(train), len(held_out)
    (7, 3)
    """
    if not held_out:
        return torch.arange(len(targets)), torch.arange(0)
    train, rest = split_rows(held_out, targets, HELD_OUT_SEED)
    return train.sort().values, rest.sort().values


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


class SplitNetwork(NamedTuple):
    """A network in two parts: ``head(trunk(x))`` is its output."""

    trunk: nn.Module
    head: nn.Module


def split_network(network: nn.Module, layers: int) -> SplitNetwork:
    """Split a network before its last ``layers`` linear or convolutional layers; norms after them are in the head.

    In a vision transformer of timm, the perceptron of the last block counts as one layer.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> trunk, head = split_network(nn.Sequential(nn.Linear(3, 3), *network), 2)
    >>> [type(layer).__name__ for layer in head.modules() if not list(layer.children())]
    ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    """
    network = copy.deepcopy(network).eval()
    if hasattr(network, "blocks"):
        return _split_transformer(network, layers)
    possible: list[int] = []
    reason = "it has one layer"
    for count in range(1, sum(1 for layer in network.modules() if list(layer.parameters(recurse=False)))):
        try:
            split = last_layers(network, count, members=1)
        except ValueError as refusal:  # a residual connection, or a network that cannot be traced
            reason = str(refusal)
            continue
        head = split.heads.member(0).eval()
        possible.append(sum(isinstance(layer, WEIGHT_LAYERS) for layer in head.modules()))
        if possible[-1] == layers:
            return SplitNetwork(split.backbone.eval(), head)
        if possible[-1] > layers:
            break
    counts = " or ".join(str(count) for count in sorted(set(possible)) if count)
    reason = f"it can be split before its last {counts}" if counts else reason
    raise SpecError(f"a backbone cannot be split before its last {layers} layers: {reason}.")


def _last_linear(network: nn.Module) -> tuple[str, nn.Linear]:
    """The classifier, and its name."""
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise SpecError(f"a backbone needs a linear classifier; {type(network).__name__} has none.")
    return layers[-1]


def _split_transformer(network: nn.Module, layers: int) -> SplitNetwork:
    """Split a vision transformer of timm: before its classifier, or before the perceptron of its last block.

    Only the class token of the last block's attention goes on to the classifier, so the features are that token.
    """
    if layers > 2 or getattr(network, "global_pool", "token") != "token":
        raise SpecError("a vision transformer is split before its last 1 or 2 layers, and must read its class token.")
    if layers == 1:
        where, classifier = _last_linear(network)
        return SplitNetwork(InputOf(network, where).eval(), copy.deepcopy(classifier))
    last = f"blocks.{len(network.get_submodule('blocks')) - 1}"  # pyright: ignore[reportArgumentType]
    trunk = nn.Sequential(InputOf(network, f"{last}.norm2"), ClassToken())
    return SplitNetwork(trunk.eval(), TransformerHead(copy.deepcopy(network), last).eval())


class InputOf(nn.Module):
    """The input of a layer within a network."""

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        self.network, self.layer = network, layer

    def forward(self, x: Tensor) -> Tensor:
        """What the layer receives when the network receives x."""
        received: list[Tensor] = []
        layer = self.network.get_submodule(self.layer)
        hook = layer.register_forward_pre_hook(lambda _layer, inputs: received.append(inputs[0]))
        try:
            self.network(x)
        finally:
            hook.remove()
        return received[-1]


class ClassToken(nn.Module):
    """The first token of each example."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, F] -> [B, F]``."""
        return x[:, 0]


class TransformerHead(nn.Module):
    """The perceptron of a vision transformer's last block, the last norm and the classifier, on class tokens."""

    def __init__(self, network: nn.Module, block: str) -> None:
        super().__init__()
        inner = [f"{block}.{name}" for name in ("norm2", "mlp", "ls2", "drop_path2")]
        self.norm2, self.mlp, self.ls2, self.drop_path2 = (_layer_or_identity(network, name) for name in inner)
        outer = ("norm", "fc_norm", "head_drop", "head")
        self.norm, self.fc_norm, self.head_drop, self.head = (_layer_or_identity(network, name) for name in outer)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of class tokens."""
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return self.head(self.head_drop(self.fc_norm(self.norm(x))))


def _layer_or_identity(network: nn.Module, name: str) -> nn.Module:
    """A layer by its name; versions of timm without it do nothing in its place."""
    try:
        return network.get_submodule(name)
    except AttributeError:
        return nn.Identity()


def fresh_head(inputs: int, outputs: int, layers: int) -> nn.Module:
    """A multilayer perceptron whose hidden layers are as wide as its inputs."""
    return nets.mlp(inputs, outputs, (inputs,) * (layers - 1))


def pretrained_head(head: nn.Module, noise: float = 0.0) -> nn.Module:
    """A copy of pretrained layers, with noise on each weight in proportion to the size of its tensor's weights.

    The noise is drawn from torch's global generator, which an `Ensemble` seeds for each member. Buffers have none.

    >>> layer = nn.Linear(3, 2)
    >>> torch.equal(pretrained_head(layer).weight, layer.weight)
    True
    >>> far = pretrained_head(layer, noise=0.01).weight - layer.weight
    >>> bool(far.square().mean() < 0.02**2 * layer.weight.square().mean()), bool(far.any())
    (True, True)
    """
    member = copy.deepcopy(head)
    with torch.no_grad():
        for parameter in member.parameters() if noise else ():
            scale = parameter.square().mean().sqrt()
            parameter += noise * scale * torch.randn(parameter.shape).to(parameter)
    return member

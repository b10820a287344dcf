"""Networks and objectives by the names that studies give them."""

import inspect
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from torch import nn

from dissensus import losses, nets, objectives
from dissensus.axes import LossParts
from dissensus.objectives.declaration import hyperparameters
from dissensus.studies.datasets import StreamedImages, StudyData
from dissensus.studies.spec import Count, MemberCount, NonNegative, Objective, Share, Spec, SpecError, ValueRange

AnyData = StudyData | StreamedImages


WIDEST = 10**6
"""The largest width and number of layers that a study may ask for."""
Width = Annotated[int, ValueRange(1, WIDEST)]


def _mlp(
    data: AnyData, *, width: Width = 30, depth: Annotated[int, ValueRange(0, 1000)] = 2, dropout: Share = 0.0
) -> nn.Module:
    inputs = 1
    for size in data.shape:
        inputs *= size
    chain = nets.mlp(inputs, data.outputs, (width,) * depth, dropout=dropout)
    return chain if len(data.shape) == 1 else nn.Sequential(nn.Flatten(), *chain)


def _cnn(data: AnyData, *, widths: list[Width] | None = None, batch_norm: bool = True) -> nn.Module:
    channels, side, _ = _image_shape(data)
    return nets.cnn(channels, data.outputs, side, widths or (16, 32), batch_norm=batch_norm)


def _image_shape(data: AnyData) -> tuple[int, ...]:
    """Channels, height and width; data that is no images is refused."""
    if len(data.shape) != 3:
        raise SpecError(f"key 'members.network' needs images; {data.name} is a table. Use the network 'mlp'.")
    return data.shape


def _by_channels(make: Callable[..., nn.Module], data: AnyData, **options: Any) -> nn.Module:
    return make(data.outputs, _image_shape(data)[0], **options)


def _by_size(make: Callable[..., nn.Module], data: AnyData, **options: Any) -> nn.Module:
    shape = _image_shape(data)
    try:
        return make(data.outputs, *shape[:2], **options)
    except ValueError as reason:
        raise SpecError(f"key 'members.network' does not fit {data.name}: {reason}") from reason


def _timm(name: str, data: AnyData, **options: Any) -> nn.Module:
    try:
        import timm  # pyright: ignore[reportMissingImports]  # for those who have ImageNet
    except ImportError as reason:
        raise ImportError("this network comes from timm: pip install timm") from reason
    return timm.create_model(name, num_classes=data.outputs, in_chans=data.shape[0], **options)


def timm_network(name: str) -> nn.Module:
    """A pretrained network of timm."""
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except ImportError as reason:
        raise ImportError("this backbone comes from timm: pip install timm") from reason
    return timm.create_model(name, pretrained=True)


def _torchvision(name: str, data: AnyData, **options: Any) -> nn.Module:
    try:
        from torchvision.models import get_model  # pyright: ignore[reportMissingImports]
    except ImportError as reason:
        raise ImportError("this network comes from torchvision: pip install torchvision") from reason
    return get_model(name, num_classes=data.outputs, **options)


EXTERNAL: dict[str, Callable[..., nn.Module]] = {"timm:": _timm, "torchvision:": _torchvision}
"""Prefixes of networks from other libraries."""


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "vanilla-cnn": partial(_by_size, nets.vanilla_cnn),
    "vgg": partial(_by_size, nets.vgg),
    "resnet20": partial(_by_channels, nets.resnet20),
    "resnet32": partial(_by_channels, nets.resnet32),
    "resnet18": partial(_by_channels, nets.resnet18),
    "resnet34": partial(_by_channels, nets.resnet34),
    "mobilenet-v2": partial(_by_channels, nets.mobilenet_v2),
}
"""``(data, **options) -> nn.Module``; beside them, ``"timm:NAME"`` and ``"torchvision:NAME"``."""
HEADS = "heads"
"""The last ``layers`` of a pretrained network, on the features of its other layers, which are frozen.

The network is the ``backbone`` among the options of members."""
FRESH = "fresh"
Initial = Literal["pretrained", "fresh"]
"""How heads start: as copies of the pretrained layers, or as new perceptrons on the inputs of the last layer."""
WRAPPED = ("masksembles", "mc-dropout")
"""Networks with members inside; they wrap another one, which is the ``backbone`` among the options of members."""
ADAPTED = ("lora", "batch-ensemble", "tabm")
"""Members that share weights (`dissensus.adapters`), for the procedure "share"."""
SHARING_SETTINGS: Mapping[str, Any] = {
    "rank": Count,
    "lr": NonNegative,
    "training_cost": Annotated[float, ValueRange(0)],
}
"""Settings that methods of the procedure "share" have beside `METHOD_SETTINGS`, and their types."""
METHODS = "methods"
"""The objective's option that describes the methods which the grid's ``method`` names."""
METHOD_SETTINGS: Mapping[str, Any] = {
    "network": str,
    "members": MemberCount,
    "scale": Annotated[float, ValueRange(1)],
    "rate": Share,
    "widen": bool,
    "objective": str,
    "strength": NonNegative,
    "sampled": Count,
    "unlabelled": str,
    "diverse": list[Literal["lr", "weight_decay", "smoothing", "initial_scale"]],
    "backbone": str,
    "layers": Annotated[int, ValueRange(1, 1000)],
    "sequential": bool,
    "initial": Initial,
    "choose": dict[str, Annotated[list[float], ValueRange(0, length=1, distinct=True)]],
}
"""Settings of a method, beside the parameters of its objective, and their types."""
Seed = Annotated[int, ValueRange(0)]
AXES: Mapping[str, Any] = {
    **METHOD_SETTINGS,
    "alpha": Annotated[float, ValueRange(0, 1e6)],
    "beta": Annotated[float, ValueRange(0, 1e6)],
    "seed": Seed,
    "split_seed": Seed,
    "batch_size": Count,
    "lr": NonNegative,
    "weight_decay": NonNegative,
    "momentum": Share,
    "clip_norm": NonNegative,
    "method": str,
    "adversarial": Literal["none", "fgsm", "pgd"],
    "case": str,
    "classes": Annotated[int, ValueRange(2, WIDEST)],
}
"""Types of values on the axes of grids, beside parameters of objectives and options of networks."""


class MethodError(SpecError):
    """A study's grid names a method that it does not describe."""


_FROM_DATA = ("data", "classes", "channels", "image_size")
"""Parameters of builders that follow from the data."""


def options_of(network: str) -> list[str]:
    """Options of a network of the studies.

    >>> options_of("cnn")
    ['widths', 'batch_norm']
    """
    return [name for name in inspect.signature(_builder(network)).parameters if name not in _FROM_DATA]


def _builder(network: str) -> Callable[..., nn.Module]:
    make = NETWORKS[network]
    return make.args[0] if isinstance(make, partial) else make


def option_types(network: str) -> dict[str, Any]:
    """Types of a network's options, as its builder annotates them.

    >>> option_types("resnet18")
    {'stem': <class 'str'>}
    """
    hints = typing.get_type_hints(_builder(network), include_extras=True)
    return {name: hints[name] for name in options_of(network)}


def hyperparameter_types(objective: str) -> dict[str, Any]:
    """Types of an objective's hyperparameters, as the objective annotates them.

    >>> sorted(hyperparameter_types("learner_dropout"))
    ['drop', 'loss', 'per', 'pool']
    """
    function = objectives.OBJECTIVES[objective]
    hints = typing.get_type_hints(function, include_extras=True)
    return {name: hints[name] for name in hyperparameters(function)}


def build_of(spec: Spec, data: AnyData) -> Callable[..., nn.Module]:
    """The function that builds a member for some data; a grid may vary its keywords."""
    assert spec.members is not None
    if spec.objective is not None and isinstance(data, StudyData):
        data = replace(data, outputs=data.outputs * losses.outputs_per_target(spec.objective.loss))
    if "network" in spec.grid:
        return partial(_named, data)
    return maker(spec.members.network, data, spec.members.options)


def _named(data: AnyData, *, network: str) -> nn.Module:
    return maker(network, data, {})()


def maker(name: str, data: AnyData, options: dict[str, Any]) -> Callable[..., nn.Module]:
    """The function that builds a network by its name."""
    for prefix, make in EXTERNAL.items():
        if name.startswith(prefix):
            return partial(make, name.removeprefix(prefix), data, **options)
    return partial(NETWORKS[name], data, **options)


def check_task(spec: Spec, data: AnyData) -> None:
    """Refuse a loss of class labels for data with values, and the other way round."""
    assert spec.objective is not None
    labelled = isinstance(data, StreamedImages) or not data.train[1].is_floating_point()
    loss, takes = spec.objective.loss, losses.named(spec.objective.loss).takes
    if takes in (("values", "gaussian", "quantiles", "label_logits") if labelled else ("logits",)):
        have, fix = ("class labels", "cross_entropy") if labelled else ("values", "squared_error")
        raise SpecError(
            f"{spec.name}: key 'objective.loss' is {loss!r}, but {data.name} has {have}; use a loss such as {fix!r}."
        )


def sweepable_of(objective: str) -> tuple[str, ...]:
    """Hyperparameters of an objective that a sweep can vary, and a method can choose.

    >>> sweepable_of("ldr")
    ('strength',)
    """
    return tuple(objectives.declaration(objectives.OBJECTIVES[objective]).sweepable or ())


def objective_of(section: Objective, varied: Container[str] = ()) -> Callable[..., LossParts]:
    """The objective with all hyperparameters bound except those that the grid varies."""
    settings = {"loss": section.loss, "pool": section.pool, **section.options}
    return objective_with(section.name, {key: value for key, value in settings.items() if key not in varied})


def objective_with(name: str, settings: dict[str, Any]) -> Callable[..., LossParts]:
    """An objective with those settings bound that are hyperparameters of it."""
    objective = objectives.OBJECTIVES[name]
    known = hyperparameters(objective)
    return partial(objective, **{key: value for key, value in settings.items() if key in known})


def numbers_of(name: str, settings: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Settings of a method that are hyperparameters of its objective: numbers that a sweep can vary, and the rest."""
    objective = objectives.OBJECTIVES[name]
    known = hyperparameters(objective)
    taken = {key: value for key, value in settings.items() if key in known}
    swept = {key: float(value) for key, value in taken.items() if key in sweepable_of(name)}
    return swept, {key: value for key, value in taken.items() if key not in swept}

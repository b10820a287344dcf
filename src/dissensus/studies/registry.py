"""What a study may name: networks, objectives, measures. A study that names what is not there yet waits for it."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from dissensus import checks, nets, objectives
from dissensus.axes import LossParts
from dissensus.diversity.decomposition import check_pool
from dissensus.objectives.declaration import hyperparameters
from dissensus.studies import attack_measures, formulas, measures, shift_measures
from dissensus.studies.optimising import AUGMENTATIONS, VARIED
from dissensus.studies.problems import FOLDERS, NAMES, Problem, Streamed, has_own_splits
from dissensus.studies.spec import Objective, Spec, SpecError, on_data


def _mlp(problem: Problem | Streamed, *, width: int = 30, depth: int = 2, dropout: float = 0.0) -> nn.Module:
    inputs = 1
    for size in problem.shape:
        inputs *= size
    chain = nets.mlp(inputs, problem.outputs, (width,) * depth, dropout=dropout)
    return chain if len(problem.shape) == 1 else nn.Sequential(nn.Flatten(), *chain)


def _cnn(problem: Problem | Streamed, *, widths: list[int] | None = None, batch_norm: bool = True) -> nn.Module:
    channels, side, _ = problem.shape
    return nets.cnn(channels, problem.outputs, side, widths or (16, 32), batch_norm=batch_norm)


def _by_channels(make: Callable[..., nn.Module], problem: Problem | Streamed, **options: Any) -> nn.Module:
    return make(problem.outputs, problem.shape[0], **options)


def _by_size(make: Callable[..., nn.Module], problem: Problem | Streamed, **options: Any) -> nn.Module:
    return make(problem.outputs, problem.shape[0], problem.shape[1], **options)


def _timm(name: str, problem: Problem | Streamed, **options: Any) -> nn.Module:
    try:
        import timm  # pyright: ignore[reportMissingImports]  # for those who have ImageNet
    except ImportError as reason:
        raise ImportError("this network comes from timm: pip install timm") from reason
    return timm.create_model(name, num_classes=problem.outputs, in_chans=problem.shape[0], **options)


def timm_features(name: str) -> nn.Module:
    """A pretrained network of timm's without its classifier."""
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except ImportError as reason:
        raise ImportError("this backbone comes from timm: pip install timm") from reason
    return timm.create_model(name, pretrained=True, num_classes=0)


def _torchvision(name: str, problem: Problem | Streamed, **options: Any) -> nn.Module:
    try:
        from torchvision.models import get_model  # pyright: ignore[reportMissingImports]
    except ImportError as reason:
        raise ImportError("this network comes from torchvision: pip install torchvision") from reason
    return get_model(name, num_classes=problem.outputs, **options)


ELSEWHERE: dict[str, Callable[..., nn.Module]] = {"timm:": _timm, "torchvision:": _torchvision}
"""Prefixes of networks that other libraries build."""


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
"""``(problem, **options) -> nn.Module``; beside them, ``"timm:NAME"`` and ``"torchvision:NAME"``."""
HEADS = "heads"
"""Small networks on the features of a larger one that stands still, the ``backbone`` among the options of members."""
COMPARED = ("masksembles", "mc-dropout")
"""Networks of methods that are made from another one, the ``backbone`` among the options of members."""
METHODS = "methods"
"""Among the options of the objective: what the grid's ``method`` names."""
_OF_METHODS = {
    "network",
    "members",
    "scale",
    "rate",
    "widen",
    "objective",
    "strength",
    "sampled",
    "unlabelled",
    "diverse",
    "backbone",
    "layers",
    "sequential",
}
"""What a method may say, so far."""


class MethodError(SpecError):
    """A study compares what it does not describe."""


AROUND = ("detect", "generalise", "timing")
"""Procedures that look at data around that of the training."""
ATTACKED = ("attack", "transfer", "features")
"""Procedures that work on ensembles that a study has left: against them, or on what is inside."""
TRAINED = ("train", *AROUND, *ATTACKED)
PROCEDURES = (*TRAINED, "formula", "audit", "masks")

_OF_DATA = ("problem", "classes", "channels", "image_size")
"""What a network is told by the data, and not by an option."""


def options_of(network: str) -> list[str]:
    """What a network of the studies can be told beside its data.

    >>> options_of("cnn")
    ['widths', 'batch_norm']
    """
    make = NETWORKS[network]
    builder = make.args[0] if isinstance(make, partial) else make
    return [name for name in inspect.signature(builder).parameters if name not in _OF_DATA]


def build_of(spec: Spec, problem: Problem | Streamed) -> Callable[..., nn.Module]:
    """The function that builds a member for a problem; its keywords are what a grid may vary."""
    assert spec.members is not None
    if "network" in spec.grid:
        return partial(_named, problem)
    return maker(spec.members.network, problem, spec.members.options)


def _named(problem: Problem | Streamed, *, network: str) -> nn.Module:
    return maker(network, problem, {})()


def maker(name: str, problem: Problem | Streamed, options: dict[str, Any]) -> Callable[..., nn.Module]:
    """The function that builds a network by its name."""
    for prefix, make in ELSEWHERE.items():
        if name.startswith(prefix):
            return partial(make, name.removeprefix(prefix), problem, **options)
    return partial(NETWORKS[name], problem, **options)


def objective_of(section: Objective) -> Callable[..., LossParts]:
    """The objective with all hyperparameters bound except those that the grid varies."""
    return objective_with(section.name, {"loss": section.loss, "pool": section.pool, **section.options})


def objective_with(name: str, settings: dict[str, Any]) -> Callable[..., LossParts]:
    """An objective with those settings bound that are hyperparameters of it."""
    objective = objectives.OBJECTIVES[name]
    known = hyperparameters(objective)
    return partial(objective, **{key: value for key, value in settings.items() if key in known})


def waits_for(spec: Spec) -> list[str]:
    """What a study names that does not exist yet; empty where it can be run."""
    missing: list[str] = []
    if spec.procedure not in PROCEDURES:
        missing.append(f"the procedure {spec.procedure!r}")
    if spec.procedure == "masks":
        options = spec.members.options if spec.members is not None else {}
        numbers = [name for name in ("width", "draws") if not isinstance(options.get(name), int)]
        return [f"members.options.{name} that is a whole number" for name in numbers]
    if spec.procedure == "audit":
        return []
    if spec.procedure == "formula":
        return formulas.missing(spec)
    if spec.objective is not None and not hasattr(objectives, spec.objective.name):
        missing.append(f"objectives.{spec.objective.name}")
    missing += _of_networks(spec)
    exists = _MEASURES.get(spec.procedure, measures.exists)
    asked = [name for data in ("", *spec.data) for name in on_data(spec, data).evaluation.measures]
    missing += [f"the measure {name!r}" for name in dict.fromkeys(asked) if not exists(name)][:2]
    missing += _of_methods(spec) if not missing else []
    missing += _of_attacks(spec) if not missing and spec.procedure in ATTACKED else []
    missing += [f"the axis {axis!r}" for axis in spec.grid if not missing and axis not in _axes(spec)][:1]
    if spec.search is not None and not missing:
        whole = [data for data in spec.data if not has_own_splits(data)]
        missing += [f"a search on {data!r}, of which no rows are held out" for data in whole][:1]
    return missing


_MEASURES: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(AROUND, shift_measures.exists),
    **dict.fromkeys(ATTACKED, attack_measures.exists),
}
"""Whether a measure exists, by procedure."""


def _of_attacks(spec: Spec) -> list[str]:
    """What studies under attack ask for that cannot be done yet."""
    missing = [f"a grid with the axis {axis!r}" for axis in ("method", "seed") if axis not in spec.grid]
    missing += [f"attacks on {name!r}, which has no test set of its own" for name in spec.data if has_own_splits(name)]
    missing += [f"an attack {name!r}" for name in spec.evaluation.attacked if name not in attack_measures.ATTACKED]
    missing += [f"an attack {name!r}" for name in spec.evaluation.strong if name not in attack_measures.STRONG]
    return missing[:1]


def numbers_of(name: str, settings: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Settings of a method that are hyperparameters of its objective: numbers that a sweep can vary, and the rest."""
    objective = objectives.OBJECTIVES[name]
    known = hyperparameters(objective)
    taken = {key: value for key, value in settings.items() if key in known}
    sweepable = objectives.declaration(objective).sweepable or ()
    swept = {key: float(value) for key, value in taken.items() if key in sweepable}
    return swept, {key: value for key, value in taken.items() if key not in swept}


def _of_networks(spec: Spec) -> list[str]:
    """A network that is made from another one needs what says how."""
    name = spec.members.network if spec.members is not None and "network" not in spec.grid else ""
    if name in COMPARED and "method" not in spec.grid:
        return [f"methods in the grid, which the network {name!r} needs"]
    if name == HEADS and spec.procedure not in AROUND:
        return [f"the network {name!r} in the procedure {spec.procedure!r}"]
    return []


def _of_methods(spec: Spec) -> list[str]:
    """What methods ask for that cannot be done yet."""
    if spec.objective is None:
        return []
    methods = spec.objective.options.get(METHODS, {})
    known = {*_OF_METHODS, *inspect.signature(getattr(objectives, spec.objective.name)).parameters}
    asked = {key for told in methods.values() for key in told} - known
    return [f"methods with {key!r}" for key in sorted(asked)][:1]


def _axes(spec: Spec) -> set[str]:
    """What a grid may vary: settings of a sweep, the objective's parameters, those of the network's builder."""
    if "method" in spec.grid and spec.procedure not in AROUND:
        return {"method", "adversarial", "seed"}  # all else is said by methods
    known = {"seed", *VARIED}
    if spec.objective is not None and hasattr(objectives, spec.objective.name):
        known |= set(inspect.signature(getattr(objectives, spec.objective.name)).parameters)
    if spec.procedure in AROUND:
        known |= {"method", "members", "layers", "sampled", "unlabelled"}
    elif any(data in FOLDERS for data in spec.data):
        return {"network", *known}
    else:
        known |= {"network", "members", "split_seed"}
    if spec.members is not None and spec.members.network in NETWORKS:
        known |= set(options_of(spec.members.network))
    return known


def check(spec: Spec, file: str) -> None:
    """Refuse words that nobody knows, now or later."""
    if spec.members is not None:
        _known_network(file, "members.network", spec.members.network)
    if spec.objective is not None:
        _known(file, "objective.name", spec.objective.name, list(objectives.__all__))
    _known(file, "procedure", spec.procedure, list(PROCEDURES))
    for name in spec.grid.get("network", []):
        _known_network(file, "grid.network", name)
    for name in spec.optimisation.augment:
        _known(file, "optimisation.augment", name, list(AUGMENTATIONS))
    for name in spec.data:
        _known(file, "data", name, list(NAMES))
    for name in spec.by_data:
        _known(file, "by_data", name, list(NAMES))
    _check_grid(spec, file)
    told = spec.optimisation
    if told.momentum and told.optimizer != "sgd":
        raise SpecError(f"{file}: key 'optimisation.momentum' does nothing with {told.optimizer}; use sgd, or 0.")
    if spec.procedure not in ("formula", "masks"):
        _check_options(spec, file)


def _check_grid(spec: Spec, file: str) -> None:
    """Refuse axes without values, and seeds that are no whole numbers."""
    for axis, values in spec.grid.items():
        if not isinstance(values, list) or not values:
            raise SpecError(f"{file}: key 'grid.{axis}' must be a list of values; got {values!r}.")
    for seed in spec.grid.get("seed", []):
        if not isinstance(seed, int):
            raise SpecError(f"{file}: key 'grid.seed' must hold whole numbers; got {seed!r}.")


def _check_options(spec: Spec, file: str) -> None:
    """Refuse a loss that its pool does not go with, and options that nothing takes."""
    if spec.objective is not None:
        told = spec.objective
        try:
            check_pool(told.loss, told.pool)
        except ValueError as reason:
            raise SpecError(f"{file}: section 'objective': {reason}") from reason
        methods = told.options.get(METHODS, {}).values()
        known = {METHODS, *_OF_METHODS}
        for name in {told.name, *(str(method.get("objective", told.name)) for method in methods)}:
            known |= set(inspect.signature(getattr(objectives, name)).parameters)
        for key in told.options:
            _known(file, "objective.options", key, sorted(known))
    if spec.members is not None:
        networks = [spec.members.network, str(spec.members.options.get("backbone", ""))]
        known = {"backbone", "layers", "counts"}
        if "network" not in spec.grid:  # each of several networks is built as it is
            known |= {key for name in networks if name in NETWORKS for key in options_of(name)}
        for key in spec.members.options if not any(name.startswith(tuple(ELSEWHERE)) for name in networks) else ():
            _known(file, "members.options", key, sorted(known))


def _known_network(file: str, key: str, name: str) -> None:
    if not name.startswith(tuple(ELSEWHERE)):
        _known(file, key, name, [*NETWORKS, *COMPARED, HEADS])


def _known(file: str, key: str, word: str, known: list[str]) -> None:
    if word not in known:
        hint = checks.nearest(word, known, f"It may be one of {', '.join(known)}.")
        raise SpecError(f"{file}: key {key!r} is {word!r}, which nothing is called. {hint}")

"""Whether a study can be run: words that nothing is called, options that nothing takes, parts that do not exist."""

from collections.abc import Mapping, Sequence
from typing import Any

from dissensus import checks, losses, objectives
from dissensus.data.sources import DATASETS, DatasetInfo
from dissensus.diversity.decomposition import check_pool
from dissensus.studies.backbones import PRETRAINED
from dissensus.studies.datasets import NAMES
from dissensus.studies.measures import MEASURES, OutputMeasure
from dissensus.studies.procedures.base import Procedure
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.registry import (
    ADAPTED,
    AXES,
    EXTERNAL,
    HEADS,
    METHOD_SETTINGS,
    METHODS,
    NETWORKS,
    SHARING_SETTINGS,
    WRAPPED,
    hyperparameter_types,
    option_types,
    options_of,
    sweepable_of,
)
from dissensus.studies.shifted_datasets import SETS, is_chosen_in_training
from dissensus.studies.spec import (
    Expectation,
    HeldOut,
    MemberCount,
    Scalar,
    Spec,
    SpecError,
    checked_value,
    on_data,
    resolved,
)
from dissensus.studies.training_arguments import AUGMENTATIONS

SEARCHED = ("lr", "batch_size", "weight_decay", "members")
"""Hyperparameters that a search may vary, beside options of the network."""


def missing(
    spec: Spec,
    procedures: Mapping[str, Procedure] = PROCEDURES,
    measures: Mapping[str, OutputMeasure] = MEASURES,
) -> list[str]:
    """Why a study cannot be run, in words; empty where it can."""
    if spec.procedure not in procedures:
        return [f"there is no procedure {spec.procedure!r}"]
    return procedures[spec.procedure].missing(spec, measures)


def check(
    spec: Spec,
    file: str,
    procedures: Mapping[str, Procedure] = PROCEDURES,
    catalogue: Mapping[str, DatasetInfo] = DATASETS,
) -> None:
    """Refuse names that nothing has, options that nothing takes, and values of another type than their reader's."""
    _check_name(file, "procedure", spec.procedure, list(procedures))
    if spec.members is not None:
        _check_network(file, "members.network", spec.members.network)
    if spec.objective is not None:
        _check_name(file, "objective.name", spec.objective.name, list(objectives.OBJECTIVES))
    for name in spec.optimisation.augment:
        _check_name(file, "optimisation.augment", name, list(AUGMENTATIONS))
    data_names = [*NAMES, *(name for name in catalogue if name not in DATASETS)]
    for name in spec.data:
        _check_name(file, "data", name, data_names)
    for name in spec.by_data:
        _check_name(file, "by_data", name, data_names)
    if spec.optimisation.momentum and spec.optimisation.optimizer != "sgd":
        optimizer = spec.optimisation.optimizer
        raise SpecError(f"{file}: key 'optimisation.momentum' does nothing with {optimizer}; use sgd, or 0.")
    if procedures[spec.procedure].trains:
        for section in ("members", "objective"):
            if getattr(spec, section) is None:
                raise SpecError(f"{file}: key {section} is missing; the procedure {spec.procedure!r} needs it.")
        _check_held_out(spec, file)
        _check_objective(spec, file)
        _check_members(spec, file)
    _check_grid(spec, file)
    _check_search(spec, file)


def check_statements(spec: Spec, file: str) -> None:
    """Refuse statements about measures, points and axes that the study has at no scale."""
    versions = [spec, *(resolved(spec, scale, {}, file) for scale in spec.scales)]
    versions += [on_data(version, data, file) for version in versions for data in version.by_data]
    measures = sorted({name for version in versions for name in version.evaluation.measures})
    axes: dict[str, list[Any]] = {}
    for version in versions:
        for axis, values in version.grid.items():
            axes.setdefault(axis, []).extend(values)
    for i, statement in enumerate(spec.expect):
        key = f"expect[{i}]"
        others = [statement.than_measure] if isinstance(statement.than_measure, str) else statement.than_measure
        for word, name in [("measure", statement.measure), *(("than_measure", other) for other in others)]:
            if name and not statement.sets:
                _check_name(file, f"{key}.{word}", name, measures)
            for dataset in statement.sets if name else ():
                _check_name(file, f"{key}.{word}", f"{name}_{dataset}" if dataset else name, measures)
        _check_comparison(statement, key, file)
        for word in ("at", "than"):
            for axis in getattr(statement, word):
                _check_name(file, f"{key}.{word}", axis, [*axes, "data"])
        if statement.along:
            _check_name(file, f"{key}.along", statement.along, list(axes))


def _check_comparison(statement: Expectation, key: str, file: str) -> None:
    """Refuse a direction without anything to compare with, and the other way round."""
    is_inside = statement.direction.endswith("inside")
    compares = bool(statement.than or statement.than_measure)
    if is_inside != bool(statement.along):
        raise SpecError(
            f"{file}: keys '{key}.along' and a direction 'lowest inside' or 'highest inside' belong together."
        )
    if bool(statement.direction) != (compares or is_inside):
        raise SpecError(f"{file}: keys '{key}.direction' and '{key}.than' or '{key}.than_measure' belong together.")
    for axis, value in statement.than.items():
        if value == []:
            raise SpecError(f"{file}: key '{key}.than.{axis}' must hold a value; got an empty list.")


def _setting_types(spec: Spec) -> dict[str, Any]:
    """Types of all settings that a grid, a search or a method may set."""
    types: dict[str, Any] = {}
    if spec.members is not None and spec.members.network in NETWORKS:
        types |= option_types(spec.members.network)
    for name in _objective_names(spec):
        types |= hyperparameter_types(name)
    return {**types, **SHARING_SETTINGS, **AXES}


def _objective_names(spec: Spec) -> list[str]:
    """The study's objective, and those of its methods."""
    if spec.objective is None:
        return []
    names = [method.get("objective", spec.objective.name) for method in methods_of(spec).values()]
    return [name for name in dict.fromkeys([spec.objective.name, *map(str, names)]) if name in objectives.OBJECTIVES]


def methods_of(spec: Spec) -> Mapping[str, Any]:
    """The methods that a study describes, by name; none where the option is something else."""
    methods = {} if spec.objective is None else spec.objective.options.get(METHODS, {})
    tables = isinstance(methods, dict) and all(isinstance(method, dict) for method in methods.values())
    return methods if tables else {}


def _check_grid(spec: Spec, file: str) -> None:
    """Refuse values of axes that what reads them cannot take."""
    types, methods = _setting_types(spec), methods_of(spec)
    for axis, values in spec.grid.items():
        for i, value in enumerate(values):
            key = f"grid.{axis}[{i}]"
            checked_value(value, types.get(axis, Scalar), key, file)
            if axis == "network":
                _check_network(file, key, str(value))
            if axis == "method":
                _check_name(file, key, value, list(methods))
            if axis == "unlabelled":
                _check_unlabelled(file, key, str(value))
            if axis == "pool" and spec.objective is not None:
                _check_pool(file, key, spec.objective.loss, str(value))


def _check_search(spec: Spec, file: str) -> None:
    """Refuse hyperparameters that a search cannot vary, and values that they cannot have."""
    if spec.search is None:
        return
    options = options_of(spec.members.network) if spec.members and spec.members.network in NETWORKS else []
    types = _setting_types(spec)
    for name, values in spec.search.space.items():
        _check_name(file, "search.space", name, [*SEARCHED, *options])
        for i, value in enumerate(values):
            checked_value(value, types[name], f"search.space.{name}[{i}]", file)


def _check_objective(spec: Spec, file: str) -> None:
    """Refuse a loss that cannot be pooled in the study's way, and options that no objective takes."""
    section = spec.objective
    if section is None:
        return
    _check_pool(file, "objective.pool", section.loss, section.pool)
    key = f"objective.options.{METHODS}"
    methods = checked_value(section.options.get(METHODS, {}), dict[str, dict[str, Any]], key, file)
    for name, method in methods.items():
        _check_name(file, f"{key}.{name}.objective", method.get("objective", section.name), list(objectives.OBJECTIVES))
    types = _setting_types(spec)
    known = {
        METHODS,
        *METHOD_SETTINGS,
        *(parameter for name in _objective_names(spec) for parameter in hyperparameter_types(name)),
    }
    for option, value in section.options.items():
        _check_name(file, "objective.options", option, sorted(known))
        if option != METHODS:
            checked_value(value, types[option], f"objective.options.{option}", file)
    for name, method in methods.items():
        _check_method(method, types, f"{key}.{name}", file)
    for name, method in {"": {}, **methods}.items():
        _check_choice(spec, {**section.options, **method}, f"{key}.{name}" if name else "objective.options", file)


def _check_held_out(spec: Spec, file: str) -> None:
    """Refuse a split that has an empty part, or that is by class where targets are no classes."""
    held_out, key = spec.optimisation.validation, "optimisation.validation"
    if not isinstance(held_out, HeldOut):
        return
    if not 0 < held_out.fraction < 1:
        raise SpecError(f"{file}: key '{key}.fraction' must be above 0 and below 1; got {held_out.fraction}.")
    loss = "" if spec.objective is None else spec.objective.loss
    if held_out.by == "class" and loss in losses.LOSSES and losses.named(loss).takes != "logits":
        raise SpecError(
            f"{file}: key '{key}.by' is 'class', but the loss {loss!r} is for targets that are no classes; "
            "use by = 'chance'."
        )


def _check_pool(file: str, key: str, loss: str, pool: str) -> None:
    try:
        check_pool(loss, pool)
    except ValueError as reason:
        raise SpecError(f"{file}: key {key!r}: {reason}") from reason


def _check_method(method: Mapping[str, Any], types: Mapping[str, Any], key: str, file: str) -> None:
    """Refuse settings of a method with values that they cannot have."""
    for setting, value in method.items():
        if setting in types:  # others are named by the procedure
            checked_value(value, types[setting], f"{key}.{setting}", file)
    if "network" in method:
        _check_network(file, f"{key}.network", method["network"])
    if "unlabelled" in method:
        _check_unlabelled(file, f"{key}.unlabelled", method["unlabelled"])


def _check_choice(spec: Spec, settings: Mapping[str, Any], key: str, file: str) -> None:
    """Refuse choices between values that no sweep can train, or without held-out rows to choose by."""
    choice = settings.get("choose")
    if not choice:
        return
    assert spec.objective is not None
    if len(choice) > 1:
        raise SpecError(f"{file}: key '{key}.choose' must name one hyperparameter; got {', '.join(choice)}.")
    _check_name(file, f"{key}.choose", next(iter(choice)), sweepable_of(settings.get("objective", spec.objective.name)))
    for other in ("sequential", "diverse"):
        if settings.get(other):
            raise SpecError(f"{file}: key '{key}.choose' cannot be combined with {other!r}.")
    if not spec.optimisation.validation:
        raise SpecError(f"{file}: key '{key}.choose' needs held-out rows; set 'optimisation.validation', such as 0.1.")


def _check_members(spec: Spec, file: str) -> None:
    """Refuse options that no network takes; networks of other libraries check theirs."""
    if spec.members is None:
        return
    options = spec.members.options
    heads = {name: METHOD_SETTINGS[name] for name in ("backbone", "layers", "initial")}
    types = {**heads, "counts": dict[str, MemberCount]}
    for option in types.keys() & options.keys():
        checked_value(options[option], types[option], f"members.options.{option}", file)
    _check_backbones(spec, file)
    networks = [spec.members.network, options.get("backbone", "")]
    if any(name.startswith(tuple(EXTERNAL)) for name in networks):
        return
    if "network" not in spec.grid:  # several networks are built without options
        for name in networks:
            types |= option_types(name) if name in NETWORKS else {}
    for option, value in options.items():
        _check_name(file, "members.options", option, sorted(types))
        checked_value(value, types[option], f"members.options.{option}", file)


def _check_backbones(spec: Spec, file: str) -> None:
    """Refuse backbones that do not exist."""
    assert spec.members is not None
    methods = {f"objective.options.{METHODS}.{name}": method for name, method in methods_of(spec).items()}
    backbones = {f"{key}.backbone": method["backbone"] for key, method in methods.items() if "backbone" in method}
    backbones |= {f"grid.backbone[{i}]": name for i, name in enumerate(spec.grid.get("backbone", []))}
    if "backbone" in spec.members.options:
        backbones["members.options.backbone"] = spec.members.options["backbone"]
    for key, name in backbones.items():
        if not name.startswith(tuple(EXTERNAL)):
            _check_name(file, key, name, [*NETWORKS, PRETRAINED])


def _check_network(file: str, key: str, name: str) -> None:
    if not name.startswith(tuple(EXTERNAL)):
        _check_name(file, key, name, [*NETWORKS, *WRAPPED, HEADS, *ADAPTED])


def _check_unlabelled(file: str, key: str, name: str) -> None:
    if name and not is_chosen_in_training(name):
        _check_name(file, key, name, SETS)


def _check_name(file: str, key: str, word: object, known: Sequence[str]) -> None:
    if word not in known:
        hint = checks.nearest(str(word), known, f"It may be one of {', '.join(known)}." if known else "There is none.")
        raise SpecError(f"{file}: key {key!r} is {word!r}, which nothing is called. {hint}")

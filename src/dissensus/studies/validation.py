"""Whether a study can be run: words that nothing is called, options that nothing takes, parts that do not exist."""

import inspect
from collections.abc import Mapping, Sequence

from dissensus import checks, objectives
from dissensus.data.sources import DATASETS, DatasetInfo
from dissensus.diversity.decomposition import check_pool
from dissensus.studies.datasets import NAMES
from dissensus.studies.measures import MEASURES, OutputMeasure
from dissensus.studies.procedures.base import Procedure
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.registry import EXTERNAL, HEADS, METHOD_SETTINGS, METHODS, NETWORKS, WRAPPED, options_of
from dissensus.studies.spec import Spec, SpecError
from dissensus.studies.training_arguments import AUGMENTATIONS


def missing(
    spec: Spec,
    procedures: Mapping[str, Procedure] = PROCEDURES,
    measures: Mapping[str, OutputMeasure] = MEASURES,
) -> list[str]:
    """What a study names that does not exist, in words; empty where it can be run."""
    if spec.procedure not in procedures:
        return [f"the procedure {spec.procedure!r}"]
    return procedures[spec.procedure].missing(spec, measures)


def check(
    spec: Spec,
    file: str,
    procedures: Mapping[str, Procedure] = PROCEDURES,
    catalogue: Mapping[str, DatasetInfo] = DATASETS,
) -> None:
    """Refuse names that nothing has, and options that nothing takes."""
    if spec.members is not None:
        _check_network(file, "members.network", spec.members.network)
    if spec.objective is not None:
        _check_name(file, "objective.name", spec.objective.name, list(objectives.OBJECTIVES))
    _check_name(file, "procedure", spec.procedure, list(procedures))
    for name in spec.grid.get("network", []):
        _check_network(file, "grid.network", name)
    for name in spec.optimisation.augment:
        _check_name(file, "optimisation.augment", name, list(AUGMENTATIONS))
    data_names = [*NAMES, *(name for name in catalogue if name not in DATASETS)]
    for name in spec.data:
        _check_name(file, "data", name, data_names)
    for name in spec.by_data:
        _check_name(file, "by_data", name, data_names)
    _check_grid(spec, file)
    if spec.optimisation.momentum and spec.optimisation.optimizer != "sgd":
        optimizer = spec.optimisation.optimizer
        raise SpecError(f"{file}: key 'optimisation.momentum' does nothing with {optimizer}; use sgd, or 0.")
    if procedures[spec.procedure].trains:
        _check_objective(spec, file)
        _check_members(spec, file)


def _check_grid(spec: Spec, file: str) -> None:
    """Refuse axes without values, and seeds that are not whole numbers."""
    for axis, values in spec.grid.items():
        if not isinstance(values, list) or not values:
            raise SpecError(f"{file}: key 'grid.{axis}' must be a list of values; got {values!r}.")
    for seed in spec.grid.get("seed", []):
        if not isinstance(seed, int):
            raise SpecError(f"{file}: key 'grid.seed' must hold whole numbers; got {seed!r}.")


def _check_objective(spec: Spec, file: str) -> None:
    """Refuse a loss that cannot be pooled in the study's way, and options that no objective takes."""
    section = spec.objective
    if section is None:
        return
    try:
        check_pool(section.loss, section.pool)
    except ValueError as reason:
        raise SpecError(f"{file}: section 'objective': {reason}") from reason
    methods = section.options.get(METHODS, {}).values()
    known = {METHODS, *METHOD_SETTINGS}
    for name in {section.name, *(str(method.get("objective", section.name)) for method in methods)}:
        known |= set(inspect.signature(getattr(objectives, name)).parameters)
    for key in section.options:
        _check_name(file, "objective.options", key, sorted(known))


def _check_members(spec: Spec, file: str) -> None:
    """Refuse options that no network takes; networks of other libraries check theirs."""
    if spec.members is None:
        return
    networks = [spec.members.network, str(spec.members.options.get("backbone", ""))]
    if any(name.startswith(tuple(EXTERNAL)) for name in networks):
        return
    known = {"backbone", "layers", "counts"}
    if "network" not in spec.grid:  # several networks are built without options
        known |= {key for name in networks if name in NETWORKS for key in options_of(name)}
    for key in spec.members.options:
        _check_name(file, "members.options", key, sorted(known))


def _check_network(file: str, key: str, name: str) -> None:
    if not name.startswith(tuple(EXTERNAL)):
        _check_name(file, key, name, [*NETWORKS, *WRAPPED, HEADS])


def _check_name(file: str, key: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        hint = checks.nearest(word, known, f"It may be one of {', '.join(known)}.")
        raise SpecError(f"{file}: key {key!r} is {word!r}, which nothing is called. {hint}")

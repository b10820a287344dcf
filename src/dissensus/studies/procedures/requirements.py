"""Why a study that trains networks cannot be run, in words."""

import inspect
from collections.abc import Callable, Collection, Mapping

from dissensus import checks, objectives
from dissensus.losses import LOSSES
from dissensus.studies.datasets import is_split_by_seed
from dissensus.studies.measures import OutputMeasure, unfit
from dissensus.studies.registry import ADAPTED, HEADS, METHOD_SETTINGS, METHODS, NETWORKS, WRAPPED, options_of
from dissensus.studies.spec import Spec, on_data

HasMeasure = Callable[[str, Mapping[str, OutputMeasure]], bool]


def missing_objective(spec: Spec) -> list[str]:
    """An objective that does not exist."""
    if spec.objective is None or hasattr(objectives, spec.objective.name):
        return []
    return [f"there is no objective {spec.objective.name!r}"]


def missing_network(spec: Spec, *, heads: bool = False) -> list[str]:
    """What a network needs that is made from another one; ``heads`` where heads on features can be trained."""
    name = spec.members.network if spec.members is not None and "network" not in spec.grid else ""
    if name in WRAPPED and "method" not in spec.grid:
        return [f"the network {name!r} needs methods in the grid"]
    methods = {} if spec.objective is None else spec.objective.options.get(METHODS, {})
    for network in (name, *(settings.get("network", "") for settings in methods.values())):
        if network in ADAPTED:
            return [f"the network {network!r} needs the procedure 'share'"]
    if name == HEADS and not heads:
        return [f"the procedure {spec.procedure!r} cannot train the network {name!r}"]
    return _missing_backbone(spec)


def _missing_backbone(spec: Spec) -> list[str]:
    """The backbone of networks that are made from another one."""
    if spec.members is None or spec.objective is None:
        return []
    methods = spec.objective.options.get(METHODS, {})
    used = [methods.get(name, {}) for name in spec.grid.get("method", [])] or [{}]
    for settings in used:
        name = settings.get("network", spec.members.network)
        backbone = settings.get("backbone") or spec.members.options.get("backbone") or "backbone" in spec.grid
        if name in (HEADS, *WRAPPED) and not backbone:
            return [f"the network {name!r} needs 'members.options.backbone', from which it is made"]
    return []


def missing_measures(spec: Spec, has_measure: HasMeasure, measures: Mapping[str, OutputMeasure]) -> list[str]:
    """The first two measures that nothing is called, or that cannot be taken of outputs for the study's loss."""
    names = list(dict.fromkeys(n for data in ("", *spec.data) for n in on_data(spec, data).evaluation.measures))
    lacks = [
        f"no measure of 'evaluation.measures' is called {name!r}{_hint(name, measures)}"
        for name in names
        if not has_measure(name, measures)
    ]
    if spec.objective is not None and spec.objective.loss in LOSSES:
        lacks += filter(None, (unfit(name, spec.objective.loss, measures) for name in names))
    return lacks[:2]


def missing_curves(spec: Spec, is_curve_measure: Callable[[str], bool]) -> list[str]:
    """Curves over the epochs, where a measure is a value of one and the study records none."""
    names = [name for name in spec.evaluation.measures if is_curve_measure(name)]
    lacking = names and not spec.evaluation.curves
    return [f"the measure {names[0]!r} needs 'evaluation.curves = true'"] if lacking else []


def missing_method_settings(spec: Spec) -> list[str]:
    """The first setting of methods that nothing takes."""
    if spec.objective is None:
        return []
    methods = spec.objective.options.get(METHODS, {})
    known = {*METHOD_SETTINGS, *inspect.signature(getattr(objectives, spec.objective.name)).parameters}
    unknown = {key for settings in methods.values() for key in settings} - known
    return [f"no setting of a method is called {key!r}{_hint(key, known)}" for key in sorted(unknown)][:1]


def missing_axes(spec: Spec, axes: Collection[str]) -> list[str]:
    """The first axis of the grid that cannot be varied."""
    return [unknown_axis(axis, axes) for axis in spec.grid if axis not in axes][:1]


def unknown_axis(axis: str, axes: Collection[str]) -> str:
    """That an axis is not known, with the names that are.

    >>> unknown_axis("sead", {"seed", "scale"})
    "the axis 'sead' of 'grid' is none that this study can vary. Did you mean 'seed'?"
    """
    return f"the axis {axis!r} of 'grid' is none that this study can vary{_hint(axis, axes)}"


def _hint(word: str, known: Collection[str]) -> str:
    """The nearest name, or all of them."""
    names = ", ".join(sorted(known))
    return f". {checks.nearest(word, known, f'It may be one of {names}')}" if known else ""


def missing_search(spec: Spec) -> list[str]:
    """Data without rows that a search can hold out."""
    if spec.search is None:
        return []
    held_out = [data for data in spec.data if not is_split_by_seed(data)]
    return [f"a search on {data!r} has no rows to hold out" for data in held_out][:1]


def objective_parameters(spec: Spec, fixed: Collection[str] = ("loss", "pool")) -> set[str]:
    """Parameters of the study's objective that a grid may vary: all but those that measures take from the study."""
    if spec.objective is None or not hasattr(objectives, spec.objective.name):
        return set()
    return parameters_of(spec.objective.name) - {*fixed}


def parameters_of(objective: str) -> set[str]:
    """Parameters of an objective beside outputs and targets."""
    return set(inspect.signature(getattr(objectives, objective)).parameters) - {"outputs", "targets"}


def network_options(spec: Spec) -> set[str]:
    """Options of the study's network."""
    if spec.members is None or spec.members.network not in NETWORKS:
        return set()
    return set(options_of(spec.members.network))

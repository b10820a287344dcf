"""Proposals of candidates: all points of a space, random ones, or those of Optuna's TPE."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dissensus.fingerprint import fingerprint
from dissensus.randomness import Use, derived_seed
from dissensus.train.tuning.space import Space

Parameters = dict[str, float]
_MISSING = "later brackets are proposed by Optuna: pip install 'dissensus[hpo]'"
_STUDY = "dissensus"


class Seen(NamedTuple):
    """A candidate that was trained: what its proposal was, and its values by epochs; lower is better."""

    number: int
    parameters: Parameters
    values: Mapping[int, float]


def random_parameters(space: Space, count: int, seed: int, bracket: int) -> list[Parameters]:
    """Parameters drawn uniformly, one set per candidate."""
    generator = torch.Generator().manual_seed(derived_seed(seed, Use.SEARCH, bracket))
    uniform = torch.rand(count, len(space), generator=generator, dtype=torch.float64).tolist()
    return [{axis.name: axis.drawn(u) for axis, u in zip(space, row, strict=True)} for row in uniform]


def comparable(seen: Sequence[Seen], dimensions: int) -> list[tuple[Parameters, float]]:
    """The candidates that reached the longest training which enough of them reached, with their values there.

    Values after a few epochs and after many do not compare. Enough are two more than there are settings (Falkner et al.
    2018, BOHB); otherwise those of the shortest training count.

    >>> seen = [Seen(i, {"lr": i / 9}, {1: 1.0 - i / 9} | ({3: 0.5} if i < 2 else {})) for i in range(9)]
    >>> len(comparable(seen, 1)), len(comparable(seen[:2], 1))
    (9, 2)
    """
    epochs = sorted({epoch for one in seen for epoch in one.values}, reverse=True)
    for epoch in epochs:
        reached = [(one.parameters, one.values[epoch]) for one in seen if epoch in one.values]
        if len(reached) >= dimensions + 2 or epoch == epochs[-1]:
            return _finite(reached)
    return []


def _finite(results: list[tuple[Parameters, float]]) -> list[tuple[Parameters, float]]:
    """Candidates that diverged get ten times the worst value of those that did not; losses may be negative."""
    worst = max((value for _, value in results if math.isfinite(value)), default=1e6)
    return [(parameters, value if math.isfinite(value) else worst + 9 * abs(worst)) for parameters, value in results]


def check_optuna() -> None:
    """Refuse a search that needs Optuna where it is not installed, before anything is trained."""
    try:
        import optuna  # noqa: F401
    except ImportError as reason:
        raise ImportError(_MISSING) from reason


def proposed_parameters(
    space: Space, count: int, seen: Sequence[Seen], seed: int, bracket: int, storage: Any = None, search: str = ""
) -> list[Parameters]:
    """The next candidates, by TPE from those that were trained, and from other searches in a storage."""
    optuna = _optuna()
    known = comparable(seen, len(space)) + _stored(space, storage, search)
    sampler = optuna.samplers.TPESampler(
        seed=derived_seed(seed, Use.SEARCH, bracket) % 2**32, constant_liar=True, n_startup_trials=1
    )
    study = optuna.create_study(sampler=sampler)
    distributions = _distributions(space)
    for parameters, value in known:
        study.add_trial(optuna.create_trial(params=dict(parameters), distributions=distributions, value=value))
    return [dict(study.ask(distributions).params) for _ in range(count)]


def store(space: Space, seen: Sequence[Seen], points: Sequence[Mapping[str, Any]], search: str, storage: Any) -> None:
    """Write candidates that were trained into an Optuna storage; those that are there already are left alone."""
    optuna = _optuna()
    study = optuna.create_study(storage=storage, study_name=_STUDY, load_if_exists=True)
    there = {
        (trial.user_attrs.get("search"), trial.user_attrs.get("number")) for trial in study.get_trials(deepcopy=False)
    }
    for one, point in zip(seen, points, strict=True):
        if (search, one.number) in there or not one.values:
            continue
        epoch = max(one.values)
        value = one.values[epoch]
        settings = json.loads(json.dumps(dict(point), default=str))
        study.add_trial(
            optuna.create_trial(
                params=dict(one.parameters),
                distributions=_distributions(space),
                value=value if math.isfinite(value) else None,
                state=optuna.trial.TrialState.COMPLETE if math.isfinite(value) else optuna.trial.TrialState.FAIL,
                user_attrs={
                    "search": search,
                    "space": _key(space),
                    "number": one.number,
                    "epochs": epoch,
                    "settings": settings,
                },
            )
        )


def _key(space: Space) -> str:
    """What distinguishes a space from others with the same names: places within ranges mean other numbers there."""
    return fingerprint([(axis.name, axis.choices, axis.distribution) for axis in space], opaque=[])


def _stored(space: Space, storage: Any, search: str) -> list[tuple[Parameters, float]]:
    """Candidates of other searches of the same space in a storage; those of this one are known already."""
    if storage is None:
        return []
    optuna = _optuna()
    study = optuna.create_study(storage=storage, study_name=_STUDY, load_if_exists=True)
    key = _key(space)
    return [
        (dict(trial.params), float(trial.value))
        for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if trial.user_attrs.get("search") != search and trial.user_attrs.get("space") == key and trial.value is not None
    ]


def _distributions(space: Space) -> dict[str, Any]:
    optuna = _optuna()
    return {
        axis.name: optuna.distributions.FloatDistribution(0.0, 1.0)
        if not axis.choices
        else optuna.distributions.IntDistribution(0, len(axis.choices) - 1)
        if axis.ordered
        else optuna.distributions.CategoricalDistribution(range(len(axis.choices)))
        for axis in space
    }


def _optuna() -> Any:
    check_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

"""Proposals of candidates: all points of a space, random ones, or those of Optuna's TPE."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dissensus.randomness import Use, derived_seed
from dissensus.train.tuning.space import Axis, Range, Space

Parameters = dict[str, float]
_MISSING = "later brackets are proposed by Optuna: pip install 'dissensus[hpo]'"


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


class Store(NamedTuple):
    """An Optuna storage, and what this search is in it."""

    storage: Any
    """An address, or an object of Optuna."""
    task: str
    """A fingerprint of space, metric, objective, network and data: searches of one task learn from each other."""
    search: str
    """A fingerprint of this search."""
    metric: str
    maximise: bool

    def study(self) -> Any:
        """The study of the task; it is created if it is not there."""
        return _optuna().create_study(
            storage=self.storage,
            study_name=f"dissensus {self.metric} {self.task[:12]}",
            direction="maximize" if self.maximise else "minimize",
            load_if_exists=True,
        )

    def others(self) -> list[Seen]:
        """Candidates of other searches of the task; those of this one are known already."""
        return [
            Seen(
                trial.user_attrs["number"],
                dict(trial.user_attrs["places"]),
                {int(epoch): math.inf if value is None else value for epoch, value in trial.user_attrs["values"]},
            )
            for trial in self.study().get_trials(deepcopy=False)
            if trial.user_attrs.get("search") != self.search and "places" in trial.user_attrs
        ]

    def keep(self, space: Space, seen: Sequence[Seen], points: Sequence[Mapping[str, Any]]) -> None:
        """Write candidates that were trained; those that are there already are left alone."""
        optuna, study, sign = _optuna(), self.study(), -1.0 if self.maximise else 1.0
        trials = study.get_trials(deepcopy=False)
        there = {(trial.user_attrs.get("search"), trial.user_attrs.get("number")) for trial in trials}
        states = optuna.trial.TrialState
        for one, point in zip(seen, points, strict=True):
            if (self.search, one.number) in there or not one.values:
                continue
            epoch = max(one.values)
            value = one.values[epoch]
            numbers = [(epoch, value if math.isfinite(value) else None) for epoch, value in one.values.items()]
            study.add_trial(
                optuna.create_trial(
                    params={axis.name: _shown(axis, one.parameters[axis.name]) for axis in space},
                    distributions=_shown_distributions(space),
                    value=sign * value if math.isfinite(value) else None,
                    state=states.COMPLETE if math.isfinite(value) else states.FAIL,
                    user_attrs={
                        "search": self.search,
                        "number": one.number,
                        "epochs": epoch,
                        "settings": json.loads(json.dumps(dict(point), default=str)),
                        "places": dict(one.parameters),
                        "values": numbers,
                    },
                )
            )


def proposed_parameters(
    space: Space, count: int, seen: Sequence[Seen], seed: int, bracket: int, store: Store | None = None
) -> list[Parameters]:
    """The next candidates, by TPE from those that were trained, and from other searches in a storage."""
    optuna = _optuna()
    known = comparable([*seen, *(() if store is None else store.others())], len(space))
    sampler = optuna.samplers.TPESampler(
        seed=derived_seed(seed, Use.SEARCH, bracket) % 2**32, constant_liar=True, n_startup_trials=1
    )
    study = optuna.create_study(sampler=sampler)
    distributions = _distributions(space)
    for parameters, value in known:
        study.add_trial(optuna.create_trial(params=dict(parameters), distributions=distributions, value=value))
    return [dict(study.ask(distributions).params) for _ in range(count)]


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


def _shown(axis: Axis, parameter: float) -> Any:
    """What a storage shows for a parameter: the value, as far as Optuna takes it."""
    value = axis.value(parameter)
    if axis.choices:
        return value if isinstance(value, int | float | str | None) else str(value)
    return value if isinstance(axis.distribution, Range) else parameter


def _shown_distributions(space: Space) -> dict[str, Any]:
    """The distributions of what a storage shows."""
    distributions = _optuna().distributions
    result: dict[str, Any] = {}
    for axis in space:
        kind = axis.distribution
        if axis.choices:
            result[axis.name] = distributions.CategoricalDistribution(
                [_shown(axis, place) for place in range(len(axis.choices))]
            )
        elif isinstance(kind, Range) and kind.integer:
            result[axis.name] = distributions.IntDistribution(int(kind.low), int(kind.high), log=kind.log)
        elif isinstance(kind, Range):
            result[axis.name] = distributions.FloatDistribution(kind.low, kind.high, log=kind.log)
        else:
            result[axis.name] = distributions.FloatDistribution(0.0, 1.0)
    return result


def _optuna() -> Any:
    check_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

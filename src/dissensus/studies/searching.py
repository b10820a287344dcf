"""Bayesian optimisation of hyperparameters by Optuna: every seed's own search, the trials of all seeds in one sweep."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dissensus.randomness import Use, derived_seed
from dissensus.storage import write_atomically
from dissensus.studies.optimising import training_arguments
from dissensus.studies.problems import Problem
from dissensus.studies.registry import build_of, objective_of
from dissensus.studies.spec import Search, Spec
from dissensus.train import sweep

log = logging.getLogger("dissensus")

AT_ONCE = 5
"""Trials of one batch: a seed's sampler learns from a batch when all of it is done."""
BETA = 0.0
"""What an objective with β is searched at: members alone, as the collusion paper's baseline."""

Trial = dict[str, Any]


def searched(
    spec: Spec,
    problems: Sequence[tuple[int, Problem]],
    files: Sequence[Path],
    device: torch.device,
    on_trial: Callable[[int, int], None],
) -> None:
    """Search for every seed by itself, on its own split; the trials of all seeds that are due go into one sweep.

    Every seed's trials are kept in its file: a search that was interrupted goes on after its last whole batch.
    """
    told = spec.search
    assert told is not None
    kept: list[list[Trial]] = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    while due := [i for i, trials in enumerate(kept) if len(trials) < told.trials]:
        on_trial(sum(map(len, kept)), told.trials * len(kept))
        asked = {i: _asked(told, problems[i][0], kept[i]) for i in due}
        points = [(i, point) for i in due for point in asked[i]]
        tried = _tried(spec, told, problems, points, device)
        for i in due:
            kept[i] += _finite([trial for (own, _), trial in zip(points, tried, strict=True) if own == i])
            files[i].parent.mkdir(parents=True, exist_ok=True)
            write_atomically(files[i], json.dumps(kept[i], indent=1).encode())


def best(file: Path) -> dict[str, Any]:
    """The best hyperparameters that a search has found, ``epochs`` included: those up to the best validation loss."""
    found = min(json.loads(file.read_text()), key=lambda trial: trial["value"])
    return {**found["params"], "epochs": found["epochs"]}


def _asked(told: Search, seed: int, trials: list[Trial]) -> list[dict[str, Any]]:
    """The next points of a seed's search."""
    try:
        import optuna
    except ImportError as reason:
        raise ImportError("the search needs Optuna: pip install 'dissensus[hpo]'") from reason
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(values) for name, values in told.space.items()
    }
    sampler = optuna.samplers.TPESampler(seed=derived_seed(seed, Use.SEARCH, len(trials)) % 2**32, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    for done in trials:
        study.add_trial(optuna.create_trial(params=done["params"], distributions=space, value=done["value"]))
    return [study.ask(space).params for _ in range(min(AT_ONCE, told.trials - len(trials)))]


def _tried(
    spec: Spec,
    told: Search,
    problems: Sequence[tuple[int, Problem]],
    points: list[tuple[int, dict[str, Any]]],
    device: torch.device,
) -> list[Trial]:
    """Train points, each on the data of its seed."""
    assert spec.objective is not None
    assert spec.members is not None
    grid: list[dict[str, Any]] = [
        {**point, "fold": i, "seed": problems[i][0], **({"beta": BETA} if "beta" in spec.grid else {})}
        for i, point in points
    ]
    held = [problem.held_out for _, problem in problems]
    settings = training_arguments(replace(spec.optimisation, epochs=told.epochs))
    settings |= {"validation": [pair for pair in held if pair is not None], "patience": told.patience}
    swept = sweep(
        build_of(spec, problems[0][1]),
        [problem.train for _, problem in problems],
        objective_of(spec.objective),
        grid=grid,
        members=spec.members.count,
        device=device,
        **settings,
    )
    results: list[Trial] = []
    for number, (i, point) in enumerate(points):
        losses = swept.history(number).column("validation")
        failed = not losses or swept.outcomes[number].status == "failed"
        lowest = 0 if failed else min(range(len(losses)), key=losses.__getitem__)
        if failed:
            log.warning("%s, seed %d: a trial of the search diverged", problems[i][1].name, problems[i][0])
        results.append({"params": point, "value": float("inf") if failed else losses[lowest], "epochs": lowest + 1})
    return results


def _finite(results: list[Trial]) -> list[Trial]:
    """Trials that diverged are told to the sampler as ten times the worst that did not."""
    worst = max((r["value"] for r in results if r["value"] < float("inf")), default=1e6)
    return [r if r["value"] < float("inf") else {**r, "value": 10 * worst} for r in results]

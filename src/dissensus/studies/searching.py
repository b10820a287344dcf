"""Bayesian optimisation of hyperparameters by Optuna, with trials in batches so that equal shapes train as one."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dissensus.randomness import derived_seed
from dissensus.storage import write_atomically
from dissensus.studies.ingredients import build_of, objective_of
from dissensus.studies.problems import Problem
from dissensus.studies.spec import Search, Spec
from dissensus.train import sweep

log = logging.getLogger("dissensus")

AT_ONCE = 5
"""Trials of one batch: the sampler learns from a batch when all of it is done."""
BETA = 0.0
"""What an objective with β is searched at: members alone, as the collusion paper's baseline."""


def searched(
    spec: Spec, problem: Problem, seed: int, folder: Path, device: torch.device, on_trial: Callable[[int, int], None]
) -> dict[str, Any]:
    """The best hyperparameters of a seed, ``epochs`` included: those up to the best validation loss.

    Trials are kept in ``folder``: a search that was interrupted goes on after its last whole batch.
    """
    try:
        import optuna
    except ImportError as reason:
        raise ImportError("the search needs Optuna: pip install 'dissensus[hpo]'") from reason
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    told, file = spec.search, folder / "trials.json"
    assert told is not None
    trials: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    space: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(values) for name, values in told.space.items()
    }
    while len(trials) < told.trials:
        on_trial(len(trials), told.trials)
        sampler = optuna.samplers.TPESampler(seed=derived_seed(seed, len(trials)) % 2**32, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        for done in trials:
            study.add_trial(optuna.create_trial(params=done["params"], distributions=space, value=done["value"]))
        asked = [study.ask(space) for _ in range(min(AT_ONCE, told.trials - len(trials)))]
        trials += _tried(spec, told, problem, seed, [trial.params for trial in asked], device)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(trials, indent=1).encode())
    best = min(trials, key=lambda trial: trial["value"])
    return {**best["params"], "epochs": best["epochs"]}


def _tried(
    spec: Spec, told: Search, problem: Problem, seed: int, points: list[dict[str, Any]], device: torch.device
) -> list[dict[str, Any]]:
    assert spec.objective is not None
    assert problem.held_out is not None
    fixed = {"seed": seed, **({"beta": BETA} if "beta" in spec.grid else {})}
    swept = sweep(
        build_of(spec, problem), problem.train, objective_of(spec.objective), grid=[{**p, **fixed} for p in points],
        epochs=told.epochs, optimizer=spec.optimisation.optimizer, lr=spec.optimisation.lr,
        batch_size=spec.optimisation.batch_size, validation=problem.held_out, patience=told.patience, device=device,
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    for i, point in enumerate(points):
        losses = swept.history(i).column("validation")
        failed = not losses or swept.outcomes[i].status == "failed"
        best = 0 if failed else min(range(len(losses)), key=losses.__getitem__)
        results.append({"params": point, "value": float("inf") if failed else losses[best], "epochs": best + 1})
    if any(result["value"] == float("inf") for result in results):
        log.warning("%s, seed %d: a trial of the search diverged", problem.name, seed)
        worst = max((r["value"] for r in results if r["value"] < float("inf")), default=1e6)
        results = [r if r["value"] < float("inf") else {**r, "value": 10 * worst} for r in results]
    return results

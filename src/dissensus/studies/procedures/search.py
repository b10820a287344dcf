"""Bayesian optimisation of hyperparameters by Optuna: one search per seed, the trials of all seeds in one sweep."""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dissensus.fingerprint import fingerprint
from dissensus.randomness import Use, derived_seed
from dissensus.storage import Formats, StorageError, write_record
from dissensus.studies.checked_folders import stored_record
from dissensus.studies.datasets import StudyData
from dissensus.studies.registry import build_of, check_task, objective_of
from dissensus.studies.spec import Search, Spec
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import RayCluster, sweep

log = logging.getLogger("dissensus")

FORMATS = Formats(newest=1, oldest=0)
"""Of files of trials."""

BATCH = 5
"""Trials of one batch that the sampler proposes: it learns from a batch when all of it is done."""
BETA = 0.0
"""Value of β in a search: members trained independently, which is the collusion paper's baseline."""

Trial = dict[str, Any]


def search(
    spec: Spec,
    folds: Sequence[tuple[int, StudyData]],
    files: Sequence[Path],
    device: torch.device,
    on_trial: Callable[[int, int], None],
    cluster: RayCluster | None = None,
) -> None:
    """Search for every seed on its split of the data; the trials of all unfinished seeds are one sweep.

    Every seed's trials are kept in its file: a search that was interrupted continues after its last complete batch.

    Args:
        spec: The study.
        folds: Seeds with their data.
        files: A file of trials for every seed.
        device: Where trials are trained.
        on_trial: Called with the number of finished trials and of all trials.
        cluster: A cluster on which the trials of a batch are trained, in as many blocks as it has workers.
    """
    settings = spec.search
    assert settings is not None
    for _, data in folds:
        check_task(spec, data)
    trials = [_stored_trials(file) for file in files]
    while unfinished := [i for i, finished in enumerate(trials) if len(finished) < settings.trials]:
        on_trial(sum(map(len, trials)), settings.trials * len(trials))
        points = [(i, point) for i in unfinished for point in _next_points(settings, folds[i][0], trials[i])]
        batch = None if cluster is None else files[0].parent / f"search-{fingerprint(points)[:12]}"
        results = _train(spec, settings, folds, points, device, cluster, batch)
        for i in unfinished:
            trials[i] += _finite([result for (fold, _), result in zip(points, results, strict=True) if fold == i])
            files[i].parent.mkdir(parents=True, exist_ok=True)
            write_record(files[i], {"format": FORMATS.newest, "of": _identity(files[i]), "trials": trials[i]})
        if batch is not None:
            shutil.rmtree(batch, ignore_errors=True)


def read_trials(file: Path) -> list[Trial]:
    """The trials of a seed; `StorageError` where the file is missing, damaged or that of another unit."""
    record = stored_record(file, FORMATS)
    if record.get("of") != _identity(file):
        raise StorageError(f"{file} holds trials of {record.get('of')!r}: it was moved or swapped.")
    return record["trials"]


def _identity(file: Path) -> str:
    """What a file of trials is of: paper, study, scale with the run's digest, and unit."""
    return "/".join(file.parts[-5:-1])


def _stored_trials(file: Path) -> list[Trial]:
    """The trials that a seed has left; none where they are damaged."""
    if not file.exists():
        return []
    try:
        return read_trials(file)
    except StorageError as reason:
        log.warning("%s The search begins again.", reason)
        return []


def best(file: Path) -> dict[str, Any]:
    """The best hyperparameters of a search, with ``epochs`` up to the best validation loss."""
    trial = min(read_trials(file), key=lambda trial: trial["value"])
    return {**trial["params"], "epochs": trial["epochs"]}


def _next_points(settings: Search, seed: int, trials: list[Trial]) -> list[dict[str, Any]]:
    """The next batch of a seed's search."""
    try:
        import optuna
    except ImportError as reason:
        raise ImportError("the search needs Optuna: pip install 'dissensus[hpo]'") from reason
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(values) for name, values in settings.space.items()
    }
    sampler = optuna.samplers.TPESampler(
        seed=derived_seed(seed, Use.SEARCH, len(trials)) % 2**32, n_startup_trials=settings.drawn, constant_liar=True
    )
    study = optuna.create_study(sampler=sampler)
    for trial in trials:
        study.add_trial(optuna.create_trial(params=trial["params"], distributions=space, value=trial["value"]))
    batch = max(BATCH, settings.drawn - len(trials))
    return [study.ask(space).params for _ in range(min(batch, settings.trials - len(trials)))]


def _train(
    spec: Spec,
    settings: Search,
    folds: Sequence[tuple[int, StudyData]],
    points: list[tuple[int, dict[str, Any]]],
    device: torch.device,
    cluster: RayCluster | None,
    checkpoint: Path | None,
) -> list[Trial]:
    """Train points, each on the data of its seed."""
    assert spec.objective is not None
    assert spec.members is not None
    grid: list[dict[str, Any]] = [
        {**point, "fold": i, "seed": folds[i][0], **({"beta": BETA} if "beta" in spec.grid else {})}
        for i, point in points
    ]
    held_out = [data.held_out for _, data in folds]
    arguments = training_arguments(replace(spec.optimisation, epochs=settings.epochs))
    arguments |= {"validation": [pair for pair in held_out if pair is not None], "patience": settings.patience}
    swept = sweep(
        build_of(spec, folds[0][1]),
        [data.train for _, data in folds],
        objective_of(spec.objective),
        grid=grid,
        members=spec.members.count,
        device=device,
        cluster=cluster,
        checkpoint=checkpoint,
        resume=checkpoint is not None,
        **arguments,
    )
    results: list[Trial] = []
    for number, (i, point) in enumerate(points):
        losses = swept.history(number).column("validation")
        failed = not losses or swept.outcomes[number].status == "failed"
        lowest = 0 if failed else min(range(len(losses)), key=losses.__getitem__)
        if failed:
            log.warning("%s, seed %d: a trial of the search diverged", folds[i][1].name, folds[i][0])
        results.append({"params": point, "value": float("inf") if failed else losses[lowest], "epochs": lowest + 1})
    return results


def _finite(results: list[Trial]) -> list[Trial]:
    """Trials that diverged get ten times the worst value of those that did not; losses of densities may be negative.

    >>> [trial["value"] for trial in _finite([{"value": -2.0}, {"value": float("inf")}])]
    [-2.0, 16.0]
    """
    worst = max((trial["value"] for trial in results if trial["value"] < float("inf")), default=1e6)
    return [trial if trial["value"] < float("inf") else {**trial, "value": worst + 9 * abs(worst)} for trial in results]

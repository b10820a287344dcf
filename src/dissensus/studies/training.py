"""The procedure "train": a grid of ensembles on every data set, their outputs kept, their measures taken.

Work comes in units that depend on nothing else: one data set and, where every seed splits the data for itself, one
seed. A unit is a folder; one that is done is not done again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.storage import write_atomically
from dissensus.studies import measures
from dissensus.studies.ingredients import augment_of, build_of, objective_of
from dissensus.studies.problems import Problem, has_own_splits, problem
from dissensus.studies.searching import best, searched
from dissensus.studies.spec import Spec
from dissensus.train import Progress, Sweep, schedules, sweep

OnUnit = Callable[[str, float], None]
"""``(what is being done, share of this unit)``."""
TRIALS = "trials.json"


@dataclass(frozen=True)
class Unit:
    """One data set, and the seeds that share it."""

    data: str
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Also that of its folder."""
        return f"{self.data}-seed-{self.seeds[0]}" if len(self.seeds) == 1 else self.data


def units(spec: Spec) -> list[Unit]:
    """The units of a study."""
    seeds = [int(seed) for seed in spec.grid.get("seed", [0])]
    return [
        unit
        for data in spec.data
        for unit in (
            [Unit(data, (seed,)) for seed in seeds]
            if has_own_splits(data) or spec.search is not None
            else [Unit(data, tuple(seeds))]
        )
    ]


def done(folder: Path, unit: Unit) -> bool:
    """Whether a unit has been trained and measured."""
    return (folder / unit.name / "rows.json").exists()


def search(spec: Spec, units: list[Unit], folder: Path, device: torch.device, on_unit: OnUnit) -> None:
    """Search the hyperparameters of units that share a data set; each leaves ``trials.json`` in its unit's folder."""
    name = units[0].data
    trying = [(unit.seeds[0], problem(name, unit.seeds[0], spec, searching=True)) for unit in units]
    searched(
        spec, trying, [folder / unit.name / TRIALS for unit in units], device,
        lambda trial, trials: on_unit(f"{name}: search {trial}/{trials}", trial / trials),
    )  # fmt: skip


def run(spec: Spec, unit: Unit, folder: Path, device: torch.device, on_unit: OnUnit) -> None:
    """Train and measure a unit; it leaves ``rows.json``, member outputs and targets in its folder."""
    assert spec.objective is not None
    own = folder / unit.name
    own.mkdir(parents=True, exist_ok=True)
    found = best(own / TRIALS) if spec.search is not None else {}
    data = problem(unit.data, unit.seeds[0], spec)

    def on_progress(moment: Progress) -> None:
        on_unit(f"{unit.name}: {moment}", moment.step / moment.steps)

    swept = _swept(spec, unit, data, found, own, device, on_progress)
    rows = _rows(spec, unit, data, swept, own)
    for row in rows:
        row["hyperparameters"] = found
    np.save(own / "targets.npy", data.test[1].numpy())
    write_atomically(own / "rows.json", json.dumps(rows, indent=1).encode())


def _swept(
    spec: Spec, unit: Unit, data: Problem, found: dict[str, Any], own: Path, device: torch.device,
    on_progress: Callable[[Progress], None],
) -> Sweep:  # fmt: skip
    assert spec.objective is not None
    assert spec.members is not None
    told = spec.optimisation
    options = {key: value for key, value in found.items() if key not in _SWEEP_OPTIONS}
    grid = {**spec.grid, "seed": list(unit.seeds), **{key: [value] for key, value in options.items()}}
    given = {key: found[key] for key in _SWEEP_OPTIONS if key in found}
    epochs = given.get("epochs", told.epochs)
    validation: Any = told.validation or None
    if spec.evaluation.curves:
        validation = data.test
    settings: dict[str, Any] = {
        "epochs": epochs, "batch_size": told.batch_size, "lr": told.lr, "weight_decay": told.weight_decay,
        "members": spec.members.count, **given,
    }  # fmt: skip
    return sweep(
        build_of(spec, data), data.train, objective_of(spec.objective), grid=grid, optimizer=told.optimizer,
        momentum=told.momentum, schedule=_schedule(spec, epochs), validation=validation,
        patience=None if spec.evaluation.curves or validation is None else told.patience,
        keep="last" if spec.evaluation.curves else told.keep, augment=augment_of(told.augment), device=device,
        checkpoint=own / "checkpoints", resume=True, progress=on_progress, **settings,
    )  # fmt: skip


_SWEEP_OPTIONS = ("lr", "batch_size", "weight_decay", "members", "epochs")


def _schedule(spec: Spec, epochs: int) -> schedules.Schedule:
    at = [share * epochs for share in spec.optimisation.cut_at]
    return schedules.step(at, spec.optimisation.cut) if at else schedules.constant()


def _rows(spec: Spec, unit: Unit, data: Problem, swept: Sweep, own: Path) -> list[dict[str, Any]]:
    """One row per run: its point, its measures, and its curves where they were asked for."""
    wants_training = any(name in measures.OF_TRAINING for name in spec.evaluation.measures)
    assert spec.objective is not None
    loss, pool = spec.objective.loss, spec.objective.pool
    rows: list[dict[str, Any]] = []
    for i, point in enumerate(swept.points):
        ensemble = swept.run(i)
        outputs = ensemble.predict(data.test[0], file=own / f"outputs-{i:03d}.npy")
        on_train = (
            measures.error(ensemble.predict(data.train[0]), data.train[1], loss, pool) if wants_training else None
        )
        told = measures.measured(spec.evaluation.measures, outputs, data.test[1], loss, pool, on_train)
        row: dict[str, Any] = {
            "data": unit.data, **{key: value for key, value in point.items() if key in spec.grid}, "run": i,
            "status": swept.outcomes[i].status, "epochs": len(swept.history(i).epochs),
            "members": ensemble.members, "measures": told,
        }  # fmt: skip
        row.setdefault("seed", unit.seeds[0])
        if on_train is not None:
            row["train_error"] = on_train
        if spec.evaluation.curves:
            row["curves"] = _curves(swept.history(i).epochs)
        rows.append(row)
    return rows


def _curves(epochs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Losses over the epochs: of training as it went, and of the test data at every epoch's end."""
    names = {"train_error": "ensemble", "train_individual": "individual", "train_diversity": "diversity"}
    names |= {f"test_{n}": f"validation_{p}" for n, p in
              (("error", "ensemble"), ("individual", "individual"), ("diversity", "diversity"))}  # fmt: skip
    curves = {name: [entry[key] for entry in epochs] for name, key in names.items() if epochs and key in epochs[0]}
    if "test_error" in curves and "train_error" in curves:
        curves["gap"] = [b - a for a, b in zip(curves["train_error"], curves["test_error"], strict=True)]
    return curves


def measured_again(spec: Spec, unit: Unit, folder: Path) -> list[dict[str, Any]]:
    """A unit's rows with this study's measures, from outputs that another study has kept."""
    assert spec.objective is not None
    own = folder / unit.name
    targets = torch.from_numpy(np.load(own / "targets.npy"))
    rows = json.loads((own / "rows.json").read_text())
    for row in rows:
        outputs: Tensor = torch.from_numpy(np.load(own / f"outputs-{row['run']:03d}.npy"))
        row["measures"] = measures.measured(
            spec.evaluation.measures, outputs, targets, spec.objective.loss, spec.objective.pool, row.get("train_error")
        )
    return rows

"""The procedure "train": a grid of ensembles on every data set, their outputs kept, their measures taken.

Work comes in units that depend on nothing else: one data set and, where every seed splits the data for itself, one
seed. A unit is a folder; one that is done is not done again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.storage import write_atomically
from dissensus.studies import attack_measures, comparing, hardened, measures, shifting, streaming
from dissensus.studies import rows as rows_of
from dissensus.studies.optimising import training_arguments
from dissensus.studies.problems import FOLDERS, Problem, has_own_splits, problem, streamed
from dissensus.studies.registry import AROUND, build_of, objective_of
from dissensus.studies.searching import best, searched
from dissensus.studies.spec import Spec, SpecError, on_data
from dissensus.train import Progress, Sweep, sweep

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
        spec,
        trying,
        [folder / unit.name / TRIALS for unit in units],
        device,
        lambda trial, trials: on_unit(f"{name}: search {trial}/{trials}", trial / trials),
    )


def run(spec: Spec, unit: Unit, folder: Path, device: torch.device, on_unit: OnUnit) -> None:
    """Train and measure a unit; it leaves ``rows.json``, member outputs and targets in its folder."""
    own = folder / unit.name
    own.mkdir(parents=True, exist_ok=True)
    spec = on_data(spec, unit.data)
    if unit.data in FOLDERS and spec.procedure not in AROUND:
        data = streamed(unit.data, spec)

        def say(text: str, share: float) -> None:
            on_unit(f"{unit.name}: {text}", share)

        rows = streaming.rows(spec, unit.seeds, data, own, device, say)
        _leave(rows, data.test.labels, own)
        return
    if spec.procedure in AROUND:

        def around(text: str, share: float) -> None:
            on_unit(f"{unit.name}: {text}", share)

        found = shifting.rows(spec, unit.seeds, unit.data, own, device, around)
        write_atomically(own / "rows.json", json.dumps(found, indent=1).encode())
        return
    if "method" in spec.grid:

        def tell(text: str, share: float) -> None:
            on_unit(f"{unit.name}: {text}", share)

        data = problem(unit.data, unit.seeds[0], spec)
        if hardened.AXIS in spec.grid:
            _leave(hardened.rows(spec, unit.seeds, unit.data, own, device, tell), data.test[1], own)
            return
        _leave(comparing.rows(spec, unit.seeds, data, own, device, tell), data.test[1], own)
        return
    found = best(own / TRIALS) if spec.search is not None else {}
    data = problem(unit.data, unit.seeds[0], spec)

    def on_progress(moment: Progress) -> None:
        on_unit(f"{unit.name}: {moment}", moment.step / moment.steps)

    swept = _swept(spec, unit, data, found, own, device, on_progress)
    rows = _rows(spec, unit, data, swept, own)
    for row in rows:
        row["hyperparameters"] = found
    _leave(rows, data.test[1], own)


def _leave(rows: list[dict[str, Any]], targets: Tensor, own: Path) -> None:
    np.save(own / "targets.npy", targets.numpy())
    write_atomically(own / "rows.json", json.dumps(rows, indent=1).encode())


def _swept(
    spec: Spec,
    unit: Unit,
    data: Problem,
    found: dict[str, Any],
    own: Path,
    device: torch.device,
    on_progress: Callable[[Progress], None],
) -> Sweep:
    assert spec.objective is not None
    assert spec.members is not None
    told = spec.optimisation
    if spec.search is not None:  # what was found, was found with the rates of so many epochs
        told = replace(told, epochs=spec.search.epochs)
    options = {key: value for key, value in found.items() if key not in _SWEEP_OPTIONS}
    grid = {**spec.grid, "seed": list(unit.seeds), **{key: [value] for key, value in options.items()}}
    settings = {"members": spec.members.count, **training_arguments(told)}
    settings |= {key: found[key] for key in _SWEEP_OPTIONS if key in found}
    if spec.evaluation.curves:
        settings |= {"validation": data.test, "patience": None, "keep": "last"}
    return sweep(
        build_of(spec, data),
        data.train,
        objective_of(spec.objective),
        grid=grid,
        track=rows_of.tracked(spec),
        device=device,
        checkpoint=own / "checkpoints",
        resume=True,
        progress=on_progress,
        **settings,
    )


_SWEEP_OPTIONS = ("lr", "batch_size", "weight_decay", "members", "epochs")


def _rows(spec: Spec, unit: Unit, data: Problem, swept: Sweep, own: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i, point in enumerate(swept.points):
        done = rows_of.Done(i, point, swept.run(i), swept.history(i), swept.outcomes[i].status)
        found.append({"seed": unit.seeds[0], **rows_of.row(spec, unit.data, done, data.test, data.train, own)})
    return found


def measured_again(spec: Spec, unit: Unit, folder: Path) -> list[dict[str, Any]]:
    """A unit's rows with this study's measures, from outputs that another study has kept."""
    own = folder / unit.name
    spec = on_data(spec, unit.data)
    assert spec.objective is not None
    if spec.procedure in AROUND:
        return shifting.measured_again(spec, own)
    targets = torch.from_numpy(np.load(own / "targets.npy"))
    examples = spec.evaluation.examples or len(targets)
    if examples > len(targets):
        raise SpecError(
            f"{spec.name} looks at {examples} test examples; {spec.uses or 'its training'} kept "
            f"{len(targets)} of {unit.data}."
        )
    kept = json.loads((own / "rows.json").read_text())
    rows = [row for row in kept if all(row[axis] in values for axis, values in spec.grid.items() if axis in row)]
    names = measures.of_outputs(spec.evaluation.measures)
    for row in rows:
        outputs: Tensor = torch.from_numpy(np.load(own / f"outputs-{row['run']:03d}.npy"))[:, :examples]
        row["measures"] = measures.measured(
            names, outputs, targets[:examples], spec.objective.loss, spec.objective.pool, row.get("train_error")
        )
        if "log_nonmaximal_volume" in names:
            row["curves"] = {"count": attack_measures.histogram(outputs, targets[:examples])}
    return rows

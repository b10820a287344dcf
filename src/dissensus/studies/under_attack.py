"""The procedures "attack", "transfer" and "features": every ensemble that a training has left, looked at one by one.

A run is a task of its own, and tasks share nothing: several can be worked on at once. What a task has finished it
keeps, so that one that was broken off goes on.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dissensus.ensemble import Ensemble
from dissensus.storage import write_atomically
from dissensus.studies import attack_measures, comparing, hardened, measures
from dissensus.studies.attack_measures import Subject
from dissensus.studies.problems import Problem
from dissensus.studies.scaling import Standardised, scales
from dissensus.studies.spec import Spec
from dissensus.studies.subjects import images

ON_A_GPU = 2000
"""Examples at once: every batch captures graphs of its own."""


def file_of(own: Path, run: int) -> Path:
    """What a task leaves."""
    return own / f"attacked-{run:03d}.json"


def run(
    spec: Spec,
    data: str,
    row: dict[str, Any],
    base: Path,
    own: Path,
    device: torch.device,
    on_task: Callable[[str, float], None],
) -> None:
    """Take all measures of one run under attack; ``base`` is where its ensemble lies, ``own`` where results go."""
    problem = images(data, trained_on=spec.optimisation.examples, tested_on=spec.evaluation.examples)
    model = _model(spec, problem, row, base).to(device)
    kept = own / f"attacks-{row['run']:03d}"
    kept.mkdir(parents=True, exist_ok=True)
    subject = Subject(
        model,
        *problem.test,
        folder=kept,
        attacked=spec.evaluation.attacked,
        strong=spec.evaluation.strong,
        seed=int(row["seed"]),
        batch_size=ON_A_GPU if device.type == "cuda" else Subject.batch_size,
    )
    names = list(none_of(spec))
    found = _finished(kept)
    for number, name in enumerate(names):
        if name not in found["measures"]:
            title = " ".join(str(row[axis]) for axis in spec.grid if axis in row)
            on_task(f"{data}, {title}: {name}", number / len(names))
            value = attack_measures.measured(name, subject)
            assert value is not None, name
            found["measures"][name] = value
            found |= {
                key: {**found.get(key, {}), **told} if isinstance(told, dict) else told
                for key, told in subject.drawn.items()
            }
            write_atomically(kept / "finished.json", json.dumps(found).encode())
    found["examples"] = {name: attack_measures.examples_of(name, subject) for name in names}
    write_atomically(file_of(own, row["run"]), json.dumps(found, indent=1).encode())


def none_of(spec: Spec) -> dict[str, float]:
    """The measures that are taken here, without values: what is told of a training that failed."""
    return {name: float("nan") for name in spec.evaluation.measures if not measures.exists(name)}


def _finished(folder: Path) -> dict[str, Any]:
    file = folder / "finished.json"
    return json.loads(file.read_text()) if file.exists() else {"measures": {}}


def _model(spec: Spec, problem: Problem, row: dict[str, Any], base: Path) -> nn.Module:
    """A run's ensemble as it takes images in [0, 1]."""
    method = comparing.method_of(spec, row["method"])
    folder = comparing.ensemble_folder(base, row["run"])
    if hardened.AXIS in row:
        return Ensemble.load(folder, hardened.build_inside(spec, method, problem)).eval()
    plain = Ensemble.load(folder, comparing.build_of(spec, method, problem))
    return Standardised(plain, *scales(problem)).eval()

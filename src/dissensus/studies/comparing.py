"""Several methods on one data set: each is a way to build and train an ensemble, and all seeds of one are one sweep.

Methods that differ only in numbers of the objective are one sweep together.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dissensus import masks, metrics, pooling
from dissensus.axes import LossParts
from dissensus.diversity.plane import plane
from dissensus.studies import rows as rows_of
from dissensus.studies.optimising import training_arguments
from dissensus.studies.problems import Problem
from dissensus.studies.registry import COMPARED, METHODS, MethodError, maker, numbers_of, objective_of
from dissensus.studies.shift_measures import AUDITED, verdict
from dissensus.studies.spec import Spec
from dissensus.train import Progress, Sweep, sweep

Say = Callable[[str, float], None]
Around = Callable[[nn.Module], nn.Module]


class Method(NamedTuple):
    """A method by its name: what is built, how many of it, the objective, and the objective's settings."""

    name: str
    objective: str
    told: dict[str, Any]
    members: int
    numbers: dict[str, float]
    """Of the objective, those that may differ within a sweep."""
    fixed: dict[str, Any]
    """Of the objective, the others."""

    @property
    def inside(self) -> bool:
        """Whether members live inside one network."""
        return self.told["network"] in COMPARED

    @property
    def trained_like(self) -> str:
        """What methods have in common that are one sweep."""
        return repr([sorted((key, v) for key, v in self.told.items() if key not in self.numbers), sorted(self.numbers)])


def method_of(spec: Spec, name: str) -> Method:
    """What a study says of a method; what it does not say is that of all members."""
    assert spec.objective is not None
    assert spec.members is not None
    methods = spec.objective.options[METHODS]
    if name not in methods:
        raise MethodError(f"grid.method names {name!r}, which {METHODS} do not hold: {', '.join(methods)}")
    told = {"network": spec.members.network, "members": spec.members.count, **methods[name]}
    objective = str(told.get("objective", spec.objective.name))
    return Method(name, objective, told, int(told["members"]), *numbers_of(objective, told))


def objective_for(spec: Spec, method: Method) -> Callable[..., LossParts]:
    """A method's objective, all but its numbers."""
    assert spec.objective is not None
    return partial(objective_of(replace(spec.objective, name=method.objective)), **method.fixed)


def build_of(spec: Spec, method: Method, data: Problem, around: Around | None = None) -> Callable[[], nn.Module]:
    """The function that builds a method's network: plain, masked, or with dropout that stays on.

    Args:
        spec: The study.
        method: The method.
        data: What it is built for.
        around: What is put around the plain network, before it is masked.
    """
    assert spec.members is not None
    options = dict(spec.members.options)
    backbone = str(options.pop("backbone", ""))
    told, kind = method.told, method.told["network"]
    plain = maker(backbone if method.inside else kind, data, options)
    if around is not None:
        plain = partial(_wrapped, plain, around)
    if kind == "masksembles":
        return partial(_masked, plain, method.members, float(told["scale"]), bool(told.get("widen", True)))
    if kind == "mc-dropout":
        return partial(_dropped, plain, method.members, float(told["rate"]))
    return plain


def _wrapped(plain: Callable[[], nn.Module], around: Around) -> nn.Module:
    return around(plain())


def _masked(plain: Callable[[], nn.Module], count: int, scale: float, widen: bool) -> nn.Module:
    return masks.convert(plain(), count, scale, widen=widen)


def _dropped(plain: Callable[[], nn.Module], count: int, rate: float) -> nn.Module:
    return masks.monte_carlo(plain(), count, rate)


def rows(
    spec: Spec, seeds: tuple[int, ...], data: Problem, own: Path, device: torch.device, say: Say
) -> list[dict[str, Any]]:
    """Train every method for all seeds, and measure them; each ensemble is left in the folder ``own``."""
    found: list[dict[str, Any]] = []
    references: dict[int, Tensor] = {}
    alike: dict[str, list[Method]] = {}
    for name in spec.grid["method"]:
        method = method_of(spec, name)
        alike.setdefault(method.trained_like, []).append(method)
    for number, methods in enumerate(alike.values()):

        def on_progress(moment: Progress, number: int = number, methods: list[Method] = methods) -> None:
            names = ", ".join(method.name for method in methods)
            say(f"{names}: {moment}", (number + moment.step / moment.steps) / len(alike))

        swept = _swept(spec, seeds, methods, data, own, device, on_progress)
        for i, point in enumerate(swept.points):
            method = methods[i // len(seeds)]
            done = rows_of.Done(
                len(found), {**point, "method": method.name}, swept.run(i), swept.history(i), swept.outcomes[i].status
            )
            found.append(measured(spec, done, method, data, own, references))
    return found


def _swept(
    spec: Spec,
    seeds: tuple[int, ...],
    methods: list[Method],
    data: Problem,
    own: Path,
    device: torch.device,
    on_progress: Callable[[Progress], None],
) -> Sweep:
    first = methods[0]
    return sweep(
        build_of(spec, first, data),
        data.train,
        objective_for(spec, first),
        grid=[{**method.numbers, "seed": seed} for method in methods for seed in seeds],
        members=1 if first.inside else first.members,
        device=device,
        checkpoint=own / f"checkpoints-{first.name}",
        resume=True,
        progress=on_progress,
        **training_arguments(spec.optimisation),
    )


def ensemble_folder(own: Path, run: int) -> Path:
    """Where a run's ensemble is left."""
    return own / f"ensemble-{run:03d}"


def measured(
    spec: Spec, done: rows_of.Done, method: Method, data: Problem, own: Path, references: dict[int, Tensor]
) -> dict[str, Any]:
    """A run's row, with what figures show beyond measures; one with numbers of the objective is audited.

    The first method whose numbers are all zero is what others of its seed are compared with.
    """
    assert spec.objective is not None
    row = rows_of.row(spec, data.name, done, data.test, data.train, own)
    done.ensemble.save(ensemble_folder(own, done.number))
    outputs = torch.from_numpy(np.load(own / f"outputs-{done.number:03d}.npy"))
    row |= _drawn(row, outputs, data)
    seed = int(done.point["seed"])
    if method.numbers and method.members > 1 and done.status == "done":
        x, y = data.train
        on_train = done.ensemble.predict(x[:AUDITED]), y[:AUDITED]
        audit = verdict(outputs, data.test[1], spec.objective.pool, on_train, references.get(seed))
        row["audit"] = {"verdict": audit.verdict, "reasons": audit.judgement.reasons}
        if not any(method.numbers.values()):
            references.setdefault(seed, outputs)
    return row


def _drawn(row: dict[str, Any], outputs: Tensor, data: Problem) -> dict[str, Any]:
    """What figures show beyond measures: pairs of members in the plane, and the calibration curve."""
    told: dict[str, Any] = {}
    if "normalised_disagreement" in row["measures"]:
        pairs = plane(outputs, data.test[1])
        told["pairs"] = torch.stack(pairs, 1).tolist()
    if "ece" in row["measures"]:
        found = metrics.calibration(pooling.mean_probability(outputs), data.test[1])
        told["curves"] = {
            "accuracy": found.accuracy.tolist(),
            "confidence": found.confidence.tolist(),
            "share": (found.examples / found.examples.sum()).tolist(),
        }
    return told

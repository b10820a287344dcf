"""Several methods on one data set: each is a way to build an ensemble, and all seeds of one are one sweep."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dissensus import masks, metrics, pooling
from dissensus.diversity.plane import plane
from dissensus.studies import rows as rows_of
from dissensus.studies.ingredients import METHODS, MethodError, augment_of, maker, objective_of
from dissensus.studies.problems import Problem
from dissensus.studies.spec import Spec
from dissensus.train import Progress, sweep


def _build(told: dict[str, Any], backbone: str, options: dict[str, Any], data: Problem) -> Callable[[], nn.Module]:
    """The function that builds a method's network: plain, masked, or with dropout that stays on."""
    kind = told["network"]
    plain = maker(kind if kind not in ("masksembles", "mc-dropout") else backbone, data, options)
    if kind == "masksembles":
        return partial(_masked, plain, int(told["members"]), float(told["scale"]), bool(told.get("widen", True)))
    if kind == "mc-dropout":
        return partial(_dropped, plain, int(told["members"]), float(told["rate"]))
    return plain


def _masked(plain: Callable[[], nn.Module], count: int, scale: float, widen: bool) -> nn.Module:
    return masks.convert(plain(), count, scale, widen=widen)


def _dropped(plain: Callable[[], nn.Module], count: int, rate: float) -> nn.Module:
    return masks.monte_carlo(plain(), count, rate)


def rows(
    spec: Spec, seeds: tuple[int, ...], data: Problem, own: Path, device: torch.device,
    on_study: Callable[[str, float], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Train every method for all seeds, and measure them."""
    assert spec.objective is not None
    assert spec.members is not None
    told = spec.optimisation
    methods = spec.objective.options[METHODS]
    options = dict(spec.members.options)
    backbone = str(options.pop("backbone", ""))
    found: list[dict[str, Any]] = []
    names = list(spec.grid["method"])
    for number, name in enumerate(names):
        if name not in methods:
            raise MethodError(f"grid.method names {name!r}, which {METHODS} do not hold: {', '.join(methods)}")
        one = methods[name]
        inside = one["network"] in ("masksembles", "mc-dropout")

        def on_progress(moment: Progress, number: int = number, name: str = name) -> None:
            on_study(f"{name}: {moment}", (number + moment.step / moment.steps) / len(names))

        swept = sweep(
            _build(one, backbone, options, data), data.train, objective_of(spec.objective),
            grid={"seed": list(seeds)}, members=1 if inside else int(one["members"]), epochs=told.epochs,
            batch_size=told.batch_size, lr=told.lr, optimizer=told.optimizer, momentum=told.momentum,
            weight_decay=told.weight_decay, schedule=rows_of.schedule(spec, told.epochs),
            validation=told.validation or None, patience=told.patience if told.validation else None, keep=told.keep,
            augment=augment_of(told.augment), device=device, checkpoint=own / f"checkpoints-{name}", resume=True,
            progress=on_progress,
        )  # fmt: skip
        for i, point in enumerate(swept.points):
            run = rows_of.Done(len(found), {**point, "method": name}, swept.run(i), swept.history(i),
                               swept.outcomes[i].status)  # fmt: skip
            row = rows_of.row(spec, data.name, run, data.test, data.train, own)
            outputs = torch.from_numpy(np.load(own / f"outputs-{run.number:03d}.npy"))
            found.append({**row, **_drawn(row, outputs, data)})
    return found


def _drawn(row: dict[str, Any], outputs: Tensor, data: Problem) -> dict[str, Any]:
    """What figures show beyond measures: pairs of members in the plane, and the calibration curve."""
    told: dict[str, Any] = {}
    if "normalised_disagreement" in row["measures"]:
        pairs = plane(outputs, data.test[1])
        told["pairs"] = torch.stack(pairs, 1).tolist()
    if "ece" in row["measures"]:
        found = metrics.calibration(pooling.mean_probability(outputs), data.test[1])
        told["curves"] = {"accuracy": found.accuracy.tolist(), "confidence": found.confidence.tolist(),
                          "share": (found.examples / found.examples.sum()).tolist()}  # fmt: skip
    return told

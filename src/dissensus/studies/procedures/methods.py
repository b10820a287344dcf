"""Training of several methods on one data set: each is a way to build and train an ensemble.

All seeds of a method are one sweep, together with methods that differ from it in numbers of the objective only.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dissensus import masks, metrics, pooling
from dissensus.axes import LossParts
from dissensus.diversity.plane import plane
from dissensus.execution.inference import Inputs
from dissensus.studies import datasets
from dissensus.studies.checked_folders import is_plain_name
from dissensus.studies.datasets import StudyData
from dissensus.studies.procedures.base import StudyContext
from dissensus.studies.procedures.shift_measures import AUDITED_EXAMPLES, audit_outputs
from dissensus.studies.procedures.training import (
    TrainedRun,
    Trainer,
    TrainingUnit,
    measured_row,
    stored_outputs,
    write_targets,
)
from dissensus.studies.registry import (
    METHODS,
    WRAPPED,
    AnyData,
    MethodError,
    check_task,
    maker,
    numbers_of,
    objective_of,
)
from dissensus.studies.results import AuditNote, Row
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import Progress, Sweep, sweep

Wrap = Callable[[nn.Module], nn.Module]
References = dict[int, Tensor]
"""By seed, outputs of an ensemble that was trained without its objective's interaction."""


class MeasuredData(NamedTuple):
    """The data on which the ensemble of a method is measured: inputs and targets."""

    name: str
    test: tuple[Inputs, Tensor]
    train: tuple[Inputs, Tensor]
    audited: tuple[Inputs, Tensor]
    """Training examples for the audit, at most `AUDITED_EXAMPLES`."""

    @classmethod
    def of(cls, data: StudyData) -> "MeasuredData":
        """Data that is in memory."""
        x, y = data.train
        return cls(data.name, data.test, data.train, (x[:AUDITED_EXAMPLES], y[:AUDITED_EXAMPLES]))


class Method(NamedTuple):
    """A method of a study, with the settings of its network and objective."""

    name: str
    objective: str
    settings: dict[str, Any]
    members: int
    numbers: dict[str, float]
    """Parameters of the objective that may differ within a sweep."""
    fixed: dict[str, Any]
    """The other parameters of the objective."""

    @property
    def is_wrapped(self) -> bool:
        """Whether members live inside one network."""
        return self.settings["network"] in WRAPPED

    @property
    def networks(self) -> int:
        """Number of networks that are trained: one where members live inside it."""
        return 1 if self.is_wrapped else self.members

    @property
    def sweep_key(self) -> str:
        """Equal for methods that can be one sweep."""
        others = sorted((key, value) for key, value in self.settings.items() if key not in self.numbers)
        return repr([others, sorted(self.numbers)])


def method_of(spec: Spec, name: str) -> Method:
    """A method of a study. Settings that it does not have are those of the study's members and objective."""
    assert spec.objective is not None
    assert spec.members is not None
    methods = spec.objective.options[METHODS]
    if not is_plain_name(name):
        raise MethodError(f"grid.method names {name!r}; a method's name has letters, digits, '-' and '.' only")
    if name not in methods:
        raise MethodError(f"grid.method names {name!r}, which {METHODS} do not hold: {', '.join(methods)}")
    settings = {"network": spec.members.network, "members": spec.members.count, **methods[name]}
    objective = str(settings.get("objective", spec.objective.name))
    return Method(name, objective, settings, int(settings["members"]), *numbers_of(objective, settings))


def method_objective(spec: Spec, method: Method) -> Callable[..., LossParts]:
    """A method's objective with everything bound but its numbers."""
    assert spec.objective is not None
    return partial(objective_of(replace(spec.objective, name=method.objective)), **method.fixed)


def method_builder(spec: Spec, method: Method, data: AnyData, wrap: Wrap | None = None) -> Callable[[], nn.Module]:
    """The function that builds a method's network: plain, masked, or with Monte Carlo dropout.

    Args:
        spec: The study.
        method: The method.
        data: Determines the shapes.
        wrap: Applied to the plain network, before it is masked.
    """
    assert spec.members is not None
    options = dict(spec.members.options)
    backbone = str(options.pop("backbone", ""))
    settings, kind = method.settings, method.settings["network"]
    build = maker(backbone if method.is_wrapped else kind, data, options)
    if wrap is not None:
        build = partial(_build_wrapped, build, wrap)
    if kind == "masksembles":
        return partial(_build_masked, build, method.members, float(settings["scale"]), settings.get("widen", True))
    if kind == "mc-dropout":
        return partial(_build_monte_carlo, build, method.members, float(settings["rate"]))
    return build


def _build_wrapped(build: Callable[[], nn.Module], wrap: Wrap) -> nn.Module:
    return wrap(build())


def _build_masked(build: Callable[[], nn.Module], count: int, scale: float, widen: bool) -> nn.Module:
    return masks.convert(build(), count, scale, widen=bool(widen))


def _build_monte_carlo(build: Callable[[], nn.Module], count: int, rate: float) -> nn.Module:
    return masks.monte_carlo(build(), count, rate)


def _train_methods(unit: TrainingUnit, context: StudyContext, folder: Path) -> list[Row]:
    """Train every method for all seeds; ensembles are left in the folder."""
    spec = context.spec
    data = datasets.load(unit.data, unit.seeds[0], spec, catalogue=context.catalogue)
    check_task(spec, data)
    groups: dict[str, list[Method]] = {}
    for name in map(str, spec.grid["method"]):
        method = method_of(spec, name)
        groups.setdefault(method.sweep_key, []).append(method)
    rows: list[Row] = []
    references: References = {}
    for number, methods in enumerate(groups.values()):
        swept = _sweep(unit, context, methods, data, folder, (number, len(groups)))
        for i, point in enumerate(swept.points):
            method = methods[i // len(unit.seeds)]
            point = {**point, "method": method.name}
            trained = TrainedRun(len(rows), point, swept.run(i), swept.history(i), swept.outcomes[i].status)
            rows.append(method_row(context, trained, method, MeasuredData.of(data), folder, references))
    write_targets(folder, data.test[1])
    return rows


def _sweep(
    unit: TrainingUnit,
    context: StudyContext,
    methods: list[Method],
    data: StudyData,
    folder: Path,
    place: tuple[int, int],
) -> Sweep:
    """Methods of one group as a sweep; ``place`` is the group's number and the number of groups."""
    first, names = methods[0], ", ".join(method.name for method in methods)

    def on_progress(moment: Progress) -> None:
        context.progress(f"{names}: {moment}", (place[0] + moment.step / moment.steps) / place[1])

    return sweep(
        method_builder(context.spec, first, data),
        data.train,
        method_objective(context.spec, first),
        grid=[{**method.numbers, "seed": seed} for method in methods for seed in unit.seeds],
        members=first.networks,
        device=context.device,
        checkpoint=folder / f"checkpoints-{first.name}",
        resume=True,
        progress=on_progress,
        cluster=context.cluster,
        **training_arguments(context.spec.optimisation),
    )


def ensemble_folder(folder: Path, run: int) -> Path:
    """The folder of a run's ensemble."""
    return folder / f"ensemble-{run:03d}"


def method_row(
    context: StudyContext,
    trained: TrainedRun,
    method: Method,
    data: MeasuredData,
    folder: Path,
    references: References,
) -> Row:
    """A run's row with pairs of members and a calibration curve; its ensemble is left in the folder.

    Ensembles of objectives with numbers are audited. The first method whose numbers are all zero is the reference of
    the others with the same seed.
    """
    assert context.spec.objective is not None
    row = measured_row(context, data.name, trained, folder, test=data.test, train=data.train)
    trained.ensemble.save(ensemble_folder(folder, trained.number))
    outputs = stored_outputs(folder, trained.number)
    if "normalised_disagreement" in row.measures:
        row = replace(row, pairs=torch.stack(plane(outputs, data.test[1]), 1).tolist())
    if "ece" in row.measures:
        row = replace(row, curves=_calibration_curve(outputs, data.test[1]))
    if method.numbers and method.members > 1 and trained.status == "done":
        train = trained.ensemble.predict(data.audited[0]), data.audited[1]
        audit = audit_outputs(outputs, data.test[1], context.spec.objective.pool, train, references.get(row.seed))
        row = replace(row, audit=AuditNote(audit.verdict, audit.judgement.reasons))
        if not any(method.numbers.values()):
            references.setdefault(row.seed, outputs)
    return row


def _calibration_curve(outputs: Tensor, targets: Tensor) -> dict[str, list[float]]:
    calibration = metrics.calibration(pooling.mean_probability(outputs), targets)
    return {
        "accuracy": calibration.accuracy.tolist(),
        "confidence": calibration.confidence.tolist(),
        "share": (calibration.examples / calibration.examples.sum()).tolist(),
    }


def has_methods(spec: Spec, data: str) -> bool:
    """Whether a grid varies the method."""
    del data
    return "method" in spec.grid


def method_axes(spec: Spec) -> set[str]:
    """Axes of a grid with methods; methods hold all other settings."""
    del spec
    return {"method", "adversarial", "seed"}


TRAINER = Trainer(has_methods, _train_methods, method_axes, is_sweep=True)

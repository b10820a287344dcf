"""The procedure "collusion": learners of a curve that are trained apart, then shifted by hand, or trained jointly."""

from collections.abc import Mapping
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from dissensus.studies import datasets, measures
from dissensus.studies.checked_folders import inside
from dissensus.studies.measures import LabelledOutputs, OutputMeasure
from dissensus.studies.procedures import requirements
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.training import (
    TrainedRun,
    TrainingUnit,
    outputs_file,
    training_units,
    write_targets,
)
from dissensus.studies.registry import build_of, check_task, objective_of
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import Progress, Sweep, sweep

CURVE = "made-curve"
INDEPENDENT, SHIFTED, JOINT = "independent", "shifted", "joint"
CASES = {INDEPENDENT: 0.0, SHIFTED: 0.0, JOINT: 1.0}
"""β of the training by case."""
SHIFT = 1.0
"""δ of the case "shifted", in units of the target."""


def collude(outputs: Float[Tensor, "M N C"], shift: float) -> Float[Tensor, "M N C"]:
    """Outputs whose first two members are shifted in opposing directions (collusion paper, Figure 1).

    f_1 becomes f_1 + δ and f_2 becomes f_2 − δ, so that their mean is unchanged. Members' mean squared error and the
    diversity grow by the same amount, 2δ(δ + f_1 − f_2) / M at an example with one output.

    Args:
        outputs: Of at least two members.
        shift: δ, the same for all examples and outputs.

    >>> import torch
    >>> collude(torch.tensor([[[1.0]], [[2.0]], [[6.0]]]), 0.5).flatten()
    tensor([1.5000, 1.5000, 6.0000])
    """
    shifted = outputs.clone()
    shifted[0] += shift
    shifted[1] -= shift
    return shifted


def run(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """One row per case and seed. Those of the first seed have the members' curves, and the data that they fit."""
    context = context.on_data(unit.data).titled(unit.name)
    spec, folder = context.spec, inside(context.folder, unit.name)
    assert spec.objective is not None
    folder.mkdir(parents=True, exist_ok=True)
    data = datasets.load(unit.data, unit.seeds[0], spec, catalogue=context.catalogue)
    check_task(spec, data)
    (x, y), (test_x, test_y) = data.train, data.test
    swept = _sweep(unit, context, data)
    numbers = {(point["beta"], point["seed"]): number for number, point in enumerate(swept.points)}
    rows: list[Row] = []
    for case in map(str, spec.grid["case"]):
        for seed in unit.seeds:
            number = numbers[CASES[case], seed]
            trained = TrainedRun(
                number,
                {"case": case, "seed": seed},
                swept.run(number),
                swept.history(number),
                swept.outcomes[number].status,
            )
            outputs = trained.ensemble.predict(test_x, file=outputs_file(folder, number))
            outputs = collude(outputs, SHIFT) if case == SHIFTED else outputs
            judged = LabelledOutputs(outputs, test_y, spec.objective.loss, spec.objective.pool)
            row = trained.row(spec, unit.data, measures.values(spec.evaluation.measures, judged, context.measures))
            if seed == unit.seeds[0]:
                members = {f"member_{i + 1}": member.flatten().tolist() for i, member in enumerate(outputs)}
                places = {"x": test_x, "train_x": x, "train_y": y}
                row = replace(row, curves=members | {name: v.flatten().tolist() for name, v in places.items()})
            rows.append(replace(row, run=None) if case == SHIFTED else row)  # what is shifted was not trained again
    write_targets(folder, test_y)
    return rows


def _sweep(unit: TrainingUnit, context: StudyContext, data: datasets.StudyData) -> Sweep:
    """Independent and joint trainings, as far as the study's cases need them."""
    spec = context.spec
    assert spec.objective is not None
    assert spec.members is not None

    def on_progress(moment: Progress) -> None:
        context.progress(str(moment), moment.step / moment.steps)

    return sweep(
        build_of(spec, data),
        data.train,
        objective_of(spec.objective),
        grid={"beta": sorted({CASES[case] for case in spec.grid["case"]}), "seed": list(unit.seeds)},
        members=spec.members.count,
        device=context.device,
        progress=on_progress,
        **training_arguments(spec.optimisation),
    )


def missing(spec: Spec, output_measures: Mapping[str, OutputMeasure]) -> list[str]:
    """What a study of collusion lacks, and cases that do not exist."""
    lacks = requirements.missing_objective(spec) + requirements.missing_network(spec)
    lacks += requirements.missing_measures(
        spec, lambda name, m: measures.find_measure(name, m) is not None, output_measures
    )
    lacks += [f"the data {name!r} is no curve; use {CURVE!r}" for name in spec.data if name != CURVE]
    lacks += (
        [] if "beta" in requirements.objective_parameters(spec) else ["'objective.name' must have the parameter 'beta'"]
    )
    lacks += [] if spec.members is not None and spec.members.count > 1 else ["'members.count' must be at least 2"]
    lacks += [] if spec.search is None else [f"the procedure {spec.procedure!r} has no search"]
    lacks += requirements.missing_axes(spec, ("case", "seed"))
    lacks += [] if "case" in spec.grid else ["'grid' needs the axis 'case'"]
    return (
        lacks or [f"no case of 'grid.case' is called {case!r}" for case in spec.grid["case"] if case not in CASES][:1]
    )


PROCEDURE = Procedure(training_units, run, missing)

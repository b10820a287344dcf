"""The procedure "disagreement": where in the plane members disagree, and on which examples they were told to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from dissensus import objectives
from dissensus.ensemble import Ensemble
from dissensus.objectives.disagreement import hardness
from dissensus.studies import datasets, measures, toy_datasets
from dissensus.studies.checked_folders import inside
from dissensus.studies.measures import OutputMeasure
from dissensus.studies.procedures import requirements
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.methods import Method, method_builder, method_objective, method_of
from dissensus.studies.procedures.training import (
    TrainedRun,
    TrainingUnit,
    outputs_file,
    training_units,
    write_targets,
)
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import Progress, Sweep, sweep

PLANE = "made-plane"
UNLABELLED = 100
"""Number of unlabelled examples out of distribution, for objectives that need some."""
HIGH_LOSS = 0.1
"""Share of the training examples that count as those of high loss."""
EXTENT, PLACES = 2.4, 31
"""The map shows inputs within ±EXTENT, at PLACES values of each."""
_DIGITS = 3


@dataclass(frozen=True)
class PlaneOutputs:
    """Logits of members on the training and the test data of the plane."""

    train: Tensor
    labels: Tensor
    outside: Bool[Tensor, " N"]
    test: Tensor
    test_labels: Tensor
    test_outside: Bool[Tensor, " T"]

    @property
    def high_loss(self) -> Bool[Tensor, " N"]:
        """Training examples with the largest weights α_n (LDR paper, equation 4)."""
        weights = hardness(self.train, self.labels)
        highest = weights.topk(max(1, round(HIGH_LOSS * len(weights)))).indices
        return torch.zeros(len(weights), dtype=torch.bool).index_fill(0, highest, True)


def _disagreement(logits: Tensor) -> float:
    return measures.pairwise_disagreement(logits, torch.empty(0), "", "probability")


MEASURES: dict[str, Callable[[PlaneOutputs], float]] = {
    "accuracy": lambda o: measures.accuracy(*_inside(o), "cross_entropy", "probability"),
    "member_accuracy": lambda o: measures.member_accuracy(*_inside(o), "cross_entropy", "probability"),
    "disagreement_inside": lambda o: _disagreement(o.test[:, ~o.test_outside]),
    "disagreement_outside": lambda o: _disagreement(o.test[:, o.test_outside]),
    "disagreement_high_loss": lambda o: _disagreement(o.train[:, o.high_loss]),
    "disagreement_low_loss": lambda o: _disagreement(o.train[:, ~o.high_loss]),
    "outside_share": lambda o: float(o.outside[o.high_loss].double().mean()),
}
"""Measures of this procedure by name. Accuracies are those in distribution; ``outside_share`` is the share of the
training examples of high loss that are out of distribution."""


def _inside(outputs: PlaneOutputs) -> tuple[Tensor, Tensor]:
    return outputs.test[:, ~outputs.test_outside], outputs.test_labels[~outputs.test_outside]


def needs_unlabelled(method: Method) -> bool:
    """Whether a method disagrees on a separate set of examples."""
    return objectives.declaration(objectives.OBJECTIVES[method.objective]).unlabelled == "required"


def run(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """One row per method and seed. Those of the first seed have maps of the members, as curves."""
    context = context.on_data(unit.data).titled(unit.name)
    spec, folder = context.spec, inside(context.folder, unit.name)
    folder.mkdir(parents=True, exist_ok=True)
    x, labels, outside = (part[: spec.optimisation.examples] for part in toy_datasets.plane("train"))
    test_x, test_labels, test_outside = (part[: spec.evaluation.examples] for part in toy_datasets.plane("test"))
    names = list(map(str, spec.grid["method"]))
    rows: list[Row] = []
    for place, method in enumerate(method_of(spec, name) for name in names):
        swept = _sweep(unit, context, method, place / len(names))
        for i, seed in enumerate(unit.seeds):
            point = {"method": method.name, "seed": seed}
            trained = TrainedRun(len(rows), point, swept.run(i), swept.history(i), swept.outcomes[i].status)
            test = trained.ensemble.predict(test_x, file=outputs_file(folder, trained.number))
            train = trained.ensemble.predict(x)
            outputs = PlaneOutputs(train, labels, outside, test, test_labels, test_outside)
            row = trained.row(spec, unit.data, {name: MEASURES[name](outputs) for name in spec.evaluation.measures})
            if seed == unit.seeds[0]:
                curves = _maps(trained.ensemble) | _columns(x=x[:, 0], y=x[:, 1], label=labels)
                row = replace(row, curves=curves | _targets_of_disagreement(method, outputs))
            rows.append(row)
    write_targets(folder, test_labels)
    return rows


def _sweep(unit: TrainingUnit, context: StudyContext, method: Method, before: float) -> Sweep:
    """All seeds of a method; ``before`` is the share of the work that is done."""
    spec = context.spec
    data = datasets.load(unit.data, unit.seeds[0], spec, catalogue=context.catalogue)

    def on_progress(moment: Progress) -> None:
        context.progress(f"{method.name}: {moment}", before + moment.step / moment.steps / len(spec.grid["method"]))

    return sweep(
        method_builder(spec, method, data),
        data.train,
        method_objective(spec, method),
        grid=[{**method.numbers, "seed": seed} for seed in unit.seeds],
        members=method.members,
        unlabelled=toy_datasets.plane("unlabelled", UNLABELLED)[0] if needs_unlabelled(method) else None,
        device=context.device,
        progress=on_progress,
        **training_arguments(spec.optimisation),
    )


def _maps(ensemble: Ensemble) -> dict[str, list[float]]:
    """Every member's probability of class 1 on a square, row by row from below."""
    values = torch.linspace(-EXTENT, EXTENT, PLACES)
    across = torch.cartesian_prod(values, values).flip(1)
    probs = ensemble.predict(across).softmax(-1)[..., 1]
    return _columns(**{f"member_{i + 1}": member for i, member in enumerate(probs)})


def _targets_of_disagreement(method: Method, outputs: PlaneOutputs) -> dict[str, list[float]]:
    """What a method disagrees on: places of unlabelled examples, or 1 at training examples of high loss; or nothing."""
    if needs_unlabelled(method):
        x = toy_datasets.plane("unlabelled", UNLABELLED)[0]
        return _columns(unlabelled_x=x[:, 0], unlabelled_y=x[:, 1])
    return _columns(high_loss=outputs.high_loss) if method.objective == "ldr" else {}


def _columns(**columns: Tensor) -> dict[str, list[float]]:
    return {name: [round(value, _DIGITS) for value in values.double().tolist()] for name, values in columns.items()}


def missing(spec: Spec, output_measures: Mapping[str, OutputMeasure]) -> list[str]:
    """What a study of disagreement lacks, and measures that do not exist."""
    del output_measures
    lacks = requirements.missing_objective(spec) + requirements.missing_network(spec)
    lacks += requirements.missing_measures(spec, lambda name, _: name in MEASURES, {})
    lacks += [f"the data {name!r} is no plane; use {PLANE!r}" for name in spec.data if name != PLANE]
    lacks += [] if spec.search is None else [f"the procedure {spec.procedure!r} has no search"]
    lacks += requirements.missing_axes(spec, ("method", "seed"))
    lacks += [] if "method" in spec.grid else ["'grid' needs the axis 'method'"]
    if lacks:
        return lacks
    methods = [method_of(spec, str(name)) for name in spec.grid["method"]]
    few = [f"the method {method.name!r} must have at least two members" for method in methods if method.members < 2]
    return requirements.missing_method_settings(spec) or few[:1]


PROCEDURE = Procedure(training_units, run, missing)

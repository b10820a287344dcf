"""The procedure "share": ways to have several members, side by side, with what each of them costs.

| network of a method | members | starts from |
|---|---|---|
| a plain one, such as ``cnn`` | separate networks | random weights |
| ``heads`` | the last ``layers`` of one network, drawn anew; the others are frozen | a trained network |
| ``lora`` | low-rank adapters of a frozen network, and a last layer | a trained network |
| ``batch-ensemble``, ``tabm`` | scales and biases around shared weights; for ``tabm`` a last layer | random weights |
| ``masksembles``, ``mc-dropout`` | masks, or draws of dropout, within one network | random weights |

The trained network is trained on the same rows in the same way, once for every seed; its cost counts.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dissensus import adapters, masks
from dissensus.ensemble import Ensemble
from dissensus.randomness import Use, derived_seed
from dissensus.studies import datasets
from dissensus.studies.backbones import WEIGHT_LAYERS, Pair, Preparation, PreparedData
from dissensus.studies.checked_folders import inside
from dissensus.studies.measures import OutputMeasure
from dissensus.studies.procedures import requirements, shift_measures
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.choices import errors, largest_without_loss
from dissensus.studies.procedures.costs import Operations, common_operations, operations
from dissensus.studies.procedures.shift_measures import AUDITED_EXAMPLES, SECONDS, SOUP, ShiftOutputs
from dissensus.studies.procedures.shift_training import point_settings
from dissensus.studies.procedures.training import (
    TrainedRun,
    TrainingUnit,
    first_seed,
    outputs_file,
    training_units,
    write_targets,
)
from dissensus.studies.registry import HEADS, METHODS, NETWORKS, MethodError, check_task, maker, objective_with
from dissensus.studies.results import AuditNote, Measure, Row
from dissensus.studies.shifted_datasets import ShiftedData, load_shifted
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import training_arguments, validation_of
from dissensus.train import Progress, sweep
from dissensus.train.grid import points

COSTS = ("parameters", "inference_cost", "training_cost")
"""Measures in multiples of one network that is trained for the study's epochs."""
Make = Callable[[], nn.Module]
Settings = Mapping[str, Any]


class Kind(NamedTuple):
    """A way to have several members."""

    build: Callable[[Make, Settings], nn.Module]
    """A member, or a network with all members inside, from a function that gives a plain network."""
    settings: tuple[str, ...] = ()
    """Settings that a method of this kind must have; other kinds do not have them."""
    shared: Any = None
    """See `dissensus.Ensemble`."""
    starts_trained: bool = False
    inside: bool = False
    """Whether members live inside one network, which trains each example for one member."""


def _plain(make: Make, settings: Settings) -> nn.Module:
    del settings
    return make()


def _heads(make: Make, settings: Settings) -> nn.Module:
    network = copy.deepcopy(make()).requires_grad_(False)
    for layer in _last_layers(network, settings):
        layer.reset_parameters()  # pyright: ignore[reportCallIssue] (layers with weights have it)
        layer.requires_grad_(True)
    return network


def _last_layers(network: nn.Module, settings: Settings) -> list[nn.Module]:
    layers: list[nn.Module] = [layer for layer in network.modules() if isinstance(layer, WEIGHT_LAYERS)]
    return layers[-int(settings["layers"]) :]


def _lora(make: Make, settings: Settings) -> nn.Module:
    network = make()
    *_, last = (name for name, layer in network.named_modules() if isinstance(layer, nn.Linear))
    return adapters.lora(network, int(settings["rank"]), trained=[f"{last}.*"])


def _batch_ensemble(make: Make, settings: Settings) -> nn.Module:
    del settings
    return adapters.batch_ensemble(make())


def _tabm(make: Make, settings: Settings) -> nn.Module:
    del settings
    return adapters.tabm(make())


def _masksembles(make: Make, settings: Settings) -> nn.Module:
    widen = bool(settings.get("widen", True))
    return masks.convert(make(), int(settings["members"]), float(settings["scale"]), widen=widen)


def _monte_carlo(make: Make, settings: Settings) -> nn.Module:
    return masks.monte_carlo(make(), int(settings["members"]), float(settings["rate"]))


def _given(network: nn.Module) -> nn.Module:
    """A network that exists."""
    return network


SEPARATE = Kind(_plain)
KINDS: dict[str, Kind] = {
    HEADS: Kind(_heads, ("layers",), "frozen", starts_trained=True),
    "lora": Kind(_lora, ("rank",), "frozen", starts_trained=True),
    "batch-ensemble": Kind(_batch_ensemble, (), adapters.SHARED),
    "tabm": Kind(_tabm, (), adapters.SHARED),
    "masksembles": Kind(_masksembles, ("scale",), inside=True),
    "mc-dropout": Kind(_monte_carlo, ("rate",), inside=True),
}
"""By the ``network`` of a method; any other is a plain network, of which there are several."""


def kind_of(settings: Settings) -> Kind:
    """The kind of a method."""
    return KINDS.get(str(settings.get("network", "")), SEPARATE)


class FirstNetwork(NamedTuple):
    """The network that heads and adapters start from."""

    network: nn.Module
    cost: float
    """Of its training."""


@dataclass(frozen=True)
class SharedTraining:
    """One point of the grid, with everything that its training needs."""

    context: StudyContext
    settings: Settings
    prepared: PreparedData
    seed: int
    checkpoint: Path
    on_progress: Callable[[Progress], None]

    @property
    def kind(self) -> Kind:
        """The way to have members."""
        return kind_of(self.settings)

    @property
    def networks(self) -> int:
        """Number of networks: one where members live inside it."""
        return 1 if self.kind.inside else int(self.settings["members"])

    @property
    def make(self) -> Make:
        """Makes a plain network with new weights. A checkpoint recognises it, so it holds nothing but its settings."""
        spec = self.context.spec
        assert spec.members is not None
        network = str(self.settings.get("network", spec.members.network))
        name = network if self.kind is SEPARATE else spec.members.network
        return maker(name, self.prepared.data.study_data(), spec.members.options)

    def trained(self, number: int, point: Mapping[str, Any], first: FirstNetwork | None) -> tuple[TrainedRun, float]:
        """The trained ensemble, and the cost of its training."""
        kind, settings, epochs = self.kind, self.settings, self.context.spec.optimisation.epochs
        make = self.make if first is None else partial(_given, first.network)
        build = partial(kind.build, make, settings)
        before = 0.0 if first is None else first.cost
        with torch.random.fork_rng(devices=[]):  # networks that are only counted draw from no stream of the caller's
            per_run = self.operations(build()).step / self.plain_operations().step  # of as many epochs as the study's
        arguments = self._arguments()
        if "training_cost" in settings:
            left = float(settings["training_cost"]) - before
            if left <= 0:
                got = f"got {settings['training_cost']:g}"
                raise MethodError(f"'training_cost' must exceed that of the first network, {before:g}; {got}")
            arguments |= training_arguments(
                replace(self.context.spec.optimisation, epochs=max(1, round(left * epochs / per_run)))
            ) | {key: arguments[key] for key in ("lr", "validation")}
        ((name, values),) = (settings.get("choose") or {"": [0.0]}).items()
        swept = sweep(
            build,
            self.prepared.split[0],
            self._objective(),
            grid=[{**({name: value} if name else {}), "seed": self.seed} for value in values],
            members=self.networks,
            shared=kind.shared,
            device=self.context.device,
            checkpoint=self.checkpoint,
            resume=True,
            progress=self.on_progress,
            **arguments,
        )
        best = 0
        if name:
            failed = [outcome.status == "failed" for outcome in swept.outcomes]
            held_out = self.prepared.split[1]
            assert held_out is not None
            best = self._choice(values, [None if failed[i] else swept.run(i) for i in range(len(values))], held_out)
        history = swept.history(best)
        chosen = {name: values[best]} if name else None
        run = TrainedRun(number, point, swept.run(best), history, swept.outcomes[best].status, chosen)
        return run, before + per_run * len(history.epochs) / epochs

    def _arguments(self) -> dict[str, Any]:
        varied = {"lr": self.settings["lr"]} if "lr" in self.settings else {}
        arguments = training_arguments(self.context.spec.optimisation, varied)
        return {**arguments, "validation": self.prepared.split[1]}

    def _objective(self) -> Callable[..., Any]:
        """The method's objective with everything bound but what it chooses."""
        section = self.context.spec.objective
        assert section is not None
        bound = {"loss": section.loss, "pool": section.pool, **self.settings}
        chosen = self.settings.get("choose") or {}
        named = {key: value for key, value in bound.items() if key not in chosen}
        return objective_with(str(self.settings["objective"]), named)

    def _choice(self, values: list[float], runs: list[Ensemble | None], held_out: Pair) -> int:
        assert self.context.spec.objective is not None
        (x, y), nothing = held_out, (float("nan"), float("nan"))
        pairs = [
            nothing if run is None else errors(run.predict(x), y, self.context.spec.objective.pool) for run in runs
        ]
        return largest_without_loss(values, [pair[0] for pair in pairs], [pair[1] for pair in pairs], len(y))

    def _example(self) -> Tensor:
        """Inputs on which operations are counted: two for every member, which networks with members inside share."""
        x = self.prepared.split[0][0]
        return x[:1].repeat(2 * int(self.settings["members"]), *[1] * (x.ndim - 1))

    def plain_operations(self) -> Operations:
        """Operations of one plain network."""
        return operations(replace(self, settings=self._of_one()).make(), self._example())

    def _of_one(self) -> Settings:
        return {key: value for key, value in self.settings.items() if key != "network"}

    def operations(self, member: nn.Module) -> Operations:
        """Operations of all members."""
        x, common = self._example(), 0.0
        if self.settings.get("network") == HEADS:  # what members have in common comes before everything else
            common = common_operations(member, x, _last_layers(member, self.settings))
        return operations(member, x).times(self.networks, common)

    def costs(self, ensemble: Ensemble, training: float) -> dict[str, float]:
        """Measures of cost by name."""
        with torch.random.fork_rng(devices=[]):
            plain = sum(p.numel() for p in replace(self, settings=self._of_one()).make().parameters())
            inference = self.operations(ensemble.member(0).cpu()).inference / self.plain_operations().inference
        parameters = sum(p.numel() for p in ensemble.parameters()) / plain
        return {"parameters": parameters, "inference_cost": inference, "training_cost": training}


def _prepared(unit: TrainingUnit, context: StudyContext, folder: Path) -> PreparedData:
    """Standardised images with shifted sets, or a table."""
    spec = context.spec
    if unit.data in datasets.IMAGES:
        sets = shift_measures.sets_of(spec.evaluation.measures)
        raw = load_shifted(unit.data, spec, sets, [], unit.seeds[0])
        return Preparation(raw, spec, context.device, folder).of("", 0, "fresh")
    data = datasets.load(unit.data, unit.seeds[0], spec, catalogue=context.catalogue)
    check_task(spec, data)
    return PreparedData(ShiftedData(data.name, data.train, data.test, data.outputs), validation_of(spec.optimisation))


def run(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """Train and measure every method for all seeds of a unit."""
    folder = inside(context.folder, unit.name)
    folder.mkdir(parents=True, exist_ok=True)
    context = context.on_data(unit.data).titled(unit.name)
    prepared = _prepared(unit, context, folder)
    grid = points({**context.spec.grid, "seed": list(unit.seeds)})
    firsts: dict[int, FirstNetwork] = {}
    references: dict[tuple[object, ...], Tensor] = {}
    rows: list[Row] = []
    for number, point in enumerate(grid):

        def on_progress(moment: Progress, number: int = number, point: Mapping[str, Any] = point) -> None:
            context.progress(f"{point['method']}: {moment}", (number + moment.step / moment.steps) / len(grid))

        settings, seed = point_settings(context.spec, point), int(point["seed"])
        checkpoint = folder / f"checkpoints-{number:03d}"
        training = SharedTraining(context, settings, prepared, seed, checkpoint, on_progress)
        if training.kind.starts_trained and seed not in firsts:
            firsts[seed] = _first_network(training, folder / f"checkpoints-first-{seed}")
        first = firsts[seed] if training.kind.starts_trained else None
        trained, cost = training.trained(number, point, first)
        rows.append(_row(training, trained, cost, folder, references))
    write_targets(folder, prepared.data.study_data().test[1])
    return rows


def _first_network(training: SharedTraining, checkpoint: Path) -> FirstNetwork:
    """The network that heads and adapters of a seed start from. Its seed is no member's of other methods."""
    settings = {"members": 1, "objective": "independent"}
    seed = derived_seed(training.seed, Use.MEMBER, "first")
    single = replace(training, settings=settings, seed=seed, checkpoint=checkpoint)
    trained, cost = single.trained(0, {"seed": seed}, None)
    return FirstNetwork(trained.ensemble.member(0).cpu().eval(), cost)


def _row(
    training: SharedTraining,
    trained: TrainedRun,
    cost: float,
    folder: Path,
    references: dict[tuple[object, ...], Tensor],
) -> Row:
    """A run's row. Ensembles without interaction are the reference of those of the same kind with it."""
    spec, settings, ensemble = training.context.spec, training.settings, trained.ensemble
    shifted = training.prepared.data
    data = shifted.study_data()
    assert spec.objective is not None
    outputs = ensemble.predict(data.test[0], file=outputs_file(folder, trained.number))
    others = {
        name: (ensemble.predict(x, file=outputs_file(folder, trained.number, name)), y)
        for name, (x, y) in shifted.sets.items()
        if isinstance(x, Tensor)
    }
    key = training.seed, settings.get("network"), settings["members"], settings.get("training_cost")
    note = None
    if len(outputs) > 1 and trained.status == "done":
        x, y = (part[:AUDITED_EXAMPLES] for part in training.prepared.split[0])
        pool, reference = spec.objective.pool, references.get(key)
        audit = shift_measures.audit_outputs(outputs, data.test[1], pool, (ensemble.predict(x), y), reference)
        note = AuditNote(audit.verdict, audit.judgement.reasons)
    if settings["objective"] == "independent" and trained.status == "done":
        references.setdefault(key, outputs)
    names, loss = spec.evaluation.measures, spec.objective.loss
    verdict = "" if note is None else note.verdict
    measured = ShiftOutputs(outputs, data.test[1], others, loss, spec.objective.pool, verdict=verdict)
    taken = [name for name in names if name not in COSTS]
    values = shift_measures.values(taken, measured, training.context.measures) | training.costs(ensemble, cost)
    row = trained.row(spec, shifted.name, {name: values[name] for name in names})
    return replace(row, objective=str(settings["objective"]), audit=note, members=len(outputs))


def missing(spec: Spec, measures: Mapping[str, OutputMeasure]) -> list[str]:
    """What a study lacks."""
    if spec.uses:
        return ["the procedure 'share' uses no trainings of other studies"]
    if "method" not in spec.grid:
        return ["'grid' needs the axis 'method'"]
    lacks = requirements.missing_objective(spec) + requirements.missing_measures(spec, _is_measure, measures)
    lacks = lacks or requirements.missing_axes(spec, {"seed", "method"})
    return lacks or _missing_settings(spec)


def _is_measure(name: str, measures: Mapping[str, OutputMeasure]) -> bool:
    others = name in COSTS or shift_measures.is_shift_measure(name, measures)
    return others and Measure.parse(name).kind not in (SOUP, SECONDS)


def _missing_settings(spec: Spec) -> list[str]:
    """The first setting that a method lacks, or that does nothing for it."""
    assert spec.members is not None
    assert spec.objective is not None
    if spec.members.network not in NETWORKS:
        return [f"the procedure 'share' needs a plain network in 'members.network', not {spec.members.network!r}"]
    optional = {"network", "members", "objective", "choose", "widen", "lr", "training_cost"}
    for name, settings in spec.objective.options.get(METHODS, {}).items():
        kind, objective = kind_of(settings), str(settings.get("objective", spec.objective.name))
        lacking = [key for key in kind.settings if key not in settings]
        if lacking:
            return [f"the method {name!r} needs the setting {lacking[0]!r}"]
        known = optional | {*kind.settings, *requirements.parameters_of(objective)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            return [f"the setting {unknown[0]!r} does nothing for the method {name!r}"]
        if kind.inside and objective != "independent":
            why = "members inside one network train on different examples"
            return [f"the method {name!r} needs the objective 'independent': {why}"]
    return []


PROCEDURE = Procedure(training_units, run, missing, priority=first_seed)

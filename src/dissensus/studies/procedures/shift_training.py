"""How a point of the procedures "detect", "generalise" and "timing" is trained.

Heads start from the same pretrained layers, so something else must make members differ:

| members | what makes them differ |
|---|---|
| without interaction | each is trained apart, in its own order of examples (`_trained_apart`) |
| some are drawn for every step | which steps they are drawn for |
| all are trained at every step | noise on their first weights (`NOISE`), since equal members would stay equal |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dissensus import objectives, train
from dissensus.ensemble import Ensemble
from dissensus.randomness import Use, derived_seed
from dissensus.studies.backbones import Pair, PreparedData, fresh_head, pretrained_head
from dissensus.studies.procedures.base import StudyContext
from dissensus.studies.procedures.choices import errors, largest_without_loss
from dissensus.studies.procedures.shift_measures import SECONDS
from dissensus.studies.procedures.training import TrainedRun
from dissensus.studies.registry import HEADS, METHODS, NETWORKS, MethodError, maker, objective_with, options_of
from dissensus.studies.shifted_datasets import CONFIDENCE, LEAST_CONFIDENT
from dissensus.studies.spec import Spec
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import Progress, Sweep, TrainingDiverged, fit, sweep

RANGES: dict[str, tuple[float, float]] = {
    "lr": (0.1, 1.0),
    "weight_decay": (0.1, 10.0),
    "smoothing": (0.0, 0.1),
    "initial_scale": (0.5, 2.0),
}
"""Ranges of diverse hyperparameters; learning rate and weight decay are multiplied by the study's."""
FIRST_STAGE = 1000
"""Added to the seed of the network that chooses examples in two stages."""
NOISE = 0.01
"""Noise on pretrained weights, as a share of their size, where nothing else makes members differ."""

Settings = Mapping[str, Any]
"""Settings of one point: those of the study, of its method and of the point, the last taking precedence."""
OnProgress = Callable[[Progress], None]


def point_settings(spec: Spec, point: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a point of the grid."""
    assert spec.members is not None
    assert spec.objective is not None
    options = {key: value for key, value in spec.objective.options.items() if key != METHODS}
    methods = spec.objective.options.get(METHODS, {})
    name = point.get("method", "")
    if name and name not in methods:
        raise MethodError(f"grid.method names {name!r}, which {METHODS} do not hold: {', '.join(methods)}")
    return {
        "objective": spec.objective.name,
        "members": spec.members.count,
        **spec.members.options,
        **options,
        **methods.get(name, {}),
        **{key: value for key, value in point.items() if key not in ("method", "seed")},
    }


def interacts(settings: Settings) -> bool:
    """Whether members are trained with a term that depends on the other members."""
    return settings["objective"] != "independent" and settings.get("strength") != 0


def point_builder(spec: Spec, settings: Settings, prepared: PreparedData) -> Callable[[], nn.Module]:
    """The function that builds a member."""
    assert spec.members is not None
    data = prepared.data.study_data()
    if spec.members.network == HEADS:
        if prepared.head is None:
            return partial(fresh_head, data.shape[0], data.outputs, int(settings.get("layers", 2)))
        return partial(pretrained_head, prepared.head, NOISE if _stay_equal(settings) else 0.0)
    name, options = spec.members.network, dict(spec.members.options)
    if name in NETWORKS:
        options |= {key: settings[key] for key in options_of(name) if key in settings}
    heads_only = ("backbone", "layers", "initial")
    return maker(name, data, {key: value for key, value in options.items() if key not in heads_only})


def _stay_equal(settings: Settings) -> bool:
    """Whether members with equal weights would be trained to equal weights."""
    members = int(settings["members"])
    drawn = int(settings.get("sampled", members)) < members
    return members > 1 and interacts(settings) and not drawn and not settings.get("sequential")


@dataclass(frozen=True)
class PointTraining:
    """One point of the grid, with everything that its training needs."""

    context: StudyContext
    settings: Settings
    point: Mapping[str, Any]
    number: int
    prepared: PreparedData
    on_progress: OnProgress

    @property
    def seed(self) -> int:
        """Of the point."""
        return int(self.point["seed"])

    @property
    def members(self) -> int:
        """M."""
        return int(self.settings["members"])

    def arguments(self) -> dict[str, Any]:
        """Arguments of `fit` and `sweep`, with the held-out rows."""
        arguments = training_arguments(self.context.spec.optimisation, self.point)
        return {**arguments, "validation": self.prepared.split[1], "progress": self.on_progress}

    def trained(self) -> TrainedRun:
        """The trained ensemble."""
        settings = self.settings
        if settings.get("choose"):
            return self._chosen()
        drawn = int(settings.get("sampled", self.members)) < self.members
        if self.prepared.head is not None and self.members > 1 and not interacts(settings) and not drawn:
            return self._trained_apart()
        return self._trained_together()

    def _run(self, ensemble: Ensemble, history: train.History, status: str, **values: Any) -> TrainedRun:
        return TrainedRun(self.number, self.point, ensemble, history, status, values or None)

    def _trained_together(self) -> TrainedRun:
        """All members in one training, on the same batches."""
        settings, arguments = self.settings, self.arguments()
        build = point_builder(self.context.spec, settings, self.prepared)
        ensemble = Ensemble(build, self.members, seed=self.seed).to(self.context.device)
        smoothing: dict[str, Any] = {}
        if settings.get("diverse"):
            drawn = self._drawn(arguments)
            train.scale_weights(ensemble, drawn.pop("initial_scale", 1.0))
            smoothing = {"smoothing": drawn.pop("smoothing")} if "smoothing" in drawn else {}
            arguments |= drawn
        labelled, unlabelled = self._split_by_labels()
        status = "done"
        try:
            history = fit(
                ensemble,
                labelled,
                partial(self._objective(), **smoothing),
                unlabelled=unlabelled,
                active_members=self._active_members(),
                sequential=bool(settings.get("sequential")),
                seed=self.seed,
                **arguments,
            )
        except TrainingDiverged as reason:
            history, status = reason.history, "failed"
        return self._run(ensemble, history, status)

    def _trained_apart(self) -> TrainedRun:
        """Members that start alike, each trained with its own seed: another order of examples, other dropout."""
        arguments = self.arguments()
        drawn = self._drawn(arguments) if self.settings.get("diverse") else {}
        if "initial_scale" in drawn:
            raise MethodError("'initial_scale' is for members with random weights; these start from pretrained layers")
        seeds = [derived_seed(self.seed, Use.MEMBER, member) for member in range(self.members)]
        labelled, _ = self._split_by_labels()
        swept = sweep(
            point_builder(self.context.spec, self.settings, self.prepared),
            labelled,
            self._objective("independent"),
            grid=[{"seed": seed, **{key: drawn[key][i] for key in drawn}} for i, seed in enumerate(seeds)],
            members=1,
            device=self.context.device,
            **arguments,
        )
        members = Ensemble.from_modules([swept.run(i).member(0) for i in range(len(swept))], seed=self.seed)
        failed = any(outcome.status == "failed" for outcome in swept.outcomes)
        return self._run(members.to(self.context.device), swept.history(0), "failed" if failed else "done")

    def _chosen(self) -> TrainedRun:
        """The run that held-out rows choose, of one sweep over all values."""
        ((name, values),) = self.settings["choose"].items()
        arguments = self.arguments()
        held_out = arguments["validation"]
        assert held_out is not None
        labelled, unlabelled = self._split_by_labels()
        swept = sweep(
            point_builder(self.context.spec, self.settings, self.prepared),
            labelled,
            self._objective(),
            grid=[{name: value, "seed": self.seed} for value in values],
            members=self.members,
            unlabelled=unlabelled,
            active_members=self._active_members(),
            device=self.context.device,
            **arguments,
        )
        best = self._choose(values, swept, held_out)
        history, chosen = swept.history(best), {name: values[best]}
        if SECONDS in self.context.spec.evaluation.measures:  # a sweep takes the time of all its runs
            alone = {key: value for key, value in self.settings.items() if key != "choose"} | chosen
            history = replace(self, settings=alone)._trained_together().history
        return self._run(swept.run(best), history, swept.outcomes[best].status, **chosen)

    def _choose(self, values: list[float], swept: Sweep, held_out: Pair) -> int:
        assert self.context.spec.objective is not None
        pool, (x, y) = self.context.spec.objective.pool, held_out
        nothing = (float("nan"), float("nan"))
        pairs = [
            nothing if outcome.status == "failed" else errors(swept.run(i).predict(x), y, pool)
            for i, outcome in enumerate(swept.outcomes)
        ]
        return largest_without_loss(values, [pair[0] for pair in pairs], [pair[1] for pair in pairs], len(y))

    def _objective(self, name: str = "") -> Callable[..., Any]:
        """The method's objective, or another one, with the settings that it takes and the method does not choose."""
        swept = self.settings.get("choose", {})
        settings = {key: value for key, value in self.settings.items() if key not in swept}
        return objective_with(name or str(settings["objective"]), {"loss": "cross_entropy", **settings})

    def _active_members(self) -> int | None:
        sampled = int(self.settings.get("sampled", self.members))
        return sampled if sampled < self.members else None

    def _drawn(self, arguments: Mapping[str, Any]) -> dict[str, list[float]]:
        """Diverse hyperparameters, one value per member."""
        scales = {key: arguments[key] for key in ("lr", "weight_decay")}
        ranges = {name: tuple(scales.get(name, 1.0) * end for end in RANGES[name]) for name in self.settings["diverse"]}
        return train.drawn_hyperparameters(self.members, self.seed, **ranges)

    def _split_by_labels(self) -> tuple[Pair, Tensor | None]:
        """Examples to fit, and to disagree on: another set, or training examples that a first network finds hard."""
        labelled, _ = self.prepared.split
        name = str(self.settings.get("unlabelled") or "")
        if not name:
            return labelled, None
        threshold, share = CONFIDENCE.fullmatch(name), LEAST_CONFIDENT.fullmatch(name)
        if threshold is None and share is None:
            unlabelled = self.prepared.data.unlabelled[name]
            assert isinstance(unlabelled, Tensor)
            return labelled, unlabelled
        x, y = labelled
        log_probs = self._first_network(labelled).predict(x)[0].log_softmax(-1)
        if threshold is not None:
            hard = train.low_confidence(log_probs, float(threshold[1]))
        else:
            assert share is not None
            hard = _least(log_probs.amax(-1), float(share[1]))
        if not 2 <= int(hard.sum()) < len(hard):
            found = f"{name!r} holds for {int(hard.sum())} of {len(hard)} training examples"
            raise MethodError(f"{found}: ask for another confidence")
        return (x[~hard], y[~hard]), x[hard]

    def _first_network(self, labelled: Pair) -> Ensemble:
        """The network whose confidence chooses examples: the pretrained one, or else one trained for it."""
        if self.prepared.head is not None:
            return Ensemble.from_modules([self.prepared.head]).to(self.context.device)
        seed = self.seed + FIRST_STAGE
        build = point_builder(self.context.spec, self.settings, self.prepared)
        first = Ensemble(build, 1, seed=seed).to(self.context.device)
        independent = partial(objectives.independent, loss="cross_entropy")
        fit(first, labelled, independent, seed=seed, **self.arguments())
        return first


def _least(confidence: Tensor, share: float) -> Tensor:
    """Which examples are the share with the lowest confidence, rounded to whole examples."""
    least = torch.zeros(len(confidence), dtype=torch.bool)
    least[confidence.argsort(stable=True)[: round(share * len(confidence))]] = True
    return least

"""The recipe of a training: what to train, on what data and how. Engines and checkpoints' fingerprints come from it."""

import functools
import logging
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dissensus.train.optim as optim
import dissensus.train.schedules as schedules
from dissensus import calls, checks, pooling
from dissensus.arrays import Conversion
from dissensus.axes import LossParts, Objective
from dissensus.batch import check_dtype
from dissensus.calls import NetworkInputs, OutputChoice
from dissensus.data.batches import DataLike, LoadedBatches, TensorBatches, as_pair, check_source
from dissensus.data.recognition import data_fingerprint
from dissensus.data.splits import Split, held_out_rows
from dissensus.data.unlabelled import Batches, WithUnlabelled, with_unlabelled
from dissensus.ensemble import Ensemble, fresh_members, stored_tensors
from dissensus.execution import Backend, Body, Choices, DifferentMembers, StackedMembers
from dissensus.execution.backends import checked
from dissensus.execution.ranks import Ranks
from dissensus.execution.sharing import Shared
from dissensus.execution.weights import check_real
from dissensus.fingerprint import digest, fingerprint, fingerprints
from dissensus.objectives.declaration import ADVERSARIAL, is_separable, takes, unwrapped
from dissensus.objectives.independent import independent
from dissensus.randomness import is_generator
from dissensus.train.adversary import AdversarialTraining, Adversary
from dissensus.train.averaging import GradientAverage, WeightAverage
from dissensus.train.capture import graph_steps
from dissensus.train.checkpoint import Checkpointer
from dissensus.train.compatibility import (
    check_adversarial,
    check_augments,
    check_batches,
    check_bootstrap,
    check_drawn,
    check_few,
    check_like,
    check_momentum,
    check_objective,
    check_patience,
    check_source_of_runs,
    check_split,
    check_target_settings,
    check_targets_augmented,
    check_unlabelled,
    check_updates,
    check_validation,
    tell_of_updates,
)
from dissensus.train.convergence import Convergence, Freezing
from dissensus.train.early_stopping import EarlyStopping
from dissensus.train.engine import Engine, RunLosses
from dissensus.train.evaluation import Source, Validation, over_runs
from dissensus.train.grid import Run, draw_keys
from dissensus.train.history import OnProgress
from dissensus.train.member_optimizers import MemberOptimizers, check_optimizer
from dissensus.train.memory import MemoryLimit
from dissensus.train.notification import Callbacks
from dissensus.train.numerics import PrecisionSettings, numerics, several_dtypes
from dissensus.train.padded_runs import PaddedRuns, differ
from dissensus.train.parameter_columns import decay_mask, matrix_columns, shared_decay_mask, shared_matrix_columns
from dissensus.train.probing import targets_of
from dissensus.train.python_state import PythonState, global_generators
from dissensus.train.sampling import MemberSampling
from dissensus.train.settings import (
    BatchSettings,
    CheckpointSettings,
    OptimizerSettings,
    SharedSettings,
    TargetSettings,
    UpdateSettings,
    ValidationSettings,
)
from dissensus.train.shared_weights import SharedWeights
from dissensus.train.state import RunSettings, TrainState
from dissensus.train.trained_loss import Targets, check_weighted, trained_loss
from dissensus.train.weighting import balanced_weights, weighted

log = logging.getLogger("dissensus")

_RATES = 1024
"""Epochs whose rates count for the fingerprint, besides the schedule's code."""


@dataclass(frozen=True)
class NewMembers:
    """Members that are initialised for a training: those of every run from its seed."""

    build: Callable[..., nn.Module]
    device: torch.device
    backend: str | Backend = "auto"
    output: OutputChoice | None = None
    shared: Shared = None

    def __post_init__(self) -> None:
        checked(self.backend)
        calls.check_output_choice(self.output)

    def body(self, runs: Sequence[Run], dtype: torch.dtype) -> Body:
        """Stacked members of all runs; the weights of runs with the same seed are drawn once."""
        seeds = list(dict.fromkeys(run.seed for run in runs))
        members = runs[0].members
        build = functools.partial(self.build, **runs[0].build)
        try:
            networks = chain.from_iterable(fresh_members(build, seed, members) for seed in seeds)
            drawn = StackedMembers.of(networks, self.shared, members=members if len(seeds) > 1 else None)
        except DifferentMembers as reason:
            raise ValueError(f"`build` must return the same architecture at every call: {reason}.") from reason
        check_real(drawn.trainable())
        drawn.output = self.output
        body = drawn.subset([seeds.index(run.seed) * members + m for run in runs for m in range(members)])
        if len(seeds) == 1 < len(runs) and body.shared_trainable():
            body.attach_shared(body.shared_packed().repeat(len(runs), 1))
        return self._placed(body, dtype)

    def padded(self, runs: Sequence[Run], dtype: torch.dtype) -> PaddedRuns:
        """Stacked members of runs that differ in the shapes of their members, or in their number."""
        try:
            result = PaddedRuns.of(self.build, runs)
        except DifferentMembers as reason:
            raise ValueError(f"`build` must return the same architecture at every call: {reason}.") from reason
        check_real(result.body.trainable())
        return replace(result, body=self._placed(result.body, dtype))

    def _placed(self, body: StackedMembers, dtype: torch.dtype) -> StackedMembers:
        """Members in the dtype of the data, on the device."""
        dtypes = {parameter.dtype for parameter in body.parameters() if parameter.is_floating_point()}
        if dtype.is_floating_point and len(dtypes) == 1 and dtypes != {dtype}:
            body = body.to(dtype)
        body.request_backend(self.backend)
        return body.to(self.device)

    def member_numbers(self, run: Run) -> list[int]:
        """The numbers of a run's members, by which what is drawn for them is keyed."""
        return list(range(run.members))

    def owners(self, runs: Sequence[Run]) -> list[tuple[int, int]]:
        """The (seed, member) of every row, by which dropout is keyed."""
        return [(run.seed, member) for run in runs for member in self.member_numbers(run)]

    def identity(self) -> dict[str, Any]:
        """Everything that determines the initial weights besides seeds."""
        optional = {"output": self.output, "shared": self.shared}
        return {"build": self.build, **{name: value for name, value in optional.items() if value is not None}}


@dataclass(frozen=True)
class ExistingMembers:
    """The members of an ensemble, trained in place as a single run."""

    ensemble: Ensemble

    def __post_init__(self) -> None:
        if not any(parameter.requires_grad for parameter in self.ensemble.parameters()):
            checks.refuse("ensemble", "have parameters to train", "only frozen ones", "Set requires_grad.")

    @property
    def device(self) -> torch.device:
        """The device of the ensemble."""
        return self.ensemble.device

    def body(self, runs: Sequence[Run], dtype: torch.dtype) -> Body:  # noqa: ARG002
        """The body of the ensemble."""
        return self.ensemble.body

    def member_numbers(self, run: Run) -> list[int]:  # noqa: ARG002
        """The numbers of the members, by which what is drawn for them is keyed."""
        return list(self.ensemble.member_ids)

    def owners(self, runs: Sequence[Run]) -> list[tuple[int, int]]:
        """The (seed, member) of every row, by which dropout is keyed."""
        return [(runs[0].seed, member) for member in self.member_numbers(runs[0])]

    def identity(self) -> dict[str, Any]:
        """Everything by which checkpoints distinguish initial weights."""
        return {"members": self.ensemble.member_ids, "seed of the ensemble": self.ensemble.seed}


class HeldOut(NamedTuple):
    """Tensors of which a part was held out, by which checkpoints recognise both parts."""

    data: DataLike
    validation: float | Split
    split_seed: int


class _Identified(NamedTuple):
    """What settings are recognised by."""

    settings: dict[str, str]
    """The fingerprint of every setting."""
    python: PythonState
    """The state of all objects that settings hold."""
    opaque: Mapping[str, Sequence[str]]
    """Types of what cannot be inspected, by the name of the setting."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a training. A `fit` is a recipe of one run over an existing ensemble."""

    initial: NewMembers | ExistingMembers
    runs: Sequence[Run]
    data: DataLike
    """For several folds, the pairs of all folds, concatenated."""
    objective: Callable[..., LossParts]
    epochs: int
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    updates: UpdateSettings = field(default_factory=UpdateSettings)
    shared: SharedSettings = field(default_factory=SharedSettings)
    """How parameters that members share are trained."""
    batches: BatchSettings = field(default_factory=BatchSettings)
    targets: TargetSettings = field(default_factory=TargetSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    validation: DataLike | float | Split | None = None
    """Validation data, of all folds concatenated; or what each run splits off its tensors: a fraction or a split."""
    validation_settings: ValidationSettings = field(default_factory=ValidationSettings)
    split: HeldOut | None = None
    """Where validation data comes from, if `fit` has split it off."""
    unlabelled: Tensor | DataLike | None = None
    weights: Tensor | None = None
    """The weight of every example ``[N]``, for tensor data."""
    validation_weights: Tensor | None = None
    """The weight of every validation example, if `fit` has split off the examples."""
    folds: int = 1
    validation_folds: int = 1
    """One fold of validation data for all runs, or as many as of training data."""
    frozen: Sequence[int] = ()
    """Members that take no step."""
    freeze: Convergence | None = None
    active_members: int | None = None
    adversarial: AdversarialTraining | None = None
    twin: Objective | None = None
    """The objective of the independent twin that is trained afterwards."""
    max_memory: int | None = None
    checkpoint: CheckpointSettings | None = None

    def __post_init__(self) -> None:
        """Refuse settings that do not go together, before anything is trained."""
        objective, settings, sweep = self.objective, self.validation_settings, isinstance(self.initial, NewMembers)
        check_objective(objective, self.runs)
        checks.count("epochs", self.epochs)
        for run in self.runs:
            checks.count("batch_size", run.batch_size)
        check_unlabelled(objective, self.unlabelled)
        check_targets_augmented(self.batches.augment, self.unlabelled)
        for members in {run.members for run in self.runs}:
            check_augments(self.batches.augment, members)
        check_few(objective, self.active_members)
        check_updates(self.optimizer, self.updates, self.runs, self.active_members)
        if self.updates.compile is True and self.precision.deterministic:
            fix = "Leave one of them out: the compiler chooses among kernels by a clock."
            checks.refuse("compile", "come without `deterministic`", "both", fix)
        if not sweep:
            check_adversarial(objective, self.adversarial, self.unlabelled, self.batches.augment, self.active_members)
            if self.adversarial is not None and self.targets.ignore_index is not None:
                checks.refuse("ignore_index", "come without `adversarial`: attacks need labels of all examples", "both")
        elif takes(objective, ADVERSARIAL):
            fix = "Use fit(adversarial=...)."
            checks.refuse("objective", "need no attacked inputs in a sweep", "one that does", fix)
        check_patience(settings.patience, settings.min_delta, self.validation)
        check_validation(self.validation, None if sweep else settings.track, settings.metric, settings.mode)
        if sweep and self._pair is None:
            check_source_of_runs(self.data, self.runs, self.validation)
        check_batches(self.data, self.batches, self.weights)
        check_weighted(objective, self.weights is not None)
        check_target_settings(objective, self.runs, self.data, self.targets)
        check_bootstrap(objective, self.batches.bootstrap)
        if isinstance(self.initial, ExistingMembers):
            self._check_shared(self.initial.ensemble.body)
        if self.unlabelled is not None:
            check_like(self.data, self.unlabelled)
        if self._pair is not None:
            check_split(self.validation, self._pair[1], self.runs, self.folds)
            for targets in targets_of(objective, self.runs, self._validation_pair, settings.metric, self.targets):
                targets.check_all(self._pair[1])

    def _check_shared(self, body: Body) -> None:
        """Refuse settings that lose their meaning when parameters that members share are trained, or when none are."""
        if not body.shared_trainable():
            for run in self.runs:
                self.shared.of_run(run.shared).check_unused()
            return
        refused = {
            "watch": "'member'" if self.validation_settings.watch == "member" else None,
            "freeze": self.freeze,
            "frozen": list(self.frozen) or None,
            "active_members": self.active_members,
            "optimizer": "a callable" if self.optimizer.make else None,
        }
        for name, value in refused.items():
            if value is not None:
                fix = "It would move, or keep, what belongs to all members. Freeze what is shared, or leave this out."
                requirement = "be left out where members share parameters that are trained"
                if name == "optimizer":
                    requirement = "be a name, such as 'adamw', where members share trained parameters"
                    fix = "A callable makes an optimizer for the parameters of one member."
                checks.refuse(name, requirement, str(value), fix)
        for run in self.runs:
            for name, value in run.optimizer.items():
                if value is not None and not isinstance(value, int | float):
                    fix = "Pass one number; `shared_lr` is the learning rate of what is shared."
                    checks.refuse(name, "be one number where members share parameters that are trained", "several", fix)

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to another process: the settings, without what this one has found out from them."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        """The fingerprint of every setting that determines the training, by which checkpoints are recognised.

        A line of the log names settings that hold what cannot be inspected.
        """
        _tell_opaque(self._identified.opaque)
        return self._identified.settings

    @property
    def identity(self) -> dict[str, str]:
        """The fingerprint, by which processes recognise that they train alike; nothing is logged."""
        return self._identified.settings

    @functools.cached_property
    def _identified(self) -> "_Identified":
        """The fingerprint, and the state of all objects that it consists of; from before anything is trained."""
        opaque: dict[str, list[str]] = {}
        python = PythonState()
        sources = {"data": self.data, "unlabelled": self.unlabelled, "validation": self.validation}
        if self.split is not None:
            sources |= self.split._asdict()
        sources = {name: self._source(name, data, opaque, python) for name, data in sources.items()}
        run, validation = self.runs[0], self.validation_settings
        existing = isinstance(self.initial, ExistingMembers)
        settings = {
            "epochs": self.epochs,
            **(
                {"batch_size": run.batch_size, "seed": run.seed}
                if existing
                else {"runs": [r.identity() for r in self.runs]}
            ),
            "optimizer": self.optimizer.name,
            "objective": self.objective,
            **self.initial.identity(),
            **sources,
            "folds": [self.folds, self.validation_folds],
            **(run.optimizer if existing else {}),
            "nesterov": self.optimizer.nesterov,
            "betas": self.optimizer.betas,
            "eps": self.optimizer.eps,
            "schedule": schedules.resolved(self.optimizer.schedule),
            "rates": self._rates(),
            "frozen": sorted(int(member) % run.members for member in self.frozen),
            "metric": validation.metric,
            "track": sorted((validation.track or {}).items()),
            "mode": validation.mode or "min",
            "watch": validation.watch,
            "active_members": self.active_members,
            "adversarial": self.adversarial,
            "freeze": self.freeze,
            "patience": validation.patience,
            "min_delta": validation.min_delta,
            "keep": validation.keep,
            "augment": self.batches.augment,
            **vars(self.precision),
            "shuffle": self.batches.shuffle,
            "drop_last": self.batches.drop_last,
            **{name: value for name, value in self._optional().items() if value is not None},
            "twin": self.twin,
        }

        def visited(value: object) -> object:
            value = self._without_trained(value)
            python.visit(value)
            return f"generator {type(value).__name__}" if is_generator(value) else value

        result = fingerprints(settings, replace=visited, skip_counters=True, opaque=opaque)
        result |= {name: repr(value) for name, value in settings.items() if _is_readable(value)}
        python.begin()
        return _Identified(result, python, opaque)

    def _optional(self) -> dict[str, object]:
        """Settings that count for the fingerprint where they are given."""
        given = self.targets.class_weights
        return {
            "unpack": self.batches.unpack,
            "steps_per_epoch": self.batches.steps_per_epoch,
            "weights": None if self.weights is None else digest(self.weights),
            "validation_weights": None if self.validation_weights is None else digest(self.validation_weights),
            "class_weights": digest(given) if isinstance(given, Tensor) else given,
            "label_smoothing": self.targets.label_smoothing or None,
            "ignore_index": self.targets.ignore_index,
            "class_axis": None if self.targets.class_axis == 2 else self.targets.class_axis,
            "bootstrap": self.batches.bootstrap or None,
            "no_decay": self.optimizer.no_decay or None,
            "accumulate": None if self.updates.accumulate == 1 else self.updates.accumulate,
            "ema": self.updates.ema,
            "recompute": self.updates.recompute or None,
            "compile": None if self.updates.compile == "auto" else self.updates.compile,
            "shared_lr": self.shared.lr,
            "shared_clip_norm": self.shared.clip_norm,
            "shared_gradient": None if self.shared.gradient == "mean" else self.shared.gradient,
        }

    def _source(self, name: str, data: Any, opaque: dict[str, list[str]], python: PythonState) -> object:
        """What identifies training, validation or unlabelled data."""
        if isinstance(data, int | float):
            return data
        if isinstance(data, Split):
            return data.identity()
        parts: list[str] = []
        identity = data_fingerprint(data, parts, self._without_trained, python.visit)
        if parts:
            opaque[name] = parts
        return identity

    def _without_trained(self, value: object) -> object:
        """A value of the fingerprint; weights that are trained are left out, wherever an objective refers to them."""
        if not isinstance(self.initial, ExistingMembers):
            return value
        ensemble = self.initial.ensemble
        return "the trained ensemble" if value is ensemble or value is ensemble.body else value

    def _rates(self) -> list[float]:
        """The schedule at the beginning of the first epochs, by which checkpoints recognise it."""
        schedule = schedules.resolved(self.optimizer.schedule)
        first = torch.arange(min(self.epochs, _RATES), dtype=torch.float64)
        return schedules.factors(schedule, first, float(self.epochs)).tolist()

    def engine(
        self,
        numbers: Sequence[int] = (0,),
        *,
        progress: OnProgress | None = None,
        callbacks: Callbacks | None = None,
        checkpoint: CheckpointSettings | None = None,
        choices: Choices | None = None,
        ranks: Ranks | None = None,
    ) -> Engine:
        """An engine for runs of one shape, before their first step.

        Args:
            numbers: The runs, by number.
            progress: Called while it trains.
            callbacks: Called at the end of epochs and steps.
            checkpoint: Where checkpoints of these runs go.
            choices: Backends chosen so far, by runs of the same shape.
            ranks: Processes that train a run together; this one gets copies of its own members.
        """
        runs = [self.runs[number] for number in numbers]
        device = self.initial.device
        objective = _with_keywords(self.objective, runs[0].words)
        varying, shared = _hyperparameters(runs)
        held_out = None if self._validation_pair is None else self._validation_pair[1]
        targets = Targets.of(
            _with_keywords(objective, runs[0].hyper), held_out, self.validation_settings.metric, self.targets
        )
        rows, validation_rows = self._rows(runs)
        schedule = schedules.resolved(self.optimizer.schedule)
        updates = -(-self.steps_per_epoch(runs[0]) // self.updates.accumulate)
        schedules.check(schedule, updates, self.epochs)
        padded = None
        if isinstance(self.initial, NewMembers) and differ(runs):
            padded = self.initial.padded(runs, self.input_dtype())
        body = self.initial.body(runs, self.input_dtype()) if padded is None else padded.body
        own = slice(None) if ranks is None else ranks.own
        if ranks is not None and len(body) == ranks.members > own.stop - own.start:
            body = body.subset(range(len(body))[own])
        feed = self._feed(runs, rows, targets, Conversion.of(body))
        decided = numerics(
            self.precision, body, next(body.parameters()).dtype, device, several_dtypes(body.parameters())
        )
        body.channels_last, body.by_rule = decided.channels_last, decided.deterministic
        body.recompute, body.compiling = self.updates.recompute, self.updates.compile
        if self.updates.compile == "auto":
            body.compiling = "auto" if ranks is None else False  # other processes would wait for one that compiles
        tell_of_updates(self.updates, body)
        if choices is not None:
            body.choices = choices
        initial = None if checkpoint is None else initial_weights(body, ranks)
        check_bootstrap(objective, self.batches.bootstrap, body)
        state = self._state(runs, varying, body, self._class_weights(runs, rows), ranks, padded)
        known = trained_loss(objective)
        loss = None if known is None else known.loss
        losses, unsmoothed = (
            over_runs(weighted(_with_keywords(objective, shared), self.targets, loss, smooth=smooth), len(runs))
            for smooth in (True, False)
        )
        members = max(run.members for run in runs)
        owners = self.initial.owners([replace(run, members=members) for run in runs])  # of rows of padding, too
        body.set_keys(owners[own])
        limit = MemoryLimit(self.max_memory, is_separable(objective), decided.deterministic)
        checkpointer = None
        if checkpoint is not None:
            networks, opaque = PythonState(global_generators(device)), list[str]()
            identity = {
                "network": body.identity(opaque, networks.visit),
                "frozen parameters": _frozen_parameters(body, ranks),
                "initial weights": initial,
                "backend": fingerprint(body.requested_backend, opaque=opaque),
                "numerics": str(decided),
            }
            _tell_opaque({"network": opaque})
            networks.begin()
            state.python = {"settings": self._identified.python, "networks": networks}
            checkpointer = Checkpointer(checkpoint, {**self.fingerprint, **identity}, ranks)
        return Engine(
            state=state,
            feed=feed,
            losses=losses,
            optimizer=self.optimizer.name if isinstance(self.optimizer.name, str) else "",
            schedule=schedule,
            epochs=self.epochs,
            numerics=decided,
            targets=targets,
            bootstrap=self.batches.bootstrap,
            pooled_loss=self._pooled_loss(objective),
            accumulate=self.updates.accumulate,
            validator=self._validator(
                objective, feed, validation_rows, targets, unsmoothed if self.targets.label_smoothing else losses
            ),
            adversary=None if self.adversarial is None else Adversary(self.adversarial, runs[0].seed, device),
            # Gradients of shared parameters come from all members together.
            memory_limit=limit if len(runs) == 1 and state.shared is None and ranks is None else None,
            seeds=[run.seed for run in runs],
            own_members=() if state.settings.own_members is None else [run.members for run in runs],
            padded=padded,
            progress=progress,
            callbacks=callbacks,
            checkpointer=checkpointer,
            ranks=ranks,
            capture=graph_steps,
        )

    @functools.cached_property
    def _pair(self) -> tuple[NetworkInputs, Tensor] | None:
        """Training data as tensors; None where a loader gives it."""
        return as_pair(self.data)

    @functools.cached_property
    def _validation_pair(self) -> tuple[NetworkInputs, Tensor] | None:
        """Validation data as tensors; None where there is none, a loader gives it, or runs split it off."""
        given = not isinstance(self.validation, int | float | Split | None)
        return as_pair(self.validation) if given else None

    def input_dtype(self) -> torch.dtype:
        """The dtype of real numbers among the inputs; bool where there are none, or a loader gives them."""
        inputs = [] if self._pair is None else calls.tensors(self._pair[0])
        return next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.bool)

    @functools.cached_property
    def _examples(self) -> int:
        """The number of examples of tensor data, of all folds."""
        assert self._pair is not None
        return calls.examples(self._pair[0])

    def _feed(
        self, runs: Sequence[Run], rows: Tensor | None, targets: Targets, conversion: Conversion | None = None
    ) -> Batches:
        """The batches of some runs."""
        device, settings, first = self.initial.device, self.batches, runs[0]
        seeds = [run.seed for run in runs]
        shared: dict[str, Any] = {"batch_size": first.batch_size, "device": device, "augment": settings.augment}
        order: dict[str, Any] = {"shuffle": settings.shuffle, "drop_last": settings.drop_last}
        if settings.bootstrap:
            order["bootstrap"] = self.initial.member_numbers(first)
        if self._pair is None:
            feed: TensorBatches | LoadedBatches = LoadedBatches(
                check_source(self.data),
                seeds=seeds,
                check=targets.check,
                unpack=settings.unpack,
                steps_per_epoch=settings.steps_per_epoch,
                conversion=conversion,
                **shared,
                **order,
            )
        else:
            feed = TensorBatches(*self._pair, seeds=seeds, rows=rows, weights=self.weights, **shared, **order)
        if self.unlabelled is None:
            return feed
        beside = {"unpack": settings.unpack, "conversion": conversion}
        return with_unlabelled(feed, self.unlabelled, seeds=seeds, **beside, **shared)

    def _pooled_loss(self, objective: Callable[..., LossParts]) -> Callable[[Tensor], Tensor] | None:
        """With bagging: the loss of all members ``[R]`` from the loss of each ``[R, M]``; None for other objectives."""
        function, keywords = unwrapped(objective)
        if not self.batches.bootstrap or function is not independent or self.active_members is not None:
            return None
        return lambda member_loss: pooling.mean_output(member_loss.T, keywords.get("weights"))

    def _class_weights(self, runs: Sequence[Run], rows: Tensor | None) -> Tensor | None:
        """The class weights of every run, ``[R, C]``."""
        settings = self.targets
        if settings.class_weights is None:
            return None
        if isinstance(settings.class_weights, Tensor):
            return settings.class_weights.expand(len(runs), -1)
        assert self._pair is not None
        y = self._pair[1].cpu()
        counted = y if settings.ignore_index is None else y[y.long() != settings.ignore_index]
        classes = int(counted.max()) + 1 if counted.numel() else 1
        labels = [y] if rows is None else [y[run] for run in rows]
        each = torch.stack([balanced_weights(part, classes, settings.ignore_index) for part in labels])
        return each.expand(len(runs), -1)

    def _state(
        self,
        runs: Sequence[Run],
        hyper: dict[str, list[float]],
        body: Body,
        class_weights: Tensor | None,
        ranks: Ranks | None = None,
        padded: PaddedRuns | None = None,
    ) -> TrainState:
        """The state of some runs before their first step."""
        members, seeds, device = max(run.members for run in runs), [run.seed for run in runs], self.initial.device
        flat = body.packed()
        if self._pair is not None and Conversion.of(body).exact:
            check_dtype(self._pair[0], flat.dtype)
        columns = {
            name: [number for run in runs for number in optim.per_member(name, run.optimizer[name], members)]
            for name in runs[0].optimizer
        }
        if ranks is not None:
            columns = {name: numbers[ranks.own] for name, numbers in columns.items()}
        clip_norm = columns.pop("clip_norm", None)
        own = self._member_optimizers(body, flat)
        optimizer = self._optimizer_columns(columns, body, flat, own)
        active = _active(self.frozen, members, device).repeat(len(runs))
        momentum = optimizer.momentum
        if ranks is not None:  # whether there is a velocity is the same in all processes
            momentum = ranks.gathered(momentum)
        of_objective = {name: flat.new_tensor(values) for name, values in hyper.items()}
        shares = None if padded is None else padded.weights(flat)
        if shares is not None:
            of_objective["weights"] = shares
        state = TrainState(
            body=body,
            flat=flat,
            members=members if ranks is None else len(flat),
            settings=RunSettings(
                optimizer=optimizer,
                clip_norm=None if clip_norm is None else optim.column("clip_norm", clip_norm, len(flat), flat),
                hyper=of_objective,
                own_members=None if shares is None else flat.new_tensor([run.members for run in runs]),
                class_weights=None
                if class_weights is None
                else class_weights.to(device, torch.promote_types(flat.dtype, torch.float32)),
                draw_keys=draw_keys(self.objective, seeds, device),
                sampling=MemberSampling.of(self.active_members, members, seeds, device),
            ),
            moments={}
            if own is not None
            else optim.initial_moments(str(self.optimizer.name), flat, momentum, optimizer.matrices),
            optimizers=own,
            average=None if self.updates.ema is None else WeightAverage(self.updates.ema, body, flat),
            accumulated=GradientAverage(flat) if self.updates.accumulate > 1 else None,
            shared=self._shared_weights(runs, body),
            active=active if ranks is None else active[ranks.own].clone(),
            own=None if ranks is None else ranks.own,
            stopping=None
            if self.validation is None
            else EarlyStopping(body, flat, len(flat) // len(runs), self.validation_settings),
            held=[] if padded is None else padded.held_columns(flat, decays=optimizer.decays),
            freezing=Freezing.of(self.freeze, members, self.active_members),
        )
        state.resting = not bool(active.all())  # members of other processes count too
        check_drawn(state)
        return state

    def _shared_weights(self, runs: Sequence[Run], body: Body) -> SharedWeights | None:
        """Trainable parameters that members share; None where there are none."""
        self._check_shared(body)
        if not body.shared_trainable():
            return None
        rows, settings = body.shared_packed(), self.optimizer
        own = [self.shared.of_run(run.shared) for run in runs]
        matrices = shared_matrix_columns(body, rows) if settings.name == "muon" else None
        hyper = {name: [run.optimizer[name] for run in runs] for name in runs[0].optimizer if name != "clip_norm"}
        hyper["lr"] = [run.optimizer["lr"] if one.lr is None else one.lr for run, one in zip(runs, own, strict=True)]
        columns = optim.settings(
            {**hyper, "betas": settings.betas, "eps": settings.eps},
            len(runs),
            rows,
            nesterov=bool(settings.nesterov),
            decayed=shared_decay_mask(body, rows, settings.no_decay),
            matrices=matrices,
        )
        given = [one.clip_norm or run.optimizer.get("clip_norm") for run, one in zip(runs, own, strict=True)]
        clip_norm = [largest for largest in given if largest is not None]  # all or none, as in `grouped`
        return SharedWeights(
            flat=rows,
            settings=columns,
            moments=optim.initial_moments(str(settings.name), rows, columns.momentum, matrices),
            clip_norm=optim.column("clip_norm", clip_norm, len(runs), rows) if clip_norm else None,
            scale=1 / runs[0].members if self.shared.gradient == "mean" else 1.0,
            ema=self.updates.ema,
            accumulated=GradientAverage(rows) if self.updates.accumulate > 1 else None,
        )

    def _member_optimizers(self, body: Body, flat: Tensor) -> MemberOptimizers | None:
        """Optimizers that the user brings, one per row; None for a name."""
        make = self.optimizer.make
        if make is None:
            return None
        scheduled = self.optimizer.schedule != "constant"
        check_optimizer(make, body, flat, stored=self.checkpoint is not None, scheduled=scheduled)
        own = MemberOptimizers(make, body, flat, scheduled=scheduled)
        if own.has_modes and self.updates.ema is not None:
            fix = "It averages weights itself: leave `ema` out."
            checks.refuse("ema", "come without an optimizer that has modes for training and evaluation", own.name, fix)
        on_gpu = ", and steps are not captured in graphs" if flat.is_cuda else ""
        log.info("optimizer %s: one per member, stepped in a loop; passes stay stacked%s", own.name, on_gpu)
        return own

    def _optimizer_columns(
        self, columns: dict[str, list[float]], body: Body, flat: Tensor, own: MemberOptimizers | None
    ) -> optim.OptimizerColumns:
        """Settings of the optimizer, one row per member; of those that the user brings, the learning rates alone."""
        settings = self.optimizer
        if own is not None:
            none = flat.new_zeros((len(flat), 1), dtype=optim.wide(flat))
            return optim.OptimizerColumns(
                lr=none + none.new_tensor(own.rates()).unsqueeze(1),
                weight_decay=none,
                momentum=none,
                betas=(0.0, 0.0),
                eps=0.0,
                nesterov=False,
                decays=False,
            )
        optimizer = optim.settings(
            {**columns, "betas": settings.betas, "eps": settings.eps},
            len(flat),
            flat,
            nesterov=bool(settings.nesterov),
            decayed=decay_mask(body, flat, settings.no_decay),
            matrices=matrix_columns(body, flat) if settings.name == "muon" else None,
            sections=body.sections,
        )
        check_momentum(str(settings.name), optimizer.momentum)
        return optimizer

    def _validator(
        self, objective: Objective, feed: Batches, rows: Tensor | None, targets: Targets, losses: RunLosses
    ) -> Validation | None:
        """Measures validation data after every epoch; None where there is none."""
        if self.validation is None:
            return None
        weights = self.validation_weights
        if isinstance(self.validation, int | float | Split):
            labelled = feed.labelled if isinstance(feed, WithUnlabelled) else feed
            assert isinstance(labelled, TensorBatches)
            data: Any = (labelled.x, labelled.y)
            weights = labelled.weights
        elif self._validation_pair is not None:
            x, y = self._validation_pair
            data = calls.mapped(lambda tensor: tensor.to(self.initial.device), x), y.to(self.initial.device)
        else:
            loader = _loader(self.validation, self.runs[0].batch_size)
            data = Source(loader, self.batches.unpack)
        return Validation(
            data,
            objective,
            self.validation_settings,
            rows,
            targets.check_held_out,
            losses,
            self.targets,
            None if weights is None else weights.to(self.initial.device),
        )

    def _rows(self, runs: Sequence[Run]) -> tuple[Tensor | None, Tensor | None]:
        """Each run's training and validation rows ``[R, n]``; None where all runs take all rows."""
        if self._pair is None:
            return None, None
        size = self._examples // self.folds
        if isinstance(self.validation, int | float | Split):
            splits = [
                held_out_rows(self.validation, self._pair[1][run.fold * size : (run.fold + 1) * size], run.split_seed)
                for run in runs
            ]
            train = [rest + run.fold * size for run, (rest, _) in zip(runs, splits, strict=True)]
            held_out = [part + run.fold * size for run, (_, part) in zip(runs, splits, strict=True)]
            return torch.stack(train), torch.stack(held_out)
        if self.folds == 1:
            return None, None
        starts = torch.tensor([[run.fold] for run in runs])
        rows = starts * size + torch.arange(size)
        if self._validation_pair is None or self.validation_folds == 1:
            return rows, None
        held_out_size = len(self._validation_pair[1]) // self.folds
        return rows, starts * held_out_size + torch.arange(held_out_size)

    def training_sizes(self) -> list[int]:
        """The number of training examples of every run: it differs where runs split off other groups."""
        if self._pair is None or not isinstance(self.validation, Split):
            return [0] * len(self.runs)  # all runs have as many
        drawn = {(run.fold, run.split_seed): run for run in self.runs}
        sizes = {place: self._training_size(run) for place, run in drawn.items()}
        return [sizes[run.fold, run.split_seed] for run in self.runs]

    def _training_size(self, run: Run) -> int:
        rows, _ = self._rows([run])
        assert rows is not None
        return rows.shape[1]

    def steps(self, number: int) -> int:
        """Steps of the whole training of a run."""
        return self.epochs * self.steps_per_epoch(self.runs[number])

    def steps_per_epoch(self, run: Run) -> int:
        """Steps of an epoch of a run."""
        if self._pair is None:
            return len(self._feed([run], None, Targets()))
        rows, _ = self._rows([run])
        examples = self._examples if rows is None else rows.shape[1]
        return examples // run.batch_size if self.batches.drop_last else -(-examples // run.batch_size)


def _is_readable(value: object) -> bool:
    """Whether a setting is stored as it is, so that an error can show it, and not as a checksum."""
    entries = value if isinstance(value, list | tuple) else [value]
    return all(type(entry) in (bool, int, float, str, type(None)) for entry in entries) and len(repr(value)) < 60


def _tell_opaque(opaque: Mapping[str, Sequence[str]]) -> None:
    """Name settings that hold what cannot be inspected, in one line of the log."""
    names = "; ".join(f"`{name}` ({', '.join(sorted(set(parts)))})" for name, parts in opaque.items() if parts)
    if names:
        log.warning("checkpoints do not recognise a change of all parts of %s: resume with the same ones", names)


def _with_keywords(objective: Callable[..., LossParts], keywords: Mapping[str, Any]) -> Callable[..., LossParts]:
    return functools.partial(objective, **keywords) if keywords else objective


def _hyperparameters(runs: Sequence[Run]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The objective's numbers that differ between runs, and those that all runs share."""
    first = runs[0].hyper
    shared = {name: value for name, value in first.items() if all(run.hyper[name] == value for run in runs)}
    return {name: [run.hyper[name] for run in runs] for name in first if name not in shared}, shared


def _active(frozen: Sequence[int], members: int, device: torch.device) -> Tensor:
    """Members that train, bool ``[M]``."""
    active = torch.ones(members, dtype=torch.bool)
    for index in frozen:
        if isinstance(index, bool) or not isinstance(index, numbers.Integral) or not -members <= index < members:
            checks.refuse("frozen", f"name members 0 to {members - 1}", repr(index))
        active[index] = False
    if not bool(active.any()):
        checks.refuse("frozen", "leave at least one member to train", "all of them")
    return active.to(device)


_interrupted: dict[str, str] = {}
"""Weights that interrupted trainings of this process have left, and those that they began with, as checksums."""


def initial_weights(body: Body, ranks: Ranks | None = None) -> str:
    """A checksum of the weights before training; weights that an interrupted training has left stand for its own."""
    stored = stored_tensors(body)
    if ranks is None:
        weights = digest(*stored.values())
        return _interrupted.get(weights, weights)
    of_all = ranks.everyone(_interrupted.get(digest(*stored.values())))
    if of_all[0] is not None and len(set(of_all)) == 1:
        return of_all[0]
    weights = digest(*_of_all_members(stored, body, ranks).values())
    return _interrupted.get(weights, weights)


def note_interruption(body: Body, initial: str) -> None:
    """Note that a training which began with some weights was interrupted, so that it is resumed with its ensemble."""
    _interrupted[digest(*stored_tensors(body).values())] = initial


def _of_all_members(tensors: Mapping[str, Tensor], body: Body, ranks: Ranks | None) -> dict[str, Tensor]:
    """Tensors of a body, with the rows of all members where processes share them."""
    if ranks is None:
        return dict(tensors)
    own = body.tensors()
    return {name: ranks.gathered(t.detach()) if name in own else t for name, t in tensors.items()}


def _frozen_parameters(body: Body, ranks: Ranks | None = None) -> str:
    """A checksum of the parameters that training does not change."""
    tensors = {**body.tensors(), **body.shared_tensors()}
    frozen = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    of_all = _of_all_members(frozen, body, ranks)
    return fingerprint({name: nn.Parameter(t, requires_grad=False) for name, t in of_all.items()})


def _loader(source: DataLike, batch_size: int) -> Iterable[Any]:
    """Batches of validation data, which are read once per epoch."""
    source = check_source(source, "validation")
    if isinstance(source, Iterator):
        fix = "Pass a list or a DataLoader."
        checks.refuse("validation", "be readable once per epoch", "an iterator, which can be read once", fix, TypeError)
    if isinstance(source, DataLoader) or not isinstance(source, Dataset):
        return source
    return DataLoader(source, batch_size, generator=torch.Generator(), collate_fn=getattr(source, "collate", None))

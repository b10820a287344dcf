"""`sweep`: a grid of runs as one training, wherever runs share shapes."""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dissensus.train.memory as memory
import dissensus.train.optim as optim
import dissensus.train.schedules as schedules
from dissensus import checks
from dissensus.axes import LossParts
from dissensus.data.batches import Augments, TensorBatches, end_to_end, split_rows
from dissensus.data.recognition import digest
from dissensus.data.unlabelled import with_unlabelled
from dissensus.ensemble import fresh_members
from dissensus.execution import BACKENDS, Choices, StackedMembers
from dissensus.execution.weights import check_one_dtype
from dissensus.objectives.declaration import ADVERSARIAL, takes
from dissensus.storage import StorageError, write_atomically
from dissensus.train.capture import graph_steps
from dissensus.train.checkpoint import Checkpointer, in_words, train
from dissensus.train.compatibility import (
    check_augments,
    check_drawn,
    check_few,
    check_like,
    check_patience,
    check_resume,
    check_unlabelled,
    check_validation,
    held_out_of,
    is_separable,
    recognised,
    tell_of_split,
)
from dissensus.train.early_stopping import Watch
from dissensus.train.engine import Engine
from dissensus.train.evaluation import Metric, Validation, over_runs
from dissensus.train.grid import Grid, Run, draw_keys, grouped, runs_of
from dissensus.train.history import History, OnProgress, Progress
from dissensus.train.numerics import Precision, numerics
from dissensus.train.probing import probe, targets_of
from dissensus.train.sampling import Drawn
from dissensus.train.sweep_result import Group, Outcome, Sweep

log = logging.getLogger("dissensus")


def sweep(
    build: Callable[..., nn.Module],
    data: tuple[Tensor, Tensor] | list[tuple[Tensor, Tensor]],
    objective: Callable[..., LossParts],
    *,
    grid: Grid,
    members: int = 5,
    epochs: int,
    batch_size: int = 128,
    lr: float = 1e-3,
    optimizer: str = "adamw",
    momentum: float = 0.0,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    schedule: str | schedules.Schedule = "constant",
    clip_norm: float | None = None,
    unlabelled: Tensor | None = None,
    active_members: int | None = None,
    validation: tuple[Tensor, Tensor] | list[tuple[Tensor, Tensor]] | float | None = None,
    metric: Metric | None = None,
    mode: Literal["min", "max"] | None = None,
    track: Mapping[str, Metric] | None = None,
    watch: Literal["ensemble", "member"] = "ensemble",
    patience: int | None = None,
    min_delta: float = 0.0,
    keep: Literal["best", "last"] = "best",
    augment: Augments = None,
    precision: Precision = "auto",
    channels_last: bool | None = None,
    deterministic: bool = False,
    shuffle: bool = True,
    drop_last: bool = False,
    backend: str = "auto",
    device: str | torch.device | None = None,
    max_memory: int | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = None,
    progress: OnProgress | None = None,
    seed: int = 0,
) -> Sweep:
    """Train every point of a grid, as one computation with a leading run axis wherever shapes agree.

    Every run equals the same run fitted alone: its own initialisation, split, order of data, dropout, early stopping
    and best weights. A run that turns NaN is frozen and marked failed; the others go on. Runs that are done stop
    costing.

    Args:
        build: Returns a new member; keys of the grid that are its parameters (a width, say) are passed to it.
        data: ``(x, y)`` tensors; or a list of such pairs, all of one shape (the folds of a cross-validation, say), of
            which the grid's ``fold`` names one for every run.
        objective: ``(outputs, targets, **hyperparameters) -> LossParts``.
        grid: Names to lists of values (their product is taken), or a list of points. Names: the objective's parameters;
            ``lr``, ``weight_decay``, ``momentum``, ``clip_norm``; ``seed``, ``split_seed``; ``fold``;
            ``members``, ``batch_size``; parameters of ``build``.
        members: M, unless the grid says.
        unlabelled: As in `dissensus.fit`, a tensor; so is ``active_members``.
        epochs: As in `dissensus.fit`; so is everything up to ``drop_last``.
        validation: ``(x, y)`` for all runs, a list with one pair per fold, or the fraction that each run splits off by
            its own ``split_seed``.
        backend: As in `dissensus.Ensemble`.
        device: Where to train; by default where ``x`` is.
        max_memory: Bytes that training may take; by default 80 % of a GPU's free memory, or half of the machine's.
            More runs than fit are trained in parts, one after the other; of a run that does not fit, the members.
        checkpoint: A folder, so that a sweep that was killed can go on with ``resume=True``.
        progress: Called with a `Progress` whose losses are means over runs.
        seed: Every run's seed, unless the grid says.

    >>> import dissensus as ds
    >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
    >>> objective = functools.partial(ds.objectives.augmented, loss="mse", pool="score")
    >>> build = functools.partial(ds.nets.mlp, 3, 1, (8,))
    >>> result = ds.sweep(build, (x, y), objective, grid={"beta": [0, 0.5, 1]}, members=2, epochs=2)
    >>> result.outputs(x).shape
    torch.Size([3, 2, 64, 1])
    """
    checks.count("epochs", epochs)
    checks.one_of("optimizer", optimizer, optim.OPTIMIZERS)
    checks.one_of("backend", backend, ["auto", *BACKENDS])
    checks.one_of("watch", watch, ("ensemble", "member"))
    checks.one_of("keep", keep, ("best", "last"))
    x, y, folds = end_to_end("data", data)
    held, held_folds = held_out_of(validation, folds)
    check_patience(patience, min_delta, validation)
    mode = check_validation(held, None, metric, mode)
    check_resume(resume, checkpoint)
    check_unlabelled(objective, unlabelled)
    check_few(objective, active_members)
    if unlabelled is not None:
        check_like((x, y), unlabelled)
    if takes(objective, ADVERSARIAL):
        checks.refuse("objective", "need no attacked inputs in a sweep", "one that does", "Use fit(adversarial=...).")
    defaults = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "clip_norm": clip_norm,
        "seed": seed,
        "members": members,
        "batch_size": batch_size,
    }
    recipe = Recipe(
        runs=runs_of(grid, build, objective, defaults, folds),
        build=build,
        x=x,
        y=y,
        folds=folds,
        held_folds=held_folds,
        objective=objective,
        epochs=epochs,
        optimizer=optimizer,
        nesterov=nesterov,
        betas=betas,
        eps=eps,
        schedule=schedules.resolved(schedule),
        validation=held,
        metric=metric,
        mode=mode,
        track=track,
        per_member=watch == "member",
        patience=patience,
        min_delta=min_delta,
        keep=keep,
        augment=augment,
        precision=precision,
        channels_last=channels_last,
        deterministic=deterministic,
        shuffle=shuffle,
        drop_last=drop_last,
        unlabelled=unlabelled,
        active_members=active_members,
        backend=backend,
        device=torch.device(device) if device is not None else x.device,
    )
    for targets in targets_of(objective, recipe.runs, held):
        targets.check_all(y)
    folder = None if checkpoint is None else Path(checkpoint)
    parts = _planned(recipe, max_memory, folder, resume)
    groups: list[Group] = []
    outcomes: dict[int, Outcome] = {}
    done, total = 0, sum(recipe.steps(part[0]) for part in parts)
    group_of = {number: place for place, group in enumerate(grouped(recipe.runs)) for number in group}
    choices = {place: Choices() for place in group_of.values()}
    for index, part in enumerate(parts):
        engine = recipe.engine(part)
        place = group_of[part[0]]
        engine.body.choices = choices[place]  # measured once for all parts of a group
        engine.captured = graph_steps(engine)
        if progress is not None:
            engine.progress = functools.partial(_shifted, progress, done, total)
        checkpointer = None
        if folder is not None:
            told = {**recipe.told(), "network": engine.body.identity()}
            chosen = folder / f"choices-{place:04d}.json"
            checkpointer = Checkpointer(folder / f"part-{index:04d}", told, checkpoint_seconds, chosen)
            engine.after_step = checkpointer
        if len(part) == 1:
            separable = is_separable(objective)
            engine.plan = functools.partial(memory.plan_members, max_memory=max_memory, separable=separable)
        train(engine, checkpointer, resume)
        engine.body.eval()
        done += recipe.steps(part[0])
        groups.append(recipe.group(part, engine))
        outcomes |= {number: _outcome(engine, place) for place, number in enumerate(part)}
    return Sweep([run.point for run in recipe.runs], [outcomes[n] for n in range(len(outcomes))], groups)


@dataclass(frozen=True)
class Recipe:
    """Everything that the runs of a sweep have in common, and how an engine is made for some of them."""

    runs: list[Run]
    build: Callable[..., nn.Module]
    x: Tensor
    y: Tensor
    folds: int
    held_folds: int
    """Of validation data: one for all, or as many as of training data."""
    objective: Callable[..., LossParts]
    epochs: int
    optimizer: str
    nesterov: bool
    betas: tuple[float, float]
    eps: float
    schedule: schedules.Schedule
    validation: tuple[Tensor, Tensor] | float | None
    """Of several folds, those of all, end to end."""
    metric: Metric | None
    mode: str
    track: Mapping[str, Metric] | None
    per_member: bool
    patience: int | None
    min_delta: float
    keep: str
    augment: Augments
    precision: Precision
    channels_last: bool | None
    deterministic: bool
    shuffle: bool
    drop_last: bool
    unlabelled: Tensor | None
    active_members: int | None
    backend: str
    device: torch.device

    def told(self) -> dict[str, Any]:
        """What this sweep is, for checkpoints to be recognised by."""
        own = (
            "folds",
            "held_folds",
            "objective",
            "build",
            "epochs",
            "optimizer",
            "nesterov",
            "betas",
            "eps",
            "metric",
            "mode",
            "per_member",
            "patience",
            "min_delta",
            "keep",
            "augment",
            "precision",
            "channels_last",
            "deterministic",
            "shuffle",
            "drop_last",
            "active_members",
        )
        settings = {name: getattr(self, name) for name in own}
        held = digest(*self.validation) if isinstance(self.validation, tuple) else self.validation
        at = torch.arange(self.epochs, dtype=torch.float64)
        told = {
            **settings,
            "data": digest(self.x, self.y),
            "validation": held,
            "unlabelled": recognised(self.unlabelled),
            "runs": [vars(run) for run in self.runs],
            "schedule": self.schedule(at, float(self.epochs)).tolist(),
        }
        return json.loads(json.dumps(told, default=in_words))

    def engine(self, numbers: Sequence[int]) -> Engine:
        """An engine for runs of one shape, at their beginning."""
        runs = [self.runs[n] for n in numbers]
        first = runs[0]
        body = _initial(self.build, runs, self.x.dtype).to(self.device)
        decided = numerics(
            self.precision, self.channels_last, self.deterministic, body, next(body.parameters()).dtype, self.device
        )
        body.backend, body.channels_last, body.by_rule = self.backend, decided.channels_last, self.deterministic
        flat = body.packed()
        per_row = {key: [run.optimiser[key] for run in runs for _ in range(first.members)] for key in first.optimiser}
        limit = per_row.pop("clip_norm", None)
        rows, held = self._rows(runs)
        check_augments(self.augment, first.members)
        shared: dict[str, Any] = {
            "batch_size": first.batch_size,
            "seeds": [run.seed for run in runs],
            "device": self.device,
            "augment": self.augment,
        }
        feed = own = TensorBatches(self.x, self.y, rows=rows, shuffle=self.shuffle, drop_last=self.drop_last, **shared)
        if self.unlabelled is not None:
            feed = with_unlabelled(own, self.unlabelled, **shared)
        shared_numbers = {
            name: value for name, value in first.hyper.items() if all(r.hyper[name] == value for r in runs)
        }
        hyper = {
            name: flat.new_tensor([run.hyper[name] for run in runs])
            for name in first.hyper
            if name not in shared_numbers
        }
        numbers_of = {"betas": self.betas, "eps": self.eps, **per_row}
        engine = Engine(
            body=body,
            flat=flat,
            members=first.members,
            losses=over_runs(functools.partial(self.objective, **first.words, **shared_numbers), len(runs)),
            hyper=hyper,
            optimizer=self.optimizer,
            settings=optim.settings(numbers_of, len(flat), flat, nesterov=self.nesterov),
            limit=None if limit is None else optim.column("clip_norm", limit, len(flat), flat),
            active=torch.ones(len(flat), dtype=torch.bool, device=self.device),
            feed=feed,
            schedule=self.schedule,
            epochs=self.epochs,
            numerics=decided,
            keys=draw_keys(self.objective, [run.seed for run in runs], self.device),
            drawn=Drawn.of(self.active_members, first.members, [run.seed for run in runs], self.device),
        )
        check_drawn(engine)
        self._watched(engine, own, held, first.words)
        return engine

    def _watched(self, engine: Engine, feed: TensorBatches, rows: Tensor | None, words: Mapping[str, Any]) -> None:
        """Give an engine its validation data, where there is any."""
        if self.validation is None:
            return
        x, y = self.validation if isinstance(self.validation, tuple) else (feed.x, feed.y)
        x, y = x.to(self.device), y.to(self.device)
        engine.validator = Validation(
            (x, y),
            functools.partial(self.objective, **words),
            rows=rows,
            metric=self.metric,
            per_member=self.per_member,
            track=self.track,
        )
        engine.watch = Watch(
            engine.body,
            engine.flat,
            members=engine.members,
            per_member=self.per_member,
            patience=self.patience,
            min_delta=self.min_delta,
            keep=self.keep,
            mode=self.mode,
        )

    def _rows(self, runs: Sequence[Run]) -> tuple[Tensor | None, Tensor | None]:
        """Each run's training and validation rows ``[R, n]``; None where all runs take all."""
        size = len(self.x) // self.folds
        if isinstance(self.validation, float):
            splits = [split_rows(size, self.validation, run.split_seed) for run in runs]
            both = [
                (rest + run.fold * size, part + run.fold * size) for run, (rest, part) in zip(runs, splits, strict=True)
            ]
            return torch.stack([rest for rest, _ in both]), torch.stack([part for _, part in both])
        if self.folds == 1:
            return None, None
        starts = torch.tensor([[run.fold] for run in runs])
        rows = starts * size + torch.arange(size)
        if not isinstance(self.validation, tuple) or self.held_folds == 1:
            return rows, None
        held = len(self.validation[0]) // self.folds
        return rows, starts * held + torch.arange(held)

    def steps(self, number: int) -> int:
        """Steps of a run's whole training."""
        run = self.runs[number]
        rows, _ = self._rows([run])
        examples = len(self.x) if rows is None else rows.shape[1]
        each = examples // run.batch_size if self.drop_last else -(-examples // run.batch_size)
        return self.epochs * each

    def group(self, numbers: list[int], engine: Engine) -> Group:
        """The trained members of some runs."""
        assert isinstance(engine.body, StackedMembers)
        runs = [self.runs[n] for n in numbers]
        return Group(list(numbers), engine.body, runs[0].members, runs[0].build, [run.seed for run in runs])


def _initial(build: Callable[..., nn.Module], runs: Sequence[Run], dtype: torch.dtype) -> StackedMembers:
    """Stacked members of all runs; runs of the same seed start from the same weights, which are drawn once."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    members = runs[0].members
    make = functools.partial(build, **runs[0].build)
    try:
        drawn = StackedMembers.of(network for seed in seeds for network in fresh_members(make, seed, members))
    except ValueError as reason:
        raise ValueError(f"`build` must return the same architecture at every call: {reason}.") from reason
    check_one_dtype(drawn.trainable())
    rows = [seeds.index(run.seed) * members + m for run in runs for m in range(members)]
    body = drawn.subset(rows)
    body.set_keys([(run.seed, m) for run in runs for m in range(members)])
    own = {parameter.dtype for parameter in body.trainable().values()}
    return body.to(dtype) if dtype.is_floating_point and own != {dtype} else body


def _planned(recipe: Recipe, max_memory: int | None, folder: Path | None, resume: bool) -> list[list[int]]:
    """Groups of runs of one shape, cut to parts that fit into memory; the plan is kept with the checkpoints."""
    plan = None if folder is None else folder / "plan.json"
    if plan is not None and plan.exists():
        return _stored_plan(plan, recipe, resume)
    parts: list[list[int]] = []
    for group in grouped(recipe.runs):
        engine = recipe.engine(group[:1])
        tell_of_split(engine.body, recipe.objective)
        size = memory.needs(engine, next(engine.feed.epoch(0))[0]).whole
        probe(engine, [recipe.runs[n] for n in group], recipe.objective, recipe.y, recipe.validation)
        budget = memory.allowed(max_memory, recipe.device, deterministic=recipe.deterministic)
        at_once = memory.runs_at_once(size, len(group), budget)
        log.info(
            "%d runs of %d members, about %s each: %d at once (%s)",
            len(group),
            engine.members,
            memory.mebibytes(size),
            at_once,
            memory.mebibytes(size * at_once),
        )
        parts += [group[i : i + at_once] for i in range(0, len(group), at_once)]
    if plan is not None:
        plan.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(plan, json.dumps({"told": recipe.told(), "parts": parts}).encode())
    return parts


def _stored_plan(plan: Path, recipe: Recipe, resume: bool) -> list[list[int]]:
    if not resume:
        raise ValueError(f"{plan.parent} holds a sweep already; pass resume=True to go on with it, or another folder.")
    stored, told = json.loads(plan.read_text()), recipe.told()
    differing = [key for key in told if stored["told"].get(key) != told[key]]
    if differing:
        raise StorageError(f"{plan.parent} belongs to another sweep: {', '.join(map(repr, differing))} differ.")
    return stored["parts"]


def _shifted(progress: OnProgress, before: int, total: int, moment: Progress) -> None:
    values = {**vars(moment), "step": before + moment.step, "steps": total}
    progress(Progress(**values))


def _outcome(engine: Engine, place: int) -> Outcome:
    failure = engine.failures.get(place)
    history = History(
        epochs=engine.histories[place],
        steps=failure.step if failure else len(engine.histories[place]) * len(engine.feed),
        seconds=engine.histories[place][-1]["seconds"] if engine.histories[place] else 0.0,
        stopped_early=failure is None and len(engine.histories[place]) < engine.epochs,
        best_epoch=engine.best_epochs.get(place),
        backend=engine.backend,
        precision=str(engine.numerics),
        memory=engine.planned,
    )
    status = "failed" if failure else "stopped early" if history.stopped_early else "done"
    return Outcome(status, str(failure) if failure else "", history)

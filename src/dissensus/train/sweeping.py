"""`sweep`: a grid of runs as one training, wherever runs share shapes."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import dissensus.train.memory as memory
import dissensus.train.schedules as schedules
from dissensus import calls, checks
from dissensus.arrays import Conversion, has_whole_numbers
from dissensus.axes import LossParts
from dissensus.batch import Unpack
from dissensus.calls import OutputChoice, first_tensor
from dissensus.data.batches import Augments, DataLike, as_pair, end_to_end, folds_of, is_source, refuse_iterator
from dissensus.data.splits import Split
from dissensus.execution import Backend, Choices
from dissensus.execution.out_of_memory import advising
from dissensus.execution.sharing import Shared
from dissensus.randomness import drawn_seed, seeded
from dissensus.storage import OtherFormat, StorageError, read_folder, read_record, write_folder, write_record
from dissensus.train.bar import displayed
from dissensus.train.checkpoint import FORMATS, refuse_other, reserved, train, train_in_step
from dissensus.train.compatibility import check_resume, held_out_of, tell_of_split
from dissensus.train.engine import Engine
from dissensus.train.grid import Grid, Run, grouped, runs_of
from dissensus.train.history import OnProgress, Progress
from dissensus.train.member_optimizers import MakeOptimizer
from dissensus.train.notification import Callbacks, Rung
from dissensus.train.numerics import Precision, PrecisionSettings
from dissensus.train.padded_runs import PaddedRuns, differ
from dissensus.train.padding import Padding, merged, padded_share
from dissensus.train.probing import probe
from dissensus.train.python_state import PythonState, sources_at_beginning
from dissensus.train.recipe import NewMembers, Recipe
from dissensus.train.settings import (
    BatchSettings,
    CheckpointSettings,
    Metric,
    OptimizerSettings,
    SharedSettings,
    TargetSettings,
    UpdateSettings,
    ValidationSettings,
)
from dissensus.train.sweep_result import Group, Outcome, Sweep

log = logging.getLogger("dissensus")

KIND = "dissensus.sweep"
"""Of the folder that holds the generators of a sweep's sources at its beginning."""


def sweep(
    build: Callable[..., nn.Module],
    data: DataLike,
    objective: Callable[..., LossParts],
    *,
    grid: Grid,
    members: int = 5,
    epochs: int,
    batch_size: int = 128,
    lr: float | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    momentum: float | None = None,
    nesterov: bool | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    no_decay: Sequence[str] | bool = False,
    schedule: str | schedules.Schedule = "constant",
    clip_norm: float | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    recompute: bool = False,
    unlabelled: Any = None,
    weights: Any = None,
    unpack: Unpack | None = None,
    steps_per_epoch: int | None = None,
    class_weights: Any = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    class_axis: int = 2,
    bootstrap: bool = False,
    active_members: int | None = None,
    validation: DataLike | float | Split | None = None,
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
    backend: str | Backend = "auto",
    output: OutputChoice | None = None,
    shared: Shared = None,
    shared_lr: float | None = None,
    shared_clip_norm: float | None = None,
    shared_gradient: Literal["mean", "sum"] = "mean",
    device: str | torch.device | None = None,
    max_memory: int | None = None,
    padding: bool | Literal["auto"] = "auto",
    checkpoint: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = None,
    progress: bool | OnProgress | None = None,
    callbacks: Iterable[Any] | None = None,
    seed: int | None = 0,
) -> Sweep:
    """Train every point of a grid of settings.

    Runs whose tensors have the same shapes are trained as one computation with a leading run axis. Every run equals a
    separate `dissensus.fit` with the same settings: initial weights, validation split, data order, dropout, early
    stopping and best weights are its own. A run whose loss becomes NaN or infinite is marked as failed, and the other
    runs continue. A run that has finished takes no further computation.

    Args:
        build: Function that returns a new member. Keys of the grid that are parameters of this function, such as a
            width, are passed to it.
        data: Training data: a pair ``(inputs, targets)``, or a list of such pairs with equal shapes, such as the folds
            of a cross-validation. With a list, ``fold`` in the grid is the index of the pair that a run is trained on.
            Or a ``DataLoader`` or another source of batches, as for `dissensus.fit`; each batch is read once for all
            runs that are trained together.
        objective: Function ``(outputs, targets, **hyperparameters) -> LossParts``.
        grid: Dictionary from names to lists of values, whose product is taken; or a list of points, each a dictionary
            from names to values. Names are parameters of ``objective`` and ``build``, settings of the optimizer
            (``lr``, ``weight_decay``, ``momentum``, ``clip_norm``), ``seed``, ``split_seed``, ``fold``, ``members`` and
            ``batch_size``.
        members: Number of members of every run. The grid takes precedence.
        epochs: Number of passes over the data.
        batch_size: Number of examples per step. The grid takes precedence.
        lr: Learning rate. The grid takes precedence.
        optimizer: See `dissensus.fit`.
        momentum: Momentum of SGD. The grid takes precedence.
        nesterov: See `dissensus.fit`.
        betas: See `dissensus.fit`.
        eps: See `dissensus.fit`.
        weight_decay: See `dissensus.fit`. The grid takes precedence.
        no_decay: See `dissensus.fit`.
        schedule: See `dissensus.fit`.
        clip_norm: Maximum norm of a member's gradient. The grid takes precedence.
        accumulate: See `dissensus.fit`.
        ema: See `dissensus.fit`.
        recompute: See `dissensus.fit`.
        unlabelled: Data without labels as tensors. See `dissensus.fit`.
        weights: See `dissensus.fit`.
        unpack: See `dissensus.fit`.
        steps_per_epoch: See `dissensus.fit`.
        class_weights: See `dissensus.fit`. ``"balanced"`` goes by the training labels of each run.
        label_smoothing: See `dissensus.fit`.
        ignore_index: See `dissensus.fit`.
        class_axis: See `dissensus.fit`.
        bootstrap: See `dissensus.fit`. Examples are drawn by the seed of each run.
        active_members: See `dissensus.fit`.
        validation: Validation data: ``(x, y)`` for all runs, or a list with one pair per fold; or the fraction of the
            training data that every run holds out, by its ``split_seed``; or a `dissensus.data.Split`. Runs whose
            groups differ in size hold out different numbers of examples, and are trained separately. ``Split(...,
            seed=0)`` gives all runs the same split.
        metric: See `dissensus.fit`.
        mode: See `dissensus.fit`.
        track: See `dissensus.fit`.
        watch: See `dissensus.fit`.
        patience: See `dissensus.fit`. Every run stops separately.
        min_delta: See `dissensus.fit`.
        keep: See `dissensus.fit`.
        augment: See `dissensus.fit`.
        precision: See `dissensus.fit`.
        channels_last: See `dissensus.fit`.
        deterministic: See `dissensus.fit`.
        shuffle: See `dissensus.fit`.
        drop_last: See `dissensus.fit`.
        backend: See `dissensus.Ensemble`.
        output: See `dissensus.Ensemble`.
        shared: See `dissensus.Ensemble`. Frozen shared tensors are stored once for all runs that train together, so
            ``build`` must return the same ones for every seed, such as those of one pretrained network. Shared
            parameters that are trained are each run's own.
        shared_lr: See `dissensus.fit`. The grid takes precedence.
        shared_clip_norm: See `dissensus.fit`. The grid takes precedence.
        shared_gradient: See `dissensus.fit`.
        device: Device to train on. The default is the device of ``x``.
        max_memory: Maximum number of bytes that training may allocate. The default is 80 % of the free memory of a GPU,
            or half of the machine's memory. If not all runs fit, they are trained in parts, one after another. If not
            even one run fits, its members are processed in groups.
        padding: Whether runs whose networks differ in width, depth or number train in one computation, padded with
            units, layers and members that are zero. Results are those of separate trainings, to rounding. ``"auto"``
            does it where it is faster; True does it with all of them, or refuses. It takes networks of linear layers
            with functions f(0) = 0 between them, such as ReLU; depths may differ where each layer is followed by a
            ReLU alone, and numbers of members with the objectives `independent` and `augmented`.
        checkpoint: Folder for checkpoints, with which an interrupted sweep can be resumed.
        resume: Whether to resume the sweep in ``checkpoint``. It starts from the beginning if there is none.
        checkpoint_seconds: See `dissensus.fit`.
        progress: True for a bar, or a function that is called with a `Progress`, whose losses are means over runs. See
            `dissensus.fit`.
        callbacks: See `dissensus.fit`. They are called once per run, and entries begin with ``run``, the number of the
            run, and ``point``, its point of the grid. A callback that returns True stops that run; the others go on. A
            run that is stopped by ``on_step`` costs until the end of the epoch. With a callback that has ``on_rung``,
            the weights of all runs are held at once.
        seed: Seed of every run. The grid takes precedence. None draws one seed for all runs from torch's generator.

    Returns:
        The points of the grid, with the trained members, the history and the status of every run.

    >>> import dissensus as ds
    >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
    >>> objective = functools.partial(ds.objectives.augmented, loss="squared_error", pool="score")
    >>> build = functools.partial(ds.nets.mlp, 3, 1, (8,))
    >>> result = ds.sweep(build, (x, y), objective, grid={"beta": [0, 0.5, 1]}, members=2, epochs=2)
    >>> result.outputs(x).shape
    torch.Size([3, 2, 64, 1])
    """
    check_resume(resume, checkpoint, checkpoint_seconds, progress)
    refuse_iterator(data, "checks and for runs that are not trained together")
    listeners = Callbacks.of(callbacks)
    if padding is not True and padding is not False and padding != "auto":
        checks.refuse("padding", "be True, False or 'auto'", repr(padding))
    if padding == "auto" and listeners is not None and listeners.see_runs:
        padding = False  # which runs they see must not depend on what is faster
    seed = drawn_seed() if seed is None else checks.count("seed", seed, 0)
    settings = OptimizerSettings(optimizer, nesterov, betas, eps, schedule, no_decay)  # pyright: ignore[reportArgumentType]
    defaults = {
        **settings.per_run(lr=lr, weight_decay=weight_decay, momentum=momentum),
        "clip_norm": clip_norm,
        "seed": seed,
        "members": members,
        "batch_size": batch_size,
    }
    conversion = Conversion(torch.get_default_dtype())
    if has_whole_numbers(data) or has_whole_numbers(validation):
        run = runs_of(grid, build, objective, defaults, len(folds_of(data)))[0]
        conversion = conversion._replace(indices=_looks_up_indices(build, run))
    train_data: DataLike = data
    folds, place = 1, torch.device("cpu")
    if not is_source(data):
        x, y, folds = end_to_end("data", [conversion.pair(fold) for fold in folds_of(data)])
        train_data, place = (x, y), first_tensor(x).device
        dtypes = [tensor.dtype for tensor in calls.tensors(x) if tensor.is_floating_point()]
        conversion = conversion._replace(dtype=dtypes[0] if dtypes else conversion.dtype)
    if not is_source(validation) and isinstance(validation, tuple | list):
        validation = [conversion.pair(fold) for fold in folds_of(validation)]
    held_out, validation_folds = held_out_of(validation, folds)
    where = place if device is None else checks.device("device", device)
    initial = NewMembers(build, checks.computes("device", where), backend, output, shared)
    recipe = Recipe(
        initial=initial,
        runs=runs_of(grid, build, objective, defaults, folds),
        data=train_data,
        objective=objective,
        epochs=checks.count("epochs", epochs),
        optimizer=settings,
        updates=UpdateSettings(accumulate, ema, recompute),
        shared=SharedSettings(shared_lr, shared_clip_norm, shared_gradient),
        batches=BatchSettings(shuffle, drop_last, augment, unpack, steps_per_epoch, bootstrap),
        targets=TargetSettings.of(conversion, class_weights, label_smoothing, ignore_index, class_axis),
        precision=PrecisionSettings(precision, channels_last, deterministic),
        validation=held_out,
        validation_settings=ValidationSettings(metric, mode, track, watch, patience, min_delta, keep),
        unlabelled=None if unlabelled is None else conversion.inputs(unlabelled, "unlabelled"),
        weights=None if weights is None else conversion.weights(weights),
        folds=folds,
        validation_folds=validation_folds,
        active_members=active_members,
        max_memory=max_memory,
        checkpoint=None
        if checkpoint is None
        else CheckpointSettings(checks.path("checkpoint", checkpoint), resume, checkpoint_seconds),
    )
    on_all = not bootstrap and not isinstance(held_out, float | Split)
    groups: list[Group] = []
    outcomes: dict[int, Outcome] = {}
    with displayed(progress) as display, reserved(recipe.checkpoint):
        sources = sources_at_beginning(initial.device, recipe.data, recipe.unlabelled, recipe.validation)
        parts = _parts(recipe, padding)
        if sources is not None and recipe.checkpoint is not None:
            _keep_beginning(sources, recipe.checkpoint)
        rungs = [] if listeners is None else [rung for rung in listeners.rungs if rung < recipe.epochs]
        if listeners is None or not rungs:
            engines = _in_turn(recipe, parts, sources, display.progress, listeners)
        else:
            engines = _in_step(recipe, parts, rungs, display.progress, listeners)
        for part, engine in engines:
            engine.body.eval()
            engine.body.recompute = False
            runs = [recipe.runs[number] for number in part.numbers]
            seeds = [run.seed for run in runs]
            if engine.padded is None:
                groups.append(Group(part.numbers, engine.body, runs[0].members, runs[0].build, seeds, on_all))
            else:
                groups += _own_groups(engine.padded, engine, part.numbers, seeds, on_all=on_all)
            outcomes |= {number: _outcome(engine, place) for place, number in enumerate(part.numbers)}
        points, ends = [run.point for run in recipe.runs], [outcomes[number] for number in range(len(outcomes))]
        result = Sweep(points, ends, groups, recipe.validation_settings.mode or "min")
        display.summary = str(result)
    return result


def _in_turn(
    recipe: Recipe,
    parts: Sequence["Part"],
    sources: PythonState | None,
    progress: OnProgress | None,
    listeners: Callbacks | None,
) -> Iterator[tuple["Part", Engine]]:
    """Train parts one after another."""
    for part in parts:
        if sources is not None:
            sources.rewind()  # every part reads what a separate training with new sources would
        with advising(functools.partial(_out_of_memory, recipe, part.numbers)):
            engine = part.engine(recipe, progress, listeners)
        train(engine)
        yield part, engine


def _in_step(
    recipe: Recipe, parts: Sequence["Part"], rungs: Sequence[int], progress: OnProgress | None, listeners: Callbacks
) -> list[tuple["Part", Engine]]:
    """Train all parts from rung to rung, so that callbacks can compare runs of all shapes; weights of all are held."""
    if len(parts) > 1 and is_source(recipe.data):
        fix = "Give tensors, or settings with which all runs have the same shapes and fit into memory."
        checks.refuse(
            "data", "be in memory where runs of several shapes wait for each other", "a source of batches", fix
        )
    engines: list[Engine] = []
    steps = [0] * len(parts)

    def summed(place: int, moment: Progress) -> None:
        steps[place] = moment.step
        assert progress is not None
        progress(replace(moment, step=sum(steps)))

    for place, part in enumerate(parts):
        own = None if progress is None else functools.partial(summed, place)
        with advising(functools.partial(_out_of_memory, recipe, part.numbers)):
            engines.append(replace(part, steps_before=0).engine(recipe, own, listeners))

    def compare(rung: int) -> None:
        waiting: list[tuple[int, Engine, int, Any]] = []
        for part, engine in zip(parts, engines, strict=True):
            if engine.state.epoch == rung and engine.callbacks is not None:  # one that was resumed may be ahead
                entries = engine.latest_entries()
                placed = engine.callbacks.placed(entries)
                waiting += [(part.numbers[run], engine, run, at) for run, at in zip(entries, placed, strict=True)]
        waiting.sort(key=lambda item: item[0])

        def outputs() -> list[Any]:
            each = {id(engine): engine.validation_outputs() for engine in {id(e): e for _, e, *_ in waiting}.values()}
            return [each[id(engine)].get(run) for _, engine, run, _ in waiting]

        stopped = listeners.rung(Rung(rung, [entry for *_, entry in waiting], outputs)) if waiting else {}
        for engine in engines:
            own = {waiting[place][2]: by for place, by in stopped.items() if waiting[place][1] is engine}
            if own:
                engine.stop_runs(own)

    train_in_step(engines, rungs, compare)
    return list(zip(parts, engines, strict=True))


def _keep_beginning(sources: PythonState, checkpoint: CheckpointSettings) -> None:
    """Store the beginning of a sweep beside its plan, or restore it: another process has other global generators."""
    folder = checkpoint.folder / "beginning"
    sources.rewind()
    if folder.exists():
        sources.restore(read_folder(folder, KIND, FORMATS)[0])
        sources.begin()
    else:
        write_folder(folder, KIND, sources.tensors(), {}, FORMATS)


def _looks_up_indices(build: Callable[..., nn.Module], run: Run) -> bool:
    """Whether the networks of a run look whole numbers up in an embedding, for which one is built."""
    with seeded(0):
        return Conversion.of(build(**run.build)).indices


@dataclass(frozen=True)
class Part:
    """Runs of one shape that are trained at once."""

    numbers: list[int]
    index: int
    group: int
    """All runs of one shape are a group, whose parts are trained one after the other."""
    choices: Choices
    """Backends of the group: measured once for all of its parts."""
    steps_before: int
    steps_in_all: int

    def engine(self, recipe: Recipe, progress: OnProgress | None, callbacks: Callbacks | None) -> Engine:
        """The engine of these runs."""
        checkpoint = recipe.checkpoint
        if checkpoint is not None:
            folder = checkpoint.folder / f"part-{self.index:04d}"
            choices = checkpoint.folder / f"choices-{self.group:04d}.json"
            checkpoint = replace(checkpoint, folder=folder, choices=choices, part=tuple(self.numbers))
        if progress is not None:
            progress = functools.partial(_shifted, progress, self.steps_before, self.steps_in_all)
        if callbacks is not None:
            callbacks = callbacks.for_runs(self.numbers, [run.point for run in recipe.runs])
        return recipe.engine(
            self.numbers, progress=progress, callbacks=callbacks, checkpoint=checkpoint, choices=self.choices
        )


def _own_groups(
    padded: PaddedRuns, engine: Engine, numbers: list[int], seeds: list[int], *, on_all: bool
) -> list[Group]:
    """Runs that were trained together as groups of their own shapes."""
    return [
        Group([numbers[i] for i in own.runs], body, own.members, own.build, [seeds[i] for i in own.runs], on_all)
        for own, body in padded.unpadded(engine.body)
    ]


def _parts(recipe: Recipe, padding: Padding) -> list[Part]:
    """The parts of a sweep, in the order of their training."""
    planned = _planned(recipe, padding)
    shapes = {
        number: place for place, group in enumerate(grouped(recipe.runs, recipe.training_sizes())) for number in group
    }
    together = {frozenset(shapes[number] for number in numbers): None for numbers in planned}
    places = {group: place for place, group in enumerate(together)}
    group_of = {numbers[0]: places[frozenset(shapes[number] for number in numbers)] for numbers in planned}
    choices = {place: Choices() for place in places.values()}
    steps = [recipe.steps(numbers[0]) for numbers in planned]
    return [
        Part(
            numbers=numbers,
            index=index,
            group=group_of[numbers[0]],
            choices=choices[group_of[numbers[0]]],
            steps_before=sum(steps[:index]),
            steps_in_all=sum(steps),
        )
        for index, numbers in enumerate(planned)
    ]


def _planned(recipe: Recipe, padding: Padding) -> list[list[int]]:
    """Groups of runs of one shape, cut to parts that fit into memory; the plan is stored with the checkpoints."""
    file = None if recipe.checkpoint is None else recipe.checkpoint.folder / "plan.json"
    fingerprint = None if file is None else recipe.fingerprint  # before the objective is tried, which it may count
    if recipe.checkpoint is not None and file is not None and file.exists():
        return _stored_plan(file, recipe, recipe.checkpoint.resume)
    parts: list[list[int]] = []
    for group in merged(recipe, grouped(recipe.runs, recipe.training_sizes()), padding):
        with advising(functools.partial(_out_of_memory, recipe, group[:1])):
            at_once = _runs_at_once(recipe, group)
        parts += [group[i : i + at_once] for i in range(0, len(group), at_once)]
    if file is not None:
        write_record(file, {"format": FORMATS.newest, "fingerprint": fingerprint, "parts": parts})
    return parts


def _runs_at_once(recipe: Recipe, group: list[int]) -> int:
    """How many runs of a group fit into memory; the objective is tried on every point of the grid."""
    engine = recipe.engine(group[:1])
    tell_of_split(engine.body, recipe.objective)
    size = engine.memory_needs(next(engine.feed.epoch(0))).whole
    if differ([recipe.runs[number] for number in group]):
        size = int(size * padded_share(recipe, group))
    pair = as_pair(recipe.data)
    metric = recipe.validation_settings.metric
    probe(
        engine,
        [recipe.runs[n] for n in group],
        recipe.objective,
        None if pair is None else pair[1],
        recipe.validation,
        metric,
        recipe.targets,
    )
    deterministic = recipe.precision.deterministic
    budget = memory.allowed(recipe.max_memory, recipe.initial.device, deterministic=deterministic)
    at_once = memory.runs_at_once(size, len(group), budget)
    log.info(
        "%d runs of %d members, about %s each: %d at once (%s)",
        len(group),
        engine.members,
        memory.mebibytes(size),
        at_once,
        memory.mebibytes(size * at_once),
    )
    return at_once


def _stored_plan(file: Path, recipe: Recipe, resume: bool) -> list[list[int]]:
    """The plan of a sweep that goes on; one that is damaged, or of another sweep, is refused."""
    if not resume:
        raise ValueError(f"{file.parent} holds a sweep already; pass resume=True to go on with it, or another folder.")
    try:
        plan = read_record(file, FORMATS)
    except OtherFormat:
        raise
    except StorageError as reason:
        raise StorageError(f"{reason} Give another folder.") from reason
    refuse_other(file.parent, "sweep", plan["fingerprint"], recipe.fingerprint)
    parts: list[list[int]] = plan["parts"]
    if sorted(number for part in parts for number in part) != list(range(len(recipe.runs))):
        raise StorageError(f"{file} does not list every run of the sweep once. Give another folder.")
    return parts


def _out_of_memory(recipe: Recipe, numbers: list[int]) -> memory.OutOfMemory:
    """What helps where memory runs out before the training of some runs."""
    first = recipe.runs[numbers[0]]
    return memory.Footprint(
        device=recipe.initial.device,
        runs=len(numbers),
        members=first.members,
        batch_size=first.batch_size,
        precision=recipe.precision.precision,
        plan=None,
    ).advice()


def _shifted(progress: OnProgress, before: int, total: int, moment: Progress) -> None:
    progress(replace(moment, step=before + moment.step, steps=total))


def _outcome(engine: Engine, place: int) -> Outcome:
    failure, history = engine.state.failures.get(place), engine.history(place)
    status = "failed" if failure else "stopped early" if history.stopped_early else "done"
    stop = f"stopped by {history.stopped_by}" if history.stopped_by is not None else ""
    return Outcome(status, str(failure) if failure else stop, history)

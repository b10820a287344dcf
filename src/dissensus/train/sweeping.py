"""`sweep`: a grid of runs as one training, wherever runs share shapes."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import dissensus.train.memory as memory
import dissensus.train.schedules as schedules
from dissensus import calls, checks
from dissensus.arrays import Conversion, has_whole_numbers
from dissensus.axes import LossParts
from dissensus.batch import Unpack
from dissensus.calls import OutputChoice, first_tensor
from dissensus.data.batches import Augments, DataLike, as_pair, end_to_end, folds_of, is_source, refuse_iterator
from dissensus.data.splits import Split
from dissensus.ensemble import SHARED_ROWS, stored_tensors
from dissensus.execution import Backend, Body, Choices
from dissensus.execution.meeting import tell_of_copies
from dissensus.execution.out_of_memory import advising
from dissensus.execution.sharing import Shared
from dissensus.randomness import drawn_seed, seeded
from dissensus.storage import (
    OtherFormat,
    StorageError,
    read_folder,
    read_record,
    write_folder,
    write_record,
)
from dissensus.train.bar import displayed
from dissensus.train.checkpoint import FORMATS, checkpoints_in, refuse_other, reserved, train, train_in_step
from dissensus.train.cluster import (
    PROCESS_BYTES,
    Need,
    RayCluster,
    Sent,
    Task,
    Workers,
    check_seen,
    connected,
    left_by_others,
)
from dissensus.train.compatibility import check_resume, held_out_of, tell_of_split
from dissensus.train.engine import Engine
from dissensus.train.grid import Grid, Run, grouped, runs_of
from dissensus.train.history import OnProgress, Progress
from dissensus.train.member_optimizers import MakeOptimizer
from dissensus.train.notification import Callbacks, Rung
from dissensus.train.numerics import Precision, PrecisionSettings
from dissensus.train.padded_runs import differ
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
    compile: bool | Literal["auto"] = "auto",
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
    cluster: Literal["ray"] | RayCluster | None = None,
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
        compile: See `dissensus.fit`.
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
        cluster: ``"ray"``, or a `RayCluster` with an address: runs are trained on the machines of a Ray cluster, with
            equal results. ``checkpoint`` is a folder that all machines see, ``device`` is that of the workers, and
            ``max_memory`` is that of one task. ``callbacks`` are refused. See the page "Many machines".
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
    tell_of_copies("a sweep")
    workers = RayCluster.of(cluster)
    if workers is not None:
        _check_cluster(checkpoint, callbacks)
    refuse_iterator(data, "checks and for runs that are not trained together")
    listeners = Callbacks.of(callbacks)
    if not isinstance(padding, bool) and not (isinstance(padding, str) and padding == "auto"):
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
        if workers is not None and place.type != "cpu":
            fix = "Use .cpu(): `device` is that of the workers."
            checks.refuse(
                "data", "be on the CPU with `cluster`, which sends it to the workers", f"the device {place}", fix
            )
        dtypes = [tensor.dtype for tensor in calls.tensors(x) if tensor.is_floating_point()]
        conversion = conversion._replace(dtype=dtypes[0] if dtypes else conversion.dtype)
    if not is_source(validation) and isinstance(validation, tuple | list):
        validation = [conversion.pair(fold) for fold in folds_of(validation)]
    held_out, validation_folds = held_out_of(validation, folds)
    where = place if device is None else checks.device("device", device, usable=workers is None)
    initial = NewMembers(build, checks.computes("device", where), backend, output, shared)
    recipe = Recipe(
        initial=initial,
        runs=runs_of(grid, build, objective, defaults, folds),
        data=train_data,
        objective=objective,
        epochs=checks.count("epochs", epochs),
        optimizer=settings,
        updates=UpdateSettings(accumulate, ema, recompute, compile),
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
    groups: list[Group] = []
    outcomes: dict[int, Outcome] = {}
    with displayed(progress) as display, reserved(recipe.checkpoint):
        if workers is not None:
            for own, ends in _trained_on(workers, recipe, padding, display.progress):
                groups += own
                outcomes |= ends
        else:
            sources = sources_at_beginning(initial.device, recipe.data, recipe.unlabelled, recipe.validation)
            parts = _parts(recipe, padding, functools.partial(_fitting, recipe))
            if sources is not None and recipe.checkpoint is not None:
                _keep_beginning(sources, recipe.checkpoint)
            rungs = [] if listeners is None else [rung for rung in listeners.rungs if rung < recipe.epochs]
            if listeners is None or not rungs:
                engines = _in_turn(recipe, parts, sources, display.progress, listeners)
            else:
                engines = _in_step(recipe, parts, rungs, display.progress, listeners)
            for part, engine in engines:
                groups += _groups(recipe, part.numbers, engine)
                outcomes |= _outcomes(engine, part.numbers)
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
        yield part, _trained(recipe, part, sources, progress, listeners)


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

        failed = sorted(
            part.numbers[run] for part, engine in zip(parts, engines, strict=True) for run in engine.state.failures
        )
        stopped = listeners.rung(Rung(rung, [entry for *_, entry in waiting], outputs, failed)) if waiting else {}
        for engine in engines:
            own = {waiting[place][2]: by for place, by in stopped.items() if waiting[place][1] is engine}
            if own:
                engine.stop_runs(own)

    train_in_step(engines, rungs, compare)
    for engine in engines:
        _at_rest(engine)
    return list(zip(parts, engines, strict=True))


def _trained(
    recipe: Recipe,
    part: "Part",
    sources: PythonState | None,
    progress: OnProgress | None,
    callbacks: Callbacks | None = None,
) -> Engine:
    """An engine that has trained the runs of a part."""
    if sources is not None:
        sources.rewind()  # every part reads what a separate training with new sources would
    with advising(functools.partial(_out_of_memory, recipe, part.numbers)):
        engine = part.engine(recipe, progress, callbacks)
    train(engine)
    return _at_rest(engine)


def _at_rest(engine: Engine) -> Engine:
    """An engine whose members are as they are after training."""
    engine.body.eval()
    engine.body.recompute = engine.body.compiling = False
    return engine


def _groups(recipe: Recipe, numbers: list[int], engine: Engine) -> list[Group]:
    """The trained members of some runs: one group, or one for each shape of runs that were padded."""
    if engine.padded is None:
        return [_group(recipe, numbers, engine.body)]
    return [
        _group(recipe, [numbers[place] for place in own.runs], body)
        for own, body in engine.padded.unpadded(engine.body)
    ]


def _group(recipe: Recipe, numbers: list[int], body: Body) -> Group:
    """The members of runs of one shape, with what is known of them."""
    runs = [recipe.runs[number] for number in numbers]
    on_all = not recipe.batches.bootstrap and not isinstance(recipe.validation, float | Split)
    return Group(numbers, body, runs[0].members, runs[0].build, [run.seed for run in runs], on_all)


def _outcomes(engine: Engine, numbers: list[int]) -> dict[int, Outcome]:
    """How every run of an engine ended, by the numbers of runs."""
    return {number: _outcome(engine, place) for place, number in enumerate(numbers)}


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
    bytes_per_run: int = 0
    """As planned; 0 where nobody has measured it."""
    apart: bool = False
    """Whether it is trained by a worker of a cluster, which begins it or goes on with it."""

    @property
    def name(self) -> str:
        """The runs, in words."""
        first, last = self.numbers[0], self.numbers[-1]
        return f"run {first}" if first == last else f"{len(self.numbers)} runs, {first} to {last}"

    def folder(self, checkpoint: CheckpointSettings) -> Path:
        """Where its checkpoints are."""
        return checkpoint.folder / f"part-{self.index:04d}"

    def engine(self, recipe: Recipe, progress: OnProgress | None, callbacks: Callbacks | None) -> Engine:
        """The engine of these runs."""
        checkpoint = recipe.checkpoint
        if checkpoint is not None:
            folder = self.folder(checkpoint)
            own = folder / "choices.json"  # of a part that a cluster has begun: others of its group run beside it
            choices = own if self.apart or own.exists() else checkpoint.folder / f"choices-{self.group:04d}.json"
            resume = checkpoint.resume or self.apart
            checkpoint = replace(checkpoint, folder=folder, choices=choices, part=tuple(self.numbers), resume=resume)
        if progress is not None:
            progress = functools.partial(_shifted, progress, self.steps_before, self.steps_in_all)
        if callbacks is not None:
            callbacks = callbacks.for_runs(self.numbers, [run.point for run in recipe.runs])
        return recipe.engine(
            self.numbers, progress=progress, callbacks=callbacks, checkpoint=checkpoint, choices=self.choices
        )


class _Block(NamedTuple):
    """Runs that are planned to be trained at once, and the bytes of each; 0: unknown."""

    numbers: list[int]
    bytes_per_run: int = 0


def _parts(recipe: Recipe, padding: Padding, plan: Callable[[list[list[int]]], list[_Block]]) -> list[Part]:
    """The parts of a sweep, in the order of their training; ``plan`` cuts groups of runs that can train together."""
    planned = _planned(recipe, padding, plan)
    shapes = {
        number: place for place, group in enumerate(grouped(recipe.runs, recipe.training_sizes())) for number in group
    }
    together = {frozenset(shapes[number] for number in block.numbers): None for block in planned}
    places = {group: place for place, group in enumerate(together)}
    group_of = {block.numbers[0]: places[frozenset(shapes[number] for number in block.numbers)] for block in planned}
    choices = {place: Choices() for place in places.values()}
    steps = [recipe.steps(block.numbers[0]) for block in planned]
    return [
        Part(
            numbers=block.numbers,
            index=index,
            group=group_of[block.numbers[0]],
            choices=choices[group_of[block.numbers[0]]],
            steps_before=sum(steps[:index]),
            steps_in_all=sum(steps),
            bytes_per_run=block.bytes_per_run,
        )
        for index, block in enumerate(planned)
    ]


def _planned(recipe: Recipe, padding: Padding, plan: Callable[[list[list[int]]], list[_Block]]) -> list[_Block]:
    """Groups of runs of one shape, cut to parts that fit into memory; the plan is stored with the checkpoints."""
    file = None if recipe.checkpoint is None else recipe.checkpoint.folder / "plan.json"
    fingerprint = None if file is None else recipe.fingerprint  # before the objective is tried, which it may count
    if recipe.checkpoint is not None and file is not None and file.exists():
        return _stored_plan(file, recipe, recipe.checkpoint.resume)
    blocks = plan(merged(recipe, grouped(recipe.runs, recipe.training_sizes()), padding))
    if file is not None:
        parts, sizes = [block.numbers for block in blocks], [block.bytes_per_run for block in blocks]
        write_record(
            file, {"format": FORMATS.newest, "fingerprint": fingerprint, "parts": parts, "bytes per run": sizes}
        )
    return blocks


def _fitting(recipe: Recipe, groups: list[list[int]]) -> list[_Block]:
    """Groups that are cut to parts that fit into the memory of this machine."""
    blocks: list[_Block] = []
    for group in groups:
        size = _size(recipe, group)
        at_once = memory.runs_at_once(size.bytes, len(group), size.budget)
        log.info(
            "%d runs of %d members, about %s each: %d at once (%s)",
            len(group),
            recipe.runs[group[0]].members,
            memory.mebibytes(size.bytes),
            at_once,
            memory.mebibytes(size.bytes * at_once),
        )
        blocks += [_Block(group[i : i + at_once], size.bytes) for i in range(0, len(group), at_once)]
    return blocks


class _Size(NamedTuple):
    """What a run of a group takes, and what there is."""

    bytes: int
    budget: int


def _size(recipe: Recipe, group: list[int]) -> _Size:
    """Measure what a run of a group takes; the objective is tried on every point of the grid."""
    with advising(functools.partial(_out_of_memory, recipe, group[:1])):
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
        return _Size(size, budget)


def _stored_plan(file: Path, recipe: Recipe, resume: bool) -> list[_Block]:
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
    sizes: list[int] = plan.get("bytes per run") or [0] * len(parts)
    return [_Block(numbers, size) for numbers, size in zip(parts, sizes, strict=True)]


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


# On a cluster


def _check_cluster(checkpoint: object, callbacks: object) -> None:
    """Refuse what does not go with a cluster, or is missing."""
    if checkpoint is None:
        fix = "From there a run goes on whose machine is lost."
        checks.refuse("checkpoint", "be a folder that all machines of the cluster see", "none", fix)
    if callbacks is not None:
        fix = "They would be called on other machines. `progress` and the histories come home."
        checks.refuse("callbacks", "be left out with `cluster`", "some", fix)


@dataclass(frozen=True)
class _Trained:
    """What a worker sends home of a part."""

    groups: list["_Members"]
    outcomes: dict[int, Outcome]


class _Members(NamedTuple):
    """Trained members of runs of one shape."""

    numbers: list[int]
    tensors: dict[str, Tensor]
    channels_last: bool
    by_rule: bool


def _size_there(recipe: Recipe, group: list[int], *, report: Any) -> _Size:  # noqa: ARG001
    """`_size`, by a worker."""
    return _size(recipe, group)


def _train_there(recipe: Recipe, part: Part, *, report: OnProgress) -> _Trained:
    """Train a part, or go on with it, by a worker."""
    assert recipe.checkpoint is not None
    check_seen("checkpoint", recipe.checkpoint.folder / "plan.json")
    sources = sources_at_beginning(recipe.initial.device, recipe.data, recipe.unlabelled, recipe.validation)
    if sources is not None:
        _keep_beginning(sources, recipe.checkpoint)
    with left_by_others(part.folder(recipe.checkpoint)):
        engine = _trained(recipe, part, sources, report)
    groups = [
        _Members(
            group.runs,
            {name: tensor.detach().cpu() for name, tensor in stored_tensors(group.body).items()},
            group.body.channels_last,
            group.body.by_rule,
        )
        for group in _groups(recipe, part.numbers, engine)
    ]
    return _Trained(groups, _outcomes(engine, part.numbers))


def _trained_on(
    cluster: RayCluster, recipe: Recipe, padding: Padding, progress: OnProgress | None
) -> Iterator[tuple[list[Group], dict[int, Outcome]]]:
    """Train all runs on a cluster: the groups, in the order in which one machine would train them."""
    assert recipe.checkpoint is not None
    checkpoint = recipe.checkpoint
    sources = sources_at_beginning(torch.device("cpu"), recipe.data, recipe.unlabelled, recipe.validation)
    need = Need(1, cluster.gpus if recipe.initial.device.type == "cuda" else 0.0, PROCESS_BYTES)
    with connected(cluster) as workers:
        workers.examine(workers.fitting(need), checkpoint.folder, "checkpoint")
        shared = workers.share(recipe, _sent(recipe))
        need = replace(need, memory=need.memory + shared.bytes)
        parts = _parts(recipe, padding, functools.partial(_spread, workers, recipe, shared, need))
        if sources is not None:
            _keep_beginning(sources, checkpoint)
        need = replace(need, cpus=workers.cores(need, len(parts)))
        tasks = [_task(recipe, part, need, checkpoint) for part in parts]
        total = None if progress is None else _Total(progress, recipe, parts)
        trained: dict[int, _Trained] = {}

        def done(place: int, result: _Trained) -> None:
            trained[place] = result
            if total is not None:
                total.finish(place, list(result.outcomes.values()))

        workers.run(tasks, shared, done, total)
    for place in range(len(parts)):
        result = trained.pop(place)
        yield [_group(recipe, own.numbers, _body_at_home(recipe, own)) for own in result.groups], result.outcomes


def _task(recipe: Recipe, part: Part, need: Need, checkpoint: CheckpointSettings) -> Task:
    folder = part.folder(checkpoint)
    if recipe.initial.device.type == "cpu":
        need = replace(need, memory=need.memory + len(part.numbers) * part.bytes_per_run)
    alone = replace(part, choices=Choices(), steps_before=0, steps_in_all=recipe.steps(part.numbers[0]), apart=True)
    return Task(
        _train_there,
        (alone,),
        part.name,
        need,
        came_to=lambda: [path.name for path in checkpoints_in(folder)],
        on_lost=lambda told: memory.OutOfMemory(f"{told} {_out_of_memory(recipe, part.numbers)}"),
    )


def _spread(workers: Workers, recipe: Recipe, shared: Sent, need: Need, groups: list[list[int]]) -> list[_Block]:
    """Groups that are cut to blocks for all workers of a cluster, each of which fits into the memory of one."""
    sizes: dict[int, _Size] = {}
    tasks = [Task(_size_there, (group,), f"the size of {len(group)} runs", need) for group in groups]
    workers.run(tasks, shared, sizes.__setitem__)
    slots, nodes = workers.slots(need), workers.fitting(need)
    beside = 1  # tasks that share the memory which was measured
    if recipe.max_memory is None:
        beside = int(1 / need.gpus) if need.gpus else max(node.slots(need) for node in nodes)
    on_cpu = recipe.initial.device.type == "cpu"
    most = max(node.memory for node in nodes) - need.memory  # of what Ray lets a task ask for
    runs, blocks = sum(map(len, groups)), list[_Block]()
    for place, group in enumerate(groups):
        size = sizes[place]
        budget = min(size.budget // beside, most) if on_cpu else size.budget // beside
        at_once = memory.runs_at_once(size.bytes, len(group), budget)
        pieces = max(-(-len(group) // at_once), slots * len(group) // runs, 1)
        cut = torch.tensor(group).tensor_split(min(pieces, len(group)))
        blocks += [_Block(part.tolist(), size.bytes) for part in cut]
        log.info("%d runs, about %s each, in %d blocks", len(group), memory.mebibytes(size.bytes), len(cut))
    return blocks


def _sent(recipe: Recipe) -> dict[str, Any]:
    """What workers get, by the names of arguments."""
    batches, validation = recipe.batches, recipe.validation_settings
    named = {"build": recipe.initial, "data": recipe.data, "objective": recipe.objective, "grid": recipe.runs}
    named |= {"validation": recipe.validation, "unlabelled": recipe.unlabelled, "optimizer": recipe.optimizer.name}
    named |= {"schedule": recipe.optimizer.schedule, "augment": batches.augment, "unpack": batches.unpack}
    named |= {"weights": recipe.weights, "class_weights": recipe.targets}
    return {**named, "metric": validation.metric, "track": validation.track}


def _body_at_home(recipe: Recipe, trained: _Members) -> Body:
    """Members that a worker has trained, here."""
    assert isinstance(recipe.initial, NewMembers)
    device = recipe.initial.device if torch.cuda.is_available() else torch.device("cpu")
    run = recipe.runs[trained.numbers[0]]
    first = replace(recipe.initial, device=device).body([replace(run, members=1)], recipe.input_dtype())
    body = first.subset([0] * (len(trained.numbers) * run.members))
    body.adopt(trained.tensors)
    if SHARED_ROWS in trained.tensors:
        body.attach_shared(trained.tensors[SHARED_ROWS].to(device))
    for name, tensor in stored_tensors(body).items():
        tensor.data = trained.tensors[name].to(device)
    body.channels_last, body.by_rule = trained.channels_last, trained.by_rule
    return body.eval()


class _Total:
    """One progress of all parts, from what each has reported last."""

    def __init__(self, progress: OnProgress, recipe: Recipe, parts: Sequence[Part]) -> None:
        self.progress, self.parts, self.epochs = progress, parts, recipe.epochs
        self.steps = [recipe.steps(part.numbers[0]) for part in parts]
        self.moments: dict[int, Progress] = {}
        self.finished: set[int] = set()
        self.started = time.perf_counter()

    def __call__(self, reports: Mapping[int, Progress]) -> None:
        """Take the newest reports, by parts."""
        new = {place: moment for place, moment in reports.items() if place not in self.finished}
        if any(self.moments.get(place) != moment for place, moment in new.items()):
            self.moments |= new
            self._report()

    def finish(self, place: int, outcomes: Sequence[Outcome]) -> None:
        """Note that a part is trained."""
        last = [outcome.history.epochs[-1] for outcome in outcomes if outcome.history.epochs]
        self.finished.add(place)
        self.moments[place] = Progress(
            epoch=self.epochs,
            epochs=self.epochs,
            step=self.steps[place],
            steps=self.steps[place],
            loss=_mean([float(entry["loss"]) for entry in last]),
            parts={},
            member_loss=[],
            seconds=0.0,
            runs=len(outcomes),
        )
        self._report()

    def _report(self) -> None:
        moments = list(self.moments.values())
        under_way = [moment for place, moment in self.moments.items() if place not in self.finished] or moments
        each = [moment for moment in under_way for _ in range(moment.runs)] or moments  # losses are means over runs
        names = set.intersection(*(set(moment.parts) for moment in each))
        lengths = {len(moment.member_loss) for moment in each}
        members = zip(*(moment.member_loss for moment in each), strict=True) if len(lengths) == 1 else ()
        waiting = [part for place, part in enumerate(self.parts) if place not in self.moments]
        self.progress(
            Progress(
                epoch=min(moment.epoch for moment in under_way),
                epochs=self.epochs,
                step=sum(moment.step for moment in moments),
                steps=sum(self.steps),
                loss=_mean([moment.loss for moment in each]),
                parts={name: _mean([moment.parts[name] for moment in each]) for name in each[0].parts if name in names},
                member_loss=[_mean(list(losses)) for losses in members],
                seconds=time.perf_counter() - self.started,
                runs=sum(moment.runs for moment in under_way) + sum(len(part.numbers) for part in waiting),
            )
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")

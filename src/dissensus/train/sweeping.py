"""`sweep`: a grid of runs as one training, wherever runs share shapes."""

import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus import checks
from dissensus.axes import LossParts
from dissensus.data.batches import Augment, TensorBatches, as_pair, split_rows
from dissensus.ensemble import fresh_members
from dissensus.execution import BACKENDS, StackedMembers
from dissensus.storage import StorageError, write_atomically
from dissensus.train import memory, optim, schedules
from dissensus.train.capture import graph_steps
from dissensus.train.checkpoint import Checkpointer, digest, train
from dissensus.train.engine import Engine
from dissensus.train.evaluation import Metric, Validation, over_runs
from dissensus.train.fitting import autocast, name_of
from dissensus.train.grid import Grid, Run, grouped, runs_of
from dissensus.train.history import History, OnProgress, Progress
from dissensus.train.stopping import Watch
from dissensus.train.sweep_result import Group, Outcome, Sweep

log = logging.getLogger("dissensus")


def sweep(
    build: Callable[..., nn.Module],
    data: tuple[Tensor, Tensor],
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
    validation: tuple[Tensor, Tensor] | float | None = None,
    metric: Metric | None = None,
    watch: Literal["ensemble", "member"] = "ensemble",
    patience: int | None = None,
    min_delta: float = 0.0,
    augment: Augment | None = None,
    precision: Literal["float32", "bf16"] | None = None,
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
        data: ``(x, y)`` tensors.
        objective: ``(outputs, targets, **hyperparameters) -> LossParts``.
        grid: Names to lists of values (their product is taken), or a list of points. Names: the objective's parameters;
            ``lr``, ``weight_decay``, ``momentum``, ``clip_norm``; ``seed``, ``split_seed``; ``members``,
            ``batch_size``; parameters of ``build``.
        members: M, unless the grid says.
        epochs: As in `dissensus.fit`; so is everything up to ``drop_last``.
        validation: ``(x, y)`` for all runs, or the fraction that each run splits off by its own ``split_seed``.
        backend: As in `dissensus.Ensemble`.
        device: Where to train; by default where ``x`` is.
        max_memory: Bytes that training may take; by default half of what is free. More runs than fit are trained in
            parts, one after the other.
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
    pair = as_pair(data)
    if pair is None:
        checks.refuse("data", "be a pair of tensors (x, y)", type(data).__name__, "Runs share data on the device.")
    if patience is not None and validation is None:
        checks.refuse("patience", "come with `validation` data to judge by", patience, "Pass validation=0.2.")
    where = torch.device(device) if device is not None else pair[0].device
    defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "clip_norm": clip_norm, "seed": seed,
                "members": members, "batch_size": batch_size}  # fmt: skip
    runs = runs_of(grid, build, objective, defaults)

    def engine_of(numbers: Sequence[int], body: StackedMembers) -> Engine:
        chosen = [runs[n] for n in numbers]
        first = chosen[0]
        flat = body.packed()

        def rows(values: Sequence[float]) -> list[float]:
            return [value for value in values for _ in range(first.members)]

        hyper = {"betas": betas, "eps": eps, **{k: rows([run.optimiser[k] for run in chosen]) for k in first.optimiser}}
        limit = hyper.pop("clip_norm", None)
        held = _held_out(chosen, pair[0], validation)
        feed = TensorBatches(
            *pair, batch_size=first.batch_size, seeds=[run.seed for run in chosen], device=where,
            rows=None if held is None else held[0], shuffle=shuffle, drop_last=drop_last, augment=augment,
        )  # fmt: skip
        engine = Engine(
            body=body,
            flat=flat,
            members=first.members,
            losses=over_runs(functools.partial(objective, **first.words), len(chosen)),
            hyper={
                name: torch.tensor([run.hyper[name] for run in chosen], dtype=flat.dtype, device=where)
                for name in first.hyper
            },
            optimizer=optimizer,
            settings=optim.settings(hyper, len(flat), flat, nesterov=nesterov),
            limit=None if limit is None else optim.column("clip_norm", limit, len(flat), flat),
            active=torch.ones(len(flat), dtype=torch.bool, device=where),
            feed=feed,
            schedule=schedules.resolved(schedule),
            epochs=epochs,
            autocast=autocast(precision, where),
        )
        if validation is not None:
            x, y = (feed.x, feed.y) if held is not None else (part.to(where) for part in _as_data(validation))
            own_rows = None if held is None else held[1]
            engine.validator = Validation(x, y, rows=own_rows, metric=metric, per_member=watch == "member")
            engine.watch = Watch(
                body, flat, members=first.members, per_member=watch == "member", patience=patience, min_delta=min_delta
            )
        return engine

    def body_of(numbers: Sequence[int]) -> StackedMembers:
        return _initial(build, [runs[n] for n in numbers], pair[0].dtype).to(where)

    told = {
        "points": json.loads(json.dumps([run.point for run in runs], default=repr)), "epochs": epochs,
        "optimizer": optimizer, "members": members, "data": digest(*pair), "objective": name_of(objective),
    }  # fmt: skip
    parts = _planned(runs, body_of, engine_of, objective, max_memory, where, checkpoint, resume, told)
    groups: list[Group] = []
    outcomes: dict[int, Outcome] = {}
    done_steps, total_steps = 0, sum(epochs * _steps(runs[part[0]], pair[0], validation, drop_last) for part in parts)
    for index, part in enumerate(parts):
        body = body_of(part)
        body.backend = backend
        engine = engine_of(part, body)
        engine.captured = graph_steps(engine)
        if progress is not None:
            engine.progress = functools.partial(_shifted, progress, done_steps, total_steps)
        checkpointer = None
        if checkpoint is not None:
            checkpointer = Checkpointer(Path(checkpoint) / f"part-{index:04d}", told, checkpoint_seconds)
            engine.after_step = checkpointer
        train(engine, checkpointer, resume)
        done_steps += epochs * len(engine.feed)
        groups.append(Group(list(part), body, runs[part[0]].members, runs[part[0]].build, [runs[n].seed for n in part]))
        outcomes |= {number: _outcome(engine, place, epochs) for place, number in enumerate(part)}
    return Sweep([run.point for run in runs], [outcomes[n] for n in range(len(runs))], groups)


def _initial(build: Callable[..., nn.Module], runs: Sequence[Run], dtype: torch.dtype) -> StackedMembers:
    """Stacked members of all runs; runs of the same seed start from the same weights, which are drawn once."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    members = runs[0].members
    make = functools.partial(build, **runs[0].build)
    try:
        drawn = StackedMembers.of(network for seed in seeds for network in fresh_members(make, seed, members))
    except ValueError as reason:
        raise ValueError(f"`build` must return the same architecture at every call: {reason}.") from reason
    rows = [seeds.index(run.seed) * members + m for run in runs for m in range(members)]
    body = drawn.subset(rows)
    body.set_keys([(run.seed, m) for run in runs for m in range(members)])
    return body.to(dtype) if dtype.is_floating_point else body


def _planned(
    runs: list[Run], body_of: Callable[[Sequence[int]], StackedMembers], engine_of: Callable[..., Engine],
    objective: Callable[..., LossParts], max_memory: int | None, device: torch.device,
    checkpoint: str | Path | None, resume: bool, told: dict[str, Any],
) -> list[list[int]]:  # fmt: skip
    """Groups of runs of one shape, cut to parts that fit into memory; the plan is kept with the checkpoints."""
    plan = Path(checkpoint) / "plan.json" if checkpoint is not None else None
    if plan is not None and plan.exists():
        if not resume:
            raise ValueError(
                f"{plan.parent} holds a sweep already; pass resume=True to go on with it, or another folder."
            )
        stored = json.loads(plan.read_text())
        differing = [key for key in told if stored["told"].get(key) != told[key]]
        if differing:
            raise StorageError(f"{plan.parent} belongs to another sweep: {', '.join(map(repr, differing))} differ.")
        return stored["parts"]
    parts: list[list[int]] = []
    for group in grouped(runs):
        body = body_of(group[:1])
        engine = engine_of(group[:1], body)
        size = _bytes_per_run(engine)
        _probe(engine, [runs[n] for n in group], objective)
        at_once = memory.runs_at_once(size, len(group), max_memory, device)
        log.info(
            "%d runs of %d members, about %s each: %d at once (%s)",
            len(group), engine.members, memory.megabytes(size), at_once, memory.megabytes(size * at_once),
        )  # fmt: skip
        parts += [group[i : i + at_once] for i in range(0, len(group), at_once)]
    if plan is not None:
        plan.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(plan, json.dumps({"told": told, "parts": parts}).encode())
    return parts


def _first_batch(engine: Engine) -> tuple[Tensor, Tensor]:
    return next(engine.feed.epoch(0))


def _bytes_per_run(engine: Engine) -> int:
    """What one run takes: copies of its weights, and what autograd keeps of one step."""
    x, _ = _first_batch(engine)
    engine.body.train()
    state = {name: tensor.clone() for name, tensor in engine.body.state().items()}
    engine.body.backend = "loop"
    kept = memory.saved_bytes(lambda: engine.outputs(x, engine.body.views(engine.flat)))
    engine.body.hang(engine.flat, state)
    inputs = x.numel() * x.element_size() * engine.members
    return memory.COPIES * engine.flat.numel() * engine.flat.element_size() + kept + inputs


def _probe(engine: Engine, runs: Sequence[Run], objective: Callable[..., LossParts]) -> None:
    """Call the objective once per point on concrete numbers, so that a value out of range is told before training."""
    x, y = _first_batch(engine)
    engine.body.eval()
    with torch.no_grad():
        outputs = engine.outputs(x)[0]
        for hyper in {repr(run.hyper): run.hyper for run in runs}.values():
            objective(outputs, y, **hyper, **runs[0].words)


def _as_data(validation: Any) -> tuple[Tensor, Tensor]:
    pair = as_pair(validation)
    if pair is None:
        checks.refuse("validation", "be (x, y), or a fraction between 0 and 1", repr(validation))
    return pair


def _held_out(runs: Sequence[Run], x: Tensor, validation: Any) -> tuple[Tensor, Tensor] | None:
    """Each run's training and validation rows, where a fraction is split off."""
    if not isinstance(validation, float):
        return None
    splits = [split_rows(len(x), validation, run.split_seed) for run in runs]
    return torch.stack([rest for rest, _ in splits]), torch.stack([part for _, part in splits])


def _steps(run: Run, x: Tensor, validation: Any, drop_last: bool) -> int:
    held = _held_out([run], x, validation)
    examples = len(x) if held is None else held[0].shape[1]
    return examples // run.batch_size if drop_last else -(-examples // run.batch_size)


def _shifted(progress: OnProgress, before: int, total: int, moment: Progress) -> None:
    values = {**vars(moment), "step": before + moment.step, "steps": total}
    progress(Progress(**values))


def _outcome(engine: Engine, place: int, epochs: int) -> Outcome:
    failure = engine.failures.get(place)
    history = History(
        epochs=engine.histories[place],
        steps=failure.step if failure else len(engine.histories[place]) * len(engine.feed),
        seconds=engine.histories[place][-1]["seconds"] if engine.histories[place] else 0.0,
        stopped_early=failure is None and len(engine.histories[place]) < epochs,
        best_epoch=engine.best_epochs.get(place),
        backend=engine.backend,
    )
    status = "failed" if failure else "stopped early" if history.stopped_early else "done"
    return Outcome(status, str(failure) if failure else "", history)

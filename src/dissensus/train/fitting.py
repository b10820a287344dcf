"""`fit`: train all members of an ensemble as one computation."""

import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dissensus.train.optim as optim
import dissensus.train.schedules as schedules
from dissensus import checks
from dissensus.axes import Objective
from dissensus.data.batches import Augments, Source, as_pair, batches, split
from dissensus.data.recognition import digest
from dissensus.data.unlabelled import with_unlabelled
from dissensus.ensemble import Ensemble
from dissensus.execution import leaves_settings
from dissensus.train.adversary import AdversarialTraining, Adversary
from dissensus.train.capture import graph_steps
from dissensus.train.checkpoint import Checkpointer, train
from dissensus.train.compatibility import (
    check_adversarial,
    check_augments,
    check_drawn,
    check_few,
    check_like,
    check_momentum,
    check_objective,
    check_patience,
    check_resume,
    check_unlabelled,
    check_validation,
    is_separable,
    recognised,
    tell_of_split,
)
from dissensus.train.convergence import Convergence, Freezing
from dissensus.train.early_stopping import Watch
from dissensus.train.engine import Engine
from dissensus.train.evaluation import Metric, Validation, over_runs
from dissensus.train.grid import draw_keys
from dissensus.train.history import History, OnProgress, TrainingDiverged
from dissensus.train.memory import plan_members
from dissensus.train.numerics import Precision, numerics
from dissensus.train.sampling import Drawn
from dissensus.train.sequential import one_by_one
from dissensus.train.trained_loss import Targets
from dissensus.train.twin import Twin, siblings_progress
from dissensus.trunk import SharedTrunk

log = logging.getLogger("dissensus")


@leaves_settings
def fit(
    ensemble: Ensemble | nn.Module,
    data: Source,
    objective: Objective,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: optim.PerMember = 1e-3,
    optimizer: str = "adamw",
    momentum: optim.PerMember = 0.0,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: optim.PerMember = 0.0,
    schedule: str | schedules.Schedule = "constant",
    clip_norm: optim.PerMember | None = None,
    frozen: Iterable[int] = (),
    freeze: Convergence | None = None,
    unlabelled: Tensor | Source | None = None,
    active_members: int | None = None,
    sequential: bool = False,
    adversarial: AdversarialTraining | None = None,
    validation: Source | float | None = None,
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
    max_memory: int | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = None,
    progress: OnProgress | None = None,
    seed: int = 0,
    split_seed: int | None = None,
    twin: bool | Objective = False,
) -> History:
    """Train an ensemble in place and return the record of it.

    All members see the same batches and take one stacked step. With an objective that has no interaction, that is what
    M separate trainings would do, step for step.

    Args:
        ensemble: Trained where it is (``ensemble.to("cuda")`` first for a GPU). Left in its mode (train or eval). A
            module by itself is an ensemble of one, or of its masks (`dissensus.masks.Masked`).
        data: ``(x, y)`` tensors, moved to the device whole; a ``Dataset``; or a ``DataLoader``, whose own order stands.
        objective: ``(outputs [M, B, C], targets) -> LossParts``; bind hyperparameters with ``functools.partial``.
            Targets that its loss does not take are refused: tensors before training, a loader's batch by batch. The
            loss must be visible for that: bound by name in the ``partial``, or the objective's own. An objective of
            your own gets this check if it has a parameter ``loss`` that holds a name from `dissensus.losses`.
        epochs: Passes over the data.
        batch_size: Examples per step; the last batch of an epoch may be smaller.
        lr: Learning rate, or one per member; so are ``momentum``, ``weight_decay`` and ``clip_norm``.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``, each equal to ``torch.optim``'s.
        momentum: SGD's.
        nesterov: SGD's.
        betas: Adam's.
        eps: Adam's.
        weight_decay: L2 penalty, or decoupled decay in AdamW.
        schedule: ``"constant"``, ``"cosine"`` or one of `dissensus.train.schedules`.
        clip_norm: Largest norm of a member's gradient.
        frozen: Members that take no step: weights, moments and batch-norm statistics stay as they are.
        freeze: Freeze members that have converged, one per epoch at most (`dissensus.train.Convergence` has the rule);
            their outputs still count for the others. Training ends when all are frozen, or after ``epochs``; the
            history's ``frozen_at`` tells when each was.
        unlabelled: Data for objectives that disagree on data without labels (`objectives.a2d`, `objectives.divdis`): a
            tensor, or any source, whose targets are not looked at. Each step sees a batch of it beside the labelled
            one, in a pass of its own; the objective gets members' outputs on it as ``unlabelled``.
        active_members: Draw so many members at every step and train those alone, as though they were the ensemble, with
            the loss counted M / ``active_members`` times (the LDR paper's stochastic sum). Members that are not drawn
            cost nothing and stay as they are: no decay, no moments, no batch-norm statistics.
        sequential: Train members one after the other, each for ``epochs``, with earlier ones frozen, as A2D was first
            done (`objectives.a2d` with ``classes="earlier"``). The first has nobody to differ from and is trained on
            its cross-entropy alone; later ones see themselves and the earlier members. The history is that of all
            stages, one after the other.
        adversarial: Attack part of every batch with the weights of that step (`dissensus.train.AdversarialTraining`).
        validation: ``(x, y)``, a ``Dataset`` or a ``DataLoader`` of such pairs, or the fraction of tensor data to split
            off (by the seed). The best epoch's weights are kept at the end. The metric on it goes into the history as
            ``validation``, the objective's parts on it as ``validation_...``.
        metric: ``(outputs [M, N, C], targets) -> `` a number, or one per member with ``watch="member"``. By default the
            loss of the pooled prediction, with the loss and the pool that are bound to the objective (and each member's
            own loss with ``watch="member"``). Without a pool, as in `objectives.independent`, class logits are pooled
            by probability and everything else by score. An objective of your own gives these losses as its parts
            ``ensemble`` and ``member_loss``; without ``ensemble``, a parameter ``loss`` that holds a name from
            `dissensus.losses` counts, and without such a loss its total divided by M.
        mode: Which way ``metric`` is better, and so to be said with it: ``"min"``, or ``"max"`` as for an accuracy.
        track: More measures of the validation data, by name: ``(outputs [M, N, C], targets) -> `` a number. They go
            into the history as ``validation_...`` and decide nothing.
        watch: Whose metric decides: the ensemble's, or each member's own (each then stops and is kept on its own).
        patience: Stop after so many epochs without an improvement of the metric by more than ``min_delta``.
        min_delta: See ``patience``. It is in the metric's units; the default metric does not grow with M.
        keep: The ``"best"`` epoch's weights at the end, or the ``"last"`` one's, where validation data only looks on.
        augment: ``(x, generator) -> x`` on each training batch, on the device, seeded by (seed, epoch, step). A list
            has one per member, each of whom then sees a batch of its own.
        precision: ``"auto"`` is bf16 autocast on cards with bf16 matrix units, for networks that gain from it
            (convolutions, or linear layers at least 256 wide), else the weights' own; ``"float32"``, ``"tf32"`` and
            ``"bf16"`` on request. The objective always sees float32.
        channels_last: How images lie in memory; by default so where networks with convolutions run in bf16 on a GPU.
        deterministic: Equal bits for the same training on the same machine, at some cost of speed: every sum has a
            fixed order, and ``backend="auto"`` goes by a rule, not by measuring. The number of threads counts:
            ``torch.set_num_threads`` must be the same.
        max_memory: Bytes that training may take; by default 80 % of a GPU's free memory, or half of the machine's.
            Members that do not fit all at once are taken in groups, with equal results.
        shuffle: A new order every epoch, from (seed, epoch).
        drop_last: Leave out a smaller last batch.
        checkpoint: A folder for checkpoints, so that a training that was killed can go on (a foreign ``DataLoader``
            at epoch ends only).
        resume: Go on from the newest whole checkpoint in that folder, or start where there is none.
        checkpoint_seconds: Time between checkpoints; by default ten seconds, more where writing costs over 2 %.
        progress: Called with a `Progress` about ten times a second and at epoch ends.
        seed: Determines data order, layers of dropout and augmentation. What a network's own code or a data set draws
            (``F.dropout``, ``torch.randn``) comes from torch's global generator, as ever.
        split_seed: Determines the validation split; by default the seed does.
        twin: Train an independent twin as well, a reference for an audit: a copy of the members as they are now,
            trained with the same loss, data order, seeds and settings, but without interaction between members. It is
            trained after the ensemble, whose result it does not change, and takes as long as an independent training
            does. It ends up as ``ensemble.twin`` and ``history.twin``, its record as ``history.twin_history``. The
            loss of ``objective`` must be visible, as it must be for the check of targets; otherwise pass the twin's
            objective here, ``partial(objectives.independent, loss="mse")`` for example. Data without labels is left
            out where that objective does not take it, and ``sequential`` members are trained all at once. A
            ``checkpoint`` holds the twin's training in a folder ``twin`` inside. Any fit without ``twin`` sets
            ``ensemble.twin`` to None.

    Raises:
        TrainingDiverged: NaN or infinity in the loss or a gradient. It names step, part and members; the ensemble keeps
            the weights from before that step, or with validation data its best ones up to then. Where that happens to
            the twin, the error's ``twin`` is True and the ensemble keeps the result of its own training.
    """
    frozen = list(frozen)  # a twin needs it a second time
    told = dict(locals())
    if isinstance(ensemble, SharedTrunk):
        fix = "Train trunk.heads, on trunk.features(x) or on cached features."
        checks.refuse("ensemble", "be what is trained, and a trunk stands still", "a SharedTrunk", fix, TypeError)
    if isinstance(getattr(ensemble, "_orig_mod", None), nn.Module):
        fix = "Fit the network itself, and compile it afterwards."
        checks.refuse("ensemble", "not be compiled", "what torch.compile returned", fix, TypeError)
    if not isinstance(ensemble, Ensemble):
        return _as_ensemble(ensemble, told)
    check_objective(objective)
    check_resume(resume, checkpoint)
    waiting = Twin.of(twin, ensemble, told)
    if waiting is not None:
        progress = siblings_progress(told)
    if sequential:
        history = one_by_one(fit, **{**told, "progress": progress, "twin": False})
        return history if waiting is None else waiting.train(fit, ensemble, history)
    epochs, batch_size = checks.count("epochs", epochs), checks.count("batch_size", batch_size)
    seed = checks.count("seed", seed, 0)
    checks.one_of("optimizer", optimizer, optim.OPTIMIZERS)
    checks.one_of("watch", watch, ("ensemble", "member"))
    checks.one_of("keep", keep, ("best", "last"))
    check_unlabelled(objective, unlabelled)
    check_augments(augment, ensemble.members)
    check_few(objective, active_members)
    check_adversarial(objective, adversarial, unlabelled, augment, active_members)
    device = ensemble.device
    data, held_out = _separated(data, validation, seed if split_seed is None else split_seed)
    check_patience(patience, min_delta, held_out)
    mode = check_validation(held_out, track, metric, mode)
    held_pair = None if held_out is None else as_pair(held_out)
    targets = Targets.of(objective, None if held_pair is None else held_pair[1])
    feed = batches(
        data,
        batch_size=batch_size,
        seed=seed,
        device=device,
        shuffle=shuffle,
        drop_last=drop_last,
        augment=augment,
        check=targets.check,
    )
    if held_pair is not None:
        targets.check_held_out(held_pair[1])
    if unlabelled is not None:
        check_like(data, unlabelled)
        feed = with_unlabelled(feed, unlabelled, batch_size=batch_size, seeds=[seed], device=device, augment=augment)
    body, members = ensemble.body, ensemble.members
    if not any(p.requires_grad for p in ensemble.parameters()):
        checks.refuse("ensemble", "have parameters to train", "only frozen ones", "Set requires_grad.")
    tell_of_split(body, objective)
    decided = numerics(precision, channels_last, deterministic, body, ensemble.dtype, device)
    body.channels_last, body.by_rule = decided.channels_last, deterministic
    flat = body.packed()
    pair = as_pair(data)
    if pair is not None and pair[0].is_floating_point() and pair[0].dtype != flat.dtype:
        fix = f"Use x.{'double' if flat.dtype == torch.float64 else 'float'}()."
        checks.refuse("x", f"have the networks' dtype, {flat.dtype}", str(pair[0].dtype), fix, TypeError)
    hyper = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
    settings = optim.settings(hyper, members, flat, nesterov=nesterov)
    check_momentum(optimizer, settings.momentum)
    body.set_keys([(seed, member) for member in ensemble.member_ids])
    engine = Engine(
        body=body,
        flat=flat,
        members=members,
        losses=over_runs(objective, 1),
        hyper={},
        optimizer=optimizer,
        settings=settings,
        limit=None if clip_norm is None else optim.column("clip_norm", clip_norm, members, flat),
        active=_active(frozen, members, device),
        feed=feed,
        schedule=schedules.resolved(schedule),
        epochs=epochs,
        numerics=decided,
        progress=progress,
        drawn=Drawn.of(active_members, members, [seed], device),
        adversary=None if adversarial is None else Adversary(adversarial, seed, device),
        freezing=Freezing.of(freeze, members, active_members),
        targets=targets,
    )
    check_drawn(engine)
    held: Any = None
    if held_out is not None:
        held = _loader(held_out, batch_size) if held_pair is None else tuple(part.to(device) for part in held_pair)
        engine.validator = Validation(
            held,
            objective,
            rows=None,
            metric=metric,
            per_member=watch == "member",
            track=track,
            check=targets.check_held_out,
        )
        engine.watch = Watch(
            body,
            flat,
            members=members,
            per_member=watch == "member",
            patience=patience,
            min_delta=min_delta,
            keep=keep,
            mode=mode,
        )
    engine.keys = draw_keys(objective, [seed], device)
    engine.captured = graph_steps(engine)
    engine.plan = functools.partial(plan_members, max_memory=max_memory, separable=is_separable(objective))
    checkpointer = None
    if checkpoint is not None:
        told = {
            "epochs": epochs,
            "batch_size": batch_size,
            "optimizer": optimizer,
            "seed": seed,
            "objective": objective,
            "network": body.identity(),
            "members": ensemble.member_ids,
            "initial": ensemble.seed,
            "data": digest(*pair) if pair else "a loader",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
            "schedule": engine.rates(),
            "clip_norm": clip_norm,
            "frozen": (~engine.active).tolist(),
            "metric": metric,
            "mode": mode,
            "watch": watch,
            "unlabelled": recognised(unlabelled),
            "active_members": active_members,
            "adversarial": None if adversarial is None else str(adversarial),
            "freeze": None if freeze is None else str(freeze),
            "validation": recognised(held_out),
            "patience": patience,
            "min_delta": min_delta,
            "keep": keep,
            "augment": augment,
            "precision": str(decided),
            "shuffle": shuffle,
            "drop_last": drop_last,
            "twin": None if waiting is None else waiting.objective,
        }
        engine.after_step = checkpointer = Checkpointer(checkpoint, told, checkpoint_seconds)
        if waiting is not None:
            waiting.keep(checkpointer, resume)
    before, ensemble.twin = ensemble.twin, None
    try:
        train(engine, checkpointer, resume)
    except BaseException:
        ensemble.twin = before if engine.steps == 0 else None  # weights that did not move keep their twin
        raise
    finally:
        body.choices.file = None
    history = _history(engine)
    if 0 in engine.failures:
        raise TrainingDiverged(engine.failures[0], history)
    if waiting is None:
        return history
    del engine, feed, flat, held, before  # the twin takes as much memory again
    return waiting.train(fit, ensemble, history)


def _as_ensemble(network: nn.Module, told: dict[str, Any]) -> History:
    """Train a module as an ensemble of one, and give it the weights."""
    held = Ensemble.from_modules([network])
    try:
        return fit(held, **{key: value for key, value in told.items() if key != "ensemble"})
    finally:
        trained = held.member(0)
        network.load_state_dict(trained.state_dict())
        buffers = dict(trained.named_buffers())
        for name, buffer in network.named_buffers():  # those that no state_dict holds, too
            buffer.copy_(buffers[name])


def _history(engine: Engine) -> History:
    epochs = engine.histories[0]
    return History(
        epochs=epochs,
        steps=engine.steps,
        seconds=engine.elapsed,
        stopped_early=0 not in engine.failures and len(epochs) < engine.epochs,
        best_epoch=engine.best_epochs.get(0),
        frozen_at=None if engine.freezing is None else engine.freezing.epochs(),
        backend=engine.backend,
        precision=str(engine.numerics),
        memory=engine.planned,
    )


def _loader(source: Source, batch_size: int) -> DataLoader[Any]:
    assert not isinstance(source, tuple)
    if isinstance(source, DataLoader):
        return source
    return DataLoader(source, batch_size, generator=torch.Generator(), collate_fn=getattr(source, "collate", None))


def _separated(data: Source, validation: Source | float | None, seed: int) -> tuple[Source, Source | None]:
    if not isinstance(validation, int | float):
        pair = isinstance(validation, tuple | list) and len(validation) == 2
        if validation is not None and not pair and not isinstance(validation, Dataset | DataLoader):
            checks.refuse("validation", "be (x, y), a Dataset, or a fraction between 0 and 1", repr(validation))
        return data, validation
    if isinstance(validation, int):
        checks.refuse("validation", "be (x, y), a Dataset, or a fraction between 0 and 1", repr(validation))
    pair = as_pair(data)
    if pair is None:
        checks.refuse("validation", "be (x, y) when data is no pair of tensors", validation)
    return split(*pair, validation, seed)


def _active(frozen: Iterable[int], members: int, device: torch.device) -> Tensor:
    active = torch.ones(members, dtype=torch.bool)
    for index in frozen:
        if not -members <= index < members:
            checks.refuse("frozen", f"name members 0 to {members - 1}", index)
        active[index] = False
    if not bool(active.any()):
        checks.refuse("frozen", "leave at least one member to train", "all of them")
    return active.to(device)

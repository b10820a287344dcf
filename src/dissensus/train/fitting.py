"""`fit`: train all members of an ensemble as one computation."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dissensus.train.optim as optim
import dissensus.train.schedules as schedules
from dissensus import checks
from dissensus.axes import Objective
from dissensus.data.batches import Augments, DataLike, as_pair, split
from dissensus.ensemble import Ensemble
from dissensus.execution import settings_kept
from dissensus.train.adversary import AdversarialTraining
from dissensus.train.checkpoint import train
from dissensus.train.compatibility import check_objective, check_resume, tell_of_split
from dissensus.train.convergence import Convergence
from dissensus.train.grid import Run
from dissensus.train.history import History, OnProgress, TrainingDiverged
from dissensus.train.numerics import Precision, PrecisionSettings
from dissensus.train.recipe import ExistingMembers, Recipe
from dissensus.train.sequential import one_by_one
from dissensus.train.settings import BatchSettings, CheckpointSettings, Metric, OptimizerSettings, ValidationSettings
from dissensus.train.twin import Twin, twin_objective
from dissensus.trunk import SharedTrunk


def fit(
    ensemble: Ensemble | nn.Module,
    data: DataLike,
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
    unlabelled: Tensor | DataLike | None = None,
    active_members: int | None = None,
    sequential: bool = False,
    adversarial: AdversarialTraining | None = None,
    validation: DataLike | float | None = None,
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
        active_members: The number of members that are drawn at every step and trained alone, as though they were the
            ensemble, with the loss counted M / ``active_members`` times (the LDR paper's stochastic sum). Members that
            are not drawn cost nothing and do not change: no decay, no moments, no batch-norm statistics.
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
        mode: Whether a lower (``"min"``) or a higher ``metric`` is better (``"max"``, as for an accuracy). Required
            with ``metric``.
        track: More measures of the validation data, by name: ``(outputs [M, N, C], targets) -> `` a number. They go
            into the history as ``validation_...`` and do not affect training.
        watch: Whose metric decides: the ensemble's, or each member's own (each then stops and is kept on its own).
        patience: Stop after this number of epochs without an improvement of the metric by more than ``min_delta``.
        min_delta: See ``patience``. It is in the metric's units; the default metric does not grow with M.
        keep: Keep the weights of the ``"best"`` epoch at the end, or of the ``"last"`` one; validation data then does
            not change the result.
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
            (``F.dropout``, ``torch.randn``) comes from torch's global generator.
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
    check_objective(objective)
    check_resume(resume, checkpoint)
    seed = checks.count("seed", seed, 0)
    split_seed = seed if split_seed is None else checks.count("split_seed", split_seed, 0)
    frozen = checks.listed("frozen", frozen)
    with _as_ensemble(ensemble) as members:
        of_twin = twin_objective(twin, members, objective)
        train_data, held_out = _separated(data, validation, split_seed)
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "clip_norm": clip_norm}
        run = Run.single(
            members=members.members,
            batch_size=batch_size,
            seed=seed,
            optimizer={name: value for name, value in numbers.items() if value is not None or name != "clip_norm"},
        )
        recipe = Recipe(
            initial=ExistingMembers(members),
            runs=(run,),
            data=train_data,
            objective=objective,
            epochs=epochs,
            optimizer=OptimizerSettings(optimizer, nesterov, betas, eps, schedule),
            batches=BatchSettings(shuffle, drop_last, augment),
            precision=PrecisionSettings(precision, channels_last, deterministic),
            validation=held_out,
            validation_settings=ValidationSettings(metric, mode, track, watch, patience, min_delta, keep),
            unlabelled=unlabelled,
            frozen=tuple(frozen),
            freeze=freeze,
            active_members=active_members,
            adversarial=adversarial,
            twin=of_twin,
            max_memory=max_memory,
            checkpoint=None if checkpoint is None else CheckpointSettings(Path(checkpoint), resume, checkpoint_seconds),
        )
        reference = Twin.of(recipe, progress, sequential=sequential)
        progress = progress if reference is None else reference.siblings_progress
        if sequential:
            history = one_by_one(train_recipe, recipe, progress)
        else:
            history = train_recipe(recipe, progress, reference)
        return history if reference is None else reference.train(train_recipe, members, history)


def train_recipe(recipe: Recipe, progress: OnProgress | None = None, twin: Twin | None = None) -> History:
    """Train the ensemble of a recipe in place; a twin that is trained afterwards is stored with the checkpoints."""
    assert isinstance(recipe.initial, ExistingMembers)
    ensemble = recipe.initial.ensemble
    with settings_kept(ensemble):
        tell_of_split(ensemble.body, recipe.objective)
        engine = recipe.engine(progress=progress, checkpoint=recipe.checkpoint)
        if twin is not None:
            twin.keep(engine.checkpointer)
        before, ensemble.twin = ensemble.twin, None
        try:
            train(engine)
        except BaseException:
            ensemble.twin = before if engine.state.steps == 0 else None  # weights that did not change keep their twin
            raise
        finally:
            ensemble.body.choices.file = None
    history = replace(engine.history(0), steps=engine.state.steps, seconds=engine.state.elapsed)
    if 0 in engine.state.failures:
        finite = all(bool(parameter.isfinite().all()) for parameter in ensemble.parameters())
        raise TrainingDiverged(engine.state.failures[0], history, finite=finite)
    return history


@contextmanager
def _as_ensemble(network: Ensemble | nn.Module) -> Iterator[Ensemble]:
    """An ensemble as it is; another module as an ensemble of one, whose weights it gets at the end."""
    if isinstance(network, SharedTrunk):
        fix = "Train trunk.heads, on trunk.features(x) or on cached features."
        checks.refuse("ensemble", "be what is trained, and a trunk stands still", "a SharedTrunk", fix, TypeError)
    if isinstance(getattr(network, "_orig_mod", None), nn.Module):
        fix = "Fit the network itself, and compile it afterwards."
        checks.refuse("ensemble", "not be compiled", "what torch.compile returned", fix, TypeError)
    if isinstance(network, Ensemble):
        yield network
        return
    ensemble = Ensemble.from_modules([network])
    try:
        yield ensemble
    finally:
        trained = ensemble.member(0)
        network.load_state_dict(trained.state_dict())
        buffers = dict(trained.named_buffers())
        for name, buffer in network.named_buffers():  # including buffers that no state_dict holds
            buffer.copy_(buffers[name])


def _separated(data: DataLike, validation: DataLike | float | None, seed: int) -> tuple[DataLike, DataLike | None]:
    """Training and validation data; a fraction of tensor data is split off."""
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

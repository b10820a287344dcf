"""`fit`: train all members of an ensemble as one computation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

import dissensus.train.optim as optim
import dissensus.train.schedules as schedules
from dissensus import calls, checks
from dissensus.arrays import Conversion
from dissensus.axes import Objective
from dissensus.batch import Unpack
from dissensus.data.batches import Augments, DataLike, as_pair, bootstrap_counts, check_source
from dissensus.data.splits import Split, held_out_rows
from dissensus.ensemble import Ensemble
from dissensus.execution import original, settings_kept
from dissensus.execution.meeting import is_first
from dissensus.execution.ranks import adopt, checked_parallel, several_ranks
from dissensus.masks import Masked
from dissensus.randomness import drawn_seed
from dissensus.train.adversary import AdversarialTraining
from dissensus.train.bar import displayed
from dissensus.train.checkpoint import Checkpointer, reserved, train
from dissensus.train.compatibility import check_objective, check_resume, tell_of_split
from dissensus.train.convergence import Convergence
from dissensus.train.engine import Engine
from dissensus.train.equal_start import tell_of_equal_start
from dissensus.train.grid import Run
from dissensus.train.history import History, OnProgress, TrainingDiverged
from dissensus.train.member_optimizers import MakeOptimizer
from dissensus.train.notification import Callbacks
from dissensus.train.numerics import Precision, PrecisionSettings
from dissensus.train.parallel import RankCallbacks, check_parallel, check_same, tell_of_statistics, watch_batches
from dissensus.train.recipe import ExistingMembers, HeldOut, Recipe, initial_weights, note_interruption
from dissensus.train.sequential import one_by_one
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
from dissensus.train.twin import Twin, twin_objective
from dissensus.training_rows import TrainingRows
from dissensus.trunk import SharedTrunk


def fit(
    ensemble: Ensemble | nn.Module,
    data: DataLike,
    objective: Objective,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: optim.PerMember | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    momentum: optim.PerMember | None = None,
    nesterov: bool | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: optim.PerMember | None = None,
    no_decay: Sequence[str] | bool = False,
    schedule: str | schedules.Schedule = "constant",
    clip_norm: optim.PerMember | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    recompute: bool = False,
    compile: bool | Literal["auto"] = "auto",
    shared_lr: float | None = None,
    shared_clip_norm: float | None = None,
    shared_gradient: Literal["mean", "sum"] = "mean",
    frozen: Iterable[int] = (),
    freeze: Convergence | None = None,
    unlabelled: Tensor | DataLike | None = None,
    active_members: int | None = None,
    sequential: bool = False,
    adversarial: AdversarialTraining | None = None,
    weights: Any = None,
    unpack: Unpack | None = None,
    steps_per_epoch: int | None = None,
    class_weights: Any = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    class_axis: int = 2,
    bootstrap: bool = False,
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
    max_memory: int | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = None,
    progress: bool | OnProgress | None = None,
    callbacks: Iterable[Any] | None = None,
    seed: int | None = 0,
    split_seed: int | None = None,
    twin: bool | Objective = False,
    parallel: Literal["members", "members+data"] | None = None,
) -> History:
    """Train the members of an ensemble in place.

    All members see the same batches and are updated in one stacked step. Without interaction between members, the
    result is that of M separate trainings, step for step.

    Args:
        ensemble: The ensemble to train. It is trained on its device: move it with ``ensemble.to("cuda")`` first.
            Devices other than CPUs and CUDA GPUs are refused. Its mode (train or eval) is restored afterwards. An
            ``nn.Module`` is trained as an ensemble of one member, or of its masks (`dissensus.masks.Masked`).
        data: Training data: a pair ``(inputs, targets)``, a ``Dataset``, a ``DataLoader`` or any iterable of batches.
            Inputs are a tensor, a dictionary of named inputs (``ens(**inputs)``) or a tuple of inputs
            (``ens(*inputs)``); the first axis of every tensor is the batch. NumPy arrays and pandas objects are taken
            to the networks' dtype, labels to int64. What is in memory is moved to the device as a whole. A
            ``DataLoader`` and an iterable keep their own order and batch size.
        objective: Function ``(outputs [M, B, C], targets) -> LossParts``. Bind hyperparameters with
            ``functools.partial``. Targets that do not fit its loss are refused: tensors before training, batches of a
            loader when they arrive. This check needs to know the loss. It knows the losses of `dissensus.objectives`,
            and the loss of your own objective if its parameter ``loss`` is the name of a loss in `dissensus.losses`.
        epochs: Number of passes over the data.
        batch_size: Number of examples per step. The last batch of an epoch may be smaller. Not used with a
            ``DataLoader``.
        lr: Learning rate: a number, or a sequence with one number per member. The default is 1e-3, for Lion 1e-4.
        optimizer: ``"sgd"``, ``"adam"``, ``"adamw"``, ``"lion"`` or ``"muon"``: one update for all members, equal to
            ``torch.optim``'s, and for Lion to the paper's (Chen et al. 2023). ``"muon"`` is
            ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` for all 2-D parameters but those of embeddings, and
            AdamW with the same learning rate and weight decay for the others, weights of convolutions included. Its
            Newton-Schulz iterations are in bfloat16, as torch's, and equal to the rounding of that.

            Or a callable ``parameters -> torch.optim.Optimizer``: a class, a ``functools.partial`` or a function. It is
            called for every member with a list of the member's parameters, and its optimizers are stepped one after
            another. The result is that of separate trainings. (It is called for copies too, to try a step before
            training.) A function whose parameter is called ``named_parameters`` gets pairs ``(name, parameter)``. Its
            learning rate and other settings belong to the callable, and are refused here. A ``schedule`` multiplies the
            learning rates of all groups, as torch's ``LambdaLR``. Optimizers with ``train()`` and ``eval()``, such as
            schedule-free ones, are switched to evaluation for validation data and at the end. Optimizers that need a
            closure, such as L-BFGS, are refused.
        momentum: Momentum of SGD and Muon: a number, or one per member. The default is 0, for Muon 0.95.
        nesterov: Whether SGD or Muon uses Nesterov momentum. The default is False, for Muon True.
        betas: Decay rates of Adam's two moments, or Lion's two averages. The default is (0.9, 0.999), for Lion
            (0.9, 0.99).
        eps: Number that Adam adds to the denominator. The default is 1e-8.
        weight_decay: L2 penalty of SGD and Adam, decoupled weight decay of AdamW, Lion and Muon: a number, or one per
            member. The default is 0, for all of them; in torch it is 0.01 for AdamW and 0.1 for Muon.
        no_decay: Parameters without weight decay: a list of ``"bias"`` (biases of all layers), ``"norm"`` (all
            parameters of normalisation layers, by type) and patterns that are matched against the whole name of a
            parameter, such as ``"head.*"`` or ``"*.embedding.weight"``. True stands for ``["bias", "norm"]``. A
            pattern that matches nothing is refused.
        schedule: Learning-rate schedule: ``"constant"``, ``"cosine"`` or a function from `dissensus.train.schedules`.
        clip_norm: Maximum norm of a member's gradient: a number, or one per member. None does not clip.
        accumulate: Number of batches whose gradients are averaged for one update, weighted by their examples, or by the
            sum of their weights. For objectives that are means over examples, and without batch norm, the result of
            ``accumulate=k`` is that of batches k times as large. An epoch ends with an update, of fewer batches if need
            be. Steps, here and in the history, count batches. The schedule counts updates, as with large batches.
        ema: Decay d of an exponential moving average of every member's weights, a ← d·a + (1 − d)·w after every update,
            above 0 and below 1, such as 0.999. Floating-point buffers, such as batch-norm statistics, are averaged too,
            as by ``torch.optim.swa_utils.AveragedModel`` with ``use_buffers=True``; the average begins with the weights
            after the first update. It is evaluated on validation data, and the ensemble holds it at the end: that of
            the best epoch, or the last one.
        recompute: Whether to repeat each member's forward pass in the backward pass instead of keeping its activations
            (activation checkpointing), with equal results. Members run in a loop then, and activations of one member
            exist at a time. Networks may checkpoint their own blocks by ``torch.utils.checkpoint`` with
            ``use_reentrant=False``, which is refused otherwise.
        compile: Whether training passes of members are compiled by ``torch.compile``, one compilation for all members,
            with equal results to rounding. Compiling takes from ten seconds to a few minutes, for each of up to four
            shapes of batches (a smaller last batch is one). ``"auto"`` does it on a CPU where ``backend="auto"``, the
            steps that are left are so many that it pays, and a compiled pass is measured to be at least 5 % faster.
            With True, passes run in the chosen backend's compiled form, without measuring that. Members that cannot be
            compiled run as they are, and the log has the reason. Needs a C++ compiler on a CPU, and Triton on a GPU.
            Refused with ``recompute`` and ``deterministic``.
        shared_lr: Learning rate of parameters that members share (``Ensemble(..., shared=...)``). The default is
            ``lr``. Settings that lose their meaning where such parameters are trained are refused: ``frozen``,
            ``freeze``, ``active_members``, ``sequential``, ``watch="member"``, numbers per member, and optimizers of
            your own. ``max_memory`` does not split such members into groups.
        shared_clip_norm: Maximum norm of the gradient of what is shared. The default is ``clip_norm``.
        shared_gradient: Gradient of what is shared: the ``"mean"`` over members of the gradients of their losses, as
            in TabM, or the ``"sum"``, which is the gradient of the objective's total.
        frozen: Indices of members that are not trained. Their weights, optimizer state and batch-norm statistics do not
            change. Their outputs still count in the objective.
        freeze: Rule that freezes members once they have converged, at most one per epoch (see
            `dissensus.train.Convergence`). Training ends when all members are frozen, or after ``epochs``.
            ``frozen_at`` of the history has the epoch at which each member was frozen.
        unlabelled: Data without labels, for objectives such as `objectives.a2d` and `objectives.divdis`: a tensor, or
            any source that ``data`` may be. Targets in it are ignored. Every step takes one batch of it in a separate
            forward pass. The objective receives the members' outputs on it as ``unlabelled``.
        active_members: Number of members to draw at random for every step. Only these members are evaluated and
            trained, and the loss is multiplied by M / ``active_members`` (the stochastic sum of the LDR paper). The
            other members do not change: neither weights, nor optimizer state, nor batch-norm statistics. None trains
            all members at every step.
        sequential: Whether to train members one after another, each for ``epochs`` epochs, with earlier members frozen.
            This is how A2D was first trained (`objectives.a2d` with ``classes="earlier"``). The first member is trained
            on the loss of the objective, which must be known (see `objectives.Declaration`). Every later member is
            trained with the objective of itself and the earlier members. The history holds the epochs of all members
            in this order.
        weights: The weight of every example ``[N]``, or of every position of dense targets in their shape, in means
            over the batch, 0 or more. Means are divided by the sum of the weights of a batch, as torch does it with the
            weights of classes, and the history's means over an epoch by the sum of all. Sources of batches give weights
            by ``unpack``. Weights of validation data (of a fraction that is held out, or by ``unpack``) count in the
            loss that is watched.
        unpack: Function ``batch -> (inputs, targets)`` or ``(inputs, targets, weights)`` for batches of any other form
            than pairs, such as dictionaries. It is used for ``validation`` and ``unlabelled`` sources as well.
        steps_per_epoch: Number of batches that count as an epoch, for sources of batches. Required for those without a
            length, such as an ``IterableDataset`` or a generator. The next epoch reads on where the last one ended, and
            a source that is exhausted is read again from its beginning.
        class_weights: The weight of every class ``[C]``, 0 or more; or ``"balanced"``: n / (K · n_c) for a class with
            n_c of n training labels in memory, as in scikit-learn, with K classes that occur. An example of class y
            counts w_y times, and means are divided by the sum of these weights. With cross-entropy the loss is that of
            ``torch.nn.functional.cross_entropy(weight=...)``. Class weights multiply ``weights``. They count in the
            watched loss of validation data too.
        label_smoothing: The share of every label that is spread over all classes, from 0 to 1, as in
            ``torch.nn.functional.cross_entropy``. The objective gets soft labels. The watched loss of validation data
            is computed without it.
        ignore_index: Label of examples, pixels or tokens that do not count, such as -100, in training and validation
            data. A ``metric`` of your own gets all labels.
        class_axis: Axis of the classes in member outputs. 2 for ``[M, B, C]`` and for dense outputs ``[M, B, C, *S]``,
            one prediction per pixel, whose labels are ``[B, *S]``. -1 for language models, ``[M, B, T, V]``. Every
            position counts as an example.
        bootstrap: Whether to train by bagging. For each of M members N of the N training examples are drawn with
            replacement, by the seed and the number of the member, once for all epochs
            (`dissensus.data.bootstrap_counts`). A member counts an example as often as it was drawn: all members see
            the same batches, with different weights. For objectives in which members do not interact, and for tensors
            or a ``Dataset``.
        adversarial: Settings of adversarial training (`dissensus.train.AdversarialTraining`). Part of every batch is
            attacked with the weights of that step.
        validation: Validation data: whatever ``data`` may be; or the fraction of the training examples to hold out at
            random, a float between 0 and 1, for tensors and a ``Dataset``; or a `dissensus.data.Split`, which holds out
            by class, by groups or by time. The history records ``metric`` on it as ``validation``, and the parts of the
            objective as ``validation_...``.
        metric: Function ``(outputs [M, N, C], targets)`` of the validation data that returns a number, or one number
            per member with ``watch="member"``. The default is the loss of the pooled prediction, with loss and pool of
            the objective; with ``watch="member"``, the loss of every member. An objective without a pool, such as
            `objectives.independent`, pools class logits by probability and other outputs by score. For your own
            objective the default is its part ``ensemble`` (or ``member_loss``). If there is no such part, it is the
            loss that the parameter ``loss`` names, and otherwise the total divided by M.
        mode: Whether a lower (``"min"``) or a higher (``"max"``) ``metric`` is better. Required with ``metric``.
        track: Further measures of the validation data, by name: functions ``(outputs [M, N, C], targets)`` that return
            a number. The history records them as ``validation_...``. They do not affect training.
        watch: Whether the metric is that of the ``"ensemble"`` or of every ``"member"``. With ``"member"``, early
            stopping and the choice of the best epoch are separate for every member.
        patience: Number of epochs without improvement after which training stops. None does not stop early. Requires
            ``validation``.
        min_delta: The metric has improved if it is better than the best one so far by more than this number. The
            default metric does not grow with the number of members.
        keep: Which weights the ensemble has at the end, if there is validation data: those of the ``"best"`` epoch or
            of the ``"last"`` one. With ``"last"``, validation data does not change the result.
        augment: Function ``(x, generator) -> x`` that is applied to every training batch on the device. The generator
            is seeded by seed, epoch and step. A list has one function per member, and every member then sees its own
            version of the batch. A function with three positional parameters without defaults is called as ``(x, y,
            generator) -> (x, y)`` and changes targets too. They may become soft labels, as with
            `dissensus.data.augment.mixup` and `dissensus.data.augment.cutmix`.
        precision: ``"auto"``, ``"float32"``, ``"tf32"`` or ``"bf16"``. ``"auto"`` uses bf16 autocast on GPUs with bf16
            matrix units for networks that profit from it (with convolutions, or with linear layers at least 256 wide),
            and the dtype of the weights otherwise. The objective is always computed in float32 or higher.
        channels_last: Whether images and convolution weights are stored with channels last. By default, this is the
            case for networks with convolutions in bf16 on a GPU.
        deterministic: Whether the same training gives the same bits on the same machine. It is slower, because sums
            have a fixed order and ``backend="auto"`` follows a rule instead of measuring. The number of threads
            (``torch.set_num_threads``) must be the same too.
        max_memory: Maximum number of bytes that training may allocate. The default is 80 % of the free memory of a GPU,
            or half of the machine's memory. If not all members fit, they are processed in groups, with equal results.
        shuffle: Whether the order of examples changes every epoch. The order depends on seed and epoch.
        drop_last: Whether to leave out the last batch of an epoch if it is smaller than ``batch_size``.
        checkpoint: Folder for checkpoints, with which an interrupted training can be resumed. With a ``DataLoader``,
            checkpoints are written at the ends of epochs only. Checkpoints of a training with other settings, code,
            data or initial weights are refused.
        resume: Whether to resume from the newest intact checkpoint in ``checkpoint``. Training starts from the
            beginning if there is none.
        checkpoint_seconds: Seconds between checkpoints. The default is ten, or more if writing would take over 2 % of
            the time.
        progress: True draws a bar on stderr, with rich if it is installed, and leaves a summary in one line. If stderr
            is no terminal, that line is all. Or a function that is called with a `Progress` about ten times a second
            and at the end of every epoch.
        callbacks: List of objects with a method ``on_epoch(entry)``, ``on_step(entry)`` or both, or of functions, which
            stand for ``on_epoch``. `dissensus.callbacks` has ready ones, and says what ``on_runs`` and ``on_start`` do.

            ``on_epoch`` gets a copy of every entry of the history, validation included, after each epoch. ``on_step``
            gets ``epoch``, ``step`` (which counts from 1 over all epochs), ``lr``, the loss and the parts of that
            batch, and ``seconds``. On a GPU, where steps are replayed without waiting for their results, ``on_step``
            makes the host wait for every step. Entries have ``member`` if ``sequential`` is set, and ``twin`` (False,
            then True) with ``twin``.

            A callback that returns True stops the training: after this epoch, or at once after this step, whose epoch
            then has no entry. The weights are those of the best epoch if there is validation data and ``keep="best"``,
            else the last ones, and ``stopped_by`` of the history is the name of the callback. With ``sequential`` it
            stops the training of that member, and of a twin that of the twin. An error in a callback ends the training
            as Ctrl-C does: the ensemble has the weights so far (the best, if validated), checkpoints stay as they are.
            A resumed training calls ``on_epoch`` again for epochs after its checkpoint. Callbacks are no setting that
            checkpoints are known by.
        seed: Seed of data order, dropout (layers, ``F.dropout``, stochastic depth) and augmentation. Other random
            numbers that a network's own code or a data set draws (``torch.randn``) come from torch's global generator.
            None draws the seed from that generator, so that ``torch.manual_seed`` determines it. ``seed`` of the
            history has it.
        split_seed: Seed of the validation split. The default is ``seed``.
        twin: Whether to train an independent twin as well, as a reference for an audit. The twin starts from a copy of
            the members as they are before training. It is trained with the same loss, data order, seeds and settings,
            but without interaction between members. It is trained after the ensemble and does not change the ensemble's
            result. It takes as long as an independent training. The twin is stored as ``ensemble.twin`` and
            ``history.twin``, its history as ``history.twin_history``.

            The loss of ``objective`` must be known, as for the check of targets. Otherwise pass the objective of the
            twin here, for example ``partial(objectives.independent, loss="squared_error")``. The twin does not use
            ``unlabelled`` data unless its objective takes it, and its members are trained together even if
            ``sequential`` is set. Its checkpoints are in the folder ``twin`` inside ``checkpoint``. A fit without
            ``twin`` sets ``ensemble.twin`` to None.
        parallel: ``"members"`` trains members in several processes, which ``torchrun`` starts; every process runs the
            same script. A process trains its own members, and the outputs of all members travel between processes.
            With ``"members+data"`` several processes may share the batches of a member, whose gradients they sum; batch
            norm then sees a part of the batch. The result is that of one process, to rounding. Progress and callbacks
            are those of rank 0; checkpoints are written by all. Settings, data and the batches of loaders must be the
            same in all processes, and are compared. Without torchrun nothing changes. By default as the
            ensemble was made; one that was made without ``parallel`` is whole in every process at the end. Refused are
            ``sequential``, ``twin``, ``max_memory``, ``Masked`` networks, members of different architectures, and
            ``recompute`` with ``"members+data"``.

    Returns:
        The history: losses, parts of the objective, learning rates and validation metrics of every epoch.

    Raises:
        TrainingDiverged: The loss or a gradient is NaN or infinite. The error names the step, the part of the objective
            and the members. The ensemble has the weights from before that step or, with validation data, its best
            weights so far. If the twin diverged, ``twin`` of the error is True, and the ensemble keeps its result.
        RankFailed: With ``parallel``, another process has failed; the error has its message.
    """
    check_objective(objective)
    check_resume(resume, checkpoint, checkpoint_seconds, progress)
    listeners = Callbacks.of(callbacks)
    seed = drawn_seed() if seed is None else checks.count("seed", seed, 0)
    if split_seed is not None and isinstance(validation, Split) and validation.seed is not None:
        checks.refuse("split_seed", "be None where the split has a seed", split_seed, "Leave one of them out.")
    split_seed = seed if split_seed is None else checks.count("split_seed", split_seed, 0)
    frozen = checks.listed("frozen", frozen)
    checks.flag("sequential", sequential)
    with _as_ensemble(ensemble) as members, displayed(_of_first(progress, parallel, members)) as display:
        checks.computes("ensemble", members.device)
        refused = {
            "sequential": sequential or None,
            "twin": None if twin is False else "one",
            "max_memory": max_memory,
            # The second pass would not know which part of a batch it is.
            "recompute": recompute or None if parallel == "members+data" else None,
        }
        if members.parallel is not None and parallel not in (None, members.parallel):
            fix = f"The ensemble was made with parallel={members.parallel!r}."
            checks.refuse("parallel", "be that of the ensemble", repr(parallel), fix)
        parallel = parallel if members.parallel is None else members.parallel  # pyright: ignore[reportAssignmentType]
        several = check_parallel(parallel, refused, members.body)
        of_twin = twin_objective(twin, members, objective)
        conversion = Conversion.of(members)
        data, validation = conversion.pair(data), conversion.pair(validation)
        weights = None if weights is None else conversion.weights(weights)
        train_data, held_out, rows = _separated(data, validation, split_seed)
        held_out_weights = None
        if weights is not None and rows is not None:
            examples = sum(map(len, rows))
            if not weights.ndim or len(weights) != examples:
                checks.refuse("weights", f"have one number per example ({examples})", checks.shape_text(weights.shape))
            weights, held_out_weights = (weights[part] for part in rows)
        settings = OptimizerSettings(optimizer, nesterov, betas, eps, schedule, no_decay)  # pyright: ignore[reportArgumentType]
        numbers = settings.per_run(lr=lr, weight_decay=weight_decay, momentum=momentum)
        run = Run.single(
            members=members.members,
            batch_size=checks.count("batch_size", batch_size),
            seed=seed,
            optimizer=numbers if clip_norm is None else {**numbers, "clip_norm": clip_norm},
        )
        recipe = Recipe(
            initial=ExistingMembers(members),
            runs=(run,),
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
            split=HeldOut(data, validation, split_seed) if isinstance(validation, float | Split) else None,
            validation_settings=ValidationSettings(metric, mode, track, watch, patience, min_delta, keep),
            unlabelled=None if unlabelled is None else conversion.inputs(unlabelled, "unlabelled"),
            weights=weights,
            validation_weights=held_out_weights,
            frozen=tuple(frozen),
            freeze=freeze,
            active_members=active_members,
            adversarial=adversarial,
            twin=of_twin,
            max_memory=max_memory,
            checkpoint=None
            if checkpoint is None
            else CheckpointSettings(checks.path("checkpoint", checkpoint), resume, checkpoint_seconds),
        )
        tell_of_equal_start(members.body, recipe, sequential=sequential)
        # Before training, since it may break off, and since the twin gets it with the members.
        members.training_rows = members.training_rows.joined(_training_rows(train_data))
        reference = Twin.of(recipe, display.progress, listeners, sequential=sequential)
        on_progress = display.progress if reference is None else reference.siblings_progress
        if reference is not None and listeners is not None:
            listeners = listeners.at(twin=False)
        with _interruption_noted(members, recipe.checkpoint):
            if sequential:
                history = one_by_one(train_recipe, recipe, on_progress, listeners)
            elif several:
                history = train_in_ranks(recipe, on_progress, listeners, str(parallel))
            else:
                history = train_recipe(recipe, on_progress, reference, listeners)
            members.in_bag = _in_bag(recipe, data, rows)
            history = history if reference is None else reference.train(train_recipe, members, history)
        display.summary = _summary(history)
        return history


def _of_first(progress: Any, parallel: object, members: Ensemble) -> Any:
    """Who is told of progress: nobody where the first process tells it."""
    several = checked_parallel(parallel) is not None or members.parallel is not None
    return None if several and not is_first() else progress


def _summary(history: History) -> str:
    """What a bar leaves behind: how the training ended, and its last losses."""
    last = history.epochs[-1] if history.epochs else {}
    numbers = [f"{name} {last[name]:.4g}" for name in ("loss", "validation") if isinstance(last.get(name), float)]
    return f"trained: {history}" + (f"; {', '.join(numbers)} at the end" if numbers else "")


def _in_bag(recipe: Recipe, data: DataLike, rows: tuple[Tensor, Tensor] | None) -> Tensor | Literal["all"] | None:
    """The examples of the data that each member was trained on: ``"all"``, a mask ``[M, N]``, or None if unknown."""
    if recipe.split is None and not recipe.batches.bootstrap:
        return "all"
    pair = as_pair(data)
    if pair is None:
        return None
    members = recipe.runs[0].members
    trained_on = torch.arange(len(pair[1])) if rows is None else rows[0]
    drawn = torch.ones(members, len(trained_on), dtype=torch.bool)
    if recipe.batches.bootstrap:
        assert isinstance(recipe.initial, ExistingMembers)
        drawn = bootstrap_counts(len(trained_on), recipe.runs[0].seed, recipe.initial.ensemble.member_ids) > 0
    mask = torch.zeros(members, len(pair[1]), dtype=torch.bool)
    mask[:, trained_on] = drawn
    return mask


def _training_rows(data: DataLike) -> TrainingRows:
    """A record of training rows in memory; of batches of a source nothing is known."""
    pair = as_pair(data)
    return TrainingRows.unknown() if pair is None else TrainingRows.of(pair[0])


@contextmanager
def _interruption_noted(ensemble: Ensemble, checkpoint: CheckpointSettings | None) -> Iterator[None]:
    """A block of training. If it is interrupted, it can be resumed in this process with the half-trained ensemble."""
    none = checkpoint is None or ensemble.parallel is not None  # which `train_in_ranks` notes
    initial = None if none else initial_weights(ensemble.body)
    try:
        yield
    except BaseException:
        if initial is not None:
            note_interruption(ensemble.body, initial)
        raise


@contextmanager
def _interruption_of_rank_noted(ensemble: Ensemble, engine: Engine) -> Iterator[None]:
    """As `_interruption_noted`, for the members of one process."""
    try:
        yield
    except BaseException:
        if ensemble.parallel is not None and isinstance(engine.checkpointer, Checkpointer):
            note_interruption(ensemble.body, engine.checkpointer.fingerprint["initial weights"])
        raise


def train_recipe(
    recipe: Recipe,
    progress: OnProgress | None = None,
    twin: Twin | None = None,
    callbacks: Callbacks | None = None,
) -> History:
    """Train the ensemble of a recipe in place; a twin that is trained afterwards is stored with the checkpoints."""
    assert isinstance(recipe.initial, ExistingMembers)
    ensemble = recipe.initial.ensemble
    with settings_kept(ensemble):
        tell_of_split(ensemble.body, recipe.objective)
        engine = recipe.engine(progress=progress, callbacks=callbacks, checkpoint=recipe.checkpoint)
        with reserved(recipe.checkpoint):
            if twin is not None:
                twin.keep(engine.checkpointer)
            before, ensemble.twin = ensemble.twin, None
            try:
                train(engine)
            except BaseException:
                ensemble.twin = (
                    before if engine.state.steps == 0 else None
                )  # weights that did not change keep their twin
                raise
            finally:
                ensemble.body.choices.file = None
    history = replace(engine.history(0), steps=engine.state.steps, seconds=engine.state.elapsed)
    if 0 in engine.state.failures:
        finite = all(bool(parameter.isfinite().all()) for parameter in ensemble.parameters())
        raise TrainingDiverged(engine.state.failures[0], history, finite=finite)
    return history


def train_in_ranks(recipe: Recipe, progress: OnProgress | None, callbacks: Callbacks | None, parallel: str) -> History:
    """Train the ensemble of a recipe in several processes; each has all of its members at the end."""
    assert isinstance(recipe.initial, ExistingMembers)
    ensemble = recipe.initial.ensemble
    with (
        settings_kept(ensemble),
        several_ranks(ensemble.members, ensemble.device, parallel, "fit") as ranks,
    ):
        check_same(recipe, ensemble, ranks)
        tell_of_split(ensemble.body, recipe.objective)
        if ranks.first and ranks.data_size > 1:
            tell_of_statistics(ensemble.body)
        engine = recipe.engine(
            progress=progress if ranks.first else None,
            callbacks=RankCallbacks(callbacks, ranks),
            checkpoint=recipe.checkpoint,
            ranks=ranks,
        )
        watch_batches(engine, ranks)
        ensemble.twin = None
        with reserved(recipe.checkpoint if ranks.first else None), _interruption_of_rank_noted(ensemble, engine):
            try:
                train(engine)
            finally:
                ensemble.body.choices.file = None
        if ensemble.parallel is None:
            adopt(ensemble.body, engine.body, ranks)
        history = engine.history(0)
        if isinstance(history.best_epoch, list):
            known = torch.tensor([epoch or 0 for epoch in history.best_epoch])
            history = replace(history, best_epoch=[epoch or None for epoch in ranks.gathered(known).tolist()])
        history = ranks.decided(replace(history, steps=engine.state.steps, seconds=engine.state.elapsed))
        failure = ranks.decided(engine.state.failures.get(0))
        finite = all(ranks.everyone(all(bool(parameter.isfinite().all()) for parameter in ensemble.parameters())))
    if failure is not None:
        raise TrainingDiverged(failure, history, finite=finite)
    return history


@contextmanager
def _as_ensemble(network: Ensemble | nn.Module) -> Iterator[Ensemble]:
    """An ensemble as it is; another module as an ensemble of one, whose weights it gets at the end."""
    if isinstance(network, SharedTrunk):
        fix = "Train trunk.heads, on trunk.features(x) or on cached features."
        checks.refuse("ensemble", "be an ensemble to train, which a trunk is not", "a SharedTrunk", fix, TypeError)
    network = original(network)  # whose weights are those of what torch.compile returned
    if isinstance(network, Ensemble):
        yield network
        return
    ensemble = Ensemble.from_modules([network])
    if isinstance(network, Masked):
        ensemble.training_rows = network.training_rows
    try:
        yield ensemble
    finally:
        trained = ensemble.member(0)
        weights, buffers = trained.state_dict(), dict(trained.named_buffers())
        network.load_state_dict({name: weights[_uncompiled(name)] for name in network.state_dict()})
        for name, buffer in network.named_buffers():  # including buffers that no state_dict holds
            buffer.copy_(buffers[_uncompiled(name)])
        if isinstance(network, Masked):
            network.training_rows = ensemble.training_rows


def _uncompiled(name: str) -> str:
    """The name of a tensor without those that torch.compile puts in front of compiled layers."""
    return name.replace("_orig_mod.", "")


def _separated(
    data: DataLike, validation: DataLike | float | Split | None, seed: int
) -> tuple[DataLike, DataLike | None, tuple[Tensor, Tensor] | None]:
    """Training data, validation data, and the rows of both where a part of the data is split off."""
    requirement = "be (inputs, targets), a source of batches, a Split, or a fraction between 0 and 1"
    if not isinstance(validation, int | float | Split):
        if validation is not None and as_pair(validation, "validation") is None:
            check_source(validation, "validation")
        return data, validation, None
    if isinstance(validation, int):
        checks.refuse("validation", requirement, repr(validation))
    pair = as_pair(data)
    if pair is not None:
        inputs, targets = pair
        calls.examples(inputs, "data")
        if isinstance(validation, Split):
            validation.check(targets)
        rest, part = held_out_rows(validation, targets, seed)
        return (calls.rows(inputs, rest), targets[rest]), (calls.rows(inputs, part), targets[part]), (rest, part)
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        fix = "Pass validation data of its own."
        checks.refuse("validation", "be data, not a part of it, for a loader or a stream", validation, fix)
    # Targets of a data set are known example by example only: classes to stratify by come with the split.
    unknown = torch.zeros(len(data))  # pyright: ignore[reportArgumentType]  # it has a length
    rest, part = held_out_rows(validation, unknown, seed)
    return _subset(data, rest), _subset(data, part), None


def _subset(data: Dataset[Any], rows: Tensor) -> Subset[Any]:
    """Some examples of a data set, which are collated as those of the whole."""
    subset = Subset(data, rows.tolist())
    if hasattr(data, "collate"):
        vars(subset)["collate"] = data.collate  # pyright: ignore[reportAttributeAccessIssue]
    return subset

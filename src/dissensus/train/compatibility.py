"""Checks that the settings of a training go together, before anything is trained."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dissensus import calls, checks, losses
from dissensus.batch import check_finite
from dissensus.data.batches import Augments, DataLike, as_pair, changes_targets, end_to_end, is_source
from dissensus.data.splits import Split
from dissensus.data.unlabelled import unlabelled_inputs
from dissensus.execution import Body
from dissensus.objectives.declaration import (
    ADVERSARIAL,
    EXAMPLE_WEIGHTS,
    UNLABELLED,
    declaration,
    is_separable,
    per_member_arguments,
    takes,
    unset_parameters,
    unwrapped,
)
from dissensus.train.adversary import AdversarialTraining
from dissensus.train.bar import check_progress
from dissensus.train.grid import Run, key_of
from dissensus.train.settings import (
    BatchSettings,
    OptimizerSettings,
    TargetSettings,
    UpdateSettings,
    refuse_beside_callable,
)
from dissensus.train.state import TrainState
from dissensus.train.trained_loss import trained_loss

log = logging.getLogger("dissensus")


def check_objective(objective: object, runs: Sequence[Run] = ()) -> None:
    """Refuse an objective that is not callable, or that lacks the value of a parameter in any run."""
    if not callable(objective):
        fix = "Pass partial(dissensus.objectives.independent, loss='cross_entropy')."
        checks.refuse("objective", "be a function of outputs and targets", repr(objective), fix, TypeError)
    if isinstance(objective, nn.modules.loss._Loss):
        fix = "Use partial(dissensus.objectives.independent, loss='cross_entropy'), or another loss by name."
        got = f"torch's {type(objective).__name__}, which knows no members"
        checks.refuse("objective", "be a function of member outputs [M, B, C] and targets", got, fix, TypeError)
    unset = unset_parameters(objective)
    for run in runs:
        missing = [name for name in unset if name not in (*run.hyper, *run.words)]
        if missing:
            name = getattr(unwrapped(objective)[0], "__name__", "objective")
            values = ", ".join(f"{parameter}=..." for parameter in missing)
            got = f"{name} without {' and '.join(f'`{parameter}`' for parameter in missing)}"
            fix = f"Use functools.partial({name}, {values})" + (", or put it into the grid." if run.point else ".")
            checks.refuse("objective", "have a value for each of its parameters", got, fix)


def check_momentum(optimizer: str, momentum: Tensor) -> None:
    """Warn about a momentum that the optimiser ignores."""
    if optimizer not in ("sgd", "muon") and bool((momentum != 0).any()):
        log.warning("`momentum` belongs to SGD: %s uses betas instead and ignores it", optimizer)


def check_updates(
    optimizer: OptimizerSettings, updates: UpdateSettings, runs: Sequence[Run], active_members: int | None
) -> None:
    """Refuse settings of the optimizer that do not go together."""
    if optimizer.make is not None:
        refuse_beside_callable([name for run in runs for name in run.optimizer if name != "clip_norm"])
    elif optimizer.no_decay and not any(_is_given(run.optimizer["weight_decay"]) for run in runs):
        checks.refuse("no_decay", "come with a `weight_decay`", "weight_decay 0", "Pass weight_decay=0.01.")
    if updates.accumulate > 1 and active_members is not None:
        fix = "Leave one out: every batch draws members of its own."
        checks.refuse("accumulate", "come without `active_members`", "both", fix)


def tell_of_updates(updates: UpdateSettings, body: Body) -> None:
    """Say in the log where accumulated batches differ from large ones, and how recomputed members run."""
    if updates.accumulate > 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in body.modules()):
        log.info("accumulate: batch norm normalises each batch by itself, not the large one that it is a part of")
    if updates.compile is True and not body.alike:
        log.warning("members are not compiled: they have different architectures")
    if updates.recompute:
        log.info("recompute: members run in a loop, and steps are not captured in graphs")


def _is_given(numbers: Any) -> bool:
    """Whether a setting, for all members or one each, is not 0 for any."""
    return bool(np.any(np.asarray(numbers.cpu() if isinstance(numbers, Tensor) else numbers, dtype=object) != 0))


def check_resume(resume: bool, checkpoint: object, seconds: float | None, progress: object) -> None:
    """Refuse to resume without a folder of checkpoints, and what cannot be called while it trains."""
    check_progress(progress)
    if seconds is not None:
        checks.number("checkpoint_seconds", seconds, 0)
    if checks.flag("resume", resume) and checkpoint is None:
        checks.refuse("resume", "come with `checkpoint`, the folder to resume from", "no folder")


def check_validation(
    held_out: DataLike | float | Split | None, track: object, metric: object, mode: Literal["min", "max"] | None
) -> Literal["min", "max"]:
    """Refuse validation data that is empty, incomplete or not finite, and measures without such data.

    Returns:
        Whether lower or higher values of the watched number are better.
    """
    if mode is not None:
        checks.one_of("mode", mode, ("min", "max"))
    for name, measure in (("track", track), ("metric", metric)):
        if held_out is None and measure is not None:
            checks.refuse(name, "come with `validation` data", "none", "Pass validation=0.2.")
    if metric is not None and not callable(metric):
        checks.refuse("metric", "be a function (outputs, targets) -> number", repr(metric), error=TypeError)
    if metric is not None and mode is None:
        fix = "A loss or an error? Pass mode='min'. An accuracy? Pass mode='max'."
        checks.refuse("mode", "say whether a lower or a higher `metric` is better", "nothing", fix)
    if mode == "max" and metric is None:
        checks.refuse("mode", "be 'min' without `metric`, since the loss is watched then", "'max'", "Pass `metric`.")
    pair = None if held_out is None else as_pair(held_out)
    if pair is not None:
        x, y = pair
        length = calls.examples(x, "validation")
        if not length:
            checks.refuse("validation", "hold at least one example", "none")
        if not y.ndim or length != len(y):
            checks.refuse("validation", "hold as many targets as inputs", f"{length} inputs and {len(y)} targets")
        for tensor in calls.tensors(x):
            check_finite("validation x", tensor)
        check_finite("validation y", y)
    return mode or "min"


def held_out_of(validation: Any, folds: int) -> tuple[DataLike | float | Split | None, int]:
    """Validation data of a sweep (all folds end to end, a fraction, a split, or None), and the number of its folds."""
    if validation is None or isinstance(validation, float | Split) or is_source(validation):
        return validation, 1
    if isinstance(validation, int):
        checks.refuse("validation", "be (x, y), or a fraction between 0 and 1", repr(validation))
    x, y, pairs = end_to_end("validation", validation)
    if pairs not in (1, folds):
        checks.refuse("validation", f"hold {folds} pairs, one per fold, or one for all", pairs)
    return (x, y), pairs


def check_split(validation: object, targets: Tensor, runs: Sequence[Run], folds: int) -> None:
    """Refuse a split that does not go with the data of all folds ``[N, ...]``, or with seeds of the grid."""
    if not isinstance(validation, Split):
        return
    if validation.seed is not None and any("split_seed" in run.point for run in runs):
        got = "both"
        checks.refuse("grid", "leave out 'split_seed' where the split has a seed", got, "Leave one of them out.")
    labels = isinstance(validation.stratify, np.ndarray)
    if folds > 1 and (validation.groups is not None or validation.time is not None or labels):
        got = f"{folds} data sets"
        checks.refuse("validation", "split one data set where it has groups, times or labels of its own", got)
    for fold in targets.tensor_split(folds):
        validation.check(fold)


def check_patience(patience: int | None, min_delta: float, validation: object) -> None:
    """Refuse patience without validation data."""
    checks.number("min_delta", min_delta, 0)
    if patience is None:
        return
    checks.count("patience", patience)
    if validation is None:
        checks.refuse("patience", "come with `validation` data", patience, "Pass validation=0.2.")


def check_unlabelled(objective: Callable[..., Any], unlabelled: object) -> None:
    """Refuse data without labels for an objective that takes none, and an objective without the data it requires."""
    name = getattr(unwrapped(objective)[0], "__name__", "objective")
    taken = takes(objective, UNLABELLED)
    if unlabelled is None and taken and declaration(objective).unlabelled == "required":
        fix = "Pass unlabelled=x, inputs on which members should disagree."
        checks.refuse("unlabelled", f"be given, since the objective {name} needs it", "none", fix)
    if unlabelled is not None and not taken:
        fix = "objectives.a2d and objectives.divdis do."
        checks.refuse("objective", "take outputs on `unlabelled` data, a parameter of that name", name, fix)


def check_adversarial(
    objective: Callable[..., Any],
    settings: AdversarialTraining | None,
    unlabelled: object,
    augment: Augments,
    active_members: int | None,
) -> None:
    """Refuse settings that adversarial training does not go with."""
    taken = takes(objective, ADVERSARIAL)
    if settings is None:
        if taken:
            log.warning("the objective takes outputs on attacked inputs and gets none: pass adversarial=... to fit")
        return
    if not isinstance(settings, AdversarialTraining):
        fix = "Use AdversarialTraining(epsilon=8 / 255)."
        checks.refuse("adversarial", "be an AdversarialTraining", repr(settings), fix, TypeError)
    if settings.beside and (not taken or unlabelled is not None):
        fix = "objectives.trades does; and leave `unlabelled` out."
        checks.refuse("objective", "take outputs on attacked inputs, a parameter `adversarial`", "none", fix)
    if changes_targets(augment):
        fix = "Attacks need the labels of inputs: pass a function (x, generator) -> x."
        checks.refuse("augment", "keep targets in adversarial training", "a function (x, y, generator)", fix)
    if isinstance(augment, Sequence):
        checks.refuse("adversarial", "come with one augmentation for all members", "one per member")
    if settings.against == "members" and active_members is not None:
        checks.refuse("adversarial", "come without `active_members`", "both", "Use against='ensemble'.")


def check_few(objective: Callable[..., Any], active_members: int | None) -> None:
    """Refuse to draw members for an objective that cannot be evaluated on a part of them."""
    if active_members is None:
        return
    if declaration(objective).pairs and active_members == 1:
        checks.refuse("active_members", "be at least 2 for an objective of pairs", active_members)
    for name in per_member_arguments(objective):
        checks.refuse("active_members", f"come without `{name}` per member", active_members, "Use one value for all.")


def check_augments(augment: Augments, members: int) -> None:
    """Refuse a list of augmentations whose length is not the number of members."""
    if isinstance(augment, Sequence) and len(augment) != members:
        checks.refuse("augment", f"be one for all, or one per member (M={members})", f"{len(augment)} of them")


def check_targets_augmented(augment: Augments, unlabelled: object) -> None:
    """Refuse an augmentation of inputs and targets beside data without targets."""
    if unlabelled is not None and changes_targets(augment):
        fix = "It is applied to both: pass a function (x, generator) -> x."
        checks.refuse("augment", "keep targets beside `unlabelled` data", "a function (x, y, generator)", fix)


def check_target_settings(
    objective: Callable[..., Any], runs: Sequence[Run], data: DataLike, settings: TargetSettings
) -> None:
    """Refuse class weights, label smoothing and ignored labels for what cannot take them."""
    name = getattr(unwrapped(objective)[0], "__name__", "objective")
    for setting in settings.weighs:
        if not takes(objective, EXAMPLE_WEIGHTS):
            fix = "Give it a parameter `example_weights` [B], and multiply the losses by it."
            checks.refuse(setting, "come with an objective that takes weights of examples", name, fix)
    smoothing = ["label_smoothing"] if settings.label_smoothing else []
    if smoothing and not declaration(objective).soft_targets:
        fix = "Leave it out, or use an objective such as `independent` or `augmented`."
        requirement = f"be 0 for the objective {name}, which needs class labels"
        checks.refuse("label_smoothing", requirement, settings.label_smoothing, fix)
    if smoothing:
        _, keywords = unwrapped(objective)
        if keywords.get("smoothing") is not None or any({"smoothing"} & {*run.words, *run.hyper} for run in runs):
            fix = "Leave one of them out: labels would be smoothed twice."
            checks.refuse("label_smoothing", f"come without `smoothing` of {name}", "both", fix)
    for setting in (*settings.weighs, *smoothing):
        for words in {key_of(run.words): run.words for run in runs}.values():
            known = trained_loss(functools.partial(objective, **words))
            of_library = None if known is None else losses.known(known.loss)
            if known is not None and of_library is not None and of_library.takes != "logits":
                got, fix = losses.text_of(known.loss), "Use 'cross_entropy'."
                if of_library.takes == "label_logits":
                    fix = "Use a loss of your own: a function (outputs [B, L], targets) -> [B]."
                checks.refuse(setting, "come with a loss of class labels", got, fix)
    if settings.balanced and as_pair(data) is None:
        fix = "Pass one number per class."
        checks.refuse("class_weights", "be numbers unless data is in memory", "'balanced'", fix)


def check_bootstrap(objective: Callable[..., Any], bootstrap: bool, body: object = None) -> None:
    """Refuse bagging where members interact, and for masks of one network, which share their weights."""
    if not bootstrap:
        return
    if declaration(objective).example_weights != "per_member" or not takes(objective, EXAMPLE_WEIGHTS):
        name = getattr(unwrapped(objective)[0], "__name__", "objective")
        fix = "Use `independent`, or weights of examples for all members (weights=...)."
        checks.refuse("bootstrap", "come with an objective whose members do not interact", name, fix)
    if getattr(getattr(body, "network", None), "members_inside", False):
        checks.refuse("bootstrap", "come with members that are networks of their own", "masks of one network")


def check_like(data: DataLike, unlabelled: Tensor | DataLike) -> None:
    """Refuse unlabelled examples whose shape or type differs from that of the labelled ones."""
    pair = as_pair(data)
    x = unlabelled_inputs(unlabelled)
    if pair is None or x is None:
        return
    wanted, got = (
        ", ".join(f"{checks.shape_text(t.shape[1:])} {t.dtype}" for t in calls.tensors(part)) for part in (pair[0], x)
    )
    if wanted != got:
        checks.refuse("unlabelled", f"hold examples like those of data, {wanted}", got)


def check_source_of_runs(data: DataLike, runs: Sequence[Run], validation: object) -> None:
    """Refuse settings of a sweep that a source of batches cannot follow."""
    if isinstance(validation, float | Split):
        fix = "Pass validation data of its own, or tensors."
        checks.refuse("validation", "be data, not a part of it, for a source of batches", repr(validation), fix)
    own_batches = isinstance(data, DataLoader) or not isinstance(data, Dataset)
    if own_batches and len({run.batch_size for run in runs}) > 1:
        fix = "Pass tensors or a Dataset, or sweep over each loader separately."
        checks.refuse("grid", "leave out 'batch_size' where a loader has its own", "several", fix)


def check_batches(data: DataLike, settings: BatchSettings, weights: Tensor | None) -> None:
    """Refuse settings of batches that the data does not go with."""
    if as_pair(data) is None:
        if weights is not None:
            fix = "Pass unpack=lambda batch: (inputs, targets, weights)."
            checks.refuse("weights", "come with tensors (inputs, targets)", "a source of batches", fix)
        return
    for name, value in (("unpack", settings.unpack), ("steps_per_epoch", settings.steps_per_epoch)):
        if value is not None:
            checks.refuse(name, "come with a Dataset, a DataLoader or an iterable of batches", "tensors")
    if weights is not None:
        targets = data[1] if isinstance(data, tuple | list) else None
        if weights.ndim > 1 and isinstance(targets, Tensor) and weights.shape != targets.shape:
            got = checks.shape_text(weights.shape)
            checks.refuse("weights", "have one number per example [N], or the shape of dense targets", got)
        check_finite("weights", weights)
        if bool((weights < 0).any()) or not bool((weights > 0).any()):
            checks.refuse(
                "weights", "be 0 or more, and not all 0", f"from {float(weights.min()):g} to {float(weights.max()):g}"
            )


def check_drawn(state: TrainState) -> None:
    """Refuse to draw members that are not separate networks of one architecture."""
    if state.settings.sampling is None:
        return
    if not state.body.alike or len(state.flat) != state.runs * state.members:
        got = "different architectures, or masks of one network"
        checks.refuse("active_members", "come with members that are networks of one architecture", got)


def tell_of_split(body: object, objective: Callable[..., Any]) -> None:
    """Warn about an objective of interacting members when each example trains one mask only."""
    network = getattr(body, "network", None)
    if getattr(network, "assign", "all") == "split" and not is_separable(objective):
        log.warning("with assign='split' each example trains one mask, so members do not interact: use assign='all'")

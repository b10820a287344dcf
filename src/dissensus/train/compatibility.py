"""What settings of a training go together, and what they ask of each other; said before anything is trained."""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from dissensus import checks
from dissensus.axes import LossParts
from dissensus.data.batches import Augments, Source, as_pair, check_finite, end_to_end
from dissensus.data.recognition import digest
from dissensus.objectives import independent
from dissensus.train.adversary import AdversarialTraining
from dissensus.train.engine import ADVERSARIAL, UNLABELLED
from dissensus.train.state import TrainState

log = logging.getLogger("dissensus")


def check_objective(objective: object) -> None:
    """An objective is a function."""
    if not callable(objective):
        fix = "Pass partial(dissensus.objectives.independent, loss='cross_entropy')."
        checks.refuse("objective", "be a function of outputs and targets", repr(objective), fix, TypeError)


def check_momentum(optimizer: str, momentum: Tensor) -> None:
    """Say so where a momentum would do nothing."""
    if optimizer != "sgd" and bool((momentum != 0).any()):
        log.warning("`momentum` is SGD's: %s has betas instead, and does not look at it", optimizer)


def check_resume(resume: bool, checkpoint: object) -> None:
    """What is gone on with must lie somewhere."""
    if resume and checkpoint is None:
        checks.refuse("resume", "come with `checkpoint`, the folder to go on from", "no folder")


def check_validation(
    held_out: Source | float | None, track: object, metric: object, mode: Literal["min", "max"] | None
) -> Literal["min", "max"]:
    """Validation data is whole and there is some; what is to be taken on it comes with it. Which way is better."""
    if mode is not None:
        checks.one_of("mode", mode, ("min", "max"))
    for name, asked in (("track", track), ("metric", metric)):
        if held_out is None and asked is not None:
            checks.refuse(name, "come with `validation` data to be taken on", "none", "Pass validation=0.2.")
    if metric is not None and not callable(metric):
        checks.refuse("metric", "be a function (outputs, targets) -> number", repr(metric), error=TypeError)
    if metric is not None and mode is None:
        fix = "A loss or an error? Pass mode='min'. An accuracy? Pass mode='max'."
        checks.refuse("mode", "say which way `metric` is better", "nothing", fix)
    if mode == "max" and metric is None:
        checks.refuse("mode", "be 'min' without `metric`, since a loss is watched then", "'max'", "Pass `metric`.")
    pair = None if held_out is None else as_pair(held_out)
    if pair is not None:
        x, y = pair
        if not len(x):
            checks.refuse("validation", "hold at least one example", "none")
        if len(x) != len(y):
            checks.refuse("validation", "hold as many targets as inputs", f"{len(x)} inputs and {len(y)} targets")
        check_finite("validation x", x)
        check_finite("validation y", y)
    return mode or "min"


def held_out_of(validation: object, folds: int) -> tuple[tuple[Tensor, Tensor] | float | None, int]:
    """A sweep's validation data of all folds end to end, a fraction, or none; and of how many folds it is."""
    if validation is None or isinstance(validation, float):
        return validation, 1
    if isinstance(validation, int):
        checks.refuse("validation", "be (x, y), or a fraction between 0 and 1", repr(validation))
    x, y, found = end_to_end("validation", validation)
    if found not in (1, folds):
        checks.refuse("validation", f"hold {folds} pairs, one per fold, or one for all", found)
    return (x, y), found


def check_patience(patience: int | None, min_delta: float, validation: object) -> None:
    """Patience needs something to judge by."""
    checks.number("min_delta", min_delta, 0)
    if patience is None:
        return
    checks.count("patience", patience)
    if validation is None:
        checks.refuse("patience", "come with `validation` data to judge by", patience, "Pass validation=0.2.")


def is_separable(objective: Callable[..., LossParts]) -> bool:
    """Whether an objective is known to be a sum of terms that see one member's outputs each."""
    weights = smoothing = None
    while isinstance(objective, functools.partial):
        weights = objective.keywords.get("weights", weights)
        smoothing = objective.keywords.get("smoothing", smoothing)
        objective = objective.func
    return objective is independent and weights is None and not isinstance(smoothing, Sequence | Tensor)


def recognised(data: Tensor | Source | None) -> str | None:
    """What checkpoints know other data by."""
    if data is None or isinstance(data, Tensor):
        return None if data is None else digest(data)
    pair = as_pair(data)
    return "a loader" if pair is None else digest(*pair)


def takes_unlabelled(objective: Callable[..., Any]) -> bool:
    """Whether an objective takes outputs on data without labels, and nobody has bound them."""
    bound = isinstance(objective, functools.partial) and UNLABELLED in objective.keywords
    return UNLABELLED in inspect.signature(objective).parameters and not bound


def check_unlabelled(objective: Callable[..., Any], unlabelled: object) -> None:
    """Data without labels must come with an objective that takes it, and the other way round."""
    asked = inspect.signature(objective).parameters.get(UNLABELLED)
    takes = takes_unlabelled(objective)
    name = getattr(getattr(objective, "func", objective), "__name__", "it")
    if unlabelled is None and takes and asked is not None and asked.default is inspect.Parameter.empty:
        fix = "Pass unlabelled=x, inputs that members are to disagree on."
        checks.refuse("unlabelled", f"be given, since the objective {name} needs it", "none", fix)
    if unlabelled is not None and not takes:
        fix = "objectives.a2d and objectives.divdis do."
        checks.refuse("objective", "take outputs on `unlabelled` data, a parameter of that name", name, fix)


def check_adversarial(
    objective: Callable[..., Any],
    told: AdversarialTraining | None,
    unlabelled: object,
    augment: Augments,
    active_members: int | None,
) -> None:
    """What adversarial training goes together with."""
    takes = ADVERSARIAL in inspect.signature(objective).parameters
    if told is None:
        if takes and inspect.signature(objective).parameters[ADVERSARIAL].default is not inspect.Parameter.empty:
            log.warning("the objective takes outputs on attacked inputs and gets none: pass adversarial=... to fit")
        return
    if told.beside and (not takes or unlabelled is not None):
        fix = "objectives.trades does; and leave `unlabelled` out."
        checks.refuse("objective", "take outputs on attacked inputs, a parameter `adversarial`", "none", fix)
    if isinstance(augment, Sequence):
        checks.refuse("adversarial", "come with one augmentation for all members", "one per member")
    if told.against == "members" and active_members is not None:
        checks.refuse("adversarial", "come without `active_members`", "both", "Use against='ensemble'.")


NEED_PAIRS = ("a2d", "divdis", "ldr")


def check_few(objective: Callable[..., Any], active_members: int | None) -> None:
    """What an objective needs that is to see some members only."""
    if active_members is None:
        return
    bound = objective.keywords if isinstance(objective, functools.partial) else {}
    if getattr(getattr(objective, "func", objective), "__name__", "") in NEED_PAIRS and active_members == 1:
        checks.refuse("active_members", "be at least 2 for an objective of pairs", active_members)
    if isinstance(bound.get("smoothing"), Sequence) or getattr(bound.get("smoothing"), "ndim", 0):
        fix = "Use one number for all."
        checks.refuse("active_members", "come without label smoothing per member", active_members, fix)


def check_augments(augment: Augments, members: int) -> None:
    """As many augmentations as members, where there is one each."""
    if isinstance(augment, Sequence) and len(augment) != members:
        checks.refuse("augment", f"be one for all, or one per member (M={members})", f"{len(augment)} of them")


def check_like(data: Source, unlabelled: Tensor | Source) -> None:
    """Data without labels must look like the other."""
    pair = as_pair(data)
    own = unlabelled if isinstance(unlabelled, Tensor) else (as_pair(unlabelled) or (None,))[0]
    if pair is None or own is None or (own.shape[1:] == pair[0].shape[1:] and own.dtype == pair[0].dtype):
        return
    wanted = f"{checks.shape_text(pair[0].shape[1:])} {pair[0].dtype}"
    checks.refuse("unlabelled", f"hold examples like those of data, {wanted}", f"{list(own.shape[1:])} {own.dtype}")


def check_drawn(state: TrainState) -> None:
    """Members can be drawn where each is a network of its own, of one architecture."""
    if state.settings.sampling is None:
        return
    if not state.body.alike or len(state.flat) != state.runs * state.members:
        got = "different architectures, or masks of one network"
        checks.refuse("active_members", "come with members that are networks of one architecture", got)


def tell_of_split(body: object, objective: Callable[..., LossParts]) -> None:
    """Say so where members are to interact that see no common example."""
    network = getattr(body, "network", None)
    if getattr(network, "assign", "all") == "split" and not is_separable(objective):
        log.warning("with assign='split' each example trains one mask, so members do not interact: use assign='all'")

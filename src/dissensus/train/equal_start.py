"""Members that start from the same weights, as those of one pretrained checkpoint do."""

import logging
from collections.abc import Sequence

from torch import Tensor

from dissensus.dropout import may_drop_units
from dissensus.execution import Body
from dissensus.train.recipe import Recipe

log = logging.getLogger("dissensus")


def starts_equal(body: Body) -> bool:
    """Whether there are several members, and the trainable parameters that each has for itself are equal in all.

    A single member, members of different architectures, and members without such parameters are not.
    """
    if len(body) == 1 or not body.alike:
        return False
    trainable = [parameter.detach() for parameter in body.tensors().values() if parameter.requires_grad]
    if not trainable:
        return False
    return all(bool((parameter == parameter[:1]).all()) for parameter in trainable)


def tell_of_equal_start(body: Body, recipe: Recipe, *, sequential: bool) -> None:
    """Warn about members that start equal and are trained alike, since they stay equal.

    Dropout draws other masks for every member, so that members with dropout do part, though not far: the log says it at
    level INFO. Functions count as dropout (``F.dropout``) where the network's code mentions them.
    """
    if sequential or trained_differently(recipe) or not starts_equal(body):
        return
    ways = (
        "give every member a fresh head (make it inside `build`), its own examples (bagging, bootstrap=True), or "
        "its own augmentation (augment=[...], one function per member)"
    )
    if may_drop_units(body.modules()):
        log.info("members start from equal weights, and only dropout sets them apart; for more diversity, %s", ways)
    else:
        log.warning("members start from equal weights and are trained alike, so they stay equal: %s", ways)


def trained_differently(recipe: Recipe) -> bool:
    """Whether a setting treats members differently, by which members that start equal come apart."""
    numbers = [value for run in recipe.runs for value in run.optimizer.values()]
    per_member = any(isinstance(value, Sequence) or (isinstance(value, Tensor) and value.ndim) for value in numbers)
    several_augments = isinstance(recipe.batches.augment, Sequence)
    some_members = recipe.active_members is not None or recipe.freeze is not None or bool(recipe.frozen)
    return per_member or several_augments or some_members or recipe.batches.bootstrap

"""The loss that an objective trains on and the pool of its ensemble, where both can be seen; checks of targets."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss, Pool
from dissensus.diversity.decomposition import POOLS, member_and_ensemble_loss
from dissensus.objectives import (
    a2d,
    adp,
    augmented,
    divdis,
    gradient_adjusted,
    independent,
    joint,
    ldr,
    learner_dropout,
    negative_correlation,
    trades,
)
from dissensus.pooling import Weights

OF_CLASSES = (a2d, adp, divdis, ldr, trades)
"""Objectives of class labels: cross-entropy, and the mean of the probabilities as the ensemble's prediction."""
OF_SCORES = (gradient_adjusted, negative_correlation)
"""Objectives whose ensemble predicts the mean of the raw outputs."""
OURS = (*OF_CLASSES, *OF_SCORES, augmented, independent, joint, learner_dropout)


class TrainedLoss(NamedTuple):
    """A loss per example, and how members are pooled."""

    loss: str | PerExampleLoss
    """A name from `dissensus.losses` where it is one of those, or a user's function."""
    pool: Pool
    weights: Weights
    ours: bool
    """Whether this is an objective of this package, which does nothing else with targets."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> LossParts:
        """The pooled prediction's loss as ``total``, and each member's own as ``member_loss``, both means over B."""
        weights = None if self.weights is None else checks.member_weights(self.weights, len(outputs), outputs)
        member, ensemble = member_and_ensemble_loss(outputs, targets, loss=self.loss, pool=self.pool, weights=weights)
        return LossParts(ensemble.mean(), {"member_loss": member.mean(-1)})


def trained_loss(objective: Callable[..., Any]) -> TrainedLoss | None:
    """The loss and the pool that an objective has by itself, or that a ``partial`` or a default binds; None for others.

    Without a pool, class logits are pooled by probability and everything else by score.

    >>> trained_loss(functools.partial(independent, loss="brier"))[:2]
    ('brier', 'probability')
    >>> trained_loss(lambda outputs, targets: independent(outputs, targets, loss="brier")) is None
    True
    """
    function, bound = unwrapped(objective)
    ours = function in OURS
    if function in OF_CLASSES:
        return TrainedLoss("cross_entropy", "probability", None, ours)
    if function is gradient_adjusted:
        return TrainedLoss("mse", "score", None, ours)
    loss = _named(setting("loss", function, bound))
    if isinstance(loss, str) and loss in losses.LOSSES:
        natural: Pool = "probability" if losses.named(loss).takes == "logits" else "score"
    elif ours and callable(loss):
        natural = "score"
    else:
        return None
    pool = "score" if function in OF_SCORES else setting("pool", function, bound)
    return TrainedLoss(loss, pool if pool in POOLS else natural, bound.get("weights") if ours else None, ours)


def unwrapped(objective: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function inside of partials, and the keywords that they bind, of which outer ones win."""
    bound: dict[str, Any] = {}
    while isinstance(objective, functools.partial):
        bound = {**objective.keywords, **bound}
        objective = objective.func
    return objective, bound


def _named(loss: Any) -> str | PerExampleLoss | None:
    """A loss by its name, where it is one of `dissensus.losses`."""
    names = [name for name, known in losses.LOSSES.items() if loss is known.function]
    return names[0] if names else loss


def setting(name: str, function: Callable[..., Any], bound: dict[str, Any]) -> Any:
    """A keyword as it is bound, or its default; None where there is neither."""
    if name in bound:
        return bound[name]
    try:
        default = inspect.signature(function).parameters[name].default
    except (KeyError, TypeError, ValueError):
        return None
    return None if default is inspect.Parameter.empty else default


@dataclass
class Targets:
    """Looks at targets before they are trained on.

    What values a loss takes is known from its name. How many classes there are is known from the first outputs on;
    `see` takes those.
    """

    loss: str | None = None
    """A name from `dissensus.losses`; None where nobody can see the loss."""
    held_out: Tensor | None = None
    """Targets of validation data, where they lie in memory."""
    width: int | None = None
    seen: bool = False
    """Whether outputs have been seen."""

    @classmethod
    def of(cls, objective: Callable[..., Any], held_out: Tensor | None = None) -> "Targets":
        """For the loss that an objective is known to train on."""
        found = trained_loss(objective)
        return cls(found.loss if found is not None and isinstance(found.loss, str) else None, held_out)

    def check(self, targets: Tensor) -> None:
        """Refuse training targets that the loss does not take."""
        self._check(targets, "targets")

    def check_held_out(self, targets: Tensor) -> None:
        """Refuse validation targets that the loss does not take."""
        self._check(targets, "validation targets")

    def check_all(self, targets: Tensor) -> None:
        """Look at training targets, and at those of validation data that lie in memory."""
        self.check(targets)
        if self.held_out is not None:
            self.check_held_out(self.held_out)

    def see(self, outputs: Tensor, targets: Tensor) -> None:
        """Take the number of classes from outputs ``[R, M, B, C]``, and look at all targets with it."""
        self.seen = True
        if self.loss is not None and outputs.ndim == 4:
            self.width = outputs.shape[-1]
            self.check_all(targets)

    def _check(self, targets: Tensor, name: str) -> None:
        if self.loss is not None and isinstance(targets, Tensor):
            with torch.no_grad():
                losses.check_targets(self.loss, targets, self.width, name)

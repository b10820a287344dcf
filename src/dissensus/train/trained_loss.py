"""The loss that an objective trains on and the pool of its ensemble, where both are known; checks of targets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss, Pool
from dissensus.diversity.decomposition import POOLS, member_and_ensemble_loss
from dissensus.objectives.declaration import argument, declaration, is_declared
from dissensus.pooling import Weights


class TrainedLoss(NamedTuple):
    """A loss per example, and how members are pooled."""

    loss: str | PerExampleLoss
    """A name from `dissensus.losses`, or a function of a user."""
    pool: Pool
    weights: Weights
    declared: bool
    """Whether the objective has a declaration, which vouches for its loss and pool."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> LossParts:
        """The loss of the pooled prediction as ``total``, and ``member_loss`` ``[M]``; both are means over B."""
        weights = None if self.weights is None else checks.member_weights(self.weights, len(outputs), outputs)
        member, ensemble = member_and_ensemble_loss(outputs, targets, loss=self.loss, pool=self.pool, weights=weights)
        return LossParts(ensemble.mean(), {"member_loss": member.mean(-1)})


def trained_loss(objective: Callable[..., Any]) -> TrainedLoss | None:
    """The loss and the pool that an objective declares, or that its arguments name; None where they are unknown.

    Without a pool, class logits are pooled by probability and everything else by score.

    >>> import functools
    >>> from dissensus.objectives import independent
    >>> trained_loss(functools.partial(independent, loss="brier"))[:2]
    ('brier', 'probability')
    >>> trained_loss(lambda outputs, targets: independent(outputs, targets, loss="brier")) is None
    True
    """
    declared, vouched = declaration(objective), is_declared(objective)
    loss = _by_name(declared.loss or argument(objective, "loss"))
    if isinstance(loss, str) and loss in losses.LOSSES:
        natural: Pool = "probability" if losses.named(loss).takes == "logits" else "score"
    elif vouched and callable(loss):
        natural = "score"
    else:
        return None
    pool = declared.pool or argument(objective, "pool")
    weights = argument(objective, "weights") if "weights" in declared.per_member else None
    return TrainedLoss(loss, pool if pool in POOLS else natural, weights, vouched)


def _by_name(loss: Any) -> str | PerExampleLoss | None:
    """The name of a loss function of `dissensus.losses`; any other value as it is."""
    names = [name for name, known in losses.LOSSES.items() if loss is known.function]
    return names[0] if names else loss


@dataclass
class Targets:
    """Checks targets before they are trained on.

    The name of the loss says which values it takes. The number of classes is known from the first outputs on, which
    `observe` takes.
    """

    loss: str | None = None
    """A name from `dissensus.losses`; None if the loss is unknown."""
    held_out: Tensor | None = None
    """Targets of validation data, if they are in memory."""
    width: int | None = None
    observed: bool = False
    """Whether outputs have been observed."""
    class_labels: bool = False
    """Whether targets must be class labels."""

    @classmethod
    def of(cls, objective: Callable[..., Any], held_out: Tensor | None = None) -> "Targets":
        """For the loss that an objective is known to train on."""
        known = trained_loss(objective)
        loss = known.loss if known is not None and isinstance(known.loss, str) else None
        return cls(loss, held_out, class_labels=declaration(objective).class_labels)

    def check(self, targets: Tensor) -> None:
        """Refuse training targets that the loss does not take."""
        self._check(targets, "targets")

    def check_held_out(self, targets: Tensor) -> None:
        """Refuse validation targets that the loss does not take."""
        self._check(targets, "validation targets")

    def check_all(self, targets: Tensor) -> None:
        """Check training targets, and those of validation data that are in memory."""
        self.check(targets)
        if self.held_out is not None:
            self.check_held_out(self.held_out)

    def observe(self, outputs: Tensor, targets: Tensor) -> None:
        """Take the number of classes from outputs ``[R, M, B, C]``, and check all targets with it."""
        self.observed = True
        if self.loss is not None and outputs.ndim == 4:
            self.width = outputs.shape[-1]
            self.check_all(targets)

    def _check(self, targets: Tensor, name: str) -> None:
        if not isinstance(targets, Tensor):
            return
        if self.class_labels and targets.is_floating_point():
            fix = "Soft labels? Use targets.argmax(-1)." if targets.ndim > 1 else "Class labels? Use targets.long()."
            checks.refuse(name, "be class labels", f"floats {checks.shape_text(targets.shape)}", fix, TypeError)
        if self.loss is not None:
            with torch.no_grad():
                losses.check_targets(self.loss, targets, self.width, name)

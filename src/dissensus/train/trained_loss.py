"""The loss that an objective trains on and the pool of its ensemble, where both are known; checks of targets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss, Pool
from dissensus.diversity.decomposition import POOLS, member_and_ensemble_loss
from dissensus.objectives.declaration import EXAMPLE_WEIGHTS, argument, declaration, is_declared, takes, unwrapped
from dissensus.objectives.examples import examples
from dissensus.pooling import Weights
from dissensus.randomness import generators_kept
from dissensus.train.settings import TargetSettings

_SAID_OF_LABELS = ("out of bounds", "Class values must")
"""Words of torch's errors about labels out of range, by ``gather`` and ``one_hot``; others are an `IndexError`."""
_LABEL_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class TrainedLoss(NamedTuple):
    """A loss per example, and how members are pooled."""

    loss: str | PerExampleLoss
    """A name from `dissensus.losses`, a function of it with settings (a partial), or a function of a user."""
    pool: Pool
    weights: Weights
    declared: bool
    """Whether the objective has a declaration, which vouches for its loss and pool."""

    def __call__(
        self,
        outputs: Tensor,
        targets: Tensor,
        *,
        example_weights: Tensor | None = None,
        member_weights: Tensor | None = None,
    ) -> LossParts:
        """The loss of the pooled prediction as ``total``, and ``member_loss`` ``[M]``; both are means over B.

        Dense outputs are ``[M, B, C, *S]``, with means over all positions. ``member_weights`` take the place of the
        objective's own.
        """
        outputs, targets, example_weights = examples(outputs, targets, example_weights)
        given = self.weights if member_weights is None else member_weights
        weights = None if given is None else checks.member_weights(given, len(outputs), outputs)
        member, ensemble = member_and_ensemble_loss(outputs, targets, loss=self.loss, pool=self.pool, weights=weights)
        parts = {"member_loss": losses.batch_mean(member, example_weights)}
        return LossParts(losses.batch_mean(ensemble, example_weights), parts)


def trained_loss(objective: Callable[..., Any]) -> TrainedLoss | None:
    """The loss and the pool that an objective declares, or that its arguments name; None where they are unknown.

    Without a pool, it is the first of the loss's pools (`dissensus.losses.LOSSES`): class logits, labels and Gaussians
    are pooled by probability, and everything else by score.

    >>> import functools
    >>> from dissensus.objectives import independent
    >>> trained_loss(functools.partial(independent, loss="brier"))[:2]
    ('brier', 'probability')
    >>> trained_loss(lambda outputs, targets: independent(outputs, targets, loss="brier")) is None
    True
    """
    declared, vouched = declaration(objective), is_declared(objective)
    loss: Any = declared.loss or argument(objective, "loss")
    name = losses.name_of(loss)
    if name is not None:
        loss = loss if losses.settings_of(loss) else name
        natural: Pool = losses.named(name).pools[0]
    elif vouched and callable(loss):
        natural = "score"
    else:
        return None
    pool = declared.pool or argument(objective, "pool")
    weights = argument(objective, "weights") if "weights" in declared.per_member else None
    return TrainedLoss(cast(Any, loss), pool if pool in POOLS else natural, weights, vouched)


def check_weighted(objective: Callable[..., Any], weighted: bool) -> None:
    """Refuse weights of examples for an objective that does not take them."""
    if weighted and not takes(objective, EXAMPLE_WEIGHTS):
        name = getattr(unwrapped(objective)[0], "__name__", "objective")
        fix = "Give it a parameter `example_weights` [B], and multiply the losses by it."
        checks.refuse("objective", "take weights of examples", f"{name}, which does not", fix)


@dataclass
class Targets:
    """Checks targets before they are trained on.

    The name of the loss says which values it takes. The number of classes is known from the first outputs on, which
    `observe` takes.
    """

    loss: str | PerExampleLoss | None = None
    """A loss of `dissensus.losses`; None if the loss is unknown."""
    held_out: Tensor | None = None
    """Targets of validation data, if they are in memory."""
    width: int | None = None
    observed: bool = False
    """Whether outputs have been observed."""
    class_labels: bool = False
    """Whether targets must be class labels."""
    objective: Callable[..., Any] | None = None
    """Of one run; called with labels out of range where the loss is unknown."""
    metric: Callable[..., Any] | None = None
    """What validation targets are passed to; None: the objective."""
    members: int = 1
    """Members of a run, known from the first outputs on."""
    settings: TargetSettings = field(default_factory=TargetSettings)

    @classmethod
    def of(
        cls,
        objective: Callable[..., Any],
        held_out: Tensor | None = None,
        metric: Callable[..., Any] | None = None,
        settings: TargetSettings | None = None,
    ) -> "Targets":
        """For the loss that an objective is known to train on."""
        known = trained_loss(objective)
        loss = known.loss if known is not None and losses.known(known.loss) is not None else None
        return cls(
            loss,
            held_out,
            class_labels=declaration(objective).class_labels,
            objective=objective,
            metric=metric,
            settings=settings or TargetSettings(),
        )

    def check(self, targets: Tensor) -> None:
        """Refuse training targets that the loss does not take."""
        self._check(targets, "targets", self.objective)

    def check_held_out(self, targets: Tensor) -> None:
        """Refuse validation targets that the loss does not take."""
        self._check(targets, "validation targets", self.metric or self.objective)

    def check_all(self, targets: Tensor) -> None:
        """Check training targets, and those of validation data that are in memory."""
        self.check(targets)
        if self.held_out is not None:
            self.check_held_out(self.held_out)

    def observe(self, outputs: Tensor, targets: Tensor) -> None:
        """Take the number of classes from outputs ``[R, M, B, C, *S]``, and check all targets with it."""
        self.observed = True
        axis = self.settings.class_axis
        axis = axis + outputs.ndim if axis < 0 else axis + 1
        if outputs.ndim < 4 or not 3 <= axis < outputs.ndim:
            return
        if outputs.ndim > 4 and tuple(targets.shape[1:]) != (*outputs.shape[3:axis], *outputs.shape[axis + 1 :]):
            return  # soft labels, values, or what an objective of a user knows how to take
        self.members, self.width = outputs.shape[1], outputs.shape[axis]
        losses.tell_of_mean(self.loss, self.width)
        self.check_all(targets)

    def check_batch(self, targets: Tensor, weights: Tensor | None) -> None:
        """Refuse what batches bring and the objective does not take: weights, and soft labels of an augmentation."""
        if self.objective is None:
            return
        check_weighted(self.objective, weights is not None)
        if self.class_labels and targets.is_floating_point():
            name = getattr(unwrapped(self.objective)[0], "__name__", "objective")
            fix = "Use an augmentation (x, generator) -> x, or an objective such as `independent`."
            checks.refuse("augment", f"keep class labels for `{name}`, which needs them", "soft labels", fix)

    def _check(self, targets: Tensor, name: str, function: Callable[..., Any] | None) -> None:
        if not isinstance(targets, Tensor):
            return
        if self.settings.weighs:
            targets = self._check_labels(targets, name)
        if self.class_labels and targets.is_floating_point():
            fix = "Soft labels? Use targets.argmax(-1)." if targets.ndim > 1 else "Class labels? Use targets.long()."
            checks.refuse(name, "be class labels", f"floats {checks.shape_text(targets.shape)}", fix, TypeError)
        with torch.no_grad():
            if self.loss is not None:
                losses.check_targets(self.loss, targets, self.width, name)
            elif self.width is not None and self.width > 1 and function is not None:
                self._check_as_labels(targets, self.width, name, function)

    def _check_labels(self, targets: Tensor, name: str) -> Tensor:
        """Refuse targets that cannot be weighted by class or ignored; the labels that are not ignored."""
        ignored, weights = self.settings.ignore_index, self.settings.class_weights
        if targets.is_floating_point():
            if ignored is not None or self.settings.balanced:
                setting = "`ignore_index`" if ignored is not None else "class_weights='balanced'"
                checks.refuse(name, f"be class labels for {setting}", f"{targets.dtype}", "Use y.long().", TypeError)
            return targets
        if ignored is not None:
            targets = targets[targets.long() != ignored]
        if not targets.numel():
            return targets
        low, high = torch.stack(targets.aminmax()).tolist()
        if low < 0:
            fix = f"Labels that do not count? Pass ignore_index={low}." if ignored is None else ""
            checks.refuse(name, "be labels from 0 on", f"labels from {low} to {high}", fix)
        if isinstance(weights, Tensor) and high >= len(weights):
            got = f"{len(weights)} numbers for labels from {low} to {high}"
            checks.refuse("class_weights", "have one number per class", got)
        return targets

    def _check_as_labels(self, targets: Tensor, width: int, name: str, function: Callable[..., Any]) -> None:
        """Refuse labels out of range that an objective or a metric of unknown kind takes for indices.

        The function is called with them on the host: on a GPU a wrong index ends the use of the device.
        """
        if targets.ndim != 1 or not targets.numel() or targets.dtype not in _LABEL_TYPES:
            return
        low, high = torch.stack(targets.aminmax()).tolist()
        if low >= 0 and high < width:
            return
        outside = targets[(targets < 0) | (targets >= width)].unique().cpu()
        try:
            with generators_kept(torch.device("cpu")):
                function(torch.zeros(self.members, len(outside), width), outside)
        except Exception as reason:
            # Any other error says that it needs more than outputs and targets; training tells what is wrong.
            if isinstance(reason, IndexError) or any(text in str(reason) for text in _SAID_OF_LABELS):
                checks.refuse(name, f"be labels from 0 to {width - 1}", f"labels from {low} to {high}")

"""Class weights, label smoothing, ignored labels and the axis of classes, in front of an objective.

They become targets and weights of examples, which every objective takes, so that this is the only place that knows
them. Nothing is read from the device, and shapes do not depend on values: a graph can hold it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import dense, losses
from dissensus.axes import LossParts, PerExampleLoss
from dissensus.objectives.declaration import ADVERSARIAL, EXAMPLE_WEIGHTS, UNLABELLED
from dissensus.train.running_means import WEIGHT
from dissensus.train.settings import TargetSettings

CLASS_WEIGHTS = "class_weights"
"""The name by which class weights ``[C]`` of a run come among the hyperparameters of its objective."""


@dataclass(frozen=True)
class Weighted:
    """An objective of one run that sees targets and weights of examples as some settings say."""

    objective: Callable[..., LossParts]
    settings: TargetSettings
    loss: str | PerExampleLoss
    """The loss that the objective trains on; an empty name if it is unknown."""
    smooth: bool = True
    """Whether labels are smoothed, as in training."""

    def __call__(
        self,
        outputs: Float[Tensor, "M B ..."],
        targets: Tensor,
        *,
        class_weights: Float[Tensor, " K"] | None = None,
        example_weights: Tensor | None = None,
        **inputs: Any,
    ) -> LossParts:
        """The objective on positions ``[M, N, C]``, each with its target and its weight."""
        settings = self.settings
        axis, smoothing = settings.class_axis, settings.label_smoothing if self.smooth else 0.0
        positions = dense.positions(
            outputs, targets, class_axis=axis, ignore_index=settings.ignore_index, example_weights=example_weights
        )
        outputs, targets, example_weights = positions
        if class_weights is not None or smoothing:
            classes = outputs.shape[-1]
            if class_weights is not None and settings.balanced and len(class_weights) < classes:
                class_weights = torch.nn.functional.pad(class_weights, (0, classes - len(class_weights)), value=1.0)
            targets, example_weights = losses.weighted_targets(
                targets,
                classes,
                loss=self.loss,
                class_weights=class_weights,
                label_smoothing=smoothing,
                example_weights=example_weights,
                dtype=outputs.dtype,
            )
        for name in (UNLABELLED, ADVERSARIAL):
            if name in inputs:
                inputs[name] = dense.flat(inputs[name], axis)
        if example_weights is not None:
            inputs[EXAMPLE_WEIGHTS] = example_weights
        parts = self.objective(outputs, targets, **inputs)
        if example_weights is None or not self.smooth:  # validation data is not averaged over steps
            return parts
        return LossParts(parts.total, {**parts.parts, WEIGHT: example_weights.sum(-1)})


def weighted(
    objective: Callable[..., LossParts],
    settings: TargetSettings,
    loss: str | PerExampleLoss | None,
    *,
    smooth: bool = True,
) -> Callable[..., LossParts]:
    """The objective behind some settings; the objective itself where they change nothing."""
    return Weighted(objective, settings, loss or "", smooth) if settings.given else objective


def balanced_weights(labels: Tensor, classes: int, ignore_index: int | None = None) -> Float[Tensor, " C"]:
    """Weights by which all classes count the same: n / (K · n_c), with K classes that occur, as scikit-learn has it.

    A class that does not occur has the weight 1. Labels ``[N]`` or ``[N, *S]``.

    >>> balanced_weights(torch.tensor([0, 0, 0, 2]), 4)
    tensor([0.6667, 1.0000, 2.0000, 1.0000], dtype=torch.float64)
    """
    labels = labels.flatten()
    if ignore_index is not None:
        labels = labels[labels.long() != ignore_index]
    counts = labels.long().bincount(minlength=classes)
    occurring = (counts > 0).sum()
    return torch.where(counts > 0, len(labels) / (occurring * counts.clamp_min(1)).double(), 1.0)

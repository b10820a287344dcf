"""Objectives: pure functions ``(outputs, targets, *, hyperparameters) -> LossParts(total, parts)``.

``total`` sums over members and averages over the batch, so that without interaction M stacked members train exactly as
M separate networks would. Objectives never see a network.
"""

from dissensus.objectives.independent import independent
from dissensus.objectives.joint import augmented, joint

__all__ = ["augmented", "independent", "joint"]

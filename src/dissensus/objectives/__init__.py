"""Objectives: pure functions ``(outputs, targets, *, hyperparameters) -> LossParts(total, parts)``.

``total`` sums over members and averages over the batch, so that without interaction M stacked members train exactly as
M separate networks would. Objectives never see a network. Outputs in half precision are taken as float32, and so are
all numbers that come back.
"""

from dissensus.objectives.adjusted import (
    alpha_from_beta,
    alpha_from_gamma,
    beta_from_alpha,
    gamma_from_alpha,
    gradient_adjusted,
)
from dissensus.objectives.adp import adp, adp_confidence, adp_entropy_weight
from dissensus.objectives.correlation import negative_correlation
from dissensus.objectives.disagreement import a2d, divdis, hardness, ldr, pair_agreement
from dissensus.objectives.dropped import learner_dropout
from dissensus.objectives.independent import independent
from dissensus.objectives.joint import augmented, joint
from dissensus.objectives.robust import trades

__all__ = [
    "a2d",
    "adp",
    "adp_confidence",
    "adp_entropy_weight",
    "alpha_from_beta",
    "alpha_from_gamma",
    "augmented",
    "beta_from_alpha",
    "divdis",
    "gamma_from_alpha",
    "gradient_adjusted",
    "hardness",
    "independent",
    "joint",
    "ldr",
    "learner_dropout",
    "negative_correlation",
    "pair_agreement",
    "trades",
]

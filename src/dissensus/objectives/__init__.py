"""Objectives: pure functions ``(outputs, targets, *, hyperparameters) -> LossParts(total, parts)``.

``total`` sums over members and averages over the batch, so that without interaction M stacked members train exactly as
M separate networks would. Objectives never see a network. Outputs in half precision are converted to float32, and all
results are float32.

Every position of dense outputs ``[M, B, C, *S]`` with targets ``[B, *S]`` is an example; for ignored labels and other
class axes see `dissensus.dense.positions`. ``example_weights`` ``[B]`` turn all means over the batch into
Σ_b w_b v_b / Σ_b w_b. An example of weight zero is absent, whatever its outputs are, and a batch without weight adds
nothing. Objectives in which members do not interact also take weights per member, ``[M, B]``.

Each objective declares beside its function what it needs from training (`Declaration`). To add one, write it in a file
of this folder and add it to `OBJECTIVES`. An objective outside of this package declares in the same way and is passed
to `dissensus.fit` and `dissensus.sweep` as an argument.
"""

from collections.abc import Callable, Mapping

from dissensus.axes import LossParts
from dissensus.objectives.adjusted import (
    alpha_from_beta,
    alpha_from_gamma,
    beta_from_alpha,
    gamma_from_alpha,
    gradient_adjusted,
)
from dissensus.objectives.adp import adp, adp_confidence, adp_entropy_weight
from dissensus.objectives.correlation import negative_correlation
from dissensus.objectives.declaration import Declaration, declaration
from dissensus.objectives.disagreement import a2d, disagreement_pull, divdis, hardness, ldr, pair_agreement
from dissensus.objectives.dropped import learner_dropout
from dissensus.objectives.independent import independent
from dissensus.objectives.joint import augmented, joint
from dissensus.objectives.robust import trades

OBJECTIVES: Mapping[str, Callable[..., LossParts]] = {
    "a2d": a2d,
    "adp": adp,
    "augmented": augmented,
    "divdis": divdis,
    "gradient_adjusted": gradient_adjusted,
    "independent": independent,
    "joint": joint,
    "ldr": ldr,
    "learner_dropout": learner_dropout,
    "negative_correlation": negative_correlation,
    "trades": trades,
}
"""All objectives of this package by name. Studies name them; nothing changes this table."""

__all__ = [
    "OBJECTIVES",
    "Declaration",
    "a2d",
    "adp",
    "adp_confidence",
    "adp_entropy_weight",
    "alpha_from_beta",
    "alpha_from_gamma",
    "augmented",
    "beta_from_alpha",
    "declaration",
    "disagreement_pull",
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

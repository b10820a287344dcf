"""Diversity: the decomposition of any loss, and the forms it takes for particular ones.

All functions take dense outputs ``[M, B, C, *S]`` with targets ``[B, *S]``, of which every position is an example (see
`dissensus.dense`), and NumPy arrays. Numbers per example come back as ``[B, *S]``, numbers per output in the shape of
the outputs. Classes in the last axis? Use ``outputs.movedim(-1, 2)``, or ``class_axis=-1`` of `decompose`.
"""

from dissensus.diversity.closed_forms import (
    ambiguity,
    beta_approximation,
    brier_variance,
    exponential_family,
    hessian_form,
    probability_kl_limit,
    probability_log_ratio,
    probability_variance_approximation,
    score_kl,
    vote_disagreement,
)
from dissensus.diversity.collusion import bias_share, codependence, debias
from dissensus.diversity.decomposition import decompose
from dissensus.diversity.disagreement import distinct_predictions, jensen_shannon, pairwise_disagreement
from dissensus.diversity.errors import (
    Gap,
    dominance,
    error_correlation,
    error_covariance,
    errors,
    generalisation_gap,
    mean_covariance,
    relative_diversity,
)
from dissensus.diversity.plane import Plane, flipped, independent_errors, plane
from dissensus.diversity.volume import nonmaximal_volume

__all__ = [
    "Gap",
    "Plane",
    "ambiguity",
    "beta_approximation",
    "bias_share",
    "brier_variance",
    "codependence",
    "debias",
    "decompose",
    "distinct_predictions",
    "dominance",
    "error_correlation",
    "error_covariance",
    "errors",
    "exponential_family",
    "flipped",
    "generalisation_gap",
    "hessian_form",
    "independent_errors",
    "jensen_shannon",
    "mean_covariance",
    "nonmaximal_volume",
    "pairwise_disagreement",
    "plane",
    "probability_kl_limit",
    "probability_log_ratio",
    "probability_variance_approximation",
    "relative_diversity",
    "score_kl",
    "vote_disagreement",
]

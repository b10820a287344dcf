"""Diversity: the decomposition of any loss, and the forms it takes for particular ones."""

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

__all__ = [
    "ambiguity",
    "beta_approximation",
    "bias_share",
    "brier_variance",
    "codependence",
    "debias",
    "decompose",
    "exponential_family",
    "hessian_form",
    "probability_kl_limit",
    "probability_log_ratio",
    "probability_variance_approximation",
    "score_kl",
    "vote_disagreement",
]

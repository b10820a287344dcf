"""Calibration: does confidence agree with accuracy?"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import arguments, checks, dense
from dissensus.metrics.generalisation import check_labels

BINS = 15
SUM = 1e-2
"""How far the logarithm of a sum of probabilities may lie from zero: half precision rounds."""
EDGE = 1e-5
"""Share of a bin's width by which a confidence may lie above an edge and still count as the edge: float32 rounds."""


class Calibration(NamedTuple):
    """Predictions sorted into bins of equal width by the confidence of the class they name."""

    confidence: Float[Tensor, " bins"]
    """Mean confidence in a bin; NaN where it is empty."""
    accuracy: Float[Tensor, " bins"]
    """Share of right predictions in a bin; NaN where it is empty."""
    examples: Int[Tensor, " bins"]

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of the two, weighted by examples."""
        nonempty = self.examples > 0
        gaps = (self.confidence - self.accuracy).abs() * self.examples
        return float(gaps[nonempty].sum() / self.examples.sum())


@arguments.arrays
def calibration(
    log_probs: Float[Tensor, "B C *S"],
    labels: Int[Tensor, "B *S"],
    bins: int = BINS,
    *,
    ignore_index: int | None = None,
) -> Calibration:
    """Sort predictions into bins by confidence: (0, 1/bins], (1/bins, 2/bins] and so on.

    Every position of dense predictions ``[B, C, *S]`` counts as an example, except those whose label is
    ``ignore_index``.

    >>> log_probs = torch.tensor([[0.9, 0.1], [0.78, 0.22], [0.3, 0.7], [0.75, 0.25]]).log()
    >>> result = calibration(log_probs, torch.tensor([0, 1, 1, 0]), bins=5)
    >>> result.examples.tolist(), round(result.error, 4)
    ([0, 0, 0, 3, 1], 0.0825)
    """
    if (log_probs.ndim > 2 and labels.ndim == log_probs.ndim - 1) or (ignore_index is not None and log_probs.ndim == 2):
        members, labels = dense.counted(log_probs.unsqueeze(0), labels, ignore_index=ignore_index)
        log_probs = members[0]
    if log_probs.ndim != 2 or len(log_probs) != len(labels) or not len(labels):
        got = f"{list(log_probs.shape)} and {list(labels.shape)}"
        fix = "Outputs of members? Pool them first: see dissensus.pooling." if log_probs.ndim > 2 else ""
        checks.refuse("log_probs", "have shape [B, C], with a label each", got, fix)
    check_labels(labels, *log_probs.shape)
    checks.count("bins", bins)
    if bool(log_probs.isnan().any()):
        checks.refuse("log_probs", "be numbers", "NaN", "Leave such examples out.")
    if bool((log_probs.double().logsumexp(-1).abs() > SUM).any()):
        fix = "Use pooling.mean_probability(logits), or the logarithm of probabilities."
        checks.refuse("log_probs", "be logarithms of probabilities that sum to one", "others", fix)
    sure, named = log_probs.double().exp().max(-1)
    place = bin_of(sure, bins)
    count = torch.zeros(bins, dtype=torch.int64, device=place.device).index_add_(0, place, torch.ones_like(place))
    zeros = torch.zeros(bins, dtype=torch.float64, device=place.device)
    confidence = zeros.index_add(0, place, sure) / count
    accuracy = zeros.index_add(0, place, (named == labels).double()) / count
    return Calibration(confidence, accuracy, count)


def bin_of(confidence: Float[Tensor, "*S"], bins: int = BINS) -> Int[Tensor, "*S"]:
    """The bin of every confidence: 0 for (0, 1/bins], 1 for (1/bins, 2/bins] and so on.

    >>> bin_of(torch.tensor([0.0, 0.2, 0.21, 1.0]), 5)
    tensor([0, 0, 1, 4])
    """
    return (confidence * bins - EDGE).ceil().long().sub(1).clamp(0, bins - 1)

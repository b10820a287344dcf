"""Detection of shifted examples by scores."""

from jaxtyping import Float
from torch import Tensor

from dissensus.auditing.measuring import Figure
from dissensus.metrics.detection import auroc
from dissensus.scores import SCORES

DETECTORS = {
    SCORES[name].title or name.replace("_", " "): SCORES[name]
    for name in (
        "distinct_predictions",
        "mutual_information",
        "predictive_diversity",
        "model_average",
        "ensemble_entropy",
    )
}
"""Scores that an audit of a classifier uses for detection, by the names that it shows."""


def roc_area(inside: Float[Tensor, " N"], outside: Float[Tensor, " U"], *, confidence: float = 0.95) -> Figure:
    """Probability that an example from outside scores higher (ties count half), with DeLong's interval.

    >>> import torch
    >>> print(roc_area(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 3.0, 4.0])))
    0.889 (0.581 to 1)
    """
    return Figure(*auroc(inside, outside, confidence=confidence))

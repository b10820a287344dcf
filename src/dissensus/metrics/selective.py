"""Selective prediction: the risk among the examples that are kept, at every coverage."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus import arguments, checks


class RiskCoverage(NamedTuple):
    """The risk-coverage curve: entry k − 1 is for the k examples with the lowest scores."""

    coverage: Float[Tensor, " B"]
    """Share of examples kept: 1/B, 2/B, ... 1."""
    risk: Float[Tensor, " B"]
    """Mean loss among those kept."""
    area: float
    """AURC: the mean of the risks."""
    excess: float
    """AURC less that of the best possible score, which refuses examples from the largest loss down."""

    def risk_at(self, coverage: float) -> float:
        """The risk among the ⌈coverage · B⌉ examples with the lowest scores."""
        checks.number("coverage", coverage, 0, 1, open_low=True)
        return float(self.risk[max(1, math.ceil(coverage * len(self.risk) - 1e-9)) - 1])


@arguments.arrays
def risk_coverage(scores: Float[Tensor, "B *S"], wrong: Bool[Tensor, "B *S"] | Float[Tensor, "B *S"]) -> RiskCoverage:
    """Mean loss of the examples that are kept, when those with the lowest scores are kept first.

    risk(k) = 1/k Σ_{i ≤ k} ℓ_(i), with ℓ_(i) the loss at the i-th lowest score; AURC = 1/B Σ_k risk(k) (Geifman et al.,
    2019, also for the excess).

    Args:
        scores: Doubt: examples with higher scores are refused first, such as scores of `dissensus.scores`.
        wrong: Whether each answer is wrong, or any loss of the answer.

    Every position of dense scores ``[B, *S]`` counts as an example. Leave ignored ones out: ``scores[labels >= 0]``.

    Examples with equal scores have no order: each counts with their mean loss, which is the expectation over all
    orders. So a constant score has the overall risk at every coverage.

    >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([False, True, False, True]))
    >>> tuple(round(risk, 4) for risk in curve.risk.tolist())
    (0.0, 0.5, 0.3333, 0.5)
    >>> round(curve.area, 4), round(curve.excess, 4), curve.risk_at(0.5)
    (0.3333, 0.125, 0.5)
    """
    if scores.ndim > 1 and scores.shape == wrong.shape:
        scores, wrong = scores.flatten(), wrong.flatten()
    _check(scores, wrong)
    ordered, order = scores.double().sort()
    loss = wrong[order].double()
    _, tie, size = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(size), dtype=torch.float64, device=loss.device).index_add_(0, tie, loss)
    risk, best = _running_mean((sums / size)[tie]), _running_mean(loss.sort().values)
    kept = torch.arange(1, len(risk) + 1, dtype=torch.float64, device=risk.device)
    return RiskCoverage(kept / len(risk), risk, float(risk.mean()), max(0.0, float((risk - best).mean())))


def _running_mean(values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    return values.cumsum(0) / torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)


def _check(scores: Tensor, wrong: Tensor) -> None:
    if scores.ndim != 1 or not len(scores):
        checks.refuse("scores", "have shape [B], of at least one example", checks.shape_text(scores.shape))
    if wrong.shape != scores.shape:
        fix = "Members' losses? Use the losses of the pooled prediction." if wrong.ndim == 2 else ""
        checks.refuse("wrong", f"have shape [B={len(scores)}]", checks.shape_text(wrong.shape), fix)
    for name, numbers in (("scores", scores), ("wrong", wrong)):
        if not bool(numbers.isfinite().all()):
            checks.refuse(name, "be finite", "NaN or infinity", "Leave such examples out.")

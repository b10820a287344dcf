"""Is a score a good reason to refuse an answer? Risk among the examples that are kept, at every coverage."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus import checks


class RiskCoverage(NamedTuple):
    """The risk-coverage curve: entry k − 1 is of the k least doubtful examples."""

    coverage: Float[Tensor, " B"]
    """Share of examples kept: 1/B, 2/B, ... 1."""
    risk: Float[Tensor, " B"]
    """Mean loss among those kept."""
    area: float
    """AURC: the mean of the risks."""
    excess: float
    """AURC less that of a score which would refuse these very losses from the largest down; 0 for the best score."""

    def risk_at(self, coverage: float) -> float:
        """The risk where at least this share of examples is kept: of the ⌈coverage · B⌉ least doubtful."""
        checks.number("coverage", coverage, 0, 1, open_low=True)
        return float(self.risk[max(1, math.ceil(coverage * len(self.risk) - 1e-9)) - 1])


def risk_coverage(scores: Float[Tensor, " B"], wrong: Bool[Tensor, " B"] | Float[Tensor, " B"]) -> RiskCoverage:
    """Keep the examples with the lowest scores first, and look at the mean loss of those kept.

    risk(k) = 1/k Σ_{i ≤ k} ℓ_(i), with ℓ_(i) the loss at the i-th lowest score; AURC = 1/B Σ_k risk(k) (Geifman et al.,
    2019, also for the excess).

    Args:
        scores: Doubt: higher is refused sooner. Those of `dissensus.scores` are of that kind.
        wrong: Whether the answer is wrong, or any loss of it.

    Examples with equal scores come in no order: each counts as their mean loss, which is the expectation over all
    orders of them. So a score that is the same everywhere has the overall risk at every coverage.

    >>> found = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([False, True, False, True]))
    >>> tuple(round(risk, 4) for risk in found.risk.tolist())
    (0.0, 0.5, 0.3333, 0.5)
    >>> round(found.area, 4), round(found.excess, 4), found.risk_at(0.5)
    (0.3333, 0.125, 0.5)
    """
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
        fix = "Members' losses? Use those of what they predict together." if wrong.ndim == 2 else ""
        checks.refuse("wrong", f"have shape [B={len(scores)}]", checks.shape_text(wrong.shape), fix)
    for name, numbers in (("scores", scores), ("wrong", wrong)):
        if not bool(numbers.isfinite().all()):
            checks.refuse(name, "be finite", "NaN or infinity", "Leave such examples out.")

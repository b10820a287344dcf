"""Figures with bootstrap intervals, from sums. All replicates are computed at once.

A figure is one number per replicate, ``[S]``, or several, ``[S, K]``, of which it is the largest, the smallest or the
sum of absolute values, as `_INTERVALS` says. Such figures are biased, and their intervals allow for it (see
`dissensus.metrics.intervals`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus.auditing.distributions import student_quantile
from dissensus.auditing.examples import DROPS
from dissensus.auditing.sums import BinSums, ErrorSums, Sums, mapped
from dissensus.auditing.tallying import AuditTally
from dissensus.metrics import intervals
from dissensus.metrics.intervals import Interval
from dissensus.pages.parts import significant

REPLICATES = 999


class Figure(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{significant(self.value)} ({significant(self.low)} to {significant(self.high)})"

    def __format__(self, form: str) -> str:
        return format(Interval(*self), form) if form else str(self)


@dataclass(frozen=True)
class _Means:
    """Means over the examples of every replicate, ``[S, ...]``."""

    sums: Sums
    bias: Float[Tensor, " S"]
    """Mean squared constant offset of the members from their mean."""
    labels: Float[Tensor, "S C"] | None
    bins: BinSums | None


def measure(tally: AuditTally, seed: int = 0) -> dict[str, Figure]:
    """Every figure that a tally can give."""
    blocks = len(tally.count)
    weights = _block_weights(blocks, seed)
    count = weights @ tally.count

    def mean(sums: Tensor) -> Tensor:
        return torch.tensordot(weights, sums, 1) / count.view(-1, *[1] * (sums.ndim - 1))

    means = _Means(
        mapped(replace(tally.sums, slopes=None), mean),
        _bias(tally, blocks, seed),
        None if tally.labels is None else mean(tally.labels),
        None if tally.bins is None else mapped(tally.bins, mean),
    )
    figures = _spread_figures(tally, means)
    if means.sums.errors is not None:
        figures |= _error_figures(tally, means.sums, means.sums.errors)
        figures |= _value_figures(tally, means.sums) if tally.kind == "values" else _class_figures(tally, means)
    if tally.loss == "mse":
        width = tally.offsets.deviation.shape[-1]
        figures |= {name: figures[name] / width for name in _IN_SQUARES if name in figures}
    resamples = weights[1 : 1 + REPLICATES]
    signed = tally.probabilistic is not None and tally.probabilistic.may_be_negative
    return {name: _figure(name, values, resamples, signed=signed) for name, values in figures.items()}


def _bias(tally: AuditTally, blocks: int, seed: int) -> Float[Tensor, " S"]:
    """Mean squared constant offset of every replicate; NaN where a block is left out, which its interval does not need.

    For every replicate there are as many numbers as all outputs of an example, so a few replicates are computed at a
    time.
    """
    deviation, count = tally.offsets.deviation, tally.offsets.count
    weights = _block_weights(len(count), seed)[: 1 + REPLICATES]
    bias = torch.cat(
        [
            (torch.tensordot(part, deviation, 1) / n.view(-1, 1, 1)).square().sum(-1).mean(-1)
            for part, n in zip(weights.split(50), (weights @ count).split(50), strict=True)
        ]
    )
    return torch.cat([bias, bias.new_full((blocks,), math.nan)])


@cache
def expanded_confidence(units: int) -> float:
    """Confidence at which the percentiles of resamples of that many units cover a mean with probability 95 %.

    Resamples have the standard deviation with divisor n rather than n − 1, and their percentiles are those of a
    Gaussian rather than of Student's t. Both make intervals of few units too short (Hesterberg, 2015).

    >>> round(expanded_confidence(20), 3), round(expanded_confidence(256), 3)
    (0.968, 0.952)
    """
    return math.erf(student_quantile(0.025, units - 1) * math.sqrt(units / (units - 1) / 2))


def _block_weights(blocks: int, seed: int) -> Float[Tensor, "S K"]:
    """How often every replicate draws every block: first the data itself, then the replicates of the bootstrap, then
    all data without one block, for every block."""
    drawn = torch.randint(blocks, (REPLICATES, blocks), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(REPLICATES, blocks, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    whole = torch.ones(1, blocks, dtype=torch.float64)
    return torch.cat([whole, weights, whole - torch.eye(blocks, dtype=torch.float64)])


def by_member(tally: AuditTally) -> dict[str, list[Any]]:
    """Per member: loss and accuracy; per pair: correlation of errors and disagreement."""
    count = float(tally.count.sum())
    errors, choices, classes = tally.errors, tally.sums.choices, tally.sums.classes
    member_loss = errors.member_loss if tally.sums.losses is None else tally.sums.losses.member
    if tally.loss == "mse":
        member_loss = member_loss / tally.offsets.deviation.shape[-1]
    products = errors.products.sum(0) / count
    scale = products.diagonal().clamp_min(1e-300).sqrt()
    figures = {
        "loss": (member_loss.sum(0) / count).tolist(),
        "error_correlation": (products / scale / scale.unsqueeze(1)).tolist(),
    }
    if classes is not None and choices is not None:
        accuracy, agreement = classes.member_right.sum(0) / count, choices.agreements.sum(0) / count
        figures |= {"accuracy": accuracy.tolist(), "disagreement": (1 - agreement).tolist()}
    return figures


_INTERVALS: dict[str, Callable[[Tensor, float], Interval]] = {
    "bias_share": intervals.square,
    "dominance": intervals.root,
    "ece": intervals.absolute_sum,
    "member_ece": intervals.absolute_sum,
    "best_member": intervals.smallest,
    "worst_member": intervals.largest,
    "best_accuracy": intervals.largest,
    "worst_accuracy": intervals.smallest,
    "above_chance": intervals.largest,
}
"""Intervals of figures that are biased; all others are means or ratios of means."""
_SHARES = (
    "bias_share",
    "ece",
    "member_ece",
    "accuracy",
    "member_accuracy",
    "best_accuracy",
    "worst_accuracy",
    "disagreement",
    "coverage",
)
_AT_LEAST_ZERO = (
    "spread",
    "ensemble",
    "individual",
    "mse",
    "member_mse",
    "nll",
    "member_nll",
    "brier",
    "member_brier",
    "member_error",
    "pooled_error",
    "lost",
    "best_member",
    "worst_member",
)
_OF_LOSSES = ("ensemble", "individual", "best_member", "worst_member")
"""Figures that are losses: negative log-densities may lie below zero."""
_IN_SQUARES = (*_OF_LOSSES, "diversity", "spread", "error_covariance", "member_error", "pooled_error")
"""Figures that are sums over outputs for squared error, and means over outputs for ``"mse"``."""
_POSITIVE = (*_AT_LEAST_ZERO, "diversity", "relative_diversity", "of_uncorrelated", "codependence", "plane_diversity")
"""Figures whose intervals are computed on the logarithm, which is less skewed."""
_AT_MOST_ONE = ("gain", "kappa", "member_kappa", "explained", "member_explained", "error_correlation")
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    **dict.fromkeys(_AT_LEAST_ZERO, (0.0, math.inf)),
    **dict.fromkeys(_AT_MOST_ONE, (-math.inf, 1.0)),
    "distinct": (1.0, math.inf),
}
"""Ranges of figures; intervals are clipped to them."""


def _figure(
    name: str, values: Float[Tensor, "S *K"], resamples: Float[Tensor, "R B"], *, signed: bool = False
) -> Figure:
    """A figure with its interval; ``signed``: losses may lie below zero."""
    unbounded = signed and name in _OF_LOSSES
    resampled, left_out = values[: 1 + REPLICATES], values[1 + REPLICATES :]
    confidence = expanded_confidence(len(left_out))
    if name in _INTERVALS:
        value, low, high = _INTERVALS[name](resampled, confidence)
    elif name.startswith(_POSITIVE) and not unbounded and float(values[0]) > 0 and bool((left_out > 0).all()):
        ends = intervals.studentised(math.log(float(values[0])), left_out.log(), resamples)
        value, low, high = float(values[0]), math.exp(ends.low), math.exp(min(ends.high, 700.0))
    else:
        value, low, high = intervals.studentised(float(values[0]), left_out, resamples)
        if math.isnan(low):  # a figure that is NaN without some of its units
            value, low, high = intervals.percentile(resampled, confidence)
    least, most = (-math.inf, math.inf) if unbounded else _RANGES.get(name, (-math.inf, math.inf))
    if math.isnan(value):
        return Figure(value, low, high)
    return Figure(value, min(max(low, least), value), max(min(high, most), value))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b; infinite where b alone is zero, NaN where both are."""
    ratio = a / torch.where(b.abs() > 1e-300, b, torch.ones_like(b))
    undefined = torch.where(a.abs() > 1e-300, a.sign() * float("inf"), torch.full_like(a, float("nan")))
    return torch.where(b.abs() > 1e-300, ratio, undefined)


def _spread_figures(tally: AuditTally, means: _Means) -> dict[str, Tensor]:
    """Figures that need no targets."""
    spread, choices = means.sums.spread, means.sums.choices
    share = torch.where(spread > 0, means.bias / spread.clamp_min(1e-300), torch.zeros_like(means.bias))
    figures = {"spread": spread, "bias_share": share}
    if choices is not None:
        members = tally.members
        pairs = max(1, members * (members - 1))
        agreeing = (choices.agreements.sum((-1, -2)) - members) / pairs
        figures |= {"disagreement": 1 - agreeing if members > 1 else 0 * agreeing, "distinct": choices.distinct}
    return figures


def _error_figures(tally: AuditTally, sums: Sums, errors: ErrorSums) -> dict[str, Tensor]:
    """The decomposition, and correlations of errors (in squares: squared error, or the Brier score)."""
    members = tally.members
    member_loss, ensemble = errors.member_loss, errors.ensemble_loss
    if sums.losses is not None:
        member_loss, ensemble = sums.losses.member, sums.losses.ensemble
    individual = member_loss.mean(-1)
    signed = tally.probabilistic is not None and tally.probabilistic.may_be_negative
    diagonal = errors.products.diagonal(dim1=-2, dim2=-1)
    variance = diagonal.mean(-1)
    covariance = (errors.products.sum((-1, -2)) - diagonal.sum(-1)) / max(1, members * (members - 1))
    error = errors.quadratic  # of the mean prediction, as covariances are
    pooled = error if tally.pool != "score" or sums.classes is None else sums.classes.brier  # of the pooled prediction
    figures = {
        "ensemble": ensemble,
        "individual": individual,
        "diversity": individual - ensemble,
        "best_member": member_loss,
        "worst_member": member_loss,
        **({} if signed else {"dominance": _ratio(member_loss.std(-1, correction=0), individual)}),
        "error_covariance": covariance,
        "error_correlation": _ratio(covariance, variance),
        "relative_diversity": _ratio(variance - error, error),
        "of_uncorrelated": _ratio(variance - error, error) / max(1, members - 1),
        "gain": _ratio(variance - pooled, variance),
        "member_error": variance,
        "pooled_error": pooled,
    }
    for i, drop in enumerate(DROPS):
        kept = members - int(members * drop)
        if kept == members:
            continue  # too few to leave one out
        if errors.rises is not None:
            rise = errors.rises[..., i]
        elif tally.loss in ("mse", "squared_error") or (tally.loss, tally.pool) == (
            "brier",
            "probability",
        ):  # the closed form of squares
            rise = (individual - ensemble) * (members - kept) / (kept * max(1, members - 1))
        else:
            continue
        figures[f"codependence_{drop}"] = _ratio(rise, ensemble)
    return figures


def _value_figures(tally: AuditTally, sums: Sums) -> dict[str, Tensor]:
    """Figures of a regression."""
    assert sums.values is not None
    assert sums.errors is not None
    spread = sums.values.y_squared - sums.values.y.square().sum(-1)
    error, member_error = sums.errors.quadratic, sums.errors.member_loss.mean(-1)
    covered = None if sums.losses is None else sums.losses.covered
    width = tally.offsets.deviation.shape[-1]
    return {
        **({} if covered is None else {"coverage": covered}),
        "mse": error / width,
        "member_mse": member_error / width,
        "explained": 1 - _ratio(error, spread),
        "member_explained": 1 - _ratio(member_error, spread),
    }


def _class_figures(tally: AuditTally, means: _Means) -> dict[str, Tensor]:
    """Figures of a classifier."""
    classes, choices = means.sums.classes, means.sums.choices
    assert classes is not None
    assert choices is not None
    assert means.bins is not None
    assert means.labels is not None
    kappa = _ratio(classes.right - classes.guessed, 1 - classes.guessed)
    member_kappa = _ratio(classes.member_right - classes.member_guessed, 1 - classes.member_guessed)
    # For an ensemble that is worse than guessing, the largest ratio is not that of the best member.
    best_first = member_kappa if float(kappa[0]) > 0 else member_kappa.amax(-1, keepdim=True)
    members = tally.members
    disagreement = 1 - choices.agreements
    wrong = 1 - classes.member_right
    plane = _ratio(disagreement, (wrong.unsqueeze(-1) + wrong.unsqueeze(-2)) / 2)
    plane_diversity = plane.nan_to_num(0.0).sum((-1, -2)) / max(1, members * (members - 1))
    member_brier = classes.member_brier.mean(-1)
    return {
        "accuracy": classes.right,
        "member_accuracy": classes.member_right.mean(-1),
        "best_accuracy": classes.member_right,
        "worst_accuracy": classes.member_right,
        "kappa": kappa,
        "member_kappa": member_kappa.mean(-1),
        "nll": classes.nll,
        "member_nll": classes.member_nll.mean(-1),
        "brier": classes.brier,
        "member_brier": member_brier,
        "ece": _gaps(means.bins.pool),
        "member_ece": _gaps(means.bins.members).flatten(1) / members,
        "lost": _ratio(member_brier, 1 - means.labels.square().sum(-1)),
        "above_chance": _ratio(best_first, kappa.unsqueeze(-1).expand_as(best_first)),
        "plane_diversity": plane_diversity,
    }


def _gaps(bins: Float[Tensor, "*S bins 3"]) -> Float[Tensor, "*S bins"]:
    """Confidence less accuracy of each bin, weighted by its examples; their sizes add up to the calibration error."""
    return bins[..., 1] - bins[..., 2]

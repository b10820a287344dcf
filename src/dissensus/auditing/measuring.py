"""From sums to figures: each with its bootstrap interval, all replicates computed at once.

A figure is one number per replicate, ``[S]``, or several, ``[S, K]``, of which it is the largest, the smallest or the
sum of sizes: `_INTERVALS` says which. These are biased, and have an interval that allows for it (see
`dissensus.metrics.intervals`).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus.auditing.distributions import student_tail
from dissensus.auditing.tallying import COARSE, DROPS, OF_TRAINING, Tally
from dissensus.metrics import intervals
from dissensus.metrics.intervals import Interval

REPLICATES = 999


class Figure(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def measured(tally: Tally, seed: int = 0) -> dict[str, Figure]:
    """Every figure that a tally can give."""
    blocks = len(tally.sums["count"])
    weights = _drawn(blocks, seed)
    sums = dict(tally.sums)
    count, coarse_count = weights @ sums.pop("count"), sums["coarse_count"]
    deviation = sums["deviation"]
    sums = {name: held for name, held in sums.items() if name not in (*COARSE, *OF_TRAINING)}
    means = {
        name: torch.tensordot(weights, held, 1) / count.view(-1, *[1] * (held.ndim - 1)) for name, held in sums.items()
    }
    # As many numbers as all outputs of an example, for every replicate: a few replicates at a time. Blocks left out are
    # not needed for the interval of a square.
    coarse = _drawn(len(deviation), seed)[: 1 + REPLICATES]
    bias = torch.cat(
        [
            (torch.tensordot(some, deviation, 1) / n.view(-1, 1, 1)).square().sum(-1).mean(-1)
            for some, n in zip(coarse.split(50), (coarse @ coarse_count).split(50), strict=True)
        ]
    )
    means["bias"] = torch.cat([bias, bias.new_full((blocks,), math.nan)])
    found = _of_spread(tally, means)
    if "quadratic" in means:
        found |= _of_errors(tally, means)
        found |= _of_values(means) if tally.kind == "values" else _of_classes(tally, means)
    resamples = weights[1 : 1 + REPLICATES]
    return {name: _figure(name, values, resamples) for name, values in found.items()}


@cache
def expanded_confidence(units: int) -> float:
    """The confidence at which percentiles of resamples of so many units hold the truth of a mean 95 % of the time.

    Resamples vary by the standard deviation with divisor n rather than n − 1, and their percentiles are those of a
    Gaussian rather than of Student's t: both make intervals of few units too short (Hesterberg, 2015).

    >>> round(expanded_confidence(20), 3), round(expanded_confidence(256), 3)
    (0.968, 0.952)
    """
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, units - 1) > 0.025 else (low, middle)
    return math.erf(high * math.sqrt(units / (units - 1) / 2))


def _drawn(blocks: int, seed: int) -> Float[Tensor, "S K"]:
    """How often every replicate draws every block. The first row is the data itself; behind the replicates, each block
    is left out once."""
    drawn = torch.randint(blocks, (REPLICATES, blocks), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(REPLICATES, blocks, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    whole = torch.ones(1, blocks, dtype=torch.float64)
    return torch.cat([whole, weights, whole - torch.eye(blocks, dtype=torch.float64)])


def by_member(tally: Tally) -> dict[str, list[Any]]:
    """Per member: loss, accuracy; per pair: correlation of errors, disagreement."""
    count = float(tally.sums["count"].sum())
    means = {name: held.sum(0) / count for name, held in tally.sums.items()}
    products = means["products"]
    scale = products.diagonal().clamp_min(1e-300).sqrt()
    found = {
        "loss": means["member_loss"].tolist(),
        "error_correlation": (products / scale / scale.unsqueeze(1)).tolist(),
    }
    if "member_right" in means:
        found |= {"accuracy": means["member_right"].tolist(), "disagreement": (1 - means["agreements"]).tolist()}
    return found


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
"""How figures that are biased get their intervals; all others are means or ratios of means."""
_SHARES = (
    "bias_share",
    "ece",
    "member_ece",
    "accuracy",
    "member_accuracy",
    "best_accuracy",
    "worst_accuracy",
    "disagreement",
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
_POSITIVE = (*_AT_LEAST_ZERO, "diversity", "relative_diversity", "of_uncorrelated", "codependence", "plane_diversity")
"""Figures whose intervals are taken of their logarithms, which are less skewed."""
_AT_MOST_ONE = ("gain", "kappa", "member_kappa", "explained", "member_explained", "error_correlation")
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    **dict.fromkeys(_AT_LEAST_ZERO, (0.0, math.inf)),
    **dict.fromkeys(_AT_MOST_ONE, (-math.inf, 1.0)),
    "distinct": (1.0, math.inf),
}
"""Where figures can lie; intervals do not leave it."""


def _figure(name: str, values: Float[Tensor, "S *K"], resamples: Float[Tensor, "R B"]) -> Figure:
    resampled, left_out = values[: 1 + REPLICATES], values[1 + REPLICATES :]
    confidence = expanded_confidence(len(left_out))
    if name in _INTERVALS:
        value, low, high = _INTERVALS[name](resampled, confidence)
    elif name.startswith(_POSITIVE) and float(values[0]) > 0 and bool((left_out > 0).all()):
        ends = intervals.studentised(math.log(float(values[0])), left_out.log(), resamples)
        value, low, high = float(values[0]), math.exp(ends.low), math.exp(min(ends.high, 700.0))
    else:
        value, low, high = intervals.studentised(float(values[0]), left_out, resamples)
        if math.isnan(low):  # a figure that is no number without some of its units
            value, low, high = intervals.percentile(resampled, confidence)
    least, most = _RANGES.get(name, (-math.inf, math.inf))
    if math.isnan(value):
        return Figure(value, low, high)
    return Figure(value, min(max(low, least), value), max(min(high, most), value))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b; infinite where something is set against nothing, NaN where nothing is set against nothing."""
    found = a / torch.where(b.abs() > 1e-300, b, torch.ones_like(b))
    none = torch.where(a.abs() > 1e-300, a.sign() * float("inf"), torch.full_like(a, float("nan")))
    return torch.where(b.abs() > 1e-300, found, none)


def _of_spread(tally: Tally, means: dict[str, Tensor]) -> dict[str, Tensor]:
    bias = means["bias"]
    share = torch.where(means["spread"] > 0, bias / means["spread"].clamp_min(1e-300), torch.zeros_like(bias))
    found = {"spread": means["spread"], "bias_share": share}
    if "agreements" in means:
        members = tally.members
        pairs = max(1, members * (members - 1))
        agreeing = (means["agreements"].sum((-1, -2)) - members) / pairs
        found |= {"disagreement": 1 - agreeing if members > 1 else 0 * agreeing, "distinct": means["distinct"]}
    return found


def _of_errors(tally: Tally, means: dict[str, Tensor]) -> dict[str, Tensor]:
    """The decomposition, and how errors go together (in squares: squared error, or the Brier score)."""
    members = tally.members
    own = means["member_loss"]
    individual, ensemble = own.mean(-1), means["ensemble_loss"]
    products = means["products"]
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    variance = diagonal.mean(-1)
    covariance = (products.sum((-1, -2)) - diagonal.sum(-1)) / max(1, members * (members - 1))
    error = means["quadratic"]  # of the mean prediction: what covariances speak of
    pooled = means.get("brier", error) if tally.pool == "score" else error  # of what the ensemble says
    found = {
        "ensemble": ensemble,
        "individual": individual,
        "diversity": individual - ensemble,
        "best_member": own,
        "worst_member": own,
        "dominance": _ratio(own.std(-1, correction=0), individual),
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
        if "rises" in means:
            rise = means["rises"][..., i]
        elif tally.loss == "mse" or (tally.loss, tally.pool) == ("brier", "probability"):  # the closed form of squares
            rise = (individual - ensemble) * (members - kept) / (kept * max(1, members - 1))
        else:
            continue
        found[f"codependence_{drop}"] = _ratio(rise, ensemble)
    return found


def _of_values(means: dict[str, Tensor]) -> dict[str, Tensor]:
    spread = means["y_squared"] - means["y"].square().sum(-1)
    error, own = means["quadratic"], means["member_loss"].mean(-1)
    return {
        "mse": error,
        "member_mse": own,
        "explained": 1 - _ratio(error, spread),
        "member_explained": 1 - _ratio(own, spread),
    }


def _of_classes(tally: Tally, means: dict[str, Tensor]) -> dict[str, Tensor]:
    right, own_right = means["right"], means["member_right"]
    guessed, own_guessed = means["guessed"], means["member_guessed"]  # right by luck, with answers as frequent
    kappa, own_kappa = _ratio(right - guessed, 1 - guessed), _ratio(own_right - own_guessed, 1 - own_guessed)
    # Of an ensemble that is worse than guessing, the largest ratio is not that of the best member.
    best_first = own_kappa if float(kappa[0]) > 0 else own_kappa.amax(-1, keepdim=True)
    members = tally.members
    disagreement = 1 - means["agreements"]
    wrong = 1 - own_right
    plane = _ratio(disagreement, (wrong.unsqueeze(-1) + wrong.unsqueeze(-2)) / 2)
    beside = plane.nan_to_num(0.0).sum((-1, -2)) / max(1, members * (members - 1))
    return {
        "accuracy": right,
        "member_accuracy": own_right.mean(-1),
        "best_accuracy": own_right,
        "worst_accuracy": own_right,
        "kappa": kappa,
        "member_kappa": own_kappa.mean(-1),
        "nll": means["nll"],
        "member_nll": means["member_nll"].mean(-1),
        "brier": means["brier"],
        "member_brier": means["member_brier"].mean(-1),
        "ece": _gaps(means["bins"]),
        "member_ece": _gaps(means["member_bins"]).flatten(1) / members,
        "lost": _ratio(means["member_brier"].mean(-1), 1 - means["classes"].square().sum(-1)),
        "above_chance": _ratio(best_first, kappa.unsqueeze(-1).expand_as(best_first)),
        "plane_diversity": beside,
    }


def _gaps(bins: Float[Tensor, "*S bins 3"]) -> Float[Tensor, "*S bins"]:
    """By how much each bin is too sure, weighted by its examples: sizes add up to the expected calibration error."""
    return bins[..., 1] - bins[..., 2]

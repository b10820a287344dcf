"""Tests behind an audit's verdict: each asks whether a mean lies above a line, and how sure that is.

Everything is a function of the sums that `tallying` keeps for each block of examples. A block is an independent unit,
or many, so a mean over examples has the standard error that its blocks show, and Student's t says how far it is from a
line. Ratios are tested as differences: a/b > line is a − line · b > 0.
"""

import math
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus.auditing.distributions import rotation_test, student_tail
from dissensus.auditing.tallying import Tally


class Test(NamedTuple):
    """Whether a number lies above a line (or below, as `above` says)."""

    value: float
    line: float
    p: float
    """The chance of a number so far beyond the line if the truth lies on it; NaN where the test has nothing to test."""
    above: bool = True
    error: float = math.nan
    """The number's standard error, where it has one."""

    __test__ = False  # for pytest, which collects classes of this name


class Mean(NamedTuple):
    """A mean over examples, its standard error from blocks, and the p-value of a truth that is not above zero."""

    value: float
    error: float
    p: float


def mean_above_zero(sums: Float[Tensor, " K"], counts: Float[Tensor, " K"]) -> Mean:
    """Whether a mean is more than zero, from sums and counts of blocks, by Student's t.

    >>> mean_above_zero(torch.tensor([1.0, 3.0, 2.0, 2.0]), torch.ones(4)).p < 0.01
    True
    """
    sums, counts = sums.double(), counts.double()
    if not bool(sums.isfinite().all()) or not bool((counts > 0).all()):
        return Mean(math.nan, math.nan, math.nan)
    total, blocks = float(counts.sum()), len(sums)
    mean = float(sums.sum()) / total
    spread = float((sums - mean * counts).square().sum())
    error = math.sqrt(spread * blocks / (blocks - 1)) / total
    if error <= 1e-12 * abs(mean) or error == 0:
        return Mean(mean, 0.0, 0.0 if mean > 0 else 1.0)
    return Mean(mean, error, student_tail(mean / error, blocks - 1))


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.copysign(math.inf, a) if a else math.nan


def _ratio_above(a: Tensor, b: Tensor, line: float, counts: Tensor) -> Test:
    """Whether Σa/Σb lies above a line, for b > 0 in the mean."""
    beyond = mean_above_zero(a - line * b, counts)
    below = float(b.sum() / counts.sum())
    return Test(_ratio(float(a.sum()), float(b.sum())), line, beyond.p, True, _ratio(beyond.error, abs(below)))


def _ratio_below(a: Tensor, b: Tensor, line: float, counts: Tensor) -> Test:
    """Whether Σa/Σb lies below a line, for b > 0 in the mean."""
    return _ratio_above(-a, b, -line, counts)._replace(
        value=_ratio(float(a.sum()), float(b.sum())), line=line, above=False
    )


def _squares(tally: Tally) -> Float[Tensor, "K M"]:
    """Members' squared errors (Brier scores of classifiers)."""
    return tally.sums["products"].diagonal(dim1=-2, dim2=-1)


def _pooled(tally: Tally) -> Float[Tensor, " K"]:
    """The ensemble's squared error, of what it says."""
    return tally.sums["brier" if tally.pool == "score" and "brier" in tally.sums else "quadratic"]


def skill(tally: Tally) -> dict[str, Test]:
    """What the ensemble gains over the best constant prediction: by its loss, and for classes by kappa and Brier score.

    One of them may hide it: a few labels of probability zero spoil cross-entropy, a rare class spoils kappa.
    """
    sums = tally.sums
    counts = sums["count"]
    if tally.kind == "values":
        mean = sums["y"].sum(0) / counts.sum()
        constant = sums["y_squared"] - 2 * sums["y"] @ mean + counts * mean.square().sum()
        return {"loss": _gain(constant, sums["quadratic"], counts)}
    assert tally.frequencies is not None
    prior, classes = tally.frequencies, sums["classes"]
    brier = counts * (1 + prior.square().sum()) - 2 * classes @ prior
    constant = {
        "cross_entropy": classes @ -prior.clamp_min(1e-300).log(),
        "brier": brier,
        "zero_one": counts - classes[:, int(prior.argmax())],
    }
    kappa = _ratio_above(sums["right"] - sums["guessed"], counts - sums["guessed"], 0.0, counts)
    found = {"loss": _gain(constant[tally.loss], sums["ensemble_loss"], counts), "kappa": kappa}
    return found if tally.loss == "brier" else found | {"brier": _gain(brier, sums["brier"], counts)}


def _gain(constant: Tensor, loss: Tensor, counts: Tensor) -> Test:
    """1 − loss / constant's loss, above zero."""
    return _ratio_above(constant - loss, constant, 0.0, counts)


def small_skill(tally: Tally, loss: float, kappa: float) -> bool:
    """Whether the ensemble is no better than a constant for all that can be seen: each skill is estimated at zero or
    less, or lies below its line with a confidence of 97.5 %."""
    lines = {"loss": loss, "brier": loss, "kappa": kappa}
    return all(
        test.value <= 1e-9
        or student_tail((lines[name] - test.value) / test.error, len(tally.sums["count"]) - 1) < 0.025
        for name, test in skill(tally).items()
    )


def cancelling(tally: Tally) -> Test:
    """The rotation test, beside F = (M − 1) · error / diversity, which is below 1 where errors cancel."""
    gram = tally.sums["products"].sum(0)
    members = tally.members
    error = float(gram.sum()) / members**2
    diversity = float(gram.diagonal().mean()) - error
    return Test(_ratio((members - 1) * error, diversity), 1.0, float(rotation_test(gram)), above=False)


def offsets(tally: Tally, line: float) -> Test:
    """Which share of members' own loss is constant offsets from the pool, less what noise of the examples adds.

    With δ_i the mean of member i's deviation from the pool and g_i the mean gradient of its loss, taking the offset
    away saves ½ g_i · δ_i to second order. For squared error and the Brier score that is |δ_i|², exactly; where logits
    are averaged, offsets are those of logits and the loss is cross-entropy.
    """
    sums, counts = tally.sums, tally.sums["coarse_count"]
    of_logits = tally.pool == "score" and tally.kind != "values"
    deviation, offset = sums["deviation"] if of_logits else sums["offset"], sums["offset"]
    blocks, total = len(counts), float(counts.sum())
    saved = noise = 0.0
    influence = torch.zeros(blocks, dtype=torch.float64)
    for member in range(tally.members):  # [K, C] at a time: all of [K, M, C] once more would double the memory
        gradient = offset[:, member] + sums["pool_error"] if of_logits else 2 * offset[:, member]
        mean_gradient, mean_deviation = gradient.sum(0) / total, deviation[:, member].sum(0) / total
        noise_of_gradient = (gradient - counts.unsqueeze(-1) * mean_gradient) / total
        noise_of_deviation = (deviation[:, member] - counts.unsqueeze(-1) * mean_deviation) / total
        saved += float(mean_gradient @ mean_deviation) / 2
        noise += float((noise_of_gradient * noise_of_deviation).sum()) / 2 * blocks / (blocks - 1)
        influence += (noise_of_gradient @ mean_deviation + noise_of_deviation @ mean_gradient) / 2
    saved, noise, influence = saved / tally.members, noise / tally.members, influence / tally.members
    own = sums["member_nll"].mean(-1) if of_logits else own_error(tally)
    own_total = float(sums["count"].sum())
    loss = float(own.sum()) / own_total
    own_influence = (own - sums["count"] * loss) / own_total
    if len(own_influence) == blocks:
        variance = _variance(influence - line * own_influence)
    else:  # blocks of another number: as if independent
        variance = _variance(influence) + line**2 * _variance(own_influence)
    excess = saved - noise - line * loss
    p = student_tail(excess / math.sqrt(variance), blocks - 1) if variance > 0 else float(excess <= 0)
    return Test(_ratio(max(0.0, saved - noise), loss), line, p, True, _ratio(math.sqrt(variance), loss))


def _variance(influence: Float[Tensor, " K"]) -> float:
    """Of a sum of blocks' influences."""
    return float(influence.square().sum()) * len(influence) / (len(influence) - 1)


class Ownership(NamedTuple):
    """What training outputs say of the loss that members were trained on."""

    weight: Test
    """On the pool's loss: 0 for members trained alone, 1 for members trained jointly."""
    overstated: Test
    """The share of members' own training loss that scaling each member's outputs down would take off."""
    members: float
    """The share of members that overstate what they say, each at 5 %."""
    pool: float
    """The share of the pool's training loss that scaling each member's outputs would take off, added up; infinite where
    the loss has no minimum nearby."""


def ownership(tally: Tally, weight: float, overstated: float) -> Ownership | None:
    """Whose loss is stationary on training data: members' or the pool's (see `dissensus.auditing.stationarity`)."""
    if "pool_slope" not in tally.sums:
        return None
    sums, counts = tally.sums, tally.sums["count"]
    seen = sums["bag_count"].sum(0).clamp_min(1.0)
    scale = counts.sum() / seen  # examples over those that a member has seen
    revealed = _ratio_above(
        (sums["slope"] * scale).mean(-1), sums["mean_slope"] - sums["pool_slope"].sum(-1), weight, counts
    )
    slope, curvature = sums["slope"].sum(0) / seen, (sums["curvature"].sum(0) / seen).clamp_min(1e-300)
    # To second order a member gains slope² / (2 curvature), by scaling with 1 − slope / curvature (not below zero).
    step = (slope / curvature).clamp(0.0, 1.0)
    gains = ((sums["slope"] * step - 0.5 * sums["curvature"] * step.square()) * scale).mean(-1)
    losses = (sums["fitted_loss"] * scale).mean(-1)
    own = _ratio_above(gains, losses, overstated, counts)
    if float(losses.sum()) <= 0:  # members that never err overstate nothing
        own = own._replace(value=0.0)
    each = [mean_above_zero(member, counts).p < 0.05 for member in sums["slope"].unbind(-1)]
    pool_slope, pool_curvature = sums["pool_slope"].sum(0), sums["pool_curvature"].sum(0)
    pool_loss = float(sums["pool_loss"].sum())
    settled = pool_loss > 0 and bool((pool_curvature > 0).all())
    pool = float((pool_slope.square() / (2 * pool_curvature)).sum()) / pool_loss if settled else math.inf
    return Ownership(revealed, own, fmean(each), pool)


def leaning(test: Tally, train: Tally, line: float, gap: float) -> tuple[Test, Test]:
    """Which share of the pool's generalisation gap no member has, and the pool's gap itself.

    With gaps P = error on test data / error on training data of the pool, and I_i of each member and of what members'
    errors have in common (their mean covariance), the share is 1 − max_i log I_i / log P: about 0 where members fit
    training data as well as their pool, ½ at most for members that were trained alone on parts of the data, 1 where
    only the pool fits. The common error counts because noise of each member's own cancels in any mean.
    """
    pool, pool_error = _log_gaps(_pooled(test).unsqueeze(-1), _pooled(train).unsqueeze(-1), test, train)
    own, own_error = _log_gaps(_fits(test), _fits(train), test, train)
    log_p, error_p = float(pool), float(pool_error)
    if not math.isfinite(log_p):
        return Test(math.nan, line, math.nan), Test(math.nan, math.exp(gap), math.nan)
    # A member that never errs on training data fits it.
    never = _squares(train).sum(0) <= 0
    own = own.nan_to_num(-math.inf)  # a covariance below zero is no fit: errors cancel
    own[:-1] = torch.where(never, torch.full_like(own[:-1], math.inf), own[:-1])
    best = int(own.argmax())
    log_i, error_i = float(own[best]), float(own_error.nan_to_num(0.0)[best])
    # share > line ⇔ (1 − line) log P − log I > 0; errors of the two logarithms are added as if they were independent
    excess, spread = (1 - line) * log_p - log_i, math.hypot((1 - line) * error_p, error_i)
    p_share = _normal_tail(excess / spread) if spread > 0 and math.isfinite(excess) else float(excess <= 0)
    p_gap = _normal_tail((log_p - gap) / error_p) if error_p > 0 else float(log_p <= gap)
    share = 1 - log_i / log_p if log_p > 0 else math.nan
    return Test(share, line, p_share if log_p > 0 else math.nan), Test(math.exp(log_p), math.exp(gap), p_gap)


def _fits(tally: Tally) -> Float[Tensor, "K S"]:
    """Members' squared errors, and the mean covariance of their errors."""
    products, squares = tally.sums["products"], _squares(tally)
    common = (products.sum((-1, -2)) - squares.sum(-1)) / max(1, tally.members * (tally.members - 1))
    return torch.cat([squares, common.unsqueeze(-1)], -1)


def own_error(tally: Tally) -> Float[Tensor, " K"]:
    """Members' mean squared error (Brier score of classifiers), summed by block."""
    return _squares(tally).mean(-1)


def _log_gaps(
    on_test: Float[Tensor, "K S"], on_train: Float[Tensor, "L S"], test: Tally, train: Tally
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """log of the errors on test data over those on training data, with standard errors; NaN where one is zero."""
    value, variance = torch.zeros(on_test.shape[1]).double(), torch.zeros(on_test.shape[1]).double()
    for sign, sums, counts in ((1, on_test, test.sums["count"]), (-1, on_train, train.sums["count"])):
        total, blocks = sums.sum(0), len(sums)
        none = total <= 0
        mean = torch.where(none, torch.full_like(total, math.nan), total / counts.sum())
        value = value + sign * mean.log()
        relative = sums / total - (counts / counts.sum()).unsqueeze(-1)
        variance = variance + relative.square().sum(0) * blocks / (blocks - 1)
    return value, variance.sqrt()


def _normal_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))


class Best(NamedTuple):
    """The best member beside the pool. It is chosen on other blocks than it is compared on."""

    loss: Test
    """Its loss over the pool's, below the line."""
    accuracy: Test | None
    """Its accuracy less the pool's, above zero."""
    no_better: Test
    """The pool's squared error over the best member's, above a line close to one: the pool adds nothing to it."""
    others: Test
    """The other members' squared error over the best's, above a line."""


def best_member(tally: Tally, loss: float, no_better: float, others: float) -> Best:
    """Compare the pool with its best member, which every block sees chosen on all other blocks."""
    sums, counts = tally.sums, tally.sums["count"]
    own, pooled = sums["member_loss"], sums["ensemble_loss"]
    by_loss = _ratio_below(_chosen(own, own), pooled, loss, counts)
    by_accuracy = None
    if "member_right" in sums:
        right = _chosen(sums["member_right"], -sums["member_right"])
        gain = right - sums["right"]
        better = mean_above_zero(gain, counts)
        by_accuracy = Test(better.value, 0.0, better.p, True, better.error)
    squares = _squares(tally)
    best = _chosen(squares, squares)
    rest = (squares.sum(-1) - best) / max(1, tally.members - 1)
    return Best(
        by_loss,
        by_accuracy,
        _ratio_above(_pooled(tally), best, no_better, counts),
        _ratio_above(rest, best, others, counts),
    )


def _chosen(values: Float[Tensor, "K M"], by: Float[Tensor, "K M"]) -> Float[Tensor, " K"]:
    """Each block's value of the member that is smallest by the other half of the blocks.

    Half of the data chooses: with all blocks but one, the chosen member still carries the luck of its own examples.
    """
    halves = by[::2].sum(0), by[1::2].sum(0)
    best = torch.empty(len(by), 1, dtype=torch.long)
    best[::2], best[1::2] = halves[1].argmin(), halves[0].argmin()
    return values.double().gather(-1, best).squeeze(-1)


class Against(NamedTuple):
    """An ensemble beside a reference on the same examples."""

    cancels: float
    """Of what members err more than the reference's, the share that cancels in the pool."""

    members: Test
    """Members' squared error over that of the reference's members, above a line."""
    pool: Test
    """The pool's squared error over that of the reference's pool, below one: the ensemble is better."""


def against(test: Tally, reference: Tally, worse: float) -> Against:
    """Compare members with members and pool with pool, example by example.

    Members are samples too. If the ensemble's were trained like the reference's, the logarithms of their errors vary as
    those of the reference's do, which adds to the variance over examples; the degrees of freedom are the reference's.
    """
    counts = test.sums["count"]
    more = float((own_error(test) - own_error(reference)).sum())
    pooled = float((_pooled(test) - _pooled(reference)).sum())
    members = _ratio_above(own_error(test), own_error(reference), worse, counts)
    if not (members.value > 0 and math.isfinite(members.value)) or reference.members < 2:
        p = math.nan  # nothing to compare with: a reference that never errs, or one member
    else:
        within = float(_squares(reference).sum(0).clamp_min(1e-300).log().var())
        variance = within * (1 / test.members + 1 / reference.members) + (members.error / members.value) ** 2
        beyond = math.log(members.value / worse)
        t = beyond / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, beyond)
        p = max(members.p, student_tail(t, reference.members - 1))
    return Against(
        _ratio(more - pooled, more) if more > 0 else math.nan,
        members._replace(p=p),
        _ratio_below(_pooled(test), _pooled(reference), 1.0, counts),
    )


def gains(tally: Tally, line: float) -> Test:
    """The share of members' squared error that pooling takes off, below a line.

    The standard error is that of the ratio at its estimate: copies have a share of zero in every sample.
    """
    own, counts = own_error(tally), tally.sums["count"]
    gain = own - _pooled(tally)
    value = _ratio(float(gain.sum()), float(own.sum()))
    spread = _ratio_above(gain, own, value, counts).error if math.isfinite(value) else math.nan
    beyond = line - value
    p = float(beyond <= 0) if spread <= 1e-12 else student_tail(beyond / spread, len(counts) - 1)
    return Test(value, line, p, False, spread)


def known(tally: Tally, line: float) -> Test | None:
    """The best member's kappa over the ensemble's, below a line: members by themselves know little."""
    if "member_right" not in tally.sums:
        return None
    sums, counts = tally.sums, tally.sums["count"]
    right, guessed = sums["member_right"], sums["member_guessed"]
    rates = right.sum(0) / counts.sum(), guessed.sum(0) / counts.sum()
    kappa = (rates[0] - rates[1]) / (1 - rates[1]).clamp_min(1e-12)
    best = int(kappa.argmax())
    pool = sums["right"] - sums["guessed"]
    share = float((1 - sums["guessed"].sum() / counts.sum()) / (1 - rates[1][best]).clamp_min(1e-12))
    return _ratio_below((right - guessed)[:, best] * share, pool, line, counts)


def unequal(tally: Tally) -> float:
    """How much members differ in squared error, beyond what noise of the examples adds: their standard deviation over
    their mean."""
    own, counts = _squares(tally), tally.sums["count"]
    total, blocks = counts.sum(), len(counts)
    apart = (own - own.mean(-1, keepdim=True)) / total
    mean = apart.sum(0)
    noise = (apart - (counts / total).unsqueeze(-1) * mean).square().sum(0).mean() * blocks / (blocks - 1)
    excess = (mean.var() - noise).clamp_min(0.0)
    return _ratio(math.sqrt(float(excess)), float(own.mean(-1).sum() / total))


def error_correlation(tally: Tally) -> float:
    """Mean correlation of members' errors."""
    gram = tally.sums["products"].sum(0)
    diagonal = gram.diagonal().mean()
    covariance = (gram.sum() - gram.diagonal().sum()) / max(1, tally.members * (tally.members - 1))
    return float(covariance / diagonal.clamp_min(1e-300))


def constant_share(tally: Tally) -> float:
    """The share of diversity that is constant offsets, in what the pool averages."""
    mean = tally.sums["deviation"].sum(0) / tally.sums["coarse_count"].sum()
    spread = float(tally.sums["spread"].sum() / tally.sums["count"].sum())
    return _ratio(float(mean.square().sum(-1).mean()), spread) if spread > 0 else 0.0

"""Tests behind an audit's verdict: does a mean lie above a line, and how certain is that?

Everything is a function of the sums that `tallying` keeps for each block of examples. A block holds one or more
independent units, so blocks give the standard error of a mean over examples, and Student's t tests its distance from a
line. Ratios are tested as differences: a/b > line is a − line · b > 0.
"""

import math
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus.auditing.distributions import rotation_test, student_tail
from dissensus.auditing.tallying import AuditTally


class Test(NamedTuple):
    """A test of whether a number lies above a line, or below it where `above` is False."""

    value: float
    line: float
    p: float
    """Probability of a number this far beyond the line if the truth lies on it; NaN where nothing can be tested."""
    above: bool = True
    error: float = math.nan
    """Standard error of the number; NaN where it has none."""

    __test__ = False  # for pytest, which collects classes of this name


class Mean(NamedTuple):
    """A mean over examples, its standard error from blocks, and the p-value of a mean that is not above zero."""

    value: float
    error: float
    p: float


def mean_above_zero(sums: Float[Tensor, " K"], counts: Float[Tensor, " K"]) -> Mean:
    """Test whether a mean is above zero, from sums and counts of blocks, by Student's t.

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
    """Test whether Σa/Σb lies above a line, for b > 0 in the mean."""
    excess = mean_above_zero(a - line * b, counts)
    denominator = float(b.sum() / counts.sum())
    return Test(_ratio(float(a.sum()), float(b.sum())), line, excess.p, True, _ratio(excess.error, abs(denominator)))


def _ratio_below(a: Tensor, b: Tensor, line: float, counts: Tensor) -> Test:
    """Test whether Σa/Σb lies below a line, for b > 0 in the mean."""
    return _ratio_above(-a, b, -line, counts)._replace(
        value=_ratio(float(a.sum()), float(b.sum())), line=line, above=False
    )


def _squares(tally: AuditTally) -> Float[Tensor, "K M"]:
    """Members' squared errors (Brier scores of classifiers)."""
    return tally.errors.products.diagonal(dim1=-2, dim2=-1)


def _pooled(tally: AuditTally) -> Float[Tensor, " K"]:
    """Squared error of the pooled prediction (Brier score of a classifier)."""
    classes = tally.sums.classes
    return tally.errors.quadratic if tally.pool != "score" or classes is None else classes.brier


def skill(tally: AuditTally) -> dict[str, Test]:
    """Gain of the ensemble over the best constant prediction: by its loss, and for classes by kappa and Brier score.

    Each of them alone can miss skill: a few labels of probability zero spoil cross-entropy, a rare class spoils kappa.
    """
    counts, errors = tally.count, tally.errors
    if tally.kind == "values":
        assert tally.sums.values is not None
        y, y_squared = tally.sums.values.y, tally.sums.values.y_squared
        mean = y.sum(0) / counts.sum()
        constant = y_squared - 2 * y @ mean + counts * mean.square().sum()
        return {"loss": _gain(constant, errors.quadratic, counts)}
    classes, prior, labels = tally.sums.classes, tally.frequencies, tally.labels
    assert classes is not None
    assert prior is not None
    assert labels is not None
    brier = counts * (1 + prior.square().sum()) - 2 * labels @ prior
    constant = {
        "cross_entropy": labels @ -prior.clamp_min(1e-300).log(),
        "brier": brier,
        "zero_one": counts - labels[:, int(prior.argmax())],
    }
    kappa = _ratio_above(classes.right - classes.guessed, counts - classes.guessed, 0.0, counts)
    tests = {"loss": _gain(constant[tally.loss], errors.ensemble_loss, counts), "kappa": kappa}
    return tests if tally.loss == "brier" else tests | {"brier": _gain(brier, classes.brier, counts)}


def _gain(constant: Tensor, loss: Tensor, counts: Tensor) -> Test:
    """1 − loss / constant's loss, above zero."""
    return _ratio_above(constant - loss, constant, 0.0, counts)


def is_unskilled(tests: dict[str, Test], blocks: int, loss: float, kappa: float) -> bool:
    """Whether the ensemble is no better than a constant, as far as its tests of `skill` show: each skill is estimated
    at zero or less, or lies below its line with a confidence of 97.5 %."""
    lines = {"loss": loss, "brier": loss, "kappa": kappa}
    return all(
        test.value <= 1e-9 or student_tail((lines[name] - test.value) / test.error, blocks - 1) < 0.025
        for name, test in tests.items()
    )


def cancellation(tally: AuditTally) -> Test:
    """The rotation test, with F = (M − 1) · error / diversity, which is below 1 where errors cancel."""
    gram = tally.errors.products.sum(0)
    members = tally.members
    error = float(gram.sum()) / members**2
    diversity = float(gram.diagonal().mean()) - error
    return Test(_ratio((members - 1) * error, diversity), 1.0, float(rotation_test(gram)), above=False)


def constant_offsets(tally: AuditTally, line: float) -> Test:
    """Share of the members' loss that is constant offsets from the pool, less what noise of the examples adds.

    With δ_i the mean of member i's deviation from the pool and g_i the mean gradient of its loss, removing the offset
    saves ½ g_i · δ_i to second order. For squared error and the Brier score that is |δ_i|², exactly. Where logits are
    averaged, offsets are those of logits and the loss is cross-entropy.
    """
    sums, counts = tally.offsets, tally.offsets.count
    of_logits = tally.pool == "score" and tally.kind != "values"
    deviation, offset = sums.deviation if of_logits else sums.offset, sums.offset
    blocks, total = len(counts), float(counts.sum())
    saved = noise = 0.0
    influence = torch.zeros(blocks, dtype=torch.float64)
    for member in range(tally.members):  # [K, C] at a time: all of [K, M, C] once more would double the memory
        if of_logits:
            assert sums.pool_error is not None
            gradient = offset[:, member] + sums.pool_error
        else:
            gradient = 2 * offset[:, member]
        mean_gradient, mean_deviation = gradient.sum(0) / total, deviation[:, member].sum(0) / total
        noise_of_gradient = (gradient - counts.unsqueeze(-1) * mean_gradient) / total
        noise_of_deviation = (deviation[:, member] - counts.unsqueeze(-1) * mean_deviation) / total
        saved += float(mean_gradient @ mean_deviation) / 2
        noise += float((noise_of_gradient * noise_of_deviation).sum()) / 2 * blocks / (blocks - 1)
        influence += (noise_of_gradient @ mean_deviation + noise_of_deviation @ mean_gradient) / 2
    saved, noise, influence = saved / tally.members, noise / tally.members, influence / tally.members
    if of_logits:
        assert tally.sums.classes is not None
        losses = tally.sums.classes.member_nll.mean(-1)
    else:
        losses = member_error(tally)
    examples = float(tally.count.sum())
    loss = float(losses.sum()) / examples
    loss_influence = (losses - tally.count * loss) / examples
    if len(loss_influence) == blocks:
        variance = _variance(influence - line * loss_influence)
    else:  # another number of blocks: as if independent
        variance = _variance(influence) + line**2 * _variance(loss_influence)
    excess = saved - noise - line * loss
    p = student_tail(excess / math.sqrt(variance), blocks - 1) if variance > 0 else float(excess <= 0)
    return Test(_ratio(max(0.0, saved - noise), loss), line, p, True, _ratio(math.sqrt(variance), loss))


def _variance(influence: Float[Tensor, " K"]) -> float:
    """Variance of a sum of blocks' influences."""
    return float(influence.square().sum()) * len(influence) / (len(influence) - 1)


class Ownership(NamedTuple):
    """Evidence of training outputs about the loss that members were trained on."""

    weight: Test
    """Weight of the pool's loss: 0 for members trained alone, 1 for members trained jointly."""
    overstated: Test
    """Share of the members' training loss that scaling the outputs of each member down would save."""
    members: float
    """Share of the members whose outputs are too large, each tested at 5 %."""
    pool: float
    """Share of the pool's training loss that scaling the outputs of each member would save, added up; infinite where
    the loss has no minimum nearby."""


def ownership(tally: AuditTally, weight: float, overstated: float) -> Ownership | None:
    """Whose loss is stationary on training data, the members' or the pool's? See `dissensus.auditing.stationarity`."""
    sums, counts = tally.sums.slopes, tally.count
    if sums is None:
        return None
    bag_sizes = sums.bag_count.sum(0).clamp_min(1.0)
    scale = counts.sum() / bag_sizes  # all examples over those that a member was trained on
    revealed = _ratio_above((sums.slope * scale).mean(-1), sums.mean_slope - sums.pool_slope.sum(-1), weight, counts)
    slope, curvature = sums.slope.sum(0) / bag_sizes, (sums.curvature.sum(0) / bag_sizes).clamp_min(1e-300)
    # To second order a member gains slope² / (2 curvature), by scaling with 1 − slope / curvature (not below zero).
    step = (slope / curvature).clamp(0.0, 1.0)
    gains = ((sums.slope * step - 0.5 * sums.curvature * step.square()) * scale).mean(-1)
    losses = (sums.fitted_loss * scale).mean(-1)
    saved = _ratio_above(gains, losses, overstated, counts)
    if float(losses.sum()) <= 0:  # members that never err overstate nothing
        saved = saved._replace(value=0.0)
    too_large = [mean_above_zero(member, counts).p < 0.05 for member in sums.slope.unbind(-1)]
    pool_slope, pool_curvature = sums.pool_slope.sum(0), sums.pool_curvature.sum(0)
    pool_loss = float(sums.pool_loss.sum())
    settled = pool_loss > 0 and bool((pool_curvature > 0).all())
    pool = float((pool_slope.square() / (2 * pool_curvature)).sum()) / pool_loss if settled else math.inf
    return Ownership(revealed, saved, fmean(too_large), pool)


def pool_gap(test: AuditTally, train: AuditTally, line: float, gap: float) -> tuple[Test, Test]:
    """Share of the pool's generalisation gap that no member has, and the pool's gap itself.

    With gaps P = error on test data / error on training data of the pool, and I_i of each member and of what members'
    errors have in common (their mean covariance), the share is 1 − max_i log I_i / log P. It is about 0 where members
    fit training data as well as their pool, at most ½ for members that were trained alone on parts of the data, and 1
    where only the pool fits. The common error counts because independent noise of the members cancels in any mean.
    """
    pool, pool_error = _log_gaps(_pooled(test).unsqueeze(-1), _pooled(train).unsqueeze(-1), test, train)
    gaps, gap_errors = _log_gaps(_fits(test), _fits(train), test, train)
    log_p, error_p = float(pool), float(pool_error)
    if not math.isfinite(log_p):
        return Test(math.nan, line, math.nan), Test(math.nan, math.exp(gap), math.nan)
    # A member that never errs on training data fits it.
    never_errs = _squares(train).sum(0) <= 0
    gaps = gaps.nan_to_num(-math.inf)  # a covariance below zero is no fit: errors cancel
    gaps[:-1] = torch.where(never_errs, torch.full_like(gaps[:-1], math.inf), gaps[:-1])
    best = int(gaps.argmax())
    log_i, error_i = float(gaps[best]), float(gap_errors.nan_to_num(0.0)[best])
    # share > line ⇔ (1 − line) log P − log I > 0; errors of the two logarithms are added as if they were independent
    excess, spread = (1 - line) * log_p - log_i, math.hypot((1 - line) * error_p, error_i)
    p_share = _normal_tail(excess / spread) if spread > 0 and math.isfinite(excess) else float(excess <= 0)
    p_gap = _normal_tail((log_p - gap) / error_p) if error_p > 0 else float(log_p <= gap)
    share = 1 - log_i / log_p if log_p > 0 else math.nan
    return Test(share, line, p_share if log_p > 0 else math.nan), Test(math.exp(log_p), math.exp(gap), p_gap)


def _fits(tally: AuditTally) -> Float[Tensor, "K S"]:
    """Members' squared errors, and the mean covariance of their errors."""
    squares = _squares(tally)
    covariance = tally.errors.products.sum((-1, -2)) - squares.sum(-1)
    common = covariance / max(1, tally.members * (tally.members - 1))
    return torch.cat([squares, common.unsqueeze(-1)], -1)


def member_error(tally: AuditTally) -> Float[Tensor, " K"]:
    """Members' mean squared error (Brier score of classifiers), summed by block."""
    return _squares(tally).mean(-1)


def _log_gaps(
    on_test: Float[Tensor, "K S"], on_train: Float[Tensor, "L S"], test: AuditTally, train: AuditTally
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Logarithms of errors on test data over those on training data, with standard errors; NaN where one is zero."""
    value, variance = torch.zeros(on_test.shape[1]).double(), torch.zeros(on_test.shape[1]).double()
    for sign, sums, counts in ((1, on_test, test.count), (-1, on_train, train.count)):
        total, blocks = sums.sum(0), len(sums)
        none = total <= 0
        mean = torch.where(none, torch.full_like(total, math.nan), total / counts.sum())
        value = value + sign * mean.log()
        relative = sums / total - (counts / counts.sum()).unsqueeze(-1)
        variance = variance + relative.square().sum(0) * blocks / (blocks - 1)
    return value, variance.sqrt()


def _normal_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))


class BestMember(NamedTuple):
    """The best member compared with the pool. It is chosen on other blocks than it is compared on."""

    loss: Test
    """Its loss over the pool's, below the line."""
    accuracy: Test | None
    """Its accuracy less the pool's, above zero."""
    no_better: Test
    """The pool's squared error over the best member's, above a line close to one: the pool adds nothing to it."""
    others: Test
    """The other members' squared error over the best's, above a line."""


def best_member(tally: AuditTally, loss: float, no_better: float, others: float) -> BestMember:
    """Compare the pool with its best member, which is chosen on the other half of the blocks."""
    errors, classes, counts = tally.errors, tally.sums.classes, tally.count
    by_loss = _ratio_below(_best_by(errors.member_loss, errors.member_loss), errors.ensemble_loss, loss, counts)
    by_accuracy = None
    if classes is not None:
        gain = mean_above_zero(_best_by(classes.member_right, -classes.member_right) - classes.right, counts)
        by_accuracy = Test(gain.value, 0.0, gain.p, True, gain.error)
    squares = _squares(tally)
    best = _best_by(squares, squares)
    rest = (squares.sum(-1) - best) / max(1, tally.members - 1)
    return BestMember(
        by_loss,
        by_accuracy,
        _ratio_above(_pooled(tally), best, no_better, counts),
        _ratio_above(rest, best, others, counts),
    )


def _best_by(values: Float[Tensor, "K M"], criterion: Float[Tensor, "K M"]) -> Float[Tensor, " K"]:
    """Each block's value of the member whose criterion is smallest on the other half of the blocks.

    Half of the data chooses. With all blocks but one, the choice would still depend on chance in its own examples.
    """
    halves = criterion[::2].sum(0), criterion[1::2].sum(0)
    best = torch.empty(len(criterion), 1, dtype=torch.long)
    best[::2], best[1::2] = halves[1].argmin(), halves[0].argmin()
    return values.double().gather(-1, best).squeeze(-1)


class ReferenceComparison(NamedTuple):
    """An ensemble compared with a reference on the same examples."""

    cancels: float
    """Share of the members' additional error that cancels in the pool."""

    members: Test
    """Members' squared error over that of the reference's members, above a line."""
    pool: Test
    """The pool's squared error over that of the reference's pool, below one: the ensemble is better."""


def compare_with_reference(test: AuditTally, reference: AuditTally, worse: float) -> ReferenceComparison:
    """Compare members with members and pool with pool, example by example.

    Members are samples too. If the members were trained like the reference's, the logarithms of their errors vary as
    those of the reference's do, which adds to the variance over examples. The degrees of freedom are the reference's.
    """
    more = float((member_error(test) - member_error(reference)).sum())
    pooled = float((_pooled(test) - _pooled(reference)).sum())
    members = _ratio_above(member_error(test), member_error(reference), worse, test.count)
    if not (members.value > 0 and math.isfinite(members.value)) or reference.members < 2:
        p = math.nan  # nothing to compare with: a reference that never errs, or one member
    else:
        within = float(_squares(reference).sum(0).clamp_min(1e-300).log().var())
        variance = within * (1 / test.members + 1 / reference.members) + (members.error / members.value) ** 2
        excess = math.log(members.value / worse)
        t = excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)
        p = max(members.p, student_tail(t, reference.members - 1))
    return ReferenceComparison(
        _ratio(more - pooled, more) if more > 0 else math.nan,
        members._replace(p=p),
        _ratio_below(_pooled(test), _pooled(reference), 1.0, test.count),
    )


def pooling_gain(tally: AuditTally, line: float) -> Test:
    """Share of the members' squared error that pooling saves, below a line.

    The standard error is that of the ratio at its estimate: copies have a share of zero in every sample.
    """
    errors, counts = member_error(tally), tally.count
    gain = errors - _pooled(tally)
    value = _ratio(float(gain.sum()), float(errors.sum()))
    spread = _ratio_above(gain, errors, value, counts).error if math.isfinite(value) else math.nan
    excess = line - value
    p = float(excess <= 0) if spread <= 1e-12 else student_tail(excess / spread, len(counts) - 1)
    return Test(value, line, p, False, spread)


def best_kappa(tally: AuditTally, line: float) -> Test | None:
    """The best member's kappa over the ensemble's, below a line: members alone have little skill."""
    classes, counts = tally.sums.classes, tally.count
    if classes is None:
        return None
    right, guessed = classes.member_right, classes.member_guessed
    rates = right.sum(0) / counts.sum(), guessed.sum(0) / counts.sum()
    kappa = (rates[0] - rates[1]) / (1 - rates[1]).clamp_min(1e-12)
    best = int(kappa.argmax())
    pool = classes.right - classes.guessed
    share = float((1 - classes.guessed.sum() / counts.sum()) / (1 - rates[1][best]).clamp_min(1e-12))
    return _ratio_below((right - guessed)[:, best] * share, pool, line, counts)


def quality_spread(tally: AuditTally) -> float:
    """Standard deviation of the members' squared errors over their mean, without what noise of the examples adds."""
    errors, counts = _squares(tally), tally.count
    total, blocks = counts.sum(), len(counts)
    differences = (errors - errors.mean(-1, keepdim=True)) / total
    mean = differences.sum(0)
    noise = (differences - (counts / total).unsqueeze(-1) * mean).square().sum(0).mean() * blocks / (blocks - 1)
    excess = (mean.var() - noise).clamp_min(0.0)
    return _ratio(math.sqrt(float(excess)), float(errors.mean(-1).sum() / total))


def error_correlation(tally: AuditTally) -> float:
    """Mean correlation of members' errors."""
    gram = tally.errors.products.sum(0)
    diagonal = gram.diagonal().mean()
    covariance = (gram.sum() - gram.diagonal().sum()) / max(1, tally.members * (tally.members - 1))
    return float(covariance / diagonal.clamp_min(1e-300))


def constant_share(tally: AuditTally) -> float:
    """Share of the diversity that is constant offsets, in what the pool averages."""
    mean = tally.offsets.deviation.sum(0) / tally.offsets.count.sum()
    spread = float(tally.sums.spread.sum() / tally.count.sum())
    return _ratio(float(mean.square().sum(-1).mean()), spread) if spread > 0 else 0.0

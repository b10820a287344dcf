"""Losses of real values, counts and labels, and their ensembles, in NumPy and SciPy, for comparison only.

Written from the definitions, not from the library. A density or a probability comes from `scipy.stats`; a mixture is
the weighted mean of members' densities, summed in extended precision. Functions of one example take
``outputs[M][C]`` and the target ``[D]`` of that example. `over_batch` carries them over ``[M, B, C]``.
"""

import itertools
import math

import numpy as np
from scipy import stats
from scipy.special import gammaln

VARIANCE_FLOOR = 1e-6
"""Added to every variance, so that an exact prediction has a finite loss."""


# --- one member's loss on one example ---------------------------------------------------------------------------------


def gaussian_log_density(output, target, floor=VARIANCE_FLOOR):
    """log Π_d N(y_d; μ_d, exp(s_d) + floor), for outputs ``[μ_1..μ_D, s_1..s_D]``."""
    count = len(output) // 2
    total = 0.0
    for d in range(count):
        deviation = math.sqrt(math.exp(output[count + d]) + floor)
        total += stats.norm.logpdf(target[d], loc=output[d], scale=deviation)
    return total


def gaussian_nll(output, target, floor=VARIANCE_FLOOR):
    return -gaussian_log_density(output, target, floor)


def squared_error(output, target):
    total = 0.0
    for f, y in zip(output, target, strict=True):
        total += (f - y) ** 2
    return total


def mse(output, target):
    return squared_error(output, target) / len(output)


def pinball(predicted, observed, level):
    """(y − q)·τ where the target lies above the quantile, (q − y)·(1 − τ) where it lies below."""
    return level * (observed - predicted) if observed >= predicted else (1 - level) * (predicted - observed)


def quantile(output, target, levels):
    """Mean of the pinball losses of D·Q quantiles: those of the first target come first."""
    total = 0.0
    for d, (q, level) in itertools.product(range(len(target)), enumerate(levels)):
        total += pinball(output[d * len(levels) + q], target[d], level)
    return total / (len(target) * len(levels))


def log_sigmoid(value):
    return -(max(-value, 0.0) + math.log1p(math.exp(-abs(value))))


def bce(output, target):
    """Mean over labels of −y log p − (1 − y) log(1 − p)."""
    total = 0.0
    for logit, y in zip(output, target, strict=True):
        total -= y * log_sigmoid(logit) + (1 - y) * log_sigmoid(-logit)
    return total / len(output)


def poisson(output, target):
    """−log pmf without its constant log y!, summed over outputs."""
    return -poisson_log_pmf(output, target) - sum(gammaln(y + 1) for y in target)


def poisson_log_pmf(output, target):
    total = 0.0
    for log_rate, y in zip(output, target, strict=True):
        total += stats.poisson.logpmf(y, math.exp(log_rate))
    return total


LOSSES = {
    "gaussian_nll": gaussian_nll,
    "squared_error": squared_error,
    "mse": mse,
    "quantile": quantile,
    "bce": bce,
    "poisson": poisson,
}


# --- the ensemble's loss on one example -------------------------------------------------------------------------------


def equal_weights(members):
    return np.full(members, 1.0 / members)


def log_mixture(log_densities, weights):
    """log Σ_j w_j exp(l_j) in extended precision; a member of weight zero is absent."""
    present = [(weight, log) for weight, log in zip(weights, log_densities, strict=True) if weight > 0]
    top = max(log for _, log in present)
    total = np.longdouble(0)
    for weight, log in present:
        total += np.longdouble(weight) * np.exp(np.longdouble(log) - np.longdouble(top))
    return float(np.longdouble(top) + np.log(total))


def mean_output(outputs, weights):
    total = np.zeros(len(outputs[0]))
    for weight, output in zip(weights, outputs, strict=True):
        if weight > 0:
            total = total + weight * np.asarray(output)
    return total


def pooled_bce(outputs, target, weights):
    """The loss of mean probabilities, each label by itself."""
    total = 0.0
    for label, y in enumerate(target):
        on = log_mixture([log_sigmoid(output[label]) for output in outputs], weights)
        off = log_mixture([log_sigmoid(-output[label]) for output in outputs], weights)
        total -= (y * on if y else 0.0) + ((1 - y) * off if y != 1 else 0.0)
    return total / len(target)


def ensemble_loss(outputs, target, *, loss, pool, weights, **settings):
    if pool == "score":
        return LOSSES[loss](mean_output(outputs, weights), target, **settings)
    if loss == "gaussian_nll":
        return -log_mixture([gaussian_log_density(output, target, **settings) for output in outputs], weights)
    if loss == "poisson":
        constant = sum(gammaln(y + 1) for y in target)
        return -log_mixture([poisson_log_pmf(output, target) for output in outputs], weights) - constant
    return pooled_bce(outputs, target, weights)


def individual_loss(outputs, target, *, loss, weights, **settings):
    total = 0.0
    for weight, output in zip(weights, outputs, strict=True):
        if weight > 0:
            total += weight * LOSSES[loss](output, target, **settings)
    return total


def decompose(outputs, target, *, loss, pool, weights=None, **settings):
    """The ensemble's loss, the mean of members' losses, and the diversity between them."""
    weights = equal_weights(len(outputs)) if weights is None else weights
    ensemble = ensemble_loss(outputs, target, loss=loss, pool=pool, weights=weights, **settings)
    individual = individual_loss(outputs, target, loss=loss, weights=weights, **settings)
    return ensemble, individual, individual - ensemble


def over_batch(outputs, targets, **options):
    """Three arrays ``[B]``: ensemble, individual, diversity."""
    parts = [decompose(outputs[:, n], targets[n], **options) for n in range(outputs.shape[1])]
    return tuple(np.array(column) for column in zip(*parts, strict=True))


# --- objectives: totals sum over members and average over the batch ---------------------------------------------------


def independent(outputs, targets, *, loss, weights=None, example_weights=None, **settings):
    """M Σ_j w_j L_j."""
    pool = "probability" if loss == "gaussian_nll" else "score"
    _, individual, _ = over_batch(outputs, targets, loss=loss, pool=pool, weights=weights, **settings)
    return len(outputs) * weighted_mean(individual, example_weights)


def augmented(outputs, targets, *, beta, loss, pool, weights=None, **settings):
    """M times (1 − β) · individual + β · ensemble."""
    ensemble, individual, _ = over_batch(outputs, targets, loss=loss, pool=pool, weights=weights, **settings)
    return len(outputs) * float(((1 - beta) * individual + beta * ensemble).mean())


def weighted_mean(values, weights):
    if weights is None:
        return float(values.mean())
    return float((weights * values).sum() / weights.sum())


# --- predictions ------------------------------------------------------------------------------------------------------


def mixture_moments(outputs, weights=None, floor=VARIANCE_FLOOR):
    """Mean, aleatoric and epistemic variance ``[B, D]`` of a mixture of Gaussians: law of total variance."""
    members, batch, width = outputs.shape
    weights = equal_weights(members) if weights is None else weights
    count = width // 2
    mean, aleatoric, second = np.zeros((3, batch, count))
    for j, n, d in itertools.product(range(members), range(batch), range(count)):
        if weights[j] > 0:
            mean[n, d] += weights[j] * outputs[j, n, d]
            aleatoric[n, d] += weights[j] * (math.exp(outputs[j, n, count + d]) + floor)
    for j, n, d in itertools.product(range(members), range(batch), range(count)):
        if weights[j] > 0:
            second[n, d] += weights[j] * (outputs[j, n, d] - mean[n, d]) ** 2
    return mean, aleatoric, second


def mean_label_probability(logits, weights=None):
    """Mean over members of the sigmoid, ``[B, C]``."""
    members, batch, labels = logits.shape
    weights = equal_weights(members) if weights is None else weights
    result = np.zeros((batch, labels))
    for j, n, c in itertools.product(range(members), range(batch), range(labels)):
        if weights[j] > 0:
            result[n, c] += weights[j] * math.exp(log_sigmoid(logits[j, n, c]))
    return result

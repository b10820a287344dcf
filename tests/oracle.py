"""The collusion paper's formulas (sections 4, 5, C.2, C.3) in float64 with one plain loop per sum, for comparison only.

Written from the paper, not from the library. Functions of one example take ``outputs[M][C]`` and that example's target:
a class number, or a vector ``[C]``. ``per_example`` carries them over a batch ``[M, B, C]``.
"""

import math
from collections.abc import Callable

import numpy as np

SIMPSON_INTERVALS = 200


def equal_weights(members):
    return np.full(members, 1.0 / members)


def per_example(function: Callable, outputs, *targets) -> np.ndarray:
    """Apply ``function(outputs[M, C], *target)`` to each example of a batch."""

    def on(example):
        return function(outputs[:, example], *(target[example] for target in targets))

    return np.array([on(example) for example in range(outputs.shape[1])], dtype=np.float64)


def log_sum_exp(values):
    top = max(values)
    total = 0.0
    for value in values:
        total += math.exp(value - top)
    return top + math.log(total)


def log_softmax(scores):
    normaliser = log_sum_exp(scores)
    return np.array([score - normaliser for score in scores])


def softmax(scores):
    return np.array([math.exp(value) for value in log_softmax(scores)])


def softplus(value):
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def sigmoid(value):
    return math.exp(-softplus(-value))


def first_largest(values):
    best = 0
    for index in range(len(values)):
        if values[index] > values[best]:
            best = index
    return best


def as_distribution(target, classes):
    if np.ndim(target) == 1:
        return target
    distribution = np.zeros(classes)
    distribution[int(target)] = 1.0
    return distribution


def weighted_mean(vectors, weights):
    mean = np.zeros(len(vectors[0]))
    for weight, vector in zip(weights, vectors, strict=True):
        for index in range(len(mean)):
            mean[index] += weight * vector[index]
    return mean


def log_mean_probability(logits, weights):
    """log p̄(k) = log Σ_j w_j p_j(k), in log space so that no probability underflows."""
    members = [log_softmax(scores) for scores in logits]
    pooled = []
    for k in range(len(logits[0])):
        terms = []
        for weight, member in zip(weights, members, strict=True):
            if weight > 0:
                terms.append(math.log(weight) + member[k])
        pooled.append(log_sum_exp(terms))
    return np.array(pooled)


def log_mean_score(logits, weights):
    """log q̄ = log φ(Σ_j w_j f_j)."""
    return log_softmax(weighted_mean(logits, weights))


def one_hot_votes(logits):
    return [as_distribution(first_largest(scores), len(scores)) for scores in logits]


def vote_share(logits, weights):
    return weighted_mean(one_hot_votes(logits), weights)


def mse(output, target):
    total = 0.0
    for f, y in zip(output, target, strict=True):
        total += (f - y) ** 2
    return total


def cross_entropy(logits, target):
    total = 0.0
    for y, log_p in zip(as_distribution(target, len(logits)), log_softmax(logits), strict=True):
        total -= y * log_p
    return total


def brier(logits, target):
    return mse(softmax(logits), as_distribution(target, len(logits)))


def zero_one(scores, label):
    return 0.0 if first_largest(scores) == int(label) else 1.0


def logistic(output, signs):
    total = 0.0
    for f, y in zip(output, signs, strict=True):
        total += softplus(-y * f)
    return total


def exponential(output, signs):
    total = 0.0
    for f, y in zip(output, signs, strict=True):
        total += math.exp(-y * f)
    return total


def poisson(output, counts):
    total = 0.0
    for f, y in zip(output, counts, strict=True):
        total += math.exp(f) - y * f
    return total


LOSSES = {
    "squared_error": mse,
    "cross_entropy": cross_entropy,
    "brier": brier,
    "zero_one": zero_one,
    "logistic": logistic,
    "exponential": exponential,
    "poisson": poisson,
}


def loss_function(loss):
    return LOSSES[loss] if isinstance(loss, str) else loss


def member_predictions(outputs, pool):
    if pool == "probability":
        return [log_softmax(scores) for scores in outputs]
    if pool == "vote":
        return one_hot_votes(outputs)
    return list(outputs)


def ensemble_prediction(outputs, weights, pool):
    if pool == "probability":
        return log_mean_probability(outputs, weights)
    if pool == "vote":
        return vote_share(outputs, weights)
    return weighted_mean(outputs, weights)


def ensemble_loss(outputs, target, *, loss, pool, weights):
    """Definition 4.1 (a): ERR = L(f̄, y)."""
    return loss_function(loss)(ensemble_prediction(outputs, weights, pool), target)


def individual_loss(outputs, target, *, loss, pool, weights):
    """Definition 4.1 (b): Σ_j w_j L(f_j, y)."""
    total = 0.0
    for weight, prediction in zip(weights, member_predictions(outputs, pool), strict=True):
        total += weight * loss_function(loss)(prediction, target)
    return total


def decompose(outputs, target, *, loss, pool, weights):
    """ERR, mean ERR and DIV = mean ERR - ERR (definition 4.2)."""
    ensemble = ensemble_loss(outputs, target, loss=loss, pool=pool, weights=weights)
    individual = individual_loss(outputs, target, loss=loss, pool=pool, weights=weights)
    return ensemble, individual, individual - ensemble


def augmented_total(outputs, targets, *, beta, loss, pool, weights):
    """M times the batch mean of equation 2: mean ERR - β DIV."""
    members, batch = outputs.shape[:2]
    total = 0.0
    for example in range(batch):
        _, individual, diversity = decompose(
            outputs[:, example], targets[example], loss=loss, pool=pool, weights=weights
        )
        total += individual - beta * diversity
    return members * total / batch


def member_losses(outputs, targets, *, loss, pool="score"):
    """Each member's own loss, averaged over the batch."""
    members, batch = outputs.shape[:2]
    losses = np.zeros(members)
    for example in range(batch):
        for member, prediction in enumerate(member_predictions(outputs[:, example], pool)):
            losses[member] += loss_function(loss)(prediction, targets[example]) / batch
    return losses


def squared_distance_to_mean(vectors, weights):
    mean = weighted_mean(vectors, weights)
    total = 0.0
    for weight, vector in zip(weights, vectors, strict=True):
        total += weight * mse(vector, mean)
    return total


def ambiguity(outputs, weights):
    """Equation 1: Σ_j w_j ‖f_j - f̄‖²."""
    return squared_distance_to_mean(outputs, weights)


def brier_variance(logits, weights):
    """Σ_j w_j (p̄ - p_j)ᵀ(p̄ - p_j)."""
    return squared_distance_to_mean([softmax(scores) for scores in logits], weights)


def kl(log_p, log_q):
    total = 0.0
    for a, b in zip(log_p, log_q, strict=True):
        total += math.exp(a) * (a - b)
    return total


def mean_kl_from(log_ensemble, logits, weights):
    total = 0.0
    for weight, scores in zip(weights, logits, strict=True):
        total += weight * kl(log_ensemble, log_softmax(scores))
    return total


def score_kl(logits, weights):
    """Σ_j w_j KL(q̄ ‖ p_j), section 4.2 case 1."""
    return mean_kl_from(log_mean_score(logits, weights), logits, weights)


def probability_kl_limit(logits, weights):
    """Σ_j w_j KL(p̄ ‖ p_j), the end of C.3."""
    return mean_kl_from(log_mean_probability(logits, weights), logits, weights)


def probability_log_ratio(logits, target, weights):
    """Theorem 4.3 before k* replaces the sum: Σ_j w_j Σ_k y(k) log(p̄(k) / p_j(k))."""
    log_ensemble = log_mean_probability(logits, weights)
    distribution = as_distribution(target, len(log_ensemble))
    total = 0.0
    for weight, scores in zip(weights, logits, strict=True):
        log_member = log_softmax(scores)
        for k in range(len(distribution)):
            total += weight * distribution[k] * (log_ensemble[k] - log_member[k])
    return total


def probability_variance_approximation(logits, label, weights):
    """V[p_j(k*)] / (2 p̄(k*)²), written as ½ Σ_j w_j (p_j(k*) / p̄(k*) - 1)²."""
    log_ensemble = log_mean_probability(logits, weights)[int(label)]
    total = 0.0
    for weight, scores in zip(weights, logits, strict=True):
        total += weight * (math.exp(log_softmax(scores)[int(label)] - log_ensemble) - 1.0) ** 2
    return total / 2


def beta_approximation(mean, precision):
    """V / (2 mean²) with V = αβ / ((α + β)² (α + β + 1)), α = φ μ, β = φ (1 - μ)."""
    a, b = precision * mean, precision * (1 - mean)
    variance = a * b / ((a + b) ** 2 * (a + b + 1))
    return variance / (2 * mean**2)


def vote_disagreement(logits, label, weights):
    """Weighted share of members against the two-class majority; negative where the majority is wrong."""
    majority = first_largest(vote_share(logits, weights))
    share = 0.0
    for weight, scores in zip(weights, logits, strict=True):
        if first_largest(scores) != majority:
            share += weight
    return share if majority == int(label) else -share


def kl_bernoulli(f, g):
    log_ratio_of_one = softplus(-g) - softplus(-f)
    log_ratio_of_zero = softplus(g) - softplus(f)
    return sigmoid(f) * log_ratio_of_one + sigmoid(-f) * log_ratio_of_zero


def kl_poisson(f, g):
    rate, other_rate = math.exp(f), math.exp(g)
    return rate * math.log(rate / other_rate) - rate + other_rate


def kl_unit_gaussian(f, g):
    return (f - g) ** 2 / 2


COORDINATE_KL = {"bernoulli": kl_bernoulli, "poisson": kl_poisson, "gaussian": kl_unit_gaussian}


def exponential_family(scores, weights, family):
    """Σ_j w_j KL(q̄ ‖ p_j), q̄ the member of the family at the mean natural parameter; outputs are independent."""
    if family == "categorical":
        return score_kl(scores, weights)
    mean = weighted_mean(scores, weights)
    total = 0.0
    for weight, member in zip(weights, scores, strict=True):
        for f, g in zip(mean, member, strict=True):
            total += weight * COORDINATE_KL[family](f, g)
    return total


def hessian_mse(output, _target):
    return 2 * np.eye(len(output))


def hessian_cross_entropy(logits, _target):
    p = softmax(logits)
    return np.diag(p) - np.outer(p, p)


def hessian_logistic(output, signs):
    curvature = []
    for f, y in zip(output, signs, strict=True):
        curvature.append(sigmoid(y * f) * sigmoid(-y * f))
    return np.diag(curvature)


def hessian_exponential(output, signs):
    return np.diag([y * y * math.exp(-y * f) for f, y in zip(output, signs, strict=True)])


def hessian_poisson(output, _counts):
    return np.diag([math.exp(f) for f in output])


def pseudo_huber(output, target):
    """√(1 + ‖f - y‖²), a loss whose Hessian has off-diagonal entries that depend on the target."""
    return math.sqrt(1 + mse(output, target))


def hessian_pseudo_huber(output, target):
    distance = pseudo_huber(output, target)
    residual = output - target
    return np.eye(len(output)) / distance - np.outer(residual, residual) / distance**3


HESSIANS = {
    "squared_error": hessian_mse,
    "cross_entropy": hessian_cross_entropy,
    "logistic": hessian_logistic,
    "exponential": hessian_exponential,
    "poisson": hessian_poisson,
    "pseudo_huber": hessian_pseudo_huber,
}


def curvature_along(direction, point, target, hessian):
    return float(direction @ hessian(point, target) @ direction)


def simpson(function, intervals=SIMPSON_INTERVALS):
    """Composite Simpson rule on [0, 1]."""
    total = 0.0
    for node in range(intervals + 1):
        factor = 1 if node in (0, intervals) else 4 if node % 2 else 2
        total += factor * function(node / intervals)
    return total / (3 * intervals)


def hessian_form(outputs, target, weights, hessian):
    """Σ_j w_j ∫₀¹ (1 - t) d_jᵀ H(f̄ + t d_j, y) d_j dt with d_j = f_j - f̄."""
    mean = weighted_mean(outputs, weights)
    total = 0.0
    for weight, member in zip(weights, outputs, strict=True):
        d = member - mean

        def integrand(t, d=d):
            return (1 - t) * curvature_along(d, mean + t * d, target, hessian)

        total += weight * simpson(integrand)
    return total


def hessian_form_range(outputs, target, weights, hessian, grid=101):
    """Theorem 4.5 as printed, at the c_j in [0, 1] that make it smallest and largest."""
    mean = weighted_mean(outputs, weights)
    low = high = 0.0
    for weight, member in zip(weights, outputs, strict=True):
        d = member - mean
        curvatures = [curvature_along(d, mean + c * d, target, hessian) for c in np.linspace(0, 1, grid)]
        low += weight * min(curvatures) / 2
        high += weight * max(curvatures) / 2
    return low, high

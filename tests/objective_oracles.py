"""Objectives in float64 with one plain loop per sum, written from the papers' equations, for comparison only.

Each takes arrays ``outputs[M, B, C]`` and targets, and returns the values that ``total`` may have: one value, or one
per possible draw for an objective that draws. ``total`` is M times the paper's objective where the paper averages
over members.
"""

import itertools
import math

import numpy as np
from oracle import HESSIANS, cross_entropy, ensemble_loss, equal_weights, log_softmax, loss_function, softmax

JITTER = 1e-6
"""Added to the diagonal of ADP's Gram matrix, as in the authors' code."""
LEAST_FREQUENCY = 1e-3
"""The frequency of a class without labels in DivDis."""


def independent(outputs, targets, *, loss, weights=None, smoothing=0.0):
    """M Σ_j w_j L_j, with the label smoothed towards the uniform distribution."""
    members, batch, classes = outputs.shape
    weights = equal_weights(members) if weights is None else weights
    smoothing = np.broadcast_to(smoothing, members)
    total = 0.0
    for j, n in itertools.product(range(members), range(batch)):
        value = loss_function(loss)(outputs[j, n], targets[n])
        if smoothing[j]:
            value = (1 - smoothing[j]) * value - smoothing[j] * sum(log_softmax(outputs[j, n])) / classes
        total += weights[j] * value / batch
    return [members * total]


def augmented(outputs, targets, *, beta, loss, pool, weights=None):
    """Equation 2 of the collusion paper: the mean member loss − β · diversity."""
    members, batch, _ = outputs.shape
    weights = equal_weights(members) if weights is None else weights
    (individual,) = independent(outputs, targets, loss=loss, weights=weights)
    ensemble = 0.0
    for n in range(batch):
        ensemble += ensemble_loss(outputs[:, n], targets[n], loss=loss, pool=pool, weights=weights) / batch
    return [individual - beta * (individual - members * ensemble)]


def joint(outputs, targets, *, loss, pool, weights=None):
    """The loss of the pooled prediction alone."""
    members, batch, _ = outputs.shape
    weights = equal_weights(members) if weights is None else weights
    total = 0.0
    for n in range(batch):
        total += ensemble_loss(outputs[:, n], targets[n], loss=loss, pool=pool, weights=weights) / batch
    return [members * total]


def gradient_adjusted(outputs, targets, *, alpha, others_only=False):
    """Equations 8 and 10 of the collusion paper: targets moved by α against the mean error."""
    members, batch, width = outputs.shape
    total = 0.0
    for i, n, c in itertools.product(range(members), range(batch), range(width)):
        averaged = [j for j in range(members) if j != i or not others_only]
        step = alpha / len(averaged) * sum(outputs[j, n, c] - targets[n, c] for j in averaged)
        total += (outputs[i, n, c] - (targets[n, c] - step)) ** 2 / batch
    return [total]


def negative_correlation(outputs, targets, *, strength, loss="squared_error"):
    """Σ_j L_j − λ/2 · d_jᵀ H d_j, with the Hessian of the loss at the mean output."""
    members, batch, _ = outputs.shape
    total = 0.0
    for j, n in itertools.product(range(members), range(batch)):
        mean = outputs[:, n].mean(0)
        d = outputs[j, n] - mean
        penalty = float(d @ HESSIANS[loss](mean, targets[n]) @ d) / 2
        total += (loss_function(loss)(outputs[j, n], targets[n]) - strength * penalty) / batch
    return [total]


def learner_dropout(outputs, targets, *, drop, loss, pool):
    """Appendix G.7 of the collusion paper: joint training of every possible set of K kept members."""
    members = len(outputs)
    subset_size = max(1, members - int(members * drop + 1e-9))
    subsets = itertools.combinations(range(members), subset_size)
    return [joint(outputs[list(subset)], targets, loss=loss, pool=pool)[0] for subset in subsets]


def adp(logits, labels, *, alpha, beta, temperature=1.0, entropy_drop=0.0):
    """Equations 2 to 5 of the ADP paper, for every possible set of classes that the entropy leaves out."""
    _, batch, classes = logits.shape
    dropped = math.ceil(entropy_drop * classes - 1e-9)
    return [
        sum(_adp_example(logits[:, n] / temperature, int(labels[n]), alpha, beta, subset) / batch for n in range(batch))
        for subset in itertools.combinations(range(classes), dropped)
    ]


def _adp_example(logits, label, alpha, beta, dropped):
    probs = np.array([softmax(scores) for scores in logits])
    fitted = -sum(math.log(p[label]) for p in probs)
    kept_classes = [c for c in range(probs.shape[1]) if c == label or c not in dropped]
    mean = probs.mean(0)[kept_classes]
    mean = mean / mean.sum()
    entropy = -sum(p * math.log(p) for p in mean)
    nonmaximal = np.delete(probs, label, axis=1)
    units = nonmaximal / np.linalg.norm(nonmaximal, axis=1, keepdims=True)
    volume = np.linalg.det(units @ units.T + JITTER * np.eye(len(probs)))
    return fitted - alpha * entropy - beta * math.log(volume)


def pair_agreement(logits, classes="both"):
    """Equation 3 of the LDR paper, summed over pairs of members m < l, for each example."""
    members, batch, _ = logits.shape
    agreement = np.zeros(batch)
    for n in range(batch):
        probs = [softmax(scores) for scores in logits[:, n]]
        for m, k in itertools.combinations(range(members), 2):
            predicted = [int(np.argmax(probs[m])), int(np.argmax(probs[k]))][: 1 if classes == "earlier" else 2]
            for c in predicted:
                p, q = probs[m][c], probs[k][c]
                agreement[n] -= math.log(p * (1 - q) + q * (1 - p)) / len(predicted)
    return agreement


def a2d(logits, labels, *, unlabelled, strength, classes="both"):
    """Equations 1 to 3 of the LDR paper."""
    (fitted,) = independent(logits, labels, loss="cross_entropy")
    return [fitted + strength / (len(logits) - 1) * pair_agreement(unlabelled, classes).mean()]


def divdis(logits, labels, *, unlabelled, strength, balance):
    """Mutual information of pairs of predictions, and KL of mean predictions from the label frequencies."""
    members, examples, classes = unlabelled.shape
    probs = np.array([[softmax(unlabelled[m, n]) for n in range(examples)] for m in range(members)])
    pairs = list(itertools.combinations(range(members), 2))
    information = 0.0
    for i, j in pairs:
        joint_probs = sum(np.outer(probs[i, n], probs[j, n]) for n in range(examples)) / examples
        product = np.outer(joint_probs.sum(1), joint_probs.sum(0))
        information += float((joint_probs * np.log(joint_probs / product)).sum()) / len(pairs)
    frequencies = np.maximum(np.bincount(labels, minlength=classes) / len(labels), LEAST_FREQUENCY)
    drift = 0.0
    for m in range(members):
        mean = probs[m].mean(0)
        drift += float((mean * np.log(mean / frequencies)).sum()) / members
    (fitted,) = independent(logits, labels, loss="cross_entropy")
    return [fitted + members * (strength * information + balance * drift)]


def ldr(logits, labels, *, strength, weight="loss"):
    """Equations 4 to 6 of the LDR paper, or with 1/p_y as the weight (appendix A.14)."""
    losses = np.array([cross_entropy(logits[:, n].mean(0), labels[n]) for n in range(len(labels))])
    alpha = (losses if weight == "loss" else np.exp(losses)) / losses.mean() ** 2
    (fitted,) = independent(logits, labels, loss="cross_entropy")
    return [fitted + strength / (len(logits) - 1) * (alpha * pair_agreement(logits)).mean()]


def trades(logits, labels, *, adversarial=None, strength):
    """Cross-entropy, and KL of each member's attacked predictions from its clean ones (Zhang et al. 2019)."""
    (total,) = independent(logits, labels, loss="cross_entropy")
    for m, n in itertools.product(*map(range, logits.shape[:2])) if adversarial is not None else ():
        clean, attacked = log_softmax(logits[m, n]), log_softmax(adversarial[m, n])
        total += strength * sum(math.exp(a) * (a - b) for a, b in zip(clean, attacked, strict=True)) / len(labels)
    return [total]

"""How far out of distribution an example is, by what members say of it: ``[M, B, C] -> [B]``, higher is farther.

Entropies are in nats and not divided by the number of classes, so that mutual information is ensemble entropy less mean
entropy. Outputs in half precision are taken as float32. NaN in an output gives NaN for that example, in every score.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks
from dissensus.diversity.disagreement import distinct_predictions, jensen_shannon

_LEAST = {torch.float32: -103.28, torch.float64: -744.44}
"""What the logarithm of a probability of zero is read as: that of the smallest number above zero of its type."""
_LEAST_LOG = -1e5
"""What a log-probability of −∞ is read as."""


def predictive_diversity(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """PDS (LDR paper, equation 10): the mean over classes of the largest probability that any member gives it.

    With members that are sure it counts the distinct classes they name, over C. The mean of the members' probabilities
    cannot tell members that are all unsure from members that are sure of different things; this can (Figure 2):

    >>> unsure = torch.full((3, 1, 3), 1 / 3)
    >>> sure = torch.eye(3).unsqueeze(1)  # each names another class
    >>> model_average(unsure), model_average(sure)
    (tensor([0.6667]), tensor([0.6667]))
    >>> predictive_diversity(unsure), predictive_diversity(sure)
    (tensor([0.3333]), tensor([1.]))
    """
    return _probs(probs).amax(0).mean(-1)


def model_average(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """One less the largest of the members' mean probabilities (BMA, LDR paper, §3.4)."""
    return 1 - _probs(probs).mean(0).amax(-1)


def mean_least_confidence(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """One less the members' mean confidence in the class that each of them names (LDR paper, equation 16)."""
    return 1 - _probs(probs).amax(-1).mean(0)


def mean_energy(logits: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The members' mean energy, −log Σ_c exp f_c (LDR paper, equation 13).

    >>> mean_energy(torch.zeros(2, 1, 4))
    tensor([-1.3863])
    """
    return -_logits(logits).logsumexp(-1).mean(0)


def max_logit(logits: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Minus the largest of the members' mean logits."""
    return -_logits(logits).mean(0).amax(-1)


def mean_entropy(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The mean of the members' entropies (LDR paper, equation 14, times C)."""
    return torch.special.entr(_probs(probs)).sum(-1).mean(0)


def ensemble_entropy(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The entropy of the members' mean probabilities (LDR paper, equation 15, times C)."""
    return torch.special.entr(_probs(probs).mean(0)).sum(-1)


def mutual_information(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Mutual information of member and class: `ensemble_entropy` − `mean_entropy`, from 0 to log M.

    The Jensen-Shannon divergence of the members is the same number, `dissensus.diversity.jensen_shannon`.

    >>> mutual_information(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    return jensen_shannon(probs)


def pairwise_kl(
    probs: Float[Tensor, "M B C"] | None = None, *, log_probs: Float[Tensor, "M B C"] | None = None
) -> Float[Tensor, " B"]:
    """KL(p_i ‖ p_j), averaged over all ordered pairs of members; 0 for one member.

    The sum over pairs is M Σ_i Σ_c p_i (log p_i − mean_j log p_j): no pair is looked at by itself.

    Args:
        probs: Probabilities. Exact as far as they are: one that has underflowed to zero is read as the smallest number
            above zero of its type, whose logarithm is −103 in float32 and −744 in float64.
        log_probs: Their logarithms instead, which do not underflow; −∞ is read as −10⁵.

    >>> pairwise_kl(torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]))
    tensor([0.1373])
    >>> pairwise_kl(log_probs=torch.tensor([[[0.0, 200.0]], [[200.0, 0.0]]]).log_softmax(-1))
    tensor([200.])
    """
    if (probs is None) == (log_probs is None):
        got = "neither" if probs is None else "both"
        checks.refuse("probs", "be given, or `log_probs` instead", got)
    if log_probs is not None:
        logs = _log_probs(log_probs).clamp_min(_LEAST_LOG)
        probs = logs.exp()
    else:
        assert probs is not None
        probs = _probs(probs)
        none = probs == 0
        logs = torch.where(none, _LEAST[probs.dtype], torch.where(none, 1.0, probs).log())
    members = len(logs)
    relative = logs - logs[:1]  # exactly zero for identical members
    total = (probs * (relative - relative.mean(0))).sum((0, -1))
    return (total / max(1, members - 1)).clamp_min(0)


def pairwise_jsd(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The Jensen-Shannon divergence of two members, averaged over pairs, from 0 to log 2; 0 for one member.

    >>> pairwise_jsd(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    probs = _probs(probs)
    members = len(probs)
    own = torch.special.entr(probs).sum(-1)
    total = 0 * own.sum(0)  # NaN where an output is, for one member too
    for shift in range(1, members):  # every ordered pair once, M at a time
        between = torch.special.entr((probs + probs.roll(shift, 0)) / 2).sum(-1)
        total = total + (between - (own + own.roll(shift, 0)) / 2).sum(0)
    return (total / max(1, members * (members - 1))).clamp_min(0)  # below zero by rounding only


def probability_variance(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The variance of members' probabilities (divided by M), averaged over classes."""
    return _probs(probs).var(0, correction=0).mean(-1)


OF_PROBS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "predictive_diversity": predictive_diversity,
    "model_average": model_average,
    "mean_least_confidence": mean_least_confidence,
    "mean_entropy": mean_entropy,
    "ensemble_entropy": ensemble_entropy,
    "mutual_information": mutual_information,
    "pairwise_kl": pairwise_kl,
    "pairwise_jsd": pairwise_jsd,
    "probability_variance": probability_variance,
    "distinct_predictions": distinct_predictions,
}
OF_LOGITS: Mapping[str, Callable[[Tensor], Tensor]] = {"mean_energy": mean_energy, "max_logit": max_logit}
"""Scores that need logits; `of_logits` computes all the others from logits as well."""


def of_logits(name: str, logits: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The score of that name, from logits, without what a softmax on the way would lose.

    >>> of_logits("pairwise_kl", torch.tensor([[[0.0, 200.0]], [[200.0, 0.0]]]))
    tensor([200.])
    """
    checks.one_of("name", name, (*OF_PROBS, *OF_LOGITS))
    logits = _logits(logits)
    if name in OF_LOGITS:
        return OF_LOGITS[name](logits)
    if name == "pairwise_kl":
        return pairwise_kl(log_probs=logits.log_softmax(-1))
    return OF_PROBS[name](logits.softmax(-1))


def table(
    outputs: Float[Tensor, "M B C"], *, kind: Literal["logits", "probabilities"] = "logits", at_once: int = 2**22
) -> dict[str, Float[Tensor, " B"]]:
    """Every score of every example, in one pass over the outputs, slice by slice.

    Args:
        outputs: Of the members: logits, or probabilities, of which those scores that need logits are left out.
        kind: Which of the two.
        at_once: Numbers of a slice: what bounds the memory that is needed.

    >>> found = table(torch.randn(3, 5, 4))
    >>> len(found), found["mutual_information"].shape
    (12, torch.Size([5]))
    """
    checks.one_of("kind", kind, ("logits", "probabilities"))
    members, batch, classes = checks.member_outputs(outputs)
    if kind == "logits":
        checks.member_logits(outputs, "outputs")
    size = max(1, at_once // (members * classes))
    found: dict[str, list[Tensor]] = {}
    for start in range(0, batch, size):
        part = checks.full_precision(outputs[:, start : start + size])
        probs = part.softmax(-1) if kind == "logits" else part
        for name, score in OF_PROBS.items():
            exact = kind == "logits" and name == "pairwise_kl"  # logits know what has underflowed in probabilities
            found.setdefault(name, []).append(of_logits(name, part) if exact else score(probs))
        for name, score in OF_LOGITS.items() if kind == "logits" else ():
            found.setdefault(name, []).append(score(part))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _probs(probs: Tensor) -> Tensor:
    checks.member_probs(probs)
    return checks.full_precision(probs)


def _logits(logits: Tensor) -> Tensor:
    checks.member_outputs(logits, "logits")
    return checks.full_precision(logits)


def _log_probs(log_probs: Tensor) -> Tensor:
    checks.member_outputs(log_probs, "log_probs")
    log_probs = checks.full_precision(log_probs)
    if checks.is_concrete(log_probs) and bool((log_probs[:, 0].logsumexp(-1).abs() > 1e-2).any()):
        checks.refuse("log_probs", "be logarithms of probabilities", "others", "Logits? Use logits.log_softmax(-1).")
    return log_probs

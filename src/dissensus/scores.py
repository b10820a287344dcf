"""How far out of distribution an example is, by what members say of it: ``[M, B, C] -> [B]``, higher is farther.

Entropies are in nats and not divided by the number of classes, so that mutual information is ensemble entropy less mean
entropy.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks
from dissensus.diversity.disagreement import distinct_predictions

_LEAST = 1e-38
"""What a probability of zero is read as in a logarithm."""


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
    checks.member_probs(probs)
    return probs.amax(0).mean(-1)


def model_average(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """One less the largest of the members' mean probabilities (BMA, LDR paper, §3.4)."""
    checks.member_probs(probs)
    return 1 - probs.mean(0).amax(-1)


def mean_least_confidence(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """One less the members' mean confidence in the class that each of them names (LDR paper, equation 16)."""
    checks.member_probs(probs)
    return 1 - probs.amax(-1).mean(0)


def mean_energy(logits: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The members' mean energy, −log Σ_c exp f_c (LDR paper, equation 13).

    >>> mean_energy(torch.zeros(2, 1, 4))
    tensor([-1.3863])
    """
    checks.member_outputs(logits, "logits")
    return -logits.logsumexp(-1).mean(0)


def max_logit(logits: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Minus the largest of the members' mean logits."""
    checks.member_outputs(logits, "logits")
    return -logits.mean(0).amax(-1)


def mean_entropy(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The mean of the members' entropies (LDR paper, equation 14, times C)."""
    checks.member_probs(probs)
    return torch.special.entr(probs).sum(-1).mean(0)


def ensemble_entropy(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The entropy of the members' mean probabilities (LDR paper, equation 15, times C)."""
    checks.member_probs(probs)
    return torch.special.entr(probs.mean(0)).sum(-1)


def mutual_information(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """What knowing the member tells about the class: ensemble entropy less mean entropy.

    >>> mutual_information(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    return ensemble_entropy(probs) - mean_entropy(probs)


def pairwise_kl(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """KL(p_i ‖ p_j), averaged over all ordered pairs of members; 0 for one member.

    The sum over pairs is Σ_c (M Σ_i p_i log p_i − Σ_i p_i · Σ_j log p_j): no pair is looked at by itself.

    >>> pairwise_kl(torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]))
    tensor([0.1373])
    """
    members, _, _ = checks.member_probs(probs)
    logs = probs.clamp_min(_LEAST).log()
    total = members * (probs * logs).sum((0, -1)) - (probs.sum(0) * logs.sum(0)).sum(-1)
    return total / max(1, members * (members - 1))


def pairwise_jsd(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The Jensen-Shannon divergence of two members, averaged over pairs; 0 for one member.

    >>> pairwise_jsd(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    members, _, _ = checks.member_probs(probs)
    own = torch.special.entr(probs).sum(-1)
    total = torch.zeros_like(own[0])
    for shift in range(1, members):  # every ordered pair once, M at a time
        between = torch.special.entr((probs + probs.roll(shift, 0)) / 2).sum(-1)
        total = total + (between - (own + own.roll(shift, 0)) / 2).sum(0)
    return total / max(1, members * (members - 1))


def probability_variance(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """The variance of members' probabilities (divided by M), averaged over classes."""
    checks.member_probs(probs)
    return probs.var(0, correction=0).mean(-1)


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
        part = outputs[:, start : start + size]
        probs = part.softmax(-1) if kind == "logits" else part
        for name, score in OF_PROBS.items():
            found.setdefault(name, []).append(score(probs))
        for name, score in OF_LOGITS.items() if kind == "logits" else ():
            found.setdefault(name, []).append(score(part))
    return {name: torch.cat(parts) for name, parts in found.items()}

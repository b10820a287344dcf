"""Do members name different classes?"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, pooling


def pairwise_disagreement(probs: Float[Tensor, "M B C"]) -> Float[Tensor, "M M"]:
    """Share of examples on which two members name different classes. Logits or log-probabilities serve as well.

    NaN in the row and column of a member with a NaN anywhere: it names no class there.

    >>> pairwise_disagreement(torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.8, 0.2], [0.3, 0.7]]]))
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """
    members, batch, classes = checks.member_outputs(probs, "probs")
    named, unknown = pooling.first_choices(probs)
    # A product of one-hot rows counts agreements; in slices, so that memory is M · slice · C.
    agreeing = torch.zeros(members, members, dtype=torch.float64, device=probs.device)
    step = max(1, 2**24 // (members * classes))
    for start in range(0, batch, step):
        hot = torch.nn.functional.one_hot(named[:, start : start + step], classes).flatten(1).float()
        agreeing += hot @ hot.T
    spoilt = unknown.any(-1)
    found = (1 - agreeing / batch).to(checks.full_precision(probs).dtype)
    return found.masked_fill(spoilt.unsqueeze(0) | spoilt.unsqueeze(1), torch.nan)


def distinct_predictions(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """How many different classes members name, per example: from 1 to min(M, C); NaN where an output is.

    >>> distinct_predictions(torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.8, 0.2], [0.3, 0.7]]]))
    tensor([1., 2.])
    """
    checks.member_outputs(probs, "probs")
    named, unknown = pooling.first_choices(probs)
    return distinct_labels(named).to(checks.full_precision(probs).dtype).masked_fill(unknown.any(0), torch.nan)


def distinct_labels(named: Int[Tensor, "M B"]) -> Int[Tensor, " B"]:
    """How many different classes members name, from the class that each of them names.

    >>> distinct_labels(torch.tensor([[0, 1, 2], [0, 2, 2], [0, 1, 0]]))
    tensor([1, 2, 2])
    """
    ordered = named.sort(0).values
    return 1 + (ordered[1:] != ordered[:-1]).sum(0)


def jensen_shannon(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """H(mean of the members) − mean of their entropies, in nats, per example (ADP paper, appendix B.1).

    From 0 to log M; the same number as `dissensus.scores.mutual_information`. A measure, not something to train for:
    the paper's theorem says that cross-entropy less any multiple of it has no optimum inside the simplex, since members
    can gain by being sure of wrong classes.

    >>> jensen_shannon(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    checks.member_probs(probs)
    probs = checks.full_precision(probs)
    return (_entropy(probs.mean(0)) - _entropy(probs).mean(0)).clamp_min(0)  # below zero by rounding only


def _entropy(probs: Float[Tensor, "*S C"]) -> Float[Tensor, "*S"]:
    return torch.special.entr(probs).sum(-1)

"""Disagreement of members about classes."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import arguments, checks, pooling


@arguments.positions("all")
def pairwise_disagreement(probs: Float[Tensor, "M B C"]) -> Float[Tensor, "M M"]:
    """Share of examples on which two members predict different classes. Takes logits or log-probabilities as well.

    NaN in the row and column of a member with a NaN output.

    >>> pairwise_disagreement(torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.8, 0.2], [0.3, 0.7]]]))
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """
    members, batch, classes = checks.member_outputs(probs, "probs")
    predicted, unknown = pooling.first_choices(probs)
    # A product of one-hot rows counts agreements. Slices bound the memory to M · slice · C.
    agreements = torch.zeros(members, members, dtype=torch.float64, device=probs.device)
    step = max(1, 2**24 // (members * classes))
    for start in range(0, batch, step):
        hot = torch.nn.functional.one_hot(predicted[:, start : start + step], classes).flatten(1).float()
        agreements += hot @ hot.T
    has_nan = unknown.any(-1)
    disagreement = (1 - agreements / batch).to(checks.full_precision(probs).dtype)
    return disagreement.masked_fill(has_nan.unsqueeze(0) | has_nan.unsqueeze(1), torch.nan)


@arguments.positions("examples")
def distinct_predictions(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Number of different classes that members predict, per example, from 1 to min(M, C). NaN if an output is NaN.

    >>> distinct_predictions(torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.8, 0.2], [0.3, 0.7]]]))
    tensor([1., 2.])
    """
    checks.member_outputs(probs, "probs")
    predicted, unknown = pooling.first_choices(probs)
    return distinct_labels(predicted).to(checks.full_precision(probs).dtype).masked_fill(unknown.any(0), torch.nan)


def distinct_labels(predicted: Int[Tensor, "M B"]) -> Int[Tensor, " B"]:
    """Number of different classes among members' predicted classes, per example.

    >>> distinct_labels(torch.tensor([[0, 1, 2], [0, 2, 2], [0, 1, 0]]))
    tensor([1, 2, 2])
    """
    ordered = predicted.sort(0).values
    return 1 + (ordered[1:] != ordered[:-1]).sum(0)


@arguments.positions("examples")
def jensen_shannon(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """H(mean of the members) − mean of their entropies, in nats, per example (ADP paper, appendix B.1).

    From 0 to log min(M, C). `dissensus.scores.mutual_information` is the same function under its name as a score. It is
    a measure, not an objective. Σ_k CE_k − λ · JSD (equation 10) has no minimum with all probabilities above 0 (theorem
    1 of the appendix): equation 11 fails for the member with the largest probability of the label. A minimum exists
    where some are 0. For λ ≤ M / log M it is at the labels themselves, as without the term, since JSD is at most
    log M / M · Σ_k CE_k. For larger λ it is not: with C > M it is better to give the label M / (λ log M), and the rest
    to classes that no other member uses, which is a local minimum for M ≥ 3.

    >>> jensen_shannon(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    checks.member_probs(probs)
    probs = checks.full_precision(probs)
    return (_entropy(probs.mean(0)) - _entropy(probs).mean(0)).clamp_min(0)  # negative by rounding only


def _entropy(probs: Float[Tensor, "*S C"]) -> Float[Tensor, "*S"]:
    return torch.special.entr(probs).sum(-1)

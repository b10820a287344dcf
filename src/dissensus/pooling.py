"""Members become one prediction: ``[M, B, C] -> [B, C]``, in log space.

Three ways, and their words: ``"probability"`` averages probabilities, ``"score"`` averages raw outputs, ``"vote"``
counts each member's first choice. Every one takes weights ``[M]`` that sum to one.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks

Weights = Tensor | Sequence[float] | None


def mean_probability(logits: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, "B C"]:
    """Log of the mean probability, p̄ = Σ_j w_j softmax(f_j) (collusion paper, section 4.2, case 2).

    Log-mean-exp over members of each member's log-softmax, so nothing underflows: finite for logits of ±1e4. M=1 gives
    that member's log-probabilities, and identical members give theirs.

    >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, 100.0]]])
    >>> mean_probability(logits).exp()
    tensor([[0.2500, 0.7500]])
    """
    return pooled_log_probs(logits.log_softmax(-1), weights)


def pooled_log_probs(member_log_probs: Float[Tensor, "M ..."], weights: Weights = None) -> Float[Tensor, "..."]:
    """Log of the weighted mean of ``exp(member_log_probs)`` over the first axis."""
    members = member_log_probs.shape[0]
    if weights is None:
        return member_log_probs.logsumexp(0) - math.log(members)
    log_weights = checks.member_weights(weights, members, member_log_probs).log()
    return (member_log_probs + log_weights.view(-1, *[1] * (member_log_probs.ndim - 1))).logsumexp(0)


def mean_score(logits: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, "B C"]:
    """Log-probabilities of the mean score, q̄ = softmax(Σ_j w_j f_j) (collusion paper, section 4.2, case 1).

    The normalised geometric mean of the members' probabilities.

    >>> logits = torch.tensor([[[0.0, 2.0]], [[0.0, -2.0]]])
    >>> mean_score(logits).exp()
    tensor([[0.5000, 0.5000]])
    """
    return mean_output(logits, weights).log_softmax(-1)


def mean_output(outputs: Float[Tensor, "M B *C"], weights: Weights = None) -> Float[Tensor, "B *C"]:
    """The weighted mean of raw outputs, f̄ = Σ_j w_j f_j: a regression ensemble's prediction.

    >>> mean_output(torch.tensor([[[1.0]], [[3.0]]]), weights=[0.25, 0.75])
    tensor([[2.5000]])
    """
    if weights is None:
        return outputs.mean(0)
    return torch.tensordot(checks.member_weights(weights, outputs.shape[0], outputs), outputs, 1)


def vote_share(logits: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, "B C"]:
    """The share of members whose first choice is each class; its ``argmax`` is the majority, ties to the lowest class.

    >>> logits = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    >>> vote_share(logits)
    tensor([[0.6667, 0.3333]])
    """
    ballots = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return mean_output(ballots, weights)

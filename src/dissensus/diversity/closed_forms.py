"""Closed forms of diversity for particular losses.

Each returns ``[B]``, takes weights ``[M]``, is zero for M=1 and for identical members, and equals the diversity of
`dissensus.diversity.decompose` for the loss and pool that it names, unless it is called an approximation. Values that
are non-negative in theory are not negative by rounding. An example with a NaN output gives NaN. A member of weight zero
is ignored. Half precision is computed in float32. Dense outputs ``[M, B, C, *S]`` give
``[B, *S]``: every position is an example (see `dissensus.dense`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dissensus import arguments, checks, losses, pooling
from dissensus.axes import PerExampleLoss
from dissensus.diversity.decomposition import check_curved
from dissensus.pooling import Weights


@arguments.positions("examples")
def ambiguity(values: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, " B"]:
    """Spread of members around their mean, Σ_j w_j ‖f_j − f̄‖² (collusion paper, equation 1): squared error.

    The diversity of the loss ``"squared_error"``. That of ``"mse"``, the mean over C outputs, is 1/C of it.

    >>> ambiguity(torch.tensor([[[1.0]], [[3.0]]]))
    tensor([1.])
    """
    checks.member_outputs(values, "values")
    apart = pooling.weighed_only(deviations(values, weights), weights)
    return pooling.mean_output(apart.square().sum(-1), weights)


def deviations(values: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, "M B C"]:
    """f_j − f̄, in full precision, and exactly zero for identical members.

    Computed from differences to the member of the largest weight. These are exact for identical members, while a
    floating-point mean of equal numbers need not equal them.

    >>> deviations(torch.full((3, 1, 1), 0.1), weights=[0.2, 0.3, 0.5]).flatten()
    tensor([0., 0., 0.])
    """
    values = checks.full_precision(values)
    if weights is None:
        apart = values - values[:1]
        return apart - apart.mean(0)
    weights = checks.member_weights(weights, len(values), values)
    apart = values - values.index_select(0, weights.argmax().view(1))
    return apart - pooling.mean_output(apart, weights)


@arguments.positions("examples")
def score_kl(logits: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, " B"]:
    """Σ_j w_j KL(q̄ ‖ p_j) (collusion paper, section 4.2, case 1): cross-entropy with pool ``"score"``, any label.

    >>> score_kl(torch.tensor([[[0.0, 2.0]], [[0.0, -2.0]]]))
    tensor([0.4338])
    """
    checks.member_outputs(logits, "logits")
    return _mean_kl(pooling.mean_score(logits, weights), _present(logits, weights), weights)


@arguments.positions("examples")
def probability_log_ratio(
    logits: Float[Tensor, "M B C"], targets: Tensor, weights: Weights = None
) -> Float[Tensor, " B"]:
    """Σ_j w_j Σ_k y(k) log p̄(k)/p_j(k) (collusion paper, theorem 4.3): cross-entropy with pool ``"probability"``.

    >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, 100.0]]])
    >>> probability_log_ratio(logits, torch.tensor([1]))
    tensor([0.0589])
    """
    _, batch, classes = checks.member_outputs(logits, "logits")
    logits = _present(logits, weights)
    log_ratio = pooling.mean_probability(logits, weights) - logits.log_softmax(-1)
    if checks.class_targets(targets, batch, classes):
        per_member = torch.where(targets == 0, 0.0, targets * log_ratio).sum(-1)
    else:
        per_member = losses.at_label(log_ratio, targets)
    return pooling.mean_output(per_member, weights).clamp_min(0)


@arguments.positions("examples")
def probability_kl_limit(logits: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, " B"]:
    """Σ_j w_j KL(p̄ ‖ p_j): the limit of theorem 4.3 as the pooled prediction tends to the label distribution (C.3).

    Equal to `probability_log_ratio` at soft targets y = p̄, and an approximation of it elsewhere.

    >>> probability_kl_limit(torch.tensor([[[0.0, 2.0]], [[0.0, -2.0]]]))
    tensor([0.4338])
    """
    checks.member_outputs(logits, "logits")
    return _mean_kl(pooling.mean_probability(logits, weights), _present(logits, weights), weights)


@arguments.positions("examples")
def probability_variance_approximation(
    logits: Float[Tensor, "M B C"], labels: Tensor, weights: Weights = None
) -> Float[Tensor, " B"]:
    """V[p_j(k*)] / (2 p̄(k*)²): theorem 4.3 to second order in the spread of the true class's probability (C.3).

    >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, 0.2]]])
    >>> probability_variance_approximation(logits, torch.tensor([1]))
    tensor([0.0011])
    """
    _, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    log_probs = losses.at_label(_present(logits, weights).log_softmax(-1), labels)
    # The ratio p_j / p̄ in log space stays finite where p̄ itself underflows.
    ratio = (log_probs - pooling.pooled_log_probs(log_probs, weights)).exp()
    return pooling.mean_output((ratio - 1).square(), weights) / 2


@arguments.arrays
def beta_approximation(mean: Float[Tensor, "*S"], precision: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Expected diversity if p_j(k*) is Beta with mean p̄ and precision φ: p̄(1 − p̄) / (2 (1 + φ) p̄²) (C.3).

    Diversity grows as φ falls, that is, as members differ more. φ → ∞ gives 0, and p̄ → 0 diverges as 1/p̄.

    >>> beta_approximation(torch.tensor(0.8), torch.tensor(9.0))
    tensor(0.0125)
    """
    return (1 - mean) / (2 * (1 + precision) * mean)


@arguments.positions("examples")
def brier_variance(logits: Float[Tensor, "M B C"], weights: Weights = None) -> Float[Tensor, " B"]:
    """Σ_j w_j ‖p_j − p̄‖², the spread of probabilities (section 4.2): Brier score with pool ``"probability"``.

    >>> brier_variance(torch.tensor([[[0.0, 0.0]], [[0.0, 100.0]]]))
    tensor([0.1250])
    """
    checks.member_outputs(logits, "logits")
    return ambiguity(_present(logits, weights).softmax(-1), weights)


@arguments.positions("examples")
def vote_disagreement(logits: Float[Tensor, "M B 2"], labels: Tensor, weights: Weights = None) -> Float[Tensor, " B"]:
    """Weight of the members that disagree with the vote, with sign + if the vote is right and − if it is wrong.

    0-1 loss with pool ``"vote"`` and two classes (section 4.2). With more classes a member may disagree with a wrong
    vote and be wrong as well, so that the expression does not hold. Positive and negative values are "good" and "bad"
    diversity.

    >>> logits = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    >>> vote_disagreement(logits, torch.tensor([0])), vote_disagreement(logits, torch.tensor([1]))
    (tensor([0.3333]), tensor([-0.3333]))
    """
    _, batch, classes = checks.member_outputs(logits, "logits")
    if classes != 2:
        checks.refuse("logits", "have C=2 classes", f"C={classes}", "Use decompose(..., loss='zero_one', pool='vote').")
    checks.class_targets(labels, batch, classes, soft=False)
    vote = pooling.vote_share(logits, weights).argmax(-1)
    disagreeing = pooling.mean_output(losses.zero_one(logits, vote), weights)  # NaN if a member's logits are
    return torch.where(vote == labels, disagreeing, -disagreeing)


@arguments.positions("examples")
def hessian_form(
    outputs: Float[Tensor, "M B C"],
    targets: Tensor,
    *,
    loss: str | PerExampleLoss,
    weights: Weights = None,
    nodes: int = 32,
) -> Float[Tensor, " B"]:
    """Diversity as curvature times spread, for any twice differentiable loss with pool ``"score"``.

    Σ_j w_j ∫₀¹ (1 − t) d_jᵀ H(f̄ + t d_j, y) d_j dt, with d_j = f_j − f̄

    Theorem 4.5 of the collusion paper with its remainder in integral form. Differs from the theorem as printed, which
    holds for unknown points c_j. This form is exact up to Gauss-Legendre quadrature with ``nodes`` points; scores that
    are tens of units apart need more of them. Curvature along d_j is a second derivative in t, so no Hessian is stored.
    The result carries no gradient.

    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> hessian_form(outputs, targets, loss="squared_error")
    tensor([1.0000])
    """
    _, _, width = checks.member_outputs(outputs)
    check_curved(loss)
    losses.tell_of_mean(loss, width)
    checks.count("nodes", nodes)
    outputs = _present(outputs, weights)
    with torch.inference_mode(False):
        return _curvature_times_spread(outputs.detach().clone(), targets.clone(), loss, weights, nodes)


def _curvature_times_spread(
    outputs: Tensor, targets: Tensor, loss: str | PerExampleLoss, weights: Weights, nodes: int
) -> Tensor:
    members, batch, _ = outputs.shape
    mean = pooling.mean_output(outputs, weights)
    start, direction = mean.repeat(nodes * members, 1), (outputs - mean).flatten(0, 1).repeat(nodes, 1)
    repeated = targets.repeat(nodes * members, *[1] * (targets.ndim - 1))
    function = losses.function_of(loss)
    points, node_weights = (outputs.new_tensor(values) / 2 for values in np.polynomial.legendre.leggauss(nodes))
    t = (points + 0.5).repeat_interleave(members * batch).requires_grad_()
    with torch.enable_grad():
        along = function(start + t.unsqueeze(1) * direction, repeated)
        (slope,) = torch.autograd.grad(along.sum(), t, create_graph=True)
        # The slope of a loss that is linear along d_j has no graph, and its curvature is zero.
        curvature = torch.autograd.grad(slope.sum(), t)[0] if slope.requires_grad else torch.zeros_like(t)
    at_node = (curvature * (1 - t.detach())).view(nodes, members, batch)
    return pooling.mean_output(torch.tensordot(node_weights, at_node, 1), weights)


class Family(NamedTuple):
    """An exponential family: its log-partition function A, ``[..., C] -> [...]``, and its mean ∇A."""

    log_partition: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]


FAMILIES: dict[str, Family] = {
    "categorical": Family(lambda f: f.logsumexp(-1), lambda f: f.softmax(-1)),
    "bernoulli": Family(lambda f: -F.logsigmoid(-f).sum(-1), torch.sigmoid),
    "poisson": Family(lambda f: f.exp().sum(-1), torch.exp),
    "gaussian": Family(lambda f: f.square().sum(-1) / 2, lambda f: f),
}


@arguments.positions("examples")
def exponential_family(scores: Float[Tensor, "M B C"], *, family: str, weights: Weights = None) -> Float[Tensor, " B"]:
    """Σ_j w_j KL(q̄ ‖ p_j) if scores are natural parameters and are averaged (section 4.2, "beyond the softmax").

    KL(q̄ ‖ p_j) = A(f_j) − A(f̄) − ⟨∇A(f̄), f_j − f̄⟩ for a family with log-partition A. ``"categorical"`` is
    cross-entropy, ``"poisson"`` the Poisson loss, ``"gaussian"`` half the squared error. ``"bernoulli"`` treats
    each score as a log-odds: the logistic loss, and C times ``bce``, which is a mean over labels.

    >>> exponential_family(torch.tensor([[[0.0]], [[2.0]]]), family="poisson")
    tensor([1.4762])
    """
    checks.member_outputs(scores, "scores")
    checks.one_of("family", family, FAMILIES)
    log_partition, mean_of = FAMILIES[family]
    scores = _present(scores, weights)
    mean = pooling.mean_output(scores, weights)
    divergence = log_partition(scores) - log_partition(mean) - (mean_of(mean) * (scores - mean)).sum(-1)
    return pooling.mean_output(divergence, weights).clamp_min(0)


def _mean_kl(pooled_log_probs: Tensor, logits: Tensor, weights: Tensor | Sequence[float] | None) -> Tensor:
    log_ratio = pooled_log_probs - logits.log_softmax(-1)
    probs = pooled_log_probs.exp()
    return pooling.mean_output(torch.where(probs == 0, 0.0, probs * log_ratio).sum(-1), weights).clamp_min(0)


def _present(outputs: Tensor, weights: Weights) -> Tensor:
    """Outputs in full precision, with zeros for members of weight zero."""
    return pooling.weighed_only(checks.full_precision(outputs), weights)

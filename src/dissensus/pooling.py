"""Pooling of members into one prediction: ``[M, B, C] -> [B, C]``, in log space.

Dense outputs ``[M, B, C, *S]`` give ``[B, C, *S]``. The class axis is the third; ``class_axis=-1`` says that it is the
last, as in language models (``[M, B, T, V] -> [B, T, V]``). NumPy arrays are taken as tensors.

The pool ``"probability"`` averages probabilities (of classes, of labels, or densities), ``"score"`` averages raw
outputs, and ``"vote"`` counts each member's predicted class. All take weights ``[M]`` that sum to one. A member of
weight zero is ignored: its infinities and NaN reach neither values nor gradients. Any other NaN makes the result of its
example NaN. Outputs in half precision are pooled in float32.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dissensus import arguments, checks, dense

Weights = Tensor | Sequence[float] | None
_BISECTIONS = 64
"""Halvings of an interval, which leave less than a double resolves."""


@arguments.arrays
def mean_probability(
    logits: Float[Tensor, "M B C *S"], weights: Weights = None, *, class_axis: int = 2
) -> Float[Tensor, "B C *S"]:
    """Log of the mean probability, p̄ = Σ_j w_j softmax(f_j) (collusion paper, section 4.2, case 2).

    Log-mean-exp over members of each member's log-softmax, so that nothing underflows: finite for logits of ±1e4. One
    member, or identical members, give their log-probabilities. `probabilities` gives p̄ itself.

    >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, 100.0]]])
    >>> mean_probability(logits).exp()
    tensor([[0.2500, 0.7500]])
    """
    checks.member_axes(logits, "logits", dense=True)
    logits = checks.full_precision(logits)
    return pooled_log_probs(weighed_only(logits, weights).log_softmax(dense.axis_of(logits, class_axis)), weights)


@arguments.arrays
def probabilities(
    logits: Float[Tensor, "M B C *S"], weights: Weights = None, *, class_axis: int = 2
) -> Float[Tensor, "B C *S"]:
    """The mean probabilities p̄ = Σ_j w_j softmax(f_j) themselves, which sum to one over classes.

    `mean_probability` gives their logarithms, which losses take and which do not underflow.

    >>> probabilities(torch.tensor([[[0.0, 0.0]], [[0.0, 100.0]]]))
    tensor([[0.2500, 0.7500]])
    """
    return mean_probability(logits, weights, class_axis=class_axis).exp()


@arguments.arrays
def mean_label_probability(logits: Float[Tensor, "M B C *S"], weights: Weights = None) -> Float[Tensor, "B C *S"]:
    """Log-odds of the mean probability of each label, p̄ = Σ_j w_j sigmoid(f_j), for labels that do not exclude others.

    The pool ``"probability"`` of the loss `dissensus.losses.bce`. Its sigmoid is p̄. Computed in log space: finite for
    logits of ±1e4. One member, or identical members, give their logits.

    >>> mean_label_probability(torch.tensor([[[0.0]], [[100.0]]])).sigmoid()
    tensor([[0.7500]])
    """
    checks.member_axes(logits, "logits", dense=True)
    logits = weighed_only(checks.full_precision(logits), weights)
    return pooled_log_probs(F.logsigmoid(logits), weights) - pooled_log_probs(F.logsigmoid(-logits), weights)


class Moments(NamedTuple):
    """Mean and variance of a pooled prediction; the variance is ``aleatoric + epistemic``."""

    mean: Float[Tensor, "*S"]
    aleatoric: Float[Tensor, "*S"]
    """Mean of the members' variances: the noise that they see in the data."""
    epistemic: Float[Tensor, "*S"]
    """Variance of the members' means: what they disagree about."""


@arguments.arrays
def moment_matched(mean: Float[Tensor, "M *S"], variance: Float[Tensor, "M *S"], weights: Weights = None) -> Moments:
    """Mean and variance of the mixture of members' distributions, by the law of total variance.

    μ̄ = Σ_j w_j μ_j, aleatoric Σ_j w_j v_j, epistemic Σ_j w_j (μ_j − μ̄)²

    To show a prediction: the Gaussian with these moments is not the mixture, whose density the loss
    `dissensus.losses.gaussian_nll` pools. Takes what `dissensus.losses.gaussian_moments` returns.

    >>> moment_matched(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[0.5]], [[1.5]]]))
    Moments(mean=tensor([[2.]]), aleatoric=tensor([[1.]]), epistemic=tensor([[1.]]))
    """
    if mean.shape != variance.shape:
        got = checks.shape_text(variance.shape)
        fix = "Use moment_matched(*losses.gaussian_moments(outputs))."
        checks.refuse("variance", f"have the shape of the means, {checks.shape_text(mean.shape)}", got, fix)
    pooled = mean_output(mean, weights)
    apart = weighed_only(checks.full_precision(mean) - pooled, weights)
    return Moments(pooled, mean_output(variance, weights), mean_output(apart.square(), weights))


@arguments.arrays
def mixture_quantile(
    mean: Float[Tensor, "M *S"], variance: Float[Tensor, "M *S"], level: float, weights: Weights = None
) -> Float[Tensor, "*S"]:
    """Quantile of the mixture of members' Gaussians: the y at which Σ_j w_j Φ((y − μ_j)/σ_j) is ``level``.

    By bisection in double precision, for all numbers at once. It begins between the smallest and the largest of the
    members' own quantiles, where the mixture's must lie. One member, and identical members, give theirs. Takes what
    `dissensus.losses.gaussian_moments` returns. NaN gives NaN.

    >>> mixture_quantile(torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1), 0.9)
    tensor([1.8495], dtype=torch.float64)
    """
    checks.number("level", level, 0, 1, open_low=True, open_high=True)
    if mean.shape != variance.shape or mean.ndim < 1 or not len(mean):
        got = f"{checks.shape_text(mean.shape)} and {checks.shape_text(variance.shape)}"
        checks.refuse("mean", "have members first, and the shape of `variance`", got)
    if level > 0.5:  # the left tail of the mirrored mixture, where small probabilities keep their digits
        return -_lower_quantile(-mean.double(), variance.double(), 1 - level, weights)
    return _lower_quantile(mean.double(), variance.double(), level, weights)


def _lower_quantile(mean: Tensor, variance: Tensor, level: float, weights: Weights) -> Tensor:
    """`mixture_quantile` for levels up to a half."""
    deviation = variance.sqrt()
    own = mean + deviation * torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).to(mean.device)
    if weights is not None:
        absent = _as_column(checks.member_weights(weights, len(mean), mean), mean) == 0
        low, high = own.masked_fill(absent, math.inf).amin(0), own.masked_fill(absent, -math.inf).amax(0)
    else:
        low, high = own.amin(0), own.amax(0)
    deviation = deviation.clamp_min(torch.finfo(torch.float64).tiny)  # a variance of 0 is a step
    for _ in range(_BISECTIONS):
        middle = low + (high - low) / 2
        if bool(((middle == low) | (middle == high) | middle.isnan()).all()):
            break
        below = mean_output(torch.special.ndtr((middle - mean) / deviation), weights) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def pooled_log_probs(member_log_probs: Float[Tensor, "M ..."], weights: Weights = None) -> Float[Tensor, "..."]:
    """Log of the weighted mean of ``exp(member_log_probs)`` over the first axis."""
    member_log_probs = checks.full_precision(member_log_probs)
    members = member_log_probs.shape[0]
    if weights is None:
        return member_log_probs.logsumexp(0) - math.log(members)
    column = _as_column(checks.member_weights(weights, members, member_log_probs), member_log_probs)
    absent = column == 0
    log_weights = torch.where(absent, 1.0, column).log()
    return torch.where(absent, -torch.inf, member_log_probs + log_weights).logsumexp(0)


@arguments.arrays
def mean_score(
    logits: Float[Tensor, "M B C *S"], weights: Weights = None, *, class_axis: int = 2
) -> Float[Tensor, "B C *S"]:
    """Log-probabilities of the mean score, q̄ = softmax(Σ_j w_j f_j) (collusion paper, section 4.2, case 1).

    The normalised geometric mean of the members' probabilities.

    >>> logits = torch.tensor([[[0.0, 2.0]], [[0.0, -2.0]]])
    >>> mean_score(logits).exp()
    tensor([[0.5000, 0.5000]])
    """
    checks.member_axes(logits, "logits", dense=True)
    return mean_output(logits, weights).log_softmax(dense.axis_of(logits, class_axis) - 1)


@arguments.arrays
def mean_output(outputs: Float[Tensor, "M *S"], weights: Weights = None) -> Float[Tensor, "*S"]:
    """The weighted mean of raw outputs, f̄ = Σ_j w_j f_j: the prediction of a regression ensemble. Takes any axes.

    >>> mean_output(torch.tensor([[[1.0]], [[3.0]]]), weights=[0.25, 0.75])
    tensor([[2.5000]])
    """
    outputs = checks.full_precision(outputs)
    if weights is None:
        return outputs.mean(0)
    weights = checks.member_weights(weights, outputs.shape[0], outputs)
    return torch.tensordot(weights, weighed_only(outputs, weights), 1)


@arguments.arrays
def vote_share(
    logits: Float[Tensor, "M B C *S"], weights: Weights = None, *, class_axis: int = 2
) -> Float[Tensor, "B C *S"]:
    """The share of members that predict each class. Its ``argmax`` is the majority, with ties to the lowest class.

    >>> logits = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    >>> vote_share(logits)
    tensor([[0.6667, 0.3333]])
    """
    checks.member_axes(logits, "logits", dense=True)
    axis = dense.axis_of(logits, class_axis)
    return mean_output(ballots(logits.movedim(axis, -1)).movedim(-1, axis), weights)


def ballots(logits: Float[Tensor, "*S C"]) -> Float[Tensor, "*S C"]:
    """One at the class with the largest logit, zero elsewhere. All NaN if one of the logits is NaN.

    >>> ballots(torch.tensor([[0.5, 2.0], [float("nan"), 2.0]]))
    tensor([[0., 1.],
            [nan, nan]])
    """
    predicted, unknown = first_choices(logits)
    hot = torch.nn.functional.one_hot(predicted, logits.shape[-1]).to(checks.full_precision(logits).dtype)
    return hot.masked_fill(unknown.unsqueeze(-1), torch.nan)


def first_choices(logits: Float[Tensor, "*S C"]) -> tuple[Int[Tensor, "*S"], Bool[Tensor, "*S"]]:
    """The class with the largest logit, with ties to the lowest class; and whether it is unknown because of a NaN.

    >>> first_choices(torch.tensor([[0.5, 2.0], [float("nan"), 2.0]]))
    (tensor([1, 0]), tensor([False,  True]))
    """
    return logits.argmax(-1), logits.isnan().any(-1)


def weighed_only(outputs: Float[Tensor, "M *S"], weights: Weights) -> Float[Tensor, "M *S"]:
    """Outputs with zeros for members of weight zero, so that neither values nor gradients contain 0 · ∞."""
    if weights is None:
        return outputs
    weights = checks.member_weights(weights, outputs.shape[0], outputs)
    return outputs.masked_fill(_as_column(weights, outputs) == 0, 0.0)


def absent_detached(outputs: Float[Tensor, "M *S"], weights: Weights) -> Float[Tensor, "M *S"]:
    """Outputs unchanged, but without a gradient for members of weight zero."""
    if weights is None:
        return outputs
    weights = checks.member_weights(weights, outputs.shape[0], outputs)
    return torch.where(_as_column(weights, outputs) == 0, outputs.detach(), outputs)


def _as_column(weights: Float[Tensor, " M"], outputs: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (outputs.ndim - 1))

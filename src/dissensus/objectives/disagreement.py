"""Objectives that reward disagreement: on unlabelled data (A2D, DivDis), or on hard training examples (LDR)."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

import dissensus.objectives.pair_pass as pair_pass
from dissensus import arguments, checks, dense, losses, pooling
from dissensus.axes import LossParts
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples

Disagreement = Literal["a2d"] | Callable[[Tensor], Tensor]
"""A name, or a function of members' log-probabilities ``[M, B, C]`` that returns the loss of agreeing ``[B]``, summed
over the M(M − 1)/2 pairs of members."""
Classes = Literal["both", "earlier"]
"""The class that a pair should disagree on: that of both members in turn, or that of the earlier member."""
LEAST_LOSS = 1e-3
"""Lower bound of the mean loss of a batch, by which the weights of `hardness` are divided."""


@arguments.positions("examples")
def pair_agreement(logits: Float[Tensor, "M B C"], classes: Classes = "both") -> Float[Tensor, " B"]:
    """A2D's loss of agreeing (LDR paper, equation 3), summed over all pairs of members.

    −log(p^m (1 − p^l) + p^l (1 − p^m)) at the class ŷ that one member of the pair predicts, averaged over the two
    choices of ŷ, so that members can be permuted. With ``classes="earlier"`` ŷ is the prediction of the earlier member,
    as in the original, which trains members one after the other. One gather serves all pairs, since the loss reads p^l
    only at the class that m predicts. Finite for any finite logits: 1 − p at the predicted class is computed as the sum
    over the other classes.

    >>> pair_agreement(torch.zeros(2, 1, 2))  # −log(¼ + ¼)
    tensor([0.6931])
    """
    members, _, width = checks.member_outputs(logits, "logits")
    checks.one_of("classes", classes, ("both", "earlier"))
    _check_pairs(members, width)
    return _pairs(checks.full_precision(logits).log_softmax(-1), classes)


def _pairs(log_probs: Float[Tensor, "M B C"], classes: Classes = "both") -> Float[Tensor, " B"]:
    predicted = log_probs.argmax(-1)  # [M, B]
    log_p, log_rest = _AtPredictedClasses.apply(log_probs, predicted)
    return _agreement(log_p, log_rest, predicted, classes)


def _agreement(
    log_p: Float[Tensor, "l B m"], log_rest: Float[Tensor, "m B"], predicted: Int[Tensor, "m B"], classes: Classes
) -> Float[Tensor, " B"]:
    """The loss of agreeing, from log p of each member at the class that each predicts, and log(1 − p) at its own."""
    predicted, log_p, log_rest = predicted.T, log_p.transpose(0, 1), log_rest.T  # [B, m], [B, l, m], [B, m]
    same = predicted.unsqueeze(2) == predicted.unsqueeze(1)
    elsewhere = torch.where(same, -1.0, log_p)  # where classes differ p ≤ ½, so that log(1 − p) is accurate
    log_not_p = torch.where(same, log_rest.unsqueeze(2), torch.log1p(-elsewhere.exp()))
    log_q, log_not_q = log_p.diagonal(dim1=1, dim2=2).unsqueeze(1), log_rest.unsqueeze(1)  # of m at its own class
    agreement = -torch.logaddexp(log_q + log_not_p, log_p + log_not_q)  # [B, l, m]
    if classes == "earlier":
        return agreement.tril(-1).sum((1, 2))
    return (agreement.sum((1, 2)) - agreement.diagonal(dim1=1, dim2=2).sum(1)) / 2


class _AtPredictedClasses(torch.autograd.Function):
    """Log-probabilities of every member at the class that each member predicts, and log(1 − p) of each member at its
    own class. Both gradients go into one tensor. Autograd would allocate and add three of that size."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_probs: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        log_rest = log_probs.scatter(2, predicted.unsqueeze(2), -math.inf).logsumexp(-1)  # [m, B]
        return log_probs.gather(2, predicted.T.expand(len(predicted), -1, -1)), log_rest  # [l, B, m]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs, output[1])

    @staticmethod
    def _shares(log_probs: Tensor, predicted: Tensor, log_rest: Tensor) -> Tensor:
        """The share of each other class in 1 − p."""
        nothing = torch.full_like(log_rest, -math.inf).unsqueeze(2)
        return (log_probs - log_rest.unsqueeze(2)).scatter_add_(2, predicted.unsqueeze(2), nothing).exp()

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> tuple[Tensor, Tensor]:
        change, (log_probs, predicted, log_rest) = changes[0], ctx.saved_tensors
        shares = _AtPredictedClasses._shares(log_probs, predicted, log_rest)
        return change.gather(2, predicted.T.expand(len(predicted), -1, -1)), (shares * change).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_probs, predicted, log_rest = ctx.saved_tensors
        grad = _AtPredictedClasses._shares(log_probs, predicted, log_rest) * grads[1].unsqueeze(2)
        return grad.scatter_add_(2, predicted.T.expand(len(predicted), -1, -1), grads[0]), None


@Declaration(
    pairs=True,
    unlabelled="required",
    sweepable=("strength",),
    class_labels=True,
    loss="cross_entropy",
    pool="probability",
    neutral={"strength": 0},
    example_weights="shared",
)
def a2d(
    logits: Float[Tensor, "M B C *S"],
    labels: Tensor,
    *,
    unlabelled: Float[Tensor, "M U C *V"],
    strength: float | Float[Tensor, ""] = 1.0,
    classes: Classes = "both",
    example_weights: Tensor | None = None,
) -> LossParts:
    """Fit the labels, and disagree on unlabelled data (A2D; LDR paper, equations 1 to 3), all pairs at once.

    total = Σ_m CE_m + λ / (M − 1) · mean over unlabelled examples of the sum over pairs: M times the paper's objective.
    Differs from the original, which trains members one after the other against frozen ones (use ``fit(...,
    sequential=True)`` with ``classes="earlier"`` for that), and from both papers in averaging over the two choices of
    the predicted class.

    Args:
        logits: Of members on labelled data.
        labels: Their classes ``[B]``.
        unlabelled: Logits of members on the unlabelled data.
        strength: λ.
        classes: The class that a pair should disagree on.
        example_weights: Weights of labelled examples ``[B]``: means over them become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` (of the mean probabilities), ``agreement`` (the
        mean over pairs and unlabelled examples).

    >>> a2d(torch.zeros(2, 1, 2), torch.tensor([0]), unlabelled=torch.zeros(2, 3, 2)).total / math.log(2)
    tensor(3.)
    """
    logits, labels, example_weights = examples(logits, labels, example_weights, interacting="a2d")
    members, parts, _ = _fitted(logits, labels, example_weights)
    pairs = pair_agreement(dense.flat(unlabelled), classes).mean()
    parts["agreement"] = pairs / (members * (members - 1) / 2)
    return LossParts(parts["member_loss"].sum() + strength / (members - 1) * pairs, parts)


@Declaration(
    pairs=True,
    unlabelled="required",
    sweepable=("strength", "balance"),
    class_labels=True,
    loss="cross_entropy",
    pool="probability",
    neutral={"strength": 0, "balance": 0},
    example_weights="shared",
)
def divdis(
    logits: Float[Tensor, "M B C *S"],
    labels: Tensor,
    *,
    unlabelled: Float[Tensor, "M U C *V"],
    strength: float | Float[Tensor, ""] = 1.0,
    balance: float | Float[Tensor, ""] = 10.0,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Fit the labels, and make predictions on unlabelled data independent between members (DivDis).

    total = Σ_m CE_m + M · (λ · mean over pairs of the mutual information + μ · mean over members of the drift)

    The mutual information of a pair is KL of the joint distribution of the two predictions (the batch mean of the outer
    product of their probabilities) from the product of its marginals. The drift of a member is KL of its mean
    prediction from the label frequencies of the batch, which prevents degenerate predictions. Differs from the
    reference code in that probabilities of zero are allowed. A class without labels in the batch has a frequency of
    `LEAST_SHARE`.

    Args:
        logits: Of members on labelled data.
        labels: Their classes ``[B]``.
        unlabelled: Logits of members on the unlabelled data.
        strength: λ.
        balance: μ.
        example_weights: Weights of labelled examples ``[B]``: means over them become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` (of the mean probabilities), ``information``,
        ``drift``.

    >>> labels, sure = torch.tensor([0, 1]), 50 * torch.eye(2).expand(2, 2, 2)
    >>> divdis(sure, labels, unlabelled=sure).parts["information"]  # identical predictions: log 2
    tensor(0.6931)
    """
    logits, labels, example_weights = examples(logits, labels, example_weights, interacting="divdis")
    members, parts, _ = _fitted(logits, labels, example_weights)
    unlabelled = dense.flat(unlabelled)
    checks.member_outputs(unlabelled, "unlabelled")
    probs = checks.full_precision(unlabelled).softmax(-1)
    marginal = probs.mean(1)  # [M, C]
    information = _pairwise_information(probs, marginal)
    label_probs = torch.nn.functional.one_hot(labels, logits.shape[-1]).to(probs.dtype)
    frequencies = losses.batch_mean(label_probs.T, example_weights)
    log_marginal = marginal.clamp_min(_TINY).log()
    drift = (marginal * (log_marginal - frequencies.clamp_min(LEAST_SHARE).log())).sum(-1).mean()
    parts |= {"information": information, "drift": drift}
    return LossParts(parts["member_loss"].sum() + members * (strength * information + balance * drift), parts)


@Declaration(
    pairs=True,
    sweepable=("strength",),
    class_labels=True,
    loss="cross_entropy",
    pool="probability",
    neutral={"strength": 0},
    example_weights="shared",
)
def ldr(
    logits: Float[Tensor, "M B C *S"],
    labels: Tensor,
    *,
    strength: float | Float[Tensor, ""],
    disagreement: Disagreement = "a2d",
    weight: Literal["loss", "inverse"] = "loss",
    alpha: Float[Tensor, "B *S"] | None = None,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Disagree where the ensemble is wrong (LDR paper, equations 4 to 6), on the training data itself.

    total = Σ_m CE_m + λ / (M − 1) · mean_n α_n · (sum over pairs): M times equation 6, with the pair term averaged over
    both choices of the predicted class. α_n is the loss of the mean logits on example n, divided by the squared mean of
    that loss over the batch. No gradient flows through α_n. Equation 17 is the case M = 2 and λ = 2.

    Args:
        logits: Of members.
        labels: Their classes ``[B]``.
        strength: λ.
        disagreement: The loss of agreeing: ``"a2d"``, or a function of log-probabilities.
        weight: ``"loss"``, or ``"inverse"``: 1/p_y instead of −log p_y as the numerator of α_n (appendix A.14).
        alpha: α_n of each example, if it is known already. By default `hardness` of these logits.
        example_weights: Weights of examples ``[B]``: all means over the batch become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` (of the mean probabilities), ``agreement``
        (the mean over pairs and examples), ``weighted_agreement`` (with α_n).

    >>> ldr(torch.zeros(2, 1, 2), torch.tensor([0]), strength=1.0).total / math.log(2)  # 2 + log 2 · 1 / log 2² · log 2
    tensor(3.4427)
    """
    logits, labels, example_weights = examples(logits, labels, example_weights, interacting="ldr")
    checks.one_of("weight", weight, ("loss", "inverse"))
    if disagreement == "a2d" and pair_pass.takes(logits):
        members, batch, classes = checks.member_outputs(logits, "logits")
        checks.class_targets(labels, batch, classes, soft=False)
        _check_pairs(members, classes)
        at_label, *of_pairs = pair_pass.pair_statistics(logits, labels)
        parts, pairs = _losses(at_label, example_weights), _agreement(*of_pairs, classes="both")
    else:
        members, parts, log_probs = _fitted(logits, labels, example_weights)
        _check_pairs(members, logits.shape[-1])
        pairs = _pairs(log_probs) if disagreement == "a2d" else _per_example(disagreement, log_probs)
    alpha = hardness(logits, labels, weight, example_weights) if alpha is None else alpha.detach().flatten()
    weighted = losses.batch_mean(alpha * pairs, example_weights)
    count = members * (members - 1) / 2
    parts |= {"agreement": losses.batch_mean(pairs, example_weights) / count, "weighted_agreement": weighted / count}
    return LossParts(parts["member_loss"].sum() + strength / (members - 1) * weighted, parts)


@arguments.positions("examples")
def hardness(
    logits: Float[Tensor, "M B C"],
    labels: Int[Tensor, " B"],
    weight: Literal["loss", "inverse"] = "loss",
    example_weights: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """α_n (LDR paper, equation 4), without a gradient. Its denominator is at least `LEAST_LOSS` squared.

    >>> hardness(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2])) * math.log(4)  # equal losses: 1 / mean loss
    tensor([1., 1., 1.])
    """
    checks.member_outputs(logits, "logits")
    with torch.no_grad():
        loss = losses.cross_entropy(pooling.mean_output(logits), labels)
        scale = losses.batch_mean(loss, example_weights).clamp_min(LEAST_LOSS).square()
        return (loss if weight == "loss" else loss.clamp_max(_HARDEST).exp()) / scale


@arguments.positions("examples")
def disagreement_pull(
    logits: Float[Tensor, "M B C"],
    labels: Int[Tensor, " B"],
    *,
    strength: float | Float[Tensor, ""],
    weight: Literal["loss", "inverse"] = "loss",
    alpha: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "M B"]:
    """Gradient of `ldr`'s disagreement at a label's probability, in units of the cross-entropy's (LDR paper, eq. 7).

    ∂/∂p_y^m = (−1 + pull) / p_y^m    with    pull = λ α_n / (2(M − 1)) · Σ_l k p_y^m (2p_y^l − 1) / C,

    C = p_y^m (1 − p_y^l) + p_y^l (1 − p_y^m) in [0, 1], and k of the two members m and l predicting y. With pull > 1
    the objective lowers the member's probability of the label. With |pull| > 1 the disagreement term dominates
    (equations 22 and 24). Negative numbers add to the cross-entropy. Differs from equations 7 and 21, which are k = 1
    for two members: with y predicted by both k is 2, and with y predicted by m alone p_y^l is at most ½, so that the
    two terms do not clash.

    For members that are alike and sure of the label, pull is at most λ / (2L²), with L the mean loss of the batch as in
    α_n, and it is near that limit for examples of the *smallest* loss. So λ > 2L² trains such members away from the
    labels that they have learnt.

    Args:
        logits: Of members, M ≥ 2.
        labels: Their classes.
        strength: λ. Equation 17 is λ = 2 for two members.
        weight: As in `ldr`. With α_n = γ/p_y (equation 24) the term dominates if |2p_y^l − 1| ≥ 1/γ (equations 8 and
            25), and for every p_y^m exactly if γ|2p_y^l − 1| ≥ max(p_y^l, 1 − p_y^l).
        alpha: α_n of each example, if it is known already. By default `hardness` of these logits.

    Returns:
        Pull of every member and example. It may overflow to infinity for two members that are certain of the label, and
        is 0 where α_n has underflowed to 0.

    >>> sure = torch.tensor([0.9, 0.1]).log().expand(2, 1, 2)
    >>> disagreement_pull(sure, torch.tensor([0]), strength=2.0, alpha=torch.ones(1))  # 2 · 0.9 · 0.8 / 0.18
    tensor([[8.0000],
            [8.0000]])
    """
    members, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    checks.one_of("weight", weight, ("loss", "inverse"))
    _check_pairs(members, classes)
    alpha = hardness(logits, labels, weight) if alpha is None else alpha
    if tuple(alpha.shape) != (batch,):
        checks.refuse("alpha", f"have shape [B={batch}]", checks.shape_text(alpha.shape))
    log_probs = checks.full_precision(logits).log_softmax(-1)
    log_p = losses.at_label(log_probs, labels)  # [M, B]
    is_label = torch.nn.functional.one_hot(labels.long(), classes).bool()
    log_rest = log_probs.masked_fill(is_label, -math.inf).logsumexp(-1)
    own, other = (log_p.unsqueeze(1), log_rest.unsqueeze(1)), (log_p.unsqueeze(0), log_rest.unsqueeze(0))  # [m, l, B]
    log_c = torch.logaddexp(own[0] + other[1], other[0] + own[1])
    ruled_out = torch.isneginf(torch.maximum(own[0], other[0]))  # by both, so that k is 0
    share = torch.where(ruled_out, 0.0, (alpha.log() + own[0] - log_c).exp())
    predicts = (log_probs.argmax(-1) == labels).to(share.dtype)
    count = predicts.unsqueeze(1) + predicts.unsqueeze(0)
    terms = count * share * (other[0].exp() - other[1].exp())
    itself = torch.eye(members, dtype=torch.bool, device=terms.device).unsqueeze(2)
    return strength / (2 * (members - 1)) * terms.masked_fill(itself, 0.0).sum(1)


def _check_pairs(members: int, classes: int) -> None:
    if members < 2:
        checks.refuse("logits", "hold at least two members that can disagree", members)
    if classes < 2:
        checks.refuse("logits", "hold at least two classes", classes)


_HARDEST = 80.0
"""Upper bound of a loss whose exponential, 1/p_y, is taken: larger ones overflow in float32."""
_TINY = 1e-30
LEAST_SHARE = 1e-3
"""Lower bound of the frequency of a class in a batch, whose logarithm is taken."""


def _fitted(logits: Tensor, labels: Tensor, example_weights: Tensor | None) -> tuple[int, dict[str, Tensor], Tensor]:
    """The number of members, cross-entropies of members and ensemble as parts, and log-probabilities ``[M, B, C]``."""
    members, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    log_probs = checks.full_precision(logits).log_softmax(-1)
    return members, _losses(losses.at_label(log_probs, labels), example_weights), log_probs


def _losses(at_label: Float[Tensor, "M B"], example_weights: Tensor | None) -> dict[str, Tensor]:
    """Cross-entropies of members and ensemble as parts, from log-probabilities of labels."""
    member_loss = -losses.batch_mean(at_label, example_weights)
    ensemble = losses.batch_mean(math.log(len(at_label)) - at_label.detach().logsumexp(0), example_weights)
    return {"member_loss": member_loss, "individual": member_loss.mean(), "ensemble": ensemble}


def _per_example(disagreement: Disagreement, log_probs: Tensor) -> Tensor:
    if not callable(disagreement):
        checks.one_of("disagreement", disagreement, ("a2d",))
    assert callable(disagreement)
    values = disagreement(log_probs)
    if values.shape != log_probs.shape[1:2]:
        checks.refuse("disagreement", "return one number per example, [B]", list(values.shape))
    return values


def _pairwise_information(probs: Float[Tensor, "M U C"], marginal: Float[Tensor, "M C"]) -> Float[Tensor, ""]:
    """Mutual information of two members' predictions, averaged over pairs. M pairs are computed at a time."""
    members, examples, _ = probs.shape
    if members < 2:
        checks.refuse("unlabelled", "hold at least two members that can differ", members)
    total = probs.new_zeros(())
    for shift in range(1, members):
        other = probs.roll(shift, 0)
        joint = probs.transpose(1, 2) @ other / examples  # [M, C, C]
        product = marginal.unsqueeze(2) * marginal.roll(shift, 0).unsqueeze(1)
        total = total + (joint * (joint.clamp_min(_TINY).log() - product.clamp_min(_TINY).log())).sum()
    return total / (members * (members - 1))

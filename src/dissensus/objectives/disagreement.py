"""Members that disagree on purpose: on other data (A2D, DivDis), or on examples that the ensemble finds hard (LDR)."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.axes import LossParts

Disagreement = Literal["a2d"] | Callable[[Tensor], Tensor]
"""A name, or a function of members' log-probabilities ``[M, B, C]``: what pairs of members lose by agreeing, ``[B]``,
summed over the M(M − 1)/2 pairs."""
Classes = Literal["both", "earlier"]
"""Whose class a pair is to disagree on: each one's in turn, or that of the member that comes first."""
LEAST_LOSS = 1e-3
"""What the mean loss of a batch is held above, where weights are divided by it."""


def pair_agreement(logits: Float[Tensor, "M B C"], classes: Classes = "both") -> Float[Tensor, " B"]:
    """A2D's loss of agreeing (LDR paper, equation 3), summed over all pairs of members.

    For a class ŷ that one of a pair predicts, −log(p^m (1 − p^l) + p^l (1 − p^m)), averaged over the two choices of
    ŷ, so that members can be permuted; with ``classes="earlier"`` ŷ is that of the earlier member, as in the original,
    which trains members one after the other. All pairs take one gather: the loss reads p^l only at the class that m
    predicts. Finite for any finite logits: 1 − p at a member's own class is the sum of its other classes.

    >>> pair_agreement(torch.zeros(2, 1, 2))  # −log(¼ + ¼)
    tensor([0.6931])
    """
    members, _, width = checks.member_outputs(logits, "logits")
    checks.one_of("classes", classes, ("both", "earlier"))
    if members < 2:
        checks.refuse("logits", "hold at least two members that can disagree", members)
    if width < 2:
        checks.refuse("logits", "hold at least two classes", width)
    return _pairs(checks.full_precision(logits).log_softmax(-1), classes)


def _pairs(log_probs: Float[Tensor, "M B C"], classes: Classes = "both") -> Float[Tensor, " B"]:
    own = log_probs.argmax(-1)  # [M, B]
    at, others = _AtOwnClasses.apply(log_probs, own)
    own, at, others = own.T, at.transpose(0, 1), others.T  # [B, m], [B, l, m], [B, m]
    same = own.unsqueeze(2) == own.unsqueeze(1)
    apart = torch.where(same, -1.0, at)  # elsewhere p ≤ ½, and the logarithm is safe
    without = torch.where(same, others.unsqueeze(2), torch.log1p(-apart.exp()))
    mine, mine_without = at.diagonal(dim1=1, dim2=2).unsqueeze(1), others.unsqueeze(1)
    agree = -torch.logaddexp(mine + without, at + mine_without)  # [B, l, m]
    if classes == "earlier":
        return agree.tril(-1).sum((1, 2))
    return (agree.sum((1, 2)) - agree.diagonal(dim1=1, dim2=2).sum(1)) / 2


class _AtOwnClasses(torch.autograd.Function):
    """What pairs look at: every member's log-probability of the class that each one names, and each member's own of all
    the others, log(1 − p). Both gradients go into one tensor, where autograd would fill and add three of that size."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_probs: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        others = log_probs.scatter(2, own.unsqueeze(2), -math.inf).logsumexp(-1)  # [m, B]
        return log_probs.gather(2, own.T.expand(len(own), -1, -1)), others  # [l, B, m]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs, output[1])

    @staticmethod
    def _shares(log_probs: Tensor, own: Tensor, others: Tensor) -> Tensor:
        """What each other class has of 1 − p."""
        nothing = torch.full_like(others, -math.inf).unsqueeze(2)
        return (log_probs - others.unsqueeze(2)).scatter_add_(2, own.unsqueeze(2), nothing).exp()

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> tuple[Tensor, Tensor]:
        change, (log_probs, own, others) = changes[0], ctx.saved_tensors
        shares = _AtOwnClasses._shares(log_probs, own, others)
        return change.gather(2, own.T.expand(len(own), -1, -1)), (shares * change).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_probs, own, others = ctx.saved_tensors
        found = _AtOwnClasses._shares(log_probs, own, others) * grads[1].unsqueeze(2)
        return found.scatter_add_(2, own.T.expand(len(own), -1, -1), grads[0]), None


def a2d(
    logits: Float[Tensor, "M B C"],
    labels: Tensor,
    *,
    unlabelled: Float[Tensor, "M U C"],
    strength: float | Float[Tensor, ""] = 1.0,
    classes: Classes = "both",
) -> LossParts:
    """Fit the labels, and disagree on other data (A2D; LDR paper, equations 1 to 3), all pairs at once.

    total = Σ_m CE_m + λ / (M − 1) · mean over unlabelled examples of the sum over pairs: M times the paper's objective.
    Differs from the original, which trains members one after the other against frozen ones (that is ``fit(...,
    sequential=True)`` with ``classes="earlier"``), and from both papers in taking the mean over the two members whose
    class may be meant.

    Args:
        logits: Of members on labelled data.
        labels: Their classes ``[B]``.
        unlabelled: Of members on the data to disagree on.
        strength: λ.
        classes: Whose class a pair is to disagree on.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` (of the mean probabilities), ``agreement`` (the
        mean over pairs and unlabelled examples).

    >>> a2d(torch.zeros(2, 1, 2), torch.tensor([0]), unlabelled=torch.zeros(2, 3, 2)).total / math.log(2)
    tensor(3.)
    """
    members, parts, _ = _fitted(logits, labels)
    pairs = pair_agreement(unlabelled, classes).mean()
    parts["agreement"] = pairs / (members * (members - 1) / 2)
    return LossParts(parts["member_loss"].sum() + strength / (members - 1) * pairs, parts)


def divdis(
    logits: Float[Tensor, "M B C"],
    labels: Tensor,
    *,
    unlabelled: Float[Tensor, "M U C"],
    strength: float | Float[Tensor, ""] = 1.0,
    balance: float | Float[Tensor, ""] = 10.0,
) -> LossParts:
    """Fit the labels, and say other things of other data: DivDis' mutual information between members' predictions.

    For each pair, KL of the joint distribution of the two predictions (the batch mean of the outer product of their
    probabilities) from the product of its marginals; and for each member KL of its mean prediction from the label
    frequencies of the batch, which keeps members from saying nonsense. total = Σ_m CE_m + M · (λ · mean over pairs +
    μ · mean over members). In logarithms that stand zeros, which the reference's do not; a class that no label of the
    batch has counts as a share of `LEAST_SHARE`.

    Args:
        logits: Of members on labelled data.
        labels: Their classes ``[B]``.
        unlabelled: Of members on the data to differ on.
        strength: λ.
        balance: μ, the weight of the second term.
    """
    members, parts, _ = _fitted(logits, labels)
    checks.member_outputs(unlabelled, "unlabelled")
    probs = checks.full_precision(unlabelled).softmax(-1)
    marginal = probs.mean(1)  # [M, C]
    information = _pairwise_information(probs, marginal)
    frequencies = torch.nn.functional.one_hot(labels, logits.shape[-1]).to(probs.dtype).mean(0)
    log_marginal = marginal.clamp_min(_TINY).log()
    drift = (marginal * (log_marginal - frequencies.clamp_min(LEAST_SHARE).log())).sum(-1).mean()
    parts |= {"information": information, "drift": drift}
    return LossParts(parts["member_loss"].sum() + members * (strength * information + balance * drift), parts)


def ldr(
    logits: Float[Tensor, "M B C"],
    labels: Tensor,
    *,
    strength: float | Float[Tensor, ""],
    disagreement: Disagreement = "a2d",
    weight: Literal["loss", "inverse"] = "loss",
    alpha: Float[Tensor, " B"] | None = None,
) -> LossParts:
    """Disagree where the ensemble is wrong (LDR paper, equations 4 to 6), on the training data itself.

    total = Σ_m CE_m + λ / (M − 1) · mean_n α_n · (sum over pairs): M times equation 6, with the pair term taken both
    ways. α_n is the loss of the mean logits on example n over the squared mean of that over the batch, and no gradient
    goes through it. Equation 17 is this for M = 2 and λ = 2.

    Args:
        logits: Of members.
        labels: Their classes ``[B]``.
        strength: λ.
        disagreement: What pairs lose by agreeing: ``"a2d"``, or a function of log-probabilities.
        weight: ``"loss"``, or ``"inverse"``: 1/p_y instead of −log p_y on top of α_n (appendix A.14).
        alpha: α_n of each example, where it is known from elsewhere; by default `hardness` of these very logits.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` (of the mean probabilities), ``agreement``
        (the mean over pairs and examples), ``weighted_agreement`` (with α_n).
    """
    members, parts, log_probs = _fitted(logits, labels)
    checks.one_of("weight", weight, ("loss", "inverse"))
    if members < 2:
        checks.refuse("logits", "hold at least two members that can disagree", members)
    if logits.shape[-1] < 2:
        checks.refuse("logits", "hold at least two classes", logits.shape[-1])
    pairs = _pairs(log_probs) if disagreement == "a2d" else _told(disagreement, log_probs)
    alpha = hardness(logits, labels, weight) if alpha is None else alpha.detach()
    weighted = (alpha * pairs).mean()
    count = members * (members - 1) / 2
    parts |= {"agreement": pairs.mean() / count, "weighted_agreement": weighted / count}
    return LossParts(parts["member_loss"].sum() + strength / (members - 1) * weighted, parts)


def hardness(
    logits: Float[Tensor, "M B C"], labels: Int[Tensor, " B"], weight: Literal["loss", "inverse"] = "loss"
) -> Float[Tensor, " B"]:
    """α_n (LDR paper, equation 4), without a gradient; its denominator is held above `LEAST_LOSS` squared.

    >>> hardness(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2])) * math.log(4)  # all alike: one over the mean loss
    tensor([1., 1., 1.])
    """
    checks.member_outputs(logits, "logits")
    with torch.no_grad():
        loss = losses.cross_entropy(pooling.mean_output(logits), labels)
        scale = loss.mean().clamp_min(LEAST_LOSS).square()
        return (loss if weight == "loss" else loss.clamp_max(_HARDEST).exp()) / scale


_HARDEST = 80.0
"""What a loss is held below where 1/p_y is taken, which is its exponential: beyond, float32 ends."""
_TINY = 1e-30
LEAST_SHARE = 1e-3
"""What the share of a class among a batch's labels is held above, where its logarithm is taken."""


def _fitted(logits: Tensor, labels: Tensor) -> tuple[int, dict[str, Tensor], Tensor]:
    """Cross-entropy of members and ensemble; and log-probabilities, of which one pass over all classes is enough."""
    members, batch, classes = checks.member_outputs(logits, "logits")
    checks.class_targets(labels, batch, classes, soft=False)
    log_probs = checks.full_precision(logits).log_softmax(-1)
    at_label = losses.at_label(log_probs, labels)  # [M, B]
    own = -at_label.mean(-1)
    ensemble = (math.log(members) - at_label.detach().logsumexp(0)).mean()
    return members, {"member_loss": own, "individual": own.mean(), "ensemble": ensemble}, log_probs


def _told(disagreement: Disagreement, log_probs: Tensor) -> Tensor:
    if not callable(disagreement):
        checks.one_of("disagreement", disagreement, ("a2d",))
    assert callable(disagreement)
    found = disagreement(log_probs)
    if found.shape != log_probs.shape[1:2]:
        checks.refuse("disagreement", "give one number per example, [B]", list(found.shape))
    return found


def _pairwise_information(probs: Float[Tensor, "M U C"], marginal: Float[Tensor, "M C"]) -> Float[Tensor, ""]:
    """Mutual information of two members' predictions, averaged over pairs; M pairs at a time."""
    members, examples, _ = probs.shape
    if members < 2:
        checks.refuse("unlabelled", "hold at least two members that can differ", members)
    total = probs.new_zeros(())
    for shift in range(1, members):
        other = probs.roll(shift, 0)
        joint = probs.transpose(1, 2) @ other / examples  # [M, C, C]
        apart = marginal.unsqueeze(2) * marginal.roll(shift, 0).unsqueeze(1)
        total = total + (joint * (joint.clamp_min(_TINY).log() - apart.clamp_min(_TINY).log())).sum()
    return total / (members * (members - 1))

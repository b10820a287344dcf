"""Ensemble loss = individual loss − diversity, for any loss (collusion paper, definitions 4.1 and 4.2)."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dissensus import arguments, checks, dense, losses, pooling
from dissensus.axes import Decomposition, PerExampleLoss, Pool
from dissensus.pooling import Weights

POOLS: tuple[Pool, ...] = ("probability", "score", "vote")


@arguments.arrays
def decompose(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    *,
    loss: str | PerExampleLoss,
    pool: Pool,
    weights: Weights = None,
    class_axis: int = 2,
    ignore_index: int | None = None,
) -> Decomposition:
    """Split the ensemble's loss into the members' own loss and their diversity, per example.

    DIV = Σ_j w_j L(f_j, y) − L(f̄, y)

    (collusion paper, definition 4.2.) The members' losses say how good they are alone, the ensemble's how good they are
    pooled, and diversity is the difference: what pooling is worth.

    Args:
        outputs: Raw member outputs f_j ``[M, B, C]``, of the kind that the loss takes (see `dissensus.losses`).
        targets: y, as the loss takes them.
        loss: A name from `dissensus.losses`, or a callable ``(outputs [B, C], targets) -> [B]``. A callable sees raw
            outputs under ``pool="score"``, log-probabilities under ``"probability"``, votes under ``"vote"``.
        pool: ``"score"`` averages raw outputs, ``"probability"`` the probabilities of classes or labels, or members'
            densities (``gaussian_nll``, ``poisson``). ``"vote"`` needs logits of classes. See `dissensus.losses`.
        weights: w_j ``[M]``, non-negative with sum one; equal by default.
        class_axis: Axis of the classes of dense outputs ``[M, B, C, *S]``; -1 for language models, ``[M, B, T, V]``.
        ignore_index: Label of positions that do not count, such as -100. They give NaN, so that ``nanmean`` is the mean
            over those that do.

    Returns:
        ``ensemble``, ``individual`` and ``diversity``, each ``[B]``, with diversity = individual − ensemble. Diversity
        is at least zero wherever the loss is convex in what is averaged. It is zero for M=1 and for identical members.
        NaN outputs give NaN at their own examples only. A member of weight zero is absent: even where its loss is
        infinite or NaN, values and gradients are those of the ensemble without it. Half precision is taken as float32.
        Dense outputs with targets ``[B, *S]`` give ``[B, *S]`` each.

    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> decompose(outputs, targets, loss="squared_error", pool="score")
    Decomposition(ensemble=tensor([0.2500]), individual=tensor([1.2500]), diversity=tensor([1.]))
    """
    if outputs.ndim > 3 or ignore_index is not None:
        flat = dense.positions(outputs, targets, class_axis=class_axis, ignore_index=ignore_index)
        parts = decompose(flat.outputs, flat.targets, loss=loss, pool=pool, weights=weights)
        if flat.example_weights is not None:
            parts = [part.masked_fill(flat.example_weights == 0, torch.nan) for part in parts]
        return Decomposition(*(dense.unflat(part, outputs, class_axis) for part in parts))
    members, _, width = checks.member_outputs(outputs)
    check_pool(loss, pool)
    losses.check_target_values(loss, targets, width)
    losses.tell_of_mean(loss, width)
    outputs = checks.full_precision(outputs)
    member_weights = None if weights is None else checks.member_weights(weights, members, outputs)
    member_loss, ensemble = member_and_ensemble_loss(outputs, targets, loss=loss, pool=pool, weights=member_weights)
    individual = pooling.mean_output(member_loss, member_weights)
    return Decomposition(ensemble, individual, individual - ensemble)


def check_pool(loss: str | PerExampleLoss, pool: str) -> None:
    """Refuse a pool that the loss's outputs cannot go through."""
    checks.one_of("pool", pool, POOLS)
    known = losses.known(loss)
    if known is None or pool in known.pools:
        return
    if pool == "vote" and known.takes == "logits":
        checks.refuse("loss", "be 'zero_one' for pool 'vote', since votes are no probabilities", losses.text_of(loss))
    pools = " or ".join(map(repr, known.pools))
    requirement = f"be {pools} for loss {losses.text_of(loss)}, which takes {known.takes}"
    fix = ""
    if known.takes == "gaussian":
        fix = "The loss is not convex in mean and log-variance together, so that diversity of scores may be negative."
    checks.refuse("pool", requirement, repr(pool), fix)


def check_curved(loss: str | PerExampleLoss) -> None:
    """Refuse a loss whose second derivative says nothing about diversity under pool ``"score"``."""
    losses.check_trainable(loss)
    check_pool(loss, "score")
    if losses.name_of(loss) == "quantile":
        got = "'quantile', which is made of straight lines"
        fix = "Use decompose or `augmented`, which need no curvature."
        checks.refuse("loss", "be twice differentiable", got, fix)


def member_and_ensemble_loss(
    outputs: Float[Tensor, "M B C"], targets: Tensor, *, loss: str | PerExampleLoss, pool: Pool, weights: Tensor | None
) -> tuple[Float[Tensor, "M B"], Float[Tensor, " B"]]:
    """Every member's loss and the pooled prediction's loss, each per example, without checks of values.

    Members of weight zero have a loss, and get no gradient from it: 0 · ∞ would be NaN.
    """
    outputs = pooling.absent_detached(outputs, weights)
    if pool == "probability":
        member, log_probs = member_log_probs(outputs, targets, loss)
        return member, loss_of_log_probs(pooling.pooled_log_probs(log_probs, weights), targets, loss)
    if pool == "score":
        pooled = pooling.mean_output(outputs, weights)
    else:
        pooled = pooling.vote_share(outputs, weights)
        if not isinstance(loss, str):
            outputs = pooling.ballots(outputs)
    ensemble = losses.per_member(loss, pooled.unsqueeze(0), targets).squeeze(0)
    return losses.per_member(loss, outputs, targets), ensemble


def member_log_probs(
    outputs: Float[Tensor, "M B C"], targets: Tensor, loss: str | PerExampleLoss
) -> tuple[Float[Tensor, "M B"], Float[Tensor, "M B K"]]:
    """Every member's loss, and the log-probabilities that the pool ``"probability"`` averages.

    These are of all classes; of the label alone for cross-entropy, since picking commutes with averaging (theorem 4.3);
    of each label and its opposite for labels that do not exclude others; or the log-density of the target.
    """
    known = losses.known(loss)
    if known is not None and known.density:
        member = losses.per_member(loss, outputs, targets)
        return member, -member.unsqueeze(-1)
    if known is not None and known.takes == "label_logits":
        log_probs = torch.cat([F.logsigmoid(outputs), F.logsigmoid(-outputs)], -1)
        return losses.per_member(loss, outputs, targets), log_probs
    log_probs = outputs.log_softmax(-1)
    if _at_label_only(targets, loss):
        checks.class_targets(targets, *outputs.shape[-2:])
        log_probs = losses.at_label(log_probs, targets).unsqueeze(-1)
        return -log_probs.squeeze(-1), log_probs
    return losses.per_member(loss, log_probs, targets), log_probs


def loss_of_log_probs(pooled: Float[Tensor, "B K"], targets: Tensor, loss: str | PerExampleLoss) -> Float[Tensor, " B"]:
    """The loss of pooled log-probabilities, as `member_log_probs` gives them for members."""
    known = losses.known(loss)
    if (known is not None and known.density) or _at_label_only(targets, loss):
        return -pooled.squeeze(-1)
    if known is not None and known.takes == "label_logits":
        true, false = pooled.chunk(2, -1)
        pooled = true - false
    return losses.per_member(loss, pooled.unsqueeze(0), targets).squeeze(0)


def _at_label_only(targets: Tensor, loss: str | PerExampleLoss) -> bool:
    return loss == "cross_entropy" and not targets.is_floating_point()


def mean_parts(
    member: Float[Tensor, "M B"],
    ensemble: Float[Tensor, " B"],
    weights: Tensor | None = None,
    example_weights: Float[Tensor, " B"] | None = None,
) -> dict[str, Tensor]:
    """The decomposition averaged over examples, under the names by which objectives report it.

    Returns:
        ``member_loss`` ``[M]``, their weighted mean ``individual``, ``ensemble``, and ``diversity``, their difference.

    >>> import torch
    >>> {name: part.tolist() for name, part in mean_parts(torch.tensor([[2.0], [0.5]]), torch.tensor([0.25])).items()}
    {'member_loss': [2.0, 0.5], 'individual': 1.25, 'ensemble': 0.25, 'diversity': 1.0}
    """
    member_loss = losses.batch_mean(member, example_weights)
    ensemble_loss = losses.batch_mean(ensemble, example_weights)
    individual = pooling.mean_output(member_loss, weights)
    return {
        "member_loss": member_loss,
        "individual": individual,
        "ensemble": ensemble_loss,
        "diversity": individual - ensemble_loss,
    }

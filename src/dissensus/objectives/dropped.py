"""Joint training with members dropped at random (collusion paper, appendix G.7)."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss, Pool
from dissensus.diversity.decomposition import (
    check_pool,
    loss_of_log_probs,
    mean_parts,
    member_and_ensemble_loss,
    member_log_probs,
)
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples
from dissensus.randomness import random_bits


@Declaration(draw=True, sweepable=("drop",), example_weights="shared")
def learner_dropout(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    *,
    drop: float | Float[Tensor, ""],
    loss: str | PerExampleLoss,
    pool: Pool,
    per: Literal["batch", "example"] = "batch",
    draw: int | Tensor = 0,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Train jointly without a random share of the members at each step: K · L(mean of the K kept members, y).

    (Collusion paper, appendix G.7, an attempt to prevent collusion that did not help.) ``int(M · drop)`` members are
    dropped, but at least one is kept. Dropped members get no gradient from this step. The kept ones are trained as
    `joint` trains K members, and ``drop = 0`` is `joint`. Differs from the authors' code (alanjeffares/joint-ensembles
    on GitHub), which draws a mask per example and member, so that the number of kept members varies;
    ``per="example"`` is close to that.

    Args:
        outputs: Raw member outputs f_j ``[M, B, C]``.
        targets: y, as the loss takes them.
        drop: Share of members to drop, from 0 to 1.
        loss: A name from `dissensus.losses`, or a callable per example (see `dissensus.diversity.decompose`).
        pool: ``"probability"`` or ``"score"``.
        per: Drop the same members for a whole batch, as the paper does, or draw anew for every example.
        draw: The only number that the choice depends on. `dissensus.fit` and `dissensus.sweep` pass a new one at every
            step of every run.
        example_weights: Weights of examples ``[B]``: all means over the batch become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` and ``diversity`` of *all* members, and
        ``kept_ensemble``, the loss of the kept members' pooled prediction, which is trained.

    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> learner_dropout(outputs, targets, drop=0.5, loss="squared_error", pool="score").total in (2.25, 0.25)
    True
    """
    outputs, targets, example_weights = examples(outputs, targets, example_weights, interacting="learner_dropout")
    members, batch, _ = checks.member_outputs(outputs)
    if pool == "vote":
        checks.refuse("pool", "be 'probability' or 'score'", "'vote'")
    check_pool(loss, pool)
    losses.check_trainable(loss)
    checks.one_of("per", per, ("batch", "example"))
    if isinstance(drop, int | float):
        checks.number("drop", drop, 0, 1)
    outputs = checks.full_precision(outputs)
    member, ensemble = member_and_ensemble_loss(outputs, targets, loss=loss, pool=pool, weights=None)
    keep, count = _kept(members, batch if per == "example" else 1, drop, draw, outputs)
    if pool == "probability":
        _, log_probs = member_log_probs(outputs, targets, loss)
        pooled = log_probs.masked_fill(~keep.unsqueeze(-1), -torch.inf).logsumexp(0) - count.log()
        kept_losses = loss_of_log_probs(pooled, targets, loss)
    else:
        pooled = outputs.masked_fill(~keep.unsqueeze(-1), 0.0).sum(0) / count
        kept_losses = losses.per_member(loss, pooled.unsqueeze(0), targets).squeeze(0)
    kept_loss = losses.batch_mean(kept_losses, example_weights)
    parts = mean_parts(member, ensemble, example_weights=example_weights)
    return LossParts(count * kept_loss, {**parts, "kept_ensemble": kept_loss})


def _kept(
    members: int, width: int, drop: float | Tensor, draw: int | Tensor, like: Tensor
) -> tuple[Bool[Tensor, "M w"], Float[Tensor, ""]]:
    """Which members are kept, and how many. No value is read, so that runs with different shares train together."""
    share = (
        drop.to(like) if isinstance(drop, Tensor) else like.new_full((), drop)
    )  # no copy from the host, so that a CUDA graph can hold it
    dropped = torch.floor(members * share + 1e-4).clamp_max(members - 1)  # 0.6 · 5 is 3 despite rounding
    key = draw if isinstance(draw, Tensor) else like.new_full((), draw, dtype=torch.int64)
    bits = random_bits((members, width), key, torch.zeros_like(key))
    rank = bits.argsort(0).argsort(0)
    return rank >= dropped, members - dropped

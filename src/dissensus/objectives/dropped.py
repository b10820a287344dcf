"""Joint training with members left out at random (collusion paper, appendix G.7)."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus import checks, losses
from dissensus.axes import LossParts, PerExampleLoss, Pool
from dissensus.diversity.decomposition import check_pool, member_and_ensemble_loss
from dissensus.randomness import random_bits


def learner_dropout(
    outputs: Float[Tensor, "M B C"],
    targets: Tensor,
    *,
    drop: float | Float[Tensor, ""],
    loss: str | PerExampleLoss,
    pool: Pool,
    per: Literal["batch", "example"] = "batch",
    draw: int | Tensor = 0,
) -> LossParts:
    """Train jointly, each time without a random share of the members: K · L(mean of the K members kept, y).

    (Collusion paper, appendix G.7, an attempt to break collusion that did not pay.) ``int(M · drop)`` members are left
    out, one at least is kept, and members left out get no gradient from this step; those kept are trained as `joint`
    would train K members, to which this is equal at ``drop = 0``. Differs from the authors' code, which draws a mask
    per example and member, with a number of members that varies: ``per="example"`` is near that.

    Args:
        outputs: Raw member outputs f_j ``[M, B, C]``.
        targets: y, as the loss takes them.
        drop: Share of members that is left out, from 0 to 1.
        loss: A name from `dissensus.losses`, or a callable per example (see `dissensus.diversity.decompose`).
        pool: ``"probability"`` or ``"score"``.
        per: Leave out the same members for a whole batch, as the paper does, or others for every example.
        draw: What the choice depends on, and nothing else. `dissensus.fit` and `dissensus.sweep` give every step of
            every run a number of its own.

    Returns:
        ``parts``: ``member_loss`` ``[M]``, ``individual``, ``ensemble`` and ``diversity`` of *all* members, and
        ``kept_ensemble``, what is trained.

    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> learner_dropout(outputs, targets, drop=0.5, loss="mse", pool="score").total in (2.25, 0.25)
    True
    """
    members, batch, _ = checks.member_outputs(outputs)
    check_pool(loss, pool)
    losses.check_trainable(loss)
    if pool == "vote":
        checks.refuse("pool", "be 'probability' or 'score'", "'vote'")
    checks.one_of("per", per, ("batch", "example"))
    if isinstance(drop, int | float):
        checks.number("drop", drop, 0, 1)
    outputs = checks.full_precision(outputs)
    member, ensemble = member_and_ensemble_loss(outputs, targets, loss=loss, pool=pool, weights=None)
    keep, count = _kept(members, batch if per == "example" else 1, drop, draw, outputs)
    if pool == "probability":
        chosen = outputs.log_softmax(-1).masked_fill(~keep.unsqueeze(-1), -torch.inf)
        pooled = chosen.logsumexp(0) - count.log()
    else:
        pooled = outputs.masked_fill(~keep.unsqueeze(-1), 0.0).sum(0) / count
    kept_loss = losses.per_member(loss, pooled.unsqueeze(0), targets).mean()
    member_loss, ensemble_loss = member.mean(-1), ensemble.mean()
    individual = member_loss.mean()
    parts = {
        "member_loss": member_loss,
        "individual": individual,
        "ensemble": ensemble_loss,
        "diversity": individual - ensemble_loss,
        "kept_ensemble": kept_loss,
    }
    return LossParts(count * kept_loss, parts)


def _kept(
    members: int, width: int, drop: float | Tensor, draw: int | Tensor, like: Tensor
) -> tuple[Bool[Tensor, "M w"], Float[Tensor, ""]]:
    """Who is kept, and how many; without looking at values, so that runs with other shares go together."""
    share = drop.to(like) if isinstance(drop, Tensor) else like.new_full((), drop)  # no copy: fit for a graph
    left_out = torch.floor(members * share + 1e-4).clamp_max(members - 1)  # 0.6 · 5 is 3, whatever the rounding
    key = draw if isinstance(draw, Tensor) else like.new_full((), draw, dtype=torch.int64)
    bits = random_bits((members, width), key, torch.zeros_like(key))
    rank = bits.argsort(0).argsort(0)
    return rank >= left_out, members - left_out

"""Is diversity made by opposite biases, and do members lean on each other? (collusion paper, section 6.1)"""

import logging
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks, losses, pooling
from dissensus.axes import PerExampleLoss, Pool
from dissensus.diversity.closed_forms import ambiguity, deviations
from dissensus.diversity.decomposition import check_pool, member_and_ensemble_loss
from dissensus.pooling import Weights

log = logging.getLogger("dissensus")

_NUMBERS_AT_ONCE = 2**24


@arguments.positions("outputs")
def debias(
    outputs: Float[Tensor, "M B C"], weights: Weights = None, *, pool: Literal["score", "probability"] = "score"
) -> Float[Tensor, "M B C"]:
    """Remove the constant bias of each member. The mean prediction of the ensemble does not change.

    f_j(x_i) − b_j, with b_j = 1/N Σ_i (f_j(x_i) − f̄(x_i))

    (Collusion paper, appendix C.1: of all constants that cancel in the mean, these leave the least diversity.) Pass all
    examples at once, since the bias is a mean over them. With ``pool="score"`` it acts on outputs as they are (values,
    or logits), with ``"probability"`` on the softmax of logits, and returns probabilities. Those still sum to one but
    may leave [0, 1], which is logged. Measure them by their spread (`ambiguity`), not by a logarithm.

    M=1 and identical members are returned unchanged. Outputs of `dissensus.losses.gaussian_nll` are means and
    log-variances: pass the means, ``gaussian_moments(outputs)[0]``.

    >>> debias(torch.tensor([[[1.0], [2.0]], [[3.0], [6.0]]])).squeeze(-1)
    tensor([[2.5000, 3.5000],
            [1.5000, 4.5000]])
    """
    checks.member_outputs(outputs)
    checks.one_of("pool", pool, ("score", "probability"))
    averaged = _averaged(outputs, pool)
    debiased = averaged - deviations(averaged, weights).mean(1, keepdim=True)
    if pool == "probability":
        outside = int(((debiased < 0) | (debiased > 1)).sum())
        if outside:
            log.info("debiasing took %d of %d probabilities beyond [0, 1]", outside, debiased.numel())
    return debiased


@arguments.positions("all")
def bias_share(
    outputs: Float[Tensor, "M B C"], weights: Weights = None, *, pool: Literal["score", "probability"] = "score"
) -> Float[Tensor, ""]:
    """Share of the members' spread that `debias` removes: 1 − DIV_debiased / DIV (collusion paper, Figure 3).

    Spread is squared distance (`ambiguity`): the diversity of equation 1 for values, and of the Brier score for
    probabilities. From 0 to 1, and zero without spread. With d_j = f_j − f̄, the removed part is
    Σ_j w_j ‖mean_i d_j(x_i)‖² of Σ_j w_j mean_i ‖d_j(x_i)‖². NaN if any output of a member with weight is NaN.

    >>> bias_share(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]))
    tensor(1.)
    """
    checks.member_outputs(outputs)
    checks.one_of("pool", pool, ("score", "probability"))
    apart = pooling.weighed_only(deviations(_averaged(outputs, pool), weights), weights)
    spread = pooling.mean_output(apart.square().sum(-1).mean(-1), weights)
    removed = pooling.mean_output(apart.mean(1).square().sum(-1), weights)
    tiny = torch.finfo(spread.dtype).tiny
    return torch.where(spread == 0, 0.0, removed / spread.clamp_min(tiny)).clamp(0, 1)


def _averaged(outputs: Tensor, pool: str) -> Tensor:
    """The outputs that the pool averages, as they are or as probabilities, in full precision."""
    outputs = checks.full_precision(outputs)
    return outputs.softmax(-1) if pool == "probability" else outputs


@arguments.positions("examples")
def codependence(
    outputs: Float[Tensor, "M B C"],
    targets: Tensor,
    *,
    loss: str | PerExampleLoss,
    pool: Pool,
    drop: float = 0.2,
    repeats: int = 100,
    per: Literal["example", "batch"] = "example",
    seed: int = 0,
) -> Float[Tensor, " B"]:
    """The rise of the ensemble's loss, per example, when a share of members is dropped at random.

    (Collusion paper, section 6.1, Figure 4; equal weights.) ``int(M · drop)`` members are dropped, drawn anew for every
    example and repeat (``per="example"``, as in the paper) or for every repeat (``"batch"``). The mean over repeats is
    returned. Squared error needs no sampling: with K of M members kept, the expected rise is exactly
    DIV · (M − K) / (K (M − 1)) either way.

    Zero if fewer than one member is dropped, and for identical members. NaN at examples with a NaN output.

    >>> outputs, targets = torch.tensor([[[0.0]], [[2.0]], [[4.0]]]), torch.tensor([2.0])
    >>> codependence(outputs, targets, loss="squared_error", pool="score", drop=0.4)
    tensor([0.6667])
    """
    members, batch, width = checks.member_outputs(outputs)
    check_pool(loss, pool)
    losses.tell_of_mean(loss, width)
    checks.number("drop", drop, 0, 1)
    checks.count("repeats", repeats)
    checks.one_of("per", per, ("example", "batch"))
    kept = members - int(members * drop)
    if kept < 1:
        checks.refuse("drop", f"leave at least one of {members} members", drop)
    outputs = checks.full_precision(outputs)
    if kept == members:
        return outputs.new_zeros(batch).masked_fill(outputs.isnan().any(-1).any(0), torch.nan)
    name = losses.name_of(loss)
    if name in ("squared_error", "mse"):
        averaged = width if name == "mse" else 1
        return ambiguity(outputs) / averaged * (members - kept) / (kept * (members - 1))
    _, whole = member_and_ensemble_loss(outputs, targets, loss=loss, pool=pool, weights=None)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(whole)
    at_once = max(1, min(repeats, _NUMBERS_AT_ONCE // outputs.numel()))
    for start in range(0, repeats, at_once):
        count = min(at_once, repeats - start)
        draws = torch.rand(members, count, batch if per == "example" else 1, generator=generator)
        kept_members = draws.to(outputs.device).argsort(0)[:kept].expand(-1, -1, batch).flatten(1)
        index = kept_members.unsqueeze(-1).expand(-1, -1, outputs.shape[-1])
        subset = outputs.repeat(1, count, 1).gather(0, index)
        repeated = targets.repeat(count, *[1] * (targets.ndim - 1))
        _, reduced = member_and_ensemble_loss(subset, repeated, loss=loss, pool=pool, weights=None)
        total += reduced.view(count, batch).sum(0)
    return total / repeats - whole

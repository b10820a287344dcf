"""Independent training: each member on its own loss."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.axes import LossParts, PerExampleLoss
from dissensus.objectives.declaration import Declaration
from dissensus.objectives.examples import examples
from dissensus.pooling import Weights


@Declaration(
    separable=True, per_member=("weights", "smoothing"), sweepable=("smoothing",), example_weights="per_member"
)
def independent(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    *,
    loss: str | PerExampleLoss,
    weights: Weights = None,
    smoothing: float | Sequence[float] | Float[Tensor, ""] | Float[Tensor, " M"] | None = None,
    example_weights: Tensor | None = None,
) -> LossParts:
    """Train members as if each were alone: Σ_j L(f_j, y), averaged over the batch (``M · Σ_j w_j L_j`` with weights).

    The usual deep ensemble, and β = 0 of `dissensus.objectives.augmented`. Differs from the collusion paper, which
    divides by M: there each member gets 1/M of the gradient that it would get alone. A learning rate of the paper must
    be divided by M here.

    Args:
        outputs: Raw member outputs f_j.
        targets: y, as the loss takes them.
        loss: A name from `dissensus.losses`, or a callable per example.
        weights: w_j ``[M]``, the share of each member. Equal by default.
        smoothing: Label smoothing for cross-entropy on class labels: the share of the label that is spread over all
            classes. One number for all members, or one per member.
        example_weights: Weights of examples ``[B]``, or one per member ``[M, B]`` (bagging): all means over the batch
            become Σ_b w_b v_b / Σ_b w_b.

    Returns:
        ``parts``: ``member_loss`` ``[M]`` and their weighted mean, ``individual``.

    >>> outputs, targets = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])
    >>> independent(outputs, targets, loss="squared_error").total
    tensor(2.5000)
    """
    outputs, targets, example_weights = examples(outputs, targets, example_weights)
    members, _, _ = checks.member_outputs(outputs)
    losses.check_trainable(loss)
    outputs = pooling.absent_detached(checks.full_precision(outputs), weights)
    if smoothing is None:
        member_loss = losses.batch_mean(losses.per_member(loss, outputs, targets), example_weights)
    else:
        member_loss = _smoothed(outputs, targets, loss, smoothing, example_weights)
    individual = pooling.mean_output(member_loss, weights)
    return LossParts(members * individual, {"member_loss": member_loss, "individual": individual})


def _smoothed(
    outputs: Tensor,
    targets: Tensor,
    loss: str | PerExampleLoss,
    smoothing: float | Sequence[float] | Tensor,
    example_weights: Tensor | None,
) -> Float[Tensor, " M"]:
    if loss not in ("cross_entropy", losses.cross_entropy):
        checks.refuse("smoothing", "come with loss='cross_entropy'", repr(loss))
    if isinstance(smoothing, Tensor):
        share = smoothing.to(outputs)
    elif isinstance(smoothing, int | float):
        share = outputs.new_full((), smoothing)  # no copy from the host, so that a CUDA graph can hold it
    else:
        share = torch.stack([outputs.new_full((), value) for value in smoothing])
    if share.ndim and tuple(share.shape) != (len(outputs),):
        checks.refuse("smoothing", f"be one number, or one per member (M={len(outputs)})", list(share.shape))
    if not isinstance(smoothing, Tensor):
        for value in [smoothing] if isinstance(smoothing, int | float) else smoothing:
            checks.number("smoothing", value, 0, 1)
    at_label = losses.batch_mean(losses.cross_entropy(outputs, targets), example_weights)
    if example_weights is None:
        over_classes = -outputs.log_softmax(-1).mean((-2, -1))
    else:
        over_classes = -losses.batch_mean(outputs.log_softmax(-1).mean(-1), example_weights)
    return (1 - share) * at_label + share * over_classes

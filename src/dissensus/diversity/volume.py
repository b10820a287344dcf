"""The volume spanned by members' non-maximal predictions: the ensemble diversity of the ADP paper."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import arguments, checks
from dissensus.pooling import mean_probability

LEAST = -1e5
"""Lower bound of log-probabilities. A member that gives nothing to other classes gets a uniform direction."""
JITTER = 1e-6
"""Added to the diagonal of the Gram matrix, as in the paper's code, so that its logarithm is always finite."""


@arguments.positions("examples")
def nonmaximal_volume(
    log_probs: Float[Tensor, "M B C"], labels: Int[Tensor, " B"] | None = None, *, log: bool = False
) -> Float[Tensor, " B"]:
    """ED (ADP paper, equations 2 to 4): the squared volume of members' unit vectors of non-maximal predictions.

    The class y is removed from each member's probabilities, and the rest is scaled to length one. det(MᵀM) of these
    vectors is 1 if members put the rest of their probability on different classes, and 0 if two of them are parallel.
    Vectors are normalised in log space and then computed in float64, with `JITTER` on the diagonal. The result is
    finite for identical members, for more members than other classes, and for logits that differ by 10⁴. The smallest
    value for K members is about K · JITTER^(K − 1). NaN at examples with a NaN output.

    Args:
        log_probs: Of members. Logits give the same result, since normalisation cancels.
        labels: y of each example. By default the class with the largest mean probability.
        log: Return the logarithm, which distinguishes small volumes.

    >>> apart = torch.tensor([[[0.6, 0.4, 0.0]], [[0.6, 0.0, 0.4]]]).log()
    >>> alike = torch.tensor([[[0.6, 0.3, 0.1]], [[0.8, 0.15, 0.05]]]).log()
    >>> nonmaximal_volume(apart).round(decimals=4), nonmaximal_volume(alike).round(decimals=4)
    (tensor([1.]), tensor([0.]))
    """
    _, batch, classes = checks.member_outputs(log_probs, "log_probs")
    if classes < 2:
        checks.refuse("log_probs", "hold at least two classes", classes)
    if labels is None:
        labels = mean_probability(log_probs).argmax(-1)
    checks.class_targets(labels, batch, classes, soft=False)
    volume = log_determinant(gram(log_probs, labels)).masked_fill(log_probs.isnan().any(-1).any(0), torch.nan)
    return (volume if log else volume.exp()).to(checks.full_precision(log_probs).dtype)


def gram(log_probs: Float[Tensor, "M B C"], labels: Int[Tensor, " B"]) -> Float[Tensor, "B M M"]:
    """Products of `nonmaximal_units`, with `JITTER` on the diagonal; float64."""
    units = nonmaximal_units(log_probs, labels)
    return units @ units.transpose(1, 2) + JITTER * torch.eye(len(log_probs), device=units.device, dtype=units.dtype)


def nonmaximal_units(log_probs: Float[Tensor, "M B C"], labels: Int[Tensor, " B"]) -> Float[Tensor, "B M C"]:
    """Members' probabilities without class y, scaled to length one (ADP paper, equation 3); 0 at y; float64.

    >>> nonmaximal_units(torch.tensor([[[0.3, 0.4, 0.3]]]).log(), torch.tensor([1])).round(decimals=4)
    tensor([[[0.7071, 0.0000, 0.7071]]], dtype=torch.float64)
    """
    hot = torch.nn.functional.one_hot(labels.long(), log_probs.shape[-1]).bool()
    others = log_probs.double().clamp_min(LEAST).masked_fill(hot, -torch.inf)
    return (others - 0.5 * (2 * others).logsumexp(-1, keepdim=True)).exp().transpose(0, 1)


def log_determinant(matrix: Float[Tensor, "B M M"]) -> Float[Tensor, " B"]:
    """Log-determinant of positive definite matrices, by elimination in M steps, which a CUDA graph can hold.

    The same steps compute the inverse, which is the gradient, so that a backward pass is one product. Accurate for a
    diagonal of about one, as in Gram matrices of unit vectors. The inverse loses digits if the diagonal is large.

    >>> round(log_determinant(torch.tensor([[[4.0, 2.0], [2.0, 3.0]]])).exp().item(), 4)
    8.0
    """
    value, _ = _LogDeterminant.apply(matrix)
    return value


class _LogDeterminant(torch.autograd.Function):
    """The logarithm of the determinant, and the inverse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        return _eliminated(matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        (inverse,) = ctx.saved_tensors
        of_value, of_inverse = grads
        transposed = inverse.transpose(-2, -1)
        grad = None if of_value is None else of_value.unsqueeze(-1).unsqueeze(-1) * transposed
        if of_inverse is None:
            return grad
        through_inverse = -transposed @ of_inverse @ transposed  # for second derivatives
        return through_inverse if grad is None else grad + through_inverse


def _eliminated(matrix: Float[Tensor, "B M M"]) -> tuple[Float[Tensor, " B"], Float[Tensor, "B M M"]]:
    """The logarithm of the determinant and the inverse, by Gauss-Jordan elimination without pivoting.

    Step k subtracts (a_k − e_k)(aᵏ + e_k)ᵀ / a_kk from the matrix, with its column a_k and row aᵏ. This product clears
    the column elsewhere and leaves the column and row of the inverse in its place.
    """
    pivots = []
    for k, unit in enumerate(torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)):
        pivot = matrix[:, k, k]
        column, row = (matrix[:, :, k] - unit) / pivot.unsqueeze(1), matrix[:, k] + unit
        pivots.append(pivot)
        matrix = torch.addcmul(matrix, column.unsqueeze(2), row.unsqueeze(1), value=-1)
    return torch.stack(pivots, -1).log().sum(-1), matrix

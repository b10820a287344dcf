"""The volume that members' non-maximal predictions span: the ADP paper's ensemble diversity."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks
from dissensus.pooling import mean_probability

LEAST = -1e5
"""What the logarithm of a probability of zero is read as: who leaves nothing to other classes points evenly."""
JITTER = 1e-6
"""Added to the diagonal of the Gram matrix, as the paper's code does: what identical members are told apart by."""


def nonmaximal_volume(
    log_probs: Float[Tensor, "M B C"], labels: Int[Tensor, " B"] | None = None, *, log: bool = False
) -> Float[Tensor, " B"]:
    """ED (ADP paper, equations 2 to 4): the squared volume of members' unit vectors of non-maximal predictions.

    Each member's probabilities lose the class y and are brought to length one; det(MᵀM) of these is 1 where members put
    the rest of their belief on different classes, and 0 where two of them agree on it. From log-probabilities, in
    logarithms until lengths are one, and in float64 from there on, with `JITTER` on the diagonal: finite for identical
    members, for more members than other classes, and for logits that lie 10⁴ apart. With K members the least value is
    about K · JITTER^(K − 1). NaN at examples with a NaN output.

    Args:
        log_probs: Of members (logits do as well: what they are normalised by falls out).
        labels: y of each example; by default the class that the ensemble's mean probabilities name.
        log: Return the logarithm, in which small volumes can be told apart.

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
    """Products of members' unit vectors without class y, with `JITTER` on the diagonal; float64."""
    hot = torch.nn.functional.one_hot(labels.long(), log_probs.shape[-1]).bool()
    others = log_probs.double().clamp_min(LEAST).masked_fill(hot, -torch.inf)
    units = (others - 0.5 * (2 * others).logsumexp(-1, keepdim=True)).exp().transpose(0, 1)  # [B, M, C]
    return units @ units.transpose(1, 2) + JITTER * torch.eye(len(log_probs), device=units.device, dtype=units.dtype)


def log_determinant(matrix: Float[Tensor, "B M M"]) -> Float[Tensor, " B"]:
    """Of positive definite matrices, by elimination: M steps of plain products, which a CUDA graph can hold.

    The inverse falls out of the same steps and is the gradient, so that a backward pass is one product. Exact for a
    diagonal of about one, which Gram matrices of unit vectors have; where it is large, the inverse loses digits.

    >>> round(log_determinant(torch.tensor([[[4.0, 2.0], [2.0, 3.0]]])).exp().item(), 4)
    8.0
    """
    found, _ = _LogDeterminant.apply(matrix)
    return found


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
        turned = inverse.transpose(-2, -1)
        found = None if of_value is None else of_value.unsqueeze(-1).unsqueeze(-1) * turned
        if of_inverse is None:
            return found
        through = -turned @ of_inverse @ turned  # second derivatives: of the inverse itself
        return through if found is None else found + through


def _eliminated(matrix: Float[Tensor, "B M M"]) -> tuple[Float[Tensor, " B"], Float[Tensor, "B M M"]]:
    """The logarithm of the determinant and the inverse, by Gauss and Jordan without a choice of pivots.

    Step k takes (a_k − e_k)(aᵏ + e_k)ᵀ / a_kk off the matrix, for its column a_k and row aᵏ: that one product clears
    the column everywhere else and leaves the inverse's column and row in its place.
    """
    pivots = []
    for k, unit in enumerate(torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)):
        pivot = matrix[:, k, k]
        column, row = (matrix[:, :, k] - unit) / pivot.unsqueeze(1), matrix[:, k] + unit
        pivots.append(pivot)
        matrix = torch.addcmul(matrix, column.unsqueeze(2), row.unsqueeze(1), value=-1)
    return torch.stack(pivots, -1).log().sum(-1), matrix

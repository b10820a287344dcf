"""Errors of members, alone and together, to which diversity is compared."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks, losses
from dissensus.axes import Decomposition, PerExampleLoss, Pool
from dissensus.diversity.decomposition import check_pool, decompose, member_and_ensemble_loss


@arguments.positions("outputs")
def errors(outputs: Float[Tensor, "M B C"], targets: Tensor, *, loss: str = "squared_error") -> Float[Tensor, "M B C"]:
    """Signed errors of members: f_j − y for ``"squared_error"``, p_j − y with y one-hot for ``"brier"``.

    Their squared length is the loss; for ``"mse"`` they are (f_j − y) / √C. The Brier form serves as the errors of
    classifiers.

    >>> errors(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5])).flatten()
    tensor([-1.5000,  0.5000])
    """
    _, batch, classes = checks.member_outputs(outputs)
    checks.one_of("loss", loss, ("squared_error", "mse", "brier"))
    losses.tell_of_mean(loss, classes)
    outputs = checks.full_precision(outputs)
    if loss != "brier":
        apart = outputs - losses.as_values(outputs, targets)
        return apart if loss == "squared_error" else apart / math.sqrt(classes)
    soft = checks.class_targets(targets, batch, classes)
    label_probs = targets if soft else torch.nn.functional.one_hot(targets, classes)
    return outputs.softmax(-1) - label_probs.to(outputs.dtype)


@arguments.positions("all")
def error_covariance(
    outputs: Float[Tensor, "M B C"], targets: Tensor, *, loss: str = "squared_error"
) -> Float[Tensor, "M M"]:
    """E[⟨e_i, e_j⟩] over examples: mean losses of members on the diagonal, and joint errors of pairs off it.

    Moments are about zero, as in squared error. With V the mean of the diagonal and c the mean of the other entries,

    ERR = V/M + (M − 1)c/M    and    DIV/ERR = (M − 1)(V − c)/(V + (M − 1)c)

    hold exactly. DIV/ERR is M − 1 for uncorrelated errors. It is larger only if errors *cancel*, c < 0, which
    independent training does not cause.

    >>> error_covariance(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5]))
    tensor([[ 2.2500, -0.7500],
            [-0.7500,  0.2500]])
    """
    members, batch, _ = checks.member_outputs(outputs)
    flat = errors(outputs, targets, loss=loss).reshape(members, -1)
    return flat @ flat.T / batch


@arguments.positions("all")
def error_correlation(
    outputs: Float[Tensor, "M B C"], targets: Tensor, *, loss: str = "squared_error"
) -> Float[Tensor, "M M"]:
    """`error_covariance` scaled to ones on the diagonal. Entries off the diagonal are 0 for a member without errors.

    NaN in the row and column of a member with a NaN output, including the diagonal.

    >>> error_correlation(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5]))
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    covariance = error_covariance(outputs, targets, loss=loss)
    scale = covariance.diagonal().sqrt()
    product = scale.unsqueeze(0) * scale.unsqueeze(1)
    correlation = torch.where(product <= 0, 0.0, covariance / product.clamp_min(torch.finfo(product.dtype).tiny))
    diagonal = torch.eye(len(correlation), dtype=torch.bool, device=correlation.device)
    return torch.where(diagonal & ~correlation.isnan(), 1.0, correlation)


@arguments.arrays
def mean_covariance(covariance: Float[Tensor, "M M"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """V and c: the mean of a covariance's diagonal, and of its other entries (0 for one member).

    >>> mean_covariance(torch.tensor([[2.25, -0.75], [-0.75, 0.25]]))
    (tensor(1.2500), tensor(-0.7500))
    """
    members = len(covariance)
    off_diagonal = (covariance.sum() - covariance.diagonal().sum()) / max(members * (members - 1), 1)
    return covariance.diagonal().mean(), off_diagonal


@arguments.positions("all")
def relative_diversity(
    outputs: Float[Tensor, "M B C"], targets: Tensor, *, loss: str | PerExampleLoss, pool: Pool
) -> Float[Tensor, ""]:
    """DIV/ERR over all examples. Compare it to M − 1 (see `error_covariance`), not to a fixed number.

    The loss must not be negative: ``gaussian_nll`` and ``poisson`` are refused.

    >>> relative_diversity(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.5]), loss="squared_error", pool="score")
    tensor(4.)
    """
    check_ratio(loss)
    parts = decompose(outputs, targets, loss=loss, pool=pool)
    return parts.diversity.mean() / parts.ensemble.mean()


class Gap(NamedTuple):
    """Test minus training, for every part of the decomposition (means over examples)."""

    ensemble: Float[Tensor, ""]
    individual: Float[Tensor, ""]
    diversity: Float[Tensor, ""]


def generalisation_gap(train: Decomposition, test: Decomposition) -> Gap:
    """Differences of the ensemble's loss, the members' loss and diversity between training and test data.

    ensemble = individual − diversity holds for gaps as for losses. The gaps show whether members overfit, or whether
    diversity on training data is missing on test data. `dissensus.History` holds all six numbers after every epoch.

    >>> half = Decomposition(*(torch.tensor([v]) for v in (0.5, 1.0, 0.5)))
    >>> whole = Decomposition(*(torch.tensor([v]) for v in (1.0, 1.25, 0.25)))
    >>> tuple(round(float(part), 2) for part in generalisation_gap(half, whole))
    (0.5, 0.25, -0.25)
    """
    return Gap(*(b.mean() - a.mean() for a, b in zip(train, test, strict=True)))


@arguments.positions("all")
def dominance(
    outputs: Float[Tensor, "M B C"], targets: Tensor, *, loss: str | PerExampleLoss, pool: Pool
) -> Float[Tensor, ""]:
    """Spread of members' losses: their standard deviation divided by their mean. 0 if all are equal.

    NaN if an output is NaN. The loss must not be negative: ``gaussian_nll`` and ``poisson`` are refused.

    >>> dominance(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([2.0]), loss="squared_error", pool="score")
    tensor(0.)
    """
    checks.member_outputs(outputs)
    check_pool(loss, pool)
    check_ratio(loss)
    outputs = checks.full_precision(outputs)
    member, _ = member_and_ensemble_loss(outputs, targets, loss=loss, pool=pool, weights=None)
    member_loss = member.mean(-1)
    mean = member_loss.mean()
    spread = member_loss.std(correction=0)
    return torch.where(mean <= 0, 0.0, spread / mean.clamp_min(torch.finfo(mean.dtype).tiny))


def check_ratio(loss: str | PerExampleLoss) -> None:
    """Refuse a loss that may be negative, of which ratios mean nothing."""
    known = losses.known(loss)
    if known is not None and known.density:
        got = f"{losses.text_of(loss)}, the logarithm of a density up to a constant"
        checks.refuse("loss", "be at least zero for a ratio of losses", got, "Use decompose, which subtracts them.")

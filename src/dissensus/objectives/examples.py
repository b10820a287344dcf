"""The examples that an objective sees: every position of dense outputs is one, and one of weight zero is absent."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from dissensus import checks, dense


class Examples(NamedTuple):
    """Outputs ``[M, N, C]`` and targets of N examples, and their weights ``[N]`` or ``[M, N]``."""

    outputs: Tensor
    targets: Tensor
    weights: Tensor | None


def examples(
    outputs: Float[Tensor, "M B C *S"],
    targets: Tensor,
    example_weights: Tensor | None,
    *,
    interacting: str | None = None,
) -> Examples:
    """What every objective computes on. Outputs ``[M, B, C]`` without weights are returned as they are.

    Outputs of examples of weight zero are replaced by zeros, so that neither values nor gradients contain their
    infinities and NaN. ``interacting`` names an objective whose members interact, which refuses weights per member.
    """
    if outputs.ndim == 3 and example_weights is None:
        return Examples(outputs, targets, None)
    if outputs.ndim > 3:
        outputs, targets, example_weights = dense.positions(outputs, targets, example_weights=example_weights)
    if example_weights is not None:
        members, batch, _ = checks.member_outputs(outputs)
        example_weights = checks.example_weights(example_weights, members, batch, interacting=interacting)
        outputs = present(outputs, example_weights)
    return Examples(outputs, targets, example_weights)


def present(outputs: Float[Tensor, "M N C"], example_weights: Tensor | None) -> Float[Tensor, "M N C"]:
    """Outputs with zeros at examples of weight zero."""
    return outputs if example_weights is None else outputs.masked_fill((example_weights == 0).unsqueeze(-1), 0.0)


def shared(example_weights: Tensor | None) -> Tensor | None:
    """One weight per example, ``[N]``: the mean of members' weights where each member has its own."""
    return example_weights if example_weights is None or example_weights.ndim == 1 else example_weights.mean(0)

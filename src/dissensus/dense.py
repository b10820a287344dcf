"""Dense outputs: one prediction per pixel or token. Every position is an example.

Outputs are ``[M, B, C, *S]`` and labels ``[B, *S]``: the class axis is the third, as torch has it after the batch.
Language models return ``[M, B, T, V]``, with ``class_axis=-1``. `positions` turns both into ``[M, N, C]`` and ``[N]``
with N = B · S positions, and everything in this package computes on those.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus import checks


class Positions(NamedTuple):
    """Positions of dense outputs as examples."""

    outputs: Float[Tensor, "M N C"]
    targets: Tensor
    """``[N]``, or ``[N, C]`` for soft labels and values."""
    example_weights: Tensor | None
    """``[N]`` or ``[M, N]``; zero at ignored positions. None: all positions count the same."""


def positions(
    outputs: Float[Tensor, "M B *S"],
    targets: Tensor,
    *,
    class_axis: int = 2,
    ignore_index: int | None = None,
    example_weights: Tensor | None = None,
) -> Positions:
    """Dense outputs, targets and weights with every position as an example of its own.

    Shapes do not depend on values, so that it runs under ``vmap`` and in a CUDA graph: a position whose label is
    ``ignore_index`` stays, with the weight 0 and the label 0. Outputs ``[M, B, C]`` and their targets are returned as
    they are, apart from ignored labels.

    Args:
        outputs: Of members, ``[M, B, C, *S]``, or with the classes at another axis.
        targets: Labels ``[B, *S]``; or soft labels and values in the shape of a member's outputs, ``[B, C, *S]``. For
            one target per position values may be ``[B, *S]``. Losses with several outputs per target (means and
            variances, quantiles) take ``[B, D, *S]``, where D divides C.
        class_axis: Axis of outputs that holds the C classes. -1 for language models, ``[M, B, T, V]``.
        ignore_index: Label of positions that do not count, such as -100.
        example_weights: Weights of examples ``[B]``, which all positions of an example get; of positions ``[B, *S]``;
            or either per member, ``[M, B]`` and ``[M, B, *S]``.

    >>> outputs, targets = torch.zeros(5, 2, 3, 8, 8), torch.full((2, 8, 8), -100)
    >>> flat = positions(outputs, targets, ignore_index=-100)
    >>> flat.outputs.shape, flat.targets.shape, float(flat.example_weights.sum())
    (torch.Size([5, 128, 3]), torch.Size([128]), 0.0)
    """
    axis = axis_of(outputs, class_axis)
    shape = _position_shape(outputs, axis)
    with_classes = targets.ndim == len(shape) + 1
    if not (_go_with(targets, outputs, axis) if with_classes else tuple(targets.shape) == shape):
        _refuse_targets(outputs, targets, axis, shape)
    if example_weights is not None:
        example_weights = _spread(example_weights, outputs.shape[0], shape)
    if len(shape) > 1:
        outputs = outputs.movedim(axis, -1).flatten(1, -2)
        targets = targets.movedim(axis - 1, -1).flatten(0, -2) if with_classes else targets.flatten()
    if ignore_index is not None:
        targets, example_weights = _without_ignored(targets, ignore_index, example_weights, outputs)
    return Positions(outputs, targets, example_weights)


def counted(
    outputs: Float[Tensor, "M B *S"], targets: Tensor, *, class_axis: int = 2, ignore_index: int | None = None
) -> tuple[Float[Tensor, "M n C"], Tensor]:
    """Outputs and targets of the positions that count, without those that are ignored. It reads values.

    Outputs ``[M, B, C]`` without ``ignore_index`` are returned as they are.

    >>> outputs, targets = counted(torch.zeros(5, 2, 3, 8, 8), torch.zeros(2, 8, 8).long(), ignore_index=-100)
    >>> outputs.shape, targets.shape
    (torch.Size([5, 128, 3]), torch.Size([128]))
    """
    if outputs.ndim <= 3 and ignore_index is None:
        return outputs, targets
    positioned = positions(outputs, targets, class_axis=class_axis)
    if ignore_index is None:
        return positioned.outputs, positioned.targets
    rows = (positioned.targets.long() != ignore_index).nonzero().squeeze(-1)
    return positioned.outputs.index_select(1, rows), positioned.targets.index_select(0, rows)


def flat(outputs: Float[Tensor, "M B *S"], class_axis: int = 2) -> Float[Tensor, "M N C"]:
    """Outputs alone, with every position as an example: ``[M, B, C, *S] -> [M, N, C]``. ``[M, B, C]`` is unchanged.

    >>> flat(torch.zeros(5, 2, 3, 8, 8)).shape
    torch.Size([5, 128, 3])
    """
    if outputs.ndim == 3 and class_axis in (2, -1):
        return outputs
    return outputs.movedim(axis_of(outputs, class_axis), -1).flatten(1, -2)


def unflat(values: Tensor, outputs: Float[Tensor, "M B *S"], class_axis: int = 2) -> Tensor:
    """Numbers per position back in the shape of the data, ``[..., N] -> [..., B, *S]``.

    >>> unflat(torch.zeros(128), torch.zeros(5, 2, 3, 8, 8)).shape
    torch.Size([2, 8, 8])
    """
    if outputs.ndim == 3:
        return values
    return values.unflatten(-1, _position_shape(outputs, axis_of(outputs, class_axis)))


def axis_of(outputs: Tensor, class_axis: int) -> int:
    """The class axis, counted from the front: 2 or more."""
    axis = class_axis + outputs.ndim if class_axis < 0 else class_axis
    if isinstance(class_axis, bool) or not 2 <= axis < outputs.ndim:
        requirement = f"be an axis of outputs {checks.shape_text(outputs.shape)} after members and examples"
        checks.refuse("class_axis", requirement, class_axis)
    return axis


def _position_shape(outputs: Tensor, axis: int) -> tuple[int, ...]:
    """``(B, *S)``."""
    return (*outputs.shape[1:axis], *outputs.shape[axis + 1 :])


def _go_with(targets: Tensor, outputs: Tensor, axis: int) -> bool:
    """Whether targets ``[B, D, *S]`` have the positions of outputs, and D divides their number of outputs C."""
    wanted, got = list(outputs.shape[1:]), list(targets.shape)
    width, number = wanted.pop(axis - 1), got.pop(axis - 1)
    return got == wanted and number > 0 and width % number == 0


def _without_ignored(
    targets: Tensor, ignore_index: int, example_weights: Tensor | None, outputs: Tensor
) -> tuple[Tensor, Tensor]:
    if targets.is_floating_point():
        checks.refuse("targets", "be class labels for `ignore_index`", f"{targets.dtype}", "", TypeError)
    ignored: Bool[Tensor, " N"] = targets.long() == ignore_index  # -100 as uint8 would be 156
    if example_weights is None:
        example_weights = torch.ones_like(ignored, dtype=checks.full_precision(outputs).dtype)
    return targets.masked_fill(ignored, 0), example_weights.masked_fill(ignored, 0)


def _spread(weights: Tensor, members: int, shape: Sequence[int]) -> Tensor:
    """Weights ``[N]`` or ``[M, N]`` from those of examples or positions."""
    batch, got = shape[0], tuple(weights.shape)
    known = {(batch,), tuple(shape), (members, batch), (members, *shape)}
    if got not in known:
        wanted = f"have shape [B={batch}], {list(shape)} or either with M={members} in front"
        checks.refuse("example_weights", wanted, checks.shape_text(got))
    if len(shape) == 2 and tuple(shape) == (members, batch) == got:
        fix = f"Expand them to [M, B, S] = {[members, *shape]}."
        checks.refuse("example_weights", "say whether they are of positions or of members", list(got), fix)
    per_position = got in (tuple(shape), (members, *shape))
    leading = weights.shape[: weights.ndim - (len(shape) if per_position else 1)]
    if not per_position:
        weights = weights.view(*got, *[1] * (len(shape) - 1)).expand(*got, *shape[1:])
    return weights.reshape(*leading, math.prod(shape))


def _refuse_targets(outputs: Tensor, targets: Tensor, axis: int, shape: Sequence[int]) -> None:
    fix = ""
    if axis != outputs.ndim - 1 and tuple(targets.shape) == tuple(outputs.shape[1:-1]):
        fix = "Classes last, as in language models? Use class_axis=-1."
    requirement = f"have shape {list(shape)} for outputs {checks.shape_text(outputs.shape)} with classes at axis {axis}"
    checks.refuse("targets", requirement, checks.shape_text(targets.shape), fix)

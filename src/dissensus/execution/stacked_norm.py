"""Batch norm of all members at once, with a sum with a residual and ReLU after it, and with their gradients."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import dissensus.execution.triton_launch as triton_launch
from dissensus.execution.batched import stacked_batch_norm
from dissensus.execution.triton_launch import is_transformed, launch, parts_of, power

PROGRAMS = 1024
"""Programs that fill a card, about; sums over rows are cut into parts to have as many."""
FIRST_ROWS = 32
"""Rows whose mean is taken away before squares are summed."""


def batch_norm(
    x: Tensor,
    statistics: tuple[Tensor, Tensor] | None,
    affine: tuple[Tensor, Tensor] | None,
    residual: Tensor | None = None,
    *,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool = False,
) -> Tensor:
    """Batch norm of ``x [M, B, C, ...]``, a sum with a residual and ReLU, with statistics of each member.

    Args:
        x: Activations.
        statistics: Running means and variances ``[M, C]``, which training moves; None: there are none.
        affine: Weights and biases ``[M, C]``, or None.
        residual: What is added after batch norm; None: nothing.
        training: Whether statistics are those of the batch.
        momentum: How far running statistics move.
        eps: A small number that is added to variances.
        relu: Whether ReLU comes last.
    """
    uses_batch = training or statistics is None
    rows = x.numel() // (len(x) * x.shape[2]) if x.numel() else 0
    tensors = [x, *(statistics or ()), *(affine or ()), *([] if residual is None else [residual])]
    if residual is not None and residual.ndim < x.ndim:  # is broadcast from the right, as each member's is
        residual = residual.view(len(residual), *[1] * (x.ndim - residual.ndim), *residual.shape[1:])
    fits = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    plain = not rows or (rows == 1 and uses_batch) or not fits or not triton_launch.runs_kernels(x)
    if plain or is_transformed(*tensors) or not all(t.is_contiguous() for t in statistics or ()):
        return _plain_norm(x, statistics, affine, residual, training=training, momentum=momentum, eps=eps, relu=relu)
    weight, bias = (None, None) if affine is None else affine
    settings = NormSettings(training, uses_batch, momentum, eps, relu)
    residual = None if residual is None else _rows_last(residual)
    return _Norm.apply(_rows_last(x), weight, bias, residual, statistics, settings)


def _plain_norm(
    x: Tensor,
    statistics: tuple[Tensor, Tensor] | None,
    affine: tuple[Tensor, Tensor] | None,
    residual: Tensor | None,
    *,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
) -> Tensor:
    """The same by torch's batch norm."""
    mean, variance = (None, None) if statistics is None else statistics
    weight, bias = (None, None) if affine is None else affine
    uses_batch = training or statistics is None
    y = stacked_batch_norm(x, mean, variance, weight, bias, uses_batch, momentum, eps)
    y = y if residual is None else y + residual
    return y.relu() if relu else y


class NormSettings(NamedTuple):
    """What a batch norm is, apart from its tensors."""

    tracks: bool
    """Whether running statistics move."""
    uses_batch: bool
    """Whether statistics are those of the batch."""
    momentum: float
    eps: float
    relu: bool


def _rows_last(x: Tensor) -> Tensor:
    """Activations ``[M, B, C, ...]`` whose memory is channels last."""
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        statistics: tuple[Tensor, Tensor] | None,
        settings: NormSettings,
    ) -> Tensor:
        y, mean, rstd = kernel_norm(x, weight, bias, residual, statistics, settings)
        ctx.save_for_backward(x, weight, bias, residual, y if settings.relu else None, mean, rstd)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, bias, residual, y, mean, rstd) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():  # these gradients may be differentiated: torch knows how
            parts = _norm_gradients((x, weight, bias, residual), dy, mean, rstd, ctx.settings, ctx.needs_input_grad)
        else:
            wants_residual = ctx.needs_input_grad[3]
            parts = kernel_norm_gradient(x, y, _rows_last(dy), mean, rstd, weight, wants_residual, ctx.settings)
        wanted = zip(parts, ctx.needs_input_grad[:4], strict=True)
        return *(part if is_wanted else None for part, is_wanted in wanted), None, None


def _norm_gradients(
    inputs: tuple[Tensor | None, ...],
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    settings: NormSettings,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients that can be differentiated."""
    x, weight, bias, residual = inputs
    assert x is not None
    affine = None if weight is None or bias is None else (weight, bias)
    statistics = None if settings.uses_batch else (mean, rstd.square().reciprocal() - settings.eps)
    how = {"training": settings.uses_batch, "momentum": 0.0, "eps": settings.eps, "relu": settings.relu}
    y = _plain_norm(x, statistics, affine, residual, **how)
    wanted = [place for place in range(4) if needs[place]]
    leaves = [leaf for place in wanted if (leaf := inputs[place]) is not None]
    grads = dict(zip(wanted, torch.autograd.grad(y, leaves, dy, create_graph=True), strict=True))
    return [grads.get(place) for place in range(4)]


class _Cut(NamedTuple):
    """How activations ``[M, B, C, ...]`` are cut into programs."""

    members: int
    rows: int
    channels: int
    lines: int
    """Rows of a program."""
    width: int
    """Channels of a program."""

    @classmethod
    def of(cls, x: Tensor) -> "_Cut":
        """The cut of activations.

        >>> [_Cut.of(torch.zeros(2, 4, channels, 3))[3:] for channels in (16, 10, 512)]
        [(256, 16), (256, 16), (32, 128)]
        """
        channels = x.shape[2]
        width = min(power(channels), 128)
        return cls(len(x), x[0].numel() // channels, channels, 4096 // width, width)

    @property
    def blocks(self) -> int:
        """Programs that share the channels."""
        return -(-self.channels // self.width)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs of a kernel that computes rows."""
        return -(-self.rows // self.lines), self.members, self.blocks


def _sums(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], cut: _Cut, *, backward: bool, relu: bool
) -> Float[Tensor, "splits M 2 C"]:
    """Two sums of every channel over parts of the rows; ``tensors`` are x, y, dy, means and 1 / √(variance + eps)."""
    splits, each = parts_of(cut.rows, cut.members * cut.blocks, cut.lines, PROGRAMS)
    parts = tensors[0].new_empty((splits, cut.members, 2, cut.channels), dtype=torch.float32)
    launch(
        "norm_sums",
        (splits, cut.members, cut.blocks),
        *tensors,
        parts,
        cut.members,
        cut.rows,
        CHANNELS=cut.channels,
        BACKWARD=backward,
        RELU=relu,
        FIRST=FIRST_ROWS,
        EACH=each,
        ROWS=cut.lines,
        WIDTH=cut.width,
    )
    return parts


def kernel_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: tuple[Tensor, Tensor] | None,
    settings: NormSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the means and 1 / √(variance + eps) ``[M, C]`` that were used; memory is channels last."""
    cut = _Cut.of(x)
    constants = {"CHANNELS": cut.channels, "WIDTH": cut.width}
    if settings.uses_batch:
        mean, rstd = (x.new_empty(cut.members, cut.channels, dtype=torch.float32) for _ in range(2))
        parts = _sums((x, x, x, mean, x), cut, backward=False, relu=False)
        tracked = statistics if settings.tracks else None
        launch(
            "norm_statistics",
            (cut.members, cut.blocks),
            parts,
            mean,
            rstd,
            *((mean, rstd) if tracked is None else tracked),
            cut.members,
            cut.rows,
            settings.momentum,
            settings.eps,
            TRACKED=tracked is not None,
            SPLITS=len(parts),
            **constants,
        )
    else:
        assert statistics is not None
        mean, rstd = statistics[0].float(), (statistics[1].float() + settings.eps).rsqrt()
    y = _new_like(x)
    weight, bias = (None if tensor is None else _dense_rows(tensor) for tensor in (weight, bias))
    launch(
        "norm_rows",
        cut.grid,
        x,
        x if residual is None else residual,
        mean,
        rstd,
        mean if weight is None else weight,
        mean if bias is None else bias,
        y,
        cut.rows,
        0 if weight is None else weight.stride(0),
        0 if bias is None else bias.stride(0),
        AFFINE=weight is not None,
        HAS_RESIDUAL=residual is not None,
        RELU=settings.relu,
        ROWS=cut.lines,
        **constants,
    )
    return y, mean, rstd


def kernel_norm_gradient(
    x: Tensor,
    y: Tensor | None,
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    wants_residual: bool,
    settings: NormSettings,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, of weights, of biases and of the residual; y are outputs, of which ReLU's signs are read."""
    cut, outputs = _Cut.of(x), x if y is None else y
    parts = _sums((x, outputs, dy, mean, rstd), cut, backward=True, relu=y is not None)
    sums = parts[0] if len(parts) == 1 else parts.sum(0)
    dx = _new_like(x)
    # Without ReLU, the gradient of the residual is that of outputs.
    masked = _new_like(x) if wants_residual and y is not None else None
    weight = None if weight is None else _dense_rows(weight)
    launch(
        "norm_gradient",
        cut.grid,
        x,
        outputs,
        dy,
        mean,
        rstd,
        mean if weight is None else weight,
        sums,
        dx,
        dx if masked is None else masked,
        cut.rows,
        0 if weight is None else weight.stride(0),
        CHANNELS=cut.channels,
        AFFINE=weight is not None,
        TRAINING=settings.uses_batch,
        HAS_RESIDUAL=masked is not None,
        RELU=y is not None,
        ROWS=cut.lines,
        WIDTH=cut.width,
    )
    of_bias, of_weight = sums.unbind(1)
    if weight is None:
        return dx, None, None, masked if y is not None else dy
    return dx, of_weight.to(weight.dtype), of_bias.to(weight.dtype), masked if y is not None else dy


def _new_like(x: Tensor) -> Tensor:
    """Memory for activations ``[M, B, C, ...]``, channels last."""
    return x.new_empty(x.movedim(2, -1).shape).movedim(-1, 2)


def _dense_rows(tensor: Tensor) -> Tensor:
    """A tensor ``[M, C]`` whose rows have no gaps; there may be some between rows."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()

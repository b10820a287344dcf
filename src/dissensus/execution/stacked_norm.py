"""Batch norm of all members at once, with a sum with a residual and ReLU after it, and with their gradients."""

from typing import Any, NamedTuple

import torch
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


def _norm_tile(channels: int) -> tuple[int, int]:
    """Rows and channels of a program.

    >>> _norm_tile(16), _norm_tile(10), _norm_tile(512)
    ((256, 16), (256, 16), (32, 128))
    """
    width = min(power(channels), 128)
    return 4096 // width, width


def kernel_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: tuple[Tensor, Tensor] | None,
    settings: NormSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the means and 1 / √(variance + eps) ``[M, C]`` that were used; memory is channels last."""
    members, channels = len(x), x.shape[2]
    rows = x[0].numel() // channels
    lines, width = _norm_tile(channels)
    blocks = -(-channels // width)
    constants = {"CHANNELS": channels, "WIDTH": width}
    if settings.uses_batch:
        mean, rstd = (x.new_empty(members, channels, dtype=torch.float32) for _ in range(2))
        parts, splits, each = _norm_parts(x, rows, lines, blocks)
        launch(
            "norm_sums",
            (splits, members, blocks),
            x,
            x,
            x,
            mean,
            x,
            parts,
            members,
            rows,
            FIRST=FIRST_ROWS,
            EACH=each,
            BACKWARD=False,
            RELU=False,
            ROWS=lines,
            **constants,
        )
        tracked = statistics if settings.tracks else None
        running = (mean, rstd) if tracked is None else tracked
        numbers = (members, rows, settings.momentum, settings.eps)
        launch(
            "norm_statistics",
            (members, blocks),
            parts,
            mean,
            rstd,
            *running,
            *numbers,
            TRACKED=tracked is not None,
            SPLITS=splits,
            **constants,
        )
    else:
        assert statistics is not None
        mean, rstd = statistics[0].float(), (statistics[1].float() + settings.eps).rsqrt()
    y = _new_like(x)
    weight, bias = (None if tensor is None else _dense_rows(tensor) for tensor in (weight, bias))
    launch(
        "norm_rows",
        (-(-rows // lines), members, blocks),
        x,
        x if residual is None else residual,
        mean,
        rstd,
        mean if weight is None else weight,
        mean if bias is None else bias,
        y,
        rows,
        0 if weight is None else weight.stride(0),
        0 if bias is None else bias.stride(0),
        AFFINE=weight is not None,
        HAS_RESIDUAL=residual is not None,
        RELU=settings.relu,
        ROWS=lines,
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
    members, channels = len(x), x.shape[2]
    rows = x[0].numel() // channels
    lines, width = _norm_tile(channels)
    blocks = -(-channels // width)
    constants = {"CHANNELS": channels, "WIDTH": width, "RELU": y is not None}
    outputs = x if y is None else y
    parts, splits, each = _norm_parts(x, rows, lines, blocks)
    launch(
        "norm_sums",
        (splits, members, blocks),
        x,
        outputs,
        dy,
        mean,
        rstd,
        parts,
        members,
        rows,
        FIRST=FIRST_ROWS,
        EACH=each,
        BACKWARD=True,
        ROWS=lines,
        **constants,
    )
    sums = parts[0] if splits == 1 else parts.sum(0)
    dx = _new_like(x)
    # Without ReLU, the gradient of the residual is that of outputs.
    masked = _new_like(x) if wants_residual and y is not None else None
    weight = None if weight is None else _dense_rows(weight)
    launch(
        "norm_gradient",
        (-(-rows // lines), members, blocks),
        x,
        outputs,
        dy,
        mean,
        rstd,
        mean if weight is None else weight,
        sums,
        dx,
        dx if masked is None else masked,
        rows,
        0 if weight is None else weight.stride(0),
        AFFINE=weight is not None,
        TRAINING=settings.uses_batch,
        HAS_RESIDUAL=masked is not None,
        ROWS=lines,
        **constants,
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


def _norm_parts(x: Tensor, rows: int, lines: int, blocks: int) -> tuple[Tensor, int, int]:
    """Memory for two sums of every channel, the number of parts of rows, and rows of each."""
    splits, each = parts_of(rows, len(x) * blocks, lines, PROGRAMS)
    return x.new_empty((splits, len(x), 2, x.shape[2]), dtype=torch.float32), splits, each

"""Convolutions of all members at once, ``[M, B, C, H, W]``, with their gradients.

A convolution has three operations: outputs, the gradient of inputs and that of weights. Each is linear in two tensors,
and the derivatives of each are the two others. Each runs in one of several ways, which `Ways` chooses.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dissensus.execution.triton_launch as triton_launch
from dissensus.execution.batched import stacked_convolution
from dissensus.execution.graphs import captured, on
from dissensus.execution.loop import side_by_side
from dissensus.execution.skeleton import first_line
from dissensus.execution.tf32 import convolutions_use_tf32
from dissensus.execution.triton_launch import is_transformed, launch, parts_of, power
from dissensus.execution.ways import Ways

log = logging.getLogger("dissensus")

KERNEL, STREAMS, GROUPED = "kernel", "streams", "grouped"
NARROW = 64
"""The largest number of channels for which the rule takes kernels; cuDNN has the better ones for more."""


class Geometry(NamedTuple):
    """What a convolution is, apart from its tensors."""

    stride: tuple[int, int]
    padding: tuple[int, int]


class Tile(NamedTuple):
    """How a kernel is cut into programs."""

    rows: int = 128
    """Rows of a program, or of one of its steps where it sums over rows."""
    warps: int = 4
    columns: int = 64
    """Taps and channels of a program that computes gradients of weights."""
    stages: int = 3
    """Steps whose numbers are on their way at a time."""
    programs: int = 1024
    """Programs that fill a card, about; sums over rows are cut into parts to have as many."""


IMAGE_TILE = Tile()
"""Of kernels that compute images: within a tenth of the fastest tile for layers of ResNets on an H200."""
SUM_TILES = {KERNEL: Tile(64, columns=128, programs=512), f"{KERNEL}, long tiles": Tile(128, stages=2)}
"""Of kernels that compute gradients of weights; which one is faster depends on the layer."""


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...], ways: Ways
) -> Tensor:
    """``x [M, B, C, H, W]`` through M convolutions ``[M, out, C, h, w]``; the result is channels last.

    A batch that all members share may be an expanded tensor, which is not copied.
    """
    if is_transformed(x, weight, *([] if bias is None else [bias])):
        return stacked_convolution(x, weight, bias, stride, padding)
    dtype = _autocast_dtype(weight)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    geometry = Geometry((stride[0], stride[1]), (padding[0], padding[1]))
    x = _channels_last(x, dtype)
    routes = _routes(x, weight, geometry, ways)
    return _Convolution.apply(x, weight, bias, geometry, routes)


def _autocast_dtype(weight: Tensor) -> torch.dtype:
    """The precision of a convolution: that of autocast, if it is enabled; float64 does not change."""
    device = weight.device.type
    lowered = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lowered else weight.dtype


def _channels_last(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Images ``[M, B, C, H, W]`` whose memory is channels last; a batch that all members share stays one.

    It is copied for each member where its gradient is wanted, which is each member's own.
    """
    if _is_shared(x) and not (x.requires_grad and torch.is_grad_enabled()):
        return _channels_last(x[:1], dtype).expand_as(x)
    return x.to(dtype or x.dtype).movedim(2, -1).contiguous().movedim(-1, 2)


def _is_shared(x: Tensor) -> bool:
    return len(x) > 1 and x.stride(0) == 0


def _out_size(size: int, side: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - side) // stride + 1


def _out_shape(x: Tensor, weight: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """The shape ``[M, B, out, H', W']`` of outputs."""
    sides = zip(x.shape[3:], weight.shape[3:], geometry.stride, geometry.padding, strict=True)
    return (*x.shape[:2], weight.shape[1], *(_out_size(*side) for side in sides))


class Routes(NamedTuple):
    """The ways of a convolution's operations."""

    forward: str
    input_gradient: str
    weight_gradient: str


class Way(NamedTuple):
    """One way to compute a convolution's three operations. Images are channels last; so is each result."""

    forward: Callable[[Tensor, Tensor, Tensor | None, Geometry], Tensor]
    """``(x, weight, bias, geometry) -> y``"""
    input_gradient: Callable[[Tensor, Tensor, torch.Size, Geometry], Tensor]
    """``(dy, weight, shape of x, geometry) -> dx``"""
    weight_gradient: Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]
    """``(x, dy, weight, geometry) -> dweight``. Of the weight, shape, dtype and memory layout are used."""


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, routes: Routes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.routes = geometry, routes
        return WAYS[routes.forward].forward(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        dy = _channels_last(dy)
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        jobs: list[Callable[[], Tensor]] = []
        if of_x:
            jobs.append(lambda: _InputGradient.apply(dy, weight, x.shape, ctx.geometry, ctx.routes))
        if of_weight:
            jobs.append(lambda: _WeightGradient.apply(x, dy, weight.detach(), ctx.geometry, ctx.routes))
        # Kernels of few members leave room on a card. Gradients that are differentiated again keep to one stream. So do
        # those with a stream for each member: streams of one job would take memory that the other still reads.
        alone = STREAMS in (ctx.routes.input_gradient, ctx.routes.weight_gradient)
        together = len(jobs) > 1 and not (alone or torch.is_grad_enabled())
        results = iter(side_by_side(jobs, dy.device) if together else [job() for job in jobs])
        return (
            next(results) if of_x else None,
            next(results) if of_weight else None,
            dy.sum((1, 3, 4)) if of_bias else None,
            None,
            None,
        )


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dy: Tensor, weight: Tensor, shape: torch.Size, geometry: Geometry, routes: Routes) -> Tensor:
        ctx.save_for_backward(dy, weight)
        ctx.geometry, ctx.routes = geometry, routes
        return WAYS[routes.input_gradient].input_gradient(dy, weight, shape, geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_dx,), (dy, weight) = grads, ctx.saved_tensors
        of_dx = _channels_last(of_dx)
        of_dy, of_weight = ctx.needs_input_grad[:2]
        return (
            _Convolution.apply(of_dx, weight, None, ctx.geometry, ctx.routes) if of_dy else None,
            _WeightGradient.apply(of_dx, dy, weight.detach(), ctx.geometry, ctx.routes) if of_weight else None,
            None,
            None,
            None,
        )


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dy: Tensor, like: Tensor, geometry: Geometry, routes: Routes) -> Tensor:
        ctx.save_for_backward(x, dy)
        ctx.geometry, ctx.routes = geometry, routes
        return WAYS[routes.weight_gradient].weight_gradient(x, dy, like, geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_weight,), (x, dy) = grads, ctx.saved_tensors
        of_x, of_dy = ctx.needs_input_grad[:2]
        return (
            _InputGradient.apply(dy, of_weight, x.shape, ctx.geometry, ctx.routes) if of_x else None,
            _Convolution.apply(x, of_weight, None, ctx.geometry, ctx.routes) if of_dy else None,
            None,
            None,
            None,
        )


def _routes(x: Tensor, weight: Tensor, geometry: Geometry, ways: Ways) -> Routes:
    """The way of each operation. On a GPU each is timed at the first pass of its shape, outside of any capture.

    Kernels are compiled then, too, and what fails is left out with a notice.
    """
    if not _is_timed(x):
        return Routes(GROUPED, GROUPED, GROUPED)
    fits = (
        triton_launch.runs_kernels(x) and math.prod(_out_shape(x, weight, geometry)[1:]) <= triton_launch.MOST_NUMBERS
    )
    by_rule = KERNEL if fits and max(weight.shape[1:3]) <= NARROW else STREAMS
    if ways.by_rule:
        return Routes(by_rule, by_rule, by_rule)
    shape = "x".join(map(str, (*x.shape[:2], *x.shape[3:], *weight.shape[1:], *geometry.stride, *geometry.padding)))
    precision = ", tf32" if x.dtype == torch.float32 and convolutions_use_tf32() else ""
    place = f"{shape}, {str(x.dtype).removeprefix('torch.')}{precision}{', one batch' if _is_shared(x) else ''}"

    def chosen(operation: str) -> str:
        key = f"{operation} {place}"
        candidates = _candidates(operation, fits)
        if ways.get(key) not in candidates:  # one that was kept may need what this machine lacks
            if torch.cuda.is_current_stream_capturing():
                return by_rule
            with torch.no_grad(), on(x.device):
                ways[key] = _fastest(operation, candidates, x.detach(), weight.detach(), geometry)
        return ways[key]

    forward = chosen("forward")
    if not torch.is_grad_enabled():
        return Routes(forward, by_rule, by_rule)
    return Routes(forward, chosen("input gradient"), chosen("weight gradient"))


def _candidates(operation: str, fits: bool) -> list[str]:
    """Ways that are timed, for tensors that fit kernels or do not.

    >>> _candidates("forward", True), _candidates("weight gradient", True), _candidates("forward", False)
    (['kernel', 'streams'], ['kernel', 'kernel, long tiles', 'streams'], ['streams', 'grouped'])
    """
    if not fits:
        return [STREAMS, GROUPED]
    return [*(SUM_TILES if operation == "weight gradient" else [KERNEL]), STREAMS]


def _is_timed(x: Tensor) -> bool:
    """Whether ways are timed on the device of a tensor."""
    return x.is_cuda


_fastest_before: dict[tuple[object, ...], str] = {}
"""What has been timed in this process."""


def _fastest(operation: str, candidates: list[str], x: Tensor, weight: Tensor, geometry: Geometry) -> str:
    """The way that takes the least time, replayed from a CUDA graph."""
    key = (operation, x.shape, x.stride(), x.dtype, x.device, weight.shape, geometry, convolutions_use_tf32())
    if key in _fastest_before:
        return _fastest_before[key]
    dy = torch.ones(_out_shape(x, weight, geometry), dtype=x.dtype, device=x.device)
    dy = _channels_last(dy)
    times: dict[str, float] = {}
    reasons: list[str] = []
    for name in candidates:
        way = WAYS[name]
        run = {
            "forward": functools.partial(way.forward, x, weight, None, geometry),
            "input gradient": functools.partial(way.input_gradient, dy, weight, x.shape, geometry),
            "weight gradient": functools.partial(way.weight_gradient, x, dy, weight, geometry),
        }[operation]
        try:
            times[name] = replay_milliseconds(run)
        except Exception as reason:  # a compiler may raise anything
            reasons.append(first_line(reason))
            _tell(f"convolutions do not all run in the way {name!r}: {reasons[-1]}")
    if not times:
        raise RuntimeError(reasons[0])
    _fastest_before[key] = min(times, key=times.__getitem__)
    return _fastest_before[key]


@functools.cache
def _tell(message: str) -> None:
    """Say something in the log once."""
    log.warning(message)


def replay_milliseconds(function: Callable[[], object], rounds: int = 5) -> float:
    """The median time of a function on the current GPU, replayed from a CUDA graph."""
    function()  # libraries set themselves up, and kernels are compiled

    def run() -> None:
        function()

    replay = captured(run, watch="thread_local")
    replay()
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[rounds // 2]


# All members as the groups of one convolution.


def _joined(x: Tensor) -> Tensor:
    """Images ``[B, M·C, H, W]`` of all members ``[M, B, C, H, W]``."""
    return x.transpose(0, 1).flatten(1, 2)


def _parted(x: Tensor, members: int) -> Tensor:
    return x.unflatten(1, (members, -1)).transpose(0, 1)


def _library_forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, groups: int = 1) -> Tensor:
    return torch.convolution(x, weight, bias, geometry.stride, geometry.padding, (1, 1), False, (0, 0), groups)


def _library_backward(
    dy: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: int, groups: int = 1
) -> Tensor:
    """The gradient of inputs (``wanted`` 0) or of weights (1)."""
    mask = [wanted == 0, wanted == 1, False]
    pairs = (list(geometry.stride), list(geometry.padding), [1, 1])
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *pairs, False, [0, 0], groups, mask)[wanted]


def _grouped_forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    flat_bias = None if bias is None else bias.flatten()
    y = _library_forward(_joined(x), weight.flatten(0, 1), flat_bias, geometry, len(weight))
    return _channels_last(_parted(y, len(weight)))


def _grouped_input_gradient(dy: Tensor, weight: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    x = dy.new_empty((shape[1], shape[0] * shape[2], *shape[3:]))  # only its shape is used
    dx = _library_backward(_joined(dy), x, weight.flatten(0, 1), geometry, 0, len(weight))
    return _channels_last(_parted(dx, len(weight)))


def _grouped_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    dw = _library_backward(_joined(dy), _joined(x), weight.flatten(0, 1), geometry, 1, len(weight))
    return dw.unflatten(0, (len(weight), -1))


# A convolution for each member, on streams of a GPU.


def _each(jobs: Sequence[Callable[[], Tensor]], device: torch.device) -> Tensor:
    """Images ``[M, B, C, H, W]``, channels last, of one job for each member."""
    images = [image.movedim(1, -1) for image in side_by_side(jobs, device)]
    return torch.stack(images).movedim(-1, 2)


def _streams_forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    biases = [None] * len(x) if bias is None else list(bias)
    operands = zip(x, weight, biases, strict=True)
    return _each([functools.partial(_library_forward, *own, geometry) for own in operands], x.device)


def _streams_input_gradient(dy: Tensor, weight: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    x = dy.new_empty((shape[1], *shape[3:], shape[2])).movedim(-1, 1)  # only its shape is used
    operands = zip(dy, weight, strict=True)
    jobs = [functools.partial(_library_backward, d, x, w, geometry, 0) for d, w in operands]
    return _each(jobs, dy.device)


def _streams_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    operands = zip(dy, x, weight, strict=True)
    jobs = [functools.partial(_library_backward, *own, geometry, 1) for own in operands]
    return torch.stack(side_by_side(jobs, dy.device))


# One kernel for all members.


def _step(inputs: int, taps: int) -> int:
    """Numbers that a program multiplies at a time: channels of one tap, or some of all taps where none fits.

    >>> _step(16, 9), _step(128, 9), _step(48, 1), _step(3, 9), _step(20, 9), _step(3, 1)
    (16, 64, 16, 32, 32, 16)
    """
    whole = next((step for step in (64, 32, 16) if inputs % step == 0), None)
    return min(32, power(inputs * taps)) if whole is None else whole


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype != torch.float32 or convolutions_use_tf32() else "ieee"


def _image_rows(x: Tensor) -> tuple[Tensor, int]:
    """A tensor whose memory is channels last, and the distance of members in it, 0 for a batch that they share."""
    x = _channels_last(x)
    return x, 0 if _is_shared(x) else x[0].numel()


def _weight_strides(weight: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """A weight ``[M, out, in, h, w]``, and distances of members, outputs, inputs and taps; taps have one."""
    if weight.shape[3] > 1 and weight.stride(3) != weight.shape[4] * weight.stride(4):
        weight = weight.contiguous()
    tap = weight.stride(4) if weight.shape[4] > 1 else weight.stride(3)
    return weight, (weight.stride(0), weight.stride(1), weight.stride(2), tap)


def _constants(weight: Tensor, geometry: Geometry, x: Tensor) -> dict[str, Any]:
    (lines, columns), (line_stride, column_stride), (line_padding, column_padding) = weight.shape[3:], *geometry
    return {
        "LINES": lines,
        "COLUMNS": columns,
        "LINE_STRIDE": line_stride,
        "COLUMN_STRIDE": column_stride,
        "LINE_PADDING": line_padding,
        "COLUMN_PADDING": column_padding,
        "PRECISION": _precision(x),
    }


def kernel_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, tile: Tile = IMAGE_TILE
) -> Tensor:
    """Outputs by one kernel."""
    weight, strides = _weight_strides(weight)
    return _convolved(x, weight, strides, bias, _out_shape(x, weight, geometry), geometry, tile, transposed=False)


def kernel_input_gradient(
    dy: Tensor, weight: Tensor, shape: torch.Size, geometry: Geometry, tile: Tile = IMAGE_TILE
) -> Tensor:
    """The gradient of inputs by one kernel."""
    weight, (member, out, into, tap) = _weight_strides(weight)
    return _convolved(dy, weight, (member, into, out, tap), None, shape, geometry, tile, transposed=True)


def _convolved(
    x: Tensor,
    weight: Tensor,
    strides: tuple[int, int, int, int],
    bias: Tensor | None,
    shape: tuple[int, ...],
    geometry: Geometry,
    tile: Tile,
    *,
    transposed: bool,
) -> Tensor:
    """Images of a shape ``[M, B, C, H, W]``; strides of weights are those of members, results, sources and taps."""
    x, x_member = _image_rows(x)
    members, batch, channels, height, width = shape
    y = x.new_empty((members, batch, height, width, channels)).movedim(-1, 2)
    if not y.numel():
        return y
    if not x.numel():
        return y.zero_() if bias is None else y.copy_(bias[:, None, :, None, None])
    bias = None if bias is None else bias.contiguous()
    rows, inputs = batch * height * width, x.shape[2]
    outs = min(power(channels), 64)
    grid = (-(-rows // tile.rows), -(-channels // outs), members)
    launch(
        "convolve",
        grid,
        x,
        weight,
        x if bias is None else bias,
        y,
        rows,
        *x.shape[3:],
        height,
        width,
        x_member,
        *strides,
        channels,
        INPUTS=inputs,
        OUTPUTS=channels,
        TRANSPOSED=transposed,
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        OUTS=outs,
        STEP=_step(inputs, weight.shape[3] * weight.shape[4]),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_constants(weight, geometry, x),
    )
    return y


def kernel_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, geometry: Geometry, tile: Tile) -> Tensor:
    """The gradient of weights by one kernel, and one that adds parts; it has the layout of the weights."""
    members, outputs, inputs, lines, columns = weight.shape
    taps, size = lines * columns, lines * columns * inputs
    last = inputs > 1 and taps > 1 and weight.stride(2) == 1
    stored = (members, outputs, lines, columns, inputs) if last else tuple(weight.shape)
    dw = x.new_empty(stored, dtype=weight.dtype)
    result = dw.movedim(-1, 2) if last else dw
    if not x.numel() or not dy.numel():
        return result.zero_()
    (x, x_member), (dy, dy_member) = _image_rows(x), _image_rows(dy)
    if not dy_member:
        dy = dy.movedim(2, -1).contiguous().movedim(-1, 2)
    rows = dy[0].numel() // outputs
    outs = min(power(outputs), 64)
    programs = -(-outputs // outs) * -(-size // tile.columns)
    splits, each = parts_of(rows, programs * members, tile.rows, tile.programs)
    parts = dw if splits == 1 else x.new_empty((splits, dw.numel()), dtype=torch.float32)
    launch(
        "weigh",
        (programs, splits, members),
        x,
        dy,
        parts,
        members,
        rows,
        x_member,
        1 if last else taps,
        inputs if last else 1,
        HEIGHT=x.shape[3],
        WIDTH=x.shape[4],
        FROM_HEIGHT=dy.shape[3],
        FROM_WIDTH=dy.shape[4],
        INPUTS=inputs,
        OUTPUTS=outputs,
        EACH=each,
        ROWS=tile.rows,
        OUTS=outs,
        STEP=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_constants(weight, geometry, x),
    )
    if splits > 1:
        launch("add_parts", (-(-dw.numel() // 256),), parts, dw, dw.numel(), SPLITS=splits, SIZE=256)
    return result


def kernels_with(image_tile: Tile, sum_tile: Tile) -> Way:
    """Kernels that are cut into tiles of these sizes."""
    return Way(
        functools.partial(kernel_forward, tile=image_tile),
        functools.partial(kernel_input_gradient, tile=image_tile),
        functools.partial(kernel_weight_gradient, tile=sum_tile),
    )


WAYS: dict[str, Way] = {
    **{name: kernels_with(IMAGE_TILE, tile) for name, tile in SUM_TILES.items()},
    STREAMS: Way(_streams_forward, _streams_input_gradient, _streams_weight_gradient),
    GROUPED: Way(_grouped_forward, _grouped_input_gradient, _grouped_weight_gradient),
}
"""Ways of convolutions by name."""

"""Convolutions and batch norm of all members in one kernel each, in Triton, beside cuDNN with a stream per member.

A probe, no part of the library: it says for which layers a backend of such kernels would pay. Activations are
``[M, B, H, W, C]`` and weights ``[M, out, h, w, in]`` in bf16, sums in float32. Measured are layers of ResNet-20 and
ResNet-18 on 32 pixels: 3×3 and 1×1, strides 1 and 2, each forward, the gradient of inputs and of weights; and batch
norm + residual + ReLU, forward and backward. All times are of CUDA graphs, medians of 30 replays in microseconds.
Kernels are compared with float32 convolutions of the same numbers first; a kernel that differs is told and not timed.

Usage: python benchmarks/stacked_kernels.py [--json FILE] [--only NAME] [--budget 420] [--check]
(``--check`` compares on small sizes and times nothing; with TRITON_INTERPRET=1 it needs no GPU)
"""

# What Triton's decorator returns is unknown where Triton is absent, and kernels branch on constants.
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from provenance import command_line, library
from torch import Tensor
from torch.nn import functional as F

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


@triton.jit
def forward_kernel(
    x, w, y, rows, height, width, inputs: tl.constexpr, out_height, out_width, outputs: tl.constexpr,
    STRIDE: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr,
    BATCH_IN: tl.constexpr, BATCH_OUT: tl.constexpr,
):  # fmt: skip
    """A tile of outputs of one member: the sum over taps of products of shifted inputs and weights."""
    member = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    image, place = row // (out_height * out_width), row % (out_height * out_width)
    top, left = (place // out_width) * STRIDE - SIDE // 2, (place % out_width) * STRIDE - SIDE // 2
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for tap in range(SIDE * SIDE):
        line, column = top + tap // SIDE, left + tap % SIDE
        inside = (row < rows) & (line >= 0) & (line < height) & (column >= 0) & (column < width)
        start = x + member * BATCH_IN + ((image * height + line) * width + column) * inputs
        for first in range(0, inputs, INS):
            channel = first + tl.arange(0, INS)
            known = channel < inputs
            a = tl.load(start[:, None] + channel[None, :], mask=inside[:, None] & known[None, :], other=0.0)
            at = w + ((member * outputs + out[None, :]) * (SIDE * SIDE) + tap) * inputs + channel[:, None]
            b = tl.load(at, mask=known[:, None] & (out < outputs)[None, :], other=0.0)
            total += tl.dot(a, b)
    at = y + member * BATCH_OUT + row[:, None] * outputs + out[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (out < outputs)[None, :])


@triton.jit
def input_gradient_kernel(
    dy, w, dx, rows, height, width, inputs: tl.constexpr, out_height, out_width, outputs: tl.constexpr,
    STRIDE: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr,
    BATCH_IN: tl.constexpr, BATCH_OUT: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of inputs: every tap of an input reads one output, or none where strides pass over it."""
    member = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * INS + tl.arange(0, INS)
    image, place = row // (height * width), row % (height * width)
    line, column = place // width + SIDE // 2, place % width + SIDE // 2
    total = tl.zeros((ROWS, INS), dtype=tl.float32)
    for tap in range(SIDE * SIDE):
        from_line, from_column = line - tap // SIDE, column - tap % SIDE
        fits = (from_line >= 0) & (from_column >= 0) & (from_line % STRIDE == 0) & (from_column % STRIDE == 0)
        from_line, from_column = from_line // STRIDE, from_column // STRIDE
        inside = (row < rows) & fits & (from_line < out_height) & (from_column < out_width)
        start = dy + member * BATCH_OUT + ((image * out_height + from_line) * out_width + from_column) * outputs
        for first in range(0, outputs, OUTS):
            out = first + tl.arange(0, OUTS)
            known = out < outputs
            a = tl.load(start[:, None] + out[None, :], mask=inside[:, None] & known[None, :], other=0.0)
            at = w + ((member * outputs + out[:, None]) * (SIDE * SIDE) + tap) * inputs + channel[None, :]
            b = tl.load(at, mask=known[:, None] & (channel < inputs)[None, :], other=0.0)
            total += tl.dot(a, b)
    at = dx + member * BATCH_IN + row[:, None] * inputs + channel[None, :]
    tl.store(at, total.to(dx.dtype.element_ty), mask=(row < rows)[:, None] & (channel < inputs)[None, :])


@triton.jit
def weight_gradient_kernel(
    dy, x, parts, rows, rows_each: tl.constexpr, height, width, inputs: tl.constexpr, out_height, out_width,
    outputs: tl.constexpr, members, in_tiles,
    STRIDE: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr,
    BATCH_IN: tl.constexpr, BATCH_OUT: tl.constexpr,
):  # fmt: skip
    """A tile of one tap's weights, summed over a part of the rows; parts ``[S, M, out, taps, in]`` are added later."""
    split, member = tl.program_id(1), (tl.program_id(2) // (SIDE * SIDE)).to(tl.int64)
    tap = tl.program_id(2) % (SIDE * SIDE)
    out = (tl.program_id(0) // in_tiles) * OUTS + tl.arange(0, OUTS)
    channel = (tl.program_id(0) % in_tiles) * INS + tl.arange(0, INS)
    total = tl.zeros((OUTS, INS), dtype=tl.float32)
    for first in range(0, rows_each, ROWS):
        row = split * rows_each + first + tl.arange(0, ROWS)
        image, place = row // (out_height * out_width), row % (out_height * out_width)
        line = (place // out_width) * STRIDE - SIDE // 2 + tap // SIDE
        column = (place % out_width) * STRIDE - SIDE // 2 + tap % SIDE
        inside = (row < rows) & (line >= 0) & (line < height) & (column >= 0) & (column < width)
        at = dy + member * BATCH_OUT + row[None, :] * outputs + out[:, None]
        a = tl.load(at, mask=(row < rows)[None, :] & (out < outputs)[:, None], other=0.0)
        at = x + member * BATCH_IN + ((image * height + line) * width + column)[:, None] * inputs + channel[None, :]
        b = tl.load(at, mask=inside[:, None] & (channel < inputs)[None, :], other=0.0)
        total += tl.dot(a, b)
    at = parts + (((split * members + member) * outputs + out[:, None]) * (SIDE * SIDE) + tap) * inputs
    tl.store(at + channel[None, :], total, mask=(out < outputs)[:, None] & (channel < inputs)[None, :])


@triton.jit
def norm_sums_kernel(
    x, y, dy, mean, rstd, parts, rows, rows_each: tl.constexpr, channels, members,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Two sums of every channel over a part of the rows: of x and x², or of the gradient and its product with x̂."""
    split, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    known = channel < channels
    first_sum, second_sum = tl.zeros((WIDTH,), dtype=tl.float32), tl.zeros((WIDTH,), dtype=tl.float32)
    if BACKWARD:
        centre = tl.load(mean + member * channels + channel, mask=known, other=0.0)
        scale = tl.load(rstd + member * channels + channel, mask=known, other=0.0)
    for first in range(0, rows_each, ROWS):
        row = split * rows_each + first + tl.arange(0, ROWS)
        at = (member * rows + row[:, None]) * channels + channel[None, :]
        inside = (row < rows)[:, None] & known[None, :]
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
            first_sum += tl.sum(g, 0)
            second_sum += tl.sum(g * (a - centre[None, :]) * scale[None, :], 0)
        else:
            first_sum += tl.sum(a, 0)
            second_sum += tl.sum(a * a, 0)
    at = parts + (split * members + member) * 2 * channels + channel
    tl.store(at, first_sum, mask=known)
    tl.store(at + channels, second_sum, mask=known)


@triton.jit
def norm_forward_kernel(
    x, residual, scale, shift, y, rows, channels, HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """relu(x · scale + shift + residual), with numbers of a channel."""
    member = tl.program_id(1).to(tl.int64)
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    known = channel < channels
    at, inside = (member * rows + row[:, None]) * channels + channel[None, :], (row < rows)[:, None] & known[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    a = a * tl.load(scale + member * channels + channel, mask=known, other=0.0)[None, :]
    a += tl.load(shift + member * channels + channel, mask=known, other=0.0)[None, :]
    if HAS_RESIDUAL:
        a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, tl.maximum(a, 0.0).to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    x, y, dy, mean, rstd, gamma, sums, dx, dresidual, rows, channels,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """γ r (g − (Σg + x̂ Σg x̂) / rows), with g the gradient where the output is positive."""
    member = tl.program_id(1).to(tl.int64)
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    known = channel < channels
    own = member * channels + channel
    at, inside = (member * rows + row[:, None]) * channels + channel[None, :], (row < rows)[:, None] & known[None, :]
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, g, 0.0)
    r = tl.load(rstd + own, mask=known, other=0.0)
    hat = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    hat = (hat - tl.load(mean + own, mask=known, other=0.0)[None, :]) * r[None, :]
    of_g = tl.load(sums + member * 2 * channels + channel, mask=known, other=0.0)
    of_hat = tl.load(sums + (member * 2 + 1) * channels + channel, mask=known, other=0.0)
    factor = tl.load(gamma + own, mask=known, other=0.0) * r
    value = factor[None, :] * (g - (of_g[None, :] + hat * of_hat[None, :]) / rows)
    tl.store(dx + at, value.to(dx.dtype.element_ty), mask=inside)
    if HAS_RESIDUAL:
        tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=inside)


class Layer(NamedTuple):
    """A convolution without bias, of all members."""

    name: str
    members: int
    batch: int
    size: int
    inputs: int
    outputs: int
    side: int
    stride: int

    @property
    def out_size(self) -> int:
        """Height and width of outputs."""
        return (self.size - 1) // self.stride + 1


def power(number: int, least: int = 16) -> int:
    """The next power of two, since a product's sides are powers of two of 16 or more."""
    return max(1 << (number - 1).bit_length(), least)


def tile(channels: int, most: int = 64) -> int:
    """Channels of a tile."""
    return min(power(channels), most)


class Kernels(NamedTuple):
    """The kernels of one layer, for sizes of tiles."""

    layer: Layer
    rows: int = 128
    warps: int = 4

    def _sizes(self) -> dict[str, Any]:
        layer = self.layer
        return {
            "STRIDE": layer.stride,
            "SIDE": layer.side,
            "INS": tile(layer.inputs),
            "OUTS": tile(layer.outputs),
            "BATCH_IN": layer.batch * layer.size**2 * layer.inputs,
            "BATCH_OUT": layer.batch * layer.out_size**2 * layer.outputs,
            "num_warps": self.warps,
        }

    def _shapes(self) -> tuple[int, ...]:
        layer = self.layer
        return layer.size, layer.size, layer.inputs, layer.out_size, layer.out_size, layer.outputs

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Outputs ``[M, B, H', W', out]``."""
        layer = self.layer
        y = x.new_empty(layer.members, layer.batch, layer.out_size, layer.out_size, layer.outputs)
        rows = layer.batch * layer.out_size**2
        grid = (-(-rows // self.rows), -(-layer.outputs // tile(layer.outputs)), layer.members)
        forward_kernel[grid](x, w, y, rows, *self._shapes(), ROWS=self.rows, **self._sizes())
        return y

    def input_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        """The gradient of inputs."""
        layer = self.layer
        dx = dy.new_empty(layer.members, layer.batch, layer.size, layer.size, layer.inputs)
        rows = layer.batch * layer.size**2
        grid = (-(-rows // self.rows), -(-layer.inputs // tile(layer.inputs)), layer.members)
        input_gradient_kernel[grid](dy, w, dx, rows, *self._shapes(), ROWS=self.rows, **self._sizes())
        return dx

    def weight_gradient(self, dy: Tensor, x: Tensor, splits: int) -> Tensor:
        """The gradient of weights, in the dtype of activations."""
        layer = self.layer
        taps, rows = layer.side**2, layer.batch * layer.out_size**2
        step = 32
        each = -(-rows // splits // step) * step if rows >= splits * step else step
        splits = -(-rows // each)
        parts = torch.empty(
            splits, layer.members, layer.outputs, taps, layer.inputs, device=x.device, dtype=torch.float32
        )
        out_tiles, in_tiles = -(-layer.outputs // tile(layer.outputs)), -(-layer.inputs // tile(layer.inputs))
        grid = (out_tiles * in_tiles, splits, layer.members * taps)
        weight_gradient_kernel[grid](
            dy, x, parts, rows, each, *self._shapes(), layer.members, in_tiles, ROWS=step, **self._sizes()
        )
        return parts.sum(0).to(x.dtype).view(layer.members, layer.outputs, layer.side, layer.side, layer.inputs)


class Normed(NamedTuple):
    """What a backward pass of batch norm needs."""

    y: Tensor
    mean: Tensor
    rstd: Tensor


def norm_splits(rows: int, members: int) -> tuple[int, int]:
    """Parts of the rows, and rows of each: enough programs for a card's multiprocessors."""
    splits = max(1, min(-(-512 // members), rows // 256 or 1))
    each = -(-rows // splits // 64) * 64 if rows > splits * 64 else -(-rows // splits)
    return -(-rows // each), each


def norm_forward(x: Tensor, gamma: Tensor, beta: Tensor, residual: Tensor | None) -> Normed:
    """Batch norm over all but members and channels, residual and ReLU; ``gamma`` and ``beta`` are ``[M, C]``."""
    members, channels = x.shape[0], x.shape[-1]
    rows, width = x[0].numel() // channels, power(channels, 1)
    splits, each = norm_splits(rows, members)
    parts = torch.empty(splits, members, 2, channels, device=x.device, dtype=torch.float32)
    lines = max(1, 4096 // width)
    none = x
    norm_sums_kernel[(splits, members)](
        x, none, none, gamma, gamma, parts, rows, each, channels, members, BACKWARD=False,
        ROWS=min(lines, each & -each), WIDTH=width,
    )  # fmt: skip
    first, second = parts.sum(0).unbind(1)
    mean = first / rows
    rstd = (second / rows - mean.square()).clamp_min(0).add(1e-5).rsqrt()
    scale = gamma * rstd
    y = torch.empty_like(x)
    norm_forward_kernel[(-(-rows // lines), members)](
        x, none if residual is None else residual, scale, beta - mean * scale, y, rows, channels,
        HAS_RESIDUAL=residual is not None, ROWS=lines, WIDTH=width,
    )  # fmt: skip
    return Normed(y, mean, rstd)


def norm_backward(
    x: Tensor, dy: Tensor, normed: Normed, gamma: Tensor, residual: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of x, of the residual, of gamma and of beta."""
    members, channels = x.shape[0], x.shape[-1]
    rows, width = x[0].numel() // channels, power(channels, 1)
    splits, each = norm_splits(rows, members)
    parts = torch.empty(splits, members, 2, channels, device=x.device, dtype=torch.float32)
    lines = max(1, 4096 // width)
    norm_sums_kernel[(splits, members)](
        x, normed.y, dy, normed.mean, normed.rstd, parts, rows, each, channels, members, BACKWARD=True,
        ROWS=min(lines, each & -each), WIDTH=width,
    )  # fmt: skip
    sums = parts.sum(0)
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if residual else None
    norm_backward_kernel[(-(-rows // lines), members)](
        x, normed.y, dy, normed.mean, normed.rstd, gamma, sums, dx, x if dresidual is None else dresidual, rows,
        channels, HAS_RESIDUAL=residual, ROWS=lines, WIDTH=width,
    )  # fmt: skip
    return dx, dresidual, sums[:, 1], sums[:, 0]


def resnet_layers(members: int, batch: int, widths: list[int], size: int, blocks: str) -> list[Layer]:
    """The kinds of layers of a ResNet for images of 32 pixels, without its first."""
    layers = []
    for place, width in enumerate(widths):
        if place:
            before = widths[place - 1]
            layers.append(Layer(f"{blocks}: 3x3, stride 2", members, batch, size, before, width, 3, 2))
            layers.append(Layer(f"{blocks}: 1x1, stride 2", members, batch, size, before, width, 1, 2))
            size //= 2
        layers.append(Layer(f"{blocks}: 3x3", members, batch, size, width, width, 3, 1))
    return layers


LAYERS = [
    *resnet_layers(20, 64, [16, 32, 64], 32, "20 ResNet-20"),
    *resnet_layers(5, 64, [16, 32, 64], 32, "5 ResNet-20"),
    *resnet_layers(5, 128, [64, 128, 256, 512], 32, "5 ResNet-18"),
]
SMALL = [
    Layer("3x3", 2, 2, 5, 3, 4, 3, 1),
    Layer("3x3, stride 2", 2, 3, 6, 16, 20, 3, 2),
    Layer("3x3, stride 2, odd", 1, 2, 7, 5, 6, 3, 2),
    Layer("1x1", 3, 2, 4, 70, 18, 1, 1),
    Layer("1x1, stride 2", 2, 2, 6, 6, 70, 1, 2),
]


def numbers_of(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weights and gradients of outputs."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(DTYPE)

    x = drawn(layer.members, layer.batch, layer.size, layer.size, layer.inputs)
    w = drawn(layer.members, layer.outputs, layer.side, layer.side, layer.inputs)
    w = w / (layer.side * layer.inputs**0.5)
    return x, w.to(DTYPE), drawn(layer.members, layer.batch, layer.out_size, layer.out_size, layer.outputs)


def reference(layer: Layer, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Outputs, gradients of inputs and of weights, in float32, member by member."""
    results: list[list[Tensor]] = []
    for own_x, own_w, own_dy in zip(x.float(), w.float(), dy.float(), strict=True):
        a, b = (tensor.permute(0, 3, 1, 2).requires_grad_() for tensor in (own_x, own_w))
        y = F.conv2d(a, b, stride=layer.stride, padding=layer.side // 2)
        of_x, of_w = torch.autograd.grad(y, (a, b), own_dy.permute(0, 3, 1, 2))
        results.append([tensor.detach().permute(0, 2, 3, 1) for tensor in (y, of_x, of_w)])
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def error(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖."""
    return float(torch.linalg.vector_norm(ours.float() - theirs) / torch.linalg.vector_norm(theirs))


def errors_of(layer: Layer) -> dict[str, float]:
    """Relative errors of all kernels of a layer, with poisoned memory before each."""
    x, w, dy = numbers_of(layer)
    kernels = Kernels(layer, rows=16 if INTERPRETED else 128)
    theirs = reference(layer, x, w, dy)
    ours = [kernels.forward(x, w), kernels.input_gradient(dy, w), kernels.weight_gradient(dy, x, 3)]
    names = ("forward", "input gradient", "weight gradient")
    told = {name: error(mine, yours) for name, mine, yours in zip(names, ours, theirs, strict=True)}
    return told | norm_errors(theirs[0].to(DTYPE), dy)


def norm_errors(x: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative errors of batch norm, residual and ReLU."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    members, channels = x.shape[0], x.shape[-1]
    gamma, beta = (torch.rand(members, channels, generator=generator, device=DEVICE) + 0.5 for _ in range(2))
    told: dict[str, float] = {}
    for residual in (None, torch.randn(x.shape, generator=generator, device=DEVICE).to(DTYPE)):
        a = x.float().requires_grad_()
        r = None if residual is None else residual.float().requires_grad_()
        g, b = (tensor.clone().requires_grad_() for tensor in (gamma, beta))
        normed = (a - a.mean((1, 2, 3), keepdim=True)) / (a.var((1, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
        y = normed * g[:, None, None, None] + b[:, None, None, None]
        y = (y if r is None else y + r).relu()
        # Where rounding decides whether a unit is off, gradients differ for good reason: theirs take our signs.
        ours = norm_forward(x, gamma, beta, residual)
        signs = (ours.y > 0).float()
        before = normed * g[:, None, None, None] + b[:, None, None, None] + (0 if r is None else r)
        leaves = [leaf for leaf in (a, r, g, b) if leaf is not None]
        grads = torch.autograd.grad(before * signs, leaves, dy.float())
        mine = [part for part in norm_backward(x, dy, ours, gamma, residual is not None) if part is not None]
        name = "norm" if residual is None else "norm with residual"
        told[f"{name}, forward"] = error(ours.y, y.detach())
        told[f"{name}, backward"] = max(error(own, theirs) for own, theirs in zip(mine, grads, strict=True))
    return told


def graphed(function: Callable[[], object]) -> float:
    """Microseconds of a replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(33):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return median(times[3:])


def on_streams(jobs: list[Callable[[], object]], streams: list[torch.cuda.Stream]) -> Callable[[], list[object]]:
    """Jobs side by side, as the library's ``"streams"``."""

    def run() -> list[object]:
        current = torch.cuda.current_stream()
        results = []
        for stream in streams[: len(jobs)]:
            stream.wait_stream(current)
        for place, job in enumerate(jobs):
            with torch.cuda.stream(streams[place % len(streams)]):
                results.append(job())
        for stream in streams[: len(jobs)]:
            current.wait_stream(stream)
        return results

    return run


def timed(layer: Layer, streams: list[torch.cuda.Stream]) -> dict[str, Any]:
    """Microseconds of every kernel for several sizes of tiles, and of cuDNN on streams."""
    x, w, dy = numbers_of(layer)
    padding, stride = layer.side // 2, layer.stride
    of_x = [tensor.permute(0, 3, 1, 2) for tensor in x]
    of_w = [tensor.permute(0, 3, 1, 2) for tensor in w]
    of_dy = [tensor.permute(0, 3, 1, 2) for tensor in dy]

    def cudnn(place: int, mask: list[bool]) -> object:
        arguments = (None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)
        return torch.ops.aten.convolution_backward(of_dy[place], of_x[place], of_w[place], *arguments)

    count = range(layer.members)
    forwards = [lambda p=p: F.conv2d(of_x[p], of_w[p], stride=stride, padding=padding) for p in count]
    ways = {
        "forward": forwards,
        "input gradient": [lambda p=p: cudnn(p, [True, False, False]) for p in count],
        "weight gradient": [lambda p=p: cudnn(p, [False, True, False]) for p in count],
    }
    told: dict[str, Any] = {name: {"cudnn": graphed(on_streams(jobs, streams))} for name, jobs in ways.items()}
    for rows in (64, 128, 256):
        for warps in (4, 8):
            kernels = Kernels(layer, rows, warps)
            tried = {
                "forward": lambda k=kernels: k.forward(x, w),
                "input gradient": lambda k=kernels: k.input_gradient(dy, w),
            }
            for name, function in tried.items():
                told[name][f"{rows} rows, {warps} warps"] = graphed(function)
    for splits in (4, 16, 64):
        kernels = Kernels(layer, 128, 4)
        told["weight gradient"][f"{splits} parts"] = graphed(lambda k=kernels, s=splits: k.weight_gradient(dy, x, s))
    if layer.stride == 1:
        told |= timed_norm(layer, dy, streams)
    return told


def timed_norm(layer: Layer, x: Tensor, streams: list[torch.cuda.Stream]) -> dict[str, Any]:
    """Microseconds of batch norm + residual + ReLU, forward and backward, and of torch's on streams."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    residual, dy = (torch.randn(x.shape, generator=generator, device=DEVICE).to(DTYPE) for _ in range(2))
    gamma, beta = (torch.rand(layer.members, layer.outputs, generator=generator, device=DEVICE) for _ in range(2))
    ours = norm_forward(x, gamma, beta, residual)
    a, r = (tensor.detach().clone().requires_grad_() for tensor in (x, residual))
    g, b = (tensor.clone().requires_grad_() for tensor in (gamma, beta))

    def theirs(place: int) -> Tensor:
        y = F.batch_norm(a[place].permute(0, 3, 1, 2), None, None, g[place], b[place], training=True)
        return (y + r[place].permute(0, 3, 1, 2)).relu()

    def both(place: int) -> object:
        return torch.autograd.grad(theirs(place), (a, r, g, b), dy[place].permute(0, 3, 1, 2))

    count = range(layer.members)
    with torch.no_grad():
        forward = graphed(on_streams([lambda p=p: theirs(p) for p in count], streams))
    together = graphed(on_streams([lambda p=p: both(p) for p in count], streams))
    return {
        "norm, forward": {"torch": forward, "ours": graphed(lambda: norm_forward(x, gamma, beta, residual))},
        "norm, backward": {
            "torch": together - forward,
            "ours": graphed(lambda: norm_backward(x, dy, ours, gamma, True)),
        },
    }


def main() -> None:
    """Compare and time all layers, and write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=420.0)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    most = 1e-4 if INTERPRETED else 2e-2
    started, failed = time.perf_counter(), 0
    if options.check or INTERPRETED:
        for layer in SMALL:
            told = errors_of(layer)
            failed += any(not value <= most for value in told.values())
            print(layer.name, {name: f"{value:.1e}" for name, value in told.items()}, flush=True)
        raise SystemExit(failed)
    made = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **library(),
    }
    print(", ".join(f"{key} {value}" for key, value in made.items()), flush=True)
    streams = [torch.cuda.Stream() for _ in range(32)]
    rows: list[dict[str, Any]] = []
    for layer in LAYERS:
        if options.only not in layer.name or time.perf_counter() - started > options.budget:
            continue
        row: dict[str, Any] = {**layer._asdict()}
        try:
            row["errors"] = errors_of(layer)
            if all(value <= most for value in row["errors"].values()):
                row["microseconds"] = timed(layer, streams)
        except Exception as reason:  # a kernel may not compile for a size
            row["refused"] = (str(reason).splitlines() or [type(reason).__name__])[0]
        rows.append(row)
        print(f"{layer.name}, {layer.inputs} -> {layer.outputs} at {layer.size}: {row.get('refused', '')}")
        for name, times in row.get("microseconds", {}).items():
            print(f"    {name:18s}", {way: round(value, 1) for way, value in times.items()}, flush=True)
        if "microseconds" not in row:
            print("    ", row.get("errors"), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

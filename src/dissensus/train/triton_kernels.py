"""Optimisers as one pass over the weights, in Triton, which comes with PyTorch's builds for CUDA.

A row of the matrix ``[G, P]`` is one member. Everything that differs between rows is read from columns ``[G]``; a row
whose ``active`` entry is 0 is not touched. The equations are those of `dissensus.train.optim`, in the same order.

With ``SPLIT`` a gradient comes in two matrices: ``grad`` ``[G, width]`` in bfloat16, of the first columns, and ``rest``
of the others. The new weights of the first columns are then also written to ``copies`` ``[G, width]``. Both widths come
divided by ``ALIGN``, which tells the compiler how many neighbours a thread may read at once, in either precision.
"""

import triton  # pyright: ignore[reportMissingImports]  # absent where there is no CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 1024


@triton.jit
def gradient_at(grad, rest, row, within, columns, width, SPLIT: tl.constexpr):
    """The gradient of some columns of a row, in float32."""
    row = row.to(tl.int64)
    if SPLIT:
        lowered = within < width
        g = tl.load(grad + row * width + within, mask=lowered, other=0.0).to(tl.float32)
        others = tl.load(
            rest + row * (columns - width) + within - width, mask=(within >= width) & (within < columns), other=0.0
        )
        g = tl.where(lowered, g, others)
    else:
        g = tl.load(grad + row * columns + within, mask=within < columns, other=0.0)
    return g


@triton.jit
def store_copies(copies, p, row, within, width, SPLIT: tl.constexpr):
    """Write new weights of a row to their copies, in the precision of these."""
    if SPLIT:
        tl.store(copies + row.to(tl.int64) * width + within, p.to(copies.dtype.element_ty), mask=within < width)


@triton.jit(do_not_specialize=["columns", "width"])
def adam_rows(
    flat,
    grad,
    rest,
    copies,
    columns,
    width,
    mean,
    square,
    active,
    scale,
    penalty,
    shrink,
    slowness,
    root,
    first,
    second,
    eps,
    SPLIT: tl.constexpr,
    ALIGN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Adam with a scaled gradient, an L2 penalty and a shrinking of weights, each of which may be neutral."""
    row = tl.program_id(1)
    columns, width = columns * ALIGN, width * ALIGN
    if tl.load(active + row) != 0:
        within = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = within < columns
        at = row.to(tl.int64) * columns + within
        p = tl.load(flat + at, mask=inside, other=0.0)
        m = tl.load(mean + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        g = gradient_at(grad, rest, row, within, columns, width, SPLIT)
        g = g * tl.load(scale + row) + tl.load(penalty + row) * p
        m += (g - m) * first
        v = v * (1 - second) + g * g * second
        spread = (tl.sqrt(v) * tl.load(root + row) + eps) * tl.load(slowness + row)
        p = p * tl.load(shrink + row) - m / spread
        tl.store(flat + at, p, mask=inside)
        store_copies(copies, p, row, within, width, SPLIT)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)


@triton.jit(do_not_specialize=["columns", "width"])
def sgd_rows(
    flat,
    grad,
    rest,
    copies,
    columns,
    width,
    velocity,
    active,
    scale,
    penalty,
    momentum,
    rate,
    NESTEROV: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Stochastic gradient descent with momentum, a scaled gradient and an L2 penalty."""
    row = tl.program_id(1)
    columns, width = columns * ALIGN, width * ALIGN
    if tl.load(active + row) != 0:
        within = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = within < columns
        at = row.to(tl.int64) * columns + within
        p = tl.load(flat + at, mask=inside, other=0.0)
        g = gradient_at(grad, rest, row, within, columns, width, SPLIT)
        g = g * tl.load(scale + row) + tl.load(penalty + row) * p
        mu = tl.load(momentum + row)
        v = tl.load(velocity + at, mask=inside, other=0.0) * mu + g
        tl.store(velocity + at, v, mask=inside)
        if NESTEROV:
            v = g + mu * v
        p = p - tl.load(rate + row) * v
        tl.store(flat + at, p, mask=inside)
        store_copies(copies, p, row, within, width, SPLIT)

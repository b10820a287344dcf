"""Optimisers as one pass over the weights, in Triton, which comes with PyTorch's builds for CUDA.

A row of the matrix ``[G, P]`` is one member. Everything that differs between rows is read from columns ``[G]``; a row
whose ``active`` entry is 0 is not touched. The equations are those of `dissensus.train.optim`, in the same order.
"""

import triton  # pyright: ignore[reportMissingImports]  # absent where there is no CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 1024


@triton.jit
def adam_rows(
    flat,
    grad,
    mean,
    square,
    active,
    scale,
    penalty,
    shrink,
    slowness,
    root,
    columns,
    first,
    second,
    eps,
    SIZE: tl.constexpr,
):
    """Adam with a scaled gradient, an L2 penalty and a shrinking of weights, each of which may be neutral."""
    row = tl.program_id(1)
    if tl.load(active + row) != 0:
        within = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = within < columns
        at = row.to(tl.int64) * columns + within
        p = tl.load(flat + at, mask=inside, other=0.0)
        m = tl.load(mean + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        g = tl.load(grad + at, mask=inside, other=0.0) * tl.load(scale + row) + tl.load(penalty + row) * p
        m += (g - m) * first
        v = v * (1 - second) + g * g * second
        spread = (tl.sqrt(v) * tl.load(root + row) + eps) * tl.load(slowness + row)
        tl.store(flat + at, p * tl.load(shrink + row) - m / spread, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)


@triton.jit
def sgd_rows(
    flat, grad, velocity, active, scale, penalty, momentum, rate, columns, NESTEROV: tl.constexpr, SIZE: tl.constexpr
):
    """Stochastic gradient descent with momentum, a scaled gradient and an L2 penalty."""
    row = tl.program_id(1)
    if tl.load(active + row) != 0:
        within = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = within < columns
        at = row.to(tl.int64) * columns + within
        p = tl.load(flat + at, mask=inside, other=0.0)
        g = tl.load(grad + at, mask=inside, other=0.0) * tl.load(scale + row) + tl.load(penalty + row) * p
        mu = tl.load(momentum + row)
        v = tl.load(velocity + at, mask=inside, other=0.0) * mu + g
        tl.store(velocity + at, v, mask=inside)
        if NESTEROV:
            v = g + mu * v
        tl.store(flat + at, p - tl.load(rate + row) * v, mask=inside)

"""Convolutions and batch norm of all members in one kernel each, in Triton, which comes with PyTorch's builds for CUDA.

Images are channels last: a member's are a matrix of rows (image, line, column) and channels, ``[M, B·H·W, C]``. Sums
are in float32, and have an order that does not change from call to call.
"""

# Kernels branch on constants, which a type checker cannot see.
# pyright: reportPossiblyUnboundVariable=false

import triton  # pyright: ignore[reportMissingImports]  # absent where there is no CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def source(place, tap, STRIDE: tl.constexpr, PADDING: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The line (or column) that a tap reads for an output's, and whether there is one.

    The gradient of inputs is the same sum with the roles of both sides changed: strides pass over some lines.
    """
    if TRANSPOSED:
        shifted = place + PADDING - tap
        line = shifted // STRIDE
        fits = (shifted >= 0) & (line * STRIDE == shifted)
    else:
        line = place * STRIDE - PADDING + tap
        fits = line >= 0
    return line, fits


@triton.jit
def convolve(
    x,
    w,
    bias,
    y,
    rows,
    height,
    width,
    to_height,
    to_width,
    x_member,
    w_member,
    w_out,
    w_in,
    w_tap,
    bias_member,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    LINE_PADDING: tl.constexpr,
    COLUMN_PADDING: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """A tile of one member's outputs: Σ over taps and channels of what a tap reads, times its weight.

    ``x [height, width, INPUTS]`` of every image becomes ``y [to_height, to_width, OUTPUTS]``. With ``TRANSPOSED``, x is
    the gradient of outputs and y the gradient of inputs.
    """
    member = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    known_row, known_out = row < rows, out < OUTPUTS
    image, place = row // (to_height * to_width), row % (to_height * to_width)
    line, column = place // to_width, place % to_width
    x_at = x + member * x_member
    w_at = w + member * w_member
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for first in range(0, LINES * COLUMNS * INPUTS, STEP):
        if INPUTS % STEP == 0:  # one tap in each step
            tap = first // INPUTS
            # A compiler that knows the alignment reads 16 bytes at a time, and the next step's while it multiplies.
            channel = tl.multiple_of(first % INPUTS, STEP) + tl.arange(0, STEP)
            from_line, fits_line = source(line, tap // COLUMNS, LINE_STRIDE, LINE_PADDING, TRANSPOSED)
            from_column, fits_column = source(column, tap % COLUMNS, COLUMN_STRIDE, COLUMN_PADDING, TRANSPOSED)
            inside = known_row & fits_line & fits_column & (from_line < height) & (from_column < width)
            at = ((image * height + from_line) * width + from_column) * INPUTS
            a = tl.load(x_at + at[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
            at = tap * w_tap + channel * w_in
            b = tl.load(w_at + at[:, None] + out[None, :] * w_out, mask=known_out[None, :], other=0.0)
        else:
            number = first + tl.arange(0, STEP)
            known = number < LINES * COLUMNS * INPUTS
            tap, channel = number // INPUTS, number % INPUTS
            from_line, fits_line = source(
                line[:, None], (tap // COLUMNS)[None, :], LINE_STRIDE, LINE_PADDING, TRANSPOSED
            )
            from_column, fits_column = source(
                column[:, None], (tap % COLUMNS)[None, :], COLUMN_STRIDE, COLUMN_PADDING, TRANSPOSED
            )
            inside = known_row[:, None] & known[None, :] & fits_line & fits_column
            inside = inside & (from_line < height) & (from_column < width)
            at = ((image[:, None] * height + from_line) * width + from_column) * INPUTS + channel[None, :]
            a = tl.load(x_at + at, mask=inside, other=0.0)
            at = tap * w_tap + channel * w_in
            b = tl.load(w_at + at[:, None] + out[None, :] * w_out, mask=known[:, None] & known_out[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + member * bias_member + out, mask=known_out, other=0.0).to(tl.float32)[None, :]
    at = (member * rows + row)[:, None] * OUTPUTS + out[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=known_row[:, None] & known_out[None, :])


@triton.jit
def weigh(
    x,
    dy,
    parts,
    members,
    rows,
    x_member,
    part_in,
    part_tap,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FROM_HEIGHT: tl.constexpr,
    FROM_WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    LINE_PADDING: tl.constexpr,
    COLUMN_PADDING: tl.constexpr,
    PRECISION: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """A tile of the gradient of one member's weights, summed over a part of the rows; `add_parts` adds the parts.

    ``dy [FROM_HEIGHT, FROM_WIDTH, OUTPUTS]`` is the gradient of outputs of ``x [HEIGHT, WIDTH, INPUTS]``. Taps and
    channels are one axis, so that a tile of few channels has several taps. A part has EACH rows, a multiple of ROWS.
    """
    size: tl.constexpr = LINES * COLUMNS * INPUTS
    tiles: tl.constexpr = (size + STEP - 1) // STEP
    split, member = tl.program_id(1), tl.program_id(2).to(tl.int64)
    out = (tl.program_id(0) // tiles) * OUTS + tl.arange(0, OUTS)
    number = (tl.program_id(0) % tiles) * STEP + tl.arange(0, STEP)
    known_out, known = out < OUTPUTS, number < size
    tap, channel = number // INPUTS, number % INPUTS
    x_at = x + member * x_member
    dy_at = dy + member * rows * OUTPUTS
    total = tl.zeros((OUTS, STEP), dtype=tl.float32)
    for first in range(0, EACH, ROWS):
        row = split * EACH + first + tl.arange(0, ROWS)
        known_row = row < rows
        image, place = row // (FROM_HEIGHT * FROM_WIDTH), row % (FROM_HEIGHT * FROM_WIDTH)
        line, fits_line = source(
            (place // FROM_WIDTH)[:, None], (tap // COLUMNS)[None, :], LINE_STRIDE, LINE_PADDING, False
        )
        column, fits_column = source(
            (place % FROM_WIDTH)[:, None], (tap % COLUMNS)[None, :], COLUMN_STRIDE, COLUMN_PADDING, False
        )
        inside = known_row[:, None] & known[None, :] & fits_line & fits_column & (line < HEIGHT) & (column < WIDTH)
        at = ((image[:, None] * HEIGHT + line) * WIDTH + column) * INPUTS + channel[None, :]
        b = tl.load(x_at + at, mask=inside, other=0.0)
        at = row[:, None] * OUTPUTS + out[None, :]
        a = tl.load(dy_at + at, mask=known_row[:, None] & known_out[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    part = split.to(tl.int64) * members + member
    at = (part * OUTPUTS + out[:, None]) * size + (channel * part_in + tap * part_tap)[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=known_out[:, None] & known[None, :])


@triton.jit
def add_parts(parts, total, size, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """Sums over the first axis of ``parts [splits, size]``."""
    own = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    at, inside = own, own < size
    value = tl.zeros((SIZE,), dtype=tl.float32)
    for _ in range(SPLITS):
        value += tl.load(parts + at, mask=inside, other=0.0)
        at += size
    tl.store(total + own, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def norm_sums(
    x,
    y,
    dy,
    mean,
    rstd,
    parts,
    members,
    rows,
    CHANNELS: tl.constexpr,
    BACKWARD: tl.constexpr,
    RELU: tl.constexpr,
    FIRST: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Two sums of every channel over a part of the rows: of x − x₀ and its square, or of the gradient g and of g x̂.

    x₀ is the mean of the FIRST rows, so that squares of numbers far from zero lose no digits, and one row that is far
    from the others costs none either. It is written where the mean will be.
    """
    split, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    known = channel < CHANNELS
    own = member * rows * CHANNELS
    first_sum, second_sum = tl.zeros((WIDTH,), dtype=tl.float32), tl.zeros((WIDTH,), dtype=tl.float32)
    if BACKWARD:
        centre = tl.load(mean + member * CHANNELS + channel, mask=known, other=0.0)
        scale = tl.load(rstd + member * CHANNELS + channel, mask=known, other=0.0)
    else:
        early = tl.arange(0, FIRST)
        places = early[:, None] * CHANNELS + channel[None, :]
        there = (early < rows)[:, None] & known[None, :]
        sums = tl.sum(tl.load(x + own + places, mask=there, other=0.0).to(tl.float32), 0)
        centre = sums / tl.minimum(rows, FIRST)
        if tl.program_id(0) == 0:
            tl.store(mean + member * CHANNELS + channel, centre, mask=known)
    for first in range(0, EACH, ROWS):
        row = split * EACH + first + tl.arange(0, ROWS)
        at = row[:, None] * CHANNELS + channel[None, :]
        inside = (row < rows)[:, None] & known[None, :]
        a = tl.load(x + own + at, mask=inside, other=0.0).to(tl.float32) - centre[None, :]
        if BACKWARD:
            g = tl.load(dy + own + at, mask=inside, other=0.0).to(tl.float32)
            if RELU:
                g = tl.where(tl.load(y + own + at, mask=inside, other=0.0).to(tl.float32) <= 0, 0.0, g)
            first_sum += tl.sum(g, 0)
            second_sum += tl.sum(g * a * scale[None, :], 0)
        else:
            a = tl.where(inside, a, 0.0)
            first_sum += tl.sum(a, 0)
            second_sum += tl.sum(a * a, 0)
    at = (split.to(tl.int64) * members + member) * 2 * CHANNELS + channel
    tl.store(parts + at, first_sum, mask=known)
    tl.store(parts + at + CHANNELS, second_sum, mask=known)


@triton.jit
def norm_statistics(
    parts,
    mean,
    rstd,
    running_mean,
    running_variance,
    members,
    rows,
    momentum,
    eps,
    CHANNELS: tl.constexpr,
    TRACKED: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Means and 1 / √(variance + eps) of all rows, and running statistics moved towards them."""
    member = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    known = channel < CHANNELS
    first_sum, second_sum = tl.zeros((WIDTH,), dtype=tl.float32), tl.zeros((WIDTH,), dtype=tl.float32)
    for split in range(SPLITS):
        at = (split * members + member) * 2 * CHANNELS + channel
        first_sum += tl.load(parts + at, mask=known, other=0.0)
        second_sum += tl.load(parts + at + CHANNELS, mask=known, other=0.0)
    shift = first_sum / rows
    variance = tl.maximum(second_sum / rows - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    own = member * CHANNELS + channel
    value = tl.load(mean + own, mask=known, other=0.0) + shift
    tl.store(mean + own, value, mask=known)
    tl.store(rstd + own, 1.0 / tl.sqrt(variance + eps), mask=known)
    if TRACKED:
        before = tl.load(running_mean + own, mask=known, other=0.0).to(tl.float32)
        now = before + momentum * (value - before)
        tl.store(running_mean + own, now.to(running_mean.dtype.element_ty), mask=known)
        before = tl.load(running_variance + own, mask=known, other=0.0).to(tl.float32)
        now = before + momentum * (variance * (rows / (rows - 1.0)) - before)
        tl.store(running_variance + own, now.to(running_variance.dtype.element_ty), mask=known)


@triton.jit
def norm_rows(
    x,
    residual,
    mean,
    rstd,
    gamma,
    beta,
    y,
    rows,
    gamma_member,
    beta_member,
    CHANNELS: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """relu((x − mean) rstd γ + β + residual); NaN stays NaN."""
    member = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    known = channel < CHANNELS
    own = member * CHANNELS + channel
    start = member * rows * CHANNELS
    at, inside = row[:, None] * CHANNELS + channel[None, :], (row < rows)[:, None] & known[None, :]
    a = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(rstd + own, mask=known, other=0.0)
    if AFFINE:
        scale *= tl.load(gamma + member * gamma_member + channel, mask=known, other=0.0).to(tl.float32)
    a = (a - tl.load(mean + own, mask=known, other=0.0)[None, :]) * scale[None, :]
    if AFFINE:
        a += tl.load(beta + member * beta_member + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        a += tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        a = tl.where(a <= 0, 0.0, a)
    tl.store(y + start + at, a.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_gradient(
    x,
    y,
    dy,
    mean,
    rstd,
    gamma,
    sums,
    dx,
    dresidual,
    rows,
    gamma_member,
    CHANNELS: tl.constexpr,
    AFFINE: tl.constexpr,
    TRAINING: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """γ rstd (g − (Σg + x̂ Σg x̂) / rows), in evaluation γ rstd g, with g the gradient where the output is positive."""
    member = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    known = channel < CHANNELS
    own = member * CHANNELS + channel
    start = member * rows * CHANNELS
    at, inside = row[:, None] * CHANNELS + channel[None, :], (row < rows)[:, None] & known[None, :]
    g = tl.load(dy + start + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(tl.load(y + start + at, mask=inside, other=0.0).to(tl.float32) <= 0, 0.0, g)
    if HAS_RESIDUAL:
        tl.store(dresidual + start + at, g.to(dresidual.dtype.element_ty), mask=inside)
    r = tl.load(rstd + own, mask=known, other=0.0)
    factor = r
    if AFFINE:
        factor *= tl.load(gamma + member * gamma_member + channel, mask=known, other=0.0).to(tl.float32)
    if TRAINING:
        hat = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        hat = (hat - tl.load(mean + own, mask=known, other=0.0)[None, :]) * r[None, :]
        of_g = tl.load(sums + member * 2 * CHANNELS + channel, mask=known, other=0.0)
        of_hat = tl.load(sums + (member * 2 + 1) * CHANNELS + channel, mask=known, other=0.0)
        g -= (of_g[None, :] + hat * of_hat[None, :]) / rows
    tl.store(dx + start + at, (factor[None, :] * g).to(dx.dtype.element_ty), mask=inside)

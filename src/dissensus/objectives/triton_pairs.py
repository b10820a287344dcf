"""One pass over logits for the pairs of LDR, in Triton, which comes with PyTorch's builds for CUDA.

A program has one row of logits: one member on one example. The equations are those of `dissensus.objectives.pair_pass`.
"""

import triton  # pyright: ignore[reportMissingImports]  # absent where there is no CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def forward_rows(logits, labels, log_sum, at_label, log_rest, predicted, batch, classes, SIZE: tl.constexpr):
    """log Σ exp z, log p of the label, the predicted class (the lowest of equals) and log(1 − p) there."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    z = tl.load(logits + row * classes + place, mask=place < classes, other=float("-inf")).to(tl.float32)
    top = tl.max(z, 0)
    is_best = ((z == top) | (z != z)) & (place < classes)  # a row of NaN has a class, too: others look it up
    best = tl.min(tl.where(is_best, place, SIZE), 0)
    others = tl.where(place == best, float("-inf"), z)
    second = tl.max(others, 0)
    rest = tl.sum(tl.exp(others - second), 0)
    # From the second largest, so that log(1 − p) is finite for any finite logits.
    whole = top + tl.log(1.0 + tl.exp(second - top) * rest)
    label = tl.load(labels + row % batch)
    known = (label >= 0) & (label < classes)  # nothing else tells of a label that is no class
    z_label = tl.where(known, tl.sum(tl.where(place == label, z, 0.0), 0), float("nan"))
    tl.store(log_sum + row, whole)
    tl.store(at_label + row, z_label - whole)
    tl.store(log_rest + row, second + tl.log(rest) - whole)
    tl.store(predicted + row, best.to(tl.int64))


@triton.jit
def backward_rows(
    logits,
    labels,
    log_sum,
    log_rest,
    predicted,
    of_label,
    of_rest,
    of_all,
    grad,
    batch,
    classes,
    SIZE: tl.constexpr,
):
    """The gradient of logits, apart from what is added at predicted classes: a p(k) + g share(k) + of the label."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    inside = place < classes
    z = tl.load(logits + row * classes + place, mask=inside, other=float("-inf")).to(tl.float32)
    log_p = z - tl.load(log_sum + row)
    best = tl.load(predicted + row)
    share = tl.where(place == best, 0.0, tl.exp(log_p - tl.load(log_rest + row)))
    at_label = tl.where(place == tl.load(labels + row % batch), tl.load(of_label + row), 0.0)
    value = tl.load(of_all + row) * tl.exp(log_p) + tl.load(of_rest + row) * share + at_label
    tl.store(grad + row * classes + place, value, mask=inside)

"""Masks of Masksembles: N different rows with equally many ones, and a one in every column; constructed, not searched.

The procedure of the Masksembles paper draws M of M·S positions N times and drops unused columns. For the width that
remains, all such matrices are equally likely: S determines the width alone. So a matrix is drawn for its width
directly: columns independently, then as few ones are moved as needed to give all rows the same number of ones.
"""

import itertools
import math
import random

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dissensus import checks
from dissensus.randomness import Use, derived_seed

LARGEST_SCALE = 1e6


def expected_width(count: int, ones: int, scale: float) -> float:
    """Number of used columns when ``count`` masks each take ``ones`` of ``ones · scale`` positions (equation 4).

    >>> expected_width(4, 64, 2.0)
    120.0
    """
    checks.count("count", count)
    checks.count("ones", ones)
    checks.number("scale", scale, 1)
    return ones * scale * -math.expm1(count * math.log1p(-1 / scale)) if scale > 1 else float(ones)


def expected_iou(scale: float) -> float:
    """Approximate intersection over union of two masks (equation 6): 1 / (2S − 1).

    >>> expected_iou(2.0)
    0.3333333333333333
    """
    checks.number("scale", scale, 1)
    return 1 / (2 * scale - 1)


def iou(masks: Bool[Tensor, "N W"]) -> float:
    """Mean intersection over union of all pairs of masks.

    >>> iou(torch.tensor([[True, True, False], [False, True, True]]))
    0.3333333333333333
    """
    if masks.ndim != 2 or len(masks) < 2:
        checks.refuse("masks", "be two masks or more, [N, width]", list(masks.shape))
    rows = masks.double()
    common = rows @ rows.T
    sizes = rows.sum(1)
    ratios = common / (sizes.unsqueeze(0) + sizes.unsqueeze(1) - common)
    return float(ratios[*torch.triu_indices(len(rows), len(rows), 1)].mean())


def is_feasible(width: int, count: int, ones: int) -> bool:
    """Whether ``count`` different masks with ``ones`` ones can use all of ``width`` columns.

    >>> is_feasible(4, 4, 2), is_feasible(9, 4, 2), is_feasible(4, 7, 2)
    (True, False, False)
    """
    if not ones <= width <= count * ones:
        return False
    return (ones < width and count <= width) or count <= math.comb(width, ones)  # the former without a huge number


def generate(count: int, ones: int, scale: float, seed: int = 0) -> Bool[Tensor, "N W"]:
    """N masks with M ones each, ``int(expected_width(N, M, S))`` columns wide.

    Args:
        count: N, the number of masks.
        ones: M, the number of features that each mask keeps.
        scale: S, at least 1. Masks have less in common (`expected_iou`) and are wider for larger S.
        seed: Determines the masks.

    >>> generate(4, 10, 2.0).shape
    torch.Size([4, 18])
    """
    width = _width(count, ones, scale)
    if scale == 1 and count > 1:
        checks.refuse("scale", "be above 1 for masks to differ", scale)
    if not is_feasible(width, count, ones):
        enough = next(w for w in range(width, count * ones + 1) if is_feasible(w, count, ones))
        low = math.ceil(1e3 * scale_of(enough, count, ones)) / 1e3 if enough < count * ones else math.inf
        if low == math.inf:
            more = next(m for m in itertools.count(ones + 1) if is_feasible(_width(count, m, scale), count, m))
            checks.refuse("ones", f"be at least {more} for {count} different masks at a scale of {scale:g}", ones)
        checks.refuse("scale", f"be at least {low:g} for {count} different masks of {ones} ones", scale)
    return draw_masks(width, count, ones, seed)


def for_width(width: int, count: int, scale: float, seed: int = 0) -> Bool[Tensor, "N width"]:
    """N masks for a layer of a given width, with the number of ones that belongs to the scale.

    Args:
        width: Channels of the layer.
        count: N, the number of masks.
        scale: S. The number of ones is rounded to the nearer possible whole number.
        seed: Determines the masks.

    >>> masks = for_width(64, 4, 2.0)
    >>> masks.shape, masks.sum(1)
    (torch.Size([4, 64]), tensor([34, 34, 34, 34]))
    """
    return draw_masks(width, count, ones_for(width, count, scale), seed)


def ones_for(width: int, count: int, scale: float) -> int:
    """M for a layer: the number of its channels that each of N masks keeps at a scale.

    >>> ones_for(64, 4, 2.0)
    34
    """
    checks.count("width", width)
    checks.count("count", count)
    checks.number("scale", scale, 1, LARGEST_SCALE)
    wanted = width / expected_width(count, 1, scale)
    near = sorted({math.floor(wanted), math.ceil(wanted)} - {0}, key=lambda ones: abs(ones - wanted))
    for ones in near:
        if is_feasible(width, count, ones):
            return ones
    possible = [ones for ones in range(1, width + 1) if is_feasible(width, count, ones)]
    if not possible:
        least = next(w for w in range(1, count + 1) if any(is_feasible(w, count, m) for m in range(1, w + 1)))
        got = f"{width} channels for {count} masks"
        checks.refuse("width", f"be at least {least} for {count} different masks", got, "Or use fewer masks.")
    low, high = (_scale_at(width / wanted, count) for wanted in (max(possible) + 1, max(min(possible) - 1, 1e-9)))
    checks.refuse("scale", f"lie between {low:.4g} and {high:.4g} for {width} channels and {count} masks", scale)


def scale_of(width: int, count: int, ones: int) -> float:
    """The S at which ``count`` masks with ``ones`` ones have the expected width ``width``; infinite for disjoint masks.

    >>> round(scale_of(120, 4, 64), 6)
    2.0
    """
    if not ones <= width <= count * ones:
        checks.refuse("width", f"lie between {ones} and {count * ones}", width)
    return math.inf if width == count * ones and count > 1 else _scale_at(width / ones, count)


def _scale_at(widths: float, count: int) -> float:
    """The S at which masks are expected to be ``widths`` times as wide as they have ones."""
    if widths >= expected_width(count, 1, LARGEST_SCALE):
        return LARGEST_SCALE
    low, high = 1.0, LARGEST_SCALE
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if expected_width(count, 1, middle) < widths else (low, middle)
    return high


def draw_masks(width: int, count: int, ones: int, seed: int) -> Bool[Tensor, "N width"]:
    """A random matrix ``[count, width]`` of different rows with ``ones`` ones each, and at least one in every column.

    It exists for M ≤ width ≤ N·M and N ≤ the number of ways to choose M of the columns, and is refused otherwise.
    """
    for name, value in (("width", width), ("count", count), ("ones", ones)):
        checks.count(name, value)
    checks.count("seed", seed, 0)
    if not is_feasible(width, count, ones):
        got = f"{count} masks of {ones} ones over {width} columns"
        checks.refuse("masks", "have ones <= width <= count · ones, and count <= binomial(width, ones)", got)
    rng = np.random.default_rng(derived_seed(seed, Use.MASKS, width, count, ones))
    masks = _columns(width, count, ones, rng)
    _trim(masks, count * ones, rng)
    _even_out(masks, ones, rng)
    if len({row.tobytes() for row in masks}) < count:  # among few columns two rows may be equal
        masks = _different(width, count, ones, rng)
    return torch.from_numpy(masks)


def _columns(width: int, count: int, ones: int, rng: "np.random.Generator") -> np.ndarray:
    """Independent columns of coin flips without empty ones; rows have the right sum on average."""
    share = ones / width
    low, high = 0.0, 1.0
    p = 0.5
    for _ in range(60):  # p / (1 − (1 − p)^N) = share
        low, high = (p, high) if p < share * -math.expm1(count * math.log1p(-p)) else (low, p)
        p = (low + high) / 2
    degrees = np.arange(1, count + 1)
    odds = np.array([math.log(math.comb(count, d)) for d in degrees])
    odds = odds + degrees * math.log(max(p, 1e-300)) + (count - degrees) * math.log1p(-min(p, 1 - 1e-16))
    chances = np.exp(odds - odds.max())
    many = rng.choice(degrees, size=width, p=chances / chances.sum())
    order = rng.random((width, count)).argsort(1).argsort(1)
    return np.ascontiguousarray((order < many[:, None]).T)


def _trim(masks: np.ndarray, total: int, rng: "np.random.Generator") -> None:
    """Bring the number of ones to ``total``: remove ones, but never the last of a column, or add ones."""
    excess = int(masks.sum()) - total
    if excess > 0:
        priority = np.where(masks, rng.random(masks.shape), np.inf)
        priority[priority.argmin(0), np.arange(masks.shape[1])] = np.inf  # one of each column stays
        free = np.flatnonzero(np.isfinite(priority))
        masks.flat[rng.choice(free, excess, replace=False)] = False
    elif excess < 0:
        masks.flat[rng.choice(np.flatnonzero(~masks), -excess, replace=False)] = True


def _even_out(masks: np.ndarray, ones: int, rng: "np.random.Generator") -> None:
    """Move ones from rows with too many to rows with too few, each within its column."""
    excess = masks.sum(1) - ones
    while (excess > 0).any():
        rich, poor = int(excess.argmax()), int(excess.argmin())
        moved = min(int(excess[rich]), -int(excess[poor]))
        columns = rng.choice(np.flatnonzero(masks[rich] & ~masks[poor]), moved, replace=False)
        masks[rich, columns], masks[poor, columns] = False, True
        excess[rich] -= moved
        excess[poor] += moved


def _different(width: int, count: int, ones: int, rng: "np.random.Generator") -> np.ndarray:
    """Different rows: as few as needed to cover all columns, then random others."""
    order = rng.permutation(width)
    blocks = -(-width // ones)
    covering = [order[min(b * ones, width - ones) : min(b * ones, width - ones) + ones] for b in range(blocks)]
    taken = sorted(_rank(np.sort(row)) for row in covering)
    draw = random.Random(int(rng.integers(2**62)))
    others = sorted(draw.sample(range(math.comb(width, ones) - blocks), count - blocks))
    masks = np.zeros((count, width), dtype=bool)
    for row, columns in enumerate(covering):
        masks[row, columns] = True
    skipped = 0
    for row, number in enumerate(others, blocks):
        while skipped < blocks and taken[skipped] <= number + skipped:
            skipped += 1
        masks[row, _unranked(number + skipped, ones)] = True
    return masks[rng.permutation(count)]


def _rank(columns: np.ndarray) -> int:
    """The number of a set of columns among all sets of its size."""
    return sum(math.comb(int(column), i) for i, column in enumerate(columns, 1))


def _unranked(number: int, ones: int) -> list[int]:
    """The set of columns of a number."""
    columns: list[int] = []
    for i in range(ones, 0, -1):
        column = i - 1
        while math.comb(column + 1, i) <= number:
            column += 1
        number -= math.comb(column, i)
        columns.append(column)
    return columns


def _width(count: int, ones: int, scale: float) -> int:
    return min(int(expected_width(count, ones, scale) + 1e-9), count * ones)

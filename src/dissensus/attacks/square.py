"""Square attack: a random search that asks for outputs only, never for gradients (Andriushchenko et al., 2020)."""

import functools
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.blocks import Steps
from dissensus.attacks.case import Adversarial, Aimed, Box, Case, Examples, opened
from dissensus.attacks.losses import cross_entropy, margin
from dissensus.attacks.noise import Word, below, keys, signs, uniform
from dissensus.attacks.norms import Ball, NormName, l2_lengths, per_example, sums
from dissensus.attacks.victim import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Images = Float[Tensor, "B C H W"]
Keys = Int[Tensor, " B"]

HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Of 10,000 queries, those after which the share of changed pixels is halved; other numbers in proportion."""
TINY = 1e-12


def square(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    queries: int = 5000,
    share: float = 0.8,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Labels | None = None,
    restarts: int = 1,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Square attack: changes on random squares at the edge of the ball, kept where they help.

    What must fall is the margin, or with ``target`` the cross-entropy of that class. Since it follows no gradient, it
    breaks models that merely hide theirs.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`. No gradient is asked for.
        x: Images ``[B, C, H, W]``. In L∞ inputs of other shapes do as well, for which a square is a run of values.
        epsilon: ε.
        queries: How often the model may be asked about an example in a restart, the start included.
        share: p, the share of pixels that the first square takes, which is halved nine times on the way.
        restarts: How many starts are tried.
        seed: Of all draws, which are made by (seed, restart, the example itself, query): batches do not matter.
    """
    return counted_square(
        model,
        x,
        y,
        epsilon=epsilon,
        queries=queries,
        share=share,
        norm=norm,
        pool=pool,
        target=target,
        restarts=restarts,
        seed=seed,
        box=box,
    )[0]


def counted_square(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    queries: int = 5000,
    share: float = 0.8,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Labels | None = None,
    restarts: int = 1,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> tuple[Adversarial, Int[Tensor, " B"]]:
    """`square`, and how many queries each example took; none where it was wrong from the start."""
    checks.count("queries", queries)
    checks.number("share", share, 0.0, 1.0, open_low=True)
    checks.count("restarts", restarts)
    checks.count("seed", seed, 0)
    with opened(model, x, y, target=target, pool=pool, box=box) as case:
        ball = Ball.checked(norm, epsilon, (case.low, case.high), x)
        if norm == "l2" and (x.ndim != 4 or min(x.shape[2:]) < 3):
            checks.refuse("x", "be images [B, C, H, W] of 3×3 or more in L2", checks.shape_text(x.shape))
        spent = torch.zeros(len(x), dtype=torch.int64, device=case.examples.x.device)
        steps = _steps(case, ball, share, queries)

        def run(rows: Examples, restart: int) -> Tensor:
            end = _searched(rows, case, ball, keys(rows.x, seed, restart), steps)
            spent[rows.place] += end.queries
            return end.at

        runs = [functools.partial(run, restart=i) for i in range(restarts)]
        return case.attempted(runs, ball.lengths, ball.limit), spent.to(x.device)


class Search(NamedTuple):
    """An attack under way."""

    x: Inputs
    y: Labels
    target: Labels
    key: Keys
    at: Inputs
    value: Float[Tensor, " B"]
    queries: Int[Tensor, " B"]
    done: Bool[Tensor, " B"]


def _searched(rows: Examples, case: Case, ball: Ball, key: Keys, steps: Steps) -> Search:
    first = _stripes if ball.norm == "linf" else _tiles
    change = first(_images(rows.x), key).to(rows.x.dtype)
    at = ball.projected(rows.x, rows.x + (float(ball.epsilon) * change).view(rows.x.shape))
    value, broken = _asked(case, at, rows)
    return steps.carried_out(Search(*rows[:3], key, at, value, torch.ones_like(rows.place), broken))


def _steps(case: Case, ball: Ball, share: float, queries: int) -> Steps:
    """All queries but the first: steps whose squares are of one size are alike, and each draws by its number."""
    epsilon = float(ball.epsilon)
    proposed = _linf_proposed if ball.norm == "linf" else _l2_proposed

    def step(state: Search, part: float, numbers: Tensor) -> Search:
        (number,) = numbers.unbind()
        moved = proposed(_images(state.at), _images(state.x), part, state.key, number, epsilon)
        at = ball.projected(state.x, moved.view(state.x.shape))
        value, broken = _asked(case, at, state)
        better = (value > state.value) | broken
        return state._replace(
            at=torch.where(per_example(better, at), at, state.at),
            value=torch.where(better, value, state.value),
            queries=state.queries + 1,
            done=broken,
        )

    passed = [index * 10_000 // queries for index in range(queries - 1)]
    parts = [share / 2 ** sum(now > after for after in HALVED_AFTER) for now in passed]
    numbers = torch.arange(1, queries, device=case.examples.x.device).unsqueeze(1)
    return Steps(step, parts, numbers, capture=case.capture)


def _asked(case: Case, at: Inputs, aimed: Aimed) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """What must rise, and whether a point is adversarial."""
    outputs = case.victim.outputs(at)
    loss = cross_entropy if case.targeted else margin
    value = loss(case.victim.scores(outputs), aimed.y, aimed.target if case.targeted else None).sum(0)
    return value, case.reached(case.victim.verdict(outputs), aimed)


def _images(x: Inputs) -> Images:
    """Inputs as images: a matrix is one of one channel, and anything else one of a single row."""
    shape = (1, *x.shape[1:]) if x.ndim == 3 else (1, 1, x[0].numel())
    return x.view(-1, *(x.shape[1:] if x.ndim == 4 else shape))


def _stripes(x: Images, key: Keys) -> Images:
    """The first change in L∞: up or down, for each channel and column."""
    return signs(uniform(key, (x.shape[1], 1, x.shape[3]), 0)).expand(x.shape)


def _linf_proposed(at: Images, x: Images, share: float, key: Keys, index: Word, epsilon: float) -> Images:
    """A point in L∞ with another square: x ± ε, one sign for each channel."""
    channels, height, width = x.shape[1:]
    side = max(round(math.sqrt(share * height * width)), 1)
    tall = min(side, height)
    wide = min(side if side <= height else round(share * width), width)
    numbers = uniform(key, (2 + channels, 1, 1), index)
    inside = _window(numbers[:, :2], (height, width), (tall, max(wide, 1))).inside
    return torch.where(inside, x + epsilon * signs(numbers[:, 2:]).to(x.dtype), at)


def _tiles(x: Images, key: Keys) -> Images:
    """The first change in L2, of length one: tiles with a bump up and a bump down each, in random directions."""
    batch, channels, height, width = x.shape
    side = max(min(height, width) // 5, 2)
    rows, columns = height // side, width // side
    bump = _bumps(side, x)
    numbers = uniform(key, (1 + channels, rows, columns, 1, 1), 0)
    tiles = torch.where(numbers[:, :1] < 0.5, bump.T, bump) * signs(numbers[:, 1:]).to(x.dtype)
    tiled = tiles.transpose(3, 4).reshape(batch, channels, rows * side, columns * side)
    top, left = (height - rows * side) // 2, (width - columns * side) // 2
    padding = (left, width - columns * side - left, top, height - rows * side - top)
    change = torch.nn.functional.pad(tiled, padding)
    return change / per_example(l2_lengths(change), change)


def _l2_proposed(at: Images, x: Images, share: float, key: Keys, index: Word, epsilon: float) -> Images:
    """A point in L2 where the change of one window has moved to another, and two bumps are added there.

    Budgets are kept for each channel, and whatever the box had cut off is spent again.
    """
    channels, height, width = x.shape[1:]
    change = at - x
    side = max(round(math.sqrt(share * height * width)), 3)
    most = min(height, width)
    side = min(side + 1 - side % 2, most - 1 + most % 2)  # odd
    numbers = uniform(key, (5 + channels, 1, 1), index)
    here, there = (_window(numbers[:, i : i + 2], (height, width), (side, side)) for i in (0, 2))
    bump = _bumps(side, change)
    bumps = torch.where(numbers[:, 4:5] < 0.5, bump[here.column, here.row], bump[here.row, here.column])
    bumps = bumps * signs(numbers[:, 5:]).to(change.dtype)
    old = torch.where(here.inside, change, 0.0)
    new = torch.where(here.inside, bumps + old / (_by_channel(old) + TINY), 0.0)
    free = (epsilon**2 - per_example(sums(change.flatten(1).square()), change)).clamp_min(0.0) / channels
    held = _by_channel(torch.where(here.inside | there.inside, change, 0.0)).square()
    new = new / (_by_channel(new) + TINY) * (free + held).sqrt()
    moved = torch.where(here.inside, new, torch.where(there.inside, 0.0, change))
    return x + epsilon * moved / (per_example(l2_lengths(moved), moved) + TINY)


class Window(NamedTuple):
    """For each pixel of each example: whether it is in the window, and its row and column there."""

    inside: Bool[Tensor, "B 1 H W"]
    row: Int[Tensor, "B 1 H W"]
    column: Int[Tensor, "B 1 H W"]


def _window(numbers: Float[Tensor, "B 2 1 1"], area: tuple[int, int], size: tuple[int, int]) -> Window:
    """A window at the place that two random numbers tell, another one for each example."""
    inside, places = [], []
    for axis in (0, 1):
        start = below(numbers[:, axis : axis + 1], area[axis] - size[axis] + 1)
        shape = (1, 1, -1, 1) if axis == 0 else (1, 1, 1, -1)
        offset = torch.arange(area[axis], device=numbers.device).view(shape) - start
        inside.append((offset >= 0) & (offset < size[axis]))
        places.append(offset.clamp(0, size[axis] - 1).expand(-1, 1, *area))
    return Window(inside[0] & inside[1], *places)


def _bumps(side: int, like: Tensor) -> Float[Tensor, "S S"]:
    """One bump above and one below of opposite sign, length one in all, made where ``like`` is.

    >>> bumps = _bumps(3, torch.zeros(()))
    >>> bumps.square().sum().round(decimals=5), bool(bumps[0, 1] > 0 > bumps[2, 1])
    (tensor(1.), True)
    """
    parts = [_bump(side // 2, side, like), -_bump(side - side // 2, side, like)]
    return torch.cat([part / part.square().sum().sqrt() for part in parts]) / math.sqrt(2)


def _bump(height: int, width: int, like: Tensor) -> Float[Tensor, "h w"]:
    """Highest in the middle: Σ_{k ≥ d} 1 / (k + 1)² at d steps from there, diagonal ones included."""
    apart = [(torch.arange(side, device=like.device) - side // 2).abs() for side in (height, width)]
    steps = torch.maximum(apart[0].unsqueeze(1), apart[1])
    terms = 1 / torch.arange(1, max(height, width) // 2 + 2, dtype=like.dtype, device=like.device) ** 2
    return terms.flip(0).cumsum(0).flip(0)[steps]


def _by_channel(change: Images) -> Float[Tensor, "B C 1 1"]:
    """L2 lengths of channels."""
    return sums(change.flatten(2).flatten(0, 1).square()).sqrt().view(*change.shape[:2], 1, 1)

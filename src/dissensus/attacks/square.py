"""Square attack: a random search that needs outputs only, no gradients (Andriushchenko et al., 2020)."""

import functools
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.blocks import Steps
from dissensus.attacks.losses import cross_entropy, margin
from dissensus.attacks.norms import Ball, Bounds, NormName, l2_lengths, per_example, sums
from dissensus.attacks.problem import Adversarial, AttackProblem, Box, Examples, HasLabels, attack_problem
from dissensus.attacks.random_numbers import Word, keys, random_integers, random_signs, uniform
from dissensus.attacks.rows import where_rows
from dissensus.attacks.target_model import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Images = Float[Tensor, "B C H W"]
Keys = Int[Tensor, " B"]

HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Queries, out of 10,000, after which the share of changed pixels is halved; scaled for other budgets."""
TINY = 1e-12


@arrays_taken
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
    """Changes on random squares at the edge of the ball, kept if they improve the loss.

    The loss is the margin, or with ``target`` the cross-entropy of that class. Since the attack uses no gradients, it
    also succeeds on models that merely mask theirs.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`. No gradients are needed.
        x: Images ``[B, C, H, W]``. In L∞, inputs of other shapes work too: a square is then a run of values.
        epsilon: ε.
        queries: Largest number of forward passes per example and restart, including the start.
        share: p, the share of pixels in the first square, which is halved nine times.
        restarts: Number of random starts.
        seed: Seed of all draws, which are made from (seed, restart, the example's values, query), independent of the
            batch.
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
    """`square`, and the number of queries per example: zero where it was misclassified before the attack."""
    checks.count("queries", queries)
    checks.number("share", share, 0.0, 1.0, open_low=True)
    checks.count("restarts", restarts)
    checks.count("seed", seed, 0)
    with attack_problem(model, x, y, target=target, pool=pool, box=box) as problem:
        ball = Ball.checked(norm, epsilon, (problem.low, problem.high), x)
        if norm == "l2" and (x.ndim != 4 or min(x.shape[2:]) < 3):
            checks.refuse("x", "be images [B, C, H, W] of 3×3 or more in L2", checks.shape_text(x.shape))
        counts = torch.zeros(len(x), dtype=torch.int64, device=problem.examples.x.device)
        steps = _steps(problem, ball, share, queries)

        def run(rows: Examples, restart: int) -> Tensor:
            end = _search(rows, problem, ball, keys(rows.x, seed, restart), steps)
            counts[rows.position] += end.queries
            return end.point

        runs = [functools.partial(run, restart=restart) for restart in range(restarts)]
        return problem.solve(runs, ball.lengths, ball.limit), counts.to(x.device)


class SquareState(NamedTuple):
    """State of the search."""

    x: Inputs
    y: Labels
    target: Labels
    least: Inputs
    largest: Inputs
    key: Keys
    point: Inputs
    value: Float[Tensor, " B"]
    queries: Int[Tensor, " B"]
    done: Bool[Tensor, " B"]


def _search(rows: Examples, problem: AttackProblem, ball: Ball, key: Keys, steps: Steps) -> SquareState:
    initial_change = _stripes if ball.norm == "linf" else _tiles
    change = initial_change(_images(rows.x), key).to(rows.x.dtype)
    bounds = ball.bounds(rows.x)
    point = ball.projected(rows.x, rows.x + (float(ball.epsilon) * change).view(rows.x.shape), bounds)
    value, is_adversarial = _loss(problem, point, rows)
    queries = torch.ones_like(rows.position)
    return steps.carried_out(SquareState(*rows[:3], *bounds, key, point, value, queries, is_adversarial))


def _steps(problem: AttackProblem, ball: Ball, share: float, queries: int) -> Steps:
    """All queries but the first. Steps are of one kind if their squares have one size; each draws by its number."""
    proposal = _linf_proposal if ball.norm == "linf" else _l2_proposal

    def step(state: SquareState, part: float, numbers: Tensor) -> SquareState:
        (number,) = numbers.unbind()
        change = proposal(state, part, number, ball)
        value, is_adversarial = _loss(problem, change.point, state)
        better = (value > state.value) | is_adversarial
        return state._replace(
            point=change.kept(better),
            value=torch.where(better, value, state.value),
            queries=state.queries + 1,
            done=is_adversarial,
        )

    scaled = [index * 10_000 // queries for index in range(queries - 1)]
    shares = [share / 2 ** sum(query > after for after in HALVED_AFTER) for query in scaled]
    numbers = torch.arange(1, queries, device=problem.examples.x.device).unsqueeze(1)
    return Steps(step, shares, numbers, capture=problem.capture)


def _loss(problem: AttackProblem, point: Inputs, rows: HasLabels) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Loss to be raised, and whether a point is adversarial."""
    outputs = problem.model.outputs(point)
    loss = cross_entropy if problem.targeted else margin
    scores = problem.model.attacked_scores(outputs)
    value = loss(scores, rows.y, rows.target if problem.targeted else None).sum(0)
    return value, problem.is_adversarial(problem.model.pooled_scores(outputs), rows)


def _images(x: Inputs) -> Images:
    """Inputs as images: a matrix has one channel, and any other shape becomes a single row."""
    shape = (1, *x.shape[1:]) if x.ndim == 3 else (1, 1, x[0].numel())
    return x.view(-1, *(x.shape[1:] if x.ndim == 4 else shape))


def _stripes(x: Images, key: Keys) -> Images:
    """Initial change in L∞: a random sign for each channel and column."""
    return random_signs(uniform(key, (x.shape[1], 1, x.shape[3]), 0)).expand(x.shape)


class WholeProposal(NamedTuple):
    """A proposal that may differ from the point anywhere."""

    point: Inputs
    before: Inputs

    def kept(self, better: Bool[Tensor, " B"]) -> Inputs:
        """The proposal where it is better, and the point before elsewhere."""
        return where_rows(better, self.point, self.before)


class LocalProposal(NamedTuple):
    """A proposal that differs from the point before in a few places of each example, which costs less to keep or drop.

    ``kept`` overwrites ``point``.
    """

    point: Inputs
    places: Int[Tensor, "B K"]
    new: Float[Tensor, "B K"]
    old: Float[Tensor, "B K"]

    def kept(self, better: Bool[Tensor, " B"]) -> Inputs:
        """The proposal where it is better, and the point before elsewhere."""
        values = torch.where(better.unsqueeze(1), self.new, self.old)
        return self.point.flatten(1).scatter_(1, self.places, values).view(self.point.shape)


def _linf_proposal(state: SquareState, share: float, index: Word, _ball: Ball) -> LocalProposal:
    """Proposal in L∞: x ± ε inside a new square, with one sign per channel. These are the bounds of the ball."""
    channels, height, width = _images(state.point).shape[1:]
    side = max(round(math.sqrt(share * height * width)), 1)
    tall = min(side, height)
    wide = max(min(side if side <= height else round(share * width), width), 1)
    numbers = uniform(state.key, (2 + channels,), index)
    places = _places(numbers[:, :2], (channels, height, width), (tall, wide))
    up = (random_signs(numbers[:, 2:]) > 0).repeat_interleave(tall * wide, 1)
    least, largest, old = (bound.flatten(1).gather(1, places) for bound in (state.least, state.largest, state.point))
    new = torch.where(up, largest, least)
    return LocalProposal(state.point.flatten(1).scatter(1, places, new).view(state.point.shape), places, new, old)


def _places(numbers: Float[Tensor, "B 2"], shape: tuple[int, int, int], size: tuple[int, int]) -> Int[Tensor, "B K"]:
    """Indices, in flattened images, of all channels of a window at the position that two random numbers select."""
    (channels, height, width), device = shape, numbers.device
    top = random_integers(numbers[:, :1], height - size[0] + 1)
    left = random_integers(numbers[:, 1:], width - size[1] + 1)
    rows, columns = (torch.arange(length, device=device) for length in size)
    window = (rows.unsqueeze(1) * width + columns).flatten()
    inside = torch.arange(channels, device=device).unsqueeze(1) * (height * width) + window
    return (top * width + left) + inside.flatten()


def _tiles(x: Images, key: Keys) -> Images:
    """Initial change in L2, of length one: tiles with two bumps of opposite sign each, in random directions."""
    batch, channels, height, width = x.shape
    side = max(min(height, width) // 5, 2)
    rows, columns = height // side, width // side
    bump = _bumps(side, x)
    numbers = uniform(key, (1 + channels, rows, columns, 1, 1), 0)
    tiles = torch.where(numbers[:, :1] < 0.5, bump.T, bump) * random_signs(numbers[:, 1:]).to(x.dtype)
    tiled = tiles.transpose(3, 4).reshape(batch, channels, rows * side, columns * side)
    top, left = (height - rows * side) // 2, (width - columns * side) // 2
    padding = (left, width - columns * side - left, top, height - rows * side - top)
    change = torch.nn.functional.pad(tiled, padding)
    return change / per_example(l2_lengths(change), change)


def _l2_proposal(state: SquareState, share: float, index: Word, ball: Ball) -> WholeProposal:
    """Proposal in L2: the change of one window moves to another window, and two bumps are added there.

    Each channel keeps its budget, and the budget that clipping to the box left unused is spent again.
    """
    x, epsilon = _images(state.x), float(ball.epsilon)
    channels, height, width = x.shape[1:]
    change = _images(state.point) - x
    side = max(round(math.sqrt(share * height * width)), 3)
    largest = min(height, width)
    side = min(side + 1 - side % 2, largest - 1 + largest % 2)  # odd
    numbers = uniform(state.key, (5 + channels, 1, 1), index)
    new_window, old_window = (_window(numbers[:, i : i + 2], (height, width), (side, side)) for i in (0, 2))
    bump = _bumps(side, change)
    row, column, inside = new_window.row, new_window.column, new_window.inside
    bumps = torch.where(numbers[:, 4:5] < 0.5, bump[column, row], bump[row, column])
    bumps = bumps * random_signs(numbers[:, 5:]).to(change.dtype)
    old = torch.where(inside, change, 0.0)
    new = torch.where(inside, bumps + old / (_channel_lengths(old) + TINY), 0.0)
    unused = (epsilon**2 - per_example(sums(change.flatten(1).square()), change)).clamp_min(0.0) / channels
    used = _channel_lengths(torch.where(inside | old_window.inside, change, 0.0)).square()
    new = new / (_channel_lengths(new) + TINY) * (unused + used).sqrt()
    moved = torch.where(inside, new, torch.where(old_window.inside, 0.0, change))
    moved = x + epsilon * moved / (per_example(l2_lengths(moved), moved) + TINY)
    point = ball.projected(state.x, moved.view(state.x.shape), Bounds(state.least, state.largest))
    return WholeProposal(point, state.point)


class Window(NamedTuple):
    """For each pixel of each example: whether it is inside the window, and its row and column there."""

    inside: Bool[Tensor, "B 1 H W"]
    row: Int[Tensor, "B 1 H W"]
    column: Int[Tensor, "B 1 H W"]


def _window(numbers: Float[Tensor, "B 2 1 1"], area: tuple[int, int], size: tuple[int, int]) -> Window:
    """A window per example, at the position that two random numbers select."""
    inside, offsets = [], []
    for axis in (0, 1):
        start = random_integers(numbers[:, axis : axis + 1], area[axis] - size[axis] + 1)
        shape = (1, 1, -1, 1) if axis == 0 else (1, 1, 1, -1)
        offset = torch.arange(area[axis], device=numbers.device).view(shape) - start
        inside.append((offset >= 0) & (offset < size[axis]))
        offsets.append(offset.clamp(0, size[axis] - 1).expand(-1, 1, *area))
    return Window(inside[0] & inside[1], *offsets)


def _bumps(side: int, like: Tensor) -> Float[Tensor, "S S"]:
    """Two bumps of opposite sign, one above the other, of length one together; dtype and device of ``like``.

    >>> bumps = _bumps(3, torch.zeros(()))
    >>> bumps.square().sum().round(decimals=5), bool(bumps[0, 1] > 0 > bumps[2, 1])
    (tensor(1.), True)
    """
    parts = [_bump(side // 2, side, like), -_bump(side - side // 2, side, like)]
    return torch.cat([part / part.square().sum().sqrt() for part in parts]) / math.sqrt(2)


def _bump(height: int, width: int, like: Tensor) -> Float[Tensor, "h w"]:
    """Largest in the middle: Σ_{k ≥ d} 1 / (k + 1)² at Chebyshev distance d from there."""
    offsets = [(torch.arange(side, device=like.device) - side // 2).abs() for side in (height, width)]
    distance = torch.maximum(offsets[0].unsqueeze(1), offsets[1])
    terms = 1 / torch.arange(1, max(height, width) // 2 + 2, dtype=like.dtype, device=like.device) ** 2
    return terms.flip(0).cumsum(0).flip(0)[distance]


def _channel_lengths(change: Images) -> Float[Tensor, "B C 1 1"]:
    """L2 lengths of channels."""
    return sums(change.flatten(2).flatten(0, 1).square()).sqrt().view(*change.shape[:2], 1, 1)

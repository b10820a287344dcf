"""Auto-PGD: projected gradient steps with momentum, whose length adapts to each example (Croce and Hein, 2020)."""

import functools
import itertools
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.blocks import Steps
from dissensus.attacks.case import Adversarial, Box, Case, Examples, opened
from dissensus.attacks.losses import Climbed, LossName, named
from dissensus.attacks.noise import keys
from dissensus.attacks.norms import Ball, NormName, per_example
from dissensus.attacks.victim import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]

MOMENTUM = 0.75
"""α: the share of the new step; the rest is the step before."""
RISING = 0.75
"""ρ: the share of steps that must raise the loss for the step length to stay."""


def apgd(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    steps: int = 100,
    loss: LossName = "ce",
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Labels | None = None,
    restarts: int = 1,
    classes: int = 9,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Auto-PGD (Croce and Hein, 2020, algorithm 1): there is no step length to choose.

    Steps start at 2 ε. At checkpoints that come ever closer, an example's step length is halved, and it goes back to
    its best point, if the loss rose in fewer than three quarters of the steps since the last one, or if neither step
    length nor best loss have changed since. An example stops at the first point that breaks it.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`.
        epsilon: ε.
        steps: Updates of each run.
        loss: ``"ce"``; ``"dlr"``, the difference of logits ratio; ``"margin"``; or ``"targeted_dlr"``, which without
            ``target`` goes for one likely class after the other, and for which any wrong class is a success. With
            ``target``, ``"dlr"`` is the targeted one. DLR needs three classes, targeted DLR four: with fewer the
            margin takes its place, and a log message says so. On the mean probability of an ensemble untargeted DLR is
            a weak guide: its denominator is flat there. Take ``"margin"``, or ``pool="members"``.
        restarts: How many starts are tried (for each class, with ``"targeted_dlr"``).
        classes: How many classes ``"targeted_dlr"`` goes for, the likeliest first.
        seed: Of the starts, as in `pgd`.
    """
    checks.count("steps", steps)
    checks.count("restarts", restarts)
    checks.count("classes", classes)
    checks.count("seed", seed, 0)
    with opened(model, x, y, target=target, pool=pool, box=box) as case:
        ball = Ball.checked(norm, epsilon, (case.low, case.high), x)
        many = loss == "targeted_dlr" and not case.targeted
        function = named(loss, case.classes, many or case.targeted)
        goal = _Goal(case, ball, function, many or case.targeted)
        run = functools.partial(_run, goal=goal, steps=goal.steps(steps), seed=seed)
        ranks = range(min(classes, case.classes - 1)) if many else [None]
        runs = [functools.partial(run, restart=i, rank=rank) for i in range(restarts) for rank in ranks]
        return case.attempted(runs, ball.lengths, ball.limit)


def checkpoints(steps: int) -> tuple[int, ...]:
    """The steps after which step lengths are looked at: ⌈p_j N⌉, p_{j+1} = p_j + max(p_j − p_{j−1} − 0.03, 0.06).

    >>> checkpoints(100)
    (22, 41, 57, 70, 80, 87, 93, 99)
    """
    shares = [0.0, 0.22]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return tuple(sorted({math.ceil(share * steps - 1e-9) for share in shares[1:-1]}))


class Ascent(NamedTuple):
    """An attack under way: where each example is and was, its best point, and what the next checkpoint looks at."""

    x: Inputs
    y: Labels
    target: Labels
    at: Inputs
    before: Inputs
    value: Float[Tensor, " B"]
    gradient: Inputs
    best: Inputs
    best_value: Float[Tensor, " B"]
    best_gradient: Inputs
    step_size: Float[Tensor, " B"]
    rises: Integer[Tensor, " B"]
    """Steps since the last checkpoint that raised the loss."""
    kept: Bool[Tensor, " B"]
    """Whether the last checkpoint left the step length as it was."""
    last_best: Float[Tensor, " B"]
    """The best loss at the last checkpoint."""
    done: Bool[Tensor, " B"]


class _Kind(NamedTuple):
    """What tells steps apart."""

    share: float
    """Of the new step; the rest is the step before."""
    passed: int
    """Steps since the last checkpoint, where the step ends at one; else 0."""


def _kinds(steps: int) -> list[_Kind]:
    """Of every step: the first is without momentum, and most of the others are alike."""
    passed = {end: end - last for last, end in itertools.pairwise((0, *checkpoints(steps)))}
    return [_Kind(MOMENTUM if index else 1.0, passed.get(index + 1, 0)) for index in range(steps)]


class _Goal(NamedTuple):
    """What is climbed, and within what."""

    case: Case
    ball: Ball
    loss: Climbed
    aimed: bool
    """Whether the loss looks at targets."""

    def steps(self, count: int) -> Steps:
        """Updates, with checkpoints among them."""

        def step(state: Ascent, kind: _Kind, _numbers: Tensor) -> Ascent:
            state = _moved(state, self, kind.share)
            return _looked_at(state, kind.passed) if kind.passed else state

        return Steps(step, _kinds(count), capture=self.case.capture)


def _run(rows: Examples, goal: _Goal, steps: Steps, seed: int, restart: int, rank: int | None) -> Tensor:
    x = rows.x
    if rank is not None:
        rows = rows._replace(target=_likeliest(goal.case, rows, rank))
    at = goal.ball.random(x, keys(x, seed, restart))
    here = goal.case.slope(at, rows, goal.loss, goal.aimed)
    length = x.new_full((len(x),), 2.0) * goal.ball.epsilon
    count = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    start = Ascent(
        *rows[:3],
        at,
        at,
        *here[:2],
        at,
        *here[:2],
        length,
        count,
        torch.zeros_like(here.broken),
        here.value,
        here.broken,
    )
    return steps.carried_out(start).at


def _likeliest(case: Case, rows: Examples, rank: int) -> Tensor:
    """The class of a rank among those that are not the label, on clean inputs."""
    others = case.clean[rows.place].scatter(1, rows.y.unsqueeze(1), -math.inf)
    return others.sort(dim=1, descending=True, stable=True).indices[:, rank]


def _moved(state: Ascent, goal: _Goal, share: float) -> Ascent:
    """A step up the gradient, mixed with the step before, and a look at where it led."""
    case, ball, loss, aimed = goal
    length = per_example(state.step_size, state.x)
    straight = ball.projected(state.x, state.at + length * ball.steepest(state.gradient))
    mixed = state.at + share * (straight - state.at) + (1 - share) * (state.at - state.before)
    at = ball.projected(state.x, mixed)
    here = case.slope(at, state, loss, aimed)
    better = here.value > state.best_value
    wide = per_example(better, at)
    return state._replace(
        at=at,
        before=state.at,
        value=here.value,
        gradient=here.gradient,
        best=torch.where(wide, at, state.best),
        best_value=torch.where(better, here.value, state.best_value),
        best_gradient=torch.where(wide, here.gradient, state.best_gradient),
        rises=state.rises + (here.value > state.value),
        done=here.broken,
    )


def _looked_at(state: Ascent, passed: int) -> Ascent:
    """A checkpoint: where the loss stalls, half the step length and back to the best point."""
    stalled = state.kept & (state.best_value <= state.last_best)
    halved = ((state.rises < RISING * passed) | stalled) & ~state.done  # what is broken stays where it is
    wide = per_example(halved, state.at)
    return state._replace(
        at=torch.where(wide, state.best, state.at),
        value=torch.where(halved, state.best_value, state.value),
        gradient=torch.where(wide, state.best_gradient, state.gradient),
        step_size=torch.where(halved, state.step_size / 2, state.step_size),
        rises=torch.zeros_like(state.rises),
        kept=~halved,
        last_best=state.best_value,
    )

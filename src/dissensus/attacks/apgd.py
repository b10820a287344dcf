"""APGD (Auto-PGD): gradient steps with momentum and a step size that adapts to each example (Croce and Hein, 2020)."""

import functools
import itertools
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.blocks import Steps
from dissensus.attacks.losses import LOSSES, AttackLoss, LossName, loss_function
from dissensus.attacks.norms import Ball, Bounds, NormName, per_example
from dissensus.attacks.problem import Adversarial, AttackProblem, Box, Examples, attack_problem
from dissensus.attacks.random_numbers import keys
from dissensus.attacks.rows import where_rows
from dissensus.attacks.target_model import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]

MOMENTUM = 0.75
"""α: weight of the new step; the rest is the previous step."""
RISING = 0.75
"""ρ: share of steps that must raise the loss for the step size to stay."""


@arrays_taken
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
    """Auto-PGD (Croce and Hein, 2020, algorithm 1): there is no step size to choose.

    Steps start at length 2 ε. At checkpoints, which become more frequent, an example's step size is halved and it
    returns to its best point if the loss rose in fewer than three quarters of the steps since the last checkpoint, or
    if neither step size nor best loss have changed since. An example stops at its first adversarial point.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`.
        epsilon: ε.
        steps: Number of updates of each run.
        loss: ``"ce"``; ``"dlr"``, the difference of logits ratio; ``"margin"``; or ``"targeted_dlr"``, which without
            ``target`` tries the likeliest classes one after the other and counts any wrong class as a success. With
            ``target``, ``"dlr"`` is the targeted version. DLR needs three classes, targeted DLR four: with fewer, the
            margin replaces it, and a log message says so. On the mean probability of an ensemble, untargeted DLR is
            weak, because its denominator is flat there. Use ``"margin"``, or ``pool="members"``.
        restarts: Number of random starts (for each class, with ``"targeted_dlr"``).
        classes: Number of classes that ``"targeted_dlr"`` tries, the likeliest first.
        seed: Seed of the starts, as in `pgd`.
    """
    checks.count("steps", steps)
    checks.count("restarts", restarts)
    checks.count("classes", classes)
    checks.count("seed", seed, 0)
    with attack_problem(model, x, y, target=target, pool=pool, box=box) as problem:
        ball = Ball.checked(norm, epsilon, (problem.low, problem.high), x)
        checks.one_of("loss", loss, LOSSES)
        many_targets = loss == "targeted_dlr" and not problem.targeted
        targeted_loss = many_targets or problem.targeted
        ascent = _Ascent(problem, ball, loss_function(loss, problem.classes, targeted_loss), targeted_loss)
        run = functools.partial(_run, ascent=ascent, steps=ascent.steps(steps), seed=seed)
        ranks = range(min(classes, problem.classes - 1)) if many_targets else [None]
        runs = [functools.partial(run, restart=restart, rank=rank) for restart in range(restarts) for rank in ranks]
        return problem.solve(runs, ball.lengths, ball.limit)


def checkpoints(steps: int) -> tuple[int, ...]:
    """Steps after which step sizes are adapted: ⌈p_j N⌉, p_{j+1} = p_j + max(p_j − p_{j−1} − 0.03, 0.06).

    >>> checkpoints(100)
    (22, 41, 57, 70, 80, 87, 93, 99)
    """
    shares = [0.0, 0.22]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return tuple(sorted({math.ceil(share * steps - 1e-9) for share in shares[1:-1]}))


class APGDState(NamedTuple):
    """State of a run: current, previous and best point, and what the next checkpoint needs."""

    x: Inputs
    y: Labels
    target: Labels
    least: Inputs
    largest: Inputs
    point: Inputs
    previous: Inputs
    value: Float[Tensor, " B"]
    gradient: Inputs
    best: Inputs
    best_value: Float[Tensor, " B"]
    best_gradient: Inputs
    step_size: Float[Tensor, " B"]
    rises: Integer[Tensor, " B"]
    """Number of steps since the last checkpoint that raised the loss."""
    unchanged: Bool[Tensor, " B"]
    """Whether the last checkpoint left the step size as it was."""
    last_best: Float[Tensor, " B"]
    """Best loss at the last checkpoint."""
    done: Bool[Tensor, " B"]


class _StepKind(NamedTuple):
    """Properties by which steps differ."""

    weight: float
    """Weight of the new step; the rest is the previous step."""
    interval: int
    """Steps since the last checkpoint, if the step ends at one; otherwise 0."""


def _step_kinds(steps: int) -> list[_StepKind]:
    """Kind of every step: the first has no momentum, and most of the others are alike."""
    interval = {end: end - last for last, end in itertools.pairwise((0, *checkpoints(steps)))}
    return [_StepKind(MOMENTUM if index else 1.0, interval.get(index + 1, 0)) for index in range(steps)]


class _Ascent(NamedTuple):
    """The loss to be raised, and the ball that points stay in."""

    problem: AttackProblem
    ball: Ball
    loss: AttackLoss
    targeted_loss: bool
    """Whether the loss gets the targets."""

    def steps(self, count: int) -> Steps:
        """All updates, with checkpoints."""

        def step(state: APGDState, kind: _StepKind, _numbers: Tensor) -> APGDState:
            state = _updated(state, self, kind.weight)
            return _adapted(state, kind.interval) if kind.interval else state

        return Steps(step, _step_kinds(count), capture=self.problem.capture)


def _run(rows: Examples, ascent: _Ascent, steps: Steps, seed: int, restart: int, rank: int | None) -> Tensor:
    x, bounds = rows.x, ascent.ball.bounds(rows.x)
    if rank is not None:
        rows = rows._replace(target=_class_of_rank(ascent.problem, rows, rank))
    point = ascent.ball.random(x, keys(x, seed, restart), bounds)
    here = ascent.problem.loss_at(point, rows, ascent.loss, ascent.targeted_loss)
    start = APGDState(
        *rows[:3],
        *bounds,
        point=point,
        previous=point,
        value=here.value,
        gradient=here.gradient,
        best=point,
        best_value=here.value,
        best_gradient=here.gradient,
        step_size=x.new_full((len(x),), 2.0) * ascent.ball.epsilon,
        rises=torch.zeros(len(x), dtype=torch.int32, device=x.device),
        unchanged=torch.zeros_like(here.is_adversarial),
        last_best=here.value,
        done=here.is_adversarial,
    )
    return steps.carried_out(start).point


def _class_of_rank(problem: AttackProblem, rows: Examples, rank: int) -> Tensor:
    """Class with a rank among all but the label, by the scores of clean inputs."""
    others = problem.clean_scores[rows.position].scatter(1, rows.y.unsqueeze(1), -math.inf)
    return others.sort(dim=1, descending=True, stable=True).indices[:, rank]


def _updated(state: APGDState, ascent: _Ascent, weight: float) -> APGDState:
    """A gradient step, averaged with the previous step, and the loss at the new point."""
    problem, ball, loss, targeted_loss = ascent
    length, bounds = per_example(state.step_size, state.x), Bounds(state.least, state.largest)
    straight = ball.projected(state.x, state.point + length * ball.steepest(state.gradient), bounds)
    averaged = state.point + weight * (straight - state.point) + (1 - weight) * (state.point - state.previous)
    point = ball.projected(state.x, averaged, bounds)
    here = problem.loss_at(point, state, loss, targeted_loss)
    better = here.value > state.best_value
    return state._replace(
        point=point,
        previous=state.point,
        value=here.value,
        gradient=here.gradient,
        best=where_rows(better, point, state.best),
        best_value=torch.where(better, here.value, state.best_value),
        best_gradient=where_rows(better, here.gradient, state.best_gradient),
        rises=state.rises + (here.value > state.value),
        done=here.is_adversarial,
    )


def _adapted(state: APGDState, interval: int) -> APGDState:
    """A checkpoint: where the loss stalls, halve the step size and return to the best point."""
    stalled = state.unchanged & (state.best_value <= state.last_best)
    halved = ((state.rises < RISING * interval) | stalled) & ~state.done  # adversarial points stay where they are
    return state._replace(
        point=where_rows(halved, state.best, state.point),
        value=torch.where(halved, state.best_value, state.value),
        gradient=where_rows(halved, state.best_gradient, state.gradient),
        step_size=torch.where(halved, state.step_size / 2, state.step_size),
        rises=torch.zeros_like(state.rises),
        unchanged=~halved,
        last_best=state.best_value,
    )

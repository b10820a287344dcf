"""Gradient steps on cross-entropy inside a ball: the loop that FGSM, BIM, PGD and MIM share."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.blocks import Steps
from dissensus.attacks.losses import cross_entropy
from dissensus.attacks.norms import LARGEST, Ball, Bounds, NormName, Reach, l1_lengths, per_example
from dissensus.attacks.problem import Adversarial, AttackProblem, Box, Examples, attack_problem
from dissensus.attacks.random_numbers import keys
from dissensus.attacks.rows import where_rows
from dissensus.attacks.target_model import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]


class GradientSteps(NamedTuple):
    """Settings by which these attacks differ."""

    norm: str
    epsilon: float
    steps: int
    step_size: float | None
    path: float = 1.0
    """Total length of all steps in units of ε, if no step size is set."""
    stop: bool = True
    random_start: bool = False
    decay: float | None = None
    seed: int = 0
    restarts: int = 1

    def check(self) -> None:
        """Refuse settings that make no sense."""
        checks.number("epsilon", self.epsilon, 0.0)
        checks.count("steps", self.steps)
        checks.number("step_size", self.length, 0.0, LARGEST)
        checks.count("seed", self.seed, 0)
        checks.count("restarts", self.restarts)
        checks.flag("stop", self.stop)

    @property
    def length(self) -> float:
        """Length of one step."""
        return self.path * self.epsilon / self.steps if self.step_size is None else self.step_size


def gradient_attack(
    model: Model,
    x: Inputs,
    y: Labels,
    settings: GradientSteps,
    *,
    pool: PoolName,
    target: Labels | None,
    box: Box,
) -> Adversarial:
    """Take gradient steps, once for every restart, and test where they lead."""
    settings.check()
    reused = not settings.random_start
    with attack_problem(model, x, y, target=target, pool=pool, box=box, differentiable=reused) as problem:
        ball = Ball.checked(settings.norm, settings.epsilon, (problem.low, problem.high), x)
        if settings.steps == 1 and settings.decay is None and not settings.random_start:
            run = functools.partial(_one_step, problem=problem, ball=ball, settings=settings)
            return problem.solve([run], ball.lengths, ball.limit)
        run = functools.partial(_run, ball=ball, settings=settings, steps=_steps(problem, ball, settings))
        runs = [functools.partial(run, restart=restart) for restart in range(settings.restarts)]
        return problem.solve(runs, ball.lengths, ball.limit)


@arrays_taken
def perturbed(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    steps: int = 10,
    step_size: float | None = None,
    norm: NormName = "linf",
    random_start: bool = True,
    decay: float | None = None,
    pool: PoolName = "probability",
    target: Labels | None = None,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Inputs:
    """Points after all steps, whether or not they are adversarial: for transfer to other models, and for training.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`.
        epsilon: ε.
        steps: Number of updates.
        step_size: Length of each update; by default that of `pgd` with a random start, otherwise that of `bim`.
        random_start: Start from a point drawn as in `pgd`, instead of the clean input.
        decay: μ of `mim`; None: no momentum.
        seed: Seed of the random starts.
    """
    path = 2.5 if random_start else 1.0
    settings = GradientSteps(
        norm, epsilon, steps, step_size, path, stop=False, random_start=random_start, seed=seed, decay=decay
    )
    settings.check()
    reused = not random_start
    with attack_problem(model, x, y, target=target, pool=pool, box=box, differentiable=reused) as problem:
        ball = Ball.checked(norm, epsilon, (problem.low, problem.high), x)
        return _run(problem.examples, ball, settings, _steps(problem, ball, settings), 0).to(x.device)


class GradientState(NamedTuple):
    """State of the loop."""

    x: Inputs
    y: Labels
    target: Labels
    position: Labels
    least: Inputs
    largest: Inputs
    point: Inputs
    momentum: Inputs
    done: Bool[Tensor, " B"]


def _one_step(rows: Examples, problem: AttackProblem, ball: Ball, settings: GradientSteps) -> Tensor:
    """What `_run` gives for one step from clean inputs that are not adversarial, without the state of a loop."""
    here = problem.loss_at_clean(rows, rows.position, cross_entropy)
    return ball.edge(rows.x, here.gradient, settings.length)


def _run(rows: Examples, ball: Ball, settings: GradientSteps, steps: Steps, restart: int) -> Tensor:
    x = rows.x
    bounds = ball.bounds(x)
    start = ball.random(x, keys(x, settings.seed, restart), bounds) if settings.random_start else x
    done = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    return steps.carried_out(GradientState(*rows, *bounds, start, torch.zeros_like(x), done)).point


CLEAN = "clean"
"""The kind of a first step from clean inputs. Its forward pass is the one with which the problem began."""


def _steps(problem: AttackProblem, ball: Ball, settings: GradientSteps) -> Steps:
    def step(state: GradientState, kind: str | None, _numbers: Tensor) -> GradientState:
        if kind == CLEAN:
            here = problem.loss_at_clean(state, state.position, cross_entropy)
        else:
            here = problem.loss_at(state.point, state, cross_entropy)
        bounds = Bounds(state.least, state.largest)
        point, momentum = updated(
            state.point, here.gradient, state.momentum, state.x, ball, bounds, settings.length, settings.decay
        )
        if not settings.stop:
            return state._replace(point=point, momentum=momentum)
        point = where_rows(here.is_adversarial, state.point, point)
        return state._replace(point=point, momentum=momentum, done=here.is_adversarial)

    first = None if settings.random_start else CLEAN
    return Steps(step, [first, *[None] * (settings.steps - 1)], capture=problem.capture)


def updated(
    point: Inputs,
    gradient: Inputs,
    momentum: Inputs,
    x: Inputs,
    ball: Ball,
    bounds: Bounds,
    step_size: Reach,
    decay: float | None,
) -> tuple[Inputs, Inputs]:
    """Point after a step along the gradient, or along its decaying sum (``decay``), projected; and the new sum."""
    if decay is not None:
        scale = l1_lengths(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        gradient = momentum = (gradient / per_example(scale, gradient)).add_(decay * momentum)
    return ball.projected(x, ball.steepest(gradient).mul_(step_size).add_(point), bounds), momentum


def climbed(
    gradient: Callable[[Inputs], Inputs],
    x: Inputs,
    start: Inputs,
    *,
    ball: Ball,
    steps: int,
    step_size: Reach,
    decay: float | None = None,
) -> Inputs:
    """Point after ``steps`` updates from ``start``: the loop alone, without checks, modes or host synchronisation.

    It can be part of a training step that is captured in a CUDA graph. Members with separate inputs are passed as
    ``[M · B, ...]``.

    Args:
        gradient: Gradient of the loss to be raised, at any point.
        x: Clean inputs.
        start: Where the loop begins, inside the ball: ``x``, or ``ball.random(x, keys)``.
        ball: The ball that points stay in.
        steps: Number of updates.
        step_size: Length of each update: one for all examples, or one per example, ``[B, 1, ...]``.
        decay: μ of the momentum.

    >>> ball = Ball("linf", 0.25, 0.0, 1.0)
    >>> x = torch.tensor([[0.5, 0.9]])
    >>> climbed(torch.ones_like, x, x, ball=ball, steps=3, step_size=0.1)
    tensor([[0.7500, 1.0000]])
    """
    point, momentum, bounds = start, torch.zeros_like(x), ball.bounds(x)
    for _ in range(steps):
        point, momentum = updated(point, gradient(point), momentum, x, ball, bounds, step_size, decay)
    return point

"""Attacks that follow the gradient of cross-entropy inside a ball: FGSM, BIM, PGD and MIM."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.blocks import Steps
from dissensus.attacks.case import Adversarial, Box, Case, Examples, opened
from dissensus.attacks.losses import cross_entropy
from dissensus.attacks.noise import keys
from dissensus.attacks.norms import Ball, NormName, Reach, l1_lengths, per_example
from dissensus.attacks.victim import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]


def fgsm(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Labels | None = None,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """One step to the edge of the ball (Goodfellow et al., 2015): x + ε sign ∇ loss; in L2, x + ε ∇ loss / ‖∇ loss‖.

    Args:
        model: An ensemble ``x -> [M, B, C]``, a plain classifier ``x -> [B, C]``, or a list of those. A module is in
            evaluation mode meanwhile, and is otherwise left alone: parameters keep their ``grad``. Any other callable
            is called as it is. On a GPU passes are recorded and replayed, so what a model does in Python, such as to
            count its calls, does not happen at every step.
        x: Clean inputs, float32 or float64, inside the box. They go to the model's device; results come back to theirs.
        y: Labels.
        epsilon: ε, the largest change that is allowed: of a value in L∞, of the whole in L2.
        norm: ``"linf"`` or ``"l2"``.
        pool: What of an ensemble is attacked: ``"probability"``, the log of the mean probability; ``"score"``, the mean
            logits; ``"members"``, the sum of all members' losses (success is still that of the mean probability); or
            the number of a member.
        target: Classes to be reached; without, any class but the label will do.
        box: The least and the largest value of valid inputs.

    >>> from torch import nn
    >>> model = nn.Linear(2, 2).requires_grad_(False)
    >>> _ = model.weight.copy_(torch.eye(2)), model.bias.zero_()
    >>> found = fgsm(model, torch.tensor([[0.5, 0.25]]), torch.tensor([0]), epsilon=0.25)
    >>> found.inputs, found.success, found.distance
    (tensor([[0.2500, 0.5000]]), tensor([True]), tensor([0.2500]))
    """
    plan = Plan(norm, epsilon, steps=1, step_size=epsilon)
    return _attacked(model, x, y, plan, pool=pool, target=target, box=box)


def bim(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    steps: int = 10,
    step_size: float | None = None,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Labels | None = None,
    stop: bool = True,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """The basic iterative method (Kurakin et al., 2017): `fgsm` in small steps, from the clean input on.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`.
        epsilon: ε.
        steps: Updates, exactly that many.
        step_size: The length of each; ε / steps by default.
        stop: Leave an example at the first point that breaks it, which also saves time. False: every example takes
            all steps, and its last point counts, as the papers have it.
    """
    plan = Plan(norm, epsilon, steps, step_size, stop=stop)
    return _attacked(model, x, y, plan, pool=pool, target=target, box=box)


def pgd(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    steps: int = 10,
    step_size: float | None = None,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Labels | None = None,
    restarts: int = 1,
    stop: bool = True,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Projected gradient descent (Madry et al., 2018): `bim` from points drawn uniformly from the ball.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`; ``steps``, ``stop``: see `bim`.
        epsilon: ε.
        steps: Updates of each restart.
        step_size: The length of each; 2.5 ε / steps by default, which reaches the edge from any start.
        restarts: How many starts are tried on an example before it counts as a failure.
        seed: Of the starts, which are drawn by (seed, restart, the example itself): batches and order do not matter,
            and more restarts are never weaker.
    """
    plan = Plan(norm, epsilon, steps, step_size, path=2.5, stop=stop, random_start=True, seed=seed)
    return _attacked(model, x, y, plan, restarts, pool=pool, target=target, box=box)


def mim(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    steps: int = 10,
    step_size: float | None = None,
    decay: float = 1.0,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Labels | None = None,
    stop: bool = True,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """The momentum iterative method (Dong et al., 2018): g ← μ g + ∇ / ‖∇‖₁, and steps along g.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`; ``steps``, ``stop``: see `bim`.
        epsilon: ε.
        steps: Updates.
        step_size: The length of each; ε / steps by default.
        decay: μ.
    """
    checks.number("decay", decay, 0.0)
    plan = Plan(norm, epsilon, steps, step_size, stop=stop, decay=decay)
    return _attacked(model, x, y, plan, pool=pool, target=target, box=box)


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
    """Where all steps lead, whether or not that breaks an example: for transfer to other models, and for training.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`.
        epsilon: ε.
        steps: Updates.
        step_size: The length of each; by default that of `pgd` with a random start, else of `bim`.
        random_start: From a point drawn as in `pgd`, else from the clean input.
        decay: μ of `mim`; None: no momentum.
        seed: Of the starts.
    """
    path = 2.5 if random_start else 1.0
    plan = Plan(norm, epsilon, steps, step_size, path, stop=False, random_start=random_start, seed=seed, decay=decay)
    plan.check()
    with opened(model, x, y, target=target, pool=pool, box=box) as case:
        ball = Ball.checked(norm, epsilon, (case.low, case.high), x)
        return _run(case.examples, ball, plan, _steps(case, ball, plan), 0).to(x.device)


class Plan(NamedTuple):
    """What tells these attacks apart."""

    norm: str
    epsilon: float
    steps: int
    step_size: float | None
    path: float = 1.0
    """The length of all steps together, in units of ε, where no step size is given."""
    stop: bool = True
    random_start: bool = False
    decay: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse what makes no sense."""
        checks.number("epsilon", self.epsilon, 0.0)
        checks.count("steps", self.steps)
        checks.number("step_size", self.length, 0.0)
        checks.count("seed", self.seed, 0)

    @property
    def length(self) -> float:
        """Of one step."""
        return self.path * self.epsilon / self.steps if self.step_size is None else self.step_size


class Climb(NamedTuple):
    """An attack under way."""

    x: Inputs
    y: Labels
    target: Labels
    at: Inputs
    momentum: Inputs
    done: Bool[Tensor, " B"]


def _attacked(
    model: Model,
    x: Tensor,
    y: Tensor,
    plan: Plan,
    restarts: int = 1,
    *,
    pool: PoolName,
    target: Tensor | None,
    box: Box,
) -> Adversarial:
    plan.check()
    checks.count("restarts", restarts)
    with opened(model, x, y, target=target, pool=pool, box=box) as case:
        ball = Ball.checked(plan.norm, plan.epsilon, (case.low, case.high), x)
        run = functools.partial(_run, ball=ball, plan=plan, steps=_steps(case, ball, plan))
        return case.attempted([functools.partial(run, restart=i) for i in range(restarts)], ball.lengths, ball.limit)


def _run(rows: Examples, ball: Ball, plan: Plan, steps: Steps, restart: int) -> Tensor:
    x = rows.x
    start = ball.random(x, keys(x, plan.seed, restart)) if plan.random_start else x
    never = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    return steps.carried_out(Climb(*rows[:3], start, torch.zeros_like(x), never)).at


def _steps(case: Case, ball: Ball, plan: Plan) -> Steps:
    def step(state: Climb, _kind: None, _numbers: Tensor) -> Climb:
        here = case.slope(state.at, state, cross_entropy)
        at, momentum = updated(state.at, here.gradient, state.momentum, state.x, ball, plan.length, plan.decay)
        if not plan.stop:
            return state._replace(at=at, momentum=momentum)
        at = torch.where(per_example(here.broken, at), state.at, at)
        return state._replace(at=at, momentum=momentum, done=here.broken)

    return Steps(step, [None] * plan.steps, capture=case.capture)


def updated(
    at: Inputs, gradient: Inputs, momentum: Inputs, x: Inputs, ball: Ball, step_size: Reach, decay: float | None
) -> tuple[Inputs, Inputs]:
    """A step up the gradient, or up its decaying sum (``decay``), back in the ball; and the new sum."""
    if decay is not None:
        scale = l1_lengths(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        gradient = momentum = decay * momentum + gradient / per_example(scale, gradient)
    return ball.projected(x, at + step_size * ball.steepest(gradient)), momentum


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
    """Where ``steps`` updates lead from ``start``: the loop alone, without checks, modes or looks at the host.

    Fit for a training step that is captured in a CUDA graph. Members that each have inputs of their own go as
    ``[M · B, ...]``.

    Args:
        gradient: Of what is to rise, at any point.
        x: Clean inputs.
        start: Where it begins, inside the ball: ``x``, or ``ball.random(x, keys)``.
        ball: Where it stays.
        steps: Updates.
        step_size: The length of each, one for all examples or one each, ``[B, 1, ...]``.
        decay: μ of momentum.

    >>> ball = Ball("linf", 0.25, 0.0, 1.0)
    >>> x = torch.tensor([[0.5, 0.9]])
    >>> climbed(torch.ones_like, x, x, ball=ball, steps=3, step_size=0.1)
    tensor([[0.7500, 1.0000]])
    """
    at, momentum = start, torch.zeros_like(x)
    for _ in range(steps):
        at, momentum = updated(at, gradient(at), momentum, x, ball, step_size, decay)
    return at

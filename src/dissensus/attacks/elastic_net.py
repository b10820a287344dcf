"""EAD, the elastic-net attack (Chen et al., 2018): the nearest adversarial point in L1, or L1 and L2, by FISTA."""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.functional import softshrink

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.bisection import Nearest, nearest_points
from dissensus.attacks.blocks import Steps
from dissensus.attacks.minimisation import DistanceMinimisation, check_settings, converged, nearer
from dissensus.attacks.norms import LARGEST, l1_lengths, per_example, sums
from dissensus.attacks.problem import Adversarial, AttackProblem, Box, Examples, attack_problem
from dissensus.attacks.target_model import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Numbers = Float[Tensor, " B"]


@arrays_taken
def elastic_net(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    steps: int = 1000,
    step_size: float = 0.01,
    l1_weight: float = 0.01,
    rule: Literal["EN", "L1"] = "EN",
    confidence: float = 0.0,
    constant: float = 1e-3,
    search_steps: int = 9,
    abort_early: bool = True,
    pool: PoolName = "probability",
    target: Labels | None = None,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Minimise c · max(κ − margin, 0) + ‖x' − x‖² + β ‖x' − x‖₁ by FISTA.

    Each update is a gradient step on the first two terms, followed by shrinkage towards x by β, inside the box. Step
    lengths fall as √(1 − k / steps). Results never leave the box; the extrapolated point, where gradients are computed,
    may.

    Args:
        model: And ``x``, ``y``, ``pool``, ``target``, ``box``: see `fgsm`.
        steps: Number of updates of each run.
        step_size: Length of the first step.
        l1_weight: β.
        rule: How the nearest adversarial point is chosen: by ``"EN"``, ‖·‖² + β ‖·‖₁, or by ``"L1"``.
        confidence: κ, and ``constant``, ``search_steps``, ``abort_early``: see `carlini_wagner`.

    ``distance`` is that of the rule.
    """
    check_settings(steps, step_size, confidence, constant, search_steps)
    checks.number("l1_weight", l1_weight, 0.0, LARGEST)
    checks.flag("abort_early", abort_early)
    checks.one_of("rule", rule, ("EN", "L1"))

    def lengths(change: Inputs) -> Numbers:
        if rule == "L1":
            return l1_lengths(change)
        flat = change.flatten(1)
        return sums(flat.square().add_(flat.abs().mul_(l1_weight)))

    with attack_problem(model, x, y, target=target, pool=pool, box=box) as problem:
        settings = DistanceMinimisation(steps, confidence, abort_early)
        updates = _steps(problem, settings, step_size, l1_weight, lengths)

        def search(rows: Examples) -> Tensor:
            run = functools.partial(_run, rows, steps=updates)
            return nearest_points(run, rows.x, constant, search_steps)

        return problem.solve([search], lengths)


class ElasticNetState(NamedTuple):
    """State of a run: the point, its extrapolation, the nearest adversarial point, and the loss to compare with."""

    x: Inputs
    y: Labels
    target: Labels
    constant: Numbers
    point: Inputs
    extrapolated: Inputs
    best: Inputs
    distance: Numbers
    success: Bool[Tensor, " B"]
    reference: Numbers
    done: Bool[Tensor, " B"]


def _steps(
    problem: AttackProblem,
    settings: DistanceMinimisation,
    step_size: float,
    l1_weight: float,
    lengths: Callable[[Inputs], Numbers],
) -> Steps:
    def step(state: ElasticNetState, compares: bool, numbers: Tensor) -> ElasticNetState:
        length, momentum = numbers.unbind()
        here = problem.loss_at(state.extrapolated, state, settings.loss)
        change = state.extrapolated - state.x
        descent = (per_example(state.constant, change) * here.gradient).sub_(change, alpha=2)
        moved = state.extrapolated.addcmul(descent, length)
        point = _shrunk(moved.sub_(state.x), state.x, l1_weight, problem)
        success = settings.is_adversarial(problem, problem.pooled_scores(point), state)
        nearest = nearer(Nearest(state.best, state.distance, state.success), point, lengths(point - state.x), success)
        extrapolated = (point - state.point).mul_(momentum).add_(point)
        compared = {}
        if compares:
            squared = sums(change.flatten(1).square())
            compared = converged(squared, state.constant, here.value, state.reference)
        return state._replace(point=point, extrapolated=extrapolated, **nearest._asdict(), **compared)

    def step_numbers(index: int) -> tuple[float, float]:
        return step_size * math.sqrt(1 - index / settings.steps), index / (index + 3)

    return settings.updates(problem, step, step_numbers)


def _run(rows: Examples, constant: Numbers, nearest: Nearest, *, steps: Steps) -> Nearest:
    false = torch.zeros_like(nearest.success)
    start = ElasticNetState(
        *rows[:3],
        constant,
        point=rows.x,
        extrapolated=rows.x,
        best=nearest.best,
        distance=nearest.distance,
        success=false,
        reference=torch.full_like(constant, torch.inf),
        done=false,
    )
    end = steps.carried_out(start)
    return Nearest(end.best, end.distance, end.success)


def _shrunk(change: Inputs, x: Inputs, threshold: float, problem: AttackProblem) -> Inputs:
    """x and a change that is nearer to zero by a threshold, inside the box. Changes up to the threshold become zero."""
    return softshrink(change, threshold).add_(x).clamp_(problem.low, problem.high)

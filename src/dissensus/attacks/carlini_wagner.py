"""Carlini and Wagner's attack (2017): the nearest adversarial point in L2, by Adam in tanh space."""

import functools
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.bisection import Nearest, nearest_points
from dissensus.attacks.blocks import Steps
from dissensus.attacks.minimisation import DistanceMinimisation, check_settings, converged, nearer
from dissensus.attacks.norms import LARGEST, l2_lengths, per_example, sums
from dissensus.attacks.problem import Adversarial, AttackProblem, Box, Examples, attack_problem
from dissensus.attacks.target_model import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Numbers = Float[Tensor, " B"]
Number = Float[Tensor, ""]

EDGE = 0.999999
"""tanh(w) of an input at the edge of the box, if tanh space is no wider than the box."""


@arrays_taken
def carlini_wagner(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    steps: int = 1000,
    step_size: float = 0.01,
    confidence: float = 0.0,
    constant: float = 1e-3,
    search_steps: int = 9,
    abort_early: bool = True,
    widening: float = 0.1,
    pool: PoolName = "probability",
    target: Labels | None = None,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Minimise ‖x' − x‖² + c · max(κ − margin, 0) by Adam, in tanh space.

    x' = m + h · tanh(w), with the box's midpoint m and half width h. In the published attack, an input at the edge of
    the box corresponds to w = ±∞. It starts at tanh(w) = ±0.999999, where the slope of tanh is so small that hundreds
    of steps hardly move it. Here h exceeds the half width of the box by the share ``widening``, and w is clipped so
    that x' stays in the box: inputs of exactly 0 or 1 lie where tanh has a slope, and move from the first step on.
    ``widening=0`` is the published attack.

    Every example has its own c, nearest point and end of the run, so no result depends on other examples.

    Args:
        model: And ``x``, ``y``, ``pool``, ``target``: see `fgsm`.
        steps: Number of updates of each run.
        step_size: Adam's learning rate.
        confidence: κ: by how much the wrong class must lead, in units of the attacked scores.
        constant: c, or the value with which the search for it starts.
        search_steps: Number of runs, each with another c (see `bisection`); 0: c is fixed, as in the ADP paper.
        abort_early: End an example's run when its loss has converged over a tenth of the steps.
        widening: Share by which tanh space is wider than the box.
        box: Smallest and largest value of valid inputs, both finite.

    ``distance`` is in L2.
    """
    check_settings(steps, step_size, confidence, constant, search_steps)
    checks.number("widening", widening, 0.0, LARGEST)
    checks.flag("abort_early", abort_early)
    with attack_problem(model, x, y, target=target, pool=pool, box=box) as problem:
        if not math.isfinite(problem.high - problem.low):
            checks.refuse("box", "be finite for this attack", box)
        settings = DistanceMinimisation(steps, confidence, abort_early)
        space = TanhSpace((problem.low + problem.high) / 2, (problem.high - problem.low) / 2, widening)
        updates = _steps(problem, settings, space, step_size)

        def search(rows: Examples) -> Tensor:
            run = functools.partial(_run, rows, problem=problem, settings=settings, space=space, steps=updates)
            return nearest_points(run, rows.x, constant, search_steps)

        return problem.solve([search], l2_lengths)


class TanhSpace(NamedTuple):
    """Tanh space: midpoint and half width of the box, and the share by which the space is wider."""

    middle: float
    half: float
    widening: float

    @property
    def scale(self) -> float:
        """dx' / d tanh(w)."""
        return self.half * (1 + self.widening)

    def coordinates(self, x: Inputs) -> Inputs:
        """w of inputs."""
        edge = 1 / (1 + self.widening) if self.widening else EDGE
        return ((x - self.middle) / self.half * edge).atanh()

    def clip_(self, coordinates: Inputs) -> Inputs:
        """Clip w to the box, in place."""
        edge = math.atanh(1 / (1 + self.widening)) if self.widening else math.inf
        return coordinates.clamp_(-edge, edge)

    def inputs(self, share: Inputs, problem: AttackProblem) -> Inputs:
        """Inputs from shares of the space: (1 + tanh(w)) / 2."""
        return (2 * self.scale * share).add_(self.middle - self.scale).clamp_(problem.low, problem.high)

    @staticmethod
    def shares(coordinates: Inputs) -> Inputs:
        """(1 + tanh(w)) / 2 as 1 / (1 + exp(−2 w)), which takes a CPU a tenth of the time of tanh."""
        return (2 * coordinates).sigmoid_()


class CarliniWagnerState(NamedTuple):
    """State of a run: place in tanh space, Adam's moments, the nearest point, the loss to compare with.

    ``start`` is where the place of x leads: x, up to rounding.
    """

    y: Labels
    target: Labels
    constant: Numbers
    start: Inputs
    place: Inputs
    mean: Inputs
    square: Inputs
    best: Inputs
    distance: Numbers
    success: Bool[Tensor, " B"]
    reference: Numbers
    done: Bool[Tensor, " B"]


def _steps(problem: AttackProblem, settings: DistanceMinimisation, space: TanhSpace, step_size: float) -> Steps:
    def step(state: CarliniWagnerState, compares: bool, numbers: Tensor) -> CarliniWagnerState:
        share = space.shares(state.place)
        point = space.inputs(share, problem)
        here = problem.loss_at(point, state, settings.loss)
        success = settings.is_adversarial(problem, here.scores, state)
        change = point - state.start
        squared = sums(change.flatten(1).square())
        nearest = nearer(Nearest(state.best, state.distance, state.success), point, squared.sqrt(), success)
        descent = (per_example(state.constant, point) * here.gradient).sub_(change, alpha=2)
        descent.mul_(4 * space.scale * share).addcmul_(descent, share, value=-1)  # dx'/dw = 4 h s (1 - s)
        place, mean, square = _adam(state.place, descent, state.mean, state.square, *numbers.unbind())
        compared = converged(squared, state.constant, here.value, state.reference) if compares else {}
        return state._replace(place=space.clip_(place), mean=mean, square=square, **nearest._asdict(), **compared)

    return settings.updates(problem, step, functools.partial(_adam_numbers, step_size))


def _run(
    rows: Examples,
    constant: Numbers,
    nearest: Nearest,
    *,
    problem: AttackProblem,
    settings: DistanceMinimisation,
    space: TanhSpace,
    steps: Steps,
) -> Nearest:
    zeros, false = torch.zeros_like(rows.x), torch.zeros_like(nearest.success)
    place = space.coordinates(rows.x)
    start = CarliniWagnerState(
        rows.y,
        rows.target,
        constant,
        start=space.inputs(space.shares(place), problem),
        place=place,
        mean=zeros,
        square=zeros,
        best=nearest.best,
        distance=nearest.distance,
        success=false,
        reference=torch.full_like(constant, torch.inf),
        done=false,
    )
    end = steps.carried_out(start)
    point = space.inputs(space.shares(end.place), problem)  # the point after the last update counts too
    success = settings.is_adversarial(problem, problem.pooled_scores(point), end)
    return nearer(Nearest(end.best, end.distance, end.success), point, l2_lengths(point - rows.x), success)


def _adam(
    place: Inputs, descent: Inputs, mean: Inputs, square: Inputs, length: Number, least: Number
) -> tuple[Inputs, Inputs, Inputs]:
    """Place after Adam's step along a direction of descent, and the new moments; see `_adam_numbers`."""
    mean = mean.lerp(descent, 0.1)
    square = (0.999 * square).addcmul_(descent, descent, value=0.001)
    return place.addcmul(mean / square.sqrt().add_(least), length), mean, square


def _adam_numbers(step_size: float, index: int) -> tuple[float, float]:
    """Adam's learning rate and ε, both corrected for the bias of moments that begin at zero.

    a (m / (1 − β₁ᵏ)) / (√(v / (1 − β₂ᵏ)) + ε) = a √(1 − β₂ᵏ) / (1 − β₁ᵏ) · m / (√v + ε √(1 − β₂ᵏ)).
    """
    root = math.sqrt(1 - 0.999 ** (index + 1))
    return step_size * root / (1 - 0.9 ** (index + 1)), 1e-8 * root

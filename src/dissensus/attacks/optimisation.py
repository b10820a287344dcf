"""Attacks that look for the nearest adversarial point: Carlini and Wagner's in L2, and the elastic-net attack in L1."""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.bisection import Found, nearest
from dissensus.attacks.blocks import Steps
from dissensus.attacks.case import Adversarial, Aimed, Box, Case, Examples, opened
from dissensus.attacks.losses import margin, marked
from dissensus.attacks.norms import l1_lengths, l2_lengths, per_example, sums
from dissensus.attacks.victim import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Numbers = Float[Tensor, " B"]
Number = Float[Tensor, ""]

NEARLY = 0.999999
"""tanh(w) of an input at the edge of the box, where tanh space is no wider than the box."""
STALLED = 0.9999
"""A loss that is above this share of what it was a tenth of all steps ago has come to rest."""


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
    """Carlini and Wagner's attack in L2 (2017): Adam on ‖x' − x‖² + c · max(κ − margin, 0), in tanh space.

    x' = m + h · tanh(w), with the box's middle m and half width h. As published, an input at the very edge of the box
    would be at w = ±∞; it starts at tanh(w) = ±0.999999, where the slope of tanh is so small that hundreds of steps
    hardly move it. Here h is wider than the box by the share ``widening``, and w is held where x' is in the box: inputs
    of exactly 0 or 1 stand where tanh has a slope, and move from the first step on. ``widening=0`` is as published.

    Every example has its own c, its own nearest point and its own end: no example's result depends on others.

    Args:
        model: And ``x``, ``y``, ``pool``, ``target``: see `fgsm`.
        steps: Updates of each run.
        step_size: Adam's learning rate.
        confidence: κ: by how much the wrong class must lead, in units of the scores that are attacked.
        constant: c, or where the search for it begins.
        search_steps: Runs with a c each (see `constants`); 0: the constant is fixed, as in the ADP paper.
        abort_early: End an example's run when its loss has come to rest over a tenth of the steps.
        widening: By how much tanh space is wider than the box.
        box: The least and the largest value of valid inputs, both finite.

    ``distance`` is in L2.
    """
    _check(steps, step_size, confidence, constant, search_steps)
    checks.number("widening", widening, 0.0)
    with opened(model, x, y, target=target, pool=pool, box=box) as case:
        if not math.isfinite(case.high - case.low):
            checks.refuse("box", "be finite for this attack", box)
        look = _Look(steps, confidence, abort_early)
        space = _Space((case.low + case.high) / 2, (case.high - case.low) / 2, widening)
        updates = _tanh_steps(case, look, space, step_size)

        def run(rows: Examples) -> Tensor:
            one = functools.partial(_tanh_run, rows, case=case, look=look, space=space, steps=updates)
            return nearest(one, rows.x, constant, search_steps)

        return case.attempted([run], l2_lengths)


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
    """The elastic-net attack (Chen et al., 2018): FISTA on c · max(κ − margin, 0) + ‖x' − x‖² + β ‖x' − x‖₁.

    A gradient step of the first two terms, then a shrinkage by β towards x, inside the box; step lengths fall as
    √(1 − k / steps). Results never leave the box; the point that looks ahead, where gradients are taken, may.

    Args:
        model: And ``x``, ``y``, ``pool``, ``target``, ``box``: see `fgsm`.
        steps: Updates of each run.
        step_size: The first step length.
        l1_weight: β.
        rule: Which of an example's adversarial points is the nearest: by ``"EN"``, ‖·‖² + β ‖·‖₁, or ``"L1"``.
        confidence: κ, and ``constant``, ``search_steps``, ``abort_early``: see `carlini_wagner`.

    ``distance`` is that of the rule.
    """
    _check(steps, step_size, confidence, constant, search_steps)
    checks.number("l1_weight", l1_weight, 0.0)
    checks.one_of("rule", rule, ("EN", "L1"))

    def lengths(change: Inputs) -> Numbers:
        by_l1 = l1_lengths(change)
        return by_l1 if rule == "L1" else sums(change.flatten(1).square()) + l1_weight * by_l1

    with opened(model, x, y, target=target, pool=pool, box=box) as case:
        look = _Look(steps, confidence, abort_early)
        updates = _shrinking_steps(case, look, step_size, l1_weight, lengths)

        def run(rows: Examples) -> Tensor:
            return nearest(functools.partial(_shrinking_run, rows, steps=updates), rows.x, constant, search_steps)

        return case.attempted([run], lengths)


class _Look(NamedTuple):
    """What both attacks ask of the model, and when an example's run is over."""

    steps: int
    confidence: float
    abort_early: bool

    def loss(self, scores: Float[Tensor, "K B C"], y: Labels, target: Labels | None) -> Float[Tensor, "K B"]:
        """max(κ − margin, 0), turned around, for losses are climbed."""
        return -(self.confidence - margin(scores, y, target)).clamp_min(0.0)

    def reached(self, case: Case, verdict: Float[Tensor, "B C"], rows: Aimed) -> Bool[Tensor, " B"]:
        """Whether the goal is reached with κ to spare."""
        own, spare = (rows.target, -self.confidence) if case.targeted else (rows.y, self.confidence)
        return case.reached(verdict + spare * marked(own, case.classes), rows)

    def now(self, index: int) -> bool:
        """Whether losses are looked at in a step: in every tenth of all steps once."""
        return self.abort_early and index % math.ceil(self.steps / 10) == 0

    def rested(self, now: Number, value: Numbers, before: Numbers) -> tuple[Bool[Tensor, " B"], Numbers]:
        """Whether an example's loss has come to rest, where it is looked at now; and the loss to compare."""
        looked = now > 0
        return looked & (value > STALLED * before), torch.where(looked, value, before)

    def table(self, case: Case, row: Callable[[int], tuple[float, ...]]) -> Float[Tensor, "steps K"]:
        """The numbers of every step, on the device: whether to look, and an attack's own."""
        return case.examples.x.new_tensor([(self.now(index), *row(index)) for index in range(self.steps)])


def _nearer(found: Found, at: Inputs, length: Numbers, reached: Bool[Tensor, " B"]) -> Found:
    """What has been found, with points that reach the goal and are nearer than any before."""
    nearer = reached & (length < found.distance)
    best = torch.where(per_example(nearer, at), at, found.best)
    return Found(best, torch.where(nearer, length, found.distance), found.any | reached)


class _Space(NamedTuple):
    """Tanh space: the middle and the half width of the box, and by how much it is wider."""

    middle: float
    half: float
    widening: float

    @property
    def scale(self) -> float:
        """dx' / d tanh(w)."""
        return self.half * (1 + self.widening)

    def of(self, x: Inputs) -> Inputs:
        """Where inputs are in this space."""
        edge = 1 / (1 + self.widening) if self.widening else NEARLY
        return ((x - self.middle) / self.half * edge).atanh()

    def held(self, place: Inputs) -> Inputs:
        """Places that are inputs of the box, or the nearest that are."""
        edge = math.atanh(1 / (1 + self.widening)) if self.widening else math.inf
        return place.clamp(-edge, edge)

    def inputs(self, slant: Inputs, case: Case) -> Inputs:
        """Inputs, from tanh(w)."""
        return (self.middle + self.scale * slant).clamp(case.low, case.high)


class _Tanh(NamedTuple):
    """A run in tanh space: where each example began and how far it went, Adam's two moments, and what was found."""

    x: Inputs
    y: Labels
    target: Labels
    constant: Numbers
    origin: Inputs
    shift: Inputs
    mean: Inputs
    square: Inputs
    best: Inputs
    distance: Numbers
    any: Bool[Tensor, " B"]
    before: Numbers
    done: Bool[Tensor, " B"]


def _tanh_steps(case: Case, look: _Look, space: _Space, step_size: float) -> Steps:
    def step(state: _Tanh, _kind: None, numbers: Tensor) -> _Tanh:
        now, *bias = numbers.unbind()
        slant = (state.origin + state.shift).tanh()
        at = space.inputs(slant, case)
        here = case.slope(at, state, look.loss)
        reached = look.reached(case, here.verdict, state)
        new = _nearer(Found(state.best, state.distance, state.any), at, l2_lengths(at - state.x), reached)
        change = at - space.inputs(state.origin.tanh(), case)
        value = sums(change.flatten(1).square()) - state.constant * here.value
        rested, before = look.rested(now, value, state.before)
        slope = 2 * change - per_example(state.constant, at) * here.gradient
        move, mean, square = _adam(slope * space.scale * (1 - slant.square()), state.mean, state.square, *bias)
        shift = space.held(state.origin + state.shift - step_size * move) - state.origin
        return state._replace(shift=shift, mean=mean, square=square, before=before, done=rested, **new._asdict())

    numbers = look.table(case, lambda index: (1 - 0.9 ** (index + 1), 1 - 0.999 ** (index + 1)))
    return Steps(step, [None] * look.steps, numbers, capture=case.capture)


def _tanh_run(
    rows: Examples, constant: Numbers, found: Found, *, case: Case, look: _Look, space: _Space, steps: Steps
) -> Found:
    x, nothing = rows.x, torch.zeros_like(rows.x)
    fresh, far = torch.zeros_like(found.any), torch.full_like(constant, torch.inf)
    start = _Tanh(
        *rows[:3], constant, space.of(x), nothing, nothing, nothing, found.best, found.distance, fresh, far, fresh
    )
    end = steps.carried_out(start)
    at = space.inputs((end.origin + end.shift).tanh(), case)  # the last update is looked at as well
    reached = look.reached(case, case.verdict(at), end)
    return _nearer(Found(end.best, end.distance, end.any), at, l2_lengths(at - x), reached)


def _adam(
    gradient: Inputs, mean: Inputs, square: Inputs, of_mean: Number, of_square: Number
) -> tuple[Inputs, Inputs, Inputs]:
    """Adam's step of length one and its new moments, element by element; the moments are short by the shares given."""
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient.square()
    return mean / of_mean / ((square / of_square).sqrt() + 1e-8), mean, square


class _Shrinking(NamedTuple):
    """A run of FISTA: where each example is, the point that looks ahead of it, and what was found."""

    x: Inputs
    y: Labels
    target: Labels
    constant: Numbers
    at: Inputs
    ahead: Inputs
    best: Inputs
    distance: Numbers
    any: Bool[Tensor, " B"]
    before: Numbers
    done: Bool[Tensor, " B"]


def _shrinking_steps(
    case: Case, look: _Look, step_size: float, l1_weight: float, lengths: Callable[[Inputs], Numbers]
) -> Steps:
    def step(state: _Shrinking, _kind: None, numbers: Tensor) -> _Shrinking:
        now, length, momentum = numbers.unbind()
        here = case.slope(state.ahead, state, look.loss)
        change = state.ahead - state.x
        slope = 2 * change - per_example(state.constant, change) * here.gradient
        moved = state.ahead - length * slope
        at = _shrunk(moved, state.x, l1_weight, case)
        reached = look.reached(case, case.verdict(at), state)
        new = _nearer(Found(state.best, state.distance, state.any), at, lengths(at - state.x), reached)
        value = sums(change.flatten(1).square()) - state.constant * here.value
        rested, before = look.rested(now, value, state.before)
        ahead = at + momentum * (at - state.at)
        return state._replace(at=at, ahead=ahead, before=before, done=rested, **new._asdict())

    numbers = look.table(case, lambda index: (step_size * math.sqrt(1 - index / look.steps), index / (index + 3)))
    return Steps(step, [None] * look.steps, numbers, capture=case.capture)


def _shrinking_run(rows: Examples, constant: Numbers, found: Found, *, steps: Steps) -> Found:
    fresh, far = torch.zeros_like(found.any), torch.full_like(constant, torch.inf)
    start = _Shrinking(*rows[:3], constant, rows.x, rows.x, found.best, found.distance, fresh, far, fresh)
    end = steps.carried_out(start)
    return Found(end.best, end.distance, end.any)


def _shrunk(moved: Inputs, x: Inputs, by: float, case: Case) -> Inputs:
    """Changes drawn towards zero by a length, and inside the box: changes that are no longer become none."""
    change = moved - x
    less = torch.where(change > 0, moved - by, moved + by).clamp(case.low, case.high)
    return torch.where(change.abs() > by, less, x)


def _check(steps: int, step_size: float, confidence: float, constant: float, search_steps: int) -> None:
    checks.count("steps", steps)
    checks.number("step_size", step_size, 0.0, open_low=True)
    checks.number("confidence", confidence, 0.0)
    checks.number("constant", constant, 0.0, open_low=True)
    checks.count("search_steps", search_steps, 0)

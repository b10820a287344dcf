"""Parts of attacks that minimise the distance to an adversarial point: margin loss, early abort, nearest point."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.bisection import Nearest
from dissensus.attacks.blocks import Steps
from dissensus.attacks.losses import margin, one_hot_mask
from dissensus.attacks.norms import LARGEST
from dissensus.attacks.problem import AttackProblem, HasLabels
from dissensus.attacks.rows import where_rows

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Numbers = Float[Tensor, " B"]

STALLED = 0.9999
"""A loss above this share of its value a tenth of all steps ago has converged."""


class DistanceMinimisation(NamedTuple):
    """Settings of one run: number of updates, confidence κ, and whether converged examples stop early."""

    steps: int
    confidence: float
    abort_early: bool

    def loss(self, scores: Float[Tensor, "K B C"], y: Labels, target: Labels | None) -> Float[Tensor, "K B"]:
        """−max(κ − margin, 0): the loss is negated because attacks raise losses."""
        return -(self.confidence - margin(scores, y, target)).clamp_min(0.0)

    def is_adversarial(
        self, problem: AttackProblem, scores: Float[Tensor, "B C"], rows: HasLabels
    ) -> Bool[Tensor, " B"]:
        """Whether the goal is reached with confidence κ."""
        if not self.confidence:
            return problem.is_adversarial(scores, rows)
        classes, handicap = (rows.target, -self.confidence) if problem.targeted else (rows.y, self.confidence)
        return problem.is_adversarial(scores + handicap * one_hot_mask(classes, problem.classes), rows)

    def updates(
        self,
        problem: AttackProblem,
        step: Callable[[Any, bool, Tensor], Any],
        numbers: Callable[[int], tuple[float, ...]],
    ) -> Steps:
        """All updates of a run.

        Args:
            problem: The attack's problem.
            step: ``(state, compares, numbers) -> state``. Ten of all steps compare losses, to find what has converged.
            numbers: Numbers of a step, which it reads on the device.
        """
        interval = math.ceil(self.steps / 10)
        compares = [self.abort_early and index % interval == 0 for index in range(self.steps)]
        rows = problem.examples.x.new_tensor([numbers(index) for index in range(self.steps)])
        return Steps(step, compares, rows, capture=problem.capture)


def converged(squared: Numbers, constant: Numbers, loss: Numbers, reference: Numbers) -> dict[str, Tensor]:
    """Which examples are done, because their objective has hardly fallen; and the value to compare with next time."""
    value = squared - constant * loss
    return {"done": value > STALLED * reference, "reference": value}


def nearer(nearest: Nearest, point: Inputs, length: Numbers, success: Bool[Tensor, " B"]) -> Nearest:
    """The nearest points so far, updated with adversarial points that are nearer."""
    closer = success & (length < nearest.distance)
    best = where_rows(closer, point, nearest.best)
    return Nearest(best, torch.where(closer, length, nearest.distance), nearest.success | success)


def check_settings(steps: int, step_size: float, confidence: float, constant: float, search_steps: int) -> None:
    """Refuse settings that make no sense."""
    checks.count("steps", steps)
    checks.number("step_size", step_size, 0.0, LARGEST, open_low=True)
    checks.number("confidence", confidence, 0.0, LARGEST)
    checks.number("constant", constant, 0.0, LARGEST, open_low=True)
    checks.count("search_steps", search_steps, 0)

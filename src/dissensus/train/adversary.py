"""Adversarial training: part of every batch is made as hard as it gets, for the weights of that very step."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.attacks.gradient import climbed
from dissensus.attacks.norms import NORMS, Ball, check_reach
from dissensus.randomness import Use, derived_seed, random_bits
from dissensus.train.inputs import Fed

Engine = Any
"""The engine, of which this asks for members, weights, the step's number and outputs; it knows this file, not the other
way round."""


@dataclass(frozen=True)
class AdversarialTraining:
    """How `dissensus.fit` attacks its own batches.

    Each step, a ``share`` of the batch, evenly spread, is replaced by adversarial examples against the weights of
    that step. Members are in evaluation mode meanwhile: no statistics move, no dropout is drawn, and no parameter gets
    a gradient. Everything is drawn by (seed, step) on the device, so that a step can be captured in a graph.

    Attributes:
        epsilon: ε, or a range from which each example draws its own (the ADP paper: 0.01 to 0.05).
        steps: Updates; 1 is FGSM.
        step_share: The length of each as a share of ε; by default 1 / steps, as the ADP paper has it.
        random_start: From a random point of the ball (PGD), or from the example itself.
        norm: ``"linf"`` or ``"l2"``.
        share: Of the batch that is attacked.
        against: Attack the ensemble's mean probability, with one example for all members, or each member for itself
            (of a masked network: the network).
        beside: Keep the clean batch whole, attack all of it, and give the objective members' outputs on the attacked
            one as ``adversarial``, as TRADES needs it (`dissensus.objectives.trades`); attacks then climb the
            divergence from clean outputs.
        box: Least and largest value of valid inputs.
    """

    epsilon: float | tuple[float, float]
    steps: int = 10
    step_share: float | None = None
    random_start: bool = True
    norm: Literal["linf", "l2"] = "linf"
    share: float = 0.5
    against: Literal["ensemble", "members"] = "ensemble"
    beside: bool = False
    box: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        low, high = self.range
        for end in (low, high):
            checks.number("epsilon", end, 0)
        if self.step_share is not None:
            checks.number("step_share", self.step_share, 0)
        if not low <= high:
            checks.refuse("epsilon", "be a number, or a range (low, high)", self.epsilon)
        checks.count("steps", self.steps)
        checks.one_of("norm", self.norm, NORMS)
        checks.number("share", self.share, 0, 1)
        checks.one_of("against", self.against, ("ensemble", "members"))
        if not self.box[0] < self.box[1]:
            checks.refuse("box", "be a pair low < high", self.box)
        check_reach(self.norm, high, self.box)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest ε."""
        return self.epsilon if isinstance(self.epsilon, tuple) else (self.epsilon, self.epsilon)


class Adversary:
    """Attacks batches of one run."""

    def __init__(self, told: AdversarialTraining, seed: int, device: torch.device) -> None:
        self.told = told
        self.sizes = torch.tensor(derived_seed(seed, Use.ATTACK_SIZE), device=device)
        self.starts = torch.tensor(derived_seed(seed, Use.ATTACK_START), device=device)
        self.per_member = told.against == "members"
        self.places: dict[int, Tensor] = {}
        """Which examples of a batch are attacked, by its size: made before a graph could not hold the making."""

    def given(self, engine: Engine, parts: Sequence[Fed], y: Tensor) -> list[Fed]:
        """What a step feeds, after an attack on its first part."""
        found = Fed(self.attacked(engine, parts[0].x, y), False, self.per_member)
        return [parts[0], found] if self.told.beside else [found, *parts[1:]]

    def attacked(self, engine: Engine, x: Tensor, y: Tensor) -> Tensor:
        """The batch ``[B, ...]`` with its share attacked, or ``[M, B, ...]``; all of it, where it stands beside."""
        if len(y) not in self.places:
            share = 1.0 if self.told.beside else self.told.share
            self.places[len(y)] = torch.tensor(evenly(len(y), share), dtype=torch.int64, device=y.device)
            self._check(x)
        rows = self.places[len(y)]
        own, labels = x[rows].detach(), y[rows]
        if self.per_member:
            own = own.expand(engine.members, *own.shape).flatten(0, 1)
        if len(rows):
            own = self._climbed(engine, own, labels)
        if self.per_member:
            own = own.unflatten(0, (engine.members, len(rows)))
            return x.expand(engine.members, *x.shape).index_copy(1, rows, own)
        return x.index_copy(0, rows, own)

    def _check(self, x: Tensor) -> None:
        low, high = (float(edge) for edge in x.aminmax())
        if not self.told.box[0] <= low <= high <= self.told.box[1]:
            fix = "Standardise inside the network, or give AdversarialTraining the box of your inputs."
            checks.refuse("box", "hold the inputs that are attacked", f"inputs from {low:g} to {high:g}", fix)

    def _climbed(self, engine: Engine, x: Tensor, labels: Tensor) -> Tensor:
        told, step = self.told, engine.ticks
        low, high = told.range
        ones = [1] * (x.ndim - 1)
        epsilon = low + (high - low) * _uniform((len(x), *ones), self.sizes, step, x)
        ball = Ball(told.norm, epsilon, *told.box)
        start = ball.random(x, random_bits((len(x),), self.starts, step).long()) if told.random_start else x
        training = engine.body.training
        engine.body.eval()
        try:
            gradient = functools.partial(_gradient, self._loss(engine, x, labels))
            length: Tensor = epsilon * (1 / told.steps if told.step_share is None else told.step_share)
            return climbed(gradient, x, start, ball=ball, steps=told.steps, step_size=length)
        finally:
            engine.body.train(training)

    def _loss(self, engine: Engine, x: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
        """What attacks climb: the loss on the labels, or the divergence from what members say of clean inputs."""
        members, mine = engine.members, self.per_member

        def outputs(at: Tensor) -> Tensor:
            at = at.unflatten(0, (members, -1)) if mine else at
            return engine.outputs(at, engine.flat.detach(), per_run=False, per_member=mine)[0]

        if self.told.beside:
            clean = outputs(x).detach()
            return lambda at: losses.divergence(clean, outputs(at)).sum()
        if mine:
            return lambda at: losses.cross_entropy(outputs(at), labels).sum()
        return lambda at: -losses.at_label(pooling.mean_probability(outputs(at)), labels).sum()


def evenly(batch: int, share: float) -> list[int]:
    """Places of a share of a batch, evenly spread.

    >>> tuple(evenly(8, 0.5)), tuple(evenly(3, 1.0)), tuple(evenly(4, 0.0))
    ((1, 3, 5, 7), (0, 1, 2), ())
    """
    return [i for i in range(batch) if int((i + 1) * share + 1e-9) > int(i * share + 1e-9)]


def _gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(at), at)
    return gradient


def _uniform(shape: tuple[int, ...], key: Tensor, step: Tensor, like: Tensor) -> Tensor:
    return random_bits(shape, key, step).to(like.dtype) / 2**31

"""Adversarial training: part of every batch is attacked with the weights of that step."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks, losses, pooling
from dissensus.attacks.gradient import climbed
from dissensus.attacks.norms import LARGEST, NORMS, Ball, check_reach
from dissensus.randomness import Use, derived_seed, random_bits
from dissensus.train.inputs import StepInput
from dissensus.train.state import TrainState


@dataclass(frozen=True)
class AdversarialTraining:
    """How `dissensus.fit` attacks its own batches.

    At each step a ``share`` of the batch, evenly spread, is replaced by adversarial examples against the weights of
    that step. During the attack members are in evaluation mode: statistics do not change, dropout is off, and no
    parameter gets a gradient. Random numbers are keyed by (seed, step) on the device, so that a step can be captured in
    a graph.

    Attributes:
        epsilon: ε, or a range from which it is drawn for each example (the ADP paper: 0.01 to 0.05).
        steps: Updates; 1 is FGSM.
        step_share: The length of each update as a share of ε; by default 1 / steps, as in the ADP paper.
        random_start: Start from a random point of the ball (PGD) instead of the example.
        norm: ``"linf"`` or ``"l2"``.
        share: The share of the batch that is attacked.
        against: Attack the ensemble's mean probability, with one example for all members, or each member separately
            (for a masked network: the network).
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
            checks.number("step_share", self.step_share, 0, LARGEST)
        if not low <= high:
            checks.refuse("epsilon", "be a number, or a range (low, high)", self.epsilon)
        checks.count("steps", self.steps)
        checks.one_of("norm", self.norm, NORMS)
        checks.number("share", self.share, 0, 1)
        checks.one_of("against", self.against, ("ensemble", "members"))
        if not isinstance(self.box, tuple | list) or len(self.box) != 2:
            checks.refuse("box", "be a pair low < high", repr(self.box), error=TypeError)
        if not checks.number("box", self.box[0]) < checks.number("box", self.box[1]):
            checks.refuse("box", "be a pair low < high", self.box)
        check_reach(self.norm, high, self.box)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest ε."""
        return self.epsilon if isinstance(self.epsilon, tuple) else (self.epsilon, self.epsilon)


@runtime_checkable
class Attackable(Protocol):
    """What an attack asks of an engine: its state, and member outputs."""

    state: TrainState

    @property
    def members(self) -> int:
        """Members per run, in all processes."""
        ...

    def outputs(
        self, x: Tensor, flat: Tensor | None = None, *, per_run: bool, per_member: bool = False
    ) -> Float[Tensor, "R M ..."]:
        """Member outputs per run."""
        ...


class Adversary:
    """Attacks batches of one run."""

    def __init__(self, settings: AdversarialTraining, seed: int, device: torch.device) -> None:
        self.settings = settings
        self.sizes = torch.tensor(derived_seed(seed, Use.ATTACK_SIZE), device=device)
        self.starts = torch.tensor(derived_seed(seed, Use.ATTACK_START), device=device)
        self.per_member = settings.against == "members"
        self.places: dict[int, Tensor] = {}
        """The attacked examples of a batch, by batch size; made before a graph is captured, which could not do it."""

    def step_inputs(self, engine: Attackable, inputs: Sequence[StepInput], y: Tensor) -> list[StepInput]:
        """The inputs of a step after an attack on the first of them."""
        x = inputs[0].x
        if not isinstance(x, Tensor):
            fix = "Attack a network whose other inputs are fixed inside of it."
            checks.refuse("adversarial", "come with networks of one input tensor", "several inputs", fix)
        attacked = StepInput(self.attacked(engine, x, y), False, self.per_member)
        return [inputs[0], attacked] if self.settings.beside else [attacked, *inputs[1:]]

    def attacked(self, engine: Attackable, x: Tensor, y: Tensor) -> Tensor:
        """The batch ``[B, ...]``, or ``[M, B, ...]``, with a share of it attacked; all of it with ``beside``."""
        members = engine.members
        if len(y) not in self.places:
            share = 1.0 if self.settings.beside else self.settings.share
            self.places[len(y)] = torch.tensor(evenly(len(y), share), dtype=torch.int64, device=y.device)
            self._check(x)
        rows = self.places[len(y)]
        inputs, labels = x[rows].detach(), y[rows]
        if self.per_member:
            inputs = inputs.expand(members, *inputs.shape).flatten(0, 1)
        if len(rows):
            inputs = self._climbed(engine, inputs, labels)
        if self.per_member:
            inputs = inputs.unflatten(0, (members, len(rows)))
            return x.expand(members, *x.shape).index_copy(1, rows, inputs)
        return x.index_copy(0, rows, inputs)

    def _check(self, x: Tensor) -> None:
        low, high = (float(edge) for edge in x.aminmax())
        if not self.settings.box[0] <= low <= high <= self.settings.box[1]:
            fix = "Standardise inside the network, or give AdversarialTraining the box of your inputs."
            checks.refuse("box", "hold the inputs that are attacked", f"inputs from {low:g} to {high:g}", fix)

    def _climbed(self, engine: Attackable, x: Tensor, labels: Tensor) -> Tensor:
        settings, step, body = self.settings, engine.state.ticks, engine.state.body
        low, high = settings.range
        ones = [1] * (x.ndim - 1)
        epsilon = low + (high - low) * _uniform((len(x), *ones), self.sizes, step, x)
        ball = Ball(settings.norm, epsilon, *settings.box)
        start = ball.random(x, random_bits((len(x),), self.starts, step).long()) if settings.random_start else x
        training = body.training
        body.eval()
        try:
            gradient = functools.partial(_gradient, self._loss(engine, x, labels))
            length: Tensor = epsilon * (1 / settings.steps if settings.step_share is None else settings.step_share)
            return climbed(gradient, x, start, ball=ball, steps=settings.steps, step_size=length)
        finally:
            body.train(training)

    def _loss(self, engine: Attackable, x: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
        """The loss that attacks climb: on the labels, or the divergence from members' outputs on clean inputs."""
        state, per_member = engine.state, self.per_member

        def outputs(inputs: Tensor) -> Tensor:
            inputs = inputs.unflatten(0, (engine.members, -1)) if per_member else inputs
            return engine.outputs(inputs, state.flat.detach(), per_run=False, per_member=per_member)[0]

        if self.settings.beside:
            clean = outputs(x).detach()
            return lambda inputs: losses.divergence(clean, outputs(inputs)).sum()
        if per_member:
            return lambda inputs: losses.cross_entropy(outputs(inputs), labels).sum()
        return lambda inputs: -losses.at_label(pooling.mean_probability(outputs(inputs)), labels).sum()


def evenly(batch: int, share: float) -> list[int]:
    """Indices of a share of a batch, evenly spread.

    >>> tuple(evenly(8, 0.5)), tuple(evenly(3, 1.0)), tuple(evenly(4, 0.0))
    ((1, 3, 5, 7), (0, 1, 2), ())
    """
    return [i for i in range(batch) if int((i + 1) * share + 1e-9) > int(i * share + 1e-9)]


def _gradient(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x)
    return gradient


def _uniform(shape: tuple[int, ...], key: Tensor, step: Tensor, like: Tensor) -> Tensor:
    return random_bits(shape, key, step).to(like.dtype) / 2**31

"""Points from anywhere, judged as attacks are: noise, transfer, attacks without a bound, and models in disguise."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from dissensus import checks
from dissensus.attacks.case import Adversarial, Box, Examples, opened
from dissensus.attacks.noise import keys
from dissensus.attacks.norms import Ball, NormName, per_example
from dissensus.attacks.victim import Model, PoolName, Victim

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Craft = Callable[..., Adversarial | Tensor]
"""``(model, x, y) -> `` points to be tried: inputs, or what an attack returns."""


def tried(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    craft: Craft,
    epsilon: float,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """What a way of making points breaks: those that lie within ε and in the box, and that the model has wrong.

    Args:
        model: And ``x``, ``y``, ``norm``, ``box``: see `fgsm`.
        craft: Makes a point for every example that the model has right, by whatever means, such as a
            ``functools.partial`` of `carlini_wagner`, or of `perturbed` with the number of a member.
        epsilon: ε. Points beyond it do not count.
        pool: How the members' outputs become the verdict, whatever the points were crafted on.
    """
    with opened(model, x, y, target=None, pool=pool, box=box) as case:
        ball = Ball.checked(norm, epsilon, (case.low, case.high), x)

        def run(rows: Examples) -> Tensor:
            found = craft(model, rows.x, rows.y)
            return found.inputs if isinstance(found, Adversarial) else found

        return case.attempted([run], ball.lengths, ball.limit)


def elsewhere(_model: Model, x: Inputs, y: Labels, *, source: Model, craft: Craft) -> Adversarial | Tensor:
    """Points that are crafted on another model."""
    return craft(source, x, y)


def rescaled(model: Model, x: Inputs, y: Labels, *, craft: Craft, pool: PoolName) -> Adversarial | Tensor:
    """Points that are crafted on the model with its scores brought to a spread of one (see `Rescaled`)."""
    return craft(Rescaled(model, pool), x, y)


def averaged(model: Model, x: Inputs, y: Labels, *, craft: Craft, passes: int) -> Adversarial | Tensor:
    """Points that are crafted on the mean of several passes of a model that draws at random (see `Passes`)."""
    return craft(Passes(model, passes), x, y)


def random_noise(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    epsilon: float,
    draws: int = 10,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Random points of the ball: what no attack should be weaker than.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``box``: see `fgsm`.
        epsilon: ε.
        draws: How many points are tried on an example.
        seed: Of the points, which are drawn as the starts of `pgd`.
    """
    checks.count("draws", draws)
    checks.count("seed", seed, 0)
    with opened(model, x, y, target=None, pool=pool, box=box) as case:
        ball = Ball.checked(norm, epsilon, (case.low, case.high), x)

        def drawn(draw: int) -> Callable[[Examples], Tensor]:
            return lambda rows: ball.random(rows.x, keys(rows.x, seed, draw))

        return case.attempted([drawn(draw) for draw in range(draws)], ball.lengths, ball.limit)


class Pooled(nn.Module):
    """An ensemble as one classifier: the pooled scores that its predictions are read from, ``[B, C]``."""

    def __init__(self, model: Model, pool: PoolName) -> None:
        super().__init__()
        self.inner, self.victim = _held(model), Victim(model, pool)

    def forward(self, x: Inputs) -> Float[Tensor, "B C"]:
        """The verdict."""
        return self.victim.verdict(self.victim.outputs(x))


class Rescaled(nn.Module):
    """A model's pooled scores, divided by their own spread: cross-entropy has a slope however large logits are.

    >>> model = Rescaled(lambda x: 1e4 * x, "probability")
    >>> model(torch.tensor([[0.0, 2.0]]))
    tensor([[-1.,  1.]])
    """

    def __init__(self, model: Model, pool: PoolName) -> None:
        super().__init__()
        self.inner, self.victim = _held(model), Victim(model, pool)

    def forward(self, x: Inputs) -> Float[Tensor, "B C"]:
        """Scores of mean zero; of one model with as many rows as examples."""
        scores = self.victim.scores(self.victim.outputs(x)).mean(0)
        spread = scores.detach() - scores.detach().mean(-1, keepdim=True)
        size = spread.abs().amax(-1).clamp_min(torch.finfo(scores.dtype).tiny)
        return (scores - scores.detach().mean(-1, keepdim=True)) / per_example(size, scores)


class Passes(nn.Module):
    """Several passes as if each had members of its own: ``[passes · M, B, C]``, so that gradients are their mean's."""

    def __init__(self, model: Model, passes: int) -> None:
        super().__init__()
        self.inner, self.victim, self.passes = _held(model), Victim(model, "probability"), passes

    def forward(self, x: Inputs) -> Float[Tensor, "K B C"]:
        """Raw outputs of all passes."""
        return torch.cat([self.victim.outputs(x) for _ in range(self.passes)])


def _held(model: Model) -> Any:
    """What a module around a model must hold so that its device and mode are the model's."""
    if isinstance(model, nn.Module):
        return model
    parts = list(model) if isinstance(model, Sequence) else [getattr(model, "__self__", None)]
    return nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])

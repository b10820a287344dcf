"""Points crafted by any means and tested like the results of attacks; and models to craft them on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from dissensus import checks
from dissensus.attacks.norms import Ball, NormName, per_example
from dissensus.attacks.problem import Adversarial, Box, Examples, attack_problem
from dissensus.attacks.target_model import Model, PoolName, TargetModel

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Craft = Callable[..., Adversarial | Tensor]
"""``(model, x, y) -> `` points to be tested: inputs, or the result of an attack."""


def tried(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    craft: Craft,
    epsilon: float,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    clip: bool = False,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Test crafted points: a success lies within ε and in the box, and the model misclassifies it.

    Args:
        model: And ``x``, ``y``, ``norm``, ``box``: see `fgsm`.
        craft: Makes a point for every example that the model classifies correctly, by any means, such as a
            ``functools.partial`` of `carlini_wagner`, or of `perturbed` with the number of a member.
        epsilon: ε. Points farther away do not count.
        pool: How member outputs are pooled for the test; independent of what the points were crafted on.
        clip: Project points onto the ball and the box before they are tested.
    """
    with attack_problem(model, x, y, target=None, pool=pool, box=box) as problem:
        ball = Ball.checked(norm, epsilon, (problem.low, problem.high), x)

        def run(rows: Examples) -> Tensor:
            crafted = craft(model, rows.x, rows.y)
            points = crafted.inputs if isinstance(crafted, Adversarial) else crafted
            if not isinstance(points, Tensor) or points.shape != rows.x.shape:
                got = checks.shape_text(points.shape) if isinstance(points, Tensor) else type(points).__name__
                checks.refuse("craft", f"return inputs {checks.shape_text(rows.x.shape)}, or an Adversarial", got)
            points = points.detach().to(rows.x)
            return ball.projected(rows.x, points) if clip else points

        return problem.solve([run], ball.lengths, ball.limit)


def craft_on_source(_model: Model, x: Inputs, y: Labels, *, source: Model, craft: Craft) -> Adversarial | Tensor:
    """Points crafted on another model."""
    return craft(source, x, y)


def craft_on_rescaled(model: Model, x: Inputs, y: Labels, *, craft: Craft, pool: PoolName) -> Adversarial | Tensor:
    """Points crafted on the model with its scores rescaled to a spread of one (see `RescaledModel`)."""
    return craft(RescaledModel(model, pool), x, y)


def craft_on_repeated_passes(model: Model, x: Inputs, y: Labels, *, craft: Craft, passes: int) -> Adversarial | Tensor:
    """Points crafted on the mean of several passes of a stochastic model (see `RepeatedPasses`)."""
    return craft(RepeatedPasses(model, passes), x, y)


class PooledModel(nn.Module):
    """An ensemble as one classifier ``x -> [B, C]``: the pooled scores that its predictions are read from."""

    def __init__(self, model: Model, pool: PoolName) -> None:
        super().__init__()
        self.inner, self.target_model = _submodules(model), TargetModel(model, pool)

    def forward(self, x: Inputs) -> Float[Tensor, "B C"]:
        """Pooled scores."""
        return self.target_model.pooled_scores(self.target_model.outputs(x))


class RescaledModel(nn.Module):
    """A model's pooled scores divided by their spread, so that cross-entropy has a gradient however large logits are.

    >>> model = RescaledModel(lambda x: 1e4 * x, "probability")
    >>> model(torch.tensor([[0.0, 2.0]]))
    tensor([[-1.,  1.]])
    """

    def __init__(self, model: Model, pool: PoolName) -> None:
        super().__init__()
        self.inner, self.target_model = _submodules(model), TargetModel(model, pool)

    def forward(self, x: Inputs) -> Float[Tensor, "B C"]:
        """Scores with mean zero."""
        scores = self.target_model.attacked_scores(self.target_model.outputs(x)).mean(0)
        spread = scores.detach() - scores.detach().mean(-1, keepdim=True)
        size = spread.abs().amax(-1).clamp_min(torch.finfo(scores.dtype).tiny)
        return (scores - scores.detach().mean(-1, keepdim=True)) / per_example(size, scores)


class RepeatedPasses(nn.Module):
    """Several passes of a stochastic model as members, ``[passes · M, B, C]``: gradients are those of their mean."""

    def __init__(self, model: Model, passes: int) -> None:
        super().__init__()
        self.inner, self.target_model = _submodules(model), TargetModel(model, "probability")
        self.passes = passes

    def forward(self, x: Inputs) -> Float[Tensor, "K B C"]:
        """Raw outputs of all passes."""
        return torch.cat([self.target_model.outputs(x) for _ in range(self.passes)])


def _submodules(model: Model) -> Any:
    """Modules that a wrapper must register so that its device and mode are the model's."""
    if isinstance(model, nn.Module):
        return model
    entries = list(model) if isinstance(model, Sequence) else [getattr(model, "__self__", None)]
    return nn.ModuleList([entry for entry in entries if isinstance(entry, nn.Module)])

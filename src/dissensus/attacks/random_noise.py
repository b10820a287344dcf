"""Random points of the ball: the baseline that every attack should exceed."""

from collections.abc import Callable

from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.norms import Ball, NormName
from dissensus.attacks.problem import Adversarial, Box, Examples, attack_problem
from dissensus.attacks.random_numbers import keys
from dissensus.attacks.target_model import Model, PoolName


@arrays_taken
def random_noise(
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    epsilon: float,
    draws: int = 10,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Random points of the ball, until one is misclassified.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``box``: see `fgsm`.
        epsilon: ε.
        draws: Largest number of points per example.
        seed: Seed of the points, which are drawn like the starts of `pgd`.
    """
    checks.count("draws", draws)
    checks.count("seed", seed, 0)
    with attack_problem(model, x, y, target=None, pool=pool, box=box) as problem:
        ball = Ball.checked(norm, epsilon, (problem.low, problem.high), x)

        def random_points(draw: int) -> Callable[[Examples], Tensor]:
            return lambda rows: ball.random(rows.x, keys(rows.x, seed, draw))

        return problem.solve([random_points(draw) for draw in range(draws)], ball.lengths, ball.limit)

"""PGD, projected gradient descent from random starts (Madry et al., 2018)."""

from jaxtyping import Float, Integer
from torch import Tensor

from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.gradient import GradientSteps, gradient_attack
from dissensus.attacks.norms import NormName
from dissensus.attacks.problem import Adversarial, Box
from dissensus.attacks.target_model import Model, PoolName


@arrays_taken
def pgd(
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    epsilon: float,
    steps: int = 10,
    step_size: float | None = None,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Integer[Tensor, " B"] | None = None,
    restarts: int = 1,
    stop: bool = True,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Projected gradient descent: `bim` from points drawn uniformly from the ball.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`; ``stop``: see `bim`.
        epsilon: ε.
        steps: Number of updates of each restart.
        step_size: Length of each update; 2.5 ε / steps by default, which reaches the edge from any start.
        restarts: Number of starts that are tried on an example before it counts as a failure.
        seed: Seed of the starts. A start is drawn from (seed, restart, the example's values), so it does not depend
            on batch or order, and more restarts are never weaker.
    """
    settings = GradientSteps(
        norm, epsilon, steps, step_size, path=2.5, stop=stop, random_start=True, seed=seed, restarts=restarts
    )
    return gradient_attack(model, x, y, settings, pool=pool, target=target, box=box)

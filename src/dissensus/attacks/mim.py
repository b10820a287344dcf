"""MIM, the momentum iterative method (Dong et al., 2018)."""

from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.gradient import GradientSteps, gradient_attack
from dissensus.attacks.norms import LARGEST, NormName
from dissensus.attacks.problem import Adversarial, Box
from dissensus.attacks.target_model import Model, PoolName


@arrays_taken
def mim(
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    epsilon: float,
    steps: int = 10,
    step_size: float | None = None,
    decay: float = 1.0,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Integer[Tensor, " B"] | None = None,
    stop: bool = True,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """The momentum iterative method: g ← μ g + ∇ / ‖∇‖₁, with steps along g.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`; ``stop``: see `bim`.
        epsilon: ε.
        steps: Number of updates.
        step_size: Length of each update; ε / steps by default.
        decay: μ.
    """
    checks.number("decay", decay, 0.0, LARGEST)
    settings = GradientSteps(norm, epsilon, steps, step_size, stop=stop, decay=decay)
    return gradient_attack(model, x, y, settings, pool=pool, target=target, box=box)

"""BIM, the basic iterative method: FGSM in small steps (Kurakin et al., 2017)."""

from jaxtyping import Float, Integer
from torch import Tensor

from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.gradient import GradientSteps, gradient_attack
from dissensus.attacks.norms import NormName
from dissensus.attacks.problem import Adversarial, Box
from dissensus.attacks.target_model import Model, PoolName


@arrays_taken
def bim(
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
    stop: bool = True,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """The basic iterative method: `fgsm` in small steps, starting at the clean input.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``, ``target``, ``box``: see `fgsm`.
        epsilon: ε.
        steps: Number of updates.
        step_size: Length of each update; ε / steps by default.
        stop: Leave an example at its first adversarial point, which also saves time. False: every example takes all
            steps and its last point counts, as in the papers.
    """
    settings = GradientSteps(norm, epsilon, steps, step_size, stop=stop)
    return gradient_attack(model, x, y, settings, pool=pool, target=target, box=box)
